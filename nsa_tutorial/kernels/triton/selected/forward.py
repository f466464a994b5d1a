"""Chapter 11: selected attention, forward, in Triton; one program per (query, key/value head).

`kernel` is the GPU kernel; `launch` runs it, compiled on CUDA tensors, interpreted on CPU tensors.
The phases and the names are those of `selected_attention.forward`, where they are explained. The
guard is a mask, not a branch: an empty slot loads nothing, and a loop without branches is one whose
loads Triton can start early.

This is the kernel to read, and it runs everywhere. `selected.forward_tma` is faster on Hopper;
`selected.launch` takes the one or the other, and is what the operators call. Windows have a kernel
of their own, `window.forward`, and `selected.backward` has the gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.launch_options import launch_options, tile_sizes
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit
def count_slots(block_list, S, num_blocks):
    """How many of a list's `S` slots to walk: up to the last that names one of the first
    `num_blocks` blocks.

    `block_list` points at the first slot; 16 ids a load.
    """
    num_slots = 0
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        names_block = (ids >= 0) & (ids < num_blocks)
        num_slots = tl.maximum(num_slots, tl.max(tl.where(names_block, slot + 1, 0), axis=0))
    return num_slots


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def kernel(
    Q, K, V, BlockIndices, FirstKey, NumVisible, Output, LSE,
    scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, SlotScale=None,
):  # fmt: skip
    """Reads `Q [R, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `BlockIndices [R, H, S]`,
    `FirstKey [R]`, `NumVisible [R]`; writes `Output [R, H, G, DV]` and `LSE [R, H, G]`.

    The grid is `(R, H)`. `GT, DT, DVT` are `G, D, DV` rounded up to powers of two of at least 16.
    `BT` is how many tokens of a block a step takes, a power of two; a `BT` of `BS` or more takes
    whole blocks. `SlotScale [R, H, S]` holds a factor for each slot; without it, no code for
    factors is compiled.
    """
    # -- locate the program --
    query = tl.program_id(0).to(tl.int64)  # 64 bits: query * H * G * D may pass 2**31
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + query).to(tl.int64)
    num_visible = tl.load(NumVisible + query)
    num_blocks = tl.cdiv(num_visible, BS)  # blocks that hold a visible key
    block_list = BlockIndices + (query * H + head) * S
    num_slots = count_slots(block_list, S, num_blocks)
    group = tl.arange(0, GT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    group_row = (query * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every block
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]

    # -- load the query group --
    q_mask = in_group[:, None] & (width < D)
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)  # [GT, DT]

    # -- initialise --
    acc_o = tl.zeros([GT, DVT], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    # One flat loop over the steps of all blocks: Triton pipelines the innermost loop, and a loop
    # over a block's steps inside a loop over blocks would drain the pipeline at every block.
    PARTS: tl.constexpr = (BS + BT - 1) // BT  # steps of a block
    for step in range(num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot)
        is_visible = (block_id >= 0) & (block_id < num_blocks)
        start = tl.where(is_visible, block_id, 0) * BS + part_start
        num_seen = tl.where(is_visible, tl.minimum(BS - part_start, num_visible - start), 0)
        is_seen = tokens < num_seen  # [BT]
        key_piece = (first_key + start) * H + head  # a piece: D elements, a key's for one head

        # -- load the keys --
        k_mask = is_seen[:, None] & (width < D)
        k_tile = tl.load(K + key_piece * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        if SlotScale is not None:  # the slot's factor; what an empty slot has there is masked below
            acc_s *= tl.load(SlotScale + (query * H + head) * S + slot)

        # -- mask --
        acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
        # where nothing is seen yet, -inf - -inf would be NaN
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
        scores_scale = tl.exp2((scores_max_prev - shift) * scale_log2)
        acc_s = tl.exp2((acc_s - shift[:, None]) * scale_log2)
        scores_sum = tl.sum(acc_s, axis=1)
        running_sum = running_sum * scores_scale + scores_sum
        acc_o = acc_o * scores_scale[:, None]

        # -- load the values --
        v_mask = is_seen[:, None] & (value_width < DV)
        v_tile = tl.load(V + key_piece * DV + v_offset, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    is_empty = num_slots == 0  # no block is visible
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = acc_o / safe_sum[:, None]  # [GT, DVT]
    lse = scores_max * scale + tl.log(safe_sum)  # [GT], -inf for an empty row
    o_mask = in_group[:, None] & (value_width < DV)
    o_pointer = Output + group_row[:, None] * DV + value_width  # [GT, DVT]
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + group_row, lse, mask=in_group)


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel.

    Args:
        q, k, v, ids, rows, block_size, scale, slot_scale: as in `selected_attention.forward`.
        out: contiguous tensors to write to; None makes new ones.
        options: `BT`, `num_warps`, `num_stages`, in place of what `launch_options` chooses.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]` in fp32.
    """
    sizes = {"block_size": block_size, "scale": scale}
    grid, given = arguments(q, k, v, ids, rows, **sizes, slot_scale=slot_scale)
    if out is not None:
        given["Output"], given["LSE"] = out
    kernel[grid](**given, **options_of(given) | options)
    return given["Output"], given["LSE"]


def arguments(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[tuple[int, int], dict[str, object]]:  # fmt: skip
    """The grid of a launch, and the kernel's arguments by name, less the options: its outputs too,
    still empty. Args as in `launch`."""
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    R, G, S = B * N, HQ // H, ids.shape[-1]
    given = {
        "Q": q.contiguous(), "K": k.contiguous(), "V": v.contiguous(),
        "BlockIndices": ids, "FirstKey": rows.first_key, "NumVisible": rows.num_visible,
        "SlotScale": None if slot_scale is None else slot_scale.contiguous(),
        "Output": v.new_empty(B, N, HQ, DV),
        "LSE": v.new_empty(B, N, HQ, dtype=torch.float32),
        "scale": scale, "scale_log2": scale * LOG2_E,
        "H": H, "S": S, "G": G, "D": D, "DV": DV, "BS": block_size,
    }  # fmt: skip
    return (R, H), given | tile_sizes(G, D, DV)


def options_of(given: dict[str, object]) -> dict[str, int]:
    """The launch options of a call's `arguments`."""
    shape = {name: given[name] for name in ("G", "D", "DV", "BS")}
    q = given["Q"]
    return launch_options(**shape, itemsize=q.element_size(), shared_memory=shared_memory(q.device))
