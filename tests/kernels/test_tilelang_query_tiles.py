"""Selected attention by tiles of queries in TileLang: the unions against Python's sets, outputs
within the budget, and what the kernels become in CUDA."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from places import places_of, product, skip_unless_runs
from selection import Call, Problem, assert_within_budget

from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels import tilelang_query_tiles as tiles
from nsa_tutorial.kernels import tilelang_unions, tilelang_windows
from nsa_tutorial.kernels.tilelang_forward import PASS_CONFIGS as ALL_THREADS_LOAD

pytestmark = pytest.mark.usefixtures("one_thread")
places = places_of(["tilelang"])
places_slow = places_of(["tilelang"], slow=["tilelang"])


def lists(call: Call, problem: Problem) -> tuple[torch.Tensor, QueryRows]:
    """The lists of `call`, and the rows."""
    cu_seqlens = call.options["cu_seqlens"]
    sizes = {"causal": problem.causal, "cu_seqlens": cu_seqlens, "device": call.q.device}
    rows = query_rows(problem.B, problem.N, problem.M, **sizes)
    own = {"block_counts": call.options["block_counts"], "include_own_block": problem.own}
    return block_list(call.ids, rows, block_size=problem.BS, **own), rows


# -- unions --

UNIONS = {
    "ragged": Problem(N=19, M=70, S=5),
    "packed": Problem(N=30, M=30, cu=(0, 9, 9, 14, 30), own=True, S=4),
    "one slot": Problem(N=9, M=9, S=1),
    "blocks of 12": Problem(N=12, M=60, BS=12, S=4),
}


def right(
    ids: torch.Tensor, rows: QueryRows, tile: int, head: int, TQ: int, BS: int
) -> dict[int, tuple[int, bool]]:
    """By a block's first key: who lists it, and whether they all see all of it."""
    found: dict[int, tuple[int, bool]] = {}
    for t in range(TQ):
        row = tile * TQ + t
        if row >= len(ids):
            break
        first, n = int(rows.first_key[row]), int(rows.num_visible[row])
        for block in ids[row, head].tolist():
            if block >= 0 and block * BS < n:
                who, is_whole = found.get(first + block * BS, (0, True))
                found[first + block * BS] = (who | 1 << t, is_whole and (block + 1) * BS <= n)
    return found


@places_slow
@pytest.mark.parametrize("TQ", [1, 4, 16])
@pytest.mark.parametrize("problem", UNIONS.values(), ids=UNIONS)
def test_a_union_is_what_sets_give(problem: Problem, TQ: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = problem.make(device=device)
    ids, rows = lists(call, problem)
    made = tilelang_unions.unions(call.v, ids, rows, block_size=problem.BS, TQ=TQ, BT=16)
    for tile in range(len(made.count)):
        for head in range(problem.H):
            count = int(made.count[tile, head])
            num_whole = int(made.num_whole[tile, head])
            starts = made.start[tile, head, :count].tolist()
            who = made.listed_by[tile, head, :count].tolist()
            expected = right(ids, rows, tile, head, TQ, problem.BS)
            assert dict(zip(starts, who, strict=True)) == {s: x for s, (x, _) in expected.items()}
            whole = {s for s, (_, is_whole) in expected.items() if is_whole}
            assert set(starts[:num_whole]) == (whole if problem.BS % 16 == 0 else set())


@places
def test_unions_that_are_too_long_and_values_that_are_not_finite(backend: str, device: str) -> None:
    """A block listed twice is there twice; behind a mask goes all, if one value asks for it."""
    skip_unless_runs(backend, device)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 3], [1, 1], [0, 2]], dtype=torch.int32)
    ids = ids[:, None].to(device)  # [R, H = 1, S = 2]: in tiles of 2
    rows = query_rows(1, 6, 64, causal=False, cu_seqlens=None, device=torch.device(device))
    v = torch.zeros(1, 64, 1, 16, device=device)

    def made(**options: float) -> list[list[int]]:
        sizes = {"block_size": 16, "TQ": 2, "BT": 16}
        found = tilelang_unions.unions(v, ids, rows, **sizes, **options)
        return [x.flatten().tolist() for x in (found.count, found.num_whole)]

    assert made() == [[2, 4, 4], [2, 4, 4]]
    assert made(most=0.5)[0] == [2, -1, -1]
    for number in (math.nan, math.inf, -math.inf):
        v[0, 63, 0, 3] = number
        assert made() == [[2, 4, 4], [0, 0, 0]]


# -- outputs --

# Those of these widths are one kernel, compiled once.
SMALL = Problem(N=19, M=70, S=5, D=16, DV=16)
PROBLEMS = {
    "ragged": SMALL,
    "packed, own blocks": replace(SMALL, N=30, M=30, cu=(0, 9, 9, 14, 30), own=True, S=4),
    "a batch, counts": replace(SMALL, B=2, N=5, counts="random"),
    "not causal": replace(SMALL, causal=False),
    "G 1": replace(SMALL, G=1),
    "G 20": replace(SMALL, G=20),
    "G 64": replace(SMALL, N=5, H=1, G=64),
    "blocks of 12": replace(SMALL, BS=12),
    "blocks of 48": replace(SMALL, N=60, M=200, BS=48),
    "blocks of 128": replace(SMALL, N=60, M=400, BS=128, S=3),
    "odd widths": replace(SMALL, D=24, DV=80),
    "not of 16 bytes": replace(SMALL, D=20, DV=3),
    "as wide as can be": replace(SMALL, N=5, H=1, D=256, DV=256),
    "large": Problem(N=900, M=2000, H=2, G=16, D=128, DV=128, S=9, BS=64),
    "large, packed": Problem(
        N=2000, M=2000, H=2, G=8, D=128, DV=64, S=9, BS=64, cu=(0, 700, 700, 701, 2000), own=True
    ),
}
QUICK = {torch.float32: {"ragged", "packed, own blocks", "a batch, counts"}}
LARGE = {"large", "large, packed"}


def run(call: Call, problem: Problem, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids, rows = lists(call, problem)
    scale = problem.D**-0.5 if problem.scale is None else problem.scale
    sizes = {"block_size": problem.BS, "scale": scale}
    o, lse, _ = tiles.launch(call.q, call.k, call.v, ids, rows, **sizes, **options)
    return o, lse


@product("problem", PROBLEMS, ["tilelang"], QUICK)
def test_outputs(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if device == "cpu" and problem.N >= 900:
        pytest.skip("for a GPU")
    call = problem.make(dtype, device)
    for got, truth, plain, what in zip(
        run(call, problem), call.truth(), call.plain(), ("o", "lse"), strict=True
    ):
        assert_within_budget(got, truth, plain, what)


@places
def test_the_first_step_may_show_a_row_nothing(backend: str, device: str) -> None:
    """Its maximum, the least number, leaves the range if it is multiplied by a scale above 1."""
    skip_unless_runs(backend, device)
    call = SMALL.make(device=device)
    found = run(call, replace(SMALL, scale=2.0))
    expected = run(call.having(q=call.q * 2), replace(SMALL, scale=1.0))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@places
def test_rows_of_tiles_that_are_not_wanted_are_not_written(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = SMALL.make(device=device)
    expected = run(call, SMALL)
    ids, rows = lists(call, SMALL)
    o, lse = (torch.full_like(x, 7.0) for x in expected)
    sizes = {"block_size": SMALL.BS, "scale": SMALL.D**-0.5, "most": 0.4}
    *_, made = tiles.launch(call.q, call.k, call.v, ids, rows, **sizes, out=(o, lse))
    tile = torch.arange(SMALL.N, device=device) // made.TQ
    is_written = (made.count[tile] >= 0).repeat_interleave(SMALL.G, dim=1)[None]  # [B, N, HQ]
    assert is_written.any()
    assert not is_written.all()
    for found, x in ((o, expected[0]), (lse, expected[1])):
        assert torch.equal(found[is_written], x[is_written])
        assert (found[~is_written] == 7).all()


@places
def test_hidden_numbers_stay_hidden(backend: str, device: str) -> None:
    """NaN in each key, infinity in each value, that a query does not see: it gives the same, but
    for the order of its blocks."""
    skip_unless_runs(backend, device)
    call = SMALL.make(device=device)
    o, lse = run(call, SMALL)
    mask = call.mask()  # [B, N, H, M]
    for query in (0, SMALL.N // 2, SMALL.N - 1):
        hidden = ~mask[:, query].transpose(1, 2)[..., None]  # [B, M, H, 1]
        spoiled = call.having(
            k=call.k.masked_fill(hidden, math.nan), v=call.v.masked_fill(hidden, math.inf)
        )
        o_after, lse_after = run(spoiled, SMALL)
        torch.testing.assert_close(o_after[:, query], o[:, query])
        torch.testing.assert_close(lse_after[:, query], lse[:, query])


@places
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_spoils_its_channel(number: float, backend: str, device: str) -> None:
    """Of those that see it, and of no others."""
    skip_unless_runs(backend, device)
    call = SMALL.make(device=device)
    o, lse = run(call, SMALL)
    mask = call.mask()
    key = int(mask[0, :, 0].sum(0).argmax())  # the one that most see
    v = call.v.clone()
    v[0, key, 0, 5] = number
    o_after, lse_after = run(call.having(v=v), SMALL)
    is_spoiled = torch.zeros_like(o, dtype=torch.bool)
    is_spoiled[0, :, : SMALL.G, 5] = mask[0, :, 0, key][:, None]
    assert is_spoiled.any()
    assert torch.equal(~o_after.isfinite(), is_spoiled)
    torch.testing.assert_close(o_after[~is_spoiled], o[~is_spoiled])
    torch.testing.assert_close(lse_after, lse)


@places
def test_a_query_or_a_key_that_is_not_a_number(backend: str, device: str) -> None:
    """Those that see it have no output and no sum."""
    skip_unless_runs(backend, device)
    call = SMALL.make(device=device)
    o, lse = run(call, SMALL)
    mask = call.mask()
    key = int(mask[0, :, 1].sum(0).argmax())
    q, k = call.q.clone(), call.k.clone()
    q[0, 3, 1, 2] = k[0, key, 1, 0] = math.nan
    o_after, lse_after = run(call.having(q=q, k=k), SMALL)
    is_spoiled = torch.zeros_like(lse, dtype=torch.bool)
    is_spoiled[0, 3, 1] = mask[0, 3, 0].any()
    is_spoiled[0, :, SMALL.G :] = mask[0, :, 1, key][:, None]
    assert torch.equal(lse_after.isnan(), is_spoiled)
    assert torch.equal(o_after.isnan().all(-1), is_spoiled)
    torch.testing.assert_close(o_after[~is_spoiled], o[~is_spoiled])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [1, 16, 128, 192, 256])
@pytest.mark.parametrize("G", [1, 20, 64])
def test_what_a_program_holds_fits(G: int, D: int, itemsize: int) -> None:
    """And whole blocks have whole steps, a warp 16 rows of a tile, a query a bit."""
    for BS in (8, 12, 48, 64, 128):
        options = tiles.query_tile_options(G, D, D, BS, itemsize)
        rows = options["BQ"] + 2 * options["num_stages"] * options["BT"]
        assert rows * D * itemsize <= SHARED_MEMORY
        assert G <= options["BQ"] <= 32 * G
        assert options["threads"] == 2 * options["BQ"]
        assert BS % options["BT"] == 0 or BS % 16


# -- what they become --

KERNELS = {  # H, G, D, DV, BS
    "shown": (4, 16, 128, 128, 64),
    "odd": (2, 3, 24, 40, 12),
    "80": (1, 2, 80, 80, 48),
    "192 and 128": (1, 64, 192, 128, 64),
    "256": (1, 4, 256, 256, 128),
    "16 and 256": (1, 1, 16, 256, 16),
    "not of 16 bytes": (2, 3, 20, 3, 64),
}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MEMORY = {"sm_80": 163 * 1024, "sm_90": SHARED_MEMORY}


def cuda(shape: tuple[int, ...], dtype: str, arch: str) -> str:
    _, G, D, DV, BS = shape
    itemsize = ITEMSIZE[dtype]
    options = tiles.query_tile_options(G, D, DV, BS, itemsize, MEMORY[arch])
    whole_groups = options["threads"] % 128 == 0
    has_tma = arch == "sm_90" and whole_groups and not any(n * itemsize % 16 for n in (D, DV))
    kernel = tiles.build_attend(*shape, dtype, **options, has_tma=has_tma)
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
def test_every_shape_lowers(shape: tuple[int, ...], arch: str, dtype: str) -> None:
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("TQ", "SP"), [(1, 1), (4, 16), (16, 64)])
def test_the_kernels_of_the_unions_lower(TQ: int, SP: int) -> None:
    kernel = tilelang_unions.build_union(4, 64, TQ, SP, has_whole=True)
    assert "ListedBy" in lowering.cuda(kernel, "sm_90", ALL_THREADS_LOAD)
    kernel = tilelang_unions.build_find_bad(80, "bfloat16")
    assert "IsBad" in lowering.cuda(kernel, "sm_90", ALL_THREADS_LOAD)


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    """And without waiting for the device."""
    problem = replace(PROBLEMS["large, packed"], N=5000, M=5000, cu=(0, 1100, 1100, 5000))
    call = problem.make(dtype, "cuda")
    ids, rows = lists(call, problem)
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    first = tiles.launch(call.q, call.k, call.v, ids, rows, **sizes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [tiles.launch(call.q, call.k, call.v, ids, rows, **sizes) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])
