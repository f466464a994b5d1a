"""`key_runs.in_registers`: a tile is what it was, and on Hopper a product takes it from there."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
import triton
import triton.language as tl
from places import skip_unless_runs

from nsa_tutorial.kernels.triton import launch_options
from nsa_tutorial.kernels.triton.key_runs import in_registers
from nsa_tutorial.kernels.triton.selected import backward_ahead
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY


@triton.jit
def kernel(X, Y, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)
    tl.store(Y + place, in_registers(tl.load(X + place)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [
        (torch.bfloat16, 64, 128), (torch.float16, 16, 16), (torch.bfloat16, 128, 64),
        (torch.float16, 64, 256), (torch.float32, 32, 128),
    ],
)  # fmt: skip
def test_a_tile_stays_what_it_is(dtype: torch.dtype, rows: int, width: int, device: str) -> None:
    """Numbers that are not finite, too, and none of its neighbours."""
    skip_unless_runs("triton", device, dtype)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[3, 5], x[4, 0], x[rows - 1, width - 1] = float("nan"), float("inf"), -float("inf")
    y = torch.empty_like(x)
    kernel[(1,)](x, y, ROWS=rows, WIDTH=width)
    torch.testing.assert_close(y, x, atol=0, rtol=0, equal_nan=True)


TRITON = "nsa_tutorial.kernels.triton"
FLOATS = ("LSE", "Delta", "LSE2", "SharesK", "SharesV")
HALF = ("Q", "K", "V", "GradO", "GradQ", "GradK", "GradV")
SCALARS = ("scale", "scale_log2")
SIDES = {"G": 16, "D": 128, "DV": 128, "DT": 128, "DVT": 128}


def products(module: str, function: str, options: dict[str, int], **constants: object) -> tuple:
    """A request for a kernel of that module, with tiles from `options`."""
    kernel = getattr(importlib.import_module(f"{TRITON}.{module}"), function)
    types = {name: "*i32" for name in kernel.arg_names if name[0].isupper() and len(name) > 1}
    types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(HALF, "*bf16")
    types |= dict.fromkeys(SCALARS, "fp32")
    how = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    sides = {name: x for name, x in SIDES.items() if name in kernel.arg_names}
    constants = sides | options | constants
    return lowering.request(f"{TRITON}.{module}:{function}", constants, types, **how)


@pytest.mark.exhaustive
@pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed")
def test_left_factors_come_from_registers() -> None:
    """On Hopper: all of the queries' kernels, and of the others those that are not a key."""
    memory = (2, SHARED_MEMORY)
    summaries = launch_options.summary_dkv_options(128, 128, *memory)
    asked = {
        "compressed dq": products(
            "compressed.backward", "dq_kernel",
            launch_options.summary_dq_options(128, 128, *memory), ADD=False,
        ),
        "window dq": products(
            "window.backward", "dq_kernel",
            launch_options.window_dq_options(16, 128, 128, *memory), ADD=True,
        ),
        "compressed dkv": products("compressed.backward", "dkv_kernel", summaries, EDGE=64),
        "ahead": products(
            "selected.backward_ahead", "dkv_kernel", dict(backward_ahead.OPTIONS),
            BS=64, WIDE=False, EDGE=64,
        ),
    }  # fmt: skip
    found = {}
    for name, stages in zip(asked, lowering.all_stages([*asked.values()]), strict=True):
        written = re.findall(r"wgmma\.mma_async[^;]*;", stages["ptx"])
        from_registers = sum(bool(re.search(r"\}\s*,\s*\{", x)) for x in written)
        found[name] = from_registers / len(written)
    assert found["compressed dq"] == found["window dq"] == 1
    # a walk has as many instructions for the weights, whose left factors are keys
    assert found["compressed dkv"] > 0.5 and found["ahead"] > 0.5, found
