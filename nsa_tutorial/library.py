"""The operators as PyTorch knows them: `torch.ops.nsa_tutorial.*`. Each has a fake kernel, which
returns shapes and computes nothing, and a gradient where there is one (`library_backward`). So
`torch.compile`, meta tensors and checkpoints take them like PyTorch's own.

An operator here takes checked, flat arguments (`ops` checks them) and the backend's name. Its
implementation locates the query rows, brings lists into one form, and calls the backend's function;
`backends` holds all three.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
from torch import Tensor
from torch.library import custom_op

from nsa_tutorial import backends
from nsa_tutorial.backends import BACKENDS, choose
from nsa_tutorial.library_backward import (
    compressed_attention_backward,
    differentiable,
    differentiable_mean,
    differentiable_sum,
    selected_and_window_attention_backward,
    selected_attention_backward,
    sliding_window_attention_backward,
)
from nsa_tutorial.runtime import checks
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.compression import MLPWeights
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL
from nsa_tutorial.sparse.native_sparse_attention import gated_sum as plain_gated_sum
from nsa_tutorial.sparse.selected_attention import query_rows


def _empty(q: Tensor, v: Tensor, *branches: int) -> tuple[Tensor, Tensor]:
    """Room for `o` and `lse`: what a fake kernel returns, and all that there is without queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = v.new_empty(*branches, *q.shape[:3], v.shape[3])
    return o, q.new_empty(*branches, *q.shape[:3], dtype=wide)


# -- selected attention --


@custom_op("nsa_tutorial::selected_attention", mutates_args=())
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, block_size: int, include_own_block: bool,
    causal: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_attention`: `o [B, N, HQ, DV]` and `lse [B, N, HQ]`."""
    function = backends.load(BACKENDS, "selected_attention", backend, q)
    ids, rows, sizes = backends.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        causal,
    )  # fmt: skip
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, ids, rows, **sizes, scale=scale)


# -- sliding window --


@custom_op("nsa_tutorial::sliding_window_attention", mutates_args=())
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window_size: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.sliding_window_attention`: `o` and `lse`."""
    function = backends.load(BACKENDS, "sliding_window_attention", backend, q)
    rows = backends.located_rows(q, k.shape[1], cu_seqlens)
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, rows, window_size=window_size, scale=scale)


# -- lists and windows at once --


@custom_op("nsa_tutorial::selected_and_window_attention", mutates_args=())
def selected_and_window_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, window_size: int, block_size: int,
    include_own_block: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_and_window_attention`: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`, of the
    lists, then of the windows."""
    function = backends.load(BACKENDS, "selected_and_window_attention", backend, q)
    ids, rows, sizes = backends.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        True,
    )  # fmt: skip
    if q.numel() == 0:
        return _empty(q, v, 2)
    return function(q, k, v, ids, rows, **sizes, window_size=window_size, scale=scale)


# -- summaries --


@custom_op("nsa_tutorial::compressed_attention", mutates_args=())
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, num_keys: int, length: int,
    stride: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.compressed_attention` to summaries `k [B, M_c, H, D]` and `v`: `o` and `lse`."""
    function = backends.load(BACKENDS, "compressed_attention", backend, q)
    _, rows = backends.rows_and_summaries(q, k, cu_seqlens, num_keys, length, stride)
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, rows, scale=scale)


@custom_op("nsa_tutorial::select_blocks", mutates_args=())
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, num_keys: int, top_n: int, block_size: int, length: int,
    stride: int, num_initial: int, num_local: int, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.select_blocks`: int32 `[B, N, H, top_n]`."""
    function = backends.load(BACKENDS, "select_blocks", backend, q)
    rows, summaries = backends.rows_and_summaries(q, k_cmp, cu_seqlens, num_keys, length, stride)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:2], k_cmp.shape[2], top_n, dtype=torch.int32)
    return function(
        q, k_cmp, lse, rows, summaries,
        M=num_keys, top_n=top_n, block_size=backends.at_most_one_block(block_size, num_keys),
        length=length, stride=stride, num_initial=num_initial, num_local=num_local, scale=scale,
        block_counts=block_counts,
    )  # fmt: skip


@select_blocks.register_fake
def _(
    q, k_cmp, lse, block_counts, cu_seqlens, num_keys, top_n, block_size, length, stride,
    num_initial, num_local, scale, backend,
):  # fmt: skip
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], top_n, dtype=torch.int32)


@custom_op("nsa_tutorial::first_tokens", mutates_args=())
def first_tokens(cu_seqlens: Tensor, num_keys: int, length: int, stride: int) -> Tensor:
    """The token with which each summary of packed sequences begins, `[M_c]`."""
    checks.check_offsets(cu_seqlens, num_keys)
    return compression.first_tokens(num_keys, length, stride, cu_seqlens, cu_seqlens.device)


@first_tokens.register_fake
def _(cu_seqlens, num_keys, length, stride):
    M_c = torch.library.get_ctx().new_dynamic_size()  # follows from values, not from shapes
    return cu_seqlens.new_empty(M_c, dtype=torch.int64)


@custom_op("nsa_tutorial::positions", mutates_args=())
def positions(cu_seqlens: Tensor, N: int) -> Tensor:
    """The position of each token of packed sequences in its own sequence, `[N]` int32."""
    checks.check_offsets(cu_seqlens, N)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=cu_seqlens, device=cu_seqlens.device)
    return rows.position


@positions.register_fake
def _(cu_seqlens, N):
    return cu_seqlens.new_empty(N, dtype=torch.int32)


# -- the mean of windows, and the gated sum: on kernels alone --


@custom_op("nsa_tutorial::mean_summaries", mutates_args=())
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


@custom_op("nsa_tutorial::gated_sum", mutates_args=())
def gated_sum(gates: list[Tensor], outputs: list[Tensor], backend: str) -> Tensor:
    """The outputs `[B, N, HQ, DV]` of one to three branches, each times its gate `[B, N, HQ]`,
    added up. Two neighbours may come stacked, `[2, B, N, HQ, DV]`, as
    `selected_and_window_attention` returns them: no gradient has to be stacked for it."""
    branches = backends.one_by_one(outputs)
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


# -- compositions: PyTorch derives the fake kernel and the gradient from what they call --


def compress(
    x: Tensor, weights: list[Tensor], cu_seqlens: Tensor | None, kind: str, length: int,
    stride: int, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.compress`, with the weights of `kind` in a list. `backend` is the one of the mean."""
    M = x.shape[1]
    weight = MLPWeights(*weights) if kind == "mlp" else weights[0] if weights else None
    if kind != "mean" and compression.has_pieces(M, length, stride, cu_seqlens):
        sizes = {"length": length, "stride": stride}
        return compression.summarise_pieces(x, kind=kind, **sizes, weight=weight)
    if cu_seqlens is None:
        first = compression.first_tokens(M, length, stride, None, x.device)
    else:
        first = first_tokens(cu_seqlens, M, length, stride)
    if kind == "mean" and backend != "reference":
        return mean_summaries(x, first, length, stride, backend)
    return compression.summarise(x, first, kind=kind, length=length, weight=weight)


def native_sparse_attention(
    q: Tensor, compressed: list[Tensor], selected: list[Tensor], window: list[Tensor],
    g_cmp: Tensor | None, g_slc: Tensor | None, g_swa: Tensor | None,
    block_indices: Tensor | None, block_counts: Tensor | None, num_keys: int, top_n: int,
    cu_seqlens: Tensor | None, block_size: int, window_size: int, length: int, stride: int,
    scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.native_sparse_attention` over the keys and values of each branch, `compressed` being
    summaries. Where `window` is empty, the keys and values of `selected` serve both. Without
    `g_cmp` there are lists (`ops` sees to it); `backend` may be `auto`."""
    backend = choose(backend, q)
    gates, outputs = [g for g in (g_cmp, g_slc, g_swa) if g is not None], []

    # -- compression --
    if g_cmp is not None:
        sizes = (length, stride, scale, backend)
        o_cmp, lse = compressed_attention(q, *compressed, cu_seqlens, num_keys, *sizes)
        outputs.append(o_cmp)

    # -- selection --
    if g_slc is not None and block_indices is None:
        sizes = (top_n, block_size, length, stride, NUM_INITIAL, NUM_LOCAL, scale, backend)
        scores = (q.detach(), compressed[0].detach(), lse.detach())
        block_indices = select_blocks(*scores, block_counts, cu_seqlens, num_keys, *sizes)
        block_counts = None
    lists = (block_indices, block_counts, None, cu_seqlens)
    # kernels write both branches over the same keys to one output
    is_shared = g_slc is not None and g_swa is not None and not window
    at_once = is_shared and backend != "reference"
    if at_once:
        options = (window_size, block_size, False, scale, backend)
        outputs.append(selected_and_window_attention(q, *selected, *lists, *options)[0])
    elif g_slc is not None:
        # in place of the reference that mirrors the kernels, the fast one under a mask
        by = "masked" if backend == "reference" else backend
        o_slc, _ = selected_attention(q, *selected, *lists, block_size, False, True, scale, by)
        outputs.append(o_slc)

    # -- window --
    if g_swa is not None and not at_once:
        k, v = window or selected
        o_swa, _ = sliding_window_attention(q, k, v, cu_seqlens, window_size, scale, backend)
        outputs.append(o_swa)

    # -- gates --
    if backend == "reference":
        return plain_gated_sum(gates, backends.one_by_one(outputs))
    return gated_sum(gates, outputs, backend)


_LIBRARY = torch.library.Library("nsa_tutorial", "FRAGMENT")
for _composition in (compress, native_sparse_attention):
    _schema = torch.library.infer_schema(_composition, mutates_args=())
    _LIBRARY.define(_composition.__name__ + _schema)
    _LIBRARY.impl(_composition.__name__, _composition, "CompositeImplicitAutograd")
