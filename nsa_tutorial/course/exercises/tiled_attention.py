"""Exercises of chapter 04: which tiles to skip, what to mask on the others, what it all costs, and
the whole walk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.online_softmax import LOG2_E


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- tile_kinds --


def tile_kinds(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    """One string per tile of queries, one letter per tile of keys: "F" full, "D" diagonal, "S"
    skipped."""
    rows = []
    for query_start in range(0, N, tile_q):
        first = M - N + query_start  # position of the tile's first query
        last = M - N + min(query_start + tile_q, N) - 1  # and of its last
        row = ""
        for key_start in range(0, M, tile_k):
            last_key = min(key_start + tile_k, M) - 1
            if key_start > last:
                row += "S"
            elif last_key <= first:
                row += "F"
            else:
                row += "D"
        rows.append(row)
    return rows


def _kinds(
    skip: str = "last",
    full: str = "first",
    offset: bool = True,
    strict: bool = False,
    clip: bool = True,
    past: int = 1,
) -> Callable:
    """A wrong `tile_kinds`: which query decides on skipping and on masking, where the queries
    stand, whether tiles end."""

    def wrong(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
        rows = []
        for query_start in range(0, N, tile_q):
            ends = {"first": query_start, "last": min(query_start + tile_q, N) - 1}
            ends = {name: at + (M - N if offset else 0) for name, at in ends.items()}
            row = ""
            for key_start in range(0, M, tile_k):
                last_key = (min(key_start + tile_k, M) if clip else key_start + tile_k) - past
                if key_start > ends[skip] or (strict and key_start == ends[skip]):
                    row += "S"
                else:
                    row += "F" if last_key <= ends[full] else "D"
            rows.append(row)
        return rows

    return wrong


def _kinds_by_number(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    rows, columns = range(-(-N // tile_q)), range(-(-M // tile_k))
    return ["".join("S" if j > i else "D" if j == i else "F" for j in columns) for i in rows]


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
    return Picture(
        figure, f"{wrong} of {sum(map(len, got))} tiles are of another kind (blue: visible pairs)"
    )


_KINDS = Exercise(
    name="tile_kinds",
    statement="""
Causal attention, `N` queries that are the last of `M` positions, tiles of `tile_q` queries and
`tile_k` keys; tiles at the ends may hold fewer. Return a list with a string for each tile of
queries, and in it a letter for each tile of keys: `"S"` if no query of the tile sees any of its
keys (skipped), `"F"` if every query sees every key (full), `"D"` otherwise (on the diagonal). For
`N = M = 4` and tiles of 2 × 2 that is `["DS", "FD"]`. Build no mask: a few comparisons per tile are
enough.
""",
    minutes=7,
    difficulty=2,
    solution=tile_kinds,
    misconceptions=(
        Misconception(
            "comparing the numbers of tiles, not positions",
            _kinds_by_number,
            "Tile 2 of the queries and tile 2 of the keys begin at the same position only where "
            "tile_q equals tile_k and N equals M. "
            "Turn the numbers into positions first.",
        ),
        Misconception(
            "taking the queries for the first N positions",
            _kinds(offset=False),
            "They are the last N of the M: query 0 stands at position M − N, behind all keys "
            "that were there before it.",
        ),
        Misconception(
            "skipping what the first query of a tile does not see",
            _kinds(skip="first"),
            "The other queries of the tile stand further on and may see more. Which of them has "
            "to decide that nothing is seen?",
        ),
        Misconception(
            "calling a tile full because its last query sees all of it",
            _kinds(full="last"),
            "A full tile gets no mask, so every query must see every key. The last query sees "
            "the most; which one sees the least? "
            "As it is, the earlier queries look into the future.",
        ),
        Misconception(
            "skipping a tile whose first key is the last query's own position",
            _kinds(strict=True),
            "A query sees itself: one visible pair is enough to keep the tile.",
        ),
        Misconception(
            "taking the end of a tile of keys for its last key",
            _kinds(past=0),
            "The end is one past the last key. A tile whose last key is at the first query's own "
            "position is full: "
            "a query sees itself.",
        ),
        Misconception(
            "measuring the last tile of keys past the end",
            _kinds(clip=False),
            "Where tile_k does not divide M, the last tile holds fewer keys. Keys that do not "
            "exist cannot be hidden from anyone.",
        ),
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


def _padded(BQ: int, BK: int, seed: int) -> Tensor:
    """Random scores of a tile whose last key does not exist: there the score is 0."""
    scores = _random(BQ, BK, seed=seed)
    scores[:, -1] = 0
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
    offset: bool = True,
    starts: bool = True,
    strict: bool = False,
    tail: bool = True,
    fill: float = -torch.inf,
) -> Callable:
    def wrong(
        acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
    ) -> Tensor:
        BQ, BK = acc_s.shape
        position = (
            (M - N if offset else 0) + (query_start if starts else 0) + torch.arange(BQ)[:, None]
        )
        key_position = (key_start if starts else 0) + torch.arange(BK)
        visible = (
            (key_start + torch.arange(BK) < M).expand(BQ, BK)
            if tail
            else torch.ones(BQ, BK, dtype=torch.bool)
        )
        if causal:
            visible = visible & (key_position < position if strict else key_position <= position)
        return acc_s.masked_fill(~visible, fill)

    return wrong


def _triangle(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    visible = (key_start + torch.arange(acc_s.shape[1]) < M).expand(acc_s.shape)
    if causal:
        visible = visible & torch.ones(acc_s.shape, dtype=torch.bool).tril()
    return acc_s.masked_fill(~visible, -torch.inf)


def _always_causal(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    return mask_tile(acc_s, query_start, key_start, N, M, True)


def _tail_by_shape(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    return mask_tile(acc_s, query_start, key_start, N, M, causal)[:, : M - key_start]


_MASK = Exercise(
    name="mask_tile",
    statement="""
A kernel's tile keeps its shape: `acc_s` `[BQ, BK]` are the scores of queries `query_start`,
`query_start + 1`, … with keys `key_start`, `key_start + 1`, …, also where such a key lies past the
end. There zeros were loaded, and the score is 0. (All queries exist.) Return `acc_s` with `-inf`
wherever the query does not see the key: because the key does not exist, and, if `causal`, because
it lies in the query's future. The `N` queries are the last of `M` positions. Keep the shape.
""",
    minutes=5,
    difficulty=2,
    solution=mask_tile,
    misconceptions=(
        Misconception(
            "leaving the ragged tail in",
            _masked(tail=False),
            "With causal=True the mask happens to hide the keys past the end, for they lie in "
            "everyone's future. Without it they stay, "
            "and a score of 0 is not nothing: it weighs e⁰.",
        ),
        Misconception(
            "a triangle within the tile, wherever the tile lies",
            _triangle,
            "`tril` and `triu` compare the row and the column inside the tile. That is right for "
            "a tile of "
            "which the first query stands at the "
            "position of the first key, and for no other. Compare positions in the whole text.",
        ),
        Misconception(
            "forgetting where the tile begins",
            _masked(starts=False),
            "Row 0 of the tile is query query_start, and column 0 is key key_start: count from "
            "there.",
        ),
        Misconception(
            "taking the queries for the first N positions",
            _masked(offset=False),
            "They are the last N of the M: query 0 stands at position M − N.",
        ),
        Misconception(
            "hiding a query's own position from it",
            _masked(strict=True),
            "A query sees the keys at its own position and before: the comparison has to allow "
            "equality.",
        ),
        Misconception(
            "writing zeros where −∞ is meant",
            _masked(fill=0.0),
            "These are scores, and the softmax is still to come: a score of 0 gets the weight e⁰ "
            "before the division.",
        ),
        Misconception(
            "applying the causal mask always",
            _always_causal,
            "With causal=False every query sees every key that exists.",
        ),
        Misconception(
            "cutting the tail off",
            _tail_by_shape,
            "In PyTorch that would do; a kernel's tile has a fixed shape. Keep all BK columns "
            "and hide those past the end.",
        ),
    ),
    cases=(
        Case(
            "queries 2 and 3 of 4, at positions 3 and 4; keys 2 to 5, and there are only 5",
            lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, True),
        ),
        Case(
            "the same without the causal mask",
            lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, False),
        ),
        Case("a tile on the diagonal, 4 × 6", lambda: (_random(4, 6, seed=0), 8, 6, 16, 16, True)),
        Case(
            "the last 3 of 11 positions, keys from 8",
            lambda: (_padded(3, 4, seed=1), 0, 8, 3, 11, True),
        ),
        Case(
            "the last 3 of 11 positions, no causal mask",
            lambda: (_padded(3, 4, seed=2), 0, 8, 3, 11, False),
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


def _cost(change: str) -> Callable:
    """A wrong `tiled_cost`, with one change."""

    def wrong(N: int, D: int, tile: int, causal: bool) -> tuple[int, int]:
        tiles = N // tile
        visited = tiles * (tiles + 1) // 2 if causal and change != "no skip" else tiles * tiles
        operations, kv = visited * 4 * tile * tile * D, visited * 4 * tile * D
        q = o = N * D * 2
        lse = N * 4
        if change == "half":
            operations, kv = (
                (operations, kv) if not causal else (2 * N * N * D, N * N * D * 2 // tile)
            )
        if change == "saves operations":
            operations //= tile
        if change == "visible":
            operations = 4 * D * N * (N + 1) // 2 if causal else operations
        if change == "once":
            kv = 2 * N * D * 2
        if change == "per query":
            kv = kv * tile
        if change == "one product":
            operations //= 2
        if change == "table":
            kv += 4 * 2 * N * N
        if change == "no lse":
            lse = 0
        if change == "lse bf16":
            lse = N * 2
        return operations, q + kv + o + lse

    return wrong


_COST = Exercise(
    name="tiled_cost",
    statement="""
One head, `N` queries and as many keys, `D` wide like the values, in bf16 (2 bytes); square tiles of
`tile` queries and keys, and `tile` divides `N`. Return two whole numbers, `(operations, bytes)`:
the operations of the two matrix products, a multiply and an add each, over all tiles that are
computed; and the bytes that are moved: `q`, `o` and `lse` (fp32) once, and the tiles of `k` and `v`
as often as they are loaded. With `causal`, tiles without a visible pair are skipped; all others are
computed whole. Before you write it: without a mask, does tiling save operations?
""",
    minutes=5,
    difficulty=2,
    solution=tiled_cost,
    misconceptions=(
        Misconception(
            "taking tiling for a saving of operations",
            _cost("saves operations"),
            "A tile loaded for many queries at once is loaded fewer times, but each of its queries "
            "still meets each of its keys. How "
            "many dot products are there without a mask?",
        ),
        Misconception(
            "taking exactly half for the causal case",
            _cost("half"),
            "The tiles on the diagonal are loaded and computed whole. Count tiles: 1 + 2 + … one "
            "more for each tile of queries.",
        ),
        Misconception(
            "counting visible pairs where whole tiles are computed",
            _cost("visible"),
            "A matrix product computes all of a tile, also the part that is masked afterwards.",
        ),
        Misconception(
            "skipping no tile",
            _cost("no skip"),
            "With the causal mask a tile of queries stops at the diagonal. Chapter 01's "
            "implementation could not do that.",
        ),
        Misconception(
            "reading k and v once in all",
            _cost("once"),
            "The chip cannot hold them: each tile of queries reads all the keys and values that "
            "it needs again.",
        ),
        Misconception(
            "reading k and v once per query",
            _cost("per query"),
            "That is chapter 03 without tiles. Here all queries of a tile share what has been "
            "loaded.",
        ),
        Misconception(
            "counting one matrix product, or one operation for a multiply and an add",
            _cost("one product"),
            "Every pair of a query and a key costs 2·D operations for the score and 2·D more for "
            "the weighted value.",
        ),
        Misconception(
            "still moving the table",
            _cost("table"),
            "The scores of a tile never leave the chip: nothing of size N × N is written or read.",
        ),
        Misconception(
            "forgetting lse", _cost("no lse"), "One number per query is stored beside o."
        ),
        Misconception(
            "storing lse in two bytes", _cost("lse bf16"), "lse is fp32: four bytes per query."
        ),
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
    outputs = []
    for query_start in range(0, N, tile_q):
        q_tile = q[query_start : query_start + tile_q]  # [BQ, D]
        position = torch.arange(M - N, M)[query_start : query_start + tile_q]  # [BQ]
        state = online_softmax.start(len(q_tile), v.shape[1])
        for key_start in range(0, M, tile_k):
            if key_start > position[-1]:
                break  # no query of this tile sees a key from here on
            keys = slice(key_start, key_start + tile_k)
            acc_s = q_tile @ k[keys].T  # [BQ, BK]
            acc_s = acc_s.masked_fill(torch.arange(M)[keys] > position[:, None], -torch.inf)
            state = online_softmax.update(state, acc_s, v[keys], scale * LOG2_E)
        outputs.append(online_softmax.finish(state, scale))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse)


def _attend(change: str) -> Callable:
    """A wrong `attend_in_tiles`, with one change."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple[Tensor, Tensor]:
        N, M, D = len(q), len(k), q.shape[1]
        scale = 1.0 if change == "no scale" else D**-0.5
        scale_log2 = scale * (1.0 if change == "no log2(e)" else LOG2_E)
        offset = 0 if change == "first positions" else M - N
        state, o, lse = online_softmax.start(tile_q, v.shape[1]), [], []
        end_q = N // tile_q * tile_q if change == "no tail" else N
        end_k = M // tile_k * tile_k if change == "no key tail" else M
        for query_start in range(0, end_q, tile_q):
            rows = min(tile_q, N - query_start)
            position = offset + query_start + torch.arange(rows)
            if change == "one state":
                state = online_softmax.State(*(x[:rows] for x in state))
            else:
                state = online_softmax.start(rows, v.shape[1])
            for key_start in range(0, end_k, tile_k):
                last = position[0] if change == "skip early" else position[-1]
                if key_start > last and change != "no skip":
                    break
                keys = slice(key_start, key_start + tile_k)
                acc_s = q[query_start : query_start + tile_q] @ k[keys].T
                if change == "scaled before":
                    acc_s = acc_s * scale
                if change != "no mask":
                    acc_s = acc_s.masked_fill(torch.arange(M)[keys] > position[:, None], -torch.inf)
                if change == "last tile only":
                    state = online_softmax.start(rows, v.shape[1])
                state = online_softmax.update(state, acc_s, v[keys], scale_log2)
            tile_o, tile_lse = online_softmax.finish(
                state, scale_log2 if change == "finish in base two" else scale
            )
            o.append(tile_o)
            lse.append(tile_lse)
        return torch.cat(o), torch.cat(lse)

    return wrong


_ATTEND = Exercise(
    name="attend_in_tiles",
    statement="""
The whole walk for one head: `q` `[N, D]`, the last `N` of `M` positions, `k` `[M, D]`, `v`
`[M, DV]`. Return causal attention's `o` `[N, DV]` and `lse` `[N]`, with the scale `D ** -0.5`,
holding one tile of at most `tile_q × tile_k` scores at a time. Neither size need divide its length.
Skip what no query of a tile sees; one case notices if you do not. Take chapter 03's
`online_softmax.start(rows, DV)`, `online_softmax.update(state, acc_s, v_tile, scale_log2)` and
`online_softmax.finish(state, scale)`, with `online_softmax.LOG2_E` folded into `scale_log2`;
`torch.cat` puts the tiles' results below one another.
""",
    minutes=12,
    difficulty=3,
    solution=attend_in_tiles,
    misconceptions=(
        Misconception(
            "tiles on the diagonal left unmasked",
            _attend("no mask"),
            "Skipping leaves out tiles of which nothing is visible. In a tile on the diagonal some "
            "queries still have to be kept from "
            "some keys.",
        ),
        Misconception(
            "skipping tiles that only the first query of the tile does not see",
            _attend("skip early"),
            "The last query of the tile sees the most. It decides when the walk along the keys "
            "may stop.",
        ),
        Misconception(
            "computing tiles of which nothing is visible",
            _attend("no skip"),
            "The result is the same as long as the values are numbers; here the later ones are "
            "NaN, and 0 · NaN is NaN. The mask "
            "only hides what was computed. A tile of keys beyond the last query's position is "
            "not even loaded.",
        ),
        Misconception(
            "taking the queries for the first N positions",
            _attend("first positions"),
            "They are the last N of the M: query 0 stands at position M − N.",
        ),
        Misconception(
            "one state for all tiles of queries",
            _attend("one state"),
            "A state belongs to its rows. The next tile of queries starts with an empty one; as it "
            "is, its rows remember what other "
            "queries saw.",
        ),
        Misconception(
            "starting anew at every tile of keys",
            _attend("last tile only"),
            "The state is what joins the tiles of keys. Start it once for each tile of queries, "
            "in front of the inner loop.",
        ),
        Misconception(
            "dropping the last queries where tile_q does not divide N",
            _attend("no tail"),
            "The last tile may hold fewer rows: `range(0, N, tile_q)` still reaches it, and a "
            "slice ends by itself.",
        ),
        Misconception(
            "dropping the last keys where tile_k does not divide M",
            _attend("no key tail"),
            "The last tile may hold fewer keys, and the last queries see them: themselves, to "
            "begin with.",
        ),
        Misconception(
            "leaving out the scale",
            _attend("no scale"),
            "The dot products are multiplied by D ** -0.5, here inside scale_log2 and in `finish`.",
        ),
        Misconception(
            "scaling the scores before `update`, which scales them itself",
            _attend("scaled before"),
            "`update` takes plain dot products: the scale is in `scale_log2` already.",
        ),
        Misconception(
            "`finish` with `scale_log2`",
            _attend("finish in base two"),
            "`o` is right. But lse is a natural logarithm: what does chapter 03's `finish` say "
            "about its scale?",
        ),
        Misconception(
            "`scale_log2` without `log2(e)`",
            _attend("no log2(e)"),
            "`update` takes powers of two: eˣ is 2 to the x·log2(e). `finish` wants the plain "
            "scale.",
        ),
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


EXERCISES = (_KINDS, _MASK, _COST, _ATTEND)
