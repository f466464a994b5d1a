"""Lists of random sizes and options, forward and backward, through each of Triton's orders: on a
GPU 500 of them, on the CPU a few. And 24 random shapes through TileLang on a GPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import test_gradients
import torch
from places import DTYPES, skip_unless_runs
from selection import Problem

from nsa_tutorial.runtime.order import ORDERS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
SHAPES, RUN = 500, 25
SIZES = 16  # that kernels are compiled for: heads, widths and blocks, drawn once


def sizes_of(seed: int) -> dict[str, int]:
    """Of the heads of a group, of widths and of blocks."""
    draw = random.Random(f"sizes {seed}")
    return {
        "G": draw.choice((1, 3, 4, 16)), "D": draw.choice((16, 24, 32)),
        "DV": draw.choice((16, 32, 40)), "BS": draw.choice((5, 16, 24)),
    }  # fmt: skip


def problem_of(seed: int, longest: int) -> Problem:
    """The `seed`-th problem, of `longest` queries at most."""
    draw = random.Random(seed)
    N = draw.randint(1, longest)
    B, M, cu, kind = draw.choice((1, 1, 2)), N, None, draw.random()
    if kind < 0.3:
        cuts = sorted(draw.randint(0, N) for _ in range(draw.randint(1, 4)))
        B, cu = 1, (0, *cuts, N)
    elif kind < 0.6:
        M = N + draw.randint(0, longest)
    return Problem(
        B=B, N=N, M=M, cu=cu, **sizes_of(draw.randrange(SIZES)), H=draw.choice((1, 2)),
        S=draw.choice((1, 3, 4)), own=draw.random() < 0.4,
        counts=draw.choice((None, "random", 2)), causal=draw.random() < 0.8,
        factors=draw.random() < 0.1, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [8, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_on_the_cpu(seed: int, order: str) -> None:
    judge(problem_of(seed, longest=12), order, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", range(0, SHAPES, RUN))
def test_on_a_gpu(first: int, order: str) -> None:
    for seed in range(first, first + RUN):
        judge(problem_of(seed, longest=150), order, "cuda", DTYPES[seed % len(DTYPES)])


# -- TileLang, which compiles kernels for each shape: any group and any widths --

GROUPS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64)
WIDTHS = range(8, 257, 8)


def wide_problem_of(seed: int) -> Problem:
    """Any group, any widths; the first one found no layout for its keys' gradients once."""
    draw = random.Random(f"wide {seed}")
    sizes = {"G": draw.choice(GROUPS), "D": draw.choice(WIDTHS), "DV": draw.choice(WIDTHS)}
    if seed == 0:
        sizes = {"G": 1, "D": 80, "DV": 256}
    return Problem(N=60, M=170, **sizes, BS=draw.choice((64, 64, 40, 24, 16)), own=True, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_tilelang_on_a_gpu(seed: int) -> None:
    dtype = (torch.float16, torch.bfloat16, torch.float16, torch.float32)[seed % 4]
    judge(wide_problem_of(seed), "tilelang", "cuda", dtype)


def judge(problem: Problem, order: str, device: str, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients within the error budget, and four roundings of the largest
    number (2e-6 of it in fp32). Where a problem has a handful of numbers, PyTorch's may be exact by
    chance."""
    skip_unless_runs(order, device, dtype)
    call = problem.make(dtype, device)
    case = test_gradients.lists(problem)(dtype, device, order)
    found = [*call.run(order), *test_gradients.of_inputs(case.run, case.inputs, dtype)]
    right, rough = (
        [*outputs, *test_gradients.of_inputs(case.dense, case.inputs, to)]
        for outputs, to in ((call.truth(), torch.float64), (call.plain(), dtype))
    )
    names = ("o", "lse", *(f"gradient of {name}" for name in case.inputs))
    for name, a, b, c in zip(names, right, rough, found, strict=True):
        seen = a.isfinite()
        assert torch.equal(c.isfinite(), seen), f"{problem}: {name} is finite elsewhere"
        if seen.any():
            rounding = max(4 * torch.finfo(dtype).eps, 2e-6) * max(1.0, a[seen].abs().max().item())
            budget = 2 * (b.double() - a)[seen].abs().max().item() + rounding
            error = (c.double() - a)[seen].abs().max().item()
            assert error <= budget, f"{problem}: {name}: {error:.2e} over {budget:.2e}"


def test_the_shapes_differ_in_everything() -> None:
    """Packed and not, with empty sequences, with fewer queries than keys, each option on and
    off."""
    problems = [problem_of(seed, 150) for seed in range(SHAPES)]
    assert {p.cu is None for p in problems} == {True, False}
    assert any(p.cu and any(a == b for a, b in pairwise(p.cu)) for p in problems)
    assert {p.M > p.N for p in problems} == {True, False}
    for option in ("B", "H", "G", "D", "DV", "S", "BS", "own", "counts", "causal", "factors"):
        assert len({getattr(p, option) for p in problems}) > 1, option
