"""The backward of attention under a mask, one tile of queries at a time: what the reference
operators of compression, window and masked selection share, as they share `query_tiles.attend`.

The five lines are those of `gradients`, which explains them. Here one walk gives all three
gradients: a loop in Python has no other program beside it that adds to the same `d_k`.

Symbols: `T` queries of a tile · `J` keys of its slice · `G` query heads of each of the `H`
key/value heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_tutorial.sparse import compression, query_tiles, sliding_window
from nsa_tutorial.sparse.query_tiles import View, finite
from nsa_tutorial.sparse.selected_attention import QueryRows

Gradients = tuple[Tensor, Tensor, Tensor]


def preprocess(d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What both passes need about a row besides its query: `lse` and `delta`, `[B, N, HQ]` in fp32
    at least.

    `delta = sum(d_o * o) - d_lse` stands in for a sum over the row's keys: `sum(p * d_p) =
    sum(p * (d_o @ vᵀ)) = sum(d_o * o)`. A gradient of `lse` adds `p * d_lse` to `d_s`.

    `lse` comes back as `inf` for a row that no loss asks for, and as NaN for one that is spoiled:
    the weights of the one are 0, whatever it holds, and those of the other NaN.
    """
    dtype = torch.promote_types(o.dtype, torch.float32)
    d_o, d_lse, o, lse = (x.to(dtype) for x in (d_o, d_lse, o, lse))
    delta = (d_o * o).sum(-1) - d_lse
    needs_grad = (d_o != 0).any(-1) | (d_lse != 0)
    is_spoiled = ~(lse.isfinite() & d_o.isfinite().all(-1))
    return lse.masked_fill(is_spoiled, math.nan).masked_fill(~needs_grad, math.inf), delta


def of_tiles(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    view: View, *, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `query_tiles.attend`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, view, scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k` and `v`, in their dtypes.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    G, dtype = HQ // H, torch.promote_types(q.dtype, torch.float32)
    d_q = torch.empty(B, N, HQ, D, dtype=q.dtype, device=q.device)
    d_k, d_v = (torch.zeros(B, H, M, width, dtype=dtype, device=q.device) for width in (D, DV))
    lse, delta = preprocess(d_o, d_lse, o, lse)

    def heads_first(x: Tensor) -> Tensor:  # [B, T, HQ, …] to [B, H, G * T, …]
        return x.to(dtype).unflatten(2, (H, G)).movedim(1, 3).flatten(2, 3)

    for queries, keys in view.spans:
        # -- load --
        q_tile, do_tile = heads_first(q[:, queries]), heads_first(d_o[:, queries])
        lse_tile, delta_tile = (heads_first(x[:, queries])[..., None] for x in (lse, delta))
        k_tile, v_tile = (x[:, keys].to(dtype).transpose(1, 2) for x in (k, v))  # [B, H, J, …]

        # -- weights --
        is_seen = view.mask(queries, keys).expand(B, H, -1, -1)  # [B, H, T, J]
        acc_s = query_tiles.masked_scores(q[:, queries], k[:, keys], is_seen).flatten(2, 3) * scale
        is_hidden = ~is_seen.repeat(1, 1, G, 1) | (lse_tile == math.inf)  # [B, H, G * T, J]
        p = torch.exp(acc_s - lse_tile).masked_fill_(is_hidden, 0)

        # -- gradients --
        d_v[:, :, keys] += p.transpose(-1, -2) @ finite(do_tile)
        d_p = do_tile @ v_tile.transpose(-1, -2)
        d_s = (p * (d_p - delta_tile)).masked_fill_(is_hidden, 0)
        d_k[:, :, keys] += d_s.transpose(-1, -2) @ finite(q_tile) * scale
        dq_tile = (d_s @ finite(k_tile) * scale).unflatten(2, (G, -1))  # [B, H, G, T, D]
        d_q[:, queries] = dq_tile.movedim(3, 1).flatten(2, 3).to(q.dtype)
    d_k, d_v = (x.transpose(1, 2).contiguous() for x in (d_k, d_v))
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def masked_selected_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `query_tiles.selected_attention`: as
    `gradients.selected_backward`, with a mask."""
    N, M = q.shape[1], k.shape[1]
    view = query_tiles.view_of_lists(ids, rows, N=N, M=M, block_size=block_size)
    return of_tiles(d_o, d_lse, q, k, v, o, lse, view, scale=scale)


def window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `sliding_window.forward`."""
    N, M = q.shape[1], k.shape[1]
    view = sliding_window.view_of_windows(rows, N=N, M=M, window_size=window_size)
    return of_tiles(d_o, d_lse, q, k, v, o, lse, view, scale=scale)


def compressed_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `compression.compressed_attention`."""
    M_c = k_cmp.shape[1]
    if M_c == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    view = compression.view_of_summaries(rows, N=q.shape[1], M_c=M_c)
    return of_tiles(d_o, d_lse, q, k_cmp, v_cmp, o, lse, view, scale=scale)
