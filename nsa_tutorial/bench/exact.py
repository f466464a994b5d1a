"""Attention and its gradients in fp64, for some queries over exactly the keys that they see: a
literal formula, which shares no code with any backend.

`of_queries` and `of_keys` are of one branch: of lists, of windows or of summaries. What a branch of
`native` gets from above is the output's gradient times the branch's gate, which stands among the
problem's tensors as `gate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.bench.problem import Problem, Results

GATHERED = 2**26  # numbers gathered at a time: 512 MiB in fp64


class Exact(NamedTuple):
    """Attention of some queries and one KV head, in fp64, and what each of them adds to its keys'
    gradients. `J` keys are looked at for each query; a hidden one gets 0."""

    keys: Tensor  # [n, J]
    o: Tensor  # [n, G, DV]
    d_q: Tensor  # [n, G, D]
    d_k: Tensor  # [n, J, D]
    d_v: Tensor  # [n, J, DV]


def upstream(problem: Problem, queries: Tensor, head: int) -> Tensor:
    """The gradient that reaches these queries' outputs, `[n, G, DV]`."""
    heads = _heads(problem, head)
    d_o = problem.d_o[0, queries, heads].double()
    gate = problem.tensors.get("gate")
    return d_o if gate is None else d_o * gate[0, queries, heads, None].double()


def _heads(problem: Problem, head: int) -> slice:
    """The query heads of a KV head."""
    G = problem.shape.group
    return slice(head * G, head * G + G)


# -- lists and windows: every query gathers its own keys --


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
    keys, is_seen = keys_of(problem, queries, head)
    q = problem.q[0, queries, _heads(problem, head)].double()  # [n, G, D]
    k, v = (x[0, keys, head].double() for x in (problem.k, problem.v))  # [n, J, …]
    d_o = upstream(problem, queries, head)
    p, d_s, o = _softmax(problem, q, k, v, d_o, is_seen)
    return Exact(keys, o, d_s @ k, d_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_o)


def _softmax(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, is_seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and the gradient of scores before they are scaled, `[n, G, J]`, and the output; 0
    where nothing is seen."""
    is_hidden = ~is_seen[:, None]
    scores = q @ k.transpose(-1, -2) * problem.scale
    p = scores.masked_fill_(is_hidden, -math.inf).softmax(-1).masked_fill_(is_hidden, 0)
    d_p = d_o @ v.transpose(-1, -2)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * problem.scale
    return p, d_s, p @ v


def _parts(problem: Problem, queries: Tensor, head: int) -> Iterator[Exact]:
    """`exact`, for as many queries at a time as memory has room for."""
    s = problem.shape
    keys = problem.window_size if problem.operator == "window" else s.slots * s.block_size
    for some in queries.split(max(1, GATHERED // (keys * (s.width + s.value_width)))):
        yield exact(problem, some, head)


# -- summaries: all queries look at the same ones --


def visible(problem: Problem, queries: Tensor) -> Tensor:
    """Whether each summary has ended at each of these queries, `[n, M_c]`."""
    s = problem.shape
    summary = torch.arange(s.num_summaries, device=queries.device)
    return summary * s.stride + s.length - 1 <= queries[:, None]


def summaries_per_part(problem: Problem, queries: Tensor) -> Iterator[Tensor]:
    """These queries, as many at a time as memory has room for their scores."""
    s = problem.shape
    yield from queries.split(max(1, GATHERED // max(1, s.group * s.num_summaries)))


def _summaries(problem: Problem, queries: Tensor, head: int) -> tuple[Tensor, ...]:
    """Of some queries: `q`, what comes from above, `p`, `d_s`, `o` and `d_q`."""
    q = problem.q[0, queries, _heads(problem, head)].double()  # [n, G, D]
    k, v = (problem.tensors[x][0, :, head].double() for x in ("k_cmp", "v_cmp"))  # [M_c, …]
    d_o = upstream(problem, queries, head)
    p, d_s, o = _softmax(problem, q, k, v, d_o, visible(problem, queries))
    return q, d_o, p, d_s, o, d_s @ k


def of_summaries(problem: Problem, summaries: slice, head: int) -> Results:
    """`d_k_cmp` and `d_v_cmp` of some summaries: the sums over all queries that see one of them."""
    s, device = problem.shape, problem.device
    num = summaries.stop - summaries.start
    found = {
        "d_k_cmp": torch.zeros(num, s.width, dtype=torch.float64, device=device),
        "d_v_cmp": torch.zeros(num, s.value_width, dtype=torch.float64, device=device),
    }
    # the first query that sees one of them, if there are any
    first = min(summaries.start * s.stride + s.length - 1, s.tokens)
    for some in summaries_per_part(problem, torch.arange(first, s.tokens, device=device)):
        q, d_o, p, d_s, *_ = _summaries(problem, some, head)
        found["d_k_cmp"] += torch.einsum("ngj,ngd->jd", d_s[..., summaries], q)
        found["d_v_cmp"] += torch.einsum("ngj,ngd->jd", p[..., summaries], d_o)
    return found


# -- of one branch --


def of_queries(problem: Problem, queries: Tensor) -> Results:
    """`o` and `d_q` of these queries, `[n, HQ, …]`."""
    found = {"o": [], "d_q": []}
    for head in range(problem.shape.kv_heads):
        if problem.operator == "compressed":
            parts = summaries_per_part(problem, queries)
            parts = [_summaries(problem, some, head)[-2:] for some in parts]
        else:
            parts = [(part.o, part.d_q) for part in _parts(problem, queries, head)]
        for name, tensors in zip(found, zip(*parts, strict=True), strict=True):
            found[name].append(torch.cat(tensors))
    return {name: torch.cat(tensors, 1) for name, tensors in found.items()}


def of_keys(problem: Problem, first: int, last: int, head: int) -> Results:
    """`d_k` and `d_v` of the keys `first … last - 1`, which lie in one block: the sums over all
    queries that see one of them."""
    s, device = problem.shape, problem.device
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


# -- means, and the choice --


def covering(problem: Problem, first: int, last: int) -> slice:
    """The summaries that hold one of the tokens `first … last - 1`."""
    s = problem.shape
    start = min(max(0, -(-(first - s.length + 1) // s.stride)), s.num_summaries)
    return slice(start, min((last - 1) // s.stride + 1, s.num_summaries))


def to_tokens(problem: Problem, first: int, last: int, d_cmp: Tensor) -> Tensor:
    """The gradient of the tokens `first … last - 1`, `[n, D]`, from those of the means that hold
    one of them, `[J, D]`."""
    s, summaries = problem.shape, covering(problem, first, last)
    token = torch.arange(first, last, device=d_cmp.device)[:, None]
    start = torch.arange(summaries.start, summaries.stop, device=d_cmp.device) * s.stride
    is_held = (token >= start) & (token < start + s.length)  # [n, J]
    return is_held.double() @ d_cmp.double() / s.length


def means(problem: Problem, x: Tensor, summaries: Tensor) -> Tensor:
    """These summaries of `x [1, M, H, D]`: `[n, H, D]`."""
    token = summaries[:, None] * problem.shape.stride
    token = token + torch.arange(problem.shape.length, device=x.device)
    return x[0, token].double().mean(1)


def block_scores(problem: Problem, queries: Tensor) -> Tensor:
    """What the blocks are worth to these queries, `[n, H, NB]`: the attention to summaries, summed
    over a group, times the share of tokens that a summary and a block have in common."""
    s = problem.shape
    start = torch.arange(s.num_summaries, device=queries.device)[:, None] * s.stride
    block = torch.arange(-(-s.tokens // s.block_size), device=queries.device) * s.block_size
    common = torch.minimum(start + s.length, block + s.block_size) - torch.maximum(start, block)
    common = common.clamp(min=0).double() / s.stride  # [M_c, NB]
    found = []
    for head in range(s.kv_heads):
        k = problem.tensors["k_cmp"][0, :, head].double()
        parts = []
        for some in summaries_per_part(problem, queries):
            is_hidden = ~visible(problem, some)[:, None]
            q = problem.q[0, some, _heads(problem, head)].double()
            scores = (q @ k.T * problem.scale).masked_fill_(is_hidden, -math.inf)
            p = scores.softmax(-1).masked_fill_(is_hidden, 0)  # [n, G, M_c]
            parts.append(p.sum(1) @ common)
        found.append(torch.cat(parts))
    return torch.stack(found, 1)


def index_scores(problem: Problem, queries: Tensor) -> Tensor:
    """What an indexer with weights thinks of the blocks, `[n, H, NB]`: the best score among the
    tokens that these queries see, 0 where they see none."""
    s, found = problem.shape, []
    key = torch.arange(s.tokens, device=queries.device)
    k = problem.k[0, :, 0].double()
    for head in range(s.kv_heads):
        parts = []
        for some in queries.split(max(1, GATHERED // (s.group * s.tokens))):
            place = (0, some, _heads(problem, head))
            w = problem.tensors["g_idx"][place][..., None].double()
            scores = ((problem.q[place].double() @ k.T).relu_() * w).sum(1)  # [n, tokens]
            scores = scores.masked_fill_(key > some[:, None], 0)
            scores = F.pad(scores, (0, -s.tokens % s.block_size))
            parts.append(scores.unflatten(-1, (-1, s.block_size)).amax(-1))
        found.append(torch.cat(parts))
    return torch.stack(found, 1)
