"""Transforms of functions: `torch.func.grad` and `vmap` take the operators, forward-mode AD and
distributed tensors raise, and stale offsets are seen where PyTorch counts the change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops
from nsa_tutorial.runtime import packed

N, HQ, H, D = 12, 4, 2, 16
SIZES = {"length": 4, "stride": 2}
NSA = {**SIZES, "block_size": 8, "window_size": 3, "block_counts": 3, "learn_choice": True}
IDS = torch.tensor([1, 0]).expand(1, N, H, 2)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, N, heads, D, generator=g) for heads in (HQ, H, H))


def operators(backend: str) -> dict[str, Callable[..., Tensor]]:
    """Each public operator as a function of queries, keys and values."""
    by = {"backend": backend}
    gate = torch.full((1, N, HQ), 0.5)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :5] + x[:, 5:10] for x in (k, v))
        return ops.compressed_attention(q, k, v, **SIZES, **by)

    def three_branches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = ((k[:, :5], v[:, :5]), (k, v), ())
        return ops.three_branches(q, *pairs, (gate, gate, q[..., 0]), num_keys=N, **NSA, **by)

    return {
        "selected_attention": lambda q, k, v: ops.selected_attention(
            q, k, v, IDS, slot_scale=q[..., :H, :2], block_size=8, **by
        ),
        "sliding_window_attention": lambda q, k, v: ops.sliding_window_attention(
            q, k, v, window_size=3, **by
        ),
        "selected_and_window_attention": lambda q, k, v: torch.cat(
            ops.selected_and_window_attention(q, k, v, IDS, window_size=3, block_size=8, **by)
        ),
        "compress": lambda q, k, v: ops.compress(k, **SIZES, **by),
        "compressed_attention": compressed,
        "native_sparse_attention": lambda q, k, v: ops.native_sparse_attention(
            q, k, v, gate, gate, q[..., 0], **NSA, **by
        ),
        "three_branches": three_branches,
    }


NAMES = tuple(operators("reference"))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_functions(name: str) -> None:
    function = operators("reference")[name]

    def loss(*tensors: Tensor) -> Tensor:
        return function(*tensors).square().sum()

    tensors = [x.requires_grad_() for x in inputs()]
    right = torch.autograd.grad(loss(*tensors), tensors, allow_unused=True)
    found = torch.func.grad(loss, (0, 1, 2))(*inputs())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.exhaustive
def test_on_a_kernel() -> None:
    """Means and gated sums are PyTorch's there; attention and choice are the backend's."""
    function = operators("triton")["native_sparse_attention"]
    q, k, v = inputs()
    found = torch.func.grad(lambda k: function(q, k, v).square().sum())(k)
    k.requires_grad_()
    (right,) = torch.autograd.grad(function(q, k, v).square().sum(), k)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_a_batch_of_calls() -> None:
    """One after the other, and their gradients too."""
    function = operators("reference")["sliding_window_attention"]
    q, k, v = inputs()
    batch = torch.stack([q, q + 1])
    found = torch.vmap(lambda q: function(q, k, v))(batch)
    assert torch.equal(found, torch.stack([function(q, k, v) for q in batch]))
    gradient = torch.func.grad(lambda q: function(q, k, v).square().sum())
    assert torch.equal(torch.vmap(gradient)(batch), torch.stack([gradient(q) for q in batch]))


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_raises(name: str) -> None:
    """Naming the operator and what carries the tangent; it never gives zeros."""
    function, (q, k, v) = operators("reference")[name], inputs()
    expected = rf"^{name}: \w+ carries a tangent, but there is no forward-mode derivative"
    with pytest.raises(RuntimeError, match=expected):
        torch.func.jvp(lambda q, k: function(q, k, v), (q, k), (q, k))
    with pytest.raises(RuntimeError, match=expected):
        torch.func.jacfwd(lambda x: function(q + x, k + x, v))(torch.zeros(1))
    with forward_ad.dual_level():
        function(q, k, v)
        with pytest.raises(RuntimeError, match=expected):
            function(forward_ad.make_dual(q, q), forward_ad.make_dual(k, k), v)


def test_forward_mode_elsewhere() -> None:
    """Through the layer, in a choice of blocks, and around a gradient."""
    config = NativeSparseAttentionConfig(32, 4, 2, 16, 16, block_size=8, top_n=3, **SIZES)
    layer, x = NativeSparseAttention(config), torch.randn(1, N, 32)
    with pytest.raises(RuntimeError, match="compress: x carries a tangent"):
        torch.func.jvp(layer, (x,), (x,))
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="select_blocks: q carries a tangent"):
        torch.func.jvp(lambda q: ops.select_blocks(q, k[:, :5], **SIZES), (q,), (q,))
    function = operators("reference")["sliding_window_attention"]
    with pytest.raises(RuntimeError, match=r"sliding_window_attention: .* carries a tangent"):
        torch.func.hessian(lambda q: function(q, k, v).sum())(q)


def test_no_second_derivative_of_functions() -> None:
    q, k, v = inputs()
    function = operators("reference")["sliding_window_attention"]
    first = torch.func.grad(lambda q: function(q, k, v).square().sum())
    with pytest.raises(RuntimeError, match="sliding_window_attention_backward has no derivative"):
        torch.func.grad(lambda q: first(q).sum())(q)


class DTensor(Tensor):
    """PyTorch's is known by its name: the real one needs a process group."""


def test_a_distributed_tensor() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"k: got a DTensor, expected a plain tensor: call .to_loc"):
        ops.sliding_window_attention(q, k.as_subclass(DTensor), v, window_size=3)
    with pytest.raises(TypeError, match="weight: got a DTensor"):
        weight = torch.ones(4).as_subclass(DTensor)
        ops.compress(k, kind="weighted", weight=weight, **SIZES)


class Elsewhere(Tensor):
    """Offsets that do not lie on the CPU, as far as `packed` knows."""

    is_cpu = False


def test_offsets_are_read_again_where_the_change_is_known() -> None:
    """In place, or where the tensor's memory is another one."""
    cu_seqlens = torch.tensor([0, 3, N]).as_subclass(Elsewhere)
    first = packed.offsets(cu_seqlens)
    assert packed.offsets(cu_seqlens) is first
    cu_seqlens[1] = 5
    assert packed.offsets(cu_seqlens).lengths == [5, N - 5]
    cu_seqlens.data = torch.tensor([0, 7, N])
    assert packed.offsets(cu_seqlens).lengths == [7, N - 7]


def test_a_change_that_is_not_known_is_told_of() -> None:
    """A write through `.data` leaves no trace: the error that may follow from it says so, and a new
    tensor helps."""
    cu_seqlens = torch.tensor([0, 3, N - 1]).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match=r"offset of 11.*first used: after a write thro"):
        packed.check_offsets(cu_seqlens, N)
    cu_seqlens.data[-1] = N
    with pytest.raises(ValueError, match="pass a new tensor"):
        packed.check_offsets(cu_seqlens, N)
    packed.check_offsets(cu_seqlens.clone().as_subclass(Elsewhere), N)
