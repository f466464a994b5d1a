"""Axes for pictures under a slider: the same marks as matplotlib's own, made of few objects.

Matplotlib spends about 1.5 ms on a tick and 0.4 ms on a text, more than a picture that follows the
hand can pay. Here the axes are switched off; `bottom` and `left` write a scale, `words` many texts,
`boxes` many rectangles, each as one object. Not here: layout. Places are given, and stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import Transform

from nsa_tutorial.course.figures import PALETTE, SURFACE

_SHIFTS = {"left": 0.0, "center": 0.5, "right": 1.0}  # of a text's width
_DROPS = {"baseline": 0.0, "center": 0.36, "top": 0.76, "bottom": -0.22}  # of its size
_TICK = 3.0  # points


def plain_figure(width: float, height: float) -> Figure:
    """A figure of the course's look without axes and without a layout of its own; inches."""
    return Figure(figsize=(width, height), dpi=100, facecolor=SURFACE)


def plain_axes(
    figure: Figure,
    box: tuple[float, float, float, float],
    x: tuple[float, float],
    y: tuple[float, float],
) -> Axes:
    """Axes without ticks, spines and title.

    Args:
        figure: where they stand.
        box: left, bottom, width, height in inches.
        x, y: the limits.
    """
    wide, high = figure.get_size_inches()
    axis = figure.add_axes((box[0] / wide, box[1] / high, box[2] / wide, box[3] / high))
    axis.set_axis_off()
    axis.set(xlim=x, ylim=y)
    return axis


@functools.cache
def _font(size: float, weight: str, family: str) -> FontProperties:
    return FontProperties(family=family, size=size, weight=weight)


class Words(Artist):
    """Texts of one look at many places, each `(x, y, text)`.

    Attributes:
        entries: the texts and their places.
    """

    def __init__(
        self,
        entries: Sequence[tuple[float, float, str]],
        colours: Sequence[str],
        font: FontProperties,
        ha: str,
        va: str,
        angle: float,
        offset: tuple[float, float],
    ) -> None:
        super().__init__()
        self.entries, self._colours, self._font = list(entries), colours, font
        self._ha, self._va, self._angle, self._offset = ha, va, angle, offset
        self.set_in_layout(False)
        self.set_zorder(4)

    def draw(self, renderer: RendererBase) -> None:
        """Write every text where its transform puts it."""
        if not self.entries:
            return
        places = self.get_transform().transform([entry[:2] for entry in self.entries])
        dx, dy = (renderer.points_to_pixels(points) for points in self._offset)
        drop = _DROPS[self._va] * renderer.points_to_pixels(self._font.get_size_in_points())
        context = renderer.new_gc()
        height = renderer.get_canvas_width_height()[1]
        for (x, y), (*_, text), colour in zip(places, self.entries, self._colours, strict=True):
            wide = renderer.get_text_width_height_descent(text, self._font, ismath=False)[0]
            shift = _SHIFTS[self._ha] * wide
            # upwards, a text's own left is below and its own top to the left
            x, y = (x + drop, y - shift) if self._angle else (x - shift, y - drop)
            context.set_foreground(colour)
            up = height - (y + dy) if renderer.flipy() else y + dy
            renderer.draw_text(context, x + dx, up, text, self._font, self._angle)
        context.restore()


def words(
    axis: Axes,
    entries: Sequence[tuple[float, float, str]],
    *,
    size: float = 8,
    colour: str | Sequence[str] = PALETTE["text"],
    ha: str = "center",
    va: str = "center",
    weight: str = "normal",
    family: str = "DejaVu Sans",
    angle: float = 0,
    offset: tuple[float, float] = (0, 0),
    transform: Transform | None = None,
) -> Words:
    """Write texts, one line each.

    Args:
        axis: where.
        entries: `(x, y, text)` each.
        size, weight, family: of all of them.
        colour: of all, or one for each.
        ha, va: what of a text stands at its place: `left`, `center` or `right`, and `baseline`,
            `bottom`, `center` or `top`.
        angle: 0, or 90 to write upwards.
        offset: points to the right and up.
        transform: from `x, y` to the page; the axes' data by default.
    """
    colours = [colour] * len(entries) if isinstance(colour, str) else list(colour)
    drawn = Words(entries, colours, _font(size, weight, family), ha, va, angle, offset)
    drawn.set_transform(transform or axis.transData)
    return axis.add_artist(drawn)


def boxes(
    axis: Axes,
    spans: Sequence[tuple[float, float, float, float]],
    colours: str | Sequence[str],
    **style: object,
) -> PolyCollection:
    """Rectangles `(left, bottom, width, height)` as one collection."""
    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in spans]
    drawn = PolyCollection(corners, facecolors=colours, **{"linewidths": 0, **style})
    axis.add_collection(drawn, autolim=False)
    return drawn


def lines(
    axis: Axes, segments: Sequence[Sequence[tuple[float, float]]], **style: object
) -> LineCollection:
    """Lines from point to point as one collection."""
    drawn = LineCollection(segments, **{"colors": PALETTE["faint"], "linewidths": 0.8, **style})
    axis.add_collection(drawn, autolim=False)
    return drawn


def bottom(
    axis: Axes,
    at: Sequence[float],
    labels: Sequence[object] | None = None,
    name: str = "",
    *,
    line: bool = True,
    size: float = 8.5,
) -> None:
    """A scale below the axes: a label at each of `at`, `name` under them."""
    across = axis.get_xaxis_transform()
    if line:
        tick = _TICK / _points(axis)[1]
        marks = [((x, 0.0), (x, -tick)) for x in at]
        low, high = axis.get_xlim()
        lines(axis, [((low, 0.0), (high, 0.0)), *marks], transform=across, clip_on=False)
    told = [(x, 0.0, str(label)) for x, label in zip(at, labels or at, strict=True)]
    words(axis, told, size=size, va="top", offset=(0, -_TICK - 2), transform=across)
    if name:
        below = -_TICK - 4 - 1.25 * size
        words(axis, [(0.5, 0.0, name)], size=9, va="top", offset=(0, below),
              transform=axis.transAxes)  # fmt: skip


def left(
    axis: Axes,
    at: Sequence[float],
    labels: Sequence[object] | None = None,
    name: str = "",
    *,
    line: bool = True,
    size: float = 8.5,
    away: float = 28,
) -> None:
    """A scale left of the axes: a label at each of `at`, `name` upwards, `away` points from the
    axes."""
    along = axis.get_yaxis_transform()
    if line:
        tick = _TICK / _points(axis)[0]
        marks = [((0.0, y), (-tick, y)) for y in at]
        low, high = axis.get_ylim()
        lines(axis, [((0.0, low), (0.0, high)), *marks], transform=along, clip_on=False)
    told = [(0.0, y, str(label)) for y, label in zip(at, labels or at, strict=True)]
    words(axis, told, size=size, ha="right", offset=(-_TICK - 2, 0), transform=along)
    if name:
        words(axis, [(0.0, 0.5, name)], size=9, angle=90, offset=(-away, 0),
              transform=axis.transAxes)  # fmt: skip


def title(axis: Axes, text: str) -> None:
    """What axes show, above them."""
    words(axis, [(0.5, 1.0, text)], size=10, va="bottom", offset=(0, 5), transform=axis.transAxes)


def key(axis: Axes, entries: Sequence[tuple[str, str]], *, size: float = 8.5) -> None:
    """What colours mean, in a row: a square and a text for each `(colour, text)`.

    Args:
        axis: of its own, its unit an inch, one row high.
        entries: from left to right.
        size: of the texts.
    """
    texts, squares, x = [], [], axis.get_xlim()[0]
    for colour, text in entries:
        squares.append((x, 0.03, 0.13, 0.13, colour))
        texts.append((x + 0.19, 0.095, text))
        x += 0.42 + 0.0086 * size * len(text)  # 0.6 of its size is a usual letter, with its space
    boxes(axis, [square[:4] for square in squares], [square[4] for square in squares],
          edgecolors=PALETTE["faint"], linewidths=0.4)  # fmt: skip
    words(axis, texts, size=size, ha="left")


def _points(axis: Axes) -> tuple[float, float]:
    """Width and height of axes in points."""
    box = axis.get_position()
    wide, high = axis.figure.get_size_inches()
    return 72 * wide * box.width, 72 * high * box.height
