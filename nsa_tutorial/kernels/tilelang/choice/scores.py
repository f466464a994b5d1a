"""Chapter 14: the scores that choose blocks, in TileLang, with the phases and the names of
`triton.choice.scores`, where they are explained.

`build_score` returns a kernel that is not yet compiled; `launch` compiles and runs it.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.launch_options import tile_sides
from nsa_tutorial.kernels.tilelang.products import multiply

accum_dtype = "float32"


def build_score(
    H: int, G: int, D: int, C: int, SHARES: int, PIECES: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [rows, HQ, D]`, summaries `K [keys, H, D]`, `LSE [rows, HQ]`, and
    writes `Scores [SHARES, some, H, NC]` of `num_rows` rows from `first_row` on, in fp32.

    The grid is `(H, num_steps, tiles of BQ queries)`: a program makes one step of one tile's walk,
    so that its keys are loaded once, and the queries of one head after the other come by. What a
    cell is, its `C` summaries, `SHARES` and `PIECES`, is explained at
    `triton.choice.scores.score_kernel`. Other arguments as in `build_attend`, and as
    `launch_options.score_options` has them.
    """
    rows, keys, HQ = T.dynamic("rows"), T.dynamic("keys"), H * G
    some, NC = T.dynamic("some"), T.dynamic("NC")
    _, DT, _ = tile_sides(BQ, D, D)

    @T.prim_func
    def score_kernel(
        Q: T.Tensor([rows, HQ, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        LSE: T.Tensor([rows, HQ], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        Scores: T.Tensor([SHARES, some, H, NC], accum_dtype),
        scale_log2: T.float32,
        first_row: T.int32,
        num_rows: T.int32,
        num_steps: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(H, num_steps, T.ceildiv(num_rows, BQ), threads=threads) as (
            head, step, program,
        ):  # fmt: skip
            q_tile = T.alloc_shared([BQ, DT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            lse = T.alloc_shared([G, BQ], accum_dtype)
            acc_s = T.alloc_fragment([BQ, BT], accum_dtype)
            mass = T.alloc_fragment([BQ, BT], accum_dtype)
            mass_shared = T.alloc_shared([BQ, BT], accum_dtype)
            local_row = (T.ceildiv(num_rows, BQ) - 1 - program) * BQ  # in the workspace
            num_here = T.min(BQ, num_rows - local_row)
            query = first_row + local_row
            last_query = query + num_here - 1
            # first and end ascend from row to row
            key = FirstKey[query] + step * BT
            stop = FirstKey[last_query] + NumVisible[last_query]

            if key < stop:
                # -- load the keys, and the sums --
                T.copy(K[key : key + BT, head, 0:DT], k_tile)  # [BT, DT]
                for g, i in T.Parallel(G, BQ):
                    lse[g, i] = LSE[query + i, head * G + g] * LOG2_E

                # -- weights, summed over the group --
                T.clear(mass)
                for g in T.Pipelined(G, num_stages=num_stages):
                    T.copy(Q[query : query + BQ, head * G + g, 0:DT], q_tile)  # [BQ, DT]
                    T.clear(acc_s)
                    multiply(q_tile, k_tile, acc_s, BQ, BT, DT, True)
                    for i, j in T.Parallel(BQ, BT):
                        mass[i, j] += T.exp2(acc_s[i, j] * scale_log2 - lse[g, i])

                # -- mask --
                for i, j in T.Parallel(BQ, BT):
                    cell = key + j - FirstKey[query + i]  # from the sequence's first summary on
                    is_seen = T.And(cell >= 0, cell < NumVisible[query + i])
                    mass_shared[i, j] = T.if_then_else(is_seen, mass[i, j], 0)

                # -- store, a cell at a time --
                if C == 1:
                    for i, j in T.Parallel(BQ, BT):
                        cell = key + j - FirstKey[query + i]
                        is_seen = T.And(cell >= 0, cell < NumVisible[query + i])
                        if T.And(i < num_here, is_seen):
                            Scores[0, local_row + i, head, cell] = mass_shared[i, j]
                else:
                    for share in T.unroll(SHARES):
                        for i, j in T.Parallel(BQ, BT // C):
                            part = T.alloc_var(accum_dtype, init=0.0)
                            for place in T.unroll(C):
                                # the pieces that a summary has in common with the share's block
                                common = T.min(place + PIECES, share * C + C)
                                common = common - T.max(place, share * C)
                                part += mass_shared[i, j * C + place] * T.max(common, 0)
                            cell = step * (BT // C) + j
                            if T.And(i < num_here, cell < NC):
                                Scores[share, local_row + i, head, cell] = part

    return score_kernel
