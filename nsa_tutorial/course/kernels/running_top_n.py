"""A running top-n beside chapter 03's running softmax, in plain PyTorch.

Blocks come a step at a time, and a row keeps the best `n` that it has seen. A score and its block's
id are packed into one integer, so that one comparison moves both. Lists are sorted and merged by
bitonic networks: comparisons at fixed places, whatever the numbers are.

It is written to be read. The kernels of chapter 14 choose otherwise
(`triton.choice.pick.pick_kernel` halves a range), and the chapter compares the two.

Symbols: `n` entries of a list and `BT` blocks of a step, powers of two · `NB` blocks · `R` rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ID_BITS = 32
ID_MASK = 2**ID_BITS - 1
EMPTY = -1  # below everything that is packed


def pack(scores: Tensor, ids: Tensor) -> Tensor:
    """A score and an id as one int64: of two, the larger has the larger score, or the lower id.

    Args:
        scores: fp32, at least 0; what is below is hidden and becomes `EMPTY`.
        ids: integers of the same shape, from 0 up to `ID_MASK`.
    """
    # the bits of fp32 numbers of at least 0 are ordered as the numbers are; + 0.0 turns -0 into 0
    bits = (scores.float() + 0.0).view(torch.int32).long()
    return torch.where(scores >= 0, (bits << ID_BITS) | (ID_MASK - ids.long()), EMPTY)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and ids that `pack` took; -1 and -1 where it is `EMPTY`."""
    is_empty = packed < 0
    scores = (packed >> ID_BITS).to(torch.int32).view(torch.float32)
    ids = ID_MASK - (packed & ID_MASK)
    return scores.masked_fill(is_empty, -1), ids.masked_fill(is_empty, -1)


def settle(x: Tensor) -> Tensor:
    """Sort `[..., m]`, the largest first, where each row falls and then rises, or the reverse.

    A stage compares numbers that stand `distance` apart and puts the larger one in front.
    """
    distance = x.shape[-1] // 2
    while distance > 0:
        pairs = x.unflatten(-1, (-1, 2, distance))
        front, back = pairs.unbind(-2)
        pairs = torch.stack((torch.maximum(front, back), torch.minimum(front, back)), -2)
        x = pairs.flatten(-3)
        distance //= 2
    return x


def best_of_two(a: Tensor, b: Tensor) -> Tensor:
    """The best `n` of two lists `[..., n]`, each with its largest first; so is the result.

    The first of `a` meets the last of `b`. Of each such pair one at most is left out, and no number
    that is kept is smaller than one that is not.
    """
    return settle(torch.maximum(a, b.flip(-1)))


def sort(x: Tensor) -> Tensor:
    """Sort `[..., m]`, the largest first: runs of 1, 2, 4, … numbers are merged by twos."""
    length, size = x.shape[-1], 1
    while size < length:
        front, back = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        x = settle(torch.cat((front, back.flip(-1)), -1)).flatten(-2)
        size *= 2
    return x


def running_top_n(scores: Tensor, *, n: int, BT: int) -> Tensor:
    """The lists of rows whose scores come `BT` blocks at a time.

    Args:
        scores: `[R, NB]`, what each block is worth; infinity forces a block, and a number below 0
            hides it.
        n, BT: powers of two.

    Returns:
        `[R, n]` int32: distinct ids, ascending, then -1. Of equal scores, those with the lower id.
    """
    R, NB = scores.shape
    scores = F.pad(scores, (0, -NB % BT), value=-1)
    best = torch.full((R, n), EMPTY)
    for start in range(0, NB, BT):
        # -- sort the step --
        block = torch.arange(start, start + BT).expand(R, BT)
        step = sort(pack(scores[:, start : start + BT], block))  # [R, BT]
        step = F.pad(step, (0, max(0, n - BT)), value=EMPTY)[:, :n]

        # -- merge --
        best = best_of_two(best, step)

    # -- ids in ascending order --
    ids = unpack(best)[1]  # [R, n]
    ids = ids.masked_fill(ids < 0, NB).sort(-1).values
    return ids.masked_fill(ids == NB, -1).to(torch.int32)


def comparisons(n: int, BT: int) -> int:
    """How many pairs of numbers a row compares in a step: to sort it, and to merge it."""
    stages_of_sort = sum(range(BT.bit_length()))
    return stages_of_sort * BT // 2 + n + (n.bit_length() - 1) * n // 2
