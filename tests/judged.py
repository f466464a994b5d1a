"""What is asked of every exercise, wherever its tests stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tutorial.course.attempts import Raised, answer
from nsa_tutorial.course.diffs import together
from nsa_tutorial.course.exercises import Double, Exercise
from nsa_tutorial.course.judging import judge

# Its draft and its kernels take long to compile, and many of its tests compile the same ones: all
# of them stand in its own file, so that one process does it once.
APART = "tilelang_forward"


def is_apart(chapter: str, e: Exercise) -> bool:
    """Whether an exercise's tests stand with those of its chapter."""
    return chapter == APART and e.run is not None


def assert_mistakes_are_named(e: Exercise, some: slice = slice(None)) -> None:
    """The solution is right, misconceptions are named as themselves, any other answer is just
    wrong."""
    if e.missing:
        pytest.skip(e.missing[0])
    e = replace(e, misconceptions=e.misconceptions[some], picture=None)
    assert judge(e, e.solution).outcome == "right"
    assert not any(isinstance(answer(e, e.solution, case), Raised) for case in e.runnable)
    for known in e.misconceptions:
        verdict = judge(e, known.wrong)
        assert (verdict.outcome, verdict.misconception) == ("misconception", known.name)
        assert known.hint in verdict.text
    alone = replace(e, misconceptions=e.misconceptions[:1])  # it is like no pair of them, either
    assert judge(alone, lambda *a, **k: "nothing like it").outcome == "wrong"
    assert judge(e, lambda *a, **k: None).outcome == "not attempted"


def assert_both_are_named(e: Exercise, double: Double) -> None:
    """Two mistakes made at once."""
    if e.missing:
        pytest.skip(e.missing[0])
    wrong = double.wrong
    if wrong is None:
        by_name = {m.name: m.wrong for m in reversed(e.misconceptions)}
        wrong = together(*(by_name[name] for name in double.names))
    assert set(judge(e, wrong).misconceptions) == set(double.names)
