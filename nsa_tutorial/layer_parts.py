"""What the layer is made of beside its projections: the rotary embedding of queries and keys, the
sets of keys and values that its branches get, and the compression that learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nsa_tutorial import library_rotary, ops
from nsa_tutorial.runtime import checks
from nsa_tutorial.runtime.transforms import is_transformed
from nsa_tutorial.sparse.compression import MLPWeights
from nsa_tutorial.sparse.native_sparse_attention import wide

if TYPE_CHECKING:
    from nsa_tutorial.training.many_gpus.operators import Share


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864): turn the pairs `(i, i + D / 2)` of
    `x [B, N, H, D]` by `position [N]` or `[B, N]`."""
    half = x.shape[-1] // 2
    # [D / 2], in radians per token
    frequency = base ** (-torch.arange(half, device=x.device, dtype=wide(x)) / half)
    angle = (position[..., None] * frequency)[..., None, :]  # [(B,) N, 1, D / 2]
    a, b = x.to(angle.dtype).split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(
        x.dtype
    )


def turned_sets(
    tensors: Sequence[Tensor], sets: Sequence[int], position: Tensor | None, base: float | None,
    backend: str = "auto", num_turned: int = 2,
) -> list[Sequence[Tensor]]:  # fmt: skip
    """Each of the tensors `[B, N, S * H, D]`, cut into its `S` of `sets`, `[B, N, H, D]` each.

    Args:
        tensors: queries, keys, and what is not turned.
        sets: how many sets of heads each of them holds, one to three.
        position, base: the first `num_turned` of the tensors are turned as by `rotate`. Without
            positions, tokens count from 0; without a base, nothing is turned.
        backend: on Triton, one launch for each tensor turns it and writes its sets, each to a
            tensor of its own; elsewhere PyTorch turns it, and sets are views.
    """
    num_turned = 0 if base is None else num_turned
    # transforms of functions and forward-mode AD do not see into an operator
    is_plain = is_transformed() or forward_ad._current_level >= 0
    if is_plain or checks.choose_backend(backend, tensors[0]) != "triton":
        if num_turned and position is None:
            position = torch.arange(tensors[0].shape[1], device=tensors[0].device)
        turned = [rotate(x, position, base) for x in tensors[:num_turned]]
        pairs = zip([*turned, *tensors[num_turned:]], sets, strict=True)
        # a split into one is left out: its gradient would be a copy
        return [[x] if num == 1 else x.split(x.shape[2] // num, 2) for x, num in pairs]

    changed = [i for i, num in enumerate(sets) if i < num_turned or num > 1]
    given, of_given = [tensors[i] for i in changed], [sets[i] for i in changed]
    options = (position, 1.0 if base is None else base, num_turned, of_given, "triton")
    found = iter(library_rotary.turned_sets(given, *options) if changed else ())
    return [
        [next(found) for _ in range(num)] if i in changed else [tensors[i]]
        for i, num in enumerate(sets)
    ]


class Compression(nn.Module):
    """`ops.compress` with the weights it learns; "weighted" and "linear" begin as the mean."""

    def __init__(
        self, kind: str, length: int, stride: int, heads: int, width: int, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.kind, self.length, self.stride, self.backend = kind, length, stride, backend
        flat, hidden = length * width, 4 * width
        initial = {
            "mean": {},
            "weighted": {"weight": torch.full((length, heads), 1 / length)},
            "linear": {"weight": torch.eye(width).repeat(length, 1) / length},
            "mlp": {
                "position": torch.randn(length, width) * 0.02,
                "w1": torch.randn(flat, hidden) * flat**-0.5,
                "b1": torch.zeros(hidden),
                "w2": torch.randn(hidden, width) * hidden**-0.5,
                "b2": torch.zeros(width),
            },
        }[kind]
        self.weights = nn.ParameterDict(initial)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, share: Share | None = None
    ) -> Tensor:
        """`[B, M, H, D]` to `[B, M_c, H, D]`; over several ranks, those of a `share`."""
        weight = self.weights.get("weight", None)
        if self.kind == "mlp":
            weight = MLPWeights(*(self.weights[name] for name in MLPWeights._fields))
        options = {"kind": self.kind, "length": self.length, "stride": self.stride,
                   "weight": weight, "backend": self.backend}  # fmt: skip
        if share is not None:
            return share.compress(x, **options)
        return ops.compress(x, cu_seqlens=cu_seqlens, **options)
