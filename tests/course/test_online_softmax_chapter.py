"""Chapter 03's exercises: their solutions against the module, and answers as readers write them."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course import predict, reader, reveal
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import online_softmax as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.values import short
from nsa_tutorial.course.widgets import online_softmax as pictures
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.runtime import environment

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("online_softmax")
LOG2_E = math.log2(math.e)
CHAPTER = Path(__file__).resolve().parents[2] / "notebooks" / "03_online_softmax.ipynb"

here = environment.detect()
needs_triton = pytest.mark.skipif(
    here.why_not("triton", here.device) is not None, reason="no Triton on this machine"
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_step_of_the_exercise_is_the_modules() -> None:
    """Over chunks of which many are masked, for one row also the first, and for one all."""
    state, scale_log2 = online_softmax.start(3, 2, dtype=torch.float64), 1.5
    mine = tuple(state)
    for seed in range(4):
        acc_s, v = 40 * randn(3, 2, seed=seed) - 300, randn(2, 2, seed=9 + seed)
        acc_s = acc_s.masked_fill(acc_s < -280, -torch.inf)
        acc_s[2] = -torch.inf
        mine = solutions.online_step(*mine, acc_s, v, scale_log2)
        state = online_softmax.update(state, acc_s, v, scale_log2)
        torch.testing.assert_close(mine, tuple(state))
    assert (state.running_sum[:2] > 0).all()
    scale = scale_log2 / online_softmax.LOG2_E
    torch.testing.assert_close(solutions.finish(*mine, scale), online_softmax.finish(state, scale))


@pytest.mark.parametrize("chunk", [1, 4, 9, 20])
def test_the_loop_of_the_exercise_is_the_modules(chunk: int) -> None:
    q, k, v = randn(3, 4), randn(9, 4, seed=1), randn(9, 5, seed=2)
    right = online_softmax.streaming_attention(q, k, v, chunk=9, causal=False)
    torch.testing.assert_close(solutions.one_pass(q, k, v, chunk), right)


def test_gradients_flow_through_the_readers_loop() -> None:
    inputs = [randn(n, 3, seed=n).requires_grad_() for n in (2, 6, 7)]
    q, k, v = inputs[0], inputs[1], inputs[2][:6]
    o, lse = solutions.one_pass(q, k, v, 4)
    s = q @ k.T * 3**-0.5
    right = torch.autograd.grad((s.softmax(1) @ v).sum() + s.logsumexp(1).sum(), inputs)
    found = torch.autograd.grad(o.sum() + lse.sum(), inputs)
    torch.testing.assert_close(found, right)


def test_a_row_without_a_key_has_gradients() -> None:
    """They are 0, where the loss uses the output."""
    acc_s = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]], requires_grad=True)
    v = randn(2, 1).float()
    state = online_softmax.start(2, 1)
    o, _ = solutions.finish(*solutions.online_step(*state, acc_s, v, 1.0), 1.0)
    (found,) = torch.autograd.grad(o.sum(), acc_s)
    assert found.isfinite().all()
    assert (found[1] == 0).all()


def test_merging_many_is_merging_two_again_and_again() -> None:
    o, lse = randn(4, 5, 3), 20 * randn(4, 5, seed=1)
    lse[1:3, 2], o[1:3, 2] = -torch.inf, 0.0
    merged = o[0], lse[0]
    for part in range(1, 4):
        merged = online_softmax.merge(*merged, o[part], lse[part])
    torch.testing.assert_close(solutions.merge_many(o, lse), merged)


@needs_triton
@pytest.mark.parametrize("M", [1, 4, 7, 12])
def test_the_kernel_walks_rows_of_any_length(M: int) -> None:
    scores = 3 * randn(2, M).float() - 10
    lse = solutions._run_row_lse(solutions.row_lse, scores, 0.5)
    torch.testing.assert_close(lse, torch.logsumexp(0.5 * scores, 1))


def test_the_constant_of_the_aside_is_log2_of_e() -> None:
    (constant,) = struct.unpack(">f", bytes.fromhex("3FB8AA3B"))
    assert constant == pytest.approx(online_softmax.LOG2_E)


@pytest.mark.parametrize("reference", ["chunk's own max", "no max"])
def test_what_passes_the_end_of_fp32_first_is_acc_o(reference: str) -> None:
    """One lift above the limit, the denominator is still finite."""
    lift = pictures.limit(reference) + 1
    moments = pictures.walk(pictures.row(lift), pictures.positions(), reference)
    first = next(m for m in moments if not math.isfinite(m.acc_o))
    assert math.isfinite(first.running_sum)


# -- answers as readers write them --


def lse_in_two_walks() -> object:
    """Right, though each score is read twice."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(acc_s, axis=0))
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf"))
            total += tl.sum(tl.exp2((acc_s - largest) * scale_log2), axis=0)
        tl.store(LSE + row, largest * scale_log2 * ln_2 + tl.log(total))

    return kernel


def lse_of_a_padded_row() -> object:
    """A row of negative scores has its powers wiped out by the places behind its end."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.where(key < M, tl.load(S + row * M + key), 0.0) * scale_log2
            above = tl.maximum(largest, tl.max(acc_s, axis=0))
            total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(acc_s - above), axis=0)
            largest = above
        tl.store(LSE + row, (largest + tl.log2(total)) * ln_2)

    return kernel


def lse_of_low_padding() -> object:
    """Right unless a row lies lower than the places behind its end."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=-1e4) * scale_log2
            above = tl.maximum(largest, tl.max(acc_s, axis=0))
            total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(acc_s - above), axis=0)
            largest = above
        tl.store(LSE + row, (largest + tl.log2(total)) * ln_2)

    return kernel


def lse_in_two_units() -> object:
    """`tl.log`, where `ln_2` is multiplied onto the total."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf")) * scale_log2
            above = tl.maximum(largest, tl.max(acc_s, axis=0))
            total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(acc_s - above), axis=0)
            largest = above
        tl.store(LSE + row, (largest + tl.log(total)) * ln_2)

    return kernel


def lse_without_rescale() -> object:
    """The old sum keeps its unit when the maximum rises."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf")) * scale_log2
            largest = tl.maximum(largest, tl.max(acc_s, axis=0))
            total += tl.sum(tl.exp2(acc_s - largest), axis=0)
        tl.store(LSE + row, (largest + tl.log2(total)) * ln_2)

    return kernel


def lse_rescaled_without_scale() -> object:
    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf"))
            above = tl.maximum(largest, tl.max(acc_s, axis=0))
            total *= tl.exp2(largest - above)
            total += tl.sum(tl.exp2((acc_s - above) * scale_log2), axis=0)
            largest = above
        tl.store(LSE + row, (largest * scale_log2 + tl.log2(total)) * ln_2)

    return kernel


def lse_of_padding_at_minus_1000() -> object:
    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        largest, total = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=-1e3) * scale_log2
            above = tl.maximum(largest, tl.max(acc_s, axis=0))
            total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(acc_s - above), axis=0)
            largest = above
        tl.store(LSE + row, (largest + tl.log2(total)) * ln_2)

    return kernel


@triton.jit
def lse_masked(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr, MASK: tl.constexpr):
    row = tl.program_id(0)
    largest, total = float("-inf"), 0.0
    for first in range(0, M, BS):
        key = first + tl.arange(0, BS)
        mask = key < M
        if MASK == "one too many":
            mask = key <= M
        if MASK == "row twice":
            mask = row * M + key < M
        if MASK == "one too few":
            mask = key < M - 1
        acc_s = tl.load(S + row * M + key, mask=mask, other=float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(acc_s, axis=0))
        total *= tl.exp2((before - largest) * scale_log2)
        total += tl.sum(tl.exp2((acc_s - largest) * scale_log2), axis=0)
    tl.store(LSE + row, (largest * scale_log2 + tl.log2(total)) * ln_2)


class Masked:
    """`lse_masked` with its mask chosen, launched like a kernel."""

    run = None

    def __init__(self, mask: str) -> None:
        self.mask = mask

    def __getitem__(self, grid: tuple) -> Callable:
        return functools.partial(lse_masked[grid], MASK=self.mask)


@needs_triton
@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ("one too many", "a mask that lets one key too many through"),
        ("row twice", "a mask that adds where the row begins"),
        ("one too few", "a mask that leaves out the last key"),
    ],
)
def test_a_kernels_mask_is_named_and_its_scores_are_shown(mask: str, named: str) -> None:
    verdict = judge(KNOWN["row_lse"], functools.partial(Masked, mask))
    assert verdict.misconceptions == (named,)
    assert "S = [[" in verdict.text


@needs_triton
def test_a_gap_left_in_the_kernel_is_named() -> None:
    def row_lse() -> object:
        @triton.jit
        def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
            row = tl.program_id(0)
            tl.store(LSE + row, ...)

        return kernel

    assert "waits for your code" in judge(KNOWN["row_lse"], row_lse).text


@needs_triton
def test_torch_in_a_kernel_is_named() -> None:
    def row_lse() -> object:
        @triton.jit
        def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
            row = tl.program_id(0)
            acc_s = tl.load(S + row * M + tl.arange(0, BS))
            tl.store(LSE + row, torch.maximum(tl.max(acc_s, axis=0), tl.min(acc_s, axis=0)))

        return kernel

    assert "inside a kernel only `tl` functions work" in judge(KNOWN["row_lse"], row_lse).text


def test_a_gap_left_in_an_answer_is_named() -> None:
    told = judge(KNOWN["online_step"], lambda *step: (step[3].amax(1), ..., step[2])).text
    assert "`running_sum`: a `...` came back" in told
    assert "ellipsis" not in told.lower()


@needs_triton
@pytest.mark.parametrize(
    ("attempt", "named"),
    [
        (lse_in_two_walks, set()),
        (lse_of_a_padded_row, {"a masked place that counts as a score of 0"}),
        (lse_without_rescale, {"a missing rescale"}),
        (lse_of_low_padding, {"a masked place with a finite score"}),
        (lse_of_padding_at_minus_1000, {"a masked place with a finite score"}),
        (lse_rescaled_without_scale, {"a rescale factor without scale_log2"}),
        (lse_in_two_units, {"an lse that adds natural units and log2 units"}),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_a_readers_kernel_is_judged(attempt: Callable, named: set[str]) -> None:
    verdict = judge(KNOWN["row_lse"], attempt)
    assert set(verdict.misconceptions) == named
    assert (verdict.outcome == "right") == (not named)


def test_a_kernel_that_is_not_returned_is_spoken_of() -> None:
    def row_lse():
        def kernel(S, LSE, scale_log2, ln_2, M, BS):
            pass

    e = KNOWN["row_lse"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert "return kernel" in judge(e, row_lse).text


def test_the_minutes_are_told() -> None:
    """The four optional exercises are not among the chapter's minutes."""
    names = ("one_pass", "row_lse", "merge_partials", "merge_many")
    optional = [KNOWN[name].minutes for name in names]
    minutes = sum(e.minutes for e in KNOWN.values()) - sum(optional)
    text = " ".join(CHAPTER.read_text(encoding="utf-8").replace('\\n",', "").split())
    text = text.replace('" ', "").replace('"', "")
    assert f"{minutes} of them exercises" in text
    assert f"Four more exercises are optional, {sum(optional)} minutes" in text


# -- builds: how far a half-done function carries --


def of_the_chunk_alone(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = acc_s.amax(1)
    p = torch.exp2(acc_s - scores_max[:, None])
    return scores_max, p.sum(1), p @ v


def without_a_guard(scale=True):
    def online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
        factor = scale_log2 if scale else 1.0
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        rate = torch.exp2((scores_max_prev - scores_max) * factor)
        p = torch.exp2((acc_s - scores_max[:, None]) * factor)
        return scores_max, running_sum * rate + p.sum(1), acc_o * rate[:, None] + p @ v

    return online_step


def for_one_row(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.max())
    rate, p = torch.exp2(scores_max_prev - scores_max), torch.exp2(acc_s - scores_max)
    return scores_max, running_sum * rate + p.sum(), acc_o * rate + p @ v


@pytest.mark.parametrize(
    ("attempt", "held"),
    [
        (of_the_chunk_alone, 1),
        (for_one_row, 3),
        (without_a_guard(scale=False), 4),
        (without_a_guard(), 6),
        (lambda *a: tuple(x.nan_to_num(neginf=-math.inf) for x in without_a_guard()(*a)), 7),
        (solutions.online_step, 8),
    ],
    ids=["the chunk alone", "one row", "no scale", "no guard", "cleared", "all"],
)
def test_a_half_done_step_is_praised_for_what_it_does(attempt: Callable, held: int) -> None:
    assert judge(replace(KNOWN["online_step"], misconceptions=()), attempt).held == held


@pytest.mark.parametrize(
    ("attempt", "held"),
    [
        (lambda m, s, o, scale: (o, m), 1),
        (lambda m, s, o, scale: (o / s, m + torch.log(s)), 2),
        (lambda m, s, o, scale: (o / s, m * scale + torch.log(s)), 3),
        (lambda m, s, o, scale: (o / s[:, None], m * scale + torch.log(s)), 4),
        (solutions.finish, 6),
    ],
    ids=["nothing divided", "no scale", "no column", "no guard", "all"],
)
def test_a_half_done_end_is_praised_for_what_it_does(attempt: Callable, held: int) -> None:
    assert judge(replace(KNOWN["finish"], misconceptions=()), attempt).held == held


@pytest.mark.parametrize("factor", [lambda x: torch.exp(x), lambda x: torch.exp2(x * LOG2_E)])
def test_an_lse_whose_factor_overflows_is_named_where_it_does(factor: Callable) -> None:
    def finish(scores_max, running_sum, acc_o, scale):
        divisor = torch.where(running_sum == 0, 1.0, running_sum)
        return acc_o / divisor[:, None], (factor(scores_max * scale) * running_sum).log()

    verdict = judge(KNOWN["finish"], finish)
    assert (verdict.misconceptions, verdict.held) == (("a factor that overflows",), 1)


@pytest.mark.parametrize("eps", [1.0, 1e-30])
def test_a_floor_under_the_divisor_is_right(eps: float) -> None:
    """A row that saw a key has a sum of at least 1, the largest score's own term."""

    def finish(scores_max, running_sum, acc_o, scale):
        o = acc_o / running_sum.clamp(min=eps)[:, None]
        return o, scores_max * scale + running_sum.log()

    assert judge(KNOWN["finish"], finish).outcome == "right"


def by_softmax(q, k, v, chunk):
    s = q @ k.T * q.shape[1] ** -0.5
    return torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)


def by_the_course(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    state = online_softmax.State(scores_max_prev, running_sum, acc_o)
    return tuple(online_softmax.update(state, acc_s, v, scale_log2))


@pytest.mark.parametrize(
    ("name", "attempt", "told"),
    [("one_pass", by_softmax, "PyTorch's softmax"),
     ("online_step", by_the_course, "the course's own function")],
)  # fmt: skip
def test_what_the_chapter_builds_may_not_be_called(name: str, attempt: Callable, told: str) -> None:
    verdict = judge(KNOWN[name], attempt)
    assert verdict.outcome == "wrong"
    assert told in verdict.text


def test_summing_scores_is_named() -> None:
    def online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        rate = torch.exp2((scores_max_prev - scores_max) * scale_log2)
        running_sum = running_sum * rate + acc_s.sum(1)
        acc_s = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
        return scores_max, running_sum, acc_o * rate[:, None] + acc_s @ v

    (named,) = judge(KNOWN["online_step"], online_step).misconceptions
    assert named == "summing the scores in place of their powers"


# -- mistakes --


def never_scaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return solutions.online_step(scores_max_prev, running_sum, acc_o, acc_s, v, 1.0)


def whole(guard):
    """A step around what a reader guards: its maximum, factor and powers."""

    @functools.wraps(guard)
    def online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
        scores_max, factor, p = guard(scores_max_prev, acc_s, scale_log2)
        return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v

    del online_step.__wrapped__  # it has other arguments
    return online_step


TYPED = """
def online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    m = torch.maximum(scores_max_prev, acc_s.amax(1))
    base = torch.where(m == -torch.inf, 0.0, m)
    rate = torch.exp2((scores_max_prev - base) * scale_log2)
    p = torch.exp2((acc_s - base[:, None]) * scale_log2)
    l = running_sum * rate + p.sum(1)
    return m, l, acc_o * rate[:, None] + p @ v
"""
NO_BASE = {"torch.where(m == -torch.inf, 0.0, m)": "m"}
CALMED = {"(scores_max_prev - base) *": "(scores_max_prev - base).nan_to_num() *",
          "(acc_s - base[:, None]) *": "(acc_s - base[:, None]).nan_to_num() *"}  # fmt: skip
SLIPS = [
    ({"running_sum * rate + p.sum(1)": "(running_sum + p.sum(1)) * rate"},
     "rescaling the new terms, or clearing them", 0),
    ({"acc_o * rate[:, None] + p @ v": "(acc_o + p @ v) * rate[:, None]"},
     "rescaling the new terms, or clearing them", 0),
    (NO_BASE | CALMED, "an exponent of 0 in place of a NaN", 6),
    ({"    m =": "    acc_s = acc_s * scale_log2\n    m =", "base) * scale_log2": "base)",
      "base[:, None]) * scale_log2": "base[:, None])"}, "a maximum that is stored scaled", 4),
    ({"return m,": "return m * scale_log2,"}, "a maximum that is stored scaled", 4),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "named", "held"), SLIPS, ids=str)
def test_a_slip_in_a_typed_step_is_named(edits: dict[str, str], named: str, held: int) -> None:
    source = TYPED
    for piece, by in edits.items():
        assert source.count(piece) == 1
        source = source.replace(piece, by)
    namespace = {"torch": torch}
    exec(source, namespace)
    verdict = judge(KNOWN["online_step"], namespace["online_step"])
    assert (verdict.misconceptions, verdict.held) == ((named,), held)


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


def least_max(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1)).clamp(min=-1e30)
    return guarded_from(scores_max, scores_max, scores_max_prev, acc_s, scale_log2)


def guarded_where(is_guarded, leaks=False):
    """Exponents measured from 0 in the rows that `is_guarded` chooses."""

    def guarded_step(scores_max_prev, acc_s, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        shift = torch.where(is_guarded(scores_max_prev, acc_s), 0.0, scores_max)
        handed_on = shift if leaks else scores_max
        return guarded_from(handed_on, shift, scores_max_prev, acc_s, scale_log2)

    return guarded_step


def had_seen_no_key(scores_max_prev, acc_s):
    return scores_max_prev == -torch.inf


def sees_no_key_now(scores_max_prev, acc_s):
    return acc_s.amax(1) == -torch.inf


def zeroed_where_it_had_seen_none(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    had_none = had_seen_no_key(scores_max_prev, acc_s)
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, torch.where(had_none, 0.0, factor), torch.where(had_none[:, None], 0.0, p)


def step_without_axes(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor + p @ v


def guard_without_axes(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    shift = scores_max.nan_to_num(neginf=0.0)
    factor = torch.exp2((scores_max_prev - shift) * scale_log2)
    return scores_max, factor, torch.exp2((acc_s - shift) * scale_log2)


def merge_without_axes(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    shift = lse.masked_fill(lse.isinf(), 0)
    return torch.exp(lse1 - shift) * o1 + torch.exp(lse2 - shift) * o2, lse


def shares_without_axes(o, lse):
    w = torch.softmax(lse, 0).nan_to_num()
    return (w * torch.where(lse.isinf()[..., None], 0.0, o)).sum(0), torch.logsumexp(lse, 0)


def outputs_cleared(o, lse):
    return many_from(lse.amax(0).nan_to_num(neginf=0.0), o.nan_to_num(), lse)


def result_cleared(o, lse):
    o, lse = many_from(lse.amax(0).nan_to_num(neginf=0.0), o, lse)
    return o.nan_to_num(), lse


def left_out_by_weight(o, lse):
    w = torch.softmax(lse, 0).nan_to_num()[..., None]
    return torch.where(w == 0, 0.0, w * o).sum(0), torch.logsumexp(lse, 0)


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


def never_below_0(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, torch.relu(acc_s.amax(1)))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def own_powers(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - acc_s.amax(1)[:, None]) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def scores_times_v(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    state = solutions.online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2)
    factor = torch.exp2((scores_max_prev - state[0]) * scale_log2)
    return *state[:2], acc_o * factor[:, None] + acc_s @ v


def one_sum(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    state = solutions.online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2)
    factor = torch.exp2((scores_max_prev - state[0]) * scale_log2)
    p = torch.exp2((acc_s - state[0][:, None]) * scale_log2)
    return state[0], running_sum * factor + p.sum(), state[2]


def sum_first(*arguments):
    scores_max, running_sum, acc_o = solutions.online_step(*arguments)
    return running_sum, scores_max, acc_o


def sum_last(*arguments):
    scores_max, running_sum, acc_o = solutions.online_step(*arguments)
    return scores_max, acc_o, running_sum


def guarded_from(scores_max, shift, scores_max_prev, acc_s, scale_log2):
    factor = torch.exp2((scores_max_prev - shift) * scale_log2)
    return scores_max, factor, torch.exp2((acc_s - shift[:, None]) * scale_log2)


def from_0(scores_max_prev, acc_s, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    return scores_max, torch.exp2(scores_max_prev * scale_log2), torch.exp2(acc_s * scale_log2)


def zeros_if_any(scores_max_prev, acc_s, scale_log2):
    m = torch.maximum(scores_max_prev, acc_s.amax(1))
    shift = torch.zeros_like(m) if m.isinf().any() else m
    return guarded_from(m, shift, scores_max_prev, acc_s, scale_log2)


def clamped(scores_max_prev, acc_s, scale_log2):
    m = torch.maximum(scores_max_prev, acc_s.amax(1)).clamp(min=0)
    return guarded_from(m, m, scores_max_prev, acc_s, scale_log2)


def clamped_shift(scores_max_prev, acc_s, scale_log2):
    m = torch.maximum(scores_max_prev, acc_s.amax(1))
    return guarded_from(m, m.clamp(min=0), scores_max_prev, acc_s, scale_log2)


def old_maximum_replaced(scores_max_prev, acc_s, scale_log2):
    prev = scores_max_prev.nan_to_num(neginf=0.0)
    m = torch.maximum(prev, acc_s.amax(1))
    return guarded_from(m, m, prev, acc_s, scale_log2)


def both_replaced(scores_max_prev, acc_s, scale_log2):
    m = torch.maximum(scores_max_prev, acc_s.amax(1))
    prev, shift = (x.nan_to_num(neginf=0.0) for x in (scores_max_prev, m))
    return guarded_from(m, shift, prev, acc_s, scale_log2)


def joined_first(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return torch.exp(lse1 - lse)[:, None] * o1 + torch.exp(lse2 - lse)[:, None] * o2, lse


def joined_first_and_guarded(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    shift = lse.masked_fill(lse.isinf(), 0)
    return torch.exp(lse1 - shift)[:, None] * o1 + torch.exp(lse2 - shift)[:, None] * o2, lse


def smallest_sum(floor):
    def merge(o1, lse1, o2, lse2):
        shift = torch.maximum(lse1, lse2).nan_to_num(neginf=0.0)
        w1, w2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)
        total = (w1 + w2).clamp(min=floor)
        return (o1 * w1[:, None] + o2 * w2[:, None]) / total[:, None], shift + torch.log(total)

    return merge


def many_from(shift, o, lse, floor=0.0):
    w = torch.exp(lse - shift)
    total = w.sum(0)
    o = torch.where(lse.isinf()[..., None], 0.0, o)
    o = (w[..., None] * o).sum(0) / torch.where(total == 0, 1.0, total)[:, None]
    return o, shift + torch.log(total.clamp(min=floor))


def largest_of_all(o, lse):
    return many_from(lse.max(), o, lse)


def largest_of_all_guarded(o, lse):
    return many_from(lse.max().nan_to_num(neginf=0.0), o, lse)


def smallest_total(o, lse):
    return many_from(lse.amax(0).nan_to_num(neginf=0.0), o, lse, floor=1e-12)


def along_the_rows(o, lse):
    return (torch.softmax(lse, 1)[..., None] * o).sum(0), torch.logsumexp(lse, 0)


def powers_times_values(along):
    """`p * v`, or `p.T * v`, summed over the first axis."""

    def online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
        state = solutions.online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2)
        factor = torch.exp2((scores_max_prev - state[0]) * scale_log2)
        p = torch.exp2((acc_s - state[0][:, None]) * scale_log2)
        return *state[:2], acc_o * factor[:, None] + (along(p) * v).sum(0)

    return online_step


def powers_by_values(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    state = solutions.online_step(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2)
    factor = torch.exp2((scores_max_prev - state[0]) * scale_log2)
    return *state[:2], acc_o * factor[:, None] + torch.exp2((acc_s - state[0]) * scale_log2) * v


def one_of_two_scaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2(acc_s * scale_log2 - scores_max[:, None])
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def rows_without_axes(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor + p @ v


def means(o, lse):
    return o.mean(0), lse.mean(0)


def mean_of_shares(o, lse):
    return (torch.softmax(lse, 0)[..., None] * o).mean(0), torch.logsumexp(lse, 0)


def summed_along_the_rows(o, lse):
    return (torch.softmax(lse, 1)[..., None] * o).sum(1), torch.logsumexp(lse, 1)


def pythons_max(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = max(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def in_order(*places):
    """The step's three results in another order."""
    return lambda *arguments: tuple(solutions.online_step(*arguments)[i] for i in places)


def measured_from(shift):
    """The frame of `guarded_step`, its gap filled."""

    def guarded_step(scores_max_prev, acc_s, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        return guarded_from(
            scores_max, shift(scores_max, scores_max_prev), scores_max_prev, acc_s, scale_log2
        )

    return guarded_step


def joined_and_cleared(o1, lse1, o2, lse2):
    o, lse = joined_first(o1, lse1, o2, lse2)
    return o.nan_to_num(), lse


def denominators_cleared(o1, lse1, o2, lse2):
    o, lse = denominators(o1, lse1, o2, lse2)
    return o.nan_to_num(), lse


def stored_over_lse(o1, lse1, o2, lse2):
    o, lse = solutions.merge_partials(o1, lse1, o2, lse2)
    return o, torch.where(lse.isinf(), 0.0, lse)


def lse_along_the_rows(o, lse):
    return solutions.merge_many(o, lse)[0], torch.logsumexp(lse, 1)


def one_max(reads_unwritten, joins):
    """One maximum for all rows, 0 / 0 guarded."""

    def merge_many(o, lse):
        if not reads_unwritten:
            o = torch.where(lse.isinf()[..., None], 0.0, o)
        w = torch.exp(lse - lse.max())
        total = w.sum(0)
        o = (w[..., None] * o).sum(0) / torch.where(total == 0, 1.0, total)[:, None]
        return o, torch.logsumexp(lse, 0) if joins else lse.max() + torch.log(total)

    return merge_many


ORDER = "a state in another order"
ELEMENTWISE = "`*` where the powers meet the values"
ONE_MAX = "one maximum for all rows, and no stand-in where it is -inf"
ONE_MAX_AND_NAN = "one maximum for all rows, and nothing against a NaN"
PRECAUTIONS = "`exp` taken of each lse as it comes, with no guard for empty rows"
NAN = "-inf minus -inf, which is NaN"
FROM_NOWHERE = "powers that are not measured from the new maximum"
NO_AXIS = "a `[R]` tensor used where `[R, 1]` is needed"
NO_AXIS_N = "a `[N]` tensor used where `[N, 1]` is needed"
NO_AXIS_PN = "a `[P, N]` tensor used where `[P, N, 1]` is needed"
CLEARED = "a NaN cleared by what it is, not by where it comes from"
LEAKS = "a stand-in that leaks into lse"


@pytest.mark.parametrize(
    ("name", "attempt", "named"),
    [
        ("online_step", never_scaled, {"exponents without scale_log2"}),
        ("online_step", scaled_before, {"a maximum that is stored scaled"}),
        (
            "online_step",
            exp_in_the_factor,
            {"folding log2(e) in a second time, or taking exp where exp2 is meant"},
        ),
        ("online_step", whole(zero_where_masked), {NAN}),
        ("online_step", whole(finite_max), {"a stand-in that leaks into the state"}),
        ("online_step", whole(least_max), {"a stand-in that leaks into the state"}),
        ("merge_many", left_out_by_weight, {"a part left out where its weight is 0"}),
        ("merge_partials", formula, {PRECAUTIONS}),
        ("merge_partials", denominators, {PRECAUTIONS}),
        ("merge_partials", guarded_but_overflowing, {"taking exp of an lse as it comes"}),
        ("merge_many", nan_for_nan, {"a NaN set to 0 after the sum"}),
        ("merge_many", shares_cleared, {"a weight of 0 that meets a NaN"}),
        ("online_step", never_below_0, {"a maximum that is never below 0"}),
        ("online_step", own_powers, {"new powers measured from the chunk's own maximum"}),
        ("online_step", scores_times_v, {"scores as weights of the values"}),
        ("online_step", one_sum, {"one sum for all rows"}),
        ("online_step", sum_first, {"a state in another order"}),
        ("online_step", sum_last, {"a state in another order"}),
        ("online_step", whole(from_0), {FROM_NOWHERE}),
        (
            "online_step",
            whole(zeros_if_any),
            {"a stand-in for all rows as soon as one of them is empty"},
        ),
        ("online_step", whole(clamped), {"a maximum that is never below 0"}),
        (
            "online_step",
            whole(clamped_shift),
            {"a floor under the maximum, below which true scores may lie"},
        ),
        (
            "online_step",
            whole(old_maximum_replaced),
            {"a maximum that is never below 0"},
        ),
        (
            "online_step",
            whole(both_replaced),
            {"a stand-in for the old maximum in the factor, too"},
        ),
        (
            "online_step",
            whole(guarded_where(had_seen_no_key)),
            {FROM_NOWHERE},
        ),
        (
            "online_step",
            whole(guarded_where(had_seen_no_key, leaks=True)),
            {FROM_NOWHERE},
        ),
        (
            "online_step",
            whole(guarded_where(sees_no_key_now)),
            {"a stand-in chosen by the chunk's own maximum"},
        ),
        (
            "online_step",
            whole(guarded_where(sees_no_key_now, leaks=True)),
            {"a stand-in chosen by the chunk's own maximum"},
        ),
        (
            "online_step",
            whole(zeroed_where_it_had_seen_none),
            {"rescaling the new terms, or clearing them"},
        ),
        ("online_step", step_without_axes, {NO_AXIS}),
        ("online_step", whole(guard_without_axes), {NO_AXIS}),
        ("merge_partials", merge_without_axes, {NO_AXIS_N}),
        ("merge_many", shares_without_axes, {NO_AXIS_PN}),
        ("merge_many", outputs_cleared, {CLEARED}),
        ("merge_many", result_cleared, {CLEARED}),
        ("merge_partials", joined_first, {"a NaN for rows that are empty on both sides"}),
        ("merge_partials", smallest_sum(1e-20), {LEAKS}),
        ("merge_partials", smallest_sum(1e-6), {LEAKS}),
        ("merge_partials", smallest_sum(1.0), {LEAKS}),
        ("merge_many", smallest_total, {LEAKS}),
        ("online_step", in_order(1, 2, 0), {ORDER}),
        ("online_step", in_order(2, 0, 1), {ORDER}),
        ("online_step", in_order(2, 1, 0), {ORDER}),
        ("online_step", powers_times_values(lambda p: p), {ELEMENTWISE}),
        ("online_step", powers_times_values(lambda p: p.T), {ELEMENTWISE}),
        ("online_step", powers_by_values, {ELEMENTWISE}),
        ("online_step", one_of_two_scaled, {"a maximum subtracted without its scale"}),
        ("online_step", rows_without_axes, {NO_AXIS}),
        ("merge_many", means, {"a plain average of the parts"}),
        ("merge_many", mean_of_shares, {"a mean of outputs that have their shares"}),
        ("merge_many", summed_along_the_rows, {"shares taken along the rows"}),
        (
            "online_step",
            pythons_max,
            {"Python's `max` or `if` where each row needs its own answer"},
        ),
        (
            "online_step",
            whole(measured_from(lambda new, old: old)),
            {"a rescale factor upside down, or measured from the old maximum"},
        ),
        (
            "online_step",
            whole(measured_from(lambda new, old: torch.where(new == -math.inf, new, 0.0))),
            {FROM_NOWHERE},
        ),
        ("merge_partials", joined_and_cleared, {CLEARED}),
        ("merge_partials", denominators_cleared, {PRECAUTIONS}),
        ("merge_partials", stored_over_lse, {LEAKS}),
        ("merge_many", lse_along_the_rows, {"an lse summed along the rows"}),
        ("merge_many", one_max(reads_unwritten=False, joins=False), {ONE_MAX}),
        ("merge_many", one_max(reads_unwritten=False, joins=True), {ONE_MAX}),
        ("merge_many", one_max(reads_unwritten=True, joins=False), {ONE_MAX_AND_NAN}),
        ("merge_many", one_max(reads_unwritten=True, joins=True), {ONE_MAX_AND_NAN}),
        ("merge_many", along_the_rows, {"shares taken along the rows"}),
        ("merge_many", largest_of_all_guarded, {"one maximum for all rows"}),
        ("merge_many", largest_of_all, {ONE_MAX}),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    assert set(judge(KNOWN[name], attempt).misconceptions) == named


def test_a_sum_of_0_is_a_reason_for_nan() -> None:
    """0 / 0 and -inf minus -inf give one answer: the hint speaks of both."""

    def divided_bare(o, lse):
        shift = lse.amax(0).nan_to_num(neginf=0.0)
        w = torch.exp(lse - shift)
        o = torch.where(lse.isinf()[..., None], 0.0, o)
        return (w[..., None] * o).sum(0) / w.sum(0)[:, None], shift + torch.log(w.sum(0))

    def two_divided_bare(o1, lse1, o2, lse2):
        return divided_bare(torch.stack([o1, o2]), torch.stack([lse1, lse2]))

    for name, attempt in (("merge_many", divided_bare), ("merge_partials", two_divided_bare)):
        told = judge(KNOWN[name], attempt).text
        assert "0 / 0" in told
        assert "-inf minus -inf" in told


@pytest.mark.parametrize(
    "attempt",
    [online_softmax.merge, joined_first_and_guarded, lambda o1, l1, o2, l2: solutions.merge_many(
        torch.stack([o1, o2]), torch.stack([l1, l2]))],
    ids=["the module's", "logaddexp", "by merge_many"],
)  # fmt: skip
def test_other_ways_to_merge_are_right(attempt: Callable) -> None:
    assert judge(KNOWN["merge_partials"], attempt).outcome == "right"


@pytest.mark.parametrize("is_guarded", [False, True], ids=["unguarded", "guarded"])
def test_a_cleared_nan_is_seen(is_guarded: bool) -> None:
    """A NaN that was there before the step stays."""
    e = KNOWN["online_step"]

    def cleared(scores_max_prev, acc_s, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        shift = torch.where(scores_max == -math.inf, 0.0, scores_max) if is_guarded else scores_max
        _, factor, p = guarded_from(scores_max, shift, scores_max_prev, acc_s, scale_log2)
        return scores_max, factor.nan_to_num(), p.nan_to_num()

    assert judge(e, whole(cleared)).misconceptions == (CLEARED,)
    assert "nan_to_num" in e.statement


@pytest.mark.parametrize(
    ("attempt", "case"),
    [
        (joined_first, "one row, empty on both sides"),
        (smallest_sum(1e-20), "one row, empty on both sides"),
    ],
    ids=["NaN", "finite lse"],
)
def test_the_case_shown_is_the_one_that_the_hint_speaks_of(attempt: Callable, case: str) -> None:
    assert f"Smallest failing case: {case}.\n" in judge(KNOWN["merge_partials"], attempt).text


def test_a_missing_axis_is_shown_on_a_case_of_several_rows() -> None:
    """Also where the plain formula fails on smaller cases of one row."""

    def attempt(o1, lse1, o2, lse2):
        lse = torch.log(torch.exp(lse1) + torch.exp(lse2))
        return torch.exp(lse1 - lse) * o1 + torch.exp(lse2 - lse) * o2, lse

    verdict = judge(KNOWN["merge_partials"], attempt)
    assert verdict.misconception == NO_AXIS_N
    assert "case: two rows" in verdict.text


def test_a_stored_stand_in_is_told_what_the_state_must_say() -> None:
    assert "the state must say -inf" in judge(KNOWN["online_step"], whole(least_max)).text


def test_a_factor_of_1_on_an_empty_sum_is_right() -> None:
    def guard(scores_max_prev, acc_s, scale_log2):
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        shift = torch.where(scores_max == -torch.inf, 0.0, scores_max)
        factor = torch.exp2((scores_max_prev - shift) * scale_log2)
        factor = torch.where(scores_max_prev == -torch.inf, 1.0, factor)
        return scores_max, factor, torch.exp2((acc_s - shift[:, None]) * scale_log2)

    assert judge(KNOWN["online_step"], whole(guard)).outcome == "right"


@pytest.mark.parametrize("shift", [-1e30, 0.0, 7.0])
def test_any_finite_stand_in_is_right(shift: float) -> None:
    attempt = measured_from(lambda new, old: torch.where(new == -math.inf, shift, new))
    assert judge(KNOWN["online_step"], whole(attempt)).outcome == "right"


def test_one_stand_in_for_all_rows_is_asked_about() -> None:
    attempt = measured_from(lambda new, old: 0 if new == -math.inf else new)
    assert "choose, row by row" in judge(KNOWN["online_step"], whole(attempt)).text


@pytest.mark.parametrize("gap", ["+inf", "old"])
def test_a_stand_in_that_stands_for_nothing_is_asked_for(gap: str) -> None:
    """A condition that is never true, and a stand-in that is -inf itself."""
    shift = {
        "+inf": lambda new, old: torch.where(new == math.inf, 0.0, new),
        "old": lambda new, old: torch.where(new == -math.inf, old, new),
    }[gap]
    told = judge(KNOWN["online_step"], whole(measured_from(shift))).text
    assert "Which finite number" in told


def test_a_missing_axis_is_all_that_is_told() -> None:
    assert "explain" not in judge(KNOWN["online_step"], rows_without_axes).text


def test_a_value_of_the_state_is_told_by_its_name() -> None:
    def attempt(*arguments):
        scores_max, running_sum, acc_o = solutions.online_step(*arguments)
        return scores_max, running_sum, acc_o[:, 0]

    told = judge(KNOWN["online_step"], attempt).text
    assert "`acc_o`: got shape [1], expected [1, 1]." in told
    assert "of the result" not in told


def test_numbers_of_a_row_are_told_without_powers_of_ten() -> None:
    assert "e+" not in short(torch.tensor([-1.1183, 0.1263, -9999.3]))
    assert short(torch.tensor([1e-6, 1.0])) == "[1.e-06, 1.e+00]"


def test_a_maximum_with_its_places_is_spoken_of() -> None:
    def attempt(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
        return torch.maximum(scores_max_prev, acc_s.max(1)), running_sum, acc_o

    assert "`x.amax(1)`" in judge(KNOWN["online_step"], attempt).text


@pytest.mark.parametrize(
    ("lse1", "lse2", "where"),
    [
        (0.0, 0.0, "midway between o1 and o2"),
        (0.0, 1.0, "nearer to the half with the larger lse"),
        (-math.inf, 0.0, "nearer to the half with the larger lse"),
        (-math.inf, -math.inf, "0 belongs there"),
    ],
)
def test_the_picture_tells_the_place_of_each_kind_of_row(
    lse1: float, lse2: float, where: str
) -> None:
    arguments = torch.zeros(1, 1), torch.tensor([lse1]), torch.ones(1, 1), torch.tensor([lse2])
    expected = solutions.merge_partials(*arguments)
    said = repr(solutions._between(arguments, (expected[0] + 1, expected[1]), expected))
    assert said.count("belong") == 1
    assert where in said


def test_the_picture_of_a_cleared_nan_says_that_nan_belongs_there() -> None:
    said = repr(judge(KNOWN["merge_partials"], joined_and_cleared).picture)
    assert "NaN belongs there" in said
    assert "between o1 and o2" not in said


def test_a_sum_that_fp32_holds_is_not_written_as_the_end_of_fp32() -> None:
    for lift in range(pictures.HIGHEST_LIFT + 1):
        moment = pictures.walk(pictures.row(lift), pictures.positions(), "no max")[-1]
        if math.isfinite(moment.running_sum):
            assert pictures.number(moment.running_sum) != "2^128"


def test_the_picture_says_where_a_merged_output_belongs() -> None:
    def average(o1, lse1, o2, lse2):
        return (o1 + o2) / 2, torch.logaddexp(lse1, lse2)

    said = repr(judge(KNOWN["merge_partials"], average).picture)
    assert "Wrong numbers in your o: 2 of 2." in said
    assert "between o1 and o2" in said


# -- predictions --


@pytest.fixture
def nothing_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    reader.forget()
    yield
    reader.forget()


@pytest.mark.parametrize(
    ("name", "guess", "answer", "told"),
    [
        ("numbers_carried", 2, 130, "What is to become of the values?"),
        ("numbers_carried", 66, 130, "a chunk's 64 scores"),
        ("numbers_carried", 1024, 130, "One number per chunk"),
        ("numbers_carried", 65_536, 130, "All scores would be needed"),
        ("sum_from_5", 2.375, 1.4375, "1.25 + 1.125"),
        ("sum_from_5", 1.75, 1.4375, "half of 1.25"),
        ("sum_from_5", 1.53125, 1.4375, "a quarter of the second chunk"),
        ("sum_from_5", 1.40625, 1.4375, "1.25 times 1.125"),
        ("sum_from_5", 1.125, 1.4375, "the second chunk alone"),
        ("sum_from_5", 1.25, 1.4375, "still measured from 3"),
        ("sum_from_5", 4.5, 1.4375, "the second chunk, measured from 3"),
        ("sum_from_5", 5.75, 1.4375, "all four terms, measured from 3"),
        ("sum_from_5", 0.3125, 1.4375, "the first chunk, converted"),
        ("failing_drop", 100, 128, "fp32 reaches beyond it"),
        ("failing_drop", 127, 128, "2¹²⁷ still fits"),
        ("failing_drop", 200, 128, "not the first power"),
    ],
)
@pytest.mark.usefixtures("nothing_noted")
def test_a_guess_is_told_the_thought_that_leads_to_it(
    name: str, guess: float, answer: float, told: str
) -> None:
    """Also where the next number over has a thought of its own."""
    predict(name, guess)
    assert told in repr(reveal(name, answer))


@pytest.mark.parametrize("guess", [2, 66, 1024])
@pytest.mark.usefixtures("nothing_noted")
def test_a_wrong_choice_is_not_half_right(guess: int) -> None:
    """Twice or half of the answer is no nearer to it here."""
    predict("numbers_carried", guess)
    told = repr(reveal("numbers_carried", 130))
    assert not any(word in told for word in ("your guess is", "close", "off by"))


@pytest.mark.usefixtures("nothing_noted")
def test_a_known_thought_comes_without_a_percentage() -> None:
    predict("sum_from_5", 2.375)
    assert "%" not in repr(reveal("sum_from_5", 1.4375))


@pytest.mark.usefixtures("nothing_noted")
def test_a_rounded_answer_is_not_taken_for_a_mistake() -> None:
    predict("sum_from_5", 1.43)
    assert "times 1.125" not in repr(reveal("sum_from_5", 1.4375))
