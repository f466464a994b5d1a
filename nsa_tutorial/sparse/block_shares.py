"""How much attention each chosen block gets through its summaries, with a gradient, so that the
choice of blocks can learn.

`block_selection.importance` scores every block, and the choice keeps a few. Their scores alone are
computed here again, now as a share: of all the attention that a query pays to its summaries, a
summary passes to a block the part of its tokens that lie there, and the heads of a group are
averaged. All blocks together have 1. A query meets `S * K` summaries, however long the sequence is,
and a chunk of queries at a time keeps the copies of their keys small.

Symbols: `R` query rows · `T` rows of a chunk · `G` query heads of a group · `S` slots · `K`
summaries that share tokens with one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.sparse.query_tiles import at_least_one
from nsa_tutorial.sparse.selected_attention import QueryRows

CHUNK = 2**22  # numbers of gathered keys at a time


class Tile(NamedTuple):
    """What a chunk of queries meets.

    Attributes:
        queries: a slice of the `R` rows.
        q: `[T, H, G, D]`, in fp32 at least.
        row: `[T, H, S, K]`, the row of each summary in `[B * M_c * H, D]`.
        exists: `[T, H, S, K]`, whether the query sees that summary.
        k: `[T, H, S, K, D]`, their keys, 0 where there is none.
        mass: `[T, H, G, S, K]`, the attention of each head to each summary.
        weight: `[T, H, S, K]`, the part of a summary that lies in the block, over `G`.
    """

    queries: slice
    q: Tensor
    row: Tensor
    exists: Tensor
    k: Tensor
    mass: Tensor
    weight: Tensor


def tiles(
    q: Tensor, k_cmp: Tensor, lse: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    length: int, stride: int, scale: float,
) -> Iterator[Tile]:  # fmt: skip
    """The chunks, one after another; arguments as in `forward`."""
    (B, N, HQ, D), (H, S) = q.shape, ids.shape[2:]
    R, G, dtype = B * N, HQ // H, torch.promote_types(q.dtype, torch.float32)
    q, ids, lse = q.reshape(R, H, G, D), ids.reshape(R, H, S).long(), lse.reshape(R, H, G)
    k_rows = at_least_one(k_cmp).reshape(-1, D)
    # ends of windows and blocks are multiples of their common divisor
    step = math.gcd(block_size, length, stride)
    K = -(-(block_size + length - step) // stride)
    head = torch.arange(H, device=q.device)[:, None, None]
    size = max(1, CHUNK // (H * S * K * D))
    for start in range(0, R, size):
        queries = slice(start, min(start + size, R))
        # -- which summaries share tokens with a block --
        block_start = ids[queries, :, :, None] * block_size  # [T, H, S, 1]
        summary = (block_start - length) // stride + 1 + torch.arange(K, device=q.device)
        window = summary * stride
        last = torch.minimum(window + length, block_start + block_size)
        tokens = (last - torch.maximum(window, block_start)).clamp(min=0)
        num_visible, first = (
            x[queries, None, None, None] for x in (rows.num_visible, rows.first_key)
        )
        exists = (block_start >= 0) & (summary >= 0) & (summary < num_visible) & (tokens > 0)
        row = torch.where(exists, (first + summary) * H + head, 0)

        # -- the attention that they got --
        q_tile = q[queries].to(dtype)
        k_tile = k_rows[row].to(dtype).masked_fill(~exists[..., None], 0)
        acc_s = torch.einsum("thgd,thskd->thgsk", q_tile, k_tile) * scale
        mass = torch.exp(acc_s - lse[queries, :, :, None, None])
        mass = mass.masked_fill(~exists[:, :, None], 0)
        yield Tile(queries, q_tile, row, exists, k_tile, mass, tokens.to(dtype) / (length * G))


def forward(
    q: Tensor, k_cmp: Tensor, lse: Tensor, ids: Tensor, rows: QueryRows, **sizes: float
) -> Tensor:
    """The share of each chosen block.

    Args:
        q: `[B, N, HQ, D]`.
        k_cmp: summary keys `[B, M_c, H, D]`.
        lse: `[B, N, HQ]` from `compressed_attention`.
        ids: `[B, N, H, S]` from `select_blocks`; -1 has the share 0.
        rows: from `summary_rows`.
        sizes: `block_size`, `length`, `stride`, `scale`.

    Returns:
        `[B, N, H, S]`, fp32 (fp64 for fp64 inputs).
    """
    shares = q.new_empty(
        ids.shape[0] * ids.shape[1], *ids.shape[2:], dtype=torch.promote_types(q.dtype, lse.dtype)
    )
    for tile in tiles(q, k_cmp, lse, ids, rows, **sizes):
        shares[tile.queries] = (tile.mass.sum(2) * tile.weight).sum(-1)
    return shares.view(ids.shape)


def backward(
    d_shares: Tensor, q: Tensor, k_cmp: Tensor, lse: Tensor, ids: Tensor, rows: QueryRows, *,
    scale: float, **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k_cmp` and `lse`; the rest as in `forward`."""
    (B, N, HQ, D), H, wide = q.shape, ids.shape[2], lse.dtype
    d_shares = d_shares.flatten(0, 1)
    d_q = q.new_empty(B * N, H, HQ // H, D, dtype=wide)
    d_k = at_least_one(k_cmp).new_zeros(max(k_cmp.numel(), H * D) // D, D, dtype=wide)
    d_lse = torch.empty_like(lse).view(B * N, H, HQ // H)
    for tile in tiles(q, k_cmp, lse, ids, rows, **sizes, scale=scale):
        d_mass = d_shares[tile.queries, :, :, None] * tile.weight  # [T, H, S, K]
        d_s = tile.mass * d_mass[:, :, None]
        d_q[tile.queries] = torch.einsum("thgsk,thskd->thgd", d_s, tile.k) * scale
        of_keys = torch.einsum("thgsk,thgd->thskd", d_s, tile.q) * scale
        of_keys = of_keys.masked_fill(~tile.exists[..., None], 0)  # 0 * NaN
        d_k.index_add_(0, tile.row.flatten(), of_keys.flatten(0, -2))
        d_lse[tile.queries] = -d_s.sum((3, 4))
    d_k = d_k[: k_cmp.numel() // D].view(k_cmp.shape)
    return d_q.view(q.shape).to(q.dtype), d_k.to(k_cmp.dtype), d_lse.view(lse.shape)
