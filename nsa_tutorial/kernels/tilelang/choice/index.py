"""An indexer's scores in TileLang, with the phases and the names of `triton.choice.index`, where
they are explained.

`build_index` returns a kernel that is not yet compiled; `index_launch` compiles and runs it.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.kernels.tilelang.launch_options import tile_sides
from nsa_tutorial.kernels.tilelang.products import multiply
from nsa_tutorial.sparse.indexer import LARGEST

accum_dtype = "float32"


@T.macro
def code_of(score):
    """A positive number whose bits are in the order of the scores, within ±LARGEST, without the
    last one; ±0 are the same."""
    bits = T.if_then_else(score == 0, 0, T.reinterpret(score, "int32"))
    code = T.if_then_else(bits < 0, (-1 - bits) >> 1, (bits >> 1) + 0x40000000)
    return T.reinterpret(code, accum_dtype)


def build_index(
    H: int, J: int, DI: int, BS: int, dtype: str, *, has_w: bool, BQ: int, BT: int, threads: int,
    num_stages: int,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [rows, H * J, DI]`, `K [keys, DI]`, with `has_w` `W [rows, H * J]`,
    and `TileStart [num_tiles + 1]`, in rows from `first_row` on; and writes `Scores [some, H, NC]`.

    The grid is `(num_tiles * spans, H)`: a program scores a step of `BT` tokens, if it holds whole
    blocks, otherwise a block, for a tile of queries, whose rows belong to one sequence. Blocks of
    which a query sees nothing are not written.
    """
    rows, keys, num_weights = T.dynamic("rows"), T.dynamic("keys"), T.dynamic("num_weights")
    some, NC, starts, HI = T.dynamic("some"), T.dynamic("NC"), T.dynamic("starts"), H * J
    _, DT, _ = tile_sides(BQ, DI, DI)
    span = span_of(BS, BT)
    has_blocks = span == BT  # whole ones in a step
    steps = -(-span // BT)

    @T.macro
    def add_up(Q, q_tile, k_tile, weight, acc_s, total, query, head):
        """Products, added up over the heads of a list."""
        T.clear(total)
        for j in T.Pipelined(J, num_stages=num_stages):
            T.copy(Q[query : query + BQ, head * J + j, 0:DT], q_tile)  # [BQ, DT]
            T.clear(acc_s)
            multiply(q_tile, k_tile, acc_s, BQ, BT, DT, True)
            for i, t in T.Parallel(BQ, BT):
                if has_w:
                    positive = T.if_then_else(acc_s[i, t] < 0, 0, acc_s[i, t])  # NaN stays
                    total[i, t] += positive * weight[j, i]
                else:
                    total[i, t] += acc_s[i, t]

    @T.prim_func
    def index_kernel(
        Q: T.Tensor([rows, HI, DI], dtype),
        K: T.Tensor([keys, DI], dtype),
        W: T.Tensor([rows if has_w else num_weights, HI], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        TileStart: T.Tensor([starts], "int32"),
        Scores: T.Tensor([some, H, NC], accum_dtype),
        first_row: T.int32,
        num_tiles: T.int32,
        num_spans: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(num_tiles * num_spans, H, threads=threads) as (program, head):
            q_tile = T.alloc_shared([BQ, DT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            weight = T.alloc_shared([J, BQ], accum_dtype)
            acc_s = T.alloc_fragment([BQ, BT], accum_dtype)
            total = T.alloc_fragment([BQ, BT], accum_dtype)
            if has_blocks:
                score = T.alloc_shared([BQ, BT], accum_dtype)
            else:
                best = T.alloc_fragment([BQ], accum_dtype)
            # variables, so that each is read once
            start = T.alloc_var("int32")
            num_here = T.alloc_var("int32")
            first = T.alloc_var("int32")
            seen = T.alloc_var("int32", init=0)
            start = TileStart[program % num_tiles]
            num_here = TileStart[program % num_tiles + 1] - start
            query = first_row + start
            begin = program // num_tiles * span
            if num_here > 0:
                first = FirstKey[query]
                seen = NumVisible[query + num_here - 1]  # they ascend

            if begin < seen:
                if has_w:
                    for j, i in T.Parallel(J, BQ):
                        weight[j, i] = W[query + i, head * J + j]
                if not has_blocks:
                    T.fill(best, -LARGEST)
                for step in T.serial(steps):
                    token = begin + step * BT
                    T.copy(K[first + token : first + token + BT, 0:DT], k_tile)  # [BT, DT]
                    add_up(Q, q_tile, k_tile, weight, acc_s, total, query, head)

                    # -- mask --
                    for i, t in T.Parallel(BQ, BT):
                        is_seen = T.And(token + t < NumVisible[query + i], step * BT + t < span)
                        counts = T.And(is_seen, total[i, t] > -LARGEST)  # no NaN
                        most = T.min(total[i, t], LARGEST)
                        total[i, t] = T.if_then_else(counts, most, -LARGEST)
                    if not has_blocks:
                        T.reduce_max(total, best, dim=1, clear=False)

                # -- the best of each block --
                if has_blocks:
                    T.copy(total, score)
                    for i, b in T.Parallel(BQ, BT // BS):
                        most = T.alloc_var(accum_dtype, init=-LARGEST)
                        for place in T.serial(BS):
                            of_token = score[i, b * BS + place]
                            most = T.if_then_else(of_token > most, of_token, most)
                        block = begin // BS + b
                        if T.And(i < num_here, block * BS < NumVisible[query + i]):
                            Scores[start + i, head, block] = code_of(most)
                else:
                    for i in T.Parallel(BQ):
                        if T.And(i < num_here, begin < NumVisible[query + i]):
                            Scores[start + i, head, begin // BS] = code_of(best[i])

    return index_kernel


def span_of(BS: int, BT: int) -> int:
    """Tokens that a program scores: a step of `BT`, if it holds whole blocks, otherwise a block."""
    return BT if BT % BS == 0 else BS
