"""Wrong implementations by what they change: one change makes a misconception, two make a
combination.

For exercises whose wrong solutions all come from one function, `make(*slips)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_tutorial.course.exercises import Misconception


def slips(
    make: Callable[..., Callable], told: dict[str, tuple[str, str]], *exclusive: set[str]
) -> dict[str, Any]:
    """An exercise's `misconceptions` and `combine`, as keyword arguments of `Exercise`.

    Args:
        make: gives the implementation with the slips that it is called with.
        told: name and hint of the misconception, by slip.
        exclusive: sets of slips of which an implementation has one at most.
    """
    slip_of = {name: slip for slip, (name, _) in told.items()}

    def combine(names: frozenset[str]) -> Callable:
        chosen = {slip_of[name] for name in names}
        if any(len(chosen & others) > 1 for others in exclusive):
            raise ValueError(f"{' and '.join(sorted(chosen))} exclude each other")
        return make(*chosen)

    return {
        "misconceptions": tuple(
            Misconception(name, make(slip), hint) for slip, (name, hint) in told.items()
        ),
        "combine": combine,
    }
