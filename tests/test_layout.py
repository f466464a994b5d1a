"""The parts of the course are the folders of the package: arrows go down, a chapter's files are
found by its name, and a file is read in one sitting."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nsa_tutorial"
# Folders and modules of the package, the highest first. What shares a line knows nothing of each
# other. `__init__` stands outside: it names the layer, and imports it when it is asked for.
LEVELS = (
    {"course"},
    {"training.many_gpus.run"},
    {"bench", "training.capstone"},
    {"interop"},
    {"layer"},
    {"layer_parts"},
    {"serving", "training.many_gpus"},
    {"ops"},
    {"ops_decoding", "ops_indexing"},
    {"compositions"},
    {"library", "library_choice", "library_decoding", "library_rotary"},
    {"library_at_once", "library_backward"},
    {"backends", "arguments"},
    {"kernels", "training"},
    {"sparse"},
    {"exact"},
    {"runtime"},
)
BELOW = {place: set().union(*LEVELS[i + 1 :]) for i, level in enumerate(LEVELS) for place in level}
MODULES = sorted(PACKAGE.rglob("*.py"))
CODE = sorted(p for folder in ("nsa_tutorial", "tests", "notebooks", "book") for p in
              (ROOT / folder).rglob("*.py"))  # fmt: skip
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def place_of(module: str) -> str:
    """The folder or the module of the package that holds `nsa_tutorial.…`."""
    if module.startswith("nsa_tutorial.training.capstone"):
        return "training.capstone"  # it trains what gradients are only a part of
    if module.startswith("nsa_tutorial.training.many_gpus"):
        # what the layer takes, and commands that train it
        is_run = re.search(r"\.(__main__|verify|record\w*)(\.|$)", module)
        return "training.many_gpus.run" if is_run else "training.many_gpus"
    place = module.split(".")[1]
    return "layer" if place.startswith("NativeSparseAttention") else place


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """The modules of this package that a file names, with their lines: in imports wherever they
    stand, and in strings, which `import_module` and tables of functions take."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {
        node.value for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(source, package)
            names = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = node not in docstrings and re.match(r"nsa_tutorial(\.\w+)+", node.value)
            names = [found.group()] if found else []
        for name in names:
            if name.startswith("nsa_tutorial."):
                yield node.lineno, name


def test_arrows_go_down() -> None:
    """A module imports from its own folder and from what stands below it."""
    wrong = []
    for path in set(MODULES) - {PACKAGE / "__init__.py"}:
        own = place_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert own in BELOW, f"{name_of(path)}: {own}: expected a place in LEVELS"
        wrong += [
            f"{name_of(path)}:{line} names {module}"
            for line, module in imports(path)
            if place_of(module) not in {own, *BELOW[own]}
        ]
    assert not wrong, "\n".join(sorted(wrong))


def module_of(name: str) -> str:
    """The module or the package that holds `name`, which may be one itself."""
    while not is_module(name):
        name = name.rpartition(".")[0]
    return name


def test_no_circles() -> None:
    """No file needs, by way of others, a file that needs it. A package's `__init__`, which hands
    out what its files have, is none of them."""
    needs: dict[str, set[str]] = {}
    for path in MODULES:
        if path.name != "__init__.py":
            own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            needs[own] = {module_of(name) for _, name in imports(path)} - {own}
    TopologicalSorter(needs).prepare()  # CycleError names the circle


@pytest.mark.parametrize(("language", "other"), [("triton", "tilelang"), ("tilelang", "triton")])
def test_languages_know_nothing_of_each_other(language: str, other: str) -> None:
    found = [
        f"{name_of(path)}:{line} names {module}"
        for path in (PACKAGE / "kernels" / language).rglob("*.py")
        for line, module in imports(path)
        if module.startswith(f"nsa_tutorial.kernels.{other}")
    ]
    assert not found, "\n".join(found)


def test_what_counts_as_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "nsa_tutorial" / "exact" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        '"""nsa_tutorial.docstring"""\n'
        "import torch, nsa_tutorial.a\n"
        "from nsa_tutorial import b, ops as c\n"
        "def f():\n"
        "    from nsa_tutorial.d.e import g\n"
        "    from ..h import i\n"
        '    import_module("nsa_tutorial.j")\n'
        'TABLE = {"key": "nsa_tutorial.k.l:m", "prose": "see nsa_tutorial.n"}\n'
        'name = f"nsa_tutorial.p.{TABLE}"\n'
    )
    assert {place_of(module) for _, module in imports(path)} == {*"abdhjkp", "ops"}


def test_operators_import_no_kernel_language() -> None:
    """Triton and TileLang are imported when a kernel is first called, and not before; a mesh of
    GPUs, when a layer gets one."""
    names = ("triton", "tilelang", "tvm", "nsa_tutorial.training.many_gpus")
    code = (
        "import sys, nsa_tutorial; from nsa_tutorial import ops, NativeSparseAttention; "
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# -- a chapter's files --

PARTS = ("exact", "sparse", "training")
# Chapters whose modules are kernels, in the package and in the tests; all others have the chapter's
# name.
KERNELS_OF = {
    "two_tile_languages": ("course/kernels/two_tile_languages",),
    "tilelang_forward": ("kernels/tilelang/selected/forward",),
    "triton_forward": ("kernels/triton/selected/forward",),
    "backward_kernels": (
        "kernels/tilelang/selected/backward",
        "kernels/triton/selected/backward",
    ),
    "selection_kernels": ("kernels/tilelang/choice", "kernels/triton/choice"),
    "performance": ("course/kernels/performance",),
    "after_nsa": ("sparse/indexer",),
}
CHAPTERS = [path.stem[3:] for path in NOTEBOOKS if path.stem != "00_start_here"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_found_by_its_name(chapter: str) -> None:
    """Its module and its tests, in folders of one name, and its exercises and its pictures in the
    course."""
    found = KERNELS_OF.get(chapter, [f"{part}/{chapter}" for part in PARTS])
    found = [name for name in found if list(PACKAGE.glob(f"{name}*"))]
    assert len(found) == len(KERNELS_OF.get(chapter, [chapter]))
    for name in found:
        folder, _, module = name.rpartition("/")
        tests = list((ROOT / "tests" / folder).glob(f"test_*{module}.py"))
        assert len(tests) == 1, f"tests of {name}: {tests}"
    for folder in ("exercises", "widgets"):
        path = PACKAGE / "course" / folder / f"{chapter}.py"
        assert path.exists(), f"{name_of(path)} does not exist"


# -- what is read in one sitting --

LONGEST = 300
# Longer ones, and why.
LONG = {
    "nsa_tutorial/ops.py": "a function for each operator, whose docstring is its manual",
    "nsa_tutorial/course/attempts.py": "a third of it is a table of what errors mean",
    "nsa_tutorial/course/costs.py": "bytes and FLOPs of one implementation after the other",
    "nsa_tutorial/kernels/tilelang/selected/backward.py": "the four kernels of one backward",
    "nsa_tutorial/kernels/tilelang/compressed/backward.py": "the three kernels of one backward",
    "nsa_tutorial/kernels/triton/selected/backward.py": "the four kernels of one backward",
    "nsa_tutorial/kernels/triton/launch_options.py": "options of all kernels, by one measure",
    "nsa_tutorial/course/train_heads.py": "run once, to make assets/heads.npz; no chapter shows it",
}
# A chapter's exercises, or its pictures, one after the other: a reader opens one of them, by
# `show`.
PIECE_BY_PIECE = ("exercises", "widgets")


def test_a_module_is_read_in_one_sitting() -> None:
    """At most 300 lines, or a reason is given; a reason that is no longer needed goes."""
    lines = {
        name_of(path): len(path.read_text().splitlines())
        for path in MODULES
        if path.parent.name not in PIECE_BY_PIECE
    }
    long = {name: n for name, n in lines.items() if n > LONGEST}
    assert long.keys() == LONG.keys(), {
        f"over {LONGEST} lines, expected a reason in LONG": long.keys() - LONG.keys(),
        "needs no reason in LONG": LONG.keys() - long.keys(),
    }


def test_a_line_fits_a_cell() -> None:
    """100 columns; a mark for ruff and a string without spaces may go past them, as in ruff."""
    wide = []
    for path in [*CODE, *NOTEBOOKS]:
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = "\n".join("".join(cell["source"]) for cell in cells)
        lines = (line.partition("  # noqa")[0] for line in text.splitlines())
        wide += [(name_of(path), x) for x in lines if len(x) > 100 and " " in x.strip()]
    assert not wide, wide
