"""What the operators call for lists on the Triton backend, and for lists and windows, by the
kernels that suit the call.

Lists are walked in one of three orders of the same sums. `selected.forward` has one query in a
program and runs everywhere; `selected.forward_tma` does the same, faster on Hopper, and
`selected.tokens_forward` for blocks of a few tokens, or of one.
`selected.by_query_tiles` has a tile of neighbouring queries in a program, and
`selected.by_key_blocks` a block of keys. `order_of` chooses; lists with factors always have one
query in a program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tokens import gathers
from nsa_tutorial.kernels.triton import unions
from nsa_tutorial.kernels.triton.selected import (
    by_key_blocks,
    by_query_tiles,
    forward,
    forward_tma,
    tokens_forward,
)
from nsa_tutorial.kernels.triton.window.launch import window_forward
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.sparse.selected_attention import QueryRows

Outputs = tuple[Tensor, Tensor]
# If a union is longer than this share of the entries of its lists, the tile's queries get one
# program each. To measure what a step of each order costs: `python -m nsa_tutorial.bench selected
# --backend triton --order queries tiles`, on random lists and on smooth ones.
WORTHWHILE = 0.6
SMALL_GROUP = 4  # up to so many heads in a group, a program may have a block of keys
LARGE_GROUP = 32  # up to so many heads in a group, a tile of queries has room for two
# A block of keys in a program pays from this product on, of queries, key/value heads and both
# widths, because the host needs one to two milliseconds for the tables.
FEWEST_NUMBERS = 2**24
FEWEST_ROWS = 2048  # with fewer queries, one query in a program is fastest


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, order: Order | None = None,
    out: Outputs | None = None, is_bad: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """The lists; arguments and results as in `selected_attention.forward`, on CUDA tensors, or
    interpreted on CPU tensors.

    If `order` is None, `order_of` chooses it; queries of a tile whose lists share too little get
    one program each. `out` are contiguous tensors to write to; None makes new ones. `is_bad` is
    what `unions.find_bad` found; None asks it where it is needed.
    """
    given, sizes = (q, k, v, ids, rows), {"block_size": block_size, "scale": scale}
    most = WORTHWHILE if order is None else unions.ANY_LENGTH
    order = order_taken(order, q, k, v, ids, slot_scale, block_size=block_size)
    if order is Order.KEY_BLOCKS:
        return by_key_blocks.launch(*given, **sizes, out=out)
    out = out or new_outputs(q, v)
    if order is Order.QUERIES:
        by_queries(*given, **sizes, slot_scale=slot_scale, out=out)
        return out
    # tiles first, then one query in a program for the tiles they reject; without descriptors, the
    # tiles overwrite what one query in a program has found
    fast = forward_tma.can_walk(q, k, v, block_size)
    if not fast:
        by_queries(*given, **sizes, out=out)
    how = {"most": most, "is_bad": is_bad, "use_descriptors": fast}
    made = by_query_tiles.launch(*given, **sizes, out=out, **how)[2]
    if fast:
        by_queries(*given, **sizes, out=out, skipped=made)
    return out


def order_of(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, block_size: int) -> Order:
    """The order that suits lists of these shapes. For `QUERY_TILES`, the device decides tile by
    tile."""
    if not q.is_cuda or q.element_size() != 2 or len(ids) < FEWEST_ROWS:
        return Order.QUERIES
    if gathers(block_size):  # nothing to share, and no tile of keys to stay
        return Order.QUERIES
    G = q.shape[2] // k.shape[2]
    if G <= SMALL_GROUP:
        numbers = len(ids) * k.shape[2] * (q.shape[3] + v.shape[3])
        return Order.KEY_BLOCKS if numbers >= FEWEST_NUMBERS else Order.QUERIES
    if G > LARGE_GROUP:  # one group fills a tile, so no neighbour fits in
        return Order.QUERIES
    has_descriptors = forward_tma.can_walk(q, k, v, block_size)
    has_room = by_query_tiles.has_room(q, v, ids, block_size)
    return Order.QUERY_TILES if has_descriptors and has_room else Order.QUERIES


def order_taken(
    order: Order | None, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, slot_scale: Tensor | None, *,
    block_size: int,
) -> Order:  # fmt: skip
    """The order in which lists are walked, where `order` is asked for: lists with factors, and
    lists too long for a tile, have one query in a program."""
    if slot_scale is not None:
        return Order.QUERIES
    if order is None:
        return order_of(q, k, v, ids, block_size=block_size)
    if order is Order.QUERY_TILES and not by_query_tiles.has_room(q, v, ids, block_size):
        return Order.QUERIES
    return order


def by_queries(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, out: Outputs,
    skipped: unions.Unions | None = None,
) -> None:  # fmt: skip
    """Write the outputs with one query in a program. `skipped` are unions, on Hopper, whose tiles
    are done already."""
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale, "out": out}
    if gathers(block_size):
        tokens_forward.launch(q, k, v, ids, rows, **sizes)
    elif forward_tma.can_walk(q, k, v, block_size):
        done = {} if skipped is None else {"count": skipped.count, "T": skipped.T}
        forward_tma.launch(q, k, v, ids, rows, **sizes, **done)
    else:
        forward.launch(q, k, v, ids, rows, **sizes)


def new_outputs(q: Tensor, v: Tensor) -> Outputs:
    """Room for `o` and `lse`."""
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def selected_and_window_forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, window_size: int, scale: float, slot_scale: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """Both over the same keys and values: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`, of the
    lists, then of the windows. `rows` are from `query_rows`, causal; `slot_scale` is the lists'."""
    o = v.new_empty(2, *q.shape[:3], v.shape[3])
    lse = q.new_empty(2, *q.shape[:3], dtype=torch.float32)
    lists = {"block_size": block_size, "slot_scale": slot_scale}
    selected_forward(q, k, v, ids, rows, scale=scale, **lists, out=(o[0], lse[0]))
    windows = {"window_size": window_size, "scale": scale, "out": (o[1], lse[1])}
    window_forward(q, k, v, rows, **windows)
    return o, lse
