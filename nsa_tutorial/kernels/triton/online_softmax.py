"""The online softmax of a tile of scores (chapter 03), for the kernels that do not spell it out.

Two roundings of the same: `online_softmax` subtracts the maximum before it scales, as
`selected.forward` does, so that scores of any size keep their differences; `online_softmax_scaled`
scales first, which is one multiply-add for each score. `online_softmax_of_rows` is either, for
tiles that only some rows see.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_softmax(acc_s, scores_max_prev, running_sum, acc_o, scale_log2):
    """The weights of one tile's scores `[GT, BT]`; the running maximum, sum and accumulator with
    them, rescaled."""
    scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
    shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
    scores_scale = tl.exp2((scores_max_prev - shift) * scale_log2)
    acc_s = tl.exp2((acc_s - shift[:, None]) * scale_log2)
    running_sum = running_sum * scores_scale + tl.sum(acc_s, axis=1)
    return acc_s, scores_max, running_sum, acc_o * scores_scale[:, None]


@triton.jit
def online_softmax_scaled(acc_s, scores_max_prev, running_sum, acc_o, scale_log2):
    """`online_softmax`, with scores that are scaled before the maximum is subtracted."""
    scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
    shift = tl.where(scores_max == float("-inf"), 0.0, scores_max * scale_log2)
    scores_scale = tl.exp2(scores_max_prev * scale_log2 - shift)
    p = tl.exp2(acc_s * scale_log2 - shift[:, None])
    running_sum = running_sum * scores_scale + tl.sum(p, axis=1)
    return p, scores_max, running_sum, acc_o * scores_scale[:, None]


@triton.jit
def online_softmax_of_rows(
    acc_s, sees_tile, scores_max_prev, running_sum, acc_o, scale_log2, SCALED: tl.constexpr
):
    """`online_softmax_scaled`, or `online_softmax` without `SCALED`, to which a tile adds nothing
    where `sees_tile` `[GT]` is false: one number a row in place of a mask for each score, none of
    which may be infinite or NaN there."""
    scores_max = tl.where(sees_tile, tl.max(acc_s, axis=1), float("-inf"))
    scores_max = tl.maximum(scores_max_prev, scores_max)
    shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
    # where infinity is subtracted, a weight of exp2(-inf), which is 0
    if SCALED:
        shift *= scale_log2
        scores_scale = tl.exp2(scores_max_prev * scale_log2 - shift)
        shift = tl.where(sees_tile, shift, float("inf"))
        p = tl.exp2(acc_s * scale_log2 - shift[:, None])
    else:
        scores_scale = tl.exp2((scores_max_prev - shift) * scale_log2)
        shift = tl.where(sees_tile, shift, float("inf"))
        p = tl.exp2((acc_s - shift[:, None]) * scale_log2)
    running_sum = running_sum * scores_scale + tl.sum(p, axis=1)
    return p, scores_max, running_sum, acc_o * scores_scale[:, None]
