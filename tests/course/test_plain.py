"""Plain axes: the marks stand where matplotlib's own would."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from nsa_tutorial.course import plain
from nsa_tutorial.course.figures import Picture

SVG = "{http://www.w3.org/2000/svg}"


def axes():
    figure = plain.plain_figure(4, 3)
    return figure, plain.plain_axes(figure, (1, 1, 2, 1), (0, 10), (0, 5))


def texts(figure):
    drawn = ElementTree.fromstring(Picture(figure, "a test").svg())
    return {text.text: text for text in drawn.iter(f"{SVG}text")}


def inked(figure):
    """Rows and columns of the picture that are not white, at 100 pixels an inch."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    dark = np.asarray(canvas.buffer_rgba())[..., :3].min(-1) < 128
    rows, columns = (np.flatnonzero(dark.any(axis)) for axis in (1, 0))
    return rows[0], rows[-1], columns[0], columns[-1]


def test_a_text_in_svg_stands_at_its_place():
    figure, axis = axes()
    plain.words(axis, [(5, 2.5, "left")], ha="left", va="baseline")
    plain.words(axis, [(5, 2.5, "right")], ha="right", va="baseline", offset=(3, 4))
    told = texts(figure)
    # the middle of the axes: 2 inches from the left, 1.5 from the top
    assert (float(told["left"].get("x")), float(told["left"].get("y"))) == (144, 108)
    width = float(told["right"].get("textLength"))
    assert float(told["right"].get("x")) == pytest.approx(144 + 3 - width, abs=0.02)
    assert float(told["right"].get("y")) == 104


@pytest.mark.parametrize("angle", [0, 90], ids=["across", "upwards"])
def test_a_centred_text_is_centred_in_pixels(angle):
    figure, axis = axes()
    plain.words(axis, [(5, 2.5, "HHH")], size=20, angle=angle)
    top, bottom, left, right = inked(figure)
    assert (top + bottom) / 2 == pytest.approx(150, abs=2)
    assert (left + right) / 2 == pytest.approx(200, abs=2)
    assert bool(right - left > bottom - top) is (angle == 0)


@pytest.mark.parametrize(("va", "above"), [("bottom", True), ("top", False)])
def test_a_text_keeps_to_its_side(va, above):
    figure, axis = axes()
    plain.words(axis, [(5, 2.5, "Hgj")], size=20, va=va)
    top, bottom, *_ = inked(figure)
    assert bool(bottom <= 151) is above
    assert bool(top >= 149) is not above


def test_boxes_fill_what_they_say():
    figure, axis = axes()
    plain.boxes(axis, [(2, 1, 4, 2)], "black")
    top, bottom, left, right = inked(figure)
    # x: 1 inch + 2 / 10 of 2 inches; y: from below, 1 inch + 1 / 5 of an inch
    assert (left, right) == pytest.approx((140, 219), abs=1)
    assert (top, bottom) == pytest.approx((140, 179), abs=1)


def test_scales_write_each_label_and_the_name():
    figure, axis = axes()
    plain.bottom(axis, [0, 10], ["zero", "ten"], "across")
    plain.left(axis, [0, 5], name="upwards")
    told = texts(figure)
    assert set(told) == {"zero", "ten", "across", "0", "5", "upwards"}
    assert float(told["zero"].get("x")) < 72 < float(told["ten"].get("x"))
    assert float(told["ten"].get("y")) > 2 * 72, "below the axes"
    assert float(told["0"].get("y")) > float(told["5"].get("y"))
    assert "rotate(-90" in told["upwards"].get("transform")


def test_a_key_keeps_its_texts_apart():
    figure = plain.plain_figure(6, 1)
    axis = plain.plain_axes(figure, (0, 0, 6, 0.2), (0, 6), (0, 0.2))
    plain.key(axis, [("red", "MMM"), ("blue", "a longer text of many words"), ("black", "last")])
    told = list(texts(figure).values())
    ends = [float(t.get("x")) + float(t.get("textLength")) for t in told]
    starts = [float(t.get("x")) - 0.19 * 72 for t in told]  # of its square
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))


def test_pixels_and_svg_have_the_same_words():
    figure, axis = axes()
    plain.title(axis, "title")
    picture = Picture(figure, "a test")
    assert "title" in texts(figure)
    assert Image.open(io.BytesIO(picture.png())).size == (800, 600)
