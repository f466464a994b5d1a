"""Chapter 07: cheap scores decide where to spend (NSA, arXiv 2502.11089, section 3.3.2).

The attention that a query pays to the summaries says which stretches of the sequence matter to it.
`importance` turns that attention into scores of blocks (Eq. 9, 10), and `choose` takes the best of
them, always including the first block and the latest ones (Eq. 11, 12). `select_blocks` does both,
a tile of queries at a time.

It does not validate (`ops` does) and does not attend to what it chose. Nothing here has a gradient:
a choice is a number of a block, and the scores behind it learn through the compression branch.

Symbols: `NB` blocks · `M_c` summaries · `T` queries of a tile · `K` summaries that share tokens
with one block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.selected_attention import QueryRows

POOLS = ("sum", "max")  # how a block is worth what its summaries are


class Overlap(NamedTuple):
    """Which summaries lie in which block: summary `first[b] + i` counts `weights[b, i]` times for
    block `b`.

    Attributes:
        first: `[NB]` int64; negative where a block's first summaries would begin before the
            sequence and do not exist.
        weights: `[NB, K]` fp32, in pieces of `stride` tokens.
    """

    first: Tensor
    weights: Tensor


def overlap_weights(
    length: int,
    stride: int,
    block_size: int,
    num_blocks: int,
    device: torch.device | str | None = None,
) -> Overlap:
    """From summaries to blocks: the tokens that they have in common, in pieces of `stride` tokens
    (Eq. 9).

    Where `stride` divides `length` and `block_size`, as the paper demands, these are whole pieces,
    and the double sum of Eq. 9 counts the same ones. Where it does not, pieces are fractions: the
    number of shared tokens over `stride`.

    >>> overlap_weights(32, 16, 64, 2)
    Overlap(first=tensor([-1,  3]), weights=tensor([[1., 2., 2., 2., 1.],
            [1., 2., 2., 2., 1.]]))
    """
    block_start = torch.arange(num_blocks) * block_size  # [NB]
    first = (
        block_start - length
    ) // stride + 1  # the first window that ends after the block's first token
    # window starts in block_size + length - 1 consecutive tokens, at most
    most = -(-(block_size + length - 1) // stride)
    start = (first[:, None] + torch.arange(most)) * stride  # [NB, most], where each window starts
    block_start = block_start[:, None]
    tokens = (
        torch.minimum(start + length, block_start + block_size) - torch.maximum(start, block_start)
    ).clamp(min=0)
    # the windows that share tokens with a block are consecutive, from the first one on
    K = int((tokens > 0).sum(1).max())
    return Overlap(first.to(device), (tokens[:, :K] / stride).to(device))


@torch.no_grad()
def importance(
    q: Tensor,
    k_cmp: Tensor,
    rows: QueryRows,
    lse: Tensor | None = None,
    *,
    overlap: Overlap,
    scale: float,
    pool: str = "sum",
) -> Tensor:
    """How much attention each block gets through its summaries (Eq. 8, 9), summed over a group's
    query heads (Eq. 10).

    Args:
        q: `[B, T, HQ, D]`; all scores exist at once, so callers pass one tile of queries at a time.
        k_cmp: summary keys `[B, M_c, H, D]`.
        rows: from `summary_rows`, of these queries.
        lse: `[B, T, HQ]` from `compressed_attention`, which spares the softmax its sum; None
            computes it.
        overlap: from `overlap_weights`.
        scale: factor on the scores.
        pool: `"sum"` adds up what a block's summaries get, as Eq. 9 does; `"max"` takes the most
            that one of them gets. Where summaries are the tokens themselves (`length` and `stride`
            of 1), that is the block's best token, by which MSA (arXiv 2606.13392) ranks blocks.

    Returns:
        `[B, T, H, NB]`, fp32 (fp64 for fp64 inputs). A block's summands are added in the same order
        for every block, so that equal attention gives equal importance to the last bit.
    """
    (B, T, HQ, _), H = q.shape, k_cmp.shape[2]
    k_cmp = query_tiles.at_least_one(k_cmp)
    first, num_visible = rows.first_key[:T].long(), rows.num_visible[:T].long()
    # [T, M_c]
    is_seen = query_tiles.run_of_keys(first, first + num_visible)(
        slice(0, T), slice(0, k_cmp.shape[1])
    )

    # -- attention to the summaries --
    acc_s = query_tiles.masked_scores(q, k_cmp, is_seen) * scale  # [B, H, G, T, M_c]
    # [B, H, G, T]
    lse = acc_s.logsumexp(-1) if lse is None else lse.reshape(B, T, H, HQ // H).permute(0, 2, 3, 1)
    mass = torch.exp(acc_s - lse[..., None]).masked_fill(~is_seen, 0).sum(2)  # [B, H, T, M_c]

    return from_summaries_to_blocks(mass, first, num_visible, overlap, pool)


def from_summaries_to_blocks(
    mass: Tensor, first: Tensor, num_visible: Tensor, overlap: Overlap, pool: str = "sum"
) -> Tensor:
    """The importance of blocks, `[B, T, H, NB]`, from the attention `mass [B, H, T, M_c]` to the
    summaries, of which query `t` sees those from `first[t]` on, `num_visible[t]` in number. `pool`
    as for `importance`."""
    (B, H, T, _) = mass.shape
    total = mass.new_zeros(B, H, T, len(overlap.first))
    for i, weight in enumerate(overlap.weights.to(mass.dtype).unbind(1)):  # weight [NB]
        # [T, NB], counted from the sequence's first one
        summary = (overlap.first + i).expand(T, -1)
        exists = (summary >= 0) & (summary < num_visible[:, None])
        column = torch.where(exists, first[:, None] + summary, 0).expand(B, H, -1, -1)
        part = mass.gather(-1, column)
        if pool == "max":  # of those that share tokens with the block
            total = torch.fmax(total, part.masked_fill(~exists | (weight == 0), 0))
        else:
            total = total + part.masked_fill(~exists, 0) * weight
    return total.transpose(1, 2)


@torch.no_grad()
def choose(
    score: Tensor,
    own: Tensor,
    *,
    top_n: int,
    num_initial: int,
    num_local: int,
    block_counts: Tensor | None = None,
) -> Tensor:
    """The lists, from the blocks' scores (Eq. 11, 12): forced blocks first, then the best of the
    rest.

    Args:
        score: `[B, T, H, NB]`, what a block is worth to a query; NaN counts as 0.
        own: `[T]`, the block in which each query stands; later ones are its future.
        top_n, num_initial, num_local: as for `select_blocks`.
        block_counts: `[B, T, H]`, how many blocks a row takes of its first `top_n`; None is all.

    Returns:
        `[B, T, H, top_n]` int32: distinct causal ids, ascending, then -1. Of equal scores, those
        with the lower id.
    """
    num_blocks = score.shape[-1]
    # [NB], [T, 1, 1]
    block, own = torch.arange(num_blocks, device=score.device), own[:, None, None]

    # -- force and hide --
    # NaN sorts above everything, the forced blocks included
    score = score.masked_fill(score.isnan(), 0)
    score = score.masked_fill((block < num_initial) | (block > own - num_local), math.inf)
    score = score.masked_fill(block > own, -math.inf)  # [B, T, H, NB]

    # -- pick --
    # stable: ties stay in the order of their ids
    best, ids = score.sort(dim=-1, descending=True, stable=True)
    is_left_out = best[..., :top_n] == -math.inf
    if block_counts is not None:
        is_left_out |= (
            torch.arange(is_left_out.shape[-1], device=score.device) >= block_counts[..., None]
        )
    ids = ids[..., :top_n].masked_fill(is_left_out, num_blocks).sort(-1).values
    ids = ids.masked_fill(ids == num_blocks, -1).to(torch.int32)
    return F.pad(ids, (0, top_n - ids.shape[-1]), value=-1)


@torch.no_grad()
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float,
    block_counts: Tensor | None = None, pool: str = "sum",
) -> Tensor:  # fmt: skip
    """The ids of the blocks each query attends to, one choice for all query heads of a group (Eq.
    11, 12).

    Args:
        q, k_cmp, lse: as for `importance`, for all `N` queries.
        rows: from `query_rows`, causal.
        summaries: from `summary_rows`.
        M: key positions.
        top_n: slots of a list, at least `num_initial + num_local`.
        block_size, length, stride: in tokens.
        num_initial, num_local: how many of the first and of the latest causal blocks (the query's
            own included) are always taken.
        scale: factor on the scores.
        block_counts: `[B, N, H]`, how many of the first `top_n` each row takes; None is all.
        pool: as for `importance`.

    Returns:
        `[B, N, H, top_n]` int32: distinct causal ids, ascending, then -1. Of equally important
        blocks, those with the lower id.
    """
    num_blocks = -(-M // block_size)
    overlap = overlap_weights(length, stride, block_size, num_blocks, q.device)
    chosen = []
    for tile in query_tiles.tiles(q.shape[1]):
        # -- score --
        of_tile = QueryRows(*(x[: q.shape[1]][tile] for x in summaries[:3]))
        score = importance(
            q[:, tile],
            k_cmp,
            of_tile,
            None if lse is None else lse[:, tile],
            overlap=overlap,
            scale=scale,
            pool=pool,
        )

        # -- choose --
        own = rows.position[: q.shape[1]][tile] // block_size  # [T]
        counts = None if block_counts is None else block_counts[:, tile]
        chosen.append(
            choose(
                score,
                own,
                top_n=top_n,
                num_initial=num_initial,
                num_local=num_local,
                block_counts=counts,
            )
        )
    return torch.cat(chosen, 1)
