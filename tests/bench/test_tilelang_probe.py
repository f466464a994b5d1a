"""The probes load what the forward loads, and one of them multiplies it: their times mean nothing
if they skip a tile."""

from __future__ import annotations

import pytest
import torch
from places import skip_unless_runs
from selection import Problem
from torch import Tensor

from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.selected_attention import query_rows

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.bench import steps
from nsa_tutorial.bench.variants import tilelang_variants
from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
from nsa_tutorial.kernels.tilelang.selected import forward

PRODUCTS, LOADS = "loads and products alone", "loads alone"
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def probed(change: str, device: str) -> tuple[Problem, Tensor, Tensor]:
    """A probe of causal lists with empty slots and blocks named twice: the call, how often each
    query's list names each key that it sees `[N, HQ, M]`, and what the probe gives."""
    problem = Problem(B=1, N=75, M=75, D=32, DV=32, BS=32, S=3)
    call = problem.make(torch.float16, device)
    rows = query_rows(1, 75, 75, causal=True, cu_seqlens=None, device=torch.device(device))
    lists = torch.tensor(
        [[0, 1, 2], [-1, 2, -1], [1, 1, 0], [-1, -1, -1]], dtype=torch.int32, device=device
    )
    ids = lists[torch.arange(75 * problem.H, device=device) % 4].reshape(75, problem.H, 3)
    o, _ = tilelang_variants.variant(change).launch(
        call.q, call.k, call.v, ids, rows, block_size=32, scale=1.0
    )
    times = torch.stack([(ids == block).sum(-1) for block in range(3)], -1)  # [N, H, blocks]
    times = times.repeat_interleave(32, -1)[..., :75].repeat_interleave(problem.G, 1)
    is_seen = torch.ones(75, 75, dtype=torch.bool, device=device).tril()
    return call, (times * is_seen[:, None]).double(), o[0].double()


@pytest.mark.exhaustive
@devices
def test_every_visible_key_is_loaded_and_multiplied(device: str) -> None:
    skip_unless_runs("tilelang", device)
    call, times, o = probed(PRODUCTS, device)
    G = call.q.shape[2] // call.k.shape[2]
    k, v = (x[0].double().repeat_interleave(G, 1) for x in (call.k, call.v))
    truth = torch.einsum("nhm,nhd,mhd,mhe->nhe", times, call.q[0].double(), k, v)
    torch.testing.assert_close(o, truth, rtol=1e-2, atol=1e-2 * truth.abs().max().item())


@pytest.mark.exhaustive
@devices
def test_every_visible_tile_is_loaded(device: str) -> None:
    """Head `i` of a group adds up row `i` of each tile of keys, and of values."""
    skip_unless_runs("tilelang", device)
    call, times, o = probed(LOADS, device)
    G = call.q.shape[2] // call.k.shape[2]
    truth = torch.zeros_like(o)
    for head in range(o.shape[1]):
        for block in range(3):
            row = block * 32 + head % G
            if row < 75:
                both = call.k[0, row, head // G] + call.v[0, row, head // G].double()
                truth[:, head] += times[:, head, row, None] * both
    torch.testing.assert_close(o, truth, rtol=1e-2, atol=1e-2 * truth.abs().max().item())


def test_the_bench_measures_the_probes_and_judges_them_not() -> None:
    assert {PRODUCTS, LOADS} < steps.PROBES
    assert {PRODUCTS, LOADS} < tilelang_variants.CHANGES.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [PRODUCTS, LOADS])
def test_the_copies_are_those_of_the_kernel(change: str) -> None:
    """As many asynchronous ones, in the CUDA of the shape that is measured."""
    from nsa_tutorial.runtime import lowering

    modules = (forward, tilelang_variants.variant(change))
    kernels = (module.build_kernel(4, 16, 128, 128, 64) for module in modules)
    ours, probe = (lowering.cuda(kernel, "sm_90", ALL_THREADS_LOAD) for kernel in kernels)
    for copy in ("cp_async_gs", "cp_async_wait", "cp_async_commit"):
        assert ours.count(copy) == probe.count(copy) > 0
    assert probe.count("mma_sync") == (ours.count("mma_sync") if change == PRODUCTS else 0)
    assert "exp2" not in probe
