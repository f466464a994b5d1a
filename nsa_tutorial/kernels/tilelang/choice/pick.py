"""Chapter 14: the choice of blocks, in TileLang, with the phases and the names of
`triton.choice.pick`, where they are explained.

`build_pick` returns a kernel that is not yet compiled; `launch` compiles and runs it.
"""

from tilelang import language as T
from tvm import tirx

accum_dtype = "float32"
INFINITY = 0x7F800000  # its bits, in fp32


def build_pick(
    H: int, BS: int, C: int, SHARES: int, K: int, NB: int, *, has_counts: bool, threads: int
) -> tirx.PrimFunc:
    """The kernel that reads `Scores [SHARES, some, H, NC]`, `NumVisible [rows]`, `Position [rows]`
    and, with `has_counts`, `BlockCounts [rows, H]`, and writes `BlockIndices [rows, H, n]`.

    The grid is `(num_rows, H)`: a program makes a list. `NB` is a power of two that holds all
    blocks of a sequence, and `K` summaries at most share tokens with a block.
    """
    rows, n = T.dynamic("rows"), T.dynamic("n")
    some, NC, num_counts = T.dynamic("some"), T.dynamic("NC"), T.dynamic("num_counts")

    @T.prim_func
    def pick_kernel(
        Scores: T.Tensor([SHARES, some, H, NC], accum_dtype),
        NumVisible: T.Tensor([rows], "int32"),
        Position: T.Tensor([rows], "int32"),
        BlockCounts: T.Tensor([rows if has_counts else num_counts, H], "int32"),
        BlockIndices: T.Tensor([rows, H, n], "int32"),
        first_row: T.int32,
        num_rows: T.int32,
        num_initial: T.int32,
        num_local: T.int32,
        length: T.int32,
        stride: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(num_rows, H, threads=threads) as (local_row, head):
            score = T.alloc_fragment([NB], accum_dtype)
            bits = T.alloc_fragment([NB], "int32")
            flag = T.alloc_fragment([NB], "int32")
            found = T.alloc_fragment([1], "int32")
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=INFINITY + 1)
            last = T.alloc_var("int32", init=-1)
            num_equal = T.alloc_var("int32", init=0)
            row = first_row + local_row
            num_visible = NumVisible[row]
            own = Position[row] // BS
            num_taken = T.min(n, BlockCounts[row, head]) if has_counts else n

            # -- from cells to blocks --
            T.clear(score)
            if C == 1:  # a summary counts by the tokens that it shares with the block
                for i in T.serial(K):
                    for block in T.Parallel(NB):
                        # of what is positive
                        first = (block * BS - length + length * stride) // stride + 1 - length
                        begin = (first + i) * stride
                        common = T.min(begin + length, block * BS + BS) - T.max(begin, block * BS)
                        exists = T.And(first + i >= 0, first + i < num_visible)
                        if T.And(exists, common > 0):
                            share = T.cast(common, accum_dtype) / T.cast(stride, accum_dtype)
                            score[block] += Scores[0, local_row, head, first + i] * share
            else:
                for share in T.unroll(SHARES):
                    for block in T.Parallel(NB):
                        cell = block - share
                        if T.And(cell >= 0, cell < T.ceildiv(num_visible, C)):
                            score[block] += Scores[share, local_row, head, cell]

            # -- force and hide --
            for block in T.Parallel(NB):
                is_forced = T.Or(block < num_initial, block > own - num_local)
                # NaN is worth nothing; numbers of at least 0 are in the order of their bits
                number = T.if_then_else(score[block] >= 0, score[block], 0)
                of_score = T.reinterpret(number, "int32")
                bits[block] = T.if_then_else(is_forced, INFINITY, of_score)
                bits[block] = T.if_then_else(block <= own, bits[block], -1)

            # -- halve the range, down to the bits of the last block that is taken --
            while high - low > 1:
                middle = low + (high - low) // 2
                for block in T.Parallel(NB):
                    flag[block] = T.if_then_else(bits[block] >= middle, 1, 0)
                T.reduce_sum(flag, found, dim=0)
                if found[0] >= num_taken:
                    low = middle
                if found[0] <= num_taken:
                    high = T.if_then_else(found[0] == num_taken, low + 1, middle)

            # -- take what is above, and of what is equal the lower ids --
            for block in T.Parallel(NB):
                flag[block] = T.if_then_else(bits[block] > low, 1, 0)
            T.reduce_sum(flag, found, dim=0)
            num_equal = num_taken - found[0]

            # -- store --
            # the next one, as twice its id, and one more where it is equal: the order of the ids
            for slot in T.serial(n):
                for block in T.Parallel(NB):
                    is_equal = T.And(bits[block] == low, num_equal > 0)
                    is_next = T.And(block > last, T.Or(bits[block] > low, is_equal))
                    code = block * 2 + T.if_then_else(bits[block] == low, 1, 0)
                    flag[block] = T.if_then_else(is_next, code, 2 * NB)
                T.reduce_min(flag, found, dim=0)
                is_found = T.And(slot < num_taken, found[0] < 2 * NB)
                last = T.if_then_else(is_found, found[0] // 2, NB)
                num_equal = num_equal - found[0] % 2
                BlockIndices[row, head, slot] = T.if_then_else(is_found, found[0] // 2, -1)

    return pick_kernel
