"""The layer's rotary embedding (RoFormer, arXiv 2104.09864), in Triton, forward and backward.

A projection `[B, N, S * H, D]` holds `S` sets of heads behind each other, one for each branch. One
launch turns all of it and writes each set to a tensor of its own, so that no kernel has to copy its
part first. The backward reads the sets' gradients and writes the projection's, with the angles
negated. Values and gates are not turned, but they are cut in the same way.

A program takes a few tokens and all their heads. It computes the angles once, in fp64 up to whole
turns: at position 1,000,000, fp32 would miss an angle by up to 0.1. Their sines and cosines, and
the turn, are fp32.

`turned_sets` and `turned_sets_backward` launch the kernel and are what the operator calls.

Symbols: `R = B * N` tokens · `NUM` sets, one to three · `HALF = ceil(D / 2)`: number `i` is turned
with number `HALF + i` · `BT` tokens, `BH` heads and `BD` pairs of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.runtime.rounding import next_power_of_2

PAIRS, MOST_HEADS = 1024, 16  # of a tile


@triton.jit
def angles(position, LOG_BASE: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr):
    """The angles `position [BT] * base ** (-i / HALF)` less whole turns, `[BT, BD]` in fp32."""
    i = tl.arange(0, BD).to(tl.float64)
    per_token = tl.exp2(i * tl.full([BD], -LOG_BASE / HALF, tl.float64))  # [BD], in radians
    turns = per_token * tl.full([BD], 0.15915494309189535, tl.float64)  # 1 / (2 * pi)
    turns = position.to(tl.float64)[:, None] * turns  # [BT, BD]
    turns -= tl.floor(turns + 0.5)
    return turns.to(tl.float32) * 6.283185307179586


@triton.jit
def turn_set(X, Y, x_offsets, y_offsets, in_first, in_second, cos, sin,
             TURNS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Turn the heads of a tile, `[BT, BH, BD]` pairs, from `X` to `Y`, or copy them."""
    a = tl.load(X + x_offsets, mask=in_first, other=0.0)
    b = tl.load(X + x_offsets + HALF, mask=in_second, other=0.0)
    if TURNS:
        a, b = a.to(tl.float32), b.to(tl.float32)
        a, b = a * cos - b * sin, a * sin + b * cos
    tl.store(Y + y_offsets, a.to(Y.dtype.element_ty), mask=in_first)
    tl.store(Y + y_offsets + HALF, b.to(Y.dtype.element_ty), mask=in_second)


@triton.jit(do_not_specialize=["R", "N", "H"])
def turn_kernel(
    X0, X1, X2, Y0, Y1, Y2, Position, R, N, H,
    position_batch, x_batch, x_token, x_head, y_batch, y_token, y_head,
    NUM: tl.constexpr, D: tl.constexpr, TURNS: tl.constexpr, SIGN: tl.constexpr,
    COUNTS: tl.constexpr, LOG_BASE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """From sets `X [B, N, H, D]` to `Y`, all of whose numbers lie next to each other; the grid is
    `(cdiv(R, BT),)`.

    `Position [N]` or `[B, N]`; if it `COUNTS`, positions are 0 to N - 1, and it is not read.
    """
    # -- locate the program --
    HALF: tl.constexpr = (D + 1) // 2
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)  # [BT]
    batch, n = (tokens // N).to(tl.int64), (tokens % N).to(tl.int64)
    i = tl.arange(0, BD)
    in_rows = (tokens < R)[:, None, None]
    x_rows = (batch * x_batch + n * x_token)[:, None, None] + i  # [BT, 1, BD]
    y_rows = (batch * y_batch + n * y_token)[:, None, None] + i

    # -- by which angles --
    position = n
    if not COUNTS:
        position = tl.load(Position + batch * position_batch + n, mask=tokens < R, other=0)
    angle = angles(position, LOG_BASE, HALF, BD)[:, None, :] if TURNS else 0.0  # [BT, 1, BD]
    cos, sin = (tl.cos(angle), tl.sin(angle) * SIGN) if TURNS else (1.0, 0.0)

    # -- turn --
    for first in range(0, H, BH):
        heads = (first + tl.arange(0, BH))[None, :, None]
        in_heads = in_rows & (heads < H)
        in_first, in_second = in_heads & (i < HALF), in_heads & (HALF + i < D)
        x_offsets = x_rows + heads.to(tl.int64) * x_head  # [BT, BH, BD]
        y_offsets = y_rows + heads.to(tl.int64) * y_head
        turn_set(X0, Y0, x_offsets, y_offsets, in_first, in_second, cos, sin, TURNS, HALF)
        if NUM > 1:
            turn_set(X1, Y1, x_offsets, y_offsets, in_first, in_second, cos, sin, TURNS, HALF)
        if NUM > 2:
            turn_set(X2, Y2, x_offsets, y_offsets, in_first, in_second, cos, sin, TURNS, HALF)


def turned_sets(
    tensors: Sequence[Tensor], position: Tensor | None, *, base: float, num_turned: int,
    sets: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Cut projections into sets of heads and turn the first of them; on CUDA tensors, or
    interpreted on CPU tensors.

    Args:
        tensors: `[B, N, S * H, D]` each, with strides of their own.
        position: `[N]` or `[B, N]`, of any number type; None counts from 0.
        base: of the rotary embedding.
        num_turned: how many of the tensors are turned; the others are only cut.
        sets: `S` of each tensor, one to three.

    Returns:
        The sets of all tensors, one after the other, contiguous `[B, N, H, D]` each.
    """
    found: list[Tensor] = []
    for i, (x, num) in enumerate(zip(tensors, sets, strict=True)):
        B, N, heads, D = x.shape
        parts = [x.new_empty(B, N, heads // num, D) for _ in range(num)]
        x = x if x.stride(3) == 1 else x.contiguous()
        _launch(x.split(heads // num, 2), parts, position, base if i < num_turned else None, 1.0)
        found += parts
    return found


def turned_sets_backward(
    d_outputs: Sequence[Tensor], position: Tensor | None, *, base: float, num_turned: int,
    sets: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """The gradients `[B, N, S * H, D]` of the tensors of `turned_sets`, from those of its
    results."""
    found, first = [], 0
    for i, num in enumerate(sets):
        parts = [x.contiguous() for x in d_outputs[first : first + num]]
        first += num
        B, N, H, D = parts[0].shape
        d_x = parts[0].new_empty(B, N, num * H, D)
        _launch(parts, d_x.split(H, 2), position, base if i < num_turned else None, -1.0)
        found.append(d_x)
    return found


def _launch(
    xs: Sequence[Tensor], ys: Sequence[Tensor], position: Tensor | None, base: float | None,
    sign: float,
) -> None:  # fmt: skip
    """Turn one to three sets `xs [B, N, H, D]` by `sign` times their angles to `ys`, or copy them
    where there is no base. All `xs` have the same strides, and so have all `ys`."""
    (B, N, H, D), num = xs[0].shape, len(xs)
    if xs[0].numel() == 0:
        return
    BD, BH = next_power_of_2((D + 1) // 2), min(next_power_of_2(H), MOST_HEADS)
    BT = max(PAIRS // (BD * BH), 1)
    counts = base is None or position is None
    if not counts:
        position = position.contiguous()
    xs, ys = ([*each, *each[-1:] * (3 - num)] for each in (list(xs), list(ys)))  # unread
    turn_kernel[(-(-B * N // BT),)](
        *xs, *ys, xs[0] if counts else position, B * N, N, H,
        0 if counts or position.ndim == 1 else N, *xs[0].stride()[:3], *ys[0].stride()[:3],
        NUM=num, D=D, TURNS=base is not None, SIGN=sign, COUNTS=counts,
        LOG_BASE=0.0 if base is None else math.log2(base), BT=BT, BH=BH, BD=BD, num_warps=2,
    )  # fmt: skip
