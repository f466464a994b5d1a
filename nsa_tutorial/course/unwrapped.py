"""The Python function that a reader wrote, inside of what a decorator made of it."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType

# where Triton's kernels, TileLang's and what other decorators make keep the function
_INSIDE = ("__wrapped__", "fn", "func", "orig_func")


def unwrapped(value: object) -> object:
    """The function of a kernel in Triton (`@triton.jit`) or TileLang (`@tilelang.jit`), or of a
    decorated function; any other value, a `functools.partial` among them, as it is."""
    while callable(value) and not isinstance(value, FunctionType | type | functools.partial):
        inside = next((x for name in _INSIDE if callable(x := getattr(value, name, None))), None)
        if inside is None or inside is value:
            return value
        value = inside
    return inspect.unwrap(value) if callable(value) else value
