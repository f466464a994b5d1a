"""Which tiles, threads and pipeline stages the TileLang kernels take, by shape.

`tile_rows` is what the tensor cores require. `launch_options` is the forward's, and reads
`LAUNCH_TABLE`, which holds measured choices, so no call of an operator measures anything.
`dq_options` and `dkv_options` are the backward's.
"""

from __future__ import annotations

import torch

from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits

# Widest tile and longest block up to which a row holds, warps for every 16 rows of a group's tile,
# stages. Behind it milliseconds with 1, 2 and 4 warps: H200, torch 2.11, TileLang 0.1.15, 16,384
# tokens, 4 key/value heads, 1,024 keys a query, fp16, G 16; one run. To measure again: `python -m
# nsa_tutorial.bench selected --steps --tokens 16384` with the widths and blocks in question. What
# more stages do is in assets/tilelang_forward_h200.json.
LAUNCH_TABLE = (
    # D 128: 3.6, 4.4, 4.6; D 64: 1.9, 2.2, 2.8; D 32: 1.1, 1.4, 2.2
    # G 64, D 128: 6.7 with 1, 8.9 with 2
    (128, 64, 1, 1),
    # D 192, DV 128: 13.8, 5.5, 7.2; D 256: 11.7, 7.9, 8.6; D 128, blocks of 128: 5.3, 4.1, 4.8
    (256, 128, 2, 1),
)

# tokens of a step and stages of a walk that gathers them; the first that fits is taken. No choice
# was measured.
TOKEN_STEPS = ((64, 2), (32, 2), (32, 1), (16, 2))


def tile_rows(n: int) -> int:
    """`n` rounded up to what the tensor cores take: a multiple of 16."""
    return -(-n // 16) * 16


def tile_sides(G: int, D: int, DV: int) -> tuple[int, int, int]:
    """`GT, DT, DVT`: a group and its widths, rounded up to what a tile's sides may be.

    A group's rows are a power of two: reductions ask for as many threads. From 64 rows on, products
    are those of a warp group, which want 64 columns.
    """
    GT = max(16, 1 << (G - 1).bit_length())
    side = 64 if GT >= 64 else 16
    return GT, -(-D // side) * side, -(-DV // side) * side


def launch_options(G: int, D: int, DV: int, BS: int) -> dict[str, int]:
    """Threads of a program and stages of its pipeline for a shape, from `LAUNCH_TABLE`; past its
    end its last row.
    """
    fitting = [row for row in LAUNCH_TABLE if row[0] >= max(D, DV) and row[1] >= BS]
    _, _, warps, stages = (fitting or LAUNCH_TABLE[-1:])[0]
    shares = min(tile_sides(G, D, DV)[0] // 16, 8)  # of the rows, a power of two
    return {"threads": 32 * warps * shares, "num_stages": stages}


def _in_registers(G: int, D: int, DV: int, BS: int, itemsize: int) -> bool:
    """Whether a walk along lists keeps weights in registers from one product to the next."""
    threads = launch_options(G, D, DV, BS)["threads"]
    return itemsize == 2 and threads <= 2 * tile_sides(G, D, DV)[0]


def block_tokens(G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY) -> int:
    """The most tokens of a block that the forward holds beside the queries of a group and their
    weights: 16, 32, 64 or 128. Arguments as in `dq_options`."""
    GT, DT, DVT = tile_sides(G, D, DV)

    def size(BT: int) -> int:
        weights = 0 if _in_registers(G, D, DV, BT, itemsize) else GT * BT
        return (GT * DT + BT * (DT + DVT) + weights) * itemsize + 1024

    return first_that_fits([(128,), (64,), (32,), (16,)], size, shared_memory)[0]


def token_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`GR, BT, threads, num_stages` of a walk along a list of tokens, or of blocks of a few: heads
    of a program, of one group, and tokens of a step. Arguments as in `dq_options`."""
    GR, DT, DVT = token_sides(G, D, DV, itemsize)

    def size(BT: int, num_stages: int) -> int:
        """Bytes of queries, of tokens, of weights, and some."""
        tiles = GR * DT + num_stages * BT * (DT + DVT) + GR * BT
        return tiles * itemsize + 8 * BT + 1024

    BT, num_stages = first_that_fits([*TOKEN_STEPS, (16, 1)], size, shared_memory)
    threads = launch_options(GR, D, DV, BT)["threads"]
    return {"GR": GR, "BT": BT, "threads": threads, "num_stages": num_stages}


def token_gradient_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY, adds: bool = False
) -> dict[str, int]:
    """The same for the gradients of such a walk; with `adds`, those of keys and values stand in
    registers, too, and want four warps. Arguments as in `dq_options`."""
    GR, DT, DVT = token_sides(G, D, DV, itemsize)

    def size(BT: int, num_stages: int) -> int:
        """Bytes of rows, of tokens, of weights and gradients, and of some numbers a row."""
        tiles = (GR + num_stages * BT) * (DT + DVT) + 2 * GR * BT
        return tiles * itemsize + 8 * (GR + 2 * BT) + 1024

    BT, num_stages = first_that_fits([*TOKEN_STEPS[1:], (16, 1)], size, shared_memory)
    threads = launch_options(GR, D, DV, BT)["threads"]
    threads = max(128, threads) if adds else threads
    return {"GR": GR, "BT": BT, "threads": threads, "num_stages": num_stages}


def token_sides(G: int, D: int, DV: int, itemsize: int) -> tuple[int, int, int]:
    """`GR, DT, DVT`: heads of a program and widths, rounded up. In fp32 16 heads: its products are
    no matter of tensor cores, and more heads would find no room. Four warps that share 16 heads
    want 32 columns."""
    GT, *sides = tile_sides(G, D, DV)
    return 16 if itemsize == 4 else GT, *(-(-side // 32) * 32 for side in sides)


def dq_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, threads, num_stages` of the backward's walk along the lists: tokens of a step, and a
    warp for every 16 rows of the group, two where rows are wide.

    Args:
        G, D, DV, BS: heads of a group, widths of keys and values, tokens of a block.
        itemsize: bytes of a number.
        shared_memory: bytes that a program may have.
    """
    GT, *widths = tile_sides(G, D, DV)
    token_bytes = sum(widths) * itemsize
    most = tile_rows(BS) if BS <= 32 else 64  # a power of two: threads take equal shares

    def size(BT: int) -> int:
        """Bytes of rows and tokens, of two numbers a row, and of gradients of scores."""
        gradients = 0 if _in_registers(G, D, DV, BT, itemsize) else GT * BT * itemsize
        return (GT + BT) * token_bytes + 8 * GT + gradients

    (BT,) = first_that_fits([(n,) for n in (64, 32, 16) if n <= most], size, shared_memory)
    return {"BT": BT, "threads": launch_options(G, D, DV, BT)["threads"], "num_stages": 1}


def dkv_sides(D: int, DV: int, itemsize: int) -> tuple[int, int]:
    """`DT, DVT` of the pass over key tiles. Past 256 numbers for both together, two warp groups
    share the columns of a product on Hopper: TileLang 0.1.15 finds no layout for halves that are no
    multiples of 16."""
    side = 64 if itemsize == 2 and tile_rows(D) + tile_rows(DV) > 256 else 16
    return -(-D // side) * side, -(-DV // side) * side


def dkv_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, threads, num_stages` of the pass over key tiles: keys of a program, rows of a step,
    and a warp for every 16 keys, two where rows are wide. Arguments as in `dq_options`."""
    width = sum(dkv_sides(D, DV, itemsize))
    in_registers = width <= 256 and itemsize == 2  # the weights

    def size(BT: int, BR: int) -> int:
        """Bytes of keys and values, of queries with their five numbers a row, and of weights."""
        weights = 0 if in_registers else 2 * BT * BR * itemsize
        return BT * width * itemsize + 2 * BR * (width * itemsize + 5 * 4) + weights

    most = tile_rows(BS) if BS <= 32 else 64
    choices = [(most, 64), (most, 32), (min(most, 32), 32), (16, 32)]
    BT, BR = first_that_fits([*choices, (16, 16)], size, shared_memory)
    return {"BT": BT, "BR": BR, "threads": (2 if width <= 256 else 4) * BT, "num_stages": 2}


def has_tma(device: torch.device, *row_bytes: int) -> bool:
    """Whether tiles with rows of that many bytes come by TMA: 16 bytes at a time, from an H100
    on."""
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return is_new and not any(n % 16 for n in row_bytes)


def attend_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages` of the walk over the summaries that a tile of queries sees.
    Arguments as in `dq_options`."""

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries, of keys and values, of clean values, of weights in fp32, and some."""
        DT, DVT = summary_sides(D, DV, itemsize, wide=0)
        weights = BQ * BT if itemsize == 4 else 0
        tiles = BQ * DT + num_stages * BT * (DT + DVT) + BT * DVT
        return (tiles + weights) * itemsize + 2048

    choices = [(128, 128, 2), (128, 64, 2), (64, 64, 2), (64, 64, 1)]
    choices += [(64, 32, 1), (64, 16, 1), (32, 16, 1)]
    if itemsize == 4:
        choices = choices[4:]
    BQ, BT, num_stages = first_that_fits([*choices, (16, 16, 1)], size, shared_memory)
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}


def score_options(
    G: int, D: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages` of the scores that choose. Arguments as in `dq_options`."""

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries and keys, of sums, and of scores."""
        _, DT, _ = tile_sides(BQ, D, D)
        return (num_stages * BQ + BT) * DT * itemsize + BQ * (G + BT) * 4

    choices = [(128, 128, 2), (128, 64, 2), (64, 64, 2), (64, 32, 1), (64, 16, 1), (32, 16, 1)]
    if itemsize == 4:
        choices = choices[3:]
    BQ, BT, num_stages = first_that_fits([*choices, (16, 16, 1)], size, shared_memory)
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}


def pick_threads(num_blocks: int) -> int:
    """Threads that make a list: of at most 32 blocks each, and a warp at least."""
    return min(1024, max(32, num_blocks // 32))


def summary_dq_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages` of the gradient of the queries that see summaries. Arguments as
    in `dq_options`."""

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries with their gradients, of keys and values, of clean keys, of gradients of
        scores in fp32, and some."""
        DT, DVT = summary_sides(D, DV, itemsize, wide=0)
        gradients = BQ * BT if itemsize == 4 else 0
        tiles = (BQ + num_stages * BT) * (DT + DVT) + BT * DT
        return (tiles + gradients) * itemsize + 2048

    choices = [(128, 64, 2), (128, 32, 2), (64, 32, 2), (64, 32, 1), (64, 16, 1), (32, 16, 1)]
    if D > 128:  # larger scores would not fit the registers beside the gradient
        choices = choices[1:]
    if itemsize == 4:
        choices = choices[3:]
    BQ, BT, num_stages = first_that_fits([*choices, (16, 16, 1)], size, shared_memory)
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}


def summary_sides(D: int, DV: int, itemsize: int, *, wide: int = 256) -> tuple[int, int]:
    """`DT, DVT` of the walks over summaries. Past `wide` numbers for both together, the weights are
    read from shared memory by the products of a warp group, which want 64 columns.

    fp32 asks for powers of two: with any other width, TileLang 0.1.15 begins the accumulators of
    the first threads four places too early, or finds no layout.
    """
    if itemsize == 4:
        return tuple(max(16, 1 << (n - 1).bit_length()) for n in (D, DV))
    side = 16 if tile_rows(D) + tile_rows(DV) <= wide else 64
    return -(-D // side) * side, -(-DV // side) * side


def summary_dkv_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, threads, num_stages` of the gradients of summaries: those of a program, and queries
    of a step. Arguments as in `dq_options`."""
    width = sum(summary_sides(D, DV, itemsize))

    def size(BT: int, BR: int, num_stages: int) -> int:
        """Bytes of keys and values, of queries with their numbers, of clean ones, of weights that
        are not in registers, and some."""
        weights = 2 * BT * BR * itemsize if itemsize == 4 or width > 256 else 0
        rows = (num_stages + 1) * BR * width * itemsize + num_stages * BR * 8
        return BT * width * itemsize + rows + weights + 2048

    choices = [(128, 64, 2), (64, 64, 2), (64, 32, 2), (64, 32, 1), (32, 32, 1), (32, 16, 1)]
    if width > 256:  # large accumulators would not fit the registers
        choices = choices[2:]
    if itemsize == 4:
        choices = choices[3:]
    BT, BR, num_stages = first_that_fits([*choices, (16, 16, 1)], size, shared_memory)
    threads = (2 if width <= 256 else 4) * BT
    return {"BT": BT, "BR": BR, "threads": threads, "num_stages": num_stages}
