"""Show code from its source, whole or one named phase, so that what is read is what runs.

A long function is cut into phases by marker comments such as `# -- online softmax --`. A phase
reaches from its marker to the next marker, or to the end of the block it stands in. Source is read
from the file, never imported, when it is named by a string:
`show("nsa_tutorial.kernels.triton_forward:kernel")` works where triton cannot be imported.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name

_MARKER = re.compile(r"^(?P<indent>\s*)# -- (?P<name>.+?) --\s*$")
_FRAME = (
    "border:1px solid #d0d7de;border-radius:6px;padding:6px "
    "10px;background:#f8f8f8;color:#1f2328;overflow-x:auto;text-align:left"
)


# Jupyter's own style would break lines inside words in a table cell, and put a white ground behind
# the code.
_PRE = (
    "margin:4px 0 0 0;line-height:1.35;font-size:90%;font-family:monospace;"
    "white-space:pre;word-break:normal;background:transparent;color:inherit"
)


class Listing:
    """A piece of source with its title; Jupyter shows it highlighted, everything else as plain
    text."""

    def __init__(self, title: str, code: str, language: str = "python") -> None:
        self.title, self.code, self.language = title, code, language

    def __repr__(self) -> str:
        return (
            f"# {self.title}\n{self.code}"
            if self.language == "python"
            else f"// {self.title}\n{self.code}"
        )

    def _repr_html_(self) -> str:
        return (
            f'<div style="{_FRAME}"><div '
            f'style="font-size:85%;color:#59636e">{html.escape(self.title)}</div>'
            f"{_highlight(self.code, self.language)}</div>"
        )


class SideBySide:
    """Several listings in one row."""

    def __init__(self, listings: Sequence[Listing]) -> None:
        self.listings = tuple(listings)

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.listings))

    def _repr_html_(self) -> str:
        width = f"{100 // len(self.listings)}%"
        style = f"vertical-align:top;text-align:left;padding:2px;width:{width}"
        cells = "".join(
            f'<td style="{style}">{listing._repr_html_()}</td>' for listing in self.listings
        )
        narrow = cells.replace("white-space:pre;", "white-space:pre-wrap;").replace(
            "font-size:90%", "font-size:82%"
        )
        return f'<table style="width:100%;table-layout:fixed"><tr>{narrow}</tr></table>'


def _highlight(code: str, language: str) -> str:
    lexer: Lexer = get_lexer_by_name(language)
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=_PRE)
    return highlight(code, lexer, formatter)


def _named(name: str) -> tuple[str, str]:
    """`"package.module:Qual.name"` → (title, source), without importing the module itself."""
    module, _, qualname = name.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"show: no module {module!r}; expected 'package.module' or "
            f"'package.module:function', got {name!r}"
        )
    text = Path(spec.origin).read_text(encoding="utf-8")
    if not qualname:
        return module, text
    body: list[ast.stmt] = ast.parse(text).body
    for part in qualname.split("."):
        node = next(
            (n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part),
            None,
        )
        if node is None:
            raise ValueError(f"show: {module} defines no {qualname!r}")
        body = node.body
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return f"{module} · {qualname}", textwrap.dedent(
        "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    ) + "\n"


def _source(obj: object) -> tuple[str, str]:
    """The title and the source of a function, class, module, Triton kernel, or of a `"module:name"`
    string."""
    if isinstance(obj, str):
        return _named(obj)
    obj = getattr(obj, "fn", obj)  # a Triton kernel wraps its Python function
    name = getattr(obj, "__qualname__", getattr(obj, "__name__", repr(obj)))
    module = getattr(obj, "__module__", None)
    title = name if inspect.ismodule(obj) or module in (None, "__main__") else f"{module} · {name}"
    return title, textwrap.dedent(inspect.getsource(obj))


def _cut(source: str, phase: str) -> str:
    lines = source.splitlines()
    markers = [(i, m) for i, line in enumerate(lines) if (m := _MARKER.match(line))]
    for i, marker in markers:
        if marker["name"] == phase:
            indent = len(marker["indent"])
            end = i + 1
            while end < len(lines) and not _MARKER.match(lines[end]):
                line = lines[end]
                if line.strip() and len(line) - len(line.lstrip()) < indent:
                    break
                end += 1
            return textwrap.dedent("\n".join(lines[i:end]).rstrip()) + "\n"
    known = ", ".join(repr(m["name"]) for _, m in markers) or "none"
    raise ValueError(f"show: no phase {phase!r}; the phases here are {known}")


def markers(source: str) -> dict[int, str]:
    """The phases that begin in a source text, by line number from 1."""
    return {
        i: m["name"] for i, line in enumerate(source.splitlines(), 1) if (m := _MARKER.match(line))
    }


def phases(obj: object) -> list[str]:
    """The names of the phases of a function, in order of appearance. `obj` is what `show` takes."""
    return list(markers(_source(obj)[1]).values())


def show(obj: object, phase: str | None = None) -> Listing:
    """Render `obj`, or one named phase of it, from its source.

    Args:
        obj: a function, class, module, Triton kernel, or a string `"package.module:function"` (read
            without importing it).
        phase: the name between the dashes of a `# -- name --` marker; None shows everything.

    Raises:
        ValueError: naming the phases there are, when there is no such phase, or when the string
            names nothing.
    """
    title, source = _source(obj)
    if phase is None:
        return Listing(title, source)
    return Listing(f"{title} · {phase}", _cut(source, phase))


def side_by_side(*objs: object, phase: str | None = None) -> SideBySide:
    """Render several functions, or the same phase of each, beside each other. Arguments as for
    `show`; listings pass through."""
    return SideBySide([obj if isinstance(obj, Listing) else show(obj, phase) for obj in objs])
