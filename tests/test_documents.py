"""What the pages and the docstrings say of the code, its backends and its platforms is so."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nsa_tutorial
from nsa_tutorial.backends import BACKENDS
from nsa_tutorial.runtime.environment import PUBLISHED_FOR

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "OPERATORS.md", "CONTRIBUTING.md")
SOURCES = sorted((ROOT / "nsa_tutorial").rglob("*.py"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(page: str, *head: str) -> list[list[str]]:
    """The rows of the Markdown table that has this head."""
    text = read(page)
    lines = text[text.index(f"| {' | '.join(head)} |\n") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines[2:]]


# -- platforms --

# What a marker calls them: `sys_platform` and `platform_machine`.
PLATFORMS = {
    "Linux on x86-64": ("linux", "x86_64"),
    "Linux on aarch64": ("linux", "aarch64"),
    "macOS on arm64": ("darwin", "arm64"),
    "macOS on x86-64": ("darwin", "x86_64"),
    "Windows on x86-64": ("win32", "AMD64"),
    "Windows on arm64": ("win32", "ARM64"),
}


@pytest.mark.parametrize(("language", "column"), [("triton", 1), ("tilelang", 2)])
def test_a_language_is_installed_where_the_pages_say(language: str, column: int) -> None:
    """The markers of pyproject.toml, the sentence of a cell that misses a language, and the table
    of README.md name the same platforms."""
    (line,) = re.findall(rf'^    "({language}>=.*)",$', read("pyproject.toml"), re.MULTILINE)
    marker = Requirement(line).marker
    installed = [
        name
        for name, (system, machine) in PLATFORMS.items()
        if marker.evaluate({"sys_platform": system, "platform_machine": machine})
    ]
    assert list(PUBLISHED_FOR[language]) == installed
    rows = table("README.md", "platform", "Triton", "TileLang", "tried")
    assert [row[0] for row in rows if row[column].startswith("yes")] == installed


# -- operators --

DECODING = ("decode_attention", "write_tokens", "write_summaries")
# of all of NSA, which Triton takes at once, too
PARTS = [
    part for operator, part in BACKENDS.items() if operator not in (*DECODING, "branches_at_once")
]


def test_the_backends_of_each_operator() -> None:
    """The last column of OPERATORS.md's table, against the functions that there are. What is made
    of several operators runs where all of them do."""
    names = {"reference": "PyTorch", "tilelang": "TileLang", "triton": "Triton"}
    for operators, _, told in table("OPERATORS.md", "operator", "computes", "backends"):
        for operator in re.findall(r"`(\w+)`", operators):
            parts = [BACKENDS[operator]] if operator in BACKENDS else PARTS
            parts = [("reference",)] if operator == "index_loss" else parts  # has no kernel
            runs = {name for key, name in names.items() if all(key in part for part in parts)}
            assert set(re.findall(r"PyTorch|TileLang|Triton", told)) == runs, operator


# -- names --


@functools.cache
def names_in(path: Path) -> set[str]:
    """What a module defines or imports: functions, classes, constants, fields, parameters."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@functools.cache
def modules() -> dict[str, list[Path]]:
    """The files that a text may mean by a module's or a package's name."""
    found: dict[str, list[Path]] = {}
    for path in SOURCES:
        name = path.parent.name if path.name == "__init__.py" else path.stem
        found.setdefault(name, []).append(path)
    return found


def is_there(name: str) -> bool:
    """Whether `module.attribute` is something, where `module` is one of ours."""
    module, *rest = name.removeprefix("nsa_tutorial.").split(".")
    if module in ("triton", "tilelang") and rest[0] not in modules():  # the languages themselves
        return find_spec(module) is None or hasattr(importlib.import_module(module), rest[0])
    if module not in modules():  # a class of ours, or another library's name
        return hasattr(nsa_tutorial, module) or not name.startswith("nsa_tutorial.")
    known = set().union(modules(), *map(names_in, modules()[module]), ["py", "html"])
    return not rest or rest[0] in known or (ROOT / name).exists()


@pytest.mark.parametrize("files", [*([page] for page in PAGES), SOURCES], ids=[*PAGES, "sources"])
def test_names_of_our_modules_exist(files: list[str | Path]) -> None:
    """`module.name` in backticks, and paths, in pages, docstrings and comments."""
    dotted = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
    missing = []
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        missing += [f"{file}: {name}" for name in dotted.findall(text) if not is_there(name)]
        paths = re.findall(r"`((?:nsa_tutorial|tests|assets|notebooks)/[\w./]*)`", text)
        missing += [f"{file}: {name}" for name in paths if not (ROOT / name).exists()]
    assert not missing, "\n".join(missing)


def test_names_that_stand_for_lucidrains_pieces() -> None:
    """Our side of OPERATORS.md's table holds names of the kernels and of the lists they walk."""
    where = (
        "kernels/triton/selected/forward.py",
        "kernels/triton/window/forward.py",
        "sparse/selected_attention.py",
    )
    source = "\n".join(read(f"nsa_tutorial/{name}") for name in where)
    for there, here in table("OPERATORS.md", "there", "here"):
        for name in re.findall(r"`([^`]+)`", here):
            assert re.search(rf"\b{re.escape(name)}(?!\w)", source), (
                f"{there}: no {name} in {where}"
            )


def test_what_operators_md_tells_of_a_gpu_is_what_was_recorded() -> None:
    """The second table of "Measuring"."""
    told = (ROOT / "OPERATORS.md").read_text()

    def ms(file: str, **asked: object) -> list[float]:
        rows = json.loads((ROOT / "assets" / file).read_text())["rows"]
        asked |= {"tokens": 65_536}
        return [x["ms"] for x in rows if all(x[name] == value for name, value in asked.items())]

    cells = []
    for file, size in itertools.product(
        ("blocks_h200.json", "tilelang_blocks_h200.json"), (64, 128)
    ):
        both = [ms(file, block_size=size, direction=d) for d in ("forward", "backward")]
        cells.append(" | ".join(" / ".join(f"{x:.1f}" for x in times) for times in both))
    sizes = {"file": "native_sizes_h200.json", "kernel": "triton"}
    passes = [[ms(**sizes, direction=d, lists=q)[0] for q in ("random", "smooth")]
              for d in ("forward", "backward")]  # fmt: skip
    cells.append(" | ".join(" / ".join(f"{x:.1f}" for x in times) for times in passes))
    dense = {"kernel": "dense, cuDNN"}
    cells[-1] += " | " + " + ".join(f"{x:.0f}" for x in ms("native_sizes_h200.json", **dense))
    tokens = ms("tokens_h200.json", kernel="triton"), ms("tokens_h200.json", **dense)
    cells.append(" | ".join(f"{x:.1f}" for x in tokens[0]))
    cells[-1] += " | " + " + ".join(f"{x:.0f}" for x in tokens[1])
    assert [cell for cell in cells if f"| {cell} |" not in told] == []
