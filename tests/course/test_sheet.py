"""A sheet: everything stands where it was put, in inches, and squares have the colours they were
given."""

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


@pytest.mark.parametrize(
    ("value", "colour"), [(-1, "#FFFFFF"), (0, "#FFFFFF"), (2, "selected"), (5, "selected")]
)
def test_numbers_outside_a_range_have_its_ends_colours(value: float, colour: str) -> None:
    found = bytes_of(np.array([value]), shades("selected"), 0, 2)
    np.testing.assert_array_equal(found, byte_colour(colour)[None])


def test_a_colour_is_three_bytes() -> None:
    assert byte_colour("query").tolist() == [0xD5, 0x5E, 0x00]
    assert byte_colour(PALETTE["query"]).tolist() == byte_colour("query").tolist()
