"""Chapter 14: attention to summaries, forward, in TileLang, with the phases and the names of
`triton.compressed.forward`, where they are explained.

`build_attend` takes what is fixed when the kernel is compiled, and returns the kernel, not yet
compiled; lengths stay open. `launch` compiles and runs it.

Symbols: those of `selected.forward`; `BQ` queries of a tile, `BT` summaries of a step.
"""

import math

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.kernels.tilelang.launch_options import summary_sides
from nsa_tutorial.kernels.tilelang.products import multiply
from nsa_tutorial.kernels.tilelang.selected.backward import stages

accum_dtype = "float32"
nan = T.float32(math.nan)


def is_finite(x):
    """Neither NaN nor infinite."""
    inf = T.infinity(accum_dtype)
    number = T.cast(x, accum_dtype)
    return T.And(-inf < number, number < inf)


def stages_of(num_stages: int, num_loads: int, num_others: int, has_tma: bool) -> dict[str, object]:
    """What `T.Pipelined` is told: with TMA the number alone, and a warp group loads; otherwise all
    threads load, and the order is written down, since the number of steps is open."""
    if has_tma:
        return {"num_stages": num_stages}
    return stages(min(num_stages, 2), num_loads, num_others)


def build_attend(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [rows, HQ, D]`, summaries `K [keys, H, D]` and `V [keys, H, DV]`,
    `FirstKey [rows]` and `NumVisible [rows]`, and writes `Output [rows, HQ, DV]` and `LSE [rows,
    HQ]`.

    The grid is `(HQ, tiles of BQ queries)`. The heads of a group follow each other, since they read
    the same summaries; the latest queries come first, since they see most.

    Args:
        H, G, D, DV, dtype: as in `selected.forward.build_kernel`.
        BQ, BT, threads, num_stages: as `launch_options.attend_options` has them.
        has_tma: whether tiles come by TMA, as `launch_options.has_tma` says.
    """
    rows, keys, HQ = T.dynamic("rows"), T.dynamic("keys"), H * G
    exact = dtype == "float32"
    DT, DVT = summary_sides(D, DV, 4 if dtype == "float32" else 2, wide=0)
    in_registers = not exact and threads <= 2 * BQ
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def attend_kernel(
        Q: T.Tensor([rows, HQ, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        Output: T.Tensor([rows, HQ, DV], dtype),
        LSE: T.Tensor([rows, HQ], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(HQ, T.ceildiv(rows, BQ), threads=threads) as (query_head, program):
            q_tile = T.alloc_shared([BQ, DT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            v_tile = T.alloc_shared([BT, DVT], dtype)
            v_clean = T.alloc_shared([BT, DVT], dtype)
            acc_s = T.alloc_fragment([BQ, BT], accum_dtype)
            p = alloc_weights([BQ, BT], dtype)
            acc_o = T.alloc_fragment([BQ, DVT], accum_dtype)
            scores_max = T.alloc_fragment([BQ], accum_dtype)
            scores_max_prev = T.alloc_fragment([BQ], accum_dtype)
            scores_scale = T.alloc_fragment([BQ], accum_dtype)
            scores_sum = T.alloc_fragment([BQ], accum_dtype)
            running_sum = T.alloc_fragment([BQ], accum_dtype)
            is_bad = T.alloc_fragment([BT, DVT], "int32")
            of_key = T.alloc_fragment([BT], "int32")
            any_bad = T.alloc_fragment([1], "int32")
            first = T.alloc_fragment([BQ], "int32")
            end = T.alloc_fragment([BQ], "int32")
            head = query_head // G
            query = (T.ceildiv(rows, BQ) - 1 - program) * BQ
            last_query = T.min(query + BQ, rows) - 1
            # first and end ascend from row to row
            start = FirstKey[query]
            first_end = FirstKey[query] + NumVisible[query]
            stop = FirstKey[last_query] + NumVisible[last_query]
            # steps that all of the tile sees as a whole; none, if it has queries of two sequences
            is_apart = FirstKey[last_query] == start
            num_whole = T.if_then_else(is_apart, (first_end - start) // BT, 0)

            # -- load the queries --
            T.copy(Q[query : query + BQ, query_head, 0:DT], q_tile)  # zeros past rows and D
            for i in T.Parallel(BQ):
                first[i] = FirstKey[query + i]
                end[i] = FirstKey[query + i] + NumVisible[query + i]

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            # not -inf, since -inf - -inf would be NaN; and finite when it is scaled
            T.fill(scores_max, T.min_value(accum_dtype) / T.max(scale_log2, 2.0))

            # -- walk --
            # one step even where nothing is seen: the queries' tile must arrive before the end
            num_steps = T.max(T.ceildiv(stop - start, BT), 1)
            for step in T.Pipelined(num_steps, **stages_of(num_stages, 2, 12, has_tma)):
                key = start + step * BT

                # -- load the keys and the values --
                T.copy(K[key : key + BT, head, 0:DT], k_tile)  # [BT, DT]
                T.copy(V[key : key + BT, head, 0:DVT], v_tile)  # [BT, DVT]

                # -- scores --
                T.clear(acc_s)
                multiply(q_tile, k_tile, acc_s, BQ, BT, DT, True)

                # -- mask --
                if step >= num_whole:
                    for i, j in T.Parallel(BQ, BT):
                        is_seen = T.And(key + j >= first[i], key + j < end[i])
                        acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], -T.infinity(accum_dtype))

                # -- online softmax --
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(BQ):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                for i, j in T.Parallel(BQ, BT):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * scale_log2 - scores_max[i] * scale_log2)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(BQ):
                    running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(BQ, DVT):
                    acc_o[i, j] *= scores_scale[i]

                # -- accumulate --
                T.copy(acc_s, p)
                if step < num_whole:
                    multiply(p, v_tile, acc_o, BQ, DVT, BT, False)
                    if not has_tma:  # TileLang puts this barrier into the other branch alone
                        T.sync_threads()
                else:  # a weight of 0 hides a number, but not NaN
                    for i, j in T.Parallel(BT, DVT):
                        is_bad[i, j] = T.if_then_else(is_finite(v_tile[i, j]), 0, 1)
                        v_clean[i, j] = T.if_then_else(is_finite(v_tile[i, j]), v_tile[i, j], 0)
                    multiply(p, v_clean, acc_o, BQ, DVT, BT, False)
                    T.reduce_max(is_bad, of_key, dim=1)
                    T.reduce_max(of_key, any_bad, dim=0)
                    if any_bad[0] > 0:  # those who see it get NaN
                        for token in T.serial(BT):
                            for i, j in T.Parallel(BQ, DVT):
                                if T.And(key + token >= first[i], key + token < end[i]):
                                    # not turned round: of NaN, the compiler would get it wrong
                                    is_good = is_finite(V[key + token, head, j])
                                    acc_o[i, j] = T.if_then_else(is_good, acc_o[i, j], nan)

            # -- normalise and store --
            for i, j in T.Parallel(BQ, DVT):
                acc_o[i, j] = T.if_then_else(end[i] == first[i], 0, acc_o[i, j] / running_sum[i])
            for i in T.Parallel(BQ):
                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                is_empty = end[i] == first[i]
                running_sum[i] = T.if_then_else(is_empty, -T.infinity(accum_dtype), log_sum)
            T.copy(acc_o, Output[query : query + BQ, query_head, 0:DVT])
            T.copy(running_sum, LSE[query : query + BQ, query_head])

    return attend_kernel
