"""Selected attention in TileLang as it is usually published, with four mistakes to find.

The design is that of TileLang's public forward example
(examples/deepseek_nsa/example_tilelang_nsa_fwd.py): everything is fixed at compile time but the
numbers of queries and keys, the grid runs over (query, tile of value channels, batch times
key/value head), the guard is a branch, and the causal mask is the accumulator's starting value.
Three of the four mistakes stand there: `update_max`, `is_seen` and `normalise`. The fourth,
`fold_scale`, stands in the decode example beside it (example_tilelang_nsa_decode.py); the forward
example multiplies a caller's scale by log2(e), too.

The four places are arguments, so that each can be mended alone; `MISTAKES` are the mistakes,
`MENDED` is right, and with `MENDED` it is what `tilelang.selected.forward` is measured against.

Use `ops.selected_attention` for anything but study.
"""

import functools
from collections.abc import Callable

import tilelang
import torch
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime.devices import kind_of
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}
accum_dtype = "float32"


# -- the four mistakes --
@T.macro
def update_max(acc_s, scores_max):
    """The maximum of this block: the maximum of the blocks before is forgotten."""
    T.fill(scores_max, -T.infinity(accum_dtype))
    T.reduce_max(acc_s, scores_max, dim=1, clear=True)


def is_seen(query, key, num_keys, causal):
    """Whether a query sees a key: nothing is said of keys past the last one."""
    return query >= key if causal else True


@T.macro
def normalise(acc_o, running_sum, G, BV):
    """Divide by the sum of the weights, also where there are none."""
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / running_sum[i]


def fold_scale(scale, D):
    """The factor for `exp2`: the default has its log2(e), the caller's own scale has not."""
    return D**-0.5 * LOG2_E if scale is None else scale


# -- the same four, mended --
@T.macro
def update_running_max(acc_s, scores_max):
    """The maximum of this block and of the blocks before."""
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)


def is_seen_and_exists(query, key, num_keys, causal):
    """Whether a query sees a key, which lies before the end."""
    return T.And(key < num_keys, query >= key) if causal else key < num_keys


@T.macro
def normalise_or_zero(acc_o, running_sum, G, BV):
    """Divide by the sum of the weights; a row without any is 0, and NaN stays NaN."""
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])


def fold_any_scale(scale, D):
    """The factor for `exp2`, whoever gave the scale."""
    return (D**-0.5 if scale is None else scale) * LOG2_E


MISTAKES = {
    "update_max": update_max,
    "is_seen": is_seen,
    "normalise": normalise,
    "fold_scale": fold_scale,
}
MENDED = {
    "update_max": update_running_max,
    "is_seen": is_seen_and_exists,
    "normalise": normalise_or_zero,
    "fold_scale": fold_any_scale,
}


def build_kernel(
    batch: int, heads: int, groups: int, D: int, BS: int, S: int, *,
    causal: bool = True, scale: float | None = None, dtype: str = "float16",
    threads: int = 32, num_stages: int = 2,
    update_max: Callable = update_max, is_seen: Callable = is_seen,
    normalise: Callable = normalise, fold_scale: Callable = fold_scale,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel for `heads` query heads in groups of `groups`, width `D`, and lists of `S` blocks
    of `BS` tokens.

    With `H = heads // groups`, it is a TileLang function of `Q [batch, N, heads, D]`,
    `K [batch, M, H, D]`, `V [batch, M, H, D]`, `BlockIndices [batch, N, H, S]` and
    `Output [batch, N, heads, D]`, which is written. Queries are the first positions.
    """
    N, M = T.dynamic("N"), T.dynamic("M")
    H, G = heads // groups, groups
    BD = BV = min(128, tilelang.math.next_power_of_2(D))  # channels of a key tile, a value tile
    NK, NV = tilelang.cdiv(D, BD), tilelang.cdiv(D, BV)
    assert NK == 1, f"D: got {D}, expected at most 128: a key's channels are one tile here"
    scale_log2 = fold_scale(scale, D)
    full_rows = T.GemmWarpPolicy.FullRow  # a warp has 16 rows of the group, all columns

    @T.prim_func
    def first_draft(
        Q: T.Tensor([batch, N, heads, D], dtype),
        K: T.Tensor([batch, M, H, D], dtype),
        V: T.Tensor([batch, M, H, D], dtype),
        BlockIndices: T.Tensor([batch, N, H, S], "int32"),
        Output: T.Tensor([batch, N, heads, D], dtype),
    ):
        # -- locate the program --
        with T.Kernel(N, NV, batch * H, threads=threads) as (i_t, i_v, i_bh):
            Q_shared = T.alloc_shared([G, BD], dtype)
            K_shared = T.alloc_shared([BS, BD], dtype)
            V_shared = T.alloc_shared([BS, BV], dtype)
            O_shared = T.alloc_shared([G, BV], dtype)
            acc_s = T.alloc_fragment([G, BS], accum_dtype)
            acc_s_cast = T.alloc_shared([G, BS], dtype)
            acc_o = T.alloc_fragment([G, BV], accum_dtype)
            scores_max = T.alloc_fragment([G], accum_dtype)
            scores_max_prev = T.alloc_fragment([G], accum_dtype)
            scores_scale = T.alloc_fragment([G], accum_dtype)
            scores_sum = T.alloc_fragment([G], accum_dtype)
            running_sum = T.alloc_fragment([G], accum_dtype)
            i_b, i_h = i_bh // H, i_bh % H

            # -- load the query group --
            T.copy(Q[i_b, i_t, i_h * G : (i_h + 1) * G, 0:BD], Q_shared)

            # -- initialise --
            T.fill(acc_o, 0)
            T.fill(running_sum, 0)
            T.fill(scores_max, -T.infinity(accum_dtype))

            for i in T.Pipelined(S, num_stages=num_stages):
                # -- guard --
                i_s = BlockIndices[i_b, i_t, i_h, i] * BS
                if i_s <= (i_t if causal else M - 1) and i_s >= 0:
                    # -- load the keys --
                    T.copy(K[i_b, i_s : i_s + BS, i_h, 0:BD], K_shared)

                    # -- mask --
                    for g, j in T.Parallel(G, BS):
                        visible = is_seen(i_t, i_s + j, M, causal)
                        acc_s[g, j] = T.if_then_else(visible, 0, -T.infinity(accum_dtype))

                    # -- scores --
                    T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=full_rows)

                    # -- online softmax --
                    T.copy(scores_max, scores_max_prev)
                    update_max(acc_s, scores_max)
                    for g in T.Parallel(G):
                        scores_scale[g] = T.exp2(
                            scores_max_prev[g] * scale_log2 - scores_max[g] * scale_log2
                        )
                    for g, j in T.Parallel(G, BS):
                        acc_s[g, j] = T.exp2(acc_s[g, j] * scale_log2 - scores_max[g] * scale_log2)
                    T.reduce_sum(acc_s, scores_sum, dim=1)
                    for g in T.Parallel(G):
                        running_sum[g] = running_sum[g] * scores_scale[g] + scores_sum[g]
                    for g, j in T.Parallel(G, BV):
                        acc_o[g, j] *= scores_scale[g]

                    # -- load the values --
                    T.copy(V[i_b, i_s : i_s + BS, i_h, i_v * BV : (i_v + 1) * BV], V_shared)

                    # -- accumulate --
                    T.copy(acc_s, acc_s_cast)
                    T.gemm(acc_s_cast, V_shared, acc_o, policy=full_rows)

            # -- normalise and store --
            normalise(acc_o, running_sum, G, BV)
            T.copy(acc_o, O_shared)
            T.copy(O_shared, Output[i_b, i_t, i_h * G : (i_h + 1) * G, i_v * BV : (i_v + 1) * BV])

    return first_draft


@functools.cache
def compiled(device: str, *sizes: int, **options: object) -> tilelang.JITKernel:
    """The kernel of `build_kernel(*sizes, **options)`, compiled for `kind_of` a device, once per
    process."""
    kernel = build_kernel(*sizes, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    return tilelang.compile(kernel, target="cuda", pass_configs=PASS_CONFIGS)


def run(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, block_size: int, **options: object
) -> Tensor:
    """Launch the draft.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, D]`; a group has 16 query heads or a
            multiple, `D` is 16 to 128 and a power of two, as the design wants them. They are not
            checked.
        block_indices: `[B, N, H, S]` int32.
        block_size: tokens per block, a multiple of 16.
        options: of `build_kernel`; the mistakes stay where nothing else is given.

    Returns:
        `[B, N, HQ, D]`.
    """
    (B, _, HQ, D), H, S = q.shape, k.shape[2], block_indices.shape[3]
    dtype = str(q.dtype).removeprefix("torch.")
    kernel = compiled(kind_of(q.device), B, HQ, HQ // H, D, block_size, S, dtype=dtype, **options)
    ids = block_indices.to(torch.int32).contiguous()
    o = torch.empty_like(q)
    kernel(q.contiguous(), k.contiguous(), v.contiguous(), ids, o)
    return o
