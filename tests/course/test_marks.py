"""Marks: texts stand where they are asked to, in pixels and in SVG; boxes fill what they say."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from nsa_tutorial.course.figures import INKS, PALETTE, Picture
from nsa_tutorial.course.marks import Marks, named

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figure() -> Figure:
    """4 by 3 inches, empty."""
    return Figure(figsize=(4, 3), dpi=100)


@pytest.fixture
def marks(figure: Figure) -> Marks:
    """On axes of 2 by 1 inches, an inch from the left and from below, from 0 to 10 and to 5."""
    axis = figure.add_axes((1 / 4, 1 / 3, 2 / 4, 1 / 3))
    axis.set_axis_off()
    axis.set(xlim=(0, 10), ylim=(0, 5))
    return Marks(axis, axis.transData)


def texts(figure: Figure) -> dict[str, ElementTree.Element]:
    drawn = ElementTree.fromstring(Picture(figure, "a test").svg())
    return {text.text: text for text in drawn.iter(f"{SVG}text")}


def inked(figure: Figure) -> tuple[int, int, int, int]:
    """Rows and columns of the picture that are not white, at 100 pixels an inch."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    dark = np.asarray(canvas.buffer_rgba())[..., :3].min(-1) < 128
    rows, columns = (np.flatnonzero(dark.any(axis)) for axis in (1, 0))
    return rows[0], rows[-1], columns[0], columns[-1]


def test_a_text_in_svg_stands_at_its_place(figure: Figure, marks: Marks) -> None:
    marks.words([(5, 2.5, "left")], size=8, ha="left", va="baseline")
    marks.words([(5, 2.5, "right")], size=8, ha="right", va="baseline", offset=(3, 4))
    told = texts(figure)
    # the middle of the axes: 2 inches from the left, 1.5 from the top
    assert (float(told["left"].get("x")), float(told["left"].get("y"))) == (144, 108)
    width = float(told["right"].get("textLength"))
    assert float(told["right"].get("x")) == pytest.approx(144 + 3 - width, abs=0.02)
    assert float(told["right"].get("y")) == 104


@pytest.mark.parametrize("angle", [0, 90], ids=["across", "upwards"])
@pytest.mark.parametrize("text", ["HHH", "HHH\nHHH", "H\nHHH\nH"], ids=["one", "two", "three"])
def test_a_centred_text_is_centred_in_pixels(
    figure: Figure, marks: Marks, text: str, angle: int
) -> None:
    marks.words([(5, 2.5, text)], size=20, angle=angle)
    top, bottom, left, right = inked(figure)
    assert (top + bottom) / 2 == pytest.approx(150, abs=2)
    assert (left + right) / 2 == pytest.approx(200, abs=2)
    if "\n" not in text:
        assert bool(right - left > bottom - top) is (angle == 0)


@pytest.mark.parametrize("text", ["Hgj", "Hgj\nHgj"], ids=["one line", "two lines"])
@pytest.mark.parametrize(("va", "above"), [("bottom", True), ("top", False)])
def test_a_text_keeps_to_its_side(
    figure: Figure, marks: Marks, text: str, va: str, above: bool
) -> None:
    marks.words([(5, 2.5, text)], size=20, va=va)
    top, bottom, *_ = inked(figure)
    assert bool(bottom <= 151) is above
    assert bool(top >= 149) is not above


def test_lines_follow_each_other_downwards(figure: Figure, marks: Marks) -> None:
    marks.text(0, 5, "first\nsecond", 10, va="baseline", spacing=1.5)
    told = texts(figure)
    assert float(told["second"].get("y")) - float(told["first"].get("y")) == pytest.approx(15)
    assert told["first"].get("x") == told["second"].get("x")


def test_boxes_fill_what_they_say(figure: Figure, marks: Marks) -> None:
    marks.boxes([(2, 1, 4, 2)], "black")
    top, bottom, left, right = inked(figure)
    # x: 1 inch + 2 / 10 of 2 inches; y: from below, 1 inch + 1 / 5 of an inch
    assert (left, right) == pytest.approx((140, 219), abs=1)
    assert (top, bottom) == pytest.approx((140, 179), abs=1)


def test_a_dot_is_as_wide_as_it_is_told(figure: Figure, marks: Marks) -> None:
    marks.dots([(5, 2.5)], "black", 36, markeredgewidth=0)
    top, bottom, left, right = inked(figure)
    assert (left, right) == pytest.approx((175, 224), abs=1), "36 points are 50 pixels"
    assert (top, bottom) == pytest.approx((125, 174), abs=1)


def test_a_colour_for_all_or_for_each(figure: Figure, marks: Marks) -> None:
    marks.words([(0, 0, "a"), (1, 0, "b")], colour="key")
    marks.words([(0, 1, "c"), (1, 1, "d")], colour=["query", "#112233"])
    fills = {name: text.get("fill").upper() for name, text in texts(figure).items()}
    assert fills == {
        "a": INKS["key"], "b": INKS["key"], "c": INKS["query"], "d": "#112233",
    }  # fmt: skip
    shares = np.eye(4)
    assert named(shares) is shares
    assert named(["key", "none"]) == [PALETTE["key"], "none"]


def test_pixels_and_svg_have_the_same_words(figure: Figure, marks: Marks) -> None:
    blank = Picture(figure, "a test").png()
    marks.text(5, 2.5, "title")
    assert "title" in texts(figure)
    drawn = Picture(figure, "a test").png()
    assert Image.open(io.BytesIO(drawn)).size == (800, 600)
    assert drawn != blank
