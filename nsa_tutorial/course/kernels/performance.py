"""Chapter 16: the smallest kernels that show coalescing, tensor cores and pipelining, in Triton.

Each is compiled twice, and what the compiler writes differs in one thing. `gather` loads neighbours
or numbers that lie apart. `multiply` multiplies tiles on the tensor cores or number by number, and
loads them ahead or not. They serve to be read, and to look at their PTX; nothing of the package
calls them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(X, Y, APART: tl.constexpr, BN: tl.constexpr):
    """Every `APART`-th number of `X` to `Y [N]`; the grid is `(N // BN,)`."""
    place = tl.program_id(0) * BN + tl.arange(0, BN)  # [BN]
    tl.store(Y + place, tl.load(X + place * APART))


@triton.jit
def multiply(
    A, B, C, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """`C [M, BN] = A [M, K] @ B [K, BN]`, for `K` a multiple of `BK`; the grid is `(M // BM,)`."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    columns = tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        step = start + tl.arange(0, BK)  # [BK]
        a_tile = tl.load(A + rows[:, None] * K + step)  # [BM, BK]
        b_tile = tl.load(B + step[:, None] * BN + columns)  # [BK, BN]
        if DOT:
            acc = tl.dot(a_tile, b_tile, acc)
        else:
            acc += tl.sum(a_tile[:, :, None].to(tl.float32) * b_tile[None, :, :], axis=1)
    tl.store(C + rows[:, None] * BN + columns, acc)
