"""Chapter 05's pictures: one query's list, by hand and in a real text, and what a list moves beside
dense tiles.

`group_mass` and `true_lists` choose blocks by the attention that trained heads really pay (no
kernel knows it in advance; chapters 06 and 07 find such blocks cheaply), `token_kinds` says what a
list makes of each token, `loads` and `crossover` count bytes. `draw_masks` draws the lists of all
queries, `draw_gather` a list by hand, `draw_window` a window beside blocks, `draw_pairs` and
`draw_traffic` scores and bytes by length, `draw_text` a list in the text; `explore` puts controls
on the last.

Symbols: `N` positions, `H` key/value heads, `BS` block size, `NB` blocks, `S` slots.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import ipywidgets
import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from torch import Tensor

from nsa_tutorial.course import costs, heads
from nsa_tutorial.course.figures import (
    INKS,
    PALETTE,
    SURFACE,
    Picture,
    grid,
    new_figure,
    readable_on,
)  # fmt: skip
from nsa_tutorial.course.heads import Heads
from nsa_tutorial.course.marks import named
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel

KINDS = ("selected", "own block", "not listed", "future")
COPYING = (
    3  # the KV head whose group looks farthest back: at lines like the one that the query stands in
)
QUERY, BLOCK_SIZE, TOP_N = 385, 16, 4  # the example of the chapter
LETTER, LINE = 0.08, 0.173  # inches of a character of the text and of a line
LETTER_SIZE = 9.6  # points: as wide as `LETTER`
D = 128  # of the priced example
# the colour of a token's ground; a token of the past that no list names has none
_GROUNDS = {"selected": "selected", "own block": "own block", "future": "masked"}

# -- lists by the true attention --


def group_mass(h: Heads, block_size: int) -> Tensor:
    """The share of a group's attention that each block of keys gets, `[H, N, NB]`: the mean over
    the group's query heads."""
    mass = heads.block_mass(heads.attention_weights(h.q, h.k)[0], block_size)  # [HQ, N, NB]
    return mass.unflatten(0, (-1, h.G)).mean(1)


def true_lists(mass: Tensor, block_size: int, top_n: int) -> Tensor:
    """The best `top_n` causal blocks of each query by `mass [H, N, NB]`, its own always among them:
    `[1, N, H, top_n]`.

    Ids ascend; a query with fewer blocks behind it has `-1` in the slots that are left.
    """
    NB = mass.shape[-1]
    own = torch.arange(mass.shape[1])[:, None] // block_size  # [N, 1]
    block = torch.arange(NB)  # [NB]
    rank = mass.masked_fill(block == own, torch.inf).masked_fill(block > own, -torch.inf)
    best = rank.topk(min(top_n, NB), dim=-1)
    # empty slots last
    ids = best.indices.masked_fill(best.values == -torch.inf, NB).sort(-1).values
    ids = torch.nn.functional.pad(ids, (0, top_n - ids.shape[-1]), value=NB)
    return ids.masked_fill(ids == NB, -1).permute(1, 0, 2)[None]


def token_kinds(ids: list[int], query: int, N: int, block_size: int) -> list[str]:
    """What each of `N` tokens is to a query with this list: one of `KINDS`."""
    own = query // block_size

    def kind(token: int) -> str:
        if token > query:
            return "future"
        if token // block_size not in ids:
            return "not listed"
        return "own block" if token // block_size == own else "selected"

    return [kind(token) for token in range(N)]


@functools.cache
def _heads() -> Heads:
    return heads.load()


@functools.lru_cache(maxsize=4)
def _mass(block_size: int) -> Tensor:
    return group_mass(_heads(), block_size)


# -- the lists of all queries --


def kinds_of_pairs(group: int, top_n: int, block_size: int) -> np.ndarray:
    """What each key of the text is to each query with its list: an index into `KINDS`, `[N, N]`."""
    lists = _lists(block_size, top_n)[0, :, group]  # [N, S]
    position = torch.arange(len(lists))
    block, query = position // block_size, position[:, None]
    listed = (lists[:, :, None] == block).any(1)
    kinds = torch.where(listed, KINDS.index("selected"), KINDS.index("not listed"))
    kinds = torch.where(listed & (block == block[:, None]), KINDS.index("own block"), kinds)
    return torch.where(position > query, KINDS.index("future"), kinds).numpy()


def draw_masks(group: int = COPYING, top_n: int = TOP_N, block_size: int = BLOCK_SIZE) -> Picture:
    """Dense causal attention beside one list a query, as masks of queries and keys."""
    kinds = kinds_of_pairs(group, top_n, block_size)
    N, future = len(kinds), KINDS.index("future")
    palette = {"selected": "selected", "own block": "own block", "future": "masked"}
    ground = [to_rgb(PALETTE.get(palette.get(kind), SURFACE)) for kind in KINDS]
    dense = np.where(kinds == future, future, len(KINDS))
    sheet, side, top = Sheet(8.2, 4.05), 2.85, 0.58
    seen = np.isin(kinds, [KINDS.index("selected"), KINDS.index("own block")]).sum()
    visible = costs.visible_pairs(N, N)
    ticks = {share / 4: share * N // 4 for share in range(5)}
    for left, shown, name in (
        (0.75, dense, f"dense: {visible:,} pairs"),
        (4.75, kinds, f"lists of {top_n} blocks of {block_size}: {seen:,} pairs"),
    ):
        place = Place(left, top, side, side)
        sheet.image(place, np.array([*ground, to_rgb(PALETTE["key"])])[shown])
        bottom = top + side
        sheet.lines([[(left, top), (left, bottom), (left + side, bottom)]], "line", 0.8)
        sheet.title(place, name)
        sheet.below(place, ticks, "key")
        sheet.beside(place, ticks, "query", away=0.5)
    legend = {"key": "read", "selected": "selected", "own block": "own block",
              SURFACE: "not listed", "masked": "later"}  # fmt: skip
    sheet.legend(1.6, 3.95, legend)
    pairs = f"one visible pair in {visible / seen:.1f} of a text of {N} tokens"
    told = f"Lists of {top_n} blocks keep {pairs}"
    return Picture(sheet.figure, told)


# -- a window beside blocks --


def draw_window(M: int = 12, window: int = 4, query: int = 9) -> Picture:
    """What each query sees through a window, and of its own block of the same size."""
    position = np.arange(M)
    past = position <= position[:, None]
    in_window = past & (position > position[:, None] - window)
    in_block = past & (position // window == position[:, None] // window)
    figure, axes = new_figure(7.6, 3.3, columns=2)
    for axis, seen, colour, title in (
        (axes[0, 0], in_window, "window", f"a window of {window}"),
        (axes[0, 1], in_block, "own block", f"the own block, blocks of {window}"),
    ):
        grid(axis, seen, colour=colour, largest=1.0, hidden=~past)
        row = Rectangle((-0.5, query - 0.5), M, 1, fill=False, zorder=5)
        row.set(edgecolor=PALETTE["query"], linewidth=1.8)
        axis.add_patch(row)
        axis.set(title=title, xlabel="key", ylabel="query", xticks=range(0, M, 3),
                 yticks=range(0, M, 3))  # fmt: skip
    counts = int(in_window[query].sum()), int(in_block[query].sum())
    told = f"Query {query} sees {counts[0]} keys in its window, {counts[1]} in its own block"
    return Picture(figure, told)


# -- one query's list, by hand --


def tiles_of(ids: list[int], query: int, M: int, block_size: int) -> list[list[int | None]]:
    """For each slot the tokens that its tile holds, and None for each row that stays zero."""
    seen = range(min(query + 1, M))
    # an empty slot holds nothing that exists
    starts = [block_id * block_size if block_id >= 0 else M for block_id in ids]
    return [
        [token if token in seen else None for token in range(start, start + block_size)]
        for start in starts
    ]


def draw_gather(ids: list[int], query: int, M: int, block_size: int) -> Picture:
    """Above the keys in their blocks, below the tile of each slot, and what goes from the one to
    the other."""
    figure, axes = new_figure(8.0, 2.9)
    axis, tiles, own = axes[0, 0], tiles_of(ids, query, M, block_size), query // block_size
    gap, top, bottom = 0.5, 2.4, 0.0

    def square(x: float, y: float, text: str, colour: str | None) -> None:
        face = SURFACE if colour is None else PALETTE[colour]
        axis.add_patch(
            Rectangle((x, y), 0.92, 0.8, facecolor=face, edgecolor=PALETTE["faint"], linewidth=0.8)
        )
        ink = PALETTE["faint"] if colour is None else readable_on(colour)
        axis.text(x + 0.46, y + 0.38, text, ha="center", va="center", fontsize=9, color=ink)

    kinds = token_kinds(ids, query, M, block_size)
    for token, kind in enumerate(kinds):
        square(token + gap * (token // block_size), top, str(token), _GROUNDS.get(kind))
    place = query + gap * own
    axis.add_patch(
        Rectangle(
            (place - 0.05, top - 0.05),
            1.02,
            0.9,
            fill=False,
            edgecolor=PALETTE["query"],
            linewidth=2.2,
        )
    )
    for block in range(-(-M // block_size)):
        middle = block * (block_size + gap) + block_size / 2
        axis.text(
            middle, top + 1.0, f"block {block}", ha="center", fontsize=9, color=PALETTE["text"]
        )
    for slot, (block_id, tile) in enumerate(zip(ids, tiles, strict=True)):
        start = slot * (block_size + gap)
        for row, token in enumerate(tile):
            colour = None if token is None else "own block" if block_id == own else "selected"
            square(start + row, bottom, "zero" if token is None else str(token), colour)
            if token is not None:
                source = token + gap * block_id + 0.46
                axis.plot(
                    [source, start + row + 0.46],
                    [top - 0.08, bottom + 0.88],
                    color=INKS[colour],
                    linewidth=1,
                )
        label = f"slot {slot}: id {block_id}".replace("-", "−")
        axis.text(
            start + block_size / 2,
            bottom - 0.45,
            label,
            ha="center",
            fontsize=9,
            color=PALETTE["text"],
        )
    axis.set_xlim(
        -0.2, max(M + gap * ((M - 1) // block_size), len(ids) * (block_size + gap) - gap) + 0.1
    )
    axis.set_ylim(-0.7, 3.8)
    axis.axis("off")
    loaded = sum(token is not None for tile in tiles for token in tile)
    zeros = len(ids) * block_size - loaded
    told = (
        f"Query {query} with the list {ids}: {loaded} of the {query + 1} keys of its past "
        f"are loaded{f', {zeros} rows stay zero' if zeros else ''}"
    )
    return Picture(figure, told.replace("-", "−"))


# -- one query's list, in the text --


def draw_text(
    query: int = QUERY, top_n: int = TOP_N, group: int = COPYING, block_size: int = BLOCK_SIZE
) -> Picture:
    """Above, how the group's attention spreads over the blocks; below, the listed blocks in the
    text itself, their ids at the right."""
    h, ids = _heads(), list_of(query, top_n, group, block_size)
    shares, own = _mass(block_size)[group, query].tolist(), query // block_size
    text_high = LINE * (h.text.count(b"\n") + 1)
    sheet = Sheet(8.2, text_high + 2.27)
    bars = sheet.chart(Place(0.62, 0.34, 7.48, 1.06), (-0.6, len(shares) - 0.4),
                       (0, 100 * max(0.3, 1.15 * max(shares))))  # fmt: skip
    kinds = ["own block" if b == own else "selected" if b in ids else SURFACE
             for b in range(len(shares))]  # fmt: skip
    edges = ["line" if kind == SURFACE else kind for kind in kinds]
    spans = [(b - 0.4, 0, 0.8, 100 * share) for b, share in enumerate(shares)]
    bars.boxes(spans, kinds, edgecolors=named(edges), linewidths=0.8)
    told = [(b, 100 * shares[b], f"{100 * shares[b]:.0f}") for b in ids]
    bars.words(told, size=8, va="bottom", offset=(0, 2))
    bars.bottom(range(0, len(shares), max(1, len(shares) // 16)),
                 name=f"block id, {block_size} tokens a block")  # fmt: skip
    percent = [0, 20, 40, 60, 80][: 1 + int(bars.y[1] // 20)]
    bars.left(percent, name="attention, %", away=0.39)
    lines = h.text.split(b"\n")
    page = sheet.chart(
        Place(0.12, 1.97, 8.0, text_high), (-0.4, 8.0 / LETTER - 0.4), (len(lines), 0)
    )
    _draw_page(page, text_runs(h.text, ids, query, block_size), ids, block_size)
    names = {
        "selected": "selected",
        "own block": "own block",
        SURFACE: "not listed",
        "masked": "later",
        "query": f"query {query}",
    }
    sheet.legend(0.62, text_high + 2.135, names)
    return Picture(sheet.figure, finding(query, ids, np.array(shares), block_size))


def list_of(query: int, top_n: int, group: int, block_size: int = BLOCK_SIZE) -> list[int]:
    """The blocks of one query's list in the text, without empty slots."""
    return [i for i in _lists(block_size, top_n)[0, query, group].tolist() if i >= 0]


@functools.cache
def _lists(block_size: int, top_n: int) -> Tensor:
    return true_lists(_mass(block_size), block_size, top_n)


def finding(query: int, ids: list[int], shares: np.ndarray, block_size: int) -> str:
    """The title: which blocks, and how much of the attention they hold."""
    blocks = query // block_size + 1
    return (
        f"Query {query}: blocks {ids}, {len(ids)} of {blocks}, hold {shares[ids].sum():.0%} "
        "of its group's attention"
    )


class Run(NamedTuple):
    """Characters of one kind, side by side in a line.

    Attributes:
        line, column: where the first of them stands.
        kind: one of `KINDS`, or `query`.
        start: the position of the first of them.
        signs: what is written, a sign for the start and for line ends.
    """

    line: int
    column: int
    kind: str
    start: int
    signs: str


def text_runs(text: bytes, ids: list[int], query: int, block_size: int) -> list[Run]:
    """The text in runs of one kind, cut at the ends of lines and of listed blocks."""
    kinds = token_kinds(ids, query, len(text), block_size)
    kinds[query] = "query"
    runs: list[Run] = []
    line = column = 0
    for position, byte in enumerate(text):
        sign, kind = {0: "·", 10: "↵"}.get(byte, chr(byte)), kinds[position]
        last, block = runs[-1] if runs else None, position // block_size
        same = last and column and kind == last.kind
        if same and (kind != "selected" or block == last.start // block_size):
            runs[-1] = last._replace(signs=last.signs + sign)
        else:
            runs.append(Run(line, column, kind, position, sign))
        line, column = (line + 1, 0) if byte == 10 else (line, column + 1)
    return runs


def _draw_page(chart: Chart, runs: list[Run], ids: list[int], block_size: int) -> None:
    """The runs on the colours of their kinds, and beside each line the blocks that it shows."""
    shown = [run for run in runs if run.kind != "future"]
    colours = {**_GROUNDS, "query": "query"}
    inks = {kind: readable_on(colour) for kind, colour in colours.items()}
    written = [
        run if run.kind != "future" else run._replace(signs=run.signs.rstrip("·↵ "))
        for run in runs
        if run.kind != "future" or run.signs.strip("·↵ ")
    ]
    coloured = [run for run in written if run.kind in colours]
    chart.boxes([(run.column, run.line, len(run.signs), 0.96) for run in coloured],
                [colours[run.kind] for run in coloured])  # fmt: skip
    told, ink = [], []
    for run in written:
        bare = run.signs.lstrip(" ")
        told.append((run.column + len(run.signs) - len(bare), run.line + 0.45, bare))
        ink.append(inks.get(run.kind, "text"))
    chart.words(told, colour=ink, ha="left", size=LETTER_SIZE, family="monospace")
    beside: dict[int, list[int]] = {}
    for run in shown:
        block = run.start // block_size
        if block in ids and block not in beside.setdefault(run.line, []):
            beside[run.line].append(block)
    marks = [(85, line + 0.5, f"← {ranges(found)}") for line, found in beside.items() if found]
    chart.words([(85, -0.5, "block"), *marks], ha="left", size=8.5)


def ranges(ids: list[int]) -> str:
    """Ascending ids in words, neighbours as a range: `3, 5–8`."""
    first = [i for i in ids if i - 1 not in ids]
    last = [i for i in ids if i + 1 not in ids]
    pairs = zip(first, last, strict=True)
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in pairs)


def sentence(query: int, top_n: int, group: int, block_size: int = BLOCK_SIZE) -> str:
    """What there is to say about one query's list."""
    h, ids = _heads(), list_of(query, top_n, group, block_size)
    kinds = token_kinds(ids, query, len(h.text), block_size)
    keys = sum(kind in ("selected", "own block") for kind in kinds)
    held = _mass(block_size)[group, query, ids].sum().item()
    blocks = f"block{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
    return (
        f"Query {query} ({h.token(query)}) lists the {blocks}: {keys} of the {query + 1} keys "
        f"that it may see. They hold {held:.0%} of its group's attention."
    )


def explore() -> Panel:
    """The interactive: another query, another group, a longer list."""

    def render(query: int, top_n: int, group: int) -> tuple[Picture, str]:
        return draw_text(query, top_n, group), sentence(query, top_n, group)

    h = _heads()
    return panel(
        "one query's list in the text",
        render,
        # in the first block there is nothing else to list
        idle=lambda query, top_n, group: {"top_n"} if query < BLOCK_SIZE else (),
        query=ipywidgets.IntSlider(QUERY, 0, len(h.text) - 1, description="query"),
        top_n=ipywidgets.IntSlider(TOP_N, 1, 12, description="blocks at most"),
        group=ipywidgets.Dropdown(
            options=range(h.k.shape[2]), value=COPYING, description="KV head"
        ),
    )


# -- what a list moves, beside dense tiles --


def loads(
    N: int, tile_q: int | None = None, *, G: int = 1, block_size: int = 64, top_n: int = 16
) -> float:
    """Bytes that one query of a group moves on average, `D = DV = 128`, bf16: with a list, or in
    dense tiles of `tile_q`."""
    if tile_q is None:
        cost = costs.selected_attention(N, N, D, block_size=block_size, top_n=top_n, HQ=G, H=1)
    else:
        cost = costs.tiled_attention(N, N, D, tile_q=tile_q, tile_k=block_size, HQ=G, H=1)
    return cost.bytes / N


def crossover(tile_q: int, *, G: int = 1, block_size: int = 64, top_n: int = 16) -> int:
    """The first multiple of `block_size` at which the lists move no more bytes than dense tiles of
    `tile_q` positions."""
    # in blocks; below `top_n` of them a list leaves nothing out
    low, high = top_n, 2**20 // block_size
    while high - low > 1:
        middle = (low + high) // 2
        N = middle * block_size
        fewer = loads(N, G=G, block_size=block_size, top_n=top_n) <= loads(
            N, tile_q, G=G, block_size=block_size
        )
        low, high = (low, middle) if fewer else (middle, high)
    return high * block_size


def draw_pairs() -> Picture:
    """The scores that a causal kernel computes for a query on average, by the length of the text:
    all that it may see, and those that its list names."""
    figure, axes = new_figure(7.6, 3.0)
    axis, lengths = axes[0, 0], [2**i for i in range(10, 19)]
    visible, listed = (
        [count(N, N) / N for N in lengths] for count in (costs.visible_pairs, costs.selected_keys)
    )
    axis.loglog(lengths, visible, color=INKS["key"], linewidth=2, label="all keys of the past")
    name = "lists of 16 blocks of 64"
    axis.loglog(lengths, listed, color=INKS["selected"], linewidth=2, label=name)
    for i in (2, 6):
        axis.plot([lengths[i]] * 2, [listed[i], visible[i]], ":", color=PALETTE["text"])
        middle, factor = (listed[i] * visible[i]) ** 0.5, visible[i] / listed[i]
        axis.text(lengths[i] * 1.1, middle, f"{factor:.{int(factor < 10)}f}×", va="center",
                  fontsize=9, color=PALETTE["text"])  # fmt: skip
    axis.set_xticks(lengths[::2], [f"{N:,}" for N in lengths[::2]])
    axis.set_yticks([1_000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
    axis.minorticks_off()
    axis.set(xlabel="tokens of the text", ylabel="scores per query, average")
    axis.legend(fontsize=9, frameon=False)
    told = f"At {lengths[6]:,} tokens, lists leave one visible score in {factor:.0f}"
    return Picture(figure, told)


def draw_traffic() -> Picture:
    """What a query moves on average, by the length of the text."""
    figure, axes = new_figure(7.6, 3.5)
    axis, lengths = axes[0, 0], [2**i for i in range(10, 19)]
    curves = {
        "lists of 16 blocks of 64": ([loads(N, G=2) for N in lengths], "selected", "-"),
        "dense tiles of 64 positions": ([loads(N, 64, G=2) for N in lengths], "key", "-"),
        "dense tiles of 8 positions": ([loads(N, 8, G=16) for N in lengths], "key", "--"),
    }
    for name, (moved, colour, style) in curves.items():
        kib = [each / 1024 for each in moved]
        axis.loglog(lengths, kib, style, color=INKS[colour], linewidth=2, label=name)
    for tile_q, G in ((64, 2), (8, 16)):
        N = crossover(tile_q, G=G)
        axis.plot(N, loads(N, G=G) / 1024, "o", color=PALETTE["query"])
    axis.set_xticks(lengths[::2], [f"{N:,}" for N in lengths[::2]])
    axis.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axis.minorticks_off()
    axis.set(xlabel="tokens of the text", ylabel="KiB moved per query")
    axis.legend(fontsize=9, frameon=False)
    told = f"Beside tiles of 64 positions, lists move less from {crossover(64, G=2):,} tokens on"
    return Picture(figure, told)
