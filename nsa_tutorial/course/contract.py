"""What the operators' contract asks, asked of a reader's functions.

An exercise's stages lead to a function. Here it is called like an operator of `nsa_tutorial.ops`,
on the contract's own properties: against that operator in fp64, with the contract's error budget.
`contract_twins` says which function is which operator, and how it is called; a function without a
twin has its stages alone. `judge` fills one cell of the table that `make mine` prints, `times`
compares with our kernels on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from nsa_tutorial.course.contract_problems import PROPERTIES, draw
from nsa_tutorial.course.contract_twins import TWINS, Twin
from nsa_tutorial.course.quiet import quiet

ASSETS = Path(__file__).resolve().parents[2] / "assets"
_STORED = ASSETS / "performance_h200.json"
_PAIRS = 20  # of timed calls


def judge(name: str, function: Callable, what: str) -> str | None:
    """What is wrong with a function under one property; empty if it holds, None where the exercise
    does not ask for it.

    Args:
        name: of the exercise, one of `TWINS`.
        function: the reader's.
        what: one of `PROPERTIES`.
    """
    twin = TWINS[name]
    if what not in twin.properties:
        return None
    problem = PROPERTIES[what](**{**dict(twin.sizes), **_own_sizes(what, twin)})
    try:
        with quiet():
            got = twin.call(function, problem)
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    truth, plain = (twin.right(problem, d, "reference") for d in (torch.float64, torch.float32))
    for g, t, near in zip(got, truth, plain, strict=True):
        if why := _difference(g, t, near, twin.is_exact):
            return why
    return ""


def _own_sizes(what: str, twin: Twin) -> dict[str, int]:
    """A property that sets a size itself keeps it."""
    made = PROPERTIES[what]
    fixed = made.keywords if isinstance(made, partial) else {}
    return {name: size for name, size in fixed.items() if name in dict(twin.sizes)}


def _difference(got: Tensor, truth: Tensor, plain: Tensor, is_exact: bool) -> str:
    """In which way a result misses the contract; empty if it keeps it."""
    if not isinstance(got, Tensor) or got.shape != truth.shape:
        return f"shape {list(getattr(got, 'shape', []))}, expected {list(truth.shape)}"
    if is_exact:
        wrong = (got != truth).any(-1).sum().item()
        return f"{wrong} lists differ" if wrong else ""
    finite = truth.isfinite()
    if got.isnan().any():
        return "NaN"
    if not torch.equal(got[~finite].double(), truth[~finite].double()):
        return "finite where the contract asks for -inf"
    error, near = (
        (x.double() - truth)[finite].abs().max().item() if finite.any() else 0.0
        for x in (got, plain)
    )
    allowed = 2 * near + 1e-6
    return f"error {error:.1e}, allowed {allowed:.1e}" if error > allowed else ""


# -- on a GPU --


def times(name: str, function: Callable, tokens: int = 8192) -> tuple[float, float]:
    """Milliseconds of a reader's function and of our Triton backend on the same fp32 tensors, 4 KV
    heads of 16 query heads, `D = DV = 128`, 16 blocks of 64: medians of calls taken in turns."""
    twin = TWINS[name]
    problem = draw(tokens, tokens, H=4, G=16, D=128, DV=128, S=16, BS=64, device="cuda")
    calls = (
        lambda: twin.call(function, problem),
        lambda: twin.right(problem, torch.float32, "triton"),
    )
    taken: tuple[list[float], list[float]] = ([], [])
    with compiling_for_the_gpu(function):
        for call in calls:
            call()
        for _ in range(_PAIRS):
            for call, found in zip(calls, taken, strict=True):
                found.append(_elapsed(call))
    return statistics.median(taken[0]), statistics.median(taken[1])


@contextlib.contextmanager
def compiling_for_the_gpu(function: Callable) -> Iterator[None]:
    """Chapter 10 compiles its kernels for the CPU, by `compile_for_cpu`. Within this context, a
    function of such a module has them compiled for the GPU."""
    names = getattr(function, "__globals__", {})
    if "compile_for_cpu" not in names:
        yield
        return
    caches = [x for x in names.values() if hasattr(x, "cache_clear")]
    compile_for = importlib.import_module("tilelang").compile
    with mock.patch.dict(names, compile_for_cpu=lambda kernel: compile_for(kernel, target="cuda")):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def _elapsed(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def stored() -> list[str]:
    """What was recorded of public kernels and of ours on one problem, a line each with all that it
    belongs to."""
    recorded = json.loads(_STORED.read_text(encoding="utf-8"))
    lines = []
    for row in recorded["rows"]:
        is_one = row["kernel"].startswith("dense") or (
            row["kernel"] == "triton" and row["lists"] == "random" and not row["order"]
        )
        sizes = (row["tokens"], row["group"], row["direction"], row["change"])
        if is_one and sizes == (65_536, 16, "forward", ""):
            lines.append(
                f"{row['ms']:8.1f} ms  {_KERNELS.get(row['kernel'], row['kernel'])}, "
                f"{row['tokens']:,} tokens, {row['kv_heads']} KV heads of {row['group']}, "
                f"{row['dtype']}, {recorded['machine']}"
            )
    return lines


_KERNELS = {
    "triton": "ours, 16 random blocks of 64 a query",
    "dense, flash": "FlashAttention, every visible key",
    "dense, cuDNN": "cuDNN, every visible key",
}
