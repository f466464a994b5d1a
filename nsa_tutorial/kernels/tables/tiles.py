"""Tiles of queries that hold rows of one sequence alone, so that one run of keys, and one count of
blocks, serves all of a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tables.cells import TILE, WORKSPACE, Cells
from nsa_tutorial.runtime.rounding import next_power_of_2

# Past so many blocks or slots, a program no longer holds a row of scores, or finds its slots one by
# one: `pick_many` walks the row, and `pick` does not.
MOST_BLOCKS, MOST_SLOTS = 4096, 64
PART = 1024  # tokens that a program scores, as near as whole blocks and steps come to it


def tile_starts(position: Tensor, *, skip: int, BQ: int, num_sequences: int) -> Tensor:
    """With which row each tile of at most `BQ` rows begins, int32 `[tiles + 1]`; tiles that are not
    needed are empty, at the end.

    Args:
        position: `[rows]` int32, of consecutive rows in their sequences.
        skip: the position of a sequence's first query.
        BQ: rows of a tile.
        num_sequences: how many sequences these rows belong to at most.
    """
    rows = len(position)
    is_start = (position - skip) % BQ == 0
    is_start |= torch.arange(rows, device=position.device) == 0
    count = is_start.cumsum(0, dtype=torch.int32)
    num_tiles = min(rows, rows // BQ + num_sequences + 1)
    tile = torch.arange(1, num_tiles + 2, dtype=torch.int32, device=position.device)
    return torch.searchsorted(count, tile, out_int32=True)


def blocks_as_cells(M: int, block_size: int) -> Cells:
    """Scores with an entry for each block, in the form that `pick` reads: cells of a block."""
    num_blocks = -(-M // block_size)
    return Cells(block_size, 1, 1, num_blocks, 1, next_power_of_2(num_blocks))


def part_size(block_size: int, BT: int) -> int:
    """Tokens that a program scores: whole blocks, and whole steps of `BT` where a step holds whole
    blocks."""
    unit = BT if BT % block_size == 0 else block_size
    return -(-PART // unit) * unit


def rows_of_an_index_chunk(per_row: int, R: int, H: int) -> int:
    """How many of `R` query rows have the scores of their `per_row` blocks, for `H` lists, in the
    workspace at a time."""
    fitting = max(1, WORKSPACE // (4 * H * per_row))
    return min(R, fitting // TILE * TILE or fitting)
