"""What every operator checks before anything runs: a wrong argument is named, with what came and
what was expected."""

from __future__ import annotations

import math
import sys
from numbers import Real

import torch
from torch import Tensor

from nsa_tutorial.runtime.describing import describe, number
from nsa_tutorial.runtime.order import ORDERS
from nsa_tutorial.runtime.transforms import check_local

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOATS = (*DTYPES, torch.float64)  # float64 is for the reference backend
LARGEST_WIDTH = 256
INTEGERS = (torch.int32, torch.int64)
BACKENDS = ("auto", "reference", "tilelang", "triton")
LARGEST_INT = 2**31 - 1  # kernels count in int32


def check_tensor(name: str, x: object, shape: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """`x` is a tensor with as many dimensions as `shape` names (as in `"[B, N, HQ, D]"`) and one of
    `dtypes`."""
    rank = shape.count(",") + 1
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {describe(x)}, expected a tensor of shape {shape}")
    if x.ndim != rank:
        raise ValueError(f"{name}: got {describe(x)}, expected {rank} dimensions, {shape}")
    if x.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name}: got {describe(x)}, expected {names}")
    check_local(name, x)


def check_same_device(**tensors: Tensor | None) -> None:
    """All given tensors are on the device of the first."""
    (first, reference), *others = tensors.items()
    for name, x in others:
        if x is not None and x.device != reference.device:
            raise ValueError(
                f"{name}: got {describe(x)}, expected the device of {first}, {reference.device}"
            )


def check_positive_int(name: str, x: object, *, least: int = 1, most: float = LARGEST_INT) -> None:
    """`x` is an integer (not a bool) of at least `least`, and at most `most`."""
    # a size that torch.export leaves open is a SymInt
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {describe(x)}, expected an int of at least {least}")
    if x < least:
        raise ValueError(f"{name}: got {number(x)}, expected an int of at least {least}")
    if x > most:
        raise ValueError(f"{name}: got {number(x)}, expected an int of at most {most}")


def check_window_size(window_size: object) -> int:
    """Any positive int. One past int32, `sys.maxsize` say, is a window over all keys, as the
    largest int32 is."""
    check_positive_int("window_size", window_size, most=math.inf)
    return min(window_size, LARGEST_INT)


def check_bool(name: str, x: object) -> None:
    """`x` is True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: got {describe(x)}, expected True or False")


def check_positive_number(name: str, x: object, *, otherwise: str = "") -> None:
    """`x` is a positive finite number (not a bool); `otherwise` is what else the argument may
    be."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name}: got {describe(x)}, expected a positive number{otherwise}")
    if not 0 < x <= sys.float_info.max:
        raise ValueError(f"{name}: got {number(x)}, expected a positive finite number{otherwise}")


def check_scale(scale: object, D: int) -> float:
    """The factor on the scores: `D ** -0.5` for None, otherwise a positive finite number."""
    if scale is None:
        return D**-0.5
    check_positive_number("scale", scale, otherwise=" or None")
    return float(scale)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """`q [B, N, HQ, D]`, `k [B, M, H, D]`, `v [B, M, H, DV]` fit together; queries are the last `N`
    of the `M` positions."""
    check_attention(q, k=(k, "[B, M, H, D]"), v=(v, "[B, M, H, DV]"))
    N, M = q.shape[1], k.shape[1]
    if N > M:
        raise ValueError(
            f"q: got {N} queries for {M} keys, expected at most {M}: queries are the last positions"
        )


def check_attention(
    q: Tensor, are_packed: bool = False, **keys_and_values: tuple[Tensor, str]
) -> None:
    """Queries fit keys and values: `k=(k, "[B, M, H, D]"), v=(v, "[B, M, H, DV]")`, by the names
    that the operator gives them. The number of packed summaries (`are_packed`) depends on values,
    so the running operator checks it."""
    (k_name, (k, _)), (v_name, (v, _)) = keys_and_values.items()
    for name, (x, shape) in {"q": (q, "[B, N, HQ, D]"), **keys_and_values}.items():
        check_tensor(name, x, shape, FLOATS)
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name}: got {describe(x)}, expected the dtype of q, "
                f"{str(q.dtype).removeprefix('torch.')}"
            )
    check_same_device(**{"q": q, k_name: k, v_name: v})
    (B, _, HQ, D), H = q.shape, k.shape[2]
    if k.shape[0] != B:
        raise ValueError(f"{k_name}: got {describe(k)}, expected the batch of q, {B}")
    compared = (0, 2) if are_packed else (0, 1, 2)
    if any(v.shape[i] != k.shape[i] for i in compared):
        raise ValueError(
            f"{v_name}: got {describe(v)}, expected the batch, positions and heads of {k_name}, "
            f"{list(k.shape[:3])}"
        )
    if k.shape[3] != D:
        raise ValueError(f"{k_name}: got {describe(k)}, expected the width of q, {D}")
    for name, width in ((f"q and {k_name}", D), (v_name, v.shape[3])):
        if not 1 <= width <= LARGEST_WIDTH:
            raise ValueError(f"{name}: got width {width}, expected 1 to {LARGEST_WIDTH}")
    if H == 0 or HQ == 0 or HQ % H:
        raise ValueError(
            f"q and {k_name}: got {HQ} query heads over {H} key/value heads, expected a multiple"
        )


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor, M: int, *, name: str = "q") -> None:
    """Packed sequences: `[num_sequences + 1]` integers, with `B == 1` and `N == M`. `name` is what
    the operator calls `q`. `check_offsets` looks at the values."""
    if cu_seqlens is None:
        return
    check_tensor("cu_seqlens", cu_seqlens, "[num_sequences + 1]", INTEGERS)
    check_same_device(**{name: q, "cu_seqlens": cu_seqlens})
    B, N = q.shape[:2]
    if B != 1:
        raise ValueError(
            f"cu_seqlens: got a batch of {B}, expected 1: packed sequences lie behind each other "
            "in one row"
        )
    if N != M:
        raise ValueError(
            f"cu_seqlens: got {N} queries and {M} keys, expected as many queries as keys"
        )


def check_weight(name: str, weight: object, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """`weight` is a floating-point tensor of one of `shapes`, on the device of `x`."""
    expected = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        raise TypeError(
            f"{name}: got {describe(weight)}, expected a floating-point tensor of shape {expected}"
        )
    if tuple(weight.shape) not in shapes:
        raise ValueError(f"{name}: got {describe(weight)}, expected shape {expected}")
    check_local(name, weight)
    check_same_device(**{"x": x, name: weight})


def check_per_head(name: str, x: Tensor, q: Tensor) -> None:
    """`x [B, N, HQ]`, a gate or a log-sum-exp, has one number for each query and head of `q`."""
    check_tensor(name, x, "[B, N, HQ]", FLOATS)
    if x.shape != q.shape[:3]:
        raise ValueError(f"{name}: got {describe(x)}, expected [B, N, HQ] = {list(q.shape[:3])}")
    check_same_device(**{"q": q, name: x})


def check_block_arguments(
    block_indices: Tensor, block_counts: Tensor | int | None, q: Tensor, k: Tensor
) -> None:
    """`block_indices [B, N, H, S]` and `block_counts` (int, `[B, N, H]` or None) fit `q` and
    `k`."""
    check_tensor("block_indices", block_indices, "[B, N, H, S]", INTEGERS)
    expected = (*q.shape[:2], k.shape[2])
    if tuple(block_indices.shape[:3]) != expected:
        raise ValueError(
            f"block_indices: got {describe(block_indices)}, expected [B, N, H, S] with [B, N, H] "
            f"= {list(expected)}"
        )
    check_slots(block_indices)
    check_block_counts(block_counts, q, k.shape[2])
    check_same_device(q=q, block_indices=block_indices)


def check_slots(block_indices: Tensor) -> None:
    """Lists have at least one slot."""
    if block_indices.shape[3] == 0:
        raise ValueError(
            f"block_indices: got {describe(block_indices)}, expected at least one slot"
        )


def check_slot_scale(slot_scale: Tensor | None, block_indices: Tensor, q: Tensor) -> None:
    """`slot_scale` is None, or a factor for each slot of `block_indices`, in fp32 (fp64 with fp64
    queries)."""
    if slot_scale is None:
        return
    wide = torch.promote_types(q.dtype, torch.float32)
    check_tensor("slot_scale", slot_scale, "[B, N, H, S]", (wide,))
    if slot_scale.shape != block_indices.shape:
        raise ValueError(
            f"slot_scale: got {describe(slot_scale)}, expected the shape of block_indices, "
            f"[B, N, H, S] = {list(block_indices.shape)}"
        )
    check_same_device(q=q, slot_scale=slot_scale)


def check_block_counts(
    block_counts: Tensor | int | None, q: Tensor, H: int, *, least: int = 0, name: str = "q"
) -> None:
    """`block_counts` is None, an int of at least `least`, or an integer tensor `[B, N, H]`; `B` and
    `N` are those of `q`, which the operator calls `name`."""
    if isinstance(block_counts, Tensor):
        expected = (*q.shape[:2], H)
        check_tensor("block_counts", block_counts, "[B, N, H]", INTEGERS)
        if tuple(block_counts.shape) != expected:
            raise ValueError(
                f"block_counts: got {describe(block_counts)}, expected [B, N, H] = {list(expected)}"
            )
        check_same_device(**{name: q, "block_counts": block_counts})
    elif block_counts is not None:
        check_positive_int("block_counts", block_counts, least=least)


def check_gates(q: Tensor, **gates: Tensor | None) -> None:
    """Each gate is None or `[B, N, HQ]`, and not all are None."""
    if all(gate is None for gate in gates.values()):
        raise ValueError(f"{', '.join(gates)}: got None for each, expected at least one gate")
    for name, gate in gates.items():
        if gate is not None:
            check_per_head(name, gate, q)


def check_backend(backend: object) -> None:
    """`backend` is one of the names the operators know."""
    check_one_of("backend", backend, BACKENDS)


def check_one_of(name: str, x: object, names: tuple[str, ...]) -> None:
    """`x` is one of `names`."""
    if not isinstance(x, str) or x not in names:
        raise ValueError(f"{name}: got {describe(x)}, expected one of {', '.join(names)}")


def choose_backend(backend: str, q: Tensor, name: str = "q") -> str:
    """Name the backend that runs an operator on tensors like `q`: `auto` takes Triton for CUDA
    tensors whose dtype it computes, and the reference otherwise. `name` is what the operator calls
    `q`.

    Raises:
        TypeError: for a dtype that no kernel computes.
    """
    if backend == "auto":
        is_for_kernels = q.device.type == "cuda" and q.dtype != torch.float64
        backend = "triton" if is_for_kernels else "reference"
    if backend in ("tilelang", "triton") and q.dtype not in DTYPES:
        raise TypeError(
            f"{name}: got {describe(q)}, expected float32, float16 or bfloat16 on the {backend} "
            "backend"
        )
    return backend


def check_order(order: object, backend: str) -> None:
    """`order` is the name of an order that this backend, as `choose_backend` named it, has."""
    check_one_of("order", order, ("auto", *ORDERS))
    if order != "auto" and backend != "triton":
        raise ValueError(
            f"order: got {order!r} on the {backend} backend, expected 'auto': Triton alone has "
            "several"
        )
