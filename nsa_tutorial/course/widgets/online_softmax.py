"""Chapter 03's pictures: what a group's scores take beside what a multiprocessor holds; and a row
of scores read chunk by chunk, with what its exponents are measured from and the denominator so far.

`draw_sizes` is the first. Of the second, `walk` computes, in fp32 as a kernel does; `draw_stream`
draws one moment of it; `limit` is what the reader finds out by moving it (`moving/softmax.js`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, readable_on
from nsa_tutorial.course.sheet import Chart, Place, Sheet

CHUNK = 4  # keys
SCORES = (
    *(2, 4, 1, 3),
    *(3, 5, 2, 4),
    *(1, 3, 4, 2),
    *(6, 7, 4, 5),
    *(3, 2, 5, 4),
    *(7, 6, 8, 5),
)  # in log2 units: scale_log2 is 1
CHUNKS = len(SCORES) // CHUNK
REFERENCES = ("running max", "chunk's own max", "no max")
HIGHEST_LIFT = 160  # log2 units
# One multiprocessor of an H100 (NVIDIA's Hopper tuning guide).
ON_CHIP_KIB = {"shared memory": 228, "registers": 256}
_UNBROKEN = 10  # a lift up to which one axis shows all scores


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
        p = torch.exp2(acc_s - scores_max)
        parts = torch.cat([parts * scores_scale, p.sum()[None]])
        running_sum = running_sum * scores_scale + p.sum()
        acc_o = acc_o * scores_scale + p @ values
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
    power of two. Its exponent is cut, not rounded: what fp32 holds stays below 2^128."""
    if math.isnan(x):
        return "NaN"
    if 999.5 <= abs(x) < 1e4:
        return f"{x:.0f}"
    if math.isinf(x) or x == 0 or 1e-4 < abs(x) < 1e4:
        return f"{x:.3g}"
    exponent = math.trunc(10 * math.log2(x)) / 10
    return f"2^{exponent:g}"


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
            "chunk's own max": "With each chunk's own max",
            "no max": "With no max subtracted",
        }[reference]
        lost = "acc_o" if math.isfinite(last.running_sum) else "running_sum"
        return (
            f"{where}, {after} {lost} is {number(getattr(last, lost))} in fp32, and o is "
            f"{number(last.o)}, not {number(last.exact)}"
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


def draw_sizes(M: int = 65_536, rows: int = 16, chunk: int = 64) -> Picture:
    """The scores of `rows` rows of `M` keys in fp32, the memory of one multiprocessor, and the
    scores of one chunk, as bars of one scale."""
    scores, part = (4 * rows * keys / 1024 for keys in (M, chunk))  # KiB
    on_chip = sum(ON_CHIP_KIB.values())
    sheet = Sheet(8.2, 2.1)
    inches = 7.6 / scores
    held = " and ".join(f"{size} KiB of {name}" for name, size in ON_CHIP_KIB.items())
    bars = [
        (scores, "key", f"scores of {rows} rows, {M:,} keys each: {scores / 1024:.0f} MiB in fp32"),
        (on_chip, "selected", f"one multiprocessor of an H100 (Hopper tuning guide): {held}"),
        (part, "query", f"scores of {rows} rows, one chunk of {chunk} keys: {part:.0f} KiB"),
    ]
    for i, (size, colour, told) in enumerate(bars):
        top = 0.62 + 0.54 * i
        sheet.words([(0.3, top - 0.11, told)], size=9.5, ha="left")
        sheet.boxes([(0.3, top, max(size * inches, 0.02), 0.24)], colour)
    finding = (
        f"{rows} rows of scores take {scores / 1024:.0f} MiB and do not fit into {on_chip} KiB; "
        "a chunk of them does"
    )
    return Picture(sheet.figure, finding)


def draw_stream(step: int = CHUNKS, reference: str = "running max", lift: int = 0) -> Picture:
    """The row after `step` chunks: scores and what they are measured from above, the denominator
    after each chunk below.

    Blue was read before, orange is the chunk just read, grey is still to come. A bar of
    `running_sum` is cut into what each chunk contributes to it now. One that would leave the axis,
    marked by an arrow, is drawn at full height and cut in the right shares; one that is not finite
    is an empty frame. Where the first chunk is lifted far, the axis of the scores is broken.
    """
    scores, moments = row(lift), walk(row(lift), positions(), reference)[:step]
    sheet = Sheet(8.2, 4.35)
    keys = (-0.7, len(SCORES) - 0.3)
    top = sheet.chart(Place(0.7, 0.35, 7.4, 1.38), keys, (0, _heights(lift)[2]))
    _draw_scores(top, scores, moments, reference, lift)
    usual = max(m.running_sum for m in walk(row(lift), positions()))
    low = sheet.chart(Place(0.7, 2.2, 7.4, 1.3), keys, (0, 1.3 * usual))
    _draw_running_sum(low, moments)
    names = {
        "key": "read before (below: one piece per chunk)",
        "query": "just read",
        "masked": "not read yet",
    }
    if reference != "no max":
        names["text"] = "line: scores_max"
    sheet.legend(0.7, 4.215, names)
    return Picture(sheet.figure, finding(moments, reference))


def _heights(lift: int) -> tuple[Callable[[float], float], list[int], float]:
    """From a score to its place on the axis, the scores written beside it, and the axis' end.

    A first chunk lifted above the others by more than `_UNBROKEN` would flatten them: a break in
    the axis brings it nearer.
    """
    highest = max(SCORES)
    if lift <= _UNBROKEN:
        return lambda score: score, [0, 4, 8], max(highest, lift + 4) * 1.2
    return (
        lambda score: score if score <= highest else highest + 2 + score - lift,
        [0, 4, 8, lift + 2],
        highest + 8,
    )


def _draw_scores(
    chart: Chart, scores: Tensor, moments: list[Moment], reference: str, lift: int
) -> None:
    step, (place, marked, _) = len(moments), _heights(lift)
    kinds = ["key"] * (step - 1) + ["query"] + ["masked"] * (CHUNKS - step)
    tops = [place(score) for score in scores.tolist()]
    chart.boxes([(key - 0.35, 0, 0.7, y) for key, y in enumerate(tops)],
                [kind for kind in kinds for _ in range(CHUNK)])  # fmt: skip
    # every number at the foot of its bar, where no line is in its way
    feet = [(key, 0.0, f"{score:.0f}") for key, score in enumerate(scores.tolist())]
    # in a light ink on the bars just read, where such a bar is high enough for it
    is_light = [
        (step - 1) * CHUNK <= key < step * CHUNK and top > 0.08 * chart.y[1]
        for key, top in enumerate(tops)
    ]
    for light, ink in ((False, "text"), (True, readable_on("query"))):
        some = [foot for foot, is_it in zip(feet, is_light, strict=True) if is_it is light]
        chart.words(some, size=8, va="baseline", offset=(0, 1.5), colour=ink)
    if reference != "no max":
        lines = [place(m.scores_max) for m in moments]
        ends = [(c * CHUNK - 0.5, (c + 1) * CHUNK - 0.5) for c in range(step)]
        chart.lines([((x, y), (z, y)) for (x, z), y in zip(ends, lines, strict=True)],
                    "text", 1.6)  # fmt: skip
    chart.bottom(range(0, len(SCORES), CHUNK), name="key")
    chart.left([place(score) for score in marked], marked, "score, log2 units", away=0.39)
    if lift > _UNBROKEN:
        gap = max(SCORES) + 1.6
        chart.boxes([(chart.x[0], gap, CHUNK + 0.2, 0.5)], SURFACE, zorder=3)
        chart.words([(chart.x[0], gap + 0.25, "≈")], size=11, offset=(-0.5, 0))


def _draw_running_sum(chart: Chart, moments: list[Moment]) -> None:
    centres = [c * CHUNK + (CHUNK - 1) / 2 for c in range(CHUNKS)]
    height = chart.y[1]
    pieces: list[tuple[float, float, float, float]] = []
    colours, frames, sums = [], [], []
    for c, moment in enumerate(moments):
        left = centres[c] - 1.3
        if not math.isfinite(moment.running_sum):
            frames.append((left, 0, 2.6, 0.86 * height))
            sums.append((centres[c], 0.43 * height, number(moment.running_sum)))
            continue
        beyond = moment.running_sum >= height
        parts = np.array(moment.parts) * (0.86 * height / moment.running_sum if beyond else 1)
        bottoms = np.cumsum(parts) - parts
        pieces += [(left, y, 2.6, part) for y, part in zip(bottoms, parts, strict=True)]
        colours += ["key"] * c + ["query"]
        told = f"{number(moment.running_sum)}{' ↑' if beyond else ''}"
        sums.append((centres[c], parts.sum(), told))
    chart.boxes(pieces, colours, edgecolors=SURFACE, linewidths=0.8)
    chart.boxes(frames, "none", edgecolors=PALETTE["faint"], linewidths=1, linestyles="--")
    chart.words(sums, va="bottom", offset=(0, 2))
    steps = zip(centres, moments, strict=False)
    told = [(x, 0.0, f"× {number(m.scores_scale)}  + {number(m.parts[-1])}") for x, m in steps]
    chart.words(told, size=8.5, va="top", offset=(0, -16))
    chart.bottom(centres, [f"chunk {c + 1}" for c in range(CHUNKS)])
    meaning = (
        "× scores_scale: the old sum changes its unit (blue)     + scores_sum: the chunk's own "
        "terms (orange)"
    )
    chart.words([(sum(chart.x) / 2, 0.0, meaning)], va="top", offset=(0, -29))
    most = next(x for x in (1, 2, 3, 4, 5, 6) if 3 * x >= 0.7 * height)
    ticks = [x for x in (0, most, 2 * most, 3 * most) if x < height]
    chart.left(ticks, name="running_sum", away=0.39)
