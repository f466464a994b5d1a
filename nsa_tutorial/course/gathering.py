"""A function of the reader's notebook with all that it needs, as a piece for a file of its own."""

from __future__ import annotations

import builtins
import importlib
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.library_file import FILE, Piece
from nsa_tutorial.course.unwrapped import unwrapped

_VALUES = (bool, int, float, str, type(None))


class Unkept(Exception):
    """Why a function cannot stand in a file of its own, in a sentence."""


def piece_of(chapter: str, exercise: Exercise, function: Callable) -> Piece:
    """A function with all that it needs of the reader's notebook.

    Raises:
        Unkept: for what a file cannot hold, naming it.
    """
    imports: dict[str, None] = {}
    sources: dict[str, str] = {}
    _gather(exercise.name, function, imports, sources)
    stages = tuple(stage.name for stage in exercise.stages)
    return Piece(
        chapter, exercise.name, stages, tuple(imports), "\n\n\n".join(sources.values()).strip()
    )


def _gather(name: str, value: object, imports: dict[str, None], sources: dict[str, str]) -> None:
    """Note the source of a function or class of the notebook, those that it uses first."""
    if name in sources:
        return
    source = _source(name, value)
    sources[name] = ""  # a function may call itself
    namespace = _namespace(value)
    needed = sources.pop(name)
    for used in _names_used(source):
        if used in namespace and not hasattr(builtins, used):
            _note(used, namespace[used], imports, sources)
    sources[name] = needed + source


def _note(name: str, value: object, imports: dict[str, None], sources: dict[str, str]) -> None:
    """Note what a name stands for: an import, a value, or something else of the notebook."""
    if isinstance(value, ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        if name == value.__name__:
            imports[f"import {name}"] = None
        elif parent and last == name:
            imports[f"from {parent} import {last}"] = None
        else:
            imports[f"import {value.__name__} as {name}"] = None
        return
    if type(value) in _VALUES or (
        isinstance(value, tuple) and all(type(v) in _VALUES for v in value)
    ):
        sources.setdefault(name, f"{name} = {value!r}")
        return
    home = getattr(value, "__module__", None) or ""
    if home == Path(FILE).stem:
        return  # it stands in the same file
    if home and home != "__main__" and _is_there(home, getattr(value, "__name__", name), value):
        original = getattr(value, "__name__", name)
        renamed = "" if original == name else f" as {name}"
        imports[f"from {home} import {original}{renamed}"] = None
        return
    _gather(name, value, imports, sources)


def _is_there(module: str, name: str, value: object) -> bool:
    """Whether a module has the value under that name: then an import finds it."""
    try:
        return getattr(importlib.import_module(module), name, None) is value
    except ImportError:
        return False


def _source(name: str, value: object) -> str:
    try:
        return textwrap.dedent(inspect.getsource(unwrapped(value))).strip()
    except (OSError, TypeError):
        kind = type(value).__name__
        raise Unkept(f"it uses `{name}`, a {kind} of the notebook: make it an argument") from None


def _namespace(value: object) -> dict[str, object]:
    function = unwrapped(value)
    if inspect.isclass(function):
        return vars(sys.modules[function.__module__])
    return getattr(function, "__globals__", {})


def _names_used(source: str) -> list[str]:
    """The global names that a definition uses, decorators and defaults among them, in order."""
    found: dict[str, None] = {}

    def walk(table: symtable.SymbolTable, is_top: bool) -> None:
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or (is_top and not symbol.is_assigned())
            if is_global and symbol.is_referenced():
                found[symbol.get_name()] = None
        for child in table.get_children():
            walk(child, False)

    walk(symtable.symtable(source, "<source>", "exec"), True)
    return list(found)
