"""Exercises of chapter 05: from a list to tokens, a load behind a guard, the whole walk, a small
kernel with two bugs, and the window."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import online_softmax
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


# tiles from `load_block`, with zeros where nothing is seen
_LOADED = {
    "tokens = slice(block_start, min(block_start + block_size, num_visible))":
        "k_tile, _ = load_block(k[:, h], block_id, num_visible, block_size)\n"
        "                v_tile, _ = load_block(v[:, h], block_id, num_visible, block_size)",
    "k[tokens, h]": "k_tile",
    "v[tokens, h]": "v_tile",
}  # fmt: skip


def _by_slots(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Each slot by a softmax of its own: o [S, N, HQ, DV] and lse [S, N, HQ]."""
    slots = block_indices.split(1, dim=-1)
    o, lse = zip(*(attend_to_lists(q, k, v, slot, block_size) for slot in slots), strict=True)
    return torch.stack(o), torch.stack(lse)


def _summed_up(*arguments: object) -> tuple[Tensor, Tensor]:
    o, lse = _by_slots(*arguments)
    return o.sum(0), lse.logsumexp(0)


def _averaged(*arguments: object) -> tuple[Tensor, Tensor]:
    o, lse = _by_slots(*arguments)
    num_seen = (lse > -torch.inf).sum(0).clamp(min=1)  # [N, HQ]
    return o.sum(0) / num_seen[..., None], lse.logsumexp(0)


def _problem(*, N: int, M: int, HQ: int, H: int, seed: int, empty: bool = False) -> tuple:
    """Random tensors; each list is two of the three blocks of 4, in some order, if `empty` behind
    an empty slot."""
    q, k, v = (
        _random(N, HQ, 4, seed=seed, factor=2),
        _random(M, H, 4, seed=seed + 10),
        _random(M, H, 3, seed=seed + 20),
    )
    generator = torch.Generator().manual_seed(seed + 30)
    block_indices = torch.rand(N, H, 3, generator=generator).argsort(-1)[..., :2]
    if empty:
        block_indices = torch.nn.functional.pad(block_indices, (1, 0), value=-1)
    return q, k, v, block_indices, 4


def _four(lists: list[list[list[int]]], last_value: float = 8.0, block_size: int = 2) -> tuple:
    k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([1.0, 2, 4, last_value])
    q = torch.ones(2, 1, 1)
    return q, k[:, None, None], v[:, None, None], torch.tensor(lists), block_size


def _steep() -> tuple:
    k = 100 * torch.arange(9.0)[:, None, None]
    return torch.ones(2, 1, 1), k, _random(9, 1, 2, seed=9), torch.tensor([[[2, 0]], [[0, 2]]]), 3


_ATTEND = TEXTS.exercise(
    "attend_to_lists", minutes=8, difficulty=3, solution=attend_to_lists, run=_run_attend,
    misconceptions=diffs(attend_to_lists, [
        ("M - N + ", "", "taking the queries for the first N positions",
         "They are the last N of the M. At which position does query 0 stand, and how many keys "
         "came before it?"),
        ("n + 1", "n", "hiding the query's own position from it",
         "A query sees itself: the last of M sees M keys. How many does the one at position t "
         "see?"),
        ("slice(h * G, (h + 1) * G)", "slice(h, HQ, H)", "dealing out the query heads in turn",
         "The heads of a group are neighbours: query head hq belongs to KV head hq // G. Which "
         "heads belong to KV head 1?"),
        ("in range(H)", "in range(HQ)", "taking a query head for a KV head",
         "There are fewer KV heads than query heads. Which KV head, and which list, does query "
         "head hq share?"),
        ("q[n, group]", "q[n, h]", "giving `update` one query head where it takes the group",
         "`q[n, h]` is one row, `[D]`, and its scores have one axis. `update` takes `[G, BS]`: a "
         "row for each query head of the group. Which name in the frame picks these rows of `q`?"),
        ("q[n, group]", "q[n, h : h + 1]",
         "giving `update` one query head where it takes the group",
         "All heads of the group got the scores of one of them. Which name in the frame picks "
         "the group's rows of `q`?"),
        ("k[tokens, h]", "k[tokens, 0]", "reading the keys of KV head 0 for every group",
         "The lists and the values fit, the scores do not. Which KV head's keys does group h "
         "read?"),
        ("v[tokens, h]", "v[tokens, 0]", "reading the values of KV head 0 for every group",
         "The lists and the keys fit, the values do not. Which KV head's values does group h "
         "read?"),
        ({"k[tokens, h]": "k[tokens, 0]", "v[tokens, h]": "v[tokens, 0]"},
         "reading the keys and values of KV head 0 for every group",
         "Each KV head has keys and values of its own. Which index of `k` and `v` chooses it?"),
        ("block_start = ", "load_block(k, block_id, M, block_size); block_start = ",
         "handing `load_block` all KV heads at once",
         "`load_block` takes the rows of one head, `[M, D]`, and `k` is `[M, H, D]`. Which index "
         "picks KV head h?"),
        ({" or block_start >= num_visible": "", **_LOADED}, "a score of 0 where a key is hidden",
         "The empty slots are left out. But what a listed block holds of the future is rows of "
         "zeros, with the score 0 and the weight e⁰ = 1. Which score gives the weight 0?"),
        (_LOADED, "a score of 0 where a key is hidden",
         "The empty slots are left out. But in the last block, a row of zeros has the score 0 "
         "and the weight e⁰ = 1. Which score gives the weight 0?"),
        ({"block_id < 0 or block_start >= num_visible": "False", **_LOADED},
         "a score of 0 where a key is hidden",
         "A row of zeros has the score 0, and e⁰ = 1 is a weight like any other. Which score "
         "gives the weight 0?"),
        ("block_indices[n, h].tolist()", "range(block_indices.shape[-1])",
         "walking over the slots' numbers",
         "A slot's number is its place in the list. Which number *in* the slot says which block "
         "to load?"),
        ("block_indices[n, h].tolist()", "range(-(-M // block_size))", "walking over every block",
         "That is dense attention, block by block. Where does the list say which blocks to load?"),
        ("[n, h]", "[n, 0]", "taking the first KV head's list for all",
         "Each KV head has a list of its own. Which index of `block_indices` chooses it?"),
        ({"block_start >= num_visible": "block_start >= M",
          "block_size, num_visible": "block_size, M", "  # [G, BS], fewer keys in the last block":
              "; acc_s[:, torch.arange(M)[tokens] >= num_visible] = -torch.inf"},
         "loading what is hidden, and masking its score",
         "The weight of a hidden key is 0, but its value was loaded. What is 0 · NaN?"),
        ({"block_id < 0 or ": "", "slice(block_start": "torch.arange(block_start",
          "state = online_softmax.update(":
              "acc_s[:, tokens < 0] = -torch.inf; state = online_softmax.update("},
         "loading an empty slot's block, and masking its score",
         "Its weight is 0, but the -1 has loaded values from the end of the text. What if they "
         "are NaN?"),
        (" or block_start >= num_visible", "", "going into a block of the future",
         "The whole block lies in the query's future: the cut leaves nothing of its slice, and "
         "no scores have no maximum. At which `block_start` does a block show nothing any more?"),
        ("block_id < 0 or ", "", "going into an empty slot",
         "For -1 the slice ends at 0 and holds no key, and no scores have no maximum. What "
         "should an empty slot add to the state?"),
        (".tolist()", ".clamp(min=0).tolist()", "taking an empty slot for block 0",
         "-1 has become 0, so block 0 counts although no slot lists it, or counts once more. "
         "What should an empty slot add?"),
        ("n + 1", "n + 2", "letting a query see one key too many",
         "The query at position t sees keys 0 to t. How many are these, and at which position "
         "does query n stand?"),
        ("block_start >= num_visible", "block_start + block_size > num_visible",
         "keeping only blocks that are visible as a whole",
         "The visible part of a block counts, however short. What is left of the query's own "
         "block?"),
        (".tolist()", ".unique().tolist()", "counting a block once that is listed twice",
         "A list may name a block twice, and then each of its keys has double weight. Where does "
         "the second one get lost?"),
        ("[n, h]", "[0, h]", "taking query 0's list for all",
         "Each query has lists of its own. Which index of `block_indices` chooses the query?"),
        ("slice(block_start, min(block_start + block_size, num_visible))",
         "torch.arange(block_start, block_start + block_size)",
         "leaving out the cut inside the last block",
         "A block that begins in a query's past may end in its future, or past the last key. "
         "Where do the block's tokens have to end?"),
        ("block_size, num_visible", "block_size, M", "leaving out the cut inside the last block",
         "A block that begins in a query's past may end in its future. Where does the slice of "
         "keys have to end?"),
        ("M - N + n + 1", "M", "letting every query see the future",
         "Every block is taken as far as the text goes. How many keys may query n see?"),
        ("block_start = ", "block_id += -(-M // block_size) * (block_id < 0); block_start = ",
         "letting -1 wrap round to the last block",
         "In Python, -1 counts from the end, where the future is. What should an empty slot do?"),
        ("block_start = ",
         "if block_id < 0:\n                    break\n                block_start = ",
         "stopping at the first empty slot",
         "A block may follow behind it. Which word leaves out one slot, and not the rest of the "
         "list?"),
        ("block_start = ", "state = online_softmax.start(G, DV); block_start = ",
         "starting anew at every block",
         "The state joins the blocks of a list. Does it start inside your loop, or before it?"),
        ("tokens = ", "state = online_softmax.start(G, DV); tokens = ",
         "starting anew at every block",
         "The state joins the blocks of a list. Where does it have to start?"),
        ("state = online_softmax.update(", "online_softmax.update(",
         "dropping what `update` returns",
         "`update` changes nothing in place: it returns the new state. Under which name does "
         "your loop keep that?"),
        ({"            state = online_softmax.start(G, DV)\n": "",
          "num_visible = ": "state = online_softmax.start(G, DV); num_visible = "},
         "not starting anew for each list",
         "What the first KV head's list has summed up is still in the state when the second "
         "one's begins. Where does a state have to start?"),
        ({"            state = online_softmax.start(G, DV)\n": "",
          "for n in": "state = online_softmax.start(G, DV)\n    for n in"},
         "not starting anew for each list",
         "What the lists before have summed up is still in the state. Where does a state have to "
         "start?"),
        (_summed_up, "adding up the blocks' outputs",
         "Each block's weights sum to 1, so those of two blocks sum to 2. Over which keys does "
         "the one softmax run?"),
        (_averaged, "averaging the blocks' outputs",
         "A block of weak scores would count as much as a strong one. Over which keys does the "
         "one softmax run?"),
        ("(state, scale)",
         "(state, scale); o[n, group] = state.acc_o / state.running_sum[:, None]",
         "dividing by the sum of nothing",
         "A query that sees nothing divides 0 by 0. Which output does the chapter give to such "
         "an empty row?"),
        ("continue  # nothing is loaded",
         "nothing = torch.exp2(state.scores_max - state.scores_max)\n                    "
         "state = state._replace(running_sum=state.running_sum * nothing); continue",
         "rescaling while the maximum is still −∞",
         "The first slots may show nothing, and then the old and the new maximum are −∞. What is "
         "−∞ − (−∞)?"),
        ("D**-0.5", "1.0", "leaving out the scale",
         "Dot products are multiplied by `D ** -0.5` before the softmax. Where does that happen "
         "in your code? (`update` and `finish` want to be told.)"),
        ("scale * online_softmax", "online_softmax", "leaving out the scale in `update`",
         "`finish` knows the scale, and `update` got `LOG2_E` alone. Which two factors make up "
         "`scale_log2`?"),
        (".T", ".T * scale", "scaling the scores twice",
         "`update` takes plain dot products and scales them itself. Where else does your code "
         "multiply by the scale?"),
        ({".T": ".T * scale", "scale * online_softmax": "online_softmax"},
         "scaling the scores before `update`",
         "`o` is right, and `lse` is not: `finish` scales the maximum once more. `update` takes "
         "plain dot products. Which factor tells it the scale?"),
        (" * online_softmax.LOG2_E", "", "powers of two without log₂ e",
         "`update` takes powers of two. By which factor does an exponent grow from base e to "
         "base 2?"),
        ("return ", "lse *= online_softmax.LOG2_E; return ", "returning `lse` in base two",
         "`o` is right, and `lse` is log₂ e times too large. In which base does the course "
         "return it?"),
        ("return ", "lse[lse == -torch.inf] = 0; return ",
         "an `lse` of 0 for a row that sees nothing",
         "`lse` is the logarithm of a sum, here of a sum of nothing. What is log 0?"),
        ("o, lse\n", "lse, o\n", "returning `lse` before `o`",
         "Both are there. In which order does the statement ask for them?"),
    ]),
    cases=(
        Case("the last 2 of 4 tokens, blocks of 2, the list [1, 0]",
             lambda: _four([[[1, 0]], [[1, 0]]])),
        Case("two KV heads with different lists, three query heads each",
             lambda: _problem(N=3, M=11, HQ=6, H=2, seed=0)),
        Case("empty slots in front of blocks",
             lambda: _problem(N=11, M=11, HQ=2, H=1, seed=1, empty=True)),
        Case("a query that lists nothing", lambda: _four([[[-1, -1]], [[0, -1]]])),
        Case("a block listed twice", lambda: _four([[[1, 1, 0]], [[0, 1, 0]]])),
        # the first query comes out finite only if it leaves the last value alone
        Case("4 tokens, blocks of 4, later values are NaN for the first query",
             lambda: _four([[[0]], [[0]]], last_value=torch.nan, block_size=4)),
        Case("blocks of 2, an empty slot, the last value is NaN",
             lambda: _four([[[0, -1]], [[0, -1]]], last_value=torch.nan)),
        Case("scores that fall by the hundred, and rise", lambda: _steep()),
    ),
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


EXERCISES = (_TOKENS, _LOAD, _ATTEND, _SUM, _WINDOW)


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
    Double("attend_to_lists", names=(
        "leaving out the cut inside the last block", "stopping at the first empty slot")),
    Double("attend_to_lists", names=(
        "dealing out the query heads in turn", "leaving out the scale")),
)  # fmt: skip
