"""What the operators call for the choice of blocks on the Triton backend: `scores`, then `pick`, a
chunk of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import cells
from nsa_tutorial.kernels.triton.choice.pick import pick_kernel
from nsa_tutorial.kernels.triton.choice.scores import score_kernel
from nsa_tutorial.kernels.triton.compressed.launch import compressed_forward
from nsa_tutorial.kernels.triton.launch_options import pick_options, score_options, tile_sizes
from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float, block_counts: Tensor | None = None, pool: str = "sum",
) -> Tensor:  # fmt: skip
    """The blocks of each query: `block_selection.select_blocks`, a chunk of queries at a time.
    Without sums, every summary is a cell, and PyTorch takes the largest of a block."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    R = B * N
    if lse is None:
        _, lse = compressed_forward(q, k_cmp, k_cmp, summaries, scale=scale)
    q, k_cmp, lse = q.contiguous(), k_cmp.contiguous(), lse.contiguous()
    cut = cells.cells_of(
        M, length=length, stride=stride, block_size=block_size,
        is_apart=pool == "sum"
        and (rows.num_sequences == 1 or (rows.num_sequences == B and N % cells.TILE == 0)),
    )  # fmt: skip
    sizes = {"length": length, "stride": stride, "block_size": block_size}
    options = score_options(D, q.element_size(), shared_memory(q.device))
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    if block_counts is not None:
        block_counts = block_counts.contiguous()
    rows_of_a_chunk = cells.rows_of_a_chunk(cut, R, H)
    scores = q.new_empty(cut.shares * rows_of_a_chunk * H * cut.per_row, dtype=torch.float32)
    for first_row in range(0, R, rows_of_a_chunk):
        last_row = min(first_row + rows_of_a_chunk, R)
        num_rows = last_row - first_row
        num_blocks = cut.num_blocks
        if B == 1 and rows.num_sequences == 1:  # queries are in order: what they see is known
            num_blocks = next_power_of_2(-(-(M - N + last_row) // block_size))
        pick = pick_options(num_blocks)
        score_kernel[(cdiv(num_rows, options["BQ"]) * H,)](
            q, k_cmp, lse, summaries.first_key, summaries.num_visible, scores, scale * LOG2_E,
            last_row, first_row, H, cut.per_row, G=HQ // H, D=D, C=cut.size,
            SHARES=cut.shares, PIECES=cut.pieces, DT=tile_sizes(1, D, D)["DT"], **options,
        )  # fmt: skip
        found, seen, per_row, windows = scores, summaries, cut.per_row, (length, stride)
        of_cells = {"C": cut.size, "SHARES": cut.shares, "K": cut.overlapping}
        if pool == "max":
            found = cells.best_of_blocks(
                scores[: num_rows * H * per_row].view(num_rows, H, per_row),
                summaries.num_visible[first_row:last_row], **sizes, num_blocks=-(-M // block_size),
            )  # fmt: skip
            seen, per_row, windows = rows, found.shape[2], (1, 1)
            of_cells = {"C": block_size, "SHARES": 1, "K": 1}
        pick_kernel[(cdiv(num_rows * H, pick["BR"]),)](
            found, seen.num_visible, rows.position, block_counts, ids, num_rows, first_row,
            H, per_row, top_n, num_initial, num_local, *windows, BS=block_size, **of_cells,
            NB=num_blocks, HAS_COUNTS=block_counts is not None, NT=next_power_of_2(top_n),
            **pick,
        )  # fmt: skip
    return ids
