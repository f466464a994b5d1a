"""Chapter 06's pictures: windows and the summaries a query sees, what a mean key knows of its
window, and what can be learnt.

`view`, `first_seen`, `logits_and_mass`, `shares`, `well_placed` and `error` compute;
`draw_windows`, `draw_needle`, `draw_heads`, `draw_costs` and `draw_errors` draw; `fit` learns a
summary's weights, and `errors_of_kinds` compares what was learnt; `explore` puts controls on the
windows. What is said of trained heads is computed from `heads.load()`, for windows of 16 tokens,
one every 8, unless told otherwise.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import ipywidgets
import torch
from torch import Tensor

from nsa_tutorial.course import costs
from nsa_tutorial.course import heads as stored
from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, new_figure
from nsa_tutorial.course.heads import Heads
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.threads import one_thread
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.sparse.compression import MLPWeights, compress, num_summaries

TOKENS = 65_536  # of the long example
LENGTHS, STRIDES = (4, 8, 16, 32), (2, 4, 8, 16, 32)
SHOWN = 96  # tokens in the panel
NEEDLE = (12, 450, 29)  # query head, query and window of the notebook's example
FIRST = 128  # the first query whose windows are compared: it sees fifteen of them
_SEEN, _HIDDEN, _PAST = PALETTE["compressed"], PALETTE["masked"], "#D3E9F7"


# -- what a query sees --


class View(NamedTuple):
    """What the query at a position sees of its past through summaries.

    Attributes:
        count: summaries that it sees.
        covered: how many tokens of its past are in at least one of them.
        newest: how many of the newest tokens, its own included, are in none of them.
    """

    count: int
    covered: int
    newest: int


def view(position: int, length: int, stride: int) -> View:
    """The summaries that end by `position`, and what they leave out."""
    count = num_summaries(position + 1, length, stride)
    if count == 0:
        return View(0, 0, position + 1)
    end = (count - 1) * stride + length  # one past the last token of the latest summary
    covered = end if stride <= length else count * length
    return View(count, covered, position + 1 - end)


def first_seen(token: int, length: int, stride: int) -> int | None:
    """The first position from which a visible summary contains `token`; None if no window does, as
    may be if `stride > length`."""
    window = max(-(-(token - length + 1) // stride), 0)  # the first one that reaches the token
    return window * stride + length - 1 if window * stride <= token else None


@functools.cache
def share_of_work(length: int, stride: int, tokens: int = TOKENS) -> float:
    """Scores against summaries for every score of causal dense attention."""
    return costs.summary_keys(tokens, tokens, length=length, stride=stride) / costs.visible_pairs(
        tokens, tokens
    )


def sentence(position: int, length: int, stride: int) -> str:
    """What there is to say about a query and a choice of windows."""
    seen = view(position, length, stride)
    told = f"The query at position {position} sees {_many(seen.count, 'summary', 'summaries')}"
    if seen.count == 0:
        told += f": the first one ends at position {length - 1}. Its output is 0."
    else:
        told += f"; {_newest(seen.newest)} in none of them" if seen.newest else ""
        told += (
            f", and {position + 1 - seen.covered - seen.newest} older ones fell between the windows"
            if stride > length
            else ""
        )
        told += "."
    return (
        f"{told} At {TOKENS:,} tokens, all keys would make "
        f"{1 / share_of_work(length, stride):.1f} times as many scores."
    )


def _many(n: int, one: str, more: str) -> str:
    return f"{n} {one if n == 1 else more}"


def _newest(n: int) -> str:
    return "the newest token is" if n == 1 else f"the newest {n} tokens are"


def draw_windows(M: int = 32, length: int = 8, stride: int = 4, position: int = 21) -> Picture:
    """The windows over `M` tokens and their summaries, those that the query at `position` sees in
    colour; below, what it misses."""
    seen, count = view(position, length, stride), num_summaries(M, length, stride)
    sheet = Sheet(8.2, 4.1)
    _draw_windows(sheet, Place(0.95, 0.36, 7.15, 2.12), M, length, stride, position)
    place = Place(0.95, 2.62, 7.15, 0.68)
    low = sheet.chart(place, (-0.7, M - 0.3), (0, 1.15 * max(length, stride)))
    _draw_newest(low, M, length, stride, position)
    for text, away in (("newest tokens", 0.65), ("in no summary", 0.5)):
        sheet.words([(place.left - away, place.y(0.5), text)], size=8, angle=90)
    names = {
        _SEEN: "the query sees it",
        _HIDDEN: "ends after the query",
        _PAST: "the query's past",
    }
    sheet.legend(0.95, 3.965, names)
    told = (
        f"At position {position} a query sees {seen.count} of "
        f"{_many(count, 'summary', 'summaries')}; "
    )
    told += f"{_newest(seen.newest)} in none" if seen.newest else "the last one ends right there"
    return Picture(sheet.figure, told)


def _draw_windows(
    sheet: Sheet, place: Place, M: int, length: int, stride: int, position: int
) -> None:
    """Tokens, the windows over them, row below row where they overlap, and their summaries."""
    count, visible = num_summaries(M, length, stride), view(position, length, stride).count
    rows = max(1, min(-(-length // stride), count))
    step, gap, windows_at = 0.9, 0.2 * max(1.0, M / 48), 1.5
    summaries_at = windows_at + step * rows + 0.9
    chart = sheet.chart(place, (-0.7, M - 0.3), (summaries_at + 1.3, -0.2))
    colours = [_PAST] * (position + 1) + [SURFACE] * (M - position - 1)
    boxes = [(token - 0.42, 0, 0.84, 1) for token in range(M)]
    chart.boxes(boxes, colours, edgecolors=PALETTE["faint"], linewidths=0.5)
    chart.boxes([boxes[position]], ["none"], edgecolors=PALETTE["text"], linewidths=2.0, zorder=3)
    if M <= 32:
        chart.words([(token, 0.5, str(token)) for token in range(M)], size=8)

    colours = [_SEEN if j < visible else _HIDDEN for j in range(count)]
    middles = [j * stride + (length - 1) / 2 for j in range(count)]
    tops = [windows_at + step * (j % rows) for j in range(count)]
    ends = [((x, top + 0.6), (x, summaries_at)) for x, top in zip(middles, tops, strict=True)]
    chart.lines(ends, colours, 0.9, zorder=0)
    starts = [j * stride - 0.5 + gap / 2 for j in range(count)]
    windows = [(x, top, length - gap, 0.6) for x, top in zip(starts, tops, strict=True)]
    wide = min(0.8 * stride, M / 40 + 0.6)
    summaries = [(x - wide / 2, summaries_at, wide, 1.1) for x in middles]
    chart.boxes([*windows, *summaries], 2 * colours)
    if stride >= M / 24:
        chart.words([(x, summaries_at + 0.55, str(j)) for j, x in enumerate(middles)], size=8)
    now = position + 0.5
    chart.lines([((now, -0.2), (now, summaries_at - 0.3))], "text", 1.2, linestyles="--")
    side = 1 if now < 0.75 * M else -1
    label = (now + side * 0.012 * M, 1.25, "the query's position")
    chart.words([label], size=8, ha="left" if side > 0 else "right")
    names = {
        "tokens": 0.5,
        "windows": windows_at + step * rows / 2 - 0.15,
        "summaries": summaries_at + 0.55,
    }
    chart.left(list(names.values()), list(names), line=False, size=9)


def _draw_newest(chart: Chart, M: int, length: int, stride: int, position: int) -> None:
    newest = [view(t, length, stride).newest for t in range(M)]
    corners = [(t + side, left) for t, left in enumerate(newest) for side in (-0.5, 0.5)]
    chart.lines([corners], "text", 1.2)
    chart.dots([(position, newest[position])], "text")
    chart.bottom(range(0, M, 5 if M < 48 else 10), name="position of the query, tokens")
    chart.left([0, max(length, stride)])


def explore() -> Panel:
    """The interactive: windows, the query's position, and what the query sees."""

    def render(length: int, stride: int, position: int) -> tuple[Picture, str]:
        return draw_windows(SHOWN, length, stride, position), sentence(position, length, stride)

    return panel(
        "windows and summaries",
        render,
        length=ipywidgets.SelectionSlider(
            options=LENGTHS, value=32, description="length of a window"
        ),
        stride=ipywidgets.SelectionSlider(options=STRIDES, value=16, description="stride"),
        position=ipywidgets.IntSlider(
            value=62, min=0, max=SHOWN - 1, description="query at position"
        ),
    )


# -- what a mean key knows --


def logits_and_mass(
    heads: Heads, length: int = 16, stride: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Every query's scaled scores in every window: their mean, and the logarithm of the mean of
    their exponentials.

    Returns:
        `mean` and `mass` `[HQ, N, M_c]`, and `visible`, bool `[N, M_c]`: the windows that end by
        the query.
    """
    k = heads.k[0].repeat_interleave(heads.G, dim=1)  # [N, HQ, D]
    scores = torch.einsum("ihd,jhd->hij", heads.q[0], k) * k.shape[-1] ** -0.5  # [HQ, N, N]
    windows = scores.unfold(2, length, stride)  # [HQ, N, M_c, length]
    N, M_c = windows.shape[1:3]
    visible = torch.arange(M_c) * stride + length <= torch.arange(1, N + 1)[:, None]
    return windows.mean(-1), windows.logsumexp(-1) - math.log(length), visible


def centred(x: Tensor, visible: Tensor) -> Tensor:
    """`x` `[..., N, M_c]` less each query's mean over the windows that it sees; 0 at those that it
    does not."""
    mean = (x * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return (x - mean) * visible


def shares(scores: Tensor, visible: Tensor) -> Tensor:
    """How a query's attention is divided among the windows that it sees, `[..., N, M_c]`; 0 for a
    query that sees none."""
    return scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num()


def well_placed(mean: Tensor, mass: Tensor, visible: Tensor, first: int = FIRST) -> Tensor:
    """How much of the attention by mean keys goes where the windows' weight puts it, `[HQ]`: for
    each window the smaller of its two shares, added up; the mean over the queries from `first` on.
    """
    both = torch.minimum(shares(mean, visible), shares(mass, visible))
    return both[:, first:].sum(-1).mean(-1)


def draw_needle(heads: Heads | None = None, beside: int = 8) -> Picture:
    """The needle's window: the scores of its tokens, and the shares of all windows that its query
    sees, by weight upwards and by mean key downwards."""
    heads = heads or stored.load()
    head, t, window = NEEDLE
    mean, mass, visible = (x[head, t] if x.ndim == 3 else x[t] for x in logits_and_mass(heads))
    by_weight, by_mean = (shares(x, visible)[visible] for x in (mass, mean))
    pair = [window, window + 1]  # the needle is in both
    begin, end = window * beside, (window + 1) * beside + 16
    scores = heads.q[0, t, head] @ heads.k[0, begin:end, head // heads.G].T
    scores = (scores * heads.k.shape[-1] ** -0.5).tolist()
    figure, axes = new_figure(8.4, 3.3, columns=2, width_ratios=(1, 1.15))
    left, right = axes[0]
    left.bar(range(begin, end), scores, 0.8, color=PALETTE["key"])
    letters = [heads.token(token) for token in range(begin, end)]
    left.set_xticks(range(begin, end), letters, fontsize=8, family="DejaVu Sans Mono")
    for place, j in enumerate(pair):
        height, start = -2.4 - 1.5 * place, j * beside
        left.plot([start - 0.4, start + 15.4], [height] * 2, color=_SEEN, linewidth=4)
        left.text(start + 7.5, height - 0.25, f"window {j}: mean score {mean[j]:.1f}", fontsize=8,
                  ha="center", va="top", color=PALETTE["text"])  # fmt: skip
    left.set_ylim(-5.2, max(scores) + 1)
    left.set_ylabel("score of a token", fontsize=9)
    left.axhline(0, color=PALETTE["line"], linewidth=0.8)
    colours = [_SEEN if j in pair else PALETTE["line"] for j in range(len(by_mean))]
    right.bar(range(len(by_mean)), 100 * by_weight, 0.9, color=colours)
    right.bar(range(len(by_mean)), -100 * by_mean, 0.9, color=colours)
    right.axhline(0, color=PALETTE["text"], linewidth=0.8)
    right.set_yticks([-20, 0, 20, 40], ["20 %", "0", "20 %", "40 %"])
    right.text(1, 30, "by weight", fontsize=9, color=PALETTE["text"])
    right.text(1, -24, "by mean key", fontsize=9, color=PALETTE["text"])
    right.set_ylim(-30, 52)
    right.set_xlabel("window", fontsize=9)
    right.set_ylabel("share of the attention", fontsize=9)
    told = [f"{100 * x[pair].sum():.0f} %" for x in (by_weight, by_mean)]
    return Picture(
        figure,
        f"By weight, windows {pair[0]} and {pair[1]} get {told[0]} of the attention, "
        f"by their mean keys {told[1]}",
    )


def draw_heads(heads: Heads | None = None) -> Picture:
    """For each query head, how much of the attention by mean keys is well placed."""
    heads = heads or stored.load()
    found = (100 * well_placed(*logits_and_mass(heads))).tolist()
    figure, axes = new_figure(8.0, 2.9)
    axis = axes[0, 0]
    colours = [_SEEN if head == NEEDLE[0] else PALETTE["line"] for head in range(len(found))]
    axis.bar(range(len(found)), found, 0.75, color=colours)
    for head, share in enumerate(found):
        axis.text(head, share + 1.5, f"{share:.0f}", ha="center", fontsize=8,
                  color=PALETTE["text"])  # fmt: skip
    places = [f"{label.split()[1]}.{label.split()[3]}" for label in heads.labels]
    axis.set_xticks(range(len(found)), places)
    axis.set_xlabel(
        f"layer.head of the trained model; in colour, query head {NEEDLE[0]} with the needle",
        fontsize=9,
    )
    axis.set_ylabel("well placed, per cent", fontsize=9)
    axis.set_ylim(0, 108)
    return Picture(
        figure,
        f"Mean keys put {min(found):.0f} to {max(found):.0f} % of the attention where the weight "
        "puts it",
    )


# -- what it costs --


def draw_costs(stride: int = 16, block_size: int = 64, top_n: int = 16) -> Picture:
    """Keys that a query reads on average, by length of the text: all, summaries, and listed."""
    lengths = [2**n for n in range(10, 18)]
    kinds = {
        "all keys": ("key", lambda N: costs.visible_pairs(N, N)),
        "summaries": ("compressed", lambda N: costs.summary_keys(N, N, stride=stride)),
        "listed keys": (
            "selected",
            lambda N: costs.selected_keys(N, N, block_size=block_size, top_n=top_n),
        ),
    }
    figure, axes = new_figure(8.0, 3.2)
    axis = axes[0, 0]
    reads = {}
    for name, (colour, count) in kinds.items():
        reads[name] = [count(N) / N for N in lengths]
        axis.plot(lengths, reads[name], "o-", color=PALETTE[colour], markersize=4)
        axis.text(1.07 * lengths[-1], reads[name][-1], f"{name}: {reads[name][-1]:,.0f}",
                  fontsize=9, va="center", color=PALETTE["text"])  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{N:,}" for N in lengths], fontsize=8)
    axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 3.2)
    axis.set_xlabel("tokens of the text", fontsize=9)
    axis.set_ylabel("keys a query reads, on average", fontsize=9)
    more = next(
        N for N, one, other in zip(lengths, reads["summaries"], reads["listed keys"], strict=True)
        if one > other
    )  # fmt: skip
    return Picture(
        figure, f"From {more:,} tokens on, a query reads more summaries than listed keys"
    )


# -- learning a summary --


class Task(NamedTuple):
    """Queries and windows of a stretch of text, and what a summary's score ought to be.

    Attributes:
        q: `[N, H, G, D]`.
        k: `[1, N, H, D]`.
        target: `[H, G, N, M_c]`, the logarithm of the mean of the exponentials of a window's
            scores.
        visible: bool `[N, M_c]`.
        length, stride: of the windows.
    """

    q: Tensor
    k: Tensor
    target: Tensor
    visible: Tensor
    length: int
    stride: int


def task(heads: Heads, first: int, last: int, stride: int, length: int = 16) -> Task:
    """Tokens `first … last - 1` as a task of their own: no query and no window is shared with
    another stretch."""
    part = Heads(
        heads.q[:, first:last],
        heads.k[:, first:last],
        heads.v[:, first:last],
        b"",
        heads.labels,
        {},
    )
    _, mass, visible = logits_and_mass(part, length, stride)
    q, target = part.q[0].unflatten(1, (-1, heads.G)), mass.unflatten(0, (-1, heads.G))
    return Task(q, part.k, target, visible, length, stride)


def error(of: Task, k_cmp: Tensor) -> Tensor:
    """Mean squared error of the summaries' scores, per KV head `[H]`.

    A constant added to all scores of a query changes no softmax: each query's mean error is taken
    out first.
    """
    scores = torch.einsum("nhgd,jhd->hgnj", of.q, k_cmp[0]) * of.q.shape[-1] ** -0.5
    off = centred(scores - of.target, of.visible)
    return off.square().sum((1, 2, 3)) / (of.visible.sum() * of.q.shape[2])


def mean_as(kind: str, length: int, H: int, D: int) -> tuple[Tensor, ...]:
    """Weights, one set per KV head, with which each learnt kind is the mean."""
    if kind == "weighted":
        return (torch.full((length, H), 1 / length),)
    linear = (torch.eye(D).repeat(length, 1) / length).repeat(H, 1, 1)  # [H, length * D, D]
    if kind == "linear":
        return (linear,)
    both = torch.cat([torch.eye(D), -torch.eye(D)]).repeat(H, 1, 1)  # gelu(x) - gelu(-x) = x
    return (
        torch.zeros(H, length, D),
        torch.cat([linear, -linear], 2),
        torch.zeros(H, 2 * D),
        both,
        torch.zeros(H, D),
    )


def as_weight(kind: str, parts: tuple[Tensor, ...]) -> Tensor | MLPWeights:
    """What `compress` takes for `weight`."""
    return MLPWeights(*parts) if kind == "mlp" else parts[0]


@one_thread()
def fit(of: Task, kind: str, steps: int = 60) -> Tensor | MLPWeights:
    """Start at the mean, and follow the gradient of the error (Adam); always the same result on the
    same machine."""
    H, D = of.k.shape[2:]
    parts = tuple(x.requires_grad_() for x in mean_as(kind, of.length, H, D))
    optimiser = torch.optim.Adam(parts, lr=1e-3 if kind == "weighted" else 1e-4)
    for _ in range(steps):
        k_cmp = compress(
            of.k, kind=kind, length=of.length, stride=of.stride, weight=as_weight(kind, parts)
        )
        optimiser.zero_grad()
        error(of, k_cmp).mean().backward()
        optimiser.step()
    return as_weight(kind, tuple(x.detach() for x in parts))


@one_thread()
def best_keys(of: Task, steps: int = 100) -> Tensor:
    """Summary keys that are made of nothing, only fitted, one for each window: no summary of any
    kind does better."""
    k_cmp = compress(of.k, length=of.length, stride=of.stride).requires_grad_()
    optimiser = torch.optim.Adam([k_cmp], lr=3e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        error(of, k_cmp).mean().backward()
        optimiser.step()
    return k_cmp.detach()


def errors_of_kinds(learn: Task, judge: Task) -> dict[str, tuple[float, float]]:
    """Fit each kind of summary to `learn`; its errors there and on `judge`, as `draw_errors` takes
    them."""
    rows = {}
    for kind in ("mean", "weighted", "linear", "mlp"):
        weight = None if kind == "mean" else fit(learn, kind)
        rows[kind] = tuple(
            error(
                of, compress(of.k, kind=kind, length=of.length, stride=of.stride, weight=weight)
            ).mean().item()
            for of in (learn, judge)
        )  # fmt: skip
    return rows


def draw_errors(rows: dict[str, tuple[float, float]]) -> Picture:
    """Errors of each kind on the windows it learnt from and on others.

    Args:
        rows: kind, `"mean"` among them, to (error where it learnt, error elsewhere).
    """
    figure, axes = new_figure(8.0, 2.6)
    axis = axes[0, 0]
    for place, (learnt, held_out) in enumerate(rows.values()):
        axis.barh(
            place - 0.19,
            learnt,
            0.34,
            color=PALETTE["masked"],
            label="windows it learnt from" if place == 0 else None,
        )
        axis.barh(
            place + 0.19, held_out, 0.34, color=_SEEN, label="other windows" if place == 0 else None
        )
        for offset, value in ((-0.19, learnt), (0.19, held_out)):
            axis.text(
                value + 0.002,
                place + offset,
                f"{value:.3f}",
                va="center",
                fontsize=8,
                color=PALETTE["text"],
            )
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(max(pair) for pair in rows.values()))
    axis.set_xlabel("mean squared error of a score", fontsize=9)
    axis.legend(fontsize=8, frameon=False, loc="center right")
    best = min(rows, key=lambda kind: rows[kind][1])
    less = {kind: 100 * (1 - row[1] / rows["mean"][1]) for kind, row in rows.items()}
    other = max([0, *(gain for kind, gain in less.items() if kind not in ("mean", best))])
    return Picture(
        figure,
        f"On new windows, {best!r} is best: {less[best]:.0f}% less error than the mean; "
        + (
            f"no other kind gains more than {math.ceil(other)}%" if other else "no other kind gains"
        ),
    )
