"""What the course says to its reader: sentences and pieces of code, as text and as HTML.

A message has a sign (✓, ✗, ○), a word for it, and a tone that gives it a colour, so that no one of
the three is needed to understand it. In HTML, sentences stand in the page's own font; only code and
values are monospace. Light and dark themes of JupyterLab, VS Code and the book have their own
colours; where styles are stripped, paragraphs and `pre` remain.
"""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """Code or values: shown in monospace, line by line."""

    text: str

    def __str__(self) -> str:
        return self.text


Part = str | Code  # a sentence or more, or code

# Every colour has a contrast of at least 4.5 : 1 on the ground of its theme.
LIGHT = {
    "ground": "#f6f8fa", "text": "#1f2328", "line": "#d0d7de", "link": "#0550ae",
    "right": "#116329", "wrong": "#a40e26", "open": "#57606a", "code": "#ffffff",
}  # fmt: skip
DARK = {
    "ground": "#1c2128", "text": "#e6edf3", "line": "#444c56", "link": "#79c0ff",
    "right": "#57d364", "wrong": "#ff9a92", "open": "#adbac7", "code": "#11151a",
}  # fmt: skip
_IN_THE_DARK = ("body[data-jp-theme-light='false']", "body.vscode-dark", "html[data-theme='dark']")


def text_of(error: BaseException) -> str:
    """What an error says; of a misspelt attribute also the nearest name there is, as Python's own
    traceback adds it."""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        near = difflib.get_close_matches(error.name, dir(error.obj), 1)
        return f"{error}. Did you mean `{near[0]}`?" if near else str(error)
    return str(error)


def _properties(colours: dict[str, str]) -> str:
    return ";".join(f"--nsa-{name}:{colour}" for name, colour in colours.items())


STYLE = (
    f"<style>.nsa-said{{{_properties(LIGHT)}}}"
    f"{','.join(f'{place} .nsa-said' for place in _IN_THE_DARK)}{{{_properties(DARK)}}}"
    ".nsa-said{background:var(--nsa-ground);color:var(--nsa-text);padding:6px 12px;margin:4px 0;"
    "border-left:4px solid var(--nsa-tone,var(--nsa-line));border-radius:4px;line-height:1.5;"
    "font-family:var(--jp-content-font-family,system-ui,sans-serif);overflow-wrap:anywhere}"
    ".nsa-said p{margin:4px 0;color:inherit}"
    ".nsa-said a{color:var(--nsa-link);text-decoration:underline}"
    ".nsa-said code,.nsa-said pre{font-family:var(--jp-code-font-family,monospace);"
    "font-size:90%;color:inherit;background:var(--nsa-code);border:0}"
    ".nsa-said code{padding:0 3px}"
    ".nsa-said pre{margin:4px 0;padding:4px 8px;white-space:pre;overflow-x:auto;"
    "overflow-wrap:normal;line-height:1.35}"
    ".nsa-said .nsa-sign{color:var(--nsa-tone,inherit);font-weight:600}"
    ".nsa-right{--nsa-tone:var(--nsa-right)}.nsa-wrong{--nsa-tone:var(--nsa-wrong)}"
    ".nsa-open{--nsa-tone:var(--nsa-open)}</style>"
)


def plain(parts: Sequence[Part]) -> str:
    """The parts as text, one below the other."""
    return "\n".join(map(str, parts))


def sentence(text: str) -> str:
    """A sentence as HTML; what stands between backticks becomes code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text, quote=False))


@dataclass(frozen=True)
class Message:
    """One thing said: `✓ name: Right, on all 9 cases.`, and what follows.

    Attributes:
        tone: `"right"`, `"wrong"` or `"open"`; it gives the colour.
        sign: one character.
        name: of the exercise or the prediction.
        lead: the first sentence, set in bold.
        parts: all else; a sentence that comes first goes on in the lead's line.
    """

    tone: str
    sign: str
    name: str
    lead: str
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """What is said, without sign and name."""
        if self.parts and not isinstance(self.parts[0], Code):
            return plain((f"{self.lead} {self.parts[0]}".strip(), *self.parts[1:]))
        return plain((self.lead, *self.parts))

    def __repr__(self) -> str:
        return f"{self.sign} {self.name}: {self.text}"

    def html(self) -> str:
        """The message as a `div`; it needs `STYLE` once in the same output."""
        parts = list(self.parts)
        first = parts.pop(0) if parts and not isinstance(parts[0], Code) else ""
        head = (
            f'<span class="nsa-sign">{self.sign}</span> <code>{html.escape(self.name)}</code>: '
            f'<strong class="nsa-sign">{sentence(self.lead)}</strong> {sentence(str(first))}'
        )
        rest = "".join(
            f"<pre>{html.escape(part.text, quote=False)}</pre>"
            if isinstance(part, Code)
            else f"<p>{sentence(part)}</p>"
            for part in parts
        )
        return (
            f'<div class="nsa-said nsa-{self.tone}" role="status"><p>{head.strip()}</p>{rest}</div>'
        )

    def _repr_html_(self) -> str:
        return STYLE + self.html()
