"""Tensors taken apart by KV head and by call, and put together again, without a copy more than
needed: slices of PyTorch's each make a whole gradient, most of it zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, heads: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.heads, ctx.sizes = x.shape, heads, sizes
        ctx.set_materialize_grads(False)
        # kernels read contiguous queries, and one copy serves them all
        return tuple(view.contiguous() for view in views(x, heads, sizes))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        given = next(g for g in gradients if g is not None)
        total = given.new_empty(ctx.shape)
        for view, gradient in zip(views(total, ctx.heads, ctx.sizes), gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        return total, None, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads: int, sizes: Sequence[int], *parts: Tensor) -> Tensor:
        ctx.heads, ctx.sizes = heads, sizes
        B, _, G, *rest = parts[0].shape
        whole = parts[0].new_empty(B, sum(sizes), heads * G, *rest)
        for view, part in zip(views(whole, heads, sizes), parts, strict=True):
            view.copy_(part)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return None, None, *views(gradient, ctx.heads, ctx.sizes)


def views(x: Tensor, heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """`x [B, n, heads * G, …]` as views `[B, size, G, …]`, of each head, of each call."""
    by_head = x.unflatten(2, (heads, x.shape[2] // heads)).unbind(2)
    return [part for head in by_head for part in head.split(list(sizes), 1)]


def apart(x: Tensor | None, heads: int, sizes: Sequence[int]) -> list[list[Tensor | None]]:
    """`views`, with a gradient, as a list for each head."""
    if x is None:
        return [[None] * len(sizes)] * heads
    found = _Apart.apply(x, heads, sizes)
    return [list(found[h * len(sizes) : (h + 1) * len(sizes)]) for h in range(heads)]


def together(parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
    """The inverse of `apart`: `[B, n, heads * G, …]`."""
    return _Together.apply(len(parts), sizes, *(part for head in parts for part in head))
