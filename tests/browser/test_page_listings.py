"""Listings as a reader sees them, in JupyterLab and Notebook 7, in both themes: readable, level,
and linked to their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from lab import CHROMIUM, Lab
from places import pairwise

import nsa_tutorial
from nsa_tutorial.course import show, side_by_side
from nsa_tutorial.course.listing import Listing, SideBySide, needed
from nsa_tutorial.course.listing_style import GAP, style

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, tests/course/test_listings.py reads what is written
]

PACKAGE = Path(nsa_tutorial.__file__).parent
KERNELS = [
    "nsa_tutorial.sparse.selected_attention:forward",
    "nsa_tutorial.kernels.tilelang.selected.forward:build_kernel",
    "nsa_tutorial.kernels.triton.selected.forward:kernel",
]
PTX = Listing(
    "PTX from Triton: 3 lines",
    "$L__BB0_1: // loop\nmov.u32 %r1, %ctaid.x;\n@%p1 bra $L__BB0_1;\n",
    "ptx",
    note="The label `$L__BB0_1` begins the loop.",
)
SHOWN = [
    show(KERNELS[2]),
    side_by_side(*KERNELS, phase="online softmax"),
    side_by_side(*KERNELS[1:], phase="guard"),
    side_by_side(*KERNELS),
    PTX,
]
TRUSTED, UNTRUSTED = "notebooks/trusted.ipynb", "notebooks/untrusted.ipynb"
VIEWS = [
    pytest.param(
        {"app": app, "theme": theme, "size": size},
        id=f"{app}-{theme}-{size[0]}x{size[1]}",
    )
    for app, theme, size in pairwise(
        ("lab", "notebook"), ("light", "dark"), ((1440, 900), (1280, 720))
    )
]

# Each text of a listing with its contrast: its computed colour over the nearest ground, which must
# be opaque. A line's number is its `::before`.
CONTRASTS = """
listing => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = numbers(colour).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const isClear = colour => numbers(colour).length === 4 && numbers(colour)[3] < 1;
  const ground = e => {
    while (isClear(getComputedStyle(e).backgroundColor)) e = e.parentElement;
    return getComputedStyle(e).backgroundColor;
  };
  const found = [];
  const note = (text, style, e) => {
    const [low, high] = [light(style.color), light(ground(e))].sort((a, b) => a - b);
    found.push([text, (high + 0.05) / (low + 0.05), parseFloat(style.fontSize)]);
  };
  for (const e of [listing, ...listing.querySelectorAll('*')]) {
    const text = [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
    if (text) note(text, getComputedStyle(e), e);
    const before = getComputedStyle(e, '::before');
    if (before.content !== 'none') note('number', before, e);
  }
  return found;
}
"""
# The columns' left edges, the top of each phase in each column, the tallest line, and the widths.
LAYOUT = """
row => {
  const box = e => e.getBoundingClientRect(), listings = [...row.querySelectorAll('.nsa-listing')];
  return {
    width: box(row).width,
    lefts: listings.map(e => box(e).left),
    tops: listings.map(e => Object.fromEntries(
      [...e.querySelectorAll('.marker')].map(m => [m.textContent, box(m).top]))),
    gaps: [...row.querySelectorAll('.nsa-gap')].map(e => box(e).height),
    tallest: Math.max(...[...row.querySelectorAll('.line')].map(e => box(e).height)),
    scrolls: listings.map(e => e.querySelector('pre')).map(e => e.scrollWidth > e.clientWidth),
    overflow: row.scrollWidth - row.clientWidth,
  };
}
"""


def codes() -> list[str]:
    """What each `<pre>` of the notebook holds, in order."""
    listings = [s.listings if isinstance(s, SideBySide) else (s,) for s in SHOWN]
    return [listing.code for group in listings for listing in group]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").mkdir()
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    )
    for i, shown in enumerate(SHOWN):
        data = {"text/plain": repr(shown), "text/html": shown._repr_html_()}
        output = nbformat.v4.new_output("display_data", data)
        notebook.cells.append(nbformat.v4.new_code_cell("...", id=f"cell-{i}", outputs=[output]))
    nbformat.write(notebook, folder / UNTRUSTED)
    notebook.cells.append(nbformat.v4.new_code_cell("'signed'", id="signed"))
    nbformat.write(notebook, folder / TRUSTED)
    server = Lab(folder)
    server.set("notebook-extension/tracker", windowingMode="none")  # draws cells out of view, too
    server.trust(TRUSTED)
    yield server
    server.close()


def opened(lab: Lab, notebook: str, **view: object):
    page = lab.open(notebook, **view)
    lab.wait(lambda: page.locator(".jp-OutputArea pre").count() >= len(codes()), "the listings")
    return page


@pytest.fixture(scope="module", params=VIEWS)
def page(lab: Lab, request: pytest.FixtureRequest) -> Iterator:
    shown = opened(lab, TRUSTED, **request.param)
    yield shown
    shown.close()


def test_every_token_is_readable(page) -> None:
    """4.5:1 and 12 pixels, for all text and every line number."""
    listings = page.locator(".nsa-listing").all()
    assert len(listings) == len(codes())
    for listing in listings:
        found = listing.evaluate(CONTRASTS)
        assert len(found) > 5
        assert [text for text, contrast, size in found if contrast < 4.5 or size < 12] == []


def test_rows_are_level_where_columns_fit_and_columns_are_stacked_where_not(page) -> None:
    columns = [shown.listings for shown in SHOWN if isinstance(shown, SideBySide)]
    for row, listings in zip(page.locator(".nsa-row").all(), columns, strict=True):
        layout = row.evaluate(LAYOUT)
        widths = [needed(listing) for listing in listings]
        assert layout["tallest"] <= 19, "a line was wrapped"
        assert layout["overflow"] <= 0, "the columns scroll one by one, not together"
        if layout["width"] < sum(widths) + GAP * (len(widths) - 1):
            assert len(set(layout["lefts"])) == 1
            assert not any(layout["gaps"])
        else:
            assert layout["lefts"] == sorted(set(layout["lefts"]))
            assert not any(layout["scrolls"]), "a line is cut"
            first, *others = layout["tops"]
            assert first
            for tops in others:
                assert tops == {name: pytest.approx(top, abs=0.5) for name, top in first.items()}


def test_a_shared_name_has_one_colour_and_the_rest_is_muted(page) -> None:
    colours = page.locator(".nsa-muted").first.evaluate(
        "row => [...row.querySelectorAll('.line span')]"
        ".map(e => [e.className, e.textContent, getComputedStyle(e).color])"
    )
    shared = {(text, colour) for name, text, colour in colours if name.startswith("shared")}
    muted = {colour for name, _, colour in colours if not name.startswith(("shared", "marker"))}
    assert len(shared) == len({text for text, _ in shared}) >= 8
    assert len(muted) == 1
    assert not muted & {colour for _, colour in shared}


def test_line_numbers_are_those_of_the_file(page) -> None:
    """What the browser counts stands in its layout alone: no script can read it."""
    session = page.context.new_cdp_session(page)
    snapshot = session.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
    strings, texts = snapshot["strings"], snapshot["documents"][0]["layout"]["text"]
    words = [strings[i] for i in texts if i >= 0]
    for kernel in KERNELS:
        listing = show(kernel, "online softmax")
        marker = "# -- online softmax --"
        numbers = [words[i - 1] for i, word in enumerate(words) if word == marker]
        assert str(listing.first) in numbers


def test_what_is_copied_is_the_code(page) -> None:
    for pre, code in zip(page.locator(".nsa-listing pre").all(), codes(), strict=True):
        copied = pre.evaluate(
            "e => { const s = getSelection(); s.selectAllChildren(e); return s.toString(); }"
        )
        assert copied.rstrip() == code.rstrip()


def test_the_pointer_does_not_change_the_ground(page) -> None:
    pre = page.locator(".nsa-listing pre").nth(1)
    ground = "e => getComputedStyle(e).backgroundColor"
    before = pre.evaluate(ground)
    pre.hover()
    assert pre.evaluate(ground) == before


def test_the_title_opens_the_file_at_its_line(lab: Lab) -> None:
    page = opened(lab, TRUSTED)
    page.locator(".nsa-listing a.nsa-file").nth(1).click()
    page.wait_for_selector(".jp-FileEditor")
    first = show(KERNELS[0], "online softmax").first
    page.wait_for_selector(f"#jp-main-statusbar :text('Ln {first}, Col 1')", timeout=30_000)
    assert page.locator(".lm-TabBar-tabLabel:text-is('selected_attention.py')").count() == 1
    page.close()


def test_an_untrusted_notebook_shows_the_code_and_nothing_else(lab: Lab) -> None:
    """JupyterLab drops its style; one that another output brings numbers no line of it wrongly."""
    page = opened(lab, UNTRUSTED, theme="dark")
    page.add_style_tag(content=style([300] * 3).removeprefix("<style>").removesuffix("</style>"))
    listings = page.locator(".nsa-listing pre")
    assert listings.all_text_contents() == [code.rstrip() + "\n" for code in codes()]
    number = "e => getComputedStyle(e.querySelector('.line'), '::before').content"
    assert {pre.evaluate(number) for pre in listings.all()} == {"none"}
    assert json.loads(page.evaluate("document.body.dataset.jpThemeLight")) is False
    page.close()
