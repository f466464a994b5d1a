"""Tensors at addresses that kernels on a GPU may read 16 bytes at a time.

PyTorch's own tensors begin at such addresses, but a view need not: `x[1:]` of 16-bit numbers begins
two bytes further. Tensor descriptors refuse it, and vector loads fail on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

ALIGNMENT = 16  # bytes


def aligned(x: object) -> object:
    """`x`; of a tensor, or of tensors in a list or tuple, a contiguous copy of what begins at no
    multiple of `ALIGNMENT`."""
    if isinstance(x, Tensor):
        if x.data_ptr() % ALIGNMENT == 0:
            return x
        x = x.contiguous()  # a copy already, unless it was contiguous
        return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
    if type(x) in (list, tuple):
        return type(x)(aligned(item) for item in x)
    return x


@functools.cache
def with_aligned_tensors(function: Callable) -> Callable:
    """`function`, which changes none of its arguments, with `aligned` applied to each."""

    @functools.wraps(function)
    def run(*args: object, **options: object) -> object:
        named = {name: aligned(x) for name, x in options.items()}
        return function(*(aligned(x) for x in args), **named)

    return run
