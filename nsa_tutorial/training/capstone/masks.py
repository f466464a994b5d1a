"""The three branches with all their scores in memory: for texts of some hundred tokens, where a
processor is done with whole matrices sooner than with lists. `backend="masks"` of the capstone.

Symbols: `NB` blocks · `M_c` summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial.layer import NativeSparseAttentionConfig
from nsa_tutorial.sparse.block_selection import choose
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL


def scores(q: Tensor, k: Tensor) -> Tensor:
    """`q [B, N, HQ, D]` and `k [B, M, H, D]` to `[B, H, G, N, M]`."""
    q = q.unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5
    return torch.einsum("bnhgd,bmhd->bhgnm", q, k)


def weights(scores: Tensor, is_seen: Tensor) -> Tensor:
    """The softmax of `scores [B, H, G, N, M]` over what `is_seen`; 0 in a row that sees nothing."""
    masked = scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)
    return masked.softmax(-1) * is_seen


def mix(p: Tensor, v: Tensor) -> Tensor:
    """Weights `[B, H, G, N, M]` and values `[B, M, H, DV]` to `[B, N, HQ, DV]`."""
    return torch.einsum("bhgnm,bmhd->bnhgd", p, v).flatten(2, 3)


def past(N: int, device: torch.device) -> Tensor:
    """How far behind a query each key lies, `[N, N]`; negative in its future."""
    position = torch.arange(N, device=device)
    return position[:, None] - position


def window_attention(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    """`ops.sliding_window_attention`."""
    distance = past(q.shape[1], q.device)
    is_seen = (distance >= 0) & (distance < window_size)
    return mix(weights(scores(q, k), is_seen), v)


def summaries_seen(N: int, M_c: int, config: NativeSparseAttentionConfig, device: object) -> Tensor:
    """Which summaries have ended by each token, `[N, M_c]`."""
    last = torch.arange(M_c, device=device) * config.stride + config.length - 1
    return last <= torch.arange(N, device=device)[:, None]


def overlap(M_c: int, NB: int, config: NativeSparseAttentionConfig, device: object) -> Tensor:
    """What a summary shares with a block, in pieces of `stride` tokens (Eq. 9), `[M_c, NB]`."""
    c = config
    first = torch.arange(M_c, device=device)[:, None] * c.stride
    block = torch.arange(NB, device=device) * c.block_size
    shared = torch.minimum(first + c.length, block + c.block_size) - torch.maximum(first, block)
    return shared.clamp(min=0) / c.stride


@torch.no_grad()
def choose_blocks(p: Tensor, config: NativeSparseAttentionConfig) -> Tensor:
    """Lists `[B, N, H, top_n]` from the weights of the summaries, `p [B, H, G, N, M_c]`."""
    N, M_c = p.shape[-2:]
    NB = -(-N // config.block_size)
    score = p.sum(2) @ overlap(M_c, NB, config, p.device).to(p.dtype)  # [B, H, N, NB]
    own = torch.arange(N, device=p.device) // config.block_size
    forced = {"num_initial": NUM_INITIAL, "num_local": NUM_LOCAL}
    return choose(score.transpose(1, 2), own, top_n=config.top_n, **forced)


def tokens_seen(lists: Tensor, N: int, block_size: int) -> Tensor:
    """Lists `[B, N, H, S]` as a mask over the past, `[B, H, 1, N, N]`."""
    NB = -(-N // block_size)
    is_listed = torch.zeros(*lists.shape[:3], NB + 1, dtype=torch.bool, device=lists.device)
    is_listed.scatter_(-1, lists.long().where(lists >= 0, NB), True)  # -1 goes to a spare column
    is_seen = is_listed[..., :NB].repeat_interleave(block_size, -1)[..., :N]
    return (is_seen.transpose(1, 2) & (past(N, lists.device) >= 0)).unsqueeze(2)


def three_branches(
    q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor], window: Sequence[Tensor],
    gates: Sequence[Tensor | None], lists: Tensor | None, config: NativeSparseAttentionConfig,
) -> Tensor:  # fmt: skip
    """`ops.three_branches` for lists, or for the blocks that the summaries choose."""
    N, o, slot_scale = q.shape[1], 0, None
    if compressed:
        is_seen = summaries_seen(N, compressed[0].shape[1], config, q.device)
        p = weights(scores(q, compressed[0]), is_seen)
        o = gates[0][..., None] * mix(p, compressed[1])
    if selected:
        if lists is None:
            lists = choose_blocks(p, config)
        s = scores(q, selected[0])
        if config.learn_choice:
            slot_scale = shares(p, config)  # [B, H, 1, N, N]
            s = s * slot_scale
        is_seen = tokens_seen(lists, N, config.block_size)
        o = o + gates[1][..., None] * mix(weights(s, is_seen), selected[1])
    if gates[2] is not None:
        o = o + gates[2][..., None] * window_attention(q, *(window or selected), config.window_size)
    return o


def shares(p: Tensor, config: NativeSparseAttentionConfig) -> Tensor:
    """The factors 1 of `learn_choice`, whose gradients are those of a block's share of the
    attention to the summaries, `[B, H, 1, N, N]`."""
    N, M_c = p.shape[-2:]
    NB = -(-N // config.block_size)
    mass = p @ overlap(M_c, NB, config, p.device).to(p.dtype)  # [B, H, G, N, NB]
    share = (mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)).mean(2, keepdim=True)
    share = share.repeat_interleave(config.block_size, -1)[..., :N]
    return 1 + (share - share.detach())
