"""Exercises of chapter 05: from a list to tokens, a load behind a guard, the whole walk, a small
kernel with two bugs, and the window."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- tokens_of_list --


def tokens_of_list(
    ids: list[int], position: int, M: int, block_size: int, causal: bool
) -> list[int]:
    """Positions of all keys that a query sees through its list, slot by slot."""
    num_visible = position + 1 if causal else M
    tokens = []
    for block_id in ids:
        block_start = block_id * block_size
        if block_id >= 0 and block_start < num_visible:  # the guard
            tokens += range(block_start, min(block_start + block_size, num_visible))
    return tokens


def _tokens(
    slips: Slips, ids: list[int], position: int, M: int, block_size: int, causal: bool
) -> list[int]:
    """`tokens_of_list` with slips."""
    causal = (causal or "always causal" in slips) and "no causality" not in slips
    num_visible = position + ("not itself" not in slips) if causal else M
    num_visible += "one too many" in slips or ("one too late" in slips and causal)
    tokens = []
    for block_id in sorted(ids) if "sorted" in slips else ids:
        if block_id < 0 and "stop" in slips:
            break
        if block_id < 0 and "wrap" in slips:
            block_id += -(-M // block_size)
        if block_id < 0 and "clamped" in slips:
            block_id = 0
        if block_id < 0 and "negative" not in slips:
            continue
        if block_id == 0 and "zero is empty" in slips:
            continue
        start = block_id if "offset" in slips else block_id * block_size
        end, limit = start + block_size, num_visible
        is_cut = causal
        if causal and ("no cut" if start < num_visible else "future block") in slips:
            is_cut, limit = False, M
        runs_on = "no such block" in slips or ("past the end" in slips and start < M)
        if (runs_on and not is_cut) or "no limit" in slips:
            limit = end
        if "whole blocks" in slips:
            limit = end if end <= limit else 0
        if {"ids", "ids of the past"} & slips:
            tokens += [block_id] * ("ids" in slips or start < limit)
            continue
        tokens += range(start, min(end, limit))
    return tokens


def _draw_tokens(arguments: tuple, got: list[int], expected: list[int]) -> Picture:
    """Which tokens were taken, above those that should be; the lines are where blocks begin."""
    ids, position, M, block_size, _ = arguments
    first, last = min([0, *got]), max([M - 1, *got])
    counts = torch.tensor(
        [[taken.count(token) for token in range(first, last + 1)] for taken in (got, expected)]
    )
    figure, axes = new_figure(7.0, 1.9)
    axis = axes[0, 0]
    grid(axis, counts.numpy(), largest=1.0)
    axis.set_xticks(range(last - first + 1), range(first, last + 1))
    axis.set_yticks(range(2), ["yours", "expected"])
    axis.set_xlabel("token", fontsize=9)
    for block_start in range(0, M + 1, block_size):
        if first <= block_start <= last + 1:
            axis.axvline(block_start - first - 0.5, color=PALETTE["text"], linewidth=1)
    told = (
        f"{len(got)} tokens, not {len(expected)}"
        if len(got) != len(expected)
        else f"{len(got)} tokens, but others"
    )
    if sorted(got) == sorted(expected):
        told = "the right tokens, in another order"
    return Picture(figure, f"Query {position}, blocks of {block_size}, the list {ids}: {told}")


_TOKENS_MISTAKES = (
    Misconception(
        "taking an id for a token's position",
        slip(_tokens, "offset"),
        "An id counts blocks. At which token does block 2 begin if a block holds 4?",
    ),
    Misconception(
        "letting -1 wrap round to the last block",
        slip(_tokens, "wrap"),
        "In Python, index -1 is the last one, and the last block is mostly the future. "
        "What does -1 mean in a list?",
    ),
    Misconception(
        "turning -1 into negative positions",
        slip(_tokens, "negative"),
        "-1 times the block size is a position in front of the first token. What should an "
        "empty slot add to the list?",
    ),
    Misconception(
        "stopping at the first empty slot",
        slip(_tokens, "stop"),
        "`-1` may stand anywhere in the row. What if a block comes behind it?",
    ),
    Misconception(
        "taking id 0 for an empty slot",
        slip(_tokens, "zero is empty"),
        "Block 0 is the first block of the text, and only negative ids are empty. What "
        "does your comparison say about 0, or Python's `if block_id`?",
    ),
    Misconception(
        "showing all of a block that the query stands in",
        slip(_tokens, "no cut"),
        "A block that begins in the past may end in the future. How far may this query see?",
    ),
    Misconception(
        "cutting the own block but not a block further on",
        slip(_tokens, "future block"),
        "A listed block may lie in the future as a whole. What is its first token, and may "
        "the query see that one?",
    ),
    Misconception(
        "running past the last key",
        slip(_tokens, "past the end"),
        "Where the block size does not divide `M`, the last block is shorter. The causal "
        "cut hides that. What hides it without the cut?",
    ),
    Misconception(
        "showing keys that do not exist",
        slip(_tokens, "no such block"),
        "The last block may be short, and an id may lie past it. Without the causal cut, which "
        "number keeps the missing keys out?",
    ),
    Misconception(
        "taking every block whole, wherever it lies",
        slip(_tokens, "no limit"),
        "Some of these tokens lie in the future, or past the end of the text. How many keys may "
        "this query see, counted from key 0?",
    ),
    Misconception(
        "never looking at `causal`",
        slip(_tokens, "no causality"),
        "Every block is taken as far as the text goes. How far may the query see if `causal`?",
    ),
    Misconception(
        "showing one key too many",
        slip(_tokens, "one too late"),
        "A `range` leaves out its end. The last key that the query sees is its own: where does "
        "the range end then?",
    ),
    Misconception(
        "showing one key too many",
        slip(_tokens, "one too many"),
        "A `range` leaves out its end, and keys are counted from 0. Which is the last of 10 keys?",
    ),
    Misconception(
        "taking an empty slot for block 0",
        slip(_tokens, "clamped"),
        "-1 has become 0, so block 0 is shown although no slot lists it. What should an empty "
        "slot add to the list?",
    ),
    Misconception(
        "returning ids in place of tokens",
        slip(_tokens, "ids"),
        "These are blocks. The positions of the keys in them are asked for. Which tokens does "
        "block 2 hold?",
    ),
    Misconception(
        "returning ids in place of tokens",
        slip(_tokens, "ids of the past"),
        "These are blocks. The positions of the keys in them are asked for. Which tokens does "
        "block 2 hold?",
    ),
    Misconception(
        "hiding the query's own position from it",
        slip(_tokens, "not itself"),
        "A query sees itself: at position 0 there is one key, not none. How many keys are "
        "visible at position t?",
    ),
    Misconception(
        "keeping only blocks that are visible as a whole",
        slip(_tokens, "whole blocks"),
        "The visible part of a block counts, however short. What is left of the query's own block?",
    ),
    Misconception(
        "sorting the positions",
        slip(_tokens, "sorted"),
        "All keys are there. In which order do the slots stand?",
    ),
    Misconception(
        "cutting causally always",
        slip(_tokens, "always causal"),
        "With `causal=False` the query sees its listed blocks up to the end of the text. "
        "How many keys are visible then?",
    ),
)

_TOKENS = TEXTS.exercise(
    "tokens_of_list",
    minutes=7,
    difficulty=2,
    solution=tokens_of_list,
    misconceptions=_TOKENS_MISTAKES,
    combine=together(
        _TOKENS_MISTAKES,
        {"wrap", "negative", "stop", "clamped"},
        {"no cut", "whole blocks"},
        {"past the end", "no such block"},
        {"no limit", "no cut"},
        {"no limit", "future block"},
        {"no limit", "past the end"},
        {"no limit", "no such block"},
        {"no limit", "whole blocks"},
        {"no limit", "not itself"},
        {"no limit", "no causality"},
        {"no limit", "always causal"},
        {"no limit", "one too many"},
        {"no causality", "always causal", "not itself"},
        {"no causality", "no cut"},
        {"no causality", "future block"},
        {"one too many", "not itself"},
    ),
    cases=(
        Case("blocks of 4, the list [2, 0], query 9 of 12", lambda: ([2, 0], 9, 12, 4, True)),
        Case("an empty slot in front", lambda: ([-1, 1], 11, 12, 4, True)),
        Case("nothing but empty slots", lambda: ([-1, -1], 7, 12, 4, True)),
        Case("a block of the future, and its own", lambda: ([2, 1], 5, 12, 4, True)),
        Case(
            "block of 3, M = 10, not causal: the last block is short",
            lambda: ([3, 0], 4, 10, 3, False),
        ),
        Case("an id past the last block, not causal", lambda: ([4, 1, 9], 2, 10, 3, False)),
        Case("query 0", lambda: ([0], 0, 7, 4, True)),
    ),
    tolerance=0.0,
    picture=_draw_tokens,
)


# -- load_block --


def load_block(
    x: Tensor, block_id: int, num_visible: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """The block's rows [block_size, D], zeros where nothing may be loaded, and which are real."""
    offset = block_id * block_size + torch.arange(block_size)  # [BS]
    is_seen = (block_id >= 0) & (offset < num_visible)
    tile = x.new_zeros(block_size, x.shape[1])
    tile[is_seen] = x[offset[is_seen]]
    return tile, is_seen


def _load(slips: Slips, *arguments: object) -> object:
    """`load_block` with slips."""
    found = _load_rows(slips, *arguments)
    if found is None:
        return None
    tile, is_seen = found
    if "all seen" in slips:
        is_seen = torch.ones_like(is_seen)
    if "numbers" in slips:
        is_seen = is_seen.float()
    if "tile alone" in slips:
        return tile
    return (is_seen, tile) if "swapped" in slips else (tile, is_seen)


def _load_rows(
    slips: Slips, x: Tensor, block_id: int, num_visible: int, block_size: int
) -> tuple[Tensor, Tensor] | None:
    """What `_load` returns, but for the slips in how it is returned."""
    M = len(x)
    if "in place" in slips:
        x[num_visible:] = 0
    if block_id < 0 and "wrap" in slips:
        block_id += -(-M // block_size)
    start = block_id if "offset" in slips else block_id * block_size
    limit = num_visible + ("one too many" in slips)
    if "no cut" in slips or ("own block" in slips and start < limit):
        limit = M
    offset = start + torch.arange(block_size)
    takes_negative = {"negative index", "clamped"} & slips
    is_seen = (offset < limit) & ((offset >= 0) | bool(takes_negative))
    if ("whole or nothing" in slips and offset[-1] >= limit) or (
        "zero is empty" in slips and block_id == 0
    ):
        is_seen = torch.zeros_like(is_seen)
    if ("None for -1" in slips and block_id < 0) or (
        "None for nothing" in slips and not is_seen.any()
    ):
        return None
    told = offset < limit if "negative counts as seen" in slips else is_seen
    row = offset if "out of bounds" in slips else torch.where(offset < M, offset, 0)
    if "clamped" in slips:
        row = row.clamp(min=0)
    if "one too many" in slips:
        x[offset[is_seen]]  # an error where the row after the last is read
    rows = x[row]
    if "only the score" in slips:
        return rows, told
    if "columns" in slips:
        return rows.masked_fill(~is_seen, 0.0), told
    if "times the mask" in slips:
        return rows * is_seen[:, None], told
    if "nan_to_num" in slips:
        return x[offset.clamp(0, M - 1)].nan_to_num(0.0), told
    if "python's and" in slips and block_id < 0:
        return x.new_zeros(block_size, x.shape[1]), torch.tensor(False)
    if "shorter" in slips:
        return rows[is_seen], told
    if "row 0" in slips:
        return x[torch.where(is_seen, row, 0)], told
    nothing = -torch.inf if "minus infinity" in slips else 0.0
    return rows.masked_fill(~is_seen[:, None], nothing), told


def _run_load(attempt: Callable, x: Tensor, *arguments: int) -> object:
    """A tensor alone is told as that, and a mask along the columns, whatever the rows hold."""
    found = attempt(x, *arguments)
    tile, _ = load_block(x, *arguments)
    if isinstance(found, Tensor):
        return tile
    match found:
        case (Tensor() as given, Tensor() as mask) if given.shape == (len(tile), len(tile)):
            # no case has as many columns as a block has rows
            return torch.zeros(len(tile), len(tile)), mask
    return found


_LOAD_MISTAKES = (
    Misconception(
        "hiding the score, and loading the row all the same",
        slip(_load, "only the score"),
        "`is_seen` is right, and it will hide the score. But the hidden row sits in the "
        "tile, and is multiplied by a weight of 0 later. What is 0 · NaN?",
    ),
    Misconception(
        "laying the mask along the columns",
        slip(_load, "columns"),
        "A mask `[BS]` lies along the last axis, and these are the columns. Yours speaks of rows. "
        "Which axis does it need to become a column?",
    ),
    Misconception(
        "multiplying by the mask",
        slip(_load, "times the mask"),
        "0 · NaN is NaN, so a product does not remove a number. Which operation chooses "
        "between the row and a zero?",
    ),
    Misconception(
        "comparing with num_visible only",
        slip(_load, "clamped"),
        "Every negative position is below num_visible, so an empty slot counts as seen, and "
        "`clamp` loads row 0 for it. Which half of the guard is missing?",
    ),
    Misconception(
        "comparing with num_visible only",
        slip(_load, "negative index"),
        "Every negative position is below num_visible, and as an index it counts from the "
        "end. Which half of the guard is missing?",
    ),
    Misconception(
        "letting -1 wrap round to the last block",
        slip(_load, "wrap"),
        "-1 names no block. The last block is mostly the future, and the query would look "
        "ahead. What should an empty slot load?",
    ),
    Misconception(
        "counting the rows of an empty slot as seen",
        slip(_load, "negative counts as seen"),
        "The tile is right, but its zeros would enter the softmax with the score 0 and the "
        "weight e⁰. Are negative positions below num_visible?",
    ),
    Misconception(
        "loading one row too many",
        slip(_load, "one too many"),
        "The query sees `num_visible` rows, and the first one is row 0. Which is the last, and "
        "does your comparison say `<` or `<=`?",
    ),
    Misconception(
        "loading all of a block that the query stands in",
        slip(_load, "own block"),
        "A block that begins before `num_visible` may end behind it. Which of its rows may be "
        "loaded?",
    ),
    Misconception(
        "loading a block whole or not at all",
        slip(_load, "whole or nothing"),
        "The visible rows of a block count, however few. What is left of the query's own block?",
    ),
    Misconception(
        "taking id 0 for an empty slot",
        slip(_load, "zero is empty"),
        "Block 0 holds the first rows of the text, and only negative ids are empty. What does "
        "your comparison say about 0?",
    ),
    Misconception(
        "loading up to the end of the text, whatever the query may see",
        slip(_load, "no cut"),
        "Rows from num_visible on exist, but they are this query's future. Where does the "
        "load have to end?",
    ),
    Misconception(
        "taking the id for the first row",
        slip(_load, "offset"),
        "Block 1 does not begin at row 1. How many rows lie in front of it?",
    ),
    Misconception(
        "reading first and hiding afterwards",
        slip(_load, "out of bounds"),
        "Where the block runs past the end, there is no row to read. PyTorch raises an "
        "error, and a GPU reads whatever lies there. Which rows may be read at all?",
    ),
    Misconception(
        "making a tile with fewer rows",
        slip(_load, "shorter"),
        "A kernel's tile has a fixed shape of `block_size` rows. What stands in the rows "
        "that are not loaded?",
    ),
    Misconception(
        "turning NaN into 0 after the load",
        slip(_load, "nan_to_num"),
        "Memory that nobody has written may hold anything, also numbers that look real. "
        "What tells a real row from another, if not its value?",
    ),
    Misconception(
        "joining the two comparisons with Python's `and`",
        slip(_load, "python's and"),
        "`and` gives back one of its sides whole: for -1 a bare False, and not "
        "`block_size` of them. Which operator joins element by element?",
    ),
    Misconception(
        "filling the tile with −∞",
        slip(_load, "minus infinity"),
        "−∞ belongs in a score. In a key it is multiplied by a query. What is −∞ times a "
        "negative number?",
    ),
    Misconception(
        "leaving row 0 in the tile where nothing is seen",
        slip(_load, "row 0"),
        "Row 0 is safe to read, and `is_seen` is right. But hidden rows of the tile still hold "
        "numbers. What should stand there?",
    ),
    Misconception(
        "calling every row of the tile real",
        slip(_load, "all seen"),
        "The tile is right. But a row of zeros that counts as seen enters the softmax with the "
        "score 0 and the weight e⁰. Which rows are real?",
    ),
    Misconception(
        "returning numbers where a boolean mask is asked for",
        slip(_load, "numbers"),
        "The values are right. But as an index, 0 and 1 choose rows 0 and 1, and `~` does not turn "
        "them round. Which dtype does a comparison give?",
    ),
    Misconception(
        "returning no tile for an empty slot",
        slip(_load, "None for -1"),
        "The next step of a kernel takes a tile from every slot. What does a tile hold if "
        "nothing is loaded?",
    ),
    Misconception(
        "returning no tile where nothing is seen",
        slip(_load, "None for nothing"),
        "The next step of a kernel takes a tile from every slot. What does a tile hold if "
        "nothing is loaded?",
    ),
    Misconception(
        "returning the tile alone",
        slip(_load, "tile alone"),
        "The caller needs two tensors: the tile, and which of its rows are real. Why can it not "
        "tell a zero of yours from a real one?",
    ),
    Misconception(
        "returning `is_seen` before the tile",
        slip(_load, "swapped"),
        "Both are there. In which order does the statement ask for them?",
    ),
    Misconception(
        "writing into the tensor that you were given",
        slip(_load, "in place"),
        "Other queries see more rows of `x` than this one. Where can the zeros go instead?",
    ),
)

_LOAD = TEXTS.exercise(
    "load_block",
    minutes=9,
    difficulty=2,
    solution=load_block,
    run=_run_load,
    misconceptions=_LOAD_MISTAKES,
    combine=together(
        _LOAD_MISTAKES,
        {
            "only the score",
            "times the mask",
            "shorter",
            "minus infinity",
            "nan_to_num",
            "row 0",
            "columns",
        },
        {"out of bounds", "nan_to_num"},
        {"out of bounds", "row 0"},
        {"only the score", "negative index", "clamped", "wrap"},
        {"negative index", "clamped", "negative counts as seen"},
        {"no cut", "own block", "whole or nothing"},
        {"no cut", "one too many"},
        {"None for -1", "None for nothing", "wrap", "negative index", "clamped"},
        {"all seen", "negative counts as seen"},
        {"tile alone", "swapped"},
        {"tile alone", "numbers"},
        {"tile alone", "all seen"},
    ),
    cases=(
        Case("rows 0 to 5, blocks of 2: block 1", lambda: (_rows(6, 6), 1, 6, 2)),
        Case("block 0", lambda: (_rows(6, 6), 0, 6, 2)),
        Case("block 1 again, and the query sees 3 rows", lambda: (_rows(6, 3), 1, 3, 2)),
        Case("an empty slot", lambda: (_rows(6, 3), -1, 3, 2)),
        Case("a block of the future", lambda: (_rows(6, 3), 2, 3, 2)),
        Case("7 rows, blocks of 3: the last holds one", lambda: (_rows(7, 7), 2, 7, 3)),
        Case("an empty slot, with the last block visible", lambda: (_rows(8, 8), -1, 8, 4)),
        Case("two columns, random numbers", lambda: (_random(9, 2, seed=0), 1, 6, 4)),
        Case(
            "numbers with a gradient, which may not be overwritten",
            lambda: (_random(7, 1, seed=1).requires_grad_(), 1, 5, 3),
        ),
    ),
    tolerance=0.0,
)


def _rows(M: int, num_visible: int) -> Tensor:
    """Row i is i + 1, and NaN from `num_visible` on."""
    x = torch.arange(1.0, M + 1)[:, None]
    return x.masked_fill(torch.arange(M)[:, None] >= num_visible, torch.nan)


# -- window_mask --


def window_mask(N: int, M: int, window_size: int) -> Tensor:
    """Boolean [N, M]: True where query n, at position M - N + n, sees key m through its window."""
    position = torch.arange(M - N, M)[:, None]  # [N, 1]
    key = torch.arange(M)  # [M]
    return (key <= position) & (key > position - window_size)


def _window(slips: Slips, N: int, M: int, window_size: int) -> Tensor:
    """`window_mask` with slips."""
    before = M - N  # positions in front of the queries
    if {"first positions", "N - M"} & slips:
        before = N - M if "N - M" in slips else 0
    position = torch.arange(N)[:, None] + before
    key = torch.arange(M)
    w = window_size + ("w + 1" in slips) - ("w - 1" in slips)
    position = position + (("ahead" in slips) - ("shifted" in slips))
    first = position // w * w if "block" in slips else position - w + 1
    last = position - 1 if "not itself" in slips else position
    if "negative slice" in slips:
        first = torch.where(first < 0, first + M, first)
    seen = (key >= first) & (key <= last)
    if "both sides" in slips:
        seen = (key - position).abs() < w
    if "far end only" in slips:
        seen = key >= first
    if "causal only" in slips:
        seen = key <= last
    if "or" in slips:
        seen = (key >= first) | (key <= last)
    seen = ~seen if "complement" in slips else seen
    seen = seen.T if "transposed" in slips else seen
    return seen.float() if "numbers" in slips else seen


def _keys(keys: list[int]) -> str:
    """Keys in words."""
    if not keys:
        return "no key"
    return f"key{'s' * (len(keys) > 1)} {', '.join(map(str, keys))}"


def _draw_window(arguments: tuple, got: object, expected: Tensor) -> Picture:
    """What was seen beside what should be, and the first query for which they differ."""
    got = torch.as_tensor(got).bool()
    N, M, w = arguments
    differing = (got != expected).any(1).nonzero().flatten().tolist()
    figure, axes = new_figure(7.0, 1.2 + 0.32 * max(N, 3), columns=2)
    for axis, mask, title in (
        (axes[0, 0], got, "yours"),
        (axes[0, 1], expected, "a window of exactly w"),
    ):
        grid(axis, mask.double().numpy(), colour="window", largest=1.0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("key", fontsize=9)
        axis.set_ylabel("query", fontsize=9)
        axis.set_xticks(range(M))
        axis.set_yticks(range(N), range(M - N, M))
    told = "the right keys, but as numbers"
    if differing:
        n = differing[0]
        yours, right = (_keys(x[n].nonzero().flatten().tolist()) for x in (got, expected))
        told = f"the query at position {M - N + n} sees {yours} instead of {right}"
    return Picture(figure, f"A window of {w}: {told}")


_WINDOW_MISTAKES = (
    Misconception(
        "a window of w + 1",
        slip(_window, "w + 1"),
        "From t − w to t, both included, there are w + 1. Which is the oldest key that a "
        "late query sees?",
    ),
    Misconception(
        "a window of w − 1",
        slip(_window, "w - 1"),
        "Count the keys of a late query. Which one is missing at the far end?",
    ),
    Misconception(
        "leaving out the query's own key",
        slip(_window, "not itself"),
        "The window ends with the query itself, which is one of the w. Is your comparison "
        "`<` or `<=`?",
    ),
    Misconception(
        "shifting the window back by one",
        slip(_window, "shifted"),
        "There are w keys, but the query's own is not among them. Which key comes last?",
    ),
    Misconception(
        "shifting the window ahead by one",
        slip(_window, "ahead"),
        "The newest key of each window is one that the query does not see. What is the "
        "position of the last of M tokens?",
    ),
    Misconception(
        "a slice that begins below 0",
        slip(_window, "negative slice"),
        "For an early query t − w + 1 is negative, and Python counts that from the end. "
        "Where does its window begin?",
    ),
    Misconception(
        "taking the queries for the first N positions",
        slip(_window, "first positions"),
        "They are the last N of the M. At which position does query 0 stand?",
    ),
    Misconception(
        "opening the window to both sides",
        slip(_window, "both sides"),
        "Without its sign, the distance to a key of the future is small, too. Does a query "
        "see later keys?",
    ),
    Misconception(
        "cutting at the far end only",
        slip(_window, "far end only"),
        "Keys that are too old are hidden. And those of the future?",
    ),
    Misconception(
        "hiding the future and nothing else",
        slip(_window, "causal only"),
        "That is plain causal attention. Which is the oldest key inside the window?",
    ),
    Misconception(
        "a block in place of a window",
        slip(_window, "block"),
        "Blocks begin at multiples of their size. Where does a window begin that moves "
        "along with its query, one key at a time?",
    ),
    Misconception(
        "a mask that is True where the key is hidden",
        slip(_window, "complement"),
        "The mask is asked for as True where the query sees the key. What does the `~` of it say?",
    ),
    Misconception(
        "giving the queries columns, and the keys rows",
        slip(_window, "transposed"),
        "The shape asked for is `[N, M]`: a row for each query. Which of your two vectors has to "
        "be the column?",
    ),
    Misconception(
        "joining the two ends of the window with `or`",
        slip(_window, "or"),
        "Every key passes one of the two comparisons: it is not too new, or not too old. How many "
        "of them does a key of the window pass?",
    ),
    Misconception(
        "taking N − M for M − N",
        slip(_window, "N - M"),
        "The queries stand at the end of the text. How many positions lie in front of them, and "
        "is your number negative?",
    ),
    Misconception(
        "returning numbers where a boolean mask is asked for",
        slip(_window, "numbers"),
        "The values are right. But as an index, 0 and 1 choose rows 0 and 1, and `~` does not turn "
        "them round. Which dtype does a comparison give?",
    ),
)

_WINDOW = TEXTS.exercise(
    "window_mask",
    minutes=5,
    difficulty=1,
    solution=window_mask,
    misconceptions=_WINDOW_MISTAKES,
    combine=together(
        _WINDOW_MISTAKES,
        {"w + 1", "w - 1"},
        {"not itself", "shifted", "ahead", "both sides", "far end only"},
        {"first positions", "N - M"},
        {"or", "both sides", "far end only", "causal only", "block"},
        {"or", "w + 1"},
        {"or", "w - 1"},
        {"negative slice", "both sides"},
        {"both sides", "far end only", "causal only", "block"},
        {"causal only", "w + 1"},
        {"causal only", "w - 1"},
    ),
    cases=(
        Case("N = M = 5, a window of 3", lambda: (5, 5, 3)),
        Case("the last 2 of 6 positions, a window of 2", lambda: (2, 6, 2)),
        Case("a window of 1: itself", lambda: (3, 4, 1)),
        Case("a window wider than the text", lambda: (4, 7, 9)),
        Case("one query, 9 keys: decoding", lambda: (1, 9, 4)),
    ),
    tolerance=0.0,
    picture=_draw_window,
)


# -- attend_to_lists --


def attend_to_lists(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Causal selected attention of one text: o [N, HQ, DV] and lse [N, HQ], one block at a time."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    G, scale = HQ // H, D**-0.5
    o, lse = torch.empty(N, HQ, DV), torch.empty(N, HQ)
    for n in range(N):
        num_visible = M - N + n + 1
        for h in range(H):
            group = slice(h * G, (h + 1) * G)  # the query heads that share KV head h and its list
            state = online_softmax.start(G, DV)
            for block_id in block_indices[n, h].tolist():
                block_start = block_id * block_size
                if block_id < 0 or block_start >= num_visible:
                    continue  # nothing is loaded
                tokens = slice(block_start, min(block_start + block_size, num_visible))
                acc_s = q[n, group] @ k[tokens, h].T  # [G, BS], fewer keys in the last block
                state = online_softmax.update(
                    state, acc_s, v[tokens, h], scale * online_softmax.LOG2_E
                )
            o[n, group], lse[n, group] = online_softmax.finish(state, scale)
    return o, lse


def _run_attend(attempt: Callable, *arguments: object) -> object:
    """The frame with all of its gaps open is no attempt yet."""
    code = getattr(attempt, "__code__", None)
    gaps = [i for i in dis.get_instructions(code) if i.argval is Ellipsis] if code else []
    if len(gaps) == 3:
        raise NotImplementedError
    return attempt(*arguments)


def _attend(slips: Slips, *arguments: object) -> tuple[Tensor, Tensor]:
    """`attend_to_lists` with slips."""
    o, lse = _attend_rows(slips, *arguments)
    if "base two" in slips:
        lse = lse * LOG2_E
    if "lse of nothing" in slips:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return (lse, o) if "swapped" in slips else (o, lse)


def _attend_rows(
    slips: Slips, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """What `_attend` returns, but for the slips in how it is returned."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    G = HQ // H
    if "head by head" in slips:
        k[:, HQ - 1]  # an error where there are fewer KV heads
    if "tile of all heads" in slips:
        load_block(k, 0, M, block_size)  # an error: the tile has two axes, and the rows three
    if {"values of head 0", "head 0"} & slips:
        v = v[:, :1].expand_as(v)
    if {"keys of head 0", "head 0"} & slips:
        k = k[:, :1].expand_as(k)
    scale = 1.0 if "no scale" in slips else D**-0.5
    scale_log2 = scale if "base e" in slips else scale * LOG2_E
    if "no scale in update" in slips:
        scale_log2 = LOG2_E
    if "scaled twice" in slips:
        q = q * scale
    if "scaled before" in slips:
        q, scale_log2 = q * scale, LOG2_E
    o, lse = torch.empty(N, HQ, DV), torch.empty(N, HQ)
    state = online_softmax.start(G, DV)
    for n, h in ((n, h) for n in range(N) for h in range(H)):
        num_visible = (0 if "first positions" in slips else M - N) + n
        num_visible += ("not itself" not in slips) + ("one too many" in slips)
        # the guard's limit, and where a block is cut
        limit = M if {"no causality", "load, then mask"} & slips else min(num_visible, M)
        cut = M if "no cut" in slips else limit
        group = slice(h, HQ, H) if "dealt out" in slips else slice(h * G, (h + 1) * G)
        if "one state" not in slips and ("state of a query" not in slips or h == 0):
            state = online_softmax.start(G, DV)
        parts, starts_with_nothing = [], False
        ids = block_indices[0 if "query 0" in slips else n, 0 if "first list" in slips else h]
        if "slot numbers" in slips:
            ids = torch.arange(len(ids))
        if "every block" in slips:
            ids = torch.arange(-(-M // block_size))
        for block_id in (ids.unique() if "unique" in slips else ids).tolist():
            if "anew at slots" in slips:
                state = online_softmax.start(G, DV)
            if block_id < 0 and "wrap" in slips:
                block_id += -(-M // block_size)
            if block_id < 0 and "clamped" in slips:
                block_id = 0
            if block_id < 0 and "stop" in slips:
                break
            start = block_id * block_size
            if {"score 0", "score 0, listed", "score 0, guarded"} & slips:
                is_left_out = block_id < 0 and "score 0" not in slips
                if is_left_out or ("score 0, guarded" in slips and start >= limit):
                    continue
                k_tile, _ = load_block(k[:, h], block_id, limit, block_size)
                v_tile, _ = load_block(v[:, h], block_id, limit, block_size)
                state = online_softmax.update(state, q[n, group] @ k_tile.T, v_tile, scale_log2)
                continue
            is_empty = block_id < 0 and "load the empty slot" in slips
            is_left_out = start >= limit and "no guard" not in slips
            if "whole blocks" in slips:
                is_left_out = start + block_size > limit
            if block_id < 0:
                is_left_out = not {"load the empty slot", "slice of nothing"} & slips
            if block_id < 0 and "slice of nothing" in slips:
                start = M  # a slice up to 0 holds as little
            if is_left_out:
                starts_with_nothing |= not parts
                continue
            end = start + block_size if "past the end" in slips else min(start + block_size, cut)
            tokens = torch.arange(start, max(start, end))
            rows = h if "one row" in slips else slice(h, h + 1) if "one head" in slips else group
            acc_s = q[n, rows] @ k[tokens, h].T
            if is_empty or "load, then mask" in slips:
                is_hidden = (tokens < 0) | (tokens >= num_visible)
                acc_s = acc_s.masked_fill(is_hidden, -torch.inf)
            if {"anew", "average", "sum"} & slips:
                state = online_softmax.start(G, DV)
            updated = online_softmax.update(state, acc_s, v[tokens, h], scale_log2)
            state = state if "never kept" in slips else updated
            parts.append(online_softmax.finish(state, scale))
        o[n, group], lse[n, group] = online_softmax.finish(state, scale)
        if {"average", "sum"} & slips and parts:
            outputs = torch.stack([part for part, _ in parts])
            o[n, group] = outputs.sum(0) if "sum" in slips else outputs.mean(0)
            lse[n, group] = torch.logsumexp(torch.stack([part for _, part in parts]), 0)
        if "0/0" in slips:
            o[n, group] = state.acc_o / state.running_sum[:, None]
        if "-inf - -inf" in slips and starts_with_nothing:
            o[n, group], lse[n, group] = torch.nan, torch.nan
    return o, lse


_ATTEND_MISTAKES = (
    Misconception(
        "taking the queries for the first N positions",
        slip(_attend, "first positions"),
        "They are the last N of the M. At which position does query 0 stand, and how many "
        "keys came before it?",
    ),
    Misconception(
        "hiding the query's own position from it",
        slip(_attend, "not itself"),
        "A query sees itself: the last of M sees M keys. How many does the one at position t see?",
    ),
    Misconception(
        "dealing out the query heads in turn",
        slip(_attend, "dealt out"),
        "The heads of a group are neighbours: query head hq belongs to KV head hq // G. "
        "Which heads belong to KV head 1?",
    ),
    Misconception(
        "taking a query head for a KV head",
        slip(_attend, "head by head"),
        "There are fewer KV heads than query heads. Which KV head, and which list, does "
        "query head hq share?",
    ),
    Misconception(
        "giving `update` one query head where it takes the group",
        slip(_attend, "one row"),
        "`q[n, h]` is one row, `[D]`, and its scores have one axis. `update` takes `[G, BS]`: a "
        "row for each query head of the group. Which name in the frame picks these rows of `q`?",
    ),
    Misconception(
        "giving `update` one query head where it takes the group",
        slip(_attend, "one head"),
        "All heads of the group got the scores of one of them. Which name in the frame picks the "
        "group's rows of `q`?",
    ),
    Misconception(
        "reading the keys of KV head 0 for every group",
        slip(_attend, "keys of head 0"),
        "The lists and the values fit, the scores do not. Which KV head's keys does group h read?",
    ),
    Misconception(
        "reading the values of KV head 0 for every group",
        slip(_attend, "values of head 0"),
        "The lists and the keys fit, the values do not. Which KV head's values does group h read?",
    ),
    Misconception(
        "reading the keys and values of KV head 0 for every group",
        slip(_attend, "head 0"),
        "Each KV head has keys and values of its own. Which index of `k` and `v` chooses it?",
    ),
    Misconception(
        "handing `load_block` all KV heads at once",
        slip(_attend, "tile of all heads"),
        "`load_block` takes the rows of one head, `[M, D]`, and `k` is `[M, H, D]`. Which index "
        "picks KV head h?",
    ),
    Misconception(
        "a score of 0 where a key is hidden",
        slip(_attend, "score 0, listed"),
        "The empty slots are left out. But what a listed block holds of the future is rows of "
        "zeros, with the score 0 and the weight e⁰ = 1. Which score gives the weight 0?",
    ),
    Misconception(
        "a score of 0 where a key is hidden",
        slip(_attend, "score 0, guarded"),
        "The empty slots are left out. But in the last block, a row of zeros has the score 0 and "
        "the weight e⁰ = 1. Which score gives the weight 0?",
    ),
    Misconception(
        "a score of 0 where a key is hidden",
        slip(_attend, "score 0"),
        "A row of zeros has the score 0, and e⁰ = 1 is a weight like any other. Which score gives "
        "the weight 0?",
    ),
    Misconception(
        "walking over the slots' numbers",
        slip(_attend, "slot numbers"),
        "A slot's number is its place in the list. Which number *in* the slot says which block to "
        "load?",
    ),
    Misconception(
        "walking over every block",
        slip(_attend, "every block"),
        "That is dense attention, block by block. Where does the list say which blocks to load?",
    ),
    Misconception(
        "taking the first KV head's list for all",
        slip(_attend, "first list"),
        "Each KV head has a list of its own. Which index of `block_indices` chooses it?",
    ),
    Misconception(
        "loading what is hidden, and masking its score",
        slip(_attend, "load, then mask"),
        "The weight of a hidden key is 0, but its value was loaded. What is 0 · NaN?",
    ),
    Misconception(
        "loading an empty slot's block, and masking its score",
        slip(_attend, "load the empty slot"),
        "Its weight is 0, but the -1 has loaded values from the end of the text. What if "
        "they are NaN?",
    ),
    Misconception(
        "going into a block of the future",
        slip(_attend, "no guard"),
        "The whole block lies in the query's future: the cut leaves nothing of its slice, and no "
        "scores have no maximum. At which `block_start` does a block show nothing any more?",
    ),
    Misconception(
        "going into an empty slot",
        slip(_attend, "slice of nothing"),
        "For -1 the slice ends at 0 and holds no key, and no scores have no maximum. What should "
        "an empty slot add to the state?",
    ),
    Misconception(
        "taking an empty slot for block 0",
        slip(_attend, "clamped"),
        "-1 has become 0, so block 0 counts although no slot lists it, or counts once more. What "
        "should an empty slot add?",
    ),
    Misconception(
        "letting a query see one key too many",
        slip(_attend, "one too many"),
        "The query at position t sees keys 0 to t. How many are these, and at which position does "
        "query n stand?",
    ),
    Misconception(
        "keeping only blocks that are visible as a whole",
        slip(_attend, "whole blocks"),
        "The visible part of a block counts, however short. What is left of the query's own block?",
    ),
    Misconception(
        "counting a block once that is listed twice",
        slip(_attend, "unique"),
        "A list may name a block twice, and then each of its keys has double weight. Where "
        "does the second one get lost?",
    ),
    Misconception(
        "taking query 0's list for all",
        slip(_attend, "query 0"),
        "Each query has lists of its own. Which index of `block_indices` chooses the query?",
    ),
    Misconception(
        "leaving out the cut inside the last block",
        slip(_attend, "past the end"),
        "A block that begins in a query's past may end in its future, or past the last key. Where "
        "do the block's tokens have to end?",
    ),
    Misconception(
        "leaving out the cut inside the last block",
        slip(_attend, "no cut"),
        "A block that begins in a query's past may end in its future. Where does the slice "
        "of keys have to end?",
    ),
    Misconception(
        "letting every query see the future",
        slip(_attend, "no causality"),
        "Every block is taken as far as the text goes. How many keys may query n see?",
    ),
    Misconception(
        "letting -1 wrap round to the last block",
        slip(_attend, "wrap"),
        "In Python, -1 counts from the end, where the future is. What should an empty slot do?",
    ),
    Misconception(
        "stopping at the first empty slot",
        slip(_attend, "stop"),
        "A block may follow behind it. Which word leaves out one slot, and not the rest of "
        "the list?",
    ),
    Misconception(
        "starting anew at every block",
        slip(_attend, "anew at slots"),
        "The state joins the blocks of a list. Does it start inside your loop, or before it?",
    ),
    Misconception(
        "starting anew at every block",
        slip(_attend, "anew"),
        "The state joins the blocks of a list. Where does it have to start?",
    ),
    Misconception(
        "dropping what `update` returns",
        slip(_attend, "never kept"),
        "`update` changes nothing in place: it returns the new state. Under which name does your "
        "loop keep that?",
    ),
    Misconception(
        "not starting anew for each list",
        slip(_attend, "state of a query"),
        "What the first KV head's list has summed up is still in the state when the second one's "
        "begins. Where does a state have to start?",
    ),
    Misconception(
        "not starting anew for each list",
        slip(_attend, "one state"),
        "What the lists before have summed up is still in the state. Where does a state have to "
        "start?",
    ),
    Misconception(
        "adding up the blocks' outputs",
        slip(_attend, "sum"),
        "Each block's weights sum to 1, so those of two blocks sum to 2. Over which keys does the "
        "one softmax run?",
    ),
    Misconception(
        "averaging the blocks' outputs",
        slip(_attend, "average"),
        "A block of weak scores would count as much as a strong one. Over which keys does "
        "the one softmax run?",
    ),
    Misconception(
        "dividing by the sum of nothing",
        slip(_attend, "0/0"),
        "A query that sees nothing divides 0 by 0. Which output does the chapter give to such an "
        "empty row?",
    ),
    Misconception(
        "rescaling while the maximum is still −∞",
        slip(_attend, "-inf - -inf"),
        "The first slots may show nothing, and then the old and the new maximum are −∞. "
        "What is −∞ − (−∞)?",
    ),
    Misconception(
        "leaving out the scale",
        slip(_attend, "no scale"),
        "Dot products are multiplied by `D ** -0.5` before the softmax. Where does that happen in "
        "your code? (`update` and `finish` want to be told.)",
    ),
    Misconception(
        "leaving out the scale in `update`",
        slip(_attend, "no scale in update"),
        "`finish` knows the scale, and `update` got `LOG2_E` alone. Which two factors make up "
        "`scale_log2`?",
    ),
    Misconception(
        "scaling the scores twice",
        slip(_attend, "scaled twice"),
        "`update` takes plain dot products and scales them itself. Where else does your code "
        "multiply by the scale?",
    ),
    Misconception(
        "scaling the scores before `update`",
        slip(_attend, "scaled before"),
        "`o` is right, and `lse` is not: `finish` scales the maximum once more. `update` takes "
        "plain dot products. Which factor tells it the scale?",
    ),
    Misconception(
        "powers of two without log₂ e",
        slip(_attend, "base e"),
        "`update` takes powers of two. By which factor does an exponent grow from base e "
        "to base 2?",
    ),
    Misconception(
        "returning `lse` in base two",
        slip(_attend, "base two"),
        "`o` is right, and `lse` is log₂ e times too large. In which base does the course return "
        "it?",
    ),
    Misconception(
        "an `lse` of 0 for a row that sees nothing",
        slip(_attend, "lse of nothing"),
        "`lse` is the logarithm of a sum, here of a sum of nothing. What is log 0?",
    ),
    Misconception(
        "returning `lse` before `o`",
        slip(_attend, "swapped"),
        "Both are there. In which order does the statement ask for them?",
    ),
)

# slips that leave no trace where `load_block` has made the tile
_NOT_WITH_TILES = (
    "no cut", "past the end", "load, then mask", "whole blocks", "no guard", "anew", "average",
    "sum", "never kept", "slice of nothing", "load the empty slot", "-inf - -inf", "one row",
    "one head",
)  # fmt: skip

_ATTEND = TEXTS.exercise(
    "attend_to_lists",
    minutes=8,
    difficulty=3,
    solution=attend_to_lists,
    run=_run_attend,
    misconceptions=_ATTEND_MISTAKES,
    combine=together(
        _ATTEND_MISTAKES,
        {"wrap", "stop", "load the empty slot", "slice of nothing", "clamped"},
        {"anew", "anew at slots", "average", "sum", "one state", "state of a query", "never kept"},
        {"no cut", "past the end", "no causality", "load, then mask", "whole blocks"},
        {"no scale", "no scale in update", "scaled twice", "scaled before"},
        {"no scale in update", "base e"},
        {"scaled before", "base e"},
        {"slot numbers", "every block", "first list"},
        {"slot numbers", "every block", "query 0"},
        {"slot numbers", "every block", "unique"},
        {"one row", "one head", "dealt out"},
        {"keys of head 0", "values of head 0", "head 0"},
        *({"score 0", "score 0, listed", "score 0, guarded", other} for other in _NOT_WITH_TILES),
        {"no causality", "one too many", "not itself", "whole blocks"},
        {"load, then mask", "no guard", "whole blocks"},
        {"no cut", "no guard"},
    ),
    cases=(
        Case(
            "the last 2 of 4 tokens, blocks of 2, the list [1, 0]",
            lambda: _four([[[1, 0]], [[1, 0]]]),
        ),
        Case(
            "two KV heads with different lists, three query heads each",
            lambda: _problem(N=3, M=11, HQ=6, H=2, seed=0),
        ),
        Case(
            "empty slots in front of blocks",
            lambda: _problem(N=11, M=11, HQ=2, H=1, seed=1, empty=True),
        ),
        Case("a query that lists nothing", lambda: _four([[[-1, -1]], [[0, -1]]])),
        Case("a block listed twice", lambda: _four([[[1, 1, 0]], [[0, 1, 0]]])),
        Case(
            "4 tokens, blocks of 4, later values are NaN for the first query",
            lambda: _untouchable(),
        ),
        Case(
            "blocks of 2, an empty slot, the last value is NaN",
            lambda: _four([[[0, -1]], [[0, -1]]], last_value=torch.nan),
        ),
        Case("scores that fall by the hundred, and rise", lambda: _steep()),
    ),
)


def _problem(*, N: int, M: int, HQ: int, H: int, seed: int, empty: bool = False) -> tuple:
    """Random tensors; each list is two of the three blocks of 4, in some order, if `empty` behind
    an empty slot."""
    q, k, v = (
        _random(N, HQ, 4, seed=seed, factor=2),
        _random(M, H, 4, seed=seed + 10),
        _random(M, H, 3, seed=seed + 20),
    )
    block_indices = torch.rand(N, H, 3, generator=torch.Generator().manual_seed(seed + 30)).argsort(
        -1
    )[..., :2]
    if empty:
        block_indices = torch.nn.functional.pad(block_indices, (1, 0), value=-1)
    return q, k, v, block_indices, 4


def _four(lists: list[list[list[int]]], last_value: float = 8.0) -> tuple:
    k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([1.0, 2, 4, last_value])
    return torch.ones(2, 1, 1), k[:, None, None], v[:, None, None], torch.tensor(lists), 2


def _untouchable() -> tuple:
    """The first query comes out finite only if it leaves the last value alone."""
    q, k, v, lists, _ = _four([[[0]], [[0]]], last_value=torch.nan)
    return q, k, v, lists, 4


def _steep() -> tuple:
    k = 100 * torch.arange(9.0)[:, None, None]
    return torch.ones(2, 1, 1), k, _random(9, 1, 2, seed=9), torch.tensor([[[2, 0]], [[0, 2]]]), 3


# -- sum_of_list --


def sum_of_list() -> object:
    """The kernel that adds up the values that each query's list shows; a program has one query."""

    @triton.jit
    def kernel(V, Ids, Sum, M, S, DV: tl.constexpr, BS: tl.constexpr):
        position = tl.program_id(0)  # this program's query
        width = tl.arange(0, DV)
        total = tl.zeros([DV], tl.float32)
        for slot in range(S):
            block_id = tl.load(Ids + position * S + slot)
            tokens = block_id * BS + tl.arange(0, BS)  # [BS]
            is_seen = (block_id >= 0) & (tokens <= position)
            v_tile = tl.load(V + tokens[:, None] * DV + width, mask=is_seen[:, None], other=0.0)
            total += tl.sum(v_tile, axis=0)
        tl.store(Sum + position * DV + width, total)

    return kernel


_GIVEN = """
@triton.jit
def kernel(V, Ids, Sum, M, S, DV: tl.constexpr, BS: tl.constexpr):
    position = tl.program_id(0)  # this program's query
    width = tl.arange(0, DV)
    total = tl.zeros([DV], tl.float32)
    for slot in range(S):
        block_id = tl.load(Ids + position * S + slot)
        tokens = block_id * BS + tl.arange(0, BS)  # [BS]
        is_seen = tokens < M
        v_tile = tl.load(V + tokens[:, None] * DV + width, mask=is_seen[:, None], other=0.0)
        total += tl.sum(v_tile, axis=0)
    tl.store(Sum + position * DV + width, total)
"""


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(_GIVEN))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


def _joins_by_python(kernel: object) -> bool:
    """Whether the line of `is_seen` has `and` or `or`, or compares in a chain: Triton's
    interpreter takes one side of them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False
    lines = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "is_seen"
    )
    return any(
        isinstance(part, ast.BoolOp) or (isinstance(part, ast.Compare) and len(part.ops) > 1)
        for line in lines
        for part in ast.walk(line)
    )


def _calls_torch(kernel: object) -> bool:
    """Whether a kernel names `torch`, whose functions take no tiles."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(part, ast.Name) and part.id == "torch" for part in ast.walk(tree))


_FRONT = 8  # rows of NaN that lie in memory in front of V


def _run_sum(solution: Callable, lists: list[list[int]], block_size: int) -> Tensor:
    """Launch the kernel, a program per query, on values that have NaN in front of them and large
    numbers behind."""
    if hasattr(solution, "run"):
        raise TypeError("this is the kernel itself: hand over the function that returns it")
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("sum_of_list defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    if _joins_by_python(kernel):
        raise TypeError(
            "tiles are not joined by `and`, `or` or a chain such as `a <= b <= c`: write "
            "`(...) & (...)`, with both pairs of brackets"
        )
    if _calls_torch(kernel):
        raise TypeError(
            "functions of torch take no tiles of a kernel: join two conditions by `(...) & (...)`"
        )
    M, DV = len(lists), 2
    memory = torch.full((_FRONT + M + 4 * block_size, DV), 1000.0)
    memory[:_FRONT] = torch.nan
    memory[_FRONT : _FRONT + M] = 2.0 ** torch.arange(M)[:, None] * torch.tensor([1.0, -1.0])
    v, ids = roomy(memory, 1000.0)[_FRONT:], roomy(torch.tensor(lists, dtype=torch.int32), -1)
    total = roomy(torch.full((M, DV), -77.0), -77.0)
    kernel[M,](v, ids, total, M, ids.shape[1], DV=DV, BS=block_size)
    return total.cpu()


@triton.jit
def _wrong_sum(
    V, Ids, Sum, M, S,
    DV: tl.constexpr, BS: tl.constexpr, LIMIT: tl.constexpr, EMPTY: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0)
    width = tl.arange(0, DV)
    total = tl.zeros([DV], tl.float32)
    goes_on = 1
    for slot in range(S):
        block_id = tl.load(Ids + position * S + slot)
        first = 0  # the smallest id that counts as one
        if EMPTY == "stop":
            goes_on = tl.where(block_id < 0, 0, goes_on)
        if EMPTY == "loaded":
            first = -1
        if EMPTY == "zero is empty":
            first = 1
        if EMPTY == "block 0":
            block_id = tl.maximum(block_id, 0)
        if EMPTY == "last block":
            block_id = tl.where(block_id < 0, (M - 1) // BS, block_id)
        tokens = block_id * BS + tl.arange(0, BS)
        is_seen = tokens <= position
        if LIMIT == "text":
            is_seen = tokens < M
        if LIMIT == "own block whole":
            is_seen = (tokens < M) & (block_id * BS <= position)
        if LIMIT == "whole or nothing":
            is_seen = (tokens < M) & (block_id * BS + BS <= position + 1)
        if LIMIT == "not itself":
            is_seen = tokens < position
        if LIMIT == "own alone":
            is_seen = tokens == position
        if LIMIT == "one too many":
            is_seen = tokens <= position + 1
        is_seen = is_seen & (block_id >= first) & (goes_on > 0)
        if LIMIT == "or":
            is_seen = (tokens <= position) | (block_id >= 0)
        v_tile = tl.load(V + tokens[:, None] * DV + width, mask=is_seen[:, None], other=0.0)
        if SLOTS == "last":
            total = tl.sum(v_tile, axis=0)
        else:
            total += tl.sum(v_tile, axis=0)
    tl.store(Sum + position * DV + width, total)


class _Mistaken:
    """`_wrong_sum` with its slips chosen; launched like a kernel."""

    def __init__(self, slips: Slips) -> None:
        self.run = None
        self.slips = {
            "LIMIT": next((name for name in slips if name in _LIMITS), "right"),
            "EMPTY": next((name for name in slips if name in _EMPTIES), "right"),
            "SLOTS": "last" if "last" in slips else "right",
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_sum[grid](*args, **self.slips, **sizes)


_LIMITS = {
    "text", "own block whole", "whole or nothing", "not itself", "own alone", "one too many", "or",
}  # fmt: skip
_EMPTIES = {"loaded", "zero is empty", "block 0", "last block", "stop"}

_SUM_MISTAKES = (
    Misconception(
        "loading tokens of the query's future",
        slip(_Mistaken, "text"),
        "`tokens < M` stops at the end of the text. Where does the past of the query at `position` "
        "end?",
    ),
    Misconception(
        "loading an empty slot's block",
        slip(_Mistaken, "loaded"),
        "For id -1 all tokens are negative, so every upper limit lets them pass. In front of `V` "
        "lies NaN here, and 0 · NaN is NaN. Which id must not be loaded?",
    ),
    Misconception(
        "loading all of a block that the query stands in",
        slip(_Mistaken, "own block whole"),
        "The query's own block begins in its past and ends in its future. What do you compare: "
        "where the block begins, or each of its tokens?",
    ),
    Misconception(
        "keeping only blocks that are visible as a whole",
        slip(_Mistaken, "whole or nothing"),
        "The visible part of a block counts, however short. What is left of the query's own block?",
    ),
    Misconception(
        "hiding the query's own position from it",
        slip(_Mistaken, "not itself"),
        "A query sees itself. Does your comparison say `<` or `<=`?",
    ),
    Misconception(
        "showing a query nothing but itself",
        slip(_Mistaken, "own alone"),
        "The tokens before the query count, too. Which comparison lets them pass?",
    ),
    Misconception(
        "taking id 0 for an empty slot",
        slip(_Mistaken, "zero is empty"),
        "Block 0 is the first block of the text, and only negative ids are empty. What does your "
        "comparison say about 0?",
    ),
    Misconception(
        "taking an empty slot for block 0",
        slip(_Mistaken, "block 0"),
        "-1 has become 0, so block 0 is added although no slot lists it. What should an empty slot "
        "add?",
    ),
    Misconception(
        "letting -1 wrap round to the last block",
        slip(_Mistaken, "last block"),
        "-1 names no block, and the last block is mostly the future. What should an empty slot "
        "add?",
    ),
    Misconception(
        "showing one key too many",
        slip(_Mistaken, "one too many"),
        "The query at `position` sees the keys up to its own. Which token comes right after it?",
    ),
    Misconception(
        "joining the two comparisons with `|`",
        slip(_Mistaken, "or"),
        "With `|`, one comparison is enough. A token of an empty slot lies before every query. How "
        "many of the two does a token have to pass?",
    ),
    Misconception(
        "stopping at the first empty slot",
        slip(_Mistaken, "stop"),
        "`-1` may stand anywhere in the row. What if a block comes behind it?",
    ),
    Misconception(
        "keeping the last slot alone",
        slip(_Mistaken, "last"),
        "Each turn of the loop overwrites what the slots before have given. Which operator adds?",
    ),
)


def _sum_case(name: str, lists: list[list[int]], block_size: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (lists, block_size), lambda: here.why_not("triton", here.device))


_SUM = TEXTS.exercise(
    "sum_of_list",
    minutes=6,
    difficulty=2,
    solution=sum_of_list,
    run=_run_sum,
    misconceptions=_SUM_MISTAKES,
    combine=together(_SUM_MISTAKES, _LIMITS, _EMPTIES, *({"or", name} for name in _EMPTIES)),
    cases=(
        _sum_case("blocks of 2, each query lists its own", [[0], [0], [1], [1]], 2),
        _sum_case("an empty slot in front", [[-1, 0], [-1, 0], [0, 1], [-1, 1]], 2),
        _sum_case("blocks of the past and of the future", [[0, 1], [1, 0], [2, 0], [1, 0]], 2),
        _sum_case(
            "7 tokens in blocks of 4: the last is short",
            [[0, -1], [1, 0], [-1, -1], [-1, 0], [1, 0], [0, -1], [1, 2]],
            4,
        ),
    ),
)


EXERCISES = (_TOKENS, _LOAD, _ATTEND, _SUM, _WINDOW)


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(), listed_share={"tolerance": 0.1}, list_crossover={"unit": "tokens", "tolerance": 0.1}
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- two mistakes at once --


def _own_block_whole(
    ids: list[int], position: int, M: int, block_size: int, causal: bool
) -> list[int]:
    """No cut, and `causal` is not looked at."""
    tokens = []
    for block_id in ids:
        block_start = block_id * block_size
        if block_id >= 0 and block_start <= position:
            tokens += range(block_start, min(block_start + block_size, M))
    return tokens


def _zeros_by_product(
    x: Tensor, block_id: int, num_visible: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Reads every row, existing or not, and hides by a product."""
    offset = block_id * block_size + torch.arange(block_size)
    is_seen = (block_id >= 0) & (offset < num_visible)
    return x[offset] * is_seen[:, None], is_seen


def _unguarded(
    x: Tensor, block_id: int, num_visible: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Half of the guard, and a product."""
    offset = block_id * block_size + torch.arange(block_size)
    is_seen = offset < num_visible
    return x[offset.clamp(max=len(x) - 1)] * is_seen[:, None], is_seen


def _triangles(N: int, M: int, window_size: int) -> Tensor:
    """Diagonals are counted from the first query, and one too many."""
    return torch.ones(N, M, dtype=torch.bool).tril().triu(-window_size)


DOUBLES = (
    Double(
        "tokens_of_list",
        _own_block_whole,
        ("showing all of a block that the query stands in", "cutting causally always"),
    ),
    Double(
        "tokens_of_list",
        Wrong(_tokens, frozenset({"not itself", "stop"})),
        ("hiding the query's own position from it", "stopping at the first empty slot"),
    ),
    Double(
        "load_block",
        _zeros_by_product,
        ("multiplying by the mask", "reading first and hiding afterwards"),
    ),
    Double(
        "load_block", _unguarded, ("multiplying by the mask", "comparing with num_visible only")
    ),
    Double(
        "sum_of_list",
        Wrong(_Mistaken, frozenset({"text", "loaded"})),
        ("loading tokens of the query's future", "loading an empty slot's block"),
    ),
    Double(
        "window_mask",
        _triangles,
        ("a window of w + 1", "taking the queries for the first N positions"),
    ),
    Double(
        "window_mask",
        Wrong(_window, frozenset({"both sides", "w + 1"})),
        ("opening the window to both sides", "a window of w + 1"),
    ),
    Double(
        "attend_to_lists",
        Wrong(_attend, frozenset({"no cut", "stop"})),
        ("leaving out the cut inside the last block", "stopping at the first empty slot"),
    ),
    Double(
        "attend_to_lists",
        Wrong(_attend, frozenset({"dealt out", "no scale"})),
        ("dealing out the query heads in turn", "leaving out the scale"),
    ),
)
