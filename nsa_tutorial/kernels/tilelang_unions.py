"""Chapter 16: the unions of neighbours' lists, made on the device, in TileLang.

`build_find_bad` looks for values that are not finite, `build_union` makes the tables that
`tilelang_query_tiles` walks along, by comparing each entry of a tile's lists with all others,
`unions` runs both. No argument is checked here: `ops` does.

Symbols: those of `tilelang_forward`; `TQ` queries of a tile · `SP` slots, rounded up to a power of
two · `U = TQ * S` entries of a union at most.
"""

import functools
from typing import NamedTuple

import tilelang
from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.kernels.tilelang_forward import PASS_CONFIGS
from nsa_tutorial.kernels.tilelang_selection import is_finite
from nsa_tutorial.kernels.tilelang_selection_launch import dtype_of
from nsa_tutorial.kernels.tilelang_windows import power_of_two
from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu
from nsa_tutorial.sparse.selected_attention import QueryRows

ANY_LENGTH = 1.0  # of a union, as a share of its lists' entries
SCANNED = 8192  # numbers that a program looks at for one that is not finite


class Unions(NamedTuple):
    """What `build_union` writes, int32.

    Attributes:
        start: `[tiles, H, U]`, the first key of each block of the union, among all keys. Blocks
            that need no mask come first.
        listed_by: `[tiles, H, U]`, bit `t` is set where query `t` of the tile lists the block. A
            block that a list names twice is there twice.
        count: `[tiles, H]`, entries of the union, or -1 for a tile that is left to others.
        num_whole: `[tiles, H]`, how many of them need no mask.
        TQ: queries of a tile.
    """

    start: Tensor
    listed_by: Tensor
    count: Tensor
    num_whole: Tensor
    TQ: int


def build_find_bad(W: int, dtype: str) -> tirx.PrimFunc:
    """The kernel that sets `IsBad [1]` to 1 if a number of `X [n, W]` is not finite."""
    n = T.dynamic("n")
    num_rows = SCANNED // W  # of a program

    @T.prim_func
    def find_bad_kernel(X: T.Tensor([n, W], dtype), IsBad: T.Tensor([1], "int32")):
        with T.Kernel(T.ceildiv(n, num_rows), threads=128) as program:
            is_bad = T.alloc_fragment([SCANNED], "int32")
            any_bad = T.alloc_fragment([1], "int32")
            for i in T.Parallel(SCANNED):  # zeros past the end
                x = X[program * num_rows + i // W, i % W]
                # not turned round: of NaN, the compiler would get it wrong
                is_bad[i] = T.if_then_else(is_finite(x), 0, 1)
            T.reduce_max(is_bad, any_bad, dim=0)
            if any_bad[0] > 0:
                IsBad[0] = 1

    return find_bad_kernel


def build_union(H: int, BS: int, TQ: int, SP: int, *, has_whole: bool) -> tirx.PrimFunc:
    """The kernel that reads `BlockIndices [rows, H, S]`, `FirstKey [rows]`, `NumVisible [rows]` and
    `IsBad [1]`, and writes the tensors of `Unions`.

    The grid is `(tiles, H)`. Every entry of the tile's lists is compared with every other. Without
    `has_whole`, all steps go behind a mask, as they do if a value is not finite.
    """
    rows, S, tiles, U = T.dynamic("rows"), T.dynamic("S"), T.dynamic("tiles"), T.dynamic("U")
    N = TQ * SP

    @T.prim_func
    def union_kernel(
        BlockIndices: T.Tensor([rows, H, S], "int32"),
        FirstKey: T.Tensor([rows], "int32"),
        NumVisible: T.Tensor([rows], "int32"),
        IsBad: T.Tensor([1], "int32"),
        Start: T.Tensor([tiles, H, U], "int32"),
        ListedBy: T.Tensor([tiles, H, U], "int32"),
        Count: T.Tensor([tiles, H], "int32"),
        NumWhole: T.Tensor([tiles, H], "int32"),
        most: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(tiles, H, threads=max(32, min(N, 256))) as (tile, head):
            key = T.alloc_shared([N], "int32")  # a block's first key, or -1
            is_whole = T.alloc_shared([N], "int32")
            nth = T.alloc_shared([N], "int32")  # so often has the list named the block before
            listed_by = T.alloc_shared([N], "int32")
            kind = T.alloc_shared([N], "int32")  # 2: of the union, without a mask; 1: with one

            # -- load the lists --
            for i in T.Parallel(N):
                query = tile * TQ + i // SP
                is_slot = T.And(query < rows, i % SP < S)
                block = T.if_then_else(is_slot, BlockIndices[query, head, i % SP], -1)
                num_visible = NumVisible[query]
                is_visible = T.And(block >= 0, block < T.ceildiv(num_visible, BS))
                key[i] = T.if_then_else(is_visible, FirstKey[query] + block * BS, -1)
                whole = T.And(has_whole and IsBad[0] == 0, block * BS + BS <= num_visible)
                is_whole[i] = T.if_then_else(whole, 1, 0)
            for i in T.Parallel(N):
                before = T.alloc_var("int32", init=0)
                for slot in T.serial(SP):
                    if T.And(slot < i % SP, key[i // SP * SP + slot] == key[i]):
                        before += 1
                nth[i] = before

            # -- join --
            for i in T.Parallel(N):
                bits = T.alloc_var("int32", init=0)
                in_part = T.alloc_var("int32", init=0)
                before = T.alloc_var("int32", init=0)
                for other in T.serial(N):
                    if T.And(key[other] == key[i], nth[other] == nth[i]):
                        bits |= 1 << (other // SP)
                        in_part |= 1 - is_whole[other]
                        if other < i:
                            before = 1
                is_first = T.And(key[i] >= 0, before == 0)
                kind[i] = T.if_then_else(is_first, 2 - in_part, 0)
                listed_by[i] = bits

            # -- store, the whole blocks first --
            for i in T.Parallel(N):
                num_whole = T.alloc_var("int32", init=0)
                num_careful = T.alloc_var("int32", init=0)
                num_entries = T.alloc_var("int32", init=0)
                place = T.alloc_var("int32", init=0)
                for other in T.serial(N):
                    num_whole += kind[other] // 2
                    num_careful += kind[other] % 2
                    num_entries += T.if_then_else(key[other] >= 0, 1, 0)
                    if T.And(other < i, kind[other] == kind[i]):
                        place += 1
                if kind[i] > 0:
                    place += T.if_then_else(kind[i] == 1, num_whole, 0)
                    Start[tile, head, place] = key[i]
                    ListedBy[tile, head, place] = listed_by[i]
                if i == 0:
                    count = num_whole + num_careful
                    is_wanted = count <= most * num_entries
                    Count[tile, head] = T.if_then_else(is_wanted, count, -1)
                    NumWhole[tile, head] = num_whole
                    if count == 0:  # where the one step begins that such a tile makes
                        Start[tile, head, 0] = 0

    return union_kernel


@functools.cache
def compiled(name: str, device: str, *shape: int, **options: object) -> tilelang.JITKernel:
    """The kernel `name` of `shape` and `options`, compiled for `"cpu"` or `"cuda"`, once per
    process."""
    builders = {"find_bad": build_find_bad, "union": build_union}
    kernel = builders[name](*shape, **options)
    if device == "cpu":
        return compile_for_cpu(kernel)
    return tilelang.compile(kernel, target="cuda", pass_configs=PASS_CONFIGS)


def unions(
    v: Tensor, ids: Tensor, rows: QueryRows, *, block_size: int, TQ: int, BT: int,
    most: float = ANY_LENGTH,
) -> Unions:  # fmt: skip
    """The unions of the lists of every `TQ` neighbours.

    Args:
        v: contiguous values; with one number in them that is not finite, all blocks need a mask.
        ids, rows: as in `selected_attention.forward`.
        TQ: queries of a tile, at most 16.
        BT: tokens of a step. Where it does not divide a block, all steps go behind a mask.
        most: of the entries of a tile's lists, the share up to which its union is wanted.
    """
    (R, H, S), device = ids.shape, v.device.type
    num_tiles, width = -(-R // TQ), v.shape[3]
    is_bad = ids.new_zeros(1)
    compiled("find_bad", device, width, dtype=dtype_of(v))(v.view(-1, width), is_bad)
    start, listed_by = (ids.new_empty(num_tiles, H, TQ * S) for _ in range(2))
    count, num_whole = (ids.new_empty(num_tiles, H) for _ in range(2))
    made = Unions(start, listed_by, count, num_whole, TQ)
    union = compiled(
        "union", device, H, block_size, TQ, power_of_two(S), has_whole=block_size % BT == 0
    )  # fmt: skip
    union(ids, rows.first_key, rows.num_visible, is_bad, *made[:4], float(most))
    return made
