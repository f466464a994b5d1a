"""Gradients of every operator on every backend, against fp64: the error budget of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from branches import Shape
from places import places_of, product, skip_unless_runs
from selection import Problem, scaled_attention
from torch import Tensor

from nsa_tutorial import ops

BACKENDS = ["reference", "tilelang", "triton"]
places = places_of(BACKENDS)
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Queries, keys, values and perhaps factors to outputs and log-sum-exps, by an operator and by
    the dense formula."""

    run: Callable[..., Outputs]
    dense: Callable[..., Outputs]
    inputs: dict[str, Tensor]


Make = Callable[[torch.dtype, str, str], Case]


def lists(problem: Problem) -> Make:
    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        call = problem.make(dtype, device)
        mask = call.mask()

        def run(**inputs: Tensor) -> Outputs:
            return call.having(**inputs).run(backend)

        def dense(q: Tensor, k: Tensor, v: Tensor, **slot_scale: Tensor) -> Outputs:
            factors = call.having(**slot_scale).factors()
            factors = factors if factors is None else factors.to(q.dtype)
            return scaled_attention(q, k, v, mask, factors, problem.scale)

        return Case(run, dense, inputs_of(call))

    return make


def window(shape: Shape) -> Make:
    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
        options = {"window_size": shape.window, "return_lse": True, "backend": backend}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
            return ops.sliding_window_attention(q, k, v, cu_seqlens=cu_seqlens, **options)

        mask = shape.over_heads(shape.seen_keys(shape.window)).to(device)
        inputs = dict(zip("qkv", (x.to(device) for x in shape.make(dtype)), strict=True))
        return Case(run, lambda q, k, v: scaled_attention(q, k, v, mask), inputs)

    return make


def both(problem: Problem, window_size: int) -> Make:
    """Two outputs at once, each with a gradient of its own."""

    def make(dtype: torch.dtype, device: str, backend: str) -> Case:
        call, of_lists = problem.make(dtype, device), lists(problem)(dtype, device, backend)
        options = {name: x for name, x in call.options.items() if name != "causal"}
        options |= {"window_size": window_size, "return_lse": True, "backend": backend}
        shape = Shape(
            B=problem.B, N=problem.N, M=problem.M, H=problem.H, G=problem.G, window=window_size,
            cu=problem.cu,
        )  # fmt: skip
        seen = shape.over_heads(shape.seen_keys(window_size)).to(device)

        def run(q: Tensor, k: Tensor, v: Tensor, **factors: Tensor) -> Outputs:
            return ops.selected_and_window_attention(q, k, v, call.ids, **options | factors)

        def dense(q: Tensor, k: Tensor, v: Tensor, **factors: Tensor) -> Outputs:
            return *of_lists.dense(q, k, v, **factors), *scaled_attention(q, k, v, seen)

        return Case(run, dense, of_lists.inputs)

    return make


def inputs_of(call: object) -> dict[str, Tensor]:
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    factors = call.options.get("slot_scale")
    return inputs if factors is None else inputs | {"slot_scale": factors}


CASES = {
    "two KV heads, ragged tail": lists(Problem(N=20, M=37, D=16, DV=24)),
    "own block, counts": lists(Problem(N=6, M=37, own=True, counts="random")),
    "factors, own block": lists(Problem(N=6, M=37, own=True, counts="random", factors=True)),
    "packed": lists(Problem(N=20, M=20, cu=(0, 2, 2, 19, 20), own=True)),
    "packed, factors": lists(Problem(N=20, M=20, cu=(0, 0, 3, 20, 20), factors=True)),
    "not causal": lists(Problem(N=5, M=37, causal=False, factors=True)),
    "group of one": lists(Problem(N=20, M=20, G=1)),
    "group of 16": lists(Problem(N=20, M=37, G=16, D=32, DV=16)),
    "group of 20": lists(Problem(B=2, N=3, M=37, G=20, factors=True)),
    "decoding": lists(Problem(B=2, N=1, M=37)),
    "blocks of 5": lists(Problem(N=20, M=37, BS=5, own=True)),
    "blocks of 24": lists(Problem(N=5, M=101, BS=24)),
    "blocks of 64": lists(Problem(N=12, M=300, BS=64, D=32, DV=64, factors=True)),
    "blocks of 128": lists(Problem(N=9, M=300, BS=128, D=64, DV=32)),
    "blocks of 128, group of 16": lists(
        Problem(N=9, M=300, H=1, G=16, BS=128, D=32, DV=16, counts="random", factors=True)
    ),
    "blocks of 200": lists(Problem(N=3, M=420, BS=200, S=2, factors=True)),
    "a list of 40": lists(Problem(N=5, M=400, BS=8, S=40)),
    "one slot": lists(Problem(N=5, M=37, S=1)),
    "nothing is visible": lists(Problem(N=5, M=20, counts=0)),
    "many queries of one block": lists(Problem(B=2, N=200, M=200, H=1, G=4, S=2)),
    "window": window(Shape(N=9, M=37, window=7)),
    "window over tiles": window(Shape(N=140, M=140, window=30)),
    "window of one": window(Shape(N=9, M=9, window=1)),
    "window longer than the sequence": window(Shape(B=2, N=9, M=9, window=100)),
    "window, packed": window(Shape(N=80, M=80, B=1, window=70, cu=(0, 3, 3, 80))),
    "list and window": both(Problem(N=20, M=37), 7),
    "list and window, all at once": both(
        Problem(N=9, M=9, cu=(0, 3, 3, 9), own=True, counts="random", factors=True), 4
    ),
}
QUICK = {
    torch.float32: CASES.keys()
    - {"group of 16", "blocks of 128", "blocks of 128, group of 16", "many queries of one block"},
    torch.float16: ["factors, own block", "blocks of 128, group of 16"],
    torch.bfloat16: ["own block, counts", "list and window, all at once"],
}
# TileLang compiles four kernels for every new shape, and Triton interprets them
SLOW = {
    "tilelang": [
        "own block, counts", "packed", "factors, own block", "packed, factors", "not causal",
        "nothing is visible", "decoding", "window", "list and window, all at once",
    ],
    "triton": [
        "own block, counts", "not causal", "nothing is visible", "group of 20", "decoding",
        "blocks of 24", "blocks of 128, group of 16", "window, packed",
        "list and window, all at once",
    ],
}  # fmt: skip

# of groups one and twenty, of blocks 5, 8, 24 and 200; on a GPU every one
REST = {
    "tilelang": CASES.keys()
    - {"two KV heads, ragged tail", "group of 16", "blocks of 64", "blocks of 128"}
}


def gradients(outputs: Outputs, inputs: list[Tensor]) -> list[Tensor]:
    """Of a loss in which every output and log-sum-exp has a weight of its own; empty rows are left
    out."""
    g = torch.Generator().manual_seed(3)
    loss = 0
    for x in outputs:
        weight = torch.randn(x.shape, generator=g).to(x.device, x.dtype)
        loss = loss + (x.masked_fill(x == -torch.inf, 0) * weight).double().sum()
    return list(torch.autograd.grad(loss, inputs))


def of_inputs(
    function: Callable[..., Outputs], inputs: dict[str, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Gradients by `function` in `dtype`; factors are in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: x.detach().to(wide if name == "slot_scale" else dtype).requires_grad_()
        for name, x in inputs.items()
    }
    return gradients(function(**leaves), list(leaves.values()))


@product("make", CASES, BACKENDS, QUICK, slow=SLOW, rest=REST)
def test_error_budget(make: Make, dtype: torch.dtype, backend: str, device: str) -> None:
    """At most twice the error of plain PyTorch in the same dtype, plus a millionth of the largest
    gradient."""
    skip_unless_runs(backend, device, dtype)
    case = make(dtype, device, backend)
    right = of_inputs(case.dense, case.inputs, torch.float64)
    rough = of_inputs(case.dense, case.inputs, dtype)
    found = of_inputs(case.run, case.inputs, dtype)
    for name, a, b, c in zip(case.inputs, right, rough, found, strict=True):
        assert c.dtype == (torch.float32 if name == "slot_scale" else dtype)
        budget = 2 * (b.double() - a).abs().max() + 1e-6 * a.abs().max() + 1e-6
        error = (c.double() - a).abs().max()
        assert error <= budget, f"gradient of {name}: {error:.2e} over {budget:.2e}"


LISTS = {name: make for name, make in CASES.items() if "window" not in name}
IN_EACH_ORDER = {"tiles": ["own block, counts"], "blocks": ["packed"]}
# each case in one of the orders, and what they differ in most in both
EITHER = {
    "tiles": [*list(LISTS)[::2], "packed", "group of 16", "many queries of one block"],
    "blocks": [*list(LISTS)[1::2], "group of one", "not causal", "decoding"],
}


@product(
    "make", LISTS, ["tiles", "blocks"], {torch.float32: LISTS}, slow=IN_EACH_ORDER, rest=EITHER
)
def test_error_budget_in_each_order(
    make: Make, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Triton, in the orders that it does not take by itself for few queries."""
    test_error_budget(make, dtype, backend, device)


@places_of(BACKENDS, slow=["tilelang"])
def test_steep_scores(backend: str, device: str) -> None:
    """Of a thousand and more, hidden ones among them. The weights are computed from a stored `lse`,
    so they are as exact as fp32 holds a number of that size."""
    skip_unless_runs(backend, device)
    problem = Problem(N=3, M=37, magnitude=100.0, scale=1.0, own=True)
    case = lists(problem)(torch.float32, device, backend)
    right = of_inputs(case.dense, case.inputs, torch.float64)
    found = of_inputs(case.run, case.inputs, torch.float32)
    largest = case.run(**case.inputs)[1].abs().max()
    assert largest > 1000
    for name, a, b in zip(case.inputs, right, found, strict=True):
        error = (b.double() - a).abs().max() / a.abs().max()
        assert error < 8 * torch.finfo(torch.float32).eps * largest, f"gradient of {name}"


@places
def test_what_nobody_sees_has_no_gradient(backend: str, device: str) -> None:
    """Keys of blocks that no query lists, and queries that see nothing: 0, not next to it."""
    skip_unless_runs(backend, device)
    call = Problem(N=6, M=90).make(device=device)
    ids = torch.tensor([[1, 3]], dtype=torch.int32, device=device).expand(1, 6, 2, 2).clone()
    ids[:, 2:4] = -1
    q, k, v = (x.requires_grad_() for x in (call.q, call.k, call.v))
    o, lse = call.having(ids=ids).run(backend)
    (o.square().sum() + lse[lse.isfinite()].square().sum()).backward()
    is_listed = torch.tensor([0, 1, 0, 1, 0, 0], device=device).bool().repeat_interleave(16)[:90]
    for x in (k, v):
        assert (x.grad[:, ~is_listed] == 0).all()
        assert (x.grad[:, is_listed] != 0).any(-1).all()
    blind = (ids < 0).all(-1)[0, :, 0]
    assert (q.grad[:, blind] == 0).all()
    assert (q.grad[:, ~blind] != 0).any(-1).all()


@places
def test_tensors_with_other_strides(backend: str, device: str) -> None:
    """Heads before positions, a slice of something wider, and a gradient that is one number
    expanded."""
    skip_unless_runs(backend, device)
    call = Problem(N=5, M=37, factors=True).make(device=device)

    def run(**inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        assert [x.stride() for x in leaves] == [x.stride() for x in inputs.values()]
        o, _ = call.having(**dict(zip(inputs, leaves, strict=True))).run(backend)
        return list(torch.autograd.grad(o.sum(), leaves))

    inputs = inputs_of(call)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    strided["v"] = torch.cat([inputs["v"]] * 2, -1)[..., : inputs["v"].shape[-1]]
    assert not any(x.is_contiguous() for x in strided.values())
    torch.testing.assert_close(run(**strided), run(**inputs))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["tilelang", "triton"])
def test_the_same_bits_every_time(backend: str) -> None:
    """Under `torch.use_deterministic_algorithms`, where thousands of queries share a block."""
    skip_unless_runs(backend, "cuda", torch.bfloat16)
    call = Problem(N=5000, M=5000, H=1, G=4, D=32, DV=32).make(torch.bfloat16, "cuda")
    ids = torch.rand(1, 5000, 1, 8, device="cuda").argsort(-1)[..., :4].int()
    factors = torch.rand(ids.shape, device="cuda")
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v, factors)]
    options = {"block_size": 16, "window_size": 70, "return_lse": True, "backend": backend}

    def run() -> list[Tensor]:
        q, k, v, slot_scale = inputs
        outputs = ops.selected_and_window_attention(q, k, v, ids, **options, slot_scale=slot_scale)
        return gradients(outputs, inputs)

    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("M", [11, 3], ids=["summaries", "none"])
def test_gradients_of_summaries(M: int) -> None:
    """Through the attention to them, and through the weights that make them."""
    g = torch.Generator().manual_seed(0)
    q, x = torch.randn(1, M, 4, 5, generator=g).double(), torch.randn(1, M, 2, 5, generator=g)
    weight = torch.randn(4, 2, generator=g).double().requires_grad_()
    inputs = [q.requires_grad_(), x.double().requires_grad_(), weight]

    def outputs(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        sizes = {"length": 4, "stride": 3}
        k = ops.compress(x, kind="weighted", weight=weight, **sizes)
        v = ops.compress(x, **sizes)
        o, lse = ops.compressed_attention(q, k, v, **sizes, return_lse=True)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)


def test_a_row_that_no_loss_asks_for_adds_nothing() -> None:
    """A padded row may hold anything: its gradient is 0, and 0 * NaN is not."""
    shape = Shape(N=6, M=6, window=3)
    q, k, v = (x.requires_grad_() for x in shape.make())
    spoiled = q.detach().clone()
    spoiled[:, 4:] = torch.nan
    spoiled.requires_grad_()
    right = torch.autograd.grad(
        ops.sliding_window_attention(q, k, v, window_size=3)[:, :4].sum(), (k, v)
    )
    found = torch.autograd.grad(
        ops.sliding_window_attention(spoiled, k, v, window_size=3)[:, :4].sum(), (k, v)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
