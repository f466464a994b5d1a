"""The diagram of NSA: each chapter's part is in colour, and only that."""

from __future__ import annotations

import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nsa_tutorial.course.data_flow import data_flow
from nsa_tutorial.course.figures import PALETTE

HERE = ("compression", "selection", "selected_attention", "all", "kernels")
BRANCHES = ("compressed", "selected", "window")


def filled(figure: Figure) -> set[str]:
    """The branches' colours that fill a box."""
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return {
        name for name in BRANCHES
        if any(same_color(box.get_facecolor(), PALETTE[name]) for box in boxes)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ("compression", {"compressed"}),
        ("selection", {"selected"}),
        ("selected_attention", {"selected", "window"}),
        ("kernels", {"selected", "window"}),
        ("all", set(BRANCHES)),
        (None, set(BRANCHES)),
    ],
)
def test_the_part_of_a_chapter_is_in_colour(here: str | None, expected: set[str]) -> None:
    assert filled(data_flow(here).figure) == expected


@pytest.mark.parametrize("here", HERE)
def test_each_is_small_and_says_you_are_here(here: str) -> None:
    picture = data_flow(here)
    assert picture.finding.startswith("You are here: ")
    assert len(picture.png()) < 60 * 1024
    assert (picture.size < data_flow().size) == (here != "all")


def test_the_findings_differ() -> None:
    assert len({data_flow(here).finding for here in (*HERE, None)}) == len(HERE) + 1


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        data_flow("compresion")
