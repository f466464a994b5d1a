"""One forward and backward of Native Sparse Attention, on one device or over all ranks, and how
long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.training.many_gpus import meshes, operators
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.volume import Widths

Value = TypeVar("Value")


@dataclass(frozen=True)
class Shape:
    """Sizes of the text's heads and of the branches, and the dtype."""

    query_heads: int = 64
    kv_heads: int = 4
    width: int = 128
    block_size: int = 64
    top_n: int = 16
    window_size: int = 512
    length: int = 32
    stride: int = 16
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, device: str) -> Shape:
        """The paper's on CUDA; on a CPU a small one, to try the command."""
        return cls() if device == "cuda" else cls(4, 2, 16, 16, 4, 32, 8, 4, torch.float32)

    def sizes(self) -> dict[str, int]:
        """As `ops.native_sparse_attention` takes them."""
        names = ("block_size", "window_size", "length", "stride")
        return {name: getattr(self, name) for name in names} | {"block_counts": self.top_n}

    def widths(self) -> Widths:
        """For `bytes_moved`."""
        return Widths(self.kv_heads, self.width, self.width, itemsize=self.dtype.itemsize)

    def as_dict(self) -> dict[str, object]:
        """For a file."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


@dataclass
class Step:
    """The tensors of a text, or of this rank's share of it."""

    shape: Shape
    mesh: meshes.Mesh | None
    cut: Cut | None
    q: Tensor
    k: Tensor
    v: Tensor
    gates: tuple[Tensor, Tensor, Tensor]
    d_o: Tensor

    @classmethod
    def of(cls, shape: Shape, q: Tensor, mesh: meshes.Mesh | None, cut: Cut | None) -> Step:
        """Of the queries of the whole text; the rest is random, and the same on every rank."""

        def share(x: Tensor) -> Tensor:
            return x if mesh is None else meshes.shard(x, mesh, cut)

        g = torch.Generator(q.device).manual_seed(1)
        options = {"generator": g, "device": q.device, "dtype": shape.dtype}
        k, v = (torch.randn(*q.shape[:2], shape.kv_heads, shape.width, **options) for _ in "kv")
        gates = tuple(share(torch.rand(*q.shape[:3], **options)) for _ in range(3))
        q, k, v = (share(x).requires_grad_() for x in (q, k, v))
        return cls(shape, mesh, cut, q, k, v, tuple(x.requires_grad_() for x in gates),
                   torch.randn_like(q))  # fmt: skip

    @classmethod
    def random(
        cls, shape: Shape, device: str, tokens: int, mesh: meshes.Mesh | None, cut: Cut | None
    ) -> Step:
        """Random queries; only this rank's share is ever made."""
        n = tokens if mesh is None else cut.length(meshes.context_of(mesh).rank)
        made = {"device": device, "dtype": shape.dtype}
        q = torch.randn(1, n, shape.query_heads, shape.width, **made).requires_grad_()
        k, v = (torch.randn(1, n, shape.kv_heads, shape.width, **made) for _ in "kv")
        gates = (torch.rand(1, n, shape.query_heads, **made).requires_grad_() for _ in range(3))
        k, v = k.requires_grad_(), v.requires_grad_()
        return cls(shape, mesh, cut, q, k, v, tuple(gates), torch.randn_like(q))

    def forward(self) -> Tensor:
        """The output."""
        given, sizes = (self.q, self.k, self.v, *self.gates), self.shape.sizes()
        if self.mesh is None:
            return ops.native_sparse_attention(*given, **sizes)
        return operators.native_sparse_attention(*given, mesh=self.mesh, cut=self.cut, **sizes)

    def backward(self, o: Tensor) -> None:
        """All gradients; those before are dropped."""
        for x in (self.q, self.k, self.v, *self.gates):
            x.grad = None
        o.backward(self.d_o)

    def run(self) -> None:
        """Both, to the end."""
        self.backward(self.forward())
        if self.q.is_cuda:
            torch.cuda.synchronize()

    def timed(self, repeats: int) -> tuple[list[float], list[float]]:
        """Milliseconds of the forward and of the backward, each time. On a GPU one follows the
        other without a wait, as in training: the host runs ahead."""
        marks = [self._mark()]
        for _ in range(repeats):
            o = self.forward()
            marks.append(self._mark())
            self.backward(o)
            del o
            marks.append(self._mark())
        if self.q.is_cuda:
            torch.cuda.synchronize()
            spent = [a.elapsed_time(b) for a, b in pairwise(marks)]
        else:
            spent = [1e3 * (b - a) for a, b in pairwise(marks)]
        spent = [round(t, 4) for t in spent]
        return spent[::2], spent[1::2]

    def _mark(self) -> torch.cuda.Event | float:
        if not self.q.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.no_grad()
    def lists(self, options: dict[str, int]) -> Tensor:
        """The blocks that one device chooses."""
        made = {key: options[key] for key in ("length", "stride")}
        return ops.select_blocks(self.q, ops.compress(self.k, **made), **options)


def on_each(context: meshes.Context, call: Callable[[], Value] | None) -> list[Value]:
    """What `call()` returns on each rank that has one; all wait for all."""
    mine = None if call is None else call()
    everyone: list[Value | None] = [None] * context.ranks
    dist.all_gather_object(everyone, mine, group=context.group)
    return [x for x in everyone if x is not None]
