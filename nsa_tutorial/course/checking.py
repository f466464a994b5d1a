"""Judge an exercise: not attempted yet · right · wrong, and this is the misconception · wrong, here
is the smallest failing case.

`check` looks at what a solution computes on the cases, never at how it is written. A misconception
is recognised when the reader's function gives, on every case, what the known wrong implementation
gives.
"""

from __future__ import annotations

import dis
import functools
import html
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nsa_tutorial.course.exercises import Case, Exercise, chapter_exercises
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.source import Listing, show

_STARS = {1: "★☆☆ apply", 2: "★★☆ think", 3: "★★★ stretch"}
_ICONS = {"not attempted": "○", "right": "✓", "misconception": "✗", "wrong": "✗"}


@dataclass(frozen=True)
class Raised:
    """What a call came to when it raised instead of returning."""

    kind: str
    message: str

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one exercise.

    Attributes:
        exercise: its name.
        outcome: `"not attempted"`, `"right"`, `"misconception"` or `"wrong"`.
        text: what the reader is told.
        misconception: the name of the recognised mistake, if any.
        picture: a picture of the failing case, if the exercise draws one.
    """

    exercise: str
    outcome: str
    text: str
    misconception: str | None = None
    picture: Picture | None = None

    def __str__(self) -> str:
        return f"{_ICONS[self.outcome]} {self.exercise}: {self.text}"


class Report:
    """The verdicts of one `check` call, as Jupyter and `print` show them."""

    def __init__(self, verdicts: list[Verdict]) -> None:
        self.verdicts = verdicts

    def __repr__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        text = "".join(
            f'<pre style="margin:2px 0;white-space:pre-wrap">{html.escape(str(v))}</pre>'
            for v in self.verdicts
        )
        display({"text/plain": repr(self), "text/html": text}, raw=True)
        for verdict in self.verdicts:
            if verdict.picture is not None:
                display(verdict.picture)


class Statement:
    """An exercise as the reader meets it."""

    def __init__(self, chapter: str, exercise: Exercise) -> None:
        self.chapter, self.exercise = chapter, exercise

    def __repr__(self) -> str:
        e = self.exercise
        return f"Exercise {e.name} · {e.minutes} minutes · {_STARS[e.difficulty]}"

    def _repr_markdown_(self) -> str:
        e = self.exercise
        head = f"**Exercise `{e.name}`** · {e.minutes} minutes · {_STARS[e.difficulty]}"
        return (
            f'{head}\n\n{e.statement.strip()}\n\nStuck? Run `solution("{self.chapter}", '
            f'"{e.name}")`.'
        )


def _find(chapter: str, name: str) -> Exercise:
    known = chapter_exercises(chapter)
    if name not in known:
        raise ValueError(f"chapter {chapter!r} has no exercise {name!r}; it has {', '.join(known)}")
    return known[name]


def exercise(chapter: str, name: str) -> Statement:
    """The statement of an exercise, with its minutes and difficulty."""
    return Statement(chapter, _find(chapter, name))


def solution(chapter: str, name: str) -> Listing:
    """The source of an exercise's solution."""
    listing = show(_find(chapter, name).solution)
    return Listing(f"solution of {name}", listing.code)


def check(chapter: str, **solutions: Callable) -> Report:
    """Judge the reader's functions: `check("online_softmax", merge_partials=my_merge)`.

    Args:
        chapter: the chapter's module name.
        solutions: the reader's function for each exercise, by the exercise's name.

    Raises:
        ValueError: for a chapter or an exercise that does not exist, naming those that do.
    """
    return Report([judge(_find(chapter, name), attempt) for name, attempt in solutions.items()])


def judge(exercise: Exercise, attempt: Callable) -> Verdict:
    """Run `attempt` on the cases of `exercise` and say what it is."""
    if not callable(attempt):
        return Verdict(
            exercise.name, "wrong", f"expected a function, got {type(attempt).__name__}."
        )
    if _is_empty(attempt):
        return Verdict(exercise.name, "not attempted", "not attempted yet.")
    cases, missing = (
        exercise.runnable,
        "".join(f" Not run: {reason}" for reason in exercise.missing),
    )
    if not cases:
        return Verdict(exercise.name, "not attempted", f"cannot be judged here.{missing}")
    got = [_call(exercise, attempt, case) for case in cases]
    if all(isinstance(g, Raised) and g.kind == "NotImplementedError" for g in got):
        return Verdict(exercise.name, "not attempted", "not attempted yet.")
    expected = [_answer(exercise, exercise.solution, case) for case in cases]
    fits = [same(g, e, exercise.tolerance) for g, e in zip(got, expected, strict=True)]
    if all(fits):
        return Verdict(exercise.name, "right", f"right, on all {len(got)} cases.{missing}")
    first = fits.index(False)
    picture = None
    if exercise.picture is not None and not isinstance(got[first], Raised):
        try:
            picture = exercise.picture(cases[first].arguments(), got[first], expected[first])
        except Exception:
            # a result of an unexpected kind or shape cannot be drawn; the text below says what it
            # is
            picture = None
    case = cases[first]
    where = (
        "Smallest failing case: "
        f"{case.name}.\n{_inputs(exercise, case)}{difference(got[first], expected[first])}"
    )
    for known in exercise.misconceptions:
        answers = (_answer(exercise, known.wrong, case) for case in cases)
        if all(same(g, w, exercise.tolerance) for g, w in zip(got, answers, strict=True)):
            text = f"not yet: this is {known.name}. {known.hint}\n{where}"
            return Verdict(exercise.name, "misconception", text, known.name, picture)
    return Verdict(exercise.name, "wrong", f"not yet. {where}", None, picture)


@functools.cache
def _answer(exercise: Exercise, function: Callable, case: Case) -> object:
    """What the exercise's solution or a wrong one gives: once a process, kernels take long."""
    return _call(exercise, function, case)


def _inputs(exercise: Exercise, case: Case) -> str:
    """The arguments of a case, a line each, where they are few enough to calculate with by hand;
    otherwise nothing."""
    lines = []
    if exercise.run is not None:
        return ""  # the arguments are those of `run`, not the solution's
    for name, value in zip(
        inspect.signature(exercise.solution).parameters, case.arguments(), strict=False
    ):
        try:
            few = _numbers(value).numel() <= 12
        except (TypeError, ValueError):
            few = value is None or isinstance(value, str | tuple | list)
        head = f"with {name} = "
        lines.append(
            head + _short(value).replace("\n", "\n" + " " * len(head)) + "\n" if few else ""
        )
    return "".join(lines) if all(lines) else ""


def _is_empty(function: Callable) -> bool:
    """True for a body of nothing but a docstring, `...` or `pass`: it does no more than return
    None."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    idle = {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "NOP", "CACHE"}
    instructions = list(dis.get_instructions(code))
    constants = {i.argval for i in instructions if i.opname in ("LOAD_CONST", "RETURN_CONST")}
    return {i.opname for i in instructions} <= idle and constants == {None}


def _call(exercise: Exercise, function: Callable, case: Case) -> object:
    try:
        return (
            function(*case.arguments())
            if exercise.run is None
            else exercise.run(function, *case.arguments())
        )
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def same(a: object, b: object, tolerance: float) -> bool:
    """Whether two results agree: same structure, shapes and non-finite places, numbers within
    `tolerance`."""
    if isinstance(a, Raised) or isinstance(b, Raised):
        return isinstance(a, Raised) and isinstance(b, Raised) and a.kind == b.kind
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in b)
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and a == b
    try:
        x, y = _numbers(a), _numbers(b)
    except (TypeError, ValueError):
        return type(a) is type(b) and a == b
    return x.shape == y.shape and torch.allclose(
        x, y, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _numbers(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to(torch.float64)
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return torch.as_tensor(np.asarray(value, dtype=np.float64))
    raise TypeError(f"not a number or a tensor: {type(value).__name__}")


def difference(got: object, expected: object) -> str:
    """One or two lines on how `got` differs from `expected`."""
    if got is None:
        return "it returned None: is the return statement missing?"
    if isinstance(got, Raised):
        return f"it raised {got!r}"
    if isinstance(got, tuple | list) and isinstance(expected, tuple | list):
        if len(got) != len(expected):
            told = f"got {len(got)} values, expected {len(expected)}"
            few = all(
                len(x) <= 16 and all(isinstance(y, bool | int | float | str) for y in x)
                for x in (got, expected)
            )
            return f"{told}\ngot      {got!r}\nexpected {expected!r}" if few else told
        for position, (g, e) in enumerate(zip(got, expected, strict=True)):
            if not same(g, e, 1e-5):
                return f"value {position} of the result: {difference(g, e)}"
    try:
        x, y = _numbers(got), _numbers(expected)
    except (TypeError, ValueError):
        kinds = (
            ""
            if type(got) is type(expected)
            else f"got a {type(got).__name__}, expected a {type(expected).__name__}\n"
        )
        return f"{kinds}got {_short(got)}\nexpected {_short(expected)}"
    if x.shape != y.shape:
        return f"got shape {list(x.shape)}, expected {list(y.shape)}"
    if x.numel() <= 12:
        return f"got      {_short(got)}\nexpected {_short(expected)}"
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs().nan_to_num(math.inf))
    worst = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), x.shape))
    return f"largest difference at index {list(worst)}: got {x[worst]:.5g}, expected {y[worst]:.5g}"


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        x = _numbers(value)
        # no blank lines between tables
        text = re.sub(r"\n\s*\n", "\n", np.array2string(x.numpy(), precision=4, separator=", "))
        one_line = sum(n > 1 for n in x.shape) <= 1  # a column of [[[[1.]]]] reads better as a row
        return " ".join(text.split()) if one_line else text
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
