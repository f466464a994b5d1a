"""Native Sparse Attention in one call is what it is branch by branch, with few launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from places import DTYPES, name_of, skip_unless_runs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nsa_tutorial import backends, compositions, ops

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"block_size": 8, "window_size": 9, "length": 8, "stride": 4}
PLACES = [pytest.param(torch.float32, "cpu", id="float32-cpu")] + [
    pytest.param(dtype, "cuda", id=f"{name_of(dtype)}-cuda", marks=pytest.mark.gpu)
    for dtype in DTYPES
]
PROBLEMS = {
    "a batch, more keys than queries": {"B": 2, "N": 20, "M": 44, "H": 2, "G": 3},
    "packed": {"N": 60, "M": 60, "cu": (0, 7, 7, 40, 60)},
    "keys of each branch's own": {"N": 33, "M": 33, "H": 2, "is_apart": True},
    "a count for each row": {"N": 40, "M": 40, "has_counts": True},
    "no summary": {"N": 5, "M": 6},
    "not finite": {"N": 50, "M": 50, "is_spoiled": True},
}


def draw(
    dtype: torch.dtype, device: str, *, B: int = 1, N: int, M: int, H: int = 1, G: int = 2,
    D: int = 16, DV: int = 32, cu: tuple[int, ...] | None = None, is_apart: bool = False,
    has_counts: bool = False, is_spoiled: bool = False, nonnegative_gates: bool = False,
) -> tuple[list[Tensor], Callable[[], Tensor]]:  # fmt: skip
    """The inputs that have gradients, and the call."""
    g = torch.Generator().manual_seed(N)

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    q, k, v = x(B, N, H * G, D), x(B, M, H, D), x(B, M, H, DV)
    gates = [x(B, N, H * G) for _ in range(3)]
    gates[0][:, N // 2 :] = 0  # no loss asks for these
    gates[1][:, 1::2, 0] = 0  # nor for the first head of these
    gates = [y.abs() for y in gates] if nonnegative_gates else gates
    if is_spoiled:
        k[:, M // 2], v[:, 3], q[:, 11] = float("inf"), float("nan"), float("nan")
    options = SIZES | {"backend": "triton", "block_counts": 4}
    options["nonnegative_gates"] = nonnegative_gates
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device=device)
    if has_counts:
        options["block_counts"] = torch.randint(3, 6, (B, N, H), generator=g).to(device)
    inputs = [q, k, v, *gates]
    if is_apart:
        pairs = [(x(B, M, H, D), x(B, M, H, DV)) for _ in range(2)]
        summaries = [ops.compress(y, length=8, stride=4, backend="reference") for y in (k, v)]
        inputs = [q, *gates, *summaries, *(y for pair in pairs for y in pair)]
    inputs = [y.requires_grad_() for y in inputs]

    def call() -> Tensor:
        if not is_apart:
            return ops.native_sparse_attention(*inputs, **options)
        pairs = (inputs[4:6], inputs[6:8], inputs[8:])
        return ops.three_branches(q, *pairs, inputs[1:4], num_keys=M, **options)

    return inputs, call


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize(("dtype", "device"), PLACES)
def test_the_same_as_branch_by_branch(
    problem: dict, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 to the bit, NaN where it is NaN; in half precision the sums of gradients are rounded
    in another order."""
    skip_unless_runs("triton", device, dtype)
    found = []
    for is_at_once in (True, False):
        if not is_at_once:
            monkeypatch.setattr(compositions, "takes_all_at_once", lambda *_: False)
        inputs, call = draw(dtype, device, **problem)
        o = call()
        d_o = torch.linspace(-1, 1, o.numel(), device=device, dtype=dtype).view(o.shape)
        found.append([o, *torch.autograd.grad(o, inputs, d_o)])
    for x, y in zip(*found, strict=True):
        if dtype == torch.float32:
            assert torch.equal(x.nan_to_num(7, 8, 9), y.nan_to_num(7, 8, 9))
        else:
            x, y = x.float(), y.float()
            assert torch.equal(x.isnan(), y.isnan())
            assert (x - y).nan_to_num(0, 0, 0).norm() <= 2**-8 * y.nan_to_num(0, 0, 0).norm()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize(("dtype", "device"), PLACES)
def test_gates_are_folded_into_the_weights(
    problem: dict, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are the same, and NaN where they are NaN."""
    skip_unless_runs("triton", device, dtype)
    found = []
    for is_folded in (True, False):
        inputs, call = draw(dtype, device, **problem, nonnegative_gates=True)
        if not is_folded:
            monkeypatch.setattr(compositions, "takes_all_at_once", lambda *_: False)
        o = call()
        d_o = torch.linspace(-1, 1, o.numel(), device=device, dtype=dtype).view(o.shape)
        found.append(torch.autograd.grad(o, inputs, d_o))
    error = 2**-18 if dtype == torch.float32 else 2**-7
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.isfinite(), y.isfinite())
        x, y = (g.float().nan_to_num(0, 0, 0) for g in (x, y))
        assert (x - y).norm() <= error * y.norm()


def test_a_gate_below_0_that_was_promised_not_to_be() -> None:
    """Its row's gradients say so, and those of no other row; no gradient of an output is made."""
    skip_unless_runs("triton", "cpu", torch.float32)
    inputs, call = draw(torch.float32, "cpu", N=40, M=40, nonnegative_gates=True)
    with torch.no_grad():
        inputs[4][0, 17, 1] = -0.5  # of the selection
    o = call()
    with counted_kernels() as kernels:
        d_q = torch.autograd.grad(o, inputs[0], torch.ones_like(o))[0]
    assert "branch_numbers_kernel" in kernels and "branch_backward_kernel" not in kernels
    assert d_q.isnan().any(-1).nonzero().tolist() == [[0, 17, 1]]


class Operations(TorchDispatchMode):
    """While it is on, `of` lists the operations of PyTorch's that compute something."""

    FREE = (
        "aten.empty", "aten.new_empty", "aten.view", "aten.unbind", "aten.select", "aten.slice",
        "aten._unsafe_view", "aten.detach", "aten.alias", "aten.t.", "aten.transpose",
        "aten.expand", "aten.unsqueeze", "aten.split", "aten.as_strided", "nsa_tutorial.",
        "aten.permute", "aten.flatten", "aten.empty_like",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.of = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not str(func).startswith(self.FREE):
            self.of.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_kernels() -> Iterator[list[str]]:
    """The names of the Triton kernels that are launched meanwhile, interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    names, usual = [], InterpretedFunction.run

    def run(self: InterpretedFunction, *args: object, **options: object) -> object:
        names.append(self.fn.__name__)
        with _disable_current_modes():  # what the interpreter does is no operation of ours
            return usual(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield names


def test_how_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels and of PyTorch's operations, forward and backward: a short text waits for them."""
    skip_unless_runs("triton", "cpu", torch.float32)
    inputs, call = draw(torch.float32, "cpu", N=40, M=40)
    call()  # imports, and what is made once
    operations, load = Operations(), backends.load

    def counted(*args: object) -> Callable:
        """A mode is off inside of an operator that it sees: here it is on again."""
        function = load(*args)

        def run(*args: object, **options: object) -> object:
            with operations:
                return function(*args, **options)

        return run

    monkeypatch.setattr(backends, "load", counted)
    with counted_kernels() as kernels, operations:
        o = call()
        forward = (len(kernels), len(operations.of))
        torch.autograd.grad(o, inputs, torch.ones_like(o))
    backward = (len(kernels) - forward[0], len(operations.of) - forward[1])
    # locate, two means, attend, score, pick, attend to lists, to the window and sum; and a zero
    assert forward == (8, 1), (kernels, operations.of)
    # besides kernels: the sort, zeros for the gradients of keys and values, of summaries
    assert backward[0] <= 15 and backward[1] <= 6, (kernels, operations.of)


@pytest.mark.gpu
def test_how_many_launches_on_a_gpu() -> None:
    """With tiles of neighbouring queries, as the profiler counts them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    skip_unless_runs("triton", "cuda", torch.bfloat16)
    sizes = {"N": 4096, "M": 4096, "H": 4, "G": 16, "D": 128, "DV": 128}
    inputs, call = draw(torch.bfloat16, "cuda", **sizes)
    o = call()
    d_o = torch.ones_like(o)
    torch.autograd.grad(o, inputs, d_o)
    counts = []
    for direction in ("forward", "backward"):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            if direction == "forward":
                o = call()
            else:
                torch.autograd.grad(o, inputs, d_o)
            torch.cuda.synchronize()
        counts.append(sum(e.device_type == DeviceType.CUDA for e in trace.events()))
    assert counts[0] <= 13 and counts[1] <= 34, counts  # 12 and 33 with torch 2.11
