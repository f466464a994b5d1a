"""Exercises and predictions as data: they cost their author their content and nothing else.

The module of the chapter's name in this package holds these, each where the chapter has any:

- `EXERCISES`, a tuple of `Exercise`: what the reader writes;
- `PREDICTIONS`, a tuple of `Prediction`: what the reader guesses;
- `TRAPS`, a tuple of `Trap`: where the chapter warns of a mistake, and who recognises it;
- `DOUBLES`, a tuple of `Double`: two mistakes at once, which are both to be named.

Everything else (the statement as the reader sees it, checking, naming the misconception, the
smallest failing case, hints one by one, the tests) is made from these.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

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
class Stage:
    """A property that a function to be built gains next.

    Attributes:
        name: the property ("many blocks").
        cases: inputs that need it, and nothing that later stages ask for; the smallest first.
    """

    name: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Misconception:
    """A wrong solution worth recognising.

    Attributes:
        name: the mistake as a phrase that completes "This looks like …" ("dividing by d where √d
            is meant").
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
        cases: inputs, the smallest first; the first that fails is the one shown. With `stages`,
            those of the stages.
        tolerance: largest allowed difference, absolute and relative.
        returns: optional; names of the values that a solution returns as a tuple.
        picture: optional; draws a failing case from `(arguments, got, expected)`.
        run: optional; what to do with a solution and the arguments of a case where a plain call is
            not it: `run(solution, *arguments)` launches the kernel that the solution returns, say.
        hints: three, each more telling, none with a line of the solution.
        why: one sentence on why the solution is as it is, shown below it.
        stages: of a function that the reader builds from an empty body: the properties in the order
            in which one would write it. Cases are judged stage by stage, up to the first one that
            does not hold. What holds all stages is kept in the reader's library (`course.mine`).
        forbidden: what an attempt may not call, by its full name ("torch.softmax"), and what it is
            to be called in a sentence ("PyTorch's softmax"). A package's name stands for all of it.
        launches: the language, "triton" or "tilelang", of which an attempt launches a kernel; None
            where it need not.
        parts: kernels and functions of its own that the solution calls: the reader writes them in
            the same cell, and `solution` shows them above it.
        in_words: the answers are words, one a case: a mistake's name completes "You said …", and
            says all that the case would.
    """

    name: str
    statement: str
    minutes: int
    difficulty: int
    solution: Callable
    cases: tuple[Case, ...] = ()
    misconceptions: tuple[Misconception, ...] = field(default=())
    tolerance: float = 1e-5
    returns: tuple[str, ...] = ()
    picture: Callable[[tuple, object, object], Picture] | None = None
    run: Callable[..., object] | None = None
    hints: tuple[str, ...] = ()
    why: str = ""
    in_words: bool = False
    stages: tuple[Stage, ...] = ()
    forbidden: tuple[tuple[str, str], ...] = ()
    launches: str | None = None
    parts: tuple[Callable, ...] = ()

    def __post_init__(self) -> None:
        """Take the cases from the stages."""
        if self.stages:
            cases = tuple(case for stage in self.stages for case in stage.cases)
            object.__setattr__(self, "cases", cases)

    def __hash__(self) -> int:
        """Made once, and without `parts`: TileLang's have none."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        asked = (self.name, self.solution, self.cases, self.misconceptions, self.run)
        return hash((*asked, self.stages, self.forbidden, self.launches))

    @functools.cached_property
    def bare(self) -> Exercise:
        """What of it decides about the answer to a case."""
        blank = {"cases": (), "misconceptions": (), "stages": (), "hints": (), "parts": ()}
        return replace(self, **blank, picture=None)

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


@dataclass(frozen=True)
class Prediction:
    """A question to guess at before the chapter answers it.

    Attributes:
        name: what `predict(name, ...)` and `reveal(name, ...)` call it; unique in the course.
        question: what is asked, in a sentence.
        reason: why the answer is what it is, in a sentence or two.
        thoughts: pairs of a wrong guess (a value, or a function that says whether a guess is meant)
            and a sentence on the thought that leads there.
        unit: written behind the numbers ("GiB").
        tolerance: relative error up to which a number counts as right.
        choices: the answers to choose from, where the question names them.
        short: pairs of a short name and the choice that it stands for.
    """

    name: str
    question: str
    reason: str
    thoughts: tuple[tuple[object, str], ...] = ()
    unit: str = ""
    tolerance: float = 0.0
    choices: tuple[object, ...] = ()
    short: tuple[tuple[str, str], ...] = ()

    def in_full(self, guess: object) -> object:
        """The choice that a short name stands for; any other guess as it is."""
        name = guess.strip().casefold() if isinstance(guess, str) else ""
        return dict(self.short).get(name, guess)

    @property
    def asks_for_a_number(self) -> bool:
        """Whether the answer is a number: it has a unit, or wrong guesses that are numbers."""
        wrong = [guess for guess, _ in self.thoughts if not callable(guess)]
        return bool(self.unit) or any(type(guess) in (int, float) for guess in wrong)


@dataclass(frozen=True)
class Trap:
    """A mistake that the chapter warns of, and that its checker therefore recognises.

    Attributes:
        quote: the chapter's words, from one cell; white space does not count.
        exercise: the exercise in which a reader can make the mistake.
        misconception: the name of the one that recognises it.
    """

    quote: str
    exercise: str
    misconception: str


@dataclass(frozen=True)
class Double:
    """Two mistakes at once, which are both to be named.

    Attributes:
        exercise: the exercise's name.
        wrong: an implementation with both; None for the diffs of the two together.
        names: of the two mistakes, the first-named first.
    """

    exercise: str
    wrong: Callable | None = None
    names: tuple[str, str] = ("", "")


def chapter_module(chapter: str) -> ModuleType:
    """The module that holds what a chapter asks of its reader.

    Raises:
        ValueError: if there is none, naming the chapters that have one.
    """
    try:
        return importlib.import_module(f"{__name__}.{chapter}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{chapter}":
            raise
        raise ValueError(
            f"no exercises for chapter {chapter!r}; chapters with exercises: "
            f"{', '.join(chapters())}"
        ) from None


def chapter_exercises(chapter: str) -> dict[str, Exercise]:
    """The exercises of a chapter by name, in the chapter's order.

    Raises:
        ValueError: if the chapter has none, naming those that have.
    """
    known = getattr(chapter_module(chapter), "EXERCISES", ())
    if not known:
        raise ValueError(
            f"chapter {chapter!r} has no exercises; chapters with exercises: "
            f"{', '.join(chapters())}"
        )
    return {exercise.name: exercise for exercise in known}


def modules() -> list[str]:
    """The chapters that ask anything of their reader, by module name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def chapters() -> tuple[str, ...]:
    """The chapters that have exercises, by module name."""
    return tuple(name for name in modules() if getattr(chapter_module(name), "EXERCISES", ()))


def prediction(name: str) -> Prediction:
    """The prediction of that name, from whichever chapter has it.

    Raises:
        ValueError: if there is none, naming those whose names are like it, or all.
    """
    known = {}
    # The chapter whose text has the name comes first: others need not be imported, and some take
    # their time.
    files = {m: Path(__file__).with_name(f"{m}.md") for m in modules()}
    for chapter in sorted(files, key=lambda m: name not in files[m].read_text("utf-8")):
        known |= {p.name: p for p in getattr(chapter_module(chapter), "PREDICTIONS", ())}
        if name in known:
            return known[name]
    like = difflib.get_close_matches(name, known) or sorted(known) or ["none yet"]
    raise ValueError(f"no prediction {name!r}; there are: {', '.join(like)}")
