"""Chapter 14: the mean of each window of tokens, and its backward, in TileLang.

The two kernels of `triton.pooling`, phase by phase and name by name. A function here takes what is
fixed when the kernel is compiled, and returns the kernel, not yet compiled; numbers of tokens stay
open.

`mean` and `mean_backward` compile and run them, on CUDA tensors, or on CPU tensors through C.

Symbols: those of `triton.pooling`.
"""

import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.sparse.compression import first_rows, summaries_of_tokens

ROWS, COLUMNS, THREADS = 16, 128, 128  # of a tile; a thread has 16 of its numbers
accum_dtype = "float32"


def build_mean(W: int, length: int, dtype: str) -> tirx.PrimFunc:
    """The kernel from `X [tokens, W]` to `Output [summaries, W]`; summary `j` begins with the token
    `First[j]`."""
    tokens, summaries = T.dynamic("tokens"), T.dynamic("summaries")
    BJ, BW = ROWS, COLUMNS

    @T.prim_func
    def mean_kernel(
        X: T.Tensor([tokens, W], dtype),
        First: T.Tensor([summaries], "int32"),
        Output: T.Tensor([summaries, W], dtype),
    ):
        # -- locate the program --
        with T.Kernel(T.ceildiv(summaries, BJ), T.ceildiv(W, BW), threads=THREADS) as (row, column):
            first = T.alloc_fragment([BJ], "int32")
            x_tile = T.alloc_fragment([BJ, BW], dtype)
            acc = T.alloc_fragment([BJ, BW], accum_dtype)
            start = row * BJ
            left = column * BW

            # -- where the windows begin --
            T.copy(First[start : start + BJ], first)  # [BJ], zeros past the last

            # -- sum --
            T.clear(acc)
            for step in T.serial(length):
                for i, j in T.Parallel(BJ, BW):
                    x_tile[i, j] = X[first[i] + step, left + j]
                for i, j in T.Parallel(BJ, BW):
                    acc[i, j] += x_tile[i, j]

            # -- store --
            for i, j in T.Parallel(BJ, BW):
                acc[i, j] = acc[i, j] / length
            T.copy(acc, Output[start : start + BJ, left : left + BW])

    return mean_kernel


def build_mean_backward(W: int, length: int, most: int, dtype: str) -> tirx.PrimFunc:
    """The kernel from `GradOutput [summaries, W]` to `GradX [tokens, W]`; token `t` lies in the
    summaries `Begin[t] … End[t] - 1`, at most `most` of them."""
    tokens, summaries = T.dynamic("tokens"), T.dynamic("summaries")
    BT, BW = ROWS, COLUMNS

    @T.prim_func
    def mean_backward_kernel(
        GradOutput: T.Tensor([summaries, W], dtype),
        Begin: T.Tensor([tokens], "int32"),
        End: T.Tensor([tokens], "int32"),
        GradX: T.Tensor([tokens, W], dtype),
    ):
        # -- locate the program --
        with T.Kernel(T.ceildiv(tokens, BT), T.ceildiv(W, BW), threads=THREADS) as (row, column):
            begin = T.alloc_fragment([BT], "int32")
            end = T.alloc_fragment([BT], "int32")
            d_tile = T.alloc_fragment([BT, BW], dtype)
            acc = T.alloc_fragment([BT, BW], accum_dtype)
            start = row * BT
            left = column * BW

            # -- which summaries hold the tokens --
            T.copy(Begin[start : start + BT], begin)  # [BT], zeros past the last
            T.copy(End[start : start + BT], end)

            # -- sum --
            T.clear(acc)
            for step in T.serial(most):
                for i, j in T.Parallel(BT, BW):
                    summary = T.if_then_else(begin[i] + step < end[i], begin[i] + step, summaries)
                    d_tile[i, j] = GradOutput[summary, left + j]  # zeros past the last
                for i, j in T.Parallel(BT, BW):
                    acc[i, j] += d_tile[i, j]

            # -- store --
            for i, j in T.Parallel(BT, BW):
                acc[i, j] = acc[i, j] / length
            T.copy(acc, GradX[start : start + BT, left : left + BW])

    return mean_backward_kernel


def mean(x: Tensor, first: Tensor, *, length: int) -> Tensor:
    """The mean of each window; arguments and result as in `triton.pooling.mean`."""
    (B, M, H, D), M_c = x.shape, len(first)
    kernel = compiled(build_mean, kind_of(x.device), H * D, length, _name(x))
    summaries = x.new_empty(B, M_c, H, D)
    first = first_rows(first, B, M).to(torch.int32)
    kernel(x.reshape(B * M, -1).contiguous(), first, summaries.view(B * M_c, -1))
    return summaries


def mean_backward(d_summaries: Tensor, first: Tensor, *, M: int, length: int, most: int) -> Tensor:
    """The gradient of `mean`'s tokens; arguments and result as in `triton.pooling`."""
    B, M_c, H, D = d_summaries.shape
    sizes = (H * D, length, most, _name(d_summaries))
    kernel = compiled(build_mean_backward, kind_of(d_summaries.device), *sizes)
    begin, end = summaries_of_tokens(first_rows(first, B, M), B * M, length)
    d_x = d_summaries.new_empty(B, M, H, D)
    kernel(d_summaries.reshape(B * M_c, -1).contiguous(), begin, end, d_x.view(B * M, -1))
    return d_x


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
