"""A factor on the scores of each slot, and its gradient: what the choice of blocks learns from."""

from __future__ import annotations

import math

import pytest
import torch
from places import places_of, product, skip_unless_runs
from selection import Problem, assert_right
from torch import Tensor

from nsa_tutorial import ops

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("reference", "tilelang", "triton")
places = places_of(BACKENDS)
PROBLEMS = {
    "two KV heads, ragged tail": Problem(B=2, N=9, M=37, factors=True),
    "own block, counts": Problem(N=6, M=37, own=True, counts="random", factors=True),
    "a count for all": Problem(N=9, M=37, counts=2, factors=True),
    "packed": Problem(N=20, M=20, cu=(0, 2, 2, 19, 20), own=True, factors=True),
    "not causal": Problem(N=5, M=37, causal=False, factors=True),
    "decoding": Problem(B=2, N=1, M=75, S=3, factors=True),
    "widths of powers of two": Problem(N=20, M=100, D=32, DV=16, BS=32, factors=True),
    "blocks cut in parts": Problem(N=5, M=420, BS=200, S=2, factors=True),
    "a list of 40": Problem(N=3, M=400, BS=8, S=40, factors=True),
}
QUICK = {
    torch.float32: PROBLEMS,
    torch.float16: ["own block, counts"],
    torch.bfloat16: ["own block, counts"],
}
SLOW = {
    "tilelang": PROBLEMS.keys() - {"widths of powers of two", "a list of 40"},
    "triton": ["own block, counts", "packed", "not causal", "decoding", "blocks cut in parts"],
}


@product("problem", PROBLEMS, BACKENDS, QUICK, slow=SLOW)
def test_error_budget(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    """Against the dense formula with a factor for each key. Slots that show nothing hold NaN."""
    skip_unless_runs(backend, device, dtype)
    call = problem.make(dtype, device)
    slot_scale = call.options["slot_scale"]
    assert slot_scale.isnan().any()
    assert (slot_scale <= 0).any(), "a factor may turn the scores around"
    assert_right(call, backend)


@places
def test_ones_change_nothing(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    call = Problem(N=3, M=37, own=True).make(device=device)
    ones = torch.ones(call.ids.shape, device=device)
    torch.testing.assert_close(call.having(slot_scale=ones).run(backend), call.run(backend))


@places
def test_a_slot_that_is_seen(backend: str, device: str) -> None:
    """NaN in its factor spoils the heads of its group, in its row, and nothing else."""
    skip_unless_runs(backend, device)
    call = Problem(N=9, M=40, S=2).make(device=device)
    ids = torch.tensor([1, 0], dtype=torch.int32, device=device).expand(1, 9, 2, 2)
    factors = torch.ones(1, 9, 2, 2, device=device)
    factors[0, 4, 1, 0] = math.nan
    call = call.having(ids=ids, slot_scale=factors)
    spoiled = torch.zeros(1, 9, 6, dtype=torch.bool, device=device)
    spoiled[0, 4, 3:] = True
    o, lse = call.run(backend)
    assert torch.equal(o.isnan().any(-1), spoiled)
    assert torch.equal(lse.isnan(), spoiled)


@places
def test_the_window_has_no_factors(backend: str, device: str) -> None:
    """Beside a list that has. (On CUDA, of shapes that tensor descriptors take.)"""
    dtype = torch.float16 if device == "cuda" else torch.float32
    skip_unless_runs(backend, device, dtype)
    call = Problem(N=5, M=60, S=2, factors=True).make(dtype, device)
    options = {"block_size": 16, "window_size": 19, "return_lse": True, "backend": backend}
    inputs, factors = (call.q, call.k, call.v, call.ids), call.options["slot_scale"]
    scaled = ops.selected_and_window_attention(*inputs, **options, slot_scale=factors)
    plain = ops.selected_and_window_attention(*inputs, **options)
    torch.testing.assert_close(scaled[:2], call.run(backend))
    assert not torch.allclose(scaled[0], plain[0], atol=1e-2)
    assert torch.equal(scaled[2], plain[2]) and torch.equal(scaled[3], plain[3])


@places_of(BACKENDS, slow=["tilelang"])
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            Problem(B=2, N=9, M=37, G=3), id="two KV heads", marks=pytest.mark.exhaustive
        ),
        pytest.param(Problem(N=5, M=37, own=True, counts="random"), id="own block, counts"),
        pytest.param(
            Problem(N=24, M=24, cu=(0, 3, 3, 21, 24), own=True), id="packed",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Problem(N=5, M=420, BS=200, S=2), id="long blocks", marks=pytest.mark.exhaustive
        ),
    ],
)  # fmt: skip
def test_gradient_of_the_selection(problem: Problem, backend: str, device: str) -> None:
    """With `slot_scale = 1 + p - p.detach()`, the scores `p` that chose the blocks get
    `sum(ds * s)`: over the keys that the slot shows, and over the heads of the group."""
    skip_unless_runs(backend, device)
    call = problem.make(device=device)
    p = torch.rand(call.ids.shape, device=device, requires_grad=True)
    o, lse = call.having(slot_scale=1 + p - p.detach()).run(backend)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    finite = lse.isfinite()
    found = torch.autograd.grad((o * d_o).sum() + (lse * d_lse)[finite].sum(), p)[0]
    torch.testing.assert_close(found, expected(call, d_o, d_lse), atol=1e-4, rtol=1e-4)


def expected(call: object, d_o: Tensor, d_lse: Tensor) -> Tensor:
    """`sum(ds * s)` of each slot, literally, in fp64."""
    G = call.q.shape[2] // call.k.shape[2]
    q, k, v, d_o = (x.double() for x in (call.q, call.k, call.v, d_o))
    k, v, mask = (x.repeat_interleave(G, 2) for x in (k, v, call.mask()))
    s = torch.einsum("bnhd,bmhd->bnhm", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(s.masked_fill(~mask, -math.inf), -1).masked_fill(~mask, 0)
    d_weights = torch.einsum("bnhd,bmhd->bnhm", d_o, v)
    delta = (weights * d_weights).sum(-1) - d_lse
    each = weights * (d_weights - delta[..., None]) * s  # [B, N, HQ, M]
    each = each.unflatten(2, (-1, G)).sum(3)  # [B, N, H, M]
    of_slots = [(each * call.mask_of(i)).sum(-1) for i in range(call.ids.shape[-1])]
    return torch.stack(of_slots, -1).float()


@places_of(BACKENDS, slow=["tilelang", "triton"])  # tests/training judges all their gradients
def test_slots_that_show_nothing_have_no_gradient(backend: str, device: str) -> None:
    """Whatever their factor: they are empty, in the future, past the end, or past the count."""
    skip_unless_runs(backend, device)
    problem = Problem(N=5, M=37, counts="random", own=True, factors=True)
    call = problem.make(device=device)
    factors = call.options["slot_scale"].clone().requires_grad_()
    call.having(slot_scale=factors).run(backend)[0].square().sum().backward()
    shows_nothing = factors.isnan()
    assert shows_nothing.any() and not shows_nothing.all()
    assert (factors.grad[shows_nothing] == 0).all()
    assert (factors.grad[~shows_nothing] != 0).any()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_count_for_all_cuts_the_factors_too(count: int) -> None:
    call = Problem(N=9, M=37, counts=count, own=True).make()
    factors = torch.rand(call.ids.shape, requires_grad=True)
    call.having(slot_scale=factors).run("reference")[0].square().sum().backward()
    assert (factors.grad[..., count:] == 0).all()
    assert count == 0 or (factors.grad[..., :count] != 0).any()
