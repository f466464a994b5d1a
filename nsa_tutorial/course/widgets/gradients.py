"""Pictures of chapter 12: what a score does to all weights of its row, a row that one number stands
in for, two walks over the tiles; and what storing the weights takes up, beside computing them
again.

`facts` computes; `draw_memory` draws it, and `explore` puts controls on that. `kept_bytes` watches
what autograd keeps, `products` counts what is multiplied. The machine is one NVIDIA H200 (data
sheet), numbers have two bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_tutorial.course import costs
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure, shades
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.widgets import Panel, backward_kernels, panel
from nsa_tutorial.course.widgets.grouped_query_attention import (
    H200_BYTES,
    H200_BYTES_PER_S,
    H200_FLOPS_PER_S,
)
from nsa_tutorial.training import gradients

GIB = 2**30
TOKENS = tuple(2**power for power in range(10, 18))  # 1,024 … 131,072
WIDTHS = (32, 64, 128, 256)
HEADS = (1, 4, 16, 64)
TILE = 128


def kept_bytes(function: Callable[[], object], *inputs: Tensor) -> int:
    """The bytes that autograd keeps for the backward while `function` runs, beside `inputs`; what
    shares memory counts once."""
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        # its result lives until all is counted, or its memory would be given to another tensor
        _result = function()
    return sum(kept.values())


def products(tokens: int, width: int, tile: int = 64) -> dict[str, int]:
    """How many products of `tokens × tokens × width` PyTorch counts: of a forward, of its backward
    with stored weights, and of the two walks. Every row sees every key."""
    q, k, v = (torch.ones(tokens, width, requires_grad=True) for _ in range(3))
    everything, numbers = torch.full((tokens,), tokens - 1), torch.zeros(tokens)
    arguments = (torch.ones(tokens, width), *(x.detach() for x in (q, k, v)), numbers, numbers)
    options = {"scale": 1.0, "tile_q": tile, "tile_k": tile}
    with FlopCounterMode(display=False) as forward:
        o = torch.softmax(q @ k.T, -1) @ v
    with FlopCounterMode(display=False) as stored:
        o.sum().backward()
    with FlopCounterMode(display=False) as walks:
        gradients.by_query_tiles(*arguments, everything, **options)
        gradients.by_key_tiles(*arguments, everything, **options)
    counters = {"forward": forward, "stored": stored, "two walks": walks}
    one = 2 * tokens * tokens * width
    return {name: c.get_total_flops() // one for name, c in counters.items()}


def dense_times() -> dict[str, float]:
    """Milliseconds of a measured backward of dense attention, by PyTorch's backend: an H200, bf16,
    causal, 65,536 tokens, 16 query heads of width 128 on 4 KV heads."""
    return backward_kernels.dense_times(group=4)


# -- what a score does to the weights of its row --


def jacobian(s: Tensor) -> Tensor:
    """`diag(p) - outer(p, p)`: how the weight of each key (row) follows each score (column)."""
    p = torch.softmax(s, -1)
    return torch.diag(p) - torch.outer(p, p)


def draw_jacobian(s: Tensor, v: Tensor) -> Picture:
    """The Jacobian of one row's softmax, and what is left of it once the values are known.

    Args:
        s: scaled scores of one query, `[M]`.
        v: values of width one, `[M]`.
    """
    p = torch.softmax(s, -1)
    d_s = p * (v - p @ v)
    figure, axes = new_figure(8.2, 3.2, columns=2, width_ratios=(1, 1.15))
    left, right = axes[0]
    _signed_grid(left, jacobian(s).numpy())
    left.set_title("a score that rises takes from the others", fontsize=10)
    left.set_xlabel("if this key's score rises …")
    left.set_ylabel("… this key's weight changes")
    _draw_gains(right, v, p, d_s)
    most = int(d_s.abs().argmax())
    gap = float(v[most] - p @ v)
    side = "above" if gap > 0 else "below"
    return Picture(
        figure,
        f"Key {most} moves o most: a fair weight, {p[most]:.2f}, and a value {abs(gap):.2f} {side} "
        "the average",
    )


def _signed_grid(axis: Axes, values: np.ndarray) -> None:
    """Squares from orange (below 0) over white to blue, each with its number."""
    top = float(np.abs(values).max())
    share = np.clip(np.abs(values) / top, 0, 1)
    colours = np.where(
        (values >= 0)[..., None],
        shades("selected")(share)[..., :3],
        shades("query")(share)[..., :3],
    )
    axis.imshow(colours, aspect="equal", interpolation="none")
    rows, columns = values.shape
    axis.set_xticks(range(columns))
    axis.set_yticks(range(rows))
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.2)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    for i, j in np.ndindex(rows, columns):
        ink = "white" if share[i, j] > 0.6 else PALETTE["text"]
        told = f"{values[i, j]:+.2f}".replace("-", "−")
        axis.text(j, i, told, ha="center", va="center", fontsize=8.5, color=ink)


def _draw_gains(axis: Axes, v: Tensor, p: Tensor, d_s: Tensor) -> None:
    """How far each value is from the average, its weight, and the gradient of its score."""
    o, top = float(p @ v), float(v.max())
    for i, value in enumerate(v.tolist()):
        is_above = value > o
        colour = PALETTE["selected" if is_above else "query"]
        axis.plot([i - 0.3, i + 0.3], [value, value], color=PALETTE["value"], linewidth=4)
        if abs(value - o) > 0.06 * top:
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2}
            axis.annotate("", (i, value), (i, o), arrowprops=arrow)
        told = f"weight {p[i]:.2f}\no moves {d_s[i]:+.2f}".replace("-", "−")
        axis.text(i, value + (0.04 if is_above else -0.05) * top, told, ha="center",
                  va="bottom" if is_above else "top", fontsize=9)  # fmt: skip
    axis.axhline(o, color=PALETTE["text"], linestyle="--", linewidth=1.2)
    axis.text(len(v) - 0.45, o, f"o = {o:.2f}", va="bottom", ha="left", fontsize=9)
    axis.set_xticks(range(len(v)))
    axis.set_xlim(-0.6, len(v) + 0.15)
    axis.set_ylim(min(0.0, float(v.min())) - 0.28 * top, 1.28 * top)
    axis.set_ylabel("value")
    axis.set_xlabel("key")
    axis.set_title("how o moves, per unit of a score", fontsize=10)


# -- a row that one number stands in for --


def draw_delta(p: Tensor, d_p: Tensor, d_o: Tensor, o: Tensor) -> Picture:
    """The same sum of each row, from a matrix over the keys and from two narrow tensors.

    Args:
        p, d_p: weights and their gradient, `[N, M]`.
        d_o, o: gradient of the output, and the output, `[N, DV]`.
    """
    by_row, by_channel = p * d_p, d_o * o
    N, (M, DV) = len(p), (p.shape[1], o.shape[1])
    figure, axes = new_figure(6.4, 3.3, columns=3, width_ratios=(M, 3.2, DV + 0.6))
    hidden = (p == 0).numpy()
    parts = ((axes[0, 0], by_row, hidden), (axes[0, 2], by_channel, None))
    for axis, values, mask in parts:
        grid(axis, values.abs().numpy(), colour="selected" if mask is not None else "value",
             hidden=mask)  # fmt: skip
    axes[0, 0].set_title(f"p * d_p: {N} × {M}, needs the weights", fontsize=10)
    axes[0, 0].set_xlabel("key")
    axes[0, 0].set_ylabel("query")
    axes[0, 2].set_title(f"d_o * o: {N} × {DV}", fontsize=10)
    axes[0, 2].set_xlabel("channel")
    middle, delta = axes[0, 1], by_channel.sum(-1)
    middle.set_xlim(0, 1)
    middle.set_ylim(N - 0.5, -0.5)
    middle.axis("off")
    middle.set_title("delta", fontsize=10)
    for n, number in enumerate(delta.tolist()):
        told = f"→ {number:+.2f} ←".replace("-", "−")
        middle.text(0.5, n, told, ha="center", va="center", fontsize=9)
    close = torch.allclose(by_row.sum(-1), delta, atol=1e-5)
    told = "have the same sum" if close else "have different sums"
    return Picture(figure, f"Row by row, p * d_p and d_o * o {told}")


# -- two walks --


def draw_two_walks(tiles: int = 4) -> Picture:
    """Who holds what while the tiles pass by: rows of tiles for `d_q`, columns for `d_k` and
    `d_v`."""
    figure, axes = new_figure(8.2, 3.5, columns=2)
    names = ("d_q: a tile of queries stays, keys pass by",
             "d_k, d_v: a tile of keys stays, queries pass by")  # fmt: skip
    for axis, name, by_rows in zip(axes[0], names, (True, False), strict=True):
        _draw_walk(axis, tiles, by_rows)
        axis.set_title(name, fontsize=10)
    count = tiles * (tiles + 1) // 2
    return Picture(
        figure,
        f"Each walk computes the same {count} tiles again; each sum has one owner",
    )


def _draw_walk(axis: Axes, tiles: int, by_rows: bool) -> None:
    chosen = tiles // 2
    for i in range(tiles):
        for j in range(tiles):
            stays = (i if by_rows else j) == chosen
            colour = PALETTE["masked"] if j > i else "#D3E9F7"
            if stays and j <= i:
                colour = PALETTE["key"]
            axis.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white"))
    start, end = ((0.15, chosen + 0.5), (tiles + 0.35, chosen + 0.5))
    if not by_rows:
        start, end = ((chosen + 0.5, chosen + 0.15), (chosen + 0.5, tiles + 0.35))
    arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, linewidth=2,
                            color=PALETTE["query"], clip_on=False)  # fmt: skip
    axis.add_patch(arrow)
    here = (-0.32, chosen) if by_rows else (chosen, -0.32)
    size = (0.22, 1) if by_rows else (1, 0.22)
    held = PALETTE["query" if by_rows else "key"]
    axis.add_patch(Rectangle(here, *size, facecolor=held, edgecolor="white", clip_on=False))
    if by_rows:
        axis.text(-0.42, chosen + 0.5, "stays", ha="right", va="center", fontsize=9)
    else:
        axis.text(chosen + 1.06, -0.21, "stays", ha="left", va="center", fontsize=9)
    told = "d_q of these\nqueries" if by_rows else "d_k, d_v of these keys"
    x, y = (tiles + 0.45, chosen + 0.5) if by_rows else (chosen + 0.5, tiles + 0.45)
    axis.text(x, y, told, ha="left" if by_rows else "center", va="center" if by_rows else "top",
              fontsize=9, color=PALETTE["query"])  # fmt: skip
    axis.set_xlim(0, tiles + 1.5)
    axis.set_ylim(tiles + 0.8, -0.45)
    axis.text(0, -0.08, "keys →", va="bottom", fontsize=9)
    axis.text(-0.1, 0, "queries →", ha="right", va="top", rotation=270, fontsize=9)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


# -- storing against computing again --


@dataclass(frozen=True)
class Facts:
    """One causal layer, stored weights beside weights computed again.

    Attributes:
        stored, again: bytes that the forward keeps beside `q`, `k` and `v`.
        stored_ms, again_ms: least times of the two backward passes, each the longer of its traffic
            and its arithmetic (data sheet; main memory serves every byte).
        stored_limit, again_limit: which of the two it is, `"memory"` or `"arithmetic"`.
    """

    stored: int
    again: int
    stored_ms: float
    again_ms: float
    stored_limit: str
    again_limit: str


@functools.cache
def facts(tokens: int, width: int, heads: int) -> Facts:
    """Of a layer with `heads` query heads, each with a KV head of its own, `D = DV = width`."""
    kept = [
        costs.kept_for_backward(tokens, tokens, width, HQ=heads, weights=weights)
        for weights in (True, False)
    ]
    dense = costs.dense_attention_backward(tokens, tokens, width, HQ=heads)
    tiled = costs.tiled_attention_backward(
        tokens, tokens, width, tile_q=TILE, tile_k=TILE, HQ=heads
    )
    times, limits = [], []
    for cost in (dense, tiled):
        memory, arithmetic = cost.bytes / H200_BYTES_PER_S, cost.flops / H200_FLOPS_PER_S
        times.append(1e3 * max(memory, arithmetic))
        limits.append("memory" if memory > arithmetic else "arithmetic")
    return Facts(*kept, *times, *limits)


def _size(size: float) -> str:
    """Bytes in the unit that suits them."""
    unit, name = next(
        (unit, name)
        for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if size >= unit
    )
    number = size / unit
    return f"{number:,.0f} {name}" if number >= 10 else f"{number:.2g} {name}"


def _ms(time: float) -> str:
    return f"{time:,.0f}" if time >= 100 else f"{time:.2g}"


def sentence(tokens: int, width: int, heads: int) -> str:
    """What the explorer says about a setting."""
    f = facts(tokens, width, heads)
    fits = "fit" if f.stored <= H200_BYTES else "do not fit"
    one = "head" if heads == 1 else "heads"
    return (
        f"{tokens:,} tokens, {heads} {one} of width {width}: the weights of one layer take "
        f"{_size(f.stored)} and {fits} into one H200; o and lse take {_size(f.again)}, "
        f"{f.stored / f.again:,.0f} times less. At best, a backward with stored weights needs "
        f"{_ms(f.stored_ms)} ms ({f.stored_limit}), one that computes them again "
        f"{_ms(f.again_ms)} ms ({f.again_limit})."
    )


def draw_memory(tokens: int = 65_536, width: int = 128, heads: int = 16) -> Picture:
    """Left what a layer keeps for its backward, by length; right the least times of the two
    backward passes."""
    f = facts(tokens, width, heads)
    sheet = Sheet(8.3, 3.5)
    low, high = math.log2(TOKENS[0]), math.log2(TOKENS[-1])
    kept = sheet.chart(Place(0.85, 0.58, 3.9, 2.35), (low - 0.2, high + 0.2), (-14.5, 12.5))
    _draw_kept(kept, tokens, width, heads)
    _draw_times(sheet.chart(Place(5.9, 0.75, 2.2, 1.9), (0, 1), (1.5, -0.7)), f)
    told = (
        f"{tokens:,} tokens: {_size(f.again)} kept in place of {_size(f.stored)}; at best, the "
        f"backward takes {_ms(f.again_ms)} ms, not {_ms(f.stored_ms)}"
    )
    return Picture(sheet.figure, told)


def _draw_kept(chart: Chart, tokens: int, width: int, heads: int) -> None:
    chart.title("kept for the backward, one layer")
    every = [(math.log2(n), facts(n, width, heads)) for n in TOKENS]
    here = math.log2(tokens)
    for name, colour, kept in (("weights", "selected", "stored"), ("o and lse", "value", "again")):
        points = [(x, math.log2(getattr(f, kept) / GIB)) for x, f in every]
        chart.lines([points], colour, 2)
        chart.dots([point for point in points if point[0] == here], colour, 9)
        side = ("right", "bottom", (-6, 3)) if kept == "stored" else ("left", "top", (6, -4))
        place = points[2 if kept == "stored" else 4]
        chart.words([(*place, name)], size=9, ha=side[0], va=side[1], offset=side[2])
    limit = math.log2(H200_BYTES / GIB)
    chart.lines([((chart.x[0], limit), (chart.x[1], limit))], "text", linestyles="--")
    memory = f"memory of one H200: {H200_BYTES / GIB:.0f} GiB"
    chart.words([(chart.x[0], limit, memory)], size=8, ha="left", va="bottom", offset=(5, 3))
    shown = TOKENS[1::2]
    chart.bottom([math.log2(n) for n in shown], [f"{n:,}" for n in shown], "tokens")
    chart.left([-10, -5, 0, 5, 10], ["1 MiB", "32 MiB", "1 GiB", "32 GiB", "1 TiB"])


def _draw_times(chart: Chart, f: Facts) -> None:
    """Two bars, as shares of the longer one."""
    chart.title("the backward at best")
    longest = max(f.stored_ms, f.again_ms)
    ways = ((f.stored_ms, f.stored_limit, "selected"), (f.again_ms, f.again_limit, "value"))
    for row, (ms, limit, colour) in enumerate(ways):
        chart.boxes([(0, row - 0.2, ms / longest, 0.4)], colour)
        told = f"{_ms(ms)} ms, by {limit}"
        chart.words([(0, row - 0.2, told)], size=8.5, ha="left", va="bottom", offset=(1, 2))
    chart.left([0, 1], ["weights\nstored", "computed\nagain"], line=False)


def explore() -> Panel:
    """The interactive: length, width and heads → what is kept for the backward, and its time."""

    def render(tokens: int, width: int, heads: int) -> tuple[Picture, str]:
        return draw_memory(tokens, width, heads), sentence(tokens, width, heads)

    return panel(
        "storing against computing again",
        render,
        tokens=ipywidgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in TOKENS], value=8192, description="tokens"
        ),
        width=ipywidgets.SelectionSlider(options=WIDTHS, value=128, description="width of a head"),
        heads=ipywidgets.SelectionSlider(options=HEADS, value=16, description="query heads"),
    )
