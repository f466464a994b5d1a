"""Chapter 03's picture: a row of scores read chunk by chunk, what its exponents are measured from,
and the denominator so far.

`walk` computes, in fp32 as a kernel does; `draw_stream` draws one moment of it; `explore` puts
controls on it; `limit` is what the reader finds out with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.widgets import Panel, panel

CHUNK = 4  # keys
SCORES = (
    2,
    4,
    1,
    3,
    3,
    5,
    2,
    4,
    1,
    3,
    4,
    2,
    6,
    7,
    4,
    5,
    3,
    2,
    5,
    4,
    7,
    6,
    8,
    5,
)  # in log2 units: scale_log2 is 1
CHUNKS = len(SCORES) // CHUNK
REFERENCES = ("running max", "chunk's own max", "no max")
HIGHEST_LIFT = 160  # log2 units


@dataclass(frozen=True)
class Moment:
    """The state after a chunk.

    Attributes:
        scores_max: what the exponents are measured from; 0 where nothing is subtracted.
        scores_scale: the factor put on what was there before.
        parts: what each chunk read so far contributes to `running_sum`, in the chunks' order.
        running_sum, acc_o: denominator and numerator so far.
        exact: the true output over the keys read so far, from fp64.
    """

    scores_max: float
    scores_scale: float
    parts: tuple[float, ...]
    running_sum: float
    acc_o: float
    exact: float

    @property
    def o(self) -> float:
        """The output over the keys read so far, as far as fp32 still knows it."""
        return (torch.tensor(self.acc_o) / torch.tensor(self.running_sum)).item()


def row(lift: int = 0) -> Tensor:
    """The picture's 24 scores `[M]`, fp32, in log2 units, the first chunk lifted by `lift`.

    Chunk 3 has the largest score the first chunk has unlifted, 4: it lies `lift` below the first
    one, and no chunk lies lower.
    """
    scores = torch.tensor(SCORES, dtype=torch.float32)
    scores[:CHUNK] += lift
    return scores


def positions() -> Tensor:
    """The picture's values `[M]`: each key's number, so that the output is the mean position of
    what is attended to."""
    return torch.arange(len(SCORES), dtype=torch.float32)


def walk(scores: Tensor, v: Tensor, reference: str = "running max") -> list[Moment]:
    """Read `scores` `[M]` and `v` `[M]` by chunks of `CHUNK` keys, measuring exponents from
    `reference`.

    Args:
        scores: in log2 units, fp32.
        v: one value per key.
        reference: one of `REFERENCES`; only the first is safe.

    Returns:
        One `Moment` per chunk.
    """
    moments: list[Moment] = []
    scores_max, running_sum, acc_o = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)
    parts = torch.zeros(0)
    for first in range(0, len(scores), CHUNK):
        acc_s, values = scores[first : first + CHUNK], v[first : first + CHUNK]
        scores_max_prev = scores_max
        scores_max = {
            "running max": torch.maximum(scores_max_prev, acc_s.max()),
            "chunk's own max": acc_s.max(),
            "no max": torch.tensor(0.0),
        }[reference]
        # its reference is 0 from the start, and nothing is ever rescaled
        unmoved = reference == "no max"
        scores_scale = torch.tensor(1.0) if unmoved else torch.exp2(scores_max_prev - scores_max)
        acc_s = torch.exp2(acc_s - scores_max)
        parts = torch.cat([parts * scores_scale, acc_s.sum()[None]])
        running_sum = running_sum * scores_scale + acc_s.sum()
        acc_o = acc_o * scores_scale + acc_s @ values
        seen = slice(0, first + CHUNK)
        exact = torch.softmax(scores[seen].double() * math.log(2), 0) @ v[seen].double()
        moments.append(
            Moment(
                scores_max.item(),
                scores_scale.item(),
                tuple(parts.tolist()),
                running_sum.item(),
                acc_o.item(),
                exact.item(),
            )
        )
    return moments


def _right(moment: Moment) -> bool:
    return math.isclose(moment.o, moment.exact, rel_tol=1e-5, abs_tol=1e-5)


def number(x: float) -> str:
    """A number as the picture writes it: three digits (four, never 1e+03), huge or tiny ones as a
    power of two."""
    if math.isnan(x):
        return "NaN"
    if 999.5 <= abs(x) < 1e4:
        return f"{x:.0f}"
    if math.isinf(x) or x == 0 or 1e-4 < abs(x) < 1e4:
        return f"{x:.3g}"
    return f"2^{math.log2(x):.0f}"


def limit(reference: str) -> int:
    """The highest lift, up to `HIGHEST_LIFT`, at which the output is right after every chunk."""
    lifts = range(HIGHEST_LIFT + 1)
    failing = (
        lift for lift in lifts if not all(map(_right, walk(row(lift), positions(), reference)))
    )
    return next(failing, HIGHEST_LIFT + 1) - 1


def sentence(step: int, reference: str = "running max", lift: int = 0) -> str:
    """What there is to say after `step` chunks (1 to `CHUNKS`)."""
    moment = walk(row(lift), positions(), reference)[step - 1]
    if reference == "no max":
        told = "nothing subtracted, "
    else:
        told = (
            f"scores_max {number(moment.scores_max)}, scores_scale {number(moment.scores_scale)}, "
        )
    told += (
        f"running_sum {number(moment.running_sum)}, acc_o {number(moment.acc_o)}, so o = "
        f"{number(moment.o)}"
    )
    told = f"After chunk {step} of {CHUNKS}: {told}"
    if _right(moment):
        return f"{told}, which is right."
    return (
        f"{told}, and {number(moment.exact)} would be right: something passed 2^128, where "
        "fp32 ends."
    )


def finding(moments: list[Moment], reference: str) -> str:
    """What the picture of these moments shows."""
    last, after = moments[-1], f"after chunk {len(moments)}"
    if not _right(last):
        where = {
            "chunk's own max": "Measured from each chunk's own max",
            "no max": "With no max subtracted",
        }[reference]
        lost = "acc_o" if math.isfinite(last.running_sum) else "running_sum"
        return (
            f"{where}, {after} {lost} is {number(getattr(last, lost))} in fp32, and o is "
            f"{number(last.o)}"
        )
    rises = sum(m.scores_scale < 1 for m in moments[1:])
    if reference == "no max":
        told = "With no max subtracted, sums grow with the scores"
    elif reference == "chunk's own max":
        told = "Measured from each chunk's own max, old sums shrink and grow"
    elif len(moments) == 1:
        told = "One chunk, measured from its largest score"
    elif not rises:
        told = "While the maximum stays, the old sum stays"
    else:
        told = "Each time the maximum rises, the old sum shrinks"
    return f"{told}: {after}, sum {number(last.running_sum)}"


def draw_stream(step: int = CHUNKS, reference: str = "running max", lift: int = 0) -> Picture:
    """The row after `step` chunks: scores and what they are measured from above, the denominator
    after each chunk below.

    Blue was read before, orange is the chunk just read, grey is still to come. A bar of
    `running_sum` is cut into what each chunk contributes to it now. One that would leave the axis,
    marked by an arrow, is drawn at full height and cut in the right shares; one that is not finite
    is an empty frame.
    """
    scores, moments = row(lift), walk(row(lift), positions(), reference)[:step]
    figure, axes = new_figure(8.0, 4.9, rows=2, height_ratios=(1, 1.1))
    figure.set_layout_engine(None)  # fixed places: nothing jumps under the slider, and it is faster
    figure.subplots_adjust(left=0.08, right=0.985, top=0.91, bottom=0.225, hspace=0.45)
    top, bottom = axes[:, 0]
    _draw_scores(top, scores, moments, reference)
    _draw_running_sum(bottom, moments, max(m.running_sum for m in walk(row(lift), positions())))
    for axis in (top, bottom):
        axis.set_xlim(-0.7, len(SCORES) - 0.3)
        # the numbers stand at the bars; every tick costs time
        axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    handles = [
        Patch(color=PALETTE["key"], label="read before (below: one piece per chunk)"),
        Patch(color=PALETTE["query"], label="just read"),
        Patch(color=PALETTE["masked"], label="not read yet"),
    ]
    if reference != "no max":
        handles.append(Line2D([], [], color=PALETTE["text"], linewidth=1.6, label="scores_max"))
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=9, frameon=False)
    return Picture(figure, finding(moments, reference))


def _bars(
    axis: Axes, centres: Sequence[float], width: float, bottoms: Sequence[float],
    heights: Sequence[float], colours: Sequence[str],
    **style: object,
) -> None:  # fmt: skip
    """`axis.bar` as one collection, which is faster under a slider than a patch for each bar."""
    edges = [(x - width / 2, x + width / 2) for x in centres]
    spans = zip(edges, bottoms, heights, strict=True)
    corners = [
        ((left, y), (right, y), (right, y + height), (left, y + height))
        for (left, right), y, height in spans
    ]
    axis.add_collection(PolyCollection(corners, facecolors=colours, **style), autolim=False)


def _draw_scores(axis: Axes, scores: Tensor, moments: list[Moment], reference: str) -> None:
    step = len(moments)
    chunk_colours = (
        [PALETTE["key"]] * (step - 1) + [PALETTE["query"]] + [PALETTE["masked"]] * (CHUNKS - step)
    )
    _bars(
        axis,
        range(len(SCORES)),
        0.7,
        [0.0] * len(SCORES),
        scores.tolist(),
        [c for c in chunk_colours for _ in range(CHUNK)],
    )
    height = scores.max().item() * 1.25 + 1
    # a bar of 2 beside one of 130 is a pixel high: write it down
    for key, score in enumerate(scores.tolist()):
        line = moments[key // CHUNK].scores_max if key // CHUNK < step else 0.0
        y, side = score + 0.02 * height, "bottom"
        # keep out of the line: into the bar, or above the line where the bar is low
        if score < line < score + 0.1 * height:
            y, side = (
                (score - 0.02 * height, "top")
                if score > 0.12 * height
                else (line + 0.02 * height, "bottom")
            )
        axis.text(
            key,
            y,
            f"{score:.0f}",
            ha="center",
            va=side,
            fontsize=7,
            color=PALETTE["text"],
            parse_math=False,
        )
    if reference != "no max":
        edges = [c * CHUNK - 0.5 for c in range(step)]
        axis.hlines(
            [m.scores_max for m in moments],
            edges,
            [e + CHUNK for e in edges],
            color=PALETTE["text"],
            linewidth=1.6,
        )
    axis.set_ylim(0, height)
    axis.set_xticks(range(0, len(SCORES), CHUNK))
    axis.set_xlabel("key", fontsize=9)
    axis.set_ylabel("score, log2 units", fontsize=9)


def _draw_running_sum(axis: Axes, moments: list[Moment], usual: float) -> None:
    centres = [c * CHUNK + (CHUNK - 1) / 2 for c in range(CHUNKS)]
    height = 1.3 * usual
    bars: list[tuple[float, float, float, str]] = []  # centre, bottom, height, colour of each piece
    for c, moment in enumerate(moments):
        if not math.isfinite(moment.running_sum):
            axis.bar(
                centres[c],
                0.86 * height,
                2.6,
                fill=False,
                edgecolor=PALETTE["faint"],
                linestyle="--",
            )
            axis.text(
                centres[c],
                0.43 * height,
                number(moment.running_sum),
                ha="center",
                va="center",
                fontsize=10,
            )
            continue
        beyond = moment.running_sum >= height
        pieces = np.array(moment.parts) * (0.86 * height / moment.running_sum if beyond else 1)
        colours = [PALETTE["key"]] * c + [PALETTE["query"]]
        bars += zip(
            [centres[c]] * (c + 1), np.cumsum(pieces) - pieces, pieces, colours, strict=True
        )
        told = f"{number(moment.running_sum)}{' ↑' if beyond else ''}"
        axis.text(
            centres[c],
            pieces.sum() + 0.02 * height,
            told,
            ha="center",
            va="bottom",
            fontsize=9,
            color=PALETTE["text"],
        )
    if bars:
        x, bottoms, heights, colours = zip(*bars, strict=True)
        _bars(axis, x, 2.6, bottoms, heights, colours, edgecolors="white", linewidths=0.8)
    steps = [f"× {number(m.scores_scale)}  + {number(m.parts[-1])}" for m in moments] + [""] * (
        CHUNKS - len(moments)
    )
    axis.set_xticks(centres, [f"chunk {c + 1}\n{step}" for c, step in enumerate(steps)])
    axis.set_xlabel(
        "× scores_scale: the old sum changes its unit (blue)     + scores_sum: the chunk's own "
        "terms (orange)",
        fontsize=9,
    )
    axis.set_ylabel("running_sum", fontsize=9)
    axis.set_ylim(0, height)


def explore() -> Panel:
    """The interactive: step through the chunks, switch stability off, lift the first chunk until
    something overflows."""

    def render(step: int, reference: str, lift: int) -> tuple[Picture, str]:
        return draw_stream(step, reference, lift), sentence(step, reference, lift)

    return panel(
        "softmax, chunk by chunk",
        render,
        step=ipywidgets.IntSlider(1, 1, CHUNKS, description="chunks read"),
        reference=ipywidgets.Dropdown(
            options=REFERENCES, value=REFERENCES[0], description="exponents measured from"
        ),
        lift=ipywidgets.IntSlider(
            0, 0, HIGHEST_LIFT, description="first chunk lifted by (log2 units)"
        ),
    )
