"""What a mask shows and costs: one query's list, how much of its attention the list holds, and the
work and traffic of the whole sequence beside dense attention's.

`explore` gives the masks of `masks.Settings` and their `Report`. Three branches are priced, each
computed by one program per query and KV head (`costs.py`), and apart from them the choice of the
blocks: not the making of the summaries, not the gated sum. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsa_tutorial.course import costs
from nsa_tutorial.course.costs import Cost
from nsa_tutorial.course.masks import Masks, Settings, masks_of, source, summary_visible

ITEMSIZE = 2  # bytes: fp16 or bf16
TILE = 64  # queries that share their loads in the dense kernel compared with
BEST = 4  # blocks of the list that true attention would make


@dataclass(frozen=True)
class Item:
    """A line of a query's list.

    Attributes:
        branch: a name of `masks.BRANCHES`.
        block: the block's id; None for the window and for the summaries.
        why: why the query reads it.
        first, last: positions of the tokens behind it, both included.
        keys: keys, or summaries, that the query reads there.
        bytes: of these keys and their values, loaded once for the group.
    """

    branch: str
    block: int | None
    why: str
    first: int
    last: int
    keys: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """What a mask shows and costs.

    Attributes:
        items: the list of one query.
        density: share of all causal pairs that the selected branch or the window sees token by
            token.
        query_density: the same for the one query.
        keys: by branch (`"compressed"`, `"selected"`, `"window"`), what each query loads `[N]`.
        branches: the cost of each branch over the whole sequence, one group of heads.
        cost: their sum.
        choice: the cost of choosing the blocks: the summaries' scores once more. It is in no
            branch.
        dense: the cost if every query loaded all of its past in the same way.
        tiled: the cost of a dense kernel in which `TILE` queries share their loads.
    """

    items: tuple[Item, ...]
    density: float
    query_density: float
    keys: dict[str, np.ndarray]
    branches: dict[str, Cost]
    cost: Cost
    choice: Cost
    dense: Cost
    tiled: Cost

    @property
    def listed(self) -> list[int]:
        """The ids of the query's blocks."""
        return [item.block for item in self.items if item.block is not None]


def report(
    settings: Settings, masks: Masks, query: int, *, G: int = 4, D: int = 128, DV: int = 128
) -> Report:
    """Lists and prices what `masks` from `branch_masks` show, for `query` and for the whole
    sequence.

    Args:
        settings: that the masks were made with.
        masks: from `branch_masks`.
        query: the position whose list is made.
        G, D, DV: query heads of the group, widths of keys and values.
    """
    N = settings.N
    in_blocks = masks["selected"] | masks["own block"]
    seen = in_blocks | masks["window"]
    keys = {
        "compressed": summary_visible(settings).sum(-1),
        "selected": in_blocks.sum(-1),
        "window": masks["window"].sum(-1),
    }
    shape = {"N": N, "D": D, "DV": DV, "HQ": G, "H": 1, "itemsize": ITEMSIZE}
    branches = {
        name: costs.one_program_per_query(int(count.sum()), **shape) for name, count in keys.items()
    }
    lists = Cost(0, 4 * N * settings.top_n, 0)  # block ids, int32
    branches["selected"] = costs.total(branches["selected"], lists)
    summaries = int(keys["compressed"].sum())
    # q, the summaries' keys, the log-sum-exp
    read = (N * G * D + summaries * D) * ITEMSIZE + 4 * N * G
    return Report(
        items=tuple(_items(settings, masks, query, (D + DV) * ITEMSIZE)),
        density=seen.sum() / costs.visible_pairs(N, N),
        query_density=seen[query].sum() / (query + 1),
        keys=keys,
        branches=branches,
        cost=costs.total(*branches.values()),
        choice=Cost(2 * G * summaries * D, read, 4 * N * settings.top_n),
        dense=costs.one_program_per_query(costs.visible_pairs(N, N), **shape),
        tiled=costs.tiled_attention(
            N, N, D, DV, tile_q=TILE, tile_k=TILE, HQ=G, H=1, itemsize=ITEMSIZE
        ),
    )


def _items(settings: Settings, masks: Masks, query: int, bytes_per_key: int) -> Iterator[Item]:
    BS, own = settings.block_size, query // settings.block_size
    in_blocks = np.flatnonzero(masks["selected"][query] | masks["own block"][query])
    for block in np.unique(in_blocks // BS).tolist():
        if block == own:
            why = "own"
        elif block < settings.num_initial:
            why = "first"
        else:
            why = "local" if block > own - settings.num_local else "score"
        first, last = block * BS, min((block + 1) * BS - 1, query)
        keys, branch = last - first + 1, "own block" if block == own else "selected"
        yield Item(branch, block, why, first, last, keys, keys * bytes_per_key)
    window = int(masks["window"][query].sum())
    first = query + 1 - window
    yield Item("window", None, "window", first, query, window, window * bytes_per_key)
    summaries = int(summary_visible(settings)[query].sum())
    if summaries:
        last = (summaries - 1) * settings.stride + settings.length - 1
        read = summaries * bytes_per_key
        yield Item("compressed", None, "summaries", 0, last, summaries, read)


def explore(settings: Settings) -> tuple[Masks, Report]:
    """The masks and the report of these settings' own data."""
    data, masks = source(settings.data, settings.N, settings.group), masks_of(settings)
    G = len(data.logits)
    return masks, report(settings, masks, settings.query, G=G, D=data.D, DV=data.DV)


# -- what true attention says --


def attention_of(settings: Settings) -> np.ndarray:
    """The share of its attention that the query gives to each key of its past, `[query + 1]`: the
    mean over the group's heads."""
    logits = source(settings.data, settings.N, settings.group).logits
    scores = logits[:, settings.query, : settings.query + 1]  # [G, query + 1]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(0)


def best_blocks(settings: Settings) -> list[int]:
    """The list of up to `BEST` blocks, and no more than `top_n`, that true attention would make:
    the query's own block, and those that hold most of its attention."""
    starts = np.arange(0, settings.query + 1, settings.block_size)
    held = np.add.reduceat(attention_of(settings), starts)
    held[-1] = np.inf
    return np.sort(np.argsort(-held, kind="stable")[: min(BEST, settings.top_n)]).tolist()


# -- in words --


def amount(x: float, unit: str = "") -> str:
    """A number of bytes or operations in three digits at most: `640 B`, `1.5 KiB`; `12.3 k`,
    `4.56 M` without a unit."""
    base, prefixes = (1024, ("", "Ki", "Mi", "Gi")) if unit else (1000, ("", "k", "M", "G"))
    power = 0
    while x >= 999.5 and power < 3:
        x, power = x / base, power + 1
    digits = 0 if x >= 99.5 or not power else 1 if x >= 9.95 else 2
    return f"{x:.{digits}f} {prefixes[power]}{unit}".rstrip()


def count(n: int, noun: str) -> str:
    """`1 key`, `2 keys`, `2 summaries`."""
    plural = "summaries" if noun == "summary" else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def quote(text: bytes, position: int) -> str:
    """Which byte of a text stands at a position, with those before it."""
    shown = text[max(position - 11, 0) : position + 1]
    marks = {32: "␣", 10: "↵"}
    written = "".join(chr(b) if 32 < b < 127 else marks.get(b, "·") for b in shown)
    return f"the last byte of “{written}”"
