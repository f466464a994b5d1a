"""Attention to summaries on every backend, forward and backward, against fp64: the error budget of
the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from branches import Shape, assert_attention
from places import places_of, product, skip_unless_runs
from selection import scaled_attention
from test_compression import SHAPES as GEOMETRIES
from torch import Tensor

from nsa_tutorial import ops

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]

BACKENDS = ["reference", "tilelang", "triton"]
places = places_of(BACKENDS)

# Kernels take 128 queries and 64 summaries at a time.
TILES = {
    "steps without a mask": Shape(N=20, M=200, H=2, G=1, D=16, DV=16, length=2, stride=1),
    "packed over several tiles": Shape(
        N=150, M=150, G=1, D=16, DV=16, length=2, stride=1, cu=(0, 60, 60, 61, 150)
    ),
}
SHAPES = (
    GEOMETRIES
    | TILES
    | {
        # of the sizes for which TileLang has compiled kernels, where Triton would take its time
        **{f"{name}, groups": replace(x, G=3, D=24, DV=40) for name, x in TILES.items()},
        "group of one": Shape(N=20, M=20, G=1),
        "group of 20": Shape(N=9, M=20, H=1, G=20, D=32, DV=16),
        "widths of 80 and 64": Shape(N=20, M=20, D=80, DV=64),
        "widths of 192 and 128": Shape(N=20, M=20, G=1, D=192, DV=128),
        "widths of 16 and 256": Shape(N=20, M=20, H=1, G=1, D=16, DV=256),
        "a batch of whole tiles": Shape(B=2, N=128, M=128, G=1, D=16, DV=16, length=4, stride=2),
        "a batch of odd lengths": Shape(B=3, N=90, M=90, G=1, D=16, DV=16, length=4, stride=2),
        "one query, many keys": Shape(B=2, N=1, M=200, length=2, stride=1),
        "more summaries than a step, few queries": Shape(N=5, M=150, length=2, stride=1),
    }
)
QUICK = {
    torch.float32: [
        "length no multiple of stride",
        "more keys than queries",
        "fewer keys than a summary",
        "packed, one empty, one too short",
        "large scores",
        "one KV head, G 16",
        "group of 20",
        "a batch of whole tiles",
        *TILES,
        *(f"{name}, groups" for name in TILES),
    ],
    torch.float16: ["more keys than queries"],
    torch.bfloat16: ["packed, one empty, one too short"],
}
# TileLang compiles kernels for every group, width and dtype, and Triton interprets them: its
# gradients take seconds where there are several tiles.
SLOW = {
    "tilelang": [
        "more keys than queries",
        "packed, one empty, one too short",
        "large scores",
        "steps without a mask, groups",
        "packed over several tiles, groups",
    ],
    "triton": [
        "more keys than queries",
        "fewer keys than a summary",
        "packed, one empty, one too short",
        "group of 20",
        "steps without a mask",
    ],
}
MORE_OUTPUTS = ["large scores", "a batch of whole tiles", "packed over several tiles"]
# TileLang compiles for each group and width: of the groups the largest, of the widths the extremes
REST = {"tilelang": SHAPES.keys() - {"group of one", "widths of 80 and 64", "one KV head, G 16"}}


def attend(
    shape: Shape, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, backend: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    cu_seqlens = None if shape.cu is None else shape.offsets.to(q.device)
    return ops.compressed_attention(
        q, k_cmp, v_cmp, length=shape.length, stride=shape.stride, scale=scale, num_keys=shape.M,
        cu_seqlens=cu_seqlens, return_lse=True, backend=backend,
    )  # fmt: skip


def inputs_of(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, and as many summaries as the keys have: random ones, whose scores differ more than
    those of means."""
    q, k, v = shape.make(dtype)
    M_c = len(shape.summaries())
    return [x.to(device) for x in (q, k[:, :M_c], v[:, :M_c])]


OUTPUTS = SLOW | {"triton": [*SLOW["triton"], *MORE_OUTPUTS]}


@product("shape", SHAPES, BACKENDS, QUICK, slow=OUTPUTS, rest=REST)
def test_outputs(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if dtype != torch.float32 and shape.magnitude > 1:
        pytest.skip(
            "rounded scores of this size decide alone: the reference differs from the truth as much"
        )
    inputs = inputs_of(shape, dtype, device)
    mask = shape.over_heads(shape.seen_summaries()).to(device)
    assert_attention(*attend(shape, *inputs, backend), *inputs, mask)
    if backend == "reference" or shape.N < 20:
        assert_attention(*attend(shape, *inputs, backend, 0.31), *inputs, mask, 0.31)


def gradients(o: Tensor, lse: Tensor, inputs: list[Tensor], seed: int = 3) -> list[Tensor]:
    """Through output and log-sum-exp at once, each with a gradient of its own, also where a query
    sees nothing."""
    g = torch.Generator().manual_seed(seed)
    d = [torch.randn(x.shape, generator=g).to(x.device, x.dtype) for x in (o, lse)]
    return list(torch.autograd.grad((o, lse), inputs, d))


@product("shape", SHAPES, BACKENDS, QUICK, slow=SLOW, rest=REST)
def test_gradients(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    """At most twice the error of plain PyTorch in the same dtype, plus a millionth of the largest
    gradient."""
    skip_unless_runs(backend, device, dtype)
    if shape.magnitude > 1:
        pytest.skip("the weights are as exact as the stored log-sum-exp: see test_steep_scores")
    inputs = inputs_of(shape, dtype, device)
    mask = shape.over_heads(shape.seen_summaries()).to(device)

    def dense(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        return gradients(*scaled_attention(*leaves, mask), leaves)

    leaves = [x.requires_grad_() for x in inputs]
    found = gradients(*attend(shape, *leaves, backend), leaves)
    for name, a, b, c in zip("qkv", dense(torch.float64), dense(dtype), found, strict=True):
        assert (c.shape, c.dtype) == (a.shape, dtype)
        if a.numel():
            # a product of more than 128 in fp32 is one chain on a GPU, where cuBLAS adds up parts
            is_chain = device == "cuda" and dtype == torch.float32 and max(shape.D, shape.DV) > 128
            budget = (8 if is_chain else 2) * (b.double() - a).abs().max()
            budget += 1e-6 * a.abs().max() + 1e-6
            error = (c.double() - a).abs().max()
            assert error <= budget, f"gradient of {name}: {error:.2e} over {budget:.2e}"


@places_of(BACKENDS)
def test_a_large_scale_and_a_first_step_that_is_hidden(backend: str, device: str) -> None:
    """The second text begins in the middle of a tile of queries, which walks the first one's
    summaries before: no maximum yet, and a scale that no largest number survives."""
    skip_unless_runs(backend, device)
    shape = SHAPES["packed over several tiles" + ", groups" * (backend == "tilelang")]
    inputs = inputs_of(shape, torch.float32, device)
    mask = shape.over_heads(shape.seen_summaries()).to(device)
    assert_attention(*attend(shape, *inputs, backend, 4.0), *inputs, mask, 4.0)


@places_of(BACKENDS, slow=["tilelang"])
def test_steep_scores(backend: str, device: str) -> None:
    """Of a thousand and more, rising and falling along the summaries: the running maximum runs.
    Gradients are as exact as fp32 holds a log-sum-exp of that size."""
    skip_unless_runs(backend, device)
    shape = Shape(N=20, M=150, H=1, G=2, D=16, DV=16, length=2, stride=1)
    q, k, v = (x.to(device) for x in shape.make())
    q, k, v = torch.ones_like(q), k[:, :149], v[:, :149]
    slope = torch.linspace(-40, 40, 149, device=device)[:, None, None]
    mask = shape.over_heads(shape.seen_summaries()).to(device)
    for steep in (slope, -slope):
        inputs = [q, (k + steep).contiguous(), v]
        o, lse = attend(shape, *inputs, backend, 2.0)
        assert lse[lse.isfinite()].abs().max() > 1000
        assert_attention(o, lse, *inputs, mask, 2.0)
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = gradients(*attend(shape, *leaves, backend, 2.0), leaves)
        truth = [x.double().detach().requires_grad_() for x in inputs]
        right = gradients(*scaled_attention(*truth, mask, scale=2.0), truth)
        for name, a, b in zip("qkv", right, found, strict=True):
            error = (b.double() - a).abs().max() / a.abs().max()
            assert error < 8 * torch.finfo(torch.float32).eps * 1500, f"gradient of {name}"


@places
def test_gradients_of_both_outputs_add_up(backend: str, device: str) -> None:
    """A loss of the output alone, and one of the log-sum-exp alone: neither is asked of a gradient
    that is not there."""
    skip_unless_runs(backend, device)
    shape = Shape(N=9, M=20)
    leaves = [x.requires_grad_() for x in inputs_of(shape, torch.float32, device)]
    o, lse = attend(shape, *leaves, backend)
    losses = o.sum(), lse.square().sum()
    alone = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
    both = torch.autograd.grad(sum(losses), leaves)
    for of_o, of_lse, of_both in zip(*alone, both, strict=True):
        torch.testing.assert_close(of_o + of_lse, of_both)
    assert (alone[1][2] == 0).all(), "a value reached the log-sum-exp"


@places
def test_what_nobody_sees_has_no_gradient(backend: str, device: str) -> None:
    """Summaries that no query asks for, and queries before the first summary ends: 0, not next to
    it."""
    skip_unless_runs(backend, device)
    shape = Shape(N=37, M=37)
    q, k, v = (x.requires_grad_() for x in inputs_of(shape, torch.float32, device))
    o, lse = attend(shape, q, k, v, backend)
    asked = slice(0, 21)  # these see summaries 0 to 4
    loss = o[:, asked].square().sum() + lse[:, asked][lse[:, asked].isfinite()].square().sum()
    d_q, d_k, d_v = torch.autograd.grad(loss, (q, k, v))
    for d in (d_k, d_v):
        assert (d[:, 5:] == 0).all()
        assert (d[:, :5] != 0).any(-1).all()
    assert (d_q[:, :6] == 0).all() and (d_q[:, 21:] == 0).all()
    assert (d_q[:, 9:21] != 0).any(-1).all()  # one summary alone has the weight 1 always


@places
def test_other_strides(backend: str, device: str) -> None:
    """Heads before positions, a slice of something wider, and a gradient that is one number
    expanded."""
    skip_unless_runs(backend, device)
    shape = Shape(B=2, N=5, M=20)
    inputs = inputs_of(shape, torch.float32, device)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    strided[2] = torch.cat([inputs[2]] * 2, -1)[..., : shape.DV]
    assert not any(x.is_contiguous() for x in strided)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        o, _ = attend(shape, *leaves, backend)
        return [o, *torch.autograd.grad(o.sum(), leaves)]

    torch.testing.assert_close(run(strided), run([x.contiguous() for x in inputs]))


@places_of(BACKENDS, slow=["tilelang", "triton"])  # their packed shapes are judged above
def test_packed_sequences_are_separate_calls(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    shape = GEOMETRIES["packed, one empty, one too short"]
    leaves = [x.requires_grad_() for x in inputs_of(shape, torch.float32, device)]
    o, lse = attend(shape, *leaves, backend)
    d_q, d_k, d_v = torch.autograd.grad(o.square().sum() + lse[:, 18:].sum(), leaves)
    first = 0
    for start, end in shape.bounds:
        part = replace(shape, N=end - start, M=end - start, cu=None)
        if start == end:
            continue
        of_part = slice(first, first + len(part.summaries()))
        first = of_part.stop
        q, k, v = leaves
        few = [q[:, start:end], k[:, of_part], v[:, of_part]]
        few = [x.detach().requires_grad_() for x in few]
        o_part, lse_part = attend(part, *few, backend)
        torch.testing.assert_close(o[:, start:end], o_part)
        torch.testing.assert_close(lse[:, start:end], lse_part)
        loss = o_part.square().sum()
        if end > 18:
            loss = loss + lse_part[:, 6:].sum()
        right = torch.autograd.grad(loss, few)
        found = (d_q[:, start:end], d_k[:, of_part], d_v[:, of_part])
        # a tile begins at another query here, so sums of some 20 terms are taken in another order
        torch.testing.assert_close(found, right, rtol=1e-5, atol=5e-5)


@places
@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    shape = Shape(B=B, N=N, M=9)
    leaves = [x.requires_grad_() for x in inputs_of(shape, torch.float32, device)]
    o, lse = attend(shape, *leaves, backend)
    assert (o.shape, lse.shape) == ((B, N, 6, 40), (B, N, 6))
    found = torch.autograd.grad(o.sum() + lse.sum(), leaves)
    assert all(torch.equal(d, torch.zeros_like(x)) for d, x in zip(found, leaves, strict=True))
