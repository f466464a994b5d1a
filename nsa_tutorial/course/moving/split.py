"""One query's keys in parts: the scores that split.js reads, how the figure begins, and its picture
at rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from nsa_tutorial.course.figures import Picture

TITLE = "one query, its keys in parts"
GROUP, HEAD, QUERY = 3, 2, 389  # of the stored heads
KEYS, STEP = 96, 4  # scores, and keys of a step
WAYS = ("exp(lse - lse_max)", "exp(lse)", "equal weights")
# tokens in the cache, parts, texts that get a token, how parts are merged, and what is added to
# every score
START = {"tokens": 88, "parts": 8, "texts": 1, "weights": WAYS[0], "lift": 0}


@functools.cache
def scores() -> tuple[float, ...]:
    """The scaled scores of one trained head's query and the 96 keys up to its own, to two
    digits."""
    from nsa_tutorial.course import masks

    found = masks.source(masks.REAL, masks.MAX_N, GROUP).logits[HEAD, QUERY]
    return tuple(np.round(found[QUERY + 1 - KEYS : QUERY + 1], 2).tolist())


def data() -> dict:
    """What split.js reads."""
    from nsa_tutorial.course.widgets.decoding import HEADS, MULTIPROCESSORS

    sizes = {"step": STEP, "heads": HEADS, "multiprocessors": MULTIPROCESSORS}
    return {"scores": list(scores()), **sizes}


class Part(NamedTuple):
    """The keys `first` to `last - 1`, their output and log-sum-exp: 0 and -inf without keys."""

    first: int
    last: int
    o: float
    lse: float


def parts_of(tokens: int, parts: int) -> list[Part]:
    """What the programs leave, as those of `kernels.triton.decoding.attend` cut the keys. A key's
    value is its number, so an output is the mean position of what is attended to."""
    share = math.ceil(math.ceil(tokens / parts) / STEP) * STEP
    found = []
    for part in range(parts):
        first = min(part * share, tokens)
        keys = np.arange(first, min(first + share, tokens))
        weights = np.exp(np.array(scores())[keys])
        with np.errstate(divide="ignore"):
            lse = float(np.log(weights.sum()))
        o = float(weights @ keys / weights.sum()) if len(keys) else 0.0
        found.append(Part(first, first + len(keys), o, lse))
    return found


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel: each part's keys, its `lse` and its weight."""
    from nsa_tutorial.course.figures import PALETTE
    from nsa_tutorial.course.sheet import Place, Sheet

    parts = parts_of(state["tokens"], state["parts"])
    weights = np.exp(np.array([part.lse for part in parts]) - max(part.lse for part in parts))
    o = weights @ np.array([part.o for part in parts]) / weights.sum()
    sheet, tall, low = Sheet(8.2, 1.0 + 0.3 * len(parts)), 0.22, min(scores())
    keys, bars, top = Place(0.8, 0.75, 4.4, tall), Place(5.9, 0.75, 1.3, tall), max(scores())
    for row, part in enumerate(parts):
        y, each = keys.top + 0.3 * row, keys.width / (parts[0].last - parts[0].first)
        high = [
            tall * (s - low + 0.5) / (top - low + 0.5) for s in scores()[part.first : part.last]
        ]
        sheet.boxes([(keys.left + i * each, y + tall - h, 0.8 * each, h)
                     for i, h in enumerate(high)], PALETTE["key"])  # fmt: skip
        sheet.boxes([(bars.left, y, bars.width * weights[row], tall)], PALETTE["query"])
        sheet.words([(keys.left - 0.1, y + 0.17, f"part {row}")], ha="right", va="baseline")
        told = "−inf" if part.lse == -np.inf else f"{part.lse:.2f}"
        sheet.words([(5.75, y + 0.17, told), (8.0, y + 0.17, f"{part.o:.1f}")], ha="right",
                    va="baseline")  # fmt: skip
    for x, name in ((keys.left, "keys"), (5.45, "lse"), (bars.left, "weight"), (7.75, "o")):
        sheet.words([(x, 0.62, name)], ha="left", va="baseline")
    empty = sum(part.lse == -np.inf for part in parts)
    told = f"{state['tokens']} keys in {len(parts)} parts, {empty} of them empty: o = {o:.2f}"
    return Picture(sheet.figure, told)
