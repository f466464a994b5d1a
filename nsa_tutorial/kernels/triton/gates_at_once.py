"""The gates' backward where all branches are computed at once (`native`), in Triton: one reading of
the gradient of the sum and of three outputs gives each branch what its own backward begins with.

`branch_backward_kernel` writes the gradient of each output. A gate is a factor on all weights of
its row, though: `gate * exp(s - lse) = exp(s - (lse - log(gate)))`. So where no gate is below 0,
`branch_numbers_kernel` folds it into the logarithm, and the branches read the gradient of the sum
itself.

Symbols: those of `gates`; `G` heads of a group, padded to `GP` · `BG` groups of a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.gates import TILE, three
from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2

LOG2_E = tl.constexpr(online_softmax.LOG2_E)
NO_WEIGHT = tl.constexpr(1e38)  # the logarithm of a row's sum that leaves its weights 0


@triton.jit
def locate_groups(
    num_groups,
    G: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, GP: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """The rows `[BG * GP]` of a program's groups, which of them exist, and where the numbers of an
    output lie `[BG * GP, DVT]`, and which of these exist."""
    index = tl.arange(0, BG * GP)
    group = tl.program_id(0) * BG + index // GP
    in_rows = (group < num_groups) & (index % GP < G)
    rows = group.to(tl.int64) * G + index % GP
    columns = tl.arange(0, DVT)
    in_bounds = in_rows[:, None] & (columns < DV)
    return rows, in_rows, rows[:, None] * DV + columns, in_bounds


@triton.jit
def gradient_of_branch(
    d_o, Gate, BranchOutput, LSE, GradGate, GradOutput, Delta, LSE2, rows, in_rows, offsets,
    in_bounds, BG: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one branch, and what its backward asks of each row."""
    gate = tl.load(Gate + rows, mask=in_rows, other=0.0).to(tl.float32)  # [BG * GP]
    o_tile = tl.load(BranchOutput + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    d_gate = tl.sum(d_o * o_tile, axis=1)
    d_output = (gate[:, None] * d_o).to(GradOutput.dtype.element_ty)
    tl.store(GradGate + rows, d_gate.to(GradGate.dtype.element_ty), mask=in_rows)
    tl.store(GradOutput + offsets, d_output, mask=in_bounds)

    # -- as in `selected.backward.delta_kernel` --
    do_tile = d_output.to(tl.float32)
    lse = tl.load(LSE + rows, mask=in_rows, other=0.0)
    asks = tl.max((do_tile != 0).to(tl.int32), axis=1)
    finite = tl.min((tl.abs(do_tile) < float("inf")).to(tl.int32), axis=1)
    finite &= (tl.abs(lse) < float("inf")).to(tl.int32)
    is_spoiled = tl.min(tl.reshape(finite, [BG, GP]), axis=1, keep_dims=True) == 0  # [BG, 1]
    is_asked = tl.max(tl.reshape(asks, [BG, GP]), axis=1, keep_dims=True) > 0
    lse2 = tl.where(is_spoiled, float("nan"), tl.reshape(lse * LOG2_E, [BG, GP]))
    lse2 = tl.reshape(tl.where(is_asked, lse2, float("inf")), [BG * GP])
    tl.store(Delta + rows, tl.sum(do_tile * o_tile, axis=1), mask=in_rows)
    tl.store(LSE2 + rows, lse2, mask=in_rows)


@triton.jit(do_not_specialize=["num_groups"])
def branch_backward_kernel(
    GradSum, Gate0, Gate1, Gate2, Output0, Output1, Output2, LSE,
    GradGate0, GradGate1, GradGate2, GradOutput0, GradOutput1, GradOutput2, Delta, LSE2, num_groups,
    G: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, GP: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """`gate_backward_kernel` of three branches, and what `selected.backward.delta_kernel` computes
    for each of them, in one reading: from `LSE [3, R]` also `Delta` and `LSE2 [3, R]`. The grid is
    `(cdiv(num_groups, BG),)`; a group is the `G` rows of a query and a key/value head, padded to
    `GP`."""
    # -- locate the program --
    rows, in_rows, offsets, in_bounds = locate_groups(num_groups, G, DV, BG, GP, DVT)
    R = num_groups.to(tl.int64) * G

    # -- load --
    d_o = tl.load(GradSum + offsets, mask=in_bounds, other=0.0).to(tl.float32)

    # -- branch by branch --
    gradient_of_branch(
        d_o, Gate0, Output0, LSE, GradGate0, GradOutput0, Delta, LSE2, rows, in_rows, offsets,
        in_bounds, BG, GP,
    )  # fmt: skip
    gradient_of_branch(
        d_o, Gate1, Output1, LSE + R, GradGate1, GradOutput1, Delta + R, LSE2 + R, rows, in_rows,
        offsets, in_bounds, BG, GP,
    )  # fmt: skip
    gradient_of_branch(
        d_o, Gate2, Output2, LSE + 2 * R, GradGate2, GradOutput2, Delta + 2 * R, LSE2 + 2 * R, rows,
        in_rows, offsets, in_bounds, BG, GP,
    )  # fmt: skip


@triton.jit
def numbers_of_branch(
    d_o, asks, is_finite, gate, o_tile, lse, GradGate, Delta, FoldedLSE, LSE2, rows, in_rows,
    BG: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one branch's gate, and what its backward asks of each row."""
    delta = tl.sum(d_o * o_tile.to(tl.float32), axis=1)  # [BG * GP]
    tl.store(GradGate + rows, delta.to(GradGate.dtype.element_ty), mask=in_rows)
    tl.store(Delta + rows, delta, mask=in_rows)

    # -- fold the gate in --
    gate = gate.to(tl.float32)
    has_weight = gate != 0
    folded = tl.where(has_weight, lse - tl.log(tl.where(has_weight, gate, 1.0)), NO_WEIGHT)
    tl.store(FoldedLSE + rows, folded, mask=in_rows)

    # -- as in `selected.backward.delta_kernel`, of the gate times `d_o` --
    asks &= has_weight.to(tl.int32)
    is_finite &= ((tl.abs(lse) < float("inf")) & (gate >= 0)).to(tl.int32)
    is_finite &= (gate < float("inf")).to(tl.int32)
    is_spoiled = tl.min(tl.reshape(is_finite, [BG, GP]), axis=1, keep_dims=True) == 0  # [BG, 1]
    is_asked = tl.max(tl.reshape(asks, [BG, GP]), axis=1, keep_dims=True) > 0
    lse2 = tl.where(is_spoiled, float("nan"), tl.reshape(folded * LOG2_E, [BG, GP]))
    lse2 = tl.reshape(tl.where(is_asked, lse2, float("inf")), [BG * GP])
    tl.store(LSE2 + rows, lse2, mask=in_rows)


@triton.jit(do_not_specialize=["num_groups"])
def branch_numbers_kernel(
    GradSum, Gate0, Gate1, Gate2, Output0, Output1, Output2, LSE,
    GradGate0, GradGate1, GradGate2, Delta, FoldedLSE, LSE2, num_groups,
    G: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, GP: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """What `branch_backward_kernel` computes, for gates of 0 or more, without a gradient of each
    output: writes the gates' gradients, and `Delta`, `FoldedLSE` and `LSE2 [3, R]`. The grid is
    that of `branch_backward_kernel`."""
    # -- locate the program --
    rows, in_rows, offsets, in_bounds = locate_groups(num_groups, G, DV, BG, GP, DVT)
    R = num_groups.to(tl.int64) * G

    # -- load everything, so that no branch waits for another's --
    d_o = tl.load(GradSum + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    o_tile0 = tl.load(Output0 + offsets, mask=in_bounds, other=0.0)
    o_tile1 = tl.load(Output1 + offsets, mask=in_bounds, other=0.0)
    o_tile2 = tl.load(Output2 + offsets, mask=in_bounds, other=0.0)
    gate0 = tl.load(Gate0 + rows, mask=in_rows, other=0.0)
    gate1 = tl.load(Gate1 + rows, mask=in_rows, other=0.0)
    gate2 = tl.load(Gate2 + rows, mask=in_rows, other=0.0)
    lse0 = tl.load(LSE + rows, mask=in_rows, other=0.0)
    lse1 = tl.load(LSE + R + rows, mask=in_rows, other=0.0)
    lse2 = tl.load(LSE + 2 * R + rows, mask=in_rows, other=0.0)

    # -- branch by branch --
    asks = tl.max((d_o != 0).to(tl.int32), axis=1)
    is_finite = tl.min((tl.abs(d_o) < float("inf")).to(tl.int32), axis=1)
    numbers_of_branch(
        d_o, asks, is_finite, gate0, o_tile0, lse0, GradGate0, Delta, FoldedLSE, LSE2, rows,
        in_rows, BG, GP,
    )  # fmt: skip
    numbers_of_branch(
        d_o, asks, is_finite, gate1, o_tile1, lse1, GradGate1, Delta + R, FoldedLSE + R, LSE2 + R,
        rows, in_rows, BG, GP,
    )  # fmt: skip
    numbers_of_branch(
        d_o, asks, is_finite, gate2, o_tile2, lse2, GradGate2, Delta + 2 * R, FoldedLSE + 2 * R,
        LSE2 + 2 * R, rows, in_rows, BG, GP,
    )  # fmt: skip


def branch_backward(
    d_o: Tensor, gates: Sequence[Tensor], outputs: Sequence[Tensor], lse: Tensor, H: int
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The gradients of three gates `[B, N, HQ]` and outputs `[B, N, HQ, DV]`, and the numbers with
    which the branches' backwards begin (`BackwardCall`), `[3, B * N, H, G]` each, `delta` and
    `lse2`; `lse [3, B, N, HQ]` are the outputs', contiguous."""
    B, N, HQ, DV = d_o.shape
    d_gates = [g.new_empty(g.shape) for g in gates]
    d_outputs = [o.new_empty(o.shape) for o in outputs]
    delta, lse2 = (lse.new_empty(3, B * N, H, HQ // H) for _ in range(2))
    GP, DVT = next_power_of_2(HQ // H), next_power_of_2(DV)
    BG = max(TILE // 2 // (GP * DVT), 1)  # three branches: half as many numbers
    branch_backward_kernel[(cdiv(B * N * H, BG),)](
        d_o.contiguous(), *three(gates), *three(outputs), lse, *d_gates, *d_outputs, delta, lse2,
        B * N * H, G=HQ // H, DV=DV, BG=BG, GP=GP, DVT=DVT, num_warps=2,
    )  # fmt: skip
    return d_gates, d_outputs, delta, lse2


def branch_numbers(
    d_o: Tensor, gates: Sequence[Tensor], outputs: Sequence[Tensor], lse: Tensor, H: int
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The same for gates of 0 or more, folded into the weights: the gradients of the gates, and
    `delta`, `lse` and `lse2`, `[3, B * N, H, G]` each, with which each branch's backward of `d_o`
    itself gives its share. A gate below 0 makes its row's gradients NaN."""
    B, N, HQ, DV = d_o.shape
    d_gates = [g.new_empty(g.shape) for g in gates]
    delta, folded, lse2 = (lse.new_empty(3, B * N, H, HQ // H) for _ in range(3))
    GP, DVT = next_power_of_2(HQ // H), next_power_of_2(DV)
    BG = max(TILE // (GP * DVT), 1)
    branch_numbers_kernel[(cdiv(B * N * H, BG),)](
        d_o, *three(gates), *three(outputs), lse, *d_gates, delta, folded, lse2, B * N * H,
        G=HQ // H, DV=DV, BG=BG, GP=GP, DVT=DVT, num_warps=4,
    )  # fmt: skip
    return d_gates, delta, folded, lse2
