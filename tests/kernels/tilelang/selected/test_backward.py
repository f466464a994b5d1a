"""TileLang's backward beside what `tests/training` asks of every backend: what it becomes in CUDA,
its chunks, what is never read, and the options."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from branches import Shape
from places import pairwise, places_of, skip_unless_runs
from selection import Problem
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.sparse import selected_attention, sliding_window
from nsa_tutorial.sparse.selected_attention import block_list, query_rows
from nsa_tutorial.training import gradients, tile_gradients

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
from nsa_tutorial.kernels.tilelang.launch_options import (
    SHARED_MEMORY,
    dkv_options,
    dkv_sides,
    dq_options,
    tile_rows,
    tile_sides,
)
from nsa_tutorial.kernels.tilelang.selected import backward as kernels
from nsa_tutorial.kernels.tilelang.selected import backward_launch as launch
from nsa_tutorial.kernels.tilelang.selected import forward as tilelang_forward

places = places_of(["tilelang"])
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


# -- what it becomes --

SHAPES = {  # H, G, D, DV, BS
    "shown": (4, 16, 128, 128, 64),
    "wide": (4, 16, 256, 256, 128),
    "odd": (2, 17, 192, 128, 33),
    "group of 64": (4, 64, 128, 128, 64),
}
GPUS = (("sm_90", "float16"), ("sm_90", "float32"), ("sm_80", "bfloat16"))
KINDS = {
    "-window": {"is_window": True, "is_added": True},
    "-factors": {"has_factors": True},
}


def cuda(name: str, shape: tuple[int, ...], dtype: str, arch: str, **kinds: bool) -> str:
    """The CUDA of the kernel of the queries, or of that of the keys, with the options of an
    H100."""
    build = {"dq": kernels.build_dq, "dkv": kernels.build_dkv}[name]
    options = {"dq": dq_options, "dkv": dkv_options}[name](*shape[1:], ITEMSIZE[dtype])
    return lowering.cuda(build(*shape, dtype=dtype, **options, **kinds), arch, ALL_THREADS_LOAD)


@pytest.mark.parametrize(
    ("arch", "dtype", "shape", "name", "kinds"),
    [
        pytest.param(
            arch, dtype, shape, name, kinds, id=f"{name}-{arch}-{dtype}-{label}{kind}",
            marks=pytest.mark.exhaustive,
        )
        for (arch, dtype), label, name, kind in dict.fromkeys((
            (GPUS[0], "shown", "dkv", ""),
            *pairwise(GPUS, ("shown", "odd", "group of 64"), ("dkv", "dq"), ("", *KINDS)),
            (GPUS[0], "wide", "dkv", ""),
        ))
        for shape, kinds in ((SHAPES[label], KINDS[kind] if kind else {}),)
    ],
)  # fmt: skip
def test_every_tile_comes_16_bytes_at_a_time(
    arch: str, dtype: str, shape: tuple, name: str, kinds: dict
) -> None:
    """Keys and values, or gathered queries and gradients, for the first step and for the next
    ones, whatever the group; zeros where nothing is to be read."""
    source = cuda(name, shape, dtype, arch, **kinds)
    assert source.count("cp_async_gs_conditional<16>") == 4
    on_tensor_cores = "mma_sync" in source or "wgmma" in source
    assert on_tensor_cores == (dtype != "float32"), "fp32 would be rounded to TF32 there"
    if (arch, name, shape) == ("sm_90", "dkv", SHAPES["shown"]) and on_tensor_cores:
        # scores stand transposed, so that the weights are multiplied from where they are
        assert source.count("wgmma_rs<") == 4, "weights should stay in registers"


GROUPS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64)
WIDTHS = (*range(16, 257, 16), 1, 8, 33, 40, 72, 100)  # multiples of 16, and odd ones
BLOCKS = (16, 24, 64)


def test_a_warp_has_columns_that_its_products_take() -> None:
    """Of all groups and widths: 16 for a warp group of Hopper's, in 64 rows or more, and 8 for a
    warp otherwise. With less, TileLang finds no layout, or computes something else."""
    for G, D, DV, BS in product(GROUPS, WIDTHS, WIDTHS, BLOCKS):
        dkv, dq = dkv_options(G, D, DV, BS, 2), dq_options(G, D, DV, BS, 2)
        GT, *dq_sides = tile_sides(G, D, DV)
        for rows, threads, columns in (
            (dkv["BT"], dkv["threads"], (dkv["BR"], *dkv_sides(D, DV, 2))),
            (GT, dq["threads"], (dq["BT"], *dq_sides)),
        ):
            across = max(1, threads // 32 // (rows // 16))
            widths = columns[1:] if rows >= 64 else columns
            step = 16 if rows >= 64 and threads >= 128 else 8
            assert not [n for n in widths if n % (across * step)], (G, D, DV, BS)


def drawn(seed: int) -> tuple[str, str, str, tuple[int, ...]]:
    """An architecture with a dtype, a kernel, and its shape; each group has its seed."""
    draw = random.Random(f"lowering {seed}")
    arch, dtype = draw.choice((*[("sm_90", "float16")] * 3, ("sm_90", "float32"),
                               ("sm_80", "bfloat16")))  # fmt: skip
    widths = (draw.choice(WIDTHS), draw.choice(WIDTHS))
    shape = (2, GROUPS[seed % len(GROUPS)], *widths, draw.choice(BLOCKS))
    return arch, dtype, draw.choice(("dq", "dkv", "dkv", "forward", "sum")), shape


# the smallest one that found no layout, with blocks of 64: two warp groups shared 16 columns
SMALLEST = ("sm_90", "float16", "dkv", (2, 1, 16, 256, 64))


@pytest.mark.parametrize(
    ("arch", "dtype", "name", "shape"),
    [
        pytest.param(*SMALLEST, id="smallest", marks=pytest.mark.exhaustive),
        # of the small groups, three and four say what two and five do; 16, 17, 33 and 64 are those
        # of the tests around this one
        *(
            pytest.param(*drawn(seed), marks=pytest.mark.exhaustive)
            for seed, group in enumerate(GROUPS)
            if group in (1, 3, 4, 8, 32)
        ),
    ],
)
def test_groups_and_widths_lower(arch: str, dtype: str, name: str, shape: tuple[int, ...]) -> None:
    """Any group, any pair of widths."""
    H, G, D, DV, BS = shape
    if name in ("dq", "dkv"):
        assert "__global__" in cuda(name, shape, dtype, arch)
        return
    BT = dkv_options(G, D, DV, BS, ITEMSIZE[dtype])["BT"]
    kernel = (
        kernels.build_sum(H, D, DV, BS, dtype, BT=BT)
        if name == "sum"
        else tilelang_forward.build_kernel(H, G, D, DV, BS, dtype)
    )
    assert "__global__" in lowering.cuda(kernel, arch, ALL_THREADS_LOAD)


# -- the same gradients --


def of_lists(
    problem: Problem, device: str, has_factors: bool = False
) -> tuple[tuple, dict[str, object]]:
    """The arguments of a backward, and its sizes."""
    call = problem.make(device=device)
    lengths = (problem.B, problem.N, problem.M)
    rows = query_rows(*lengths, causal=True, cu_seqlens=None, device=call.q.device)
    options = {"block_counts": None, "include_own_block": False}
    ids = block_list(call.ids, rows, block_size=problem.BS, **options)
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    if has_factors:
        factors = torch.linspace(0.5, 2, ids.numel(), device=device).view(ids.shape)
        sizes["slot_scale"] = factors
    o, lse = selected_attention.forward(call.q, call.k, call.v, ids, rows, **sizes)
    d_o, d_lse = (torch.linspace(-1, 2, x.numel(), device=device).view_as(x) for x in (o, lse))
    return (d_o, d_lse, call.q, call.k, call.v, o, lse, ids, rows), sizes


def of_windows(shape: Shape, device: str) -> tuple[tuple, dict[str, object]]:
    q, k, v = (x.to(device) for x in shape.make())
    rows = query_rows(shape.B, shape.N, shape.M, causal=True, cu_seqlens=None, device=q.device)
    sizes = {"window_size": shape.window, "scale": shape.D**-0.5}
    o, lse = sliding_window.forward(q, k, v, rows, **sizes)
    d_o, d_lse = (torch.linspace(-1, 2, x.numel(), device=device).view_as(x) for x in (o, lse))
    return (d_o, d_lse, q, k, v, o, lse, rows), sizes


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tiles of a small problem are cut."""
    monkeypatch.setattr(backward_tables, "CHUNK_ROWS", {2: 6, 4: 6})


@pytest.mark.exhaustive
@places
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    "BS", [24, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (16, 150))]
)
def test_blocks_in_chunks(BS: int, backend: str, device: str) -> None:
    """Blocks of one tile, of part of a tile, and of several."""
    skip_unless_runs(backend, device)
    arguments, sizes = of_lists(Problem(N=30, M=170, BS=BS), device)
    found = launch.selected_backward(*arguments, **sizes)
    assert_close(found, gradients.selected_backward(*arguments, **sizes))


@places
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (Shape(N=20, window=7), 2**10),
        (Shape(N=20, window=7), 6),
        (Shape(B=2, N=80, M=140, window=30), 6),
    ],
    ids=["whole tiles", "chunks", "chunks of a batch"],
)
def test_gradients_of_windows_are_added(
    shape: Shape, rows: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what stands in `out`, in place. The table of chunks has more places than chunks; those
    left over write nothing."""
    skip_unless_runs(backend, device)
    monkeypatch.setattr(backward_tables, "CHUNK_ROWS", {2: rows, 4: rows})
    arguments, sizes = of_windows(shape, device)
    g = torch.Generator().manual_seed(2)
    before = [torch.randn(x.shape, generator=g).to(device) for x in arguments[2:5]]
    out = tuple(x.clone() for x in before)
    found = launch.window_backward(*arguments, **sizes, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    right = tile_gradients.window_backward(*arguments, **sizes)
    assert_close(found, tuple(a + b for a, b in zip(before, right, strict=True)))


@places
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options", "has_factors"),
    [("dq_options", {"BT": 16}, True), ("dq_options", {"num_stages": 2}, False),
     ("dkv_options", {"BR": 32}, True), ("dkv_options", {"num_stages": 1}, False)],
    ids=str,
)  # fmt: skip
def test_options_change_no_gradient(
    name: str, options: dict[str, int], has_factors: bool, backend: str, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Steps of a part of a block, loads that run ahead or not, more rows a step."""
    skip_unless_runs(backend, device)
    usual = getattr(launch, name)
    monkeypatch.setattr(launch, name, lambda *a, **k: usual(*a, **k) | options)
    arguments, sizes = of_lists(Problem(N=30, M=60, BS=40), device, has_factors)
    found = launch.selected_backward(*arguments, **sizes)
    right = gradients.selected_backward(*arguments, **sizes)
    assert_close(found, right)
    if has_factors:
        torch.testing.assert_close(found[3], right[3], atol=1e-5, rtol=1e-4)


@places
def test_rows_of_a_tile_behind_the_block_are_not_read(backend: str, device: str) -> None:
    """Block 0 of 24 keys lies in a tile of 32, whose last rows are seen, and not listed."""
    skip_unless_runs(backend, device)
    arguments, sizes = of_lists(Problem(N=20, M=60, BS=24, S=1), device)
    d_o, d_lse, q, k, v, *_, ids, rows = arguments
    lists = (torch.zeros_like(ids), rows)
    saved = selected_attention.forward(q, k, v, *lists, **sizes)
    expected = launch.selected_backward(d_o, d_lse, q, k, v, *saved, *lists, **sizes)
    k[:, 24:], v[:, 24:] = torch.nan, torch.nan
    found = launch.selected_backward(d_o, d_lse, q, k, v, *saved, *lists, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert all(x.isfinite().all() for x in found[:3])


@places
def test_new_lengths_compile_nothing(backend: str, device: str) -> None:
    """Queries, keys, batch and slots are open."""
    skip_unless_runs(backend, device)

    def run(**lengths: int) -> None:
        arguments, sizes = of_lists(
            Problem(**{"N": 8, "M": 8, "S": 5, "BS": 24, **lengths}), device
        )
        launch.selected_backward(*arguments, **sizes)

    run()
    before = launch.compiled.cache_info().misses
    run(N=1, M=99)
    run(B=3, N=5, M=44, S=16)
    assert launch.compiled.cache_info().misses == before


# -- the options --


@pytest.mark.parametrize("memory", [99 * 1024, SHARED_MEMORY], ids=["sm_86", "sm_90"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [1, 64, 192, 256])
def test_options_suit_the_gpu(width: int, itemsize: int, memory: int) -> None:
    """Tiles that a program can hold, in powers of two, and warps that take equal shares."""
    row_bytes = 2 * tile_rows(width) * itemsize
    for G, BS in ((1, 5), (16, 33), (17, 64), (64, 200)):
        sizes = (G, width, width, BS, itemsize, memory)
        dq, dkv = dq_options(*sizes), dkv_options(*sizes)
        assert {dq["BT"], dkv["BT"], dkv["BR"]} <= {16, 32, 64}
        assert dq["threads"] % 32 == dkv["threads"] % (2 * dkv["BT"]) == 0
        tiles = tile_rows(G) + dq["num_stages"] * dq["BT"]
        assert tiles * row_bytes <= memory or dq["BT"] == 16
        assert (dkv["BT"] + dkv["num_stages"] * dkv["BR"]) * row_bytes <= memory


@pytest.mark.parametrize(
    ("G", "DV", "dtype"),
    [
        pytest.param(G, DV, dtype, marks=[] if (G, DV, dtype) in quick else pytest.mark.exhaustive)
        for quick in [{(33, 40, "float16")}]
        for i, (G, DV) in enumerate(
            ((33, 40), (1, 16), (16, 128), (20, 24), (33, 80), (3, 136), (64, 256))
        )
        for dtype in (("float16", "float32")[i % 2],)
    ],
)
def test_sums_of_rows_of_any_width_lower(G: int, DV: int, dtype: str) -> None:
    """Threads cannot share out a tile of 48 columns, nor of 48 rows: the tile is larger, then."""
    assert "LSE2" in lowering.cuda(kernels.build_delta(2, G, DV, dtype), "sm_90", ALL_THREADS_LOAD)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "G", "D", "BS"),
    [("forward", 33, 136, 32), ("forward", 96, 128, 100), ("dq", 64, 136, 100), ("dq", 96, 80, 32)],
)
def test_large_and_odd_groups_lower(name: str, G: int, D: int, BS: int) -> None:
    """Threads in powers of two, and sides that a warp group takes."""
    sizes = (2, G, D, D, BS, "float16")
    if name == "forward":
        kernel = tilelang_forward.build_kernel(*sizes)
    else:
        kernel = kernels.build_dq(*sizes, **dq_options(G, D, D, BS, 2))
    assert "Q_shared" in lowering.cuda(kernel, "sm_90", ALL_THREADS_LOAD)
