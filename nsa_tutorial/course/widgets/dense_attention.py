"""Pictures of chapter 01: the lookup of one query, what the scale is for, and what the score matrix
weighs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets
import torch
from matplotlib.colors import to_hex, to_rgb
from torch import Tensor

from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on, shades
from nsa_tutorial.course.sheet import Chart, Place, Sheet
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


def draw_sentence() -> Picture:
    """The table of the sentence: what each word looks for, offers and hands over."""
    words, q, k, v = sentence()
    offers = ("a person", "“she”", "“he”", "a deed")
    sheet = Sheet(8.2, 3.0)
    left = 0.85
    for name, table, columns, colour in (
        ("q: looks for", q, offers, "query"),
        ("k: offers", k, offers, "key"),
        ("v: hands over", v, MEANINGS, "value"),
    ):
        place = Place(left, 0.58, 0.6 * len(columns), 2.1)
        limits = (-0.5, len(columns) - 0.5), (-0.5, len(words) - 0.5)
        chart = sheet.chart(place, limits[0], limits[1][::-1])
        cells = [(i, j) for i in range(len(words)) for j in range(len(columns))]
        squares = [(j - 0.5, i - 0.5, 1, 1) for i, j in cells]
        tints = shades(colour)(table.flatten().numpy() / 4)
        chart.boxes(squares, tints, edgecolors=PALETTE["masked"], linewidths=0.8)
        chart.words([(j, i, int(table[i, j])) for i, j in cells], size=9)
        chart.title(name)
        chart.bottom(range(len(columns)), columns, size=8, line=False)
        if left < 1:
            chart.left(range(len(words)), words, line=False)
        left = place.x(1) + 0.3
    return Picture(sheet.figure, "Each word looks for something, offers something, hands over a "
                                 "meaning")  # fmt: skip


def draw_hero(query: int = 4) -> Picture:
    """The sentence, and threads from one word to those it sees, as wide as their weights."""
    words, found = sentence()[0], look_up(query)
    sheet = Sheet(8.2, 2.25)
    places = [0.75 + 1.34 * i for i in range(len(words))]
    baseline = 1.75
    for x, weight in zip(places[:query], found.weights.tolist(), strict=False):
        angles = [math.pi * i / 40 for i in range(41)]
        middle, radius = (x + places[query]) / 2, (places[query] - x) / 2
        arc = [(middle + radius * math.cos(a), baseline - 0.22 - 1.15 * (radius / 2.68)
                * math.sin(a)) for a in angles]  # fmt: skip
        sheet.lines([arc], "query", 0.8 + 9 * weight)
    inks = ["text" if i <= query else "faint" for i in range(len(words))]
    told = [(x, baseline, word) for x, word in zip(places, words, strict=True)]
    sheet.words(told, size=17, colour=inks)
    weights = [f"{w:.0%}" if i <= query else "hidden" for i, w in enumerate(found.weights.tolist())]
    told = [(x, baseline + 0.34, weight) for x, weight in zip(places, weights, strict=True)]
    inks = ["query" if i <= query else "faint" for i in range(len(words))]
    sheet.words(told, size=10, colour=inks)
    return Picture(sheet.figure, f"One lookup: {_finding(query, found)}")


# -- the letters of einsum --


def draw_letters() -> Picture:
    """`einsum("ihd,jhd->hij", q, k)`: the axes of the three tensors as boxes, a letter each."""
    sheet = Sheet(8.2, 2.75)
    meanings = {
        "h": "head: in all three, so one table each",
        "i": "query: stays, as rows",
        "j": "key: stays, as columns",
        "d": "channel: missing on the right, so summed",
    }
    colours = {"h": "line", "i": "query", "j": "key", "d": "masked"}
    size, top = 0.42, 0.72
    starts = {"ihd": 0.5, "jhd": 3.0, "hij": 6.1}
    names = {"ihd": "q [N, HQ, D]", "jhd": "k [M, HQ, D]", "hij": "scores [HQ, N, M]"}
    for letters, x in starts.items():
        boxes = [(x + size * i, top, size, size) for i in range(3)]
        tints = [PALETTE[colours[letter]] for letter in letters]
        sheet.boxes(boxes, tints, edgecolors="white", linewidths=2)
        sheet.words([(x + size * (i + 0.5), top + size / 2, c) for i, c in enumerate(letters)],
                    size=15, family="DejaVu Sans Mono",
                    colour=[readable_on(colours[c]) for c in letters])  # fmt: skip
        sheet.words([(x + 1.5 * size, top - 0.16, names[letters])], size=9.5)
    sheet.words([(2.38, top + size / 2, ","), (5.2, top + size / 2, "→")], size=18)
    for row, (letter, meaning) in enumerate(meanings.items()):
        y = top + 0.78 + 0.29 * row
        sheet.boxes([(0.5, y - 0.11, 0.22, 0.22)], [PALETTE[colours[letter]]])
        sheet.words([(0.61, y, letter)], size=9.5, family="DejaVu Sans Mono",
                    colour=[readable_on(colours[letter])])  # fmt: skip
        sheet.words([(0.85, y, meaning)], size=9.5, ha="left")
    return Picture(sheet.figure, "A letter that is missing on the right is summed; all others stay")


# -- one query's lookup --

SCALES = {"1/√D": 0.5, "1 (no scaling)": 1.0, "1/D": 0.25}
_HEIGHTS = (0, 1.12)  # of the axes with bars


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
    words, found = sentence()[0], look_up(query, scale, causal)
    sheet = Sheet(8.2, 3.35)
    edges = (-0.5, len(words) - 0.5)
    scores = sheet.chart(Place(0.82, 0.58, 2.25, 2.25), edges, edges[::-1])
    _draw_scores(scores, found.scores, words, query)
    kind = "scores" if scale == 1 else "scaled scores"
    scores.title(f"{kind} (grey: hidden)" if causal else kind)

    weights = sheet.chart(Place(3.6, 0.58, 2.45, 2.25), (-0.6, len(words) - 0.4), _HEIGHTS)
    seen = torch.isfinite(found.scores[query]).tolist()
    _bars(weights, found.weights, words, "key", seen)
    weights.title(f"weights of “{words[query]}”, sum {found.weights.sum():.2f}")

    place = Place(6.5, 0.58, 1.45, 2.25)
    output = sheet.chart(place, (-0.6, 2.6), _HEIGHTS)
    _bars(output, found.output, MEANINGS, "value", [True] * len(MEANINGS))
    output.title(f"mixed values, sum {found.output.sum():.2f}")
    sheet.text(place.x(1) + 0.06, place.y(1) + 0.26, missing(found), 8, ha="right", va="top")
    return Picture(sheet.figure, _finding(query, found))


def _draw_scores(chart: Chart, scores: Tensor, words: list[str], query: int) -> None:
    """The table; the rows of the other words are pale."""
    colours = shades("query")(scores.clamp(min=0, max=8).numpy() / 8)  # [N, M, 4]
    colours[~torch.isfinite(scores).numpy()] = (*to_rgb(PALETTE["masked"]), 1)
    others = [row for row in range(len(words)) if row != query]
    colours[others] = (1 + colours[others]) / 2
    places = torch.cartesian_prod(*2 * [torch.arange(len(words))]).tolist()
    squares = [(j - 0.5, i - 0.5, 1, 1) for i, j in places]
    # borders, or a score of 0 would be white on white
    chart.boxes(squares, colours.reshape(-1, 4), edgecolors=PALETTE["masked"], linewidths=0.8)
    lit = [(-0.48, query - 0.48, len(words) - 0.04, 0.96)]
    chart.boxes(lit, "none", edgecolors=PALETTE["query"], linewidths=2)
    told = [(j, x) for j, x in enumerate(scores[query].tolist()) if math.isfinite(x)]
    row = colours[query].reshape(-1, 4)
    inks = [readable_on(to_hex(row[j])) for j, _ in told]
    chart.words([(j, query, f"{x:.1f}") for j, x in told], size=8, colour=inks)
    at = range(len(words))
    chart.bottom(at, words, "key: what the word offers", line=False)
    chart.left(at, words, "query: what the word looks for", line=False, away=0.67)


def missing(found: Lookup) -> str:
    """Why a mixture sums to less than its weights: the words that hand over zeros."""
    words, _, _, v = sentence()
    empty = [
        f"“{word}”"
        for word, weight, value in zip(words, found.weights, v, strict=True)
        if weight > 0 and not value.any()
    ]
    if not empty:
        return ""
    return f"{' and '.join(empty)} {'hand' if len(empty) > 1 else 'hands'} over zeros"


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
    chart: Chart, heights: Tensor, names: Sequence[str], colour: str, seen: list[bool]
) -> None:
    """Bars from 0 to 1 with their values on top; a hidden one says so."""
    tops = heights.tolist()
    chart.boxes([(i - 0.35, 0, 0.7, top) for i, top in enumerate(tops)], colour)
    told = [(i, top, f"{top:.2f}" if seen[i] else "hidden") for i, top in enumerate(tops)]
    inks = ["text" if x else "faint" for x in seen]
    chart.words(told, size=8, colour=inks, va="bottom", offset=(0, 1))
    chart.left([0, 0.5, 1], ["0", "0.5", "1"])
    chart.bottom(range(len(names)), names, size=8)


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
        scale=ipywidgets.Dropdown(options=SCALES, value=0.5, description="scale"),
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
        (0, "text", "not scaled"),
        (-0.5, "query", "scaled by 1/√D"),
        (-1, "faint", "scaled by 1/D"),
    ):
        heights = [largest_weight(D, D**power) for D in widths]
        last.append(heights[-1])
        axis.plot(widths, heights, "o-", color=PALETTE[colour], linewidth=2, markersize=4)
        told = f"{name}: {heights[-1]:.0%}"
        axis.annotate(told, (widths[-1], heights[-1]), xytext=(0, 8), textcoords="offset points",
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
    return Picture(
        figure,
        f"Without a scale, one of 16 keys takes {last[0]:.0%} of the weight at D = {widths[-1]}",
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
        (1, "text", "q, k, v, o: 4 · N × 128"),
    ):
        heights = [sizes(N)[part] / GIB for N in lengths]
        axis.plot(lengths, heights, "o-", color=PALETTE[colour], linewidth=2, markersize=4)
        axis.annotate(name, (lengths[-1], heights[-1]), xytext=(6, -3), textcoords="offset points",
        fontsize=9,
                      color=PALETTE[colour], annotation_clip=False)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 7)
    axis.set_xticks(lengths, [f"{N // 1024}k" for N in lengths])
    ticks = [2.0**i for i in range(-10, 6, 3)]
    axis.set_yticks(ticks, [f"1/{round(1 / t)}" if t < 1 else f"{t:.0f}" for t in ticks])
    axis.set_xlabel("N, tokens (k = 1024)", fontsize=9)
    axis.set_ylabel("GiB for one head, 2 bytes each", fontsize=9)
    N = 65536
    scores, rest = sizes(N)
    for size, colour, label in (
        (scores, "query", f"{scores / GIB:.0f} GiB at {N:,}"),
        (rest, "text", f"{rest / 2**20:.0f} MiB"),
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
