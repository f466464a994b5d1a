"""Chapter 14: attention to summaries, and the choice of blocks, in TileLang.

Three kernels, with the phases and the names of `triton_selection`, where they are explained.
`build_attend` makes attention of a tile of queries to the summaries they see, `build_score` the
scores of the cells, and `build_pick` the choice.

A function here takes what is fixed when the kernel is compiled, and returns the kernel, not yet
compiled; lengths stay open. `tilelang_selection_launch` compiles and runs them, and is what the
operators call. No argument is checked here: `ops` does.

Symbols: those of `tilelang_forward`; `BQ` queries of a tile, `BT` summaries of a step · `C`
summaries of a cell · `NC` cells of a row.
"""

import math

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang_backward import stages
from nsa_tutorial.kernels.tilelang_basics import exact_gemm
from nsa_tutorial.kernels.tilelang_tiles import summary_sides, tile_sides

accum_dtype = "float32"
nan = T.float32(math.nan)
INFINITY = 0x7F800000  # its bits, in fp32


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


@T.macro
def multiply(A, B, C, rows, columns, depth, transpose_B):
    """`C += A @ B`, or, with `transpose_B`, `A @ B.T`, as the dtype of `A` asks for; a warp has 16
    rows, and all columns."""
    if A.dtype == "float32":
        exact_gemm(A, B, C, rows, columns, depth, transpose_B)
    else:
        T.gemm(A, B, C, transpose_B=transpose_B, policy=T.GemmWarpPolicy.FullRow)


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
        H, G, D, DV, dtype: as in `tilelang_forward.build_kernel`.
        BQ, BT, threads, num_stages: as `tilelang_tiles.attend_options` has them.
        has_tma: whether tiles come by TMA, as `tilelang_tiles.has_tma` says.
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


def build_score(
    H: int, G: int, D: int, C: int, SHARES: int, PIECES: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [rows, HQ, D]`, summaries `K [keys, H, D]`, `LSE [rows, HQ]`, and
    writes `Scores [SHARES, some, H, NC]` of `num_rows` rows from `first_row` on, in fp32.

    The grid is `(H, num_steps, tiles of BQ queries)`: a program makes one step of one tile's walk,
    so that its keys are loaded once, and the queries of one head after the other come by. What a
    cell is, its `C` summaries, `SHARES` and `PIECES`, is explained at
    `triton_selection.score_kernel`. Other arguments as in `build_attend`, and as
    `tilelang_tiles.score_options` has them.
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


def build_pick(
    H: int, BS: int, C: int, SHARES: int, K: int, NB: int, *, has_counts: bool, threads: int
) -> tirx.PrimFunc:
    """The kernel that reads `Scores [SHARES, some, H, NC]`, `NumVisible [rows]`, `Position [rows]`
    and, with `has_counts`, `BlockCounts [rows, H]`, and writes `BlockIndices [rows, H, n]`.

    The grid is `(num_rows, H)`: a program makes a list. `NB` is a power of two that holds all
    blocks of a sequence, and `K` summaries at most share tokens with a block.
    """
    rows, n = T.dynamic("rows"), T.dynamic("n")
    some, NC, num_counts = T.dynamic("some"), T.dynamic("NC"), T.dynamic("num_counts")

    @T.prim_func
    def pick_kernel(
        Scores: T.Tensor([SHARES, some, H, NC], accum_dtype),
        NumVisible: T.Tensor([rows], "int32"),
        Position: T.Tensor([rows], "int32"),
        BlockCounts: T.Tensor([rows if has_counts else num_counts, H], "int32"),
        BlockIndices: T.Tensor([rows, H, n], "int32"),
        first_row: T.int32,
        num_rows: T.int32,
        num_initial: T.int32,
        num_local: T.int32,
        length: T.int32,
        stride: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(num_rows, H, threads=threads) as (local_row, head):
            score = T.alloc_fragment([NB], accum_dtype)
            bits = T.alloc_fragment([NB], "int32")
            flag = T.alloc_fragment([NB], "int32")
            found = T.alloc_fragment([1], "int32")
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=INFINITY + 1)
            last = T.alloc_var("int32", init=-1)
            num_equal = T.alloc_var("int32", init=0)
            row = first_row + local_row
            num_visible = NumVisible[row]
            own = Position[row] // BS
            num_taken = T.min(n, BlockCounts[row, head]) if has_counts else n

            # -- from cells to blocks --
            T.clear(score)
            if C == 1:  # a summary counts by the tokens that it shares with the block
                for i in T.serial(K):
                    for block in T.Parallel(NB):
                        # of what is positive
                        first = (block * BS - length + length * stride) // stride + 1 - length
                        begin = (first + i) * stride
                        common = T.min(begin + length, block * BS + BS) - T.max(begin, block * BS)
                        exists = T.And(first + i >= 0, first + i < num_visible)
                        if T.And(exists, common > 0):
                            share = T.cast(common, accum_dtype) / T.cast(stride, accum_dtype)
                            score[block] += Scores[0, local_row, head, first + i] * share
            else:
                for share in T.unroll(SHARES):
                    for block in T.Parallel(NB):
                        cell = block - share
                        if T.And(cell >= 0, cell < T.ceildiv(num_visible, C)):
                            score[block] += Scores[share, local_row, head, cell]

            # -- force and hide --
            for block in T.Parallel(NB):
                is_forced = T.Or(block < num_initial, block > own - num_local)
                # NaN is worth nothing; numbers of at least 0 are in the order of their bits
                number = T.if_then_else(score[block] >= 0, score[block], 0)
                of_score = T.reinterpret(number, "int32")
                bits[block] = T.if_then_else(is_forced, INFINITY, of_score)
                bits[block] = T.if_then_else(block <= own, bits[block], -1)

            # -- halve the range, down to the bits of the last block that is taken --
            while high - low > 1:
                middle = low + (high - low) // 2
                for block in T.Parallel(NB):
                    flag[block] = T.if_then_else(bits[block] >= middle, 1, 0)
                T.reduce_sum(flag, found, dim=0)
                if found[0] >= num_taken:
                    low = middle
                if found[0] <= num_taken:
                    high = T.if_then_else(found[0] == num_taken, low + 1, middle)

            # -- take what is above, and of what is equal the lower ids --
            for block in T.Parallel(NB):
                flag[block] = T.if_then_else(bits[block] > low, 1, 0)
            T.reduce_sum(flag, found, dim=0)
            num_equal = num_taken - found[0]

            # -- store --
            # the next one, as twice its id, and one more where it is equal: the order of the ids
            for slot in T.serial(n):
                for block in T.Parallel(NB):
                    is_equal = T.And(bits[block] == low, num_equal > 0)
                    is_next = T.And(block > last, T.Or(bits[block] > low, is_equal))
                    code = block * 2 + T.if_then_else(bits[block] == low, 1, 0)
                    flag[block] = T.if_then_else(is_next, code, 2 * NB)
                T.reduce_min(flag, found, dim=0)
                is_found = T.And(slot < num_taken, found[0] < 2 * NB)
                last = T.if_then_else(is_found, found[0] // 2, NB)
                num_equal = num_equal - found[0] % 2
                BlockIndices[row, head, slot] = T.if_then_else(is_found, found[0] // 2, -1)

    return pick_kernel
