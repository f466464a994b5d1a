"""Chapter 14: the gated sum of the branches, and its backward, in TileLang.

The two kernels of `triton.gates`, phase by phase and name by name. A function here takes what is
fixed when the kernel is compiled, and returns the kernel, not yet compiled; the number of rows
stays open.

`gated_sum` and `gated_sum_backward` compile and run them, on CUDA tensors, or on CPU tensors
through C.

Symbols: those of `triton.gates`.
"""

from collections.abc import Callable, Sequence

import tilelang
import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.runtime.devices import kind_of

TILE, THREADS = 4096, 128  # numbers of an output that a program takes
accum_dtype = "float32"


def tile_sides(DV: int) -> tuple[int, int]:
    """`BR, DVT`: rows of a tile, and their width, a power of two, of which threads take equal
    shares."""
    DVT = max(16, 1 << (DV - 1).bit_length())
    return max(TILE // DVT, 1), DVT


@T.macro
def add_gated(Gate, BranchOutput, gate, o_tile, acc, row, BR, DVT):
    """Add a branch's outputs, times its gate, to `acc [BR, DVT]`, by way of `gate [BR]` and
    `o_tile [BR, DVT]`."""
    T.copy(Gate[row : row + BR], gate)
    T.copy(BranchOutput[row : row + BR, 0:DVT], o_tile)  # zeros past R and DV
    for i, j in T.Parallel(BR, DVT):
        acc[i, j] += gate[i] * o_tile[i, j]


def build_gated_sum(num: int, DV: int, dtype: str) -> tirx.PrimFunc:
    """The kernel that adds `num` outputs `[R, DV]`, each times its gate `[R]`, to `Sum [R, DV]`.
    Arguments for branches past `num` are not read."""
    R = T.dynamic("R")
    BR, DVT = tile_sides(DV)

    @T.prim_func
    def gate_kernel(
        Gate0: T.Tensor([R], accum_dtype),
        Gate1: T.Tensor([R], accum_dtype),
        Gate2: T.Tensor([R], accum_dtype),
        Output0: T.Tensor([R, DV], dtype),
        Output1: T.Tensor([R, DV], dtype),
        Output2: T.Tensor([R, DV], dtype),
        Sum: T.Tensor([R, DV], dtype),
    ):
        # -- locate the program --
        with T.Kernel(T.ceildiv(R, BR), threads=THREADS) as block:
            gate = T.alloc_fragment([BR], accum_dtype)
            o_tile = T.alloc_fragment([BR, DVT], accum_dtype)
            acc = T.alloc_fragment([BR, DVT], accum_dtype)
            row = block * BR

            # -- sum --
            T.clear(acc)
            add_gated(Gate0, Output0, gate, o_tile, acc, row, BR, DVT)
            if num > 1:
                add_gated(Gate1, Output1, gate, o_tile, acc, row, BR, DVT)
            if num > 2:
                add_gated(Gate2, Output2, gate, o_tile, acc, row, BR, DVT)

            # -- store --
            T.copy(acc, Sum[row : row + BR, 0:DVT])

    return gate_kernel


@T.macro
def gate_gradients(
    Gate, BranchOutput, GradGate, GradOutput, do_tile, o_tile, gate, d_gate, row, BR, DVT
):
    """Write the gradients of one branch, by way of `o_tile [BR, DVT]`, `gate` and `d_gate [BR]`."""
    T.copy(Gate[row : row + BR], gate)
    T.copy(BranchOutput[row : row + BR, 0:DVT], o_tile)
    for i, j in T.Parallel(BR, DVT):
        o_tile[i, j] *= do_tile[i, j]
    T.reduce_sum(o_tile, d_gate, dim=1)
    for i, j in T.Parallel(BR, DVT):
        o_tile[i, j] = gate[i] * do_tile[i, j]
    T.copy(d_gate, GradGate[row : row + BR])
    T.copy(o_tile, GradOutput[row : row + BR, 0:DVT])


def build_gated_sum_backward(num: int, DV: int, dtype: str) -> tirx.PrimFunc:
    """The kernel from `GradSum [R, DV]` and what the forward read to the gradients of gates and
    outputs."""
    R = T.dynamic("R")
    BR, DVT = tile_sides(DV)

    @T.prim_func
    def gate_backward_kernel(
        GradSum: T.Tensor([R, DV], dtype),
        Gate0: T.Tensor([R], accum_dtype),
        Gate1: T.Tensor([R], accum_dtype),
        Gate2: T.Tensor([R], accum_dtype),
        Output0: T.Tensor([R, DV], dtype),
        Output1: T.Tensor([R, DV], dtype),
        Output2: T.Tensor([R, DV], dtype),
        GradGate0: T.Tensor([R], accum_dtype),
        GradGate1: T.Tensor([R], accum_dtype),
        GradGate2: T.Tensor([R], accum_dtype),
        GradOutput0: T.Tensor([R, DV], dtype),
        GradOutput1: T.Tensor([R, DV], dtype),
        GradOutput2: T.Tensor([R, DV], dtype),
    ):
        # -- locate the program --
        with T.Kernel(T.ceildiv(R, BR), threads=THREADS) as block:
            do_tile = T.alloc_fragment([BR, DVT], accum_dtype)
            o_tile = T.alloc_fragment([BR, DVT], accum_dtype)
            gate = T.alloc_fragment([BR], accum_dtype)
            d_gate = T.alloc_fragment([BR], accum_dtype)
            row = block * BR
            tiles = (do_tile, o_tile, gate, d_gate, row, BR, DVT)

            # -- load --
            T.copy(GradSum[row : row + BR, 0:DVT], do_tile)  # zeros past R and DV

            # -- branch by branch --
            gate_gradients(Gate0, Output0, GradGate0, GradOutput0, *tiles)
            if num > 1:
                gate_gradients(Gate1, Output1, GradGate1, GradOutput1, *tiles)
            if num > 2:
                gate_gradients(Gate2, Output2, GradGate2, GradOutput2, *tiles)

    return gate_backward_kernel


def gated_sum(gates: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """The outputs, each times its gate, added up; as in `triton.gates.gated_sum`."""
    total = torch.empty_like(outputs[0], memory_format=torch.contiguous_format)
    kernel = kernel_for(build_gated_sum, outputs)
    kernel(*_gates(gates), *_outputs(outputs), *_outputs([total])[:1])
    return total


def gated_sum_backward(
    d_o: Tensor, gates: Sequence[Tensor], outputs: Sequence[Tensor], d_gates: Sequence[Tensor],
    d_outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    """Write the gradients of `gated_sum` into `d_gates` and `d_outputs`, which are contiguous."""
    sums = [torch.empty_like(g, dtype=torch.float32) for g in d_gates]
    kernel = kernel_for(build_gated_sum_backward, outputs)
    read = (*_outputs([d_o])[:1], *_gates(gates), *_outputs(outputs))
    kernel(*read, *_gates(sums), *_outputs(d_outputs))
    for d_gate, found in zip(d_gates, sums, strict=True):
        d_gate.copy_(found)


def kernel_for(
    build: Callable[..., tirx.PrimFunc], outputs: Sequence[Tensor]
) -> tilelang.JITKernel:
    """The kernel of `build` for the number, width, dtype and device of these outputs."""
    o = outputs[0]
    dtype = str(o.dtype).removeprefix("torch.")
    return compiled(build, kind_of(o.device), len(outputs), o.shape[3], dtype)


def _gates(gates: Sequence[Tensor]) -> list[Tensor]:
    """Three contiguous rows of fp32."""
    return _three([g.to(torch.float32).reshape(-1) for g in gates])


def _outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Three contiguous tensors `[R, DV]`."""
    return _three([o.reshape(-1, o.shape[3]) for o in outputs])


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Three of them; the last one is repeated for missing branches, unread."""
    found = [x.contiguous() for x in tensors]
    return found + [found[-1]] * (3 - len(found))
