"""The operators as PyTorch knows them: `torch.ops.nsa_tutorial.*`. Each has a fake kernel, which
returns shapes and computes nothing, and a gradient where there is one (`library_backward`). So
`torch.compile`, meta tensors and checkpoints take them like PyTorch's own.

An operator here takes checked, flat arguments (`ops` checks them) and the backend's name. Its
implementation locates the query rows and brings lists into one form (`arguments`), and calls the
backend's function (`backends`).
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial import arguments, backends
from nsa_tutorial.backends import BACKENDS
from nsa_tutorial.library_backward import (
    compressed_attention_backward,
    differentiable,
    differentiable_mean,
    differentiable_sum,
    selected_and_window_attention_backward,
    selected_attention_backward,
    sliding_window_attention_backward,
)
from nsa_tutorial.runtime import packed
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.selected_attention import query_rows


def _empty(q: Tensor, v: Tensor, *branches: int) -> tuple[Tensor, Tensor]:
    """Uninitialised `o` and `lse`: the result of a fake kernel, and of a call without queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = v.new_empty(*branches, *q.shape[:3], v.shape[3])
    return o, q.new_empty(*branches, *q.shape[:3], dtype=wide)


# -- selected attention --


@operator("nsa_tutorial::selected_attention")
@on_its_device
@with_new_strides
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, block_size: int, include_own_block: bool,
    causal: bool, scale: float, backend: str, order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_attention`: `o [B, N, HQ, DV]` and `lse [B, N, HQ]`."""
    function = backends.load(BACKENDS, "selected_attention", backend, q)
    ids, rows, sizes = arguments.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        causal,
    )  # fmt: skip
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, ids, rows, **sizes, scale=scale, **arguments.walk_of(order))


# -- sliding window --


@operator("nsa_tutorial::sliding_window_attention")
@on_its_device
@with_new_strides
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window_size: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.sliding_window_attention`: `o` and `lse`."""
    function = backends.load(BACKENDS, "sliding_window_attention", backend, q)
    rows = arguments.located_rows(q, k.shape[1], cu_seqlens)
    if q.numel() == 0:
        return _empty(q, v)
    window_size = arguments.at_most_past(window_size, k.shape[1])
    return function(q, k, v, rows, window_size=window_size, scale=scale)


# -- lists and windows at once --


@operator("nsa_tutorial::selected_and_window_attention")
@on_its_device
@with_new_strides
def selected_and_window_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, window_size: int, block_size: int,
    include_own_block: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_and_window_attention`: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`, of the
    lists, then of the windows."""
    function = backends.load(BACKENDS, "selected_and_window_attention", backend, q)
    ids, rows, sizes = arguments.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        True,
    )  # fmt: skip
    if q.numel() == 0:
        return _empty(q, v, 2)
    window_size = arguments.at_most_past(window_size, k.shape[1])
    return function(q, k, v, ids, rows, **sizes, window_size=window_size, scale=scale)


# -- summaries --


@operator("nsa_tutorial::compressed_attention")
@on_its_device
@with_new_strides
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, num_keys: int, length: int,
    stride: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.compressed_attention` to summaries `k [B, M_c, H, D]` and `v`: `o` and `lse`."""
    function = backends.load(BACKENDS, "compressed_attention", backend, q)
    _, rows = arguments.rows_and_summaries(q, k, cu_seqlens, num_keys, length, stride)
    if v.shape[1] != k.shape[1]:
        raise ValueError(
            f"v_cmp: got {v.shape[1]} summaries, expected as many as k_cmp, {k.shape[1]}"
        )
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, rows, scale=scale)


@operator("nsa_tutorial::select_blocks")
@on_its_device
@with_new_strides
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, num_keys: int, top_n: int, block_size: int, length: int,
    stride: int, num_initial: int, num_local: int, scale: float, backend: str, pool: str = "sum",
) -> Tensor:  # fmt: skip
    """`ops.select_blocks`: int32 `[B, N, H, top_n]`."""
    function = backends.load(BACKENDS, "select_blocks", backend, q)
    rows, summaries = arguments.rows_and_summaries(q, k_cmp, cu_seqlens, num_keys, length, stride)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:2], k_cmp.shape[2], top_n, dtype=torch.int32)
    sizes = arguments.sizes_of_a_choice(
        num_keys, block_size, length, stride, top_n, num_initial, num_local
    )
    slots = sizes["top_n"]
    if block_counts is not None:
        block_counts = block_counts.clamp(0, slots).to(torch.int32).contiguous()
    ids = function(
        q, k_cmp, lse, rows, summaries, M=num_keys, **sizes, scale=scale,
        block_counts=block_counts, pool=pool,
    )  # fmt: skip
    return ids if slots == top_n else F.pad(ids, (0, top_n - slots), value=-1)


@select_blocks.register_fake
def _(
    q, k_cmp, lse, block_counts, cu_seqlens, num_keys, top_n, block_size, length, stride,
    num_initial, num_local, scale, backend, pool="sum",
):  # fmt: skip
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], top_n, dtype=torch.int32)


@operator("nsa_tutorial::first_tokens")
@on_its_device
@with_new_strides
def first_tokens(cu_seqlens: Tensor, num_keys: int, length: int, stride: int) -> Tensor:
    """The token with which each summary of packed sequences begins, `[M_c]`."""
    packed.check_offsets(cu_seqlens, num_keys)
    return compression.first_tokens(num_keys, length, stride, cu_seqlens, cu_seqlens.device)


@first_tokens.register_fake
def _(cu_seqlens, num_keys, length, stride):
    M_c = torch.library.get_ctx().new_dynamic_size()  # follows from values, not from shapes
    return cu_seqlens.new_empty(M_c, dtype=torch.int64)


@operator("nsa_tutorial::positions")
@on_its_device
@with_new_strides
def positions(cu_seqlens: Tensor, N: int) -> Tensor:
    """The position of each token of packed sequences in its own sequence, `[N]` int32."""
    packed.check_offsets(cu_seqlens, N)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=cu_seqlens, device=cu_seqlens.device)
    return rows.position


@positions.register_fake
def _(cu_seqlens, N):
    return cu_seqlens.new_empty(N, dtype=torch.int32)


# -- the mean of windows, and the gated sum: on kernels alone --


@operator("nsa_tutorial::mean_summaries")
@on_its_device
@with_new_strides
def mean_summaries(x: Tensor, first: Tensor, length: int, stride: int, backend: str) -> Tensor:
    """The mean of each window of `x [B, M, H, D]`, `[B, M_c, H, D]`; windows begin at the tokens
    `first [M_c]`, in ascending order."""
    function = backends.load(BACKENDS, "compress", backend, x)
    if x.numel() == 0 or first.numel() == 0:
        return x.new_empty(x.shape[0], first.shape[0], *x.shape[2:])
    return function(x, first, length=length)


@mean_summaries.register_fake
def _(x, first, length, stride, backend):
    return x.new_empty(x.shape[0], first.shape[0], *x.shape[2:])


@operator("nsa_tutorial::gated_sum")
@on_its_device
@with_new_strides
def gated_sum(gates: list[Tensor], outputs: list[Tensor], backend: str) -> Tensor:
    """The outputs `[B, N, HQ, DV]` of one to three branches, each times its gate `[B, N, HQ]`,
    added up. Two neighbours may come stacked, `[2, B, N, HQ, DV]`, as
    `selected_and_window_attention` returns them: no gradient has to be stacked for it."""
    branches = arguments.one_by_one(outputs)
    function = backends.load(BACKENDS, "gated_sum", backend, branches[0])
    if branches[0].numel() == 0:
        return branches[0].new_empty(branches[0].shape)
    return function(gates, branches)


@gated_sum.register_fake
def _(gates, outputs, backend):
    return outputs[0].new_empty(outputs[0].shape[-4:])


differentiable_mean(mean_summaries)
differentiable_sum(gated_sum)


# -- the four that attend: their gradients, and fake kernels --


differentiable(selected_attention, selected_attention_backward, 7, has_factors=True)
differentiable(sliding_window_attention, sliding_window_attention_backward, 4)
differentiable(
    selected_and_window_attention, selected_and_window_attention_backward, 7, has_factors=True
)
differentiable(compressed_attention, compressed_attention_backward, 4)
for _operator in (selected_attention, sliding_window_attention, compressed_attention):
    _operator.register_fake(lambda q, k, v, *_: _empty(q, v))
selected_and_window_attention.register_fake(lambda q, k, v, *_: _empty(q, v, 2))
