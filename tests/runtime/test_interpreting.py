"""What Triton's interpreter remembers is what it would look up."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from nsa_tutorial.runtime import environment, interpreting

if not environment.detect().triton or not environment.is_interpreted():
    pytest.skip("Triton's interpreter does not run here", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def exp_of_exp(x):
    return tl.math.exp(tl.exp(x))


@triton.jit
def twice_kernel(X, Y, is_wrong: tl.constexpr):
    place = tl.program_id(0) * 4 + tl.arange(0, 4)
    y = exp_of_exp(tl.load(X + place))
    y = y + (tl.zeros([2], tl.float32) if is_wrong else y)
    tl.store(Y + place, y)


def test_types_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    spec = importlib.util.spec_from_file_location("triton.runtime.as_it_is", interpreter.__file__)
    as_it_is = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, as_it_is)
    spec.loader.exec_module(as_it_is)
    assert interpreter._get_np_dtype is not as_it_is._get_np_dtype
    for name in ("int1", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32"):
        number = getattr(tl, name)
        pointer = tl.pointer_type(number)
        for dtype in (number, pointer, tl.block_type(number, [4]), tl.block_type(pointer, [4])):
            found = interpreter._get_np_dtype(dtype)
            assert found == interpreter._get_np_dtype(dtype) == as_it_is._get_np_dtype(dtype)


def test_shapes_are_built_once_and_checked_each_time() -> None:
    for number in (tl.int32, tl.pointer_type(tl.float32), tl.int32):
        for shape in ([4, 2], tl.tuple([tl.constexpr(4), 2]), (4, 2)):
            found = tl.block_type(number, shape)
            assert list(found.shape) == [4, 2]
            assert (found.numel, found.element_ty) == (8, number)
            assert found.name == f"<{tl.tuple([4, 2])}, {number}>"
            tile = tl.tensor(None, found)
            assert [side.value for side in tile.shape] == [4, 2]
            assert (tile.numel.value, tile.dtype, tile.type) == (8, number, found)
    assert tl.block_type(tl.int32, [4, 2]) != tl.block_type(tl.int32, [2, 4])
    scalar = tl.tensor(None, tl.int32)
    assert (len(scalar.shape), scalar.numel.value) == (0, 1)
    for wrong in ([4.0, 2], [True, 3], [3], []):
        with pytest.raises((TypeError, ValueError), match=r"Shape element|0d block_type"):
            tl.block_type(tl.int32, wrong)


def test_a_function_in_a_kernel_finds_all_replaced() -> None:
    """And after the launch all is as before, also where it failed."""
    before = tl.load, tl.tensor.__add__, tl.math.exp
    x, y = torch.arange(8.0) / 8, torch.zeros(8)
    for _ in range(2):
        twice_kernel[(2,)](x, y, 0)
        torch.testing.assert_close(y, 2 * x.exp().exp())
        assert (tl.load, tl.tensor.__add__, tl.math.exp) == before
    with pytest.raises(InterpreterError, match="incompatible dimensions at index 0: 4 and 2"):
        twice_kernel[(2,)](x, y, 1)
    assert (tl.load, tl.tensor.__add__, tl.math.exp) == before


def test_once_is_enough() -> None:
    from triton.runtime import interpreter

    def remembered() -> tuple:
        return interpreter._patch_builtin, interpreter._get_np_dtype, tl.tensor.__init__

    before = remembered()
    interpreting.hasten()
    assert remembered() == before
