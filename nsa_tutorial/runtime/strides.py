"""Operators return tensors with the strides of new tensors, because their fake kernels promise that
and a compiled model relies on it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor


@functools.lru_cache(4096)
def of_new(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `torch.empty(shape)`."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def like_new(x: Tensor) -> Tensor:
    """`x` with the strides of a new tensor, copied only if it has others. `x.contiguous()` is not
    enough: in a dimension of one element, any stride counts as contiguous, so it keeps that of the
    tensor from which `x` was cut."""
    return x if x.stride() == of_new(x.shape) else x.new_empty(x.shape).copy_(x)


def with_new_strides(function: Callable) -> Callable:
    """`function`, with `like_new` applied to each tensor that it returns."""

    @functools.wraps(function)
    def run(*args: object, **options: object) -> Tensor | tuple[Tensor, ...] | list[Tensor]:
        found = function(*args, **options)
        if isinstance(found, Tensor):
            return like_new(found)
        return (list if isinstance(found, list) else tuple)(like_new(x) for x in found)

    return run
