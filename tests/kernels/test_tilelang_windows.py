"""Windows by tiles of queries in TileLang: outputs within the budget, whatever a tile holds, and
what the kernel becomes in CUDA."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from branches import Shape, assert_attention
from places import places_of, product, skip_unless_runs
from torch import Tensor

from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY
from nsa_tutorial.sparse.selected_attention import QueryRows, query_rows

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels import tilelang_windows

pytestmark = pytest.mark.usefixtures("one_thread")
places = places_of(["tilelang"])

# All of these are one kernel, compiled once.
SMALL = Shape(N=40, M=40, H=2, G=3, D=16, DV=16, window=9)
BATCH = replace(SMALL, B=2, N=9, M=90)
LONG = replace(SMALL, N=75, M=90, window=70)
SHAPES = {
    "a batch of odd lengths": BATCH,
    "packed, one empty": replace(SMALL, cu=(0, 3, 3, 5, 40)),
    "steps without a mask": LONG,
    "window of one": replace(SMALL, window=1),
    "window longer than the sequence": replace(SMALL, window=1000),
    "one query, a batch": replace(SMALL, B=3, N=1, M=70),
    "packed, long windows": replace(SMALL, N=150, M=150, window=70, cu=(0, 131, 150)),
    "G 1": replace(SMALL, G=1),
    "G 16": replace(SMALL, N=5, M=90, H=1, G=16, window=64),
    "G 20, a batch": replace(SMALL, B=2, N=5, M=80, H=1, G=20, window=70),
    "G 64": replace(SMALL, N=3, M=80, H=1, G=64, window=66),
    "odd widths": replace(SMALL, N=9, D=24, DV=80, window=7),
    "not of 16 bytes": replace(SMALL, N=9, D=20, DV=3),
    "wide keys": replace(SMALL, N=9, M=45, H=1, D=192, DV=128, window=35),
    "as wide as can be": replace(SMALL, N=9, M=45, H=1, D=256, DV=256, window=35),
    "large": Shape(N=3000, M=4000, H=2, G=16, D=128, DV=128, window=512),
    "large, packed": Shape(
        N=3000, M=3000, H=2, G=4, D=64, DV=128, window=200, cu=(0, 700, 1111, 1111, 1112, 3000)
    ),
}
QUICK = {torch.float32: {"a batch of odd lengths", "packed, one empty", "steps without a mask"}}
ON_CPU = {"tilelang": SHAPES.keys() - {"large", "large, packed"}}


def arguments(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], QueryRows, dict[str, float]]:
    """`q, k, v`, the rows, and the sizes of the call."""
    inputs = [x.to(device) for x in shape.make(dtype)]
    cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
    place = {"causal": True, "cu_seqlens": cu_seqlens, "device": torch.device(device)}
    rows = query_rows(shape.B, shape.N, shape.M, **place)
    return inputs, rows, {"window_size": shape.window, "scale": shape.D**-0.5}


@product("shape", SHAPES, ["tilelang"], QUICK, slow=ON_CPU)
def test_outputs(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if device == "cpu" and shape.N > 1000:
        pytest.skip("for a GPU")
    inputs, rows, sizes = arguments(shape, dtype, device)
    o, lse = tilelang_windows.launch(*inputs, rows, **sizes)
    mask = shape.over_heads(shape.seen_keys(shape.window)).to(device)
    assert_attention(o, lse, *inputs, mask)


@places
def test_the_first_step_may_show_a_row_nothing(backend: str, device: str) -> None:
    """Its maximum, the least number, leaves the range if it is multiplied by a scale above 1."""
    skip_unless_runs(backend, device)
    (q, k, v), rows, sizes = arguments(LONG, device=device)
    (o, lse), (o_right, lse_right) = (
        tilelang_windows.launch(x, k, v, rows, **sizes | {"scale": scale})
        for x, scale in ((q, 2.0), (q * 2, 1.0))
    )
    assert torch.equal(o, o_right)
    assert torch.equal(lse, lse_right)


@places_of(["tilelang"], slow=["tilelang"])
@pytest.mark.parametrize("BQ", [16, 32])
def test_rows_of_a_tile_change_nothing_but_rounding(BQ: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    inputs, rows, sizes = arguments(LONG, device=device)
    expected = tilelang_windows.launch(*inputs, rows, **sizes)
    options = {"BQ": BQ, "threads": 2 * BQ, "BT": 16, "num_stages": 2}
    found = tilelang_windows.launch(*inputs, rows, **sizes, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@places
def test_outputs_in_their_place(backend: str, device: str) -> None:
    """Written where they belong, and nowhere else."""
    skip_unless_runs(backend, device)
    inputs, rows, sizes = arguments(SMALL, device=device)
    o, lse = tilelang_windows.launch(*inputs, rows, **sizes)
    both_o, both_lse = (torch.full((2, *x.shape), 7.0, device=device) for x in (o, lse))
    tilelang_windows.launch(*inputs, rows, **sizes, out=(both_o[0], both_lse[0]))
    assert torch.equal(both_o[0], o)
    assert torch.equal(both_lse[0], lse)
    assert (both_o[1] == 7).all()
    assert (both_lse[1] == 7).all()


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = replace(SMALL, B=B, N=N)
    inputs, rows, sizes = arguments(shape)
    o, lse = tilelang_windows.launch(*inputs, rows, **sizes)
    assert (o.shape, lse.shape) == ((B, N, 6, 16), (B, N, 6))


# What one query sees and its neighbours in the tile do not: at an end, or in another sequence.
NEIGHBOURS = {
    "one sequence": replace(SMALL, N=12),
    "steps without a mask": replace(SMALL, N=8, M=90, window=70),
    "packed": replace(SMALL, cu=(0, 17, 40)),
}
neighbours = pytest.mark.parametrize("shape", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())


@places
@neighbours
def test_hidden_numbers_stay_hidden(shape: Shape, backend: str, device: str) -> None:
    """NaN in each key, infinity in each value, that a query does not see: it gives the same to the
    bit."""
    skip_unless_runs(backend, device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = tilelang_windows.launch(q, k, v, rows, **sizes)
    mask = shape.seen_keys(shape.window).to(device)
    for query in (0, shape.N // 2, shape.N - 1):
        hidden = ~mask[query][None, :, None, None]
        spoiled = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
        o_after, lse_after = tilelang_windows.launch(q, *spoiled, rows, **sizes)
        assert torch.equal(o[:, query], o_after[:, query])
        assert torch.equal(lse[:, query], lse_after[:, query])


@places
@neighbours
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_spoils_its_channel(number: float, shape: Shape, backend: str, device: str) -> None:
    """Of those that see it, and of no others."""
    skip_unless_runs(backend, device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = tilelang_windows.launch(q, k, v, rows, **sizes)
    key = shape.M - shape.N + 4
    v[0, key, 0, 5] = number
    o_after, lse_after = tilelang_windows.launch(q, k, v, rows, **sizes)
    sees = shape.seen_keys(shape.window)[:, key].to(device)
    is_spoiled = torch.zeros_like(o, dtype=torch.bool)
    is_spoiled[:, sees, : shape.G, 5] = True
    assert torch.equal(~o_after.isfinite(), is_spoiled)
    assert torch.equal(o_after[~is_spoiled], o[~is_spoiled])
    assert torch.equal(lse_after, lse)


@places
def test_a_query_or_a_key_that_is_not_a_number(backend: str, device: str) -> None:
    """Those that see it have no output and no sum."""
    skip_unless_runs(backend, device)
    (q, k, v), rows, sizes = arguments(SMALL, device=device)
    o, lse = tilelang_windows.launch(q, k, v, rows, **sizes)
    q[0, 3, 1, 2] = k[0, 20, 1, 0] = math.nan
    o_after, lse_after = tilelang_windows.launch(q, k, v, rows, **sizes)
    is_spoiled = torch.zeros_like(lse, dtype=torch.bool)
    is_spoiled[:, 3, 1] = True
    is_spoiled[:, 20 : 20 + SMALL.window, SMALL.G :] = True
    assert torch.equal(lse_after.isnan(), is_spoiled)
    assert torch.equal(o_after.isnan().all(-1), is_spoiled)
    assert torch.equal(o_after[~is_spoiled], o[~is_spoiled])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [1, 16, 128, 192, 256])
@pytest.mark.parametrize("G", [1, 20, 64])
def test_what_a_program_holds_fits(G: int, D: int, itemsize: int) -> None:
    """And a tile has whole queries, a warp 16 of its rows."""
    options = tilelang_windows.window_options(G, D, D, itemsize)
    rows = options["BQ"] + 2 * options["num_stages"] * options["BT"]
    assert rows * D * itemsize <= SHARED_MEMORY
    assert options["BQ"] >= G
    assert options["threads"] == 2 * options["BQ"]


# -- what it becomes --

KERNELS = {  # H, G, D, DV
    "shown": (4, 16, 128, 128),
    "odd": (2, 3, 24, 40),
    "80": (1, 5, 80, 80),
    "192 and 128": (1, 64, 192, 128),
    "256": (1, 4, 256, 256),
    "16 and 256": (1, 1, 16, 256),
    "not of 16 bytes": (2, 3, 20, 3),
}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MEMORY = {"sm_80": 163 * 1024, "sm_90": SHARED_MEMORY}


def cuda(shape: tuple[int, int, int, int], dtype: str, arch: str) -> str:
    H, G, D, DV = shape
    itemsize = ITEMSIZE[dtype]
    options = tilelang_windows.window_options(G, D, DV, itemsize, MEMORY[arch])
    whole_groups = options["threads"] % 128 == 0
    has_tma = arch == "sm_90" and whole_groups and not any(n * itemsize % 16 for n in (D, DV))
    kernel = tilelang_windows.build_attend(H, G, D, DV, dtype, **options, has_tma=has_tma)
    return lowering.cuda(kernel, arch, tilelang_windows.PASS_CONFIGS[has_tma])


@pytest.mark.exhaustive
def test_a_warp_group_loads_by_tma() -> None:
    """Others compute, on tensor cores, and none of them waits for an address."""
    source = cuda(KERNELS["shown"], "float16", "sm_90")
    assert source.count("tl::tma_load(") == 3  # queries, keys, values
    assert "warpgroup_reg_dealloc<24>" in source, "the warps that load need no registers"
    assert "cp_async" not in source
    # the weights go from one product to the next without leaving registers
    assert "wgmma_rs<" in source


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm_90", "bfloat16"), ("sm_90", "float32"), ("sm_80", "float16")]
)
@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
def test_every_shape_lowers(shape: tuple[int, int, int, int], arch: str, dtype: str) -> None:
    source = cuda(shape, dtype, arch)
    on_tensor_cores = "mma" in source.replace("wgmma_fence", "")
    assert on_tensor_cores == (dtype != "float32"), "fp32 would be rounded to TF32 there"


# TileLang puts some barriers into one branch of an `if` alone; what other threads have yet to read
# then goes unguarded on the other branch.
BARRIER = r"(__syncthreads\(\)|__sync_thread_partial\(\d+, \d+\));\s*"


@pytest.mark.exhaustive
def test_all_have_read_a_tile_before_it_is_overwritten() -> None:
    """Where all threads load, a step ends with a barrier on either branch: in the loop, and in the
    last steps behind it."""
    source = cuda(KERNELS["shown"], "float32", "sm_80")
    assert len(re.findall(BARRIER + r"\} else \{", source)) == 2


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    """And without waiting for the device."""
    shape = Shape(N=5000, M=5000, H=1, G=16, D=64, DV=64, window=300, cu=(0, 1100, 1100, 5000))
    inputs, rows, sizes = arguments(shape, dtype, "cuda")
    first = tilelang_windows.launch(*inputs, rows, **sizes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [tilelang_windows.launch(*inputs, rows, **sizes) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_queries_past_32_bits() -> None:
    """2.3e9 numbers of queries: the last ones are what they are alone."""
    N, H, HQ = 140_000, 4, 64
    q = torch.randn(1, N, HQ, 256, dtype=torch.float16, device="cuda")
    k = torch.randn(1, N, H, 256, dtype=torch.float16, device="cuda")
    place = {"causal": True, "cu_seqlens": None, "device": q.device}
    sizes, last = {"window_size": 100, "scale": 1 / 16}, 200
    o, lse = tilelang_windows.launch(q, k, k, query_rows(1, N, N, **place), **sizes)
    few = [x[:, -last:].contiguous() for x in (q, k, k)]
    right = tilelang_windows.launch(*few, query_rows(1, last, last, **place), **sizes)
    torch.testing.assert_close(o[:, -100:], right[0][:, -100:])
    torch.testing.assert_close(lse[:, -100:], right[1][:, -100:])
