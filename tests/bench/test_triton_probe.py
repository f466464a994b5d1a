"""The probe loads what the forward loads, and multiplies it: its time means nothing if it skips a
tile."""

from __future__ import annotations

import pytest
import torch
from places import skip_unless_runs
from selection import Problem

from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("BT", [16, 32])
def test_every_listed_tile_is_loaded_and_multiplied(BT: int, device: str) -> None:
    skip_unless_runs("triton", device)
    from nsa_tutorial.bench.variants import triton_probe

    problem = Problem(B=1, N=9, M=75, D=16, DV=32, BS=32, S=3)
    call = problem.make(torch.float16, device)
    rows = query_rows(1, 9, 75, causal=True, cu_seqlens=None, device=torch.device(device))
    lists = torch.tensor(
        [[0, 1, 2], [-1, 2, -1], [1, 1, 0], [-1, -1, -1]], dtype=torch.int32, device=device
    )
    ids = lists[torch.arange(9 * problem.H, device=device) % 4].reshape(9, problem.H, 3)
    o = triton_probe.loads_and_products(call.q, call.k, call.v, ids, rows, block_size=32, BT=BT)

    times = torch.stack([(ids == block).sum(-1) for block in range(3)], -1)  # [N, H, blocks]
    # [N, HQ, M]
    times = times.repeat_interleave(32, -1)[..., :75].repeat_interleave(problem.G, 1).double()
    k, v = (x[0].double().repeat_interleave(problem.G, 1) for x in (call.k, call.v))
    truth = torch.einsum("nhm,nhd,mhd,mhe->nhe", times, call.q[0].double(), k, v)
    torch.testing.assert_close(
        o[0].double(), truth, rtol=1e-2, atol=1e-2 * truth.abs().max().item()
    )
