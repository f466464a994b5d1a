"""What the operators call for the choice of blocks on the TileLang backend: `scores`, then `pick`,
a chunk of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import cells
from nsa_tutorial.kernels.tilelang.choice.pick import build_pick
from nsa_tutorial.kernels.tilelang.choice.scores import build_score
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.compressed.launch import (
    compressed_forward,
    dtype_of,
    rows_of,
)
from nsa_tutorial.kernels.tilelang.launch_options import pick_threads, score_options
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.query_tiles import at_least_one
from nsa_tutorial.sparse.selected_attention import QueryRows


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float, block_counts: Tensor | None = None, pool: str = "sum",
) -> Tensor:  # fmt: skip
    """The blocks of each query: `block_selection.select_blocks`, a chunk of queries at a time.
    Without sums, every summary is a cell, and PyTorch takes the largest of a block."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    R, M_c, device = B * N, k_cmp.shape[1], kind_of(q.device)
    if lse is None:
        _, lse = compressed_forward(q, k_cmp, k_cmp, summaries, scale=scale)
    cut = cells.cells_of(
        M, length=length, stride=stride, block_size=block_size,
        is_apart=pool == "sum"
        and (rows.num_sequences == 1 or (rows.num_sequences == B and N % cells.TILE == 0)),
    )  # fmt: skip
    sizes = {"length": length, "stride": stride, "block_size": block_size}
    of_cells = (cut.size, cut.shares, cut.overlapping) if pool == "sum" else (block_size, 1, 1)
    rows_of_a_chunk = cells.rows_of_a_chunk(cut, R, H)
    shape = (cut.shares, rows_of_a_chunk, H, cut.per_row)
    scores = q.new_empty(shape, dtype=torch.float32)
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    q, k_cmp, lse = rows_of(q), rows_of(at_least_one(k_cmp)), lse.reshape(R, HQ).contiguous()
    has_counts = block_counts is not None
    counts = block_counts.view(R, H).to(ids) if has_counts else ids.new_empty(0, H)
    options = score_options(HQ // H, D, q.element_size(), shared_memory(q.device))
    score = compiled(
        build_score, device, H, HQ // H, D, cut.size, cut.shares, cut.pieces,
        dtype=dtype_of(q), a_group_loads=True, **options,
    )  # fmt: skip
    # the summaries of all sequences that share a tile
    num_sequences = 1 if N % options["BQ"] == 0 else min(B, (options["BQ"] - 2) // N + 2)
    num_steps = max(1, -(-num_sequences * M_c // options["BT"]))
    pick = compiled(
        build_pick, device, H, block_size, *of_cells, cut.num_blocks, has_counts=has_counts,
        threads=pick_threads(cut.num_blocks),
    )  # fmt: skip
    for first_row in range(0, R, rows_of_a_chunk):
        num_rows = min(rows_of_a_chunk, R - first_row)
        score(
            q, k_cmp, lse, summaries.first_key, summaries.num_visible, scores, scale * LOG2_E,
            first_row, num_rows, num_steps,
        )  # fmt: skip
        found, seen, windows = scores, summaries, (length, stride)
        if pool == "max":
            num_visible = summaries.num_visible[first_row : first_row + num_rows]
            num_blocks = -(-M // block_size)
            best = cells.best_of_blocks(
                scores[0, :num_rows], num_visible, **sizes, num_blocks=num_blocks
            )
            found, seen, windows = best[None], rows, (1, 1)
        pick(
            found, seen.num_visible, rows.position, counts, ids.view(R, H, top_n), first_row,
            num_rows, num_initial, num_local, *windows,
        )  # fmt: skip
    return ids
