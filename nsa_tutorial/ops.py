"""The public operators: they check their arguments, choose a backend, and give every backend the
same inputs.

A backend is a function behind an operator: `reference` is PyTorch, differentiable, on any device;
`tilelang` and `triton` are the kernels, on CUDA tensors, and on CPU tensors through TileLang's C
target and Triton's interpreter. `auto` takes Triton for CUDA tensors where the kernel exists
(`backends.OPERATORS`) and no gradient is asked for, and the reference otherwise.

Wrong arguments raise `ValueError` or `TypeError`, naming the argument, what came and what was
expected, before anything runs; a backend that cannot run these tensors on this machine raises
`BackendUnavailable`, one that the course has not written yet `NotImplementedError`, naming its
chapter.
"""

from __future__ import annotations

import importlib
from functools import partial

import torch
from torch import Tensor

from nsa_tutorial.runtime import backends, checks
from nsa_tutorial.sparse import compression
from nsa_tutorial.sparse.compression import MLPWeights, summary_rows
from nsa_tutorial.sparse.selected_attention import block_list, query_rows


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 64,
    block_counts: Tensor | int | None = None,
    include_own_block: bool = False,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the keys of a short list of blocks (the selection branch of NSA,
    arXiv 2502.11089, section 3.3.2).

    Args:
        q: queries `[B, N, HQ, D]`, fp32, fp16 or bf16 (fp64 on the reference backend); the last `N`
            of the `M` positions.
        k, v: keys `[B, M, H, D]` and values `[B, M, H, DV]`; `HQ` is a multiple of `H`, widths are
            at most 256.
        block_indices: `[B, N, H, S]` int32 or int64, block ids (token offset = id × `block_size`),
            the same for all query heads of a group. An id that is negative, in the query's future
            or past the end is an empty slot. The same block twice in a row counts twice:
            `check_block_indices` finds it.
        block_size: tokens per block.
        block_counts: only the first so many slots of a row are read: an int, or `[B, N, H]`; None
            reads all.
        include_own_block: also attend to the query's own block, unless a slot lists it.
        scale: factor on the scores, positive; None is `D ** -0.5`.
        causal: a query sees no key after its own position.
        cu_seqlens: `[num_sequences + 1]` int32 offsets of packed sequences (`B == 1`, `N == M`);
            blocks count from each sequence's own start. To check them, the host waits for the
            device, once for a tensor.
        return_lse: also return the log-sum-exp of the scaled, visible scores.
        backend: `"auto"`, `"reference"`, `"tilelang"` or `"triton"`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, or `(o, lse)` with `lse [B, N, HQ]` fp32, natural
            logarithm. A query that sees no
        key gets output 0 and `lse = -inf`. NaN and infinity in a query or in a key that it sees
            spoil its `o` and `lse`, as IEEE
        arithmetic has it; in a value that it sees, its `o` alone; in what is hidden, nothing.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected, before anything
            runs.
        BackendUnavailable: one sentence, where the backend cannot run these tensors on this
            machine.
        NotImplementedError: on `backward` through a kernel backend, which has no backward yet.
    """
    checks.check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    checks.check_bool("causal", causal)
    checks.check_bool("return_lse", return_lse)
    checks.check_cu_seqlens(cu_seqlens, q, k)
    scale = checks.check_scale(scale, q.shape[-1])
    name, function = backends.load("selected_attention", backend, q)

    (B, N), M = q.shape[:2], k.shape[1]
    block_size = _at_most_one_block(block_size, M)
    rows = query_rows(B, N, M, causal=causal, cu_seqlens=cu_seqlens, device=q.device)
    ids = block_list(
        block_indices,
        rows,
        block_size=block_size,
        block_counts=block_counts,
        include_own_block=include_own_block,
    )
    if q.numel() == 0:  # no query: nothing to launch
        o, lse = _empty(q, v)
    elif name == "reference":
        o, lse = function(q, k, v, ids, rows, block_size=block_size, scale=scale)
    else:
        launch = partial(function, ids=ids, rows=rows, block_size=block_size, scale=scale)
        o, lse = backends.KernelForward.apply(q, k, v, "selected_attention", name, launch)
    return (o, lse) if return_lse else o


def check_block_indices(
    block_indices: Tensor,
    M: int,
    *,
    block_size: int = 64,
    block_counts: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Find what no operator looks for while it runs: a block listed twice in a row, or an id past
    the last block. For tests.

    Args:
        block_indices, block_size, block_counts, cu_seqlens: as for `selected_attention`.
        M: number of key positions.

    Raises:
        ValueError: naming the first row `[b, n, h]` at fault and what it lists.
    """
    checks.check_tensor("block_indices", block_indices, "[B, N, H, S]", (torch.int32, torch.int64))
    B, N = block_indices.shape[:2]
    rows = query_rows(B, N, M, causal=False, cu_seqlens=cu_seqlens, device=block_indices.device)
    ids = block_list(
        block_indices,
        rows,
        block_size=block_size,
        block_counts=block_counts,
        include_own_block=False,
    )
    blocks = -(-rows.num_visible // block_size)[:, None, None]
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for fault, what in (
        (ids >= blocks, "an id past the last block"),
        (ids < -1, "a negative id that is not -1"),
        (twice, "a block twice"),
    ):
        if fault.any():
            r, h = (int(i) for i in fault.any(-1).nonzero()[0])
            raise ValueError(
                f"block_indices: got {what} in row {[r // N, r % N, h]}, {ids[r, h].tolist()}, "
                f"expected distinct ids below {int(blocks[r])}, or -1"
            )


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the latest keys (the window branch of NSA, arXiv 2502.11089,
    section 3.3.3).

    Args:
        q, k, v, scale, cu_seqlens, return_lse, backend: as for `selected_attention`.
        window_size: a query at position `t` sees the keys `t - window_size + 1 … t`, none of them
            before its sequence's start.

    Returns:
        As `selected_attention`.
    """
    checks.check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_positive_int("window_size", window_size)
    checks.check_bool("return_lse", return_lse)
    checks.check_cu_seqlens(cu_seqlens, q, k)
    scale = checks.check_scale(scale, q.shape[-1])
    name, function = backends.load("sliding_window_attention", backend, q)

    if q.numel() == 0:
        o, lse = _empty(q, v)
    else:
        rows = query_rows(
            q.shape[0], q.shape[1], k.shape[1], causal=True, cu_seqlens=cu_seqlens, device=q.device
        )
        launch = partial(function, rows=rows, window_size=window_size, scale=scale)
        if name == "reference":
            o, lse = launch(q, k, v)
        else:
            o, lse = backends.KernelForward.apply(q, k, v, "sliding_window_attention", name, launch)
    return (o, lse) if return_lse else o


def selected_and_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    window_size: int,
    block_size: int = 64,
    block_counts: Tensor | int | None = None,
    include_own_block: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """`selected_attention` and `sliding_window_attention` over the same queries, keys and values;
    in Triton, one launch.

    The two outputs stay apart, for gates of their own; both branches are causal.

    Args:
        q, k, v, block_indices, block_size, block_counts, include_own_block, scale, cu_seqlens,
            return_lse, backend: as for `selected_attention`.
        window_size: as for `sliding_window_attention`; exactly so many keys, whatever the block
            size.

    Returns:
        `(o_selected, o_window)`, or `(o_selected, lse_selected, o_window, lse_window)`.
    """
    checks.check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_positive_int("window_size", window_size)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    checks.check_bool("return_lse", return_lse)
    checks.check_cu_seqlens(cu_seqlens, q, k)
    scale = checks.check_scale(scale, q.shape[-1])
    operator = "selected_and_window_attention"
    name, function = backends.load(operator, backend, q)

    if q.numel() == 0:
        found = _empty(q, v) * 2
    else:
        block_size = _at_most_one_block(block_size, k.shape[1])
        rows = query_rows(
            q.shape[0], q.shape[1], k.shape[1], causal=True, cu_seqlens=cu_seqlens, device=q.device
        )
        ids = block_list(
            block_indices,
            rows,
            block_size=block_size,
            block_counts=block_counts,
            include_own_block=include_own_block,
        )
        launch = partial(
            function,
            ids=ids,
            rows=rows,
            block_size=block_size,
            window_size=window_size,
            scale=scale,
        )
        found = (
            launch(q, k, v)
            if name == "reference"
            else backends.KernelForward.apply(q, k, v, operator, name, launch)
        )
    return found if return_lse else found[::2]


def compress(
    x: Tensor,
    *,
    kind: str = "mean",
    length: int = 32,
    stride: int = 16,
    weight: Tensor | MLPWeights | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Summarise keys or values (NSA, arXiv 2502.11089, Eq. 7): `compression.compress`, with its
    arguments checked.

    Summary `j` of a sequence is made of its tokens `j * stride … j * stride + length - 1`.
    `x [B, M, H, D]` gives `[B, M_c, H, D]` with `M_c = (M - length) // stride + 1`, or 0 for fewer
    tokens than `length`; with `cu_seqlens`, the sequences' summaries follow each other.
    """
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    checks.check_compression(kind, weight, x, length)
    checks.check_cu_seqlens(cu_seqlens, x, x, name="x")
    return compression.compress(
        x, kind=kind, length=length, stride=stride, weight=weight, cu_seqlens=cu_seqlens
    )


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    length: int = 32,
    stride: int = 16,
    scale: float | None = None,
    num_keys: int | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the summaries of what came before it (the compression branch of
    NSA, section 3.3.1).

    Args:
        q, scale, cu_seqlens, return_lse, backend: as for `selected_attention`.
        k_cmp, v_cmp: summaries `[B, M_c, H, D]` and `[B, M_c, H, DV]`, as `compress` makes them of
            all `M` keys and values.
        length, stride: with which they were made. A summary is visible to a query once its last
            token is at or before the query's own.
        num_keys: `M`; None is `N`, as many keys as queries. Summaries do not tell it, and queries
            are the last `N` of `M` positions.

    Returns:
        As `selected_attention`; a query that sees no summary gets output 0 and `lse = -inf`.
    """
    checks.check_backend(backend)
    M = checks.check_summaries(
        q, k_cmp, v_cmp, num_keys=num_keys, length=length, stride=stride, cu_seqlens=cu_seqlens
    )
    checks.check_bool("return_lse", return_lse)
    scale = checks.check_scale(scale, q.shape[-1])
    _, function = backends.load("compressed_attention", backend, q)

    if q.numel() == 0:
        o, lse = _empty(q, v_cmp)
    else:
        rows = query_rows(
            q.shape[0], q.shape[1], M, causal=True, cu_seqlens=cu_seqlens, device=q.device
        )
        rows = summary_rows(rows, M, length=length, stride=stride, cu_seqlens=cu_seqlens)
        o, lse = function(q, k_cmp, v_cmp, rows, scale=scale)
    return (o, lse) if return_lse else o


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None = None,
    *,
    top_n: int = 16,
    block_size: int = 64,
    length: int = 32,
    stride: int = 16,
    num_initial: int = 1,
    num_local: int = 2,
    scale: float | None = None,
    num_keys: int | None = None,
    block_counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose the blocks that each query attends to, by its attention to the summaries (NSA, section
    3.3.2, Eq. 8 to 12).

    Args:
        q, k_cmp, length, stride, scale, num_keys, cu_seqlens, backend: as for
            `compressed_attention`.
        lse: `[B, N, HQ]`, what `compressed_attention` returned for the same arguments, to spare
            computing it again.
        top_n: how many blocks a list holds.
        block_size: tokens per block.
        num_initial, num_local: how many of the first and of the latest causal blocks, the query's
            own included, are always taken.
        block_counts: `[B, N, H]`, how many blocks each row keeps of those that are chosen, the
            forced ones first, then the most important ones; None keeps all.

    Returns:
        `[B, N, H, top_n]` int32, one list for all query heads of a group: distinct ids, ascending,
            none in the query's future, -1
        where there are fewer. The importance of a block is the softmax mass of every visible
            summary, times the pieces of
        `stride` tokens that it has in the block; ties go to the lower id. There is no gradient.
    """
    checks.check_backend(backend)
    M = checks.check_summaries(
        q, k_cmp, k_cmp, num_keys=num_keys, length=length, stride=stride, cu_seqlens=cu_seqlens
    )
    for name, x, least in (
        ("top_n", top_n, 1),
        ("block_size", block_size, 1),
        ("num_initial", num_initial, 0),
        ("num_local", num_local, 0),
    ):
        checks.check_positive_int(name, x, least=least)
    if num_initial + num_local > top_n:
        raise ValueError(
            f"top_n: got {top_n}, expected at least num_initial + num_local = "
            f"{num_initial + num_local}"
        )
    if lse is not None:
        checks.check_per_head("lse", lse, q)
    if block_counts is not None:
        checks.check_tensor("block_counts", block_counts, "[B, N, H]", (torch.int32, torch.int64))
        checks.check_block_counts(block_counts, q, k_cmp)
    scale = checks.check_scale(scale, q.shape[-1])
    _, function = backends.load("select_blocks", backend, q)

    (B, N), H = q.shape[:2], k_cmp.shape[2]
    if q.numel() == 0:
        return torch.full((B, N, H, top_n), -1, dtype=torch.int32, device=q.device)
    rows = query_rows(B, N, M, causal=True, cu_seqlens=cu_seqlens, device=q.device)
    summaries = summary_rows(rows, M, length=length, stride=stride, cu_seqlens=cu_seqlens)
    return function(
        q, k_cmp, lse, rows, summaries,
        M=M, top_n=top_n, block_size=_at_most_one_block(block_size, M), length=length,
        stride=stride,
        num_initial=num_initial, num_local=num_local, scale=scale, block_counts=block_counts,
    )  # fmt: skip


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    *,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int | None = 16,
    block_size: int = 64,
    window_size: int = 512,
    length: int = 32,
    stride: int = 16,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native Sparse Attention (arXiv 2502.11089, Eq. 5):
    `g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa`, summaries being means.

    Args:
        q, k, v, scale, cu_seqlens: as for `selected_attention`.
        g_cmp, g_slc, g_swa: gates `[B, N, HQ]` of compression, selection and window, used as given.
            None leaves the branch out.
        block_indices: `[B, N, H, S]`, as for `selected_attention`; None chooses the blocks by
            attention to the summaries, which takes `g_cmp`.
        block_counts: with `block_indices`, as for `selected_attention`; without, the number of
            blocks to choose, at least 3, because the first causal block and the two latest are
            always among them. For a tensor `[B, N, H]`, each row keeps so many, those three first;
            to know the largest, the host waits for the device.
        block_size, window_size, length, stride: of the branches.
        backend: of selected attention and the window, which share a launch in Triton. Compression
            and the choice of blocks have no kernels yet (chapter 14) and run on the reference, tile
            by tile of queries.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`. On the reference differentiable in `q`, `k`, `v` and
            the gates.
    """
    checks.check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_gates(q, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    for name, x in (
        ("block_size", block_size),
        ("window_size", window_size),
        ("length", length),
        ("stride", stride),
    ):
        checks.check_positive_int(name, x)
    if block_indices is not None:
        checks.check_block_arguments(block_indices, block_counts, q, k)
    elif g_slc is not None and g_cmp is None:
        raise ValueError(
            "block_indices: got None, expected [B, N, H, S]: without g_cmp there is nothing to "
            "choose blocks by"
        )
    elif g_slc is not None and block_counts is None:
        raise TypeError(
            "block_counts: got None, expected an int of at least 3, or [B, N, H]: how many "
            "blocks to choose"
        )
    elif g_slc is not None:
        checks.check_block_counts(block_counts, q, k, least=3)
    checks.check_cu_seqlens(cu_seqlens, q, k)
    scale = checks.check_scale(scale, q.shape[-1])

    # it calls the operators of this module, so that it cannot be imported before them
    nsa = importlib.import_module("nsa_tutorial.sparse.native_sparse_attention")
    summaries = (
        []
        if g_cmp is None
        else [compress(x, length=length, stride=stride, cu_seqlens=cu_seqlens) for x in (k, v)]
    )
    return nsa.forward(
        q, summaries, (k, v), (k, v), (g_cmp, g_slc, g_swa),
        block_indices=block_indices, block_counts=block_counts, block_size=block_size,
        window_size=window_size,
        length=length, stride=stride, scale=scale, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def _at_most_one_block(block_size: int, M: int) -> int:
    """`block_size`, or where all `M` keys lie in block 0 anyway the least power of two that holds
    them: few sizes, few kernels."""
    return min(block_size, max(16, 1 << max(M - 1, 0).bit_length()))


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of no query at all."""
    return v.new_zeros(*q.shape[:3], v.shape[3]), v.new_zeros(q.shape[:3], dtype=torch.float32)
