"""What the operators call on the Triton backend: lists, windows, or both, by the kernels that suit
the call.

Lists are walked in one of three orders of the same sums. `selected.forward` has one query in a
program and runs everywhere; `selected.forward_tma` does the same, faster on Hopper.
`selected.by_query_tiles` has a tile of neighbouring queries in a program, and
`selected.by_key_blocks` a block of keys. `order_of` chooses, and lists with factors have one query
in a program always. No argument is checked here: `ops` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.kernels.triton.selected import by_key_blocks as triton_key_blocks
from nsa_tutorial.kernels.triton.selected import by_query_tiles as triton_query_tiles
from nsa_tutorial.kernels.triton.selected import forward as triton_forward
from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, Unions
from nsa_tutorial.kernels.triton.window import forward as triton_windows
from nsa_tutorial.sparse.selected_attention import QueryRows

Outputs = tuple[Tensor, Tensor]
# A tile of queries is left to one program a query if its union is longer than this share of the
# entries of its lists: `python -m nsa_tutorial.bench selected --backend triton --order queries
# tiles` on random lists and on smooth ones says what a step of each costs.
WORTHWHILE = 0.6
SMALL_GROUP = 4  # heads of a group up to which a program has a block of keys
LARGE_GROUP = 32  # heads of a group up to which a tile of queries has room for two
# Queries times key/value heads times both widths from which a block of keys in a program pays: the
# host needs one to two milliseconds for its tables.
FEWEST_NUMBERS = 2**24
FEWEST_ROWS = 2048  # queries from which another order than one query in a program pays


def forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, out: Outputs | None = None,
) -> Outputs:  # fmt: skip
    """The lists; arguments and results as in `selected_attention.forward`, on CUDA tensors, or
    interpreted on CPU tensors. `out` are contiguous tensors to write to; None makes new ones."""
    walk = order_of(q, k, v, ids, block_size=block_size)
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale, "out": out}
    return walk(q, k, v, ids, rows, **sizes)


def order_of(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, block_size: int
) -> Callable[..., Outputs]:
    """The function that walks lists of these shapes: `by_queries`, `by_blocks`, or `by_either`,
    where the device decides tile by tile."""
    if not q.is_cuda or q.element_size() != 2 or len(ids) < FEWEST_ROWS:
        return by_queries
    G = q.shape[2] // k.shape[2]
    if G <= SMALL_GROUP:
        numbers = len(ids) * k.shape[2] * (q.shape[3] + v.shape[3])
        return by_blocks if numbers >= FEWEST_NUMBERS else by_queries
    if G > LARGE_GROUP:  # it fills a tile alone, so that no neighbour fits in
        return by_queries
    has_descriptors = triton_descriptors.can_walk(q, k, v, block_size)
    has_room = triton_query_tiles.has_room(q, v, ids, block_size)
    return by_either if has_descriptors and has_room else by_queries


def by_queries(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, out: Outputs | None = None,
    skipped: Unions | None = None,
) -> Outputs:  # fmt: skip
    """One query in a program. `skipped` are unions, on Hopper, whose tiles are done already."""
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    out = out or new_outputs(q, v)
    if triton_descriptors.can_walk(q, k, v, block_size):
        done = {} if skipped is None else {"count": skipped.count, "T": skipped.T}
        triton_descriptors.launch(q, k, v, ids, rows, **sizes, out=out, **done)
    else:
        triton_forward.launch(q, k, v, ids, rows, **sizes, out=out)
    return out


def by_tiles(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, out: Outputs | None = None,
    most: float = ANY_LENGTH,
) -> Outputs:  # fmt: skip
    """A tile of queries in a program, and `by_queries` what that leaves: lists with factors, lists
    too long for a tile, and tiles that are not wanted, `most` being that of `unions.unions`.
    Without descriptors, tiles are written over what one query in a program has found."""
    given, sizes = (q, k, v, ids, rows), {"block_size": block_size, "scale": scale}
    out = out or new_outputs(q, v)
    if slot_scale is not None or not triton_query_tiles.has_room(q, v, ids, block_size):
        return by_queries(*given, **sizes, slot_scale=slot_scale, out=out)
    fast = triton_descriptors.can_walk(q, k, v, block_size)
    if not fast:
        by_queries(*given, **sizes, out=out)
    made = triton_query_tiles.launch(*given, **sizes, out=out, most=most, use_descriptors=fast)[2]
    if fast:
        by_queries(*given, **sizes, out=out, skipped=made)
    return out


def by_either(*given: object, **sizes: object) -> Outputs:
    """`by_tiles` where neighbours share enough, else `by_queries`."""
    return by_tiles(*given, **sizes, most=WORTHWHILE)


def by_blocks(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, out: Outputs | None = None,
) -> Outputs:  # fmt: skip
    """A block of keys in a program; lists with factors `by_queries`."""
    given, sizes = (q, k, v, ids, rows), {"block_size": block_size, "scale": scale, "out": out}
    if slot_scale is not None:
        return by_queries(*given, **sizes, slot_scale=slot_scale)
    return triton_key_blocks.launch(*given, **sizes)


def new_outputs(q: Tensor, v: Tensor) -> Outputs:
    """Room for `o` and `lse`."""
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def sliding_window(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float
) -> Outputs:
    """The windows; arguments and results as in `sliding_window.forward`."""
    return triton_windows.launch(q, k, v, rows, window_size=window_size, scale=scale)


def selection_and_window(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, window_size: int, scale: float, slot_scale: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """Both over the same keys and values: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`, of the
    lists, then of the windows. `rows` are from `query_rows`, causal; `slot_scale` is the lists'."""
    o = v.new_empty(2, *q.shape[:3], v.shape[3])
    lse = q.new_empty(2, *q.shape[:3], dtype=torch.float32)
    lists = {"block_size": block_size, "slot_scale": slot_scale}
    forward(q, k, v, ids, rows, scale=scale, **lists, out=(o[0], lse[0]))
    triton_windows.launch(
        q, k, v, rows, window_size=window_size, scale=scale, out=(o[1], lse[1])
    )  # fmt: skip
    return o, lse
