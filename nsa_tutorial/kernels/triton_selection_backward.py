"""Chapter 14: the backward of attention to summaries, in Triton.

The five lines and the kernels are those of chapter 13: `dq_kernel` has the forward's tiles of
queries, `dkv_kernel` a tile of summaries and a chunk of the rows that see it, and `triton_backward`
lends the kernels for a row's numbers and for the sums. What differs is who sees what: nearly all
queries see an early summary, and all of a tile's queries see nearly all their summaries, so that
most steps go without a mask.

No argument is checked here: `ops` does.

Symbols: those of `triton_selection` and `triton_backward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels import backward_tables, triton_backward
from nsa_tutorial.kernels.triton_backward import store_gradient, walk_queries
from nsa_tutorial.kernels.triton_selection import sight
from nsa_tutorial.kernels.triton_tiles import summary_dkv_options, summary_dq_options, tile_sizes
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

LOG2_E = tl.constexpr(online_softmax.LOG2_E)
SUM_KEYS = 16  # summaries whose shares a program adds
EDGE = 1024  # rows that a program looks at to find those that see its tile in part


@triton.jit
def walk_summaries(
    acc_dq, q_tile, do_tile, lse, delta, first, end, start, stop, K, V, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk over the summaries `start … stop - 1`; without `MASK`, all queries see all of
    them."""
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT]
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]
    for step in range(start, stop, BT):
        # -- load the keys and the values --
        key_row = (step * H + head).to(tl.int64)
        k_mask = width < D
        v_mask = value_width < DV
        if MASK:
            k_mask = (tokens < stop - step)[:, None] & k_mask
            v_mask = (tokens < stop - step)[:, None] & v_mask
        k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]
        v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- weights --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]
        p = tl.exp2(acc_s * scale_log2 - lse[:, None])
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BQ, BT]

        # -- gradient of the scores --
        d_s = p * (d_p - delta[:, None])
        if MASK:  # a gradient of 0 hides a number, but not NaN
            key = step + tokens  # [BT]
            is_seen = (key >= first[:, None]) & (key < end[:, None])  # [BQ, BT]
            d_s = tl.where(is_seen, d_s, 0.0)
            is_good = tl.abs(k_tile.to(tl.float32)) < float("inf")
            k_tile = tl.where(is_good, k_tile, 0.0)

        # -- accumulate --
        acc_dq = tl.dot(d_s.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")
    return acc_dq


@triton.jit(do_not_specialize=["R"])
def dq_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, FirstKey, NumVisible, GradQ, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads what `triton_selection.attend_kernel` does, `GradO [R, HQ, DV]` and three numbers a
    row, `[R, HQ]`; writes `GradQ [R, HQ, D]`. The grid is `(tiles of BQ queries * HQ,)`."""
    # -- locate the program --
    HQ = H * G
    tile = tl.cdiv(R, BQ) - 1 - tl.program_id(0) // HQ
    query_head = tl.program_id(0) % HQ
    head = query_head // G
    query = tile * BQ + tl.arange(0, BQ)  # [BQ]
    in_rows = query < R
    first, end, start, masked, stop = sight(FirstKey, NumVisible, query, in_rows, BT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    row = query.to(tl.int64) * HQ + query_head  # [BQ]

    # -- load the queries --
    q_offset = row[:, None] * D + width  # [BQ, DT]
    q_mask = in_rows[:, None] & (width < D)
    do_mask = in_rows[:, None] & (value_width < DV)
    q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(GradO + row[:, None] * DV + value_width, mask=do_mask, other=0.0)
    lse = tl.load(LSE + row, mask=in_rows, other=0.0) * LOG2_E  # [BQ], in base two
    delta = tl.load(Delta + row, mask=in_rows, other=0.0)
    is_asked = tl.load(LSE2 + row, mask=in_rows, other=0.0) != float("inf")

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
    acc_dq = tl.where(is_asked[:, None], acc_dq * scale, 0.0)
    tl.store(GradQ + q_offset, acc_dq.to(GradQ.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["num_keys"])
def dkv_kernel(
    Q, K, V, GradO, Delta, LSE2, Rows, RowStart, RowEnd,
    FirstKey, Head, First, Last, NumParts, Place, GradK, GradV, SharesK, SharesV,
    scale, scale_log2, H, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Reads the same, and the tables of `backward_tables.Tables`; writes `GradK [keys, H, D]` and
    `GradV [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32.

    The grid is `(P,)`; a tile is `BT` summaries.
    """
    # -- locate the program --
    chunk = tl.program_id(0)
    first = tl.load(First + chunk)
    last = tl.load(Last + chunk)
    if first == last:
        return
    head = tl.load(Head + chunk)
    first_key = tl.load(FirstKey + chunk)
    key = first_key.to(tl.int64) + tl.arange(0, BT)  # [BT]
    in_tile = key < num_keys
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    k_offset = (key[:, None] * H + head) * D + width  # [BT, DT]
    v_offset = (key[:, None] * H + head) * DV + value_width  # [BT, DVT]
    k_mask = in_tile[:, None] & (width < D)
    v_mask = in_tile[:, None] & (value_width < DV)

    # -- load the keys and the values --
    k_tile = tl.load(K + k_offset, mask=k_mask, other=0.0)
    v_tile = tl.load(V + v_offset, mask=v_mask, other=0.0)

    # -- initialise --
    acc_dk = tl.zeros([BT, DT], tl.float32)
    acc_dv = tl.zeros([BT, DVT], tl.float32)

    # -- walk --
    # Rows ascend: those that see the tile in part come first. A tile with summaries of two
    # sequences is seen as a whole by nobody.
    num_rows = (last - first) * G
    entry = first + tl.arange(0, EDGE)  # [EDGE]
    row = tl.load(Rows + entry, mask=entry < last, other=-1)
    row_end = tl.load(RowEnd + tl.where(row >= 0, row, ~row))
    is_partial = (entry < last) & (row_end < tl.minimum(first_key + BT, num_keys))
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    last_row = tl.load(Rows + last - 1)
    last_row = tl.where(last_row >= 0, last_row, ~last_row)
    is_masked = (num_partial == EDGE) | (tl.load(RowStart + last_row) > first_key)
    num_masked = tl.where(is_masked, num_rows, num_partial * G)
    num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, 0, num_masked,
        Q, GradO, Delta, LSE2, Rows, Rows, RowStart, RowEnd, first, head, scale_log2, H,
        G, D, DV, True, False, True, DT, DVT, BR, WIDE,
    )  # fmt: skip
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, num_masked, num_rows,
        Q, GradO, Delta, LSE2, Rows, Rows, RowStart, RowEnd, first, head, scale_log2, H,
        G, D, DV, False, False, False, DT, DVT, BR, WIDE,
    )  # fmt: skip

    # -- store --
    acc_dk *= scale
    if tl.load(NumParts + chunk) == 1:
        in_sight = in_tile & (key < tl.load(RowEnd + last_row))
        store_gradient(GradK + k_offset, acc_dk, in_sight[:, None] & (width < D), False)
        store_gradient(GradV + v_offset, acc_dv, in_sight[:, None] & (value_width < DV), False)
    else:
        token = tl.load(Place + chunk).to(tl.int64) * BT + tl.arange(0, BT)  # [BT]
        tl.store(SharesK + token[:, None] * DT + width, acc_dk)
        tl.store(SharesV + token[:, None] * DVT + value_width, acc_dv)


def of_summaries(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `triton_selection_launch.compressed_attention`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k_cmp, v_cmp, rows, scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k_cmp` and `v_cmp`, in their dtypes; the same bits in every run.
    """
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    R, sizes = B * N, {"G": HQ // H, "D": D, "DV": DV}
    d_q = q.new_empty(q.shape)
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_(), d_k, d_v
    d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k_cmp, v_cmp, lse))
    tiles = tile_sizes(**sizes)
    widths = {name: tiles[name] for name in ("DT", "DVT")}
    memory = shared_memory(q.device)
    scales = (scale, scale * online_softmax.LOG2_E)

    # -- a row's numbers --
    delta, lse2 = (q.new_empty(R, H, HQ // H, dtype=torch.float32) for _ in range(2))
    triton_backward.delta_kernel[(R, H)](
        o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
        G=sizes["G"], DV=DV, GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip

    # -- the queries --
    options = summary_dq_options(D, DV, q.element_size(), memory)
    dq_kernel[(triton.cdiv(R, options["BQ"]) * HQ,)](
        q, k, v, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, d_q, *scales, R, H,
        **sizes, **widths, **options,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, q.element_size(), memory)
    BT, num_keys = options["BT"], B * M_c
    tables = backward_tables.of_windows(
        rows, lse2[:, :, 0], window_size=M_c + 1, tile_size=BT, num_keys=num_keys, G=sizes["G"],
        share_bytes=4 * BT * sum(widths.values()), itemsize=q.element_size(),
    )  # fmt: skip
    chunks = tables.chunks
    places = chunks.num_places * BT
    shares = [q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]
    dkv_kernel[(len(chunks.first),)](
        q, k, v, d_o, delta, lse2, tables.rows, tables.row_start, tables.row_end,
        chunks.first_key, chunks.head, chunks.first, chunks.last, chunks.num_parts, chunks.place,
        d_k, d_v, *shares, *scales, H, num_keys, **sizes, **widths, **options,
        WIDE=max(q.numel(), d_o.numel()) >= 2**31, EDGE=EDGE,
    )  # fmt: skip
    if places:
        triton_backward.sum_kernel[(len(chunks.first), triton.cdiv(BT, SUM_KEYS))](
            *shares, tables.rows, tables.row_end, chunks.first_key, chunks.head, chunks.last,
            chunks.part, chunks.num_parts, chunks.place, d_k, d_v, H, num_keys, D=D, DV=DV, BS=BT,
            ADD=False, **widths, BT=BT, BK=SUM_KEYS,
        )  # fmt: skip
    return d_q, d_k, d_v
