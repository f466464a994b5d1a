"""Gradients of every operator on every backend, against fp64: the error budget of the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from branches import Shape
from places import product, skip_unless_runs
from selection import Problem
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.selected_attention import masked_attention

BACKENDS = ["reference", "tilelang", "triton"]
# queries, keys and values to outputs and log-sum-exps; their gradients; the masks they follow
Case = tuple[Callable, list[Tensor], list[Tensor]]


def lists(problem: Problem) -> Callable[..., Case]:
    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        call = problem.make(dtype, device)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return call.having(**dict(zip("qkv", tensors, strict=True))).run(backend)

        return run, [call.q, call.k, call.v], [call.mask()]

    return make


def window(shape: Shape) -> Callable[..., Case]:
    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        options = {"window_size": shape.window}

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return ops.sliding_window_attention(
                *tensors, **options, return_lse=True, backend=backend
            )

        mask = shape.over_heads(shape.seen_keys(shape.window)).to(device)
        return run, [x.to(device) for x in shape.make(dtype)], [mask]

    return make


def both(problem: Problem, window_size: int) -> Callable[..., Case]:
    """Two outputs at once, each with a gradient of its own."""

    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        call = problem.make(dtype, device)
        options = {"block_size": problem.BS, "window_size": window_size, "return_lse": True}

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return ops.selected_and_window_attention(*tensors, call.ids, **options, backend=backend)

        shape = Shape(
            B=problem.B, N=problem.N, M=problem.M, H=problem.H, G=problem.G, window=window_size
        )
        seen = shape.over_heads(shape.seen_keys(window_size)).to(device)
        return run, [call.q, call.k, call.v], [call.mask(), seen]

    return make


CASES = {
    "two KV heads, ragged tail": lists(Problem(N=20, M=37, D=16, DV=24)),
    "own block, counts": lists(Problem(N=20, M=37, own=True, counts="random")),
    "packed": lists(Problem(N=35, M=35, cu=(0, 7, 7, 18, 35), own=True)),
    "not causal": lists(Problem(N=9, M=37, causal=False)),
    "group of one": lists(Problem(N=20, M=20, G=1)),
    "decoding": lists(Problem(B=2, N=1, M=37)),
    "window": window(Shape(N=20, M=37, window=7)),
    "window over tiles": window(Shape(N=140, M=140, window=30)),
    "list and window": both(Problem(N=20, M=37), 7),
}
QUICK = {
    torch.float32: [*CASES],
    torch.float16: ["own block, counts", "window", "list and window"],
    torch.bfloat16: ["own block, counts", "list and window"],
}


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Of a loss in which every output and log-sum-exp has a weight of its own; empty rows are left
    out."""
    g = torch.Generator().manual_seed(3)
    loss = 0
    for x in outputs:
        weight = torch.randn(x.shape, generator=g).to(x.device, x.dtype)
        loss = loss + (x.masked_fill(x == -torch.inf, 0) * weight).double().sum()
    return list(torch.autograd.grad(loss, inputs))


@product("case", CASES, BACKENDS, QUICK)
def test_error_budget(
    case: Callable[..., Case], dtype: torch.dtype, backend: str, device: str
) -> None:
    """At most twice the error of plain PyTorch in the same dtype, plus a millionth of the largest
    gradient."""
    skip_unless_runs(backend, device, dtype)
    run, tensors, masks = case(dtype, device, backend)

    def plain(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x for mask in masks for x in masked_attention(*tensors, mask))

    truth, naive, ours = (
        (f, [x.detach().to(kind).requires_grad_() for x in tensors])
        for f, kind in ((plain, torch.float64), (plain, dtype), (lambda x: run(*x), dtype))
    )
    right, rough, found = (gradients(f(x), x) for f, x in (truth, naive, ours))
    for name, a, b, c in zip("qkv", right, rough, found, strict=True):
        assert c.dtype == dtype
        budget = 2 * (b.double() - a).abs().max() + 1e-6 * a.abs().max() + 1e-6
        error = (c.double() - a).abs().max()
        assert error <= budget, f"gradient of {name}: {error:.2e} over {budget:.2e}"


@pytest.mark.parametrize("M", [20, 3], ids=["summaries", "none"])
def test_gradients_of_summaries(M: int) -> None:
    """Through the attention to them, and through the weights that make them."""
    g = torch.Generator().manual_seed(0)
    q, x = torch.randn(1, M, 4, 5, generator=g).double(), torch.randn(1, M, 2, 5, generator=g)
    weight = torch.randn(4, 2, generator=g).double().requires_grad_()
    inputs = [q.requires_grad_(), x.double().requires_grad_(), weight]

    def outputs(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        sizes = {"length": 4, "stride": 3}
        k = ops.compress(x, kind="weighted", weight=weight, **sizes)
        v = ops.compress(x, **sizes)
        o, lse = ops.compressed_attention(q, k, v, **sizes, return_lse=True)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_a_row_that_no_loss_asks_for_adds_nothing() -> None:
    """A padded row may hold anything: its gradient is 0, and 0 * NaN is not."""
    shape = Shape(N=6, M=6, window=3)
    q, k, v = (x.requires_grad_() for x in shape.make())
    spoiled = q.detach().clone()
    spoiled[:, 4:] = torch.nan
    spoiled.requires_grad_()
    right = torch.autograd.grad(
        ops.sliding_window_attention(q, k, v, window_size=3)[:, :4].sum(), (k, v)
    )
    found = torch.autograd.grad(
        ops.sliding_window_attention(spoiled, k, v, window_size=3)[:, :4].sum(), (k, v)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
