"""Chapter 11's pictures: the Triton kernel's pointer tiles and masks, found by running its own
source, and what was measured.

`program` runs one program of `triton.selected.forward.kernel` (`course.recorder`) on any small
call; `record` does so on chapter 10's real heads, and `moment` adds the scores that the PyTorch
twin has in the same step (`course.trace`). `draw_step`, `sentence` and `explore` show both beside
each other. `measured` reads the times stored by `python -m nsa_tutorial.bench`.

Nothing here computes attention, and nothing needs Triton.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from itertools import pairwise

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, new_figure, readable_on, shades
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour, bytes_of
from nsa_tutorial.course.trace import Trace, trace
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.tilelang_forward import (
    ASSETS,
    BS,
    KEYS,
    WIDE,
    N,
    S,
    example,
    held,
    keys_in_a_row,
    largest_of,
    letter,
    signed_bytes,
)
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.sparse import selected_attention, sliding_window
from nsa_tutorial.sparse.selected_attention import QueryRows

KERNEL = "nsa_tutorial.kernels.triton.selected.forward:kernel"
DESCRIPTOR_KERNEL = "nsa_tutorial.kernels.triton.selected.forward_tma:descriptor_kernel"
MEASURED = ASSETS / "triton_forward_h200.json"
MASK_OF_V = "mask=v_mask, other=0.0"  # what `draw_poisoned` leaves out of the kernel
_NOTHING = "#EDEFF1"


# -- one program of the kernel --


def power_of_two(n: int) -> int:
    """The least length of a tile's side that holds `n`: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def arguments(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, BT: int | None = None, tiles: tuple[int, int, int] | None = None,
) -> dict[str, object]:  # fmt: skip
    """The kernel's arguments for the recorder, of a call of `triton.selected.forward.launch`;
    outputs are NaN until they are stored.

    `tiles` are `GT, DT, DVT` where the padding is in the way of seeing something.
    """
    (B, queries, HQ, D), (H, DV) = q.shape, v.shape[2:]
    R, G, slots = B * queries, HQ // H, ids.shape[-1]
    GT, DT, DVT = tiles or (power_of_two(G), power_of_two(D), power_of_two(DV))
    scale = D**-0.5
    arrays = {
        "Q": q.double().reshape(R, H, G, D),
        "K": k.double().reshape(-1, H, D),
        "V": v.double().reshape(-1, H, DV),
        "BlockIndices": ids.long(),
        "FirstKey": rows.first_key.long(),
        "NumVisible": rows.num_visible.long(),
    }
    numbers = {
        "scale": scale, "scale_log2": scale * LOG2_E,
        "H": H, "S": slots, "G": G, "D": D, "DV": DV, "BS": block_size,
        "GT": GT, "DT": DT, "DVT": DVT, "BT": BT or block_size,
    }  # fmt: skip
    empty = {
        "Output": np.full((R, H, G, DV), np.nan),
        "LSE": np.full((R, H, G), np.nan),
    }
    return {name: x.numpy() for name, x in arrays.items()} | empty | numbers


def program(ids: tuple[int, int], call: dict[str, object], without: str = "") -> recorder.Record:
    """Run program `(query, head)` of the kernel; `call` are `arguments`, and it stores to their
    outputs. `without` is left out of the kernel's source."""
    return recorder.run(KERNEL, ids, call, without=without)


def descriptor_program(ids: tuple[int, int], call: dict[str, object]) -> recorder.Record:
    """Run program `(query, head)` of the kernel with tensor descriptors; `call` are `arguments`."""
    boxes = {f"{name}Descriptor": recorder.Descriptor(name, call["BT"]) for name in "KV"}
    padded = ("DT", "DVT")  # a descriptor's widths need no padding
    given = {name: x for name, x in call.items() if name not in padded}
    return recorder.run(DESCRIPTOR_KERNEL, ids, given | boxes)


def loads(seen: recorder.Record, tensor: str) -> list[recorder.Access]:
    """The loads of `tensor` in order: for keys and values, one for each step of the loop."""
    return [access for access in seen.accesses if (access.kind, access.tensor) == ("load", tensor)]


# -- the pointer tile --


@functools.cache
def pointer_example() -> recorder.Record:
    """Program (9, 1) over ten keys of two heads, two channels each; its list is block 0, block 2,
    in blocks of 4."""
    k = torch.arange(40.0).reshape(1, 10, 2, 2)
    rows = selected_attention.query_rows(1, 10, 10, causal=True, cu_seqlens=None, device=k.device)
    ids = torch.tensor([0, 2]).expand(10, 2, 2).contiguous()
    return program((9, 1), arguments(k, k, k, ids, rows, block_size=4, tiles=(1, 2, 2)))


def draw_pointers() -> Picture:
    """Two slots' tiles in the memory of K, and what each adds up: a base, and offsets that are the
    same for both."""
    first, second = loads(pointer_example(), "K")
    keys, H, D = pointer_example().shapes["K"]
    base = [int(access.offsets.min()) for access in (first, second)]
    inside = first.offsets - base[0]
    if not np.array_equal(inside, second.offsets - base[1]):
        raise AssertionError("the offsets within a tile have moved")
    sheet, tall = Sheet(8.3, 4.3), 0.27
    memory = Place(0.75, 0.66, 2.5, keys * tall)
    colours = np.tile(byte_colour(_NOTHING), (keys, H * D, 1))
    for access in (first, second):
        colours.reshape(-1, 3)[access.touched] = byte_colour("key")
    _numbered(sheet, memory, colours, np.arange(keys * H * D).reshape(keys, H * D))
    side = memory.width / (H * D)
    below = second.offsets[~second.mask].reshape(-1, D)[:, 0]
    dotted = {"edgecolors": PALETTE["key"], "linestyles": ":", "linewidths": 1.2}
    absent = [(row, column * side) for row, column in (divmod(n, H * D) for n in below.tolist())]
    frames = [(memory.left + x, memory.y(row / keys), D * side, tall) for row, x in absent]
    sheet.boxes(frames, "none", **dotted)
    sheet.text(memory.left, frames[0][1] + tall, "no such keys", 8.5)
    sheet.title(memory, "K in memory: each element's offset")
    sheet.beside(memory, {(row + 0.5) / keys: row for row in range(keys)}, "row of K: the key")
    heads = {(head + 0.5) / H: f"head {head}" for head in range(H)}
    sheet.below(memory, heads, gap=len(below) * tall + 0.04)
    for top, slot, block, access in ((0.86, 0, 0, first), (2.72, 1, 2, second)):
        _draw_sum(sheet, top, f"slot {slot}: block {block}", base[slot], inside, access)
    start, stop = (
        memory.y(access.touched[0] // (H * D) / keys + 0.05) for access in (first, second)
    )
    x = memory.x(1) + 0.16
    sheet.lines([[(x - 0.08, start), (x, start), (x, stop), (x - 0.08, stop)]], "query", 1.6)
    moved = base[1] - base[0]
    sheet.text(x + 0.08, (start + stop) / 2, f"+{moved}", 11, "query")
    told = f"From block 0 to block 2 the base moves by {moved}; the {inside.size} distances stay"
    return Picture(sheet.figure, told)


def _numbered(sheet: Sheet, place: Place, colours: np.ndarray, numbers: np.ndarray) -> None:
    """Squares with a number in each."""
    rows, columns = numbers.shape
    sheet.image(place, colours)
    sheet.cuts(place, rows, columns)
    at = [
        (place.x((j + 0.5) / columns), place.y((i + 0.5) / rows))
        for i, j in np.ndindex(rows, columns)
    ]
    sheet.words([(*xy, n) for xy, n in zip(at, numbers.ravel().tolist(), strict=True)], size=9)


def _draw_sum(
    sheet: Sheet, top: float, name: str, base: int, inside: np.ndarray, access: recorder.Access
) -> None:
    """One slot's tile of pointers: the base, plus the offsets within the tile."""
    rows = len(inside)
    tile = Place(5.75, top, 1.2, rows * 0.3)
    middle = tile.y(0.5)
    sheet.text(4.35, tile.top - 0.14, name, 10)
    sheet.boxes([(4.4, middle - 0.22, 0.7, 0.44)], PALETTE["query"])
    sheet.text(4.75, middle, base, 12, SURFACE, ha="center")
    sheet.text(5.4, middle, "+", 14, ha="center")
    colours = np.where(access.mask[..., None], byte_colour("key"), byte_colour("masked"))
    _numbered(sheet, tile, colours, inside)
    sheet.text(4.75, middle + 0.36, "base", 9, "query", ha="center")
    sheet.text(tile.x(0.5), tile.y(1) + 0.12, "k_offset", 9, ha="center")
    hidden = np.flatnonzero(~access.mask[:, 0])
    if hidden.size:
        sheet.text(tile.x(1) + 0.1, tile.y((hidden.mean() + 0.5) / rows), "masked: not\nloaded", 9)


# -- a mask less --


def poisoned() -> dict[str, object]:
    """The kernel's arguments for ten tokens, where all is NaN that program (6, 1) must not see: its
    list is block 1, nothing, block 0, and it sees keys 0 to 6 of head 1."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 10, heads, 2, generator=generator) for heads in (4, 2, 2))
    for x in (k, v):
        x[:, :, 0], x[:, 7:] = torch.nan, torch.nan
    rows = selected_attention.query_rows(1, 10, 10, causal=True, cu_seqlens=None, device=k.device)
    ids = torch.tensor([1, -1, 0]).expand(10, 2, 3).contiguous()
    return arguments(q, k, v, ids, rows, block_size=4, tiles=(2, 2, 2))


def draw_poisoned() -> Picture:
    """What program (6, 1) loads of V with its mask, and without, and its answers."""
    sheet, answers = Sheet(8.3, 4.1), []
    told = {"": "V, with its mask; violet: loaded", MASK_OF_V: "V, a mask less: key 7 loads, too"}
    for left, (without, name) in zip((0.65, 4.65), told.items(), strict=True):
        call = poisoned()
        seen, v = program((6, 1), call, without), call["V"]
        keys, (H, D) = len(v), v.shape[1:]
        inside = {int(n) for a in loads(seen, "V") for n in a.touched if n < v.size}
        numbers = np.where(np.isnan(v.ravel()), "NaN", np.round(v.ravel(), 1).astype(str))
        colours = np.tile(byte_colour(_NOTHING), (v.size, 1))
        colours[sorted(inside)] = bytes_of([0.5], shades("value"), 0, 1)
        spoilt = sorted(n for n in inside if np.isnan(v.flat[n]))
        colours[spoilt] = bytes_of([0.6], shades("query"), 0, 1)
        memory = Place(left, 0.66, 1.9, 0.3 * keys)
        _numbered(sheet, memory, colours.reshape(keys, H * D, 3), numbers.reshape(keys, H * D))
        sheet.title(memory, name)
        if spoilt:
            sheet.text(memory.x(1) + 0.08, memory.y(7.5 / keys), "weight 0", 9.5, "query")
        sheet.beside(memory, {(row + 0.5) / keys: row for row in range(keys)}, "row of V")
        sheet.below(memory, {(head + 0.5) / H: f"head {head}" for head in range(H)})
        found = call["Output"][6, 1]
        answers.append(int(np.isnan(found).sum()))
        answer = Place(memory.x(1) + 0.62, 1.7, 1.0, 0.7)
        colour = bytes_of([0.6], shades("query" if answers[-1] else "value"), 0, 1)[0]
        shown = np.where(np.isnan(found), "NaN", np.round(found, 2).astype(str))
        _numbered(sheet, answer, np.tile(colour, (*found.shape, 1)), shown)
        sheet.title(answer, "its answer")
        sheet.text(answer.left - 0.33, answer.y(0.5), "→", 16, ha="center")
    return Picture(sheet.figure, f"One key of weight 0, loaded: {answers[1]} of 4 numbers are NaN")


def _squares(axis: Axes, colours: np.ndarray) -> None:
    rows, columns = colours.shape[:2]
    axis.imshow(colours, aspect="auto", interpolation="none")
    axis.vlines(np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color=SURFACE, linewidth=1)
    axis.hlines(np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color=SURFACE, linewidth=1)
    axis.tick_params(length=0, labelsize=8.5)
    axis.spines[:].set_visible(False)


# -- where a list ends --


def walked_rows(ids: list[int]) -> list[list[int]]:
    """The rows of K that program (9, 1) loads in each step, of ten keys in blocks of 4."""
    k = torch.zeros(1, 10, 2, 2)
    rows = selected_attention.query_rows(1, 10, 10, causal=True, cu_seqlens=None, device=k.device)
    lists = torch.tensor(ids).expand(10, 2, len(ids)).contiguous()
    seen = program((9, 1), arguments(k, k, k, lists, rows, block_size=4))
    return [np.unique(access.touched // 4).tolist() for access in loads(seen, "K")]


# -- packed sequences, windows --


def small_call(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries, keys and values of 9 tokens, 4 query heads and 2 KV heads, and their lists,
    which are all 0, nothing, 2."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, heads, 2, generator=generator) for heads in (4, 2, 2))
    lists = torch.tensor([0, -1, 2], dtype=torch.int32).expand(1, 9, 2, 3)
    return q.to(device), k.to(device), v.to(device), lists.to(device)


def draw_packed(cu_seqlens: tuple[int, ...] = (0, 3, 4, 9)) -> Picture:
    """Which keys each packed query sees, and the two numbers that say it."""
    tokens = cu_seqlens[-1]
    cu, cpu = torch.tensor(cu_seqlens), torch.device("cpu")
    rows = selected_attention.query_rows(1, tokens, tokens, causal=True, cu_seqlens=cu, device=cpu)
    first, visible = rows.first_key.numpy(), rows.num_visible.numpy()
    key = np.arange(tokens)
    sees = (key >= first[:, None]) & (key < (first + visible)[:, None])
    colours = np.tile(np.array(to_rgb(_NOTHING)), (tokens, tokens, 1))
    # keys, in two strengths that tell neighbours apart
    for number, start in enumerate(dict.fromkeys(first.tolist())):
        strength = 0.45 if number % 2 else 1.0
        colours[sees & (first == start)[:, None]] = shades("key")(strength)[:3]
    sheet = Sheet(8.3, 4.2)
    place = Place(0.7, 0.5, 3.3, 3.2)
    sheet.image(place, colours)
    sheet.cuts(place, tokens, tokens)
    labels = {(n + 0.5) / tokens: n for n in range(tokens)}
    sheet.beside(place, labels, "query")
    sheet.below(place, labels, "row of K")
    shown = tokens - 2  # one query is followed with the eye
    top, side = place.y(shown / tokens), place.width / tokens
    tall = place.height / tokens
    for left, wide in (
        (place.left + first[shown] * side, visible[shown] * side), (4.2, 1.8),
    ):  # fmt: skip
        right, low = left + wide, top + tall
        edge = [(left, top), (right, top), (right, low), (left, low), (left, top)]
        sheet.lines([edge], "query", 2)
    for x, title, values in ((4.6, "first_key", first), (5.6, "num_visible", visible)):
        sheet.text(x, place.top - 0.14, title, 9, ha="center")
        sheet.words([(x, place.y((i + 0.5) / tokens), n) for i, n in enumerate(values)], size=9.5)
    told = f"query {shown}: from row\n{first[shown]} on, {visible[shown]} keys"
    sheet.text(6.15, place.y((shown + 0.5) / tokens), told, 9, "query")
    for number, (start, end) in enumerate(pairwise(cu_seqlens)):
        x = place.x(end / tokens) + 0.1 if end < tokens else place.left + 0.3
        sheet.text(x, place.y((start + end) / 2 / tokens), f"text {number}", 9.5)
    told = f"Two numbers for each query keep {len(cu_seqlens) - 1} texts apart"
    return Picture(sheet.figure, told)


def windows(tokens: int, window_size: int) -> np.ndarray:
    """For each query and key, the block of its window that the key lies in, counted from the
    window's first key; -1 outside."""
    rows = selected_attention.query_rows(
        1, tokens, tokens, causal=True, cu_seqlens=None, device=torch.device("cpu")
    )
    _, window = sliding_window.as_selection(rows, window_size=window_size, block_size=4)
    first, visible = (x.numpy()[:, None] for x in (window.first_key, window.num_visible))
    distance = np.arange(tokens) - first
    return np.where((distance >= 0) & (distance < visible), distance // 4, -1)


def draw_windows(tokens: int = 16, window_size: int = 6) -> Picture:
    """Windows whose blocks are counted from their first key, beside windows of the aligned blocks
    that hold them."""
    block, query, key = windows(tokens, window_size), np.arange(tokens)[:, None], np.arange(tokens)
    aligned = (key // 4 >= np.maximum(query - window_size + 1, 0) // 4) & (key <= query)
    figure, axes = new_figure(8.0, 3.9, columns=2)
    exact = np.tile(np.array(to_rgb(_NOTHING)), (tokens, tokens, 1))
    exact[block >= 0] = to_rgb(PALETTE["window"])
    whole = exact.copy()
    whole[aligned & (block < 0)] = to_rgb(PALETTE["masked"])
    numbers = np.where(aligned, key // 4, -1)
    for axis, picture, title, walked in (
        (axes[0, 0], exact, "from the window's first key", block),
        (axes[0, 1], whole, "whole aligned blocks", numbers),
    ):
        axis.set_title(title, fontsize=9.5)
        _squares(axis, picture)
        for i, j in np.argwhere(walked >= 0):
            text = readable_on(tuple(picture[i, j]))
            axis.text(j, i, walked[i, j], fontsize=7, ha="center", va="center", color=text)
        axis.set_aspect("equal")
        axis.set_xticks(range(0, tokens, 4))
        axis.set_yticks(range(0, tokens, 4))
        axis.set_xlabel("key", fontsize=9)
    axes[0, 0].set_ylabel("query", fontsize=9)
    axes[0, 1].text(3.2, 9.8, "grey: older than\nthe window", fontsize=9, ha="right", va="top")
    axes[0, 0].text(15.3, 0.2, "number: the block\nof the key", fontsize=9, ha="right", va="top")
    full = slice(window_size - 1, None)
    counts = aligned.sum(1)[full]
    told = (
        f"A window of {window_size} is {window_size} keys; whole aligned blocks would show "
        f"{counts.min()} to {counts.max()}"
    )
    return Picture(figure, told)


# -- one program, step by step --


@functools.cache
def twin() -> Trace:
    """The PyTorch twin on the example, all programs at once."""
    e = example()
    return trace(
        selected_attention.forward, e.q, e.k, e.v, e.ids, e.rows, block_size=BS, scale=e.scale
    )


@functools.cache
def given() -> dict[str, object]:
    """The kernel's arguments on the example; what recorded programs stored is in its outputs."""
    e = example()
    return arguments(e.q, e.k, e.v, e.ids, e.rows, block_size=BS)


@functools.cache
def record(token: int, head: int) -> recorder.Record:
    """One program of the kernel on the example."""
    return program((token, head), given())


def slots(token: int, head: int) -> int:
    """Steps of the program's loop: up to the last slot that names a visible block."""
    return len(loads(record(token, head), "K"))


@dataclass(frozen=True)
class Moment:
    """One step of one program: what it loads, from the kernel, and the twin's scores in nats."""

    keys: recorder.Access
    block_id: int
    scores: np.ndarray

    @property
    def is_seen(self) -> np.ndarray:
        """The keys of the block that are loaded."""
        return np.asarray(self.keys.mask.any(1))


def moment(token: int, head: int, slot: int) -> Moment:
    """Step `slot` of program (`token`, `head`)."""
    mine = held(twin(), token, head, slot)
    return Moment(
        keys=loads(record(token, head), "K")[slot],
        block_id=int(mine("online softmax", "block_id")),
        scores=mine("mask", "acc_s") * example().scale,
    )


def sentence(token: int = 77, head: int = 0, slot: int = 0) -> str:
    """What one step loads, in words."""
    m = moment(token, head, slot)
    at = f"Program ({token}, {head}), slot {slot}: "
    if not m.is_seen.any():
        return f"{at}an empty slot. All {m.keys.mask.size} elements are masked, so nothing loads."
    told = f"{int(m.keys.mask.sum())} of {m.keys.mask.size} elements"
    first = int(m.keys.touched.min())
    return f"{at}block {m.block_id}, {told} load, from offset {first:,} of K on."


def draw_step(token: int = 77, head: int = 0, slot: int = 0) -> Picture:
    """What one program loads of K, one of its steps in full colour, and that step's keys and
    scores."""
    m = moment(token, head, slot)
    sheet, right = Sheet(8.3, 4.2), 4.75
    _draw_memory(sheet, Place(0.72, 0.72, 3.1, 3.16), token, head, slot)
    _draw_keys(sheet, Place(right, 0.72, WIDE - 0.15, 1.7), m)
    _draw_scores(sheet, Place(right, 3.08, WIDE - 0.15, 0.8), m, head)
    return Picture(sheet.figure, f"Token {token}, slot {slot}: {_loaded_keys(m)}")


def _loaded_keys(m: Moment) -> str:
    """Which keys of the block load, in words; the example's keys that do not are the future."""
    seen = int(m.is_seen.sum())
    if not seen:
        return "an empty slot, and no key loads"
    if seen == BS:
        return f"all {BS} keys of block {m.block_id} load"
    others = {1: "the other one is", 2: "the other two are"}
    rest = others.get(BS - seen, f"the other {BS - seen} are")
    return f"{seen} of block {m.block_id}'s {BS} keys load; {rest} its future"


def _draw_memory(sheet: Sheet, place: Place, token: int, head: int, slot: int) -> None:
    """All that the program loads of K, pale but for one slot, with the slots' numbers."""
    keys, H, D = given()["K"].shape
    walk = loads(record(token, head), "K")
    colours = np.tile(byte_colour(_NOTHING), (keys, H * D, 1))
    told = []
    for number, access in enumerate(walk):
        if access.touched.size:
            strength = 1.0 if number == slot else 0.35
            colours.reshape(-1, 3)[access.touched] = bytes_of([strength], shades("key"), 0, 1)
            first, last = (int(end) // (H * D) for end in access.touched[[0, -1]])
            is_thin = last - first < 4  # then its name stands below it
            y = (
                place.y((last + 1) / keys) + 0.1
                if is_thin
                else place.y((first + last + 1) / 2 / keys)
            )
            told.append((place.x((head + 0.5) / H), y, f"slot {number}"))
    sheet.image(place, colours)
    sheet.cuts(place, keys // BS, H, 1.2)
    sheet.words(told, size=9.5)
    rows = {(row + 0.5) / keys: row for row in range(0, keys, BS)}
    sheet.beside(place, rows, "row of K")
    sheet.below(place, {(h + 0.5) / H: f"KV head {h}" for h in range(H)})
    ids = given()["BlockIndices"][token, head].tolist()
    listed = ", ".join(str(block_id).replace("-", "−") for block_id in ids)
    sheet.title(place, f"K in memory; the list is [{listed}]")


def _draw_keys(sheet: Sheet, place: Place, m: Moment) -> None:
    """The key tile, masked elements in grey, with the bytes of the text."""
    keys = given()["K"]
    D = keys.shape[2]
    tile = np.where(m.keys.mask, keys.ravel()[np.where(m.keys.mask, m.keys.offsets, 0)], 0.0)
    colours = signed_bytes(tile.T, largest_of(tile))
    colours[:, ~m.is_seen] = byte_colour("masked")
    sheet.image(place, colours)
    _name_the_masked(sheet, place, m)
    sheet.title(place, f"the step's keys: {D} channels of {BS} keys")
    sheet.beside(place, {}, "channel")
    rows = m.keys.offsets[:, 0] // keys[0].size
    letters = [
        letter(example().text[row]) if on else "" for row, on in zip(rows, m.is_seen, strict=True)
    ]
    size = {"size": KEYS["size"] * place.width / WIDE}
    sheet.text(place.x(0.5), place.y(1) + 0.12, keys_in_a_row(letters), **KEYS | size)


def _name_the_masked(sheet: Sheet, place: Place, m: Moment) -> None:
    hidden = np.flatnonzero(~m.is_seen)
    if hidden.size:
        turned = {"angle": 90} if hidden.size < 4 else {}
        x, told = (hidden.mean() + 0.5) / BS, "empty slot" if hidden.size == BS else "masked"
        sheet.text(place.x(x), place.y(0.5), told, 9.5, ha="center", **turned)


def _draw_scores(sheet: Sheet, place: Place, m: Moment, head: int) -> None:
    scores = np.where(np.isfinite(m.scores), m.scores, 0.0)
    G = len(scores)
    colours = signed_bytes(scores, largest_of(scores))
    colours[:, ~m.is_seen] = byte_colour("masked")
    sheet.image(place, colours)
    sheet.beside(place, {(g + 0.5) / G: f"head {head * G + g}" for g in range(G)})
    sheet.title(place, "the step's scores, −∞ where masked")


def explore() -> Panel:
    """The interactive: walk one program through its blocks."""

    def render(token: int, head: int, slot: int) -> tuple[Picture, str]:
        return draw_step(token, head, slot), sentence(token, head, slot)

    def limits(token: int, head: int, **_: object) -> dict[str, range]:
        return {"slot": range(slots(token, head))}

    def idle(token: int, head: int, **_: object) -> set[str]:
        return {"slot"} if slots(token, head) == 1 else set()

    return panel(
        "one program, its pointers and its masks",
        render,
        limits=limits,
        idle=idle,
        slot=ipywidgets.IntSlider(0, 0, S - 1, description="slot"),
        token=ipywidgets.IntSlider(77, 0, N - 1, description="token"),
        head=ipywidgets.IntSlider(0, 0, example().k.shape[2] - 1, description="KV head"),
    )


# -- what was measured --


@functools.cache
def measured() -> dict:
    """The stored result of `python -m nsa_tutorial.bench`: machine, versions, command, rows."""
    return json.loads(MEASURED.read_text())


def times(tokens: int = 65536, group: int = 16, width: int = 128) -> dict[str, dict]:
    """The rows of one shape by what was changed; `"as it is"` is what `launch` chooses; dense
    attention goes by its names."""
    found = {}
    for row in measured()["rows"]:
        if (row["tokens"], row["group"], row["width"]) == (tokens, group, width):
            plain = "as it is" if row["kernel"] == "triton" else row["kernel"]
            found[row["change"] or plain] = row
    return found


def recorded(tokens: int = 65536, width: int = 128) -> str:
    """What a shape's times are times of, from the stored result."""
    told, row = measured(), times(tokens, width=width)["pointers"]
    lists = f"random lists of {row['slots']} blocks of {row['block_size']}"
    return (
        f"{told['machine']}, Triton {told['triton']}, torch {told['torch']}: {tokens:,} tokens of "
        f"width {width}, {row['dtype']},\n{row['kv_heads']} KV heads with groups of "
        f"{row['group']}, {lists}"
    )


def time_of_the_kernel() -> list[str]:
    """Lines: chapter 11's kernel beside dense attention, in the same recording."""
    named = {
        "pointers": "chapter 11's kernel",
        "dense, cuDNN": "dense attention, cuDNN",
        "dense, flash": "dense attention, PyTorch's flash kernel",
    }
    ms = {told: times()[name]["ms"] for name, told in named.items()}
    return [f"{recorded()}:", *(f"  {told:40} {time:6.1f} ms" for told, time in ms.items())]


def worst_change() -> str:
    """Which single change makes the kernel slowest, as the question names it."""
    asked = {"64 tokens": "steps of 64 tokens", "4 warps": "4 warps", "1 stage": "1 stage"}
    return max(asked, key=lambda name: times()[f"pointers, {asked[name]}"]["ms"])


def steps_of_64() -> list[str]:
    """Lines: kernels that take 64 keys a step, chapter 11's and chapter 10's."""
    tilelang = json.loads((ASSETS / "tilelang_forward_h200.json").read_text())
    change = "2 stages, number of slots fixed"
    ours = {
        "1 warp, 3 stages, 68 KiB": times()["pointers, steps of 64 tokens"],
        "2 warps, 2 stages, 36 KiB": times()["pointers, whole blocks, 2 warps, 2 stages"],
    }
    (theirs,) = (
        row for row in tilelang["rows"]
        if (row["change"], row["tokens"], row["width"], row["group"]) == (change, 65536, 128, 16)
    )  # fmt: skip
    lines = [f"{tilelang['machine']}, 65,536 tokens of width 128, random lists, 64 keys a step:"]
    for choices, row in ours.items():
        lines.append(f"  Triton, chapter 11's, {row['dtype']}, {choices}: {row['ms']:5.1f} ms")
    told = f"TileLang, chapter 10's, {theirs['dtype']}, 1 warp, 2 stages, 68 KiB"
    return [*lines, f"  {told}: {theirs['ms']:5.1f} ms"]


def beside_descriptors() -> list[str]:
    """Lines: both Triton kernels, in each recorded shape."""
    lines = []
    for tokens, width in ((65536, 128), (8192, 128), (65536, 64), (8192, 64)):
        found = times(tokens, width=width)
        ours, others = (found[name]["ms"] for name in ("pointers", "descriptors"))
        lines.append(
            f"  {tokens:6,} tokens, width {width:3}: chapter 11's kernel {ours:5.2f} ms, "
            f"with descriptors {others:5.2f} ms"
        )
    told = measured()
    return [f"{told['machine']}, Triton {told['triton']}, bfloat16, random lists:", *lines]


def beside_tilelang() -> list[tuple[int, int, float, float]]:
    """Tokens and width of each shape with groups of 16: how many times as fast as dense attention
    Triton was, and TileLang."""

    def ratios(rows: list[dict], kernel: str) -> dict[tuple[int, int], float]:
        plain = [
            row for row in rows if (row["kernel"], row["change"], row["group"]) == (kernel, "", 16)
        ]
        return {(row["tokens"], row["width"]): row["dense_ratio"] for row in plain}

    tilelang = json.loads((ASSETS / "tilelang_forward_h200.json").read_text())
    ours, theirs = ratios(measured()["rows"], "triton"), ratios(tilelang["rows"], "tilelang")
    return [(*shape, ours[shape], theirs[shape]) for shape in ours if shape in theirs]


CHANGED = {
    "pointers, steps of 16 tokens": "steps of 16 tokens",
    "pointers, steps of 64 tokens": "steps of 64 tokens",
    "pointers, 2 warps": "2 warps",
    "pointers, 4 warps": "4 warps",
    "pointers, 1 stage": "1 stage",
    "pointers, 2 stages": "2 stages",
    "pointers, 4 stages": "4 stages",
}


def draw_ladder() -> Picture:
    """The kernel's time as it is, and with one of its three choices changed."""
    ms = {label: times()[change]["ms"] for change, label in CHANGED.items()}
    ms = dict(sorted(ms.items(), key=lambda item: item[1]))
    worst, before = max(ms, key=ms.get), times()["pointers"]["ms"]
    bars = {"as it is: steps of 32 tokens,\n1 warp, 3 stages": before} | ms
    colours = [PALETTE["key"], *(PALETTE["masked"] for _ in ms)]
    colours[-1] = PALETTE["query"]
    figure, axes = new_figure(8.0, 3.6)
    axis = axes[0, 0]
    axis.barh(range(len(bars)), [*bars.values()], height=0.66, color=colours)
    axis.axvline(before, color=PALETTE["key"], linewidth=1.2, zorder=0)
    for y, (label, time) in enumerate(bars.items()):
        times_as_long = f", {time / before:.1f} times as long" if label == worst else ""
        inside = {"ha": "right", "color": SURFACE} if label == worst else {"ha": "left"}
        x = time - 0.3 if label == worst else time + 0.25
        axis.text(x, y, f"{time:.1f} ms{times_as_long}", va="center", fontsize=9.5, **inside)
    axis.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_xticks([])
    told = f"{worst.capitalize()} in place of 32: {before:.1f} ms become {ms[worst]:.1f}"
    return Picture(figure, told)
