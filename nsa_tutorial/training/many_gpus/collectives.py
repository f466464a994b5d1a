"""The three collectives with which tokens travel, by `torch.distributed`, counted and with errors
that say what happened. Gradients are in `travel`.

PyTorch 2.13 calls two of them `*_single` and deprecates the older names, which 2.11 and 2.12 have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_COUNTERS: list[Counter] = []


class RankLost(RuntimeError):
    """A collective did not come to its end: a rank has died, or did not call it in time."""


@contextmanager
def counted() -> Iterator[Counter]:
    """Count the bytes that this rank sends to others meanwhile, by what travels."""
    counter = Counter()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS.remove(counter)


@dataclass
class Flight:
    """A collective under way: wait before reading `out`. `sent` is kept alive until then."""

    out: Tensor
    sent: Tensor | None
    work: dist.Work | None
    what: str

    def wait(self) -> Tensor:
        """The result. On CUDA, the stream waits for it, and the host does not."""
        if self.work is not None:
            with told(self.what):
                self.work.wait()
        self.work = self.sent = None
        return self.out


@contextmanager
def told(what: str) -> Iterator[None]:
    """Errors of a collective, as a sentence.

    Raises:
        RankLost: for whatever PyTorch raises.
    """
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise RankLost(
            f"{what}: the ranks of this context did not come together. One of them has died, "
            f"raised an error or did not come within the timeout of its group ({reason})"
        ) from error


def _start(
    run: Callable[..., dist.Work], out: Tensor, x: Tensor, *sizes: Sequence[int],
    group: dist.ProcessGroup, what: str, bytes_sent: int,
) -> Flight:  # fmt: skip
    for counter in _COUNTERS:
        counter[what] += bytes_sent
    if out.numel() == 0 and x.numel() == 0 and not sizes:  # on every rank
        return Flight(out, None, None, what)
    with told(what):
        return Flight(out, x, run(out, x, *sizes, group=group, async_op=True), what)


def all_gather(x: Tensor, group: dist.ProcessGroup, what: str) -> Flight:
    """Start to gather `x [n, …]` of all ranks, `[R * n, …]`; `what` names it."""
    ranks = group.size()
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    sent = (ranks - 1) * x.nbytes
    return _start(_ALL_GATHER, out, x, group=group, what=what, bytes_sent=sent)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, what: str) -> Flight:
    """Start to add up `x [R * n, …]` over all ranks; each gets its part of the sum, `[n, …]`."""
    ranks = group.size()
    out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    sent = (ranks - 1) * out.nbytes
    return _start(_REDUCE_SCATTER, out, x, group=group, what=what, bytes_sent=sent)


def all_to_all(
    x: Tensor, sizes: Sequence[int], sizes_of_out: Sequence[int], group: dist.ProcessGroup,
    what: str,
) -> Flight:  # fmt: skip
    """Start to send `sizes[r]` rows of `x` to rank `r`, and to get `sizes_of_out[r]` from it."""
    out = x.new_empty(sum(sizes_of_out), *x.shape[1:])
    row = x.nbytes // max(x.shape[0], 1)
    sent = (x.shape[0] - sizes[group.rank()]) * row
    sizes = (list(sizes_of_out), list(sizes))
    return _start(dist.all_to_all_single, out, x, *sizes, group=group, what=what, bytes_sent=sent)
