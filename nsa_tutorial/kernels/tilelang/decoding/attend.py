"""Chapter 15: the newest tokens attend to a cache, in TileLang, with the phases and the names of
`triton.decoding.attend`, where they are explained.

`build_summaries_and_window` and `build_lists` return kernels that are not yet compiled; `launch`
compiles and runs them. Numbers of rows, pages, parts and slots stay open, and so does the size of a
page: keys are `[pages, PAGE, H, D]`, and what is past the last page is read as zeros.

Symbols: those of `selected.forward`; `R = B * n` query rows · `P` parts of a row, those of the
summaries, then of the window, then of the lists.
"""

from tilelang import language as T
from tvm import tirx

from nsa_tutorial.kernels.tilelang.decoding.options import decoding_sides
from nsa_tutorial.kernels.tilelang.decoding.steps import (
    accum_dtype,
    accumulate,
    alloc_weights_of,
    initialise,
    load_tiles,
    page_row,
    scores_of,
    store_part,
)


def build_summaries_and_window(
    H: int, G: int, D: int, DV: int, length: int, stride: int, dtype: str, *,
    is_paged: bool, BT: int, threads: int,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `Q [R, H, G, D]`, summaries `K [pages, summaries of a page, H, D]`, the
    rings `KWindow [B, ring, H, D]` and their values; writes the parts `0 … splits + window_splits -
    1`, the scores of the summaries `[R, H, G, NC]`, unscaled, how many of them a row sees, and its
    position.

    The grid is `(R, H, splits + window_splits)`.

    Args:
        H, G, D, DV, dtype: as in `selected.forward.build_kernel`.
        length, stride: tokens of a summary, and from one to the next.
        is_paged: whether `Table [B, max_pages]` has the pages; otherwise row `b` is page `b`, and
            the table is not read.
        BT, threads: keys of a step, and threads of a program.
    """
    R, B, P, NC = T.dynamic("R"), T.dynamic("B"), T.dynamic("P"), T.dynamic("NC")
    pages, of_page, max_pages = T.dynamic("pages"), T.dynamic("of_page"), T.dynamic("max_pages")
    ring, rings = T.dynamic("ring"), T.dynamic("rings")
    GT, DT, DVT = decoding_sides(G, D, DV, 4 if dtype == "float32" else 2)
    alloc_weights, how = alloc_weights_of(dtype, GT, threads), (is_paged, BT)

    @T.prim_func
    def summaries_and_window_kernel(
        Q: T.Tensor([R, H, G, D], dtype),
        K: T.Tensor([pages, of_page, H, D], dtype),
        V: T.Tensor([pages, of_page, H, DV], dtype),
        KWindow: T.Tensor([rings, ring, H, D], dtype),
        VWindow: T.Tensor([rings, ring, H, DV], dtype),
        Lengths: T.Tensor([B], "int32"),
        Table: T.Tensor([B, max_pages], "int32"),
        Partials: T.Tensor([R, H, G, P, DV], accum_dtype),
        PartialLSE: T.Tensor([R, H, G, P], accum_dtype),
        Scores: T.Tensor([R, H, G, NC], accum_dtype),
        NumVisible: T.Tensor([R], "int32"),
        Position: T.Tensor([R], "int32"),
        scale: T.float32,
        scale_log2: T.float32,
        n: T.int32,
        splits: T.int32,
        window_splits: T.int32,
        window_size: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(R, H, splits + window_splits, threads=threads) as (row, head, part):
            q_tile = T.alloc_shared([GT, DT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            v_tile = T.alloc_shared([BT, DVT], dtype)
            page = T.alloc_shared([BT], "int32")
            place = T.alloc_shared([BT], "int32")
            acc_s = T.alloc_fragment([GT, BT], accum_dtype)
            p = alloc_weights([GT, BT], dtype)
            acc_o = T.alloc_fragment([GT, DVT], accum_dtype)
            scores_max = T.alloc_fragment([GT], accum_dtype)
            scores_max_prev = T.alloc_fragment([GT], accum_dtype)
            scores_scale = T.alloc_fragment([GT], accum_dtype)
            scores_sum = T.alloc_fragment([GT], accum_dtype)
            running_sum = T.alloc_fragment([GT], accum_dtype)
            numbers = (scores_max, scores_max_prev, scores_scale, scores_sum, running_sum)
            # variables: the compiler would write out an expression wherever its name stands
            batch = T.alloc_var("int32", init=row // n)
            position = T.alloc_var("int32", init=Lengths[batch] - n + row % n)
            ended = T.max(position + 1 - length + stride, 0)  # of what is positive
            num_visible = T.alloc_var("int32", init=ended // stride)
            # the first token of the window
            of_window = T.alloc_var("int32", init=T.max(position + 1 - window_size, 0))
            stop = T.alloc_var("int32", init=T.max(position + 1 - of_window, 0))
            share = T.alloc_var("int32", init=0)  # keys of a part, in whole tiles
            start = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            if part < splits:
                stop = num_visible
                share = T.ceildiv(T.ceildiv(stop, splits), BT) * BT
                start = part * share
            else:
                share = T.ceildiv(T.ceildiv(stop, window_splits), BT) * BT
                start = (part - splits) * share
            stop = T.min(start + share, stop)
            if part == 0:
                NumVisible[row] = num_visible
                Position[row] = position

            # -- load the queries --
            T.copy(Q[row, head, 0:GT, 0:DT], q_tile)  # [GT, DT], zeros past G and D

            # -- initialise --
            initialise(acc_o, running_sum, scores_max)

            if part < splits:
                # -- a part of the summaries --
                for step in T.serial(T.ceildiv(stop - start, BT)):
                    first = start + step * BT
                    page_row(Table, page, place, batch, first, stop - first, pages, of_page, *how)
                    load_tiles(K, V, page, place, k_tile, v_tile, head, BT, DT, DVT)
                    scores_of(q_tile, k_tile, acc_s, stop - first, GT, BT, DT)
                    for i, j in T.Parallel(GT, BT):
                        if T.And(i < G, first + j < stop):
                            Scores[row, head, i, first + j] = acc_s[i, j]
                    accumulate(acc_s, p, v_tile, acc_o, *numbers, scale_log2, GT, BT, DVT)
            else:
                # -- a part of the window --
                for step in T.serial(T.ceildiv(stop - start, BT)):
                    first = start + step * BT
                    for i in T.Parallel(BT):
                        page[i] = T.if_then_else(first + i < stop, batch, rings)
                        place[i] = (of_window + first + i) % ring
                    load_tiles(KWindow, VWindow, page, place, k_tile, v_tile, head, BT, DT, DVT)
                    scores_of(q_tile, k_tile, acc_s, stop - first, GT, BT, DT)
                    accumulate(acc_s, p, v_tile, acc_o, *numbers, scale_log2, GT, BT, DVT)

            # -- normalise and store --
            has_keys = start < stop
            store_part(
                acc_o, running_sum, scores_max, has_keys, Partials, PartialLSE, row, head, part,
                scale, G, GT, DVT,
            )  # fmt: skip

    return summaries_and_window_kernel


def build_lists(
    H: int, G: int, D: int, DV: int, BS: int, dtype: str, *,
    is_paged: bool, BT: int, threads: int,
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel that reads `K [pages, PAGE, H, D]`, `V`, and the lists `BlockIndices [R, H, S]`;
    writes the parts from `first_part` on. The grid is `(R, H, splits)`; part `i` takes every
    `splits`-th slot. Arguments as in `build_summaries_and_window`; `BS` tokens of a block."""
    R, B, P, S = T.dynamic("R"), T.dynamic("B"), T.dynamic("P"), T.dynamic("S")
    pages, PAGE, max_pages = T.dynamic("pages"), T.dynamic("PAGE"), T.dynamic("max_pages")
    GT, DT, DVT = decoding_sides(G, D, DV, 4 if dtype == "float32" else 2)
    steps = -(-BS // BT)
    alloc_weights, how = alloc_weights_of(dtype, GT, threads), (is_paged, BT)

    @T.prim_func
    def lists_kernel(
        Q: T.Tensor([R, H, G, D], dtype),
        K: T.Tensor([pages, PAGE, H, D], dtype),
        V: T.Tensor([pages, PAGE, H, DV], dtype),
        Lengths: T.Tensor([B], "int32"),
        Table: T.Tensor([B, max_pages], "int32"),
        BlockIndices: T.Tensor([R, H, S], "int32"),
        Partials: T.Tensor([R, H, G, P, DV], accum_dtype),
        PartialLSE: T.Tensor([R, H, G, P], accum_dtype),
        scale: T.float32,
        scale_log2: T.float32,
        n: T.int32,
        splits: T.int32,
        first_part: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(R, H, splits, threads=threads) as (row, head, part):
            q_tile = T.alloc_shared([GT, DT], dtype)
            k_tile = T.alloc_shared([BT, DT], dtype)
            v_tile = T.alloc_shared([BT, DVT], dtype)
            page = T.alloc_shared([BT], "int32")
            place = T.alloc_shared([BT], "int32")
            acc_s = T.alloc_fragment([GT, BT], accum_dtype)
            p = alloc_weights([GT, BT], dtype)
            acc_o = T.alloc_fragment([GT, DVT], accum_dtype)
            scores_max = T.alloc_fragment([GT], accum_dtype)
            scores_max_prev = T.alloc_fragment([GT], accum_dtype)
            scores_scale = T.alloc_fragment([GT], accum_dtype)
            scores_sum = T.alloc_fragment([GT], accum_dtype)
            running_sum = T.alloc_fragment([GT], accum_dtype)
            numbers = (scores_max, scores_max_prev, scores_scale, scores_sum, running_sum)
            num_keys = T.alloc_var("int32", init=0)
            batch = T.alloc_var("int32", init=row // n)
            position = T.alloc_var("int32", init=Lengths[batch] - n + row % n)
            block_id = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            num_here = T.alloc_var("int32", init=0)

            # -- load the queries --
            T.copy(Q[row, head, 0:GT, 0:DT], q_tile)  # [GT, DT], zeros past G and D

            # -- initialise --
            initialise(acc_o, running_sum, scores_max)

            for i in T.serial(T.ceildiv(T.max(S - part, 0), splits)):
                for step in T.serial(steps):
                    # -- guard --
                    block_id = BlockIndices[row, head, part + i * splits]
                    is_visible = T.And(block_id >= 0, block_id <= position // BS)
                    first = 0  # before the product, which could overflow
                    num_here = 0
                    if is_visible:
                        first = block_id * BS + step * BT
                        num_here = T.clamp(T.min(BS - step * BT, position + 1 - first), 0, BT)
                    num_keys += num_here

                    # -- keys, scores, values --
                    page_row(Table, page, place, batch, first, num_here, pages, PAGE, *how)
                    load_tiles(K, V, page, place, k_tile, v_tile, head, BT, DT, DVT)
                    scores_of(q_tile, k_tile, acc_s, num_here, GT, BT, DT)
                    accumulate(acc_s, p, v_tile, acc_o, *numbers, scale_log2, GT, BT, DVT)

            # -- normalise and store --
            store_part(
                acc_o, running_sum, scores_max, num_keys > 0, Partials, PartialLSE, row, head,
                first_part + part, scale, G, GT, DVT,
            )  # fmt: skip

    return lists_kernel
