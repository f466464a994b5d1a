"""The best of many blocks, or many of them, in Triton: `pick` for lists that no program holds.

A row of scores stays in memory. `pick_many_kernel` counts its numbers by their leading eight bits,
finds in which of the counts the last one that is taken lies, and goes on with the next eight bits
of those there: four walks, and a fifth one takes what is above, and of what is equal the lower ids.

Symbols: `NC` blocks of a row · `BN` blocks of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)  # its bits, in fp32


@triton.jit
def bits_of_blocks(scores, block, own, num_initial, num_local):
    """What is compared: the bits of a score, of a forced block infinity's, of the future's -1."""
    bits = tl.load(scores + block, mask=block <= own, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where((block < num_initial) | (block > own - num_local), INFINITY, bits)
    return tl.where(block <= own, bits, -1)


@triton.jit(do_not_specialize=["first_row", "NC"])
def pick_many_kernel(
    Scores, Position, BlockIndices, first_row, H, NC, top_n, num_initial, num_local,
    BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Reads `Scores [rows, H, NC]`, numbers of at least 0, and `Position [R]`; writes `BlockIndices
    [R, H, top_n]`, from row `first_row` on.

    The grid is `(rows * H,)`: a program makes a list.
    """
    # -- locate the program --
    index = tl.program_id(0).to(tl.int64)
    own = tl.load(Position + first_row + index // H) // BS
    scores = Scores + index * NC
    ids = BlockIndices + (first_row.to(tl.int64) * H + index) * top_n
    num_taken = tl.minimum(top_n, own + 1)
    digits, blocks = tl.arange(0, 256), tl.arange(0, BN)

    # -- eight bits after the other, down to those of the last block that is taken --
    low, missing = 0, num_taken  # the leading bits; how many are taken of those that begin so
    for place in tl.static_range(4):
        shift = 24 - 8 * place
        count = tl.zeros([256], tl.int32)
        for step in range(0, own + 1, BN):
            bits = bits_of_blocks(scores, step + blocks, own, num_initial, num_local)
            begins_so = bits >> min(31, shift + 8) == low  # at first, all but -1
            count += tl.histogram((bits >> shift) & 255, 256, mask=begins_so)
        # [256], how many have at least this digit
        at_least = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
        digit = tl.max(tl.where(at_least >= missing, digits, 0), axis=0)
        missing -= tl.sum(tl.where(digits > digit, count, 0), axis=0)
        low = low * 256 + digit

    # -- take what is above, and of what is equal the lower ids --
    num_found, num_equal = 0, 0
    for step in range(0, own + 1, BN):
        block = step + blocks
        bits = bits_of_blocks(scores, block, own, num_initial, num_local)
        is_equal = (bits == low).to(tl.int32)
        is_first = tl.cumsum(is_equal, axis=0) + num_equal <= missing
        is_taken = ((bits > low) | ((is_equal > 0) & is_first)).to(tl.int32)
        slot = num_found + tl.cumsum(is_taken, axis=0) - 1
        tl.store(ids + slot, block, mask=is_taken > 0)
        num_found += tl.sum(is_taken, axis=0)
        num_equal += tl.sum(is_equal, axis=0)

    # -- fill up --
    for step in range(num_taken, top_n, BN):
        slot = step + blocks
        tl.store(ids + slot, tl.full([BN], -1, tl.int32), mask=slot < top_n)
