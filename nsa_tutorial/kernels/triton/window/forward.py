"""Sliding windows by tiles of queries, forward, in Triton.

`selected.forward` gives each query a program of its own, which suits lists: no two queries need
have a block in common. Neighbouring windows do have nearly all their keys in common. So a program
here takes a tile of neighbouring queries with all heads of their group. Most of its steps are seen
by the whole tile and need no mask. The few keys at both ends, which only some of the queries see,
are walked in smaller steps behind a mask.

On Hopper and later, the tensor memory accelerator fetches the steps without a mask. `launch` runs
the kernel, and `backward` has the gradients.

Symbols: those of `selected.forward`; a row is one query and one head of the group · `BQ` rows of a
tile · `BT` keys of a step · `BE` keys of a step at the ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.gates import gated
from nsa_tutorial.kernels.triton.key_runs import attend_step, sees


@triton.jit
def window_of(FirstKey, NumVisible, query, window_size):
    """The first key of a query's window, and its end."""
    first_key = tl.load(FirstKey + query)
    end = first_key + tl.load(NumVisible + query)
    return tl.maximum(first_key, end - window_size), end


@triton.jit
def locate_window_rows(
    FirstKey, NumVisible, N, H, num_tiles, window_size,
    G: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The rows of a program, and what they see.

    Returns:
        The key/value head; the rows of the tile, `[BQ]` of `R * H * G`, and which of them exist;
        the first key and the end of each; where the tile's walk begins and stops, how many steps of
        `BE` keys come before those of `BT` that all rows see as a whole, and how many these are.
    """
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H % num_tiles
    first_query = tl.program_id(0) // H // num_tiles * N  # of the sequence
    last_row = tl.minimum(tile * BQ + BQ, N * G) - 1
    row = tile * BQ + tl.arange(0, BQ)  # [BQ]
    in_rows = row <= last_row
    row = tl.minimum(row, last_row)  # rows past the end repeat the last row
    query = first_query + row // G  # [BQ]
    first, end = window_of(FirstKey, NumVisible, query, window_size)
    group_row = (query.to(tl.int64) * H + head) * G + row % G  # [BQ]

    # windows begin and end later from query to query: the first and the last one decide
    start, first_end = window_of(
        FirstKey, NumVisible, first_query + tile * BQ // G, window_size
    )  # fmt: skip
    last_start, stop = window_of(FirstKey, NumVisible, first_query + last_row // G, window_size)
    num_before = tl.cdiv(last_start - start, BE)
    num_whole = tl.maximum(first_end - (start + num_before * BE), 0) // BT
    return head, group_row, in_rows, first, end, start, stop, num_before, num_whole


@triton.jit
def attend_to(
    acc_o, running_sum, scores_max, is_bad, q_tile, first, end, start, num_steps, num_before, gap,
    stop, K, V, KBox, VBox, head, scale_log2, H,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One walk of `num_steps` steps from `start` on, which leaves out `gap` keys after
    `num_before` of them; without `MASK`, all rows see them all.

    With `MASK`, values that are not finite count as 0, and `is_bad [BT, DVT]` keeps in mind that
    there were some.
    """
    for index in range(num_steps):
        step = start + index * BT + tl.where(index < num_before, 0, gap)
        p, v_tile, acc_o, running_sum, scores_max = attend_step(
            acc_o, running_sum, scores_max, q_tile, K, V, KBox, VBox, step, stop, first, end, head,
            scale_log2, H, D, DV, MASK, DT, DVT, BT,
        )  # fmt: skip
        if MASK:  # a weight of 0 hides a number, but not NaN
            is_bad_here = ~(tl.abs(v_tile.to(tl.float32)) < float("inf"))  # [BT, DVT]
            v_tile = tl.where(is_bad_here, 0.0, v_tile)
            is_bad |= is_bad_here
        acc_o = tl.dot(p, v_tile, acc_o, input_precision="ieee")
    return acc_o, running_sum, scores_max, is_bad


@triton.jit
def spoil(
    o_pointer, in_rows, first, end, start, num_steps, num_before, gap, stop, V, head, H,
    DV: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Stores NaN in each row's channels in which it sees a value that is not finite: the walk
    behind the mask once more, for these values alone."""
    value_width = tl.arange(0, DVT)
    tokens = tl.arange(0, BT)
    for index in range(num_steps):
        step = start + index * BT + tl.where(index < num_before, 0, gap)
        pointer = V + (step * H + head).to(tl.int64) * DV + tokens[:, None] * (H * DV) + value_width
        v_mask = (tokens < stop - step)[:, None] & (value_width < DV)
        v_tile = tl.load(pointer, mask=v_mask, other=0.0)  # [BT, DVT]
        is_bad = ~(tl.abs(v_tile.to(tl.float32)) < float("inf"))
        is_seen = sees(step, first, end, BT)  # [BQ, BT]
        sees_bad = tl.dot(is_seen.to(tl.float16), is_bad.to(tl.float16))  # [BQ, DVT]
        is_spoiled = in_rows[:, None] & (sees_bad > 0)
        tl.store(o_pointer, tl.full(sees_bad.shape, float("nan"), v_tile.dtype), mask=is_spoiled)


@triton.jit(do_not_specialize=["N", "num_tiles", "window_size"])  # new lengths, same kernel
def attend_kernel(
    Q, K, V, KBox, VBox, FirstKey, NumVisible, Output, LSE,
    Gate0, Gate1, Gate2, Output0, Output1, Sum, scale, scale_log2, N, H, num_tiles, window_size,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DT: tl.constexpr, DVT: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]`, `K [keys, H, D]`, `V [keys, H, DV]`, `FirstKey [R]`, `NumVisible
    [R]`; writes `Output [R, H, G, DV]` and `LSE [R, H, G]`.

    The grid is `(B * num_tiles * H,)`: the `N * G` rows of a sequence of the batch and a key/value
    head, `BQ` a tile. `KBox` and `VBox` are descriptors of the keys and values, or None.

    With `Sum [R, H, G, DV]`, it also gets `Output0` and `Output1`, of other branches, and this
    `Output`, each times its gate `[R, H, G]`: what `gates.gate_kernel` would write. Without it the
    gates and the other outputs are None, too.
    """
    # -- locate the program --
    head, group_row, in_rows, first, end, start, stop, num_before, num_whole = locate_window_rows(
        FirstKey, NumVisible, N, H, num_tiles, window_size, G, BQ, BT, BE
    )
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load the queries --
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=width < D, other=0.0)  # [BQ, DT]

    # -- initialise --
    acc_o = tl.zeros([BQ, DVT], tl.float32)
    running_sum = tl.zeros([BQ], tl.float32)
    scores_max = tl.full([BQ], float("-inf"), tl.float32)

    # -- walk: what all rows see, then both ends --
    whole_start = start + num_before * BE
    is_bad = tl.full([BE, DVT], False, tl.int1)
    acc_o, running_sum, scores_max, is_bad = attend_to(
        acc_o, running_sum, scores_max, is_bad, q_tile, first, end, whole_start, num_whole,
        num_whole, 0, stop, K, V, KBox, VBox, head, scale_log2, H, D, DV, False, DT, DVT, BT,
    )  # fmt: skip
    num_after = tl.cdiv(tl.maximum(stop - (whole_start + num_whole * BT), 0), BE)
    num_ends, gap = num_before + num_after, num_whole * BT
    acc_o, running_sum, scores_max, is_bad = attend_to(
        acc_o, running_sum, scores_max, is_bad, q_tile, first, end, start, num_ends, num_before,
        gap, stop, K, V, KBox, VBox, head, scale_log2, H, D, DV, True, DT, DVT, BE,
    )  # fmt: skip

    # -- normalise and store --
    o_tile = acc_o / running_sum[:, None]  # [BQ, DVT]
    lse = scores_max * scale + tl.log(running_sum)  # [BQ]
    o_pointer = Output + group_row[:, None] * DV + value_width
    o_mask = in_rows[:, None] & (value_width < DV)
    o_tile = o_tile.to(Output.dtype.element_ty)
    tl.store(o_pointer, o_tile, mask=o_mask)
    offsets = group_row[:, None] * DV + value_width
    if Sum is not None:
        acc = gated(Gate0, Output0, group_row, in_rows, offsets, o_mask)
        acc += gated(Gate1, Output1, group_row, in_rows, offsets, o_mask)
        gate = tl.load(Gate2 + group_row, mask=in_rows, other=0.0).to(tl.float32)  # [BQ]
        acc += gate[:, None] * o_tile.to(tl.float32)
        tl.store(Sum + offsets, acc.to(Sum.dtype.element_ty), mask=o_mask)
    tl.store(LSE + group_row, lse, mask=in_rows)

    # -- spoil: rare, and last, so that no accumulator stands in registers meanwhile --
    if tl.max(is_bad.to(tl.int32)) > 0:
        tl.debug_barrier()  # after what other threads have stored there
        spoil(
            o_pointer, in_rows, first, end, start, num_ends, num_before, gap, stop, V, head, H,
            DV, DVT, BE,
        )  # fmt: skip
        if Sum is not None:
            spoil(
                Sum + offsets, in_rows, first, end, start, num_ends, num_before, gap, stop, V, head,
                H, DV, DVT, BE,
            )  # fmt: skip
