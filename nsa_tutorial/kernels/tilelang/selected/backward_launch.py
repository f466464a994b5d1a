"""What the operators call for gradients on the TileLang backend: of lists, of windows, or of both,
on CUDA tensors, or on CPU tensors through C.

`selected.backward` holds the kernels, `selected.tokens_backward` that for blocks of a few tokens,
and `tables.chunks` what the keys' kernel walks. Gradients are the same to the bit from run to run,
but for those of keys and values in blocks of a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.launch_options import (
    dkv_options,
    dkv_sides,
    dq_options,
    token_gradient_options,
)
from nsa_tutorial.kernels.tilelang.selected import backward, tokens_backward
from nsa_tutorial.kernels.tilelang.selected.launch import split_long_blocks
from nsa_tutorial.kernels.tokens import adds_by_atomics, gathers
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

WINDOW_TILE = 64  # keys of a window that a program takes at a time
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backward:
    """One backward: what the forward was given and gave, contiguous, and the rows' numbers.

    Attributes:
        d_o, q: `[R, H, G, DV]`, `[R, H, G, D]`.
        k, v: `[B * M, H, D]`, `[B * M, H, DV]`.
        ids, rows, slot_scale: of lists; for windows, `ids [R, H, 0]` and None.
        tile: keys of a block, or of a step of a window.
        window_size: 0 for lists.
        lse, delta, lse2: `[R, H, G]`; the last two are what the kernel of `build_delta` writes.
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
    def dtype(self) -> str:
        """TileLang's name of it."""
        return str(self.q.dtype).removeprefix("torch.")

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The kernels' `H, G, D, DV, BS`."""
        return (*self.q.shape[1:], self.v.shape[-1], self.tile)

    @property
    def kinds(self) -> dict[str, object]:
        """What else is fixed when a kernel is compiled."""
        return {
            "dtype": self.dtype, "is_window": self.window_size > 0,
            "has_factors": self.slot_scale is not None, "is_added": self.is_added,
        }  # fmt: skip

    @property
    def memory(self) -> dict[str, int]:
        """What the choice of options has to know besides the sizes."""
        return {
            "itemsize": self.q.element_size(), "shared_memory": shared_memory(self.q.device)
        }  # fmt: skip

    @property
    def no_factors(self) -> Tensor:
        """What a kernel gets where there are no factors: an empty `[R, H, 0]`."""
        return self.lse[..., :0]


def selected_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `selected.launch.selected_forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: the forward's arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes, and of `slot_scale`, `[R, H, S]` fp32.
    """
    options = {"tile": block_size, "window_size": 0, "scale": scale, "slot_scale": slot_scale}
    return _gradients(d_o, d_lse, q, k, v, o, lse, ids, rows, **options)


def window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `selected.launch.window_forward`; arguments and results as in
    `selected_backward`. `out` are gradients to which these are added; None makes new ones."""
    no_list = rows.first_key.new_empty(len(rows.first_key), v.shape[2], 0)  # [R, H, S = 0]
    options = {"tile": WINDOW_TILE, "window_size": window_size, "scale": scale, "slot_scale": None}
    return _gradients(d_o, d_lse, q, k, v, o, lse, no_list, rows, **options, out=out)[:3]


def selected_and_window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, window_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The backward of `selected.launch.selected_and_window_forward`, through both outputs:
    `d_o, d_lse, o, lse` are those of the lists, then of the windows."""
    (d_o, d_o_win), (d_lse, d_lse_win), (o, o_win), (lse, lse_win) = d_o, d_lse, o, lse
    lists = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    *out, d_slot_scale = selected_backward(d_o, d_lse, q, k, v, o, lse, ids, rows, **lists)
    windows = {"window_size": window_size, "scale": scale, "out": tuple(out)}
    window_backward(d_o_win, d_lse_win, q, k, v, o_win, lse_win, rows, **windows)
    return *out, d_slot_scale


def _gradients(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, tile: int, window_size: int, scale: float,
    slot_scale: Tensor | None, out: Gradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    R, H, G = len(rows.first_key), k.shape[2], q.shape[2] // k.shape[2]
    d_q, d_k, d_v = out or (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.zeros_like(k, memory_format=torch.contiguous_format),
        torch.zeros_like(v, memory_format=torch.contiguous_format),
    )
    q, d_o, o = (x.reshape(R, H, G, -1).contiguous() for x in (q, d_o, o))
    k, v = (x.flatten(0, 1).contiguous() for x in (k, v))  # [B * M, H, …]
    lse, d_lse = (x.reshape(R, H, G).contiguous() for x in (lse, d_lse))
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    call = Backward(
        d_o, q, k, v, lse, ids, rows, tile, window_size, scale, slot_scale, delta, lse2,
        is_added=out is not None,
    )  # fmt: skip
    sizes = (H, G, v.shape[2])
    delta_kernel = compiled(backward.build_delta, kind_of(q.device), *sizes, dtype=call.dtype)
    delta_kernel(o, d_o, lse, d_lse, delta, lse2)
    if not window_size and gathers(tile):
        if adds_by_atomics(q):
            d_slot_scale = all_gradients_of_tokens(call, d_q.view(q.shape), d_k, d_v)
            return d_q, d_k, d_v, d_slot_scale
        d_slot_scale = gradients_of_tokens(call, d_q.view(q.shape))
    else:
        d_slot_scale = gradient_of_queries(call, d_q.view(q.shape))
    gradients_of_keys_and_values(call, d_k.view(k.shape), d_v.view(v.shape))
    return d_q, d_k, d_v, d_slot_scale


def gradient_of_queries(call: Backward, d_q: Tensor) -> Tensor | None:
    """Write the gradient of the queries; returns that of the slots' factors."""
    c, (_, *shape) = call, call.sizes
    options = dq_options(*shape, **c.memory)
    parts = -(-c.tile // options["BT"])  # steps of a block
    rows, slot_scale = c.rows, c.no_factors
    d_slot_scale = slot_scale
    if c.window_size:  # rows that see nothing before their window
        start = (rows.num_visible - c.window_size).clamp(min=0)
        rows = rows._replace(first_key=rows.first_key + start, num_visible=rows.num_visible - start)
    if c.slot_scale is not None:
        slot_scale = c.slot_scale.contiguous()
        d_slot_scale = slot_scale.new_zeros(*slot_scale.shape[:2], slot_scale.shape[2] * parts)
    kernel = compiled(backward.build_dq, kind_of(d_q.device), *c.sizes, **c.kinds, **options)
    kernel(
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, c.ids, slot_scale, rows.first_key,
        rows.num_visible, d_q, d_slot_scale, c.scale, c.scale * LOG2_E,
    )  # fmt: skip
    return None if c.slot_scale is None else d_slot_scale.unflatten(-1, (-1, parts)).sum(-1)


def gradients_of_tokens(call: Backward, d_q: Tensor, *sums: Tensor) -> Tensor | None:
    """The same for blocks of a few tokens; adds the gradients of keys and values to `sums`, fp32,
    `[B * M, H, D]` and `[B * M, H, DV]`, if there are any."""
    c, (H, G, D, DV) = call, call.sizes[:4]
    kinds = {"has_factors": c.slot_scale is not None, "adds": bool(sums)}
    options = token_gradient_options(G, D, DV, **c.memory, adds=bool(sums))
    tokens, _ = split_long_blocks(c.ids, c.tile, 1, room=1)
    slot_scale = c.no_factors
    if c.slot_scale is not None:  # the tokens of a block share its factor
        slot_scale = c.slot_scale.repeat_interleave(c.tile, dim=-1)
    d_slot_scale = torch.zeros_like(slot_scale)
    sums = sums or (c.lse.new_empty(0, H, D), c.lse.new_empty(0, H, DV))
    build, device = tokens_backward.build_gradients, kind_of(d_q.device)
    compiled(build, device, H, G, D, DV, c.dtype, **kinds, **options)(
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, tokens, slot_scale, c.rows.first_key,
        c.rows.num_visible, d_q, d_slot_scale, *sums, c.scale, c.scale * LOG2_E,
    )  # fmt: skip
    return None if c.slot_scale is None else d_slot_scale.unflatten(-1, (-1, c.tile)).sum(-1)


def all_gradients_of_tokens(call: Backward, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Tensor | None:
    """The same, and write those of keys and values, in whatever order they come."""
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (d_k, d_v)]
    d_slot_scale = gradients_of_tokens(call, d_q, *(x.flatten(0, 1) for x in sums))
    d_k.copy_(sums[0])
    d_v.copy_(sums[1])
    return d_slot_scale


def gradients_of_keys_and_values(call: Backward, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of keys and values: of every tile in chunks, then the sums of those that
    were cut."""
    c, (H, G, D, DV, BS) = call, call.sizes
    device, num_keys = kind_of(d_k.device), len(d_k)
    options = dkv_options(G, D, DV, BS, **c.memory)
    BT = options["BT"]
    widths = dkv_sides(D, DV, c.q.element_size())
    share = (-(-BS // BT) * BT, sum(widths))  # fp32 numbers of a chunk

    # -- the inverse lists --
    lse2 = c.lse2[:, :, 0]
    common = {
        "num_keys": num_keys, "G": G, "share_bytes": 4 * share[0] * share[1],
        "itemsize": d_k.element_size(),
    }  # fmt: skip
    if c.window_size:
        windows = {"window_size": c.window_size, "tile_size": BS}
        tables = backward_tables.tables_of_windows(c.rows, lse2, **windows, **common)
    else:
        lists = {"block_size": BS, "slot_scale": c.slot_scale}
        tables = backward_tables.tables_of_lists(c.ids, c.rows, lse2, **lists, **common)
    chunks = tables.chunks
    factors = c.no_factors.flatten() if tables.factors is None else tables.factors
    shares = [c.lse.new_empty(chunks.num_places, share[0], width) for width in widths]

    # -- every chunk --
    compiled(backward.build_dkv, device, *c.sizes, **c.kinds, **options)(
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, factors, tables.row_start,
        tables.row_end, chunks.first_key, chunks.head, chunks.first, chunks.last, chunks.num_parts,
        chunks.place, d_k, d_v, *shares, c.scale, c.scale * LOG2_E,
    )  # fmt: skip

    # -- the sums --
    if chunks.num_places:
        kinds = {"dtype": c.dtype, "is_added": c.is_added}
        compiled(backward.build_sum, device, H, D, DV, BS, BT=BT, **kinds)(
            *shares, tables.rows, tables.row_end, chunks.first_key, chunks.head, chunks.last,
            chunks.part, chunks.num_parts, chunks.place, d_k, d_v,
        )  # fmt: skip
