"""Run on the device of the tensors, whichever device is current.

CUDA keeps one current device for each thread. A kernel that is launched while another device is
current cannot reach its tensors, or runs there. PyTorch's own operators make their tensors' device
current while they run; `on_its_device` does the same for a function of ours. The device's current
stream comes with it. Autocast applies to an operator's inputs only, so it is off inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nsa_tutorial.runtime.checks import DTYPES


def guard(x: Tensor) -> AbstractContextManager:
    """Make the CUDA device of `x` current inside the `with` block. Does nothing for other
    devices."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _without_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast casts an operator's inputs; inside the operator, fp32 means fp32."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values in the dtype of `torch.autocast`, where it is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    is_cast = [isinstance(x, Tensor) and x.dtype in DTYPES for x in tensors]
    return [x.to(dtype) if cast else x for x, cast in zip(tensors, is_cast, strict=True)]


def on_its_device(function: Callable) -> Callable:
    """`function`, run on the device of its first tensor, which may be the first of a list."""

    @functools.wraps(function)
    def run(*args: Tensor | Sequence[Tensor] | object, **options: object) -> object:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        with guard(first), _without_autocast(first):
            return function(*args, **options)

    return run


@functools.cache
def kind_of(device: torch.device) -> str:
    """What a kernel is compiled for, the same string for devices of a kind: `"cpu"`, or
    `"cuda sm_90"` and the like."""
    if device.type != "cuda":
        return device.type
    return "cuda sm_{}{}".format(*capability(device))


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device, which the driver takes microseconds to tell."""
    return torch.cuda.get_device_capability(device)
