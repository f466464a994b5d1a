"""Is it L2's speed that holds the forward up, or the time until a load arrives? Two changes to its
loads and products tell the one from the other: a measuring instrument, no attention.

`kernel` does what `triton_probe.kernel` does, with two more choices. `KEYS_ALONE` takes the values
from the tile of keys: half the bytes, in as many steps and products. And a launch has as many
programs as each multiprocessor is to hold; each program goes through many queries. Where L2's speed
is the limit, half the bytes take up to half the time, and fewer programs take about the same. Where
waiting is, half the bytes change little, and half the programs take up to twice the time. `python
-m nsa_tutorial.bench selected --backend triton --steps` measures both in one run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.selected.forward import arguments, count_slots, options_of
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit(do_not_specialize=["R", "S", "keys"])
def kernel(
    Q, KDescriptor, VDescriptor, BlockIndices, FirstKey, Output, R, H, S, keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, GT: tl.constexpr,
    BT: tl.constexpr, KEYS_ALONE: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]` and `BlockIndices [R, H, S]`, writes `Output [R, H, G, DV]`; the grid
    has as many programs as are to run at a time. `keys` is how many there are: no block has that
    id, and no key that row. With `KEYS_ALONE`, keys are their own values."""
    group = tl.arange(0, GT)[:, None]
    PARTS: tl.constexpr = BS // BT
    for work in range(tl.program_id(0), R * H, tl.num_programs(0)):
        row, head = (work % R).to(tl.int64), work // R
        first_key = tl.load(FirstKey + row)
        block_list = BlockIndices + (row * H + head) * S
        num_slots = count_slots(block_list, S, keys)
        group_row = (row * H + head) * G + group  # [GT, 1]
        q_tile = tl.load(Q + group_row * D + tl.arange(0, D), mask=group < G, other=0.0)  # [GT, D]
        acc_o = tl.zeros([GT, DV], tl.float32)
        for step in range(num_slots * PARTS):
            slot, part_start = step // PARTS, step % PARTS * BT
            block_id = tl.load(block_list + slot)
            key_row = tl.where(block_id >= 0, first_key + block_id * BS + part_start, keys)
            k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])
            acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
            if KEYS_ALONE:
                v_tile = k_tile
            else:
                v_tile = VDescriptor.load([key_row, head, 0]).reshape([BT, DV])
            acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")
        o_offset = group_row * DV + tl.arange(0, DV)
        tl.store(Output + o_offset, acc_o.to(Output.dtype.element_ty), mask=group < G)


def loads_and_products(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    programs: int, keys_alone: bool = False, **options: int,
) -> Tensor:  # fmt: skip
    """`(q @ kᵀ) @ v` over all keys of the listed blocks, hidden ones included.

    Args:
        q, k, v, ids, rows, block_size: as in `selected_attention.forward`, of shapes that
            `selected.forward_tma.can_walk`.
        programs: of each multiprocessor, at a time; a CPU has one.
        keys_alone: `(q @ kᵀ) @ k` instead. Keys and values have one width.
        options: `BT`, `num_warps`, `num_stages`, in place of what the forward takes.

    Returns:
        `[B, N, HQ, DV]`, in the dtype of `v`.

    Raises:
        ValueError: for `keys_alone` with keys and values of two widths.
    """
    if keys_alone and q.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"expected keys and values of one width, got {q.shape[-1]} and {v.shape[-1]}"
        )
    grid, given = arguments(q, k, v, ids, rows, block_size=block_size, scale=1.0)
    chosen = options_of(given) | options
    boxes = token_boxes(given["K"], given["V"], BT=chosen["BT"])
    given |= {"KDescriptor": boxes[0], "VDescriptor": boxes[1], "keys": k.shape[0] * k.shape[1]}
    given |= {"R": grid[0], "KEYS_ALONE": keys_alone}
    given = {name: x for name, x in given.items() if name in kernel.arg_names}
    kernel[programs * _multiprocessors(q.device),](**given, **chosen)
    return given["Output"]


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
