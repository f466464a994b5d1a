"""Chapter 11's kernel with tensor descriptors: the second step, for Hopper and later.

The tensor memory accelerator fetches keys and values here, one instruction a tile, with no address
arithmetic. Faster than `selected.forward.kernel` at width 128 and as fast at 64
(assets/triton_forward_h200.json). `launch` takes what `selected.forward.launch` takes, where
`can_walk` says so; `selected.launch` asks. `selected.backward_tma` is the same for the gradient of
the queries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.descriptors import can_use_descriptors, token_boxes
from nsa_tutorial.kernels.triton.launch_options import launch_options
from nsa_tutorial.kernels.triton.online_softmax import online_softmax
from nsa_tutorial.kernels.triton.selected.forward import arguments, options_of
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit
def scan_list(block_list, S, num_whole):
    """One look at a list of `S` slots, 16 ids a load. Blocks `0 … num_whole - 1` are visible as a
    whole, the next one in part.

    Returns the first slot that names a whole block, or `S`; the slot after the last one that does,
    or 0; and how many slots name the block that is visible in part.
    """
    start_slot = S
    num_slots = 0
    num_partial = 0
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        is_whole = (ids >= 0) & (ids < num_whole)
        start_slot = tl.minimum(start_slot, tl.min(tl.where(is_whole, slot, S), axis=0))
        num_slots = tl.maximum(num_slots, tl.max(tl.where(is_whole, slot + 1, 0), axis=0))
        num_partial += tl.sum((ids == num_whole).to(tl.int32), axis=0)
    return start_slot, num_slots, num_partial


@triton.jit
def factor_of(slot_scale, block_list, S, block):
    """The factor of the slot that names `block`, in a list of `S` slots and their factors."""
    factor = 0.0
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        factors = tl.load(slot_scale + slot, mask=ids == block, other=0.0)
        factor += tl.sum(factors, axis=0)
    return factor


@triton.jit(do_not_specialize=["S"])  # new lengths, same kernel
def descriptor_kernel(
    Q, K, V, KDescriptor, VDescriptor, BlockIndices, FirstKey, NumVisible, Output, LSE,
    scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, BT: tl.constexpr, SlotScale=None, Count=None, T: tl.constexpr = 1,
):  # fmt: skip
    """`selected.forward.kernel`, with whole blocks fetched by descriptor.

    A descriptor knows where the tensor ends, not where the query's sight does: it fetches whole
    tiles, hidden values too, and a weight of 0 hides a number, but not NaN. So the loop takes the
    blocks that are visible as a whole. The one that is visible in part, if the list names it,
    follows by pointers and masks. `BT` divides `BS`, and `D` and `DV` are powers of two.

    With `Count [tiles, H]`, rows of tiles of `T` queries that have a count of 0 or more are done
    already (`selected.by_query_tiles`).
    """
    tl.static_assert(
        BS % BT == 0, "BT: expected a divisor of BS, since a block is walked in whole steps"
    )
    # -- locate the program --
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if Count is not None:  # noqa: SIM102, Triton evaluates both sides of an `and`
        if tl.load(Count + query // T * H + head) >= 0:
            return
    first_key = tl.load(FirstKey + query)
    num_visible = tl.load(NumVisible + query)
    num_whole = num_visible // BS  # blocks that are visible as a whole; the next one may be in part
    block_list = BlockIndices + (query * H + head) * S
    start_slot, num_slots, num_partial = scan_list(block_list, S, num_whole)
    start_slot = tl.minimum(start_slot, num_slots)
    last_block = tl.load(block_list + num_slots - 1, mask=num_slots > 0, other=0)
    num_partial = tl.where(num_visible % BS == 0, 0, num_partial)
    group = tl.arange(0, GT)
    width = tl.arange(0, D)
    value_width = tl.arange(0, DV)
    tokens = tl.arange(0, BT)
    group_row = (query * H + head) * G + group  # [GT]
    in_group = group < G  # [GT]

    # -- load the query group --
    q_pointer = Q + group_row[:, None] * D + width  # [GT, D]
    q_tile = tl.load(q_pointer, mask=in_group[:, None], other=0.0)

    # -- initialise --
    acc_o = tl.zeros([GT, DV], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    PARTS: tl.constexpr = BS // BT
    for step in range(start_slot * PARTS, num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot)
        is_whole = (block_id >= 0) & (block_id < num_whole)
        # A slot between two others that names no whole block: the list's last block is loaded in
        # its place, and not used.
        key_row = first_key + tl.where(is_whole, block_id, last_block) * BS + part_start

        # -- load the keys --
        k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
        if SlotScale is not None:  # the slot's factor; where no whole block is, it is masked below
            acc_s *= tl.load(SlotScale + (query * H + head) * S + slot)

        # -- mask --
        acc_s = tl.where(is_whole, acc_s, float("-inf"))

        # -- online softmax --
        acc_s, scores_max, running_sum, acc_o = online_softmax(
            acc_s, scores_max, running_sum, acc_o, scale_log2
        )

        # -- load the values --
        v_tile = VDescriptor.load([key_row, head, 0]).reshape([BT, DV])

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- the block that is visible in part --
    partial_start = num_whole * BS
    num_parts = tl.cdiv(num_visible - partial_start, BT)
    if SlotScale is not None:
        partial_factor = factor_of(SlotScale + (query * H + head) * S, block_list, S, num_whole)
    for step in range(num_partial * num_parts):
        start = partial_start + step % num_parts * BT
        is_seen = tokens < num_visible - start  # [BT]
        key_row = ((first_key + start).to(tl.int64) + tokens) * H + head  # [BT]
        k_tile = tl.load(K + key_row[:, None] * D + width, mask=is_seen[:, None], other=0.0)
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if SlotScale is not None:
            acc_s *= partial_factor
        acc_s = tl.where(is_seen, acc_s, float("-inf"))
        acc_s, scores_max, running_sum, acc_o = online_softmax(
            acc_s, scores_max, running_sum, acc_o, scale_log2
        )
        v_tile = tl.load(V + key_row[:, None] * DV + value_width, mask=is_seen[:, None], other=0.0)
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    is_empty = (num_slots == 0) & (num_partial == 0)
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = acc_o / safe_sum[:, None]  # [GT, DV]
    lse = scores_max * scale + tl.log(safe_sum)  # [GT], -inf for an empty row
    o_pointer = Output + group_row[:, None] * DV + value_width  # [GT, DV]
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=in_group[:, None])
    tl.store(LSE + group_row, lse, mask=in_group)


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None, count: Tensor | None = None, T: int = 1,
    **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel; arguments and results as in `selected.forward.launch`, of shapes that
    `can_use_descriptors`. `out` is where to write, and `count` and `T` say which rows not to."""
    sizes = {"block_size": block_size, "scale": scale}
    grid, given = arguments(q, k, v, ids, rows, **sizes, slot_scale=slot_scale)
    chosen = options_of(given) | options
    boxes = token_boxes(given["K"], given["V"], BT=chosen["BT"])
    given |= {"KDescriptor": boxes[0], "VDescriptor": boxes[1]}
    if out is not None:
        given["Output"], given["LSE"] = out
    given = {name: x for name, x in given.items() if name in descriptor_kernel.arg_names}
    descriptor_kernel[grid](**given, Count=count, T=T, **chosen)
    return given["Output"], given["LSE"]


def can_walk(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> bool:
    """Whether `launch` takes these: tensors that `can_use_descriptors`, and a step that divides a
    block."""
    if not can_use_descriptors(q, k, v):
        return False
    G, itemsize = q.shape[2] // k.shape[2], q.element_size()
    return block_size % launch_options(G, q.shape[3], v.shape[3], block_size, itemsize)["BT"] == 0
