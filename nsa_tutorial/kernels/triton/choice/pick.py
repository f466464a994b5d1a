"""Chapter 14: the choice of blocks, in Triton: `pick_kernel` turns the cells that `scores` stored
into scores of blocks, and takes the best.

`launch` runs it.

Symbols: `BR` lists of a program · `NB` blocks · `C` summaries of a cell · `NC` cells of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)  # its bits, in fp32


@triton.jit(do_not_specialize=["num_rows", "first_row", "NC"])
def pick_kernel(
    Scores, NumVisible, Position, BlockCounts, BlockIndices, num_rows, first_row, H, NC, top_n,
    num_initial, num_local, length, stride,
    BS: tl.constexpr, C: tl.constexpr, SHARES: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
    HAS_COUNTS: tl.constexpr, NT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Reads `Scores [SHARES, num_rows, H, NC]`, `NumVisible [R]`, `Position [R]` and, with
    `HAS_COUNTS`, `BlockCounts [R, H]`; writes `BlockIndices [R, H, top_n]`.

    The grid is `(num_rows * H / BR,)`: a program makes `BR` lists. `NB` is a power of two that
    holds all blocks of a sequence, `NT` one that holds a list, and `K` summaries at most share
    tokens with a block.
    """
    # -- locate the program --
    index = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR], of a list
    in_lists = index < num_rows.to(tl.int64) * H
    row = first_row + index // H
    num_visible = tl.load(NumVisible + row, mask=in_lists, other=0)[:, None]
    own = tl.load(Position + row, mask=in_lists, other=0)[:, None] // BS
    block = tl.arange(0, NB)[None, :]
    scores = Scores + (index * NC)[:, None]  # [BR, 1]

    # -- from cells to blocks --
    score = tl.zeros([BR, NB], tl.float32)
    if C == 1:  # a summary counts by the tokens that it shares with the block
        start = block * BS
        first = (start - length + length * stride) // stride + 1 - length  # of what is positive
        for i in range(K):
            summary = first + i  # [1, NB]
            common = tl.minimum(summary * stride + length, start + BS)
            common = (common - tl.maximum(summary * stride, start)).to(tl.float32)
            exists = (summary >= 0) & (summary < num_visible) & (common > 0)  # [BR, NB]
            score += tl.load(scores + summary, mask=exists, other=0.0) * (common / stride)
    else:
        num_cells = tl.cdiv(num_visible, C)
        for share in tl.static_range(SHARES):
            cell = block - share
            exists = (cell >= 0) & (cell < num_cells)
            pointer = scores + share * (num_rows.to(tl.int64) * H * NC) + cell
            score += tl.load(pointer, mask=exists, other=0.0)

    # -- force and hide --
    score = tl.where(score == score, score, 0.0)  # NaN is worth nothing
    bits = score.to(tl.int32, bitcast=True)  # of numbers of at least 0: in the same order
    bits = tl.where((block < num_initial) | (block > own - num_local), INFINITY, bits)
    bits = tl.where(block <= own, bits, -1)  # [BR, NB]

    # -- halve the range, down to the bits of the last block that is taken --
    num_taken = tl.full([BR], 0, tl.int32) + top_n
    if HAS_COUNTS:
        counts = tl.load(BlockCounts + first_row.to(tl.int64) * H + index, mask=in_lists, other=0)
        num_taken = tl.minimum(num_taken, counts.to(tl.int32))
    low = tl.zeros([BR], tl.int32)
    high = tl.full([BR], INFINITY + 1, tl.int32)
    while tl.max(high - low, axis=0) > 1:
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle[:, None]).to(tl.int32), axis=1)  # [BR]
        low = tl.where(count >= num_taken, middle, low)
        high = tl.where(count >= num_taken, high, middle)
        high = tl.where(count == num_taken, middle + 1, high)

    # -- take what is above, and of what is equal the lower ids --
    is_above = (bits > low[:, None]).to(tl.int32)
    is_equal = (bits == low[:, None]).to(tl.int32)
    num_equal = num_taken - tl.sum(is_above, axis=1)  # [BR]
    is_first = tl.cumsum(is_equal, axis=1) <= num_equal[:, None]
    is_taken = ((is_above > 0) | ((is_equal > 0) & is_first)).to(tl.int32)

    # -- store --
    place = tl.cumsum(is_taken, axis=1) - 1  # [BR, NB]
    num_found = tl.sum(is_taken, axis=1)[:, None]
    ids = BlockIndices + ((first_row.to(tl.int64) * H + index) * top_n)[:, None]  # [BR, 1]
    block = tl.broadcast_to(block, [BR, NB])
    tl.store(ids + place, block, mask=(is_taken > 0) & in_lists[:, None])
    slot = tl.arange(0, NT)[None, :]
    is_over = (slot >= num_found) & (slot < top_n) & in_lists[:, None]  # [BR, NT]
    tl.store(ids + slot, tl.full([BR, NT], -1, tl.int32), mask=is_over)
