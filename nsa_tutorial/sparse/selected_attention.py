"""Attend to a short list of key blocks: the PyTorch reference of the kernels, and the oracle that
judges all of them.

`forward` runs the algorithm of the TileLang and Triton kernels, phase by phase and name by name,
for all programs at once: where a kernel's program handles one query and one key/value head, the
tensors here carry `[R, H, ...]` in front. It is differentiable. `dense_mask` and `masked_attention`
are the oracle: they know nothing of blocks but a slow, literal reading of the contract.

It does not validate (`ops` does), does not choose blocks, and keeps no block resident: speed is the
kernels' business.

Symbols: `R = B * N` query rows · `H` key/value heads · `G` query heads of a group · `S` slots ·
`BS` block size.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E


class QueryRows(NamedTuple):
    """What a kernel has to know of each query row, mostly as int32 tensors of shape `[R]`.

    Attributes:
        first_key: where the keys of the row's sequence begin in the flattened `[B * M]` keys.
        num_visible: how many of those keys the query may see, from the first one on. Causality, a
            sequence's end, more keys than queries and packed sequences are all contained in this
            one number.
        position: the query's own position in its sequence.
        num_sequences: how many sequences there are at most, a number that the host knows.
    """

    first_key: Tensor
    num_visible: Tensor
    position: Tensor
    num_sequences: int = 1


def query_rows(
    B: int, N: int, M: int, *, causal: bool, cu_seqlens: Tensor | None, device: torch.device
) -> QueryRows:
    """Locate every query row: queries are the last `N` of `M` positions, or, with `cu_seqlens`,
    packed sequences.

    Runs on `device` without synchronising with the host.
    """
    if cu_seqlens is None:
        num_sequences = B
        position = torch.arange(M - N, M, device=device).repeat(B)  # [R]
        first_key = torch.arange(B, device=device).repeat_interleave(N) * M  # [R]
        length = torch.full_like(position, M)
    else:
        num_sequences = len(cu_seqlens) - 1
        token = torch.arange(N, device=device)
        # [R] which sequence holds the token
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
        first_key = cu_seqlens[sequence]
        length = cu_seqlens[sequence + 1] - first_key
        position = token - first_key
    num_visible = position + 1 if causal else length
    first_key, num_visible, position = (
        t.to(torch.int32) for t in (first_key, num_visible, position)
    )
    return QueryRows(first_key, num_visible, position, num_sequences)


def block_list(
    block_indices: Tensor,
    rows: QueryRows,
    *,
    block_size: int,
    block_counts: Tensor | int | None,
    include_own_block: bool,
) -> Tensor:
    """Bring the block ids of the contract into the one form every backend walks: int32 `[R, H, S]`,
    with -1 for an empty slot.

    Slots past `block_counts` become -1, as do ids that no int32 holds; the query's own block is
    appended unless a slot lists it already. Ids that are negative, in the future or past the end
    stay: skipping them is the guard's work.
    """
    B, N, H, S = block_indices.shape
    ids = block_indices.reshape(B * N, H, S)
    if ids.dtype != torch.int32:
        ids = ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    if block_counts is not None:
        counts = (
            block_counts if isinstance(block_counts, int) else block_counts.reshape(B * N, H, 1)
        )
        ids = ids.masked_fill(torch.arange(S, device=ids.device) >= counts, -1)
    if include_own_block:
        own = (rows.position // block_size)[:, None, None].expand(-1, H, 1)  # [R, H, 1]
        ids = torch.cat([ids, own.masked_fill((ids == own).any(-1, keepdim=True), -1)], dim=-1)
    return ids.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Selected attention with an online softmax over the listed blocks.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, DV]`.
        ids: `[R, H, S]` int32 from `block_list`.
        rows: from `query_rows`.
        block_size: tokens per block.
        scale: factor on the scores, as in `softmax(scale * q @ k)`.
        slot_scale: `[R, H, S]`, a factor on the scores of each slot's keys; None for none.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]`: natural logarithm, fp32 (fp64
        for fp64 inputs).
    """
    # -- locate the program --
    (B, N, HQ, D), (H, DV), BS = q.shape, v.shape[2:], block_size
    R, G, S, dtype = B * N, HQ // H, ids.shape[-1], torch.promote_types(q.dtype, torch.float32)
    first_key, num_visible = rows.first_key[:, None], rows.num_visible[:, None]  # [R, 1]
    k, v_rows = k.reshape(-1, H, D), v.reshape(-1, H, DV)
    head = torch.arange(H, device=q.device)[:, None]  # [H, 1]
    scale_log2 = scale * LOG2_E

    # -- load the query group --
    q_tile = q.reshape(R, H, G, D).to(dtype)  # [R, H, G, D]

    # -- initialise --
    acc_o = q_tile.new_zeros(R, H, G, DV)
    running_sum = q_tile.new_zeros(R, H, G)
    scores_max = torch.full_like(running_sum, -math.inf)
    is_empty = torch.ones(R, H, 1, dtype=torch.bool, device=q.device)  # until a block is visible

    for slot in range(S):
        # -- guard --
        block_id = ids[:, :, slot]  # [R, H]
        is_visible = (block_id >= 0) & (block_id < (num_visible + BS - 1) // BS)
        is_empty = is_empty & ~is_visible[:, :, None]
        block_start = torch.where(is_visible, block_id, 0) * BS

        # -- load the keys --
        offset = block_start[:, :, None] + torch.arange(BS, device=q.device)  # [R, H, BS]
        is_seen = is_visible[:, :, None] & (offset < num_visible[:, :, None])
        key_row = torch.where(is_seen, first_key[:, :, None] + offset, 0)
        k_tile = k[key_row, head].to(dtype).masked_fill(~is_seen[..., None], 0)  # [R, H, BS, D]

        # -- scores --
        acc_s = q_tile @ k_tile.transpose(-1, -2)  # [R, H, G, BS]
        if slot_scale is not None:  # an empty slot's factor may be anything: it is not used
            factor = torch.where(is_visible, slot_scale[:, :, slot], 1)  # [R, H]
            acc_s = acc_s * factor[:, :, None, None]

        # -- mask --
        acc_s = acc_s.masked_fill(~is_seen[:, :, None, :], -math.inf)

        # -- online softmax --
        scores_max_prev = scores_max
        scores_max = torch.maximum(scores_max_prev, acc_s.detach().amax(-1))
        # where nothing is seen yet, -inf - -inf would be NaN
        shift = scores_max.masked_fill(scores_max == -math.inf, 0)
        scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)
        acc_s = torch.exp2((acc_s - shift[..., None]) * scale_log2)
        scores_sum = acc_s.sum(-1)
        running_sum = running_sum * scores_scale + scores_sum
        acc_o = acc_o * scores_scale[..., None]

        # -- load the values --
        # [R, H, BS, DV]
        v_tile = v_rows[key_row, head].to(dtype).masked_fill(~is_seen[..., None], 0)

        # -- accumulate --
        acc_o = acc_o + acc_s @ v_tile

    # -- normalise and store --
    safe_sum = running_sum.masked_fill(is_empty, 1)
    o = acc_o / safe_sum[..., None]
    lse = scores_max * scale + torch.log(safe_sum)  # -inf for an empty row
    return o.reshape(B, N, HQ, DV).to(v.dtype), lse.reshape(B, N, HQ)


def dense_mask(
    block_indices: Tensor, M: int, *, block_size: int, block_counts: Tensor | int | None = None,
    include_own_block: bool = False,
    causal: bool = True, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same selection as a boolean mask `[B, N, H, M]`, True where visible, by a loop that reads
    like the contract. Slow."""
    B, N, H, S = block_indices.shape
    mask = torch.zeros(B, N, H, M, dtype=torch.bool)
    bounds = [0, M] if cu_seqlens is None else cu_seqlens.tolist()
    for b, n, h in ((b, n, h) for b in range(B) for n in range(N) for h in range(H)):
        token = M - N + n
        start, end = next((i, j) for i, j in pairwise(bounds) if i <= token < j)
        count = (
            S
            if block_counts is None
            else block_counts
            if isinstance(block_counts, int)
            else int(block_counts[b, n, h])
        )
        ids = block_indices[b, n, h, : max(count, 0)].tolist()
        if include_own_block:
            ids.append((token - start) // block_size)
        for block_id in ids:
            first, last = start + block_id * block_size, start + (block_id + 1) * block_size
            last = min(last, token + 1 if causal else end)
            if block_id >= 0 and first < last:
                mask[b, n, h, first:last] = True
    return mask.to(block_indices.device)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention under a mask `[B, N, H, M]`, in the dtype of its inputs: in fp64 the truth,
    in fp16 what plain PyTorch gives.

    Returns `o [B, N, HQ, DV]` and `lse [B, N, HQ]`; a row that sees nothing has output 0 and
    `lse = -inf`.
    """
    G = q.shape[2] // k.shape[2]
    k, v, mask = (t.repeat_interleave(G, dim=2) for t in (k, v, mask))
    scores = torch.einsum("bnhd,bmhd->bnhm", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~mask, 0)
    return torch.einsum("bnhm,bmhd->bnhd", weights, v), torch.logsumexp(scores, dim=-1)
