"""Chapter 12's exercises: their solutions against the module, answers as readers write them; and
what its pictures compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import gradients as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.widgets import gradients as pictures
from nsa_tutorial.training import gradients
from nsa_tutorial.training.tile_gradients import preprocess

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).parents[2] / "notebooks" / "12_gradients.ipynb"
KNOWN = chapter_exercises("gradients")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# -- solutions --


def test_the_score_gradient_is_autograds() -> None:
    s, d_p = draw(4, 6).requires_grad_(), draw(4, 6, seed=1)
    p = torch.softmax(s, -1)
    (right,) = torch.autograd.grad(p, s, d_p)
    torch.testing.assert_close(solutions.score_gradient(p, d_p), right)


def test_delta_is_the_modules() -> None:
    d_o, o, d_lse = draw(1, 5, 3, 4), draw(1, 5, 3, 4, seed=1), draw(1, 5, 3, seed=2)
    _, delta = preprocess(d_o, d_lse, o, d_lse)
    torch.testing.assert_close(solutions.row_delta(d_o[0], o[0], d_lse[0]), delta[0])


def test_five_lines_of_the_exercises_are_dense() -> None:
    """All of them together, on three heads of one group: weights, delta, scores, keys and
    values."""
    G, N, D, DV, scale = 3, 5, 4, 2, 0.6
    q, d_o, k, v = draw(G, N, D), draw(G, N, DV, seed=1), draw(N, D, seed=2), draw(N, DV, seed=3)
    is_seen = torch.ones(N, N).tril().bool()
    s = (scale * q @ k.T).masked_fill(~is_seen, -torch.inf)
    o, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
    p = torch.stack([solutions.weights_again(q[g], k, lse[g], is_seen, scale) for g in range(G)])
    d_s = solutions.score_gradient(p, d_o @ v.T)
    d_k, d_v = solutions.group_gradients(p, d_s, q, d_o, 1, scale)
    rows = (d_o.flatten(0, 1), q.flatten(0, 1))
    delta = solutions.row_delta(d_o, o, torch.zeros(G, N).double())
    numbers = (lse.flatten(), delta.flatten(), torch.arange(N).repeat(G))
    _, *right = gradients.dense(*rows, k, v, *numbers, scale=scale)
    torch.testing.assert_close([d_k[0], d_v[0]], right)


def test_base_two_gives_the_gradients_of_base_e() -> None:
    N, scale = 6, 0.3
    q, k, v, d_o = (draw(N, 4, seed=seed) for seed in range(4))
    s = scale * q @ k.T
    o, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
    delta, everything = (d_o * o).sum(-1), torch.full((N,), N - 1)
    mine = solutions.base_two(d_o, scale / math.log(2) * q, k, v, lse, delta, scale)
    right = gradients.dense(d_o, q, k, v, lse, delta, everything, scale=scale)
    torch.testing.assert_close(mine, right[:2])


# -- answers as readers write them --


def cells(*names: str) -> str:
    """The code of cells of the chapter."""
    notebook = nbformat.read(CHAPTER, as_version=4)
    source = {cell.id: cell.source for cell in notebook.cells}
    return "\n".join(source[name] for name in names)


def jacobian_built(p, d_p):
    jacobian = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return (jacobian @ d_p[..., None])[..., 0]


def sigmoid_like(p, d_p):
    return d_p * p - d_p * p**2


def over_all(p, d_p):
    return p * (d_p - (p * d_p).sum())


def einsum_plus(d_o, o, d_lse):
    return torch.einsum("nhd,nhd->nh", d_o, o) + d_lse


def norm_of_o(d_o, o, d_lse):
    return o.pow(2).sum(-1) - d_lse


def reshaped(p, d_s, q, d_o, H, scale):
    """Heads of all groups mixed, as `repeat` would wire them."""
    d_k, d_v = scale * d_s.mT @ q, p.mT @ d_o
    return tuple(x.reshape(-1, H, *x.shape[1:]).sum(0) for x in (d_k, d_v))


def scaled_both(p, d_s, q, d_o, H, scale):
    d_k, d_v = (scale * a.mT @ b for a, b in ((d_s, q), (p, d_o)))
    return tuple(x.reshape(H, -1, *x.shape[1:]).sum(1) for x in (d_k, d_v))


def times_the_mask(q, k, lse, is_seen, scale):
    return torch.exp(scale * (q @ k.T) - lse.unsqueeze(-1)) * is_seen


def softmax_again(q, k, lse, is_seen, scale):
    s = (scale * q @ k.T).masked_fill(~is_seen, -1e30)
    return s.softmax(-1) * is_seen


def as_in_the_five_lines(d_o, q_log2, k, v, lse, delta, scale):
    """`q_log2` taken for the query."""
    p = torch.exp2(q_log2 @ k.T - lse[:, None] * math.log2(math.e))
    d_s = p * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, scale * math.log(2) * d_s.T @ q_log2


def derivative_of_exp2(d_o, q_log2, k, v, lse, delta, scale):
    """ln 2 from the derivative, and the log2(e) of the score forgotten."""
    p = torch.exp2(q_log2 @ k.T - lse[:, None] / math.log(2))
    d_s = math.log(2) * p * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, math.log(2) * d_s.T @ q_log2


def average_behind_the_bracket(p, d_p):
    return p * d_p - torch.sum(p * d_p, -1, True)


def axis_lost(p, d_p):
    return p * (d_p - torch.einsum("nm,nm->n", p, d_p))


def axis_kept(d_o, o, d_lse):
    return (d_o * o).sum(-1, keepdim=True) - d_lse


def other_heads(d_o, o, d_lse):
    return d_o @ o.mT - d_lse


def other_heads_summed(d_o, o, d_lse):
    return (d_o @ o.mT).sum(-1) - d_lse


def over_queries(d_o, o, d_lse):
    return (d_o * o).sum(0) - d_lse


def over_everything(d_o, o, d_lse):
    return torch.sum(d_o * o) - d_lse


def never_summed(d_o, o, d_lse):
    return d_o * o - d_lse.unsqueeze(-1)


def lse_in_each_channel(d_o, o, d_lse):
    return torch.einsum("nhd,nhd->nh", d_o - d_lse[..., None], o)


def formulas_copied(p, d_s, q, d_o, H, scale):
    """As `p.T` turns three axes, without PyTorch's warning."""
    d_v = p.permute(2, 1, 0) @ d_o
    d_k = scale * d_s.permute(2, 1, 0) @ q
    return d_k.unflatten(0, (H, -1)).sum(1), d_v.unflatten(0, (H, -1)).sum(1)


def hidden_by_a_large_number(q, k, lse, is_seen, scale):
    return torch.exp((scale * q @ k.T).masked_fill(~is_seen, -1e9) - lse[:, None])


def hidden_by_infinity(q, k, lse, is_seen, scale):
    return torch.exp((scale * q @ k.T).masked_fill(~is_seen, -torch.inf) - lse[:, None])


def hidden_by_zero(q, k, lse, is_seen, scale):
    return torch.where(is_seen, scale * q @ k.T - lse[:, None], 0).exp()


def two_powers_divided(q, k, lse, is_seen, scale):
    return (scale * q @ k.T).masked_fill(~is_seen, -torch.inf).exp() / lse.exp()[:, None]


def no_power(q, k, lse, is_seen, scale):
    return torch.where(is_seen, scale * q @ k.T - lse[:, None], 0)


def all_natural(d_o, q_log2, k, v, lse, delta, scale):
    d_s = torch.exp(q_log2 @ k.T - lse[:, None]) * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, math.log(2) * d_s.T @ q_log2


def scaled_again(d_o, q_log2, k, v, lse, delta, scale):
    p = torch.exp2(scale * q_log2 @ k.T - lse[:, None] / math.log(2))
    d_s = p * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, math.log(2) * d_s.T @ q_log2


def keys_first(*arguments):
    return solutions.base_two(*arguments)[::-1]


def output_for_average(p, d_p):
    """With the notebook's `o`, as the cell of three keys leaves it."""
    o = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), 0) @ torch.tensor([3.0, 0.0, 9.0])
    return p * (d_p - o)


def worth_for_weight(p, d_p):
    return d_p * (p - (p * d_p).sum(-1, keepdim=True))


def matrices_multiplied(p, d_p):
    return p * (d_p - p @ d_p)


def jacobian_of_one_row(p, d_p):
    return (torch.diag(p) - torch.outer(p, p)) @ d_p


def jacobian_by_products(p, d_p):
    return (torch.diag(p) - p.T @ p) @ d_p


def average_added(p, d_p):
    return p * (d_p + (p * d_p).sum(-1, keepdim=True))


def lse_in_the_sum(d_o, o, d_lse):
    return (d_o * o - d_lse[..., None]).sum(-1)


def _in_a_loop(p, d_s, q, d_o, H, scale, divisor, is_added):
    d_k, d_v = torch.zeros(H, p.shape[2], q.shape[2]), torch.zeros(H, p.shape[2], d_o.shape[2])
    for h in range(len(q)):
        kept = is_added(h)
        d_k[h // divisor] = kept * d_k[h // divisor] + scale * d_s[h].T @ q[h]
        d_v[h // divisor] = kept * d_v[h // divisor] + p[h].T @ d_o[h]
    return d_k, d_v


def divided_by_kv_heads(p, d_s, q, d_o, H, scale):
    return _in_a_loop(p, d_s, q, d_o, H, scale, H, lambda h: 1)


def overwritten(p, d_s, q, d_o, H, scale):
    return _in_a_loop(p, d_s, q, d_o, H, scale, len(q) // H, lambda h: 0)


def turned_whole(d_o, o, d_lse):
    """`d_o @ o.T`, without PyTorch's warning."""
    return torch.matmul(d_o, o.permute(*reversed(range(o.ndim)))) - d_lse


def weights_of_the_notebook(d_o, o, d_lse):
    """With the notebook's `p` and `d_p`, which are no arguments."""
    here = {}
    exec(cells("imports", "eight-tokens", "draw-delta"), here)
    return (here["d_p"] * here["p"]).sum(-1) - d_lse


def queries_copied(p, d_s, q, d_o, H, scale):
    d_k = scale * d_s.mT @ q.repeat_interleave(H, 0)
    d_v = p.mT @ d_o.repeat_interleave(H, 0)
    return d_k.unflatten(0, (H, -1)).sum(1), d_v.unflatten(0, (H, -1)).sum(1)


def keys_summed(p, d_s, q, d_o, H, scale):
    d_k, d_v = scale * d_s.mT @ q, p.mT @ d_o
    HQ, _, M = p.shape
    return tuple(x.view(H, HQ // H, M, -1).sum(2) for x in (d_k, d_v))


def all_heads_in_one(p, d_s, q, d_o, H, scale):
    return (scale * d_s.mT @ q).sum(0, keepdim=True), (p.mT @ d_o).sum(0, keepdim=True)


def never_turned(p, d_s, q, d_o, H, scale):
    d_k, d_v = scale * d_s @ q, p @ d_o
    return d_k.unflatten(0, (H, -1)).sum(1), d_v.unflatten(0, (H, -1)).sum(1)


def scores_of_zero(q, k, lse, is_seen, scale):
    return torch.exp((scale * q @ k.T).masked_fill(~is_seen, 0) - lse[:, None])


def lse_outside(q, k, lse, is_seen, scale):
    return (torch.exp(scale * q @ k.T) - lse[:, None]).masked_fill(~is_seen, 0)


def lse_of_keys(d_o, q_log2, k, v, lse, delta, scale):
    p = torch.exp2(q_log2 @ k.T - lse / math.log(2))
    d_s = p * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, math.log(2) * d_s.T @ q_log2


def natural_lines_copied(d_o, q_log2, k, v, lse, delta, scale):
    """The five lines as they stand, with `q_log2` for `q` and the scale left out of line 1."""
    d_s = torch.exp(q_log2 @ k.T - lse[:, None]) * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, scale * d_s.T @ q_log2


def ln_2_once_in_d_s(d_o, q_log2, k, v, lse, delta, scale):
    p = torch.exp2(q_log2 @ k.T - lse[:, None] / math.log(2))
    d_s = math.log(2) * p * (d_o @ v.T - delta[:, None])
    return scale * d_s @ k, d_s.T @ q_log2


def average_times_lse(d_o, o, d_lse):
    return torch.einsum("nhd,nhd->nh", d_o, o) * (1 - d_lse)


NAN = {"NaN for the row that saw nothing"}
KEPT = {"a sum that keeps its axis, beside a d_lse without one"}
CROSSED = {"the products of each head with all the others"}

ATTEMPTS = {
    "diagonal": ("score_gradient", sigmoid_like, {"keeping only the Jacobian's diagonal"}),
    "one sum": ("score_gradient", over_all, {"one sum for the whole matrix"}),
    "plus": ("row_delta", einsum_plus, {"adding the gradient of lse"}),
    "o squared": ("row_delta", norm_of_o, {"taking o times o"}),
    "repeat": ("group_gradients", reshaped, {"adding up every H-th head, not neighbours"}),
    "scaled": ("group_gradients", scaled_both, {"putting the scale into d_v, too"}),
    "times": ("weights_again", times_the_mask, {"NaN for the row that saw nothing"}),
    "softmax": ("weights_again", softmax_again, {"a softmax over the tile alone"}),
    "scale twice": ("base_two", as_in_the_five_lines, {"scaling d_k twice"}),
    "ln 2": ("base_two", derivative_of_exp2, {"ln 2 in d_s"}),
    "bracket": (
        "score_gradient",
        average_behind_the_bracket,
        {"taking the average off outside of the bracket"},
    ),
    "axis lost": ("score_gradient", axis_lost, {"a sum that has lost its axis"}),
    "axis kept": ("row_delta", axis_kept, KEPT),
    "1 - d_lse": (
        "row_delta",
        average_times_lse,
        {"taking d_lse for a factor of the average"},
    ),
    "crossed": ("row_delta", other_heads, CROSSED),
    "crossed, summed": ("row_delta", other_heads_summed, CROSSED),
    "queries": (
        "row_delta",
        over_queries,
        {"summing over the queries or the heads, not over the channels"},
    ),
    "whole": ("row_delta", over_everything, {"one sum for the whole tensor"}),
    "no sum": ("row_delta", never_summed, {"multiplying number by number, and not summing"}),
    "inside": ("row_delta", lse_in_each_channel, {"taking d_lse off every channel of d_o"}),
    "copied": ("group_gradients", formulas_copied, {"`.T` where there are three axes"}),
    "-1e9": (
        "weights_again",
        hidden_by_a_large_number,
        {"infinity for the row that saw nothing"},
    ),
    "-inf": ("weights_again", hidden_by_infinity, NAN),
    "0 / 0": ("weights_again", two_powers_divided, NAN),
    "0": ("weights_again", hidden_by_zero, {"writing 0 before the power is taken"}),
    "no power": ("weights_again", no_power, {"stopping at the exponent"}),
    "natural": ("base_two", all_natural, {"natural exp and lse, with scores in base two"}),
    "scaled again": ("base_two", scaled_again, {"scaling the scores twice"}),
    "o": ("score_gradient", output_for_average, {"taking `o` for the average"}),
    "swapped": ("score_gradient", worth_for_weight, {"`p` and `d_p` in each other's places"}),
    "p @ d_p": (
        "score_gradient",
        matrices_multiplied,
        {"a matrix product where each row wants a sum of its own"},
    ),
    "diag": (
        "score_gradient",
        jacobian_of_one_row,
        {"the Jacobian of one row, given a whole matrix"},
    ),
    "diag, @": (
        "score_gradient",
        jacobian_by_products,
        {"the Jacobian of one row, given a whole matrix"},
    ),
    "plus the average": (
        "score_gradient",
        average_added,
        {"adding the average in place of taking it off"},
    ),
    "d_lse in the sum": ("row_delta", lse_in_the_sum, {"taking d_lse off once for each channel"}),
    "h // H": (
        "group_gradients",
        divided_by_kv_heads,
        {"dividing a head's number by H, not by G"},
    ),
    "overwritten": (
        "group_gradients",
        overwritten,
        {"keeping the last head's share for the whole group"},
    ),
    "o.T": ("row_delta", turned_whole, CROSSED),
    "globals": ("row_delta", weights_of_the_notebook, {"weights of the notebook, not of the case"}),
    "copies": (
        "group_gradients",
        queries_copied,
        {"copying the queries, which have all their heads already"},
    ),
    "sum(2)": ("group_gradients", keys_summed, {"summing over the keys, not over the group"}),
    "sum(0)": (
        "group_gradients",
        all_heads_in_one,
        {"one sum over all heads, as if there were one KV head"},
    ),
    "no .mT": ("group_gradients", never_turned, {"leaving the matrices unturned"}),
    "score 0": ("weights_again", scores_of_zero, {"hiding a key by the score 0"}),
    "exp, then lse": ("weights_again", lse_outside, {"subtracting lse after the power"}),
    "lse by key": ("base_two", lse_of_keys, {"taking lse for a number of each key"}),
    "line 5 copied": (
        "base_two",
        natural_lines_copied,
        {
            "natural exp and lse, with scores in base two",
            "`q_log2` in line 5, where `q` stood",
        },
    ),
    "ln 2 once": ("base_two", ln_2_once_in_d_s, {"ln 2 in d_q, too"}),
    "keys first": ("base_two", keys_first, {"d_k before d_q"}),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    assert set(judge(KNOWN[name], attempt).misconceptions) == named


def rooted(d_o, d_lse, q, k, v, o, lse, is_seen, scale):
    """Each of `q` and `k` scaled by the root, and forgotten in the gradients."""
    root = math.sqrt(scale)
    d_q, d_k, d_v = solutions.attention_backward(
        d_o, d_lse, root * q, root * k, v, o, lse, is_seen, 1.0
    )
    return d_q, d_k, d_v


def in_place(d_o, d_lse, q, k, v, o, lse, is_seen, scale):
    q *= scale
    d_q, d_k, d_v = solutions.attention_backward(d_o, d_lse, q, k, v, o, lse, is_seen, 1.0)
    return scale * d_q, d_k, d_v


def test_an_answer_that_changes_its_input_is_refused() -> None:
    """Its gradients are right. The first scale that is not 1 shows it."""
    verdict = judge(KNOWN["attention_backward"], in_place)
    assert verdict.outcome != "right"
    assert "argument 3 is another one after the call" in verdict.text


def test_a_root_of_the_scale_is_named() -> None:
    verdict = judge(KNOWN["attention_backward"], rooted)
    assert verdict.misconceptions == ("√scale where the scale is meant",)


def test_measured_backwards_are_between_the_two_bests() -> None:
    """What the chapter tells: slower than the walks at best, faster than stored weights at best."""
    f = pictures.facts(65_536, 128, 16)
    for ms in pictures.dense_times().values():
        assert f.again_ms < ms < f.stored_ms


@pytest.mark.parametrize("of_k", ["scale", "nothing", "ln 2"])
def test_a_natural_lse_is_told_first(of_k: str) -> None:
    """It spoils the weights, and so both gradients, whatever else is wrong with `d_k`."""

    def attempt(d_o, q_log2, k, v, lse, delta, scale):
        d_s = torch.exp2(q_log2 @ k.T - lse[:, None]) * (d_o @ v.T - delta[:, None])
        factor = {"scale": scale, "nothing": 1, "ln 2": math.log(2)}[of_k]
        return scale * d_s @ k, factor * d_s.T @ q_log2

    verdict = judge(KNOWN["base_two"], attempt)
    assert verdict.misconception == "a natural lse under exp2"
    assert len(verdict.misconceptions) == (1 if of_k == "ln 2" else 2)
    assert "`d_q`:" in verdict.text, "the gradient is told by name"


def test_where_shapes_clash_shapes_are_told() -> None:
    """And not two dozen decimals."""
    told = judge(KNOWN["group_gradients"], lambda p, d_s, q, *_: d_s @ q).text
    assert "with p     = shape [3, 2, 4]" in told
    assert "with scale = 0.7" in told


def test_a_jacobian_that_is_built_is_right_too() -> None:
    assert judge(KNOWN["score_gradient"], jacobian_built).outcome == "right"


def test_weights_of_a_tile_sum_to_one_at_most() -> None:
    """A reader may check a case by hand: its lse is that of a row which holds the tile."""
    for case in KNOWN["weights_again"].cases:
        assert (solutions.weights_again(*case.arguments()).sum(-1) <= 1).all(), case.name


def test_the_minutes_are_told() -> None:
    """Those of the main way's exercises."""
    way = ("score_gradient", "row_delta", "attention_backward")
    minutes = sum(KNOWN[name].minutes for name in way)
    assert f"{minutes} of them exercises" in cells("title")


# -- pictures --


def test_the_jacobian_is_autograds() -> None:
    s = draw(5)
    right = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, 0), s)
    torch.testing.assert_close(pictures.jacobian(s), right)


def test_a_delta_that_differs_is_said() -> None:
    p, d_p, d_o, o = torch.full((2, 2), 0.5), torch.ones(2, 2), torch.ones(2, 3), torch.ones(2, 3)
    assert pictures.draw_delta(p, d_p, d_o, o / 3).finding.endswith("have the same sum")
    assert pictures.draw_delta(p, d_p, d_o, o).finding.endswith("have different sums")


def test_what_autograd_keeps_is_counted_once_and_without_inputs() -> None:
    x = torch.ones(8, requires_grad=True)
    assert pictures.kept_bytes(lambda: x * x, x) == 0
    assert pictures.kept_bytes(lambda: x * x) == 32
    assert pictures.kept_bytes(lambda: x.exp().sin().sum(), x) == 32, "exp's result, for both"


@pytest.mark.parametrize(("tokens", "width"), [(96, 8), (70, 24)], ids=["even", "short last"])
def test_products_of_the_backward_passes(tokens: int, width: int) -> None:
    """Two of the forward; four gradients; and three that the walks compute again."""
    assert pictures.products(tokens, width, tile=32) == {"forward": 2, "stored": 4, "two walks": 7}


@pytest.mark.parametrize("tokens", pictures.TOKENS)
def test_storing_is_never_smaller_or_faster(tokens: int) -> None:
    """From 1,024 tokens on, whatever the width."""
    for width in pictures.WIDTHS:
        f = pictures.facts(tokens, width, 16)
        assert f.stored > f.again
        assert f.stored_ms > f.again_ms


def test_facts_of_the_chapters_layer() -> None:
    f = pictures.facts(65_536, 128, 16)
    assert f.stored == 128 * 2**30
    assert f.again == 260 * 2**20
    assert (f.stored_limit, f.again_limit) == ("memory", "arithmetic")
