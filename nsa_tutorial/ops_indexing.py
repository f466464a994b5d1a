"""The operators of an indexer, with their arguments checked: `ops.index_blocks`, and
`ops.index_loss`, by which it learns."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial import library_choice
from nsa_tutorial.runtime import checks, packed
from nsa_tutorial.runtime.describing import describe
from nsa_tutorial.runtime.devices import autocast, on_its_device
from nsa_tutorial.runtime.transforms import check_no_tangent
from nsa_tutorial.sparse import indexer


def index_blocks(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None = None,
    *,
    top_n: int = 16,
    block_size: int = 128,
    num_initial: int = 0,
    num_local: int = 1,
    kv_heads: int = 1,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose the blocks that each query attends to by an indexer: by the best score among a block's
    visible tokens (MSA, arXiv 2606.13392), or, with `block_size=1`, the tokens themselves (DSA,
    arXiv 2512.02556).

    The score of token `s` for query `t` is `Σ_j w[t, j] · relu(q_idx[t, j] · k_idx[s])` over the
    heads of a list with weights, and `Σ_j q_idx[t, j] · k_idx[s]` without. Scores are fp32; those
    whose bits differ in the last place alone may count as equal on the kernels.

    Args:
        q_idx: queries of the indexer `[B, N, HI, DI]`, fp32, fp16 or bf16 (fp64 on the reference
            backend); the last `N` of the `M` positions. `DI` is at most 256.
        k_idx: its keys `[B, M, DI]`, one for all heads, in the dtype of `q_idx`.
        w: weights of its heads `[B, N, HI]`, any float dtype; None takes plain products.
        top_n: how many blocks a list holds.
        block_size: tokens per block.
        num_initial, num_local: how many of the first and of the latest causal blocks, the query's
            own included, are always taken. MSA takes 0 and 1, DSA 0 and 0.
        kv_heads: lists for each query, one for each key/value head of the attention or one for all;
            each has the next `HI / kv_heads` heads of the indexer.
        cu_seqlens, backend: as for `selected_attention`.

    Returns:
        `[B, N, kv_heads, top_n]` int32, as `select_blocks` returns it: distinct ids, ascending,
        none in the query's future, -1 where there are fewer. Ties go to the lower id; a score that
        is NaN is the least of all. There is no gradient: `index_loss` trains an indexer.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected, before anything
            runs.
        BackendUnavailable: one sentence, where the backend cannot run these tensors on this
            machine.
    """
    q_idx, k_idx = autocast(q_idx, k_idx)
    _check_indexer(q_idx, k_idx, w, kv_heads)
    checks.check_cu_seqlens(cu_seqlens, q_idx, k_idx.shape[1], name="q_idx")
    checks.check_positive_int("top_n", top_n)
    checks.check_positive_int("block_size", block_size)
    checks.check_positive_int("num_initial", num_initial, least=0)
    checks.check_positive_int("num_local", num_local, least=0)
    if num_initial + num_local > top_n:
        raise ValueError(
            f"top_n: got {top_n}, expected at least num_initial + num_local = "
            f"{num_initial + num_local}"
        )
    checks.check_backend(backend)
    backend = checks.choose_backend(backend, q_idx, name="q_idx")
    check_no_tangent("index_blocks", q_idx=q_idx, k_idx=k_idx, w=w)
    if w is not None:
        w = w.detach().to(torch.promote_types(q_idx.dtype, torch.float32))
    options = (kv_heads, top_n, block_size, num_initial, num_local, backend)
    return library_choice.index_blocks(q_idx.detach(), k_idx.detach(), w, cu_seqlens, *options)


def index_loss(
    q: Tensor,
    k: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None = None,
    *,
    kv_heads: int = 1,
    block_indices: Tensor | None = None,
    block_size: int = 1,
    scale: float | None = None,
    index_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """How far an indexer is from the attention that it is to foresee (DSA, arXiv 2512.02556, Eq. 3
    and 4): the divergence `KL(attention ‖ softmax(score))` over the tokens that a query sees, its
    mean over queries and lists. In PyTorch, a tile of queries at a time. Under autocast, inputs are
    rounded to its dtype, and scores are fp32.

    Args:
        q, k: queries and keys of the attention, `[B, N, HQ, D]` and `[B, M, H, D]`, which get no
            gradient; `H` is a multiple of `kv_heads`, and a list's target is the mean of its heads.
        q_idx, k_idx, w, kv_heads: as for `index_blocks`.
        block_indices: `[B, N, kv_heads, S]`, as `index_blocks` makes them: only tokens of these
            blocks count (the sparse stage). None counts all causal tokens (the warm-up).
        block_size: tokens of a listed block.
        scale: factor on the scores of the attention; None is `D ** -0.5`.
        index_scale: factor on the indexer's products; None is `DI ** -0.5`.
        cu_seqlens: as for `selected_attention`.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), differentiable in `q_idx`, `k_idx` and `w`. A query
        that sees nothing adds 0.

    Raises:
        ValueError, TypeError: as `index_blocks`.
    """
    shape = "[B, M, H, D]"
    q, k, q_idx, k_idx = autocast(q, k, q_idx, k_idx)
    checks.check_attention(q, k=(k, shape), v=(k, shape))
    _check_indexer(q_idx, k_idx, w, kv_heads)
    checks.check_same_device(q=q, q_idx=q_idx)
    if q_idx.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q_idx: got {describe(q_idx)}, expected the batch and positions of q, "
            f"{list(q.shape[:2])}"
        )
    if k_idx.shape[1] != k.shape[1]:
        raise ValueError(f"k_idx: got {describe(k_idx)}, expected the positions of k, {k.shape[1]}")
    if k.shape[2] % kv_heads:
        raise ValueError(f"k: got {k.shape[2]} heads for {kv_heads} lists, expected a multiple")
    checks.check_positive_int("block_size", block_size)
    if block_indices is not None:
        checks.check_block_arguments(block_indices, None, q, k[:, :, :kv_heads])
    scale = checks.check_scale(scale, q.shape[3])
    if index_scale is not None:
        checks.check_positive_number("index_scale", index_scale, otherwise=" or None")
    checks.check_cu_seqlens(cu_seqlens, q, k.shape[1])
    packed.check_offsets(cu_seqlens, q.shape[1])
    check_no_tangent("index_loss", q=q, k=k, q_idx=q_idx, k_idx=k_idx, w=w)
    sizes = {"kv_heads": kv_heads, "block_indices": block_indices, "block_size": block_size}
    scales = {"scale": scale, "index_scale": index_scale, "cu_seqlens": cu_seqlens}
    return on_its_device(indexer.kl_loss)(q, k, q_idx, k_idx, w, **sizes, **scales)


def _check_indexer(q_idx: Tensor, k_idx: Tensor, w: Tensor | None, kv_heads: int) -> None:
    """`q_idx [B, N, HI, DI]`, `k_idx [B, M, DI]` and `w [B, N, HI]` fit together, and the heads
    fall into `kv_heads` lists."""
    checks.check_tensor("q_idx", q_idx, "[B, N, HI, DI]", checks.FLOATS)
    checks.check_tensor("k_idx", k_idx, "[B, M, DI]", checks.FLOATS)
    (B, N, HI, DI), M = q_idx.shape, k_idx.shape[1]
    if k_idx.dtype != q_idx.dtype:
        dtype = str(q_idx.dtype).removeprefix("torch.")
        raise TypeError(f"k_idx: got {describe(k_idx)}, expected the dtype of q_idx, {dtype}")
    checks.check_same_device(q_idx=q_idx, k_idx=k_idx)
    if k_idx.shape[0] != B:
        raise ValueError(f"k_idx: got {describe(k_idx)}, expected the batch of q_idx, {B}")
    if k_idx.shape[2] != DI:
        raise ValueError(f"k_idx: got {describe(k_idx)}, expected the width of q_idx, {DI}")
    if not 1 <= DI <= checks.LARGEST_WIDTH:
        raise ValueError(f"q_idx and k_idx: got width {DI}, expected 1 to {checks.LARGEST_WIDTH}")
    if N > M:
        raise ValueError(
            f"q_idx: got {N} queries for {M} keys, expected at most {M}: queries are the last "
            "positions"
        )
    checks.check_positive_int("kv_heads", kv_heads)
    if HI == 0 or HI % kv_heads:
        raise ValueError(f"q_idx: got {HI} heads for {kv_heads} lists, expected a multiple")
    if w is not None:
        checks.check_tensor("w", w, "[B, N, HI]", checks.FLOATS)
        if tuple(w.shape) != (B, N, HI):
            raise ValueError(f"w: got {describe(w)}, expected [B, N, HI] = {[B, N, HI]}")
        checks.check_same_device(q_idx=q_idx, w=w)
