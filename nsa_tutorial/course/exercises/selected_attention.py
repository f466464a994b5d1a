"""Exercises of chapter 05: the two operators that the reader builds, and, for more time, a load
behind a guard, the window's mask, from a list to tokens, and a small kernel with two bugs."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.attempts import gradients
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


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
    if len(got) != len(expected):
        told = f"{len(got)} tokens, not {len(expected)}"
    elif sorted(got) == sorted(expected):
        told = "the right tokens, in another order"
    else:
        told = f"{len(got)} tokens, but others"
    return Picture(figure, f"Query {position}, blocks of {block_size}, the list {ids}: {told}")


_TOKENS = TEXTS.exercise(
    "tokens_of_list", minutes=7, difficulty=2, solution=tokens_of_list, picture=_draw_tokens,
    tolerance=0.0,
    misconceptions=diffs(tokens_of_list, [
        ("block_id * block_size", "block_id", "taking an id for a token's position",
         "An id counts blocks. At which token does block 2 begin if a block holds 4?"),
        ("block_start = ", "block_id += -(-M // block_size) * (block_id < 0); block_start = ",
         "letting -1 wrap round to the last block",
         "In Python, index -1 is the last one, and the last block is mostly the future. What "
         "does -1 mean in a list?"),
        ("block_id >= 0 and ", "", "turning -1 into negative positions",
         "-1 times the block size is a position in front of the first token. What should an "
         "empty slot add to the list?"),
        ("block_start = ", "if block_id < 0:\n            break\n        block_start = ",
         "stopping at the first empty slot",
         "`-1` may stand anywhere in the row. What if a block comes behind it?"),
        ("block_id >= 0", "block_id > 0", "taking id 0 for an empty slot",
         "Block 0 is the first block of the text, and only negative ids are empty. What does "
         "your comparison say about 0, or Python's `if block_id`?"),
        ("block_size, num_visible", "block_size, M",
         "showing all of a block that the query stands in",
         "A block that begins in the past may end in the future. How far may this query see?"),
        ({" and block_start < num_visible": "",
          "block_size, num_visible": "block_size, num_visible if block_start < num_visible else M"},
         "cutting the own block but not a block further on",
         "A listed block may lie in the future as a whole. What is its first token, and may the "
         "query see that one?"),
        ("num_visible = ", "M = -(-M // block_size) * block_size; num_visible = ",
         "running past the last key",
         "Where the block size does not divide `M`, the last block is shorter. The causal cut "
         "hides that. What hides it without the cut?"),
        ("else M", "else 10**9", "showing keys that do not exist",
         "The last block may be short, and an id may lie past it. Without the causal cut, which "
         "number keeps the missing keys out?"),
        ("position + 1 if causal else M", "10**9", "taking every block whole, wherever it lies",
         "Some of these tokens lie in the future, or past the end of the text. How many keys may "
         "this query see, counted from key 0?"),
        ("position + 1 if causal else M", "M", "never looking at `causal`",
         "Every block is taken as far as the text goes. How far may the query see if `causal`?"),
        ("position + 1", "position + 2", "showing one key too many",
         "A `range` leaves out its end. The last key that the query sees is its own: where does "
         "the range end then?"),
        ({"position + 1": "position + 2", "else M": "else M + 1"}, "showing one key too many",
         "A `range` leaves out its end, and keys are counted from 0. Which is the last of 10 "
         "keys?"),
        ("block_start = ", "block_id = max(block_id, 0); block_start = ",
         "taking an empty slot for block 0",
         "-1 has become 0, so block 0 is shown although no slot lists it. What should an empty "
         "slot add to the list?"),
        ({" and block_start < num_visible": "",
          "range(block_start, min(block_start + block_size, num_visible))": "[block_id]"},
         "returning ids in place of tokens",
         "These are blocks. The positions of the keys in them are asked for. Which tokens does "
         "block 2 hold?"),
        ("range(block_start, min(block_start + block_size, num_visible))", "[block_id]",
         "returning ids in place of tokens"),
        ("position + 1", "position", "hiding the query's own position from it",
         "A query sees itself: at position 0 there is one key, not none. How many keys are "
         "visible at position t?"),
        ("block_start < num_visible", "block_start + block_size <= num_visible",
         "keeping only blocks that are visible as a whole",
         "The visible part of a block counts, however short. What is left of the query's own "
         "block?"),
        ("in ids", "in sorted(ids)", "sorting the positions",
         "All keys are there. In which order do the slots stand?"),
        (" if causal else M", "", "cutting causally always",
         "With `causal=False` the query sees its listed blocks up to the end of the text. How "
         "many keys are visible then?"),
    ]),
    cases=(
        Case("blocks of 4, the list [2, 0], query 9 of 12", lambda: ([2, 0], 9, 12, 4, True)),
        Case("an empty slot in front", lambda: ([-1, 1], 11, 12, 4, True)),
        Case("nothing but empty slots", lambda: ([-1, -1], 7, 12, 4, True)),
        Case("a block of the future, and its own", lambda: ([2, 1], 5, 12, 4, True)),
        Case("block of 3, M = 10, not causal: the last block is short",
             lambda: ([3, 0], 4, 10, 3, False)),
        Case("an id past the last block, not causal", lambda: ([4, 1, 9], 2, 10, 3, False)),
        Case("query 0", lambda: ([0], 0, 7, 4, True)),
    ),
)  # fmt: skip


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


def _rows(M: int, num_visible: int) -> Tensor:
    """Row i is i + 1, and NaN from `num_visible` on."""
    x = torch.arange(1.0, M + 1)[:, None]
    return x.masked_fill(torch.arange(M)[:, None] >= num_visible, torch.nan)


_LOAD = TEXTS.exercise(
    "load_block", minutes=9, difficulty=2, solution=load_block, run=_run_load, tolerance=0.0,
    misconceptions=diffs(load_block, [
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(offset < len(x), offset, 0)]",
         "hiding the score, and loading the row all the same",
         "`is_seen` is right, and it will hide the score. But the hidden row sits in the tile, "
         "and is multiplied by a weight of 0 later. What is 0 · NaN?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(offset < len(x), offset, 0)].masked_fill(~is_seen, 0.0)",
         "laying the mask along the columns",
         "A mask `[BS]` lies along the last axis, and these are the columns. Yours speaks of "
         "rows. Which axis does it need to become a column?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(offset < len(x), offset, 0)] * is_seen[:, None]",
         "multiplying by the mask",
         "0 · NaN is NaN, so a product does not remove a number. Which operation chooses between "
         "the row and a zero?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(is_seen, offset, 0)] * is_seen[:, None]",
         "multiplying by the mask"),
        ({"(block_id >= 0) & ": "", "tile = x": "offset = offset.clamp(min=0); tile = x"},
         "comparing with num_visible only",
         "Every negative position is below num_visible, so an empty slot counts as seen, and "
         "`clamp` loads row 0 for it. Which half of the guard is missing?"),
        ("(block_id >= 0) & ", "", "comparing with num_visible only",
         "Every negative position is below num_visible, and as an index it counts from the end. "
         "Which half of the guard is missing?"),
        ("offset = ", "block_id += -(-len(x) // block_size) * (block_id < 0); offset = ",
         "letting -1 wrap round to the last block",
         "-1 names no block. The last block is mostly the future, and the query would look "
         "ahead. What should an empty slot load?"),
        ("return ", "is_seen = offset < num_visible; return ",
         "counting the rows of an empty slot as seen",
         "The tile is right, but its zeros would enter the softmax with the score 0 and the "
         "weight e⁰. Are negative positions below num_visible?"),
        ("offset < num_visible", "offset <= num_visible", "loading one row too many",
         "The query sees `num_visible` rows, and the first one is row 0. Which is the last, and "
         "does your comparison say `<` or `<=`?"),
        ("(offset < num_visible)", "(block_id * block_size < num_visible) & (offset < len(x))",
         "loading all of a block that the query stands in",
         "A block that begins before `num_visible` may end behind it. Which of its rows may be "
         "loaded?"),
        ("(offset < num_visible)", "(offset < num_visible) & (offset[-1] < num_visible)",
         "loading a block whole or not at all",
         "The visible rows of a block count, however few. What is left of the query's own block?"),
        ("block_id >= 0", "block_id > 0", "taking id 0 for an empty slot",
         "Block 0 holds the first rows of the text, and only negative ids are empty. What does "
         "your comparison say about 0?"),
        ("offset < num_visible", "offset < len(x)",
         "loading up to the end of the text, whatever the query may see",
         "Rows from num_visible on exist, but they are this query's future. Where does the load "
         "have to end?"),
        ("block_id * block_size", "block_id", "taking the id for the first row",
         "Block 1 does not begin at row 1. How many rows lie in front of it?"),
        ("tile = x", "rows = x[offset]; tile = x", "reading first and hiding afterwards",
         "Where the block runs past the end, there is no row to read. PyTorch raises an error, "
         "and a GPU reads whatever lies there. Which rows may be read at all?"),
        ("tile[is_seen] =", "tile =", "making a tile with fewer rows",
         "A kernel's tile has a fixed shape of `block_size` rows. What stands in the rows that "
         "are not loaded?"),
        ({"tile[is_seen] =": "tile =", "return ": "is_seen = is_seen[is_seen]; return "},
         "making a tile with fewer rows"),
        ("offset = ", "block_id = max(block_id, 0); offset = ", "taking an empty slot for block 0",
         "-1 has become 0, so block 0 is loaded although no slot lists it. What does an empty "
         "slot load?"),
        ("(block_id >= 0)", "(offset > 0)", "hiding row 0",
         "Row 0 is the first row of the text, and it is real. Does your comparison say `>` or "
         "`>=`?"),
        ("return ", "is_seen = ~is_seen; return ", "a mask that is True where nothing is seen",
         "The tile is right. `is_seen` is asked for as True where a row is real. What does the "
         "`~` of yours say?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(is_seen, offset, 0)].masked_fill(is_seen[:, None], 0.0)",
         "zeros in place of the rows that are seen",
         "`masked_fill` fills where its mask is True. Is that where a row is real, or where "
         "none is?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[offset.clamp(0, len(x) - 1)].nan_to_num(0.0)",
         "turning NaN into 0 after the load",
         "Memory that nobody has written may hold anything, also numbers that look real. What "
         "tells a real row from another, if not its value?"),
        (") & (", ") and (", "joining the two comparisons with Python's `and`",
         "`and` gives back one of its sides whole: for -1 a bare False, and not `block_size` of "
         "them. Which operator joins element by element?"),
        ("new_zeros(block_size, x.shape[1])", "new_full((block_size, x.shape[1]), -torch.inf)",
         "filling the tile with −∞",
         "−∞ belongs in a score. In a key it is multiplied by a query. What is −∞ times a "
         "negative number?"),
        ("tile[is_seen] = x[offset[is_seen]]",
         "tile = x[torch.where(is_seen, offset, 0)]",
         "leaving row 0 in the tile where nothing is seen",
         "Row 0 is safe to read, and `is_seen` is right. But hidden rows of the tile still hold "
         "numbers. What should stand there?"),
        ("return ", "is_seen[:] = True; return ", "calling every row of the tile real",
         "The tile is right. But a row of zeros that counts as seen enters the softmax with the "
         "score 0 and the weight e⁰. Which rows are real?"),
        ("return ", "is_seen = is_seen.float(); return ",
         "returning numbers where a boolean mask is asked for",
         "The values are right. But as an index, 0 and 1 choose rows 0 and 1, and `~` does not "
         "turn them round. Which dtype does a comparison give?"),
        ("offset = ", "if block_id < 0:\n        return None\n    offset = ",
         "returning no tile for an empty slot",
         "The next step of a kernel takes a tile from every slot. What does a tile hold if "
         "nothing is loaded?"),
        ("tile = x", "if not is_seen.any():\n        return None\n    tile = x",
         "returning no tile where nothing is seen",
         "The next step of a kernel takes a tile from every slot. What does a tile hold if "
         "nothing is loaded?"),
        ("tile, is_seen", "tile", "returning the tile alone",
         "The caller needs two tensors: the tile, and which of its rows are real. Why can it not "
         "tell a zero of yours from a real one?"),
        ("tile, is_seen", "is_seen, tile", "returning `is_seen` before the tile",
         "Both are there. In which order does the statement ask for them?"),
        ("  # [BS]", "\n    x[num_visible:] = 0", "writing into the tensor that you were given",
         "Other queries see more rows of `x` than this one. Where can the zeros go instead?"),
    ]),
    cases=(
        Case("rows 0 to 5, blocks of 2: block 1", lambda: (_rows(6, 6), 1, 6, 2)),
        Case("block 0", lambda: (_rows(6, 6), 0, 6, 2)),
        Case("block 1 again, and the query sees 3 rows", lambda: (_rows(6, 3), 1, 3, 2)),
        Case("an empty slot", lambda: (_rows(6, 3), -1, 3, 2)),
        Case("a block of the future", lambda: (_rows(6, 3), 2, 3, 2)),
        Case("a query that sees no row", lambda: (_rows(4, 0), 0, 0, 2)),
        Case("7 rows, blocks of 3: the last holds one", lambda: (_rows(7, 7), 2, 7, 3)),
        Case("an empty slot, with the last block visible", lambda: (_rows(8, 8), -1, 8, 4)),
        Case("two columns, random numbers", lambda: (_random(9, 2, seed=0), 1, 6, 4)),
        Case("numbers with a gradient, which may not be overwritten",
             lambda: (_random(7, 1, seed=1).requires_grad_(), 1, 5, 3)),
    ),
)  # fmt: skip


# -- window_mask --


def window_mask(N: int, M: int, window_size: int) -> Tensor:
    """Boolean [N, M]: True where query n, at position M - N + n, sees key m through its window."""
    position = torch.arange(M - N, M)[:, None]  # [N, 1]
    key = torch.arange(M)  # [M]
    return (key <= position) & (key > position - window_size)


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
    titles = ("yours", "a window of exactly w")
    for axis, mask, title in zip(axes[0], (got, expected), titles, strict=True):
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


_WINDOW = TEXTS.exercise(
    "window_mask", minutes=5, difficulty=1, solution=window_mask, picture=_draw_window,
    tolerance=0.0,
    misconceptions=diffs(window_mask, [
        ("position = ", "window_size += 1; position = ", "a window of w + 1",
         "From t − w to t, both included, there are w + 1. Which is the oldest key that a late "
         "query sees?"),
        ("position = ", "window_size -= 1; position = ", "a window of w − 1",
         "Count the keys of a late query. Which one is missing at the far end?"),
        ("key <= position", "key < position", "leaving out the query's own key",
         "The window ends with the query itself, which is one of the w. Is your comparison `<` "
         "or `<=`?"),
        ("[:, None]", "[:, None] - 1", "shifting the window back by one",
         "There are w keys, but the query's own is not among them. Which key comes last?"),
        ("[:, None]", "[:, None] + 1", "shifting the window ahead by one",
         "The newest key of each window is one that the query does not see. What is the position "
         "of the last of M tokens?"),
        ("position - window_size", "(position - window_size + 1) % M - 1",
         "a slice that begins below 0",
         "For an early query t − w + 1 is negative, and Python counts that from the end. Where "
         "does its window begin?"),
        ("M - N, M", "N", "taking the queries for the first N positions",
         "They are the last N of the M. At which position does query 0 stand?"),
        ("(key <= position) & (key > position - window_size)",
         "(key - position).abs() < window_size", "opening the window to both sides",
         "Without its sign, the distance to a key of the future is small, too. Does a query see "
         "later keys?"),
        ("(key <= position) & ", "", "cutting at the far end only",
         "Keys that are too old are hidden. And those of the future?"),
        (" & (key > position - window_size)", "", "hiding the future and nothing else",
         "That is plain causal attention. Which is the oldest key inside the window?"),
        ("key > position - window_size", "key >= position // window_size * window_size",
         "a block in place of a window",
         "Blocks begin at multiples of their size. Where does a window begin that moves along "
         "with its query, one key at a time?"),
        ({"return ": "return ~(", "window_size)": "window_size))"},
         "a mask that is True where the key is hidden",
         "The mask is asked for as True where the query sees the key. What does the `~` of it "
         "say?"),
        ({"[:, None]": "", "torch.arange(M)": "torch.arange(M)[:, None]"},
         "giving the queries columns, and the keys rows",
         "The shape asked for is `[N, M]`: a row for each query. Which of your two vectors has "
         "to be the column?"),
        (") & (", ") | (", "joining the two ends of the window with `or`",
         "Every key passes one of the two comparisons: it is not too new, or not too old. How "
         "many of them does a key of the window pass?"),
        ("M - N, M", "N - M, 2 * N - M", "taking N − M for M − N",
         "The queries stand at the end of the text. How many positions lie in front of them, and "
         "is your number negative?"),
        ({"return ": "return torch.where(", "window_size)": "window_size), 1.0, 0.0)"},
         "returning numbers where a boolean mask is asked for",
         "The values are right. But as an index, 0 and 1 choose rows 0 and 1, and `~` does not "
         "turn them round. Which dtype does a comparison give?"),
    ]),
    cases=(
        Case("N = M = 5, a window of 3", lambda: (5, 5, 3)),
        Case("the last 2 of 6 positions, a window of 2", lambda: (2, 6, 2)),
        Case("a window of 1: itself", lambda: (3, 4, 1)),
        Case("a window wider than the text", lambda: (4, 7, 9)),
        Case("one query, 9 keys: decoding", lambda: (1, 9, 4)),
    ),
)  # fmt: skip


# -- selected_attention --


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> Tensor:
    """Causal attention to listed blocks, o [N, HQ, DV]; the queries are the last N of M."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    position, head = torch.arange(M - N, M)[:, None, None], torch.arange(H)[:, None]
    ids = block_indices.repeat_interleave(block_size, dim=-1)  # [N, H, S * BS], the id of each row
    offset = torch.arange(ids.shape[-1]) % block_size  # and its place in the block
    token = ids * block_size + offset
    is_seen = (ids >= 0) & (token <= position)
    row, hidden = torch.where(is_seen, token, 0), ~is_seen[..., None]
    k_tile = k[row, head].masked_fill(hidden, 0)  # [N, H, S * BS, D]
    v_tile = v[row, head].masked_fill(hidden, 0)
    s = q.unflatten(1, (H, HQ // H)) @ k_tile.mT * D**-0.5  # [N, H, G, S * BS]
    weights = torch.softmax(s.masked_fill(hidden.mT, -torch.inf), dim=-1)
    o = weights.masked_fill(hidden.mT, 0) @ v_tile  # an empty row's weights were NaN
    return o.flatten(1, 2)


def _given_gradients(attempt: Callable, *arguments: object) -> object:
    """What an attempt returns; where the inputs ask for it, with the gradients of `q`, `k`, `v`."""
    o = attempt(*arguments)
    q, k, v = arguments[:3]
    if not (q.requires_grad and isinstance(o, Tensor) and o.grad_fn is not None):
        return o
    return (o, *gradients(o, _random(*o.shape, seed=40), q=q, k=k, v=v))


def _by_slots(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Each slot by a softmax of its own, o [S, N, HQ, DV], and which rows see something there."""
    o = [selected_attention(q, k, v, slot, block_size) for slot in block_indices.split(1, -1)]
    (N, HQ, _), (M, H, _) = q.shape, k.shape
    position = torch.arange(M - N, M)[:, None, None]
    sees = (block_indices >= 0) & (block_indices * block_size <= position)  # [N, H, S]
    return torch.stack(o), sees.permute(2, 0, 1).repeat_interleave(HQ // H, dim=2)


def _summed_up(*arguments: object) -> Tensor:
    return _by_slots(*arguments)[0].sum(0)


def _averaged(*arguments: object) -> Tensor:
    o, sees = _by_slots(*arguments)
    return o.sum(0) / sees.sum(0).clamp(min=1)[..., None]


def _once(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int) -> Tensor:
    """A block that is listed again is an empty slot."""
    ids = block_indices.sort(-1).values
    again = ids[..., 1:] == ids[..., :-1]
    again = torch.nn.functional.pad(again, (1, 0))
    return selected_attention(q, k, v, ids.masked_fill(again, -1), block_size)


def _under_a_mask(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> Tensor:
    """Dense attention, with -inf for every key that no list names."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    key, position = torch.arange(M), torch.arange(M - N, M)[:, None, None]
    listed = (block_indices[..., None] == key // block_size).any(2)  # [N, H, M]
    hidden = ~(listed & (key <= position)).repeat_interleave(HQ // H, dim=1)
    keys, values = (x.repeat_interleave(HQ // H, dim=1) for x in (k, v))
    s = torch.einsum("nhd,mhd->nhm", q, keys) * D**-0.5
    weights = torch.softmax(s.masked_fill(hidden, -torch.inf), -1).masked_fill(hidden, 0)
    return torch.einsum("nhm,mhd->nhd", weights, values)


def _lists(
    N: int, M: int, lists: list, *, BS: int = 2, HQ: int = 1, H: int = 1, D: int = 3, DV: int = 2,
    hidden: float | None = None, learns: bool = False,
) -> tuple:  # fmt: skip
    """Random tensors and given lists.

    Args:
        N, M, BS, HQ, H, D, DV: sizes.
        lists: `[N, H, S]`, or `[N, S]` for one KV head.
        hidden: what stands in keys and values that no query sees; None for numbers like the others.
        learns: the tensors ask for gradients.
    """
    ids = torch.tensor(lists).view(N, H, -1)
    q, k, v = (_random(*size, seed=i) for i, size in enumerate(((N, HQ, D), (M, H, D), (M, H, DV))))
    if hidden is not None:
        key, position = torch.arange(M), torch.arange(M - N, M)[:, None, None]
        listed = (ids[..., None] == key // BS).any(2) & (key <= position)  # [N, H, M]
        unseen = ~listed.any(0).T[..., None]  # [M, H, 1]
        k, v = (x.masked_fill(unseen, hidden) for x in (k, v))
    if learns:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return q, k, v, ids, BS


_FORBIDDEN = (
    ("torch.scaled_dot_product_attention", "PyTorch's attention"),
    ("nsa_tutorial", "the course's own function"),
)

_SELECTED = TEXTS.exercise(
    "selected_attention", minutes=20, difficulty=3, solution=selected_attention,
    run=_given_gradients, forbidden=_FORBIDDEN,
    stages=(
        Stage("one list", (
            Case("one query, the last of 4 tokens, blocks of 2, the list [1]",
                 lambda: _lists(1, 4, [[1]])),
            Case("the last of 9 tokens, blocks of 3, the list [2, 0]",
                 lambda: _lists(1, 9, [[2, 0]], BS=3)),
        )),
        Stage("a block listed twice", (
            Case("the last of 6 tokens, the list [0, 2, 0]", lambda: _lists(1, 6, [[0, 2, 0]])),
        )),
        Stage("many queries", (
            Case("the last 2 of 6 tokens, blocks of 2; the earlier one does not list its own",
                 lambda: _lists(2, 6, [[0, 1], [0, 2]])),
        )),
        Stage("the causal cut", (
            Case("4 tokens, blocks of 4: each query's own block",
                 lambda: _lists(4, 4, [[0]] * 4, BS=4)),
            Case("the last 3 of 7 tokens, blocks of 3: the last block is short",
                 lambda: _lists(3, 7, [[1, 0], [0, 1], [2, 1]], BS=3)),
            Case("a block of the future, and its own",
                 lambda: _lists(3, 6, [[2, 1], [1, 2], [0, 2]])),
        )),
        Stage("empty slots", (
            Case("4 tokens, blocks of 2, -1 in front and behind",
                 lambda: _lists(4, 4, [[-1, 0], [0, -1], [-1, 1], [1, 0]])),
            Case("-1 between two blocks", lambda: _lists(2, 9, [[0, -1, 2], [2, -1, 1]], BS=3)),
        )),
        Stage("a query that sees nothing", (
            Case("nothing but empty slots", lambda: _lists(2, 4, [[-1, -1], [0, -1]])),
            Case("nothing but the future", lambda: _lists(3, 6, [[2, -1], [0, 1], [2, 0]])),
        )),
        Stage("NaN in what is hidden", (
            Case("one query, blocks of 2, the list [1, -1], all other tokens are NaN",
                 lambda: _lists(1, 6, [[1, -1]], hidden=torch.nan)),
            Case("blocks of 4; the tokens behind the query are NaN",
                 lambda: tuple(_cut(3, *_lists(4, 4, [[0]] * 4, BS=4)))),
        )),
        Stage("groups", (
            Case("four heads on two KV heads, with lists of their own",
                 lambda: _lists(2, 6, [[[0, 2], [1, 2]], [[2, 1], [0, -1]]], HQ=4, H=2)),
            Case("six heads on two KV heads",
                 lambda: _lists(3, 9, [[[0, 2], [1, -1]], [[2, 1], [0, 2]], [[1, 0], [2, 2]]],
                                BS=3, HQ=6, H=2, D=4)),
        )),
        Stage("gradients", (
            Case("four heads on two KV heads, gradients of q, k and v; a query sees nothing",
                 lambda: _lists(3, 6, [[[0, 2], [1, 2]], [[-1, -1], [0, -1]], [[2, 0], [0, 1]]],
                                HQ=4, H=2, learns=True)),
        )),
    ),
    misconceptions=diffs(selected_attention, [
        (" * D**-0.5", "", "leaving out the scale",
         "Dot products are multiplied by `D ** -0.5` before the softmax. Where does that happen "
         "in your code?"),
        ("D**-0.5", "D**-1", "dividing by D where √D is meant",
         "The scores are too flat. Which power of D is the scale?"),
        ("D**-0.5", "v.shape[-1]**-0.5", "a scale of the values' width",
         "The scale is for products of queries and keys. How wide are those? `DV` may differ."),
        ("ids * block_size + offset", "ids + offset", "taking an id for a token's position",
         "An id counts blocks. At which token does block 2 begin if a block holds 4?"),
        ({"block_indices.repeat_interleave(block_size": "block_indices.repeat_interleave(4",
          "% block_size": "% 4", "ids * block_size": "ids * 4"},
         "blocks of 4, whatever `block_size` says",
         "The chapter's example has blocks of 4. Which argument says how many tokens a block has?"),
        (_once, "counting a block once that is listed twice",
         "A list may name a block twice, and then each of its keys has double weight. Where does "
         "the second one get lost? (A mask cannot count.)"),
        (_under_a_mask, "counting a block once that is listed twice"),
        ("M - N, M", "N", "taking the queries for the first N positions",
         "They are the last N of the M. At which position does query 0 stand, and how many keys "
         "came before it?"),
        ("ids = block_indices.", "ids = block_indices[:1].expand_as(block_indices).",
         "taking query 0's list for all",
         "Each query has lists of its own. Which index of `block_indices` chooses the query?"),
        ("dim=-1)\n    o", "dim=0)\n    o", "a softmax over the queries",
         "The weights of one query sum to 1, over its keys. Which axis of your scores has the "
         "keys?"),
        ("token <= position", "token < position", "hiding the query's own position from it",
         "A query sees itself: the last of M sees M keys. Does your comparison say `<` or `<=`?"),
        ("token <= position", "token <= position + 1", "letting a query see one key too many",
         "The query at position t sees keys 0 to t. Which token comes right after it?"),
        ("(token <= position)", "(ids * block_size <= position) & (token < M)",
         "leaving out the cut inside the last block",
         "A block that begins in a query's past may end in its future. What do you compare with "
         "the query's position: where the block begins, or each of its tokens?"),
        ("token <= position", "token < M", "letting every query see the future",
         "Every block is taken as far as the text goes. Which of its tokens may query n see?"),
        ("token <= position", "(ids + 1) * block_size <= position + 1",
         "keeping only blocks that are visible as a whole",
         "The visible part of a block counts, however short. What is left of the query's own "
         "block?"),
        ("token <= position", "ids < position // block_size", "leaving out the query's own block",
         "The latest tokens stand in the query's own block. Which of them may it see?"),
        ("torch.where(is_seen, token, 0)", "token", "loading rows that do not exist",
         "A block may run past the last token, and an id past the last block. Which row can "
         "stand in for one that is hidden anyway?"),
        ("(ids >= 0) & ", "", "letting -1 wrap round to the end of the text",
         "In Python, -1 counts from the end, and −4 to −1 are below every position. What should "
         "an empty slot show?"),
        ("block_indices.repeat", "block_indices.clamp(min=0).repeat",
         "taking an empty slot for block 0",
         "-1 has become 0, so block 0 counts although no slot lists it, or counts once more. "
         "What should an empty slot add?"),
        ("block_indices.repeat",
         "block_indices.masked_fill((block_indices < 0).cumsum(-1) > 0, -1).repeat",
         "stopping at the first empty slot",
         "`-1` may stand anywhere in the row. What if a block comes behind it?"),
        ("ids >= 0", "ids > 0", "taking id 0 for an empty slot",
         "Block 0 is the first block of the text, and only negative ids are empty. What does "
         "your comparison say about 0?"),
        ("ids >= 0", "token > 0", "hiding token 0",
         "Token 0 is the first of the text, and it is real. Does your comparison say `>` or "
         "`>=`?"),
        ("s.masked_fill(hidden.mT, -torch.inf)", "s", "a score of 0 where a key is hidden",
         "A row of zeros has the score 0, and e⁰ = 1 is a weight like any other. Which score "
         "gives the weight 0?"),
        ({"s.masked_fill(hidden.mT, -torch.inf)": "s",
          "k[row, head].masked_fill(hidden, 0)": "k[token.clamp(0, M - 1), head]"},
         "hiding keys after the softmax",
         "Weights that become 0 afterwards leave the others too small. Where does the −∞ have "
         "to come in?"),
        ({"softmax(s.masked_fill(hidden": "softmax(s.masked_fill(~hidden",
          "weights.masked_fill(hidden.mT": "weights.masked_fill(~hidden.mT"},
         "an inverted mask",
         "`masked_fill` fills where its mask is True. Is yours True where a key is hidden, or "
         "where it is seen?"),
        ("softmax(s.masked_fill(hidden", "softmax(s.masked_fill(~hidden", "an inverted mask"),
        ("weights.masked_fill(hidden.mT, 0)", "weights", "dividing by the sum of nothing",
         "If all scores are −∞, the softmax divides 0 by 0. Which output does the chapter give "
         "to such an empty row?"),
        ("v[row, head].masked_fill(hidden, 0)", "v[token.clamp(0, M - 1), head]",
         "a hidden NaN times 0",
         "The weight of a hidden key is 0, but its value was loaded, and 0 · NaN is NaN. Which "
         "operation chooses between the row and a zero?"),
        ("v[row, head].masked_fill(hidden, 0)", "v[row, head]", "a hidden NaN times 0"),
        ({"v[row, head].masked_fill(hidden, 0)": "v[row, head] * ~hidden",
          "k[row, head].masked_fill(hidden, 0)": "k[row, head] * ~hidden"},
         "a hidden NaN times 0"),
        (_summed_up, "adding up the blocks' outputs",
         "Each block's weights sum to 1, so those of two blocks sum to 2. Over which keys does "
         "the one softmax run?"),
        (_averaged, "averaging the blocks' outputs",
         "A block of weak scores would count as much as a strong one. Over which keys does the "
         "one softmax run?"),
        ({"q.unflatten(1, (H, HQ // H))": "q.unflatten(1, (HQ // H, H)).transpose(1, 2)",
          "o.flatten": "o.transpose(1, 2).flatten"}, "dealing out the query heads in turn",
         "The heads of a group are neighbours: query head hq belongs to KV head hq // G. Which "
         "heads belong to KV head 1?"),
        ("ids = block_indices.", "ids = block_indices[:, :1].expand_as(block_indices).",
         "taking the first KV head's list for all",
         "Each KV head has a list of its own. Which index of `block_indices` chooses it?"),
        ("k[row, head]", "k[row, 0 * head]", "reading the keys of KV head 0 for every group",
         "The lists and the values fit, the scores do not. Which KV head's keys does group h "
         "read?"),
        ("v[row, head]", "v[row, 0 * head]", "reading the values of KV head 0 for every group",
         "The lists and the keys fit, the values do not. Which KV head's values does group h "
         "read?"),
        ({"k[row, head]": "k[row, 0 * head]", "v[row, head]": "v[row, 0 * head]"},
         "reading the keys and values of KV head 0 for every group",
         "Each KV head has keys and values of its own. Which index of `k` and `v` chooses it?"),
        ("o.flatten(1, 2)", "o", "leaving the groups apart",
         "The numbers are right. The result is asked for as `[N, HQ, DV]`: which two axes of "
         "yours make up the query heads?"),
        ("return o", "return o.detach()", "an output that autograd cannot follow",
         "The output is right. But `.item()`, `.detach()`, `.tolist()` of scores and `no_grad` "
         "cut the graph. Where does yours end?"),
    ]),
)  # fmt: skip


def _cut(
    first: int, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block_size: int
) -> Iterator[object]:
    """The same for the queries before `first`, in a text whose tokens from there on are NaN."""
    behind = torch.arange(len(k))[:, None, None] >= first
    # later queries see nothing: their lists are empty
    late = torch.arange(len(q))[:, None, None] >= first
    yield from (q, k.masked_fill(behind, torch.nan), v.masked_fill(behind, torch.nan))
    yield from (ids.masked_fill(late, -1), block_size)


# -- window_attention --


def window_attention(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    """Attention to the latest window_size keys, o [N, HQ, DV]; the queries are the last N of M."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    keys, values = (x.repeat_interleave(HQ // H, dim=1) for x in (k, v))  # [M, HQ, …]
    s = torch.einsum("nhd,mhd->hnm", q, keys) * D**-0.5
    s = s.masked_fill(~window_mask(N, M, window_size), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", torch.softmax(s, dim=-1), values)


def _windows(
    N: int, M: int, window_size: int, *, HQ: int = 1, H: int = 1, learns: bool = False
) -> tuple:
    sizes = ((N, HQ, 3), (M, H, 3), (M, H, 2))
    q, k, v = (_random(*size, seed=i + 50).requires_grad_(learns) for i, size in enumerate(sizes))
    return q, k, v, window_size


_ATTEND_WINDOW = TEXTS.exercise(
    "window_attention", minutes=8, difficulty=2, solution=window_attention,
    run=_given_gradients, forbidden=_FORBIDDEN, parts=(window_mask,),
    stages=(
        Stage("a window", (
            Case("5 tokens, a window of 2", lambda: _windows(5, 5, 2)),
            Case("4 tokens, a window of 9", lambda: _windows(4, 4, 9)),
        )),
        Stage("the last positions", (
            Case("the last 2 of 6 positions, a window of 3", lambda: _windows(2, 6, 3)),
        )),
        Stage("groups", (
            Case("four heads on two KV heads", lambda: _windows(4, 6, 2, HQ=4, H=2)),
            Case("six heads on two KV heads", lambda: _windows(3, 7, 4, HQ=6, H=2)),
        )),
        Stage("gradients", (
            Case("two heads on one KV head, gradients of q, k and v",
                 lambda: _windows(3, 5, 2, HQ=2, learns=True)),
        )),
    ),
    misconceptions=diffs(window_attention, [
        (" * D**-0.5", "", "leaving out the scale",
         "Dot products are multiplied by `D ** -0.5` before the softmax. Where does that happen "
         "in your code?"),
        ("D**-0.5", "D**-1", "dividing by D where √D is meant",
         "The scores are too flat. Which power of D is the scale?"),
        ("D**-0.5", "v.shape[-1]**-0.5", "a scale of the values' width",
         "The scale is for products of queries and keys. How wide are those? `DV` may differ."),
        ("key > position - window_size", "key >= position // window_size * window_size",
         "a block in place of a window",
         "Blocks begin at multiples of their size. Where does a window begin that moves along "
         "with its query, one key at a time?"),
        ("(N, M, window_size), -torch", "(N, M, window_size + 1), -torch", "a window of w + 1",
         "Count the keys of a late query, its own included. How many are there?"),
        ("(N, M, window_size), -torch", "(N, M, window_size - 1), -torch", "a window of w − 1",
         "Count the keys of a late query, its own included. How many are there?"),
        ("key <= position", "key < position", "leaving out the query's own key",
         "The window ends with the query itself, which is one of the w. Is your comparison `<` "
         "or `<=`?"),
        ("(key <= position) & ", "", "cutting at the far end only",
         "Keys that are too old are hidden. And those of the future?"),
        ("~window_mask(N, M, window_size), -torch", "~window_mask(N, M, M), -torch",
         "hiding the future and nothing else",
         "That is plain causal attention. Which is the oldest key inside the window?"),
        ("s = s.masked_fill(~window_mask(N, M, window_size), -torch.inf)",
         "p = torch.arange(M - N, M)[:, None]; m = torch.arange(M)\n"
         "    s = s.masked_fill((p - m).abs() >= window_size, -torch.inf)",
         "opening the window to both sides",
         "Without its sign, the distance to a key of the future is small, too. Does a query see "
         "later keys?"),
        ("~window_mask(N", "window_mask(N", "an inverted mask",
         "`masked_fill` fills where its mask is True. What does your mask say with True?"),
        ("-torch.inf)", "0)", "a score of 0 where a key is hidden",
         "e⁰ = 1 is a weight like any other. Which score gives the weight 0?"),
        ({"s = s.masked_fill(~window_mask(N, M, window_size), -torch.inf)":
          "is_seen = window_mask(N, M, window_size)",
          "torch.softmax(s, dim=-1)": "torch.softmax(s, dim=-1) * is_seen"},
         "hiding keys after the softmax",
         "Weights that become 0 afterwards leave the others too small. Where does the −∞ have "
         "to come in?"),
        ("dim=-1), values", "dim=-2), values", "a softmax over the queries",
         "The weights of one query sum to 1, over its keys. Which axis of your scores has the "
         "keys?"),
        ("M - N, M", "N", "taking the queries for the first N positions",
         "They are the last N of the M. At which position does query 0 stand?"),
        ("x.repeat_interleave(HQ // H, dim=1)", "x.repeat(1, HQ // H, 1)",
         "dealing out the query heads in turn",
         "The heads of a group are neighbours: query head hq belongs to KV head hq // G. Which "
         "heads belong to KV head 1?"),
        ("x.repeat_interleave(HQ // H, dim=1)", "x[:, :1].expand(-1, HQ, -1)",
         "reading the keys and values of KV head 0 for every group",
         "Each KV head has keys and values of its own. Which one does query head hq read?"),
        ("hnm,mhd->nhd", "hnm,mhd->hnd", "returning the heads in front",
         "The numbers are right. The result is asked for as `[N, HQ, DV]`. Which axis comes "
         "first?"),
        ("dim=-1), values)", "dim=-1), values).detach()", "an output that autograd cannot follow",
         "The output is right. But `.item()`, `.detach()`, `.tolist()` of scores and `no_grad` "
         "cut the graph. Where does yours end?"),
    ], parts=(window_mask,)),
)  # fmt: skip


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


def _tree(kernel: object) -> ast.Module | None:
    """A kernel's source, parsed; None where it cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None


@functools.cache
def _given() -> str:
    """The kernel that the cell gives, as syntax."""
    given = Edited(sum_of_list, {"(block_id >= 0) & (tokens <= position)": "tokens < M"})
    return ast.dump(_tree(given()))


def _joins_by_python(tree: ast.Module) -> bool:
    """Whether the line of `is_seen` has `and` or `or`, or compares in a chain: Triton's
    interpreter takes one side of them."""
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


def _check_source(kernel: object) -> None:
    """Refuse the kernel as it was given, and what the interpreter would take in another way than a
    GPU.

    Raises:
        NotImplementedError: for the given kernel, but for comments and spaces.
        TypeError: for tiles that Python joins, and for functions of torch, which take no tiles.
    """
    tree = _tree(kernel)
    if tree is None:
        return
    if ast.dump(tree) == _given():
        raise NotImplementedError("the kernel is as it was given")
    if _joins_by_python(tree):
        raise TypeError(
            "tiles are not joined by `and`, `or` or a chain such as `a <= b <= c`: write "
            "`(...) & (...)`, with both pairs of brackets"
        )
    if any(isinstance(part, ast.Name) and part.id == "torch" for part in ast.walk(tree)):
        raise TypeError(
            "functions of torch take no tiles of a kernel: join two conditions by `(...) & (...)`"
        )


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
    _check_source(kernel)
    M, DV = len(lists), 2
    memory = torch.full((_FRONT + M + 4 * block_size, DV), 1000.0)
    memory[:_FRONT] = torch.nan
    memory[_FRONT : _FRONT + M] = 2.0 ** torch.arange(M)[:, None] * torch.tensor([1.0, -1.0])
    v, ids = roomy(memory, 1000.0)[_FRONT:], roomy(torch.tensor(lists, dtype=torch.int32), -1)
    total = roomy(torch.full((M, DV), -77.0), -77.0)
    kernel[M,](v, ids, total, M, ids.shape[1], DV=DV, BS=block_size)
    return total.cpu()


def _sum_case(name: str, lists: list[list[int]], block_size: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (lists, block_size), lambda: here.why_not("triton", here.device))


_SUM = TEXTS.exercise(
    "sum_of_list", minutes=6, difficulty=2, solution=sum_of_list, run=_run_sum,
    misconceptions=diffs(sum_of_list, [
        ("tokens <= position", "tokens < M", "loading tokens of the query's future",
         "`tokens < M` stops at the end of the text. Where does the past of the query at "
         "`position` end?"),
        ("block_id >= 0", "block_id >= -1", "loading an empty slot's block",
         "For id -1 all tokens are negative, so every upper limit lets them pass. In front of "
         "`V` lies NaN here, and 0 · NaN is NaN. Which id must not be loaded?"),
        ("(tokens <= position)", "(tokens < M) & (block_id * BS <= position)",
         "loading all of a block that the query stands in",
         "The query's own block begins in its past and ends in its future. What do you compare: "
         "where the block begins, or each of its tokens?"),
        ("(tokens <= position)", "(tokens < M) & (block_id * BS + BS <= position + 1)",
         "keeping only blocks that are visible as a whole",
         "The visible part of a block counts, however short. What is left of the query's own "
         "block?"),
        ("tokens <= position", "tokens < position", "hiding the query's own position from it",
         "A query sees itself. Does your comparison say `<` or `<=`?"),
        ("tokens <= position", "tokens == position", "showing a query nothing but itself",
         "The tokens before the query count, too. Which comparison lets them pass?"),
        ("block_id >= 0", "block_id > 0", "taking id 0 for an empty slot",
         "Block 0 is the first block of the text, and only negative ids are empty. What does "
         "your comparison say about 0?"),
        ("tokens = ", "block_id = tl.maximum(block_id, 0)\n            tokens = ",
         "taking an empty slot for block 0",
         "-1 has become 0, so block 0 is added although no slot lists it. What should an empty "
         "slot add?"),
        ("tokens = ",
         "block_id = tl.where(block_id < 0, (M - 1) // BS, block_id)\n            tokens = ",
         "letting -1 wrap round to the last block",
         "-1 names no block, and the last block is mostly the future. What should an empty slot "
         "add?"),
        ("tokens <= position", "tokens <= position + 1", "showing one key too many",
         "The query at `position` sees the keys up to its own. Which token comes right after it?"),
        ("(block_id >= 0) & (tokens <= position)", "(block_id >= 0) | (tokens <= position)",
         "joining the two comparisons with `|`",
         "With `|`, one comparison is enough. A token of an empty slot lies before every query. "
         "How many of the two does a token have to pass?"),
        ({"for slot in": "goes_on = 1\n        for slot in", "(block_id >= 0)": "(goes_on > 0)",
          "tokens = ": "goes_on = tl.where(block_id < 0, 0, goes_on)\n            tokens = "},
         "stopping at the first empty slot",
         "`-1` may stand anywhere in the row. What if a block comes behind it?"),
        ("total += ", "total = ", "keeping the last slot alone",
         "Each turn of the loop overwrites what the slots before have given. Which operator adds?"),
    ]),
    cases=(
        _sum_case("blocks of 2, each query lists its own", [[0], [0], [1], [1]], 2),
        _sum_case("an empty slot in front", [[-1, 0], [-1, 0], [0, 1], [-1, 1]], 2),
        _sum_case("blocks of the past and of the future", [[0, 1], [1, 0], [2, 0], [1, 0]], 2),
        _sum_case("7 tokens in blocks of 4: the last is short",
                  [[0, -1], [1, 0], [-1, -1], [-1, 0], [1, 0], [0, -1], [1, 2]], 4),
    ),
)  # fmt: skip


EXERCISES = (_SELECTED, _ATTEND_WINDOW, _LOAD, _WINDOW, _TOKENS, _SUM)


def _is_8_to_11(guess: object) -> bool:
    """Whether a guess names the tokens as a range."""
    return re.fullmatch(r"\W*8 ?(to|-|–|\.\.+|:) ?11\W*", str(guess)) is not None


PREDICTIONS = TEXTS.predictions(
    globals(), listed_share={"tolerance": 0.1}, list_crossover={"unit": "tokens", "tolerance": 0.1}
)

TRAPS = TEXTS.traps


# -- two mistakes at once --

DOUBLES = (
    Double("tokens_of_list", names=(
        "showing all of a block that the query stands in", "cutting causally always")),
    Double("tokens_of_list", names=(
        "hiding the query's own position from it", "stopping at the first empty slot")),
    Double("load_block", names=("multiplying by the mask", "reading first and hiding afterwards")),
    Double("load_block", names=("multiplying by the mask", "comparing with num_visible only")),
    Double("sum_of_list", names=(
        "loading tokens of the query's future", "loading an empty slot's block")),
    Double("window_mask", names=(
        "a window of w + 1", "taking the queries for the first N positions")),
    Double("window_mask", names=("opening the window to both sides", "a window of w + 1")),
    Double("window_attention", names=("leaving out the scale", "a window of w + 1")),
)  # fmt: skip
