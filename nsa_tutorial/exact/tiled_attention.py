"""Chapter 04: attention tile by tile, so that the N × M table of scores is never written
(FlashAttention, in PyTorch).

A tile of queries stays on the chip while tiles of keys and values pass by; the online softmax of
chapter 03 joins what they give. This file holds the walk over the tiles (`tiles`) and the
computation along it (`attention`), phase by phase and name by name as the kernels write it, for all
batch entries and heads at once.

It does not place anything in a GPU's memories (PyTorch does; chapters 09 to 11 write that down),
counts no bytes (`costs` does), and its gradients are autograd's, which keeps every tile of scores
(chapter 12 recomputes them instead).

Symbols: `B` batch, `N` queries, `M` keys, `HQ` query heads, `H` key/value heads, `G = HQ // H`
group size, `D` key width, `DV` value width, `BQ` and `BK` queries and keys in a tile; a tile at the
end may hold fewer. Sources: FlashAttention, Dao et al. 2022, arXiv 2205.14135; queries in the outer
loop as in FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.exact.grouped_query_attention import check_shapes, group_size
from nsa_tutorial.exact.online_softmax import LOG2_E


class Tile(NamedTuple):
    """One stop of the walk: some queries against some keys.

    Attributes:
        query_start, query_end: the tile's queries, as a slice of the `N`.
        key_start, key_end: the tile's keys, as a slice of the `M`.
        kind: `"full"` if every query sees every key, `"skipped"` if none sees any, `"diagonal"` if
            some see some.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    kind: Literal["full", "diagonal", "skipped"]


def tiles(N: int, M: int, tile_q: int, tile_k: int, causal: bool = True) -> Iterator[Tile]:
    """The walk: for each tile of queries, all tiles of keys from the first on.

    The queries are the last `N` of the `M` positions. Tiles start at multiples of their size and
    end with the sequence.

    Raises:
        ValueError: if a tile would be empty, or if causal queries outnumber the positions.
    """
    if tile_q < 1 or tile_k < 1:
        raise ValueError(
            f"tile_q, tile_k: expected at least 1 query and 1 key per tile, got {tile_q} and "
            f"{tile_k}"
        )
    if causal and N > M:
        raise ValueError(f"N: the queries are the last N of the M = {M} positions, got N = {N}")
    for query_start in range(0, N, tile_q):
        query_end = min(query_start + tile_q, N)
        # so many keys, from key 0 on; the other queries see more
        seen_by_first = M - N + query_start + 1 if causal else M
        seen_by_last = M - N + query_end if causal else M
        for key_start in range(0, M, tile_k):
            key_end = min(key_start + tile_k, M)
            kind = (
                "skipped"
                if key_start >= seen_by_last
                else "full"
                if key_end <= seen_by_first
                else "diagonal"
            )
            yield Tile(query_start, query_end, key_start, key_end, kind)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, tile_q: int = 64, tile_k: int = 64,
    scale: float | None = None, causal: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Grouped-query attention that holds one tile of scores at a time.

    Args:
        q: queries `[B, N, HQ, D]`; they are the last `N` of the `M` positions.
        k: keys `[B, M, H, D]`; `H` divides `HQ`, `M` is at least 1.
        v: values `[B, M, H, DV]`; `DV` may differ from `D`.
        tile_q, tile_k: positions of queries and of keys in a tile. A tile has `G` rows for each of
            its query positions.
        scale: factor on every dot product, positive; `D ** -0.5` by default.
        causal: hide the keys after each query's own position; tiles of hidden keys only are not
            loaded.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        `o` `[B, N, HQ, DV]` in the dtype of `v`, computed in fp32 (fp64 inputs stay fp64). With
        `return_lse` also `lse` `[B, N, HQ]`, fp32 (or fp64), the natural logarithm of the sum of
        `exp(score)` over the visible keys.

    Raises:
        ValueError: naming the argument, when shapes or tiles do not fit.
    """
    check_shapes(q, k, v, causal)
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    if M == 0:
        raise ValueError(f"k: expected at least one key, got shape {list(k.shape)}")
    G = group_size(HQ, H)
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    scale = D**-0.5 if scale is None else scale
    scale_log2 = scale * LOG2_E
    qg = q.unflatten(2, (H, G))  # [B, N, H, G, D]
    o, lse = v.new_empty(B, N, HQ, DV), q.new_empty(B, N, HQ, dtype=dtype)

    for query_start, walk in groupby(
        tiles(N, M, tile_q, tile_k, causal), key=attrgetter("query_start")
    ):
        # -- load the query tile --
        queries = slice(query_start, query_start + tile_q)
        q_tile = qg[:, queries].to(dtype).permute(0, 2, 3, 1, 4)  # [B, H, G, BQ, D]
        position = torch.arange(M - N, M, device=q.device)[queries]  # [BQ]

        # -- initialise --
        acc_o = q_tile.new_zeros(*q_tile.shape[:-1], DV)  # [B, H, G, BQ, DV]
        running_sum = q_tile.new_zeros(q_tile.shape[:-1])  # [B, H, G, BQ]
        scores_max = torch.full_like(running_sum, -math.inf)  # [B, H, G, BQ]

        for tile in walk:
            # -- skip --
            if tile.kind == "skipped":
                break  # and so are all that follow: they hold later keys

            # -- load the keys --
            keys = slice(tile.key_start, tile.key_end)
            # [B, H, 1, BK, D], one for the G heads of a group
            k_tile = k[:, keys].to(dtype).transpose(1, 2)[:, :, None]

            # -- scores --
            acc_s = q_tile @ k_tile.transpose(-1, -2)  # [B, H, G, BQ, BK]

            # -- mask --
            if tile.kind == "diagonal":
                key_position = torch.arange(tile.key_start, tile.key_end, device=q.device)  # [BK]
                acc_s = acc_s.masked_fill(key_position > position[:, None], -math.inf)

            # -- online softmax --
            scores_max_prev = scores_max
            scores_max = torch.maximum(scores_max_prev, acc_s.detach().amax(-1))
            shift = scores_max  # finite: every query sees key 0, which is in the first tile
            scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)
            acc_s = torch.exp2((acc_s - shift[..., None]) * scale_log2)
            scores_sum = acc_s.sum(-1)
            running_sum = running_sum * scores_scale + scores_sum
            acc_o = acc_o * scores_scale[..., None]

            # -- load the values --
            v_tile = v[:, keys].to(dtype).transpose(1, 2)[:, :, None]  # [B, H, 1, BK, DV]

            # -- accumulate --
            acc_o = acc_o + acc_s @ v_tile  # [B, H, G, BQ, DV]

        # -- normalise and store --
        # [B, H, G, BQ, DV]; running_sum is at least 1, the largest score's own term
        o_tile = acc_o / running_sum[..., None]
        o[:, queries] = o_tile.flatten(1, 2).transpose(1, 2).to(v.dtype)  # [B, BQ, HQ, DV]
        lse_tile = scores_max * scale + torch.log(running_sum)  # [B, H, G, BQ]
        lse[:, queries] = lse_tile.flatten(1, 2).transpose(1, 2)  # [B, BQ, HQ]

    return (o, lse) if return_lse else o
