"""Queries and keys are turned, and projections cut into the sets of the branches, in one launch
each: to the fp64 formula's angles at any position, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from places import dtypes, places_of, skip_unless_runs
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.layer_parts import rotate, turned_sets

KERNEL = places_of(["triton"])


class Case(NamedTuple):
    """Tensors `[B, N, S * H, D]` with their sets, and by which positions they are turned."""

    B: int = 2
    N: int = 5
    D: int = 16
    heads: tuple[int, ...] = (3, 6)  # S * H of each tensor
    sets: tuple[int, ...] = (1, 3)
    begin: int | None = 0  # of the positions; None: none are given
    base: float = 10_000.0

    def make(self, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor | None]:
        """Views into one projection, with numbers between them, and `[B, N]` positions."""
        g = torch.Generator().manual_seed(0)
        whole = torch.randn(self.B, self.N, sum(self.heads) + 1, self.D, generator=g)
        tensors = whole.to(device, dtype)[:, :, 1:].split(self.heads, 2)
        if self.begin is None:
            return list(tensors), None
        position = self.begin + 7 * torch.arange(self.B * self.N, device=device)
        return list(tensors), position.view(self.B, self.N)


CASES = {
    "no positions": Case(begin=None),
    "far away": Case(begin=10_000_000, base=500_000.0),
    "a base with a fraction": Case(begin=4_000, base=12_345.678),
    "pairs that are no power of two": Case(B=1, D=6, heads=(35, 6), sets=(1, 2)),
    "several tiles": Case(N=47, D=32, heads=(20,), sets=(1,)),
    "one pair, one token": Case(B=1, N=1, D=2, heads=(1, 3)),
}


def exact(tensors: list[Tensor], case: Case, position: Tensor | None) -> list[Tensor]:
    """The sets in fp64."""
    if position is None:
        position = torch.arange(case.N, device=tensors[0].device)
    turned = [rotate(x.double(), position, case.base) for x in tensors]
    return [part for x, num in zip(turned, case.sets, strict=True) for part in x.chunk(num, 2)]


@KERNEL
@dtypes
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_turns_as_in_fp64(case: Case, dtype: torch.dtype, backend: str, device: str) -> None:
    """Also far away, where fp32 angles miss by 0.2; and so do the gradients."""
    skip_unless_runs(backend, device, dtype)
    tensors, position = case.make(dtype, device)
    tensors = [x.requires_grad_() for x in tensors]
    nested = turned_sets(tensors, case.sets, position, case.base, backend)
    found, right = [x for group in nested for x in group], exact(tensors, case, position)
    weights = [torch.randn_like(x).transpose(1, 2).contiguous().transpose(1, 2) for x in found]
    pairs = [(x * w).double().sum() for x, w in zip(found, weights, strict=True)]
    doubles = [(x * w.double()).sum() for x, w in zip(right, weights, strict=True)]
    found += torch.autograd.grad(sum(pairs), tensors)
    right += torch.autograd.grad(sum(doubles), tensors)
    for a, b in zip(found, right, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        rounding = b.abs() * torch.finfo(dtype).eps + 4e-6 * b.abs().max().float()
        assert ((a - b).abs() <= rounding).all()
    assert all(x.is_contiguous() for x in found)


@KERNEL
def test_what_is_not_turned_is_cut(backend: str, device: str) -> None:
    """To the bit, into one set more or less, of an odd width; what needs nothing is left alone."""
    skip_unless_runs(backend, device)
    tensors, position = Case(D=7, heads=(4, 3, 4), sets=(2, 3, 1)).make(torch.float32, device)
    two, three, one = turned_sets(tensors, (2, 3, 1), position, None, backend)
    assert one[0] is tensors[2]
    for sets, x in ((two, tensors[0]), (three, tensors[1])):
        assert all(part.is_contiguous() for part in sets)
        assert torch.equal(torch.cat(sets, 2), x)


@KERNEL
def test_no_kernel_copies_what_a_layer_gives_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    """Queries, keys, values and gates of each branch lie in one piece."""
    skip_unless_runs(backend, device)
    seen: list[Tensor] = []

    def attend(self: object, q: Tensor, compressed: object, *given: object) -> Tensor:
        selected, window, gates, _ = given
        seen.extend([q, *selected, *window, *gates])
        return q

    monkeypatch.setattr(NativeSparseAttention, "attend", attend)
    sizes = {"query_heads": 4, "kv_heads": 2, "key_width": 8, "value_width": 8, "block_size": 8}
    sizes |= {"length": 4, "stride": 2, "compression": "linear"}
    layer = NativeSparseAttention(NativeSparseAttentionConfig(12, **sizes, backend=backend))
    layer.to(device)(torch.randn(2, 5, 12, device=device))
    assert len(seen) == 8 and all(x.is_contiguous() for x in seen)


@pytest.mark.exhaustive
def test_what_pytorch_asks_of_an_operator() -> None:
    skip_unless_runs("triton", "cpu")
    q, k = (torch.randn(1, 3, heads, 4, requires_grad=True) for heads in (2, 6))
    position = torch.arange(3)
    operator = torch.ops.nsa_tutorial.turned_sets.default
    opcheck(operator, ([q, k], position, 100.0, 1, [1, 3], "triton"))


def turn(x: Tensor, backend: str) -> Tensor:
    """The second of three sets, turned."""
    return turned_sets([x], [3], None, 100.0, backend)[0][1]


def as_plain(run: Callable[[str], Tensor]) -> None:
    torch.testing.assert_close(run("triton"), run("reference"))


def test_transforms_of_functions() -> None:
    """And forward-mode AD: they are PyTorch's there."""
    skip_unless_runs("triton", "cpu")
    x = torch.randn(2, 1, 3, 6, 4)
    as_plain(lambda by: torch.func.vmap(lambda x: turn(x, by))(x))
    as_plain(lambda by: torch.func.grad(lambda x: turn(x, by).square().sum())(x[0]))
    as_plain(lambda by: torch.func.jvp(lambda x: turn(x, by), (x[0],), (x[1],))[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x[0], x[1])
        as_plain(lambda by: forward_ad.unpack_dual(turn(dual, by)).tangent)


def test_a_second_derivative_raises() -> None:
    skip_unless_runs("triton", "cpu")
    x = torch.randn(1, 3, 6, 4, requires_grad=True)
    (d_x,) = torch.autograd.grad(turn(x, "triton").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="turned_sets_backward"):
        d_x.sum().backward()


def test_no_token() -> None:
    skip_unless_runs("triton", "cpu")
    x = torch.randn(2, 0, 6, 4, requires_grad=True)
    assert turn(x, "triton").shape == (2, 0, 2, 4)
    turn(x, "triton").sum().backward()
    assert x.grad.shape == x.shape
