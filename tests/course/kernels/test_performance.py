"""Chapter 16's small kernels: what they compute, and what the compiler makes of each."""

from __future__ import annotations

import re

import pytest
import torch

from nsa_tutorial.runtime import environment, lowering

here = environment.detect()
pytestmark = pytest.mark.skipif(
    here.why_not("triton", here.device) is not None, reason="Triton does not run here"
)
KERNELS = "nsa_tutorial.course.kernels.performance"


@pytest.mark.parametrize("apart", [1, 3])
def test_gather_takes_numbers_that_lie_apart(apart: int) -> None:
    from nsa_tutorial.course.kernels import performance

    x = torch.arange(64.0 * apart, device=here.device)
    y = torch.zeros(64, device=here.device)
    performance.gather[4,](x, y, APART=apart, BN=16)
    assert torch.equal(y, x[::apart])


@pytest.mark.parametrize("dot", [True, False], ids=["tensor cores", "number by number"])
def test_multiply_is_a_matrix_product(dot: bool) -> None:
    from nsa_tutorial.course.kernels import performance

    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=g).to(here.device) for shape in ((32, 48), (48, 16)))
    c = torch.zeros(32, 16, device=here.device)
    performance.multiply[2,](a, b, c, 48, BM=16, BN=16, BK=16, DOT=dot)
    torch.testing.assert_close(c, a @ b, atol=1e-2, rtol=1e-2)


def compiled(kernel: str, constants: dict, **options: int) -> str:
    types = dict.fromkeys("XYAB", "*fp16") | {"C": "*fp32"}
    name = f"{KERNELS}:{kernel}"
    return lowering.stages(name, constants, types, aligned=["K"], **options)["ptx"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("apart", "loads"), [(16, 8), pytest.param(1, 1, marks=pytest.mark.exhaustive)]
)
def test_neighbours_are_loaded_together(apart: int, loads: int) -> None:
    ptx = compiled("gather", {"APART": apart, "BN": 1024})
    assert len(re.findall(r"ld\.global", ptx)) == loads


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stages", "ahead"), [(3, True), pytest.param(1, False, marks=pytest.mark.exhaustive)]
)
def test_stages_fetch_ahead(stages: int, ahead: bool) -> None:
    sizes = {"BM": 64, "BN": 64, "BK": 64, "DOT": True}
    ptx = compiled("multiply", sizes, num_stages=stages)
    assert "wgmma.mma_async" in ptx
    assert ("cp.async.c" in ptx) == ahead
