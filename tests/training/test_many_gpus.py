"""A text over several ranks is the text on one: outputs, log-sum-exps, lists and gradients."""

from __future__ import annotations

import many_gpus_cases as cases
import pytest
from ranks import Ranks

from nsa_tutorial.training.many_gpus import Cut


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


@pytest.mark.parametrize("compression", ["mean", "mlp"])
@pytest.mark.parametrize("shards", [False, True], ids=["plain", "fully_shard"])
def test_layer(two: Ranks, compression: str, shards: bool) -> None:
    """Outputs, and the gradient of every weight."""
    for cut in (Cut(2, 21), Cut(2, 2), Cut(2, 21, "contiguous", (0, 3, 15, 21))):
        for errors in two.run(cases.layer_with, (1, cut, compression), {"shards": shards}):
            assert max(errors.values()) < 1e-12, errors


def test_layer_over_data_and_context(four: Ranks) -> None:
    for errors in four.run(cases.layer_with, (2, Cut(2, 21), "mlp"), {"shards": True}):
        assert max(errors.values()) < 1e-12, errors


def test_four(four: Ranks) -> None:
    """Windows and summaries that reach over several ranks; ranks without a token."""
    for tokens in (90, 45, 9, 5, 1):
        for kind in ("contiguous", "zigzag"):
            for errors in four.run(cases.branches, Cut(4, tokens, kind), 1, True, 2):
                assert max(errors.values()) < 1e-12, errors


@pytest.mark.exhaustive
def test_layer_compiled(two: Ranks) -> None:
    """`torch.compile` leaves the operators over ranks as they are, and compiles what is around."""
    options = {"shards": True, "compiles": True}
    for errors in two.run(cases.layer_with, (1, Cut(2, 21), "mlp"), options):
        assert max(errors.values()) < 1e-12, errors
