"""Chapter 10: selected attention, forward, in TileLang; one program per (query, key/value head), as
one writes it for a GPU.

`build_kernel` makes the kernel from what is fixed at compile time (heads, group, widths, block
size, dtype). Numbers of queries, keys and slots stay open, so that no new length compiles anything.
`launch` runs it, on CUDA tensors, or on CPU tensors through C. The phases and the names are those
of `selected_attention.forward`, where they are explained.

`selected.launch` is what the operators call. There is no backward here, and no argument is checked:
`ops` does.
"""

import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.launch_options import launch_options, tile_rows, tile_sides
from nsa_tutorial.kernels.tilelang.products import exact_gemm
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.sparse.selected_attention import QueryRows


def rows_of(tensor, first, count):
    """`count` rows from `first` on, as a tensor of its own: outside of it, zeros are read."""
    # "rw" although nothing is written: otherwise C++ calls the tensor const, and allows no view
    start = T.access_ptr(tensor[first, 0, 0], "rw")
    return T.make_tensor(start, [count, *tensor.shape[1:]], tensor.dtype)


def build_kernel(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str = "float16", *,
    is_window: bool = False, has_factors: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel for `H` key/value heads, groups of `G` query heads, and blocks of `BS` tokens.

    Args:
        H, G, D, DV, BS, dtype: what is fixed when the kernel is compiled; `D` and `DV` are the
            widths of keys and values.
        is_window: every row sees all its keys, from the first on, and walks their blocks without
            a list.
        has_factors: each slot has a factor on its scores; otherwise `SlotScale` is never read.

    Returns:
        A TileLang function, not yet compiled, of `Q [rows, H, G, D]`, `K [keys, H, D]`,
        `V [keys, H, DV]`, `BlockIndices [rows, H, S]`, `SlotScale [rows, H, S]`,
        `FirstKey [rows]`, `NumVisible [rows]`, `Output [rows, H, G, DV]`, `LSE [rows, H, G]`,
        `scale` and `scale_log2`; `Output` and `LSE` are written.
    """
    rows, keys, S = T.dynamic("rows"), T.dynamic("keys"), T.dynamic("S")
    num_factors = S if has_factors else T.dynamic("num_factors")
    accum_dtype = "float32"
    # tiles: what the tensor cores take
    (GT, DT, DVT), BT = tile_sides(G, D, DV), tile_rows(BS)
    exact = dtype == "float32"
    options = launch_options(G, D, DV, BS)
    threads, num_stages = options["threads"], options["num_stages"]
    full_rows = T.GemmWarpPolicy.FullRow  # a warp has 16 rows of the group, all columns
    # where each warp has 16 rows, the weights stay in its registers from one product to the next
    in_registers = not exact and threads <= 2 * GT
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def selected_attention(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        BlockIndices: T.Tensor([rows, H, S], "int32"),
        SlotScale: T.Tensor([rows, H, num_factors], accum_dtype),
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
            lse = T.alloc_fragment([GT], accum_dtype)
            is_empty = T.alloc_var("bool", init=True)  # until a block is visible
            first_key = FirstKey[row]
            num_visible = NumVisible[row]
            num_blocks = (num_visible + BS - 1) // BS  # that hold a visible key
            K_seen = rows_of(K, first_key, num_visible)  # all that this row may see
            V_seen = rows_of(V, first_key, num_visible)

            # -- load the query group --
            T.copy(Q[row, head, 0:GT, 0:DT], Q_shared)  # [GT, DT], zeros past G and D

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN

            for slot in T.Pipelined(num_blocks if is_window else S, num_stages=num_stages):
                # -- guard --
                # An empty slot is the block before the first or behind the last: nothing is read
                # there, and no product below overflows. (In one expression: TileLang would repeat a
                # clamp that has a line of its own in each address.)
                block_id = (
                    slot if is_window else T.clamp(BlockIndices[row, head, slot], -1, num_blocks)
                )
                is_visible = T.And(block_id >= 0, block_id < num_blocks)
                is_empty = T.And(is_empty, T.Not(is_visible))
                block_start = block_id * BS
                num_seen = T.min(BS, num_visible - block_start)

                # -- load the keys --
                T.copy(K_seen[block_start : block_start + BT, head, 0:DT], K_shared)  # [BT, DT]

                # -- scores --
                T.clear(acc_s)
                if exact:
                    exact_gemm(Q_shared, K_shared, acc_s, GT, BT, DT, True)
                else:
                    T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=full_rows)
                if has_factors:  # what an empty slot has there is masked below
                    for i, j in T.Parallel(GT, BT):
                        acc_s[i, j] *= SlotScale[row, head, slot]

                # -- mask --
                for i, j in T.Parallel(GT, BT):
                    is_seen = T.And(is_visible, j < num_seen)
                    acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], -T.infinity(accum_dtype))

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
                # hidden rows are zeros: weight 0 hides a number, but 0 * NaN is NaN
                for i, j in T.Parallel(BT, DVT):
                    key = T.if_then_else(i < BS, block_start + i, num_visible)
                    V_shared[i, j] = V_seen[key, head, j]

                # -- accumulate --
                T.copy(acc_s, acc_s_cast)
                if exact:
                    exact_gemm(acc_s_cast, V_shared, acc_o, GT, DVT, BT, False)
                else:
                    T.gemm(acc_s_cast, V_shared, acc_o, policy=full_rows)

            # -- normalise and store --
            for i, j in T.Parallel(GT, DVT):
                acc_o[i, j] = T.if_then_else(is_empty, 0, acc_o[i, j] / running_sum[i])
            for i in T.Parallel(GT):
                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                lse[i] = T.if_then_else(is_empty, -T.infinity(accum_dtype), log_sum)
            T.copy(acc_o, Output[row, head, 0:GT, 0:DVT])
            T.copy(lse, LSE[row, head, 0:GT])

    return selected_attention


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, is_window: bool = False,
    out: tuple[Tensor, Tensor] | None = None, **options: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel.

    Args:
        q, k, v, ids, rows, block_size, scale, slot_scale: as in `selected_attention.forward`; a
            window has no list, `ids [R, H, 0]`.
        is_window: as for `build_kernel`.
        out: contiguous tensors for the results; None makes new ones.
        options: `pass_configs` of `compiling.compiled`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]` in fp32.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    R, G = B * N, HQ // H
    dtype = str(q.dtype).removeprefix("torch.")
    shape = (H, G, D, DV, block_size)
    kinds = {"is_window": is_window, "has_factors": slot_scale is not None}
    device = kind_of(q.device)
    kernel = compiled(build_kernel, device, *shape, dtype=dtype, **kinds, **options)
    factors = k.new_empty(R, H, 0, dtype=torch.float32) if slot_scale is None else slot_scale
    if out is None:
        out = (v.new_empty(B, N, HQ, DV), v.new_empty(B, N, HQ, dtype=torch.float32))
    o, lse = out
    kernel(
        q.reshape(R, H, G, D).contiguous(),
        k.reshape(B * M, H, D).contiguous(),
        v.reshape(B * M, H, DV).contiguous(),
        ids,
        factors.contiguous(),
        rows.first_key,
        rows.num_visible,
        o.view(R, H, G, DV),
        lse.view(R, H, G),
        scale,
        scale * LOG2_E,
    )
    return o, lse
