"""Mistakes as diffs: a wrong solution is the right one with some of its source replaced.

`diffs(solution, [...])` makes the misconceptions of an exercise, each from one row:

- `(replace, by, "looks like …", hint)` where one piece of the source changes;
- `({replace: by, …}, "looks like …", hint)` where several do;
- `(function, "looks like …", hint)` where the mistake is another algorithm.

A row without its hint is another way to make the mistake of that name above it. Each piece stands
exactly once in the source. Two mistakes are made at once by applying both, unless they replace the
same piece. A kernel that takes long to compile has `Switches` instead.
"""

from __future__ import annotations
import __future__

import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType

from nsa_tutorial.course.exercises import Misconception

Row = tuple


class Edited:
    """A solution with pieces of its source replaced; compiled in the solution's module at its first
    call.

    Args:
        solution: the function to change; its source is at hand.
        edits: what to put in the place of each piece.

    Raises:
        ValueError: by `source` and calls, where a piece does not stand exactly once in the
            solution, naming the piece; where two pieces overlap.
    """

    def __init__(self, solution: Callable, edits: Mapping[str, str]) -> None:
        self.solution, self.edits = solution, dict(edits)

    def __call__(self, *arguments: object) -> object:
        """What it makes of the arguments of a case."""
        return self.function(*arguments)

    @property
    def __wrapped__(self) -> Callable:
        """The function itself, for those who read its code."""
        return self.function

    @property
    def __code__(self) -> CodeType:
        return self.function.__code__

    def __repr__(self) -> str:
        return f"Edited({self.solution.__name__}, {self.edits!r})"

    def beside(self, other: Callable) -> Edited | None:
        """The solution with the edits of both; None where `other` is no edit of the same solution.

        Raises:
            ValueError: if they exclude each other: they replace the same piece, or overlap.
        """
        if not isinstance(other, Edited) or other.solution is not self.solution:
            return None
        shared = [p for p in self.edits if other.edits.get(p, self.edits[p]) != self.edits[p]]
        if shared:
            raise ValueError(f"these exclude each other: both replace {shared[0]!r}")
        both = Edited(self.solution, self.edits | other.edits)
        _ = both.source
        return both

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each piece begins and ends in the solution's source."""
        whole = _source_of(self.solution)
        for piece in self.edits:
            found = whole.count(piece)
            if found != 1:
                raise ValueError(
                    f"diffs({self.solution.__name__}): {piece!r} is to stand once in the source, "
                    f"and stands there {found} times"
                )
        return {piece: (start := whole.index(piece), start + len(piece)) for piece in self.edits}

    @functools.cached_property
    def source(self) -> str:
        """The wrong solution's source."""
        whole = _source_of(self.solution)
        end = len(whole)
        for piece, (start, stop) in sorted(
            self.places.items(), key=lambda place: place[1], reverse=True
        ):
            if stop > end:
                raise ValueError(f"diffs({self.solution.__name__}): {piece!r} overlaps another")
            whole, end = whole[:start] + self.edits[piece] + whole[stop:], start
        return whole

    @functools.cached_property
    def function(self) -> Callable:
        """The wrong solution, compiled."""
        name = self.solution.__name__
        file = f"<{name} {abs(hash(self.source)):x}>"
        # kernels are read from their source once more
        linecache.cache[file] = (
            len(self.source),
            None,
            self.source.splitlines(keepends=True),
            file,
        )
        flags = self.solution.__code__.co_flags & __future__.annotations.compiler_flag
        code = compile(self.source, file, "exec", flags=flags, dont_inherit=True)
        namespace: dict[str, Callable] = {}
        exec(code, self.solution.__globals__, namespace)
        return namespace[name]


@functools.cache
def _source_of(solution: Callable) -> str:
    return textwrap.dedent(inspect.getsource(solution))


def diffs(solution: Callable, rows: Iterable[Row]) -> tuple[Misconception, ...]:
    """The misconceptions of an exercise, from one row each (see above).

    Raises:
        ValueError: for a row without a hint whose name no row above it has.
    """
    made: list[Misconception] = []
    hints: dict[str, str] = {}
    for first, *rest in rows:
        if isinstance(first, str):
            wrong, rest = Edited(solution, {first: rest[0]}), rest[1:]
        else:
            wrong = Edited(solution, first) if isinstance(first, Mapping) else first
        name, *hint = rest
        if hint:
            (hints[name],) = hint
        if name not in hints:
            raise ValueError(f"diffs({solution.__name__}): {name!r} has no hint")
        made.append(Misconception(name, wrong, hints[name]))
    return tuple(made)


@dataclass(frozen=True)
class Switches:
    """Mistakes that share one function, or one kernel that is compiled once for all of them.

    For kernels whose compilation takes a good part of a second: with a diff for each mistake, a
    reader would wait for all of them.

    Attributes:
        function: called as `function(slips, *arguments)`; `slips` says what goes wrong in it.
        exclusive: groups of slips of which only one can be made at a time.
    """

    function: Callable
    exclusive: tuple[Collection[str], ...] = ()

    def __call__(self, *slips: str) -> Switched:
        """The function with these slips."""
        return Switched(self, frozenset(slips))


@dataclass(frozen=True)
class Switched:
    """A wrong solution: a function with some of its slips."""

    switches: Switches
    slips: frozenset[str]

    def __call__(self, *arguments: object) -> object:
        """What it makes of the arguments of a case."""
        return self.switches.function(self.slips, *arguments)

    def beside(self, other: Callable) -> Switched | None:
        """The function with the slips of both; None where `other` is not one of its mistakes.

        Raises:
            ValueError: if they exclude each other.
        """
        if not isinstance(other, Switched) or other.switches != self.switches:
            return None
        slips = self.slips | other.slips
        if any(len(slips & set(group)) > 1 for group in self.switches.exclusive):
            raise ValueError(f"these exclude each other: {', '.join(sorted(slips))}")
        return Switched(self.switches, slips)


def together(first: Callable, second: Callable) -> Callable | None:
    """One wrong solution with two mistakes; None where what they give together is not known.

    Raises:
        ValueError: if they exclude each other.
    """
    beside = getattr(first, "beside", None)
    return beside(second) if beside is not None else None
