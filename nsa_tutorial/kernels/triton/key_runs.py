"""Steps along a run of keys: what attention to summaries and sliding windows have in common.

Each row of a tile sees one run of keys, `first … end - 1`. Most steps are seen by the whole tile
and need no mask; with `MASK`, the rows of a step see its keys in part.

Symbols: `BQ` rows of a tile of queries, `BT` keys of a step; in `add_dkv` the other way round, `BT`
keys of a tile and `BR` rows of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.online_softmax import online_softmax_scaled


@triton.jit
def load_step(
    K, V, KBox, VBox, step, stop, head, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The keys `[BT, DT]` and values `[BT, DVT]` of one head from the key `step` on; with `MASK`,
    zeros from `stop` on. `KBox` and `VBox` are descriptors for steps without a mask, or None."""
    if not MASK and KBox is not None:
        return KBox.load([step, head * D]), VBox.load([step, head * DV])
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    key_row = (step * H + head).to(tl.int64)
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every step
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]
    k_mask = width < D
    v_mask = value_width < DV
    if MASK:
        k_mask = (tokens < stop - step)[:, None] & k_mask
        v_mask = (tokens < stop - step)[:, None] & v_mask
    k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)
    v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)
    return k_tile, v_tile


@triton.jit
def in_registers(x):
    """The tile `x`, where the tensor cores leave a product and take a left factor: in registers.

    A left factor that comes from memory stands in shared memory, and each product of a walk reads
    it there once more. A product of zeros, added to `x`, is `x`. That costs one small product, and
    pays where shared memory is the limit; of 16 bits, and no wider than 128.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if x.dtype.primitive_bitwidth == 16 and WIDTH <= 128:
        nothing = tl.zeros([ROWS, 16], x.dtype)
        x = tl.dot(nothing, tl.zeros([16, WIDTH], x.dtype), x.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def sees(step, first, end, BT: tl.constexpr):
    """Which rows see which keys of the step, `[BQ, BT]`."""
    key = step + tl.arange(0, BT)  # [BT]
    return (key >= first[:, None]) & (key < end[:, None])


@triton.jit
def attend_step(
    acc_o, running_sum, scores_max, q_tile, K, V, KBox, VBox, step, stop, first, end, head,
    scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The weights `[BQ, BT]` of a step's keys, its values `[BT, DVT]`, and the rows' running state,
    rescaled. The caller adds the weighted values."""
    k_tile, v_tile = load_step(K, V, KBox, VBox, step, stop, head, H, D, DV, MASK, DT, DVT, BT)
    acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]
    if MASK:
        acc_s = tl.where(sees(step, first, end, BT), acc_s, float("-inf"))
    p, scores_max, running_sum, acc_o = online_softmax_scaled(
        acc_s, scores_max, running_sum, acc_o, scale_log2
    )
    return p.to(v_tile.dtype), v_tile, acc_o, running_sum, scores_max


@triton.jit
def add_dq(
    acc_dq, q_tile, do_tile, lse, delta, K, V, step, stop, first, end, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`acc_dq [BQ, DT]` with what a step's keys add to it."""
    # -- load the keys and the values --
    k_tile, v_tile = load_step(K, V, None, None, step, stop, head, H, D, DV, MASK, DT, DVT, BT)

    # -- weights --
    acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]
    p = tl.exp2(acc_s * scale_log2 - lse[:, None])
    d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BQ, BT]

    # -- gradient of the scores --
    d_s = p * (d_p - delta[:, None])
    if MASK:  # a gradient of 0 hides a number, but not NaN
        d_s = tl.where(sees(step, first, end, BT), d_s, 0.0)
        is_good = tl.abs(k_tile.to(tl.float32)) < float("inf")
        k_tile = tl.where(is_good, k_tile, 0.0)

    # -- accumulate --
    return tl.dot(d_s.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")


@triton.jit
def add_dkv(acc_dk, acc_dv, p, v_tile, q_tile, do_tile, delta, is_seen, MASK: tl.constexpr):
    """`acc_dk [BT, DT]` and `acc_dv [BT, DVT]` with what a step's rows add to them, whose weights
    are `p [BT, BR]`. With `MASK`, `is_seen [BT, BR]` says which rows see which keys; else it is not
    read."""
    # Before the values' gradient, which nothing here waits for. H200, Triton 3.6, bf16, 64 heads
    # over 4, D 128, 8,192 random queries, by the profiler, in microseconds, with `d_p` behind it
    # and so: lists 1,253 and 1,190, windows 732 and 671, summaries 380 and 345.
    d_p = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BT, BR]

    # -- gradient of the values --
    acc_dv = tl.dot(p.to(do_tile.dtype), do_tile, acc_dv, input_precision="ieee")

    # -- gradient of the scores --
    d_s = p * (d_p - delta)
    if MASK:
        d_s = tl.where(is_seen, d_s, 0.0)

    # -- gradient of the keys --
    acc_dk = tl.dot(d_s.to(q_tile.dtype), q_tile, acc_dk, input_precision="ieee")
    return acc_dk, acc_dv


@triton.jit
def store_gradient(pointer, gradient, mask, ADD: tl.constexpr):
    """In place of what `pointer` shows, or, with `ADD`, on top of it."""
    if ADD:
        gradient += tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointer, gradient.to(pointer.dtype.element_ty), mask=mask)
