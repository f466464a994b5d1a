"""A small decoder: the attention of this package between RMSNorm, rotary positions and SwiGLU, as
in Llama (arXiv 2302.13971). Chapter 17 reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_tutorial.training.capstone.attention import attention
from nsa_tutorial.training.capstone.settings import Settings


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202), `[..., width]` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TokenShift(nn.Module):
    """Each channel adds a learnt part of the token before (RWKV, arXiv 2305.13048), `[B, N, width]`
    to the same. A value next to its key then knows the key, which attention would take long to
    learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.before = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        return x * self.own + F.pad(x, (0, 0, 1, -1)) * self.before


class Block(nn.Module):
    """Attention, then SwiGLU. Each reads the stream through a norm, and adds to the stream."""

    def __init__(self, width: int, attend: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.shift, self.attend, self.mlp = TokenShift(width), attend, SwiGLU(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        x = x + self.attend(self.shift(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Tokens `[B, N]` to the logits of the token after each, `[B, N, vocabulary]`.

    Args:
        settings: of the run.
        vocabulary: number of different tokens.
        attend: makes the attention of a block, `[B, N, width]` to the same.
    """

    def __init__(
        self,
        settings: Settings,
        vocabulary: int,
        attend: Callable[[Settings], nn.Module] = attention,
    ) -> None:
        super().__init__()
        s = settings
        self.embed = nn.Embedding(vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s.width, attend(s)) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width, eps=1e-6)
        self.logits = nn.Linear(s.width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("embed.weight", "logits.weight")):
                nn.init.normal_(weight, std=0.02)
            elif name.endswith(("o.weight", "down.weight")):  # what is added to the stream
                nn.init.normal_(weight, std=0.02 / (2 * s.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, N]` to `[B, N, vocabulary]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy in nats over the positions that have a target; others hold -100."""
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), ignore_index=-100)


@torch.no_grad()
def accuracy(logits: Tensor, target: Tensor) -> float:
    """The share of the positions with a target whose most likely token is the target."""
    has_target = target != -100
    return (logits.argmax(-1) == target)[has_target].float().mean().item()
