"""Cells: how the kernel that scores blocks stores its scores for the kernel that picks from them.

A *cell* is a run of summaries that begin in one block, and it holds what they add to that block.
Where summaries reach into the next blocks, the cell has a share for each of those too, so a row of
scores has one entry per block, not one per summary. Each summary is its own cell where a block is
not a power of two of strides, or where a tile has rows of several sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.runtime.rounding import next_power_of_2
from nsa_tutorial.sparse.compression import num_summaries

TILE = 128  # queries: chunks begin at a multiple of it
WORKSPACE = 2**28  # bytes of scores at a time
LARGEST_CELL = 16  # summaries


class Cells(NamedTuple):
    """Attributes:
    size: summaries of a cell.
    pieces: strides of a summary; 1 if a cell is a summary.
    shares: blocks to which a cell gives.
    per_row: cells of the longest sequence.
    overlapping: summaries that share tokens with one block, at most.
    num_blocks: blocks of the longest sequence, rounded up to a power of two.
    """

    size: int
    pieces: int
    shares: int
    per_row: int
    overlapping: int
    num_blocks: int


def cells_of(M: int, *, length: int, stride: int, block_size: int, is_apart: bool) -> Cells:
    """The cells of rows over `M` keys; `is_apart` where no tile of queries has rows of two
    sequences.

    >>> cells_of(65536, length=32, stride=16, block_size=64, is_apart=True)
    Cells(size=4, pieces=2, shares=2, per_row=1024, overlapping=5, num_blocks=1024)
    """
    num_blocks = next_power_of_2(-(-M // block_size))
    # window starts in block_size + length - 1 consecutive tokens, at most
    overlapping = -(-(block_size + length - 1) // stride)
    size, pieces = block_size // stride, length // stride
    is_whole = block_size % stride == length % stride == 0
    is_cell = is_whole and size in (2, 4, 8, LARGEST_CELL) and pieces <= size + 1
    if not (is_cell and is_apart):
        return Cells(1, 1, 1, max(1, num_summaries(M, length, stride)), overlapping, num_blocks)
    shares = (size + pieces - 2) // size + 1
    per_row = max(1, -(-num_summaries(M, length, stride) // size))
    return Cells(size, pieces, shares, per_row, overlapping, num_blocks)


def best_of_blocks(
    scores: Tensor, num_visible: Tensor, *, length: int, stride: int, block_size: int,
    num_blocks: int,
) -> Tensor:  # fmt: skip
    """The largest score among the summaries that share tokens with a block, in cells of a block.

    Args:
        scores: `[rows, H, NC]`, a cell for each summary.
        num_visible: `[rows]`, how many summaries a row sees, from its sequence's first on.
        length, stride, block_size, num_blocks: in tokens, and blocks of the longest sequence.

    Returns:
        `[rows, H, num_blocks]`: 0 where nothing is seen, and for NaN.
    """
    start = torch.arange(num_blocks, device=scores.device) * block_size
    first = (start - length) // stride + 1  # the first summary that ends in or after a block
    best = scores.new_zeros(*scores.shape[:2], num_blocks)
    for i in range(-(-(block_size + length - 1) // stride)):
        summary = first + i  # [num_blocks]
        begins = summary * stride
        shares = torch.minimum(begins + length, start + block_size) > torch.maximum(begins, start)
        exists = shares & (summary >= 0) & (summary < num_visible[:, None])  # [rows, num_blocks]
        column = torch.where(exists, summary, 0)[:, None].expand_as(best)
        best = torch.fmax(best, scores.gather(-1, column).masked_fill(~exists[:, None], 0))
    return best


def rows_of_a_chunk(cells: Cells, R: int, H: int) -> int:
    """How many of `R` query rows have their scores in the workspace at a time."""
    bytes_per_row = 4 * cells.shares * H * cells.per_row
    fitting = max(1, WORKSPACE // bytes_per_row)
    part = (
        1 << fitting.bit_length() - 1
    )  # of a tile: a chunk has whole tiles, or tiles whole chunks
    return min(R, fitting // TILE * TILE or part)
