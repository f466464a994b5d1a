"""Which tiles, warps and pipeline stages the kernels of `selected.by_key_blocks` take, by shape,
and how much fits its workspace."""

from __future__ import annotations

from nsa_tutorial.kernels.triton.launch_options import shrinking, tile_sizes
from nsa_tutorial.runtime.cached_options import cached_options
from nsa_tutorial.runtime.rounding import cdiv, next_power_of_2
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits

WORKSPACE = 2**30  # bytes for the partial outputs of a run of queries
CHUNK_ROWS = 2048  # rows that a program walks, and up to twice as many
MOST_REGISTERS = 168  # of a thread: three programs of four warps on a multiprocessor
MERGED_NUMBERS = 2048  # numbers of the partials that a program merges at a time
# Bytes of a number, most bytes of a token (its key and value, padded): keys and rows of a tile,
# warps, stages.
PARTIAL_TABLE = (
    (2, 512, 128, 64, 4, 3),
    (2, 768, 64, 64, 4, 2),
    (2, 1024, 64, 64, 8, 1),
    (4, 1024, 32, 16, 8, 2),
    (4, 2048, 16, 16, 4, 1),
)
GRADIENT_TABLE = (
    (2, 512, 64, 32, 4, 2),
    (2, 768, 64, 32, 8, 1),
    (2, 1024, 32, 32, 8, 1),
    (4, 1024, 16, 16, 4, 2),
    (4, 2048, 16, 16, 4, 1),
)


def chunk_length(G: int) -> int:
    """Entries of a chunk, for groups of `G` heads."""
    return max(1, CHUNK_ROWS // G)


@cached_options
def merge_sizes(G: int, DV: int) -> dict[str, int]:
    """`BG, BM, num_warps` of `merge_kernel`: heads of a group, and partials of a list, at a
    time."""
    DVT = tile_sizes(G, 1, DV)["DVT"]
    BG = min(next_power_of_2(G), max(1, MERGED_NUMBERS // DVT))
    BM = min(16, max(1, MERGED_NUMBERS // (BG * DVT)))
    return {"BG": BG, "BM": BM, "num_warps": 1}


def size_of_a_run(
    R: int, H: int, G: int, num_partials: int, DV: int, itemsize: int
) -> tuple[int, int]:
    """How many of `H` key/value heads, and of `R` queries, to take at a time: runs of one size,
    whose partials fit `WORKSPACE`, and whose offsets fit 32 bits. Each query head has
    `num_partials` a query, with two numbers each.

    Whole heads come first: all queries that list a block are then in one run, and the block's keys
    and values are loaded once for many of them.
    """
    group_bytes = G * num_partials * (DV * itemsize + 8)
    most = min(WORKSPACE // group_bytes, (2**31 - 1) // (G * num_partials * DV))
    heads = max((n for n in range(1, H + 1) if H % n == 0 and n * R <= most), default=1)
    return heads, cdiv(R, cdiv(R, max(1, most // heads)))


@cached_options
def partial_options(
    D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages`, and perhaps `maxnreg`, of `partial_kernel`, from
    `PARTIAL_TABLE`, as far as `shared_memory` allows; arguments as in
    `launch_options.launch_options`."""
    tiles = tile_sizes(1, D, DV)
    side = tile_sizes(BS, 1, 1)["GT"]
    token_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    fitting = [x[2:] for x in PARTIAL_TABLE if itemsize == x[0] and token_bytes <= x[1]]
    BT, BR, num_warps, num_stages = (fitting or [PARTIAL_TABLE[-1][2:]])[0]
    BT = min(BT, side)
    row_bytes = tiles["DT"] * itemsize
    BT, BR, num_stages = first_that_fits(
        list(shrinking(BT, BR, num_stages=num_stages)),
        lambda BT, BR, n: BT * token_bytes + BR * (n * row_bytes + 4 * tiles["DVT"]),
        shared_memory,
    )  # fmt: skip
    options = {"BT": BT, "BR": BR, "num_warps": num_warps, "num_stages": num_stages}
    if itemsize == 2 and token_bytes <= 512 and BT <= 64:  # wider tiles would spill too much
        options["maxnreg"] = MOST_REGISTERS
    return options


@cached_options
def gradient_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages` of `selected.by_key_blocks_backward.gradients_kernel`, from
    `GRADIENT_TABLE`, as far as `shared_memory` allows; arguments as in
    `launch_options.launch_options`."""
    tiles = tile_sizes(G, D, DV)
    row_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    fitting = [x[2:] for x in GRADIENT_TABLE if itemsize == x[0] and row_bytes <= x[1]]
    BT, BR, num_warps, num_stages = (fitting or [GRADIENT_TABLE[-1][2:]])[0]
    BT = min(BT, tile_sizes(BS, 1, 1)["GT"])
    # tiles of keys and values, the keys again, rows, gradients of scores and of queries
    DT = tiles["DT"]
    BT, BR, num_stages = first_that_fits(
        list(shrinking(BT, BR, num_stages=num_stages)),
        lambda BT, BR, n: (
            BT * (row_bytes + DT * itemsize) + BR * (n * row_bytes + BT * itemsize + 4 * DT)
        ),
        shared_memory,
    )  # fmt: skip
    return {"BT": BT, "BR": BR, "num_warps": num_warps, "num_stages": num_stages}
