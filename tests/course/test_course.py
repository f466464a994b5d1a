"""Showing source, drawing, judging exercises, and running notebooks: the frame of every chapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import judged
import nbformat
import numpy as np
import pytest
import torch

from nsa_tutorial.course import (
    check,
    execute,
    exercise,
    exercises,
    solution,
)
from nsa_tutorial.course.attempts import gradients
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.values import difference, same


def double(x: torch.Tensor, y: float = 2.0) -> torch.Tensor:
    return x * y


EXERCISE = Exercise(
    name="double",
    statement="Double `x`.",
    minutes=1,
    difficulty=1,
    solution=double,
    misconceptions=(
        Misconception("squaring", lambda x, y=2.0: x**2, "2 squared is 4, which hides it."),
        Misconception(
            "refusing", lambda x, y=2.0: (_ for _ in ()).throw(KeyError("no")), "Why raise?"
        ),
    ),
    cases=(
        Case("a two", lambda: (torch.tensor([2.0]),)),
        Case("three numbers", lambda: (torch.arange(3.0),)),
    ),
)


@pytest.mark.parametrize(
    ("attempt", "outcome", "text"),
    [
        (double, "right", "Right, on all 2 cases."),
        (lambda x: x + x, "right", "Right"),
        (lambda x: (2 * x).numpy(), "right", "Right"),
        (lambda x: x**2, "misconception", "Not yet. This looks like squaring. 2 squared is 4"),
        (lambda x: {}["x"], "misconception", "This looks like refusing. Why raise?"),
        (lambda x: x * 3, "wrong", "a two.\ngot      [6.]\nexpected [4.]\nwith x = [2.]"),
        (lambda x: x + 2, "wrong", "three numbers"),
        (lambda x: x[None] * 2, "wrong", "Got shape [1, 1], expected [1]."),
        (lambda x: [][0], "wrong", "it raised IndexError"),
        (lambda x: print(end=""), "wrong", "It returned None: is the return statement missing?"),
        (lambda x: "four", "wrong", "got      'four'\nexpected [4.]"),
        (lambda x: x * torch.nan, "wrong", "got      [nan]"),
        (3, "wrong", "not a function but of type int"),
    ],
    ids=lambda p: p if isinstance(p, str) and len(p) < 30 else "",
)
def test_judge(attempt: object, outcome: str, text: str) -> None:
    verdict = judge(EXERCISE, attempt)
    assert verdict.outcome == outcome
    assert text in verdict.text


def test_a_gradient_that_does_not_arrive_is_told_by_its_argument() -> None:
    def run(attempt: Callable, x: torch.Tensor, y: torch.Tensor) -> object:
        x, y = x.requires_grad_(), y.requires_grad_()
        o = attempt(x, y)
        return (o, *gradients(o, torch.ones_like(o), x=x, y=y))

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    cases = (Case("a two and a three", lambda: (torch.tensor([2.0]), torch.tensor([3.0]))),)
    asked = replace(EXERCISE, solution=product, run=run, misconceptions=(), cases=cases)
    assert judge(asked, lambda x, y: x * y).outcome == "right"
    verdict = judge(asked, lambda x, y: x * y.detach())
    assert verdict.outcome == "wrong"
    assert "No gradient reached `y`" in verdict.text
    assert "What was detached on the way" in verdict.text
    assert "return statement" not in verdict.text


def test_lists_of_another_length_are_shown_where_they_are_short() -> None:
    assert (
        difference([0, 2], [0, 2, 5])
        == "Got 2 values, expected 3.\ngot      [0, 2]\nexpected [0, 2, 5]"
    )
    assert difference(list(range(17)), [0]) == "Got 17 values, expected 1."
    nested = difference(torch.tensor([[0, 2]]), [[0, 2]])
    assert nested.startswith("Got type Tensor, expected list.\n")
    assert difference(torch.tensor([0, 2]), [0, 3]) == "got      [0, 2]\nexpected [0, 3]"
    assert difference([torch.zeros(2)], [torch.zeros(2)] * 2) == "Got 1 value, expected 2."


def test_the_rows_of_a_matrix_stand_below_one_another() -> None:
    case = Case("a matrix", lambda: (torch.eye(2),))
    verdict = judge(replace(EXERCISE, cases=(case,)), lambda x: x)
    assert verdict.text.endswith("with x = [[1., 0.],\n          [0., 1.]]")


def empty_with_docstring(x):
    """Double x."""
    ...


def empty_with_pass(x):
    pass


def not_implemented(x):
    raise NotImplementedError


@pytest.mark.parametrize(
    "attempt", [empty_with_docstring, empty_with_pass, not_implemented, lambda x: None]
)
def test_not_attempted(attempt: object) -> None:
    assert judge(EXERCISE, attempt).outcome == "not attempted"


def test_what_an_exercise_knows_is_computed_once() -> None:
    """The solution and a wrong one run once a case, the reader's each time."""
    runs = []

    def noted(name: str, function: Callable) -> Callable:
        return lambda x: runs.append(name) or function(x)

    wrong = Misconception(
        "squaring", noted("wrong", lambda x: x**2), "2 squared is 4, which hides it."
    )
    known = replace(EXERCISE, solution=noted("solution", double), misconceptions=(wrong,))
    factor = [3]
    attempt = noted("attempt", lambda x: factor[0] * x)
    assert [judge(known, attempt).outcome for _ in range(3)] == ["wrong"] * 3
    factor[0] = 2
    assert judge(known, attempt).outcome == "right"
    assert [runs.count(name) for name in ("solution", "wrong", "attempt")] == [2, 2, 8], "two cases"


def test_returning_a_constant_is_an_attempt() -> None:
    assert judge(EXERCISE, lambda x: 4).outcome == "wrong"


def test_same() -> None:
    nan, inf = float("nan"), float("inf")
    assert same(torch.tensor([nan, -inf, 1.0]), np.array([nan, -inf, 1.0 + 1e-7]), 1e-5)
    assert not same(torch.tensor([inf]), torch.tensor([-inf]), 1e-5)
    assert same((1, [2.0, "a"]), (1, (2.0, "a")), 1e-5)
    assert not same((1, 2), (1, 2, 3), 1e-5)
    assert not same(None, 0, 1e-5)
    assert not same(torch.ones(2, 1), torch.ones(2), 1e-5)
    assert same((torch.tensor([1, 2]), [0.5]), ([1, 2], torch.tensor([0.5])), 1e-5)
    assert not same([1, 2], torch.tensor([1, 3]), 1e-5)
    assert not same([[1, 2]], torch.tensor([1, 2]), 1e-5)


ALL = [
    pytest.param(c, e, id=f"{c}-{e}")
    for c in exercises.chapters()
    for e in exercises.chapter_exercises(c)
]


# their chapters' own tests give each of their mistakes
IN_CHAPTER = {
    "after_nsa": ("learned_index",),
    "capstone": ("train", "decoder_block"),
    "many_gpus": ("context_parallel", "gradients_home"),
    "decoding": ("decode_step", "complete_summaries", "merge_parts"),
    "block_selection": ("select_blocks", "block_sums"),
    "native_sparse_attention": ("native_sparse_attention",),
    "grouped_query_attention": ("grouped_attention", "score_group"),
}


def mistakes() -> list:
    """Each exercise with the misconceptions to try. In `make test`: of kernels to compile, and of
    what has a test in its chapter, the first; of a build, which has twenty and more, every fourth.

    The kernels of chapter 10, tilelang_forward, are judged in its own file.
    """
    params = []
    for p in ALL:
        chapter, name = p.values
        e = exercises.chapter_exercises(chapter)[name]
        if judged.is_apart(chapter, e):
            continue
        compiles, is_long = e.run is not None, bool(e.stages)
        is_again = name in IN_CHAPTER.get(chapter, ())
        marks = [pytest.mark.exhaustive] if compiles or is_long else []
        if not is_again:
            params.append(pytest.param(*p.values, slice(None), id=p.id, marks=marks))
        if is_again or compiles:
            params.append(pytest.param(*p.values, slice(1), id=f"{p.id}, first misconception"))
        elif is_long and not compiles:
            some = slice(None, None, 4)
            params.append(pytest.param(*p.values, some, id=f"{p.id}, every fourth misconception"))
    return params


@pytest.mark.parametrize(("chapter", "name"), ALL)
def test_exercise_is_complete(chapter: str, name: str) -> None:
    """It catches a misconception and says how long it takes; its cases keep names and arguments."""
    e = exercises.chapter_exercises(chapter)[name]
    assert e.misconceptions
    assert e.difficulty in (1, 2, 3)
    assert 1 <= e.minutes <= (50 if e.stages else 20)
    assert [c.name for c in e.cases] == list(dict.fromkeys(c.name for c in e.cases))
    for case in e.cases:
        assert same(case.arguments(), case.arguments(), 0.0), case.name


@pytest.mark.parametrize(("chapter", "name", "some"), mistakes())
def test_exercise(chapter: str, name: str, some: slice) -> None:
    """The solution is right, misconceptions are named as themselves, any other answer is just
    wrong."""
    judged.assert_mistakes_are_named(exercises.chapter_exercises(chapter)[name], some)


@pytest.mark.parametrize(("chapter", "name"), ALL)
def test_statement_and_solution_read(chapter: str, name: str) -> None:
    e = exercises.chapter_exercises(chapter)[name]
    markdown = exercise(chapter, name)._repr_markdown_()
    assert f"{e.minutes} minutes" in markdown
    assert e.statement.strip() in markdown
    assert e.solution.__name__ in solution(chapter, name).code


def test_check_reports_each() -> None:
    chapter = "compression"
    known = {name: e for name, e in exercises.chapter_exercises(chapter).items() if not e.missing}
    report = check(chapter, **{name: e.solution for name, e in known.items()})
    assert re.findall(r"^✓ (\w+): ", repr(report), re.M) == list(known)


def test_unknown_chapter_and_exercise() -> None:
    with pytest.raises(
        ValueError, match="no exercises for chapter 'nothing'; chapters with exercises: "
    ):
        check("nothing", f=double)
    with pytest.raises(ValueError, match="has no exercise 'f'; it has "):
        check(exercises.chapters()[0], f=double)


def notebook(*cells: tuple[str, list[str]]) -> nbformat.NotebookNode:
    nb = nbformat.v4.new_notebook()
    for i, (source, tags) in enumerate(cells):
        cell = nbformat.v4.new_code_cell(source, id=f"cell-{i}")
        if tags:
            cell.metadata["tags"] = tags
        nb.cells.append(cell)
    return nb


@pytest.mark.exhaustive
def test_executing_twice_changes_nothing(tmp_path) -> None:
    path = tmp_path / "n.ipynb"
    nb = notebook(
        ("import time\nprint(time.perf_counter_ns())", ["nbval-ignore-output"]),
        ("import ipywidgets\nipywidgets.IntSlider()", []),
        ("print('a', flush=True)\nprint('b')\n1 + 1", []),
    )
    assert execute.write(path, execute.execute(nb, folder=tmp_path))
    first = path.read_text()
    assert not execute.write(path, execute.execute(nbformat.read(path, 4), folder=tmp_path))
    assert path.read_text() == first
    stored = nbformat.read(path, 4)
    assert [c.execution_count for c in stored.cells] == [1, 2, 3]
    assert "widgets" not in stored.metadata
    assert list(stored.cells[1].outputs[0].data) == ["text/plain"], "controls without a kernel"
    assert [o.output_type for o in stored.cells[2].outputs] == ["stream", "execute_result"]
    execute.write(path, execute.execute(nbformat.read(path, 4), folder=tmp_path, refresh=True))
    assert path.read_text() != first


def test_a_changed_cell_gets_a_new_output(tmp_path) -> None:
    nb = execute.execute(notebook(("print('one')", ["nbval-ignore-output"])), folder=tmp_path)
    nb.cells[0].source = "print('two')"
    assert execute.execute(nb, folder=tmp_path).cells[0].outputs[0].text == "two\n"


def test_gpu_cells_wait_for_a_gpu(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nb = execute.execute(notebook(("raise SystemError", ["gpu"]), ("1", [])), folder=tmp_path)
    assert nb.cells[0].outputs == []
    assert nb.cells[1].outputs[0].data["text/plain"] == "1"


def test_execute_command_names_what_it_cannot_find(capsys: pytest.CaptureFixture) -> None:
    assert execute.main(["no-such-chapter"]) == 2
    assert "no notebook in notebooks/ matches no-such-chapter" in capsys.readouterr().out
