"""What the backward kernels of both languages read besides the forward's tensors: which queries see
a tile of keys, as flat tables on the device.

Symbols: `R` query rows · `H` key/value heads · `S` slots · `E` entries of all lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.sparse import inverse_list
from nsa_tutorial.sparse.inverse_list import Chunks, InverseList
from nsa_tutorial.sparse.selected_attention import QueryRows

WORKSPACE = 2**28  # bytes for the shares of tiles that are cut into chunks
# Rows (queries times heads of a group) that a program walks, up to twice as many, by bytes of a
# number: fp32 gradients need short sums, because long ones in fp32 lose too many bits.
CHUNK_ROWS = {2: 2**14, 4: 2**8}
# A short text has few chunks of that length: they are cut into so many programs, several for each
# of a GPU's some 130 multiprocessors, as long as one still walks `SHORTEST` rows.
PROGRAMS, SHORTEST = 1536, 2**10


class Tables(NamedTuple):
    """Attributes:
    rows: `[E]` int32, the query row of each entry, in the order of `chunks`; `~row` for a row that
        must not be read, because no loss needs it or because it is not finite.
    factors: `[E]` fp32, the factor on the scores of each entry; None for ones.
    row_start, row_end: `[R]` int32, the run of keys outside of which a row sees nothing.
    chunks: what each program walks.
    """

    rows: Tensor
    factors: Tensor | None
    row_start: Tensor
    row_end: Tensor
    chunks: Chunks


def tables_of_lists(
    ids: Tensor, rows: QueryRows, lse2: Tensor, *, block_size: int, num_keys: int, G: int,
    share_bytes: int, itemsize: int, slot_scale: Tensor | None = None,
) -> Tables:  # fmt: skip
    """The tables of the lists `ids [R, H, S]`.

    Args:
        lse2: `[R, H]`, infinity where no loss asks for a row's group, which then lists nothing, and
            NaN where its queries are not to be read.
        num_keys: `B * M`.
        G, itemsize: query heads of a group, and bytes of their numbers.
        share_bytes: bytes that a chunk needs in the workspace.
        slot_scale: `[R, H, S]` fp32, or None.
    """
    inverse = inverse_list.invert_lists(
        ids, rows, block_size=block_size, num_keys=num_keys, needs_grad=lse2 != torch.inf
    )
    row_of_entry = _row_codes(lse2).flatten()[inverse.entries // ids.shape[2]]
    factors = None if slot_scale is None else slot_scale.flatten()[inverse.entries]
    chunks = _chunks(inverse, G, share_bytes, itemsize)
    row_end = rows.first_key + rows.num_visible
    return Tables(row_of_entry, factors, rows.first_key, row_end, chunks)


def tables_of_windows(
    rows: QueryRows, lse2: Tensor, *, window_size: int, tile_size: int, num_keys: int, G: int,
    share_bytes: int, itemsize: int,
) -> Tables:  # fmt: skip
    """The tables of the windows, for tiles of `tile_size` keys; arguments as in
    `tables_of_lists`."""
    H = lse2.shape[1]
    sizes = {"window_size": window_size, "tile_size": tile_size}
    inverse = inverse_list.invert_windows(rows, **sizes, num_keys=num_keys, num_heads=H)
    row_of_entry = _row_codes(lse2).T.flatten()
    chunks = _chunks(inverse, G, share_bytes, itemsize)
    row_end = rows.first_key + rows.num_visible
    row_start = torch.maximum(rows.first_key, row_end - window_size)
    return Tables(row_of_entry, None, row_start, row_end, chunks)


def _chunks(inverse: InverseList, G: int, share_bytes: int, itemsize: int) -> Chunks:
    length = chunk_length(inverse.most_entries, G, share_bytes, itemsize)
    return inverse_list.chunks(inverse, length=length)


def chunk_length(most_entries: int, G: int, share_bytes: int, itemsize: int) -> int:
    """Entries of a chunk: just enough to fill a program; more if the chunks' shares would overflow
    the workspace, fewer if there would be too few chunks."""
    fitting = -(-most_entries * share_bytes // WORKSPACE)
    return max(1, long_enough(most_entries, G, itemsize), fitting)


def long_enough(walked: int, G: int, itemsize: int) -> int:
    """Queries of a chunk, each with the `G` heads of a group, where all programs together walk
    `walked` of them.

    >>> long_enough(2**22, 16, 2), long_enough(2**17, 16, 2)  # of 65,536 tokens, and of 2,048
    (1024, 128)
    """
    enough = -(-walked // (PROGRAMS * 64)) * 64  # whole steps of a program
    return min(CHUNK_ROWS[itemsize] // G, max(enough, SHORTEST // G))


def _row_codes(lse2: Tensor) -> Tensor:
    row = torch.arange(len(lse2), dtype=torch.int32, device=lse2.device)[:, None]
    return torch.where(lse2.isfinite(), row, ~row)  # [R, H]
