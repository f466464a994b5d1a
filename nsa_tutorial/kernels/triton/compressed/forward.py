"""Chapter 14: attention to summaries, forward, in Triton.

`attend_kernel` is attention of a tile of queries to the summaries they see. `launch` runs it. No
argument is checked here: `ops` does.

Symbols: those of `selected.forward`; `BQ` queries of a tile, `BT` summaries of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)


@triton.jit
def sight(FirstKey, NumVisible, query, in_rows, BT: tl.constexpr):
    """What a tile of queries sees: the first summary and the end of each query, `[BQ]`; where the
    tile's walk starts, from where on it needs a mask, and where it stops.

    Steps before `masked` are seen as a whole by all of the tile. Queries of several sequences share
    no such step.
    """
    first = tl.load(FirstKey + query, mask=in_rows, other=0)
    end = first + tl.load(NumVisible + query, mask=in_rows, other=0)
    start = tl.min(tl.where(in_rows, first, MOST), axis=0)
    last_start = tl.max(first, axis=0)
    first_end = tl.min(tl.where(in_rows, end, MOST), axis=0)
    stop = tl.max(end, axis=0)
    num_whole = tl.where(last_start == start, tl.maximum(first_end - start, 0) // BT, 0)
    return first, end, start, start + num_whole * BT, stop


@triton.jit
def attend_to(
    acc_o, running_sum, scores_max, q_tile, first, end, start, stop, K, V, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk over the summaries `start … stop - 1`; without `MASK`, all queries see them all."""
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every step
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

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]

        # -- mask --
        if MASK:
            key = step + tokens  # [BT]
            is_seen = (key >= first[:, None]) & (key < end[:, None])  # [BQ, BT]
            acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))  # [BQ]
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max * scale_log2)
        scores_scale = tl.exp2(scores_max_prev * scale_log2 - shift)
        p = tl.exp2(acc_s * scale_log2 - shift[:, None])  # [BQ, BT], one multiply-add each
        running_sum = running_sum * scores_scale + tl.sum(p, axis=1)
        acc_o *= scores_scale[:, None]

        # -- accumulate --
        p = p.to(v_tile.dtype)
        if MASK:  # a weight of 0 hides a number, but not NaN
            is_bad = ~(tl.abs(v_tile.to(tl.float32)) < float("inf"))  # [BT, DVT]
            if tl.max(is_bad.to(tl.int32)) > 0:
                clean = tl.where(is_bad, 0.0, v_tile)
                acc_o = tl.dot(p, clean, acc_o, input_precision="ieee")
                sees_bad = tl.dot(is_seen.to(tl.float16), is_bad.to(tl.float16))  # [BQ, DVT]
                acc_o = tl.where(sees_bad > 0, float("nan"), acc_o)
            else:
                acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
        else:
            acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
    return acc_o, running_sum, scores_max


@triton.jit(do_not_specialize=["R"])
def attend_kernel(
    Q, K, V, FirstKey, NumVisible, Output, LSE, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, HQ, D]`, summaries `K [keys, H, D]` and `V [keys, H, DV]`, `FirstKey [R]` and
    `NumVisible [R]`; writes `Output [R, HQ, DV]` and `LSE [R, HQ]`.

    The grid is `(tiles of BQ queries * HQ,)`. The heads of a group follow each other, since they
    read the same summaries; the latest queries come first, since they see most.
    """
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
    q_mask = in_rows[:, None] & (width < D)
    q_tile = tl.load(Q + row[:, None] * D + width, mask=q_mask, other=0.0)  # [BQ, DT]

    # -- initialise --
    acc_o = tl.zeros([BQ, DVT], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    # -- walk --
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, start, masked, K, V, head, scale_log2,
        H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, masked, stop, K, V, head, scale_log2,
        H, D, DV, True, DT, DVT, BT,
    )  # fmt: skip

    # -- normalise and store --
    is_empty = end == first  # [BQ]
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = tl.where(is_empty[:, None], 0.0, acc_o / safe_sum[:, None])  # [BQ, DVT]
    lse = tl.where(is_empty, float("-inf"), scores_max * scale + tl.log(safe_sum))
    o_mask = in_rows[:, None] & (value_width < DV)
    o_pointer = Output + row[:, None] * DV + value_width
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + row, lse, mask=in_rows)
