"""A kernel that asks for more shared memory than there is gets smaller tiles, and the user no
error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from places import skip_unless_runs
from torch import Tensor

from nsa_tutorial import backends, ops
from nsa_tutorial.backends import BACKENDS
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.environment import BackendUnavailable
from nsa_tutorial.runtime.shared_memory import (
    SHARED_MEMORY,
    first_that_fits,
    shared_memory,
    withheld,
    withhold,
)
from nsa_tutorial.runtime.smaller_tiles import asked_for, with_smaller_tiles

CPU = torch.device("cpu")
Q = torch.zeros(1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _nothing_withheld() -> Iterator[None]:
    yield
    withhold(CPU, 0)


class OutOfResources(Exception):
    """As Triton raises it."""

    def __init__(self, required: int, limit: int, name: str) -> None:
        super().__init__(f"out of resource: {name}")
        self.required, self.limit, self.name = required, limit, name


def triton_error(asked: int) -> Exception:
    return OutOfResources(asked, SHARED_MEMORY, "shared memory")


def tilelang_error(asked: int) -> Exception:
    words = f"Failed to set the allowed dynamic shared memory size to {asked} with error: invalid"
    return RuntimeError(words)


def test_errors_are_those_of_the_languages() -> None:
    """Triton's own error is known by its name, and its other resources are not memory."""
    errors = pytest.importorskip("triton.runtime.errors")
    assert asked_for(errors.OutOfResources(7, 5, "shared memory")) == 7
    assert asked_for(errors.OutOfResources(2048, 1024, "threads")) is None
    assert asked_for(tilelang_error(104448)) == 104448
    assert asked_for(ValueError("Failed")) is None


@pytest.mark.parametrize("error", [triton_error, tilelang_error])
@pytest.mark.parametrize("factor", [1.05, 1.6, 3.0])
def test_the_next_smaller_tile_is_taken(error, factor: float) -> None:
    """The compiler needs `factor` times what was expected. What is withheld is withheld from the
    next call too, and no more than the largest tile that fits needs."""
    tried = []

    def operator(q: Tensor, *, scale: float) -> tuple[int, float]:
        tiles = [(side,) for side in (128, 96, 64, 32, 16)]
        (side,) = first_that_fits(tiles, lambda n: n * 1800, shared_memory(q.device))
        tried.append(side)
        if side * 1800 * factor > SHARED_MEMORY:
            raise error(int(side * 1800 * factor))
        return side, scale

    run = with_smaller_tiles(operator)
    best = next(n for n in (128, 96, 64, 32, 16) if n * 1800 * factor <= SHARED_MEMORY)
    assert run(Q, scale=2.0) == (best, 2.0)
    assert len(tried) == len(set(tried)) <= 4
    tried.clear()
    assert run(Q, scale=2.0) == (best, 2.0)
    assert tried == [best]


def test_where_nothing_fits_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and device are named; other operators lose nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a small GPU")

    def operator(q: Tensor, others: list[Tensor]) -> None:
        raise triton_error(SHARED_MEMORY + 1)

    words = r"no tile .* fits a small GPU.* 232,448 bytes.* float32 tensors \[1, 2, 3, 4\], \[1, 2"
    with pytest.raises(BackendUnavailable, match=words):
        with_smaller_tiles(operator)(Q, [Q])
    assert withheld(CPU) == 0
    assert shared_memory(CPU) == SHARED_MEMORY


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def operator(q: Tensor) -> None:
        calls.append(q)
        raise OutOfResources(2048, 1024, "threads") if len(calls) > 1 else triton_error(300_000)

    with pytest.raises(OutOfResources, match="threads"):
        with_smaller_tiles(operator)(Q)
    assert len(calls) == 2


@pytest.mark.parametrize("backend", ["tilelang", "triton"])
def test_kernels_on_a_gpu_are_called_so(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    monkeypatch.setattr(environment, "require", lambda *_: None)

    class OnAGPU:
        is_cuda, device, dtype = True, torch.device("cuda", 0), torch.float16

    loaded = backends.load(BACKENDS, "sliding_window_attention", backend, OnAGPU())
    smaller = loaded.__wrapped__  # inside of what aligns the tensors
    assert smaller is with_smaller_tiles(smaller.__wrapped__)
    plain = backends.load(BACKENDS, "sliding_window_attention", "reference", OnAGPU())
    assert not hasattr(plain, "__wrapped__")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "G", "dtype"), [("triton", 128, torch.bfloat16), ("tilelang", 64, torch.float32)]
)
def test_a_gpu_refuses_tiles_and_gets_smaller_ones(
    backend: str, G: int, dtype: torch.dtype
) -> None:
    """Told that there is far more shared memory than there is, an operator asks for too much: what
    it then does is right."""
    skip_unless_runs(backend, "cuda", dtype)
    device = torch.device("cuda", 0)
    withhold(device, -(2**22))
    try:
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(1, 256, heads, 256, generator=generator, device=device, dtype=dtype)
            .mul_(0.2).requires_grad_() for heads in (G, 1, 1)
        )  # fmt: skip
        ids = torch.arange(4, dtype=torch.int32, device=device).expand(1, 256, 1, 4)
        found = ops.selected_attention(q, k, v, ids, block_size=64, backend=backend)
        gradients = torch.autograd.grad(found.float().square().sum(), (q, k, v))
        assert withheld(device) > -(2**22), "nothing was refused"
        given = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = ops.selected_attention(*given, ids, block_size=64, backend="reference")
        expected = torch.autograd.grad(exact.square().sum(), given)
        for ours, theirs in zip((found, *gradients), (exact, *expected), strict=True):
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-3
            torch.testing.assert_close(
                ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())
            )
    finally:
        withhold(device, 0)
