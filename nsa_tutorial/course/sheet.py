"""Where the marks of a picture under a slider stand: on a sheet, in inches, or on a chart of the
sheet, in the units of its data.

Matplotlib spends most of its time on axes with ticks and on their layout. A sheet is one
bare axes over the whole figure, measured from its upper left corner. A chart is a place of the
sheet with limits: its marks are scaled, and it writes its scales. Nothing is laid out: whoever
draws knows the places, and nothing jumps when a control moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.colors import Colormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D

from nsa_tutorial.course.figures import SURFACE
from nsa_tutorial.course.marks import Marks, named

Limits = tuple[float, float]

_TICK = 0.042  # inches
_LETTER = 0.0086  # inches of a usual letter with its space, for each point of its size


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
    return np.round(255 * np.array(to_rgb(named(colour)))).astype(np.uint8)


class Sheet(Marks):
    """An empty sheet of `width` by `height` inches. A picture's title takes the first 0.26 inches.

    Its marks stand where they are put, `x` inches from the left edge and `y` from the upper one.

    Attributes:
        figure: for `Picture`.
    """

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height), dpi=100, facecolor=SURFACE)
        axis = self.figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
        super().__init__(axis, axis.transData)

    def chart(self, place: Place, x: Limits, y: Limits) -> Chart:
        """A chart on a place, its limits from left to right and from below to above."""
        return Chart(self, place, x, y)

    def image(self, place: Place, colours: np.ndarray) -> None:
        """Fill a place with squares of the colours `[rows, columns, 3 or 4]`."""
        left, top, width, height = place
        extent = (left, left + width, top + height, top)
        # none: squares stay squares at any size
        self._axis.imshow(colours, extent=extent, aspect="auto", interpolation="none")

    def cuts(self, place: Place, rows: int, columns: int, width: float = 1.0) -> None:
        """White lines that cut a place into rows and columns."""
        across = [place.x(share) for share in np.arange(columns + 1) / columns]
        down = [place.y(share) for share in np.arange(rows + 1) / rows]
        paths = [[(x, place.top), (x, place.y(1))] for x in across]
        paths += [[(place.left, y), (place.x(1), y)] for y in down]
        self.lines(paths, SURFACE, width)

    def title(self, place: Place, text: str) -> None:
        """A text over a place, from its left edge on."""
        self.text(place.left, place.top - 0.04, text, va="bottom")

    def below(
        self,
        place: Place,
        labels: Mapping[float, object],
        name: str = "",
        *,
        gap: float = 0.04,
        size: float = 8.5,
    ) -> None:
        """Labels under a place, by their share of its width, and the name of what they count."""
        y = place.y(1) + gap
        told = [(place.x(share), y, label) for share, label in labels.items()]
        self.words(told, size=size, va="top")
        if name:
            self.words([(place.x(0.5), y + 0.17 * bool(labels), name)], va="top")

    def beside(
        self,
        place: Place,
        labels: Mapping[float, object],
        name: str = "",
        *,
        gap: float = 0.06,
        size: float = 8.5,
        away: float | None = None,
    ) -> None:
        """Labels to the left of a place, by their share of its height, and the name of what they
        count, `away` inches from the place: next to the longest label by default."""
        told = [(place.left - gap, place.y(share), label) for share, label in labels.items()]
        self.words(told, size=size, ha="right")
        if name:
            widest = max((len(str(label)) for label in labels.values()), default=0)
            x = place.left - (gap + 0.1 + _LETTER * size * widest if away is None else away)
            self.words([(x, place.y(0.5), name)], angle=90)

    def legend(self, x: float, y: float, names: Mapping[str, str]) -> None:
        """What colours mean, in a row from a point on: a square and words for each."""
        squares, told, size = [], [], 8.5
        for text in names.values():
            squares.append((x, y - 0.065, 0.13, 0.13))
            told.append((x + 0.19, y, text))
            x += 0.42 + _LETTER * size * len(text)
        edge = {"edgecolors": named("faint"), "linewidths": 0.4}  # for pale colours
        self.boxes(squares, list(names), **edge)
        self.words(told, size=size, ha="left")


class Chart(Marks):
    """A place of a sheet with limits; `Sheet.chart` makes it.

    Its marks stand in the units of its data, and reach past the place where their data does.
    `bottom`, `left` and `title` write around it.

    Attributes:
        x, y: the limits, from left to right and from below to above.
    """

    def __init__(self, sheet: Sheet, place: Place, x: Limits, y: Limits) -> None:
        self._sheet, self._place, self.x, self.y = sheet, place, x, y
        across, down = place.width / (x[1] - x[0]), place.height / (y[0] - y[1])
        inches = Affine2D.from_values(
            across, 0, 0, down, place.left - across * x[0], place.top - down * y[1]
        )
        super().__init__(sheet._axis, inches + sheet._transform)

    def title(self, text: str) -> None:
        """What the chart shows, above it."""
        place = self._place
        self._sheet.words([(place.x(0.5), place.top - 0.07, text)], size=10, va="bottom")

    def bottom(
        self,
        at: Iterable[float],
        labels: Iterable[object] | None = None,
        name: str = "",
        *,
        line: bool = True,
        size: float = 8.5,
    ) -> None:
        """A scale below the chart: a label at each of `at`, the value if there are no others, and
        `name` under them."""
        at, place, (low, high) = list(at), self._place, self.x
        shares = [(x - low) / (high - low) for x in at]
        if line:
            y = place.y(1)
            ticks = [[(place.x(share), y), (place.x(share), y + _TICK)] for share in shares]
            self._sheet.lines([[(place.left, y), (place.x(1), y)], *ticks])
        told = dict(zip(shares, labels or at, strict=True))
        self._sheet.below(place, told, name, gap=0.07, size=size)

    def left(
        self,
        at: Iterable[float],
        labels: Iterable[object] | None = None,
        name: str = "",
        *,
        line: bool = True,
        size: float = 8.5,
        away: float | None = None,
    ) -> None:
        """A scale to the left of the chart, with `name` upwards, `away` inches from it."""
        at, place, (low, high) = list(at), self._place, self.y
        shares = [(high - y) / (high - low) for y in at]
        if line:
            x = place.left
            ticks = [[(x, place.y(share)), (x - _TICK, place.y(share))] for share in shares]
            self._sheet.lines([[(x, place.top), (x, place.y(1))], *ticks])
        told = dict(zip(shares, labels or at, strict=True))
        self._sheet.beside(place, told, name, size=size, away=away)
