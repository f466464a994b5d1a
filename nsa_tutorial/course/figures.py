"""One palette and a few helpers, so that a colour, a grid and a title mean the same in every
chapter.

A drawing function makes a figure with `new_figure`, draws on its axes, and returns
`Picture(figure, finding)`. A `Picture` shows as a small PNG in a notebook and prints its finding
everywhere else, which is what the stored outputs compare. It is drawn dark on white; `themes` turns
it over on a dark page.
"""

from __future__ import annotations

import base64
import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from nsa_tutorial.course import themes
from nsa_tutorial.course.vector import svg

# Okabe and Ito's colour-blind safe set, each a little lighter or darker, so that what is written on
# it can be read, on a dark page, too. The first five keep their meaning through the whole course.
PALETTE = {
    "compressed": "#EBB233",
    "selected": "#0072B2",
    "window": "#008662",
    "own block": "#DCA4C3",
    "masked": "#C8CCD0",
    "query": "#C75000",
    "key": "#71C0ED",
    "value": "#8560AD",
    "text": "#1F2328",
    "faint": "#656D76",
    "line": "#848D97",
}
# Words in a colour of the palette: a darker shade where the colour itself cannot be read on white.
INKS = {name: themes.readable(colour) for name, colour in PALETTE.items()}

SURFACE = themes.WHITE
_TITLE_HEIGHT = 0.26  # inches at the top of a figure that its title takes
_COLOURS = (
    128  # of a stored picture: enough for flat areas, text and a colour map, at a third of the size
)


def shades(colour: str) -> LinearSegmentedColormap:
    """A colour map from white to a palette colour (by name) or any colour matplotlib knows: for
    weights from 0 to 1."""
    return LinearSegmentedColormap.from_list(
        f"white to {colour}", [SURFACE, PALETTE.get(colour, colour)]
    )


def readable_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    ground = to_hex(PALETTE.get(colour, colour))
    return max((PALETTE["text"], SURFACE), key=lambda ink: themes.contrast(ink, ground))


def new_figure(
    width: float = 8.0, height: float = 3.2, columns: int = 1, rows: int = 1, **gridspec: object
) -> tuple[Figure, np.ndarray]:
    """A figure in the course's style and its axes, as an array `[rows, columns]`. Sizes in inches;
    100 pixels each."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor=SURFACE)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=gridspec or None)
    for axis in axes.flat:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9, colors=PALETTE["text"])
        axis.title.set_fontsize(10)
    return figure, axes


def grid(
    axis: Axes,
    values: np.ndarray,
    *,
    colour: str = "selected",
    largest: float | None = None,
    text: str | None = None,
    hidden: np.ndarray | None = None,
) -> None:
    """Draw a matrix as squares: white is 0, `colour` is `largest`.

    Args:
        axis: where to draw.
        values: `[rows, columns]`.
        colour: a palette name.
        largest: the value drawn in full colour; None takes the largest of `values`.
        text: a format such as `".2f"` to write each value into its square.
        hidden: boolean `[rows, columns]`; those squares are drawn in the colour of masked and carry
            no text.
    """
    values = np.asarray(values, dtype=float)
    top = float(np.nanmax(values)) if largest is None else largest
    axis.imshow(
        np.where(np.isfinite(values), values, 0.0),
        cmap=shades(colour),
        vmin=0,
        vmax=top or 1.0,
        aspect="equal",
        interpolation="none",  # squares stay squares at any size
    )
    rows, columns = values.shape
    if hidden is not None:
        layer = np.zeros((rows, columns, 4))
        layer[np.asarray(hidden)] = (*to_rgb(PALETTE["masked"]), 1.0)
        axis.imshow(layer, aspect="equal", interpolation="none")
    # a major tick between two squares would take the line there away
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color=SURFACE, linewidth=1.2)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    if text is not None:
        for i, j in np.ndindex(rows, columns):
            if hidden is None or not hidden[i, j]:
                dark = values[i, j] > 0.6 * top
                axis.text(j, i, format(values[i, j], text), ha="center", va="center", fontsize=8,
                          color=readable_on(colour) if dark else PALETTE["text"])  # fmt: skip


class Picture:
    """A finished figure and the sentence it proves.

    Args:
        figure: the figure; its title is set to `finding`.
        finding: what the figure shows, as one sentence; computed, where it carries a number.
    """

    def __init__(self, figure: Figure, finding: str) -> None:
        self.figure, self.finding = figure, finding
        figure.suptitle(finding, fontsize=11, color=PALETTE["text"])

    def __repr__(self) -> str:
        return f"Picture: {self.finding}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height on a page, in CSS pixels: 100 to the inch."""
        width, height = self.figure.get_size_inches()
        return round(100 * width), round(100 * height)

    def png(self) -> bytes:
        """The figure as PNG bytes, two pixels for each of `size`, as sharp screens have them; the
        same figure always gives the same bytes."""
        before = self.figure.dpi
        self.figure.set_dpi(200)
        try:
            canvas, small = FigureCanvasAgg(self.figure), io.BytesIO()
            canvas.draw()
            drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        finally:
            self.figure.set_dpi(before)
        image = drawn.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(small, format="png", optimize=True)
        return small.getvalue()

    def svg(self) -> str:
        """The figure as an `<svg>` element without its title, for a place that says the finding in
        words, and without a ground of its own."""
        title, ground = self.figure._suptitle, self.figure.patch
        title.set_visible(False)
        ground.set_visible(False)
        try:
            return svg(self.figure, self.finding, cut_top=_TITLE_HEIGHT)
        finally:
            title.set_visible(True)
            ground.set_visible(True)

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, object], dict[str, object]]:
        # Jupyter shows an image without a text for those who do not see it, and HTML with one.
        # What is stored is the image; `execute` leaves the HTML out.
        width, height = self.size
        encoded = base64.b64encode(self.png()).decode("ascii")
        facts = {"alt": self.finding, "width": width, "height": height}
        shown = themes.image(encoded, facts)
        data = {"text/plain": repr(self), "text/html": shown, "image/png": encoded}
        return data, {"image/png": facts}
