"""Exercises of chapter 04: which tiles to skip, and the whole walk; then, for readers with more
time, the ragged tail, a small kernel with two bugs, and what a walk costs.
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

from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def _draw_kinds(arguments: tuple, got: list[str], expected: list[str]) -> Picture:
    """The tiles over the visible pairs, wrong letters in red."""
    N, M, tile_q, tile_k = arguments
    figure, axes = new_figure(5.0, 3.0)
    axis, wrong = axes[0, 0], 0
    visible = (torch.arange(M)[None, :] <= torch.arange(M - N, M)[:, None]).float().numpy()
    axis.pcolormesh(range(M + 1), range(N + 1), visible, cmap="Blues", vmin=0, vmax=2.5)
    for i, row in enumerate(got):
        for j, letter in enumerate(row):
            x = (j * tile_k + min((j + 1) * tile_k, M)) / 2
            y = (i * tile_q + min((i + 1) * tile_q, N)) / 2
            right = letter == expected[i][j]
            wrong += not right
            axis.text(
                x, y, letter if right else f"{letter}, not {expected[i][j]}", fontsize=9,
                ha="center", va="center", color=PALETTE["text" if right else "query"],
                weight="normal" if right else "bold",
            )  # fmt: skip
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


_KINDS = TEXTS.exercise(
    "tile_kinds",
    minutes=9, difficulty=2, solution=tile_kinds,
    picture=_draw_kinds,
    misconceptions=diffs(tile_kinds, [
        ({"first_key > last_query": "first_key // tile_k > query_start // tile_q",
         "last_key <= first_query": "first_key // tile_k < query_start // tile_q"},
         "comparing the numbers of tiles, not positions",
         "Tile 2 of the queries and tile 2 of the keys begin at the same position only where "
         "`tile_q` equals `tile_k` and `N` equals `M`. At which positions do they begin here?"),
        ({"first_query = M - N +": "first_query =", "last_query = M - N +": "last_query ="},
         "taking the queries for the first N positions",
         "The queries are the last `N` of the `M` positions, so earlier keys come before query "
         "0. At which position does query 0 stand?"),
        ({"first_query = M - N": "first_query = N - M", "last_query = M - N": "last_query = N - M"},
         "adding `N - M` where the queries stand `M - N` further on",
         "There are more positions than queries, so your shift is below 0. How many positions "
         "come before query 0?"),
        ("first_key > last_query", "first_key > first_query",
         "skipping what the first query of a tile does not see",
         "The other queries of the tile stand further on and may see more. Which of them decides "
         "that nothing is seen?"),
        ("last_key <= first_query", "last_key <= last_query",
         "calling a tile full because its last query sees all of it",
         "A full tile gets no mask, so here the earlier queries look into the future. The last "
         "query sees the most. Which one sees the least?"),
        ("first_key > last_query", "last_key > last_query", "skipping a tile by its last key",
         "A tile on the diagonal may end after the last query, yet its first keys are visible. "
         "Which key of a tile tells you that nobody sees any of it?"),
        ("last_key <= first_query", "first_key <= first_query",
         "calling a tile full by its first key",
         "The first key of a tile is the easiest to see. Which key must a query reach to see all "
         "of them?"),
        ("last_key <= first_query", "first_key < first_query",
         "calling a tile full by its first key"),
        ("elif", "if", "giving a skipped tile two letters",
         "Your rows have more letters than there are tiles. Do your three branches exclude one "
         "another?"),
        ('row += "F"', 'row += "D"', "masking every tile that is not skipped",
         "The result would be right, but a mask costs time, and most tiles need none. In which "
         "tiles does even the first query see the last key?"),
        ("first_key > last_query", "first_key >= last_query",
         "skipping a tile whose first key is the last query's own position",
         "One visible pair is enough to keep a tile. Does a query see its own position?"),
        (", N) - 1", ", N)", "taking the end of a tile of queries for its last query",
         "You keep tiles that only the next query would see. Which is the last query of a tile "
         "of 2 that begins at 0?"),
        ("last_key <= first_query", "last_key < first_query",
         "masking a tile whose last key is the first query's own position",
         "You call too many tiles diagonal. Does a query see the key at its own position? Look "
         "at `<` and `<=`."),
        ("min(first_key + tile_k, M) - 1", "first_key + tile_k - 1",
         "measuring the last tile of keys past the end",
         "Where `tile_k` does not divide `M`, the last tile holds fewer keys. Which is the last "
         "key that exists?"),
        ({"range(0, N, tile_q)": "range(0, N // tile_q * tile_q, tile_q)",
         "range(0, M, tile_k)": "range(0, M // tile_k * tile_k, tile_k)"},
         "dropping the tiles at the ends, which hold fewer",
         "Where a size does not divide its length, a shorter tile is left at the end. How many "
         "tiles of 3 do 7 tokens need?"),
        ("return rows", "return [list(row) for row in rows]",
         "a list of letters where a string is asked for",
         'Each row of tiles is one string, such as `"DS"`. How do you join letters into one?'),
        ("return rows", 'return ["".join(column) for column in zip(*rows, strict=True)]',
         "a string for each tile of keys",
         "Your rows and columns have changed places. Over which tiles does the outer loop go, "
         "and over which the inner one?"),
    ]),
    cases=(
        Case("four queries, six keys, tiles of 2 × 2", lambda: (4, 6, 2, 2)),
        Case("N = M = 8, tiles of 2 × 4", lambda: (8, 8, 2, 4)),
        Case("N = M = 8, tiles of 4 × 2", lambda: (8, 8, 4, 2)),
        Case("N = M = 7, tiles of 3 × 3: the last tile holds one query and one key",
             lambda: (7, 7, 3, 3)),
        Case("the last 5 of 13 positions, tiles of 2 × 4", lambda: (5, 13, 2, 4)),
        Case("one query, 9 keys: decoding", lambda: (1, 9, 4, 4)),
        Case("tiles of one query and one key", lambda: (3, 4, 1, 1)),
    ),
)  # fmt: skip


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


def _steep(direction: int) -> tuple:
    k = direction * 100 * torch.arange(7.0)[:, None]
    return torch.ones(7, 1), k, _random(7, 2, seed=9), 3, 2


_ATTEND = TEXTS.exercise(
    "attend_in_tiles",
    minutes=10, difficulty=2, solution=attend_in_tiles,
    returns=("o", "lse"),
    misconceptions=diffs(attend_in_tiles, [
        (".masked_fill(key_position > position[:, None], -torch.inf)", "",
         "tiles on the diagonal left unmasked",
         "You skip the tiles of which nothing is visible. In a tile on the diagonal, which "
         "queries still have to be kept from which keys?"),
        ("key_position[0] > position[-1]", "key_position[0] > position[0]",
         "skipping tiles that only the first query of the tile does not see",
         "Some visible keys are missing. Which query of a tile sees the most, and so decides "
         "when the walk along the keys may stop?"),
        ("key_position[0] > position[-1]", "key_position[-1] > position[-1]",
         "skipping a tile by its last key",
         "A tile on the diagonal may end after the last query, yet its first keys are visible. "
         "Which key of a tile tells you that nobody sees any of it?"),
        ("key_position[0] > position[-1]", "key_position[0] + tile_k - 1 > position[-1]",
         "skipping a tile by its last key"),
        ("key_position[0] > position[-1]", "key_position[0] + tile_k > position[-1]",
         "skipping a tile by its last key"),
        ("key_position[0] > position[-1]", "key_position[-1] > position[0]",
         "stopping at the first tile that is not full",
         "A tile on the diagonal is not full, but some of its pairs are visible. Which query of "
         "the tile sees the most? And which key of a tile do queries see first?"),
        ("key_position[0] > position[-1]", "key_position > position",
         "stopping by a comparison of all positions",
         "`if` needs one yes or no, and you compare two vectors. One query decides, and one key. "
         "Which ones?"),
        ("return torch.cat(o), torch.cat(lse)", "return state", "a state in place of `o` and `lse`",
         "A state belongs to one tile of queries, and its three parts are not divided yet. What "
         "does `finish` make of it, and where are the pairs of all tiles?"),
        ("key_position[0] > position[-1]", "key_position[0] >= position[-1]",
         "skipping a tile whose first key is the last query's own position",
         "One visible pair is enough to keep a tile. Does a query see its own position?"),
        ("key_position[0] > position[-1]", "False", "computing tiles of which nothing is visible",
         "Here the later values are NaN, and 0 · NaN is NaN: a mask only hides what was "
         "computed. After which position need no tile of keys be loaded?"),
        ({"torch.arange(M - N, M)": "torch.arange(N)", "q[position - (M - N)]": "q[position]"},
         "taking the queries for the first N positions",
         "They are the last `N` of the `M`. At which position does query 0 stand?"),
        ("key_position > position[:, None]",
         "torch.arange(len(key_position)) > torch.arange(len(position))[:, None]",
         "a triangle within the tile, wherever the tile lies",
         "`tril` and `triu` compare row and column inside the tile. At which positions in the "
         "whole text do the first query and the first key of the tile stand?"),
        ("key_position > position[:, None]", "key_position > position",
         "comparing each key with only one query",
         "You compare two vectors place by place. The mask is a table `[BQ, BK]`: which of the "
         "two must be a column? To stop, one position of each is enough."),
        ("key_position > position[:, None]", "key_position[:, None] > position",
         "a mask with a row for each key",
         "`acc_s` has a row for each query and a column for each key. Which of your two vectors "
         "must stand as a column?"),
        ("key_position > position[:, None]", "torch.arange(len(key_position)) > position[:, None]",
         "counting a tile's keys from 0",
         "Your mask compares a column with a position. Which key is column 0 of the tile?"),
        ("state = online_softmax.update", "online_softmax.update",
         "throwing away what `update` returns",
         "Your output is 0 everywhere, as before the first key. `update` changes nothing in "
         "place. Where does its result go?"),
        ("key_position > position[:, None]", "key_position >= position[:, None]",
         "hiding a query's own position from it",
         "A query sees the keys at its own position and before. Does your comparison allow "
         "equality?"),
        ("key_position > position[:, None]", "key_position <= position[:, None]",
         "hiding the past and leaving the future",
         "`masked_fill` fills where its mask is True. Which pairs does your mask name?"),
        ("key_position > position[:, None]", "key_position < position[:, None]",
         "hiding the past and leaving the future"),
        ("-torch.inf", "0.0", "writing zeros where -inf is meant",
         "A hidden score of 0 still gets a weight. Which score gets none?"),
        ({"outputs = []": "state = online_softmax.start(tile_q, v.shape[1])\n    outputs = []",
         "state = online_softmax.start(len(q_tile), v.shape[1])":
          "state = online_softmax.State(*(x[: len(q_tile)] for x in state))"},
         "one state for all tiles of queries",
         "Your later rows remember what other queries saw. When does a tile of queries need an "
         "empty state?"),
        ({"outputs = []": "state = online_softmax.start(tile_q, v.shape[1])\n    outputs = []",
         "state = online_softmax.start(len(q_tile), v.shape[1])": ""},
         "one state for all tiles of queries"),
        ("start(len(q_tile)", "start(tile_q",
         "a state of `tile_q` rows for a tile that holds fewer",
         "The last tile of queries may hold fewer rows. How many rows has its state, and how "
         "many have its scores?"),
        ("key_position > position[:, None]",
         "key_position[0] + torch.arange(tile_k) > position[:, None]",
         "`tile_k` key positions for a tile that holds fewer",
         "The last tile of keys may hold fewer than `tile_k`. How many columns has `acc_s` "
         "there, and how many has your mask?"),
        ("acc_s = q_tile",
         "state = online_softmax.start(len(q_tile), v.shape[1])\n            acc_s = q_tile",
         "starting anew at every tile of keys",
         "Only the last tile of keys counts. The state is what joins them. Where in the two "
         "loops should it start?"),
        (".split(tile_q)", ".split(tile_q)[: N // tile_q]",
         "dropping the last queries where tile_q does not divide N",
         "The last tile may hold fewer rows. How many tiles of 4 do 9 queries need?"),
        (".split(tile_k)", ".split(tile_k)[: M // tile_k]",
         "dropping the last keys where tile_k does not divide M",
         "The last tile may hold fewer keys, and the last queries see them. How far does your "
         "inner loop go?"),
        ("q.shape[1] ** -0.5", "1.0", "leaving out the scale",
         "Your dot products count in full. In which two arguments does `D ** -0.5` belong?"),
        ("scale * LOG2_E", "LOG2_E", "leaving the scale out of `scale_log2`",
         "`update` takes plain dot products. Which two factors does `scale_log2` hold?"),
        ("k[key_position].T", "k[key_position].T * scale",
         "scaling the scores before `update`, which scales them itself",
         "`update` takes plain dot products. What is in `scale_log2` already?"),
        ("finish(state, scale)", "finish(state, scale * LOG2_E)", "`finish` with `scale_log2`",
         "The lse is a natural logarithm. What does chapter 03's `finish` say about its scale?"),
        ("scale * LOG2_E", "scale", "`scale_log2` without `log2(e)`",
         "`update` takes powers of two. Which power of 2 is eˣ?"),
        ({"scale * LOG2_E": "scale", "finish(state, scale)": "finish(state, scale * LOG2_E)"},
         "an exchange of `scale` and `scale_log2`",
         "`update` takes powers of two, and `finish` gives a natural logarithm. Which of the two "
         "wants log2(e) in its scale?"),
        ("online_softmax.finish(state, scale)",
         "(state.acc_o, online_softmax.finish(state, scale)[1])",
         "numerators that were not divided",
         "`acc_o` is a sum of weighted values. What divides it at the end of a row?"),
    ]),
    cases=(
        Case("three tokens, one number wide, tiles of 2 × 2", lambda: (
            torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[0.0], [1.0], [-1.0]]),
            torch.tensor([[1.0], [2.0], [4.0]]), 2, 2)),
        Case("9 tokens, tiles of 4 × 3", lambda: (
            _random(9, 4, seed=0), _random(9, 4, seed=1), _random(9, 3, seed=2), 4, 3)),
        Case("the last 5 of 12, 2 × 5", lambda: (
            _random(5, 4, seed=3), _random(12, 4, seed=4), _random(12, 6, seed=5), 2, 5)),
        Case("tiles larger than all", lambda: (
            _random(3, 4, seed=6), _random(6, 4, seed=7), _random(6, 2, seed=8), 64, 64)),
        Case("scores that rise by the hundred", lambda: _steep(1)),
        Case("scores that fall by the hundred", lambda: _steep(-1)),
        # The first tile of queries is finite only if the second tile of values is left alone.
        Case("4 tokens, tiles of 2 × 2, the values of tokens 2 and 3 are NaN", lambda: (
            torch.ones(4, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
            torch.tensor([[1.0], [2.0], [torch.nan], [torch.nan]]), 2, 2)),
    ),
)  # fmt: skip


# -- mask_tile --


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


def _padded(BQ: int, BK: int, seed: int, missing: int) -> Tensor:
    """Random scores of a tile whose last keys do not exist: there the score is 0."""
    scores = _random(BQ, BK, seed=seed)
    scores[:, -missing:] = 0
    return scores


_MASK = TEXTS.exercise(
    "mask_tile",
    minutes=5, difficulty=2, solution=mask_tile,
    misconceptions=diffs(mask_tile, [
        ("(key_position < M).expand(BQ, BK)", "torch.ones(BQ, BK, dtype=torch.bool)",
         "leaving the ragged tail in",
         "With `causal` the mask happens to hide the keys past the end, which lie in everyone's "
         "future. Without it they stay. How much does a score of 0 weigh?"),
        ("key_position < M", "key_position <= M", "keeping the key just past the end",
         "The keys are numbered from 0. Which is the last number below `M`?"),
        ("key_position < M", "key_position < N", "comparing keys with the number of queries",
         "`N` counts queries. Which number says how many keys there are?"),
        (" & (key_position <= position[:, None])", "", "leaving the future in",
         "With `causal`, a query sees no key after its own position. Which two positions do you "
         "have to compare?"),
        ("key_position <= position[:, None]", "torch.arange(BK) <= torch.arange(BQ)[:, None]",
         "a triangle within the tile, wherever the tile lies",
         "`tril` and `triu` compare row and column inside the tile. That is right only where the "
         "first query stands at the position of the first key. At which positions do they stand "
         "here?"),
        ("key_position <= position[:, None]",
         "torch.arange(BK) <= M - N + torch.arange(BQ)[:, None]",
         "forgetting where the tile begins",
         "You count from 0 in every tile. Which query is row 0 of this one, and which key is "
         "column 0?"),
        ("M - N + query_start", "query_start", "taking the queries for the first N positions",
         "They are the last `N` of the `M`. At which position does query 0 stand?"),
        ("key_position <= position", "key_position < position",
         "hiding a query's own position from it",
         "A query sees the keys at its own position and before. Is your comparison `<` or `<=`?"),
        ("-torch.inf", "0.0", "writing zeros where -inf is meant",
         "These are scores, and the softmax is still to come. What does it make of a score of 0, "
         "and what of -inf?"),
        *(("-torch.inf", fill, "a large negative number in place of -inf",
         "It works until a row has nothing else: then the hidden keys are the largest scores. "
         "Which score can no other be below?")
         for fill in ("-1e9", "-1e4", "-1e30", "torch.finfo(torch.float32).min")),
        ("(key_position < M).expand(BQ, BK)", "acc_s != 0",
         "taking a score of 0 for a key that does not exist",
         "A key that exists may have the score 0, too. What tells a key past the end from the "
         "others?"),
        ("~visible", "visible", "hiding what is visible",
         "`masked_fill` fills where its mask is True. Which pairs does your mask name?"),
        ("if causal", "if True", "applying the causal mask always",
         "You hide the future although `causal` is False. What does a query see then?"),
        ("-torch.inf)", "-torch.inf)[:, : M - key_start]", "cutting the tail off",
         "In PyTorch that would do, but a kernel's tile has a fixed shape. What can stand in the "
         "columns past the end?"),
    ]),
    cases=(
        Case("queries 2 and 3 of 4, at positions 3 and 4; keys 2 to 5, and there are only 5",
             lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, True)),
        Case("queries 2 and 3 of 4, keys 2 to 5 of 5, no causal mask",
             lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, False)),
        Case("a tile on the diagonal, 4 × 6", lambda: (_random(4, 6, seed=0), 8, 6, 16, 16, True)),
        Case("the last 3 of 11 positions, keys from 8",
             lambda: (_padded(3, 4, seed=1, missing=1), 0, 8, 3, 11, True)),
        Case("the last 3 of 11 positions, no causal mask, two keys past the end",
             lambda: (_padded(3, 5, seed=2, missing=2), 0, 8, 3, 11, False)),
        Case("a full tile", lambda: (_random(4, 4, seed=3), 8, 0, 16, 16, True)),
    ),
)  # fmt: skip


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


# The chapter's kernel, with both bugs.
_GIVEN = Edited(tile_maximum, {
    '            acc_s = tl.where(keys[None, :] < M, acc_s, float("-inf"))\n': "",
    ", mask=rows < N": "",
})  # fmt: skip


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    given = ast.parse(_GIVEN.source).body[0].body[1]  # behind the docstring
    try:
        (other,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way
    return ast.dump(other) == ast.dump(given)


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


def _maximum_case(name: str, N: int, M: int, zero_key: bool = False) -> Case:
    here = environment.detect()
    return Case(name, lambda: (N, M, zero_key), lambda: here.why_not("triton", here.device))


_MAXIMUM = TEXTS.exercise(
    "tile_maximum",
    minutes=6, difficulty=2, solution=tile_maximum,
    run=_run_maximum,
    returns=("Max", "the end of Max"),
    misconceptions=diffs(tile_maximum, [
        ('tl.where(keys[None, :] < M, acc_s, float("-inf"))', "acc_s",
         "letting keys past the end take part",
         "Where there is no key, the score is 0. Here every true score is below 0. Which score "
         "never wins a maximum?"),
        (", mask=rows < N", "", "storing rows past the last query",
         "The last tile has rows that are no queries. Whose memory lies past the end of `Max`?"),
        ({"mask=keys[:, None] < M, other=0.0": 'mask=keys[:, None] < M, other=float("-inf")',
         'tl.where(keys[None, :] < M, acc_s, float("-inf"))': "acc_s"},
         "loading -inf for keys that do not exist",
         "A query may hold negative numbers. What is -1 times -inf, and does it lose the maximum?"),
        ("keys[None, :] < M", "keys[None, :] < N", "comparing keys with the number of queries",
         "`N` counts queries. Which number says how many keys there are?"),
        ("keys[None, :] < M", "acc_s != 0", "taking a score of 0 for a key that does not exist",
         "A key that exists may have the score 0, too. What tells a key past the end from the "
         "others?"),
        ('acc_s, float("-inf")', 'float("-inf"), acc_s', "swapping the two arms of `tl.where`",
         "You hide the keys that exist. Which arm does `tl.where` take where its condition is "
         "True?"),
        ("keys[None, :] < M", "keys[:, None] < M", "spreading the keys over the rows of the tile",
         "`acc_s` is `[BQ, BK]`: a key is a column. `keys[:, None]` is `[BK, 1]`. Which shape "
         "gives each column its key?"),
        ("range(0, M, BK)", "range(0, M // BK * BK, BK)",
         "dropping the last keys where BK does not divide M",
         "The last tile holds fewer keys, and they count. How can the walk keep that tile and "
         "ignore its empty places?"),
        ("mask=rows < N", "mask=rows < M", "comparing rows with the number of keys",
         "`M` counts keys. Which number says how many queries there are?"),
    ]),
    cases=(
        _maximum_case("8 queries, 16 keys: full tiles", 8, 16),
        _maximum_case("8 queries, 13 keys, every score below 0", 8, 13),
        _maximum_case("7 queries, 16 keys", 7, 16),
        _maximum_case("7 queries, 3 keys", 7, 3),
        _maximum_case("7 queries, 13 keys, and key 1 is all zeros", 7, 13, True),
    ),
)  # fmt: skip


# -- tiled_cost --


def tiled_cost(N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
    """Operations of the matrix products, and bytes moved, for one head in bf16; `tile` divides
    N."""
    tiles = N // tile
    visited = tiles * (tiles + 1) // 2 if causal else tiles * tiles
    operations = visited * 4 * tile * tile * D  # two products, and a multiply and an add each
    q = o = N * D * 2
    k = v = visited * tile * D * 2
    lse = N * 4
    moved = q + k + v + o + lse
    return operations, moved


_COST = TEXTS.exercise(
    "tiled_cost",
    minutes=5, difficulty=2, solution=tiled_cost,
    tolerance=0.0,
    misconceptions=diffs(tiled_cost, [
        ("4 * tile * tile", "4 * tile", "taking tiling for a saving of operations",
         "A tile is loaded fewer times, but each of its queries still meets each of its keys. "
         "How many dot products are there without a mask?"),
        ("(tiles + 1)", "tiles", "taking exactly half for the causal case",
         "The tiles on the diagonal are loaded and computed whole, so it is more than half. How "
         "many tiles does the first tile of queries need, and how many the second?"),
        ({"tiles * (tiles + 1) // 2": "tiles * tiles / 2",
         "operations, moved": "int(operations), int(moved)"},
         "taking exactly half for the causal case"),
        ("operations, moved", "moved, operations", "returning the bytes before the operations",
         "Both numbers are right. In which order are they asked for?"),
        ("visited * 4 * tile * tile * D", "4 * D * (N * (N + 1) // 2 if causal else N * N)",
         "counting visible pairs where whole tiles are computed",
         "A matrix product computes all of a tile. What about the part that is masked afterwards?"),
        ("tiles * (tiles + 1) // 2 if causal else ", "", "skipping no tile",
         "You count all tiles, with the mask as without. Where does a tile of queries stop under "
         "the causal mask?"),
        ("(tiles + 1)", "(tiles - 1)", "leaving out the tiles on the diagonal",
         "A tile on the diagonal is half visible, so it must be computed. How many of those are "
         "there?"),
        ("visited * tile * D * 2", "N * D * 2", "reading k and v once in all",
         "The chip cannot hold all of them. Which keys does the second tile of queries need that "
         "the first has loaded before?"),
        ("visited * tile * D * 2", "visited * tile * D * 2 * tile",
         "reading k and v once per query",
         "That is chapter 03 without tiles. How many queries share a tile of keys here?"),
        ("= q", "= visited * tile * D * 2", "loading q again with every tile of keys",
         "The tile of queries stays on the chip while the keys pass by. How often is it loaded?"),
        ({"+ o": "+ visited * tile * D * 2", "lse = N": "lse = visited * tile"},
         "storing o and lse with every tile of keys",
         "The state of a row stays on the chip until its walk ends. How often is its output "
         "written?"),
        ("visited * tile * D * 2", "tiles * tiles * tile * D * 2",
         "skipping a tile's operations but not its loads",
         "Your operations leave out the skipped tiles, and your bytes do not. Are the keys of a "
         "skipped tile loaded?"),
        ("visited * 4 * tile * tile * D", "4 * N * N * D",
         "skipping a tile's loads but not its operations",
         "Your bytes leave out the skipped tiles, and your operations do not. Is a skipped tile "
         "computed?"),
        (" + v", "", "forgetting v's bytes",
         "Your count holds the loads of one tensor where there are two. What does the second "
         "matrix product multiply the weights with?"),
        (" + o", "", "forgetting o's bytes",
         "All that is loaded is there. What is written, besides `lse`?"),
        ("visited * 4", "visited * 2",
         "counting one matrix product, or one operation for a multiply and an add",
         "Your operations are half of what they should be. What does one pair of a query and a "
         "key cost for its score, and what for its weighted value?"),
        ("moved = ", "moved = 2 * 4 * N * N + ", "still moving the table",
         "You write and read N × N scores and weights. Do the scores of a tile ever leave the "
         "chip?"),
        (" + lse", "", "forgetting lse",
         "You are short by one number for each query. What is stored beside `o`?"),
        ("N * 4", "N * 2", "storing lse in two bytes",
         "You are short by 2 bytes for each query. In which format is lse kept?"),
        ({"N * D * 2": "N * D * 4", "tile * D * 2": "tile * D * 4"}, "counting four bytes a number",
         "Your bytes are those of fp32. In which format are `q`, `k`, `v` and `o` here?"),
        ("operations, moved", "operations, moved // 2",
         "counting numbers where bytes are asked for",
         "You have counted numbers. How many bytes does one in bf16 take?"),
    ]),
    cases=(
        Case("N = 4, D = 3, tiles of 2, causal", lambda: (4, 3, 2, True)),
        Case("N = 4, D = 3, tiles of 2, no mask", lambda: (4, 3, 2, False)),
        Case("N = 1024, D = 64, tiles of 128, causal", lambda: (1024, 64, 128, True)),
        Case("N = 1024, D = 64, tiles of 128, no mask", lambda: (1024, 64, 128, False)),
        Case("one tile", lambda: (16, 8, 16, True)),
    ),
)  # fmt: skip


EXERCISES = (_KINDS, _ATTEND, _MASK, _MAXIMUM, _COST)

DOUBLES = (
    Double("tile_kinds", names=(
        "taking the queries for the first N positions",
        "skipping a tile whose first key is the last query's own position")),
    Double("tile_kinds", names=("skipping what the first query of a tile does not see",
                                "calling a tile full because its last query sees all of it")),
    Double("mask_tile", names=("a triangle within the tile, wherever the tile lies",
                               "leaving the ragged tail in")),
    Double("mask_tile", names=("writing zeros where -inf is meant",
                               "hiding a query's own position from it")),
    Double("tiled_cost", names=("forgetting v's bytes", "forgetting lse")),
    Double("tiled_cost", names=("taking exactly half for the causal case",
                                "reading k and v once in all")),
    Double("attend_in_tiles", names=("taking the queries for the first N positions",
                                     "leaving out the scale")),
    Double("attend_in_tiles", names=("tiles on the diagonal left unmasked",
                                     "`finish` with `scale_log2`")),
    Double("tile_maximum", names=("letting keys past the end take part",
                                  "storing rows past the last query")),
)  # fmt: skip

TRAPS = TEXTS.traps

PREDICTIONS = TEXTS.predictions(
    globals(),
    gib_without_table={"unit": "GiB", "tolerance": 0.02},
    operations_left={"unit": "%"},
    gib_each_alone={"unit": "GiB", "tolerance": 0.01},
    measured_ms={"unit": "ms", "tolerance": 0.01},
)
