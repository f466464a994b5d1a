"""Selection and window side by side: one call gives what two give, with windows of exactly w keys
whatever the blocks are."""

from __future__ import annotations

import pytest
import torch
from places import places_of, product, skip_unless_runs
from selection import Problem, assert_within_budget

from nsa_tutorial import ops
from nsa_tutorial.sparse.selected_attention import dense_mask, masked_attention

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("reference", "tilelang", "triton")
places = places_of(BACKENDS)
PROBLEMS = {
    "two KV heads, ragged tail": (Problem(B=2, N=5, M=37), 5),
    "window of one": (Problem(N=5, M=37), 1),
    "window of a block and one": (Problem(N=5, M=37), 17),
    "window longer than the sequence": (Problem(N=9, M=9, S=2), 1000),
    "decoding": (Problem(B=2, N=1, M=75, S=1), 21),
    "packed, own block, counts": (Problem(N=20, M=20, cu=(0, 2, 2, 19, 20), own=True, counts=2), 6),
    "widths of powers of two": (Problem(N=9, M=70, D=16, DV=32, BS=32, S=2), 33),
    "long blocks": (Problem(N=3, M=300, BS=128, S=2), 130),
}
QUICK = {
    torch.float32: PROBLEMS.keys() - {"widths of powers of two"},
    torch.float16: {"two KV heads, ragged tail"},
    torch.bfloat16: {"two KV heads, ragged tail"},
}
# TileLang compiles kernels for these blocks
SLOW = {"tilelang": PROBLEMS.keys() - {"long blocks"}}


def run(
    problem: Problem, window: int, dtype: torch.dtype, device: str, backend: str
) -> tuple[torch.Tensor, ...]:
    call = problem.make(dtype, device)
    options = {name: x for name, x in call.options.items() if name != "causal"}
    inputs = (call.q, call.k, call.v, call.ids)
    return ops.selected_and_window_attention(
        *inputs, **options, window_size=window, return_lse=True, backend=backend
    )


@product("case", PROBLEMS, BACKENDS, QUICK, slow=SLOW)
def test_error_budget(case: tuple, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    problem, window = case
    call, (o, lse, o_window, lse_window) = (
        problem.make(dtype, device),
        run(problem, window, dtype, device, backend),
    )
    (o_true, lse_true), (o_plain, lse_plain) = call.truth(), call.plain()
    assert_within_budget(o, o_true, o_plain, "o")
    assert_within_budget(lse, lse_true, lse_plain, "lse")
    # a window of w keys is a selection of w blocks of one token
    M, N = call.k.shape[1], call.q.shape[1]
    position = torch.arange(M - N, M)
    cu = call.options["cu_seqlens"]
    if cu is not None:
        position -= cu.cpu()[torch.searchsorted(cu.cpu()[1:].contiguous(), position, right=True)]
    tokens = position[:, None] - torch.arange(min(window, M))
    ids = tokens.clamp(min=-1)[None, :, None].expand(problem.B, -1, problem.H, -1).to(call.ids)
    mask = dense_mask(ids, M, block_size=1, cu_seqlens=cu)
    inputs = (call.q, call.k, call.v)
    (o_true, lse_true), (o_plain, lse_plain) = (
        masked_attention(*(x.double() for x in inputs), mask),
        masked_attention(*inputs, mask),
    )
    assert_within_budget(o_window, o_true, o_plain, "o_window")
    assert_within_budget(lse_window, lse_true, lse_plain, "lse_window")


@places
def test_two_outputs_without_lse(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(N=5, M=37).make(device=device)
    inputs = (call.q, call.k, call.v, call.ids)
    o, o_window = ops.selected_and_window_attention(
        *inputs, window_size=3, block_size=16, backend=backend
    )
    assert torch.allclose(o, ops.selected_attention(*inputs, block_size=16), atol=1e-5)
    assert torch.allclose(
        o_window, ops.sliding_window_attention(*inputs[:3], window_size=3), atol=1e-5
    )


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    found = run(Problem(B=B, N=N, M=9), 3, torch.float32, "cpu", "reference")
    assert [x.shape for x in found] == [(B, N, 6, 40), (B, N, 6)] * 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"window_size": 0}, ValueError, "window_size: got 0"),
        ({"block_size": 1.5}, TypeError, "block_size: got 1.5"),
        ({"include_own_block": 1}, TypeError, "include_own_block: got 1"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
        ({"scale": -1.0}, ValueError, "scale: got -1.0"),
    ],
)
def test_wrong_arguments(change: dict, error: type, message: str) -> None:
    call = Problem(N=9, M=37).make()
    with pytest.raises(error, match=message):
        ops.selected_and_window_attention(
            call.q, call.k, call.v, call.ids, **{"window_size": 3, "block_size": 16} | change
        )
