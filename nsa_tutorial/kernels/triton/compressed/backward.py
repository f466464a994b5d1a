"""Chapter 14: the backward of attention to summaries, in Triton.

The five lines are those of chapter 13, and so is the kernel that sums up a row
(`selected.backward.delta_kernel`). `dq_kernel` has the forward's tiles of queries. `dkv_kernel` has
a tile of summaries and a chunk of queries, and `sum_kernel` adds what the chunks gave. Lists
differ in who sees what: here nearly all queries see an early summary, so most steps need no mask,
and all tiles can walk the same queries at the same time.

`launch` runs them.

Symbols: those of `compressed.forward` and `selected.backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.compressed.forward import MOST, locate_compressed_rows
from nsa_tutorial.kernels.triton.key_runs import add_dkv, add_dq, in_registers, store_gradient

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit
def walk_summaries(
    acc_dq, q_tile, do_tile, lse, delta, first, end, start, stop, K, V, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk over the summaries `start … stop - 1`; without `MASK`, all queries see all of
    them."""
    for step in range(start, stop, BT):
        acc_dq = add_dq(
            acc_dq, q_tile, do_tile, lse, delta, K, V, step, stop, first, end, head, scale_log2, H,
            D, DV, MASK, DT, DVT, BT,
        )  # fmt: skip
    return acc_dq


@triton.jit(do_not_specialize=["R"])
def dq_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, FirstKey, NumVisible, GradQ, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ADD: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads what `compressed.forward.attend_kernel` does, `GradO [R, HQ, DV]` and three numbers a
    row, `[R, HQ]`; writes `GradQ [R, HQ, D]`, or, with `ADD`, adds to it. The grid is
    `(tiles of BQ queries * HQ,)`."""
    # -- locate the program --
    head, row, in_rows, first, end, start, masked, stop = locate_compressed_rows(
        FirstKey, NumVisible, R, H, G, BQ, BT
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the queries --
    q_offset = row[:, None] * D + width  # [BQ, DT]
    q_mask = in_rows[:, None] & (width < D)
    do_mask = in_rows[:, None] & (value_width < DV)
    q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(GradO + row[:, None] * DV + value_width, mask=do_mask, other=0.0)
    lse = tl.load(LSE + row, mask=in_rows, other=0.0) * LOG2_E  # [BQ], in base two
    delta = tl.load(Delta + row, mask=in_rows, other=0.0)
    needs_grad = tl.load(LSE2 + row, mask=in_rows, other=0.0) != float("inf")
    q_tile, do_tile = in_registers(q_tile), in_registers(do_tile)

    # -- walk --
    acc_dq = tl.zeros([BQ, DT], tl.float32)
    acc_dq = walk_summaries(
        acc_dq, q_tile, do_tile, lse, delta, first, end, start, masked, K, V, head, scale_log2,
        H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    acc_dq = walk_summaries(
        acc_dq, q_tile, do_tile, lse, delta, first, end, masked, stop, K, V, head, scale_log2,
        H, D, DV, True, DT, DVT, BT,
    )  # fmt: skip

    # -- store --
    acc_dq = tl.where(needs_grad[:, None], acc_dq * scale, 0.0)
    store_gradient(GradQ + q_offset, acc_dq, q_mask, ADD)


@triton.jit
def walk_query_run(
    acc_dk, acc_dv, k_tile, v_tile, key, start, stop, Q, GradO, Delta, LSE2, RowStart, RowEnd,
    head, scale_log2, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Adds to `acc_dk [BT, DT]` and `acc_dv [BT, DVT]` what the queries `start … stop - 1` give,
    `BR` a step, head by head of a group. Without `MASK` all see the whole tile; without `CHECK`
    they are whole steps, and all are to be read."""
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    rows = tl.arange(0, BR)
    HQ = H * G
    q_offset = rows[:, None] * (HQ * D) + width  # [BR, DT], the same for every step
    do_offset = rows[:, None] * (HQ * DV) + value_width  # [BR, DVT]
    steps = tl.cdiv(stop - start, BR)
    for index in range(steps * G):
        # -- load the queries --
        step = start + index % steps * BR
        row = (step * H + head).to(tl.int64) * G + index // steps  # of the first query
        in_rows = rows < stop - step  # [BR]
        q_mask = width < D
        do_mask = value_width < DV
        if CHECK:
            lse = tl.load(LSE2 + row + rows * HQ, mask=in_rows, other=float("inf"))
            is_read = tl.abs(lse) < float("inf")  # [BR]
            q_mask = is_read[:, None] & q_mask
            do_mask = is_read[:, None] & do_mask
            delta = tl.load(Delta + row + rows * HQ, mask=is_read, other=0.0)
        else:
            lse = tl.load(LSE2 + row + rows * HQ)
            delta = tl.load(Delta + row + rows * HQ)
        q_tile = tl.load(Q + row * D + q_offset, mask=q_mask, other=0.0)  # [BR, DT]
        do_tile = tl.load(GradO + row * DV + do_offset, mask=do_mask, other=0.0)  # [BR, DVT]

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        p = tl.exp2(acc_s * scale_log2 - lse)
        is_seen = False
        if MASK:
            row_start = tl.load(RowStart + step + rows, mask=in_rows, other=0)
            row_end = tl.load(RowEnd + step + rows, mask=in_rows, other=0)
            if CHECK:
                row_end = tl.where(lse == float("inf"), 0, row_end)
            is_seen = (key >= row_start) & (key < row_end)  # [BT, BR]
            p = tl.where(is_seen, p, 0.0)

        # -- what they add --
        acc_dk, acc_dv = add_dkv(acc_dk, acc_dv, p, v_tile, q_tile, do_tile, delta, is_seen, MASK)
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=["num_keys", "R", "num_tiles", "chunk_rows"])
def dkv_kernel(
    Q, K, V, GradO, Delta, LSE2, NumUnread, RowStart, RowEnd, FirstRow, LastRow,
    GradK, GradV, SharesK, SharesV, scale, scale_log2, R, H, num_keys, num_tiles, chunk_rows,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Reads the same, and the run of rows that see each tile of `BT` summaries, `FirstRow` and
    `LastRow [num_tiles]`. Writes the gradients of a tile's keys and values, or, where there is more
    than one chunk of `chunk_rows` rows, each chunk's share of them, in fp32:
    `[chunks, num_tiles, H, BT, DT]` and `[…, DVT]`.

    The grid is `(chunks * num_tiles * H,)`. All tiles walk the same chunk at the same time, so that
    its queries come from the L2 cache for all tiles but the first.
    """
    # -- locate the program --
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H % num_tiles
    chunk = tl.program_id(0) // H // num_tiles
    first_row = tl.maximum(tl.load(FirstRow + tile), chunk * chunk_rows)
    stop_row = tl.minimum(tl.load(LastRow + tile), (chunk + 1) * chunk_rows)
    if first_row >= stop_row:
        return
    first_key = tile * BT
    tokens = tl.arange(0, BT)
    in_tile = (tokens < num_keys - first_key)[:, None]  # [BT, 1]
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    key_row = (first_key.to(tl.int64) + tokens[:, None]) * H + head  # [BT, 1]

    # -- load the keys and the values --
    k_mask = in_tile & (width < D)
    v_mask = in_tile & (value_width < DV)
    k_tile = tl.load(K + key_row * D + width, mask=k_mask, other=0.0)  # [BT, DT]
    v_tile = tl.load(V + key_row * DV + value_width, mask=v_mask, other=0.0)  # [BT, DVT]
    v_tile = in_registers(v_tile)

    # -- initialise --
    acc_dk = tl.zeros([BT, DT], tl.float32)
    acc_dv = tl.zeros([BT, DVT], tl.float32)

    # -- who sees the tile in part --
    # Rows ascend: those that see the tile in part come first, and their steps are masked; all steps
    # are, where the tile has summaries of two sequences. Each row of a step is checked in the last
    # step, which is not full, and everywhere where a row is not to be read.
    edge = first_row + tl.arange(0, EDGE)  # [EDGE]
    row_end = tl.load(RowEnd + edge, mask=edge < stop_row, other=MOST)
    is_partial = row_end < tl.minimum(first_key + BT, num_keys)
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    unread = NumUnread + head * (R + 1)
    is_checked = tl.load(unread + stop_row) > tl.load(unread + first_row)
    is_masked = (num_partial == EDGE) | (tl.load(RowStart + stop_row - 1) > first_key)
    rest_row = tl.where(is_checked, first_row, stop_row - (stop_row - first_row) % BR)
    whole_row = tl.minimum(first_row + tl.cdiv(num_partial, BR) * BR, rest_row)
    whole_row = tl.where(is_masked, rest_row, whole_row)

    # -- walk --
    key = first_key + tokens[:, None]  # [BT, 1]
    acc_dk, acc_dv = walk_query_run(
        acc_dk, acc_dv, k_tile, v_tile, key, first_row, whole_row, Q, GradO, Delta, LSE2, RowStart,
        RowEnd, head, scale_log2, H, G, D, DV, True, False, DT, DVT, BR,
    )  # fmt: skip
    acc_dk, acc_dv = walk_query_run(
        acc_dk, acc_dv, k_tile, v_tile, key, whole_row, rest_row, Q, GradO, Delta, LSE2, RowStart,
        RowEnd, head, scale_log2, H, G, D, DV, False, False, DT, DVT, BR,
    )  # fmt: skip
    acc_dk, acc_dv = walk_query_run(
        acc_dk, acc_dv, k_tile, v_tile, key, rest_row, stop_row, Q, GradO, Delta, LSE2, RowStart,
        RowEnd, head, scale_log2, H, G, D, DV, True, True, DT, DVT, BR,
    )  # fmt: skip

    # -- store --
    acc_dk *= scale
    if chunk_rows >= R:
        mask = in_tile & (key < tl.load(RowEnd + stop_row - 1))  # the last row sees most
        dk_pointer = GradK + key_row * D + width
        dv_pointer = GradV + key_row * DV + value_width
        dk_mask = mask & (width < D)
        dv_mask = mask & (value_width < DV)
        tl.store(dk_pointer, acc_dk.to(GradK.dtype.element_ty), mask=dk_mask)
        tl.store(dv_pointer, acc_dv.to(GradV.dtype.element_ty), mask=dv_mask)
    else:
        token = tl.program_id(0).to(tl.int64) * BT + tokens[:, None]  # [BT, 1]
        tl.store(SharesK + token * DT + width, acc_dk)
        tl.store(SharesV + token * DVT + value_width, acc_dv)


@triton.jit(do_not_specialize=["num_keys", "num_tiles", "chunk_rows"])
def sum_kernel(
    SharesK, SharesV, FirstRow, LastRow, RowEnd, GradK, GradV, H, num_keys, num_tiles, chunk_rows,
    D: tl.constexpr, DV: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Adds the shares of every tile, the first chunk's first. The grid is
    `(num_tiles * H, steps of BK summaries in a tile)`."""
    # -- locate the program --
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H
    first_row = tl.load(FirstRow + tile)
    stop_row = tl.load(LastRow + tile)
    if first_row >= stop_row:
        return
    tokens = tl.program_id(1) * BK + tl.arange(0, BK)[:, None]  # [BK, 1]
    key = tile * BT + tokens
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- accumulate --
    acc_dk = tl.zeros([BK, DT], tl.float32)
    acc_dv = tl.zeros([BK, DVT], tl.float32)
    first_chunk, stop_chunk = first_row // chunk_rows, tl.cdiv(stop_row, chunk_rows)
    for chunk in tl.range(first_chunk, stop_chunk, loop_unroll_factor=4):  # loads of four at once
        place = (chunk * num_tiles + tile) * H + head
        token = place.to(tl.int64) * BT + tokens
        acc_dk += tl.load(SharesK + token * DT + width)
        acc_dv += tl.load(SharesV + token * DVT + value_width)

    # -- store --
    mask = (key < num_keys) & (key < tl.load(RowEnd + stop_row - 1))
    key_row = key.to(tl.int64) * H + head
    dk_pointer = GradK + key_row * D + width
    dv_pointer = GradV + key_row * DV + value_width
    tl.store(dk_pointer, acc_dk.to(GradK.dtype.element_ty), mask=mask & (width < D))
    tl.store(dv_pointer, acc_dv.to(GradV.dtype.element_ty), mask=mask & (value_width < DV))
