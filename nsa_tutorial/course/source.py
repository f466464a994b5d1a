"""Show code from its source, whole or one named phase, so that what is read is what runs.

A long function is cut into phases by marker comments such as `# -- online softmax --`. A phase
reaches from its marker to the next marker, or to the end of the block it stands in. Source is read
from the file, never imported, when it is named by a string:
`show("nsa_tutorial.kernels.triton.selected.forward:kernel")` works where triton cannot be imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path

import nsa_tutorial
from nsa_tutorial.course.listing import MARKER, Listing, SideBySide
from nsa_tutorial.course.unwrapped import unwrapped

_PACKAGE = Path(nsa_tutorial.__file__).resolve().parent


def _path_of(file: str | None) -> str | None:
    """A file's path from the root of the repository; None for what is not the package's."""
    path = Path(file or "").resolve()
    if not path.is_relative_to(_PACKAGE):
        return None
    return path.relative_to(_PACKAGE.parent).as_posix()


def _listing(name: str, module: str, file: str | None, first: int, lines: list[str]) -> Listing:
    """A listing of the lines of a file, the number of the first given; `name` is "" for a whole
    module."""
    path = _path_of(file)
    where = path or ("" if module == "__main__" else module)
    title = " · ".join(part for part in (where, name) if part)
    return Listing(title, textwrap.dedent("".join(lines)), path=path, first=first)


def _named(name: str) -> Listing:
    """The listing of `"package.module:Qual.name"`, without importing the module itself."""
    module, _, qualname = name.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"show: no module {module!r}; expected 'package.module' or "
            f"'package.module:function', got {name!r}"
        )
    text = Path(spec.origin).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    if not qualname:
        return _listing("", module, spec.origin, 1, lines)
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
    return _listing(qualname, module, spec.origin, first, lines[first - 1 : node.end_lineno])


def _source(obj: object) -> Listing:
    """A function, class, module, Triton kernel, or what a `"module:name"` string names, whole."""
    if isinstance(obj, str):
        return _named(obj)
    obj = unwrapped(obj)
    lines, first = inspect.getsourcelines(obj)
    if inspect.ismodule(obj):
        return _listing("", obj.__name__, obj.__file__, 1, lines)
    name = getattr(obj, "__qualname__", getattr(obj, "__name__", repr(obj)))
    module = getattr(obj, "__module__", None) or "__main__"
    return _listing(name, module, inspect.getsourcefile(obj), first, lines)


def _cut(whole: Listing, phase: str) -> Listing:
    lines = whole.code.splitlines()
    found = [(i, m) for i, line in enumerate(lines) if (m := MARKER.match(line))]
    for i, marker in found:
        if marker["name"] == phase:
            indent = len(marker["indent"])
            end = i + 1
            while end < len(lines) and not MARKER.match(lines[end]):
                line = lines[end]
                if line.strip() and len(line) - len(line.lstrip()) < indent:
                    break
                end += 1
            code = textwrap.dedent("\n".join(lines[i:end]).rstrip()) + "\n"
            title = f"{whole.title} · {phase}"
            return replace(whole, title=title, code=code, first=whole.first + i)
    known = ", ".join(repr(m["name"]) for _, m in found) or "none"
    raise ValueError(f"show: no phase {phase!r}; the phases here are {known}")


def markers(source: str) -> dict[int, str]:
    """The phases that begin in a source text, by line number from 1."""
    return {
        i: m["name"] for i, line in enumerate(source.splitlines(), 1) if (m := MARKER.match(line))
    }


def phases(obj: object) -> list[str]:
    """The names of the phases of a function, in order of appearance. `obj` is what `show` takes."""
    return list(markers(_source(obj).code).values())


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
    whole = _source(obj)
    return whole if phase is None else _cut(whole, phase)


def side_by_side(*objs: object, phase: str | None = None) -> SideBySide:
    """Render several functions, or the same phase of each, beside each other. Arguments as for
    `show`; listings pass through."""
    return SideBySide([obj if isinstance(obj, Listing) else show(obj, phase) for obj in objs])
