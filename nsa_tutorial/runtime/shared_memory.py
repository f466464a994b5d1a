"""How much shared memory a program may use, which limits the size of its tiles."""

from __future__ import annotations

import functools

import torch

SHARED_MEMORY = 227 * 1024  # bytes, on an H100 or H200


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on `device`; for a CPU those of an H100."""
    if device.type != "cuda":
        return SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
