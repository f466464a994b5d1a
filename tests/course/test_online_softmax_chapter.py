"""Chapter 03's exercises: their solutions against the module, and answers as readers write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import online_softmax as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.exact import online_softmax

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("online_softmax")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_step_of_the_exercise_is_the_modules() -> None:
    state, scale_log2 = online_softmax.start(3, 2, dtype=torch.float64), 0.3
    for seed in range(4):
        acc_s, v = 9 * randn(3, 5, seed=seed), randn(5, 2, seed=9 + seed)
        mine = solutions.online_step(*state, acc_s, v, scale_log2)
        state = online_softmax.update(state, acc_s, v, scale_log2)
        torch.testing.assert_close(mine, tuple(state))


def test_the_guard_of_the_exercise_is_the_modules() -> None:
    """The sums of a walk over chunks of which many are masked, for one row also the first."""
    state, scale_log2 = online_softmax.start(3, 1, dtype=torch.float64), 1.5
    running_sum = torch.zeros(3, dtype=torch.float64)
    for seed in range(4):
        acc_s = 40 * randn(3, 2, seed=seed) - 300
        acc_s = acc_s.masked_fill(acc_s < -280, -torch.inf)
        _, factor, p = solutions.guarded_step(state.scores_max, acc_s, scale_log2)
        running_sum = running_sum * factor + p.sum(1)
        state = online_softmax.update(state, acc_s, torch.ones(2, 1), scale_log2)
        torch.testing.assert_close(running_sum, state.running_sum)
        if seed == 0:
            assert (state.scores_max == -torch.inf).any()
    assert (running_sum > 0).all()


def test_merging_many_is_merging_two_again_and_again() -> None:
    o, lse = randn(4, 5, 3), 20 * randn(4, 5, seed=1)
    lse[1:3, 2], o[1:3, 2] = -torch.inf, 0.0
    merged = o[0], lse[0]
    for part in range(1, 4):
        merged = online_softmax.merge(*merged, o[part], lse[part])
    torch.testing.assert_close(solutions.merge_many(o, lse), merged)


# -- answers as readers write them --


def no_conversion(acc_s, scale):
    p = torch.exp2(acc_s * scale * math.log2(math.e))
    return p / p.sum(1, keepdim=True), torch.log2(p.sum(1))


def kept_axis(acc_s, scale):
    return torch.softmax(acc_s * scale, 1), torch.logsumexp(acc_s * scale, 1, keepdim=True)


def scaled_before(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    acc_s = acc_s * scale_log2
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor, p = torch.exp2(scores_max_prev - scores_max), torch.exp2(acc_s - scores_max[:, None])
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def exp_in_the_factor(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def zero_where_masked(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    return scores_max, factor, torch.where(acc_s.isinf(), 0.0, p)


def finite_max(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1)).nan_to_num(neginf=0.0)
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    return scores_max, factor, torch.exp2((acc_s - scores_max[:, None]) * scale_log2)


def formula(o1, lse1, o2, lse2):
    lse = torch.log(torch.exp(lse1) + torch.exp(lse2))
    return torch.exp(lse1 - lse)[:, None] * o1 + torch.exp(lse2 - lse)[:, None] * o2, lse


def denominators(o1, lse1, o2, lse2):
    w1, w2 = torch.exp(lse1), torch.exp(lse2)
    return (o1 * w1[:, None] + o2 * w2[:, None]) / (w1 + w2)[:, None], torch.log(w1 + w2)


def guarded_but_overflowing(o1, lse1, o2, lse2):
    w1, w2 = torch.exp(lse1), torch.exp(lse2)
    total = w1 + w2
    return (o1 * w1[:, None] + o2 * w2[:, None]) / total.clamp(min=1e-30)[:, None], torch.log(total)


def nan_for_nan(o, lse):
    return (torch.softmax(lse, 0)[..., None] * o).sum(0).nan_to_num(), torch.logsumexp(lse, 0)


def shares_cleared(o, lse):
    return (torch.softmax(lse, 0).nan_to_num()[..., None] * o).sum(0), torch.logsumexp(lse, 0)


PRECAUTIONS = "the formula as it stands, without its two precautions"


@pytest.mark.parametrize(
    ("name", "attempt", "named"),
    [
        (
            "softmax_base_two",
            no_conversion,
            {"an lse left in log2 units", "a softmax with no maximum subtracted"},
        ),
        ("softmax_base_two", kept_axis, {"an lse with an axis too many"}),
        ("online_step", scaled_before, {"a maximum that is stored scaled"}),
        (
            "online_step",
            exp_in_the_factor,
            {"folding log2(e) in a second time, or taking exp where exp2 is meant"},
        ),
        ("guarded_step", zero_where_masked, {"a guard on p that the factor lacks"}),
        ("guarded_step", finite_max, {"a stand-in that leaks into the state"}),
        ("merge_partials", formula, {PRECAUTIONS}),
        ("merge_partials", denominators, {PRECAUTIONS}),
        ("merge_partials", guarded_but_overflowing, {"taking exp of an lse as it comes"}),
        ("merge_many", nan_for_nan, {"a NaN set to 0 after the sum"}),
        ("merge_many", shares_cleared, {"a weight of 0 that meets a NaN"}),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    assert set(judge(KNOWN[name], attempt).misconceptions) == named


@pytest.mark.parametrize(
    "attempt",
    [online_softmax.merge, lambda o1, l1, o2, l2: solutions.merge_many(
        torch.stack([o1, o2]), torch.stack([l1, l2]))],
    ids=["the module's", "by merge_many"],
)  # fmt: skip
def test_other_ways_to_merge_are_right(attempt: Callable) -> None:
    assert judge(KNOWN["merge_partials"], attempt).outcome == "right"


def test_clearing_a_nan_is_spoken_of_where_the_check_cannot_see_it() -> None:
    e = KNOWN["guarded_step"]

    def cleared(scores_max_prev, acc_s, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
        factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
        return scores_max, factor.nan_to_num(), p.nan_to_num()

    assert judge(e, cleared).outcome == "right"
    assert "nan_to_num" in e.statement
    assert "`NaN`" in e.why
