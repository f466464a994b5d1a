"""The inputs on which a reader's functions meet the operators' contract: one problem for each
property."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.selected_attention import dense_mask


@dataclass(frozen=True)
class Problem:
    """One call of an operator, `B = 1`.

    Attributes:
        q, k, v: `[1, N, HQ, D]`, `[1, M, H, D]`, `[1, M, H, DV]`, fp32.
        ids: `[1, N, H, S]` int32.
        block_size: tokens per block.
        cu_seqlens: offsets of packed sequences; None for one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    block_size: int
    cu_seqlens: Tensor | None = None

    @property
    def scale(self) -> float:
        """The default of the operators."""
        return self.q.shape[-1] ** -0.5

    def attend(self, dtype: torch.dtype, backend: str = "reference") -> tuple[Tensor, Tensor]:
        """`o` and `lse` of `ops.selected_attention`, computed in `dtype`."""
        tensors = (x.to(dtype) for x in (self.q, self.k, self.v))
        options = {"block_size": self.block_size, "cu_seqlens": self.cu_seqlens}
        return ops.selected_attention(
            *tensors, self.ids, **options, return_lse=True, backend=backend
        )

    @property
    def d_o(self) -> Tensor:
        """A gradient of the output, `[1, N, HQ, DV]`; always the same."""
        shape = (*self.q.shape[:3], self.v.shape[3])
        return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(self.q.device)


def draw(
    N: int = 6, M: int = 48, *, H: int = 2, G: int = 2, D: int = 16, DV: int = 32, S: int = 3,
    BS: int = 16, seed: int = 0, device: str = "cpu",
) -> Problem:  # fmt: skip
    """A random problem: the last `N` queries of `M` positions, each with its own block and others
    of its past."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, h, w, generator=g) for n, h, w in ((N, H * G, D), (M, H, D), (M, H, DV))
    )
    own = torch.arange(M - N, M) // BS
    rank = torch.rand(N, H, -(-M // BS), generator=g)
    block = torch.arange(rank.shape[-1])
    rank = rank.masked_fill(block > own[:, None, None], -1)
    rank = rank.masked_fill(block == own[:, None, None], 2)
    best, ids = rank.topk(min(S, len(block)), -1)
    ids = ids.masked_fill(best < 0, -1).to(torch.int32)[None]
    return Problem(*(x.to(device) for x in (q, k, v, ids)), BS)


def _empty_slots(**sizes: int) -> Problem:
    p = draw(**sizes)
    p.ids[:, ::2, :, 0] = -1
    p.ids[:, 1::2, :, -1] = -1
    return p


def _nothing_seen(**sizes: int) -> Problem:
    p = draw(**sizes)
    p.ids[:, 1::2] = -1
    return p


def _far_apart(**sizes: int) -> Problem:
    """Each block's scores lie two hundred above or below those of the block before."""
    p = draw(**sizes)
    block = torch.arange(p.k.shape[1]) // p.block_size
    p.q[..., 0] = 4.0
    p.k[..., 0] = torch.where(block % 2 == 0, -100.0, 100.0)[None, :, None]
    return p


def _hidden_nan(**sizes: int) -> Problem:
    """Keys and values that no query lists, or that lie after it, are NaN."""
    p = draw(**sizes | {"N": 1})
    seen = dense_mask(p.ids, p.k.shape[1], block_size=p.block_size)[0, 0]  # [H, M]
    for x in (p.k, p.v):
        x[0].masked_fill_(~seen.T[..., None], math.nan)
    return p


def _packed(**sizes: int) -> Problem:
    """Two sequences one behind the other, of 21 and 30 tokens."""
    one, two = (draw(N=n, M=n, seed=n, **sizes) for n in (21, 30))
    S = max(one.ids.shape[-1], two.ids.shape[-1])
    ids = [torch.nn.functional.pad(p.ids, (0, S - p.ids.shape[-1]), value=-1) for p in (one, two)]
    tensors = (torch.cat([getattr(p, name) for p in (one, two)], 1) for name in "qkv")
    bounds = torch.tensor([0, 21, 51], dtype=torch.int32)
    return Problem(*tensors, torch.cat(ids, 1), one.block_size, bounds)


PROPERTIES: dict[str, Callable[..., Problem]] = {
    "lists": draw,
    "one query": partial(draw, N=1),
    "causal: all queries": partial(draw, N=48),
    "a ragged last block": partial(draw, N=9, M=43),
    "a group of 3": partial(draw, G=3),
    "a group of 16": partial(draw, G=16),
    "empty slots": _empty_slots,
    "nothing seen: o 0, lse -inf": _nothing_seen,
    "scores two hundred apart": _far_apart,
    "NaN in what is hidden": _hidden_nan,
    "packed sequences": _packed,
}
ALWAYS = tuple(name for name in PROPERTIES if "group" not in name and "packed" not in name)
