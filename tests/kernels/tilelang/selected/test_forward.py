"""TileLang's forward beside what `tests/sparse` asks of every backend: what it becomes in CUDA,
windows, what is never read, the launch table, and variants that compute the same."""

from __future__ import annotations

import pytest
import torch
from places import name_of, pairwise, places_of, product, skip_unless_runs
from selection import Call, Problem, assert_within_budget
from torch import Tensor

from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows
from nsa_tutorial.sparse.sliding_window import as_selection

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.bench.variants import tilelang_variants
from nsa_tutorial.kernels.tilelang import launch_options as tilelang_tiles
from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
from nsa_tutorial.kernels.tilelang.selected import forward as kernel
from nsa_tutorial.kernels.tilelang.selected import launch as tilelang_launch

places = places_of(["tilelang"])
HALF = torch.float16


def rows_of(problem: Problem, device: str) -> QueryRows:
    cu = None if problem.cu is None else torch.tensor(problem.cu, device=device)
    sizes = (problem.B, problem.N, problem.M)
    return query_rows(*sizes, causal=problem.causal, cu_seqlens=cu, device=torch.device(device))


def arguments(problem: Problem, dtype: torch.dtype, device: str) -> tuple[Call, tuple, dict]:
    """A call, and the same as arguments of `launch`."""
    call, rows = problem.make(dtype, device), rows_of(problem, device)
    lists = {"block_counts": call.options["block_counts"], "include_own_block": problem.own}
    ids = block_list(call.ids, rows, block_size=problem.BS, **lists)
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    return call, (call.q, call.k, call.v, ids, rows), sizes


# -- what it becomes --

SHAPES = {  # H, G, D, DV, BS
    "shown": (4, 16, 128, 128, 64),
    "wide": (4, 16, 256, 256, 128),
    "odd": (2, 17, 192, 128, 33),
    "group of 64": (4, 64, 128, 128, 64),
}


@pytest.mark.parametrize(
    ("arch", "dtype", "shape", "is_window"),
    [
        pytest.param(
            arch, name_of(dtype), shape, is_window,
            id=f"{arch}-{name_of(dtype)}-{name}{'-window' * is_window}",
            marks=pytest.mark.exhaustive,
        )
        for (arch, dtype), name, is_window in dict.fromkeys((
            (("sm_90", HALF), "shown", False),
            *pairwise(
                (("sm_90", torch.bfloat16), ("sm_80", HALF)), ("shown", "odd", "group of 64"),
                (False, True),
            ),
            (("sm_90", torch.float32), "odd", False), (("sm_90", HALF), "wide", False),
        ))
        for shape in (SHAPES[name],)
    ],
)  # fmt: skip
def test_every_copy_runs_ahead(arch: str, dtype: str, shape: tuple, is_window: bool) -> None:
    """Keys and values, for the first block and for the next one, 16 bytes at a time, zeros where
    the row sees nothing; and no address is cut to 32 bits."""
    function = kernel.build_kernel(*shape, dtype=dtype, is_window=is_window)
    source = lowering.cuda(function, arch, ALL_THREADS_LOAD)
    assert source.count("cp_async_gs_conditional<16>") == source.count("cp_async_gs") == 4
    assert "(int64_t)first_key" in source
    on_tensor_cores = "mma_sync" in source or "wgmma" in source
    assert on_tensor_cores == (dtype != "float32"), "fp32 would be rounded to TF32 there"
    assert "tf32" not in source.lower()


# -- windows --


@places
@pytest.mark.parametrize("cu", [None, (0, 7, 7, 40)], ids=["a prefix", "packed"])
def test_a_window_is_the_list_of_all_its_blocks(
    cu: tuple[int, ...] | None, backend: str, device: str
) -> None:
    """With no list it walks what the list names, to the last bit."""
    skip_unless_runs(backend, device)
    problem = Problem(N=40 if cu else 9, M=40, cu=cu)
    _, (q, k, v, _, rows), sizes = arguments(problem, torch.float32, device)
    ids, rows = as_selection(rows, window_size=37, block_size=16)
    R, H = len(rows.first_key), problem.H
    listed = kernel.launch(q, k, v, ids.expand(R, H, -1).contiguous(), rows, **sizes)
    no_list = ids.new_empty(R, H, 0)
    window = kernel.launch(q, k, v, no_list, rows, is_window=True, **sizes)
    assert torch.equal(window[0], listed[0])
    assert torch.equal(window[1], listed[1])


# -- what is never read --

INT = torch.iinfo(torch.int32)
LISTS = {  # all show block 1, keys 24 to 37 of the row; block 0 is seen and not listed
    "empty slots": [-1, 1, -1],
    "the future": [2, 1, 3],
    "ids that overflow": [INT.min, 1, INT.max],
    "products that overflow": [1, 2**27, -(2**27)],
}


@places
@pytest.mark.parametrize("slots", LISTS.values(), ids=LISTS)
def test_nothing_but_the_listed_is_read(slots: list[int], backend: str, device: str) -> None:
    """NaN before the row's first key, behind its last one, and in the block that is not listed."""
    skip_unless_runs(backend, device)
    g = torch.Generator().manual_seed(0)
    first, visible, BS = 10, 38, 24  # tiles of 32 rows
    q, k, v = (torch.randn(1, n, 1, 16, generator=g).to(device) for n in (1, 90, 90))
    spoiled_k, spoiled_v = (torch.full_like(x, torch.nan) for x in (k, v))
    listed = slice(first + BS, first + visible)
    spoiled_k[:, listed], spoiled_v[:, listed] = k[:, listed], v[:, listed]
    rows = QueryRows(*(torch.tensor([n], dtype=torch.int32, device=device) for n in
                       (first, visible, visible - 1)))  # fmt: skip
    ids = torch.tensor([[slots]], dtype=torch.int32, device=device)
    o, lse = kernel.launch(q, spoiled_k, spoiled_v, ids, rows, block_size=BS, scale=0.25)
    scores = 0.25 * (k[0, listed, 0] @ q[0, 0, 0])
    expected = torch.softmax(scores, 0) @ v[0, listed, 0]
    torch.testing.assert_close(o.flatten(), expected)
    torch.testing.assert_close(lse.flatten()[0], scores.logsumexp(0))


@places
def test_rows_of_a_tile_behind_the_block_are_not_read(backend: str, device: str) -> None:
    """Block 0 of 24 keys lies in a tile of 32, whose last rows are seen, and not listed."""
    skip_unless_runs(backend, device)
    problem = Problem(N=1, M=48, H=1, G=1, D=16, DV=16, BS=24, S=1)
    _, (q, k, v, ids, rows), sizes = arguments(problem, torch.float32, device)
    ids = torch.zeros_like(ids)
    expected = kernel.launch(q, k, v, ids, rows, **sizes)
    k[:, 24:], v[:, 24:] = torch.nan, torch.nan
    for found, right in zip(kernel.launch(q, k, v, ids, rows, **sizes), expected, strict=True):
        assert torch.equal(found, right)


# -- shapes --

ODD = {
    "everything 1": Problem(N=3, M=3, H=1, G=1, D=1, DV=1, BS=1, S=2),
    "nothing a multiple of 16": Problem(N=9, M=41, H=3, G=5, D=7, DV=9, BS=3, S=5),
    "wider keys, group of 17": Problem(N=5, M=70, H=1, G=17, D=72, DV=40, BS=33, S=2),
    "wider values, a block past the end": Problem(N=4, M=20, G=2, D=24, DV=56, BS=40, S=1),
}


@product("problem", ODD, ["tilelang"], {torch.float32: ["everything 1"], HALF: ["everything 1"]})
def test_odd_shapes(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    call, given, sizes = arguments(problem, dtype, device)
    o, lse = kernel.launch(*given, **sizes)
    assert_within_budget(o, call.truth()[0], call.plain()[0], "o")
    assert_within_budget(lse, call.truth()[1], call.plain()[1], "lse")


@places
def test_new_lengths_compile_nothing(backend: str, device: str) -> None:
    """Queries, keys, batch, slots and packing are open."""
    skip_unless_runs(backend, device)

    def run(**lengths: object) -> None:
        problem = Problem(**{"N": 8, "M": 8, "S": 5, **lengths})
        _, given, sizes = arguments(problem, torch.float32, device)
        kernel.launch(*given, **sizes)

    run()
    before = kernel.compiled.cache_info().misses
    run(N=1, M=99)
    run(B=3, N=5, M=44, S=16)
    run(S=1, N=64, M=64, cu=(0, 7, 64))
    assert kernel.compiled.cache_info().misses == before


# -- launching --


@pytest.mark.parametrize("bytes_per_token", [64, 512, 2048])
@pytest.mark.parametrize("block_size", [1, 64, 128, 200, 1024, 131])
def test_long_blocks_are_cut_in_equal_parts(block_size: int, bytes_per_token: int) -> None:
    """The parts name the same keys, in the same order, and none is longer than a tile holds."""
    ids = torch.tensor([[[3, -1, 0, INT.max, -7]]], dtype=torch.int32)
    parts, size = tilelang_launch.split_long_blocks(ids, block_size, bytes_per_token)
    assert size <= 128 and size * bytes_per_token <= tilelang_launch.LARGEST_KERNEL_TILE
    assert block_size % size == 0 and parts.dtype == ids.dtype

    def keys(ids: Tensor, size: int) -> list[int]:
        blocks = [i for i in ids.flatten().tolist() if 0 <= i < 4096]
        return [i * size + j for i in blocks for j in range(size)]

    assert keys(parts, size) == keys(ids, block_size)


@pytest.mark.parametrize("G", [1, 16, 17, 48, 64, 100, 128, 320])
@pytest.mark.parametrize("row", tilelang_tiles.LAUNCH_TABLE, ids=str)
def test_warps_take_equal_shares(row: tuple[int, int, int, int], G: int) -> None:
    """Of a group's tile, in threads that a GPU starts."""
    width, block, warps, stages = row
    options = tilelang_tiles.launch_options(G, width, width, block)
    shares, rest = divmod(options["threads"], 32 * warps)
    rows, *_ = tilelang_tiles.tile_sides(G, width, width)
    assert rest == 0 and rows >= G and rows % (16 * shares) == 0
    assert options["threads"] <= 1024 and options["num_stages"] == stages


# -- variants --

VARIANTS = {
    "values through registers": ("values through registers", {}),
    "weights through shared memory": ("weights through shared memory", {}),
    "64 threads": ("", {"threads": 64}),
    "no stage": ("", {"stages": 0}),
    "slots fixed, 2 stages": ("", {"slots": 3, "stages": 2}),
}


@product("change", VARIANTS, ["tilelang"], {HALF: VARIANTS})
def test_a_variant_computes_the_same(
    change: tuple[str, dict], dtype: torch.dtype, backend: str, device: str
) -> None:
    """By another kernel."""
    skip_unless_runs(backend, device, dtype)
    problem = Problem(N=12, M=50, G=16, D=32, DV=32, BS=16, S=3)
    _, given, sizes = arguments(problem, dtype, device)
    name, numbers = change
    variant = tilelang_variants.variant(name, **numbers)
    built = [module.build_kernel(2, 16, 32, 32, 16) for module in (variant, kernel)]
    assert built[0].script() != built[1].script()
    found, expected = variant.launch(*given, **sizes), kernel.launch(*given, **sizes)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("line", "times"), [("no such line", 0), ("T.clear(", 3)], ids=str)
def test_a_line_that_is_gone_is_an_error(
    line: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant never is the kernel itself, unseen."""
    monkeypatch.setitem(tilelang_variants.CHANGES, "gone", [(line, "")])
    with pytest.raises(ValueError, match=f"found {times} times, expected once: '{line[:7]}"):
        tilelang_variants.variant("gone")
