"""Chapter 12: the gradients of attention, written out.

A forward keeps `o` and `lse`, and none of the scores. The backward computes the scores again, and
repeats five lines:

    1.  p   = exp(s - lse)            the weights, from the scaled scores and their log-sum-exp
    2.  d_v = pᵀ @ d_o
    3.  d_p = d_o @ vᵀ
    4.  d_s = p * (d_p - delta)       with delta = sum(d_o * o) - d_lse, one per query and head
    5.  d_q = scale * d_s @ k,  d_k = scale * d_sᵀ @ q

`dense` does so with the whole matrix, `by_query_tiles` and `by_key_tiles` with one tile of it at a
time. `selected_backward` is the backward of selected attention, in two passes as in the kernels,
with their names: `backward_dq` walks each query's list, `backward_dkv` walks the inverse of the
lists, a block at a time. Those of the other branches, under a mask, are `tile_gradients`.

NaN and infinity in what a row does not see never reach its gradients. A row that no loss depends on
adds nothing, whatever stands in it.

It is plain PyTorch, without a kernel, and does not validate (`ops` does). A second derivative does
not exist.

Symbols: `R = B * N` query rows · `H` key/value heads · `G` query heads of a group · `S` slots ·
`BS` block size · `T` query rows at a time · `BR = T * G` rows of a tile in `backward_dkv`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_tutorial.runtime.order import Order
from nsa_tutorial.sparse import inverse_list
from nsa_tutorial.sparse.query_tiles import finite, tiles
from nsa_tutorial.sparse.selected_attention import QueryRows
from nsa_tutorial.training import tile_gradients

ListGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
GATHERED = 2**26  # numbers that gathered keys or queries may have: 256 MiB in fp32


# -- one key/value head, dense --


def score_gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, is_seen: Tensor,
    *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights and the gradient of the scaled scores, `p` and `d_s`, both `[rows, keys]`: of the
    whole matrix, or of any tile of it.

    Args:
        d_o, q: `[rows, DV]`, `[rows, D]`: a row for each query.
        k, v: `[keys, D]`, `[keys, DV]`.
        lse, delta: `[rows]`.
        is_seen: bool `[rows, keys]`.
        scale: factor on the scores.
    """
    acc_s = scale * q @ k.T  # [rows, keys]
    p = torch.exp(acc_s - lse[:, None]).masked_fill(~is_seen, 0)
    d_p = d_o @ v.T
    d_s = p * (d_p - delta[:, None])
    return p, d_s


def dense(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, position: Tensor,
    *, scale: float,
) -> tile_gradients.Gradients:  # fmt: skip
    """The backward of causal attention, with the whole matrix: `(d_q, d_k, d_v)`.

    Arguments as in `score_gradients`; a row sees the keys 0 … `position`, `[rows]`. The products
    that give `d_k` and `d_v` sum over all rows.
    """
    is_seen = torch.arange(len(k)) <= position[:, None]  # [rows, keys]
    p, d_s = score_gradients(d_o, q, k, v, lse, delta, is_seen, scale=scale)
    return scale * d_s @ k, scale * d_s.T @ q, p.T @ d_o


def by_query_tiles(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, position: Tensor,
    *, scale: float, tile_q: int, tile_k: int,
) -> Tensor:  # fmt: skip
    """`d_q` alone, equal to `dense`: a tile of rows stays, and keys and values stream past it."""
    d_q = torch.empty_like(q)
    for rows in tiles(len(q), tile_q):
        q_tile, do_tile = q[rows], d_o[rows]
        acc_dq = torch.zeros_like(q_tile)
        for keys in tiles(int(position[rows].max()) + 1, tile_k):
            is_seen = torch.arange(keys.start, keys.stop) <= position[rows, None]
            _, d_s = score_gradients(
                do_tile, q_tile, k[keys], v[keys], lse[rows], delta[rows], is_seen, scale=scale
            )
            acc_dq += d_s @ k[keys]
        d_q[rows] = scale * acc_dq
    return d_q


def by_key_tiles(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, position: Tensor,
    *, scale: float, tile_q: int, tile_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`d_k` and `d_v`, equal to `dense`: a tile of keys and values stays, and the rows stream past
    it."""
    d_k, d_v = torch.empty_like(k), torch.empty_like(v)
    for keys in tiles(len(k), tile_k):
        k_tile, v_tile = k[keys], v[keys]
        acc_dk, acc_dv = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in tiles(len(q), tile_q):
            if keys.start > position[rows].max():
                continue  # all of these keys are in the future
            is_seen = torch.arange(keys.start, keys.stop) <= position[rows, None]
            p, d_s = score_gradients(
                d_o[rows], q[rows], k_tile, v_tile, lse[rows], delta[rows], is_seen, scale=scale
            )
            acc_dv += p.T @ d_o[rows]
            acc_dk += d_s.T @ q[rows]
        d_k[keys], d_v[keys] = scale * acc_dk, acc_dv
    return d_k, d_v


# -- lists of blocks, in two passes --


def backward_dq(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, ids: Tensor,
    rows: QueryRows, *, block_size: int, scale: float, slot_scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each query walks its list, as in the forward: `d_q [B, N, HQ, D]` and `d_slot_scale
    [R, H, S]`.

    `lse` and `delta` are those of `preprocess`, the other arguments those of `selected_backward`.
    """
    (H, DV), (R, _, S), (HQ, D), BS = v.shape[2:], ids.shape, q.shape[2:], block_size
    G, dtype = HQ // H, delta.dtype
    k_rows, v_rows = k.reshape(-1, H, D), v.reshape(-1, H, DV)  # [B * M, H, …]
    q_rows, do_rows = q.reshape(R, H, G, D), d_o.reshape(R, H, G, DV)  # [R, H, G, …]
    head = torch.arange(H, device=q.device)[:, None]  # [H, 1]
    d_q, d_slot_scale = torch.empty_like(q_rows), torch.empty_like(slot_scale)

    for part in tiles(R, max(1, GATHERED // (H * BS * max(D, DV)))):
        # -- locate the program --
        first_key, num_visible = rows.first_key[part, None], rows.num_visible[part, None]  # [T, 1]

        # -- load the query group --
        q_tile, do_tile = q_rows[part].to(dtype), do_rows[part].to(dtype)  # [T, H, G, …]
        lse_tile, delta_tile = (x.view(R, H, G, 1)[part] for x in (lse, delta))  # [T, H, G, 1]

        # -- initialise --
        acc_dq = torch.zeros_like(q_tile)

        for slot in range(S):
            # -- guard --
            block_id = ids[part, :, slot]  # [T, H]
            is_visible = (block_id >= 0) & (block_id < (num_visible + BS - 1) // BS)
            block_start = torch.where(is_visible, block_id, 0) * BS

            # -- load the keys and the values --
            offset = block_start[:, :, None] + torch.arange(BS, device=q.device)  # [T, H, BS]
            is_seen = is_visible[:, :, None] & (offset < num_visible[:, :, None])
            key_row = torch.where(is_seen, first_key[:, :, None] + offset, 0)
            k_tile = k_rows[key_row, head].to(dtype).masked_fill(~is_seen[..., None], 0)
            v_tile = v_rows[key_row, head].to(dtype)  # [T, H, BS, DV]

            # -- weights --
            acc_s = scale * q_tile @ k_tile.transpose(-1, -2)  # [T, H, G, BS]
            factor = slot_scale[part, :, slot, None, None]  # [T, H, 1, 1]
            is_hidden = ~is_seen[:, :, None, :] | (lse_tile == math.inf)  # [T, H, G, BS]
            p = torch.exp(factor * acc_s - lse_tile).masked_fill(is_hidden, 0)

            # -- gradient of the scores --
            d_p = do_tile @ v_tile.transpose(-1, -2)
            d_s = (p * (d_p - delta_tile)).masked_fill(is_hidden, 0)

            # -- accumulate --
            acc_dq += (factor * d_s).masked_fill(is_hidden, 0) @ finite(k_tile)
            d_factor = (d_s * acc_s).masked_fill(is_hidden, 0).sum((-1, -2))
            d_slot_scale[part, :, slot] = d_factor

        # -- store --
        d_q[part] = scale * acc_dq
    return d_q.view(q.shape), d_slot_scale


def backward_dkv(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, ids: Tensor,
    rows: QueryRows, *, block_size: int, scale: float, slot_scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each block of keys walks the queries that list it: `d_k [B, M, H, D]` and
    `d_v [B, M, H, DV]`. Arguments as in `backward_dq`."""
    (H, DV), (R, _, S), (HQ, D), BS = v.shape[2:], ids.shape, q.shape[2:], block_size
    G, dtype, num_keys = HQ // H, delta.dtype, k.shape[0] * k.shape[1]
    k_rows, v_rows = k.reshape(-1, H, D), v.reshape(-1, H, DV)  # [B * M, H, …]
    q_rows, do_rows = q.reshape(R, H, G, D), d_o.reshape(R, H, G, DV)  # [R, H, G, …]
    d_k, d_v = (torch.zeros_like(x, dtype=dtype) for x in (k_rows, v_rows))
    inverse = inverse_list.invert_lists(ids, rows, block_size=BS, num_keys=num_keys)

    for tile in (inverse.last > inverse.first).nonzero().flatten().tolist():
        # -- locate the program --
        block_start, head = int(inverse.start[tile]), tile % H
        keys = slice(block_start, block_start + BS)  # the last one may end earlier
        entries = inverse.entries[inverse.first[tile] : inverse.last[tile]]  # places in [R, H, S]

        # -- load the keys and the values --
        k_tile, v_tile = k_rows[keys, head].to(dtype), v_rows[keys, head].to(dtype)  # [BS, …]

        # -- initialise --
        acc_dk, acc_dv = torch.zeros_like(k_tile), torch.zeros_like(v_tile)

        for entry in entries.split(max(1, GATHERED // (G * max(D, DV, BS)))):
            # -- guard --
            row, slot = entry // (H * S), entry % S  # [T]
            offset = block_start + torch.arange(len(k_tile), device=q.device)  # [BS]
            is_seen = offset < (rows.first_key + rows.num_visible)[row, None]  # [T, BS]

            # -- load the queries --
            q_tile, do_tile = (x[row, head].to(dtype).flatten(0, 1) for x in (q_rows, do_rows))
            lse_tile, delta_tile = (x.view(R, H, G)[row, head].view(-1, 1) for x in (lse, delta))
            factor = slot_scale[row, head, slot].repeat_interleave(G)[:, None]  # [BR, 1]

            # -- weights --
            acc_s = scale * q_tile @ k_tile.T  # [BR, BS]
            is_hidden = ~is_seen.repeat_interleave(G, 0) | (lse_tile == math.inf)
            p = torch.exp(factor * acc_s - lse_tile).masked_fill(is_hidden, 0)

            # -- gradient of the values --
            acc_dv += p.T @ finite(do_tile)  # over the rows, so over the heads of the group, too

            # -- gradient of the scores --
            d_p = do_tile @ v_tile.T
            d_s = (factor * p * (d_p - delta_tile)).masked_fill(is_hidden, 0)

            # -- gradient of the keys --
            acc_dk += d_s.T @ finite(q_tile)

        # -- store --
        # a sequence's last block may reach over the next one's keys: their share from here is 0
        d_k[keys, head] += scale * acc_dk
        d_v[keys, head] += acc_dv
    return d_k.view(k.shape).to(k.dtype), d_v.view(v.shape).to(v.dtype)


# -- the operators --


def selected_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> ListGradients:  # fmt: skip
    """The backward of `selected_attention.forward`.

    Args:
        d_o, d_lse: gradients of its outputs, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, ids, rows, block_size, scale, slot_scale: its arguments.
        o, lse: what it returned.

    Returns:
        The gradients of `q`, `k` and `v`, in their dtypes, and that of `slot_scale`, `[R, H, S]` in
        fp32 (fp64 for fp64 inputs), or None without it.
    """
    lse, delta = tile_gradients.preprocess(d_o, d_lse, o, lse)
    factors = torch.ones_like(ids, dtype=delta.dtype) if slot_scale is None else slot_scale
    options = {"block_size": block_size, "scale": scale, "slot_scale": factors.to(delta.dtype)}
    arguments = (d_o, q, k, v, lse, delta, ids, rows)
    d_q, d_slot_scale = backward_dq(*arguments, **options)
    d_k, d_v = backward_dkv(*arguments, **options)
    return d_q, d_k, d_v, None if slot_scale is None else d_slot_scale


def selected_and_window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ids: Tensor, rows: QueryRows, *, block_size: int, window_size: int, scale: float,
    slot_scale: Tensor | None = None,
) -> ListGradients:  # fmt: skip
    """The backward of `native_sparse_attention.selection_and_window`: as `selected_backward`,
    through both outputs at once. `d_o`, `d_lse`, `o` and `lse` are `[2, …]`, of the lists, then of
    the windows.
    """
    (do_l, do_w), (dlse_l, dlse_w), (o_l, o_w), (lse_l, lse_w) = d_o, d_lse, o, lse
    lists = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    of_lists = (do_l, dlse_l, q, k, v, o_l, lse_l, ids, rows)
    *by_list, d_slot_scale = selected_backward(*of_lists, **lists)
    windows = {"window_size": window_size, "scale": scale}
    by_window = tile_gradients.window_backward(do_w, dlse_w, q, k, v, o_w, lse_w, rows, **windows)
    d_q, d_k, d_v = (a + b for a, b in zip(by_list, by_window, strict=True))
    return d_q, d_k, d_v, d_slot_scale


def selected_in_order_backward(
    *given: Tensor | QueryRows, order: Order | None = None, **options: object
) -> ListGradients:
    """The backward of `query_tiles.selected_in_order`, with the arguments of
    `selected_backward`."""
    if order is Order.QUERY_TILES:
        options.pop("slot_scale", None)
        return *tile_gradients.masked_selected_backward(*given, **options), None
    return selected_backward(*given, **options)
