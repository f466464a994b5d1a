"""What the operators call for decoding on the Triton backend: `attend`, `merge` and, between them,
the choice; and `write`.

A step is short, so its host counts: what follows from sizes alone is computed once
(`decoding_options`), and by plain Python, since Triton's own `cdiv` and `next_power_of_2` take
microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.choice.pick import pick_kernel
from nsa_tutorial.kernels.triton.decoding.attend import lists_kernel, summaries_and_window_kernel
from nsa_tutorial.kernels.triton.decoding.merge import mass_kernel, merge_kernel
from nsa_tutorial.kernels.triton.decoding.options import decoding_options
from nsa_tutorial.runtime.rounding import next_power_of_2
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.decoding import Buffers
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL


def decode_attention(
    q: Tensor, buffers: Buffers, gates: Sequence[Tensor | None], block_indices: Tensor | None, *,
    top_n: int, block_size: int, window_size: int, length: int, stride: int, scale: float,
) -> Tensor:  # fmt: skip
    """`sparse.decoding.decode_attention`."""
    c = buffers
    (B, n, HQ, D), (H, DV), page_size = q.shape, c.v.shape[2:], c.k.shape[1]
    R, G = B * n, HQ // H
    has_cmp, has_slc, has_swa = (gate is not None for gate in gates)
    chooses = has_slc and block_indices is None
    S = top_n if chooses else block_indices.shape[3] if has_slc else 0

    # -- parts: by the number of programs, not by lengths --
    num_blocks = next_power_of_2(-(-c.room // block_size))
    options = decoding_options(
        R * H, G, D, DV, block_size, S, num_blocks, q.element_size(), shared_memory(q.device)
    )
    PC = options.summary_parts if has_cmp else 0
    PW = min(options.window_parts, -(-window_size // 16)) if has_swa else 0
    PL = options.list_parts if has_slc else 0
    P = PC + PW + PL
    partials = q.new_empty(R * HQ * P, DV, dtype=torch.float32)
    partial_lse = q.new_empty(R * HQ * P, dtype=torch.float32)
    o = c.v.new_empty(B, n, HQ, DV)
    NC = max(c.room // stride, 1)  # summaries of a row, at most
    scores = q.new_empty(R * HQ * NC if has_cmp else 1, dtype=torch.float32)
    num_visible, position = q.new_empty(2, R, dtype=torch.int32).unbind()
    is_paged = c.block_table is not None
    table, max_pages = (c.block_table, c.block_table.shape[1]) if is_paged else (c.lengths, 1)
    q = q.contiguous()
    tiles = options.tiles
    sizes = {"G": G, "D": D, "DV": DV, "PAGE": page_size, "IS_PAGED": is_paged, **tiles}
    scales = (scale, scale * LOG2_E)

    # -- the summaries and the window --
    if PC + PW:
        ring = c.k_window.shape[1]
        summaries_and_window_kernel[(R * H, PC + PW)](
            q, c.k_cmp, c.v_cmp, c.k_window, c.v_window, c.lengths, table, partials, partial_lse,
            scores, num_visible, position, *scales, n, H, P, max_pages, NC,
            min(window_size, ring), ring, LENGTH=length, STRIDE=stride, SPLITS=PC,
            WINDOW_SPLITS=max(PW, 1), **sizes, **options.steps,
        )  # fmt: skip

    # -- the choice --
    if chooses:
        mass = q.new_empty(R * H * NC, dtype=torch.float32)
        mass_kernel[(R * H, -(-NC // options.mass["BC"]))](
            scores, partial_lse, num_visible, mass, scale, H, P, NC, G=G, PC=PC,
            PT=next_power_of_2(PC), GT=next_power_of_2(G), **options.mass,
        )  # fmt: skip
        block_indices = q.new_empty(B, n, H, top_n, dtype=torch.int32)
        pick_kernel[(R * H,)](
            mass, num_visible, position, None, block_indices, R, 0, H, NC, top_n, NUM_INITIAL,
            NUM_LOCAL, length, stride, BS=block_size, C=1, SHARES=1,
            K=-(-(block_size + length - 1) // stride), NB=num_blocks, HAS_COUNTS=False,
            NT=next_power_of_2(top_n), **options.pick,
        )  # fmt: skip

    # -- the lists --
    if has_slc:
        ids = block_indices.to(torch.int32).contiguous()
        lists_kernel[(R * H, PL)](
            q, c.k, c.v, c.lengths, table, ids, partials, partial_lse, *scales, n, H, P, S,
            max_pages, PC + PW, BS=block_size, SPLITS=PL, **sizes, **options.list_steps,
        )  # fmt: skip

    # -- the merge --
    given = [o if gate is None else gate.contiguous() for gate in gates]  # o: not read
    merge_kernel[(R * HQ,)](
        partials, partial_lse, *given, o, P, DV=DV, PC=PC, PW=PW, PL=PL,
        **{name: next_power_of_2(max(x, 1)) for name, x in
           {"PCT": PC, "PWT": PW, "PLT": PL}.items()},
        DVT=tiles["DVT"], **options.merge,
    )  # fmt: skip
    return o
