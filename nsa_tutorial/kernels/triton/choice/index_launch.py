"""What `ops.index_blocks` calls on the Triton backend: an indexer's scores, then the pick, a chunk
of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tables import tiles
from nsa_tutorial.kernels.triton.choice.index import index_kernel
from nsa_tutorial.kernels.triton.choice.pick import pick_kernel
from nsa_tutorial.kernels.triton.choice.pick_many import pick_many_kernel
from nsa_tutorial.kernels.triton.launch_options import FP32_TILES, pick_options, tile_sizes
from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits, shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

# Queries of a program, tokens of a step, warps, stages: the first that a program can have.
INDEX_TILES = ((128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1))


def index_options(DI: int, itemsize: int, shared_memory: int = SHARED_MEMORY) -> dict[str, int]:
    """`BQ, BT, num_warps, num_stages` for keys of `DI` numbers of `itemsize` bytes."""
    DT = tile_sizes(1, DI, DI)["DT"]
    found = first_that_fits(
        INDEX_TILES if itemsize == 2 else FP32_TILES,
        lambda BQ, BT, warps, stages: (stages * BQ + 2 * BT) * DT * itemsize, shared_memory,
    )  # fmt: skip
    return dict(zip(("BQ", "BT", "num_warps", "num_stages"), found, strict=True))


def index_blocks(
    q_idx: Tensor, k_idx: Tensor, w: Tensor | None, rows: QueryRows, *, kv_heads: int, top_n: int,
    block_size: int, num_initial: int, num_local: int,
) -> Tensor:  # fmt: skip
    """The blocks of each query: `indexer.index_blocks`, a chunk of queries at a time."""
    (B, N, HI, DI), M, H = q_idx.shape, k_idx.shape[1], kv_heads
    R = B * N
    q_idx, k_idx = q_idx.contiguous(), k_idx.contiguous()
    w = q_idx if w is None else w.float().contiguous()
    cut = tiles.blocks_as_cells(M, block_size)
    rows_of_a_chunk = tiles.rows_of_an_index_chunk(cut.per_row, R, H)
    options = index_options(DI, q_idx.element_size(), shared_memory(q_idx.device))
    part = tiles.part_size(block_size, options["BT"])
    ids = q_idx.new_empty(B, N, H, top_n, dtype=torch.int32)
    scores = q_idx.new_empty(rows_of_a_chunk * H * cut.per_row, dtype=torch.float32)
    for first_row in range(0, R, rows_of_a_chunk):
        chunk = slice(first_row, min(first_row + rows_of_a_chunk, R))
        num_rows = chunk.stop - first_row
        starts = tiles.tile_starts(
            rows.position[chunk], skip=M - N, BQ=options["BQ"], num_sequences=rows.num_sequences
        )
        num_tiles = len(starts) - 1
        index_kernel[(cdiv(M, part) * num_tiles * H,)](
            q_idx, k_idx, w, rows.first_key, rows.num_visible, starts, scores, first_row, H,
            cut.per_row, num_tiles, J=HI // H, DI=DI, BS=block_size, HAS_W=w is not q_idx,
            PART=part, DT=tile_sizes(1, DI, DI)["DT"], **options,
        )  # fmt: skip
        pick_blocks(
            scores, rows, ids, first_row, num_rows, cut.per_row, num_initial, num_local, block_size
        )
    return ids


def pick_blocks(
    scores: Tensor, rows: QueryRows, ids: Tensor, first_row: int, num_rows: int, per_row: int,
    num_initial: int, num_local: int, block_size: int,
) -> None:  # fmt: skip
    """Write the best of `scores [num_rows, H, per_row]`, which are at least 0, to `ids [B, N, H,
    top_n]`, from row `first_row` on."""
    H, top_n = ids.shape[2:]
    sizes = (first_row, H, per_row, top_n, num_initial, num_local)
    num_blocks = next_power_of_2(per_row)
    if num_blocks > tiles.MOST_BLOCKS or top_n > tiles.MOST_SLOTS:
        BN = min(4096, max(256, num_blocks))
        pick_many_kernel[(num_rows * H,)](
            scores, rows.position, ids, *sizes, BS=block_size, BN=BN, num_warps=max(1, BN // 512)
        )
        return
    pick = pick_options(num_blocks)
    pick_kernel[(cdiv(num_rows * H, pick["BR"]),)](
        scores, rows.num_visible, rows.position, None, ids, num_rows, *sizes, 1, 1, BS=block_size,
        C=block_size, SHARES=1, K=1, NB=num_blocks, HAS_COUNTS=False,
        NT=next_power_of_2(top_n), **pick,
    )  # fmt: skip
