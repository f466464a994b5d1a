"""Tensors that begin at an odd address are copied before a kernel on a GPU reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from places import DTYPES, name_of, skip_unless_runs
from torch import Tensor

from nsa_tutorial import backends, ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.alignment import ALIGNMENT, aligned


def shifted(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Tensor:
    """A contiguous tensor that begins one number after where PyTorch would put it."""
    g = torch.Generator(device).manual_seed(sum(shape))
    n = torch.Size(shape).numel()
    x = torch.randn(n + 1, generator=g, device=device, dtype=dtype)[1:].view(shape)
    assert x.data_ptr() % ALIGNMENT
    return x


def test_only_what_begins_at_an_odd_address_is_copied() -> None:
    x, odd = torch.randn(4, 8), shifted(4, 8)
    for given in (odd, odd[:, ::2], odd.t()):
        copy = aligned(given)
        assert copy.data_ptr() % ALIGNMENT == 0 and copy.is_contiguous()
        assert torch.equal(copy, given)
    assert aligned(x) is x and aligned("x") == "x" and aligned(None) is None
    listed = aligned([x, (odd, 3)])
    assert listed[0] is x and torch.equal(listed[1][0], odd) and listed[1][1] == 3


@pytest.mark.parametrize("operator", ["selected_attention", "write_tokens"])
def test_kernels_get_aligned_tensors_but_for_those_they_write_to(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {operator: {"triton": f"{__name__}:passed"}}
    monkeypatch.setattr(environment, "require", lambda *_: None)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float16)
    odd = shifted(4, 8)
    first, second = backends.load(table, operator, "triton", on_gpu)(odd, odd)
    if operator == "write_tokens":
        assert first is odd and second is odd
    else:
        assert first.data_ptr() % ALIGNMENT == 0 and torch.equal(second, odd)


def passed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In place of a kernel's launch."""
    return tensors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("backend", ["tilelang", "triton"])
def test_an_odd_address_changes_no_result(backend: str, dtype: torch.dtype) -> None:
    """Of all of NSA, forward and backward."""
    skip_unless_runs(backend, "cuda", dtype)
    shapes = [(1, 200, 32, 64), *[(1, 200, 2, 64)] * 2, *[(1, 200, 32)] * 3]
    odd = [shifted(*shape, dtype=dtype, device="cuda") for shape in shapes]
    found = []
    for inputs in (odd, [x.clone() for x in odd]):
        leaves = [x.detach().requires_grad_() for x in inputs]
        o = ops.native_sparse_attention(*leaves, window_size=64, backend=backend)
        found.append([o, *torch.autograd.grad(o.sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
