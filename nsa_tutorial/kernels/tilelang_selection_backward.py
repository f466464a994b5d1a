"""Chapter 14: the backward of attention to summaries, in TileLang.

Two kernels, with the phases and the names of `triton_selection_backward`, where they are explained.
`build_dq` has the forward's tiles of queries, `build_dkv` a tile of summaries and a chunk of the
rows that see it. `tilelang_backward` lends the kernels for a row's numbers and for the sums.

A `build_…` takes what is fixed when the kernel is compiled, and returns the kernel, not yet
compiled. `of_summaries` runs all four, and is what the operators call. No argument is checked here:
`ops` does.

Symbols: those of `tilelang_selection` and `tilelang_backward`.
"""

import functools

import tilelang
import torch
import torch.nn.functional as F
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels import backward_tables
from nsa_tutorial.kernels.tilelang_backward import (
    build_delta,
    build_sum,
    end_of_sight,
    store_gradient,
)
from nsa_tutorial.kernels.tilelang_forward import PASS_CONFIGS as WITHOUT_LOADING_WARPS
from nsa_tutorial.kernels.tilelang_selection import is_finite, multiply, stages_of
from nsa_tutorial.kernels.tilelang_selection_launch import PASS_CONFIGS, dtype_of, rows_of
from nsa_tutorial.kernels.tilelang_tiles import (
    has_tma,
    summary_dkv_options,
    summary_dq_options,
    tile_rows,
    tile_sides,
)
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse.selected_attention import QueryRows

accum_dtype = "float32"


def build_dq(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads what the forward does, `GradO [rows, HQ, DV]`, and three numbers a row,
    `[rows, HQ]`, and writes `GradQ [rows, HQ, D]`.

    The grid and the arguments are those of `tilelang_selection.build_attend`; the options are
    `tilelang_tiles.summary_dq_options`'.
    """
    rows, keys, HQ = T.dynamic("rows"), T.dynamic("keys"), H * G
    _, DT, DVT = tile_sides(BQ, D, DV)
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
                else:  # a gradient of 0 hides a number, but not NaN
                    for i, j in T.Parallel(BT, DT):
                        k_clean[i, j] = T.if_then_else(is_finite(k_tile[i, j]), k_tile[i, j], 0)
                    multiply(d_s, k_clean, acc_dq, BQ, DT, BT, False)

            # -- store --
            for i, j in T.Parallel(BQ, DT):
                is_asked = LSE2[query + i, query_head] != T.infinity(accum_dtype)
                acc_dq[i, j] = T.if_then_else(is_asked, acc_dq[i, j] * scale, 0)
            T.copy(acc_dq, GradQ[query : query + BQ, query_head, 0:DT])

    return dq_kernel


def build_dkv(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BT: int, BR: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads the same, and the tables of `backward_tables.Tables`, and writes `GradK
    [keys, H, D]` and `GradV [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32.

    The grid is `(P,)`; a tile is `BT` summaries. A step has `BR` queries of one head, so that they
    come as a tile, and the next step the same queries of the next head. `NumUnread [E + 1]` counts
    the entries before each that are not to be read. Options are
    `tilelang_tiles.summary_dkv_options`'.
    """
    rows, keys, HQ, fours = T.dynamic("rows"), T.dynamic("keys"), H * G, T.dynamic("fours")
    E, P, places, some = T.dynamic("E"), T.dynamic("P"), T.dynamic("places"), T.dynamic("some")
    DT, DVT = tile_rows(D), tile_rows(DV)
    inf = T.infinity(accum_dtype)
    in_registers = dtype != "float32" and threads <= 2 * BT
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def dkv_kernel(
        Q: T.Tensor([rows, HQ, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, HQ, DV], dtype),
        Delta: T.Tensor([HQ, fours, 4], accum_dtype),
        LSE2: T.Tensor([HQ, fours, 4], accum_dtype),
        Rows: T.Tensor([E], "int32"),
        NumUnread: T.Tensor([some], "int32"),
        RowStart: T.Tensor([rows], "int32"),
        RowEnd: T.Tensor([rows], "int32"),
        FirstKey: T.Tensor([P], "int32"),
        Head: T.Tensor([P], "int32"),
        First: T.Tensor([P], "int32"),
        Last: T.Tensor([P], "int32"),
        NumParts: T.Tensor([P], "int32"),
        Place: T.Tensor([P], "int32"),
        GradK: T.Tensor([keys, H, D], dtype),
        GradV: T.Tensor([keys, H, DV], dtype),
        SharesK: T.Tensor([places, BT, DT], accum_dtype),
        SharesV: T.Tensor([places, BT, DVT], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(P, threads=threads) as chunk:
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
            first = First[chunk]
            last = Last[chunk]
            head = Head[chunk]
            first_key = FirstKey[chunk]
            tile_end = T.min(first_key + BT, keys)
            # entries of a head are its rows, which ascend
            first_row = first - head * rows
            start = first_row // 4 * 4  # 16 bytes at a time
            last_row = last - head * rows

            # -- load the keys and the values --
            T.copy(K[first_key : first_key + BT, head, 0:DT], k_tile)  # zeros past the last key
            T.copy(V[first_key : first_key + BT, head, 0:DVT], v_tile)

            # -- initialise --
            T.clear(acc_dk)
            T.clear(acc_dv)

            # -- walk --
            # one step even without a row: the summaries' tiles must arrive before the end
            num_steps = T.max(T.ceildiv(last_row - start, BR) * G, 1)
            for step in T.Pipelined(num_steps, **stages_of(num_stages, 4, 9, has_tma)):
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
                unread = NumUnread[T.min(row + BR, rows) + head * rows]
                is_read = unread == NumUnread[row + head * rows]
                is_masked = T.Not(T.And(is_whole, T.And(is_apart, is_read)))
                if is_masked:
                    for i, j in T.Parallel(BT, BR):
                        is_here = T.And(row + j >= first_row, row + j < last_row)
                        is_asked = T.And(is_here, lse[j // 4, j % 4] != inf)
                        after = T.And(is_asked, first_key + i >= RowStart[row + j])
                        is_seen = T.And(after, first_key + i < RowEnd[row + j])
                        acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], 0)
                        d_p[i, j] = T.if_then_else(is_seen, d_p[i, j], 0)

                # -- gradients of the values and of the keys --
                T.copy(acc_s, p)
                T.copy(d_p, d_s)
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
            if NumParts[chunk] == 1:
                seen_end = T.min(end_of_sight(Rows, RowEnd, last), tile_end)
                seen_end = T.if_then_else(first < last, seen_end, 0)
                store_gradient(GradK, acc_dk, first_key, head, seen_end, BT, DT, False)
                store_gradient(GradV, acc_dv, first_key, head, seen_end, BT, DVT, False)
            elif first < last:
                T.copy(acc_dk, SharesK[Place[chunk], 0:BT, 0:DT])
                T.copy(acc_dv, SharesV[Place[chunk], 0:BT, 0:DVT])

    return dkv_kernel


KERNELS = {"delta": build_delta, "dq": build_dq, "dkv": build_dkv, "sum": build_sum}


@functools.cache
def compiled(name: str, device: str, *shape: int, **options: object) -> tilelang.JITKernel:
    """The kernel of `KERNELS[name](*shape, **options)`, compiled for `"cpu"` or `"cuda"`, once per
    process."""
    kernel = KERNELS[name](*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    pass_configs = PASS_CONFIGS if name in ("dq", "dkv") else WITHOUT_LOADING_WARPS
    return tilelang.compile(kernel, target="cuda", pass_configs=pass_configs)


def of_summaries(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `tilelang_selection_launch.compressed_attention`; arguments and results as in
    `triton_selection_launch.of_summaries`."""
    (B, N, HQ, D), (_, M_c, H, DV) = q.shape, v_cmp.shape
    R, G, device = B * N, HQ // H, q.device.type
    d_q = q.new_empty(R, HQ, D)
    d_k, d_v = (x.new_zeros(B * M_c, H, x.shape[3]) for x in (k_cmp, v_cmp))
    if M_c == 0:
        return d_q.zero_().view_as(q), d_k.view_as(k_cmp), d_v.view_as(v_cmp)
    d_o, d_lse, q_rows, k, v, o, lse = map(rows_of, (d_o, d_lse, q, k_cmp, v_cmp, o, lse))
    tile = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    common = {
        "dtype": dtype_of(q),
        "has_tma": has_tma(q.device, D * q.element_size(), DV * q.element_size()),
    }
    scales = (scale, scale * LOG2_E)

    # -- a row's numbers --
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    groups = [x.view(R, H, G, -1) for x in (o, d_o)] + [
        x.view(R, H, G) for x in (lse, d_lse, delta, lse2)
    ]
    compiled("delta", device, H, G, DV, dtype=common["dtype"])(*groups)

    # -- the queries --
    options = summary_dq_options(D, DV, **tile)
    compiled("dq", device, H, G, D, DV, **common, **options)(
        q_rows, k, v, d_o, lse, delta, lse2, rows.first_key, rows.num_visible, d_q, *scales
    )

    # -- the summaries: every chunk, then the sums --
    options = summary_dkv_options(D, DV, **tile)
    BT, widths, num_keys = options["BT"], (tile_rows(D), tile_rows(DV)), B * M_c
    tables = backward_tables.of_windows(
        rows, lse2.view(R, H, G)[:, :, 0], window_size=R + num_keys, tile_size=BT,
        num_keys=num_keys, G=G, share_bytes=4 * BT * sum(widths), itemsize=q.element_size(),
    )  # fmt: skip
    chunks = tables.chunks
    num_unread = F.pad((tables.rows < 0).cumsum(0, dtype=torch.int32), (1, 0))  # [E + 1]
    # a head's rows follow each other, 16 bytes at a time
    numbers = [F.pad(x.T, (0, -R % 4)).reshape(HQ, -1, 4).contiguous() for x in (delta, lse2)]
    shares = [lse.new_empty(chunks.num_places, BT, width) for width in widths]
    compiled("dkv", device, H, G, D, DV, **common, **options)(
        q_rows, k, v, d_o, *numbers, tables.rows, num_unread, tables.row_start, tables.row_end,
        chunks.first_key, chunks.head, chunks.first, chunks.last, chunks.num_parts, chunks.place,
        d_k, d_v, *shares, *scales,
    )  # fmt: skip
    if chunks.num_places:
        compiled("sum", device, H, D, DV, BT, BT=BT, dtype=common["dtype"])(
            *shares, tables.rows, tables.row_end, chunks.first_key, chunks.head, chunks.last,
            chunks.part, chunks.num_parts, chunks.place, d_k, d_v,
        )  # fmt: skip
    return d_q.view_as(q), d_k.view_as(k_cmp), d_v.view_as(v_cmp)
