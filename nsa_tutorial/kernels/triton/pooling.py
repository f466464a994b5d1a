"""Chapter 14: the mean of each window of tokens, and its backward, in Triton.

A mean does not ask which head a number belongs to, nor which sequence of the batch. So a token is
one row of `W = H * D` columns, and no width is padded. A number is written by one program, so every
run gives the same bits.

`mean` and `mean_backward` launch the kernels and are what the operators call; `tilelang.pooling`
holds the same two.

Symbols: `M` tokens and `M_c` summaries of a sequence · `BJ` summaries, `BT` tokens and `BW` columns
of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.key_runs import store_gradient
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.sparse.compression import first_rows, summaries_of_tokens

TILE = {"BW": 128, "num_warps": 4}  # columns of a tile: 256 bytes in half precision
SUMMARIES, TOKENS = 8, 16  # of a tile


@triton.jit
def mean_kernel(
    X, First, Output, num_summaries, W,
    LENGTH: tl.constexpr, BJ: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """`X [tokens, W]` to `Output [num_summaries, W]`; summary `j` begins with the token `First[j]`.

    The grid is `(cdiv(num_summaries, BJ) * cdiv(W, BW),)`.
    """
    # -- locate the program --
    num_column_tiles = tl.cdiv(W, BW)
    summaries = tl.program_id(0) // num_column_tiles * BJ + tl.arange(0, BJ)  # [BJ]
    columns = tl.program_id(0) % num_column_tiles * BW + tl.arange(0, BW)  # [BW]
    in_bounds = (summaries < num_summaries)[:, None] & (columns < W)  # [BJ, BW]

    # -- where the windows begin --
    first = tl.load(First + summaries, mask=summaries < num_summaries, other=0)  # [BJ]
    offsets = first.to(tl.int64)[:, None] * W + columns  # [BJ, BW]

    # -- sum --
    acc = tl.zeros([BJ, BW], tl.float32)
    for i in tl.range(LENGTH, loop_unroll_factor=16):
        step = tl.cast(i, tl.int64) * W
        acc += tl.load(X + offsets + step, mask=in_bounds, other=0.0).to(tl.float32)

    # -- store --
    output_offsets = summaries.to(tl.int64)[:, None] * W + columns
    mean = acc / LENGTH
    tl.store(Output + output_offsets, mean.to(Output.dtype.element_ty), mask=in_bounds)


@triton.jit
def mean_backward_kernel(
    GradOutput, Begin, End, GradX, num_tokens, W,
    LENGTH: tl.constexpr, MOST: tl.constexpr, ADD: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """`GradOutput [summaries, W]` to `GradX [num_tokens, W]`, or, with `ADD`, on top of what is
    there; token `t` lies in the summaries `Begin[t] … End[t] - 1`, at most `MOST` of them.

    The grid is `(cdiv(num_tokens, BT) * cdiv(W, BW),)`.
    """
    # -- locate the program --
    num_column_tiles = tl.cdiv(W, BW)
    tokens = tl.program_id(0) // num_column_tiles * BT + tl.arange(0, BT)  # [BT]
    columns = tl.program_id(0) % num_column_tiles * BW + tl.arange(0, BW)  # [BW]
    in_bounds = (tokens < num_tokens)[:, None] & (columns < W)  # [BT, BW]

    # -- which summaries hold the tokens --
    begin = tl.load(Begin + tokens, mask=tokens < num_tokens, other=0)  # [BT]
    end = tl.load(End + tokens, mask=tokens < num_tokens, other=0)
    offsets = begin.to(tl.int64)[:, None] * W + columns  # [BT, BW]

    # -- sum --
    acc = tl.zeros([BT, BW], tl.float32)
    for i in tl.range(MOST):
        holds = (begin + i < end)[:, None] & in_bounds
        step = tl.cast(i, tl.int64) * W
        acc += tl.load(GradOutput + offsets + step, mask=holds, other=0.0).to(tl.float32)

    # -- store --
    x_offsets = tokens.to(tl.int64)[:, None] * W + columns
    store_gradient(GradX + x_offsets, acc / LENGTH, in_bounds, ADD)


def mean(x: Tensor, first: Tensor, *, length: int) -> Tensor:
    """The mean of each window, on CUDA tensors, or interpreted on CPU tensors.

    Args:
        x: `[B, M, H, D]`.
        first: `[M_c]`, the token with which each window begins, ascending.
        length: tokens of a window.

    Returns:
        `[B, M_c, H, D]` in the dtype of `x`, summed in fp32.
    """
    return mean_of_rows(x, first_rows(first, *x.shape[:2]), length=length)


def mean_of_rows(x: Tensor, first: Tensor, *, length: int) -> Tensor:
    """The same, of windows that begin at the rows `first [B * M_c]` of the flattened `[B * M]`."""
    B, _, H, D = x.shape
    summaries = x.new_empty(B, len(first) // B, H, D)
    grid = (cdiv(len(first), SUMMARIES) * cdiv(H * D, TILE["BW"]),)
    mean_kernel[grid](
        x.contiguous(), first, summaries, len(first), H * D, LENGTH=length, BJ=SUMMARIES, **TILE
    )
    return summaries


def mean_backward(d_summaries: Tensor, first: Tensor, *, M: int, length: int, most: int) -> Tensor:
    """The gradient `[B, M, H, D]` of `mean`'s tokens.

    Args:
        d_summaries: `[B, M_c, H, D]`.
        first, length: as for `mean`.
        M: tokens.
        most: summaries that one token may be in.
    """
    B, _, H, D = d_summaries.shape
    d_x = d_summaries.new_empty(B, M, H, D)
    within = summaries_of_tokens(first_rows(first, B, M), B * M, length)
    launch_backward(d_summaries, *within, d_x, length=length, most=most, is_added=False)
    return d_x


def launch_backward(
    d_summaries: Tensor, begin: Tensor, end: Tensor, d_x: Tensor, *, length: int, most: int,
    is_added: bool,
) -> None:  # fmt: skip
    """Write the gradient to `d_x [B, M, H, D]`, contiguous, or add it; token `t` of the flattened
    `[B * M]` lies in the summaries `begin[t] … end[t] - 1`, at most `most`."""
    B, M, H, D = d_x.shape
    grid = (cdiv(B * M, TOKENS) * cdiv(H * D, TILE["BW"]),)
    mean_backward_kernel[grid](
        d_summaries.contiguous(), begin, end, d_x, B * M, H * D,
        LENGTH=length, MOST=most, ADD=is_added, BT=TOKENS, **TILE,
    )  # fmt: skip
