"""Selected attention, forward, in TileLang: one program per (query, key/value head), as one writes
it for a GPU.

`build_kernel` makes the kernel from what is fixed at compile time (heads, group, widths, block
size, dtype). Numbers of queries, keys and slots stay open, so that no new length compiles anything.
`forward` calls it on CUDA tensors, or on CPU tensors through C. The phases and the names are those
of `selected_attention.forward`, where they are explained.

There is no backward here, and no argument is checked: `ops.selected_attention` does.
"""

import functools

import tilelang
import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse.selected_attention import QueryRows
from nsa_tutorial.sparse.sliding_window import as_selection

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    # a program is one warp, too small to split into warps that load and warps that compute; and the
    # results would be wrong
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}
# Widest tile and longest block up to which a row holds, warps for every 16 rows of a group's tile,
# stages. Behind it milliseconds with 1, 2 and 4 warps: H200, torch 2.11, TileLang 0.1.15, 16,384
# tokens, 4 key/value heads, 1,024 keys a query, fp16, G 16; one run, to be had again by `python -m
# nsa_tutorial.bench selected --steps --tokens 16384` with the widths and blocks in question. What
# more stages do is in assets/tilelang_forward_h200.json.
LAUNCH_TABLE = (
    (
        128,
        64,
        1,
        1,
        # D 128: 3.6, 4.4, 4.6; D 64: 1.9, 2.2, 2.8; D 32: 1.1, 1.4, 2.2; G 64, D 128: 6.7 with 1,
        # 8.9 with 2
    ),
    # D 192, DV 128: 13.8, 5.5, 7.2; D 256: 11.7, 7.9, 8.6; D 128, blocks of 128: 5.3, 4.1, 4.8
    (256, 128, 2, 1),
)

WINDOW_BLOCK = 64  # tokens of a window that are taken at a time
# A kernel holds the keys and the values of one block on chip. This many bytes fit on every GPU from
# sm_80 on, with room for the queries; a longer block is walked in equal parts.
LARGEST_KERNEL_TILE = 64 * 1024


def tile_rows(n: int) -> int:
    """`n` rounded up to what the tensor cores take: a multiple of 16."""
    return -(-n // 16) * 16


@T.macro
def exact_gemm(A, B, C, rows, columns, depth, transpose_B):
    """`C += A @ B` in IEEE fp32. `T.gemm` would round fp32 inputs to TF32's ten bits for the matrix
    units."""
    for d in T.serial(depth):
        for i, j in T.Parallel(rows, columns):
            if transpose_B:
                C[i, j] += A[i, d] * B[j, d]
            else:
                C[i, j] += A[i, d] * B[d, j]


def build_kernel(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str = "float16", S: int | None = None,
    threads: int | None = None, num_stages: int | None = None, async_values: bool = True,
    weights_in_registers: bool | None = None,
    one_list: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel for `H` key/value heads, groups of `G` query heads, widths `D` and `DV`, and
    blocks of `BS` tokens.

    Args:
        H, G, D, DV, BS, dtype: what is fixed when the kernel is compiled.
        S: slots of a list, where they are fixed too; None leaves them open.
        threads, num_stages: of a program, and of its pipeline: 1 starts the next block's copies as
            soon as a tile is free, 0 waits for each copy, more need a fixed `S`. None is what
            `launch_options` chooses.
        async_values: hide values by their index, so that the copy can run past the registers
            (`cp.async`), as that of the keys does; otherwise by a choice between two numbers, for
            which they have to be in registers.
        weights_in_registers: keep the weights there between the two products; None is wherever it
            is possible.
        one_list: every row walks the same list, `BlockIndices [S]`, as windows do.

    Returns:
        A TileLang function, not yet compiled, of `Q [rows, H, G, D]`, `K [keys, H, D]`,
            `V [keys, H, DV]`,
        `BlockIndices [rows, H, S]`, `FirstKey [rows]`, `NumVisible [rows]`,
            `Output [rows, H, G, DV]`, `LSE [rows, H, G]`,
        `scale` and `scale_log2`; `Output` and `LSE` are written.
    """
    rows, keys, S = T.dynamic("rows"), T.dynamic("keys"), S or T.dynamic("S")
    accum_dtype = "float32"
    # tiles: what the tensor cores take
    GT, BT, DT, DVT = tile_rows(G), tile_rows(BS), tile_rows(D), tile_rows(DV)
    exact = dtype == "float32"
    chosen = launch_options(G, D, DV, BS)
    threads = threads or chosen["threads"]
    num_stages = chosen["num_stages"] if num_stages is None else num_stages
    if weights_in_registers is None:
        weights_in_registers = not exact and threads <= 2 * GT
    alloc_weights = T.alloc_fragment if weights_in_registers else T.alloc_shared

    @T.prim_func
    def selected_attention(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        BlockIndices: T.Tensor([S] if one_list else [rows, H, S], "int32"),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        Output: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(rows, H, threads=threads) as (row, head):
            Q_shared = T.alloc_shared([GT, DT], dtype)
            K_shared = T.alloc_shared([BT, DT], dtype)
            V_shared = T.alloc_shared([BT, DVT], dtype)
            acc_s = T.alloc_fragment([GT, BT], accum_dtype)
            acc_s_cast = alloc_weights([GT, BT], dtype)
            acc_o = T.alloc_fragment([GT, DVT], accum_dtype)
            scores_max = T.alloc_fragment([GT], accum_dtype)
            scores_max_prev = T.alloc_fragment([GT], accum_dtype)
            scores_scale = T.alloc_fragment([GT], accum_dtype)
            scores_sum = T.alloc_fragment([GT], accum_dtype)
            running_sum = T.alloc_fragment([GT], accum_dtype)
            is_empty = T.alloc_var("bool", init=True)  # until a block is visible
            first_key = FirstKey[row]
            num_visible = NumVisible[row]

            # -- load the query group --
            T.copy(Q[row, head, 0:GT, 0:DT], Q_shared)  # [GT, DT], zeros past G and D

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN

            for slot in T.Pipelined(S, num_stages=num_stages):
                # -- guard --
                block_id = BlockIndices[slot] if one_list else BlockIndices[row, head, slot]
                is_visible = T.And(block_id >= 0, block_id < (num_visible + BS - 1) // BS)
                is_empty = T.And(is_empty, T.Not(is_visible))
                # an empty slot lies past the last key, where nothing is read
                block_start = T.if_then_else(is_visible, first_key + block_id * BS, keys)
                num_seen = T.if_then_else(is_visible, T.min(BS, num_visible - block_id * BS), 0)

                # -- load the keys --
                T.copy(K[block_start : block_start + BT, head, 0:DT], K_shared)

                # -- scores --
                T.clear(acc_s)
                if exact:
                    exact_gemm(Q_shared, K_shared, acc_s, GT, BT, DT, True)
                else:
                    T.gemm(
                        Q_shared, K_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow
                    )

                # -- mask --
                for i, j in T.Parallel(GT, BT):
                    acc_s[i, j] = T.if_then_else(
                        j < num_seen, acc_s[i, j], -T.infinity(accum_dtype)
                    )

                # -- online softmax --
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(GT):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                for i, j in T.Parallel(GT, BT):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - scores_max[i]) * scale_log2)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(GT):
                    running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(GT, DVT):
                    acc_o[i, j] *= scores_scale[i]

                # -- load the values --
                # no plain copy: weight 0 hides a number, but 0 * NaN is NaN
                for i, j in T.Parallel(BT, DVT):
                    if async_values:  # past the last key zeros are read
                        V_shared[i, j] = V[
                            T.if_then_else(i < num_seen, block_start + i, keys), head, j
                        ]
                    else:
                        V_shared[i, j] = T.if_then_else(
                            i < num_seen, V[block_start + i, head, j], T.cast(0, dtype)
                        )

                # -- accumulate --
                T.copy(acc_s, acc_s_cast)
                if exact:
                    exact_gemm(acc_s_cast, V_shared, acc_o, GT, DVT, BT, False)
                else:
                    T.gemm(acc_s_cast, V_shared, acc_o, policy=T.GemmWarpPolicy.FullRow)

            # -- normalise and store --
            for i, j in T.Parallel(GT, DVT):
                acc_o[i, j] = T.if_then_else(is_empty, 0, acc_o[i, j] / running_sum[i])
            for i in T.Parallel(GT):
                running_sum[i] = T.if_then_else(
                    is_empty,
                    -T.infinity(accum_dtype),
                    scores_max[i] * scale + T.log(running_sum[i]),
                )
            T.copy(acc_o, Output[row, head, 0:GT, 0:DVT])
            T.copy(running_sum, LSE[row, head, 0:GT])

    return selected_attention


def launch_options(G: int, D: int, DV: int, BS: int) -> dict[str, int]:
    """Threads of a program and stages of its pipeline for a shape, from `LAUNCH_TABLE`; past its
    end its last row."""
    fitting = [row for row in LAUNCH_TABLE if row[0] >= max(D, DV) and row[1] >= BS] or [
        LAUNCH_TABLE[-1]
    ]
    _, _, warps, stages = fitting[0]
    sixteens = tile_rows(G) // 16
    # warps take equal shares of the rows, and are not too many
    shares = max(n for n in range(1, 9) if sixteens % n == 0)
    return {"threads": 32 * warps * shares, "num_stages": stages}


@functools.cache
def compiled(
    device: str,
    *shape: int,
    pass_configs: tuple[tuple[str, object], ...] = tuple(PASS_CONFIGS.items()),
    **options: object,
) -> tilelang.JITKernel:
    """The kernel of `build_kernel(*shape, **options)`, compiled for `device` (`"cpu"` or `"cuda"`),
    once per process."""
    kernel = build_kernel(*shape, **options)
    return (
        compile_for_cpu(kernel)
        if device == "cpu"
        else tilelang.compile(kernel, target="cuda", pass_configs=dict(pass_configs))
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    rows: QueryRows,
    *,
    block_size: int,
    scale: float,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments and results as in `selected_attention.forward`, on CUDA or CPU
    tensors.

    `options` are those of `compiled` and of `build_kernel`, for measuring what each of them does.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    G = HQ // H
    ids, block_size = split_long_blocks(ids, block_size, (D + DV) * q.element_size())
    dtype = str(q.dtype).removeprefix("torch.")
    kernel = compiled(q.device.type, H, G, D, DV, block_size, dtype=dtype, **options)
    o = torch.empty(B * N, H, G, DV, dtype=v.dtype, device=v.device)
    lse = torch.empty(B * N, H, G, dtype=torch.float32, device=v.device)
    kernel(
        q.reshape(B * N, H, G, D).contiguous(),
        k.reshape(B * M, H, D).contiguous(),
        v.reshape(B * M, H, DV).contiguous(),
        ids,
        rows.first_key,
        rows.num_visible,
        o,
        lse,
        scale,
        scale * LOG2_E,
    )
    return o.reshape(B, N, HQ, DV), lse.reshape(B, N, HQ)


def split_long_blocks(ids: Tensor, block_size: int, bytes_per_token: int) -> tuple[Tensor, int]:
    """Blocks too long for a kernel's tile, as lists of equal parts: ids `[R, H, S * parts]` and the
    size of a part."""
    most = min(128, LARGEST_KERNEL_TILE // bytes_per_token)
    parts = next(
        p for p in range(1, block_size + 1) if block_size % p == 0 and block_size // p <= most
    )
    if parts == 1:
        return ids, block_size
    # an id this large is past the end of any sequence
    limit = torch.iinfo(torch.int32).max // parts
    part = torch.arange(parts, dtype=ids.dtype, device=ids.device)
    split = torch.where((ids >= 0) & (ids < limit), ids, -1)[..., None] * parts + part
    return split.masked_fill(split < 0, -1).flatten(-2).contiguous(), block_size // parts


def sliding_window(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Launch the same kernel on windows, as lists of blocks; arguments and results as in
    `sliding_window.forward`."""
    ids, rows = as_selection(
        rows, window_size=min(window_size, k.shape[1]), block_size=WINDOW_BLOCK
    )
    return forward(q, k, v, ids, rows, block_size=WINDOW_BLOCK, scale=scale, one_list=True)


def selection_and_window(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int,
    window_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both over the same keys and values, in two launches: `o [2, B, N, HQ, DV]` and `lse [2, B, N,
    HQ]`, of the lists, then of the windows."""
    lists = forward(q, k, v, ids, rows, block_size=block_size, scale=scale)
    windows = sliding_window(q, k, v, rows, window_size=window_size, scale=scale)
    o, lse = (torch.stack(pair) for pair in zip(lists, windows, strict=True))
    return o, lse
