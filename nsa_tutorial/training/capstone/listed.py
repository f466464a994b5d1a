"""Attention to nothing but a list, with the two dials of chapter 19: what is listed, blocks or
single tokens, and who chooses, mean keys, an indexer that learns, or chance.

    variant   a list has            chosen by
    moba      `top_n` blocks        the product of the query and a block's mean key
    msa       `top_n` blocks        an indexer's best token in each block
    dsa       as many tokens        an indexer
    top       as many tokens        the attention itself, which costs as much as dense attention
    any       `top_n` blocks        chance

The query's own block is always listed, or its own token.

Symbols: `NU` units, which are blocks or tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_tutorial import ops
from nsa_tutorial.layer_parts import rotate
from nsa_tutorial.sparse import indexer
from nsa_tutorial.sparse.block_selection import choose
from nsa_tutorial.sparse.indexer import Indexed
from nsa_tutorial.training.capstone import masks
from nsa_tutorial.training.capstone.settings import Settings

INDEXED = ("msa", "dsa")
OF_TOKENS = ("dsa", "top")


class ListedAttention(nn.Module):
    """One set of keys and values, and one softmax over a list of each query.

    Args:
        settings: `attention` is one of the variants above.

    Attributes:
        unit: tokens of what is listed.
        slots: length of a list.
        forced: how many of the latest units are always listed, 1.
        lists: while it is a list, each forward adds its lists `[B, N, H, slots]` to it.
        loss: what the indexer has to learn in the last forward, a scalar, or None.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = s = settings
        self.unit = 1 if s.attention in OF_TOKENS else s.block_size
        self.slots = s.top_n * s.block_size // self.unit
        self.forced = 1
        self.lists: list[Tensor] | None = None
        self.loss: Tensor | None = None
        self.q = nn.Linear(s.width, s.query_heads * s.head_width, bias=False)
        self.k = nn.Linear(s.width, s.kv_heads * s.head_width, bias=False)
        self.v = nn.Linear(s.width, s.kv_heads * s.head_width, bias=False)
        self.o = nn.Linear(s.query_heads * s.head_width, s.width, bias=False)
        self.indexer = None
        if s.attention in INDEXED:
            self.indexer = indexer.Indexer(s.width, s.index_heads * s.kv_heads, s.index_width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        s, position = self.settings, torch.arange(x.shape[1], device=x.device)
        q, k, v = (f(x).unflatten(-1, (-1, s.head_width)) for f in (self.q, self.k, self.v))
        q, k = (rotate(x, position, 10_000.0) for x in (q, k))
        indexed = None if self.indexer is None else self.indexer(x)
        o = (self._by_masks if s.backend == "masks" else self._by_operators)(q, k, v, indexed)
        return self.o(o.flatten(2))

    def _by_masks(self, q: Tensor, k: Tensor, v: Tensor, indexed: Indexed | None) -> Tensor:
        """All scores in memory, and each of them computed once."""
        s, N = masks.scores(q, k), q.shape[1]
        if indexed is not None:
            lists, self.loss = self.index(q, k, indexed, s)
        else:
            lists = self._list(self._of_units(q, k))
        self._keep(lists)
        return masks.mix(masks.weights(s, masks.tokens_seen(lists, N, self.unit)), v)

    def index(self, q: Tensor, k: Tensor, indexed: Indexed, s: Tensor) -> tuple[Tensor, Tensor]:
        """An indexer's lists `[B, N, H, slots]`, and its loss; `s` is what `masks.scores` gives."""
        score = indexer.token_scores(*indexed, kv_heads=k.shape[2]).transpose(1, 2)
        return self._list(self._best(score.detach())), kl_of_scores(s, score)

    def _by_operators(self, q: Tensor, k: Tensor, v: Tensor, indexed: Indexed | None) -> Tensor:
        backend, kv_heads = self.settings.backend, k.shape[2]
        if indexed is not None:
            lists = ops.index_blocks(
                *indexed, kv_heads=kv_heads, top_n=self.slots, block_size=self.unit,
                num_local=self.forced, backend=backend,
            )  # fmt: skip
            self.loss = ops.index_loss(q, k, *indexed, kv_heads=kv_heads)
        else:
            lists = self._list(self._of_units(q, k))
        self._keep(lists)
        return ops.selected_attention(
            q, k, v, block_indices=lists, block_size=self.unit, backend=backend
        )

    def _best(self, score: Tensor) -> Tensor:
        """The best of each unit's tokens, `[B, H, N, N]` to `[B, H, N, NU]`."""
        N = score.shape[-1]
        score = score.masked_fill(masks.past(N, score.device) < 0, -math.inf)
        score = F.pad(score, (0, -N % self.unit), value=-math.inf)
        return score.unflatten(-1, (-1, self.unit)).amax(-1)

    @torch.no_grad()
    def _of_units(self, q: Tensor, k: Tensor) -> Tensor:
        """What each unit is worth without an indexer: `[B, H, N, NU]`."""
        B, N, H = k.shape[:3]
        if self.settings.attention == "top":
            return masks.weights(masks.scores(q, k), masks.past(N, q.device) >= 0).sum(2)
        NU = -(-N // self.unit)
        if self.settings.attention == "any":
            return torch.rand(B, H, N, NU, device=q.device)
        k = F.pad(k, (0, 0, 0, 0, 0, -N % self.unit)).unflatten(1, (NU, self.unit)).mean(2)
        return masks.scores(q, k).sum(2)

    def _list(self, of_unit: Tensor) -> Tensor:
        """The lists `[B, N, H, slots]` of the best units."""
        own = torch.arange(of_unit.shape[2], device=of_unit.device) // self.unit
        score = of_unit.transpose(1, 2)
        return choose(score, own, top_n=self.slots, num_initial=0, num_local=self.forced)

    def _keep(self, lists: Tensor) -> None:
        if self.lists is not None:
            self.lists.append(lists)


def kl_of_scores(s: Tensor, score: Tensor) -> Tensor:
    """`indexer.kl_loss` of scores that are there: of the main heads `[B, H, G, N, N]`, and of the
    indexer `[B, H, N, N]`."""
    is_past = masks.past(s.shape[-1], s.device) >= 0
    target = masks.weights(s.detach(), is_past).mean(2)
    log_p = score.masked_fill(~is_past, -math.inf).log_softmax(-1).masked_fill(~is_past, 0)
    return (torch.xlogy(target, target) - target * log_p).sum(-1).mean()


def index_loss(model: nn.Module) -> Tensor | float:
    """What the indexers of a model have to learn after a forward: the sum over its layers."""
    layers = [m for m in model.modules() if isinstance(m, ListedAttention)]
    return sum(layer.loss for layer in layers if layer.loss is not None)
