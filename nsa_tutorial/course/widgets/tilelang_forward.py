"""Chapter 10's pictures: one program block by block, what the kernels become in CUDA, and what each
decision gave on a GPU.

`stepper` runs the PyTorch twin on real heads under `course.trace`; `draw_step` and `sentence` look
at one program of it, which `moving/list_walk.js` walks. `measured` and `lowered` read what was
stored: times from `python -m nsa_tutorial.bench`, and facts about the CUDA text of every variant,
half a minute's work for TileLang:

    python -m nsa_tutorial.course.widgets.tilelang_forward assets/tilelang_forward_cuda.json

Nothing here computes attention, and nothing needs TileLang but that command.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch
from torch import Tensor

from nsa_tutorial.course import heads
from nsa_tutorial.course.figures import (
    PALETTE,
    SURFACE,
    Picture,
    new_figure,
    readable_on,
    shades,
)
from nsa_tutorial.course.listing import Listing
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour, bytes_of
from nsa_tutorial.course.source import show
from nsa_tutorial.course.trace import Trace, trace
from nsa_tutorial.sparse import selected_attention

ASSETS = Path(__file__).resolve().parents[3] / "assets"
MEASURED, LOWERED = ASSETS / "tilelang_forward_h200.json", ASSETS / "tilelang_forward_cuda.json"
GROUPS = ASSETS / "tilelang_groups_h200.json"  # another run: groups of 16 and of 4

# -- what the kernels become --

EXAMPLE = {"H": 4, "G": 16, "D": 128, "BS": 64, "S": 16}  # also the shape of the measurements
WORDS = (
    "cp_async_gs", "cp_async_gs_conditional", "tma_load", "mbarrier", "mma_sync", "exp2f",
    "__syncthreads",
)  # fmt: skip
EXCERPTS = (
    "Q_shared =", "K_shared =", "V_shared =", "acc_s_cast", "float acc_o", "float acc_s",
    "float running_sum",
)  # fmt: skip


def variants() -> Iterator[tuple[str, str, object, dict]]:
    """Kernel, what is changed, the TileLang function, its pass configurations: what `lowered` holds
    a row of."""
    from tilelang import PassConfigKey as Key

    from nsa_tutorial.bench.variants import tilelang_first_draft as draft
    from nsa_tutorial.bench.variants.tilelang_variants import variant
    from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD as ours

    H, G, D, BS, S = EXAMPLE.values()

    def build(change: str = "", **numbers: int) -> object:
        return variant(change, **numbers).build_kernel(H, G, D, D, BS)

    def build_draft(**options: object) -> object:
        return draft.build_kernel(1, H * G, G, D, BS, S, **draft.MENDED, **options)

    def switched(key: Key, value: bool) -> tuple[object, dict]:
        return build(), {**ours, key: value}

    yield "ours", "", build(), ours
    yield "ours", "exact exp2", *switched(Key.TL_ENABLE_FAST_MATH, False)
    yield "ours", "TMA off", *switched(Key.TL_DISABLE_TMA_LOWER, True)
    yield "ours", "warp specialisation", *switched(Key.TL_DISABLE_WARP_SPECIALIZED, False)
    yield "ours", "no bounds checks", *switched(Key.TL_DISABLE_SAFE_MEMORY_ACCESS, True)
    for change in ("values through registers", "weights through shared memory"):
        yield "ours", change, build(change), ours
    yield "ours", "no stage", build(stages=0), ours
    yield "first draft", "2 stages", build_draft(), draft.PASS_CONFIGS
    yield "first draft", "1 stage", build_draft(num_stages=1), draft.PASS_CONFIGS


def facts(source: str) -> dict[str, object]:
    """What a chapter says of a kernel's CUDA text: its size and hash, counts of `WORDS`, where
    shared tiles begin, some lines."""
    kernel = source[source.index('extern "C" __global__ void __launch_bounds__') :]
    shared = re.findall(
        r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);", kernel
    )
    lines = [" ".join(line.split()) for line in kernel.splitlines()]
    shown = {word: next((line for line in lines if word in line), "") for word in EXCERPTS}
    return {
        "lines": len(source.splitlines()),
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        "counts": {word: kernel.count(word) for word in WORDS},
        "shared": {name: int(offset) for name, offset in shared},
        "excerpts": {word: line for word, line in shown.items() if line},
    }


def write_lowered(path: Path) -> None:
    """Lower every variant for sm_90 and store the facts."""
    from tilelang.cuda.intrinsics.layout.mma_layout import (
        mma_store_32x8_to_shared_16x16_layout as place,
    )

    from nsa_tutorial.runtime import lowering

    owner = [[0] * 16 for _ in range(16)]
    for thread in range(32):
        for element in range(8):
            row, column = place(thread, element)
            owner[row][column] = thread
    rows = []
    for kernel, change, function, pass_configs in variants():
        print(kernel, change, file=sys.stderr)
        found = facts(lowering.cuda(function, "sm_90", pass_configs))
        rows.append({"kernel": kernel, "change": change, **found})
    told = {
        "command": "python -m nsa_tutorial.course.widgets.tilelang_forward "
                   "assets/tilelang_forward_cuda.json",
        "tilelang": version("tilelang"), "target": "sm_90", "dtype": "float16", **EXAMPLE,
        "owner": owner, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(told, indent=1) + "\n")


@functools.cache
def lowered() -> dict:
    """What `write_lowered` stored; `lowered_row` finds one variant."""
    return json.loads(LOWERED.read_text())


def lowered_row(kernel: str, change: str = "") -> dict:
    """One variant's facts."""
    wanted = (kernel, change)
    return next(row for row in lowered()["rows"] if (row["kernel"], row["change"]) == wanted)


def tiles(row: dict) -> dict[str, int]:
    """Bytes of each shared tile of a variant, by name, from where they begin; where two tiles share
    a place, of one of them."""
    G, D, BS = EXAMPLE["G"], EXAMPLE["D"], EXAMPLE["BS"]
    last = 2 * G * BS if "acc_s_cast" in row["shared"] else 2 * BS * D  # bytes of the last tile
    names = {start: name for name, start in sorted(row["shared"].items())}
    starts = sorted(names)
    ends = [*starts[1:], starts[-1] + last]
    return {names[start]: end - start for start, end in zip(starts, ends, strict=True)}


# of an H100 or H200; what each program costs on top (CUDA programming guide)
SM_BYTES, PROGRAM_BYTES = 228 * 1024, 1024


def draw_shared() -> Picture:
    """The shared memory of one multiprocessor, filled with programs of three variants."""
    chosen = [
        ("our kernel, one block", lowered_row("ours")),
        ("the draft, one block", lowered_row("first draft", "1 stage")),
        ("the draft, two blocks", lowered_row("first draft", "2 stages")),
    ]
    colours = {"Q_shared": "query", "K_shared": "key", "V_shared": "value", "acc_s_cast": "faint"}
    figure, axes = new_figure(8.0, 2.9)
    axis, counts, labels = axes[0, 0], [], []
    for y, (variant, row) in enumerate(chosen):
        sizes = tiles(row)
        each = sum(sizes.values()) + PROGRAM_BYTES
        counts.append(SM_BYTES // each)
        labels.append(f"{variant}\n{sum(sizes.values()) // 1024} KiB a program")
        axis.barh(y, SM_BYTES / 1024, height=0.7, color=PALETTE["masked"], alpha=0.35)
        for program in range(counts[-1]):
            left = program * each / 1024
            axis.text(left, y - 0.37, f" {program + 1}", fontsize=8.5, va="bottom")
            for name, size in sizes.items():
                colour = colours[name]
                axis.barh(y, size / 1024, left=left, height=0.7, color=PALETTE[colour])
                if name in ("K_shared", "V_shared"):
                    look = {"ha": "center", "va": "center", "color": readable_on(colour)}
                    axis.text(left + size / 2048, y, name[0], fontsize=9, **look)
                left += size / 1024
            axis.barh(y, PROGRAM_BYTES / 1024, left=left, height=0.7, color=PALETTE["text"])
    axis.set_yticks(range(len(chosen)), labels)
    axis.set_ylim(len(chosen) - 0.5, -0.7)
    axis.set_xlim(0, SM_BYTES / 1024)
    axis.set_xlabel("shared memory of one multiprocessor, KiB", fontsize=9)
    thin = {"query": "Q_shared", "faint": "acc_s_cast, the weights", "text": "reserved"}
    handles = [Patch(color=PALETTE[colour], label=name) for colour, name in thin.items()]
    handles.append(Patch(color=PALETTE["masked"], alpha=0.35, label="unused"))
    look = {"ncols": 4, "fontsize": 8.5, "frameon": False, "handlelength": 1.0}
    figure.legend(handles=handles, loc="outside lower center", **look)
    return Picture(
        figure,
        f"One block each: an SM holds {counts[0]} of our programs, {counts[1]} of the draft's; "
        f"two blocks: {counts[2]}",
    )


def draw_fragment(thread: int = 5) -> Picture:
    """Which thread holds which element of a 16 × 16 piece of a fragment of scores."""
    owner = np.array(lowered()["owner"])
    figure, axes = new_figure(6.4, 4.6)
    axis = axes[0, 0]
    mine, neighbours = owner == thread, owner // 4 == thread // 4
    picture = np.where(mine, 1.0, np.where(neighbours, 0.35, 0.06))
    axis.imshow(picture, cmap=shades("selected"), vmin=0, vmax=1, interpolation="none")
    for i, j in np.ndindex(owner.shape):
        colour = SURFACE if mine[i, j] else PALETTE["text"]
        axis.text(j, i, owner[i, j], ha="center", va="center", fontsize=8, color=colour)
    axis.vlines(np.arange(17) - 0.5, -0.5, 15.5, color=SURFACE, linewidth=1)
    axis.hlines(np.arange(17) - 0.5, -0.5, 15.5, color=SURFACE, linewidth=1)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_xticks(range(0, 16, 2))
    axis.set_yticks(range(0, 16, 2))
    axis.set_xlabel("key of the block (the first 16 of 64)", fontsize=9)
    axis.set_ylabel("query head of the group", fontsize=9)
    row = len(np.unique(owner[0]))
    told = (
        f"Thread {thread} holds {mine.sum()} of these {owner.size} scores; each row lies "
        f"with {row} threads"
    )
    return Picture(figure, told)


def wrong_piece(name: str) -> Listing:
    """A piece of the first draft, without its docstring: that would tell the mistake."""
    whole = show(f"nsa_tutorial.bench.variants.tilelang_first_draft:{name}")
    lines = [line for line in whole.code.splitlines() if '"""' not in line]
    return replace(whole, code="\n".join(lines), first=None)


# -- what was measured --


@functools.cache
def measured(path: Path = MEASURED) -> dict:
    """A stored result of `python -m nsa_tutorial.bench selected`: machine, versions, command,
    rows."""
    return json.loads(path.read_text())


def times(
    tokens: int = 65536, group: int = 16, width: int = 128, path: Path = MEASURED
) -> dict[str, dict]:
    """The rows of one shape by what was changed; `"ours"` is the kernel as it is, and dense
    attention goes by its own names."""
    shape = (tokens, group, width)
    rows = [r for r in measured(path)["rows"] if (r["tokens"], r["group"], r["width"]) == shape]
    return {r["change"] or ("ours" if r["kernel"] == "tilelang" else r["kernel"]): r for r in rows}


def same_kernel() -> list[float]:
    """Milliseconds of our kernel at the shape of the pictures, each time that it was measured: one
    CUDA text, three times."""
    found = times()
    return [found[name]["ms"] for name in ("ours", "32 threads", "TMA off")]


def stage_times() -> dict[int, float]:
    """Milliseconds of our kernel at the shape of the pictures, by the stages of its pipeline."""
    names = {n: f"{n} stage{'s' * (n > 1)}, number of slots fixed" for n in (1, 2, 3)}
    names = {0: "no stage: each copy is waited for"} | names
    return {n: round(times()[name]["ms"], 1) for n, name in names.items()}


def ratios(change: str) -> list[float]:
    """How many times as long a change takes as ours, in each shape that was measured, from the
    least to the most."""
    shapes = sorted({(r["tokens"], r["group"], r["width"]) for r in measured()["rows"]})
    return sorted(times(*shape)[change]["ms"] / times(*shape)["ours"]["ms"] for shape in shapes)


CHAIN = {
    "first draft, mended, 2 stages": "the draft, mended",
    "first draft, mended, 1 stage": "one stage: five programs\nan SM, not three",
    "values through registers": "no branch: keys\narrive by cp.async",
    "ours": "a view: values arrive\nby cp.async, too",
}


def chain_times() -> dict[str, float]:
    """Milliseconds of the kernels of `CHAIN`, by what each of them gains."""
    found = times()
    return {label.replace("\n", " "): found[change]["ms"] for change, label in CHAIN.items()}


def _recorded() -> str:
    """Of what the times in the pictures are: two lines."""
    told, row = measured(), times()["ours"]
    shape = (
        f"{row['tokens']:,} tokens, {row['kv_heads']} KV heads, groups of {row['group']}, "
        f"width {row['width']}, {row['slots']} blocks of {row['block_size']} tokens"
    )
    dtype = {"float16": "fp16"}[row["dtype"]]
    return f"{shape},\n{dtype}, random lists, {told['machine']}, TileLang {told['tilelang']}"


def draw_chain() -> Picture:
    """From the first draft, mended, to our kernel, decision by decision."""
    ms = [*chain_times().values()]
    figure, axes = new_figure(8.0, 3.1)
    axis = axes[0, 0]
    colours = ["masked"] * (len(ms) - 1) + ["selected"]
    axis.barh(range(len(ms)), ms, height=0.66, color=[PALETTE[colour] for colour in colours])
    for y, (value, colour) in enumerate(zip(ms, colours, strict=True)):
        look = {"va": "center", "fontsize": 10, "color": readable_on(colour)}
        axis.text(0.4, y, f"{value:.1f} ms", **look)
    axis.set_yticks(range(len(ms)), list(CHAIN.values()), fontsize=9)
    axis.set_ylim(len(ms) - 0.5, -0.5)
    axis.set_xlim(0, max(ms) * 1.02)
    axis.set_xlabel(f"milliseconds; {_recorded()}", fontsize=8.5, loc="right")
    faster = f"{ms[0] / ms[-1]:.1f} times as fast"
    return Picture(figure, f"The same answer in {ms[0]:.1f} ms and in {ms[-1]:.1f} ms: {faster}")


UNDONE = {
    "weights through shared memory": "weights through shared memory",
    "values through registers": "values through registers",
    "no stage: each copy is waited for": "no stage",
    "2 stages, number of slots fixed": "2 stages, slots fixed",
    "3 stages, number of slots fixed": "3 stages, slots fixed",
    "64 threads": "2 warps a program",
    "128 threads": "4 warps a program",
    "256 threads": "8 warps a program",
}


def draw_undone() -> Picture:
    """Our kernel with one decision undone at a time."""
    found, same = times(), same_kernel()
    ours = found["ours"]["ms"]
    ms = {label: found[change]["ms"] for change, label in UNDONE.items()}
    figure, axes = new_figure(8.0, 3.1)
    axis = axes[0, 0]
    axis.barh(range(len(ms)), [*ms.values()], height=0.62, color=PALETTE["masked"])
    for y, value in enumerate(ms.values()):
        axis.text(value + 0.3, y, f"{value:.1f} ms", va="center", fontsize=9)
    axis.axvspan(min(same), max(same), color=PALETTE["selected"], alpha=0.3, linewidth=0)
    told = f"as it is, measured {len(same)} times: {min(same):.1f} to {max(same):.1f} ms"
    look = {"fontsize": 8.5, "ha": "left", "va": "bottom"}
    axis.text(max(same) + 0.3, -0.62, told, color=PALETTE["selected"], **look)
    axis.set_yticks(range(len(ms)), list(ms), fontsize=9)
    axis.set_ylim(len(ms) - 0.5, -1.1)
    axis.set_xlim(0, max(ms.values()) * 1.14)
    axis.set_xlabel(f"milliseconds; {_recorded()}", fontsize=8.5, loc="right")
    worst = max(ms, key=ms.get)
    longest = f"with {worst}, {ms[worst] / ours:.1f} times as long"
    return Picture(figure, f"One decision undone at a time: {longest}")


# -- one program, block by block --

N, BS, S = 96, 16, 4
COLOURS = (PALETTE["query"], SURFACE, PALETTE["selected"])  # negative, 0, positive
SIGNED = LinearSegmentedColormap.from_list("signed", COLOURS)


@dataclass(frozen=True)
class Example:
    """A call of selected attention on real heads.

    Attributes:
        q, k, v: the first `N` positions of the stored heads.
        ids: `[N, H, S]` int32: the group's best block, an empty slot, its second and its third
            best, by the true weights.
        rows: of `query_rows`.
        scale: of the scores.
        text: the bytes at the positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    rows: selected_attention.QueryRows
    scale: float
    text: bytes


@functools.cache
def example() -> Example:
    """The example of the stepper."""
    stored = heads.load()
    q, k, v = (x[:, :N].contiguous() for x in (stored.q, stored.k, stored.v))
    H = k.shape[2]
    mass = heads.block_mass(heads.attention_weights(q, k)[0], BS)  # [HQ, N, NB]
    best = mass.reshape(H, -1, *mass.shape[1:]).sum(1).topk(S - 1, -1)  # [H, N, S - 1]
    chosen = best.indices.masked_fill(best.values <= 0, -1)
    ids = torch.cat([chosen[..., :1], torch.full_like(chosen[..., :1], -1), chosen[..., 1:]], -1)
    rows = selected_attention.query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    ids = ids.transpose(0, 1).to(torch.int32).contiguous()
    return Example(q, k, v, ids, rows, q.shape[-1] ** -0.5, bytes(stored.text[:N]))


@functools.cache
def stepper() -> Trace:
    """The PyTorch twin on the example, with its variables at the end of every phase; all programs
    at once."""
    e = example()
    return trace(
        selected_attention.forward, e.q, e.k, e.v, e.ids, e.rows, block_size=BS, scale=e.scale
    )


@dataclass(frozen=True)
class Moment:
    """What one program holds at the end of a slot: tiles `[BS, D]`, scores in nats and weights
    `[G, BS]`, statistics `[G]`."""

    block_id: int
    is_seen: np.ndarray
    k_tile: np.ndarray
    v_tile: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    scores_max_prev: np.ndarray
    scores_max: np.ndarray
    scores_scale: np.ndarray
    running_sum: np.ndarray
    acc_o: np.ndarray


def held(run: Trace, token: int, head: int, slot: int) -> Callable[[str, str], np.ndarray]:
    """`(phase, name)` to what program (`token`, `head`) of a traced twin holds under that name when
    the phase ends in `slot`."""
    return lambda phase, name: run.at(phase, slot)[name][token, head].numpy()


@functools.cache
def moment(token: int, head: int, slot: int) -> Moment:
    """Slot `slot` of program (`token`, `head`), read from the trace."""
    mine, scale = held(stepper(), token, head, slot), example().scale
    softmax = "online softmax"
    return Moment(
        int(mine(softmax, "block_id")), mine("mask", "is_seen"),
        mine("mask", "k_tile"), mine("accumulate", "v_tile"),
        mine("mask", "acc_s") * scale, mine(softmax, "acc_s"),
        mine(softmax, "scores_max_prev") * scale, mine(softmax, "scores_max") * scale,
        mine(softmax, "scores_scale"),
        mine("accumulate", "running_sum"), mine("accumulate", "acc_o"),
    )  # fmt: skip


def sentence(token: int, head: int, slot: int) -> str:
    """What happens in one slot of one program, in words."""
    m = moment(token, head, slot)
    at = f"Program (token {token}, KV head {head}), slot {slot}: "
    if not m.is_seen.any():
        why = "an empty slot" if m.block_id < 0 else f"block {m.block_id} lies in the future"
        return f"{at}{why}. Nothing is seen, every factor is 1, the sums stay as they were."
    seen, raised = int(m.is_seen.sum()), int((m.scores_max > m.scores_max_prev).sum())
    return (
        f"{at}block {m.block_id}, keys {m.block_id * BS} to {m.block_id * BS + BS - 1}, "
        f"of which {seen} {'is' if seen == 1 else 'are'} seen. "
        f"The maximum rises in {raised} of {len(m.running_sum)} heads; the denominators are now "
        f"{', '.join(f'{x:.2f}' for x in m.running_sum)}."
    )


def signed_bytes(values: np.ndarray, largest: float) -> np.ndarray:
    """Numbers from `-largest` to `largest` as colours, orange to blue, a byte each."""
    return bytes_of(values, SIGNED, -largest, largest)


def keys_in_a_row(letters: list[str]) -> str:
    """One sign for each of `BS` keys, as `Sheet.text` writes them in `KEYS` under their columns."""
    return "  ".join(letter or " " for letter in letters)


# 16 columns of 0.225 inches; 9 points of a monospaced font take a third of one
WIDE, ALL_HEADS = 3.6, 0.62
KEYS = {"size": 8.97, "family": "monospace", "ha": "center"}


def draw_step(token: int = 77, head: int = 0, slot: int = 0) -> Picture:
    """What one program holds at the end of one slot: tiles, scores, weights, statistics,
    accumulator."""
    m, e = moment(token, head, slot), example()
    (G, DV), D = m.acc_o.shape, m.k_tile.shape[1]
    start, seen = m.block_id * BS, int(m.is_seen.sum())  # what is hidden lies behind what is seen
    scores = np.where(np.isfinite(m.scores), m.scores, 0)
    largest, heaviest = largest_of(scores), largest_of(m.weights)
    sheet, left, right = Sheet(8.3, 4.2), 0.75, 4.6
    drawn = {
        f"K_shared  [{BS} keys, {D} channels]": (
            Place(left, 0.58, WIDE, 1.28), signed_bytes(m.k_tile, largest_of(m.k_tile)), "rows",
        ),
        f"V_shared  [{BS} keys, {DV} channels]": (
            Place(right, 0.58, WIDE, 1.28), signed_bytes(m.v_tile, largest_of(m.v_tile)), "rows",
        ),
        f"acc_s: scores, −{largest:.1f} to {largest:.1f} nats": (
            Place(left, 2.16, WIDE, ALL_HEADS), signed_bytes(scores, largest), "columns",
        ),
        f"acc_s: weights, 0 to {heaviest:.2g}": (
            Place(right, 2.16, WIDE, ALL_HEADS),
            bytes_of(m.weights, shades("selected"), 0, heaviest), "columns",
        ),
        f"acc_o  [{G} heads, {DV} channels], not yet divided": (
            Place(left, 3.38, WIDE, ALL_HEADS), signed_bytes(m.acc_o, largest_of(m.acc_o)), "",
        ),
    }  # fmt: skip
    signs = keys_in_a_row([letter(byte) for byte in e.text[start : start + BS]]) if seen else ""
    heads = {(g + 0.5) / G: f"head {head * G + g}" for g in range(G)}
    for title, (place, colours, keys) in drawn.items():
        if keys == "rows":
            colours[seen:] = byte_colour("masked")
        elif keys == "columns":
            colours[:, seen:] = byte_colour("masked")
            sheet.text(place.x(0.5), place.y(1) + 0.1, signs, **KEYS)
        sheet.image(place, colours)
        sheet.title(place, title)
        if place.left == left:
            sheet.beside(place, {} if keys == "rows" else heads)
    if seen:
        name = f"keys {start} to {start + BS - 1}"
        sheet.beside(Place(left, 0.58, WIDE, 1.28), {}, name)
    draw_statistics(sheet, Place(right, 3.38, WIDE, ALL_HEADS), m, head)
    return Picture(sheet.figure, _finding(m, token, head, slot))


def largest_of(values: np.ndarray) -> float:
    """The largest size among numbers, for `signed_bytes`; 1 where all are 0."""
    return float(np.abs(values).max()) or 1.0


def _finding(m: Moment, token: int, head: int, slot: int) -> str:
    start = f"token {token}, KV head {head}, slot {slot}: "
    if not m.is_seen.any():
        return f"{start}empty; nothing is loaded, nothing changes"
    told, past = "there is no past to rescale", float(m.scores_scale.mean())
    if past:
        told = f"the past is multiplied by {past:.2f} on average"
    return f"{start}block {m.block_id}, {int(m.is_seen.sum())} of {BS} keys seen, {told}"


def letter(byte: int) -> str:
    """One sign for a byte of the text."""
    return {32: "␣", 10: "↵"}.get(byte, chr(byte) if byte > 31 else "·")


class Statistics(Protocol):
    """What `draw_statistics` shows of a step, of one number for each head."""

    scores_max_prev: np.ndarray
    scores_max: np.ndarray
    scores_scale: np.ndarray
    running_sum: np.ndarray


def draw_statistics(sheet: Sheet, place: Place, m: Statistics, head: int) -> None:
    """A row for each head of the group: its maximum before and after, the factor, the sum."""
    sheet.title(place, "per head, before → after this step")
    G = len(m.running_sum)
    maxima = zip(m.scores_max_prev, m.scores_max, strict=True)
    columns = {
        "head": (0.0, [str(head * G + g) for g in range(G)]),
        "scores_max, nats": (
            0.17, [f"{_nats(before)} → {_nats(after)}" for before, after in maxima],
        ),
        "scores_scale": (0.55, [f"{x:.3f}" for x in m.scores_scale]),
        "running_sum": (0.79, [f"{x:.3f}" for x in m.running_sum]),
    }  # fmt: skip
    for name, (share, numbers) in columns.items():
        sheet.text(place.x(share), place.top + 0.06, name, 8.5, "faint")
        words = "\n".join(numbers)
        look = {"family": "monospace", "va": "top"}
        sheet.text(place.x(share), place.top + 0.17, words, 8.5, **look)


def _nats(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "−∞"


if __name__ == "__main__":
    write_lowered(Path(sys.argv[1]))
