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


@operator("nsa_tutorial::branches_at_once")
@on_its_device
@with_new_strides
def branches_at_once(
    q: Tensor, compressed: list[Tensor], selected: list[Tensor], window: list[Tensor],
    gates: list[Tensor], block_counts: Tensor | None, cu_seqlens: Tensor | None, num_keys: int,
    top_n: int, block_size: int, window_size: int, length: int, stride: int, scale: float,
    nonnegative_gates: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """`ops.native_sparse_attention` with three gates, choosing its blocks, on the Triton backend.

    Args:
        compressed, selected, window: keys and values of each branch; without `compressed`,
            summaries are means of `selected`, and without `window`, it has those of `selected`.
        nonnegative_gates: for the backward alone.

    Returns:
        The gated sum; and for the backward: the three outputs `[B, N, HQ, DV]`, their `lse
        [3, B, N, HQ]`, the lists `[B, N, H, top_n]`, the summaries, empty if they were given, and
        where rows and tokens stand (`kernels.triton.rows`), `[5, B * N]` and `[2, B * M]` int32,
        the latter empty for packed sequences; and `[1]` int32, whether a key or a value is not
        finite (`kernels.triton.native.Outputs`).
    """
    function = backends.load(BACKENDS, "branches_at_once", "triton", q)
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
        q, compressed, selected, window, gates, block_counts, rows, num_keys=num_keys,
        choice=choice, window_size=window_size, scale=scale,
    )  # fmt: skip
    ids, slots = found.ids, choice["top_n"]
    ids = ids if slots == top_n else F.pad(ids, (0, top_n - slots), value=-1)
    summaries = [q.new_empty(0), q.new_empty(0)] if compressed else found.summaries
    places = (found.of_rows, found.of_tokens)
    return found.o, *found.branches, found.lse, ids, *summaries, *places, found.is_bad


@branches_at_once.register_fake
def _(
    q, compressed, selected, window, gates, block_counts, cu_seqlens, num_keys, top_n, block_size,
    window_size, length, stride, scale, nonnegative_gates,
):  # fmt: skip
    return _empty(q, compressed, selected, cu_seqlens, num_keys, top_n, length, stride)


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
    d_o: Tensor, outputs: list[Tensor], q: Tensor, compressed: list[Tensor],
    selected: list[Tensor], window: list[Tensor], gates: list[Tensor], cu_seqlens: Tensor | None,
    num_keys: int, top_n: int, block_size: int, window_size: int, length: int, stride: int,
    scale: float, nonnegative_gates: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `q`, then of `compressed`, `selected`, `window` and `gates`, one after the
    other; `outputs` is what `branches_at_once` returned."""
    function = backends.load(BACKWARDS, "branches_at_once", "triton", q)
    inputs = [q, *compressed, *selected, *window, *gates]
    if q.numel() == 0:
        return [x.new_zeros(x.shape) for x in inputs]
    sizes = (num_keys, top_n, block_size, window_size, length, stride)
    choice, window_size = _sizes(*sizes)
    o, *branches, lse, ids, k_cmp, v_cmp, of_rows, of_tokens, is_bad = outputs
    found = (o, branches, lse, ids, compressed or [k_cmp, v_cmp], of_rows, of_tokens, is_bad)
    given = (q, compressed, selected, window, gates)
    num_sequences = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    options = {"choice": choice, "window_size": window_size, "scale": scale}
    options["nonnegative_gates"] = nonnegative_gates
    d_q, *others = function(d_o, found, *given, num_sequences=num_sequences, **options)
    return [d_q, *(x for gradients in others for x in gradients)]


@branches_at_once_backward.register_fake
def _(d_o, outputs, q, compressed, selected, window, gates, *_):
    return [x.new_empty(x.shape) for x in (q, *compressed, *selected, *window, *gates)]


def _save(ctx, inputs, output) -> None:
    q, compressed, selected, window, gates, _, cu_seqlens, *ctx.options = inputs
    ctx.set_materialize_grads(False)  # only the sum has a gradient
    lists = (compressed, selected, window, gates)
    ctx.counts = [len(x) for x in lists]
    ctx.save_for_backward(q, *(x for xs in lists for x in xs), cu_seqlens, *output)


def _run(ctx, d_o: Tensor, *_) -> tuple:
    q, *rest = ctx.saved_tensors
    lists = []
    for count in ctx.counts:
        lists.append(rest[:count])
        rest = rest[count:]
    cu_seqlens, *outputs = rest
    found = branches_at_once_backward(d_o, outputs, q, *lists, cu_seqlens, *ctx.options)
    d_q, gradients = found[0], found[1:]
    d_lists = []
    for count in ctx.counts:
        d_lists.append(gradients[:count])
        gradients = gradients[count:]
    return d_q, *d_lists, None, None, *(None for _ in ctx.options)


branches_at_once.register_autograd(_run, setup_context=_save)
