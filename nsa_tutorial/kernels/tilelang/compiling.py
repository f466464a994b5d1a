"""Compile the kernel that a function of these folders builds, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tilelang
from tvm import tirx

from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

# options of TileLang's passes: one warp group of a program loads, and the others compute
A_GROUP_LOADS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
# the same without that split, for programs of few warps
ALL_THREADS_LOAD = {
    **A_GROUP_LOADS,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}


@functools.cache
def compiled(
    build: Callable[..., tirx.PrimFunc], device: str, *shape: object, a_group_loads: bool = False,
    pass_configs: tuple[tuple[str, object], ...] = (), **options: object,
) -> tilelang.JITKernel:  # fmt: skip
    """The kernel of `build(*shape, **options)`, compiled for `kind_of` a device. `pass_configs` are
    added to the compiler's options."""
    kernel = build(*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    configs = A_GROUP_LOADS if a_group_loads else ALL_THREADS_LOAD
    return tilelang.compile(kernel, target="cuda", pass_configs={**configs, **dict(pass_configs)})
