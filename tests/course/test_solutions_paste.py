"""A solution, pasted into a cell of its chapter, runs: every name in it is one that the cells above
have imported."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType

import nbformat
import pytest

from nsa_tutorial.course import exercises, languages, solution
from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.judging import judge

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CHAPTER = {path.stem[3:]: path for path in NOTEBOOKS}
ALL = [(c, e) for c in exercises.chapters() for e in exercises.chapter_exercises(c).values()]


TAKES = r"""\(?(built\('\w+'\)(, )?)+\)?"""  # what a chapter takes from the reader's library


@functools.cache
def cells_of(chapter: str) -> list[nbformat.NotebookNode]:
    return nbformat.read(CHAPTER[chapter], 4).cells


def imports_above(chapter: str, name: str) -> Iterator[ast.stmt]:
    """The import statements of the chapter's cells, down to the exercise, and what the cells take
    from the reader's library by `built`; imports inside of functions are none."""
    for cell in cells_of(chapter):
        if cell.source.startswith(f'exercise("{chapter}", "{name}")'):
            return
        if cell.cell_type != "code" or not re.search(r"import|= built\(", cell.source):
            continue
        for statement in ast.parse(cell.source).body:
            within = statement.body if isinstance(statement, ast.If) else [statement]
            yield from (
                s for s in within
                if isinstance(s, ast.Import | ast.ImportFrom)
                or (isinstance(s, ast.Assign) and re.fullmatch(TAKES, ast.unparse(s.value)))
            )  # fmt: skip
    raise AssertionError(f"the chapter does not pose {name}")


def namespace_above(chapter: str, name: str) -> dict[str, object]:
    """What these statements import. Of a compiler that is not installed here, the stand-in."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for statement in imports_above(chapter, name):
        try:
            exec(ast.unparse(statement), namespace)
        except ImportError:
            for imported in statement.names:
                bound = imported.asname or imported.name
                namespace[bound] = getattr(languages, bound, None)
    return namespace


def names_in(code: CodeType) -> set[str]:
    """The global names that a piece of code and the functions in it read."""
    found = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return found.union(*(names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def pasted(code: str, name: str, namespace: dict[str, object]) -> Callable:
    """The function that a cell with `code` defines."""
    file = f"<solution of {name}>"
    # a kernel's source is read from where it was defined, as in a notebook
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    compiled = compile(code, file, "exec", dont_inherit=True)
    defined = {i.argval for i in dis.get_instructions(compiled) if i.opname == "STORE_NAME"}
    assert name in defined
    assert names_in(compiled) <= {*namespace, *dir(builtins), *defined}
    exec(compiled, namespace)
    return namespace[name]


@pytest.mark.parametrize(("chapter", "e"), ALL, ids=[f"{c}-{e.name}" for c, e in ALL])
def test_a_pasted_solution_is_right(chapter: str, e: Exercise) -> None:
    """On its last case: on all of them, the same lines are judged where they stand. Those of the
    exercises before it have been pasted, too."""
    namespace = namespace_above(chapter, e.name)
    for earlier in exercises.chapter_exercises(chapter):
        code = solution(chapter, earlier).code
        function = pasted(code, earlier, namespace)
        if earlier == e.name:
            break
    one = replace(e, stages=(), cases=(e.runnable or e.cases)[-1:], misconceptions=())
    assert judge(one, function).outcome == ("right" if e.runnable else "not attempted")
    assert max(map(len, code.splitlines())) <= 100
