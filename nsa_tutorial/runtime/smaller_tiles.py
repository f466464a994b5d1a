"""Where a kernel asks for more shared memory than a GPU has, the same operator with smaller tiles.

Options of a launch are chosen by what a compiler is expected to need (`shared_memory`), from tables
that were measured on few GPUs. Another GPU, or another version of the compiler, may need more. That
shows at the first launch, and then the choice has less to give away.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from nsa_tutorial.runtime.environment import BackendUnavailable
from nsa_tutorial.runtime.shared_memory import shared_memory, withheld, withhold

LEAST = 16 * 1024  # bytes: no kernel here has tiles that small
TILELANG_ASKED = re.compile(r"set the allowed dynamic shared memory size to (\d+)")


def asked_for(error: Exception) -> int | None:
    """Bytes of shared memory that a kernel of either language asked for in vain; None for an error
    of another kind."""
    if type(error).__name__ == "OutOfResources":  # of Triton, which this module does not import
        return error.required if error.name == "shared memory" else None
    found = TILELANG_ASKED.search(str(error))
    return int(found[1]) if found else None


@functools.cache
def with_smaller_tiles(function: Callable) -> Callable:
    """`function`, called again with less for its tiles until its kernels can be launched.

    It has to choose its options by `shared_memory`, and to write whole tensors, or tensors of its
    own, so that what a first call wrote does no harm. What is withheld stays so, and the next call
    succeeds at once.

    Raises:
        BackendUnavailable: one sentence with sizes and device, where the smallest tiles ask for too
            much.
    """

    @functools.wraps(function)
    def run(*args: object, **options: object) -> object:
        try:
            return function(*args, **options)
        except Exception as error:
            if asked_for(error) is None:
                raise
            return _again(function, args, options, error)

    return run


def _again(function: Callable, args: tuple, options: dict, error: Exception) -> object:
    """`function` with ever less, after the first `error`."""
    tensors = list(_tensors(args))
    device = tensors[0].device
    before = withheld(device)
    while (asked := asked_for(error)) is not None:
        room, kept = shared_memory(device), withheld(device)
        # as much more as was expected is asked for, it seems; if not, it shows in the next round
        withhold(device, room + kept - min(room * (room + kept) // asked, room * 7 // 8))
        if shared_memory(device) < LEAST:
            withhold(device, before)
            shapes = ", ".join(str(list(x.shape)) for x in tensors)
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            raise BackendUnavailable(
                f"no tile of this backend's kernels fits {torch.cuda.get_device_name(device)}, "
                f"where a program may have {room + kept:,} bytes of shared memory, for {dtype} "
                f"tensors {shapes}: use backend='reference', narrower heads or smaller groups"
            ) from error
        try:
            return function(*args, **options)
        except Exception as found:
            error = found
    raise error


def _tensors(args: Iterable[object]) -> Iterator[Tensor]:
    """Those among `args` and in sequences there that attend or are attended to: of four
    dimensions."""
    for x in args:
        if isinstance(x, Tensor):
            if x.ndim == 4:
                yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
