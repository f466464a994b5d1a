"""The window branch: each query attends to the latest keys (NSA, arXiv 2502.11089, section 3.3.3).

A window of `w` shows a query at position `t` the keys `t - w + 1 … t`: exactly `w` of them, itself
included, fewer at the start of a sequence. (To the letter, the paper's range of keys has one more;
where it counts them, in section 5.2, they are `w`.)

It does not validate (`ops` does). In `forward`, a tile of `T` queries reads `T + w - 1` keys, and
no more scores than `T * (T + w - 1)` exist per head. `as_selection` says what the kernels do: a
window is a list of blocks too, if blocks are counted from its first key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.query_tiles import View
from nsa_tutorial.sparse.selected_attention import QueryRows


def forward(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the last `window_size` keys.

    Args:
        q, k, v: `[B, N, HQ, D]`, `[B, M, H, D]`, `[B, M, H, DV]`.
        rows: from `query_rows`, causal.
        window_size: keys in the window, the query's own included.
        scale: factor on the scores, as in `softmax(scale * q @ k)`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, and `lse [B, N, HQ]`: natural logarithm, fp32 (fp64
        for fp64 inputs).
    """
    view = view_of_windows(rows, N=q.shape[1], M=k.shape[1], window_size=window_size)
    return query_tiles.attend(q, k, v, view, scale=scale)


def view_of_windows(rows: QueryRows, *, N: int, M: int, window_size: int) -> View:
    """What `N` queries see of `M` keys. A tile reads from the window of its first query on; what
    lies before a packed sequence is masked."""
    # those of the first sequence of the batch serve all
    first, position = rows.first_key[:N], rows.position[:N]
    start = first + (position - window_size + 1).clamp(min=0)
    spans = [
        (t, slice(max(0, M - N + t.start - window_size + 1), M - N + t.stop))
        for t in query_tiles.tiles(N)
    ]
    return View(spans, query_tiles.run_of_keys(start, first + position + 1))


def as_selection(rows: QueryRows, *, window_size: int, block_size: int) -> tuple[Tensor, QueryRows]:
    """The window as a selection, as the kernels of selected attention walk it.

    Each row's keys are made to begin with its window, so that it sees all of them, and its list is
    0, 1, 2, …: no block is aligned to anything, none needs a lower bound, and one list serves all
    rows and heads.

    Returns:
        That list, `[S]` int32 with `S = ceil(window_size / block_size)`, and the rows to go with
        it.
    """
    start = (rows.position - window_size + 1).clamp(min=0)
    ids = torch.arange(-(-window_size // block_size), dtype=torch.int32, device=start.device)
    return ids, rows._replace(
        first_key=rows.first_key + start, num_visible=rows.num_visible - start
    )
