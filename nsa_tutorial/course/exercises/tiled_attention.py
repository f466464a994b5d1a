"""Exercises of chapter 04: which tiles to skip, and the whole walk; then, for readers with more
time, the ragged tail, a small kernel with two bugs, and what a walk costs.

The wrong solutions of an exercise are one function, or one kernel, told which slips to make.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- tile_kinds --


def tile_kinds(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    """One string per tile of queries, one letter per tile of keys: "F" full, "D" diagonal, "S"
    skipped."""
    rows = []
    for query_start in range(0, N, tile_q):
        first_query = M - N + query_start  # positions, from here on
        last_query = M - N + min(query_start + tile_q, N) - 1
        row = ""
        for first_key in range(0, M, tile_k):
            last_key = min(first_key + tile_k, M) - 1
            if first_key > last_query:
                row += "S"
            elif last_key <= first_query:
                row += "F"
            else:
                row += "D"
        rows.append(row)
    return rows


def _kinds(slips: Slips, N: int, M: int, tile_q: int, tile_k: int) -> list[str] | list[list[str]]:
    """`tile_kinds` with slips."""
    offset = 0 if "first positions" in slips else N - M if "N - M" in slips else M - N
    rows = []
    for i in range(N // tile_q if "no tail" in slips else -(-N // tile_q)):
        first = offset + i * tile_q
        last = offset + min((i + 1) * tile_q, N) - ("one query more" not in slips)
        row = ""
        for j in range(M // tile_k if "no tail" in slips else -(-M // tile_k)):
            start, end = j * tile_k, (j + 1) * tile_k
            last_key = (end if "unclipped" in slips else min(end, M)) - 1
            if "past the end" in slips:
                last_key += 1
            limit = first if "skip by the first" in slips else last
            is_skipped = start >= limit if "strict" in slips else start > limit
            is_full = last_key <= (last if "full by the last" in slips else first)
            if "skip by the last key" in slips:
                is_skipped = last_key > last
            if "full by the first key" in slips:
                is_full = start <= first
            if "full after the first key" in slips:
                is_full = start < first
            if "by number" in slips:
                is_skipped, is_full = j > i, j < i
            skipped = "SD" if "two letters" in slips else "S"
            row += skipped if is_skipped else "F" if is_full and "never full" not in slips else "D"
        rows.append(row)
    if "swapped" in slips:  # a string for each tile of keys
        rows = ["".join(column) for column in zip(*rows, strict=True)]
    return [list(row) for row in rows] if "letters" in slips else rows


def _draw_kinds(arguments: tuple, got: list[str], expected: list[str]) -> Picture:
    """The tiles over the visible pairs, wrong letters in red."""
    N, M, tile_q, tile_k = arguments
    figure, axes = new_figure(5.0, 3.0)
    axis, wrong = axes[0, 0], 0
    visible = torch.arange(M)[None, :] <= torch.arange(M - N, M)[:, None]
    axis.pcolormesh(
        range(M + 1), range(N + 1), visible.float().numpy(), cmap="Blues", vmin=0, vmax=2.5
    )
    for i, row in enumerate(got):
        for j, letter in enumerate(row):
            x, y = (
                (j * tile_k + min((j + 1) * tile_k, M)) / 2,
                (i * tile_q + min((i + 1) * tile_q, N)) / 2,
            )
            right = letter == expected[i][j]
            wrong += not right
            text = letter if right else f"{letter}, not {expected[i][j]}"
            axis.text(x, y, text, ha="center", va="center", fontsize=9,
            color=PALETTE["text" if right else "query"],
                      weight="normal" if right else "bold")  # fmt: skip
    axis.set_xticks(range(0, M + 1, tile_k))
    axis.set_yticks(range(0, N + 1, tile_q))
    axis.grid(color=PALETTE["faint"], linewidth=1)
    axis.invert_yaxis()
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    are = "is" if wrong == 1 else "are"
    return Picture(
        figure, f"{wrong} of {sum(map(len, got))} tiles {are} of another kind (blue: visible pairs)"
    )


_FULL_BY_THE_FIRST_KEY = ("full by the first key", "full after the first key")

_KINDS_MISTAKES = (
    Misconception(
        "comparing the numbers of tiles, not positions",
        slip(_kinds, "by number"),
        "Tile 2 of the queries and tile 2 of the keys begin at the same position only where "
        "`tile_q` equals `tile_k` and `N` equals `M`. At which positions do they begin here?",
    ),
    Misconception(
        "taking the queries for the first N positions",
        slip(_kinds, "first positions"),
        "The queries are the last `N` of the `M` positions, so earlier keys come before query 0. "
        "At which position does query 0 stand?",
    ),
    Misconception(
        "adding `N - M` where the queries stand `M - N` further on",
        slip(_kinds, "N - M"),
        "There are more positions than queries, so your shift is below 0. How many positions come "
        "before query 0?",
    ),
    Misconception(
        "skipping what the first query of a tile does not see",
        slip(_kinds, "skip by the first"),
        "The other queries of the tile stand further on and may see more. Which of them decides "
        "that nothing is seen?",
    ),
    Misconception(
        "calling a tile full because its last query sees all of it",
        slip(_kinds, "full by the last"),
        "A full tile gets no mask, so here the earlier queries look into the future. The last "
        "query sees the most. Which one sees the least?",
    ),
    Misconception(
        "skipping a tile by its last key",
        slip(_kinds, "skip by the last key"),
        "A tile on the diagonal may end after the last query, yet its first keys are visible. "
        "Which key of a tile tells you that nobody sees any of it?",
    ),
    *(
        Misconception(
            "calling a tile full by its first key",
            slip(_kinds, name),
            "The first key of a tile is the easiest to see. Which key must a query reach to see "
            "all of them?",
        )
        for name in _FULL_BY_THE_FIRST_KEY
    ),
    Misconception(
        "giving a skipped tile two letters",
        slip(_kinds, "two letters"),
        "Your rows have more letters than there are tiles. Do your three branches exclude one "
        "another?",
    ),
    Misconception(
        "masking every tile that is not skipped",
        slip(_kinds, "never full"),
        "The result would be right, but a mask costs time, and most tiles need none. In which "
        "tiles does even the first query see the last key?",
    ),
    Misconception(
        "skipping a tile whose first key is the last query's own position",
        slip(_kinds, "strict"),
        "One visible pair is enough to keep a tile. Does a query see its own position?",
    ),
    Misconception(
        "taking the end of a tile of queries for its last query",
        slip(_kinds, "one query more"),
        "You keep tiles that only the next query would see. Which is the last query of a tile of "
        "2 that begins at 0?",
    ),
    Misconception(
        "masking a tile whose last key is the first query's own position",
        slip(_kinds, "past the end"),
        "You call too many tiles diagonal. Does a query see the key at its own position? Look at "
        "`<` and `<=`.",
    ),
    Misconception(
        "measuring the last tile of keys past the end",
        slip(_kinds, "unclipped"),
        "Where `tile_k` does not divide `M`, the last tile holds fewer keys. Which is the last "
        "key that exists?",
    ),
    Misconception(
        "dropping the tiles at the ends, which hold fewer",
        slip(_kinds, "no tail"),
        "Where a size does not divide its length, a shorter tile is left at the end. How many "
        "tiles of 3 do 7 tokens need?",
    ),
    Misconception(
        "a list of letters where a string is asked for",
        slip(_kinds, "letters"),
        'Each row of tiles is one string, such as `"DS"`. How do you join letters into one?',
    ),
    Misconception(
        "a string for each tile of keys",
        slip(_kinds, "swapped"),
        "Your rows and columns have changed places. Over which tiles does the outer loop go, and "
        "over which the inner one?",
    ),
)

_OTHER_WAYS_TO_BE_FULL = (
    "by number",
    "full by the last",
    "never full",
    "past the end",
    "unclipped",
)

_KINDS = TEXTS.exercise(
    "tile_kinds",
    minutes=9,
    difficulty=2,
    solution=tile_kinds,
    misconceptions=_KINDS_MISTAKES,
    combine=together(
        _KINDS_MISTAKES,
        {"by number", "first positions", "N - M"},
        {"by number", "skip by the first"},
        {"by number", "strict"},
        {"by number", "full by the last", "never full"},
        {"by number", "past the end", "unclipped", "never full"},
        *({"by number", "skip by the last key", name} for name in ("skip by the first", "strict")),
        *({name, *_FULL_BY_THE_FIRST_KEY} for name in _OTHER_WAYS_TO_BE_FULL),
        *({name, "two letters"} for name in ("letters", "swapped", "by number")),
    ),
    cases=(
        Case("four queries, six keys, tiles of 2 × 2", lambda: (4, 6, 2, 2)),
        Case("N = M = 8, tiles of 2 × 4", lambda: (8, 8, 2, 4)),
        Case("N = M = 8, tiles of 4 × 2", lambda: (8, 8, 4, 2)),
        Case(
            "N = M = 7, tiles of 3 × 3: the last tile holds one query and one key",
            lambda: (7, 7, 3, 3),
        ),
        Case("the last 5 of 13 positions, tiles of 2 × 4", lambda: (5, 13, 2, 4)),
        Case("one query, 9 keys: decoding", lambda: (1, 9, 4, 4)),
        Case("tiles of one query and one key", lambda: (3, 4, 1, 1)),
    ),
    picture=_draw_kinds,
)


# -- mask_tile --


def _padded(BQ: int, BK: int, seed: int, missing: int) -> Tensor:
    """Random scores of a tile whose last keys do not exist: there the score is 0."""
    scores = _random(BQ, BK, seed=seed)
    scores[:, -missing:] = 0
    return scores


def mask_tile(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    """The scores of a tile [BQ, BK], with -inf for every key that is in its query's future or does
    not exist."""
    BQ, BK = acc_s.shape
    position = M - N + query_start + torch.arange(BQ)  # [BQ] of the queries
    key_position = key_start + torch.arange(BK)  # [BK]
    visible = (key_position < M).expand(BQ, BK)
    if causal:
        visible = visible & (key_position <= position[:, None])
    return acc_s.masked_fill(~visible, -torch.inf)


def _masked(
    slips: Slips, acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    """`mask_tile` with slips."""
    BQ, BK = acc_s.shape
    rows, columns = torch.arange(BQ)[:, None], torch.arange(BK)
    position = rows + (0 if "no starts" in slips else query_start)
    position = position + (0 if slips & {"first positions", "triangle"} else M - N)
    key = columns + (0 if "no starts" in slips else key_start)
    if "triangle" in slips:
        position, key = rows, columns
    is_past = key < position if "strict" in slips else key <= position
    exists = key_start + columns < M + ("one more" in slips)
    if "keys against N" in slips:
        exists = key_start + columns < N
    visible = exists.expand(BQ, BK) | ("tail" in slips)
    if "zero is missing" in slips:
        visible = acc_s != 0
    if (causal or "always" in slips) and "future" not in slips:
        visible = visible & is_past
    hidden = visible if "upside down" in slips else ~visible
    fill = next((number for name, number in _FILLS.items() if name in slips), -torch.inf)
    scores = acc_s.masked_fill(hidden, fill)
    return scores[:, : M - key_start] if "cut" in slips else scores


_LARGE = (-1e4, -1e30, torch.finfo(torch.float32).min, -1e9)
_FILLS = {"zeros": 0.0} | {f"large {number}": number for number in _LARGE}

_MASK_MISTAKES = (
    Misconception(
        "leaving the ragged tail in",
        slip(_masked, "tail"),
        "With `causal` the mask happens to hide the keys past the end, which lie in everyone's "
        "future. Without it they stay. How much does a score of 0 weigh?",
    ),
    Misconception(
        "keeping the key just past the end",
        slip(_masked, "one more"),
        "The keys are numbered from 0. Which is the last number below `M`?",
    ),
    Misconception(
        "comparing keys with the number of queries",
        slip(_masked, "keys against N"),
        "`N` counts queries. Which number says how many keys there are?",
    ),
    Misconception(
        "leaving the future in",
        slip(_masked, "future"),
        "With `causal`, a query sees no key after its own position. Which two positions do you "
        "have to compare?",
    ),
    Misconception(
        "a triangle within the tile, wherever the tile lies",
        slip(_masked, "triangle"),
        "`tril` and `triu` compare row and column inside the tile. That is right only where the "
        "first query stands at the position of the first key. At which positions do they stand "
        "here?",
    ),
    Misconception(
        "forgetting where the tile begins",
        slip(_masked, "no starts"),
        "You count from 0 in every tile. Which query is row 0 of this one, and which key is "
        "column 0?",
    ),
    Misconception(
        "taking the queries for the first N positions",
        slip(_masked, "first positions"),
        "They are the last `N` of the `M`. At which position does query 0 stand?",
    ),
    Misconception(
        "hiding a query's own position from it",
        slip(_masked, "strict"),
        "A query sees the keys at its own position and before. Is your comparison `<` or `<=`?",
    ),
    Misconception(
        "writing zeros where -inf is meant",
        slip(_masked, "zeros"),
        "These are scores, and the softmax is still to come. What does it make of a score of 0, "
        "and what of -inf?",
    ),
    *(
        Misconception(
            "a large negative number in place of -inf",
            slip(_masked, f"large {number}"),
            "It works until a row has nothing else: then the hidden keys are the largest scores. "
            "Which score can no other be below?",
        )
        for number in _LARGE
    ),
    Misconception(
        "taking a score of 0 for a key that does not exist",
        slip(_masked, "zero is missing"),
        "A key that exists may have the score 0, too. What tells a key past the end from the "
        "others?",
    ),
    Misconception(
        "hiding what is visible",
        slip(_masked, "upside down"),
        "`masked_fill` fills where its mask is True. Which pairs does your mask name?",
    ),
    Misconception(
        "applying the causal mask always",
        slip(_masked, "always"),
        "You hide the future although `causal` is False. What does a query see then?",
    ),
    Misconception(
        "cutting the tail off",
        slip(_masked, "cut"),
        "In PyTorch that would do, but a kernel's tile has a fixed shape. What can stand in the "
        "columns past the end?",
    ),
)

_MASK = TEXTS.exercise(
    "mask_tile",
    minutes=5,
    difficulty=2,
    solution=mask_tile,
    misconceptions=_MASK_MISTAKES,
    combine=together(
        _MASK_MISTAKES,
        {"triangle", "no starts"},
        {"triangle", "first positions"},
        {"tail", "one more", "cut", "zero is missing", "keys against N"},
        {"zeros", "large -1000000000.0"},
        {"future", "always"},
        {"future", "triangle"},
        {"future", "no starts"},
        {"future", "first positions"},
        {"future", "strict"},
    ),
    cases=(
        Case(
            "queries 2 and 3 of 4, at positions 3 and 4; keys 2 to 5, and there are only 5",
            lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, True),
        ),
        Case(
            "queries 2 and 3 of 4, keys 2 to 5 of 5, no causal mask",
            lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, False),
        ),
        Case("a tile on the diagonal, 4 × 6", lambda: (_random(4, 6, seed=0), 8, 6, 16, 16, True)),
        Case(
            "the last 3 of 11 positions, keys from 8",
            lambda: (_padded(3, 4, seed=1, missing=1), 0, 8, 3, 11, True),
        ),
        Case(
            "the last 3 of 11 positions, no causal mask, two keys past the end",
            lambda: (_padded(3, 5, seed=2, missing=2), 0, 8, 3, 11, False),
        ),
        Case("a full tile", lambda: (_random(4, 4, seed=3), 8, 0, 16, 16, True)),
    ),
)


# -- tiled_cost --


def tiled_cost(N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
    """Operations of the matrix products, and bytes moved, for one head in bf16; `tile` divides
    N."""
    tiles = N // tile
    visited = tiles * (tiles + 1) // 2 if causal else tiles * tiles
    operations = visited * 4 * tile * tile * D  # two products, and a multiply and an add each
    q = o = N * D * 2
    lse = N * 4
    kv = visited * 2 * tile * D * 2
    return operations, q + kv + o + lse


def _cost(slips: Slips, N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
    """`tiled_cost` with slips."""
    tiles = N // tile
    pairs = tiles * tiles
    if causal and "no skip" not in slips:
        pairs = tiles * (tiles + 1) // 2
        if "no diagonal" in slips:
            pairs = tiles * (tiles - 1) // 2
        if "half" in slips:
            pairs = tiles * tiles / 2
        if "half, rounded down" in slips:
            pairs = tiles * tiles // 2
    # -- operations --
    operations = pairs * 4 * tile * tile * D
    if "computes all" in slips:
        operations = 4 * N * N * D
    if causal and "visible" in slips:
        operations = 4 * D * N * (N + 1) // 2
    if "saves" in slips:
        operations //= tile
    if "one product" in slips:
        operations //= 2
    # -- bytes --
    if "loads all" in slips:
        pairs = tiles * tiles
    size = 4 if "four bytes" in slips else 2
    k = v = pairs * tile * D * size
    if "once" in slips:
        k = v = N * D * size
    if "per query" in slips:
        k, v = k * tile, v * tile
    q = o = N * D * size
    if "q again" in slips:
        q = pairs * tile * D * size
    if "o again" in slips:
        o = pairs * tile * D * size
    if "no v" in slips:
        v = 0
    if "no o" in slips:
        o = 0
    rows = pairs * tile if "o again" in slips else N
    lse = 0 if "no lse" in slips else rows * 2 if "lse in two" in slips else rows * 4
    table = 4 * 2 * N * N if "table" in slips else 0
    moved = q + k + v + o + lse + table
    answer = int(operations), int(moved // size if "numbers" in slips else moved)
    return answer[::-1] if "swapped" in slips else answer


_COST_MISTAKES = (
    Misconception(
        "taking tiling for a saving of operations",
        slip(_cost, "saves"),
        "A tile is loaded fewer times, but each of its queries still meets each of its keys. How "
        "many dot products are there without a mask?",
    ),
    *(
        Misconception(
            "taking exactly half for the causal case",
            slip(_cost, half),
            "The tiles on the diagonal are loaded and computed whole, so it is more than half. How "
            "many tiles does the first tile of queries need, and how many the second?",
        )
        for half in ("half, rounded down", "half")
    ),
    Misconception(
        "returning the bytes before the operations",
        slip(_cost, "swapped"),
        "Both numbers are right. In which order are they asked for?",
    ),
    Misconception(
        "counting visible pairs where whole tiles are computed",
        slip(_cost, "visible"),
        "A matrix product computes all of a tile. What about the part that is masked afterwards?",
    ),
    Misconception(
        "skipping no tile",
        slip(_cost, "no skip"),
        "You count all tiles, with the mask as without. Where does a tile of queries stop under "
        "the causal mask?",
    ),
    Misconception(
        "leaving out the tiles on the diagonal",
        slip(_cost, "no diagonal"),
        "A tile on the diagonal is half visible, so it must be computed. How many of those are "
        "there?",
    ),
    Misconception(
        "reading k and v once in all",
        slip(_cost, "once"),
        "The chip cannot hold all of them. Which keys does the second tile of queries need that "
        "the first has loaded before?",
    ),
    Misconception(
        "reading k and v once per query",
        slip(_cost, "per query"),
        "That is chapter 03 without tiles. How many queries share a tile of keys here?",
    ),
    Misconception(
        "loading q again with every tile of keys",
        slip(_cost, "q again"),
        "The tile of queries stays on the chip while the keys pass by. How often is it loaded?",
    ),
    Misconception(
        "storing o and lse with every tile of keys",
        slip(_cost, "o again"),
        "The state of a row stays on the chip until its walk ends. How often is its output "
        "written?",
    ),
    Misconception(
        "skipping a tile's operations but not its loads",
        slip(_cost, "loads all"),
        "Your operations leave out the skipped tiles, and your bytes do not. Are the keys of a "
        "skipped tile loaded?",
    ),
    Misconception(
        "skipping a tile's loads but not its operations",
        slip(_cost, "computes all"),
        "Your bytes leave out the skipped tiles, and your operations do not. Is a skipped tile "
        "computed?",
    ),
    Misconception(
        "forgetting v's bytes",
        slip(_cost, "no v"),
        "Your count holds the loads of one tensor where there are two. What does the second "
        "matrix product multiply the weights with?",
    ),
    Misconception(
        "forgetting o's bytes",
        slip(_cost, "no o"),
        "All that is loaded is there. What is written, besides `lse`?",
    ),
    Misconception(
        "counting one matrix product, or one operation for a multiply and an add",
        slip(_cost, "one product"),
        "Your operations are half of what they should be. What does one pair of a query and a "
        "key cost for its score, and what for its weighted value?",
    ),
    Misconception(
        "still moving the table",
        slip(_cost, "table"),
        "You write and read N × N scores and weights. Do the scores of a tile ever leave the chip?",
    ),
    Misconception(
        "forgetting lse",
        slip(_cost, "no lse"),
        "You are short by one number for each query. What is stored beside `o`?",
    ),
    Misconception(
        "storing lse in two bytes",
        slip(_cost, "lse in two"),
        "You are short by 2 bytes for each query. In which format is lse kept?",
    ),
    Misconception(
        "counting four bytes a number",
        slip(_cost, "four bytes"),
        "Your bytes are those of fp32. In which format are `q`, `k`, `v` and `o` here?",
    ),
    Misconception(
        "counting numbers where bytes are asked for",
        slip(_cost, "numbers"),
        "You have counted numbers. How many bytes does one in bf16 take?",
    ),
)

_COST = TEXTS.exercise(
    "tiled_cost",
    minutes=5,
    difficulty=2,
    solution=tiled_cost,
    misconceptions=_COST_MISTAKES,
    combine=together(
        _COST_MISTAKES,
        {"half", "half, rounded down", "no skip", "no diagonal"},
        {"visible", "saves", "computes all"},
        {"once", "per query"},
        {"loads all", "no skip", "computes all"},
        {"o again", "no o"},
        {"no lse", "lse in two"},
        {"four bytes", "numbers"},
    ),
    cases=(
        Case("N = 4, D = 3, tiles of 2, causal", lambda: (4, 3, 2, True)),
        Case("N = 4, D = 3, tiles of 2, no mask", lambda: (4, 3, 2, False)),
        Case("N = 1024, D = 64, tiles of 128, causal", lambda: (1024, 64, 128, True)),
        Case("N = 1024, D = 64, tiles of 128, no mask", lambda: (1024, 64, 128, False)),
        Case("one tile", lambda: (16, 8, 16, True)),
    ),
    tolerance=0.0,
)


# -- attend_in_tiles --


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of one head: o [N, DV] and lse [N], one tile of scores at a time."""
    N, M, scale = len(q), len(k), q.shape[1] ** -0.5
    outputs = []  # a pair (o, lse) for each tile of queries
    for position in torch.arange(M - N, M).split(tile_q):  # [BQ], of this tile's queries
        q_tile = q[position - (M - N)]
        state = online_softmax.start(len(q_tile), v.shape[1])
        for key_position in torch.arange(M).split(tile_k):  # [BK], of this tile's keys
            if key_position[0] > position[-1]:
                break  # no query of this tile sees a key from here on
            acc_s = q_tile @ k[key_position].T  # [BQ, BK]
            acc_s = acc_s.masked_fill(key_position > position[:, None], -torch.inf)
            state = online_softmax.update(state, acc_s, v[key_position], scale * LOG2_E)
        outputs.append(online_softmax.finish(state, scale))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse)


def _attend(
    slips: Slips, q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    """`attend_in_tiles` with slips."""
    N, M = len(q), len(k)
    scale = 1.0 if "no scale" in slips else q.shape[1] ** -0.5
    scale_log2 = scale * (1.0 if "no log2(e)" in slips else LOG2_E)
    if "no scale in the walk" in slips:
        scale_log2 = LOG2_E
    offset = 0 if "first positions" in slips else M - N
    state, o, lse = online_softmax.start(tile_q, v.shape[1]), [], []
    end_q = N // tile_q * tile_q if "no tail" in slips else N
    end_k = M // tile_k * tile_k if "no key tail" in slips else M
    for query_start in range(0, end_q, tile_q):
        rows = min(tile_q, N - query_start)
        position = offset + query_start + torch.arange(rows)
        if "one state" in slips:
            state = online_softmax.State(*(x[:rows] for x in state))
        elif "one state, never cut" not in slips:
            size = tile_q if "too many rows" in slips else rows
            state = online_softmax.start(size, v.shape[1])
        for key_start in range(0, end_k, tile_k):
            last = position[0] if "skip early" in slips else position[-1]
            reached = key_start + ("skip at its own position" in slips)
            if "skip by the last key" in slips:
                reached = key_start + tile_k - 1
            if "skip by the end" in slips:
                reached = key_start + tile_k
            if "skip by the last key that exists" in slips:
                reached = min(key_start + tile_k, M) - 1
            if "stop unless full" in slips:
                reached, last = min(key_start + tile_k, M) - 1, position[0]
            if "stop by vectors" in slips:
                reached, last = torch.arange(key_start, min(key_start + tile_k, M)), position
            if reached > last and "no skip" not in slips:
                break
            acc_s = q[query_start : query_start + tile_q] @ k[key_start : key_start + tile_k].T
            if "scaled before" in slips:
                acc_s = acc_s * scale
            columns = torch.arange(tile_k if "unclipped keys" in slips else acc_s.shape[1])
            hidden = key_start + columns > position[:, None]
            if "triangle" in slips:
                hidden = columns > torch.arange(rows)[:, None]
            if "keys from 0" in slips:
                hidden = columns > position[:, None]
            if "strict" in slips:
                hidden = key_start + columns >= position[:, None]
            if "vector" in slips:
                hidden = key_start + columns > position
            if "keys as rows" in slips:
                hidden = (key_start + columns)[:, None] > position
            if "past" in slips:
                hidden = key_start + columns < position[:, None]
            if "past and own" in slips:
                hidden = key_start + columns <= position[:, None]
            if "no mask" not in slips:
                acc_s = acc_s.masked_fill(hidden, 0.0 if "zeros" in slips else -torch.inf)
            if "last tile only" in slips:
                state = online_softmax.start(rows, v.shape[1])
            factor = scale if "exchanged" in slips else scale_log2
            updated = online_softmax.update(state, acc_s, v[key_start : key_start + tile_k], factor)
            state = state if "not kept" in slips else updated
        tile_o, tile_lse = online_softmax.finish(
            state, scale_log2 if slips & {"finish in base two", "exchanged"} else scale
        )
        o.append(state.acc_o if "not divided" in slips else tile_o)
        lse.append(tile_lse)
    if "state" in slips:
        return state
    return torch.cat(o), torch.cat(lse)


# the slip that is made together with others comes last
_BY_THE_LAST_KEY = ("skip by the end", "skip by the last key that exists", "skip by the last key")

_ATTEND_MISTAKES = (
    Misconception(
        "tiles on the diagonal left unmasked",
        slip(_attend, "no mask"),
        "You skip the tiles of which nothing is visible. In a tile on the diagonal, which "
        "queries still have to be kept from which keys?",
    ),
    Misconception(
        "skipping tiles that only the first query of the tile does not see",
        slip(_attend, "skip early"),
        "Some visible keys are missing. Which query of a tile sees the most, and so decides when "
        "the walk along the keys may stop?",
    ),
    *(
        Misconception(
            "skipping a tile by its last key",
            slip(_attend, name),
            "A tile on the diagonal may end after the last query, yet its first keys are visible. "
            "Which key of a tile tells you that nobody sees any of it?",
        )
        for name in _BY_THE_LAST_KEY
    ),
    Misconception(
        "stopping at the first tile that is not full",
        slip(_attend, "stop unless full"),
        "A tile on the diagonal is not full, but some of its pairs are visible. Which query of "
        "the tile sees the most? And which key of a tile do queries see first?",
    ),
    Misconception(
        "stopping by a comparison of all positions",
        slip(_attend, "stop by vectors"),
        "`if` needs one yes or no, and you compare two vectors. One query decides, and one key. "
        "Which ones?",
    ),
    Misconception(
        "a state in place of `o` and `lse`",
        slip(_attend, "state"),
        "A state belongs to one tile of queries, and its three parts are not divided yet. What "
        "does `finish` make of it, and where are the pairs of all tiles?",
    ),
    Misconception(
        "skipping a tile whose first key is the last query's own position",
        slip(_attend, "skip at its own position"),
        "One visible pair is enough to keep a tile. Does a query see its own position?",
    ),
    Misconception(
        "computing tiles of which nothing is visible",
        slip(_attend, "no skip"),
        "Here the later values are NaN, and 0 · NaN is NaN: a mask only hides what was computed. "
        "After which position need no tile of keys be loaded?",
    ),
    Misconception(
        "taking the queries for the first N positions",
        slip(_attend, "first positions"),
        "They are the last `N` of the `M`. At which position does query 0 stand?",
    ),
    Misconception(
        "a triangle within the tile, wherever the tile lies",
        slip(_attend, "triangle"),
        "`tril` and `triu` compare row and column inside the tile. At which positions in the "
        "whole text do the first query and the first key of the tile stand?",
    ),
    Misconception(
        "comparing each key with only one query",
        slip(_attend, "vector"),
        "You compare two vectors place by place. The mask is a table `[BQ, BK]`: which of the two "
        "must be a column? To stop, one position of each is enough.",
    ),
    Misconception(
        "a mask with a row for each key",
        slip(_attend, "keys as rows"),
        "`acc_s` has a row for each query and a column for each key. Which of your two vectors "
        "must stand as a column?",
    ),
    Misconception(
        "counting a tile's keys from 0",
        slip(_attend, "keys from 0"),
        "Your mask compares a column with a position. Which key is column 0 of the tile?",
    ),
    Misconception(
        "throwing away what `update` returns",
        slip(_attend, "not kept"),
        "Your output is 0 everywhere, as before the first key. `update` changes nothing in place. "
        "Where does its result go?",
    ),
    Misconception(
        "hiding a query's own position from it",
        slip(_attend, "strict"),
        "A query sees the keys at its own position and before. Does your comparison allow "
        "equality?",
    ),
    *(
        Misconception(
            "hiding the past and leaving the future",
            slip(_attend, name),
            "`masked_fill` fills where its mask is True. Which pairs does your mask name?",
        )
        for name in ("past and own", "past")
    ),
    Misconception(
        "writing zeros where -inf is meant",
        slip(_attend, "zeros"),
        "A hidden score of 0 still gets a weight. Which score gets none?",
    ),
    *(
        Misconception(
            "one state for all tiles of queries",
            slip(_attend, name),
            "Your later rows remember what other queries saw. When does a tile of queries need an "
            "empty state?",
        )
        for name in ("one state, never cut", "one state")
    ),
    Misconception(
        "a state of `tile_q` rows for a tile that holds fewer",
        slip(_attend, "too many rows"),
        "The last tile of queries may hold fewer rows. How many rows has its state, and how many "
        "have its scores?",
    ),
    Misconception(
        "`tile_k` key positions for a tile that holds fewer",
        slip(_attend, "unclipped keys"),
        "The last tile of keys may hold fewer than `tile_k`. How many columns has `acc_s` there, "
        "and how many has your mask?",
    ),
    Misconception(
        "starting anew at every tile of keys",
        slip(_attend, "last tile only"),
        "Only the last tile of keys counts. The state is what joins them. Where in the two loops "
        "should it start?",
    ),
    Misconception(
        "dropping the last queries where tile_q does not divide N",
        slip(_attend, "no tail"),
        "The last tile may hold fewer rows. How many tiles of 4 do 9 queries need?",
    ),
    Misconception(
        "dropping the last keys where tile_k does not divide M",
        slip(_attend, "no key tail"),
        "The last tile may hold fewer keys, and the last queries see them. How far does your "
        "inner loop go?",
    ),
    Misconception(
        "leaving out the scale",
        slip(_attend, "no scale"),
        "Your dot products count in full. In which two arguments does `D ** -0.5` belong?",
    ),
    Misconception(
        "leaving the scale out of `scale_log2`",
        slip(_attend, "no scale in the walk"),
        "`update` takes plain dot products. Which two factors does `scale_log2` hold?",
    ),
    Misconception(
        "scaling the scores before `update`, which scales them itself",
        slip(_attend, "scaled before"),
        "`update` takes plain dot products. What is in `scale_log2` already?",
    ),
    Misconception(
        "`finish` with `scale_log2`",
        slip(_attend, "finish in base two"),
        "The lse is a natural logarithm. What does chapter 03's `finish` say about its scale?",
    ),
    Misconception(
        "`scale_log2` without `log2(e)`",
        slip(_attend, "no log2(e)"),
        "`update` takes powers of two. Which power of 2 is eˣ?",
    ),
    Misconception(
        "an exchange of `scale` and `scale_log2`",
        slip(_attend, "exchanged"),
        "`update` takes powers of two, and `finish` gives a natural logarithm. Which of the two "
        "wants log2(e) in its scale?",
    ),
    Misconception(
        "numerators that were not divided",
        slip(_attend, "not divided"),
        "`acc_o` is a sum of weighted values. What divides it at the end of a row?",
    ),
)

_ATTEND_ALONE = ("stop unless full", "stop by vectors", "state")
_ATTEND_SLIPS = frozenset().union(*(m.wrong.slips for m in _ATTEND_MISTAKES))

_ATTEND = TEXTS.exercise(
    "attend_in_tiles",
    minutes=10,
    difficulty=2,
    returns=("o", "lse"),
    solution=attend_in_tiles,
    misconceptions=_ATTEND_MISTAKES,
    combine=together(
        _ATTEND_MISTAKES,
        {
            "no mask",
            "triangle",
            "keys from 0",
            "vector",
            "keys as rows",
            "strict",
            "past",
            "past and own",
        },
        {"no mask", "zeros"},
        {"no mask", "unclipped keys"},
        {"no skip", "skip early"},
        *({"no skip", "skip at its own position", name} for name in _BY_THE_LAST_KEY),
        {"one state", "one state, never cut", "too many rows", "last tile only"},
        {"no scale", "scaled before", "no scale in the walk"},
        {"exchanged", "finish in base two", "no log2(e)", "no scale in the walk"},
        *({name, other} for name in _ATTEND_ALONE for other in _ATTEND_SLIPS - {name}),
    ),
    cases=(
        Case("three tokens, one number wide, tiles of 2 × 2", lambda: _small()),
        Case(
            "9 tokens, tiles of 4 × 3",
            lambda: (_random(9, 4, seed=0), _random(9, 4, seed=1), _random(9, 3, seed=2), 4, 3),
        ),
        Case(
            "the last 5 of 12, 2 × 5",
            lambda: (_random(5, 4, seed=3), _random(12, 4, seed=4), _random(12, 6, seed=5), 2, 5),
        ),
        Case(
            "tiles larger than all",
            lambda: (_random(3, 4, seed=6), _random(6, 4, seed=7), _random(6, 2, seed=8), 64, 64),
        ),
        Case("scores that rise by the hundred", lambda: _steep(1)),
        Case("scores that fall by the hundred", lambda: _steep(-1)),
        Case(
            "4 tokens, tiles of 2 × 2, the values of tokens 2 and 3 are NaN", lambda: _untouchable()
        ),
    ),
)


def _small() -> tuple:
    q, k, v = (
        torch.tensor([[1.0], [2.0], [1.0]]),
        torch.tensor([[0.0], [1.0], [-1.0]]),
        torch.tensor([[1.0], [2.0], [4.0]]),
    )
    return q, k, v, 2, 2


def _untouchable() -> tuple:
    """The first tile of queries comes out finite only if it leaves the second tile of values
    alone."""
    v = torch.tensor([[1.0], [2.0], [torch.nan], [torch.nan]])
    return torch.ones(4, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]]), v, 2, 2


def _steep(direction: int) -> tuple:
    k = direction * 100 * torch.arange(7.0)[:, None]
    return torch.ones(7, 1), k, _random(7, 2, seed=9), 3, 2


# -- tile_maximum --

_BQ, _BK, _D = 4, 8, 4


def tile_maximum() -> object:
    """The kernel that finds each query's largest score; a program has BQ queries."""

    @triton.jit
    def kernel(Q, K, Max, N, M, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
        rows = tl.program_id(0) * BQ + tl.arange(0, BQ)  # [BQ]
        width = tl.arange(0, D)
        q_tile = tl.load(Q + rows[:, None] * D + width, mask=rows[:, None] < N, other=0.0)
        scores_max = tl.full([BQ], float("-inf"), tl.float32)
        for key_start in range(0, M, BK):
            keys = key_start + tl.arange(0, BK)  # [BK]
            k_tile = tl.load(K + keys[:, None] * D + width, mask=keys[:, None] < M, other=0.0)
            acc_s = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], axis=2)  # [BQ, BK]
            acc_s = tl.where(keys[None, :] < M, acc_s, float("-inf"))
            scores_max = tl.maximum(scores_max, tl.max(acc_s, axis=1))
        tl.store(Max + rows, scores_max, mask=rows < N)

    return kernel


_GIVEN = """
@triton.jit
def kernel(Q, K, Max, N, M, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BQ + tl.arange(0, BQ)  # [BQ]
    width = tl.arange(0, D)
    q_tile = tl.load(Q + rows[:, None] * D + width, mask=rows[:, None] < N, other=0.0)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)
    for key_start in range(0, M, BK):
        keys = key_start + tl.arange(0, BK)  # [BK]
        k_tile = tl.load(K + keys[:, None] * D + width, mask=keys[:, None] < M, other=0.0)
        acc_s = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], axis=2)  # [BQ, BK]
        scores_max = tl.maximum(scores_max, tl.max(acc_s, axis=1))
    tl.store(Max + rows, scores_max)
"""


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(_GIVEN))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


def _run_maximum(solution: Callable, N: int, M: int, zero_key: bool) -> tuple[Tensor, str]:
    """Launch the kernel on scores below zero; past the end of `Max`, numbers must stay."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("tile_maximum defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    q = -0.5 - _random(N + _BQ, _D, seed=N).abs()
    k = 0.5 + _random(M + _BK, _D, seed=M).abs()
    if zero_key:
        k[1] = 0
    q, k = roomy(q, 1000.0), roomy(k, -1000.0)  # a row around them would score far above 0
    largest = roomy(torch.full((N + 2 * _BQ,), -77.0), -77.0)
    with warnings.catch_warnings():  # the interpreter's, of an infinity that was loaded
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[-(-N // _BQ),](q, k, largest, N, M, D=_D, BQ=_BQ, BK=_BK)
    intact = bool((largest[N:] == -77.0).all())
    return largest[:N].cpu(), "in bounds" if intact else "stored past the end of Max"


@triton.jit
def _wrong_maximum(
    Q, K, Max, N, M,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BQ + tl.arange(0, BQ)
    width = tl.arange(0, D)
    q_tile = tl.load(Q + rows[:, None] * D + width, mask=rows[:, None] < N, other=0.0)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)
    end = M // BK * BK if TAIL == "dropped" else M
    for key_start in range(0, end, BK):
        keys = key_start + tl.arange(0, BK)
        absent = float("-inf") if TAIL == "infinite keys" else 0.0
        k_tile = tl.load(K + keys[:, None] * D + width, mask=keys[:, None] < M, other=absent)
        acc_s = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], axis=2)
        if TAIL == "queries":
            acc_s = tl.where(keys[None, :] < N, acc_s, float("-inf"))
        elif TAIL == "zero is missing":
            acc_s = tl.where(acc_s != 0, acc_s, float("-inf"))
        elif TAIL == "arms":
            acc_s = tl.where(keys[None, :] < M, float("-inf"), acc_s)
        elif TAIL == "rows":
            acc_s = tl.where(keys[:, None] < M, acc_s, float("-inf"))
        elif TAIL == "right":
            acc_s = tl.where(keys[None, :] < M, acc_s, float("-inf"))
        scores_max = tl.maximum(scores_max, tl.max(acc_s, axis=1))
    if STORE == "keys":
        tl.store(Max + rows, scores_max, mask=rows < M)
    elif STORE == "everything":
        tl.store(Max + rows, scores_max)
    else:
        tl.store(Max + rows, scores_max, mask=rows < N)


class _Mistaken:
    """`_wrong_maximum` with its slips chosen; launched like a kernel."""

    def __init__(self, slips: Slips) -> None:
        self.run = None
        self.tail = next((name for name in slips if name in _TAILS), "right")
        self.store = next((name for name in slips if name in _STORES), "right")

    def __getitem__(self, grid: tuple) -> Callable:
        slips = {"TAIL": self.tail, "STORE": self.store}
        return lambda *args, **sizes: _wrong_maximum[grid](*args, **slips, **sizes)


_TAILS = {"as it came", "infinite keys", "queries", "zero is missing", "arms", "rows", "dropped"}
_STORES = {"everything", "keys"}

_MAXIMUM_MISTAKES = (
    Misconception(
        "letting keys past the end take part",
        slip(_Mistaken, "as it came"),
        "Where there is no key, the score is 0. Here every true score is below 0. Which score "
        "never wins a maximum?",
    ),
    Misconception(
        "storing rows past the last query",
        slip(_Mistaken, "everything"),
        "The last tile has rows that are no queries. Whose memory lies past the end of `Max`?",
    ),
    Misconception(
        "loading -inf for keys that do not exist",
        slip(_Mistaken, "infinite keys"),
        "A query may hold negative numbers. What is -1 times -inf, and does it lose the maximum?",
    ),
    Misconception(
        "comparing keys with the number of queries",
        slip(_Mistaken, "queries"),
        "`N` counts queries. Which number says how many keys there are?",
    ),
    Misconception(
        "taking a score of 0 for a key that does not exist",
        slip(_Mistaken, "zero is missing"),
        "A key that exists may have the score 0, too. What tells a key past the end from the "
        "others?",
    ),
    Misconception(
        "swapping the two arms of `tl.where`",
        slip(_Mistaken, "arms"),
        "You hide the keys that exist. Which arm does `tl.where` take where its condition is True?",
    ),
    Misconception(
        "spreading the keys over the rows of the tile",
        slip(_Mistaken, "rows"),
        "`acc_s` is `[BQ, BK]`: a key is a column. `keys[:, None]` is `[BK, 1]`. Which shape "
        "gives each column its key?",
    ),
    Misconception(
        "dropping the last keys where BK does not divide M",
        slip(_Mistaken, "dropped"),
        "The last tile holds fewer keys, and they count. How can the walk keep that tile and "
        "ignore its empty places?",
    ),
    Misconception(
        "comparing rows with the number of keys",
        slip(_Mistaken, "keys"),
        "`M` counts keys. Which number says how many queries there are?",
    ),
)


def _maximum_case(name: str, N: int, M: int, zero_key: bool = False) -> Case:
    here = environment.detect()
    return Case(name, lambda: (N, M, zero_key), lambda: here.why_not("triton", here.device))


_MAXIMUM = TEXTS.exercise(
    "tile_maximum",
    minutes=6,
    difficulty=2,
    solution=tile_maximum,
    run=_run_maximum,
    returns=("Max", "the end of Max"),
    misconceptions=_MAXIMUM_MISTAKES,
    combine=together(_MAXIMUM_MISTAKES, _TAILS, _STORES),
    cases=(
        _maximum_case("8 queries, 16 keys: full tiles", 8, 16),
        _maximum_case("8 queries, 13 keys, every score below 0", 8, 13),
        _maximum_case("7 queries, 16 keys", 7, 16),
        _maximum_case("7 queries, 3 keys", 7, 3),
        _maximum_case("7 queries, 13 keys, and key 1 is all zeros", 7, 13, True),
    ),
)


EXERCISES = (_KINDS, _ATTEND, _MASK, _MAXIMUM, _COST)


# -- two mistakes at once --


def _from_zero_and_strict(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    rows = []
    for first in range(0, N, tile_q):
        last = min(first + tile_q, N) - 1
        row = ""
        for start in range(0, M, tile_k):
            is_full = min(start + tile_k, M) - 1 <= first
            row += "S" if start >= last else "F" if is_full else "D"
        rows.append(row)
    return rows


def _first_for_last(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    kinds = []
    for i in range(0, N, tile_q):
        first, last = M - N + i, M - N + min(i + tile_q, N) - 1
        keys = [(j, min(j + tile_k, M) - 1) for j in range(0, M, tile_k)]
        kinds.append("".join("S" if j > first else "F" if end <= last else "D" for j, end in keys))
    return kinds


def _tril_alone(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    if not causal:
        return acc_s
    return acc_s.masked_fill(~torch.ones(acc_s.shape, dtype=torch.bool).tril(), -torch.inf)


def _times_the_mask(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    position = M - N + query_start + torch.arange(acc_s.shape[0])
    keys = key_start + torch.arange(acc_s.shape[1])
    visible = (keys < M) & ((position[:, None] > keys) | (not causal))
    return acc_s * visible


def _no_v_no_lse(N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
    n = N // tile
    count = n * (n + 1) // 2 if causal else n**2
    return count * tile**2 * D * 4, 2 * (2 * N * D + count * tile * D)


def _half_and_once(N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
    return 4 * N * N * D // (2 if causal else 1), 4 * N * D * 2 + 4 * N


def _first_positions_unscaled(
    q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    done = []
    for i in range(0, len(q), tile_q):
        rows = torch.arange(i, min(i + tile_q, len(q)))
        state = online_softmax.start(len(rows), v.shape[1])
        for j in range(0, int(rows[-1]) + 1, tile_k):
            scores = q[rows] @ k[j : j + tile_k].T
            columns = j + torch.arange(scores.shape[1])
            scores[columns > rows[:, None]] = -torch.inf
            state = online_softmax.update(state, scores, v[j : j + tile_k], LOG2_E)
        done.append(online_softmax.finish(state, 1.0))
    return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done])


def _unmasked_in_base_two(
    q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    scale_log2 = q.shape[1] ** -0.5 * LOG2_E
    position = torch.arange(len(k) - len(q), len(k))
    done = []
    for i in range(0, len(q), tile_q):
        rows = position[i : i + tile_q]
        for j in range(0, int(rows[-1]) + 1, tile_k):
            if j == 0:
                state = online_softmax.start(len(rows), v.shape[1])
            scores = q[i : i + tile_q] @ k[j : j + tile_k].T
            state = online_softmax.update(state, scores, v[j : j + tile_k], scale_log2)
        done.append(online_softmax.finish(state, scale_log2))
    return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done])


def _as_handed_in() -> _Mistaken:
    return _Mistaken(frozenset({"as it came", "everything"}))


DOUBLES = (
    Double(
        "tile_kinds",
        _from_zero_and_strict,
        (
            "taking the queries for the first N positions",
            "skipping a tile whose first key is the last query's own position",
        ),
    ),
    Double(
        "tile_kinds",
        _first_for_last,
        (
            "skipping what the first query of a tile does not see",
            "calling a tile full because its last query sees all of it",
        ),
    ),
    Double(
        "mask_tile",
        _tril_alone,
        ("a triangle within the tile, wherever the tile lies", "leaving the ragged tail in"),
    ),
    Double(
        "mask_tile",
        _times_the_mask,
        ("writing zeros where -inf is meant", "hiding a query's own position from it"),
    ),
    Double("tiled_cost", _no_v_no_lse, ("forgetting v's bytes", "forgetting lse")),
    Double(
        "tiled_cost",
        _half_and_once,
        ("taking exactly half for the causal case", "reading k and v once in all"),
    ),
    Double(
        "attend_in_tiles",
        _first_positions_unscaled,
        ("taking the queries for the first N positions", "leaving out the scale"),
    ),
    Double(
        "attend_in_tiles",
        _unmasked_in_base_two,
        ("tiles on the diagonal left unmasked", "`finish` with `scale_log2`"),
    ),
    Double(
        "tile_maximum",
        _as_handed_in,
        ("letting keys past the end take part", "storing rows past the last query"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    gib_without_table={"unit": "GiB", "tolerance": 0.02},
    operations_left={"unit": "%"},
    gib_each_alone={"unit": "GiB", "tolerance": 0.01},
    measured_ms={"unit": "ms", "tolerance": 0.01},
)
