"""An indexer's scores in Triton: each block's best token, as a number that `pick` can compare.

`index_kernel` multiplies a tile of queries with the keys, head by head, adds the heads up, and
keeps of every block the maximum of what a query sees. `index_launch` runs it.

Symbols: `J` heads of a list · `DI` their width · `BQ` queries of a tile · `BT` tokens of a step ·
`NC` blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.sparse import indexer

LARGEST = tl.constexpr(indexer.LARGEST)


@triton.jit
def code_of(score):
    """A positive number whose bits are in the order of the scores: those of a score without the
    last one. NaN is the least, and ±0 are the same."""
    score = tl.where(score > -LARGEST, tl.minimum(score, LARGEST), -LARGEST)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    code = tl.where(bits < 0, ~bits >> 1, (bits >> 1) + 0x40000000)
    return code.to(tl.float32, bitcast=True)


@triton.jit
def scores_of_a_step(
    Q, K, W, row, in_rows, key, in_keys, head, H,
    J: tl.constexpr, DI: tl.constexpr, HAS_W: tl.constexpr, DT: tl.constexpr, BQ: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """The scores `[BQ, BT]` of the tokens `key [BT]`, added up over the heads of a list."""
    width = tl.arange(0, DT)
    k_mask = in_keys[:, None] & (width < DI)
    k_tile = tl.load(K + key.to(tl.int64)[:, None] * DI + width, mask=k_mask, other=0.0)  # [BT, DT]
    place = row * (H * J) + head * J  # [BQ], of the first head
    q_mask = in_rows[:, None] & (width < DI)
    total = tl.zeros([BQ, BT], tl.float32)
    for j in range(J):
        q_tile = tl.load(Q + (place + j)[:, None] * DI + width, mask=q_mask, other=0.0)  # [BQ, DT]
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BQ, BT]
        if HAS_W:
            weight = tl.load(W + place + j, mask=in_rows, other=0.0)
            acc_s = tl.where(acc_s < 0.0, 0.0, acc_s) * weight[:, None]  # NaN stays
        total += acc_s
    return tl.where(total > -LARGEST, total, -LARGEST)


@triton.jit(do_not_specialize=["first_row", "NC", "num_tiles"])
def index_kernel(
    Q, K, W, FirstKey, NumVisible, TileStart, Scores, first_row, H, NC, num_tiles,
    J: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, HAS_W: tl.constexpr, PART: tl.constexpr,
    DT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H * J, DI]`, `K [keys, DI]`, with `HAS_W` `W [R, H * J]` fp32, and `TileStart
    [num_tiles + 1]`, in rows from `first_row` on; writes `Scores [rows, H, NC]`.

    The grid is `(parts * num_tiles * H,)`: a program scores `PART` tokens for a tile of queries,
    whose rows belong to one sequence. Blocks of which a query sees nothing are not written.
    """
    # -- locate the program --
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H % num_tiles
    begin = tl.program_id(0) // H // num_tiles * PART
    start, end = tl.load(TileStart + tile), tl.load(TileStart + tile + 1)
    local_row = start + tl.arange(0, BQ)  # [BQ], in the workspace
    in_rows = local_row < end
    row = (first_row + local_row).to(tl.int64)
    num_visible = tl.load(NumVisible + row, mask=in_rows, other=0)
    is_tile = end > start
    first = tl.load(FirstKey + first_row + start, mask=is_tile, other=0)
    seen = tl.load(NumVisible + first_row + end - 1, mask=is_tile, other=0)  # they ascend
    stop = tl.minimum(begin + PART, seen)
    tokens = tl.arange(0, BT)
    out = Scores + (local_row.to(tl.int64) * H + head) * NC  # [BQ]

    if BT % BS == 0:  # whole blocks in a step
        for step in range(begin, stop, BT):
            token = step + tokens
            score = scores_of_a_step(
                Q, K, W, row, in_rows, first + token, token < stop, head, H,
                J, DI, HAS_W, DT, BQ, BT,
            )  # fmt: skip

            # -- mask --
            score = tl.where(token < num_visible[:, None], score, -LARGEST)

            # -- the best of each block --
            best = tl.max(tl.reshape(score, [BQ, BT // BS, BS]), axis=2)  # [BQ, BT // BS]
            block = step // BS + tl.arange(0, BT // BS)
            is_seen = block * BS < num_visible[:, None]
            tl.store(out[:, None] + block, code_of(best), mask=is_seen)
    else:  # whole steps in a block, the last one shorter
        for block_start in range(begin, stop, BS):
            best = tl.full([BQ], -LARGEST, tl.float32)
            for step in range(0, BS, BT):
                token = block_start + step + tokens
                in_block = (step + tokens < BS) & (token < stop)
                score = scores_of_a_step(
                    Q, K, W, row, in_rows, first + token, in_block, head, H,
                    J, DI, HAS_W, DT, BQ, BT,
                )  # fmt: skip
                is_seen = in_block & (token < num_visible[:, None])
                best = tl.maximum(best, tl.max(tl.where(is_seen, score, -LARGEST), axis=1))
            tl.store(out + block_start // BS, code_of(best), mask=block_start < num_visible)
