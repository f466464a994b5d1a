"""Chapter 08: three views of the past, gated (NSA, arXiv 2502.11089, section 3.2, Eq. 5).

`forward` runs the three branches of the chapters before, one after the other, and `gated_sum` adds
them up: all of NSA on the reference, in one piece. It does not validate. `ops` does, and
chooses kernels; the layer that a model holds is `nsa_tutorial.NativeSparseAttention`.

Symbols: as everywhere `B`, `N`, `M`, `HQ`, `H`, `D`, `DV`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial.sparse import block_selection, query_tiles, selected_attention, sliding_window
from nsa_tutorial.sparse.compression import compress, compressed_attention, summary_rows
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

BRANCHES = ("compression", "selection", "window")
NUM_INITIAL, NUM_LOCAL = 1, 2  # forced blocks: the first one and the two latest (section 4.1)


def gated_sum(gates: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> Tensor:
    """The branches' outputs `[B, N, HQ, DV]`, each times its gate `[B, N, HQ]`, added up (Eq. 5). A
    gate of None leaves its branch out.

    Gates need not sum to 1. Computed in fp32 at least, returned in the dtype of the outputs.
    """
    used = [(g, o) for g, o in zip(gates, outputs, strict=True) if g is not None]
    total = sum(g[..., None].to(wide(g)) * o.to(wide(o)) for g, o in used)
    return total.to(used[0][1].dtype)


def wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor], *, top_n: int, block_size: int,
    window_size: int, length: int, stride: int, scale: float,
) -> Tensor:  # fmt: skip
    """Native Sparse Attention with means for summaries.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, DV]`.
        gates: of compression, selection and window, `[B, N, HQ]` each.
        top_n, block_size, window_size, length, stride, scale: as for `ops.select_blocks` and
            `ops.native_sparse_attention`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`.
    """
    (B, N), M = q.shape[:2], k.shape[1]
    rows = query_rows(B, N, M, causal=True, cu_seqlens=None, device=q.device)

    # -- compression --
    k_cmp, v_cmp = (compress(x, length=length, stride=stride) for x in (k, v))
    summaries = summary_rows(rows, M, length=length, stride=stride, cu_seqlens=None)
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, summaries, scale=scale)

    # -- selection --
    block_indices = block_selection.select_blocks(
        q, k_cmp, lse, rows, summaries, M=M, top_n=top_n, block_size=block_size, length=length,
        stride=stride, num_initial=NUM_INITIAL, num_local=NUM_LOCAL, scale=scale,
    )  # fmt: skip
    options = {"block_counts": None, "include_own_block": False}
    ids = block_list(block_indices, rows, block_size=block_size, **options)
    o_slc, _ = query_tiles.selected_attention(
        q, k, v, ids, rows, block_size=block_size, scale=scale
    )  # fmt: skip

    # -- window --
    o_swa, _ = sliding_window.forward(q, k, v, rows, window_size=window_size, scale=scale)
    return gated_sum(gates, (o_cmp, o_slc, o_swa))


def selection_and_window(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    window_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both branches over the same keys and values: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`,
    of the lists, then of the windows. `slot_scale` is the lists'."""
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    lists = selected_attention.forward(q, k, v, ids, rows, **sizes)
    windows = sliding_window.forward(q, k, v, rows, window_size=window_size, scale=scale)
    o, lse = (torch.stack(pair) for pair in zip(lists, windows, strict=True))
    return o, lse
