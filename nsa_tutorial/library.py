"""The operators as PyTorch knows them: `torch.ops.nsa_tutorial.*`. Each has a fake kernel, which
returns shapes and computes nothing, and those that attend have a gradient. So `torch.compile`, meta
tensors and checkpoints take them like PyTorch's own.

An operator here takes checked, flat arguments (`ops` checks them) and the backend's name. Its
implementation locates the query rows, brings lists into one form, and calls the backend's function
from `BACKENDS`, which is imported when it is first needed. The offsets of packed sequences are the
one argument that is checked here, because only a running operator can read them.

Every backend's forward shares one backward, `training.gradients`, in PyTorch: it needs `o` and
`lse` of the forward and nothing else.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from nsa_tutorial.runtime import checks, environment, packed
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.compression import MLPWeights, num_summaries, summary_rows
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL, gated_sum
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows
from nsa_tutorial.training import gradients

BACKENDS = {
    "selected_attention": {
        "reference": "nsa_tutorial.sparse.selected_attention:forward",
        "masked": "nsa_tutorial.sparse.query_tiles:selected_attention",
        "tilelang": "nsa_tutorial.kernels.tilelang_launch:forward",
        "triton": "nsa_tutorial.kernels.triton_launch:forward",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.sparse.sliding_window:forward",
        "tilelang": "nsa_tutorial.kernels.tilelang_launch:sliding_window",
        "triton": "nsa_tutorial.kernels.triton_launch:sliding_window",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.sparse.native_sparse_attention:selection_and_window",
        "tilelang": "nsa_tutorial.kernels.tilelang_launch:selection_and_window",
        "triton": "nsa_tutorial.kernels.triton_launch:selection_and_window",
    },
    "compressed_attention": {
        "reference": "nsa_tutorial.sparse.compression:compressed_attention",
    },
    "select_blocks": {
        "reference": "nsa_tutorial.sparse.block_selection:select_blocks",
    },
}
CHAPTER_OF = {
    ("compressed_attention", "tilelang"): "14, selection_kernels",
    ("compressed_attention", "triton"): "14, selection_kernels",
    ("select_blocks", "tilelang"): "14, selection_kernels",
    ("select_blocks", "triton"): "14, selection_kernels",
}


def choose(operator: str, backend: str, q: Tensor) -> str:
    """Name the backend that runs `operator` on tensors like `q`: `auto` takes Triton for CUDA
    tensors where it has a kernel for their dtype, and the reference otherwise.

    Raises:
        NotImplementedError: naming the chapter with which the backend comes.
        TypeError: for a dtype that no kernel computes.
    """
    available = BACKENDS[operator]
    if backend == "auto":
        is_for_kernels = q.device.type == "cuda" and q.dtype != torch.float64
        backend = "triton" if is_for_kernels and "triton" in available else "reference"
    if backend not in available:
        raise NotImplementedError(
            f"{operator}: there is no {backend} backend yet (it comes with chapter "
            f"{CHAPTER_OF[operator, backend]}): use backend='reference' or 'auto'"
        )
    if backend in ("tilelang", "triton") and q.dtype not in checks.DTYPES:
        raise TypeError(
            f"q: got {checks.describe(q)}, expected float32, float16 or bfloat16 on the {backend} "
            "backend"
        )
    return backend


def nearest(operator: str, backend: str, q: Tensor) -> str:
    """`choose`, with `auto` in place of a backend that the course has not written yet."""
    return choose(operator, backend if backend in BACKENDS[operator] else "auto", q)


def _load(operator: str, backend: str, q: Tensor) -> Callable:
    """The backend's function, or `BackendUnavailable`, where this machine cannot run it."""
    if backend in ("tilelang", "triton"):
        environment.require(backend, q.device.type, str(q.dtype).removeprefix("torch."))
    module, function = BACKENDS[operator][backend].split(":")
    return getattr(importlib.import_module(module), function)


def _rows(q: Tensor, M: int, cu_seqlens: Tensor | None, causal: bool = True) -> QueryRows:
    """Where the query rows stand; before anything runs, the offsets are checked."""
    checks.check_offsets(cu_seqlens, q.shape[1])
    B, N = q.shape[:2]
    return query_rows(B, N, M, causal=causal, cu_seqlens=cu_seqlens, device=q.device)


def _lists(
    q: Tensor, k: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, include_own_block: bool, causal: bool,
) -> tuple[Tensor, QueryRows, int]:  # fmt: skip
    """The lists in the one form that every backend walks, the query rows, and the block size."""
    rows = _rows(q, k.shape[1], cu_seqlens, causal)
    block_size = _at_most_one_block(block_size, k.shape[1])
    ids = block_list(
        block_indices, rows, block_size=block_size, block_counts=block_counts,
        include_own_block=include_own_block,
    )  # fmt: skip
    return ids, rows, block_size


def _at_most_one_block(block_size: int, M: int) -> int:
    """`block_size`; where all `M` keys lie in block 0 anyway, the least power of two that holds
    them, 16 at least: few sizes, few kernels."""
    return min(block_size, max(16, 1 << max(M - 1, 0).bit_length()))


def _empty(q: Tensor, v: Tensor, *branches: int) -> tuple[Tensor, Tensor]:
    """Room for `o` and `lse`: what a fake kernel returns, and all that there is without queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = v.new_empty(*branches, *q.shape[:3], v.shape[3])
    return o, q.new_empty(*branches, *q.shape[:3], dtype=wide)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


# -- selected attention --


@custom_op("nsa_tutorial::selected_attention", mutates_args=())
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, include_own_block: bool, causal: bool,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_attention`: `o [B, N, HQ, DV]` and `lse [B, N, HQ]`."""
    function = _load("selected_attention", backend, q)
    ids, rows, block_size = _lists(
        q, k, block_indices, block_counts, cu_seqlens, block_size, include_own_block, causal
    )
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, ids, rows, block_size=block_size, scale=scale)


@custom_op("nsa_tutorial::selected_attention_backward", mutates_args=())
def selected_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, include_own_block: bool, causal: bool,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`."""
    if q.numel() == 0:
        return _empty_gradients(q, k, v)
    ids, rows, block_size = _lists(
        q, k, block_indices, block_counts, cu_seqlens, block_size, include_own_block, causal
    )
    saved = (d_o, d_lse, q, k, v, o, lse)
    if backend == "masked":
        return gradients.of_masked_lists(*saved, ids, rows, block_size=block_size, scale=scale)
    return gradients.of_lists(*saved, ids, rows, block_size=block_size, scale=scale)[:3]


# -- sliding window --


@custom_op("nsa_tutorial::sliding_window_attention", mutates_args=())
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window_size: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.sliding_window_attention`: `o` and `lse`."""
    function = _load("sliding_window_attention", backend, q)
    rows = _rows(q, k.shape[1], cu_seqlens)
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, rows, window_size=window_size, scale=scale)


@custom_op("nsa_tutorial::sliding_window_attention_backward", mutates_args=())
def sliding_window_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window_size: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`."""
    if q.numel() == 0:
        return _empty_gradients(q, k, v)
    rows = _rows(q, k.shape[1], cu_seqlens)
    saved = (d_o, d_lse, q, k, v, o, lse)
    return gradients.of_windows(*saved, rows, window_size=window_size, scale=scale)


# -- lists and windows at once --


@custom_op("nsa_tutorial::selected_and_window_attention", mutates_args=())
def selected_and_window_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, window_size: int, block_size: int, include_own_block: bool,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.selected_and_window_attention`: `o [2, B, N, HQ, DV]` and `lse [2, B, N, HQ]`, of the
    lists, then of the windows."""
    function = _load("selected_and_window_attention", backend, q)
    ids, rows, block_size = _lists(
        q, k, block_indices, block_counts, cu_seqlens, block_size, include_own_block, True
    )
    if q.numel() == 0:
        return _empty(q, v, 2)
    return function(
        q, k, v, ids, rows, block_size=block_size, window_size=window_size, scale=scale
    )  # fmt: skip


@custom_op("nsa_tutorial::selected_and_window_attention_backward", mutates_args=())
def selected_and_window_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, window_size: int, block_size: int, include_own_block: bool,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`, through both outputs."""
    of_list, of_window = zip(d_o, d_lse, o, lse, strict=True)
    by_list = selected_attention_backward(
        *of_list, q, k, v, block_indices, block_counts, cu_seqlens, block_size, include_own_block,
        True, scale, backend,
    )  # fmt: skip
    by_window = sliding_window_attention_backward(
        *of_window, q, k, v, cu_seqlens, window_size, scale, backend
    )  # fmt: skip
    d_q, d_k, d_v = (a + b for a, b in zip(by_list, by_window, strict=True))
    return d_q, d_k, d_v


# -- summaries --


@custom_op("nsa_tutorial::compressed_attention", mutates_args=())
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, num_keys: int, length: int,
    stride: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.compressed_attention` to summaries `k [B, M_c, H, D]` and `v`: `o` and `lse`."""
    function = _load("compressed_attention", backend, q)
    _, rows = _summary_rows(q, k, cu_seqlens, num_keys, length, stride)
    if q.numel() == 0:
        return _empty(q, v)
    return function(q, k, v, rows, scale=scale)


@custom_op("nsa_tutorial::compressed_attention_backward", mutates_args=())
def compressed_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, num_keys: int, length: int,
    stride: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`."""
    if q.numel() == 0:
        return _empty_gradients(q, k, v)
    _, rows = _summary_rows(q, k, cu_seqlens, num_keys, length, stride)
    return gradients.of_summaries(d_o, d_lse, q, k, v, o, lse, rows, scale=scale)


def _summary_rows(
    q: Tensor, k_cmp: Tensor, cu_seqlens: Tensor | None, M: int, length: int, stride: int
) -> tuple[QueryRows, QueryRows]:
    """The query rows among the keys, and among the summaries, of which there must be as many as the
    keys have."""
    rows = _rows(q, M, cu_seqlens)
    sequences = [M] if cu_seqlens is None else packed.offsets(cu_seqlens).lengths
    expected = sum(num_summaries(n, length, stride) for n in sequences)
    if k_cmp.shape[1] != expected:
        raise ValueError(
            f"k_cmp: got {k_cmp.shape[1]} summaries, expected {expected}: those of {M} keys "
            f"(num_keys) with length {length} and stride {stride}"
        )
    return rows, summary_rows(rows, M, length=length, stride=stride, cu_seqlens=cu_seqlens)


@custom_op("nsa_tutorial::select_blocks", mutates_args=())
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, block_counts: Tensor | None,
    cu_seqlens: Tensor | None, num_keys: int, top_n: int, block_size: int, length: int,
    stride: int, num_initial: int, num_local: int, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.select_blocks`: int32 `[B, N, H, top_n]`."""
    function = _load("select_blocks", backend, q)
    rows, summaries = _summary_rows(q, k_cmp, cu_seqlens, num_keys, length, stride)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:2], k_cmp.shape[2], top_n, dtype=torch.int32)
    return function(
        q, k_cmp, lse, rows, summaries,
        M=num_keys, top_n=top_n, block_size=_at_most_one_block(block_size, num_keys),
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


# -- the four that attend: their gradients, and fake kernels --


def _differentiable(operator, backward, num_tensors: int) -> None:
    """Make `backward` the gradient of `operator(q, k, v, *lists, *options)`, and give it a fake
    kernel. The first `num_tensors` arguments are tensors or None."""

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*output, *inputs[:num_tensors])
        ctx.options = inputs[num_tensors:]

    def run(ctx, d_o: Tensor, d_lse: Tensor) -> tuple:
        of_qkv = backward(d_o, d_lse, *ctx.saved_tensors, *ctx.options)
        return *of_qkv, *[None] * (num_tensors - 3 + len(ctx.options))

    def fake_backward(d_o, d_lse, o, lse, q, k, v, *_):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    operator.register_autograd(run, setup_context=save)
    backward.register_fake(fake_backward)


for _operator, _backward, _num_tensors in (
    (selected_attention, selected_attention_backward, 6),
    (sliding_window_attention, sliding_window_attention_backward, 4),
    (selected_and_window_attention, selected_and_window_attention_backward, 6),
    (compressed_attention, compressed_attention_backward, 4),
):
    _differentiable(_operator, _backward, _num_tensors)
for _operator in (selected_attention, sliding_window_attention, compressed_attention):
    _operator.register_fake(lambda q, k, v, *_: _empty(q, v))
selected_and_window_attention.register_fake(lambda q, k, v, *_: _empty(q, v, 2))


# -- compositions: PyTorch derives the fake kernel and the gradient from what they call --


def compress(
    x: Tensor, weights: list[Tensor], cu_seqlens: Tensor | None, kind: str, length: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """`ops.compress`, with the weights of `kind` in a list."""
    M = x.shape[1]
    if cu_seqlens is None:
        first = compression.first_tokens(M, length, stride, None, x.device)
    else:
        first = first_tokens(cu_seqlens, M, length, stride)
    weight = MLPWeights(*weights) if kind == "mlp" else weights[0] if weights else None
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
    attending = choose("selected_attention", backend, q)
    o_cmp = o_slc = o_swa = None

    # -- compression --
    if g_cmp is not None:
        scoring = nearest("compressed_attention", backend, q)
        sizes = (length, stride, scale, scoring)
        o_cmp, lse = compressed_attention(q, *compressed, cu_seqlens, num_keys, *sizes)

    # -- selection --
    if g_slc is not None and block_indices is None:
        scoring = nearest("select_blocks", backend, q)
        sizes = (top_n, block_size, length, stride, NUM_INITIAL, NUM_LOCAL, scale, scoring)
        scores = (q.detach(), compressed[0].detach(), lse.detach())
        block_indices = select_blocks(*scores, block_counts, cu_seqlens, num_keys, *sizes)
        block_counts = None
    lists = (block_indices, block_counts, cu_seqlens)
    if g_slc is not None and g_swa is not None and not window and attending != "reference":
        options = (window_size, block_size, False, scale, attending)
        o_slc, o_swa = selected_and_window_attention(q, *selected, *lists, *options)[0]
    elif g_slc is not None:
        # in place of the reference that mirrors the kernels, the fast one under a mask
        by = "masked" if attending == "reference" else attending
        o_slc, _ = selected_attention(q, *selected, *lists, block_size, False, True, scale, by)

    # -- window --
    if g_swa is not None and o_swa is None:
        k, v = window or selected
        o_swa, _ = sliding_window_attention(q, k, v, cu_seqlens, window_size, scale, attending)
    return gated_sum((g_cmp, g_slc, g_swa), (o_cmp, o_slc, o_swa))


_LIBRARY = torch.library.Library("nsa_tutorial", "FRAGMENT")
for _composition in (compress, native_sparse_attention):
    _schema = torch.library.infer_schema(_composition, mutates_args=())
    _LIBRARY.define(_composition.__name__ + _schema)
    _LIBRARY.impl(_composition.__name__, _composition, "CompositeImplicitAutograd")
