"""A small model learns the same on every backend: twenty steps, one loss curve."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from places import skip_unless_runs
from torch import Tensor, nn

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig

VOCABULARY, TOKENS, WIDTH, STEPS = 64, 512, 64, 20


class Model(nn.Module):
    """Two layers of attention, each beside a path that skips it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        config = NativeSparseAttentionConfig(
            width=WIDTH, query_heads=4, kv_heads=2, key_width=32, value_width=32, block_size=32,
            top_n=4, window_size=48, length=16, stride=8, gate_width=16, backend=backend,
        )  # fmt: skip
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(NativeSparseAttention(config) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.head(self.norms[2](x))


def loss_curve(backend: str, device: str) -> Tensor:
    """The loss of each step, `[STEPS]`, on a sequence whose second half repeats the first."""
    torch.manual_seed(0)
    model = Model(backend).to(device)
    half = torch.randint(VOCABULARY, (1, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    tokens = half.repeat(1, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_one_loss_curve(backend: str) -> None:
    skip_unless_runs(backend, "cuda")
    right = loss_curve("reference", "cuda")
    assert right[-1] < right[0] - 0.5, "nothing was learnt: the curve says nothing"
    assert torch.allclose(loss_curve(backend, "cuda"), right, atol=1e-4, rtol=0)
