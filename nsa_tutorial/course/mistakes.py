"""Wrong solutions made of slips: one function that knows all slips of an exercise, with one of them
for each misconception, and with several where a reader made several."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nsa_tutorial.course.exercises import Misconception


@dataclass(frozen=True)
class Wrong:
    """A solution with slips.

    Attributes:
        function: called as `function(slips, *arguments)`.
        slips: what goes wrong in it.
    """

    function: Callable
    slips: frozenset[str]

    def __call__(self, *arguments: object) -> object:
        """What it makes of the arguments of a case."""
        return self.function(self.slips, *arguments)


def slip(function: Callable, name: str) -> Wrong:
    """A wrong solution with one slip."""
    return Wrong(function, frozenset({name}))


def together(
    misconceptions: tuple[Misconception, ...], *exclusive: Collection[str]
) -> Callable[[frozenset[str]], Wrong]:
    """What `Exercise.combine` asks for: an implementation with the slips of several misconceptions.

    Args:
        misconceptions: of one exercise, each with a `Wrong` of one function.
        exclusive: groups of slips of which only one can be made at a time.
    """
    wrong = {m.name: m.wrong for m in misconceptions}

    def combine(names: frozenset[str]) -> Wrong:
        slips = frozenset().union(*(wrong[name].slips for name in names))
        if any(len(slips & set(group)) > 1 for group in exclusive):
            raise ValueError(f"these exclude each other: {', '.join(sorted(slips))}")
        return Wrong(misconceptions[0].wrong.function, slips)

    return combine
