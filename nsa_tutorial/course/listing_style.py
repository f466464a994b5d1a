"""The colours and the layout of listings, as one `<style>` element.

Every colour is readable on its ground, 4.5:1 or more. Light is the default; the dark one is for
Jupyter, VS Code and the web book, each of which says in its own way that its page is dark.
"""

import math
from collections.abc import Mapping, Sequence

from nsa_tutorial.course.themes import DARK_PAGES

SHARED_COLOURS = 8
LETTER = 7.4  # pixels, the widest that a usual monospaced font draws at 12 pixels
NUMBERS = 5.5  # letters that a line number takes, with its space
EDGES = 26  # pixels beside the code: the frame and its padding
GAP = 6  # pixels between columns

LIGHT = {
    "ground": "#f6f8fa", "edge": "#d1d9e0", "text": "#1f2328", "muted": "#59636e",
    "keyword": "#cf222e", "string": "#0a3069", "number": "#0550ae", "function": "#6639ba",
    "link": "#0550ae",
}  # fmt: skip
DARK = {
    "ground": "#161b22", "edge": "#3d444d", "text": "#e6edf3", "muted": "#9198a1",
    "keyword": "#ff7b72", "string": "#a5d6ff", "number": "#79c0ff", "function": "#d2a8ff",
    "link": "#79c0ff",
}  # fmt: skip
# of names that columns share: neighbours differ
SHARED = {
    "light": (
        "#0550ae", "#953800", "#116329", "#a8246f", "#6e5500", "#6639ba", "#0a7075", "#a40e26",
    ),
    "dark": (
        "#79c0ff", "#ffa657", "#7ee787", "#f778ba", "#e3b341", "#d2a8ff", "#56d4dd", "#ff7b72",
    ),
}  # fmt: skip

# A viewer that takes away `style` attributes but knows these rules from another output would count
# from 1: no attribute, no numbers.
RULES = """
.nsa-listing { color: var(--nsa-text); background: var(--nsa-ground); text-align: left;
  border: 1px solid var(--nsa-edge); border-radius: 6px; margin: 4px 0; padding: 8px 0;
  min-width: 0; box-sizing: border-box; }
.nsa-listing .nsa-title, .nsa-listing p.nsa-note { margin: 0; padding: 0 12px; font-size: 12px;
  line-height: 18px; color: var(--nsa-muted); overflow-wrap: anywhere; }
.nsa-listing p.nsa-note { color: var(--nsa-text); font-size: 13px; padding-top: 4px; }
.nsa-listing p.nsa-note code { color: inherit; background: none; font-size: 12px; padding: 0; }
.nsa-listing .nsa-title a.nsa-file { color: var(--nsa-link); text-decoration: none; }
.nsa-listing .nsa-title a.nsa-file:hover { text-decoration: underline; }
.nsa-listing pre.nsa-code { margin: 4px 0 0; padding: 0 12px 4px; border: 0; overflow-x: auto;
  color: var(--nsa-text); background: var(--nsa-ground); font: 13px/20px var(--nsa-font);
  --nsa-row: 20px; white-space: pre; word-break: normal; overflow-wrap: normal; tab-size: 4; }
.nsa-listing pre.nsa-code[style] { padding-left: 0; }
.nsa-listing pre.nsa-code[style] .line::before { counter-increment: nsa-line;
  content: counter(nsa-line); display: inline-block; position: sticky; left: 0; width: 4ch;
  padding-right: 1.5ch; text-align: right; color: var(--nsa-muted); background: var(--nsa-ground); }
.nsa-listing .keyword { color: var(--nsa-keyword); }
.nsa-listing .string { color: var(--nsa-string); }
.nsa-listing .number { color: var(--nsa-number); }
.nsa-listing .function { color: var(--nsa-function); }
.nsa-listing .comment { color: var(--nsa-muted); }
.nsa-listing .marker { color: var(--nsa-text); font-weight: 700; }
.nsa-listing .nsa-gap { display: none; }
"""
# A later output repeats RULES, after these rules: where the two meet, a selector here names a
# class more.
COLUMNS = """
.nsa-columns { container-type: inline-size; }
.nsa-row .nsa-listing pre.nsa-code { font-size: 12px; line-height: 18px; --nsa-row: 18px; }
.nsa-muted .nsa-listing pre.nsa-code, .nsa-muted .nsa-listing .keyword,
.nsa-muted .nsa-listing .string, .nsa-muted .nsa-listing .number,
.nsa-muted .nsa-listing .function { color: var(--nsa-muted); }
"""
# Titles, codes and notes share their rows, so that code begins level below titles of any length.
# Each output has columns of its own, so the class names their widths.
FITTING = """@container (min-width: {whole}px) {{
.{name} {{ display: grid; grid-template-columns: {columns}; column-gap: {gap}px;
  grid-template-rows: auto 1fr auto; }}
.{name} .nsa-listing {{ display: grid; grid-row: span 3; grid-template-rows: subgrid;
  grid-template-columns: minmax(0, 1fr); }}
.{name} .nsa-listing .nsa-gap {{ display: block; height: calc(var(--rows) * var(--nsa-row)); }}
}}
"""


def width(letters: float) -> int:
    """Pixels that a column needs so that a line of so many letters is not cut."""
    return math.ceil(letters * LETTER) + EDGES


def row_name(widths: Sequence[int]) -> str:
    """The class of a row whose columns need so many pixels each."""
    return f"nsa-row-{'-'.join(map(str, widths))}"


def style(widths: Sequence[int] = ()) -> str:
    """The `<style>` of an output: of one listing, or of columns that need so many pixels each.
    Where they do not fit, they stand below one another."""
    font = 'var(--jp-code-font-family, ui-monospace, Menlo, Consolas, "Liberation Mono", monospace)'
    light, dark = LIGHT, DARK
    if widths:
        light, dark = LIGHT | _numbered(SHARED["light"]), DARK | _numbered(SHARED["dark"])
    dark_pages = ", ".join(f"{page} .nsa-listing" for page in DARK_PAGES)
    rules = [
        f".nsa-listing {{ color-scheme: light; --nsa-font: {font}; {_variables(light)} }}",
        f"{dark_pages} {{ color-scheme: dark; {_variables(dark)} }}",
        RULES.strip(),
    ]
    if widths:
        fitting = {
            "whole": sum(widths) + GAP * (len(widths) - 1),
            "name": row_name(widths),
            "columns": " ".join(f"minmax({pixels}px, {pixels}fr)" for pixels in widths),
            "gap": GAP,
        }
        rules += [
            COLUMNS.strip(),
            *(
                f".nsa-muted .nsa-listing .{name} {{ color: var(--nsa-{name}); font-weight: 600; }}"
                for name in _numbered(SHARED["light"])
            ),
            FITTING.format(**fitting).strip(),
        ]
    return "<style>\n" + "\n".join(rules) + "\n</style>"


def _numbered(colours: Sequence[str]) -> dict[str, str]:
    return {f"shared-{i}": colour for i, colour in enumerate(colours)}


def _variables(palette: Mapping[str, str]) -> str:
    return " ".join(f"--nsa-{name}: {colour};" for name, colour in palette.items())
