"""Chapter 14: the gated sum of the branches, and its backward, in Triton.

Each output is read once and the sum is written once; the backward reads `d_o` and the outputs once,
and writes all gradients. A row is one query and one head: it has one number in each gate, and `DV`
numbers in each output.

`gated_sum` and `gated_sum_backward` launch the kernels and are what the operators call;
`tilelang.gates` holds the same two.

Symbols: `R = B * N * HQ` rows · `BR` rows of a tile · `NUM` branches, one to three.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2

TILE = 4096  # numbers of an output that a program takes


@triton.jit
def gated(Gate, BranchOutput, rows, in_rows, offsets, in_bounds):
    """A branch's outputs times its gate, `[BR, DVT]` in fp32."""
    gate = tl.load(Gate + rows, mask=in_rows, other=0.0).to(tl.float32)  # [BR]
    o_tile = tl.load(BranchOutput + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    return gate[:, None] * o_tile


@triton.jit
def gate_kernel(
    Gate0, Gate1, Gate2, Output0, Output1, Output2, Sum, R,
    NUM: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Adds `NUM` outputs `[R, DV]`, each times its gate `[R]`, to `Sum [R, DV]`; the grid is
    `(cdiv(R, BR),)`. Arguments for branches past `NUM` are not read."""
    # -- locate the program --
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    columns = tl.arange(0, DVT)
    in_bounds = (rows < R)[:, None] & (columns < DV)  # [BR, DVT]
    offsets = rows.to(tl.int64)[:, None] * DV + columns

    # -- sum --
    acc = gated(Gate0, Output0, rows, rows < R, offsets, in_bounds)
    if NUM > 1:
        acc += gated(Gate1, Output1, rows, rows < R, offsets, in_bounds)
    if NUM > 2:
        acc += gated(Gate2, Output2, rows, rows < R, offsets, in_bounds)

    # -- store --
    tl.store(Sum + offsets, acc.to(Sum.dtype.element_ty), mask=in_bounds)


@triton.jit
def gate_gradients(
    d_o, Gate, BranchOutput, GradGate, GradOutput, rows, in_rows, offsets, in_bounds
):
    """Write the gradients of one branch: `d_gate [BR]` and `d_output [BR, DVT]`."""
    gate = tl.load(Gate + rows, mask=in_rows, other=0.0).to(tl.float32)  # [BR]
    o_tile = tl.load(BranchOutput + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    d_gate = tl.sum(d_o * o_tile, axis=1)
    d_output = gate[:, None] * d_o
    tl.store(GradGate + rows, d_gate.to(GradGate.dtype.element_ty), mask=in_rows)
    tl.store(GradOutput + offsets, d_output.to(GradOutput.dtype.element_ty), mask=in_bounds)


@triton.jit
def gate_backward_kernel(
    GradSum, Gate0, Gate1, Gate2, Output0, Output1, Output2,
    GradGate0, GradGate1, GradGate2, GradOutput0, GradOutput1, GradOutput2, R,
    NUM: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """From `GradSum [R, DV]` and what the forward read, the gradients of gates and outputs; the
    grid is `(cdiv(R, BR),)`."""
    # -- locate the program --
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    columns = tl.arange(0, DVT)
    in_rows = rows < R
    in_bounds = in_rows[:, None] & (columns < DV)  # [BR, DVT]
    offsets = rows.to(tl.int64)[:, None] * DV + columns

    # -- load --
    d_o = tl.load(GradSum + offsets, mask=in_bounds, other=0.0).to(tl.float32)

    # -- branch by branch --
    gate_gradients(
        d_o, Gate0, Output0, GradGate0, GradOutput0, rows, in_rows, offsets, in_bounds
    )  # fmt: skip
    if NUM > 1:
        gate_gradients(
            d_o, Gate1, Output1, GradGate1, GradOutput1, rows, in_rows, offsets, in_bounds
        )  # fmt: skip
    if NUM > 2:
        gate_gradients(
            d_o, Gate2, Output2, GradGate2, GradOutput2, rows, in_rows, offsets, in_bounds
        )  # fmt: skip


def gated_sum(gates: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """The outputs `[B, N, HQ, DV]`, each times its gate `[B, N, HQ]`, added up in fp32; on CUDA
    tensors, or interpreted on CPU tensors. There are one to three, all of them used."""
    total = torch.empty_like(outputs[0], memory_format=torch.contiguous_format)
    pointers = (*three(gates), *three(outputs), total)
    launch(gate_kernel, pointers, len(gates), *total.shape)
    return total


def gated_sum_backward(
    d_o: Tensor, gates: Sequence[Tensor], outputs: Sequence[Tensor], d_gates: Sequence[Tensor],
    d_outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    """Write the gradients of `gated_sum` into `d_gates` and `d_outputs`, which are contiguous."""
    pointers = (d_o.contiguous(), *three(gates), *three(outputs))
    pointers = (*pointers, *three(d_gates), *three(d_outputs))
    launch(gate_backward_kernel, pointers, len(gates), *d_o.shape)


def launch(
    kernel: triton.JITFunction, pointers: Sequence[Tensor], num: int, B: int, N: int, HQ: int,
    DV: int,
) -> None:  # fmt: skip
    """Run `kernel` over all rows, a tile each."""
    R, DVT = B * N * HQ, next_power_of_2(DV)
    BR = max(TILE // DVT, 1)
    kernel[(cdiv(R, BR),)](*pointers, R, NUM=num, DV=DV, BR=BR, DVT=DVT, num_warps=4)


def three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Three contiguous tensors; the last one is repeated for missing branches, unread."""
    found = [x.contiguous() for x in tensors]
    return found + [found[-1]] * (3 - len(found))
