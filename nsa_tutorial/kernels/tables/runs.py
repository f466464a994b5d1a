"""What the backward kernels of both languages read to walk the queries that see a tile of
summaries: a run of rows for each tile, cut into the same chunks for all.

Symbols: `R` query rows · `H` key/value heads · `T` tiles of summaries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks
from nsa_tutorial.kernels.tables.chunks import WORKSPACE
from nsa_tutorial.sparse.selected_attention import QueryRows


class Runs(NamedTuple):
    """Attributes:
    row_start, row_end: `[R]` int32, the run of summaries that each row sees.
    first_row, last_row: `[T]` int32, the run of rows that see some of a tile.
    num_unread: `[H, R + 1]` int32, how many rows before each are not to be read: no loss asks for
        them, or they are not finite.
    num_tiles, num_chunks, chunk_rows: tiles, chunks of the rows, and rows of a chunk.
    """

    row_start: Tensor
    row_end: Tensor
    first_row: Tensor
    last_row: Tensor
    num_unread: Tensor
    num_tiles: int
    num_chunks: int
    chunk_rows: int


def runs_of_tiles(
    rows: QueryRows, lse2: Tensor, *, num_keys: int, tile_size: int, G: int, share_bytes: int,
    itemsize: int,
) -> Runs:  # fmt: skip
    """The runs of the rows from `compression.summary_rows`.

    Args:
        lse2: `[R, H]`, infinite or NaN where a row's group is not to be read.
        num_keys, tile_size: summaries of all sequences, and of a tile.
        G, itemsize: query heads of a group, and bytes of their numbers.
        share_bytes: bytes that a chunk of a tile needs in the workspace.
    """
    (R, H), device = lse2.shape, lse2.device
    num_tiles = -(-num_keys // tile_size)
    row_end = rows.first_key + rows.num_visible  # both ascend from row to row
    first = torch.arange(0, num_keys, tile_size, dtype=torch.int32, device=device)
    first_row = torch.searchsorted(row_end, first, right=True, out_int32=True)
    last_row = torch.searchsorted(rows.first_key, first + tile_size - 1, right=True, out_int32=True)
    is_unread = ~lse2.isfinite().T  # [H, R]
    num_unread = F.pad(is_unread.cumsum(1, dtype=torch.int32), (1, 0))
    num_chunks, chunk_rows = chunks_of_rows(R, num_tiles * H, G, share_bytes, itemsize)
    return Runs(
        rows.first_key, row_end, first_row, last_row, num_unread, num_tiles, num_chunks, chunk_rows
    )  # fmt: skip


def chunks_of_rows(
    R: int, tiles: int, G: int, share_bytes: int, itemsize: int
) -> tuple[int, int]:  # fmt: skip
    """Into how many chunks the rows are cut, and rows of a chunk; `tiles` of all heads, other
    arguments as in `runs_of_tiles`."""
    fitting = WORKSPACE // (tiles * share_bytes)  # chunks
    enough = chunks.long_enough(R * tiles, G, itemsize)
    chunk_rows = max(enough, -(-R // max(fitting, 1)), 1)
    return -(-R // chunk_rows), chunk_rows
