"""Pictures of chapter 00, and two measured times: the blocks that one query reads, a grid of
programs, which keys a short list of blocks lets each query see; and the map of the course.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from nsa_tutorial.course.chapters import CHAPTERS, PARTS, Chapter
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.speech import STYLE

_INK = "#46525E"  # of pictures that show no attention: away from the palette's meanings
_TINT = "#DDE3E9"
MEASURED = Path(__file__).resolve().parents[3] / "assets" / "triton_forward_h200.json"


def measured_ms() -> dict[str, float]:
    """Milliseconds on an H200, as `assets/` stores them: dense attention, and attention to 16
    blocks, of 65,536 tokens with 64 heads of width 128 in bf16."""
    rows = [
        row
        for row in json.loads(MEASURED.read_text())["rows"]
        if (row["tokens"], row["width"], row["slots"], row["change"]) == (65_536, 128, 16, "")
    ]
    ms = {row["kernel"]: row["ms"] for row in rows}
    return {"dense attention": ms["dense, cuDNN"], "16 blocks for each token": ms["triton"]}


def draw_program_grid(N: int, BN: int) -> Picture:
    """N numbers in memory, and the programs that take BN places each; places past the end are
    grey."""
    programs = -(-N // BN)
    figure, axes = new_figure(9.2, 2.1)
    axis = axes[0, 0]
    gap = 0.5  # places, between two programs
    axis.set(xlim=(-0.1, programs * (BN + gap) - gap + 0.1), ylim=(1.75, -0.95))
    axis.axis("off")
    for place in range(programs * BN):
        x, exists = place + gap * (place // BN), place < N
        face, ink = (_TINT, PALETTE["text"]) if exists else (PALETTE["masked"], _INK)
        axis.add_patch(Rectangle((x, 0), 1, 1, fc=face, ec="white", lw=2))
        text = f"{place}" if exists else f"{place}\nmasked"
        axis.text(x + 0.5, 0.5, text, ha="center", va="center", fontsize=10, color=ink)
    for program in range(programs):
        x = program * (BN + gap)
        style = "round,pad=0.06,rounding_size=0.1"
        axis.add_patch(FancyBboxPatch((x, 0), BN, 1, style, fc="none", ec=_INK, lw=1.6))
        axis.text(x, -0.4, f"program {program}", fontsize=10, weight="bold", color=_INK)
        axis.text(x, 1.5, f"{program} · {BN} + [0 … {BN - 1}]", fontsize=9.5, color=PALETTE["text"])
    past = programs * BN - N
    return Picture(
        figure,
        f"{programs} programs of {BN} places cover {N} numbers; {past} places are past the end",
    )


def draw_look_back(blocks: int = 1_024, listed: int = 16) -> Picture:
    """The blocks of a text before its newest token, a square each in reading order: those on the
    token's list (drawn at random, seeded), and the block of the token itself."""
    generator = torch.Generator().manual_seed(3)
    others = torch.randperm(blocks - 1, generator=generator)[: listed - 1]
    columns = 64
    figure, axes = new_figure(9.6, 3.2)
    axis = axes[0, 0]
    axis.set(xlim=(-0.2, columns + 0.1), ylim=(blocks // columns + 0.1, -0.2), aspect="equal")
    axis.axis("off")
    colours = dict.fromkeys(others.tolist(), "selected") | {blocks - 1: "own block"}
    for block in range(blocks):
        y, x = divmod(block, columns)
        colour = PALETTE[colours[block]] if block in colours else _TINT
        axis.add_patch(Rectangle((x, y), 0.86, 0.86, fc=colour))
    handles = [
        Patch(fc=PALETTE["selected"], label="a block that the newest token reads"),
        Patch(fc=PALETTE["own block"], label="its own block, read as well"),
        Patch(fc=_TINT, label="a block that it skips"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    return Picture(
        figure, f"Every square is a block of tokens: the newest token reads {listed} of them"
    )


_MAP_STYLE = (
    "<style>.nsa-map{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));"
    "gap:8px;margin:4px 0 14px}"
    ".nsa-card{border:1px solid var(--nsa-line);border-radius:6px;padding:6px 10px;"
    "background:var(--nsa-code);font-size:90%}"
    ".nsa-card a,.nsa-card b{display:block;font-weight:600}"
    ".nsa-later{background:transparent;border-style:dashed}</style>"
)


class CourseMap:
    """The chapters in their parts, each with its one idea; those that are here are links."""

    def __repr__(self) -> str:
        lines = []
        for part, chapters in self._parts():
            lines += [part, *(f"  {_numbered(c)}: {c.idea}" for c in chapters)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = "".join(
            f"<p><strong>{html.escape(part)}</strong></p>"
            f'<div class="nsa-map">{"".join(map(_card, chapters))}</div>'
            for part, chapters in self._parts()
        )
        return f'{STYLE}{_MAP_STYLE}<div class="nsa-said">{parts}</div>'

    def _parts(self) -> list[tuple[str, list[Chapter]]]:
        return [(name, [c for c in CHAPTERS if c.part == i]) for i, name in enumerate(PARTS)]


def _numbered(chapter: Chapter) -> str:
    return f"{chapter.number:02d} · {chapter.title.replace('gpus', 'GPUs')}"


def _card(chapter: Chapter) -> str:
    title, idea = html.escape(_numbered(chapter)), html.escape(chapter.idea)
    if chapter.is_ready:
        return f'<div class="nsa-card"><a href="{chapter.file}">{title}</a>{idea}</div>'
    return f'<div class="nsa-card nsa-later"><b>{title}</b>{idea} (in preparation)</div>'


def draw_selection(visible: torch.Tensor, block_size: int) -> Picture:
    """Which key each query of one head sees, its own block in another colour than the rest.

    Args:
        visible: boolean `[N, N]`, one sequence from its start.
        block_size: tokens per block; drawn as lines.
    """
    seen = visible.cpu().numpy()
    N = len(seen)
    past = np.tri(N, dtype=bool)
    block = np.arange(N) // block_size
    own = seen & (block[:, None] == block)
    figure, axes = new_figure(6.4, 5.6)
    axis = axes[0, 0]
    grid(axis, (seen & ~own).astype(float), colour="selected", largest=1.0, hidden=~past)
    layer = np.zeros((N, N, 4))
    layer[own] = to_rgba(PALETTE["own block"])
    axis.imshow(layer, aspect="equal")
    for edge in range(block_size, N, block_size):
        axis.axvline(edge - 0.5, color=PALETTE["text"], linewidth=0.7)
        axis.axhline(edge - 0.5, color=PALETTE["text"], linewidth=0.7)
    ticks = range(0, N, block_size)
    axis.set(
        xlabel=f"key position, in blocks of {block_size}",
        ylabel="query position",
        xticks=ticks,
        yticks=ticks,
    )
    handles = [
        Patch(fc=PALETTE["own block"], label="seen: in the query's own block"),
        Patch(fc=PALETTE["selected"], label="seen: in another listed block"),
        Patch(fc="white", ec=PALETTE["faint"], label="hidden: earlier, but on no list"),
        Patch(fc=PALETTE["masked"], label="hidden: later than the query"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    return Picture(
        figure,
        f"Of the {past.sum()} pairs without a list, {seen.sum()} are left "
        f"({seen.sum() / past.sum():.0%})",
    )
