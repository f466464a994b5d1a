"""What a layer of `transformers` calls as its attention, on the operators.

    o, None = attention(module, query, key, value, first, block_indices=lists)

With lists, `ops.selected_attention`; without, PyTorch's SDPA. Blocks count from the first key of a
row, padding included, as `transformers` counts them. The block in which a query's text begins is
then seen in part: `selected` attends to its tokens one by one, and joins the two results by their
log-sum-exps. Nothing here but `dense` imports `transformers`.

Symbols: `B` rows, `N` queries, the last of `M` keys; `HQ` query heads over `H`; `S` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import checks

# Arguments of other implementations, and why they have no place here; None and False are nothing.
REFUSED = {
    "softcap": "the operators put no bound on scores",
    "s_aux": "the operators have no sinks",
    "sinks": "the operators have no sinks",
    "sliding_window": "a window is not given by lists",
    "position_bias": "the operators add nothing to scores",
    "head_mask": "the operators leave out no head",
    "output_attentions": "the operators keep no weights; the implementation 'eager' does",
}


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    block_indices: Tensor | None = None, is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, *,
    backend: str = "auto", order: str = "auto", **others: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of `transformers`' `AttentionInterface`.

    Args:
        module: the layer. It tells whether attention is causal, and, if there are lists, its
            `indexer.block_size` how long a block is; with `texts.choose_within_texts`, its
            `indexer.cu_seqlens` where texts begin from which blocks count.
        query: `[B, HQ, N, D]`, the last `N` of the `M` positions.
        key, value: `[B, H, M, D]`, `[B, H, M, DV]`.
        attention_mask: what `masks.first_keys` returned, `[B, N]` or None. A layer without lists
            takes masks `[B, 1, N, M]`, too.
        dropout: of the weights; 0 for a layer with lists.
        scaling: factor on the scores; None is `D ** -0.5`.
        block_indices: `[B, heads of the indexer, N, S]`, blocks in any order, -1 for none.
        is_causal: None asks the layer.
        cu_seq_lens_q, cu_seq_lens_k: `[texts + 1]`, where each text of one row begins.
        backend, order: as in `ops.selected_attention`.
        others: `position_ids` and the like, which change nothing. Those in `REFUSED` must be None.

    Returns:
        `[B, N, HQ, DV]`, and None for the weights. A query that sees nothing gets 0.

    Raises:
        ValueError, TypeError: naming the argument that cannot be honoured.
    """
    for name, why in REFUSED.items():
        if (got := others.get(name)) is not None and got is not False:
            raise ValueError(f"{name}: got {checks.describe(got)}, expected None: {why}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    first = _of_packed(query, key, attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    if block_indices is None:
        return dense(module, query, key, value, first, dropout, scaling, causal), None
    if dropout:
        raise ValueError(f"dropout: got {dropout}, expected 0: the operators keep every weight")
    if not causal:
        raise ValueError("is_causal: got False, expected True for a layer with lists of blocks")
    if first is not None and first.ndim != 2:
        raise ValueError(
            f"attention_mask: got {checks.describe(first)}, expected None or [B, N] from this "
            "implementation's own mask function: a mask of your own has no place beside lists"
        )
    block_size, options = module.indexer.block_size, {"backend": backend, "order": order}
    if (cu_seqlens := getattr(module.indexer, "cu_seqlens", None)) is not None:
        first, options["cu_seqlens"] = None, cu_seqlens  # lists count from each text's own start
    o = of_heads_first(query, key, value, block_indices, block_size, first, scaling, **options)
    return o, None


def of_heads_first(
    query: Tensor, key: Tensor, value: Tensor, block_indices: Tensor, block_size: int,
    first: Tensor | None = None, scale: float | None = None, **options: object,
) -> Tensor:  # fmt: skip
    """`selected`, of `[B, HQ, N, D]`, `[B, H, M, D]` and lists `[B, heads, N, S]`."""
    checks.check_tensor("block_indices", block_indices, "[B, heads, N, S]", checks.INTEGERS)
    (B, HQ, N, D), (_, H, M, _), heads = query.shape, key.shape, block_indices.shape[1]
    if heads < 1 or HQ % heads or max(heads, H) % min(heads, H):
        raise ValueError(
            f"block_indices: got {checks.describe(block_indices)}, expected as many heads as keys "
            f"have, {H}, or a divisor or a multiple of them that divides {HQ}"
        )
    if heads < H:
        block_indices = block_indices.repeat_interleave(H // heads, dim=1)
    elif heads > H:
        key, value = (x.repeat_interleave(heads // H, dim=1) for x in (key, value))
        H = heads
    if N == M:
        turned = (x.transpose(1, 2) for x in (query, key, value, block_indices))
        return selected(*turned, block_size, first, scale, **options)
    # With few queries, the keys of a cache are what is long. A row for each of their heads leaves
    # them where they lie.
    q = query.reshape(B * H, HQ // H, N, D).transpose(1, 2)  # [B * H, N, G, D]
    k, v, ids = (x.flatten(0, 1).unsqueeze(2) for x in (key, value, block_indices))
    first = None if first is None else first.repeat_interleave(H, dim=0)
    o = selected(q, k, v, ids, block_size, first, scale, **options)
    return o.unflatten(0, (B, H)).transpose(1, 2).flatten(2, 3)  # [B, N, HQ, DV]


def selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int,
    first: Tensor | None = None, scale: float | None = None, **options: object,
) -> Tensor:  # fmt: skip
    """`ops.selected_attention`, where a query sees no key before `first [B, N]`."""
    if first is None:
        return ops.selected_attention(
            q, k, v, block_indices, block_size=block_size, scale=scale, **options
        )
    options = {**options, "scale": scale, "return_lse": True}
    begins = first[:, :, None, None]
    edge, is_cut = begins // block_size, begins % block_size > 0  # [B, N, 1, 1]
    is_edge = (block_indices == edge) & is_cut
    whole = block_indices.masked_fill(is_edge | (block_indices < edge), -1)
    parts = [ops.selected_attention(q, k, v, whole, block_size=block_size, **options)]
    # what is left of a block that is cut is at most block_size - 1 tokens
    if block_size > 1:
        tokens = begins + torch.arange(block_size - 1, device=first.device)  # [B, N, 1, BS - 1]
        is_left = is_edge.any(-1, keepdim=True) & (tokens < (edge + 1) * block_size)
        tokens = tokens.where(is_left, -1)  # [B, N, H, BS - 1]
        options["order"] = "auto"
        parts.append(ops.selected_attention(q, k, v, tokens, block_size=1, **options))
    return _join(parts).to(v.dtype)


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The output over the keys of all parts `(o, lse)`; 0 where no part has one."""
    o, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    highest = lse.amax(0).detach()
    weights = (lse - highest.masked_fill(highest == -torch.inf, 0)).exp()
    total = weights.sum(0)
    weights = weights / total.masked_fill(total == 0, 1)
    return (weights[..., None] * o).sum(0)


def dense(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    dropout: float, scaling: float | None, causal: bool,
) -> Tensor:  # fmt: skip
    """PyTorch's SDPA, as `transformers` calls it; `mask` is `[B, N]` first keys, or a mask of
    `[B, 1, N, M]`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    N, M = query.shape[2], key.shape[2]
    is_short = causal and mask is None and 1 < N < M
    if is_short or (mask is not None and mask.ndim == 2):
        t = torch.arange(M, device=key.device)
        is_past = t <= t[M - N :, None] if causal else t[None] >= 0  # [N, M]
        begins = 0 if mask is None else mask[:, None, :, None]
        mask = (is_past & (t >= begins)).expand(len(query), 1, N, M)
    how = {"dropout": dropout, "scaling": scaling, "is_causal": causal}
    return sdpa_attention_forward(module, query, key, value, mask, **how)[0]


def _of_packed(
    query: Tensor, key: Tensor, first: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> Tensor | None:
    """The first keys, if a row is packed by offsets; otherwise `first` as it came."""
    if cu_q is None and cu_k is None:
        return first
    for name, cu in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        checks.check_tensor(name, cu, "[texts + 1]", checks.INTEGERS)
    if cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError(
            f"cu_seq_lens_k: got {cu_k.tolist()}, expected those of cu_seq_lens_q, "
            f"{cu_q.tolist()}: packed queries have all keys"
        )
    B, N, M = len(query), query.shape[2], key.shape[2]
    if B != 1 or N != M:
        raise ValueError(
            f"cu_seq_lens_q: got {B} rows of {N} queries and {M} keys, expected one row with as "
            "many queries as keys"
        )
    t = torch.arange(N, device=query.device)
    begins = cu_q[torch.searchsorted(cu_q, t, right=True) - 1][None].long()
    return begins if first is None else first.maximum(begins)
