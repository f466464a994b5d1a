"""What the loads and products of the forward cost by themselves: a measuring instrument, no
attention.

`kernel` is `triton.selected.forward_tma.descriptor_kernel` without mask, softmax and sums. It
fetches as many tiles (the block that is visible in part as a whole, in its place), and both
products wait for them as there: a kernel that takes as long is held up by these, and not by its
softmax. Where the probe is the slower one, it says nothing. `python -m nsa_tutorial.bench selected
--backend triton --steps` measures both in one run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.selected.forward import arguments, count_slots, options_of
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit(do_not_specialize=["S", "keys"])
def kernel(
    Q, KDescriptor, VDescriptor, BlockIndices, FirstKey, Output, H, S, keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, GT: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]` and `BlockIndices [R, H, S]`, writes `Output [R, H, G, DV]`; the grid
    is `(R, H)`. `keys` is how many there are: no block has that id, and no key that row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row)
    block_list = BlockIndices + (row * H + head) * S
    num_slots = count_slots(block_list, S, keys)
    group = tl.arange(0, GT)[:, None]
    group_row = (row * H + head) * G + group  # [GT, 1]
    q_tile = tl.load(Q + group_row * D + tl.arange(0, D), mask=group < G, other=0.0)  # [GT, D]
    acc_o = tl.zeros([GT, DV], tl.float32)
    PARTS: tl.constexpr = BS // BT
    for step in range(num_slots * PARTS):
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot)
        key_row = tl.where(block_id >= 0, first_key + block_id * BS + part_start, keys)
        k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        v_tile = VDescriptor.load([key_row, head, 0]).reshape([BT, DV])
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")
    o_offset = group_row * DV + tl.arange(0, DV)
    tl.store(Output + o_offset, acc_o.to(Output.dtype.element_ty), mask=group < G)


def loads_and_products(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    **options: int,
) -> Tensor:  # fmt: skip
    """`(q @ kᵀ) @ v` over all keys of the listed blocks, hidden ones included: the forward's loads
    and products.

    Args:
        q, k, v, ids, rows, block_size: as in `selected_attention.forward`, of shapes that
            `selected.forward_tma.can_walk`.
        options: `BT`, `num_warps`, `num_stages`, in place of what the forward takes.

    Returns:
        `[B, N, HQ, DV]`, in the dtype of `v`.
    """
    grid, given = arguments(q, k, v, ids, rows, block_size=block_size, scale=1.0)
    chosen = options_of(given) | options
    boxes = token_boxes(given["K"], given["V"], BT=chosen["BT"])
    given |= {"KDescriptor": boxes[0], "VDescriptor": boxes[1], "keys": k.shape[0] * k.shape[1]}
    given = {name: x for name, x in given.items() if name in kernel.arg_names}
    kernel[grid](**given, **chosen)
    return given["Output"]
