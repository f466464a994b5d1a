"""What the operators call for summaries on the TileLang backend: attention to them, and its
gradients, on CUDA tensors, or on CPU tensors through C.

`forward` and `backward` hold the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tables import runs
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.compressed import backward
from nsa_tutorial.kernels.tilelang.compressed.forward import build_attend
from nsa_tutorial.kernels.tilelang.launch_options import (
    attend_options,
    has_tma,
    summary_dkv_options,
    summary_dq_options,
    summary_sides,
)
from nsa_tutorial.kernels.tilelang.selected.backward import build_delta
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.query_tiles import at_least_one
from nsa_tutorial.sparse.selected_attention import QueryRows


def compressed_forward(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the visible summaries: `compression.compressed_attention`."""
    (B, N, HQ, D), (H, DV) = q.shape, v_cmp.shape[2:]
    o = v_cmp.new_empty(B, N, HQ, DV)
    lse = q.new_empty(B, N, HQ, dtype=torch.float32)
    options = attend_options(D, DV, q.element_size(), shared_memory(q.device))
    kernel = compiled(
        build_attend, kind_of(q.device), H, HQ // H, D, DV, dtype=dtype_of(q), **options,
        has_tma=has_tma(q.device, D * q.element_size(), DV * q.element_size()), a_group_loads=True,
    )  # fmt: skip
    kernel(
        rows_of(q), rows_of(at_least_one(k_cmp)), rows_of(at_least_one(v_cmp)), rows.first_key,
        rows.num_visible, o.view(-1, HQ, DV), lse.view(-1, HQ), scale, scale * LOG2_E,
    )  # fmt: skip
    return o, lse


def compressed_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k_cmp` and `v_cmp`, the same bits in every run; arguments and results
    as in `triton.compressed.launch.compressed_backward`."""
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    R, G, device, dtype, itemsize = B * N, HQ // H, kind_of(q.device), dtype_of(q), q.element_size()
    d_q = q.new_empty(q.shape)
    d_k, d_v = (x.new_zeros(x.shape) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_(), d_k, d_v
    d_o, d_lse, q, k, v, o, lse = map(rows_of, (d_o, d_lse, q, k_cmp, v_cmp, o, lse))
    is_tma = has_tma(q.device, D * itemsize, DV * itemsize)
    kinds = {"dtype": dtype, "has_tma": is_tma, "a_group_loads": True}
    memory = shared_memory(q.device)
    scales = (scale, scale * LOG2_E)

    # -- a row's numbers --
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    numbers = [x.view(R, H, G) for x in (lse, d_lse, delta, lse2)]
    compiled(build_delta, device, H, G, DV, dtype=dtype)(
        o.view(R, H, G, DV), d_o.view(R, H, G, DV), *numbers
    )

    # -- the queries --
    options = summary_dq_options(D, DV, itemsize, memory)
    compiled(backward.build_dq, device, H, G, D, DV, **kinds, **options)(
        q, k, v, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, d_q.view(R, HQ, D),
        *scales,
    )  # fmt: skip

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, itemsize, memory)
    BT, widths = options["BT"], summary_sides(D, DV, itemsize)
    seen = runs.runs_of_tiles(
        rows, lse2.view(R, H, G)[:, :, 0], num_keys=B * M_c, tile_size=BT, G=G,
        share_bytes=4 * BT * sum(widths), itemsize=itemsize,
    )  # fmt: skip
    places = seen.num_chunks * seen.num_tiles * H if seen.num_chunks > 1 else 0
    shares = [lse.new_empty(places, BT, width) for width in widths]
    # heads first, four rows in 16 bytes
    delta, lse2 = (F.pad(x.T, (0, -R % 4)).contiguous().view(HQ, -1, 4) for x in (delta, lse2))
    seen_rows = (seen.row_start, seen.row_end, seen.first_row, seen.last_row)
    gradients = (d_k.flatten(0, 1), d_v.flatten(0, 1))
    compiled(backward.build_dkv, device, H, G, D, DV, **kinds, **options)(
        q, k, v, d_o, delta, lse2, seen.num_unread, *seen_rows, *gradients, *shares, *scales,
        seen.num_chunks, seen.chunk_rows,
    )  # fmt: skip
    if places:
        compiled(backward.build_sum, device, H, D, DV, dtype=dtype, BT=BT)(
            *shares, seen.first_row, seen.last_row, seen.row_end, *gradients, seen.chunk_rows
        )
    return d_q, d_k, d_v


def rows_of(x: Tensor) -> Tensor:
    """`[B, N, …]` as `[B * N, …]`."""
    return x.flatten(0, 1).contiguous()


def dtype_of(x: Tensor) -> str:
    """TileLang's name of it."""
    return str(x.dtype).removeprefix("torch.")
