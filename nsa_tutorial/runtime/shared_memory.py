"""How much shared memory a program may use, which limits the size of its tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Options = TypeVar("Options", bound=tuple)
SHARED_MEMORY = 227 * 1024  # bytes, on an H100 or H200


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on `device`; for a CPU those of an H100."""
    if device.type != "cuda":
        return SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def first_that_fits(
    choices: Sequence[Options], size: Callable[..., int], shared_memory: int
) -> Options:
    """The first of `choices` that takes no more than `shared_memory` bytes, or the last one, which
    is the smallest. `size(*choice)` is what a choice takes."""
    return next((c for c in choices if size(*c) <= shared_memory), choices[-1])
