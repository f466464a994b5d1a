"""Which tiles, warps and pipeline stages the Triton kernels take, by shape.

`tile_sizes` is what `tl.arange` and the tensor cores require. The tables hold measured choices, so
no call of an operator measures anything. Of a table's rows, or of ever smaller tiles (`shrinking`),
the first that fits a program's shared memory is taken; if none fits, the launch reports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from nsa_tutorial.runtime.cached_options import cached_options
from nsa_tutorial.runtime.rounding import next_power_of_2
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, first_that_fits

# Largest group, most bytes of a token (its key and value, padded): tokens of a step, warps, stages.
# Each row's comment has milliseconds of the kernel with pointers, and of the runner-up: H200, torch
# 2.11, Triton 3.6, 16,384 tokens, 4 key/value heads, 1,024 keys a query, bf16. To measure again:
# `python -m nsa_tutorial.bench selected --backend triton --steps --tokens 16384 --dtype bfloat16
# --no-dense` with the groups and widths in question. The first row was measured at 65,536 tokens:
# assets/triton_forward_h200.json. The last one, for wide fp32, was not measured.
LAUNCH_TABLE = (
    (16, 512, 32, 1, 3),  # D 128: 14.7, 15.5 with 2 warps; D 64: 7.1, 7.3 with 2 stages
    (16, 768, 32, 1, 2),  # D 192, DV 128: 4.9, 5.7 with 2 warps
    (16, 1024, 64, 2, 2),  # D 256: 8.0, 8.2 in steps of 32
    (32, 1024, 64, 2, 2),  # D 128: 5.0, 6.0 with 4 warps
    (64, 512, 64, 4, 3),  # D 128: 5.9, 6.1 with 2 stages
    (64, 1024, 64, 4, 2),  # D 256: 17.0, 12.8 in steps of 32; with descriptors, on Hopper, 12.6
    (128, 1024, 64, 8, 2),  # descriptors, D 128: 12.3, 16.7 in steps of 32; D 256: 19.4, 23.8
    (128, 2048, 32, 8, 2),
)


@cached_options
def tile_sizes(G: int, D: int, DV: int) -> dict[str, int]:
    """`GT, DT, DVT`: a group and its widths, rounded up to what a tile's side may be."""
    return {"GT": _side(G), "DT": _side(D), "DVT": _side(DV)}


@functools.cache
def _side(n: int) -> int:
    """The next power of two, as `tl.arange` requires, and at least 16, as the tensor cores do."""
    return max(16, next_power_of_2(n))


def shrinking(*sides: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """`(*sides, num_stages)`, ever smaller: with fewer stages, then with halves of the last side,
    down to 16, then of the one before it."""
    for stages in range(num_stages, 0, -1):
        yield (*sides, stages)
    smaller = list(sides)
    for i in reversed(range(len(sides))):
        while smaller[i] > 16:
            smaller[i] //= 2
            yield (*smaller, 1)


@cached_options
def launch_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, num_warps, num_stages`, from `LAUNCH_TABLE`, as far as `shared_memory` allows.

    Args:
        G, D, DV, BS: heads of a group, widths of keys and values, tokens of a block.
        itemsize: bytes of a number.
        shared_memory: bytes that a program may have.
    """
    tiles = tile_sizes(G, D, DV)
    token_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    query_bytes = tiles["GT"] * tiles["DT"] * itemsize
    fitting = [row for row in LAUNCH_TABLE if tiles["GT"] <= row[0] and token_bytes <= row[1]]
    BT, num_warps, num_stages = (fitting or LAUNCH_TABLE[-1:])[0][2:]
    BT, num_stages = first_that_fits(
        list(shrinking(min(BT, _side(BS)), num_stages=num_stages)),
        lambda BT, stages: query_bytes + stages * BT * token_bytes,
        shared_memory,
    )  # fmt: skip
    return {"BT": BT, "num_warps": num_warps, "num_stages": num_stages}


# Rows of a tile of queries and stages, for the order that walks unions of lists: the first that a
# program can have.
QUERY_TILES = ((64, 3), (64, 2), (64, 1), (32, 1), (16, 1))


@cached_options
def query_tile_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`T, BT, num_warps, num_stages` of the walk along the unions of neighbours' lists: queries of
    a tile, and tokens of a step. Arguments as in `launch_options`."""
    GP, DT, DVT = next_power_of_2(G), _side(D), _side(DV)
    BT = min(64 if itemsize == 2 else 32, _side(BS))
    if BS % BT and BS % 16 == 0:  # whole blocks need whole steps
        BT = BS & -BS
    # the tensor cores take at least 16 rows
    tiles = [
        (max(16, min(max(TR, GP), 16 * GP)), BT, stages)
        for TR, stages in (QUERY_TILES if itemsize == 2 else QUERY_TILES[-2:])
    ]
    TR, BT, num_stages = first_that_fits(
        [*tiles, *((tiles[-1][0], *smaller) for smaller in shrinking(BT, num_stages=1))],
        lambda TR, BT, stages: (TR * DT + stages * BT * (DT + DVT)) * itemsize,
        shared_memory,
    )  # fmt: skip
    return {"T": TR // GP, "BT": BT, "num_warps": max(4, TR // 16), "num_stages": num_stages}


@cached_options
def query_tile_dq_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """The same for the backward."""
    options = query_tile_options(G, D, DV, BS, itemsize, shared_memory)
    return _for_dq(options, options["T"] * next_power_of_2(G), D, DV, itemsize, shared_memory)


@cached_options
def dq_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, num_warps, num_stages` of the backward's walk through the lists. Arguments as in
    `launch_options`."""
    options = launch_options(G, D, DV, BS, itemsize, shared_memory)
    return _for_dq(options, _side(G), D, DV, itemsize, shared_memory)


def _for_dq(
    options: dict[str, int], rows: int, D: int, DV: int, itemsize: int, shared_memory: int
) -> dict[str, int]:
    """The forward's options, but two stages at most, and with room for the gradients of `rows`
    outputs."""
    token_bytes = (_side(D) + _side(DV)) * itemsize

    def size(BT: int, num_stages: int) -> int:
        """Bytes of the rows, of the tokens, and, in fp32, of gradients of scores, which take the
        values' place if there is one stage. The products of a warp group read while all stages hold
        tokens, others while one of them is free."""
        all_stages = rows >= 64 and itemsize == 2
        tokens = BT * (num_stages if all_stages else max(1, num_stages - 1))
        gradients = rows * BT * 4 if itemsize == 4 and num_stages > 1 else 0
        return (rows + tokens) * token_bytes + gradients

    choices = shrinking(options["BT"], num_stages=min(2, options["num_stages"]))
    BT, num_stages = first_that_fits(list(choices), size, shared_memory)
    return options | {"BT": BT, "num_stages": num_stages}


@cached_options
def dkv_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages` of the backward's walk through the inverse lists: keys of a
    program, and rows of a step. Arguments as in `launch_options`."""
    tiles = tile_sizes(G, D, DV)
    row_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    BT, BR = min(64, _side(BS)), 64
    num_stages = 2 if G >= 16 else 3  # small groups gather more rows for a step
    choices = list(shrinking(BT, BR, num_stages=num_stages))
    if BS % 128 == 0 and G >= 16 and itemsize == 2 and row_bytes <= 512:
        choices.insert(0, (128, BR, num_stages))  # rows of a block of 128 are gathered once
    BT, BR, num_stages = first_that_fits(
        choices,
        lambda BT, BR, stages: BT * row_bytes + (stages * row_bytes + 2 * BT * itemsize) * BR,
        shared_memory,
    )  # fmt: skip
    # the accumulators of wide keys and values do not fit the registers of 4 warps
    num_warps = 8 if tiles["DT"] + tiles["DVT"] > 256 or BT > 64 else 4
    return {"BT": BT, "BR": BR, "num_warps": num_warps, "num_stages": num_stages}


MOST_EDGE = 1024


def edge(BS: int) -> int:
    """How many entries of an inverse list a program looks at to find those that see its keys in
    part, which come first. If all of these do, more may follow."""
    return min(next_power_of_2(BS), MOST_EDGE)


def _fitting(
    choices: tuple[tuple[int, int, int, int], ...], bytes_of: Callable[[int, int, int], int],
    shared_memory: int, names: tuple[str, str],
) -> dict[str, int]:  # fmt: skip
    """The first of `choices`, each two sides, warps and stages, of which a program can have
    `bytes_of(side, side, stages)`; the last one if it can have none."""
    found = first_that_fits(
        choices, lambda a, b, warps, stages: bytes_of(a, b, stages), shared_memory
    )
    return dict(zip((*names, "num_warps", "num_stages"), found, strict=True))


# Queries or summaries of a program, those of a step, warps, stages: the first that a program can
# have. `python -m nsa_tutorial.bench compressed --backend triton --steps --dtype bfloat16 --pass
# forward backward` compares them. fp32 uses no tensor cores, so its tiles
# are small.
# The last step of a walk is masked, so in short walks small steps pay. H200, Triton 3.6, bf16, 64
# heads over 4, D 128; 8,192, 16,384 and 32,768 tokens, in microseconds by the profiler: 319, 930
# and 3,097, where the first of `ATTEND_TILES` takes 370, 968 and 2,844.
FEW_SUMMARIES = 1024
SHORT_ATTEND_TILES = (64, 32, 4, 3)
ATTEND_TILES = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
SCORE_TILES = ((64, 128, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1))
DKV_TILES = ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1))
FP32_TILES = ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))


@cached_options
def attend_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY, is_short: bool = False
) -> dict[str, int]:
    """`BQ, BT, num_warps, num_stages` of the walk over the summaries that a tile of queries sees;
    `is_short` if there are no more than `FEW_SUMMARIES`. Other arguments as in `launch_options`."""
    DT, DVT = _side(D), _side(DV)
    choices = ATTEND_TILES if itemsize == 2 else FP32_TILES
    if is_short and itemsize == 2:
        choices = (SHORT_ATTEND_TILES, *choices)
    turned = DT if itemsize == 4 else 0  # fp32 keys, once more as a product takes them
    return _fitting(
        choices, lambda BQ, BT, n: (BQ * DT + BT * (n * (DT + DVT) + turned)) * itemsize,
        shared_memory, ("BQ", "BT"),
    )  # fmt: skip


@cached_options
def score_options(D: int, itemsize: int, shared_memory: int = SHARED_MEMORY) -> dict[str, int]:
    """`BQ, BT, num_warps, num_stages` of the scores that choose. Arguments as in
    `launch_options`."""
    DT = _side(D)
    choices = SCORE_TILES if itemsize == 2 else FP32_TILES
    return _fitting(
        choices,
        # with one head in a group, keys are fetched early too
        lambda BQ, BT, stages: stages * (BQ + BT) * DT * itemsize + BQ * BT * 4,
        shared_memory, ("BQ", "BT"),
    )  # fmt: skip


@cached_options
def pick_options(num_blocks: int) -> dict[str, int]:
    """`BR, num_warps` of the choice: lists of a program, whose scores have to fit the registers.
    Few blocks leave room for more lists, and a single warp need not synchronise."""
    if num_blocks > 2048:
        return {"BR": 1, "num_warps": min(16, num_blocks // 1024)}
    return {"BR": max(1, min(16, 512 // num_blocks)), "num_warps": 1}


@cached_options
def summary_dq_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, num_warps, num_stages` of the backward's walk over summaries. Arguments as in
    `launch_options`."""
    choices = DQ_TILES if itemsize == 2 else tuple((512, *tiles) for tiles in FP32_TILES)
    return _of_width(choices, D, DV, itemsize, shared_memory, ("BQ", "BT"))


@cached_options
def summary_dkv_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages` of the walk over the queries that see a tile of summaries.
    Arguments as in `launch_options`."""
    width = _side(D) + _side(DV)
    choices = DKV_TILES if itemsize == 2 else FP32_TILES
    if width > 256:  # two wide accumulators do not fit the registers
        choices = choices[-2:]
    weights = 4 if itemsize == 4 else 0  # bytes of one in shared memory
    return _fitting(
        choices, lambda BT, BR, n: (BT + n * BR) * width * itemsize + BT * BR * weights,
        shared_memory, ("BT", "BR"),
    )  # fmt: skip


# The same behind the most that both widths may be, padded: of the summaries' `dq_kernel`, and of
# sliding windows. Of the queries' kernels rows of a tile and keys of a step, of `dkv_kernel` the
# other way round.
# With left factors in registers, small steps pay: for summaries and for windows, the first rows
# take 348 and 476 microseconds by the same measure with 8,192 tokens; before, 425 and 532.
DQ_TILES = (
    (256, 64, 32, 4, 3), (512, 128, 64, 8, 2), (512, 64, 64, 4, 2), (512, 64, 32, 4, 2),
    (512, 32, 32, 4, 1),
)  # fmt: skip
WINDOW_TILES = (
    (256, 64, 64, 4, 3), (384, 128, 64, 8, 2), (512, 64, 64, 8, 2), (512, 64, 32, 4, 2),
    (512, 32, 32, 4, 1),
)  # fmt: skip
WINDOW_DQ_TILES = (
    (256, 64, 32, 4, 3), (512, 64, 64, 8, 2), (512, 64, 32, 4, 2), (512, 32, 32, 4, 1),
)  # fmt: skip
WINDOW_DKV_TILES = (
    (256, 64, 32, 4, 4), (512, 64, 32, 8, 2), (512, 64, 32, 4, 2), (512, 32, 32, 4, 1),
)  # fmt: skip
WINDOW_FP32_TILES = ((256, 32, 32, 4, 2), (512, 16, 16, 4, 2), (512, 16, 16, 4, 1))
WINDOW_FP32_DKV_TILES = ((128, 32, 32, 4, 2), (512, 16, 16, 4, 2), (512, 16, 16, 4, 1))


@cached_options
def window_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, BE, num_warps, num_stages` of the walk along a window. Arguments as in
    `launch_options`."""
    choices = WINDOW_TILES if itemsize == 2 else WINDOW_FP32_TILES
    options = _of_width(choices, D, DV, itemsize, shared_memory, ("BQ", "BT"))
    return options | {"BE": _step_at_the_ends(G, options["BQ"], options["BT"], 16)}


@cached_options
def window_dq_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """The same for the backward."""
    choices = WINDOW_DQ_TILES if itemsize == 2 else WINDOW_FP32_TILES
    options = _of_width(choices, D, DV, itemsize, shared_memory, ("BQ", "BT"))
    edge = max(16, options["BT"] // 2)
    return options | {"BE": _step_at_the_ends(G, options["BQ"], options["BT"], edge)}


@cached_options
def window_dkv_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages` of the walk over the queries that see a tile of keys.
    Arguments as in `launch_options`."""
    choices = WINDOW_DKV_TILES if itemsize == 2 else WINDOW_FP32_DKV_TILES
    return _of_width(choices, D, DV, itemsize, shared_memory, ("BT", "BR"))


def _of_width(
    choices: tuple[tuple[int, ...], ...], D: int, DV: int, itemsize: int, shared_memory: int,
    names: tuple[str, str],
) -> dict[str, int]:  # fmt: skip
    """What `_fitting` takes of the `choices` for these widths: two sides, the rows of a tile and
    those of a step."""
    width = _side(D) + _side(DV)
    return _fitting(
        tuple(choice for most_width, *choice in choices if width <= most_width),
        lambda side, step, stages: (side + stages * step) * width * itemsize,
        shared_memory, names,
    )  # fmt: skip


def _step_at_the_ends(G: int, BQ: int, BT: int, edge: int) -> int:
    """Keys of a step behind the mask: `edge`, in place of `BT`, where a tile has few queries, since
    then few keys are seen by only some of them."""
    return min(BT, edge) if G * edge >= BQ else BT
