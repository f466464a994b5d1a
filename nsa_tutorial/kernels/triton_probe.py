"""What the loads and products of the forward cost by themselves: a measuring instrument, no
attention.

`kernel` is `triton_forward.descriptor_kernel` without mask, softmax and sums. It fetches as many
tiles (the block that is visible in part as a whole, in its place), and both products wait for them
as there: a kernel that takes as long is held up by these, and not by its softmax. Where the probe
is the slower one, it says nothing. `python -m nsa_tutorial.bench selected --backend triton --steps`
measures both in one run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton_forward import count_slots, descriptors, launch_options, tile_sizes
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit(do_not_specialize=["S", "keys"])
def kernel(
    Q, KDescriptor, VDescriptor, BlockIndices, FirstKey, Output, H, S, keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, GT: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]` and `BlockIndices [R, H, S]`, writes `Output [R, H, G, DV]`; the grid
    is `(R, H)`."""
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row)
    num_slots = count_slots(BlockIndices + (row * H + head) * S, S, keys)  # no id is that large
    group, width, value_width = tl.arange(0, GT), tl.arange(0, D), tl.arange(0, DV)
    group_row = (row * H + head) * G + group  # [GT]
    in_group = group < G

    # -- load the query group --
    # [GT, D]
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=in_group[:, None], other=0.0)

    # -- initialise --
    acc_o = tl.zeros([GT, DV], tl.float32)

    PARTS: tl.constexpr = BS // BT
    for step in range(num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(BlockIndices + (row * H + head) * S + slot)
        key_row = tl.where(block_id >= 0, first_key + block_id * BS + part_start, keys)

        # -- load the keys --
        k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]

        # -- load the values --
        v_tile = VDescriptor.load([key_row, head, 0]).reshape([BT, DV])

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- store --
    o_row = group_row[:, None] * DV + value_width
    tl.store(Output + o_row, acc_o.to(Output.dtype.element_ty), mask=in_group[:, None])


def loads_and_products(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    **options: int
) -> Tensor:  # fmt: skip
    """`(q @ kᵀ) @ v` over all keys of the listed blocks, hidden ones included: the forward's loads
    and products.

    Args:
        q, k, v, ids, rows, block_size: as in `selected_attention.forward`, of shapes that
            `triton_forward.descriptor_kernel` takes.
        options: `BT`, `num_warps`, `num_stages`, in place of what `triton_forward.launch_options`
            chooses.

    Returns:
        `[B, N, HQ, DV]`, in the dtype of `v`.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    R, G = B * N, HQ // H
    chosen = launch_options(G, D, DV, block_size, q.element_size()) | options
    sizes = {
        "G": G,
        "D": D,
        "DV": DV,
        "BS": block_size,
        "GT": tile_sizes(G, D, DV)["GT"],
        "BT": chosen.pop("BT"),
    }
    described = descriptors(k.contiguous(), v.contiguous(), BT=sizes["BT"])
    o = torch.empty(B, N, HQ, DV, dtype=v.dtype, device=v.device)
    kernel[(R, H)](
        q.contiguous(),
        *described,
        ids,
        rows.first_key,
        o,
        H,
        ids.shape[-1],
        B * M,
        **sizes,
        **chosen,
    )
    return o
