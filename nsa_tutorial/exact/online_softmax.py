"""Chapter 03: softmax in one pass over the keys, chunk by chunk, in base two.

Holds what is carried from chunk to chunk (`State`), the step that every kernel of the course
repeats (`update`), and what turns the last state into attention's output and log-sum-exp
(`finish`). `merge` joins two results that were computed apart.

It does not tile the queries or count bytes (chapter 04), knows no heads and no batch, and leaves
memory to PyTorch: it is here for its arithmetic. Names and order of `update` are those of the
TileLang and Triton kernels, but for the powers `p`, which most kernels write over `acc_s`.

Symbols: `R` rows, any rows, each with a mask of its own; `BS` keys in a chunk; `N` queries, `M`
keys, `D` key width, `DV` value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.exact.dense_attention import causal_mask

LOG2_E = math.log2(math.e)  # exp(x) == exp2(x * LOG2_E)


class State(NamedTuple):
    """What a row remembers of the keys read so far: DV + 2 numbers, however many keys there were.

    Attributes:
        scores_max: `[R]`, the largest score so far, unscaled; `-inf` before the first visible key.
        running_sum: `[R]`, the denominator so far, the sum of
            `exp2((score - scores_max) * scale_log2)`.
        acc_o: `[R, DV]`, the same sum with each term multiplied by its value: the numerator of the
            output.
    """

    scores_max: Tensor
    running_sum: Tensor
    acc_o: Tensor


def start(
    rows: int,
    DV: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> State:
    """The state before the first key. A sum over nothing is 0 and a maximum over nothing is
    `-inf`."""
    return State(
        scores_max=torch.full((rows,), -torch.inf, dtype=dtype, device=device),
        running_sum=torch.zeros(rows, dtype=dtype, device=device),
        acc_o=torch.zeros(rows, DV, dtype=dtype, device=device),
    )


def update(state: State, acc_s: Tensor, v: Tensor, scale_log2: float) -> State:
    """Take one chunk of keys into the state (Milakov and Gimelshein 2018, arXiv 1805.02867;
    FlashAttention, arXiv 2205.14135).

    Args:
        state: the state so far.
        acc_s: the chunk's scores `[R, BS]`, plain dot products in the state's dtype; `-inf` marks a
            key that is not visible.
        v: the chunk's values `[BS, DV]`.
        scale_log2: `scale * LOG2_E`, positive.

    Returns:
        The new state. A chunk with no visible key leaves a row as it was.

    Exponents subtract before they multiply, as the difference of two close scores is exact.
    """
    scores_max, running_sum, acc_o = state

    # -- online softmax --
    scores_max_prev = scores_max  # [R]
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))  # [R]
    shift = scores_max.masked_fill(scores_max == -torch.inf, 0)  # [R]
    scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)  # [R]
    p = torch.exp2((acc_s - shift[:, None]) * scale_log2)  # [R, BS]
    scores_sum = p.sum(1)  # [R]
    running_sum = running_sum * scores_scale + scores_sum  # [R]
    acc_o = acc_o * scores_scale[:, None]  # [R, DV]

    # -- accumulate --
    acc_o = acc_o + p @ v.to(p.dtype)  # [R, DV]
    return State(scores_max, running_sum, acc_o)


def finish(state: State, scale: float) -> tuple[Tensor, Tensor]:
    """Divide once, at the end.

    Args:
        state: the state after the last chunk.
        scale: the factor on every score, not folded with `LOG2_E`, positive.

    Returns:
        `o` `[R, DV]` and `lse` `[R]`, the natural logarithm of the sum of `exp(score * scale)`. A
        row that saw no key gets `o = 0`, `lse = -inf`.
    """
    scores_max, running_sum, acc_o = state
    # [R, DV], an empty row is 0 / 1, not 0 / 0
    o = acc_o / running_sum.masked_fill(running_sum == 0, 1)[:, None]
    return o, scores_max * scale + torch.log(running_sum)


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join the results of the same queries over two disjoint sets of keys, as if they had been
    computed together.

    Args:
        o1, o2: outputs `[..., DV]`; 0 where `lse` is `-inf`.
        lse1, lse2: their natural log-sum-exp `[...]`; `-inf` where no key was visible.

    Returns:
        `o` `[..., DV]` and `lse` `[...]` over both sets. Two empty rows make an empty row.
    """
    lse_max = torch.maximum(lse1, lse2)  # [...]
    shift = lse_max.masked_fill(lse_max == -torch.inf, 0)  # [...], as in `update`
    # [...], the larger of the two is 1
    weight1, weight2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)
    total = weight1 + weight2  # [...]
    o = o1 * weight1[..., None] + o2 * weight2[..., None]  # [..., DV]
    return o / total.masked_fill(total == 0, 1)[..., None], shift + torch.log(total)


def streaming_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int, scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention of one head that never holds more than `chunk` scores of a row.

    Args:
        q: queries `[N, D]`, the last `N` of the `M` positions.
        k, v: keys `[M, D]` and values `[M, DV]`.
        chunk: keys per step; the last chunk may be shorter.
        scale: factor on every dot product, `D ** -0.5` by default; positive.
        causal: hide the keys after each query's own position.

    Returns:
        `o` `[N, DV]` in the dtype of `v` and `lse` `[N]`, computed in fp32 (fp64 inputs stay fp64).

    Raises:
        ValueError: if `chunk` is not positive.
    """
    if chunk <= 0:
        raise ValueError(f"chunk: expected at least 1 key per step, got {chunk}")
    N, M, D = q.shape[0], k.shape[0], q.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = D**-0.5 if scale is None else scale
    # [N, M], for brevity: a kernel compares positions instead
    hidden = ~causal_mask(N, M, q.device) if causal else None
    state = start(N, v.shape[1], dtype=dtype, device=q.device)
    for first in range(0, M, chunk):
        keys = slice(first, first + chunk)
        acc_s = q.to(dtype) @ k[keys].to(dtype).T  # [N, BS]
        if hidden is not None:
            acc_s = acc_s.masked_fill(hidden[:, keys], -torch.inf)
        state = update(state, acc_s, v[keys], scale * LOG2_E)
    o, lse = finish(state, scale)
    return o.to(v.dtype), lse


def trace(acc_s: Tensor, v: Tensor, scale_log2: float, *, chunk: int) -> list[State]:
    """The states of a row of scores, for looking at: before the first chunk, then after each.

    Args:
        acc_s: all scores `[R, M]`, as `update` takes them.
        v: all values `[M, DV]`.
        scale_log2: as in `update`.
        chunk: keys per step.
    """
    states = [start(len(acc_s), v.shape[1], dtype=acc_s.dtype, device=acc_s.device)]
    for scores, values in zip(acc_s.split(chunk, dim=1), v.split(chunk), strict=True):
        states.append(update(states[-1], scores, values, scale_log2))
    return states
