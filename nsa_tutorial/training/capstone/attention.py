"""The variants of attention that the capstone trains beside each other.

All are layers of this package with the same projections. Only where a query looks differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_tutorial import ops
from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.layer_parts import rotate
from nsa_tutorial.training.capstone import masks
from nsa_tutorial.training.capstone.listed import ListedAttention
from nsa_tutorial.training.capstone.settings import LISTED, Settings


def attention(settings: Settings) -> nn.Module:
    """The layer of a variant: `[B, N, width]` to the same."""
    s = settings
    if s.attention in ("dense", "window"):
        return PlainAttention(s)
    if s.attention in LISTED:
        return ListedAttention(s)
    return SparseAttention(config_of(s), s.attention, by_masks=s.backend == "masks")


def config_of(settings: Settings) -> NativeSparseAttentionConfig:
    """Of the layer of a sparse variant."""
    s = settings
    return NativeSparseAttentionConfig(
        width=s.width, query_heads=s.query_heads, kv_heads=s.kv_heads, key_width=s.head_width,
        value_width=s.head_width, block_size=s.block_size, top_n=s.top_n,
        window_size=s.window_size, length=s.summary_length, stride=s.stride,
        compression=s.compression, separate_keys=s.separate_keys,
        learn_choice=s.attention == "learned-choice",
        backend="reference" if s.backend == "masks" else s.backend,
    )  # fmt: skip


class PlainAttention(nn.Module):
    """One set of keys and values, and one branch: all keys, by PyTorch, or the window, by ours."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = s = settings
        self.q = nn.Linear(s.width, s.query_heads * s.head_width, bias=False)
        self.k = nn.Linear(s.width, s.kv_heads * s.head_width, bias=False)
        self.v = nn.Linear(s.width, s.kv_heads * s.head_width, bias=False)
        self.o = nn.Linear(s.query_heads * s.head_width, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        s, position = self.settings, torch.arange(x.shape[1], device=x.device)
        q, k, v = (f(x).unflatten(-1, (-1, s.head_width)) for f in (self.q, self.k, self.v))
        q, k = (rotate(x, position, 10_000.0) for x in (q, k))
        if s.attention == "window" and s.backend == "masks":
            o = masks.window_attention(q, k, v, s.window_size)
        elif s.attention == "window":
            o = ops.sliding_window_attention(q, k, v, window_size=s.window_size, backend=s.backend)
        else:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            o = o.transpose(1, 2)
        return self.o(o.flatten(2))


class SparseAttention(NativeSparseAttention):
    """NSA, and NSA with one thing taken away.

    Args:
        config: of the layer.
        variant: a name of `settings.VARIANTS`, other than "dense" and "window".
    """

    def __init__(
        self, config: NativeSparseAttentionConfig, variant: str = "nsa", by_masks: bool = False
    ) -> None:
        super().__init__(config)
        self.variant, self.by_masks = variant, by_masks
        self.lists: list[Tensor] | None = None  # while it is a list, `attend` adds its blocks

    def attend(
        self, q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor],
        window: Sequence[Tensor], gates: Sequence[Tensor], cu_seqlens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The gated sum of the branches that the variant has."""
        c, lists, counts = self.config, None, self.config.top_n
        if self.variant == "random":
            lists, counts = random_blocks(q, c), None
        elif self.variant == "no-summaries" or self.lists is not None:
            lists, counts = chosen_blocks(q, compressed, c), None
        if self.lists is not None:
            self.lists.append(lists)
        if self.variant == "learned-choice":
            lists, counts = None, c.top_n  # the operator chooses, and its scores learn
        branches = {"summaries": compressed, "selection": selected, "window": window}
        taken = self.variant.removeprefix("no-")
        if taken in branches:
            if taken == "selection" and not window:
                branches["window"] = selected  # whose keys the window shared
            branches[taken] = ()
            gates = [None if name == taken else g for name, g in zip(branches, gates, strict=True)]
        if taken == "selection":
            lists, counts = None, None
        if self.by_masks:
            return masks.three_branches(q, *branches.values(), gates, lists, c)
        return ops.three_branches(
            q, *branches.values(), gates, num_keys=q.shape[1], block_indices=lists,
            block_counts=counts, block_size=c.block_size, window_size=c.window_size,
            length=c.length, stride=c.stride, cu_seqlens=cu_seqlens,
            learn_choice=c.learn_choice, backend=c.backend,
            nonnegative_gates=True,  # after a sigmoid
        )  # fmt: skip


@torch.no_grad()
def chosen_blocks(
    q: Tensor, compressed: Sequence[Tensor], config: NativeSparseAttentionConfig
) -> Tensor:
    """The lists that NSA chooses, `[B, N, H, top_n]`."""
    c = config
    sizes = {"length": c.length, "stride": c.stride, "num_keys": q.shape[1], "backend": c.backend}
    _, lse = ops.compressed_attention(q, *compressed, return_lse=True, **sizes)
    return ops.select_blocks(q, compressed[0], lse, top_n=c.top_n, block_size=c.block_size, **sizes)


@torch.no_grad()
def random_blocks(q: Tensor, config: NativeSparseAttentionConfig) -> Tensor:
    """Lists as long as NSA's, `[B, N, H, top_n]`: the first block, the two latest, and others of
    the past at random, none twice. A list without room for all ends in -1."""
    B, N = q.shape[:2]
    NB = -(-N // config.block_size)
    own = torch.arange(N, device=q.device) // config.block_size
    block = torch.arange(NB, device=q.device)
    score = torch.rand(B, N, config.kv_heads, NB, device=q.device)
    is_forced = (block == 0) | (block > own[:, None] - 2)  # [N, NB]
    score = score.masked_fill(is_forced[:, None], 2.0)
    score = score.masked_fill((block > own[:, None])[:, None], -1.0)
    best, ids = score.topk(min(config.top_n, NB), -1)
    ids = ids.masked_fill(best < 0, NB).sort(-1).values
    return ids.masked_fill(ids == NB, -1).to(torch.int32)
