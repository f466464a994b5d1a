"""What Triton's interpreter remembers is what it would look up."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from nsa_tutorial.runtime import environment, interpreting

pytestmark = pytest.mark.skipif(
    not environment.detect().triton or not environment.is_interpreted(),
    reason="Triton's interpreter does not run here",
)


def test_types_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import language as tl
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


def test_once_is_enough() -> None:
    from triton.runtime import interpreter

    remembered = interpreter._patch_builtin, interpreter._get_np_dtype
    interpreting.hasten()
    assert (interpreter._patch_builtin, interpreter._get_np_dtype) == remembered
