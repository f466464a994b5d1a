"""Chapter 19: a small scorer of its own decides where to spend, and learns it from the attention.

NSA chooses blocks by its attention to summaries. What came after it scores every *token* with a few
narrow heads, the indexer, and takes the best blocks by their best token (MSA, arXiv 2606.13392), or
the best tokens themselves (DSA, arXiv 2512.02556). `token_scores` are the scores, `block_maxima`
pools them, and `index_blocks` makes the lists, in the form of `block_selection.select_blocks`.

A choice has no gradient. The indexer learns to score tokens as the attention of the main heads
weighs them: `kl_loss` is the distance of the two. `Indexer` is the module, whose input is detached,
so that nothing but this loss trains it, and this loss trains nothing else.

It does not validate (`ops` does) and does not attend to what it chose. `[N, M]` scores never stand
whole: everything goes a tile of queries at a time.

Symbols: `HI` heads of the indexer · `DI` their width · `H` lists of a query, one for each key/value
head or one for all · `T` queries of a tile · `NB` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nsa_tutorial.sparse import block_selection, query_tiles
from nsa_tutorial.sparse.native_sparse_attention import wide
from nsa_tutorial.sparse.query_tiles import View
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

LARGEST = 2.0**126  # scores beyond it count as it, and NaN as the least of all: numbers to compare


def token_scores(
    q_idx: Tensor, k_idx: Tensor, w: Tensor | None = None, *, kv_heads: int = 1,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """What the indexer thinks of every token, before any mask.

    With weights, `score[t, s] = Σ_j w[t, j] · relu(scale · q_idx[t, j] · k_idx[s])` over the heads
    of a list (DSA, Eq. 1); without, the sum of their scaled products (MSA: one head a list).

    Args:
        q_idx: `[B, T, HI, DI]`; all scores exist at once, so callers pass one tile of queries at a
            time.
        k_idx: `[B, M, DI]`, one key for all heads.
        w: `[B, T, HI]`, or None.
        kv_heads: `H`, lists of a query: each has the next `HI / H` heads.
        scale: factor on the products; None is `DI ** -0.5`.

    Returns:
        `[B, T, H, M]`, fp32 (fp64 for fp64 inputs), differentiable.
    """
    (B, T, HI, DI), dtype = q_idx.shape, wide(q_idx)
    q_idx = q_idx.to(dtype) * (DI**-0.5 if scale is None else scale)
    # [B, T, HI, M]
    acc_s = (q_idx.flatten(1, 2) @ k_idx.to(dtype).transpose(1, 2)).view(B, T, HI, -1)
    if w is not None:
        acc_s = acc_s.relu() * w.to(dtype)[..., None]
    return acc_s.view(B, T, kv_heads, HI // kv_heads, -1).sum(3)


def block_maxima(
    score: Tensor, first: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """The best score among a block's visible tokens (MSA, section 3.1).

    Args:
        score: `[B, T, H, M]`, of tokens.
        first, num_visible: `[T]`, query `t` sees the tokens from `first[t]` on, `num_visible[t]` in
            number, and blocks count from there.
        block_size, num_blocks: tokens of a block, blocks of the longest sequence.

    Returns:
        `[B, T, H, NB]`: within ±`LARGEST`, NaN being the least; `-inf` where no token of the block
        is visible.
    """
    score = score.nan_to_num(-LARGEST, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)
    offset = torch.arange(num_blocks * block_size, device=score.device)  # in the query's sequence
    is_seen = offset < num_visible[:, None]  # [T, NB * BS]
    column = torch.where(is_seen, first[:, None].long() + offset, 0)[None, :, None]
    of_offset = score.gather(-1, column.expand(*score.shape[:3], -1))
    of_offset = of_offset.masked_fill(~is_seen[:, None], -math.inf)
    return of_offset.unflatten(-1, (num_blocks, block_size)).amax(-1)


@torch.no_grad()
def index_blocks(
    q_idx: Tensor, k_idx: Tensor, w: Tensor | None, rows: QueryRows, *, kv_heads: int, top_n: int,
    block_size: int, num_initial: int, num_local: int,
) -> Tensor:  # fmt: skip
    """The blocks of each query, by the best score among their visible tokens; tokens, if a block is
    one.

    Args:
        q_idx, k_idx, w, kv_heads: as for `token_scores`, for all `N` queries. No scale: a positive
            factor changes nothing.
        rows: from `query_rows`, causal.
        top_n: slots of a list, at least `num_initial + num_local`.
        block_size: tokens of a block.
        num_initial, num_local: how many of the first and of the latest causal blocks (the query's
            own included) are always taken. MSA has 0 and 1, DSA 0 and 0.

    Returns:
        `[B, N, H, top_n]` int32: distinct causal ids, ascending, then -1. Of blocks with the same
        score, those with the lower id.
    """
    N, M = q_idx.shape[1], k_idx.shape[1]
    num_blocks, chosen = -(-M // block_size), []
    for tile in query_tiles.tiles(N):
        first, num_visible, position = (x[:N][tile] for x in rows[:3])
        score = token_scores(
            q_idx[:, tile], k_idx, None if w is None else w[:, tile], kv_heads=kv_heads, scale=1.0
        )
        blocks = {"block_size": block_size, "num_blocks": num_blocks}
        score = block_maxima(score, first, num_visible, **blocks)
        pick = {"top_n": top_n, "num_initial": num_initial, "num_local": num_local}
        chosen.append(block_selection.choose(score, position // block_size, **pick))
    return torch.cat(chosen, 1)


# -- how it learns --


def attention_target(
    q: Tensor, k: Tensor, is_seen: Tensor, *, kv_heads: int, scale: float
) -> Tensor:
    """What the main heads make of the tokens that are seen: their attention, summed over the heads
    of a list and divided by its sum (DSA, section 2.1). No gradient.

    Args:
        q, k: `[B, T, HQ, D]`, `[B, J, H_kv, D]`; `H_kv` is a multiple of `kv_heads`.
        is_seen: bool `[T, J]` or `[B, kv_heads, T, J]`.
        kv_heads: lists of a query, each with the next `HQ / kv_heads` heads.
        scale: factor on the scores.

    Returns:
        `[B, kv_heads, T, J]`: sums to 1, or is 0 where nothing is seen.
    """
    with torch.no_grad():
        (B, T), J = q.shape[:2], k.shape[1]
        is_seen = is_seen.expand(B, kv_heads, T, J)
        of_head = is_seen.repeat_interleave(k.shape[2] // kv_heads, 1)
        acc_s = query_tiles.masked_scores(q, k, of_head) * scale  # [B, H_kv, G, T, J]
        p = acc_s.softmax(-1).masked_fill(~of_head[:, :, None], 0)
        mass = p.reshape(B, kv_heads, -1, T, J).sum(2)
        return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def kl_loss(
    q: Tensor, k: Tensor, q_idx: Tensor, k_idx: Tensor, w: Tensor | None = None, *,
    kv_heads: int = 1, block_indices: Tensor | None = None, block_size: int = 1,
    scale: float | None = None, index_scale: float | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How far the indexer is from the attention that it is to foresee: the divergence `KL(target ‖
    softmax(score))` over the tokens that a query sees, its mean over queries and lists (DSA, Eq. 3
    and 4).

    Without `block_indices`, all causal tokens count: the warm-up, in which attention is still
    dense, and nothing but the indexer learns. With them, those of the listed blocks: the sparse
    stage, in which the rest of the model learns by its own loss.

    Args:
        q, k: queries and keys of the main heads, `[B, N, HQ, D]` and `[B, M, H_kv, D]`. They get no
            gradient.
        q_idx, k_idx, w, kv_heads: as for `token_scores`. `H_kv` is a multiple of `kv_heads`.
        block_indices: `[B, N, kv_heads, S]`, distinct ids or -1, as `index_blocks` makes them.
        block_size: tokens of a listed block.
        scale: factor on the scores of the main heads; None is `D ** -0.5`.
        index_scale: as `scale` of `token_scores`.
        cu_seqlens: packed sequences, as for `ops.selected_attention`.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), differentiable in `q_idx`, `k_idx` and `w`. A query
        that sees nothing adds 0.
    """
    (B, N), M = q.shape[:2], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.detach(), k.detach()
    view = _view(B, N, M, block_indices, block_size, cu_seqlens, q.device)

    def of_tile(
        queries: slice, keys: slice, q_idx: Tensor, k_idx: Tensor, w: Tensor | None
    ) -> Tensor:
        is_seen = view.mask(queries, keys)
        target = attention_target(
            q[:, queries], k[:, keys], is_seen, kv_heads=kv_heads, scale=scale
        )
        score = token_scores(q_idx, k_idx, w, kv_heads=kv_heads, scale=index_scale).transpose(1, 2)
        is_hidden = ~is_seen.expand(score.shape)
        is_empty = is_hidden.all(-1, keepdim=True)
        score = score.masked_fill(is_hidden, -math.inf).masked_fill(is_empty, 0)
        log_p = score.log_softmax(-1).masked_fill(is_hidden, 0)
        return (torch.xlogy(target, target) - target * log_p).sum()

    return _SumOfTiles.apply(of_tile, view.spans, q_idx, k_idx, w) / max(1, B * N * kv_heads)


class _SumOfTiles(torch.autograd.Function):
    """The sum of a loss over tiles of queries. Its gradients are computed with it, tile by tile, so
    that no tile's scores are kept, and none are computed twice."""

    @staticmethod
    def forward(
        ctx, of_tile: Callable[..., Tensor], spans: list[tuple[slice, slice]], q_idx: Tensor,
        k_idx: Tensor, w: Tensor | None,
    ) -> Tensor:  # fmt: skip
        given, needs, dtype = (q_idx, k_idx, w), ctx.needs_input_grad[2:], wide(q_idx)
        sums = [
            torch.zeros_like(x, dtype=dtype) if need else None
            for x, need in zip(given, needs, strict=True)
        ]
        total = q_idx.new_zeros((), dtype=dtype)
        for queries, keys in spans:
            places = (queries, keys, queries)
            leaves = [
                None if x is None else x[:, place].detach().requires_grad_(need)
                for x, place, need in zip(given, places, needs, strict=True)
            ]
            with torch.set_grad_enabled(any(needs)):
                part = of_tile(queries, keys, *leaves)
            total += part.detach()
            if any(needs):
                wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
                found = iter(torch.autograd.grad(part, wanted))
                for gradient, place in zip(sums, places, strict=True):
                    if gradient is not None:
                        gradient[:, place] += next(found)
        # None where there is nothing to keep
        ctx.save_for_backward(*(
            None if gradient is None else gradient.to(x.dtype)
            for x, gradient in zip(given, sums, strict=True)
        ))  # fmt: skip
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(
            None if x is None else x * d_total.to(x.dtype) for x in ctx.saved_tensors
        )  # fmt: skip


def _view(
    B: int, N: int, M: int, block_indices: Tensor | None, block_size: int,
    cu_seqlens: Tensor | None, device: torch.device,
) -> View:  # fmt: skip
    """Which tokens count for each query: those of its blocks, or all causal ones."""
    rows = query_rows(B, N, M, causal=True, cu_seqlens=cu_seqlens, device=device)
    if block_indices is not None:
        ids = block_list(
            block_indices, rows, block_size=block_size, block_counts=None, include_own_block=False
        )
        return query_tiles.view_of_lists(ids, rows, N=N, M=M, block_size=block_size)
    first, end = rows.first_key[:N], rows.first_key[:N] + rows.num_visible[:N]
    spans = [(t, slice(0, t.stop + M - N)) for t in query_tiles.tiles(N)]
    return View(spans, query_tiles.run_of_keys(first, end))


class Indexed(NamedTuple):
    """What an `Indexer` makes of a text, in the order in which the functions take it: `q_idx [B, N,
    HI, DI]`, `k_idx [B, N, DI]` and `w [B, N, HI]`, or None."""

    q_idx: Tensor
    k_idx: Tensor
    w: Tensor | None


class Indexer(nn.Module):
    """The scorer: queries, one key a token, and weights, from the same activations as the attention
    that it serves.

    Its input is detached: `kl_loss` trains the indexer alone. Keys are normalised, as DSA's are; of
    positions it knows what `x` carries.

    Args:
        width: of the activations.
        heads: `HI`.
        head_width: `DI`.
        weighted: with weights, of both signs, and a relu (DSA), or plain products (MSA).
    """

    def __init__(self, width: int, heads: int, head_width: int, *, weighted: bool = True) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, head_width, bias=False)
        self.norm = nn.LayerNorm(head_width)
        self.w = nn.Linear(width, heads, bias=False) if weighted else None

    def forward(self, x: Tensor) -> Indexed:
        """`x [B, N, width]` to `q_idx`, `k_idx` and `w`, which begins at `heads ** -0.5` times what
        the linear map gives."""
        x = x.detach()
        q_idx = self.q(x).unflatten(-1, (self.heads, self.head_width))
        w = None if self.w is None else self.w(x) * self.heads**-0.5
        return Indexed(q_idx, self.norm(self.k(x)), w)
