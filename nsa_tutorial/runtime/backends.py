"""Which implementations each operator has, and which of them runs a call.

A backend's function takes what `ops` prepared (checked tensors, `QueryRows`, one form of block
list); `reference` is differentiable PyTorch, the kernels come chapter by chapter. Here is also what
a kernel needs around it: blocks that fit on chip, and autograd.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.runtime import checks, environment

OPERATORS = {
    "selected_attention": {
        "reference": "nsa_tutorial.sparse.selected_attention:forward",
        "tilelang": "nsa_tutorial.kernels.tilelang_forward:forward",
        "triton": "nsa_tutorial.kernels.triton_forward:forward",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.sparse.sliding_window:forward",
        "tilelang": "nsa_tutorial.kernels.tilelang_forward:sliding_window",
        "triton": "nsa_tutorial.kernels.triton_forward:sliding_window",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.sparse.sliding_window:selection_and_window",
        "tilelang": "nsa_tutorial.kernels.tilelang_forward:selection_and_window",
        "triton": "nsa_tutorial.kernels.triton_forward:selection_and_window",
    },
    "compressed_attention": {"reference": "nsa_tutorial.sparse.compression:compressed_attention"},
    "select_blocks": {"reference": "nsa_tutorial.sparse.block_selection:select_blocks"},
}
CHAPTER_OF = {
    ("compressed_attention", "tilelang"): "14, selection_kernels",
    ("compressed_attention", "triton"): "14, selection_kernels",
    ("select_blocks", "tilelang"): "14, selection_kernels",
    ("select_blocks", "triton"): "14, selection_kernels",
}
# A kernel holds the keys and the values of one block on chip. This many bytes fit on every GPU from
# sm_80 on, with room for the queries; a longer block is walked in equal parts.
LARGEST_KERNEL_TILE = 64 * 1024


def choose(operator: str, backend: str, q: Tensor) -> str:
    """Name the backend that runs `operator` on tensors like `q`; `auto` takes Triton for CUDA
    tensors where it has a kernel.

    The kernels have no backward yet: for queries that require gradients, `auto` takes the
    reference.

    Raises:
        NotImplementedError: naming the chapter with which the backend comes.
        TypeError: for a dtype that no kernel computes.
        BackendUnavailable: one sentence, where the backend cannot run these tensors on this
            machine.
    """
    available = OPERATORS[operator]
    if backend == "auto":
        needs_backward = torch.is_grad_enabled() and q.requires_grad
        is_for_kernels = q.device.type == "cuda" and q.dtype != torch.float64 and not needs_backward
        backend = "triton" if is_for_kernels and "triton" in available else "reference"
    if backend not in available:
        raise NotImplementedError(
            f"{operator}: there is no {backend} backend yet (it comes with chapter "
            f"{CHAPTER_OF[operator, backend]}): "
            f"use backend='reference' or 'auto'"
        )
    if backend != "reference" and q.dtype not in checks.DTYPES:
        raise TypeError(
            f"q: got {checks.describe(q)}, expected float32, float16 or bfloat16 on the "
            f"{backend} backend"
        )
    environment.require(backend, q.device.type, str(q.dtype).removeprefix("torch."))
    return backend


def nearest(operator: str, backend: str, q: Tensor) -> str:
    """`choose`, with the reference in place of a backend that the course has not written yet."""
    try:
        return choose(operator, backend, q)
    except NotImplementedError:
        return choose(operator, "reference", q)


def load(operator: str, backend: str, q: Tensor) -> tuple[str, Callable]:
    """The name and the function of the backend that `choose` names."""
    backend = choose(operator, backend, q)
    module, function = OPERATORS[operator][backend].split(":")
    return backend, getattr(importlib.import_module(module), function)


def split_long_blocks(ids: Tensor, block_size: int, bytes_per_token: int) -> tuple[Tensor, int]:
    """Blocks too long for a kernel's tile, as lists of equal parts: ids `[R, H, S * parts]` and the
    size of a part."""
    most = min(128, LARGEST_KERNEL_TILE // bytes_per_token)
    parts = next(
        p for p in range(1, block_size + 1) if block_size % p == 0 and block_size // p <= most
    )
    if parts == 1:
        return ids, block_size
    # an id this large is past the end of any sequence
    limit = torch.iinfo(torch.int32).max // parts
    part = torch.arange(parts, dtype=ids.dtype, device=ids.device)
    split = torch.where((ids >= 0) & (ids < limit), ids, -1)[..., None] * parts + part
    return split.masked_fill(split < 0, -1).flatten(-2).contiguous(), block_size // parts


class KernelForward(torch.autograd.Function):
    """A kernel's forward under autograd; its backward says that there is none yet."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, operator: str, name: str, launch: Callable
    ) -> tuple[Tensor, ...]:
        """`launch(q, k, v)`: outputs and log-sum-exps."""
        ctx.operator, ctx.backend = operator, name
        return launch(q, k, v)

    @staticmethod
    def backward(ctx, *_):
        """Name the chapter that brings it."""
        raise NotImplementedError(
            f"{ctx.operator}: the {ctx.backend} backend has no backward yet (it comes with "
            "chapter 13, backward_kernels): "
            f"use backend='reference' for gradients"
        )
