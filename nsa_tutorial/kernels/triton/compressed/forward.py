"""Chapter 14: attention to summaries, forward, in Triton.

`attend_kernel` is attention of a tile of queries to the summaries they see; `launch` runs it. On
Hopper and later, the tensor memory accelerator fetches the steps that need no mask. Steps
that need a mask use pointers, because a descriptor knows where the tensor ends, but not where a
query's sight does. To compare: `python -m nsa_tutorial.bench compressed --backend triton --steps`.

Symbols: those of `selected.forward`; `BQ` queries of a tile, `BT` summaries of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.key_runs import attend_step, sees

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
def locate_compressed_rows(
    FirstKey, NumVisible, R, H, G: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr
):
    """The rows of a program, of a grid of `(tiles of BQ queries * HQ,)`: the key/value head; the
    rows `[BQ]` of `R * HQ`, which of them exist, and their `sight`.

    The heads of a group follow each other, since they read the same summaries; the latest queries
    come first, since they see most.
    """
    HQ = H * G
    tile = tl.cdiv(R, BQ) - 1 - tl.program_id(0) // HQ
    query_head = tl.program_id(0) % HQ
    head = query_head // G
    query = tile * BQ + tl.arange(0, BQ)  # [BQ]
    in_rows = query < R
    first, end, start, masked, stop = sight(FirstKey, NumVisible, query, in_rows, BT)
    row = query.to(tl.int64) * HQ + query_head  # [BQ]
    return head, row, in_rows, first, end, start, masked, stop


@triton.jit
def attend_to(
    acc_o, running_sum, scores_max, q_tile, first, end, start, stop, K, V, KBox, VBox, head,
    scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk over the summaries `start … stop - 1`; without `MASK`, all queries see them all."""
    for step in range(start, stop, BT):
        p, v_tile, acc_o, running_sum, scores_max = attend_step(
            acc_o, running_sum, scores_max, q_tile, K, V, KBox, VBox, step, stop, first, end, head,
            scale_log2, H, D, DV, MASK, DT, DVT, BT,
        )  # fmt: skip
        if MASK:  # a weight of 0 hides a number, but not NaN
            is_bad = ~(tl.abs(v_tile.to(tl.float32)) < float("inf"))  # [BT, DVT]
            if tl.max(is_bad.to(tl.int32)) > 0:
                clean = tl.where(is_bad, 0.0, v_tile)
                acc_o = tl.dot(p, clean, acc_o, input_precision="ieee")
                is_seen = sees(step, first, end, BT)  # [BQ, BT]
                sees_bad = tl.dot(is_seen.to(tl.float16), is_bad.to(tl.float16))  # [BQ, DVT]
                acc_o = tl.where(sees_bad > 0, float("nan"), acc_o)
            else:
                acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
        else:
            acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
    return acc_o, running_sum, scores_max


@triton.jit(do_not_specialize=["R"])
def attend_kernel(
    Q, K, V, KBox, VBox, FirstKey, NumVisible, Output, LSE, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, HQ, D]`, summaries `K [keys, H, D]` and `V [keys, H, DV]`, `FirstKey [R]` and
    `NumVisible [R]`; writes `Output [R, HQ, DV]` and `LSE [R, HQ]`.

    The grid is that of `locate_compressed_rows`. `KBox` and `VBox` are descriptors of the keys and
    values, `[BT, D]` of `[keys, H * D]`, for `D` and `DV` that are powers of two; or None.
    """
    # -- locate the program --
    head, row, in_rows, first, end, start, masked, stop = locate_compressed_rows(
        FirstKey, NumVisible, R, H, G, BQ, BT
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the queries --
    q_mask = in_rows[:, None] & (width < D)
    q_tile = tl.load(Q + row[:, None] * D + width, mask=q_mask, other=0.0)  # [BQ, DT]

    # -- initialise --
    acc_o = tl.zeros([BQ, DVT], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    # -- walk --
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, start, masked, K, V, KBox, VBox, head,
        scale_log2, H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, masked, stop, K, V, KBox, VBox, head,
        scale_log2, H, D, DV, True, DT, DVT, BT,
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
