"""Chapter 09's four kernels in Triton: copy, softmax of rows, matrix product, dense attention.

Each is the program of one tile, launched many times; `course.kernels.tilelang_basics` holds the
same four, phase by phase and name by name. They are written to be read: no autotuning, nothing that
depends on a particular GPU, offsets in 32 bits.

Launching them is the business of `course.kernels.two_tile_languages`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(X, Y, N, BN: tl.constexpr):
    """`X [N]` to `Y [N]`; the grid is `(cdiv(N, BN),)`."""
    # -- locate the program --
    block = tl.program_id(0)
    columns = block * BN + tl.arange(0, BN)  # [BN]

    # -- load --
    x_tile = tl.load(X + columns, mask=columns < N)  # [BN]

    # -- store --
    tl.store(Y + columns, x_tile, mask=columns < N)


@triton.jit
def softmax(X, Y, R, N, scale_log2, BR: tl.constexpr, BN: tl.constexpr):
    """Each row of `X [R, N]` to `Y [R, N]`, held whole in `BN`; the grid is `(cdiv(R, BR),)`."""
    # -- locate the program --
    block = tl.program_id(0)
    rows = block * BR + tl.arange(0, BR)  # [BR]
    columns = tl.arange(0, BN)  # [BN]
    offsets = rows[:, None] * N + columns  # [BR, BN]
    in_bounds = (rows < R)[:, None] & (columns < N)  # [BR, BN]

    # -- load --
    x_tile = tl.load(X + offsets, mask=in_bounds, other=0.0)
    x_tile = x_tile.to(tl.float32)  # [BR, BN]

    # -- mask --
    x_tile = tl.where(columns < N, x_tile, float("-inf"))

    # -- softmax --
    scores_max = tl.max(x_tile, axis=1)  # [BR]
    x_tile = tl.exp2((x_tile - scores_max[:, None]) * scale_log2)
    scores_sum = tl.sum(x_tile, axis=1)  # [BR]
    x_tile = x_tile / scores_sum[:, None]

    # -- store --
    tl.store(Y + offsets, x_tile.to(Y.dtype.element_ty), mask=in_bounds)


@triton.jit
def matmul(
    A, B, C, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`A [M, K]` times `B [K, N]` to `C [M, N]`; the grid is `(cdiv(M, BM), cdiv(N, BN))`."""
    # -- locate the program --
    rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)  # [BN]

    # -- initialise --
    acc = tl.zeros([BM, BN], tl.float32)

    for step in tl.range(tl.cdiv(K, BD), num_stages=NUM_STAGES):
        depth = step * BD + tl.arange(0, BD)  # [BD]

        # -- load --
        a_mask = (rows < M)[:, None] & (depth < K)
        b_mask = (depth < K)[:, None] & (columns < N)
        a_offsets = rows[:, None] * K + depth  # [BM, BD]
        b_offsets = depth[:, None] * N + columns  # [BD, BN]
        a_tile = tl.load(A + a_offsets, mask=a_mask, other=0.0)
        b_tile = tl.load(B + b_offsets, mask=b_mask, other=0.0)

        # -- accumulate --
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")  # fp32 is not rounded to TF32

    # -- store --
    c_mask = (rows < M)[:, None] & (columns < N)
    c_offsets = rows[:, None] * N + columns  # [BM, BN]
    tl.store(C + c_offsets, acc.to(C.dtype.element_ty), mask=c_mask)


@triton.jit
def attention(
    Q, K, V, Output, LSE, N, M, HQ, scale, scale_log2,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`Q [B, N, HQ, D]`, `K [B, M, H, D]`, `V [B, M, H, DV]` to `Output` and `LSE`; the grid is
    `(cdiv(N, BQ), HQ, B)`.

    `G` query heads share a key/value head. `DT` and `DVT` are `D` and `DV`, rounded up to what a
    dot takes.
    """
    # -- locate the program --
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // G
    start = tl.program_id(0) * BQ
    rows = start + tl.arange(0, BQ)  # [BQ]
    position = M - N + rows  # [BQ], the queries are the last N positions
    num_keys = tl.minimum(M, M - N + start + BQ) if CAUSAL else M
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    query_row = (batch * N + rows) * HQ + head  # [BQ]

    # -- load the query tile --
    q_mask = (rows < N)[:, None] & (width < D)
    q_tile = tl.load(Q + query_row[:, None] * D + width, mask=q_mask, other=0.0)  # [BQ, DT]

    # -- initialise --
    acc_o = tl.zeros([BQ, DVT], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    for step in tl.range(tl.cdiv(num_keys, BK), num_stages=NUM_STAGES):
        # -- load the keys --
        keys = step * BK + tl.arange(0, BK)  # [BK]
        key_row = (batch * M + keys) * (HQ // G) + kv_head  # [BK]
        k_mask = (keys < M)[:, None] & (width < D)
        k_tile = tl.load(K + key_row[:, None] * D + width, mask=k_mask, other=0.0)  # [BK, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BK]

        # -- mask --
        visible = keys < M
        if CAUSAL:
            visible = visible & (keys <= position[:, None])
        acc_s = tl.where(visible, acc_s, float("-inf"))

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
        scores_scale = tl.exp2((scores_max_prev - scores_max) * scale_log2)
        acc_s = tl.exp2((acc_s - scores_max[:, None]) * scale_log2)
        scores_sum = tl.sum(acc_s, axis=1)
        running_sum = running_sum * scores_scale + scores_sum
        acc_o = acc_o * scores_scale[:, None]

        # -- load the values --
        v_mask = (keys < M)[:, None] & (value_width < DV)
        v_offset = key_row[:, None] * DV + value_width  # [BK, DVT]
        v_tile = tl.load(V + v_offset, mask=v_mask, other=0.0)

        # -- accumulate --
        p_tile = acc_s.to(V.dtype.element_ty)
        acc_o = tl.dot(p_tile, v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    acc_o = acc_o / running_sum[:, None]
    lse = scores_max * scale + tl.log(running_sum)  # [BQ]
    o_mask = (rows < N)[:, None] & (value_width < DV)
    o_offset = query_row[:, None] * DV + value_width  # [BQ, DVT]
    tl.store(Output + o_offset, acc_o.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + query_row, lse, mask=rows < N)
