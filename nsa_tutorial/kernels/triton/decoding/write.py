"""Chapter 15: what a decoding step writes to the cache, in Triton: the newest tokens of each row,
and the summaries that they complete. What does not fit into a row's pages is not written.

Symbols: those of `attend`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.decoding.attend import page_row
from nsa_tutorial.runtime.rounding import next_power_of_2


@triton.jit
def copy_token(
    Target, Source, to, source, in_bounds, NUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the `NUM` numbers of a token."""
    for start in range(0, NUM, BLOCK):
        number = start + tl.arange(0, BLOCK)
        mask = (number < NUM) & in_bounds
        x = tl.load(Source + source + number, mask=mask, other=0.0)
        tl.store(Target + to * NUM + number, x.to(Target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "max_pages"])
def tokens_kernel(
    K, V, KWindow, VWindow, KPending, VPending, NewK, NewV, NewKWindow, NewVWindow, NewKPending,
    NewVPending, Lengths, Table, n, max_pages, ring, pending, k_batch, k_token, v_batch, v_token,
    window_k_batch, window_k_token, window_v_batch, window_v_token, pending_k_batch,
    pending_k_token, pending_v_batch, pending_v_token,
    NK: tl.constexpr, NV: tl.constexpr, PAGE: tl.constexpr, IS_PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes token `i` of `n` of each row to its page and to both rings; `Lengths` does not count
    them yet. New tokens have strides of their own, and `NK` or `NV` numbers each. The grid is `(B *
    n, 3)`: pages, window, pending tokens."""
    batch = (tl.program_id(0) // n).to(tl.int64)
    i = (tl.program_id(0) % n).to(tl.int64)
    token = tl.load(Lengths + batch) + i
    fits = token < max_pages * PAGE
    if tl.program_id(1) == 0:
        to = page_row(Table, batch, token, fits, max_pages, PAGE, IS_PAGED)
        copy_token(K, NewK, to, batch * k_batch + i * k_token, fits, NK, BLOCK)
        copy_token(V, NewV, to, batch * v_batch + i * v_token, fits, NV, BLOCK)
    elif tl.program_id(1) == 1:
        to = batch * ring + token % ring
        source = batch * window_k_batch + i * window_k_token
        copy_token(KWindow, NewKWindow, to, source, fits, NK, BLOCK)
        source = batch * window_v_batch + i * window_v_token
        copy_token(VWindow, NewVWindow, to, source, fits, NV, BLOCK)
    else:
        to = batch * pending + token % pending
        source = batch * pending_k_batch + i * pending_k_token
        copy_token(KPending, NewKPending, to, source, fits, NK, BLOCK)
        source = batch * pending_v_batch + i * pending_v_token
        copy_token(VPending, NewVPending, to, source, fits, NV, BLOCK)


@triton.jit(do_not_specialize=["n", "max_pages"])
def summaries_kernel(
    K, V, NewK, NewV, Lengths, Table, n, max_pages, windows,
    NK: tl.constexpr, NV: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr,
    STRIDE: tl.constexpr, IS_PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes window `i` of `NewK [B, windows, NK]` and `NewV` where the latest `n` tokens of a row
    completed its summary; `Lengths` counts them. The grid is `(B * windows,)`."""
    batch = (tl.program_id(0) // windows).to(tl.int64)
    length = tl.load(Lengths + batch)
    before = length - n - LENGTH
    first = tl.where(before < 0, 0, before // STRIDE + 1)  # that the tokens may have completed
    token = (first + tl.program_id(0) % windows) * STRIDE
    is_complete = (token + LENGTH <= length) & (length <= max_pages * PAGE)
    to = page_row(Table, batch, token, is_complete, max_pages, PAGE, IS_PAGED) // STRIDE
    source = tl.program_id(0).to(tl.int64)
    copy_token(K, NewK, to, source * NK, is_complete, NK, BLOCK)
    copy_token(V, NewV, to, source * NV, is_complete, NV, BLOCK)


def write_tokens(
    targets: Sequence[Tensor], tokens: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """`sparse.decoding.write_tokens`."""
    (B, n), sizes = tokens[0].shape[:2], _sizes(targets, targets[0].shape[1], block_table)
    tokens = [x if x[0, 0].is_contiguous() else x.contiguous() for x in tokens]
    strides = [step for x in tokens for step in x.stride()[:2]]
    table, max_pages = _table(lengths, block_table)
    tokens_kernel[(B * n, 3)](
        *targets, *tokens, lengths, table, n, max_pages, targets[2].shape[1], targets[4].shape[1],
        *strides, **sizes,
    )  # fmt: skip


def write_summaries(
    targets: Sequence[Tensor], summaries: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None, n: int, length: int, stride: int, page_size: int,
) -> None:  # fmt: skip
    """`sparse.decoding.write_summaries`."""
    B, windows = summaries[0].shape[:2]
    table, max_pages = _table(lengths, block_table)
    sizes = {"LENGTH": length, "STRIDE": stride, **_sizes(targets, page_size, block_table)}
    summaries = [x.contiguous() for x in summaries]
    summaries_kernel[(B * windows,)](
        *targets, *summaries, lengths, table, n, max_pages, windows, **sizes
    )


def _sizes(targets: Sequence[Tensor], page_size: int, table: Tensor | None) -> dict[str, object]:
    """What both kernels are compiled for: numbers of a key and of a value, and the pages."""
    NK, NV = (x.shape[2] * x.shape[3] for x in targets[:2])
    block = min(1024, next_power_of_2(max(NK, NV)))
    return {"NK": NK, "NV": NV, "PAGE": page_size, "IS_PAGED": table is not None, "BLOCK": block}


def _table(lengths: Tensor, block_table: Tensor | None) -> tuple[Tensor, int]:
    """The table and its pages of a row; without one, a tensor that is not read, and one page."""
    return (lengths, 1) if block_table is None else (block_table, block_table.shape[1])
