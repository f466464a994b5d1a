"""What chapter 01's tutor recognises of what a reader would type, and what it says of guesses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from torch import Tensor

from nsa_tutorial.course import costs, dice
from nsa_tutorial.course.diffs import Edited
from nsa_tutorial.course.exercises import dense_attention as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.exact import dense_attention as da
from nsa_tutorial.runtime import environment

pytestmark = pytest.mark.usefixtures("one_thread")

EXERCISES = {e.name: e for e in exercises.EXERCISES}
PREDICTIONS = {p.name: p for p in exercises.PREDICTIONS}


here = environment.detect()
runs_triton = pytest.mark.skipif(
    here.why_not("triton", here.device) is not None, reason="Triton does not run here"
)


# -- the module and the exercises say the same --


@pytest.mark.parametrize(("N", "M", "D", "DV"), [(5, 5, 4, 4), (3, 7, 8, 6), (1, 9, 4, 2)])
def test_the_build_is_the_modules_attention(N: int, M: int, D: int, DV: int) -> None:
    """And its gradients."""
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*x, generator=g).double() for x in ((N, D), (M, D), (M, DV))]
    q, k, v = (x.requires_grad_() for x in leaves)
    o = exercises.attention(q, k, v)
    expected = da.attention(*(x[None, :, None] for x in (q, k, v)))[0, :, 0]
    torch.testing.assert_close(o, expected)
    found, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def test_the_mask_alone_is_the_builds() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*x, generator=g) for x in ((3, 8), (5, 8), (5, 6)))
    weights = exercises.causal_weights(q @ k.T / 8**0.5)
    torch.testing.assert_close(weights @ v, exercises.attention(q, k, v))


@runs_triton
def test_the_kernel_is_the_modules_softmax() -> None:
    scores = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    weights, _ = EXERCISES["causal_softmax"].run(exercises.causal_softmax, scores)
    hidden = ~da.causal_mask(3, 7)
    torch.testing.assert_close(weights, da.softmax(scores.masked_fill(hidden, -torch.inf)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 2), (4096, 4096, 192, 128, 4)], ids=str)
def test_the_cost_is_the_modules(shape: tuple[int, ...]) -> None:
    *sizes, itemsize = shape
    cost = costs.dense_attention(*sizes, itemsize=itemsize)
    assert exercises.attention_cost(*shape) == {"flops": cost.flops, "bytes": cost.bytes}


# -- the chapter --


def test_the_chapter_says_how_long_its_exercises_take() -> None:
    notebooks = Path(__file__).resolve().parents[2] / "notebooks"
    cells = nbformat.read(notebooks / "01_dense_attention.ipynb", 4).cells
    sources = [cell.source for cell in cells]
    optional = next(i for i, source in enumerate(sources) if "If you have more time" in source)
    minutes = {True: 0, False: 0}
    for name, e in EXERCISES.items():
        minutes[sources.index(f'exercise("dense_attention", "{name}")') < optional] += e.minutes
    assert f"{minutes[True]} of them exercises" in sources[0]
    assert f"minutes more, {minutes[False]} of them exercises" in sources[0].replace("\n", " ")


# -- the dice --


def late(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1) * da.causal_mask(*scores.shape[-2:])


def early(scores: Tensor) -> Tensor:
    hidden = ~da.causal_mask(*scores.shape[-2:])
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def test_a_late_mask_foretells_dice_and_an_early_one_does_not() -> None:
    cheat, honest = dice.train(late, steps=120), dice.train(early, steps=30)
    assert cheat.right > 2 / 6
    assert abs(honest.right - 1 / 6) < 0.01
    assert abs(cheat.course[0] - 1 / 6) < 0.1, "before it has learned, the cheat guesses, too"


def test_what_is_left_over_tells_the_next_roll() -> None:
    """A trained cheat: for each roll seen, the six next rolls leave ranges of weights that do not
    overlap. An honest model leaves all of the weight."""
    left = dice.left_over(dice.train(late).model)  # [seen, next, others]
    low, high = left.quantile(0.05, dim=2), left.quantile(0.95, dim=2)
    for seen in range(6):
        order = low[seen].argsort()
        assert (high[seen][order[:-1]] < low[seen][order[1:]]).all()
    honest = dice.train(early, steps=1)
    assert (dice.left_over(honest.model) == 1).all()
    assert "leaves one weight" in str(dice.draw_left_over(honest))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))]
)
def test_a_finite_mask_value_foretells_dice_as_the_chapter_tells(seed: int) -> None:
    def low(scores: Tensor) -> Tensor:
        hidden = ~da.causal_mask(*scores.shape[-2:])
        return torch.softmax(scores.masked_fill(hidden, -5), -1)

    assert 0.4 <= dice.train(low, seed=seed).right <= 0.7


def test_the_guesser_on_the_page_is_short() -> None:
    assert len(inspect.getsource(dice.Guesser).splitlines()) <= 15


def test_training_leaves_torchs_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    dice.train(late, steps=1)
    assert torch.equal(before, torch.random.get_rng_state())


# -- what the tutor says --


def cost_of(flops: Callable, left_out: Callable = lambda N, M, D, DV: 0) -> Callable:
    """The right cost, with other operations or with elements left out."""

    def attention_cost(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
        elements = (N + M) * (D + DV) + 4 * N * M - left_out(N, M, D, DV)
        return {"flops": flops(N, M, D, DV), "bytes": itemsize * elements}

    return attention_cost


def products(N: int, M: int, D: int, DV: int) -> int:
    return 2 * N * M * (D + DV)


def lower_triangle(scores: Tensor) -> Tensor:
    scores = scores.tril(scores.shape[1] - scores.shape[0])
    return torch.softmax(scores, -1)


def zeros_of_the_triangle(scores: Tensor) -> Tensor:
    scores = scores.tril(scores.shape[1] - scores.shape[0])
    return torch.softmax(scores.masked_fill(scores == 0, -torch.inf), -1)


def upper_triangle(scores: Tensor) -> Tensor:
    hidden = torch.triu(torch.ones_like(scores), scores.shape[1] - scores.shape[0])
    return torch.softmax(scores.masked_fill(hidden.bool(), -torch.inf), -1)


def first_rows(scores: Tensor) -> Tensor:
    query, key = torch.arange(scores.shape[0])[:, None], torch.arange(scores.shape[1])[None]
    return torch.softmax(torch.where(key <= query, scores, -torch.inf), -1)


def row_with_row(scores: Tensor) -> Tensor:
    N, M = scores.shape
    hidden = torch.arange(M) > torch.arange(M - N, M)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def minus_a_billion(scores: Tensor) -> Tensor:
    visible = da.causal_mask(*scores.shape)
    return torch.softmax(torch.where(visible, scores, -1e9), -1)


def plus_a_large_mask(scores: Tensor) -> Tensor:
    return torch.softmax(scores + ~da.causal_mask(*scores.shape) * -1e9, -1)


def repaired(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True)) * da.causal_mask(*scores.shape)
    return e / e.sum(-1, keepdim=True)


def result_thrown_away(scores: Tensor) -> Tensor:
    scores.masked_fill(~da.causal_mask(*scores.shape), -torch.inf)
    return torch.softmax(scores, -1)


def hidden_weights_are_zero(weigh: Callable) -> bool:
    g = torch.Generator().manual_seed(3)
    weights = weigh(torch.randn(5, 5, generator=g))
    return bool(torch.triu(weights, 1).abs().sum() > 0)


def rows_sum_to_1(weigh: Callable) -> bool:
    return bool(
        (weigh(torch.randn(4, 6, generator=torch.Generator())).sum(1) - 1).abs().max() > 1e-5
    )


def other_than_mine(weigh: Callable) -> bool:
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(4))
    return not torch.allclose(weigh(scores), exercises.causal_weights(scores))


def one_more(weigh: Callable) -> bool:
    scores = torch.zeros(2, 2)
    before, scores[0, 1] = weigh(scores)[0, 0].item(), 1.0
    return abs(weigh(scores)[0, 0].item() - before) > 1e-4


def differs_by_much(weigh: Callable) -> bool:
    scores = torch.zeros(2, 2)
    before, scores[0, 1] = weigh(scores)[0, 0].item(), 1e9
    return abs(weigh(scores)[0, 0].item() - before) > 1e-4


def one_place(weigh: Callable) -> bool:
    scores = torch.randn(3, 3, generator=torch.Generator().manual_seed(7))
    before, scores[0, 1] = weigh(scores), 1e6
    return not torch.equal(weigh(scores)[0], before[0])


def last_key_louder(weigh: Callable) -> bool:
    scores = torch.zeros(2, 4)
    before = weigh(scores)[0, :3].tolist()
    scores[0, 3] = 1e30
    return weigh(scores)[0, :3].tolist() != before


def two_hundred(weigh: Callable) -> bool:
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(8))
    loud = scores.masked_fill(~da.causal_mask(4, 4), 200.0)
    return not torch.equal(weigh(scores), weigh(loud))


def all_scores_changed(weigh: Callable) -> bool:
    scores = torch.arange(9.0).view(3, 3)
    return not torch.equal(weigh(scores), weigh(scores.flip(1) * 1e3))


def unchanged(weigh: Callable) -> bool:
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
    return not torch.equal(weigh(scores), weigh(scores))


def two_bytes(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    elements = N * D + M * D + M * DV + N * DV + 4 * N * M
    return {"flops": 2 * N * M * (D + DV), "bytes": 2 * elements}


def inputs_and_output(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    elements = N * D + M * D + M * DV + N * DV
    return {"flops": 2 * N * M * (D + DV), "bytes": itemsize * elements}


def given() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        visible = key <= row
        s = tl.load(S + row * M + key, mask=visible, other=float("-inf"))
        e = tl.exp(s)
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=visible)

    return kernel


def exponentials_of_zero() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        s = tl.load(S + row * M + key, mask=key <= M - N + row, other=0.0)
        e = tl.exp(s - tl.max(s, axis=0))
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=key < M)

    return kernel


def zeros_at_the_end() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        s = tl.load(S + row * M + key, mask=key < M, other=float("-inf"))
        e = tl.exp(s - tl.max(s, axis=0))
        w = tl.where(key <= M - N + row, e / tl.sum(e, axis=0), 0.0)
        tl.store(W + row * M + key, w, mask=key < M)

    return kernel


def only_lined_up() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        visible = key <= M - N + row
        s = tl.load(S + row * M + key, mask=visible, other=float("-inf"))
        e = tl.exp(s - tl.max(s, axis=0))
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=visible)

    return kernel


def position_and_its_column_exchanged(scores: Tensor) -> Tensor:
    N, M = scores.shape
    visible = torch.arange(M)[:, None] <= torch.arange(M - N, M)[None]
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)


def offset_turned(scores: Tensor) -> Tensor:
    N, M = scores.shape
    visible = torch.arange(M)[None] <= torch.arange(N)[:, None] + N - M
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)


def one_table(weigh: Callable) -> bool:
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(9))
    loud = scores
    loud[~da.causal_mask(4, 4)] = 1e6
    return not torch.equal(weigh(scores), weigh(loud))


def outputs_of_keys(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    elements = N * D + M * D + M * DV + M * DV + 4 * N * M
    return {"flops": 2 * N * M * (D + DV), "bytes": itemsize * elements}


def maximum_outside() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        s = tl.load(S + row * M + key, mask=key <= M - N + row, other=float("-inf"))
        e = tl.exp(s) - tl.max(s, axis=0)
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=key < M)

    return kernel


def kernels_offset_turned() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        s = tl.load(S + row * M + key, mask=key <= row + N - M, other=float("-inf"))
        e = tl.exp(s - tl.max(s, axis=0))
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=key < M)

    return kernel


# -- attention, as it grows and as it goes wrong --


def value(q, k, v):
    return v


def lookup(q, k, v):
    e = torch.exp(q @ k.T)
    return e / e.sum(-1, keepdim=True) @ v


def scaled(q, k, v):
    e = torch.exp(q @ k.T / k.shape[-1] ** 0.5)
    return e @ v / e.sum(-1)


def safe(q, k, v):
    s = q @ k.T / k.shape[-1] ** 0.5
    e = torch.exp(s - s.max())
    return e @ v / e.sum()


def masked_square(q, k, v):
    """The triangle of a square table, for a lone query none."""
    s = q @ k.T / k.shape[-1] ** 0.5
    if len(q) == len(k):
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


def with_minus_50(q, k, v):
    s = q @ k.T / k.shape[-1] ** 0.5
    s = torch.where(torch.ones_like(s).tril(len(k) - len(q)).bool(), s, -50.0)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


# what an answer is like is looked for among all pairs of mistakes: here there are none
NAMELESS = replace(EXERCISES["attention"], misconceptions=())
GROWING = [(value, 1), (lookup, 2), (scaled, 3), (safe, 4), (masked_square, 5), (with_minus_50, 6)]


@pytest.mark.parametrize(("attempt", "held"), GROWING, ids=[f.__name__ for f, _ in GROWING])
def test_a_half_done_attention_holds_the_stages_that_it_should(
    attempt: Callable, held: int
) -> None:
    assert judge(NAMELESS, attempt).held == held


def in_a_loop(q, k, v):
    """Row by row, by the logarithm of the sum: right."""
    rows = []
    for i, x in enumerate(q):
        seen = len(k) - len(q) + i + 1
        s = (k[:seen] * x).sum(-1) * k.shape[-1] ** -0.5
        rows.append(torch.exp(s - s.logsumexp(0)) @ v[:seen])
    return torch.stack(rows)


def by_addition(q, k, v):
    """A mask of 0 and -inf, added: right."""
    M, N = len(k), len(q)
    mask = torch.full((N, M), float("-inf")).triu(M - N + 1)
    s = q @ k.T / k.shape[1] ** 0.5 + mask
    s = s - s.max(dim=-1, keepdim=True).values
    return (s.exp() / s.exp().sum(dim=-1, keepdim=True)) @ v


@pytest.mark.parametrize("attempt", [in_a_loop, by_addition], ids=lambda f: f.__name__)
def test_other_ways_to_write_attention_are_right(attempt: Callable) -> None:
    assert judge(EXERCISES["attention"], attempt).outcome == "right"


@pytest.mark.parametrize(
    "attempt",
    [
        lambda q, k, v: torch.softmax(q @ k.T, -1) @ v,
        lambda q, k, v: (q @ k.T).softmax(-1) @ v,
        lambda q, k, v: torch.nn.functional.softmax(q @ k.T, -1) @ v,
        lambda q, k, v: torch.log_softmax(q @ k.T, -1).exp() @ v,
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None]),
        lambda q, k, v: da.softmax(q @ k.T) @ v,
        lambda q, k, v: da.attention(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0],
    ],
    ids=["softmax", "method", "functional", "log_softmax", "attention", "ours", "all of ours"],
)
def test_what_the_build_builds_may_not_be_called(attempt: Callable) -> None:
    verdict = judge(NAMELESS, attempt)
    assert verdict.held == 0
    assert "you build it yourself here" in verdict.text


@pytest.mark.parametrize("value", [-20, -50, -100, -1e4, -1e9, -1e30, torch.finfo().min])
def test_every_finite_mask_value_is_refused_by_its_name(value: float) -> None:
    def written(q, k, v):
        s = q @ k.T / k.shape[1] ** 0.5
        hidden = torch.ones_like(s).triu(len(k) - len(q) + 1).bool()
        s = s.masked_fill(hidden, value)
        e = torch.exp(s - s.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True) @ v

    def added(q, k, v):
        s = q @ k.T / k.shape[1] ** 0.5
        s = s + value * torch.ones_like(s).triu(len(k) - len(q) + 1)
        e = torch.exp(s - s.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True) @ v

    names = (exercises._LOW, "adding a large negative number where -inf is meant")
    for attempt, name in zip((written, added), names, strict=True):
        verdict = judge(EXERCISES["attention"], attempt)
        assert (verdict.misconception, verdict.held) == (name, 6)


def scaled_in_place(q, k, v):
    q /= q.shape[1] ** 0.5
    return exercises.attention(q * q.shape[1] ** 0.5, k, v)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("attention", scaled_in_place),
        ("causal_weights", lambda scores: torch.softmax(
            scores.masked_fill_(~da.causal_mask(*scores.shape), -torch.inf), -1)),
    ],
    ids=["attention", "causal_weights"],
)  # fmt: skip
def test_what_belongs_to_the_caller_is_left_alone(name: str, attempt: Callable) -> None:
    """The numbers that come back are right."""
    verdict = judge(EXERCISES[name], attempt)
    assert verdict.outcome == "wrong"
    assert "argument 1 is another one after the call" in verdict.text


def renormalised(q, k, v):
    s = q @ k.T / k.shape[1] ** 0.5
    e = torch.exp(s - s.amax(1, keepdim=True))
    w = e / e.sum(1, keepdim=True)
    w = w * torch.ones_like(w).tril(len(k) - len(q))
    return w / w.sum(1, keepdim=True) @ v


def zeros_after(q, k, v):
    s = q @ k.T / k.shape[1] ** 0.5
    e = torch.exp(s - s.amax(1, keepdim=True))
    return (e / e.sum(1, keepdim=True)).tril(len(k) - len(q)) @ v


def scaled_twice(q, k, v):
    return exercises.attention(q / q.shape[1] ** 0.5, k, v)


def first_positions(q, k, v):
    s = q @ k.T / k.shape[1] ** 0.5
    s = s.masked_fill(~torch.ones_like(s).tril().bool(), -torch.inf)
    e = torch.exp(s - s.amax(1, keepdim=True))
    return e / e.sum(1, keepdim=True) @ v


def triangle_with_diagonal(q, k, v):
    s = q @ k.T / k.shape[1] ** 0.5
    s = s.masked_fill(torch.ones_like(s).triu(len(k) - len(q)).bool(), -torch.inf)
    e = torch.exp(s - s.amax(1, keepdim=True))
    return e / e.sum(1, keepdim=True) @ v


def one_too_many(q, k, v):
    s = q @ k.T / k.shape[1] ** 0.5
    s = s.masked_fill(torch.ones_like(s).triu(len(k) - len(q) + 2).bool(), -torch.inf)
    e = torch.exp(s - s.amax(1, keepdim=True))
    return e / e.sum(1, keepdim=True) @ v


def one_maximum(scores: Tensor) -> Tensor:
    hidden = ~da.causal_mask(*scores.shape)
    e = torch.exp(scores - scores.max()).masked_fill(hidden, 0)
    return e / e.sum(-1, keepdim=True)


def scaled_again(scores: Tensor) -> Tensor:
    return exercises.causal_weights(scores / scores.shape[-1] ** 0.5)


def one_too_small(scores: Tensor) -> Tensor:
    N, M = scores.shape
    visible = torch.arange(M)[None] <= torch.arange(N)[:, None] + M - N - 1
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)


def half_for_the_mask(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    right = exercises.attention_cost(N, M, D, DV, itemsize)
    return {**right, "flops": right["flops"] // 2}


def keys_first(q, k, v):
    e = torch.exp(k @ q.T / k.shape[1] ** 0.5)
    return e / e.sum(1, keepdim=True) @ v


def keys_first_masked(q, k, v):
    s = k @ q.T / k.shape[1] ** 0.5
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    e = torch.exp(s.masked_fill(hidden, -torch.inf))
    return e / e.sum(1, keepdim=True) @ v


def scores_times_values(q, k, v):
    return q @ k.T * v


def weights_times_values(q, k, v):
    e = torch.exp(q @ k.T)
    return e / e.sum(1, keepdim=True) * v


TYPED = [
    ("attention", keys_first, "keys as rows and queries as columns"),
    ("attention", keys_first_masked, "keys as rows and queries as columns"),
    ("attention", scores_times_values, "scores in the place of weights"),
    ("attention", weights_times_values, "`*` where the weights meet the values"),
    ("attention", renormalised, "the largest of all scores subtracted, hidden ones too"),
    ("attention", zeros_after, "setting hidden weights to zero after the softmax"),
    ("attention", scaled_twice, "dividing by D where √D is meant"),
    ("attention", first_positions, "lining up the queries with the first keys"),
    ("attention", triangle_with_diagonal, "a mask that leaves a query no key"),
    ("attention", one_too_many, "showing each query the key after its own"),
    ("causal_weights", one_maximum, "the largest of all scores subtracted, hidden ones too"),
    ("causal_weights", scaled_again, "scaling scores that are scaled already"),
    ("causal_weights", one_too_small, "hiding a query's own position"),
    ("attention_cost", half_for_the_mask, "counting half of the operations"),
    ("causal_weights", lower_triangle, "giving hidden keys the score 0"),
    ("causal_weights", zeros_of_the_triangle, "taking a score of 0 for a hidden one"),
    ("causal_weights", upper_triangle, "hiding a query's own position"),
    ("causal_weights", first_rows, "lining up the queries with the first keys"),
    ("causal_weights", row_with_row, "comparing a row of positions with a row"),
    ("causal_weights", minus_a_billion, "a large negative number where -inf is meant"),
    ("causal_weights", plus_a_large_mask, "adding a large negative number where -inf is meant"),
    ("causal_weights", repaired, "renormalising after the softmax"),
    ("causal_weights", result_thrown_away, "showing every query every key"),
    ("leaks", hidden_weights_are_zero, "a look at the hidden weights alone"),
    ("leaks", rows_sum_to_1, "a look at the sums of the rows"),
    ("leaks", other_than_mine, "a comparison with the right weights"),
    ("leaks", one_place, "a look at the first row alone"),
    ("leaks", last_key_louder, "a look at the first row alone"),
    ("leaks", one_more, "a change too small to show"),
    ("leaks", two_hundred, "a change that a large negative number still hides"),
    ("leaks", differs_by_much, "a comparison that nan slips through"),
    ("leaks", all_scores_changed, "a test that everything fails"),
    ("leaks", unchanged, "a test that nothing fails"),
    ("attention_cost", two_bytes, "taking every number for two bytes"),
    ("attention_cost", inputs_and_output, "leaving the score matrix out of the bytes"),
    ("causal_softmax", given, "the kernel as it was given"),
    ("causal_softmax", exponentials_of_zero, "hidden keys that count as a score of 0"),
    ("causal_softmax", zeros_at_the_end, "zeros written over the weights at the end"),
    ("causal_softmax", only_lined_up, "leaving the hidden places of W as they were"),
    (
        "causal_softmax",
        maximum_outside,
        "the maximum taken off the exponential, not off the score",
    ),
    ("causal_softmax", kernels_offset_turned, "an offset of N − M where M − N is meant"),
    ("causal_weights", offset_turned, "an offset of N − M where M − N is meant"),
    ("causal_weights", position_and_its_column_exchanged, "keys as rows and queries as columns"),
    ("leaks", one_table, "two names for one table"),
    ("attention_cost", outputs_of_keys, "as many outputs as keys"),
]


HALF = "counting half of the operations"
COSTS = {
    "no factor": (cost_of(lambda N, M, D, DV: N * M * (D + DV)), HALF),
    "factor in one": (
        cost_of(lambda N, M, D, DV: 2 * N * M * D + N * M * DV),
        f"{HALF} of one of the two products",
    ),
    "factor in the other": (
        cost_of(lambda N, M, D, DV: N * M * D + 2 * N * M * DV),
        f"{HALF} of one of the two products",
    ),
    "factor of four": (
        cost_of(lambda N, M, D, DV: 4 * N * M * (D + DV)),
        "counting every operation twice",
    ),
    "N keys": (
        cost_of(lambda N, M, D, DV: 2 * N * N * (D + DV)),
        "counting N keys where there are M",
    ),
    "D times DV": (cost_of(lambda N, M, D, DV: 2 * N * M * D * DV), "multiplying the two widths"),
    "no q": (cost_of(products, lambda N, M, D, DV: N * D), "leaving out q"),
    "no k": (cost_of(products, lambda N, M, D, DV: M * D), "leaving out k"),
    "no v": (cost_of(products, lambda N, M, D, DV: M * DV), "leaving out v"),
    "the first step": (
        cost_of(products, lambda N, M, D, DV: (N + M) * DV + 3 * N * M),
        "counting the first step alone",
    ),
    "everything twice": (
        cost_of(products, lambda N, M, D, DV: -(N + M) * (D + DV)),
        "reading and writing every tensor",
    ),
    "writes alone": (
        cost_of(products, lambda N, M, D, DV: N * D + M * (D + DV) + 2 * N * M),
        "counting what is written and not what is read",
    ),
}


@pytest.mark.parametrize(("typed", "mistake"), COSTS.values(), ids=COSTS)
def test_a_wrong_cost_is_called_what_it_is(typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES["attention_cost"], typed).misconceptions == (mistake,)


def test_what_a_kernel_stored_has_a_name() -> None:
    e = EXERCISES["causal_softmax"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert "`W`:" in judge(e, only_lined_up).text
    assert "Value 0" not in judge(e, only_lined_up).text


@pytest.mark.parametrize(
    ("name", "typed", "mistake"), TYPED, ids=[typed.__name__ for _, typed, _ in TYPED]
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    if EXERCISES[name].missing:
        pytest.skip(EXERCISES[name].missing[0])
    assert judge(EXERCISES[name], typed).misconceptions == (mistake,)


def test_a_mask_that_nobody_keeps_is_told_what_masked_fill_returns() -> None:
    assert "`masked_fill` returns" in judge(EXERCISES["causal_weights"], result_thrown_away).text


def test_a_misspelt_name_is_asked_for_once() -> None:
    said = judge(EXERCISES["attention"], lambda q, k, v: q.shpae).text
    assert "Did you mean `shape`?" in said
    assert "spelled" not in said


def test_the_case_shown_first_shows_the_mistake_named_first() -> None:
    """With the offset mended alone, the smallest failing case has a -1 in it and no nan."""
    e = EXERCISES["causal_softmax"]
    if e.missing:
        pytest.skip(e.missing[0])
    mended_once = Edited(e.solution, {"s - tl.max(s, axis=0)": "s", "mask=key < M": "mask=visible"})
    verdict = judge(e, mended_once)
    assert verdict.misconception == "leaving the hidden places of W as they were"


def test_the_dice_are_told_in_numbers() -> None:
    """What the reader breaks in a mask, the picture's sentence must not contradict."""
    model = dice.Guesser(late)
    said = str(dice.draw(dice.Run(1.0, [0.2] * 400, model), dice.Run(0.64, [0.2] * 400, model)))
    assert "100%" in said and "64%" in said


def last_keys_louder(weigh: Callable) -> bool:
    """Decided at the last key, with fewer queries than keys."""
    scores = torch.zeros(3, 5)
    before = weigh(scores)[:2, :3].tolist()
    scores[:2, 4] = 1e30
    return weigh(scores)[:2, :3].tolist() != before


def changed_for_good(weigh: Callable) -> torch.Tensor:
    """The answer as a tensor, from `allclose`'s rule that nan equals nothing."""
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(6))
    other = torch.where(da.causal_mask(4, 4), scores, torch.tensor(1e7))
    return ~torch.isclose(weigh(scores), weigh(other)).all()


@pytest.mark.parametrize("test", [last_keys_louder, changed_for_good], ids=lambda t: t.__name__)
def test_other_tests_for_leaks_are_right(test: Callable) -> None:
    assert judge(EXERCISES["leaks"], test).outcome == "right"


def test_the_given_kernel_is_the_statements() -> None:
    """`given` above, line by line."""
    (stated,) = re.findall(r"```python\n(.*?)```", EXERCISES["causal_softmax"].statement, re.S)
    typed = inspect.getsource(given).split("\n", 1)[1]
    assert [line.strip() for line in typed.splitlines()] == [
        line.strip() for line in stated.splitlines()
    ]


@runs_triton
def test_the_given_kernel_is_right_where_the_statement_says() -> None:
    """On ordinary scores, with as many queries as keys, wherever a key is visible."""
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    weights, _ = EXERCISES["causal_softmax"].run(given, scores)
    visible = da.causal_mask(4, 4)
    expected = exercises.causal_weights(scores)
    torch.testing.assert_close(weights[visible], expected[visible])
    assert (weights[~visible] != 0).all()


def test_thoughts_about_guesses_hold() -> None:
    """The numbers that the thoughts give as somebody's way to them come out of that way."""
    guesses = {
        name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for name, p in PREDICTIONS.items()
    }
    tokens, gib = 65_536, 2**30
    for way in (tokens**2, 4 * tokens**2, 2 * tokens):
        assert way / gib in guesses["score_table_gib"]
    assert 2 * tokens**2 / 2**20 in guesses["score_table_gib"]
    assert any(guess == pytest.approx(2 * tokens**2 / 1e9) for guess in guesses["score_table_gib"])
    cost = costs.dense_attention(tokens, tokens, 128)
    told = " ".join(told for _, told in PREDICTIONS["slower_side"].thoughts)
    assert f"{cost.flops / 1e9:,.0f} billion" in told
    assert f"{989e12 / cost.flops:.0f} times" in told
    assert f"only {cost.intensity:.0f}." in PREDICTIONS["slower_side"].reason
