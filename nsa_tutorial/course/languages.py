"""`triton`, `tl`, `tilelang` and `T` by name, on any machine:
`from nsa_tutorial.course.languages import T, tl, triton`.

Where a language is not installed, its names stand for an `Absent`, so that a cell that defines a
kernel runs to its end; the kernel can be read and not launched.
"""

from __future__ import annotations

from nsa_tutorial.runtime import environment


class Absent:
    """Stands for a language that is not installed: any attribute is itself, and as a decorator it
    changes nothing."""

    def __getattr__(self, name: str) -> Absent:
        return self

    def __call__(self, function: object) -> object:
        return function


if environment.detect().triton is None:
    triton = tl = Absent()
else:
    import triton
    import triton.language as tl

if environment.detect().tilelang is None:
    tilelang = T = Absent()
else:
    import tilelang
    from tilelang import language as T

__all__ = ["T", "tilelang", "tl", "triton"]
