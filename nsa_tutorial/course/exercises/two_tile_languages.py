"""Exercises of chapter 09: a maximum of each row, built in Triton and in TileLang, and a race to
find; optional, a matrix product, a mask before each reduction, what a program covers."""

import ast
import functools
import inspect
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
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.course.launches import counting
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.unwrapped import unwrapped
from nsa_tutorial.course.watching import watching
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
    """Programs, or turns of a parallel loop, write to one place. A CPU forgives it, a GPU does
    not."""


class TileTooWide(Exception):
    """The result is right, and a program held more at once than it was asked to."""


class RoundedInputs(Exception):
    """The result is right on a CPU, and a GPU would round the inputs of a product to TF32."""


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
    (
        r"retrieve_shape|'Var' object does not support item",
        "a slice of X is no tile. `T.copy` fills a tile from a slice",
    ),
    (r"'accum_dtype' is not defined", 'write the dtype here, in quotes: `"float32"`'),
    (r"(name '\w+' is not defined)", r"\1. If it is a tile, where is it allocated?"),
    (  # allocated before the loop, and set again inside
        r"variable `(\w+)` is used outside its(?s:.*)SSBlockFrame(?s:.*)\b\1 = (?s:.*)\bfor \w+ in",
        r"`T.reduce_max(x_tile, \1, dim=1, clear=False)` writes into `\1`. It returns nothing, so "
        r"write no `\1 =`",
    ),
    (
        r"variable `(\w+)` is used outside its",
        r"`\1` is set inside the loop, so it ends with the loop. Allocate it once, before the loop",
    ),
    (
        r"buffer `(\w+)` using augmented",
        r"`T.reduce_max(x_tile, \1, dim=1, clear=False)` writes into `\1` by itself. It returns "
        r"nothing, so write no `\1 +=`",
    ),
    (
        r"reduce_\w+\(\).* (argument: 'out'|argument 'axis')",
        "`T.reduce_max` takes the tile, then where the results go, then the axis, as `dim`",
    ),
    (
        r"Invalid reduce output shape",
        "`dim` is the axis that vanishes. One number is left for each row of the tile",
    ),
    (r"copy\(\).* argument: 'dst'", "`T.copy` takes a source and a target. It returns nothing"),
    (
        r"to_buffer_region: |for -: 'NoneType' and 'NoneType'|BufferStore",
        "a fragment is memory. `T.fill` puts a number into all of it, and `T.copy` moves it",
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
    """Whether a kernel's or a function's source is `given`, but for comments, spaces and
    decorators: the interpreter's own version of a kernel has none."""

    def read(source: str) -> str:
        tree = ast.parse(textwrap.dedent(source))
        tree.body[0].decorator_list = []
        return ast.dump(tree)

    try:
        return read(inspect.getsource(unwrapped(kernel))) == read(given)
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

_SIDE = 16  # of all tiles


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
    is_right = torch.allclose(c, a @ b, rtol=1e-4, atol=1e-4)
    if outside and is_right:
        raise LoadsElsewhere(f"C is right, but {outside} loads lie outside of A or B")
    if is_right and _rounds_inputs(kernel):
        raise RoundedInputs("C is right on a CPU. On a GPU, this dot takes TF32's ten bits")
    return c


def _rounds_inputs(kernel: object) -> bool:
    """Whether a dot of the kernel lacks `input_precision="ieee"`, which a CPU does not need."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(unwrapped(kernel))))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way
    dots = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.dot"
    ]
    exact = [d for d in dots for k in d.keywords if k.arg == "input_precision"
             and ast.unparse(k.value) in ("'ieee'", '"ieee"')]  # fmt: skip
    return len(exact) < len(dots)


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
        (', input_precision="ieee"', "", "a dot that rounds its inputs to TF32",
         "On a GPU, `tl.dot` shortens fp32 numbers to ten bits, unless told otherwise. The CPU "
         "does not, so only the source shows it. Which option keeps all bits?"),
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


# -- triton_row_max, tilelang_row_max --

_UNSET = 999.0  # in masked places of a load without `other`, of which Triton promises nothing


def _row_max_case(
    name: str, R: int, N: int, *, language: str, BR: int, BN: int, numbers: str = "whole",
    lies: str = "in rows",
) -> Case:  # fmt: skip
    """A matrix and the sides of a tile; around the matrix lie 1000s.

    Args:
        name, R, N, BR, BN: the case, the matrix's shape and the tile's.
        language: in which it is to run.
        numbers: `"whole"` from −9 to 9, `"falling"` or `"rising"` along each row, `"negative"` and
            rising, or `"hidden"`, where the last row is −∞ throughout.
        lies: `"in rows"`, `"in columns"` (a transposed view), or `"apart"`, with a 1000 behind each
            number.
    """

    def arguments() -> tuple:
        g = torch.Generator().manual_seed(100 * R + N)
        x = torch.randint(-9, 10, (R, N), generator=g).float()
        if numbers in ("falling", "rising", "negative"):
            x = (
                torch.arange(N)
                - torch.arange(R)[:, None]
                - float(N if numbers == "negative" else 0)
            )
        if numbers == "falling":
            x = x.flip(1)
        if numbers == "hidden":
            x[-1] = -torch.inf
        if lies == "in columns":
            return roomy(x.T.contiguous(), 1000.0).T, BR, BN
        if lies == "apart":
            return roomy(torch.stack([x, torch.full_like(x, 1000)], -1), 1000.0)[..., 0], BR, BN
        return roomy(x, 1000.0), BR, BN

    here = environment.detect()
    return Case(name, arguments, lambda: here.why_not(language, here.device))


def _row_max_stages(language: str, BR: int, BN: int) -> tuple[Stage, ...]:
    """The stages of a maximum of each row, for tiles of `BR` rows and `BN` columns."""
    case = functools.partial(_row_max_case, language=language, BR=BR, BN=BN)
    return (
        Stage("one tile", (
            case("a matrix of one tile", BR, BN),
            case("a tile of negative numbers", BR, BN, numbers="negative"),
        )),
        Stage("many programs", (case("three tiles below each other", 3 * BR, BN),)),
        Stage("long rows", (
            case("two tiles side by side, falling numbers", BR, 2 * BN, numbers="falling"),
            case("three tiles side by side, rising numbers", BR, 3 * BN, numbers="rising"),
        )),
        Stage("ragged tiles", (
            case("one row too many", BR + 1, BN),
            case("one column too many, negative numbers", BR, BN + 1, numbers="negative"),
            case("one of each, negative numbers", BR + 1, 2 * BN + 1, numbers="negative"),
        )),
        Stage("rows of −∞", (
            case("a last row of −∞", BR, BN, numbers="hidden"),
            case("a ragged row of −∞", BR + 1, BN + 1, numbers="hidden"),
        )),
        Stage("strides", (
            case("a transposed view", BR, BN, lies="in columns"),
            case("every second number of memory", BR + 1, BN + 1, lies="apart"),
        )),
    )  # fmt: skip


def _run_row_max(solution: Callable, x: Tensor, BR: int, BN: int) -> object:
    """Launch, and watch what the programs touch.

    Raises:
        InputChanged: if a kernel stored to `x`.
        LoadsElsewhere, SharedPlace: if the result is right, and a program left its tensors, or got
            in another one's way.
        TileTooWide: if it is right, and a program had more than `BR * BN` numbers at once.
    """
    before = x.clone()
    with _plainly(), watching(unset=_UNSET) as seen:
        y = solution(x, BR, BN)
    if not torch.equal(x, before):
        raise InputChanged("the kernel stored to x")
    is_right = isinstance(y, Tensor) and y.shape == (len(x),) and y.tolist() == _largest(x)
    if is_right and seen.faults:
        outside = "outside" in seen.faults[0]
        fault = f"The numbers are right, but see {seen.faults[0]}"
        raise LoadsElsewhere(fault) if outside else SharedPlace(fault)
    if is_right and seen.widest > BR * BN:
        raise TileTooWide(f"a tile of {seen.widest} numbers, where BR × BN is {BR * BN}")
    return y


def _largest(x: Tensor) -> list[float]:
    return [max(row) for row in x.tolist()]


@triton.jit
def row_max_kernel(X, Y, R, N, row_stride, column_stride, BR: tl.constexpr, BN: tl.constexpr):
    """The largest number of each row of X [R, N] to Y [R]."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    largest = tl.full([BR], float("-inf"), tl.float32)
    for start in tl.range(0, N, BN):
        columns = start + tl.arange(0, BN)  # [BN]
        exists = (rows < R)[:, None] & (columns < N)  # [BR, BN]
        places = rows[:, None] * row_stride + columns * column_stride
        x_tile = tl.load(X + places, mask=exists, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(x_tile, axis=1))
    tl.store(Y + rows, largest, mask=rows < R)


def triton_row_max(x: Tensor, BR: int, BN: int) -> Tensor:
    """The largest number of each row of x [R, N], as [R]; a program has BR rows."""
    R, N = x.shape
    y = torch.empty(R, device=x.device)
    grid = (triton.cdiv(R, BR),)
    row_max_kernel[grid](x, y, R, N, x.stride(0), x.stride(1), BR=BR, BN=BN, num_warps=4)
    return y


@triton.jit
def _wide_kernel(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BN)
    exists = (rows < R)[:, None] & (columns < N)
    x_tile = tl.load(X + rows[:, None] * N + columns, mask=exists, other=float("-inf"))
    tl.store(Y + rows, tl.max(x_tile, axis=1), mask=rows < R)


def _wide_row_max(x: Tensor, BR: int, BN: int) -> Tensor:
    """What `triton_row_max` is with a tile that holds whole rows."""
    (R, N), y = x.shape, torch.empty(len(x), device=x.device)
    BN = triton.next_power_of_2(N)
    _wide_kernel[triton.cdiv(R, BR),](x.contiguous(), y, R, N, BR=BR, BN=BN)
    return y


_NO_MAXIMUM = (
    ("torch.amax", "PyTorch's maximum"),
    ("torch.max", "PyTorch's maximum"),
    ("torch.maximum", "PyTorch's maximum"),
    ("torch.sort", "PyTorch's sort"),
    ("torch.topk", "PyTorch's topk"),
    ("nsa_tutorial", "the course's own function"),
)
_MASK, _PLACES = (
    "(rows < R)[:, None] & (columns < N)", "rows[:, None] * row_stride + columns * column_stride",
)  # fmt: skip
_OTHER, _START = ', other=float("-inf")', '[BR], float("-inf"), tl.float32'

_TRITON_ROW_MAX = TEXTS.exercise(
    "triton_row_max", minutes=16, difficulty=2, solution=triton_row_max, run=_run_row_max,
    parts=(row_max_kernel,), launches="triton", forbidden=_NO_MAXIMUM,
    stages=_row_max_stages("triton", BR=2, BN=4),
    misconceptions=diffs(triton_row_max, [
        (_OTHER, ", other=0.0", "filling masked places with 0",
         "0 changes no sum. But next to negative numbers, 0 is the largest. Which number changes "
         "no maximum?"),
        (_OTHER, "", "a masked load without `other`",
         "Triton promises nothing about such a masked place. Here it holds 999. Which number "
         "changes no maximum?"),
        (f"mask=exists{_OTHER}", "mask=rows[:, None] >= 0", "a missing mask on the load",
         "Past the end of a row, the next row begins, and past the last row somebody else's "
         "memory. Which places of the tile hold a number of x?"),
        (_MASK, "(rows >= 0)[:, None] & (columns < N)", "a mask on the columns alone",
         "The rows past the end are never stored, so the result is right. But which addresses does "
         "the last program load from?"),
        (_MASK, "(rows < R)[:, None] & (columns >= 0)", "a mask on the rows alone",
         "A tile at the right reaches past the last column. What lies in memory there?"),
        (_START, "[BR], 0.0, tl.float32", "starting the maximum at 0",
         "In a row of negative numbers, 0 is the largest. Which number is the smallest of all?"),
        (_START, "[BR], -1e30, tl.float32", "starting the maximum at a finite number",
         "The largest number of a row of −∞ is −∞. Yours is larger. Where does it come from?"),
        ("tl.maximum(largest, tl.max(x_tile, axis=1))", "tl.max(x_tile, axis=1)",
         "keeping the last tile only",
         "Each step's maximum takes the place of the one before. Which function takes the larger "
         "of two tiles, place by place?"),
        ("tl.range(0, N, BN)", "tl.range(0, BN, BN)", "looking at the first tile only",
         "A row of 8 has two tiles of 4, and one program owns the whole row. Which loop walks over "
         "them, and which name of the loop says where a step begins?"),
        ("start + tl.arange(0, BN)", "tl.arange(0, BN)", "looking at the first tile only"),
        ("tl.range(0, N, BN)", "tl.range(0, N // BN * BN, BN)", "leaving the ragged tail out",
         "`N // BN` counts full tiles. In which tile is the last number of a row of 5?"),
        ("tl.program_id(0) * BR", "tl.program_id(0)", "programs that begin one row apart",
         "Program 1 begins where program 0 ends. How many rows does a program have?"),
        ("* row_stride", "* N", "stepping to the next row by N",
         "That is right where rows follow each other in memory. In a transposed view they do not. "
         "What does `x.stride(0)` say?"),
        ("* row_stride", "* BN", "stepping to the next row by the width of the tile",
         "The tile is a window into x. How many numbers lie between two rows of x?"),
        ("* column_stride", "* 1", "taking a row's numbers for neighbours in memory",
         "They need not be. What does `x.stride(1)` say of a view such as `x[:, ::2]`?"),
        (_PLACES, "rows[:, None] * N + columns", "places without the strides",
         "A view lies in memory as its strides say. What are `x.stride(0)` and `x.stride(1)` of a "
         "transposed view?"),
        (_PLACES, "rows[:, None] * column_stride + columns * row_stride",
         "the two strides the wrong way round",
         "`x.stride(0)` is the step from row to row. Which of `rows` and `columns` is it to be "
         "multiplied by?"),
        ("triton.cdiv(R, BR)", "R // BR", "too few programs",
         "The places that no program stores hold NaN here. How many programs do 3 rows need, at 2 "
         "rows each?"),
        ("(triton.cdiv(R, BR),)", "(1,)", "too few programs"),
        (", mask=rows < R)", ")", "a missing mask on the store",
         "The last program's rows reach past the end of y. Which of them exist?"),
        (_wide_row_max, "a whole row in one tile",
         "A row may be longer than what a program can hold. How does a program walk over it, `BN` "
         "columns at a time?"),
    ], parts=(row_max_kernel,)),
)  # fmt: skip


@tilelang.jit
def row_max_program(BR, BN):
    """The kernel that stores the largest number of each row of X [R, N] to Y [R]."""
    R, N = T.dynamic("R"), T.dynamic("N")

    @T.prim_func
    def kernel(X: T.Tensor([R, N], "float32"), Y: T.Tensor([R], "float32")):
        with T.Kernel(T.ceildiv(R, BR), threads=128) as block:
            x_tile = T.alloc_fragment([BR, BN], "float32")
            largest = T.alloc_fragment([BR], "float32")
            row = block * BR
            T.fill(largest, -T.infinity("float32"))
            for step in T.serial(T.ceildiv(N, BN)):
                column = step * BN
                T.copy(X[row : row + BR, column : column + BN], x_tile)  # zeros past R and N
                for i, j in T.Parallel(BR, BN):
                    if column + j >= N:
                        x_tile[i, j] = -T.infinity("float32")
                T.reduce_max(x_tile, largest, dim=1, clear=False)
            T.copy(largest, Y[row : row + BR])

    return kernel


def tilelang_row_max(x: Tensor, BR: int, BN: int) -> Tensor:
    """The largest number of each row of x [R, N], as [R]; a program has BR rows."""
    y = torch.empty(x.shape[0], device=x.device)
    kernel = row_max_program(BR, BN)
    kernel(x.contiguous(), y)
    return y


_COPY, _REDUCE = (
    "T.copy(X[row : row + BR, column : column + BN], x_tile)",
    "T.reduce_max(x_tile, largest, dim=1, clear=False)",
)
_HIDE = """                for i, j in T.Parallel(BR, BN):
                    if column + j >= N:
                        x_tile[i, j] = -T.infinity("float32")
"""

_TILELANG_ROW_MAX = TEXTS.exercise(
    "tilelang_row_max", minutes=14, difficulty=2, solution=tilelang_row_max, run=_run_row_max,
    parts=(row_max_program,), launches="tilelang", forbidden=_NO_MAXIMUM,
    stages=_row_max_stages("tilelang", BR=4, BN=16),
    misconceptions=diffs(tilelang_row_max, [
        (_HIDE, "", "zeros past the end that beat negative numbers",
         "`T.copy` fills the tile with zeros there, and you cannot ask for another number. Between "
         "the copy and the reduction, what should those places become?"),
        ('            T.fill(largest, -T.infinity("float32"))\n', "",
         "a maximum that was never set",
         "A fragment holds anything until you write to it. Here, it is ∞. Which line fills "
         "`largest` before the loop, and with what?"),
        ('T.fill(largest, -T.infinity("float32"))', "T.clear(largest)", "starting the maximum at 0",
         "In a row of negative numbers, 0 is the largest. Which number is the smallest of all?"),
        ('T.fill(largest, -T.infinity("float32"))', "T.fill(largest, -1e30)",
         "starting the maximum at a finite number",
         "The largest number of a row of −∞ is −∞. Yours is larger. Where does it come from?"),
        (", clear=False", "", "clearing the maximum so far at each step",
         "Only the last tile is left. `T.reduce_max` starts anew, unless told otherwise. Which "
         "option makes it go on from what `largest` holds?"),
        (_REDUCE, "for i, j in T.Parallel(BR, BN): largest[i] = T.max(largest[i], x_tile[i, j])",
         "turns of `T.Parallel` that share `largest[i]`",
         "On a CPU the numbers come out right, because it takes one turn after the other. On a "
         "GPU, threads take turns at the same time, and one overwrites the other's. Which word "
         "reduces?"),
        (_COPY, "T.copy(x_tile, X[row : row + BR, column : column + BN])",
         "copying the wrong way round",
         "This kernel changes x. `T.copy` takes the source first. Which of the two is it?"),
        ("T.serial(T.ceildiv(N, BN))", "T.serial(1)", "looking at the first tile only",
         "A row of 32 has two tiles of 16, and one program owns the whole row. Which loop walks "
         "over them, and which name of the loop says where a step begins?"),
        ("T.ceildiv(N, BN)", "N // BN", "leaving the ragged tail out",
         "`N // BN` counts full tiles. In which tile is the last number of a row of 17?"),
        ("block * BR", "block", "programs that begin one row apart",
         "Program 1 begins where program 0 ends. How many rows does a program have?"),
        ("step * BN", "0", "looking at the first tile only"),
        ("step * BN", "step * BR", "steps that begin `BR` columns apart",
         "`BR` counts the rows of a tile. How many columns does a tile have?"),
        ("step * BN", "step", "steps that begin one column apart",
         "Step 1 begins where step 0 ends. How many columns does a tile have?"),
        ("            T.copy(largest, Y[row : row + BR])\n", "", "a maximum that is never stored",
         "`largest` ends with its program, and y still holds NaN. Which line moves it to Y?"),
        ("T.ceildiv(R, BR)", "R // BR", "too few programs",
         "The places that no program stores hold NaN here. How many programs do 5 rows need, at 4 "
         "rows each?"),
        ("x.contiguous()", "x", "a view, where the kernel expects rows that follow each other",
         "`T.Tensor([R, N], …)` promises that they do, and TileLang refuses others. Which method "
         "of a tensor copies a view into such rows, if need be?"),
    ], parts=(row_max_program,), pairs=False),
)  # fmt: skip


# -- column_sums --


@triton.jit
def column_sums_kernel(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr):
    """Add BR rows of X [R, N] to Y [N]."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    columns = tl.arange(0, BN)  # [BN], all columns
    exists = (rows < R)[:, None] & (columns < N)
    x_tile = tl.load(X + rows[:, None] * N + columns, mask=exists, other=0.0)
    tl.atomic_add(Y + columns, tl.sum(x_tile, axis=0), mask=columns < N)


def column_sums(x: Tensor) -> Tensor:
    """The sum of each column of x [R, N], as [N]; a program adds four rows to it."""
    R, N = x.shape
    y = torch.zeros(N, device=x.device)
    column_sums_kernel[(triton.cdiv(R, 4),)](x, y, R, N, BR=4, BN=triton.next_power_of_2(N))
    return y


_GIVEN_SUMS = (
    """
@triton.jit
def column_sums_kernel(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    columns = tl.arange(0, BN)  # [BN], all columns
    exists = (rows < R)[:, None] & (columns < N)
    x_tile = tl.load(X + rows[:, None] * N + columns, mask=exists, other=0.0)
    so_far = tl.load(Y + columns, mask=columns < N, other=0.0)
    so_far += tl.sum(x_tile, axis=0)
    tl.store(Y + columns, so_far, mask=columns < N)
""",
    """
def column_sums(x):
    R, N = x.shape
    y = torch.zeros(N, device=x.device)
    column_sums_kernel[(triton.cdiv(R, 4),)](x, y, R, N, BR=4, BN=triton.next_power_of_2(N))
    return y
""",
)


def _run_column_sums(solution: Callable, x: Tensor) -> object:
    """Launch, and watch the programs.

    Raises:
        NotImplementedError: if kernel and launch are as the chapter gives them.
        SharedPlace: if the sums are right, and programs get in each other's way.
    """
    with _plainly(), counting("triton") as launched, watching() as seen:
        y = solution(x)
    kernel, launch = _GIVEN_SUMS
    if launched and _reads_as(launched[0], kernel) and _reads_as(solution, launch):
        raise NotImplementedError("kernel and launch are as they were given")
    is_right = isinstance(y, Tensor) and y.shape == (x.shape[1],)
    if is_right and seen.faults and torch.allclose(y, x.sum(0)):
        raise SharedPlace(f"The sums are right here, but see {seen.faults[0]}")
    return y


def _sums_case(name: str, R: int, N: int) -> Case:
    def why_not() -> str | None:
        here = environment.detect()
        if here.triton is not None and not here.triton_interpreted:
            return "a race is found by Triton's interpreter, and here Triton compiles for the GPU."
        return here.why_not("triton", here.device)

    def arguments() -> tuple:
        g = torch.Generator().manual_seed(10 * R + N)
        return (torch.randint(-9, 10, (R, N), generator=g).float(),)

    return Case(name, arguments, why_not)


_ADD = "tl.atomic_add(Y + columns, tl.sum(x_tile, axis=0), mask=columns < N)"

_SUMS = TEXTS.exercise(
    "column_sums", minutes=7, difficulty=2, solution=column_sums, run=_run_column_sums,
    parts=(column_sums_kernel,), launches="triton", tolerance=1e-4,
    misconceptions=diffs(column_sums, [
        (_ADD, "tl.store(Y + columns, tl.load(Y + columns, mask=columns < N) + tl.sum(x_tile, "
         "axis=0), mask=columns < N)", "a load, an addition and a store, one after the other",
         "Between your load and your store, another program may store, and its sum is lost. Which "
         "word of `tl` does all three in one step?"),
        ("tl.atomic_add(", "tl.store(", "keeping the last program's sums",
         "A store overwrites what the programs before it found. Which word adds in one step?"),
        ("tl.sum(x_tile, axis=0), mask", "tl.load(Y + columns, mask=columns < N) + "
         "tl.sum(x_tile, axis=0), mask", "adding the sum so far twice",
         "`tl.atomic_add` adds to what is there. What may its second argument be, then?"),
        ("(triton.cdiv(R, 4),)", "(1,)", "summing the first four rows only",
         "One program alone meets no other. But it has `BR` rows. Which number must `BR` then be?"),
        ("torch.zeros(N", "torch.empty(N", "adding to memory that nobody has set",
         "`torch.empty` holds anything, and here NaN. What must y hold before the first addition?"),
    ], parts=(column_sums_kernel,)),
    cases=(
        _sums_case("one program: four rows of 2", 4, 2),
        _sums_case("two programs: eight rows of 2", 8, 2),
        _sums_case("three programs, the last with one row", 9, 5),
    ),
)  # fmt: skip


EXERCISES = (_TRITON_ROW_MAX, _SUMS, _TILELANG_ROW_MAX, _PRODUCT, _VARIANCE, _OFFSETS)


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
