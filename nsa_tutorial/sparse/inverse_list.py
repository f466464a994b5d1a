"""The transpose of the lists: which queries list this block?

A query's list says which blocks it attends to, and the gradient of a query is a sum over them. The
gradients of a key and a value are sums over the queries that see them, so their backward needs the
opposite map. One stable sort gives it for all blocks at once. Lists may be short or very long
(every query lists block 0), so the queries of a block are cut into chunks of similar length, one
for each program.

Everything runs on the device of the lists, and the host never waits for it. The number of chunks is
known to the device alone; the tables are as long as they can become at most, and what is over does
no work.

Symbols: `R` query rows · `H` key/value heads · `S` slots · `E = R * H * S` entries of all lists ·
`P` chunks at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.sparse.selected_attention import QueryRows


class InverseList(NamedTuple):
    """The entries of all lists, sorted by the keys that they name.

    A *tile* of keys is a block of a list, or a stretch of keys of a window, for one key/value head:
    tile `i` has head `i % H`. Over one sequence, `i // H` is the block's id; sequences follow each
    other. In runs of rows, all tiles of a head come before those of the next one.

    Attributes:
        entries: `[E]`, an entry's place in what it came from: in the flattened lists `[R, H, S]`,
            in runs of rows in `[H, R, S]`, and for windows in `[H, R]`. Those of one tile follow
            each other, their rows ascending.
        first, last: `[tiles]` int32, where the entries of each tile begin, and where they end.
        start: `[tiles]` int32, each tile's first key in the flattened `[B * M]` keys; anything
            where there are no entries.
        head: `[tiles]` int32, whose keys they are.
        most_entries, most_of_a_tile: how many entries all tiles have at most, and one of them.
    """

    entries: Tensor
    first: Tensor
    last: Tensor
    start: Tensor
    head: Tensor
    most_entries: int
    most_of_a_tile: int


class Chunks(NamedTuple):
    """What each program of the backward walks: int32 tensors `[P]`.

    Attributes:
        first_key, head: where its tile of keys begins, in the flattened `[B * M]` keys, and whose.
        first, last: the entries it walks; none if they are equal.
        part, num_parts: which chunk of its tile this is, and how many the tile has.
        place: where in the workspace its share goes, if the tile has others. The chunks of a tile
            have places that follow each other.
        num_places: how many places there are at most.
        ends: `[tiles]`, where the chunks of each tile end.
    """

    first_key: Tensor
    head: Tensor
    first: Tensor
    last: Tensor
    part: Tensor
    num_parts: Tensor
    place: Tensor
    num_places: int
    ends: Tensor


def invert_lists(
    ids: Tensor, rows: QueryRows, *, block_size: int, num_keys: int,
    needs_grad: Tensor | None = None, run: int | None = None,
) -> InverseList:  # fmt: skip
    """The inverse of the lists `ids [R, H, S]` from `block_list`, over `num_keys = B * M` keys.

    An entry that no query can see (an empty slot, a block of the future) belongs to no tile, nor
    does one of a list that `needs_grad [R, H]` leaves out. With `run`, every `run` rows of a head
    have tiles of their own, and those of the first run come first.
    """
    # -- who is visible --
    (R, H, S), BS, device = ids.shape, block_size, ids.device
    num_blocks = ((rows.num_visible + BS - 1) // BS)[:, None, None]
    if needs_grad is not None:
        num_blocks = num_blocks * needs_grad[:, :, None]
    is_visible = (ids >= 0) & (ids < num_blocks)

    # -- number the blocks --
    # one more block id per sequence, because its last block may be short
    is_new = rows.first_key[1:] != rows.first_key[:-1]
    sequence = F.pad(is_new.cumsum(0, dtype=torch.int32), (1, 0))  # [R]
    first_block = rows.first_key // BS + sequence
    most_blocks, runs = num_keys // BS + rows.num_sequences, 1 if run is None else -(-R // run)
    num_tiles = most_blocks * H * runs
    head = torch.arange(H, dtype=torch.int32, device=device)
    head_of_tile = torch.arange(num_tiles, dtype=torch.int32, device=device)
    if run is None:
        first_tile, step = first_block[:, None] * H + head, H  # [R, H]
        head_of_tile %= H
    else:
        its_run = torch.arange(R, dtype=torch.int32, device=device) // run
        first_tile, step = (first_block + its_run * most_blocks)[:, None], 1
        first_tile = first_tile + head * (most_blocks * runs)  # [R, H]
        head_of_tile //= most_blocks * runs
    tile = torch.add(first_tile[:, :, None], ids, alpha=step)  # [R, H, S]

    # -- sort --
    tile = torch.where(is_visible, tile, num_tiles)  # after all others
    if run is not None:
        tile, ids = tile.transpose(0, 1), ids.transpose(0, 1)
    tile = tile.flatten()
    if num_tiles < 2**15:
        tile = tile.to(torch.int16)  # a radix sort passes over every byte
    # stable: entries of one block stay in the order of their rows
    tile, entries = tile.sort(stable=True)
    bounds = torch.arange(num_tiles + 1, dtype=tile.dtype, device=device)
    bounds = torch.searchsorted(tile, bounds, out_int32=True)

    # -- where each tile begins --
    entry = entries[bounds[:-1].clamp(max=len(entries) - 1)]  # the first of each tile
    row = entry // (H * S) if run is None else entry // S % R
    start = rows.first_key[row] + ids.flatten()[entry] * BS
    most_of_a_tile = min(R, run or R)
    return InverseList(
        entries, bounds[:-1], bounds[1:], start, head_of_tile, R * H * S, most_of_a_tile
    )


def invert_windows(
    rows: QueryRows, *, window_size: int, tile_size: int, num_keys: int, num_heads: int
) -> InverseList:
    """The inverse of the windows: the queries that see some of a tile's keys are a run of rows, and
    nothing has to be sorted."""
    R, H, device = len(rows.first_key), num_heads, rows.first_key.device
    end = rows.first_key + rows.num_visible  # both ascend from row to row
    start = torch.maximum(rows.first_key, end - window_size)
    key = torch.arange(0, num_keys, tile_size, dtype=torch.int32, device=device)  # first of a tile
    first = torch.searchsorted(end, key, right=True, out_int32=True)
    last = torch.searchsorted(start, key + tile_size - 1, right=True, out_int32=True)
    last = torch.maximum(first, last)
    head = torch.arange(H, dtype=torch.int32, device=device)
    first, last = ((x[:, None] + head * R).flatten() for x in (first, last))  # entries are [H, R]
    tiles_of_a_row = min(len(key), (window_size - 2) // tile_size + 2)
    entries = torch.arange(H * R, device=device)
    most_entries = H * R * tiles_of_a_row
    # of a tile's own keys, and of the windows that reach into it from two sequences
    most_of_a_tile = min(R, tile_size + 2 * (window_size - 1))
    start = key.repeat_interleave(H, output_size=len(key) * H)
    head = head.repeat(len(key))
    return InverseList(entries, first, last, start, head, most_entries, most_of_a_tile)


def most_chunks(
    num_tiles: int, most_entries: int, most_of_a_tile: int, length: int
) -> tuple[int, int]:  # fmt: skip
    """How many chunks there are at most, and how many of them share a tile with others."""
    most_shares = most_entries // length if most_of_a_tile >= 2 * length else 0
    return min(num_tiles, most_entries) + most_shares, most_shares


def chunks(inverse: InverseList, *, length: int) -> Chunks:
    """Cut the entries of every tile into equal shares of `length` to `2 * length`; fewer entries
    are one chunk, and without entries there is none.

    Chunks are in the order of their tiles. Long lists belong to early keys, which more queries can
    see, so the long work comes first.
    """
    count = inverse.last - inverse.first  # [tiles]
    sizes = (len(count), inverse.most_entries, inverse.most_of_a_tile)
    most, most_shares = most_chunks(*sizes, length)
    num_parts = (count // length).clamp(min=1, max=None if most_shares else 1)
    num_parts = torch.where(count > 0, num_parts, 0)
    end = num_parts.cumsum(0, dtype=torch.int32)  # of each tile's chunks
    chunk = torch.arange(most, dtype=torch.int32, device=count.device)
    tile = torch.searchsorted(end, chunk, right=True)  # [P]
    exists = tile < len(end)
    tile = tile.clamp(max=len(end) - 1)
    parts = num_parts[tile].clamp(min=1)
    part = chunk - (end[tile] - num_parts[tile])
    start, total = inverse.first[tile], count[tile].long()
    first = start + total * part // parts
    last = torch.where(exists, start + total * (part + 1) // parts, first)
    is_share = exists & (parts > 1)
    place = is_share.cumsum(0, dtype=torch.int32) - 1
    columns = (inverse.start[tile], inverse.head[tile], first, last, part, parts, place)
    return Chunks(*(x.to(torch.int32) for x in columns), num_places=most_shares, ends=end)
