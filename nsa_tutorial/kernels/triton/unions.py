"""Chapter 16: the unions of neighbours' lists, made on the device, in Triton.

`union_kernel` sorts the entries of a tile's lists in registers. It rejects a tile, with a count of
-1, if its union is too long or if walking it would not be exact; another kernel takes such tiles.

Symbols: those of `selected.forward`; `T` queries of a tile · `U = T * S` entries of a union at
most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2
from nsa_tutorial.sparse.selected_attention import QueryRows

ANY_LENGTH = 1.0  # of a union, as a share of its lists' entries
MOST_QUERIES = tl.constexpr(16)  # of a tile: one bit each
IN_PART = tl.constexpr(2**16)  # the bit behind these: some query sees the block in part
NO_BLOCK = tl.constexpr(2**62)  # behind all keys
SCANNED = 8192  # numbers that a program looks at for one that is too large
# A tile masks rows by their weights, not each score: the score of a block that a row does not list
# may be anything but infinite or NaN.
TOO_LARGE = tl.constexpr(2.0**64)
ENTRIES = 128  # that a warp sorts
MOST_WARPS = 32  # of a program, on every GPU


class Unions(NamedTuple):
    """What `union_kernel` writes, int32.

    Attributes:
        start: `[tiles, H, U]`, the first key of each block of the union, among all keys. Blocks
            that need no mask come first.
        listed_by: `[tiles, H, U]`, bit `t` is set where query `t` of the tile lists the block.
        count: `[tiles, H]`, entries of the union, or -1 for a rejected tile.
        num_whole: `[tiles, H]`, how many of them need no mask.
        T: queries of a tile.
    """

    start: Tensor
    listed_by: Tensor
    count: Tensor
    num_whole: Tensor
    T: int


@triton.jit
def is_any_bad(X, place, num_numbers):
    """1 if one of the numbers of `X` at `place` is `TOO_LARGE` or NaN, else 0."""
    x = tl.load(X + place, mask=place < num_numbers, other=0.0).to(tl.float32)
    return tl.max((~(tl.abs(x) < TOO_LARGE)).to(tl.int32), axis=0)


@triton.jit
def find_bad_kernel(K, V, IsBad, num_keys, num_values, BLOCK: tl.constexpr):
    """Sets `IsBad [1]` to 1 if a number of `K` or of `V` is too large or NaN."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if is_any_bad(K, place, num_keys) + is_any_bad(V, place, num_values) > 0:
        tl.store(IsBad, 1)


@triton.jit
def join(start, num_entries, num_same, flags, other_start, other_entries, other_same, other_flags):
    """Two neighbouring stretches of sorted entries as one: of its last block, how many entries it
    has, how many of these are equal, and the flags of all."""
    same_block = start // MOST_QUERIES == other_start // MOST_QUERIES
    num_entries = other_entries + tl.where(same_block, num_entries, 0)
    num_same = other_same + tl.where(start == other_start, num_same, 0)
    flags = other_flags | tl.where(same_block, flags, 0)
    return other_start, num_entries, num_same, flags


@triton.jit(do_not_specialize=["R", "S", "most"])
def union_kernel(
    BlockIndices, FirstKey, NumVisible, IsBad, Start, ListedBy, Count, NumWhole, R, H, S, most,
    T: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Reads `BlockIndices [R, H, S]`, `FirstKey [R]`, `NumVisible [R]`, `IsBad [1]`; writes the
    tensors of `Unions`. The grid is `(tiles, H)`.

    The entries of a tile's lists are sorted by block, and two scans join those of the same block.
    A tile is rejected if its union is longer than `most` times the entries of its lists, if a list
    names a block twice, or if a key or a value is too large or NaN. `SP` is `S` rounded up to a
    power of two.
    """
    # -- locate the program --
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    N: tl.constexpr = T * SP
    entry = tl.arange(0, N)
    t, slot = entry // SP, entry % SP
    query = tile * T + t

    # -- load the lists --
    is_slot = (query < R) & (slot < S)
    ids = tl.load(BlockIndices + (query * H + head) * S + slot, mask=is_slot, other=-1)
    first = tl.load(FirstKey + query, mask=query < R, other=0)
    num_visible = tl.load(NumVisible + query, mask=query < R, other=0)
    is_visible = (ids >= 0) & (ids < tl.cdiv(num_visible, BS))
    in_part = ((ids + 1) * BS > num_visible) | (BS % BT != 0)

    # -- sort: by block, by query, and the entries of no block behind all others --
    key = (first + ids * BS).to(tl.int64) * MOST_QUERIES + t
    key = tl.where(is_visible, key * 2 + in_part.to(tl.int64), NO_BLOCK)
    key = tl.sort(key)
    is_visible = key < NO_BLOCK
    in_part = (key & 1).to(tl.int32)
    key = key >> 1
    t = (key % MOST_QUERIES).to(tl.int32)

    # -- join --
    flags = (1 << t) + in_part * IN_PART
    ones = tl.full([N], 1, tl.int32)
    _, num_before, num_same, _ = tl.associative_scan((key, ones, ones, flags), 0, join)
    _, _, _, flags = tl.associative_scan((key, ones, ones, flags), 0, join, reverse=True)
    is_first = is_visible & (num_before == 1)
    sees_whole = flags < IN_PART
    is_twice = is_visible & (num_same > 1)

    # -- store, the whole blocks first --
    is_whole = (is_first & sees_whole).to(tl.int32)
    is_careful = (is_first & ~sees_whole).to(tl.int32)
    num_whole = tl.sum(is_whole, axis=0)
    count = num_whole + tl.sum(is_careful, axis=0)
    place = tl.where(is_whole > 0, tl.cumsum(is_whole, 0), num_whole + tl.cumsum(is_careful, 0)) - 1
    union = (tile * H + head) * (T * S)
    tl.store(Start + union + place, (key // MOST_QUERIES).to(tl.int32), mask=is_first)
    tl.store(ListedBy + union + place, flags % IN_PART, mask=is_first)
    num_entries = tl.sum(is_visible.to(tl.int32), axis=0)
    is_wanted = count <= most * num_entries
    # a bit cannot count a block twice, and 0 times infinity is not 0
    is_wanted &= (tl.max(is_twice.to(tl.int32), axis=0) == 0) & (tl.load(IsBad) == 0)
    tl.store(Count + tile * H + head, tl.where(is_wanted, count, -1))
    tl.store(NumWhole + tile * H + head, num_whole)


def num_warps(T: int, S: int) -> int:
    """Warps that sort the entries of `T` lists of `S` slots."""
    return max(1, T * next_power_of_2(S) // ENTRIES)


def find_bad(k: Tensor, v: Tensor) -> Tensor:
    """`[1]` int32: 1 if a number of the contiguous keys or values is not finite, or `TOO_LARGE`,
    else 0."""
    is_bad = torch.zeros(1, dtype=torch.int32, device=k.device)
    numbers = (k.numel(), v.numel())
    find_bad_kernel[(cdiv(max(numbers), SCANNED),)](k, v, is_bad, *numbers, BLOCK=SCANNED)
    return is_bad


def unions(
    k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, T: int, BT: int,
    most: float = ANY_LENGTH, is_bad: Tensor | None = None,
) -> Unions:  # fmt: skip
    """The unions of the lists of every `T` neighbours.

    Args:
        k, v: contiguous keys and values; one number that is not finite, or too large, rejects
            every tile.
        ids, rows: as in `selected_attention.forward`.
        T: queries of a tile, a power of two of at most 16, of which `num_warps` is at most
            `MOST_WARPS`.
        BT: tokens of a step. Where it does not divide a block, all steps go behind a mask.
        most: the longest union, as a share of the entries of its tile's lists.
        is_bad: what `find_bad` found; None asks it.
    """
    R, H, S = ids.shape
    num_tiles = cdiv(R, T)
    is_bad = find_bad(k, v) if is_bad is None else is_bad
    start, listed_by = (ids.new_empty(num_tiles, H, T * S) for _ in range(2))
    count, num_whole = (ids.new_empty(num_tiles, H) for _ in range(2))
    SP = next_power_of_2(S)
    union_kernel[(num_tiles, H)](
        ids, rows.first_key, rows.num_visible, is_bad, start, listed_by, count, num_whole, R, H, S,
        float(most), T=T, BS=block_size, BT=BT, SP=SP, num_warps=num_warps(T, S),
    )  # fmt: skip
    return Unions(start, listed_by, count, num_whole, T)
