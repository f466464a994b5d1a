"""A mesh of ranks, and this rank's share of a text."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_tutorial.runtime import checks
from nsa_tutorial.training.many_gpus import collectives
from nsa_tutorial.training.many_gpus.cuts import Cut

TIMEOUT = 120.0  # seconds
Mesh = DeviceMesh | dist.ProcessGroup


class Context(NamedTuple):
    """The ranks that share a text, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    ranks: int


def make_mesh(
    data: int, context: int, device: str = "cuda", *, timeout: float = TIMEOUT
) -> DeviceMesh:
    """A mesh of `data` texts at a time, each over `context` ranks; dimensions "data" and "context".

    It starts PyTorch's process group, unless there is one: NCCL for CUDA tensors, and gloo for CPU
    tensors, over which ranks also agree on settings. `torchrun` sets the environment for it.

    Args:
        data, context: their product is the number of processes.
        device: "cuda" or "cpu"; each process of a machine takes the GPU of its local rank.
        timeout: seconds after which a collective that not all ranks have called is an error. gloo
            raises `RankLost`. NCCL ends the process, because kernels that wait on a GPU cannot be
            interrupted; ranks that only disagree, or died before a call, are found over gloo.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    checks.check_positive_int("data", data)
    checks.check_positive_int("context", context)
    checks.check_one_of("device", device, ("cuda", "cpu"))
    checks.check_positive_number("timeout", timeout)
    limit = timedelta(seconds=timeout)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=limit)
    ranks = dist.get_world_size()
    if data * context != ranks:
        raise ValueError(
            f"data and context: got {data} and {context}, expected a product of {ranks}, the "
            "number of processes"
        )
    grid = torch.arange(ranks).view(data, context)
    own = [(grid == dist.get_rank()).nonzero()[0, dim].item() for dim in (0, 1)]
    # each process makes all groups, in the same order
    columns = [dist.new_group(column.tolist(), timeout=limit) for column in grid.T]
    rows = [dist.new_group(row.tolist(), timeout=limit) for row in grid]
    groups = [columns[own[1]], rows[own[0]]]
    return DeviceMesh.from_group(groups, device, grid, mesh_dim_names=("data", "context"))


def context_of(mesh: Mesh) -> Context:
    """The ranks over which `mesh` cuts a text: its dimension "context", or the only one; or a
    process group."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if "context" not in names and mesh.ndim != 1:
            raise ValueError(f"mesh: got dimensions {list(names)}, expected one called 'context'")
        mesh = mesh.get_group("context" if "context" in names else 0)
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(
            f"mesh: got {checks.describe(mesh)}, expected a DeviceMesh or a process group"
        )
    return Context(mesh, mesh.rank(), mesh.size())


def cut_of(mesh: Mesh, tokens: int, kind: str = "zigzag") -> Cut:
    """The cut of one text of `tokens` tokens over the ranks of a mesh."""
    return Cut(context_of(mesh).ranks, tokens, kind)


def positions(mesh: Mesh, cut: Cut) -> Tensor:
    """`cut.positions` of this rank."""
    return cut.positions(context_of(mesh).rank)


def shard(x: Tensor, mesh: Mesh, cut: Cut, dim: int = 1) -> Tensor:
    """The tokens of this rank, out of `x` with all tokens in dimension `dim`."""
    return cut.shard(x, context_of(mesh).rank, dim)


@torch.no_grad()
def unshard(x: Tensor, mesh: Mesh, cut: Cut, dim: int = 1) -> Tensor:
    """The whole text on every rank, out of the tokens of each: the inverse of `shard`, without a
    gradient. For looking at results; the operators need no whole text."""
    context = context_of(mesh)
    most = max(cut.length(rank) for rank in range(cut.ranks))
    padded = x.new_zeros(most, *x.transpose(0, dim).shape[1:])
    padded[: x.shape[dim]] = x.transpose(0, dim)
    gathered = collectives.all_gather(padded, context.group, "whole tensor").wait()
    shares = [
        share[: cut.length(rank)].transpose(0, dim)
        for rank, share in enumerate(gathered.unflatten(0, (cut.ranks, most)))
    ]
    return cut.unshard(shares, dim)
