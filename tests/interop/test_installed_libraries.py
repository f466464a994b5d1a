"""What `interop` says of other libraries, asked of the libraries themselves. Each test needs one of
them, and skips without it:

    pip install flash-linear-attention native-sparse-attention-pytorch ejkernel

They are no dependencies of this package. What was compared are fla-core 0.6.0 (its naive functions
on a CPU, its kernels on an H200), native-sparse-attention-pytorch 0.2.3 (its kernels, H200) and
ejkernel 0.0.80.3 (its XLA backend, on a CPU), all of them forward; of the backwards, the second's,
in Triton's interpreter. fla's window, which needs flash-attn, and ejkernel's Triton backend were
not.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from nsa_tutorial import interop, ops

pytestmark = pytest.mark.usefixtures("one_thread")

BS = 32


def library(module: str, name: str):
    """A function of a library, or the test is skipped; libraries may warn that something else is
    not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(pytest.importorskip(module), name)


def tensors(
    device: str,
    *,
    B: int = 2,
    N: int = 150,
    H: int = 2,
    G: int = 16,
    D: int = 64,
    dtype: torch.dtype = torch.float16,
) -> list[Tensor]:
    """q, k, v and two gates, positions first."""
    g = torch.Generator().manual_seed(N)
    shapes = [(B, N, H * G, D), (B, N, H, D), (B, N, H, D), (B, N, H * G), (B, N, H * G)]
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def lists(
    device: str, *, B: int = 2, N: int = 150, heads: int = 2, S: int = 4, before: bool = False
) -> Tensor:
    """Distinct ids in any order, with -1 and blocks of the future (or none of these) among them;
    slot 0 is never empty."""
    g = torch.Generator().manual_seed(1)
    own = torch.arange(N)[None, :, None, None] // BS
    ids = torch.rand(B, N, heads, 5, generator=g).argsort(-1)[..., :S]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    if before:
        return ids.masked_fill(ids >= own, -1).to(device)
    ids = ids.masked_fill(ids == own, -1)
    ids[..., :1] = own
    return ids.to(device)


def assert_same(theirs: Tensor, ours: Tensor, tolerance: float = 4e-3) -> None:
    """Equal but for the rounding of fp16, in which theirs is computed."""
    assert theirs.shape == ours.shape
    torch.testing.assert_close(theirs.double(), ours.double(), rtol=0, atol=tolerance)


def in_fp64(arguments: dict[str, object]) -> dict[str, object]:
    """The same arguments, computed exactly."""
    exact = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    return exact | {"backend": "reference"}


# -- fla --

kernels = pytest.mark.parametrize(
    ("module", "name", "device"),
    [
        ("fla.ops.nsa.naive", "naive_nsa", "cpu"),
        pytest.param("fla.ops.nsa.parallel", "parallel_nsa", "cuda", marks=pytest.mark.gpu),
    ],
    ids=["naive", "parallel"],
)


def without_summaries(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    """fla pools keys also where no summary is asked for, by a kernel that a CPU cannot run; its
    result is not used then."""
    monkeypatch.setitem(function.__globals__, "mean_pooling", lambda x, *_: x)


@kernels
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
def test_fla_lists(
    gated: bool, module: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout, ids, -1, the future, causal blocks, the gate, and an int count that is not read."""
    function = library(module, name)
    without_summaries(monkeypatch, function)
    q, k, v, gate, _ = tensors(device)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "block_indices": lists(device),
        "block_counts": 1,
        "block_size": BS,
    }
    arguments |= {"g_slc": gate.sigmoid()} if gated else {}
    ours = ops.native_sparse_attention(**in_fp64(interop.from_fla(**arguments)))
    assert_same(function(**arguments), ours)


@kernels
def test_fla_packed(module: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = library(module, name)
    without_summaries(monkeypatch, function)
    q, k, v, *_ = tensors(device, B=1)
    cu_seqlens = torch.tensor([0, 37, 101, 150], device=device)
    start = cu_seqlens[
        torch.searchsorted(cu_seqlens, torch.arange(150, device=device), right=True) - 1
    ]
    own = ((torch.arange(150, device=device) - start) // BS)[None, :, None, None]
    others = lists(device, B=1)[..., 1:]
    ids = torch.cat([own.expand(-1, -1, 2, -1), others.masked_fill(others == own, -1)], -1)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "block_indices": ids,
        "block_size": BS,
        "cu_seqlens": cu_seqlens,
    }
    assert_same(
        function(**arguments), ops.native_sparse_attention(**in_fp64(interop.from_fla(**arguments)))
    )


@pytest.mark.gpu
def test_fla_counts_of_each_row() -> None:
    function = library("fla.ops.nsa.parallel", "parallel_nsa")
    q, k, v, *_ = tensors("cuda")
    counts = torch.randint(1, 5, (2, 150, 2), generator=torch.Generator().manual_seed(2)).cuda()
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "block_indices": lists("cuda"),
        "block_counts": counts,
        "block_size": BS,
    }
    assert_same(
        function(**arguments), ops.native_sparse_attention(**in_fp64(interop.from_fla(**arguments)))
    )


@pytest.mark.gpu
def test_fla_choosing_blocks() -> None:
    """Summaries, the choice by their mass, and the forced blocks; where two blocks' masses round
    alike, either may be chosen."""
    function = library("fla.ops.nsa.parallel", "parallel_nsa")
    q, k, v, g_cmp, g_slc = tensors("cuda", N=700)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g_cmp": g_cmp.sigmoid(),
        "g_slc": g_slc.sigmoid(),
        "block_counts": 8,
        "block_size": BS,
    }
    theirs = function(**arguments)
    ours = ops.native_sparse_attention(**in_fp64(interop.from_fla(**arguments)))
    apart = (theirs.double() - ours).abs().amax((-1, -2)) > 4e-3  # [B, N]
    assert apart.double().mean() < 0.02, "but for near ties"


def test_fla_chooses_as_we_do() -> None:
    function = library("fla.ops.nsa.naive", "naive_nsa_topk")
    q, k, *_ = tensors("cpu", N=160, dtype=torch.float64)
    k_cmp = ops.compress(k, length=BS, stride=BS)
    theirs = function(q, k_cmp, 3, BS, 0.125)
    ours = ops.select_blocks(
        q,
        k_cmp,
        top_n=3,
        block_size=BS,
        length=BS,
        stride=BS,
        num_initial=1,
        num_local=2,
        scale=0.125,
    )
    assert torch.equal(theirs.sort(-1).values, ours.sort(-1).values.long())


@pytest.mark.gpu
def test_fla_a_row_that_sees_nothing() -> None:
    function = library("fla.ops.nsa.parallel", "parallel_nsa")
    q, k, v, *_ = tensors("cuda")
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "block_indices": torch.full((2, 150, 2, 4), -1, device="cuda"),
        "block_size": BS,
    }
    assert function(**arguments).isnan().all(), "0/0"
    assert (ops.native_sparse_attention(**interop.from_fla(**arguments)) == 0).all()


# -- lucidrains --

LUCIDRAINS = (
    "native_sparse_attention_pytorch.triton_native_sparse_attention",
    "native_sparse_attend",
)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False], ids=["own block", "no own block"])
@pytest.mark.parametrize("heads", [2, 8], ids=["lists per group", "lists per query head"])
def test_lucidrains(heads: int, own: bool) -> None:
    function = library(*LUCIDRAINS)
    q, k, v, *_ = tensors("cuda", N=160, G=4)
    ids = lists("cuda", N=160, heads=heads, before=True)
    fq, fk, fv, ids = (interop.heads_first(x).contiguous() for x in (q, k, v, ids))
    call = fq, fk, fv, BS, ids.clamp(min=0), ids >= 0
    theirs, lse = function(*call, include_block_causal=own, return_lse=True)
    arguments = interop.from_lucidrains(*call, include_block_causal=own, return_lse=True)
    ours, our_lse = (interop.heads_first(x) for x in ops.selected_attention(**in_fp64(arguments)))
    first_is_empty = (ids[..., 0] < 0).repeat_interleave(8 // heads, dim=1)
    not_a_number = first_is_empty if not own else torch.zeros_like(first_is_empty)
    assert first_is_empty.any() and not first_is_empty.all()
    assert torch.equal(theirs.isnan().all(-1), not_a_number), (
        "a first slot that is empty, with no key before it"
    )
    assert_same(theirs[~not_a_number], ours[~not_a_number])
    assert_same(lse[~not_a_number], our_lse[~not_a_number], 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 8], ids=["lists per group", "lists per query head"])
def test_lucidrains_gradients(heads: int) -> None:
    """Of queries, keys and values, and of the selection."""
    function = library(*LUCIDRAINS)
    q, k, v, *_ = tensors("cuda", N=160, G=4, dtype=torch.float32)
    ids = lists("cuda", N=160, heads=heads, before=True)
    d_o = torch.randn(2, 8, 160, 64, generator=torch.Generator().manual_seed(3)).cuda()
    fq, fk, fv, ids = (interop.heads_first(x).contiguous() for x in (q, k, v, ids))
    given = [fq, fk, fv, torch.ones(ids.shape, device="cuda")]

    def gradients(attend: object, inputs: list[Tensor]) -> list[Tensor]:
        fq, fk, fv, sel_scale = (x.detach().clone().requires_grad_() for x in inputs)
        o = attend(fq, fk, fv, BS, ids.clamp(min=0), ids >= 0, sel_scale)
        return list(torch.autograd.grad((o * d_o).sum(), (fq, fk, fv, sel_scale)))

    def ours(*arguments: object) -> Tensor:
        return interop.heads_first(
            ops.selected_attention(**interop.from_lucidrains(*arguments), backend="reference")
        )

    found, right = gradients(function, given), gradients(ours, [x.double() for x in given])
    for theirs, exact in zip(found, right, strict=True):
        error = (theirs - exact).abs().max() / exact.abs().max()
        assert error < 4e-3, "but for the rounding of fp16, in which theirs is computed"


@pytest.mark.gpu
def test_lucidrains_window_is_one_key_wider() -> None:
    function = library(*LUCIDRAINS)
    q, k, v, *_ = tensors("cuda", N=160, G=4)
    fq, fk, fv = (interop.heads_first(x).contiguous() for x in (q, k, v))
    ids = torch.zeros(2, 2, 160, 1, dtype=torch.long, device="cuda")
    _, theirs = function(fq, fk, fv, BS, ids, ids > 0, return_sliding_window_out=True)
    for width, is_theirs in ((BS + 1, True), (BS, False)):
        ours = ops.sliding_window_attention(
            q.double(), k.double(), v.double(), window_size=width, backend="reference"
        )
        assert ((theirs.double() - interop.heads_first(ours)).abs().max() < 4e-3) == is_theirs


# -- ejKernel --


def through_jax(*arguments: object, **options: object) -> Tensor:
    """Call its XLA backend, with tensors made arrays and back."""
    function = library("ejkernel.kernels._xla.native_sparse_attention", "native_sparse_attention")
    jax = pytest.importorskip("jax")

    def array(x: object) -> object:
        return jax.numpy.asarray(x.numpy()) if isinstance(x, Tensor) else x

    with jax.default_device(jax.devices("cpu")[0]):
        out = function(*map(array, arguments), **{name: array(x) for name, x in options.items()})
    return torch.from_dlpack(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
def test_ejkernel_lists(gated: bool, count: int) -> None:
    """An int count is read by this backend; its fp32 products are."""
    q, k, v, gate, _ = tensors("cpu", G=3, dtype=torch.float32)
    options = {"block_indices": lists("cpu").int(), "block_counts": count, "block_size": BS}
    options |= {"g_slc": gate.sigmoid()} if gated else {}
    arguments = interop.from_ejkernel(q, k, v, **options)
    assert_same(
        through_jax(q, k, v, **options), ops.native_sparse_attention(**in_fp64(arguments)), 1e-4
    )


def test_ejkernel_counts_of_each_row() -> None:
    q, k, v, *_ = tensors("cpu", G=3, dtype=torch.float32)
    counts = torch.randint(1, 5, (2, 150, 2), generator=torch.Generator().manual_seed(2)).int()
    options = {"block_indices": lists("cpu").int(), "block_counts": counts, "block_size": BS}
    arguments = interop.from_ejkernel(q, k, v, **options)
    assert_same(
        through_jax(q, k, v, **options), ops.native_sparse_attention(**in_fp64(arguments)), 1e-4
    )


def test_ejkernel_choosing_blocks() -> None:
    """With `g_cmp`, given lists are ignored, and blocks chosen."""
    q, k, v, g_cmp, g_slc = tensors("cpu", G=3, N=160, dtype=torch.float32)
    options = {
        "g_cmp": g_cmp.sigmoid(),
        "g_slc": g_slc.sigmoid(),
        "block_counts": 2,
        "block_size": BS,
    }
    arguments = interop.from_ejkernel(q, k, v, **options)
    assert_same(
        through_jax(q, k, v, **options), ops.native_sparse_attention(**in_fp64(arguments)), 1e-4
    )


def test_ejkernel_a_row_that_sees_nothing() -> None:
    """The average of all values that the slots name, the future's included, and -1 read as block
    0."""
    q, k, v, *_ = tensors("cpu", B=1, N=3 * BS, dtype=torch.float32)
    options = {
        "block_indices": torch.tensor([2, -1]).expand(1, 3 * BS, 2, 2).int(),
        "block_counts": 2,
        "block_size": BS,
    }
    theirs, ours = (
        through_jax(q, k, v, **options),
        ops.native_sparse_attention(**interop.from_ejkernel(q, k, v, **options)),
    )
    blind = slice(0, 2 * BS)
    average = torch.cat([v[:, :BS], v[:, 2 * BS :]], 1).mean(1).repeat_interleave(16, 1)
    assert_same(theirs[:, blind], average[:, None].expand(-1, 2 * BS, -1, -1), 1e-5)
    assert (ours[:, blind] == 0).all()
    assert_same(theirs[:, 2 * BS :], ours[:, 2 * BS :], 1e-5)
