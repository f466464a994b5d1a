"""The moving figures of the kernels' chapters, in a browser: what is their own of it. What all
figures can do is in test_page_moving.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import CHROMIUM
from test_page_moving import Explorer, at, browser  # noqa: F401

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, test_page_moving.py moves each figure
]


def test_inverse_follows_a_mouse_that_passes(browser, tmp_path: Path) -> None:  # noqa: F811
    """And one that is pressed keeps the row; keys move both."""
    shown = Explorer(browser, tmp_path, name="inverse")
    mask, turned = (shown.page.locator(".pick").nth(i) for i in (0, 1))
    mouse = shown.page.mouse
    mouse.move(*at(mask.bounding_box(), 0.5, 20.5 / 48))
    shown.says("d_q of query 20 ")
    mouse.move(0, 0)
    shown.says("d_q of query 37 ")
    mouse.click(*at(turned.bounding_box(), 0.5, 0.5 / 12))
    mouse.move(0, 0)
    shown.says("d_k of block 0 is a sum over the 48 queries")
    mask.focus()
    for key, said in (("ArrowDown", "query 38 "), ("ArrowRight", "block 1 "), ("End", "query 47 ")):
        shown.page.keyboard.press(key)
        shown.says(said)
    assert mask.get_attribute("aria-valuenow") == "47"
    live = shown.page.get_by_role("status")
    live.filter(has_text="query 47").wait_for(state="attached", timeout=5000)
    shown.close()


def test_inverse_adds_in_another_order(browser, tmp_path: Path) -> None:  # noqa: F811
    shown = Explorer(browser, tmp_path, 390, "inverse", has_touch=True, is_mobile=True)
    shown.page.locator("summary").tap()
    shown.control("added by").select_option("slots, by atomics")
    shown.control("block").fill("0")
    shown.says("100 runs give")
    before = shown.page.locator(".said").text_content()
    shown.page.get_by_role("button", name="Another run").tap()
    shown.page.wait_for_url("**#inverse?*run=1*")
    assert shown.page.locator(".said").text_content() != before
    shown.page.get_by_role("button", name="Play").tap()
    shown.says("of 48 parts are added to block 0.")
    shown.control("block").fill("11")  # four parts: soon done
    shown.page.get_by_role("button", name="Play").wait_for(timeout=20_000)
    shown.says("100 runs give")
    shown.close()
