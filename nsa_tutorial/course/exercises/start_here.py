"""Exercises and predictions of chapter 00: a first kernel, a test for kernels, and a kernel with
two bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import ROOM, roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

_BN = 4


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _why_not() -> str | None:
    here = environment.detect()
    return here.why_not("triton", here.device)


def _kernel_of(solution: Callable, parameters: str) -> object:
    """The kernel that a solution returns, or an error that says what is missing."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise ValueError("the function defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise ValueError("the kernel is not decorated with @triton.jit")
    names = getattr(kernel, "arg_names", None)  # other things can be launched like a kernel
    if names and (len(names) != len(parameters.split(", ")) or "BN" not in names):
        raise ValueError(
            f"the kernel takes `{', '.join(names)}`, but the launch passes `{parameters}`"
        )
    return kernel


# -- add --


def add() -> object:
    """The kernel that adds two tensors of N numbers."""

    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        exists = place < N
        a = tl.load(A + place, mask=exists)
        b = tl.load(B + place, mask=exists)
        tl.store(C + place, a + b, mask=exists)

    return kernel


class _Stored(NamedTuple):
    """What a kernel stored: the sums, and how many numbers past their end."""

    C: Tensor
    stored_past_the_end: int


def _run_add(solution: Callable, N: int) -> _Stored:
    """Add 1, 2, 3, … and 10, 20, 30, …; `C` is -1 before, and large numbers lie past the end of `A`
    and `B`."""
    kernel, ones = _kernel_of(solution, "A, B, C, N, BN"), torch.arange(N) + 1.0
    # 11, 22, 33, …: sums that show what was added
    a, b = roomy(ones, 1000.0), roomy(10 * ones, 1000.0)
    c = roomy(torch.full((N + ROOM,), -1.0), -1.0)
    kernel[-(-N // _BN),](a, b, c, N, BN=_BN)
    past = int((c[N:] != -1.0).sum())
    return _Stored(c[:N].cpu(), past)


_ADD = TEXTS.exercise(
    "add",
    minutes=6,
    difficulty=1,
    solution=add,
    run=_run_add,
    tolerance=1e-5,
    misconceptions=diffs(add, [
        ("tl.store(C + place, a + b, mask=exists)", "a + b", "a kernel that stores nothing in C",
         "`C` was -1 everywhere before the launch, and it still is. Which function writes a tile, "
         "and to which tensor?"),
        ("a + b, mask=exists", "a + b", "storing past the end",
         "The last tile has places past `N`, and another tensor may lie there. What keeps a store "
         "away from it?"),
        ("place < N", "tl.arange(0, BN) < N", "a mask that counts inside the tile",
         "Your mask compares 0, 1, … `BN - 1` with `N`, in every program. Which numbers should be "
         "below `N`?"),
        ("tl.program_id(0) * BN + ", "", "every program taking the first tile",
         "All programs run the same lines. What tells one from the next?"),
        ("tl.program_id(0) * BN", "tl.program_id(0)", "programs that begin one place apart",
         "Your program 1 begins at place 1. How many places did program 0 take?"),
        ("tl.program_id(0) * BN + tl.arange(0, BN)", "tl.program_id(0) + tl.zeros([BN], tl.int32)",
         "one number a program",
         "A program has `BN` places. Which function gives the numbers 0, 1, … `BN - 1`?"),
        ("B + place", "A + place", "adding A to itself",
         "That is still `double`. Where is the second tile loaded from?"),
        ("a + b", "2 * (a + b)", "a sum that is still doubled",
         "Each number is twice the sum. Which factor is left over from `double`?"),
        ("a + b", "b", "storing B alone",
         "`A` leaves no trace in `C`. Which two tiles do you add?"),
        ("a + b", "a", "storing A alone",
         "`B` leaves no trace in `C`. Which two tiles do you add?"),
        ({"tl.load(A + place, mask=exists)": "A + place",
         "tl.load(B + place, mask=exists)": "B + place"}, "calculating with places in memory",
         "`A`, `B` and `C` say where the numbers are. Which function reads a tile of numbers, and "
         "which one writes it?"),
        ("A + place", "A", "a pointer to one place, with a mask for a tile",
         "A pointer alone is only the first place. Did you forget `+ place`?"),
        ("place < N", "place <= N", "a mask that lets one place too many in",
         "`N` numbers stand at the places 0 to N - 1. Does place `N` exist?"),
        ("place < N", "place < N - 1", "a mask that leaves the last place out",
         "`N` numbers stand at the places 0 to N - 1. Does place N - 1 exist?"),
    ], pairs=False),
    cases=(
        Case("one full tile", lambda: (4,), _why_not),
        Case("three numbers", lambda: (3,), _why_not),
        Case("ten numbers in three tiles", lambda: (10,), _why_not),
        Case("three full tiles", lambda: (12,), _why_not),
    ),
)  # fmt: skip


# -- is_right --


def is_right(candidate: Callable) -> bool:
    """Whether `candidate(x)` is 2 * x for some telling x."""
    N = 9 * 4 + 1  # nine tiles, and one number more
    x = torch.arange(N) - 5.0
    return torch.equal(candidate(x), 2 * x)


def _double() -> object:
    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        x = tl.load(X + place, mask=place < N, other=0.0)
        tl.store(Y + place, 2 * x, mask=place < N)

    return kernel


def _all_tiles(N: int) -> int:
    return -(-N // _BN)


def _launched(kernel: object, programs: Callable[[int], int], x: Tensor) -> Tensor:
    """What the kernel makes of `x`; NaN where it stores nothing."""
    source = x.to(environment.detect().device, torch.float32).contiguous()
    y = torch.full_like(source, torch.nan)
    N = x.numel()
    if programs(N) > 0:
        kernel[programs(N),](source, y, N, BN=_BN)
    return y.to(x.device, x.dtype)


def _double_case(name: str, *edit: str, programs: Callable[[int], int] = _all_tiles) -> Case:
    kernel = Edited(_double, dict([edit] if edit else []))()
    arguments = (partial(_launched, kernel, programs),)
    return Case(name, lambda: arguments, _why_not)


class _Candidate:
    """A candidate as the reader calls it, which knows whether they did."""

    def __init__(self, doubled: Callable) -> None:
        self.doubled, self.was_called = doubled, False

    def __call__(self, x: Tensor) -> Tensor:
        self.was_called = True
        return self.doubled(x)

    def __getitem__(self, grid: object) -> None:
        raise TypeError("call `candidate(x)` like a function: it launches the kernel for you")


def _run_test(solution: Callable, doubled: Callable) -> object:
    """The verdict of a test: one, not one for each number, and not without a call."""
    candidate = _Candidate(doubled)
    verdict = solution(candidate)
    if isinstance(verdict, Tensor) and verdict.numel() != 1:
        raise ValueError(
            f"your test returns {verdict.numel()} values: make one True or False of them"
        )
    if isinstance(verdict, bool) and not candidate.was_called:
        raise ValueError("your test never calls `candidate`")
    return verdict


_TEST = TEXTS.exercise(
    "is_right",
    minutes=7,
    difficulty=2,
    solution=is_right,
    run=_run_test,
    misconceptions=diffs(is_right, [
        ("torch.equal(candidate(x), 2 * x)", "True", "a verdict without a test",
         "Without the kernel's numbers, no test can tell right from wrong. What does "
         "`candidate(x)` return?"),
        ("torch.equal(candidate(x), 2 * x)", "candidate(x) == 2 * x", "a verdict for each number",
         "`==` compares number by number. Which function of torch says once whether two tensors "
         "are equal?"),
        (" + 1  #", "  #", "testing only tiles that are full",
         "A kernel passed your test whose grid is `N // 4`. For which lengths is that too few, "
         "and which numbers does it leave out?"),
        ("9 * 4", "2 * 4", "testing too few numbers",
         "A kernel passed your test that always runs three programs at most. How long must `x` be "
         "to need a fourth, and which numbers do you compare?"),
        ("N = 9 * 4 + 1", "N = 4", "testing a single tile",
         "In one tile there is one program. Which mistakes show only with a second one?"),
        ("N = 9 * 4 + 1", "N = 3", "testing a single tile"),
        ("torch.arange(N) - 5.0", "torch.zeros(N)", "testing with numbers that hide the mistake",
         "A kernel passed your test that squares. Twice 0 is 0 and twice 2 is 4. What are their "
         "squares?"),
        ("torch.arange(N) - 5.0", "torch.full((N,), 3.0)",
         "testing without the order of the numbers",
         "A kernel passed your test that stores the right numbers in the wrong order. Are the "
         "numbers in `x` all alike, or do you compare no more than their sum?"),
        ({"N = 9 * 4 + 1": "N = 8", "torch.arange(N) - 5.0": "torch.zeros(N)"},
         "testing with numbers that hide almost every mistake",
         "Four wrong kernels pass. Twice 2 is the square of 2, and your few tiles are all full. "
         "Which `x` would be harder for a wrong kernel?"),
        (", 2 * x", ", x * x", "comparing with squares",
         "Your test rejects the right kernel, and the one that squares passes. What do you "
         "compare the result with?"),
        ("return torch", "return not torch", "the verdict turned around",
         "Your test rejects the right kernel. When should `is_right` be True?"),
        ("torch.equal(candidate(x), 2 * x)", "candidate(x) is not None", "approving every kernel",
         "All kernels pass, and five of them are wrong. Is your `x` so short, or so plain, that "
         "no kernel can go wrong on it?"),
        ("torch.equal(candidate(x), 2 * x)", "candidate(x) is None", "rejecting all kernels",
         "One of the kernels is right. What does `candidate(x)` return, and what do you compare "
         "it with?"),
    ]),
    cases=(
        _double_case("the right kernel"),
        _double_case("a kernel that squares", "2 * x", "x * x"),
        _double_case("every program takes the first tile", "tl.program_id(0) * BN + ", ""),
        _double_case("a grid of N // 4 programs", programs=lambda N: N // 4),
        _double_case("a grid of at most three programs",
                     programs=lambda N: min(3, _all_tiles(N))),
        _double_case("a kernel that stores from the end to the beginning",
                     "Y + place", "Y + N - 1 - place"),
    ),
)  # fmt: skip


# -- row_max --


def row_max() -> object:
    """The kernel that finds the largest number of each row."""

    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BN)
        x = tl.load(X + row * N + column, mask=column < N, other=float("-inf"))
        tl.store(Y + row, tl.max(x, axis=0))

    return kernel


class _Found(NamedTuple):
    """What a kernel stored: a number for each row, and how many numbers past their end."""

    Y: Tensor
    stored_past_the_end: int


def _run_row_max(solution: Callable, R: int, N: int, shift: float) -> _Found:
    """Launch the kernel on rows around `shift`; behind `X` lie large numbers."""
    kernel = _kernel_of(solution, "X, Y, N, BN")
    x = roomy(_random(R * N, seed=R * N) + shift, 1000.0)
    y = roomy(torch.full((R + ROOM,), torch.nan), torch.nan)
    kernel[R,](x, y, N, BN=1 << (N - 1).bit_length())
    return _Found(y[:R].cpu(), int((~y[R:].isnan()).sum()))


_ROW_MAX = TEXTS.exercise(
    "row_max",
    minutes=8,
    difficulty=2,
    solution=row_max,
    run=_run_row_max,
    tolerance=1e-6,
    misconceptions=diffs(row_max, [
        ({'float("-inf")': "0.0", "row * N": "row * BN"}, "the kernel as it was",
         "A row of three negative numbers gives 0. Where does this 0 come from? The other bug "
         "needs a second row. Where does program 1 begin?"),
        ('float("-inf")', "0.0", "a 0 that joins the maximum",
         "The rows begin where they should. Which number stands in the places past the end, and "
         "what does it do to a row of negative numbers?"),
        ("row * N", "row * BN", "rows that begin a tile apart",
         "The places past the end are harmless now. How far apart do two rows begin in memory?"),
        ("row * N", "row", "rows that begin one place apart",
         "Row 1 begins where row 0 ends. How many numbers has a row?"),
        ("row * N + ", "", "every program reading row 0",
         "All programs find the same number. Where does row 1 begin in memory?"),
        ({'float("-inf")': "0.0", "row * N + ": ""},
         "every program reading row 0, and a 0 past its end",
         "All programs begin at place 0. Where does row 1 begin in memory? And where does the 0 "
         "come from that a row of negative numbers gives?"),
        ("column < N", "column < row * N + N", "a mask that lets the next row in",
         "Your columns begin at 0 in every row. At which column does row 1 end?"),
        ("row * N + column", "row + column * N", "reading a column of the table",
         "Your program steps over `N` places to its next number. How far apart do two numbers of "
         "one row lie?"),
        ("Y + row", "Y", "storing every row's number at the same place",
         "Only the first place of `Y` was written. Which place belongs to program 1?"),
        ("Y + row", "Y + row * N", "storing as far apart as the rows begin",
         "A row of `X` has `N` numbers. How many numbers does `Y` hold for each row?"),
        ({"Y + row": "Y + row + column",
         "tl.max(x, axis=0))": "tl.max(x, axis=0), mask=column < N)"},
         "storing a tile in place of one number",
         "Your program writes its number to many places of `Y`. How many places of `Y` belong to "
         "one row?"),
        ({"Y + row": "Y + row * N + column",
         "tl.max(x, axis=0))": "tl.max(x, axis=0), mask=column < N)"},
         "storing a tile in place of one number"),
        ("column < N", "row * N + column < N", "a mask that counts from the first row",
         "From the second row on, your mask is False everywhere. Which numbers run from 0 to N - "
         "1 in every row: the places in memory, or the columns?"),
        ('float("-inf")', "-1.0", "a number past the end that is not small enough",
         "A row may hold numbers below yours. Is there a number that is below all others?"),
        *(('float("-inf")', low, "a number past the end that is not small enough") for low in (
            "-100", "-999", "-1e3", "-9999", "-1e4", "-1e5", "-1e6", "-1e9", "-1e10", "-1e30")),
        ('float("-inf")', 'float("inf")', "infinity with the wrong sign",
         "Now the places past the end always win. Which of the two infinities never does?"),
        (', mask=column < N, other=float("-inf")', "", "a load without its mask",
         "Past the end of a row stands the next row. Which places belong to yours?"),
    ], pairs=False),
    cases=(
        Case("one row of three negative numbers", lambda: (1, 3, -9.0), _why_not),
        Case("two rows of four", lambda: (2, 4, 9.0), _why_not),
        Case("three rows of three", lambda: (3, 3, 9.0), _why_not),
        Case("four rows of five, around 0", lambda: (4, 5, 0.0), _why_not),
        Case("two rows of five, around -500", lambda: (2, 5, -500.0), _why_not),
        Case("a row of three numbers around -1e38", lambda: (1, 3, -1e38), _why_not),
    ),
)  # fmt: skip

EXERCISES = (_ADD, _TEST, _ROW_MAX)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    share_of_the_tokens={"tolerance": 0.03},
    times_faster={"tolerance": 0.13},
    percent_of_16384_tokens={"unit": "%", "tolerance": 0.35},
)
