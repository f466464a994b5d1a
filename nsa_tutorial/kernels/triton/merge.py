"""Chapter 16: the partial outputs of a list's blocks, merged to one, in Triton.

`selected.by_key_blocks` writes partials, `merge_kernel` weighs them by their largest scores and
sums, as states of an online softmax merge (chapter 03).

Symbols: those of `selected.by_key_blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partials_of(
    step, ids, num_visible, S,
    BS: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The next `BM` partials of a list: their numbers, which of them exist, and which were
    written, since a key of their part is visible."""
    index = step + tl.arange(0, BM)  # [BM]
    exists = index < S * PARTS
    block_id = tl.load(ids + index // PARTS, mask=exists, other=-1)
    # an id may be anything: only one that names a block is multiplied
    names_block = (block_id >= 0) & (block_id < tl.cdiv(num_visible, BS))
    start = tl.where(names_block, block_id, 0) * BS + index % PARTS * BT
    return index, exists, names_block & (start < num_visible)


@triton.jit(do_not_specialize=["first_group", "R", "S"])  # new lengths, same kernel
def merge_kernel(
    Partials, PartialMax, PartialSum, BlockIndices, NumVisible, Output, LSE,
    scale, scale_log2, first_group, R, H, S,
    G: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr,
    DVT: tl.constexpr, BG: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Reads what `partial_kernel` writes, `BlockIndices [R, H, S]` and `NumVisible [R]`; writes
    `Output [R, H, G, DV]` and `LSE [R, H, G]`.

    The grid is `(groups of a run, steps of BG heads in a group)`; `BM` partials are taken at a
    time. Group `i` of all is query `i % R` of head `i // R`, and the run begins with `first_group`.
    """
    # -- locate the program --
    place = tl.program_id(0)  # in the run
    head = (first_group + place) // R
    row = (first_group + place - head * R).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    ids = BlockIndices + (row * H + head) * S  # the list
    group = tl.program_id(1) * BG + tl.arange(0, BG)  # [BG]
    in_group = group < G
    value_width = tl.arange(0, DVT)

    # -- the largest score --
    scores_max = tl.full([BM, BG], float("-inf"), tl.float32)
    num_written = tl.zeros([BM], tl.int32)
    for step in range(0, S * PARTS, BM):
        index, exists, is_written = partials_of(step, ids, num_visible, S, BS, BT, PARTS, BM)
        # read whether written or not, so that this load need not wait for the list
        offset = (place * (S * PARTS) + index)[:, None] * G + group  # [BM, BG]
        largest = tl.load(PartialMax + offset, mask=exists[:, None] & in_group, other=float("-inf"))
        largest = tl.where(is_written[:, None], largest, float("-inf"))
        scores_max = tl.maximum(scores_max, largest)
        num_written += is_written.to(tl.int32)
    scores_max = tl.max(scores_max, axis=0)  # [BG]
    shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)

    # -- accumulate --
    acc_o = tl.zeros([BM, BG, DVT], tl.float32)
    running_sum = tl.zeros([BM, BG], tl.float32)
    for step in range(0, S * PARTS, BM):
        index, exists, is_written = partials_of(step, ids, num_visible, S, BS, BT, PARTS, BM)
        offset = (place * (S * PARTS) + index)[:, None] * G + group  # [BM, BG]
        mask = is_written[:, None] & in_group
        largest = tl.load(PartialMax + offset, mask=mask, other=float("-inf"))
        scores_sum = tl.load(PartialSum + offset, mask=mask, other=0.0)
        o_mask = mask[:, :, None] & (value_width < DV)
        o_tile = tl.load(Partials + offset[:, :, None] * DV + value_width, mask=o_mask, other=0.0)
        p = tl.exp2((largest - shift) * scale_log2) * scores_sum  # [BM, BG]
        running_sum += p
        acc_o += p[:, :, None] * o_tile.to(tl.float32)

    # -- normalise and store --
    running_sum = tl.sum(running_sum, axis=0)  # [BG]
    is_empty = tl.sum(num_written, axis=0) == 0  # no block is visible
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = tl.sum(acc_o, axis=0) / safe_sum[:, None]  # [BG, DVT]
    lse = scores_max * scale + tl.log(safe_sum)  # [BG], -inf for an empty row
    o_row = (row * H + head) * G + group  # [BG]
    o_tile = o_tile.to(Output.dtype.element_ty)
    o_mask = in_group[:, None] & (value_width < DV)
    tl.store(Output + o_row[:, None] * DV + value_width, o_tile, mask=o_mask)
    tl.store(LSE + o_row, lse, mask=in_group)
