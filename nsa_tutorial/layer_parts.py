"""What the layer is made of beside its projections: the rotary embedding of queries and keys, and
the compression that learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nsa_tutorial import ops
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
