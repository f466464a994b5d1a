"""Into how many parts the TileLang kernels of decoding cut a row, and their tiles and threads."""

from __future__ import annotations

from typing import NamedTuple

from nsa_tutorial.kernels.tables.parts import parts_of_rows
from nsa_tutorial.kernels.tilelang.launch_options import summary_sides, tile_sides
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits


class Options(NamedTuple):
    """Parts of a row, and `BT, threads` of the two kernels that attend."""

    summary_parts: int
    window_parts: int
    list_parts: int
    steps: dict[str, int]
    list_steps: dict[str, int]


def decoding_sides(G: int, D: int, DV: int, itemsize: int) -> tuple[int, int, int]:
    """`GT, DT, DVT`: `tile_sides`, with widths in fp32 as `summary_sides` has them."""
    GT, *widths = tile_sides(G, D, DV)
    return GT, *(summary_sides(D, DV, itemsize) if itemsize == 4 else widths)


def decoding_options(
    groups: int, G: int, D: int, DV: int, BS: int, S: int, itemsize: int,
    shared_memory: int = SHARED_MEMORY,
) -> Options:  # fmt: skip
    """The options for `groups` query rows times key/value heads; none depends on a length.

    Args:
        groups: query rows times key/value heads.
        G, D, DV, BS, S: heads of a group, widths, tokens of a block, slots of a list.
        itemsize: bytes of a number.
        shared_memory: bytes that a program may have.
    """
    GT, DT, DVT = decoding_sides(G, D, DV, itemsize)

    def size(BT: int) -> int:
        """Bytes of queries, of keys and values, of weights, and some."""
        return ((GT + BT) * DT + BT * DVT + GT * BT) * itemsize + 2048

    def steps(most: int) -> dict[str, int]:
        choices = [(BT,) for BT in (64, 32, 16) if most >= BT]
        (BT,) = first_that_fits(choices, size, shared_memory)
        return {"BT": BT, "threads": threads_of(GT, BT, DVT)}

    most = 64 if itemsize == 2 else 32
    return Options(
        *parts_of_rows(groups, S),
        steps(most),
        steps(max(16, min(most, 1 << (BS - 1).bit_length()))),
    )


def threads_of(GT: int, BT: int, DVT: int) -> int:
    """Four warps, which load more at once than one does; fewer where a product has no 16 rows and
    16 columns for each. A group of more than 64 has a warp for every 16 rows."""
    rows = min(GT // 16, 8)
    columns = min(BT, 1 << (DVT.bit_length() - 1)) // 16
    return 32 * max(rows, min(4, rows * columns))
