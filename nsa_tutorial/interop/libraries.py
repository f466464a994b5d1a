"""The arguments of three public sparse-attention libraries, as arguments of the operators.

    o = ops.native_sparse_attention(**interop.from_fla(q, k, v, g_cmp, g_slc))
    o = ops.selected_attention(**interop.from_lucidrains(fq, fk, fv, 64, indices, mask))

Each library has a table, its name to ours or to what becomes of it, and a function that does what
the table says. Where a library's own backends disagree, we follow the one that does what the
argument says; what no operator here computes raises, naming the argument. The tables were read in
the public sources. tests/interop/test_installed_libraries.py asks the libraries that are installed.

None of them is imported, and tensors keep their dtype and their gradients. Outputs of the operators
are positions first; `heads_first` turns them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import checks

SELECTION = ("q", "k", "v", "block_indices", "block_size", "block_counts", "scale", "cu_seqlens")


def heads_first(x: Tensor) -> Tensor:
    """`[B, N, H, …]` to `[B, H, N, …]`, and back: a view with positions and heads exchanged."""
    return x.transpose(1, 2)


def selection_only(arguments: dict[str, object]) -> dict[str, object]:
    """Arguments of `ops.native_sparse_attention`, which must list blocks, to those of
    `ops.selected_attention`: gates, window and summaries are left out."""
    _expect(
        arguments.get("block_indices") is not None, "block_indices", None,
        "[B, N, H, S]: without the other branches there is nothing to choose by",
    )  # fmt: skip
    return {name: arguments[name] for name in SELECTION if name in arguments}


def _expect(is_right: bool, name: str, got: object, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: got {checks.describe(got)}, expected {expected}")


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, g_slc: Tensor | None, block_size: int, **others: object
) -> dict[str, object]:
    """What fla and ejKernel share: a selection without a gate has weight 1, and a summary is the
    mean of one block."""
    checks.check_qkv(q, k, v)
    ones = q.new_ones(q.shape[:3])
    sizes = dict.fromkeys(("block_size", "length", "stride"), block_size)
    return {"q": q, "k": k, "v": v, "g_slc": ones if g_slc is None else g_slc, **sizes, **others}


# -- flash-linear-attention: parallel_nsa and naive_nsa of fla/ops/nsa --

FLA = {
    "q": "q", "k": "k", "v": "v",
    "g_cmp": "g_cmp",
    "g_slc": "g_slc; None leaves the selection in, as ones do here",
    "g_swa": "g_swa; None if window_size is 0",
    "block_indices": "block_indices; the blocks are chosen if None",
    "block_counts": "a tensor [B, N, H] is block_counts. An int beside block_indices is not read: "
    "every slot is. Without them it is how many blocks to choose (parallel_nsa rounds it up to a "
    "power of two, naive_nsa and we do not); the first and the two latest always are, but in "
    "versions with head_first, which took the query's own alone and ignored lists beside g_cmp",
    "block_size": "block_size, length and stride",
    "window_size": "window_size; 0 is no window",
    "scale": "scale",
    "cu_seqlens": "cu_seqlens; a pair, for queries and keys, if both are the same",
    "head_first": "of old versions: [B, H, N, …] is turned, the output is not",
    "a row that sees no key": "0 here, 0/0 there",
}  # fmt: skip


def from_fla(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor | None = None, g_slc: Tensor | None = None,
    g_swa: Tensor | None = None, block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16, block_size: int = 64, window_size: int = 0,
    scale: float | None = None, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    head_first: bool = False,
) -> dict[str, object]:  # fmt: skip
    """Arguments of `ops.native_sparse_attention`, by the table `FLA`."""
    if head_first:
        q, k, v, g_cmp, g_slc, g_swa, block_indices, block_counts = (
            heads_first(x) if isinstance(x, Tensor) else x
            for x in (q, k, v, g_cmp, g_slc, g_swa, block_indices, block_counts)
        )
    checks.check_positive_int("window_size", window_size, least=0)
    expected = f"a gate [B, N, HQ] for the window of {window_size}"
    _expect(window_size == 0 or g_swa is not None, "g_swa", g_swa, expected)
    if isinstance(cu_seqlens, (tuple, list)):
        _expect(len(cu_seqlens) == 2, "cu_seqlens", cu_seqlens, "a tensor, or a pair of them")
        for x in cu_seqlens:
            checks.check_tensor("cu_seqlens", x, "[num_sequences + 1]", checks.INTEGERS)
        one = "the same offsets for queries and keys: packed queries have all keys"
        _expect(torch.equal(*cu_seqlens), "cu_seqlens", [x.tolist() for x in cu_seqlens], one)
        cu_seqlens = cu_seqlens[0]
    if not isinstance(block_counts, Tensor):
        checks.check_positive_int("block_counts", block_counts, least=0)
        block_counts = block_counts if block_indices is None else None
    window = {"g_swa": g_swa, "window_size": window_size} if window_size else {"g_swa": None}
    return _arguments(
        q, k, v, g_slc, block_size, g_cmp=g_cmp, block_indices=block_indices,
        block_counts=block_counts, scale=scale, cu_seqlens=cu_seqlens, **window,
    )  # fmt: skip


# -- lucidrains/native-sparse-attention-pytorch: native_sparse_attend, its Triton kernels --

LUCIDRAINS = {
    "fq": "q, [B, HQ, N, D] there, as many as keys; heads of a group are consecutive (the module's "
    "PyTorch path has query head i read key/value head i % H)",
    "fk": "k", "fv": "v",
    "block_size": "block_size",
    "selected_block_indices": "block_indices. Lists [B, HQ, N, S] of each query head repeat keys "
    "and values, as there. Blocks have no causal mask there: only those wholly before the query "
    "mean the same here, and others raise. So does the own block listed and included: it counts "
    "twice there",
    "fmask": "-1 in block_indices for each False",
    "sel_scale": "slot_scale, in fp32. It must be ones there: the forward does not read it, and "
    "the backward gives each slot sum(ds * s) for it (return_sel_grads), as here. Other factors "
    "scale the scores here",
    "include_block_causal": "include_own_block",
    "return_lse": "return_lse; their gradients leave out what comes through it",
    "block_dk_dv_use_dot": "dropped: how their backward multiplies",
    "return_sliding_window_out": "window_size of block_size + 1 keys, as many as theirs shows, for "
    "ops.selected_and_window_attention",
    "a row that sees no key": "0 here; NaN there, also where only its first slot is empty and the "
    "own block is not included",
}  # fmt: skip


def from_lucidrains(
    fq: Tensor, fk: Tensor, fv: Tensor, block_size: int, selected_block_indices: Tensor,
    fmask: Tensor, sel_scale: Tensor | None = None, include_block_causal: bool = True,
    return_lse: bool = False, block_dk_dv_use_dot: bool | None = None,
    return_sliding_window_out: bool = False,
) -> dict[str, object]:  # fmt: skip
    """Arguments of `ops.selected_attention`, or, with `return_sliding_window_out`, of
    `ops.selected_and_window_attention`, by the table `LUCIDRAINS`."""
    for name, x in (("fq", fq), ("fk", fk), ("fv", fv)):
        checks.check_tensor(name, x, "[B, H, N, D]", checks.FLOATS)
    for name, x, dtypes in (
        ("selected_block_indices", selected_block_indices, checks.INTEGERS),
        ("fmask", fmask, (torch.bool,)),
    ):
        checks.check_tensor(name, x, "[B, H, N, S]", dtypes)
    q, k, v, ids, mask = map(heads_first, (fq, fk, fv, selected_block_indices, fmask))
    checks.check_qkv(q, k, v)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_block_causal", include_block_causal)
    (B, N, HQ, _), M, H = q.shape, k.shape[1], k.shape[2]
    _expect(N == M, "fq", fq, f"as many queries as keys, {M}")
    is_right = ids.shape[:2] == (B, N) and ids.shape[2] in (H, HQ)
    expected = f"[B, H, N, S] with [B, H, N] = {[B, H, N]}, or {HQ} heads"
    _expect(is_right, "selected_block_indices", selected_block_indices, expected)
    expected = f"the shape of selected_block_indices, {list(selected_block_indices.shape)}"
    _expect(mask.shape == ids.shape, "fmask", fmask, expected)
    factors = {}
    if sel_scale is not None:
        checks.check_tensor("sel_scale", sel_scale, "[B, H, N, S]", checks.FLOATS)
        is_right = sel_scale.shape == selected_block_indices.shape
        _expect(is_right, "sel_scale", sel_scale, expected)
        wide = torch.promote_types(q.dtype, torch.float32)
        factors = {"slot_scale": heads_first(sel_scale).to(wide)}

    # how many blocks, from the first one, end before the query, or before the own block if added
    past = torch.arange(N, device=ids.device) + (0 if include_block_causal else 1)
    before = (past // block_size)[:, None, None]
    fault = mask & ((ids < 0) | (ids >= before))
    if fault.any():
        b, n, h, s = fault.nonzero()[0].tolist()
        raise ValueError(
            f"selected_block_indices: got block {int(ids[b, n, h, s])} in row {[b, n, h]}, "
            f"expected 0 … {int(before[n]) - 1}, or a False in fmask: selected blocks have no "
            "causal mask, so that only blocks wholly before the query mean the same here"
        )
    if ids.shape[2] != H:
        k, v = (x.repeat_interleave(HQ // H, dim=2) for x in (k, v))
    return {
        "q": q, "k": k, "v": v, "block_indices": ids.masked_fill(~mask, -1),
        "block_size": block_size, "include_own_block": include_block_causal,
        "return_lse": return_lse, **factors,
        **({"window_size": block_size + 1} if return_sliding_window_out else {}),
    }  # fmt: skip


# -- ejKernel: native_sparse_attention and apply_native_sparse_attention --

EJKERNEL = {
    "query": "q, as many as keys; JAX's arrays become tensors by torch.from_dlpack",
    "key": "k", "value": "v",
    "g_cmp": "g_cmp; with it, block_indices are ignored and chosen by ops.select_blocks with "
    "num_initial=0, num_local=1",
    "g_slc": "g_slc; None leaves the selection in, as ones do here",
    "block_indices": "block_indices; lists [B, H, NB, S] of each block of queries are repeated for "
    "its queries. -1 is empty (the first XLA version read the last block, unmasked: a leak)",
    "block_counts": "block_counts: with lists the slots that are read, as on the XLA backend (the "
    "Triton kernel reads all); otherwise how many to choose (the Triton kernel rounds up)",
    "block_size": "block_size, length and stride",
    "softmax_scale": "scale",
    "cu_seqlens": "cu_seqlens",
    "token_indices": "dropped: they follow from cu_seqlens",
    "a row that sees no key": "0 here and on Triton; on XLA an average of what its slots name, the "
    "future's too",
}  # fmt: skip


def from_ejkernel(
    query: Tensor, key: Tensor, value: Tensor, g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None, block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16, block_size: int = 64, softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None, token_indices: Tensor | None = None,
) -> dict[str, object]:  # fmt: skip
    """Arguments of `ops.native_sparse_attention`, by the table `EJKERNEL`."""
    checks.check_qkv(query, key, value)
    checks.check_positive_int("block_size", block_size)
    (N, M, H), NB = (query.shape[1], *key.shape[1:3]), -(-query.shape[1] // block_size)
    _expect(N == M, "query", query, f"as many queries as keys, {M}")
    _expect(
        token_indices is None or cu_seqlens is not None, "token_indices", token_indices,
        "None without cu_seqlens: they locate the tokens of packed sequences",
    )  # fmt: skip

    def of_each_query(x: Tensor | int | None) -> Tensor | int | None:
        is_of_blocks = isinstance(x, Tensor) and x.ndim > 2 and x.shape[1:3] == (H, NB) != (N, H)
        return heads_first(x).repeat_interleave(block_size, dim=1)[:, :N] if is_of_blocks else x

    block_indices, block_counts = map(of_each_query, (block_indices, block_counts))
    if not isinstance(block_counts, Tensor):
        checks.check_positive_int("block_counts", block_counts, least=0 if g_cmp is None else 1)
    if g_cmp is not None:
        _expect(isinstance(block_counts, int), "block_counts", block_counts, "an int, to choose by")
        summaries = {"length": block_size, "stride": block_size, "cu_seqlens": cu_seqlens}
        block_indices = ops.select_blocks(
            query, ops.compress(key, **summaries), top_n=block_counts, block_size=block_size,
            num_initial=0, num_local=1, scale=softmax_scale, **summaries,
        )  # fmt: skip
        block_counts = None
    return _arguments(
        query, key, value, g_slc, block_size, g_cmp=g_cmp, block_indices=block_indices,
        block_counts=block_counts, scale=softmax_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip
