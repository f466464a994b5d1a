"""Chapter 08: three views of the past, gated (NSA, arXiv 2502.11089, section 3.2, Eq. 5).

`forward` runs the three branches, each through its operator, and `gated_sum` adds them up.
`NativeSparseAttention` is the layer that a model holds: projections, gates, a learnt compression
for keys and for values, and keys and values of each branch's own.

It keeps no cache of keys (chapter 15), and knows no tensor parallelism and no dropout.

Symbols: as everywhere `B`, `N`, `M`, `HQ`, `H`, `D`, `DV` · `width`, the width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa_tutorial import ops
from nsa_tutorial.runtime import backends, checks
from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.compression import KINDS, MLPWeights
from nsa_tutorial.sparse.selected_attention import block_list, query_rows

BRANCHES = ("compression", "selection", "window")
Pair = Sequence[Tensor]  # keys and values; empty where the branch is left out


def gated_sum(gates: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> Tensor:
    """The branches' outputs `[B, N, HQ, DV]`, each times its gate `[B, N, HQ]`, added up (Eq. 5). A
    gate of None leaves its branch out.

    Gates need not sum to 1. Computed in fp32 at least, returned in the dtype of the outputs.
    """
    total = sum(
        g[..., None].to(_wide(g)) * o.to(_wide(o))
        for g, o in zip(gates, outputs, strict=True)
        if g is not None
    )
    return total.to(next(o.dtype for g, o in zip(gates, outputs, strict=True) if g is not None))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    q: Tensor, compressed: Pair, selected: Pair, window: Pair, gates: Sequence[Tensor | None], *,
    block_indices: Tensor | None = None, block_counts: Tensor | int | None = 16,
    block_size: int = 64, window_size: int = 512,
    length: int = 32, stride: int = 16, scale: float | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Native Sparse Attention over keys and values that the branches may have of their own.

    Args:
        q: `[B, N, HQ, D]`.
        compressed: summary keys and values `[B, M_c, H, D]`, `[B, M_c, H, DV]`, made with `length`
            and `stride`.
        selected, window: keys and values `[B, M, H, D]`, `[B, M, H, DV]` of these branches.
        gates: of compression, selection and window, each `[B, N, HQ]` or None.
        block_indices, …, backend: as for `ops.native_sparse_attention`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of the values.
    """
    g_cmp, g_slc, g_swa = gates
    used = ((g_slc, "selected_attention"), (g_swa, "sliding_window_attention"))
    # may raise: before all else
    attending = {
        backends.choose(operator, backend, q) for gate, operator in used if gate is not None
    }
    scoring = backends.nearest("select_blocks", backend, q)
    share = (
        g_slc is not None
        and g_swa is not None
        and all(x is y for x, y in zip(selected, window, strict=True))
    )
    M = next(
        pair[0].shape[1]
        for pair, gate in ((selected, g_slc), (window, g_swa), (selected, g_cmp))
        if gate is not None
    )
    common = {"scale": scale, "cu_seqlens": cu_seqlens, "backend": backend}
    windows = {**common, "length": length, "stride": stride, "num_keys": M, "backend": scoring}
    o_cmp = o_slc = o_swa = None

    # -- compression --
    if g_cmp is not None:
        o_cmp, lse = ops.compressed_attention(q, *compressed, **windows, return_lse=True)

    # -- selection --
    if g_slc is not None:
        if block_indices is None:
            block_indices = _choose_blocks(
                q, compressed[0], lse, block_counts, M, block_size=block_size, **windows
            )
            block_counts = None
        lists = {
            "block_indices": block_indices,
            "block_counts": block_counts,
            "block_size": block_size,
            **common,
        }
        if share and "reference" not in attending:  # kernels take both in one launch
            o_slc, o_swa = ops.selected_and_window_attention(
                q, *selected, window_size=window_size, **lists
            )
        else:
            o_slc = _selected_attention(q, *selected, **lists)

    # -- window --
    if g_swa is not None and o_swa is None:
        o_swa = ops.sliding_window_attention(q, *window, window_size=window_size, **common)
    return gated_sum(gates, (o_cmp, o_slc, o_swa))


def _choose_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_counts: Tensor | int,
    M: int,
    *,
    block_size: int,
    **windows: object,
) -> Tensor:
    """Lists of `block_counts` blocks, or of as many as each row's own count says; no longer than
    there are blocks."""
    of_rows = block_counts if isinstance(block_counts, Tensor) else None
    top_n = block_counts if of_rows is None else int(of_rows.max()) if of_rows.numel() else 0
    num_blocks = -(-M // block_size)
    # the three that are forced; past the last block, lists hold nothing but -1
    top_n = max(3, min(top_n, num_blocks))
    ids = ops.select_blocks(
        q, k_cmp, lse, top_n=top_n, block_counts=of_rows, block_size=block_size, **windows
    )
    return ids[..., : max(1, num_blocks)]


def _selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *,
    block_size: int, block_counts: Tensor | int | None, scale: float | None,
    cu_seqlens: Tensor | None, backend: str,
) -> Tensor:  # fmt: skip
    """The kernels' selected attention, or, in place of the reference that mirrors them step by
    step, the fast one under a mask."""
    if q.numel() == 0 or backends.choose("selected_attention", backend, q) != "reference":
        return ops.selected_attention(
            q, k, v, block_indices, block_size=block_size, block_counts=block_counts,
            scale=scale, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
    rows = query_rows(
        q.shape[0], q.shape[1], k.shape[1], causal=True, cu_seqlens=cu_seqlens, device=q.device
    )
    ids = block_list(
        block_indices,
        rows,
        block_size=block_size,
        block_counts=block_counts,
        include_own_block=False,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return query_tiles.selected_attention(q, k, v, ids, rows, block_size=block_size, scale=scale)[0]


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
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "width",
            "query_heads",
            "kv_heads",
            "block_size",
            "window_size",
            "length",
            "stride",
            "gate_width",
        ):
            checks.check_positive_int(name, getattr(self, name))
        checks.check_positive_int("top_n", self.top_n, least=3)
        for name in ("key_width", "value_width"):
            checks.check_positive_int(name, getattr(self, name), most=checks.LARGEST_WIDTH)
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads: got {self.query_heads}, expected a multiple of kv_heads, "
                f"{self.kv_heads}"
            )
        if self.compression not in KINDS:
            raise ValueError(
                f"compression: got {self.compression!r}, expected one of {', '.join(KINDS)}"
            )
        checks.check_bool("separate_keys", self.separate_keys)
        if self.rotary_base is not None:
            checks.check_positive_number("rotary_base", self.rotary_base, otherwise=" or None")
            if self.key_width % 2:
                raise ValueError(
                    f"key_width: got {self.key_width}, expected an even width for the rotary "
                    "embedding"
                )
        checks.check_backend(self.backend)


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864): turn the pairs `(i, i + D / 2)` of
    `x [B, N, H, D]` by `position [N]`."""
    half = x.shape[-1] // 2
    # [D / 2], in radians per token
    frequency = base ** (-torch.arange(half, device=x.device, dtype=_wide(x)) / half)
    angle = (position[:, None] * frequency)[:, None]  # [N, 1, D / 2]
    a, b = x.to(angle.dtype).split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(
        x.dtype
    )


class Compression(nn.Module):
    """`ops.compress` with the weights it learns; "weighted" and "linear" begin as the mean."""

    def __init__(self, kind: str, length: int, stride: int, heads: int, width: int) -> None:
        super().__init__()
        self.kind, self.length, self.stride = kind, length, stride
        flat, hidden = length * width, 4 * width
        initial = {
            "mean": {},
            "weighted": {"weight": torch.full((length, heads), 1 / length)},
            "linear": {"weight": torch.eye(width).repeat(length, 1) / length},
            "mlp": {
                "position": torch.randn(length, width) * 0.02,
                "w1": torch.randn(flat, hidden) * flat**-0.5,
                "b1": torch.zeros(hidden),
                "w2": torch.randn(hidden, width) * hidden**-0.5,
                "b2": torch.zeros(width),
            },
        }[kind]
        self.weights = nn.ParameterDict(initial)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """`[B, M, H, D]` to `[B, M_c, H, D]`."""
        weight = (
            MLPWeights(**self.weights)
            if self.kind == "mlp"
            else self.weights["weight"]
            if self.weights
            else None
        )
        return ops.compress(
            x,
            kind=self.kind,
            length=self.length,
            stride=self.stride,
            weight=weight,
            cu_seqlens=cu_seqlens,
        )


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
        self.compress_k = Compression(c.compression, c.length, c.stride, c.kv_heads, c.key_width)
        self.compress_v = Compression(c.compression, c.length, c.stride, c.kv_heads, c.value_width)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: `[B, N, width]`.
            cu_seqlens: `[num_sequences + 1]` offsets of packed sequences, `B == 1`; positions count
                from each one's start.
        """
        c = self.config
        checks.check_tensor("x", x, "[B, N, width]", checks.FLOATS)
        if x.shape[2] != c.width:
            raise ValueError(
                f"x: got {checks.describe(x)}, expected the width of the layer, {c.width}"
            )
        checks.check_cu_seqlens(cu_seqlens, x, x, name="x")
        B, N = x.shape[:2]

        # -- project --
        q = self.q(x).view(B, N, c.query_heads, c.key_width)
        k = self.k(x).view(B, N, -1, c.key_width)  # [B, N, sets * H, D]
        v = self.v(x).view(B, N, -1, c.value_width)
        gates = self.gate(x).view(B, N, len(BRANCHES), c.query_heads).unbind(2)
        if c.rotary_base is not None:
            position = query_rows(
                B, N, N, causal=True, cu_seqlens=cu_seqlens, device=x.device
            ).position[:N]
            q, k = rotate(q, position, c.rotary_base), rotate(k, position, c.rotary_base)

        # -- one set of keys and values for each branch --
        pairs = list(zip(k.split(c.kv_heads, 2), v.split(c.kv_heads, 2), strict=True))
        (k_cmp, v_cmp), selected, window = pairs if c.separate_keys else pairs * len(BRANCHES)

        # -- attend --
        compressed = (self.compress_k(k_cmp, cu_seqlens), self.compress_v(v_cmp, cu_seqlens))
        o = forward(
            q, compressed, selected, window, gates,
            block_counts=c.top_n, block_size=c.block_size, window_size=c.window_size,
            length=c.length, stride=c.stride, cu_seqlens=cu_seqlens, backend=c.backend,
        )  # fmt: skip
        return self.o(o.flatten(2))
