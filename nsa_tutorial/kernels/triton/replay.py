"""Launches of a call once more, without what Triton looks up for each.

At a launch, Triton binds the arguments to their names, asks of each what kind it is, and makes a
key of all of that, to find the compiled kernel. A short text waits for it. But a call whose tensors
have the same shapes launches the same kernels in the same order. So the first such call keeps them
on a **tape**, and the next ones hand their arguments to the compiled kernels directly.

What a compiled kernel takes for granted is checked: shapes, strides, dtypes and alignments of the
call's tensors are the tape's key, and each launch must have the numbers and options that were kept.
Where it has others, it goes through Triton as usual, as do the rest, and the tape is forgotten. A
kernel on a CPU is interpreted, and has no tape.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_tutorial.runtime.alignment import ALIGNMENT

MOST_TAPES = 256  # of a function: each length of texts has its own


class _Here(threading.local):
    """What launches of this thread go through; None for Triton's own way."""

    tape: Recorder | Player | None = None


_here = _Here()


class Replayable(JITFunction):
    """A kernel whose launches a tape may keep."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        tape = _here.tape
        if tape is None:
            return super().__getitem__(grid)
        return functools.partial(tape.launch, self, grid)

    def launch(self, grid: tuple[int, ...], args: tuple, named: Mapping[str, object]) -> object:
        """As Triton does."""
        return super().__getitem__(grid)(*args, **named)


def make_replayable() -> None:
    """Let tapes keep all kernels of this package that were imported."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(__package__):
            for kernel in [*vars(module).values()]:
                if type(kernel) is JITFunction:
                    kernel.__class__ = Replayable


class Launch(NamedTuple):
    """A launch on a tape.

    Attributes:
        compiled: what Triton compiled of `kernel`.
        grid: its three sides.
        numbers: place and value of each argument that is not a tensor.
        constants: name and value of each named one.
        names: of the named arguments that follow the others, in the kernel's order.
    """

    kernel: Replayable
    compiled: object
    grid: tuple[int, int, int]
    numbers: tuple[tuple[int, object], ...]
    constants: tuple[tuple[str, object], ...]
    names: tuple[str, ...]

    def is_for(
        self, kernel: Replayable, grid: tuple[int, ...], args: tuple, named: dict[str, object]
    ) -> bool:
        """Whether it serves this launch, whose tensors are of the same kinds."""
        if kernel is not self.kernel or (*grid, 1, 1)[:3] != self.grid:
            return False
        if len(args) + len(self.names) != len(kernel.arg_names):
            return False
        for place, x in self.numbers:
            if args[place] != x:
                return False
        for name, x in self.constants:  # noqa: SIM110, a generator takes longer
            if named.get(name) != x:
                return False
        return True


def _is_constant(x: object) -> bool:
    """Whether an argument is the same at the next call."""
    return not isinstance(x, (Tensor, TensorDescriptor))


class Recorder:
    """Keeps the launches that go through it."""

    def __init__(self) -> None:
        self.launches, self.is_whole = [], True

    def launch(
        self, kernel: Replayable, grid: tuple[int, ...], *args: object, **named: object
    ) -> None:
        """Launch as usual, and keep it."""
        compiled = kernel.launch(grid, args, named)
        names = tuple(kernel.arg_names[len(args) :])
        if not hasattr(compiled, "function") or not named.keys() >= set(names):
            self.is_whole = False  # a default, or no kernel
            return
        numbers = tuple((i, x) for i, x in enumerate(args) if _is_constant(x))
        constants = tuple((name, x) for name, x in named.items() if _is_constant(x))
        sides = (*grid, 1, 1)[:3]
        self.launches.append(Launch(kernel, compiled, sides, numbers, constants, names))


class Player:
    """Launches what a tape holds."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches, self.place = launches, 0

    def launch(
        self, kernel: Replayable, grid: tuple[int, ...], *args: object, **named: object
    ) -> None:
        """Launch the next one of the tape, if it is this one; and if not, as usual, from now on."""
        kept = self.launches[self.place] if 0 <= self.place < len(self.launches) else None
        if kept is not None and kept.is_for(kernel, grid, args, named):
            kept.compiled[kept.grid](*args, *[named[name] for name in kept.names])
            self.place += 1
        else:
            self.place = -1
            kernel.launch(grid, args, named)

    @property
    def is_whole(self) -> bool:
        """Whether all was launched, and nothing else."""
        return self.place == len(self.launches)


def _kinds(values: Iterable[object], kinds: list[Hashable]) -> list[Hashable]:
    """Adds to `kinds` what launches follow from: of tensors that, of everything else its value."""
    for x in values:
        if isinstance(x, Tensor):
            # Triton compiles another kernel for an address that is no multiple
            kinds += (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
        elif isinstance(x, (list, tuple)):
            kinds.append(len(x))
            _kinds(x, kinds)
        elif isinstance(x, dict):
            _kinds((*x.keys(), *x.values()), kinds)
        else:
            kinds.append(x)
    return kinds


def replayed(function: Callable) -> Callable:
    """`function`, whose first argument is a tensor, with a tape for each kind of call on a GPU. It
    launches replayable kernels, and which ones, and with which numbers, follows from its arguments'
    shapes."""
    tapes: dict[tuple, list[Launch]] = {}

    @functools.wraps(function)
    def run(*args: object, **options: object) -> object:
        if not _has_tapes(args[0]):
            return function(*args, **options)
        key = tuple(_kinds((*args, options), [args[0].device]))
        launches = tapes.get(key)
        tape = Recorder() if launches is None else Player(launches)
        _here.tape = tape
        try:
            found = function(*args, **options)
        finally:
            _here.tape = None
        if launches is None:
            if tape.is_whole:
                if len(tapes) >= MOST_TAPES:
                    tapes.clear()
                tapes[key] = tape.launches
        elif not tape.is_whole:
            tapes.pop(key, None)
        return found

    run.tapes = tapes
    return run


def _has_tapes(x: Tensor) -> bool:
    return x.is_cuda
