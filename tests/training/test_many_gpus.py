"""A text over several ranks is the text on one: outputs, log-sum-exps, lists and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import many_gpus_cases as cases
import pytest
from ranks import Ranks

from nsa_tutorial.training.many_gpus import Cut


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("tokens", [48, 45, 3])
@pytest.mark.parametrize("own_window", [False, True])
def test_branches(two: Ranks, kind: str, tokens: int, own_window: bool) -> None:
    for errors in two.run(cases.branches, Cut(2, tokens, kind), 2, own_window, 2):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_packed(two: Ranks, kind: str) -> None:
    for documents in ((0, 3, 3, 30, 31, 45), (0, 22, 45), (0, 1, 45)):
        for errors in two.run(cases.branches, Cut(2, 45, kind, documents), 1, True, 2):
            assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("documents", [None, (0, 2, 30, 31, 45)])
def test_each_branch(two: Ranks, kind: str, documents: tuple[int, ...] | None) -> None:
    """Outputs, log-sum-exps, lists with ties, and gradients through all of them."""
    for errors in two.run(cases.one_by_one, Cut(2, 45, kind, documents), 1):
        assert errors["lists"] == 0
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("documents", [None, (0, 2, 30, 31, 45)])
def test_bytes(two: Ranks, kind: str, documents: tuple[int, ...] | None) -> None:
    """What is counted by hand is what is sent."""
    for own_window in (False, True):
        for found in two.run(cases.bytes_sent, Cut(2, 45, kind, documents), own_window):
            by_hand, forward, by_hand_back, backward = found
            assert by_hand == forward and by_hand_back == backward
            assert sum(forward.values()) > 0
