"""What the operators call for sliding windows on the Triton backend: attention to them, and its
gradients, compiled on CUDA tensors, interpreted on CPU tensors.

`forward` and `backward` hold the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.backward_call import BackwardCall
from nsa_tutorial.kernels.triton.descriptors import can_use_descriptors, flat_boxes
from nsa_tutorial.kernels.triton.launch_options import (
    tile_sizes,
    window_dkv_options,
    window_dq_options,
    window_options,
)
from nsa_tutorial.kernels.triton.tables import runs_of
from nsa_tutorial.kernels.triton.window import backward, forward
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

SHORT_SUM = 256  # rows whose fp32 gradients are added up before the sum joins the others
Gradients = tuple[Tensor, Tensor, Tensor]


class Gated(NamedTuple):
    """A gated sum of three branches, of which the window is the last. All are contiguous.

    Attributes:
        gates: `[B, N, HQ]`, those of the branches in their order.
        outputs: `[B, N, HQ, DV]`, of the branches before.
        total: of the same shape, to write to.
    """

    gates: Sequence[Tensor]
    outputs: Sequence[Tensor]
    total: Tensor


@dataclass(frozen=True, kw_only=True)
class WindowCall(BackwardCall):
    """One backward of windows. Attributes besides those of `BackwardCall`:
    window_size: at most the number of keys.
    """

    window_size: int


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float,
    out: tuple[Tensor, Tensor] | None = None, gated: Gated | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to the last `window_size` keys.

    Args:
        q, k, v, rows, window_size, scale: as in `sliding_window.forward`.
        out: contiguous tensors to write to; None makes new ones.
        gated: the sum that this is the last part of; None for windows alone.
        options: `BQ`, `BT`, `BE`, `num_warps`, `num_stages`, in place of what `window_options`
            chooses.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]` in fp32.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    o, lse = out or (
        v.new_empty(B, N, HQ, DV), v.new_empty(B, N, HQ, dtype=torch.float32)
    )  # fmt: skip
    if o.numel() == 0:
        return o, lse
    G = HQ // H
    options = window_options(G, D, DV, q.element_size(), shared_memory(q.device)) | options
    q, k, v = (x.contiguous() for x in (q, k, v))
    boxes = flat_boxes(k, v, BT=options["BT"]) if can_use_descriptors(q, k, v) else (None, None)
    tiles = tile_sizes(G, D, DV)
    of_sum = (None,) * 6 if gated is None else (*gated.gates, *gated.outputs, gated.total)
    num_tiles = cdiv(N * G, options["BQ"])
    forward.attend_kernel[(B * num_tiles * H,)](
        q, k, v, *boxes, rows.first_key, rows.num_visible, o, lse, *of_sum, scale,
        scale * LOG2_E, N, H, num_tiles, min(window_size, M), G=G, D=D, DV=DV, DT=tiles["DT"],
        DVT=tiles["DVT"], **options,
    )  # fmt: skip
    return o, lse


def window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, out: Sequence[Tensor | None] = (),
    numbers: tuple[Tensor, Tensor] | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `window_forward`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, rows, window_size, scale: the forward's arguments.
        o, lse: what it returned.
        out: contiguous gradients of `q`, `k` and `v` to which these are added; None, for a new
            tensor, in place of the first or of both others.
        numbers: as for `BackwardCall.of`.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes; the same bits in every run.
    """
    out = (*out, None, None, None)[:3]
    if q.numel() == 0:
        return tuple(
            torch.zeros_like(x) if d_x is None else d_x
            for x, d_x in zip((q, k, v), out, strict=True)
        )
    sizes = {"window_size": min(window_size, k.shape[1]), "scale": scale}
    call = WindowCall.of(d_o, d_lse, q, k, v, o, lse, rows, **sizes, numbers=numbers)
    d_q, d_k, d_v = (
        x.new_empty(x.shape) if d_x is None else d_x for x, d_x in zip((q, k, v), out, strict=True)
    )
    gradient_of_queries(call, d_q, is_added=out[0] is not None)
    gradients_of_keys_and_values(call, d_k, d_v, is_added=out[1] is not None)
    return d_q, d_k, d_v


def gradient_of_queries(
    call: WindowCall, d_q: Tensor, *, is_added: bool = False, **options: int
) -> None:  # fmt: skip
    """Write the gradients of the queries, or add them. `options` stand in place of what
    `window_dq_options` chooses."""
    c, sizes = call, call.sizes
    (B, N), H = c.q.shape[:2], c.k.shape[2]
    options = window_dq_options(**sizes, **c.memory) | options
    num_tiles = cdiv(N * sizes["G"], options["BQ"])
    backward.dq_kernel[(B * num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, c.rows.first_key, c.rows.num_visible, d_q,
        *c.scales, N, H, num_tiles, c.window_size, **sizes, ADD=is_added, **c.widths, **options,
    )  # fmt: skip


def gradients_of_keys_and_values(
    call: WindowCall, d_k: Tensor, d_v: Tensor, *, is_added: bool = False, **options: int
) -> None:  # fmt: skip
    """Write the gradients of keys and values, or add them. `options` stand in place of what
    `window_dkv_options` chooses."""
    c, sizes = call, call.sizes
    B, M, H = c.k.shape[:3]
    options = window_dkv_options(sizes["D"], sizes["DV"], **c.memory) | options
    num_tiles = cdiv(B * M, options["BT"])
    runs, num_unread, _ = runs_of(
        c.rows, c.lse2, window_size=c.window_size, tile_size=options["BT"], num_keys=B * M
    )  # fmt: skip
    backward.dkv_kernel[(num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, c.rows.first_key, c.rows.num_visible, runs,
        num_unread, d_k, d_v, *c.scales, len(c.lse2), H, B * M, num_tiles, c.window_size, **sizes,
        ADD=is_added, **c.widths,
        PART=0 if c.q.element_size() == 2 else SHORT_SUM // options["BR"], **options,
    )  # fmt: skip
