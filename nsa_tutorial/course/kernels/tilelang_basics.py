"""Chapter 09's four kernels in TileLang: copy, softmax of rows, matrix product, dense attention.

Each is the program of one tile, launched many times; `course.kernels.triton_basics` holds the same
four, phase by phase and name by name. A function here takes what is fixed when the kernel is
compiled (tile sizes, dtype) and returns the kernel, not yet compiled; lengths stay open
(`T.dynamic`). They are written to be read: no autotuning, nothing that depends on a particular GPU.

`compiled` compiles one for CUDA or, by `tilelang_cpu`, for the CPU. Launching is the business of
`course.kernels.two_tile_languages`.
"""

import functools

import tilelang
from tilelang import language as T
from tvm import tirx

from nsa_tutorial.kernels.tilelang.products import exact_gemm
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    # all threads of a program do the same work: warps that only load are no subject of chapter 09
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}
accum_dtype = "float32"


def copy(BN: int, dtype: str, threads: int = 128) -> tirx.PrimFunc:
    """`X [N]` to `Y [N]`."""
    N = T.dynamic("N")

    @T.prim_func
    def kernel(X: T.Tensor([N], dtype), Y: T.Tensor([N], dtype)):
        # -- locate the program --
        with T.Kernel(T.ceildiv(N, BN), threads=threads) as block:
            x_tile = T.alloc_fragment([BN], dtype)
            start = block * BN

            # -- load --
            T.copy(X[start : start + BN], x_tile)

            # -- store --
            T.copy(x_tile, Y[start : start + BN])

    return kernel


def softmax(BR: int, BN: int, dtype: str, threads: int = 128) -> tirx.PrimFunc:
    """Each row of `X [R, N]` to `Y [R, N]`; `BN` holds a whole row."""
    R, N = T.dynamic("R"), T.dynamic("N")

    @T.prim_func
    def kernel(X: T.Tensor([R, N], dtype), Y: T.Tensor([R, N], dtype), scale_log2: T.float32):
        # -- locate the program --
        with T.Kernel(T.ceildiv(R, BR), threads=threads) as block:
            x_tile = T.alloc_fragment([BR, BN], accum_dtype)
            scores_max = T.alloc_fragment([BR], accum_dtype)
            scores_sum = T.alloc_fragment([BR], accum_dtype)
            start = block * BR

            # -- load --
            T.copy(X[start : start + BR, 0:BN], x_tile)  # zeros past R and N

            # -- mask --
            for i, j in T.Parallel(BR, BN):
                x_tile[i, j] = T.if_then_else(j < N, x_tile[i, j], -T.infinity(accum_dtype))

            # -- softmax --
            T.reduce_max(x_tile, scores_max, dim=1)
            for i, j in T.Parallel(BR, BN):
                x_tile[i, j] = T.exp2((x_tile[i, j] - scores_max[i]) * scale_log2)
            T.reduce_sum(x_tile, scores_sum, dim=1)
            for i, j in T.Parallel(BR, BN):
                x_tile[i, j] = x_tile[i, j] / scores_sum[i]

            # -- store --
            T.copy(x_tile, Y[start : start + BR, 0:BN])

    return kernel


def matmul(
    N: int, K: int, BM: int, BN: int, BD: int, dtype: str, num_stages: int = 2, threads: int = 128
) -> tirx.PrimFunc:
    """`A [M, K]` times `B [K, N]` to `C [M, N]`. The compiler knows `N` and `K`: if rows begin at
    multiples of 16 bytes, one instruction of a thread loads 16 bytes."""
    M = T.dynamic("M")
    exact = dtype == "float32"  # T.gemm would round fp32 to TF32

    @T.prim_func
    def kernel(A: T.Tensor([M, K], dtype), B: T.Tensor([K, N], dtype), C: T.Tensor([M, N], dtype)):
        # -- locate the program --
        with T.Kernel(T.ceildiv(M, BM), T.ceildiv(N, BN), threads=threads) as (block_m, block_n):
            a_tile = T.alloc_shared([BM, BD], dtype)
            b_tile = T.alloc_shared([BD, BN], dtype)
            acc = T.alloc_fragment([BM, BN], accum_dtype)
            row = block_m * BM
            column = block_n * BN

            # -- initialise --
            T.clear(acc)

            for step in T.Pipelined(T.ceildiv(K, BD), num_stages=num_stages):
                depth = step * BD

                # -- load --
                T.copy(A[row : row + BM, depth : depth + BD], a_tile)
                T.copy(B[depth : depth + BD, column : column + BN], b_tile)

                # -- accumulate --
                if exact:
                    exact_gemm(a_tile, b_tile, acc, BM, BN, BD, transpose_B=False)
                else:
                    T.gemm(a_tile, b_tile, acc)

            # -- store --
            T.copy(acc, C[row : row + BM, column : column + BN])

    return kernel


def attention(
    G: int, D: int, DV: int, causal: bool, BQ: int, BK: int, DT: int, DVT: int, dtype: str,
    num_stages: int = 1, threads: int = 128,
) -> tirx.PrimFunc:  # fmt: skip
    """`Q [B, N, HQ, D]`, `K [B, M, H, D]`, `V [B, M, H, DV]` to `Output [B, N, HQ, DV]` and
    `LSE [B, N, HQ]`.

    `G` query heads share a key/value head. `DT` and `DVT` are `D` and `DV`, rounded up to what a
    gemm takes. One stage: TileLang 0.1.15 cannot lower two where the number of steps is open and
    keys and values are waited for one after the other.
    """
    batches, N, M, H = T.dynamic("batches"), T.dynamic("N"), T.dynamic("M"), T.dynamic("H")
    exact = dtype == "float32"  # T.gemm would round fp32 to TF32

    @T.prim_func
    def kernel(
        Q: T.Tensor([batches, N, H * G, D], dtype),
        K: T.Tensor([batches, M, H, D], dtype),
        V: T.Tensor([batches, M, H, DV], dtype),
        Output: T.Tensor([batches, N, H * G, DV], dtype),
        LSE: T.Tensor([batches, N, H * G], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(T.ceildiv(N, BQ), H * G, batches, threads=threads) as (block, head, batch):
            q_tile = T.alloc_shared([BQ, DT], dtype)
            k_tile = T.alloc_shared([BK, DT], dtype)
            v_tile = T.alloc_shared([BK, DVT], dtype)
            p_tile = T.alloc_shared([BQ, BK], dtype)
            acc_s = T.alloc_fragment([BQ, BK], accum_dtype)
            acc_o = T.alloc_fragment([BQ, DVT], accum_dtype)
            scores_max = T.alloc_fragment([BQ], accum_dtype)
            scores_max_prev = T.alloc_fragment([BQ], accum_dtype)
            scores_scale = T.alloc_fragment([BQ], accum_dtype)
            scores_sum = T.alloc_fragment([BQ], accum_dtype)
            running_sum = T.alloc_fragment([BQ], accum_dtype)
            kv_head = head // G
            start = block * BQ
            position = M - N + start  # the first query's: the queries are the last N positions
            num_keys = T.min(M, position + BQ) if causal else M

            # -- load the query tile --
            T.copy(Q[batch, start : start + BQ, head, 0:DT], q_tile)  # zeros past N and D

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.fill(scores_max, -T.infinity(accum_dtype))

            for step in T.Pipelined(T.ceildiv(num_keys, BK), num_stages=num_stages):
                # -- load the keys --
                key = step * BK
                T.copy(K[batch, key : key + BK, kv_head, 0:DT], k_tile)

                # -- scores --
                T.clear(acc_s)
                if exact:
                    exact_gemm(q_tile, k_tile, acc_s, BQ, BK, DT, transpose_B=True)
                else:
                    T.gemm(q_tile, k_tile, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

                # -- mask --
                for i, j in T.Parallel(BQ, BK):
                    visible = key + j < M
                    if causal:
                        visible = visible and key + j <= position + i
                    acc_s[i, j] = T.if_then_else(visible, acc_s[i, j], -T.infinity(accum_dtype))

                # -- online softmax --
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(BQ):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                for i, j in T.Parallel(BQ, BK):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - scores_max[i]) * scale_log2)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(BQ):
                    running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(BQ, DVT):
                    acc_o[i, j] *= scores_scale[i]

                # -- load the values --
                T.copy(V[batch, key : key + BK, kv_head, 0:DVT], v_tile)

                # -- accumulate --
                T.copy(acc_s, p_tile)
                if exact:
                    exact_gemm(p_tile, v_tile, acc_o, BQ, DVT, BK, transpose_B=False)
                else:
                    T.gemm(p_tile, v_tile, acc_o, policy=T.GemmWarpPolicy.FullRow)

            # -- normalise and store --
            for i, j in T.Parallel(BQ, DVT):
                acc_o[i, j] /= running_sum[i]
            for i in T.Parallel(BQ):
                running_sum[i] = scores_max[i] * scale + T.log(running_sum[i])
            T.copy(acc_o, Output[batch, start : start + BQ, head, 0:DVT])
            T.copy(running_sum, LSE[batch, start : start + BQ, head])

    return kernel


@functools.cache
def compiled(name: str, device: str, **options: object) -> tilelang.JITKernel:
    """The kernel of the function `name(**options)`, compiled for `device` (`"cpu"` or `"cuda"`),
    once per process."""
    functions = {"copy": copy, "softmax": softmax, "matmul": matmul, "attention": attention}
    kernel = functions[name](**options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    return tilelang.compile(kernel, target="cuda", pass_configs=PASS_CONFIGS)
