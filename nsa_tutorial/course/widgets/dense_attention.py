"""Pictures of chapter 01: the lookup of one query, what the scale is for, and what the score matrix
weighs."""

from __future__ import annotations

from dataclasses import dataclass

import ipywidgets
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, grid, new_figure
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.exact import dense_attention

GIB = 2**30
MEANINGS = ("Ada", "Bob", "a deed")


def sentence() -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Six words with vectors made by hand: `(words, q [6, 4], k [6, 4], v [6, 3])`.

    The four numbers of a query say what the word looks for, those of a key what it offers: a
    person, someone called "she", someone called "he", a deed. The three numbers of a value are what
    it hands over: the meaning Ada, the meaning Bob, a deed.
    """
    # fmt: off
    table = {  # looks for      offers        hands over
        "Ada":   ([0, 0, 0, 2], [2, 2, 0, 0], [1, 0, 0]),
        "met":   ([2, 0, 0, 0], [0, 0, 0, 2], [0, 0, 1]),
        "Bob":   ([0, 0, 0, 2], [2, 0, 2, 0], [0, 1, 0]),
        "and":   ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0]),
        "she":   ([2, 2, 0, 0], [1, 1, 0, 0], [0, 0, 0]),
        "waved": ([2, 0, 0, 0], [0, 0, 0, 2], [0, 0, 1]),
    }
    # fmt: on
    q, k, v = (
        torch.tensor(column, dtype=torch.float32) for column in zip(*table.values(), strict=True)
    )
    return list(table), q, k, v


# -- one query's lookup --

SCALES = {"1/√D": 0.5, "1 (no scaling)": 1.0, "1/D": 0.25}


@dataclass(frozen=True)
class Lookup:
    """What one query of the sentence finds.

    Attributes:
        scores: scaled scores of every query and every key `[N, M]`; hidden ones are `-inf`.
        weights: the chosen query's weights `[M]`, summing to 1.
        output: the weighted sum of the values `[DV]`.
    """

    scores: Tensor
    weights: Tensor
    output: Tensor


def look_up(query: int, scale: float = 0.5, causal: bool = True) -> Lookup:
    """Attention of the word at position `query` of the sentence, step by step."""
    words, q, k, v = sentence()
    scores = scale * q @ k.T
    if causal:
        scores = scores.masked_fill(
            ~dense_attention.causal_mask(len(words), len(words)), -torch.inf
        )
    weights = dense_attention.softmax(scores[query])
    return Lookup(scores, weights, weights @ v)


def describe(query: int, scale: float = 0.5, causal: bool = True) -> str:
    """One sentence on what the word at position `query` sees and where its weight goes."""
    words = sentence()[0]
    found = look_up(query, scale, causal)
    listed = ", ".join(
        f"{word} {weight:.2f}"
        for word, weight in zip(words, found.weights, strict=True)
        if weight > 0
    )
    seen = int((found.scores[query] > -torch.inf).sum())
    total = f"Before rounding the weights sum to {found.weights.sum():.2f}."
    return f"“{words[query]}” sees {seen} of {len(words)} words: {listed}. {total}"


def draw_lookup(query: int = 4, scale: float = 0.5, causal: bool = True) -> Picture:
    """The grid of scores with one query's row lit, the weights of that row, and the mixture they
    give."""
    words, *_ = sentence()
    found = look_up(query, scale, causal)
    hidden = ~torch.isfinite(found.scores)
    figure, axes = new_figure(9.2, 3.5, columns=3, width_ratios=[1.15, 1.3, 0.75])
    # fixed margins: faster, and nothing jumps when the query changes
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.08, right=0.975, top=0.82, bottom=0.14, wspace=0.17)
    scores, weights, output = axes[0]

    grid(
        scores,
        found.scores.masked_fill(hidden, 0).numpy(),
        colour="query",
        largest=8.0,
        hidden=hidden.numpy(),
    )
    # Borders, or a score of 0 would be white on white; two collections of lines draw faster than a
    # grid of 14 minor ticks.
    scores.set_xticks([], minor=True)
    scores.set_yticks([], minor=True)
    edges, ends = [i - 0.5 for i in range(len(words) + 1)], (-0.5, len(words) - 0.5)
    scores.vlines(edges, *ends, color=PALETTE["masked"], linewidth=0.8)
    scores.hlines(edges, *ends, color=PALETTE["masked"], linewidth=0.8)
    # `add_artist`, not `add_patch`: the limits are set, and widening them for each patch takes
    # time.
    for row in range(len(words)):
        if row != query:
            scores.add_artist(
                Rectangle(
                    (-0.5, row - 0.5),
                    len(words),
                    1,
                    color=SURFACE,
                    alpha=0.5,
                    linewidth=0,
                    zorder=3,
                )
            )
    scores.add_artist(
        Rectangle(
            (-0.48, query - 0.48),
            len(words) - 0.04,
            0.96,
            fill=False,
            edgecolor=PALETTE["query"],
            linewidth=2,
            zorder=4,
        )
    )
    for j in torch.nonzero(~hidden[query]).flatten().tolist():
        scores.text(
            j,
            query,
            f"{found.scores[query, j]:.1f}",
            ha="center",
            va="center",
            fontsize=8,
            color=PALETTE["text"],
        )
    scores.set_xticks(range(len(words)), words, fontsize=8)
    scores.set_yticks(range(len(words)), words)
    scores.set_ylabel("query: what the word looks for", fontsize=9)
    scores.set_xlabel("key: what the word offers", fontsize=9)
    scores.set_title("scaled scores (grey: hidden)", fontsize=10, y=1)

    _bars(
        weights,
        found.weights,
        words,
        "key",
        f"weights of “{words[query]}”, sum {found.weights.sum():.2f}",
    )
    for j in torch.nonzero(hidden[query]).flatten().tolist():
        weights.get_xticklabels()[j].set_color(PALETTE["faint"])
        weights.texts[j].set(text="hidden", color=PALETTE["faint"])
    _bars(output, found.output, MEANINGS, "value", f"mixed values, sum {found.output.sum():.2f}")
    empty = [
        f"“{word}”"
        for word, weight, value in zip(words, found.weights, sentence()[3], strict=True)
        if weight > 0 and not value.any()
    ]
    if empty:  # then the mixture sums to less than the weights do
        output.set_xlabel(
            f"{' and '.join(empty)} {'hand' if len(empty) > 1 else 'hands'} over zeros",
            fontsize=8,
            loc="right",
        )
    return Picture(figure, _finding(query, found))


def _finding(query: int, found: Lookup) -> str:
    """Where most of a query's weight goes, ties told as ties."""
    words = sentence()[0]
    top = found.weights.max().item()
    best = [
        f"“{word}”"
        for word, weight in zip(words, found.weights.tolist(), strict=True)
        if top - weight < 1e-6
    ]
    seen = int((found.scores[query] > -torch.inf).sum())
    if len(best) == seen > 1:
        return f"“{words[query]}” looks for nothing and weighs the {seen} words it sees alike"
    each = " each" if len(best) > 1 else ""
    return f"“{words[query]}” gives {top:.0%} of its weight{each} to {' and '.join(best)}"


def _bars(
    axis, heights: Tensor, names: list[str] | tuple[str, ...], colour: str, title: str
) -> None:
    """Bars from 0 to 1 with their values on top."""
    axis.bar(range(len(names)), heights.tolist(), color=PALETTE[colour], width=0.7)
    for i, height in enumerate(heights.tolist()):
        axis.text(i, height + 0.02, f"{height:.2f}", ha="center", fontsize=8, color=PALETTE["text"])
    axis.set_ylim(0, 1.12)
    axis.set_yticks([0, 0.5, 1])
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_title(title, fontsize=10, y=1)


def lookup_panel() -> Panel:
    """Choose the query; see its weights. The scale and the mask can be switched."""
    words = sentence()[0]

    def render(query: str, scale: float, causal: bool) -> tuple[Picture, str]:
        chosen = (words.index(query), scale, causal)
        return draw_lookup(*chosen), describe(*chosen)

    return panel(
        "one query and its weights",
        render,
        query=ipywidgets.SelectionSlider(options=words, value="she", description="query"),
        scale=ipywidgets.ToggleButtons(
            options=list(SCALES.items()), value=0.5, description="scale"
        ),
        causal=ipywidgets.Checkbox(value=True, description="causal mask", indent=False),
    )


# -- what the scale is for --


def largest_weight(D: int, scale: float, keys: int = 16, rows: int = 2000) -> float:
    """The largest of a query's `keys` weights, averaged over `rows` random queries and keys of
    width `D`."""
    generator = torch.Generator().manual_seed(D)
    q = torch.randn(rows, D, generator=generator)
    k = torch.randn(rows, keys, D, generator=generator)
    scores = scale * torch.einsum("rd,rjd->rj", q, k)
    return dense_attention.softmax(scores).amax(-1).mean().item()


def draw_scale(widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)) -> Picture:
    """The average largest weight against the width of the vectors, for three powers of D as the
    scale."""
    figure, axes = new_figure(6.4, 3.2)
    axis = axes[0, 0]
    last = []
    for power, colour, name in (
        (0, "query", "not scaled"),
        (-0.5, "selected", "scaled by 1/√D"),
        (-1, "value", "scaled by 1/D"),
    ):
        heights = [largest_weight(D, D**power) for D in widths]
        last.append(heights[-1])
        axis.plot(widths, heights, "o-", color=PALETTE[colour], linewidth=2, markersize=4)
        axis.annotate(name, (widths[-1], heights[-1]), xytext=(0, 8), textcoords="offset points",
        ha="right", fontsize=9,
                      color=PALETTE[colour])  # fmt: skip
    axis.axhline(1 / 16, color=PALETTE["faint"], linewidth=1, linestyle="--")
    axis.text(
        widths[0],
        1 / 16 - 0.015,
        "all 16 weights equal",
        fontsize=8,
        va="top",
        color=PALETTE["text"],
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(D) for D in widths])
    axis.set_ylim(0, 1)
    axis.set_xlabel("D, width of queries and keys", fontsize=9)
    axis.set_ylabel("largest of 16 weights (average)", fontsize=9)
    none, root, full = last
    return Picture(
        figure,
        f"At D = {widths[-1]} one key takes {none:.0%} of the weight; with 1/√D {root:.0%}, with "
        f"1/D {full:.0%}",
    )


# -- what the score matrix weighs --


def sizes(N: int, D: int = 128, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of one head's score matrix, and of its q, k, v and o together, for `N` tokens."""
    return N * N * itemsize, 4 * N * D * itemsize


def draw_cost(lengths: tuple[int, ...] = tuple(2**i for i in range(10, 18))) -> Picture:
    """Sizes against the number of tokens, both axes logarithmic: a line twice as steep is a
    square."""
    figure, axes = new_figure(7.4, 3.4)
    axis = axes[0, 0]
    for part, colour, name in (
        (0, "query", "scores, N × N"),
        (1, "selected", "q, k, v and o, 4 · N × 128"),
    ):
        heights = [sizes(N)[part] / GIB for N in lengths]
        axis.plot(lengths, heights, "o-", color=PALETTE[colour], linewidth=2, markersize=4)
        axis.annotate(name, (lengths[-1], heights[-1]), xytext=(6, -3), textcoords="offset points",
        fontsize=9,
                      color=PALETTE[colour], annotation_clip=False)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 6)
    axis.set_xticks(lengths, [f"{N // 1024}k" for N in lengths])
    ticks = [2.0**i for i in range(-10, 6, 3)]
    axis.set_yticks(ticks, [f"1/{round(1 / t)}" if t < 1 else f"{t:.0f}" for t in ticks])
    axis.set_xlabel("N, tokens (k = 1024)", fontsize=9)
    axis.set_ylabel("GiB for one head, 2 bytes each", fontsize=9)
    N = 65536
    scores, rest = sizes(N)
    for size, colour, label in (
        (scores, "query", f"{scores / GIB:.0f} GiB at {N:,}"),
        (rest, "selected", f"{rest / 2**20:.0f} MiB"),
    ):
        axis.plot(
            N,
            size / GIB,
            "o",
            markersize=10,
            fillstyle="none",
            markeredgewidth=1.5,
            color=PALETTE["text"],
        )
        axis.annotate(label, (N, size / GIB), xytext=(-9, 5), textcoords="offset points",
        ha="right", fontsize=9,
                      color=PALETTE[colour])  # fmt: skip
    return Picture(
        figure,
        f"At {N:,} tokens one head's scores take {scores / GIB:.0f} GiB, {scores // rest} times "
        "its q, k, v and o",
    )
