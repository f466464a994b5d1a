"""Chapter 01: attention, written out.

Every query compares itself with every key, the comparisons become weights that sum to 1, and the
weights mix the values. This file holds that computation in its plainest form: one matrix of scores,
one softmax, one weighted sum. It is what every later chapter is measured against.

It does not share keys among query heads (chapter 02), does not avoid the N × M matrix of scores
(chapters 03 and 04), and does not try to be fast.

Symbols: `B` batch, `N` query positions, `M` key positions, `HQ` query heads, `D` key width, `DV`
value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """Turn scores into weights: non-negative, summing to 1 along `dim`, a larger score giving a
    larger weight.

    Args:
        scores: any shape; `-inf` means "not visible" and gets weight exactly 0.
        dim: the dimension that sums to 1.

    Returns:
        Weights of the same shape and dtype. A row of nothing but `-inf` has no weights to give: it
        is all 0, not NaN.
    """
    highest = scores.amax(dim, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)  # -inf - (-inf) would be NaN
    e = torch.exp(scores - highest)  # every exponent is ≤ 0: exp cannot overflow
    total = e.sum(dim, keepdim=True)
    return e / total.masked_fill(total == 0, 1)


def causal_mask(N: int, M: int, device: torch.device | str | None = None) -> Tensor:
    """Which keys each query may see: those at its own position and before.

    The queries are the *last* `N` of the `M` positions, so query `i` stands at position
    `M - N + i`.

    Returns:
        bool `[N, M]`, True where the key is visible. Every query sees at least itself.

    Raises:
        ValueError: if there are more queries than positions.
    """
    if N > M:
        raise ValueError(
            f"N: the queries are the last N of the M positions, so N may be at most M = {M}, got "
            f"{N}"
        )
    query_position = torch.arange(M - N, M, device=device)  # [N]
    key_position = torch.arange(M, device=device)  # [M]
    return key_position[None, :] <= query_position[:, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense attention (Vaswani et al. 2017, arXiv 1706.03762, Eq. 1), per head:
    `softmax(scale · q kᵀ) v`.

    Args:
        q: queries `[B, N, HQ, D]`; they are the last `N` of the `M` positions.
        k: keys `[B, M, HQ, D]`.
        v: values `[B, M, HQ, DV]`; `DV` may differ from `D`.
        scale: factor on every dot product, `D ** -0.5` by default.
        causal: hide the keys after each query's own position.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        `o` `[B, N, HQ, DV]` in the dtype of `v`, computed in fp32 (fp64 inputs stay fp64). With
        `return_lse` also `lse` `[B, N, HQ]`, fp32 (or fp64), the natural logarithm of the sum of
        `exp(score)` over the visible keys. A query that sees no key gets output 0 and `lse = -inf`.

    Raises:
        ValueError: naming the argument, when shapes do not fit.
    """
    _check_shapes(q, k, v, causal)
    N, M, D = q.shape[1], k.shape[1], q.shape[3]
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    scale = D**-0.5 if scale is None else scale

    # -- scores --
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k.to(dtype)) * scale  # [B, HQ, N, M]
    if causal:
        scores = scores.masked_fill(~causal_mask(N, M, q.device), -torch.inf)

    # -- softmax --
    weights = softmax(scores)  # [B, HQ, N, M]

    # -- weighted sum --
    o = torch.einsum("bhij,bjhe->bihe", weights, v.to(dtype)).to(v.dtype)  # [B, N, HQ, DV]
    if not return_lse:
        return o
    return o, torch.logsumexp(scores, dim=-1).transpose(1, 2)  # [B, HQ, N] -> [B, N, HQ]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x, layout in (
        ("q", q, "[B, N, HQ, D]"),
        ("k", k, "[B, M, HQ, D]"),
        ("v", v, "[B, M, HQ, DV]"),
    ):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected four dimensions {layout}, got shape {list(x.shape)}"
            )
    B, N, HQ, D = q.shape
    M = k.shape[1]
    if k.shape != (B, M, HQ, D):
        raise ValueError(
            f"k: expected [B, M, HQ, D] = [{B}, any, {HQ}, {D}] to fit q, got shape {list(k.shape)}"
        )
    if M == 0:
        raise ValueError("k: expected at least one position to attend to, got M = 0")
    if v.shape[:3] != (B, M, HQ):
        raise ValueError(
            f"v: expected [B, M, HQ, DV] = [{B}, {M}, {HQ}, any] to fit k, got shape "
            f"{list(v.shape)}"
        )
    if causal and N > M:
        raise ValueError(f"q: the queries are the last N of the M = {M} positions, got N = {N}")
