"""Means of windows and the gated sum as kernels: right to the error budget, gradients included, and
wired into all of NSA."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from places import dtypes, name_of, places_of, product, skip_unless_runs
from selection import assert_within_budget
from torch import Tensor, nn

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops
from nsa_tutorial.sparse.compression import first_tokens, num_summaries, summaries_of_tokens
from nsa_tutorial.sparse.native_sparse_attention import gated_sum as plain_sum

pytestmark = pytest.mark.usefixtures("one_thread")
exhaustive = pytest.mark.exhaustive

KERNELS = ["tilelang", "triton"]
places = places_of(KERNELS)
FULL, HALF = torch.float32, torch.float16
by_kernels = torch.ops.nsa_tutorial.gated_sum


def draw(*size: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=g).to(device, dtype)


# -- means of windows --


@dataclass(frozen=True)
class Windows:
    """Sizes of one call; `cu` packs sequences."""

    B: int = 1
    M: int = 37
    H: int = 3
    D: int = 45
    length: int = 7
    stride: int = 3
    cu: tuple[int, ...] | None = None

    def options(self, device: str) -> dict[str, object]:
        cu = None if self.cu is None else torch.tensor(self.cu, dtype=torch.int32, device=device)
        return {"length": self.length, "stride": self.stride, "cu_seqlens": cu}

    def draw(self, dtype: torch.dtype, device: str) -> Tensor:
        return draw(self.B, self.M, self.H, self.D, dtype=dtype, device=device)


WINDOWS = {
    "length no multiple of stride": Windows(B=2),
    "the paper's length and stride": Windows(M=70, H=1, D=16, length=32, stride=16),
    "stride longer than length": Windows(B=2, stride=9),
    "length 1, stride 1": Windows(length=1, stride=1),
    "stride 1, many summaries for a token": Windows(M=20, length=9, stride=1),
    "whole tiles": Windows(H=4, D=32),
    "width 1": Windows(H=1, D=1),
    "one summary": Windows(M=7),
    "fewer tokens than a summary": Windows(M=6),
    "packed, one empty, one too short": Windows(cu=(0, 7, 7, 12, 37)),
    "packed, stride longer than length": Windows(stride=9, cu=(0, 2, 19, 37)),
    "packed, none long enough": Windows(M=12, cu=(0, 6, 12)),
}
QUICK = {FULL: [*WINDOWS], HALF: ["whole tiles"]}
# TileLang compiles two kernels for each length, stride, width and dtype
SLOW = {
    "tilelang": WINDOWS.keys()
    - {"the paper's length and stride", "length 1, stride 1", "width 1"}
    - {"stride 1, many summaries for a token", "whole tiles", "stride longer than length"}
    - {"packed, stride longer than length"}
}


def means(x: Tensor, windows: Windows, backend: str) -> Tensor:
    return ops.compress(x, **windows.options(x.device.type), backend=backend)


@product("windows", WINDOWS, KERNELS, QUICK, slow=SLOW)
def test_means(windows: Windows, dtype: torch.dtype, backend: str, device: str) -> None:
    """Output and gradient; sums run in fp32, and the result alone is rounded."""
    skip_unless_runs(backend, device, dtype)
    x = windows.draw(dtype, device)
    results, d = [], None
    for leaf, by in ((x.clone(), backend), (x.double(), "reference"), (x.clone(), "reference")):
        summaries = means(leaf.requires_grad_(), windows, by)
        if d is None:
            d = draw(*summaries.shape, dtype=dtype, device=device, seed=1)
        (d_x,) = torch.autograd.grad(summaries, leaf, d.to(summaries.dtype))
        results.append((summaries.detach(), d_x))
    (got, d_got), (truth, d_truth), (plain, d_plain) = results
    assert (got.dtype, d_got.dtype) == (dtype, dtype)
    assert_within_budget(got, truth, plain, "summaries")
    assert_within_budget(d_got, d_truth, d_plain, "d_x")


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
def test_which_summaries_hold_a_token(windows: Windows) -> None:
    options = windows.options("cpu")
    first = first_tokens(windows.M, *options.values(), device=torch.device("cpu"))
    begin, end = summaries_of_tokens(first, windows.M, windows.length)
    for token in range(windows.M):
        holding = [j for j, f in enumerate(first.tolist()) if f <= token < f + windows.length]
        assert list(range(int(begin[token]), int(end[token]))) == holding


@places
def test_a_nan_spoils_its_own(backend: str, device: str) -> None:
    """A token its summaries, and the gradient of a summary its tokens."""
    skip_unless_runs(backend, device)
    windows = Windows(B=2)
    x = windows.draw(FULL, device).requires_grad_()
    right = means(x, windows, backend)
    d = torch.ones_like(right)
    (d_right,) = torch.autograd.grad(right, x, d, retain_graph=True)
    d[1, 4] = torch.nan  # tokens 12 to 18 of the second sequence
    (d_x,) = torch.autograd.grad(right, x, d)
    assert d_x[1, 12:19].isnan().all()
    d_x[1, 12:19] = d_right[1, 12:19]
    assert torch.equal(d_x, d_right)

    spoiled = x.detach().clone()
    spoiled[1, 20] = torch.nan  # in the summaries of tokens 15 to 21 and 18 to 24
    found = means(spoiled, windows, backend)
    assert found[1, 5:7].isnan().all()
    found[1, 5:7] = right.detach()[1, 5:7]
    assert torch.equal(found, right)


@places
def test_strided_tokens(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    windows = Windows(B=2)
    x = windows.draw(FULL, device)
    strided = x.transpose(1, 3).contiguous().transpose(1, 3)
    assert not strided.is_contiguous()
    leaves = [x.requires_grad_(), strided.requires_grad_()]
    results = [means(leaf, windows, backend) for leaf in leaves]
    assert torch.equal(*results)
    # the gradient of a sum is one number, expanded
    a, b = (torch.autograd.grad(r.sum(), leaf)[0] for r, leaf in zip(results, leaves, strict=True))
    assert torch.equal(a, b)


@places
@pytest.mark.parametrize(("B", "M"), [(0, 9), (1, 0)], ids=["no sequence", "no token"])
def test_nothing_to_summarise(B: int, M: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    windows = Windows(B=B, M=M)
    x = windows.draw(FULL, device).requires_grad_()
    summaries = means(x, windows, backend)
    assert summaries.shape == (B, num_summaries(M, 7, 3), 3, 45)
    summaries.sum().backward()
    assert x.grad.shape == x.shape


@places
@pytest.mark.parametrize("kind", ["weighted", "linear"])
def test_kinds_with_weights_run_their_matmuls(kind: str, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    x = draw(1, 20, 2, 8, dtype=FULL, device=device)
    size = (4,) if kind == "weighted" else (32, 8)
    options = {"kind": kind, "length": 4, "stride": 2}
    options["weight"] = draw(*size, dtype=FULL, device=device, seed=1)
    right = ops.compress(x, **options, backend="reference")
    assert torch.equal(ops.compress(x, **options, backend=backend), right)


@pytest.mark.parametrize("backend", KERNELS)
def test_no_kernel_computes_fp64(backend: str) -> None:
    with pytest.raises(TypeError, match=rf"x: got a float64 .*expected float32.* on the {backend}"):
        ops.compress(torch.zeros(1, 40, 1, 8, dtype=torch.float64), backend=backend)


# -- the gated sum --

ROWS = {
    # TileLang compiles two kernels for each width: all of NSA has these; two tiles of 256 rows
    "odd rows": (2, 50, 3, 16),
    "odd sizes": (2, 7, 3, 20),
    "several tiles": (1, 70, 2, 40),
    "the widest": (1, 9, 2, 256),
    "width 1": (1, 5, 3, 1),
    "one row": (1, 1, 1, 64),
}
SOME = {"tilelang": ["odd rows"]}


def leaves_of(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, num: int = 3,
    gate_dtype: torch.dtype = FULL,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Gates and outputs that ask for gradients."""
    gates = [
        draw(*sizes[:3], dtype=gate_dtype, device=device, seed=i).sigmoid() for i in range(num)
    ]
    outputs = [draw(*sizes, dtype=dtype, device=device, seed=9 + i) for i in range(num)]
    return [x.requires_grad_() for x in gates], [x.requires_grad_() for x in outputs]


def assert_sum(gates: list[Tensor], outputs: list[Tensor], backend: str) -> None:
    """Sum and gradients, against fp64."""
    leaves = [*gates, *outputs]
    d = draw(*outputs[0].shape, dtype=outputs[0].dtype, device=outputs[0].device.type, seed=5)

    def gradients(o: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        return [o.detach(), *torch.autograd.grad(o, leaves, d.to(o.dtype))]

    found = gradients(by_kernels(gates, outputs, backend), leaves)
    plain = gradients(plain_sum(gates, outputs), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = gradients(plain_sum(exact[: len(gates)], exact[len(gates) :]), exact)
    assert [x.dtype for x in found] == [x.dtype for x in (outputs[0], *leaves)]
    num = len(gates)
    assert_within_budget(found[0], truth[0], plain[0], "o")
    for values in zip(found[num + 1 :], truth[num + 1 :], plain[num + 1 :], strict=True):
        assert_within_budget(*values, "d_output")
    for got, right, o in zip(found[1 : num + 1], truth[1 : num + 1], outputs, strict=True):
        # a sum in fp32, in any order, then one rounding
        size = (d.double() * o.double()).abs().sum(-1)
        rounding = torch.finfo(got.dtype).eps * right.abs()
        assert ((got - right).abs() <= 4 * torch.finfo(FULL).eps * size + rounding).all()


@product("sizes", ROWS, KERNELS, {FULL: [*ROWS], HALF: ["odd sizes"]}, slow=SOME)
def test_gated_sum(
    sizes: tuple[int, ...], dtype: torch.dtype, backend: str, device: str
) -> None:  # fmt: skip
    skip_unless_runs(backend, device, dtype)
    assert_sum(*leaves_of(sizes, dtype, device), backend)


@places_of(KERNELS, slow=["tilelang"])
@pytest.mark.parametrize("num", [1, 2])
def test_fewer_branches(num: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    assert_sum(*leaves_of(ROWS["odd rows"], FULL, device, num), backend)


@places_of(KERNELS, slow=["tilelang"])
@dtypes
def test_gates_of_any_dtype(dtype: torch.dtype, backend: str, device: str) -> None:
    """Their gradients come in it."""
    skip_unless_runs(backend, device, HALF)
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("no kernel computes bfloat16 on the CPU")
    assert_sum(*leaves_of(ROWS["odd rows"], HALF, device, gate_dtype=dtype), backend)


@places
def test_stacked_outputs(backend: str, device: str) -> None:
    """As one launch for two branches leaves them: the same bits as one by one."""
    skip_unless_runs(backend, device)
    gates, outputs = leaves_of(ROWS["odd rows"], FULL, device)
    pair = torch.stack([x.detach() for x in outputs[1:]]).requires_grad_()
    apart = by_kernels(gates, outputs, backend)
    stacked = by_kernels(gates, [outputs[0], pair], backend)
    assert torch.equal(apart, stacked)
    right = torch.autograd.grad(apart.square().sum(), [*gates, *outputs])
    found = torch.autograd.grad(stacked.square().sum(), [*gates, outputs[0], pair])
    found = [*found[:-1], *found[-1]]
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@places
def test_strided_gates_and_outputs(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    sizes = (2, 7, 3, 16)
    whole = draw(2, 7, 3, 3, dtype=FULL, device=device).requires_grad_()
    outputs = [
        draw(2, 16, 3, 7, dtype=FULL, device=device, seed=i).transpose(1, 3).requires_grad_()
        for i in range(3)
    ]
    gates = list(whole.unbind(2))
    assert outputs[0].shape == sizes and not any(x.is_contiguous() for x in (*gates, *outputs))
    o, right = by_kernels(gates, outputs, backend), plain_sum(gates, outputs)
    assert torch.allclose(o, right, atol=1e-6)
    found, expected = (torch.autograd.grad(x.sum(), [whole, *outputs]) for x in (o, right))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@places
def test_a_nan_stays_in_its_row(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    gates, outputs = leaves_of(ROWS["odd rows"], FULL, device)
    right = by_kernels(gates, outputs, backend).detach()
    with torch.no_grad():
        outputs[1][1, 2, 0, 5] = torch.nan
    o = by_kernels(gates, outputs, backend)
    d_gates = torch.autograd.grad(o, gates, torch.ones_like(o))
    assert o.isnan().nonzero().tolist() == [[1, 2, 0, 5]]
    assert torch.equal(o.detach().nan_to_num(0), right.where(~o.isnan(), 0))
    assert [g.isnan().nonzero().tolist() for g in d_gates] == [[], [[1, 2, 0]], []]


@places
def test_no_row(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    gates, outputs = leaves_of((1, 0, 2, 16), FULL, device)
    o = by_kernels(gates, outputs, backend)
    assert o.shape == (1, 0, 2, 16)
    o.sum().backward()
    assert all(x.grad.shape == x.shape for x in (*gates, *outputs))


def test_outputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are gradients, stacked ones included: the kernels read and write in place."""
    skip_unless_runs("triton", "cpu")
    from nsa_tutorial.kernels.triton import gates as triton_gates

    launched, original = [], triton_gates.launch

    def launch(kernel: object, pointers: list[Tensor], *sizes: int) -> None:
        launched.append({x.data_ptr() for x in pointers})
        original(kernel, pointers, *sizes)

    monkeypatch.setattr(triton_gates, "launch", launch)
    gates, outputs = leaves_of(ROWS["odd rows"], FULL, "cpu")
    pair = torch.stack([x.detach() for x in outputs[1:]]).requires_grad_()
    o = by_kernels(gates, [outputs[0], pair], "triton")
    d_o = torch.ones_like(o)
    d_output, d_pair = torch.autograd.grad(o, [outputs[0], pair], d_o)
    read = {x.data_ptr() for x in (*gates, outputs[0], *pair)}
    assert launched == [
        read | {o.data_ptr()},
        launched[1] | read | {x.data_ptr() for x in (d_o, d_output, *d_pair)},
    ]


# -- the two of them in all of NSA --

# of other tests, too: TileLang has compiled kernels for them
SIZES = {"block_size": 16, "window_size": 7, "length": 8, "stride": 4, "block_counts": 3}


def whole_inputs(device: str, N: int = 24) -> tuple[list[Tensor], list[Tensor]]:
    q, k, v = (
        draw(1, N, heads, 16, dtype=FULL, device=device, seed=seed)
        for seed, heads in enumerate((4, 2, 2), start=7)
    )
    gates = [draw(1, N, 4, dtype=FULL, device=device, seed=i).sigmoid() for i in range(3)]
    return [x.requires_grad_() for x in (q, k, v)], [x.requires_grad_() for x in gates]


@places_of(KERNELS, slow=["tilelang"])
@pytest.mark.parametrize(
    "used",
    [(0, 1, 2), *(pytest.param(x, marks=exhaustive) for x in ((0, 2), (0,), (2,)))],
    ids=str,
)
def test_gradients_of_all_of_nsa(used: tuple[int, ...], backend: str, device: str) -> None:
    """Through means, gates and everything between, on a kernel backend and on the reference."""
    skip_unless_runs(backend, device)
    tensors, gates = whole_inputs(device)
    given = [g if i in used else None for i, g in enumerate(gates)]
    leaves = [*tensors, *(g for g in given if g is not None)]
    results = []
    for by in (backend, "reference"):
        o = ops.native_sparse_attention(*tensors, *given, **SIZES, backend=by)
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("kind", "packed", "backend", "device"),
    [
        pytest.param(kind, packed, backend, device, id=f"{kind}-{packed}-{backend}-{device}",
                     marks=[pytest.mark.gpu] if device == "cuda"
                     else [] if (kind, packed, backend) in quick else [exhaustive])
        for quick in [{("mlp", False, "triton")}]
        for kind in ("mean", "mlp")
        for packed in (False, True)
        for backend in KERNELS
        for device in ("cpu", "cuda")
    ],
)  # fmt: skip
def test_layers_agree(kind: str, packed: bool, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    # as in test_layer, so that TileLang compiles each kernel once for both
    sizes = {"key_width": 16, "value_width": 16, "block_size": 16, "top_n": 3, "window_size": 7}
    sizes |= {"length": 8, "stride": 4, "compression": kind, "gate_width": 5}
    x = draw(1, 24, 12, dtype=FULL, device=device)
    cu_seqlens = torch.tensor([0, 11, 24], dtype=torch.int32, device=device) if packed else None
    results = []
    for by in (backend, "reference"):
        torch.manual_seed(0)
        config = NativeSparseAttentionConfig(12, query_heads=4, kv_heads=2, **sizes, backend=by)
        layer: nn.Module = NativeSparseAttention(config).to(device)
        y = layer(x, cu_seqlens)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results, strict=True))


@pytest.mark.exhaustive
@places_of(["reference", *KERNELS], slow=KERNELS)
@pytest.mark.parametrize("packed", [pytest.param(True, id="packed")])
def test_compiles_in_one_graph(packed: bool, backend: str, device: str) -> None:
    """Gradients included; every further length is served by what the second one compiled."""
    skip_unless_runs(backend, device)

    def run(q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], cu: Tensor | None) -> Tensor:
        options = {**SIZES, "cu_seqlens": cu, "backend": backend}
        return ops.native_sparse_attention(q, k, v, *gates, **options)

    torch._dynamo.reset()
    fast = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, N in enumerate((12, 23)):
        tensors, gates = whole_inputs(device, N)
        cu = torch.tensor([0, 9, N], dtype=torch.int32, device=device) if packed else None
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            found = fast(*tensors, gates, cu)
        right = run(*tensors, gates, cu)
        assert torch.equal(found, right)
        a, b = (torch.autograd.grad(o.sum(), [*tensors, *gates]) for o in (found, right))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@places
def test_a_second_derivative_raises(backend: str, device: str) -> None:
    """Naming the operator."""
    skip_unless_runs(backend, device)
    x = Windows().draw(FULL, device).requires_grad_()
    square = means(x, Windows(), backend).square().sum()
    (d_x,) = torch.autograd.grad(square, x, create_graph=True)
    with pytest.raises(RuntimeError, match="mean_summaries_backward"):
        d_x.sum().backward()
    gates, outputs = leaves_of(ROWS["odd rows"], FULL, device)
    square = by_kernels(gates, outputs, backend).square().sum()
    (d_gate,) = torch.autograd.grad(square, gates[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_sum_backward"):
        d_gate.sum().backward()


@places_of(KERNELS, slow=["tilelang"])
def test_autocast_leaves_gates_alone(backend: str, device: str) -> None:
    """They stay in fp32, whatever the branches' dtype."""
    skip_unless_runs(backend, device, HALF)
    tensors, gates = whole_inputs(device, 24)
    with torch.autocast(device, HALF):
        o = ops.native_sparse_attention(*tensors, *gates, **SIZES, backend=backend)
    assert o.dtype == HALF
    d_gates = torch.autograd.grad(o.float().square().sum(), gates)
    assert [name_of(g.dtype) for g in d_gates] == ["float32"] * 3
