"""A figure that is one sheet, measured in inches from its upper left corner: for pictures that
answer a slider.

Matplotlib takes about 10 ms for each axes with ticks. A sheet has a single bare axes over the whole
figure. Images, boxes, lines and texts are put where they belong, so that a picture of five parts is
drawn in 20 ms. It lays nothing out: whoever draws on it knows the places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Colormap, to_rgb
from matplotlib.figure import Figure

from nsa_tutorial.course.figures import PALETTE, SURFACE


class Place(NamedTuple):
    """A rectangle of a sheet, in inches."""

    left: float
    top: float
    width: float
    height: float

    def x(self, share: float) -> float:
        """A place between the left edge (0) and the right one (1)."""
        return self.left + share * self.width

    def y(self, share: float) -> float:
        """A place between the upper edge (0) and the lower one (1)."""
        return self.top + share * self.height


def bytes_of(values: np.ndarray, colours: Colormap, low: float, high: float) -> np.ndarray:
    """Numbers `[...]` from `low` to `high` as colours `[..., 3]` of a colour map, a byte each."""
    share = (np.asarray(values, dtype=float) - low) / (high - low)
    return colours(np.clip(share, 0, 1), bytes=True)[..., :3]


def byte_colour(colour: str) -> np.ndarray:
    """A colour of the palette, by name, or one that matplotlib knows, as three bytes."""
    return np.round(255 * np.array(to_rgb(PALETTE.get(colour, colour)))).astype(np.uint8)


class Sheet:
    """An empty sheet of `width` by `height` inches. A picture's title takes the first 0.26 inches.

    Attributes:
        figure: for `Picture`.
        axis: the bare axes over all of it, in inches.
    """

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height), dpi=100, facecolor=SURFACE)
        self.axis = self.figure.add_axes((0, 0, 1, 1))
        self.axis.set_axis_off()
        self.axis.set_autoscale_on(False)
        self.axis.set_xlim(0, width)
        self.axis.set_ylim(height, 0)

    def image(self, place: Place, colours: np.ndarray) -> None:
        """Fill a place with squares of the colours `[rows, columns, 3]`."""
        left, top, width, height = place
        extent = (left, left + width, top + height, top)
        # none: squares stay squares at any size
        self.axis.imshow(colours, extent=extent, aspect="auto", interpolation="none")

    def boxes(
        self, places: Iterable[tuple[float, float, float, float]], colours: object, **look: object
    ) -> None:
        """Filled rectangles, all in one go: a colour of the palette for each, or one for all."""
        corners = [
            [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
            for x, y, width, height in places
        ]
        drawn = PolyCollection(corners, **{"facecolors": _named(colours), "linewidths": 0} | look)
        self.axis.add_collection(drawn, autolim=False)

    def lines(
        self,
        paths: Iterable[object],
        colours: object = "faint",
        width: object = 0.8,
        **look: object,
    ) -> None:
        """Lines through points `[n, 2]`, all in one go."""
        drawn = LineCollection(paths, colors=_named(colours), linewidths=width, **look)
        self.axis.add_collection(drawn, autolim=False)

    def cuts(self, place: Place, rows: int, columns: int, width: float = 1.0) -> None:
        """White lines that cut a place into rows and columns."""
        across = [place.x(share) for share in np.arange(columns + 1) / columns]
        down = [place.y(share) for share in np.arange(rows + 1) / rows]
        paths = [[(x, place.top), (x, place.y(1))] for x in across]
        paths += [[(place.left, y), (place.x(1), y)] for y in down]
        self.lines(paths, SURFACE, width)

    def text(
        self, x: float, y: float, words: object, size: float = 9, colour: str = "text",
        across: str = "left", up: str = "center", **look: object,
    ) -> None:  # fmt: skip
        """Words at a point: `across` and `up` say which part of them stands there."""
        shade = PALETTE.get(colour, colour)
        self.axis.text(x, y, str(words), fontsize=size, color=shade, ha=across, va=up, **look)

    def title(self, place: Place, words: str) -> None:
        """Words over a place, from its left edge on."""
        self.text(place.left, place.top - 0.04, words, up="bottom")

    def below(self, place: Place, labels: Mapping[float, object], name: str = "") -> None:
        """Labels under a place, by their share of its width, and the name of what they count."""
        for share, label in labels.items():
            self.text(place.x(share), place.y(1) + 0.04, label, 8.5, across="center", up="top")
        if name:
            y = place.y(1) + (0.2 if labels else 0.04)
            self.text(place.x(0.5), y, name, across="center", up="top")

    def beside(self, place: Place, labels: Mapping[float, object], name: str = "") -> None:
        """Labels to the left of a place, by their share of its height, and the name of what they
        count."""
        for share, label in labels.items():
            self.text(place.left - 0.06, place.y(share), label, 8.5, across="right")
        if name:
            widest = max((len(str(label)) for label in labels.values()), default=0)
            x = place.left - 0.16 - 0.075 * widest
            self.text(x, place.y(0.5), name, across="center", rotation=90)

    def legend(self, x: float, y: float, names: Mapping[str, str], gap: float = 0.3) -> None:
        """Squares of colour with their meaning, in a row from a point on: colour to words."""
        squares = []
        for words in names.values():
            squares.append((x, y - 0.055, 0.16, 0.11))
            self.text(x + 0.22, y, words)
            x += 0.22 + 0.073 * len(words) + gap
        self.boxes(squares, list(names))


def _named(colours: object) -> object:
    if isinstance(colours, str):
        return PALETTE.get(colours, colours)
    return [PALETTE.get(colour, colour) for colour in colours]
