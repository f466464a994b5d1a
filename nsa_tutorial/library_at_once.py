"""Native Sparse Attention as one custom operator, `torch.ops.nsa_tutorial.branches_at_once`, with
one backward: what three branches, a choice and a gated sum are where the kernels take all of them
in one call (`kernels.triton.native`). `compositions` decides when.

As in `library`, arguments are checked and flat.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial import arguments, backends
from nsa_tutorial.backends import BACKENDS, BACKWARDS
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides
from nsa_tutorial.sparse.compression import num_summaries
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL

Pair = list[Tensor]


@operator("nsa_tutorial::branches_at_once")
@on_its_device
@with_new_strides
def branches_at_once(
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor, v_slc: Tensor,
    k_swa: Tensor | None, v_swa: Tensor | None, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
    block_counts: Tensor | None, cu_seqlens: Tensor | None, num_keys: int, top_n: int,
    block_size: int, window_size: int, length: int, stride: int, scale: float,
    nonnegative_gates: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """`ops.native_sparse_attention` with three gates, choosing its blocks, on the Triton backend.
    Each tensor is an argument of its own: lists PyTorch takes apart in Python, at every call.

    Args:
        k_cmp, …, v_swa: keys and values of each branch; without `k_cmp` and `v_cmp`, summaries are
            means of those of the selection, and without `k_swa` and `v_swa`, the window has those.
        nonnegative_gates: for the backward alone.

    Returns:
        The gated sum; and for the backward: the three outputs `[B, N, HQ, DV]`, their `lse
        [3, B, N, HQ]`, the lists `[B, N, H, top_n]`, the summaries, empty if they were given, and
        where rows and tokens stand (`kernels.triton.rows`), `[5, B * N]` and `[2, B * M]` int32,
        the latter empty for packed sequences; and `[1]` int32, whether a key or a value is not
        finite (`kernels.triton.native.Outputs`).
    """
    function = backends.load(BACKENDS, "branches_at_once", "triton", q)
    compressed, selected, window = _pairs(k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa)
    if q.numel() == 0:
        return _empty(q, compressed, selected, cu_seqlens, num_keys, top_n, length, stride)
    choice, window_size = _sizes(num_keys, top_n, block_size, window_size, length, stride)
    rows = None
    if cu_seqlens is not None:
        given = (q, compressed[0], cu_seqlens, num_keys, length, stride)
        rows = arguments.rows_and_summaries(*given)
    if block_counts is not None:
        block_counts = block_counts.clamp(0, choice["top_n"]).to(torch.int32).contiguous()
    found = function(
        q, compressed, selected, window, [g_cmp, g_slc, g_swa], block_counts, rows,
        num_keys=num_keys, choice=choice, window_size=window_size, scale=scale,
    )  # fmt: skip
    ids, slots = found.ids, choice["top_n"]
    ids = ids if slots == top_n else F.pad(ids, (0, top_n - slots), value=-1)
    summaries = [q.new_empty(0), q.new_empty(0)] if compressed else found.summaries
    places = (found.of_rows, found.of_tokens)
    return found.o, *found.branches, found.lse, ids, *summaries, *places, found.is_bad


@branches_at_once.register_fake
def _(
    q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, g_cmp, g_slc, g_swa, block_counts, cu_seqlens,
    num_keys, top_n, block_size, window_size, length, stride, scale, nonnegative_gates,
):  # fmt: skip
    compressed, selected, _ = _pairs(k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa)
    return _empty(q, compressed, selected, cu_seqlens, num_keys, top_n, length, stride)


def _pairs(
    k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor, v_slc: Tensor, k_swa: Tensor | None,
    v_swa: Tensor | None,
) -> tuple[Pair, Pair, Pair]:  # fmt: skip
    """Keys and values of each branch; none for one that has none of its own."""
    compressed = [] if k_cmp is None else [k_cmp, v_cmp]
    return compressed, [k_slc, v_slc], [] if k_swa is None else [k_swa, v_swa]


def _empty(
    q: Tensor, compressed: list[Tensor], selected: list[Tensor], cu_seqlens: Tensor | None,
    num_keys: int, top_n: int, length: int, stride: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Uninitialised results."""
    k, v = selected
    (B, N, HQ), H = q.shape[:3], k.shape[2]
    outputs = [v.new_empty(B, N, HQ, v.shape[3]) for _ in range(4)]
    lse = q.new_empty(3, B, N, HQ, dtype=torch.promote_types(q.dtype, torch.float32))
    ids = q.new_empty(B, N, H, top_n, dtype=torch.int32)
    M_c = num_summaries(num_keys, length, stride)
    summaries = [
        q.new_empty(0) if compressed else x.new_empty(B, M_c, H, x.shape[3]) for x in (k, v)
    ]
    of_rows = ids.new_empty(5, B * N)
    of_tokens = ids.new_empty(2, B * num_keys) if cu_seqlens is None else ids.new_empty(0)
    return *outputs, lse, ids, *summaries, of_rows, of_tokens, ids.new_empty(1)


def _sizes(
    num_keys: int, top_n: int, block_size: int, window_size: int, length: int, stride: int
) -> tuple[dict[str, int], int]:
    """The sizes of the choice, and the window's."""
    choice = arguments.sizes_of_a_choice(
        num_keys, block_size, length, stride, top_n, NUM_INITIAL, NUM_LOCAL
    )
    return choice, arguments.at_most_past(window_size, num_keys)


@operator("nsa_tutorial::branches_at_once_backward")
@on_its_device
@with_new_strides
def branches_at_once_backward(
    d_o: Tensor, o: Tensor, o_cmp: Tensor, o_slc: Tensor, o_swa: Tensor, lse: Tensor, ids: Tensor,
    made_k_cmp: Tensor, made_v_cmp: Tensor, of_rows: Tensor, of_tokens: Tensor, is_bad: Tensor,
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor, v_slc: Tensor,
    k_swa: Tensor | None, v_swa: Tensor | None, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
    cu_seqlens: Tensor | None, num_keys: int, top_n: int, block_size: int, window_size: int,
    length: int, stride: int, scale: float, nonnegative_gates: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """The gradients of `q, …, g_swa`, empty for what is None; `o, …, is_bad` are what
    `branches_at_once` returned."""
    function = backends.load(BACKWARDS, "branches_at_once", "triton", q)
    pairs = (k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa)
    compressed, selected, window = _pairs(*pairs)
    gates = [g_cmp, g_slc, g_swa]
    if q.numel() == 0:
        return tuple(_like(x, q).zero_() for x in (q, *pairs, *gates))
    sizes = (num_keys, top_n, block_size, window_size, length, stride)
    choice, window_size = _sizes(*sizes)
    made = compressed or [made_k_cmp, made_v_cmp]
    found = (o, [o_cmp, o_slc, o_swa], lse, ids, made, of_rows, of_tokens, is_bad)
    d_q, *d_pairs, d_gates = function(
        d_o, found, q, compressed, selected, window, gates,
        num_sequences=len(q) if cu_seqlens is None else len(cu_seqlens) - 1, choice=choice,
        window_size=window_size, scale=scale, nonnegative_gates=nonnegative_gates,
    )  # fmt: skip
    d_pairs = [pair or [q.new_empty(0), q.new_empty(0)] for pair in d_pairs]
    return d_q, *(x for pair in d_pairs for x in pair), *d_gates


@branches_at_once_backward.register_fake
def _(
    d_o, o, o_cmp, o_slc, o_swa, lse, ids, made_k_cmp, made_v_cmp, of_rows, of_tokens, is_bad, q,
    k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, g_cmp, g_slc, g_swa, *_,
):  # fmt: skip
    inputs = (q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, g_cmp, g_slc, g_swa)
    return tuple(_like(x, q) for x in inputs)


def _like(x: Tensor | None, q: Tensor) -> Tensor:
    """Room for a gradient of `x`, contiguous; an empty tensor for None."""
    return q.new_empty(0) if x is None else x.new_empty(x.shape)


INPUTS = 10  # tensors with gradients: `q, …, g_swa`


def _save(ctx, inputs, output) -> None:
    tensors, (_, cu_seqlens, *ctx.options) = inputs[:INPUTS], inputs[INPUTS:]
    ctx.set_materialize_grads(False)  # only the sum has a gradient
    ctx.save_for_backward(*output, *tensors, cu_seqlens)


def _run(ctx, d_o: Tensor, *_) -> tuple:
    saved = ctx.saved_tensors
    found = branches_at_once_backward(d_o, *saved, *ctx.options)
    inputs = saved[-1 - INPUTS : -1]
    gradients = (None if x is None else d_x for x, d_x in zip(inputs, found, strict=True))
    return *gradients, None, None, *(None for _ in ctx.options)


branches_at_once.register_autograd(_run, setup_context=_save)
