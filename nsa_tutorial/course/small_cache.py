"""A cache that a reader can see through: one key/value head, a row for each text, plain tensors.

Chapter 15 builds `decode_step` on it. The library's own is `serving.cache.Cache`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SmallCache:
    """What a layer remembers of `B` texts. Axis 2 holds keys and values, in this order.

    Attributes:
        tokens: all tokens, for the lists: `[B, room, 2, D]`; token `t` lies in place `t`.
        summaries: `[B, room // stride, 2, D]`.
        window: a ring, `[B, ring, 2, D]`: token `t` lies in place `t % ring`.
        pending: a ring of tokens for the summaries to come, `[B, ring, 2, D]`.
        lengths: `[B]`, tokens of each text.
        block_size, top_n, window_size, length, stride: as in chapters 05 to 08.
    """

    tokens: Tensor
    summaries: Tensor
    window: Tensor
    pending: Tensor
    lengths: Tensor
    block_size: int
    top_n: int
    window_size: int
    length: int
    stride: int


def new_cache(
    B: int, room: int, D: int, *, block_size: int, top_n: int, window_size: int, length: int,
    stride: int, max_back: int = 3,
) -> SmallCache:  # fmt: skip
    """An empty cache in fp64. Places without a token hold NaN, so that whoever reads one sees it.

    Args:
        B, room, D: texts, tokens that each may have, and the width of a key.
        block_size, top_n, window_size, length, stride: as in chapters 05 to 08.
        max_back: how many tokens may be taken back; the rings are so much longer.
    """

    def places(number: int) -> Tensor:
        return torch.full((B, number, 2, D), torch.nan, dtype=torch.float64)

    buffers = (room, room // stride, window_size + max_back, length + max_back)
    sizes = (block_size, top_n, window_size, length, stride)
    return SmallCache(*map(places, buffers), torch.zeros(B, dtype=torch.int64), *sizes)


def attend(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one token's `q [HQ, D]` to `kv [n, 2, D]`: `o [HQ, D]`, and the weights `[HQ,
    n]`. Without keys, `o` is 0."""
    p = torch.softmax(q @ kv[:, 0].T * q.shape[-1] ** -0.5, -1)
    return p @ kv[:, 1], p


def block_scores(mass: Tensor, blocks: int, cache: SmallCache) -> Tensor:
    """The weight `mass [n]` of the summaries, handed to the first `blocks` blocks: each summary
    gives to a block by the tokens that they share, as in chapter 07."""
    start = torch.arange(len(mass)) * cache.stride
    block = torch.arange(blocks)[:, None] * cache.block_size
    last = torch.minimum(start + cache.length, block + cache.block_size)
    shared = (last - torch.maximum(start, block)).clamp(min=0)  # [blocks, n] tokens
    return shared.to(mass) / cache.stride @ mass


def listed_blocks(cache: SmallCache, q: Tensor, row: int = 0) -> list[int]:
    """The blocks that the newest token of a row reads, its `q [HQ, D]` given: the first one, the
    two latest, and those of the highest score."""
    t = int(cache.lengths[row]) - 1
    seen, own = max(0, (t + 1 - cache.length) // cache.stride + 1), t // cache.block_size
    _, p = attend(q, cache.summaries[row, :seen])
    score = block_scores(p.sum(0), own + 1, cache)
    score[[0, max(own - 1, 0), own]] = torch.inf
    return sorted(score.topk(min(cache.top_n, own + 1)).indices.tolist())


def keys_read(cache: SmallCache, listed: list[int], row: int = 0) -> int:
    """How many summaries and tokens of all three branches that newest token reads."""
    tokens = int(cache.lengths[row])
    seen = max(0, (tokens - cache.length) // cache.stride + 1)
    in_lists = sum(min(cache.block_size, tokens - i * cache.block_size) for i in listed)
    return seen + in_lists + min(cache.window_size, tokens)
