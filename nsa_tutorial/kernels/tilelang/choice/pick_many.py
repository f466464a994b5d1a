"""The best of many blocks, or many of them, in TileLang, with the phases and the names of
`triton.choice.pick_many`, where they are explained.

`build_pick_many` returns a kernel that is not yet compiled; `index_launch` compiles and runs it.
"""

from tilelang import language as T
from tvm import tirx

INFINITY = 0x7F800000  # its bits, in fp32


def build_pick_many(H: int, BS: int, *, threads: int) -> tirx.PrimFunc:
    """The kernel that reads `Scores [some, H, NC]`, numbers of at least 0, and `Position [rows]`;
    and writes `BlockIndices [rows, H, n]`, from row `first_row` on.

    The grid is `(num_rows, H)`: a program makes a list. In the last walk each thread has a run of
    blocks of its own, and the runs before it say with which slot it begins.
    """
    rows, n, some, NC = T.dynamic("rows"), T.dynamic("n"), T.dynamic("some"), T.dynamic("NC")

    @T.macro
    def bits_of_block(score, block, own, num_initial, num_local):
        """What is compared: the bits of a score, of a forced block infinity's, of the future's
        -1."""
        is_forced = T.Or(block < num_initial, block > own - num_local)
        bits = T.reinterpret(score, "int32")
        return T.if_then_else(block <= own, T.if_then_else(is_forced, INFINITY, bits), -1)

    @T.prim_func
    def pick_many_kernel(
        Scores: T.Tensor([some, H, NC], "float32"),
        Position: T.Tensor([rows], "int32"),
        BlockIndices: T.Tensor([rows, H, n], "int32"),
        first_row: T.int32,
        num_rows: T.int32,
        num_initial: T.int32,
        num_local: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(num_rows, H, threads=threads) as (local_row, head):
            count = T.alloc_shared([256], "int32")
            above = T.alloc_shared([threads], "int32")
            equal = T.alloc_shared([threads], "int32")
            found = T.alloc_shared([2], "int32")  # the digit, and what is above it
            low = T.alloc_var("int32", init=0)
            missing = T.alloc_var("int32", init=0)
            row = first_row + local_row
            own = Position[row] // BS
            num_taken = T.min(n, own + 1)
            missing = num_taken

            # -- eight bits after the other, down to those of the last block that is taken --
            for place in T.serial(4):
                for digit in T.Parallel(256):
                    count[digit] = 0
                for step in T.serial(T.ceildiv(own + 1, threads)):
                    for t in T.Parallel(threads):
                        bits = T.alloc_var("int32")
                        block = step * threads + t
                        bits = bits_of_block(
                            Scores[local_row, head, T.min(block, own)], block, own, num_initial,
                            num_local,
                        )  # fmt: skip
                        if bits >> T.min(31, 32 - 8 * place) == low:  # at first, of all but -1
                            T.atomic_add(count[(bits >> (24 - 8 * place)) & 255], 1)
                for one in T.Parallel(1):
                    more = T.alloc_var("int32", init=0)
                    is_found = T.alloc_var("int32", init=0)
                    for i in T.serial(256):
                        here = count[255 - i]
                        if T.And(is_found == 0, more + here >= missing):
                            is_found = 1
                            found[one] = 255 - i
                            found[one + 1] = more
                        more += here
                missing = missing - found[1]
                low = low * 256 + found[0]

            # -- take what is above, and of what is equal the lower ids --
            length = T.ceildiv(own + 1, threads)  # of a thread's run
            for t in T.Parallel(threads):
                more = T.alloc_var("int32", init=0)
                same = T.alloc_var("int32", init=0)
                for i in T.serial(length):
                    block = t * length + i
                    bits = T.alloc_var("int32")
                    bits = bits_of_block(
                        Scores[local_row, head, T.min(block, own)], block, own, num_initial,
                        num_local,
                    )  # fmt: skip
                    more += T.if_then_else(bits > low, 1, 0)
                    same += T.if_then_else(bits == low, 1, 0)
                above[t] = more
                equal[t] = same
            for one in T.Parallel(1):
                more = T.alloc_var("int32", init=0)
                same = T.alloc_var("int32", init=0)
                for t in T.serial(threads):
                    a = above[one + t]
                    e = equal[one + t]
                    above[one + t] = more
                    equal[one + t] = same
                    more += a
                    same += e
            for t in T.Parallel(threads):
                slot = T.alloc_var("int32", init=0)
                same = T.alloc_var("int32", init=0)
                same = equal[t]
                slot = above[t] + T.min(same, missing)
                for i in T.serial(length):
                    block = t * length + i
                    bits = T.alloc_var("int32")
                    bits = bits_of_block(
                        Scores[local_row, head, T.min(block, own)], block, own, num_initial,
                        num_local,
                    )  # fmt: skip
                    is_taken = T.Or(bits > low, T.And(bits == low, same < missing))
                    same += T.if_then_else(bits == low, 1, 0)
                    if is_taken:
                        BlockIndices[row, head, slot] = block
                        slot += 1

            # -- fill up --
            for step in T.serial(T.ceildiv(n - num_taken, threads)):
                for t in T.Parallel(threads):
                    slot = num_taken + step * threads + t
                    if slot < n:
                        BlockIndices[row, head, slot] = -1

    return pick_many_kernel
