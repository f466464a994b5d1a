"""What `ops.index_blocks` calls on the TileLang backend: an indexer's scores, then the pick, a
chunk of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tables import tiles
from nsa_tutorial.kernels.tilelang.choice.index import build_index, span_of
from nsa_tutorial.kernels.tilelang.choice.pick import build_pick
from nsa_tutorial.kernels.tilelang.choice.pick_many import build_pick_many
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.compressed.launch import dtype_of, rows_of
from nsa_tutorial.kernels.tilelang.launch_options import pick_threads, tile_sides
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.rounding import next_power_of_2
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits, shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


def index_options(
    J: int, DI: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages` for `J` heads a list, and keys of `DI` numbers of `itemsize`
    bytes."""

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries and keys, of weights, and of scores."""
        _, DT, _ = tile_sides(BQ, DI, DI)
        return (num_stages * BQ + BT) * DT * itemsize + BQ * (J + BT) * 4

    choices = [(128, 128, 2), (128, 64, 2), (64, 64, 2), (64, 32, 1), (64, 16, 1), (32, 16, 1)]
    if itemsize == 4:
        choices = choices[3:]
    BQ, BT, num_stages = first_that_fits([*choices, (16, 16, 1)], size, shared_memory)
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}


def index_blocks(
    q_idx: Tensor, k_idx: Tensor, w: Tensor | None, rows: QueryRows, *, kv_heads: int, top_n: int,
    block_size: int, num_initial: int, num_local: int,
) -> Tensor:  # fmt: skip
    """The blocks of each query: `indexer.index_blocks`, a chunk of queries at a time."""
    (B, N, HI, DI), M, H = q_idx.shape, k_idx.shape[1], kv_heads
    R, J, device, itemsize = B * N, HI // H, kind_of(q_idx.device), q_idx.element_size()
    has_w = w is not None
    w = rows_of(w.float()) if has_w else q_idx.new_empty(0, HI, dtype=torch.float32)
    cut = tiles.blocks_as_cells(M, block_size)
    rows_of_a_chunk = tiles.rows_of_an_index_chunk(cut.per_row, R, H)
    options = index_options(J, DI, itemsize, shared_memory(q_idx.device))
    span = span_of(block_size, options["BT"])
    index = compiled(
        build_index, device, H, J, DI, block_size, dtype=dtype_of(q_idx), has_w=has_w,
        # a group that loads wants its keys in one step
        a_group_loads=span <= options["BT"], **options,
    )  # fmt: skip
    ids = q_idx.new_empty(B, N, H, top_n, dtype=torch.int32)
    scores = q_idx.new_empty(rows_of_a_chunk, H, cut.per_row, dtype=torch.float32)
    q_idx, k_idx = rows_of(q_idx), rows_of(k_idx)
    for first_row in range(0, R, rows_of_a_chunk):
        chunk = slice(first_row, min(first_row + rows_of_a_chunk, R))
        starts = tiles.tile_starts(
            rows.position[chunk], skip=M - N, BQ=options["BQ"], num_sequences=rows.num_sequences
        )
        index(
            q_idx, k_idx, w, rows.first_key, rows.num_visible, starts, scores, first_row,
            len(starts) - 1, -(-M // span),
        )  # fmt: skip
        pick_blocks(
            scores, rows, ids.view(R, H, top_n), first_row, chunk.stop - first_row, num_initial,
            num_local, block_size,
        )  # fmt: skip
    return ids


def pick_blocks(
    scores: Tensor, rows: QueryRows, ids: Tensor, first_row: int, num_rows: int, num_initial: int,
    num_local: int, block_size: int,
) -> None:  # fmt: skip
    """Write the best of `scores [some, H, NC]`, which are at least 0, to `ids [R, H, top_n]`, from
    row `first_row` on."""
    (_, H, NC), top_n, device = scores.shape, ids.shape[2], kind_of(scores.device)
    num_blocks = next_power_of_2(NC)
    sizes = (first_row, num_rows, num_initial, num_local)
    if num_blocks > tiles.MOST_BLOCKS or top_n > tiles.MOST_SLOTS:
        pick = compiled(build_pick_many, device, H, block_size, threads=256)
        pick(scores, rows.position, ids, *sizes)
        return
    pick = compiled(
        build_pick, device, H, block_size, block_size, 1, 1, num_blocks, has_counts=False,
        threads=pick_threads(num_blocks),
    )  # fmt: skip
    no_counts = ids.new_empty(0, H)
    pick(scores[None], rows.num_visible, rows.position, no_counts, ids, *sizes, 1, 1)
