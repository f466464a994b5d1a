"""What is known of an exercise is computed once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def known_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution or a known mistake that is judged as an attempt gives what it gave before; any
    other attempt is run. A mistake of ours fails by no name that Python does not know: it would be
    told to every reader with such an error."""
    from nsa_tutorial.course import attempts, judging

    def call(exercise: object, attempt: Callable, case: object) -> object:
        known = (exercise.solution, *(mistake.wrong for mistake in exercise.misconceptions))
        if not any(attempt is function for function in known):
            return attempts.call(exercise, attempt, case)
        found = attempts.answer(exercise, attempt, case)
        assert getattr(found, "kind", None) not in ("NameError", "UnboundLocalError"), found
        assert not str(getattr(found, "message", "")).startswith("sort() takes"), found
        return found

    monkeypatch.setattr(judging, "call", call)
