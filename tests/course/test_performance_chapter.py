"""Chapter 16's exercises: their solutions against the package, answers as readers write them; the
bytes and times that its pictures draw, and what its text tells of them."""

from __future__ import annotations

import json
import re
import statistics
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch

from nsa_tutorial.bench import drawing
from nsa_tutorial.course import costs
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import performance as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import performance as pictures
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("performance")
PREDICTED = {p.name: p for p in solutions.PREDICTIONS}
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "16_performance.ipynb"


def text() -> str:
    cells = nbformat.read(NOTEBOOK, 4).cells
    return " ".join(" ".join(c.source for c in cells if c.cell_type == "markdown").split())


def source(name: str) -> str:
    return next(c.source for c in nbformat.read(NOTEBOOK, 4).cells if c.id == name)


# -- solutions --


def test_the_union_is_the_kernels() -> None:
    """The same blocks, and the same bits."""
    here = environment.detect()
    if here.why_not("triton", here.device):
        pytest.skip(here.why_not("triton", here.device))
    from nsa_tutorial.kernels.triton.selected import by_query_tiles as triton_query_tiles

    N, H, BS, T = 16, 1, 4, 4
    ids = drawing.draw("smooth", N, H, BS, 3, "cpu").to(here.device)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=here.device)
    k = torch.zeros(1, N, H, 16, device=here.device)
    made = triton_query_tiles.unions(k, k, ids[0], rows, block_size=BS, T=T, BT=BS)
    for tile in range(N // T):
        found, bits = solutions.union_of_lists(ids[0, tile * T : (tile + 1) * T, 0].tolist())
        count = int(made.count[tile, 0])
        theirs = zip(
            (made.start[tile, 0, :count] // BS).tolist(),
            made.listed_by[tile, 0, :count].tolist(),
            strict=True,
        )
        assert sorted(theirs) == list(zip(found, bits, strict=True))


def test_the_walk_finds_what_each_list_holds() -> None:
    """With scores and lists: the bits come from the other exercise's solution."""
    here = environment.detect()
    if here.why_not("triton", here.device):
        pytest.skip(here.why_not("triton", here.device))
    lists = [[0, 3, 5], [0, 4, 5], [0, 1, 5], [2, 4, 5]]
    score = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) - 2
    ids, bits = solutions.union_of_lists(lists)
    count = torch.tensor([len(ids)], dtype=torch.int32)
    found = torch.zeros(4)
    tensors = (score.T[ids].contiguous(), torch.tensor(bits, dtype=torch.int32), count, found)
    tensors = [x.to(here.device) for x in tensors]
    solutions.walk_step()[1,](*tensors, len(ids), T=4)
    right = [score[t, own].max().item() for t, own in enumerate(lists)]
    assert tensors[3].tolist() == pytest.approx(right)


@pytest.mark.parametrize("group", [16, 4])
@pytest.mark.parametrize("order", pictures.ORDERS)
def test_the_bytes_of_an_order_are_the_pictures(order: str, group: int) -> None:
    """A query's bytes, over all queries and KV heads with the keys that are seen; the picture adds
    each tensor once."""
    N, D, S, BS, T = pictures.TOKENS, pictures.WIDTH, pictures.SLOTS, pictures.BLOCK, pictures.T
    HQ, H = pictures.HEADS[group]
    overlap = 1.5
    own = solutions.bytes_moved(order, group, S, T, overlap * S, BS, D)
    seen = costs.selected_keys(N, N, block_size=BS, top_n=S) / (N * S * BS)
    once = 2 * N * HQ * D * 2 + 2 * N * H * D * 2
    expected = N * H * own * seen + once
    assert pictures.order_cost(order, group, overlap).cached == pytest.approx(expected)


def test_speed_is_that_of_the_operators() -> None:
    N, HQ, D = pictures.TOKENS, 64, pictures.WIDTH
    points = {o.name: o for o in pictures.operators()}
    lists, dense = points["attention to lists"], points["dense, cuDNN"]
    listed = costs.selected_keys(N, N) / N
    done, as_dense = solutions.speed(N, HQ, D, listed, lists.ms)
    assert done == pytest.approx(lists.flops_per_s / 1e12)
    assert as_dense == pytest.approx(dense.flops / lists.ms / 1e9)


def test_the_choice_is_that_of_the_bytes_on_paper() -> None:
    shapes = {"A": (16, 3.18), "B": (16, 1.02), "C": (4, 3.18), "D": (4, 1.02), "E": (16, 1.29)}
    chosen = solutions.choose_order()
    assert {x: pictures.best_order(*shape) for x, shape in shapes.items()} | {
        "F": "queries"
    } == chosen


# -- answers as readers write them --


def by_or(lists):
    """Right: a dictionary of bits."""
    bits = {}
    for t, own in enumerate(lists):
        for block in own:
            if block != -1:
                bits[block] = bits.get(block, 0) | 2**t
    return [*sorted(bits)], [bits[b] for b in sorted(bits)]


def met(lists):
    bits = {}
    for t, own in enumerate(lists):
        for block in own:
            if block >= 0:
                bits[block] = bits.get(block, 0) | 1 << t
    return list(bits), list(bits.values())


def overwritten(lists):
    bits = {}
    for t, own in enumerate(lists):
        for block in own:
            if block >= 0:
                bits[block] = 1 << t
    return sorted(bits), [bits[b] for b in sorted(bits)]


def counted(lists):
    flat = [b for own in lists for b in own if b != -1]
    return sorted(set(flat)), [flat.count(b) for b in sorted(set(flat))]


def once(order, G, S, T, union, BS, D):
    rows = {"queries": 2 * S * BS * D, "tiles": 2 * union * BS * D / T, "blocks": 2 * S * G * D}
    return 2 * rows[order] + (4 * S * G if order == "blocks" else 0)


def without_lse(order, G, S, T, union, BS, D):
    return {
        "queries": 4 * S * BS * D,
        "tiles": 4 * union * BS * D / T,
        "blocks": 6 * S * G * D,
    }[order]


def whole_tile(order, G, S, T, union, BS, D):
    return solutions.bytes_moved(order, G, S, 1 if order == "tiles" else T, union, BS, D)


def full_square(N, HQ, D, listed, ms):
    flops = 4 * HQ * N * D
    return flops * listed / (ms * 1e9), flops * N / (ms * 1e9)


def in_seconds(N, HQ, D, listed, ms):
    return tuple(x / 1e3 for x in solutions.speed(N, HQ, D, listed, ms))


def diagonal_left_out(N, HQ, D, listed, ms):
    return 4 * N * HQ * D * listed / ms / 1e9, 4 * N * N / 2 * HQ * D / ms / 1e9


def wrong_way(N, HQ, D, listed, ms):
    """Milliseconds made longer, not shorter."""
    return tuple(x * 1e9 / (1e3 * 1e12) for x in solutions.speed(N, HQ, D, listed, ms))


def from_one_on(lists):
    ids = sorted({b for own in lists for b in own if b > 0})
    return ids, [sum((b in own) * 2**t for t, own in enumerate(lists)) for b in ids]


def ratio(order, G, S, T, union, BS, D):
    blocks = {"queries": S, "tiles": union * S / T}
    if order in blocks:
        return blocks[order] * BS * D * 4
    return S * G * (6 * D + 8)


def one_lse(order, G, S, T, union, BS, D):
    right = solutions.bytes_moved(order, G, S, T, union, BS, D)
    return right - (4 * S * G if order == "blocks" else 0)


def query_once(order, G, S, T, union, BS, D):
    right = solutions.bytes_moved(order, G, S, T, union, BS, D)
    return right - (2 * D * G * (S - 1) if order == "blocks" else 0)


def without_queries(N, HQ, D, listed, ms):
    return 4 * D * HQ * listed / ms / 1e9, 4 * D * HQ * (N + 1) / 2 / ms / 1e9


def queries_left_out_once(N, HQ, D, listed, ms):
    return 4 * D * HQ * listed / ms / 1e9, solutions.speed(N, HQ, D, listed, ms)[1]


def share_of_a_list(order, G, S, T, union, BS, D):
    return solutions.bytes_moved(order, G, S, T, S if order == "tiles" else union, BS, D)


def with_query(order, G, S, T, union, BS, D):
    right = solutions.bytes_moved(order, G, S, T, union, BS, D)
    return right + (2 * G * D if order == "queries" else 0)


def who(lists):
    ids = sorted({b for own in lists for b in own if b >= 0})
    return ids, [[t for t, own in enumerate(lists) if b in own] for b in ids]


def with_repeats(lists):
    ids = sorted(b for own in lists for b in own if b >= 0)
    return ids, [sum(1 << t for t, own in enumerate(lists) if b in own) for b in ids]


def halved(*orders: str) -> Callable:
    """Half of the bytes in some orders."""

    def attempt(order, *sizes):
        return solutions.bytes_moved(order, *sizes) / (2 if order in orders else 1)

    return attempt


def with_output(*orders: str, rows: int = 1) -> Callable:
    """With the final output in some orders, or with the query, too."""

    def attempt(order, G, S, T, union, BS, D):
        right = solutions.bytes_moved(order, G, S, T, union, BS, D)
        return right + (rows * 2 * G * D if order in orders else 0)

    return attempt


def as_text(lists):
    ids, bits = solutions.union_of_lists(lists)
    return ids, [bin(x) for x in bits]


def answered(exercise: str, **words: str) -> Callable:
    return lambda: getattr(solutions, exercise)() | words


ATTEMPTS = {
    "met": ("union_of_lists", met, {"blocks in the order in which they are met"}),
    "overwritten": ("union_of_lists", overwritten, {"the last query alone"}),
    "counted": ("union_of_lists", counted, {"counting who lists a block"}),
    "once": ("bytes_moved", once, {"partials that are written and never read"}),
    "no lse": ("bytes_moved", without_lse, {"partials without their log-sum-exp"}),
    "whole tile": ("bytes_moved", whole_tile, {"a tile's bytes for one query"}),
    "square": ("speed", full_square, {"counting the pairs of the future"}),
    "diagonal": ("speed", diagonal_left_out, {"half of the square"}),
    "wrong way": (
        "speed",
        wrong_way,
        {"milliseconds multiplied where they are to be divided"},
    ),
    "doubled": (
        "speed",
        lambda *sizes: tuple(2 * x for x in solutions.speed(*sizes)),
        {"counting everything twice"},
    ),
    "from 1": ("union_of_lists", from_one_on, {"block 0 taken for an empty slot"}),
    "ratio": ("bytes_moved", ratio, {"`union` taken for a ratio"}),
    "one lse": (
        "bytes_moved",
        one_lse,
        {"a log-sum-exp of 2 bytes, or one that is moved once"},
    ),
    "query once": ("bytes_moved", query_once, {"queries that are read once for all slots"}),
    "seconds": ("speed", in_seconds, {"milliseconds taken for seconds"}),
    "no T": (
        "speed",
        lambda *sizes: tuple(1e12 * x for x in solutions.speed(*sizes)),
        {"operations a second, without the T"},
    ),
    "raw": (
        "speed",
        lambda *sizes: tuple(1e9 * x for x in solutions.speed(*sizes)),
        {"operations a millisecond"},
    ),
    "no N": ("speed", without_queries, {"the keys of one query"}),
    "no N once": ("speed", queries_left_out_once, {"the keys of one query"}),
    "one number": (
        "speed",
        lambda *sizes: solutions.speed(*sizes)[0],
        {"returning one number"},
    ),
    "one number, N and ms": (
        "speed",
        lambda N, HQ, D, listed, ms: 4 * D * HQ * listed / ms / 1e12,
        {"returning one number"},
    ),
    "one number, 2 and ms": (
        "speed",
        lambda N, HQ, D, listed, ms: 2 * D * HQ * N * listed / ms / 1e12,
        {"returning one number"},
    ),
    "one number, 2 and N": (
        "speed",
        lambda N, HQ, D, listed, ms: 2 * D * HQ * listed / ms / 1e9,
        {"returning one number"},
    ),
    "dense alone": (
        "speed",
        lambda *sizes: solutions.speed(*sizes)[1],
        {"returning one number"},
    ),
    "as text": ("union_of_lists", as_text, {"text in place of a number"}),
    "no values of a list": ("bytes_moved", halved("queries"), {"keys without values"}),
    "no values of a tile": ("bytes_moved", halved("tiles"), {"keys without values"}),
    "half": ("bytes_moved", halved(*pictures.ORDERS), {"counting numbers in place of bytes"}),
    "half of the rows": (
        "bytes_moved",
        halved("blocks"),
        {"counting numbers in place of bytes"},
    ),
    "output": ("bytes_moved", with_output("blocks"), {"counting the final output"}),
    "every output": (
        "bytes_moved",
        with_output(*pictures.ORDERS),
        {"counting the final output"},
    ),
    "query and output": (
        "bytes_moved",
        with_output("queries", "tiles", rows=2),
        {"the query's rows where only blocks count"},
    ),
    "one list": ("bytes_moved", share_of_a_list, {"a share of one list"}),
    "query": ("bytes_moved", with_query, {"the query's rows where only blocks count"}),
    "who": ("union_of_lists", who, {"a list of queries in place of a number"}),
    "repeats": ("union_of_lists", with_repeats, {"a block as often as it is listed"}),
    "A and C": (
        "what_is_wrong",
        answered("what_is_wrong", A="first call", C="warm cache"),
        {"“first call” for A", "“warm cache” for C"},
    ),
    "tiles everywhere": (
        "choose_order",
        answered("choose_order", C="tiles", D="tiles"),
        {"“tiles” for C", "“tiles” for D"},
    ),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it, which explains all of it."""
    verdict = judge(KNOWN[name], attempt)
    assert set(verdict.misconceptions) == named
    assert "does not explain everything" not in verdict.text


# -- benchmarks as readers write them --


def with_warm_ups(count: int, median: Callable) -> Callable:
    """Right: several calls that do not count, theirs first in each pair."""

    def time_in_pairs(ours, theirs, flush, wait, clock, runs):
        found: dict[Callable, list[float]] = {ours: [], theirs: []}
        for run in range(runs + count):
            for call in (theirs, ours):
                flush()
                wait()
                start = clock()
                call()
                wait()
                found[call] += [(clock() - start) * 1000] * (run >= count)
        return [median(found[call]) for call in (ours, theirs)]

    return time_in_pairs


def simplest(ours, theirs, flush, wait, clock, runs):
    start = clock()
    ours()
    middle = clock()
    theirs()
    return 1000 * (middle - start), 1000 * (clock() - middle)


def with_wait(ours, theirs, flush, wait, clock, runs):
    start = clock()
    ours()
    wait()
    middle = clock()
    theirs()
    wait()
    return 1000 * (middle - start), 1000 * (clock() - middle)


def in_a_row(ours, theirs, flush, wait, clock, runs):
    """All runs of one, divided by their number; cold, and after a first call."""
    times = []
    for call in (ours, theirs):
        call()
        wait()
        own = []
        for _ in range(runs):
            flush()
            wait()
            start = clock()
            call()
            wait()
            own.append(1e3 * (clock() - start))
        times.append(statistics.median(own))
    return tuple(times)


def averaged(ours, theirs, flush, wait, clock, runs):
    times = []
    for call in (ours, theirs):
        call()
        wait()
        start = clock()
        for _ in range(runs):
            call()
        wait()
        times.append(1e3 * (clock() - start) / runs)
    return tuple(times)


@pytest.mark.parametrize(
    ("attempt", "held", "named"),
    [
        (with_warm_ups(1, statistics.median), 6, ()),
        (with_warm_ups(3, lambda x: sorted(x)[len(x) // 2]), 6, ()),
        (simplest, 1, ("stopping the clock before the work is done",)),
        (with_wait, 2, ("counting the first call",)),
        (averaged, 3, ("a mean in place of a median",)),
        (in_a_row, 5, ("all runs of one, then all of the other",)),
        (lambda *given: None, 0, ()),
    ],
    ids=["warm-up", "three warm-ups", "simplest", "wait", "averaged", "in a row", "nothing"],
)
def test_a_benchmark_is_free_in_form(attempt: Callable, held: int, named: tuple) -> None:
    """Each holds the stages that it takes care of, and the mistake after them is named."""
    verdict = judge(KNOWN["time_in_pairs"], attempt)
    assert (verdict.held, verdict.misconceptions) == (held, named)


def test_a_machine_that_is_not_real_is_the_same_for_each_attempt() -> None:
    e = KNOWN["time_in_pairs"]
    assert [judge(e, e.solution).held for _ in range(2)] == [6, 6]


@pytest.mark.parametrize("order", pictures.ORDERS)
def test_one_mistake_in_one_order_is_told_as_one(order: str) -> None:
    """Where the other orders are right, no second mistake is made up."""
    e = KNOWN["bytes_moved"]
    for mistake in e.misconceptions:

        def attempt(asked, *sizes, wrong=mistake.wrong):
            return (wrong if asked == order else solutions.bytes_moved)(asked, *sizes)

        verdict = judge(e, attempt)
        assert verdict.outcome == "right" or len(verdict.misconceptions) == 1, mistake.wrong
        assert "does not explain everything" not in verdict.text


@pytest.mark.parametrize(
    ("attempt", "second"),
    [
        (lambda N, HQ, D, listed, ms: 4 * D * HQ * listed / ms / 1e9, "the keys of one query"),
        (
            lambda N, HQ, D, listed, ms: 4 * D * HQ * N * listed / ms / 1e12,
            "milliseconds taken for seconds",
        ),
        (
            lambda N, HQ, D, listed, ms: 2 * D * HQ * N * listed / ms / 1e9,
            "counting one product, or no additions",
        ),
    ],
    ids=["no N", "milliseconds", "no additions"],
)
def test_one_number_is_told_first(attempt: Callable, second: str) -> None:
    assert judge(KNOWN["speed"], attempt).misconceptions == ("returning one number", second)


def test_partials_of_random_lists_are_told_by_their_memory() -> None:
    """What is said of key blocks for shape A is what the bytes and the bars are."""
    verdict = judge(KNOWN["choose_order"], answered("choose_order", A="blocks"))
    sizes = (16, pictures.SLOTS, pictures.T, 51, pictures.BLOCK, pictures.WIDTH)
    kib = {order: solutions.bytes_moved(order, *sizes) / 1024 for order in pictures.ORDERS}
    assert f"{kib['blocks']:.0f} KiB instead of {kib['queries']:.0f}" in verdict.text
    bars = pictures.order_cost("blocks", 16, 3.18).times
    assert max(bars, key=bars.__getitem__) == "memory"


def test_another_way_is_right_too() -> None:
    assert judge(KNOWN["union_of_lists"], by_or).outcome == "right"


# the reader's kernels stand here in full, as Triton reads a kernel's source from its file


def asks_a_tile():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            if (listed_by >> t) & 1:
                scores_max = tl.maximum(scores_max, s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def keeps_the_last():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            scores_max = tl.where(((listed_by >> t) & 1) > 0, s, scores_max)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def reduces_two():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            s = tl.where(((listed_by >> t) & 1) > 0, s, float("-inf"))
            scores_max = tl.max(scores_max, s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def takes_pythons():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            s = tl.where(((listed_by >> t) & 1) > 0, s, float("-inf"))
            scores_max = max(scores_max, s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def takes_pythons_the_other_way():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            s = tl.where(((listed_by >> t) & 1) > 0, s, float("-inf"))
            scores_max = max(s, scores_max)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


@pytest.mark.parametrize(
    ("attempt", "named"),
    [
        (reduces_two, "`tl.max` of two tiles"),
        (takes_pythons, "Python's `max` of two tiles"),
        (takes_pythons_the_other_way, "Python's `max` of two tiles"),
    ],
)
def test_a_maximum_that_is_not_of_two_tiles_is_named(attempt: Callable, named: str) -> None:
    e = KNOWN["walk_step"]
    if e.missing:
        pytest.skip(e.missing[0])
    if environment.detect().device != "cpu":
        pytest.skip("a compiler refuses `tl.max`, and takes `max` for `tl.maximum`")
    assert judge(e, attempt).misconceptions == (named,)


def bits_as_a_condition():
    """Right; Triton warns that a condition should be one."""

    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            s = tl.where((listed_by >> t) & 1, s, float("-inf"))
            scores_max = tl.maximum(scores_max, s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def mixes_the_queries():
    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)
            s = tl.where(((listed_by >> t) & 1) > 0, s, float("-inf"))
            scores_max = tl.max(s, axis=0) + tl.zeros_like(s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def test_a_maximum_over_the_queries_is_named_once() -> None:
    """It also overwrites what earlier steps found, which needs no second remark."""
    e = KNOWN["walk_step"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(e, mixes_the_queries)
    assert verdict.misconceptions == ("the largest score of all queries",)


def test_a_last_listed_score_is_named() -> None:
    e = KNOWN["walk_step"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert judge(e, keeps_the_last).misconceptions == (
        "keeping the score of the last listed block",
    )


def test_an_if_over_a_tile_is_told_from_no_mask() -> None:
    """Interpreted, it is always true for a tile; compiled, it is an error that says so."""
    e = KNOWN["walk_step"]
    if e.missing:
        pytest.skip(e.missing[0])
    if environment.detect().device != "cpu":
        pytest.skip("a compiler refuses this kernel")
    assert judge(e, asks_a_tile).misconceptions == ("an `if` that asks a whole tile",)


def test_bits_as_a_condition_are_right_without_a_warning() -> None:
    e = KNOWN["walk_step"]
    if e.missing:
        pytest.skip(e.missing[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert judge(e, bits_as_a_condition).outcome == "right"


@pytest.mark.parametrize("name", ["what_is_wrong", "choose_order"])
def test_a_wrong_word_does_not_give_the_right_one_away(name: str) -> None:
    ours = getattr(solutions, name)()
    letter, right = next(iter(ours.items()))
    other = next(word for word in ours.values() if word != right)
    verdict = judge(KNOWN[name], lambda: ours | {letter: other})
    assert verdict.text.startswith(f"Not yet. You said “{other}” for {letter}.")
    assert "case" not in verdict.text
    assert right not in verdict.text.replace(f"“{other}”", "")


def test_words_that_are_none_are_told() -> None:
    told = judge(KNOWN["choose_order"], answered("choose_order", B="tile")).text
    assert "a word for B that is none of ours. The words are: queries, tiles, blocks." in told
    assert "raised" not in told
    told = judge(KNOWN["choose_order"], lambda: ["queries"] * 6).text
    assert "expected a dictionary" in told


def test_capitals_do_not_count() -> None:
    words = {"A": "Warm cache", "B": "dense flops", "C": "FIRST CALL", "E": "no_wait"}
    assert judge(KNOWN["what_is_wrong"], answered("what_is_wrong", **words)).outcome == "right"


def test_an_open_letter_is_told() -> None:
    verdict = judge(KNOWN["what_is_wrong"], answered("what_is_wrong", B=...))
    assert verdict.misconceptions == ("nothing yet for B",)
    del (answers := dict(solutions.what_is_wrong()))["C"]
    verdict = judge(KNOWN["what_is_wrong"], lambda: answers)
    assert verdict.misconceptions == ("nothing yet for C",)


def test_of_many_wrong_words_two_are_told_at_a_time() -> None:
    verdict = judge(KNOWN["what_is_wrong"], lambda: dict.fromkeys("ABCDE", "no wait"))
    named = ("“no wait” for A", "“no wait” for B")
    assert verdict.misconceptions == named
    assert "does not explain everything" not in verdict.text
    rest = {"A": "warm cache", "B": "dense FLOPs"}
    verdict = judge(KNOWN["what_is_wrong"], lambda: dict.fromkeys("ABCDE", "no wait") | rest)
    assert verdict.misconceptions == ("“no wait” for C", "“no wait” for D")


@pytest.mark.parametrize("name", ["what_is_wrong", "choose_order"])
def test_gaps_are_not_attempted_yet(name: str) -> None:
    letters = getattr(solutions, name)()
    assert judge(KNOWN[name], lambda: dict.fromkeys(letters, ...)).outcome == "not attempted"


def test_the_frame_that_is_given_is_the_solutions() -> None:
    """All of its lines but the gap stand in the solution, in this order."""
    import inspect

    frame = KNOWN["walk_step"].statement.split("```")[1].removeprefix("python").splitlines()
    lines = [line.split("#")[0].strip() for line in frame if line.strip() and "..." not in line]
    source = inspect.getsource(solutions.walk_step).splitlines()
    solution = iter(line.split("#")[0].strip() for line in source)
    assert len(lines) >= 8
    assert all(line in solution for line in lines)


# -- pictures --


def test_one_query_a_program_moves_what_the_costs_say() -> None:
    N, D = pictures.TOKENS, pictures.WIDTH
    for group, (HQ, H) in pictures.HEADS.items():
        exact = costs.selected_attention(N, N, D, HQ=HQ, H=H)
        drawn = pictures.order_cost("queries", group, 1.0)
        assert drawn.cached == pytest.approx(exact.bytes, rel=0.01)
        assert drawn.flops == pytest.approx(exact.flops * max(1, 16 // group), rel=1e-6)


def test_a_tile_that_agrees_loads_a_quarter() -> None:
    one, four, none = (
        pictures.order_cost(order, 16, overlap).cached
        for order, overlap in (("queries", 1.0), ("tiles", 1.0), ("tiles", 4.0))
    )
    assert four < 0.28 * one
    assert none == pytest.approx(one)


def test_no_operator_is_above_the_arithmetic_of_the_machine() -> None:
    r = pictures.rates()
    points = pictures.operators()
    assert all(o.flops_per_s < r.peak for o in points)
    over = {o.name for o in points if o.bytes_per_s > r.memory}
    assert over == {"attention to lists", "window"}


def test_real_unions_are_the_benchmarks_overlap() -> None:
    tiles = pictures.tiles_of_lists()
    unions = [len(solutions.union_of_lists(tile)[0]) for tile in tiles]
    entries = [sum(block >= 0 for own in tile for block in own) for tile in tiles]
    ratio = sum(unions) * pictures.T / sum(entries)
    assert ratio == pytest.approx(drawing.overlap(pictures.real_lists()[None]))


def test_random_lists_have_that_union() -> None:
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        lists = [3 + torch.randperm(1021, generator=g)[:13] for _ in range(4)]
        found.append(3 + len(torch.cat(lists).unique()))
    assert sum(found) / len(found) == pytest.approx(pictures.random_union(), rel=0.01)


def test_times_of_all_orders_are_read_where_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "tokens": 65_536, "kv_heads": 4, "group": 16, "width": 128, "operator": "selected",
        "kernel": "triton", "change": "", "direction": "forward", "lists": "smooth",
        "overlap": 1.02,
    }  # fmt: skip
    rows = [row | {"order": order, "ms": ms} for order, ms in (("queries", 12.0), ("tiles", 6.0))]
    rows += [row | {"order": "auto", "ms": 6.5}, row | {"order": "tiles", "ms": None}]
    rows += [row | {"order": "tiles", "ms": 1.0, "tokens": 8192}]
    file = tmp_path / "performance_h200.json"
    told = {"machine": "NVIDIA H200", "torch": "2", "triton": "3", "rows": rows}
    file.write_text(json.dumps(told))
    # measured before there were orders: two more kinds of lists, of which one is there anew
    old = [row | {"change": "attention to lists", "lists": kind, "ms": 13.0, "overlap": overlap}
           for kind, overlap in (("random", 3.18), ("smooth", 1.02))]  # fmt: skip
    (tmp_path / "selection_h200.json").write_text(json.dumps({"rows": old}))
    (tmp_path / "triton_backward_groups_h200.json").write_text(json.dumps({"rows": []}))
    pictures.rates()  # of the files that are stored
    monkeypatch.setattr(pictures, "PERFORMANCE", file)
    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    pictures.stored.cache_clear()
    try:
        assert pictures.recorded() == {
            (16, "queries", "random"): (13.0, 3.18),
            (16, "queries", "smooth"): (12.0, 1.02),
            (16, "tiles", "smooth"): (6.0, 1.02),
        }
        assert pictures.measured_ms("tiles", 16, 1.02) == 6.0
        paper = pictures.order_cost("tiles", 16, 1.02).ms
        assert ("tiles", paper, 6.0) in pictures.paper_and_recorded()
        assert pictures.measured_ms("tiles", 16, 3.18) is None
        # random lists were measured in one order: nothing to compare
        assert [x.split() for x in pictures.recorded_table()[3:]] == [
            ["16", "smooth", "12.0", "6.0", "–"]
        ]
    finally:
        pictures.stored.cache_clear()


# -- what the chapter tells --


def test_what_is_told_of_the_machine_is_what_was_measured() -> None:
    told, points = text(), {o.name: o for o in pictures.operators()}
    lists, dense = points["attention to lists"], points["dense, cuDNN"]
    assert f"takes {lists.ms:.1f} ms for 65,536 tokens and random lists" in told
    assert f"{dense.flops / 1e13:.1f} · 10¹³ operations" in told
    assert f"ms reports {round(dense.flops / lists.ms / 1e9, -2):,.0f} TFLOP/s" in told
    assert f"So is {lists.flops_per_s / 1e12:.0f} TFLOP/s bad" in told
    assert 0.24 < lists.flops_per_s / dense.flops_per_s < 0.30
    assert 9 <= dense.ms / lists.ms < 9.8
    assert f"would need {pictures.listed_ms():.1f} ms, and the kernel took {lists.ms:.1f}" in told
    assert pictures.listed_ms() > 2 * lists.ms
    nsa = [o.ms for o in points.values() if not o.name.startswith("dense")]
    assert lists.ms == max(nsa)  # "NSA's slowest kernel"
    rates = pictures.rates()
    assert f"reach {rates.products / 1e12:.0f} TFLOP/s in cuDNN's dense attention, and 161" in told
    assert f"or {rates.peak / rates.memory:.0f} operations a byte" in told
    assert dense.intensity < rates.peak / rates.memory  # left of the ridge, beside the slope
    served = f"{rates.l2 / 1e12:.1f}"
    assert f"we chose {served} TB/s" in told
    assert f"989 / {served}, or {rates.peak / rates.l2:.0f} operations a byte" in told
    assert f"over the {served} TB/s that we chose" in told
    assert lists.intensity < rates.peak / rates.l2 < dense.intensity
    assert f"cuDNN does {dense.intensity:.0f} operations a byte" in told
    runs = {
        row["change"]: row["ms"] for row in pictures.rows_of("triton_forward_h200.json", group=16)
    }
    here = runs["descriptors"]
    assert f"takes {lists.ms:.1f} ms in one session and {here:.1f} in another" in told
    assert f"we take the fastest, {dense.ms:.1f} ms" in told
    assert dense.ms == min(pictures.dense_runs().values())
    tuned = [ms for times in pictures.tuned().values() for ms in times.values()]
    assert 1.9 < max(tuned) / min(tuned) < 2.1


def test_the_coloured_choice_of_tiles_is_the_packages() -> None:
    here = environment.detect()
    if here.triton is None:
        pytest.skip("Triton is not installed")
    from nsa_tutorial.kernels.triton.launch_options import launch_options

    taken = launch_options(G=16, D=128, DV=128, BS=64, itemsize=2, shared_memory=227 * 1024)
    chosen = {"warps": "num_warps", "stages": "num_stages", "tokens": "BT"}
    assert {name: taken[option] for name, option in chosen.items()} == pictures.CHOSEN


def test_what_is_told_of_the_orders_is_what_was_measured() -> None:
    told, shares = text(), []
    ms = {setting: ms for setting, (ms, _) in pictures.recorded().items()}
    for group, order, kinds in (
        (16, "tiles", ("smooth", "trained")),
        (4, "blocks", ("smooth", "random")),
    ):
        for kind in kinds:
            before, after = ms[group, "queries", kind], ms[group, order, kind]
            assert f"from {before:.1f} to {after:.1f} ms" in told
            shares.append(after / before)
    for (group, order, kind), (_, overlap) in pictures.recorded().items():
        best = pictures.best_order(group, overlap)  # half the time on paper, or less
        if order == "queries" != best and (group, best, kind) in ms:
            shares.append(ms[group, best, kind] / ms[group, "queries", kind])
    assert len(shares) == 4 + 5
    assert f"took between {100 * min(shares):.0f} and {100 * max(shares):.0f} % of it" in told
    why = KNOWN["choose_order"].why
    assert f"{ms[16, 'queries', 'trained']:.1f} to {ms[16, 'tiles', 'trained']:.1f} ms" in why
    assert f"C from {ms[4, 'queries', 'random']:.1f} to {ms[4, 'blocks', 'random']:.1f} ms" in why
    tiles, queries = (ms[16, order, "random"] for order in ("tiles", "queries"))
    assert f"{tiles:.1f} ms instead of {queries:.1f}" in told
    assert f"one query a program takes {ms[16, 'queries', 'smooth']:.1f} ms" in source("picture")
    ratios: dict[str, list[float]] = {order: [] for order in pictures.ORDERS}
    for order, paper, recorded in pictures.paper_and_recorded():
        ratios[order].append(recorded / paper)
    assert max(ratios["queries"]) < 1.01
    assert all(1.4 <= ratio <= 1.7 for ratio in ratios["tiles"])
    assert all(2.4 < ratio < 2.8 for ratio in ratios["blocks"])
    paper = pictures.order_cost("blocks", 4, 3.18).ms
    assert f"Paper explains {paper:.1f} of these {ms[4, 'blocks', 'random']:.1f} ms" in told


def test_a_profile_is_read_as_it_is_written() -> None:
    """Names of launches, and counters with a unit, without one, and with a comma."""
    found = pictures.profiled()
    assert set(found) == set(pictures.KERNELS.values())
    assert all(len(counters) == 11 for counters in found.values())
    for name, counters in found.items():
        assert 0 < counters["DRAM Throughput"] <= 100, name
    assert found["one query a program"]["L2 Hit Rate"] == 97.78
    assert found["merging the partials"]["Dynamic Shared Memory Per Block"] == 16
    assert found["a block of keys a program"]["Local Memory Spilling Requests"] == 632_776
    head, row = pictures.profile_table("tiles of 4 queries")
    assert len(head) == len(row)
    assert row.split()[-6:] == ["smooth", "16", "10", "61", "43", "93"]


def test_the_lists_of_a_profile_are_those_that_its_head_names() -> None:
    """Blocks of keys, and their merge, with random lists; the others with smooth ones."""
    head = " ".join(pictures.PROFILE.read_text().split("ncu --clock")[0].split())
    assert "Four key/value heads of 16 query heads and smooth lists" in head
    assert "for the key blocks outside, eight heads of four and random lists" in head
    asked = {name for name, (lists, _) in pictures.PROFILED.items() if lists == "random"}
    assert asked == {pictures.TOLD["blocks"], "merging the partials"}


def test_what_is_told_of_the_profile_is_what_was_counted() -> None:
    told, found = text(), pictures.profiled()
    lists, counters = found["one query a program"], pictures.PARTS.values()
    assert pictures.busiest("one query a program") == "L2"
    L2, memory = (lists[pictures.PARTS[part]] for part in ("L2", "memory"))
    assert f"It does {L2:.0f} % of what it can, and memory {memory:.0f} %." in told
    assert f"Of 100 loads, L2 serves {lists['L2 Hit Rate']:.0f}." in told
    assert f"Of the issue slots, {lists['Issue Slots Busy']:.0f} % are used" in told
    assert f"There the kernel took {lists['Duration']:.1f} ms" in told
    assert pictures.rate_of_l2().endswith("12.0 TB/s; if that is 89 % of L2, it can do 13.4")
    served = pictures.rates().l2 / 1e12
    assert 0.72 < served / 13.4 < 0.78 and f"{served:.1f} TB/s are three quarters of it" in told
    assert f"session took {lists['Duration']:.1f} ms for the first" in told
    assert pictures.CHOSEN["warps"] == 1  # "16 rows and one warp"
    merge = found["merging the partials"]
    L2, memory = (merge[pictures.PARTS[part]] for part in ("L2", "memory"))
    assert f"keeps L2 {L2:.0f} % busy, and memory {memory:.0f} %" in told
    tiles = found["tiles of 4 queries"]
    assert f"Tiles keep no part more than {max(tiles[x] for x in counters):.0f} % busy" in told
    partial = found["a block of keys a program"]
    assert f"keys keeps no part more than {max(partial[x] for x in counters):.0f} % busy" in told


def test_what_is_told_of_a_models_lists_is_what_was_measured() -> None:
    told, file = text(), pictures.stored("model_lists_h200.json")
    most = max(head["overlap"] for head in file["heads"])
    assert f"up to {most:.2f} times a list" in told
    asked = {"tokens": file["tokens"], "group": file["group"], "lists": "trained"}
    drawn = pictures.rows_of(pictures.PERFORMANCE.name, **asked)
    assert drawn
    assert max(row["overlap"] for row in drawn) < min(x["overlap"] for x in file["heads"])
    ms = {row["order"]: row["ms"] for row in file["rows"] if row["direction"] == "forward"}
    assert f"with {ms['tiles']:.1f} ms instead of {ms['queries']:.1f}" in told
    assert pictures.lists_of_a_model().split()[3:6] == [f"{ms[x]:.1f}" for x in pictures.ORDERS]


def test_nsa_overtakes_dense_attention_where_it_is_told() -> None:
    ms = pictures.native_sizes()

    def takes(tokens: int, kernel: str) -> float:
        return sum(ms[tokens, kernel, direction] for direction in ("forward", "backward"))

    faster = {n for n, _, _ in ms if takes(n, "triton") < takes(n, "dense, cuDNN")}
    slower = {n for n, _, _ in ms} - faster
    assert f"between {max(slower):,} and {min(faster):,} tokens" in text()
    sizes = [ms[n, "triton", "forward"] for n in (2048, 8192, 16_384, 65_536)]
    assert sizes[1] < 2 * sizes[0] and sizes[3] > 6 * sizes[2]  # launches, and work
    assert f"Smooth lists: from {min(faster):,} tokens on" in pictures.draw_sizes().finding


def test_nothing_is_slower_than_before() -> None:
    """By more than 2 %, at any size and pass, than the earlier version in the same run."""
    before, after = (
        {(x["tokens"], x["lists"], x["direction"]): x["ms"] for x in pictures.stored(name)["rows"]}
        for name in ("native_before_h200.json", "native_sizes_h200.json")
    )
    assert len(before) == 12
    assert all(after[what] <= 1.02 * ms for what, ms in before.items())
    assert len(pictures.before_table()) == 2 + len(before) // 2


def test_what_registers_and_fewer_steps_save_is_what_was_recorded() -> None:
    """Of all of NSA, in one session on an H100; and the clocks of a product and of its factors."""
    before, after = (
        {(x["tokens"], x["lists"], x["direction"]): x["ms"] for x in pictures.stored(name)["rows"]}
        for name in ("native_before_h100.json", "native_sizes_h100.json")
    )
    assert len(before) == 12
    saved = [100 * (1 - after[what] / ms) for what, ms in before.items()]
    assert f"{min(saved):.0f} to {max(saved):.0f} % less time on an H100" in text()
    rows, columns, width, itemsize = 64, 64, 128, 2
    reading = (rows + columns) * width * itemsize / 128
    # 989 TFLOP/s of 132 multiprocessors at 1.83 GHz
    multiplying = 2 * rows * columns * width / (989e12 / 132 / 1.83e9)
    assert reading == pytest.approx(multiplying, rel=0.01) == 256
    assert "take 256 clocks to read" in text() and "product takes 256 clocks, too" in text()


def test_what_is_told_of_the_host_is_what_was_recorded() -> None:
    """Launches, kernels and host of all of NSA, and where the bytes went that the sum saves."""
    told, runs = text(), pictures.host_runs()
    before, after = (runs[8192, way, "forward"] for way in pictures.WAYS)
    assert f"takes {len(after.kernels)} launches. For 2,048 tokens" in told
    assert f"Of its {len(before.kernels)} launches" in told
    times = f"host takes {before.host_ms:.2f} ms and the kernels {before.device_ms:.2f}"
    assert f"{times}, so fewer launches alone would leave {before.device_ms:.2f} ms" in told
    (name, plain), *sums = before.kernels[-7:]
    assert name == after.kernels[-1][0] == "attend_kernel"  # the window's
    assert f"takes {after.kernels[-1][1]:.2f} ms, and without the sum {plain:.2f}" in told
    assert f"PyTorch's sum takes {sum(ms for _, ms in sums):.2f}" in told
    assert f"the call falls from {before.ms:.2f} to {after.ms:.2f} ms" in told
    before, short = (runs[2048, way, "forward"] for way in pictures.WAYS)
    assert f"{sum(ms < 2e-3 for _, ms in before.kernels)} run for less than 2 µs" in told
    assert f"runs these kernels in {short.device_ms:.2f} ms together" in told
    assert f"NSA would take {short.device_ms:.2f} ms at best" in told
    question, reason = (getattr(PREDICTED["short_call"], x) for x in ("question", "reason"))
    assert f"the {len(short.kernels)} kernels of NSA's forward in {short.device_ms:.2f}" in question
    assert f"needs {short.host_ms:.2f} ms to queue the {len(short.kernels)} launches" in reason
    dense = runs[2048, "dense", "forward"]
    assert f"attention takes {len(dense.kernels)}, and {dense.ms:.2f} ms" in told
    of_65 = [runs[n, "branch by branch", "forward"] for n in (2048, 8192)]
    assert [len(run.kernels) for run in of_65] == [65, 65]
    times = f"{of_65[0].host_ms:.2f} ms at 2,048 tokens and {of_65[1].host_ms:.2f} ms at 8,192"
    assert f"The same 65 launches took it {times}" in told
    assert short.host_ms > short.device_ms


def test_what_is_told_of_the_backward_is_what_was_recorded() -> None:
    told, runs = text(), pictures.host_runs()
    of_lists, of_windows, of_summaries = (
        ms for name, ms in runs[2048, "at once", "backward"].kernels if name == "dkv_kernel"
    )
    assert of_lists > of_windows > of_summaries
    assert f"and the kernel takes {of_summaries:.2f} ms" in told
    before, after = (runs[32_768, way, "backward"] for way in pictures.WAYS)
    assert before.host_ms < before.device_ms / 4  # hidden
    assert f"falls from {before.ms:.1f} to {after.ms:.1f} ms" in told
    deltas = [ms for name, ms in before.kernels if name == "delta_kernel"]
    sums = [ms for name, ms in after.kernels if name == "branch_numbers_kernel"]
    replaced = [ms for _, ms in before.kernels[:9]] + deltas
    assert [len(sums), len(replaced)] == [1, 12]
    assert f"One kernel of {sum(sums):.1f} ms computes" in told
    assert f"It stands in for 12, which took {sum(replaced):.1f} ms" in told


def test_short_walks_make_many_programs() -> None:
    """`dkv_kernel` of the summaries at 2,048 tokens: with the longest chunks, and as its launch
    cuts them."""
    if environment.detect().triton is None:
        pytest.skip("Triton is not installed")
    from nsa_tutorial.kernels.tables import chunks, runs
    from nsa_tutorial.kernels.triton.launch_options import summary_dkv_options
    from nsa_tutorial.sparse.compression import num_summaries

    told, tile = text(), summary_dkv_options(128, 128, itemsize=2)["BT"]
    tiles = 4 * -(-num_summaries(2048, 32, 16) // tile)  # of all KV heads
    most = chunks.CHUNK_ROWS[2] // 16
    programs = f"would have {2048 // most * tiles} programs at 2,048 tokens"
    assert f"In walks of {most:,} queries" in told and programs in told
    cuts, rows = runs.chunks_of_rows(2048, tiles, 16, 4 * tile * 256, 2)
    assert f"Walks of {rows} queries make {cuts * tiles} programs" in told


def test_a_call_takes_the_longer_of_two_times() -> None:
    """In every recorded call of NSA with smooth lists; and a line of launches, spread evenly, ends
    where the clock says if the host is the longer one."""
    for (_, way, _), run in pictures.host_runs().items():
        if way != "dense":
            assert run.ms == pytest.approx(max(run.host_ms, run.device_ms), rel=0.08)
    assert pictures.draw_host().finding.endswith("to within 7 %")
    for way in pictures.WAYS:
        run = pictures.host_runs()[2048, way, "forward"]
        assert run.timeline[-1][1] == pytest.approx(run.ms, rel=0.08)
        assert all(done <= begin for (_, done), (begin, _) in pairwise(run.timeline))
    short, long = (pictures.host_runs()[n, "at once", "forward"] for n in (2048, 8192))
    assert short.host_ms > short.device_ms
    assert long.host_ms < long.device_ms  # "a long text hides the host"


def test_shapes_are_compared_with_one_query_a_program() -> None:
    found = pictures.shape_ratios()
    assert {len(ratios) for ratios in found.values()} == {4}
    slower = sum(ratio > 1.05 for ratios in found.values() for ratio in ratios.values())
    assert pictures.draw_shapes().finding.endswith(f"{slower} of {4 * len(found)} runs")


def test_what_is_told_of_unions_is_what_is_drawn() -> None:
    told = text()
    unions = [len(set().union(*tile)) for tile in pictures.tiles_of_lists(only_full=True)]
    mean = sum(unions) / len(unions)
    assert f"{mean:.1f} blocks, where one list has 8" in told
    trained = pictures.recorded()[16, "queries", "trained"][1]
    taken = f"we take {trained:.2f} times a list, or {trained * pictures.SLOTS:.0f} blocks"
    assert f"For lists of {pictures.SLOTS} {taken}" in told
    drawn = len(set().union(*pictures.neighbours()))
    assert abs(drawn - mean) < 1  # a typical tile
    assert f"A union of {drawn} instead of 32" in told
    assert f"the tile loads {pictures.random_union():.0f} blocks" in told
    assert pictures.random_union() / pictures.SLOTS > 3  # "more than three times the products"


def test_groups_of_four_have_twice_the_work() -> None:
    """So their time tells no explanation from another: "twice the KV heads"."""
    (_, H), (_, more) = pictures.HEADS[16], pictures.HEADS[4]
    assert more == 2 * H
    assert f"over {pictures.rates().products / 1e12:.0f} TFLOP/s" in text()


def test_two_programs_share_a_multiprocessor() -> None:
    size = sum(costs.tile_bytes_on_chip(64, 64, pictures.WIDTH).values())
    assert f"takes {size:,} bytes of shared memory" in text()
    assert 228 * 1024 // size == 2


def test_progress_lists_exercises_in_the_chapters_order() -> None:
    cells = nbformat.read(NOTEBOOK, 4).cells
    asked = [c.source.split('"')[3] for c in cells if c.source.startswith("exercise(")]
    assert asked == list(KNOWN)


def test_the_minutes_are_told() -> None:
    minutes = {e.name: e.minutes for e in KNOWN.values()}
    names = ("what_is_wrong", "speed", "union_of_lists", "walk_step")
    optional = [minutes.pop(name) for name in names]
    assert f"{sum(minutes.values())} of them exercises" in text()
    parts = [int(n) for n in re.findall(r"#### .*? About (\d+) minutes", text())]
    assert f"Optional parts take about {sum(parts)} minutes more" in text()
    assert f"about {sum(parts)} minutes together" in text()
    assert parts[0] > optional[0]
    assert parts[1] > optional[1]
    assert parts[2] > sum(optional[2:])
    assert f"about {minutes['choose_order']} minutes" in text()


def test_constants_that_the_chapter_tells() -> None:
    here = environment.detect()
    if here.triton is None:
        pytest.skip("Triton is not installed")
    from nsa_tutorial.kernels.triton.selected import by_key_blocks_options as triton_key_block_tiles
    from nsa_tutorial.kernels.triton.selected import launch as triton_launch

    assert "in runs of heads and queries whose partials fit 1 GiB" in text()
    partials = pictures.TOKENS * pictures.HEADS[16][0] * pictures.SLOTS * pictures.WIDTH * 2
    assert f"partials take {partials / 2**30:.0f} GiB" in text()
    assert triton_key_block_tiles.WORKSPACE == 2**30
    # lists of four neighbours that agree are walked together, those that share little are not
    assert 1.29 / 4 < triton_launch.WORTHWHILE < 3.18 / 4
    assert f"The limit is {triton_launch.WORTHWHILE} times the blocks" in text()
    assert 10 / 32 < triton_launch.WORTHWHILE < 54 / 64
