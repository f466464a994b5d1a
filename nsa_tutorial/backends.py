"""Which function computes an operator, on each backend, and the form in which it gets its
arguments.

`BACKENDS` names the forward and `BACKWARDS` the backward of each operator, as `"module:function"`;
a module is imported when it is first needed. `choose` resolves `auto`.

`located_rows` and `listed_blocks` turn the flat arguments of an operator into what all these
functions take. The offsets of packed sequences are the one argument that is checked here, because
only a running operator can read them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.runtime import checks, environment, interrupts, packed
from nsa_tutorial.sparse.compression import num_summaries, summary_rows
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

Table = Mapping[str, Mapping[str, str]]
BACKENDS: Table = {
    "selected_attention": {
        "reference": "nsa_tutorial.sparse.selected_attention:forward",
        # the same with a mask, which replaces the reference where there is no slot_scale
        "masked": "nsa_tutorial.sparse.query_tiles:selected_attention",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:forward",
        "triton": "nsa_tutorial.kernels.triton.selected.launch:forward",
        # Triton's, in one of its orders
        "queries": "nsa_tutorial.kernels.triton.selected.launch:by_queries",
        "tiles": "nsa_tutorial.kernels.triton.selected.launch:by_tiles",
        "blocks": "nsa_tutorial.kernels.triton.selected.launch:by_blocks",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.sparse.sliding_window:forward",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:sliding_window",
        "triton": "nsa_tutorial.kernels.triton.selected.launch:sliding_window",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.sparse.native_sparse_attention:selection_and_window",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:selection_and_window",
        "triton": "nsa_tutorial.kernels.triton.selected.launch:selection_and_window",
    },
    "compressed_attention": {
        "reference": "nsa_tutorial.sparse.compression:compressed_attention",
        "tilelang": "nsa_tutorial.kernels.tilelang.compressed.launch:compressed_attention",
        "triton": "nsa_tutorial.kernels.triton.compressed.launch:compressed_attention",
    },
    "select_blocks": {
        "reference": "nsa_tutorial.sparse.block_selection:select_blocks",
        "tilelang": "nsa_tutorial.kernels.tilelang.choice.launch:select_blocks",
        "triton": "nsa_tutorial.kernels.triton.choice.launch:select_blocks",
    },
    "compress": {  # the mean; other summaries are matmuls, whatever the backend
        "reference": "nsa_tutorial.sparse.compression:summarise",
        "tilelang": "nsa_tutorial.kernels.tilelang.pooling:mean",
        "triton": "nsa_tutorial.kernels.triton.pooling:mean",
    },
    "gated_sum": {
        "reference": "nsa_tutorial.sparse.native_sparse_attention:gated_sum",
        "tilelang": "nsa_tutorial.kernels.tilelang.gates:gated_sum",
        "triton": "nsa_tutorial.kernels.triton.gates:gated_sum",
    },
}
BACKWARDS: Table = {
    "selected_attention": {
        "reference": "nsa_tutorial.training.gradients:of_lists",
        "masked": "nsa_tutorial.training.tile_gradients:of_masked_lists",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:of_lists",
        "triton": "nsa_tutorial.kernels.triton.selected.backward_launch:of_lists",
        "queries": "nsa_tutorial.kernels.triton.selected.backward_launch:by_queries",
        "tiles": "nsa_tutorial.kernels.triton.selected.backward_launch:by_tiles",
        "blocks": "nsa_tutorial.kernels.triton.selected.backward_launch:by_blocks",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.training.tile_gradients:of_windows",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:of_windows",
        "triton": "nsa_tutorial.kernels.triton.window.backward_launch:of_windows",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.training.gradients:of_lists_and_windows",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:of_lists_and_windows",
        "triton": "nsa_tutorial.kernels.triton.selected.backward_launch:of_lists_and_windows",
    },
    "compressed_attention": {
        "reference": "nsa_tutorial.training.tile_gradients:of_summaries",
        "tilelang": "nsa_tutorial.kernels.tilelang.compressed.launch:of_summaries",
        "triton": "nsa_tutorial.kernels.triton.compressed.launch:of_summaries",
    },
    # on the reference backend, PyTorch derives these two gradients itself
    "compress": {
        "tilelang": "nsa_tutorial.kernels.tilelang.pooling:mean_backward",
        "triton": "nsa_tutorial.kernels.triton.pooling:mean_backward",
    },
    "gated_sum": {
        "tilelang": "nsa_tutorial.kernels.tilelang.gates:gated_sum_backward",
        "triton": "nsa_tutorial.kernels.triton.gates:gated_sum_backward",
    },
}
_INTERPRETER = threading.RLock()
ORDERS = ("queries", "tiles", "blocks")  # in which Triton can walk lists


def choose(backend: str, q: Tensor, name: str = "q") -> str:
    """Name the backend that runs an operator on tensors like `q`: `auto` takes Triton for CUDA
    tensors whose dtype it computes, and the reference otherwise. `name` is what the operator calls
    `q`.

    Raises:
        TypeError: for a dtype that no kernel computes.
    """
    if backend == "auto":
        is_for_kernels = q.device.type == "cuda" and q.dtype != torch.float64
        backend = "triton" if is_for_kernels else "reference"
    if backend in ("tilelang", "triton") and q.dtype not in checks.DTYPES:
        raise TypeError(
            f"{name}: got {checks.describe(q)}, expected float32, float16 or bfloat16 on the "
            f"{backend} backend"
        )
    return backend


def in_order(backend: str, order: str) -> str:
    """The row of `BACKENDS` that walks lists in that order; `backend` is one that `choose` named.

    Raises:
        ValueError: for an unknown order, or one that this backend does not have.
    """
    checks.check_one_of("order", order, ("auto", *ORDERS))
    if order != "auto" and backend != "triton":
        raise ValueError(
            f"order: got {order!r} on the {backend} backend, expected 'auto': Triton alone has "
            "several"
        )
    return backend if order == "auto" else order


def load(table: Table, operator: str, backend: str, q: Tensor) -> Callable:
    """The backend's function in `table`, or `BackendUnavailable`, where this machine cannot run
    it on tensors like `q`."""
    package = "triton" if backend in ORDERS else backend
    if package in ("tilelang", "triton"):
        environment.require(package, q.device.type, str(q.dtype).removeprefix("torch."))
    module, name = table[operator][backend].split(":")
    function = getattr(interrupts.import_module(module), name)
    is_interpreted = package == "triton" and q.device.type == "cpu"
    return _one_at_a_time(function) if is_interpreted else function


def _one_at_a_time(function: Callable) -> Callable:
    """Serialise `function` across threads, because Triton's interpreter keeps its state in global
    variables."""

    @functools.wraps(function)
    def run(*args: object, **options: object) -> object:
        with _INTERPRETER:
            return function(*args, **options)

    return run


# -- the form in which a backend's function gets its arguments --


def located_rows(q: Tensor, M: int, cu_seqlens: Tensor | None, causal: bool = True) -> QueryRows:
    """The positions of the query rows, with the offsets checked first."""
    checks.check_offsets(cu_seqlens, q.shape[1])
    B, N = q.shape[:2]
    return query_rows(B, N, M, causal=causal, cu_seqlens=cu_seqlens, device=q.device)


def listed_blocks(
    q: Tensor, k: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, block_size: int, include_own_block: bool,
    causal: bool,
) -> tuple[Tensor, QueryRows, dict[str, object]]:  # fmt: skip
    """The lists in the form that every backend reads, the query rows, and `block_size`. With
    `slot_scale [B, N, H, S]` there is a `slot_scale [R, H, S]` beside it, a slot longer if the own
    block was added: its factor is 1."""
    rows = located_rows(q, k.shape[1], cu_seqlens, causal)
    block_size = at_most_one_block(block_size, k.shape[1])
    ids = block_list(
        block_indices, rows, block_size=block_size, block_counts=block_counts,
        include_own_block=include_own_block,
    )  # fmt: skip
    if slot_scale is None:
        return ids, rows, {"block_size": block_size}
    factors = slot_scale.flatten(0, 1)
    factors = F.pad(factors, (0, 1), value=1) if include_own_block else factors
    return ids, rows, {"block_size": block_size, "slot_scale": factors.contiguous()}


def at_most_one_block(block_size: int, M: int) -> int:
    """`block_size`, or, if all `M` keys fit into block 0, the smallest power of two (at least 16)
    that holds them, so that few sizes need a kernel of their own."""
    return min(block_size, max(16, 1 << max(M - 1, 0).bit_length()))


def at_most_past(size: int, M: int) -> int:
    """`size`, cut to the next power of two after `M` (at least 16). A larger size would give the
    same result, but could overflow int32 and would need more kernels."""
    return min(size, max(16, 1 << M.bit_length()))


def _windows_within(M: int, length: int, stride: int) -> tuple[int, int]:
    """The smallest `length` and `stride` that give the same summaries of at most `M` tokens."""
    if length > M:  # no summary, whatever the stride
        return (at_most_past(length, M),) * 2
    return length, at_most_past(stride, M)


def sizes_of_a_choice(
    M: int, block_size: int, length: int, stride: int, top_n: int, num_initial: int, num_local: int
) -> dict[str, int]:
    """The sizes of `select_blocks`, cut to what `M` tokens need, so the list may be shorter than
    asked for."""
    block_size = at_most_one_block(block_size, M)
    num_blocks = -(-M // block_size)
    length, stride = _windows_within(M, length, stride)
    counts = {"top_n": top_n, "num_initial": num_initial, "num_local": num_local}
    counts = {name: at_most_past(count, num_blocks) for name, count in counts.items()}
    return {"block_size": block_size, "length": length, "stride": stride, **counts}


def rows_and_summaries(
    q: Tensor, k_cmp: Tensor, cu_seqlens: Tensor | None, M: int, length: int, stride: int
) -> tuple[QueryRows, QueryRows]:
    """The positions of the query rows among the keys and among the summaries. The number of
    summaries must be what the keys give."""
    rows = located_rows(q, M, cu_seqlens)
    sequences = [M] if cu_seqlens is None else packed.offsets(cu_seqlens).lengths
    expected = sum(num_summaries(n, length, stride) for n in sequences)
    if k_cmp.shape[1] != expected:
        raise ValueError(
            f"k_cmp: got {k_cmp.shape[1]} summaries, expected {expected}: those of {M} keys "
            f"(num_keys) with length {length} and stride {stride}"
        )
    length, stride = _windows_within(M, length, stride)
    return rows, summary_rows(rows, M, length=length, stride=stride, cu_seqlens=cu_seqlens)


def one_by_one(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The branches' outputs, `[B, N, HQ, DV]` each; some may come stacked as `[2, B, N, HQ,
    DV]`."""
    return [o for x in outputs for o in (x.unbind() if x.ndim == 5 else [x])]
