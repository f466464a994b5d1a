"""TileLang's attention to summaries and choice of blocks, beside what every backend is asked: what
they become in CUDA, chunks of rows, rows that are not to be read, and the options."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from branches import Shape
from places import places_of, skip_unless_runs
from torch import Tensor

from nsa_tutorial.kernels.tables import cells as score_cells
from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.selected_attention import QueryRows, query_rows
from nsa_tutorial.training import tile_gradients

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels.tilelang import launch_options as tiles
from nsa_tutorial.kernels.tilelang.choice.launch import select_blocks
from nsa_tutorial.kernels.tilelang.choice.pick import build_pick
from nsa_tutorial.kernels.tilelang.choice.scores import build_score
from nsa_tutorial.kernels.tilelang.compiling import A_GROUP_LOADS, compiled
from nsa_tutorial.kernels.tilelang.compressed import backward, forward, launch

places = places_of(["tilelang"])
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MEMORY = {"sm_80": 163 * 1024, "sm_90": SHARED_MEMORY}


# -- what it becomes --

SHAPES = {  # H, G, D, DV
    "shown": (4, 16, 128, 128),
    "odd": (2, 3, 24, 40),
    "80": (1, 5, 80, 80),
    "192 and 128": (1, 4, 192, 128),
    "256": (1, 4, 256, 256),
    "16 and 256": (1, 1, 16, 256),
    "not of 16 bytes": (2, 3, 20, 3),
}


def has_tma(shape: tuple[int, ...], dtype: str, arch: str) -> bool:
    return arch == "sm_90" and not any(n * ITEMSIZE[dtype] % 16 for n in shape[2:])


def built(name: str, shape: tuple[int, ...], dtype: str, arch: str) -> object:
    """A kernel, with the options of that architecture."""
    H, G, D, DV = shape
    where = (ITEMSIZE[dtype], MEMORY[arch])
    is_tma = has_tma(shape, dtype, arch)
    if name.startswith("score"):
        kinds = (1, 1, 1) if name == "score, a summary at a time" else (4, 2, 2)
        return build_score(H, G, D, *kinds, dtype, **tiles.score_options(G, D, *where))
    build, options = {
        "attend": (forward.build_attend, tiles.attend_options),
        "dq": (backward.build_dq, tiles.summary_dq_options),
        "dkv": (backward.build_dkv, tiles.summary_dkv_options),
    }[name]
    return build(H, G, D, DV, dtype, **options(D, DV, *where), has_tma=is_tma)


@functools.cache
def cuda(name: str, shape: tuple[int, ...], dtype: str, arch: str) -> str:
    """What it becomes in CUDA."""
    return lowering.cuda(built(name, shape, dtype, arch), arch, A_GROUP_LOADS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["attend", "score", "dq", "dkv"])
def test_a_warp_group_loads_by_tma(name: str) -> None:
    """Others compute, on tensor cores, and none of them waits for an address."""
    source = cuda(name, SHAPES["shown"], "float16", "sm_90")
    loads = {"attend": 3, "score": 2, "dq": 4, "dkv": 6}[name]  # tensors that come as tiles
    assert source.count("tl::tma_load(") == loads
    assert "warpgroup_reg_dealloc<24>" in source, "the warps that load need no registers"
    assert "cp_async" not in source
    assert "wgmma" in source
    # the weights go from one product to the next without leaving registers
    assert ("wgmma_rs<" in source) == (name != "score")


# Each kernel on each GPU, and every shape with two kernels or more; where the tests around this one
# look at a kernel too, it is theirs.
LOWERED = {
    "attend": ("shown", "odd", "not of 16 bytes"),
    "score": ("shown", "256", "16 and 256"),
    "score, a summary at a time": ("not of 16 bytes",),
    "dq": ("shown", "192 and 128", "80"),
    "dkv": ("16 and 256", "192 and 128", "256"),
}
GPUS = (("sm_90", "float16"), ("sm_90", "float32"), ("sm_80", "bfloat16"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "gpu", "shape"),
    [(name, *row) for name, shapes in LOWERED.items() for row in zip(GPUS, shapes, strict=False)],
    ids=str,
)
def test_every_shape_lowers(name: str, gpu: tuple[str, str], shape: str) -> None:
    arch, dtype = gpu
    source = cuda(name, SHAPES[shape], dtype, arch)
    on_tensor_cores = "mma" in source.replace("wgmma_fence", "")
    assert on_tensor_cores == (dtype != "float32"), "fp32 would be rounded to TF32 there"


# TileLang puts some barriers into one branch of an `if` alone; what other threads have written, or
# have yet to read, then goes unguarded on the other branch.
BARRIER = r"(__syncthreads\(\)|__sync_thread_partial\(\d+, \d+\));\s*"


@pytest.mark.parametrize(
    ("name", "dtype", "arch", "barriers"),
    [
        ("attend", "float32", "sm_80", 1), ("attend", "float16", "sm_90", 0),
        ("dq", "float16", "sm_80", 1), ("dq", "float16", "sm_90", 0),
        ("dkv", "float32", "sm_90", 1), ("dkv", "float16", "sm_90", 0),
    ],
)  # fmt: skip
def test_a_barrier_stands_where_tilelang_leaves_one_out(
    name: str, dtype: str, arch: str, barriers: int
) -> None:
    """And nowhere else: a warp group that loads would wait for it."""
    script = built(name, SHAPES["shown"], dtype, arch).script()
    assert script.count("storage_sync") == barriers


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_weights_in_shared_memory_are_whole_before_they_are_read(arch: str) -> None:
    source = cuda("dkv", SHAPES["odd"], "float32", arch)
    branches = r"if \(\(!is_whole \|\| !is_apart\) \|\| !is_read\)"  # masked, or not
    *_, products = re.finditer(branches, source)
    assert re.search(BARRIER + "$", source[: products.start()])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "dtype", "shape"), [("attend", "float32", "shown"), ("dq", "bfloat16", "80")]
)
def test_all_have_read_a_tile_before_it_is_overwritten(name: str, dtype: str, shape: str) -> None:
    """Where all threads load, a step ends with a barrier on either branch: in the loop, and in the
    last steps behind it."""
    source = cuda(name, SHAPES[shape], dtype, "sm_80")
    assert len(re.findall(BARRIER + r"\} else \{", source)) == 2


# all but the narrow one are of the shapes above
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attend", "odd"), ("attend", "192 and 128"), ("dq", "192 and 128"), ("dq", "80"),
        ("dkv", "odd"), ("dkv", "192 and 128"),
    ],
)  # fmt: skip
def test_a_threads_own_numbers_begin_where_its_array_does(name: str, shape: str) -> None:
    """In fp32, and whatever the widths: with one of 48 or 192, the first threads once began four
    numbers before it."""
    source = cuda(name, SHAPES[shape], "float32", "sm_90")
    arrays = re.findall(r"^\s+float (\w+)\[\d+\];", source, re.MULTILINE)
    assert arrays
    for array in arrays:
        places = re.findall(rf"\b{array}(?: \+ |\[)(.*)", source)
        assert not any(re.match(r"\(+int\)threadIdx", place) for place in places)


@pytest.mark.parametrize("num_blocks", [1, 32, 1024, 2**15])
def test_a_list_is_made_by_whole_warps(num_blocks: int) -> None:
    """Blocks in equal shares, of at most 32 up to the largest program."""
    threads = tiles.pick_threads(num_blocks)
    assert threads % 32 == 0
    assert num_blocks <= 32 * threads


@pytest.mark.parametrize(
    "num_blocks", [32, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 1024, 2**15))]
)
def test_a_list_of_any_length_lowers(num_blocks: int) -> None:
    threads = tiles.pick_threads(num_blocks)
    kernel = build_pick(
        2, 64, 4, 2, 5, num_blocks, has_counts=True, threads=threads
    )  # fmt: skip
    assert "BlockIndices" in lowering.cuda(kernel, "sm_90", A_GROUP_LOADS)


@pytest.mark.parametrize("memory", [99 * 1024, *MEMORY.values()], ids=["sm_86", *MEMORY])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [1, 64, 192, 256])
def test_options_suit_the_gpu(width: int, itemsize: int, memory: int) -> None:
    """A program can hold its tiles, and a warp has 16 of their rows, or two where they are wide."""
    row = tiles.tile_rows(width) * itemsize
    attend = tiles.attend_options(width, width, itemsize, memory)
    score = tiles.score_options(16, width, itemsize, memory)
    dq = tiles.summary_dq_options(width, width, itemsize, memory)
    dkv = tiles.summary_dkv_options(width, width, itemsize, memory)
    stages = attend["num_stages"]
    assert (attend["BQ"] + 2 * stages * attend["BT"]) * row <= memory
    assert (score["num_stages"] * score["BQ"] + score["BT"]) * row <= memory
    assert 2 * (dq["BQ"] + dq["num_stages"] * dq["BT"]) * row <= memory
    assert 2 * (dkv["BT"] + dkv["num_stages"] * dkv["BR"]) * row <= memory
    for options, rows in ((attend, "BQ"), (score, "BQ"), (dq, "BQ"), (dkv, "BT")):
        assert options["threads"] % 32 == 0
        assert options["threads"] in (2 * options[rows], 4 * options[rows])


# -- the same numbers --


def problem(shape: Shape, device: str) -> tuple[list[Tensor], QueryRows, QueryRows]:
    """Queries and summaries, and the rows among the keys and among the summaries."""
    cu_seqlens = None if shape.offsets is None else shape.offsets.to(device)
    q, k, v = (x.to(device) for x in shape.make())
    num_summaries = len(shape.summaries())
    rows = query_rows(
        shape.B, shape.N, shape.M, causal=True, cu_seqlens=cu_seqlens, device=q.device
    )  # fmt: skip
    sizes = {"length": shape.length, "stride": shape.stride, "cu_seqlens": cu_seqlens}
    summaries = compression.summary_rows(rows, shape.M, **sizes)
    return [q, k[:, :num_summaries], v[:, :num_summaries]], rows, summaries


def gradients(shape: Shape, device: str) -> tuple[tuple, tuple]:
    """Those of the kernels, and of the reference."""
    tensors, _, rows = problem(shape, device)
    scale = shape.D**-0.5
    o, lse = compression.compressed_attention(*tensors, rows, scale=scale)
    d_o, d_lse = (torch.linspace(-1, 2, x.numel(), device=device).view_as(x) for x in (o, lse))
    d_lse = torch.where(lse.isfinite(), d_lse, 0)
    d_o[:, 4:7], d_lse[:, 4:7] = 0, 0  # nobody asks for them
    call = (d_o, d_lse, *tensors, o, lse, rows)
    found = launch.compressed_backward(*call, scale=scale)
    return found, tile_gradients.compressed_backward(*call, scale=scale)


@pytest.mark.exhaustive
@places
@pytest.mark.parametrize(
    ("shape", "chunk_rows"),
    [
        (Shape(N=75, M=75, length=2, stride=1), 26),
        (Shape(N=75, M=75, length=2, stride=1, cu=(0, 9, 9, 10, 75)), 26),
        (Shape(N=75, M=75, length=2, stride=1, cu=(0, 9, 9, 10, 75)), 2**10),
        (Shape(B=2, N=30, M=41, length=2, stride=1), 26),
    ],
    ids=["one, chunks", "packed, chunks", "packed, whole tiles", "batch, chunks"],
)
def test_gradients_of_tiles_and_of_chunks(
    shape: Shape, chunk_rows: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks begin in the middle of a step, and tiles hold summaries of several sequences."""
    skip_unless_runs(backend, device)
    monkeypatch.setattr(backward_tables, "CHUNK_ROWS", {2: chunk_rows, 4: chunk_rows})
    found, right = gradients(shape, device)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# the kernels of sparse/test_selection_on_backends.py
SMALL = Shape(N=50, M=50, G=2, D=16, length=4, stride=2, BS=8)


def choose(shape: Shape, device: str) -> Tensor:
    (q, k, _), rows, summaries = problem(shape, device)
    return select_blocks(
        q, k, None, rows, summaries, M=shape.M, top_n=4, block_size=shape.BS, length=shape.length,
        stride=shape.stride, num_initial=1, num_local=1, scale=shape.D**-0.5,
    )  # fmt: skip


@pytest.mark.exhaustive
@places
def test_chunks_of_queries_change_no_list(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all scores fit the workspace or 128 queries' alone."""
    skip_unless_runs(backend, device)
    shape = replace(SMALL, N=150, M=150)
    expected = choose(shape, device)
    monkeypatch.setattr(score_cells, "WORKSPACE", 4 * 2 * shape.H * 19 * 140)
    assert torch.equal(choose(shape, device), expected)


@places
def test_equal_blocks_go_by_their_ids(backend: str, device: str) -> None:
    """Where no query tells summaries apart, the lowest free blocks are taken."""
    skip_unless_runs(backend, device)
    shape = replace(SMALL, N=64, M=64, magnitude=0.0)
    ids = choose(shape, device)[0, -1]
    assert ids.tolist() == [[0, 1, 2, 7]] * shape.H


@places
def test_new_lengths_compile_nothing(backend: str, device: str) -> None:
    """Queries, keys, batch and chunks are open."""
    skip_unless_runs(backend, device)

    def run(**lengths: int) -> None:
        choose(replace(SMALL, **lengths), device)
        gradients(Shape(**lengths), device)

    run(N=40, M=40)
    before = compiled.cache_info().misses
    run(N=33, M=60)
    run(N=8, M=34)
    assert compiled.cache_info().misses == before
