"""The operators of `ops` over a text that ranks share: the same arguments and `mesh=` and `cut=`.

Each rank passes the tokens that it holds, `[B, n, …]`, and gets its own rows of the result.
Queries stay, and keys and values travel, one KV head at a time: while a head is computed, the next
one is gathered. Backward, its gradients are added up over ranks while the one before is computed.
A window of keys of its own needs the tokens just before each piece, and so do summaries that
straddle. A rank computes those that end in its pieces.

Who is called with what is the business of `cuts`, and what travels of `travel`. What is computed is
`ops`, unchanged: choices, ties and lists are those of one process.

Every rank of a context makes the same calls, and its loss depends on its output, also where it
holds no token: otherwise the others wait for it until the timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime.operators import outside_graphs
from nsa_tutorial.sparse.compression import MLPWeights
from nsa_tutorial.training.many_gpus.agreement import begin, check_summaries
from nsa_tutorial.training.many_gpus.branches import window_of
from nsa_tutorial.training.many_gpus.calls import by_head, cu_seqlens_of, with_halo
from nsa_tutorial.training.many_gpus.cuts import Cut, Part, starts_of_summaries
from nsa_tutorial.training.many_gpus.meshes import Mesh, context_of, cut_of


@outside_graphs
def three_branches(
    q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor], window: Sequence[Tensor],
    gates: Sequence[Tensor | None], *, mesh: Mesh, cut: Cut, block_indices: Tensor | None = None,
    block_counts: Tensor | int | None = 16, slot_scale: Tensor | None = None,
    learn_choice: bool = False, block_size: int = 64, window_size: int = 512, length: int = 32,
    stride: int = 16, scale: float | None = None, backend: str = "auto", order: str = "auto",
) -> Tensor:  # fmt: skip
    """`ops.three_branches` over a text that ranks share.

    Args:
        q: queries of this rank's tokens, `[B, n, HQ, D]`.
        compressed: the summaries that `compress` made on this rank, or `()`.
        selected, window: keys and values of this rank's tokens, `[B, n, H, D]`, `[B, n, H, DV]`. A
            window with keys of its own gets those just before each piece, and no others. With
            `()` it has those of the selection.
        gates, block_indices, block_counts, slot_scale: of this rank's tokens.
        mesh: a `DeviceMesh` with a dimension "context", or a process group.
        cut: who holds which tokens; the whole text's length and its documents.
        learn_choice, …, order: as for `ops.three_branches`.

    Returns:
        `o [B, n, HQ, DV]` of this rank's tokens.

    Raises:
        RanksDisagree: if ranks were called with different arguments, or one with a wrong one.
        RankLost: if a rank died or did not come in time.
        ValueError, TypeError: for a wrong argument of this rank's; the others raise
            `RanksDisagree`, which tells it.
    """
    options = {
        "block_size": block_size, "length": length, "stride": stride, "scale": scale,
        "backend": backend,
    }  # fmt: skip
    lists = {"block_indices": block_indices, "slot_scale": slot_scale}
    of_rows = block_counts if isinstance(block_counts, Tensor) else None
    number = None if isinstance(block_counts, Tensor) else block_counts
    gate_names = ("g_cmp", "g_slc", "g_swa")
    names = {f"{of}[{i}]": x for of, pair in (("selected", selected), ("window", window))
             for i, x in enumerate(pair)}  # fmt: skip
    shares = {"q": q, **names, **dict(zip(gate_names, gates, strict=True)), **lists,
              "block_counts": of_rows}  # fmt: skip
    told = {**options, "window_size": window_size, "block_counts": number, "order": order,
            "learn_choice": learn_choice, "compressed": len(compressed)}  # fmt: skip

    def check() -> None:
        """The operator checks all but lengths, over no token."""
        check_summaries(compressed, cut, context_of(mesh), length, stride)
        pairs = [[x[:, :0] for x in pair] for pair in (compressed, selected, window)]
        none = {name: None if x is None else x[:, :0] for name, x in shares.items()}
        ops.three_branches(
            none["q"], *pairs, [none[name] for name in gate_names], num_keys=0,
            block_indices=none["block_indices"], slot_scale=none["slot_scale"],
            block_counts=number if of_rows is None else none["block_counts"],
            learn_choice=learn_choice, window_size=window_size, order=order, **options,
        )  # fmt: skip

    context = begin("three_branches", mesh, cut, told, check, shares)
    g_cmp, g_slc, g_swa = gates
    has_own_window = bool(window) and g_swa is not None
    o_swa = None
    if has_own_window:
        o_swa = window_of(context, cut, q, window, window_size, scale, backend)[0]
    if g_cmp is None and g_slc is None and (has_own_window or g_swa is None):
        return _gated(g_swa, o_swa)

    def run(part: Part, mine: list, keys: list, summaries: list) -> tuple[Tensor]:
        q, g_cmp, g_slc, g_swa, block_indices, slot_scale, counts = mine
        found = ops.three_branches(
            q, summaries, keys, (), (g_cmp, g_slc, g_swa), num_keys=part.stop - part.first,
            block_indices=block_indices, block_counts=number if counts is None else counts,
            slot_scale=slot_scale, learn_choice=learn_choice, window_size=window_size,
            order=order, cu_seqlens=cu_seqlens_of(part, q.device), **options,
        )  # fmt: skip
        return (found,)

    per_query = (q, g_cmp, g_slc, None if has_own_window else g_swa, block_indices, slot_scale,
                 of_rows)  # fmt: skip
    windows = (length, stride)
    keys = selected if g_slc is not None or (g_swa is not None and not has_own_window) else ()
    (o,) = by_head(context, cut, per_query, keys, compressed, windows, run)
    return o if o_swa is None else o + _gated(g_swa, o_swa)


def _gated(gate: Tensor, o: Tensor) -> Tensor:
    wide = torch.promote_types(o.dtype, torch.float32)
    return (gate[..., None].to(wide) * o).to(o.dtype)


def native_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor | None = None, g_slc: Tensor | None = None,
    g_swa: Tensor | None = None, *, mesh: Mesh, cut: Cut, length: int = 32, stride: int = 16,
    backend: str = "auto", **options: object,
) -> Tensor:  # fmt: skip
    """`ops.native_sparse_attention` over a text that ranks share; summaries are means.

    Args:
        q, k, v, g_cmp, g_slc, g_swa: of this rank's tokens, as for `ops.native_sparse_attention`.
        mesh, cut: as for `three_branches`.
        length, stride, backend, options: as for `ops.native_sparse_attention`, but for
            `cu_seqlens`: the cut holds the documents.

    Returns:
        `o [B, n, HQ, DV]` of this rank's tokens.
    """
    made = {"length": length, "stride": stride, "backend": backend}
    compressed = (
        [compress(x, mesh=mesh, cut=cut, **made) for x in (k, v)] if g_cmp is not None else ()
    )
    gates = (g_cmp, g_slc, g_swa)
    return three_branches(q, compressed, (k, v), (), gates, mesh=mesh, cut=cut, **made, **options)


@outside_graphs
def compress(
    x: Tensor, *, mesh: Mesh, cut: Cut, kind: str = "mean", length: int = 32, stride: int = 16,
    weight: Tensor | MLPWeights | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """`ops.compress` over a text that ranks share: the summaries that end in this rank's pieces.

    A summary that begins on another rank gets its first tokens from there. The gradient of `weight`
    is that of this rank's summaries alone: add it up over the ranks, as `fully_shard` and
    `DistributedDataParallel` do with every gradient.

    Args:
        x: of this rank's tokens, `[B, n, H, D]`.
        mesh, cut: as for `three_branches`.
        kind, length, stride, weight, backend: as for `ops.compress`.

    Returns:
        `[B, m, H, D]`, in the order of this rank's tokens.
    """
    told = {"kind": kind, "length": length, "stride": stride, "backend": backend}

    def check() -> None:
        ops.compress(x[:, :0], weight=weight, **told)

    context = begin("compress", mesh, cut, told, check, {"x": x})
    pieces = [cut.parts(piece) for piece in cut.pieces(context.rank)]
    starts = starts_of_summaries(cut, length, stride)
    found = []
    for parts, rows, start in with_halo(context, cut, [x], starts, "halo of summaries", pieces):
        for part in parts:
            first = part.first_token(length, stride)
            found.append(
                ops.compress(
                    rows[0][:, first - start : part.stop - start], **told, weight=weight,
                    cu_seqlens=cu_seqlens_of(part, x.device),
                )
            )  # fmt: skip
    return torch.cat(found, 1)


class Share(NamedTuple):
    """This rank's part of a text, for a layer: the operators over it, called like those of `ops`.

    Attributes:
        mesh, cut: as for `three_branches`.
    """

    mesh: Mesh
    cut: Cut

    @classmethod
    def of(cls, mesh: Mesh, cut: Cut | None, tokens: int) -> Share:
        """Without a cut, a zigzag over ranks that hold `tokens` tokens each."""
        return cls(mesh, cut or cut_of(mesh, tokens * context_of(mesh).ranks))

    def positions(self, device: torch.device) -> Tensor:
        """Of this rank's tokens in their documents, `[n]`."""
        return self.cut.positions(context_of(self.mesh).rank, device)

    def compress(self, x: Tensor, **options: object) -> Tensor:
        """`compress`."""
        return compress(x, mesh=self.mesh, cut=self.cut, **options)

    def three_branches(self, *tensors: object, **options: object) -> Tensor:
        """`three_branches`."""
        return three_branches(*tensors, mesh=self.mesh, cut=self.cut, **options)
