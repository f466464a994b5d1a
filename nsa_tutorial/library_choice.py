"""The choices beside `library.select_blocks`, as custom operators.

`block_shares` is each chosen block's share of the attention. Its gradient is how `learn_choice`
reaches the scores that chose the blocks. It is plain PyTorch on every backend
(`sparse.block_shares`). `index_blocks` chooses by an indexer, and has no gradient."""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial import arguments, backends
from nsa_tutorial.backends import BACKENDS
from nsa_tutorial.library_backward import call, make_differentiable
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides
from nsa_tutorial.sparse import block_shares as shares


@operator("nsa_tutorial::block_shares")
@on_its_device
@with_new_strides
def block_shares(
    q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None,
    num_keys: int, block_size: int, length: int, stride: int, scale: float,
) -> Tensor:  # fmt: skip
    """`block_shares.forward`: `[B, N, H, S]`."""
    rows, sizes = _rows_and_sizes(q, k_cmp, cu_seqlens, num_keys, block_size, length, stride)
    return shares.forward(q, k_cmp, lse, block_indices, rows, **sizes, scale=scale)


@block_shares.register_fake
def _(q, k_cmp, lse, block_indices, *_):
    return q.new_empty(block_indices.shape, dtype=torch.promote_types(q.dtype, lse.dtype))


@operator("nsa_tutorial::block_shares_backward")
@on_its_device
@with_new_strides
def block_shares_backward(
    d_shares: Tensor, q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor,
    cu_seqlens: Tensor | None, num_keys: int, block_size: int, length: int, stride: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k_cmp` and `lse`."""
    rows, sizes = _rows_and_sizes(q, k_cmp, cu_seqlens, num_keys, block_size, length, stride)
    saved = (d_shares, q, k_cmp, lse, block_indices)
    return shares.backward(*saved, rows, **sizes, scale=scale)


@block_shares_backward.register_fake
def _(d_shares, q, k_cmp, lse, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k_cmp, lse))


def _rows_and_sizes(
    q: Tensor, k_cmp: Tensor, cu_seqlens: Tensor | None, num_keys: int, block_size: int,
    length: int, stride: int,
) -> tuple:  # fmt: skip
    _, rows = arguments.rows_and_summaries(q, k_cmp, cu_seqlens, num_keys, length, stride)
    sizes = arguments.sizes_of_a_choice(num_keys, block_size, length, stride, 1, 0, 0)
    return rows, {name: sizes[name] for name in ("block_size", "length", "stride")}


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _run(ctx, d_shares: Tensor) -> tuple:
    found = call(block_shares_backward, d_shares, *ctx.saved_tensors, *ctx.options)
    return *found, None, None, *(None for _ in ctx.options)


make_differentiable(block_shares, block_shares_backward, _run, _save)


@operator("nsa_tutorial::index_blocks")
@on_its_device
@with_new_strides
def index_blocks(
    q_idx: Tensor, k_idx: Tensor, w: Tensor | None, cu_seqlens: Tensor | None, kv_heads: int,
    top_n: int, block_size: int, num_initial: int, num_local: int, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.index_blocks`: int32 `[B, N, kv_heads, top_n]`."""
    function = backends.load(BACKENDS, "index_blocks", backend, q_idx)
    M = k_idx.shape[1]
    rows = arguments.located_rows(q_idx, M, cu_seqlens)
    if q_idx.numel() == 0:
        return q_idx.new_empty(*q_idx.shape[:2], kv_heads, top_n, dtype=torch.int32)
    sizes = arguments.sizes_of_a_choice(M, block_size, 1, 1, top_n, num_initial, num_local)
    sizes = {x: sizes[x] for x in ("block_size", "top_n", "num_initial", "num_local")}
    ids = function(q_idx, k_idx, w, rows, kv_heads=kv_heads, **sizes)
    return F.pad(ids, (0, top_n - sizes["top_n"]), value=-1)


@index_blocks.register_fake
def _(q_idx, k_idx, w, cu_seqlens, kv_heads, top_n, *_):
    return q_idx.new_empty(*q_idx.shape[:2], kv_heads, top_n, dtype=torch.int32)
