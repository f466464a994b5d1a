"""Chapter 15: what joins the parts of `attend`, in TileLang, with the phases and the names of
`triton.decoding.merge`, where they are explained: attention to each summary, summed over a group,
and the merge of all parts and branches.

`build_mass` and `build_merge` return kernels that are not yet compiled; `launch` compiles and runs
them. Numbers of rows, parts and summaries stay open.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.kernels.tables.parts import MOST_PARTS

accum_dtype = "float32"
MASS_SUMMARIES, MASS_THREADS = 256, 128  # of a program
MERGE_THREADS = 32
PARTS_AT_ONCE = 8  # whose loads do not wait for each other


def build_mass(H: int, G: int) -> tirx.PrimFunc:
    """The kernel that reads `Scores [R, H, G, NC]`, the log-sum-exps `PartialLSE [R, H, G, P]` of
    the first `parts` parts and `NumVisible [R]`; writes the attention that each visible summary
    gets from a group, `Mass [1, R, H, NC]`.

    The grid is `(R, H, tiles of BC summaries)`; tiles past what is visible do nothing.
    """
    R, P, NC = T.dynamic("R"), T.dynamic("P"), T.dynamic("NC")
    BC, GT, PT = MASS_SUMMARIES, max(16, 1 << (G - 1).bit_length()), MOST_PARTS

    @T.prim_func
    def mass_kernel(
        Scores: T.Tensor([R, H, G, NC], accum_dtype),
        PartialLSE: T.Tensor([R, H, G, P], accum_dtype),
        NumVisible: T.Tensor([R], "int32"),
        Mass: T.Tensor([1, R, H, NC], accum_dtype),
        scale: T.float32,
        parts: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(R, H, T.ceildiv(NC, BC), threads=MASS_THREADS) as (row, head, tile):
            lse_tile = T.alloc_fragment([GT, PT], accum_dtype)
            shift = T.alloc_fragment([GT], accum_dtype)
            total = T.alloc_fragment([GT], accum_dtype)
            lse = T.alloc_shared([GT], accum_dtype)
            mass = T.alloc_fragment([BC], accum_dtype)
            first = tile * BC
            num_visible = NumVisible[row]

            if first < num_visible:
                # -- merge the parts' sums --
                for i, j in T.Parallel(GT, PT):
                    exists = T.And(i < G, j < parts)
                    found = T.if_then_else(
                        exists, PartialLSE[row, head, i, j], -T.infinity(accum_dtype)
                    )
                    lse_tile[i, j] = found
                T.reduce_max(lse_tile, shift, dim=1)
                for i in T.Parallel(GT):  # 0 where all are -inf
                    is_empty = shift[i] == -T.infinity(accum_dtype)
                    shift[i] = T.if_then_else(is_empty, 0, shift[i])
                for i, j in T.Parallel(GT, PT):
                    lse_tile[i, j] = T.exp(lse_tile[i, j] - shift[i])
                T.reduce_sum(lse_tile, total, dim=1)
                for i in T.Parallel(GT):
                    lse[i] = shift[i] + T.log(T.if_then_else(total[i] == 0, 1, total[i]))

                # -- weights, summed over the group --
                T.clear(mass)
                for g in T.serial(G):
                    for j in T.Parallel(BC):
                        if first + j < num_visible:
                            score = Scores[row, head, g, first + j]
                            mass[j] += T.exp(score * scale - lse[g])

                # -- store --
                for j in T.Parallel(BC):
                    if first + j < num_visible:
                        Mass[0, row, head, first + j] = mass[j]

    return mass_kernel


@T.macro
def merge_branch(
    acc, o_tile, lse_tile, largest, total, Partials, PartialLSE, Gate, row, first, end, DVT
):
    """Adds one branch to `acc [DVT]`: its parts `first … end - 1`, merged, times its gate."""
    if first < end:
        for i in T.Parallel(MOST_PARTS):
            exists = first + i < end
            lse_tile[i] = T.if_then_else(
                exists, PartialLSE[row, first + i], -T.infinity(accum_dtype)
            )
        T.reduce_max(lse_tile, largest, dim=0)
        shift = T.if_then_else(largest[0] == -T.infinity(accum_dtype), 0, largest[0])
        for i in T.Parallel(MOST_PARTS):
            lse_tile[i] = T.exp(lse_tile[i] - shift)
        T.reduce_sum(lse_tile, total, dim=0)
        T.clear(o_tile)
        for start in T.serial(T.ceildiv(end - first, PARTS_AT_ONCE)):
            for i in T.unroll(PARTS_AT_ONCE):
                part = first + start * PARTS_AT_ONCE + i
                if part < end:
                    # a part without keys has weight 0, and zeros
                    weight = T.exp(PartialLSE[row, part] - shift)
                    for j in T.Parallel(DVT):
                        o_tile[j] += weight * Partials[row, part, j]
        for j in T.Parallel(DVT):  # a total of 0: no part has keys
            acc[j] += Gate[row] * (o_tile[j] / T.if_then_else(total[0] == 0, 1, total[0]))


def build_merge(DV: int, dtype: str, gate_dtype: str) -> tirx.PrimFunc:
    """The kernel that reads `Partials [rows, P, DV]`, `PartialLSE [rows, P]` and the gates `[rows]`
    of compression, selection and window; writes `Output [rows, DV]`. The grid is `(rows,)`, of all
    query heads; a branch without parts is left out, and its gate not read."""
    rows, P = T.dynamic("rows"), T.dynamic("P")
    DVT = max(MERGE_THREADS, 1 << (DV - 1).bit_length())

    @T.prim_func
    def merge_kernel(
        Partials: T.Tensor([rows, P, DV], accum_dtype),
        PartialLSE: T.Tensor([rows, P], accum_dtype),
        Gate0: T.Tensor([rows], gate_dtype),
        Gate1: T.Tensor([rows], gate_dtype),
        Gate2: T.Tensor([rows], gate_dtype),
        Output: T.Tensor([rows, DV], dtype),
        summary_parts: T.int32,
        window_parts: T.int32,
        list_parts: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(rows, threads=MERGE_THREADS) as row:
            acc = T.alloc_fragment([DVT], accum_dtype)
            o_tile = T.alloc_fragment([DVT], accum_dtype)
            lse_tile = T.alloc_fragment([MOST_PARTS], accum_dtype)
            largest = T.alloc_fragment([1], accum_dtype)
            total = T.alloc_fragment([1], accum_dtype)
            tiles = (acc, o_tile, lse_tile, largest, total, Partials, PartialLSE)
            lists = summary_parts + window_parts  # the first of their parts

            # -- branch by branch --
            T.clear(acc)
            merge_branch(*tiles, Gate0, row, 0, summary_parts, DVT)
            merge_branch(*tiles, Gate1, row, lists, lists + list_parts, DVT)
            merge_branch(*tiles, Gate2, row, summary_parts, lists, DVT)

            # -- store --
            T.copy(acc, Output[row, 0:DVT])  # nothing past DV

    return merge_kernel
