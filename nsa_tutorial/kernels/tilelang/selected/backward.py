"""Chapter 13: the backward of selected attention and of sliding windows, in TileLang.

Four kernels, with the phases and the names of `triton.selected.backward`. `build_delta` sums up
what both passes ask of a row. `build_dq` walks a query's list, as the forward does. `build_dkv`
walks the inverse list: the queries that see a tile of keys, in chunks. `build_sum` adds the shares
of a tile that was cut, in a fixed order, so that every run gives the same bits.

A function here takes what is fixed when the kernel is compiled, and returns the kernel, not yet
compiled; lengths stay open. `selected.backward_launch` compiles and runs them, and is what the
operators call.

Symbols: those of `selected.forward`; `BR` rows of a step, a row being one query and one head · `E`
entries of the inverse list · `P` its chunks.
"""

import math

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.launch_options import dkv_sides, launch_options, tile_sides
from nsa_tutorial.kernels.tilelang.products import exact_gemm
from nsa_tutorial.kernels.tilelang.selected.forward import rows_of

accum_dtype = "float32"
SUM_KEYS = 16  # keys whose shares a program adds


def stages(num_stages: int, num_loads: int, num_others: int) -> dict[str, object]:
    """What `T.Pipelined` is told. With one stage a tile is loaded anew as soon as the step has read
    it. With two the loads, a step's first statements, run a step ahead, into a second tile."""
    if num_stages == 1:
        return {"num_stages": 1}
    order = list(range(num_loads + num_others))
    return {"order": order, "stage": [0] * num_loads + [1] * num_others}


def build_delta(H: int, G: int, DV: int, dtype: str) -> tirx.PrimFunc:
    """The kernel that reads `Output, GradO [rows, H, G, DV]`, `LSE, GradLSE [rows, H, G]`, and
    writes `Delta` and `LSE2`, `[rows, H, G]`.

    `LSE2` is the log-sum-exp in base two, infinity where no loss asks for the group, NaN where its
    scores or its gradient are not finite.
    """
    rows = T.dynamic("rows")
    # powers of two: of these, threads take equal shares
    GT, DVT = (max(16, 1 << (n - 1).bit_length()) for n in (G, DV))
    threads = launch_options(GT, DV, DV, 1)["threads"]
    inf, nan = T.infinity(accum_dtype), T.float32(math.nan)

    @T.prim_func
    def delta_kernel(
        Output: T.Tensor([rows, H, G, DV], dtype),
        GradO: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        GradLSE: T.Tensor([rows, H, G], accum_dtype),
        Delta: T.Tensor([rows, H, G], accum_dtype),
        LSE2: T.Tensor([rows, H, G], accum_dtype),
    ):
        # -- locate the program --
        with T.Kernel(rows, H, threads=threads) as (row, head):
            o_tile = T.alloc_fragment([GT, DVT], accum_dtype)
            do_tile = T.alloc_fragment([GT, DVT], accum_dtype)
            asks = T.alloc_fragment([GT, DVT], "int32")
            spoils = T.alloc_fragment([GT, DVT], "int32")
            delta = T.alloc_fragment([GT], accum_dtype)
            row_asks = T.alloc_fragment([GT], "int32")
            row_spoils = T.alloc_fragment([GT], "int32")
            group_asks = T.alloc_fragment([1], "int32")
            group_spoils = T.alloc_fragment([1], "int32")

            # -- load --
            T.copy(Output[row, head, 0:GT, 0:DVT], o_tile)  # [GT, DVT], zeros past G and DV
            T.copy(GradO[row, head, 0:GT, 0:DVT], do_tile)

            # -- one number a row --
            for i, j in T.Parallel(GT, DVT):
                is_finite = T.And(-inf < do_tile[i, j], do_tile[i, j] < inf)
                asks[i, j] = T.if_then_else(do_tile[i, j] != 0, 1, 0)
                spoils[i, j] = T.if_then_else(is_finite, 0, 1)
                o_tile[i, j] *= do_tile[i, j]
            T.reduce_sum(o_tile, delta, dim=1)
            T.reduce_max(asks, row_asks, dim=1)
            T.reduce_max(spoils, row_spoils, dim=1)
            for i in T.Parallel(GT):
                is_finite = T.And(-inf < LSE[row, head, i], LSE[row, head, i] < inf)
                row_asks[i] = T.if_then_else(GradLSE[row, head, i] != 0, 1, row_asks[i])
                row_spoils[i] = T.if_then_else(is_finite, row_spoils[i], 1)
            # one of the group is enough: dK and dV sum over it
            T.reduce_max(row_asks, group_asks, dim=0)
            T.reduce_max(row_spoils, group_spoils, dim=0)

            # -- store --
            for i in T.Parallel(GT):
                if i < G:
                    Delta[row, head, i] = delta[i] - GradLSE[row, head, i]
                    lse2 = T.if_then_else(group_spoils[0] == 0, LSE[row, head, i] * LOG2_E, nan)
                    LSE2[row, head, i] = T.if_then_else(group_asks[0] == 0, inf, lse2)

    return delta_kernel


def build_dq(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str, *,
    BT: int, threads: int, num_stages: int,
    is_window: bool = False, has_factors: bool = False, is_added: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads what the forward does, `GradO [rows, H, G, DV]`, and three numbers a
    row, and writes `GradQ [rows, H, G, D]`.

    Args:
        H, G, D, DV, BS, dtype, is_window: as in `selected.forward.build_kernel`.
        BT, threads, num_stages: as `launch_options.dq_options` has them.
        has_factors: each slot has a factor on its scores, of which the kernel writes the gradient,
            a sum for each part of a block: `GradSlotScale [rows, H, S * parts]`.
        is_added: the gradient is added to what stands in `GradQ`.
    """
    rows, keys, S = T.dynamic("rows"), T.dynamic("keys"), T.dynamic("S")
    num_factors = S if has_factors else T.dynamic("num_factors")
    num_sums = T.dynamic("num_sums")
    exact = dtype == "float32"
    GT, DT, DVT = tile_sides(G, D, DV)
    PARTS = -(-BS // BT)  # steps of a block
    others = 11 if has_factors else 7  # statements of a step besides its loads
    full_rows = T.GemmWarpPolicy.FullRow  # a warp has 16 rows of the group, all columns
    in_registers = not exact and threads <= 2 * GT
    alloc_gradient = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def dq_kernel(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        Delta: T.Tensor([rows, H, G], accum_dtype),
        LSE2: T.Tensor([rows, H, G], accum_dtype),
        BlockIndices: T.Tensor([rows, H, S], "int32"),
        SlotScale: T.Tensor([rows, H, num_factors], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        GradQ: T.Tensor([rows, H, G, D], dtype),
        GradSlotScale: T.Tensor([rows, H, num_sums], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(rows, H, threads=threads) as (row, head):
            Q_shared = T.alloc_shared([GT, DT], dtype)
            DO_shared = T.alloc_shared([GT, DVT], dtype)
            K_shared = T.alloc_shared([BT, DT], dtype)
            V_shared = T.alloc_shared([BT, DVT], dtype)
            acc_s = T.alloc_fragment([GT, BT], accum_dtype)
            d_p = T.alloc_fragment([GT, BT], accum_dtype)
            d_s = alloc_gradient([GT, BT], dtype)
            acc_dq = T.alloc_fragment([GT, DT], accum_dtype)
            lse = T.alloc_shared([GT], accum_dtype)
            delta = T.alloc_shared([GT], accum_dtype)
            of_row = T.alloc_fragment([GT], accum_dtype)
            d_factor = T.alloc_fragment([1], accum_dtype)
            first_key = FirstKey[row]
            num_visible = NumVisible[row]
            num_blocks = (num_visible + BS - 1) // BS  # that hold a visible key
            needs_grad = LSE2[row, head, 0] != T.infinity(accum_dtype)
            num_slots = T.if_then_else(needs_grad, num_blocks if is_window else S, 0)
            K_seen = rows_of(K, first_key, num_visible)  # all that this row may see
            V_seen = rows_of(V, first_key, num_visible)

            # -- load the query group --
            T.copy(Q[row, head, 0:GT, 0:DT], Q_shared)  # [GT, DT], zeros past G and D
            T.copy(GradO[row, head, 0:GT, 0:DVT], DO_shared)  # [GT, DVT]
            for i in T.Parallel(GT):
                lse[i] = LSE[row, head, i] * LOG2_E  # in base two
                delta[i] = Delta[row, head, i]

            # -- initialise --
            T.clear(acc_dq)

            for step in T.Pipelined(num_slots * PARTS, **stages(num_stages, 2, others)):
                # -- guard --
                # An empty slot is the block before the first or behind the last, as in the forward.
                slot = step // PARTS
                block_id = (
                    slot if is_window else T.clamp(BlockIndices[row, head, slot], -1, num_blocks)
                )
                is_visible = T.And(block_id >= 0, block_id < num_blocks)
                part_start = step % PARTS * BT
                start = block_id * BS + part_start
                num_seen = T.min(BS - part_start, num_visible - start)

                # -- load the keys and the values --
                # hidden rows are zeros: weight 0 hides a number, but 0 * NaN is NaN
                for i, j in T.Parallel(BT, DVT):
                    key = T.if_then_else(i < BS - part_start, start + i, num_visible)
                    V_shared[i, j] = V_seen[key, head, j]
                for i, j in T.Parallel(BT, DT):
                    key = T.if_then_else(i < BS - part_start, start + i, num_visible)
                    K_shared[i, j] = K_seen[key, head, j]

                # -- weights --
                T.clear(acc_s)
                if exact:
                    exact_gemm(Q_shared, K_shared, acc_s, GT, BT, DT, True)
                else:
                    T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=full_rows)

                # -- gradient of the scores --
                T.clear(d_p)
                if exact:
                    exact_gemm(DO_shared, V_shared, d_p, GT, BT, DVT, True)
                else:
                    T.gemm(DO_shared, V_shared, d_p, transpose_B=True, policy=full_rows)
                for i, j in T.Parallel(GT, BT):
                    factor = SlotScale[row, head, slot] if has_factors else 1.0
                    p = T.exp2(acc_s[i, j] * (scale_log2 * factor) - lse[i])
                    is_seen = T.And(is_visible, j < num_seen)
                    d_p[i, j] = T.if_then_else(is_seen, p * (d_p[i, j] - delta[i]), 0)
                if has_factors:
                    for i, j in T.Parallel(GT, BT):
                        acc_s[i, j] *= d_p[i, j]
                        d_p[i, j] *= T.if_then_else(is_visible, SlotScale[row, head, slot], 0)
                    T.reduce_sum(acc_s, of_row, dim=1)
                    T.reduce_sum(of_row, d_factor, dim=0)
                    if is_visible:
                        GradSlotScale[row, head, step] = d_factor[0] * scale

                # -- accumulate --
                T.copy(d_p, d_s)
                if exact:
                    exact_gemm(d_s, K_shared, acc_dq, GT, DT, BT, False)
                else:
                    T.gemm(d_s, K_shared, acc_dq, policy=full_rows)

            # -- store --
            for i, j in T.Parallel(GT, DT):
                acc_dq[i, j] *= scale
            if is_added:
                for i, j in T.Parallel(GT, DT):
                    acc_dq[i, j] += T.cast(GradQ[row, head, i, j], accum_dtype)
            T.copy(acc_dq, GradQ[row, head, 0:GT, 0:DT])

    return dq_kernel


def build_dkv(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str, *,
    BT: int, BR: int, threads: int, num_stages: int,
    is_window: bool = False, has_factors: bool = False, is_added: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads the same, and the tables of `tables.chunks.Tables`, and writes `GradK
    [keys, H, D]` and `GradV [keys, H, DV]`, or, for a tile that was cut, a share of them, in fp32.

    The grid is `(P, parts of a tile)`; a tile is `BS` keys, and a program has `BT` of them. Scores
    stand transposed, a key a row: so they are multiplied as they lie in registers. Arguments as in
    `build_dq`, and as `launch_options.dkv_options` has them.
    """
    rows, keys = T.dynamic("rows"), T.dynamic("keys")
    E, P, places = T.dynamic("E"), T.dynamic("P"), T.dynamic("places")
    num_factors = E if has_factors else T.dynamic("num_factors")
    exact = dtype == "float32"
    DT, DVT = dkv_sides(D, DV, 4 if dtype == "float32" else 2)
    # rows of an entry: a power of two, or no 16 bytes could be proved to be of one row
    GP = 1 << (G - 1).bit_length()
    PARTS = -(-BS // BT)  # programs of a tile
    inf = T.infinity(accum_dtype)
    full_rows = T.GemmWarpPolicy.FullRow  # a warp has 16 keys, and all columns
    in_registers = not exact and threads <= 2 * BT
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def dkv_kernel(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, H, G, DV], dtype),
        Delta: T.Tensor([rows, H, G], accum_dtype),
        LSE2: T.Tensor([rows, H, G], accum_dtype),
        Rows: T.Tensor([E], "int32"),
        Factors: T.Tensor([num_factors], accum_dtype),
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
        SharesK: T.Tensor([places, PARTS * BT, DT], accum_dtype),
        SharesV: T.Tensor([places, PARTS * BT, DVT], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(P, PARTS, threads=threads) as (chunk, part):
            K_shared = T.alloc_shared([BT, DT], dtype)
            V_shared = T.alloc_shared([BT, DVT], dtype)
            Q_shared = T.alloc_shared([BR, DT], dtype)
            DO_shared = T.alloc_shared([BR, DVT], dtype)
            lse = T.alloc_shared([BR], accum_dtype)
            delta = T.alloc_shared([BR], accum_dtype)
            factor = T.alloc_shared([BR], accum_dtype)
            row_start = T.alloc_shared([BR], "int32")
            row_end = T.alloc_shared([BR], "int32")
            acc_s = T.alloc_fragment([BT, BR], accum_dtype)
            d_p = T.alloc_fragment([BT, BR], accum_dtype)
            p = alloc_weights([BT, BR], dtype)
            d_s = alloc_weights([BT, BR], dtype)
            acc_dk = T.alloc_fragment([BT, DT], accum_dtype)
            acc_dv = T.alloc_fragment([BT, DVT], accum_dtype)
            first = First[chunk]
            last = Last[chunk]
            head = Head[chunk]
            num_rows = (last - first) * GP
            # what need not be checked at every load
            T.assume(first >= 0)
            T.assume(last <= E)
            T.assume(head >= 0)
            T.assume(head < H)
            part_start = part * BT
            first_key = FirstKey[chunk] + part_start
            tile_end = FirstKey[chunk] + BS

            # -- load the keys and the values --
            for i, j in T.Parallel(BT, DT):
                key = T.if_then_else(i < BS - part_start, first_key + i, keys)
                K_shared[i, j] = K[key, head, j]  # zeros past the tile, and past the last key
            for i, j in T.Parallel(BT, DVT):
                key = T.if_then_else(i < BS - part_start, first_key + i, keys)
                V_shared[i, j] = V[key, head, j]

            # -- initialise --
            T.clear(acc_dk)
            T.clear(acc_dv)

            for step in T.Pipelined(T.ceildiv(num_rows, BR), **stages(num_stages, 3, 11)):
                # -- load the queries --
                # An entry is a row, or `~row`. Nothing but zeros is outside of all rows.
                for i in T.Parallel(BR):
                    index = step * BR + i
                    is_row = T.And(index < num_rows, index % GP < G)
                    place = T.if_then_else(is_row, first + index // GP, E)
                    entry = T.if_then_else(is_row, Rows[first + index // GP], -1 - rows)
                    row = T.max(entry, -1 - entry)
                    lse[i] = LSE2[row, head, index % GP]
                    delta[i] = Delta[entry, head, index % GP]
                    row_end[i] = RowEnd[row]
                    if is_window:
                        row_start[i] = RowStart[row]
                    if has_factors:
                        factor[i] = Factors[place]
                for i, j in T.Parallel(BR, DVT):
                    index = step * BR + i
                    entry = T.if_then_else(index < num_rows, Rows[first + index // GP], -1)
                    DO_shared[i, j] = GradO[entry, head, index % GP, j]
                for i, j in T.Parallel(BR, DT):
                    index = step * BR + i
                    entry = T.if_then_else(index < num_rows, Rows[first + index // GP], -1)
                    Q_shared[i, j] = Q[entry, head, index % GP, j]

                # -- weights --
                T.clear(acc_s)
                if exact:
                    exact_gemm(K_shared, Q_shared, acc_s, BT, BR, DT, True)
                else:
                    T.gemm(K_shared, Q_shared, acc_s, transpose_B=True, policy=full_rows)
                for i, j in T.Parallel(BT, BR):
                    s = acc_s[i, j] * (factor[j] if has_factors else 1.0)
                    acc_s[i, j] = T.exp2(s * scale_log2 - lse[j])

                # -- gradient of the scores --
                T.clear(d_p)
                if exact:
                    exact_gemm(V_shared, DO_shared, d_p, BT, BR, DVT, True)
                else:
                    T.gemm(V_shared, DO_shared, d_p, transpose_B=True, policy=full_rows)
                for i, j in T.Parallel(BT, BR):
                    d_p[i, j] = acc_s[i, j] * (d_p[i, j] - delta[j])
                    if has_factors:
                        d_p[i, j] *= factor[j]
                # Entries ascend with their rows, and a later row sees more: where the first one of
                # a step sees the whole tile, so do all.
                if is_window or row_end[0] < tile_end:
                    for i, j in T.Parallel(BT, BR):
                        is_seen = T.And(first_key + i < row_end[j], lse[j] != inf)
                        if is_window:
                            is_seen = T.And(first_key + i >= row_start[j], is_seen)
                        acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], 0)
                        d_p[i, j] = T.if_then_else(is_seen, d_p[i, j], 0)

                # -- gradient of the values --
                T.copy(acc_s, p)
                if exact:
                    exact_gemm(p, DO_shared, acc_dv, BT, DVT, BR, False)
                else:
                    T.gemm(p, DO_shared, acc_dv, policy=full_rows)

                # -- gradient of the keys --
                T.copy(d_p, d_s)
                if exact:
                    exact_gemm(d_s, Q_shared, acc_dk, BT, DT, BR, False)
                else:
                    T.gemm(d_s, Q_shared, acc_dk, policy=full_rows)

            # -- store --
            for i, j in T.Parallel(BT, DT):
                acc_dk[i, j] *= scale
            if NumParts[chunk] == 1:
                seen_end = T.min(end_of_sight(Rows, RowEnd, last), tile_end)
                seen_end = T.if_then_else(first < last, seen_end, 0)
                store_gradient(GradK, acc_dk, first_key, head, seen_end, BT, DT, is_added)
                store_gradient(GradV, acc_dv, first_key, head, seen_end, BT, DVT, is_added)
            elif first < last:
                place = Place[chunk]
                T.copy(acc_dk, SharesK[place, part_start : part_start + BT, 0:DT])
                T.copy(acc_dv, SharesV[place, part_start : part_start + BT, 0:DVT])

    return dkv_kernel


def end_of_sight(Rows, RowEnd, last):
    """Where the keys end that the entries before `last` see: the last one sees most."""
    entry = Rows[last - 1]
    return RowEnd[T.max(entry, -1 - entry)]


@T.macro
def store_gradient(Grad, acc, first_key, head, end, rows, width, is_added):
    """`rows` keys from `first_key` on, those before `end`; in place of what stands there, or, with
    `is_added`, on top of it."""
    for i, j in T.Parallel(rows, width):
        if first_key + i < end:
            if is_added:
                acc[i, j] += T.cast(Grad[first_key + i, head, j], accum_dtype)
            Grad[first_key + i, head, j] = acc[i, j]


def build_sum(
    H: int, D: int, DV: int, BS: int, dtype: str, *, BT: int, is_added: bool = False
) -> tirx.PrimFunc:
    """The kernel that adds the shares of every tile that was cut, the first chunk's first.

    The grid is `(P, steps of SUM_KEYS keys in a tile)`; the program of a tile's first chunk does
    the work. `BT` is that of the kernel which wrote the shares.
    """
    keys, rows = T.dynamic("keys"), T.dynamic("rows")
    E, P, places = T.dynamic("E"), T.dynamic("P"), T.dynamic("places")
    DT, DVT = dkv_sides(D, DV, 4 if dtype == "float32" else 2)
    tile = -(-BS // BT) * BT  # keys of a place

    @T.prim_func
    def sum_kernel(
        SharesK: T.Tensor([places, tile, DT], accum_dtype),
        SharesV: T.Tensor([places, tile, DVT], accum_dtype),
        Rows: T.Tensor([E], "int32"),
        RowEnd: T.Tensor([rows], "int32"),
        FirstKey: T.Tensor([P], "int32"),
        Head: T.Tensor([P], "int32"),
        Last: T.Tensor([P], "int32"),
        Part: T.Tensor([P], "int32"),
        NumParts: T.Tensor([P], "int32"),
        Place: T.Tensor([P], "int32"),
        GradK: T.Tensor([keys, H, D], dtype),
        GradV: T.Tensor([keys, H, DV], dtype),
    ):
        # -- locate the program --
        with T.Kernel(P, T.ceildiv(BS, SUM_KEYS), threads=128) as (chunk, step):
            acc_dk = T.alloc_fragment([SUM_KEYS, DT], accum_dtype)
            acc_dv = T.alloc_fragment([SUM_KEYS, DVT], accum_dtype)
            is_first = T.And(Part[chunk] == 0, NumParts[chunk] > 1)
            num_parts = T.if_then_else(is_first, NumParts[chunk], 0)
            start = step * SUM_KEYS
            first_key = FirstKey[chunk] + start

            # -- accumulate --
            T.clear(acc_dk)
            T.clear(acc_dv)
            for part in T.serial(num_parts):
                for i, j in T.Parallel(SUM_KEYS, DT):
                    acc_dk[i, j] += SharesK[Place[chunk] + part, start + i, j]
                for i, j in T.Parallel(SUM_KEYS, DVT):
                    acc_dv[i, j] += SharesV[Place[chunk] + part, start + i, j]

            # -- store --
            last = Last[chunk + T.max(num_parts, 1) - 1]
            seen_end = T.min(end_of_sight(Rows, RowEnd, last), FirstKey[chunk] + BS)
            seen_end = T.if_then_else(is_first, seen_end, 0)
            head = Head[chunk]
            store_gradient(GradK, acc_dk, first_key, head, seen_end, SUM_KEYS, DT, is_added)
            store_gradient(GradV, acc_dv, first_key, head, seen_end, SUM_KEYS, DVT, is_added)

    return sum_kernel
