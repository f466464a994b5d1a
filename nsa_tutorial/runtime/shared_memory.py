"""How much shared memory a program may use, which limits the size of its tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Options = TypeVar("Options", bound=tuple)
SHARED_MEMORY = 227 * 1024  # bytes, on an H100 or H200


_withheld: dict[torch.device, int] = {}


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that the tiles of a program may take on `device`; for a CPU those of
    an H100."""
    if device.type != "cuda":
        return SHARED_MEMORY - withheld(device)
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin - withheld(device)


def withheld(device: torch.device) -> int:
    """Bytes that a program may have on `device`, and that no tile is given; 0 at first."""
    return _withheld.get(device, 0)


def withhold(device: torch.device, num_bytes: int) -> None:
    """Give tiles on `device` `num_bytes` less than a program may have there."""
    _withheld[device] = num_bytes
    shared_memory.cache_clear()


def first_that_fits(
    choices: Sequence[Options], size: Callable[..., int], shared_memory: int
) -> Options:
    """The first of `choices` that takes no more than `shared_memory` bytes, or the last one, which
    is the smallest. `size(*choice)` is what a choice takes."""
    return next((c for c in choices if size(*c) <= shared_memory), choices[-1])
