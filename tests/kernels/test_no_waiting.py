"""A call on a GPU is queued and the host goes on: nothing is read back, so that a CUDA graph can
hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from places import skip_unless_runs
from selection import Problem

from nsa_tutorial import ops

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "plain": Problem(B=2, N=20, M=50, D=16, DV=16, BS=16),
    "own block, counts of each row": Problem(N=20, M=50, own=True, counts="random"),
    "packed": Problem(N=35, M=35, cu=(0, 7, 7, 18, 35), own=True),
}


def calls(problem: Problem, backend: str) -> Iterator[Callable[[], object]]:
    call = problem.make(torch.float16, "cuda")
    packed = {"cu_seqlens": call.options["cu_seqlens"]}
    lists = {name: x for name, x in call.options.items() if name != "causal"}
    yield lambda: call.run(backend)
    yield lambda: ops.sliding_window_attention(
        call.q, call.k, call.v, window_size=9, **packed, backend=backend
    )
    yield lambda: ops.selected_and_window_attention(
        call.q, call.k, call.v, call.ids, **lists, window_size=9, backend=backend
    )


@pytest.fixture
def forbid_waiting() -> Iterator[Callable[[str], None]]:
    """Lets PyTorch raise where the host waits for the GPU."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_the_host_does_not_wait(
    problem: Problem, backend: str, forbid_waiting: Callable[[str], None]
) -> None:
    """Nor for offsets of packed sequences, after it has read them once."""
    skip_unless_runs(backend, "cuda", torch.float16)
    for run in calls(problem, backend):
        run()
        forbid_waiting("error")
        run()
        forbid_waiting("default")


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_summaries_do_not_wait(problem: Problem, forbid_waiting: Callable[[str], None]) -> None:
    """How many there are follows from the offsets that were read when they were checked."""
    call = problem.make(torch.float16, "cuda")
    options = {"length": 4, "stride": 2, "cu_seqlens": call.options["cu_seqlens"]}

    def run() -> None:
        k, v = ops.compress(call.k, **options), ops.compress(call.v, **options)
        ops.compressed_attention(call.q, k, v, num_keys=call.k.shape[1], **options)

    run()
    forbid_waiting("error")
    run()
    forbid_waiting("default")


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_in_a_cuda_graph(problem: Problem) -> None:
    """Captured once, replayed on new queries, keys, values and lists."""
    skip_unless_runs("triton", "cuda", torch.float16)
    call, other = (problem.make(torch.float16, "cuda") for _ in range(2))
    call.run("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call.run("triton")
    for x, new in (
        (call.q, -other.q),
        (call.k, other.k.flip(1)),
        (call.v, 2 * other.v),
        (call.ids, other.ids.flip(-1)),
    ):
        x.copy_(new)
    graph.replay()
    right = call.run("triton")
    assert torch.equal(o, right[0]) and torch.equal(lse, right[1])


def test_offsets_are_read_again_when_they_change() -> None:
    """Changed in place, or for another number of positions."""
    skip_unless_runs("triton", "cuda", torch.float16)
    call = PROBLEMS["packed"].make(torch.float16, "cuda")
    call.run("triton")
    with pytest.raises(
        ValueError,
        match="cu_seqlens: got a last offset of 35, expected the number of positions, 30",
    ):
        call.having(q=call.q[:, :30], k=call.k[:, :30], v=call.v[:, :30], ids=call.ids[:, :30]).run(
            "triton"
        )
    call.options["cu_seqlens"][1] = 20
    with pytest.raises(ValueError, match=r"cu_seqlens: .*expected offsets that never decrease"):
        call.run("triton")
