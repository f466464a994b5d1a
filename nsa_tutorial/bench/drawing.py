"""The lists of blocks that the benchmark selects by, and how much neighbours' lists have in common.

A kernel that loads a block once for several neighbouring queries gains as much as their lists
overlap. So one kind of list is not enough. Here are three, drawn by one rule: every block has an
importance that drifts from query to query, and a list names the most important ones.

    random    each query draws its own importance: neighbours share the forced blocks alone
    smooth    the importance drifts over 256 queries: neighbours nearly agree
    trained   between the two, as in trained heads: a slow drift, a faster one and a little noise

The stored heads of the course (`assets/heads.npz`) are too short for real lists: 512 tokens are 8
blocks of 64. So `trained` is tuned to them instead of being made of them. Four neighbours among the
stored heads list 1.16 to 1.43 times as many blocks as one of them, in lists of 8 blocks of 16 keys.
Here it is 1.16 times at 8,192 tokens and 1.29 times at 65,536, in lists of 16 blocks of 64: among
more blocks, more are nearly as important as those that are listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# By kind: how many queries a drift takes to something new, and its share of the variance.
DRIFTS = {
    "random": {1: 1.0},
    "smooth": {256: 1.0},
    "trained": {1: 0.015, 8: 0.06, 64: 0.925},
}
NEIGHBOURS = 4  # queries of a tile, for which `overlap` is given
DRAWN = 2**24  # importances drawn at a time: 64 MiB in fp32


def draw(kind: str, tokens: int, kv_heads: int, block_size: int, slots: int, device: str) -> Tensor:
    """Lists of distinct causal blocks, the same ones every time.

    The query's own block is always listed, then the one before it and the first one, as many as
    there are slots for.

    Args:
        kind: of `DRIFTS`.
        tokens, kv_heads, block_size, slots: the sizes; as many queries as keys.
        device: where they are drawn, a part of the queries at a time.

    Returns:
        `[1, tokens, kv_heads, slots]` int32, ascending; -1 where there are fewer blocks.
    """
    num_blocks = -(-tokens // block_size)
    block = torch.arange(num_blocks, device=device)
    parts = []
    for start, importance in _drifts(kind, tokens, (kv_heads, num_blocks), device, seed=0):
        step = len(importance)
        query = torch.arange(start, min(start + step, tokens), device=device)
        own = (query // block_size)[:, None, None]
        importance = importance[: len(query)].masked_fill_(block > own, -math.inf)
        own = own.expand(-1, kv_heads, 1)
        # the later ones in the place of those before, where a query has fewer
        for forced, rank in ((torch.zeros_like(own), 1), ((own - 1).clamp(min=0), 2), (own, 3)):
            importance.scatter_(2, forced, 1e6 * rank)  # above all that is drawn
        best, ids = importance.topk(min(slots, num_blocks), -1)
        # empty slots sort behind all blocks
        ids = ids.masked_fill(best == -math.inf, num_blocks).sort(-1).values
        ids = ids.masked_fill(ids == num_blocks, -1).to(torch.int32)
        parts.append(F.pad(ids, (0, slots - ids.shape[-1]), value=-1))
    return torch.cat(parts)[None]


def drifting(
    kind: str, tokens: int, size: tuple[int, int], dtype: torch.dtype, device: str
) -> Tensor:
    """Queries that drift as importance does in `draw`: `[1, tokens, *size]`, each number normal.

    With `random`, neighbours have nothing in common; with `smooth`, they are nearly alike, and so
    are the blocks that they choose.
    """
    found = torch.empty(1, tokens, *size, dtype=dtype, device=device)
    for start, part in _drifts(kind, tokens, size, device, seed=2):
        found[0, start : start + len(part)] = part[: tokens - start]
    return found


def _drifts(
    kind: str, tokens: int, size: tuple[int, int], device: str, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Normal numbers for each of the tokens, `[step, *size]`, that drift as `DRIFTS` says: a part
    of the tokens at a time, with the first one of them. The last part may be longer than needed."""
    drifts = DRIFTS[kind]
    generator = torch.Generator(device).manual_seed(seed)
    slowest = max(drifts)  # a whole number of every drift, so that a part ends where a knot stands
    step = max(1, min(DRAWN // math.prod(size), tokens) // slowest) * slowest
    knots = {drift: torch.randn(1, *size, generator=generator, device=device) for drift in drifts}
    for start in range(0, tokens, step):
        drifted = None
        for drift, share in drifts.items():
            # the last knot of one part is the first one of the next
            fresh = torch.randn(step // drift, *size, generator=generator, device=device)
            knots[drift] = torch.cat([knots[drift][-1:], fresh])
            part = _between(knots[drift], drift)
            if share != 1:
                part.mul_(math.sqrt(share))
            drifted = part if drifted is None else drifted.add_(part)
        yield start, drifted


def _between(knots: Tensor, drift: int) -> Tensor:
    """A path through `knots [K + 1, …]`, `drift` queries from each to the next: `[K * drift, …]`.

    It is a turn from one knot to the next, and no straight line, which would halve the variance in
    the middle.
    """
    angle = torch.arange(drift, device=knots.device) / drift * (math.pi / 2)
    angle = angle.reshape(1, drift, *[1] * (knots.dim() - 1))
    if drift == 1:
        return knots[:-1].clone()
    before, after = knots[:-1, None], knots[1:, None]
    return (before * angle.cos()).add_(after * angle.sin()).flatten(0, 1)


def overlap(block_indices: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """How many distinct blocks the lists of so many neighbouring queries name together, over how
    many one of them names: 1 where they agree, `neighbours` where they share nothing.

    Args:
        block_indices: `[B, N, H, S]`, each list without a block twice; -1 is an empty slot.
        neighbours: queries of a tile; what is left over at the end is not counted.

    Raises:
        ValueError: for fewer queries than that.
    """
    N = block_indices.shape[1]
    if neighbours > N:
        raise ValueError(f"neighbours: got {neighbours}, expected at most {N}, the queries")
    tiles = block_indices[:, : N // neighbours * neighbours].unflatten(1, (-1, neighbours))
    ids = tiles.transpose(2, 3).flatten(3).sort(-1).values  # [B, tiles, H, neighbours * S]
    is_new = F.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True) & (ids >= 0)
    return is_new.sum().item() * neighbours / (tiles >= 0).sum().item()
