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

from nsa_tutorial.runtime.describing import offsets as short


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


def check_offsets(cu_seqlens: Tensor | None, N: int) -> None:
    """The values of `cu_seqlens` rise from 0 to `N`. Reading them makes the host wait for the
    device, once per tensor (`offsets`)."""
    if cu_seqlens is None:
        return
    found = offsets(cu_seqlens)
    values = found.values
    if len(values) < 2 or values[0] != 0:
        fault = f"{short(values)}, expected at least two offsets, the first 0"
    elif values[-1] != N:
        fault = f"a last offset of {values[-1]}, expected the number of positions, {N}"
    elif not found.rise:
        fault = f"{short(values)}, expected offsets that never decrease"
    else:
        return
    read_once = "" if cu_seqlens.is_cpu else (
        "; these were read when the tensor was first used: after a write through .data, pass a "
        "new tensor"
    )  # fmt: skip
    raise ValueError(f"cu_seqlens: got {fault}{read_once}")
