"""What is known of an exercise is computed once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def known_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution or a known mistake that is judged as an attempt gives what it gave before; any
    other attempt is run."""
    from nsa_tutorial.course import attempts, judging

    def call(exercise: object, attempt: Callable, case: object) -> object:
        known = (exercise.solution, *(mistake.wrong for mistake in exercise.misconceptions))
        is_known = any(attempt is function for function in known)
        return (attempts.answer if is_known else attempts.call)(exercise, attempt, case)

    monkeypatch.setattr(judging, "call", call)
