"""Exercises of chapter 09: what a program covers, masks, lengths that are no power of two, tiles of
a row, both languages."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Exercise, Misconception, Prediction, Trap
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

Slips = frozenset[str]


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
    slips: Slips, pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> list[int] | list[list[int]]:
    """`program_offsets` with slips."""
    if "thread" in slips:
        return [pid_m * N + pid_n]
    if "swap" in slips:
        pid_m, pid_n = pid_n, pid_m
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
        "The offsets are right. Can you put them into one list?",
    ),
)

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
    hints=(
        "Draw a C of 4 × 4 with its offsets 0 to 15, and cut it into tiles of 2 × 2. Which four "
        "offsets lie in the upper right tile?",
        "A tile is a table. Its row numbers begin at an id times a side of the tile, and so do its "
        "column numbers. An element's offset needs one number of each.",
        "Make the row numbers `[BM]` and the column numbers `[BN]` with `torch.arange`. "
        "Broadcasting `[BM, 1]` against `[BN]` gives the table of offsets, and a table of what "
        "exists. Keep the offsets that exist, as a list.",
    ),
    why="A program knows nothing but its ids, so where it works, and what it must not touch, both "
    "have to follow from them.",
    solution=program_offsets,
    misconceptions=_OFFSETS_MISTAKES,
    combine=together(
        _OFFSETS_MISTAKES,
        {"thread", "starts"},
        {"thread", "swap"},
        {"thread", "one row"},
        {"thread", "table"},
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


# -- masked_reduction --


def masked_reduction(memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
    """The sum and the largest of the elements of X that the program's tile holds; X is the first N
    elements of memory."""
    columns = program * BN + torch.arange(BN)  # [BN]
    in_bounds = columns < N
    x_tile = memory[torch.where(in_bounds, columns, 0)]  # [BN], a masked address must exist here
    total = torch.where(in_bounds, x_tile, 0.0).sum()
    return total, torch.where(in_bounds, x_tile, -torch.inf).max()


def _reduced(slips: Slips, memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
    """`masked_reduction` with slips."""
    places = torch.arange(BN)
    columns = places if "first tile" in slips else program * BN + places
    last = N if "one more" in slips else N - 1
    in_bounds = (places if "places" in slips else columns) <= last
    if "cut" in slips:
        memory, legal = memory[:N], columns
    elif "clamp" in slips:
        legal, in_bounds = columns.clamp(max=last), places >= 0
    elif "none" in slips:
        legal, in_bounds = columns, places >= 0
    else:
        legal = torch.where(in_bounds, columns, 0)
    x_tile = memory[legal]
    total = torch.where(in_bounds, x_tile, -torch.inf if "-inf" in slips else 0.0).sum()
    return total, torch.where(in_bounds, x_tile, 0.0 if "zeros" in slips else -torch.inf).max()


_REDUCTION_MISTAKES = (
    Misconception(
        "a missing mask",
        slip(_reduced, "none"),
        "The tile goes on behind X, and the memory there is somebody's. Nothing stops the load. "
        "Which of the tile's places hold an element of X?",
    ),
    Misconception(
        "an address past the end of X",
        slip(_reduced, "cut"),
        "PyTorch says so, a GPU loads whatever lies there. Which address can a masked place have "
        "that does exist?",
    ),
    Misconception(
        "masking places of the tile instead of positions in X",
        slip(_reduced, "places"),
        "Place 0 of program 2's tile is not element 0 of X. Which number has to be compared with "
        "N?",
    ),
    Misconception(
        "zeros where the maximum needs −∞",
        slip(_reduced, "zeros"),
        "If all numbers are negative, 0 is the largest. What must a masked element hold so that "
        "it changes no maximum?",
    ),
    Misconception(
        "−∞ where the sum needs zeros",
        slip(_reduced, "-inf"),
        "One −∞ makes the whole sum −∞. What must a masked element hold so that it changes no sum?",
    ),
    Misconception(
        "letting one element too many in",
        slip(_reduced, "one more"),
        "X has N elements, and the first has number 0. Which number has the last?",
    ),
    Misconception(
        "loading the last element again for every place past the end",
        slip(_reduced, "clamp"),
        "That keeps every address legal, and the maximum right. What does the sum count?",
    ),
    Misconception(
        "giving every program the first tile",
        slip(_reduced, "first tile"),
        "All programs run the same code and differ in one number. Where does the tile of program "
        "1 begin?",
    ),
)

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
    hints=(
        "Take program 1 of five elements in tiles of 4. Which of its four places hold an element "
        "of X, and what lies in memory at the others?",
        "The mask works twice. It keeps the load at an address that exists, and it decides what a "
        "masked place holds in each reduction. Is that the same number for a sum and for a "
        "maximum?",
        "Compute each place's position in X, and compare it with `N`. One `torch.where` makes the "
        "addresses legal. Two more put the number that changes nothing into the masked places, "
        "one before `sum` and one before `max`.",
    ),
    why="A mask on the load makes the address legal, and the masked element is still there: each "
    "reduction needs it to hold the number that changes nothing.",
    solution=masked_reduction,
    misconceptions=_REDUCTION_MISTAKES,
    combine=together(
        _REDUCTION_MISTAKES,
        {"none", "clamp", "places", "cut"},
        {"none", "one more", "cut"},
        {"none", "clamp", "zeros"},
        {"none", "clamp", "-inf"},
        {"cut", "zeros"},
        {"cut", "-inf"},
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


def padded_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """`(squares, variance)` of a row x [N]: the squared differences from its mean on a tile of BN
    elements, the smallest power of two that holds the row, and their mean over the row."""
    N = len(x)
    BN = 1
    while BN < N:
        BN *= 2
    in_bounds = torch.arange(BN) < N
    x_tile = torch.cat([x, x.new_zeros(BN - N)])  # [BN], what a masked load gives
    mean = x_tile.sum() / N
    # padding is no longer 0 once the mean is taken off
    squares = torch.where(in_bounds, (x_tile - mean) ** 2, 0.0)  # [BN]
    return squares, squares.sum() / N


def _variance(slips: Slips, x: Tensor) -> tuple[Tensor, Tensor]:
    """`padded_variance` with slips."""
    N = len(x)
    BN = 1 << (N - 1).bit_length()
    if "always double" in slips:
        BN = 1 << N.bit_length()
    if "round down" in slips:
        BN = 1 << (N.bit_length() - 1)
    if "no tile" in slips:
        BN = N
    if "at least 16" in slips:
        BN = max(16, BN)
    x_tile = torch.cat([x, x.new_zeros(max(0, BN - N))])[:BN]
    mean = x_tile.sum() / (BN if slips & {"both by BN", "mean by BN"} else N)
    difference = x_tile - mean
    if "padding" not in slips:
        difference = torch.where(torch.arange(BN) < N, difference, 0.0)
    squares = difference**2
    count = BN if slips & {"both by BN", "by BN"} else N - 1 if "unbiased" in slips else N
    variance = squares.sum() / count
    shown = difference if "not squared" in slips else squares
    if "left in the tile" in slips:
        shown = (x_tile - mean) ** 2
    return shown, variance.sqrt() if "root" in slips else variance


_VARIANCE_MISTAKES = (
    Misconception(
        "letting the padding into the variance",
        slip(_variance, "padding"),
        "The padding is 0 when it is loaded, and 0 − mean after the mean is taken off. What does "
        "its square do in the sum?",
    ),
    Misconception(
        "dividing by the length of the tile",
        slip(_variance, "both by BN"),
        "Zeros add nothing, so the sums may be right. But how many numbers were added up?",
    ),
    Misconception(
        "taking the mean over the whole tile",
        slip(_variance, "mean by BN"),
        "The sum is right, for zeros add nothing. But how many numbers were added up?",
    ),
    Misconception(
        "taking the squares' mean over the whole tile",
        slip(_variance, "by BN"),
        "The squares are right. How many of them belong to numbers of the row?",
    ),
    Misconception(
        "a row that lies in no tile",
        slip(_variance, "no tile"),
        "PyTorch takes any length, `tl.arange` powers of two only. What is the shortest tile that "
        "holds the row?",
    ),
    Misconception(
        "rounding a power of two up to the next",
        slip(_variance, "always double"),
        "Half of your tile is idle. Does a row of 4 need more than a tile of 4?",
    ),
    Misconception(
        "rounding down",
        slip(_variance, "round down"),
        "A tile that is too short holds only the beginning of the row. Which power of two is the "
        "first that is long enough?",
    ),
    Misconception(
        "a tile of sixteen for every row",
        slip(_variance, "at least 16"),
        "Sixteen is what a dot asks for, and there is none here. What is the shortest range?",
    ),
    Misconception(
        "dividing by N − 1",
        slip(_variance, "unbiased"),
        "That estimates the variance of what the row was drawn from. What is the mean of the "
        "squares?",
    ),
    Misconception(
        "a standard deviation",
        slip(_variance, "root"),
        "That is a step further than asked. What do you get before the root?",
    ),
    Misconception(
        "leaving something in the tile's masked places",
        slip(_variance, "left in the tile"),
        "The variance is right. What do the places past the end hold in `squares`?",
    ),
    Misconception(
        "giving the differences in place of their squares",
        slip(_variance, "not squared"),
        "The variance is right. What does it sum up?",
    ),
)

_VARIANCE = Exercise(
    name="padded_variance",
    statement="""
`tl.arange` takes powers of two only. A row `x` `[N]` of any length lies in a tile of `BN` elements,
the smallest power of two that is at least `N`; a masked load puts 0 into the places past the end.
Return `(squares, variance)`. `squares` is the tile `[BN]` of the squared differences from the row's
mean, with 0 in the places past the end. `variance` is the mean of the row's squares. Two passes
over the tile: the mean, then the differences. What do the places past the end hold after the first?
""",
    minutes=5,
    difficulty=2,
    hints=(
        "Compute it by hand for 1, 2, 6 in a tile of 4: the mean, the tile less the mean, and its "
        "squares. What stands in the fourth place?",
        "Zeros change no sum, so the first pass needs no mask. After the mean is taken off, the "
        "padding is zero no longer. And a mean counts numbers, not places.",
        "Start from 1 and double until the row fits. Fill up with zeros (`torch.cat`, or "
        "`torch.nn.functional.pad`), and divide both sums by `N`. One `torch.where` over the "
        "squares puts the zeros back.",
    ),
    why="The 0 of a masked load is neutral for the next sum only: whatever is computed in between "
    "may change it, so it is masked again before the next reduction.",
    solution=padded_variance,
    misconceptions=_VARIANCE_MISTAKES,
    combine=together(
        _VARIANCE_MISTAKES,
        {"no tile", "always double", "round down", "at least 16"},
        {"both by BN", "by BN", "unbiased"},
        {"both by BN", "mean by BN"},
        {"no tile", "padding"},
        {"no tile", "left in the tile"},
        {"padding", "left in the tile"},
        {"not squared", "left in the tile"},
        {"no tile", "both by BN"},
        {"no tile", "by BN"},
        {"no tile", "mean by BN"},
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


def _statistics(slips: Slips, x: Tensor, BN: int) -> tuple[Tensor, Tensor]:
    """`tiled_statistics` with slips."""
    R, N = x.shape
    factor = 1.0 if "base" in slips else LOG2_E

    def power(a: Tensor, b: Tensor) -> Tensor:
        if "power first" in slips:
            return torch.exp2(a * factor) / torch.exp2(b * factor)
        return torch.exp2((a - b) * factor)

    scores_max = torch.full((R,), 0.0 if "start" in slips else -torch.inf)
    running_sum = torch.zeros(R)
    end = BN if "first" in slips else N // BN * BN if "full tiles" in slips else N
    for start in range(0, end, BN):
        columns = start + torch.arange(BN)
        x_tile = x[:, columns.clamp(max=N - 1)]
        if "no mask" not in slips:
            x_tile = x_tile.masked_fill(columns >= N, 0.0 if "zeros" in slips else -torch.inf)
        scores_max_prev, tile_max = scores_max, x_tile.amax(1)
        scores_max = torch.maximum(scores_max_prev, tile_max)
        if "own max" in slips:
            scores_max = tile_max
        scores_scale = power(scores_max_prev, scores_max)
        if "no rescale" in slips:
            scores_scale = torch.ones(R)
        if "inverse" in slips:
            scores_scale = power(scores_max, scores_max_prev)
        weights = power(x_tile, (tile_max if "own powers" in slips else scores_max)[:, None])
        running_sum = running_sum * scores_scale + weights.sum(1)
    return scores_max, running_sum


_STATISTICS_MISTAKES = (
    Misconception(
        "adding sums that are measured from different maxima",
        slip(_statistics, "no rescale"),
        "When the maximum moves, everything added so far was measured from the old one. Which "
        "factor carries it over (chapter 03's `scores_scale`), and is the old maximum still there "
        "when you compute it?",
    ),
    Misconception(
        "a factor the wrong way round",
        slip(_statistics, "inverse"),
        "When the maximum grows, what was added before has to become smaller. Which of the two "
        "maxima is taken off which?",
    ),
    Misconception(
        "measuring each tile's powers from the tile's own maximum",
        slip(_statistics, "own powers"),
        "The sum so far was carried over to the row's largest. From which maximum are the new "
        "powers measured?",
    ),
    Misconception(
        "forgetting the earlier tiles' maximum",
        slip(_statistics, "own max"),
        "A later tile may be lower than all before it. What is the largest of both?",
    ),
    Misconception(
        "padding with zeros",
        slip(_statistics, "zeros"),
        "0 is a score like any other, and exp(0 − scores_max) is not 0. Which number vanishes "
        "under exp, and never is the largest?",
    ),
    Misconception(
        "counting columns past the end",
        slip(_statistics, "no mask"),
        "The last tile has BN columns, and fewer of them are in x. The address is legal. Does the "
        "element count?",
    ),
    Misconception(
        "leaving the ragged tile out",
        slip(_statistics, "full tiles"),
        "N // BN counts full tiles. In which tile is the last column of a row of 3 in tiles of 2?",
    ),
    Misconception(
        "a maximum that starts at 0",
        slip(_statistics, "start"),
        "In a row of negative numbers 0 is larger than all of them. What is the largest of "
        "nothing?",
    ),
    Misconception(
        "powers of two where powers of e are meant",
        slip(_statistics, "base"),
        "`exp2(x)` is 2 to the power x. By what do you multiply x to get e to the power x?",
    ),
    Misconception(
        "powers before the maximum is taken off",
        slip(_statistics, "power first"),
        "e to the power 200 is more than fp32 holds, and infinity divided by infinity is NaN. What "
        "is the largest exponent if you subtract first?",
    ),
    Misconception(
        "reading the first tile only",
        slip(_statistics, "first"),
        "One program has all the tiles of its rows. Where is the loop over them?",
    ),
)

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
    hints=(
        "Take the row 1, 2, 3 in tiles of two. After the first tile the largest is 2, and the sum "
        "is e⁻¹ + 1. What has to happen to this sum when 3 arrives?",
        "It is chapter 03's step for all rows at once: the new maximum, a factor that carries the "
        "old sum over to it, and the powers of this tile. A place past the end must give the "
        "power 0.",
        "Begin with −∞ and 0, one number for each row. In each turn, load `BN` columns (`clamp` "
        "keeps the addresses legal), hide those past the end, and take `torch.maximum` of the old "
        "maximum and the tile's. Then scale the sum by 2 to the power of old minus new, and add "
        "the tile's powers.",
    ),
    why="A sum of powers means something only beside the maximum that it was measured from, so the "
    "two walk along the row together, and two numbers a row are all that a program has to keep.",
    solution=tiled_statistics,
    tolerance=1e-4,
    misconceptions=_STATISTICS_MISTAKES,
    combine=together(
        _STATISTICS_MISTAKES,
        {"no rescale", "inverse"},
        {"zeros", "no mask", "full tiles", "first"},
        {"own max", "own powers", "start"},
    ),
    cases=(
        Case("one row that rises", lambda: (torch.tensor([[1.0, 2.0, 3.0]]), 2)),
        Case("one row that falls, all negative", lambda: (torch.tensor([[-1.0, -2.0, -5.0]]), 2)),
        Case("one tile, exactly full", lambda: (_random(2, 4, seed=4), 4)),
        Case("a row of large numbers", lambda: (torch.tensor([[200.0, 199.0, 201.0]]), 2)),
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
    stride = N
    if MISTAKE == "by tile":
        stride = BN
    for step in tl.range(steps):
        columns = step * BN + tl.arange(0, BN)
        in_bounds = (rows < R)[:, None] & (columns < N)
        if MISTAKE == "no mask":
            in_bounds = (rows >= 0)[:, None] & (columns >= 0)
        x_tile = tl.load(X + rows[:, None] * stride + columns, mask=in_bounds, other=0.0)
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
        if mistake in ("no mask", "store", "by tile"):
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


def _only(written: str) -> Callable:
    """The right kernel in one language, and none in the other."""
    return lambda language: row_sums(language) if language == written else None


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
    (8, 16, "eight rows of 16"),
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
(`return None` for a language that you leave for later).
`T.reduce_sum(x_tile, acc, dim=1, clear=False)` adds to what `acc` holds.
""",
    minutes=15,
    difficulty=3,
    hints=(
        "Follow one program of 4 rows along rows of 37. How many tiles of 16 does it take, and "
        "what has to outlive each of them?",
        "Both kernels have three phases: locate the rows, a loop that adds the sums of a tile to "
        "`acc` `[BR]`, and one store. Triton asks you for a mask on each load and store. TileLang "
        "has slices, and `T.copy` puts the bounds there.",
        "Take the rows from the chapter's softmax, and the loop from its matrix product. Fill "
        "`acc` with zeros before the loop (`tl.zeros`, `T.clear`). Sum each tile along axis 1, "
        "with zeros in its masked places. Store `acc` behind the loop.",
    ),
    why="Rows do not depend on each other, so they are dealt out to programs; the tiles of a row "
    "add up, so they are a loop inside one.",
    solution=row_sums,
    run=_run_row_sums,
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "summing the first tile only",
            _sums("first tile"),
            "A row of 37 has three tiles of 16. Which program walks over the other two?",
        ),
        Misconception(
            "keeping the last tile only",
            _sums("last tile"),
            "Each tile's sum takes the place of the one before. What should it do with the sum so "
            "far?",
        ),
        Misconception(
            "letting `T.reduce_sum` clear the sum so far (TileLang)",
            _sums("clear"),
            "Unless told otherwise, `T.reduce_sum` writes over what `acc` holds. Which option of "
            "the statement makes it add?",
        ),
        Misconception(
            "leaving the ragged tail out",
            _sums("full tiles"),
            "N // BN counts full tiles. In which tile is the last number of a row of 5?",
        ),
        Misconception(
            "a missing mask on the load (Triton)",
            _sums("no mask"),
            "Past the end of a row lies the next row, and past the last one somebody else's "
            "memory: here, 1000s. In TileLang, `T.copy` put the bounds there for you. Which two "
            "bounds has a tile?",
        ),
        Misconception(
            "a missing mask on the store (Triton)",
            _sums("store"),
            "The last program has a tile of four rows, and perhaps one row of X. Where were the "
            "others stored?",
        ),
        Misconception(
            "stepping to the next row by the width of the tile (Triton)",
            _sums("by tile"),
            "The tile is a window into X. How many numbers of X do you pass from one row to the "
            "next?",
        ),
        Misconception(
            "programs that begin one row apart",
            _sums("ids count rows"),
            "Program 1 begins where program 0 ends. How many rows does a program have?",
        ),
        Misconception(
            "leaving TileLang for later",
            _only("triton"),
            "Which slices of X and Y say the same as your Triton kernel's addresses and masks?",
        ),
        Misconception(
            "leaving Triton for later",
            _only("tilelang"),
            "Which addresses and masks say the same as your TileLang kernel's slices?",
        ),
    ),
    cases=(
        # one more for Triton: a kernel that fails throughout is told before the language to come
        _case("triton", 4, 16, "one full tile"),
        *(_case(language, *size) for language in ("triton", "tilelang") for size in _SIZES),
    ),
)

EXERCISES = (_OFFSETS, _REDUCTION, _VARIANCE, _STATISTICS, _ROW_SUMS)


# -- two mistakes at once --


def _tile_of_c_without_ids_or_mask(
    pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> list[int]:
    return [(pid_m + i) * N + pid_n + j for i in range(BM) for j in range(BN)]


def _up_to_the_last_offset(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list[int]:
    tile = [(pid_m * BM + i) * BN + pid_n * BN + j for i in range(BM) for j in range(BN)]
    return [offset for offset in tile if offset < M * N]


def _zeros_everywhere(memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
    x_tile = memory[program * BN : program * BN + BN] * (torch.arange(BN) < N)
    return x_tile.sum(), x_tile.max()


def _one_more_of_zeros(memory: Tensor, N: int, program: int, BN: int) -> tuple[Tensor, Tensor]:
    columns = torch.arange(program * BN, program * BN + BN)
    x_tile = torch.where(columns > N, 0.0, memory[columns])
    return x_tile.sum(), x_tile.max()


def _torchs_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    squares = (x - x.mean()) ** 2
    return squares, squares.sum() / (len(x) - 1)  # as `x.var()`


def _mean_of_the_tile(x: Tensor) -> tuple[Tensor, Tensor]:
    BN = 2 ** math.ceil(math.log2(len(x)))
    x_tile = torch.nn.functional.pad(x, (0, BN - len(x)))
    squares = (x_tile - x_tile.mean()) ** 2
    return squares, squares.sum() / len(x)


def _plain_sum_of_zeros(x: Tensor, BN: int) -> tuple[Tensor, Tensor]:
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % BN))
    scores_max, running_sum = x[:, 0], torch.zeros(len(x))
    for x_tile in x.split(BN, 1):
        scores_max = torch.maximum(scores_max, x_tile.amax(1))
        running_sum = running_sum + (x_tile - scores_max[:, None]).exp().sum(1)
    return scores_max, running_sum


def _base_two_from_zero(x: Tensor, BN: int) -> tuple[Tensor, Tensor]:
    scores_max, running_sum = torch.zeros(len(x)), torch.zeros(len(x))
    for x_tile in x.split(BN, 1):
        new = torch.maximum(scores_max, x_tile.amax(1))
        running_sum = running_sum * torch.exp2(scores_max - new)
        running_sum += torch.exp2(x_tile - new[:, None]).sum(1)
        scores_max = new
    return scores_max, running_sum


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
        "masked_reduction",
        _zeros_everywhere,
        (
            "masking places of the tile instead of positions in X",
            "zeros where the maximum needs −∞",
        ),
    ),
    Double(
        "masked_reduction",
        _one_more_of_zeros,
        ("letting one element too many in", "zeros where the maximum needs −∞"),
    ),
    Double(
        "padded_variance",
        _torchs_variance,
        ("a row that lies in no tile", "dividing by N − 1"),
    ),
    Double(
        "padded_variance",
        _mean_of_the_tile,
        ("letting the padding into the variance", "taking the mean over the whole tile"),
    ),
    Double(
        "tiled_statistics",
        _plain_sum_of_zeros,
        ("adding sums that are measured from different maxima", "padding with zeros"),
    ),
    Double(
        "tiled_statistics",
        _base_two_from_zero,
        ("a maximum that starts at 0", "powers of two where powers of e are meant"),
    ),
    Double(
        "row_sums",
        lambda language: _sums("store")(language) if language == "triton" else None,
        ("a missing mask on the store (Triton)", "leaving TileLang for later"),
    ),
)


# -- what the chapter warns of --

TRAPS = (
    Trap(
        "three of them past the end of the tensor, and a **mask** keeps those from touching memory",
        "masked_reduction",
        "a missing mask",
    ),
    Trap("**A program is not a thread.**", "program_offsets", "taking a program for a thread"),
    Trap(
        "together they have to store every element exactly once: nobody checks that for you",
        "program_offsets",
        "forgetting that ids count tiles",
    ),
    Trap(
        "what happens without the mask?",
        "program_offsets",
        "a missing mask",
    ),
    Trap(
        "In PyTorch that would be an `IndexError`.",
        "masked_reduction",
        "an address past the end of X",
    ),
    Trap(
        "A GPU loads whatever is there, and stores over whatever is there",
        "row_sums",
        "a missing mask on the store (Triton)",
    ),
    Trap(
        "A missing mask is among the commonest mistakes in this kind of program",
        "row_sums",
        "a missing mask on the load (Triton)",
    ),
    Trap(
        "`tl.arange` takes nothing but powers of two",
        "padded_variance",
        "a row that lies in no tile",
    ),
    Trap(
        "the smallest power of two that is at least `N`",
        "padded_variance",
        "rounding a power of two up to the next",
    ),
    Trap(
        "`BN` the smallest power of two that is at least `N` (`tiles.softmax` takes 16 at least)",
        "padded_variance",
        "a tile of sixteen for every row",
    ),
    Trap(
        "The three zeros have joined the sum: 0 is a score like any other.",
        "tiled_statistics",
        "padding with zeros",
    ),
    Trap(
        "The load's mask made the *address* legal; it did not make the masked element disappear.",
        "masked_reduction",
        "loading the last element again for every place past the end",
    ),
    Trap(
        "it did not make the masked element disappear",
        "padded_variance",
        "letting the padding into the variance",
    ),
    Trap(
        "Before a reduction, each masked element gets the number that changes nothing",
        "masked_reduction",
        "zeros where the maximum needs −∞",
    ),
    Trap(
        "which for a maximum and for a sum of powers is $-\\infty$",
        "masked_reduction",
        "−∞ where the sum needs zeros",
    ),
    Trap(
        "The exponent is the course's usual one (chapter 03), subtract first",
        "tiled_statistics",
        "powers before the maximum is taken off",
    ),
    Trap(
        "subtract first, then to base two",
        "tiled_statistics",
        "powers of two where powers of e are meant",
    ),
    Trap(
        "A tensor `[R, N]` lies in memory row after row, so element (i, j) has offset `i * N + j`",
        "program_offsets",
        "stepping to the next row by the width of the tile",
    ),
    Trap(
        "The grid has two axes, one for tiles of rows and one for tiles of columns.",
        "program_offsets",
        "walking along the wrong axis",
    ),
    Trap(
        "The launch is a grid, the walk is a loop",
        "tiled_statistics",
        "reading the first tile only",
    ),
    Trap(
        "what may run in any order is a program, what adds up is a loop inside one",
        "row_sums",
        "summing the first tile only",
    ),
    Trap(
        "`acc`, the sum so far, never leaves the registers",
        "row_sums",
        "keeping the last tile only",
    ),
    Trap(
        "The last program of the grid is the one with ragged ends on all sides",
        "program_offsets",
        "masking only past the end of the memory",
    ),
    Trap(
        "the old maximum has to be copied before",
        "tiled_statistics",
        "adding sums that are measured from different maxima",
    ),
    Trap(
        "`T.reduce_max(..., clear=False)` takes the larger of old and new",
        "tiled_statistics",
        "forgetting the earlier tiles' maximum",
    ),
    Trap(
        "`T.reduce_max(..., clear=False)`",
        "row_sums",
        "letting `T.reduce_sum` clear the sum so far (TileLang)",
    ),
    Trap(
        "ragged ends are masked twice, once for the address and once for the value that must not "
        "count",
        "tiled_statistics",
        "counting columns past the end",
    ),
)


# -- predictions --

PREDICTIONS = (
    Prediction(
        "programs_of_matmul",
        "C of 4,096 × 4,096 in tiles of 64 × 64: how many programs compute it?",
        "C has 64 tiles along each side, and each tile is one program.",
        (
            (64, "64 tiles lie along one side of C. How many lie in all of it?"),
            (128, "64 along one side plus 64 along the other. Tiles fill an area."),
            (16_777_216, "That is one for each element of C. A program owns a whole tile."),
            (262_144, "64³ counts the steps along K as well. They are a loop inside a program."),
            (8192, "Both sides in one: 4,096 + 4,096. Count tiles, along each side."),
        ),
    ),
    Prediction(
        "loads_of_a",
        "How often is each element of A loaded, over all programs?",
        "Each of the 64 columns of tiles of C needs all of A, and no program hands what it has "
        "loaded to another one.",
        (
            (1, "Once would do if programs shared what they load. Each loads its own strip."),
            (4096, "Once for each column of C. But one load serves all 64 columns of a tile."),
            (128, "64 times, and B as often. They are not added up for one element."),
            (2, "Two programs side by side share a strip of A. How many stand side by side?"),
        ),
    ),
    Prediction(
        "numbers_in_a_thread",
        "128 threads share a fragment of 64 × 64 numbers: how many does one thread hold?",
        "4,096 numbers are dealt out evenly to 128 threads.",
        (
            (4096, "That is the whole fragment, and no thread holds it."),
            (64, "That is a row of the fragment. There are twice as many threads as rows."),
            (1, "With 4,096 threads. This program has 128."),
            (128, "32 numbers of fp32 are 128 bytes. The numbers were asked for."),
        ),
    ),
)
