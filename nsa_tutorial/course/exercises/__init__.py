"""Exercises as data: an exercise costs its author its content and nothing else.

The module of the chapter's name in this package holds `EXERCISES`, a tuple of `Exercise`.
Everything else (the statement as the reader sees it, checking, naming the misconception, the
smallest failing case, the tests) is made from these.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

from nsa_tutorial.course.figures import Picture


@dataclass(frozen=True)
class Case:
    """One input of an exercise.

    Attributes:
        name: what is special about it, as a phrase ("two KV heads, three query heads each").
        arguments: makes the positional arguments, the same at every call (seed inside).
        why_not: optional; one sentence on why the case cannot run on this machine, or None where it
            can.
    """

    name: str
    arguments: Callable[[], tuple]
    why_not: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Misconception:
    """A wrong solution worth recognising.

    Attributes:
        name: the mistake as a phrase that completes "this is …" ("dividing by d where √d is
            meant").
        wrong: an implementation with that mistake and no other. It may raise: raising the same
            error type counts as the same.
        hint: what to tell the reader: why it is wrong, and where to look; not the solution.
    """

    name: str
    wrong: Callable
    hint: str


@dataclass(frozen=True)
class Exercise:
    """A function for the reader to complete, and all that is needed to judge it.

    Attributes:
        name: the keyword in `check(chapter, name=...)`, and the function's name in the notebook.
        statement: what the function gets and returns, in Markdown; symbols as in the chapter.
        minutes: what it takes a reader who followed the chapter.
        difficulty: 1 (apply), 2 (think), 3 (stretch).
        solution: the reference; its source is what `solution(chapter, name)` shows, so it reads
            well.
        misconceptions: the wrong solutions that are recognised by what they compute.
        cases: inputs, the smallest first; the first that fails is the one shown.
        tolerance: largest allowed difference, absolute and relative.
        picture: optional; draws a failing case from `(arguments, got, expected)`.
        run: optional; what to do with a solution and the arguments of a case where a plain call is
            not it: `run(solution, *arguments)` launches the kernel that the solution returns, say.
    """

    name: str
    statement: str
    minutes: int
    difficulty: int
    solution: Callable
    cases: tuple[Case, ...]
    misconceptions: tuple[Misconception, ...] = field(default=())
    tolerance: float = 1e-5
    picture: Callable[[tuple, object, object], Picture] | None = None
    run: Callable[..., object] | None = None

    @property
    def runnable(self) -> tuple[Case, ...]:
        """The cases that this machine can run."""
        return tuple(case for case in self.cases if case.why_not() is None)

    @property
    def missing(self) -> list[str]:
        """One sentence for each reason why a case cannot run here."""
        return list(
            dict.fromkeys(reason for case in self.cases if (reason := case.why_not()) is not None)
        )


def chapter_exercises(chapter: str) -> dict[str, Exercise]:
    """The exercises of a chapter by name, in the chapter's order.

    Raises:
        ValueError: if the chapter has none, naming those that have.
    """
    try:
        module = importlib.import_module(f"{__name__}.{chapter}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{chapter}":
            raise
        raise ValueError(
            f"no exercises for chapter {chapter!r}; chapters with exercises: "
            f"{', '.join(chapters())}"
        ) from None
    return {exercise.name: exercise for exercise in module.EXERCISES}


def chapters() -> list[str]:
    """The chapters that have exercises, by module name."""
    import pkgutil

    return sorted(module.name for module in pkgutil.iter_modules(__path__))
