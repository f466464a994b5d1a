"""What the operators call for gradients on the Triton backend: of lists, of windows, or of both.

`triton_backward` holds the kernels, `triton_backward_descriptors` the one for the queries that
Hopper runs faster, `backward_tables` what the keys' kernel walks. Gradients are the same to the bit
from run to run. No argument is checked here: `ops` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import backward_tables, triton_backward, triton_backward_descriptors
from nsa_tutorial.kernels.triton_descriptors import can_use_descriptors, descriptors
from nsa_tutorial.kernels.triton_tiles import (
    dkv_options,
    dq_options,
    tile_sizes,
)
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

WINDOW_TILE = 64  # keys of a window that a program takes at a time
SUM_KEYS = 16  # keys whose shares a program adds
MOST_EDGE = 1024  # rows that a program looks at to find those that see its tile in part
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backward:
    """One backward: what the forward was given and gave, contiguous, and the rows' numbers.

    Attributes:
        ids, rows, slot_scale: of lists; for windows, `ids [R, H, 0]` and None.
        tile: keys of a block, or of a step of a window.
        window_size: 0 for lists.
        delta, lse2: what `triton_backward.delta_kernel` writes, `[R, H, G]`.
        is_added: whether gradients are added to what stands in their place.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    ids: Tensor
    rows: QueryRows
    tile: int
    window_size: int
    scale: float
    slot_scale: Tensor | None
    delta: Tensor
    lse2: Tensor
    is_added: bool

    @property
    def sizes(self) -> dict[str, int]:
        """The kernels' `G, D, DV, BS`."""
        (HQ, D), (H, DV) = self.q.shape[2:], self.v.shape[2:]
        return {"G": HQ // H, "D": D, "DV": DV, "BS": self.tile}

    @property
    def flags(self) -> dict[str, bool]:
        """What the kernels are to do."""
        return {
            "WINDOW": self.window_size > 0, "SLOT_SCALE": self.slot_scale is not None,
            "ADD": self.is_added,
        }  # fmt: skip

    @property
    def memory(self) -> dict[str, int]:
        """What the choice of options has to know besides the sizes."""
        return {
            "itemsize": self.q.element_size(), "shared_memory": shared_memory(self.q.device)
        }  # fmt: skip


def of_lists(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `triton_launch.forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: the forward's arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes, and of `slot_scale`, `[R, H, S]` fp32.
    """
    options = {"tile": block_size, "window_size": 0, "scale": scale, "slot_scale": slot_scale}
    return _gradients(d_o, d_lse, q, k, v, o, lse, ids, rows, **options)


def of_windows(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `triton_launch.sliding_window`; arguments and results as in `of_lists`. `out`
    are gradients to which these are added; None makes new ones."""
    no_list = rows.first_key.new_empty(len(rows.first_key), v.shape[2], 0)  # [R, H, S = 0]
    options = {"tile": WINDOW_TILE, "window_size": window_size, "scale": scale, "slot_scale": None}
    return _gradients(d_o, d_lse, q, k, v, o, lse, no_list, rows, **options, out=out)[:3]


def of_lists_and_windows(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, window_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `triton_launch.selection_and_window`, through both outputs: `d_o, d_lse, o,
    lse` are those of the lists, then of the windows."""
    (d_o, d_o_win), (d_lse, d_lse_win), (o, o_win), (lse, lse_win) = d_o, d_lse, o, lse
    lists = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    *out, d_slot_scale = of_lists(d_o, d_lse, q, k, v, o, lse, ids, rows, **lists)
    windows = {"window_size": window_size, "scale": scale, "out": tuple(out)}
    of_windows(d_o_win, d_lse_win, q, k, v, o_win, lse_win, rows, **windows)
    return *out, d_slot_scale


def _gradients(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, tile: int, window_size: int, scale: float,
    slot_scale: Tensor | None, out: Gradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    numbers = {"tile": tile, "window_size": window_size, "scale": scale, "slot_scale": slot_scale}
    call = prepare(d_o, d_lse, q, k, v, o, lse, ids, rows, **numbers, is_added=out is not None)
    d_q, d_k, d_v = out or (
        q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    )  # fmt: skip
    d_slot_scale = None if slot_scale is None else torch.zeros_like(slot_scale)
    gradient_of_queries(call, d_q, d_slot_scale)
    gradients_of_keys_and_values(call, d_k, d_v)
    return d_q, d_k, d_v, d_slot_scale


def prepare(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, tile: int, window_size: int, scale: float,
    slot_scale: Tensor | None, is_added: bool = False,
) -> Backward:  # fmt: skip
    """What all passes read: contiguous tensors, and the numbers of each row."""
    R, H, G = len(rows.first_key), k.shape[2], q.shape[2] // k.shape[2]
    d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k, v, lse))
    delta, lse2 = (q.new_empty(R, H, G, dtype=torch.float32) for _ in range(2))
    call = Backward(
        d_o, q, k, v, lse, ids, rows, tile, window_size, scale, slot_scale, delta, lse2,
        is_added,
    )  # fmt: skip
    tiles = tile_sizes(G, q.shape[3], v.shape[3])
    triton_backward.delta_kernel[(R, H)](
        o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
        G=G, DV=v.shape[3], GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip
    return call


def gradient_of_queries(call: Backward, d_q: Tensor, d_slot_scale: Tensor | None) -> None:
    """Write the gradients of the queries and of the slots' factors."""
    c, sizes = call, call.sizes
    R, H, S = c.ids.shape
    options = dq_options(**sizes, **c.memory)
    tiles = tile_sizes(sizes["G"], sizes["D"], sizes["DV"])
    scales = (c.scale, c.scale * LOG2_E, H, S)
    numbers = (c.d_o, c.lse, c.delta, c.lse2, c.ids)
    if can_use_descriptors(c.q, c.k, c.v, c.tile) and not any(c.flags.values()):
        triton_backward_descriptors.dq_kernel[(R, H)](
            c.q, c.k, c.v, *descriptors(c.k, c.v, BT=options["BT"]), *numbers, c.rows.first_key,
            c.rows.num_visible, d_q, *scales, **sizes, GT=tiles["GT"], **options,
        )  # fmt: skip
        return
    triton_backward.dq_kernel[(R, H)](
        c.q, c.k, c.v, *numbers, c.slot_scale, c.rows.first_key, c.rows.num_visible, d_q,
        d_slot_scale, *scales, c.window_size, **sizes, **c.flags, **tiles, **options,
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
    common = {
        "num_keys": B * M, "G": G, "share_bytes": 4 * share[0] * share[1],
        "itemsize": c.q.element_size(),
    }  # fmt: skip
    if c.window_size:
        windows = {"window_size": c.window_size, "tile_size": BS}
        tables = backward_tables.of_windows(c.rows, lse2, **windows, **common)
    else:
        lists = {"block_size": BS, "slot_scale": c.slot_scale}
        tables = backward_tables.of_lists(c.ids, c.rows, lse2, **lists, **common)
    chunks = tables.chunks
    places = chunks.num_places * share[0]
    shares = [c.q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]

    # -- every chunk --
    triton_backward.dkv_kernel[(len(chunks.first), parts)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, tables.factors, tables.row_start,
        tables.row_end, chunks.first_key, chunks.head, chunks.first, chunks.last, chunks.num_parts,
        chunks.place, d_k, d_v, *shares, c.scale, c.scale * LOG2_E, H, B * M, **sizes, **c.flags,
        **widths, **options, EDGE=min(triton.next_power_of_2(BS), MOST_EDGE),
        WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31,
    )  # fmt: skip

    # -- the sums --
    if places:
        triton_backward.sum_kernel[(len(chunks.first), triton.cdiv(BS, SUM_KEYS))](
            *shares, tables.rows, tables.row_end, chunks.first_key, chunks.head, chunks.last,
            chunks.part, chunks.num_parts, chunks.place, d_k, d_v, H, B * M, D=sizes["D"],
            DV=sizes["DV"], BS=BS, ADD=c.is_added, **widths, BT=options["BT"], BK=SUM_KEYS,
        )  # fmt: skip
