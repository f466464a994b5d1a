"""Sliding windows by tiles, backward, in Triton.

The five lines are those of chapter 13, and so is the kernel that sums up a row
(`selected.backward.delta_kernel`). `dq_kernel` has the forward's tiles of queries. `dkv_kernel` has
a tile of keys and walks the rows that see it, which are neighbours too: those in the middle see the
whole tile, and only those at both ends need a mask. All that see a tile of keys are walked by one
program, so every run gives the same bits.

`launch` runs them.

Symbols: those of `window.forward`; in `dkv_kernel` `BT` keys of a tile · `BR` rows of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.exact import online_softmax
from nsa_tutorial.kernels.triton.key_runs import add_dkv, add_dq, in_registers, store_gradient
from nsa_tutorial.kernels.triton.window.forward import locate_window_rows, window_of

LOG2_E = tl.constexpr(online_softmax.LOG2_E)


@triton.jit
def walk_keys(
    acc_dq, q_tile, do_tile, lse, delta, first, end, start, num_steps, num_before, gap, stop,
    K, V, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk of `num_steps` steps from `start` on, which leaves out `gap` keys after
    `num_before` of them; without `MASK`, all rows see them all."""
    for index in range(num_steps):
        step = start + index * BT + tl.where(index < num_before, 0, gap)
        acc_dq = add_dq(
            acc_dq, q_tile, do_tile, lse, delta, K, V, step, stop, first, end, head, scale_log2, H,
            D, DV, MASK, DT, DVT, BT,
        )  # fmt: skip
    return acc_dq


@triton.jit(do_not_specialize=["N", "num_tiles", "window_size"])  # new lengths, same kernel
def dq_kernel(
    Q, K, V, GradO, LSE, Delta, LSE2, FirstKey, NumVisible, GradQ,
    scale, scale_log2, N, H, num_tiles, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ADD: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Reads what `window.forward.attend_kernel` does, `GradO [R, H, G, DV]` and three numbers a
    row, `[R, H, G]`; writes `GradQ [R, H, G, D]`, or, with `ADD`, adds to it. The grid is the
    forward's."""
    # -- locate the program --
    head, group_row, in_rows, first, end, start, stop, num_before, num_whole = locate_window_rows(
        FirstKey, NumVisible, N, H, num_tiles, window_size, G, BQ, BT, BE
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the queries --
    q_offset = group_row[:, None] * D + width  # [BQ, DT]
    do_offset = group_row[:, None] * DV + value_width  # [BQ, DVT]
    q_tile = tl.load(Q + q_offset, mask=width < D, other=0.0)
    do_tile = tl.load(GradO + do_offset, mask=value_width < DV, other=0.0)
    lse = tl.load(LSE + group_row) * LOG2_E  # [BQ], in base two
    delta = tl.load(Delta + group_row)
    needs_grad = tl.load(LSE2 + group_row) != float("inf")
    q_tile, do_tile = in_registers(q_tile), in_registers(do_tile)

    # -- walk: what all rows see, then both ends --
    acc_dq = tl.zeros([BQ, DT], tl.float32)
    whole_start = start + num_before * BE
    acc_dq = walk_keys(
        acc_dq, q_tile, do_tile, lse, delta, first, end, whole_start, num_whole, num_whole, 0,
        stop, K, V, head, scale_log2, H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    num_after = tl.cdiv(tl.maximum(stop - (whole_start + num_whole * BT), 0), BE)
    acc_dq = walk_keys(
        acc_dq, q_tile, do_tile, lse, delta, first, end, start, num_before + num_after,
        num_before, num_whole * BT, stop, K, V, head, scale_log2, H, D, DV, True, DT, DVT, BE,
    )  # fmt: skip

    # -- store --
    acc_dq = tl.where(needs_grad[:, None], acc_dq * scale, 0.0)
    store_gradient(GradQ + q_offset, acc_dq, in_rows[:, None] & (width < D), ADD)


@triton.jit
def walk_rows(
    acc_dk, acc_dv, k_tile, v_tile, key, index, stop_index, num_before, start, limit, rest, stop,
    Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Adds to `acc_dk [BT, DT]` and `acc_dv [BT, DVT]` what the steps `index … stop_index - 1`
    give, `BR` rows each: `num_before` steps through the rows `start … limit - 1`, then as many as
    it takes through `rest … stop - 1`.

    Without `MASK` they are whole steps, and all rows see the whole tile. With `CHECK`, some rows
    may be not to be read.
    """
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    rows = tl.arange(0, BR)
    for i in range(index, stop_index):
        # -- locate the rows --
        is_before = i < num_before
        step = tl.where(is_before, start + i * BR, rest + (i - num_before) * BR)
        query = step // G  # of the first row
        row = rows  # [BR], counted from the query's first one
        if BR % G != 0:
            row += step % G
        if MASK:
            num_rows = tl.where(is_before, limit, stop) - step
            row = tl.minimum(row, num_rows - 1 + step % G)
        group_row = (query.to(tl.int64) * H + head) * G
        offset = row // G * (H * G) + row % G  # [BR]

        # -- load the queries --
        q_mask = width < D
        do_mask = value_width < DV
        lse = tl.load(LSE2 + group_row + offset)
        delta = tl.load(Delta + group_row + offset)
        if CHECK:
            is_read = tl.abs(lse) < float("inf")  # [BR]
            q_mask = is_read[:, None] & q_mask
            do_mask = is_read[:, None] & do_mask
            delta = tl.where(is_read, delta, 0.0)
        q_offset = offset[:, None] * D + width  # [BR, DT]
        do_offset = offset[:, None] * DV + value_width  # [BR, DVT]
        q_tile = tl.load(Q + group_row * D + q_offset, mask=q_mask, other=0.0)
        do_tile = tl.load(GradO + group_row * DV + do_offset, mask=do_mask, other=0.0)

        # -- weights --
        acc_s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BT, BR]
        p = tl.exp2(acc_s * scale_log2 - lse)
        is_seen = False
        if MASK:
            first, end = window_of(FirstKey, NumVisible, query + row // G, window_size)
            end = tl.where((rows < num_rows) & (lse != float("inf")), end, 0)
            is_seen = (key >= first) & (key < end)  # [BT, BR]
            p = tl.where(is_seen, p, 0.0)

        # -- what they add --
        acc_dk, acc_dv = add_dkv(acc_dk, acc_dv, p, v_tile, q_tile, do_tile, delta, is_seen, MASK)
    return acc_dk, acc_dv


@triton.jit
def add_rows(
    acc_dk, acc_dv, k_tile, v_tile, key, num_steps, num_before, start, limit, rest, stop,
    Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """`walk_rows`; with `PART`, every `PART` steps are summed apart before they join the total,
    because rounding errors of long fp32 sums would exceed the budget."""
    if PART == 0:
        acc_dk, acc_dv = walk_rows(
            acc_dk, acc_dv, k_tile, v_tile, key, 0, num_steps, num_before, start, limit, rest,
            stop, Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
            G, D, DV, MASK, CHECK, DT, DVT, BR,
        )  # fmt: skip
    else:
        for index in range(0, num_steps, PART):
            part_dk = tl.zeros([BT, DT], tl.float32)
            part_dv = tl.zeros([BT, DVT], tl.float32)
            part_dk, part_dv = walk_rows(
                part_dk, part_dv, k_tile, v_tile, key, index, tl.minimum(index + PART, num_steps),
                num_before, start, limit, rest, stop, Q, GradO, Delta, LSE2, FirstKey, NumVisible,
                head, scale_log2, H, window_size, G, D, DV, MASK, CHECK, DT, DVT, BR,
            )  # fmt: skip
            acc_dk += part_dk
            acc_dv += part_dv
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=["R", "num_keys", "num_tiles", "window_size"])
def dkv_kernel(
    Q, K, V, GradO, Delta, LSE2, FirstKey, NumVisible, Runs, NumUnread, GradK, GradV,
    scale, scale_log2, R, H, num_keys, num_tiles, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ADD: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Reads the same, `Runs [4, num_tiles]` and `NumUnread [H, R + 1]` of `runs_of`; writes the
    gradients of a tile's keys and values, or, with `ADD`, adds to them. The grid is
    `(num_tiles * H,)`.

    Scores stand transposed, a key a row: so they are multiplied as they lie in registers.
    """
    # -- locate the program --
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H
    key = tile * BT + tl.arange(0, BT)[:, None]  # [BT, 1]
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)
    key_row = key.to(tl.int64) * H + head  # [BT, 1]
    k_mask = (key < num_keys) & (width < D)  # [BT, DT]
    v_mask = (key < num_keys) & (value_width < DV)  # [BT, DVT]

    # -- load the keys and the values --
    k_tile = tl.load(K + key_row * D + width, mask=k_mask, other=0.0)  # [BT, DT]
    v_tile = tl.load(V + key_row * DV + value_width, mask=v_mask, other=0.0)  # [BT, DVT]

    # -- who sees the tile, and who sees all of it --
    first_query = tl.load(Runs + tile)
    stop_query = tl.maximum(tl.load(Runs + 3 * num_tiles + tile), first_query)
    whole_query = tl.minimum(tl.load(Runs + num_tiles + tile), stop_query)
    whole_stop = tl.maximum(tl.load(Runs + 2 * num_tiles + tile), whole_query)
    unread = NumUnread + head * (R + 1)
    has_unread = tl.load(unread + stop_query) > tl.load(unread + first_query)
    start, limit, stop = first_query * G, whole_query * G, stop_query * G  # in rows
    num_whole = (whole_stop - whole_query) * G // BR
    rest = limit + num_whole * BR
    num_before = tl.cdiv(limit - start, BR)
    num_ends = num_before + tl.cdiv(stop - rest, BR)

    # One after the other, and none in a branch of its own: so they share their shared memory.
    num_checked = tl.where(has_unread, tl.cdiv(stop - start, BR), 0)
    num_whole = tl.where(has_unread, 0, num_whole)
    num_ends = tl.where(has_unread, 0, num_ends)

    # -- walk: rows that see the whole tile, then both ends; or all with a check --
    acc_dk = tl.zeros([BT, DT], tl.float32)
    acc_dv = tl.zeros([BT, DVT], tl.float32)
    acc_dk, acc_dv = add_rows(
        acc_dk, acc_dv, k_tile, v_tile, key, num_whole, num_whole, limit, rest, rest, rest,
        Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
        G, D, DV, False, False, DT, DVT, BT, BR, PART,
    )  # fmt: skip
    acc_dk, acc_dv = add_rows(
        acc_dk, acc_dv, k_tile, v_tile, key, num_ends, num_before, start, limit, rest, stop,
        Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
        G, D, DV, True, False, DT, DVT, BT, BR, PART,
    )  # fmt: skip
    acc_dk, acc_dv = add_rows(
        acc_dk, acc_dv, k_tile, v_tile, key, num_checked, num_checked, start, stop, stop, stop,
        Q, GradO, Delta, LSE2, FirstKey, NumVisible, head, scale_log2, H, window_size,
        G, D, DV, True, True, DT, DVT, BT, BR, PART,
    )  # fmt: skip

    # -- store --
    store_gradient(GradK + key_row * D + width, acc_dk * scale, k_mask, ADD)
    store_gradient(GradV + key_row * DV + value_width, acc_dv, v_mask, ADD)
