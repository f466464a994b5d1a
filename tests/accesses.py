"""What interpreted Triton kernels do to memory: every load, store and atomic of every program, held
against the tensors that the launch was given and against the other programs of the launch.

Programs of a launch run in any order on a GPU. So a launch is sound if each access stays inside an
argument, and if what one program stores no other program loads or stores: atomics may meet atomics,
and nothing else. The interpreter runs programs one by one and cannot show such a race by its
results; the addresses show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

NOBODY, MANY = -1, -2


@dataclass
class Span:
    """The bytes of one argument, and which program touched each."""

    name: str
    first: int
    end: int
    inside: np.ndarray
    loaded: np.ndarray = field(init=False)
    stored: np.ndarray = field(init=False)
    added: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.loaded, self.stored, self.added = (
            np.full(self.end - self.first, NOBODY, np.int32) for _ in range(3)
        )


def _note(owner: np.ndarray, at: np.ndarray, program: int) -> None:
    before = owner[at]
    owner[at] = np.where((before == NOBODY) | (before == program), program, MANY)


def _others(owner: np.ndarray, at: np.ndarray, program: int) -> np.ndarray:
    return (owner[at] != NOBODY) & (owner[at] != program)


@dataclass
class Accesses:
    """What was watched: launches, loads and stores by number of elements, and what is wrong."""

    launches: int = 0
    loads: int = 0
    stores: int = 0
    atomics: int = 0
    faults: list[str] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    _spans: list[Span] = field(default_factory=list)
    _kernel: str = ""
    _program: int = 0

    def begin(self, kernel: str, arguments: dict[str, object]) -> None:
        self.launches, self._kernel, self._spans = self.launches + 1, kernel, []
        self.kernels.add(kernel)
        for name, argument in arguments.items():
            x = getattr(argument, "base", argument)
            if isinstance(x, torch.Tensor) and x.numel():
                self._spans.append(_span(name, x))

    def touch(self, kind: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        mask = np.broadcast_to(mask, addresses.shape)
        at = addresses[mask].astype(np.int64).ravel()
        counter = {"load": "loads", "store": "stores", "atomic": "atomics"}[kind]
        setattr(self, counter, getattr(self, counter) + at.size)
        if kind == "store" and np.unique(at).size < at.size:
            self._fault("stores twice to one address in one statement")
        for span in self._spans:
            here = (at >= span.first) & (at + size <= span.end)
            if here.any():
                here[here] = span.inside[at[here] - span.first]
            if here.any():
                self._meet(span, kind, at[here] - span.first)
                at = at[~here]
        if at.size:
            self._fault(f"{kind}s {at.size} elements outside all its arguments")

    def _meet(self, span: Span, kind: str, at: np.ndarray) -> None:
        owners = {"load": span.loaded, "store": span.stored, "atomic": span.added}
        forbidden = {
            "load": ("store", "atomic"),
            "store": ("load", "store", "atomic"),
            "atomic": ("load", "store"),
        }[kind]
        for other in forbidden:
            count = int(_others(owners[other], at, self._program).sum())
            if count:
                self._fault(f"{kind}s {count} of `{span.name}` where another program {other}s")
        _note(owners[kind], at, self._program)

    def _fault(self, what: str) -> None:
        line = f"{self._kernel}, program {self._program}: {what}"
        if len(self.faults) < 20:
            self.faults.append(line)


def _span(name: str, x: torch.Tensor) -> Span:
    size = x.element_size()
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    inside = np.zeros(length * size, bool)
    offsets = np.zeros((), np.int64)  # not in PyTorch, whose operations other tests count
    for n, s in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(n) * s
    inside[offsets.ravel() * size] = True
    return Span(name, x.data_ptr(), x.data_ptr() + length * size, inside)


@contextlib.contextmanager
def watch() -> Iterator[Accesses]:
    """Watch every launch of an interpreted Triton kernel in the block."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    seen = Accesses()
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    step, call = builder.set_grid_idx, executor.__call__

    def size_of(pointers: object) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def watched_load(self, pointers, mask, *rest):
        seen.touch("load", pointers.data, mask.data, size_of(pointers))
        return load(self, pointers, mask, *rest)

    def watched_descriptor(self, pointers, mask, other, **rest):
        return watched_load(self, pointers, mask, other, *rest.values())

    def watched_store(self, pointers, value, mask, *rest):
        seen.touch("store", pointers.data, mask.data, size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def watched_rmw(self, op, pointers, value, mask, *rest):
        seen.touch("atomic", pointers.data, mask.data, size_of(pointers))
        return rmw(self, op, pointers, value, mask, *rest)

    def watched_cas(self, pointers, *rest):
        seen.touch("atomic", pointers.data, np.ones(pointers.data.shape, bool), size_of(pointers))
        return cas(self, pointers, *rest)

    def watched_step(self, x, y, z):
        grid = self.grid_dim
        seen._program = (x * grid[1] + y) * grid[2] + z
        return step(self, x, y, z)

    def watched_call(self, *args, **kwargs):
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        seen.begin(self.fn.__name__, named)
        return call(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builder,
            "create_masked_load",
            lambda *a, **k: watched_descriptor(*a, **k) if k else watched_load(*a),
        )
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(builder, "create_atomic_rmw", watched_rmw)
        patch.setattr(builder, "create_atomic_cas", watched_cas)
        patch.setattr(builder, "set_grid_idx", watched_step)
        patch.setattr(executor, "__call__", watched_call)
        yield seen


def assert_sound(seen: Accesses) -> None:
    """Each access inside an argument, no two programs on one element."""
    assert seen.launches, "no kernel was launched"
    assert not seen.faults, "\n".join(seen.faults)
