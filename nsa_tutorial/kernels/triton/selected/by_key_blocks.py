"""Chapter 16: selected attention, KV-outer, forward, in Triton; one program per (block of keys,
chunk of the queries that list it).

`selected.forward` has one program for each query: it fills a tile with the heads of one group, and
reads each block anew. Small groups leave such tiles almost empty. Here a program keeps one block,
and gathers the rows of all queries that list it, so that the tile is always full.

Two kernels. `partial_kernel` attends to one block alone: each slot of each list has a place for its
output and log-sum-exp. `merge_kernel` merges the slots of a list, in their order. The partials are
as large as `S` outputs, so `launch` takes one run of heads and queries after another, and the
partials of a run fit a workspace.

There is no backward here, and no factor on a slot's scores.

Symbols: those of `selected.forward`; `BR` rows of a step, a row being one query and one head · `E`
entries of all lists · `P` chunks of the inverse list · `PARTS` parts of `BT` keys in a block; a
group is one query and one key/value head, and group `i` of all is query `i % R` of head `i // R`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.launch_options import edge, tile_sizes
from nsa_tutorial.kernels.triton.merge import merge_kernel
from nsa_tutorial.kernels.triton.selected import by_key_blocks_options
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse import inverse_list
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit
def without_bad_numbers(tile, BT: tl.constexpr):
    """A tile `[BT, …]` with 0 for what is not finite, and the first token of each column that was
    not; `BT` where there is none.

    A weight of 0 hides a number, but not NaN. Rows see the first tokens of a tile, so this is all
    that tells which of them see a number that is not finite.
    """
    is_bad = ~(tl.abs(tile.to(tl.float32)) < float("inf"))
    first_bad = tl.min(tl.where(is_bad, tl.arange(0, BT)[:, None], BT), axis=0)
    return tl.where(is_bad, 0.0, tile), first_bad


def reciprocal_of(divisor: int) -> tuple[int, int]:
    """`reciprocal, bits`, with which `quotient` divides by `divisor`, 1 … 2**31 - 1."""
    bits = (divisor - 1).bit_length()
    return -(-(2 ** (31 + bits)) // divisor), bits


@triton.jit
def quotient(numbers, reciprocal, bits):
    """`numbers // divisor` of int32 numbers of 0 and more: a product and a shift, where the GPU
    takes some twenty instructions for a division."""
    high = tl.umulhi((numbers * 2).to(tl.uint32), reciprocal.to(tl.uint32))
    return (high >> bits).to(tl.int32)


@triton.jit
def attend(
    k_tile, v_tile, first_bad, start, end, num_keys, first_key, part,
    Q, RowEnd, Entries, Partials, PartialMax, PartialSum, first, first_entry, first_row, head,
    scale_log2, H, reciprocal, bits,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr,
    PAD: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Stores the partials of the rows `start … end - 1` of a chunk, `BR` a step.

    Without `MASK` they all see the whole tile. With it, the values are `without_bad_numbers`.
    """
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    for step in range(start, end, BR):
        # -- guard --
        index = step + tl.arange(0, BR)  # [BR]
        is_row = index < end
        entry = tl.load(Entries + first + index // G, mask=is_row, other=first_entry)
        entry = (entry - first_entry).to(tl.int32)  # place of the group * S + slot, in the run
        row = first_row + quotient(entry, reciprocal, bits)
        group_row = (row.to(tl.int64) if WIDE else row) * H + head
        group_row = group_row * G + index % G  # [BR]

        # -- load the queries --
        q_mask = is_row[:, None] & (width < D)
        q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)  # [BR, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BR, BT]

        # -- mask --
        if MASK:
            row_end = tl.load(RowEnd + row, mask=is_row, other=0)
            num_seen = tl.minimum(row_end - first_key, num_keys)  # [BR]
            acc_s = tl.where(tokens < num_seen[:, None], acc_s, float("-inf"))
        elif PAD:
            acc_s = tl.where(tokens < num_keys, acc_s, float("-inf"))

        # -- softmax --
        scores_max = tl.max(acc_s, axis=1)  # [BR]
        # where all scores are -inf, -inf - -inf would be NaN
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max)
        acc_s = tl.exp2((acc_s - shift[:, None]) * scale_log2)
        scores_sum = tl.sum(acc_s, axis=1)

        # -- multiply with the values --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, input_precision="ieee")  # [BR, DVT]
        if MASK:
            acc_o = tl.where(num_seen[:, None] > first_bad, float("nan"), acc_o)

        # -- normalise and store --
        safe_sum = tl.where(scores_sum == 0.0, 1.0, scores_sum)
        o_tile = acc_o * (1.0 / safe_sum)[:, None]  # one division a row: they are slow
        o_tile = o_tile.to(Partials.dtype.element_ty)
        place = (entry * PARTS + part) * G + index % G  # [BR]
        o_mask = is_row[:, None] & (value_width < DV)
        tl.store(Partials + place[:, None] * DV + value_width, o_tile, mask=o_mask)
        tl.store(PartialMax + place, scores_max, mask=is_row)
        tl.store(PartialSum + place, scores_sum, mask=is_row)


@triton.jit(  # new lengths, same kernel
    do_not_specialize=["run", "first_group", "R", "S", "reciprocal", "bits"]
)
def partial_kernel(
    Q, K, V, RowEnd, Entries, FirstKey, Head, First, Last, ChunkStart, Partials, PartialMax,
    PartialSum, scale_log2, run, first_group, R, H, S, reciprocal, bits,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, EDGE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `RowEnd [R]`, the inverse list;
    writes `Partials [groups of a run, S, PARTS, G, DV]`, and the largest score and the sum of each,
    `PartialMax` and `PartialSum [groups of a run, S, PARTS, G]`, for the slots that name a visible
    block.

    The grid is `(most chunks of a run, PARTS)`. The run begins with the group `first_group`, and
    has the chunks `ChunkStart[run] … ChunkStart[run + 1] - 1`. `reciprocal` and `bits` are those
    of `S`.
    """
    # -- locate the program --
    chunk = tl.load(ChunkStart + run) + tl.program_id(0)
    if chunk >= tl.load(ChunkStart + run + 1):
        return
    part = tl.program_id(1)
    first = tl.load(First + chunk)
    last = tl.load(Last + chunk)
    if first == last:
        return
    head = tl.load(Head + chunk)
    first_key = tl.load(FirstKey + chunk) + part * BT
    num_keys = tl.minimum(BS - part * BT, BT)  # of the tile
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)

    # -- load the keys and the values --
    first_entry = first_group.to(tl.int64) * S
    first_row = first_group - head * R
    last_row = (tl.load(Entries + last - 1) - first_entry).to(tl.int32) // S  # it sees most
    last_row += first_row
    in_sight = tokens < tl.minimum(tl.load(RowEnd + last_row) - first_key, num_keys)
    key_row = first_key.to(tl.int64) * H + head
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT]
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]
    in_sight = in_sight[:, None]
    k_tile = tl.load(K + key_row * D + k_offset, mask=in_sight & (width < D), other=0.0)
    v_pointer, v_mask = V + key_row * DV + v_offset, in_sight & (value_width < DV)
    v_clean, first_bad = without_bad_numbers(tl.load(v_pointer, mask=v_mask, other=0.0), BT)

    # The rows that see the tile in part come first, since entries ascend with their rows. They are
    # behind a mask, all others go without one.
    index = first + tl.arange(0, EDGE)  # [EDGE]
    row = tl.load(Entries + index, mask=index < last, other=first_entry)
    row = first_row + quotient((row - first_entry).to(tl.int32), reciprocal, bits)
    row_end = tl.load(RowEnd + row, mask=index < last, other=0)
    is_partial = (index < last) & (row_end < first_key + num_keys)
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    num_rows = (last - first) * G
    # more may follow than were looked at: then all rows are masked
    num_masked = tl.where(num_partial == EDGE, num_rows, num_partial * G)
    num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)
    PAD: tl.constexpr = BS % BT != 0
    attend(
        k_tile, v_clean, first_bad, 0, num_masked, num_keys, first_key, part,
        Q, RowEnd, Entries, Partials, PartialMax, PartialSum, first, first_entry, first_row, head,
        scale_log2, H, reciprocal, bits, G, D, DV, PARTS, PAD, True, WIDE, DT, DVT, BT, BR,
    )  # fmt: skip
    v_tile = tl.load(v_pointer, mask=v_mask, other=0.0)  # once more: only one of both is held
    attend(
        k_tile, v_tile, first_bad, num_masked, num_rows, num_keys, first_key, part,
        Q, RowEnd, Entries, Partials, PartialMax, PartialSum, first, first_entry, first_row, head,
        scale_log2, H, reciprocal, bits, G, D, DV, PARTS, PAD, False, WIDE, DT, DVT, BT, BR,
    )  # fmt: skip


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, length: int | None = None,
    out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run both kernels on the lists, for one run of heads and queries after another.

    Args:
        q, k, v, ids, rows, block_size, scale: as in `selected_attention.forward`.
        length: entries of a chunk, in place of what `chunk_length` chooses.
        out: contiguous tensors to write to; None makes new ones.
        options: `BT`, `BR`, `num_warps`, `num_stages`, in place of what `partial_options` chooses.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]` in fp32.
    """
    (B, N, HQ, D), (H, DV), BS = q.shape, v.shape[2:], block_size
    R, G, S, num_keys = B * N, HQ // H, ids.shape[-1], k.shape[0] * k.shape[1]
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    options = by_key_blocks_options.partial_options(D, DV, BS, **memory) | options
    tiles, parts = tile_sizes(G, D, DV), cdiv(BS, options["BT"])
    both = {"G": G, "DV": DV, "BS": BS, "BT": options.pop("BT"), "PARTS": parts}
    both |= {"DVT": tiles["DVT"]}
    merged = by_key_blocks_options.merge_sizes(G, DV)
    length = length or by_key_blocks_options.chunk_length(G)
    q, k, v = (x.contiguous() for x in (q, k, v))
    row_end = rows.first_key + rows.num_visible
    o, lse = out or (v.new_empty(B, N, HQ, DV), v.new_empty(B, N, HQ, dtype=torch.float32))
    heads, run = by_key_blocks_options.size_of_a_run(R, H, G, S * parts, DV, v.element_size())
    partials = v.new_empty(heads, run, S, parts, G, DV)
    scores_max, scores_sum = (lse.new_empty(heads, run, S, parts, G) for _ in range(2))

    # -- the inverse list --
    sizes = {"block_size": BS, "num_keys": num_keys}
    inverse = inverse_list.invert_lists(ids, rows, **sizes, run=run)
    chunks = inverse_list.chunks(inverse, length=length)
    num_runs = H // heads * cdiv(R, run)
    tiles_of_a_run = len(inverse.first) // num_runs
    chunk_start = F.pad(chunks.ends[tiles_of_a_run - 1 :: tiles_of_a_run], (1, 0))  # [runs + 1]
    most_chunks = tiles_of_a_run + heads * run * S // length

    for i in range(num_runs):
        head, start = i // cdiv(R, run) * heads, i % cdiv(R, run) * run
        of_run = (head * R + start, R, H, S)

        # -- every chunk --
        partial_kernel[(min(most_chunks, len(chunks.first)), parts)](
            q, k, v, row_end, inverse.entries, chunks.first_key, chunks.head, chunks.first,
            chunks.last, chunk_start, partials, scores_max, scores_sum,
            scale * online_softmax.LOG2_E, i, *of_run, *reciprocal_of(S), D=D, DT=tiles["DT"],
            EDGE=edge(BS), WIDE=q.numel() >= 2**31, **both,
            **options,
        )  # fmt: skip

        # -- every list --
        num_groups = heads * min(run, R - start)
        merge_kernel[(num_groups, cdiv(G, merged["BG"]))](
            partials, scores_max, scores_sum, ids, rows.num_visible, o, lse, scale,
            scale * online_softmax.LOG2_E, *of_run, **both, **merged,
        )  # fmt: skip
    return o, lse
