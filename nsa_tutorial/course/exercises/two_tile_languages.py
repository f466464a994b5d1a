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
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


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
    outside = 0
    try:
        for program in recorder.programs(grid):
            outside += recorder.run(kernel.fn, program, arrays | sizes).outside()
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
    with np.errstate(all="ignore"), _plainly():  # the verdict says what went wrong
        kernel[R,](roomy(memory, 100.0), variance, N, BN=BN)
    arrays = {"X": memory.numpy(), "Variance": np.zeros(R)}
    _recorded(kernel, (R,), arrays, {"N": N, "BN": BN})
    _refuse_unset(variance.cpu(), arrays["Variance"])
    return variance.cpu()


_HIDDEN = "tl.where(exists, x_tile - mean, 0.0)"

_VARIANCE = TEXTS.exercise(
    "row_variance", minutes=7, difficulty=2, solution=row_variance, run=_run_variance,
    tolerance=1e-4,
    misconceptions=diffs(row_variance, [
        (", other=0.0", ', other=float("-inf")', "filling masked places as for a maximum",
         "−∞ changes no maximum. Which number changes no sum?"),
        (_HIDDEN, "x_tile - mean", "letting the padding into the variance",
         "The padding is 0 when it is loaded. What is it once the mean is taken off, and what does "
         "its square do in the sum?"),
        (_HIDDEN, "tl.where(x_tile == 0, 0.0, x_tile - mean)",
         "taking a 0 of the data for a masked place",
         "A number of the row may be 0, too. Which name says that a place exists?"),
        (_HIDDEN, "tl.where(exists, 0.0, x_tile - mean)", "a `where` with its branches swapped",
         "`tl.where` takes its second argument where the condition holds. What becomes of the "
         "numbers that exist?"),
        ("row * N", "row * BN", "stepping to the next row by the width of the tile",
         "The tile may be wider than a row. How many numbers of X lie before row 1?"),
        ("row * N", "row", "starting a row at every element",
         "Row 1 starts where row 0 ends. How many numbers does a row hold?"),
        ({", mask=exists, other=0.0": "", _HIDDEN: "x_tile - mean"}, "a missing mask on the load",
         "Past the end of a row, the next row begins. Which places of the tile hold a number of "
         "this row?"),
        (", other=0.0", "", "a masked load without `other`",
         "Triton promises nothing about such a masked place. It may hold 0 today and NaN tomorrow. "
         "Which number should stand there?"),
        ("(x_tile, axis=0) / N", "(x_tile, axis=0) / BN", "taking the mean over the whole tile",
         "Zeros change no sum, but how many numbers were added up?"),
        ("difference, axis=0) / N", "difference, axis=0) / BN",
         "dividing the squares by the length of the tile",
         "How many of the squares belong to numbers of the row?"),
        ("difference, axis=0) / N", "difference, axis=0) / (N - 1)", "dividing by N − 1",
         "That estimates the variance of what the row was drawn from. What is the mean of its own "
         "squares?"),
        ("difference, axis=0) / N", "difference, axis=0)",
         "the sum of the squares in place of their mean",
         "A longer row should not have a larger variance. What is still to be divided?"),
        ({"row, tl.sum(": "row, tl.sqrt(tl.sum(", "\n\n    return": ")\n\n    return"},
         "a standard deviation",
         "That is a step further than asked. What do you get before the root?"),
    ]),
    cases=(
        _triton_case("two rows of 4", 2, 4),
        _triton_case("a row of 4 that begins with a true 0", 1, 4, 1),
        _triton_case("one row of 3", 1, 3),
        _triton_case("two rows of 3", 2, 3),
        _triton_case("three rows of 13", 3, 13),
    ),
)  # fmt: skip


# -- program_offsets --


def program_offsets(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
    """The offsets in C [M, N] that program (pid_m, pid_n) stores, row by row."""
    rows = pid_m * BM + torch.arange(BM)  # [BM]
    columns = pid_n * BN + torch.arange(BN)  # [BN]
    offsets = rows[:, None] * N + columns  # [BM, BN]
    in_bounds = (rows < M)[:, None] & (columns < N)  # [BM, BN]
    return offsets[in_bounds].tolist()


_IN_BOUNDS = "(rows < M)[:, None] & (columns < N)"
_STORED = "offsets[in_bounds].tolist()"

_OFFSETS = TEXTS.exercise(
    "program_offsets", minutes=6, difficulty=1, solution=program_offsets,
    misconceptions=diffs(program_offsets, [
        (_STORED, "[pid_m * N + pid_n]", "taking a program for a thread",
         "A program id names a tile, not an element. How many elements does one program answer "
         "for?"),
        ({" * BM": "", " * BN": ""}, "forgetting that ids count tiles",
         "Your program 1 begins one element after program 0. What lies between the two?"),
        ({"rows = pid_m": "rows = pid_n", "columns = pid_n": "columns = pid_m"},
         "walking along the wrong axis",
         "A square grid hides it. Which of the two ids counts tiles of rows, and which counts "
         "tiles of columns?"),
        ('row by row."""', 'row by row."""\n    BM, BN = BN, BM',
         "swapping the two sides of the tile",
         "Square tiles hide it. Which of `BM` and `BN` counts rows?"),
        ("* N + columns", "* BN + columns", "stepping to the next row by the width of the tile",
         "The tile is a window into C. How many elements of C do you pass from one of its rows to "
         "the next?"),
        ("* N + columns", "* M + columns", "stepping to the next row by the number of rows",
         "A square C hides it. How many elements does a row of C `[M, N]` hold?"),
        (_IN_BOUNDS, "offsets < M * N", "masking only past the end of the memory",
         "An offset below M * N is in C, but past the last column the next row begins. Which "
         "program stores that element?"),
        (_IN_BOUNDS, "offsets >= 0", "a missing mask",
         "The last tiles reach past the end of C. On a GPU such a store changes somebody else's "
         "memory, without an error. Which rows and which columns exist?"),
        (_IN_BOUNDS, "(rows < M)[:, None] & (columns >= 0)", "a mask on the rows alone",
         "A tile at the right reaches past the last column. Where in memory do its elements lie "
         "then?"),
        (_IN_BOUNDS, "(rows >= 0)[:, None] & (columns < N)", "a mask on the columns alone",
         "A tile at the bottom reaches past the last row. What lies in memory behind C?"),
        (_STORED, "torch.where(in_bounds, offsets, 0).flatten().tolist()",
         "sending masked elements to offset 0",
         "That is harmless for a load, but this is a store. Whose element lies at offset 0?"),
        (_STORED, "torch.where(in_bounds, offsets, -1).flatten().tolist()",
         "writing −1 for masked elements",
         "The mask is right. Which of these offsets does the program store?"),
        (_IN_BOUNDS, "(rows <= M)[:, None] & (columns <= N)",
         "letting one row and one column too many in",
         "C has M rows and N columns, both counted from 0. Which number has the last column?"),
        ("torch.arange(BM)", "torch.arange(1)", "covering only the first row of the tile",
         "A tile has two sides, so its offsets are a table. How many rows has it?"),
        (_STORED, "offsets.T[in_bounds.T].tolist()", "walking down the columns of the tile",
         "The offsets are right, and their order is asked row by row. Which axis runs fastest?"),
        (_STORED, "[row[kept].tolist() for row, kept in zip(offsets, in_bounds) if kept.any()]",
         "giving a list for each row of the tile",
         "One flat list is asked for. How do you join the rows?"),
        (_STORED, "offsets", "giving the whole tile, as a table",
         "One flat list is asked for, without the offsets that are not in C. What does "
         "`offsets[in_bounds]` give?"),
    ]),
    cases=(
        Case("the upper right tile of 4 × 4", lambda: (0, 1, 4, 4, 2, 2)),
        Case("a tile that reaches past the right side", lambda: (0, 1, 2, 3, 2, 2)),
        Case("a tile that reaches past the bottom", lambda: (1, 0, 3, 4, 2, 2)),
        Case("a tile that reaches past both", lambda: (1, 2, 7, 10, 4, 4)),
        Case("tall tiles", lambda: (1, 1, 8, 6, 4, 2)),
        Case("one row of many columns", lambda: (0, 2, 1, 20, 4, 8)),
    ),
)  # fmt: skip


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


_A_MASK, _B_MASK = "(rows < M)[:, None] & (depth < K)", "(depth < K)[:, None] & (columns < N)"
_A_ROWS, _B_OFFSETS = "A + rows[:, None] * K", "B + depth[:, None] * N + columns"
_DOT = "acc = tl.dot(a_tile, b_tile, acc"

_PRODUCT = TEXTS.exercise(
    "tile_product", minutes=10, difficulty=2, solution=tile_product, run=_run_product,
    tolerance=1e-4,
    misconceptions=diffs(tile_product, [
        (_DOT, "acc = tl.dot(a_tile, b_tile", "keeping the last step only",
         "Each step's product takes the place of the one before. Which argument of `tl.dot` is the "
         "sum so far?"),
        (f'{_DOT}, input_precision="ieee")', "acc = acc", "a product that is never added",
         "All of C is 0. What happens to `acc` between its first line and the store?"),
        (_DOT, "acc += tl.dot(a_tile, b_tile, acc", "adding the sum so far twice",
         "`tl.dot(a, b, acc)` is already `acc + a @ b`. Where does your line add `acc` once more?"),
        (f'{_DOT}, input_precision="ieee")', "acc += a_tile * b_tile",
         "multiplying the tiles element by element",
         "`a_tile * b_tile` pairs numbers that lie at the same place. Which word multiplies a row "
         "by a column, and adds up?"),
        ({"+ depth,": "+ tl.arange(0, BD),", "B + depth": "B + tl.arange(0, BD)"},
         "loading the same step of K again and again",
         "Step 1 has to begin where step 0 ended. Which name of the loop says where?"),
        ("step * BD + ", "", "loading the same step of K again and again"),
        (_A_ROWS, "A + depth[:, None] * K", "taking the rows of A from `depth`",
         "Along `depth` lie the columns of A. Which name says which rows this program owns?"),
        (_B_OFFSETS, "B + rows[:, None] * N + columns", "taking the rows of B from `rows`",
         "`rows` are rows of A and C. Which name says which rows of B meet the columns of A?"),
        (_A_ROWS, "A + rows * K", "offsets of A along a line, where a table is needed",
         "`rows * K + depth` adds the first to the first, the second to the second. What does "
         "`[:, None]` behind `rows` change?"),
        ("* K", "* BD", "stepping to A's next row by the width of the tile",
         "The tile is a window into A. How many numbers lie between two rows of A `[M, K]`?"),
        ("* K", "* M", "stepping to A's next row by its number of rows",
         "A square A hides it. How many numbers does a row of A `[M, K]` hold?"),
        ("* K", "* N", "stepping to A's next row by the length of a row of C",
         "A square A hides it. How many numbers does a row of A `[M, K]` hold?"),
        (_B_OFFSETS, "B + depth[:, None] * BN + columns",
         "stepping to B's next row by the width of the tile",
         "The tile is a window into B. How many numbers lie between two rows of B `[K, N]`?"),
        (_B_OFFSETS, "B + depth[:, None] * K + columns",
         "stepping to B's next row by its number of rows",
         "A square B hides it. How many numbers does a row of B `[K, N]` hold?"),
        (_B_OFFSETS, "B + columns[:, None] * N + depth", "loading B's tile on its side",
         "In `[BD, BN]`, which of `depth` and `columns` runs down the tile? That one gets "
         "`[:, None]`."),
        (_B_OFFSETS, "B + depth[:, None] + columns * K",
         "reading B as if its columns lay one after the other",
         "B `[K, N]` lies in memory row after row. Which of `depth` and `columns` counts its rows? "
         "That one is multiplied, and gets `[:, None]`."),
        (_B_OFFSETS, "B + columns[:, None] * K + depth",
         "reading B as if its columns lay one after the other"),
        (_B_OFFSETS, "B + depth * N + columns",
         "offsets of B along a line, where a table is needed",
         "`depth * N + columns` adds the first to the first, the second to the second. What does "
         "`[:, None]` behind `depth` change?"),
        (_DOT, "acc = tl.dot(b_tile, a_tile, acc", "multiplying in the wrong order",
         "C is A @ B. Square tiles hide it. Which tile comes first?"),
        (_B_MASK, "(columns < N)[:, None] & (depth < K)",
         "a mask of B that does not lie as its tile does",
         "In `[BD, BN]`, `depth` runs down and `columns` across. Which of the two conditions gets "
         "`[:, None]`?"),
        (_B_MASK, "(depth < K)[:, None] & (columns < N)[:, None]",
         "a mask of B that does not lie as its tile does"),
        (_B_MASK, "a_mask", "A's mask for B",
         "`a_mask` asks for rows of A. Which rows and which columns of B exist?"),
        (_A_MASK, "(rows < M) & (depth < K)", "a mask along a line, where a table is needed",
         "Both conditions are `[16]`, so `&` pairs the first with the first, the second with the "
         "second. What does `[:, None]` behind one of them change?"),
        (_B_MASK, "(depth < K) & (columns < N)", "a mask along a line, where a table is needed"),
        ({_A_MASK: "(rows < M) & (depth < K)", _B_MASK: "(depth < K) & (columns < N)"},
         "a mask along a line, where a table is needed"),
        ({"mask=a_mask, other=0.0": "mask=a_mask", "mask=b_mask, other=0.0": "mask=b_mask"},
         "masked loads without `other`",
         "Triton promises nothing about such a masked place. It may hold 0 today and NaN tomorrow. "
         "Which number adds nothing to a sum of products?"),
        ({_A_MASK: "(rows >= 0)[:, None] & (depth >= 0)",
          _B_MASK: "(depth >= 0)[:, None] & (columns >= 0)"},
         "masks that keep nothing out",
         "Has each load a mask, and does `&` join its two conditions? `|` lets an element in where "
         "one of them holds. What lies past column K of A and past row K of B?"),
        ({_A_MASK: "(rows < M)[:, None] & (depth >= 0)",
          _B_MASK: "(depth >= 0)[:, None] & (columns < N)"},
         "no mask along the depth",
         "The rows and columns are masked. What does the last step multiply where `depth` is K or "
         "more? Look at both tiles."),
        (_A_MASK, "(rows < M)[:, None] & (depth >= 0)", "no mask along A's depth",
         "The zeros of `b_tile` hide most of it. But from where does the last row of A load where "
         "`depth` is K or more, and what is 0 times NaN?"),
        ({_A_MASK: "(rows >= 0)[:, None] & (depth < K)",
          _B_MASK: "(depth < K)[:, None] & (columns >= 0)"},
         "a mask along the depth alone",
         "C is right, since rows past the end are never stored. But which addresses did the last "
         "tiles load from?"),
    ]),
    cases=(
        _triton_case("one tile and one step", 16, 16, 16),
        _triton_case("one tile and two steps", 16, 16, 32),
        _triton_case("two tile columns", 16, 32, 16),
        _triton_case("ragged rows and columns", 20, 25, 16),
        _triton_case("a ragged depth", 16, 16, 20),
        _triton_case("C of 20 × 25, depth 37", 20, 25, 37),
    ),
)  # fmt: skip


# -- row_sums --


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


def _tilelang_case(R: int, N: int, what: str) -> Case:
    here = environment.detect()
    return Case(what, lambda: (R, N), lambda: here.why_not("tilelang", here.device))


_COPY, _REDUCE = (
    "T.copy(X[start : start + BR, column : column + BN], x_tile)",
    "T.reduce_sum(x_tile, acc, dim=1, clear=False)",
)

_ROW_SUMS = TEXTS.exercise(
    "row_sums", minutes=12, difficulty=3, solution=row_sums, run=_run_row_sums, tolerance=1e-4,
    misconceptions=diffs(row_sums, [
        ("            T.clear(acc)\n", "", "adding to a sum that was never set to 0",
         "A fragment holds anything until you write to it, so this checker puts NaN there. "
         "Which line fills `acc` with zeros before the loop?"),
        (", clear=False", "", "clearing the sum so far at each step",
         "Only the last tile is left. How often does `T.clear` run? And `T.reduce_sum` clears "
         "`acc`, too, unless told otherwise. Which option of the statement makes it add?"),
        (_REDUCE, "for i, j in T.Parallel(BR, BN): acc[i] += x_tile[i, j]",
         "turns of `T.Parallel` that share `acc[i]`",
         "On a CPU the numbers come out right, because it takes one turn after the other. On a "
         "GPU, threads take turns at the same time, and additions get lost. Which word reduces?"),
        (_COPY, "T.copy(x_tile, X[start : start + BR, column : column + BN])",
         "copying the wrong way round",
         "This kernel changes X. `T.copy` takes the source first. Which of the two is it?"),
        ("T.serial(T.ceildiv(N, BN))", "T.serial(1)", "summing the first tile only",
         "A row of 37 has three tiles of 16. Which program walks over the other two?"),
        ("T.ceildiv(N, BN)", "N // BN", "leaving the ragged tail out",
         "N // BN counts full tiles. In which tile is the last number of a row of 5?"),
        ("block * BR", "block", "programs that begin one row apart",
         "Program 1 begins where program 0 ends. How many rows does a program have?"),
        ("step * BN", "0", "loading the same columns at every step",
         "Step 1 begins where step 0 ends. Which name of the loop says where?"),
        ("            T.copy(acc, Y[start : start + BR])\n", "", "a sum that is never stored",
         "`acc` ends with its program, so Y still holds what the checker put there. Which line "
         "moves `acc` to Y?"),
        ("step * BN", "step * BR", "steps that begin `BR` columns apart",
         "`BR` counts the rows of a tile. How many columns does a tile have?"),
        ("step * BN", "step", "steps that begin one column apart",
         "Step 1 begins where step 0 ends. How many columns does a tile have?"),
    ], pairs=False),
    cases=(
        _tilelang_case(4, 16, "one full tile"),
        _tilelang_case(1, 5, "one row of 5"),
        _tilelang_case(4, 32, "four rows of 32"),
        _tilelang_case(8, 16, "eight rows of 16"),
        _tilelang_case(9, 37, "nine rows of 37"),
    ),
)  # fmt: skip

EXERCISES = (_PRODUCT, _ROW_SUMS, _VARIANCE, _OFFSETS)


# -- two mistakes at once --


DOUBLES = (
    Double("program_offsets", names=("forgetting that ids count tiles", "a missing mask")),
    Double(
        "program_offsets",
        names=(
            "stepping to the next row by the width of the tile",
            "masking only past the end of the memory",
        ),
    ),
    Double(
        "row_variance",
        names=("letting the padding into the variance", "taking the mean over the whole tile"),
    ),
    Double("tile_product", names=("keeping the last step only", "no mask along the depth")),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(globals(), side_of_tile={"choices": (64, 128, 256, 512)})
