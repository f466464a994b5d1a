"""Room around a tensor that a reader's kernel is launched with: a load or store that misses the
tensor by a little hits nothing else, so Python survives and the reader gets a verdict."""

from __future__ import annotations

from torch import Tensor

from nsa_tutorial.runtime import environment

ROOM = 1024  # numbers before and behind a tensor


def roomy(x: Tensor, around: float) -> Tensor:
    """A contiguous copy of `x` on this machine's device; in memory, `ROOM` numbers `around` lie
    before it, and as many behind it."""
    memory = x.new_full((2 * ROOM + x.numel(),), around, device=environment.detect().device)
    copy = memory[ROOM : ROOM + x.numel()].view(x.shape)
    return copy.copy_(x)
