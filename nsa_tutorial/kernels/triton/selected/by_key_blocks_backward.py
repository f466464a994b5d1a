"""Chapter 13: the backward of selected attention, KV-outer, in Triton: all three gradients in one
pass.

`selected.backward` computes every score twice, once for the gradient of the queries and once for
those of keys and values. Here a program has all that the gradient of the queries needs, so it adds
its part of that gradient to those of other blocks, by atomic additions in fp32. Their order
differs from run to run, and so do the last bits of `d_q`. Those of `d_k` and `d_v` stay the same.

Two kernels: `gradients_kernel` walks the inverse list, and `finish_kernel` rounds the gradients of
the queries. The sums of `d_k` and `d_v` over chunks are those of `selected.backward.sum_kernel`.
Only lists without factors are taken.

Symbols: those of `selected.backward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.launch_options import dq_options, edge
from nsa_tutorial.kernels.triton.selected import by_key_blocks_options
from nsa_tutorial.kernels.triton.selected.backward import dq_kernel
from nsa_tutorial.kernels.triton.selected.by_key_blocks import without_bad_numbers
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall, add_shares, key_chunks


@triton.jit
def walk_queries_with_dq(
    acc_dk, acc_dv, k_tile, k_clean, v_tile, first_bad, start, end, num_keys, first_key,
    Q, GradO, Delta, LSE2, Rows, RowEnd, SumQ, first, head, scale, scale_log2, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds to `acc_dk [BT, DT]` and `acc_dv [BT, DVT]` what the rows `start … end - 1` of a chunk
    give, and to `SumQ` what the tile gives to them, `BR` a step.

    Without `MASK` they all see the whole tile. With it, `k_clean` are the keys
    `without_bad_numbers`; else it is not read.
    """
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)[:, None]
    for step in range(start, end, BR):
        # -- guard --
        index = step + tl.arange(0, BR)  # [BR]
        is_row = index < end
        row = tl.load(Rows + first + index // G, mask=is_row, other=-1)
        is_read = row >= 0  # ~row otherwise
        row = tl.where(is_read, row, ~row)
        group_row = row
        if WIDE:
            group_row = row.to(tl.int64)
        group_row = (group_row * H + head) * G + index % G  # [BR]

        # -- load the queries --
        q_mask = is_read[:, None] & (width < D)
        do_mask = is_read[:, None] & (value_width < DV)
        q_offset = group_row[:, None] * D + width  # [BR, DT]
        q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
        do_tile = tl.load(GradO + group_row[:, None] * DV + value_width, mask=do_mask, other=0.0)
        lse = tl.load(LSE2 + group_row, mask=is_row, other=float("inf"))
        delta = tl.load(Delta + group_row, mask=is_read, other=0.0)

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        p = tl.exp2(acc_s * scale_log2 - lse)
        if MASK:
            row_end = tl.load(RowEnd + row, mask=is_row, other=0)
            num_seen = tl.minimum(row_end - first_key, num_keys)  # [BR]
            p = tl.where(tokens < num_seen, p, 0.0)

        # -- gradient of the values --
        acc_dv = tl.dot(p.to(do_tile.dtype), do_tile, acc_dv, input_precision="ieee")

        # -- gradient of the scores --
        d_p = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BT, BR]
        d_s = p * (d_p - delta)
        if MASK:
            d_s = tl.where(tokens < num_seen, d_s, 0.0)
        elif PAD:  # past the block's end, weights may be infinite
            d_s = tl.where(tokens < num_keys, d_s, 0.0)
        d_s = d_s.to(q_tile.dtype)

        # -- gradient of the keys --
        acc_dk = tl.dot(d_s, q_tile, acc_dk, input_precision="ieee")

        # -- gradient of the queries --
        if MASK:
            d_q = tl.dot(d_s.T, k_clean, input_precision="ieee")  # [BR, DT]
            d_q = tl.where(num_seen[:, None] > first_bad, float("nan"), d_q)
        else:
            d_q = tl.dot(d_s.T, k_tile, input_precision="ieee")
        tl.atomic_add(SumQ + q_offset, d_q * scale, mask=q_mask, sem="relaxed")
    return acc_dk, acc_dv


@triton.jit
def gradients_kernel(
    Q, K, V, GradO, Delta, LSE2, Rows, RowEnd, FirstKey, Head, First, Last, NumParts, Place,
    SumQ, GradK, GradV, SharesK, SharesV, scale, scale_log2, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Reads what `selected.backward.dkv_kernel` does; writes `GradK [keys, H, D]` and
    `GradV [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32; adds to
    `SumQ [R, H, G, D]`, in fp32, for the rows that are read.

    The grid is `(P, parts of a tile)`; a tile is `BS` keys, and a program has `BT` of them.
    """
    # -- locate the program --
    chunk = tl.program_id(0)
    first = tl.load(First + chunk)
    last = tl.load(Last + chunk)
    if first == last:
        return
    head = tl.load(Head + chunk)
    part_start = tl.program_id(1) * BT
    first_key = tl.load(FirstKey + chunk) + part_start
    num_keys = tl.minimum(BS - part_start, BT)  # of the tile
    tokens = tl.arange(0, BT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the keys and the values --
    last_row = tl.load(Rows + last - 1)  # it sees most; what it does not, none of the chunk does
    last_end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
    in_sight = (tokens < tl.minimum(last_end - first_key, num_keys))[:, None]
    key_row = first_key.to(tl.int64) * H + head
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT]
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]
    k_mask = in_sight & (width < D)
    v_mask = in_sight & (value_width < DV)
    k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)
    v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)
    k_clean, first_bad = without_bad_numbers(k_tile, BT)

    # -- initialise --
    acc_dk = tl.zeros([BT, DT], tl.float32)
    acc_dv = tl.zeros([BT, DVT], tl.float32)

    # Rows that see the tile in part come first, as in the forward.
    entry = first + tl.arange(0, EDGE)  # [EDGE]
    row = tl.load(Rows + entry, mask=entry < last, other=-1)
    row_end = tl.load(RowEnd + tl.where(row >= 0, row, ~row))
    is_partial = (entry < last) & (row_end < first_key + num_keys)
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    num_rows = (last - first) * G
    # more may follow than were looked at: then all rows are masked
    num_masked = tl.where(num_partial == EDGE, num_rows, num_partial * G)
    num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)
    PAD: tl.constexpr = BS % BT != 0
    acc_dk, acc_dv = walk_queries_with_dq(
        acc_dk, acc_dv, k_tile, k_clean, v_tile, first_bad, 0, num_masked, num_keys, first_key,
        Q, GradO, Delta, LSE2, Rows, RowEnd, SumQ, first, head, scale, scale_log2, H,
        G, D, DV, PAD, True, DT, DVT, BT, BR, WIDE,
    )  # fmt: skip
    acc_dk, acc_dv = walk_queries_with_dq(
        acc_dk, acc_dv, k_tile, k_tile, v_tile, first_bad, num_masked, num_rows, num_keys,
        first_key, Q, GradO, Delta, LSE2, Rows, RowEnd, SumQ, first, head, scale, scale_log2, H,
        G, D, DV, PAD, False, DT, DVT, BT, BR, WIDE,
    )  # fmt: skip

    # -- store --
    acc_dk *= scale
    if tl.load(NumParts + chunk) == 1:
        d_k, d_v = acc_dk.to(GradK.dtype.element_ty), acc_dv.to(GradV.dtype.element_ty)
        tl.store(GradK + key_row * D + k_offset, d_k, mask=k_mask)
        tl.store(GradV + key_row * DV + v_offset, d_v, mask=v_mask)
    else:
        place = tl.load(Place + chunk).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        token = place * BT + tokens  # [BT]
        tl.store(SharesK + token[:, None] * DT + width, acc_dk)
        tl.store(SharesV + token[:, None] * DVT + value_width, acc_dv)


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def finish_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, BlockIndices, FirstKey, NumVisible, SumQ, GradQ,
    scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Rounds `SumQ [R, H, G, D]` to `GradQ`. The grid is `(R, H)`.

    A group with a row that is not finite was not read, because it would spoil keys that it does not
    see. Its list is walked here instead.
    """
    group = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    lse2 = tl.load(LSE2 + group * G)
    if lse2 != lse2:
        dq_kernel(
            Q, K, V, GradO, LSE, Delta, LSE2, BlockIndices, None, FirstKey, NumVisible, GradQ, None,
            scale, scale_log2, H, S, G, D, DV, BS, False, GT, DT, DVT, BT,
        )  # fmt: skip
    else:
        width = tl.arange(0, DT)
        offset = (group * G + tl.arange(0, GT))[:, None] * D + width  # [GT, DT]
        mask = (tl.arange(0, GT) < G)[:, None] & (width < D)
        d_q = tl.load(SumQ + offset, mask=mask)
        tl.store(GradQ + offset, d_q.to(GradQ.dtype.element_ty), mask=mask)


def all_gradients(call: ListsCall, **options: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v`, in their dtypes.

    Args:
        call: of lists, without factors.
        options: `BT`, `BR`, `num_warps`, `num_stages`, in place of what
            `by_key_blocks_options.gradient_options` chooses.
    """
    c, sizes, H = call, call.block_sizes, call.k.shape[2]
    options = by_key_blocks_options.gradient_options(**sizes, **c.memory) | options
    d_q, d_k, d_v = c.q.new_empty(c.q.shape), c.k.new_zeros(c.k.shape), c.v.new_zeros(c.v.shape)
    sum_q = c.q.new_zeros(c.q.shape, dtype=torch.float32)
    cut = key_chunks(call, options["BT"])
    tables, walked = cut.tables, cut.tables.chunks

    # -- every chunk --
    gradients_kernel[cut.grid](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, tables.row_end, walked.first_key,
        walked.head, walked.first, walked.last, walked.num_parts, walked.place, sum_q, d_k, d_v,
        *cut.shares, *c.scales, H, **sizes, **c.widths, **options, EDGE=edge(c.block_size),
        WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31,
    )  # fmt: skip

    # -- the sums --
    add_shares(call, cut, d_k, d_v)
    finish_kernel[c.ids.shape[:2]](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, c.ids, c.rows.first_key, c.rows.num_visible,
        sum_q, d_q, *c.scales, H, c.ids.shape[2], **sizes, **c.tiles,
        **dq_options(**sizes, **c.memory),
    )  # fmt: skip
    return d_q, d_k, d_v
