"""A sheet: everything stands where it was put, in inches, and squares have the colours they were
given. A chart on it: marks in the units of its data, scales around its place."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from nsa_tutorial.course.figures import PALETTE, Picture, shades
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour, bytes_of

SVG = "{http://www.w3.org/2000/svg}"
PLACE = Place(1.0, 0.5, 2.0, 1.0)


def pixels(sheet: Sheet) -> np.ndarray:
    """The sheet as it is drawn, 100 pixels an inch: rows, columns, three bytes."""
    image = Image.open(io.BytesIO(Picture(sheet.figure, "").png())).convert("RGB")
    return np.asarray(image.resize((image.width // 2, image.height // 2), Image.Resampling.NEAREST))


def test_an_image_fills_its_place_and_no_more() -> None:
    sheet = Sheet(4.0, 2.0)
    colours = np.array([[byte_colour("key"), byte_colour("query")]])
    sheet.image(PLACE, colours)
    drawn = pixels(sheet)
    assert drawn.shape == (200, 400, 3)
    for x, colour in ((103, "key"), (197, "key"), (203, "query"), (297, "query")):
        for y in (53, 147):
            assert np.abs(drawn[y, x].astype(int) - byte_colour(colour)).max() < 8
    for y, x in ((45, 200), (155, 200), (100, 95), (100, 305)):
        assert (drawn[y, x] == 255).all()


def test_boxes_and_lines_are_in_inches() -> None:
    sheet = Sheet(4.0, 2.0)
    sheet.boxes([(0.5, 0.5, 1.0, 0.5), (2.0, 1.0, 1.0, 0.5)], ["key", "query"])
    sheet.lines([[(0.0, 1.8), (4.0, 1.8)]], "text", 2.0)
    drawn = pixels(sheet)
    for y, x, colour in ((75, 100, "key"), (125, 250, "query"), (180, 200, "text")):
        assert np.abs(drawn[y, x].astype(int) - byte_colour(colour)).max() < 8
    assert (drawn[125, 100] == 255).all()


def test_cuts_are_white_between_squares() -> None:
    sheet = Sheet(4.0, 2.0)
    sheet.image(PLACE, np.tile(byte_colour("text"), (2, 4, 1)))
    sheet.cuts(PLACE, 2, 4, 4.0)
    drawn = pixels(sheet)
    assert (drawn[75, [150, 200, 250]] == 255).all()
    assert (drawn[100, 100:300] == 255).all()
    assert (drawn[75, [125, 175, 225, 275]] == byte_colour("text")).all()


def test_in_a_page_squares_are_pixels_and_words_are_words() -> None:
    """A square is one pixel of the picture inside the SVG, whatever the size on the screen."""
    sheet = Sheet(4.0, 2.0)
    sheet.image(PLACE, np.tile(byte_colour("key"), (3, 5, 1)))
    sheet.below(PLACE, {0.5: "here"}, "across")
    sheet.beside(PLACE, {0.5: 7}, "down")
    sheet.legend(0.5, 1.9, {"key": "loaded"})
    drawn = ElementTree.fromstring(Picture(sheet.figure, "a test").svg())
    (image,) = drawn.iter(f"{SVG}image")
    inside = image.get("{http://www.w3.org/1999/xlink}href").split(",")[1]
    assert Image.open(io.BytesIO(base64.b64decode(inside))).size == (5, 3)
    assert "pixelated" in image.get("style")
    texts = {text.text: float(text.get("x")) for text in drawn.iter(f"{SVG}text")}
    assert set(texts) == {"here", "across", "7", "down", "loaded"}
    assert texts["down"] < texts["7"] < 72 * PLACE.left < texts["across"] < 72 * PLACE.x(1)
    sizes = [float(size) for size in re.findall(r"font:\w+ ([\d.]+)px", ElementTree.tostring(
        drawn, encoding="unicode"))]  # fmt: skip
    assert min(sizes) >= 8


def texts(sheet: Sheet) -> dict[str, ElementTree.Element]:
    drawn = ElementTree.fromstring(Picture(sheet.figure, "a test").svg())
    return {text.text: text for text in drawn.iter(f"{SVG}text")}


def test_a_legend_keeps_its_texts_apart() -> None:
    sheet = Sheet(6.0, 1.0)
    sheet.legend(0.1, 0.8, {"red": "MMM", "blue": "a longer text of many words", "black": "last"})
    told = list(texts(sheet).values())
    ends = [float(t.get("x")) + float(t.get("textLength")) for t in told]
    starts = [float(t.get("x")) - 0.19 * 72 for t in told]  # of its square
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))


# -- charts --


@pytest.mark.parametrize("upwards", [(0, 5), (5, 0)], ids=["y upwards", "y downwards"])
def test_a_chart_has_the_units_of_its_data(upwards: tuple[int, int]) -> None:
    sheet = Sheet(4.0, 2.0)
    chart = sheet.chart(PLACE, (0, 10), upwards)
    chart.boxes([(2, 1, 4, 2)], "text")
    drawn = (pixels(sheet) == byte_colour("text")).all(-1)
    rows, columns = (np.flatnonzero(drawn.any(axis)) for axis in (1, 0))
    assert (columns[0], columns[-1]) == pytest.approx((140, 219), abs=1)
    expected = (90, 129) if upwards == (0, 5) else (70, 109)
    assert (rows[0], rows[-1]) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("upwards", [(0, 5), (5, 0)], ids=["y upwards", "y downwards"])
def test_scales_write_each_label_and_the_name(upwards: tuple[int, int]) -> None:
    sheet = Sheet(4.0, 2.0)
    chart = sheet.chart(PLACE, (0, 10), upwards)
    chart.bottom([0, 10], ["zero", "ten"], "across")
    chart.left([0, 5], name="upwards")
    chart.title("above")
    told = texts(sheet)
    assert set(told) == {"zero", "ten", "across", "0", "5", "upwards", "above"}
    x, y = ({name: float(t.get(axis)) / 72 for name, t in told.items()} for axis in "xy")
    assert x["zero"] < PLACE.left < x["across"] < PLACE.x(1) < x["ten"] + 0.2
    assert y["across"] > y["ten"] > PLACE.y(1)
    assert x["upwards"] < x["0"] < PLACE.left
    assert bool(y["0"] > y["5"]) is (upwards == (0, 5))
    assert "rotate(-90" in told["upwards"].get("transform")
    assert y["above"] < PLACE.top


def test_a_scale_lies_in_front_of_boxes() -> None:
    """A white border of a bar cuts no piece out of the line that it stands on."""
    sheet = Sheet(4.0, 2.0)
    chart = sheet.chart(PLACE, (0, 10), (0, 5))
    chart.boxes([(2, 0, 6, 3)], "key", edgecolors="white", linewidths=3)
    chart.bottom([])
    line = pixels(sheet)[148:152, 105:295].min((0, 2))
    assert (line < 200).all()


# -- colours --


@pytest.mark.parametrize(
    ("value", "colour"), [(-1, "#FFFFFF"), (0, "#FFFFFF"), (2, "selected"), (5, "selected")]
)
def test_numbers_outside_a_range_have_its_ends_colours(value: float, colour: str) -> None:
    found = bytes_of(np.array([value]), shades("selected"), 0, 2)
    np.testing.assert_array_equal(found, byte_colour(colour)[None])


def test_a_colour_is_three_bytes() -> None:
    assert byte_colour("query").tolist() == [0xC7, 0x50, 0x00]
    assert byte_colour(PALETTE["query"]).tolist() == byte_colour("query").tolist()
