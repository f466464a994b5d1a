"""The operators behave like PyTorch's own: they pass `opcheck`, compile in one graph whatever the
length, obey autocast, and run on meta and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from places import places_of, skip_unless_runs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from nsa_tutorial import backends, ops
from nsa_tutorial.sparse.compression import MLPWeights

HQ, H, D, DV = 6, 2, 24, 40  # of other tests, too: TileLang has compiled kernels for them
BACKENDS = ["reference", "tilelang", "triton"]
places = places_of(BACKENDS)
Call = Callable[[], object]


def inputs(
    N: int = 20, M: int = 20, *, device: str = "cpu", grad: bool = False, B: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`q`, `k` and `v`."""
    g = torch.Generator().manual_seed(0)
    sizes = ((N, HQ, D), (M, H, D), (M, H, DV))
    drawn = (torch.randn(B, *size, generator=g).to(device, dtype) for size in sizes)
    return tuple(x.requires_grad_(grad) for x in drawn)


def lists(N: int = 20, device: str = "cpu") -> Tensor:
    return torch.tensor([1, -1, 0], dtype=torch.int32, device=device).expand(1, N, H, 3).clone()


PACKED = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def samples(backend: str, device: str, grad: bool) -> Iterator[tuple[object, tuple]]:
    """Operators with arguments of theirs, as `ops` gives them: few queries, each runs many
    times."""
    N = 20 if backend == "reference" else 8
    q, k, v = inputs(N, N, device=device, grad=grad)
    ids, counts = lists(N, device), torch.full((1, N, H), 2, device=device)
    factors = torch.linspace(0.5, 1.5, 3, device=device).repeat(1, N, H, 1).requires_grad_(grad)
    packed, scale = PACKED.clamp(max=N).to(device), 0.25
    later = inputs(3, N, device=device, grad=grad)
    attend = torch.ops.nsa_tutorial.selected_attention.default
    yield attend, (q, k, v, ids, None, None, None, 16, False, True, scale, backend, "auto")
    yield attend, (q, k, v, ids, counts, factors, packed, 4, True, False, scale, backend, "auto")
    yield attend, (*later, ids[:, :3], None, None, None, 16, True, True, scale, backend, "auto")
    window = torch.ops.nsa_tutorial.sliding_window_attention.default
    yield window, (q, k, v, None, 5, scale, backend)
    yield window, (*later, None, 5, scale, backend)
    both = torch.ops.nsa_tutorial.selected_and_window_attention.default
    yield both, (q, k, v, ids, None, None, packed, 5, 4, True, scale, backend)
    yield both, (q, k, v, ids, None, factors, None, 5, 4, False, scale, backend)
    if backend != "reference":  # which leaves these two to PyTorch
        mean = torch.ops.nsa_tutorial.mean_summaries.default
        first = torch.tensor([0, 2, 3], device=device)
        yield mean, (k, first, 5, 3, backend)
        yield mean, (k, first[:0], 5, 3, backend)
        gated = torch.ops.nsa_tutorial.gated_sum.default
        gates = [q.detach()[..., i].clone().requires_grad_(grad) for i in range(3)]
        outputs = [q.detach().clone().requires_grad_(grad) for _ in range(3)]
        stacked = torch.stack([x.detach() for x in outputs[1:]]).requires_grad_(grad)
        yield gated, (gates, outputs, backend)
        yield gated, (gates, [outputs[0], stacked], backend)
        yield gated, (gates[:1], outputs[:1], backend)
    if backend == "reference":
        summaries = [x.detach()[:, :9].clone().requires_grad_(grad) for x in (k, v)]
        compressed = torch.ops.nsa_tutorial.compressed_attention.default
        yield compressed, (q, *summaries, None, 20, 4, 2, scale, backend)
        few = [x.detach()[:, :0].clone().requires_grad_(grad) for x in (k, v)]
        yield compressed, (q, *few, None, 20, 32, 2, scale, backend)
        choose = torch.ops.nsa_tutorial.select_blocks.default
        score = (q.detach(), summaries[0].detach(), None, counts, None)
        yield choose, (*score, 20, 4, 4, 4, 2, 1, 2, scale, backend)
        index = torch.ops.nsa_tutorial.index_blocks.default
        yield index, (q.detach(), k.detach()[:, :, 0], None, packed, HQ, 3, 4, 1, 1, backend)
        yield attend, (q, k, v, ids, None, None, None, 16, False, True, scale, "reference", "tiles")


@places_of(BACKENDS, slow=["tilelang", "triton"])
def test_opcheck(backend: str, device: str) -> None:
    """PyTorch's own test of an operator: schema, gradient, fake kernel, compilation."""
    skip_unless_runs(backend, device)
    for operator, arguments in samples(backend, device, grad=True):
        opcheck(operator, arguments)


@pytest.mark.exhaustive
def test_opcheck_of_inference() -> None:
    for operator, arguments in samples("reference", "cpu", grad=False):
        opcheck(operator, arguments)


@pytest.mark.exhaustive
def test_opcheck_of_compositions() -> None:
    q, k, v = inputs(grad=True)
    g = torch.Generator().manual_seed(1)
    compress = torch.ops.nsa_tutorial.compress.default
    weight = torch.randn(4 * D, D, generator=g, requires_grad=True)
    opcheck(compress, (k, [], None, "mean", 4, 2, "reference"))
    opcheck(compress, (k, [weight], None, "linear", 4, 2, "auto"))
    gates = [torch.rand(1, 20, HQ, generator=g, requires_grad=True) for _ in range(3)]
    summaries = [ops.compress(x.detach(), length=4, stride=2).requires_grad_() for x in (k, v)]
    sizes = (4, 5, 4, 2, 0.25, "reference", "auto", False, False)
    whole = torch.ops.nsa_tutorial.native_sparse_attention.default
    opcheck(whole, (q, summaries, [k, v], [], *gates, None, None, None, 20, 3, None, *sizes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_apart", [False, True])
def test_opcheck_of_all_branches_at_once(is_apart: bool) -> None:
    """With gates of any sign and keys that the branches share, and without."""
    skip_unless_runs("triton", "cpu")
    q, k, v = inputs(grad=True)
    gates = [q.detach()[..., i].clone().requires_grad_() for i in range(3)]
    pairs = (None, None, k, v, None, None)
    if is_apart:
        gates = [gate.detach().abs().requires_grad_() for gate in gates]
        of_window = [x.detach().clone().requires_grad_() for x in (k, v)]
        summaries = [ops.compress(x.detach(), length=4, stride=2) for x in (k, v)]
        pairs = (*(x.requires_grad_() for x in summaries), k, v, *of_window)
    at_once = torch.ops.nsa_tutorial.branches_at_once.default
    opcheck(at_once, (q, *pairs, *gates, None, None, 20, 3, 4, 5, 4, 2, 0.25, is_apart))


@pytest.mark.parametrize("name", ["first_tokens", "positions"])
def test_opcheck_of_offsets(name: str) -> None:
    arguments = (PACKED, 20, 4, 2) if name == "first_tokens" else (PACKED, 20)
    opcheck(getattr(torch.ops.nsa_tutorial, name).default, arguments)


def operators(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> dict[str, Call]:
    """Each public operator on `q`, `k` and `v` of 20 tokens or more."""
    B, N = q.shape[:2]
    ids = lists(1, q.device).expand(B, N, H, 3)
    gates = [q[..., i].detach().sigmoid() for i in range(3)]
    sizes = {"length": 4, "stride": 2}
    k_cmp, v_cmp = (ops.compress(x, **sizes) for x in (k, v))
    kernel = {"backend": backend}
    nsa = {"block_counts": 3, "block_size": 16, "window_size": 5, **sizes, **kernel}
    both = {"window_size": 5, "block_size": 16, "return_lse": True, **kernel}
    # as many numbers as slots, so that it has a gradient wherever the queries have one
    factors = 1 + q[..., :H, :3].float() - q[..., :H, :3].float().detach()
    return {
        "selected": lambda: ops.selected_attention(
            q, k, v, ids, block_size=16, block_counts=2, return_lse=True, **kernel
        ),
        "scaled": lambda: ops.selected_attention(
            q, k, v, ids, slot_scale=factors, include_own_block=True, block_size=16, **kernel
        ),
        "window": lambda: ops.sliding_window_attention(q, k, v, window_size=5, **kernel),
        "both": lambda: ops.selected_and_window_attention(q, k, v, ids, **both),
        "compress": lambda: ops.compress(k, **sizes),
        "compressed": lambda: ops.compressed_attention(q, k_cmp, v_cmp, **sizes),
        "select": lambda: ops.select_blocks(q, k_cmp, top_n=3, block_size=16, **sizes),
        "index": lambda: ops.index_blocks(q, k[:, :, 0], q[..., 0], top_n=2, block_size=4),
        "whole": lambda: ops.native_sparse_attention(q, k, v, *gates, **nsa),
    }


OPERATORS = tuple(operators(*inputs()))


def flat(outputs: object) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_data(name: str, kind: str) -> None:
    """Shapes, dtypes and strides are those of the real thing."""
    with FakeTensorMode() if kind == "fake" else nullcontext():
        tensors = inputs(device="meta" if kind == "meta" else "cpu")
        found = flat(operators(*tensors)[name]())
    for got, real in zip(found, flat(operators(*inputs())[name]()), strict=True):
        assert got.shape == real.shape and got.dtype == real.dtype
        assert got.stride() == real.stride()


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast(name: str) -> None:
    """Queries, keys and values take autocast's dtype; a log-sum-exp stays fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        found = flat(operators(*inputs())[name]())
    narrow = [x.bfloat16() for x in inputs()]
    for got, right in zip(found, flat(operators(*narrow)[name]()), strict=True):
        if name == "compress":  # a mean has nothing to multiply
            assert got.dtype == torch.float32
        else:
            assert got.dtype == right.dtype
            assert torch.allclose(got.float(), right.float(), atol=2e-2)


def test_autocast_leaves_fp64_alone() -> None:
    tensors = inputs(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.sliding_window_attention(*tensors, window_size=3).dtype == torch.float64


def test_mixed_dtypes_under_autocast() -> None:
    """As for PyTorch's own: a cast key beside a query that is not, say."""
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        o = ops.sliding_window_attention(q, k.bfloat16(), v, window_size=3)
    assert o.dtype == torch.bfloat16


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.exhaustive
def test_compiles_in_one_graph() -> None:
    """All operators, gradients included; every further length is served by what the second one
    compiled."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x for call in operators(q, k, v).values() for x in flat(call())]

    fast = compiled(run)
    for i, N in enumerate((20, 33, 64)):
        tensors = inputs(N, N, grad=True)
        with torch.compiler.set_stance("fail_on_recompile") if i > 1 else nullcontext():
            found = fast(*tensors)
        right = run(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        gradients, expected = (
            torch.autograd.grad(sum(x.sum() for x in outputs), tensors)
            for outputs in (found, right)
        )
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: got 0, expected an int of at least 1"),
        ({"scale": -1.0}, "scale: got -1.0, expected a positive finite number"),
        ({"backend": "cuda"}, "backend: got .*expected one of auto, reference, tilelang, triton"),
        ({"block_counts": torch.ones(1, 1)}, "block_counts: .*expected 3 dimensions"),
    ],
    ids=["block size", "scale", "backend", "counts"],
)
def test_wrong_arguments_raise_while_compiling(options: dict, message: str) -> None:
    """The message is there, within PyTorch's own."""

    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return ops.selected_attention(q, k, v, ids, **{"block_size": 16, **options})

    with pytest.raises(Exception, match=message):
        compiled(run)(*inputs(), lists())
    with pytest.raises((ValueError, TypeError), match=message):
        run(*inputs(), lists())


def test_wrong_shapes_raise_while_compiling() -> None:
    q, k, v = inputs()
    run = compiled(lambda q, k, v: ops.sliding_window_attention(q, k, v, window_size=3))
    with pytest.raises(Exception, match=r"v: got .*expected the batch, positions and heads of k"):
        run(q, k, v[:, 1:])


def test_wrong_offsets_raise_when_compiled() -> None:
    """Their values are known when the operator runs, and it looks before anything else does."""
    run = compiled(
        lambda q, k, v, cu: ops.sliding_window_attention(q, k, v, window_size=3, cu_seqlens=cu)
    )
    tensors = inputs()
    right = ops.sliding_window_attention(*tensors, window_size=3, cu_seqlens=PACKED)
    assert torch.equal(run(*tensors, PACKED), right)
    with pytest.raises(ValueError, match=r"cu_seqlens: .*expected offsets that never decrease"):
        run(*tensors, torch.tensor([0, 7, 5, 20], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens: got a last offset of 19"):
        run(*tensors, torch.tensor([0, 7, 7, 19], dtype=torch.int32))


@places_of(BACKENDS, slow=["tilelang", "triton"])  # what raises stands in front of all of them
def test_a_second_derivative_raises(backend: str, device: str) -> None:
    """Naming the operator, whatever the first one was of."""
    skip_unless_runs(backend, device)
    q, k, v = inputs(device=device, grad=True)
    o = ops.sliding_window_attention(q, k, v, window_size=3, backend=backend)
    (d_q,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="sliding_window_attention_backward"):
        d_q.sum().backward()
    factors = torch.ones(1, 20, H, 3, device=device, requires_grad=True)
    options = {"block_size": 16, "slot_scale": factors, "backend": backend}
    o = ops.selected_attention(q, k, v, lists(device=device), **options)
    (d_factors,) = torch.autograd.grad(o.square().sum(), factors, create_graph=True)
    with pytest.raises(RuntimeError, match="selected_attention_backward"):
        d_factors.sum().backward()


@places_of(BACKENDS, slow=["tilelang"])  # it compiles kernels, and is asked as Triton is
@pytest.mark.parametrize("grad", ["q", "kv", "factors"])
def test_only_what_is_asked_for_has_a_gradient(grad: str, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    q, k, v = inputs(5, device=device)
    tensors = {"q": [q], "kv": [k, v], "factors": [torch.ones(1, 5, H, 3, device=device)]}[grad]
    tensors = [x.requires_grad_() for x in tensors]
    options = {"slot_scale": tensors[0]} if grad == "factors" else {}
    o = ops.selected_attention(q, k, v, lists(5, device), block_size=16, **options, backend=backend)
    o.square().sum().backward()
    assert [x.grad is not None for x in (q, k, v)] == [x.requires_grad for x in (q, k, v)]
    assert all((x.grad != 0).any() for x in tensors)


@pytest.mark.parametrize("name", ["selected_attention", "selected_and_window_attention"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_gradients_of_nothing(name: str, scaled: bool) -> None:
    """Without queries, keys have gradients of 0."""
    q, k, v = inputs(0, 20, grad=True)
    ids = lists(0)
    factors = {"slot_scale": torch.ones(ids.shape, requires_grad=True)} if scaled else {}
    window = {"window_size": 3} if "window" in name else {}
    o = getattr(ops, name)(q, k, v, ids, block_size=16, **factors, **window)
    sum(x.sum() for x in flat(o)).backward()
    assert q.grad.shape == q.shape
    assert not k.grad.any() and not v.grad.any()
    assert all(x.grad.shape == x.shape for x in factors.values())


@pytest.mark.parametrize("name", OPERATORS)
def test_deterministic_algorithms(name: str) -> None:
    """Nothing that PyTorch could not repeat: it raises where there is, and gradients are the same
    to the bit. (On a CPU; a GPU's turn is in tests/kernels.)"""

    def gradients() -> list[Tensor]:
        tensors = inputs(150, 150, grad=True)
        outputs = flat(operators(*tensors)[name]())
        if name in ("select", "index"):
            return outputs
        used = [x for x in tensors if name != "compress" or x is tensors[1]]
        return list(torch.autograd.grad(sum(x.square().sum() for x in outputs), used))

    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_all_operators_are_registered() -> None:
    public = {name for name in vars(ops) if hasattr(torch.ops.nsa_tutorial, name)}
    assert public >= {
        "selected_attention",
        "sliding_window_attention",
        "selected_and_window_attention",
        "compress",
        "compressed_attention",
        "select_blocks",
        "index_blocks",
        "native_sparse_attention",
    }
    assert all(hasattr(torch.ops.nsa_tutorial, name) for name in backends.BACKENDS)


def test_mlp_weights_pass_the_dispatcher() -> None:
    """As many tensors as `MLPWeights` has, in its order."""
    _, k, _ = inputs()
    g = torch.Generator().manual_seed(2)
    shapes = MLPWeights((4, D), (4 * D, 8), (8,), (8, D), (D,))
    weight = MLPWeights(*(torch.randn(s, generator=g, requires_grad=True) for s in shapes))
    summaries = ops.compress(k, kind="mlp", length=4, stride=2, weight=weight)
    assert all((x != 0).any() for x in torch.autograd.grad(summaries.square().sum(), weight))
