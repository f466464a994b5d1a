"""Chapter 15: attention of the newest tokens to a cache, and what is written to it: the PyTorch
reference.

A cache holds, for each branch, keys and values of its own: all tokens for the lists, summaries, the
latest tokens for the window (a ring: token `t` lies in place `t % ring`), and the tokens of the
summaries that are not complete yet (a ring as well). Tokens and summaries lie in pages: token `t`
of row `b` is in page `block_table[b, t // page_size]`, in place `t % page_size`, and summary `j` in
the page of its first token, in place `j * stride % page_size // stride`. Without a table, each row
is one page.

Nothing here waits for the device: lengths are tensors, and what they hide is masked. Nothing
validates either (`ops` does).

Symbols: `n` queries of a row, its last positions · `T` tokens that a row's pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.sparse import block_selection, query_tiles
from nsa_tutorial.sparse.block_selection import overlap_weights
from nsa_tutorial.sparse.compression import num_summaries
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL, gated_sum
from nsa_tutorial.sparse.query_tiles import View


class Buffers(NamedTuple):
    """What a step reads.

    Attributes:
        k_cmp, v_cmp: summaries, `[pages, page_size // stride, H, D]` and `[…, DV]`.
        k, v: tokens for the lists, `[pages, page_size, H, D]` and `[…, DV]`.
        k_window, v_window: tokens for the window, `[B, ring, H, D]` and `[…, DV]`.
        lengths: `[B]` int32, tokens of each row, the queries' own included.
        block_table: `[B, max_pages]` int32, or None for one page a row.
    """

    k_cmp: Tensor
    v_cmp: Tensor
    k: Tensor
    v: Tensor
    k_window: Tensor
    v_window: Tensor
    lengths: Tensor
    block_table: Tensor | None

    @property
    def room(self) -> int:
        """Tokens that a row may have."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k.shape[1]


def places(position: Tensor, block_table: Tensor | None, page_size: int) -> tuple[Tensor, Tensor]:
    """The page of each `position [B, ...]`, and its place there; positions are in the room."""
    if block_table is None:
        row = torch.arange(len(position), device=position.device)
        return row.view(-1, *[1] * (position.ndim - 1)).expand_as(position), position
    page = block_table.long().gather(1, (position // page_size).flatten(1)).view_as(position)
    return page, position % page_size


def query_positions(lengths: Tensor, n: int) -> Tensor:
    """The positions of the last `n` tokens of each row, `[B, n]` int64; negative where a row has
    fewer."""
    return lengths.long()[:, None] - n + torch.arange(n, device=lengths.device)


def decode_attention(
    q: Tensor, buffers: Buffers, gates: Sequence[Tensor | None], block_indices: Tensor | None, *,
    top_n: int, block_size: int, window_size: int, length: int, stride: int, scale: float,
) -> Tensor:  # fmt: skip
    """Native Sparse Attention of the last `n` tokens of each row.

    Args:
        q: `[B, n, HQ, D]`.
        buffers: what the cache holds, the queries' own tokens included.
        gates: of compression, selection and window, `[B, n, HQ]` each; None leaves a branch out.
        block_indices: `[B, n, H, S]`, lists of distinct blocks; None chooses the best `top_n` by
            the summaries.
        block_size, window_size, length, stride, scale: as for `ops.native_sparse_attention`.

    Returns:
        `o [B, n, HQ, DV]` in the dtype of the values.
    """
    position = query_positions(buffers.lengths, q.shape[1])  # [B, n]
    o_cmp = o_slc = o_swa = None
    if gates[0] is not None:
        o_cmp, mass = _attend_to_summaries(q, buffers, position, length, stride, scale)
        if gates[1] is not None and block_indices is None:
            sizes = {"top_n": top_n, "block_size": block_size, "length": length, "stride": stride}
            block_indices = _choose(mass, position, buffers.room, **sizes)
    if gates[1] is not None:
        o_slc = _attend_to_lists(q, buffers, position, block_indices, block_size, scale)
    if gates[2] is not None:
        o_swa = _attend_to_window(q, buffers, position, window_size, scale)
    return gated_sum(gates, (o_cmp, o_slc, o_swa))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `q [B, n, HQ, D]` to all of `k [B, J, H, D]` that it sees, `[B, H, n, J]`."""
    view = View([(slice(0, q.shape[1]), slice(0, k.shape[1]))], lambda queries, keys: is_seen)
    return query_tiles.attend(q, k, v, view, scale=scale)


def _attend_to_summaries(
    q: Tensor, buffers: Buffers, position: Tensor, length: int, stride: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the complete summaries, and the attention that each of them gets, summed over a
    group: `[B, H, n, summaries]`."""
    H, page_size = buffers.k_cmp.shape[2], buffers.k.shape[1]
    summary = torch.arange(buffers.room // stride, device=q.device)
    first = (summary * stride).expand(len(q), -1)  # [B, summaries], its first token
    page, place = places(first, buffers.block_table, page_size)
    k, v = buffers.k_cmp[page, place // stride], buffers.v_cmp[page, place // stride]
    num_visible = num_summaries(position + 1, length, stride)  # [B, n]
    is_seen = (summary < num_visible[..., None])[:, None].expand(-1, H, -1, -1)
    o, lse = _attend(q, k, v, is_seen, scale)
    scores = query_tiles.masked_scores(q, k, is_seen) * scale  # [B, H, G, n, summaries]
    lse = lse.unflatten(2, (H, -1)).permute(0, 2, 3, 1)[..., None]  # [B, H, G, n, 1]
    mass = torch.exp(scores - lse).masked_fill(~is_seen[:, :, None], 0).sum(2)
    return o, mass


def _choose(
    mass: Tensor, position: Tensor, room: int, *, top_n: int, block_size: int, length: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """The lists `[B, n, H, top_n]`, as `block_selection.select_blocks` chooses them, from the
    attention `[B, H, n, summaries]` to the summaries."""
    B, H, n, _ = mass.shape
    overlap = overlap_weights(length, stride, block_size, -(-room // block_size), mass.device)
    own = position.flatten()  # [B * n]: each query is a row of its own
    num_visible = num_summaries(own + 1, length, stride)
    mass = mass.transpose(0, 1).reshape(1, H, B * n, -1)
    score = block_selection.from_summaries_to_blocks(
        mass, torch.zeros_like(own), num_visible, overlap
    )
    counts = {"num_initial": NUM_INITIAL, "num_local": NUM_LOCAL}
    ids = block_selection.choose(score, own // block_size, top_n=top_n, **counts)
    return ids.view(B, n, H, top_n)


def _attend_to_lists(
    q: Tensor, buffers: Buffers, position: Tensor, ids: Tensor, block_size: int, scale: float
) -> Tensor:
    """Attention to the listed blocks, of which it gathers no other tokens."""
    (B, n, H), (page_size, D) = ids.shape[:3], buffers.k.shape[1::2]
    offset = torch.arange(block_size, device=q.device)
    token = (ids.long()[..., None] * block_size + offset).flatten(3)  # [B, n, H, S * BS]
    is_seen = (ids >= 0)[..., None].expand(*ids.shape, block_size).flatten(3)
    is_seen = is_seen & (token <= position[..., None, None]) & (token < buffers.room)
    page, place = places(token.where(is_seen, 0), buffers.block_table, page_size)
    head = torch.arange(H, device=q.device)[:, None]
    k, v = (x[page, place, head].flatten(0, 1).transpose(1, 2) for x in (buffers.k, buffers.v))
    o, _ = _attend(q.reshape(B * n, 1, -1, D), k, v, is_seen.flatten(0, 1)[:, :, None], scale)
    return o.view(B, n, *o.shape[2:])


def _attend_to_window(
    q: Tensor, buffers: Buffers, position: Tensor, window_size: int, scale: float
) -> Tensor:
    """Attention to the latest keys, which lie in a ring."""
    (B, n, HQ, D), (ring, H) = q.shape, buffers.k_window.shape[1:3]
    token = position[..., None] - torch.arange(min(window_size, ring), device=q.device)
    row = torch.arange(B, device=q.device)[:, None, None]
    k, v = (x[row, token % ring].flatten(0, 1) for x in (buffers.k_window, buffers.v_window))
    is_seen = (token >= 0).flatten(0, 1)[:, None, None].expand(-1, H, -1, -1)
    o, _ = _attend(q.reshape(B * n, 1, HQ, D), k, v, is_seen, scale)
    return o.view(B, n, *o.shape[2:])


# -- what is written --


def write_tokens(
    targets: Sequence[Tensor], tokens: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """Write the next `n` tokens of each row, whose `lengths [B]` do not count them yet.

    Args:
        targets: keys and values of the pages, of the window's ring and of the ring of pending
            tokens.
        tokens: what goes there, `[B, n, H, D]` and `[B, n, H, DV]` each.
    """
    position = lengths.long()[:, None] + torch.arange(tokens[0].shape[1], device=lengths.device)
    page, place = places(position, block_table, targets[0].shape[1])
    row = torch.arange(len(position), device=position.device)[:, None]
    for i, (target, x) in enumerate(zip(targets, tokens, strict=True)):
        if i < 2:
            target[page, place] = x
        else:
            target[row, position % target.shape[1]] = x


def most_new_summaries(n: int, stride: int) -> int:
    """How many summaries `n` tokens complete at most."""
    return -(-n // stride)


def pending_windows(ring: Tensor, lengths: Tensor, n: int, length: int, stride: int) -> Tensor:
    """The windows of the summaries that the latest `n` tokens may have completed: `[B * windows,
    length, H, D]`, from the ring of pending tokens. `write_summaries` drops those that are not
    complete."""
    first = _first_new(lengths, n, length, stride)[:, None] * stride  # [B, 1]
    offset = torch.arange(most_new_summaries(n, stride), device=ring.device) * stride
    token = (first + offset)[..., None] + torch.arange(length, device=ring.device)
    row = torch.arange(len(ring), device=ring.device)[:, None, None]
    return ring[row, token % ring.shape[1]].flatten(0, 1)


def _first_new(lengths: Tensor, n: int, length: int, stride: int) -> Tensor:
    """The first summary that the latest `n` tokens complete, `[B]`; `lengths` counts them."""
    return num_summaries(lengths.long() - n, length, stride)


def write_summaries(
    targets: Sequence[Tensor], summaries: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None, n: int, length: int, stride: int, page_size: int,
) -> None:  # fmt: skip
    """Write the summaries that the latest `n` tokens completed, of those that were made of
    `pending_windows`: `[B, windows, H, D]` and `[…, DV]` each."""
    room = page_size * (1 if block_table is None else block_table.shape[1])
    first = _first_new(lengths, n, length, stride)
    # one after the other: one that is not complete writes back what is there
    for i in range(summaries[0].shape[1]):
        token = (first + i) * stride
        is_complete = (token + length <= lengths)[:, None, None]
        page, place = places(token.clamp(max=room - 1)[:, None], block_table, page_size)
        page, place = page[:, 0], place[:, 0] // stride
        for target, x in zip(targets, summaries, strict=True):
            target[page, place] = torch.where(is_complete, x[:, i], target[page, place])
