"""Chapter 16: selected attention with a tile of queries in each program, in Triton.

Neighbouring queries list much the same blocks. Here `T` of them walk the *union* of their lists
together: a block is fetched once for all, and a bit for each query says who listed it. With `T`
queries times the heads of a group, a product has enough rows for the tensor cores.

`unions` makes the unions, `kernel` walks them, `launch` runs both. Whether that pays depends
on how much neighbours share, and only the device knows it. So the device decides tile by tile: if a
union is too long, the kernel with one query in a program (`selected.forward_tma`) takes the tile.
The host never waits.

Symbols: those of `selected.forward` and `unions`; `GP` heads of a group, rounded up to a power
of two · `TR = T * GP` rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.descriptors import token_boxes
from nsa_tutorial.kernels.triton.launch_options import query_tile_options, tile_sizes
from nsa_tutorial.kernels.triton.online_softmax import online_softmax_of_rows
from nsa_tutorial.kernels.triton.unions import ANY_LENGTH, MOST_WARPS, Unions, num_warps, unions
from nsa_tutorial.runtime.rounding import next_power_of_2
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


@triton.jit
def load_tile(
    X, Descriptor, key, head, H, num_keys, WIDTH: tl.constexpr, WT: tl.constexpr, BT: tl.constexpr
):
    """The rows `key … key + BT - 1` of one head of `X [keys, H, WIDTH]`, zeros past the end."""
    if Descriptor is not None:
        return Descriptor.load([key, head, 0]).reshape([BT, WT])
    rows = key.to(tl.int64) + tl.arange(0, BT)
    width = tl.arange(0, WT)
    mask = (rows < num_keys)[:, None] & (width < WIDTH)
    return tl.load(X + (rows * H + head)[:, None] * WIDTH + width, mask=mask, other=0.0)


@triton.jit
def locate_union_rows(
    FirstKey, NumVisible, Start, ListedBy, NumWhole, R, H, S,
    G: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The rows of a program, of a grid of `(tiles, H)`: the key/value head; the query `t` of the
    tile that each of the `TR` rows belongs to, the row among `R * H * G`, whether it exists, and
    where its sight ends; and the tile's union, of which `num_whole` blocks need no mask."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_whole = tl.load(NumWhole + tile * H + head)
    starts = Start + (tile * H + head) * (T * S)
    listed_by = ListedBy + (tile * H + head) * (T * S)
    row = tl.arange(0, T * GP)  # [TR]
    t = row // GP
    query = tile * T + t
    in_rows = (query < R) & (row % GP < G)
    group_row = (query * H + head) * G + row % GP  # [TR]
    row_end = tl.load(FirstKey + query, mask=query < R, other=0)
    row_end += tl.load(NumVisible + query, mask=query < R, other=0)
    return head, t, group_row, in_rows, row_end, starts, listed_by, num_whole


@triton.jit
def walk_union(
    acc_o, running_sum, scores_max, lists_any, q_tile, t, row_end, starts, listed_by, first, last,
    K, V, KDescriptor, VDescriptor, head, scale_log2, H, num_keys,
    D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The steps `first … last - 1` of a union; without `MASK`, who lists a block sees all of it."""
    PARTS: tl.constexpr = (BS + BT - 1) // BT
    for step in range(first, last):
        # -- guard --
        part_start = step % PARTS * BT
        key = tl.load(starts + step // PARTS) + part_start
        is_listed = (tl.load(listed_by + step // PARTS) >> t) & 1  # [TR]
        lists_any |= is_listed

        # -- load the keys --
        k_tile = load_tile(K, KDescriptor, key, head, H, num_keys, D, DT, BT)  # [BT, DT]

        # -- scores --
        acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [TR, BT]

        # -- mask --
        if MASK:
            tokens = tl.arange(0, BT)
            is_seen = (part_start + tokens < BS) & (key + tokens < row_end[:, None])  # [TR, BT]
            acc_s = tl.where(is_seen, acc_s, float("-inf"))

        # -- online softmax --
        SCALED: tl.constexpr = q_tile.dtype.primitive_bitwidth == 16  # in fp32, as exact as can be
        acc_s, scores_max, running_sum, acc_o = online_softmax_of_rows(
            acc_s, is_listed > 0, scores_max, running_sum, acc_o, scale_log2, SCALED
        )

        # -- load the values --
        v_tile = load_tile(V, VDescriptor, key, head, H, num_keys, DV, DVT, BT)  # [BT, DVT]

        # -- accumulate --
        acc_o = tl.dot(acc_s.to(v_tile.dtype), v_tile, acc_o, input_precision="ieee")
    return acc_o, running_sum, scores_max, lists_any


@triton.jit(do_not_specialize=["R", "S", "num_keys"])  # new lengths, same kernel
def kernel(
    Q, K, V, KDescriptor, VDescriptor, FirstKey, NumVisible, Start, ListedBy, Count, NumWhole,
    Output, LSE, scale, scale_log2, R, H, S, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
    GP: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads and writes what `selected.forward.kernel` does, for the rows of the tiles whose unions
    are given. The grid is `(tiles, H)`.

    Whole blocks come by descriptor where there is one, else by pointers.
    """
    # -- locate the program --
    count = tl.load(Count + tl.program_id(0).to(tl.int64) * H + tl.program_id(1))
    if count < 0:  # another kernel has this tile
        return
    head, t, group_row, in_rows, row_end, starts, listed_by, num_whole = locate_union_rows(
        FirstKey, NumVisible, Start, ListedBy, NumWhole, R, H, S, G, T, GP
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the queries --
    q_mask = in_rows[:, None] & (width < D)
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=q_mask, other=0.0)  # [TR, DT]

    # -- initialise --
    acc_o = tl.zeros([T * GP, DVT], tl.float32)
    running_sum = tl.zeros([T * GP], tl.float32)
    scores_max = tl.full([T * GP], float("-inf"), tl.float32)
    lists_any = tl.zeros([T * GP], tl.int32)

    PARTS: tl.constexpr = (BS + BT - 1) // BT
    acc_o, running_sum, scores_max, lists_any = walk_union(
        acc_o, running_sum, scores_max, lists_any, q_tile, t, row_end, starts, listed_by,
        0, num_whole * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H,
        num_keys, D, DV, BS, False, DT, DVT, BT,
    )  # fmt: skip
    acc_o, running_sum, scores_max, lists_any = walk_union(
        acc_o, running_sum, scores_max, lists_any, q_tile, t, row_end, starts, listed_by,
        num_whole * PARTS, count * PARTS, K, V, KDescriptor, VDescriptor, head, scale_log2, H,
        num_keys, D, DV, BS, True, DT, DVT, BT,
    )  # fmt: skip

    # -- normalise and store --
    safe_sum = tl.where(lists_any > 0, running_sum, 1.0)
    o_tile = tl.where((lists_any > 0)[:, None], acc_o / safe_sum[:, None], 0.0)  # [TR, DVT]
    lse = tl.where(lists_any > 0, scores_max * scale + tl.log(safe_sum), float("-inf"))
    o_mask = in_rows[:, None] & (value_width < DV)
    o_pointer = Output + group_row[:, None] * DV + value_width
    tl.store(o_pointer, o_tile.to(Output.dtype.element_ty), mask=o_mask)
    tl.store(LSE + group_row, lse, mask=in_rows)


def has_room(q: Tensor, v: Tensor, ids: Tensor, block_size: int) -> bool:
    """Whether a program can sort the lists `ids [R, H, S]` of a tile of queries."""
    (HQ, D), (H, DV) = q.shape[2:], v.shape[2:]
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    T = query_tile_options(HQ // H, D, DV, block_size, **memory)["T"]
    return num_warps(T, ids.shape[2]) <= MOST_WARPS


def make_unions(
    k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, sizes: dict[str, int],
    options: dict[str, int], *, use_descriptors: bool, most: float, is_bad: Tensor | None,
) -> tuple[Unions, dict[str, object]]:  # fmt: skip
    """The unions of the lists, in blocks and groups of `sizes`, for a launch with `options`; and
    what a kernel that walks them is given besides, by name. The rest as in `launch`."""
    R, H, S = ids.shape
    T, BT, G = options["T"], options["BT"], sizes["G"]
    rule = {"most": most, "is_bad": is_bad}
    made = unions(k, v, ids, rows, block_size=sizes["BS"], T=T, BT=BT, **rule)
    boxes = token_boxes(k, v, BT=BT) if use_descriptors else (None, None)
    tiles = tile_sizes(G, sizes["D"], sizes["DV"])
    given = {
        "K": k, "V": v, "KDescriptor": boxes[0], "VDescriptor": boxes[1],
        "FirstKey": rows.first_key, "NumVisible": rows.num_visible, "Start": made.start,
        "ListedBy": made.listed_by, "Count": made.count, "NumWhole": made.num_whole,
        "R": R, "H": H, "S": S, "num_keys": k.shape[0] * k.shape[1],
        "GP": next_power_of_2(G), "DT": tiles["DT"], "DVT": tiles["DVT"],
    }  # fmt: skip
    return made, given | sizes | options


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, use_descriptors: bool = False, most: float = ANY_LENGTH,
    is_bad: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None, **options: int,
) -> tuple[Tensor, Tensor, Unions]:  # fmt: skip
    """Make the unions, and walk them.

    Args:
        q, k, v, ids, rows, block_size, scale: as in `selected_attention.forward`.
        use_descriptors: whether whole blocks come by descriptor; `selected.forward_tma.can_walk`
            must admit the tensors.
        most, is_bad: as in `unions`. Rows of rejected tiles are not written.
        out: where to write; None makes new tensors.
        options: `T`, `BT`, `num_warps`, `num_stages`, in place of what `query_tile_options`
            chooses.

    Returns:
        `o [B, N, HQ, DV]` and `lse [B, N, HQ]`, and the unions.
    """
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sizes = {"G": HQ // H, "D": D, "DV": DV, "BS": block_size}
    memory = {"itemsize": q.element_size(), "shared_memory": shared_memory(q.device)}
    options = query_tile_options(**sizes, **memory) | options
    how = {"use_descriptors": use_descriptors, "most": most, "is_bad": is_bad}
    made, given = make_unions(k, v, ids, rows, sizes, options, **how)
    o, lse = out or (v.new_empty(B, N, HQ, DV), q.new_empty(B, N, HQ, dtype=torch.float32))
    scales = {"scale": scale, "scale_log2": scale * LOG2_E}
    kernel[made.count.shape](Q=q, Output=o, LSE=lse, **scales, **given)
    return o, lse, made
