"""What the operators call for gradients on the Triton backend: of lists, or of lists and windows.

`backward` holds the kernels, `backward_tma` and `backward_ahead` those that Hopper runs faster,
`tokens_backward` that for blocks of a few tokens, and `lists_backward` what all orders begin with.
The queries' gradients have the forward's three orders; KV-outer, their last bits differ from run to
run, as do those of keys and values in blocks of a few tokens. All others are the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tokens import adds_by_atomics, gathers
from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.launch_options import dkv_options, dq_options, edge
from nsa_tutorial.kernels.triton.selected import (
    backward,
    backward_ahead,
    backward_tma,
    by_key_blocks_backward,
    by_query_tiles_backward,
    lists_backward,
    tokens_backward,
)
from nsa_tutorial.kernels.triton.selected.backward_ahead import can_name_ahead
from nsa_tutorial.kernels.triton.selected.forward_tma import can_walk
from nsa_tutorial.kernels.triton.selected.launch import WORTHWHILE, order_taken
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, Unions
from nsa_tutorial.kernels.triton.window.launch import window_backward
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.sparse.selected_attention import QueryRows

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def selected_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None, order: Order | None = None,
    numbers: tuple[Tensor, Tensor] | None = None, is_bad: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `launch.selected_forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: the forward's arguments.
        o, lse: what it returned.
        order: as for `selected_forward`; None chooses one, a deterministic one if PyTorch is told
            to be deterministic.
        numbers: as for `BackwardCall.of`.
        is_bad: as for `selected_forward`.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes, and of `slot_scale`, `[R, H, S]` fp32.
    """
    lists = {"ids": ids, "block_size": block_size, "slot_scale": slot_scale}
    given = (d_o, d_lse, q, k, v, o, lse, rows)
    call = ListsCall.of(*given, **lists, scale=scale, numbers=numbers)
    is_free = order is None
    most = WORTHWHILE if is_free else ANY_LENGTH
    order = order_taken(order, q, k, v, ids, slot_scale, block_size=block_size)
    # with a block of keys in a program, the queries' gradients differ from run to run
    if is_free and order is Order.KEY_BLOCKS and torch.are_deterministic_algorithms_enabled():
        order = Order.QUERIES
    if order is Order.KEY_BLOCKS:
        return *by_key_blocks_backward.all_gradients(call), None
    d_q, d_k, d_v = (q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    d_slot_scale = None if slot_scale is None else torch.zeros_like(slot_scale)
    if order is Order.QUERIES and gathers(block_size) and adds_by_atomics(q):
        tokens_backward.all_gradients(call, d_q, d_k, d_v, d_slot_scale)
        return d_q, d_k, d_v, d_slot_scale
    if order is Order.QUERY_TILES:
        gradient_by_tiles(call, d_q, most=most, is_bad=is_bad)
    else:
        gradient_of_queries(call, d_q, d_slot_scale)
    gradients_of_keys_and_values(call, d_k, d_v)
    return d_q, d_k, d_v, d_slot_scale


def selected_and_window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, window_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `launch.selected_and_window_forward`, through both outputs: `d_o, d_lse, o,
    lse` are those of the lists, then of the windows."""
    (d_o, d_o_win), (d_lse, d_lse_win), (o, o_win), (lse, lse_win) = d_o, d_lse, o, lse
    lists = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    *out, d_slot_scale = selected_backward(d_o, d_lse, q, k, v, o, lse, ids, rows, **lists)
    given = (d_o_win, d_lse_win, q, k, v, o_win, lse_win, rows)
    windows = {"window_size": window_size, "scale": scale, "out": tuple(out)}
    window_backward(*given, **windows)
    return *out, d_slot_scale


def gradient_by_tiles(
    call: ListsCall, d_q: Tensor, *, most: float, is_bad: Tensor | None
) -> None:  # fmt: skip
    """Write the gradients of the queries, as `selected_forward` does their outputs."""
    c = call
    fast = can_walk(c.q, c.k, c.v, c.block_size)
    if not fast:
        gradient_of_queries(call, d_q, None)
    how = {"most": most, "is_bad": is_bad, "use_descriptors": fast}
    made = by_query_tiles_backward.gradient_of_queries(call, d_q, **how)
    if fast:
        gradient_of_queries(call, d_q, None, unions=made)


def gradient_of_queries(
    call: ListsCall, d_q: Tensor, d_slot_scale: Tensor | None, unions: Unions | None = None
) -> None:
    """Write the gradients of the queries and of the slots' factors, one program a query. With
    `unions`, only those of rejected tiles."""
    c, sizes, tiles = call, call.block_sizes, call.tiles
    if gathers(c.block_size):
        tokens_backward.queries_alone(call, d_q, d_slot_scale)
        return
    R, H, S = c.ids.shape
    options = dq_options(**sizes, **c.memory)
    numbers = (c.d_o, c.lse, c.delta, c.lse2, c.ids)
    if can_walk(c.q, c.k, c.v, c.block_size) and c.slot_scale is None:
        count, T = (None, 1) if unions is None else (unions.count, unions.T)
        backward_tma.dq_kernel[(R, H)](
            c.q, c.k, c.v, *token_boxes(c.k, c.v, BT=options["BT"]), *numbers, c.rows.first_key,
            c.rows.num_visible, d_q, *c.scales, H, S, **sizes, GT=tiles["GT"], Count=count, T=T,
            **options,
        )  # fmt: skip
        return
    backward.dq_kernel[(R, H)](
        c.q, c.k, c.v, *numbers, c.slot_scale, c.rows.first_key, c.rows.num_visible, d_q,
        d_slot_scale, *c.scales, H, S, **sizes, SLOT_SCALE=c.slot_scale is not None, **tiles,
        **options,
    )  # fmt: skip


def gradients_of_keys_and_values(call: ListsCall, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of keys and values: of every block in chunks, then the sums of those that
    were cut."""
    if can_name_ahead(call):
        backward_ahead.launch(call, d_k, d_v)
        return
    c, sizes = call, call.block_sizes
    B, M, H = c.k.shape[:3]
    options = dkv_options(**sizes, **c.memory)
    cut = lists_backward.key_chunks(call, options["BT"])
    tables, walked = cut.tables, cut.tables.chunks
    backward.dkv_kernel[cut.grid](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, tables.factors, tables.row_end,
        walked.first_key, walked.head, walked.first, walked.last, walked.num_parts, walked.place,
        d_k, d_v, *cut.shares, *c.scales, H, B * M, **sizes, SLOT_SCALE=c.slot_scale is not None,
        **c.widths, **options, EDGE=edge(c.block_size),
        WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31,
    )  # fmt: skip
    lists_backward.add_shares(call, cut, d_k, d_v)
