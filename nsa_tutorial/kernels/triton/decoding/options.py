"""Into how many parts the Triton kernels of decoding cut a row, and their tiles, warps and
stages."""

from __future__ import annotations

import functools
from typing import NamedTuple

from nsa_tutorial.kernels.tables.parts import parts_of_rows
from nsa_tutorial.kernels.triton.launch_options import shrinking, tile_sizes
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits


class Options(NamedTuple):
    """Sides of a tile; parts of a row; tiles, warps and stages of the two kernels that attend, of
    those that choose, and of the merge."""

    tiles: dict[str, int]
    summary_parts: int
    window_parts: int
    list_parts: int
    steps: dict[str, int]
    list_steps: dict[str, int]
    mass: dict[str, int]
    pick: dict[str, int]
    merge: dict[str, int]


@functools.cache
def decoding_options(
    groups: int, G: int, D: int, DV: int, BS: int, S: int, num_blocks: int, itemsize: int,
    shared_memory: int = SHARED_MEMORY,
) -> Options:  # fmt: skip
    """The options for `groups` query rows times key/value heads; none depends on a length.

    Args:
        groups: query rows times key/value heads.
        G, D, DV, BS, S: heads of a group, widths, tokens of a block, slots of a list.
        num_blocks: blocks that a row may have, a power of two.
        itemsize: bytes of a number.
        shared_memory: bytes that a program may have.
    """
    tiles = tile_sizes(G, D, DV)
    token_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    query_bytes = tiles["GT"] * tiles["DT"] * itemsize
    most = 64 if itemsize == 2 and token_bytes <= 512 else 32 if token_bytes <= 1024 else 16

    def steps(largest: int, stages: int, of_block: int = 0) -> dict[str, int]:
        """Tokens of a step, warps and stages. A loop over blocks of `of_block` tokens has all steps
        of a block in a round, each with tiles of its own, while one stage of the loop is free."""

        def size(BT: int, num_stages: int) -> int:
            held = BT * token_bytes * num_stages
            if of_block:
                held = BT * token_bytes * (num_stages - 1) * -(-of_block // BT)
            if num_stages == 1:  # values take the keys' place
                held = BT * max(tiles["DT"], tiles["DVT"]) * itemsize
            weights = tiles["GT"] * BT * itemsize  # they go from warp to warp
            return query_bytes + held + weights + 1024

        BT, num_stages = first_that_fits(
            list(shrinking(largest, num_stages=stages)), size, shared_memory
        )
        return {"BT": BT, "num_warps": 4, "num_stages": num_stages}

    # measured with `python -m nsa_tutorial.bench decode`, at the shapes of its defaults, in bf16
    block = max(16, min(most, 1 << (BS - 1).bit_length()))
    return Options(
        tiles,
        *parts_of_rows(groups, S),
        steps(min(most, 32), 2) | {"num_warps": 2},
        steps(block, 2, of_block=BS),
        {"BC": 256, "num_warps": 2},
        # few lists: their latency counts, not how many programs there is room for
        {"BR": 1, "num_warps": max(1, min(16, num_blocks // 256))},
        {"BP": 16, "num_warps": 1},
    )
