"""Which cells of a chapter show numbers of a stored measurement: the same on every machine, so that
`nbval_rules` compares them, whatever the cell's tags say.

A cell is one of these if its source, or that of a function or constant of the package that it
names, or of one that this names in turn, has the name of a measurement in `assets/` in it. Only
source is read: nothing is imported or run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = "nsa_tutorial"
ASSETS = Path(__file__).resolve().parents[2] / "assets"
_NOWHERE: set[str] = set()  # "module:name" of what leads to no measurement
MEASUREMENTS = frozenset(p.name for p in ASSETS.glob("*") if p.suffix in (".json", ".txt"))


def shows_measurements(source: str, imports: Mapping[str, str]) -> bool:
    """Whether a cell shows numbers of a stored measurement.

    Args:
        source: the cell's.
        imports: what the chapter's cells import, as `imported` gives it.
    """
    tree = _parsed(source)
    if tree is None:
        return False
    seen = set(_NOWHERE)
    if _reaches(_read(tree), imports, seen):
        return True
    _NOWHERE.update(seen)  # a search that found nothing has seen all that these lead to
    return False


def imported(sources: Iterable[str]) -> dict[str, str]:
    """What the import statements of some cells give a name to: `"module"` or `"module:name"`."""
    trees = (_parsed(source) for source in sources)
    return dict(pair for tree in trees if tree is not None for pair in _imports(tree))


def _parsed(source: str) -> ast.Module | None:
    """A cell's tree; None for a cell with a magic."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)


@functools.cache
def _module(name: str) -> tuple[dict[str, ast.stmt], dict[str, str]] | None:
    """What a module of the package defines at its top level, and what it imports, by name; None for
    what is no module of it."""
    if name.partition(".")[0] != PACKAGE:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [n for t in node.targets for n in ast.walk(t)]
            defined |= {n.id: node for n in targets if isinstance(n, ast.Name)}
    return defined, dict(_imports(tree))


# whether a piece of source has the name of a measurement in it, and what it names: `("name", "")`,
# or `("name", "attribute")`
_Piece = tuple[bool, frozenset[tuple[str, str]]]


def _read(tree: ast.AST) -> _Piece:
    has_one, named = False, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            has_one = has_one or _names_one(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named.add((node.value.id, node.attr))
        elif isinstance(node, ast.Name):
            named.add((node.id, ""))
    return has_one, frozenset(named)


@functools.cache
def _piece(module: str, name: str) -> _Piece:
    """What a module of the package defines as `name`, read once for all cells."""
    defined, _ = _module(module)
    return _read(defined[name])


@functools.cache
def _names_in(module: str) -> dict[str, str]:
    """What stands for a module, or for a name in one, within a module of the package."""
    defined, imports = _module(module)
    return imports | {name: f"{module}:{name}" for name in defined}


def _reaches(piece: _Piece, names: Mapping[str, str], seen: set[str]) -> bool:
    """Whether a piece of source has the name of a measurement in it, or leads to one that has.

    Args:
        names: what stands for a module, or for a name in one.
        seen: where the search has been.
    """
    has_one, named = piece
    if has_one:
        return True
    for name, attribute in named:
        place = names.get(name, "")
        if attribute:
            place = place and f"{place.replace(':', '.')}:{attribute}"
        if _leads(place, seen):
            return True
    return False


def _names_one(constant: object) -> bool:
    """Whether text is the name of a measurement, or the end of one: `f"{backend}_h200.json"`."""
    if not isinstance(constant, str) or not constant.endswith((".json", ".txt")):
        return False
    return any(name.endswith(constant) for name in MEASUREMENTS)


def _leads(place: str, seen: set[str]) -> bool:
    """Whether `"module:name"` is something of the package that leads to a measurement."""
    module, _, name = place.partition(":")
    known = _module(module) if name and place not in seen else None
    if known is None:
        return False
    seen.add(place)
    defined, imports = known
    if name not in defined:
        return _leads(imports.get(name, ""), seen)
    return _reaches(_piece(module, name), _names_in(module), seen)
