"""What the operators call for summaries on the Triton backend: attention to them, and its
gradients.

`forward` and `backward` hold the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import runs
from nsa_tutorial.kernels.triton import tables
from nsa_tutorial.kernels.triton.backward_call import BackwardCall
from nsa_tutorial.kernels.triton.compressed import backward, forward
from nsa_tutorial.kernels.triton.descriptors import can_use_descriptors, flat_boxes
from nsa_tutorial.kernels.triton.launch_options import (
    FEW_SUMMARIES,
    attend_options,
    summary_dkv_options,
    summary_dq_options,
    tile_sizes,
)
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

SUM_KEYS = 4  # summaries whose shares a program of the backward adds
# Rows that a program looks at to find those that see its tile in part: 128 strides of 32 tokens.
EDGE = 4096


def compressed_forward(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to the visible summaries: `compression.compressed_attention`. `out` are contiguous
    tensors to write to; None makes new ones."""
    (B, N, HQ, D), (H, DV) = q.shape, v_cmp.shape[2:]
    o, lse = out or (
        v_cmp.new_empty(B, N, HQ, DV), q.new_empty(B, N, HQ, dtype=torch.float32)
    )  # fmt: skip
    sizes = {"G": HQ // H, "D": D, "DV": DV}
    tiles = tile_sizes(**sizes)
    is_short = k_cmp.shape[1] <= FEW_SUMMARIES
    memory = (q.element_size(), shared_memory(q.device))
    options = attend_options(D, DV, *memory, is_short)
    grid = (cdiv(B * N, options["BQ"]) * HQ,)
    q, k, v = (x.contiguous() for x in (q, k_cmp, v_cmp))
    boxes = flat_boxes(k, v, BT=options["BT"]) if can_use_descriptors(q, k, v) else (None, None)
    forward.attend_kernel[grid](
        q, k, v, *boxes, rows.first_key, rows.num_visible, o, lse, scale, scale * LOG2_E, B * N, H,
        **sizes, DT=tiles["DT"], DVT=tiles["DVT"], **options,
    )  # fmt: skip
    return o, lse


def compressed_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float, d_q: Tensor | None = None,
    numbers: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `compressed_forward`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k_cmp, v_cmp, rows, scale: its arguments.
        o, lse: what it returned.
        d_q: contiguous gradients of `q` to which these are added; None makes new ones.
        numbers: as for `BackwardCall.of`.

    Returns:
        The gradients of `q`, `k_cmp` and `v_cmp`, in their dtypes; the same bits in every run.
    """
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return q.new_zeros(q.shape) if d_q is None else d_q, d_k, d_v
    is_added, d_q = d_q is not None, q.new_empty(q.shape) if d_q is None else d_q
    given = (d_o, d_lse, q, k_cmp, v_cmp, o, lse, rows)
    c = BackwardCall.of(*given, scale=scale, numbers=numbers)
    R, sizes, widths = B * N, c.sizes, c.widths

    # -- the queries --
    options = summary_dq_options(D, DV, **c.memory)
    backward.dq_kernel[(cdiv(R, options["BQ"]) * HQ,)](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, rows.first_key, rows.num_visible, d_q,
        *c.scales, R, H, **sizes, ADD=is_added, **widths, **options,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, **c.memory)
    BT, num_keys = options["BT"], B * M_c
    share_bytes = 4 * BT * sum(widths.values())
    seen, num_unread, row_end = tables.runs_of(
        rows, c.lse2, window_size=tables.MOST, tile_size=BT, num_keys=num_keys
    )
    first_row, last_row, num_tiles = seen[0], seen[3], seen.shape[1]
    num_chunks, chunk_rows = runs.chunks_of_rows(
        R, num_tiles * H, sizes["G"], share_bytes, q.element_size()
    )
    places = num_chunks * num_tiles * H * BT if num_chunks > 1 else 0
    shares = [q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]
    seen_rows = (rows.first_key, row_end, first_row, last_row)
    cuts = (num_tiles, chunk_rows)
    backward.dkv_kernel[(num_chunks * num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, num_unread, *seen_rows, d_k, d_v, *shares,
        *c.scales, R, H, num_keys, *cuts, **sizes, **widths, **options, EDGE=EDGE,
    )  # fmt: skip
    if places:
        backward.sum_kernel[(num_tiles * H, cdiv(BT, SUM_KEYS))](
            *shares, first_row, last_row, row_end, d_k, d_v, H, num_keys, *cuts,
            D=D, DV=DV, **widths, BT=BT, BK=SUM_KEYS,
        )  # fmt: skip
    return d_q, d_k, d_v
