"""Judge an exercise: not attempted yet, right, or wrong. A wrong answer is told by the mistake that
it looks like and by the smallest case that shows it.

Only what a solution computes on the cases counts, not how it is written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nsa_tutorial.course.addresses import noting_strays
from nsa_tutorial.course.attempts import Raised, answer, call, is_empty
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.quiet import quiet
from nsa_tutorial.course.recognition import Evidence, recognise
from nsa_tutorial.course.speech import STYLE, Code, Message, Part
from nsa_tutorial.course.stills import LIVE
from nsa_tutorial.course.values import aligned, differences, is_short, same, short, unreadable

_TONES = {"not attempted": "open", "right": "right", "misconception": "wrong", "wrong": "wrong"}
_BY_HAND = 8  # decimals in a tensor that a reader may look through
_BESIDE = (
    "Here, that changes no result. On a GPU, it is somebody else's memory, or none at all, and "
    "then the launch fails. A mask keeps such loads away."
)
_SIGNS = {"open": "○", "right": "✓", "wrong": "✗"}


@dataclass(frozen=True)
class Verdict:
    """The judgement of one exercise.

    Attributes:
        exercise: its name.
        outcome: `"not attempted"`, `"right"`, `"misconception"` or `"wrong"`.
        lead: what the reader is told first.
        parts: what else.
        misconceptions: the names of the recognised mistakes: none, one or two.
        held: of an exercise in stages, how many of them hold, from the first one on.
        draw: draws `picture`.
    """

    exercise: str
    outcome: str
    lead: str
    parts: tuple[Part, ...] = ()
    misconceptions: tuple[str, ...] = ()
    held: int = 0
    draw: Callable[[], Picture | None] = field(default=lambda: None, compare=False, repr=False)

    @functools.cached_property
    def picture(self) -> Picture | None:
        """A picture of the failing case, if the exercise draws one; drawn when it is looked at."""
        return self.draw()

    @property
    def misconception(self) -> str | None:
        """The first recognised mistake, if any."""
        return self.misconceptions[0] if self.misconceptions else None

    @property
    def message(self) -> Message:
        """The verdict as it is said."""
        tone = _TONES[self.outcome]
        return Message(tone, _SIGNS[tone], self.exercise, self.lead, self.parts)

    @property
    def text(self) -> str:
        """What the reader is told, all of it."""
        return self.message.text

    def __str__(self) -> str:
        return repr(self.message)


class Report:
    """The verdicts of one `check` call, as Jupyter and `print` show them.

    Args:
        verdicts: one for each exercise.
        below: makes what else Jupyter shows, as long as there is a kernel: buttons, say.
    """

    def __init__(
        self, verdicts: list[Verdict], below: Callable[[], Sequence[object]] = tuple
    ) -> None:
        self.verdicts, self._below = verdicts, below

    def __repr__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        text = STYLE + "".join(v.message.html() for v in self.verdicts)
        display({"text/plain": repr(self), "text/html": text}, raw=True)
        for verdict in self.verdicts:
            if verdict.picture is not None:
                display(verdict.picture)
        for shown in self._below():
            display(shown, metadata=LIVE)


@quiet()
def judge(exercise: Exercise, attempt: Callable) -> Verdict:
    """Run `attempt` on the cases of `exercise` and say what it is."""
    if not callable(attempt):
        found = f"This is not a function but of type {type(attempt).__name__}."
        return Verdict(exercise.name, "wrong", "Not yet.", (found,))
    if is_empty(attempt):
        return Verdict(exercise.name, "not attempted", "not attempted yet.")
    cases = exercise.runnable
    missing = tuple(filter(None, [" ".join(f"Not run: {why}" for why in exercise.missing)]))
    if not cases:
        return Verdict(exercise.name, "not attempted", "it cannot be judged here.", missing)
    with noting_strays() as strays:
        cases, got, held = _run(exercise, attempt)
    if all(isinstance(g, Raised) and g.is_not_attempted for g in got):
        return Verdict(exercise.name, "not attempted", "not attempted yet.")
    for result, case in zip(got, cases, strict=True):
        if why := unreadable(result):
            return Verdict(exercise.name, "wrong", "Not yet.", (why, f"Case: {case.name}."))
    expected = [answer(exercise, exercise.solution, case) for case in cases]
    pairs = zip(got, expected, strict=True)
    failing = [i for i, (g, e) in enumerate(pairs) if not same(g, e, exercise.tolerance)]
    if not failing:
        count = f"all {len(got)} cases" if len(got) > 1 else "the one case"
        lead = _standing(exercise, held) if exercise.stages else f"Right, on {count}."
        stages = _stages(exercise, held)
        beside = tuple(f"One thing more. {told}{_BESIDE}" for told in strays)
        return Verdict(exercise.name, "right", lead, (*stages, *beside, *missing), held=held)
    found = recognise(Evidence(exercise, cases, got, expected, failing))
    case, answers = cases[found.shown], (got[found.shown], expected[found.shown])
    where = "Smallest failing case" if found.shown == failing[0] else "Smallest such case"
    is_said = exercise.in_words and bool(found.mistakes)
    tell = _said if is_said else _looks_like
    shown = (
        f"{where}: {case.name}.",
        *differences(*answers, is_recognised=bool(found.mistakes), names=exercise.returns),
        *_inputs(exercise, case, answers[0]),
    )
    parts = [
        *_stages(exercise, held),
        *(tell(mistake) for mistake in found.mistakes[:1]),
        *(() if is_said else shown),
        *(f"Then look at a second thing. {tell(mistake)}" for mistake in found.mistakes[1:]),
        *_something_else(cases, found.other),
    ]
    outcome = "misconception" if found.mistakes else "wrong"
    names = tuple(mistake.name for mistake in found.mistakes)
    draw = functools.partial(_picture, exercise, case, *answers)
    lead = _standing(exercise, held) if exercise.stages else "Not yet."
    return Verdict(exercise.name, outcome, lead, tuple(parts), names, held, draw)


def _run(exercise: Exercise, attempt: Callable) -> tuple[list[Case], list, int]:
    """The cases that were run, what the attempt gave, and how many stages hold.

    In stages, cases are run up to the end of the first stage that does not hold.
    """
    cases: list[Case] = []
    got: list[object] = []
    if not exercise.stages:
        cases = list(exercise.runnable)
        return cases, [call(exercise, attempt, case) for case in cases], 0
    for held, stage in enumerate(exercise.stages):
        asked = [case for case in stage.cases if case.why_not() is None]
        gave = [call(exercise, attempt, case) for case in asked]
        cases, got = [*cases, *asked], [*got, *gave]
        answers = [answer(exercise, exercise.solution, case) for case in asked]
        pairs = zip(gave, answers, strict=True)
        if not all(same(g, right, exercise.tolerance) for g, right in pairs):
            return cases, got, held
    return cases, got, len(exercise.stages)


def _standing(exercise: Exercise, held: int) -> str:
    """How far an attempt carries, as a sentence."""
    number = len(exercise.stages)
    return f"All {number} stages hold." if held == number else f"{held} of {number} stages hold."


def _stages(exercise: Exercise, held: int) -> tuple[Part, ...]:
    """The stages in a line, each with its sign; those after the first failure were not run."""
    if not exercise.stages:
        return ()
    signs = ["✓"] * held + ["✗"] + ["○"] * len(exercise.stages)
    named = zip(signs, exercise.stages, strict=False)
    return (Code("   ".join(f"{sign} {stage.name}" for sign, stage in named)),)


def _something_else(cases: Sequence[Case], other: int | None) -> tuple[str, ...]:
    if other is None:
        return ()
    return (f"This does not explain everything. See also the case: {cases[other].name}.",)


def _looks_like(mistake: Misconception) -> str:
    return f"This looks like {mistake.name}. {mistake.hint}"


def _said(mistake: Misconception) -> str:
    return f"You said {mistake.name}. {mistake.hint}"


def _inputs(exercise: Exercise, case: Case, got: object) -> tuple[Code, ...]:
    """The arguments of a case, if they are small enough to calculate by hand; for larger tensors on
    which the answer raised, their shapes."""
    names = list(inspect.signature(exercise.solution).parameters)
    run = [] if exercise.run is None else list(inspect.signature(exercise.run).parameters)[1:]
    if run and run[: len(names)] != names:
        return ()  # the arguments are those of `run`, not the solution's
    named = list(zip(names, case.arguments(), strict=False))
    if not named or not all(is_short(value) for _, value in named):
        return ()
    if all(type(value) is int for _, value in named):
        return (Code("with " + ", ".join(f"{name} = {value}" for name, value in named)),)
    width = max(len(name) for name, _ in named)
    labelled = [(f"with {name:<{width}} =", value) for name, value in named]
    if isinstance(got, Raised) and any(_is_large(value) for _, value in named):
        lines = [
            f"{label} {f'shape {list(value.shape)}' if _is_large(value) else short(value)}"
            for label, value in labelled
        ]
    else:
        lines = aligned(*labelled)
    return (Code("\n".join(lines)),)


def _is_large(value: object) -> bool:
    """Whether only its shape can tell why a line raised."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > _BY_HAND


@quiet()
def _picture(exercise: Exercise, case: Case, got: object, expected: object) -> Picture | None:
    if exercise.picture is None or isinstance(got, Raised):
        return None
    try:
        return exercise.picture(case.arguments(), got, expected)
    except Exception:
        return None  # a result of an unexpected kind cannot be drawn; the text says what it is
