"""The TileLang kernels of an indexer's choice become CUDA C++ for every kind of shape."""

from __future__ import annotations

import pytest

from nsa_tutorial.runtime import environment, lowering

pytestmark = [
    pytest.mark.skipif(environment.detect().tilelang is None, reason="tilelang is not installed"),
    pytest.mark.exhaustive,
]
SHAPES = {  # dtype, J, DI, BS, with weights
    "DSA": ("bfloat16", 64, 128, 1, True),
    "MSA": ("bfloat16", 1, 128, 128, False),
    "blocks of no step": ("float16", 3, 80, 200, True),
    "fp32": ("float32", 2, 24, 8, True),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("dtype", "J", "DI", "BS", "has_w"), SHAPES.values(), ids=SHAPES.keys())
def test_scores_lower(dtype: str, J: int, DI: int, BS: int, has_w: bool, arch: str) -> None:
    from nsa_tutorial.kernels.tilelang.choice.index import build_index, span_of
    from nsa_tutorial.kernels.tilelang.choice.index_launch import index_options
    from nsa_tutorial.kernels.tilelang.compiling import A_GROUP_LOADS, ALL_THREADS_LOAD

    options = index_options(J, DI, 4 if dtype == "float32" else 2)
    configs = A_GROUP_LOADS if span_of(BS, options["BT"]) <= options["BT"] else ALL_THREADS_LOAD
    kernel = build_index(2, J, DI, BS, dtype, has_w=has_w, **options)
    source = lowering.cuda(kernel, arch, configs)
    assert ("wgmma" in source) == (arch == "sm_90" and dtype != "float32")


@pytest.mark.parametrize("BS", [1, 64])
def test_the_pick_lowers(BS: int) -> None:
    from nsa_tutorial.kernels.tilelang.choice.pick_many import build_pick_many
    from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD

    source = lowering.cuda(build_pick_many(2, BS, threads=256), "sm_90", ALL_THREADS_LOAD)
    assert "AtomicAdd" in source
