"""Products of tiles: IEEE fp32 where tensors are fp32, the tensor cores' otherwise."""

from tilelang import language as T


@T.macro
def exact_gemm(A, B, C, rows, columns, depth, transpose_B):
    """`C += A @ B` in IEEE fp32. `T.gemm` would round fp32 inputs to TF32's ten bits for the tensor
    cores."""
    for d in T.serial(depth):
        for i, j in T.Parallel(rows, columns):
            if transpose_B:
                C[i, j] += A[i, d] * B[j, d]
            else:
                C[i, j] += A[i, d] * B[d, j]


@T.macro
def multiply(A, B, C, rows, columns, depth, transpose_B):
    """`C += A @ B`, or, with `transpose_B`, `A @ B.T`, as the dtype of `A` asks for; a warp has 16
    rows, and all columns."""
    if A.dtype == "float32":
        exact_gemm(A, B, C, rows, columns, depth, transpose_B)
    else:
        T.gemm(A, B, C, transpose_B=transpose_B, policy=T.GemmWarpPolicy.FullRow)
