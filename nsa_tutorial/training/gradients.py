"""The gradients of attention, written out: what the operators of every backend hand back.

A forward keeps `o` and `lse`; nothing of the scores is stored. The backward computes them again
and repeats five lines, in a tile of queries under a mask (`of_tiles`) or slot by slot of a list
(`of_lists`):

    p   = exp(s - lse)               the weights, from the scaled scores and their log-sum-exp
    d_v = pᵀ @ d_o
    d_p = d_o @ vᵀ
    d_s = p * (d_p - delta)          with delta = sum(d_o * o) - d_lse, one per query and head
    d_q = scale * d_s @ k,  d_k = scale * d_sᵀ @ q

NaN and infinity in what a row does not see never reach its gradients. A row that no loss depends on
adds nothing, whatever stands in it.

It is plain PyTorch, without a kernel, and does not validate (`ops` does). A second derivative does
not exist.

Symbols: `R = B * N` query rows · `G` query heads of a group · `T` queries of a tile · `J` keys of
its slice · `S` slots · `BS` block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.sparse import compression, query_tiles, sliding_window
from nsa_tutorial.sparse.query_tiles import View, finite
from nsa_tutorial.sparse.selected_attention import QueryRows

Gradients = tuple[Tensor, Tensor, Tensor]
GATHERED = 2**26  # numbers that the gathered keys of one slot may have: 256 MiB in fp32


def delta(d_o: Tensor, d_lse: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
    """`sum(d_o * o) - d_lse`, `[B, N, HQ]`: what each score's gradient is measured from.

    It stands in for the sum over a row: `sum(p * d_p) = sum(p * (d_o @ vᵀ)) = sum(d_o * o)`. A
    gradient of `lse` adds `p * d_lse` to `d_s`.
    """
    return (d_o.to(dtype) * o.to(dtype)).sum(-1) - d_lse.to(dtype)


def is_asked(d_o: Tensor, d_lse: Tensor) -> Tensor:
    """Whether a loss depends on a row at all, `[B, N, HQ]`: 0 * NaN would be NaN."""
    return (d_o != 0).any(-1) | (d_lse != 0)


def of_tiles(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    view: View, *, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `query_tiles.attend`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, view, scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k` and `v`, in their dtypes.
    """
    (B, N, HQ, D), (M, H, DV) = q.shape, v.shape[1:]
    G, dtype = HQ // H, torch.promote_types(q.dtype, torch.float32)
    d_q = torch.empty(B, N, HQ, D, dtype=q.dtype, device=q.device)
    d_k, d_v = (torch.zeros(B, H, M, width, dtype=dtype, device=q.device) for width in (D, DV))
    row_delta, asked = delta(d_o, d_lse, o, dtype), is_asked(d_o, d_lse)

    def heads_first(x: Tensor) -> Tensor:  # [B, T, HQ, …] to [B, H, G * T, …]
        return x.to(dtype).unflatten(2, (H, G)).movedim(1, 3).flatten(2, 3)

    for queries, keys in view.spans:
        # -- load --
        q_tile, do_tile = heads_first(q[:, queries]), heads_first(d_o[:, queries])
        lse_tile, delta_tile = heads_first(lse[:, queries]), heads_first(row_delta[:, queries])
        k_tile, v_tile = (finite(x[:, keys].to(dtype)).transpose(1, 2) for x in (k, v))

        # -- weights --
        is_seen = view.mask(queries, keys).expand(B, H, -1, -1)  # [B, H, T, J]
        acc_s = query_tiles.masked_scores(q[:, queries], k[:, keys], is_seen).flatten(2, 3) * scale
        asked_tile = heads_first(asked[:, queries])[..., None] > 0
        is_hidden = ~(is_seen.repeat(1, 1, G, 1) & asked_tile)  # [B, H, G * T, J]
        p = torch.exp(acc_s - lse_tile[..., None]).masked_fill_(is_hidden, 0)

        # -- gradients --
        d_v[:, :, keys] += p.transpose(-1, -2) @ finite(do_tile)
        d_p = do_tile @ v_tile.transpose(-1, -2)
        d_s = (p * (d_p - delta_tile[..., None])).masked_fill_(is_hidden, 0)
        d_k[:, :, keys] += d_s.transpose(-1, -2) @ finite(q_tile) * scale
        dq_tile = (d_s @ k_tile * scale).unflatten(2, (G, -1))  # [B, H, G, T, D]
        d_q[:, queries] = dq_tile.movedim(3, 1).flatten(2, 3).to(q.dtype)
    d_k, d_v = (x.transpose(1, 2).contiguous() for x in (d_k, d_v))
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def of_lists(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `selected_attention.forward`: its arguments, `o` and `lse`, and their
    gradients, as in `of_tiles`. Names are those of the forward."""
    (B, N, HQ, D), (M, H, DV), BS = q.shape, v.shape[1:], block_size
    R, G, S, dtype = B * N, HQ // H, ids.shape[-1], torch.promote_types(q.dtype, torch.float32)
    k_rows, v_rows = k.reshape(-1, D), v.reshape(-1, DV)  # [B * M * H, …]
    d_q = torch.zeros(R, H, G, D, dtype=dtype, device=q.device)
    d_k, d_v = (torch.zeros(len(k_rows), w, dtype=dtype, device=q.device) for w in (D, DV))
    row_delta = delta(d_o, d_lse, o, dtype).reshape(R, H, G)
    asked = is_asked(d_o, d_lse).reshape(R, H, G, 1)
    lse = lse.reshape(R, H, G).to(dtype)
    head = torch.arange(H, device=q.device)[:, None]  # [H, 1]

    for part in query_tiles.tiles(R, max(1, GATHERED // (H * BS * max(D, DV)))):
        # -- load the query group --
        q_tile = q.reshape(R, H, G, D)[part].to(dtype)  # [T, H, G, D]
        q_asked = q_tile.masked_fill(~asked[part], 0)  # 0 * NaN would be NaN
        do_tile = d_o.reshape(R, H, G, DV)[part].to(dtype)  # [T, H, G, DV]
        first_key, num_visible = rows.first_key[part, None], rows.num_visible[part, None]  # [T, 1]

        for slot in range(S):
            # -- guard --
            block_id = ids[part, :, slot]  # [T, H]
            is_visible = (block_id >= 0) & (block_id < (num_visible + BS - 1) // BS)
            block_start = torch.where(is_visible, block_id, 0) * BS

            # -- load the keys and the values --
            offset = block_start[:, :, None] + torch.arange(BS, device=q.device)  # [T, H, BS]
            is_seen = is_visible[:, :, None] & (offset < num_visible[:, :, None])
            key_row = torch.where(is_seen, first_key[:, :, None] + offset, 0).long() * H + head
            hidden = ~is_seen[..., None]
            k_tile = k_rows[key_row].to(dtype).masked_fill(hidden, 0)  # [T, H, BS, D]
            v_tile = v_rows[key_row].to(dtype).masked_fill(hidden, 0)  # [T, H, BS, DV]

            # -- weights --
            acc_s = q_tile @ k_tile.transpose(-1, -2) * scale  # [T, H, G, BS]
            is_hidden = ~(is_seen[:, :, None, :] & asked[part])  # [T, H, G, BS]
            p = torch.exp(acc_s - lse[part, ..., None]).masked_fill(is_hidden, 0)

            # -- gradients --
            d_p = do_tile @ v_tile.transpose(-1, -2)
            d_s = (p * (d_p - row_delta[part, ..., None])).masked_fill(is_hidden, 0)
            d_q[part] += d_s @ k_tile * scale
            dk_tile = (d_s.transpose(-1, -2) @ q_asked * scale).masked_fill(hidden, 0)
            dv_tile = (p.transpose(-1, -2) @ do_tile).masked_fill(hidden, 0)
            d_k.index_add_(0, key_row.flatten(), dk_tile.flatten(0, 2))
            d_v.index_add_(0, key_row.flatten(), dv_tile.flatten(0, 2))
    return (
        d_q.reshape(B, N, HQ, D).to(q.dtype),
        d_k.reshape(B, M, H, D).to(k.dtype),
        d_v.reshape(B, M, H, DV).to(v.dtype),
    )


def of_masked_lists(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `query_tiles.selected_attention`: the same as `of_lists`, under a mask."""
    N, M = q.shape[1], k.shape[1]
    view = query_tiles.view_of_lists(ids, rows, N=N, M=M, block_size=block_size)
    return of_tiles(d_o, d_lse, q, k, v, o, lse, view, scale=scale)


def of_windows(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `sliding_window.forward`."""
    N, M = q.shape[1], k.shape[1]
    view = sliding_window.view_of_windows(rows, N=N, M=M, window_size=window_size)
    return of_tiles(d_o, d_lse, q, k, v, o, lse, view, scale=scale)


def of_summaries(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, scale: float,
) -> Gradients:  # fmt: skip
    """The backward of `compression.compressed_attention`."""
    M_c = k_cmp.shape[1]
    if M_c == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    view = compression.view_of_summaries(rows, N=q.shape[1], M_c=M_c)
    return of_tiles(d_o, d_lse, q, k_cmp, v_cmp, o, lse, view, scale=scale)
