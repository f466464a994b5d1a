"""NSA on one page: from a token to its output, through three branches and their gates.

Chapter 08 opens with the whole diagram. Its neighbours show it small, with one part in colour:
"you are here". The diagram has no numbers, and nothing here computes attention.
"""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch

from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, new_figure, readable_on

_INK = "#46525E"  # of parts that belong to no branch
_PALE = PALETTE["line"]  # of parts that another chapter is about


class _Part(NamedTuple):
    """A box of the diagram: its middle in inches, its width, what it says, and its colour."""

    x: float
    y: float
    width: float
    text: str
    colour: str
    chapter: str = ""


_HEIGHT = 0.5  # of a box, inches
_PARTS = {
    "token": _Part(0.55, 1.95, 0.8, "token\nx", _INK),
    "q": _Part(1.72, 1.55, 0.62, "q", "query"),
    "pair_compressed": _Part(1.72, 0.75, 0.62, "k, v", "compressed"),
    "pair_selected": _Part(1.72, 2.35, 0.62, "k, v", "selected"),
    "pair_window": _Part(1.72, 3.15, 0.62, "k, v", "window"),
    "summaries": _Part(3.35, 0.75, 1.5, "summarise windows:\nφ of k, φ of v", "compressed", "06"),
    "compressed": _Part(5.95, 0.75, 1.6, "attend to\nsummaries", "compressed", "06"),
    "choice": _Part(3.35, 1.95, 1.5, "choose blocks:\ntop n", "selected", "07"),
    "selected": _Part(5.95, 1.95, 1.6, "attend to\nlisted blocks", "selected", "05"),
    "window": _Part(5.95, 3.15, 1.6, "attend to\nthe latest tokens", "window", "05"),
    "gates": _Part(3.35, 3.95, 1.5, "gates from x:\nthree sigmoids", _INK, "08"),
    "sum": _Part(9.45, 1.95, 0.9, "sum\no", _INK, "08"),
}
# the pair of keys and values that a part reads
_PAIRS = {
    "pair_compressed": "summaries", "pair_selected": "selected", "pair_window": "window",
}  # fmt: skip
_ASKS = "compressed", "selected", "window"  # what q goes to
_GATES = {"compressed": "g_cmp", "selected": "g_slc", "window": "g_swa"}
_GATE_X, _GATE_SIZE = 7.95, 0.7
# What is in colour, and what the title says.
_HERE = {
    None: (set(_PARTS), "NSA: three branches read the past, and gates add them up"),
    "all": (
        set(_PARTS),
        "You are here: three branches with keys of their own, each with a gate, added up",
    ),
    "compression": (
        {"summaries", "compressed"},
        "You are here: windows of keys and values become summaries",
    ),
    "selection": ({"choice"}, "You are here: the summaries' weights choose the blocks to read"),
    "selected_attention": (
        {"selected", "window"},
        "You are here: attention to listed blocks, and to the latest tokens",
    ),
    "kernels": ({"selected", "window"}, "You are here: attention to short lists becomes a kernel"),
}
_SMALL = 0.74  # of the full size


def data_flow(here: str | None = None) -> Picture:
    """The diagram of NSA: x → q, and k, v of each branch → three branches → gates → sum, with the
    arrow from the summaries' weights to the list of blocks.

    Args:
        here: which part is in colour: "compression" (chapter 06), "selection" (07),
            "selected_attention" (05), "all" (08) or "kernels" (09 to 16). All but "all" are drawn
            small. None is the full diagram without "You are here".
    """
    if here not in _HERE:
        raise ValueError(f"here is {here!r}, expected one of {', '.join(map(repr, _HERE))}")
    named, finding = _HERE[here]
    lit = named | {pair for pair, user in _PAIRS.items() if user in named}
    size = 1.0 if len(lit) == len(_PARTS) else _SMALL
    figure, axes = new_figure(10.4 * size, 4.75 * size + 0.1)
    axis = axes[0, 0]
    axis.set(xlim=(0, 10.05), ylim=(4.4, 0.2))
    axis.axis("off")
    for part in _PARTS:
        _box(axis, part, part in lit, size)
    for part, gate in _GATES.items():
        _gate(axis, part, gate, part in lit, "gates" in lit, size)
    _arrows(axis, lit, size)
    return Picture(figure, finding)


def _box(axis: Axes, name: str, is_lit: bool, size: float) -> None:
    part = _PARTS[name]
    colour = PALETTE.get(part.colour, part.colour)
    left, top = part.x - part.width / 2, part.y - _HEIGHT / 2
    style = "round,pad=0,rounding_size=0.08"
    face, edge = (colour, colour) if is_lit else (SURFACE, _PALE)
    look = {"fc": face, "ec": edge, "lw": 1.2 * size}
    axis.add_patch(FancyBboxPatch((left, top), part.width, _HEIGHT, style, **look))
    ink = readable_on(colour) if is_lit else PALETTE["faint"]
    axis.text(part.x, part.y, part.text, ha="center", va="center", fontsize=9.5 * size, color=ink,
              linespacing=1.15)  # fmt: skip
    if part.chapter:
        axis.text(left, top - 0.05, f"chapter {part.chapter}", fontsize=8 * size, va="bottom",
                  color=PALETTE["text"] if is_lit else PALETTE["faint"])  # fmt: skip


def _gate(axis: Axes, part: str, text: str, is_branch: bool, is_gate: bool, size: float) -> None:
    y = _PARTS[part].y
    edge = _INK if is_gate else _PALE
    left, top = _GATE_X - _GATE_SIZE / 2, y - 0.19
    style = "round,pad=0,rounding_size=0.19"
    axis.add_patch(
        FancyBboxPatch((left, top), _GATE_SIZE, 0.38, style, fc=SURFACE, ec=edge, lw=1.2 * size)
    )
    ink = PALETTE["text"] if is_gate else PALETTE["faint"]
    axis.text(_GATE_X, y, f"× {text}", ha="center", va="center", fontsize=8.5 * size, color=ink)


def _query(axis: Axes, name: str, is_lit: bool, size: float) -> None:
    """A mark on a part that attends: it gets `q`."""
    part = _PARTS[name]
    x, y = part.x + part.width / 2 - 0.13, part.y - _HEIGHT / 2
    colour = PALETTE["query"] if is_lit else SURFACE
    edge = SURFACE if is_lit else _PALE
    axis.add_patch(Circle((x, y), 0.13, fc=colour, ec=edge, lw=1.0 * size, zorder=3))
    ink = readable_on(PALETTE["query"]) if is_lit else PALETTE["faint"]
    axis.text(x, y, "q", ha="center", va="center", fontsize=8 * size, color=ink, zorder=4)


def _arrows(axis: Axes, lit: set[str], size: float) -> None:
    def line(points: list[tuple[float, float]], colour: str, is_lit: bool) -> None:
        """A line through points, with a head at its end."""
        shade = PALETTE.get(colour, colour) if is_lit else _PALE
        look = {"color": shade, "lw": 1.4 * size, "solid_capstyle": "butt"}
        *bends, last = points
        axis.plot(*zip(*bends, strict=True), **look)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11 * size}
        axis.annotate("", last, bends[-1], arrowprops=arrow | {"color": shade, "lw": 1.4 * size})

    def word(x: float, y: float, text: str, is_lit: bool) -> None:
        ink = PALETTE["text"] if is_lit else PALETTE["faint"]
        axis.text(x, y, text, ha="center", va="bottom", fontsize=8 * size, color=ink)

    for name in ("q", *_PAIRS):
        y = _PARTS[name].y
        line([(0.95, 1.95), (1.18, 1.95), (1.18, y), (1.41, y)], _INK, name in lit)
    # a pair of keys and values for each branch
    line([(2.03, 0.75), (2.6, 0.75)], "compressed", "summaries" in lit)
    line([(2.03, 2.35), (5.6, 2.35), (5.6, 2.2)], "selected", "selected" in lit)
    line([(2.03, 3.15), (5.15, 3.15)], "window", "window" in lit)
    # q goes to all that ask: a mark on each in place of three lines
    for name in _ASKS:
        _query(axis, name, name in lit, size)
    # what is read: summaries, a list, and the latest tokens as they are
    line([(4.1, 0.75), (5.15, 0.75)], "compressed", "compressed" in lit)
    word(4.63, 0.69, "k_cmp, v_cmp", "compressed" in lit)
    line([(4.1, 1.95), (5.15, 1.95)], "selected", bool({"choice", "selected"} & lit))
    word(4.63, 1.89, "ids: the list", bool({"choice", "selected"} & lit))
    # the arrow that makes NSA: the weights of the summaries choose the blocks
    line([(5.6, 1.0), (5.6, 1.35), (3.35, 1.35), (3.35, 1.7)], "compressed", "choice" in lit)
    word(4.5, 1.32, "weights of the summaries", "choice" in lit)
    # gates
    line([(0.55, 2.2), (0.55, 3.95), (2.6, 3.95)], _INK, "gates" in lit)
    line([(4.1, 3.95), (_GATE_X, 3.95), (_GATE_X, 3.34)], _INK, "gates" in lit)
    for upper, lower in (("compressed", "selected"), ("selected", "window")):
        span = [_PARTS[upper].y + 0.19, _PARTS[lower].y - 0.19]
        axis.plot([_GATE_X] * 2, span, color=_INK if "gates" in lit else _PALE, lw=1.4 * size)
    line([(8.72, 1.95), (9.0, 1.95)], _INK, "sum" in lit)
    for name in _GATES:
        y, colour = _PARTS[name].y, _PARTS[name].colour
        line([(6.75, y), (_GATE_X - _GATE_SIZE / 2, y)], colour, name in lit)
        after = _GATE_X + _GATE_SIZE / 2
        shade = PALETTE[colour] if "sum" in lit else _PALE
        axis.plot([after, 8.72, 8.72], [y, y, 1.95], color=shade, lw=1.4 * size)
        word(7.15, y - 0.06, f"o_{_GATES[name][2:]}", name in lit)
