"""What the operators call for summaries on the TileLang backend: attention to them, and the choice
of blocks, on CUDA tensors, or on CPU tensors through C.

`tilelang_selection` and `tilelang_selection_backward` hold the kernels. No argument is checked
here: `ops` does.
"""

from __future__ import annotations

import functools

import tilelang
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import (
    summary_runs,
    tilelang_backward,
    tilelang_selection,
    tilelang_selection_backward,
)
from nsa_tutorial.kernels.tilelang_forward import PASS_CONFIGS as ALL_THREADS_LOAD
from nsa_tutorial.kernels.tilelang_tiles import (
    attend_options,
    has_tma,
    pick_threads,
    score_options,
    summary_dkv_options,
    summary_dq_options,
    summary_sides,
)
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse import score_cells
from nsa_tutorial.sparse.query_tiles import at_least_one
from nsa_tutorial.sparse.selected_attention import QueryRows

# a warp group loads, the others compute
PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
KERNELS = {
    "attend": tilelang_selection.build_attend,
    "score": tilelang_selection.build_score,
    "pick": tilelang_selection.build_pick,
    "delta": tilelang_backward.build_delta,
    "dq": tilelang_selection_backward.build_dq,
    "dkv": tilelang_selection_backward.build_dkv,
    "sum": tilelang_selection_backward.build_sum,
}


@functools.cache
def compiled(name: str, device: str, *shape: int, **options: object) -> tilelang.JITKernel:
    """The kernel of `KERNELS[name](*shape, **options)`, compiled for `kind_of` a device, once per
    process."""
    kernel = KERNELS[name](*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    pass_configs = ALL_THREADS_LOAD if name in ("pick", "delta", "sum") else PASS_CONFIGS
    return tilelang.compile(kernel, target="cuda", pass_configs=pass_configs)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the visible summaries: `compression.compressed_attention`."""
    (B, N, HQ, D), (H, DV) = q.shape, v_cmp.shape[2:]
    o = v_cmp.new_empty(B, N, HQ, DV)
    lse = q.new_empty(B, N, HQ, dtype=torch.float32)
    options = attend_options(D, DV, q.element_size(), shared_memory(q.device))
    kernel = compiled(
        "attend", kind_of(q.device), H, HQ // H, D, DV, dtype=dtype_of(q), **options,
        has_tma=has_tma(q.device, D * q.element_size(), DV * q.element_size()),
    )  # fmt: skip
    kernel(
        rows_of(q), rows_of(at_least_one(k_cmp)), rows_of(at_least_one(v_cmp)), rows.first_key,
        rows.num_visible, o.view(-1, HQ, DV), lse.view(-1, HQ), scale, scale * LOG2_E,
    )  # fmt: skip
    return o, lse


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, rows: QueryRows, summaries: QueryRows, *,
    M: int, top_n: int, block_size: int, length: int, stride: int, num_initial: int, num_local: int,
    scale: float, block_counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The blocks of each query: `block_selection.select_blocks`, a chunk of queries at a time."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    R, M_c, device = B * N, k_cmp.shape[1], kind_of(q.device)
    if lse is None:
        _, lse = compressed_attention(q, k_cmp, k_cmp, summaries, scale=scale)
    cells = score_cells.cells(
        M, length=length, stride=stride, block_size=block_size,
        is_apart=rows.num_sequences == 1 or (rows.num_sequences == B and N % score_cells.TILE == 0),
    )  # fmt: skip
    rows_of_a_chunk = score_cells.rows_of_a_chunk(cells, R, H)
    shape = (cells.shares, rows_of_a_chunk, H, cells.per_row)
    scores = q.new_empty(shape, dtype=torch.float32)
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    q, k_cmp, lse = rows_of(q), rows_of(at_least_one(k_cmp)), lse.reshape(R, HQ).contiguous()
    has_counts = block_counts is not None
    counts = block_counts.view(R, H).to(ids) if has_counts else ids.new_empty(0, H)
    options = score_options(HQ // H, D, q.element_size(), shared_memory(q.device))
    score = compiled(
        "score", device, H, HQ // H, D, cells.size, cells.shares, cells.pieces, dtype=dtype_of(q),
        **options,
    )  # fmt: skip
    # the summaries of all sequences that share a tile
    num_sequences = 1 if N % options["BQ"] == 0 else min(B, (options["BQ"] - 2) // N + 2)
    num_steps = max(1, -(-num_sequences * M_c // options["BT"]))
    pick = compiled(
        "pick", device, H, block_size, cells.size, cells.shares, cells.overlapping,
        cells.num_blocks, has_counts=has_counts, threads=pick_threads(cells.num_blocks),
    )  # fmt: skip
    for first_row in range(0, R, rows_of_a_chunk):
        num_rows = min(rows_of_a_chunk, R - first_row)
        score(
            q, k_cmp, lse, summaries.first_key, summaries.num_visible, scores, scale * LOG2_E,
            first_row, num_rows, num_steps,
        )  # fmt: skip
        pick(
            scores, summaries.num_visible, rows.position, counts, ids.view(R, H, top_n), first_row,
            num_rows, num_initial, num_local, length, stride,
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
    R, G, device, dtype, itemsize = B * N, HQ // H, kind_of(q.device), dtype_of(q), q.element_size()
    d_q = q.new_empty(q.shape)
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_(), d_k, d_v
    d_o, d_lse, q, k, v, o, lse = map(rows_of, (d_o, d_lse, q, k_cmp, v_cmp, o, lse))
    is_tma = has_tma(q.device, D * itemsize, DV * itemsize)
    memory = shared_memory(q.device)
    scales = (scale, scale * LOG2_E)

    # -- a row's numbers --
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    numbers = [x.view(R, H, G) for x in (lse, d_lse, delta, lse2)]
    compiled("delta", device, H, G, DV, dtype=dtype)(
        o.view(R, H, G, DV), d_o.view(R, H, G, DV), *numbers
    )

    # -- the queries --
    options = summary_dq_options(D, DV, itemsize, memory)
    compiled("dq", device, H, G, D, DV, dtype=dtype, has_tma=is_tma, **options)(
        q, k, v, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, d_q.view(R, HQ, D),
        *scales,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, itemsize, memory)
    BT, widths = options["BT"], summary_sides(D, DV, itemsize)
    seen = summary_runs.runs(
        rows, lse2.view(R, H, G)[:, :, 0], num_keys=B * M_c, tile_size=BT, G=G,
        share_bytes=4 * BT * sum(widths), itemsize=itemsize,
    )  # fmt: skip
    places = seen.num_chunks * seen.num_tiles * H if seen.num_chunks > 1 else 0
    shares = [lse.new_empty(places, BT, width) for width in widths]
    # heads first, four rows in 16 bytes
    delta, lse2 = (F.pad(x.T, (0, -R % 4)).contiguous().view(HQ, -1, 4) for x in (delta, lse2))
    runs = (seen.row_start, seen.row_end, seen.first_row, seen.last_row)
    gradients = (d_k.flatten(0, 1), d_v.flatten(0, 1))
    compiled("dkv", device, H, G, D, DV, dtype=dtype, has_tma=is_tma, **options)(
        q, k, v, d_o, delta, lse2, seen.num_unread, *runs, *gradients, *shares, *scales,
        seen.num_chunks, seen.chunk_rows,
    )  # fmt: skip
    if places:
        compiled("sum", device, H, D, DV, dtype=dtype, BT=BT)(
            *shares, seen.first_row, seen.last_row, seen.row_end, *gradients, seen.chunk_rows
        )
    return d_q, d_k, d_v


def rows_of(x: Tensor) -> Tensor:
    """`[B, N, …]` as `[B * N, …]`."""
    return x.flatten(0, 1).contiguous()


def dtype_of(x: Tensor) -> str:
    """TileLang's name of it."""
    return str(x.dtype).removeprefix("torch.")
