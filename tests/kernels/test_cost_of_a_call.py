"""What a call costs follows from what is listed: no scan of all keys, no lists for windows, no
steps past the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from branches import Shape
from places import places_of, skip_unless_runs
from selection import Problem, assert_right
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_tutorial import ops

places = places_of(["reference", "tilelang", "triton"], slow=["tilelang"])
on_kernels = places_of(["tilelang", "triton"], slow=["tilelang"])


class Integers(TorchDispatchMode):
    """While it is on, `most` is the largest number of int32 or int64 numbers that any operation
    returned."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype in (torch.int32, torch.int64):
            self.most = max(self.most, out.numel())
        return out


@on_kernels
def test_a_window_makes_no_lists(watch: Callable, backend: str, device: str) -> None:
    """A number for each row, or one for each block of the window, and never their product."""
    skip_unless_runs(backend, device)
    q, k, v = (x.to(device) for x in Shape(N=3, M=300).make())
    with watch(Integers()) as integers:
        ops.sliding_window_attention(q, k, v, window_size=256, backend=backend)
    assert integers.most <= 256 // 64


@places
def test_a_block_longer_than_all_keys_is_one_block(backend: str, device: str) -> None:
    """4 keys in a block of 65,536: walked to its end, it took Triton's interpreter 41 seconds."""
    skip_unless_runs(backend, device)
    problem = Problem(N=4, M=4, S=3, BS=2**20, own=True)
    assert_right(Problem(N=4, M=4, S=3, BS=2**10).make(device=device), backend)  # compiles, imports
    start = time.perf_counter()
    assert_right(problem.make(device=device), backend)
    assert time.perf_counter() - start < 5


@places
def test_a_block_longer_than_a_packed_sequence(backend: str, device: str) -> None:
    """Each sequence has one block, whose other tokens belong to its neighbours."""
    skip_unless_runs(backend, device)
    assert_right(
        Problem(N=9, M=9, BS=2**10, S=2, cu=(0, 3, 3, 9), own=True).make(device=device), backend
    )


def test_choosing_among_blocks_longer_than_all_keys() -> None:
    q, k, _ = Shape(N=40, M=40).make()
    k_cmp = ops.compress(k, length=8, stride=4)
    ids = ops.select_blocks(q, k_cmp, top_n=3, block_size=2**30, length=8, stride=4)
    assert torch.equal(ids, torch.tensor([0, -1, -1], dtype=torch.int32).expand(1, 40, 2, 3))


class Reductions(TorchDispatchMode):
    """While it is on, `of` lists the operations that made a small tensor of one of `numel`
    elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.of = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() < self.numel and "empty" not in str(func):
            self.of += [
                str(func) for x in args if isinstance(x, Tensor) and x.numel() == self.numel
            ]
        return out


@on_kernels
def test_nothing_reads_all_keys_or_values(watch: Callable, backend: str, device: str) -> None:
    """One query of a long cache: a reduction over `v` before the launch would read 1 GB at a
    million tokens."""
    skip_unless_runs(backend, device)
    call = Problem(N=1, M=4096, G=2, D=16, DV=16, S=2).make(device=device)
    with watch(Reductions(call.v.numel())) as reductions:
        call.run(backend)
    assert reductions.of == []
