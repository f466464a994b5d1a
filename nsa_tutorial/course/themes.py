"""A picture on a light page and on a dark one, and whether what it says can be read there.

A picture is drawn once, dark on white. On a dark page a style turns it over: white becomes the
page's own ground, dark text becomes light, and every hue stays. One set of colours could not do it:
what has a contrast of 4.5 : 1 on white has less than 4.2 : 1 on a dark page. Where a page strips
styles, a picture keeps its white ground, and can be read.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

WHITE = "#FFFFFF"
DARK = "#111111"  # the ground of JupyterLab's dark theme
TEXT, LINE = 4.5, 3.0  # the least contrast, of text and of lines
DARK_PAGES = ('body[data-jp-theme-light="false"]', "body.vscode-dark", 'html[data-theme="dark"]')

_KEPT = 1 / 15  # white turns into #111, black into #EEE
TURN = f"invert({1 - _KEPT:.4f}) hue-rotate(180deg)"
# hue-rotate(180deg), from red, green and blue to each of them
_HALF_TURN = ((-0.574, 1.430, 0.144), (0.426, 0.430, 0.144), (0.426, 1.430, -0.856))


def _parts(colour: str) -> tuple[float, ...]:
    """Red, green and blue of `#rrggbb`, from 0 to 1."""
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _colour(parts: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * min(max(part, 0.0), 1.0)):02X}" for part in parts)


def _light(colour: str) -> float:
    """Relative luminance, as the WCAG define it."""
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours `#rrggbb`, from 1 to 21."""
    low, high = sorted((_light(one), _light(other)))
    return (high + 0.05) / (low + 0.05)


def turned(colour: str) -> str:
    """What a dark page makes of a picture's colour `#rrggbb`."""
    inverted = [1 - _KEPT + (2 * _KEPT - 1) * part for part in _parts(colour)]
    return _colour(
        tuple(sum(a * b for a, b in zip(row, inverted, strict=True)) for row in _HALF_TURN)
    )


def readable(colour: str, least: float = TEXT) -> str:
    """The colour `#rrggbb`, or the next darker one that can be read on white and, turned over, on
    a dark page."""
    for share in range(100, 0, -1):
        darker = _colour(tuple(part * share / 100 for part in _parts(colour)))
        if min(contrast(darker, WHITE), contrast(turned(darker), DARK)) >= least:
            return darker
    return "#000000"


def turning(selector: str) -> str:
    """The style rule that turns what `selector` names over on dark pages."""
    return f"{', '.join(f'{page} {selector}' for page in DARK_PAGES)} {{ filter: {TURN}; }}"


def image(png: str, facts: Mapping[str, object], said: str = "") -> str:
    """A picture for a page, as HTML.

    Args:
        png: its pixels, in base64.
        facts: `alt`, what it shows, for those who do not see it; `width` and `height` on the page,
            in CSS pixels, if they are known.
        said: a sentence above it.
    """
    told = "".join(f' {name}="{int(facts[name])}"' for name in ("width", "height") if name in facts)
    above = f"<p>{html.escape(said)}</p>" if said else ""
    return (
        f'<style>{turning(".nsa-picture")}</style>{above}<img class="nsa-picture" '
        f'alt="{html.escape(str(facts["alt"]))}"{told} style="max-width:100%;height:auto" '
        f'src="data:image/png;base64,{png}">'
    )
