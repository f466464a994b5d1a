"""`triton`, `tl`, `tilelang` and `T` by name, on any machine:
`from nsa_tutorial.course.languages import T, tl, triton`.

Importing this decides how the kernels of the cells that follow run: Triton's as
`environment.prepare` says, and `@tilelang.jit` compiles for the CPU where there is no CUDA device
(`tilelang_cpu.prepare`). It silences TileLang's log of compilations. Where a language is not
installed, its names stand for an `Absent`, so that a cell that defines a kernel runs to its end;
the kernel can be read and not launched.
"""

from __future__ import annotations

import importlib

from nsa_tutorial.course import addresses
from nsa_tutorial.runtime import environment


class Absent:
    """Stands for a language that is not installed: any attribute is itself, and as a decorator it
    changes nothing."""

    def __getattr__(self, name: str) -> Absent:
        return self

    def __call__(self, function: object) -> object:
        return function


environment.prepare()

if environment.detect().triton is None:
    triton = tl = Absent()
else:
    import triton
    import triton.language as tl

    addresses.watch()


def __getattr__(name: str) -> object:
    """`tilelang` and `T`, imported by the chapters that ask for them: it takes a second."""
    if name not in ("tilelang", "T"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if environment.detect().tilelang is None:
        return Absent()
    importlib.import_module("nsa_tutorial.runtime.tilelang_cpu").prepare()
    return importlib.import_module("tilelang" if name == "tilelang" else "tilelang.language")


__all__ = ["T", "tilelang", "tl", "triton"]  # noqa: F822 - two by `__getattr__`
