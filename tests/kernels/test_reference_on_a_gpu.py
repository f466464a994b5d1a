"""The PyTorch operators of the branches on a CUDA device: within the contract's error budget, and
with the gradients of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from branches import Shape, assert_attention
from torch import Tensor

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops

pytestmark = pytest.mark.gpu

SHAPES = {
    "nothing divides anything": Shape(B=2, N=60, M=60, BS=8),
    "more keys than queries": Shape(B=2, N=9, M=60, BS=8),
    "packed": Shape(N=80, M=80, BS=4, cu=(0, 7, 7, 12, 80)),
    "several tiles of queries": Shape(N=300, M=333, H=3, G=2),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d).split(".")[-1]
)


def windows(shape: Shape, device: str) -> dict:
    cu = None if shape.cu is None else shape.offsets.to(device)
    return {"length": shape.length, "stride": shape.stride, "cu_seqlens": cu}


@shapes
@dtypes
def test_the_window(dtype: torch.dtype, shape: Shape) -> None:
    q, k, v = (x.cuda() for x in shape.make(dtype))
    o, lse = ops.sliding_window_attention(
        q,
        k,
        v,
        window_size=shape.window,
        cu_seqlens=windows(shape, "cuda")["cu_seqlens"],
        return_lse=True,
        backend="reference",
    )
    assert_attention(o, lse, q, k, v, shape.over_heads(shape.seen_keys(shape.window)).cuda())


@shapes
@dtypes
def test_the_compressed_branch(dtype: torch.dtype, shape: Shape) -> None:
    q, k, v = (x.cuda() for x in shape.make(dtype))
    options = windows(shape, "cuda")
    k_cmp, v_cmp = (ops.compress(x, **options) for x in (k, v))
    o, lse = ops.compressed_attention(
        q, k_cmp, v_cmp, num_keys=shape.M, return_lse=True, backend="reference", **options
    )
    assert_attention(o, lse, q, k_cmp, v_cmp, shape.over_heads(shape.seen_summaries()).cuda())


@shapes
def test_the_choice_is_that_of_the_cpu(shape: Shape) -> None:
    """In fp64, so that no rounding turns two blocks of nearly equal importance around."""
    chosen = []
    for device in ("cpu", "cuda"):
        q, k, _ = (x.to(device) for x in shape.make(torch.float64))
        options = windows(shape, device)
        k_cmp = ops.compress(k, **options)
        choice = {"top_n": 4, "block_size": shape.BS, "num_keys": shape.M, "backend": "reference"}
        chosen.append(ops.select_blocks(q, k_cmp, **choice, **options))
    assert chosen[1].is_cuda
    assert torch.equal(chosen[0], chosen[1].cpu())


def on_both(call: Callable[[str], list[Tensor]]) -> None:
    for here, there in zip(call("cpu"), call("cuda"), strict=True):
        assert there.is_cuda
        assert torch.allclose(here, there.cpu(), rtol=1e-9, atol=1e-11)


@shapes
def test_all_of_it_with_gradients(shape: Shape) -> None:
    def call(device: str) -> list[Tensor]:
        inputs = [x.to(device).requires_grad_() for x in shape.make(torch.float64)]
        generator = torch.Generator().manual_seed(1)
        gates = [
            torch.rand(shape.B, shape.N, shape.H * shape.G, generator=generator).double().to(device)
            for _ in range(3)
        ]
        options = {
            "block_counts": 4,
            "block_size": shape.BS,
            "window_size": shape.window,
            "backend": "reference",
        }
        o = ops.native_sparse_attention(*inputs, *gates, **options, **windows(shape, device))
        return [o, *torch.autograd.grad(o.square().sum(), inputs)]

    on_both(call)


def test_the_layer() -> None:
    def call(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        config = NativeSparseAttentionConfig(
            48,
            6,
            2,
            key_width=8,
            value_width=12,
            block_size=8,
            top_n=3,
            window_size=5,
            length=6,
            stride=3,
            backend="reference",
        )
        layer = NativeSparseAttention(config).double().to(device)
        x = torch.randn(
            2, 50, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(device)
        o = layer(x)
        return [o, *torch.autograd.grad(o.square().sum(), list(layer.parameters()))]

    on_both(call)
