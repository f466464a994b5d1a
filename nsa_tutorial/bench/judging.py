"""What the benchmark holds results against, so that no wrong kernel is ever called fast.

Attention and its gradients are written out in fp64 for some queries (`exact`). Held against it are

    o, d_q      of the last queries, and of others spread over all; gates and their gradients, too
    d_k, d_v    of the first block of keys, one in the middle and the last, each for one head: the
                sums over every query that sees the block; so, too, of summaries
    lists       of the same queries: a list is wrong if a block that it leaves out is worth more
                than one that it holds, by more than rounding

and all of a result has to be finite. The first block is listed by every query, so that a kernel
which loses a part of a long list of queries is found out, too.

`native` is judged by the lists that the same backend chooses, and these lists as above: where two
blocks are worth nearly the same, rounding decides, and the output follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nsa_tutorial.bench import exact
from nsa_tutorial.bench.operators import BRANCHES, GATES
from nsa_tutorial.bench.problem import Problem, Results
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL

CHECKED_QUERIES = 64  # the last ones, and as many spread over all
# Errors allowed, in units of a dtype's precision: of one number, against the largest one, and of
# all in the mean square. The reference's are below 1 and a third; in fp32, where a sum over many
# thousand queries rounds in each addition, a unit is larger than the dtype's.
LARGEST, MEAN = 4, 1
LEAST_UNIT = 1e-5
# How much more, relatively, a block may be worth that was left out; all scores are fp32.
TIE = 2.0**-14

Part = tuple[tuple, Tensor]  # where it stands in a result, and what stands there
Truth = dict[str, list[Part]]


def truth(problem: Problem, *, gradients: bool) -> Truth:
    """What the results should be, by name, in the places that are checked."""
    of_operator = {
        "selection": _of_choice,
        "indexing": _of_indexing,
        "pooling": _of_pooling,
        "gates": _of_gates,
        "native": _of_native,
    }
    found = of_operator.get(problem.operator, _of_branch)(problem, gradients)
    return {x: parts for x, parts in found.items() if gradients or not x.startswith("d_")}


# -- places --


def checked(num: int, device: torch.device) -> Tensor:
    """The last of so many, and others spread over all."""
    spread = torch.linspace(0, num - 1, CHECKED_QUERIES).long()
    return torch.cat([spread, torch.arange(max(0, num - CHECKED_QUERIES), num)]).unique().to(device)


def blocks(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """The first block of keys, one in the middle and the last: first key, end, and a KV head."""
    s = problem.shape
    last_block = (s.tokens - 1) // s.block_size
    for block, head in {0: 0, last_block // 2: s.kv_heads - 1, last_block: 0}.items():
        yield block * s.block_size, min((block + 1) * s.block_size, s.tokens), head


# -- one operator each --


def _of_branch(problem: Problem, gradients: bool) -> Truth:
    queries = checked(problem.shape.tokens, problem.device)
    found = {x: [((0, queries), y)] for x, y in exact.of_queries(problem, queries).items()}
    if not gradients:
        return found
    for first, last, head in blocks(problem):
        if problem.operator == "compressed":
            place = exact.covering(problem, first, last)
            values = exact.of_summaries(problem, place, head)
        else:
            place, values = slice(first, last), exact.of_keys(problem, first, last, head)
        for name, x in values.items():
            if len(x):  # the last tokens may lie in no summary
                found.setdefault(name, []).append(((0, place, head), x))
    return found


def _of_choice(problem: Problem, gradients: bool) -> Truth:
    queries = checked(problem.shape.tokens, problem.device)
    return {"ids": [((0, queries), _ranks(problem, queries))]}


def _of_indexing(problem: Problem, gradients: bool) -> Truth:
    queries = checked(problem.shape.tokens, problem.device)
    worth = exact.index_scores(problem, queries)
    block = torch.arange(worth.shape[-1], device=queries.device)
    own = queries[:, None, None] // problem.shape.block_size
    worth = worth.masked_fill_(block == own, math.inf).masked_fill_(block > own, -1)
    return {"ids": [((0, queries), worth)]}


def _ranks(problem: Problem, queries: Tensor) -> Tensor:
    """What a block is worth, `[n, H, NB]`: infinity where it is forced, -1 where it is hidden."""
    worth = exact.block_scores(problem, queries)
    block = torch.arange(worth.shape[-1], device=queries.device)
    own = queries[:, None, None] // problem.shape.block_size
    worth.masked_fill_((block < NUM_INITIAL) | (block > own - NUM_LOCAL), math.inf)
    return worth.masked_fill_(block > own, -1)


def _of_pooling(problem: Problem, gradients: bool) -> Truth:
    summaries = checked(problem.shape.num_summaries, problem.device)
    found = {}
    for name in ("k", "v"):
        x, d_cmp = problem.tensors[name], problem.tensors[f"d_{name}_cmp"]
        found[f"{name}_cmp"] = [((0, summaries), exact.means(problem, x, summaries))]
        found[f"d_{name}"] = [
            (
                (0, slice(first, last), head),
                exact.to_tokens(
                    problem, first, last, d_cmp[0, exact.covering(problem, first, last), head]
                ),
            )
            for first, last, head in blocks(problem)
        ]
    return found


def _of_gates(problem: Problem, gradients: bool) -> Truth:
    queries = checked(problem.shape.tokens, problem.device)
    place = (0, queries)
    d_o, total, found = problem.d_o[place].double(), 0, {}
    for gate, branch in zip(GATES, BRANCHES, strict=True):
        g, o = problem.tensors[gate][place][..., None].double(), problem.tensors[branch][place]
        total = total + g * o.double()
        found[f"d_{gate}"] = [(place, (d_o * o.double()).sum(-1))]
        found[f"d_{branch}"] = [(place, d_o * g)]
    return {"o": [(place, total)], **found}


def _of_native(problem: Problem, gradients: bool) -> Truth:
    queries = checked(problem.shape.tokens, problem.device)
    place = (0, queries)
    parts = {
        gate: replace(problem, operator=operator).with_tensors(gate=problem.tensors[gate])
        for gate, operator in zip(GATES, ("compressed", "selected", "window"), strict=True)
    }
    o = d_q = 0
    found = {"ids": _of_choice(problem, gradients)["ids"], "d_k": [], "d_v": []}
    for gate, part in parts.items():
        g, values = (
            problem.tensors[gate][place][..., None].double(),
            exact.of_queries(part, queries),
        )
        o, d_q = o + g * values["o"], d_q + values["d_q"]
        found[f"d_{gate}"] = [(place, (problem.d_o[place].double() * values["o"]).sum(-1))]
    found |= {"o": [(place, o)], "d_q": [(place, d_q)]}
    if not gradients:
        return found
    for first, last, head in blocks(problem):
        held = exact.covering(problem, first, last)
        of_summaries = exact.of_summaries(parts["g_cmp"], held, head)
        to_tokens = partial(exact.to_tokens, problem, first, last)
        of_lists = exact.of_keys(parts["g_slc"], first, last, head)
        of_window = exact.of_keys(parts["g_swa"], first, last, head)
        for name in ("d_k", "d_v"):
            x = of_lists[name] + of_window[name] + to_tokens(of_summaries[f"{name}_cmp"])
            found[name].append(((0, slice(first, last), head), x))
    return found


# -- judging --


def judge(found: Results, true: Truth) -> tuple[dict[str, float], bool]:
    """The largest error of each result in the places that are checked, for lists the number of
    wrong ones, and whether all of them are rounding."""
    errors, is_right = {}, True
    for name, x in found.items():
        if name == "ids":
            errors[name] = sum(wrong_lists(x[place], worth) for place, worth in true[name])
            is_right &= errors[name] == 0
            continue
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


def wrong_lists(ids: Tensor, worth: Tensor) -> int:
    """How many lists `[n, H, S]` are no choice of the best blocks, nor one up to rounding.

    Args:
        ids: distinct and ascending, then -1, if they are right.
        worth: `[n, H, NB]`, at least 0 where a block may be listed, infinite where it has to be.
    """
    S, num_blocks = ids.shape[-1], worth.shape[-1]
    # an empty slot is one block more, behind all others
    place = ids.long().masked_fill(ids < 0, num_blocks)
    is_wrong = (ids < -1).any(-1) | (ids >= num_blocks).any(-1)
    is_wrong |= ((place[..., 1:] <= place[..., :-1]) & (ids[..., 1:] >= 0)).any(-1)
    is_wrong |= ((ids[..., 1:] >= 0) & (ids[..., :-1] < 0)).any(-1)
    is_taken = worth.new_zeros(*worth.shape[:-1], num_blocks + 1, dtype=torch.bool)
    is_taken = is_taken.scatter_(-1, place.clamp(max=num_blocks), True)[..., :num_blocks]
    is_wrong |= is_taken.sum(-1) != (worth >= 0).sum(-1).clamp(max=S)
    least = worth.masked_fill(~is_taken, math.inf).amin(-1)
    best = worth.masked_fill(is_taken, -1).amax(-1)  # of those left out
    is_wrong |= (least < 0) | (best > least * (1 + TIE) + 1e-30)
    return int(is_wrong.sum())
