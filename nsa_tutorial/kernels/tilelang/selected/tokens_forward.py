"""Selected attention with tokens for blocks, forward, in TileLang, with the phases and the names of
`triton.selected.tokens_forward`.

`selected.forward` takes one block a step, and the tensor cores take at least 16 tokens. Here a step
takes the next `BT` tokens of a list, and gathers their keys and values row by row. Lists of blocks
of two, four or eight come as lists of their tokens.

`launch` runs it, on CUDA tensors, or on CPU tensors through C.
"""

import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.launch_options import token_options, token_sides
from nsa_tutorial.kernels.tilelang.products import multiply
from nsa_tutorial.kernels.tilelang.selected.backward import stages
from nsa_tutorial.kernels.tilelang.selected.forward import rows_of
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

accum_dtype = "float32"


def listed(Tokens, row, head, place, S):
    """The token at a `place` of a list; -1, of which zeros are read, behind its end."""
    return T.if_then_else(place < S, Tokens[row, head, place], -1)


def build_kernel(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    GR: int, BT: int, threads: int, num_stages: int, has_factors: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads and writes what that of `selected.forward.build_kernel` does, for
    lists `Tokens [rows, H, S]`; `GR`, `BT`, `threads` and `num_stages` as
    `launch_options.token_options` has them."""
    rows, keys, S = T.dynamic("rows"), T.dynamic("keys"), T.dynamic("S")
    num_factors = S if has_factors else T.dynamic("num_factors")
    _, DT, DVT = token_sides(G, D, DV, 4 if dtype == "float32" else 2)
    PARTS = -(-G // GR)  # programs of a group
    others = 15 if has_factors else 14  # statements of a step besides its loads
    ahead = stages(num_stages, 2, others) if num_stages > 1 else {"num_stages": 0}
    # where each warp has 16 rows, the weights stay in its registers from one product to the next
    in_registers = dtype != "float32" and threads <= 2 * GR
    alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared

    @T.prim_func
    def tokens_kernel(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        Tokens: T.Tensor([rows, H, S], "int32"),
        SlotScale: T.Tensor([rows, H, num_factors], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        Output: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(rows, H, PARTS, threads=threads) as (row, head, part):
            Q_shared = T.alloc_shared([GR, DT], dtype)
            K_shared = T.alloc_shared([BT, DT], dtype)
            V_shared = T.alloc_shared([BT, DVT], dtype)
            is_seen = T.alloc_fragment([BT], "int32")
            sees_any = T.alloc_fragment([1], "int32")
            acc_s = T.alloc_fragment([GR, BT], accum_dtype)
            acc_s_cast = alloc_weights([GR, BT], dtype)
            acc_o = T.alloc_fragment([GR, DVT], accum_dtype)
            scores_max = T.alloc_fragment([GR], accum_dtype)
            scores_max_prev = T.alloc_fragment([GR], accum_dtype)
            scores_scale = T.alloc_fragment([GR], accum_dtype)
            scores_sum = T.alloc_fragment([GR], accum_dtype)
            running_sum = T.alloc_fragment([GR], accum_dtype)
            lse = T.alloc_fragment([GR], accum_dtype)
            first_head = part * GR  # of the group
            first_key = FirstKey[row]
            num_visible = NumVisible[row]
            K_seen = rows_of(K, first_key, num_visible)  # all that this row may see
            V_seen = rows_of(V, first_key, num_visible)

            # -- load the query group --
            # [GR, DT], zeros past G and D
            T.copy(Q[row, head, first_head : first_head + GR, 0:DT], Q_shared)

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.clear(sees_any)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN

            for step in T.Pipelined(T.ceildiv(S, BT), **ahead):
                # -- load the keys and the values --
                # hidden rows are zeros: weight 0 hides a number, but 0 * NaN is NaN
                for j, d in T.Parallel(BT, DT):
                    token = listed(Tokens, row, head, step * BT + j, S)
                    K_shared[j, d] = K_seen[token, head, d]
                for j, d in T.Parallel(BT, DVT):
                    token = listed(Tokens, row, head, step * BT + j, S)
                    V_shared[j, d] = V_seen[token, head, d]

                # -- scores --
                T.clear(acc_s)
                multiply(Q_shared, K_shared, acc_s, GR, BT, DT, True)
                if has_factors:
                    for i, j in T.Parallel(GR, BT):
                        acc_s[i, j] *= SlotScale[row, head, step * BT + j]

                # -- mask --
                for j in T.Parallel(BT):
                    token = listed(Tokens, row, head, step * BT + j, S)
                    is_seen[j] = T.if_then_else(T.And(token >= 0, token < num_visible), 1, 0)
                T.reduce_max(is_seen, sees_any, dim=0, clear=False)
                for i, j in T.Parallel(GR, BT):
                    is_hidden = is_seen[j] == 0
                    acc_s[i, j] = T.if_then_else(is_hidden, -T.infinity(accum_dtype), acc_s[i, j])

                # -- online softmax --
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(GR):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                for i, j in T.Parallel(GR, BT):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - scores_max[i]) * scale_log2)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(GR):
                    running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(GR, DVT):
                    acc_o[i, j] *= scores_scale[i]

                # -- accumulate --
                T.copy(acc_s, acc_s_cast)
                multiply(acc_s_cast, V_shared, acc_o, GR, DVT, BT, False)

            # -- normalise and store --
            for i, j in T.Parallel(GR, DVT):
                acc_o[i, j] = T.if_then_else(sees_any[0] == 0, 0, acc_o[i, j] / running_sum[i])
            for i in T.Parallel(GR):
                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                lse[i] = T.if_then_else(sees_any[0] == 0, -T.infinity(accum_dtype), log_sum)
            T.copy(acc_o, Output[row, head, first_head : first_head + GR, 0:DVT])
            T.copy(lse, LSE[row, head, first_head : first_head + GR])

    return tokens_kernel


def launch(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, rows: QueryRows, *, scale: float,
    slot_scale: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel: arguments and results as in `selected.forward.launch`, for lists of
    tokens."""
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    R, G = B * N, HQ // H
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    kernel = compiled(
        build_kernel, kind_of(q.device), H, G, D, DV,
        str(q.dtype).removeprefix("torch."), has_factors=slot_scale is not None,
        **token_options(G, D, DV, **memory),
    )  # fmt: skip
    factors = k.new_empty(R, H, 0, dtype=torch.float32) if slot_scale is None else slot_scale
    if out is None:
        out = (v.new_empty(B, N, HQ, DV), v.new_empty(B, N, HQ, dtype=torch.float32))
    o, lse = out
    kernel(
        q.reshape(R, H, G, D).contiguous(), k.reshape(B * M, H, D).contiguous(),
        v.reshape(B * M, H, DV).contiguous(), tokens, factors.contiguous(), rows.first_key,
        rows.num_visible, o.view(R, H, G, DV), lse.view(R, H, G), scale, scale * LOG2_E,
    )  # fmt: skip
    return o, lse
