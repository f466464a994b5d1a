"""Several ranks inside one process, for a notebook: each is a thread that holds a share of a text.

`on_ranks(4, function)` calls `function(rank)` in each of four threads and returns what they return.
A `Rank` knows its number, and has the journeys of chapter 18. What it sends is copied, as between
processes, so no rank writes into another's tensors, and bytes are counted.

    on_ranks(2, lambda rank: rank.gather(torch.tensor([rank.number])))

With `over="gloo"`, a gather and a reduce-scatter are those of `torch.distributed`, over sockets of
this machine, and `rank.group` is a process group that `nsa_tutorial.training.many_gpus` takes. In
other programs each rank is a process of its own, which `torchrun` starts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

TIMEOUT = 30.0  # seconds that gloo waits


class RanksApart(RuntimeError):
    """A rank waits for another one that does something else, or has ended."""


class Meeting:
    """Where threads exchange what they bring. Nobody waits for a rank that cannot come.

    Args:
        ranks: how many meet.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.changed = ranks, threading.Condition()
        self.came: dict[int, tuple[str, object]] = {}
        self.ended: set[int] = set()
        self.brought: list[object] = []
        self.round, self.error = 0, ""

    def meet(self, number: int, what: str, mine: object) -> list:
        """What each rank has brought, in their order.

        Raises:
            RanksApart: if a rank asks for something else, or has ended.
        """
        with self.changed:
            before = self.round
            self.came[number] = (what, mine)
            self._settle()
            self.changed.wait_for(lambda: self.round > before or self.error)
            if self.error:
                raise RanksApart(self.error)
            return self.brought

    def leave(self, number: int) -> None:
        """A rank has returned or raised."""
        with self.changed:
            self.ended.add(number)
            self._settle()

    def _settle(self) -> None:
        if len(self.came) + len(self.ended) < self.ranks or not self.came or self.error:
            return
        asked = {number: what for number, (what, _) in sorted(self.came.items())}
        first, what = next(iter(asked.items()))
        others = [n for n in asked if asked[n] != what]
        if self.ended:
            self.error = f"rank {first} waits in `{what}`, and rank {min(self.ended)} has ended"
        elif others:
            self.error = f"rank {first} calls `{what}`, and rank {others[0]} `{asked[others[0]]}`"
        if self.error:
            self.error += ". All ranks have to make the same calls in the same order."
        else:
            self.brought = [mine for _, (_, mine) in sorted(self.came.items())]
            self.came, self.round = {}, self.round + 1
        self.changed.notify_all()


class Rank:
    """One of several ranks, seen from its own code.

    Attributes:
        number: from 0.
        ranks: how many there are.
        sent: bytes that it sent to others, so far.
        group: gloo's process group, or None.
    """

    def __init__(self, number: int, meeting: Meeting, group: object = None) -> None:
        self.number, self.ranks, self.sent = number, meeting.ranks, 0
        self.group, self._meeting = group, meeting

    def __repr__(self) -> str:
        return f"rank {self.number} of {self.ranks}"

    def _exchange(self, what: str, x: object) -> list:
        return self._meeting.meet(self.number, what, x)

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensor that each rank brings, in the ranks' order, on every rank."""
        _expect_tensor("gather", x)
        self.sent += (self.ranks - 1) * x.nbytes
        if self.group is not None:
            self._exchange("gather", None)  # or a rank that does not come is waited for
            out = x.new_empty(self.ranks, *x.shape)
            self.group.allgather([list(out.unbind())], [x.detach().contiguous()]).wait()
            return list(out.unbind())
        return [y.clone() for y in self._exchange("gather", x.detach().clone())]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Each rank brings a tensor for each rank; rank `r` gets the sum of those for it."""
        parts = list(parts)
        if len(parts) != self.ranks:
            raise ValueError(f"`reduce_scatter` takes {self.ranks} tensors, and got {len(parts)}")
        for x in parts:
            _expect_tensor("reduce_scatter", x)
        self.sent += sum(x.nbytes for i, x in enumerate(parts) if i != self.number)
        if self.group is not None:
            self._exchange("reduce_scatter", None)
            out = torch.empty_like(parts[self.number])
            self.group.reduce_scatter([out], [[x.detach().contiguous() for x in parts]]).wait()
            return out
        brought = self._exchange("reduce_scatter", [x.detach().clone() for x in parts])
        mine = [of[self.number] for of in brought]
        if len({x.shape for x in mine}) > 1:
            shapes = ", ".join(str(list(x.shape)) for x in mine)
            raise ValueError(f"the ranks bring {shapes} for rank {self.number}: no sum of these")
        return torch.stack(mine).sum(0)

    def to_next(self, x: Tensor) -> Tensor:
        """Send `x` to the next rank; what came from the one before, no rows on the first rank."""
        return self._shift("to_next", x, 1)

    def to_previous(self, x: Tensor) -> Tensor:
        """Send `x` to the rank before; what came from the next one, no rows on the last rank."""
        return self._shift("to_previous", x, -1)

    def _shift(self, what: str, x: Tensor, step: int) -> Tensor:
        _expect_tensor(what, x)
        if 0 <= self.number + step < self.ranks:
            self.sent += x.nbytes
        brought = self._exchange(what, x.detach().clone())
        source = self.number - step
        return brought[source].clone() if 0 <= source < self.ranks else x.detach()[:0].clone()


def _expect_tensor(what: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{what}` sends tensors, and got {type(x).__name__}")


def gloo(number: int, ranks: int, store: object) -> object:
    """A process group of `torch.distributed` for the thread that calls this."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend = dist.ProcessGroupGloo(store, number, ranks, options)
    group = dist.ProcessGroup(store, number, ranks)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(f"notebook {id(store):x}")
    # where PyTorch looks up which tensors a group takes
    dist.distributed_c10d._world.pg_backend_config[group] = dist.BackendConfig("gloo")
    return group


def forget(group: object) -> None:
    """A group that is no longer needed."""
    if group is not None:
        import torch.distributed as dist

        dist.distributed_c10d._world.pg_backend_config.pop(group, None)


def on_ranks(
    ranks: int, function: Callable[[Rank], object], *, over: str = "threads",
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> list:  # fmt: skip
    """Call `function(rank)` on each of several ranks at once.

    Args:
        ranks: how many.
        function: what each does.
        over: "threads" copies tensors from thread to thread; "gloo" sends them by
            `torch.distributed`.
        around: what each call stands in; made anew for each rank.

    Returns:
        What each rank returned.

    Raises:
        Exception: whatever a rank raised, the first rank first; the others end, too.
        RanksApart: if ranks do not make the same calls.
    """
    if over == "gloo":
        import torch.distributed as dist

        store = dist.HashStore()
    meeting, found = Meeting(ranks), [None] * ranks
    errors: dict[int, BaseException] = {}
    records = torch.is_grad_enabled()  # threads begin with gradients

    def run(number: int) -> None:
        group = None
        try:
            group = gloo(number, ranks, store) if over == "gloo" else None
            rank = Rank(number, meeting, group)
            with torch.set_grad_enabled(records), around():
                found[number] = function(rank)
        except BaseException as error:
            errors[number] = error
        finally:
            meeting.leave(number)
            forget(group)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = [e for _, e in sorted(errors.items()) if not isinstance(e, RanksApart)]
        raise own[0] if own else errors[min(errors)]
    return found
