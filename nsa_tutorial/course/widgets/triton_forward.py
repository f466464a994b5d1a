"""Chapter 11's pictures: the Triton kernel's pointer tiles and masks, found by running its own
source, and what was measured.

`program` runs one program of `triton_forward.kernel` (`course.recorder`) on any small call;
`record` does so on chapter 10's real heads, and `moment` adds the tiles that the PyTorch twin holds
in the same step (`course.trace`). `draw_step`, `sentence` and `explore` show both beside each
other. `measured` reads the times stored by `python -m nsa_tutorial.bench`.

Nothing here computes attention, and nothing needs Triton.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, new_figure, readable_on, shades
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour
from nsa_tutorial.course.trace import Trace, trace
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.tilelang_forward import (
    ALL_HEADS,
    ASSETS,
    BS,
    KEYS,
    WIDE,
    N,
    S,
    draw_statistics,
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

KERNEL = "nsa_tutorial.kernels.triton_forward:kernel"
DESCRIPTOR_KERNEL = "nsa_tutorial.kernels.triton_descriptors:descriptor_kernel"
MEASURED = ASSETS / "triton_forward_h200.json"
WINDOW = 40  # keys of the stepper's window: two and a half blocks
_NOTHING = "#EDEFF1"


# -- one program of the kernel --


def power_of_two(n: int) -> int:
    """The least length of a tile's side that holds `n`: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def arguments(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, window_size: int = 0, BT: int | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> dict[str, object]:  # fmt: skip
    """The kernel's arguments for the recorder, of a call of `triton_forward.launch`; outputs are
    NaN until they are stored.

    `tiles` are `GT, DT, DVT` where the padding is in the way of seeing something.
    """
    (B, queries, HQ, D), (H, DV) = q.shape, v.shape[2:]
    R, G, slots = B * queries, HQ // H, ids.shape[-1]
    outputs = (1 + (window_size > 0)) * R
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
        "R": R, "first_row": 0, "H": H, "S": slots, "window_size": window_size,
        "G": G, "D": D, "DV": DV, "BS": block_size, "WINDOW": window_size > 0,
        "GT": GT, "DT": DT, "DVT": DVT, "BT": BT or block_size,
    }  # fmt: skip
    empty = {
        "Output": np.full((outputs, H, G, DV), np.nan),
        "LSE": np.full((outputs, H, G), np.nan),
    }
    return {name: x.numpy() for name, x in arrays.items()} | empty | numbers


def program(ids: tuple[int, int], call: dict[str, object]) -> recorder.Record:
    """Run program `(row, head)` of the kernel; `call` are `arguments`, and it stores to their
    outputs."""
    return recorder.run(KERNEL, ids, call)


def descriptor_program(ids: tuple[int, int], call: dict[str, object]) -> recorder.Record:
    """Run program `(row, head)` of the kernel with tensor descriptors; `call` are `arguments`."""
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
    """Two slots' tiles in the memory of K, and the offsets within a tile, which are the same for
    both."""
    first, second = loads(pointer_example(), "K")
    keys, H, D = pointer_example().shapes["K"]
    figure, axes = new_figure(8.0, 4.3, columns=2, width_ratios=(5, 4))
    figure.set_layout_engine(None)
    axis, tile = axes[0]
    axis.set_position([0.08, 0.13, 0.36, 0.72])
    tile.set_position([0.60, 0.36, 0.22, 0.40])
    colours = np.tile(np.array(to_rgb(_NOTHING)), (keys, H * D, 1))
    for access in (first, second):
        colours.reshape(-1, 3)[access.touched] = to_rgb(PALETTE["key"])
    _squares(axis, colours)
    for offset in range(keys * H * D):
        i, j = divmod(offset, H * D)
        shade = readable_on(tuple(colours[i, j]))
        axis.text(j, i, offset, ha="center", va="center", fontsize=8.5, color=shade)
    below = second.offsets[~second.mask].reshape(-1, D)
    dotted = {"fill": False, "edgecolor": PALETTE["key"], "linestyle": ":"}
    for i in below[:, 0] // (H * D):
        axis.add_patch(Rectangle((D - 0.45, i - 0.45), D - 0.1, 0.9, **dotted))
    axis.set_ylim(keys + 1.5, -0.5)
    axis.set_xticks([0.5, 2.5], ["head 0", "head 1"], fontsize=9)
    axis.set_yticks(range(keys))
    axis.set_ylabel("row of K: the key", fontsize=9)
    axis.set_title("K [10, 2, 2], each element's offset", fontsize=9.5)
    base = [int(access.offsets.min()) for access in (first, second)]
    inside = first.offsets - base[0]
    if not np.array_equal(inside, second.offsets - base[1]):
        raise AssertionError("the offsets within a tile have moved")
    _squares(tile, np.tile(np.array(to_rgb(_NOTHING)), (*inside.shape, 1)))
    for i, j in np.ndindex(inside.shape):
        tile.text(j, i, inside[i, j], ha="center", va="center", fontsize=9, color=PALETTE["text"])
    tile.set_xticks(range(D))
    tile.set_yticks(range(inside.shape[0]))
    tile.set_xlabel("channel", fontsize=9)
    tile.set_ylabel("token of the block", fontsize=9)
    tile.set_title("k_offset: the same for every slot", fontsize=9.5)
    for y, slot, block in ((0.17, 0, 0), (0.10, 1, 2)):
        told = f"begins at {base[slot]}, {_loading((first, second)[slot])}"
        figure.text(0.53, y, f"slot {slot}, block {block}: {told}", fontsize=9.5)
    moved = base[1] - base[0]
    told = f"From slot 0 to slot 1 the base moves by {moved}; the {inside.size} offsets stay"
    return Picture(figure, told)


def _loading(access: recorder.Access) -> str:
    return f"{int(access.mask.sum())} of {access.mask.size} elements load"


def _squares(axis: Axes, colours: np.ndarray) -> None:
    rows, columns = colours.shape[:2]
    axis.imshow(colours, aspect="auto", interpolation="none")
    axis.vlines(np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color=SURFACE, linewidth=1)
    axis.hlines(np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color=SURFACE, linewidth=1)
    axis.tick_params(length=0, labelsize=8.5)
    axis.spines[:].set_visible(False)


# -- packed sequences, windows --


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
    figure, axes = new_figure(6.6, 3.7)
    figure.set_layout_engine(None)
    axis = axes[0, 0]
    axis.set_position([0.10, 0.15, 0.46, 0.66])
    _squares(axis, colours)
    axis.set_xticks(range(tokens))
    axis.set_yticks(range(tokens))
    axis.set_xlabel("row of K", fontsize=9)
    axis.set_ylabel("query", fontsize=9)
    for x, title, values in ((1.2, "FirstKey", first), (1.55, "NumVisible", visible)):
        axis.text(x, 1.03, title, transform=axis.transAxes, ha="center", fontsize=9)
        beside = {"transform": axis.get_yaxis_transform(), "ha": "center", "va": "center"}
        for i, value in enumerate(values):
            axis.text(x, i, value, fontsize=9, **beside)
    pairs = f"{int(sees.sum())} of {tokens**2} pairs"
    seen = f"{tokens} queries of {len(cu_seqlens) - 1} sequences see {pairs}"
    told = f"{seen}; two numbers a query say which"
    return Picture(figure, told)


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
    colours = {"in the window": "window", "in the blocks, not in the window": "masked"}
    handles = [Patch(color=PALETTE[colour], label=label) for label, colour in colours.items()]
    title = "numbers: the block in which the program finds the key"
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False,
        handlelength=1.0, title=title, title_fontsize=9,
    )  # fmt: skip
    full = slice(window_size - 1, None)
    counts = aligned.sum(1)[full]
    told = (
        f"A window of {window_size} is {window_size} keys; whole aligned blocks would show "
        f"{counts.min()} to {counts.max()}"
    )
    return Picture(figure, told)


# -- one program, step by step --


@functools.cache
def _window_rows() -> tuple[Tensor, QueryRows]:
    """Each row's list, and its keys counted from its window's first."""
    e = example()
    ids, rows = sliding_window.as_selection(e.rows, window_size=WINDOW, block_size=BS)
    return ids.expand(len(rows.position), e.k.shape[2], -1), rows


@functools.cache
def twin(branch: str) -> Trace:
    """The PyTorch twin on the example: `"list"`, or `"window"`, its window as a list. All programs
    at once."""
    e = example()
    ids, rows = (e.ids, e.rows) if branch == "list" else _window_rows()
    return trace(selected_attention.forward, e.q, e.k, e.v, ids, rows, block_size=BS, scale=e.scale)


@functools.cache
def given() -> dict[str, object]:
    """The kernel's arguments on the example; what recorded programs stored is in its outputs."""
    e = example()
    return arguments(e.q, e.k, e.v, e.ids, e.rows, block_size=BS, window_size=WINDOW)


def row_of(branch: str, token: int) -> int:
    """The program's first id: rows of windows follow those of lists."""
    return token + (N if branch == "window" else 0)


@functools.cache
def record(branch: str, token: int, head: int) -> recorder.Record:
    """One program of the kernel on the example, lists and windows in one launch."""
    return program((row_of(branch, token), head), given())


def slots(branch: str, token: int, head: int) -> int:
    """Steps of the program's loop: a window's list is as long as what it shows."""
    return len(loads(record(branch, token, head), "K"))


@dataclass(frozen=True)
class Moment:
    """One step of one program: what it loads, from the kernel, and the twin's tiles, scores in
    nats."""

    keys: recorder.Access
    block_id: int
    scores: np.ndarray
    weights: np.ndarray
    scores_max_prev: np.ndarray
    scores_max: np.ndarray
    scores_scale: np.ndarray
    running_sum: np.ndarray

    @property
    def is_seen(self) -> np.ndarray:
        """The keys of the block that are loaded."""
        return np.asarray(self.keys.mask.any(1))


def moment(branch: str, token: int, head: int, slot: int) -> Moment:
    """Step `slot` of program (`token`, `head`) of a branch."""
    mine, scale = held(twin(branch), token, head, slot), example().scale
    softmax = "online softmax"
    return Moment(
        keys=loads(record(branch, token, head), "K")[slot],
        block_id=int(mine(softmax, "block_id")),
        scores=mine("mask", "acc_s") * scale,
        weights=mine(softmax, "acc_s"),
        scores_max_prev=mine(softmax, "scores_max_prev") * scale,
        scores_max=mine(softmax, "scores_max") * scale,
        scores_scale=mine(softmax, "scores_scale"),
        running_sum=mine("accumulate", "running_sum"),
    )


def slice_rows(m: Moment) -> int:
    """How many rows of K the TileLang kernel's `T.copy` takes in this step: a whole block, up to
    the tensor's end."""
    if not m.is_seen.any():
        return 0
    return min(BS, N - int(m.keys.touched.min()) // given()["K"][0].size)


def _rows(n: int) -> str:
    return f"{n} row{'s' * (n != 1)}"


def sentence(branch: str = "list", token: int = 77, head: int = 0, slot: int = 0) -> str:
    """What one step loads and does, in words."""
    m = moment(branch, token, head, slot)
    at = f"Program ({row_of(branch, token)}, {head}), the {branch} of token {token}, slot {slot}: "
    if not m.is_seen.any():
        return f"{at}an empty slot. All {m.keys.mask.size} elements are masked: nothing changes."
    first, rose = int(m.keys.touched.min()), int((m.scores_max > m.scores_max_prev).sum())
    sums = ", ".join(f"{x:.2f}" for x in m.running_sum)
    return (
        f"{at}block {m.block_id}, from offset {first} of K: {_loading(m.keys)}, "
        f"{_rows(int(m.is_seen.sum()))}; TileLang's slice copies {slice_rows(m)}. "
        f"The maximum rises in {rose} of {len(m.running_sum)} heads; the denominators are now "
        f"{sums}."
    )


def draw_step(branch: str = "list", token: int = 77, head: int = 0, slot: int = 0) -> Picture:
    """What one step touches of K, its tile of keys, and the twin's scores and statistics."""
    m = moment(branch, token, head, slot)
    sheet, right = Sheet(8.3, 4.2), 4.6
    _draw_memory(sheet, Place(0.72, 0.6, 3.1, 3.3), m, given()["K"].shape, head)
    _draw_keys(sheet, Place(right, 0.58, WIDE, 1.2), m, given()["K"])
    _draw_scores(sheet, Place(right, 2.24, WIDE, ALL_HEADS), m, head)
    draw_statistics(sheet, Place(right, 3.38, WIDE, ALL_HEADS), m, head)
    whose = f"Token {token}" if branch == "list" else f"Token {token}'s window"
    return Picture(sheet.figure, f"{whose}, slot {slot}: {_loaded_keys(m)}")


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


def _draw_memory(
    sheet: Sheet, place: Place, m: Moment, shape: tuple[int, int, int], head: int
) -> None:
    keys, H, D = shape
    colours = np.tile(byte_colour(_NOTHING), (keys, H * D, 1))
    colours.reshape(-1, 3)[m.keys.touched] = byte_colour("key")
    sheet.image(place, colours)
    sheet.cuts(place, keys // BS, H, 1.2)
    rows = {(row + 0.5) / keys: row for row in range(0, keys, BS)}
    sheet.beside(place, rows, "row of K (blocks of the sequence)")
    sheet.below(place, {(h + 0.5) / H: f"KV head {h}" for h in range(H)})
    if not m.keys.touched.size:
        sheet.title(place, "K in memory: no address is used")
        return
    base, copied = int(m.keys.touched.min()), slice_rows(m)
    top = place.y(base // (H * D) / keys)
    left, high = place.x(head / H), copied / keys * place.height
    dashed = {"edgecolors": PALETTE["query"], "linestyles": "--", "linewidths": 1.2}
    frame = (left - 0.02, top - 0.02, place.width / H + 0.04, high + 0.04)
    sheet.boxes([frame], "none", **dashed)
    x, side = (left - 0.06, "right") if head > 1 else (left + place.width / H + 0.08, "left")
    told = f"TileLang's slice,\n{_rows(copied)}"
    # close to an edge the two lines of text move back inside
    y = min(max(top + high / 2, place.y(0) + 0.15), place.y(1) - 0.15)
    sheet.text(x, y, told, 8.5, "query", ha=side)
    sheet.title(place, f"K in memory, loaded from offset {base:,}")


def _draw_keys(sheet: Sheet, place: Place, m: Moment, keys: np.ndarray) -> None:
    """The key tile, masked elements in grey, with the bytes of the text."""
    D = keys.shape[2]
    tile = np.where(m.keys.mask, keys.ravel()[np.where(m.keys.mask, m.keys.offsets, 0)], 0.0)
    colours = signed_bytes(tile.T, largest_of(tile))
    colours[:, ~m.is_seen] = byte_colour("masked")
    sheet.image(place, colours)
    sheet.title(place, f"k_tile, turned: {D} channels by {BS} keys, grey: masked")
    sheet.beside(place, {}, "channel")
    rows = m.keys.offsets[:, 0] // keys[0].size
    letters = [
        letter(example().text[row]) if on else "" for row, on in zip(rows, m.is_seen, strict=True)
    ]
    sheet.text(place.x(0.5), place.y(1) + 0.1, keys_in_a_row(letters), **KEYS)


def _draw_scores(sheet: Sheet, place: Place, m: Moment, head: int) -> None:
    scores = np.where(np.isfinite(m.scores), m.scores, 0.0)
    top, G = largest_of(scores), len(scores)
    colours = signed_bytes(scores, top)
    colours[:, ~m.is_seen] = byte_colour("masked")
    sheet.image(place, colours)
    sheet.beside(place, {(g + 0.5) / G: f"head {head * G + g}" for g in range(G)})
    told = f"scores, −{top:.1f} to {top:.1f} nats" if m.is_seen.any() else "no score counts"
    sheet.title(place, f"acc_s: {told}")


def explore() -> Panel:
    """The interactive: walk one program, of the lists or of the windows, through its blocks."""

    def render(branch: str, token: int, head: int, slot: int) -> tuple[Picture, str]:
        return draw_step(branch, token, head, slot), sentence(branch, token, head, slot)

    def limits(branch: str, token: int, head: int, **_: object) -> dict[str, range]:
        return {"slot": range(slots(branch, token, head))}

    def idle(branch: str, token: int, head: int, **_: object) -> set[str]:
        return {"slot"} if slots(branch, token, head) == 1 else set()

    branches = ["list", "window"]
    return panel(
        "one program, its pointers and its masks",
        render,
        limits=limits,
        idle=idle,
        branch=ipywidgets.Dropdown(options=branches, value="list", description="branch"),
        token=ipywidgets.IntSlider(77, 0, N - 1, description="token"),
        head=ipywidgets.IntSlider(0, 0, example().k.shape[2] - 1, description="KV head"),
        slot=ipywidgets.IntSlider(0, 0, S - 1, description="slot"),
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


CHAIN = {
    "pointers, whole blocks, 2 warps, 2 stages": "version 1, pointers:\nwhole blocks, 2 warps",
    "pointers": "version 2, pointers:\nsteps of 32, 1 warp, 3 stages",
    "descriptors": "version 3,\ntensor descriptors",
}
# The same kernel, measured four times.
SAME = "pointers", "pointers, steps of 32 tokens", "pointers, 1 warp", "pointers, 3 stages"
CHANGED = {
    "pointers, steps of 16 tokens": "steps of 16 tokens",
    "pointers, steps of 64 tokens": "steps of 64 tokens",
    "pointers, 2 warps": "2 warps",
    "pointers, 4 warps": "4 warps",
    "pointers, 1 stage": "1 stage",
    "pointers, 2 stages": "2 stages",
    "pointers, 4 stages": "4 stages",
}


def spread() -> tuple[float, float]:
    """The shortest and the longest time of the kernel with pointers, measured four times in one run
    of the benchmark."""
    ms = [times()[change]["ms"] for change in SAME]
    return min(ms), max(ms)


def draw_ladder() -> Picture:
    """From the first version to tensor descriptors, and the version with pointers with one decision
    changed at a time."""
    found = times()
    chain = {label: found[change]["ms"] for change, label in CHAIN.items()}
    changed = {label: found[change]["ms"] for change, label in CHANGED.items()}
    figure, axes = new_figure(8.0, 4.6, rows=2, height_ratios=(4, 7))
    axes[0, 0].sharex(axes[1, 0])
    colours = [PALETTE["masked"], PALETTE["key"], PALETTE["selected"]]
    drawn = (axes[0, 0], chain, colours), (axes[1, 0], changed, PALETTE["masked"])
    for axis, bars, colour in drawn:
        axis.barh(range(len(bars)), [*bars.values()], height=0.64, color=colour)
        for y, ms in enumerate(bars.values()):
            label = axis.text(ms + 0.2, y, f"{ms:.1f} ms", va="center", fontsize=9)
            label.set_bbox({"facecolor": SURFACE, "edgecolor": "none", "pad": 0.8})
        axis.set_yticks(range(len(bars)), list(bars), fontsize=8.5)
        axis.set_ylim(len(bars) - 0.45, -0.6)
    low, high = spread()
    axes[1, 0].axvspan(low, high, color=PALETTE["key"], alpha=0.35, zorder=0, linewidth=0)
    band = f"band: version 2, {len(SAME)} times, {low:.1f} to {high:.1f} ms"
    axes[1, 0].set_title(f"version 2 with one change; {band}", fontsize=9, loc="left")
    axes[1, 0].set_xlim(0, max([*chain.values(), *changed.values()]) * 1.12)
    shape = "65,536 tokens, 4 KV heads, groups of 16, width 128, 16 blocks of 64, bf16"
    axes[1, 0].set_xlabel(f"milliseconds; {shape}", fontsize=8.5)
    worst, best = max(changed, key=changed.get), min(chain.values())
    before, after = found["pointers"]["ms"], changed[worst]
    ratio = f"{after / before:.1f}"
    longer = "double the time" if ratio == "2.0" else f"take {ratio} times as long"
    told = f"{worst.capitalize()} alone {longer}, from {before:.1f} to {after:.1f} ms"
    return Picture(figure, f"{told}; the best version takes {best:.1f}")
