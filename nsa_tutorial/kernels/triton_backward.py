"""Chapter 13: the backward of selected attention and of sliding windows, in Triton.

Four kernels. `delta_kernel` sums up what both passes ask of a row. `dq_kernel` walks a query's
list, as the forward does. `dkv_kernel` walks the inverse list: the queries that see a tile of keys,
in chunks. `sum_kernel` adds the shares of a tile that was cut, in a fixed order, so that every run
gives the same bits. The five lines are those of `training.gradients`, in the forward's base two.

No argument is checked here: `ops` does.

Symbols: those of `triton_forward`; `BR` rows of a step, a row being one query and one head · `E`
entries of the inverse list · `P` its chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import backward_tables
from nsa_tutorial.kernels.triton_forward import count_slots
from nsa_tutorial.kernels.triton_tiles import (
    backward_options,
    launch_options,
    shared_memory,
    tile_sizes,
)
from nsa_tutorial.sparse.selected_attention import QueryRows

LOG2_E_ = tl.constexpr(LOG2_E)
WINDOW_TILE = 64  # keys of a window that a program takes at a time
Gradients = tuple[Tensor, Tensor, Tensor]


@triton.jit
def delta_kernel(
    Output, DO, LSE, DLSE, Delta, LSE2, H,
    G: tl.constexpr, DV: tl.constexpr, GT: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Reads `Output, DO [R, H, G, DV]`, `LSE, DLSE [R, H, G]`; writes `Delta` and `LSE2`
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
    do_tile = tl.load(DO + offset, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(LSE + group_row, mask=in_group, other=0.0)
    d_lse = tl.load(DLSE + group_row, mask=in_group, other=0.0)

    # -- one number a row --
    delta = tl.sum(do_tile * o_tile, axis=1) - d_lse  # [GT]
    lse2 = lse * LOG2_E_
    asks = tl.max((do_tile != 0).to(tl.int32), axis=1) | (d_lse != 0)  # [GT]
    finite = tl.min((tl.abs(do_tile) < float("inf")).to(tl.int32), axis=1)
    finite &= (tl.abs(lse) < float("inf")).to(tl.int32)
    is_spoiled = tl.min(finite, axis=0) == 0  # one of the group is enough: dK and dV sum over it
    lse2 = tl.where(is_spoiled, float("nan"), lse2)
    lse2 = tl.where(tl.max(asks, axis=0) == 0, float("inf"), lse2)

    # -- store --
    tl.store(Delta + group_row, delta, mask=in_group)
    tl.store(LSE2 + group_row, lse2, mask=in_group)


@triton.jit(do_not_specialize=["S", "window_size"])  # new lengths, same kernel
def dq_kernel(
    Q, K, V, DO, LSE, Delta, LSE2, BlockIndices, SlotScale, FirstKey, NumVisible, DQ, DSlotScale,
    scale, scale_log2, H, S, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    WINDOW: tl.constexpr, SLOT_SCALE: tl.constexpr, ADD: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads what `triton_forward.kernel` does, `DO [R, H, G, DV]` and three numbers a row; writes
    `DQ [R, H, G, D]`, and `DSlotScale [R, H, S]` with `SLOT_SCALE`. The grid is `(R, H)`.

    With `WINDOW`, rows attend to their windows, and `BlockIndices` is not read. With `ADD`, the
    gradient is added to what stands in `DQ`.
    """
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    block_list = BlockIndices + (row * H + head) * S
    if WINDOW:  # its blocks are counted from its first key: 0, 1, 2, …
        window_start = tl.maximum(num_visible - window_size, 0)
        first_key += window_start
        num_visible -= window_start
    num_blocks = tl.cdiv(num_visible, BS)  # blocks that hold a visible key
    num_slots = num_blocks if WINDOW else count_slots(block_list, S, num_blocks)
    is_asked = tl.load(LSE2 + (row * H + head) * G) != float("inf")
    num_slots = tl.where(is_asked, num_slots, 0)
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
    do_tile = tl.load(DO + do_offset, mask=do_mask, other=0.0)
    lse = tl.load(LSE + group_row, mask=in_group, other=0.0) * LOG2_E_  # in base two
    delta = tl.load(Delta + group_row, mask=in_group, other=0.0)

    # -- initialise --
    acc_dq = tl.zeros([GT, DT], tl.float32)
    d_factor = 0.0

    PARTS: tl.constexpr = (BS + BT - 1) // BT  # steps of a block
    for step in range(num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = slot if WINDOW else tl.load(block_list + slot)
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
            d_pointer = DSlotScale + (row * H + head) * S + slot
            tl.store(d_pointer, d_factor, mask=is_last & is_visible)

        # -- accumulate --
        d_s = (d_s * factor).to(k_tile.dtype)
        acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")

    # -- store --
    acc_dq *= scale
    if ADD:
        acc_dq += tl.load(DQ + q_offset, mask=q_mask, other=0.0).to(tl.float32)
    tl.store(DQ + q_offset, acc_dq.to(DQ.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["num_keys"])
def dkv_kernel(
    Q, K, V, DO, Delta, LSE2, Rows, Factors, RowStart, RowEnd,
    FirstKey, Head, First, Last, NumParts, Place, DK, DV_, DKShares, DVShares,
    scale, scale_log2, H, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    WINDOW: tl.constexpr, SLOT_SCALE: tl.constexpr, ADD: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Reads the same, and the tables of `backward_tables.Tables`; writes `DK [keys, H, D]` and
    `DV_ [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32.

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

    num_rows = (last - first) * G
    for start in range(0, num_rows, BR):
        # -- guard --
        index = start + tl.arange(0, BR)  # [BR]
        entry = first + index // G
        is_row = index < num_rows
        row = tl.load(Rows + entry, mask=is_row, other=-1)
        is_read = row >= 0  # ~row otherwise
        row = tl.where(is_read, row, ~row).to(tl.int64)
        group_row = (row * H + head) * G + index % G
        lse = tl.load(LSE2 + group_row, mask=is_row, other=float("inf"))
        row_end = tl.load(RowEnd + row)
        row_end = tl.where(lse == float("inf"), 0, row_end)
        is_seen = in_tile[:, None] & (key[:, None] < row_end)  # [BT, BR]
        if WINDOW:
            is_seen &= key[:, None] >= tl.load(RowStart + row)

        # -- load the queries --
        q_mask = is_read[:, None] & (width < D)
        do_mask = is_read[:, None] & (value_width < DV)
        q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)
        do_tile = tl.load(DO + group_row[:, None] * DV + value_width, mask=do_mask, other=0.0)
        delta = tl.load(Delta + group_row, mask=is_read, other=0.0)

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        factor = scale_log2
        if SLOT_SCALE:
            factor = scale_log2 * tl.load(Factors + entry, mask=is_row, other=1.0)
        p = tl.exp2(acc_s * factor - lse)
        p = tl.where(is_seen, p, 0.0)

        # -- gradient of the values --
        acc_dv = tl.dot(p.to(do_tile.dtype), do_tile, acc_dv, input_precision="ieee")

        # -- gradient of the scores --
        d_p = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BT, BR]
        d_s = tl.where(is_seen, p * (d_p - delta), 0.0)

        # -- gradient of the keys --
        if SLOT_SCALE:
            d_s *= tl.load(Factors + entry, mask=is_row, other=1.0)
        acc_dk = tl.dot(d_s.to(q_tile.dtype), q_tile, acc_dk, input_precision="ieee")

    # -- store --
    acc_dk *= scale
    if tl.load(NumParts + chunk) == 1:
        last_row = tl.load(Rows + last - 1)  # it sees most; what it does not, nobody does
        end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
        in_sight = in_tile & (key < end)
        store_gradient(DK + k_offset, acc_dk, in_sight[:, None] & (width < D), ADD)
        store_gradient(DV_ + v_offset, acc_dv, in_sight[:, None] & (value_width < DV), ADD)
    else:
        place = tl.load(Place + chunk).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        token = place * BT + tl.arange(0, BT)  # [BT]
        tl.store(DKShares + token[:, None] * DT + width, acc_dk)
        tl.store(DVShares + token[:, None] * DVT + value_width, acc_dv)


@triton.jit
def store_gradient(pointer, gradient, mask, ADD: tl.constexpr):
    if ADD:
        gradient += tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointer, gradient.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_keys"])
def sum_kernel(
    DKShares, DVShares, Rows, RowEnd, FirstKey, Head, Last, Part, NumParts, Place, DK, DV_,
    H, num_keys,
    D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, ADD: tl.constexpr,
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
        acc_dk += tl.load(DKShares + token[:, None] * DT + width)
        acc_dv += tl.load(DVShares + token[:, None] * DVT + value_width)

    # -- store --
    last_row = tl.load(Rows + tl.load(Last + chunk + num_parts - 1) - 1)
    end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
    in_sight = (offset < BS) & (key < num_keys) & (key < end)
    k_offset = (key[:, None] * H + head) * D + width
    v_offset = (key[:, None] * H + head) * DV + value_width
    store_gradient(DK + k_offset, acc_dk, in_sight[:, None] & (width < D), ADD)
    store_gradient(DV_ + v_offset, acc_dv, in_sight[:, None] & (value_width < DV), ADD)


def of_lists(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None, out: Gradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `triton_launch.forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: the forward's arguments.
        o, lse: what it returned.
        out: gradients to which these are added; None makes new ones.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes, and of `slot_scale`, `[R, H, S]` fp32.
    """
    return _backward(
        d_o, d_lse, q, k, v, o, lse, ids, rows, tile=block_size, window_size=0, scale=scale,
        slot_scale=slot_scale, out=out,
    )  # fmt: skip


def of_windows(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `triton_launch.sliding_window`; arguments and results as in `of_lists`."""
    no_list = rows.first_key.new_empty(len(rows.first_key), v.shape[2], 0)  # [R, H, S = 0]
    return _backward(
        d_o, d_lse, q, k, v, o, lse, no_list, rows, tile=WINDOW_TILE, window_size=window_size,
        scale=scale, slot_scale=None, out=out,
    )[:3]  # fmt: skip


def of_lists_and_windows(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, window_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `triton_launch.selection_and_window`, through both outputs: `d_o, d_lse, o,
    lse` are those of the lists, then of the windows."""
    lists, windows = zip(d_o, d_lse, o, lse, strict=True)
    *out, d_slot_scale = of_lists(
        *lists[:2], q, k, v, *lists[2:], ids, rows, block_size=block_size, scale=scale,
        slot_scale=slot_scale,
    )  # fmt: skip
    sizes = {"window_size": window_size, "scale": scale, "out": tuple(out)}
    of_windows(*windows[:2], q, k, v, *windows[2:], rows, **sizes)
    return *out, d_slot_scale


def _backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, tile: int, window_size: int, scale: float,
    slot_scale: Tensor | None, out: Gradients | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """All four kernels, on lists of blocks of `tile` keys, or on windows."""
    (B, N, HQ, D), (M, H, DV), BS = q.shape, v.shape[1:], tile
    R, G, S, is_window = B * N, HQ // H, ids.shape[-1], window_size > 0
    q, k, v, o, d_o, d_lse = (x.contiguous() for x in (q, k, v, o, d_o, d_lse))
    is_added = out is not None
    d_q, d_k, d_v = out or (torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
    d_slot_scale = None if slot_scale is None else torch.zeros_like(slot_scale)
    delta, lse2 = (q.new_empty(R, H, G, dtype=torch.float32) for _ in range(2))
    sizes = {"G": G, "D": D, "DV": DV, "BS": BS}
    flags = {"WINDOW": is_window, "SLOT_SCALE": slot_scale is not None, "ADD": is_added}
    tiles, memory = tile_sizes(G, D, DV), shared_memory(q.device)
    widths = {name: tiles[name] for name in ("DT", "DVT")}
    scales = (scale, scale * LOG2_E, H)

    delta_kernel[(R, H)](
        o, d_o, lse, d_lse, delta, lse2, H,
        G=G, DV=DV, GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip

    dq_kernel[(R, H)](
        q, k, v, d_o, lse, delta, lse2, ids, slot_scale, rows.first_key, rows.num_visible,
        d_q, d_slot_scale, *scales, S, window_size, **sizes, **flags, **tiles,
        **launch_options(**sizes, itemsize=q.element_size(), shared_memory=memory),
    )  # fmt: skip

    options = backward_options(**sizes, itemsize=q.element_size(), shared_memory=memory)
    BT, num_keys = options["BT"], B * M
    parts = triton.cdiv(BS, BT)
    tile_bytes = parts * BT * (tiles["DT"] + tiles["DVT"]) * 4
    common = {"num_keys": num_keys, "G": G, "tile_bytes": tile_bytes}
    is_read = lse2[:, :, 0].isfinite()
    if is_window:
        tables = backward_tables.of_windows(
            rows, is_read, window_size=window_size, tile_size=BS, **common
        )  # fmt: skip
    else:
        tables = backward_tables.of_lists(
            ids, rows, is_read, block_size=BS, slot_scale=slot_scale, **common
        )  # fmt: skip
    c = tables.chunks
    places = c.num_places * parts * BT
    dk_shares = q.new_empty(places, tiles["DT"], dtype=torch.float32)
    dv_shares = q.new_empty(places, tiles["DVT"], dtype=torch.float32)
    dkv_kernel[(len(c.first), parts)](
        q, k, v, d_o, delta, lse2, tables.rows, tables.factors, tables.row_start, tables.row_end,
        c.first_key, c.head, c.first, c.last, c.num_parts, c.place, d_k, d_v, dk_shares, dv_shares,
        *scales, num_keys, **sizes, **flags, **widths, **options,
    )  # fmt: skip
    if places:
        BK = 16
        sum_kernel[(len(c.first), triton.cdiv(BS, BK))](
            dk_shares, dv_shares, tables.rows, tables.row_end, c.first_key, c.head, c.last, c.part,
            c.num_parts, c.place, d_k, d_v, H, num_keys, D=D, DV=DV, BS=BS, ADD=is_added, **widths,
            BT=BT, BK=BK,
        )  # fmt: skip
    return d_q, d_k, d_v, d_slot_scale
