"""The capstone's tasks: what is asked was told, once, at the distance that is said."""

from __future__ import annotations

import pytest
import torch

from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.tasks import (
    HELD_OUT,
    NONE,
    Bytes,
    Needle,
    Recall,
    Texts,
    corpus,
    task_of,
)  # fmt: skip


def check_questions(texts: Texts) -> int:
    """Each question's key stands once before it, its value follows there and here."""
    count = 0
    for tokens, target, distance in zip(*texts, strict=True):
        for at in (target != NONE).nonzero().flatten().tolist():
            (told,) = (tokens[:at] == tokens[at]).nonzero().flatten().tolist()
            assert tokens[told + 1] == tokens[at + 1] == target[at]
            assert at - told == distance[at]
            count += 1
        assert torch.equal(target == NONE, distance == NONE)
    return count


@pytest.mark.parametrize("task", [Recall(256, 8, 0), Needle(512, 8, 0), Recall(32, 8, 5)])
def test_questions_can_be_answered(task: Recall | Needle) -> None:
    texts = task.texts(3)
    assert texts.tokens.shape == (task.batch, task.length)
    assert texts.tokens.min() >= 0 and texts.tokens.max() < task.vocabulary
    assert check_questions(texts) >= 3 * task.batch


def test_each_doubling_of_the_distance_is_asked_for() -> None:
    task = Recall(512, 64, 0)
    distance = torch.cat([task.texts(step).distance.flatten() for step in range(4)])
    counts = [int(((distance >= 2**i) & (distance < 2 ** (i + 1))).sum()) for i in range(1, 9)]
    assert min(counts) > 0.02 * sum(counts) and max(counts) < 0.3 * sum(counts)


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_needle_at_a_depth(depth: float) -> None:
    texts = Needle(256, 16, 0).texts(HELD_OUT, depth)
    assert check_questions(texts) == 16
    assert set(texts.distance[:, -2].tolist()) == {256 - 2 - 2 * round(depth * 126)}


@pytest.mark.parametrize("name", ["recall", "needle", "bytes"])
def test_texts_are_those_of_seed_and_step(name: str) -> None:
    settings = Settings.of(name, length=128, batch=2)
    first = task_of(settings).texts(4)
    for one, other in zip(first, task_of(settings).texts(4), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first.tokens, task_of(settings).texts(5).tokens)
    other = Settings.of(name, length=128, batch=2, seed=1)
    assert not torch.equal(first.tokens, task_of(other).texts(4).tokens)


def test_bytes_are_followed_by_the_next_and_some_are_held_out() -> None:
    text = bytes(corpus().tolist())
    assert len(text) > 300_000 and max(text) < 128
    for step in (0, HELD_OUT):
        tokens, target, _ = Bytes(200, 4, 0).texts(step)
        assert torch.equal(tokens[:, 1:], target[:, :-1])
        for row in tokens:
            place = text.index(bytes(row.tolist()))
            assert (place + 200 < len(text) * 9 // 10) is (step == 0)
