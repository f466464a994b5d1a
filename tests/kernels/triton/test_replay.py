"""A call whose tensors are of the same kinds launches from its tape what Triton launched before,
and any other call goes through Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from places import skip_unless_runs
from torch import Tensor

from nsa_tutorial import ops

replay = pytest.importorskip("nsa_tutorial.kernels.triton.replay", exc_type=ImportError)
Made = list[tuple]


def first_kernel(X, Y, n, scale, BLOCK, FLAG):
    """Never runs."""


def second_kernel(X, BLOCK):
    """Never runs."""


class Kernels(NamedTuple):
    """Two kernels whose launches are written down: by whom, name, grid and arguments."""

    first: replay.Replayable
    second: replay.Replayable
    made: Made


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """In place of compiled kernels, on CPU tensors."""
    monkeypatch.setattr(replay, "_has_tapes", lambda x: True)
    made: Made = []

    class Compiled:
        function = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple) -> object:
            return lambda *args: made.append(("tape", self.name, grid, args))

    found = []
    for function in (first_kernel, second_kernel):
        kernel = replay.Replayable(function)
        order = kernel.arg_names

        def run(*args, grid, warmup, order=order, name=function.__name__, **named) -> Compiled:
            args = (*args, *(named[n] for n in order[len(args) :]))
            made.append(("Triton", name, (*grid, 1, 1)[:3], args))
            return Compiled(name)

        kernel.run = run
        found.append(kernel)
    return Kernels(*found, made)


def attend(kernels: Kernels, options: SimpleNamespace) -> object:
    """A function with a tape, that launches both kernels, the second one with names only."""

    @replay.replayed
    def function(x: Tensor, *, size: int = 4) -> Tensor:
        y = torch.empty_like(x)
        kernels.first[(size,)](x, y, options.n, 0.5, FLAG=options.flag, BLOCK=16, num_warps=4)
        if options.second:
            kernels.second[(2, size)](X=y, BLOCK=16, num_warps=options.warps)
        return y

    return function


def options(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**({"n": 7, "flag": True, "second": True, "warps": 4} | changes))


def test_the_same_launches_with_the_new_tensors(kernels: Kernels) -> None:
    function = attend(kernels, options())
    x = torch.zeros(8)
    function(x)
    usual, by = list(kernels.made), {"Triton", "tape"}
    kernels.made.clear()
    x = torch.ones(8)
    y = function(x)
    assert {launch[0] for launch in usual + kernels.made} == by
    assert [launch[1:3] for launch in kernels.made] == [launch[1:3] for launch in usual]
    (_, _, _, first), (_, _, _, second) = kernels.made
    assert first[0] is x and first[1] is y and first[2:] == (7, 0.5, 16, True)
    assert second[0] is y and second[1:] == (16,)


KINDS = {
    "a length": torch.zeros(9),
    "strides": torch.zeros(16)[::2],
    "a dtype": torch.zeros(8, dtype=torch.float64),
    "an address": torch.zeros(9)[1:],
}


@pytest.mark.parametrize("x", KINDS.values(), ids=KINDS.keys())
def test_another_kind_of_tensor_has_its_own_tape(kernels: Kernels, x: Tensor) -> None:
    function = attend(kernels, options())
    function(torch.zeros(8))
    kernels.made.clear()
    function(x)
    assert [by for by, *_ in kernels.made] == ["Triton"] * 2
    kernels.made.clear()
    function(x)
    function(torch.zeros(8))
    assert [by for by, *_ in kernels.made] == ["tape"] * 4


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"n": 8}, ["Triton", "Triton"]),
        ({"flag": False}, ["Triton", "Triton"]),
        ({"warps": 8}, ["tape", "Triton"]),
        ({"second": False}, ["tape"]),
    ],
    ids=["a number", "a constant", "warps", "fewer launches"],
)
def test_other_launches_go_through_triton(
    kernels: Kernels, changes: dict[str, object], by: list[str]
) -> None:
    """From the first one on that differs; and the tape is made anew."""
    given = options()
    function = attend(kernels, given)
    function(torch.zeros(8))
    for name, value in changes.items():
        setattr(given, name, value)
    for expected in (by, ["Triton"] * len(by), ["tape"] * len(by)):
        kernels.made.clear()
        function(torch.zeros(8))
        assert [by for by, *_ in kernels.made] == expected


def test_a_call_that_failed_leaves_no_tape(kernels: Kernels) -> None:
    """And later launches outside of it go through Triton."""
    function = attend(kernels, options(warps=object()))
    usual, kernels.second.run = kernels.second.run, lambda *args, **named: 1 / 0
    with pytest.raises(ZeroDivisionError):
        function(torch.zeros(8))
    kernels.second.run = usual
    for by in ("Triton", "tape"):
        kernels.made.clear()
        function(torch.zeros(8))
        assert [found for found, *_ in kernels.made] == [by] * 2
    kernels.second[(1,)](torch.zeros(8), BLOCK=16)
    assert kernels.made[-1][0] == "Triton"


def test_threads_have_their_own_tapes(kernels: Kernels) -> None:
    """One that launches while another plays disturbs nobody."""
    given, both = options(), threading.Barrier(2, timeout=10)
    function = attend(kernels, given)
    function(torch.zeros(8))
    usual, kernels.made[:] = kernels.first.__class__.__getitem__, []

    def waiting(kernel: replay.Replayable, grid: tuple) -> object:
        both.wait()
        return usual(kernel, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Replayable, "__getitem__", waiting)
        threads = [threading.Thread(target=function, args=(torch.zeros(8),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [by for by, *_ in kernels.made] == ["tape"] * 4


def test_tapes_do_not_pile_up(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_TAPES", 3)
    function = attend(kernels, options())
    for length in range(1, 9):
        function(torch.zeros(length))
        assert len(function.tapes) <= 3


COMPILED = """
import torch
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

handed = []


class Utils:
    def load_binary(self, name, *_):
        return 1, name, 32, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": 232448}


class Driver:
    utils = Utils()
    launcher_cls = lambda self, *_: lambda *given: handed.append(given)
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    map_python_to_cpp_type = staticmethod(nvidia.ty_to_cpp)


driver.set_active(Driver())
from nsa_tutorial.kernels.triton import replay

import triton


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def kernel(X, Boxes, n, one, shift, scale, nothing, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(X + place + one + shift, mask=place < n, other=0.0)
    if FLAG:
        x += Boxes.load([0]).to(tl.float32)
    tl.store(X + place, half(x) * scale)


half.__class__ = kernel.__class__ = replay.Replayable
replay._has_tapes = lambda x: True


@replay.replayed
def function(x):
    boxes = TensorDescriptor.from_tensor(x, [16])
    kernel[(2,)](x, boxes, 99, 1, 32, 0.25, None, BLOCK=16, FLAG=True, num_warps=1)
    kernel[2, 3](X=x, Boxes=boxes, n=99, one=1, shift=32, scale=2.0, nothing=None, BLOCK=16,
                 FLAG=False, num_warps=1)


x = torch.zeros(64)
function(x)
JITFunction.run = None  # the tape alone
function(x)
first, second, *again = handed
for old, new in zip((first, second), again, strict=True):
    assert len(old) == len(new)
    for a, b in zip(old, new):
        if isinstance(a, TensorDescriptor):
            assert a.base is b.base
        elif not isinstance(a, LazyDict):  # of a launch, for profilers
            assert a is b or a == b, (a, b)
assert first[:3] == (2, 1, 1) and second[:3] == (2, 3, 1)
print("handed over alike")
"""


@pytest.mark.exhaustive
def test_a_launcher_is_handed_what_triton_hands_it(tmp_path: Path) -> None:
    """Of kernels that were compiled for an H200, with a driver that only looks on."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED, encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout == "handed over alike\n", finished.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("nonnegative_gates", [False, True])
def test_a_second_call_is_as_the_first(nonnegative_gates: bool) -> None:
    """To the bit, forward and backward, with Triton's own launches forbidden: for tensors of the
    same kinds, also where they begin at an odd address, and with one token more."""
    from triton.runtime.jit import JITFunction

    skip_unless_runs("triton", "cuda", torch.bfloat16)
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, shift: int = 0) -> Tensor:
        n = torch.Size(shape).numel()
        x = torch.randn(n + shift, generator=g, device="cuda", dtype=torch.bfloat16)
        return x[shift:].view(shape)

    def both(inputs: list[Tensor], d_o: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        sizes = {"block_size": 64, "window_size": 128, "nonnegative_gates": nonnegative_gates}
        o = ops.native_sparse_attention(*leaves, **sizes, backend="triton")
        return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]

    for N, shift in ((640, 0), (640, 1), (641, 0)):
        shapes = [(1, N, 32, 64), (1, N, 2, 64), (1, N, 2, 64)]
        inputs = [draw(*shape, shift=shift) for shape in shapes]
        inputs += [draw(1, N, 32, shift=shift).sigmoid() for _ in range(3)]
        d_o = draw(1, N, 32, 64)
        first = both(inputs, d_o)
        copies = [torch.empty_like(x).copy_(x) for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", None)
            second = both(copies, d_o)
        for right, found in zip(first, second, strict=True):
            assert torch.equal(right, found)
