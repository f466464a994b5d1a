"""What kernels for blocks of a few tokens have in common, in both languages: which blocks they
gather, and who adds up the gradients of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8)  # tokens of a block that is gathered


def gathers(block_size: int) -> bool:
    """Whether blocks are so short that a step gathers tokens of several."""
    return block_size in SIZES


def adds_by_atomics(q: Tensor) -> bool:
    """Whether the gradients of keys and values may be added in any order, and in long sums."""
    return q.element_size() == 2 and not torch.are_deterministic_algorithms_enabled()
