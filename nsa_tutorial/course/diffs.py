"""Mistakes as diffs: a wrong solution is the right one with some of its source replaced.

`diffs(solution, [...])` makes the misconceptions of an exercise, one from each row:

- `(piece, by, "looks like …", hint)` replaces one piece of the solution's source;
- `({piece: by, …}, "looks like …", hint)` replaces several;
- `(function, "looks like …", hint)` is a mistake that is another algorithm.

A row without a hint is another way to make the mistake of that name in a row above. A piece stands
exactly once in the solution's source, with that of its parts (`Exercise.parts`), docstrings and
comments included. Two mistakes are made at once by applying both diffs; mistakes that replace the
same piece exclude each other. Mistakes in a kernel that takes long to compile share one compilation
as `Switches`.
"""

from __future__ import annotations
import __future__

import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType

from nsa_tutorial.course.exercises import Misconception
from nsa_tutorial.course.unwrapped import unwrapped

Row = tuple


class Edited:
    """A solution with pieces of its source replaced. It is compiled at its first call, and sees the
    names of the solution's module.

    Args:
        solution: the function to change.
        edits: what to put in the place of each piece.
        parts: kernels and functions that the solution calls, whose source may be edited, too.
        pairs: whether it is tried together with another mistake. Each pair is one more function to
            run, and a kernel may take a second to compile.

    Raises:
        ValueError: by `places`, `source` and calls, naming the piece: if it does not stand exactly
            once in the source, if it is replaced by itself, or if it overlaps another piece.
    """

    def __init__(
        self, solution: Callable, edits: Mapping[str, str], *, parts: tuple[Callable, ...] = (),
        pairs: bool = True,
    ) -> None:  # fmt: skip
        self.solution, self.edits, self.parts, self.pairs = solution, dict(edits), parts, pairs

    def __call__(self, *arguments: object) -> object:
        """What it makes of the arguments of a case."""
        return self.function(*arguments)

    @property
    def __wrapped__(self) -> Callable:
        """The compiled function, where `inspect` looks for it."""
        return self.function

    @property
    def __code__(self) -> CodeType:
        return self.function.__code__

    def __repr__(self) -> str:
        return f"Edited({self.solution.__name__}, {self.edits!r})"

    def beside(self, other: Callable) -> Edited | None:
        """The solution with the edits of both; None where `other` is no edit of the same solution,
        or one of the two is not tried in pairs.

        Raises:
            ValueError: if they exclude each other: they replace the same piece by different text,
                or pieces that overlap, or what both leave is no Python.
        """
        if not isinstance(other, Edited) or other.solution is not self.solution:
            return None
        if not (self.pairs and other.pairs):
            return None
        for piece in self.edits.keys() & other.edits.keys():
            if self.edits[piece] != other.edits[piece]:
                raise ValueError(f"these exclude each other: both replace {piece!r}")
        both = Edited(self.solution, self.edits | other.edits, parts=self.parts)
        try:
            _ = both.compiled  # raises where pieces overlap
        except SyntaxError as error:
            raise ValueError(f"these exclude each other: {error.msg}") from error
        return both

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each piece begins and ends in the solution's source, the first piece first."""
        source, name, found = self._right, self.solution.__name__, {}
        for piece, by in self.edits.items():
            times = source.count(piece)
            if times != 1:
                raise ValueError(
                    f"diffs({name}): {piece!r} is to stand once in the source, and stands there "
                    f"{times} times"
                )
            if piece == by:
                raise ValueError(f"diffs({name}): {piece!r} is replaced by itself")
            start = source.index(piece)
            found[piece] = (start, start + len(piece))
        in_order = sorted(found.items(), key=lambda place: place[1])
        for (piece, (_, end)), (other, (start, _)) in pairwise(in_order):
            if start < end:
                raise ValueError(f"diffs({name}): {piece!r} and {other!r} overlap")
        return dict(in_order)

    @property
    def _right(self) -> str:
        """The source of the solution, below that of its parts."""
        return "\n\n".join(_source_of(unwrapped(f)) for f in (*self.parts, self.solution))

    @functools.cached_property
    def source(self) -> str:
        """The wrong solution's source."""
        source = self._right
        for piece, (start, end) in reversed(self.places.items()):
            source = source[:start] + self.edits[piece] + source[end:]
        return source

    @functools.cached_property
    def compiled(self) -> CodeType:
        """The code of a module that holds the wrong solution."""
        flags = self.solution.__code__.co_flags & __future__.annotations.compiler_flag
        return compile(self.source, self._file, "exec", flags=flags, dont_inherit=True)

    @property
    def _file(self) -> str:
        return f"<{self.solution.__name__} {abs(hash(self.source)):x}>"

    @functools.cached_property
    def function(self) -> Callable:
        """The wrong solution, ready to be called."""
        source, name, file = self.source, self.solution.__name__, self._file
        # tracebacks, Triton and TileLang read the source from here
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        # the parts are found among the globals, and must not replace the right ones there
        names = dict(self.solution.__globals__) if self.parts else self.solution.__globals__
        namespace: dict[str, Callable] = names if self.parts else {}
        exec(self.compiled, names, namespace)
        return namespace[name]


@functools.cache
def _source_of(function: Callable) -> str:
    return textwrap.dedent(inspect.getsource(function))


def diffs(
    solution: Callable, rows: Iterable[Row], *, parts: tuple[Callable, ...] = (),
    pairs: bool = True,
) -> tuple[Misconception, ...]:  # fmt: skip
    """The misconceptions of an exercise.

    Args:
        solution: the exercise's solution.
        rows: one for each misconception, as the module's docstring describes them.
        parts: kernels and functions that the solution calls, those of the exercise.
        pairs: whether two of the mistakes are tried at once, as for `Edited`.

    Raises:
        ValueError: for a row without a hint whose name no row above it has.
    """
    made: list[Misconception] = []
    hints: dict[str, str] = {}
    for first, *rest in rows:
        if isinstance(first, str):
            by, *rest = rest
            wrong = Edited(solution, {first: by}, parts=parts, pairs=pairs)
        elif isinstance(first, Mapping):
            wrong = Edited(solution, first, parts=parts, pairs=pairs)
        else:
            wrong = first
        name, *hint = rest
        if hint:
            (hints[name],) = hint
        if name not in hints:
            raise ValueError(f"diffs({solution.__name__}): {name!r} has no hint")
        made.append(Misconception(name, wrong, hints[name]))
    return tuple(made)


@dataclass(frozen=True, eq=False)
class Switches:
    """Mistakes that share one function, such as a kernel that is compiled once for all of them.

    With a diff for each mistake in a kernel whose compilation takes a good part of a second, a
    reader would wait for all of them.

    Attributes:
        function: called as `function(slips, *arguments)`, where `slips` is the set of what goes
            wrong.
        exclusive: groups of slips of which at most one can be made at a time.
    """

    function: Callable
    exclusive: tuple[Collection[str], ...] = ()

    def __call__(self, *slips: str) -> Switched:
        """The function with these slips; the right solution without any."""
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
        """The function with the slips of both; None where `other` belongs to other switches.

        Raises:
            ValueError: if they exclude each other.
        """
        if not isinstance(other, Switched) or other.switches is not self.switches:
            return None
        slips = self.slips | other.slips
        for group in self.switches.exclusive:
            if len(shared := slips.intersection(group)) > 1:
                raise ValueError(f"these exclude each other: {', '.join(sorted(shared))}")
        return Switched(self.switches, slips)


def together(first: Callable, second: Callable) -> Callable | None:
    """One wrong solution with two mistakes; None where what they give together is not known.

    Raises:
        ValueError: if they exclude each other.
    """
    beside = getattr(first, "beside", None)
    return beside(second) if beside is not None else None
