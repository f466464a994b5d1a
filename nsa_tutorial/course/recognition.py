"""Which known mistakes an answer shows: one, or two at once, on most cases if not on all.

A mistake, alone or with another one, predicts an answer for each case. It is recognised where it
gives the reader's answer on at least half of the cases that either of the two gets wrong, the
smallest failing case among them. Mistakes are computed case by case, and only as far as needed:
a wrong kernel takes seconds to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsa_tutorial.course.attempts import answer
from nsa_tutorial.course.diffs import together
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.values import same

_MOST = 0.5


@dataclass(frozen=True)
class Recognised:
    """What the answer shows.

    Attributes:
        mistakes: the known ones, the one seen first in the cases first.
        shown: number of the case to show.
        other: number of the smallest case that the mistakes leave unexplained, if any.
    """

    mistakes: tuple[Misconception, ...]
    shown: int
    other: int | None = None


@dataclass(frozen=True)
class _Account:
    """How far a set of mistakes accounts for the answers."""

    mistakes: tuple[Misconception, ...]
    score: float  # of the cases that it or the reader gets wrong: the part where both agree
    explained: tuple[int, ...]
    left: tuple[int, ...]  # failing cases that it does not account for


@functools.cache
def _combined(first: Callable, second: Callable) -> tuple[bool, Callable | None]:
    """Whether two mistakes can be made at once, and how, where that is known."""
    try:
        return True, together(first, second)
    except ValueError:
        return False, None


class Evidence:
    """The reader's answers on the cases of an exercise, beside the right ones.

    Args:
        exercise: the exercise.
        cases: those that were run, the smallest first.
        got: the reader's answers.
        expected: the solution's.
        failing: numbers of the cases where the two differ.
    """

    def __init__(
        self, exercise: Exercise, cases: Sequence[Case], got: list, expected: list,
        failing: list[int],
    ) -> None:  # fmt: skip
        self.exercise, self.cases = exercise, cases
        self.got, self.expected, self.failing = got, expected, failing
        self.passing = [i for i in range(len(got)) if i not in failing]

    def _is(self, function: Callable, i: int, result: object) -> bool:
        return same(result, answer(self.exercise, function, self.cases[i]), self.exercise.tolerance)

    def explains(self, function: Callable, i: int) -> bool:
        """Whether a wrong implementation gives the reader's answer."""
        return self._is(function, i, self.got[i])

    def errs(self, function: Callable, i: int) -> bool:
        """Whether a wrong implementation is wrong on this case."""
        return not self._is(function, i, self.expected[i])

    def account(self, mistakes: tuple[Misconception, ...], function: Callable) -> _Account:
        """How far one implementation accounts for the answers."""
        explained = tuple(i for i in self.failing if self.explains(function, i))
        too_many = sum(self.errs(function, i) for i in self.passing)
        left = tuple(i for i in self.failing if i not in explained)
        return _Account(mistakes, len(explained) / (len(self.failing) + too_many), explained, left)

    def account_of_two(self, first: Misconception, second: Misconception) -> _Account | None:
        """How far two mistakes account for the answers; None where they exclude each other.

        Where both err and they are no diffs of the solution, what they give together is unknown:
        such a case speaks neither for nor against them.
        """
        possible, both = _combined(first.wrong, second.wrong)
        if not possible:
            return None
        if both is not None:
            return self.account((first, second), both)
        explained, unknown = [], []
        for i in self.failing:
            if any(self.explains(m.wrong, i) for m in (first, second)):
                explained.append(i)
            elif all(self.errs(m.wrong, i) for m in (first, second)):
                unknown.append(i)
        too_many = sum(any(self.errs(m.wrong, i) for m in (first, second)) for i in self.passing)
        left = tuple(i for i in self.failing if i not in explained and i not in unknown)
        counted = len(explained) + len(left) + too_many
        return _Account((first, second), len(explained) / counted, tuple(explained), left)


def recognise(evidence: Evidence) -> Recognised:
    """The known mistakes that the answers show, or none."""
    known, smallest = evidence.exercise.misconceptions, evidence.failing[0]
    seen = [m for m in known if evidence.explains(m.wrong, smallest)]
    singles = []
    for mistake in seen:
        found = evidence.account((mistake,), mistake.wrong)
        if found.score == 1:
            return Recognised(found.mistakes, smallest)
        singles.append(found)
    pairs = [pair for single in singles for pair in _with_a_second(evidence, single)]
    if not any(pair.score == 1 for pair in pairs):
        pairs += _combinations(evidence)
    # `max` takes the first of equals: one mistake before two, and the order they are listed in
    best = max([*singles, *pairs], key=lambda a: a.score, default=None)
    if best is not None and best.score >= _MOST:
        return Recognised(best.mistakes, best.explained[0], best.left[0] if best.left else None)
    return _on_larger_cases(evidence, [m for m in known if m not in seen])


def _with_a_second(evidence: Evidence, single: _Account) -> list[_Account]:
    """A mistake, together with each other one that explains the smallest case that it leaves."""
    (first,) = single.mistakes
    # where the first mistake errs as well, an answer shows both of them mixed
    unmixed = [i for i in single.left if not evidence.errs(first.wrong, i)]
    if not single.left:
        return []
    smallest = (unmixed or single.left)[0]
    pairs = []
    for second in evidence.exercise.misconceptions:
        # two entries of one name are two ways to make the same mistake
        if second.name != first.name and evidence.explains(second.wrong, smallest):
            pairs.append(evidence.account_of_two(first, second))
    return [pair for pair in pairs if pair is not None and pair.explained]


def _combinations(evidence: Evidence) -> list[_Account]:
    """Each combination of two diffs that gives the reader's answer on the smallest failing case."""
    known, found = evidence.exercise.misconceptions, []
    for position, first in enumerate(known):
        for second in known[position + 1 :]:
            if second.name == first.name:
                continue
            _, both = _combined(first.wrong, second.wrong)
            if both is not None and evidence.explains(both, evidence.failing[0]):
                found.append(evidence.account((first, second), both))
    return found


def _on_larger_cases(evidence: Evidence, known: list[Misconception]) -> Recognised:
    """A mistake that explains half of the failing cases, though not the smallest."""
    smallest, *others = evidence.failing
    enough = len(evidence.failing) / 2
    best: tuple[int, ...] = ()
    mistakes: tuple[Misconception, ...] = ()
    for mistake in known:
        explained = []
        for position, i in enumerate(others):
            if len(explained) + len(others) - position < enough:
                break
            if evidence.explains(mistake.wrong, i):
                explained.append(i)
        if explained and len(explained) >= enough and len(explained) > len(best):
            best, mistakes = tuple(explained), (mistake,)
    return Recognised(mistakes, best[0], smallest) if mistakes else Recognised((), smallest)
