"""The capstone's variants: by masks as by operators, causal, and each without what it is said to be
without."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from nsa_tutorial.sparse import block_selection
from nsa_tutorial.training.capstone import evaluate
from nsa_tutorial.training.capstone.attention import SparseAttention, random_blocks
from nsa_tutorial.training.capstone.listed import index_loss
from nsa_tutorial.training.capstone.model import Decoder, loss_of
from nsa_tutorial.training.capstone.settings import VARIANTS, Settings
from nsa_tutorial.training.capstone.tasks import HELD_OUT
from nsa_tutorial.training.capstone.train import Run

SMALL = {
    "length": 64, "batch": 2, "steps": 30, "layers": 1, "width": 32, "query_heads": 4,
    "kv_heads": 2, "head_width": 16, "block_size": 8, "top_n": 4, "window_size": 8,
    "summary_length": 4, "stride": 4, "warmup": 5,
}  # fmt: skip


def loss_and_gradients(settings: Settings, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Decoder(settings, 50).double()
    torch.manual_seed(1)  # for random blocks
    loss = loss_of(model(tokens).double(), tokens)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("separate_keys", [True, False])
@pytest.mark.parametrize("attention", VARIANTS)
def test_masks_are_the_operators(attention: str, separate_keys: bool) -> None:
    """Losses and all gradients, at a length that no size divides."""
    settings = Settings(**SMALL, attention=attention, separate_keys=separate_keys)
    tokens = torch.randint(50, (2, 53), generator=torch.Generator().manual_seed(0))
    loss, gradients = loss_and_gradients(settings, tokens)
    by_operators = dataclasses.replace(settings, backend="reference")
    expected, wanted = loss_and_gradients(by_operators, tokens)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("attention", VARIANTS)
def test_no_variant_sees_the_future(attention: str) -> None:
    run = Run(Settings(**SMALL, attention=attention))
    tokens = run.task.texts(0).tokens
    other = tokens.clone()
    other[:, 40:] = other[:, 40:].flip(1)
    logits = []
    for text in (tokens, other):
        torch.manual_seed(0)
        logits.append(run.logits(text)[:, :40])
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("attention", VARIANTS)
def test_thirty_steps_lower_the_loss(attention: str) -> None:
    losses = [metrics["loss"] for metrics in Run(Settings(**SMALL, attention=attention)).steps()]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.05


@pytest.mark.parametrize("attention", ["msa", "dsa"])
def test_an_indexer_learns_from_the_attention_alone(attention: str) -> None:
    """By masks as by operators; the task teaches it nothing, and it teaches nothing else."""
    found = {}
    for backend in ("masks", "reference"):
        torch.manual_seed(0)
        model = Decoder(Settings(**SMALL, attention=attention, backend=backend), 50).double()
        tokens = torch.randint(50, (2, 53), generator=torch.Generator().manual_seed(0))
        logits = model(tokens)
        index_loss(model).backward()
        found[backend] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found[backend] and all(".indexer." in name for name in found[backend])
        model.zero_grad()
        loss_of(logits.double(), tokens).backward()
        assert all(p.grad is None for n, p in model.named_parameters() if ".indexer." in n)
    for name, gradient in found["masks"].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, found["reference"][name], rtol=1e-5, atol=1e-8)


@pytest.mark.exhaustive
def test_hits_rise_with_an_indexer_alone() -> None:
    """Blocks of 4 by their mean keys or by an indexer, of texts of 64 tokens."""
    sizes = SMALL | {"width": 64, "steps": 120, "block_size": 4, "top_n": 3, "batch": 16}
    sizes |= {"query_heads": 2, "kv_heads": 1, "head_width": 64, "learning_rate": 8e-3}
    hits = {}
    for attention in ("msa", "moba"):
        run = Run(Settings(**sizes, attention=attention))
        list(run.steps())
        found = evaluate.summary(run, 2)
        hits[attention] = found["hits"]
    assert hits["msa"] > hits["moba"] + 0.2


def test_random_blocks_are_lists() -> None:
    """The first block, the two latest, and others of the past, none twice, each as often."""
    layer = Run(Settings(**SMALL)).model.blocks[0].attend
    assert isinstance(layer, SparseAttention)
    lists = random_blocks(torch.zeros(200, 64, 4, 16), layer.config)
    own = torch.arange(64) // 8
    assert lists.shape == (200, 64, 2, 4) and lists.dtype == torch.int32
    for n in (0, 7, 8, 20, 63):
        ids = lists[:, n]
        wanted = sorted({0, int(own[n]), max(int(own[n]) - 1, 0)})
        assert all((ids == block).any(-1).all() for block in wanted)
        assert ((ids <= own[n]) & (ids >= -1)).all()
        count = min(int(own[n]) + 1, 4)
        assert ((ids >= 0).sum(-1) == count).all()
        assert ((ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] == -1)).all()
    free = torch.bincount(lists[:, 63].flatten(), minlength=8)[1:6]  # one slot for five blocks
    assert free.sum() == 400 and free.min() > 50


def test_nothing_teaches_the_scores_without_summaries() -> None:
    """The keys of the summaries get a gradient with them, and none without."""
    for attention, has_gradient in (("nsa", True), ("no-summaries", False)):
        settings = Settings(**SMALL, attention=attention)
        run = Run(settings)
        next(run.steps(1))
        weight = run.model.blocks[0].attend.compress_k.weights["weight"]
        assert (weight.grad is not None and bool(weight.grad.any())) is has_gradient


def test_a_look_at_the_lists_changes_nothing() -> None:
    """Neither random numbers nor the choice: a run that is looked at has the same losses."""
    settings = Settings(**SMALL, attention="random")
    plain, seen = Run(settings), Run(settings)
    expected = [metrics["loss"] for metrics in plain.steps(4)]
    losses, state = [], torch.get_rng_state()
    for metrics in seen.steps(4):
        losses.append(metrics["loss"])
        assert seen.lists().shape == (2, 64, 2, 4)
    assert losses == expected
    assert torch.equal(torch.get_rng_state(), state)  # nor does a run touch those of others


def test_lists_are_those_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `lists` shows is what the operator would choose by itself."""
    settings = Settings(**SMALL, backend="reference")
    run, chosen, choose = Run(settings), [], block_selection.select_blocks
    monkeypatch.setattr(
        block_selection, "select_blocks",
        lambda *given, **sizes: chosen.append(choose(*given, **sizes)) or chosen[-1],
    )  # fmt: skip
    run.logits(run.task.texts(HELD_OUT).tokens)
    by_operator = chosen.pop()
    assert torch.equal(run.lists(), by_operator)
    by_masks = Run(dataclasses.replace(settings, backend="masks"))
    assert torch.equal(by_masks.lists(), by_operator)


@pytest.mark.parametrize(
    ("backend", "place"), [("triton", "cuda"), ("tilelang", "cuda")], ids=["triton", "tilelang"]
)
@pytest.mark.gpu
def test_kernels_in_mid_run(backend: str, place: str) -> None:
    """A run by masks goes on with kernels, in fp32, and its losses stay what they were."""
    settings = Settings(**SMALL, device=place)
    stays, changes = Run(settings), Run(settings)
    list(stays.steps(3)), list(changes.steps(3))
    attend = changes.model.blocks[0].attend
    attend.by_masks, attend.config = False, dataclasses.replace(attend.config, backend=backend)
    with torch.autocast("cuda", enabled=False):
        for a, b in zip(stays.steps(8), changes.steps(8), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=0.05)
