"""A picture of a run of the benchmark: `--plot`, or `python -m nsa_tutorial.bench plot`.

A panel for every shape, pass and kind of lists, with a bar for every kernel, and dense attention of
the same shape and pass among them. Panels have scales of their own: bars are compared within one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_tutorial.bench.measuring import Row
from nsa_tutorial.bench.stored import SIZES, Run, in_words, shared_columns

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colour-blind safe set; a change has the colour of its kernel, paler.
COLOURS = {
    "triton": "#0072B2",
    "triton, queries": "#56B4E9",
    "triton, tiles": "#009E73",
    "triton, blocks": "#CC79A7",
    "tilelang": "#E69F00",
    "reference": "#D55E00",
    "nsa_tutorial": "#0072B2",
    "eager": "#D55E00",
    "sdpa": "#E69F00",
}
DENSE = "#B4BAC0"
BAR, SPACE = 0.24, 0.75  # inches that a bar takes, and a panel without its bars
MOST_COLUMNS = 3
DENSE_PANEL = (*SIZES, "operator", "direction")  # what dense attention has in common with a panel
PANEL = (*DENSE_PANEL, "lists")


def save(run: Run, path: Path) -> None:
    """Draw a run to a `.png`, `.svg` or `.pdf` file.

    Raises:
        ValueError: for a run without rows.
    """
    draw(run).savefig(path, dpi=120)


def draw(run: Run) -> Figure:
    """The picture of a run. Each bar is a median, its whisker runs from the 20 % to the 80 %
    quantile, and beside it stands how many times as fast as dense attention the call is."""
    if not run.rows:
        raise ValueError("there is no row to draw")
    panels = _panels(run.rows)
    full = (n for n in range(2, MOST_COLUMNS + 1) if len(panels) % n == 0)
    columns = max(full, default=min(MOST_COLUMNS, len(panels)))
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [SPACE + BAR * max(map(len, line)) for line in lines]
    width = columns * (3.4 + 0.07 * max(len(label(row)) for row in run.rows))
    firsts = [rows[0] for rows in panels]
    shared = {x: y for x, y in shared_columns(firsts).items() if x in PANEL}
    title = _title(run, shared, width)
    height = sum(heights) + 0.2 * (1 + title.count("\n"))
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    for axis, rows in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, rows)
        different = {x: getattr(rows[0], x) for x in PANEL if x not in shared}
        axis.set_title(in_words(different), fontsize=9)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    return figure


def label(row: Row) -> str:
    """What a bar is called: the kernel with its order, or what was changed."""
    return row.change or _kernel(row)


def _panels(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each panel. Dense attention reads no lists, so it stands in every panel of its
    shape and pass."""

    def place(row: Row, names: Sequence[str]) -> tuple[object, ...]:
        return tuple(getattr(row, name) for name in names)

    panels: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if not _is_dense(row):
            panels.setdefault(place(row, PANEL), []).append(row)
    for row in filter(_is_dense, rows):
        beside = [p for p in panels.values() if place(p[0], DENSE_PANEL) == place(row, DENSE_PANEL)]
        for panel in beside or [panels.setdefault(place(row, PANEL), [])]:
            panel.append(row)
    return [*panels.values()]


def _is_dense(row: Row) -> bool:
    return row.kernel.startswith("dense")


def _title(run: Run, shared: dict[str, object], width: float) -> str:
    """What all panels have in common, then the machine and the versions."""
    versions = [f"{x} {run.facts[x]}" for x in ("torch", "triton", "tilelang") if run.facts.get(x)]
    machine = ", ".join(filter(None, (run.facts.get("machine"), *versions)))
    has_ratios = any(row.dense_ratio is not None for row in run.rows)
    ratios = "×: how many times as fast as dense attention" if has_ratios else ""
    text = (in_words(shared), machine, ratios)
    return "\n".join(textwrap.fill(line, int(13 * width)) for line in text if line)


def _draw_panel(axis: Axes, rows: Sequence[Row]) -> None:
    longest = max(max(row.ms or 0.0, row.ms_high or 0.0) for row in rows) or 1.0
    for y, row in enumerate(rows):
        ms = row.ms or 0.0
        colour = DENSE if _is_dense(row) else COLOURS.get(_kernel(row), COLOURS[row.kernel])
        alpha = 0.5 if row.change else 1.0
        hatch = "///" if row.is_right is False else None
        axis.barh(y, ms, height=0.75, color=colour, alpha=alpha, hatch=hatch, edgecolor="white")
        if row.ms_low is not None and row.ms_high is not None:
            axis.plot([row.ms_low, row.ms_high], [y, y], color="#1F2328", linewidth=1)
        end = max(ms, row.ms_high or 0.0) + 0.015 * longest
        axis.text(end, y, _beside(row), va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * longest)  # room for the text beside the longest bar
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _kernel(row: Row) -> str:
    return ", ".join(filter(None, (row.kernel, row.order)))


def _beside(row: Row) -> str:
    """The text beside a bar. A part of `native` does less than dense attention, so the two times
    have no ratio."""
    if row.ms is None:
        return f"did not run: {textwrap.shorten(row.note, 40, placeholder=' …')}"
    ratio = ""
    if row.dense_ratio is not None and not (row.operator == "native" and row.change):
        ratio = f", {float(f'{row.dense_ratio:.2g}'):g}×"
    return f"{row.ms:.3g} ms{ratio}{', wrong' if row.is_right is False else ''}"
