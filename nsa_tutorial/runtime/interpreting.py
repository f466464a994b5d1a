"""Triton's interpreter without two detours, which take a third of its time.

At every launch, and at every call of a function inside a kernel, it goes through all that
`triton.language` holds to find what it replaces. For every number type that it asks for, it builds
the whole table of types. Neither changes, so both are looked up once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def hasten() -> None:
    """Let the interpreter remember, in this process; before the first launch. Twice is as once."""
    from triton.runtime import interpreter

    known = {"_get_np_dtype", "_patch_attr", "_patch_builtin"} <= vars(interpreter).keys()
    if known and interpreter._patch_builtin.__module__ != __name__:
        _remember_builtins(interpreter)
        _remember_types(interpreter)


def _remember_builtins(interpreter: ModuleType) -> None:
    import inspect

    from triton import language as tl

    names = {
        owner: [n for n, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]
        for owner in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    }
    search = interpreter._patch_builtin

    def patch(owner: object, builder: object, *scope: object) -> None:
        if owner not in names:
            search(owner, builder, *scope)
            return
        for name in names[owner]:
            member = getattr(owner, name)
            if tl.core.is_builtin(member):  # and not replaced by now
                interpreter._patch_attr(owner, name, member, builder, *scope)

    interpreter._patch_builtin = patch


def _remember_types(interpreter: ModuleType) -> None:
    from triton import language as tl

    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(dtype: object) -> object:
        if isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, tl.pointer_type):
            return look_up(dtype)
        if dtype not in found:
            found[dtype] = look_up(dtype)
        return found[dtype]

    interpreter._get_np_dtype = np_dtype
