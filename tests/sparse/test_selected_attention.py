"""The contract of `selected_attention`, on every backend, device and dtype that this machine can
run."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from places import places_of, product, skip_unless_runs
from selection import Call, Problem, assert_right

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.environment import BackendUnavailable
from nsa_tutorial.sparse.selected_attention import block_list, dense_mask, forward, query_rows

KERNELS = ("tilelang", "triton")
OTHER_ORDERS = ("tiles", "blocks")  # of Triton; what it takes by itself on the CPU is "queries"
BACKENDS = ("reference", *KERNELS, *OTHER_ORDERS)
places = places_of(BACKENDS, slow=OTHER_ORDERS)


# On the CPU a case costs what it compiles, a TileLang kernel for each H, G, D, DV, BS and dtype,
# and its rows in Triton's interpreter: few of both.
PROBLEMS = {
    "two KV heads, three queries each, ragged tail": Problem(B=2, N=5, M=37),
    "one query, one key": Problem(N=1, M=1, S=1),
    "decoding: one query, long cache": Problem(B=2, N=1, M=75),
    "cache shorter than a block": Problem(N=5, M=5, S=2),
    "counts as an int that is no power of two": Problem(N=5, M=37, counts=3),
    "counts of zero": Problem(N=5, counts=0),
    "counts larger than the slots": Problem(N=5, counts=9),
    "counts per row": Problem(B=2, N=5, M=37, counts="random"),
    "own block added": Problem(N=5, M=37, own=True),
    "own block and counts": Problem(N=5, M=37, own=True, counts="random"),
    "not causal": Problem(N=5, M=43, causal=False),
    "not causal, own block": Problem(N=5, M=43, causal=False, own=True, S=1),
    "packed sequences, one empty": Problem(N=20, M=20, cu=(0, 1, 1, 18, 20), own=True, counts=2),
    "packed sequences, not causal": Problem(N=9, M=9, cu=(0, 5, 9), causal=False),
    "int64 indices": Problem(N=5, M=37, index_dtype=torch.int64),
    "a scale of the caller's": Problem(N=5, M=37, scale=0.71),
    "large scores": Problem(N=5, M=37, magnitude=60.0),
    "G 1, widths 16": Problem(H=1, G=1, D=16, DV=16, BS=32, N=9, M=70),
    "G 20, block 8": Problem(H=1, G=20, D=64, DV=32, BS=8, S=3, N=5),
    "G 33, width 136": Problem(H=1, N=3, M=50, G=33, D=136, BS=32, S=3),
    "G 64, widths 192 and 128": Problem(H=1, N=3, M=150, G=64, D=192, DV=128, BS=64, S=3),
    "widths 256, block of 128": Problem(
        H=1, N=3, M=600, G=16, D=256, DV=256, BS=128, S=2, causal=False
    ),
    "block of 12, no power of two": Problem(H=3, G=2, D=8, DV=5, BS=12, N=5, M=30),
    "block of 200, longer than a tile": Problem(N=3, M=450, BS=200, S=2),
}
WIDEST = {"G 33, width 136", "G 64, widths 192 and 128", "widths 256, block of 128"}
QUICK = {
    torch.float32: PROBLEMS.keys() - WIDEST,
    torch.float16: {"own block and counts"},
    torch.bfloat16: {"own block and counts"},
}
FEW = {"two KV heads, three queries each, ragged tail", "packed sequences, one empty"}
# each problem in one of the other orders, and what they differ in most in both
EITHER = {
    "tiles": [*list(PROBLEMS)[::2], "not causal, own block", "block of 200, longer than a tile"],
    "blocks": [*list(PROBLEMS)[1::2], "counts per row", "G 1, widths 16"],
}


@product("problem", PROBLEMS, BACKENDS, QUICK, slow=dict.fromkeys(OTHER_ORDERS, FEW), rest=EITHER)
def test_error_budget(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_right(problem.make(dtype, device), backend)


# H, G, D, DV and BS of problems above: nothing is compiled for these.
SHAPES = [(2, 3, 24, 40, 16), (1, 1, 16, 16, 32), (3, 2, 8, 5, 12)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    H, G, D, DV, BS = draw(st.sampled_from(SHAPES))
    packed = draw(st.booleans())
    M = draw(st.integers(1, 20 if packed else 70))
    cuts = draw(st.lists(st.integers(0, M), max_size=3)) if packed else None
    N = M if packed else draw(st.integers(1, min(M, 5)))
    S = draw(st.integers(1, 5))
    return Problem(
        B=1 if packed else draw(st.integers(1, 2)), N=N, M=M,
        H=H, G=G, D=D, DV=DV, S=S, BS=BS,
        counts=draw(st.none() | st.just("random") | st.integers(0, S + 1)),
        own=draw(st.booleans()), causal=draw(st.booleans()),
        cu=None if cuts is None else (0, *sorted(cuts), M),
        # beyond that rounding of the scores decides, and a few rows are luck
        magnitude=draw(st.sampled_from([0.0, 1.0, 4.0])),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@places
@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=problems())
def test_any_shape(backend: str, device: str, problem: Problem) -> None:
    skip_unless_runs(backend, device)
    assert_right(problem.make(torch.float32, device), backend)


def two_blocks(first: float, second: float, device: str, dtype: torch.dtype) -> Call:
    """One query over two blocks of 32 with scaled scores `first` and `second` and values 1 and
    2."""
    k = torch.tensor([first] * 32 + [second] * 32)[None, :, None, None].expand(1, 64, 1, 16)
    v = torch.tensor([1.0] * 32 + [2.0] * 32)[None, :, None, None].expand(1, 64, 1, 16)
    q = torch.ones(1, 1, 1, 16)
    ids = torch.tensor([0, 1], dtype=torch.int32).view(1, 1, 1, 2)
    options = {**Problem(BS=32).make().options, "scale": 1 / 16}
    call = Call(q.to(dtype), k.to(dtype), v.to(dtype), ids, options)
    return call.to(device)


SCORES = [(400.0, -400.0), (-400.0, 400.0), (90.0, 0.0), (0.0, 90.0), (-1000.0, -1001.0)]
SCORES = {str(pair): pair for pair in SCORES}


@product("scores", SCORES, BACKENDS, {torch.float32: SCORES}, slow=dict.fromkeys(OTHER_ORDERS, ()))
def test_running_max_runs(
    scores: tuple[float, float], dtype: torch.dtype, backend: str, device: str
) -> None:
    """The public TileLang example takes each block's own maximum: NaN once a later block lies 128
    log2 units lower."""
    skip_unless_runs(backend, device, dtype)
    o, lse = assert_right(two_blocks(*scores, device, dtype), backend)
    assert torch.isfinite(lse).all()
    if abs(scores[0] - scores[1]) > 80:
        assert torch.allclose(
            o.float(), torch.full_like(o, 1.0 if scores[0] > scores[1] else 2.0).float()
        )


@places
def test_empty_rows(backend: str, device: str) -> None:
    """Of holes alone, of future blocks, and of ids that no arithmetic may touch."""
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=3).make(device=device)
    ids = [[-1, -1, -1], [3, 5, 99], [2**31 - 1, -7, -(2**31)]]
    ids = torch.tensor(ids, dtype=torch.int32, device=device)[None, :, None].expand(1, 3, 2, 3)
    o, lse = call.having(ids=ids).run(backend)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@places
def test_int64_ids_do_not_wrap(backend: str, device: str) -> None:
    """2**32 is block 0 to whoever casts to 32 bits without looking."""
    skip_unless_runs(backend, device)
    ids = torch.full((1, 3, 2, 1), 2**32, dtype=torch.int64, device=device)
    o, lse = Problem(N=3, M=3).make(device=device).having(ids=ids).run(backend)
    assert o.abs().max() == 0
    assert lse.max() == -torch.inf


@places
def test_holes_and_order_do_not_matter(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=70).make(device=device)
    o, lse = call.run(backend)
    hole = torch.full_like(call.ids[..., :1], -1)
    shuffled = torch.cat([call.ids, hole], dim=-1)[
        ..., torch.tensor([3, 0, 4, 2, 1], device=device)
    ]
    o_shuffled, lse_shuffled = call.having(ids=shuffled).run(backend)
    assert torch.allclose(o, o_shuffled, atol=1e-6)
    assert torch.allclose(lse, lse_shuffled, atol=1e-6)


@places
# the interpreter's, on the rows that do see NaN
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nothing_leaks_from_the_future(backend: str, device: str) -> None:
    """Not even NaN: a weight of zero hides a number, but 0 * NaN is NaN."""
    skip_unless_runs(backend, device)
    call = Problem(N=6, M=26, own=True).make(device=device)
    o, lse = call.run(backend)
    k, v = call.k.clone(), call.v.clone()
    k[:, 23:], v[:, 23:] = torch.nan, torch.nan
    o_after, lse_after = call.having(k=k, v=v).run(backend)
    same = torch.equal
    if backend == "tiles":  # a tile that shares what it fetches is left to another kernel then
        same = functools.partial(torch.allclose, atol=1e-6)
    assert same(o[:, :3], o_after[:, :3])
    assert same(lse[:, :3], lse_after[:, :3])


@places
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nothing_leaks_between_packed_sequences(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(N=9, M=9, own=True, causal=False, cu=(0, 5, 9)).make(device=device)
    o, _ = call.run(backend)
    k, v = call.k.clone(), call.v.clone()
    k[:, 5:], v[:, 5:] = torch.nan, torch.nan
    o_after, _ = call.having(k=k, v=v).run(backend)
    assert torch.allclose(o[:, :5], o_after[:, :5], atol=1e-6, rtol=0)


@places
def test_nothing_is_read_past_the_end(backend: str, device: str) -> None:
    """Keys and values are the front of a longer buffer whose rest is NaN."""
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=37, causal=False).make(device=device)
    o, _ = call.run(backend)
    longer = [
        torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :37] for x in (call.k, call.v)
    ]
    assert all(x.is_contiguous() for x in longer)
    o_after, _ = call.having(k=longer[0], v=longer[1]).run(backend)
    assert torch.equal(o, o_after)


@places_of(BACKENDS, slow=(*KERNELS, *OTHER_ORDERS))  # their packed problems are judged above
def test_packed_sequences_are_separate_calls(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    bounds = (0, 1, 20, 23)
    call = Problem(N=23, M=23, cu=bounds, own=True).make(device=device)
    o, lse = call.run(backend)
    for start, end in pairwise(bounds):
        part = {name: getattr(call, name)[:, start:end] for name in ("q", "k", "v", "ids")}
        o_part, lse_part = call.having(**part, cu_seqlens=None).run(backend)
        assert torch.allclose(o[:, start:end], o_part, atol=1e-6)
        assert torch.allclose(lse[:, start:end], lse_part, atol=1e-6)


@places
def test_all_blocks_selected_is_dense_attention(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=35).make(device=device)
    ids = torch.arange(3, dtype=torch.int32, device=device).expand(1, 3, 2, 3)
    o, _ = call.having(ids=ids).run(backend)
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    mask = torch.ones(3, 35, dtype=torch.bool, device=device).tril(35 - 3)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(o, dense.transpose(1, 2), atol=2e-6)


@places
def test_non_contiguous_inputs(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(B=2, N=3, M=37).make(device=device)
    o, lse = call.run(backend)
    strided = {
        name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("q", "k", "v", "ids")
    }
    assert not any(x.is_contiguous() for x in strided.values())
    o_strided, lse_strided = call.having(**strided).run(backend)
    assert torch.equal(o, o_strided)
    assert torch.equal(lse, lse_strided)


@places
def test_own_block_is_not_counted_twice(backend: str, device: str) -> None:
    """Listing the own block and asking for it is the same as either alone."""
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=18).make(device=device)  # the positions 15, 16 and 17
    own = (torch.arange(15, 18, device=device) // 16).view(1, 3, 1, 1).expand(1, 3, 2, 1).int()
    listed, _ = call.having(ids=own).run(backend)
    both, _ = call.having(ids=own, include_own_block=True).run(backend)
    past_the_count, _ = call.having(ids=own, include_own_block=True, block_counts=0).run(backend)
    assert torch.allclose(listed, both, atol=1e-6)  # not equal to the bit: the slot is another one
    assert torch.allclose(listed, past_the_count, atol=1e-6)


@places
@pytest.mark.parametrize("N", [0, 3], ids=["no query", "three queries"])
def test_no_sequence(N: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(B=0 if N else 1, N=N, M=max(N, 4)).make(device=device)
    o, lse = call.run(backend)
    assert o.shape == (*call.q.shape[:3], 40)
    assert lse.shape == call.q.shape[:3]


@pytest.mark.parametrize("backend", KERNELS)
def test_bfloat16_on_the_cpu_is_refused(backend: str) -> None:
    """Triton's interpreter would compute it wrong without a word."""
    environment_has = environment.detect()
    if getattr(environment_has, backend) is None:
        pytest.skip(f"{backend} is not installed")
    with pytest.raises(BackendUnavailable, match=r"bfloat16|take CUDA tensors only"):
        Problem().make(torch.bfloat16).run(backend)


def test_reference_gradients_in_fp64() -> None:
    problem = Problem(N=3, M=5, G=2, D=2, DV=2, BS=2, S=2, counts="random", own=True)
    call = problem.make(torch.float64)
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]

    def outputs(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = call.having(q=q, k=k, v=v).run("reference")
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)


def test_gradients_of_empty_rows_are_zero() -> None:
    call = Problem(N=9, M=9).make()
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    o, lse = call.having(ids=torch.full_like(call.ids, -1)).run("reference")
    (o.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_reference_takes_fp64() -> None:
    call = Problem(B=2, N=9, M=37).make(torch.float64)
    o, lse = call.run("reference")
    o_true, lse_true = call.truth()
    assert o.dtype == lse.dtype == torch.float64
    assert torch.allclose(o, o_true, atol=1e-14)
    assert torch.allclose(lse, lse_true, atol=1e-14)


def test_mask_by_hand() -> None:
    """Blocks of 2, five keys, three queries (positions 2 to 4): the lists [1], [0, 2] and [-1,
    5]."""
    ids = torch.tensor([[1, -1], [0, 2], [-1, 5]]).view(1, 3, 1, 2)
    expected = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(dense_mask(ids, 5, block_size=2)[0, :, 0], expected)
    own = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(dense_mask(ids, 5, block_size=2, include_own_block=True)[0, :, 0], own)


def test_rows_of_packed_sequences() -> None:
    rows = query_rows(
        1, 5, 5, causal=True, cu_seqlens=torch.tensor([0, 2, 2, 5]), device=torch.device("cpu")
    )
    assert rows.first_key.tolist() == [0, 0, 2, 2, 2]
    assert rows.num_visible.tolist() == [1, 2, 1, 2, 3]
    assert rows.position.tolist() == [0, 1, 0, 1, 2]


def test_float64_is_not_for_kernels() -> None:
    for backend in KERNELS:
        with pytest.raises(
            TypeError,
            match="q: got a float64 tensor.*expected float32, float16 or bfloat16 on the "
            f"{backend}",
        ):
            Problem().make(torch.float64).run(backend)


def test_auto_takes_the_reference_on_the_cpu() -> None:
    call = Problem(B=2, N=9, M=37).make(torch.bfloat16)  # no kernel computes bfloat16 on the CPU
    assert torch.equal(call.run("auto")[0], call.run("reference")[0])


@pytest.mark.gpu
def test_auto_takes_triton_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_tutorial.kernels.triton.selected import launch as triton_launch

    seen = []
    original = triton_launch.selected_forward
    monkeypatch.setattr(
        triton_launch, "selected_forward", lambda *a, **k: seen.append(1) or original(*a, **k)
    )
    Problem().make(torch.float16, "cuda").run("auto")
    assert seen == [1]


@pytest.mark.parametrize("backend", [pytest.param(b, marks=pytest.mark.gpu) for b in KERNELS])
def test_offsets_past_two_to_the_31(backend: str) -> None:
    """The last keys of a cache of more than 2**31 elements: 32-bit offsets would read somewhere
    else, or crash."""
    H, D, BS, M = 8, 128, 64, 2**21 + 2**14 + 5
    k = torch.zeros(1, M, H, D, dtype=torch.float16, device="cuda")
    assert k.numel() > 2**31
    k[:, -200:] = torch.randn(1, 200, H, D, dtype=torch.float16, device="cuda")
    q = torch.randn(1, 3, H * 2, D, dtype=torch.float16, device="cuda")
    last = (M - 1) // BS
    ids = torch.tensor([last, last - 1], dtype=torch.int32, device="cuda").expand(1, 3, H, 2)
    o, lse = ops.selected_attention(q, k, k, ids, block_size=BS, return_lse=True, backend=backend)
    start = (last - 1) * BS
    tail = k[:, start:].contiguous()
    near = torch.tensor([1, 0], dtype=torch.int32, device="cuda").expand(1, 3, H, 2)
    o_near, lse_near = ops.selected_attention(
        q, tail, tail, near, block_size=BS, return_lse=True, backend="reference"
    )
    assert torch.allclose(o.float(), o_near.float(), atol=2e-3)
    assert torch.allclose(lse, lse_near, atol=1e-3)


@pytest.mark.parametrize("backend", [pytest.param(b, marks=pytest.mark.gpu) for b in KERNELS])
def test_more_rows_than_a_small_grid_dimension(backend: str) -> None:
    """65 536 query rows and more: a launch that puts them in y or z fails."""
    call = Problem(B=2, N=40_000, M=40_000, H=1, G=1, D=16, DV=16, BS=32, S=2).make(
        torch.float16, "cuda"
    )
    o, _ = call.run(backend)
    o_reference, _ = call.run("reference")
    assert torch.allclose(o.float(), o_reference.float(), atol=2e-3)


def test_new_lengths_compile_nothing() -> None:
    """Queries, keys, batch, slots and packing are open: one kernel serves them all."""
    skip_unless_runs("tilelang", "cpu")
    from nsa_tutorial.kernels.tilelang.selected import forward as tilelang_forward

    tilelang_forward.compiled.cache_clear()
    for problem in (
        Problem(),
        Problem(B=3, N=1, M=99, S=7),
        Problem(N=35, M=35, cu=(0, 7, 35), own=True),
    ):
        problem.make().run("tilelang")
    assert tilelang_forward.compiled.cache_info().currsize == 1


@pytest.mark.gpu
def test_new_lengths_compile_nothing_in_triton() -> None:
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward
    from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors

    def compiled() -> int:
        kernels = (triton_forward.kernel, triton_descriptors.descriptor_kernel)
        return sum(len(entry[0]) for k in kernels for entry in k.device_caches.values())

    Problem(H=3, S=5).make(torch.float16, "cuda").run("triton")
    before = compiled()
    for problem in (
        Problem(H=3, S=5, N=1, M=99),
        Problem(H=3, S=5, B=3, N=33, M=44),
        Problem(H=5, S=7, N=61, M=61, cu=(0, 7, 61)),
    ):
        problem.make(torch.float16, "cuda").run("triton")
    assert compiled() == before


def test_forward_agrees_with_ops() -> None:
    """The teaching function called directly, as chapters do."""
    call = Problem(B=2, N=9, M=37).make()
    rows = query_rows(2, 9, 37, causal=True, cu_seqlens=None, device=call.q.device)
    ids = block_list(call.ids, rows, block_size=16, block_counts=None, include_own_block=False)
    o, lse = forward(call.q, call.k, call.v, ids, rows, block_size=16, scale=24**-0.5)
    o_ops, lse_ops = call.run("reference")
    assert torch.equal(o, o_ops)
    assert torch.equal(lse, lse_ops)
