"""Sliding windows by tiles of queries, forward, in TileLang.

Neighbouring windows have nearly all their keys in common. So a program takes a tile of neighbouring
queries with all heads of their group, as in `triton_windows`, where the phases are explained. Most
of its steps are seen by the whole tile and need no mask. Those at both ends, which only some of the
queries see, have as many keys as the others: a warp group loads all of them, in their order, while
the others compute.

`build_attend` makes the kernel from what is fixed when it is compiled, `launch` runs it, on CUDA
tensors, or on CPU tensors through C. There is no backward here, and no argument is checked: `ops`
does.

Symbols: those of `tilelang_forward`; `GP` heads of a group, rounded up to a power of two · `TQ`
queries of a tile, `BQ = TQ * GP` rows · `BT` keys of a step.
"""

import functools

import tilelang
import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang_forward import PASS_CONFIGS as ALL_THREADS_LOAD
from nsa_tutorial.kernels.tilelang_selection import is_finite, multiply, nan, stages_of
from nsa_tutorial.kernels.tilelang_selection_launch import PASS_CONFIGS as A_WARP_GROUP_LOADS
from nsa_tutorial.kernels.tilelang_selection_launch import dtype_of, rows_of
from nsa_tutorial.kernels.tilelang_tiles import has_tma, summary_sides
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, shared_memory
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse.selected_attention import QueryRows

accum_dtype = "float32"
PASS_CONFIGS = {True: A_WARP_GROUP_LOADS, False: ALL_THREADS_LOAD}  # with TMA, and without

# Rows of a tile, keys of a step, stages: the first that a program can have. fp32 does without
# tensor cores, and takes small tiles.
TILES = ((128, 64, 2), (64, 64, 2), (64, 64, 1), (64, 32, 1), (64, 16, 1))
FP32_TILES = ((64, 32, 1), (64, 16, 1), (32, 16, 1), (16, 16, 1))


def build_attend(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    BQ: int, BT: int, threads: int, num_stages: int, has_tma: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [rows, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `FirstKey
    [rows]` and `NumVisible [rows]`, and writes `Output [rows, H, G, DV]` and `LSE [rows, H, G]`.

    The grid is `(B * num_tiles, H)`: the `N` queries of a sequence of the batch and a key/value
    head, `TQ` a tile. Several packed sequences may share a tile.

    Args:
        H, G, D, DV, dtype: as in `tilelang_forward.build_kernel`.
        BQ, BT, threads, num_stages: as `window_options` has them; `BQ` is a multiple of `GP`.
        has_tma: whether tiles come by TMA, as `tilelang_tiles.has_tma` says.
    """
    rows, keys, GP = T.dynamic("rows"), T.dynamic("keys"), power_of_two(G)
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
        Output: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
        N: T.int32,
        num_tiles: T.int32,
        num_programs: T.int32,
        window_size: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(num_programs, H, threads=threads) as (program, head):
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
            first = T.alloc_fragment([BQ], "int32")
            end = T.alloc_fragment([BQ], "int32")
            first_query = T.truncdiv(program, num_tiles) * N  # of the sequence
            query = first_query + T.truncmod(program, num_tiles) * TQ
            last_query = T.min(query + TQ, first_query + N) - 1

            # windows begin and end later from query to query: the first and the last one decide
            first_end = FirstKey[query] + NumVisible[query]
            start = T.max(FirstKey[query], first_end - window_size)
            stop = FirstKey[last_query] + NumVisible[last_query]
            last_start = T.max(FirstKey[last_query], stop - window_size)
            # the steps from `num_before` to `whole_end` are seen by all rows
            num_before = T.ceildiv(last_start - start, BT)
            whole_end = (first_end - start) // BT

            # -- load the queries --
            T.copy(Q[query : query + TQ, head, 0:GP, 0:DT], q_box)  # zeros past rows, G and D
            for i in T.Parallel(BQ):  # what is too much sees what the last query sees
                of_row = T.min(query + i // GP, last_query)
                end[i] = FirstKey[of_row] + NumVisible[of_row]
                first[i] = T.max(FirstKey[of_row], end[i] - window_size)

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN

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
                if T.Or(step < num_before, step >= whole_end):
                    for i, j in T.Parallel(BQ, BT):
                        is_seen = T.And(key + j >= first[i], key + j < end[i])
                        acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], -T.infinity(accum_dtype))

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
                if T.And(step >= num_before, step < whole_end):
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
                                if T.And(key + token >= first[i], key + token < end[i]):
                                    # not turned round: of NaN, the compiler would get it wrong
                                    is_good = is_finite(V[key + token, head, j])
                                    acc_o[i, j] = T.if_then_else(is_good, acc_o[i, j], nan)

            # -- normalise and store --
            for i, j in T.Parallel(BQ, DVT):
                acc_o[i, j] = T.if_then_else(end[i] == first[i], 0, acc_o[i, j] / running_sum[i])
                if T.And(query + i // GP <= last_query, T.And(i % GP < G, j < DV)):
                    Output[query + i // GP, head, i % GP, j] = acc_o[i, j]
            for i in T.Parallel(BQ):
                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                is_empty = end[i] == first[i]
                running_sum[i] = T.if_then_else(is_empty, -T.infinity(accum_dtype), log_sum)
                if T.And(query + i // GP <= last_query, i % GP < G):
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
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float,
    out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to the last `window_size` keys.

    Args:
        q, k, v, rows, window_size, scale: as in `sliding_window.forward`.
        out: contiguous tensors to write to; None makes new ones.
        options: `BQ`, `BT`, `threads`, `num_stages`, in place of what `window_options` chooses, and
            `has_tma`, in place of what the GPU can do.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]` in fp32.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    o, lse = out or (
        v.new_empty(B, N, HQ, DV), v.new_empty(B, N, HQ, dtype=torch.float32)
    )  # fmt: skip
    if o.numel() == 0:
        return o, lse
    R, G, itemsize = B * N, HQ // H, q.element_size()
    options = window_options(G, D, DV, itemsize, shared_memory(q.device)) | options
    options = {"has_tma": loads_by_tma(q, v, options["threads"])} | options
    kernel = compiled(q.device.type, H, G, D, DV, dtype=dtype_of(q), **options)
    num_tiles = -(-N // (options["BQ"] // power_of_two(G)))
    kernel(
        rows_of(q).view(R, H, G, D), rows_of(k), rows_of(v), rows.first_key, rows.num_visible,
        o.view(R, H, G, DV), lse.view(R, H, G), scale, scale * LOG2_E, N, num_tiles,
        B * num_tiles, min(window_size, M),
    )  # fmt: skip
    return o, lse


def window_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, threads, num_stages`, as far as `shared_memory` allows: a warp for every 16 rows of
    a tile. Arguments as in `tilelang_tiles.dq_options`."""
    DT, DVT = summary_sides(D, DV, itemsize, wide=0)

    def size(BQ: int, BT: int, num_stages: int) -> int:
        """Bytes of queries, of keys and values, of clean values, of weights in fp32, and some."""
        weights = BQ * BT if itemsize == 4 else 0
        tiles = BQ * DT + num_stages * BT * (DT + DVT) + BT * DVT
        return (tiles + weights) * itemsize + 2048

    choices = TILES if itemsize == 2 else FP32_TILES
    if itemsize == 2 and DT + DVT > 256:  # wide outputs would not fit the registers
        choices = choices[1:]
    choices = [(max(BQ, power_of_two(G)), *others) for BQ, *others in choices]
    BQ, BT, num_stages = (*(c for c in choices if size(*c) <= shared_memory), choices[-1])[0]
    return {"BQ": BQ, "BT": BT, "threads": 2 * BQ, "num_stages": num_stages}


def power_of_two(n: int) -> int:
    """`n`, rounded up to one."""
    return 1 << (n - 1).bit_length()


def loads_by_tma(q: Tensor, v: Tensor, threads: int) -> bool:
    """Whether a warp group of its own loads by TMA. The others are warp groups then, since
    registers are dealt out to whole ones."""
    row_bytes = (q.shape[-1] * q.element_size(), v.shape[-1] * q.element_size())
    return threads % 128 == 0 and has_tma(q.device, *row_bytes)
