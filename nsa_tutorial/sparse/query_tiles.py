"""Attention under a mask, one tile of queries at a time: what the reference operators of
compression, selection and window share.

The three branches differ only in the mask that says which keys a query sees. A tile of queries
reads a slice with all the keys that it may see, the mask hides the rest, and an ordinary softmax
follows, so only one tile's scores exist at a time. It is exact, and on a CPU the fastest way to
compute any of them at a few thousand tokens. Its backward is `training.tile_gradients.of_tiles`.

It saves no arithmetic: a selected branch costs as much as a dense one here. Not touching what is
hidden is the kernels' business, and `selected_attention.forward` shows how they do it.

Symbols: `T` queries of a tile · `J` keys of its slice · `G` query heads of each of the `H`
key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.sparse import selected_attention as walk
from nsa_tutorial.sparse.selected_attention import QueryRows

TILE = 128  # queries
Mask = Callable[[slice, slice], Tensor]


class View(NamedTuple):
    """Which keys each query sees, a tile of queries at a time.

    Attributes:
        spans: per tile the slice of queries, and the slice of keys outside of which the tile sees
            nothing, never empty. In order, every query once.
        mask: which of these keys the queries see, `[T, J]` or `[B, H, T, J]`, from the two slices.
    """

    spans: list[tuple[slice, slice]]
    mask: Mask


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


def view_of_lists(ids: Tensor, rows: QueryRows, *, N: int, M: int, block_size: int) -> View:
    """What queries see of the blocks on their lists, `ids [B * N, H, S]` from `block_list`.

    Lists of distinct blocks and causal `rows`: a mask shows a block once, however often it is
    listed.
    """
    H, num_blocks = ids.shape[1], -(-M // block_size)
    # one column more, for the ids that name no block
    slot = torch.where((ids >= 0) & (ids < num_blocks), ids, num_blocks).long()
    slot = slot.view(-1, N, H, ids.shape[2])
    is_chosen = ids.new_zeros(len(slot), N, H, num_blocks + 1, dtype=torch.bool)
    is_chosen.scatter_(-1, slot, True)
    # those of the first sequence of the batch serve all
    first, num_visible = rows.first_key[:N], rows.num_visible[:N]
    causal = run_of_keys(first, first + num_visible)

    def mask(queries: slice, keys: slice) -> Tensor:
        key = torch.arange(keys.start, keys.stop, device=ids.device)
        token = (key - first[queries, None]).clamp(min=0)  # [T, J], of the query's sequence
        block = (token // block_size)[None, :, None].expand(len(slot), -1, H, -1).long()
        is_listed = is_chosen[:, queries].gather(-1, block).transpose(1, 2)  # [B, H, T, J]
        return is_listed & causal(queries, keys)

    return View([(t, slice(0, t.stop + M - N)) for t in tiles(N)], mask)


def at_least_one(x: Tensor) -> Tensor:
    """`x [B, M, H, D]`, or one position of zeros where `M` is 0, for a mask to hide: a maximum over
    nothing is an error."""
    return x if x.shape[1] else F.pad(x, (0, 0, 0, 0, 0, 1))


def finite(x: Tensor) -> Tensor:
    """`x` with 0 in place of NaN and infinity, for products in which 0 times anything is to be
    0."""
    return x.masked_fill(~x.isfinite(), 0)


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
    acc_s = q_tile.reshape(B, H, -1, D) @ k_tile.transpose(-1, -2)  # [B, H, G * T, J]
    is_hidden = ~is_seen.expand(B, H, T, J)[:, :, None]
    return acc_s.view(B, H, HQ // H, T, J).masked_fill_(is_hidden, -math.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention under a mask.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, DV]`.
        view: which keys each query sees.
        scale: factor on the scores, as in `softmax(scale * q @ k)`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]`: natural logarithm, fp32 (fp64
        for fp64 inputs). A query that sees no key gets output 0 and `lse = -inf`. What is not
        finite spoils the rows that see it, and no others: a query or a key as IEEE arithmetic has
        it, a value by NaN in its own channel of `o`.
    """
    B, HQ, DV = q.shape[0], q.shape[2], v.shape[3]
    tiles_o, tiles_lse = [], []
    for queries, keys in view.spans:
        # -- scores and mask --
        is_seen = view.mask(queries, keys)  # [T, J] or [B, H, T, J]
        acc_s = masked_scores(q[:, queries], k[:, keys], is_seen)  # [B, H, G, T, J]

        # -- softmax --
        scores_max = acc_s.amax(-1)  # [B, H, G, T]
        # -inf - -inf would be NaN where nothing is seen, and -inf - NaN where something hidden
        # meets a row that is spoiled
        shift = scores_max.masked_fill((scores_max == -math.inf) | scores_max.isnan(), 0)
        acc_s = (acc_s - shift[..., None]).mul_(scale * LOG2_E).exp2_()
        running_sum = acc_s.sum(-1)  # [B, H, G, T]

        # -- weighted sum --
        v_tile = v[:, keys].to(acc_s.dtype).transpose(1, 2)  # [B, H, J, DV]
        acc_o = (acc_s.flatten(2, 3) @ finite(v_tile)).view(*running_sum.shape, DV)
        # how many of the numbers that are not finite a query sees: [B, H, T, DV]
        sees_bad = is_seen.to(acc_s.dtype) @ (~v_tile.isfinite()).to(acc_s.dtype)
        acc_o = acc_o.masked_fill((sees_bad > 0)[:, :, None], math.nan)  # [B, H, G, T, DV]

        # -- normalise and store --
        is_empty = ~is_seen.expand(B, k.shape[2], -1, -1).any(-1)[:, :, None]  # [B, H, 1, T]
        safe_sum = running_sum.masked_fill(is_empty, 1)
        o, lse = acc_o / safe_sum[..., None], scores_max * scale + torch.log(safe_sum)
        tiles_o.append(o.movedim(3, 1).reshape(B, -1, HQ, DV).to(v.dtype))  # [B, T, HQ, DV]
        tiles_lse.append(lse.movedim(3, 1).reshape(B, -1, HQ))  # [B, T, HQ]
    return torch.cat(tiles_o, 1), torch.cat(tiles_lse, 1)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`selected_attention.forward` under a dense mask: the same arguments, and the same result for
    lists of distinct, causal ids.

    It gathers nothing, and on a CPU that is what takes the time. Its own work grows with the square
    of the length.
    """
    view = view_of_lists(ids, rows, N=q.shape[1], M=k.shape[1], block_size=block_size)
    return attend(q, k, v, view, scale=scale)


def selected_in_order(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, order: Order | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The reference of the operator: `selected_attention.forward`, or, in the order of
    `QUERY_TILES`, the same with a mask, for lists without factors."""
    run = selected_attention if order is Order.QUERY_TILES else walk.forward
    return run(q, k, v, ids, rows, **options)
