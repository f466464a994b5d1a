"""Where a kernel's tests run: a lane is a backend on a device, and CUDA lanes carry the mark `gpu`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from nsa_tutorial import environment

dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.float32, torch.float16, torch.bfloat16)]
)


def lanes_of(backends: Sequence[str]) -> pytest.MarkDecorator:
    """A test's `backend` and `device`: each backend on the CPU, then each on CUDA."""
    on_cpu = [pytest.param(b, "cpu", id=f"{b}-cpu") for b in backends]
    return pytest.mark.parametrize(
        ("backend", "device"), on_cpu + [pytest.param(b, "cuda", id=f"{b}-cuda", marks=pytest.mark.gpu) for b in backends]
    )


def skip_unless_runs(backend: str, device: str, dtype: torch.dtype = torch.float32) -> None:
    reason = environment.detect().why_not(backend, device, str(dtype).removeprefix("torch."))
    if reason is not None:
        pytest.skip(reason)
