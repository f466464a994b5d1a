"""What the operators call for gradients on the Triton backend: of lists, or of lists and windows.

`selected.backward` holds the kernels, `selected.backward_tma` the one for the queries that
Hopper runs faster, `tables.chunks` what the keys' kernel walks. The queries' gradients have the
forward's three orders; by blocks, they differ in their last bits from run to run. All others are
the same to the bit. No argument is checked here: `ops` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.launch_options import (
    dkv_options,
    dq_options,
    tile_sizes,
)
from nsa_tutorial.kernels.triton.selected import (
    backward,
    backward_tma,
    by_key_blocks_backward,
    by_query_tiles_backward,
    launch,
)
from nsa_tutorial.kernels.triton.selected.forward_tma import can_walk
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, Unions
from nsa_tutorial.kernels.triton.window import backward_launch as window
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

SUM_KEYS = 16  # keys whose shares a program adds
MOST_EDGE = 1024  # rows that a program looks at to find those that see its tile in part
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Backward:
    """One backward: what the forward was given and gave, contiguous, and the rows' numbers.

    Attributes:
        tile: keys of a block.
        delta, lse2: what `selected.backward.delta_kernel` writes, `[R, H, G]`.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    ids: Tensor
    rows: QueryRows
    tile: int
    scale: float
    slot_scale: Tensor | None
    delta: Tensor
    lse2: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The kernels' `G, D, DV, BS`."""
        (HQ, D), (H, DV) = self.q.shape[2:], self.v.shape[2:]
        return {"G": HQ // H, "D": D, "DV": DV, "BS": self.tile}

    @property
    def memory(self) -> dict[str, int]:
        """What the choice of options has to know besides the sizes."""
        return {
            "itemsize": self.q.element_size(), "shared_memory": shared_memory(self.q.device)
        }  # fmt: skip


def selected_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None, order: Order | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `launch.selected_forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: the forward's arguments.
        o, lse: what it returned.
        order: as for `selected_forward`; where it is None and PyTorch is told to be
            deterministic, no order that is not.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes, and of `slot_scale`, `[R, H, S]` fp32.
    """
    sizes = {"tile": block_size, "scale": scale, "slot_scale": slot_scale}
    call = prepare(d_o, d_lse, q, k, v, o, lse, ids, rows, **sizes)
    is_free = order is None
    most = launch.WORTHWHILE if is_free else ANY_LENGTH
    order = launch.order_taken(order, q, k, v, ids, slot_scale, block_size=block_size)
    # with a block of keys in a program, the queries' gradients differ from run to run
    if is_free and order is Order.KEY_BLOCKS and torch.are_deterministic_algorithms_enabled():
        order = Order.QUERIES
    if order is Order.KEY_BLOCKS:
        return *by_key_blocks_backward.all_gradients(call), None
    d_q, d_k, d_v = (q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    d_slot_scale = None if slot_scale is None else torch.zeros_like(slot_scale)
    if order is Order.QUERY_TILES:
        gradient_by_tiles(call, d_q, most=most)
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
    window.window_backward(*given, **windows)
    return *out, d_slot_scale


def prepare(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, tile: int, scale: float, slot_scale: Tensor | None,
) -> Backward:  # fmt: skip
    """What all passes read: contiguous tensors, and the numbers of each row."""
    R, H, G = len(rows.first_key), k.shape[2], q.shape[2] // k.shape[2]
    d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k, v, lse))
    delta, lse2 = (q.new_empty(R, H, G, dtype=torch.float32) for _ in range(2))
    call = Backward(d_o, q, k, v, lse, ids, rows, tile, scale, slot_scale, delta, lse2)
    tiles = tile_sizes(G, q.shape[3], v.shape[3])
    backward.delta_kernel[(R, H)](
        o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
        G=G, DV=v.shape[3], GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip
    return call


def gradient_by_tiles(call: Backward, d_q: Tensor, *, most: float) -> None:
    """Write the gradients of the queries, as `selected_forward` does their outputs."""
    c = call
    fast = can_walk(c.q, c.k, c.v, c.tile)
    if not fast:
        gradient_of_queries(call, d_q, None)
    made = by_query_tiles_backward.gradient_of_queries(
        c.d_o, c.q, c.k, c.v, c.lse, c.delta, c.lse2, c.ids, c.rows, d_q, block_size=c.tile,
        scale=c.scale, use_descriptors=fast, most=most,
    )  # fmt: skip
    if fast:
        gradient_of_queries(call, d_q, None, unions=made)


def gradient_of_queries(
    call: Backward, d_q: Tensor, d_slot_scale: Tensor | None, unions: Unions | None = None
) -> None:
    """Write the gradients of the queries and of the slots' factors, one program a query. With
    `unions`, only those of the tiles that are not wanted there."""
    c, sizes = call, call.sizes
    R, H, S = c.ids.shape
    options = dq_options(**sizes, **c.memory)
    tiles = tile_sizes(sizes["G"], sizes["D"], sizes["DV"])
    scales = (c.scale, c.scale * LOG2_E, H, S)
    numbers = (c.d_o, c.lse, c.delta, c.lse2, c.ids)
    if can_walk(c.q, c.k, c.v, c.tile) and c.slot_scale is None:
        count, T = (None, 1) if unions is None else (unions.count, unions.T)
        backward_tma.dq_kernel[(R, H)](
            c.q, c.k, c.v, *token_boxes(c.k, c.v, BT=options["BT"]), *numbers, c.rows.first_key,
            c.rows.num_visible, d_q, *scales, **sizes, GT=tiles["GT"], Count=count, T=T, **options,
        )  # fmt: skip
        return
    backward.dq_kernel[(R, H)](
        c.q, c.k, c.v, *numbers, c.slot_scale, c.rows.first_key, c.rows.num_visible, d_q,
        d_slot_scale, *scales, **sizes, SLOT_SCALE=c.slot_scale is not None, **tiles, **options,
    )  # fmt: skip


def gradients_of_keys_and_values(call: Backward, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of keys and values: of every tile in chunks, then the sums of those that
    were cut."""
    c, sizes = call, call.sizes
    (B, M, H), G, BS = c.k.shape[:3], sizes["G"], c.tile
    options = dkv_options(**sizes, **c.memory)
    tiles = tile_sizes(G, sizes["D"], sizes["DV"])
    widths = {name: tiles[name] for name in ("DT", "DVT")}
    parts = triton.cdiv(BS, options["BT"])  # programs of a tile
    share = (parts * options["BT"], sum(widths.values()))  # fp32 numbers of a chunk

    # -- the inverse lists --
    lse2 = c.lse2[:, :, 0]
    tables = backward_tables.tables_of_lists(
        c.ids, c.rows, lse2, block_size=BS, num_keys=B * M, G=G,
        share_bytes=4 * share[0] * share[1], itemsize=c.q.element_size(), slot_scale=c.slot_scale,
    )  # fmt: skip
    chunks = tables.chunks
    places = chunks.num_places * share[0]
    shares = [c.q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]

    # -- every chunk --
    backward.dkv_kernel[(len(chunks.first), parts)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, tables.factors, tables.row_end,
        chunks.first_key, chunks.head, chunks.first, chunks.last, chunks.num_parts, chunks.place,
        d_k, d_v, *shares, c.scale, c.scale * LOG2_E, H, B * M, **sizes,
        SLOT_SCALE=c.slot_scale is not None, **widths, **options,
        EDGE=min(triton.next_power_of_2(BS), MOST_EDGE),
        WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31,
    )  # fmt: skip

    # -- the sums --
    if places:
        backward.sum_kernel[(len(chunks.first), triton.cdiv(BS, SUM_KEYS))](
            *shares, tables.rows, tables.row_end, chunks.first_key, chunks.head, chunks.last,
            chunks.part, chunks.num_parts, chunks.place, d_k, d_v, H, B * M, D=sizes["D"],
            DV=sizes["DV"], BS=BS, **widths, BT=options["BT"], BK=SUM_KEYS,
        )  # fmt: skip
