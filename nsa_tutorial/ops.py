"""The public operators: they check their arguments and hand them to PyTorch's dispatcher.

Each is a custom operator of PyTorch's, `torch.ops.nsa_tutorial.*`, which `library` defines:
`torch.compile` takes a model that uses them in one graph, with a length that may change; they run
on meta tensors, under activation checkpoints and deterministic algorithms, and `torch.autocast`
casts queries, keys and values to its dtype. A second derivative does not exist and raises.

A backend is a function behind an operator: `reference` is PyTorch, on any device; `tilelang` and
`triton` are the kernels, on CUDA tensors, and on CPU tensors through TileLang's C target and
Triton's interpreter. `auto` takes Triton for CUDA tensors, and the reference
otherwise. `backends.BACKWARDS` says who computes its
gradients. `torch.func.grad`, `vjp` and `vmap` take the operators, too; forward-mode AD raises.

Wrong arguments raise `ValueError` or `TypeError`, naming the argument, what came and what was
expected, before anything runs, and while `torch.compile` traces; a backend that cannot run these
tensors on this machine raises `BackendUnavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nsa_tutorial import compositions, library
from nsa_tutorial.library_backward import call
from nsa_tutorial.ops_decoding import decode_attention as decode_attention
from nsa_tutorial.ops_indexing import index_blocks as index_blocks
from nsa_tutorial.ops_indexing import index_loss as index_loss
from nsa_tutorial.runtime import checks, packed
from nsa_tutorial.runtime.devices import autocast
from nsa_tutorial.runtime.transforms import check_no_tangent, is_transformed
from nsa_tutorial.sparse.block_selection import POOLS
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
        block_size: tokens per block; 1 makes lists of tokens. Of blocks of 1, 2, 4 and 8, kernels
            gather the tokens of several slots at a time; in half precision, they then add up the
            gradients of keys and values in an order that differs from run to run, unless PyTorch is
            told to be deterministic.
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
            how much neighbours share. The sums are the same. Lists with `slot_scale` are walked by
            `"queries"` whatever is asked for. Other backends have `"auto"` alone.

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
    q, k, v = autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_slot_scale(slot_scale, block_indices, q)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    checks.check_bool("causal", causal)
    lists = _read_slots(block_indices, block_counts, slot_scale)
    checks.check_order(order, backend)
    check_no_tangent("selected_attention", q=q, k=k, v=v, slot_scale=slot_scale)
    options = (block_size, include_own_block, causal, scale, backend, order)
    o, lse = call(library.selected_attention, q, k, v, *lists, cu_seqlens, *options)
    return (o, lse) if return_lse else o


def check_block_indices(
    block_indices: Tensor,
    M: int,
    *,
    block_size: int = 64,
    block_counts: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Find what the operators do not check: a block listed twice in one row, or an id past the last
    block. For tests.

    Args:
        block_indices, block_size, block_counts, cu_seqlens: as for `selected_attention`.
        M: number of key positions.

    Raises:
        ValueError: naming the first row `[b, n, h]` at fault and what it lists.
        ValueError, TypeError: for a wrong argument, as the operators do.
    """
    checks.check_tensor("block_indices", block_indices, "[B, N, H, S]", checks.INTEGERS)
    if block_indices.is_meta:
        got = checks.describe(block_indices)
        raise ValueError(f"block_indices: got {got}, expected a device with values to look at")
    checks.check_slots(block_indices)
    B, N, H = block_indices.shape[:3]
    checks.check_positive_int("M", M, least=N)
    checks.check_positive_int("block_size", block_size)
    checks.check_block_counts(block_counts, block_indices, H, name="block_indices")
    checks.check_cu_seqlens(cu_seqlens, block_indices, M, name="block_indices")
    packed.check_offsets(cu_seqlens, N)
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
            before its sequence's start; any positive int, `sys.maxsize` for all of them.

    Returns:
        As `selected_attention`.
    """
    q, k, v = autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    window_size = checks.check_window_size(window_size)
    check_no_tangent("sliding_window_attention", q=q, k=k, v=v)
    options = (window_size, scale, backend)
    o, lse = call(library.sliding_window_attention, q, k, v, cu_seqlens, *options)
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
    order: str = "auto",
) -> tuple[Tensor, ...]:
    """`selected_attention` and `sliding_window_attention` over the same queries, keys and values;
    kernels write both to one tensor.

    The two outputs stay apart, for gates of their own; both branches are causal.

    Args:
        q, k, v, block_indices, block_size, block_counts, include_own_block, slot_scale, scale,
            cu_seqlens, return_lse, backend, order: as for `selected_attention`; `slot_scale` leaves
            the window alone, and so does `order`.
        window_size: as for `sliding_window_attention`; exactly so many keys, whatever the block
            size.

    Returns:
        `(o_selected, o_window)`, or `(o_selected, lse_selected, o_window, lse_window)`.
    """
    q, k, v = autocast(q, k, v)
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, return_lse)
    checks.check_block_arguments(block_indices, block_counts, q, k)
    checks.check_slot_scale(slot_scale, block_indices, q)
    window_size = checks.check_window_size(window_size)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_own_block", include_own_block)
    lists = _read_slots(block_indices, block_counts, slot_scale)
    checks.check_order(order, backend)
    check_no_tangent("selected_and_window_attention", q=q, k=k, v=v, slot_scale=slot_scale)
    arguments = (q, k, v, *lists, cu_seqlens)
    if order == "auto":
        options = (window_size, block_size, include_own_block, scale, backend)
        o, lse = call(library.selected_and_window_attention, *arguments, *options)
        (o_slc, o_swa), (lse_slc, lse_swa) = o.unbind(), lse.unbind()
    else:
        options = (block_size, include_own_block, True, scale, backend, order)
        o_slc, lse_slc = call(library.selected_attention, *arguments, *options)
        options = (q, k, v, cu_seqlens, window_size, scale, backend)
        o_swa, lse_swa = call(library.sliding_window_attention, *options)
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
    checks.check_cu_seqlens(cu_seqlens, x, x.shape[1], name="x")
    if cu_seqlens is not None and cu_seqlens.is_meta:
        raise ValueError(
            f"cu_seqlens: got {checks.describe(cu_seqlens)}, expected a device with values: how "
            "many summaries there are follows from them"
        )
    checks.check_backend(backend)
    if kind == "mean":
        backend = checks.choose_backend(backend, x, name="x")
    check_no_tangent("compress", x=x, weight=weight)
    run = compositions.compress if is_transformed() else torch.ops.nsa_tutorial.compress
    return run(x, weights, cu_seqlens, kind, length, stride, backend)


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
    q, k_cmp, v_cmp = autocast(q, k_cmp, v_cmp)
    M = _check_summaries(q, k_cmp, v_cmp, num_keys, length, stride, cu_seqlens)
    backend, scale = _check_rest(backend, q, scale, return_lse)
    check_no_tangent("compressed_attention", q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    options = (M, length, stride, scale, backend)
    o, lse = call(library.compressed_attention, q, k_cmp, v_cmp, cu_seqlens, *options)
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
    block_counts: Tensor | int | None = None,
    pool: str = "sum",
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
        block_counts: an int or `[B, N, H]`, how many blocks each row keeps of those that are
            chosen, the forced ones first, then the most important ones; None keeps all.
        pool: `"sum"` adds up the attention to a block's summaries (Eq. 9), `"max"` takes the most
            that one of them gets, as MSA does with tokens (`length` and `stride` of 1; arXiv
            2606.13392). A mean hides a needle in a block of hay, and a maximum finds it.

    Returns:
        `[B, N, H, top_n]` int32, one list for all query heads of a group: distinct ids, ascending,
        none in the query's future, -1 where there are fewer. The importance of a block is the
        softmax mass of every visible summary, times the pieces of `stride` tokens that it has in
        the block, added up; or the largest mass, summed over the group, of a summary that has
        tokens in it. Ties go to the lower id. There is no gradient.
    """
    q, k_cmp = autocast(q, k_cmp)
    M = _check_summaries(q, k_cmp, k_cmp, num_keys, length, stride, cu_seqlens)
    checks.check_positive_int("top_n", top_n)
    checks.check_positive_int("block_size", block_size)
    checks.check_positive_int("num_initial", num_initial, least=0)
    checks.check_positive_int("num_local", num_local, least=0)
    checks.check_one_of("pool", pool, POOLS)
    if num_initial + num_local > top_n:
        raise ValueError(
            f"top_n: got {top_n}, expected at least num_initial + num_local = "
            f"{num_initial + num_local}"
        )
    if lse is not None:
        checks.check_per_head("lse", lse, q)
    H, wide = k_cmp.shape[2], torch.promote_types(q.dtype, torch.float32)
    checks.check_block_counts(block_counts, q, H)
    if isinstance(block_counts, int):
        block_counts = q.new_full((*q.shape[:2], H), block_counts, dtype=torch.int32)
    backend, scale = _check_rest(backend, q, scale, False)
    check_no_tangent("select_blocks", q=q, k_cmp=k_cmp, lse=lse)
    scores = (q.detach(), k_cmp.detach(), None if lse is None else lse.detach().to(wide))
    options = (M, top_n, block_size, length, stride, num_initial, num_local, scale, backend, pool)
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
    slot_scale: Tensor | None = None,
    learn_choice: bool = False,
    nonnegative_gates: bool = False,
    block_size: int = 64,
    window_size: int = 512,
    length: int = 32,
    stride: int = 16,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    order: str = "auto",
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
        slot_scale: with `block_indices`, as for `selected_attention`.
        learn_choice: where the blocks are chosen, let the loss reach the scores that chose them. A
            chosen block's share `p` of the attention to the summaries (of all blocks together, 1;
            the mean over a group's heads) becomes the factor `1 + p - p.detach()` on its keys'
            scores: the output stays the same, and `q` and the summaries get the gradient of the
            selection. It costs about `top_n * (block_size + length) / stride` more scores per
            query and head, in plain PyTorch, and lists are walked in the order `"queries"`.
        nonnegative_gates: promise that no gate is below 0, as after a sigmoid. Where Triton takes
            all parts in one call, the backward then folds the gates into the weights, and makes no
            gradient of each branch's output; a gate below 0 would make gradients NaN.
        block_size, window_size, length, stride: of the branches.
        backend: of every part: means, attention to them, the choice of blocks, selected attention
            and the window, and the gated sum. On the kernels, selection and window share a call; on
            Triton, all parts do where there are three gates and the blocks are chosen.
        order: of the selection, as for `selected_attention`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of `v`, differentiable in `q`, `k`, `v` and the gates.
    """
    q, k, v = autocast(q, k, v)
    gates, summaries = (g_cmp, g_slc, g_swa), []
    backend, scale = _check(backend, q, k, v, scale, cu_seqlens, False)
    checks.check_order(order, backend)
    sizes = _check_sizes(block_size, window_size, length, stride)
    lists = (block_indices, block_counts, slot_scale)
    checks.check_bool("nonnegative_gates", nonnegative_gates)
    lists = _check_branches(q, k, gates, *lists, learn_choice, k.shape[1], block_size)
    check_no_tangent(
        "native_sparse_attention", q=q, k=k, v=v, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa,
        slot_scale=slot_scale,
    )  # fmt: skip
    are_chosen = block_indices is None and not learn_choice and cu_seqlens is None
    are_gated = all(g is not None for g in gates)  # `None not in gates` would compare numbers
    at_once = are_gated and are_chosen and compositions.takes_all_at_once(backend, order)
    if g_cmp is not None and not at_once:  # all at once makes them itself
        summary = {"length": length, "stride": stride, "cu_seqlens": cu_seqlens, "backend": backend}
        summaries = [compress(k, **summary), compress(v, **summary)]
    rest = (*lists, cu_seqlens, *sizes, scale, backend, order, learn_choice, nonnegative_gates)
    return _attend_and_gate()(q, summaries, [k, v], [], *gates, *rest)


def three_branches(
    q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor], window: Sequence[Tensor],
    gates: Sequence[Tensor | None], *, num_keys: int, block_indices: Tensor | None = None,
    block_counts: Tensor | int | None = 16, slot_scale: Tensor | None = None,
    learn_choice: bool = False, nonnegative_gates: bool = False, block_size: int = 64,
    window_size: int = 512, length: int = 32, stride: int = 16, scale: float | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto", order: str = "auto",
) -> Tensor:  # fmt: skip
    """`native_sparse_attention` over keys and values that the branches may have of their own.

    Args:
        q: `[B, N, HQ, D]`.
        compressed: summary keys and values `[B, M_c, H, D]`, `[B, M_c, H, DV]`, made with `length`
            and `stride`; `()` without that branch.
        selected, window: keys and values `[B, M, H, D]`, `[B, M, H, DV]` of these branches; with
            `()`, the window has those of the selection, and kernels take both in one call. All
            branches have as many heads and the same widths.
        gates: of compression, selection and window, each `[B, N, HQ]` or None. A branch without a
            gate needs no keys.
        num_keys: `M`.
        block_indices, …, order: as for `native_sparse_attention`.

    Returns:
        `o [B, N, HQ, DV]` in the dtype of the values.
    """
    pairs = {"compressed": compressed, "selected": selected, "window": window}
    for name, pair in pairs.items():
        _check_length(name, pair, (0, 2), "keys and values, or () without this branch")
    _check_length("gates", gates, (3,), "three: of compression, selection and window")
    cast = list(autocast(q, *compressed, *selected, *window))
    q = cast.pop(0)
    pairs = {name: [cast.pop(0) for _ in pair] for name, pair in pairs.items()}
    keys = _check_pairs(q, pairs, gates, num_keys, length, stride, cu_seqlens)
    backend, scale = _check_rest(backend, q, scale, False)
    checks.check_order(order, backend)
    sizes = _check_sizes(block_size, window_size, length, stride)
    lists = (block_indices, block_counts, slot_scale)
    checks.check_bool("nonnegative_gates", nonnegative_gates)
    lists = _check_branches(q, keys, gates, *lists, learn_choice, num_keys, block_size)
    check_no_tangent("three_branches", q=q, **pairs, gates=gates, slot_scale=slot_scale)
    rest = (*lists, cu_seqlens, *sizes, scale, backend, order, learn_choice, nonnegative_gates)
    return _attend_and_gate()(q, *pairs.values(), *gates, *rest)


def _attend_and_gate() -> Callable[..., Tensor]:
    """The composite operator for all branches or, inside a `torch.func` transform, its function."""
    function = compositions.native_sparse_attention
    return function if is_transformed() else torch.ops.nsa_tutorial.native_sparse_attention


# -- what the operators check before anything runs --


def _check(
    backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None,
    cu_seqlens: Tensor | None, return_lse: bool,
) -> tuple[str, float]:  # fmt: skip
    """The checks that all operators over keys and values share. Returns the backend and the
    scale."""
    checks.check_qkv(q, k, v)
    checks.check_cu_seqlens(cu_seqlens, q, k.shape[1])
    return _check_rest(backend, q, scale, return_lse)


def _check_rest(
    backend: str, q: Tensor, scale: float | None, return_lse: bool
) -> tuple[str, float]:
    """The checks that all operators with queries share. Returns the backend and the scale."""
    checks.check_backend(backend)
    checks.check_bool("return_lse", return_lse)
    return checks.choose_backend(backend, q), checks.check_scale(scale, q.shape[-1])


def _read_slots(
    block_indices: Tensor, block_counts: Tensor | int | None, slot_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Lists, slots read per row, and slot factors. An int count cuts lists and factors."""
    if not isinstance(block_counts, int):
        return block_indices, block_counts, slot_scale
    cut = max(block_counts, 1)
    block_indices = block_indices[..., :cut]
    if block_counts == 0:
        block_indices = torch.full_like(block_indices, -1)
    return block_indices, None, None if slot_scale is None else slot_scale[..., :cut]


def _check_sizes(
    block_size: int, window_size: int, length: int, stride: int
) -> tuple[int, int, int, int]:
    """The sizes of the three branches, in int32."""
    checks.check_positive_int("block_size", block_size)
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    return block_size, checks.check_window_size(window_size), length, stride


def _check_length(name: str, x: object, lengths: tuple[int, ...], expected: str) -> None:
    """`x` is a tuple or a list of one of these lengths."""
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{name}: got {checks.describe(x)}, expected a tuple of {expected}")
    if len(x) not in lengths:
        got = f"a {type(x).__name__} of {len(x)}"
        raise ValueError(f"{name}: got {got}, expected a tuple of {expected}")


def _check_pairs(
    q: Tensor, pairs: Mapping[str, Sequence[Tensor]], gates: Sequence[Tensor | None], num_keys: int,
    length: int, stride: int, cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """Check that each branch's keys and values fit the queries and each other, and that each gated
    branch has some. Returns one branch's keys."""
    checks.check_tensor("q", q, "[B, N, HQ, D]", checks.FLOATS)
    given = {name: pair for name, pair in pairs.items() if pair}
    for (name, pair), gate in zip(pairs.items(), gates, strict=True):
        if gate is not None and not (pair or (name == "window" and pairs["selected"])):
            raise ValueError(f"{name}: got none, expected keys and values, because it has a gate")
    if not given:
        raise ValueError(f"{', '.join(pairs)}: got none, expected keys and values of a branch")
    for name, (k, v) in given.items():
        are_packed = name == "compressed" and cu_seqlens is not None
        keys_and_values = {f"{name}[0]": (k, "[B, M, H, D]"), f"{name}[1]": (v, "[B, M, H, DV]")}
        checks.check_attention(q, are_packed, **keys_and_values)
    first, (keys, values) = next(iter(given.items()))
    for name, (k, v) in given.items():
        if k.shape[2] != keys.shape[2]:
            raise ValueError(
                f"{name}[0]: got {checks.describe(k)}, expected the heads of {first}[0], "
                f"{keys.shape[2]}"
            )
        if v.shape[3] != values.shape[3]:
            raise ValueError(
                f"{name}[1]: got {checks.describe(v)}, expected the width of {first}[1], "
                f"{values.shape[3]}"
            )
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    M = _check_num_keys(q, num_keys, cu_seqlens)
    if "compressed" in given:
        _check_count("compressed[0]", given["compressed"][0], M, length, stride, cu_seqlens)
    for name, (k, _) in given.items():
        if name != "compressed" and k.shape[1] != M:
            raise ValueError(f"{name}[0]: got {k.shape[1]} keys, expected num_keys, {M}")
    return keys


def _check_branches(
    q: Tensor, k: Tensor, gates: Sequence[Tensor | None], block_indices: Tensor | None,
    block_counts: Tensor | int | None, slot_scale: Tensor | None, learn_choice: bool, M: int,
    block_size: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, int]:  # fmt: skip
    """Check gates and lists. Returns the lists, their counts and factors, `M`, and how many blocks
    to choose."""
    g_cmp, g_slc, g_swa = gates
    checks.check_gates(q, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    checks.check_bool("learn_choice", learn_choice)
    is_chosen = block_indices is None and g_slc is not None
    if learn_choice and not is_chosen:
        raise ValueError(
            "learn_choice: got True, expected False: without g_slc, or with block_indices, no "
            "blocks are chosen"
        )
    if block_indices is not None:
        checks.check_block_arguments(block_indices, block_counts, q, k)
        checks.check_slot_scale(slot_scale, block_indices, q)
        return *_read_slots(block_indices, block_counts, slot_scale), M, 0
    if slot_scale is not None:
        raise ValueError(
            f"slot_scale: got {checks.describe(slot_scale)}, expected None without block_indices: "
            "there are no slots yet; learn_choice=True lets the choice learn"
        )
    if not is_chosen:
        checks.check_block_counts(block_counts, q, k.shape[2])
        return None, None, None, M, 0
    return None, *_number_to_choose(q, k, g_cmp, block_counts, M, block_size)


def _number_to_choose(
    q: Tensor, k: Tensor, g_cmp: Tensor | None, block_counts: Tensor | int | None, M: int,
    block_size: int,
) -> tuple[Tensor | None, None, int, int]:  # fmt: skip
    """The counts per row (or None), no factors, `M`, and the length of the lists: no longer than
    the number of blocks, since any further slot would be -1."""
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
    checks.check_block_counts(block_counts, q, k.shape[2], least=3)
    of_rows = block_counts if isinstance(block_counts, Tensor) else None
    if of_rows is not None:
        block_counts = int(of_rows.max()) if of_rows.numel() else 0
    return of_rows, None, M, max(3, min(block_counts, -(-M // block_size)))


def _check_summaries(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, num_keys: int | None, length: int, stride: int,
    cu_seqlens: Tensor | None,
) -> int:  # fmt: skip
    """Check that queries fit the summaries, and that their number is what the keys give (`library`
    counts those of packed sequences). Returns the number of keys, `M`."""
    summaries = {"k_cmp": (k_cmp, "[B, M_c, H, D]"), "v_cmp": (v_cmp, "[B, M_c, H, DV]")}
    checks.check_attention(q, cu_seqlens is not None, **summaries)
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    M = _check_num_keys(q, q.shape[1] if num_keys is None else num_keys, cu_seqlens)
    _check_count("k_cmp", k_cmp, M, length, stride, cu_seqlens)
    return M


def _check_num_keys(q: Tensor, num_keys: int, cu_seqlens: Tensor | None) -> int:
    """Check that there are at least as many keys as queries, and no more if they are packed.
    Returns their number."""
    N = q.shape[1]
    checks.check_cu_seqlens(cu_seqlens, q, N)
    checks.check_positive_int("num_keys", num_keys, least=N)
    if cu_seqlens is not None and num_keys != N:
        raise ValueError(
            f"num_keys: got {num_keys}, expected the number of queries, {N}, for packed sequences"
        )
    return num_keys


def _check_count(
    name: str, k_cmp: Tensor, M: int, length: int, stride: int, cu_seqlens: Tensor | None
) -> None:
    """Check that there are as many summaries as `M` keys give; `library` counts those of packed
    sequences."""
    expected = num_summaries(M, length, stride)
    if cu_seqlens is None and k_cmp.shape[1] != expected:
        raise ValueError(
            f"{name}: got {k_cmp.shape[1]} summaries, expected {expected}: those of {M} keys "
            f"(num_keys) with length {length} and stride {stride}"
        )


def _check_weight(kind: object, weight: object, x: Tensor, length: int) -> list[Tensor]:
    """`x [B, M, H, D]` can be summarised, and `weight` is what `kind` needs; as a list."""
    checks.check_tensor("x", x, "[B, M, H, D]", checks.FLOATS)
    checks.check_one_of("kind", kind, KINDS)
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
