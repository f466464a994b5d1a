"""Exercises of chapter 09: what a program covers, masks, lengths that are no power of two, tiles of
a row, both languages."""

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- program_offsets --


def program_offsets(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
    """The offsets in C [M, N] that program (pid_m, pid_n) stores, row by row."""
    rows = pid_m * BM + torch.arange(BM)  # [BM]
    columns = pid_n * BN + torch.arange(BN)  # [BN]
    offsets = rows[:, None] * N + columns  # [BM, BN]
    in_bounds = (rows < M)[:, None] & (columns < N)  # [BM, BN]
    return offsets[in_bounds].tolist()


def _offsets(
    thread: bool = False,
    starts: bool = True,
    swap: bool = False,
    stride: str = "N",
    mask: str = "both",
    one_row: bool = False,
) -> Callable:
    """A wrong `program_offsets`, with one change."""

    def wrong(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
        if thread:
            return [pid_m * N + pid_n]
        if swap:
            pid_m, pid_n = pid_n, pid_m
        rows = pid_m * (BM if starts else 1) + torch.arange(1 if one_row else BM)
        columns = pid_n * (BN if starts else 1) + torch.arange(BN)
        offsets = rows[:, None] * {"N": N, "M": M, "BN": BN}[stride] + columns
        keep = {
            "both": (rows < M)[:, None] & (columns < N),
            "end": offsets < M * N,
            "none": torch.ones(offsets.shape, dtype=torch.bool),
        }[mask]
        return offsets[keep].tolist()

    return wrong


_OFFSETS = Exercise(
    name="program_offsets",
    statement="""
`C` `[M, N]` lies in memory row by row, so element `(i, j)` has offset `i * N + j`. The grid has a
program for every tile of `BM` rows and `BN` columns; tiles at the right and at the bottom may reach
past the end. Return the list of the offsets that program `(pid_m, pid_n)` stores, row by row,
without those that are not in `C`. For `M = N = 4` and tiles of 2 × 2, program `(0, 1)` stores
`[2, 3, 6, 7]`.
""",
    minutes=4,
    difficulty=1,
    solution=program_offsets,
    misconceptions=(
        Misconception(
            "taking a program for a thread",
            _offsets(thread=True),
            "A program id names a tile, not an element. How many elements does one program "
            "answer for?",
        ),
        Misconception(
            "forgetting that ids count tiles",
            _offsets(starts=False),
            "Program 1 does not begin one element after program 0: between them lies a whole tile.",
        ),
        Misconception(
            "walking along the wrong axis",
            _offsets(swap=True),
            "pid_m counts tiles of rows, pid_n tiles of columns. A square grid hides the "
            "difference.",
        ),
        Misconception(
            "stepping to the next row by the width of the tile",
            _offsets(stride="BN"),
            "The tile is a window into C. From one of its rows to the next you pass all the "
            "columns of C, not only the tile's.",
        ),
        Misconception(
            "stepping to the next row by the number of rows",
            _offsets(stride="M"),
            "How many elements does a row of C [M, N] hold?",
        ),
        Misconception(
            "masking only past the end of the memory",
            _offsets(mask="end"),
            "An offset below M * N is in C, but perhaps in another row: past the last column, "
            "the next row begins. That element belongs to another program.",
        ),
        Misconception(
            "a missing mask",
            _offsets(mask="none"),
            "The last tiles reach past the end of C. On a GPU such a store changes somebody "
            "else's memory, without an error.",
        ),
        Misconception(
            "covering only the first row of the tile",
            _offsets(one_row=True),
            "A tile has two sides. Its offsets are a table: one axis from the rows, one from the "
            "columns.",
        ),
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


# -- masked_reduction --


def masked_reduction(memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
    """The sum and the largest of the elements of X that the program's tile holds; X is the first N
    elements of memory."""
    columns = program * BN + torch.arange(BN)  # [BN]
    in_bounds = columns < N
    x_tile = memory[torch.where(in_bounds, columns, 0)]  # [BN], a masked address must exist here
    total = torch.where(in_bounds, x_tile, 0.0).sum()
    return total, torch.where(in_bounds, x_tile, -torch.inf).max()


def _reduced(mask: str = "right", other: float = -torch.inf) -> Callable:
    def wrong(memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(BN)
        columns = program * BN + places
        masks = {
            "right": columns < N,
            "none": places >= 0,
            "places": places < N,
            "one more": columns <= N,
            "clamp": places >= 0,
        }
        in_bounds = masks[mask]
        legal = columns.clamp(max=N - 1) if mask == "clamp" else torch.where(in_bounds, columns, 0)
        x_tile = memory[legal]
        total = torch.where(in_bounds, x_tile, 0.0).sum()
        return total, torch.where(in_bounds, x_tile, other).max()

    return wrong


_REDUCTION = Exercise(
    name="masked_reduction",
    statement="""
`memory` is a GPU's memory: its first `N` elements are the tensor `X`, behind them lie other
tensors. Program number `program` holds the tile of `BN` elements of `X` that begins at
`program * BN`; the last tile reaches past the end of `X`. Return `(sum, largest)` of the elements
of `X` in the tile, two tensors of no dimension. Work like a kernel: the tile keeps all its `BN`
elements, and a mask says which of them count.
""",
    minutes=4,
    difficulty=1,
    solution=masked_reduction,
    misconceptions=(
        Misconception(
            "a missing mask",
            _reduced("none"),
            "The tile goes on behind X, and the memory there is somebody's. Nothing stops the "
            "load: you do.",
        ),
        Misconception(
            "masking places of the tile instead of positions in X",
            _reduced("places"),
            "Place 0 of program 2's tile is not element 0 of X. Compare with N what you load, not "
            "its place in the tile.",
        ),
        Misconception(
            "zeros where the maximum needs −∞",
            _reduced(other=0.0),
            "What must a masked element hold so that it changes nothing? For a sum it is 0. If "
            "all numbers are negative, 0 is the largest.",
        ),
        Misconception(
            "letting one element too many in",
            _reduced("one more"),
            "X has N elements, and the first has number 0. Which number has the last?",
        ),
        Misconception(
            "loading the last element again for every place past the end",
            _reduced("clamp"),
            "That keeps every address legal, and the maximum right. What does the sum count?",
        ),
    ),
    cases=(
        Case(
            "five elements in tiles of 4, program 1",
            lambda: (torch.tensor([1.0, 2, 3, 4, 5, 100, 200, 300]), 5, 1, 4),
        ),
        Case("all negative", lambda: (torch.tensor([-3.0, -2, -5, 7, 9, 9, 9, 9]), 3, 0, 4)),
        Case("a full tile", lambda: (_random(16, seed=0), 12, 1, 4)),
        Case("a tile with one element", lambda: (_random(32, seed=1), 17, 2, 8)),
    ),
)


# -- padded_variance --


def padded_variance(x: Tensor) -> tuple[int, Tensor]:
    """`(BN, variance)` of a row x [N], computed on a tile of BN elements, the smallest power of two
    that holds the row."""
    N = len(x)
    BN = 1
    while BN < N:
        BN *= 2
    columns = torch.arange(BN)
    in_bounds = columns < N
    x_tile = torch.cat([x, x.new_zeros(BN - N)])  # [BN], what a masked load gives
    mean = x_tile.sum() / N
    # padding is no longer 0 once the mean is taken off
    deviation = torch.where(in_bounds, x_tile - mean, 0.0)  # [BN]
    return BN, (deviation**2).sum() / N


def _variance(change: str) -> Callable:
    def wrong(x: Tensor) -> tuple[int, Tensor]:
        N = len(x)
        BN = 1 << (N - 1).bit_length()
        if change == "always double":
            BN = 1 << N.bit_length()
        if change == "round down":
            BN = 1 << (N.bit_length() - 1)
        if change == "no power":
            BN = N
        if change == "at least 16":
            BN = max(16, BN)
        x_tile = torch.cat([x, x.new_zeros(max(0, BN - N))])[:BN]
        count = BN if change == "divide by BN" else N
        mean = x_tile.sum() / count
        deviation = x_tile - mean
        if change != "padding":
            deviation = torch.where(torch.arange(BN) < N, deviation, 0.0)
        return BN, (deviation**2).sum() / (N - 1 if change == "unbiased" else count)

    return wrong


_VARIANCE = Exercise(
    name="padded_variance",
    statement="""
`tl.arange` takes powers of two only. A row `x` `[N]` of any length lies in a tile of `BN` elements,
the smallest power of two that is at least `N`; a masked load puts 0 into the places past the end.
Return `(BN, variance)`: the length of the tile, an int, and the variance of the row, the mean of
the squared differences from its mean, computed on the tile. Two passes over the tile: the mean,
then the differences. What do the places past the end hold after the first?
""",
    minutes=5,
    difficulty=2,
    solution=padded_variance,
    misconceptions=(
        Misconception(
            "letting the padding into the variance",
            _variance("padding"),
            "The padding is 0 as it is loaded, and 0 − mean after the mean is taken off. What "
            "does its square do in the sum?",
        ),
        Misconception(
            "dividing by the length of the tile",
            _variance("divide by BN"),
            "The sum is right, for zeros add nothing. But how many numbers were added up?",
        ),
        Misconception(
            "rounding a power of two up to the next",
            _variance("always double"),
            "A row of 8 fits into a tile of 8. Half of a tile of 16 would be idle.",
        ),
        Misconception(
            "rounding down",
            _variance("round down"),
            "A tile that is too short holds only the beginning of the row.",
        ),
        Misconception(
            "a range that is no power of two",
            _variance("no power"),
            "PyTorch takes any length, tl.arange does not: a tile is spread evenly over threads, "
            "whose number is a power of two.",
        ),
        Misconception(
            "a tile of sixteen for every row",
            _variance("at least 16"),
            "Sixteen is what a dot asks for. A range may be as short as 1.",
        ),
        Misconception(
            "dividing by N − 1",
            _variance("unbiased"),
            "That estimates the variance of what the row was drawn from. Here it is the mean of "
            "the squares.",
        ),
    ),
    cases=(
        Case("three numbers", lambda: (torch.tensor([1.0, 2.0, 6.0]),)),
        Case("a power of two", lambda: (torch.tensor([1.0, 3.0, 5.0, 7.0]),)),
        Case("one number", lambda: (torch.tensor([4.0]),)),
        Case("37 numbers far from 0", lambda: (5 + _random(37, seed=3),)),
    ),
)


# -- tiled_statistics --


def tiled_statistics(x: Tensor, BN: int) -> tuple[Tensor, Tensor]:
    """The largest of each row of x [R, N] and the sum of exp(x - largest), BN columns at a time."""
    R, N = x.shape
    scores_max = torch.full((R,), -torch.inf)
    running_sum = torch.zeros(R)
    for start in range(0, N, BN):
        columns = start + torch.arange(BN)  # [BN]
        x_tile = x[:, columns.clamp(max=N - 1)]  # [R, BN]
        x_tile = x_tile.masked_fill(columns >= N, -torch.inf)
        scores_max_prev = scores_max
        scores_max = torch.maximum(scores_max_prev, x_tile.amax(1))
        scores_scale = torch.exp2((scores_max_prev - scores_max) * LOG2_E)
        weights = torch.exp2((x_tile - scores_max[:, None]) * LOG2_E)  # [R, BN]
        running_sum = running_sum * scores_scale + weights.sum(1)
    return scores_max, running_sum


def _statistics(change: str) -> Callable:
    def wrong(x: Tensor, BN: int) -> tuple[Tensor, Tensor]:
        R, N = x.shape
        factor = 1.0 if change == "base" else LOG2_E
        scores_max = torch.full((R,), 0.0 if change == "start" else -torch.inf)
        running_sum = torch.zeros(R)
        for start in range(0, N, BN):
            columns = start + torch.arange(BN)
            x_tile = x[:, columns.clamp(max=N - 1)]
            if change == "zeros":
                x_tile = x_tile.masked_fill(columns >= N, 0.0)
            elif change != "no mask":
                x_tile = x_tile.masked_fill(columns >= N, -torch.inf)
            scores_max_prev = scores_max
            tile_max = x_tile.amax(1)
            both = torch.maximum(scores_max_prev, tile_max)
            scores_max = tile_max if change == "own max" else both
            scale = torch.exp2((scores_max_prev - scores_max) * factor)
            if change == "no rescale":
                scale = torch.ones_like(scale)
            weights = torch.exp2((x_tile - scores_max[:, None]) * factor)
            running_sum = running_sum * scale + weights.sum(1)
            if change == "first":
                break
        return scores_max, running_sum

    return wrong


_STATISTICS = Exercise(
    name="tiled_statistics",
    statement="""
The chapter's softmax holds a whole row in one tile. For a row that is too long for that, walk over
it with chapter 03's step: `x` `[R, N]` in tiles of `BN` columns, all `R` rows at once. Return
`(scores_max, running_sum)`, both `[R]`: the largest of each row, and the sum of
`exp(x - scores_max)`. Powers are `exp2((… - …) * LOG2_E)`, subtract first. Every tile has `BN`
columns; those past the end of the row must not count. One pass: each tile is loaded once. (`LOG2_E`
is in `nsa_tutorial.exact.online_softmax`.)
""",
    minutes=7,
    difficulty=2,
    solution=tiled_statistics,
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "adding sums that are measured from different maxima",
            _statistics("no rescale"),
            "When the maximum moves, everything added so far was measured from the old one. "
            "Chapter 03 calls the factor scores_scale.",
        ),
        Misconception(
            "forgetting the earlier tiles' maximum",
            _statistics("own max"),
            "A later tile may be lower than all before it; the row's largest is the largest of "
            "both.",
        ),
        Misconception(
            "padding with zeros",
            _statistics("zeros"),
            "exp(0 − scores_max) is not 0. Which number vanishes under exp, and never is the "
            "largest?",
        ),
        Misconception(
            "counting columns past the end",
            _statistics("no mask"),
            "The last tile has BN columns, and fewer of them are in x. An address that is legal "
            "is not yet an element that counts.",
        ),
        Misconception(
            "a maximum that starts at 0",
            _statistics("start"),
            "In a row of negative numbers 0 is larger than all of them. What is the largest of "
            "nothing?",
        ),
        Misconception(
            "powers of two where powers of e are meant",
            _statistics("base"),
            "exp(x) is exp2(x · LOG2_E).",
        ),
        Misconception(
            "reading the first tile only",
            _statistics("first"),
            "The program is one, the tiles of its row are several: the loop is inside the program.",
        ),
    ),
    cases=(
        Case("one row that rises", lambda: (torch.tensor([[1.0, 2.0, 3.0]]), 2)),
        Case("one row that falls, all negative", lambda: (torch.tensor([[-1.0, -2.0, -5.0]]), 2)),
        Case("one tile, exactly full", lambda: (_random(2, 4, seed=4), 4)),
        Case("three rows of 37 in tiles of 8", lambda: (_random(3, 37, seed=5, factor=4.0), 8)),
    ),
)


# -- row_sums --

_BR, _BN = 4, 16


def row_sums(language: str) -> object:
    """The kernel that sums each row of X [R, N] to Y [R]: in Triton, or as a TileLang function."""
    if language == "triton":

        @triton.jit
        def kernel(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr):
            rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
            acc = tl.zeros([BR], tl.float32)
            for step in tl.range(tl.cdiv(N, BN)):
                columns = step * BN + tl.arange(0, BN)  # [BN]
                in_bounds = (rows < R)[:, None] & (columns < N)  # [BR, BN]
                x_tile = tl.load(X + rows[:, None] * N + columns, mask=in_bounds, other=0.0)
                acc += tl.sum(x_tile, axis=1)
            tl.store(Y + rows, acc, mask=rows < R)

        return kernel

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
        from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

        _COMPILED[key] = (
            compile_for_cpu(kernel) if device == "cpu" else tilelang.compile(kernel, target="cuda")
        )
    return _COMPILED[key]


def _run_row_sums(solution: Callable, language: str, R: int, N: int) -> tuple[Tensor, str]:
    """Launch the kernel for `language` between guards: 1000s behind `X`, and numbers behind `Y`
    that must stay."""
    kernel = solution(language)
    name = {"triton": "Triton", "tilelang": "TileLang"}[language]
    if kernel is None:
        raise NotImplementedError(f"there is no {name} kernel yet")
    device = environment.detect().device
    guard = 4 * _BR * max(N, _BN)
    memory = torch.full((R * N + guard,), 1000.0, device=device)
    memory[: R * N] = _random(R * N, seed=R * N).to(device)
    results = torch.full((R + 64,), -77.0, device=device)
    x, y = memory[: R * N].view(R, N), results[:R]
    if language == "triton":
        if not hasattr(kernel, "run"):
            raise TypeError("the Triton kernel is not decorated with @triton.jit")
        kernel[-(-R // _BR),](x, y, R, N, BR=_BR, BN=_BN)
    else:
        _compiled(kernel, device)(x, y)
    intact = bool((results[R:] == -77.0).all() and (memory[R * N :] == 1000.0).all())
    return y.cpu(), "in bounds" if intact else "stored past the end of Y"


@triton.jit
def _wrong_sums(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr, MISTAKE: tl.constexpr):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    if MISTAKE == "ids count rows":
        rows = tl.program_id(0) + tl.arange(0, BR)
    acc = tl.zeros([BR], tl.float32)
    steps = tl.cdiv(N, BN)
    if MISTAKE == "first tile":
        steps = 1
    if MISTAKE == "full tiles":
        steps = N // BN
    for step in tl.range(steps):
        columns = step * BN + tl.arange(0, BN)
        in_bounds = (rows < R)[:, None] & (columns < N)
        if MISTAKE == "no mask":
            in_bounds = (rows >= 0)[:, None] & (columns >= 0)
        x_tile = tl.load(X + rows[:, None] * N + columns, mask=in_bounds, other=0.0)
        if MISTAKE == "last tile":
            acc = tl.sum(x_tile, axis=1)
        else:
            acc += tl.sum(x_tile, axis=1)
    if MISTAKE == "store":
        tl.store(Y + rows, acc)
    else:
        tl.store(Y + rows, acc, mask=rows < R)


class _Mistaken:
    """`_wrong_sums` with its mistake chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run = mistake, None

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_sums[grid](*args, MISTAKE=self.mistake, **sizes)


def _sums(mistake: str) -> Callable:
    """Wrong kernels: `mistake` in both languages, or in the one alone that lets you make it."""

    def wrong(language: str) -> object:
        if language == "triton":
            return row_sums(language) if mistake == "clear" else _Mistaken(mistake)
        if mistake in ("no mask", "store"):
            return row_sums(language)
        BR, BN = _BR, _BN
        R, N = T.dynamic("R"), T.dynamic("N")
        clear = mistake in ("last tile", "clear")
        stride = 1 if mistake == "ids count rows" else BR

        @T.prim_func
        def kernel(X: T.Tensor([R, N], "float32"), Y: T.Tensor([R], "float32")):
            with T.Kernel(T.ceildiv(R, BR), threads=128) as block:
                x_tile = T.alloc_fragment([BR, BN], "float32")
                acc = T.alloc_fragment([BR], "float32")
                start = block * stride
                steps = {"first tile": 1, "full tiles": N // BN}.get(mistake, T.ceildiv(N, BN))
                T.clear(acc)
                for step in T.serial(steps):
                    T.copy(X[start : start + BR, step * BN : step * BN + BN], x_tile)
                    T.reduce_sum(x_tile, acc, dim=1, clear=clear)
                T.copy(acc, Y[start : start + BR])

        return kernel

    return wrong


def _case(language: str, R: int, N: int, what: str) -> Case:
    name = {"triton": "Triton", "tilelang": "TileLang"}[language]
    return Case(
        f"{name}, {what}",
        lambda: (language, R, N),
        lambda: environment.detect().why_not(language, environment.detect().device),
    )


_SIZES = (
    (3, 16, "three rows of 16"),
    (1, 5, "one row of 5"),
    (4, 32, "four rows of 32"),
    (9, 37, "nine rows of 37"),
)

_ROW_SUMS = Exercise(
    name="row_sums",
    statement="""
Write one kernel in both languages: `Y[i]` becomes the sum of row `i` of `X` `[R, N]`, in fp32. A
program has `BR` = 4 rows and walks over them in tiles of `BN` = 16 columns; the grid is
`(cdiv(R, BR),)`.

`row_sums("triton")` returns a function decorated with `@triton.jit`,
`kernel(X, Y, R, N, BR: tl.constexpr, BN: tl.constexpr)`. `row_sums("tilelang")` returns a
`@T.prim_func` of `X: T.Tensor([R, N], "float32")` and `Y: T.Tensor([R], "float32")`, where
`R, N = T.dynamic("R"), T.dynamic("N")`, with its own `BR, BN = 4, 16`. The check launches both
(`return None` for a language that you leave for later; mistakes are named once both are there).
`T.reduce_sum(x_tile, acc, dim=1, clear=False)` adds to what `acc` holds.
""",
    minutes=15,
    difficulty=3,
    solution=row_sums,
    run=_run_row_sums,
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "summing the first tile only",
            _sums("first tile"),
            "A row of 37 has three tiles. One program walks over all of them.",
        ),
        Misconception(
            "keeping the last tile only",
            _sums("last tile"),
            "Each tile's sum has to join the sum so far, not to take its place.",
        ),
        Misconception(
            "letting T.reduce_sum clear the sum so far (TileLang)",
            _sums("clear"),
            "Unless told otherwise, T.reduce_sum writes over what acc holds. The statement names "
            "the option that adds.",
        ),
        Misconception(
            "leaving the ragged tail out",
            _sums("full tiles"),
            "N // BN counts full tiles. The rest of the row is a tile too, with fewer elements.",
        ),
        Misconception(
            "a missing mask on the load (Triton)",
            _sums("no mask"),
            "Past the end of a row lies the next row, and past the last one somebody else's "
            "memory: here, 1000s. In TileLang, T.copy put the bounds there for you.",
        ),
        Misconception(
            "a missing mask on the store (Triton)",
            _sums("store"),
            "The last program has a tile of four rows, and perhaps one row of X. The others were "
            "stored behind Y.",
        ),
        Misconception(
            "programs that begin one row apart",
            _sums("ids count rows"),
            "Program 1 begins where program 0 ends. How many rows does a program have?",
        ),
    ),
    cases=tuple(_case(language, *size) for language in ("triton", "tilelang") for size in _SIZES),
)

EXERCISES = (_OFFSETS, _REDUCTION, _VARIANCE, _STATISTICS, _ROW_SUMS)
