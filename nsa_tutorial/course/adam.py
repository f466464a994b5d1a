"""Adam, number for number as `torch.optim.Adam`, whose first use waits seconds for an import."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8


class Adam:
    """An optimiser of PyTorch's kind, for parameters on the CPU.

    Args:
        parameters: the tensors to train.
        lr: the rate.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr, self.steps = list(parameters), lr, 0
        self.means = [(torch.zeros_like(x), torch.zeros_like(x)) for x in self.parameters]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for x in self.parameters:
            x.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters; one that never has a gradient stays."""
        self.steps += 1
        rate = self.lr / (1 - _BETA_1**self.steps)
        correction = math.sqrt(1 - _BETA_2**self.steps)
        for x, (mean, square) in zip(self.parameters, self.means, strict=True):
            if x.grad is None:
                continue
            mean.lerp_(x.grad, 1 - _BETA_1)
            square.mul_(_BETA_2).addcmul_(x.grad, x.grad, value=1 - _BETA_2)
            x.addcdiv_(mean, (square.sqrt() / correction).add_(_EPS), value=-rate)
