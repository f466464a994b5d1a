"""Chapter 13: the backward of selected attention, in Triton.

Four kernels. `delta_kernel` sums up what both passes ask of a row. `dq_kernel` walks a query's
list, as the forward does. `dkv_kernel` walks the inverse list: the queries that see a tile of keys,
in chunks. `sum_kernel` adds the shares of a tile that was cut, in a fixed order, so that every run
gives the same bits. The five lines are those of `training.gradients`, in the forward's base two.

`backward_launch` runs them, and is what the operators call.

Symbols: those of `selected.forward`; `BR` rows of a step, a row being one query and one head · `E`
entries of the inverse list · `P` its chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.selected.forward import count_slots

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit
def delta_kernel(
    Output, GradO, LSE, GradLSE, Delta, LSE2, H,
    G: tl.constexpr, DV: tl.constexpr, GT: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Reads `Output, GradO [R, H, G, DV]`, `LSE, GradLSE [R, H, G]`; writes `Delta` and `LSE2`
    `[R, H, G]`. The grid is `(R, H)`.

    `LSE2` is what `dkv_kernel` reads: the log-sum-exp in base two, infinity where no loss asks for
    the group, NaN where its scores or its gradient are not finite.
    """
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GT)
    width = tl.arange(0, DVT)
    group_row = (row * H + tl.program_id(1)) * G + group  # [GT]
    in_group = group < G

    # -- load --
    offset = group_row[:, None] * DV + width  # [GT, DVT]
    mask = in_group[:, None] & (width < DV)
    o_tile = tl.load(Output + offset, mask=mask, other=0.0).to(tl.float32)
    do_tile = tl.load(GradO + offset, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(LSE + group_row, mask=in_group, other=0.0)
    d_lse = tl.load(GradLSE + group_row, mask=in_group, other=0.0)

    # -- one number a row --
    delta = tl.sum(do_tile * o_tile, axis=1) - d_lse  # [GT]
    lse2 = lse * LOG2_E
    asks = tl.max((do_tile != 0).to(tl.int32), axis=1) | (d_lse != 0)  # [GT]
    finite = tl.min((tl.abs(do_tile) < float("inf")).to(tl.int32), axis=1)
    finite &= (tl.abs(lse) < float("inf")).to(tl.int32)
    is_spoiled = tl.min(finite, axis=0) == 0  # one of the group is enough: dK and dV sum over it
    lse2 = tl.where(is_spoiled, float("nan"), lse2)
    lse2 = tl.where(tl.max(asks, axis=0) == 0, float("inf"), lse2)

    # -- store --
    tl.store(Delta + group_row, delta, mask=in_group)
    tl.store(LSE2 + group_row, lse2, mask=in_group)


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def dq_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, BlockIndices, SlotScale, FirstKey, NumVisible,
    GradQ, GradSlotScale, scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    SLOT_SCALE: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads what `selected.forward.kernel` does, `GradO [R, H, G, DV]` and three numbers a row;
    writes `GradQ [R, H, G, D]`, and `GradSlotScale [R, H, S]` with `SLOT_SCALE`. The grid is
    `(R, H)`.
    """
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    block_list = BlockIndices + (row * H + head) * S
    num_blocks = tl.cdiv(num_visible, BS)  # blocks that hold a visible key
    num_slots = count_slots(block_list, S, num_blocks)
    needs_grad = tl.load(LSE2 + (row * H + head) * G) != float("inf")
    num_slots = tl.where(needs_grad, num_slots, 0)
    group = tl.arange(0, GT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    group_row = (row * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every block
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]

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
    d_factor = 0.0

    PARTS: tl.constexpr = (BS + BT - 1) // BT  # steps of a block
    for step in range(num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot)
        is_visible = (block_id >= 0) & (block_id < num_blocks)
        start = tl.where(is_visible, block_id, 0) * BS + part_start
        num_seen = tl.where(is_visible, tl.minimum(BS - part_start, num_visible - start), 0)
        is_seen = tokens < num_seen  # [BT]
        key_row = (first_key + start) * H + head

        # -- load the keys and the values --
        k_mask = is_seen[:, None] & (width < D)
        v_mask = is_seen[:, None] & (value_width < DV)
        k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]
        v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- weights --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        factor = 1.0
        if SLOT_SCALE:
            factor = tl.load(SlotScale + (row * H + head) * S + slot, mask=is_visible, other=1.0)
        p = tl.exp2(acc_s * (scale_log2 * factor) - lse[:, None])
        p = tl.where(is_seen, p, 0.0)  # [GT, BT]

        # -- gradient of the scores --
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [GT, BT]
        d_s = tl.where(is_seen, p * (d_p - delta[:, None]), 0.0)
        if SLOT_SCALE:
            of_group = tl.where(is_seen & in_group[:, None], d_s * acc_s, 0.0)
            d_factor = tl.where(part_start == 0, 0.0, d_factor)
            d_factor += tl.sum(tl.sum(of_group, axis=1), axis=0) * scale
            is_last = part_start + BT >= BS
            d_pointer = GradSlotScale + (row * H + head) * S + slot
            tl.store(d_pointer, d_factor, mask=is_last & is_visible)

        # -- accumulate --
        d_s = (d_s * factor).to(k_tile.dtype)
        acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")

    # -- store --
    acc_dq *= scale
    tl.store(GradQ + q_offset, acc_dq.to(GradQ.dtype.element_ty), mask=q_mask)


@triton.jit
def walk_queries(
    acc_dk, acc_dv, k_tile, v_tile, key, in_tile, start, end,
    Q, GradO, Delta, LSE2, Rows, Factors, RowEnd, first, head, scale_log2, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SLOT_SCALE: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds to `acc_dk [BT, DT]` and `acc_dv [BT, DVT]` what the rows `start … end - 1` of a chunk
    give, `BR` a step. Without `MASK` they all see the whole tile."""
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    for step in range(start, end, BR):
        # -- guard --
        index = step + tl.arange(0, BR)  # [BR]
        is_row = index < end
        entry = first + index // G
        row = tl.load(Rows + entry, mask=is_row, other=-1)
        is_read = row >= 0  # ~row otherwise
        row = tl.where(is_read, row, ~row)
        if WIDE:
            row = row.to(tl.int64)
        group_row = (row * H + head) * G + index % G  # [BR]

        # -- load the queries --
        q_mask = is_read[:, None] & (width < D)
        do_mask = is_read[:, None] & (value_width < DV)
        q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)
        do_tile = tl.load(GradO + group_row[:, None] * DV + value_width, mask=do_mask, other=0.0)
        lse = tl.load(LSE2 + group_row, mask=is_row, other=float("inf"))
        delta = tl.load(Delta + group_row, mask=is_read, other=0.0)

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        factor = scale_log2
        if SLOT_SCALE:
            slot_factor = tl.load(Factors + entry, mask=is_row, other=1.0)
            factor = scale_log2 * slot_factor
        p = tl.exp2(acc_s * factor - lse)
        if MASK:
            row_end = tl.where(lse == float("inf"), 0, tl.load(RowEnd + row))
            is_seen = in_tile[:, None] & (key[:, None] < row_end)  # [BT, BR]
            p = tl.where(is_seen, p, 0.0)

        # -- gradient of the values --
        acc_dv = tl.dot(p.to(do_tile.dtype), do_tile, acc_dv, input_precision="ieee")

        # -- gradient of the scores --
        d_p = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BT, BR]
        d_s = p * (d_p - delta)
        if MASK:
            d_s = tl.where(is_seen, d_s, 0.0)

        # -- gradient of the keys --
        if SLOT_SCALE:
            d_s *= slot_factor
        acc_dk = tl.dot(d_s.to(q_tile.dtype), q_tile, acc_dk, input_precision="ieee")
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=["num_keys"])
def dkv_kernel(
    Q, K, V, GradO, Delta, LSE2, Rows, Factors, RowEnd,
    FirstKey, Head, First, Last, NumParts, Place, GradK, GradV, SharesK, SharesV,
    scale, scale_log2, H, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    SLOT_SCALE: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Reads the same, and the tables of `tables.chunks.Tables`; writes `GradK [keys, H, D]` and
    `GradV [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32.

    The grid is `(P, parts of a tile)`; a tile is `BS` keys, and a program has `BT` of them. Scores
    stand transposed, a key a row: so they are multiplied as they lie in registers.
    """
    # -- locate the program --
    chunk = tl.program_id(0)
    first = tl.load(First + chunk)
    last = tl.load(Last + chunk)
    if first == last:
        return
    head = tl.load(Head + chunk)
    part_start = tl.program_id(1) * BT
    first_key = tl.load(FirstKey + chunk).to(tl.int64) + part_start
    key = first_key + tl.arange(0, BT)  # [BT]
    in_tile = (part_start + tl.arange(0, BT) < BS) & (key < num_keys)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    k_offset = (key[:, None] * H + head) * D + width  # [BT, DT]
    v_offset = (key[:, None] * H + head) * DV + value_width  # [BT, DVT]

    # -- load the keys and the values --
    k_tile = tl.load(K + k_offset, mask=in_tile[:, None] & (width < D), other=0.0)
    v_tile = tl.load(V + v_offset, mask=in_tile[:, None] & (value_width < DV), other=0.0)

    # -- initialise --
    acc_dk = tl.zeros([BT, DT], tl.float32)
    acc_dv = tl.zeros([BT, DVT], tl.float32)

    # The rows that see the tile in part come first, since entries ascend with their rows. They are
    # behind a mask, all others go without one.
    entry = first + tl.arange(0, EDGE)  # [EDGE]
    row = tl.load(Rows + entry, mask=entry < last, other=-1)
    row_end = tl.load(RowEnd + tl.where(row >= 0, row, ~row))
    is_partial = (entry < last) & (row_end < first_key - part_start + BS)
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    num_rows = (last - first) * G
    # more may follow than were looked at: then all rows are masked
    num_masked = tl.where(num_partial == EDGE, num_rows, num_partial * G)
    num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, 0, num_masked,
        Q, GradO, Delta, LSE2, Rows, Factors, RowEnd, first, head, scale_log2, H,
        G, D, DV, SLOT_SCALE, True, DT, DVT, BR, WIDE,
    )  # fmt: skip
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, num_masked, num_rows,
        Q, GradO, Delta, LSE2, Rows, Factors, RowEnd, first, head, scale_log2, H,
        G, D, DV, SLOT_SCALE, False, DT, DVT, BR, WIDE,
    )  # fmt: skip

    # -- store --
    acc_dk *= scale
    if tl.load(NumParts + chunk) == 1:
        last_row = tl.load(Rows + last - 1)  # it sees most; what it does not, nobody does
        end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
        in_sight = in_tile & (key < end)
        k_mask = in_sight[:, None] & (width < D)
        v_mask = in_sight[:, None] & (value_width < DV)
        tl.store(GradK + k_offset, acc_dk.to(GradK.dtype.element_ty), mask=k_mask)
        tl.store(GradV + v_offset, acc_dv.to(GradV.dtype.element_ty), mask=v_mask)
    else:
        place = tl.load(Place + chunk).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        token = place * BT + tl.arange(0, BT)  # [BT]
        tl.store(SharesK + token[:, None] * DT + width, acc_dk)
        tl.store(SharesV + token[:, None] * DVT + value_width, acc_dv)


@triton.jit(do_not_specialize=["num_keys"])
def sum_kernel(
    SharesK, SharesV, Rows, RowEnd, FirstKey, Head, Last, Part, NumParts, Place, GradK, GradV,
    H, num_keys,
    D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds the shares of every tile that was cut, the first chunk's first. The grid is
    `(P, steps of BK keys in a tile)`; the program of a tile's first chunk does the work."""
    # -- locate the program --
    chunk = tl.program_id(0)
    num_parts = tl.load(NumParts + chunk)
    if (tl.load(Part + chunk) != 0) | (num_parts == 1):
        return
    tile_start = tl.program_id(1) * BK
    head = tl.load(Head + chunk)
    offset = tile_start + tl.arange(0, BK)  # [BK]
    key = tl.load(FirstKey + chunk).to(tl.int64) + offset
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- accumulate --
    acc_dk = tl.zeros([BK, DT], tl.float32)
    acc_dv = tl.zeros([BK, DVT], tl.float32)
    place = tl.load(Place + chunk).to(tl.int64)
    TILE: tl.constexpr = (BS + BT - 1) // BT * BT  # keys of a place
    for part in range(num_parts):
        token = (place + part) * TILE + offset
        acc_dk += tl.load(SharesK + token[:, None] * DT + width)
        acc_dv += tl.load(SharesV + token[:, None] * DVT + value_width)

    # -- store --
    last_row = tl.load(Rows + tl.load(Last + chunk + num_parts - 1) - 1)
    end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
    in_sight = (offset < BS) & (key < num_keys) & (key < end)
    k_offset = (key[:, None] * H + head) * D + width
    v_offset = (key[:, None] * H + head) * DV + value_width
    k_mask = in_sight[:, None] & (width < D)
    v_mask = in_sight[:, None] & (value_width < DV)
    tl.store(GradK + k_offset, acc_dk.to(GradK.dtype.element_ty), mask=k_mask)
    tl.store(GradV + v_offset, acc_dv.to(GradV.dtype.element_ty), mask=v_mask)
