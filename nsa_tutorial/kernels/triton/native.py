"""All of Native Sparse Attention in one call, in Triton: the same kernels as branch by branch, with
fewer launches, because what the branches share is made once.

The rows are located once (`rows`); in the backward one kernel reads the gradient of the sum and
gives each branch what it begins with (`gates_at_once`), and the branches add the gradients of
queries, keys and values to one tensor each. On a short text that decides: there the device waits
for Python.

Symbols: those of the branches; `compressed`, `selected` and `window` are pairs of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.kernels.triton import gates_at_once as at_once
from nsa_tutorial.kernels.triton import pooling, replay
from nsa_tutorial.kernels.triton.choice.launch import select_blocks
from nsa_tutorial.kernels.triton.compressed.launch import compressed_backward, compressed_forward
from nsa_tutorial.kernels.triton.rows import Located, locate
from nsa_tutorial.kernels.triton.selected.backward_launch import selected_backward
from nsa_tutorial.kernels.triton.selected.launch import order_of, selected_forward
from nsa_tutorial.kernels.triton.unions import find_bad
from nsa_tutorial.kernels.triton.window.launch import Gated, window_backward, window_forward
from nsa_tutorial.runtime.order import Order
from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.sparse.selected_attention import QueryRows

Pair = Sequence[Tensor]


class Outputs(NamedTuple):
    """What the forward returns, and the backward is given.

    Attributes:
        o: the gated sum `[B, N, HQ, DV]`.
        branches: the outputs of compression, selection and window.
        lse: theirs, `[3, B, N, HQ]`.
        ids: the lists `[B, N, H, S]`.
        summaries: keys and values of the compression.
        of_rows, of_tokens: those of `rows.Located`; of packed sequences, no `of_tokens`.
        is_bad: `[1]` int32, what `unions.find_bad` finds in the selection; where its lists
            are not walked in tiles of queries, nobody reads it.
    """

    o: Tensor
    branches: list[Tensor]
    lse: Tensor
    ids: Tensor
    summaries: list[Tensor]
    of_rows: Tensor
    of_tokens: Tensor
    is_bad: Tensor


def located(
    q: Tensor, num_keys: int, length: int, stride: int, rows: tuple[QueryRows, QueryRows] | None
) -> Located:
    """Where the rows stand; those of packed sequences are given."""
    if rows is None:
        return locate(*q.shape[:2], num_keys, length=length, stride=stride, device=q.device)
    keys, summaries = rows
    columns = (*keys[:3], *summaries[:2])
    nothing = keys.position.new_empty(0)
    return Located(torch.stack(columns), nothing, nothing, keys.num_sequences)


@replay.replayed
def forward(
    q: Tensor, compressed: Pair, selected: Pair, window: Pair, gates: Sequence[Tensor],
    block_counts: Tensor | None, rows: tuple[QueryRows, QueryRows] | None, *, num_keys: int,
    choice: dict[str, int], window_size: int, scale: float,
) -> Outputs:  # fmt: skip
    """The gated sum of the three branches.

    Args:
        q: `[B, N, HQ, D]`.
        compressed: of the summaries; `()` for the means of `selected`, without packed sequences.
        selected, window: of these branches; `()` for the window shares those of `selected`.
        gates: three, `[B, N, HQ]`.
        block_counts: `[B, N, H]` int32, or None.
        rows: among the keys, and among the summaries; None for sequences of `num_keys` tokens.
        choice: the sizes of `choice.launch.select_blocks`.
        window_size, scale: of the branches.
    """
    B, N, HQ, _ = q.shape
    q = q.contiguous()
    place = located(q, num_keys, choice["length"], choice["stride"], rows)
    of_keys, of_summaries = place.rows, place.summary_rows
    if not compressed:
        length = choice["length"]
        compressed = [pooling.mean_of_rows(x, place.first, length=length) for x in selected]
    branches = [q.new_empty(B, N, HQ, selected[1].shape[3]) for _ in range(3)]
    lse = q.new_empty(3, B, N, HQ, dtype=torch.float32)
    outs = [*zip(branches, lse.unbind(), strict=True)]
    compressed_forward(q, *compressed, of_summaries, scale=scale, out=outs[0])
    ids = select_blocks(
        q, compressed[0], lse[0], of_keys, of_summaries, M=num_keys, **choice, scale=scale,
        block_counts=block_counts,
    )  # fmt: skip
    selected = [x.contiguous() for x in selected]
    sizes, lists = {"block_size": choice["block_size"], "scale": scale}, ids.flatten(0, 1)
    order = order_of(q, *selected, lists, block_size=choice["block_size"])
    is_tiled = order is Order.QUERY_TILES
    is_bad = find_bad(*selected) if is_tiled else lists.new_zeros(1)
    selected_forward(q, *selected, lists, of_keys, **sizes, is_bad=is_bad, out=outs[1])
    sizes = {"window_size": window_size, "scale": scale}
    o = torch.empty_like(branches[2])
    gated = Gated([gate.contiguous() for gate in gates], branches[:2], o)
    window_forward(q, *(window or selected), of_keys, **sizes, out=outs[2], gated=gated)
    places = (place.of_rows, place.of_tokens)
    return Outputs(o, branches, lse, ids, list(compressed), *places, is_bad)


class Gradients(NamedTuple):
    """Of the arguments of `forward`; those of `compressed` and `window` are empty where these
    are."""

    q: Tensor
    compressed: list[Tensor]
    selected: list[Tensor]
    window: list[Tensor]
    gates: list[Tensor]


@replay.replayed
def backward(
    d_o: Tensor, outputs: Outputs, q: Tensor, compressed: Pair, selected: Pair, window: Pair,
    gates: Sequence[Tensor], *, num_sequences: int, choice: dict[str, int], window_size: int,
    scale: float, nonnegative_gates: bool,
) -> Gradients:  # fmt: skip
    """The backward of `forward`, which returned `outputs` for the same arguments.

    `d_o` is the gradient of the sum, and there are at most `num_sequences`. The gradient of `q` is
    rounded after each branch, as when autograd adds them. With `nonnegative_gates`, no gate is
    below 0.
    """
    q, H = q.contiguous(), selected[0].shape[2]
    _, branches, lse, ids, summaries, of_rows, of_tokens, is_bad = outputs
    place = Located(of_rows, of_tokens, of_rows[:0], num_sequences)
    of_keys, of_summaries = place.rows, place.summary_rows
    if nonnegative_gates:
        d_o = d_o.contiguous()
        d_gates, delta, lse, lse2 = at_once.branch_numbers(d_o, gates, branches, lse, H)
        d_branches = [d_o] * 3
    else:
        d_gates, d_branches, delta, lse2 = at_once.branch_backward(d_o, gates, branches, lse, H)
    of_branch = [
        {"o": o, "lse": lse[i], "numbers": (delta[i], lse2[i]), "scale": scale}
        for i, o in enumerate(branches)
    ]

    # -- selection --
    d_q, *d_selected, _ = selected_backward(
        d_branches[1], None, q, *selected, rows=of_keys, ids=ids.flatten(0, 1),
        block_size=choice["block_size"], is_bad=is_bad, **of_branch[1],
    )  # fmt: skip

    # -- window --
    out = (d_q,) if window else (d_q, *d_selected)
    _, *d_window = window_backward(
        d_branches[2], None, q, *(window or selected), rows=of_keys, window_size=window_size,
        out=out, **of_branch[2],
    )  # fmt: skip

    # -- compression --
    _, *d_compressed = compressed_backward(
        d_branches[0], None, q, *summaries, rows=of_summaries, d_q=d_q, **of_branch[0]
    )
    if not compressed:
        length = choice["length"]
        sizes = {"length": length, "most": cdiv(length, choice["stride"]), "is_added": True}
        for d_summaries, d_x in zip(d_compressed, d_selected, strict=True):
            pooling.launch_backward(d_summaries, *of_tokens, d_x, **sizes)
        d_compressed = []
    return Gradients(d_q, d_compressed, d_selected, d_window if window else [], d_gates)


replay.make_replayable()
