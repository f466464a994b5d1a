"""Chapter 14: the scores that choose blocks, in Triton.

`score_kernel` computes the scores of `compressed.forward` once more, turns them into weights by the
log-sum-exp that that kernel left, and sums them over a group's heads and over a cell of summaries.
`launch` runs it.

Symbols: those of `compressed.forward`; `C` summaries of a cell · `NC` cells of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.compressed.forward import sight

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


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
