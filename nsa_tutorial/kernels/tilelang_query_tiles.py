"""Chapter 16: selected attention with a tile of queries in each program, in TileLang.

Neighbouring queries list much the same blocks. Here `TQ` of them walk the *union* of their lists
together, as in `triton_query_tiles`, where the phases are explained: a block is fetched once for
all, and a bit for each query says who listed it.

`tilelang_unions` makes the unions, `build_attend` the kernel that walks them, `launch` runs both.
Steps behind a mask keep what is not finite from those who do not see it; where there is such a
value at all, every step is one of them. So the host never waits for the device. No argument is
checked here: `ops` does.

Symbols: those of `tilelang_forward` and `tilelang_unions`; `GP` heads of a group, rounded up to a
power of two · `BQ = TQ * GP` rows of a tile · `BT` tokens of a step.
"""

import functools

import tilelang
import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang_selection import is_finite, multiply, nan, stages_of
from nsa_tutorial.kernels.tilelang_selection_launch import dtype_of, rows_of
from nsa_tutorial.kernels.tilelang_tiles import summary_sides
from nsa_tutorial.kernels.tilelang_unions import ANY_LENGTH, Unions, unions
from nsa_tutorial.kernels.tilelang_windows import PASS_CONFIGS, loads_by_tma, power_of_two
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, shared_memory
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse.selected_attention import QueryRows

accum_dtype = "float32"

# Rows of a tile, stages: the first that a program can have. fp32 does without tensor cores, and
# takes small tiles.
TILES = ((64, 2), (64, 1))
FP32_TILES = ((32, 1), (16, 1))


def build_attend(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads and writes what `tilelang_forward.build_kernel` does, along the unions
    of `TQ` neighbours, for the rows of tiles whose unions are given.

    The grid is `(tiles, H)`. Arguments as in `tilelang_windows.build_attend`.
    """
    rows, keys, tiles, U = (T.dynamic(name) for name in ("rows", "keys", "tiles", "U"))
    GP, PARTS = power_of_two(G), -(-BS // BT)
    TQ = BQ // GP
    exact = dtype == "float32"
    DT, DVT = summary_sides(D, DV, 4 if exact else 2, wide=0)
    in_registers = not exact and threads <= 2 * BQ
    # two programs at a time share the registers, unless rows are so wide that one needs them all
    is_pair = has_tma and threads == 128 and DT + DVT <= 256
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def attend_kernel(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        Start: T.Tensor([tiles, H, U], "int32"),
        ListedBy: T.Tensor([tiles, H, U], "int32"),
        Count: T.Tensor([tiles, H], "int32"),
        NumWhole: T.Tensor([tiles, H], "int32"),
        Output: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(tiles, H, threads=threads) as (tile, head):
            if is_pair:
                T.annotate_min_blocks_per_sm(2)
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(232)
            q_box = T.alloc_shared([TQ, GP, DT], dtype)
            q_tile = T.reshape(q_box, [BQ, DT])
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
            shift = T.alloc_fragment([BQ], accum_dtype)
            running_sum = T.alloc_fragment([BQ], accum_dtype)
            is_bad = T.alloc_fragment([BT, DVT], "int32")
            of_channel = T.alloc_fragment([DVT], "int32")
            any_bad = T.alloc_fragment([1], "int32")
            row_end = T.alloc_fragment([BQ], "int32")
            is_listed = T.alloc_fragment([BQ], "int32")
            lists_any = T.alloc_fragment([BQ], "int32")
            query = tile * TQ
            count = Count[tile, head]
            num_whole = NumWhole[tile, head] * PARTS

            # -- load the queries --
            T.copy(Q[query : query + TQ, head, 0:GP, 0:DT], q_box)  # zeros past rows, G and D
            for i in T.Parallel(BQ):
                row_end[i] = FirstKey[query + i // GP] + NumVisible[query + i // GP]

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.clear(lists_any)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN

            # one step even without a block: the queries' tile must arrive before the end
            for step in T.Pipelined(
                T.max(count * PARTS, 1), **stages_of(num_stages, 2, 13, has_tma)
            ):
                # -- guard --
                part_start = step % PARTS * BT
                key = Start[tile, head, step // PARTS] + part_start

                # -- load the keys and the values --
                T.copy(K[key : key + BT, head, 0:DT], k_tile)  # [BT, DT]
                T.copy(V[key : key + BT, head, 0:DVT], v_tile)  # [BT, DVT]

                # -- scores --
                T.clear(acc_s)
                multiply(q_tile, k_tile, acc_s, BQ, BT, DT, True)

                # -- mask --
                for i in T.Parallel(BQ):
                    bits = T.if_then_else(count > 0, ListedBy[tile, head, step // PARTS], 0)
                    is_listed[i] = (bits >> (i // GP)) & 1
                    lists_any[i] = lists_any[i] | is_listed[i]
                if step < num_whole:
                    for i, j in T.Parallel(BQ, BT):
                        acc_s[i, j] = T.if_then_else(
                            is_listed[i] > 0, acc_s[i, j], -T.infinity(accum_dtype)
                        )
                else:
                    for i, j in T.Parallel(BQ, BT):
                        is_key = T.And(part_start + j < BS, key + j < row_end[i])
                        acc_s[i, j] = T.if_then_else(
                            T.And(is_listed[i] > 0, is_key), acc_s[i, j], -T.infinity(accum_dtype)
                        )

                # -- online softmax --
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(BQ):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                    # a row that has seen nothing yet must not come to -inf here
                    shift[i] = T.max(scores_max[i] * scale_log2, T.min_value(accum_dtype))
                for i, j in T.Parallel(BQ, BT):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * scale_log2 - shift[i])
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
                    T.reduce_max(is_bad, of_channel, dim=0)
                    T.reduce_max(of_channel, any_bad, dim=0)
                    if any_bad[0] > 0:  # those who see it get NaN
                        for token in T.serial(BT):
                            for i, j in T.Parallel(BQ, DVT):
                                is_key = T.And(part_start + token < BS, key + token < row_end[i])
                                if T.And(is_listed[i] > 0, is_key):
                                    # not turned round: of NaN, the compiler would get it wrong
                                    is_good = is_finite(V[key + token, head, j])
                                    acc_o[i, j] = T.if_then_else(is_good, acc_o[i, j], nan)

            # -- normalise and store --
            for i, j in T.Parallel(BQ, DVT):
                acc_o[i, j] = T.if_then_else(lists_any[i] > 0, acc_o[i, j] / running_sum[i], 0)
                if T.And(count >= 0, T.And(query + i // GP < rows, T.And(i % GP < G, j < DV))):
                    Output[query + i // GP, head, i % GP, j] = acc_o[i, j]
            for i in T.Parallel(BQ):
                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                running_sum[i] = T.if_then_else(lists_any[i] > 0, log_sum, -T.infinity(accum_dtype))
                if T.And(count >= 0, T.And(query + i // GP < rows, i % GP < G)):
                    LSE[query + i // GP, head, i % GP] = running_sum[i]

    return attend_kernel


@functools.cache
def compiled(device: str, *shape: int, **options: object) -> tilelang.JITKernel:
    """The kernel of `build_attend(*shape, **options)`, compiled for `"cpu"` or `"cuda"`, once per
    process."""
    kernel = build_attend(*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    return tilelang.compile(kernel, target="cuda", pass_configs=PASS_CONFIGS[options["has_tma"]])


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    most: float = ANY_LENGTH, out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor, Unions]:  # fmt: skip
    """Make the unions, and walk them.

    Args:
        q, k, v, ids, rows, block_size, scale: as in `selected_attention.forward`.
        most: as in `unions`. Rows of tiles that are not wanted are not written.
        out: contiguous tensors to write to; None makes new ones.
        options: `BQ`, `BT`, `threads`, `num_stages`, in place of what `query_tile_options` chooses,
            and `has_tma`, in place of what the GPU can do.

    Returns:
        `o [B, N, HQ, DV]` and `lse [B, N, HQ]`, and the unions.
    """
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    R, G, itemsize = B * N, HQ // H, q.element_size()
    k, v = k.contiguous(), v.contiguous()
    options = query_tile_options(
        G, D, DV, block_size, itemsize, shared_memory(q.device)
    ) | options  # fmt: skip
    TQ = options["BQ"] // power_of_two(G)
    made = unions(v, ids, rows, block_size=block_size, TQ=TQ, BT=options["BT"], most=most)
    o, lse = out or (v.new_empty(B, N, HQ, DV), q.new_empty(B, N, HQ, dtype=torch.float32))
    options = {"has_tma": loads_by_tma(q, v, options["threads"])} | options
    attend = compiled(q.device.type, H, G, D, DV, block_size, dtype=dtype_of(q), **options)
    attend(
        rows_of(q).view(R, H, G, D), rows_of(k), rows_of(v), rows.first_key, rows.num_visible,
        *made[:4], o.view(R, H, G, DV), lse.view(R, H, G), scale, scale * LOG2_E,
    )  # fmt: skip
    return o, lse, made


def query_tile_options(
    G: int, D: int, DV: int, BS: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages` of the walk along the unions: rows of a tile, at most 16
    queries, and tokens of a step. Arguments as in `tilelang_tiles.dq_options`."""
    DT, DVT = summary_sides(D, DV, itemsize, wide=0)
    GP = power_of_two(G)
    BT = min(64 if itemsize == 2 else 32, power_of_two(max(16, BS)))
    if BS % BT and BS % 16 == 0:  # whole blocks need whole steps
        BT = BS & -BS

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries, of keys and values, of clean values, of weights in fp32, and some."""
        weights = BQ * BT if itemsize == 4 else 0
        tiles = BQ * DT + num_stages * BT * (DT + DVT) + BT * DVT
        return (tiles + weights) * itemsize + 2048

    choices = [
        (min(max(BQ, GP), 16 * GP), step, num_stages)
        for step in (BT, 16)
        for BQ, num_stages in (TILES if itemsize == 2 else FP32_TILES)
    ]
    BQ, BT, num_stages = (*(c for c in choices if size(*c) <= shared_memory), choices[-1])[0]
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}
