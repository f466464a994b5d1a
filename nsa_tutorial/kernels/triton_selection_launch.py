"""What the operators call for summaries on the Triton backend: attention to them, its gradients,
and the choice of blocks.

`triton_selection` and `triton_selection_backward` hold the kernels, `triton_selection_descriptors`
one for Hopper. No argument is checked here: `ops` does.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import (
    summary_runs,
    triton_selection,
    triton_selection_backward,
    triton_selection_descriptors,
)
from nsa_tutorial.kernels.triton_backward import delta_kernel
from nsa_tutorial.kernels.triton_selection_descriptors import can_use_descriptors, descriptors
from nsa_tutorial.kernels.triton_tiles import (
    attend_options,
    pick_options,
    score_options,
    summary_dkv_options,
    summary_dq_options,
    tile_sizes,
)
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse import score_cells
from nsa_tutorial.sparse.selected_attention import QueryRows

SUM_KEYS = 16  # summaries whose shares a program of the backward adds
# Rows that a program looks at to find those that see its tile in part: 128 strides of 32 tokens.
EDGE = 4096


def compressed_attention(
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
    rest = (rows.first_key, rows.num_visible, o, lse, scale, scale * LOG2_E, B * N, H)
    if can_use_descriptors(q, k, v):
        boxes = descriptors(k, v, BT=options["BT"])
        triton_selection_descriptors.attend_kernel[grid](q, k, v, *boxes, *rest, **sizes, **options)
        return o, lse
    triton_selection.attend_kernel[grid](
        q, k, v, *rest, **sizes, DT=tiles["DT"], DVT=tiles["DVT"], **options
    )
    return o, lse


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float, block_counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The blocks of each query: `block_selection.select_blocks`, a chunk of queries at a time."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    R = B * N
    if lse is None:
        _, lse = compressed_attention(q, k_cmp, k_cmp, summaries, scale=scale)
    q, k_cmp, lse = q.contiguous(), k_cmp.contiguous(), lse.contiguous()
    cells = score_cells.cells(
        M, length=length, stride=stride, block_size=block_size,
        is_apart=rows.num_sequences == 1 or (rows.num_sequences == B and N % score_cells.TILE == 0),
    )  # fmt: skip
    options = score_options(D, q.element_size(), shared_memory(q.device))
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    if block_counts is not None:
        block_counts = block_counts.contiguous()
    rows_of_a_chunk = score_cells.rows_of_a_chunk(cells, R, H)
    scores = q.new_empty(cells.shares * rows_of_a_chunk * H * cells.per_row, dtype=torch.float32)
    for first_row in range(0, R, rows_of_a_chunk):
        last_row = min(first_row + rows_of_a_chunk, R)
        num_rows = last_row - first_row
        num_blocks = cells.num_blocks
        if B == 1 and rows.num_sequences == 1:  # queries are in order: what they see is known
            num_blocks = score_cells.power_of_two(-(-(M - N + last_row) // block_size))
        pick = pick_options(num_blocks)
        triton_selection.score_kernel[(triton.cdiv(num_rows, options["BQ"]) * H,)](
            q, k_cmp, lse, summaries.first_key, summaries.num_visible, scores, scale * LOG2_E,
            last_row, first_row, H, cells.per_row, G=HQ // H, D=D, C=cells.size,
            SHARES=cells.shares, PIECES=cells.pieces, DT=tile_sizes(1, D, D)["DT"], **options,
        )  # fmt: skip
        triton_selection.pick_kernel[(triton.cdiv(num_rows * H, pick["BR"]),)](
            scores, summaries.num_visible, rows.position, block_counts, ids, num_rows, first_row,
            H, cells.per_row, top_n, num_initial, num_local, length, stride, BS=block_size,
            C=cells.size, SHARES=cells.shares, K=cells.overlapping, NB=num_blocks,
            HAS_COUNTS=block_counts is not None, NT=triton.next_power_of_2(top_n), **pick,
        )  # fmt: skip
    return ids


def of_summaries(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `compressed_attention`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k_cmp, v_cmp, rows, scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k_cmp` and `v_cmp`, in their dtypes; the same bits in every run.
    """
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    R, sizes = B * N, {"G": HQ // H, "D": D, "DV": DV}
    d_q = q.new_empty(q.shape)
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_(), d_k, d_v
    d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k_cmp, v_cmp, lse))
    tiles = tile_sizes(**sizes)
    widths = {name: tiles[name] for name in ("DT", "DVT")}
    memory = shared_memory(q.device)
    scales = (scale, scale * LOG2_E)

    # -- a row's numbers --
    delta, lse2 = (q.new_empty(R, H, HQ // H, dtype=torch.float32) for _ in range(2))
    delta_kernel[(R, H)](
        o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
        G=sizes["G"], DV=DV, GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip

    # -- the queries --
    options = summary_dq_options(D, DV, q.element_size(), memory)
    triton_selection_backward.dq_kernel[(triton.cdiv(R, options["BQ"]) * HQ,)](
        q, k, v, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, d_q, *scales, R, H,
        **sizes, **widths, **options,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, q.element_size(), memory)
    BT, num_keys = options["BT"], B * M_c
    share_bytes = 4 * BT * sum(widths.values())
    seen = summary_runs.runs(
        rows, lse2[:, :, 0], num_keys=num_keys, tile_size=BT, G=sizes["G"],
        share_bytes=share_bytes, itemsize=q.element_size(),
    )  # fmt: skip
    places = seen.num_chunks * seen.num_tiles * H * BT if seen.num_chunks > 1 else 0
    shares = [q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]
    runs = (seen.row_start, seen.row_end, seen.first_row, seen.last_row)
    cuts = (seen.num_tiles, seen.chunk_rows)
    triton_selection_backward.dkv_kernel[(seen.num_chunks * seen.num_tiles * H,)](
        q, k, v, d_o, delta, lse2, seen.num_unread, *runs, d_k, d_v, *shares, *scales, R, H,
        num_keys, *cuts, **sizes, **widths, **options, EDGE=EDGE,
    )  # fmt: skip
    if places:
        triton_selection_backward.sum_kernel[(seen.num_tiles * H, triton.cdiv(BT, SUM_KEYS))](
            *shares, seen.first_row, seen.last_row, seen.row_end, d_k, d_v, H, num_keys, *cuts,
            D=D, DV=DV, **widths, BT=BT, BK=SUM_KEYS,
        )  # fmt: skip
    return d_q, d_k, d_v
