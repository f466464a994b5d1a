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
from dataclasses import replace

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import exercises as course_exercises
from nsa_tutorial.course import heads as stored_heads
from nsa_tutorial.course.diffs import Edited, together
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

EXERCISES = {e.name: e for e in exercises.EXERCISES}
EXERCISES_OF = EXERCISES["select_blocks"]

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


@pytest.mark.parametrize(
    ("top_n", "num_initial", "num_local"),
    [(1, 0, 0), (1, 0, 1), (3, 1, 2), (5, 0, 1), (5, 2, 3), (9, 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(4, 2, 8), (5, 3, 7), (12, 4, 8), (8, 8, 8)], ids=str)
def test_the_build_is_the_operator(
    sizes: tuple[int, int, int], top_n: int, num_initial: int, num_local: int
) -> None:
    length, stride, BS = sizes
    g = torch.Generator().manual_seed(top_n)
    q, k = torch.randn(50, 6, 4, generator=g), torch.randn(50, 2, 4, generator=g)
    cut = {"length": length, "stride": stride}
    k_cmp = ops.compress(k[None], **cut)
    lse = ops.compressed_attention(q[None], k_cmp, k_cmp, **cut, return_lse=True)[1]
    pick = {"top_n": top_n, "block_size": BS, "num_initial": num_initial, "num_local": num_local}
    expected = ops.select_blocks(q[None], k_cmp, lse, **pick, **cut)[0]
    got = exercises.select_blocks(q, k_cmp[0], lse[0], **pick, **cut)
    assert torch.equal(got.int(), expected)


def test_a_text_too_short_for_a_summary_has_its_forced_blocks() -> None:
    q, k_cmp, lse = torch.ones(3, 2, 4), torch.ones(0, 1, 4), torch.full((3, 2), -torch.inf)
    ids = exercises.select_blocks(q, k_cmp, lse, 3, 2, 8, 4, 1, 1)
    assert ids[:, 0].tolist() == [[0, -1, -1], [0, -1, -1], [0, 1, -1]]


# -- the build --


def build() -> Exercise:
    return EXERCISES["select_blocks"]


def nameless() -> Exercise:
    """It without its mistakes: what an answer is like is looked for among all pairs of them."""
    return replace(build(), misconceptions=())


def worth(case: object) -> tuple[torch.Tensor, ...]:
    """Importance in fp64 of the judged queries, `[queries, H, NB]`, and which blocks are free."""
    q, k_cmp, lse, _, BS, length, stride, num_initial, num_local, since = case.arguments()
    N = len(q)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    rows = summary_rows(rows, N, length=length, stride=stride, cu_seqlens=None)
    overlap = block_selection.overlap_weights(length, stride, BS, -(-N // BS))
    x, keys, sums = (y[None].double() for y in (q, k_cmp, lse))
    scale = q.shape[-1] ** -0.5
    score = block_selection.importance(x, keys, rows, sums, overlap=overlap, scale=scale)[0, since:]
    own = torch.arange(since, N)[:, None, None] // BS
    block = torch.arange(score.shape[-1])
    is_forced = ((block < num_initial) | (block > own - num_local)) & (block <= own)
    return score, is_forced, block > own


@pytest.mark.parametrize("case", EXERCISES_OF.cases, ids=lambda c: c.name)
def test_no_case_turns_on_rounding(case: object) -> None:
    """The last block that is taken and the first that is not differ clearly, or are equal."""
    score, is_forced, is_future = worth(case)
    free = score.masked_fill(is_forced | is_future, -1).sort(-1, descending=True).values
    slots = (case.arguments()[3] - is_forced.sum(-1)).expand(score.shape[:2])
    for row, n in zip(free.flatten(0, 1), slots.flatten().tolist(), strict=True):
        if 0 < n < len(row) and row[n] >= 0:
            gap = (row[n - 1] - row[n]).item()
            assert gap == 0 or gap > 2e-3


@pytest.mark.parametrize("m", EXERCISES_OF.misconceptions, ids=lambda m: m.name)
def test_a_mistake_in_the_build_is_named(m: Misconception) -> None:
    verdict = judge(build(), m.wrong)
    assert verdict.misconceptions == (m.name,)
    assert verdict.held < 9


@pytest.mark.parametrize(
    ("piece", "by", "told"),
    [
        ("sort(dim=-1, descending", "sort(-1, descending", "sort() takes"),
        ("return ids.masked_fill(ids == len(block), -1)",
         "return ids.masked_fill(ids == len(block), -1).float()", "got ids of float32"),
        ("has_ended = (start", "lse[lse.isinf()] = 0; has_ended = (start", "argument 3 is"),
    ],
    ids=["arguments of sort", "floats", "an argument overwritten"],
)  # fmt: skip
def test_an_error_of_its_own_is_told_and_no_mistake_named(piece: str, by: str, told: str) -> None:
    verdict = judge(build(), Edited(build().solution, {piece: by}))
    assert verdict.outcome == "wrong"
    assert told in verdict.text


def half_done(stages: int) -> Callable:
    """What a reader has written after so many stages."""

    def select_blocks(
        q, k_cmp, lse, top_n, block_size, length, stride, num_initial, num_local
    ):  # fmt: skip
        (N, _, D), (M_c, H, _) = q.shape, k_cmp.shape
        NB = -(-N // block_size)
        start, first = torch.arange(M_c) * stride, torch.arange(NB)[:, None] * block_size
        groups = H if stages >= 4 else 1
        keys = k_cmp if stages >= 4 else k_cmp[:, :1]
        s = torch.einsum("nhgd,mhd->nhgm", q.view(N, groups, -1, D), keys) * D**-0.5
        p = torch.exp(s - lse.view(N, groups, -1, 1))
        p = p.sum(2) if stages >= 3 else p[:, :, 0]
        ends = torch.minimum(start + length, first + block_size)
        table = (ends - torch.maximum(start, first)).clamp(min=0) / stride
        worth = p @ table.T if stages >= 2 else torch.nn.functional.pad(p, (0, NB))[..., :NB]
        if stages >= 5:
            worth[..., :num_initial] = torch.inf
            worth[..., NB - num_local :] = torch.inf
        return worth.argsort(dim=-1, descending=True, stable=True)[..., :top_n].sort(-1).values

    return select_blocks


@pytest.mark.parametrize("stages", range(1, 6))
def test_a_half_done_build_holds_its_stages(stages: int) -> None:
    """Stage by stage, for the last query alone; what comes next is not asked for."""
    assert judge(nameless(), half_done(stages)).held == stages


def from_another_notebook(
    q, k_cmp, lse, top_n, block_size, length, stride, num_initial, num_local
):  # fmt: skip
    """Loops and a dictionary in place of tables: as free in form as an answer may be."""
    (N, HQ, D), (M_c, H, _) = q.shape, k_cmp.shape
    lists = torch.full((N, H, top_n), -1)
    for t, head in itertools.product(range(N), range(H)):
        own, worth = t // block_size, {}
        for block in range(own + 1):
            worth[block] = 0.0
            for j, pieces in exercises.overlap(length, stride, block_size, block).items():
                if j < M_c and j * stride + length <= t + 1:
                    for hq in range(head * HQ // H, (head + 1) * HQ // H):
                        s = q[t, hq] @ k_cmp[j, head] * D**-0.5
                        worth[block] += pieces * math.exp(s - lse[t, hq])
        forced = {b for b in worth if b < num_initial or b > own - num_local}
        rest = sorted(worth.keys() - forced, key=lambda b: (-worth[b], b))
        ids = sorted([*forced, *rest][:top_n])
        lists[t, head, : len(ids)] = torch.tensor(ids)
    return lists


def test_loops_are_right_too() -> None:
    some = Exercise(
        "select_blocks", "", 1, 1, exercises.select_blocks, run=build().run,
        cases=tuple(c for c in build().cases if len(c.arguments()[0]) <= 40),
    )  # fmt: skip
    assert len(some.cases) >= 4
    assert judge(some, from_another_notebook).outcome == "right"


def by_the_operator(q, k_cmp, lse, top_n, block_size, length, stride, num_initial, num_local):
    return ops.select_blocks(
        q[None], k_cmp[None], lse[None], top_n=top_n, block_size=block_size, length=length,
        stride=stride, num_initial=num_initial, num_local=num_local,
    )[0]  # fmt: skip


def test_the_operator_is_refused() -> None:
    assert "the course's own function" in judge(nameless(), by_the_operator).text


def test_a_wrong_list_is_drawn() -> None:
    wrong = next(m for m in build().misconceptions if m.name == "taking the smallest scores")
    picture = judge(build(), wrong.wrong).picture
    assert picture.finding.startswith("Query 31: your list is [0, 2], expected [1, 3]")


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


def test_summaries_of_a_whole_block_choose_as_well_once_the_own_block_is_forced() -> None:
    """Both are 65 %, as the chapter says; a reader guesses one after having read the other."""
    held = [
        mean("summaries", 4, num_local=1, **sizes) for sizes in ({}, {"length": 16, "stride": 16})
    ]
    assert [round(100 * x) for x in held] == [65, 65]


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
    "best": lambda: pictures.draw_best(),
    "near and far": lambda: pictures.draw_near_and_far(),
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
    stored = first.png()
    assert stored == draw().png()
    assert len(stored) <= 60_000
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
    assert all(chance in thoughts[name] for name in ("cheap_4_blocks", "without_own_block"))
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
    block_pieces, summary_pieces, NB = sizes
    first, weights = block_selection.overlap_weights(summary_pieces, 1, block_pieces, NB)
    M_c, touch = NB * block_pieces - summary_pieces + 1, block_pieces + summary_pieces - 1
    p = torch.rand(M_c, generator=torch.Generator().manual_seed(0))
    device = environment.detect().device
    got = torch.empty(NB, device=device)
    tensors = (p.to(device), weights[0].to(device), got)
    numbers = (M_c, block_pieces, summary_pieces, touch)
    exercises.block_sums()[NB,](*tensors, *numbers, PLACES=triton.next_power_of_2(touch))
    expected = [
        sum(
            w * p[int(first[b]) + i]
            for i, w in enumerate(weights[b].tolist())
            if 0 <= int(first[b]) + i < M_c
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
    "block * block_pieces - summary_pieces + 1 + place",
    "(summary >= 0) & (summary < M_c)",
    "tl.sum(share * weight)",
)


@pytest.mark.parametrize(
    ("gaps", "mistake"),
    [
        ((START, BOTH, SUM), None),
        (
            ("block * block_pieces - summary_pieces + place", BOTH, SUM),
            "starting one summary too early",
        ),
        ((START, "place < touch", SUM), "asking for the place where the summary's number decides"),
        ((START, "summary < M_c", SUM), "masking only past the last summary"),
        (
            (START, "(summary >= 0) and (summary < M_c)", SUM),
            "masking only past the last summary",
        ),
        ((START, BOTH, "share * weight"), "storing a tile where one number belongs"),
        (
            (START, BOTH, "tl.sum(share)"),
            "forgetting how much of a summary lies in a block",
        ),
        ((START, "summary >= 0 & summary < M_c", SUM), "reading summaries that do not exist"),
        (("block * touch + place", BOTH, SUM), "stepping from block to block by `touch` summaries"),
        (("place", BOTH, SUM), "every program takes the first block"),
        (
            ("(block - 1) * block_pieces + place", BOTH, SUM),
            "executing the paper's Eq. 9 as it stands",
        ),
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
    told = judge(block_sums, typed_kernel(START, BOTH, "tl.sum(share * weights)")).text
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
