"""Chapter 15: the newest tokens attend to a cache, in Triton.

One query has too few heads to fill a GPU, so its keys are **split**: each program attends to a part
of them, and leaves a partial output and its log-sum-exp for `merge`. How many parts there are
follows from the number of queries and heads alone, so that a CUDA graph holds for every length. A
part without keys leaves zeros and a log-sum-exp of `-inf`.

`summaries_and_window_kernel` reads the summaries and the window, which wait for nothing, and stores
the scores of the summaries. `lists_kernel` reads the listed blocks, once they are chosen.

Symbols: those of `selected.forward`; `R = B * n` query rows · `P` parts of a row, those of the
summaries, then of the window, then of the lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_tutorial.kernels.triton.online_softmax import online_softmax


@triton.jit
def locate(Lengths, n, H):
    """The program's row of `R`, its key/value head, its sequence, and the query's position."""
    row = tl.program_id(0) // H
    head = tl.program_id(0) % H
    batch = row // n
    position = tl.load(Lengths + batch) - n + row % n
    return row.to(tl.int64), head, batch, position


@triton.jit
def page_row(Table, batch, token, in_room, max_pages, PAGE: tl.constexpr, IS_PAGED: tl.constexpr):
    """Where tokens `[BT]` of a sequence lie, counted in tokens of all pages, int64."""
    if IS_PAGED:
        page = tl.load(Table + batch * max_pages + token // PAGE, mask=in_room, other=0)
        place = page.to(tl.int64) * PAGE + token % PAGE
    else:
        place = batch.to(tl.int64) * PAGE + token
    return place


@triton.jit
def load_queries(
    Q, row, head, H, G: tl.constexpr, D: tl.constexpr, GT: tl.constexpr, DT: tl.constexpr
):
    """The queries of a group, `[GT, DT]`."""
    heads, width = tl.arange(0, GT), tl.arange(0, DT)
    offset = (row * H + head) * (G * D) + heads[:, None] * D + width
    return tl.load(Q + offset, mask=(heads < G)[:, None] & (width < D), other=0.0)


@triton.jit
def scores_of(
    q_tile, K, key_row, is_key, head, H, D: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """Scores `[GT, BT]` of the keys at the rows `key_row [BT]`, unscaled, `-inf` where there is
    none."""
    width = tl.arange(0, DT)
    offset = ((key_row * H + head) * D)[:, None] + width
    k_tile = tl.load(K + offset, mask=is_key[:, None] & (width < D), other=0.0)
    acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    return tl.where(is_key, acc_s, float("-inf"))


@triton.jit
def accumulate(
    acc_o, running_sum, scores_max, acc_s, V, key_row, is_key, head, H, scale_log2,
    DV: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """The online softmax of one tile of scores, and its values."""
    p, scores_max, running_sum, acc_o = online_softmax(
        acc_s, scores_max, running_sum, acc_o, scale_log2
    )
    width = tl.arange(0, DVT)
    offset = ((key_row * H + head) * DV)[:, None] + width
    v_tile = tl.load(V + offset, mask=is_key[:, None] & (width < DV), other=0.0)
    acc_o += tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    return acc_o, running_sum, scores_max


@triton.jit
def store_part(
    acc_o, running_sum, scores_max, num_keys, Partials, PartialLSE, row, head, part, H, P, scale,
    G: tl.constexpr, DV: tl.constexpr, GT: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Normalise, and write `Partials [R, H, G, P, DV]` and `PartialLSE [R, H, G, P]`."""
    safe_sum = tl.where(num_keys > 0, running_sum, 1.0)
    lse = scores_max * scale + tl.log(safe_sum)  # [GT], -inf for a part without keys
    heads, width = tl.arange(0, GT), tl.arange(0, DVT)
    place = ((row * H + head) * G + heads) * P + part
    tl.store(PartialLSE + place, lse, mask=heads < G)
    o_mask = (heads < G)[:, None] & (width < DV)
    tl.store(Partials + place[:, None] * DV + width, acc_o / safe_sum[:, None], mask=o_mask)


@triton.jit(do_not_specialize=["n", "max_pages", "NC"])
def summaries_and_window_kernel(
    Q, K, V, KWindow, VWindow, Lengths, Table, Partials, PartialLSE, Scores, NumVisible, Position,
    scale, scale_log2, n, H, P, max_pages, NC, window_size, ring,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr,
    STRIDE: tl.constexpr, SPLITS: tl.constexpr, WINDOW_SPLITS: tl.constexpr,
    IS_PAGED: tl.constexpr, GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Reads `Q [R, H, G, D]`, summaries `K [pages, PAGE // STRIDE, H, D]`, the rings `KWindow [B,
    ring, H, D]` and their values; writes the parts `0 … SPLITS + WINDOW_SPLITS - 1`, the scores of
    the summaries `[R, H, G, NC]`, unscaled, how many of them a row sees, and its position.

    The grid is `(R * H, SPLITS + WINDOW_SPLITS)`.
    """
    # -- locate the program --
    row, head, batch, position = locate(Lengths, n, H)
    part = tl.program_id(1)
    q_tile = load_queries(Q, row, head, H, G, D, GT, DT)
    heads, step_keys = tl.arange(0, GT), tl.arange(0, BT)
    acc_o = tl.zeros([GT, DVT], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)
    ended = position + 1 - LENGTH
    num_visible = tl.where(ended < 0, 0, ended // STRIDE + 1)
    if part == 0:
        tl.store(NumVisible + row, num_visible)
        tl.store(Position + row, position)

    if part < SPLITS:
        # -- a part of the summaries --
        share = tl.cdiv(tl.cdiv(num_visible, SPLITS), BT) * BT
        start = part * share
        stop = tl.minimum(start + share, num_visible)
        score_row = ((row * H + head) * G + heads) * NC  # [GT]
        for step in range(start, stop, BT):
            summary = step + step_keys
            is_key = summary < stop
            token = page_row(Table, batch, summary * STRIDE, is_key, max_pages, PAGE, IS_PAGED)
            key_row = token // STRIDE
            acc_s = scores_of(q_tile, K, key_row, is_key, head, H, D, DT)
            score_mask = (heads < G)[:, None] & is_key
            tl.store(Scores + score_row[:, None] + summary, acc_s, mask=score_mask)
            acc_o, running_sum, scores_max = accumulate(
                acc_o, running_sum, scores_max, acc_s, V, key_row, is_key, head, H, scale_log2, DV,
                DVT,
            )  # fmt: skip
        num_keys = stop - start
    else:
        # -- a part of the window --
        first = tl.maximum(position + 1 - window_size, 0)
        share = tl.cdiv(tl.cdiv(position + 1 - first, WINDOW_SPLITS), BT) * BT
        start = first + (part - SPLITS) * share
        stop = tl.minimum(start + share, position + 1)
        for step in range(start, stop, BT):
            token = step + step_keys
            is_key = token < stop
            key_row = batch.to(tl.int64) * ring + token % ring
            acc_s = scores_of(q_tile, KWindow, key_row, is_key, head, H, D, DT)
            acc_o, running_sum, scores_max = accumulate(
                acc_o, running_sum, scores_max, acc_s, VWindow, key_row, is_key, head, H,
                scale_log2, DV, DVT,
            )  # fmt: skip
        num_keys = stop - start

    # -- normalise and store --
    store_part(
        acc_o, running_sum, scores_max, num_keys, Partials, PartialLSE, row, head, part, H, P,
        scale, G, DV, GT, DVT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "max_pages", "first_part"])
def lists_kernel(
    Q, K, V, Lengths, Table, BlockIndices, Partials, PartialLSE, scale, scale_log2, n, H, P, S,
    max_pages, first_part,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, IS_PAGED: tl.constexpr, GT: tl.constexpr, DT: tl.constexpr,
    DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Reads `K [pages, PAGE, H, D]`, `V`, and the lists `BlockIndices [R, H, S]`; writes the parts
    from `first_part` on. The grid is `(R * H, SPLITS)`; part `i` takes every `SPLITS`-th slot."""
    # -- locate the program --
    row, head, batch, position = locate(Lengths, n, H)
    part = tl.program_id(1)
    q_tile = load_queries(Q, row, head, H, G, D, GT, DT)
    step_keys = tl.arange(0, BT)
    acc_o = tl.zeros([GT, DVT], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)
    num_keys = 0
    ids = BlockIndices + (row * H + head) * S
    num_blocks = tl.cdiv(position + 1, BS)
    STEPS: tl.constexpr = (BS + BT - 1) // BT

    for i in range(part * STEPS, S * STEPS, SPLITS * STEPS):
        for step in tl.static_range(STEPS):
            # -- guard --
            block_id = tl.load(ids + i // STEPS)
            is_visible = (block_id >= 0) & (block_id < num_blocks)
            in_block = step * BT + step_keys
            token = tl.where(is_visible, block_id, 0) * BS + in_block
            is_key = is_visible & (in_block < BS) & (token <= position)
            num_keys += tl.sum(is_key.to(tl.int32), axis=0)

            # -- keys, scores, values --
            key_row = page_row(Table, batch, token, is_key, max_pages, PAGE, IS_PAGED)
            acc_s = scores_of(q_tile, K, key_row, is_key, head, H, D, DT)
            acc_o, running_sum, scores_max = accumulate(
                acc_o, running_sum, scores_max, acc_s, V, key_row, is_key, head, H, scale_log2, DV,
                DVT,
            )  # fmt: skip

    # -- normalise and store --
    store_part(
        acc_o, running_sum, scores_max, num_keys, Partials, PartialLSE, row, head,
        first_part + part, H, P, scale, G, DV, GT, DVT,
    )  # fmt: skip
