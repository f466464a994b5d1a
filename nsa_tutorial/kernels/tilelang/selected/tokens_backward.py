"""The backward of `selected.tokens_forward`, in TileLang, with the phases and the names of
`triton.selected.tokens_backward`, which says why keys and values get their gradients by atomics.
Lists of blocks of a few tokens come as lists of their tokens.

Where they may not, `adds` is off, and the kernel writes the queries' gradients alone.
`backward_launch` compiles and runs it.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.tilelang.launch_options import token_sides
from nsa_tutorial.kernels.tilelang.products import multiply
from nsa_tutorial.kernels.tilelang.selected.backward import stages
from nsa_tutorial.kernels.tilelang.selected.forward import rows_of
from nsa_tutorial.kernels.tilelang.selected.tokens_forward import listed

accum_dtype = "float32"


def build_gradients(
    H: int, G: int, D: int, DV: int, dtype: str, *,
    GR: int, BT: int, threads: int, num_stages: int, has_factors: bool = False,
    adds: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads and writes what that of `selected.backward.build_dq` does, with one sum
    a slot, and with `adds` adds to `SumK [keys, H, D]` and `SumV [keys, H, DV]`, fp32."""
    rows, keys, S = T.dynamic("rows"), T.dynamic("keys"), T.dynamic("S")
    num_factors = S if has_factors else T.dynamic("num_factors")
    num_sums = keys if adds else T.dynamic("num_sums")
    _, DT, DVT = token_sides(G, D, DV, 4 if dtype == "float32" else 2)
    PARTS = -(-G // GR)  # programs of a group
    others = 8 + 3 * has_factors + 8 * adds  # statements of a step besides its loads
    ahead = stages(num_stages, 2, others) if num_stages > 1 else {"num_stages": 0}
    inf = T.infinity(accum_dtype)

    @T.macro
    def add_to(Sums, tile, token, first_key, head, width):
        """Add what a step has found to the sums of its tokens."""
        for j, d in T.Parallel(BT, width):
            if T.And(token[j] >= 0, d < Sums.shape[2]):
                T.atomic_add(Sums[first_key + token[j], head, d], tile[j, d])

    @T.prim_func
    def gradient_kernel(
        Q: T.Tensor([rows, H, G, D], dtype),
        K: T.Tensor([keys, H, D], dtype),
        V: T.Tensor([keys, H, DV], dtype),
        GradO: T.Tensor([rows, H, G, DV], dtype),
        LSE: T.Tensor([rows, H, G], accum_dtype),
        Delta: T.Tensor([rows, H, G], accum_dtype),
        LSE2: T.Tensor([rows, H, G], accum_dtype),
        Tokens: T.Tensor([rows, H, S], "int32"),
        SlotScale: T.Tensor([rows, H, num_factors], accum_dtype),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        GradQ: T.Tensor([rows, H, G, D], dtype),
        GradSlotScale: T.Tensor([rows, H, num_factors], accum_dtype),
        SumK: T.Tensor([num_sums, H, D], accum_dtype),
        SumV: T.Tensor([num_sums, H, DV], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(rows, H, PARTS, threads=threads) as (row, head, part):
            Q_shared = T.alloc_shared([GR, DT], dtype)
            DO_shared = T.alloc_shared([GR, DVT], dtype)
            K_shared = T.alloc_shared([BT, DT], dtype)
            V_shared = T.alloc_shared([BT, DVT], dtype)
            token = T.alloc_shared([BT], "int32")
            p = T.alloc_shared([GR, BT], dtype)
            d_s = T.alloc_shared([GR, BT], dtype)
            acc_s = T.alloc_fragment([GR, BT], accum_dtype)
            d_p = T.alloc_fragment([GR, BT], accum_dtype)
            acc_dq = T.alloc_fragment([GR, DT], accum_dtype)
            d_k = T.alloc_fragment([BT, DT], accum_dtype)
            d_v = T.alloc_fragment([BT, DVT], accum_dtype)
            d_factor = T.alloc_fragment([BT], accum_dtype)
            lse = T.alloc_shared([GR], accum_dtype)
            delta = T.alloc_shared([GR], accum_dtype)
            first_head = part * GR  # of the group
            first_key = FirstKey[row]
            num_visible = NumVisible[row]
            lse2 = LSE2[row, head, 0]  # infinite or NaN for the whole group
            num_steps = T.if_then_else(lse2 != inf, T.ceildiv(S, BT), 0)
            # where the group is not finite, neither are the gradients of the keys that it sees
            spoiled = T.if_then_else(lse2 == lse2, 0.0, lse2)
            K_seen = rows_of(K, first_key, num_visible)  # all that this row may see
            V_seen = rows_of(V, first_key, num_visible)

            # -- load the query group --
            # [GR, DT], [GR, DVT], zeros past G, D and DV
            T.copy(Q[row, head, first_head : first_head + GR, 0:DT], Q_shared)
            T.copy(GradO[row, head, first_head : first_head + GR, 0:DVT], DO_shared)
            for i in T.Parallel(GR):
                lse[i] = LSE[row, head, first_head + i] * LOG2_E  # in base two
                delta[i] = Delta[row, head, first_head + i]

            # -- initialise --
            T.clear(acc_dq)

            for step in T.Pipelined(num_steps, **ahead):
                # -- load the keys and the values --
                for j, d in T.Parallel(BT, DT):
                    its_token = listed(Tokens, row, head, step * BT + j, S)
                    K_shared[j, d] = K_seen[its_token, head, d]
                for j, d in T.Parallel(BT, DVT):
                    its_token = listed(Tokens, row, head, step * BT + j, S)
                    V_shared[j, d] = V_seen[its_token, head, d]

                # -- weights --
                for j in T.Parallel(BT):
                    its_token = listed(Tokens, row, head, step * BT + j, S)
                    token[j] = T.if_then_else(its_token < num_visible, its_token, -1)
                T.clear(acc_s)
                multiply(Q_shared, K_shared, acc_s, GR, BT, DT, True)

                # -- gradient of the scores --
                T.clear(d_p)
                multiply(DO_shared, V_shared, d_p, GR, BT, DVT, True)
                for i, j in T.Parallel(GR, BT):
                    factor = SlotScale[row, head, step * BT + j] if has_factors else 1.0
                    weight = T.exp2(acc_s[i, j] * (scale_log2 * factor) - lse[i])
                    is_seen = token[j] >= 0
                    if adds:
                        p[i, j] = T.if_then_else(
                            T.And(is_seen, first_head + i < G), weight + spoiled, 0
                        )
                    d_p[i, j] = T.if_then_else(is_seen, weight * (d_p[i, j] - delta[i]), 0)
                if has_factors:
                    for i, j in T.Parallel(GR, BT):
                        acc_s[i, j] = T.if_then_else(first_head + i < G, acc_s[i, j] * d_p[i, j], 0)
                        factor = SlotScale[row, head, step * BT + j]
                        d_p[i, j] *= T.if_then_else(token[j] >= 0, factor, 0)
                    T.reduce_sum(acc_s, d_factor, dim=0)
                    for j in T.Parallel(BT):
                        if token[j] >= 0:
                            of_token = d_factor[j] * scale
                            if PARTS == 1:
                                GradSlotScale[row, head, step * BT + j] = of_token
                            else:
                                T.atomic_add(GradSlotScale[row, head, step * BT + j], of_token)

                # -- accumulate --
                T.copy(d_p, d_s)
                multiply(d_s, K_shared, acc_dq, GR, DT, BT, False)

                # -- add to the keys and the values --
                if adds:
                    T.clear(d_v)
                    T.gemm(p, DO_shared, d_v, transpose_A=True)
                    add_to(SumV, d_v, token, first_key, head, DVT)
                    for i, j in T.Parallel(GR, BT):
                        d_s[i, j] = T.if_then_else(
                            first_head + i < G, d_s[i, j] + T.cast(spoiled, dtype), 0
                        )
                    T.clear(d_k)
                    T.gemm(d_s, Q_shared, d_k, transpose_A=True)
                    for j, d in T.Parallel(BT, DT):
                        d_k[j, d] *= scale
                    add_to(SumK, d_k, token, first_key, head, DT)

            # -- store --
            for i, j in T.Parallel(GR, DT):
                acc_dq[i, j] *= scale
            T.copy(acc_dq, GradQ[row, head, first_head : first_head + GR, 0:DT])

    return gradient_kernel
