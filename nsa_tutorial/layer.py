"""The layer that a model holds: projections, gates, a learnt compression for keys and for values,
and Native Sparse Attention between them (arXiv 2502.11089; chapter 08).

    config = NativeSparseAttentionConfig(width=512, query_heads=16, kv_heads=1)
    layer = NativeSparseAttention(config)
    y = layer(x)  # [B, N, width] to [B, N, width]
    cache = layer.new_cache(batch_size=B, max_tokens=4096)
    y = layer(x[:, :n], cache=cache)  # a prompt; then one token after the other

    y = layer(x, mesh=mesh, cut=cut)  # of a text that several ranks share: training.many_gpus

It has no tensor parallelism and no dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nsa_tutorial import library, ops
from nsa_tutorial.layer_parts import Compression, turned_sets
from nsa_tutorial.runtime import checks
from nsa_tutorial.serving.cache import Cache
from nsa_tutorial.sparse.compression import KINDS
from nsa_tutorial.sparse.native_sparse_attention import BRANCHES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nsa_tutorial.training.many_gpus.cuts import Cut
    from nsa_tutorial.training.many_gpus.operators import Share


@dataclass(frozen=True)
class NativeSparseAttentionConfig:
    """The sizes of a layer, checked when it is made: a wrong one raises `ValueError` or
    `TypeError`, naming it.

    Attributes:
        width: of the model.
        query_heads, kv_heads: `HQ` and `H`; the groups of `HQ // H` heads share keys, values and
            selected blocks.
        key_width, value_width: `D` and `DV`, at most 256.
        block_size, top_n: tokens of a selected block, and blocks of a list.
        window_size: keys of the window.
        length, stride, compression: of the summaries, as for `ops.compress`.
        separate_keys: each branch has keys and values of its own, as in the paper; otherwise all
            share one set.
        rotary_base: of the rotary embedding of queries and keys, before they are summarised; None
            for none.
        gate_width: hidden units of the gates' MLP.
        learn_choice: the scores that choose the blocks learn from what the blocks were worth, as in
            `ops.native_sparse_attention`; otherwise they learn through the compression alone.
        backend: of every operator.
    """

    width: int
    query_heads: int
    kv_heads: int
    key_width: int = 64
    value_width: int = 64
    block_size: int = 64
    top_n: int = 16
    window_size: int = 512
    length: int = 32
    stride: int = 16
    compression: str = "mlp"
    separate_keys: bool = True
    rotary_base: float | None = 10_000.0
    gate_width: int = 64
    learn_choice: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        sizes = ("width", "query_heads", "kv_heads", "block_size", "length", "stride", "gate_width")
        for name in sizes:
            checks.check_positive_int(name, getattr(self, name))
        checks.check_window_size(self.window_size)
        checks.check_positive_int("top_n", self.top_n, least=3)
        for name in ("key_width", "value_width"):
            checks.check_positive_int(name, getattr(self, name), most=checks.LARGEST_WIDTH)
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads: got {self.query_heads}, expected a multiple of kv_heads, "
                f"{self.kv_heads}"
            )
        checks.check_one_of("compression", self.compression, KINDS)
        checks.check_bool("separate_keys", self.separate_keys)
        checks.check_bool("learn_choice", self.learn_choice)
        if self.rotary_base is not None:
            checks.check_positive_number("rotary_base", self.rotary_base, otherwise=" or None")
            if self.key_width % 2:
                raise ValueError(
                    f"key_width: got {self.key_width}, expected an even width for the rotary "
                    "embedding"
                )
        checks.check_backend(self.backend)


class NativeSparseAttention(nn.Module):
    """A causal attention layer: `x [B, N, width]` to `[B, N, width]`."""

    def __init__(self, config: NativeSparseAttentionConfig) -> None:
        super().__init__()
        self.config = c = config
        sets = len(BRANCHES) if c.separate_keys else 1
        self.q = nn.Linear(c.width, c.query_heads * c.key_width, bias=False)
        self.k = nn.Linear(c.width, sets * c.kv_heads * c.key_width, bias=False)
        self.v = nn.Linear(c.width, sets * c.kv_heads * c.value_width, bias=False)
        self.o = nn.Linear(c.query_heads * c.value_width, c.width, bias=False)
        self.gate = nn.Sequential(
            nn.Linear(c.width, c.gate_width),
            nn.SiLU(),
            nn.Linear(c.gate_width, len(BRANCHES) * c.query_heads),
            nn.Sigmoid(),
        )
        windows = (c.compression, c.length, c.stride, c.kv_heads)
        self.compress_k = Compression(*windows, c.key_width, c.backend)
        self.compress_v = Compression(*windows, c.value_width, c.backend)

    def new_cache(
        self, batch_size: int, max_tokens: int, page_size: int | None = None, *, max_step: int = 16
    ) -> Cache:
        """An empty cache for this layer, in the dtype and on the device of its weights.

        Args:
            batch_size: sequences.
            max_tokens: tokens of a sequence, at most.
            page_size: tokens of a page, a multiple of the block size and of the stride; None gives
                each row one page.
            max_step: tokens that are appended at a time, longer inputs being cut, and that can
                always be taken back.
        """
        c, weight = self.config, self.k.weight
        return Cache(
            batch_size=batch_size, max_tokens=max_tokens, heads=c.kv_heads, key_width=c.key_width,
            value_width=c.value_width, block_size=c.block_size, window_size=c.window_size,
            length=c.length, stride=c.stride, page_size=page_size, max_step=max_step,
            dtype=weight.dtype, device=weight.device, backend=c.backend,
        )  # fmt: skip

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: Cache | None = None,
        mesh: DeviceMesh | None = None, cut: Cut | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            x: `[B, N, width]`.
            cu_seqlens: `[num_sequences + 1]` offsets of packed sequences, `B == 1`; positions count
                from each one's start.
            cache: from `new_cache`: `x` follows what each row of it holds, is appended, and attends
                to all of it. The result is that of the whole text at these positions, without a
                gradient.
            mesh, cut: `x` holds this rank's tokens of a longer text, which `cut` cuts over the
                ranks of the mesh's dimension "context"; without a `cut`, a zigzag of equal
                shares. Each rank's gradients are those of its own tokens, and of the summaries
                that end in them: add them up over the context, as `fully_shard` does.

        Raises:
            ValueError: also for a cache without room for `x`, which then stays as it is.
        """
        c = self.config
        checks.check_tensor("x", x, "[B, N, width]", checks.FLOATS)
        if x.shape[2] != c.width:
            raise ValueError(
                f"x: got {checks.describe(x)}, expected the width of the layer, {c.width}"
            )
        checks.check_cu_seqlens(cu_seqlens, x, x.shape[1], name="x")
        B, N = x.shape[:2]
        share = None if mesh is None else _share(mesh, cut, N, cu_seqlens, cache)
        if cache is not None:
            _check_cache(cache, x, cu_seqlens)
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self(x, cache=cache)
            most = cache.max_step
            if x.shape[1] > most:
                cache.check_room(N)  # before anything is written
                if not cache.is_empty:  # in steps
                    return torch.cat([self(piece, cache=cache) for piece in x.split(most, 1)], 1)

        # -- project --
        q = self.q(x).view(B, N, c.query_heads, c.key_width)
        k = self.k(x).unflatten(-1, (-1, c.key_width))  # [B, N, sets * H, D]
        v = self.v(x).unflatten(-1, (-1, c.value_width))
        gates = self.gate(x).view(B, N, len(BRANCHES), c.query_heads)
        position = None  # from 0 on
        if c.rotary_base is not None:
            if cu_seqlens is not None:
                position = library.positions(cu_seqlens, N)
            if cache is not None:
                position = cache.positions(N)
            if share is not None:
                position = share.positions(x.device)

        # -- one set of keys and values for each branch --
        num = len(BRANCHES) if c.separate_keys else 1
        (q,), k, v, gates = turned_sets(
            (q, k, v, gates), (1, num, num, len(BRANCHES)), position, c.rotary_base, c.backend
        )
        gates = [gate.squeeze(2) for gate in gates]  # [B, N, HQ]
        sets = list(zip(k, v, strict=True))
        (k_cmp, v_cmp), selected, window = sets if c.separate_keys else (*sets * 2, ())

        # -- a few tokens after those of a cache --
        tokens = (*selected, *(window or selected), k_cmp, v_cmp)
        if cache is not None and x.shape[1] <= most:
            return self.o(self._append(cache, q, gates, tokens).flatten(2))

        # -- a share of a text --
        if share is not None:
            return self.o(self._over_ranks(share, q, gates, tokens, bool(window)).flatten(2))

        # -- attend --
        compressed = (self.compress_k(k_cmp, cu_seqlens), self.compress_v(v_cmp, cu_seqlens))
        o = self.attend(q, compressed, selected, window, gates, cu_seqlens)
        if cache is not None:
            cache.fill(*tokens, summaries=compressed)
        return self.o(o.flatten(2))

    def attend(
        self, q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor],
        window: Sequence[Tensor], gates: Sequence[Tensor], cu_seqlens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The gated sum of the branches, `[B, N, HQ, DV]`. Variants of the layer replace it."""
        c = self.config
        return ops.three_branches(
            q, compressed, selected, window, gates, num_keys=q.shape[1], block_counts=c.top_n,
            block_size=c.block_size, window_size=c.window_size, length=c.length, stride=c.stride,
            cu_seqlens=cu_seqlens, learn_choice=c.learn_choice, backend=c.backend,
            nonnegative_gates=True,  # after a sigmoid
        )  # fmt: skip

    def _over_ranks(
        self, share: Share, q: Tensor, gates: Sequence[Tensor], tokens: Sequence[Tensor],
        has_window: bool,
    ) -> Tensor:  # fmt: skip
        """What `attend` returns, of this rank's tokens; the operators of a share take the place of
        `ops`."""
        if type(self).attend is not NativeSparseAttention.attend:
            raise TypeError(
                f"mesh: got one, expected None: {type(self).__name__} has an attend of its own"
            )
        c, (k_slc, v_slc, k_swa, v_swa, k_cmp, v_cmp) = self.config, tokens
        compressed = (self.compress_k(k_cmp, share=share), self.compress_v(v_cmp, share=share))
        return share.three_branches(
            q, compressed, (k_slc, v_slc), (k_swa, v_swa) if has_window else (), gates,
            block_counts=c.top_n, block_size=c.block_size, window_size=c.window_size,
            length=c.length, stride=c.stride, learn_choice=c.learn_choice, backend=c.backend,
        )  # fmt: skip

    def _append(
        self, cache: Cache, q: Tensor, gates: Sequence[Tensor], tokens: Sequence[Tensor]
    ) -> Tensor:
        """Write the keys and values of a few tokens, and the summaries that they complete, and
        attend to all that the cache holds: `[B, n, HQ, DV]`."""
        c, n = self.config, q.shape[1]
        cache.write(*tokens)
        k, v = cache.pending_windows(n)
        cache.write_summaries(self.compress_k(k), self.compress_v(v), n)
        return cache.attend(q, gates, block_counts=c.top_n, block_size=c.block_size)


def _share(
    mesh: DeviceMesh, cut: Cut | None, N: int, cu_seqlens: Tensor | None, cache: Cache | None
) -> Share:
    """This rank's share of a text, `N` tokens."""
    from nsa_tutorial.training.many_gpus.operators import Share

    for name, x in (("cu_seqlens", cu_seqlens), ("cache", cache)):
        if x is not None:
            raise ValueError(
                f"{name}: got {checks.describe(x)}, expected None with a mesh: the cut holds the "
                "documents, and a cache is one process's"
            )
    return Share.of(mesh, cut, N)


def _check_cache(cache: object, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """`cache` is one, and fits `x`."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: got {checks.describe(cache)}, expected one from new_cache")
    if cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: got a tensor, expected None with a cache: a row is a sequence"
        )
    B, place = len(cache.lengths), cache.lengths.device
    if len(x) != B or x.device != place:
        raise ValueError(
            f"x: got {checks.describe(x)}, expected the batch and the device of the cache, {B} on "
            f"{place}"
        )
