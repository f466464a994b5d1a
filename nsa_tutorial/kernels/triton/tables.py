"""The tables of the backward, in Triton: what `kernels.tables` makes of some sixty small operations
of PyTorch's, in four kernels and a sort for lists, and in one for windows and for summaries.

`number_kernel` names each entry's tile of keys; after the sort, `entry_kernel` looks up the
entries' rows and finds where each tile begins, `part_kernel` counts the chunks, and `chunk_kernel`
writes them.
The tables are those of `sparse.inverse_list` (chapter 13), number by number.

Symbols: `R` query rows · `H` key/value heads · `S` slots · `E = R * H * S` entries · `P` chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.sparse.inverse_list import Chunks, most_chunks
from nsa_tutorial.sparse.selected_attention import QueryRows

BLOCK = 1024  # entries, tiles, chunks or rows that a program takes at a time
SCAN = 8192  # rows that are counted at a time
MOST_INT16 = 2**15
MOST = 2**31 - 1  # keys: more than any window


@triton.jit
def number_above(Sorted, x, n, STEPS: tl.constexpr):
    """How many of the first `n` numbers of `Sorted`, in ascending order, are at most `x`; `STEPS`
    halve any `n`."""
    low = tl.zeros_like(x)
    high = tl.zeros_like(x) + n
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        is_less = is_open & (tl.load(Sorted + middle, mask=is_open, other=0) <= x)
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_open & ~is_less, middle, high)
    return low


@triton.jit(do_not_specialize=["R", "S", "num_tiles"])  # new lengths, same kernel
def number_kernel(
    BlockIndices, FirstKey, NumVisible, Sequence, LSE2, Tile, RowEnd, R, H, S, num_tiles,
    G: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads `BlockIndices [R, H, S]`, the rows, the number `Sequence [R]` of each row's sequence
    (None: all have the same) and `LSE2 [R, H, G]`; writes `Tile [E]` and `RowEnd [R]`. The grid is
    `(cdiv(E, BLOCK),)`.

    An entry that no query can see, or of whose list no loss asks for, gets the tile behind all.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = entry // S
    row = group // H
    is_entry = row < R
    ids = tl.load(BlockIndices + entry, mask=is_entry, other=-1)
    first_key = tl.load(FirstKey + row, mask=is_entry, other=0)
    num_visible = tl.load(NumVisible + row, mask=is_entry, other=0)
    lse2 = tl.load(LSE2 + group.to(tl.int64) * G, mask=is_entry, other=0.0)
    needs_grad = lse2 != float("inf")
    first_block = first_key // BS
    if Sequence is not None:
        first_block += tl.load(Sequence + row, mask=is_entry, other=0)
    is_visible = (ids >= 0) & (ids < tl.cdiv(num_visible, BS)) & needs_grad
    tile = (first_block + tl.where(is_visible, ids, 0)) * H + group % H
    tile = tl.where(is_visible, tile, num_tiles)
    tl.store(Tile + entry, tile.to(Tile.dtype.element_ty), mask=is_entry)
    is_first = is_entry & (entry % (H * S) == 0)
    tl.store(RowEnd + row, first_key + num_visible, mask=is_first)


@triton.jit(do_not_specialize=["E", "S", "num_tiles"])
def entry_kernel(
    Tile, Entries, LSE2, SlotScale, Rows, Factors, Bounds, E, H, S, num_tiles,
    G: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Reads `Tile [E]`, sorted, and the `Entries [E]` in this order; writes `Rows [E]`, `Factors
    [E]` if there is a `SlotScale [R, H, S]`, and `Bounds [num_tiles + 1]`, where the entries of
    each tile begin. The grid is `(cdiv(max(E, num_tiles + 1), BLOCK),)`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # -- rows --
    is_entry = place < E
    entry = tl.load(Entries + place, mask=is_entry, other=0).to(tl.int32)
    group = entry // S
    row = group // H
    lse2 = tl.load(LSE2 + group.to(tl.int64) * G, mask=is_entry, other=0.0)
    is_read = tl.abs(lse2) < float("inf")
    tl.store(Rows + place, tl.where(is_read, row, ~row), mask=is_entry)
    if SlotScale is not None:
        factor = tl.load(SlotScale + entry, mask=is_entry, other=0.0)
        tl.store(Factors + place, factor, mask=is_entry)

    # -- where each tile begins --
    if tl.program_id(0) * BLOCK <= num_tiles:
        bound = number_above(Tile, place - 1, E, STEPS)
        tl.store(Bounds + place, bound, mask=place <= num_tiles)


@triton.jit(do_not_specialize=["num_tiles", "length", "most_parts"])
def part_kernel(Bounds, Ends, ShareEnds, num_tiles, length, most_parts, BLOCK: tl.constexpr):
    """Reads `Bounds [num_tiles + 1]`; writes where the chunks of each tile end among all chunks,
    `Ends [num_tiles]`, and among those of tiles with several, `ShareEnds [num_tiles]`. The grid is
    `(1,)`: a running sum."""
    end = 0
    share_end = 0
    for step in range(0, num_tiles, BLOCK):
        tile = step + tl.arange(0, BLOCK)
        is_tile = tile < num_tiles
        count = tl.load(Bounds + tile + 1, mask=is_tile, other=0)
        count -= tl.load(Bounds + tile, mask=is_tile, other=0)
        parts = tl.minimum(tl.maximum(count // length, 1), most_parts)
        parts = tl.where(count > 0, parts, 0)
        shares = tl.where(parts > 1, parts, 0)
        tl.store(Ends + tile, end + tl.cumsum(parts, axis=0), mask=is_tile)
        tl.store(ShareEnds + tile, share_end + tl.cumsum(shares, axis=0), mask=is_tile)
        end += tl.sum(parts, axis=0)
        share_end += tl.sum(shares, axis=0)


@triton.jit(do_not_specialize=["H", "S", "num_tiles", "P"])
def chunk_kernel(
    BlockIndices, FirstKey, Entries, Bounds, Ends, ShareEnds, Columns, H, S, num_tiles, P,
    BS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes `Columns [7, P]`, the tensors of `inverse_list.Chunks` in their order. The grid is
    `(cdiv(P, BLOCK),)`."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_chunk = chunk < P
    tile = number_above(Ends, chunk, num_tiles, STEPS)
    exists = is_chunk & (tile < num_tiles)
    tile = tl.minimum(tile, num_tiles - 1)

    # -- which part of its tile --
    end = tl.load(Ends + tile)
    start = tl.where(tile > 0, tl.load(Ends + tl.maximum(tile - 1, 0)), 0)
    parts = tl.maximum(end - start, 1)
    part = chunk - start
    place = tl.load(ShareEnds + tile) - parts + part

    # -- its entries --
    begin = tl.load(Bounds + tile)
    total = (tl.load(Bounds + tile + 1) - begin).to(tl.int64)
    first = begin + (total * part // parts).to(tl.int32)
    last = begin + (total * (part + 1) // parts).to(tl.int32)
    last = tl.where(exists, last, first)

    # -- its first key --
    entry = tl.load(Entries + begin, mask=exists, other=0).to(tl.int32)
    block_id = tl.load(BlockIndices + entry, mask=exists, other=0)
    first_key = tl.load(FirstKey + entry // (H * S), mask=exists, other=0) + block_id * BS
    columns = (first_key, tile % H, first, last, part, parts, place)
    for i in tl.static_range(7):
        tl.store(Columns + i * P + chunk, columns[i], mask=is_chunk)


def tables_of_lists(
    ids: Tensor, rows: QueryRows, lse2: Tensor, *, block_size: int, num_keys: int,
    share_bytes: int, itemsize: int, slot_scale: Tensor | None = None,
) -> chunks.Tables:  # fmt: skip
    """`kernels.tables.chunks.tables_of_lists`, of `lse2 [R, H, G]`, contiguous."""
    (R, H, S), G = ids.shape, lse2.shape[2]
    E, sizes = R * H * S, {"BLOCK": BLOCK}
    num_tiles = (num_keys // block_size + rows.num_sequences) * H
    tile = ids.new_empty(E, dtype=torch.int16 if num_tiles < MOST_INT16 else torch.int32)
    row_end = ids.new_empty(R)
    sequence = None
    if rows.num_sequences > 1:
        is_new = rows.first_key[1:] != rows.first_key[:-1]
        sequence = F.pad(is_new.cumsum(0, dtype=torch.int32), (1, 0))
    number_kernel[(cdiv(E, BLOCK),)](
        ids, rows.first_key, rows.num_visible, sequence, lse2, tile, row_end, R, H, S, num_tiles,
        G=G, BS=block_size, **sizes,
    )  # fmt: skip
    # stable: entries of one block stay in the order of their rows
    tile, entries = tile.sort(stable=True)
    rows_of_entries, bounds = ids.new_empty(E), ids.new_empty(num_tiles + 1)
    factors = None if slot_scale is None else slot_scale.new_empty(E)
    entry_kernel[(cdiv(max(E, num_tiles + 1), BLOCK),)](
        tile, entries, lse2, slot_scale, rows_of_entries, factors, bounds, E, H, S, num_tiles,
        G=G, STEPS=E.bit_length(), **sizes,
    )  # fmt: skip
    length = chunks.chunk_length(E, G, share_bytes, itemsize)
    P, num_places = most_chunks(num_tiles, E, R, length)
    ends, share_ends = ids.new_empty(2, num_tiles).unbind()
    part_kernel[(1,)](
        bounds, ends, share_ends, num_tiles, length, MOST if num_places else 1, **sizes
    )  # fmt: skip
    columns = ids.new_empty(7, P)
    chunk_kernel[(cdiv(P, BLOCK),)](
        ids, rows.first_key, entries, bounds, ends, share_ends, columns, H, S, num_tiles, P,
        BS=block_size, STEPS=num_tiles.bit_length(), **sizes,
    )  # fmt: skip
    walked = Chunks(*columns.unbind(), num_places=num_places, ends=ends)
    return chunks.Tables(rows_of_entries, factors, rows.first_key, row_end, walked)


@triton.jit
def rows_up_to(FirstKey, NumVisible, x, window, R, STEPS: tl.constexpr, START: tl.constexpr):
    """How many rows' sight ends at `x` or before; with `START`, begins there or before."""
    low = tl.zeros_like(x)
    high = tl.zeros_like(x) + R
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        first = tl.load(FirstKey + middle, mask=is_open, other=0)
        bound = first + tl.load(NumVisible + middle, mask=is_open, other=0)
        if START:
            bound = tl.maximum(first, bound - window)
        is_less = is_open & (bound <= x)
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_open & ~is_less, middle, high)
    return low


@triton.jit(do_not_specialize=["R", "num_keys", "num_tiles"])
def run_kernel(
    FirstKey, NumVisible, LSE2, Runs, NumUnread, RowEnd, R, H, num_keys, num_tiles, window,
    G: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Reads the rows, which ascend, and `LSE2 [R, H, G]`; writes `Runs [4, num_tiles]`, `NumUnread
    [H, R + 1]` and `RowEnd [R]`. The grid is `(H + cdiv(num_tiles, BLOCK),)`: first a program for
    each head, which counts its rows, then one for `BLOCK` tiles of `TILE` keys."""
    if tl.program_id(0) < H:
        head = tl.program_id(0)
        unread = NumUnread + head * (R + 1)
        num_unread = 0
        tl.store(unread, 0)
        for step in range(0, R, SCAN):
            row = step + tl.arange(0, SCAN)
            in_rows = row < R
            lse2 = tl.load(LSE2 + (row.to(tl.int64) * H + head) * G, mask=in_rows, other=0.0)
            is_unread = (~(tl.abs(lse2) < float("inf"))).to(tl.int32)
            count = num_unread + tl.cumsum(is_unread, axis=0)
            tl.store(unread + 1 + row, count, mask=in_rows)
            num_unread += tl.sum(is_unread, axis=0)
            if head == 0:
                end = tl.load(FirstKey + row, mask=in_rows, other=0)
                end += tl.load(NumVisible + row, mask=in_rows, other=0)
                tl.store(RowEnd + row, end, mask=in_rows)
    else:
        tile = (tl.program_id(0) - H) * BLOCK + tl.arange(0, BLOCK)
        in_tiles = tile < num_tiles
        first = tile * TILE
        last = first + TILE - 1
        runs = Runs + tile
        found = rows_up_to(FirstKey, NumVisible, first, window, R, STEPS, False)
        tl.store(runs, found, mask=in_tiles)
        last_key = tl.minimum(last, num_keys - 1)
        found = rows_up_to(FirstKey, NumVisible, last_key, window, R, STEPS, False)
        tl.store(runs + num_tiles, found, mask=in_tiles)
        found = rows_up_to(FirstKey, NumVisible, first, window, R, STEPS, True)
        tl.store(runs + 2 * num_tiles, found, mask=in_tiles)
        found = rows_up_to(FirstKey, NumVisible, last, window, R, STEPS, True)
        tl.store(runs + 3 * num_tiles, found, mask=in_tiles)


def runs_of(
    rows: QueryRows, lse2: Tensor, *, window_size: int, tile_size: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which queries see a tile of keys, where each sees one run of them.

    Args:
        lse2: `[R, H, G]`, infinite or NaN where a row's group is not to be read; the first head of
            a group tells it.
        window_size: keys that a query sees at most; `MOST` for all of its run.
        num_keys: of all sequences.

    Returns:
        `[4, tiles]` int32: the first query that sees some of the tile, the first that sees no less
        than the tile's end, the end of those that see its start, and the end of those that see any;
        `[H, R + 1]` int32, how many rows before each are not to be read; and `[R]` int32, where
        each row's sight ends.
    """
    (R, H, G), num_tiles = lse2.shape, cdiv(num_keys, tile_size)
    runs, row_end = rows.first_key.new_empty(4, num_tiles), rows.first_key.new_empty(R)
    num_unread = rows.first_key.new_empty(H, R + 1)
    run_kernel[(H + cdiv(num_tiles, BLOCK),)](
        rows.first_key, rows.num_visible, lse2, runs, num_unread, row_end, R, H, num_keys,
        num_tiles, window_size, G=G, TILE=tile_size, BLOCK=BLOCK, SCAN=SCAN,
        STEPS=R.bit_length(), num_warps=16,
    )  # fmt: skip
    return runs, num_unread, row_end
