"""The running top-n: its networks against sorts, and its lists against the reference's."""

from __future__ import annotations

import math

import pytest
import torch

from nsa_tutorial.course.kernels import running_top_n
from nsa_tutorial.sparse import block_selection


def numbers(*shape: int, seed: int = 0, most: int = 50) -> torch.Tensor:
    """Few enough values that some are equal."""
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def falling(x: torch.Tensor) -> torch.Tensor:
    return x.sort(-1, descending=True).values


@pytest.mark.parametrize("length", [1, 2, 8, 64])
def test_the_network_sorts(length: int) -> None:
    x = numbers(20, length)
    assert torch.equal(running_top_n.sort(x), falling(x))


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_the_best_of_two_are_those_of_all(n: int) -> None:
    a, b = falling(numbers(50, n)), falling(numbers(50, n, seed=1))
    best = falling(torch.cat((a, b), -1))[:, :n]
    assert torch.equal(running_top_n.best_of_two(a, b), best)


def test_zeros_and_ones_decide() -> None:
    """A network that sorts all lists of zeros and ones sorts everything."""
    ones = torch.arange(9)
    a = (torch.arange(8) < ones[:, None]).long().repeat_interleave(9, 0)
    b = (torch.arange(8) < ones[:, None]).long().repeat(9, 1)
    best = falling(torch.cat((a, b), -1))[:, :8]
    assert torch.equal(running_top_n.best_of_two(a, b), best)


def test_packed_numbers_are_ordered_by_score_then_by_lower_id() -> None:
    scores = torch.tensor([0.0, 1e-40, 1.0, 1.0, 1.0 + 2**-23, 3e38, math.inf, -1.0, -0.0])
    ids = torch.tensor([3, 0, 7, 2, 2**31 - 1, 5, 9, 1, 4])
    packed = running_top_n.pack(scores, ids)
    assert packed.argsort(descending=True).tolist() == [6, 5, 4, 3, 2, 1, 0, 8, 7]
    back, back_ids = running_top_n.unpack(packed)
    assert torch.equal(back, scores)
    assert back_ids.tolist() == [3, 0, 7, 2, 2**31 - 1, 5, 9, -1, 4]


@pytest.mark.parametrize(("n", "BT"), [(1, 4), (4, 2), (4, 4), (8, 16), (2, 64)])
def test_lists_are_the_reference_s(n: int, BT: int) -> None:
    """Of 21 blocks with equal scores among them, the last ones in the future, some forced."""
    R, NB = 40, 21
    score = numbers(R, NB, most=9).float()
    own, block = torch.arange(R) % NB, torch.arange(NB)
    expected = block_selection.choose(
        score[None, :, None], own, top_n=n, num_initial=0, num_local=1
    )
    forced = score.masked_fill(block == own[:, None], math.inf)
    hidden = forced.masked_fill(block > own[:, None], -1)
    assert torch.equal(running_top_n.running_top_n(hidden, n=n, BT=BT), expected[0, :, 0])


@pytest.mark.parametrize(("n", "BT"), [(1, 1), (4, 4), (16, 32)])
def test_comparisons_by_counting(n: int, BT: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, maximum = [], torch.maximum

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        counted.append(a.numel())
        return maximum(a, b)

    monkeypatch.setattr(torch, "maximum", noted)
    running_top_n.running_top_n(torch.rand(1, BT), n=n, BT=BT)
    assert sum(counted) == running_top_n.comparisons(n, BT)
