"""Chapter 14: the backward of attention to summaries, in TileLang.

Three kernels, with the phases and the names of `triton.compressed.backward`, where they are
explained. `build_dq` has the forward's tiles of queries, `build_dkv` a tile of summaries and a
chunk of the rows that see it, and `build_sum` adds the chunks. `selected.backward` lends the kernel
for a row's numbers.

A function here takes what is fixed when the kernel is compiled, and returns the kernel, not yet
compiled. `compressed.launch` compiles and runs them.

Symbols: those of `compressed.forward` and `selected.backward`.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.compressed.forward import is_finite, stages_of
from nsa_tutorial.kernels.tilelang.launch_options import summary_sides
from nsa_tutorial.kernels.tilelang.products import multiply
from nsa_tutorial.kernels.tilelang.selected.backward import store_gradient

accum_dtype = "float32"
SUM_KEYS = 16  # summaries whose shares a program adds


def build_dq(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads what the forward does, `GradO [rows, HQ, DV]`, and three numbers a row,
    `[rows, HQ]`, and writes `GradQ [rows, HQ, D]`.

    The grid and the arguments are those of `compressed.forward.build_attend`; the options are
    `launch_options.summary_dq_options`'.
    """
    rows, keys, HQ = T.dynamic("rows"), T.dynamic("keys"), H * G
    DT, DVT = summary_sides(D, DV, 4 if dtype == "float32" else 2, wide=0)
    in_registers = dtype != "float32" and threads <= 2 * BQ
    alloc_gradient = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def dq_kernel(
        Q: T.Tensor([rows, HQ, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, HQ, DV], dtype),
        LSE: T.Tensor([rows, HQ], accum_dtype),
        Delta: T.Tensor([rows, HQ], accum_dtype),
        LSE2: T.Tensor([rows, HQ], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        GradQ: T.Tensor([rows, HQ, D], dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(HQ, T.ceildiv(rows, BQ), threads=threads) as (query_head, program):
            q_tile = T.alloc_shared([BQ, DT], dtype)
            do_tile = T.alloc_shared([BQ, DVT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            k_clean = T.alloc_shared([BT, DT], dtype)
            v_tile = T.alloc_shared([BT, DVT], dtype)
            acc_s = T.alloc_fragment([BQ, BT], accum_dtype)
            d_p = T.alloc_fragment([BQ, BT], accum_dtype)
            d_s = alloc_gradient([BQ, BT], dtype)
            acc_dq = T.alloc_fragment([BQ, DT], accum_dtype)
            lse = T.alloc_fragment([BQ], accum_dtype)
            delta = T.alloc_fragment([BQ], accum_dtype)
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
            T.copy(GradO[query : query + BQ, query_head, 0:DVT], do_tile)
            for i in T.Parallel(BQ):
                lse[i] = LSE[query + i, query_head] * LOG2_E  # in base two
                delta[i] = Delta[query + i, query_head]
                first[i] = FirstKey[query + i]
                end[i] = FirstKey[query + i] + NumVisible[query + i]

            # -- initialise --
            T.clear(acc_dq)

            # -- walk --
            # one step even where nothing is seen: the queries' tile must arrive before the end
            num_steps = T.max(T.ceildiv(stop - start, BT), 1)
            for step in T.Pipelined(num_steps, **stages_of(num_stages, 2, 8, has_tma)):
                key = start + step * BT

                # -- load the keys and the values --
                T.copy(K[key : key + BT, head, 0:DT], k_tile)  # [BT, DT]
                T.copy(V[key : key + BT, head, 0:DVT], v_tile)  # [BT, DVT]

                # -- weights --
                T.clear(acc_s)
                multiply(q_tile, k_tile, acc_s, BQ, BT, DT, True)
                T.clear(d_p)
                multiply(do_tile, v_tile, d_p, BQ, BT, DVT, True)

                # -- gradient of the scores --
                for i, j in T.Parallel(BQ, BT):
                    p = T.exp2(acc_s[i, j] * scale_log2 - lse[i])
                    d_p[i, j] = p * (d_p[i, j] - delta[i])
                if step >= num_whole:
                    for i, j in T.Parallel(BQ, BT):
                        is_seen = T.And(key + j >= first[i], key + j < end[i])
                        d_p[i, j] = T.if_then_else(is_seen, d_p[i, j], 0)

                # -- accumulate --
                T.copy(d_p, d_s)
                if step < num_whole:
                    multiply(d_s, k_tile, acc_dq, BQ, DT, BT, False)
                    if not has_tma:  # TileLang puts this barrier into the other branch alone
                        T.sync_threads()
                else:  # a gradient of 0 hides a number, but not NaN
                    for i, j in T.Parallel(BT, DT):
                        k_clean[i, j] = T.if_then_else(is_finite(k_tile[i, j]), k_tile[i, j], 0)
                    multiply(d_s, k_clean, acc_dq, BQ, DT, BT, False)

            # -- store --
            for i, j in T.Parallel(BQ, DT):
                needs_grad = LSE2[query + i, query_head] != T.infinity(accum_dtype)
                acc_dq[i, j] = T.if_then_else(needs_grad, acc_dq[i, j] * scale, 0)
            T.copy(acc_dq, GradQ[query : query + BQ, query_head, 0:DT])

    return dq_kernel


def build_dkv(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BT: int, BR: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads the same, and the run of rows that see each tile of `BT` summaries,
    `FirstRow` and `LastRow [num_tiles]`. It writes the gradients of a tile's keys and values, or,
    where there is more than one chunk of `chunk_rows` rows, each chunk's share of them, in fp32.

    The grid is `(H, num_tiles, num_chunks)`. A step has `BR` queries of one head, so that they come
    as a tile, and the next step the same queries of the next head. Numbers of rows lie heads first,
    four rows in 16 bytes. Options are `launch_options.summary_dkv_options`'.
    """
    rows, keys, HQ, fours = T.dynamic("rows"), T.dynamic("keys"), H * G, T.dynamic("fours")
    num_tiles, places, ends = T.dynamic("num_tiles"), T.dynamic("places"), T.dynamic("ends")
    DT, DVT = summary_sides(D, DV, 4 if dtype == "float32" else 2)
    inf = T.infinity(accum_dtype)
    in_registers = dtype != "float32" and threads <= 2 * BT
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared
    num_others = 9 if in_registers else 10  # statements of a step after its loads

    @T.prim_func
    def dkv_kernel(
        Q: T.Tensor([rows, HQ, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, HQ, DV], dtype),
        Delta: T.Tensor([HQ, fours, 4], accum_dtype),
        LSE2: T.Tensor([HQ, fours, 4], accum_dtype),
        NumUnread: T.Tensor([H, ends], "int32"),
        RowStart: T.Tensor([rows], "int32"),
        RowEnd: T.Tensor([rows], "int32"),
        FirstRow: T.Tensor([num_tiles], "int32"),
        LastRow: T.Tensor([num_tiles], "int32"),
        GradK: T.Tensor([keys, H, D], dtype),
        GradV: T.Tensor([keys, H, DV], dtype),
        SharesK: T.Tensor([places, BT, DT], accum_dtype),
        SharesV: T.Tensor([places, BT, DVT], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
        num_chunks: T.int32,
        chunk_rows: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(H, num_tiles, num_chunks, threads=threads) as (head, tile, chunk):
            k_tile = T.alloc_shared([BT, DT], dtype)
            v_tile = T.alloc_shared([BT, DVT], dtype)
            q_tile = T.alloc_shared([BR, DT], dtype)
            q_clean = T.alloc_shared([BR, DT], dtype)
            do_tile = T.alloc_shared([BR, DVT], dtype)
            do_clean = T.alloc_shared([BR, DVT], dtype)
            lse = T.alloc_shared([BR // 4, 4], accum_dtype)
            delta = T.alloc_shared([BR // 4, 4], accum_dtype)
            acc_s = T.alloc_fragment([BT, BR], accum_dtype)
            d_p = T.alloc_fragment([BT, BR], accum_dtype)
            p = alloc_weights([BT, BR], dtype)
            d_s = alloc_weights([BT, BR], dtype)
            acc_dk = T.alloc_fragment([BT, DT], accum_dtype)
            acc_dv = T.alloc_fragment([BT, DVT], accum_dtype)
            first_row = T.max(FirstRow[tile], chunk * chunk_rows)
            last_row = T.min(LastRow[tile], chunk * chunk_rows + chunk_rows)
            start = first_row // 4 * 4  # 16 bytes at a time
            first_key = tile * BT
            tile_end = T.min(first_key + BT, keys)

            # -- load the keys and the values --
            T.copy(K[first_key : first_key + BT, head, 0:DT], k_tile)  # zeros past the last key
            T.copy(V[first_key : first_key + BT, head, 0:DVT], v_tile)

            # -- initialise --
            T.clear(acc_dk)
            T.clear(acc_dv)

            # -- walk --
            # one step even without a row: the summaries' tiles must arrive before the end
            num_steps = T.max(T.ceildiv(last_row - start, BR) * G, 1)
            for step in T.Pipelined(num_steps, **stages_of(num_stages, 4, num_others, has_tma)):
                row = start + step // G * BR
                query_head = head * G + step % G

                # -- load the queries --
                T.copy(Q[row : row + BR, query_head, 0:DT], q_tile)  # [BR, DT]
                T.copy(GradO[row : row + BR, query_head, 0:DVT], do_tile)  # [BR, DVT]
                T.copy(LSE2[query_head, row // 4 : row // 4 + BR // 4, 0:4], lse)
                T.copy(Delta[query_head, row // 4 : row // 4 + BR // 4, 0:4], delta)

                # -- weights --
                T.clear(acc_s)
                multiply(k_tile, q_tile, acc_s, BT, BR, DT, True)
                T.clear(d_p)
                multiply(v_tile, do_tile, d_p, BT, BR, DVT, True)

                # -- gradient of the scores --
                for i, j in T.Parallel(BT, BR):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * scale_log2 - lse[j // 4, j % 4])
                    d_p[i, j] = acc_s[i, j] * (d_p[i, j] - delta[j // 4, j % 4])
                # where the first row of a step sees the tile's end and the last one its start,
                # and all are to be read, nothing is masked
                is_inside = T.And(row >= first_row, row + BR <= last_row)
                is_whole = T.And(is_inside, RowEnd[row] >= tile_end)
                is_apart = RowStart[T.min(row + BR, rows) - 1] <= first_key
                is_read = NumUnread[head, T.min(row + BR, rows)] == NumUnread[head, row]
                is_masked = T.Not(T.And(is_whole, T.And(is_apart, is_read)))
                if is_masked:
                    for i, j in T.Parallel(BT, BR):
                        is_here = T.And(row + j >= first_row, row + j < last_row)
                        needs_grad = T.And(is_here, lse[j // 4, j % 4] != inf)
                        after = T.And(needs_grad, first_key + i >= RowStart[row + j])
                        is_seen = T.And(after, first_key + i < RowEnd[row + j])
                        acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], 0)
                        d_p[i, j] = T.if_then_else(is_seen, d_p[i, j], 0)

                # -- gradients of the values and of the keys --
                T.copy(acc_s, p)
                T.copy(d_p, d_s)
                if not in_registers:  # TileLang puts a barrier into the first branch alone
                    T.sync_threads()
                if is_masked:  # a weight of 0 hides a number, but not NaN
                    for i, j in T.Parallel(BR, DT):
                        q_clean[i, j] = T.if_then_else(is_finite(q_tile[i, j]), q_tile[i, j], 0)
                    for i, j in T.Parallel(BR, DVT):
                        value = do_tile[i, j]
                        do_clean[i, j] = T.if_then_else(is_finite(value), value, 0)
                    multiply(p, do_clean, acc_dv, BT, DVT, BR, False)
                    multiply(d_s, q_clean, acc_dk, BT, DT, BR, False)
                else:
                    multiply(p, do_tile, acc_dv, BT, DVT, BR, False)
                    multiply(d_s, q_tile, acc_dk, BT, DT, BR, False)

            # -- store --
            for i, j in T.Parallel(BT, DT):
                acc_dk[i, j] *= scale
            if num_chunks == 1:
                # the last row sees most
                seen_end = T.if_then_else(first_row < last_row, RowEnd[last_row - 1], 0)
                seen_end = T.min(seen_end, tile_end)
                store_gradient(GradK, acc_dk, first_key, head, seen_end, BT, DT, False)
                store_gradient(GradV, acc_dv, first_key, head, seen_end, BT, DVT, False)
            elif first_row < last_row:
                place = (chunk * num_tiles + tile) * H + head
                T.copy(acc_dk, SharesK[place, 0:BT, 0:DT])
                T.copy(acc_dv, SharesV[place, 0:BT, 0:DVT])

    return dkv_kernel


def build_sum(H: int, D: int, DV: int, dtype: str, *, BT: int) -> tirx.PrimFunc:
    """The kernel that adds the shares of every tile, the first chunk's first. The grid is
    `(H, num_tiles, steps of SUM_KEYS summaries in a tile)`."""
    rows, keys = T.dynamic("rows"), T.dynamic("keys")
    num_tiles, places = T.dynamic("num_tiles"), T.dynamic("places")
    DT, DVT = summary_sides(D, DV, 4 if dtype == "float32" else 2)

    @T.prim_func
    def sum_kernel(
        SharesK: T.Tensor([places, BT, DT], accum_dtype),
        SharesV: T.Tensor([places, BT, DVT], accum_dtype),
        FirstRow: T.Tensor([num_tiles], "int32"),
        LastRow: T.Tensor([num_tiles], "int32"),
        RowEnd: T.Tensor([rows], "int32"),
        GradK: T.Tensor([keys, H, D], dtype),
        GradV: T.Tensor([keys, H, DV], dtype),
        chunk_rows: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(H, num_tiles, BT // SUM_KEYS, threads=128) as (head, tile, step):
            acc_dk = T.alloc_fragment([SUM_KEYS, DT], accum_dtype)
            acc_dv = T.alloc_fragment([SUM_KEYS, DVT], accum_dtype)
            first_row = FirstRow[tile]
            last_row = LastRow[tile]
            first_chunk = first_row // chunk_rows
            stop_chunk = T.if_then_else(
                first_row < last_row, T.ceildiv(last_row, chunk_rows), first_chunk
            )
            start = step * SUM_KEYS

            # -- accumulate --
            T.clear(acc_dk)
            T.clear(acc_dv)
            for part in T.serial(stop_chunk - first_chunk):
                place = ((first_chunk + part) * num_tiles + tile) * H + head
                for i, j in T.Parallel(SUM_KEYS, DT):
                    acc_dk[i, j] += SharesK[place, start + i, j]
                for i, j in T.Parallel(SUM_KEYS, DVT):
                    acc_dv[i, j] += SharesV[place, start + i, j]

            # -- store --
            seen_end = T.if_then_else(first_row < last_row, RowEnd[last_row - 1], 0)
            seen_end = T.min(seen_end, keys)
            first_key = tile * BT + start
            store_gradient(GradK, acc_dk, first_key, head, seen_end, SUM_KEYS, DT, False)
            store_gradient(GradV, acc_dv, first_key, head, seen_end, SUM_KEYS, DVT, False)

    return sum_kernel
