"""The TileLang kernels of decoding become CUDA: with pages and without, in every dtype; and what
changes from step to step compiles nothing."""

from __future__ import annotations

import re

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels.tables import parts
from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD, compiled
from nsa_tutorial.kernels.tilelang.decoding import attend, merge, options, write

MEMORY = {"sm_80": 163 * 1024, "sm_90": SHARED_MEMORY}
SHAPES = {  # H, G, D, DV, BS
    "shown": (4, 16, 128, 128, 64),
    "odd": (2, 3, 20, 3, 8),
    "192 and 128": (1, 20, 192, 128, 24),
    "group of 128": (1, 128, 256, 256, 64),
}


def cuda(name: str, shape: tuple[int, ...], dtype: str, arch: str, is_paged: bool) -> str:
    """What a kernel becomes, with the options of that architecture."""
    H, G, D, DV, BS = shape
    itemsize = 4 if dtype == "float32" else 2
    sizes = options.decoding_options(H, G, D, DV, BS, 16, itemsize, MEMORY[arch])
    kinds = {"dtype": dtype, "is_paged": is_paged}
    kernel = {
        "summaries and window": lambda: attend.build_summaries_and_window(
            H, G, D, DV, 32, 16, **kinds, **sizes.steps
        ),
        "lists": lambda: attend.build_lists(H, G, D, DV, BS, **kinds, **sizes.list_steps),
        "mass": lambda: merge.build_mass(H, G),
        "merge": lambda: merge.build_merge(DV, dtype, dtype),
        "tokens": lambda: write.build_tokens(H * D, H * DV, **kinds),
        "summaries": lambda: write.build_summaries(H * D, H * DV, 32, 16, **kinds),
    }[name]()
    return lowering.cuda(kernel, arch, ALL_THREADS_LOAD)


ATTEND = ("summaries and window", "lists")
CASES = [  # the cheapest with every run
    *((name, "shown", "float16", "sm_90", True) for name in (*ATTEND, "merge", "tokens")),
    *((name, "odd", "bfloat16", "sm_80", False) for name in (*ATTEND, "mass", "summaries")),
    *((name, "192 and 128", "float32", "sm_80", True) for name in (*ATTEND, "mass", "merge")),
    *((name, "group of 128", "bfloat16", "sm_90", False) for name in (*ATTEND, "mass", "merge")),
    *((name, "odd", "float32", "sm_90", True) for name in (*ATTEND, "tokens", "summaries")),
]
QUICK = (CASES[3], CASES[7])


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.exhaustive) for c in CASES],
    ids=str,
)
def test_kernels_become_cuda(case: tuple) -> None:
    """Products on tensor cores except in fp32, keys 16 bytes at a time where their width allows it,
    offsets in 64 bits, and the first of a thread's numbers where its array begins."""
    name, shape, dtype, *_ = case
    source = cuda(name, SHAPES[shape], *case[2:])
    assert "__global__" in source
    assert "(int64_t)" in source
    if name in ATTEND:
        on_tensor_cores = "mma_sync" in source or "wgmma" in source.replace("wgmma_fence", "")
        assert on_tensor_cores == (dtype != "float32"), "fp32 would be rounded to TF32 there"
        if shape != "odd":
            assert re.search(r"\*\((uint4|float4)\*\)\(K \+ ", source)
    if dtype == "float32":
        for array in re.findall(r"^\s+float (\w+)\[\d+\];", source, re.MULTILINE):
            places = re.findall(rf"\b{array}(?: \+ |\[)(.*)", source)
            assert not any(re.match(r"\(+int\)threadIdx", place) for place in places)


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("G", [1, 16, 64])
@pytest.mark.parametrize("width", [1, 80, 128, 256])
def test_options_suit_the_gpu(width: int, G: int, itemsize: int, memory: int) -> None:
    """A program can hold its tiles, and every branch's parts fit the tile that merges them."""
    GT, DT, DVT = options.decoding_sides(G, width, width, itemsize)
    for groups in (1, 8, 4096):
        found = options.decoding_options(groups, G, width, width, 24, 200, itemsize, memory)
        for BT, threads in (found.steps.values(), found.list_steps.values()):
            assert (GT * DT + BT * (DT + DVT) + GT * BT) * itemsize <= memory
            assert threads % 32 == 0
        assert max(found[:3]) <= parts.MOST_PARTS
        assert found[:3] == (1, 1, 1) or groups < 4096


@pytest.mark.exhaustive
def test_batch_queries_lengths_and_pages_compile_nothing() -> None:
    H, D, page_size, ring = 1, 16, 16, 24
    compiled_before = []
    for B, n, max_pages, top_n in ((1, 1, 3, 3), (3, 1, 4, 3), (2, 4, 3, 4)):
        q, gate = torch.randn(B, n, 2, D), torch.ones(B, n, 2)
        pages = [torch.randn(B * max_pages, page_size, H, D) for _ in "kv"]
        call = {
            "q": q, "selected": pages, "compressed": [x[:, ::4].contiguous() for x in pages],
            "window": [torch.randn(B, ring, H, D) for _ in "kv"], "gates": [gate] * 3,
            "lengths": torch.arange(B, dtype=torch.int32) + 30, "block_counts": top_n,
            "block_table": torch.arange(B * max_pages, dtype=torch.int32).view(B, -1),
            "block_size": 16, "window_size": 20, "length": 8, "stride": 4,
        }  # fmt: skip
        found = ops.decode_attention(**call, backend="tilelang")
        torch.testing.assert_close(found, ops.decode_attention(**call, backend="reference"))
        compiled_before.append(compiled.cache_info().misses)
    assert len(set(compiled_before)) == 1
