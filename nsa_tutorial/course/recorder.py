"""Run one program of a Triton kernel in NumPy and write down every element that it loads and
stores.

The kernel's own source is executed, with small stand-ins for `tl` and for pointers: what is
recorded is what the kernel's index arithmetic says, on any machine, also where Triton is not
installed or compiles for a GPU. Triton's interpreter works the same way.

It knows the operations of chapter 09's kernels, of `triton.selected.forward`, of
`triton.selected.forward_tma` and of `triton.selected.backward.dkv_kernel`, and no others, computes
in fp64 and int64, and says nothing about order, threads or time.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from nsa_tutorial.course.source import show


class Tile(np.ndarray):
    """An array with Triton's `.to(dtype)`, which changes nothing here: everything is fp64 or an
    integer."""

    def to(self, _dtype: object) -> Tile:
        """The tile itself."""
        return self


def _tile(x: object) -> Tile:
    return np.asarray(x).view(Tile)


class Pointer:
    """One address, or an array of addresses, in a tensor."""

    # without this, NumPy would spread `array + pointer` over the array's elements
    __array_ufunc__ = None
    dtype = SimpleNamespace(element_ty=None)

    def __init__(self, name: str, offsets: object = 0) -> None:
        self.name, self.offsets = name, np.asarray(offsets)

    def __add__(self, offsets: object) -> Pointer:
        return Pointer(self.name, self.offsets + np.asarray(offsets))

    __radd__ = __add__

    def __sub__(self, offsets: object) -> Pointer:
        return self + -np.asarray(offsets)


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: boxes of `tokens` rows of one head of a tensor `[rows, heads, width]`.

    Attributes:
        tensor: the name of the kernel's argument that is the tensor itself.
        tokens: rows of a box.
    """

    tensor: str
    tokens: int


@dataclass(frozen=True)
class Access:
    """One `tl.load` or `tl.store` of one program.

    Attributes:
        kind: `"load"` or `"store"`.
        tensor: the name of the kernel's pointer argument.
        offsets: of all elements of the tile, counted from the tensor's beginning; the shape is the
            tile's.
        mask: which of them touch memory; the same shape.
    """

    kind: str
    tensor: str
    offsets: np.ndarray
    mask: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """The offsets that touch memory, in the tile's order."""
        return np.asarray(self.offsets[self.mask])


@dataclass(frozen=True)
class Record:
    """What one program did.

    Attributes:
        program: its ids, one per axis of the grid.
        accesses: its loads and stores in order.
        shapes: of the tensors, by name.
    """

    program: tuple[int, ...]
    accesses: tuple[Access, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def touched(self, kind: str, tensor: str) -> np.ndarray:
        """How often each element of `tensor` was loaded or stored (`kind`), in the tensor's shape;
        what lies outside is left out."""
        count = np.zeros(math.prod(self.shapes[tensor]), dtype=int)
        for access in self.accesses:
            if (access.kind, access.tensor) == (kind, tensor):
                inside = (access.touched >= 0) & (access.touched < count.size)
                np.add.at(count, access.touched[inside], 1)
        return count.reshape(self.shapes[tensor])

    def outside(self) -> int:
        """How many loads and stores of single elements lay outside of their tensor: none, if the
        masks are right."""
        count = 0
        for access in self.accesses:
            size = math.prod(self.shapes[access.tensor])
            count += int(((access.touched < 0) | (access.touched >= size)).sum())
        return count


class _Language:
    """The part of `tl` that these kernels use, for one program."""

    constexpr = float32 = int64 = int32 = None

    def __init__(
        self, program: tuple[int, ...], memory: Mapping[str, np.ndarray], accesses: list[Access],
        grid: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.program, self.memory, self.accesses, self.grid = program, memory, accesses, grid

    def program_id(self, axis: int) -> Tile:
        return _tile(self.program[axis])

    def num_programs(self, axis: int) -> Tile:
        return _tile(self.grid[axis])

    def arange(self, start: int, end: int) -> Tile:
        return _tile(np.arange(start, end))

    def zeros(self, shape: list[int], _dtype: object) -> Tile:
        return _tile(np.zeros(shape))

    def full(self, shape: list[int], value: float, _dtype: object) -> Tile:
        return _tile(np.full(shape, value))

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def range(self, n: int, num_stages: int = 1) -> range:
        return range(int(n))

    def where(self, condition: object, a: object, b: object) -> Tile:
        return _tile(np.where(condition, a, b))

    def minimum(self, a: object, b: object) -> Tile:
        return np.minimum(a, b)

    def maximum(self, a: object, b: object) -> Tile:
        return np.maximum(a, b)

    def max(self, x: Tile, axis: int) -> Tile:
        return _tile(x.max(axis))

    def min(self, x: Tile, axis: int) -> Tile:
        return _tile(x.min(axis))

    def static_assert(self, condition: bool, message: str) -> None:
        assert condition, message

    def sum(self, x: Tile, axis: int) -> Tile:
        return x.sum(axis)

    def exp2(self, x: Tile) -> Tile:
        return np.exp2(x)

    def log(self, x: Tile) -> Tile:
        return np.log(x)

    def dot(self, a: Tile, b: Tile, acc: object = 0, input_precision: str = "") -> Tile:
        return a @ b + acc

    def load(self, pointer: Pointer, mask: object = True, other: float = math.nan) -> Tile:
        access = self._note("load", pointer, mask)
        values = self.memory[pointer.name].ravel()
        real = access.mask & (access.offsets >= 0) & (access.offsets < values.size)
        loaded = values[np.where(real, access.offsets, 0)]
        unknown = math.nan if values.dtype.kind == "f" else np.iinfo(np.int32).min  # outside
        unloaded = np.where(access.mask, unknown, other).astype(values.dtype)
        return _tile(np.where(real, loaded, unloaded))

    def load_box(self, descriptor: Descriptor, corner: list) -> Tile:
        rows, heads, width = self.memory[descriptor.tensor].shape
        row = np.asarray(corner[0]) + np.arange(descriptor.tokens)
        offsets = (row * heads + corner[1])[:, None] * width + np.arange(width)
        inside = np.broadcast_to(((row >= 0) & (row < rows))[:, None], offsets.shape)
        return self.load(Pointer(descriptor.tensor, offsets), mask=inside, other=0.0)[:, None]

    def store(self, pointer: Pointer, value: object, mask: object = True) -> None:
        access = self._note("store", pointer, mask)
        values = self.memory[pointer.name].reshape(-1)
        real = access.mask & (access.offsets >= 0) & (access.offsets < values.size)
        stored = np.broadcast_to(np.asarray(value), access.offsets.shape)
        values[access.offsets[real]] = stored[real]

    def _note(self, kind: str, pointer: Pointer, mask: object) -> Access:
        offsets, mask = np.broadcast_arrays(pointer.offsets, np.asarray(mask))
        self.accesses.append(Access(kind, pointer.name, offsets.copy(), mask.astype(bool)))
        return self.accesses[-1]


@functools.cache
def _code(kernel: str | Callable, without: str = "") -> tuple[object, str]:
    """A kernel's source with that of the functions it calls, compiled, and its function's name."""
    listing = show(kernel)
    if without not in listing.code:
        raise ValueError(f"without: {without!r} does not stand in {listing.title}")
    source = listing.code + (_called(kernel, listing.code) if isinstance(kernel, str) else "")
    source = source.replace(without, "") if without else source
    code = compile("from __future__ import annotations\n" + source, "<kernel>", "exec")
    return code, listing.title.rsplit(" · ", 1)[-1].rsplit(".", 1)[-1]


def _called(kernel: str, code: str) -> str:
    """The source of the functions of its module, or of those that it imports, that a kernel, given
    by name, calls."""
    module = kernel.partition(":")[0]
    found = dict.fromkeys(_names_called(code), module) | {
        alias.name: node.module
        for node in ast.parse(show(module).code).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in _names_called(code)
    }
    return "".join("\n" + show(f"{found[name]}:{name}").code for name in sorted(found))


def _names_called(code: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return {call.id for call in calls if isinstance(call, ast.Name)} - set(vars(builtins))


def _jit(function: Callable | None = None, **_options: object) -> Callable:
    """Stands for `triton.jit`, bare or with options, which change nothing here."""
    return function or _jit


def run(
    kernel: str | Callable, program: tuple[int, ...], arguments: Mapping[str, object],
    grid: tuple[int, ...] = (), *, without: str = "",
) -> Record:  # fmt: skip
    """Run one program.

    Args:
        kernel: a Triton kernel, its Python function, or its name,
            `"nsa_tutorial.course.kernels.triton_basics:copy"`, read without importing it; a kernel
            given by name may call functions of its module, and functions that this imports.
        program: its ids.
        arguments: by name; a NumPy array stands for the pointer to its first element, and what is
            stored there is seen in it; a `Descriptor` stands for a tensor descriptor of one of
            these arrays.
        grid: how many programs there are, for a kernel that asks for it.
        without: a piece of the kernel's source that is left out, to see what it was good for.
    """
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    accesses: list[Access] = []
    language = _Language(program, arrays, accesses, grid)
    names: dict[str, object] = {"tl": language, "triton": SimpleNamespace(jit=_jit)}
    code, name = _code(kernel, without)
    exec(code, names)
    function = names[name]
    others = {name: x for name, x in arguments.items() if name not in arrays}
    for name, x in others.items():
        if isinstance(x, Descriptor):
            others[name] = SimpleNamespace(load=functools.partial(language.load_box, x))
    with np.errstate(all="ignore"):
        function(**{name: Pointer(name) for name in arrays}, **others)
    return Record(program, tuple(accesses), {name: x.shape for name, x in arrays.items()})


def programs(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All program ids of a grid, the first axis fastest, as a launch numbers them."""
    for ids in itertools.product(*(range(n) for n in reversed(grid))):
        yield ids[::-1]
