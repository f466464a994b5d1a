"""Chapter 04's pictures: a GPU's memories, the walk over the tiles beside a byte meter, and what a
choice of tile sizes costs.

`meter` and `facts` compute; `draw_memories`, `draw_walk`, `draw_measured`, `draw_heights` and
`draw_tile_sizes` draw; `explore` puts controls on the last. `measured` reads what a GPU took. The
long example is one causal head of 65,536 tokens, `D = DV = 128`, in bf16, on an H200.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import ipywidgets
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from nsa_tutorial.course import costs
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.grouped_query_attention import H200_BYTES_PER_S, H200_FLOPS_PER_S
from nsa_tutorial.exact.dense_attention import causal_mask
from nsa_tutorial.exact.tiled_attention import Tile, tiles

MEASURED = Path(__file__).resolve().parents[3] / "assets" / "performance_h200.json"
GIB, KIB = 2**30, 2**10
# that one program may use, of 228 KiB on a multiprocessor: NVIDIA's Hopper tuning guide
SHARED_BYTES = 227 * KIB
MACHINE = H200_FLOPS_PER_S / H200_BYTES_PER_S  # operations for every byte of main memory
TOKENS, WIDTH = 65_536, 128
TILE_Q = (1, 4, 16, 32, 64, 128, 192, 256)
TILE_K = (16, 32, 64, 128, 256)
_HIDDEN = "#D3E9F7"  # computed, then masked: a pale "key"
_PARTS = {
    "q": "query",
    "k and v": "key",
    "table": "text",
    "o and lse": "faint",
}
_ON_CHIP = {
    "q_tile": PALETTE["query"],
    "k_tile": PALETTE["key"],
    "v_tile": PALETTE["value"],
    "acc_s": "#C0B000",
    "acc_o": PALETTE["faint"],
    "statistics": PALETTE["text"],
}


# in bytes, of one multiprocessor or of all: NVIDIA's Hopper tuning guide, the H200's data sheet
_MEMORIES = {
    "registers": (256 * KIB, "256 KiB each"),
    "shared memory": (228 * KIB, "228 KiB each"),
    "L2 cache": (50_000_000, "50 MB for all"),
    "main memory": (141_000_000_000, "141 GB for all, 4.8 TB/s"),
}


def measured(kernel: str = "dense, cuDNN") -> tuple[float, float]:
    """Milliseconds of 64 heads of the long example by a dense kernel on an H200, and the GiB that
    it takes beyond its inputs."""
    (row,) = [
        row
        for row in json.loads(MEASURED.read_text())["rows"]
        if (row["kernel"], row["direction"], row["tokens"], row["kv_heads"] * row["group"])
        == (kernel, "forward", TOKENS, 64)
    ]
    return row["ms"], row["peak_mib"] / 1024


def draw_measured() -> Picture:
    """Time and memory of 64 heads on an H200: the tables at best, the walk by tiles as measured."""
    ms, gib = measured()
    dense = costs.dense_attention(TOKENS, TOKENS, WIDTH).bytes
    bytes_alone = 64e3 * dense / H200_BYTES_PER_S
    tables = 64 * 2 * TOKENS**2 / GIB
    sheet = Sheet(8.3, 1.9)
    rows = ("with the tables", "by tiles")
    time = sheet.chart(Place(1.35, 0.68, 2.75, 0.9), (0, 600), (1.6, -0.6))
    room = sheet.chart(Place(4.85, 0.68, 2.75, 0.9), (0, 600), (1.6, -0.6))
    for chart, name, pair, words in (
        (time, "time, ms", (bytes_alone, ms), ("{:.0f}, at best", "{:.0f}, measured")),
        (room, "memory beyond the inputs, GiB", (tables, gib), ("{:.0f}", "{:.0f}")),
    ):
        chart.title(name)
        bars = [(0, row - 0.32, size, 0.64) for row, size in enumerate(pair)]
        chart.boxes(bars, ["text", "key"])
        told = [
            (size, row, text.format(size))
            for row, (size, text) in enumerate(zip(pair, words, strict=True))
        ]
        chart.words(told, size=8.5, ha="left", offset=(4, 0))
    time.left((0, 1), rows)
    limit = _MEMORIES["main memory"][0] / GIB
    room.lines([((limit, -0.5), (limit, 1.5))], "query", 1.2, linestyles="--")
    room.words([(limit, 1.0, f"an H200 has {limit:.0f}")], size=8.5, colour="query", ha="left",
               offset=(4, 0))  # fmt: skip
    return Picture(
        sheet.figure,
        f"Tiles take {ms:.0f} ms and {gib:.0f} GiB of memory; tables need at least "
        f"{bytes_alone:.0f} ms and {tables:.0f} GiB",
    )


# -- the memories --


def draw_memories() -> Picture:
    """The four memories of an H200, and what of the long example fits into each."""
    sheet = Sheet(8.3, 3.0)
    chart = sheet.chart(Place(1.35, 0.85, 6.2, 1.6), (13, 38.5), (3.6, -0.6))
    ends = [math.log2(size) for size, _ in _MEMORIES.values()]
    chart.boxes([(13, row - 0.3, end - 13, 0.6) for row, end in enumerate(ends)], "#D3D8DC")
    # after the bar, the longest within its bar: no dashed line runs through the words
    told = [
        (min(end, 25.7), row, text)
        for row, (end, (_, text)) in enumerate(zip(ends, _MEMORIES.values(), strict=True))
    ]
    chart.words(told, size=8.5, ha="left", offset=(5, 0))
    one = TOKENS * WIDTH * 2
    things = (
        ("a tile of\n128 queries", 128 * WIDTH * 2, "query"),
        ("all keys\nand values", 2 * one, "key"),
        ("table of\nscores", 2 * TOKENS**2, "text"),
    )
    for name, size, colour in things:
        x = math.log2(size)
        chart.lines([((x, -0.6), (x, 3.6))], colour, 1.5, linestyles="--")
        chart.words([(x, -0.6, name)], size=8.5, colour=colour, va="bottom", offset=(0, 3))
    chart.left(range(len(_MEMORIES)), list(_MEMORIES))
    ticks = {15: "32 KiB", 20: "1 MiB", 25: "32 MiB", 30: "1 GiB", 33: "8 GiB", 37: "128 GiB"}
    chart.bottom(list(ticks), list(ticks.values()), "bytes")
    return Picture(
        sheet.figure, "A tile of queries fits on the chip, the table of scores only in main memory"
    )


# -- the walk and its byte meter --


@dataclass(frozen=True)
class Meter:
    """Bytes moved so far, by what they carried.

    Attributes:
        tile: the stop of the walk at which the meter is read.
        q, kv, out: bytes of queries, of keys and values, and of `o` (in bf16) and `lse` (in fp32).
    """

    tile: Tile
    q: int
    kv: int
    out: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.q + self.kv + self.out


def meter(N: int, M: int, D: int, tile_q: int, tile_k: int, causal: bool = True) -> list[Meter]:
    """The meter after every tile that is not skipped, one head in bf16; after the last one, all
    that the walk moves."""
    visited = [t for t in tiles(N, M, tile_q, tile_k, causal) if t.kind != "skipped"]
    readings, q, kv, out = [], 0, 0, 0
    for i, tile in enumerate(visited):
        rows = tile.query_end - tile.query_start
        if tile.key_start == 0:
            q += rows * D * 2
        kv += (tile.key_end - tile.key_start) * 2 * D * 2
        # the last tile of its queries: store
        if i + 1 == len(visited) or visited[i + 1].key_start == 0:
            out += rows * D * 2 + rows * 4
        readings.append(Meter(tile, q, kv, out))
    return readings


def draw_walk(
    N: int = 64,
    M: int = 64,
    tile_q: int = 16,
    tile_k: int = 16,
    *,
    D: int = 16,
    causal: bool = True,
    step: int | None = None,
) -> Picture:
    """The tiles in the order of the walk, and the bytes moved after `step` of them (all of them by
    default)."""
    readings = meter(N, M, D, tile_q, tile_k, causal)
    step = len(readings) if step is None else step
    figure, axes = new_figure(8.0, 4.0, columns=2, width_ratios=(1.25, 1))
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.08, right=0.985, top=0.9, bottom=0.22, wspace=0.25)
    _draw_tiles(axes[0, 0], readings, N, M, tile_q, tile_k, causal, step)
    _draw_meter(axes[0, 1], readings[step - 1], costs.dense_attention(N, M, D), N * M, N, M, D)
    moved, total = readings[step - 1].bytes, readings[-1].bytes
    table = costs.dense_attention(N, M, D).bytes
    kinds = [tile.kind for tile in tiles(N, M, tile_q, tile_k, causal)]
    if step == len(readings):
        told = (
            f"{step} tiles computed ({kinds.count('diagonal')} need a mask), "
            f"{kinds.count('skipped')} skipped: {moved / KIB:.1f} KiB moved; with the table it "
            f"would be {table / KIB:.1f}"
        )
    else:
        told = (
            f"{step} of {len(readings)} tiles computed: {moved / KIB:.1f} of {total / KIB:.1f} KiB "
            f"moved so far; with the table it would be {table / KIB:.1f}"
        )
    return Picture(figure, told)


def _draw_tiles(
    axis: Axes,
    readings: list[Meter],
    N: int,
    M: int,
    tile_q: int,
    tile_k: int,
    causal: bool,
    step: int,
) -> None:
    visible = causal_mask(N, M).numpy() if causal else np.ones((N, M), dtype=bool)
    picture = np.ones((N, M, 3))
    for number, reading in enumerate(readings[:step], 1):
        t = reading.tile
        part = (slice(t.query_start, t.query_end), slice(t.key_start, t.key_end))
        picture[part] = np.where(visible[part][..., None], _rgb(PALETTE["key"]), _rgb(_HIDDEN))
        axis.text(*_centre(t), str(number), ha="center", va="center", fontsize=9,
                  color=PALETTE["text"], bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white",
                  "edgecolor": "none", "alpha": 0.85})  # fmt: skip
    for t in tiles(N, M, tile_q, tile_k, causal):
        if t.kind == "skipped":
            picture[t.query_start : t.query_end, t.key_start : t.key_end] = _rgb(PALETTE["masked"])
        if causal:  # the kind below the number, or where a number would be
            below = 0 if t.kind == "skipped" else 0.34 * (t.query_end - t.query_start)
            x, y = _centre(t)
            axis.text(x, y + below, t.kind, ha="center", va="center", fontsize=7.5,
                      color=PALETTE["text"])  # fmt: skip
    axis.imshow(picture, aspect="equal", interpolation="nearest")
    for t in tiles(N, M, tile_q, tile_k, causal):
        axis.add_patch(_outline(t, "white" if t.kind == "skipped" else PALETTE["faint"], 0.8))
    axis.add_patch(_outline(readings[step - 1].tile, PALETTE["query"], 2.5))
    # a tick where a tile begins
    axis.set_xticks(np.arange(0, M + 1, tile_k) - 0.5, range(0, M + 1, tile_k))
    axis.set_yticks(np.arange(0, N + 1, tile_q) - 0.5, range(0, N + 1, tile_q))
    axis.set_xlabel(f"key, {tile_k} a tile", fontsize=9)
    axis.set_ylabel(f"query, {tile_q} a tile", fontsize=9)
    if causal:
        handles = [
            Patch(color=PALETTE["key"], label="visible"),
            Patch(color=_HIDDEN, label="computed, then masked"),
        ]
        axis.figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.08, 0.0), ncols=2,
                           fontsize=9, frameon=False, handlelength=1.0,
                           columnspacing=1.0)  # fmt: skip


def _centre(t: Tile) -> tuple[float, float]:
    return (t.key_start + t.key_end - 1) / 2, (t.query_start + t.query_end - 1) / 2


def _outline(t: Tile, colour: str, width: float) -> Rectangle:
    size = (t.key_end - t.key_start, t.query_end - t.query_start)
    return Rectangle(
        (t.key_start - 0.5, t.query_start - 0.5),
        *size,
        fill=False,
        edgecolor=colour,
        linewidth=width,
        clip_on=False,
    )


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def _draw_meter(
    axis: Axes, reading: Meter, dense: costs.Cost, pairs: int, N: int, M: int, D: int
) -> None:
    bars = {
        "with the table": {
            "q": N * D * 2,
            "k and v": 2 * M * D * 2,
            "table": 4 * pairs * 2,
            "o and lse": N * D * 2,
        },
        "by tiles": {"q": reading.q, "k and v": reading.kv, "table": 0, "o and lse": reading.out},
    }
    for place, parts in enumerate(bars.values()):
        bottom = 0.0
        for name, size in parts.items():
            colour = PALETTE[_PARTS[name]]
            axis.bar(place, size / KIB, 0.6, bottom, color=colour)
            if size > 0.04 * dense.bytes:  # room for its name
                axis.text(place, bottom + size / KIB / 2, name, ha="center", va="center",
                          fontsize=8, color=readable_on(colour))  # fmt: skip
            bottom += size / KIB
        axis.text(
            place,
            bottom + 0.01 * dense.bytes / KIB,
            f"{bottom:.1f} KiB",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axis.set_xticks(range(len(bars)), list(bars))
    axis.set_ylim(0, 1.12 * dense.bytes / KIB)
    axis.set_ylabel("moved, KiB", fontsize=9)


# -- tile sizes --


@dataclass(frozen=True)
class Facts:
    """What a choice of tile sizes comes to on the long example.

    Attributes:
        gib: loaded onto the chip and stored from it; main memory sees this much if nothing hits L2.
        intensity: operations per byte moved.
        kib: what one program holds on the chip.
        fits: whether it may.
        memory_ms: what an H200's main memory needs for all of it, so if nothing hits L2 (data
            sheet).
        arithmetic_ms: what the operations take at the data sheet's rate.
    """

    gib: float
    intensity: float
    kib: float
    fits: bool
    memory_ms: float
    arithmetic_ms: float


@functools.cache
def facts(tile_q: int, tile_k: int) -> Facts:
    """Bytes, intensity, room and data-sheet times of one causal head with 65,536 tokens,
    `D = DV = 128`, bf16."""
    cost = costs.tiled_attention(TOKENS, TOKENS, WIDTH, tile_q=tile_q, tile_k=tile_k)
    held = sum(costs.tile_bytes_on_chip(tile_q, tile_k, WIDTH).values())
    return Facts(
        gib=cost.bytes / GIB,
        intensity=cost.intensity,
        kib=held / KIB,
        fits=held <= SHARED_BYTES,
        memory_ms=1e3 * cost.bytes / H200_BYTES_PER_S,
        arithmetic_ms=1e3 * cost.flops / H200_FLOPS_PER_S,
    )


def sentence(tile_q: int, tile_k: int) -> str:
    """What there is to say about a choice of tile sizes."""
    f = facts(tile_q, tile_k)
    told = (
        f"Tiles of {tile_q} queries and {tile_k} keys move {f.gib:.1f} GiB, "
        f"{f.intensity:.1f} operations per byte. "
    )
    told += f"If nothing hits L2, main memory needs {f.memory_ms:.1f} ms, "
    if f.intensity < MACHINE:
        told += f"the arithmetic only {f.arithmetic_ms:.1f}. "
    else:
        told += f"less than the arithmetic with {f.arithmetic_ms:.1f}. "
    fit = "which fits" if f.fits else "which does not fit"
    return f"{told}A program holds {f.kib:.1f} KiB on the chip, {fit} into {SHARED_BYTES // KIB}."


@functools.cache
def _levels(tile_k: int) -> list[tuple[float, str]]:
    """Log2 of the GiB that mean something, and what."""
    table = costs.dense_attention(TOKENS, TOKENS, WIDTH).bytes
    once = costs.tiled_attention(TOKENS, TOKENS, WIDTH, tile_q=TOKENS, tile_k=TOKENS).bytes
    even = costs.tiled_attention(TOKENS, TOKENS, WIDTH, tile_q=128, tile_k=tile_k).flops / MACHINE
    return [
        (math.log2(table / GIB), f"with the table: {table / GIB:.0f} GiB"),
        (math.log2(even / GIB), f"{MACHINE:.0f} operations per byte: go below this line"),
        (math.log2(once / GIB), "each tensor once: the floor"),
    ]


def draw_heights(tile_k: int = 16) -> Picture:
    """Bytes moved and operations per byte of the long example, for six heights of a query tile."""
    heights = (1, 16, 32, 64, 128, 256)
    table = costs.dense_attention(TOKENS, TOKENS, WIDTH)
    sheet = Sheet(8.3, 2.7)
    charts = (
        ("moved, GiB", [facts(size, tile_k).gib for size in heights], table.bytes / GIB,
         f"with the table: {table.bytes / GIB:.0f}", (0.4, 11.6), (4, 16, 64, 256, 1024)),
        ("operations per byte", [facts(size, tile_k).intensity for size in heights], MACHINE,
         f"an H200 can do {MACHINE:.0f}", (-1.7, 9.5), (1, 4, 16, 64, 256)),
    )  # fmt: skip
    for place, (name, sizes, level, told, limits, marks) in enumerate(charts):
        chart = sheet.chart(Place(0.75 + 4.15 * place, 0.58, 3.25, 1.55), (-0.6, 5.6), limits)
        chart.title(name)
        bars = [(i - 0.36, limits[0], 0.72, math.log2(x) - limits[0]) for i, x in enumerate(sizes)]
        chart.boxes(bars, "key")
        told_sizes = [(i, limits[0], f"{x:,.0f}") for i, x in enumerate(sizes)]
        chart.words(told_sizes, size=8.5, va="bottom", offset=(0, 2))
        y = math.log2(level)
        chart.lines([((-0.6, y), (5.6, y))], "text", 1.2, linestyles="--")
        end, where = (5.6, "right") if place == 0 else (-0.5, "left")
        chart.words([(end, y, told)], size=8.5, ha=where, va="bottom", offset=(0, 2))
        chart.bottom(range(6), heights, "queries in a tile")
        chart.left([math.log2(x) for x in marks], [f"{x:,}" for x in marks])
    return Picture(
        sheet.figure, "A tile twice as tall moves half the bytes, and does twice the work for each"
    )


def draw_tile_sizes(tile_q: int = 128, tile_k: int = 128) -> Picture:
    """Left what each height of a query tile moves, the chosen one ringed; right what the chosen
    tiles take up on the chip."""
    f = facts(tile_q, tile_k)
    sheet = Sheet(8.3, 3.5)
    moved = sheet.chart(Place(0.75, 0.58, 3.6, 2.4), (-0.3, 8.3), (-4.8, 11.3))
    places = [(math.log2(size), math.log2(facts(size, tile_k).gib)) for size in TILE_Q]
    moved.title("bytes moved, for each tile height")
    levels = _levels(tile_k)
    moved.lines([((-0.3, y), (8.3, y)) for y, _ in levels], linestyles="--")
    moved.words([(-0.1, y, told) for y, told in levels], size=8, ha="left", va="bottom",
                offset=(0, 2))  # fmt: skip
    moved.lines([places], "key", 1.5)
    moved.dots(places, "key", 4)
    chosen = [(math.log2(tile_q), math.log2(f.gib))]
    moved.dots(chosen, "query", 12, fillstyle="none", markeredgewidth=2)
    moved.bottom([0, 2, 4, 6, 8], ["1", "4", "16", "64", "256"], "queries in a tile")
    moved.left([-4, 0, 4, 8], ["1/16", "1", "16", "256"], "moved, GiB", away=0.47)
    parts = costs.tile_bytes_on_chip(tile_q, tile_k, WIDTH)
    end = 1.22 * max(SHARED_BYTES / KIB, sum(parts.values()) / KIB)
    chip = sheet.chart(Place(5.25, 0.58, 2.95, 2.4), (0, end), (len(parts) + 0.6, -0.6))
    chip.title("on the chip: the parts add up")
    _draw_on_chip(chip, parts)
    fit = "fit on the chip" if f.fits else "do not fit on the chip"
    told = (
        f"Tiles of {tile_q} × {tile_k} move {f.gib:.1f} GiB, {f.intensity:.1f} operations per "
        f"byte; their {f.kib:.0f} KiB {fit}"
    )
    return Picture(sheet.figure, told)


def _draw_on_chip(chart: Chart, parts: dict[str, int]) -> None:
    sizes = {name: size / KIB for name, size in parts.items()}
    starts = [0.0, *itertools.accumulate(sizes.values())]
    total = starts.pop()
    limit = SHARED_BYTES / KIB
    spans = list(zip(starts, sizes.values(), strict=True))
    rows = [*enumerate(spans), *((len(sizes), span) for span in spans)]
    bars = [(start, row - 0.35, size, 0.7) for row, (start, size) in rows]
    chart.boxes(bars, [_ON_CHIP[name] for name in sizes] * 2)
    told = [(start + size, row, f"{size:.3g}") for row, (start, size) in enumerate(spans)]
    told.append((total, len(sizes), f"{total:.3g}"))
    chart.words(told, size=8, ha="left", offset=(4, 0))
    # the dashed line keeps out of the numbers
    near = 0.13 * chart.x[1]
    free = [row for x, row, _ in told if not limit - near < x < limit]
    dashes = [((limit, row - 0.5), (limit, row + 0.5)) for row in free]
    chart.lines(dashes, "text", 1.2, linestyles="--")
    chart.left(range(len(sizes) + 1), [*sizes, "all of it"])
    name = f"KiB on the chip (dashed: {limit:.0f}, all there is)"
    step = 50 if total < 400 else 100
    chart.bottom(range(0, int(chart.x[1]), step), name=name)


def explore() -> Panel:
    """The interactive: tile sizes, the bytes they move, and the room they take on the chip."""

    def render(tile_q: int, tile_k: int) -> tuple[Picture, str]:
        return draw_tile_sizes(tile_q, tile_k), sentence(tile_q, tile_k)

    for sizes in itertools.product(TILE_Q, TILE_K):
        facts(*sizes)  # counted now, or the first move to a size would wait for it
    return panel(
        "tile sizes",
        render,
        tile_q=ipywidgets.SelectionSlider(
            options=TILE_Q, value=16, description="queries in a tile"
        ),
        tile_k=ipywidgets.SelectionSlider(options=TILE_K, value=128, description="keys in a tile"),
    )
