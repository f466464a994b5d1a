"""Room around a tensor that a reader's kernel is launched with: a load or store that misses the
tensor by a little hits nothing else, so Python survives and the reader gets a verdict. And memory
that nobody has set, which holds what is left there, unless one asks for NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_tutorial.runtime import environment

ROOM = 1024  # numbers before and behind a tensor


def roomy(x: Tensor, around: float) -> Tensor:
    """A contiguous copy of `x` on this machine's device; in memory, `ROOM` numbers `around` lie
    before it, and as many behind it."""
    memory = x.new_full((2 * ROOM + x.numel(),), around, device=environment.detect().device)
    copy = memory[ROOM : ROOM + x.numel()].view(x.shape)
    return copy.copy_(x)


def is_in_room(x: Tensor) -> bool:
    """Whether room as `roomy` makes it lies around `x`, or around a tensor of the same memory."""
    memory, size = x.untyped_storage(), x.element_size()
    is_behind = x.data_ptr() - memory.data_ptr() == ROOM * size
    return is_behind and memory.nbytes() == (2 * ROOM + x.numel()) * size


@contextlib.contextmanager
def unset_is_nan() -> Iterator[None]:
    """`torch.empty` and the like hold NaN in the block: a result of which a kernel stores only a
    part cannot be right by what an earlier one left in the same memory."""
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
