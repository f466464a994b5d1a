"""Pictures of chapter 18 that were measured on several GPUs, by
`nsa_tutorial.training.many_gpus.record`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.many_gpu_costs import ASSETS
from nsa_tutorial.training.many_gpus.record_timeline import (
    Interval,
    is_communication,
    length_of,
    union,
)

FILE = ASSETS / "many_gpus.json"
CUTS = ("contiguous", "zigzag")


@functools.cache
def recording(path: Path = FILE) -> dict:
    """The file."""
    return json.loads(path.read_text(encoding="utf-8"))


def rows(kind: str, **asked: object) -> list[dict]:
    """The rows of a kind that have these values."""
    found = (row for row in recording()["rows"] if row["kind"] == kind)
    return [row for row in found if all(row[key] == value for key, value in asked.items())]


def told() -> str:
    """What the recording is."""
    data, (row, *_) = recording(), rows("speed")
    shape = data["shape"]
    return (
        f"{data['machine']}, PyTorch {data['torch']}, Triton {data['triton']}: {row['tokens']:,} "
        f"tokens, {shape['query_heads']} query heads over {shape['kv_heads']} KV heads, "
        f"{shape['dtype']}"
    )


def speed(cut: str | None, queries: str = "random") -> dict:
    """The time of a cut, or of one GPU."""
    return rows("speed", cut=cut, queries=queries)[0]


def draw_speed() -> Picture:
    """Milliseconds of one GPU and of two, by both cuts."""
    figure, axes = new_figure(8.4, 2.5, columns=2)
    names = {None: ("one GPU", "key"), "contiguous": ("two, contiguous", "masked"),
             "zigzag": ("two, zigzag", "selected")}  # fmt: skip
    for axis, queries in zip(axes[0], ("random", "smooth"), strict=True):
        for y, (cut, (_, colour)) in enumerate(names.items()):
            row = speed(cut, queries)
            axis.barh(y, row["ms"], 0.62, color=PALETTE[colour])
            faster = speed(None, queries)["ms"] / row["ms"]
            text = f" {row['ms']:.0f} ms" + (f", {faster:.2f}×" if cut else "")
            axis.text(row["ms"], y, text, va="center", fontsize=9)
        axis.set_yticks(range(3), [name for name, _ in names.values()], fontsize=9)
        axis.set(ylim=(2.6, -0.6), xlim=(0, 1.3 * speed(None, queries)["ms"]))
        axis.set_xlabel(f"ms, forward and backward, {queries} queries")
    zigzag, contiguous = (speed(cut)["efficiency"] * 2 for cut in ("zigzag", "contiguous"))
    return Picture(
        figure,
        f"Two GPUs with a zigzag are {zigzag:.2f} times as fast as one, with a contiguous cut "
        f"{contiguous:.2f} times (random queries)",
    )


# -- the timeline --


def intervals(row: dict, communicates: bool) -> list[Interval]:
    """Milliseconds in which a rank computed, or in which a journey was under way."""
    found = [
        (start / 1e3, (start + length) / 1e3)
        for name, _, start, length in row["events"]
        if is_communication(row["names"][name]) == communicates
    ]
    return union(found)


def idle_share(cut: str) -> float:
    """The share of the time in which a rank computed nothing, compared with the busiest one."""
    busy = [length_of(intervals(row, False)) for row in rows("timeline", cut=cut)]
    return 1 - sum(busy) / (len(busy) * max(busy))


def losses() -> list[str]:
    """Why two GPUs with a zigzag are not twice as fast, as lines."""
    ranks = rows("timeline", cut="zigzag")
    busy = " and ".join(f"{row['compute_ms']:.0f}" for row in ranks)
    left = " and ".join(f"{row['communication_ms'] - row['hidden_ms']:.1f}" for row in ranks)
    return [
        f"half of one GPU's time: {speed(None)['ms'] / 2:.0f} ms; with a zigzag, the ranks compute "
        f"for {busy} ms",
        f"travel that is not hidden: {left} ms",
    ]


def draw_timeline() -> Picture:
    """What each rank did when, for both cuts."""
    figure, axes = new_figure(8.8, 3.1, rows=2)
    for axis, cut in zip(axes[:, 0], CUTS, strict=True):
        labels = []
        for row in rows("timeline", cut=cut):
            for what, colour in ((False, "selected"), (True, "query")):
                axis.broken_barh(
                    _bars(intervals(row, what)), (len(labels) - 0.4, 0.8), color=PALETTE[colour]
                )
                labels.append(f"rank {row['rank']} {'travels' if what else 'computes'}")
        axis.set_yticks(range(len(labels)), labels, fontsize=8.5)
        axis.set(ylim=(len(labels) - 0.5, -0.5), xlim=(0, _last() * 1.01))
        axis.set_title(cut, fontsize=9.5, loc="left")
    axes[1, 0].set_xlabel("ms of one forward and backward, under the profiler")
    ranks = rows("timeline", cut="zigzag")
    hidden = sum(r["hidden_ms"] for r in ranks) / sum(r["communication_ms"] for r in ranks)
    return Picture(
        figure,
        f"Contiguous, rank 0 waits for the other; with a zigzag, {hidden:.0%} of what travels is "
        "hidden behind computing",
    )


def _bars(found: Sequence[Interval]) -> list[tuple[float, float]]:
    return [(start, end - start) for start, end in found]


def _last() -> float:
    return max(end for row in rows("timeline") for end in (intervals(row, False)[-1][1],))


# -- bytes, lists, lengths --


def agreements() -> list[str]:
    """What was counted beside what was measured, as lines."""
    bytes_right = all(
        rank[way] == {name: size for name, size in rank["by_hand"][way].items() if size}
        or rank[way] == rank["by_hand"][way]
        for row in rows("bytes")
        for rank in row["ranks"]
        for way in ("forward", "backward")
    )
    lists = rows("lists")
    different, number = (sum(row[key] for row in lists) for key in ("different", "lists"))
    longest = {
        gpus: max(row["tokens"] for row in rows("longest", gpus=gpus) if row["fits"])
        for gpus in sorted({row["gpus"] for row in rows("longest")})
    }
    return [
        f"bytes that each rank sent are those counted by hand: {bytes_right}",
        f"lists that differ from those of one GPU: {different} of {number:,}",
        *(f"longest text tried whose gradients fit on {gpus} {'GPU' if gpus == 1 else 'GPUs'}: "
          f"{tokens:,} tokens" for gpus, tokens in longest.items()),
    ]  # fmt: skip
