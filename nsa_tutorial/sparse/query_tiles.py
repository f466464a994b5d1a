"""Attention under a mask, one tile of queries at a time: what the reference operators of
compression, selection and window share.

Each of the three branches shows a query some of the keys; they differ in the mask alone. A tile of
queries meets a slice of keys that holds all it may see, the mask hides the rest, and an ordinary
softmax follows, so that the scores of one tile are all that exists at a time. It is differentiable,
exact, and on a CPU the fastest way to compute any of them at a few thousand tokens.

It saves no arithmetic: a selected branch costs as much as a dense one here. Not touching what is
hidden is the kernels' business, and `selected_attention.forward` shows how they do it.

Symbols: `T` queries of a tile · `J` keys of its slice · `G` query heads of each of the `H`
key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.sparse.selected_attention import QueryRows

TILE = 128  # queries
Mask = Callable[[slice, slice], Tensor]


def tiles(N: int, size: int = TILE) -> list[slice]:
    """Cut `N` queries into slices of `size`, the last one shorter."""
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def run_of_keys(first: Tensor, end: Tensor) -> Mask:
    """The mask under which query `n` sees the keys `first[n] … end[n] - 1`: called with slices of
    queries and keys, `[T, J]`."""

    def is_seen(queries: slice, keys: slice) -> Tensor:
        key = torch.arange(keys.start, keys.stop, device=first.device)  # [J]
        return (key >= first[queries, None]) & (key < end[queries, None])

    return is_seen


def at_least_one(x: Tensor) -> Tensor:
    """`x [B, M, H, D]`, or one position of zeros where `M` is 0, for a mask to hide: a maximum over
    nothing is an error."""
    return x if x.shape[1] else F.pad(x, (0, 0, 0, 0, 0, 1))


def masked_scores(q: Tensor, k: Tensor, is_seen: Tensor) -> Tensor:
    """The scores of a tile, unscaled, `-inf` where hidden.

    Args:
        q: `[B, T, HQ, D]`.
        k: `[B, J, H, D]`.
        is_seen: bool, broadcastable to `[B, H, T, J]`.

    Returns:
        `[B, H, G, T, J]`, fp32 (fp64 for fp64 inputs).
    """
    (B, T, HQ, D), (J, H) = q.shape, k.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_tile = q.to(dtype).reshape(B, T, H, HQ // H, D).permute(0, 2, 3, 1, 4)  # [B, H, G, T, D]
    k_tile = k.to(dtype).transpose(1, 2)  # [B, H, J, D]
    acc_s = _Scores.apply(q_tile.reshape(B, H, -1, D), k_tile).view(B, H, HQ // H, T, J)
    return acc_s.masked_fill_(~is_seen.expand(B, H, T, J)[:, :, None], -math.inf)


class _Scores(torch.autograd.Function):
    """`q [..., T, D] @ k [..., J, D]ᵀ`, in whose backward the gradient of a hidden score, 0, hides
    NaN and infinity too."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        """`[..., T, J]`."""
        ctx.save_for_backward(q, k)
        return q @ k.transpose(-1, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_s: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `q` and `k`."""
        q, k = ctx.saved_tensors
        return d_s @ _finite(k), d_s.transpose(-1, -2) @ _finite(q)


class _WeightedSum(torch.autograd.Function):
    """`p [..., T, J] @ v [..., J, DV]`, in which a weight of 0 hides NaN and infinity too, in the
    backward as well."""

    @staticmethod
    def forward(ctx, p: Tensor, v: Tensor) -> Tensor:
        """`[..., T, DV]`; what is not finite in `v` counts as 0."""
        ctx.save_for_backward(p, v)
        return p @ _finite(v)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `p` and `v`."""
        p, v = ctx.saved_tensors
        return d_o @ _finite(v).transpose(-1, -2), p.transpose(-1, -2) @ _finite(d_o)


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 in place of NaN and infinity, for products in which 0 times anything is to be
    0."""
    return x.masked_fill(~x.isfinite(), 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Iterable[tuple[slice, slice]],
    mask: Mask,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention under a mask.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, DV]`.
        spans: per tile the slice of queries, and the slice of keys outside of which the tile sees
            nothing, never empty. In order, every query once.
        mask: which of these keys the queries see, `[T, J]` or `[B, H, T, J]`.
        scale: factor on the scores, as in `softmax(scale * q @ k)`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]`: natural logarithm, fp32 (fp64
            for fp64 inputs). A query that
        sees no key gets output 0 and `lse = -inf`. What is not finite spoils the rows that see it,
            and no others: a query or a
        key as IEEE arithmetic has it, a value by NaN in its own channel of `o`.
    """
    B, HQ, DV = q.shape[0], q.shape[2], v.shape[3]
    tiles_o, tiles_lse = [], []
    for queries, keys in spans:
        # -- scores and mask --
        is_seen = mask(queries, keys)  # [T, J] or [B, H, T, J]
        acc_s = masked_scores(q[:, queries], k[:, keys], is_seen)  # [B, H, G, T, J]

        # -- softmax --
        scores_max = acc_s.detach().amax(-1)  # [B, H, G, T]
        # -inf - -inf would be NaN where nothing is seen, and -inf - NaN where something hidden
        # meets a row that is spoiled
        shift = scores_max.masked_fill((scores_max == -math.inf) | scores_max.isnan(), 0)
        acc_s = (acc_s - shift[..., None]).mul_(scale * LOG2_E).exp2_()
        running_sum = acc_s.sum(-1)  # [B, H, G, T]

        # -- weighted sum --
        v_tile = v[:, keys].to(acc_s.dtype).transpose(1, 2)  # [B, H, J, DV]
        # [B, H, G, T, DV]
        acc_o = _WeightedSum.apply(acc_s.flatten(2, 3), v_tile).view(*running_sum.shape, DV)
        # [B, H, T, DV], how many
        sees_bad = is_seen.to(acc_s.dtype) @ (~v_tile.isfinite()).to(acc_s.dtype)
        acc_o = acc_o.masked_fill((sees_bad > 0)[:, :, None], math.nan)

        # -- normalise and store --
        is_empty = ~is_seen.expand(B, k.shape[2], -1, -1).any(-1)[:, :, None]  # [B, H, 1, T]
        safe_sum = running_sum.masked_fill(is_empty, 1)
        o, lse = acc_o / safe_sum[..., None], scores_max * scale + torch.log(safe_sum)
        # [B, T, HQ, DV]
        tiles_o.append(o.permute(0, 3, 1, 2, 4).reshape(B, -1, HQ, DV).to(v.dtype))
        tiles_lse.append(lse.permute(0, 3, 1, 2).reshape(B, -1, HQ))  # [B, T, HQ]
    return torch.cat(tiles_o, 1), torch.cat(tiles_lse, 1)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`selected_attention.forward` with a dense mask: the same arguments, and the same result for
    lists of distinct, causal ids.

    It gathers nothing, and on a CPU that is what takes the time. Its own work grows with the square
    of the length.
    """
    (B, N), M = q.shape[:2], k.shape[1]
    H, num_blocks = ids.shape[1], -(-M // block_size)
    # one column more, for the ids that name no block
    slot = torch.where((ids >= 0) & (ids < num_blocks), ids, num_blocks).long().view(B, N, H, -1)
    is_chosen = torch.zeros(B, N, H, num_blocks + 1, dtype=torch.bool, device=q.device).scatter_(
        -1, slot, True
    )
    # those of the first sequence of the batch serve all
    first, num_visible = rows.first_key[:N], rows.num_visible[:N]
    causal = run_of_keys(first, first + num_visible)

    def mask(queries: slice, keys: slice) -> Tensor:
        key = torch.arange(keys.start, keys.stop, device=q.device)
        # [T, J], of the query's sequence
        block = (key - first[queries, None]).clamp(min=0).div(block_size, rounding_mode="floor")
        block = block[None, :, None].expand(B, -1, H, -1).long()
        # [B, H, T, J]
        return (is_chosen[:, queries].gather(-1, block).transpose(1, 2)) & causal(queries, keys)

    return attend(q, k, v, [(t, slice(0, t.stop + M - N)) for t in tiles(N)], mask, scale=scale)
