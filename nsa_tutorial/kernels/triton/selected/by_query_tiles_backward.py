"""Chapter 16: the gradient of the queries, for a tile of them in each program, in Triton.

It walks the unions of `selected.by_query_tiles` as the forward does. The gradients of keys and
values are sums over queries, and have their own order already (`selected.backward.dkv_kernel`).

No argument is checked here: `ops` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.launch_options import query_tile_dq_options, tile_sizes
from nsa_tutorial.kernels.triton.selected.by_query_tiles import load_tile
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, Unions, unions
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit
def walk_union(
    acc_dq, q_tile, do_tile, lse, delta, needs_grad, t, row_end, starts, listed_by, first, last,
    K, V, KDescriptor, VDescriptor, head, scale_log2, H, num_keys,
    D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The steps `first … last - 1` of a union; without `MASK`, who lists a block sees all of it."""
    PARTS: tl.constexpr = (BS + BT - 1) // BT
    for step in range(first, last):
        # -- guard --
        part_start = step % PARTS * BT
        key = tl.load(starts + step // PARTS) + part_start
        is_listed = (tl.load(listed_by + step // PARTS) >> t) & needs_grad  # [TR]
        is_seen = (is_listed > 0)[:, None]
        if MASK:
            tokens = tl.arange(0, BT)
            in_block = part_start + tokens < BS
            is_seen = is_seen & in_block & (key + tokens < row_end[:, None])  # [TR, BT]

        # -- load the keys and the values --
        k_tile = load_tile(K, KDescriptor, key, head, H, num_keys, D, DT, BT)  # [BT, DT]
        v_tile = load_tile(V, VDescriptor, key, head, H, num_keys, DV, DVT, BT)  # [BT, DVT]

        # -- weights --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [TR, BT]
        p = tl.exp2(acc_s * scale_log2 - lse[:, None])

        # -- gradient of the scores --
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [TR, BT]
        d_s = tl.where(is_seen, p * (d_p - delta[:, None]), 0.0)

        # -- accumulate --
        acc_dq = tl.dot(d_s.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")
    return acc_dq


@triton.jit(do_not_specialize=["R", "S", "num_keys"])  # new lengths, same kernel
def dq_kernel(
    Q, K, V, KDescriptor, VDescriptor, GradO, LSE, Delta, LSE2, FirstKey, NumVisible,
    Start, ListedBy, Count, NumWhole, GradQ, scale, scale_log2, R, H, S, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
    GP: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads what `selected.by_query_tiles.kernel` does, `GradO [R, H, G, DV]` and three numbers a
    row (`selected.backward.delta_kernel`); writes `GradQ [R, H, G, D]`. The grid is `(tiles,
    H)`."""
    # -- locate the program --
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(Count + tile * H + head)
    if count < 0:  # another kernel has this tile
        return
    num_whole = tl.load(NumWhole + tile * H + head)
    starts = Start + (tile * H + head) * (T * S)
    listed_by = ListedBy + (tile * H + head) * (T * S)
    row = tl.arange(0, T * GP)  # [TR]
    t = row // GP
    query = tile * T + t
    in_rows = (query < R) & (row % GP < G)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    group_row = (query * H + head) * G + row % GP  # [TR]
    row_end = tl.load(FirstKey + query, mask=query < R, other=0)
    row_end += tl.load(NumVisible + query, mask=query < R, other=0)

    # -- load the queries --
    q_offset = group_row[:, None] * D + width  # [TR, DT]
    q_mask = in_rows[:, None] & (width < D)
    do_offset = group_row[:, None] * DV + value_width  # [TR, DVT]
    do_mask = in_rows[:, None] & (value_width < DV)
    q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(GradO + do_offset, mask=do_mask, other=0.0)
    lse = tl.load(LSE + group_row, mask=in_rows, other=0.0) * LOG2_E  # in base two
    delta = tl.load(Delta + group_row, mask=in_rows, other=0.0)
    code = tl.load(LSE2 + group_row, mask=in_rows, other=float("inf"))
    needs_grad = (code != float("inf")).to(tl.int32)  # [TR]

    # -- initialise --
    acc_dq = tl.zeros([T * GP, DT], tl.float32)

    PARTS: tl.constexpr = (BS + BT - 1) // BT
    acc_dq = walk_union(
        acc_dq, q_tile, do_tile, lse, delta, needs_grad, t, row_end, starts, listed_by,
        0, num_whole * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H, num_keys,
        D, DV, BS, False, DT, DVT, BT,
    )  # fmt: skip
    acc_dq = walk_union(
        acc_dq, q_tile, do_tile, lse, delta, needs_grad, t, row_end, starts, listed_by,
        num_whole * PARTS, count * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H,
        num_keys, D, DV, BS, True, DT, DVT, BT,
    )  # fmt: skip

    # -- store --
    tl.store(GradQ + q_offset, (acc_dq * scale).to(GradQ.dtype.element_ty), mask=q_mask)


def gradient_of_queries(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lse2: Tensor,
    ids: Tensor, rows: QueryRows, d_q: Tensor, *,
    block_size: int, scale: float, use_descriptors: bool = False, most: float = ANY_LENGTH,
    **options: int,
) -> Unions:  # fmt: skip
    """Write `d_q` of the rows in tiles that are wanted, and return the unions.

    Args:
        d_o, q, k, v, lse: contiguous, as in `selected.backward_launch.Backward`; so are `delta` and
            `lse2`.
        ids, rows, block_size, scale, use_descriptors, most: as in `selected.by_query_tiles.launch`.
        options: in place of what `query_tile_dq_options` chooses.
    """
    (HQ, D), (H, DV) = q.shape[2:], v.shape[2:]
    sizes = {"G": HQ // H, "D": D, "DV": DV, "BS": block_size}
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    chosen = query_tile_dq_options(**sizes, **memory) | options
    T, BT = chosen.pop("T"), chosen["BT"]
    made = unions(k, v, ids, rows, block_size=block_size, T=T, BT=BT, most=most)
    tiles = tile_sizes(HQ // H, D, DV)
    boxes = token_boxes(k, v, BT=BT) if use_descriptors else (None, None)
    R, H, S = ids.shape
    dq_kernel[(triton.cdiv(R, T), H)](
        q, k, v, *boxes, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, *made[:4], d_q,
        scale, scale * online_softmax.LOG2_E, R, H, S, k.shape[0] * k.shape[1], **sizes, T=T,
        GP=triton.next_power_of_2(HQ // H), DT=tiles["DT"], DVT=tiles["DVT"], **chosen,
    )  # fmt: skip
    return made
