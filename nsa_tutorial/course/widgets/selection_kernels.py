"""Chapter 14's pictures: what each way to choose stores, a running list beside a running softmax, a
network that merges two lists, how seldom a tile of queries may skip a merge, and a list that is
found by halving a range.

`ways` counts bytes. `kept_at_each_step`, `merges` and `halvings` compute what the pictures of these
names draw. The scores are those of the course's real heads (`block_scores`), or random (`merges`).
`ways_panel` and `halving_panel` put controls on two of the pictures, and `measured_table` reads
what was measured.

Nothing here needs Triton or a GPU.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.bench import drawing
from nsa_tutorial.course import costs, heads
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.sheet import Chart, Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.course.widgets.grouped_query_attention import (
    H200_BYTES,
    H200_BYTES_PER_S,
    H200_FLOPS_PER_S,
)
from nsa_tutorial.course.widgets.tilelang_forward import ASSETS
from nsa_tutorial.kernels.tables import cells
from nsa_tutorial.sparse import block_selection
from nsa_tutorial.sparse.compression import num_summaries, summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

MEASURED = ASSETS / "selection_h200.json"
KERNELS_ALONE = ASSETS / "selection_sizes_h200.json"
_NOTHING = "#EDEFF1"
_PALE = "#C6DDEF"

# -- what each way stores --

HEADS, GROUP, WIDTH = 4, 16, 128  # of the examples: 64 query heads over 4 KV heads
LENGTH, STRIDE = 32, 16  # of a summary
TOKENS = tuple(2**power for power in range(12, 18))  # 4,096 … 131,072
BLOCKS = (32, 64, 128, 256)  # tokens of a block
TOP_N = (4, 8, 16, 32, 64)
CHUNKS = tuple(2**power for power in range(10, 18))  # queries


@dataclass(frozen=True)
class Way:
    """One way from scores to lists.

    Attributes:
        memory: bytes that it holds at a time, the lists included.
        traffic: bytes that it writes and reads; each number is written once and read once, the
            lists are written.
    """

    memory: int
    traffic: int

    @property
    def ms(self) -> float:
        """The least time of this traffic, in main memory (data sheet)."""
        return 1e3 * self.traffic / H200_BYTES_PER_S


@functools.cache
def ways(tokens: int, block_size: int, top_n: int, chunk: int) -> dict[str, Way]:
    """By name: every way to get the lists of `HEADS` groups of `GROUP` heads, in fp32."""
    cut = cells.cells_of(tokens, length=LENGTH, stride=STRIDE, block_size=block_size, is_apart=True)
    summaries = 4 * HEADS * tokens * num_summaries(tokens, LENGTH, STRIDE)
    blocks = 4 * HEADS * tokens * cut.shares * cut.per_row
    lists = 4 * HEADS * tokens * top_n
    held = blocks * min(chunk, tokens) // tokens
    return {
        "weights of every head": Way(GROUP * summaries + lists, 2 * GROUP * summaries + lists),
        "weights, summed over a group": Way(summaries + lists, 2 * summaries + lists),
        "block scores": Way(blocks + lists, 2 * blocks + lists),
        "block scores, in chunks": Way(held + lists, 2 * blocks + lists),
        "the lists alone": Way(lists, lists),
    }


def scores_ms(tokens: int) -> float:
    """The least time of one product of all queries with the summaries that they see (data
    sheet)."""
    pairs = costs.summary_keys(tokens, tokens, length=LENGTH, stride=STRIDE)
    return 1e3 * 2 * pairs * HEADS * GROUP * WIDTH / H200_FLOPS_PER_S


def size(number: float) -> str:
    """Bytes in the unit that suits them."""
    unit, name = next(
        (unit, name)
        for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if number >= unit
    )
    number = number / unit
    return f"{number:,.0f} {name}" if number >= 10 else f"{number:.2g} {name}"


def told_ways(tokens: int, block_size: int, top_n: int, chunk: int) -> str:
    """What the panel says about a setting."""
    found = ways(tokens, block_size, top_n, chunk)
    every, chunked = found["weights of every head"], found["block scores, in chunks"]
    fits = "fit" if every.memory <= H200_BYTES else "do not fit"
    blocks = -(-tokens // block_size)
    return (
        f"{tokens:,} tokens, {blocks:,} blocks: the weights of every head take "
        f"{size(every.memory)}, {fits} into one H200, and take {every.ms:.2g} ms to write and "
        f"read. Computing the scores again takes {scores_ms(tokens):.2g} ms at best. Block scores "
        f"of {min(chunk, tokens):,} queries at a time take {size(chunked.memory)} and "
        f"{chunked.ms:.2g} ms, and the lists of {top_n} take "
        f"{size(found['the lists alone'].memory)}."
    )


def draw_ways(
    tokens: int = 65_536, block_size: int = 64, top_n: int = 16, chunk: int = 8192
) -> Picture:
    """What each way holds at a time, and what it moves."""
    found = ways(tokens, block_size, top_n, chunk)
    sheet, low, high = Sheet(8.3, 3.3), 16, 42
    chart = sheet.chart(Place(2.3, 0.62, 5.6, 2.15), (low, high), (len(found), 0))
    limit = math.log2(H200_BYTES)
    for row, way in enumerate(found.values()):
        bars = ((way.memory, "selected", 0.12), (way.traffic, "compressed", 0.5))
        for number, colour, top in bars:
            x = math.log2(number)
            chart.boxes([(low, row + top, x - low, 0.34)], colour)
            told = [(x, row + top + 0.17, size(number))]
            if x - low < 5 or x - 2.7 < limit < x:  # no room inside, or the limit is in the way
                chart.words(told, size=8, ha="left", offset=(4, 0))
                continue
            shade = "white" if colour == "selected" else "text"
            chart.words(told, size=8, colour=shade, ha="right", offset=(-4, 0))
    chart.lines([((limit, 0), (limit, len(found)))], "text", linestyles="--")
    chart.words([(limit, len(found), "one H200")], size=8, ha="left", va="bottom", offset=(4, 2))
    names = [f"{name} (ours)" if name.endswith("chunks") else name for name in found]
    chart.left([row + 0.5 for row in range(len(found))], names, line=False)
    ticks = {20: "1 MiB", 25: "32 MiB", 30: "1 GiB", 35: "32 GiB", 40: "1 TiB"}
    chart.bottom(list(ticks), list(ticks.values()), "bytes, a factor of 32 from tick to tick")
    sheet.legend(2.3, 0.46, {"selected": "held at a time", "compressed": "written and read"})
    every, ours = found["weights of every head"], found["block scores, in chunks"]
    told = f"{tokens:,} tokens: {size(every.memory)} if every weight is stored, "
    return Picture(sheet.figure, told + f"{size(ours.memory)} for block scores in chunks")


def _choice(values: tuple[int, ...], value: int, name: str) -> ipywidgets.SelectionSlider:
    options = [(f"{n:,}", n) for n in values]
    return ipywidgets.SelectionSlider(options=options, value=value, description=name)


def ways_panel() -> Panel:
    """The interactive: n, blocks and queries of a chunk → memory and traffic of each way."""

    def render(tokens: int, block_size: int, top_n: int, chunk: int) -> tuple[Picture, str]:
        setting = (tokens, block_size, top_n, chunk)
        return draw_ways(*setting), told_ways(*setting)

    def limits(tokens: int, **_: object) -> dict[str, list[int]]:
        return {"chunk": [n for n in CHUNKS if n <= tokens]}

    return panel(
        "from scores to lists: what each way stores",
        render,
        limits=limits,
        tokens=_choice(TOKENS, 65_536, "tokens"),
        block_size=_choice(BLOCKS, 64, "tokens of a block"),
        top_n=_choice(TOP_N, 16, "n, blocks of a list"),
        chunk=_choice(CHUNKS, 8192, "queries of a chunk"),
    )


# -- scores of real heads --

BS, LOCAL = 16, 2  # tokens of a block, latest blocks forced
SIZES = {"length": 8, "stride": 4}  # summaries in the proportion of the paper's


@functools.cache
def block_scores() -> Tensor:
    """What blocks of 16 tokens are worth to the stored heads' queries: `[512, 4, 32]`, chapter
    07's importance; infinity where a block is forced, -1 where it is hidden."""
    h = heads.load()
    N = h.q.shape[1]
    k_cmp, v_cmp = (ops.compress(x, **SIZES) for x in (h.k, h.v))
    _, lse = ops.compressed_attention(h.q, k_cmp, v_cmp, **SIZES, return_lse=True)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=h.q.device)
    overlap = block_selection.overlap_weights(**SIZES, block_size=BS, num_blocks=N // BS)
    summaries = summary_rows(rows, N, **SIZES, cu_seqlens=None)
    scale = h.q.shape[-1] ** -0.5
    scores = block_selection.importance(
        h.q, k_cmp, summaries, lse, overlap=overlap, scale=scale
    )[0]  # fmt: skip
    block, own = torch.arange(N // BS), torch.arange(N)[:, None, None] // BS
    scores = scores.masked_fill((block == 0) | (block > own - LOCAL), math.inf)
    return scores.masked_fill(block > own, -1)


def is_forced(query: int) -> np.ndarray:
    """Which blocks a query takes in any case, `[NB]`."""
    return torch.isinf(block_scores()[query, 0]).numpy()


# -- a running list beside a running softmax --


def kept_at_each_step(scores: Tensor, n: int, BT: int) -> list[list[int]]:
    """The best `n` of the blocks seen after each step of `BT`, the best first.

    Args:
        scores: `[NB]`; -1 hides a block.
    """
    found = []
    for end in range(BT, len(scores) + BT, BT):
        best, ids = scores[:end].sort(descending=True, stable=True)
        found.append(ids[best >= 0][:n].tolist())
    return found


def draw_running(query: int = 505, head: int = 3, n: int = 4, BT: int = 8) -> Picture:
    """One query's block scores in steps, and what a softmax and a list carry from step to step."""
    scores = block_scores()[query, head]
    scores = torch.where(torch.isinf(scores), 0.0, scores)  # nothing is forced yet
    kept = kept_at_each_step(scores, n, BT)
    steps, blocks = len(kept), len(scores)
    sheet = Sheet(8.3, 3.5)
    top = 1.12 * float(scores.max())
    chart = sheet.chart(Place(1.15, 0.5, 6.9, 1.15), (0, blocks), (0, top))
    values, last = scores.clamp(min=0).tolist(), set(kept[-1])
    colours = ["selected" if block in last else _PALE for block in range(blocks)]
    chart.boxes([(block + 0.1, 0, 0.8, value) for block, value in enumerate(values)], colours)
    edges = [[(step * BT, 0), (step * BT, top)] for step in range(1, steps)]
    chart.lines(edges, "faint", linestyles=":")
    numbers = range(0, blocks, 4)
    chart.bottom([block + 0.5 for block in numbers], list(numbers), "block")
    chart.left([0, round(top / 2, 1)], None, "score")
    table = sheet.chart(Place(1.15, 2.25, 6.9, 1.15), (0, steps), (3, 0))
    merged, entered = 0, set()
    for step, ids in enumerate(kept):
        seen = scores[: (step + 1) * BT].clamp(min=0)
        table.words([(step + 0.5, 0.35, f"{seen.max():.2f}, {seen.sum():.2f}")], size=9)
        before = kept[step - 1] if step else []
        merged += len(set(ids) - set(before))
        entered |= set(ids)
        _draw_list(table, step, ids, set(ids) - set(before))
    told = ["the softmax:\nlargest, sum", "the list:\nbest first"]
    table.left([0.35, 1.6], told, line=False)
    names = {"selected": f"the best {n} of all", "query": "new in this step", _PALE: "all others"}
    sheet.legend(2.6, 3.32, names)
    again = merged - len(entered)
    told = (
        f"Of {blocks} blocks, {merged} entered the list of {n}; {merged - len(kept[-1])} left, and "
    )
    return Picture(sheet.figure, told + f"{again or 'none'} came back")


def _draw_list(chart: Chart, step: int, ids: list[int], new: set[int]) -> None:
    wide = 0.19
    for i, block in enumerate(ids):
        x = step + 0.12 + i * wide
        colour = "query" if block in new else _PALE
        chart.boxes([(x, 1.2, 0.9 * wide, 0.8)], colour)
        words = [(x + 0.45 * wide, 1.6, block)]
        chart.words(words, size=8.5, colour="white" if block in new else "text")


# -- a network that merges two lists --


def merge_stages(a: list[int], b: list[int]) -> list[list[int]]:
    """The numbers after each stage of `course.kernels.running_top_n.best_of_two`, the mirror's
    first."""
    x = [max(pair) for pair in zip(a, reversed(b), strict=True)]
    stages, distance = [x], len(x) // 2
    while distance:
        x = list(x)
        for i in range(len(x)):
            if not i & distance:
                x[i], x[i + distance] = (
                    max(x[i], x[i + distance]), min(x[i], x[i + distance])
                )  # fmt: skip
        stages.append(x)
        distance //= 2
    return stages


def draw_network(a: list[int] | None = None, b: list[int] | None = None) -> Picture:
    """Two sorted lists, their mirror, and the stages that put the better half in order."""
    a = [95, 81, 62, 60, 44, 23, 12, 5] if a is None else a
    b = [88, 74, 71, 39, 31, 17, 9, 2] if b is None else b
    n, stages = len(a), merge_stages(a, b)
    sheet = Sheet(8.3, 3.9)
    step, wide, left, top = 0.6, 0.56, 2.6, 0.62
    rows = [a, b[::-1], *stages]
    labels = ["the best so far", "the new list, backwards", "the larger of each pair"]
    distance = n // 2
    while distance:
        told = f"places {distance} apart" if distance > 1 else "neighbours"
        labels.append(f"{told}: the larger goes left")
        distance //= 2
    tops = [top, top + 0.44, *(top + 0.5 + step * (i + 1) for i in range(len(stages)))]
    of_a = set(a)

    def path(number: int, start: tuple[float, float], end: tuple[float, float]) -> None:
        sheet.lines([[start, end]], "selected" if number in of_a else "compressed", 1.6)

    for i, number in enumerate(stages[0]):
        x = left + (i + 0.45) * wide
        path(number, (x, tops[1] + 0.3), (x, tops[2]))
    for stage in range(1, len(stages)):
        distance, before = n >> stage, stages[stage - 1]
        high, low = tops[stage + 1] + 0.3, tops[stage + 2]
        for i in range(n):
            other = i ^ distance
            has_moved = (before[i] - before[other]) * (other - i) < 0  # the larger goes left
            x, y = (left + (j + 0.45) * wide for j in (i, other if has_moved else i))
            path(before[i], (x, high), (y, low))
    for row, numbers in enumerate(rows):
        pale = row < 2
        for i, number in enumerate(numbers):
            stays = not pale or number in stages[0]
            colour = "selected" if number in of_a else "compressed"
            colour = colour if stays else _NOTHING
            x = left + i * wide
            sheet.boxes([(x, tops[row], 0.9 * wide, 0.3)], colour)
            words = [(x + 0.45 * wide, tops[row] + 0.15, number)]
            shade = "white" if stays and colour == "selected" else "text"
            sheet.words(words, size=9.5, colour=shade)
        sheet.words([(left - 0.15, tops[row] + 0.15, labels[row])], size=9, ha="right")
    compared = n + (n // 2) * (len(stages) - 1)
    told = f"{n} comparisons tell which {n} stay, and {compared - n} more put them in order"
    return Picture(sheet.figure, told)


# -- when to merge, and when to skip --

MERGED_BLOCKS, MERGED_STEP, MERGED_N, MERGED_QUERIES = 512, 32, 16, 1024
TILES = (1, 2, 128)


@functools.cache
def merges() -> Tensor:
    """Whether each of 1,024 queries finds a new block in each step, `[queries, steps]`: random
    scores of 512 blocks, lists of 16."""
    shape = (1, MERGED_BLOCKS)
    scores = drawing.drifting("random", MERGED_QUERIES, shape, torch.float32, "cpu")[0, :, 0]
    found = []
    for start in range(0, MERGED_BLOCKS, MERGED_STEP):
        best = scores[:, start : start + MERGED_STEP].amax(1)
        if start < MERGED_N:
            found.append(torch.ones(MERGED_QUERIES, dtype=torch.bool))
            continue
        nth = scores[:, :start].topk(MERGED_N).values[:, -1]
        found.append(best > nth)
    return torch.stack(found, 1)


def share_of_tiles(rows: int) -> Tensor:
    """The share of tiles of `rows` queries of which at least one finds a new block, `[steps]`."""
    return merges().unflatten(0, (-1, rows)).any(1).double().mean(0)


def draw_skips() -> Picture:
    """How many tiles must merge in each step, by their number of queries."""
    sheet = Sheet(8.3, 3.2)
    steps = MERGED_BLOCKS // MERGED_STEP
    chart = sheet.chart(Place(1.0, 0.55, 5.5, 2.1), (1, steps), (0, 100))
    for rows, colour in zip(TILES, ("query", "compressed", "selected"), strict=True):
        share = (100 * share_of_tiles(rows)).tolist()
        curve = list(enumerate(share, 1))
        chart.lines([curve], colour, 3)
        name = "single query" if rows == 1 else f"tile of {rows}"
        told = [(steps, share[-1], f"{name}: {share[-1]:.0f}%")]
        chart.words(told, size=9.5, ha="left", offset=(7, 0))
    chart.bottom([1, *range(4, steps + 1, 4)], None, f"step of {MERGED_STEP} blocks")
    chart.left([0, 50, 100], ["0%", "50%", "100%"], "must merge")
    found = 100 * share_of_tiles(1)[-1]
    told = f"The last step: {100 - found:.0f}% of single queries could skip it, "
    skipped = 100 * (1 - share_of_tiles(TILES[-1])[-1])
    return Picture(sheet.figure, told + f"and {skipped:.0f}% of tiles of {TILES[-1]}")


# -- a list, found by halving a range --

HALVING_N = (4, 8, 12)
SHOWN = 10  # ranges, the latest ones


@dataclass(frozen=True)
class Halving:
    """One question: how many blocks have at least `middle`? `low` and `high` are the range before
    it."""

    low: int
    high: int
    middle: int
    count: int


def bits_of(scores: Tensor) -> Tensor:
    """The bits of fp32 scores as integers, -1 where a score is negative, which is hidden."""
    return torch.where(scores < 0, -1, (scores + 0.0).view(torch.int32))


def questions(bits: Tensor, n: int) -> tuple[Halving, ...]:
    """The questions of the exercise's search, which stops early where `pick_kernel` does.

    Args:
        bits: `[NB]`; -1 hides a block.
    """
    low, high, found = 0, 2**31, []
    while high - low > 1:
        middle = low + (high - low) // 2
        count = int((bits >= middle).sum())
        found.append(Halving(low, high, middle, count))
        if count >= n:
            low = middle
        else:
            high = middle
        if count == n:
            break
    return tuple(found)


@functools.lru_cache(maxsize=256)
def halvings(query: int, head: int, n: int) -> tuple[Halving, ...]:
    """The questions that lead to one list of the stored heads."""
    return questions(bits_of(block_scores()[query, head]), n)


def nth_best(bits: Tensor, n: int) -> tuple[int, int]:
    """The bits of the `n`-th best, and how many questions found them: the search that does not stop
    early."""
    low, high, asked = 0, 2**31, 0
    while high - low > 1:
        middle, asked = (low + high) // 2, asked + 1
        is_enough = int((bits >= middle).sum()) >= n
        low, high = (middle, high) if is_enough else (low, middle)
    return low, asked


def bits_at(value: float) -> int:
    """The bits of an fp32 number, as an integer."""
    return int(np.float32(value).view(np.int32))


def value_of(bits: int) -> float:
    """The fp32 number with these bits."""
    return float(np.array(bits, dtype=np.int32).view(np.float32))


def told_halving(query: int, head: int, n: int, question: int) -> str:
    """What one question asks, and what follows."""
    found = halvings(query, head, n)
    h = found[question - 1]
    follows = "too few: the range keeps its lower half"
    if h.count > n:
        follows = "enough: the range keeps its upper half"
    elif h.count == n:
        follows = "exactly as many as the list has places: these are the blocks"
    if question == len(found) and h.count != n:
        follows += ", and is down to one number"
    visible = int((block_scores()[query, head] >= 0).sum())
    return (
        f"Query {query}, KV head {head}, {visible} visible blocks, a list of {n}. Question "
        f"{question} of {len(found)}: how many blocks have a score of at least "
        f"{value_of(h.middle):.3g}? {h.count}, {follows}."
    )


def _short(score: float) -> str:
    """A score in few characters, for a label."""
    return f"{score:.0e}" if 0 < score < 1e-3 else f"{score:.2g}"


def draw_halving(query: int = 505, head: int = 3, n: int = 8, question: int = 8) -> Picture:
    """The blocks by their bits, and the ranges of the questions so far."""
    scores, found = block_scores()[query, head], halvings(query, head, n)
    bits, forced = bits_of(scores).numpy(), is_forced(query)
    h, blocks = found[question - 1], len(bits)
    sheet = Sheet(8.3, 3.9)
    strip = Place(0.75, 0.62, 7.2, 0.3)
    wide = strip.width / blocks
    places = [(strip.left + i * wide, strip.top, 0.9 * wide, strip.height) for i in range(blocks)]
    colours = np.where(bits >= h.middle, "selected", _PALE)
    colours = np.where(bits < 0, "masked", colours).tolist()
    sheet.boxes(places, colours)
    words = [(x + 0.45 * wide, strip.top + 0.15, i) for i, (x, *_) in enumerate(places)]
    shades = ["white" if colour == "selected" else "text" for colour in colours]
    sheet.words(words, size=8, colour=shades)
    names = {"selected": "at least the middle", _PALE: "below", "masked": "the future"}
    sheet.legend(0.75, 0.46, names)
    least, most = bits_at(1e-4), bits_at(100.0)
    chart = sheet.chart(Place(0.75, 1.2, 6.1, 2.2), (least, most), (SHOWN + 1.6, 0))
    x = np.clip(bits[(bits >= 0) & ~forced], least, most)
    for is_enough, colour in ((False, _PALE), (True, "selected")):
        of_kind = [(value, 0.5) for value in x if (value >= h.middle) == is_enough]
        if of_kind:
            chart.dots(of_kind, colour, 5)
    chart.dots([(most, 0.5)], "own block", 7)
    chart.words([(most, 0.5, "forced: ∞")], size=8, ha="left", offset=(8, 0))
    shown = found[:question][-SHOWN:]
    for row, past in enumerate(shown):
        left, right = (min(max(x, least), most) for x in (past.low, past.high))
        colour = "query" if past is h else _PALE
        width = max(right - left, (most - least) / 300)
        chart.boxes([(left, row + 1.4, width, 0.75)], colour)
        if least < past.middle < most:
            chart.lines([((past.middle, row + 1.3), (past.middle, row + 2.25))], "text", 1.2)
        sign = "→" if past.count > n else "←" if past.count < n else "✓"
        told = f"{past.count} reach {_short(value_of(past.middle))}"
        chart.words([(most, row + 1.78, sign)], size=9.5, ha="left", offset=(7, 0))
        chart.words([(most, row + 1.78, told)], size=8.5, ha="left", offset=(24, 0))
    ticks = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0)
    names = [f"{tick:g}" for tick in ticks]
    chart.bottom(
        [bits_at(tick) for tick in ticks],
        names,
        "score, at the place of its bits (smaller ones lie further left)",
    )
    first = question - len(shown) + 1
    numbers = {row + 1.78: first + row for row in range(len(shown))}
    chart.left([0.5, *numbers], ["blocks", *numbers.values()], line=False)
    told = f"Question {question}: {h.count} blocks reach {value_of(h.middle):.2g}, "
    return Picture(sheet.figure, told + f"and the list has {n} places")


def halving_panel() -> Panel:
    """The interactive: one query's list, question by question."""

    def render(query: int, head: int, n: int, question: int) -> tuple[Picture, str]:
        setting = (query, head, n, question)
        return draw_halving(*setting), told_halving(*setting)

    def limits(query: int, head: int, n: int, **_: object) -> dict[str, range]:
        return {"question": range(1, len(halvings(query, head, n)) + 1)}

    N, H, _ = block_scores().shape
    return panel(
        "a list, found by halving a range",
        render,
        limits=limits,
        query=ipywidgets.IntSlider(505, 0, N - 1, description="query"),
        head=ipywidgets.IntSlider(3, 0, H - 1, description="KV head"),
        n=_choice(HALVING_N, 8, "n"),
        question=ipywidgets.IntSlider(1, 1, 31, description="question"),
    )


# -- what was measured --


@functools.cache
def measured() -> dict:
    """The stored result of `python -m nsa_tutorial.bench`: machine, versions, command, rows."""
    return json.loads(MEASURED.read_text())


def measured_table(tokens: int = 65_536, width: int = 128) -> dict[str, dict[str, float]]:
    """Milliseconds of all of NSA and of its parts, and of dense attention, at one length and width:
    by name, then by pass. Queries are drawn one by one, the lists of neighbours differ."""
    found: dict[str, dict[str, float]] = {}
    for row in measured()["rows"]:
        is_asked = (row["tokens"], row["width"]) == (tokens, width) and row["ms"] is not None
        if is_asked and row["lists"] != "smooth":
            name = row["change"] or ("all of NSA" if row["kernel"] == "triton" else row["kernel"])
            found.setdefault(name, {})[row["direction"]] = row["ms"]
    return found


@functools.cache
def measured_kernels(tokens: int = 65_536) -> tuple[float, float]:
    """Milliseconds of the scoring kernel and of the picking kernel, each by itself, for 64 heads
    over 4 and random queries: another recording than `measured`."""
    rows = json.loads(KERNELS_ALONE.read_text())["rows"]
    asked = {"tokens": tokens, "group": GROUP, "kv_heads": HEADS, "width": WIDTH, "lists": "random"}
    ms = {
        row["change"]: row["ms"]
        for row in rows
        if all(row[key] == value for key, value in asked.items())
    }
    return ms["scores alone"], ms["pick alone"]
