"""Compile the kernel that a function of these folders builds, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tilelang
from tvm import tirx

from nsa_tutorial.kernels.tilelang.selected.forward import PASS_CONFIGS as ALL_THREADS_LOAD
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

# a warp group loads, the others compute
A_GROUP_LOADS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@functools.cache
def compiled(
    build: Callable[..., tirx.PrimFunc], device: str, *shape: int, a_group_loads: bool = False,
    **options: object,
) -> tilelang.JITKernel:  # fmt: skip
    """The kernel of `build(*shape, **options)`, compiled for `kind_of` a device."""
    kernel = build(*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    pass_configs = A_GROUP_LOADS if a_group_loads else ALL_THREADS_LOAD
    return tilelang.compile(kernel, target="cuda", pass_configs=pass_configs)
