"""Chapter 14's attention to summaries with tensor descriptors: the second step, for Hopper and
later.

The tensor memory accelerator fetches whole steps of summaries, one instruction a tile. The steps
behind a mask stay with pointers: a descriptor knows where the tensor ends, and not where a query's
sight does. `compressed.launch` takes this kernel where `can_use_descriptors`;
`python -m nsa_tutorial.bench compressed --backend triton --steps` compares it with pointers.

No argument is checked here: `ops` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.compressed.forward import attend_to, sight


@triton.jit(do_not_specialize=["R"])
def attend_kernel(
    Q, K, V, KDescriptor, VDescriptor, FirstKey, NumVisible, Output, LSE, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`compressed.forward.attend_kernel`, with `[BT, D]` of the keys `[keys, H * D]`, and of the
    values, fetched by descriptor. `D` and `DV` are powers of two."""
    # -- locate the program --
    HQ = H * G
    tile = tl.cdiv(R, BQ) - 1 - tl.program_id(0) // HQ
    query_head = tl.program_id(0) % HQ
    head = query_head // G
    query = tile * BQ + tl.arange(0, BQ)  # [BQ]
    in_rows = query < R
    first, end, start, masked, stop = sight(FirstKey, NumVisible, query, in_rows, BT)
    width = tl.arange(0, D)
    value_width = tl.arange(0, DV)
    row = query.to(tl.int64) * HQ + query_head  # [BQ]

    # -- load the queries --
    q_tile = tl.load(Q + row[:, None] * D + width, mask=in_rows[:, None], other=0.0)  # [BQ, D]

    # -- initialise --
    acc_o = tl.zeros([BQ, DV], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    for step in range(start, masked, BT):
        # -- load the keys and the values --
        k_tile = KDescriptor.load([step, head * D])  # [BT, D]
        v_tile = VDescriptor.load([step, head * DV])  # [BT, DV]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))  # [BQ]
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max * scale_log2)
        scores_scale = tl.exp2(scores_max_prev * scale_log2 - shift)
        p = tl.exp2(acc_s * scale_log2 - shift[:, None])  # [BQ, BT]
        running_sum = running_sum * scores_scale + tl.sum(p, axis=1)
        acc_o *= scores_scale[:, None]

        # -- accumulate --
        acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, masked, stop, K, V, head, scale_log2,
        H, D, DV, True, D, DV, BT,
    )  # fmt: skip

    # -- normalise and store --
    is_empty = end == first  # [BQ]
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = tl.where(is_empty[:, None], 0.0, acc_o / safe_sum[:, None])  # [BQ, DV]
    lse = tl.where(is_empty, float("-inf"), scores_max * scale + tl.log(safe_sum))
    o_pointer = Output + row[:, None] * DV + value_width
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=in_rows[:, None])
    tl.store(LSE + row, lse, mask=in_rows)
