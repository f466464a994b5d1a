"""Chapter 09: a kernel is one tile's program, launched many times; four kernels, in Triton and in
TileLang.

Here are the functions that launch them: `copy`, `softmax`, `matmul` and `attention` check their
arguments, cut the result into tiles, and start one program for each. The kernels are in
`course.kernels.triton_basics` and `course.kernels.tilelang_basics`, which are imported when one is
launched: this file can be imported where neither language is installed, and `backend="reference"`
is plain PyTorch.

They are for learning: forward only, no autotuning, fewer than 2**31 elements in any tensor.

Symbols: `BN`, `BR`, `BM` sides of a tile, `BD` the depth of one step of `matmul`; `N`, `R`, `M`,
`K` sizes of a tensor; in `attention` as in chapter 04, `BQ` queries and `BK` keys of a tile.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import checks, environment

BACKENDS = ("reference", "triton", "tilelang")
KERNELS = ("copy", "softmax", "matmul", "attention")
LARGEST_ROW = 16_384  # of softmax: a program holds whole rows
LARGEST_TENSOR = 2**31 - 1  # elements: the kernels count in 32 bits


def copy(x: Tensor, *, backend: str = "reference", tile: int = 1024) -> Tensor:
    """A copy of `x [N]`, `tile` elements per program.

    Raises:
        TypeError, ValueError: naming the argument, what came, and what was expected.
        BackendUnavailable: one sentence, where the backend cannot run this tensor on this machine.
    """
    _check_tensors(backend, x=(x, "[N]"))
    _check_tile("tile", tile)
    if backend == "reference":
        return x.clone()
    (N,), x = x.shape, x.contiguous()
    y = torch.empty_like(x)
    if backend == "triton":
        from nsa_tutorial.course.kernels import triton_basics

        triton_basics.copy[_programs(N, tile),](x, y, N, BN=tile)
    else:
        _tilelang("copy", x, BN=tile)(x, y)
    return y


def softmax(x: Tensor, *, backend: str = "reference", tile_rows: int = 4) -> Tensor:
    """The softmax of each row of `x [R, N]`, in the dtype of `x`, computed in fp32; `tile_rows`
    rows per program.

    A program holds whole rows, so `N` is at most `LARGEST_ROW`. Errors as in `copy`.
    """
    _check_tensors(backend, x=(x, "[R, N]"))
    _check_tile("tile_rows", tile_rows)
    (R, N), x = x.shape, x.contiguous()
    if N > LARGEST_ROW:
        raise ValueError(
            f"x: got rows of {N}, expected at most {LARGEST_ROW}: a program holds whole rows"
        )
    if backend == "reference":
        return torch.softmax(x, -1)
    y, BN = torch.empty_like(x), _padded(N, backend)
    if backend == "triton":
        from nsa_tutorial.course.kernels import triton_basics

        triton_basics.softmax[_programs(R, tile_rows),](x, y, R, N, LOG2_E, BR=tile_rows, BN=BN)
    else:
        _tilelang("softmax", x, BR=tile_rows, BN=BN)(x, y, LOG2_E)
    return y


def matmul(
    a: Tensor, b: Tensor, *, backend: str = "reference", tile: tuple[int, int, int] = (64, 64, 32)
) -> Tensor:
    """`a [M, K] @ b [K, N]`, summed in fp32; `tile` is `(BM, BN, BD)`, powers of two from 16 on.

    Errors as in `copy`.
    """
    _check_tensors(backend, a=(a, "[M, K]"), b=(b, "[K, N]"))
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b: got {checks.describe(b)}, expected {a.shape[1]} rows, the width of a")
    if not isinstance(tile, tuple) or len(tile) != 3:
        raise TypeError(f"tile: got {checks.describe(tile)}, expected three ints, (BM, BN, BD)")
    for size in tile:
        _check_tile("tile", size, least=16)
    if backend == "reference":
        return a @ b
    (M, K), N, (BM, BN, BD) = a.shape, b.shape[1], tile
    a, b, c = a.contiguous(), b.contiguous(), a.new_empty(M, N)
    if backend == "triton":
        from nsa_tutorial.course.kernels import triton_basics

        triton_basics.matmul[_programs(M, BM), _programs(N, BN)](
            a, b, c, M, N, K, BM=BM, BN=BN, BD=BD, NUM_STAGES=2
        )
    else:
        _tilelang("matmul", a, N=N, K=K, BM=BM, BN=BN, BD=BD, threads=_threads(BM))(a, b, c)
    return c


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "reference", causal: bool = True,
    scale: float | None = None, tile_q: int = 64, tile_k: int = 32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Grouped-query attention by tiles (chapter 04): `o [B, N, HQ, DV]` in the dtype of `v`, and
    `lse [B, N, HQ]` in fp32.

    Args:
        q: `[B, N, HQ, D]`, the last `N` of the `M` positions.
        k, v: `[B, M, H, D]` and `[B, M, H, DV]`; `H` divides `HQ`. Widths of at most 256.
        backend: `"reference"`, `"triton"` or `"tilelang"`.
        causal: hide the keys after each query's own position.
        scale: factor on every dot product, positive; `D ** -0.5` by default.
        tile_q, tile_k: queries and keys in a tile, powers of two of at least 16.

    Errors as in `copy`.
    """
    _check_tensors(backend, q=(q, "[B, N, HQ, D]"), k=(k, "[B, M, H, D]"), v=(v, "[B, M, H, DV]"))
    checks.check_qkv(q, k, v)
    checks.check_bool("causal", causal)
    for name, size in (("tile_q", tile_q), ("tile_k", tile_k)):
        _check_tile(name, size, least=16)
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    scale = checks.check_scale(scale, D)
    if backend == "reference":
        return gqa.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = v.new_empty(B, N, HQ, DV), q.new_empty(B, N, HQ, dtype=torch.float32)
    sizes = {"G": HQ // H, "D": D, "DV": DV, "BQ": tile_q, "BK": tile_k}
    sizes |= {"DT": _padded(D, backend), "DVT": _padded(DV, backend)}
    if backend == "triton":
        from nsa_tutorial.course.kernels import triton_basics

        grid = (_programs(N, tile_q), HQ, B)
        triton_basics.attention[grid](
            q, k, v, o, lse, N, M, HQ, scale, scale * LOG2_E, CAUSAL=causal, NUM_STAGES=2, **sizes
        )
    else:
        _tilelang("attention", q, causal=causal, threads=_threads(tile_q), **sizes)(
            q, k, v, o, lse, scale, scale * LOG2_E
        )
    return o, lse


def _padded(n: int, backend: str) -> int:
    """`n` rounded up to a power of two, as `tl.arange` wants it, and to 16 at least, with which
    tensor cores compute."""
    language = importlib.import_module("triton" if backend == "triton" else "tilelang.math")
    return max(16, language.next_power_of_2(n))


def _programs(n: int, tile: int) -> int:
    """How many tiles cover `n` elements; the last may be partly empty."""
    return -(-n // tile)


def _threads(rows: int) -> int:
    """A warp of 32 threads for every 16 rows of a tile, four warps at most."""
    return 32 * max(1, min(4, rows // 16))


def _tilelang(name: str, x: Tensor, **options: object) -> object:
    from nsa_tutorial.course.kernels import tilelang_basics

    return tilelang_basics.compiled(
        name, x.device.type, dtype=str(x.dtype).removeprefix("torch."), **options
    )


def _check_tensors(backend: str, **tensors: tuple[Tensor, str]) -> None:
    """The backend exists and can run these tensors, which are of one dtype, on one device, not
    empty and not too large."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    first_name, (first, _) = next(iter(tensors.items()))
    dtypes = checks.FLOATS if backend == "reference" else checks.DTYPES
    for name, (x, shape) in tensors.items():
        checks.check_tensor(name, x, shape, dtypes)
        if x.dtype != first.dtype:
            expected = f"the dtype of {first_name}, {first.dtype}"
            raise TypeError(f"{name}: got {checks.describe(x)}, expected {expected}")
        if not 1 <= x.numel() <= LARGEST_TENSOR:
            expected = f"1 to {LARGEST_TENSOR} elements"
            raise ValueError(f"{name}: got {checks.describe(x)}, expected {expected}")
    checks.check_same_device(**{name: x for name, (x, _) in tensors.items()})
    environment.require(backend, first.device.type, str(first.dtype).removeprefix("torch."))


def _check_tile(name: str, size: int, least: int = 1) -> None:
    """A tile's size is a power of two, for `tl.arange` takes no other; in a dot at least 16, which
    tensor cores multiply."""
    checks.check_positive_int(name, size, least=least)
    if math.log2(size) % 1:
        raise ValueError(f"{name}: got {size}, expected a power of two")
