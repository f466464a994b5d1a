"""Chapter 13's gradients of keys and values with rows that are named a step ahead: the second step,
for Hopper and later.

`dkv_kernel` does what `selected.backward.dkv_kernel` does, for lists whose slots have no factors.
There, a step asks the inverse list for its rows, waits, and only then fetches their queries. Here
the numbers of the next step's rows arrive while this step multiplies, so that its queries can be
on their way, too. And a tile's values stand in registers: shared memory, which a product reads its
factors from, is asked for less. `launch` runs it; `selected.backward_launch` asks `can_name_ahead`.

Symbols: those of `selected.backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.key_runs import add_dkv, in_registers
from nsa_tutorial.kernels.triton.launch_options import edge
from nsa_tutorial.kernels.triton.selected import lists_backward
from nsa_tutorial.kernels.triton.selected.forward_tma import can_walk
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall

# Keys of a program, rows of a step, warps, stages; the same kernel without what is ahead is fastest
# with 64 rows and 2 stages. H200, torch 2.11, Triton 3.6, 32,768 tokens, 64 heads over 4, 1,024
# keys a query in bf16, random and smooth lists, by the profiler: 5.1 and 5.5 ms; else 5.7 and 5.8.
OPTIONS = {"BT": 64, "BR": 32, "num_warps": 4, "num_stages": 3}
LEAST_GROUP, MOST_WIDTH = 16, 128  # what was measured, and what fits the registers


@triton.jit
def named_rows(Rows, first, index, end, G: tl.constexpr):
    """The query of each row `index [BR]` of a chunk that begins with the entry `first`; -1 from
    `end` on, and `~query` where it is not to be read."""
    return tl.load(Rows + first + index // G, mask=index < end, other=-1)


@triton.jit
def walk_queries(
    acc_dk, acc_dv, k_tile, v_tile, key, in_tile, start, end,
    Q, GradO, Delta, LSE2, Rows, RowEnd, first, head, scale_log2, H,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    BR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds to `acc_dk [BT, D]` and `acc_dv [BT, DV]` what the rows `start … end - 1` of a chunk
    give, `BR` a step. Without `MASK` they all see the whole tile."""
    width = tl.arange(0, D)
    value_width = tl.arange(0, DV)
    next_row = named_rows(Rows, first, start + tl.arange(0, BR), end, G)
    for step in range(start, end, BR):
        # -- guard --
        index = step + tl.arange(0, BR)  # [BR]
        is_row = index < end
        row = next_row
        next_row = named_rows(Rows, first, index + BR, end, G)
        is_read = row >= 0
        row = tl.where(is_read, row, ~row)
        if WIDE:
            row = row.to(tl.int64)
        group_row = (row * H + head) * G + index % G  # [BR]

        # -- load the queries --
        read = is_read[:, None]
        q_tile = tl.load(Q + group_row[:, None] * D + width, mask=read, other=0.0)
        do_tile = tl.load(GradO + group_row[:, None] * DV + value_width, mask=read, other=0.0)
        lse = tl.load(LSE2 + group_row, mask=is_row, other=float("inf"))
        delta = tl.load(Delta + group_row, mask=is_read, other=0.0)

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        p = tl.exp2(acc_s * scale_log2 - lse)
        is_seen = False
        if MASK:
            row_end = tl.where(lse == float("inf"), 0, tl.load(RowEnd + row))
            is_seen = in_tile[:, None] & (key[:, None] < row_end)  # [BT, BR]
            p = tl.where(is_seen, p, 0.0)

        # -- what they add --
        acc_dk, acc_dv = add_dkv(acc_dk, acc_dv, p, v_tile, q_tile, do_tile, delta, is_seen, MASK)
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=["num_keys"])
def dkv_kernel(
    Q, K, V, GradO, Delta, LSE2, Rows, RowEnd,
    FirstKey, Head, First, Last, NumParts, Place, GradK, GradV, SharesK, SharesV,
    scale, scale_log2, H, num_keys,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """`selected.backward.dkv_kernel`, where `BT` divides `BS`, and `D` and `DV` are powers of
    two."""
    # -- locate the program --
    chunk = tl.program_id(0)
    first = tl.load(First + chunk)
    last = tl.load(Last + chunk)
    if first == last:
        return
    head = tl.load(Head + chunk)
    block_start = tl.load(FirstKey + chunk).to(tl.int64)
    key = block_start + tl.program_id(1) * BT + tl.arange(0, BT)  # [BT]
    in_tile = key < num_keys
    k_offset = (key[:, None] * H + head) * D + tl.arange(0, D)  # [BT, D]
    v_offset = (key[:, None] * H + head) * DV + tl.arange(0, DV)  # [BT, DV]

    # -- load the keys and the values --
    k_tile = tl.load(K + k_offset, mask=in_tile[:, None], other=0.0)
    v_tile = in_registers(tl.load(V + v_offset, mask=in_tile[:, None], other=0.0))

    # -- initialise --
    acc_dk = tl.zeros([BT, D], tl.float32)
    acc_dv = tl.zeros([BT, DV], tl.float32)

    # -- who sees the block in part: those of the first entries --
    num_rows = (last - first) * G
    entry = first + tl.arange(0, EDGE)  # [EDGE]
    row = tl.load(Rows + entry, mask=entry < last, other=-1)
    row_end = tl.load(RowEnd + tl.where(row >= 0, row, ~row))
    is_partial = (entry < last) & (row_end < block_start + BS)
    num_partial = tl.sum(is_partial.to(tl.int32), axis=0)
    num_masked = tl.where(num_partial == EDGE, num_rows, num_partial * G)
    num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)

    # -- walk --
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, 0, num_masked, Q, GradO, Delta, LSE2, Rows,
        RowEnd, first, head, scale_log2, H, G, D, DV, True, BR, WIDE,
    )  # fmt: skip
    acc_dk, acc_dv = walk_queries(
        acc_dk, acc_dv, k_tile, v_tile, key, in_tile, num_masked, num_rows, Q, GradO, Delta, LSE2,
        Rows, RowEnd, first, head, scale_log2, H, G, D, DV, False, BR, WIDE,
    )  # fmt: skip

    # -- store --
    acc_dk *= scale
    if tl.load(NumParts + chunk) == 1:
        last_row = tl.load(Rows + last - 1)  # it sees most; what it does not, nobody does
        end = tl.load(RowEnd + tl.where(last_row >= 0, last_row, ~last_row))
        in_sight = (in_tile & (key < end))[:, None]
        tl.store(GradK + k_offset, acc_dk.to(GradK.dtype.element_ty), mask=in_sight)
        tl.store(GradV + v_offset, acc_dv.to(GradV.dtype.element_ty), mask=in_sight)
    else:
        place = tl.load(Place + chunk).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        token = (place * BT + tl.arange(0, BT))[:, None]  # [BT, 1]
        tl.store(SharesK + token * D + tl.arange(0, D), acc_dk)
        tl.store(SharesV + token * DV + tl.arange(0, DV), acc_dv)


def can_name_ahead(call: ListsCall) -> bool:
    """Whether the kernel takes this call, and was measured to be the faster one: tensors that
    `forward_tma.can_walk`, without factors, no wider than `MOST_WIDTH`; whole tiles of keys, groups
    of `LEAST_GROUP` heads or more; and shared memory enough."""
    c, (G, D, DV) = call, call.sizes.values()
    rows = OPTIONS["num_stages"] * OPTIONS["BR"]  # each with three numbers besides
    held = (OPTIONS["BT"] * D + rows * (D + DV)) * c.q.element_size() + 12 * rows
    return (
        c.slot_scale is None
        and c.block_size % OPTIONS["BT"] == 0
        and G >= LEAST_GROUP
        and max(D, DV) <= MOST_WIDTH
        and held <= c.memory["shared_memory"]
        and can_walk(c.q, c.k, c.v, c.block_size)
    )


def launch(call: ListsCall, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of keys and values, as
    `backward_launch.gradients_of_keys_and_values`."""
    c = call
    B, M, H = c.k.shape[:3]
    cut = lists_backward.key_chunks(call, OPTIONS["BT"])
    tables, walked = cut.tables, cut.tables.chunks
    dkv_kernel[cut.grid](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, tables.rows, tables.row_end, walked.first_key,
        walked.head, walked.first, walked.last, walked.num_parts, walked.place, d_k, d_v,
        *cut.shares, *c.scales, H, B * M, **c.block_sizes, **OPTIONS, EDGE=edge(c.block_size),
        WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31,
    )  # fmt: skip
    lists_backward.add_shares(call, cut, d_k, d_v)
