"""What the operators call for decoding on the TileLang backend, on CUDA tensors, or on CPU tensors
through C: `attend`, `merge` and, between them, the choice; and `write`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.choice.pick import build_pick
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.compressed.launch import dtype_of
from nsa_tutorial.kernels.tilelang.decoding.attend import build_lists, build_summaries_and_window
from nsa_tutorial.kernels.tilelang.decoding.merge import build_mass, build_merge
from nsa_tutorial.kernels.tilelang.decoding.options import decoding_options
from nsa_tutorial.kernels.tilelang.launch_options import pick_threads
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.decoding import Buffers
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL


def decode_attention(
    q: Tensor, buffers: Buffers, gates: Sequence[Tensor | None], block_indices: Tensor | None, *,
    top_n: int, block_size: int, window_size: int, length: int, stride: int, scale: float,
) -> Tensor:  # fmt: skip
    """`sparse.decoding.decode_attention`."""
    c = buffers
    (B, n, HQ, D), (H, DV) = q.shape, c.v.shape[2:]
    R, G, device, dtype = B * n, HQ // H, kind_of(q.device), dtype_of(q)
    has_cmp, has_slc, has_swa = (gate is not None for gate in gates)
    chooses = has_slc and block_indices is None
    S = top_n if chooses else block_indices.shape[3] if has_slc else 0

    # -- parts: by the number of programs, not by lengths --
    options = decoding_options(
        R * H, G, D, DV, block_size, S, q.element_size(), shared_memory(q.device)
    )
    PC = options.summary_parts if has_cmp else 0
    PW = min(options.window_parts, -(-window_size // 16)) if has_swa else 0
    PL = options.list_parts if has_slc else 0
    P = PC + PW + PL
    partials = q.new_empty(R, H, G, P, DV, dtype=torch.float32)
    partial_lse = q.new_empty(R, H, G, P, dtype=torch.float32)
    o = c.v.new_empty(B, n, HQ, DV)
    NC = max(c.room // stride, 1) if has_cmp else 1  # summaries of a row, at most
    scores = q.new_empty(R, H, G, NC, dtype=torch.float32)
    num_visible, position = q.new_empty(2, R, dtype=torch.int32).unbind()
    is_paged = c.block_table is not None
    table = c.block_table if is_paged else c.lengths[:, None]
    q = q.reshape(R, H, G, D).contiguous()
    sizes = (H, G, D, DV)
    scales = (scale, scale * LOG2_E)

    # -- the summaries and the window --
    if PC + PW:
        ring = c.k_window.shape[1]
        kernel = compiled(
            build_summaries_and_window, device, *sizes, length, stride, dtype=dtype,
            is_paged=is_paged, **options.steps,
        )  # fmt: skip
        kernel(
            q, c.k_cmp, c.v_cmp, c.k_window, c.v_window, c.lengths, table, partials, partial_lse,
            scores, num_visible, position, *scales, n, PC, PW, min(window_size, ring),
        )  # fmt: skip

    # -- the choice --
    if chooses:
        mass = q.new_empty(1, R, H, NC, dtype=torch.float32)
        compiled(build_mass, device, H, G)(scores, partial_lse, num_visible, mass, scale, PC)
        block_indices = q.new_empty(B, n, H, top_n, dtype=torch.int32)
        num_blocks = 1 << (-(-c.room // block_size) - 1).bit_length()
        pick = compiled(
            build_pick, device, H, block_size, 1, 1, -(-(block_size + length - 1) // stride),
            num_blocks, has_counts=False, threads=pick_threads(num_blocks),
        )  # fmt: skip
        pick(
            mass, num_visible, position, position.new_empty(0, H), block_indices.view(R, H, top_n),
            0, R, NUM_INITIAL, NUM_LOCAL, length, stride,
        )  # fmt: skip

    # -- the lists --
    if has_slc:
        ids = block_indices.to(torch.int32).reshape(R, H, S).contiguous()
        kernel = compiled(
            build_lists, device, *sizes, block_size, dtype=dtype, is_paged=is_paged,
            **options.list_steps,
        )  # fmt: skip
        kernel(q, c.k, c.v, c.lengths, table, ids, partials, partial_lse, *scales, n, PL, PC + PW)

    # -- the merge --
    given = [gate for gate in gates if gate is not None]
    gate_dtype = c.v.dtype if all(gate.dtype == c.v.dtype for gate in given) else torch.float32
    # for a branch that is left out another's gate, unread
    rows = [(given[0] if gate is None else gate).to(gate_dtype).reshape(-1) for gate in gates]
    compiled(build_merge, device, DV, dtype, dtype_of(given[0].new_empty(0, dtype=gate_dtype)))(
        partials.view(R * HQ, P, DV), partial_lse.view(R * HQ, P), *map(Tensor.contiguous, rows),
        o.view(R * HQ, DV), PC, PW, PL,
    )  # fmt: skip
    return o
