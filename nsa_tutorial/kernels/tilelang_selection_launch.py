"""What the operators call for summaries on the TileLang backend: attention to them, and the choice
of blocks, on CUDA tensors, or on CPU tensors through C.

`tilelang_selection` holds the kernels. No argument is checked here: `ops` does.
"""

from __future__ import annotations

import functools

import tilelang
import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import tilelang_selection
from nsa_tutorial.kernels.tilelang_tiles import (
    attend_options,
    has_tma,
    pick_threads,
    score_options,
)
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse import score_cells
from nsa_tutorial.sparse.query_tiles import at_least_one
from nsa_tutorial.sparse.selected_attention import QueryRows

# a warp group loads, the others compute
PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
KERNELS = {
    "attend": tilelang_selection.build_attend,
    "score": tilelang_selection.build_score,
    "pick": tilelang_selection.build_pick,
}


@functools.cache
def compiled(name: str, device: str, *shape: int, **options: object) -> tilelang.JITKernel:
    """The kernel of `KERNELS[name](*shape, **options)`, compiled for `"cpu"` or `"cuda"`, once per
    process."""
    kernel = KERNELS[name](*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    return tilelang.compile(kernel, target="cuda", pass_configs=PASS_CONFIGS)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the visible summaries: `compression.compressed_attention`."""
    (B, N, HQ, D), (H, DV) = q.shape, v_cmp.shape[2:]
    o = v_cmp.new_empty(B, N, HQ, DV)
    lse = q.new_empty(B, N, HQ, dtype=torch.float32)
    options = attend_options(D, DV, q.element_size(), shared_memory(q.device))
    kernel = compiled(
        "attend", q.device.type, H, HQ // H, D, DV, dtype=dtype_of(q), **options,
        has_tma=has_tma(q.device, D * q.element_size(), DV * q.element_size()),
    )  # fmt: skip
    kernel(
        rows_of(q), rows_of(at_least_one(k_cmp)), rows_of(at_least_one(v_cmp)), rows.first_key,
        rows.num_visible, o.view(-1, HQ, DV), lse.view(-1, HQ), scale, scale * LOG2_E,
    )  # fmt: skip
    return o, lse


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float, block_counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The blocks of each query: `block_selection.select_blocks`, a chunk of queries at a time."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    R, M_c, device = B * N, k_cmp.shape[1], q.device.type
    if lse is None:
        _, lse = compressed_attention(q, k_cmp, k_cmp, summaries, scale=scale)
    cells = score_cells.cells(
        M, length=length, stride=stride, block_size=block_size,
        is_apart=rows.num_sequences == 1 or (rows.num_sequences == B and N % score_cells.TILE == 0),
    )  # fmt: skip
    rows_of_a_chunk = score_cells.rows_of_a_chunk(cells, R, H)
    shape = (cells.shares, rows_of_a_chunk, H, cells.per_row)
    scores = q.new_empty(shape, dtype=torch.float32)
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    q, k_cmp, lse = rows_of(q), rows_of(at_least_one(k_cmp)), lse.reshape(R, HQ).contiguous()
    has_counts = block_counts is not None
    counts = block_counts.view(R, H).to(ids) if has_counts else ids.new_empty(0, H)
    options = score_options(HQ // H, D, q.element_size(), shared_memory(q.device))
    score = compiled(
        "score", device, H, HQ // H, D, cells.size, cells.shares, cells.pieces, dtype=dtype_of(q),
        **options,
    )  # fmt: skip
    # the summaries of all sequences that share a tile
    num_sequences = 1 if N % options["BQ"] == 0 else min(B, (options["BQ"] - 2) // N + 2)
    num_steps = -(-num_sequences * M_c // options["BT"])
    pick = compiled(
        "pick", device, H, block_size, cells.size, cells.shares, cells.overlapping,
        cells.num_blocks, has_counts=has_counts, threads=pick_threads(cells.num_blocks),
    )  # fmt: skip
    for first_row in range(0, R, rows_of_a_chunk):
        num_rows = min(rows_of_a_chunk, R - first_row)
        score(
            q, k_cmp, lse, summaries.first_key, summaries.num_visible, scores, scale * LOG2_E,
            first_row, num_rows, num_steps,
        )  # fmt: skip
        pick(
            scores, summaries.num_visible, rows.position, counts, ids.view(R, H, top_n), first_row,
            num_rows, num_initial, num_local, length, stride,
        )  # fmt: skip
    return ids


def rows_of(x: Tensor) -> Tensor:
    """`[B, N, …]` as `[B * N, …]`."""
    return x.flatten(0, 1).contiguous()


def dtype_of(x: Tensor) -> str:
    """TileLang's name of it."""
    return str(x.dtype).removeprefix("torch.")
