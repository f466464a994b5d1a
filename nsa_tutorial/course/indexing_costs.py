"""What a query costs by how its list is made: products and bytes of choosing and of attending, for
the last query of a text (chapter 19).

`MEMBERS` are the sizes of published models; `dials` is one layer, that of MiniMax-M3, with what is
listed and who chooses set freely. A product is a multiply and an add, two operations. The softmax,
the sorting and the weights of an indexer's heads are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BUDGET = 2048  # tokens of a list: 16 blocks of 128, or single ones


class Query(NamedTuple):
    """What one query costs.

    Attributes:
        choosing, attending: operations.
        read_to_choose, read_to_attend: bytes, for all KV heads.
        rows: keys that it attends to, summaries among them.
        runs: stretches of memory that they lie in, for each KV head.
    """

    choosing: int
    attending: int
    read_to_choose: int
    read_to_attend: int
    rows: int
    runs: int

    @property
    def share_of_choosing(self) -> float:
        """Of the operations."""
        return self.choosing / (self.choosing + self.attending)


@dataclass(frozen=True)
class Member:
    """A sparse attention with the sizes of a model.

    Attributes:
        name, source: and where the sizes are from.
        HQ, H: query heads, and heads of keys and values.
        D, DV: widths. Where values are a part of the key's row (`is_one_row`), it is read once.
        unit, slots: tokens of what is listed, and how many of it; 0 slots list nothing.
        window: latest tokens that are attended to as well.
        every: a summary for so many tokens; 0 for none. Summaries are attended to (`all`) or
            listed (`listed`) or only choose (`choose`), by `summaries`.
        length: tokens of a summary, all of them in the text; 0 for `every`.
        HI, DI: heads and width of an indexer, 0 for none.
        index_every: tokens for each of its keys.
    """

    name: str
    source: str
    HQ: int
    H: int
    D: int
    DV: int
    unit: int = 1
    slots: int = 0
    window: int = 0
    every: int = 0
    summaries: str = ""
    HI: int = 0
    DI: int = 128
    index_every: int = 1
    is_one_row: bool = False
    length: int = 0

    def query(self, N: int, itemsize: int = 2) -> Query:
        """The last query of `N` tokens."""
        entries = 0
        if self.every:
            entries = max((N - (self.length or self.every)) // self.every + 1, 0)
        row = (self.D if self.is_one_row else self.D + self.DV) * itemsize
        choosing = read = 0
        if self.HI:
            keys = N // self.index_every
            choosing, read = 2 * self.HI * self.DI * keys, keys * self.DI * itemsize
        elif self.summaries in ("choose", "all") and self.slots:
            choosing = 2 * self.HQ * self.D * entries
            read = entries * self.H * self.D * itemsize
        listed = min(self.slots * self.unit, entries if self.summaries == "listed" else N)
        rows = listed + min(self.window, N) + (entries if self.summaries == "all" else 0)
        runs = -(-listed // self.unit) + bool(self.window) + (self.summaries == "all")
        attending = 2 * self.HQ * (self.D + self.DV) * rows
        return Query(choosing, attending, read, rows * self.H * row, rows, runs)

    @property
    def who_chooses(self) -> str:
        """In words."""
        if not self.slots:
            return "nobody, reads all"
        choosers = {"choose": "mean keys", "all": "summaries"}
        return f"an indexer of {self.HI} heads" if self.HI else choosers[self.summaries]


DENSE = Member("dense", "grouped queries, as in MiniMax-M3", 64, 4, 128, 128, 1, 1 << 40)
MEMBERS = (
    Member("MoBA", "arXiv 2502.13189, section 3.3", 32, 8, 128, 128, 4096, 12, every=4096,
           summaries="choose"),
    Member("NSA", "arXiv 2502.11089, section 4.1", 64, 4, 192, 128, 64, 16, 512, every=16,
           summaries="all", length=32),
    Member("MSA", "arXiv 2606.13392; transformers, minimax_m3_vl", 64, 4, 128, 128, 128, 16, HI=4),
    Member("DSA", "arXiv 2512.02556; transformers, deepseek_v32", 128, 1, 576, 512, 1, 2048, HI=64,
           is_one_row=True),
    Member("CSA", "transformers, deepseek_v4", 64, 1, 512, 512, 1, 512, 128, every=4,
           summaries="listed", HI=64, index_every=4, is_one_row=True),
    Member("HCA", "transformers, deepseek_v4", 64, 1, 512, 512, window=128, every=128,
           summaries="all", is_one_row=True),
)  # fmt: skip


def table(N: int) -> list[str]:
    """What the last query of `N` tokens costs each member, as lines of text."""
    length = "a million" if N == 1 << 20 else f"{N:,}"
    lines = [f"       reads of {length}     choosing   attending   who chooses"]
    for m in MEMBERS:
        x = m.query(N)
        work = f"{x.choosing / 1e6:8,.0f}  {x.attending / 1e6:8,.0f} MFLOP"
        lines.append(f"{m.name:5} {x.rows:8,} keys, {x.rows / N:4.1%}  {work}   {m.who_chooses}")
    return lines


def dials(unit: int, chooser: str) -> Member:
    """The layer of MiniMax-M3 with a list of `BUDGET` tokens, in units of `unit`, chosen by
    "mean keys" or by "an indexer"."""
    if chooser == "an indexer":
        return Member("", "", 64, 4, 128, 128, unit, BUDGET // unit, HI=4)
    return Member("", "", 64, 4, 128, 128, unit, BUDGET // unit, every=unit, summaries="choose")
