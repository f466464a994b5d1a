"""Chapter 06: a block of tokens can be summarised (NSA, arXiv 2502.11089, section 3.3.1).

Overlapping windows of `length` tokens, one every `stride`, each become one summary key or value
(`compress`); attention then reads summaries in place of tokens (`compressed_attention`), a
`stride`-th of the work. Four ways to summarise: the mean, a learnt weighting, a learnt linear map
of the whole window, and the paper's φ, an MLP with a learnt embedding for each position in the
window.

`summarise` is the plain form, which copies every window. `summarise_pieces` computes the same from
pieces of `stride` tokens, which it reads once; the operators take it where it applies.

It does not validate (`ops` does), does not choose blocks from the summaries (chapter 07), and keeps
no cache.

Symbols: `M` tokens · `M_c` summaries, those of packed sequences one sequence after the other · `F`
hidden units of the MLP.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.runtime import packed
from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.query_tiles import View
from nsa_tutorial.sparse.selected_attention import QueryRows

KINDS = ("mean", "weighted", "linear", "mlp")
Count = TypeVar("Count", int, Tensor)


class MLPWeights(NamedTuple):
    """What the paper's φ learns: `w2 · gelu(w1 · (window + position) + b1) + b2`, the window's
    tokens one behind the other.

    Each tensor serves all heads, or carries one more dimension in front, `[H, ...]`, and serves one
    head each. The paper names no activation and no number of hidden units `F`.

    Attributes:
        position: `[length, D]`, added to the window's tokens, first to last.
        w1, b1: `[length * D, F]` and `[F]`.
        w2, b2: `[F, D]` and `[D]`.
    """

    position: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


def num_summaries(M: Count, length: int, stride: int) -> Count:
    """How many windows of `length`, one every `stride`, lie wholly in `M` tokens. An int gives an
    int, a tensor a tensor.

    >>> num_summaries(100, 32, 16), num_summaries(31, 32, 16)
    (5, 0)
    """
    count = (M - length) // stride + 1
    return count.clamp(min=0) if isinstance(count, Tensor) else max(count, 0)


def summary_offsets(cu_seqlens: Tensor, length: int, stride: int) -> Tensor:
    """`cu_seqlens` of the summaries, `[num_sequences + 1]`: where each sequence's summaries begin,
    and how many there are."""
    counts = num_summaries(cu_seqlens.diff(), length, stride)
    return F.pad(counts.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def first_tokens(
    M: int, length: int, stride: int, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """The token `[M_c]` with which each summary begins. The host waits for fresh `cu_seqlens`
    (`packed.offsets`)."""
    if cu_seqlens is None:
        return torch.arange(num_summaries(M, length, stride), device=device) * stride
    offsets = summary_offsets(cu_seqlens, length, stride)
    total = sum(num_summaries(n, length, stride) for n in packed.offsets(cu_seqlens).lengths)
    summary = torch.arange(total, device=device)
    # which sequence holds the summary
    sequence = torch.searchsorted(offsets[1:].contiguous(), summary, right=True)
    return cu_seqlens[sequence] + (summary - offsets[sequence]) * stride


def first_rows(first: Tensor, B: int, M: int) -> Tensor:
    """The rows of the flattened `[B * M]` with which the summaries `[B * M_c]` of a batch begin;
    `first [M_c]` is from `first_tokens`."""
    if B == 1:
        return first
    return (first + M * torch.arange(B, device=first.device)[:, None]).flatten()


def summaries_of_tokens(first: Tensor, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Which summaries contain a token: token `t` is in `begin[t] … end[t] - 1`, both int32.
    `first`, the token at which each summary begins, is in ascending order."""
    token = torch.arange(num_tokens, device=first.device)
    # those that have begun by this token, without those that ended before it
    end = torch.searchsorted(first, token, right=True, out_int32=True)
    begin = torch.searchsorted(first, token - length, right=True, out_int32=True)
    return begin, end


def compress(
    x: Tensor,
    *,
    kind: str = "mean",
    length: int = 32,
    stride: int = 16,
    weight: Tensor | MLPWeights | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Summarise keys or values (Eq. 7): summary `j` of a sequence is made of its tokens
    `j * stride … j * stride + length - 1`.

    Args:
        x: `[B, M, H, D]`.
        kind: `"mean"` (no weight); `"weighted"`, a sum of the tokens with weight `[length]` or
            `[length, H]`; `"linear"`, weight `[length * D, D]` or `[H, length * D, D]`; `"mlp"`,
            weight an `MLPWeights`.
        length, stride: tokens of a window, and from one window's start to the next.
        weight: as `kind` needs it, on the device of `x`.
        cu_seqlens: `[num_sequences + 1]` offsets of packed sequences: no window crosses from one
            into the next.

    Returns:
        `[B, M_c, H, D]` in the dtype of `x`, computed in fp32 at least.
    """
    first = first_tokens(x.shape[1], length, stride, cu_seqlens, x.device)
    return summarise(x, first, kind=kind, length=length, weight=weight)


def summarise(
    x: Tensor, first: Tensor, *, kind: str, length: int, weight: Tensor | MLPWeights | None
) -> Tensor:
    """The summaries of the windows of `length` tokens that begin at `first [M_c]`; the rest is as
    in `compress`."""
    (B, _, H, D), dtype = x.shape, torch.promote_types(x.dtype, torch.float32)
    token = first[:, None] + torch.arange(length, device=x.device)  # [M_c, length]
    windows = x.index_select(1, token.flatten()).to(dtype).view(B, token.shape[0], length, H, D)
    if kind == "mean":
        return windows.mean(2).to(x.dtype)
    if kind == "weighted":
        per_head = weight.to(dtype).view(length, -1).expand(length, H)
        return torch.einsum("bjlhd,lh->bjhd", windows, per_head).to(x.dtype)
    windows = windows.permute(0, 3, 1, 2, 4)  # [B, H, M_c, length, D]
    if kind == "linear":
        return (windows.flatten(3) @ weight.to(dtype)).transpose(1, 2).to(x.dtype)
    position, w1, b1, w2, b2 = (w.to(dtype) for w in weight)
    flat = (windows + position[..., None, :, :]).flatten(3)  # [B, H, M_c, length * D]
    hidden = F.gelu(flat @ w1 + b1[..., None, :])  # [B, H, M_c, F]
    return (hidden @ w2 + b2[..., None, :]).transpose(1, 2).to(x.dtype)


def has_pieces(M: int, length: int, stride: int, cu_seqlens: Tensor | None) -> bool:
    """Whether `summarise_pieces` can compute this: windows consist of whole, consecutive pieces."""
    return cu_seqlens is None and length % stride == 0 and length <= M


def summarise_pieces(
    x: Tensor, *, kind: str, length: int, stride: int, weight: Tensor | MLPWeights
) -> Tensor:
    """`summarise` for the kinds with weights, without copying the windows.

    A window is `K = length / stride` pieces of `stride` tokens. One matmul takes each piece through
    all `K` parts of the weight, and a summary adds up what `K` neighbours gave it. In half
    precision on CUDA, tensor cores multiply in the dtype of `x` and accumulate in fp32.
    """
    M, H, K = x.shape[1], x.shape[2], length // stride
    P = num_summaries(M, length, stride) + K - 1  # pieces that a summary has
    wide = torch.promote_types(x.dtype, torch.float32)
    dtype = x.dtype if x.is_cuda else wide
    pieces = x[:, : P * stride].to(dtype).unflatten(1, (P, stride))  # [B, P, stride, H, D]
    if kind == "weighted":
        parts = weight.to(dtype).reshape(K, stride, -1).expand(K, stride, H)
        summaries = _of_neighbours(torch.einsum("bpshd,ksh->bhpkd", pieces, parts), wide)
        return summaries.transpose(1, 2).to(x.dtype)
    pieces = pieces.permute(0, 3, 1, 2, 4).flatten(3)  # [B, H, P, stride * D]
    if kind == "linear":
        summaries = _of_neighbours(_side_by_side(pieces, weight, K), wide)
        return summaries.transpose(1, 2).to(x.dtype)
    position, w1, b1, w2, b2 = weight
    # the same for every window, so the embedding passes through w1 once
    constant = position.to(wide).flatten(-2)[..., None, :] @ w1.to(wide) + b1.to(wide)[..., None, :]
    hidden = F.gelu(_of_neighbours(_side_by_side(pieces, w1, K), wide) + constant)
    summaries = (hidden.to(dtype) @ w2.to(dtype)).to(wide) + b2.to(wide)[..., None, :]
    return summaries.transpose(1, 2).to(x.dtype)


def _side_by_side(pieces: Tensor, weight: Tensor, K: int) -> Tensor:
    """Pieces `[B, H, P, C]` times each of the `K` parts `[C, F]` of a weight `[K * C, F]`, in one
    matmul: `[B, H, P, K, F]`."""
    parts = weight.to(pieces.dtype).unflatten(-2, (K, -1)).transpose(-3, -2)  # [C, K, F]
    return (pieces @ parts.flatten(-2)).unflatten(-1, (K, -1))


def _of_neighbours(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums over the pieces of each window, in `dtype`: `[B, H, P, K, F]` to `[B, H, M_c, F]`.
    Window `j` takes part `k` of piece `j + k`."""
    P, K = parts.shape[2:4]
    by_place = enumerate(parts.unbind(3))  # [B, H, P, F] each
    return sum(part[:, :, k : k + P - K + 1].to(dtype) for k, part in by_place)


def summary_rows(
    rows: QueryRows, M: int, *, length: int, stride: int, cu_seqlens: Tensor | None
) -> QueryRows:
    """The same query rows, with summaries for keys: a summary is visible once its window ends by
    the query's position.

    Args:
        rows: from `query_rows`, causal.
        M: key positions, from which the summaries were made.
        length, stride, cu_seqlens: as for `compress`.

    Returns:
        `first_key`, the first summary of the row's sequence in the flattened `[B * M_c]`;
        `num_visible`, how many of its summaries the query sees; `position` as before. Runs on the
        device of `rows` without synchronising with the host.
    """
    if cu_seqlens is None:
        first = rows.first_key // M * num_summaries(M, length, stride)
    else:
        # or an empty sequence at the same place, which has no summaries
        sequence = torch.searchsorted(cu_seqlens.contiguous(), rows.first_key)
        first = summary_offsets(cu_seqlens, length, stride)[sequence]
    num_visible = num_summaries(rows.position + 1, length, stride)
    return rows._replace(first_key=first.to(torch.int32), num_visible=num_visible)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rows: QueryRows, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the visible summaries.

    Args:
        q: `[B, N, HQ, D]`.
        k_cmp, v_cmp: summaries `[B, M_c, H, D]` and `[B, M_c, H, DV]`.
        rows: from `summary_rows`.
        scale: factor on the scores, as in `softmax(scale * q @ k)`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v_cmp`, and `lse [B, N, HQ]`: natural logarithm, fp32
        (fp64 for fp64 inputs). A query that sees no summary gets output 0 and `lse = -inf`.
    """
    k_cmp, v_cmp = query_tiles.at_least_one(k_cmp), query_tiles.at_least_one(v_cmp)
    view = view_of_summaries(rows, N=q.shape[1], M_c=k_cmp.shape[1])
    return query_tiles.attend(q, k_cmp, v_cmp, view, scale=scale)


def view_of_summaries(rows: QueryRows, *, N: int, M_c: int) -> View:
    """What `N` queries see of `M_c` summaries, `rows` being from `summary_rows`."""
    # those of the first sequence of the batch serve all
    first, num_visible = rows.first_key[:N], rows.num_visible[:N]
    spans = [(queries, slice(0, M_c)) for queries in query_tiles.tiles(N)]
    return View(spans, query_tiles.run_of_keys(first, first + num_visible))
