"""Exercises of chapter 09: what a program covers, a mask before each reduction, a matrix product in
Triton, row sums in TileLang."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- kernels --


class LoadsElsewhere(Exception):
    """The result is right, and a load touched memory outside of its tensor."""


class UnsetNumbers(Exception):
    """The result depends on numbers that nobody has set."""


class SharedPlace(Exception):
    """Turns of a parallel loop add to one place, which a CPU forgives and a GPU does not."""


class InputChanged(Exception):
    """The kernel stored to a tensor that it should only read."""


# What an error says in a kernel, and what the reader is told in its place.
_PLAINLY = (
    (
        r"where\(\) received|got \(tensor,|not tensor$|not 'tensor'",
        "functions of `torch` take tensors, a kernel's tiles are none. Does `tl` have the word?",
    ),
    (r"unsupported operand type\(s\) for @", "for the product of two tiles, take `tl.dot`"),
    (r"add @triton\.jit", "`tl` belongs to Triton. In TileLang, a slice says which elements"),
    (r"retrieve_shape", "a slice of X is no tile. `T.copy` fills a tile from a slice"),
    (r"'accum_dtype' is not defined", 'write the dtype here, in quotes: `"float32"`'),
    (r"(name '\w+' is not defined)", r"\1. If it is a tile, where is it allocated?"),
    (  # allocated before the loop, and set again inside
        r"variable `(\w+)` is used outside its(?s:.*)SSBlockFrame(?s:.*)\b\1 = (?s:.*)\bfor \w+ in",
        r"`T.reduce_sum(x_tile, \1, dim=1, clear=False)` adds into `\1`. It returns nothing, so "
        r"write no `\1 =`",
    ),
    (
        r"variable `(\w+)` is used outside its",
        r"`\1` is set inside the loop, so it ends with the loop. Allocate it once, before the loop",
    ),
    (
        r"buffer `(\w+)` using augmented",
        r"`T.reduce_sum(x_tile, \1, dim=1, clear=False)` adds into `\1` by itself. It returns "
        r"nothing, so write no `\1 +=`",
    ),
    (
        r"reduce_\w+\(\).* (argument: 'out'|argument 'axis')",
        "`T.reduce_sum` takes the tile, then where the sums go, then the axis, as `dim`",
    ),
    (
        r"Invalid reduce output shape",
        "`dim` is the axis that vanishes, and `acc` keeps one number for each row of the tile",
    ),
    (r"copy\(\).* argument: 'dst'", "`T.copy` takes a source and a target. It returns nothing"),
    (
        r"to_buffer_region: |for -: 'NoneType' and 'NoneType'|BufferStore",
        "a fragment is memory. `T.clear(acc)` fills it with zeros, and `T.copy` moves it",
    ),
)


@contextmanager
def _plainly() -> Iterator[None]:
    """Say in a sentence what an error in a kernel means; its kind stays."""
    try:
        yield
    except Exception as error:
        cause = error
        while type(cause).__name__ == "InterpreterError" and cause.__cause__ is not None:
            cause = cause.__cause__
        for pattern, said in _PLAINLY:
            if found := re.search(pattern, str(cause)):
                raise type(cause)(found.expand(said)) from error
        raise


def _returned(solution: Callable) -> object:
    """The kernel that a solution returns.

    Raises:
        NotImplementedError: if there is none.
        TypeError: if there is one, and it is not returned.
    """
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("the function defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    return kernel


def _launchable(solution: Callable, given: str) -> object:
    """The Triton kernel that a solution returns.

    Raises:
        NotImplementedError: if there is none, or the one that the chapter gives.
        TypeError: if it cannot be launched.
    """
    kernel = _returned(solution)
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _reads_as(kernel, given):
        raise NotImplementedError("the kernel is as it was given")
    return kernel


def _reads_as(kernel: object, given: str) -> bool:
    """Whether a kernel's source is `given`, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(given))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


def _recorded(
    kernel: object, grid: tuple[int, ...], arrays: dict[str, np.ndarray], sizes: dict[str, object]
) -> int:
    """How many loads and stores of all programs lie outside of their tensors; what is stored is
    left in `arrays`. A masked place of a load without `other` holds NaN here.

    A kernel with words of Triton that the recorder does not know counts as none.

    Raises:
        TypeError: for `and`, `or` or `not` between tiles: the interpreter drops one of the two.
    """
    arguments, outside = arrays | sizes | getattr(kernel, "slips", {}), 0
    try:
        for program in recorder.programs(grid):
            outside += recorder.run(kernel.fn, program, arguments).outside()
    except Exception as error:
        if "truth value of an array" in str(error):
            raise TypeError("logical and, or or not between tiles") from error
        return 0
    return outside


def _refuse_unset(result: Tensor, recorded: np.ndarray) -> None:
    """Refuse a result that the recorder's NaN reached, and the launch's zeros made look right.

    Raises:
        UnsetNumbers: if it came from a masked place of a load without `other`.
    """
    if (torch.from_numpy(recorded).isnan() & ~result.isnan()).any():
        raise UnsetNumbers("the result depends on masked places of a load without `other`")


def _triton_case(name: str, *sizes: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: sizes, lambda: here.why_not("triton", here.device))


# -- row_variance --


def row_variance() -> object:
    """The kernel that stores the variance of each row of X [R, N]; a program has one row."""

    @triton.jit
    def kernel(X, Variance, N, BN: tl.constexpr):
        row = tl.program_id(0)
        columns = tl.arange(0, BN)  # [BN], and BN may be larger than N
        exists = columns < N
        x_tile = tl.load(X + row * N + columns, mask=exists, other=0.0)
        mean = tl.sum(x_tile, axis=0) / N
        difference = tl.where(exists, x_tile - mean, 0.0)
        tl.store(Variance + row, tl.sum(difference * difference, axis=0) / N)

    return kernel


_GIVEN_VARIANCE = """
@triton.jit
def kernel(X, Variance, N, BN: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BN)  # [BN], and BN may be larger than N
    exists = columns < N
    x_tile = tl.load(X + row * BN + columns, mask=exists, other=0.0)
    mean = tl.sum(x_tile, axis=0) / N
    difference = x_tile - mean
    tl.store(Variance + row, tl.sum(difference * difference, axis=0) / N)
"""


def _run_variance(solution: Callable, R: int, N: int, zeros: int = 0) -> Tensor:
    """Launch the kernel, one program for each row; the first `zeros` numbers of `X` are 0, and
    behind `X` lie large ones."""
    kernel, BN = _launchable(solution, _GIVEN_VARIANCE), triton.next_power_of_2(N)
    memory = torch.full((R * BN + BN,), 100.0)
    memory[: R * N] = 5 + _random(R * N, seed=R * N)
    memory[:zeros] = 0
    variance = roomy(torch.full((R,), -77.0), -77.0)
    with (
        np.errstate(all="ignore"),
        _plainly(),
    ):  # of the interpreter; the verdict says what went wrong
        kernel[R,](roomy(memory, 100.0), variance, N, BN=BN)
    arrays = {"X": memory.numpy(), "Variance": np.zeros(R)}
    _recorded(kernel, (R,), arrays, {"N": N, "BN": BN})
    _refuse_unset(variance.cpu(), arrays["Variance"])
    return variance.cpu()


@triton.jit
def _wrong_variance(
    X, Variance, N,
    BN: tl.constexpr, START: tl.constexpr, TAIL: tl.constexpr, MEAN: tl.constexpr,
    DIVISOR: tl.constexpr, FILL: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BN)
    exists = columns < N
    first = row * N
    if START == "by tile":
        first = row * BN
    elif START == "every element":
        first = row
    if TAIL == "no mask":
        x_tile = tl.load(X + first + columns)
    elif FILL == "no other":
        x_tile = tl.load(X + first + columns, mask=exists)
    elif FILL == "loads -inf":
        x_tile = tl.load(X + first + columns, mask=exists, other=float("-inf"))
    else:
        x_tile = tl.load(X + first + columns, mask=exists, other=0.0)
    mean = tl.sum(x_tile, axis=0) / N
    if MEAN == "mean by BN":
        mean = tl.sum(x_tile, axis=0) / BN
    difference = x_tile - mean
    if TAIL == "right":
        difference = tl.where(exists, difference, 0.0)
    elif TAIL == "zeros":
        difference = tl.where(x_tile == 0, 0.0, difference)
    elif TAIL == "swapped":
        difference = tl.where(exists, 0.0, difference)
    total = tl.sum(difference * difference, axis=0)
    if DIVISOR == "by BN":
        total = total / BN
    elif DIVISOR == "unbiased":
        total = total / (N - 1)
    elif DIVISOR != "sum":
        total = total / N
    if END == "root":
        total = tl.sqrt(total)
    tl.store(Variance + row, total)


_VARIANCE_SLIPS = {
    "START": {"by tile", "every element"},
    "TAIL": {"padding", "no mask", "zeros", "swapped"},
    "MEAN": {"mean by BN"},
    "DIVISOR": {"by BN", "unbiased", "sum"},
    "FILL": {"no other", "loads -inf"},
    "END": {"root"},
}


class _Mistaken:
    """A kernel with its slips chosen; launched like a kernel."""

    def __init__(self, kernel: object, groups: dict[str, set[str]], slips: Slips) -> None:
        self.kernel, self.fn, self.run = kernel, getattr(kernel, "fn", kernel), None
        self.slips = {
            group: next((name for name in slips if name in names), "right")
            for group, names in groups.items()
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: self.kernel[grid](*args, **self.slips, **sizes)


def _variance(slips: Slips) -> object:
    """`row_variance` with slips."""
    return _Mistaken(_wrong_variance, _VARIANCE_SLIPS, slips)


_VARIANCE_MISTAKES = (
    Misconception(
        "filling masked places as for a maximum",
        slip(_variance, "loads -inf"),
        "−∞ changes no maximum. Which number changes no sum?",
    ),
    Misconception(
        "letting the padding into the variance",
        slip(_variance, "padding"),
        "The padding is 0 when it is loaded. What is it once the mean is taken off, and what does "
        "its square do in the sum?",
    ),
    Misconception(
        "taking a 0 of the data for a masked place",
        slip(_variance, "zeros"),
        "A number of the row may be 0, too. Which name says that a place exists?",
    ),
    Misconception(
        "a `where` with its branches swapped",
        slip(_variance, "swapped"),
        "`tl.where` takes its second argument where the condition holds. What becomes of the "
        "numbers that exist?",
    ),
    Misconception(
        "stepping to the next row by the width of the tile",
        slip(_variance, "by tile"),
        "The tile may be wider than a row. How many numbers of X lie before row 1?",
    ),
    Misconception(
        "starting a row at every element",
        slip(_variance, "every element"),
        "Row 1 starts where row 0 ends. How many numbers does a row hold?",
    ),
    Misconception(
        "a missing mask on the load",
        slip(_variance, "no mask"),
        "Past the end of a row, the next row begins. Which places of the tile hold a number of "
        "this row?",
    ),
    Misconception(
        "a masked load without `other`",
        slip(_variance, "no other"),
        "Triton promises nothing about such a masked place. It may hold 0 today and NaN tomorrow. "
        "Which number should stand there?",
    ),
    Misconception(
        "taking the mean over the whole tile",
        slip(_variance, "mean by BN"),
        "Zeros change no sum, but how many numbers were added up?",
    ),
    Misconception(
        "dividing the squares by the length of the tile",
        slip(_variance, "by BN"),
        "How many of the squares belong to numbers of the row?",
    ),
    Misconception(
        "dividing by N − 1",
        slip(_variance, "unbiased"),
        "That estimates the variance of what the row was drawn from. What is the mean of its own "
        "squares?",
    ),
    Misconception(
        "the sum of the squares in place of their mean",
        slip(_variance, "sum"),
        "A longer row should not have a larger variance. What is still to be divided?",
    ),
    Misconception(
        "a standard deviation",
        slip(_variance, "root"),
        "That is a step further than asked. What do you get before the root?",
    ),
)

_VARIANCE = TEXTS.exercise(
    "row_variance",
    minutes=7,
    difficulty=2,
    solution=row_variance,
    run=_run_variance,
    tolerance=1e-4,
    misconceptions=_VARIANCE_MISTAKES,
    combine=together(_VARIANCE_MISTAKES, *_VARIANCE_SLIPS.values()),
    cases=(
        _triton_case("two rows of 4", 2, 4),
        _triton_case("a row of 4 that begins with a true 0", 1, 4, 1),
        _triton_case("one row of 3", 1, 3),
        _triton_case("two rows of 3", 2, 3),
        _triton_case("three rows of 13", 3, 13),
    ),
)


# -- program_offsets --


def program_offsets(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
    """The offsets in C [M, N] that program (pid_m, pid_n) stores, row by row."""
    rows = pid_m * BM + torch.arange(BM)  # [BM]
    columns = pid_n * BN + torch.arange(BN)  # [BN]
    offsets = rows[:, None] * N + columns  # [BM, BN]
    in_bounds = (rows < M)[:, None] & (columns < N)  # [BM, BN]
    return offsets[in_bounds].tolist()


def _offsets(
    slips: Slips, pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> list[int] | list[list[int]] | Tensor:
    """`program_offsets` with slips."""
    if "thread" in slips:
        return [pid_m * N + pid_n]
    if "swap" in slips:
        pid_m, pid_n = pid_n, pid_m
    if "sides" in slips:
        BM, BN = BN, BM
    is_tiled = "starts" not in slips
    rows = pid_m * (BM if is_tiled else 1) + torch.arange(1 if "one row" in slips else BM)
    columns = pid_n * (BN if is_tiled else 1) + torch.arange(BN)
    stride = BN if "by tile" in slips else M if "by rows" in slips else N
    offsets = rows[:, None] * stride + columns
    more = int("one more" in slips)
    row_exists, column_exists = (rows < M + more)[:, None], columns < N + more
    keep = row_exists & column_exists
    if "end" in slips:
        keep = offsets < M * N
    if slips & {"none", "rows alone", "columns alone"}:
        keep = torch.ones_like(keep)
        keep = keep & row_exists if "rows alone" in slips else keep
        keep = keep & column_exists if "columns alone" in slips else keep
    if slips & {"to 0", "as -1"}:
        masked = 0 if "to 0" in slips else -1
        offsets, keep = torch.where(keep, offsets, masked), torch.ones_like(keep)
    if "tensor" in slips:
        return offsets
    if "table" in slips:
        table = [row[kept].tolist() for row, kept in zip(offsets, keep, strict=True)]
        return [row for row in table if row]
    if "by columns" in slips:
        offsets, keep = offsets.T, keep.T
    return offsets[keep].tolist()


_OFFSETS_MISTAKES = (
    Misconception(
        "taking a program for a thread",
        slip(_offsets, "thread"),
        "A program id names a tile, not an element. How many elements does one program answer for?",
    ),
    Misconception(
        "forgetting that ids count tiles",
        slip(_offsets, "starts"),
        "Your program 1 begins one element after program 0. What lies between the two?",
    ),
    Misconception(
        "walking along the wrong axis",
        slip(_offsets, "swap"),
        "A square grid hides it. Which of the two ids counts tiles of rows, and which counts "
        "tiles of columns?",
    ),
    Misconception(
        "swapping the two sides of the tile",
        slip(_offsets, "sides"),
        "Square tiles hide it. Which of `BM` and `BN` counts rows?",
    ),
    Misconception(
        "stepping to the next row by the width of the tile",
        slip(_offsets, "by tile"),
        "The tile is a window into C. How many elements of C do you pass from one of its rows to "
        "the next?",
    ),
    Misconception(
        "stepping to the next row by the number of rows",
        slip(_offsets, "by rows"),
        "A square C hides it. How many elements does a row of C `[M, N]` hold?",
    ),
    Misconception(
        "masking only past the end of the memory",
        slip(_offsets, "end"),
        "An offset below M * N is in C, but past the last column the next row begins. Which "
        "program stores that element?",
    ),
    Misconception(
        "a missing mask",
        slip(_offsets, "none"),
        "The last tiles reach past the end of C. On a GPU such a store changes somebody else's "
        "memory, without an error. Which rows and which columns exist?",
    ),
    Misconception(
        "a mask on the rows alone",
        slip(_offsets, "rows alone"),
        "A tile at the right reaches past the last column. Where in memory do its elements lie "
        "then?",
    ),
    Misconception(
        "a mask on the columns alone",
        slip(_offsets, "columns alone"),
        "A tile at the bottom reaches past the last row. What lies in memory behind C?",
    ),
    Misconception(
        "sending masked elements to offset 0",
        slip(_offsets, "to 0"),
        "That is harmless for a load, but this is a store. Whose element lies at offset 0?",
    ),
    Misconception(
        "writing −1 for masked elements",
        slip(_offsets, "as -1"),
        "The mask is right. Which of these offsets does the program store?",
    ),
    Misconception(
        "letting one row and one column too many in",
        slip(_offsets, "one more"),
        "C has M rows and N columns, both counted from 0. Which number has the last column?",
    ),
    Misconception(
        "covering only the first row of the tile",
        slip(_offsets, "one row"),
        "A tile has two sides, so its offsets are a table. How many rows has it?",
    ),
    Misconception(
        "walking down the columns of the tile",
        slip(_offsets, "by columns"),
        "The offsets are right, and their order is asked row by row. Which axis runs fastest?",
    ),
    Misconception(
        "giving a list for each row of the tile",
        slip(_offsets, "table"),
        "One flat list is asked for. How do you join the rows?",
    ),
    Misconception(
        "giving the whole tile, as a table",
        slip(_offsets, "tensor"),
        "One flat list is asked for, without the offsets that are not in C. What does "
        "`offsets[in_bounds]` give?",
    ),
)

_OFFSETS_SLIPS = frozenset().union(*(m.wrong.slips for m in _OFFSETS_MISTAKES))

_OFFSETS = TEXTS.exercise(
    "program_offsets",
    minutes=6,
    difficulty=1,
    solution=program_offsets,
    misconceptions=_OFFSETS_MISTAKES,
    combine=together(
        _OFFSETS_MISTAKES,
        {"thread", "starts"},
        {"thread", "swap"},
        {"thread", "one row"},
        {"thread", "table"},
        *({"tensor", other} for other in _OFFSETS_SLIPS - {"tensor"}),
        {"by tile", "by rows"},
        {"table", "by columns"},
        {"end", "none", "rows alone", "columns alone"},
        {"none", "one more"},
        {"end", "one more"},
        {"to 0", "as -1", "none"},
    ),
    cases=(
        Case("the upper right tile of 4 × 4", lambda: (0, 1, 4, 4, 2, 2)),
        Case("a tile that reaches past the right side", lambda: (0, 1, 2, 3, 2, 2)),
        Case("a tile that reaches past the bottom", lambda: (1, 0, 3, 4, 2, 2)),
        Case("a tile that reaches past both", lambda: (1, 2, 7, 10, 4, 4)),
        Case("tall tiles", lambda: (1, 1, 8, 6, 4, 2)),
        Case("one row of many columns", lambda: (0, 2, 1, 20, 4, 8)),
    ),
)


# -- tile_product --

_SIDE = 16  # of all tiles: the smallest that a dot takes on a GPU


def tile_product() -> object:
    """The kernel of C = A @ B; a program has one tile of C."""

    @triton.jit
    def kernel(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
        rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
        columns = tl.program_id(1) * BN + tl.arange(0, BN)  # [BN]
        acc = tl.zeros([BM, BN], tl.float32)
        for step in tl.range(tl.cdiv(K, BD)):
            depth = step * BD + tl.arange(0, BD)  # [BD]
            a_mask = (rows < M)[:, None] & (depth < K)  # [BM, BD]
            a_tile = tl.load(A + rows[:, None] * K + depth, mask=a_mask, other=0.0)
            b_mask = (depth < K)[:, None] & (columns < N)  # [BD, BN]
            b_tile = tl.load(B + depth[:, None] * N + columns, mask=b_mask, other=0.0)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")  # [BM, BN]
        c_mask = (rows < M)[:, None] & (columns < N)
        tl.store(C + rows[:, None] * N + columns, acc, mask=c_mask)

    return kernel


_GIVEN_PRODUCT = """
@triton.jit
def kernel(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)  # [BN]
    acc = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(tl.cdiv(K, BD)):
        depth = step * BD + tl.arange(0, BD)  # [BD]
        a_mask = (rows < M)[:, None] & (depth < K)  # [BM, BD]
        a_tile = tl.load(A + rows[:, None] * K + depth, mask=a_mask, other=0.0)
        b_mask = ...  # 1: [BD, BN], which elements of B may be loaded
        b_tile = ...  # 2: [BD, BN], 0 where the mask is off
        acc = ...  # 3: [BM, BN], one more product in the sum
    c_mask = (rows < M)[:, None] & (columns < N)
    tl.store(C + rows[:, None] * N + columns, acc, mask=c_mask)
"""


def _run_product(solution: Callable, M: int, N: int, K: int) -> Tensor:
    """Launch the kernel on two matrices with NaN behind each, and see where it loads.

    Raises:
        LoadsElsewhere: if C is right, and a load touched somebody else's memory.
        UnsetNumbers: if C depends on masked places of a load without `other`.
    """
    kernel = _launchable(solution, _GIVEN_PRODUCT)
    shapes = {"A": (M, K), "B": (K, N)}
    a, b = (_random(*shape, seed=i) for i, shape in enumerate(shapes.values()))
    guard = torch.full((4 * _SIDE * max(M, N, K, _SIDE),), torch.nan)
    memory = [roomy(torch.cat([x.flatten(), guard]), torch.nan) for x in (a, b)]
    c = roomy(torch.full((M, N), -77.0), -77.0)
    grid = (-(-M // _SIDE), -(-N // _SIDE))
    sizes = {"BM": _SIDE, "BN": _SIDE, "BD": _SIDE}
    with _plainly():
        kernel[grid](*memory, c, M, N, K, **sizes)
    arrays = {"A": a.numpy(), "B": b.numpy(), "C": np.zeros((M, N))}
    outside = _recorded(kernel, grid, arrays, {"M": M, "N": N, "K": K, **sizes})
    c = c.cpu()
    if not outside:
        _refuse_unset(c, arrays["C"])
    elif torch.allclose(c, a @ b, rtol=1e-4, atol=1e-4):
        raise LoadsElsewhere(f"C is right, but {outside} loads lie outside of A or B")
    return c


@triton.jit
def _wrong_product(
    A, B, C, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STRIDE_A: tl.constexpr,
    STRIDE_B: tl.constexpr, MASK: tl.constexpr, OTHER: tl.constexpr, DEPTH: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    stride_a = K
    if STRIDE_A == "a by tile":
        stride_a = BD
    elif STRIDE_A == "a by rows":
        stride_a = M
    elif STRIDE_A == "a by columns":
        stride_a = N
    stride_b = N
    if STRIDE_B == "b by tile":
        stride_b = BN
    elif STRIDE_B == "b by depth":
        stride_b = K
    for step in tl.range(tl.cdiv(K, BD)):
        depth = step * BD + tl.arange(0, BD)
        place = depth
        if DEPTH != "right":
            place = tl.arange(0, BD)
        if DEPTH == "first, masks and all":
            depth = place
        a_offsets = rows[:, None] * stride_a + place
        b_offsets = place[:, None] * stride_b + columns
        if STRIDE_A == "a from depth":
            a_offsets = depth[:, None] * K + depth
        elif STRIDE_A == "a diagonal":
            a_offsets = tl.zeros([BM, BD], tl.int32) + (rows * K + depth)
        if STRIDE_B == "b from rows":
            b_offsets = rows[:, None] * N + columns
        elif STRIDE_B == "b turned":
            b_offsets = columns[:, None] * N + depth
        elif STRIDE_B == "b by columns":
            b_offsets = place[:, None] + columns * K
        elif STRIDE_B == "b by columns, turned":
            b_offsets = columns[:, None] * K + place
        elif STRIDE_B == "b diagonal":
            b_offsets = tl.zeros([BD, BN], tl.int32) + (depth * N + columns)
        a_mask = (rows < M)[:, None] & (depth < K)
        b_mask = (depth < K)[:, None] & (columns < N)
        if MASK == "none":
            a_mask, b_mask = a_offsets >= 0, b_offsets >= 0
        elif MASK == "no depth":
            a_mask = (rows < M)[:, None] & (depth >= 0)
            b_mask = (depth >= 0)[:, None] & (columns < N)
        elif MASK == "a without depth":
            a_mask = (rows < M)[:, None] & (depth >= 0)
        elif MASK == "depth alone":
            a_mask = (rows >= 0)[:, None] & (depth < K)
            b_mask = (depth < K)[:, None] & (columns >= 0)
        if MASK == "a line" or MASK == "lines":
            a_mask = (rows < M) & (depth < K)
        if MASK == "b line" or MASK == "lines":
            b_mask = (depth < K) & (columns < N)
        if MASK == "b mask turned":
            b_mask = (columns < N)[:, None] & (depth < K)
        elif MASK == "b column":
            b_mask = (depth < K)[:, None] & (columns < N)[:, None]
        elif MASK == "a's mask":
            b_mask = a_mask
        if OTHER == "none given":
            a_tile = tl.load(A + a_offsets, mask=a_mask)
            b_tile = tl.load(B + b_offsets, mask=b_mask)
        else:
            a_tile = tl.load(A + a_offsets, mask=a_mask, other=0.0)
            b_tile = tl.load(B + b_offsets, mask=b_mask, other=0.0)
        if SUM == "last step":
            acc = tl.dot(a_tile, b_tile, input_precision="ieee")
        elif SUM == "b times a":
            acc = tl.dot(b_tile, a_tile, acc, input_precision="ieee")
        elif SUM == "elementwise":
            acc += a_tile * b_tile
        elif SUM == "twice":
            acc += tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        elif SUM != "nothing":
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    c_mask = (rows < M)[:, None] & (columns < N)
    tl.store(C + rows[:, None] * N + columns, acc, mask=c_mask)


_PRODUCT_SLIPS = {
    "STRIDE_A": {"a by tile", "a by rows", "a by columns", "a from depth", "a diagonal"},
    "STRIDE_B": {
        "b by tile", "b by depth", "b from rows", "b turned", "b diagonal", "b by columns",
        "b by columns, turned",
    },
    "MASK": {
        "none", "no depth", "a without depth", "depth alone", "a line", "b line", "lines",
        "b mask turned", "b column", "a's mask",
    },
    "OTHER": {"none given"},
    "DEPTH": {"first", "first, masks and all"},
    "SUM": {"last step", "twice", "nothing", "elementwise", "b times a"},
}  # fmt: skip


def _product(slips: Slips) -> object:
    """`tile_product` with slips."""
    return _Mistaken(_wrong_product, _PRODUCT_SLIPS, slips)


_PRODUCT_MISTAKES = (
    Misconception(
        "keeping the last step only",
        slip(_product, "last step"),
        "Each step's product takes the place of the one before. Which argument of `tl.dot` is the "
        "sum so far?",
    ),
    Misconception(
        "a product that is never added",
        slip(_product, "nothing"),
        "All of C is 0. What happens to `acc` between its first line and the store?",
    ),
    Misconception(
        "adding the sum so far twice",
        slip(_product, "twice"),
        "`tl.dot(a, b, acc)` is already `acc + a @ b`. Where does your line add `acc` once more?",
    ),
    Misconception(
        "multiplying the tiles element by element",
        slip(_product, "elementwise"),
        "`a_tile * b_tile` pairs numbers that lie at the same place. Which word multiplies a row "
        "by a column, and adds up?",
    ),
    Misconception(
        "loading the same step of K again and again",
        slip(_product, "first"),
        "Step 1 has to begin where step 0 ended. Which name of the loop says where?",
    ),
    Misconception(
        "loading the same step of K again and again",
        slip(_product, "first, masks and all"),
        "Step 1 has to begin where step 0 ended. Which name of the loop says where?",
    ),
    Misconception(
        "taking the rows of A from `depth`",
        slip(_product, "a from depth"),
        "Along `depth` lie the columns of A. Which name says which rows this program owns?",
    ),
    Misconception(
        "taking the rows of B from `rows`",
        slip(_product, "b from rows"),
        "`rows` are rows of A and C. Which name says which rows of B meet the columns of A?",
    ),
    Misconception(
        "offsets of A along a line, where a table is needed",
        slip(_product, "a diagonal"),
        "`rows * K + depth` adds the first to the first, the second to the second. What does "
        "`[:, None]` behind `rows` change?",
    ),
    Misconception(
        "stepping to A's next row by the width of the tile",
        slip(_product, "a by tile"),
        "The tile is a window into A. How many numbers lie between two rows of A `[M, K]`?",
    ),
    Misconception(
        "stepping to A's next row by its number of rows",
        slip(_product, "a by rows"),
        "A square A hides it. How many numbers does a row of A `[M, K]` hold?",
    ),
    Misconception(
        "stepping to A's next row by the length of a row of C",
        slip(_product, "a by columns"),
        "A square A hides it. How many numbers does a row of A `[M, K]` hold?",
    ),
    Misconception(
        "stepping to B's next row by the width of the tile",
        slip(_product, "b by tile"),
        "The tile is a window into B. How many numbers lie between two rows of B `[K, N]`?",
    ),
    Misconception(
        "stepping to B's next row by its number of rows",
        slip(_product, "b by depth"),
        "A square B hides it. How many numbers does a row of B `[K, N]` hold?",
    ),
    Misconception(
        "loading B's tile on its side",
        slip(_product, "b turned"),
        "In `[BD, BN]`, which of `depth` and `columns` runs down the tile? That one gets "
        "`[:, None]`.",
    ),
    *(
        Misconception(
            "reading B as if its columns lay one after the other",
            slip(_product, lies),
            "B `[K, N]` lies in memory row after row. Which of `depth` and `columns` counts its "
            "rows? That one is multiplied, and gets `[:, None]`.",
        )
        for lies in ("b by columns", "b by columns, turned")
    ),
    Misconception(
        "offsets of B along a line, where a table is needed",
        slip(_product, "b diagonal"),
        "`depth * N + columns` adds the first to the first, the second to the second. What does "
        "`[:, None]` behind `depth` change?",
    ),
    Misconception(
        "multiplying in the wrong order",
        slip(_product, "b times a"),
        "C is A @ B. Square tiles hide it. Which tile comes first?",
    ),
    *(
        Misconception(
            "a mask of B that does not lie as its tile does",
            slip(_product, mask),
            "In `[BD, BN]`, `depth` runs down and `columns` across. Which of the two conditions "
            "gets `[:, None]`?",
        )
        for mask in ("b mask turned", "b column")
    ),
    Misconception(
        "A's mask for B",
        slip(_product, "a's mask"),
        "`a_mask` asks for rows of A. Which rows and which columns of B exist?",
    ),
    *(
        Misconception(
            "a mask along a line, where a table is needed",
            slip(_product, lines),
            "Both conditions are `[16]`, so `&` pairs the first with the first, the second with "
            "the second. What does `[:, None]` behind one of them change?",
        )
        for lines in ("a line", "b line", "lines")
    ),
    Misconception(
        "masked loads without `other`",
        slip(_product, "none given"),
        "Triton promises nothing about such a masked place. It may hold 0 today and NaN tomorrow. "
        "Which number adds nothing to a sum of products?",
    ),
    Misconception(
        "masks that keep nothing out",
        slip(_product, "none"),
        "Has each load a mask, and does `&` join its two conditions? `|` lets an element in where "
        "one of them holds. What lies past column K of A and past row K of B?",
    ),
    Misconception(
        "no mask along the depth",
        slip(_product, "no depth"),
        "The rows and columns are masked. What does the last step multiply where `depth` is K or "
        "more? Look at both tiles.",
    ),
    Misconception(
        "no mask along A's depth",
        slip(_product, "a without depth"),
        "The zeros of `b_tile` hide most of it. But from where does the last row of A load where "
        "`depth` is K or more, and what is 0 times NaN?",
    ),
    Misconception(
        "a mask along the depth alone",
        slip(_product, "depth alone"),
        "C is right, since rows past the end are never stored. But which addresses did the last "
        "tiles load from?",
    ),
)

_PRODUCT = TEXTS.exercise(
    "tile_product",
    minutes=10,
    difficulty=2,
    solution=tile_product,
    run=_run_product,
    tolerance=1e-4,
    misconceptions=_PRODUCT_MISTAKES,
    combine=together(_PRODUCT_MISTAKES, *_PRODUCT_SLIPS.values()),
    cases=(
        _triton_case("one tile and one step", 16, 16, 16),
        _triton_case("one tile and two steps", 16, 16, 32),
        _triton_case("two tile columns", 16, 32, 16),
        _triton_case("ragged rows and columns", 20, 25, 16),
        _triton_case("a ragged depth", 16, 16, 20),
        _triton_case("C of 20 × 25, depth 37", 20, 25, 37),
    ),
)


# -- row_sums --

_BR, _BN = 4, 16


def row_sums() -> object:
    """The TileLang kernel that sums each row of X [R, N] to Y [R]."""
    BR, BN = 4, 16
    R, N = T.dynamic("R"), T.dynamic("N")

    @T.prim_func
    def kernel(X: T.Tensor([R, N], "float32"), Y: T.Tensor([R], "float32")):
        with T.Kernel(T.ceildiv(R, BR), threads=128) as block:
            x_tile = T.alloc_fragment([BR, BN], "float32")
            acc = T.alloc_fragment([BR], "float32")
            start = block * BR
            T.clear(acc)
            for step in T.serial(T.ceildiv(N, BN)):
                column = step * BN
                T.copy(X[start : start + BR, column : column + BN], x_tile)  # zeros past R and N
                T.reduce_sum(x_tile, acc, dim=1, clear=False)
            T.copy(acc, Y[start : start + BR])

    return kernel


_COMPILED: dict[tuple[str, str], Callable] = {}


def _compiled(kernel: object, device: str) -> Callable:
    """The TileLang kernel, compiled once for all cases: two that read the same are the same."""
    key = (kernel.script(), device)
    if key not in _COMPILED:
        kernel = _unset_is_nan(kernel)
        from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

        _COMPILED[key] = (
            compile_for_cpu(kernel) if device == "cpu" else tilelang.compile(kernel, target="cuda")
        )
    return _COMPILED[key]


def _unset_is_nan(kernel: object) -> object:
    """The same kernel, with NaN in each tile until something is written there."""
    from tvm import tirx

    def filled(block: object) -> object:
        fills = []
        for tile in block.alloc_buffers:
            places = [tirx.Var(f"i{axis}", "int32") for axis in range(len(tile.shape))]
            fill = tirx.BufferStore(tile, tirx.const(math.nan, tile.dtype), places)
            for place, side in zip(places, tile.shape, strict=True):
                fill = tirx.For(place, 0, side, tirx.ForKind.PARALLEL, fill)
            fills.append(fill)
        return tirx.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint,
            tirx.SeqStmt([*fills, block.body]) if fills else block.body,
            block.init, block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    body = tirx.stmt_functor.ir_transform(kernel.body, None, filled, ["tirx.SBlock"])
    return kernel.with_body(body)


def _shared_places(kernel: object) -> list[str]:
    """The tiles and tensors that several turns of a parallel loop add to at one place."""
    from tvm import tirx

    found, turns = [], []

    def holds(node: object, is_meant: Callable[[object], bool]) -> bool:
        seen = []
        tirx.stmt_functor.post_order_visit(node, lambda inner: seen.append(is_meant(inner)))
        return any(seen)

    def enter(node: object) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            turns.append(node.loop_var)
        elif isinstance(node, tirx.BufferStore):
            adds = holds(
                node.value,
                lambda x: isinstance(x, tirx.BufferLoad) and x.buffer.same_as(node.buffer),
            )
            for turn in turns:
                names_it = any(
                    holds(index, lambda x, turn=turn: x.same_as(turn)) for index in node.indices
                )
                if adds and not names_it:
                    found.append(node.buffer.name)

    def leave(node: object) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            turns.pop()

    tirx.stmt_functor.ir_transform(kernel.body, enter, leave, ["tirx.For", "tirx.BufferStore"])
    return found


def _run_row_sums(solution: Callable, R: int, N: int) -> Tensor:
    """Compile the kernel and launch it; behind `X` lie 1000s.

    Raises:
        InputChanged: if it stored to `X`.
        SharedPlace: if turns of a parallel loop add to one place.
    """
    with _plainly():
        kernel = _returned(solution)
    if hasattr(kernel, "run"):
        raise TypeError("this is a Triton kernel, and a TileLang kernel is asked for: @T.prim_func")
    if not hasattr(kernel, "script"):
        raise TypeError("the kernel is not decorated with @T.prim_func")
    if not re.search(r"\b[XY]\[", kernel.script()):
        raise NotImplementedError("the kernel touches neither X nor Y yet")
    if shared := _shared_places(kernel):
        raise SharedPlace(f"turns of T.Parallel add to the same places of {shared[0]}")
    device, given = environment.detect().device, _random(R, N, seed=R * N)
    x, y = roomy(given, 1000.0), roomy(torch.full((R,), -77.0), -77.0)
    _compiled(kernel, device)(x, y)
    if not torch.equal(x.cpu(), given):
        raise InputChanged("the kernel stored to X")
    return y.cpu()


def _sums(mistake: str) -> Callable:
    """A kernel with one mistake."""

    def wrong() -> object:
        BR, BN = _BR, _BN
        R, N = T.dynamic("R"), T.dynamic("N")
        clear = mistake == "clear"
        needed = BN if mistake == "full tiles" else 1  # columns that a tile must have to count
        stride = 1 if mistake == "ids count rows" else BR
        across = {"steps count columns": 1, "steps of BR": BR}.get(mistake, BN)

        @T.prim_func
        def kernel(X: T.Tensor([R, N], "float32"), Y: T.Tensor([R], "float32")):
            with T.Kernel(T.ceildiv(R, BR), threads=128) as block:
                x_tile = T.alloc_fragment([BR, BN], "float32")
                acc = T.alloc_fragment([BR], "float32")
                start = block * stride
                steps = 1 if mistake == "first tile" else T.ceildiv(N, BN)
                if mistake != "never cleared":
                    T.clear(acc)
                for step in T.serial(steps):
                    column = 0 if mistake == "same columns" else step * across
                    if mistake == "backwards":
                        T.copy(x_tile, X[start : start + BR, column : column + BN])
                    else:
                        T.copy(X[start : start + BR, column : column + BN], x_tile)
                    if mistake == "race":
                        for i, j in T.Parallel(BR, BN):
                            acc[i] += x_tile[i, j]
                    elif column + needed <= N:
                        T.reduce_sum(x_tile, acc, dim=1, clear=clear)
                if mistake != "no store":
                    T.copy(acc, Y[start : start + BR])

        return kernel

    return wrong


def _tilelang_case(R: int, N: int, what: str) -> Case:
    here = environment.detect()
    return Case(what, lambda: (R, N), lambda: here.why_not("tilelang", here.device))


_ROW_SUMS = TEXTS.exercise(
    "row_sums",
    minutes=12,
    difficulty=3,
    solution=row_sums,
    run=_run_row_sums,
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "adding to a sum that was never set to 0",
            _sums("never cleared"),
            "A fragment holds anything until you write to it, so this checker puts NaN there. "
            "Which line fills `acc` with zeros before the loop?",
        ),
        Misconception(
            "clearing the sum so far at each step",
            _sums("clear"),
            "Only the last tile is left. How often does `T.clear` run? And `T.reduce_sum` clears "
            "`acc`, too, unless told otherwise. Which option of the statement makes it add?",
        ),
        Misconception(
            "turns of `T.Parallel` that share `acc[i]`",
            _sums("race"),
            "On a CPU the numbers come out right, because it takes one turn after the other. On a "
            "GPU, threads take turns at the same time, and additions get lost. Which word reduces?",
        ),
        Misconception(
            "copying the wrong way round",
            _sums("backwards"),
            "This kernel changes X. `T.copy` takes the source first. Which of the two is it?",
        ),
        Misconception(
            "summing the first tile only",
            _sums("first tile"),
            "A row of 37 has three tiles of 16. Which program walks over the other two?",
        ),
        Misconception(
            "leaving the ragged tail out",
            _sums("full tiles"),
            "N // BN counts full tiles. In which tile is the last number of a row of 5?",
        ),
        Misconception(
            "programs that begin one row apart",
            _sums("ids count rows"),
            "Program 1 begins where program 0 ends. How many rows does a program have?",
        ),
        Misconception(
            "loading the same columns at every step",
            _sums("same columns"),
            "Step 1 begins where step 0 ends. Which name of the loop says where?",
        ),
        Misconception(
            "a sum that is never stored",
            _sums("no store"),
            "`acc` ends with its program, so Y still holds what the checker put there. Which line "
            "moves `acc` to Y?",
        ),
        Misconception(
            "steps that begin `BR` columns apart",
            _sums("steps of BR"),
            "`BR` counts the rows of a tile. How many columns does a tile have?",
        ),
        Misconception(
            "steps that begin one column apart",
            _sums("steps count columns"),
            "Step 1 begins where step 0 ends. How many columns does a tile have?",
        ),
    ),
    cases=(
        _tilelang_case(4, 16, "one full tile"),
        _tilelang_case(1, 5, "one row of 5"),
        _tilelang_case(4, 32, "four rows of 32"),
        _tilelang_case(8, 16, "eight rows of 16"),
        _tilelang_case(9, 37, "nine rows of 37"),
    ),
)

EXERCISES = (_PRODUCT, _ROW_SUMS, _VARIANCE, _OFFSETS)


# -- two mistakes at once --


def _tile_of_c_without_ids_or_mask(
    pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> list[int]:
    return [(pid_m + i) * N + pid_n + j for i in range(BM) for j in range(BN)]


def _up_to_the_last_offset(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
    tile = [(pid_m * BM + i) * BN + pid_n * BN + j for i in range(BM) for j in range(BN)]
    return [offset for offset in tile if offset < M * N]


DOUBLES = (
    Double(
        "program_offsets",
        _tile_of_c_without_ids_or_mask,
        ("forgetting that ids count tiles", "a missing mask"),
    ),
    Double(
        "program_offsets",
        _up_to_the_last_offset,
        (
            "stepping to the next row by the width of the tile",
            "masking only past the end of the memory",
        ),
    ),
    Double(
        "row_variance",
        lambda: _variance(frozenset({"mean by BN", "padding"})),
        ("letting the padding into the variance", "taking the mean over the whole tile"),
    ),
    Double(
        "tile_product",
        lambda: _product(frozenset({"last step", "no depth"})),
        ("keeping the last step only", "no mask along the depth"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(globals(), side_of_tile={"choices": (64, 128, 256, 512)})
