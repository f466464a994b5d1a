"""Selected attention, forward, in Triton: one program per (query, key/value head).

`kernel` is the GPU kernel; `forward` launches it, on CUDA tensors compiled, on CPU tensors through Triton's interpreter. The phases
and the names are those of `selected_attention.forward`, where they are explained. The guard is a mask, not a branch: an empty slot
loads nothing, and a loop without branches is one whose loads Triton can start early.

There is no backward here, and no argument is checked: `ops.selected_attention` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.online_softmax import LOG2_E
from nsa_tutorial.selected_attention import QueryRows


@triton.jit
def kernel(
    Q, K, V, BlockIndices, FirstKey, NumVisible, Output, LSE, scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [rows, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `BlockIndices [rows, H, S]`; writes `Output` and `LSE`.

    The grid is `(rows, H)`. `GT, DT, DVT, BT` are `G, D, DV, BS` rounded up to powers of two of at least 16.
    """
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * H * G * D may pass 2**31
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    group, width, value_width, tokens = tl.arange(0, GT), tl.arange(0, DT), tl.arange(0, DVT), tl.arange(0, BT)
    group_row = (row * H + head) * G + group  # [GT]
    in_group = group < G

    # -- load the query group --
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=in_group[:, None] & (width < D), other=0.0)  # [GT, DT]

    # -- initialise --
    acc_o = tl.zeros([GT, DVT], tl.float32)
    logsum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    for slot in range(S):
        # -- guard --
        block_id = tl.load(BlockIndices + (row * H + head) * S + slot)
        is_visible = (block_id >= 0) & (block_id < (num_visible + BS - 1) // BS)
        offset = tl.where(is_visible, block_id, 0) * BS + tokens  # [BT]
        is_seen = is_visible & (tokens < BS) & (offset < num_visible)
        key_row = (first_key + offset) * H + head  # [BT]

        # -- load the keys --
        k_mask = is_seen[:, None] & (width < D)
        k_tile = tl.load(K + key_row[:, None] * D + width, mask=k_mask, other=0.0)  # [BT, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]

        # -- mask --
        acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
        # where nothing is seen yet, -inf - -inf would be NaN
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
        scores_scale = tl.exp2((scores_max_prev - shift) * scale_log2)
        acc_s = tl.exp2((acc_s - shift[:, None]) * scale_log2)
        scores_sum = tl.sum(acc_s, axis=1)
        logsum = logsum * scores_scale + scores_sum
        acc_o = acc_o * scores_scale[:, None]

        # -- load the values --
        v_mask = is_seen[:, None] & (value_width < DV)
        v_tile = tl.load(V + key_row[:, None] * DV + value_width, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    is_empty = logsum == 0
    safe_sum = tl.where(is_empty, 1.0, logsum)
    o_tile = acc_o / safe_sum[:, None]
    lse = scores_max * scale + tl.log(safe_sum)  # -inf for an empty row
    o_mask = in_group[:, None] & (value_width < DV)
    tl.store(Output + group_row[:, None] * DV + value_width, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + group_row, lse, mask=in_group)


def tile_sizes(G: int, D: int, DV: int, BS: int) -> dict[str, int]:
    """The tiles of a shape: each size rounded up to what `tl.arange` and `tl.dot` take, a power of two, 16 at least."""
    return {name: max(16, triton.next_power_of_2(n)) for name, n in {"GT": G, "DT": D, "DVT": DV, "BT": BS}.items()}


def launch_options(G: int, D: int, DV: int, BS: int, itemsize: int) -> dict[str, int]:
    """Warps and pipeline stages for a shape: a warp for every 8 KiB of a tile of keys or values, or for 16 query heads.

    Two stages (the next block's keys and values travel while this one's are computed) where the tiles leave room for them.
    """
    tiles = tile_sizes(G, D, DV, BS)
    tile_bytes = tiles["BT"] * max(tiles["DT"], tiles["DVT"]) * itemsize
    warps = max(1, tile_bytes // 2**13, tiles["GT"] // 16)
    return {"num_warps": min(8, triton.next_power_of_2(warps)), "num_stages": 2 if tile_bytes <= 2**14 else 1}


def forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments and results as in `selected_attention.forward`, on CUDA tensors, or on the CPU interpreted."""
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    G, S = HQ // H, ids.shape[-1]
    o = torch.empty(B, N, HQ, DV, dtype=v.dtype, device=v.device)
    lse = torch.empty(B, N, HQ, dtype=torch.float32, device=v.device)
    kernel[(B * N, H)](
        q.contiguous(), k.contiguous(), v.contiguous(), ids, rows.first_key, rows.num_visible, o, lse, scale, scale * LOG2_E, H, S,
        G=G, D=D, DV=DV, BS=block_size, **tile_sizes(G, D, DV, block_size),
        **launch_options(G, D, DV, block_size, q.element_size()),
    )  # fmt: skip
    return o, lse
