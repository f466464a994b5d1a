"""What the operators call for summaries on the Triton backend: attention to them, and its
gradients.

`forward` and `backward` hold the kernels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import runs
from nsa_tutorial.kernels.triton.backward_call import BackwardCall
from nsa_tutorial.kernels.triton.compressed import backward, forward
from nsa_tutorial.kernels.triton.descriptors import can_use_descriptors, flat_boxes
from nsa_tutorial.kernels.triton.launch_options import (
    attend_options,
    summary_dkv_options,
    summary_dq_options,
    tile_sizes,
)
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

SUM_KEYS = 16  # summaries whose shares a program of the backward adds
# Rows that a program looks at to find those that see its tile in part: 128 strides of 32 tokens.
EDGE = 4096


def compressed_forward(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the visible summaries: `compression.compressed_attention`."""
    (B, N, HQ, D), (H, DV) = q.shape, v_cmp.shape[2:]
    o = v_cmp.new_empty(B, N, HQ, DV)
    lse = q.new_empty(B, N, HQ, dtype=torch.float32)
    sizes = {"G": HQ // H, "D": D, "DV": DV}
    tiles = tile_sizes(**sizes)
    options = attend_options(D, DV, q.element_size(), shared_memory(q.device))
    grid = (triton.cdiv(B * N, options["BQ"]) * HQ,)
    q, k, v = (x.contiguous() for x in (q, k_cmp, v_cmp))
    boxes = flat_boxes(k, v, BT=options["BT"]) if can_use_descriptors(q, k, v) else (None, None)
    forward.attend_kernel[grid](
        q, k, v, *boxes, rows.first_key, rows.num_visible, o, lse, scale, scale * LOG2_E, B * N, H,
        **sizes, DT=tiles["DT"], DVT=tiles["DVT"], **options,
    )  # fmt: skip
    return o, lse


def compressed_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `compressed_forward`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k_cmp, v_cmp, rows, scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k_cmp` and `v_cmp`, in their dtypes; the same bits in every run.
    """
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    d_q = q.new_empty(q.shape)
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_(), d_k, d_v
    c = BackwardCall.of(d_o, d_lse, q, k_cmp, v_cmp, o, lse, rows, scale=scale)
    R, sizes, widths = B * N, c.sizes, c.widths

    # -- the queries --
    options = summary_dq_options(D, DV, **c.memory)
    backward.dq_kernel[(triton.cdiv(R, options["BQ"]) * HQ,)](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, rows.first_key, rows.num_visible, d_q,
        *c.scales, R, H, **sizes, **widths, **options,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, **c.memory)
    BT, num_keys = options["BT"], B * M_c
    share_bytes = 4 * BT * sum(widths.values())
    seen = runs.runs_of_tiles(
        rows, c.lse2[:, :, 0], num_keys=num_keys, tile_size=BT, G=sizes["G"],
        share_bytes=share_bytes, itemsize=q.element_size(),
    )  # fmt: skip
    places = seen.num_chunks * seen.num_tiles * H * BT if seen.num_chunks > 1 else 0
    shares = [q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]
    seen_rows = (seen.row_start, seen.row_end, seen.first_row, seen.last_row)
    cuts = (seen.num_tiles, seen.chunk_rows)
    backward.dkv_kernel[(seen.num_chunks * seen.num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, seen.num_unread, *seen_rows, d_k, d_v, *shares,
        *c.scales, R, H, num_keys, *cuts, **sizes, **widths, **options, EDGE=EDGE,
    )  # fmt: skip
    if places:
        backward.sum_kernel[(seen.num_tiles * H, triton.cdiv(BT, SUM_KEYS))](
            *shares, seen.first_row, seen.last_row, seen.row_end, d_k, d_v, H, num_keys, *cuts,
            D=D, DV=DV, **widths, BT=BT, BK=SUM_KEYS,
        )  # fmt: skip
    return d_q, d_k, d_v
