"""Selected attention and sliding windows, forward, in Triton: one program per (query, key/value
head).

`kernel` is the GPU kernel; `forward` launches it, on CUDA tensors compiled, on CPU tensors through
Triton's interpreter. The phases and the names are those of `selected_attention.forward`, where they
are explained. The guard is a mask, not a branch: an empty slot loads nothing, and a loop without
branches is one whose loads Triton can start early.

`descriptor_kernel` computes the same with tensor descriptors, on Hopper and later: the second step,
faster at width 128 and as fast at 64 (assets/triton_forward_h200.json). `sliding_window` and
`selection_and_window` launch either of them on windows, or on lists and windows at once.

There is no backward here, and no argument is checked: `ops` does.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.sparse.selected_attention import QueryRows

WINDOW_BLOCK = 64  # tokens of a window that a program takes as one block


@triton.jit
def count_slots(block_list, S, num_blocks):
    """How many of a list's `S` slots to walk: up to the last that names one of the first
    `num_blocks` blocks.

    `block_list` points at the first slot; 16 ids a load.
    """
    num_slots = 0
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        names_block = (ids >= 0) & (ids < num_blocks)
        num_slots = tl.maximum(num_slots, tl.max(tl.where(names_block, slot + 1, 0), axis=0))
    return num_slots


@triton.jit
def first_slot(block_list, S, num_blocks):
    """The first slot of a list that names one of the first `num_blocks` blocks, or `S`."""
    slot_found = S
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        names_block = (ids >= 0) & (ids < num_blocks)
        slot_found = tl.minimum(slot_found, tl.min(tl.where(names_block, slot, S), axis=0))
    return slot_found


@triton.jit
def count_listed(block_list, S, block_id):
    """How often a list of `S` slots names the block `block_id`."""
    num_listed = 0
    for first in range(0, S, 16):
        slot = first + tl.arange(0, 16)
        ids = tl.load(block_list + slot, mask=slot < S, other=-1)
        num_listed += tl.sum((ids == block_id).to(tl.int32), axis=0)
    return num_listed


# a new length compiles nothing
@triton.jit(do_not_specialize=["R", "first_row", "S", "window_size"])
def kernel(
    Q, K, V, BlockIndices, FirstKey, NumVisible, Output, LSE, scale, scale_log2, R, first_row, H, S,
    window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `BlockIndices [R, H, S]`; writes
    `Output` and `LSE`.

    The grid is `(rows, H)`: rows `0 … R-1` attend to their lists, and with `WINDOW` rows `R … 2R-1`
    to their windows; the first program has row `first_row`. `GT, DT, DVT` are `G, D, DV` rounded up
    to powers of two of at least 16, `BT` is how many tokens of a block a step takes: a power of
    two, and a whole block if that is at least as long.
    """
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64) + first_row  # 64 bits: row * H * G * D may pass 2**31
    head = tl.program_id(1)
    query = row % R
    first_key = tl.load(FirstKey + query).to(tl.int64)
    num_visible = tl.load(NumVisible + query)
    num_blocks = tl.cdiv(num_visible, BS)  # that hold a visible key
    num_slots = count_slots(BlockIndices + (query * H + head) * S, S, num_blocks)
    is_window = False
    # the blocks of a window are counted from its first key, so that its list is 0, 1, 2, …
    if WINDOW:
        is_window = row >= R
        window_start = tl.where(is_window, tl.maximum(num_visible - window_size, 0), 0)
        first_key += window_start
        num_visible -= window_start
        num_blocks = tl.cdiv(num_visible, BS)
        num_slots = tl.where(is_window, num_blocks, num_slots)
    group, width, value_width, tokens = (
        tl.arange(0, GT),
        tl.arange(0, DT),
        tl.arange(0, DVT),
        tl.arange(0, BT),
    )
    group_row = (query * H + head) * G + group  # [GT]
    in_group = group < G
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every block
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]

    # -- load the query group --
    # [GT, DT]
    q_tile = tl.load(
        Q + group_row[:, None] * D + width, mask=in_group[:, None] & (width < D), other=0.0
    )

    # -- initialise --
    acc_o = tl.zeros([GT, DVT], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    PARTS: tl.constexpr = (BS + BT - 1) // BT
    for step in range(num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(
            BlockIndices + (query * H + head) * S + slot, mask=is_window == 0, other=slot
        )
        is_visible = (block_id >= 0) & (block_id < num_blocks)
        start = tl.where(is_visible, block_id, 0) * BS + part_start
        num_seen = tl.where(is_visible, tl.minimum(BS - part_start, num_visible - start), 0)
        is_seen = tokens < num_seen  # [BT]
        key_row = (first_key + start) * H + head

        # -- load the keys --
        k_mask = is_seen[:, None] & (width < D)
        k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]

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
        running_sum = running_sum * scores_scale + scores_sum
        acc_o = acc_o * scores_scale[:, None]

        # -- load the values --
        v_mask = is_seen[:, None] & (value_width < DV)
        v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    is_empty = num_slots == 0  # no block is visible
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = acc_o / safe_sum[:, None]
    lse = scores_max * scale + tl.log(safe_sum)  # -inf for an empty row
    o_row = ((row - first_row) * H + head) * G + group
    o_mask = in_group[:, None] & (value_width < DV)
    tl.store(
        Output + o_row[:, None] * DV + value_width, o_tile.to(Output.dtype.element_ty), mask=o_mask
    )
    tl.store(LSE + o_row, lse, mask=in_group)


@triton.jit
def online_softmax(acc_s, scores_max_prev, running_sum, acc_o, scale_log2):
    """One tile's scores `[GT, BT]`: its weights, and the running maximum, sum and accumulator,
    rescaled."""
    scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))
    shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
    scores_scale = tl.exp2((scores_max_prev - shift) * scale_log2)
    acc_s = tl.exp2((acc_s - shift[:, None]) * scale_log2)
    return (
        acc_s,
        scores_max,
        running_sum * scores_scale + tl.sum(acc_s, axis=1),
        acc_o * scores_scale[:, None],
    )


@triton.jit(do_not_specialize=["R", "first_row", "S", "window_size"])
def descriptor_kernel(
    Q, K, V, KDescriptor, VDescriptor, BlockIndices, FirstKey, NumVisible, Output, LSE, scale,
    scale_log2,
    R, first_row, H, S, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr,
    GT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`kernel`, with keys and values fetched by the tensor memory accelerator: one instruction a
    tile, and no address arithmetic.

    A descriptor knows where the tensor ends, not where the query's sight does: it fetches whole
    tiles, hidden values too, and a weight of 0 hides a number, but not NaN. So the loop takes the
    blocks that are visible as a whole. The one that is visible in part, if the list names it,
    follows by pointers and masks. `BT` divides `BS`, and `D` and `DV` are powers of two.
    """
    tl.static_assert(
        BS % BT == 0, "BT: expected a divisor of BS, since a block is walked in whole steps"
    )
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64) + first_row
    head = tl.program_id(1)
    query = row % R
    first_key = tl.load(FirstKey + query)
    num_visible = tl.load(NumVisible + query)
    block_list = BlockIndices + (query * H + head) * S
    num_whole = num_visible // BS  # blocks that are visible as a whole; the next one may be in part
    num_slots = count_slots(block_list, S, num_whole)
    start_slot = tl.minimum(first_slot(block_list, S, num_whole), num_slots)
    last_block = tl.load(block_list + num_slots - 1, mask=num_slots > 0, other=0)
    num_partial = count_listed(block_list, S, num_whole)
    is_window = False
    if WINDOW:
        is_window = row >= R
        window_start = tl.where(is_window, tl.maximum(num_visible - window_size, 0), 0)
        first_key += window_start
        num_visible -= window_start
        num_whole = num_visible // BS
        num_slots = tl.where(is_window, num_whole, num_slots)
        start_slot = tl.where(is_window, 0, start_slot)
        num_partial = tl.where(is_window, 1, num_partial)
    num_partial = tl.where(num_visible % BS == 0, 0, num_partial)
    group, width, value_width, tokens = (
        tl.arange(0, GT),
        tl.arange(0, D),
        tl.arange(0, DV),
        tl.arange(0, BT),
    )
    group_row = (query * H + head) * G + group  # [GT]
    in_group = group < G

    # -- load the query group --
    # [GT, D]
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=in_group[:, None], other=0.0)

    # -- initialise --
    acc_o = tl.zeros([GT, DV], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)

    PARTS: tl.constexpr = BS // BT
    for step in range(start_slot * PARTS, num_slots * PARTS):
        # -- guard --
        slot, part_start = step // PARTS, step % PARTS * BT
        block_id = tl.load(block_list + slot, mask=is_window == 0, other=slot)
        is_whole = (block_id >= 0) & (block_id < num_whole)
        # a slot between two others that names no whole block: the list's last block is loaded in
        # its place, and not used
        key_row = first_key + tl.where(is_whole, block_id, last_block) * BS + part_start

        # -- load the keys --
        k_tile = KDescriptor.load([key_row, head, 0]).reshape([BT, D])

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]

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
    for step in range(num_partial * num_parts):
        start = partial_start + step % num_parts * BT
        is_seen = tokens < num_visible - start  # [BT]
        key_row = ((first_key + start).to(tl.int64) + tokens) * H + head  # [BT]
        k_tile = tl.load(K + key_row[:, None] * D + width, mask=is_seen[:, None], other=0.0)
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        acc_s = tl.where(is_seen, acc_s, float("-inf"))
        acc_s, scores_max, running_sum, acc_o = online_softmax(
            acc_s, scores_max, running_sum, acc_o, scale_log2
        )
        v_tile = tl.load(V + key_row[:, None] * DV + value_width, mask=is_seen[:, None], other=0.0)
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")

    # -- normalise and store --
    is_empty = (num_slots == 0) & (num_partial == 0)
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = acc_o / safe_sum[:, None]
    lse = scores_max * scale + tl.log(safe_sum)  # -inf for an empty row
    o_row = ((row - first_row) * H + head) * G + group
    tl.store(
        Output + o_row[:, None] * DV + value_width,
        o_tile.to(Output.dtype.element_ty),
        mask=in_group[:, None],
    )
    tl.store(LSE + o_row, lse, mask=in_group)


def tile_sizes(G: int, D: int, DV: int) -> dict[str, int]:
    """The tiles of a shape: powers of two, as `tl.arange` wants them, and 16 at least, the side of
    the tensor cores' tiles."""
    return {name: _power_of_two(n) for name, n in {"GT": G, "DT": D, "DVT": DV}.items()}


def _power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


# Largest group and longest token (key and value, padded, in bytes) up to which a row holds: tokens
# of a step, warps, stages. Behind it milliseconds of the pointer kernel and of the runner-up: H200,
# torch 2.11, Triton 3.6, 16,384 tokens, 4 key/value heads, 1,024 keys a query, bf16; to be had
# again by `python -m nsa_tutorial.bench selected --backend triton --steps --tokens 16384 --dtype
# bfloat16 --no-dense` with the groups and widths in question. The first row's are in
# assets/triton_forward_h200.json; the last one, for wide fp32, was not measured.
LAUNCH_TABLE = (
    # 65,536 tokens, D 128: 14.7, 15.5 with 2 warps; D 64: 7.1, 7.3 with 2 stages
    (16, 512, 32, 1, 3),
    (16, 768, 32, 1, 2),  # D 192, DV 128: 4.9, 5.7 with 2 warps
    (16, 1024, 64, 2, 2),  # D 256: 8.0, 8.2 in steps of 32
    (32, 1024, 64, 2, 2),  # D 128: 5.0, 6.0 with 4 warps
    (64, 512, 64, 4, 3),  # D 128: 5.9, 6.1 with 2 stages
    # D 256: 17.0, and 12.8 in steps of 32; with descriptors, which Hopper takes, 12.6
    (64, 1024, 64, 4, 2),
    (128, 1024, 64, 8, 2),  # with descriptors D 128: 12.3, 16.7 in steps of 32; D 256: 19.4, 23.8
    (128, 2048, 32, 8, 2),
)
SHARED_MEMORY = 227 * 1024  # bytes that a program can have on an H100 or H200


def launch_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """Tokens of a step, warps and pipeline stages for a shape, from `LAUNCH_TABLE`, as far as
    `shared_memory`, in bytes, allows."""
    tiles = tile_sizes(G, D, DV)
    token_bytes = (tiles["DT"] + tiles["DVT"]) * itemsize
    fitting = [row for row in LAUNCH_TABLE if row[0] >= tiles["GT"] and row[1] >= token_bytes] or [
        LAUNCH_TABLE[-1]
    ]
    BT, warps, stages = fitting[0][2:]
    BT = min(BT, _power_of_two(BS))
    while BT * token_bytes * stages + tiles["GT"] * tiles["DT"] * itemsize > shared_memory and (
        stages > 1 or BT > 16
    ):
        BT, stages = (BT, stages - 1) if stages > 1 else (BT // 2, 1)
    return {"BT": BT, "num_warps": warps, "num_stages": stages}


def can_use_descriptors(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> bool:
    """Whether `descriptor_kernel` takes these: rows are powers of two of at least 16 bytes, and a
    step's tokens divide a block.

    Its copies are Hopper's and later; elsewhere Triton takes them apart again. fp32, whose products
    keep off the tensor cores, stays with pointers; it was not measured with descriptors.
    """
    (D, DV), itemsize = (q.shape[3], v.shape[3]), q.element_size()
    BT = launch_options(q.shape[2] // k.shape[2], D, DV, block_size, itemsize)["BT"]
    is_aligned = (
        all(n == triton.next_power_of_2(n) and n >= 16 for n in (D, DV))
        and block_size % BT == 0
        and k.shape[1] > 0
    )
    return (
        is_aligned
        and itemsize == 2
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    rows: QueryRows,
    *,
    block_size: int,
    scale: float,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments and results as in `selected_attention.forward`, on CUDA tensors,
    or on the CPU interpreted.

    `options` are those of `launch`, for measuring what each of them does.
    """
    o, lse = launch(q, k, v, ids, rows, block_size=block_size, scale=scale, **options)
    return o[0], lse[0]


def sliding_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: QueryRows,
    *,
    window_size: int,
    scale: float,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Launch the windows alone; arguments and results as in `sliding_window.forward`."""
    no_list = rows.first_key.new_empty(len(rows.first_key), v.shape[2], 0)  # [R, H, S = 0]
    o, lse = launch(
        q,
        k,
        v,
        no_list,
        rows,
        block_size=WINDOW_BLOCK,
        scale=scale,
        window_size=window_size,
        **options,
    )
    return o[0], lse[0]


def selection_and_window(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    window_size: int, scale: float,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Both in one launch, over the same keys and values: `o` and `lse` of the lists, then of the
    windows. `rows` are causal."""
    o, lse = launch(
        q, k, v, ids, rows, block_size=block_size, scale=scale, window_size=window_size, **options
    )
    return o[0], lse[0], o[1], lse[1]


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    window_size: int = 0,
    use_descriptors: bool | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch lists, windows, or both.

    Args:
        q, k, v, ids, rows, block_size, scale: as in `selected_attention.forward`; no slots for
            windows alone.
        window_size: keys of a window; 0 for none.
        use_descriptors: which of the two kernels; None takes `descriptor_kernel` wherever
            `can_use_descriptors`.
        options: `BT`, `num_warps`, `num_stages`, in place of what `launch_options` chooses.

    Returns:
        Outputs `[branches, B, N, HQ, DV]` and log-sum-exps `[branches, B, N, HQ]`: of the lists, if
            there are any, then of the
        windows.
    """
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    R, G, S = B * N, HQ // H, ids.shape[-1]
    branches = (S > 0) + (window_size > 0)
    o = torch.empty(branches, B, N, HQ, DV, dtype=v.dtype, device=v.device)
    lse = torch.empty(branches, B, N, HQ, dtype=torch.float32, device=v.device)
    chosen = (
        launch_options(G, D, DV, block_size, q.element_size(), _shared_memory(q.device)) | options
    )
    tiles = tile_sizes(G, D, DV) | {"BT": chosen.pop("BT")}
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    inputs, outputs = (ids, rows.first_key, rows.num_visible), (o, lse, scale, scale * LOG2_E)
    sizes, fixed = (
        (R, 0 if S else R, H, S, window_size),
        {"G": G, "D": D, "DV": DV, "BS": block_size, "WINDOW": window_size > 0},
    )
    grid = (branches * R, H)
    if can_use_descriptors(q, k, v, block_size) if use_descriptors is None else use_descriptors:
        fixed |= {"GT": tiles["GT"], "BT": tiles["BT"]}
        described = descriptors(k, v, BT=tiles["BT"])
        descriptor_kernel[grid](q, k, v, *described, *inputs, *outputs, *sizes, **fixed, **chosen)
    else:
        kernel[grid](q, k, v, *inputs, *outputs, *sizes, **fixed, **tiles, **chosen)
    return o, lse


def descriptors(*tensors: Tensor, BT: int) -> list[TensorDescriptor]:
    """Of contiguous keys and values `[B, M, H, width]`: boxes of `BT` tokens of one head, from
    `[B * M, H, width]`."""
    return [TensorDescriptor.from_tensor(x.flatten(0, 1), [BT, 1, x.shape[-1]]) for x in tensors]


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on `device`."""
    return (
        torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if device.type == "cuda"
        else SHARED_MEMORY
    )
