"""The form in which a backend's function gets its arguments.

`located_rows` and `listed_blocks` turn the flat arguments of an operator into what the functions of
all backends take. The offsets of packed sequences are the one argument that is checked here,
because only a running operator can read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.runtime import packed
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.sparse.compression import num_summaries, summary_rows
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows


def located_rows(q: Tensor, M: int, cu_seqlens: Tensor | None, causal: bool = True) -> QueryRows:
    """The positions of the query rows, with the offsets checked first."""
    packed.check_offsets(cu_seqlens, q.shape[1])
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


def walk_of(order: str) -> dict[str, Order]:
    """The order in which lists are to be walked, for a function that has several; nothing for
    `"auto"`."""
    return {} if order == "auto" else {"order": Order(order)}


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
