"""The course's Adam moves parameters as PyTorch's does."""

from __future__ import annotations

import pytest
import torch

from nsa_tutorial.course.adam import Adam


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_are_those_of_pytorch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(7, 5, generator=generator, dtype=dtype) for _ in range(3)]
    theirs = [x.clone() for x in mine]
    ours, pytorchs = Adam(mine, lr=0.03), torch.optim.Adam(theirs, lr=0.03)
    for optimiser, (a, b, unused) in ((ours, mine), (pytorchs, theirs)):
        for x in (a, b, unused):
            x.requires_grad_()
        for _ in range(60):
            optimiser.zero_grad()
            ((a @ b.T).sin().sum() + a.exp().sum()).backward()
            optimiser.step()
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
