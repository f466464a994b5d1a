"""Scores that choose blocks: what each way passes on to them, and what comes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course import learning_to_choose as choosing

pytestmark = pytest.mark.usefixtures("one_thread")

learning = pytest.mark.parametrize("how", ["slot_scale", "straight_through"])


def step(how: str, scale: float = choosing.GENTLE) -> tuple[Tensor, Tensor, Tensor]:
    """An untrained scorer's probabilities, what it chooses, and what the queries return."""
    generator = torch.Generator().manual_seed(0)
    scorer = choosing.new_scorer(generator).requires_grad_()
    question = choosing.ask(generator)
    p, ids = choosing.score_blocks(scorer, question)
    return p, ids, choosing.attend(how, question, p, ids, scale)


@pytest.mark.parametrize("scale", [choosing.GENTLE, choosing.PEAKED])
@learning
def test_the_forward_is_the_plain_one(how: str, scale: float) -> None:
    torch.testing.assert_close(step(how, scale)[2], step("none", scale)[2], rtol=1e-4, atol=1e-5)


def test_a_choice_has_no_gradient() -> None:
    assert not step("none")[2].requires_grad


@learning
def test_who_gets_a_gradient(how: str) -> None:
    """Through `slot_scale` the chosen blocks, straight through all of them."""
    p, ids, o = step(how)
    (d_p,) = torch.autograd.grad(o.square().sum(), p)
    chosen = torch.zeros_like(p).scatter(-1, ids, 1).bool()
    assert (d_p[chosen] != 0).all()
    assert bool((d_p[~chosen] != 0).all()) is (how == "straight_through")


def test_a_question_is_about_its_key() -> None:
    question = choosing.ask(torch.Generator().manual_seed(0))
    similar = torch.einsum("bnhd,bmhd->nm", question.q, question.k)
    best = similar.argmax(-1)
    assert torch.equal(best // choosing.BLOCK_SIZE, question.block)
    assert torch.equal(question.v[:, best], question.answer)


@pytest.mark.exhaustive
@learning
def test_gentle_attention_teaches_the_choice(how: str) -> None:
    """For every seed: from chance to more than twice that, which is more than the untrained scorer
    ever finds."""
    for seed in range(3):
        found = choosing.run(how, 100, seed)
        untrained = choosing.run("none", 100, seed)
        assert found[-30:].mean() > 2 * choosing.CHANCE
        assert found[-30:].mean() > untrained.max()
        assert untrained.mean() == pytest.approx(choosing.CHANCE, abs=0.08)


@pytest.mark.exhaustive
def test_peaked_attention_teaches_the_wrong_choice() -> None:
    """Through `slot_scale`; straight through, what was not chosen counts as well."""
    peaked = {"steps": 100, "scale": choosing.PEAKED}
    assert choosing.run("slot_scale", **peaked)[-30:].mean() < choosing.CHANCE / 2
    assert choosing.run("straight_through", **peaked)[-30:].mean() > 2 * choosing.CHANCE


def test_hits_pull_and_misses_push() -> None:
    """And which of the two wins depends on how peaked attention is."""
    hits, misses = choosing.pushes(choosing.GENTLE, draws=20)
    assert hits > 10 * abs(misses)
    hits, misses = choosing.pushes(choosing.PEAKED, draws=20)
    assert misses < 0
    assert abs(misses) > 100 * abs(hits)


def test_gentle_and_peaked_are_what_they_are_called() -> None:
    assert 0.4 < choosing.weight_of_own_key(choosing.GENTLE) < 0.7
    assert choosing.weight_of_own_key(choosing.PEAKED) > 0.99
    alike = choosing.TOP_N * choosing.BLOCK_SIZE
    assert choosing.weight_of_own_key(0) == pytest.approx(1 / alike)


def test_a_scorer_that_knows_the_task() -> None:
    assert choosing.found_by_hand(10) > 3 * choosing.CHANCE


def test_runs_repeat_and_seeds_differ() -> None:
    first = choosing.run("slot_scale", 5, 1)
    assert torch.equal(first, choosing.run("slot_scale", 5, 1))
    assert not torch.equal(first, choosing.run("slot_scale", 5, 2))
    assert first.shape == (5,)


def test_another_way_is_refused() -> None:
    with pytest.raises(ValueError, match="how: got 'sampled', expected one of none"):
        choosing.run("sampled")
