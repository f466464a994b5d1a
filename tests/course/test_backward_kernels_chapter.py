"""Chapter 13's exercises: their solutions against the package, answers as readers write them; and
the kernels that it shows beside each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import phases, predict, reader, reveal
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import backward_kernels as solutions
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse import inverse_list as inverse_lists
from nsa_tutorial.sparse import selected_attention

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("backward_kernels")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def causal_rows(N: int) -> selected_attention.QueryRows:
    return selected_attention.query_rows(
        1, N, N, causal=True, cu_seqlens=None, device=torch.device("cpu")
    )


# -- solutions --


@pytest.mark.parametrize("BS", [1, 3, 4])
def test_the_inverse_list_is_the_packages(BS: int) -> None:
    """Of random lists with empty slots, block for block."""
    N, S = 13, 3
    blocks = -(-N // BS)
    g = torch.Generator().manual_seed(BS)
    order = torch.rand(N, blocks, generator=g).argsort(-1)[:, :S]
    ids = torch.where((order <= torch.arange(N)[:, None] // BS), order, -1)
    inverse = inverse_lists.invert_lists(ids[:, None], causal_rows(N), block_size=BS, num_keys=N)
    queries, bounds = solutions.inverse_list(ids, blocks)
    for block in range(blocks):
        first, last = inverse.first[block], inverse.last[block]
        theirs = (inverse.entries[first:last] // S).tolist()
        assert queries[bounds[block] : bounds[block + 1]].tolist() == theirs


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 8, 30, 101])
def test_chunk_lengths_are_the_packages(count: int) -> None:
    length = 4
    empty = torch.zeros(0, dtype=torch.int64)
    bounds = torch.tensor([0, count], dtype=torch.int32)
    zero = bounds[:1]
    inverse = inverse_lists.InverseList(empty, zero, bounds[1:], zero, zero, count, count)
    chunks = inverse_lists.chunks(inverse, length=length)
    theirs = (chunks.last - chunks.first).tolist()
    assert solutions.chunk_lengths(count, length) == sorted(n for n in theirs if n)


def test_rows_of_all_steps_are_the_groups_rows() -> None:
    """Every head of the group of every query, once."""
    queries, head, H, G, BR = [1, 4, 5, 9], 1, 3, 5, 8
    steps = (solutions.rows_of_step(queries, step, head, H, G, BR) for step in range(3))
    rows = [row for step in steps for row in step]
    q_row = torch.arange(10 * H * G).view(10, H, G)
    expected = q_row[queries, head].flatten().tolist()
    assert rows == expected + [-1] * (3 * BR - len(expected))


def test_the_slot_gradient_is_the_operators() -> None:
    """Two heads, blocks of three keys, the last one visible in part."""
    N, G, D, BS, scale = 8, 2, 4, 3, 0.7
    q, k, v = draw(1, N, G, D), draw(1, N, 1, D, seed=1), draw(1, N, 1, 5, seed=2)
    lists = torch.tensor([[0, -1, 2]]).expand(1, N, 1, 3)
    factors = torch.ones(1, N, 1, 3).double().requires_grad_()
    o, lse = ops.selected_attention(
        q, k, v, lists, block_size=BS, scale=scale, slot_scale=factors, return_lse=True
    )
    d_o = draw(*o.shape, seed=3)
    (right,) = torch.autograd.grad(o, factors, d_o)
    t = 7  # sees the keys 6 and 7 of block 2
    keys = lists[0, t, 0][:, None] * BS + torch.arange(BS)  # [S, BS]
    is_seen = (keys >= 0) & (keys <= t)
    k_tile, v_tile = (x[0, :, 0][keys.clamp(0, N - 1)] for x in (k, v))
    s = torch.einsum("gd,skd->gsk", scale * q[0, t], k_tile).masked_fill(~is_seen, -torch.inf)
    p = torch.exp(s - lse[0, t, :, None, None])
    d_p = torch.einsum("gd,skd->gsk", d_o[0, t], v_tile)
    delta = (d_o[0, t] * o[0, t]).sum(-1)
    d_s = p * (d_p - delta[:, None, None])
    torch.testing.assert_close(solutions.slot_gradient(d_s, s, is_seen), right[0, t, 0])


@pytest.mark.parametrize(("BT", "window_size"), [(1, 1), (4, 1), (4, 3), (3, 7), (8, 30)])
def test_window_queries_are_those_that_see_a_key(BT: int, window_size: int) -> None:
    N = 21
    t, key = torch.arange(N)[:, None], torch.arange(N)
    is_seen = (key <= t) & (key > t - window_size)
    for start in range(0, N, BT):
        expected = is_seen[:, start : start + BT].any(1).nonzero().flatten().tolist()
        assert list(range(*solutions.window_queries(start, BT, window_size, N))) == expected


def test_window_queries_are_the_packages() -> None:
    N, BT, window_size = 21, 4, 6
    inverse = inverse_lists.invert_windows(
        causal_rows(N), window_size=window_size, tile_size=BT, num_keys=N, num_heads=1
    )
    for tile, start in enumerate(range(0, N, BT)):
        theirs = (inverse.first[tile].item(), inverse.last[tile].item())
        assert solutions.window_queries(start, BT, window_size, N) == theirs


HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, BLOCK = 32, 2, 16, 32, 16


def given_backward(N: int, M: int) -> tuple[torch.Tensor, tuple]:
    """Lists of `N` queries for `M` keys, packed for the operator; and what the backward is given
    after the operator's forward."""
    g = torch.Generator().manual_seed(3)
    blocks, own = -(-M // BLOCK), torch.arange(M - N, M)[:, None, None] // BLOCK
    order = torch.rand(N, KV_HEADS, blocks, generator=g).argsort(-1)[..., :2]
    ids = torch.where(order <= own, order, -1).int()
    ids[1] = -1  # a query that lists nothing
    q, d_o = (draw(N, HEADS, x, seed=i) for i, x in enumerate((WIDTH, VALUE_WIDTH)))
    k, v = (draw(M, KV_HEADS, x, seed=i) for i, x in enumerate((WIDTH, VALUE_WIDTH), 2))
    inputs = [x[None].requires_grad_() for x in (q, k, v)]
    o, lse = ops.selected_attention(
        *inputs, ids[None], block_size=BLOCK, scale=0.3, return_lse=True
    )
    right = torch.autograd.grad(o, inputs, d_o[None])
    lists = [solutions.inverse_list(ids[:, head], blocks) for head in range(KV_HEADS)]
    queries = torch.cat([found for found, _ in lists]).int()
    bounds = torch.stack([lists[0][1], lists[1][1] + len(lists[0][0])]).int()
    of_forward = (x.detach().float().contiguous() for x in (d_o, q, k, v, o[0], lse[0]))
    return [x[0] for x in right], (*of_forward, ids, queries, bounds, BLOCK, 0.3)


needs_triton = pytest.mark.skipif(
    (here := environment.detect()).why_not("triton", here.device) is not None,
    reason="Triton does not run here",
)


@needs_triton
def test_the_built_backward_is_autograds_of_the_operator() -> None:
    """Two KV heads, a last block that is not full, a query that lists nothing."""
    right, given = given_backward(7, 40)
    found = solutions.triton_selected_backward(*given)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


# what an answer is like is looked for among all pairs of mistakes: here there are none
NAMELESS = replace(KNOWN["triton_selected_backward"], misconceptions=())


def by_pytorch(d_o, q, k, v, o, lse, lists, queries, bounds, block_size, scale):
    """The right numbers for a list of one visible block, and no kernel."""
    s = scale * (q[:, :, None] * k[None, None, :block_size, 0]).sum(-1)
    p = torch.exp(s - lse[..., None])
    d_p = (d_o[:, :, None] * v[None, None, :block_size, 0]).sum(-1)
    d_s = p * (d_p - (d_o * o).sum(-1, keepdim=True))
    return scale * (d_s[..., None] * k[None, None, :block_size, 0]).sum(2), None, None


@needs_triton
def test_a_backward_without_a_kernel_holds_no_stage() -> None:
    verdict = judge(NAMELESS, by_pytorch)
    assert verdict.held == 0
    assert "No Triton kernel was launched" in verdict.text


def half_done(*given):
    """`d_q` alone, as one would write it first."""
    return solutions.triton_selected_backward(*given)[0], None, None


@pytest.mark.exhaustive
@needs_triton
def test_d_q_alone_holds_four_stages() -> None:
    verdict = judge(KNOWN["triton_selected_backward"], half_done)
    assert (verdict.outcome, verdict.held) == ("wrong", 4)


@pytest.mark.exhaustive
@needs_triton
def test_atomic_adds_hold_all_stages_but_the_last() -> None:
    """Their sums follow the order of the programs."""
    verdict = judge(KNOWN["triton_selected_backward"], solutions._by_atomics)
    assert verdict.held == 6
    assert verdict.misconceptions == ("sums whose order depends on the launch",)


def edited(*changes: tuple[str, str]) -> Callable:
    """The course's backward with pieces of its source exchanged, each of which stands once."""
    wrong = diffs(
        solutions.triton_selected_backward,
        [(dict(changes), "a mistake", "")],
        parts=(solutions.walk_list, solutions.walk_inverse_list),
        pairs=False,
    )
    return wrong[0].wrong


@needs_triton
def test_the_second_kernel_is_asked_for_by_name() -> None:
    text = judge(NAMELESS, half_done).text
    assert "`d_q` is done. Now the second kernel" in text
    assert "return statement" not in text


@needs_triton
def test_d_q_is_judged_alone() -> None:
    """A second kernel that raises holds the stages of `d_q`."""
    known = "a matrix that is not turned"
    attempt = edited(("tl.dot(p, do_tile", "tl.dot(p.T, do_tile"))
    e = KNOWN["triton_selected_backward"]
    e = replace(e, misconceptions=tuple(m for m in e.misconceptions if m.name == known))
    verdict = judge(e, attempt)
    assert (verdict.held, verdict.misconceptions) == (4, (known,))


@needs_triton
def test_a_launch_that_raises_is_told_if_d_q_needs_it() -> None:
    """Here it is the second one, and `d_q` holds NaN without it."""
    attempt = edited(
        ("    walk_list[N, H](",
         "    walk_list[1, 1](*given, lists, d_q, N, M, H, 0, scale, **sizes)\n"
         "    walk_list[N, H]("),
        ("tl.dot(d_s, k_tile, acc_dq", "tl.dot(d_s.T, k_tile, acc_dq"),
    )  # fmt: skip
    verdict = judge(NAMELESS, attempt)
    assert verdict.held == 0
    assert "tl.dot(d_s.T, k_tile" in verdict.text


@needs_triton
@pytest.mark.parametrize(
    ("piece", "instead", "told"),
    [
        (
            "        # -- load the keys and the values --\n        key_row",
            "        if block < 0:\n            continue\n        key_row",
            "`walk_list` has a `continue`. The interpreter runs it, but Triton's compiler",
        ),
        (
            'acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")',
            "acc_dq = tl.dot(d_s, k_tile, acc_dq)",
            "a `tl.dot` of `walk_list` would round fp32",
        ),
    ],
    ids=["continue", "tf32"],
)
def test_what_a_gpu_would_not_do_is_refused(piece: str, instead: str, told: str) -> None:
    verdict = judge(NAMELESS, edited((piece, instead)))
    assert verdict.held == 0
    assert told in verdict.text


@needs_triton
def test_loads_past_the_last_key_are_told_though_no_result_shows_them() -> None:
    e = KNOWN["triton_selected_backward"]
    e = replace(e, stages=e.stages[4:5])
    bare = ("K + key_row * D + width, mask=is_key", "K + key_row * D + width, mask=key < M + 1")
    verdict = judge(e, edited(bare))
    assert verdict.outcome == "right"
    assert "One thing more. Program (2, 0, 0) of `walk_inverse_list` loads element 640 of `K`" in (
        verdict.text
    )
    assert "One thing more" not in judge(e, solutions.triton_selected_backward).text


@needs_triton
def test_a_store_past_the_last_key_is_not_taken_for_a_load() -> None:
    """Which some known mistakes raise."""
    e = KNOWN["triton_selected_backward"]
    bare = ("scale * acc_dk, mask=is_key)", "scale * acc_dk)")
    verdict = judge(replace(e, stages=e.stages[4:5]), edited(bare))
    assert (verdict.outcome, verdict.misconceptions) == ("wrong", ())
    assert "In line 44 of `walk_inverse_list`:" in verdict.text
    assert "would store element 640 of `GradK`" in verdict.text


# -- answers as readers write them --


def lists_of_queries(lists, num_blocks):
    by_block = [[q for q, ids in enumerate(lists) if b in ids] for b in range(num_blocks)]
    bounds = [0]
    for queries in by_block:
        bounds.append(bounds[-1] + len(queries))
    return [q for queries in by_block for q in queries], bounds


def kept_nested(lists, num_blocks):
    by_block = [[q for q, ids in enumerate(lists) if b in ids] for b in range(num_blocks)]
    return by_block, [sum(map(len, by_block[:b])) for b in range(num_blocks + 1)]


def bincount(lists, num_blocks):
    block = lists.flatten()
    order = block.argsort(stable=True)
    order = order[(block < 0).sum() :]
    return (order // len(lists[0])).tolist(), torch.bincount(block[block >= 0]).tolist()


def sorted_without_the_empty(lists, num_blocks):
    x = lists.flatten()
    x = x[x >= 0]
    x, order = torch.sort(x, stable=True)
    return order // lists.size(1), torch.searchsorted(x, torch.arange(num_blocks + 1))


def bounds_of_blocks(lists, num_blocks):
    x = lists.flatten()
    order = x.argsort(stable=True)[(x < 0).sum() :]
    bounds = torch.searchsorted(x[order], torch.arange(num_blocks))
    return order[: bounds[-1]] // lists.size(1), bounds


def empty_last_by_descending(lists, num_blocks):
    x, order = lists.flatten().sort(descending=True, stable=True)
    bounds = torch.searchsorted(x, torch.arange(num_blocks + 1))
    return order[: bounds[-1]] // lists.shape[1], bounds


def descending_behind(lists, num_blocks):
    x = lists.masked_fill(lists == -1, num_blocks).view(-1)
    x, order = x.sort(descending=True, stable=True)
    bounds = torch.searchsorted(x, torch.arange(num_blocks + 1))
    return order[: bounds[-1]] // lists.shape[1], bounds


def bounds_before_queries(lists, num_blocks):
    return solutions.inverse_list(lists, num_blocks)[::-1]


def where_each_ends(lists, num_blocks):
    queries, ends = [], []
    for block in range(num_blocks):
        queries += [i for i, row in enumerate(lists.tolist()) if block in row]
        ends.append(len(queries))
    return queries, ends


def over_queries(lists, num_blocks):
    blocks, places = lists.flatten().sort(stable=True)
    places, blocks = places[blocks >= 0], blocks[blocks >= 0]
    return places // len(lists), torch.searchsorted(blocks, torch.arange(num_blocks + 1))


def remainder_by_queries(lists, num_blocks):
    blocks, places = lists.flatten().sort(stable=True)
    places, blocks = places[blocks >= 0], blocks[blocks >= 0]
    return places % len(lists), torch.searchsorted(blocks, torch.arange(num_blocks + 1))


def bounds_of_the_unsorted(lists, num_blocks):
    x = lists.masked_fill(lists == -1, num_blocks).view(-1)
    order = x.argsort(stable=True)
    bounds = torch.searchsorted(x, torch.arange(num_blocks + 1))
    return (order // lists.shape[1])[: bounds[-1]], bounds


def slot_by_slot(lists, num_blocks):
    N = len(lists)
    x, e = torch.where(lists < 0, num_blocks, lists).T.flatten().sort(stable=True)
    bounds = torch.searchsorted(x, torch.arange(num_blocks + 1))
    return (e % N)[: bounds[-1]], bounds


def no_end_and_not_cut(lists, num_blocks):
    x, e = torch.where(lists < 0, num_blocks, lists).flatten().sort(stable=True)
    return e // lists.shape[1], torch.searchsorted(x, torch.arange(num_blocks))


def positive_blocks(lists, num_blocks):
    pairs = sorted((b, q) for q, ids in enumerate(lists.tolist()) for b in ids if b > 0)
    return [q for _, q in pairs], [sum(b < n for b, _ in pairs) for n in range(num_blocks + 1)]


def only_nested(lists, num_blocks):
    return [(lists == b).any(1).nonzero().flatten() for b in range(num_blocks)]


def as_tensors(lists, num_blocks):
    """Right: of pairs, and each bound a count of smaller blocks."""
    block, query = zip(
        *sorted((b, q) for q, ids in enumerate(lists.tolist()) for b in ids if b >= 0), strict=True
    )
    smaller = torch.tensor(block) < torch.arange(num_blocks + 1)[:, None]
    return torch.tensor(query), smaller.sum(1)


def transposed(lists, num_blocks):
    x, e = torch.where(lists < 0, num_blocks, lists).T.flatten().sort(stable=True)
    bounds = torch.searchsorted(x, torch.arange(num_blocks + 1))
    return (e // lists.shape[1])[: bounds[-1]], bounds


def by_kv_heads(queries, step, head, H, G, BR):
    rows = []
    for i in range(step * BR, (step + 1) * BR):
        query, g = divmod(i, H)
        rows.append((queries[query] * H + head) * G + g if query < len(queries) else -1)
    return rows


def by_kv_heads_until_the_end(queries, step, head, H, G, BR):
    pairs = [divmod(i, H) if i < len(queries) * G else None for i in range((step + 1) * BR)]
    return [-1 if x is None else (queries[x[0]] * H + head) * G + x[1] for x in pairs[step * BR :]]


def remainder_by_kv_heads(queries, step, head, H, G, BR):
    places = range(step * BR, (step + 1) * BR)
    end = len(queries) * G
    return [(queries[n // G] * H + head) * G + n % H if n < end else -1 for n in places]


def groups_of_kv_heads(queries, step, head, H, G, BR):
    rows = [(query * G + head) * H + g for query in queries for g in range(G)] + [-1] * 3 * BR
    return rows[step * BR : (step + 1) * BR]


def query_as_column(queries, step, head, H, G, BR):
    rows = [(head * G + g) * H + q for q in queries for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def from_a_whole_query(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for query in queries for g in range(G)] + [-1] * 3 * BR
    start = step * (BR // G) * G
    return rows[start : start + BR]


def first_heads(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G for query in queries]
    return [rows[i] if i < len(rows) else -1 for i in range(step * BR, (step + 1) * BR)]


def all_rows(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for query in queries for g in range(G)]
    rows += [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def first_head_again(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G for query in queries for _ in range(G)] + [-1] * 2 * BR
    return rows[step * BR : (step + 1) * BR]


def row_by_row(row: Callable) -> Callable:
    """As a reader writes it, a row at a time: `row(queries, place in the step, place in the chunk,
    head, H, G, BR)`."""

    def rows_of_step(queries, step, head, H, G, BR):
        places = [(i, step * BR + i) for i in range(BR)]
        end = len(queries) * G
        return [row(queries, i, j, head, H, G, BR) if j < end else -1 for i, j in places]

    return rows_of_step


ROWS = {
    "counting heads from the beginning of the step": lambda q, i, j, h, H, G, BR: (
        (q[j // G] * H + h) * G + i % G
    ),
    "the first queries of the chunk in every step": lambda q, i, j, h, H, G, BR: (
        (q[i // G] * H + h) * G + j % G
    ),
    "quotient and remainder exchanged": lambda q, i, j, h, H, G, BR: (
        (q[j % G] * H + h) * G + j // G
    ),
    "the remainder in place of the query": lambda q, i, j, h, H, G, BR: (
        (q[j % G] * H + h) * G + j % G
    ),
    "dividing by the rows of a step": lambda q, i, j, h, H, G, BR: (q[j // BR] * H + h) * G + j % G,
    "the remainder by the rows of a step": lambda q, i, j, h, H, G, BR: (
        (q[j // G] * H + h) * G + j % BR
    ),
    "the quotient in place of the head": lambda q, i, j, h, H, G, BR: (
        (q[j // G] * H + h) * G + j // G
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_quotient_or_remainder_is_named(name: str) -> None:
    assert judge(KNOWN["rows_of_step"], row_by_row(ROWS[name])).misconceptions == (name,)


def heads_then_queries(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for g in range(G) for query in queries] + [-1] * BR
    return rows[step * BR : (step + 1) * BR]


def whole_queries(queries, step, head, H, G, BR):
    n = BR // G
    mine = queries[step * n : (step + 1) * n]
    rows = [(query * H + head) * G + g for query in mine for g in range(G)]
    return rows + [-1] * (BR - len(rows))


def from_step_on(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for query in queries for g in range(G)]
    return [rows[i] if i < len(rows) else -1 for i in range(step, step + BR)]


def until_the_last_query(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for query in queries for g in range(G)]
    places = range(step * BR, (step + 1) * BR)
    return [rows[i] if i < len(queries) else -1 for i in places]


def heads_before_queries(queries, step, head, H, G, BR):
    rows = [(head * len(queries) + q) * G + g for q in queries for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def heads_before_places(queries, step, head, H, G, BR):
    R = len(queries)
    rows = [(head * R + q) * G + g for q in range(R) for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def groups_inside(queries, step, head, H, G, BR):
    rows = [q * H * G + g * H + head for q in queries for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def head_by_head(queries, step, head, H, G, BR):
    rows = [q * G + head * G + g for q in queries for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def rows_of_head_0(queries, step, head, H, G, BR):
    rows = [int(query) * H * G + g for query in queries for g in range(G)] + [-1] * BR
    return rows[step * BR : (step + 1) * BR] + [-1] * max(0, (step + 1) * BR - len(rows))


def not_padded(queries, step, head, H, G, BR):
    rows = [(query * H + head) * G + g for query in queries for g in range(G)]
    return rows[step * BR : (step + 1) * BR]


def heads_first_in_a_step(queries, step, head, H, G, BR):
    n = BR // G or 1
    mine = queries[step * n : (step + 1) * n]
    mine = mine + [None] * (n - len(mine))
    rows = [-1 if q is None else (q * H + head) * G + g for g in range(G) for q in mine]
    return (rows + [-1] * BR)[:BR]


def longest_rest_last(count, length):
    return [min(length, count - start) for start in range(0, count, length)]


def as_the_bounds_fall(count, length):
    n = max(count // length, 1) if count else 0
    bounds = [i * count // n for i in range(n + 1)] if n else [0]
    return [b - a for a, b in pairwise(bounds)]


def by_range(count, length):
    return sorted(min(length, count - start) for start in range(0, count, length))


def tensor_split(count, length):
    shares = torch.arange(count).tensor_split(max(1, count // length))
    return sorted(len(share) for share in shares if len(share))


def by_einsum(d_s, s, is_seen):
    return torch.einsum("gsk,gsk->s", d_s, s.masked_fill(~is_seen, 0))


def nan_everywhere(d_s, s, is_seen):
    return torch.einsum("gsk,gsk->s", d_s, s)


def by_weights(d_s, s, is_seen):
    return torch.where(is_seen, d_s * s.exp(), 0).sum((0, 2))


def sums_first(d_s, s, is_seen):
    s = s.masked_fill(~is_seen, 0)
    return d_s.sum((0, 2)) * s.sum((0, 2))


def any_query(queries, step, head, H, G, BR):
    index = torch.arange(step * BR, step * BR + BR)
    return ((torch.tensor(queries)[index // G] * H + head) * G + index % G).tolist()


def one_mean(d_s, s, is_seen):
    return torch.where(is_seen, d_s * s, 0).mean((0, 2))


def per_head(d_s, s, is_seen):
    return torch.where(is_seen, d_s * s, 0).sum(-1)


def as_in_the_library(start, BT, window_size, N):
    return start, min(start + window_size, N)


def in_whole_tiles(start, BT, window_size, N):
    return start, min(start + BT, N)


def one_query_short(start, BT, window_size, N):
    return start, min(start + BT + window_size - 1, N - 1)


def windows_in_turn(start, BT, window_size, N):
    return start, min(start + BT * window_size, N)


def end_first(start, BT, window_size, N):
    return min(start + BT + window_size - 1, N), start


def without_a_window(start, BT, window_size, N):
    return start, N


def as_a_list(start, BT, window_size, N):
    return list(range(start, min(start + BT + window_size - 1, N)))


def as_a_range(start, BT, window_size, N):
    return range(start, min(start + BT + window_size - 1, N))


def where_it_ends(start, BT, window_size, N):
    return min(start + BT + window_size - 1, N)


def over_heads_alone(d_s, s, is_seen):
    return torch.where(is_seen, d_s * s, 0).sum(0)


def sorted_results(tensors, stores):
    who = {}
    for program, *element in stores:
        who.setdefault(tuple(element), set()).add(program)
    elements = {(name, i) for name, n in tensors for i in range(n)}
    return sorted(elements - set(who)), sorted(e for e in who if len(who[e]) > 1)


def raced_as_stored(tensors, stores):
    who = {}
    for program, *element in stores:
        who.setdefault(tuple(element), set()).add(program)
    never = [(name, i) for name, n in tensors for i in range(n) if (name, i) not in who]
    return never, [e for e in who if len(who[e]) > 1]


def raced_stores(tensors, stores):
    never, raced = solutions.audit(tensors, stores)
    return never, [store for store in stores if store[1:] in raced]


def pairs_in_stores(tensors, stores):
    elements = [(name, i) for name, n in tensors for i in range(n)]
    return [e for e in elements if e not in stores], solutions.audit(tensors, stores)[1]


def pairs_counted(tensors, stores):
    elements = [(name, i) for name, n in tensors for i in range(n)]
    return [e for e in elements if e not in stores], [e for e in elements if stores.count(e) > 1]


def every_racing_store(tensors, stores):
    never, raced = solutions.audit(tensors, stores)
    return never, [(name, i) for _, name, i in stores if (name, i) in raced]


def counted_stores(tensors, stores):
    times = Counter((name, i) for _, name, i in stores)
    return [e for e in times if not times[e]], [e for e in times if times[e] > 1]


def no_races(tensors, stores):
    return solutions.audit(tensors, stores)[0], []


def nothing_found(tensors, stores):
    return [], []


def two_stores(tensors, stores):
    places = [(name, offset) for _, name, offset in stores]
    elements = [(name, i) for name, n in tensors for i in range(n)]
    never = [e for e in elements if e not in places]
    return never, [e for e in elements if places.count(e) > 1]


def looked_up_what_nobody_stored(tensors, stores):
    who = {}
    for program, name, offset in stores:
        who.setdefault((name, offset), set()).add(program)
    elements = [(name, i) for name, n in tensors for i in range(n)]
    return [e for e in elements if not who[e]], [e for e in elements if len(who[e]) > 1]


def what_was_stored(tensors, stores):
    seen, raced = {}, set()
    for program, name, offset in stores:
        if seen.setdefault((name, offset), program) != program:
            raced.add((name, offset))
    sizes = {name: n for name, n in tensors if any(name == other for _, other, _ in stores)}
    elements = [(name, i) for name, n in sizes.items() for i in range(n)]
    return [e for e in elements if e not in seen], [e for e in elements if e in raced]


ATTEMPTS = {
    "nested": ("inverse_list", kept_nested, {"a list for each block in place of one flat list"}),
    "counts": ("inverse_list", bincount, {"counts in place of bounds"}),
    "dropped": (
        "inverse_list",
        sorted_without_the_empty,
        {"dropping the empty slots before the sort"},
    ),
    "no end": ("inverse_list", bounds_of_blocks, {"leaving out the end of the last block"}),
    "only nested": (
        "inverse_list",
        only_nested,
        {"a list for each block in place of one flat list"},
    ),
    "descending": (
        "inverse_list",
        empty_last_by_descending,
        {"sorting the blocks in descending order"},
    ),
    "descending, empty behind": (
        "inverse_list",
        descending_behind,
        {"sorting the blocks in descending order"},
    ),
    "bounds first": ("inverse_list", bounds_before_queries, {"the two results exchanged"}),
    "no 0": ("inverse_list", where_each_ends, {"leaving out where block 0 begins"}),
    "by queries": ("inverse_list", over_queries, {"dividing by the number of queries"}),
    "% R": (
        "inverse_list",
        remainder_by_queries,
        {"the remainder by the number of queries"},
    ),
    "unsorted bounds": (
        "inverse_list",
        bounds_of_the_unsorted,
        {"searching the blocks before they are sorted"},
    ),
    "no block 0": ("inverse_list", positive_blocks, {"taking block 0 for an empty slot"}),
    "no end, not cut": (
        "inverse_list",
        no_end_and_not_cut,
        {"leaving out the end of the last block", "keeping the empty slots at the end"},
    ),
    "empty": ("inverse_list", nothing_found, {"returning two empty lists"}),
    "first head again": (
        "rows_of_step",
        first_head_again,
        {"the group's first head again and again"},
    ),
    "no window": ("window_queries", without_a_window, {"walking on to the end of the text"}),
    "a list": (
        "window_queries",
        as_a_list,
        {"the queries themselves in place of two numbers"},
    ),
    "keys kept": ("slot_gradient", over_heads_alone, {"a gradient for each key"}),
    "transposed": ("inverse_list", transposed, {"flattening the lists slot by slot"}),
    "by H": ("rows_of_step", by_kv_heads, {"dividing by the number of KV heads"}),
    "by H, until the end": (
        "rows_of_step",
        by_kv_heads_until_the_end,
        {"dividing by the number of KV heads"},
    ),
    "remainder by H": (
        "rows_of_step",
        remainder_by_kv_heads,
        {"the remainder by the number of KV heads"},
    ),
    "H for G": ("rows_of_step", groups_of_kv_heads, {"`H` and `G` mixed up"}),
    "stores alone": ("audit", counted_stores, {"looking at `stores` alone"}),
    "query last": ("rows_of_step", query_as_column, {"letting the query move by one row"}),
    "from a whole query": (
        "rows_of_step",
        from_a_whole_query,
        {"starting each step with a whole query"},
    ),
    "a range": (
        "window_queries",
        as_a_range,
        {"the queries themselves in place of two numbers"},
    ),
    "the end": ("window_queries", where_it_ends, {"returning the end alone"}),
    "pairs": ("audit", pairs_in_stores, {"looking for pairs among triples"}),
    "pairs counted": ("audit", pairs_counted, {"looking for pairs among triples"}),
    "each store": (
        "audit",
        every_racing_store,
        {"an element once for each of its stores"},
    ),
    "slot by slot": ("inverse_list", slot_by_slot, {"flattening the lists slot by slot"}),
    "[H, N, G, D]": (
        "rows_of_step",
        heads_before_queries,
        {"taking Q for `[H, N, G, D]`"},
    ),
    "[H, N, G, D] of places": (
        "rows_of_step",
        heads_before_places,
        {
            "taking Q for `[H, N, G, D]`",
            "the place in the chunk in place of the query",
        },
    ),
    "[N, G, H, D]": ("rows_of_step", groups_inside, {"taking Q for `[N, G, H, D]`"}),
    "head alone": ("rows_of_step", head_by_head, {"forgetting the other KV heads"}),
    "weights": ("slot_gradient", by_weights, {"the exponential in place of the score"}),
    "no key": ("audit", looked_up_what_nobody_stored, {"looking up elements that nobody stored"}),
    "whole": ("rows_of_step", whole_queries, {"taking whole queries only"}),
    "one row": ("rows_of_step", from_step_on, {"moving on by one row a step"}),
    "queries": (
        "rows_of_step",
        until_the_last_query,
        {"as many rows as the chunk has queries"},
    ),
    "no head": ("rows_of_step", rows_of_head_0, {"leaving `head` out"}),
    "not padded": ("rows_of_step", not_padded, {"a short list without −1"}),
    "heads in a step": (
        "rows_of_step",
        heads_first_in_a_step,
        {"all queries of one head first"},
    ),
    "no races": ("audit", no_races, {"never reporting a race"}),
    "nothing": (
        "audit",
        nothing_found,
        {"reporting nothing"},
    ),
    "rest last": (
        "chunk_lengths",
        longest_rest_last,
        {"chunks of one length, and a short rest"},
    ),
    "in order": (
        "chunk_lengths",
        as_the_bounds_fall,
        {"leaving the lengths as the chunks come"},
    ),
    "sums": ("slot_gradient", sums_first, {"summing before multiplying"}),
    "N - 1": ("window_queries", one_query_short, {"leaving out the text's last query"}),
    "in turn": (
        "window_queries",
        windows_in_turn,
        {"a window for each key, one behind the other"},
    ),
    "exchanged": ("window_queries", end_first, {"the two results exchanged"}),
    "sorted": ("audit", sorted_results, {"another order than that of `tensors`"}),
    "as stored": ("audit", raced_as_stored, {"another order than that of `tensors`"}),
    "triples": ("audit", raced_stores, {"the stores in place of the elements"}),
    "one head": ("rows_of_step", first_heads, {"taking one head of each group"}),
    "heads": ("rows_of_step", heads_then_queries, {"all queries of one head first"}),
    "rest": ("chunk_lengths", by_range, {"chunks of one length, and a short rest"}),
    "NaN": ("slot_gradient", nan_everywhere, {"NaN from a hidden key"}),
    "unguarded": ("rows_of_step", any_query, {"asking for queries past the end of the chunk"}),
    "one mean": ("slot_gradient", one_mean, {"averaging over heads and keys"}),
    "heads apart": ("slot_gradient", per_head, {"a gradient for each head"}),
    "short": (
        "window_queries",
        as_in_the_library,
        {"stopping behind the queries that see the first key"},
    ),
    "own tile": ("window_queries", in_whole_tiles, {"stopping at the end of the tile"}),
    "stores": ("audit", two_stores, {"counting stores in place of programs"}),
    "stored": ("audit", what_was_stored, {"forgetting tensors that nobody stores to"}),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    assert set(judge(KNOWN[name], attempt).misconceptions) == named


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("inverse_list", lists_of_queries),
        ("inverse_list", as_tensors),
        ("rows_of_step", all_rows),
        ("chunk_lengths", tensor_split),
        ("slot_gradient", by_einsum),
    ],
)
def test_another_way_is_right_too(name: str, attempt: Callable) -> None:
    assert judge(KNOWN[name], attempt).outcome == "right"


def test_nested_lists_are_told_apart_from_a_flat_one() -> None:
    told = judge(KNOWN["inverse_list"], kept_nested).text
    assert "a list of lists, expected one flat list" in told


def test_an_index_into_a_python_list_is_explained() -> None:
    told = judge(KNOWN["rows_of_step"], lambda queries, *_: queries[torch.arange(2)]).text
    assert "torch.tensor(numbers)[index]" in told


def test_an_einsum_without_letters_for_the_mask_is_explained() -> None:
    told = judge(
        KNOWN["slot_gradient"],
        lambda d_s, s, is_seen: torch.einsum("gsb,gsb->s", d_s, s, is_seen),
    ).text
    assert "each axis one letter" in told


def test_a_mask_of_another_shape_is_told_as_a_shape() -> None:
    """It raises an IndexError, and no index is too large."""
    told = judge(KNOWN["slot_gradient"], lambda d_s, s, is_seen: (d_s * s)[is_seen]).text
    assert "The shapes do not fit" in told


# -- what the chapter shows --


def test_the_order_of_shares_shows_in_their_sum() -> None:
    """64 shares in 200 orders: as many different sums as the chapter tells."""
    g = torch.Generator().manual_seed(0)
    shares, sums = torch.randn(64, generator=g), set()
    for _ in range(200):
        total = torch.zeros(())
        for share in shares[torch.randperm(64, generator=g)]:
            total += share
        sums.add(total.item())
    assert f"gave {len(sums)} different sums" in prose()


def test_as_many_sums_as_orders_are_not_14_times_14(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 is 14 times too large, about, and that 14 has nothing to do with the answer."""
    monkeypatch.chdir(tmp_path)
    reader.forget()
    predict("sums_of_orders", 200)
    told = repr(reveal("sums_of_orders", 14))
    reader.forget()
    assert "You said 200, it is 14. " in told


def prose() -> str:
    """The chapter's text, on one line."""
    notebook = Path(__file__).parents[2] / "notebooks" / "13_backward_kernels.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return " ".join(
        " ".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown").split()
    )


def test_the_minutes_are_told() -> None:
    """Those of optional exercises beside them."""
    minutes = {e.name: e.minutes for e in KNOWN.values()}
    names = ("rows_of_step", "window_queries", "chunk_lengths", "audit", "slot_gradient")
    optional = {name: minutes.pop(name) for name in names}
    assert f"{sum(minutes.values())} of them exercises" in prose()
    assert f"**Optional** ({optional['chunk_lengths']} minutes)" in prose()


def test_chunks_of_5000_queries() -> None:
    assert solutions.chunk_lengths(5_000, 1_024) == [1_250] * 4
    assert "5,000 queries are four chunks of 1,250" in prose()


def test_the_walk_has_the_phases_of_its_twin() -> None:
    twin = phases("nsa_tutorial.training.gradients:backward_dkv")
    walk = phases("nsa_tutorial.kernels.triton.selected.backward:walk_queries")
    assert [phase for phase in twin if phase in walk] == walk
