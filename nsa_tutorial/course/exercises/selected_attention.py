"""Exercises of chapter 05: from a list to tokens, a load behind a guard, the window, and the whole
walk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.online_softmax import LOG2_E


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


def _tokens(change: str) -> Callable:
    """A wrong `tokens_of_list`, with one change."""

    def wrong(ids: list[int], position: int, M: int, block_size: int, causal: bool) -> list[int]:
        num_visible = position + 1 if causal else M
        tokens = []
        for block_id in sorted(ids) if change == "sorted" else ids:
            if block_id < 0 and change == "stop":
                break
            if block_id < 0 and change == "wrap":
                block_id += -(-M // block_size)
            if block_id < 0 and change != "negative":
                continue
            if block_id == 0 and change == "zero is empty":
                continue
            start = block_id if change == "offset" else block_id * block_size
            end = start + block_size
            limit = num_visible
            if change == "no cut" and causal:
                limit = M if start < num_visible else 0
            if change == "future block" and causal and start > position:
                limit = M
            if change == "always causal":
                limit = position + 1
            if change == "past the end" and not causal:
                limit = end if start < M else 0
            if change == "not itself" and causal:
                limit = position
            if change == "whole blocks":
                limit = end if end <= num_visible else 0
            tokens += range(start, min(end, limit))
        return tokens

    return wrong


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


_TOKENS = Exercise(
    name="tokens_of_list",
    statement="""
One query at `position`, `M` keys, blocks of `block_size` keys. `ids` is its list: block ids, with
`-1` for an empty slot, anywhere. Return the positions of all the keys that the query sees, as a
list of Python integers, slot by slot in the order of `ids`. If `causal`, it sees no key after its
own position; otherwise every key that exists, of the listed blocks. An id in the future, or past
the last block, shows nothing.
""",
    minutes=6,
    difficulty=2,
    solution=tokens_of_list,
    misconceptions=(
        Misconception(
            "taking an id for a token's position",
            _tokens("offset"),
            "An id counts blocks. At which token does block 2 begin if a block holds 4?",
        ),
        Misconception(
            "letting -1 wrap round to the last block",
            _tokens("wrap"),
            "In Python, index -1 is the last one, and the last block is mostly the future. Here "
            "-1 means: nothing in this slot.",
        ),
        Misconception(
            "turning -1 into negative positions",
            _tokens("negative"),
            "-1 times the block size is a position in front of the first token. An empty slot "
            "has to be left out "
            "before you multiply.",
        ),
        Misconception(
            "stopping at the first empty slot",
            _tokens("stop"),
            "`-1` may stand anywhere in the row, with a block behind it. Leave the slot out, and "
            "go on.",
        ),
        Misconception(
            "taking id 0 for an empty slot",
            _tokens("zero is empty"),
            "Block 0 is the first block of the text. Only negative ids are empty; look at your "
            "comparison, or at what "
            "Python calls true.",
        ),
        Misconception(
            "showing all of a block that the query stands in",
            _tokens("no cut"),
            "A block that begins in the past may end in the future. How far may this query see?",
        ),
        Misconception(
            "cutting the own block but not a block further on",
            _tokens("future block"),
            "A listed block may lie in the future as a whole. What is its first token, and may "
            "the query see that one?",
        ),
        Misconception(
            "running past the last key",
            _tokens("past the end"),
            "Where the block size does not divide M, the last block is shorter. With the causal "
            "cut you do not notice; "
            "without it you do.",
        ),
        Misconception(
            "hiding the query's own position from it",
            _tokens("not itself"),
            "A query sees itself: at position 0 there is one key, not none. How many keys are "
            "visible at position t?",
        ),
        Misconception(
            "keeping only blocks that are visible as a whole",
            _tokens("whole blocks"),
            "The visible part of a block counts, however short. In most places the query's own "
            "block is the one that is cut.",
        ),
        Misconception(
            "sorting the positions",
            _tokens("sorted"),
            "All keys are there. Take them slot by slot, as they stand in the list.",
        ),
        Misconception(
            "cutting causally always",
            _tokens("always causal"),
            "With causal=False the query sees its listed blocks up to the end of the text.",
        ),
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
    """A tile [BS, D] of the block's rows, zeros where nothing may be loaded, and `is_seen` [BS]."""
    offset = block_id * block_size + torch.arange(block_size)  # [BS]
    is_seen = (block_id >= 0) & (offset < num_visible)
    tile = x.new_zeros(block_size, x.shape[1])
    tile[is_seen] = x[offset[is_seen]]
    return tile, is_seen


def _load(change: str) -> Callable:
    """A wrong `load_block`, with one change."""

    def wrong(x: Tensor, block_id: int, num_visible: int, block_size: int) -> tuple[Tensor, Tensor]:
        M = len(x)
        limit = M if change == "no cut" else num_visible
        offset = (block_id if change == "offset" else block_id * block_size) + torch.arange(
            block_size
        )
        if change == "wrap" and block_id < 0:
            offset = (block_id + -(-M // block_size)) * block_size + torch.arange(block_size)
        is_seen = (offset >= 0) & (offset < limit)
        if change == "negative index":
            is_seen = offset < limit
            return x[torch.where(is_seen, offset, 0)].masked_fill(~is_seen[:, None], 0), is_seen
        if change == "only the score":
            return x[offset % M], is_seen
        if change == "times the mask":
            return x[offset % M] * is_seen[:, None], is_seen
        if change == "out of bounds":
            rows = x[offset] if block_id >= 0 else x.new_zeros(block_size, x.shape[1])
            return rows.masked_fill(~is_seen[:, None], 0), is_seen
        if change == "shorter":
            return x[offset[is_seen]], is_seen[is_seen]
        tile = torch.full(
            (block_size, x.shape[1]), -torch.inf if change == "minus infinity" else 0.0
        )
        tile[is_seen] = x[offset[is_seen]]
        if change == "negative counts as seen":
            is_seen = offset < limit
        return tile, is_seen

    return wrong


_LOAD = Exercise(
    name="load_block",
    statement="""
What a kernel does for one slot. `x` `[M, D]` holds the keys (or the values) of one head, and the
query sees its first `num_visible` rows. Return `(tile, is_seen)`. `tile` `[BS, D]` always has
`block_size` rows: the rows of block `block_id`, and zeros in place of every row that the query does
not see or that does not exist. `is_seen` `[BS]` is a boolean tensor and says which are real. For
`block_id = -1` nothing is seen. In most cases the rows that the query does not see hold NaN, as
memory that nobody has written may.
""",
    minutes=7,
    difficulty=2,
    solution=load_block,
    misconceptions=(
        Misconception(
            "hiding the score, and loading the row all the same",
            _load("only the score"),
            "`is_seen` is right, and it will hide the score. But the hidden row sits in the "
            "tile, and its value is multiplied by a "
            "weight of 0 later. What is 0 · NaN?",
        ),
        Misconception(
            "multiplying by the mask",
            _load("times the mask"),
            "0 · NaN is NaN: a product does not remove a number. Choose between the row and a "
            "zero instead, or do not "
            "load it at all.",
        ),
        Misconception(
            "comparing with num_visible only",
            _load("negative index"),
            "Every negative position is below num_visible, and as an index it counts from the "
            "end. Which half of the guard is "
            "missing?",
        ),
        Misconception(
            "letting -1 wrap round to the last block",
            _load("wrap"),
            "-1 names no block. The last block is mostly in the future, and a query that reads "
            "it looks ahead.",
        ),
        Misconception(
            "counting the rows of an empty slot as seen",
            _load("negative counts as seen"),
            "The tile is right, and its zeros would enter the softmax: a key of zeros has the "
            "score 0 and the weight e⁰. Positions "
            "below num_visible include all negative ones.",
        ),
        Misconception(
            "loading up to the end of the text, whatever the query may see",
            _load("no cut"),
            "Rows from num_visible on are the future. They exist, and they are not for this query.",
        ),
        Misconception(
            "taking the id for the first row",
            _load("offset"),
            "Block 1 does not begin at row 1. How many rows lie in front of it?",
        ),
        Misconception(
            "reading first and hiding afterwards",
            _load("out of bounds"),
            "Where the block runs past the end, there is no row to be read. PyTorch raises an "
            "error; a GPU reads what lies there.",
        ),
        Misconception(
            "a tile with fewer rows",
            _load("shorter"),
            "A kernel's tile has a fixed shape: keep all block_size rows, and put zeros where "
            "there is nothing.",
        ),
        Misconception(
            "filling the tile with −∞",
            _load("minus infinity"),
            "−∞ belongs in a score. In a key it is multiplied by a query, and −∞ times a "
            "negative number is +∞; in a "
            "value, 0 · −∞ is NaN.",
        ),
    ),
    cases=(
        Case("rows 0 to 5, blocks of 2: block 1", lambda: (_rows(6, 6), 1, 6, 2)),
        Case("block 1 again, and the query sees 3 rows", lambda: (_rows(6, 3), 1, 3, 2)),
        Case("an empty slot", lambda: (_rows(6, 3), -1, 3, 2)),
        Case("a block of the future", lambda: (_rows(6, 3), 2, 3, 2)),
        Case("7 rows, blocks of 3: the last holds one", lambda: (_rows(7, 7), 2, 7, 3)),
        Case("an empty slot, with the last block visible", lambda: (_rows(8, 8), -1, 8, 4)),
        Case("two columns, random numbers", lambda: (_random(9, 2, seed=0), 1, 7, 4)),
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


def _window(
    wider: int = 0, offset: bool = True, causal: bool = True, front: int = 0, aligned: bool = False
) -> Callable:
    """A wrong `window_mask`: how many keys too wide or too narrow, where the queries stand, whether
    the future is hidden."""

    def wrong(N: int, M: int, window_size: int) -> Tensor:
        position = torch.arange(N)[:, None] + (M - N if offset else 0)
        key = torch.arange(M)
        first = position - window_size + 1 - wider
        if aligned:
            first = position // window_size * window_size
        if not causal:
            return (key - position).abs() < window_size
        return (key <= position - front) & (key >= first)

    return wrong


def _past_only(N: int, M: int, window_size: int) -> Tensor:
    return torch.arange(M) > torch.arange(M - N, M)[:, None] - window_size


def _complement(N: int, M: int, window_size: int) -> Tensor:
    return ~window_mask(N, M, window_size)


def _draw_window(arguments: tuple, got: object, expected: Tensor) -> Picture:
    """What was seen beside what should be."""
    got = torch.as_tensor(got)
    N, M, w = arguments
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
    widths = sorted(set(got.sum(1).int().tolist()))
    return Picture(figure, f"A window of {w}: your queries see {', '.join(map(str, widths))} keys")


_WINDOW = Exercise(
    name="window_mask",
    statement="""
The sliding window as a mask, `[N, M]` boolean, True where visible: the `N` queries are the last of
`M` positions, and each sees exactly the latest `window_size` keys, its own included, or all that
there are at the start of the text.
""",
    minutes=5,
    difficulty=1,
    solution=window_mask,
    misconceptions=(
        Misconception(
            "a window of w + 1",
            _window(wider=1),
            "Count the keys of a late query. From t − w to t, both included, there are w + 1.",
        ),
        Misconception(
            "a window of w − 1",
            _window(wider=-1),
            "Count the keys of a late query: one is missing at the far end.",
        ),
        Misconception(
            "leaving out the query's own key",
            _window(front=1),
            "The window ends with the query itself, which is one of the w.",
        ),
        Misconception(
            "shifting the window back by one",
            _window(front=1, wider=1),
            "There are w keys, and the query's own is not among them.",
        ),
        Misconception(
            "taking the queries for the first N positions",
            _window(offset=False),
            "They are the last N of the M: query 0 stands at position M − N.",
        ),
        Misconception(
            "a window to both sides",
            _window(causal=False),
            "The distance to a key of the future is small too, if you drop its sign. A query "
            "sees no later key.",
        ),
        Misconception(
            "cutting at the far end only",
            _past_only,
            "Keys that are too old are hidden. And those of the future?",
        ),
        Misconception(
            "a block in place of a window",
            _window(aligned=True),
            "Blocks begin at multiples of their size; the window moves along with its query, one "
            "key at a time.",
        ),
        Misconception(
            "True where hidden",
            _complement,
            "The mask is asked for as True where the query sees the key.",
        ),
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
                state = online_softmax.update(state, acc_s, v[tokens, h], scale * LOG2_E)
            o[n, group], lse[n, group] = online_softmax.finish(state, scale)
    return o, lse


def _attend(change: str) -> Callable:
    """A wrong `attend_to_lists`, with one change."""

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor]:
        (N, HQ, D), (M, H, DV) = q.shape, v.shape
        G = HQ // H
        scale = 1.0 if change == "no scale" else D**-0.5
        o, lse = torch.empty(N, HQ, DV), torch.empty(N, HQ)
        for n, h in ((n, h) for n in range(N) for h in range(H)):
            num_visible = (
                n + 1 if change == "first positions" else M - N + n + (change != "not itself")
            )
            limit = M if change in ("no cut", "load, then mask") else num_visible
            group = slice(h, HQ, H) if change == "dealt out" else slice(h * G, (h + 1) * G)
            state, parts = online_softmax.start(G, DV), []
            for block_id in block_indices[n, 0 if change == "first list" else h].tolist():
                if block_id < 0 and change == "wrap":
                    block_id += -(-M // block_size)
                if block_id < 0 and change == "stop":
                    break
                start = block_id * block_size
                if block_id < 0 or start >= limit:
                    continue
                end = min(start + block_size, limit)
                acc_s = q[n, group] @ k[start:end, h].T
                if change == "load, then mask":
                    acc_s = acc_s.masked_fill(torch.arange(start, end) >= num_visible, -torch.inf)
                if change in ("anew", "average"):
                    state = online_softmax.start(G, DV)
                state = online_softmax.update(state, acc_s, v[start:end, h], scale * LOG2_E)
                parts.append(online_softmax.finish(state, scale))
            o[n, group], lse[n, group] = online_softmax.finish(state, scale)
            if change == "average" and parts:
                o[n, group] = torch.stack([part for part, _ in parts]).mean(0)
                lse[n, group] = torch.logsumexp(torch.stack([part for _, part in parts]), 0)
            if change == "0/0":
                o[n, group] = state.acc_o / state.running_sum[:, None]
        return o, lse

    return wrong


_ATTEND = Exercise(
    name="attend_to_lists",
    statement="""
The operator, for one text. `q` `[N, HQ, D]` are the last `N` of `M` positions, `k` `[M, H, D]`, `v`
`[M, H, DV]`; `block_indices` `[N, H, S]` holds the list of each query and KV head, with `-1`
anywhere. Return causal attention's `o` `[N, HQ, DV]` and `lse` `[N, HQ]`, scale `D ** -0.5`. Hold
the scores of one block at a time, and do not load what a query does not see: in one case it is NaN,
in another a query sees nothing at all. Start from `walk` above: it does one query and one KV head.
What remains is which rows of `q` belong together, and how much each query may see.
""",
    minutes=10,
    difficulty=3,
    solution=attend_to_lists,
    misconceptions=(
        Misconception(
            "taking the queries for the first N positions",
            _attend("first positions"),
            "They are the last N of the M: query 0 stands at position M − N, and sees all that "
            "was there before it.",
        ),
        Misconception(
            "hiding the query's own position from it",
            _attend("not itself"),
            "A query sees itself: the last of M sees M keys. How many does the one at position t "
            "see?",
        ),
        Misconception(
            "dealing out the query heads in turn",
            _attend("dealt out"),
            "Query head hq belongs to KV head hq // G: the heads of a group are neighbours. One "
            "KV head alone would hide this.",
        ),
        Misconception(
            "the list of the first KV head for all",
            _attend("first list"),
            "Each KV head has a list of its own, shared by its own group only.",
        ),
        Misconception(
            "loading what is hidden, and masking its score",
            _attend("load, then mask"),
            "The weight of a hidden key is 0, and 0 · NaN is NaN. Cut the block before you load "
            "its keys and values.",
        ),
        Misconception(
            "no cut inside the last block",
            _attend("no cut"),
            "A block that begins in a query's past may end in its future, and a listed block may "
            "lie there as a whole.",
        ),
        Misconception(
            "letting -1 wrap round to the last block",
            _attend("wrap"),
            "An empty slot is left out. In Python, -1 counts from the end, where the future is.",
        ),
        Misconception(
            "stopping at the first empty slot",
            _attend("stop"),
            "A block may follow behind it: leave out the slot, not the rest of the list.",
        ),
        Misconception(
            "starting anew at every block",
            _attend("anew"),
            "The state is what joins the blocks of a list: start it once, in front of the walk.",
        ),
        Misconception(
            "averaging the blocks' outputs",
            _attend("average"),
            "Each block's softmax sums to 1 by itself, so that a block of weak scores would "
            "count as much as a strong one. "
            "One softmax runs over all keys of the list.",
        ),
        Misconception(
            "dividing by the sum of nothing",
            _attend("0/0"),
            "A row that saw no key has running_sum 0 and acc_o 0. What is its output to be? "
            "`finish` "
            "knows.",
        ),
        Misconception(
            "leaving out the scale",
            _attend("no scale"),
            "The dot products are multiplied by D ** -0.5, here inside scale_log2 and in `finish`.",
        ),
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
        Case(
            "4 tokens, blocks of 4, later values are NaN for the first query",
            lambda: _untouchable(),
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


def _four(lists: list[list[list[int]]]) -> tuple:
    k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([1.0, 2, 4, 8])
    return torch.ones(2, 1, 1), k[:, None, None], v[:, None, None], torch.tensor(lists), 2


def _untouchable() -> tuple:
    """The first query comes out finite only if it leaves the last value alone."""
    q, k, v, _, _ = _four([[[0]], [[0]]])
    return q, k, v.masked_fill(v == 8, torch.nan), torch.zeros(2, 1, 1, dtype=torch.int64), 4


def _steep() -> tuple:
    k = 100 * torch.arange(9.0)[:, None, None]
    return torch.ones(2, 1, 1), k, _random(9, 1, 2, seed=9), torch.tensor([[[2, 0]], [[0, 2]]]), 3


EXERCISES = (_TOKENS, _LOAD, _WINDOW, _ATTEND)
