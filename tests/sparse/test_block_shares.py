"""A choice that learns: its gradient is that of the dense formula, its output stays the same."""

from __future__ import annotations

import math

import pytest
import torch
from branches import Shape
from places import skip_unless_runs
from selection import scaled_attention
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse import block_shares
from nsa_tutorial.sparse.selected_attention import dense_mask

SIZES = {"length": 8, "stride": 4, "block_size": 16}
BATCH = Shape(B=2, N=37, M=50, D=16, DV=16, length=8, stride=4, BS=16)
LATEST = Shape(N=5, M=50, D=16, DV=16, length=8, stride=4, BS=16)
PACKED = Shape(N=50, M=50, D=16, DV=16, length=8, stride=4, BS=16, cu=(0, 3, 3, 29, 50))


def tensors(shape: Shape) -> list[Tensor]:
    """Queries, summary keys and values, keys and values, and a gate."""
    q, k, v = shape.make()
    summaries = len(shape.summaries())
    g = torch.Generator().manual_seed(1)
    k_cmp, v_cmp = (torch.randn(shape.B, summaries, *x.shape[2:], generator=g) for x in (k, v))
    return [q, 2 * k_cmp, v_cmp, k, v, torch.rand(q.shape[:3], generator=g)]


def run(shape: Shape, given: list[Tensor], **options: object) -> Tensor:
    q, *pairs, gate = given
    cu_seqlens = None if shape.offsets is None else shape.offsets.to(q.device)
    sizes = {**SIZES, "num_keys": shape.M, "cu_seqlens": cu_seqlens, "block_counts": 3}
    gates = (torch.zeros_like(gate), gate, None)
    return ops.three_branches(q, pairs[:2], pairs[2:], (), gates, **sizes, **options)


def dense(shape: Shape, given: list[Tensor], ids: Tensor, scale: float) -> Tensor:
    """The selected branch, every block with its share of the attention to the summaries."""
    q, k_cmp, _, k, v, gate = given
    H, G, BS = shape.H, shape.G, shape.BS
    seen = shape.seen_summaries()
    s = torch.einsum("bnhd,bmhd->bnhm", q, k_cmp.repeat_interleave(G, 2)) * scale
    s = s.masked_fill(~seen[:, None], -math.inf)
    is_blind = ~seen.any(-1)[:, None, None]
    mass = torch.softmax(s.masked_fill(is_blind, 0), -1).masked_fill(is_blind, 0)
    mass = mass.unflatten(2, (H, G)).mean(3)  # [B, N, H, M_c]
    part = torch.zeros(mass.shape[-1], -(-shape.M // BS), dtype=q.dtype)
    for j, (_, first) in enumerate(shape.summaries()):
        for token in range(first, first + shape.length):
            part[j, token // BS] += 1 / shape.length
    share = mass @ part  # [B, N, H, NB]
    factor = 1 + share - share.detach()
    block = torch.zeros(shape.N, shape.M, dtype=torch.long)
    for n, of, _ in shape.queries():
        start, end = shape.bounds[of]
        block[n, start:end] = torch.arange(end - start) // BS
    factors = factor.gather(-1, block[:, None].expand(shape.B, -1, H, -1))
    mask = dense_mask(ids, shape.M, block_size=BS, cu_seqlens=shape.offsets)
    return gate[..., None] * scaled_attention(q, k, v, mask, factors, scale)[0]


@pytest.mark.parametrize(
    ("shape", "backend", "device"),
    [
        pytest.param(BATCH, "reference", "cpu", id="batch-reference"),
        pytest.param(PACKED, "reference", "cpu", id="packed-reference"),
        pytest.param(LATEST, "triton", "cpu", id="latest-triton"),
        pytest.param(LATEST, "tilelang", "cpu", id="tilelang", marks=pytest.mark.exhaustive),
        pytest.param(BATCH, "triton", "cuda", id="batch-cuda", marks=pytest.mark.gpu),
        pytest.param(PACKED, "triton", "cuda", id="packed-cuda", marks=pytest.mark.gpu),
    ],
)
def test_the_gradient_is_that_of_the_dense_formula(
    shape: Shape, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few queries at a time. The shares are plain PyTorch on every backend: in fp64, to the last
    digits."""
    skip_unless_runs(backend, device)
    monkeypatch.setattr(block_shares, "CHUNK", 20_000)
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = tensors(shape)
    scale = shape.D**-0.5
    inputs = [x.to(device, dtype, copy=True).requires_grad_() for x in given]
    q, k_cmp = (x.detach() for x in inputs[:2])
    cu_seqlens = None if shape.offsets is None else shape.offsets.to(device)
    ids = ops.select_blocks(
        q, k_cmp, **SIZES, top_n=3, num_keys=shape.M, cu_seqlens=cu_seqlens, backend=backend
    )
    o = run(shape, inputs, learn_choice=True, backend=backend)
    same = run(shape, inputs, backend=backend)
    torch.testing.assert_close(o, same, atol=1e-6, rtol=0)

    exact = [x.detach().double().requires_grad_() for x in given]
    right = dense(shape, exact, ids.cpu(), scale)
    weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(2)).double()
    (o * weight.to(o)).sum().backward()
    (right * weight).sum().backward()
    bounds = {"atol": 1e-10, "rtol": 0} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 1e-3}
    assert (exact[1].grad != 0).any(), "the summaries that chose learn"
    for i in (0, 1, 3, 4):
        found = inputs[i].grad.cpu().double()
        torch.testing.assert_close(found, exact[i].grad, **bounds)


def test_hidden_summaries_leak_nowhere() -> None:
    """NaN in a summary that the first queries do not see, and in the queries that see it."""
    given = [x.requires_grad_() for x in tensors(PACKED)]
    spoiled = [x.detach().clone() for x in given]
    spoiled[1][:, -1] = math.nan
    spoiled[0][:, -1] = math.nan
    spoiled = [x.requires_grad_() for x in spoiled]
    for tried in (given, spoiled):
        run(PACKED, tried, learn_choice=True, backend="reference")[:, :29].sum().backward()
    assert torch.equal(given[0].grad[:, :29], spoiled[0].grad[:, :29])
    early = slice(0, len([s for s, _ in PACKED.summaries() if s < 3]))
    assert torch.equal(given[1].grad[:, early], spoiled[1].grad[:, early])


def test_what_does_not_choose_does_not_learn() -> None:
    q, k_cmp, v_cmp, k, v, gate = tensors(BATCH)
    ids = torch.zeros(2, 37, 2, 1, dtype=torch.int32)
    options = {**SIZES, "num_keys": 50, "learn_choice": True}
    for gates, lists in (((gate, gate, None), {"block_indices": ids}), ((gate, None, gate), {})):
        with pytest.raises(ValueError, match="learn_choice: got True, expected False: without g_"):
            ops.three_branches(q, (k_cmp, v_cmp), (k, v), (), gates, **options, **lists)
    with pytest.raises(ValueError, match=r"slot_scale: got .*expected None without block_indices"):
        ops.native_sparse_attention(q, k, v, gate, gate, slot_scale=torch.ones(2, 37, 2, 1))
