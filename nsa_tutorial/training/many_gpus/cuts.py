"""How a text is cut over ranks, in numbers alone: no process group, no tensor of the text.

A **contiguous** cut gives each rank one piece of the text. A **zigzag** cut makes twice as many
pieces and gives rank `r` the pieces `r` and `2R - 1 - r`. Early queries see little and late ones
much, so two such pieces cost every rank about the same.

A rank computes its piece in one or two calls of the operators, each a `Part`: queries are the
*last* positions of their keys, so a piece `[a, b)` attends to the keys `[0, b)`.

Symbols: `R` ranks · `P` rows of a share's slot, as many as the longest piece has.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from nsa_tutorial.runtime import checks, packed
from nsa_tutorial.sparse.compression import num_summaries

KINDS = ("contiguous", "zigzag")
Span = tuple[int, int]  # first token, and the token after the last


@dataclass(frozen=True)
class Part:
    """Queries that one call of an operator takes, and their keys.

    Attributes:
        start, stop: the queries `[start, stop)` of the text.
        first: their keys are the tokens `[first, stop)`.
        cu_seqlens: offsets of the documents that begin here (`first == start`), from 0 to the
            number of queries, the last one cut; None for one document, which may have begun before.
    """

    start: int
    stop: int
    first: int
    cu_seqlens: tuple[int, ...] | None = None

    def first_key(self, reach: int) -> int:
        """The first token that matters where a query sees only `reach` tokens before its own."""
        return max(self.first, self.start - reach)

    def first_token(self, length: int, stride: int) -> int:
        """The first token of the summaries that end at these queries, so many tokens long and one
        every `stride`; `stop` where there is none."""
        if self.cu_seqlens is not None:
            return self.first
        summary = num_summaries(self.start - self.first, length, stride)  # the first not yet ended
        is_there = summary < num_summaries(self.stop - self.first, length, stride)
        return self.first + summary * stride if is_there else self.stop


@dataclass(frozen=True)
class Cut:
    """A text of `tokens` tokens over `ranks` ranks.

    All pieces but the last ones have the same length, the number of tokens over the number of
    pieces, rounded up. The last ones are shorter, and may be empty.

    Attributes:
        ranks: `R`.
        tokens: of the whole text.
        kind: "contiguous" or "zigzag".
        documents: offsets of packed documents, from 0 to `tokens`; None for a single one.

    Raises:
        ValueError, TypeError: naming the attribute.
    """

    ranks: int
    tokens: int
    kind: str = "zigzag"
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.check_positive_int("ranks", self.ranks)
        checks.check_positive_int("tokens", self.tokens, least=0)
        checks.check_one_of("kind", self.kind, KINDS)
        if self.documents is None:
            return
        offsets = self.documents
        is_rising = all(a <= b for a, b in pairwise(offsets))
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != self.tokens or not is_rising:
            raise ValueError(
                f"documents: got {list(offsets[:8])}, expected offsets that never decrease, from 0 "
                f"to the number of tokens, {self.tokens}"
            )

    @classmethod
    def packed(cls, ranks: int, cu_seqlens: Tensor, kind: str = "zigzag") -> Cut:
        """The cut of packed documents, `cu_seqlens [num_sequences + 1]`. The host waits for the
        device, once for a tensor."""
        checks.check_tensor("cu_seqlens", cu_seqlens, "[num_sequences + 1]", checks.INTEGERS)
        offsets = packed.offsets(cu_seqlens).values
        return cls(ranks, offsets[-1] if offsets else 0, kind, offsets)

    # -- pieces --

    @property
    def slots(self) -> int:
        """Pieces of a rank."""
        return 2 if self.kind == "zigzag" else 1

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The pieces, in the order of the text."""
        size = -(-self.tokens // (self.ranks * self.slots))
        starts = [min(i * size, self.tokens) for i in range(self.ranks * self.slots + 1)]
        return tuple(pairwise(starts))

    def owner(self, piece: int) -> tuple[int, int]:
        """The rank that holds a piece, and in which of its slots."""
        last = self.ranks * self.slots - 1
        return (piece, 0) if piece < self.ranks else (last - piece, 1)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The numbers of the pieces of a rank."""
        last = self.ranks * self.slots - 1
        return (rank, last - rank)[: self.slots]

    def length(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(b - a for a, b in (self.spans[piece] for piece in self.pieces(rank)))

    # -- calls --

    @cached_property
    def _starts(self) -> list[int]:
        """Where documents begin that are not empty, and the end of the text."""
        return sorted({0, self.tokens, *(self.documents or ())})

    def parts(self, piece: int) -> tuple[Part, ...]:
        """The calls that make a piece, in the order of its queries: the document that began before
        it, and those that begin in it. An empty piece is one call without queries."""
        start, stop = self.spans[piece]
        if start == stop:
            return (Part(start, stop, start),)
        parts, starts = [], self._starts
        document = bisect_right(starts, start) - 1
        if starts[document] < start:
            end = min(stop, starts[document + 1])
            parts.append(Part(start, end, starts[document]))
            start = end
        inside = [x for x in starts if start <= x < stop]
        if inside:
            offsets = tuple(x - start for x in (*inside, stop)) if len(inside) > 1 else None
            parts.append(Part(start, stop, start, offsets))
        return tuple(parts)

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        """All calls of a rank, in the order of its tokens."""
        return tuple(part for piece in self.pieces(rank) for part in self.parts(piece))

    # -- summaries --

    def summaries_before(self, token: int, length: int, stride: int) -> int:
        """How many summaries end before a token. In the text's order they are the first ones."""
        count = 0
        for start, end in pairwise(self._starts):
            if start < token:
                count += num_summaries(min(end, token) - start, length, stride)
        return count

    def summaries_of(self, part: Part, length: int, stride: int) -> Span:
        """Which summaries of the text the documents of a part have so far."""
        return tuple(self.summaries_before(x, length, stride) for x in (part.first, part.stop))

    # -- rows of tensors: one for a token, or one for a summary --

    def tokens_of_pieces(self) -> tuple[int, ...]:
        """Tokens of each piece."""
        return tuple(b - a for a, b in self.spans)

    def summaries_of_pieces(self, length: int, stride: int) -> tuple[int, ...]:
        """Summaries that end in each piece."""
        ends = [self.summaries_before(0, length, stride)]
        ends += [self.summaries_before(stop, length, stride) for _, stop in self.spans]
        return tuple(b - a for a, b in pairwise(ends))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The place of each token of a rank in its document, `[n]` int64, for a rotary
        embedding."""
        found = []
        for part in self.parts_of(rank):
            offsets = part.cu_seqlens or (0, part.stop - part.start)
            before = part.start - part.first
            spans = ((before, before + b - a) for a, b in pairwise(offsets))
            found += [torch.arange(a, b, device=device) for a, b in spans]
        return torch.cat(found)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The tokens of a rank, out of `x` with all tokens in dimension `dim`."""
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"x: got {checks.describe(x)}, expected {self.tokens} tokens in dimension {dim}"
            )
        spans = [self.spans[piece] for piece in self.pieces(rank)]
        return torch.cat([x.narrow(dim, a, b - a) for a, b in spans], dim)

    def unshard(self, shares: list[Tensor], dim: int = 1) -> Tensor:
        """The whole text out of the ranks' shares, in their order: the inverse of `shard`."""
        cut = []
        for rank, share in enumerate(shares):
            sizes = [b - a for a, b in (self.spans[piece] for piece in self.pieces(rank))]
            cut.append(share.split(sizes, dim))
        owners = [self.owner(piece) for piece in range(len(self.spans))]
        return torch.cat([cut[rank][slot] for rank, slot in owners], dim)


@dataclass(frozen=True)
class Segment:
    """The tokens `[start, stop)`, which the piece `source` holds and the piece `target` needs."""

    source: int
    target: int
    start: int
    stop: int


def starts_of_window(cut: Cut, window_size: int) -> tuple[int, ...]:
    """The first token that the window of each piece sees."""
    pieces = range(len(cut.spans))
    return tuple(cut.parts(piece)[0].first_key(window_size - 1) for piece in pieces)


def starts_of_summaries(cut: Cut, length: int, stride: int) -> tuple[int, ...]:
    """The first token of the summaries that end in each piece, or of the piece."""
    begins = (cut.parts(piece)[0].first_token(length, stride) for piece in range(len(cut.spans)))
    return tuple(min(token, a) for token, (a, _) in zip(begins, cut.spans, strict=True))


def halos(cut: Cut, starts: tuple[int, ...]) -> tuple[Segment, ...]:
    """What each piece needs of those before it, from the token `starts[piece]` on: of the
    neighbour, or of several where pieces are short."""
    found = []
    for target, (start, _) in enumerate(cut.spans):
        for source, (a, b) in enumerate(cut.spans[:target]):
            low, high = max(a, starts[target]), min(b, start)
            if low < high:
                found.append(Segment(source, target, low, high))
    return tuple(found)
