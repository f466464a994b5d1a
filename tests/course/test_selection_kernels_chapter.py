"""Chapter 14's exercises: their solutions against the package, answers as readers write them; and
the kernels that it shows beside each other."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import costs, phases, predict, reveal
from nsa_tutorial.course.diffs import Edited
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import selection_kernels as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.kernels import running_top_n
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import selection_kernels as pictures
from nsa_tutorial.course.widgets.grouped_query_attention import H200_BYTES_PER_S
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.sparse import block_selection, compression
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("selection_kernels")
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "14_selection_kernels.ipynb"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OPTIONAL = ("group_mass", "running_list", "walk", "merge_lists", "pack")


# -- solutions --


@triton.jit
def leaving_kernel(Ids, n):
    for place in range(n):
        if place > 0:
            break
        tl.store(Ids + place, place)


@triton.jit
def endless_kernel(Ids, n):
    low = 0
    while low < n:
        low += 0
    tl.store(Ids, low)


@triton.jit
def listing_kernel(Ids, n):
    tl.store(Ids + tl.arange(0, 2), tl.arange(0, 2), mask=tl.arange(0, 2) < n)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("leaving_kernel[1,]", "has a `break`"),
        ("endless_kernel[1,]", "after 1 seconds"),
        ("listing_kernel", "A launch names its grid"),
    ],
)
def test_a_loop_that_is_left_or_has_no_end_and_a_launch_without_a_grid(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter runs the first, nothing but a limit ends the second, and the third is
    Python to it."""
    e = KNOWN["triton_select_blocks"]
    if e.missing:
        pytest.skip(e.missing[0])
    monkeypatch.setattr(solutions, "PATIENCE", 1)
    kernels = {x.__name__: x for x in (leaving_kernel, endless_kernel, listing_kernel)}
    source = f"""
def triton_select_blocks(q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale):
    ids = torch.full((1, 1, n), -1, dtype=torch.int32, device=q.device)
    {name}(ids, n)
    return ids
"""
    scope = {"torch": torch, **kernels}
    exec(source, scope)
    assert told in judge(e, scope["triton_select_blocks"]).text


def test_blocks_are_selected_as_the_operator_selects_them() -> None:
    """With one summary a block, on all cases of the exercise."""
    e = KNOWN["triton_select_blocks"]
    if e.missing:
        pytest.skip(e.missing[0])
    for case in e.cases:
        q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale = case.arguments()
        sizes = {"block_size": block_size, "length": block_size, "stride": block_size}
        right = ops.select_blocks(
            q[None], k_cmp[None], lse[None], top_n=n, num_initial=num_initial, num_keys=M,
            num_local=num_local, scale=scale, backend="reference", **sizes,
        )[0]  # fmt: skip
        assert torch.equal(solutions.triton_select_blocks(*case.arguments()), right), case.name


def test_the_weights_of_a_group_are_the_operators() -> None:
    """One query that sees all summaries: their softmax, head by head, summed."""
    here = environment.detect()
    if here.why_not("triton", here.device):
        pytest.skip(here.why_not("triton", here.device))
    G, D, M = 3, 8, 13
    q, k_cmp = draw(1, 1, G, D), draw(1, M, 1, D, seed=1)
    _, lse = ops.compressed_attention(
        q, k_cmp, k_cmp, num_keys=M, length=1, stride=1, return_lse=True, backend="reference"
    )
    mass = torch.zeros(M)
    tensors = [x.to(here.device) for x in (q[0, 0], k_cmp[0, :, 0], lse[0, 0], mass)]
    solutions.group_mass()[2,](*tensors, D**-0.5, LOG2_E, M, G, D=D, BT=8)
    right = torch.softmax(q[0, 0] @ k_cmp[0, :, 0].T * D**-0.5, 1).sum(0)
    torch.testing.assert_close(tensors[3].cpu(), right)


@pytest.mark.parametrize(("length", "stride"), [(32, 16), (4, 4), (5, 3), (7, 1)])
def test_the_walk_is_that_of_the_rows(length: int, stride: int) -> None:
    N, BQ, BT = 70, 8, 4
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    rows = compression.summary_rows(rows, N, length=length, stride=stride, cu_seqlens=None)
    for first in range(0, N - BQ, 3):
        seen = rows.num_visible[first : first + BQ]
        whole, steps = solutions.walk(first, BQ, BT, length, stride)
        assert whole * BT <= seen.min() < (whole + 1) * BT
        assert (steps - 1) * BT < seen.max() <= steps * BT or seen.max() == steps == 0


@pytest.mark.parametrize("BT", [1, 3, 8, 30])
def test_a_running_list_is_the_references(BT: int) -> None:
    """However the row is cut into steps; with equal scores."""
    NB, n = 19, 5
    score = (3 * draw(NB).abs()).round()
    for own in range(NB):
        expected = block_selection.choose(
            score[None, None, None], torch.tensor([own]), top_n=n, num_initial=1, num_local=2
        )[0, 0, 0]
        steps = [step.tolist() for step in score.split(BT)]
        found = solutions.running_list(steps, own, n, 1, 2)
        assert found == [i for i in expected.tolist() if i >= 0]


def test_a_merge_is_the_networks() -> None:
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        a, b = torch.randint(0, 12, (2, 8), generator=g).sort(-1, descending=True).values
        expected = running_top_n.best_of_two(a, b).tolist()
        assert solutions.merge_lists(a.tolist(), b.tolist()) == expected


def test_packed_scores_are_ordered_as_rounded_scores() -> None:
    """Down to the bits that ids leave, and of equal ones the lower id first."""
    scores, id_bits = draw(200).abs(), 8
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(1)).int()
    packed = solutions.pack(scores, ids, id_bits)
    assert ((2**id_bits - 1 - packed % 2**id_bits) == ids).all()
    rounded = (scores.view(torch.int32) >> id_bits).tolist()
    right = sorted(range(200), key=lambda i: (-rounded[i], int(ids[i])))
    assert packed.argsort(descending=True).tolist() == right


@pytest.mark.parametrize("n", [1, 4, 16, 40])
def test_a_pick_is_the_reference_s(n: int) -> None:
    """Equal scores, zeros, forced and hidden blocks; more places than blocks."""
    NB, own = 30, 22
    score = draw(NB, seed=n).clamp(min=0).mul(4).round()
    score = score.masked_fill(torch.arange(NB) == own, math.inf)
    expected = block_selection.choose(
        score[None, None, None], torch.tensor([own]), top_n=n, num_initial=0, num_local=0
    )[0, 0, 0]
    bits = torch.where(torch.arange(NB) <= own, score.view(torch.int32), -1)
    assert solutions.pick(bits, n) == expected.tolist()


# -- answers as readers write them --


def stopped_at_the_own_step(steps, own, n, num_initial, num_local):
    best = []
    for i, step in enumerate(steps):
        start = i * len(steps[0])
        new = list(enumerate(step, start))
        new = [
            (b, math.inf if b < num_initial or own - num_local < b <= own else s) for b, s in new
        ]
        best = sorted(best + new, key=lambda pair: (-pair[1], pair[0]))[:n]
    return sorted(b for b, _ in best)


def forced_beside(steps, own, n, num_initial, num_local):
    scores = [s for step in steps for s in step][: own + 1]
    forced = {b for b in range(own + 1) if b < num_initial or b > own - num_local}
    order = sorted(range(own + 1), key=lambda b: (-scores[b], b))
    return sorted(forced | set(order[:n]))


def all_at_once(steps, own, n, num_initial, num_local):
    """Right, without a running list."""
    scores = [s for step in steps for s in step][: own + 1]
    rank = [(not (b < num_initial or b > own - num_local), -s, b) for b, s in enumerate(scores)]
    return sorted(b for *_, b in sorted(rank)[:n])


def two_heads(a, b):
    """Right: a merge with two pointers."""
    out, i, j = [], 0, 0
    while len(out) < len(a):
        if a[i] >= b[j]:
            out.append(a[i])
            i += 1
        else:
            out.append(b[j])
            j += 1
    return out


def zipped(a, b):
    return sorted(map(max, a, b), reverse=True)


def mirrored_alone(a, b):
    n = len(a)
    return [a[i] if a[i] > b[n - 1 - i] else b[n - 1 - i] for i in range(n)]


def union(a, b):
    return sorted({*a, *b}, reverse=True)[: len(a)]


def by_arithmetic(scores, ids, id_bits):
    """Right: without bit operators."""
    size = 2**id_bits
    return scores.view(torch.int32) // size * size + size - 1 - ids


def rising(scores, ids, id_bits):
    size = 2**id_bits
    return scores.view(torch.int32) // size * size + ids


def uncleared(scores, ids, id_bits):
    return scores.view(torch.int32) + (2**id_bits - 1 - ids)


def by_sort(bits, n):
    """Right, though it sorts."""
    order = bits.argsort(descending=True, stable=True)[:n]
    ids = sorted(order[bits[order] >= 0].tolist())
    return ids + [-1] * (n - len(ids))


def by_sort_alone(bits, n):
    ids = sorted(bits.argsort(descending=True, stable=True)[:n].tolist())
    return ids + [-1] * (n - len(ids))


def threshold_alone(bits, n):
    least = max(int(bits.sort(descending=True).values[n - 1]), 0)
    ids = (bits >= least).nonzero().flatten().tolist()
    return ids + [-1] * (n - len(ids))


def off_by_one(first, BQ, BT, length, stride):
    few, many = (max((t - length) // stride + 1, 0) for t in (first, first + BQ - 1))
    return few // BT, math.ceil(many / BT)


def cut_together(bits, n):
    """Wrong only where a larger block stands behind equal ones."""
    ids = (bits >= halved(bits, n, 31)[0]).nonzero().flatten().tolist()[:n]
    return ids + [-1] * (n - len(ids))


def halved(bits, n, questions):
    low, high = 0, 2**31
    for _ in range(questions):
        middle = (low + high) // 2
        if (bits >= middle).sum() >= n:
            low = middle
        else:
            high = middle
    return low, high


def thirty_questions(bits, n):
    low, _ = halved(bits, n, 30)
    above = (bits > low).nonzero().flatten().tolist()
    equal = (bits == low).nonzero().flatten().tolist()
    ids = sorted(above + equal[: max(n - len(above), 0)])
    return ids + [-1] * (n - len(ids))


def never_neighbours(bits, n):
    """Would never end: between neighbours, the middle is the lower one."""
    low, high = 0, 2**31
    while low < high:
        middle = (low + high) // 2
        if (bits >= middle).sum() >= n:
            low = middle
        else:
            high = middle
    return thirty_questions(bits, n)


def ends_swapped(bits, n):
    low, high = 0, 2**31
    while high - low > 1:
        middle = (low + high) // 2
        if (bits >= middle).sum() >= n:
            high = middle
        else:
            low = middle
    return picked(low, bits, n)


def without_a_sum(bits, n):
    low, high = 0, 2**31
    while high - low > 1:
        middle = (low + high) // 2
        if (bits >= middle) >= n:
            low = middle
        else:
            high = middle
    return [low] * n


def by_this_length(steps, own, n, num_initial, num_local):
    best = []
    for k, step in enumerate(steps):
        for p, score in enumerate(step):
            b = k * len(step) + p
            if b <= own:
                is_forced = b < num_initial or b > own - num_local
                best.append((-math.inf if is_forced else -score, b))
        best = sorted(best)[:n]
    return sorted(b for _, b in best)


def smaller(a, b):
    n = len(a)
    return sorted((min(a[i], b[n - 1 - i]) for i in range(n)), reverse=True)


def borrowing(scores, ids, id_bits):
    return (scores.view(torch.int32) & ~(2**id_bits - 1)) - ids


def shifted_up(scores, ids, id_bits):
    return (scores.view(torch.int32) << id_bits) | (2**id_bits - 1 - ids)


def xored(scores, ids, id_bits):
    ones = 2 ^ id_bits - 1
    return (scores.view(torch.int32) & ~ones) | (ones - ids)


def turned_over_early(scores, ids, id_bits):
    return scores.view(torch.int32) & (~(1 << id_bits) - 1) | ((1 << id_bits) - 1 - ids)


def as_floats(scores, ids, id_bits):
    return solutions.pack(scores, ids, id_bits).view(torch.float32)


def one_step_more(first, BQ, BT, length, stride):
    few, many = (max((t + 1 - length) // stride + 1, 0) for t in (first, first + BQ - 1))
    return few // BT, many // BT + 1


def divided(first, BQ, BT, length, stride):
    few, many = (max((t + 1 - length) // stride + 1, 0) for t in (first, first + BQ - 1))
    return few / BT, math.ceil(many / BT)


def of_the_last(first, BQ, BT, length, stride):
    seen = max((first + BQ - length) // stride + 1, 0)
    return seen // BT, -(-seen // BT)


def by_any_place(is_forced: Callable) -> Callable:
    """A running list whose forced blocks are told by `is_forced(place, block, size, own, ...)`."""

    def running_list(steps, own, n, num_initial, num_local):
        best, block = [], 0
        for step in steps:
            for place, score in enumerate(step):
                forced = is_forced(place, block, len(step), own, num_initial, num_local)
                if block <= own:
                    best.append((-math.inf if forced else -score, block))
                block += 1
            best = sorted(best)[:n]
        return sorted(block for _, block in best)

    return running_list


def forced_apart(steps, own, n, num_initial, num_local):
    """The best n of all others, and the forced blocks."""
    scores = [s for step in steps for s in step][: own + 1]
    forced = [b for b in range(own + 1) if b < num_initial or b > own - num_local]
    others = sorted((-s, b) for b, s in enumerate(scores) if b not in forced)[:n]
    return sorted(forced + [b for _, b in others])


def emptied(steps, own, n, num_initial, num_local):
    block = 0
    for step in steps:
        best = []
        for score in step:
            if block <= own:
                forced = block < num_initial or block > own - num_local
                best.append((-math.inf if forced else -score, block))
            block += 1
    return sorted(block for _, block in sorted(best)[:n])


def before_the_text(steps, own, n, num_initial, num_local):
    scores = [s for step in steps for s in step][: own + 1]
    forced = list(range(min(num_initial, own + 1)))
    forced += [b for b in range(own - num_local + 1, own + 1) if b not in forced]
    others = sorted((-s, b) for b, s in enumerate(scores) if b not in forced)
    return sorted((forced + [b for _, b in others])[:n])


def scores_alone(steps, own, n, num_initial, num_local):
    scores = [s for step in steps for s in step][: own + 1]
    for b in range(own + 1):
        if b < num_initial or b > own - num_local:
            scores[b] = math.inf
    return sorted(scores, reverse=True)[:n]


def by_branches(own_is_seen: bool) -> Callable:
    """Each block takes one branch; without `own_is_seen`, blocks from `own` on take none."""

    def running_list(steps, own, n, num_initial, num_local):
        best, b = [], 0
        for step in steps:
            for score in step:
                if b >= own + own_is_seen:
                    pass
                elif b < num_initial or b > own - num_local:
                    best.append((-math.inf, b))
                else:
                    best.append((-score, b))
                b += 1
            best = sorted(best)[:n]
        return sorted(b for _, b in best)

    return running_list


def forced_if(is_forced: Callable) -> Callable:
    """A running list whose forced blocks are told by `is_forced(block, own, num_initial, ...)`."""
    return by_any_place(lambda place, block, size, own, *forced: is_forced(block, own, *forced))


def worst_of_pairs(steps, own, n, num_initial, num_local):
    best = []
    for block, score in enumerate([score for step in steps for score in step][: own + 1]):
        is_forced = block < num_initial or block > own - num_local
        best.append((math.inf if is_forced else score, -block))
    return sorted(-b for _, b in sorted(best)[:n])


def with_signs(steps, own, n, num_initial, num_local):
    return [-b for b in solutions.running_list(steps, own, n, num_initial, num_local)][::-1]


def all_sorted(bits, n):
    return sorted(solutions.pick(bits, n))


def all_steps_first(first, BQ, BT, length, stride):
    return solutions.walk(first, BQ, BT, length, stride)[::-1]


def picked(low, bits, n):
    above = (bits > low).nonzero().flatten().tolist()
    equal = (bits == low).nonzero().flatten().tolist()
    ids = sorted(above + equal[: max(n - len(above), 0)])
    return ids + [-1] * (n - len(ids))


def asking(questions: int) -> Callable:
    return lambda bits, n: picked(halved(bits, n, questions)[0], bits, n)


def starting_at(high: Callable, is_cut: bool = False) -> Callable:
    def pick(bits, n):
        least, most = 0, high(bits)
        while most - least > 1:
            middle = (least + most) // 2
            if (bits >= middle).sum() >= n:
                least = middle
            else:
                most = middle
        return picked(least, bits, n)[: n if is_cut else None]

    return pick


def shifted_down(scores, ids, id_bits):
    return (scores.view(torch.int32) >> id_bits) + 2**id_bits - 1 - ids


def one_too_few(first, BQ, BT, length, stride):
    few, many = (max((t + 1 - length) // stride, 0) for t in (first, first + BQ - 1))
    return few // BT, math.ceil(many / BT)


def end_alone(first, BQ, BT, length, stride):
    return math.ceil(max((first + BQ - length) // stride + 1, 0) / BT)


def counted(first, BQ, BT, length, stride):
    """Right: by going through the summaries."""
    few, many = (
        sum(j * stride + length - 1 <= t for j in range(t + 1)) for t in (first, first + BQ - 1)
    )
    return few // BT, -(-many // BT)


def end_below(bits, n):
    low, high = 0, 2**31
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = (bits >= middle).sum() >= n
        low, high = (middle, high) if is_enough else (low, middle - 1)
    return low


def picked_at(threshold: Callable) -> Callable:
    return lambda bits, n: picked(threshold(bits, n), bits, n)


def cut_in_front(bits, n):
    ids = (bits >= halved(bits, n, 31)[0]).nonzero().flatten().tolist()[-n:]
    return ids + [-1] * (n - len(ids))


def stopped_early(keep: Callable) -> Callable:
    """Ends where a count equals n; `keep` makes the list of bits, n, low and middle."""

    def pick(bits, n):
        low, high = 0, 2**31
        while high - low > 1:
            middle = (low + high) // 2
            count = (bits >= middle).sum()
            if count == n:
                break
            if count > n:
                low = middle
            else:
                high = middle
        return keep(bits, n, low, middle)

    return pick


def all_from(least, bits, n):
    ids = (bits >= least).nonzero().flatten().tolist()
    return ids + [-1] * (n - len(ids))


def in_the_frame(bits, n, low, middle):
    above = (bits > low).nonzero().flatten().tolist()
    equal = (bits == low).nonzero().flatten().tolist()
    ids = sorted(above + equal[: n - len(above)])
    return ids + [-1] * (n - len(ids))


def ties_twice(bits, n):
    low, _ = halved(bits, n, 31)
    above = (bits > low).nonzero().flatten().tolist()
    ties = (bits >= low).nonzero().flatten().tolist()
    ids = sorted(above + ties[: n - len(above)])
    return ids + [-1] * (n - len(ids))


def padded_with_zeros(bits, n):
    return [max(i, 0) for i in solutions.pick(bits, n)]


def with_a_future_of(pair: tuple[float, int]) -> Callable:
    """A running list that keeps `pair`, a loss and an id, for each block of the future."""

    def running_list(steps, own, n, num_initial, num_local):
        best, block = [], 0
        for step in steps:
            for score in step:
                is_forced = block < num_initial or block > own - num_local
                loss = -math.inf if is_forced else -score
                best.append((loss, block) if block <= own else pair)
                block += 1
            best = sorted(best)[:n]
        return sorted(block for _, block in best)

    return running_list


def uncut(steps, own, n, num_initial, num_local):
    return list(range(own + 1))


def pairs(steps, own, n, num_initial, num_local):
    scores = [score for step in steps for score in step]
    best = []
    for block, score in enumerate(scores[: own + 1]):
        is_forced = block < num_initial or block > own - num_local
        best.append((-math.inf if is_forced else -score, block))
    return sorted(best)[:n]


def complemented(scores, ids, id_bits):
    return (scores.view(torch.int32) & ~(2**id_bits - 1)) | ~ids


def flipped(scores, ids, id_bits):
    return (scores.view(torch.int32) & ~(2**id_bits - 1)) | ids.flip(0)


ATTEMPTS = {
    "end below": ("pick", picked_at(end_below), {"an upper end below the middle"}),
    "in front": (
        "pick",
        cut_in_front,
        {"cutting off the first of all that reach the threshold"},
    ),
    "twice": ("pick", ties_twice, {"taking a block twice"}),
    "early stop": (
        "pick",
        stopped_early(lambda bits, n, low, middle: all_from(middle, bits, n)),
        {"stopping early, with `middle` as the threshold"},
    ),
    "early stop, low": (
        "pick",
        stopped_early(lambda bits, n, low, middle: all_from(low, bits, n)),
        {"stopping early, with `low` left behind"},
    ),
    "early stop, in the frame": (
        "pick",
        stopped_early(in_the_frame),
        {"stopping early, with `low` left behind"},
    ),
    "zeros": ("pick", padded_with_zeros, {"zeros in the empty places"}),
    "minus one": (
        "running_list",
        with_a_future_of((1, -1)),
        {"-1 in the place of the future"},
    ),
    "uncut": ("running_list", uncut, {"a list that is never cut"}),
    "pairs": ("running_list", pairs, {"pairs in place of ids"}),
    "complement": ("pack", complemented, {"a complement of all 32 bits"}),
    "flipped": ("pack", flipped, {"the ids in the reverse order"}),
    "future": ("running_list", stopped_at_the_own_step, {"taking blocks of the future"}),
    "beside": ("running_list", forced_beside, {"forced blocks on top of n others"}),
    "zip": ("merge_lists", zipped, {"comparing what stands at the same place"}),
    "mirror": (
        "merge_lists",
        mirrored_alone,
        {"leaving the best in the order in which they met"},
    ),
    "union": ("merge_lists", union, {"dropping numbers that occur twice"}),
    "rising": ("pack", rising, {"the id as it is"}),
    "uncleared": (
        "pack",
        uncleared,
        {"adding the id to a score that still has its low bits"},
    ),
    "sort alone": ("pick", by_sort_alone, {"taking hidden blocks where too few are visible"}),
    "threshold": ("pick", threshold_alone, {"taking all that equal the last"}),
    "cut": ("pick", cut_together, {"cutting off the last of all that reach the threshold"}),
    "thirty": ("pick", thirty_questions, {"one question too few"}),
    "endless": ("pick", never_neighbours, {"ends that stop moving when they are neighbours"}),
    "swapped": ("pick", ends_swapped, {"moving the wrong end"}),
    "no sum": ("pick", without_a_sum, {"one answer a block in place of a count"}),
    "length": (
        "running_list",
        by_this_length,
        {"numbering blocks by the length of their own step"},
    ),
    "smaller": ("merge_lists", smaller, {"keeping the smaller of each pair"}),
    "borrow": ("pack", borrowing, {"subtracting the id from the cleared score"}),
    "shift": ("pack", shifted_up, {"shifting the score out of 32 bits"}),
    "xor": ("pack", xored, {"`^` where a power is meant"}),
    "early": ("pack", turned_over_early, {"a complement without parentheses"}),
    "floats": ("pack", as_floats, {"a float in place of an integer"}),
    "one more": ("walk", one_step_more, {"one step more than the quotient"}),
    "divided": ("walk", divided, {"a fraction of a step"}),
    "late": ("walk", off_by_one, {"a summary that is seen one token late"}),
    "local by place": (
        "running_list",
        by_any_place(lambda p, b, size, own, first, local: b < first or p > own - local),
        {"forcing by the place within the step"},
    ),
    "all by place": (
        "running_list",
        by_any_place(lambda p, b, size, own, first, local: p < first or p > own - local),
        {"forcing by the place within the step"},
    ),
    "end of step": (
        "running_list",
        by_any_place(lambda p, b, size, own, first, local: b < first or p >= size - local),
        {"forcing by the place within the step"},
    ),
    "own skipped": ("running_list", by_branches(False), {"leaving the own block out"}),
    "own alone": (
        "running_list",
        forced_if(lambda b, own, first, local: b < first or b == own),
        {"forcing the own block alone"},
    ),
    "initial": (
        "running_list",
        forced_if(lambda b, own, first, local: b <= first or b > own - local),
        {"one initial block too many"},
    ),
    "worst": ("running_list", worst_of_pairs, {"keeping the worst of each step"}),
    "signs": ("running_list", with_signs, {"negated ids"}),
    "-1 first": ("pick", all_sorted, {"sorting -1 with the ids"}),
    "other order": ("walk", all_steps_first, {"the two numbers in the other order"}),
    "apart": ("running_list", forced_apart, {"forced blocks on top of n others"}),
    "emptied": ("running_list", emptied, {"forgetting the list at every step"}),
    "-1": ("running_list", before_the_text, {"a forced block before the text"}),
    "scores": ("running_list", scores_alone, {"scores in place of their blocks"}),
    "29": ("pick", asking(29), {"too few questions"}),
    "24": ("pick", asking(24), {"too few questions"}),
    "20": ("pick", asking(20), {"too few questions"}),
    "up to 2.0": ("pick", starting_at(lambda bits: 2**30), {"a range that ends too low"}),
    "up to 2.0, cut": (
        "pick",
        starting_at(lambda bits: 2**30, is_cut=True),
        {"a range that ends too low"},
    ),
    "largest": (
        "pick",
        starting_at(lambda bits: int(bits.max())),
        {"a range that ends at the largest bits"},
    ),
    "down": ("pack", shifted_down, {"shifting the score down and not up again"}),
    "too few": ("walk", one_too_few, {"one summary too few"}),
    "one number": ("walk", end_alone, {"one number in place of two"}),
    "last": ("walk", of_the_last, {"unmasked up to what the last query sees"}),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it, which explains all of it."""
    verdict = judge(KNOWN[name], attempt)
    assert set(verdict.misconceptions) == named
    assert "does not explain everything" not in verdict.text


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("running_list", all_at_once),
        ("running_list", by_branches(True)),
        ("merge_lists", two_heads),
        ("pack", by_arithmetic),
        ("pick", by_sort),
        ("walk", counted),
    ],
)
def test_another_way_is_right_too(name: str, attempt: Callable) -> None:
    assert judge(KNOWN[name], attempt).outcome == "right"


@pytest.mark.parametrize("name", ["group_mass", "running_list", "pick"])
def test_the_frame_that_is_given_is_the_solutions(name: str) -> None:
    """All of its lines but the gaps stand in the solution, in this order."""
    frame = KNOWN[name].statement.split("```")[1].removeprefix("python").splitlines()
    lines = [line.split("#")[0].strip() for line in frame if line.strip() and "..." not in line]
    solution = iter(
        line.split("#")[0].strip()
        for line in inspect.getsource(getattr(solutions, name)).splitlines()
    )
    assert len(lines) >= 4
    assert all(line in solution for line in lines)


def test_a_kernel_without_its_decorator_is_told() -> None:
    e = KNOWN["group_mass"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert "@triton.jit" in judge(e, lambda: lambda Q: None).text


def test_a_kernel_that_reads_an_address_as_a_list_is_told() -> None:
    def with_brackets():
        @triton.jit
        def kernel(Q, K, LSE, Mass, scale, log2_e, M, G, D: tl.constexpr, BT: tl.constexpr):
            places = tl.arange(0, BT)
            tl.store(Mass + places, LSE[0], mask=places < M)

        return kernel

    e = KNOWN["group_mass"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert "`LSE` is an address" in judge(e, with_brackets).text


@pytest.mark.parametrize(
    ("added", "name"),
    [
        (
            "tl.exp((s - tl.load(LSE + g)) * log2_e)",
            "the factor of `tl.exp2` inside `tl.exp`",
        ),
        ("s", "adding scores where weights are asked for"),
    ],
)
def test_what_a_kernel_adds_is_named(added: str, name: str) -> None:
    e = KNOWN["group_mass"]
    if e.missing:
        pytest.skip(e.missing[0])
    right = "tl.exp2((s - tl.load(LSE + g)) * log2_e)"
    verdict = judge(e, Edited(solutions.group_mass, {right: added}))
    assert verdict.misconceptions == (name,)
    assert "`Mass`:" in verdict.text


def test_a_kernel_that_sums_over_the_summaries_is_told() -> None:
    def down():
        @triton.jit
        def kernel(Q, K, LSE, Mass, scale, log2_e, M, G, D: tl.constexpr, BT: tl.constexpr):
            summaries, width = tl.arange(0, BT), tl.arange(0, D)
            k_tile = tl.load(K + summaries[:, None] * D + width)
            mass = tl.zeros([BT], tl.float32)
            mass += tl.sum(tl.load(Q + width) * k_tile, axis=0)
            tl.store(Mass + summaries, mass, mask=summaries < M)

        return kernel

    e = KNOWN["group_mass"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert "axis 0, over the summaries" in judge(e, down).text


def test_right_numbers_of_64_bits_are_told() -> None:
    verdict = judge(KNOWN["pack"], lambda *given: solutions.pack(*given).long())
    assert verdict.outcome == "wrong"
    assert "int64" in verdict.text
    assert "with id_bits" in verdict.text


def test_a_kernel_that_is_not_returned_is_told() -> None:
    def forgotten():
        def kernel(Q):
            return Q

    e = KNOWN["group_mass"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(e, forgotten)
    assert (verdict.outcome, "return kernel" in verdict.text) == ("wrong", True)


@pytest.mark.parametrize(
    ("guess", "sign"), [(95, "✓"), (100, "✓"), (0.64, "percent"), (64, "→"), (36, "all 128")]
)
def test_a_guess_of_percent(guess: float, sign: str) -> None:
    predict("tiles_that_merge", guess)
    assert sign in repr(reveal("tiles_that_merge", 100))


# -- the choice as one kernel, as readers write it --


@triton.jit
def one_by_one(
    Q, K, LSE, Ids, first, BS, n, num_initial, num_local, scale, H,
    G: tl.constexpr, D: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Takes the best block, hides it, and takes the next one."""
    row, head = tl.program_id(0), tl.program_id(1)
    block, width = tl.arange(0, NB), tl.arange(0, D)
    t = first + row
    is_seen = (block + 1) * BS <= t + 1
    keys = tl.load(K + (block[:, None] * H + head) * D + width, mask=is_seen[:, None], other=0.0)
    score = tl.zeros([NB], tl.float32)
    for g in range((row * H + head) * G, (row * H + head) * G + G):
        s = tl.sum(keys * tl.load(Q + g * D + width)[None, :], axis=1) * scale
        score += tl.where(is_seen, tl.exp2((s - tl.load(LSE + g)) * 1.44269504), 0.0)
    score = tl.where(block < num_initial, 1e30, score)
    score = tl.where((block > t // BS - num_local) & (block <= t // BS), 1e30, score)
    score = tl.where(block <= t // BS, score, -1.0)
    is_taken = block < 0
    for _ in range(n):
        best = tl.argmax(score, axis=0)
        is_taken = is_taken | ((block == best) & (score >= 0))
        score = tl.where(block == best, -1.0, score)
    place = tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
    tl.store(Ids + (row * H + head) * n + place, block, mask=is_taken)


@triton.jit
def by_halving(
    Q, K, LSE, Ids, first, BS, n, num_initial, num_local, scale, H,
    G: tl.constexpr, D: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Plays the chapter's game on the bits of the scores, for one head of a group."""
    row, head = tl.program_id(0), tl.program_id(1)
    block, width = tl.arange(0, NB), tl.arange(0, D)
    t = first + row
    is_seen = block < (t + 1) // BS
    keys = tl.load(K + (block[:, None] * H + head) * D + width, mask=is_seen[:, None], other=0.0)
    s = tl.sum(keys * tl.load(Q + (row * H + head) * G * D + width)[None, :], axis=1) * scale
    score = tl.where(is_seen, tl.exp(s - tl.load(LSE + (row * H + head) * G)), 0.0)
    bits = tl.where(block <= t // BS, score.to(tl.int32, bitcast=True), -1)
    low, high = 0, 0x7F800001
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((bits >= middle).to(tl.int32)) >= n:
            low = middle
        else:
            high = middle
    is_above, is_equal = bits > low, bits == low
    num_left = n - tl.sum(is_above.to(tl.int32))
    is_taken = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32)) <= num_left))
    place = tl.cumsum(is_taken.to(tl.int32)) - 1
    tl.store(Ids + (row * H + head) * n + place, block, mask=is_taken)


def selecting(kernel: object) -> Callable:
    """The launch of a kernel that selects blocks."""

    def triton_select_blocks(q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale):
        (N, HQ, D), H = q.shape, k_cmp.shape[1]
        ids = torch.full((N, H, n), -1, dtype=torch.int32, device=q.device)
        sizes = {"G": HQ // H, "D": D, "NB": triton.next_power_of_2(-(-M // block_size))}
        numbers = (M - N, block_size, n, num_initial, num_local, scale, H)
        kernel[N, H](q, k_cmp, lse, ids, *numbers, **sizes)
        return ids

    return triton_select_blocks


def by_pytorch(q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale):
    """Right for the first stage, without a kernel."""
    blocks = torch.arange(-(-M // block_size), dtype=torch.int32)
    ids = torch.full((len(q), k_cmp.shape[1], n), -1, dtype=torch.int32)
    ids[..., : len(blocks)] = blocks[:n]
    return ids


@pytest.mark.parametrize(
    ("kernel", "held"), [(one_by_one, 7), (by_halving, 2)], ids=["one by one", "halving, one head"]
)
def test_a_selecting_kernel_is_free_in_form(kernel: object, held: int) -> None:
    """All stages hold for a kernel that finds its list in another way, and those before a group for
    one that reads a single head."""
    e = KNOWN["triton_select_blocks"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(e, selecting(kernel))
    assert verdict.held == held
    if held == 2:
        assert verdict.misconceptions == ("taking one head of the group",)


@pytest.mark.exhaustive
def test_the_selecting_kernel_compiles_for_a_gpu() -> None:
    """For a Hopper GPU, with sizes of the package's."""
    if environment.detect().triton is None:
        pytest.skip("Triton is not installed")
    pointers = dict.fromkeys(("Q", "K", "LSE"), "*fp32") | {"Ids": "*i32", "scale": "fp32"}
    kernel = "nsa_tutorial.course.exercises.selection_kernels:select_kernel"
    found = lowering.stages(kernel, {"G": 4, "D": 64, "NB": 64}, pointers, num_warps=4)
    assert "st.global" in found["ptx"]


def test_a_selection_without_a_kernel_holds_no_stage() -> None:
    e = KNOWN["triton_select_blocks"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(replace(e, misconceptions=()), by_pytorch)
    assert (verdict.outcome, verdict.held) == ("wrong", 0)
    assert "No Triton kernel was launched" in verdict.text


# -- what the chapter shows --


@pytest.mark.parametrize(("module", "name"), [("scores", "score"), ("pick", "pick")])
def test_phases_that_stand_beside_each_other_have_one_name(module: str, name: str) -> None:
    ours = phases(f"nsa_tutorial.kernels.triton.choice.{module}:{name}_kernel")
    theirs = phases(f"nsa_tutorial.kernels.tilelang.choice.{module}:build_{name}")
    shared = [phase for phase in ours if phase in theirs]
    assert len(shared) >= 3
    assert shared == [phase for phase in theirs if phase in ours]


def test_who_sees_the_first_and_the_last_summary() -> None:
    """The two numbers of queries that the chapter tells."""
    N = 65_536
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    rows = compression.summary_rows(rows, N, length=32, stride=16, cu_seqlens=None)
    num_summaries = compression.num_summaries(N, 32, 16)
    first, last = ((rows.num_visible > j).sum().item() for j in (0, num_summaries - 1))
    assert last == 1
    text = " ".join(NOTEBOOK.read_text().split())
    assert f"{first:,} of {N:,} queries, the last by one" in text.replace('\\n", "', " ")
    assert f"has {num_summaries:,} summaries" in text.replace('\\n", "', " ")


def test_what_is_told_of_the_times_is_what_was_measured() -> None:
    told = next(c.source for c in nbformat.read(NOTEBOOK, 4).cells if c.id == "measured-told")
    ms = pictures.measured_table()
    dense = min(ms[name]["forward"] for name in ms if name.startswith("dense"))
    assert f"All of NSA takes {ms['all of NSA']['forward']:.1f} ms" in told
    assert f"takes {dense:.1f} ms" in told
    choice, told = ms["choice of blocks"]["forward"], " ".join(told.split())
    assert f"The choice takes {choice:.1f} ms" in told
    scores, pick = pictures.measured_kernels()
    assert f"{scores:.1f} ms for the scores, and {pick:.1f} ms for the lists" in told
    assert scores + pick == pytest.approx(choice, rel=0.03)
    assert f"products would take {pictures.scores_ms(65_536):.1f} ms at best" in told
    # of what queries see: half of all, written and read
    pairs = costs.summary_keys(65_536, 65_536, length=32, stride=16)
    stored = 1e3 * 2 * 4 * 64 * pairs / H200_BYTES_PER_S
    assert f"To store just these weights would take {stored:.0f} ms at best" in told
    assert 0.19 < ms["choice of blocks"]["forward"] / ms["all of NSA"]["forward"] < 0.23
    assert "backward" not in ms["choice of blocks"]


def test_the_minutes_are_told() -> None:
    """The optional exercises are not among the chapter's minutes."""
    minutes = {e.name: e.minutes for e in KNOWN.values()}
    optional = [minutes.pop(name) for name in OPTIONAL]
    text = " ".join(c.source for c in nbformat.read(NOTEBOOK, 4).cells)
    assert f"{sum(minutes.values())} of them exercises" in text
    told = re.findall(r"About (\d+) minutes, (\d+) of them an exercise", text)
    assert [int(exercise) for _, exercise in told] == optional
    parts = re.findall(r"^About (\d+) minutes[.,] (?!\d+ of them exercises)", text, re.M)
    assert f"What follows takes {sum(map(int, parts))} minutes" in text
