"""What chapter 01's tutor recognises of what a reader would type, and what it says of guesses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
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


def test_the_exercises_are_the_modules_attention() -> None:
    """Scores and weights of the solutions, one after the other, against `da.attention`."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 1, 8, generator=g), torch.randn(1, 5, 1, 8, generator=g)
    v = torch.randn(1, 5, 1, 6, generator=g)
    o = da.attention(q, k, v)
    scores = exercises.scaled_scores(q, k)[0, 0]
    torch.testing.assert_close(exercises.causal_weights(scores) @ v[0, :, 0], o[0, :, 0])


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
    assert f"minutes, {minutes[False]} of them exercises" in sources[0].replace("\n", " ")


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


def test_training_leaves_torchs_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    dice.train(late, steps=1)
    assert torch.equal(before, torch.random.get_rng_state())


# -- what the tutor says --


def matrix_product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def transposed_back(q: Tensor, k: Tensor) -> Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).transpose(1, 2)


def number_by_number(q: Tensor, k: Tensor) -> Tensor:
    return q * k / q.shape[-1] ** 0.5


def one_half(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 1 / 2


def meant(q: Tensor, k: Tensor) -> Tensor:
    return (q[:, :, None] * k[:, None]).mean(-1).permute(0, 3, 1, 2)


def meant_and_scaled(q: Tensor, k: Tensor) -> Tensor:
    return meant(q, k) / q.shape[-1] ** 0.5


def variable_of_the_chapter(q: Tensor, k: Tensor) -> Tensor:
    return 0.5 * torch.einsum("bihd,bjhd->bhij", q, k)


def reshaped(q: Tensor, k: Tensor) -> Tensor:
    B, N, HQ, D = q.shape
    return q.view(B, HQ, N, D) @ k.reshape(B, HQ, -1, D).mT / D**0.5


def lower_half_of_the_scores(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    return scores.tril(k.shape[1] - q.shape[1])


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


def heads_first_in_q(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhid,bjhd->bhij", q, k) / q.shape[-1] ** 0.5


def widths_apart(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhe->bhij", q, k) / q.shape[-1] ** 0.5


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


TYPED = [
    ("scaled_scores", matrix_product, "a matrix product of heads with heads"),
    ("scaled_scores", transposed_back, "positions before heads"),
    ("scaled_scores", number_by_number, "products that are not added up"),
    ("scaled_scores", one_half, "writing `D ** 1/2`, which is (D ** 1) / 2"),
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
    ("scaled_scores", heads_first_in_q, "letters for `q` that put the heads before the positions"),
    ("scaled_scores", widths_apart, "a letter of its own for each width"),
    ("leaks", one_table, "two names for one table"),
    ("attention_cost", outputs_of_keys, "as many outputs as keys"),
]


SCALED = [
    (meant, "dividing by D where √D is meant"),
    (meant_and_scaled, "dividing by D and by √D"),
    (variable_of_the_chapter, "a scale of one half for every width"),
    (reshaped, "a reshape where axes have to be swapped"),
    (lower_half_of_the_scores, "masked scores where all of them are asked for"),
]
ONE_EACH = "counting a multiply-add as one operation"
COSTS = {
    "no factor": (cost_of(lambda N, M, D, DV: N * M * (D + DV)), ONE_EACH),
    "factor in one": (
        cost_of(lambda N, M, D, DV: 2 * N * M * D + N * M * DV),
        f"{ONE_EACH} in one of the two products",
    ),
    "factor in the other": (
        cost_of(lambda N, M, D, DV: N * M * D + 2 * N * M * DV),
        f"{ONE_EACH} in one of the two products",
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


@pytest.mark.parametrize(("typed", "mistake"), SCALED, ids=[f.__name__ for f, _ in SCALED])
def test_a_wrong_scale_is_called_what_it_is(typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES["scaled_scores"], typed).misconceptions == (mistake,)


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
    said = judge(EXERCISES["scaled_scores"], lambda q, k: q.shpae).text
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
    said = str(dice.draw(dice.Run(1.0, [0.2] * 400), dice.Run(0.64, [0.2] * 400)))
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
