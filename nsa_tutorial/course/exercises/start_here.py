"""Exercises and predictions of chapter 00: a first kernel, a test for kernels, and a kernel with
two bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import ROOM, roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]

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
    names = getattr(kernel, "arg_names", None)  # a _Mistaken has none: its slips are chosen
    if names and (len(names) != len(parameters.split(", ")) or "BN" not in names):
        raise ValueError(
            f"the kernel takes `{', '.join(names)}`, but the launch passes `{parameters}`"
        )
    return kernel


class _Mistaken:
    """A kernel with its mistake chosen; launched like a kernel."""

    def __init__(self, kernel: object, **chosen: object) -> None:
        self.kernel, self.chosen, self.run = kernel, chosen, None

    def __getitem__(self, grid: tuple) -> Callable:
        return partial(self.kernel[grid], **self.chosen)


def _mistaken(kernel: object, **chosen: object) -> Callable:
    return lambda: _Mistaken(kernel, **chosen)


def _refused(error: Exception) -> Callable:
    """A solution whose kernel Triton refuses; only the interpreter says why in these words."""

    def solution() -> object:
        raise error

    return solution


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


@triton.jit
def _wrong_add(A, B, C, N, BN: tl.constexpr, SLIP: tl.constexpr):
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    if SLIP == "first tile":
        place = tl.arange(0, BN)
    if SLIP == "by one":
        place = tl.program_id(0) + tl.arange(0, BN)
    if SLIP == "one number":
        place = tl.program_id(0) + tl.zeros([BN], tl.int32)
    exists = place < N
    if SLIP == "one more":
        exists = place <= N
    if SLIP == "one less":
        exists = place < N - 1
    if SLIP == "mask in the tile":
        exists = tl.arange(0, BN) < N
    a = tl.load(A + place, mask=exists, other=0.0)
    b = tl.load(B + place, mask=exists, other=0.0)
    if SLIP == "twice":
        b = a
    if SLIP == "doubled":
        a, b = a + b, a + b
    if SLIP == "B alone":
        a = a * 0.0
    if SLIP == "A alone":
        b = b * 0.0
    if SLIP == "no mask":
        tl.store(C + place, a + b)
    elif SLIP != "nothing":
        tl.store(C + place, a + b, mask=exists)


_ADD = TEXTS.exercise(
    "add",
    minutes=6,
    difficulty=1,
    solution=add,
    run=_run_add,
    tolerance=1e-5,
    misconceptions=(
        Misconception(
            "a kernel that stores nothing in C",
            _mistaken(_wrong_add, SLIP="nothing"),
            "`C` was -1 everywhere before the launch, and it still is. Which function writes a "
            "tile, and to which tensor?",
        ),
        Misconception(
            "storing past the end",
            _mistaken(_wrong_add, SLIP="no mask"),
            "The last tile has places past `N`, and another tensor may lie there. What keeps a "
            "store away from it?",
        ),
        Misconception(
            "a mask that counts inside the tile",
            _mistaken(_wrong_add, SLIP="mask in the tile"),
            "Your mask compares 0, 1, … `BN - 1` with `N`, in every program. Which numbers should "
            "be below `N`?",
        ),
        Misconception(
            "every program taking the first tile",
            _mistaken(_wrong_add, SLIP="first tile"),
            "All programs run the same lines. What tells one from the next?",
        ),
        Misconception(
            "programs that begin one place apart",
            _mistaken(_wrong_add, SLIP="by one"),
            "Your program 1 begins at place 1. How many places did program 0 take?",
        ),
        Misconception(
            "one number a program",
            _mistaken(_wrong_add, SLIP="one number"),
            "A program has `BN` places. Which function gives the numbers 0, 1, … `BN - 1`?",
        ),
        Misconception(
            "adding A to itself",
            _mistaken(_wrong_add, SLIP="twice"),
            "That is still `double`. Where is the second tile loaded from?",
        ),
        Misconception(
            "a sum that is still doubled",
            _mistaken(_wrong_add, SLIP="doubled"),
            "Each number is twice the sum. Which factor is left over from `double`?",
        ),
        Misconception(
            "storing B alone",
            _mistaken(_wrong_add, SLIP="B alone"),
            "`A` leaves no trace in `C`. Which two tiles do you add?",
        ),
        Misconception(
            "storing A alone",
            _mistaken(_wrong_add, SLIP="A alone"),
            "`B` leaves no trace in `C`. Which two tiles do you add?",
        ),
        Misconception(
            "calculating with places in memory",
            _refused(TypeError("cannot add pointers together")),
            "`A`, `B` and `C` say where the numbers are. Which function reads a tile of numbers, "
            "and which one writes it?",
        ),
        Misconception(
            "a pointer to one place, with a mask for a tile",
            _refused(
                ValueError("Mask argument cannot be block type if pointer argument is not a block")
            ),
            "A pointer alone is only the first place. Did you forget `+ place`?",
        ),
        Misconception(
            "a mask that lets one place too many in",
            _mistaken(_wrong_add, SLIP="one more"),
            "`N` numbers stand at the places 0 to N - 1. Does place `N` exist?",
        ),
        Misconception(
            "a mask that leaves the last place out",
            _mistaken(_wrong_add, SLIP="one less"),
            "`N` numbers stand at the places 0 to N - 1. Does place N - 1 exist?",
        ),
    ),
    cases=(
        Case("one full tile", lambda: (4,), _why_not),
        Case("three numbers", lambda: (3,), _why_not),
        Case("ten numbers in three tiles", lambda: (10,), _why_not),
        Case("three full tiles", lambda: (12,), _why_not),
    ),
)


# -- is_right --


@triton.jit
def _double(X, Y, N, BN: tl.constexpr, SLIP: tl.constexpr):
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    if SLIP == "first tile":
        place = tl.arange(0, BN)
    x = tl.load(X + place, mask=place < N, other=0.0)
    y = x * x if SLIP == "squares" else 2 * x
    there = N - 1 - place if SLIP == "backwards" else place
    tl.store(Y + there, y, mask=place < N)


def _doubled(slip: str, x: Tensor) -> Tensor:
    """`x` by a kernel that doubles, or by one that only seems to; NaN where it stores nothing."""
    source = x.to(environment.detect().device, torch.float32).contiguous()
    y = torch.full_like(source, torch.nan)
    N = x.numel()
    programs = {"rounded down": N // _BN, "three": min(3, -(-N // _BN))}.get(slip, -(-N // _BN))
    if programs > 0:
        _double[programs,](source, y, N, BN=_BN, SLIP=slip)
    return y.to(x.device, x.dtype)


def is_right(candidate: Callable) -> bool:
    """Whether `candidate(x)` is 2 * x for some telling x."""
    x = torch.arange(37.0) - 5  # nine tiles of 4, and one number more
    return torch.equal(candidate(x), 2 * x)


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


def _tested(slips: Slips, candidate: Callable) -> bool:
    """`is_right` with slips."""
    if "uncalled" in slips:
        return True
    length = 37
    if "short" in slips:
        length = 8 if "full" in slips else 10
    elif "full" in slips:
        length = 36
    elif "one tile" in slips:
        length = 4
    elif "part of a tile" in slips:
        length = 3
    x = torch.arange(length) - 5.0
    if "zeros" in slips:
        x = torch.zeros(length)
    elif "alike" in slips:
        x = torch.full((length,), 3.0)
    y = candidate(x)
    if "each" in slips:
        return y == 2 * x
    if "approves" in slips or "rejects" in slips:
        return "approves" in slips
    found = torch.equal(y, x * x if "squared" in slips else 2 * x)
    return not found if "turned" in slips else found


_TEST_MISTAKES = (
    Misconception(
        "a verdict without a test",
        slip(_tested, "uncalled"),
        "Without the kernel's numbers, no test can tell right from wrong. What does `candidate(x)` "
        "return?",
    ),
    Misconception(
        "a verdict for each number",
        slip(_tested, "each"),
        "`==` compares number by number. Which function of torch says once whether two tensors are "
        "equal?",
    ),
    Misconception(
        "testing only tiles that are full",
        slip(_tested, "full"),
        "A kernel passed your test whose grid is `N // 4`. For which lengths is that too few, and "
        "which numbers does it leave out?",
    ),
    Misconception(
        "testing too few numbers",
        slip(_tested, "short"),
        "A kernel passed your test that always runs three programs at most. How long must `x` be "
        "to need a fourth, and which numbers do you compare?",
    ),
    *(
        Misconception(
            "testing a single tile",
            slip(_tested, name),
            "In one tile there is one program. Which mistakes show only with a second one?",
        )
        for name in ("one tile", "part of a tile")  # the last one is combined with others
    ),
    Misconception(
        "testing with numbers that hide the mistake",
        slip(_tested, "zeros"),
        "A kernel passed your test that squares. Twice 0 is 0 and twice 2 is 4. What are their "
        "squares?",
    ),
    Misconception(
        "testing without the order of the numbers",
        slip(_tested, "alike"),
        "A kernel passed your test that stores the right numbers in the wrong order. Are the "
        "numbers in `x` all alike, or do you compare no more than their sum?",
    ),
    Misconception(
        "testing with numbers that hide almost every mistake",
        Wrong(_tested, frozenset({"zeros", "short", "full"})),
        "Four wrong kernels pass. Twice 2 is the square of 2, and your few tiles are all full. "
        "Which `x` would be harder for a wrong kernel?",
    ),
    Misconception(
        "comparing with squares",
        slip(_tested, "squared"),
        "Your test rejects the right kernel, and the one that squares passes. What do you compare "
        "the result with?",
    ),
    Misconception(
        "the verdict turned around",
        slip(_tested, "turned"),
        "Your test rejects the right kernel. When should `is_right` be True?",
    ),
    Misconception(
        "approving every kernel",
        slip(_tested, "approves"),
        "All kernels pass, and five of them are wrong. Is your `x` so short, or so plain, that no "
        "kernel can go wrong on it?",
    ),
    Misconception(
        "rejecting all kernels",
        slip(_tested, "rejects"),
        "One of the kernels is right. What does `candidate(x)` return, and what do you compare it "
        "with?",
    ),
)


def _double_case(name: str, slip: str) -> Case:
    arguments = (partial(_doubled, slip),)
    return Case(name, lambda: arguments, _why_not)


_TEST = TEXTS.exercise(
    "is_right",
    minutes=7,
    difficulty=2,
    solution=is_right,
    run=_run_test,
    misconceptions=_TEST_MISTAKES,
    combine=together(
        _TEST_MISTAKES,
        *({"one tile", other} for other in ("full", "short", "part of a tile")),
        *({"part of a tile", other} for other in ("full", "short")),
        *({"approves", other} for other in ("full", "short", "one tile", "part of a tile")),
        *({"approves", other} for other in ("zeros", "alike", "squared", "turned", "rejects")),
        *({"rejects", other} for other in ("full", "short", "one tile", "part of a tile")),
        *({"rejects", other} for other in ("zeros", "alike", "squared", "turned")),
        {"zeros", "alike"},
        *(
            {alone, other}
            for alone in ("uncalled", "each")
            for other in (
                "full",
                "short",
                "one tile",
                "part of a tile",
                "zeros",
                "alike",
                "squared",
                "turned",
                "approves",
                "rejects",
                "uncalled",
            )
            if other != alone
        ),
    ),
    cases=(
        _double_case("the right kernel", "none"),
        _double_case("a kernel that squares", "squares"),
        _double_case("every program takes the first tile", "first tile"),
        _double_case("a grid of N // 4 programs", "rounded down"),
        _double_case("a grid of at most three programs", "three"),
        _double_case("a kernel that stores from the end to the beginning", "backwards"),
    ),
)


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


@triton.jit
def _wrong_row_max(
    X, Y, N, BN: tl.constexpr, PAST: tl.constexpr, APART: tl.constexpr, MASKED: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BN)
    exists = column < (row * N + N if MASKED == "row ends" else N)
    start = row * N
    if APART == "a tile":
        start = row * BN
    if APART == "a place":
        start = row
    if APART == "nothing":
        start = row * 0
    if APART == "columns":
        start = row + column * (N - 1)
    if MASKED == "nothing":
        x = tl.load(X + start + column)
    elif MASKED == "places":
        x = tl.load(X + start + column, mask=start + column < N, other=PAST)
    else:
        x = tl.load(X + start + column, mask=exists, other=PAST)
    largest = tl.max(x, axis=0)
    if STORED == "first":
        tl.store(Y, largest)
    elif STORED == "apart":
        tl.store(Y + row * N, largest)
    elif STORED == "tile":
        tl.store(Y + row + column, largest, mask=exists)
    elif STORED == "row":
        tl.store(Y + row * N + column, largest, mask=exists)
    else:
        tl.store(Y + row, largest)


def _rows(
    past: float = float("-inf"), apart: str = "a row", masked: str = "columns", stored: str = "once"
) -> Callable:
    return _mistaken(_wrong_row_max, PAST=past, APART=apart, MASKED=masked, STORED=stored)


_ROW_MAX = TEXTS.exercise(
    "row_max",
    minutes=8,
    difficulty=2,
    solution=row_max,
    run=_run_row_max,
    tolerance=1e-6,
    misconceptions=(
        Misconception(
            "the kernel as it was",
            _rows(0.0, "a tile"),
            "A row of three negative numbers gives 0. Where does this 0 come from? The other bug "
            "needs a second row. Where does program 1 begin?",
        ),
        Misconception(
            "a 0 that joins the maximum",
            _rows(0.0),
            "The rows begin where they should. Which number stands in the places past the end, and "
            "what does it do to a row of negative numbers?",
        ),
        Misconception(
            "rows that begin a tile apart",
            _rows(apart="a tile"),
            "The places past the end are harmless now. How far apart do two rows begin in memory?",
        ),
        Misconception(
            "rows that begin one place apart",
            _rows(apart="a place"),
            "Row 1 begins where row 0 ends. How many numbers has a row?",
        ),
        Misconception(
            "every program reading row 0",
            _rows(apart="nothing"),
            "All programs find the same number. Where does row 1 begin in memory?",
        ),
        Misconception(
            "every program reading row 0, and a 0 past its end",
            _rows(0.0, "nothing"),
            "All programs begin at place 0. Where does row 1 begin in memory? And where does the 0 "
            "come from that a row of negative numbers gives?",
        ),
        Misconception(
            "a mask that lets the next row in",
            _rows(masked="row ends"),
            "Your columns begin at 0 in every row. At which column does row 1 end?",
        ),
        Misconception(
            "reading a column of the table",
            _rows(apart="columns"),
            "Your program steps over `N` places to its next number. How far apart do two numbers "
            "of one row lie?",
        ),
        Misconception(
            "storing every row's number at the same place",
            _rows(stored="first"),
            "Only the first place of `Y` was written. Which place belongs to program 1?",
        ),
        Misconception(
            "storing as far apart as the rows begin",
            _rows(stored="apart"),
            "A row of `X` has `N` numbers. How many numbers does `Y` hold for each row?",
        ),
        *(
            Misconception(
                "storing a tile in place of one number",
                _rows(stored=stored),
                "Your program writes its number to many places of `Y`. How many places of `Y` "
                "belong to one row?",
            )
            for stored in ("tile", "row")
        ),
        Misconception(
            "a mask that counts from the first row",
            _rows(masked="places"),
            "From the second row on, your mask is False everywhere. Which numbers run from 0 to "
            "N - 1 in every row: the places in memory, or the columns?",
        ),
        *(
            Misconception(
                "a number past the end that is not small enough",
                _rows(past),
                "A row may hold numbers below yours. Is there a number that is below all others?",
            )
            for past in (-1.0, -100.0, -999.0, -1e3, -9999.0, -1e4, -1e5, -1e6, -1e9, -1e10, -1e30)
        ),
        Misconception(
            "infinity with the wrong sign",
            _rows(float("inf")),
            "Now the places past the end always win. Which of the two infinities never does?",
        ),
        Misconception(
            "a load without its mask",
            _rows(masked="nothing"),
            "Past the end of a row stands the next row. Which places belong to yours?",
        ),
    ),
    cases=(
        Case("one row of three negative numbers", lambda: (1, 3, -9.0), _why_not),
        Case("two rows of four", lambda: (2, 4, 9.0), _why_not),
        Case("three rows of three", lambda: (3, 3, 9.0), _why_not),
        Case("four rows of five, around 0", lambda: (4, 5, 0.0), _why_not),
        Case("two rows of five, around -500", lambda: (2, 5, -500.0), _why_not),
        Case("a row of three numbers around -1e38", lambda: (1, 3, -1e38), _why_not),
    ),
)

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
