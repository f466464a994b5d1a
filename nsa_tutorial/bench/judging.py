"""What the benchmark holds results against, so that no wrong kernel is ever called fast.

Attention and its gradients are written out in fp64 for some queries, over exactly the keys that
they see: a literal formula, which shares no code with any backend. Held against it are

    o, d_q      of the last queries, and of others spread over all
    d_k, d_v    of the first block of keys, one in the middle and the last, each for one head: the
                sums over every query that sees the block

and all of a result has to be finite. The first block is listed by every query, so that a kernel
which loses a part of a long list of queries is found out, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.bench.problem import Problem, Results

CHECKED_QUERIES = 64  # the last ones, and as many spread over all
GATHERED = 2**26  # numbers gathered at a time: 512 MiB in fp64
# Errors allowed, in units of a dtype's precision: of one number, against the largest one, and of
# all in the mean square. The reference's are below 1 and a third; in fp32, where a sum over many
# thousand queries rounds in each addition, a unit is larger than the dtype's.
LARGEST, MEAN = 4, 1
LEAST_UNIT = 1e-5

Part = tuple[tuple, Tensor]  # where it stands in a result, and what stands there


class Exact(NamedTuple):
    """Attention of some queries and one KV head, in fp64, and what each of them adds to its keys'
    gradients. `J` keys are looked at for each query; a hidden one gets 0."""

    keys: Tensor  # [n, J]
    o: Tensor  # [n, G, DV]
    d_q: Tensor  # [n, G, D]
    d_k: Tensor  # [n, J, D]
    d_v: Tensor  # [n, J, DV]


def keys_of(problem: Problem, queries: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """The keys that the operator shows to each query, `[n, J]`, and whether they are seen: slots
    may be empty, and a query's own block is seen in part."""
    query = queries[:, None]
    if problem.operator == "window":
        keys = query - torch.arange(problem.window_size, device=query.device)
        return keys.clamp(min=0), keys >= 0
    block_size = problem.shape.block_size
    ids = problem.block_indices[0, queries, head].long().repeat_interleave(block_size, -1)
    keys = ids * block_size + torch.arange(ids.shape[1], device=query.device) % block_size
    is_seen = (ids >= 0) & (keys <= query)
    return keys.masked_fill(~is_seen, 0), is_seen


def exact(problem: Problem, queries: Tensor, head: int) -> Exact:
    """Attention of these queries, and its gradients, for the query heads of one KV head."""
    G = problem.shape.group
    heads = slice(head * G, head * G + G)
    keys, is_seen = keys_of(problem, queries, head)
    q, d_o = (x[0, queries, heads].double() for x in (problem.q, problem.d_o))  # [n, G, …]
    k, v = (x[0, keys, head].double() for x in (problem.k, problem.v))  # [n, J, …]
    scores = q @ k.transpose(-1, -2) * problem.scale
    p = scores.masked_fill(~is_seen[:, None], -math.inf).softmax(-1)  # [n, G, J]
    o = p @ v
    d_p = d_o @ v.transpose(-1, -2)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * problem.scale
    return Exact(keys, o, d_s @ k, d_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_o)


def _parts(problem: Problem, queries: Tensor, head: int) -> Iterator[Exact]:
    """`exact`, for as many queries at a time as memory has room for."""
    s = problem.shape
    numbers = s.slots * s.block_size * (s.width + s.value_width)
    for some in queries.split(max(1, GATHERED // numbers)):
        yield exact(problem, some, head)


def of_queries(problem: Problem, queries: Tensor) -> Results:
    """`o` and `d_q` of these queries, `[n, HQ, …]`."""
    found = {"o": [], "d_q": []}
    for head in range(problem.shape.kv_heads):
        parts = [(part.o, part.d_q) for part in _parts(problem, queries, head)]
        for name, tensors in zip(found, zip(*parts, strict=True), strict=True):
            found[name].append(torch.cat(tensors))
    return {name: torch.cat(tensors, 1) for name, tensors in found.items()}


def of_keys(problem: Problem, first: int, last: int, head: int) -> Results:
    """`d_k` and `d_v` of the keys `first … last - 1`, which lie in one block: the sums over all
    queries that see one of them."""
    s, device = problem.shape, problem.q.device
    if problem.operator == "window":
        queries = torch.arange(first, min(s.tokens, last - 1 + problem.window_size), device=device)
    else:
        listed = problem.block_indices[0, :, head] == first // s.block_size
        queries = listed.any(-1).nonzero()[:, 0]
    found = {
        "d_k": torch.zeros(last - first, s.width, dtype=torch.float64, device=device),
        "d_v": torch.zeros(last - first, s.value_width, dtype=torch.float64, device=device),
    }
    for part in _parts(problem, queries, head):
        is_here = (part.keys >= first) & (part.keys < last)
        key = part.keys[is_here] - first
        found["d_k"].index_add_(0, key, part.d_k[is_here])
        found["d_v"].index_add_(0, key, part.d_v[is_here])
    return found


def truth(problem: Problem, *, gradients: bool) -> dict[str, list[Part]]:
    """What the results should be, by name, in the places that are checked."""
    s = problem.shape
    spread = torch.linspace(0, s.tokens - 1, CHECKED_QUERIES).long()
    queries = torch.cat([spread, torch.arange(max(0, s.tokens - CHECKED_QUERIES), s.tokens)])
    queries = queries.unique().to(problem.q.device)
    found = {name: [((0, queries), x)] for name, x in of_queries(problem, queries).items()}
    if not gradients:
        return {"o": found["o"]}
    last_block = (s.tokens - 1) // s.block_size
    places = {0: 0, last_block // 2: s.kv_heads - 1, last_block: 0}  # a KV head by block
    found |= {"d_k": [], "d_v": []}
    for block, head in places.items():
        first, last = block * s.block_size, min((block + 1) * s.block_size, s.tokens)
        for name, x in of_keys(problem, first, last, head).items():
            found[name].append(((0, slice(first, last), head), x))
    return found


def judge(found: Results, true: dict[str, list[Part]]) -> tuple[dict[str, float], bool]:
    """The largest error of each result in the places that are checked, and whether all of them are
    rounding."""
    errors, is_right = {}, True
    for name, x in found.items():
        unit, largest = max(torch.finfo(x.dtype).eps, LEAST_UNIT), []
        for place, expected in true[name]:
            off = (x[place].double() - expected).abs()
            largest.append(off.max())
            # False for NaN
            is_right &= bool(off.max() <= LARGEST * unit * expected.abs().max())
            is_right &= bool(off.norm() <= MEAN * unit * expected.norm())
        is_right &= bool(x.isfinite().all())
        errors[name] = torch.stack(largest).max().item()  # NaN stays NaN
    return errors, is_right
