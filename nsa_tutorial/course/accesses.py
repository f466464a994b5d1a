"""What a launch did to memory: each access of each program, held against the launch's tensors and
against its other programs. `watching` fills it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

_NOBODY, _MANY = -1, -2
_VERBS = {"load": "loads", "store": "stores", "atomic": "updates"}


@dataclass
class _Span:
    """The bytes of one argument, and which program touched each."""

    name: str
    first: int
    end: int
    inside: np.ndarray
    owners: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        size = self.end - self.first
        self.owners = {kind: np.full(size, _NOBODY, np.int32) for kind in _VERBS}


def _note(owner: np.ndarray, at: np.ndarray, program: int) -> None:
    before = owner[at]
    owner[at] = np.where((before == _NOBODY) | (before == program), program, _MANY)


@dataclass
class Accesses:
    """What was watched: launches and programs, elements by what was done to them, and faults.

    Attributes:
        launches, programs: how many.
        unwatched: launches of TileLang, whose programs nobody sees.
        loads, stores, atomics: elements.
        widest: elements of the largest tile that one statement loads or stores, or that a kernel of
            TileLang allocates.
        faults: a sentence for each, twenty at most.
        kernels: their names.
    """

    launches: int = 0
    programs: int = 0
    unwatched: int = 0
    loads: int = 0
    stores: int = 0
    atomics: int = 0
    widest: int = 0
    faults: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    _spans: list[_Span] = field(default_factory=list)
    _program: int = 0
    _grid: tuple[int, ...] = (1, 1, 1)

    def begin(self, kernel: str, arguments: dict[str, object]) -> None:
        """A launch with these arguments begins."""
        self.launches, self._spans = self.launches + 1, []
        self.kernels.append(kernel)
        for name, argument in arguments.items():
            x = getattr(argument, "base", argument)
            if isinstance(x, torch.Tensor) and x.numel():
                self._spans.append(_span(name, x))

    def step(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        """The launch's next program begins."""
        self.programs, self._grid = self.programs + 1, grid
        self._program = int(np.ravel_multi_index(program, grid))

    def touch(self, kind: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        """The program loads, stores or updates numbers of `size` bytes, where `mask` is set."""
        self.widest = max(self.widest, addresses.size)
        # the interpreter's `&` of two conditions gives integers, which would be taken for places
        mask = np.broadcast_to(np.asarray(mask, bool), addresses.shape)
        at = addresses[mask].astype(np.int64).ravel()
        counter = f"{kind}s"
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
            self._fault(f"{_VERBS[kind]} {_elements(at.size)} outside of all its arguments")

    def _meet(self, span: _Span, kind: str, at: np.ndarray) -> None:
        forbidden = {
            "load": ("store", "atomic"),
            "store": ("load", "store", "atomic"),
            "atomic": ("load", "store"),
        }[kind]
        for other in forbidden:
            owners = span.owners[other][at]
            others = owners[(owners != _NOBODY) & (owners != self._program)]
            if others.size:
                first = int(others[0])
                is_one = first != _MANY and (others == first).all()
                who = f"program {self._named(first)}" if is_one else "another program"
                what = f"{_VERBS[kind]} {_elements(others.size)} of `{span.name}`"
                self._fault(f"{what} where {who} {_VERBS[other]}")
        _note(span.owners[kind], at, self._program)

    def _named(self, program: int) -> str:
        """A program by its ids, as many as its grid has axes."""
        ids = [int(i) for i in np.unravel_index(program, self._grid)]
        while len(ids) > 1 and self._grid[len(ids) - 1] == 1:
            ids.pop()
        return str(ids[0]) if len(ids) == 1 else f"({', '.join(map(str, ids))})"

    def _fault(self, what: str) -> None:
        if len(self.faults) < 20:
            named = self._named(self._program)
            self.faults.append(f"{self.kernels[-1]}: program {named} {what}")


def _elements(count: int) -> str:
    return f"{count} element{'s' * (count != 1)}"


def _span(name: str, x: torch.Tensor) -> _Span:
    size = x.element_size()
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    inside = np.zeros(length * size, bool)
    offsets = np.zeros((), np.int64)  # not in PyTorch, whose operations tests count
    for n, s in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(n) * s
    inside[offsets.ravel() * size] = True
    return _Span(name, x.data_ptr(), x.data_ptr() + length * size, inside)
