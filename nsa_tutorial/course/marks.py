"""Boxes, lines, dots and words for pictures that answer a slider: many of a kind, drawn as one
object. Matplotlib makes several objects for each text and tick, too many for a picture that follows
the hand (`python -m nsa_tutorial.course.latency`). `Marks` makes one of many. It does not say where
they belong: `course.sheet` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.transforms import Transform

from nsa_tutorial.course.figures import INKS, PALETTE

_SHIFTS = {"left": 0.0, "center": 0.5, "right": 1.0}  # of a text's width
_DROPS = {"baseline": 0.0, "center": 0.36, "top": 0.76, "bottom": -0.22}  # of its size
_RISES = {"baseline": 1.0, "center": 0.5, "top": 0.0, "bottom": 1.0}  # of its further lines


def named(colours: object) -> object:
    """A colour of the palette for its name, also inside a list; other colours as they are."""
    if isinstance(colours, str):
        return PALETTE.get(colours, colours)
    return colours if isinstance(colours, np.ndarray) else [named(colour) for colour in colours]


def _ink(colours: object) -> object:
    """As `named`, but in the shades in which words can be read."""
    if isinstance(colours, str):
        return INKS.get(colours, colours)
    return colours if isinstance(colours, np.ndarray) else [_ink(colour) for colour in colours]


@functools.cache
def _font(size: float, family: str) -> FontProperties:
    return FontProperties(family=family, size=size)


class Words(Artist):
    """Texts of one look at many places; `Marks.words` makes it.

    Attributes:
        entries: `(x, y, text)` each.
    """

    def __init__(
        self,
        entries: Iterable[tuple[float, float, object]],
        *,
        size: float = 9,
        colour: object = "text",
        ha: str = "center",
        va: str = "center",
        family: str = "DejaVu Sans",
        angle: float = 0,
        spacing: float = 1.15,
        offset: tuple[float, float] = (0, 0),
    ) -> None:
        super().__init__()
        self.entries = [(x, y, str(text)) for x, y, text in entries]
        shade = _ink(colour)
        self._colours = [shade] * len(self.entries) if isinstance(shade, str) else shade
        self._font, self._ha, self._va = _font(size, family), ha, va
        self._angle, self._spacing, self._offset = angle, spacing, offset
        self.set_in_layout(False)
        self.set_zorder(4)

    def draw(self, renderer: RendererBase) -> None:
        """Write every text where its transform puts it."""
        if not self.entries:
            return
        places = self.get_transform().transform([entry[:2] for entry in self.entries])
        places = places + [renderer.points_to_pixels(points) for points in self._offset]
        size = renderer.points_to_pixels(self._font.get_size_in_points())
        line = self._spacing * size
        # where the text's own right and up are on the page
        right, up = np.array([[0, 1], [-1, 0]] if self._angle else [[1, 0], [0, 1]])
        context = renderer.new_gc()
        height = renderer.get_canvas_width_height()[1]
        for place, (*_, text), colour in zip(places, self.entries, self._colours, strict=True):
            context.set_foreground(colour)
            lines = text.split("\n")
            rise = _RISES[self._va] * line * (len(lines) - 1) - _DROPS[self._va] * size
            for number, words in enumerate(lines):
                wide = renderer.get_text_width_height_descent(words, self._font, ismath=False)[0]
                x, y = place - _SHIFTS[self._ha] * wide * right + (rise - number * line) * up
                y = height - y if renderer.flipy() else y
                renderer.draw_text(context, x, y, words, self._font, self._angle)
        context.restore()


class Marks:
    """Draws on axes.

    A colour is a name of the palette or one that matplotlib knows; where many marks are drawn,
    there may be one for each.

    Args:
        axis: what it draws on.
        transform: from the marks' `x, y` to the page.
    """

    def __init__(self, axis: Axes, transform: Transform) -> None:
        self._axis, self._transform = axis, transform

    def _add(self, drawn: Artist) -> None:
        drawn.set_transform(self._transform)
        self._axis.add_artist(drawn)

    def boxes(
        self, places: Iterable[tuple[float, float, float, float]], colours: object, **look: object
    ) -> None:
        """Filled rectangles: a corner's `x` and `y`, and from there on the width and height."""
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in places]
        look = {"facecolors": named(colours), "linewidths": 0} | look
        self._add(PolyCollection(corners, **look))

    def lines(
        self,
        paths: Iterable[Sequence],
        colours: object = "faint",
        width: object = 0.8,
        **look: object,
    ) -> None:
        """Lines, each through points `[n, 2]`; widths in points, one for all or one for each."""
        self._add(LineCollection(paths, colors=named(colours), linewidths=width, **look))

    def dots(
        self, points: Iterable[tuple[float, float]], colour: str, size: float = 6, **look: object
    ) -> None:
        """Discs of one colour, `size` points wide."""
        x, y = zip(*points, strict=True)
        look = {"linestyle": "none", "marker": "o", "markersize": size, "zorder": 3} | look
        self._add(Line2D(x, y, color=named(colour), **look))

    def words(self, entries: Iterable[tuple[float, float, object]], **look: object) -> None:
        """Texts at many places.

        Args:
            entries: `(x, y, text)` each; a text may have several lines.
            look: `size` (points), `colour`, `family` and `angle` (0, or 90 to write upwards) of all
                of them; `ha` and `va`, what of a text stands at its place (`left`, `center` or
                `right`, and `baseline`, `bottom`, `center` or `top`); `spacing` from line to line,
                in sizes; `offset`, points to the right and up.
        """
        self._add(Words(entries, **look))

    def text(
        self, x: float, y: float, text: object, size: float = 9, colour: str = "text",
        **look: object,
    ) -> None:  # fmt: skip
        """One text, from its place to the right if `ha` does not say otherwise."""
        self.words([(x, y, text)], **{"size": size, "colour": colour, "ha": "left"} | look)
