"""Selected attention, KV-outer: its partials, its runs of queries, and the same
rules as all other kernels have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from places import product, skip_unless_runs
from selection import Call, Problem, assert_within_budget, scaled_attention
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.kernels.triton import launch_options
from nsa_tutorial.kernels.triton import merge as triton_merge
from nsa_tutorial.kernels.triton.selected import by_key_blocks as triton_key_blocks
from nsa_tutorial.kernels.triton.selected import (
    by_key_blocks_backward as triton_key_blocks_backward,
)
from nsa_tutorial.kernels.triton.selected import by_key_blocks_options as triton_key_block_tiles
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]

on = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# On the CPU a case costs what its programs do in the interpreter: few queries.
PROBLEMS = {
    "G 1, widths 16": Problem(B=2, N=5, M=37, G=1, D=16, DV=16),
    "G 3, widths 24 and 40": Problem(N=6, M=37, counts="random", own=True),
    "G 4, width 80": Problem(N=5, M=37, G=4, D=80, DV=80),
    "G 8, widths 192 and 128": Problem(N=3, M=150, H=1, G=8, D=192, DV=128, BS=64, S=2),
    "G 20, block of 8": Problem(N=5, M=20, H=1, G=20, D=16, DV=16, BS=8),
    "block of 12, no power of two": Problem(N=5, M=30, H=3, G=2, D=8, DV=5, BS=12),
    "block of 200, in parts": Problem(N=3, M=450, H=1, D=16, DV=16, BS=200, S=2),
    "packed, one empty": Problem(N=19, M=19, G=1, S=2, cu=(0, 3, 3, 17, 19), own=True),
    "packed, not causal": Problem(N=21, M=21, S=2, cu=(0, 17, 21), causal=False),
    "not causal, a short last block": Problem(B=2, N=3, M=43, causal=False),
    "decoding: one query, long cache": Problem(B=2, N=1, M=75),
    "counts of zero": Problem(N=3, counts=0),
    "17 slots": Problem(N=3, M=70, H=1, G=2, D=16, DV=16, BS=4, S=17),
    "large scores": Problem(N=5, M=37, magnitude=60.0),
    "the same block for many": Problem(N=30, M=50, H=1, G=2, D=16, DV=16, BS=32, S=1, own=True),
}
QUICK = PROBLEMS.keys() - {
    "G 4, width 80", "packed, not causal", "counts of zero", "G 20, block of 8", "17 slots",
    "decoding: one query, long cache", "G 1, widths 16", "G 8, widths 192 and 128",
    "the same block for many",
}  # fmt: skip
# The gradients of large scores are a matter of how few scores are rounded.
SMOOTH = {name: problem for name, problem in PROBLEMS.items() if problem.magnitude == 1}
QUICK_GRADIENTS = [
    "G 3, widths 24 and 40", "block of 12, no power of two", "packed, one empty",
    "the same block for many",
]  # fmt: skip


def lists_of(call: Call, problem: Problem) -> tuple[Tensor, QueryRows]:
    given = call.options
    rows = query_rows(
        problem.B, problem.N, problem.M, causal=given["causal"], cu_seqlens=given["cu_seqlens"],
        device=call.q.device,
    )  # fmt: skip
    lists = {"block_counts": given["block_counts"], "include_own_block": given["include_own_block"]}
    return block_list(call.ids, rows, block_size=problem.BS, **lists), rows


def run(call: Call, problem: Problem, **options: int) -> tuple[Tensor, Tensor]:
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    lists = lists_of(call, problem)
    return triton_key_blocks.launch(call.q, call.k, call.v, *lists, **sizes, **options)


def assert_right(call: Call, problem: Problem, **options: int) -> tuple[Tensor, Tensor]:
    o, lse = run(call, problem, **options)
    (o_true, lse_true), (o_plain, lse_plain) = call.truth(), call.plain()
    assert o.dtype == call.v.dtype
    assert lse.dtype == torch.float32
    assert_within_budget(o, o_true, o_plain, "o")
    assert_within_budget(lse, lse_true, lse_plain, "lse")
    return o, lse


@product(
    "problem", PROBLEMS, ["triton"], {torch.float32: QUICK, torch.float16: ["large scores"]}
)  # fmt: skip
def test_error_budget(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_right(problem.make(dtype, device), problem)


@on
def test_short_chunks(device: str) -> None:
    """A block's queries over several programs; those that see it in part may be in each."""
    skip_unless_runs("triton", device)
    problem = PROBLEMS["the same block for many"]
    assert_right(problem.make(device=device), problem, length=3)


@on
def test_more_partial_views_than_a_program_looks_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all of its rows go behind the mask."""
    skip_unless_runs("triton", device)
    monkeypatch.setattr(launch_options, "MOST_EDGE", 2)
    problem = PROBLEMS["the same block for many"]
    assert_right(problem.make(device=device), problem)


@on
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(Problem(B=2, N=12, M=44, own=True), marks=pytest.mark.exhaustive),
        Problem(N=9, M=9, G=1, S=2, BS=4, cu=(0, 2, 2, 9), own=True),
        pytest.param(Problem(N=12, M=40, BS=5, causal=False), marks=pytest.mark.exhaustive),
    ],
    ids=["batch", "packed", "not causal"],
)
def test_runs(problem: Problem, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace for one head's queries, or for eight of them, changes nothing."""
    skip_unless_runs("triton", device)
    call = problem.make(device=device)
    o, lse = assert_right(call, problem)
    query_bytes = problem.G * problem.S * (4 * problem.DV + 8)
    for queries in (problem.B * problem.N, 8):
        monkeypatch.setattr(triton_key_block_tiles, "WORKSPACE", queries * query_bytes)
        o_in_runs, lse_in_runs = run(call, problem)
        torch.testing.assert_close((o, lse), (o_in_runs, lse_in_runs))


@pytest.mark.parametrize("R", [1, 16, 17, 1000, 2**16, 2**24])
@pytest.mark.parametrize(("S", "H", "G"), [(1, 1, 1), (16, 8, 4), (64, 6, 2), (16, 256, 1)])
def test_runs_cover_all_queries(R: int, S: int, H: int, G: int) -> None:
    """In equal runs that fit; no run is left without a query, and a head is cut only where it does
    not fit whole."""
    DV = 128
    heads, rows = triton_key_block_tiles.size_of_a_run(R, H, G, S, DV, 2)
    assert H % heads == 0
    partials = heads * rows * G * S
    assert partials * (DV * 2 + 8) <= triton_key_block_tiles.WORKSPACE
    assert partials * DV < 2**31
    assert (-(-R // rows) - 1) * rows < R
    assert rows == R or heads == 1
    is_one_run = heads == H and rows == R
    assert is_one_run or 2 * partials * DV * 2 > triton_key_block_tiles.WORKSPACE / H


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 12, 16, 100, 1023, 2**16 + 1, 2**31 - 1])
def test_division_by_a_product_is_exact(divisor: int) -> None:
    """For all numbers that int32 holds, from 0 on: at both sides of each multiple."""
    reciprocal, bits = triton_key_blocks.reciprocal_of(divisor)
    assert 2**31 <= reciprocal < 2**32
    most = 2**31 - 1
    quotients = {0, 1, 2, most // divisor // 2, most // divisor - 1, most // divisor}
    for number in {q * divisor + d for q in quotients for d in (-1, 0, 1, divisor - 1)} | {most}:
        if 0 <= number <= most:
            assert (2 * number * reciprocal >> 32) >> bits == number // divisor


@on
@pytest.mark.parametrize("BT", [16, 32])
def test_any_part_gives_the_same(BT: int, device: str) -> None:
    """A part may be shorter than a block, and need not divide it."""
    skip_unless_runs("triton", device)
    problem = Problem(N=5, M=70, H=1, D=16, DV=16, BS=40, S=2, own=True)
    assert_right(problem.make(device=device), problem, BT=BT)


@on
def test_a_repeated_block_counts_twice(device: str) -> None:
    """The caller's error, but one with a defined result."""
    skip_unless_runs("triton", device)
    problem = Problem(N=3, M=20, D=16, DV=16, BS=16, S=2)
    ids = torch.tensor([1, 1], dtype=torch.int32, device=device).expand(1, 3, 2, 2)
    call = problem.make(device=device).having(ids=ids)
    o, twice = run(call, problem)
    once_o, once = run(call.having(ids=ids[..., :1]), replace(problem, S=1))
    torch.testing.assert_close(o, once_o)
    torch.testing.assert_close(twice, once + math.log(2))


@on
@pytest.mark.parametrize(
    "ids",
    [[-1, -1, -1], [3, 5, 99], [2**31 - 1, -7, -(2**31)]],
    ids=["only holes", "only future blocks", "extreme ids"],
)
def test_empty_rows(ids: list[int], device: str) -> None:
    """Whatever stands in the workspace: no partial of theirs was written."""
    skip_unless_runs("triton", device)
    problem = Problem(N=3, M=9, S=3)
    lists = torch.tensor(ids, dtype=torch.int32, device=device).expand(1, 3, 2, 3)
    o, lse = run(problem.make(device=device).having(ids=lists), problem)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


SPOILED = Problem(N=6, M=34, G=2, D=16, DV=16, own=True, S=2)
KEY, QUERY = 30, 2  # the query at position 30 and later ones may see the key


def spoil(call: Call, where: str, number: float) -> Call:
    tensors = {name: getattr(call, name).clone() for name in "qkv"}
    tensors[where][0, QUERY if where == "q" else KEY, 0, 1] = number
    return call.having(**tensors)


# sparse/test_non_finite.py has more of them, also in this order
numbers = pytest.mark.parametrize(
    ("where", "number"),
    [
        pytest.param("q", math.nan, id="q nan", marks=pytest.mark.exhaustive),
        pytest.param("k", -math.inf, id="k -inf"),
    ],
)


@on
@numbers
def test_what_is_not_finite_spoils_who_sees_it(where: str, number: float, device: str) -> None:
    """And leaves all others the same to the bit, also those that see other keys of its block."""
    skip_unless_runs("triton", device)
    call = SPOILED.make(device=device)
    o_clean, lse_clean = run(call, SPOILED)
    spoiled = spoil(call, where, number)
    o, lse = run(spoiled, SPOILED)
    o_right, lse_right = spoiled.run("reference")
    assert not o_right.isfinite().all(), "nobody sees the number: the case is none"
    torch.testing.assert_close((o, lse), (o_right, lse_right), atol=1e-5, rtol=1e-5, equal_nan=True)
    if where == "q":
        blind = torch.ones_like(lse, dtype=torch.bool)
        blind[0, QUERY, 0] = False
    else:
        blind = ~call.mask()[..., KEY].repeat_interleave(SPOILED.G, 2)
    assert torch.equal(o[blind], o_clean[blind])
    assert torch.equal(lse[blind], lse_clean[blind])


@on
def test_hidden_numbers_do_not_leak(device: str) -> None:
    """NaN in every key and infinity in every value that a row does not see."""
    skip_unless_runs("triton", device)
    call = SPOILED.make(device=device)
    o, lse = run(call, SPOILED)
    hidden = ~call.mask()[0, QUERY].T[None, ..., None]  # [1, M, H, 1]
    k, v = call.k.masked_fill(hidden, math.nan), call.v.masked_fill(hidden, math.inf)
    o_after, lse_after = run(call.having(k=k, v=v), SPOILED)
    assert torch.equal(o[:, QUERY], o_after[:, QUERY])
    assert torch.equal(lse[:, QUERY], lse_after[:, QUERY])


@on
def test_scores_of_minus_infinity(device: str) -> None:
    """In one block they leave the other's result; in all of them they are not a row that saw
    nothing: 0/0 in the output."""
    skip_unless_runs("triton", device)
    problem = Problem(N=3, M=34, H=1, G=2, D=16, DV=16, S=2)
    ids = torch.tensor([[-1, -1], [0, -1], [0, 1]], dtype=torch.int32, device=device)
    call = problem.make(device=device).having(ids=ids.view(1, 3, 1, 2))
    k = call.k.clone()
    k[:, :16, :, 3] = -math.inf
    o, lse = run(call.having(q=call.q.abs() + 1, k=k), problem)
    o_right, lse_right = call.having(q=call.q.abs() + 1, k=k).run("reference")
    assert (o[0, 0] == 0).all()
    assert o[0, 1].isnan().all()
    assert o[0, 2].isfinite().all()
    assert (lse[0, :2] == -math.inf).all()
    torch.testing.assert_close((o, lse), (o_right, lse_right), equal_nan=True)


@on
def test_strided_tensors(device: str) -> None:
    skip_unless_runs("triton", device)
    problem = Problem(B=2, N=3, M=37)
    call = problem.make(device=device)
    strided = {x: getattr(call, x).transpose(1, 2).contiguous().transpose(1, 2) for x in "qkv"}
    for found, right in zip(run(call.having(**strided), problem), run(call, problem), strict=True):
        assert torch.equal(found, right)


def gradients(call: Call, problem: Problem, **options: int) -> tuple[Tensor, ...]:
    """Of `q`, `k` and `v`, for random gradients of both outputs, but none of some rows."""
    ids, rows = lists_of(call, problem)
    scale = problem.D**-0.5
    o, lse = run(call, problem)
    given = (*d_outputs(o, lse), call.q, call.k, call.v, o, lse, rows)
    saved = ListsCall.of(*given, ids=ids, block_size=problem.BS, scale=scale)
    return triton_key_blocks_backward.all_gradients(saved, **options)


def d_outputs(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    d_o, d_lse = (torch.randn(x.shape, generator=g).to(x) for x in (o, lse))
    d_o[:, ::7], d_lse[:, ::7] = 0, 0
    return d_o, d_lse


def dense_gradients(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """Of the dense computation, by autograd."""
    inputs = {x: getattr(call, x).to(dtype).requires_grad_() for x in "qkv"}
    o, lse = scaled_attention(
        *inputs.values(), call.mask(), None, call.options["scale"]
    )  # a row that sees nothing has gradients of 0
    d_o, d_lse = d_outputs(o.to(call.v.dtype), lse.float())
    sees = lse.isfinite()
    loss = (o * d_o.to(dtype)).sum() + (lse[sees] * d_lse.to(dtype)[sees]).sum()
    return list(torch.autograd.grad(loss, list(inputs.values())))


def assert_right_gradients(call: Call, problem: Problem, **options: int) -> None:
    right, plain = (dense_gradients(call, x) for x in (torch.float64, call.q.dtype))
    found = gradients(call, problem, **options)
    # at most twice the error of plain PyTorch, plus a millionth of the largest gradient
    # sums by atomics come in any order: twice the budget
    plain[0] = right[0] + 2 * (plain[0].double() - right[0])
    for name, *three in zip("qkv", found, right, plain, strict=True):
        assert three[0].dtype == call.q.dtype
        largest = three[1].abs().max().clamp(min=1)
        assert_within_budget(*(x.double() / largest for x in three), f"d_{name}")


@product("problem", SMOOTH, ["triton"], {torch.float32: QUICK_GRADIENTS})
def test_gradients(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_right_gradients(problem.make(dtype, device), problem)


@on
@pytest.mark.parametrize(
    ("name", "edge"), [("the same block for many", 2), ("block of 12, no power of two", 1024)]
)
def test_gradients_of_blocks_in_chunks(
    name: str, edge: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of three queries, whose shares are summed; with more partial views than a program
    looks for, too."""
    skip_unless_runs("triton", device)
    monkeypatch.setattr(backward_tables, "CHUNK_ROWS", {2: 6, 4: 6})
    monkeypatch.setattr(launch_options, "MOST_EDGE", edge)
    assert_right_gradients(PROBLEMS[name].make(device=device), PROBLEMS[name])


@on
def test_gradients_of_any_part(device: str) -> None:
    skip_unless_runs("triton", device)
    problem = Problem(N=5, M=70, H=1, D=16, DV=16, BS=40, S=2, own=True)
    assert_right_gradients(problem.make(device=device), problem, BT=16)


@on
@numbers
def test_gradients_of_what_is_not_spoiled(where: str, number: float, device: str) -> None:
    """Rows that do not see the number keep their gradients, as does what only such rows see."""
    skip_unless_runs("triton", device)
    call = SPOILED.make(device=device)
    clean = gradients(call, SPOILED)
    d_q, d_k, d_v = gradients(spoil(call, where, number), SPOILED)
    mask = call.mask()[0]  # [N, H, M]
    is_spoiled = mask[:, :, KEY].repeat_interleave(SPOILED.G, 1)  # [N, HQ]
    is_spoiled[:, SPOILED.G :] = False
    if where == "q":  # one head alone: others of its group are as they were
        is_spoiled[:] = False
        is_spoiled[QUERY, 0] = True
    seen_by_them = mask[is_spoiled.any(1), 0].any(0)  # [M]
    assert not (d_q.isfinite().all() and d_k.isfinite().all() and d_v.isfinite().all())
    torch.testing.assert_close(d_q[0, ~is_spoiled], clean[0][0, ~is_spoiled])
    for found, right in ((d_k[0], clean[1][0]), (d_v[0], clean[2][0])):
        torch.testing.assert_close(found[~seen_by_them], right[~seen_by_them])
        assert torch.equal(found[:, 1], right[:, 1])


@on
def test_gradients_from_hidden_numbers(device: str) -> None:
    """A row's gradient is the same whatever the keys and values are that it does not see."""
    skip_unless_runs("triton", device)
    call = SPOILED.make(device=device)
    d_q = gradients(call, SPOILED)[0]
    hidden = ~call.mask()[0, QUERY].T[None, ..., None]  # [1, M, H, 1]
    k, v = call.k.masked_fill(hidden, math.nan), call.v.masked_fill(hidden, math.inf)
    d_q_after = gradients(call.having(k=k, v=v), SPOILED)[0]
    torch.testing.assert_close(d_q[:, QUERY], d_q_after[:, QUERY])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [16, 128, 192, 256])
@pytest.mark.parametrize("BS", [16, 64, 256])
def test_what_a_program_holds_fits(D: int, BS: int, itemsize: int) -> None:
    """On a small GPU, too: 99 KiB."""
    for memory in (SHARED_MEMORY, 99 * 1024):
        options = triton_key_block_tiles.partial_options(D, D, BS, itemsize, memory)
        tiles = 2 * options["BT"] + options["num_stages"] * options["BR"]
        assert tiles * D * itemsize <= memory
        assert options["BT"] < 2 * max(BS, 16)
        options = triton_key_block_tiles.gradient_options(4, D, D, BS, itemsize, memory)
        tiles = 3 * options["BT"] + 2 * options["num_stages"] * options["BR"]
        assert tiles * D * itemsize <= memory
        assert options["BT"] < 2 * max(BS, 16)


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    problem = Problem(N=5000, M=5000, G=4, D=64, DV=64, BS=64, S=8, own=True)
    call = problem.make(torch.bfloat16, "cuda")
    first, *others = (run(call, problem) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_the_same_bits_of_keys_and_values_every_time() -> None:
    """Also of blocks in chunks. The gradients of queries are sums in no fixed order."""
    problem = Problem(N=5000, M=5000, G=4, D=64, DV=64, BS=64, S=8, own=True)
    call = problem.make(torch.bfloat16, "cuda")
    first, *others = (gradients(call, problem)[1:] for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_new_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, batch, slots, packing, and runs of queries are open."""
    kernels = (triton_key_blocks.partial_kernel, triton_merge.merge_kernel)

    def compiled() -> int:
        return sum(len(entry[0]) for kernel in kernels for entry in kernel.device_caches.values())

    first = Problem(H=3, S=9, D=24, DV=16)
    run(first.make(torch.float16, "cuda"), first)
    before = compiled()
    monkeypatch.setattr(triton_key_block_tiles, "WORKSPACE", 1)
    for problem in (
        replace(first, N=1, M=99),
        replace(first, B=3, N=33, M=44, S=13),
        replace(first, S=11, N=64, M=64, cu=(0, 7, 64)),
    ):
        run(problem.make(torch.float16, "cuda"), problem)
    assert compiled() == before


@pytest.mark.gpu
def test_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between runs of queries, either, nor in the backward."""
    monkeypatch.setattr(triton_key_block_tiles, "WORKSPACE", 1)
    problem = Problem(N=70, M=70, own=True)
    call = problem.make(torch.float16, "cuda")
    ids, rows = lists_of(call, problem)
    d_o, d_lse = d_outputs(*run(call, problem))
    numbers = {"ids": ids, "block_size": 16, "scale": 0.2}

    def there_and_back() -> None:
        given = (call.q, call.k, call.v)
        o, lse = triton_key_blocks.launch(*given, ids, rows, block_size=16, scale=0.2)
        saved = ListsCall.of(d_o, d_lse, *given, o, lse, rows, **numbers)
        triton_key_blocks_backward.all_gradients(saved)

    there_and_back()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there_and_back()
    finally:
        torch.cuda.set_sync_debug_mode("default")
