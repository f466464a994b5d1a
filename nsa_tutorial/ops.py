"""The public operators: they check their arguments and hand them to PyTorch's dispatcher.

Each is a custom operator of PyTorch's, `torch.ops.nsa_tutorial.*`, which `library` defines:
`torch.compile` takes a model that uses them in one graph, with a length that may change; they run
on meta tensors, under activation checkpoints and deterministic algorithms, and `torch.autocast`
casts queries, keys and values to its dtype. A second derivative does not exist and raises.

A backend is a function behind an operator: `reference` is PyTorch, on any device; `tilelang` and
`triton` are the kernels, on CUDA tensors, and on CPU tensors through TileLang's C target and
Triton's interpreter. `auto` takes Triton for CUDA tensors, and the reference
otherwise. `backends.BACKWARDS` says who computes its
gradients.

Wrong arguments raise `ValueError` or `TypeError`, naming the argument, what came and what was
expected, before anything runs, and while `torch.compile` traces; a backend that cannot run these
tensors on this machine raises `BackendUnavailable`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial import backends, library
from nsa_tutorial.runtime import checks
from nsa_tutorial.sparse.compression import KINDS, MLPWeights, num_summaries
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
    slot_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    order: str = "auto",
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
        slot_scale: `[B, N, H, S]` fp32 (fp64 for fp64 queries), a factor on the scaled scores of a
            slot's keys, for all query heads of a group; None is ones, and the own block that is
            added has factor 1. Its gradient at ones, `sum(ds * s)` over the slot's keys and the
            group's heads, is the gradient of the selection: with `slot_scale = 1 + p - p.detach()`
            the scores `p` that chose the blocks learn what the blocks were worth.
        scale: factor on the scores, positive; None is `D ** -0.5`.
        causal: a query sees no key after its own position.
        cu_seqlens: `[num_sequences + 1]` int32 offsets of packed sequences (`B == 1`, `N == M`);
            blocks count from each sequence's own start. To check them, the host waits for the
            device, once for a tensor.
        return_lse: also return the log-sum-exp of the scaled, visible scores.
        backend: `"auto"`, `"reference"`, `"tilelang"` or `"triton"`.
        order: how the Triton backend walks the lists, forward and backward: `"queries"`, a program
            for each query; `"tiles"`, one for a few neighbours and the union of their lists;
            `"blocks"`, one for each block and those who list it; `"auto"`, by the shapes, and by
            how much neighbours share. The sums are the same. With `slot_scale` it is always
            `"queries"`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, or `(o, lse)` with `lse [B, N, HQ]` fp32, natural
        logarithm. A query that sees no key gets output 0 and `lse = -inf`. NaN and infinity in a
        query or in a key that it sees spoil its `o` and `lse`, as IEEE arithmetic has it; in a
        value that it sees, its `o` alone; in what is hidden, nothing.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected, before anything
            runs.
        BackendUnavailable: one sentence, where the backend cannot run these tensors on this
            machine.
    """
    q, k, v = _autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_slot_scale(slot_scale, block_indices, q)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    checks.check_bool("causal", causal)
    lists = _read_slots(block_indices, block_counts, slot_scale)
    walked = backends.in_order(backend, order)
    options = (block_size, include_own_block, causal, scale, walked)
    o, lse = library.selected_attention(q, k, v, *lists, cu_seqlens, *options)
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
    q, k, v = _autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    checks.check_positive_int("window_size", window_size)
    options = (window_size, scale, backend)
    o, lse = library.sliding_window_attention(q, k, v, cu_seqlens, *options)
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
    slot_scale: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """`selected_attention` and `sliding_window_attention` over the same queries, keys and values;
    kernels write both to one tensor.

    The two outputs stay apart, for gates of their own; both branches are causal.

    Args:
        q, k, v, block_indices, block_size, block_counts, include_own_block, slot_scale, scale,
            cu_seqlens, return_lse, backend: as for `selected_attention`; `slot_scale` leaves the
            window alone.
        window_size: as for `sliding_window_attention`; exactly so many keys, whatever the block
            size.

    Returns:
        `(o_selected, o_window)`, or `(o_selected, lse_selected, o_window, lse_window)`.
    """
    q, k, v = _autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_slot_scale(slot_scale, block_indices, q)
    checks.check_positive_int("window_size", window_size)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    lists = _read_slots(block_indices, block_counts, slot_scale)
    options = (window_size, block_size, include_own_block, scale, backend)
    o, lse = library.selected_and_window_attention(q, k, v, *lists, cu_seqlens, *options)
    (o_slc, o_swa), (lse_slc, lse_swa) = o.unbind(), lse.unbind()
    return (o_slc, lse_slc, o_swa, lse_swa) if return_lse else (o_slc, o_swa)


def compress(
    x: Tensor,
    *,
    kind: str = "mean",
    length: int = 32,
    stride: int = 16,
    weight: Tensor | MLPWeights | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Summarise keys or values (NSA, arXiv 2502.11089, Eq. 7): `compression.compress`, with its
    arguments checked.

    `backend` chooses who computes means, as for `selected_attention`. The kinds with weights are
    matmuls of PyTorch's on every backend. On CUDA, they multiply half precision in its own dtype.

    Summary `j` of a sequence is made of its tokens `j * stride … j * stride + length - 1`.
    `x [B, M, H, D]` gives `[B, M_c, H, D]` with `M_c = (M - length) // stride + 1`, or 0 for fewer
    tokens than `length`; with `cu_seqlens`, the sequences' summaries follow each other.
    """
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    weights = _check_weight(kind, weight, x, length)
    checks.check_cu_seqlens(cu_seqlens, x, x, name="x")
    checks.check_backend(backend)
    if kind == "mean":
        backend = backends.choose(backend, x, name="x")
    compress = torch.ops.nsa_tutorial.compress
    return compress(x, weights, cu_seqlens, kind, length, stride, backend)


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
    q, k_cmp, v_cmp = _autocast(q, k_cmp, v_cmp)
    M = _check_summaries(q, k_cmp, v_cmp, num_keys, length, stride, cu_seqlens)
    backend, scale = _check_rest(backend, q, scale, return_lse)
    options = (M, length, stride, scale, backend)
    o, lse = library.compressed_attention(q, k_cmp, v_cmp, cu_seqlens, *options)
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
        none in the query's future, -1 where there are fewer. The importance of a block is the
        softmax mass of every visible summary, times the pieces of `stride` tokens that it has in
        the block; ties go to the lower id. There is no gradient.
    """
    q, k_cmp = _autocast(q, k_cmp)
    M = _check_summaries(q, k_cmp, k_cmp, num_keys, length, stride, cu_seqlens)
    checks.check_positive_int("top_n", top_n)
    checks.check_positive_int("block_size", block_size)
    checks.check_positive_int("num_initial", num_initial, least=0)
    checks.check_positive_int("num_local", num_local, least=0)
    if num_initial + num_local > top_n:
        raise ValueError(
            f"top_n: got {top_n}, expected at least num_initial + num_local = "
            f"{num_initial + num_local}"
        )
    if lse is not None:
        checks.check_per_head("lse", lse, q)
    if block_counts is not None:
        checks.check_tensor("block_counts", block_counts, "[B, N, H]", checks.INTEGERS)
        checks.check_block_counts(block_counts, q, k_cmp)
    backend, scale = _check_rest(backend, q, scale, False)
    scores = (q.detach(), k_cmp.detach(), None if lse is None else lse.detach())
    options = (M, top_n, block_size, length, stride, num_initial, num_local, scale, backend)
    return library.select_blocks(*scores, block_counts, cu_seqlens, *options)


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
        backend: of every part: means, attention to them, the choice of blocks, selected attention
            and the window, and the gated sum. Selection and window share a call on the kernels.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, differentiable in `q`, `k`, `v` and the gates.
    """
    q, k, v = _autocast(q, k, v)
    gates, summaries = (g_cmp, g_slc, g_swa), []
    _, scale = _check(backend, q, k, v, scale, cu_seqlens, False)
    sizes = (block_size, window_size, length, stride)
    lists = _check_branches(q, k, gates, block_indices, block_counts, k.shape[1], *sizes)
    if g_cmp is not None:
        pooling = backends.choose(backend, k)
        summary = {"length": length, "stride": stride, "cu_seqlens": cu_seqlens, "backend": pooling}
        summaries = [compress(k, **summary), compress(v, **summary)]
    run = torch.ops.nsa_tutorial.native_sparse_attention
    return run(q, summaries, [k, v], [], *gates, *lists, cu_seqlens, *sizes, scale, backend)


def three_branches(
    q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor], window: Sequence[Tensor],
    gates: Sequence[Tensor | None], *, num_keys: int, block_indices: Tensor | None = None,
    block_counts: Tensor | int | None = 16, block_size: int = 64, window_size: int = 512,
    length: int = 32, stride: int = 16, scale: float | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """`native_sparse_attention` over keys and values that the branches may have of their own.

    Args:
        q: `[B, N, HQ, D]`.
        compressed: summary keys and values `[B, M_c, H, D]`, `[B, M_c, H, DV]`, made with `length`
            and `stride`; none without that branch.
        selected, window: keys and values `[B, M, H, D]`, `[B, M, H, DV]` of these branches; without
            any, the window has those of the selection, and kernels take both in one call.
        gates: of compression, selection and window, each `[B, N, HQ]` or None.
        num_keys: `M`.
        block_indices, …, backend: as for `native_sparse_attention`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of the values.
    """
    checks.check_backend(backend)
    scale = checks.check_scale(scale, q.shape[-1])
    sizes = (block_size, window_size, length, stride)
    keys = (selected or window or compressed)[0]
    lists = _check_branches(q, keys, gates, block_indices, block_counts, num_keys, *sizes)
    pairs = (list(compressed), list(selected), list(window))
    run = torch.ops.nsa_tutorial.native_sparse_attention
    return run(q, *pairs, *gates, *lists, cu_seqlens, *sizes, scale, backend)


# -- what the operators check before anything runs --


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values in the dtype of `torch.autocast`, where it is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    is_cast = [isinstance(x, Tensor) and x.dtype in checks.DTYPES for x in tensors]
    return [x.to(dtype) if cast else x for x, cast in zip(tensors, is_cast, strict=True)]


def _check(
    backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None,
    cu_seqlens: Tensor | None, return_lse: bool,
) -> tuple[str, float]:  # fmt: skip
    """What all operators over keys and values ask of them; the backend that runs, and the scale."""
    checks.check_qkv(q, k, v)
    checks.check_cu_seqlens(cu_seqlens, q, k)
    return _check_rest(backend, q, scale, return_lse)


def _check_rest(
    backend: str, q: Tensor, scale: float | None, return_lse: bool
) -> tuple[str, float]:
    """What all operators with queries ask; the backend that runs, and the scale."""
    checks.check_backend(backend)
    checks.check_bool("return_lse", return_lse)
    return backends.choose(backend, q), checks.check_scale(scale, q.shape[-1])


def _read_slots(
    block_indices: Tensor, block_counts: Tensor | int | None, slot_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Lists, how many slots of each row are read, and the slots' factors: an int is a cut through
    all of them."""
    if not isinstance(block_counts, int):
        return block_indices, block_counts, slot_scale
    cut = max(block_counts, 1)
    block_indices = block_indices[..., :cut]
    if block_counts == 0:
        block_indices = torch.full_like(block_indices, -1)
    return block_indices, None, None if slot_scale is None else slot_scale[..., :cut]


def _check_branches(
    q: Tensor, k: Tensor, gates: Sequence[Tensor | None], block_indices: Tensor | None,
    block_counts: Tensor | int | None, M: int, block_size: int, window_size: int, length: int,
    stride: int,
) -> tuple[Tensor | None, Tensor | None, int, int]:  # fmt: skip
    """The gates, the lists and the sizes of the three branches; the lists, their counts, `M`, and
    how many blocks are to be chosen."""
    g_cmp, g_slc, g_swa = gates
    checks.check_gates(q, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    checks.check_positive_int("block_size", block_size)
    checks.check_positive_int("window_size", window_size)
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    if block_indices is not None:
        checks.check_block_arguments(block_indices, block_counts, q, k)
        return *_read_slots(block_indices, block_counts)[:2], M, 0
    if g_slc is None:
        return None, None, M, 0
    return None, *_number_to_choose(q, k, g_cmp, block_counts, M, block_size)


def _number_to_choose(
    q: Tensor, k: Tensor, g_cmp: Tensor | None, block_counts: Tensor | int | None, M: int,
    block_size: int,
) -> tuple[Tensor | None, int, int]:  # fmt: skip
    """The counts of each row, if there are any, `M`, and the length of the lists: past the last
    block they would hold nothing but -1."""
    if g_cmp is None:
        raise ValueError(
            "block_indices: got None, expected [B, N, H, S]: without g_cmp there is nothing to "
            "choose blocks by"
        )
    if block_counts is None:
        raise TypeError(
            "block_counts: got None, expected an int of at least 3, or [B, N, H]: how many blocks "
            "to choose"
        )
    checks.check_block_counts(block_counts, q, k, least=3)
    of_rows = block_counts if isinstance(block_counts, Tensor) else None
    if of_rows is not None:
        block_counts = int(of_rows.max()) if of_rows.numel() else 0
    return of_rows, M, max(3, min(block_counts, -(-M // block_size)))


def _check_summaries(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, num_keys: int | None, length: int, stride: int,
    cu_seqlens: Tensor | None,
) -> int:  # fmt: skip
    """Queries fit the summaries, of which there are as many as the keys have (of packed sequences,
    `library` counts them); returns the number of keys, `M`."""
    checks.check_attention(q, k_cmp=(k_cmp, "[B, M_c, H, D]"), v_cmp=(v_cmp, "[B, M_c, H, DV]"))
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    checks.check_cu_seqlens(cu_seqlens, q, q)
    N = M = q.shape[1]
    if num_keys is not None:
        checks.check_positive_int("num_keys", num_keys, least=N)
        M = num_keys
    if cu_seqlens is not None:
        if M != N:
            raise ValueError(
                f"num_keys: got {M}, expected the number of queries, {N}, for packed sequences"
            )
        return M
    expected = num_summaries(M, length, stride)
    if k_cmp.shape[1] != expected:
        raise ValueError(
            f"k_cmp: got {k_cmp.shape[1]} summaries, expected {expected}: those of {M} keys "
            f"(num_keys) with length {length} and stride {stride}"
        )
    return M


def _check_weight(kind: object, weight: object, x: Tensor, length: int) -> list[Tensor]:
    """`x [B, M, H, D]` can be summarised, and `weight` is what `kind` needs; as a list."""
    checks.check_tensor("x", x, "[B, M, H, D]", checks.FLOATS)
    if kind not in KINDS:
        raise ValueError(f"kind: got {checks.describe(kind)}, expected one of {', '.join(KINDS)}")
    H, D = x.shape[2:]
    flat = length * D
    if kind == "mean":
        if weight is not None:
            raise ValueError(
                f"weight: got {checks.describe(weight)}, expected None for kind 'mean'"
            )
        return []
    if kind != "mlp":
        shapes = {"weighted": ((length,), (length, H)), "linear": ((flat, D), (H, flat, D))}[kind]
        checks.check_weight("weight", weight, x, *shapes)
        return [weight]
    if not isinstance(weight, MLPWeights):
        raise TypeError(
            f"weight: got {checks.describe(weight)}, expected an MLPWeights for kind 'mlp'"
        )
    hidden = weight.w1.shape[-1] if isinstance(weight.w1, Tensor) and weight.w1.ndim else 0
    shapes = ((length, D), (flat, hidden), (hidden,), (hidden, D), (D,))
    for name, w, shape in zip(MLPWeights._fields, weight, shapes, strict=True):
        checks.check_weight(f"weight.{name}", w, x, shape, (H, *shape))
    return list(weight)
