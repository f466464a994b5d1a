"""Chapter 02: grouped-query attention, where several query heads share one key/value head.

The `HQ` query heads are cut into `H` groups of `G = HQ // H` neighbours, and every group reads the
keys and values of one key/value head: query head `hq` reads KV head `hq // G`. With `H = HQ` this
is the multi-head attention of chapter 01, with `H = 1` it is multi-query attention. This file holds
the two ways to compute it: `expand_kv_heads` gives every query head its own copy of its keys, and
`attention` gives every key the G queries that ask it, without a copy.

It keeps no cache (chapter 15 decodes), cuts nothing into tiles (chapter 04), and chooses no blocks
(chapters 05 and 07).

Symbols: `B` batch, `N` query positions, `M` key positions, `HQ` query heads, `H` key/value heads,
`G` group size, `D` key width, `DV` value width. Sources: grouped-query attention, Ainslie et al.
2023, arXiv 2305.13245; multi-query attention, Shazeer 2019, arXiv 1911.02150. Ainslie et al. write
GQA-8 for eight *groups*, that is eight KV heads; here `G` is the *size* of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.exact.dense_attention import causal_mask, softmax


def group_size(HQ: int, H: int) -> int:
    """How many query heads share one key/value head: `G = HQ // H`.

    Raises:
        ValueError: naming both, when the query heads do not divide evenly among the KV heads.
    """
    if H < 1 or HQ < 1 or HQ % H:
        raise ValueError(
            f"HQ, H: HQ = {HQ} query heads cannot be shared out evenly among H = {H} key/value "
            "heads"
        )
    return HQ // H


def kv_head(hq: int, G: int) -> int:
    """The key/value head that query head `hq` reads: neighbours share, so heads 0 … G-1 read KV
    head 0."""
    return hq // G


def expand_kv_heads(x: Tensor, G: int) -> Tensor:
    """Give every query head its own copy of its keys (or values): `[B, M, H, D]` →
    `[B, M, H·G, D]`.

    Afterwards any multi-head attention computes grouped-query attention, at the price of `G` times
    the memory.

    Args:
        x: keys or values `[B, M, H, D]`.
        G: query heads per KV head.
    """
    return x.repeat_interleave(G, dim=2)  # head hq of the result is head hq // G of x


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Grouped-query attention without a copy of K or V per query head.

    Args:
        q: queries `[B, N, HQ, D]`; they are the last `N` of the `M` positions.
        k: keys `[B, M, H, D]`; `H` divides `HQ`.
        v: values `[B, M, H, DV]`; `DV` may differ from `D`.
        scale: factor on every dot product, `D ** -0.5` by default.
        causal: hide the keys after each query's own position.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        `o` `[B, N, HQ, DV]` in the dtype of `v`, computed in fp32 (fp64 inputs stay fp64). With
        `return_lse` also `lse` `[B, N, HQ]`, fp32 (or fp64), the natural logarithm of the sum of
        `exp(score)` over the visible keys.

    Raises:
        ValueError: naming the argument, when shapes do not fit.
    """
    check_shapes(q, k, v, causal)
    (_, N, HQ, D), (M, H) = q.shape, k.shape[1:3]
    G = group_size(HQ, H)
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    scale = D**-0.5 if scale is None else scale

    # -- view the queries in groups --
    qg = q.unflatten(2, (H, G))  # [B, N, H, G, D]: head hq = h·G + g becomes (h, g)

    # -- scores --
    scores = torch.einsum("bihgd,bjhd->bhgij", qg.to(dtype), k.to(dtype)) * scale  # [B, H, G, N, M]
    if causal:
        scores = scores.masked_fill(~causal_mask(N, M, q.device), -torch.inf)

    # -- softmax --
    weights = softmax(scores)  # [B, H, G, N, M]

    # -- weighted sum --
    og = torch.einsum("bhgij,bjhe->bihge", weights, v.to(dtype))  # [B, N, H, G, DV]
    o = og.flatten(2, 3).to(v.dtype)  # [B, N, HQ, DV]
    if not return_lse:
        return o
    lse = torch.logsumexp(scores, dim=-1)  # [B, H, G, N]
    return o, lse.flatten(1, 2).transpose(1, 2)  # [B, N, HQ]


def check_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise `ValueError`, naming the argument, unless `q`, `k` and `v` are shaped as `attention`
    wants them."""
    for name, x, layout in (
        ("q", q, "[B, N, HQ, D]"),
        ("k", k, "[B, M, H, D]"),
        ("v", v, "[B, M, H, DV]"),
    ):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected four dimensions {layout}, got shape {list(x.shape)}"
            )
    B, N, _, D = q.shape
    M, H = k.shape[1:3]
    if k.shape != (B, M, H, D):
        raise ValueError(
            f"k: expected [B, M, H, D] = [{B}, any, any, {D}] to fit q, got shape {list(k.shape)}"
        )
    if v.shape[:3] != (B, M, H):
        raise ValueError(
            f"v: expected [B, M, H, DV] = [{B}, {M}, {H}, any] to fit k, got shape {list(v.shape)}"
        )
    if causal and N > M:
        raise ValueError(f"q: the queries are the last N of the M = {M} positions, got N = {N}")
