"""Pictures of chapter 18: who holds what, how a text is cut, which tokens a border needs from the
other side, where gradients go, and how long ranks are idle.

All numbers are counted by `course.many_gpu_costs`. `explore` is the interactive, and
`draw_ranks` its picture.
"""

from __future__ import annotations

import ipywidgets
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from nsa_tutorial.course import many_gpu_costs as costs
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.training.many_gpus.cuts import Cut

_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
RANK_COLOURS = ("query", "compressed", "window", "selected")  # of the first four ranks
GIB = 2**30


# -- who holds what --


def draw_who(tokens: int = 1 << 20, ranks: int = 4) -> Picture:
    """What each rank holds of a layer, and what comes from the others."""
    found = costs.held(tokens, ranks)
    colours = {"queries": "query", "outputs": "value", "own keys and values": "key"}
    figure, axes = new_figure(9.0, 3.5, columns=2, width_ratios=(2.7, 1))
    axis, legend = axes[0]
    for rank in range(ranks):
        top = 0.0
        for name, colour in colours.items():
            size = found[name] / GIB
            axis.bar(rank, size, 0.6, bottom=top, color=PALETTE[colour])
            top += size
        for other in range(ranks):
            if other == rank:
                continue
            size = found["own keys and values"] / GIB
            axis.bar(rank, size, 0.6, bottom=top + 0.12, facecolor="none", hatch="////",
                     edgecolor=PALETTE["key"], linewidth=1)  # fmt: skip
            axis.text(rank, top + 0.12 + size / 2, f"of rank {other}", ha="center", va="center",
                      fontsize=8, bbox=_PAPER)  # fmt: skip
            top += size
    axis.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=9.5)
    axis.set(ylabel="GiB of one layer", ylim=(0, 10.6))
    legend.axis("off")
    told = [("queries: stay", "query"), ("outputs: stay", "value"), ("own keys and values", "key")]
    for i, (text, colour) in enumerate(told):
        legend.add_patch(Rectangle((0, -i), 0.12, 0.5, facecolor=PALETTE[colour]))
        legend.text(0.18, 0.25 - i, text, va="center", fontsize=9)
    legend.add_patch(Rectangle((0, -3), 0.12, 0.5, facecolor="none", hatch="////",
                               edgecolor=PALETTE["key"]))  # fmt: skip
    legend.text(0.18, -2.75, "copies of others':\nthese travel", va="center", fontsize=9)
    legend.set(xlim=(0, 1.1), ylim=(-5, 2))
    stays, comes = (found["queries"] + found["outputs"]) / GIB, found["gathered"] / GIB
    return Picture(
        figure,
        f"At {tokens >> 20}M tokens, each of {ranks} ranks keeps {stays:.0f} GiB of queries and "
        f"outputs, and gets {comes:.1f} GiB of keys and values",
    )


# -- cuts --


def shares(ranks: int, kind: str) -> list[int]:
    """The part of a causal triangle that each rank has, in squares of half a piece's side."""
    cut = Cut(ranks, 2 * ranks, kind)
    spans = [[cut.spans[piece] for piece in cut.pieces(rank)] for rank in range(ranks)]
    return [sum(b * b - a * a for a, b in of) for of in spans]


def draw_cut(ranks: int = 4, tokens: int = 64) -> Picture:
    """The causal triangle by the rank of its queries, for both cuts."""
    figure, axes = new_figure(8.4, 3.5, columns=2)
    found = {}
    for axis, kind in zip(axes[0], ("contiguous", "zigzag"), strict=True):
        image = np.full((tokens, tokens, 3), 255, dtype=np.uint8)
        cut = Cut(ranks, tokens, kind)
        for piece, (start, stop) in enumerate(cut.spans):
            rank = cut.owner(piece)[0]
            for t in range(start, stop):
                image[t, : t + 1] = byte_colour(RANK_COLOURS[rank])
            axis.text(-1.5, (start + stop) / 2 - 0.5, f"rank {rank}", va="center", ha="right",
                      fontsize=8.5)  # fmt: skip
        axis.imshow(image, interpolation="none")
        parts = found[kind] = shares(ranks, kind)
        least = min(min(parts), 4)
        told = " · ".join(str(part // least) for part in parts)
        axis.set_title(f"{kind}: work {told}", fontsize=10)
        axis.set(xlabel="key")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_ylabel("queries of", labelpad=38)
    last, whole = found["contiguous"][-1] // 4, sum(found["contiguous"]) // 4
    return Picture(
        figure,
        f"Contiguous, the last of {ranks} ranks has {last} of {whole} parts of the triangle; "
        f"by a zigzag, each has {whole // ranks}",
    )


# -- the border --


def draw_halo(window: int = 5, length: int = 4, stride: int = 2, share: int = 12) -> Picture:
    """The border between two ranks: the window of the first query, and summaries that straddle."""
    figure, axes = new_figure(8.6, 2.7)
    axis, border = axes[0, 0], share
    for t in range(2 * share):
        colour = "key" if t < border else "selected"
        axis.add_patch(Rectangle((t, 0), 0.92, 0.9, facecolor=PALETTE[colour]))
        axis.text(t + 0.46, 0.45, t, ha="center", va="center", fontsize=8.5,
                  color=readable_on(colour))  # fmt: skip
    axis.plot([border - 0.04] * 2, [-1.5, 3.1], color=PALETTE["text"], linewidth=1.2)
    axis.text(border - 0.3, 3.0, "rank 0", ha="right", va="top", fontsize=9.5)
    axis.text(border + 0.25, 3.0, "rank 1", ha="left", va="top", fontsize=9.5)
    straddling = 0
    for start in range(0, 2 * share - length + 1, stride):
        end = start + length
        if not border - length - 1 <= start <= border + 1:
            continue
        is_over = start < border < end
        straddling += is_over
        y = 1.15 + 0.42 * (start // stride % 3)
        axis.add_patch(Rectangle((start, y), length - 0.08, 0.3,
                       facecolor=PALETTE["compressed" if is_over else "masked"]))  # fmt: skip
    first = border - window + 1
    axis.add_patch(Rectangle((first, -0.45), window - 0.08, 0.3, facecolor=PALETTE["window"]))
    axis.text(first - 0.2, -0.3, f"window of query {border}", ha="right", va="center", fontsize=9)
    axis.annotate("", (border, -1.05), (first, -1.05),
                  arrowprops={"arrowstyle": "<->", "color": PALETTE["text"]})  # fmt: skip
    axis.text((first + border) / 2, -1.45, f"halo: {window - 1} tokens", ha="center", va="center",
              fontsize=9)  # fmt: skip
    axis.text(border - length - 2.2, 1.8, "summaries", ha="right", va="center", fontsize=9)
    axis.set(xlim=(-0.3, 2 * share + 0.3), ylim=(-1.8, 3.2))
    axis.axis("off")
    verb = "summary straddles" if straddling == 1 else "summaries straddle"
    return Picture(
        figure,
        f"The first query of rank 1 needs {window - 1} tokens of rank 0 for its window, and "
        f"{straddling} {verb} the border",
    )


# -- the way back --


def draw_back(ranks: int = 4) -> Picture:
    """Which rank has a gradient for whose keys, and where they are added up."""
    figure, axes = new_figure(8.4, 3.1, columns=2)
    for axis, is_back in zip(axes[0], (False, True), strict=True):
        for row in range(ranks):
            for column in range(ranks):
                seen = column <= row or not is_back
                colour = RANK_COLOURS[column] if seen else "masked"
                axis.add_patch(Rectangle((column, row), 0.94, 0.94, facecolor=PALETTE[colour]))
                text = ("keys of" if not is_back else "for") + f"\nrank {column}"
                axis.text(column + 0.47, row + 0.47, text if seen else "0", ha="center",
                          va="center", fontsize=8, color=readable_on(colour))  # fmt: skip
            axis.text(-0.12, row + 0.47, f"rank {row}", ha="right", va="center", fontsize=9)
        start, end = (-0.75, -0.05) if not is_back else (ranks + 0.05, ranks + 0.7)
        for column in range(ranks):
            axis.add_patch(FancyArrowPatch((column + 0.47, start), (column + 0.47, end),
                           arrowstyle="->", mutation_scale=11, color=PALETTE["text"]))  # fmt: skip
            if is_back:
                axis.text(column + 0.47, ranks + 0.95, f"Σ on rank {column}", ha="center",
                          va="center", fontsize=8.5)  # fmt: skip
        axis.set(xlim=(-1.1, ranks + 0.1), ylim=(ranks + 1.2, -0.9))
        axis.set_title(
            "backward: a reduce-scatter" if is_back else "forward: a gather", fontsize=10
        )
        axis.axis("off")
    return Picture(
        figure,
        "Forward, each rank's keys are copied to all; backward, each column is added up and goes "
        "to its owner",
    )


# -- balance --


def draw_idle(ranks: int = 8) -> Picture:
    """Idle share by the text's length, for dense attention and NSA."""
    figure, axes = new_figure(8.2, 3.0)
    axis = axes[0, 0]
    lengths = [1 << e for e in range(12, 24)]
    styles = {("dense", "contiguous"): ("key", "-"), ("nsa", "contiguous"): ("selected", "-"),
              ("nsa", "zigzag"): ("selected", "--")}  # fmt: skip
    for (attention, kind), (colour, line) in styles.items():
        shown = [100 * costs.idle_share(Cut(ranks, N, kind), attention) for N in lengths]
        axis.plot(lengths, shown, line, color=PALETTE[colour], linewidth=2)
        name = "dense" if attention == "dense" else "NSA"
        at = 3 if (attention, kind) == ("nsa", "contiguous") else 0
        drop = -6 if at else 1.2
        axis.text(1.2 * lengths[at], shown[at] + drop, f"{name}, {kind}", va="bottom", fontsize=9)
    axis.set_xscale("log", base=2)
    ticks = lengths[::2]
    axis.set_xticks(ticks, [f"{N >> 10}k" if N < 1 << 20 else f"{N >> 20}M" for N in ticks])
    axis.set(xlabel="tokens of the text", ylabel="idle share (%)", ylim=(0, 56))
    low, high = (100 * costs.idle_share(Cut(ranks, N, "contiguous")) for N in (8192, 1 << 20))
    return Picture(
        figure,
        f"NSA by a contiguous cut over {ranks} ranks: idle for {low:.0f}% of the time at 8k "
        f"tokens, {high:.0f}% at 1M",
    )


def draw_wall() -> Picture:
    """Time of one layer a token, by what grows with the text and what does not."""
    figure, axes = new_figure(8.2, 3.1)
    axis = axes[0, 0]
    lengths = np.array([1 << e for e in range(13, 24)])
    groups = {
        "lists, window, gates": (costs.LINEAR, "selected"),
        "choice of blocks": (costs.SQUARE[1:], "query"),
        "attention to summaries": (costs.SQUARE[:1], "compressed"),
    }
    for name, (steps, colour) in groups.items():
        each = np.array([1e6 * costs.seconds(int(N), steps) / N for N in lengths])
        axis.plot(lengths, each, color=PALETTE[colour], linewidth=2.2, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = lengths[1::2]
    axis.set_xticks(ticks, [f"{N >> 10}k" if N < 1 << 20 else f"{N >> 20}M" for N in ticks])
    axis.set(xlabel="tokens of the text", ylabel="µs a token, both directions", ylim=(0.01, 200))
    meet = costs.crossing()
    axis.axvline(meet, color=PALETTE["faint"], linestyle="--", linewidth=1)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    share = costs.seconds(8 << 20, costs.SQUARE) / costs.seconds(8 << 20)
    return Picture(
        figure,
        f"From {meet / 1000:.0f},000 tokens on, summaries and choice take longer than the rest; at "
        f"8M, {share:.1%} of the time",
    )


# -- the panel --


def sentence(tokens: int, ranks: int, kind: str) -> str:
    """What the explorer says."""
    cut, of = Cut(ranks, tokens, kind), costs.held(tokens, ranks)
    moved, stays = costs.sent_in_all(cut), of["queries"] + of["outputs"]
    return (
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {kind}: each holds {stays / GIB:.2f} GiB of "
        f"queries and outputs and {(sum(of.values()) - stays) / GIB:.2f} GiB of keys and values. "
        f"Forward and backward, it sends {moved / GIB:.2f} GiB. Idle: "
        f"{costs.idle_share(cut):.0%} in NSA, {costs.idle_share(cut, 'dense'):.0%} in dense "
        "attention."
    )


def draw_ranks(tokens: int = 1 << 17, ranks: int = 4, kind: str = "contiguous") -> Picture:
    """The work of each rank, what it holds and what it sends."""
    cut, sheet = Cut(ranks, tokens, kind), Sheet(8.5, 2.9)
    for attention, left, colour in (("nsa", 0.75, "selected"), ("dense", 3.45, "key")):
        by_rank = costs.work(cut, attention)
        most = max(by_rank)
        chart = sheet.chart(Place(left, 0.62, 2.2, 1.6), (-0.5, ranks - 0.5), (0, 1.05))
        chart.boxes([(r - 0.42, 0, 0.84, 1) for r in range(ranks)], "masked")
        chart.boxes([(r - 0.42, 0, 0.84, w / most) for r, w in enumerate(by_rank)], colour)
        name = "NSA" if attention == "nsa" else "dense"
        chart.title(f"{name}: idle {costs.idle_share(cut, attention):.0%}")
        chart.bottom([0, ranks - 1] if ranks > 1 else [0], name="rank")
        if attention == "nsa":
            chart.left([0, 1], ["0", "all"], "busy")
    sizes = [x / GIB for x in costs.held(tokens, ranks).values()]
    sizes.append(costs.sent_in_all(cut) / GIB)
    names = ["queries", "outputs", "own keys", "gathered", "sent"]
    chart = sheet.chart(Place(6.75, 0.62, 1.15, 1.6), (0, max(sizes)), (-0.6, 4.6))
    chart.title("GiB of a rank")
    colours = ["query", "value", "key", "key", "faint"]
    chart.boxes([(0, 4 - i - 0.36, size, 0.72) for i, size in enumerate(sizes)], colours)
    chart.words([(0, 4 - i, f"{n} ") for i, n in enumerate(names)], size=8.5, ha="right")
    chart.words([(s, 4 - i, f" {s:.3g}") for i, s in enumerate(sizes)], size=8.5, ha="left")
    return Picture(sheet.figure, f"{tokens:,} tokens on {ranks} ranks, {kind}")


def explore() -> Panel:
    """The interactive: length, ranks and cut → bytes, idle share, memory."""

    def render(tokens: int, ranks: int, kind: str) -> tuple[Picture, str]:
        return draw_ranks(tokens, ranks, kind), sentence(tokens, ranks, kind)

    lengths = [(f"{N >> 10}k" if N < 1 << 20 else f"{N >> 20}M", N)
               for N in (1 << e for e in range(12, 24))]  # fmt: skip
    return panel(
        "ranks and bytes",
        render,
        tokens=ipywidgets.SelectionSlider(options=lengths, value=1 << 17, description="tokens"),
        ranks=ipywidgets.SelectionSlider(options=(1, 2, 4, 8, 16, 32), value=4,
                                         description="ranks"),
        kind=ipywidgets.ToggleButtons(options=("contiguous", "zigzag"), description="cut"),
    )  # fmt: skip
