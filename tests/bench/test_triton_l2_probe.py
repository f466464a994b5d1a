"""The probe of L2 loads and multiplies every listed tile once, however many programs it has; with
the keys alone, it asks for half the bytes."""

from __future__ import annotations

import re

import pytest
import torch
from places import skip_unless_runs
from selection import Problem

from nsa_tutorial.bench import steps
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("programs", "keys_alone"), [(1, False), (5, False), (3, True)])
def test_every_listed_tile_is_loaded_once(programs: int, keys_alone: bool, device: str) -> None:
    skip_unless_runs("triton", device)
    from nsa_tutorial.bench.variants import triton_l2_probe

    DV = 16 if keys_alone else 32
    problem = Problem(B=1, N=9, M=75, D=16, DV=DV, BS=32, S=3)
    call = problem.make(torch.float16, device)
    rows = query_rows(1, 9, 75, causal=True, cu_seqlens=None, device=torch.device(device))
    lists = torch.tensor(
        [[0, 1, 2], [-1, 2, -1], [1, 1, 0], [-1, -1, -1]], dtype=torch.int32, device=device
    )
    ids = lists[torch.arange(9 * problem.H, device=device) % 4].reshape(9, problem.H, 3)
    o = triton_l2_probe.loads_and_products(
        call.q, call.k, call.v, ids, rows, block_size=32, programs=programs,
        keys_alone=keys_alone, BT=16,
    )  # fmt: skip
    times = torch.stack([(ids == block).sum(-1) for block in range(3)], -1)  # [N, H, blocks]
    times = times.repeat_interleave(32, -1)[..., :75].repeat_interleave(problem.G, 1).double()
    k, v = (x[0].double().repeat_interleave(problem.G, 1) for x in (call.k, call.v))
    values = k if keys_alone else v
    truth = torch.einsum("nhm,nhd,mhd,mhe->nhe", times, call.q[0].double(), k, values)
    torch.testing.assert_close(
        o[0].double(), truth, rtol=1e-2, atol=1e-2 * truth.abs().max().item()
    )


@pytest.mark.exhaustive
def test_keys_alone_halve_the_loads_and_keep_the_products() -> None:
    """In the code for a Hopper GPU."""
    pointers = dict.fromkeys(("Q", "Output"), "*bf16") | {
        "BlockIndices": "*i32",
        "FirstKey": "*i32",
    }
    boxes = dict.fromkeys(("KDescriptor", "VDescriptor"), "tensordesc<bf16[32, 1, 128]>")
    sizes = {"G": 16, "D": 128, "DV": 128, "BS": 64, "GT": 16, "BT": 32}
    kernel = "nsa_tutorial.bench.variants.triton_l2_probe:kernel"
    loads, products = [], []
    for keys_alone in (False, True):
        constants = sizes | {"KEYS_ALONE": keys_alone}
        ptx = lowering.stages(kernel, constants, pointers | boxes, num_warps=1, num_stages=3)["ptx"]
        loads.append(len(re.findall(r"cp\.async\.bulk\.tensor", ptx)))
        products.append(len(re.findall(r"mma\.sync", ptx)))
    assert loads[0] == 2 * loads[1] > 0
    assert products[0] == products[1] > 0


def test_two_widths_have_no_keys_alone() -> None:
    from nsa_tutorial.bench.variants import triton_l2_probe

    problem = Problem(B=1, N=4, M=32, D=16, DV=32, BS=32, S=1)
    call = problem.make(torch.float16, "cpu")
    rows = query_rows(1, 4, 32, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    ids = torch.zeros(4, problem.H, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="of one width, got 16 and 32"):
        triton_l2_probe.loads_and_products(
            call.q, call.k, call.v, ids, rows, block_size=32, programs=1, keys_alone=True
        )


def test_what_is_measured_is_no_attention() -> None:
    assert set(steps.L2_PROBES) < steps.PROBES
    assert {alone for _, alone in steps.L2_PROBES.values()} == {False, True}
