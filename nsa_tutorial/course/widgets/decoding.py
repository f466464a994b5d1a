"""Pictures of chapter 15: what a token reads of the past, where its keys lie, how one query fills a
GPU, and a text that is typed token by token.

`step` is the cost of a token on paper, `recorded` what `python -m nsa_tutorial.bench decode`
measured. `explore` is the interactive, `draw_step` its picture. The sizes are those of the paper's
model: 64 query heads over 4 KV heads of width 128, bf16, summaries of 32 tokens every 16, lists of
16 blocks of 64, a window of 512.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle, Wedge
from torch import Tensor

from nsa_tutorial.course import rhyme
from nsa_tutorial.course.decoding_costs import bytes_of_step
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.small_cache import SmallCache, keys_read, listed_blocks, new_cache
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.tilelang_forward import ASSETS
from nsa_tutorial.kernels.tables.parts import parts_of_rows
from nsa_tutorial.layer import NativeSparseAttention
from nsa_tutorial.layer_parts import rotate

MIB = 2**20
TOKENS = tuple(2**power for power in range(12, 21))  # 4,096 … 1,048,576
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
BRANCHES = {"summaries": "compressed", "lists": "selected", "window": "window"}
COLOURS = {"dense": "key", **BRANCHES}
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}  # of the memory, data sheets
MULTIPROCESSORS = 132
HEADS, GROUP, WIDTH = 4, 16, 128
STEP_TOKENS = 65_536  # of the chapter's example


# -- what a token reads --


def _size(size: float) -> str:
    """Bytes in MiB or GiB."""
    if size >= 2**30:
        return f"{size / 2**30:,.1f} GiB".replace(".0 GiB", " GiB")
    number = size / MIB
    return f"{number:.2g} MiB" if number < 10 else f"{number:,.0f} MiB"


def draw_bytes(lengths: tuple[int, ...] = (4096, 16_384, 65_536, 262_144)) -> Picture:
    """Bars for dense attention and for each branch, by the length of the text."""
    figure, axes = new_figure(8.2, 3.3)
    axis, names = axes[0, 0], list(COLOURS)
    for place, tokens in enumerate(lengths):
        read = bytes_of_step(tokens)
        for i, name in enumerate(names):
            mib, x = read[name] / MIB, place + 0.2 * (i - 1.5)
            axis.bar(x, mib, 0.18, color=PALETTE[COLOURS[name]], label=name if not place else None)
            axis.text(x, mib * 1.08, f"{mib:.2g}" if mib < 10 else f"{mib:.0f}", ha="center",
                      va="bottom", fontsize=8.5, color=PALETTE["text"])  # fmt: skip
    axis.set_yscale("log", base=2)
    axis.set_ylim(0.3, 1400)
    axis.set_yticks([0.5, 2, 8, 32, 128, 512], ["0.5", "2", "8", "32", "128", "512"])
    axis.minorticks_off()
    axis.set_ylabel("MiB read for one token")
    axis.set_xticks(range(len(lengths)), [f"{tokens:,}" for tokens in lengths])
    axis.set_xlabel("tokens of the text, the new one included")
    axis.legend(frameon=False, ncols=4, fontsize=9, loc="upper left")
    read = bytes_of_step(STEP_TOKENS)
    return Picture(
        figure,
        f"Token {STEP_TOKENS:,}: dense attention reads {_size(read['dense'])}, NSA "
        f"{_size(read['nsa'])}; only summaries grow",
    )


# -- where keys lie --


def ring_of(tokens: int, ring: int) -> list[int | None]:
    """The token that each place of a ring holds; None for one that is empty."""
    last = tokens - 1
    held = [last - (last - place) % ring for place in range(ring)]
    return [token if token >= 0 else None for token in held]


def draw_buffers(
    tokens: int = 21, *, block_size: int = 8, window_size: int = 6, length: int = 8,
    stride: int = 4, back: int = 3,
) -> Picture:  # fmt: skip
    """The four buffers of a small text: tokens, summaries, and two rings."""
    figure, axes = new_figure(8.6, 3.2, columns=3, width_ratios=(2.1, 1, 1))
    room, seen = 24, max(0, (tokens - length) // stride + 1)
    _draw_rows(axes[0, 0], tokens, room, block_size, length, stride, seen)
    rings = (
        ("window", range(max(0, tokens - window_size), tokens), window_size),
        ("pending", range(seen * stride, tokens), length),  # those of the next summary
    )
    for axis, (name, needed, least) in zip(axes[0, 1:], rings, strict=True):
        _draw_ring(axis, name, ring_of(tokens, least + back), needed, tokens - 1)
    following = seen * stride + length
    return Picture(
        figure,
        f"After {tokens} tokens, {seen} summaries are complete; the next one waits for token "
        f"{following - 1}",
    )


def _draw_rows(
    axis: Axes, tokens: int, room: int, block_size: int, length: int, stride: int, seen: int
) -> None:
    """All tokens in blocks, and above them the summaries, each over its tokens."""
    for t in range(room):
        colour = PALETTE["selected"] if t < tokens else "none"
        axis.add_patch(Rectangle((t, 0), 1, 1, facecolor=colour, edgecolor=PALETTE["line"],
                                 linewidth=0.6))  # fmt: skip
    for block in range(room // block_size + 1):
        axis.plot([block * block_size] * 2, [-0.25, 1.25], color=PALETTE["text"], linewidth=1.4)
    for block in range(room // block_size):
        axis.text((block + 0.5) * block_size, -0.35, f"block {block}", ha="center", va="top",
                  fontsize=9, color=PALETTE["text"])  # fmt: skip
    for j in range(seen + 1):
        is_whole, y = j < seen, 2.1 + 0.85 * j
        axis.add_patch(Rectangle((j * stride, y), length, 0.62, linewidth=1,
                                 facecolor=PALETTE["compressed"] if is_whole else "none",
                                 edgecolor=PALETTE["line"], linestyle="-" if is_whole else "--"
                                 ))  # fmt: skip
        told = f"summary {j}" if is_whole else "not complete"
        axis.text(j * stride + length / 2, y + 0.28, told, ha="center", va="center", fontsize=8.5,
                  color=PALETTE["text"])  # fmt: skip
    axis.text(0, 1.28, "tokens, for the lists", fontsize=9.5, va="bottom", color=PALETTE["text"])
    top = 2.1 + 0.85 * (seen + 1)
    axis.text(0, top, "summaries", fontsize=9.5, va="bottom", color=PALETTE["text"])
    axis.set_xlim(-0.3, room + 0.3)
    axis.set_ylim(-1.3, top + 0.8)
    axis.axis("off")


def _draw_ring(axis: Axes, name: str, held: list[int | None], needed: range, newest: int) -> None:
    """Places in a circle, clockwise from the top, with the tokens that they hold."""
    ring = len(held)
    for place, token in enumerate(held):
        start = 90 - 360 / ring * place
        colour = PALETTE["masked"]
        if token is None:
            colour = "none"
        elif token in needed:
            colour = PALETTE["window" if name == "window" else "compressed"]
        is_newest = token == newest
        axis.add_patch(Wedge((0, 0), 1, start - 360 / ring, start, width=0.45, facecolor=colour,
                             edgecolor=PALETTE["query"] if is_newest else "white",
                             linewidth=2.4 if is_newest else 1, zorder=2 + is_newest))  # fmt: skip
        angle = math.radians(start - 180 / ring)
        ink = PALETTE["text"] if colour == "none" else readable_on(colour)
        told = "" if token is None else token
        axis.text(0.775 * math.cos(angle), 0.775 * math.sin(angle), told, ha="center", va="center",
                  fontsize=8.5, color=ink, zorder=4)  # fmt: skip
        axis.text(1.13 * math.cos(angle), 1.13 * math.sin(angle), place, ha="center", va="center",
                  fontsize=7.5, color=PALETTE["faint"])  # fmt: skip
    axis.text(0, 0, f"{name}\nring of {ring}", ha="center", va="center", fontsize=9,
              color=PALETTE["text"])  # fmt: skip
    axis.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axis.axis("off")


# -- how one query fills a GPU --


@dataclass(frozen=True)
class Parts:
    """Into how many parts the Triton kernels cut a row, and the programs that this makes."""

    summaries: int
    window: int
    lists: int
    first_programs: int  # of the kernel of summaries and window
    list_programs: int


def parts_of(sequences: int = 1) -> Parts:
    """Of the chapter's layer; the lengths of the texts do not count."""
    groups = sequences * HEADS
    summary, window, lists = parts_of_rows(groups, 16)
    return Parts(summary, window, lists, groups * (summary + window), groups * lists)


def draw_split() -> Picture:
    """The multiprocessors of a GPU that work on one query: a program for each KV head, and with
    the keys cut into parts."""
    figure, axes = new_figure(8.2, 2.0, columns=2)
    programs = parts_of().first_programs
    ways = (("a program for each KV head", HEADS), ("keys cut into parts", programs))
    for axis, (name, count) in zip(axes[0], ways, strict=True):
        busy = min(count, MULTIPROCESSORS)
        for i in range(MULTIPROCESSORS):
            colour = PALETTE["selected"] if i < busy else PALETTE["masked"]
            axis.add_patch(Rectangle((i % 22, i // 22), 0.86, 0.86, facecolor=colour))
        axis.set(xlim=(-0.2, 22.1), ylim=(6.2, -0.3), aspect="equal")
        axis.axis("off")
        axis.set_title(f"{name}: {count} programs, {busy} of {MULTIPROCESSORS} busy", fontsize=10)
    return Picture(
        figure,
        f"One new token makes {HEADS} programs for {MULTIPROCESSORS} multiprocessors; in parts, "
        f"its keys make {programs}",
    )


# -- what was measured --


@functools.cache
def measured() -> dict | None:
    """The recording of `bench decode`: machine, versions, command, rows; None without one."""
    for name in ("decode_h100.json", "decode_h200.json"):
        if (ASSETS / name).exists():
            return json.loads((ASSETS / name).read_text(encoding="utf-8"))
    return None


def machine() -> str:
    """The GPU of the recording, "H100" or "H200"; without one, that of the data sheet's numbers."""
    data = measured()
    return "H200" if data is not None and "H200" in json.dumps(data["machine"]) else "H100"


def rows_of(**asked: object) -> list[dict]:
    """Its rows that have these entries, of the chapter's layer."""
    layer = {"kv_heads": HEADS, "query_heads": HEADS * GROUP, "width": WIDTH, **asked}
    data = measured()
    rows = data["rows"] if data is not None else []
    return [row for row in rows if all(row.get(name) == value for name, value in layer.items())]


def recorded_us(kernel: str, sequences: int, tokens: int, what: str = "graph_us") -> float | None:
    """Microseconds of `"nsa"` or `"dense"`, as a replayed graph or (`"call_us"`) a call; None
    where it was not recorded."""
    name = {"nsa": "triton"}.get(kernel, kernel)
    rows = rows_of(kernel=name, sequences=sequences, tokens=tokens)
    return rows[0][what] if rows else None


def told_times() -> list[str]:
    """What the recording says of 65,536 tokens, in lines."""
    rows = [rows_of(kernel="triton", sequences=n, tokens=STEP_TOKENS)[0] for n in (1, 32)]
    (one, many), s = rows, step(STEP_TOKENS, 32)
    parts = [times_of(row) for row in rows]
    calls = [row["call_us"] / 1000 for row in rows_of(kernel="triton")]
    return [
        f"1 text: NSA takes {one['call_us']:.0f} µs as a plain call, {one['graph_us']:.0f} µs as a "
        f"graph; dense attention's graph {recorded_us('dense', 1, STEP_TOKENS):.0f} µs",
        f"32 texts, NSA's graph: {many['graph_us']:.0f} µs",
        "of these, µs    kernels that read keys  others  between kernels",
        *(
            f"{who:12} {row[0]:25.0f}  {row[1]:6.0f}  {row[2]:15.0f}"
            for who, row in zip(("1 text", "32 texts"), parts, strict=True)
        ),
        f"{s.nsa / 32 / MIB:.0f} MiB at {BYTES_PER_S[machine()] / 1e12:.2f} TB/s would take "
        f"{s.nsa_us / 32:.1f} µs, and 32 times as many {s.nsa_us:.0f}",
        f"NSA's plain calls, {len(calls)} sizes: {min(calls):.1f} to {max(calls):.1f} ms",
    ]


def times_of(row: dict) -> tuple[float, float, float]:
    """Microseconds of a graph's kernels that read keys, of its other ones, and between them."""
    reading = sum(row["steps"][f"{name}_kernel"] for name in ("summaries_and_window", "lists"))
    others = sum(row["steps"].values()) - reading
    return reading, others, row["graph_us"] - reading - others


def draw_recorded() -> Picture:
    """Times of dense attention and of NSA by the number of texts, and NSA's kernels by length."""
    figure, axes = new_figure(8.6, 3.5, columns=2, width_ratios=(1, 1.1))
    _draw_ways(axes[0, 0])
    _draw_kernels(axes[0, 1])
    dense, nsa = (recorded_us(name, 32, STEP_TOKENS) for name in ("dense", "nsa"))
    return Picture(
        figure,
        f"32 texts of {STEP_TOKENS:,} tokens: dense attention takes {dense:,.0f} µs, NSA "
        f"{nsa:.0f}, {dense / nsa:.1f} times less",
    )


def _draw_ways(axis: Axes) -> None:
    ways = (
        ("dense, graph", "dense", "graph_us", "key"), ("NSA, graph", "nsa", "graph_us", "selected"),
        ("NSA, plain call", "nsa", "call_us", "masked"),
    )  # fmt: skip
    for i, (name, kernel, what, colour) in enumerate(ways):
        for place, sequences in enumerate((1, 8, 32)):
            us, x = recorded_us(kernel, sequences, STEP_TOKENS, what), place + 0.28 * (i - 1)
            axis.bar(x, us, 0.26, color=PALETTE[colour], label=None if place else name)
            axis.text(x, us * 1.07, f"{us:,.0f}", ha="center", va="bottom", fontsize=8)
    axis.set_yscale("log")
    axis.set_ylim(10, 12_000)
    axis.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axis.minorticks_off()
    axis.set_ylabel("µs")
    axis.set_xticks(range(3), ["1 text", "8 texts", "32 texts"])
    axis.set_title(f"{STEP_TOKENS:,} tokens each", fontsize=10)
    axis.legend(frameon=False, fontsize=8.5, loc="upper left")


def _draw_kernels(axis: Axes) -> None:
    kernels = {
        "summaries_and_window_kernel": ("summaries, window", "compressed"),
        "mass_kernel": ("weigh", "line"), "pick_kernel": ("pick", "own block"),
        "lists_kernel": ("lists", "selected"), "merge_kernel": ("merge", "value"),
    }  # fmt: skip
    rows = sorted(rows_of(kernel="triton", sequences=32), key=lambda row: row["tokens"])
    for place, row in enumerate(rows):
        start = 0.0
        for kernel, (name, colour) in kernels.items():
            us = row["steps"][kernel]
            axis.barh(place, us, 0.6, left=start, color=PALETTE[colour],
                      label=None if place else name)  # fmt: skip
            start += us
        axis.text(start + 4, place, f"{start:.0f} µs", va="center", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [f"{row['tokens']:,}" for row in rows])
    axis.set_ylim(len(rows) - 0.4, -1.5)
    axis.set_xlim(0, 340)
    axis.set_ylabel("tokens")
    axis.set_xlabel("µs in NSA's kernels, 32 texts")
    axis.legend(frameon=False, fontsize=8.5, ncols=3, loc="upper right", columnspacing=1)


# -- the cost of a token --


@dataclass(frozen=True)
class Step:
    """A token for each of some texts: bytes of the past, and microseconds.

    Attributes:
        dense, nsa: bytes.
        dense_us, nsa_us: at best, bytes over the memory's bandwidth.
        dense_recorded, nsa_recorded: measured as a replayed graph, or None.
    """

    dense: int
    nsa: int
    dense_us: float
    nsa_us: float
    dense_recorded: float | None
    nsa_recorded: float | None


@functools.cache
def step(tokens: int, sequences: int) -> Step:
    """Of the chapter's layer."""
    read, speed = bytes_of_step(tokens), BYTES_PER_S[machine()]
    bytes_ = [sequences * read[name] for name in ("dense", "nsa")]
    recorded = [recorded_us(name, sequences, tokens) for name in ("dense", "nsa")]
    return Step(*bytes_, *(1e6 * x / speed for x in bytes_), *recorded)


def _us(time: float) -> str:
    return f"{time:,.0f} µs" if time >= 9.95 else f"{time:.1f} µs"


def sentence(tokens: int, sequences: int) -> str:
    """What the explorer says."""
    s = step(tokens, sequences)
    rows = "one text" if sequences == 1 else f"{sequences} texts"
    told = (
        f"A token for {rows} of {tokens:,} tokens, one layer: dense attention reads "
        f"{_size(s.dense)}, NSA {_size(s.nsa)}, {s.dense / s.nsa:.1f} times less. At "
        f"{BYTES_PER_S[machine()] / 1e12:.2f} TB/s (an {machine()}), that takes at best "
        f"{_us(s.dense_us)} and {_us(s.nsa_us)}."
    )
    if s.nsa_recorded is not None and s.dense_recorded is not None:
        return f"{told} Measured: {_us(s.dense_recorded)} and {_us(s.nsa_recorded)}."
    return f"{told} This size was not measured."


def draw_step(tokens: int = STEP_TOKENS, sequences: int = 32) -> Picture:
    """Left the bytes of dense attention and of NSA by length, right their times."""
    s, sheet = step(tokens, sequences), Sheet(8.4, 3.3)
    low, high = math.log2(TOKENS[0]), math.log2(TOKENS[-1])
    left = sheet.chart(Place(0.95, 0.6, 3.5, 2.05), (low - 0.2, high + 0.2), (1, 20))
    left.title("keys and values read for one token a text")
    for name, colour in (("dense", "key"), ("nsa", "selected")):
        line = [(math.log2(n), math.log2(sequences * bytes_of_step(n)[name] / MIB)) for n in TOKENS]
        left.lines([line], colour, 2)
        left.dots([point for point in line if point[0] == math.log2(tokens)], colour, 9)
        label = "NSA" if name == "nsa" else name
        left.words([(*line[5], label)], size=9, ha="right" if name == "dense" else "left",
                   va="bottom" if name == "dense" else "top",
                   offset=(-4, 3) if name == "dense" else (5, -4))  # fmt: skip
    shown = TOKENS[::2]
    left.bottom([math.log2(n) for n in shown], [f"{n:,}" for n in shown], "tokens", size=7.5)
    left.left([2, 5, 10, 15, 20], ["4 MiB", "32 MiB", "1 GiB", "32 GiB", "1 TiB"])
    _draw_times(sheet.chart(Place(5.5, 0.75, 2.3, 1.9), (0, 1), (3.5, -0.7)), s)
    told = f"{tokens:,} tokens × {sequences}: {_size(s.nsa)} in place of {_size(s.dense)}"
    return Picture(sheet.figure, told)


def _draw_times(chart: Chart, s: Step) -> None:
    """Four bars: at best and measured, dense and NSA."""
    chart.title("time of the step")
    ways = (
        ("dense", "at best", s.dense_us, "key"), ("", "measured", s.dense_recorded, "key"),
        ("NSA", "at best", s.nsa_us, "selected"), ("", "measured", s.nsa_recorded, "selected"),
    )  # fmt: skip
    longest = max(us for _, _, us, _ in ways if us is not None)
    for row, (_, kind, us, colour) in enumerate(ways):
        if us is not None:
            chart.boxes([(0, row - 0.12, us / longest, 0.42)], colour)
        told = f"{kind}: {_us(us)}" if us is not None else f"not {kind}"
        chart.words([(0, row - 0.12, told)], size=8.5, ha="left", va="bottom", offset=(1, 2))
    chart.left([0.5, 2.5], ["dense", "NSA"], line=False)


def explore() -> Panel:
    """The interactive: length and number of texts → bytes, and times on paper and measured."""

    def render(tokens: int, sequences: int) -> tuple[Picture, str]:
        return draw_step(tokens, sequences), sentence(tokens, sequences)

    return panel(
        "what one token costs",
        render,
        tokens=ipywidgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in TOKENS], value=STEP_TOKENS, description="tokens"
        ),
        sequences=ipywidgets.SelectionSlider(options=SEQUENCES, value=32, description="texts"),
    )


# -- a text that is typed --


class Typist:
    """Types the rhyme with a function for one step, `decode_step(cache, q, kv, gates)`.

    Attributes:
        caches: one for each layer.
        read: for each token and layer, the blocks that were listed and how many keys were read.
    """

    def __init__(self, decode_step: Callable[..., Tensor], room: int = 1024) -> None:
        self.model, self.decode_step = rhyme.load(), decode_step
        self.read: list[list[tuple[list[int], int]]] = []
        c = rhyme.CONFIG
        sizes = ("block_size", "top_n", "window_size", "length", "stride")
        named = {name: getattr(c, name) for name in sizes}
        self.caches = [new_cache(1, room, c.key_width, **named) for _ in self.model.layers]

    def next_scores(self, token: int) -> Tensor:
        """Read one token, and give the scores of the letter that follows it, `[letters]`."""
        self.read.append([])
        attend = [
            lambda x, layer=layer.attention, cache=cache: self._attend(x, layer, cache)
            for layer, cache in zip(self.model.layers, self.caches, strict=True)
        ]
        return self.model(torch.tensor([[token]]), attend)[0, 0]

    def _attend(self, x: Tensor, layer: NativeSparseAttention, cache: SmallCache) -> Tensor:
        """The projections of a layer, then the function, then the layer's last projection."""
        c = layer.config
        q, k, v = layer.q(x)[:, 0], layer.k(x)[:, 0], layer.v(x)[:, 0]
        q, k, v = (z.unflatten(-1, (-1, c.key_width)) for z in (q, k, v))
        position = cache.lengths[:, None]
        q, k = (rotate(z[:, None], position, c.rotary_base)[:, 0] for z in (q, k))
        gates = layer.gate(x)[:, 0].unflatten(-1, (3, -1))
        o = self.decode_step(cache, q, torch.stack([k, v], 2), gates)
        listed = listed_blocks(cache, q[0])
        self.read[-1].append((listed, keys_read(cache, listed)))
        return layer.o(o.flatten(1))[:, None]

    def bar(self, layer: int = -1) -> str:
        """The blocks of the text so far, █ for those that the newest token reads, ▒ for others."""
        listed, blocks = self.read[-1][layer][0], -(-len(self.read) // rhyme.CONFIG.block_size)
        return "".join("█" if i in listed else "▒" for i in range(blocks))


def draw_typed(typist: Typist, layer: int = -1) -> Picture:
    """Which blocks each token read, and how many keys that were."""
    N, block_size = len(typist.read), rhyme.CONFIG.block_size
    read = [entries[layer] for entries in typist.read]
    image = np.ones((N, -(-N // block_size), 3))
    for t, (listed, _) in enumerate(read):
        image[t, : t // block_size + 1] = to_rgb(PALETTE["masked"])
        image[t, listed] = to_rgb(PALETTE["selected"])
    figure, axes = new_figure(8.4, 3.4, columns=2)
    left, right = axes[0]
    left.imshow(image.transpose(1, 0, 2), aspect="auto", interpolation="none", origin="lower")
    left.set_xlabel("token that is typed")
    left.set_ylabel("block of the past")
    left.set_title("blocks that it lists (blue)", fontsize=10)
    keys = [count for _, count in read]
    right.plot(range(1, N + 1), range(1, N + 1), color=PALETTE["key"], linewidth=2)
    right.plot(range(1, N + 1), keys, color=PALETTE["selected"], linewidth=2)
    right.text(0.55 * N, 0.6 * N, "dense", ha="right", va="bottom", fontsize=9)
    right.text(0.75 * N, keys[-1] - 0.04 * N, "NSA", ha="left", va="top", fontsize=9)
    right.set_xlabel("token that is typed")
    right.set_title("keys that it reads, all branches", fontsize=10)
    return Picture(
        figure,
        f"The last of {N:,} tokens reads {keys[-1]} keys, where dense attention reads {N:,}",
    )
