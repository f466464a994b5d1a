"""Chapter 14: the mean of each window of tokens, and its backward, in Triton.

A mean does not ask which head a number belongs to. So a token is one row of `W = H * D` columns,
and no width is padded. Nobody writes what two programs read, so every run gives the same bits.

`mean` and `mean_backward` launch the kernels and are what the operators call; `tilelang_pooling`
holds the same two. No argument is checked here: `ops` does.

Symbols: `M` tokens · `M_c` summaries · `BJ` summaries, `BT` tokens and `BW` columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.sparse.compression import summaries_of_tokens

TILE = {"BW": 128, "num_warps": 4}  # columns of a tile: 256 bytes in half precision
ROWS = 16  # summaries or tokens of a tile


@triton.jit
def mean_kernel(
    X, First, Output, num_summaries, M, M_c, W,
    LENGTH: tl.constexpr, BJ: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """`X [B, M, W]` to `Output [B, M_c, W]`; the grid is `cdiv(B * M_c, BJ) * cdiv(W, BW)`.

    `First [M_c]` is the token with which a summary begins; `num_summaries` is `B * M_c`.
    """
    # -- locate the program --
    num_column_tiles = tl.cdiv(W, BW)
    summaries = tl.program_id(0) // num_column_tiles * BJ + tl.arange(0, BJ)  # [BJ]
    columns = tl.program_id(0) % num_column_tiles * BW + tl.arange(0, BW)  # [BW]
    in_bounds = (summaries < num_summaries)[:, None] & (columns < W)  # [BJ, BW]

    # -- where the windows begin --
    batch = (summaries // M_c).to(tl.int64)
    first = tl.load(First + summaries % M_c, mask=summaries < num_summaries, other=0)
    offsets = (batch * M + first)[:, None] * W + columns  # [BJ, BW]

    # -- sum --
    acc = tl.zeros([BJ, BW], tl.float32)
    for i in tl.range(LENGTH, loop_unroll_factor=4):
        step = tl.cast(i, tl.int64) * W
        acc += tl.load(X + offsets + step, mask=in_bounds, other=0.0).to(tl.float32)

    # -- store --
    output_offsets = summaries.to(tl.int64)[:, None] * W + columns
    mean = acc / LENGTH
    tl.store(Output + output_offsets, mean.to(Output.dtype.element_ty), mask=in_bounds)


@triton.jit
def mean_backward_kernel(
    GradOutput, Begin, End, GradX, num_tokens, M, M_c, W,
    LENGTH: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """`GradOutput [B, M_c, W]` to `GradX [B, M, W]`; the grid is
    `cdiv(B * M, BT) * cdiv(W, BW)`.

    A token lies in the summaries `Begin[t] … End[t] - 1`, at most `MOST` of them; `num_tokens` is
    `B * M`.
    """
    # -- locate the program --
    num_column_tiles = tl.cdiv(W, BW)
    tokens = tl.program_id(0) // num_column_tiles * BT + tl.arange(0, BT)  # [BT]
    columns = tl.program_id(0) % num_column_tiles * BW + tl.arange(0, BW)  # [BW]
    in_bounds = (tokens < num_tokens)[:, None] & (columns < W)  # [BT, BW]

    # -- which summaries hold the tokens --
    batch = (tokens // M).to(tl.int64)
    begin = tl.load(Begin + tokens % M, mask=tokens < num_tokens, other=0)
    end = tl.load(End + tokens % M, mask=tokens < num_tokens, other=0)
    offsets = (batch * M_c + begin)[:, None] * W + columns  # [BT, BW]

    # -- sum --
    acc = tl.zeros([BT, BW], tl.float32)
    for i in tl.range(MOST):
        holds = (begin + i < end)[:, None] & in_bounds
        step = tl.cast(i, tl.int64) * W
        acc += tl.load(GradOutput + offsets + step, mask=holds, other=0.0).to(tl.float32)

    # -- store --
    x_offsets = tokens.to(tl.int64)[:, None] * W + columns
    d_x = acc / LENGTH
    tl.store(GradX + x_offsets, d_x.to(GradX.dtype.element_ty), mask=in_bounds)


def mean(x: Tensor, first: Tensor, *, length: int) -> Tensor:
    """The mean of each window, on CUDA tensors, or interpreted on CPU tensors.

    Args:
        x: `[B, M, H, D]`.
        first: `[M_c]`, the token with which each window begins, ascending.
        length: tokens of a window.

    Returns:
        `[B, M_c, H, D]` in the dtype of `x`, summed in fp32.
    """
    (B, M, H, D), M_c = x.shape, len(first)
    summaries = x.new_empty(B, M_c, H, D)
    grid = (triton.cdiv(B * M_c, ROWS) * triton.cdiv(H * D, TILE["BW"]),)
    mean_kernel[grid](
        x.contiguous(), first, summaries, B * M_c, M, M_c, H * D, LENGTH=length, BJ=ROWS, **TILE
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
    B, M_c, H, D = d_summaries.shape
    begin, end = summaries_of_tokens(first, M, length)
    d_x = d_summaries.new_empty(B, M, H, D)
    grid = (triton.cdiv(B * M, ROWS) * triton.cdiv(H * D, TILE["BW"]),)
    mean_backward_kernel[grid](
        d_summaries.contiguous(), begin, end, d_x, B * M, M, M_c, H * D,
        LENGTH=length, MOST=most, BT=ROWS, **TILE,
    )  # fmt: skip
    return d_x
