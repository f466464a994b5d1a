"""Chapter 13's gradient of the queries with tensor descriptors: the second step, for Hopper and
later.

`dq_kernel` does what `selected.backward.dq_kernel` does. The tensor memory accelerator fetches
whole blocks for it, and its loop has no mask. `selected.backward_launch` calls it for the tensors
that `selected.forward_tma.can_walk` admits, where slots have no factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.selected.backward import LOG2_E
from nsa_tutorial.kernels.triton.selected.forward_tma import scan_list


@triton.jit
def add_tile(acc_dq, q_tile, do_tile, k_tile, v_tile, lse, delta, scale_log2):
    """`acc_dq` with what one tile of keys and values adds to it.

    The values come first, and are done with before the keys, which two products need. H200, Triton
    3.6, bf16, 64 heads over 4, D 128, 8,192 random queries, by the profiler: 1,018 microseconds,
    and 1,112 with the keys first.
    """
    d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [GT, BT]
    acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
    p = tl.exp2(acc_s * scale_log2 - lse[:, None])
    d_s = p * (d_p - delta[:, None])
    return tl.dot(d_s.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def dq_kernel(
    Q, K, V, KDescriptor, VDescriptor, GradO, LSE, Delta, LSE2, BlockIndices, FirstKey, NumVisible,
    GradQ, scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, BT: tl.constexpr, Count=None, T: tl.constexpr = 1,
):  # fmt: skip
    """`selected.backward.dq_kernel` of lists, where `BT` divides `BS`, and `D` and `DV` are powers
    of two. `Count` and `T` are those of `selected.forward_tma.descriptor_kernel`."""
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if Count is not None:  # noqa: SIM102, Triton evaluates both sides of an `and`
        if tl.load(Count + row // T * H + head) >= 0:
            return
    first_key = tl.load(FirstKey + row)
    num_visible = tl.load(NumVisible + row)
    num_whole = num_visible // BS  # blocks that are visible as a whole; the next one may be in part
    block_list = BlockIndices + (row * H + head) * S
    start_slot, num_slots, num_partial = scan_list(block_list, S, num_whole)
    start_slot = tl.minimum(start_slot, num_slots)
    num_partial = tl.where(num_visible % BS == 0, 0, num_partial)
    needs_grad = tl.load(LSE2 + (row * H + head) * G) != float("inf")
    num_slots = tl.where(needs_grad, num_slots, start_slot)
    num_partial = tl.where(needs_grad, num_partial, 0)
    last_block = tl.load(block_list + num_slots - 1, mask=num_slots > start_slot, other=0)
    group = tl.arange(0, GT)
    width = tl.arange(0, D)
    value_width = tl.arange(0, DV)
    tokens = tl.arange(0, BT)
    group_row = (row * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]

    # -- load the query group --
    q_offset = group_row[:, None] * D + width  # [GT, D]
    do_offset = group_row[:, None] * DV + value_width  # [GT, DV]
    q_tile = tl.load(Q + q_offset, mask=in_group[:, None], other=0.0)
    do_tile = tl.load(GradO + do_offset, mask=in_group[:, None], other=0.0)
    lse = tl.load(LSE + group_row, mask=in_group, other=0.0) * LOG2_E  # in base two
    delta = tl.load(Delta + group_row, mask=in_group, other=0.0)

    # -- initialise --
    acc_dq = tl.zeros([GT, D], tl.float32)

    PARTS: tl.constexpr = BS // BT
    for step in range(start_slot * PARTS, num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot)
        is_whole = (block_id >= 0) & (block_id < num_whole)
        # an empty slot between two others: the list's last block again, with weights of 0
        key_row = first_key + tl.where(is_whole, block_id, last_block) * BS + part_start

        # -- load the keys and the values --
        v_tile = VDescriptor.load([key_row, head, 0]).reshape([BT, DV])
        k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])

        # -- the five lines --
        lse_seen = tl.where(is_whole, lse, float("inf"))
        acc_dq = add_tile(acc_dq, q_tile, do_tile, k_tile, v_tile, lse_seen, delta, scale_log2)

    # -- the block that is visible in part --
    partial_start = num_whole * BS
    num_parts = tl.cdiv(num_visible - partial_start, BT)
    for step in range(num_partial * num_parts):
        start = partial_start + step % num_parts * BT
        is_seen = tokens < num_visible - start  # [BT]
        key_row = ((first_key + start).to(tl.int64) + tokens) * H + head  # [BT]
        k_tile = tl.load(K + key_row[:, None] * D + width, mask=is_seen[:, None], other=0.0)
        v_tile = tl.load(V + key_row[:, None] * DV + value_width, mask=is_seen[:, None], other=0.0)
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        p = tl.where(is_seen, tl.exp2(acc_s * scale_log2 - lse[:, None]), 0.0)
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [GT, BT]
        d_s = tl.where(is_seen, p * (d_p - delta[:, None]), 0.0)
        acc_dq = tl.dot(d_s.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")

    # -- store --
    tl.store(GradQ + q_offset, (acc_dq * scale).to(GradQ.dtype.element_ty), mask=in_group[:, None])
