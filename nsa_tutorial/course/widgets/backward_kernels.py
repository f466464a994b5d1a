"""Chapter 13's pictures: the block mask and its transpose, kinds of lists, chunks, one program of
the keys' kernel step by step, and scores that learn to choose.

`meet` counts, on the lists of the benchmark, how many programs add to one block where each slot has
a program. `record` runs one program of `triton.selected.backward.dkv_kernel` from its own source
(`course.recorder`) on chapter 10's real heads, and `so_far` runs the same program on the beginning
of its chunk. `draw_transpose`, `draw_kinds`, `draw_chunks`, `draw_step` and `draw_learning` draw;
`stepper` puts controls on `draw_step`.

Nothing here needs Triton or a GPU.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from nsa_tutorial.bench import drawing
from nsa_tutorial.course import learning_to_choose, recorder
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, shades
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour, bytes_of
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.tilelang_forward import (
    ASSETS,
    BS,
    N,
    example,
    largest_of,
    signed_bytes,
)
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables.chunks import Tables, tables_of_lists
from nsa_tutorial.sparse import inverse_list, selected_attention
from nsa_tutorial.sparse.inverse_list import Chunks
from nsa_tutorial.sparse.selected_attention import QueryRows

MEASURED = {name: ASSETS / f"{name}_backward_h200.json" for name in ("triton", "tilelang")}
_NOTHING = "#EDEFF1"
_PALE = "#C6DDEF"  # of what a list names, beside the one list that is lit


def causal_rows(tokens: int) -> QueryRows:
    """The rows of one causal sequence."""
    cpu = torch.device("cpu")
    return selected_attention.query_rows(
        1, tokens, tokens, causal=True, cu_seqlens=None, device=cpu
    )


def queries(number: int) -> str:
    """`1 query`, `2 queries`."""
    return f"{number:,} quer{'y' if number == 1 else 'ies'}"


# -- the block mask and its transpose --


def inverse_of(ids: Tensor, block_size: int) -> dict[int, list[int]]:
    """Which queries list each block, as `sparse.inverse_list` finds them.

    Args:
        ids: `[queries, 1, S]` int32, lists of one sequence and one head.
        block_size: tokens per block.
    """
    tokens, _, S = ids.shape
    sizes = {"block_size": block_size, "num_keys": tokens}
    inverse = inverse_list.invert_lists(ids, causal_rows(tokens), **sizes)
    row = inverse.entries // S
    blocks = range(-(-tokens // block_size))
    return {block: row[inverse.first[block] : inverse.last[block]].tolist() for block in blocks}


def small_lists(tokens: int = 48, block_size: int = 4, slots: int = 4) -> Tensor:
    """Lists of the benchmark, few enough to draw each: `[tokens, 1, slots]`."""
    return drawing.draw("trained", tokens, 1, block_size, slots, "cpu")[0]


def draw_transpose(
    ids: Tensor | None = None, block_size: int = 4, *, query: int = 37, block: int = 5
) -> Picture:
    """The block mask, a row for each query, and its transpose, a row for each block: one list and
    one inverse list are lit.

    Args:
        ids: `[queries, 1, S]` int32; None takes `small_lists()`.
        block_size: tokens per block.
        query, block: whose list, and whose inverse list.
    """
    ids = small_lists(block_size=block_size) if ids is None else ids
    inverse = inverse_of(ids, block_size)
    mask = np.zeros((len(ids), len(inverse)), dtype=bool)
    for number, rows in inverse.items():
        mask[rows, number] = True
    sheet = Sheet(8.3, 3.5)
    left, right = Place(0.75, 0.8, 1.6, 2.3), Place(3.35, 0.95, 4.8, 1.6)
    for place, values, lit in ((left, mask, query), (right, mask.T, block)):
        colours = np.tile(byte_colour(_NOTHING), (*values.shape, 1))
        colours[values] = byte_colour(_PALE)
        colours[lit, values[lit]] = byte_colour("query" if place is left else "selected")
        sheet.image(place, colours)
        sheet.cuts(place, *values.shape, 0.5)
        height = place.height / len(values)
        frame = (place.left - 0.02, place.top + lit * height - 0.02, place.width + 0.04)
        edge = PALETTE["query" if place is left else "selected"]
        sheet.boxes([(*frame, height + 0.04)], "none", edgecolors=edge, linewidths=1.3)
    mine, its = np.flatnonzero(mask[query]), inverse[block]
    _scales(sheet, left, ("block", len(inverse), 4), ("query", len(ids), 8))
    _scales(sheet, right, ("query", len(ids), 8), ("block", len(inverse), 4))
    sheet.title(left, "the block mask")
    sheet.title(right, "its transpose")
    told = f"d_q of query {query} walks its list:\nblocks {', '.join(map(str, mine))}"
    sheet.text(left.x(0.5), 0.44, told, 8.5, "query", ha="center")
    told = (
        f"d_k and d_v of block {block} walk its inverse list:\nqueries {', '.join(map(str, its))}"
    )
    sheet.text(right.x(0), 0.55, told, 8.5, "selected")
    told = f"Query {query} lists {len(mine)} blocks; {len(its)} queries list block {block}"
    return Picture(sheet.figure, told)


def _scales(sheet: Sheet, place: Place, x: tuple[str, int, int], y: tuple[str, int, int]) -> None:
    """Names, lengths and steps of the two axes of squares."""
    for write, (name, length, step) in ((sheet.below, x), (sheet.beside, y)):
        write(place, {(i + 0.5) / length: i for i in range(0, length, step)}, name)


# -- kinds of lists, and how many programs meet at a block --

BLOCK = 64  # tokens of one, as in the benchmark
KINDS = ("random", "trained", "smooth")
AT_ONCE = 132 * 4  # programs that run at a time: 4 on each multiprocessor of an H200


@functools.lru_cache(maxsize=16)
def lists(kind: str, tokens: int, slots: int) -> Tensor:
    """Lists of the benchmark for one KV head, `[tokens, 1, slots]` int32. They name the first
    block, the own one and the one before it."""
    return drawing.draw(kind, tokens, 1, BLOCK, slots, "cpu")[0]


def draw_kinds(tokens: int = 4096, slots: int = 16, neighbours: int = 64) -> Picture:
    """The lists of neighbouring queries, a row for each query, by kind."""
    sheet, blocks, first = Sheet(8.3, 2.75), tokens // BLOCK, 3 * tokens // 4
    together = []
    for i, kind in enumerate(KINDS):
        ids = lists(kind, tokens, slots)
        mask = np.zeros((neighbours, blocks + 1), dtype=bool)  # empty slots: the last column
        np.put_along_axis(mask, ids[first : first + neighbours, 0].long().numpy(), True, axis=1)
        colours = np.tile(byte_colour(_NOTHING), (neighbours, blocks, 1))
        colours[mask[:, :blocks]] = byte_colour("selected")
        place = Place(0.85 + 2.55 * i, 0.62, 2.2, 1.6)
        sheet.image(place, colours)
        sheet.title(place, kind)
        sheet.below(place, {(b + 0.5) / blocks: b for b in range(0, blocks, blocks // 4)}, "block")
        if i == 0:
            rows = range(0, neighbours, neighbours // 4)
            sheet.beside(place, {(r + 0.5) / neighbours: f"{first + r:,}" for r in rows}, "query")
        together.append(f"{drawing.overlap(ids[None]):.1f}")
    *first_kinds, last_kind = together
    told = f"Four neighbours list {', '.join(first_kinds)} or {last_kind} times the blocks of one"
    return Picture(sheet.figure, told)


@functools.lru_cache(maxsize=16)
def meet(kind: str, tokens: int, slots: int) -> float:
    """How many programs add to the busiest block at the same time, on average over time: a program
    for each slot of one KV head's lists, slot 0 of all queries first, `AT_ONCE` at a time."""
    program = lists(kind, tokens, slots)[:, 0].T.flatten()  # the block of each
    blocks, wave = tokens // BLOCK, torch.arange(len(program)) // AT_ONCE
    places = (wave * blocks + program)[program >= 0]
    waves = int(wave[-1]) + 1
    counts = torch.bincount(places, minlength=waves * blocks).view(waves, blocks)
    return counts.amax(1).double().mean().item()


# -- chunks --


def draw_chunks(kind: str = "trained", tokens: int = 1024, length: int = 128) -> Picture:
    """The queries of each block, cut into chunks: a bar for each block, a piece for each
    program."""
    sizes = {"block_size": BLOCK, "num_keys": tokens}
    inverted = inverse_list.invert_lists(lists(kind, tokens, 4), causal_rows(tokens), **sizes)
    chunks = inverse_list.chunks(inverted, length=length)
    figure, axes = new_figure(8.0, 3.4)
    axis, blocks = axes[0, 0], tokens // BLOCK
    sizes = (chunks.last - chunks.first).numpy()
    block = chunks.first_key.numpy() // BLOCK
    stored, shared = PALETTE["selected"], shades("selected")(0.45)
    for b in range(blocks):
        start, own = 0, sizes[(block == b) & (sizes > 0)]
        for size in own:
            colour = stored if len(own) == 1 else shared
            axis.barh(b, size, 0.72, start, color=colour, edgecolor="white", linewidth=1.5)
            start += size
        if b in (1, 4):
            told = f"{len(own)} chunks: each stores a share"
            told = told if len(own) > 1 else "1 chunk: stores the sum"
            axis.text(start + 8, b, told, va="center", fontsize=9)
    axis.set_ylim(blocks - 0.4, -0.6)
    axis.set_yticks(range(0, blocks, 3))
    axis.set_ylabel("block")
    axis.set_xlabel("queries that list it")
    of_first, programs = int(((block == 0) & (sizes > 0)).sum()), int((sizes > 0).sum())
    listing = queries(int(sizes[block == 0].sum()))
    told = (
        f"Block 0, listed by {listing}, takes {of_first} of {programs} programs; none walks more "
        f"than {queries(int(sizes.max()))}"
    )
    return Picture(figure, told)


# -- one program of the keys' kernel, step by step --

KERNEL = "nsa_tutorial.kernels.triton.selected.backward:dkv_kernel"
CHUNK = 16  # queries, and up to twice as many: the kernel's own chunks never cut 96 queries
STEP_ROWS = 16  # the kernel takes 64


@functools.cache
def tables() -> Tables:
    """What the programs walk: the kernel's tables, with shorter chunks."""
    e = example()
    B, M, H = e.k.shape[:3]
    sizes = {"block_size": BS, "num_keys": B * M}
    lse2 = given()["LSE2"][:, :, 0]
    numbers = {"G": e.q.shape[2] // H, "share_bytes": 1, "itemsize": 2}
    made = tables_of_lists(e.ids, e.rows, torch.from_numpy(lse2), **sizes, **numbers)
    inverted = inverse_list.invert_lists(e.ids, e.rows, **sizes)
    return made._replace(chunks=inverse_list.chunks(inverted, length=CHUNK))


@functools.cache
def given() -> dict[str, np.ndarray]:
    """The tensors that the kernel reads, of the example; the gradient of the output is random."""
    e = example()
    (_, _, HQ, D), H = e.q.shape, e.k.shape[2]
    o, lse = selected_attention.forward(
        e.q, e.k, e.v, e.ids, e.rows, block_size=BS, scale=e.scale
    )  # fmt: skip
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    of_rows = (N, H, HQ // H)
    tensors = {
        "Q": e.q.reshape(*of_rows, D), "K": e.k[0], "V": e.v[0], "GradO": d_o.reshape(*of_rows, -1),
        "Delta": (d_o * o).sum(-1).reshape(of_rows), "LSE2": lse.reshape(of_rows) * LOG2_E,
    }  # fmt: skip
    return {name: x.double().numpy() for name, x in tensors.items()}


def run(chunk: int, chunks: Chunks) -> tuple[recorder.Record, dict[str, np.ndarray]]:
    """Run program `(chunk, 0)` of the kernel; returns what it touched, and its outputs: gradients,
    and room for one share, NaN where nothing was stored."""
    tensors, t, scale = given(), tables(), example().scale
    (keys, H, D), DV = tensors["K"].shape, tensors["V"].shape[2]
    walked = {
        "Rows": t.rows, "RowEnd": t.row_end, "FirstKey": chunks.first_key,
        "Head": chunks.head, "First": chunks.first, "Last": chunks.last,
        "NumParts": chunks.num_parts, "Place": chunks.place * 0,
    }  # fmt: skip
    shapes = {"GradK": (keys, H, D), "GradV": (keys, H, DV), "SharesK": (BS, D),
              "SharesV": (BS, DV)}  # fmt: skip
    outputs = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    numbers = {
        "Factors": None, "scale": scale, "scale_log2": scale * LOG2_E, "H": H, "num_keys": keys,
        "G": tensors["Q"].shape[2], "D": D, "DV": DV, "BS": BS,
        "SLOT_SCALE": False, "DT": D, "DVT": DV, "BT": BS, "BR": STEP_ROWS,
        "WIDE": False, "EDGE": BS,
    }  # fmt: skip
    arrays = {name: x.long().numpy() for name, x in walked.items()}
    grid = (len(chunks.first), 1)
    seen = recorder.run(KERNEL, (chunk, 0), tensors | arrays | outputs | numbers, grid)
    return seen, outputs


@functools.cache
def record(chunk: int) -> recorder.Record:
    """What program `chunk` loads and stores."""
    return run(chunk, tables().chunks)[0]


@functools.cache
def so_far(chunk: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The program's `d_k` and `d_v`, `[BS, D]` and `[BS, DV]`, after a step: what it gives for a
    chunk that ends there."""
    chunks, last = tables().chunks, tables().chunks.last.clone()
    last[chunk] = min(int(chunks.first[chunk]) + (step + 1) * queries_of_step(), int(last[chunk]))
    # a share is stored in full, whether its keys are visible or not
    cut = chunks._replace(last=last, num_parts=torch.full_like(last, 2))
    outputs = run(chunk, cut)[1]
    return outputs["SharesK"], outputs["SharesV"]


def queries_of_step() -> int:
    """Queries whose heads fill the rows of a step."""
    return STEP_ROWS // given()["Q"].shape[2]


@functools.cache
def programs_of(head: int, block: int) -> tuple[int, ...]:
    """The programs of a block, in the order of its chunks."""
    c = tables().chunks
    mine = (c.first_key == block * BS) & (c.head == head) & (c.last > c.first)
    return tuple(mine.nonzero().flatten().tolist())


@dataclass(frozen=True)
class Moment:
    """One step of one program.

    Attributes:
        program, part, num_parts: which it is, and which of its block's chunks it walks.
        rows: the queries of its whole chunk.
        start, end: which of them this step takes.
        touched: rows of `Q`, counted in heads, that this step loads.
        weights: `[BS, STEP_ROWS]`, a key a row.
        is_seen: the same shape.
        is_masked: whether the step asks which keys a row sees.
        d_k, d_v: what has been added up.
    """

    program: int
    part: int
    num_parts: int
    rows: np.ndarray
    start: int
    end: int
    touched: np.ndarray
    weights: np.ndarray
    is_seen: np.ndarray
    is_masked: bool
    d_k: np.ndarray
    d_v: np.ndarray

    @property
    def now(self) -> list[int]:
        """The queries of this step."""
        return self.rows[self.start : self.end].tolist()


def steps_of(chunk: int) -> list[tuple[recorder.Access, bool]]:
    """The program's loads of `Q`, one for each step, and whether the step is masked: then it asks
    for the end of each row before the next step begins."""
    found: list[tuple[recorder.Access, bool]] = []
    for access in record(chunk).accesses:
        if access.kind == "store" or access.tensor == "NumParts":
            break
        if access.tensor == "Q":
            found.append((access, False))
        elif access.tensor == "RowEnd" and found:
            found[-1] = (found[-1][0], True)
    return found


@functools.lru_cache(maxsize=256)
def moment(head: int, block: int, part: int, step: int) -> Moment:
    """Step `step` of the program of a block's chunk `part`."""
    programs, c, tensors = programs_of(head, block), tables().chunks, given()
    chunk = programs[part]
    rows = tables().rows[c.first[chunk] : c.last[chunk]].numpy()
    access, is_masked = steps_of(chunk)[step]
    start, D = step * queries_of_step(), tensors["Q"].shape[3]
    end = min(start + queries_of_step(), len(rows))
    G, is_row = tensors["Q"].shape[2], access.mask[:, 0]
    of_head = np.where(is_row, access.offsets[:, 0] // D, 0)  # the rows of Q, a head each
    key = block * BS + np.arange(BS)
    row_end = tables().row_end.numpy()[of_head // G // tensors["Q"].shape[1]]
    is_seen = is_row & (key[:, None] < row_end)
    scores = tensors["K"][key, head] @ tensors["Q"].reshape(-1, D)[of_head].T
    weights = np.exp2(scores * (example().scale * LOG2_E) - tensors["LSE2"].ravel()[of_head])
    return Moment(
        chunk, part, len(programs), rows, start, end, access.touched[::D] // D,
        np.where(is_seen, weights, 0), is_seen, is_masked, *so_far(chunk, step),
    )  # fmt: skip


def told_step(head: int = 0, block: int = 0, part: int = 0, step: int = 0) -> str:
    """What one step does, in words."""
    m = moment(head, block, part, step)
    G, first = given()["Q"].shape[2], block * BS
    arrive = f"quer{'y' if len(m.now) == 1 else 'ies'} {', '.join(map(str, m.now))}"
    mask = "no mask: all of them see the whole block"
    if m.is_masked:
        ends = sum(row < first + BS - 1 for row in m.now)
        mask = f"behind a mask: {ends} of them stand inside the block"
        mask = mask if ends else "behind a mask, since a masked query may still be among them"
    done = f"{m.end} of {len(m.rows)} queries are added"
    if m.end == len(m.rows):
        kept = f"stored as share {m.part + 1} of {m.num_parts}" if m.num_parts > 1 else "stored"
        done = f"all {len(m.rows)} queries are added, and the sums are {kept}"
    return (
        f"Program {m.program}: KV head {head}, block {block} (keys {first} to {first + BS - 1}), "
        f"chunk {part + 1} of {m.num_parts}. {arrive[0].upper()}{arrive[1:]} arrive with {G} heads "
        f"each, {len(m.now) * G} query-head rows; {mask}. {done[0].upper()}{done[1:]}."
    )


def draw_step(head: int = 0, block: int = 0, part: int = 0, step: int = 0) -> Picture:
    """What one step loads of Q, where it is in its block's inverse list, its weights, and what has
    been added up."""
    m = moment(head, block, part, step)
    sheet = Sheet(8.3, 4.2)
    _draw_rows_of_q(sheet, Place(0.7, 0.58, 1.25, 3.2), m)
    _draw_inverse_list(sheet, Place(2.75, 0.58, 5.4, 0.2), m, head, block)
    place, start = Place(2.75, 2.22, 1.56, 1.56), block * BS
    top = largest_of(m.weights)
    colours = bytes_of(m.weights, shades("selected"), 0, top)
    colours[~m.is_seen] = byte_colour("masked")
    sheet.image(place, colours)
    _frame(sheet, place)
    sheet.title(place, f"weights, 0 to {top:.2f}")
    keys = {0.5 / BS: start, (BS - 0.5) / BS: start + BS - 1}
    sheet.beside(place, keys, "key", away=0.3)
    told = {(i + 0.5) / queries_of_step(): row for i, row in enumerate(m.now)}
    sheet.below(place, told, "query")
    for left, name, values in ((4.75, "d_v", m.d_v), (6.6, "d_k", m.d_k)):
        top = largest_of(values)
        place = Place(left, 2.22, 1.55, 1.56)
        sheet.image(place, signed_bytes(values, top))
        _frame(sheet, place)
        sheet.title(place, f"{name} so far, ±{top:.2f}")
        sheet.below(place, {}, "channel")
    share = m.is_seen[:, : len(m.touched)].mean()
    mask = "has a mask" if m.is_masked else "needs no mask"
    told = f"The queries of this step see {share:.0%} of block {block}: the step {mask}"
    return Picture(sheet.figure, told)


def _frame(sheet: Sheet, place: Place) -> None:
    """A thin line around a tile, most of which may be white."""
    sheet.boxes([place], "none", edgecolors=PALETTE["masked"], linewidths=0.8)


def _draw_rows_of_q(sheet: Sheet, place: Place, m: Moment) -> None:
    """Q in memory, a square for each query and head: what this step loads, and what was loaded."""
    _, H, G, _ = given()["Q"].shape
    colours = np.tile(byte_colour(_NOTHING), (N, H * G, 1))
    head = int(m.touched[0]) // G % H
    colours[m.rows, head * G : (head + 1) * G] = byte_colour(_PALE)
    colours[m.rows[: m.start], head * G : (head + 1) * G] = byte_colour("selected")
    colours.reshape(-1, 3)[m.touched] = byte_colour("query")
    sheet.image(place, colours)
    sheet.cuts(place, N // BS, H, 1.2)
    sheet.title(place, "Q in memory")
    sheet.beside(place, {(row + 0.5) / N: row for row in range(0, N, BS)}, "query")
    sheet.below(place, {(h + 0.5) / H: h for h in range(H)}, "KV head")


def _draw_inverse_list(sheet: Sheet, place: Place, m: Moment, head: int, block: int) -> None:
    """The queries that list the block, a line for each chunk."""
    sheet.title(place, f"who lists block {block}: a line for each chunk")
    names = {"selected": "added", "query": "this step", _PALE: "to come"}
    sheet.legend(place.x(0.48), place.top - 0.1, names)
    t, squares, shown, words = tables(), [], [], []
    wide, high = place.width / 31, 0.25
    for line, chunk in enumerate(programs_of(head, block)):
        rows = t.rows[t.chunks.first[chunk] : t.chunks.last[chunk]].tolist()
        for i, row in enumerate(rows):
            colour = _NOTHING
            if line == m.part:
                colour = _PALE if i >= m.end else "selected" if i < m.start else "query"
            squares.append((place.left + i * wide, place.top + line * high, 0.9 * wide, 0.9 * high))
            shown.append(colour)
            x, y = squares[-1][0] + 0.45 * wide, squares[-1][1] + 0.45 * high
            words.append((x, y, row, "white" if colour in ("selected", "query") else "text"))
    sheet.boxes(squares, shown)
    sheet.words([w[:3] for w in words], size=7.5, colour=[w[3] for w in words])


def stepper() -> Panel:
    """The interactive: walk one program through its chunk of a block's inverse list."""

    def render(head: int, block: int, part: int, step: int) -> tuple[Picture, str]:
        return draw_step(head, block, part, step), told_step(head, block, part, step)

    def limits(head: int, block: int, part: int, **_: object) -> dict[str, range]:
        programs = programs_of(head, block)
        chunk = programs[min(part, len(programs) - 1)]
        return {"part": range(len(programs)), "step": range(len(steps_of(chunk)))}

    def idle(head: int, block: int, part: int, **_: object) -> set[str]:
        programs = programs_of(head, block)
        lengths = {"part": len(programs), "step": len(steps_of(programs[part]))}
        return {name for name, length in lengths.items() if length == 1}

    return panel(
        "a block and its queries",
        render,
        limits=limits,
        idle=idle,
        head=ipywidgets.IntSlider(0, 0, example().k.shape[2] - 1, description="KV head"),
        block=ipywidgets.IntSlider(0, 0, N // BS - 1, description="block"),
        part=ipywidgets.IntSlider(1, 0, 4, description="chunk"),
        step=ipywidgets.IntSlider(0, 0, 7, description="step"),
    )


# -- scores that learn to choose --

SEEDS = 2
_WAYS = {"none": "faint", "slot_scale": "selected", "straight_through": "value"}


@functools.cache
def learned(how: str, scale: float) -> np.ndarray:
    """The share of queries that find their block, `[SEEDS, steps]`."""
    runs = [learning_to_choose.run(how, seed=seed, scale=scale) for seed in range(SEEDS)]
    return torch.stack(runs).numpy()


def draw_learning() -> Picture:
    """How often the right block is chosen while the scores train, by gradient and by how peaked
    attention is."""
    figure, axes = new_figure(8.2, 2.9, columns=2)
    scales = {"gentle": learning_to_choose.GENTLE, "peaked": learning_to_choose.PEAKED}
    best = learning_to_choose.found_by_hand()
    for axis, (name, scale) in zip(axes[0], scales.items(), strict=True):
        for how, colour in _WAYS.items():
            _draw_curve(axis, learned(how, scale), how, PALETTE[colour])
        for y, label in ((best, "scores by hand"), (learning_to_choose.CHANCE, "chance")):
            axis.axhline(y, color=PALETTE["text"], linestyle=":", linewidth=1)
            axis.text(0.8, y + 0.015, label, fontsize=7.5, va="bottom")
        axis.set_ylim(0, 1)
        axis.set_xlim(0, learning_to_choose.STEPS)
        axis.set_title(f"{name} attention, scale {scale:g}", fontsize=10)
        axis.set_xlabel("training step")
    axes[0, 0].set_ylabel("queries that read their block")
    axes[0, 0].legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, 0.86))
    ends = [float(learned("slot_scale", scale)[:, -30:].mean()) for scale in scales.values()]
    gentle, peaked = (_verdict(end, best) for end in ends)
    told = (
        f"slot_scale: under gentle attention scores learn to {gentle} the right block, under "
        f"peaked to {peaked} it"
    )
    return Picture(figure, told)


def _verdict(found: float, best: float) -> str:
    chance = learning_to_choose.CHANCE
    if found > (best + chance) / 2:
        return "find"
    return "miss" if found < chance / 2 else "guess"


def _draw_curve(axis: Axes, found: np.ndarray, how: str, colour: str, window: int = 15) -> None:
    """The mean of all seeds, thick, and each seed, thin, over `window` steps."""
    smooth = [np.convolve(one, np.full(window, 1 / window), "valid") for one in found]
    steps = np.arange(window, found.shape[1] + 1)
    for one in smooth:
        axis.plot(steps, one, color=colour, linewidth=0.5)
    axis.plot(steps, np.mean(smooth, 0), color=colour, linewidth=2, label=how)


# -- what was measured --


@functools.cache
def measured(language: str = "triton") -> dict:
    """The stored result of `python -m nsa_tutorial.bench`: machine, versions, command, rows."""
    return json.loads(MEASURED[language].read_text())


def times(
    group: int = 16, lists: str = "random", kernel: str = "triton", direction: str = "backward"
) -> dict[str, dict]:
    """The rows of one kernel for 65,536 tokens, width 128, by what was changed; `"ours"` is what
    the operators run."""
    shape = {"tokens": 65_536, "width": 128, "group": group, "lists": lists}
    wanted = {**shape, "kernel": kernel, "direction": direction}
    rows = measured("tilelang" if kernel == "tilelang" else "triton")["rows"]
    return {row["change"] or "ours": row for row in rows if wanted.items() <= row.items()}


def dense_times(group: int = 16) -> dict[str, float]:
    """Milliseconds of a backward of dense attention, at the same shape, by who computes it."""
    rows = measured()["rows"]
    return {
        row["kernel"].removeprefix("dense, "): row["ms"]
        for row in rows
        if row["kernel"].startswith("dense") and row["group"] == group
    }
