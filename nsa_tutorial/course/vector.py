"""A figure as SVG for a web page: sharp at any size, and faster to draw than pixels.

It is matplotlib's own SVG but for two things. Text stays text, stretched to the width that
matplotlib reserved for it, whatever font the browser has. And there is no style sheet inside: in a
page it would reach every other drawing.
"""

from __future__ import annotations

import functools
import io
from html import escape

from matplotlib.backend_bases import GraphicsContextBase
from matplotlib.backends.backend_svg import RendererSVG
from matplotlib.colors import rgb2hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextToPath

_POINTS = 72  # per inch: SVG's unit in matplotlib
_FONTS = {"monospace": "'DejaVu Sans Mono',Menlo,Consolas,monospace"}
_USUAL = "'DejaVu Sans',Verdana,sans-serif"


class _Renderer(RendererSVG):
    """Matplotlib's, with text as text of a fixed width."""

    dpi = _POINTS  # asked for by images that stand at a fixed place of the figure

    def get_text_width_height_descent(
        self, s: str, prop: FontProperties, ismath: bool | str
    ) -> tuple[float, float, float]:
        """Sizes in points; measured once, as the next drawing has nearly the same words."""
        if ismath:
            return super().get_text_width_height_descent(s, prop, ismath)
        look = (tuple(prop.get_family()), prop.get_size_in_points(), prop.get_weight())
        return _measured(s, *look)

    def draw_text(
        self, gc: GraphicsContextBase, x: float, y: float, s: str, prop: FontProperties,
        angle: float, ismath: bool | str = False, mtext: Text | None = None,
    ) -> None:  # fmt: skip
        """One line of text; formulas are drawn as shapes."""
        if ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        width = self.get_text_width_height_descent(s, prop, ismath)[0]
        family = _FONTS.get(prop.get_family()[0], _USUAL)
        place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "fill": rgb2hex(gc.get_rgb())}
        if angle:
            place["transform"] = f"rotate({-angle:g} {x:.2f} {y:.2f})"
        weight = "bold" if prop.get_weight() in ("bold", "heavy", "black") else "normal"
        font = f"font:{weight} {prop.get_size_in_points():g}px {family};white-space:pre"
        length = {"textLength": f"{width:.2f}", "lengthAdjust": "spacingAndGlyphs"}
        self.writer.element("text", s, attrib={**place, **length, "style": font})


@functools.lru_cache(maxsize=4096)
def _measured(
    s: str, family: tuple[str, ...], size: float, weight: str | int
) -> tuple[float, float, float]:
    prop = FontProperties(family=list(family), size=size, weight=weight)
    return TextToPath().get_text_width_height_descent(s, prop, ismath=False)


def svg(figure: Figure, alternative: str, *, cut_top: float = 0.0) -> str:
    """An `<svg>` element of a figure.

    Args:
        figure: what is drawn.
        alternative: what the drawing shows, for those who do not see it.
        cut_top: inches to leave away at the top.
    """
    width, height = (_POINTS * inches for inches in figure.get_size_inches())
    before, text = figure.dpi, io.StringIO()
    figure.dpi = _POINTS
    try:
        renderer = _Renderer(width, height, text, image_dpi=_POINTS)
        figure.draw(renderer)
        renderer.finalize()
    finally:
        figure.dpi = before
    drawn = text.getvalue()
    # what stands before the figure is a header with a date, and a style for the whole page
    body = drawn[drawn.index('<g id="figure') : drawn.rindex("</svg>")]
    top = _POINTS * cut_top
    return (
        f'<svg role="img" aria-label="{escape(alternative)}" '
        f'viewBox="0 {top:g} {width:g} {height - top:g}" '
        'style="stroke-linejoin:round;stroke-linecap:butt" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"{body}</svg>"
    )
