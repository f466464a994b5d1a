"""Mistakes as diffs of the solution: what a row makes, what excludes what, and whether every row of
every chapter still fits its solution."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

from nsa_tutorial.course import exercises
from nsa_tutorial.course.attempts import Raised, call
from nsa_tutorial.course.diffs import Edited, Switches, diffs, together
from nsa_tutorial.course.exercises import Case, Exercise
from nsa_tutorial.course.judging import judge

OFFSET = 1


def moved(numbers: list[Unknown], factor: int) -> list[Unknown]:  # noqa: F821
    """Each number times the factor, moved by the offset; with the offset at most 10."""
    scaled = [n * factor for n in numbers]
    scaled = [n + OFFSET for n in scaled]
    return [min(n, 10) for n in scaled]


def nested(factor: int) -> Callable:
    """A function that multiplies, as a factory of kernels makes one."""

    def kernel(n: int) -> int:
        return n * factor

    return kernel


def edited(*edits: tuple[str, str]) -> Edited:
    return Edited(moved, dict(edits))


PLUS = ("n * factor", "n + factor")
NO_OFFSET = ("n + OFFSET", "n")
FROM_BELOW = ("min(n, 10)", "max(n, 10)")

# -- one mistake --


def test_a_piece_is_replaced() -> None:
    """The rest stays, with the names of the solution's module and its kind of annotations."""
    assert moved([1, 2, 9], 3) == [4, 7, 10]
    assert edited(PLUS)([1, 2, 9], 3) == [5, 6, 10]
    assert edited(PLUS, FROM_BELOW)([1, 2, 9], 3) == [10, 10, 13]
    assert edited(PLUS).source == inspect.getsource(moved).replace(*PLUS)


def test_lines_are_added_and_taken_out() -> None:
    first = "    scaled = [n * factor for n in numbers]\n"
    two = edited((first, "    scaled = numbers\n    scaled = scaled[:2]\n"))
    assert two([1, 2, 9], 3) == [2, 3]
    assert edited(("    scaled = [n + OFFSET for n in scaled]\n", ""))([1, 2], 3) == [3, 6]


def test_the_source_of_a_function_inside_can_be_read() -> None:
    """Triton and TileLang read a kernel's source before they compile it."""
    kernel = Edited(nested, {"n * factor": "n - factor"})(3)
    assert kernel(5) == 2
    assert "return n - factor" in inspect.getsource(kernel)


def test_an_edited_solution_stands_for_a_function() -> None:
    wrong = edited(PLUS)
    assert list(inspect.signature(wrong).parameters) == ["numbers", "factor"]
    assert "n + factor" in inspect.getsource(wrong)
    assert repr(wrong) == "Edited(moved, {'n * factor': 'n + factor'})"


def test_an_error_is_found_in_the_edited_line() -> None:
    case = Case("one number", lambda: ([1], 3))
    raised = call(exercise(), edited(("min(n, 10)", "missing(n, 10)")), case)
    assert isinstance(raised, Raised)
    assert raised.line == "return [missing(n, 10) for n in scaled]"


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ([("n - factor", "n")], r"'n - factor' is to stand once in the source, .* there 0 times"),
        ([("scaled = [", "[")], r"'scaled = \[' is to stand once in the source, .* there 2 times"),
        ([("the offset", "")], r"'the offset' is to stand once in the source, .* there 2 times"),
        ([PLUS, ("factor for n", "n for n")], r"'n \* factor' and 'factor for n' overlap"),
        ([("factor for n", "n for n"), PLUS], r"'n \* factor' and 'factor for n' overlap"),
        ([PLUS, ("* fac", "+ fac")], r"'n \* factor' and '\* fac' overlap"),
        ([("n * factor", "n * factor")], r"'n \* factor' is replaced by itself"),
    ],
    ids=["absent", "twice", "docstring", "overlap", "the other order", "inside", "no change"],
)
def test_an_edit_that_does_not_fit_is_named(edits: list[tuple[str, str]], told: str) -> None:
    wrong = edited(*edits)
    for use in (lambda: wrong.source, lambda: wrong([1], 3)):
        with pytest.raises(ValueError, match=rf"^diffs\(moved\): {told}$"):
            use()


def test_pieces_may_touch() -> None:
    assert edited(("n * ", "n + "), ("factor for", "factor**2 for"))([1], 2) == [6]


# -- two at once --


def test_both_edits_are_made_in_either_order() -> None:
    first, second = edited(PLUS), edited(NO_OFFSET)
    for both in (together(first, second), together(second, first)):
        assert both is not None
        assert both([1, 2], 3) == [4, 5]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("n * factor", "n // factor"), r"both replace 'n \* factor'"),
        (("factor for n", "2 for n"), r"'n \* factor' and 'factor for n' overlap"),
    ],
    ids=["same piece", "overlap"],
)
def test_edits_of_one_place_exclude_each_other(other: tuple[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        together(edited(PLUS), edited(other))


def test_edits_that_leave_no_python_together_exclude_each_other() -> None:
    first = edited(("n * factor", "n * m for m in [factor]"))
    second = edited((" for n in numbers", ","))
    assert ast.parse(first.source) and ast.parse(second.source)
    with pytest.raises(ValueError, match="exclude each other: invalid syntax"):
        together(first, second)


def test_what_two_mistakes_share_is_replaced_once() -> None:
    both = together(edited(PLUS, NO_OFFSET), edited(PLUS, FROM_BELOW))
    assert both is not None
    assert both.edits == dict([PLUS, NO_OFFSET, FROM_BELOW])


@pytest.mark.parametrize(
    "other",
    [
        lambda numbers, factor: numbers,
        Edited(nested, {"n * factor": "n"}),
        Edited(moved, dict([NO_OFFSET]), pairs=False),
        Switches(lambda slips, numbers, factor: numbers)("slip"),
    ],
    ids=["a function", "another solution", "no pairs", "switches"],
)
def test_of_others_nothing_is_known_together(other: Callable) -> None:
    assert together(edited(PLUS), other) is None
    assert together(other, edited(PLUS)) is None


# -- switches --


def switched_sum(slips: frozenset[str], numbers: list[int]) -> int:
    numbers = numbers[:-1] if "short" in slips else numbers
    numbers = numbers[1:] if "late" in slips else numbers
    return sum(numbers) * (-1 if "negative" in slips else 1)


def test_switches() -> None:
    made = Switches(switched_sum, exclusive=({"short", "late"},))
    assert [made(*slips)([1, 2, 4]) for slips in ((), ("short",), ("late",))] == [7, 3, 6]
    both = together(made("short"), made("negative"))
    assert both == made("negative", "short")
    assert hash(both) == hash(made("negative", "short")), "answers are kept by the function"
    assert both([1, 2, 4]) == -3
    with pytest.raises(ValueError, match="exclude each other: late, short"):
        together(made("short", "negative"), made("late"))
    assert together(made("short"), Switches(switched_sum)("late")) is None


# -- rows --


def always_ten(numbers: list[int], factor: int) -> list[int]:
    return [10] * len(numbers)


ROWS = [
    (*PLUS, "adding", "What does a factor do?"),
    (dict([NO_OFFSET, FROM_BELOW]), "leaving both out", "Where is the offset?"),
    (always_ten, "a constant", "Does the answer depend on the numbers?"),
    ("n * factor", "factor + n + 0", "adding"),
    ({"n * factor": "n // factor"}, "dividing", "Which way round?"),
    ("n * factor", "n / factor", "dividing", "Which way round, and what of the remainder?"),
]


def exercise(rows: list[tuple] = ROWS, **others: object) -> Exercise:
    return Exercise(
        name="moved", statement="", minutes=1, difficulty=1, solution=moved,
        misconceptions=diffs(moved, rows, **others),
        cases=(
            Case("two numbers", lambda: ([1, 2], 3)), Case("a large number", lambda: ([100], 2)),
        ),
    )  # fmt: skip


def test_rows() -> None:
    made = diffs(moved, ROWS)
    assert [m.name for m in made] == [
        "adding", "leaving both out", "a constant", "adding", "dividing", "dividing",
    ]  # fmt: skip
    assert made[0].wrong.edits == dict([PLUS])
    assert made[1].wrong.edits == dict([NO_OFFSET, FROM_BELOW])
    assert made[2].wrong is always_ten
    assert made[3].hint == made[0].hint, "another way to make it, with the hint above"
    assert made[4].hint != made[5].hint, "a hint of its own"


def test_a_row_without_a_hint_needs_its_name_above() -> None:
    with pytest.raises(ValueError, match=r"diffs\(moved\): 'adding' has no hint"):
        diffs(moved, [(*PLUS, "adding"), (*PLUS, "adding", "What does a factor do?")])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: getattr(row[0], "__name__", str(row[0])))
def test_a_row_is_recognised(row: tuple) -> None:
    e = exercise()
    for known in e.misconceptions:
        verdict = judge(e, known.wrong)
        assert (verdict.outcome, verdict.misconceptions) == ("misconception", (known.name,))


def test_two_rows_are_recognised_where_no_case_isolates_one() -> None:
    rows = [(*PLUS, "adding", "?"), (*NO_OFFSET, "forgetting the offset", "?")]
    both = together(edited(PLUS), edited(NO_OFFSET))
    assert both is not None
    names = ("adding", "forgetting the offset")
    assert judge(exercise(rows), both).misconceptions == names
    assert judge(exercise(rows, pairs=False), both).misconceptions == ()


# -- the chapters' rows --

ALL = [(c, e) for c in exercises.chapters() for e in exercises.chapter_exercises(c).values()]


def unfit(e: Exercise) -> list[str]:
    """What is wrong with rows of an exercise, found without running or compiling them."""
    found = []
    for known in e.misconceptions:
        if not isinstance(known.wrong, Edited):
            continue
        try:
            # a kernel may have a twin in PyTorch, which its chapter's tests hold against it
            is_its = known.wrong.solution is e.solution or e.launches is not None
            assert is_its, "it edits another function"
            ast.parse(known.wrong.source)
        except (AssertionError, SyntaxError, ValueError) as error:
            found.append(f"{e.name}, {known.name!r}: {error}")
    return found


def test_every_row_fits_its_solution() -> None:
    """Whoever changes a solution reads here which rows are to change with it."""
    found = [f"{chapter}: {row}" for chapter, e in ALL for row in unfit(e)]
    assert not found, "\n".join(found)


def test_a_row_that_does_not_fit_is_found() -> None:
    rows = [(*PLUS, "adding", "?"), ("n + factor", "n", "b", "?"), ("n * factor", "n *", "c", "?")]
    first, second = unfit(exercise(rows))
    assert first.startswith("moved, 'b': diffs(moved): 'n + factor' is to stand once")
    assert second.startswith("moved, 'c': invalid syntax")
    assert "edits another function" in unfit(replace(exercise(), solution=nested))[0]
