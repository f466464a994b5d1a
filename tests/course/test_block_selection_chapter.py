"""What chapter 07 draws, prints and claims: lists on the stored heads, their judgement, the turning
query, the panel."""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import exercises as course_exercises
from nsa_tutorial.course import heads as stored_heads
from nsa_tutorial.course.diffs import together
from nsa_tutorial.course.exercises import Exercise, Misconception
from nsa_tutorial.course.exercises import block_selection as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import block_selection as pictures
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse import block_selection
from nsa_tutorial.sparse.compression import summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")

FORCED = {"nothing": (0, 0), "own": (0, 1), "first and two latest": (1, 2)}
forced = pytest.mark.parametrize(("num_initial", "num_local"), FORCED.values(), ids=FORCED.keys())


def mean(by: str, n: int, **options: object) -> float:
    return pictures.captured(pictures.lists(by, n, **options)).mean().item()


# -- the module and the exercises say the same --


@pytest.mark.parametrize(
    "sizes", [(4, 2, 8), (32, 16, 64), (5, 3, 4), (6, 2, 2), (2, 5, 4), (7, 3, 10)], ids=str
)
def test_overlap_of_the_exercise_is_the_modules(sizes: tuple[int, int, int]) -> None:
    first, weights = block_selection.overlap_weights(*sizes, 6)
    for block in range(6):
        got = {
            int(first[block]) + i: w
            for i, w in enumerate(weights[block].tolist())
            if w and first[block] + i >= 0
        }
        assert got == pytest.approx(exercises.overlap(*sizes, block))


def test_the_papers_double_sum_counts_from_one() -> None:
    """With blocks and summaries counted from 1, its block b takes the summaries of our block b - 1;
    the chapter tells both."""
    assert eq_9(32, 16, 64, 1) == {4: 1, 3: 2, 2: 2, 1: 2, 0: 1}
    for block in range(5):
        moved = {j - 1: w for j, w in eq_9(32, 16, 64, block + 1).items() if j > 0}
        assert moved == exercises.overlap(32, 16, 64, block)


def test_importance_of_the_exercise_is_the_modules() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 30, 6, 4, generator=g), torch.randn(1, 30, 2, 4, generator=g)
    length, stride, BS, scale = 5, 3, 7, 0.7
    k_cmp = ops.compress(k, length=length, stride=stride)
    rows = query_rows(1, 30, 30, causal=True, cu_seqlens=None, device=q.device)
    rows = summary_rows(rows, 30, length=length, stride=stride, cu_seqlens=None)
    got = block_selection.importance(
        q, k_cmp, rows, overlap=block_selection.overlap_weights(length, stride, BS, 5), scale=scale
    )
    M_c = k_cmp.shape[1]
    weights = torch.zeros(5, M_c)
    for block in range(5):
        for summary, weight in exercises.overlap(length, stride, BS, block).items():
            if summary < M_c:
                weights[block, summary] = weight
    for t, h in itertools.product(range(30), range(2)):
        s = scale * q[0, t, 3 * h : 3 * h + 3] @ k_cmp[0, :, h].T
        s = s.masked_fill(torch.arange(M_c) * stride + length > t + 1, -torch.inf)
        torch.testing.assert_close(got[0, t, h], exercises.block_importance(s, weights))


@pytest.mark.parametrize(
    ("top_n", "num_initial", "num_local"),
    [(1, 0, 0), (1, 0, 1), (3, 1, 2), (5, 0, 1), (5, 2, 3), (9, 1, 2)],
    ids=str,
)
def test_choose_is_the_exercises_loop(top_n: int, num_initial: int, num_local: int) -> None:
    g = torch.Generator().manual_seed(top_n)
    score = torch.randint(0, 4, (2, 7, 3, 7), generator=g).float()  # many ties
    own = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    ids = block_selection.choose(
        score, own, top_n=top_n, num_initial=num_initial, num_local=num_local
    )
    assert ids.dtype == torch.int32
    for b, t, h in itertools.product(range(2), range(7), range(3)):
        expected = exercises.choose_blocks(
            score[b, t, h].tolist(), t, top_n, num_initial, num_local
        )
        assert ids[b, t, h].tolist() == expected


# -- the example by hand --


def test_the_two_heads_disagree_and_the_stronger_one_decides() -> None:
    q, k, _ = pictures.tiny()
    k_cmp = ops.compress(k, length=4, stride=2)
    pick = {
        "top_n": 1,
        "block_size": 8,
        "length": 4,
        "stride": 2,
        "num_initial": 0,
        "num_local": 0,
        "scale": 1.0,
    }
    alone = [
        ops.select_blocks(q[:, :, i : i + 1], k_cmp, **pick)[0, 31, 0].tolist() for i in range(2)
    ]
    together = ops.select_blocks(q, k_cmp, **pick)[0, 31, 0].tolist()
    assert (alone, together) == ([[1], [2]], [1])


@pytest.mark.parametrize("s", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_autograd_is_right_where_the_list_stays(s: float) -> None:
    before, step, after = (pictures.turn(s + d) for d in (-0.01, 0.0, 0.01))
    assert before.ids == step.ids == after.ids
    assert step.slope == pytest.approx((after.o - before.o) / 0.02, rel=0.01)


def test_the_output_jumps_where_the_list_changes_and_dense_attention_does_not() -> None:
    steps = [pictures.turn(i / 200) for i in range(201)]
    pairs = list(itertools.pairwise(steps))
    flips = [i for i, (a, b) in enumerate(pairs) if a.ids != b.ids]
    assert len(flips) == 1
    assert (pairs[flips[0]][0].ids, pairs[flips[0]][1].ids) == ([1, 3], [2, 3])
    assert abs(pairs[flips[0]][1].o - pairs[flips[0]][0].o) > 0.5
    assert max(abs(b.o - a.o) for i, (a, b) in enumerate(pairs) if i not in flips) < 0.02
    assert max(abs(b.dense - a.dense) for a, b in pairs) < 0.02


# -- lists on the stored heads --


@pytest.mark.parametrize("sizes", pictures.SIZES, ids=str)
@forced
def test_lists_from_summaries_are_the_operators(
    num_initial: int, num_local: int, sizes: tuple[int, int]
) -> None:
    stored, (length, stride) = pictures.real()[0], sizes
    k_cmp = ops.compress(stored.k, length=length, stride=stride)
    pick = {"num_initial": num_initial, "num_local": num_local, "length": length, "stride": stride}
    expected = ops.select_blocks(stored.q, k_cmp, top_n=4, block_size=pictures.BS, **pick)[0]
    assert torch.equal(pictures.lists("summaries", 4, **pick), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["one list per group", "one per head"])
@pytest.mark.parametrize("by", pictures.SOURCES)
def test_lists_are_lists(by: str, shared: bool) -> None:
    ids = pictures.lists(by, 5, num_initial=1, num_local=2, shared=shared)
    assert ids.shape == (512, 4 if shared else 16, 5)
    ops.check_block_indices(ids[None], 512, block_size=pictures.BS)
    for t in (0, 15, 16, 47, 100, 511):
        own = t // pictures.BS
        for row in ids[t].tolist():
            taken = [i for i in row if i >= 0]
            assert len(taken) == min(5, own + 1) and max(taken) == own
            assert {0, own, max(own - 1, 0)} <= set(taken)


def test_the_latest_blocks_end_with_the_own_one() -> None:
    assert pictures.lists("latest", 3)[100, 2].tolist() == [4, 5, 6]
    assert pictures.lists("latest", 3)[20, 0].tolist() == [0, 1, -1]


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^by: got 'tea leaves', expected one of oracle"):
        pictures.scores("tea leaves")


# -- judging them --


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("shared", [True, False], ids=["one list per group", "one per head"])
def test_lists_of_every_length_are_judged_by_the_same_queries(n: int, shared: bool) -> None:
    """The later half of the text, whose queries all see more blocks than a list has slots."""
    ids = pictures.lists("latest", n, shared=shared)
    held = (pictures.real()[1] * pictures.listed(ids)).sum(-1)  # [HQ, N]
    torch.testing.assert_close(pictures.captured(ids), held[:, 256:].mean(-1))
    assert n < 256 // pictures.BS + 1  # blocks that the first of them sees


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("shared", [True, False], ids=["one list per group", "one per head"])
def test_the_oracles_lists_hold_the_exact_attention_mass(n: int, shared: bool) -> None:
    """As `heads.attention_mass` counts it, over all queries that see more blocks."""
    expected = stored_heads.attention_mass(pictures.real()[0], pictures.BS, n, per_group=shared)
    listed = pictures.listed(pictures.lists("oracle", n, shared=shared))
    held = (pictures.real()[1] * listed).sum(-1)[:, n * pictures.BS :].mean(-1)
    torch.testing.assert_close(held, expected)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_nobody_beats_the_oracle(n: int) -> None:
    """For no query of no group: the oracle takes the blocks with the largest mass, summed over the
    group's heads."""

    def held(by: str) -> torch.Tensor:
        mass = pictures.real()[1] * pictures.listed(
            pictures.lists(by, n, num_local=int(by == "summaries"))
        )
        return mass.sum(-1).unflatten(0, (4, 4)).sum(1)  # [H, N]

    best = held("oracle")
    for by in ("summaries", "latest", "random"):
        assert (held(by) <= best + 1e-12).all()


def test_summaries_of_one_token_are_the_oracle() -> None:
    assert mean("summaries", 4, length=1, stride=1) == pytest.approx(mean("oracle", 4), abs=1e-4)


def test_every_block_listed_is_dense_attention() -> None:
    ids = torch.arange(32).expand(512, 4, 32)
    assert pictures.listed(ids).all()
    some = torch.cat([pictures.lists("latest", 31), torch.zeros(512, 4, 1, dtype=torch.int32)], -1)
    assert pictures.listed(some)[:, 511].sum() == 16 * 32
    assert pictures.output_error(pictures.lists("oracle", 31)) < 0.01


def test_a_group_loads_its_shared_list_or_the_union_of_its_heads() -> None:
    assert pictures.blocks_loaded(pictures.lists("oracle", 4)).tolist() == [4.0] * 4
    ids = pictures.lists("oracle", 4, shared=False)
    # KV head 2
    expected = [len({i for row in ids[t, 8:12].tolist() for i in row}) for t in range(256, 512)]
    assert pictures.blocks_loaded(ids)[2].item() == pytest.approx(sum(expected) / len(expected))


# -- what the chapter says about them --


@pytest.mark.parametrize("n", [4, 8, 16])
def test_summaries_choose_better_than_the_window_and_chance_and_nearly_as_well_as_the_oracle(
    n: int,
) -> None:
    oracle, summaries, latest, chance = (
        mean(by, n, num_local=int(by == "summaries"))
        for by in ("oracle", "summaries", "latest", "random")
    )
    assert chance < latest < summaries < oracle
    assert summaries > 0.97 * oracle


def test_without_a_forced_own_block_long_summaries_are_blind() -> None:
    assert mean("summaries", 4, length=16, stride=16) < 0.4
    assert mean("summaries", 4, length=16, stride=16, num_local=1) > 0.64


def test_an_own_summary_ends_with_the_block() -> None:
    """Summaries of 16 on blocks of 16: the own block has no importance, but for its last query."""
    score, t = pictures.scores("summaries", 16, 16), torch.arange(512)
    own = score[t, :, t // 16]  # [N, H]
    assert (own[t % 16 < 15] == 0).all()
    assert (own[t % 16 == 15] > 0).all()


SUMMARIES = ((4, 4), (8, 4), (16, 16), (16, 8), (32, 16))


def test_summaries_of_a_whole_block_choose_as_well_once_the_own_block_is_forced() -> None:
    """Both are 65 %, as the chapter says; a reader guesses one after having read the other."""
    held = [
        mean("summaries", 4, num_local=1, **sizes) for sizes in ({}, {"length": 16, "stride": 16})
    ]
    assert [round(100 * x) for x in held] == [65, 65]


def test_overlap_does_not_help() -> None:
    """As many summaries without overlap, or half as many, hold more attention; the chapter says so
    of lists of 4."""
    held = {
        sizes: mean("summaries", 4, length=sizes[0], stride=sizes[1], num_local=1)
        for sizes in SUMMARIES
    }
    assert 0 < held[4, 4] - held[8, 4] < 0.005
    assert 0 < held[16, 16] - held[16, 8] < 0.005
    assert held[32, 16] < min(held[sizes] for sizes in SUMMARIES[:-1]) - 0.015


def test_choosing_pays_where_a_head_looks_far() -> None:
    """KV head 3: where the best block is not among the latest 4, a chosen list holds more than
    twice what these hold."""
    mass, t = pictures.real()[1], torch.arange(pictures.SINCE, 512)
    far = t // 16 - mass[12:16].mean(0).argmax(-1)[t] > 3
    assert 0.2 < far.double().mean() < 0.4

    def held(by: str, mine: torch.Tensor) -> float:
        ids = pictures.lists(by, 4, num_local=int(by == "summaries"))
        return (mass * pictures.listed(ids)).sum(-1)[12:16, t[mine]].mean().item()

    assert held("summaries", far) > 2 * held("latest", far)
    assert held("summaries", ~far) - held("latest", ~far) < 0.05


def test_too_many_forced_blocks_are_worse_than_the_window() -> None:
    assert (
        mean("summaries", 4, num_initial=1, num_local=2)
        < mean("latest", 4)
        < mean("summaries", 4, num_local=1)
    )


def test_a_longer_shared_list_is_the_better_buy() -> None:
    """KV head 3, as the answers below the panel say."""
    ids = [
        pictures.lists("summaries", n, num_local=1, shared=shared)
        for n, shared in ((4, True), (4, False), (6, True))
    ]
    held = [round(100 * pictures.captured(x)[12:].mean().item()) for x in ids]
    loaded = [round(pictures.blocks_loaded(x)[3].item(), 1) for x in ids]
    assert (held, loaded) == ([55, 58, 66], [4.0, 6.9, 6.0])


def test_the_best_choice_for_kv_head_3_forces_nothing() -> None:
    held = {
        (sizes, num_local): pictures.captured(
            pictures.lists("summaries", 4, num_local=num_local, length=sizes[0], stride=sizes[1])
        )[12:].mean()
        for sizes in pictures.SIZES
        for num_local in (0, 1, 2)
    }
    best = max(held, key=held.get)
    assert (best, round(100 * held[best].item())) == (((4, 4), 0), 57)


# -- the pictures --

DRAWINGS = {
    "overlap": lambda: pictures.draw_overlap(),
    "overlap, fractions": lambda: pictures.draw_overlap(5, 3, 4, 1),
    "overlap, block 0": lambda: pictures.draw_overlap(4, 2, 8, 0),
    "overlap, gaps": lambda: pictures.draw_overlap(2, 5, 4, 1),
    "query": lambda: pictures.draw_query(),
    "early query": lambda: pictures.draw_query(20, 0, 3),
    "mass": lambda: pictures.draw_mass(),
    "choice": lambda: pictures.draw_choice(),
    "choice, per head": lambda: pictures.draw_choice(
        1, 3, num_initial=1, num_local=2, length=32, stride=16, shared=False
    ),
    "jump": lambda: pictures.draw_jump(),
}


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS.keys())
def test_pictures_are_small_and_always_the_same(draw: object) -> None:
    first = draw()
    assert first.png() == draw().png()
    assert len(first.png()) <= 60_000
    assert len(first.finding) <= 100, "the title fits over the figure"


def test_findings_carry_their_numbers() -> None:
    assert (
        pictures.draw_overlap().finding == "Block 1 counts 1, 2, 2, 2, 1 pieces of summaries 3 to 7"
    )
    assert (
        pictures.draw_overlap(5, 3, 4, 1).finding
        == "Block 1 counts 0.33, 1.33, 0.67 pieces of summaries 0 to 2"
    )
    assert (
        pictures.draw_overlap(4, 2, 8, 0).finding
        == "Block 0 counts 2, 2, 2, 1 pieces of summaries 0 to 3"
    )
    share = pictures.captured(pictures.lists("summaries", 6, num_local=1))[4:8].mean()
    assert f"the lists hold {share:.0%} of" in pictures.draw_choice(1, 6).finding
    assert f"chosen blocks hold {mean('summaries', 7, num_local=1):.0%}" in pictures.draw_mass(
        7
    ).finding.replace("7 blocks from summaries", "chosen blocks")


def test_a_querys_finding_is_its_mass() -> None:
    ids, mass = pictures.lists("summaries", 4, num_local=1)[505, 3], pictures.real()[1]
    share = mass[12:16, 505][:, ids.long()].sum(-1).mean()
    assert f"the list holds {share:.0%}" in pictures.draw_query(505, 3).finding


# -- the panel --


def test_the_panel_says_what_the_pure_function_says() -> None:
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(3, 4)
    got = panel.set(kv_head=1, sizes=(16, 16), top_n=6, num_initial=1, num_local=2, shared=False)
    assert got == pictures.sentence(
        1, 6, num_initial=1, num_local=2, length=16, stride=16, shared=False
    )
    assert "a list for each of its 4 heads: 6 blocks, 3 forced, hold " in got


def test_the_panel_forces_no_more_than_a_list_holds() -> None:
    panel = pictures.explore()
    first, latest = (panel.controls[name] for name in ("num_initial", "num_local"))
    assert panel.set(top_n=2, num_initial=4, num_local=4) == pictures.sentence(
        3, 2, num_initial=0, num_local=2
    )
    assert (first.max, latest.max) == (0, 2)
    assert first.disabled, "the latest blocks fill the list"
    latest.value = 1
    assert (first.max, first.value, first.disabled) == (1, 0, False)
    panel.set(top_n=5)
    assert (first.max, latest.max) == (4, 4)


def test_the_panel_says_which_control_had_to_move() -> None:
    panel = pictures.explore()
    panel.set(top_n=6, num_initial=3, num_local=3)
    panel.controls["top_n"].value = 4
    assert (panel.values["num_initial"], panel.values["num_local"]) == (1, 3)
    assert panel.moved == "first blocks forced: 3 is out of range here, now 1."


@pytest.mark.parametrize("n", [1, 3])
def test_the_latest_blocks_are_the_same_for_every_head(n: int) -> None:
    """So one list a group tells their share, also where each head has its own."""
    apart, shared = (pictures.lists("latest", n, shared=x) for x in (False, True))
    assert torch.equal(pictures.captured(apart), pictures.captured(shared))


# -- what the tutor says --

EXERCISES = {e.name: e for e in exercises.EXERCISES}


def test_mistakes_in_one_place_exclude_each_other() -> None:
    wrong = {m.name: m.wrong for m in EXERCISES["overlap"].misconceptions}
    tokens = wrong["counting tokens where pieces are asked for"]
    equal = wrong["giving all summaries that touch the block the same weight"]
    with pytest.raises(ValueError, match=r"^these exclude each other: both replace 'tokens / st"):
        together(tokens, equal)
    both = together(tokens, wrong["listing summaries that do not exist"])
    assert both(4, 2, 8, 0) == {-1: 2.0, 0: 4.0, 1: 4.0, 2: 4.0, 3: 2.0}


def eq_9(length: int, stride: int, block_size: int, block: int) -> dict:
    ratio = block_size // stride
    return dict(
        Counter(ratio * block - m - n for m in range(ratio) for n in range(length // stride))
    )


def begins_there(length: int, stride: int, block_size: int, block: int) -> dict:
    return {j: 1.0 for j in range(500) if j * stride // block_size == block}


def scores_first(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weights @ torch.softmax(scores.sum(0), dim=0)


def large_negative(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(scores == -torch.inf, -1e9)
    return weights @ torch.softmax(scores, dim=1).sum(0)


def with_a_slice(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    past = list(range(own + 1))
    forced = sorted({*past[:num_initial], *past[-num_local:]})
    rest = sorted((b for b in past if b not in forced), key=lambda b: -scores[b])
    chosen = sorted([*forced, *rest][:top_n])
    return chosen + [-1] * (top_n - len(chosen))


def without_allow_unused(o: torch.Tensor, tensors: dict) -> list:
    gradients = torch.autograd.grad(o.sum(), list(tensors.values()))
    return [name for name, g in zip(tensors, gradients, strict=True) if g.abs().sum() > 0]


def a_loop(
    end: Callable, weight: Callable, is_listed: Callable = lambda tokens: tokens > 0
) -> Callable:
    """`overlap` as a loop over the summaries before `end`."""

    def overlap(length: int, stride: int, block_size: int, block: int) -> dict:
        low, high = block * block_size, (block + 1) * block_size
        out = {}
        for j in range(end(high, stride)):
            tokens = min(j * stride + length, high) - max(j * stride, low)
            if is_listed(tokens):
                out[j] = weight(max(tokens, 0), stride)
        return out

    return overlap


TOO_EARLY = "ending the loop over the summaries too early"
NOTHING_SHARED = "listing summaries that share nothing with the block"


@pytest.mark.parametrize(
    ("typed", "mistakes"),
    [
        (a_loop(lambda end, stride: end // stride, lambda n, d: n / d), {TOO_EARLY}),
        (
            a_loop(lambda end, stride: end // stride, lambda n, d: n),
            {TOO_EARLY, "counting tokens where pieces are asked for"},
        ),
        (
            a_loop(lambda end, stride: end // stride, lambda n, d: n // d),
            {TOO_EARLY, "rounding fractions down"},
        ),
        (
            a_loop(lambda end, stride: end // stride, lambda n, d: n / d, lambda n: True),
            {TOO_EARLY, NOTHING_SHARED},
        ),
        *(
            (a_loop(end, lambda n, d: n / d, lambda n: True), {NOTHING_SHARED})
            for end in (
                lambda end, stride: -(-end // stride),
                lambda end, stride: end // stride + 1,
                lambda end, stride: end,
            )
        ),
    ],
    ids=["early", "early, tokens", "early, whole", "early, zeros", "zeros", "zeros, one more",
         "zeros, many"],
)  # fmt: skip
def test_a_loop_over_the_summaries_is_blamed_for_what_it_does(
    typed: Callable, mistakes: set[str]
) -> None:
    assert set(judge(EXERCISES["overlap"], typed).misconceptions) == mistakes


def test_what_the_shown_case_shows_is_told_first() -> None:
    """A loop that ends too early is seen in later cases than a weight in tokens."""
    verdict = judge(EXERCISES["overlap"], a_loop(lambda end, d: end // d, lambda n, d: n))
    first, second = verdict.text.split("Then look at a second thing.")
    assert "counting tokens where pieces are asked for" in first
    assert "Your loop ends too early" in second


@pytest.mark.parametrize(
    "of_group",
    [
        lambda p, weights: weights @ p.max(0).values,
        lambda p, weights: (p @ weights.T).max(0).values,
    ],
    ids=["before the blocks", "after the blocks"],
)
@pytest.mark.parametrize("hidden", [0.0, float("nan")], ids=["guarded", "NaN"])
def test_the_largest_share_is_one_mistake_wherever_it_is_taken(
    of_group: Callable, hidden: float
) -> None:
    """A row of hidden summaries turns to NaN in many an answer: one thing at a time."""

    def typed(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return of_group(torch.softmax(scores, 1).nan_to_num(hidden), weights)

    names = judge(EXERCISES["block_importance"], typed).misconceptions
    assert names == ("taking the largest share among the heads",)


def test_nan_alone_is_named() -> None:
    verdict = judge(EXERCISES["block_importance"], lambda s, w: w @ torch.softmax(s, 1).sum(0))
    assert verdict.misconceptions == ("NaN where no summary is visible",)


def sorted_by(key: Callable, *, reverse: bool = False) -> Callable:
    def choose(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
        first, latest = (
            range(min(num_initial, own + 1)),
            range(max(own - num_local + 1, 0), own + 1),
        )
        forced = sorted({*first, *latest})
        rest = [b for b in range(own + 1) if b not in forced]
        rest.sort(key=lambda b: key(scores, b), reverse=reverse)
        chosen = sorted([*forced, *rest][:top_n])
        return chosen + [-1] * (top_n - len(chosen))

    return choose


@pytest.mark.parametrize(
    ("typed", "mistake"),
    [
        (sorted_by(lambda s, b: s[b]), "taking the smallest scores"),
        (sorted_by(lambda s, b: (-s[b], b), reverse=True), "taking the smallest scores"),
        (sorted_by(lambda s, b: (s[b], b), reverse=True), "letting ties go to the higher number"),
    ],
    ids=["ascending", "turned round", "best first, higher first"],
)
def test_of_a_sort_the_one_true_mistake_is_named(typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES["choose_blocks"], typed).misconceptions == (mistake,)


def infinite_own(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    s = torch.tensor(scores)[: own + 1]
    s[:num_initial] = torch.inf
    s[own] = torch.inf
    chosen = s.argsort(descending=True, stable=True)[:top_n].sort().values.tolist()
    return chosen + [-1] * (top_n - len(chosen))


def forcing(*, first: bool, latest: bool) -> Callable:
    def choose(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
        s = scores[: own + 1]
        for b in range(own + 1):
            if (first and b < num_initial) or (latest and b > own - num_local):
                s[b] = math.inf
        chosen = sorted(sorted(range(own + 1), key=lambda b: -s[b])[:top_n])
        return chosen + [-1] * (top_n - len(chosen))

    return choose


def forced_compete(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    first = range(min(num_initial, own + 1))
    latest = range(max(own - num_local + 1, 0), own + 1)
    order = sorted(range(own + 1), key=lambda b: -scores[b])[: top_n - num_initial - num_local]
    ids = sorted({*first, *latest, *order})
    return ids + [-1] * (top_n - len(ids))


def one_more(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    first, latest = range(min(num_initial, own + 1)), range(max(own - num_local, 0), own + 1)
    rest = sorted(
        (b for b in range(own + 1) if b not in {*first, *latest}), key=lambda b: -scores[b]
    )
    ids = sorted([*{*first, *latest}, *rest][:top_n])
    return ids + [-1] * (top_n - len(ids))


def cut_last(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    ids = sorted(range(own + 1))[:top_n]
    return ids + [-1] * (top_n - len(ids))


def with_topk(scores: list, own: int, top_n: int, num_initial: int, num_local: int) -> list:
    s = torch.tensor(scores) - 1e-6 * torch.arange(len(scores))  # lower numbers first
    s[:num_initial], s[max(own - num_local + 1, 0) : own + 1] = torch.inf, torch.inf
    s[own + 1 :] = -torch.inf
    ids = s.topk(min(top_n, len(s))).indices.sort().values.tolist()
    return ids + [-1] * (top_n - len(ids))


def by_sign(is_moved: Callable) -> Callable:
    def who_learns(o: torch.Tensor, tensors: dict) -> list:
        gradients = torch.autograd.grad(o.sum(), list(tensors.values()), allow_unused=True)
        pairs = zip(tensors, gradients, strict=True)
        return [name for name, g in pairs if g is not None and is_moved(g)]

    return who_learns


sum_above_zero = by_sign(lambda g: g.sum() > 0)
sum_not_zero = by_sign(lambda g: g.sum() != 0)
a_place_above_zero = by_sign(lambda g: g.max() > 0)


TYPED = [
    ("overlap", eq_9, "executing the paper's Eq. 9 as it stands"),
    (
        "overlap",
        begins_there,
        "counting only the summaries that begin in the block, once each",
    ),
    (
        "block_importance",
        scores_first,
        "adding up the heads' scores before the softmax",
    ),
    (
        "block_importance",
        large_negative,
        "giving attention to summaries that are not visible yet",
    ),
    (
        "choose_blocks",
        with_a_slice,
        "taking the last num_local blocks with a slice that means all of them for 0",
    ),
    ("choose_blocks", infinite_own, "forcing the own block, whatever num_local says"),
    ("choose_blocks", forcing(first=False, latest=False), "forcing nothing"),
    ("choose_blocks", forcing(first=True, latest=False), "forcing the first blocks alone"),
    ("choose_blocks", forcing(first=False, latest=True), "forcing the latest blocks alone"),
    (
        "choose_blocks",
        forced_compete,
        "letting forced blocks compete for the free slots, too",
    ),
    ("choose_blocks", one_more, "forcing one local block too many"),
    ("choose_blocks", cut_last, "cutting the list after it was sorted by number"),
    ("choose_blocks", with_topk, "filling empty slots with hidden blocks of the future"),
    ("who_learns", sum_above_zero, "asking whether the gradient's sum is above 0"),
    ("who_learns", sum_not_zero, "asking whether the gradient's sum is 0"),
    ("who_learns", a_place_above_zero, "asking for a place above 0"),
    (
        "who_learns",
        without_allow_unused,
        "not allowing for a tensor that o does not depend on",
    ),
]


@pytest.mark.parametrize(
    ("name", "typed", "mistake"), TYPED, ids=[mistake for _, _, mistake in TYPED]
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES[name], typed).misconception == mistake


def test_thoughts_about_guesses_hold() -> None:
    """The wrong guesses that chance and evenly spread attention lead to are what those hold."""
    thoughts = {
        p.name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for p in exercises.PREDICTIONS
    }
    chance = round(100 * mean("random", 4))
    assert all(
        chance in thoughts[name]
        for name in ("best_4_blocks", "cheap_4_blocks", "without_own_block")
    )
    seen = (torch.arange(256, 512) // 16 + 1).double().mean().item()
    assert round(100 * 4 / seen) in thoughts["best_4_blocks"]
    assert round(100 * mean("latest", 4)) == 62
    told = course_exercises.prediction("cheap_4_blocks").thoughts[-1][1]
    assert "hold 62 %" in told
    assert round(100 * mean("summaries", 4, num_local=1, length=16, stride=16)) == 65


# -- the kernel --


@pytest.fixture
def block_sums() -> Exercise:
    e = EXERCISES["block_sums"]
    if e.missing:
        pytest.skip(e.missing[0])
    return e


@pytest.mark.parametrize("sizes", [(4, 2, 4), (3, 3, 3), (3, 1, 2), (2, 2, 4)], ids=str)
def test_the_kernel_adds_up_what_the_module_adds_up(
    sizes: tuple[int, int, int], block_sums: Exercise
) -> None:
    """A text of whole blocks, whose weights come from the module; the unit is a piece."""
    R, L, NB = sizes
    first, weights = block_selection.overlap_weights(L, 1, R, NB)
    M, K = NB * R - L + 1, R + L - 1
    p = torch.rand(M, generator=torch.Generator().manual_seed(0))
    device = environment.detect().device
    got = torch.empty(NB, device=device)
    arguments = (p.to(device), weights[0].to(device), got, M, R, L, K)
    exercises.block_sums()[NB,](*arguments, KT=triton.next_power_of_2(K))
    expected = [
        sum(
            w * p[int(first[b]) + i]
            for i, w in enumerate(weights[b].tolist())
            if 0 <= int(first[b]) + i < M
        )
        for b in range(NB)
    ]
    torch.testing.assert_close(got.cpu(), torch.stack(expected))


@pytest.mark.parametrize("m", EXERCISES["block_sums"].misconceptions, ids=lambda m: m.name)
def test_a_slip_in_the_kernel_is_named(m: Misconception, block_sums: Exercise) -> None:
    assert judge(block_sums, m.wrong).misconceptions == (m.name,)


def typed_kernel(summary: str, exists: str, total: str) -> Callable:
    """The frame of `block_sums` with its gaps filled by a reader."""
    lines = EXERCISES["block_sums"].statement.split("```python\n")[1].split("```")[0]
    for name, code in (("summary", summary), ("exists", exists), ("total", total)):
        lines = re.sub(rf"{name} = \.\.\. .*", f"{name} = {code}", lines)
    file = f"<a reader's kernel: {summary}, {exists}, {total}>"
    linecache.cache[file] = (len(lines), None, lines.splitlines(keepends=True), file)
    namespace = {"triton": triton, "tl": tl, "weights": torch.ones(2, 3)}
    exec(compile(lines, file, "exec", dont_inherit=True), namespace)
    return namespace["block_sums"]


START, BOTH, SUM = (
    "block * R - L + 1 + place",
    "(summary >= 0) & (summary < M)",
    "tl.sum(p * weight)",
)


@pytest.mark.parametrize(
    ("gaps", "mistake"),
    [
        ((START, BOTH, SUM), None),
        (("block * R - L + place", BOTH, SUM), "starting one summary too early"),
        ((START, "place < K", SUM), "reading summaries that do not exist"),
        ((START, "summary < M", SUM), "masking only past the last summary"),
        (
            (START, "(summary >= 0) and (summary < M)", SUM),
            "masking only past the last summary",
        ),
        ((START, BOTH, "p * weight"), "storing a tile where one number belongs"),
        (
            (START, BOTH, "tl.sum(p)"),
            "forgetting how much of a summary lies in a block",
        ),
        ((START, "summary >= 0 & summary < M", SUM), "reading summaries that do not exist"),
        (("block * K + place", BOTH, SUM), "stepping from block to block by K summaries"),
        (("place", BOTH, SUM), "every program takes the first block"),
        (("(block - 1) * R + place", BOTH, SUM), "executing the paper's Eq. 9 as it stands"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_a_reader_types_into_the_frame_is_recognised(
    gaps: tuple[str, str, str], mistake: str | None, block_sums: Exercise
) -> None:
    verdict = judge(block_sums, typed_kernel(*gaps))
    assert verdict.misconception == mistake
    assert (verdict.outcome == "right") == (mistake is None)


def test_a_tensor_of_the_notebook_in_a_kernel_is_told(block_sums: Exercise) -> None:
    told = judge(block_sums, typed_kernel(START, BOTH, "tl.sum(p * weights)")).text
    assert (
        "`weights` is a tensor of the notebook, not of the kernel. Did you mean `weight`?" in told
    )


def test_a_gap_that_is_left_is_told(block_sums: Exercise) -> None:
    assert (
        "a gap that waits for your code" in judge(block_sums, typed_kernel(START, BOTH, "...")).text
    )


def test_the_frame_that_is_given_is_the_solutions(block_sums: Exercise) -> None:
    """All of its lines but the gaps stand in the solution, in this order."""
    frame = block_sums.statement.split("```")[1].removeprefix("python").splitlines()
    lines = [line.split("#")[0].strip() for line in frame if line.strip() and "..." not in line]
    solution = iter(
        line.split("#")[0].strip() for line in inspect.getsource(exercises.block_sums).splitlines()
    )
    assert len(lines) >= 6
    assert lines.pop(0) == "def block_sums():"
    assert all(line in solution for line in lines)


def test_a_kernel_without_its_decorator_or_its_return_is_told(block_sums: Exercise) -> None:
    def forgotten():
        def kernel(P):
            return P

    assert "@triton.jit" in judge(block_sums, lambda: lambda P: None).text
    assert "return kernel" in judge(block_sums, forgotten).text
    assert "hand over the function" in judge(block_sums, exercises.block_sums()).text
