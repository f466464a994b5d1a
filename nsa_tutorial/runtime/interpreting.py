"""Triton's interpreter without detours, which take two thirds of its time.

At every launch, and at every call of a function inside a kernel, it goes through all that
`triton.language` holds to find what it replaces. For every number type that it asks for, it builds
the whole table of types; for every tile, its shape, as objects of Triton's. None of it changes, so
it is looked up once. And it computes sums and products of integers a second time in 64 bits, and
looks at the result only where it was told to debug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def hasten() -> None:
    """Let the interpreter remember, in this process; before the first launch. Twice is as once."""
    from triton.runtime import interpreter

    names = {"_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang", "_LangPatchScope"}
    known = names <= vars(interpreter).keys()
    if known and interpreter._patch_builtin.__module__ != __name__:
        _remember_builtins(interpreter)
        _remember_types(interpreter)
        _remember_shapes()
        _leave_out_overflow()


def _remember_builtins(interpreter: ModuleType) -> None:
    import inspect

    from triton import language as tl

    is_builtin = tl.core.is_builtin
    names = {
        owner: [n for n, member in inspect.getmembers(owner) if is_builtin(member)]
        for owner in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    }
    search, search_all = interpreter._patch_builtin, interpreter._patch_lang

    def patch(owner: object, builder: object, *scope: object) -> None:
        if owner not in names:
            search(owner, builder, *scope)
            return
        for name in names[owner]:
            member = getattr(owner, name)
            if is_builtin(member):  # and not replaced by now
                interpreter._patch_attr(owner, name, member, builder, *scope)

    def patch_all(function: object) -> object:
        seen = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if not seen or any(map(is_builtin, (tl.tensor.__add__, *(m.load for m in seen)))):
            return search_all(function)
        return interpreter._LangPatchScope()  # inside a kernel, all is replaced by now

    interpreter._patch_builtin, interpreter._patch_lang = patch, patch_all


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


def _remember_shapes() -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value
    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__
    of_types, of_tensors = {}, {}

    def init_type(self: object, element_ty: object, shape: object) -> None:
        sides = shape.values if isinstance(shape, core.tuple) else shape
        sides = tuple([s.value if isinstance(s, core.constexpr) else s for s in sides])
        if any(type(side) is not int for side in sides) or sides not in of_types:
            new_type(self, element_ty, shape)  # or says what is wrong
            of_types[sides] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sides]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: object, handle: object, type: object) -> None:
        sides = tuple(type.shape.values) if isinstance(type, core.block_type) else None
        if sides not in of_tensors:
            new_tensor(self, handle, type)
            of_tensors[sides] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sides]

    def broadcast_values(self: object, lhs: object, rhs: object) -> tuple[object, object]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_values


def _leave_out_overflow() -> None:
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self: object, *operands: object) -> None:
        if self.builder.options.debug:  # else its result is not looked at
            check(self, *operands)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
