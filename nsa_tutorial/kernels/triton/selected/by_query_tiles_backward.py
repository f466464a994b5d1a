"""Chapter 16: the gradient of the queries, for a tile of them in each program, in Triton.

It walks the unions of `selected.by_query_tiles` as the forward does. The gradients of keys and
values are sums over queries, and have their own order already (`selected.backward.dkv_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.launch_options import query_tile_dq_options
from nsa_tutorial.kernels.triton.selected.by_query_tiles import (
    load_tile,
    locate_union_rows,
    make_unions,
)
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, Unions

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit
def walk_union(
    acc_dq, q_tile, do_tile, lse, delta, t, row_end, starts, listed_by, first, last,
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
        is_listed = (tl.load(listed_by + step // PARTS) >> t) & 1  # [TR]

        # -- load the keys and the values --
        k_tile = load_tile(K, KDescriptor, key, head, H, num_keys, D, DT, BT)  # [BT, DT]
        v_tile = load_tile(V, VDescriptor, key, head, H, num_keys, DV, DVT, BT)  # [BT, DVT]

        # -- weights --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [TR, BT]
        # who does not list the block gives it weights of exp2(-inf), which is 0
        p = tl.exp2(acc_s * scale_log2 - tl.where(is_listed > 0, lse, float("inf"))[:, None])
        if MASK:
            tokens = tl.arange(0, BT)
            is_seen = (part_start + tokens < BS) & (key + tokens < row_end[:, None])  # [TR, BT]
            p = tl.where(is_seen, p, 0.0)

        # -- gradient of the scores --
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [TR, BT]
        d_s = p * (d_p - delta[:, None])

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
    count = tl.load(Count + tl.program_id(0).to(tl.int64) * H + tl.program_id(1))
    if count < 0:  # another kernel has this tile
        return
    head, t, group_row, in_rows, row_end, starts, listed_by, num_whole = locate_union_rows(
        FirstKey, NumVisible, Start, ListedBy, NumWhole, R, H, S, G, T, GP
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

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
    needs_grad = code != float("inf")  # [TR]

    # -- initialise --
    acc_dq = tl.zeros([T * GP, DT], tl.float32)

    PARTS: tl.constexpr = (BS + BT - 1) // BT
    acc_dq = walk_union(
        acc_dq, q_tile, do_tile, lse, delta, t, row_end, starts, listed_by,
        0, num_whole * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H, num_keys,
        D, DV, BS, False, DT, DVT, BT,
    )  # fmt: skip
    acc_dq = walk_union(
        acc_dq, q_tile, do_tile, lse, delta, t, row_end, starts, listed_by,
        num_whole * PARTS, count * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H,
        num_keys, D, DV, BS, True, DT, DVT, BT,
    )  # fmt: skip

    # -- store --
    acc_dq = tl.where(needs_grad[:, None], acc_dq, 0.0)  # not NaN where no loss asks
    tl.store(GradQ + q_offset, (acc_dq * scale).to(GradQ.dtype.element_ty), mask=q_mask)


def gradient_of_queries(
    call: ListsCall, d_q: Tensor, *, use_descriptors: bool = False, most: float = ANY_LENGTH,
    is_bad: Tensor | None = None, **options: int,
) -> Unions:  # fmt: skip
    """Write `d_q` of the rows whose tiles are not rejected, and return the unions.

    Args:
        call: of lists, without factors.
        use_descriptors, most, is_bad: as in `by_query_tiles.launch`.
        options: in place of what `query_tile_dq_options` chooses.
    """
    c, sizes = call, call.block_sizes
    options = query_tile_dq_options(**sizes, **c.memory) | options
    how = {"use_descriptors": use_descriptors, "most": most, "is_bad": is_bad}
    made, given = make_unions(c.k, c.v, c.ids, c.rows, sizes, options, **how)
    dq_kernel[made.count.shape](
        Q=c.q, GradO=c.d_o, LSE=c.lse, Delta=c.delta, LSE2=c.lse2, GradQ=d_q, scale=c.scale,
        scale_log2=c.scales[1], **given,
    )  # fmt: skip
    return made
