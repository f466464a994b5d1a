"""A call on a GPU, and its backward, are queued and the host goes on: nothing is read back, so that
a CUDA graph can hold both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from places import skip_unless_runs
from selection import Call, Problem
from torch import Tensor

from nsa_tutorial import ops

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "plain": Problem(B=2, N=20, M=50, D=16, DV=16, BS=16),
    "own block, counts of each row": Problem(N=20, M=50, own=True, counts="random"),
    "packed": Problem(N=35, M=35, cu=(0, 7, 7, 18, 35), own=True),
    "factors, blocks of many queries": Problem(N=900, M=900, H=1, S=2, own=True, factors=True),
}


def calls(problem: Problem, backend: str) -> Iterator[Callable[[], list[Tensor]]]:
    call = problem.make(torch.float16, "cuda")
    inputs = inputs_of(call)
    packed = {"cu_seqlens": call.options["cu_seqlens"]}
    lists = {name: x for name, x in call.options.items() if name != "causal"}
    options = {"window_size": 9, "return_lse": True, "backend": backend}
    yield lambda: there_and_back(call.run(backend), inputs)
    yield lambda: there_and_back(
        ops.sliding_window_attention(*inputs[:3], **packed, **options), inputs[:3]
    )
    yield lambda: there_and_back(
        ops.selected_and_window_attention(*inputs[:3], call.ids, **lists, **options), inputs
    )


WINDOWS = {"length": 4, "stride": 2}
# the gradients of smaller blocks are added in any order
NATIVE = WINDOWS | {"block_size": 16, "window_size": 9, "block_counts": 4}


def calls_of_summaries(problem: Problem, backend: str) -> Iterator[Callable[[], list[Tensor]]]:
    """Attention to summaries, the choice of blocks, and all of native sparse attention; how many
    summaries there are follows from offsets that were read when they were checked."""
    call = problem.make(torch.float16, "cuda")
    inputs = inputs_of(call)[:3]
    packed = {"cu_seqlens": call.options["cu_seqlens"]}
    summaries = [call.q, *(ops.compress(x.detach(), **WINDOWS, **packed) for x in inputs[1:])]
    summaries = [x.requires_grad_() for x in summaries]
    options = WINDOWS | packed | {"num_keys": call.k.shape[1], "backend": backend}
    gate = torch.rand(call.q.shape[:3], device="cuda", dtype=torch.float16)
    gates = [gate.clone().requires_grad_() for _ in range(3)]
    counts = torch.full(call.ids.shape[:3], 4, device="cuda")

    def attend() -> list[Tensor]:
        outputs = ops.compressed_attention(*summaries, return_lse=True, **options)
        return there_and_back(outputs, summaries)

    def choose() -> list[Tensor]:
        pick = {"top_n": 4, "block_size": 8, **options}
        _, lse = ops.compressed_attention(*summaries, return_lse=True, **options)
        return [
            ops.select_blocks(*summaries[:2], lse, **pick),
            ops.select_blocks(*summaries[:2], **pick),
            ops.select_blocks(*summaries[:2], lse, block_counts=counts, **pick),
            ops.index_blocks(call.q, call.k[:, :, 0], **packed, block_size=8, backend=backend),
        ]

    def native() -> list[Tensor]:
        o = ops.native_sparse_attention(*inputs, *gates, **NATIVE, **packed, backend=backend)
        return there_and_back((o,), [*inputs, *gates])

    yield from (attend, choose, native)


def inputs_of(call: Call) -> list[Tensor]:
    """The call's tensors that have gradients."""
    factors = call.options.get("slot_scale")
    inputs = [call.q, call.k, call.v] + ([] if factors is None else [factors])
    return [x.requires_grad_() for x in inputs]


def there_and_back(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients through all of them."""
    d_outputs = [torch.full_like(x, 0.5) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, d_outputs)]


def captured(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], torch.cuda.CUDAGraph]:
    """What `run` returns, and the graph that computes it anew."""
    side = torch.cuda.Stream()  # the warm-up's, as `torch.cuda.graph` asks for
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return found, graph


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
    for run in (*calls(problem, backend), *calls_of_summaries(problem, backend)):
        run()
        forbid_waiting("error")
        run()
        forbid_waiting("default")


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_in_a_cuda_graph(problem: Problem, backend: str) -> None:
    """Forward and backward, captured once, replayed on new queries, keys, values and lists."""
    skip_unless_runs(backend, "cuda", torch.float16)
    call = problem.make(torch.float16, "cuda")
    inputs = inputs_of(call)

    def run() -> list[Tensor]:
        return there_and_back(call.run(backend), inputs)

    found, graph = captured(run)
    with torch.no_grad():
        for x, new in (
            (call.q, -call.q),
            (call.k, call.k.flip(1)),
            (call.v, 2 * call.v),
            *((x, x.flip(-1)) for x in (call.ids, *inputs[3:])),
        ):
            x.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_native_sparse_attention_in_a_cuda_graph(problem: Problem, backend: str) -> None:
    """The choice is made anew at every replay: all is as if computed from the new tensors."""
    skip_unless_runs(backend, "cuda", torch.float16)
    call = problem.make(torch.float16, "cuda")
    gate = torch.rand(call.q.shape[:3], device="cuda", dtype=torch.float16)
    leaves = [*inputs_of(call)[:3], *(gate.clone().requires_grad_() for _ in range(3))]
    options = NATIVE | {"cu_seqlens": call.options["cu_seqlens"], "backend": backend}

    def run() -> list[Tensor]:
        return there_and_back((ops.native_sparse_attention(*leaves, **options),), leaves)

    found, graph = captured(run)
    with torch.no_grad():
        for x in leaves:
            x.copy_(x.flip(1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


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
