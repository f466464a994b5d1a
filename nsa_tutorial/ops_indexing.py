"""The operator of an indexer, with its arguments checked: `ops.index_blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial import library_choice
from nsa_tutorial.runtime import checks
from nsa_tutorial.runtime.describing import describe
from nsa_tutorial.runtime.devices import autocast
from nsa_tutorial.runtime.transforms import check_no_tangent


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
        is NaN is the least of all. There is no gradient: `sparse.indexer.kl_loss` trains an
        indexer.

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
