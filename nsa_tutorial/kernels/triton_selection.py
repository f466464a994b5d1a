"""Chapter 14: attention to summaries, and the choice of blocks, in Triton.

`attend_kernel` is attention of a tile of queries to the summaries they see. `score_kernel` computes
the same scores once more, turns them into weights by the log-sum-exp that the first kernel left,
and sums them over a group's heads and over a cell of summaries. `pick_kernel` makes block scores of
the cells and takes the best. `triton_selection_launch` runs them. No argument is checked here.

Symbols: those of `triton_forward`; `BQ` queries of a tile, `BT` summaries of a step · `C` summaries
of a cell · `NC` cells of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.exact import online_softmax

LOG2_E = tl.constexpr(online_softmax.LOG2_E)
MOST = tl.constexpr(2**31 - 1)
INFINITY = tl.constexpr(0x7F800000)  # its bits, in fp32


@triton.jit
def sight(FirstKey, NumVisible, query, in_rows, BT: tl.constexpr):
    """What a tile of queries sees: the first summary and the end of each query, `[BQ]`; where the
    tile's walk starts, from where on it needs a mask, and where it stops.

    Steps before `masked` are seen as a whole by all of the tile. Queries of several sequences share
    no such step.
    """
    first = tl.load(FirstKey + query, mask=in_rows, other=0)
    end = first + tl.load(NumVisible + query, mask=in_rows, other=0)
    start = tl.min(tl.where(in_rows, first, MOST), axis=0)
    last_start = tl.max(first, axis=0)
    first_end = tl.min(tl.where(in_rows, end, MOST), axis=0)
    stop = tl.max(end, axis=0)
    num_whole = tl.where(last_start == start, tl.maximum(first_end - start, 0) // BT, 0)
    return first, end, start, start + num_whole * BT, stop


@triton.jit
def attend_to(
    acc_o, running_sum, scores_max, q_tile, first, end, start, stop, K, V, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk over the summaries `start … stop - 1`; without `MASK`, all queries see them all."""
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT], the same for every step
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BT, DVT]
    for step in range(start, stop, BT):
        # -- load the keys and the values --
        key_row = (step * H + head).to(tl.int64)
        k_mask = width < D
        v_mask = value_width < DV
        if MASK:
            k_mask = (tokens < stop - step)[:, None] & k_mask
            v_mask = (tokens < stop - step)[:, None] & v_mask
        k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]
        v_tile = tl.load(V + key_row * DV + v_offset, mask=v_mask, other=0.0)  # [BT, DVT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]

        # -- mask --
        if MASK:
            key = step + tokens  # [BT]
            is_seen = (key >= first[:, None]) & (key < end[:, None])  # [BQ, BT]
            acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=1))  # [BQ]
        shift = tl.where(scores_max == float("-inf"), 0.0, scores_max * scale_log2)
        scores_scale = tl.exp2(scores_max_prev * scale_log2 - shift)
        p = tl.exp2(acc_s * scale_log2 - shift[:, None])  # [BQ, BT], one multiply-add each
        running_sum = running_sum * scores_scale + tl.sum(p, axis=1)
        acc_o *= scores_scale[:, None]

        # -- accumulate --
        p = p.to(v_tile.dtype)
        if MASK:  # a weight of 0 hides a number, but not NaN
            is_bad = ~(tl.abs(v_tile.to(tl.float32)) < float("inf"))  # [BT, DVT]
            if tl.max(is_bad.to(tl.int32)) > 0:
                clean = tl.where(is_bad, 0.0, v_tile)
                acc_o = tl.dot(p, clean, acc_o, input_precision="ieee")
                sees_bad = tl.dot(is_seen.to(tl.float16), is_bad.to(tl.float16))  # [BQ, DVT]
                acc_o = tl.where(sees_bad > 0, float("nan"), acc_o)
            else:
                acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
        else:
            acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
    return acc_o, running_sum, scores_max


@triton.jit(do_not_specialize=["R"])
def attend_kernel(
    Q, K, V, FirstKey, NumVisible, Output, LSE, scale, scale_log2, R, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, HQ, D]`, summaries `K [keys, H, D]` and `V [keys, H, DV]`, `FirstKey [R]` and
    `NumVisible [R]`; writes `Output [R, HQ, DV]` and `LSE [R, HQ]`.

    The grid is `(tiles of BQ queries * HQ,)`. The heads of a group follow each other, since they
    read the same summaries; the latest queries come first, since they see most.
    """
    # -- locate the program --
    HQ = H * G
    tile = tl.cdiv(R, BQ) - 1 - tl.program_id(0) // HQ
    query_head = tl.program_id(0) % HQ
    head = query_head // G
    query = tile * BQ + tl.arange(0, BQ)  # [BQ]
    in_rows = query < R
    first, end, start, masked, stop = sight(FirstKey, NumVisible, query, in_rows, BT)
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    row = query.to(tl.int64) * HQ + query_head  # [BQ]

    # -- load the queries --
    q_mask = in_rows[:, None] & (width < D)
    q_tile = tl.load(Q + row[:, None] * D + width, mask=q_mask, other=0.0)  # [BQ, DT]

    # -- initialise --
    acc_o = tl.zeros([BQ, DVT], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    # -- walk --
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, start, masked, K, V, head, scale_log2,
        H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    acc_o, running_sum, scores_max = attend_to(
        acc_o, running_sum, scores_max, q_tile, first, end, masked, stop, K, V, head, scale_log2,
        H, D, DV, True, DT, DVT, BT,
    )  # fmt: skip

    # -- normalise and store --
    is_empty = end == first  # [BQ]
    safe_sum = tl.where(is_empty, 1.0, running_sum)
    o_tile = tl.where(is_empty[:, None], 0.0, acc_o / safe_sum[:, None])  # [BQ, DVT]
    lse = tl.where(is_empty, float("-inf"), scores_max * scale + tl.log(safe_sum))
    o_mask = in_rows[:, None] & (value_width < DV)
    o_pointer = Output + row[:, None] * DV + value_width
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + row, lse, mask=in_rows)


@triton.jit(do_not_specialize=["R", "first_row", "NC"])
def score_kernel(
    Q, K, LSE, FirstKey, NumVisible, Scores, scale_log2, R, first_row, H, NC,
    G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr,
    DT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, HQ, D]`, summaries `K [keys, H, D]`, `LSE [R, HQ]`; writes `Scores
    [SHARES, rows, H, NC]` of the rows `first_row … R - 1`, in fp32.

    The grid is `(tiles of BQ queries * H,)`. A cell is `C` summaries of a sequence, which begin in
    one block; each of them is `PIECES` pieces long, a block `C` pieces, and share `i` of a cell is
    what it gives to the `i`-th block from its own on. With `C` and `PIECES` 1, a cell is a summary.
    """
    # -- locate the program --
    HQ = H * G
    tile = tl.cdiv(R - first_row, BQ) - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    local_row = tile * BQ + tl.arange(0, BQ)  # [BQ], in the workspace
    query = first_row + local_row
    in_rows = query < R
    first, end, start, _, stop = sight(FirstKey, NumVisible, query, in_rows, BT)
    width = tl.arange(0, DT)
    tokens = tl.arange(0, BT)
    row = query.to(tl.int64) * HQ + head * G  # [BQ], of the first head of the group
    q_offset = row[:, None] * D + width  # [BQ, DT]
    q_mask = in_rows[:, None] & (width < D)
    k_offset = tokens[:, None] * (H * D) + width  # [BT, DT]
    out_row = local_row.to(tl.int64) * H + head  # [BQ]
    num_rows = (R - first_row).to(tl.int64) * H

    for step in range(start, stop, BT):
        # -- load the keys --
        key_row = (step * H + head).to(tl.int64)
        k_mask = (tokens < stop - step)[:, None] & (width < D)
        k_tile = tl.load(K + key_row * D + k_offset, mask=k_mask, other=0.0)  # [BT, DT]

        # -- weights, summed over the group --
        mass = tl.zeros([BQ, BT], tl.float32)
        next_lse = tl.load(LSE + row, mask=in_rows, other=0.0)  # [BQ]
        for g in range(G):
            # fetched a head ahead: it feeds no product, and Triton starts such loads no earlier
            lse = next_lse * LOG2_E
            next_lse = tl.load(LSE + row + g + 1, mask=in_rows & (g + 1 < G), other=0.0)
            q_tile = tl.load(Q + q_offset + g * D, mask=q_mask, other=0.0)  # [BQ, DT]
            acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]
            mass += tl.exp2(acc_s * scale_log2 - lse[:, None])

        # -- mask --
        key = step + tokens  # [BT]
        is_seen = (key >= first[:, None]) & (key < end[:, None])
        mass = tl.where(is_seen, mass, 0.0)  # [BQ, BT]

        # -- store, a cell at a time --
        if C == 1:
            cell = key - first[:, None]  # [BQ, BT], counted from the sequence's first summary
            pointer = Scores + out_row[:, None] * NC + cell
            tl.store(pointer, mass, mask=is_seen)
        else:
            place = tokens % C  # [BT], of a summary in its cell
            cell = (step - start) // C + tl.arange(0, BT // C)  # [BT // C]
            in_scores = in_rows[:, None] & (cell < NC)
            for share in tl.static_range(SHARES):
                # the pieces that a summary has in common with the share's block
                common = tl.minimum(place + PIECES, share * C + C) - tl.maximum(place, share * C)
                part = mass * tl.maximum(common, 0).to(tl.float32)
                part = tl.sum(tl.reshape(part, [BQ, BT // C, C]), axis=2)  # [BQ, BT // C]
                pointer = Scores + (share * num_rows + out_row[:, None]) * NC + cell
                tl.store(pointer, part, mask=in_scores)


@triton.jit(do_not_specialize=["num_rows", "first_row", "NC"])
def pick_kernel(
    Scores, NumVisible, Position, BlockCounts, BlockIndices, num_rows, first_row, H, NC, top_n,
    num_initial, num_local, length, stride,
    BS: tl.constexpr, C: tl.constexpr, SHARES: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
    HAS_COUNTS: tl.constexpr, NT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Reads `Scores [SHARES, num_rows, H, NC]`, `NumVisible [R]`, `Position [R]` and, with
    `HAS_COUNTS`, `BlockCounts [R, H]`; writes `BlockIndices [R, H, top_n]`.

    The grid is `(num_rows * H / BR,)`: a program makes `BR` lists. `NB` is a power of two that
    holds all blocks of a sequence, `NT` one that holds a list, and `K` summaries at most share
    tokens with a block.
    """
    # -- locate the program --
    index = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR], of a list
    in_lists = index < num_rows.to(tl.int64) * H
    row = first_row + index // H
    num_visible = tl.load(NumVisible + row, mask=in_lists, other=0)[:, None]
    own = tl.load(Position + row, mask=in_lists, other=0)[:, None] // BS
    block = tl.arange(0, NB)[None, :]
    scores = Scores + (index * NC)[:, None]  # [BR, 1]

    # -- from cells to blocks --
    score = tl.zeros([BR, NB], tl.float32)
    if C == 1:  # a summary counts by the tokens that it shares with the block
        start = block * BS
        first = (start - length + length * stride) // stride + 1 - length  # of what is positive
        for i in range(K):
            summary = first + i  # [1, NB]
            common = tl.minimum(summary * stride + length, start + BS)
            common = (common - tl.maximum(summary * stride, start)).to(tl.float32)
            exists = (summary >= 0) & (summary < num_visible) & (common > 0)  # [BR, NB]
            score += tl.load(scores + summary, mask=exists, other=0.0) * (common / stride)
    else:
        num_cells = tl.cdiv(num_visible, C)
        for share in tl.static_range(SHARES):
            cell = block - share
            exists = (cell >= 0) & (cell < num_cells)
            pointer = scores + share * (num_rows.to(tl.int64) * H * NC) + cell
            score += tl.load(pointer, mask=exists, other=0.0)

    # -- force and hide --
    score = tl.where(score == score, score, 0.0)  # NaN is worth nothing
    bits = score.to(tl.int32, bitcast=True)  # of numbers of at least 0: in the same order
    bits = tl.where((block < num_initial) | (block > own - num_local), INFINITY, bits)
    bits = tl.where(block <= own, bits, -1)  # [BR, NB]

    # -- halve the range, down to the bits of the last block that is taken --
    num_taken = tl.full([BR], 0, tl.int32) + top_n
    if HAS_COUNTS:
        counts = tl.load(BlockCounts + first_row.to(tl.int64) * H + index, mask=in_lists, other=0)
        num_taken = tl.minimum(num_taken, counts.to(tl.int32))
    low = tl.zeros([BR], tl.int32)
    high = tl.full([BR], INFINITY + 1, tl.int32)
    while tl.max(high - low, axis=0) > 1:
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle[:, None]).to(tl.int32), axis=1)  # [BR]
        low = tl.where(count >= num_taken, middle, low)
        high = tl.where(count >= num_taken, high, middle)
        high = tl.where(count == num_taken, middle + 1, high)

    # -- take what is above, and of what is equal the lower ids --
    is_above = (bits > low[:, None]).to(tl.int32)
    is_equal = (bits == low[:, None]).to(tl.int32)
    num_equal = num_taken - tl.sum(is_above, axis=1)  # [BR]
    is_first = tl.cumsum(is_equal, axis=1) <= num_equal[:, None]
    is_taken = ((is_above > 0) | ((is_equal > 0) & is_first)).to(tl.int32)

    # -- store --
    place = tl.cumsum(is_taken, axis=1) - 1  # [BR, NB]
    num_found = tl.sum(is_taken, axis=1)[:, None]
    ids = BlockIndices + ((first_row.to(tl.int64) * H + index) * top_n)[:, None]  # [BR, 1]
    block = tl.broadcast_to(block, [BR, NB])
    tl.store(ids + place, block, mask=(is_taken > 0) & in_lists[:, None])
    slot = tl.arange(0, NT)[None, :]
    is_over = (slot >= num_found) & (slot < top_n) & in_lists[:, None]  # [BR, NT]
    tl.store(ids + slot, tl.full([BR, NT], -1, tl.int32), mask=is_over)
