"""Which function that a reader builds is which operator of `nsa_tutorial.ops`.

A twin says how the function is called, and for which properties of the operators' contract its
exercise asks. `contract` asks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.contract_problems import ALWAYS, PROPERTIES, Problem
from nsa_tutorial.sparse.selected_attention import dense_mask


@dataclass(frozen=True)
class Twin:
    """A function that the reader builds, as an operator.

    Attributes:
        operator: its name in `nsa_tutorial.ops`, and what of it is compared.
        call: calls the function on a problem; returns tensors as `right` does.
        right: the same by the operator: `right(problem, dtype, backend)`.
        properties: those that the exercise asks for, of `PROPERTIES`.
        sizes: those of its problems that differ from `draw`'s.
        is_exact: the answers are numbers of blocks, and have no error.
    """

    operator: str
    call: Callable[[Callable, Problem], tuple[Tensor, ...]]
    right: Callable[[Problem, torch.dtype, str], tuple[Tensor, ...]]
    properties: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    is_exact: bool = False


def _attended(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    return p.attend(dtype, backend)


def _by_visible_keys(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function that gets each query's first key and the number of keys it sees."""
    N, M = p.q.shape[1], p.k.shape[1]
    place = torch.arange(M - N, M, device=p.q.device)
    first = torch.zeros_like(place)
    if p.cu_seqlens is not None:
        starts = p.cu_seqlens.to(place)
        first = starts[torch.bucketize(place, starts, right=True) - 1]
    counts = (first.to(torch.int32), (place - first + 1).to(torch.int32))
    o, lse = function(p.q[0], p.k[0], p.v[0], p.ids[0], *counts, p.block_size)
    return o[None], lse[None]


def _by_lists(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function of chapter 05, which returns `o` alone."""
    return (function(p.q[0], p.k[0], p.v[0], p.ids[0], p.block_size)[None],)


def _attended_alone(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    return p.attend(dtype, backend)[:1]


_WINDOW = 20


def _by_window(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    return (function(p.q[0], p.k[0], p.v[0], _WINDOW)[None],)


def _windowed(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    tensors = (x.to(dtype) for x in (p.q, p.k, p.v))
    return (ops.sliding_window_attention(*tensors, window_size=_WINDOW, backend=backend),)


_SUMMARIES = {"length": 8, "stride": 4}


def _to_summaries(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function that gets summaries, as many queries as tokens."""
    k_cmp, v_cmp = (ops.compress(x, **_SUMMARIES)[0] for x in (p.k, p.v))
    o, lse = function(p.q[0], k_cmp, v_cmp, *_SUMMARIES.values())
    return o[None], lse[None]


def _summaries_attended(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    summaries = (ops.compress(x, **_SUMMARIES).to(dtype) for x in (p.k, p.v))
    options = {**_SUMMARIES, "return_lse": True, "backend": backend}
    return ops.compressed_attention(p.q.to(dtype), *summaries, **options)


def _by_position(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function whose queries are the last positions."""
    o, lse = function(p.q[0], p.k[0], p.v[0], p.ids[0], p.block_size, p.scale)
    return o[None], lse[None]


def _gradients(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in (p.q, p.k, p.v))
    o = ops.selected_attention(q, k, v, p.ids, block_size=p.block_size, backend=backend)
    return torch.autograd.grad(o, (q, k, v), p.d_o.to(dtype))


def _backward_by_lists(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function that gets the lists and, for each KV head, the inverse list."""
    ids, num_blocks = p.ids[0], -(-p.k.shape[1] // p.block_size)
    queries, bounds, before = [], [], 0
    for head in range(ids.shape[1]):
        query, slot = (ids[:, head] >= 0).nonzero(as_tuple=True)
        block, order = ids[query, head, slot].sort(stable=True)
        queries.append(query[order])
        edges = torch.arange(num_blocks + 1, dtype=block.dtype, device=block.device)
        bounds.append(torch.searchsorted(block, edges) + before)
        before += len(query)
    o, lse = p.attend(torch.float32)
    tables = (ids, torch.cat(queries).int(), torch.stack(bounds).int())
    given = (x[0] for x in (p.d_o, p.q, p.k, p.v, o, lse))
    return tuple(x[None] for x in function(*given, *tables, p.block_size, p.scale))


def _backward_by_mask(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function with the heads first, and one mask for all of them."""
    o, lse = p.attend(torch.float32)
    d_o, q, k, v, o = (x[0].transpose(0, 1) for x in (p.d_o, p.q, p.k, p.v, o))
    lse = lse[0].T
    sees = dense_mask(p.ids, p.k.shape[1], block_size=p.block_size)[0, :, 0]  # [N, M]
    found = function(d_o, torch.zeros_like(lse), q, k, v, o, lse, sees, p.scale)
    return tuple(x.transpose(0, 1)[None] for x in found)


_CHOICE = {"num_initial": 1, "num_local": 1}


def _summaries(p: Problem) -> Tensor:
    """One summary a block, the mean of its keys, `[1, M // BS, H, D]`."""
    BS = p.block_size
    return ops.compress(p.k, length=BS, stride=BS)


def _chosen(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    options = {"length": p.block_size, "stride": p.block_size, "num_keys": p.k.shape[1]}
    ids = ops.select_blocks(
        p.q.to(dtype), _summaries(p).to(dtype), top_n=3, block_size=p.block_size, **options,
        **_CHOICE, backend=backend,
    )  # fmt: skip
    return (ids,)


def _choose(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    k_cmp, BS, M = _summaries(p), p.block_size, p.k.shape[1]
    s = torch.einsum("nhgd,mhd->nhgm", p.q[0].unflatten(1, (k_cmp.shape[2], -1)), k_cmp[0])
    ends = (torch.arange(k_cmp.shape[1], device=s.device) + 1) * BS - 1
    place = torch.arange(M - len(s), M, device=s.device)
    s = (p.scale * s).masked_fill(ends > place[:, None, None, None], -math.inf)
    lse = s.logsumexp(-1).flatten(1)
    ids = function(p.q[0], k_cmp[0], lse, M, BS, 3, *_CHOICE.values(), p.scale)
    return (ids[None],)


def _choose_for_all(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function whose queries are all positions: those before the last `N` are zeros, and their
    lists are dropped."""
    (_, N, HQ, D), M, BS = p.q.shape, p.k.shape[1], p.block_size
    q = torch.cat([p.q.new_zeros(1, M - N, HQ, D), p.q], 1)
    k_cmp, cut = _summaries(p), {"length": BS, "stride": BS}
    lse = ops.compressed_attention(q, k_cmp, k_cmp, **cut, return_lse=True, num_keys=M)[1]
    ids = function(q[0], k_cmp[0], lse[0], 3, BS, BS, BS, *_CHOICE.values())
    return (ids[None, M - N :],)


def _in_front(p: Problem) -> tuple[Tensor, Tensor]:
    """The problem's queries behind zeros, so that there is one for each key; and gates."""
    (_, N, HQ, D), M = p.q.shape, p.k.shape[1]
    q = torch.cat([p.q.new_zeros(1, M - N, HQ, D), p.q], 1)
    gates = torch.rand(3, M, HQ, generator=torch.Generator().manual_seed(7)).to(q.device)
    return q, gates


def _whole_built(function: Callable, p: Problem) -> tuple[Tensor, ...]:
    """A function whose queries are all positions, and which chooses its lists itself."""
    (q, gates), N, BS = _in_front(p), p.q.shape[1], p.block_size
    o = function(q[0], [p.k[0]] * 3, [p.v[0]] * 3, list(gates), 3, BS, BS, BS, BS)
    return (o[None, -N:],)


def _whole(p: Problem, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    (_, gates), N, BS = _in_front(p), p.q.shape[1], p.block_size
    sizes = {"block_size": BS, "window_size": BS, "length": BS, "stride": BS}
    o = ops.native_sparse_attention(
        *(x.to(dtype) for x in (p.q, p.k, p.v)), *gates[:, None, -N:].to(dtype), block_counts=3,
        backend=backend, **sizes,
    )  # fmt: skip
    return (o,)


# a backward that is given `lse` knows its scores no better than `lse` is rounded
_GIVEN_LSE = tuple(what for what in ALWAYS[:-1] if "apart" not in what)
_GROUPS = ("a group of 3", "a group of 16")
_ANY_LISTS = tuple(what for what in PROPERTIES if "packed" not in what)
_ANY_KEYS = ("lists", "one query", "causal: all queries", "a ragged last block", *_GROUPS)
TWINS = {
    "selected_attention": Twin("selected_attention", _by_lists, _attended_alone, _ANY_LISTS),
    "window_attention": Twin("sliding_window_attention", _by_window, _windowed, _ANY_KEYS),
    "compressed_attention": Twin(
        "compressed_attention", _to_summaries, _summaries_attended,
        ("causal: all queries", *_GROUPS, "nothing seen: o 0, lse -inf",
         "scores two hundred apart"), (("N", 48),),
    ),
    "attention_backward": Twin(
        "selected_attention, gradients", _backward_by_mask, _gradients,
        (*_GIVEN_LSE, *_GROUPS), (("H", 1),),
    ),
    "native_sparse_attention": Twin(
        "native_sparse_attention", _whole_built, _whole,
        ("one query", "causal: all queries", "a ragged last block", *_GROUPS),
    ),
    "select_blocks": Twin(
        "select_blocks", _choose_for_all, _chosen,
        ("lists", "one query", "causal: all queries", "a ragged last block", *_GROUPS),
        is_exact=True,
    ),
    "tilelang_selected_attention": Twin(
        "selected_attention", _by_position, _attended, ALWAYS,
    ),
    "triton_selected_attention": Twin(
        "selected_attention", _by_visible_keys, _attended, tuple(PROPERTIES),
    ),
    "triton_selected_backward": Twin(
        "selected_attention, gradients", _backward_by_lists, _gradients, _GIVEN_LSE,
        (("G", 16),),
    ),
    "triton_select_blocks": Twin(
        "select_blocks", _choose, _chosen,
        ("lists", "one query", "causal: all queries", *_GROUPS), is_exact=True,
    ),
}  # fmt: skip
