"""The backward of `selected.tokens_forward`, in Triton.

A program walks a query's list, as the forward does, and has in hand all that the gradients of its
tokens need: it adds them to fp32 sums in memory by atomics. The inverse of the lists would gather a
whole group of queries for every single key, sixteen times the bytes for a group of sixteen, but it
adds in a fixed order. So it stays where PyTorch is told to be deterministic, and for fp32, whose
gradients want short sums; then `ATOMICS` is off, and the kernel writes the queries' gradients
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.launch_options import dq_options
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall
from nsa_tutorial.kernels.triton.selected.tokens_forward import count_slots, tokens_of_slots

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def gradient_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, BlockIndices, SlotScale, FirstKey, NumVisible,
    GradQ, GradSlotScale, SumK, SumV, scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    SLOT_SCALE: tl.constexpr, ATOMICS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads and writes what `selected.backward.dq_kernel` does, and with `ATOMICS` adds to `SumK
    [keys, H, D]` and `SumV [keys, H, DV]`, fp32. The grid is `(R, H)`."""
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    block_list = BlockIndices + (row * H + head) * S
    num_slots = count_slots(block_list, S, tl.cdiv(num_visible, BS), 256)
    lse2 = tl.load(LSE2 + (row * H + head) * G)  # infinite or NaN for the whole group
    num_slots = tl.where(lse2 != float("inf"), num_slots, 0)
    # where the group is not finite, neither are the gradients of the keys that it sees
    spoiled = tl.where(lse2 == lse2, 0.0, float("nan"))
    group = tl.arange(0, GT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    slots, place = tl.arange(0, BT) // BS, tl.arange(0, BT) % BS  # of the tokens of a step
    group_row = (row * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]

    # -- load the query group --
    q_offset = group_row[:, None] * D + width  # [GT, DT]
    q_mask = in_group[:, None] & (width < D)
    do_mask = in_group[:, None] & (value_width < DV)
    do_offset = group_row[:, None] * DV + value_width  # [GT, DVT]
    q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(GradO + do_offset, mask=do_mask, other=0.0)
    lse = tl.load(LSE + group_row, mask=in_group, other=0.0) * LOG2_E  # in base two
    delta = tl.load(Delta + group_row, mask=in_group, other=0.0)

    # -- initialise --
    acc_dq = tl.zeros([GT, DT], tl.float32)

    for first_slot in range(0, num_slots, BT // BS):
        # -- guard --
        slot = first_slot + slots  # [BT]
        is_seen, piece = tokens_of_slots(
            block_list, slot, place, num_slots, num_visible, first_key, head, H, BS
        )

        # -- load the keys and the values --
        k_mask = is_seen[:, None] & (width < D)
        v_mask = is_seen[:, None] & (value_width < DV)
        k_offset = piece[:, None] * D + width  # [BT, DT]
        v_offset = piece[:, None] * DV + value_width  # [BT, DVT]
        k_tile = tl.load(K + k_offset, mask=k_mask, other=0.0)
        v_tile = tl.load(V + v_offset, mask=v_mask, other=0.0)

        # -- weights --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        factor = 1.0
        if SLOT_SCALE:
            factor = tl.load(SlotScale + (row * H + head) * S + slot, mask=is_seen, other=1.0)
        p = tl.exp2(acc_s * (scale_log2 * factor) - lse[:, None])
        p = tl.where(is_seen, p, 0.0)  # [GT, BT]

        # -- gradient of the scores --
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [GT, BT]
        d_s = tl.where(is_seen, p * (d_p - delta[:, None]), 0.0)
        if SLOT_SCALE:
            of_group = tl.where(is_seen & in_group[:, None], d_s * acc_s, 0.0)
            of_block = tl.reshape(tl.sum(of_group, axis=0), [BT // BS, BS])
            d_factor = tl.sum(of_block, axis=1) * scale  # [BT // BS]
            its_slot = first_slot + tl.arange(0, BT // BS)
            d_pointer = GradSlotScale + (row * H + head) * S + its_slot
            block_id = tl.load(block_list + its_slot, mask=its_slot < num_slots, other=-1)
            is_visible = (block_id >= 0) & (block_id < tl.cdiv(num_visible, BS))
            tl.store(d_pointer, d_factor, mask=is_visible)

        # -- accumulate --
        d_s = (d_s * factor).to(k_tile.dtype)
        acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")

        # -- add to the keys and the values --
        if ATOMICS:
            p = (p + spoiled).to(do_tile.dtype)
            d_v = tl.dot(p.T, do_tile, input_precision="ieee")  # [BT, DVT]
            tl.atomic_add(SumV + v_offset, d_v, mask=v_mask, sem="relaxed")
            d_s = (d_s.to(tl.float32) + spoiled).to(q_tile.dtype)
            d_k = tl.dot(d_s.T, q_tile, input_precision="ieee") * scale  # [BT, DT]
            tl.atomic_add(SumK + k_offset, d_k, mask=k_mask, sem="relaxed")

    # -- store --
    acc_dq *= scale
    tl.store(GradQ + q_offset, acc_dq.to(GradQ.dtype.element_ty), mask=q_mask)


def queries_alone(call: ListsCall, d_q: Tensor, d_slot_scale: Tensor | None) -> None:
    """Write the gradients of the queries, and of the slots' factors."""
    _launch(call, d_q, d_slot_scale)


def all_gradients(
    call: ListsCall, d_q: Tensor, d_k: Tensor, d_v: Tensor, d_slot_scale: Tensor | None
) -> None:
    """Write all gradients, those of keys and values in whatever order they come."""
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (d_k, d_v)]
    _launch(call, d_q, d_slot_scale, *sums)
    d_k.copy_(sums[0])
    d_v.copy_(sums[1])


def _launch(call: ListsCall, d_q: Tensor, d_slot_scale: Tensor | None, *sums: Tensor) -> None:
    c = call
    R, H, S = c.ids.shape
    options = dq_options(**c.sizes, BS=64, **c.memory)
    if sums:  # gradients of keys and values stand in registers, too
        options |= {"BT": min(32, options["BT"]), "num_warps": max(4, options["num_warps"])}
    sum_k, sum_v = sums or (None, None)
    gradient_kernel[(R, H)](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, c.ids, c.slot_scale, c.rows.first_key,
        c.rows.num_visible, d_q, d_slot_scale, sum_k, sum_v, *c.scales, H, S, **c.block_sizes,
        SLOT_SCALE=c.slot_scale is not None, ATOMICS=bool(sums), **c.tiles, **options,
    )  # fmt: skip
