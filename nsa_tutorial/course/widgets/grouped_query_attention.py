"""Pictures of chapter 02: who reads whose keys, in which order copies come, products of one row and
of many, how large the cache is; the time of a function on this CPU; and the cache explorer.

The example model has 64 query heads of width 128 and 60 layers; the machine is one NVIDIA H200.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import ipywidgets
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from nsa_tutorial.course import costs
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on, shades
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.exact.grouped_query_attention import group_size, kv_head

HQ, D, LAYERS = 64, 128, 60
KV_HEADS = (64, 16, 8, 4, 1)
CONTEXTS = tuple(2**power for power in range(12, 21))  # 4096 … 1,048,576 tokens
GIB = 2**30
# NVIDIA H200 (SXM) data sheet: memory, memory bandwidth, and bf16 tensor-core rate without
# sparsity.
H200_BYTES, H200_BYTES_PER_S, H200_FLOPS_PER_S = 141e9, 4.8e12, 989e12


def wires(HQ: int, H: int) -> list[tuple[int, int]]:
    """Pairs (query head, the KV head it reads)."""
    G = group_size(HQ, H)
    return [(hq, kv_head(hq, G)) for hq in range(HQ)]


def head_order(H: int, G: int) -> dict[str, list[int]]:
    """Which KV head each of the `H·G` copies came from, by the way of copying."""
    heads = torch.arange(H)
    return {
        "repeat_interleave": heads.repeat_interleave(G).tolist(),
        "repeat": heads.repeat(G).tolist(),
    }


@dataclass(frozen=True)
class CacheFacts:
    """The KV cache of one sequence, and what reading it costs per new token.

    Attributes:
        G: query heads per KV head.
        gib: the size of the cache in GiB; `gib_all_heads` what it would be with one KV head per
            query head.
        intensity: operations per byte moved when one token is decoded.
        read_ms: the least time to read the cache once, in milliseconds, on the example machine.
    """

    G: int
    gib: float
    gib_all_heads: float
    intensity: float
    read_ms: float


def cache_facts(H: int, tokens: int) -> CacheFacts:
    """The facts of the example model with `H` KV heads at `tokens` positions."""
    size = costs.kv_cache_bytes(tokens, layers=LAYERS, H=H, D=D)
    return CacheFacts(
        G=group_size(HQ, H),
        gib=size / GIB,
        gib_all_heads=costs.kv_cache_bytes(tokens, layers=LAYERS, H=HQ, D=D) / GIB,
        intensity=costs.decode_attention(tokens, D, HQ=HQ, H=H).intensity,
        read_ms=1e3 * size / H200_BYTES_PER_S,
    )


def fastest_ms(function: Callable[[], object], calls: int = 5) -> float:
    """Milliseconds of the fastest of some calls, on one core of this CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 1e3 * min(times)


def _gib(value: float) -> str:
    return (
        f"{value:.0f} GiB"
        if value >= 100
        else f"{value:.2f} GiB"
        if value < 1
        else f"{value:.1f} GiB"
    )


def _heads(H: int) -> str:
    return "1 KV head" if H == 1 else f"{H} KV heads"


def _draw_wires(axis: Axes, HQ: int, H: int, hq: int | None = None) -> None:
    """Query heads above, KV heads below, and who reads whom; the wire of one query head is bold."""
    G = group_size(HQ, H)
    centre = [h * G + (G - 1) / 2 for h in range(H)]
    segments = [[(head, 1.0), (centre[h], 0.0)] for head, h in wires(HQ, H)]
    is_bold = [head == hq for head in range(HQ)]
    axis.add_collection(LineCollection(
        segments, colors=[PALETTE["text" if bold else "line"] for bold in is_bold],
        linewidths=[3.0 if bold else 1.4 for bold in is_bold], zorder=1,
    ))  # fmt: skip
    axis.scatter(range(HQ), [1.0] * HQ, s=260, color=PALETTE["query"], zorder=2)
    axis.scatter(centre, [0.0] * H, s=260, color=PALETTE["key"], marker="s", zorder=2)
    style = {"ha": "center", "va": "center", "fontsize": 9.5}
    for head in range(HQ):
        axis.text(head, 1.0, str(head), color=readable_on("query"), **style)
    for h in range(H):
        axis.text(centre[h], 0.0, str(h), color=readable_on("key"), **style)
    axis.set_xlim(-0.04 * HQ - 0.4, 1.04 * HQ - 0.6)
    axis.set_ylim(-0.3, 1.3)
    axis.set_xticks([])
    axis.set_yticks([0, 1], ["KV\nheads", "query\nheads"])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def draw_wiring(HQ: int = 8, kv_heads: tuple[int, ...] = (8, 2, 1)) -> Picture:
    """The wiring of `HQ` query heads to each number of KV heads, side by side."""
    figure, axes = new_figure(10.0, 2.5, columns=len(kv_heads))
    names = {HQ: "multi-head", 1: "multi-query"}
    for axis, H in zip(axes[0], kv_heads, strict=True):
        _draw_wires(axis, HQ, H)
        axis.set_title(f"{names.get(H, 'grouped-query')}: {_heads(H)}", fontsize=11)
        if axis is not axes[0, 0]:
            axis.set_yticks([])
    counts = ", ".join(str(H) for H in kv_heads)
    return Picture(
        figure,
        f"Only the blue row is cached: {counts} KV heads for the same {HQ} query heads",
    )


def draw_groups(HQ: int = 8, H: int = 2, hq: int = 5) -> Picture:
    """The groups of one wiring, and the KV head that one query head reads."""
    G = group_size(HQ, H)
    figure, axes = new_figure(6.4, 2.6)
    _draw_wires(axes[0, 0], HQ, H, hq)
    axes[0, 0].set_title(f"HQ = {HQ}, H = {H}, G = {G}", fontsize=11)
    return Picture(figure, f"Query head {hq} reads KV head ⌊{hq} / {G}⌋ = {kv_head(hq, G)}")


def draw_rows(G: int = 4) -> Picture:
    """A group's scores as `G` products of one row, each with the same keys, and as one product of
    `G` rows."""
    figure, axes = new_figure(9.6, 2.9, columns=2)
    tall, thick, pitch = 1.0, 0.22, 1.2
    for axis, products in zip(axes[0], (G, 1), strict=True):
        rows = G // products
        axis.set(xlim=(-0.1, 9.6), ylim=(pitch * G + 0.5, -0.1))
        axis.axis("off")
        for number in range(products):
            middle = pitch * (number + (G - products) / 2) + tall / 2
            for row in range(rows):
                y = middle + (row - (rows - 1) / 2) * (thick + 0.06) - thick / 2
                _bar(axis, 0.0, y, 2.4, thick, "query")
                _bar(axis, 6.9, y, 2.6, thick, "line")
            _bar(axis, 3.3, middle - tall / 2, 2.6, tall, "key")
            for x, sign in ((2.85, "·"), (6.4, "=")):
                axis.text(x, middle, sign, ha="center", va="center", fontsize=13,
                          color=PALETTE["text"])  # fmt: skip
            axis.text(4.6, middle, "keys", ha="center", va="center", fontsize=9.5,
                      color=readable_on("key"))  # fmt: skip
        for x, name in ((1.2, "queries"), (8.2, "scores")):
            axis.text(x, pitch * G + 0.35, name, ha="center", fontsize=9.5, color=PALETTE["text"])
        plural = "s" if products > 1 else ""
        of = "one row" if rows == 1 else f"{rows} rows"
        axis.set_title(f"{products} product{plural} of {of}", fontsize=11)
    return Picture(
        figure,
        f"{G} products of one row load the keys {G} times, one product of {G} rows loads them once",
    )


def _bar(axis: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    axis.add_patch(Rectangle((x, y), width, height, facecolor=PALETTE[colour]))


def draw_least_times(reading: dict[int, float], computing: float) -> Picture:
    """Per number of KV heads, the least ms to read the cache, beside those of the arithmetic."""
    sheet = Sheet(8.3, 2.1)
    longest = max(reading.values())
    chart = sheet.chart(Place(1.4, 0.5, 5.9, 1.35), (0, longest), (len(reading) - 0.5, -0.5))
    chart.boxes([(0, row - 0.3, ms, 0.6) for row, ms in enumerate(reading.values())], "key")
    told = [(ms, row, f"{ms:.1f} ms") for row, ms in enumerate(reading.values())]
    chart.words(told, size=9, ha="left", offset=(6, 0))
    chart.lines([((computing, -0.5), (computing, len(reading) - 0.5))], "query", 1.5)
    line = f"orange line: computing takes {computing:.2f} ms in each row"
    chart.words([(0.3 * longest, 2.5, line)], size=9, colour="query", ha="left")
    chart.left(range(len(reading)), [f"H = {H}, G = {group_size(HQ, H)}" for H in reading])
    ratio = min(reading.values()) / computing
    finding = f"Even with {_heads(min(reading))}, reading the cache takes {ratio:.1f} times as long"
    return Picture(sheet.figure, f"{finding} as computing")


def draw_times(times: dict[str, float]) -> Picture:
    """A bar for each way to compute one decoding step, by the milliseconds it took here."""
    figure, axes = new_figure(8.2, 0.55 * len(times) + 0.8)
    axis, longest = axes[0, 0], max(times.values())
    for row, ms in enumerate(times.values()):
        axis.barh(row, ms, color=PALETTE["key"], height=0.62)
        axis.text(ms + 0.01 * longest, row, f"{ms:.1f} ms", va="center", fontsize=10,
                  color=PALETTE["text"])  # fmt: skip
    axis.set_yticks(range(len(times)), list(times), fontsize=10)
    axis.set(xlim=(0, 1.15 * longest), ylim=(len(times) - 0.5, -0.5), xticks=[])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    own, fewer, rows = times.values()
    return Picture(
        figure,
        f"Fewer bytes from memory: {own / fewer:.1f} times as fast. Rows that share a load: "
        f"another {fewer / rows:.1f} times",
    )


def draw_head_order(H: int = 2, G: int = 4) -> Picture:
    """Two ways to copy `H` heads `G` times, each square numbered by the KV head it came from; wrong
    squares are outlined."""
    orders = head_order(H, G)
    right, other = orders["repeat_interleave"], orders["repeat"]
    misplaced = sum(a != b for a, b in zip(right, other, strict=True))
    figure, axes = new_figure(7.0, 2.0)
    axis = axes[0, 0]
    for row, heads in enumerate((right, other)):
        for hq, h in enumerate(heads):
            wrong = h != right[hq]
            axis.add_patch(
                _square(hq, row, shades("key")(0.35 + 0.65 * h / max(H - 1, 1)), outlined=wrong)
            )
            axis.text(
                hq,
                row,
                f"{h} ✗" if wrong else str(h),
                ha="center",
                va="center",
                fontsize=9,
                color=PALETTE["text"],
            )
    axis.set_xlim(-0.55, H * G - 0.45)
    axis.set_ylim(1.5, -0.5)
    axis.set_xticks(range(H * G))
    axis.set_yticks([0, 1], list(orders))
    axis.set_xlabel(
        "query head hq (in the square: the KV head it is given; outlined: the wrong one)"
    )
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return Picture(
        figure,
        f"H = {H}, G = {G}: `repeat` hands {misplaced} of {H * G} query heads the wrong keys",
    )


def _square(column: int, row: int, colour: tuple[float, ...], *, outlined: bool) -> Rectangle:
    return Rectangle(
        (column - 0.44, row - 0.4),
        0.88,
        0.8,
        facecolor=colour,
        edgecolor=PALETTE["text"],
        linewidth=2 if outlined else 0,
    )


def draw_cache(H: int = 8, tokens: int = 65_536) -> Picture:
    """Left: the groups of the example model. Right: cache size against context length, one line per
    number of KV heads."""
    facts = cache_facts(H, tokens)
    sheet = Sheet(8.3, 3.3)
    _draw_groups(sheet, Place(0.62, 0.58, 2.55, 2.2), H)
    low, high = math.log2(CONTEXTS[0]), math.log2(CONTEXTS[-1])
    sizes = sheet.chart(Place(4.05, 0.33, 3.6, 2.45), (low - 0.1, high + 0.1), (-3.6, 11.4))
    _draw_sizes(sizes, H)
    sizes.dots([(math.log2(tokens), math.log2(facts.gib))], "text", 8)
    finding = f"{_heads(H)} for {HQ} query heads: {tokens:,} tokens take {_gib(facts.gib)}"
    return Picture(
        sheet.figure, finding if H == HQ else f"{finding}, not {_gib(facts.gib_all_heads)}"
    )


def _draw_groups(sheet: Sheet, place: Place, H: int) -> None:
    """Query heads in a row, a bracket below each group, and the KV head that it reads."""
    G = group_size(HQ, H)
    gap = 0 if G == 1 else 1  # between groups
    places = [hq + gap * (hq // G) for hq in range(HQ)]
    chart = sheet.chart(place, (-0.6, places[-1] + 0.6), (-0.1, 1.2))
    chart.title(f"{HQ} query heads, H = {H}, G = {G}")
    chart.boxes([(x - 0.32, 0.92, 0.64, 0.16) for x in places], "query")
    ends = [(first - 0.3, first + G - 0.7) for first in places[::G]]
    centres = [(first + last) / 2 for first, last in ends]
    if G > 1:
        brackets = [((x, 0.84), (x, 0.76), (y, 0.76), (y, 0.84)) for x, y in ends]
        chart.lines(brackets, width=1.2)
    chart.lines([((x, 0.84 if G == 1 else 0.76), (x, 0.16)) for x in centres], width=1.2)
    half = min(0.32 + 0.09 * (G - 1), 1.6)
    chart.boxes([(x - half, 0.0, 2 * half, 0.16) for x in centres], "key")
    told = ((0.95, "heads"), (1.05, "query"), (0.03, "heads"), (0.13, "KV"))
    left = chart.x[0]
    chart.words([(left, y, text) for y, text in told], size=8.5, ha="right", offset=(-4, 0))


@functools.cache
def _cache_line(H: int) -> list[tuple[float, float]]:
    """Log2 of the context's length and of the GiB of its cache."""
    return [(math.log2(n), math.log2(cache_facts(H, n).gib)) for n in CONTEXTS]


def _draw_sizes(chart: Chart, H: int) -> None:
    chosen = ["key" if heads == H else "masked" for heads in KV_HEADS]
    widths = [3 if heads == H else 1 for heads in KV_HEADS]
    chart.lines([_cache_line(heads) for heads in KV_HEADS], chosen, widths)
    ends = [(*_cache_line(heads)[-1], f"H = {heads}") for heads in KV_HEADS]
    inks = ["text" if heads == H else "faint" for heads in KV_HEADS]
    chart.words(ends, size=8, colour=inks, ha="left", offset=(7, 0))
    limit, (low, high) = math.log2(H200_BYTES / GIB), chart.x
    chart.lines([((low, limit), (high, limit))], "text", linestyles="--")
    memory = f"memory of one H200: {H200_BYTES / GIB:.0f} GiB"
    chart.words([(low, limit, memory)], size=8, ha="left", va="bottom", offset=(5, 3))
    shown = CONTEXTS[::2]
    chart.bottom([math.log2(n) for n in shown], [f"{n:,}" for n in shown],
                 "context length, tokens (logarithmic)")  # fmt: skip
    chart.left(range(-3, 12, 2), ["1/8", "1/2", "2", "8", "32", "128", "512", "2048"],
               "KV cache, GiB (logarithmic)", away=0.5)  # fmt: skip


def cache_sentence(H: int, tokens: int) -> str:
    """What the explorer says about a setting."""
    facts = cache_facts(H, tokens)
    readers = "1 query head" if facts.G == 1 else f"{facts.G} query heads"
    fits = "The cache does not fit into one H200."
    if facts.gib * GIB <= H200_BYTES:
        fits = (
            "The cache alone fits into one H200, and reading all of it takes "
            f"{facts.read_ms:.1f} ms at least."
        )
    return (
        f"{_heads(H)}, each read by {readers}: at {tokens:,} tokens the cache takes "
        f"{_gib(facts.gib)} ({_heads(HQ)}: {_gib(facts.gib_all_heads)}). Attention for a new "
        f"token does {facts.intensity:.1f} operations per byte. {fits}"
    )


def cache_explorer() -> Panel:
    """The interactive: KV heads and context length → wiring, size of the cache, time to read it."""
    return panel(
        "KV heads and context length → size of the cache",
        lambda H, tokens: (draw_cache(H, tokens), cache_sentence(H, tokens)),
        H=ipywidgets.SelectionSlider(options=KV_HEADS, value=8, description="KV heads H"),
        tokens=ipywidgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in CONTEXTS], value=65_536, description="context length"
        ),
    )
