"""Chapter 16: the unions of neighbours' lists, made on the device, in Triton.

`union_kernel` compares all entries of a tile's lists with each other, which for 4 lists of 16 is
less work than to sort them. A tile is left to others, with a count of -1, where its union is too
long, and where the walk along it would not be exact. No argument is checked here: `ops` does.

Symbols: those of `triton_forward`; `T` queries of a tile · `U = T * S` entries of a union at most.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.sparse.selected_attention import QueryRows

MOST_QUERIES = 16  # of a tile: one bit each
ANY_LENGTH = 1.0  # of a union, as a share of its lists' entries
COMPARED = 16  # entries with which a program compares all others at a time
SCANNED = 8192  # numbers that a program looks at for one that is not finite


class Unions(NamedTuple):
    """What `union_kernel` writes, int32.

    Attributes:
        start: `[tiles, H, U]`, the first key of each block of the union, among all keys. Blocks
            that need no mask come first.
        listed_by: `[tiles, H, U]`, bit `t` is set where query `t` of the tile lists the block.
        count: `[tiles, H]`, entries of the union, or -1 for a tile that is left to others.
        num_whole: `[tiles, H]`, how many of them need no mask.
        T: queries of a tile.
    """

    start: Tensor
    listed_by: Tensor
    count: Tensor
    num_whole: Tensor
    T: int


@triton.jit
def find_bad_kernel(X, IsBad, num_numbers, BLOCK: tl.constexpr):
    """Sets `IsBad [1]` to 1 if a number of `X` is not finite."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + place, mask=place < num_numbers, other=0.0).to(tl.float32)
    is_bad = ~(tl.abs(x) < float("inf"))
    if tl.max(is_bad.to(tl.int32), axis=0) > 0:
        tl.store(IsBad, 1)


@triton.jit
def listed(
    BlockIndices, FirstKey, NumVisible, tile, head, entry, R, H, S,
    T: tl.constexpr, BS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Of entries `t * SP + slot` of a tile's lists: the query `t`, whether the entry names a block
    that it sees, that block's first key among all keys, and where the query's sight ends."""
    t, slot = entry // SP, entry % SP
    query = tile * T + t
    is_slot = (query < R) & (slot < S)
    ids = tl.load(BlockIndices + (query * H + head) * S + slot, mask=is_slot, other=-1)
    first = tl.load(FirstKey + query, mask=query < R, other=0)
    num_visible = tl.load(NumVisible + query, mask=query < R, other=0)
    is_visible = (ids >= 0) & (ids < tl.cdiv(num_visible, BS))
    return t, is_visible, first + ids * BS, first + num_visible


@triton.jit(do_not_specialize=["R", "S", "most"])
def union_kernel(
    BlockIndices, FirstKey, NumVisible, IsBad, Start, ListedBy, Count, NumWhole, R, H, S, most,
    T: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Reads `BlockIndices [R, H, S]`, `FirstKey [R]`, `NumVisible [R]`, `IsBad [1]`; writes the
    tensors of `Unions`. The grid is `(tiles, H)`.

    Every entry is compared with every other, `STEP` at a time: an entry stays if none before it
    names the same block. A union longer than `most` times the entries of its lists is not wanted.
    None is where a list names a block twice, or where a key or a value is not finite.
    `SP` is `S` rounded up to a power of two.
    """
    # -- locate the program --
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    N: tl.constexpr = T * SP
    entry = tl.arange(0, N)
    own_t, is_visible, start, row_end = listed(
        BlockIndices, FirstKey, NumVisible, tile, head, entry, R, H, S, T, BS, SP
    )

    # -- compare --
    is_first = is_visible
    is_twice = entry < 0
    listed_by = tl.zeros([N], tl.int32)
    sees_whole = row_end >= start + BS
    if BS % BT:  # the last step of a block reaches past its end
        sees_whole = start < 0
    for other in range(0, N, STEP):
        place = other + tl.arange(0, STEP)
        t, is_there, other_start, other_end = listed(
            BlockIndices, FirstKey, NumVisible, tile, head, place, R, H, S, T, BS, SP
        )
        same = is_there & (other_start == start[:, None])  # [N, STEP]
        before = same & (place < entry[:, None])
        is_first &= tl.max(before.to(tl.int32), axis=1) == 0
        again = before & (t == own_t[:, None])
        is_twice |= tl.max(again.to(tl.int32), axis=1) > 0
        listed_by += tl.sum(tl.where(same, 1 << t, 0), axis=1)
        in_part = same & (other_end < other_start + BS)
        sees_whole &= tl.max(in_part.to(tl.int32), axis=1) == 0

    # -- store, the whole blocks first --
    is_whole = (is_first & sees_whole).to(tl.int32)
    is_careful = (is_first & ~sees_whole).to(tl.int32)
    num_whole = tl.sum(is_whole, axis=0)
    count = num_whole + tl.sum(is_careful, axis=0)
    place = tl.where(is_whole > 0, tl.cumsum(is_whole, 0), num_whole + tl.cumsum(is_careful, 0)) - 1
    union = (tile * H + head) * (T * S)
    tl.store(Start + union + place, start, mask=is_first)
    tl.store(ListedBy + union + place, listed_by, mask=is_first)
    num_entries = tl.sum(is_visible.to(tl.int32), axis=0)
    is_wanted = count <= most * num_entries
    # a bit cannot count a block twice, and 0 times what is not finite is not 0
    is_wanted &= (tl.max(is_twice.to(tl.int32), axis=0) == 0) & (tl.load(IsBad) == 0)
    tl.store(Count + tile * H + head, tl.where(is_wanted, count, -1))
    tl.store(NumWhole + tile * H + head, num_whole)


def unions(
    k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, T: int, BT: int,
    most: float = ANY_LENGTH,
) -> Unions:  # fmt: skip
    """The unions of the lists of every `T` neighbours.

    Args:
        k, v: contiguous keys and values; with one number in them that is not finite, no union is
            wanted.
        ids, rows: as in `selected_attention.forward`.
        T: queries of a tile, a power of two of at most `MOST_QUERIES`.
        BT: tokens of a step. Where it does not divide a block, all steps go behind a mask.
        most: of the entries of a tile's lists, the share up to which its union is wanted.
    """
    R, H, S = ids.shape
    num_tiles = triton.cdiv(R, T)
    is_bad = ids.new_zeros(1)
    for x in (k, v):
        find_bad_kernel[(triton.cdiv(x.numel(), SCANNED),)](x, is_bad, x.numel(), BLOCK=SCANNED)
    start, listed_by = (ids.new_empty(num_tiles, H, T * S) for _ in range(2))
    count, num_whole = (ids.new_empty(num_tiles, H) for _ in range(2))
    SP = triton.next_power_of_2(S)
    union_kernel[(num_tiles, H)](
        ids, rows.first_key, rows.num_visible, is_bad, start, listed_by, count, num_whole, R, H, S,
        float(most), T=T, BS=block_size, BT=BT, SP=SP, STEP=min(T * SP, COMPARED),
        num_warps=max(1, T * SP // 64),
    )  # fmt: skip
    return Unions(start, listed_by, count, num_whole, T)
