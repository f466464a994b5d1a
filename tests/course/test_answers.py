"""No page answers an exercise before the reader does: what is stored holds no solution's lines."""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Callable

import pytest

from nsa_tutorial.course import copying, exercises, show
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS, Chapter
from nsa_tutorial.course.exercises import Exercise

WITH_EXERCISES = [c for c in CHAPTERS if c.is_ready and c.name in exercises.chapters()]
LONG = 20  # characters of a line that says something


def squeezed(text: str) -> set[str]:
    """The lines of a text, without white space and comments."""
    return {re.sub(r"\s+", "", line.split("  #")[0]) for line in text.splitlines()}


def body(function: Callable) -> str:
    """The source of a function, without its head and its docstring."""
    source = show(function).code
    try:
        statements = ast.parse(source).body[0].body
    except SyntaxError:  # a lambda in the middle of a call
        return ""
    first = statements[0]
    has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(source.splitlines()[statements[has_text].lineno - 1 :])


def telling(exercise: Exercise, given: str) -> set[str]:
    """The lines of a solution that the reader has to find: none that is `given` on the page."""
    lines = set().union(*(squeezed(body(f)) for f in (exercise.solution, *exercise.parts)))
    known = squeezed(given) | squeezed(exercise.statement)
    return {line for line in lines - known if len(line) >= LONG}


def shown(cell: dict) -> set[str]:
    """The lines of a cell's outputs."""
    found: set[str] = set()
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        page = re.sub(r"<[^>]+>", "", html.unescape("".join(data.get("text/html", ""))))
        for text in ("".join(output.get("text", "")), "".join(data.get("text/plain", "")), page):
            found |= squeezed(text)
    return found


def places(cells: list[dict], chapter: str, name: str) -> tuple[int, int]:
    """Where an exercise's statement and its check stand."""
    code = ["".join(cell["source"]) for cell in cells]
    asked = re.compile(rf'exercise\("{chapter}", "{name}"\)')
    judged = re.compile(rf'check\("{chapter}", {name}={name}\)')
    return next(i for i, s in enumerate(code) if asked.match(s)), next(
        i for i, s in enumerate(code) if judged.match(s)
    )


each = pytest.mark.parametrize("chapter", WITH_EXERCISES, ids=lambda c: c.name)


@each
def test_no_output_answers_an_exercise_before_its_check(chapter: Chapter) -> None:
    """Between statement and check no line of it; what was read before them, only pieces."""
    cells = json.loads((NOTEBOOKS / chapter.file).read_text(encoding="utf-8"))["cells"]
    for name, exercise in exercises.chapter_exercises(chapter.name).items():
        start, end = places(cells, chapter.name, name)
        lines = telling(exercise, "\n".join("".join(c["source"]) for c in cells[: end + 1]))
        for i, cell in enumerate(cells[: end + 1]):
            told = shown(cell) & lines
            most = len(lines) * 2 / 3 if i < start else 0
            assert len(told) <= max(most, i < start), f"{name}: cell {cell['id']} shows {told}"


@each
def test_a_fresh_copy_answers_nothing(chapter: Chapter) -> None:
    """Nor behind the check, where the chapter shows its own function."""
    stored = json.loads((NOTEBOOKS / chapter.file).read_text(encoding="utf-8"))
    cells = copying.reader_copy(stored)["cells"]
    for name, exercise in exercises.chapter_exercises(chapter.name).items():
        start, end = places(cells, chapter.name, name)
        lines = telling(exercise, "\n".join("".join(c["source"]) for c in cells[: end + 1]))
        for cell in cells[start + 1 :]:
            told = shown(cell) & lines
            assert not told, f"{name}: cell {cell['id']} shows {told}"


def test_a_leak_is_found() -> None:
    exercise = exercises.chapter_exercises("online_softmax")["merge_partials"]
    lines = telling(exercise, "def merge_partials(o1, lse1, o2, lse2):\n    ...")
    assert len(lines) >= 3
    cell = {"outputs": [{"data": {"text/plain": body(exercise.solution)}}]}
    assert shown(cell) & lines == lines
    page = {"outputs": [{"data": {"text/html": f"<b>{html.escape(body(exercise.solution))}</b>"}}]}
    assert shown(page) & lines == lines
