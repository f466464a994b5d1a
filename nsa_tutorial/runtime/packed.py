"""What the host needs to know about packed sequences: their offsets, read from the device once.

`cu_seqlens` lies on the device, and every operator that takes it needs facts that only its values
tell: whether they are right, and how many summaries the sequences have. To read them the host waits
for the device. Here it does so once for a tensor that PyTorch has not changed since: the layers of
a model share one.

A change that PyTorch does not count goes unseen: a write through `.data`, from NumPy, from a kernel
of one's own, or a replayed CUDA graph. To see it the host would have to wait in every call. Give
such offsets a new tensor, `cu_seqlens.clone()`. On the CPU they are read in every call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Offsets(NamedTuple):
    """The values of `cu_seqlens`, and whether they never decrease."""

    values: tuple[int, ...]
    rise: bool

    @property
    def lengths(self) -> list[int]:
        """Of each sequence, in tokens."""
        return [b - a for a, b in pairwise(self.values)]


# offsets on a device: the version of the tensor that was read, where it lay, and what it held
_KNOWN = WeakIdKeyDictionary()


def offsets(cu_seqlens: Tensor) -> Offsets:
    """Read `cu_seqlens`; the host waits for the device the first time, and again once the tensor
    has changed in place or lies elsewhere."""
    # a tensor of inference mode has no version
    remember = not cu_seqlens.is_cpu and not cu_seqlens.is_inference()
    state = (cu_seqlens._version, cu_seqlens.data_ptr()) if remember else None
    before, known = _KNOWN.get(cu_seqlens, (None, None)) if remember else (None, None)
    if known is not None and before == state:
        return known
    values = tuple(cu_seqlens.tolist())
    found = Offsets(values, all(a <= b for a, b in pairwise(values)))
    if remember:
        _KNOWN[cu_seqlens] = (state, found)
    return found
