"""Keys, values and summaries on their way, and their gradients on the way back.

A `Gather` brings the rows of all ranks to each rank, a `Halo` those just before a piece. Both
start, let the caller compute something else, and are waited for: `send`, then `receive`. These are
two nodes of autograd, and their backwards mirror them. That of `receive` starts the gradients' way
back, in fp32 at least. That of `send` waits for it. Autograd runs the node that was made last
first, so whatever was computed between `send` and `receive` has its backward between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_tutorial.training.many_gpus import collectives
from nsa_tutorial.training.many_gpus.collectives import Flight
from nsa_tutorial.training.many_gpus.cuts import Cut, Segment, Span


def _wide(x: Tensor) -> torch.dtype:
    """In which gradients are added up over ranks."""
    return torch.promote_types(x.dtype, torch.float32)


def _batch_first(rows: Tensor) -> Tensor:
    """`[n, B, …]` as `[B, n, …]`; with `B == 1`, with the strides of a new tensor."""
    return rows.squeeze(1).unsqueeze(0) if rows.shape[1] == 1 else rows.transpose(0, 1)


class Gather:
    """Rows of all ranks on each rank, in the order of the text.

    Args:
        cut, group: who holds what.
        counts: rows of each piece.
        spans: which rows a caller wants: `receive` returns a tensor for each.
        what: names the rows in errors and counts.
    """

    def __init__(
        self, cut: Cut, group: dist.ProcessGroup, counts: Sequence[int], spans: Sequence[Span],
        what: str,
    ) -> None:  # fmt: skip
        self.cut, self.group, self.counts, self.spans, self.what = cut, group, counts, spans, what
        self.P = max(counts)
        self.places = [r * cut.slots + slot for r, slot in map(cut.owner, range(len(counts)))]
        self.ends = [0, *accumulate(counts)]
        self.own = [counts[piece] for piece in cut.pieces(group.rank())]

    # -- a share [B, n, …] as [slots * P, B, …], and back --

    def _pack(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        if all(count == self.P for count in self.own):
            return x.contiguous()
        packed = x.new_zeros(len(self.own) * self.P, *x.shape[1:])
        for slot, rows in enumerate(x.split(self.own)):
            packed[slot * self.P : slot * self.P + len(rows)] = rows
        return packed

    def _unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        if any(count < self.P for count in self.own):
            slots = packed.unflatten(0, (len(self.own), self.P)).unbind()
            packed = torch.cat([x[:count] for x, count in zip(slots, self.own, strict=True)])
        return _batch_first(packed.to(dtype))

    def _in_order(self, gathered: Tensor) -> Tensor:
        """All rows in the order of the text. Those of a contiguous cut are so already: only the
        last pieces are short."""
        begins = zip(self.places, self.ends, self.counts)  # noqa: B905
        if all(place * self.P == start for place, start, count in begins if count):
            return gathered[: self.ends[-1]]
        pieces = [
            gathered[place * self.P : place * self.P + count]
            for place, count in zip(self.places, self.counts, strict=True)
        ]
        return torch.cat(pieces)

    # -- there --

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Send the rows of this rank, `[B, n, …]` each."""
        self.flights = [
            collectives.all_gather(self._pack(x), self.group, self.what) for x in tensors
        ]

    def finish(self) -> list[Tensor]:
        """For each tensor, the rows of each span, `[B, rows, …]`."""
        found = []
        for flight in self.flights:
            rows = self._in_order(flight.wait())
            found += [_batch_first(rows[a:b]) for a, b in self.spans]
        self.flights = []
        return found

    # -- and back --

    def start_back(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]
    ) -> list[Flight]:
        """Send the gradients of what `finish` returned to those who hold the rows, which add them
        up. `like` has a tensor of each kind, for dtypes and shapes."""
        flights, each = [], len(self.spans)
        for i, x in enumerate(like):
            total = self._sum(gradients[i * each : (i + 1) * each], x)
            what = f"gradients of {self.what}"
            flights.append(collectives.reduce_scatter(total, self.group, what))
        return flights

    def finish_back(self, flights: Sequence[Flight], like: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of what `start` sent, `[B, n, …]`."""
        return [self._unpack(f.wait(), x.dtype) for f, x in zip(flights, like, strict=True)]

    def _sum(self, gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """The gradients of all spans, added up in fp32, `[R * slots * P, B, …]` as it travels."""
        shape = (len(self.counts) * self.P, *like.transpose(0, 1).shape[1:])
        total = like.new_empty(shape, dtype=_wide(like))
        given = [(s, g.transpose(0, 1)) for s, g in zip(self.spans, gradients, strict=True)
                 if g is not None]  # fmt: skip
        for place, (a, b) in zip(self.places, pairwise(self.ends), strict=True):
            rows = total[place * self.P : (place + 1) * self.P]
            rows[b - a :].zero_()
            rows, is_empty = rows[: b - a], True
            for (start, stop), gradient in given:
                low, high = max(a, start), min(b, stop)
                if low >= high:
                    continue
                piece = gradient[low - start : high - start]
                if is_empty and (low, high) == (a, b):
                    rows.copy_(piece)
                else:
                    if is_empty:
                        rows.zero_()
                    rows[low - a : high - a].add_(piece)
                is_empty = False
            if is_empty:
                rows.zero_()
        return total


class Halo:
    """Each piece of a rank, with the tokens just before it.

    Args:
        cut, group: who holds what.
        segments: from `cuts.halos`.
        what: names the tokens in errors and counts.
    """

    def __init__(
        self, cut: Cut, group: dist.ProcessGroup, segments: Sequence[Segment], what: str
    ) -> None:
        self.cut, self.group, self.what = cut, group, what
        self.is_needed = len(segments) > 0  # by any rank
        self.own, rank = cut.pieces(group.rank()), group.rank()
        by_rank = range(cut.ranks)
        # from here to each rank, and from each rank to here
        self.out = [
            [s for s in segments if cut.owner(s.source)[0] == rank and cut.owner(s.target)[0] == r]
            for r in by_rank
        ]
        self.into = [
            [s for s in segments if cut.owner(s.target)[0] == rank and cut.owner(s.source)[0] == r]
            for r in by_rank
        ]
        self.sizes = [[sum(s.stop - s.start for s in of) for of in way]
                      for way in (self.out, self.into)]  # fmt: skip

    def _place(self, segment: Segment) -> slice:
        """Where this rank has the tokens of a segment that it sends."""
        start = 0
        for piece in self.own[: self.own.index(segment.source)]:
            start += self.cut.spans[piece][1] - self.cut.spans[piece][0]
        start += segment.start - self.cut.spans[segment.source][0]
        return slice(start, start + segment.stop - segment.start)

    def _lengths(self) -> list[int]:
        """Tokens of each piece of this rank."""
        return [self.cut.spans[piece][1] - self.cut.spans[piece][0] for piece in self.own]

    def _of_piece(self) -> list[list[int]]:
        """For each piece of this rank, which of the segments that come are for it, in the order
        of the text."""
        into = [s for of in self.into for s in of]
        found = [[i for i, s in enumerate(into) if s.target == piece] for piece in self.own]
        return [sorted(of, key=lambda i: into[i].start) for of in found]

    def _fly(self, sent: Tensor, sizes: Sequence[list[int]], what: str) -> Flight:
        if not self.is_needed:
            return Flight(sent, None, None, what)
        return collectives.all_to_all(sent, *sizes, self.group, what)

    # -- there --

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Send what others need of this rank's tokens, `[B, n, …]` each."""
        self.flights, self.rows = [], [x.transpose(0, 1) for x in tensors]
        for x in self.rows:
            sent = [x[self._place(s)] for of in self.out for s in of]
            sent = torch.cat(sent) if sent else x[:0].contiguous()
            self.flights.append(self._fly(sent, self.sizes, self.what))

    def finish(self) -> list[Tensor]:
        """For each tensor, each piece behind its halo, `[B, halo + n, …]`."""
        found = []
        sizes = [s.stop - s.start for of in self.into for s in of]
        for flight, x in zip(self.flights, self.rows, strict=True):
            came = flight.wait().split(sizes) if sizes else ()
            for own, which in zip(x.split(self._lengths()), self._of_piece(), strict=True):
                found.append(_batch_first(torch.cat([*(came[i] for i in which), own])))
        self.flights, self.rows = [], []
        return found

    # -- and back --

    def start_back(self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list:
        """Send the halos' gradients to those who hold the tokens. A flight and the gradient of
        this rank's own tokens for each tensor."""
        found, each = [], len(self.own)
        sizes = [s.stop - s.start for of in self.into for s in of]
        for i, x in enumerate(like):
            own, sent = [], [None] * len(sizes)
            pieces = zip(gradients[i * each : (i + 1) * each], self._lengths(), self._of_piece(),
                         strict=True)  # fmt: skip
            for gradient, length, which in pieces:
                if gradient is None:
                    halo = sum(sizes[j] for j in which)
                    gradient = x.new_zeros(len(x), halo + length, *x.shape[2:])
                *halo, mine = gradient.transpose(0, 1).split([*(sizes[j] for j in which), length])
                own.append(mine)
                for j, part in zip(which, halo, strict=True):
                    sent[j] = part
            sent = torch.cat(sent) if sent else own[0][:0].contiguous()
            flight = self._fly(sent, self.sizes[::-1], f"gradients of {self.what}")
            found.append((flight, torch.cat(own).to(_wide(x))))
        return found

    def finish_back(self, flights: Sequence[tuple], like: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of what `start` took, added up in fp32 at least."""
        found = []
        for (flight, total), x in zip(flights, like, strict=True):
            segments = [s for of in self.out for s in of]
            came = flight.wait().split([s.stop - s.start for s in segments]) if segments else ()
            for segment, gradient in zip(segments, came, strict=True):
                total[self._place(segment)] += gradient
            found.append(_batch_first(total.to(x.dtype)))
        return found


class _Send(torch.autograd.Function):
    """Start a journey. Returns an empty tensor, which leads autograd from `_Receive` to here."""

    @staticmethod
    def forward(ctx, journey: Gather | Halo, *tensors: Tensor) -> Tensor:
        ctx.journey = journey
        # what the way back needs to know of them: dtypes, and shapes but for the tokens
        journey.like = [x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in tensors]
        journey.start(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple:
        journey = ctx.journey
        gradients = journey.finish_back(journey.back, journey.like)
        journey.back = None
        return None, *gradients


class _Receive(torch.autograd.Function):
    """Wait for what comes."""

    @staticmethod
    def forward(ctx, journey: Gather | Halo, way: Tensor) -> tuple[Tensor, ...]:
        ctx.journey = journey
        ctx.set_materialize_grads(False)
        return tuple(journey.finish())

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        journey = ctx.journey
        journey.back = journey.start_back(gradients, journey.like)
        return None, journey.like[0].new_empty(0)


def send(journey: Gather | Halo, *tensors: Tensor) -> Tensor:
    """Start a journey with the tensors of this rank; `receive` takes what this returns."""
    return _Send.apply(journey, *tensors)


def receive(journey: Gather | Halo, way: Tensor) -> tuple[Tensor, ...]:
    """Wait for the journey: the tensors of its `finish`, with a gradient."""
    return _Receive.apply(journey, way)
