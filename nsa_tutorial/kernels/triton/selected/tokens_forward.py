"""Selected attention with tokens for blocks, or blocks of two, four or eight, forward, in Triton.

`selected.forward` takes one block a step, and the tensor cores take at least 16 tokens: of a block
of one token, fifteen rows of each product would be empty, and the load would wait for an id each
time. Here a step takes `BT` tokens from the next slots of the list and gathers their keys and
values row by row, each by a pointer of its own. The phases and the names are those of
`selected.forward`.

`launch` runs it, on CUDA tensors, or interpreted on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.launch_options import launch_options
from nsa_tutorial.kernels.triton.online_softmax import online_softmax
from nsa_tutorial.kernels.triton.selected import forward
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit
def count_slots(block_list, S, num_blocks, WIDTH: tl.constexpr):
    """`selected.forward.count_slots`, `WIDTH` ids a load."""
    num_slots = 0
    for first in range(0, S, WIDTH):
        slot = first + tl.arange(0, WIDTH)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        names_block = (ids >= 0) & (ids < num_blocks)
        num_slots = tl.maximum(num_slots, tl.max(tl.where(names_block, slot + 1, 0), axis=0))
    return num_slots


@triton.jit
def tokens_of_slots(
    block_list, slot, place, num_slots, num_visible, first_key, head, H, BS: tl.constexpr
):
    """Of the `slot [BT]` and the `place [BT]` in its block: which tokens a query sees, and their
    pieces of keys and values."""
    block_id = tl.load(block_list + slot, mask=slot < num_slots, other=-1)
    token = block_id.to(tl.int64) * BS + place  # an id past the end may pass 32 bits
    is_seen = (block_id >= 0) & (token < num_visible)
    return is_seen, (first_key + tl.where(is_seen, token, 0)) * H + head


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def tokens_kernel(
    Q, K, V, BlockIndices, FirstKey, NumVisible, Output, LSE,
    scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, SlotScale=None,
):  # fmt: skip
    """Reads and writes what `selected.forward.kernel` does; the grid is `(R, H)`. `BT` is a power
    of two, and a multiple of `BS`."""
    # -- locate the program --
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + query).to(tl.int64)
    num_visible = tl.load(NumVisible + query)
    block_list = BlockIndices + (query * H + head) * S
    num_slots = count_slots(block_list, S, tl.cdiv(num_visible, BS), 256)
    group = tl.arange(0, GT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    slots, place = tl.arange(0, BT) // BS, tl.arange(0, BT) % BS  # of the tokens of a step
    group_row = (query * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]

    # -- load the query group --
    q_mask = in_group[:, None] & (width < D)
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)  # [GT, DT]

    # -- initialise --
    acc_o = tl.zeros([GT, DVT], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    for first_slot in range(0, num_slots, BT // BS):
        # -- guard --
        slot = first_slot + slots  # [BT]
        is_seen, piece = tokens_of_slots(
            block_list, slot, place, num_slots, num_visible, first_key, head, H, BS
        )

        # -- load the keys --
        k_mask = is_seen[:, None] & (width < D)
        k_tile = tl.load(K + piece[:, None] * D + width, mask=k_mask, other=0.0)  # [BT, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        if SlotScale is not None:
            factor = SlotScale + (query * H + head) * S + slot
            acc_s *= tl.load(factor, mask=is_seen, other=1.0)

        # -- mask --
        acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        acc_s, scores_max, running_sum, acc_o = online_softmax(
            acc_s, scores_max, running_sum, acc_o, scale_log2
        )

        # -- load the values --
        v_mask = is_seen[:, None] & (value_width < DV)
        v_tile = tl.load(V + piece[:, None] * DV + value_width, mask=v_mask, other=0.0)

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    safe_sum = tl.where(num_slots == 0, 1.0, running_sum)
    o_tile = acc_o / safe_sum[:, None]  # [GT, DVT]
    lse = scores_max * scale + tl.log(safe_sum)  # [GT], -inf for an empty row
    o_mask = in_group[:, None] & (value_width < DV)
    o_pointer = Output + group_row[:, None] * DV + value_width
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + group_row, lse, mask=in_group)


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel: arguments and results as in `selected.forward.launch`, for blocks that
    `kernels.tokens` gathers."""
    sizes = {"block_size": block_size, "scale": scale}
    grid, given = forward.arguments(q, k, v, ids, rows, **sizes, slot_scale=slot_scale)
    if out is not None:
        given["Output"], given["LSE"] = out
    shape = {name: given[name] for name in ("G", "D", "DV")}
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    # of the tokens of a step, it is all the same from how many blocks they come
    tokens_kernel[grid](**given, **launch_options(**shape, BS=64, **memory) | options)
    return given["Output"], given["LSE"]
