"""The composite operators as PyTorch sees them. It derives their fake kernels and gradients from
the operators that they call.

As in `library`, arguments are checked and flat. Inside `torch.func` transforms, `ops` calls these
functions directly, because the dispatcher would hide the transform from `call`.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
from torch import Tensor

from nsa_tutorial import arguments, library
from nsa_tutorial.library_at_once import branches_at_once
from nsa_tutorial.library_backward import call
from nsa_tutorial.library_choice import block_shares
from nsa_tutorial.runtime.transforms import is_transformed
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.compression import MLPWeights
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL
from nsa_tutorial.sparse.native_sparse_attention import gated_sum as plain_gated_sum


def compress(
    x: Tensor, weights: list[Tensor], cu_seqlens: Tensor | None, kind: str, length: int,
    stride: int, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.compress`, with the weights of `kind` as a list. `backend` computes the mean."""
    M = x.shape[1]
    if kind == "mean" and length > M:
        return x[:, :0]
    weight = MLPWeights(*weights) if kind == "mlp" else weights[0] if weights else None
    if kind != "mean" and compression.has_pieces(M, length, stride, cu_seqlens):
        sizes = {"length": length, "stride": stride}
        return compression.summarise_pieces(x, kind=kind, **sizes, weight=weight)
    if cu_seqlens is None:
        first = compression.first_tokens(M, length, stride, None, x.device)
    else:
        first = library.first_tokens(cu_seqlens, M, length, stride)
    if kind == "mean" and backend != "reference" and not is_transformed():
        return library.mean_summaries(x, first, length, stride, backend)
    return compression.summarise(x, first, kind=kind, length=length, weight=weight)


def takes_all_at_once(backend: str, order: str) -> bool:
    """Whether three branches and a choice go to the kernels in one call."""
    return backend == "triton" and order == "auto" and not is_transformed()


def native_sparse_attention(
    q: Tensor, compressed: list[Tensor], selected: list[Tensor], window: list[Tensor],
    g_cmp: Tensor | None, g_slc: Tensor | None, g_swa: Tensor | None,
    block_indices: Tensor | None, block_counts: Tensor | None, slot_scale: Tensor | None,
    num_keys: int, top_n: int, cu_seqlens: Tensor | None, block_size: int, window_size: int,
    length: int, stride: int, scale: float, backend: str, order: str, learn_choice: bool,
    nonnegative_gates: bool,
) -> Tensor:  # fmt: skip
    """`ops.native_sparse_attention` over the keys and values of each branch; `compressed` holds
    summaries. If `window` is empty, it shares the keys and values of `selected`. Without `g_cmp`
    there are lists, which `ops` checks. With `g_cmp`, `compressed` may be empty where
    `library_at_once` computes all: then summaries are the means of `selected`."""
    gates, outputs = [g for g in (g_cmp, g_slc, g_swa) if g is not None], []
    are_chosen = block_indices is None and not learn_choice
    if len(gates) == 3 and are_chosen and takes_all_at_once(backend, order):
        sizes = (num_keys, top_n, block_size, window_size, length, stride, scale)
        pairs = [x for pair in (compressed, selected, window) for x in (pair or (None, None))]
        given = (q, *pairs, *gates, block_counts, cu_seqlens)
        return branches_at_once(*given, *sizes, nonnegative_gates)[0]

    # -- compression --
    if g_cmp is not None:
        sizes = (length, stride, scale, backend)
        given = (q, *compressed, cu_seqlens, num_keys, *sizes)
        o_cmp, lse = call(library.compressed_attention, *given)
        outputs.append(o_cmp)

    # -- selection --
    if g_slc is not None and block_indices is None:
        sizes = (top_n, block_size, length, stride, NUM_INITIAL, NUM_LOCAL, scale, backend)
        scores = (q.detach(), compressed[0].detach(), lse.detach())
        block_indices = library.select_blocks(*scores, block_counts, cu_seqlens, num_keys, *sizes)
        block_counts = None
        if learn_choice:
            sizes = (num_keys, block_size, length, stride, scale)
            given = (q, compressed[0], lse, block_indices, cu_seqlens, *sizes)
            share = call(block_shares, *given)
            slot_scale = 1 + (share - share.detach())  # 1 to the bit
    lists = (block_indices, block_counts, slot_scale, cu_seqlens)
    # kernels write both branches over the same keys to one output
    is_shared = g_slc is not None and g_swa is not None and not window
    at_once = is_shared and backend != "reference" and order == "auto"
    if at_once:
        options = (window_size, block_size, False, scale, backend)
        both = call(library.selected_and_window_attention, q, *selected, *lists, *options)
        outputs.append(both[0])
    elif g_slc is not None:
        if backend == "reference" and slot_scale is None:
            order = "tiles"  # the fast version, not the one that mirrors the kernels
        options = (block_size, False, True, scale, backend, order)
        outputs.append(call(library.selected_attention, q, *selected, *lists, *options)[0])

    # -- window --
    if g_swa is not None and not at_once:
        given = (q, *(window or selected), cu_seqlens, window_size, scale, backend)
        outputs.append(call(library.sliding_window_attention, *given)[0])

    # -- gates --
    if backend == "reference" or is_transformed():
        return plain_gated_sum(gates, arguments.one_by_one(outputs))
    return library.gated_sum(gates, outputs, backend)


_LIBRARY = torch.library.Library("nsa_tutorial", "FRAGMENT")
for _composition in (compress, native_sparse_attention):
    _schema = torch.library.infer_schema(_composition, mutates_args=())
    _LIBRARY.define(_composition.__name__ + _schema)
    _LIBRARY.impl(_composition.__name__, _composition, "CompositeImplicitAutograd")
