"""What a reader does with an exercise: read it, check an attempt, take a hint, see the solution."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from nsa_tutorial.course import reader
from nsa_tutorial.course.buttons import Help
from nsa_tutorial.course.exercises import Exercise, chapter_exercises
from nsa_tutorial.course.judging import Report, judge
from nsa_tutorial.course.keeping import keep
from nsa_tutorial.course.listing import Listing
from nsa_tutorial.course.source import show
from nsa_tutorial.course.speech import Message

# of exercises in stages: how many held at the last check, by chapter and name
_held: dict[tuple[str, str], int] = {}
# and for which stage a hint was given last
_hinted: dict[tuple[str, str], int] = {}
_STARS = {1: "★☆☆ apply", 2: "★★☆ think", 3: "★★★ stretch"}


class Statement:
    """An exercise as the reader meets it."""

    def __init__(self, chapter: str, exercise: Exercise) -> None:
        self.chapter, self.exercise = chapter, exercise

    def __repr__(self) -> str:
        e = self.exercise
        return f"Exercise {e.name} · {e.minutes} minutes · {_STARS[e.difficulty]}"

    def _repr_markdown_(self) -> str:
        e = self.exercise
        asked = f'"{self.chapter}", "{e.name}"'
        return (
            f"### Exercise: `{e.name}`\n\n{e.minutes} minutes · {_STARS[e.difficulty]}\n\n"
            f"{e.statement.strip()}\n\n"
            f"Stuck? Run `hint({asked})`, and last `solution({asked})`."
        )


def _find(chapter: str, name: str) -> Exercise:
    known = chapter_exercises(chapter)
    if name not in known:
        raise ValueError(f"chapter {chapter!r} has no exercise {name!r}; it has {', '.join(known)}")
    return known[name]


def exercise(chapter: str, name: str) -> Statement:
    """The statement of an exercise, with its minutes and difficulty."""
    return Statement(chapter, _find(chapter, name))


def check(chapter: str, *functions: Callable, **solutions: Callable) -> Report:
    """Judge the reader's functions: `check("online_softmax", merge_partials=my_merge)`.

    Args:
        chapter: the chapter's module name.
        functions: functions that are called like their exercises.
        solutions: the reader's function for each exercise, by the exercise's name.

    Raises:
        ValueError: for a chapter or an exercise that does not exist, naming those that do; without
            a function to judge.
    """
    named = {getattr(f, "__name__", type(f).__name__): f for f in functions}
    solutions = named | solutions
    if not solutions:
        known = next(iter(chapter_exercises(chapter)))
        raise ValueError(f"nothing to check; name a function: check({chapter!r}, {known}={known})")
    known = {name: _find(chapter, name) for name in solutions}
    verdicts = [judge(known[name], attempt) for name, attempt in solutions.items()]
    reader.note_latest(chapter)
    for number, verdict in enumerate(verdicts):
        built = known[verdict.exercise]
        _held[chapter, verdict.exercise] = verdict.held
        if verdict.outcome == "right":
            reader.note_solved(chapter, verdict.exercise)
            told = keep(chapter, built, solutions[verdict.exercise]) if built.stages else ""
            if told:
                verdicts[number] = replace(verdict, parts=(*verdict.parts, told))
    stuck = [verdict.exercise for verdict in verdicts if verdict.outcome != "right"]
    return Report(verdicts, lambda: [Help(chapter, name, hint, solution) for name in stuck])


def hint(chapter: str, name: str) -> Message:
    """Each call shows the earlier hints and one more; after the last hint, how to see the solution.

    An exercise in stages has a hint for each: the one for the first stage that does not hold, and
    how to see the solution where this hint is asked for again.
    """
    found = _find(chapter, name)
    hints = found.hints
    solved = f'The solution is there, too: `solution("{chapter}", "{name}")`.'
    if found.stages:
        stage = _held.get((chapter, name), 0)
        if stage == len(found.stages):
            return Message("right", "✓", name, "all stages hold.", (solved,))
        reader.note_hint(chapter, name, len(hints))
        lead = f"a hint for the stage “{found.stages[stage].name}”."
        again = _hinted.get((chapter, name)) == stage
        _hinted[chapter, name] = stage
        return Message("open", "○", name, lead, (hints[stage], *[solved] * again))
    if not hints:
        return Message("open", "○", name, "there are no hints yet.", (solved,))
    taken = reader.note_hint(chapter, name, len(hints))
    told = [f"{number}. {text}" for number, text in enumerate(hints[:taken], start=1)]
    if taken > len(hints):
        return Message("open", "○", name, "you have all the hints.", (solved, *told))
    on = "Ask again for the next one." if taken < len(hints) else "It is the last one."
    return Message("open", "○", name, f"hint {taken} of {len(hints)}.", (on, *told))


def solution(chapter: str, name: str) -> Listing:
    """The source of an exercise's solution, ready to be pasted into the chapter, and why it is as
    it is."""
    found = _find(chapter, name)
    sources = [show(part).code.strip("\n") for part in found.parts]
    parts = [  # a kernel stands as it is written, below its decorator
        code if code.startswith("@") else _as_in_the_chapter(part).strip("\n")
        for part, code in zip(found.parts, sources, strict=True)
    ]
    code = "\n\n\n".join([*parts, _as_in_the_chapter(found.solution)])
    return Listing(f"solution of {name}", code, note=found.why)


def _as_in_the_chapter(function: Callable) -> str:
    """The source of a function under a header like its stub's. Type hints are left out: a cell
    evaluates them, and a chapter does not import their names."""
    code = show(function).code
    definition = ast.parse(code).body[0]
    parameters = definition.args
    for parameter in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs):
        parameter.annotation = None
    body = code.splitlines(keepends=True)[definition.body[0].lineno - 1 :]
    return f"def {definition.name}({ast.unparse(parameters)}):\n{''.join(body)}"
