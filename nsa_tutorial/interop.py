"""From other sparse-attention libraries to the operators: layouts, lists, and the arguments of
three public libraries.

`positions_first` and `heads_first` change between layouts, `mask_slots` and `group_lists` bring
lists of blocks into the form of `ops.selected_attention`, `expand_keys_values` serves lists that
differ between the heads of a group. `from_fla`, `from_lucidrains` and `from_ejkernel` take the
arguments of a library's function under its own names, and return those of one of the operators:

    o = ops.native_sparse_attention(**interop.from_fla(q, k, v, g_cmp, g_slc, g_swa,
        window_size=512))
    o = interop.heads_first(ops.selected_attention(**interop.from_lucidrains(fq, fk, fv, 64,
        indices, mask)))

What is said of a library was read in its public source, and where the library is installed,
tests/test_interop_libraries.py asks the library itself. Where its own backends disagree, a
conversion follows the one that does what the arguments say; where it computes something that no
operator here computes, the conversion raises.

It imports none of these libraries and runs none of their code. Tensors keep their dtype and their
gradients.

Symbols: those of `ops` · `NB` blocks of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import checks

INTEGERS = (torch.int32, torch.int64)
SELECTION = ("q", "k", "v", "block_indices", "block_size", "block_counts", "scale", "cu_seqlens")


# -- layouts --


def positions_first(x: Tensor) -> Tensor:
    """`[B, H, N, …]` to the `[B, N, H, …]` of the operators, a view: queries, keys, values, lists;
    or `[B, H, N]`: gates, lse.

    No shape tells the two layouts apart: the caller has to know which one it is.

    Raises:
        ValueError, TypeError: for what is not a tensor of 3 or 4 dimensions.
    """
    return _swap("x", x, "[B, H, N]", "[B, H, N, D]")


def heads_first(x: Tensor) -> Tensor:
    """The inverse of `positions_first`: `[B, N, H]` and `[B, N, H, D]` to `[B, H, N]` and
    `[B, H, N, D]`, a view."""
    return _swap("x", x, "[B, N, H]", "[B, N, H, D]")


def _swap(name: str, x: Tensor, *shapes: str) -> Tensor:
    """`x` with positions and heads exchanged; `shapes` are what it may be, for the error."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: got {checks.describe(x)}, expected a tensor of shape {' or '.join(shapes)}"
        )
    if x.ndim not in [shape.count(",") + 1 for shape in shapes]:
        raise ValueError(
            f"{name}: got {checks.describe(x)}, expected the dimensions {' or '.join(shapes)}"
        )
    return x.transpose(1, 2)


# -- lists of blocks --


def mask_slots(block_indices: Tensor, mask: Tensor) -> Tensor:
    """Lists with a boolean mask beside them to lists with -1 in the empty slots.

    Args:
        block_indices: `[B, N, H, S]` int32 or int64; what stands under a False may be anything.
        mask: bool `[B, N, H, S]`, False where the slot is empty. Counts `[B, N, H]` are
            `torch.arange(S) < counts[..., None]`.

    Returns:
        `[B, N, H, S]` in the dtype of `block_indices`.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected.
    """
    _check_mask("[B, N, H, S]", block_indices=block_indices, mask=mask)
    return block_indices.masked_fill(~mask, -1)


def _check_mask(shape: str, **lists_and_mask: Tensor) -> None:
    """Lists and the mask beside them, by the names that their function gives them, have one
    shape."""
    (indices_name, block_indices), (mask_name, mask) = lists_and_mask.items()
    checks.check_tensor(indices_name, block_indices, shape, INTEGERS)
    checks.check_tensor(mask_name, mask, shape, (torch.bool,))
    if mask.shape != block_indices.shape:
        expected = f"the shape of {indices_name}, {list(block_indices.shape)}"
        raise ValueError(f"{mask_name}: got {checks.describe(mask)}, expected {expected}")
    checks.check_same_device(**lists_and_mask)


def group_lists(block_indices: Tensor, H: int) -> Tensor:
    """One list per query head to one per key/value head, where all heads of each group list the
    same blocks.

    Where they do not, no list of the group gives the same result: the union would show every head
    the blocks of the others. `expand_keys_values` is the way then.

    Args:
        block_indices: `[B, N, HQ, S]` int32 or int64; query heads `h * G … h * G + G - 1` are a
            group. Slots may come in any order; negative ids are empty slots.
        H: number of key/value heads.

    Returns:
        `[B, N, H, S]`: the list of the first head of each group.

    Raises:
        ValueError: naming the first row `[b, n, h]` at which the heads of group `h` differ;
            TypeError.
    """
    checks.check_tensor("block_indices", block_indices, "[B, N, HQ, S]", INTEGERS)
    checks.check_positive_int("H", H)
    HQ = block_indices.shape[2]
    if HQ == 0 or HQ % H:
        raise ValueError(
            f"block_indices: got lists of {HQ} query heads for {H} key/value heads, expected a "
            "multiple"
        )
    lists = block_indices.unflatten(2, (H, HQ // H))  # [B, N, H, G, S]
    ordered = lists.clamp(min=-1).sort(-1).values
    differs = (ordered != ordered[:, :, :, :1]).flatten(3).any(-1)  # [B, N, H]
    if differs.any():
        b, n, h = differs.nonzero()[0].tolist()
        raise ValueError(
            f"block_indices: got heads that differ in row {[b, n, h]}, {lists[b, n, h].tolist()}, "
            "expected the same blocks for all query heads of a group (expand_keys_values serves "
            "lists per head)"
        )
    return lists[:, :, :, 0]


def expand_keys_values(k: Tensor, v: Tensor, HQ: int) -> tuple[Tensor, Tensor]:
    """Keys and values of each query head's own, for lists `[B, N, HQ, S]` that differ between the
    heads of a group.

    With `H = HQ` (`G = 1`) the operators read such lists as they are. The result is exact; keys and
    values take `G` times the memory, and each is read `G` times, which is what sharing a list in
    the group saves (NSA, arXiv 2502.11089, section 3.3.2).

    Args:
        k, v: `[B, M, H, D]`, `[B, M, H, DV]`.
        HQ: number of query heads, a multiple of `H`.

    Returns:
        `[B, M, HQ, D]` and `[B, M, HQ, DV]`: head `i` is a copy of head `i // G`. Gradients of the
            copies add up.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected.
    """
    checks.check_tensor("k", k, "[B, M, H, D]", checks.FLOATS)
    checks.check_tensor("v", v, "[B, M, H, DV]", checks.FLOATS)
    checks.check_positive_int("HQ", HQ)
    H = k.shape[2]
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: got {checks.describe(v)}, expected the batch, positions and heads of k, "
            f"{list(k.shape[:3])}"
        )
    if H == 0 or HQ % H:
        raise ValueError(f"HQ: got {HQ} query heads over {H} key/value heads, expected a multiple")
    return k.repeat_interleave(HQ // H, dim=2), v.repeat_interleave(HQ // H, dim=2)


def selection_only(arguments: dict[str, object]) -> dict[str, object]:
    """The selection branch alone: arguments of `ops.native_sparse_attention` to those of
    `ops.selected_attention`.

    Gates, window and summaries are left out.

    Raises:
        ValueError: where `arguments` have no `block_indices`: the whole operator chooses its
            blocks, this branch cannot.
    """
    if arguments.get("block_indices") is None:
        raise ValueError(
            "block_indices: got None, expected [B, N, H, S]: without the other branches there is "
            "nothing to choose by"
        )
    return {name: arguments[name] for name in SELECTION if name in arguments}


# -- libraries --


def from_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    head_first: bool = False,
) -> dict[str, object]:
    """The arguments of `parallel_nsa` and `naive_nsa` of flash-linear-attention
    (fla-org/flash-linear-attention, `fla/ops/nsa`).

    The layout is that of the operators, ids count blocks, -1 and blocks of the future are skipped,
    listed blocks are causal, queries are the last of the positions, a window of `w` shows `w` keys,
    a summary is the mean of one block: all as here.

    What differs, and what becomes of it:
        g_slc: None leaves the selection in, ungated. It becomes a gate of ones.
        window_size: 0 is no window, whatever `g_swa` is, which becomes None.
        block_counts: with lists given, an int is not read and all slots are: it becomes None. A
            tensor `[B, N, H]` is read by `parallel_nsa` (and not by `naive_nsa`), and stays.
            Without lists it is the number of blocks to choose; there `parallel_nsa` rounds up to a
            power of two and attends to all of these, `naive_nsa` takes exactly so many, and so does
            this. For the kernel's lists, give the next power of two. A tensor cuts the list of each
            row, in the order of importance, here as there.
        choosing blocks: the first one and the two latest are always among them, as here. The
            versions that had `head_first` took the query's own alone, and ignored lists given
            together with `g_cmp`: for theirs, give as `block_indices` what `ops.select_blocks`
            chooses with `num_initial=0, num_local=1`.
        cu_seqlens: a pair for queries and keys is accepted if both are the same.
        rows that see no key: 0/0 there, output 0 here.

    Group sizes need not be powers of two from 16 on here, and `block_size` need not be twice
    `block_counts`.

    Args:
        q, k, v, …, cu_seqlens: under their names.
        head_first: of older versions: `[B, H, N, …]` for queries, keys, values, lists, `[B, H, N]`
            for gates and counts. The output of the operator is positions first all the same.

    Returns:
        The arguments of `ops.native_sparse_attention`; `selection_only` makes those of
            `ops.selected_attention` of them.

    Raises:
        ValueError, TypeError: an argument that has no counterpart here, named; everything else the
            operator checks.
    """
    checks.check_bool("head_first", head_first)
    if head_first:
        q, k, v = (_swap(name, x, "[B, H, N, D]") for name, x in (("q", q), ("k", k), ("v", v)))
        gates = (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa))
        g_cmp, g_slc, g_swa = (
            x if x is None else _swap(name, x, "[B, HQ, N]") for name, x in gates
        )
        block_indices = (
            block_indices
            if block_indices is None
            else _swap("block_indices", block_indices, "[B, H, N, S]")
        )
        block_counts = (
            _swap("block_counts", block_counts, "[B, H, N]")
            if isinstance(block_counts, Tensor)
            else block_counts
        )
    checks.check_qkv(q, k, v)
    checks.check_positive_int("window_size", window_size, least=0)
    if window_size > 0 and g_swa is None:
        raise ValueError(
            f"g_swa: got None, expected a gate [B, N, HQ] for the window of {window_size}"
        )
    if isinstance(cu_seqlens, tuple):
        cu_seqlens = _one_of_two(*cu_seqlens)
    window = {"window_size": window_size} if window_size > 0 else {}
    return {
        **_nsa_arguments(q, k, v, g_cmp, g_slc, block_indices, block_size, scale, cu_seqlens),
        "block_counts": _counts(block_counts, lists=block_indices is not None, int_is_read=False),
        "g_swa": g_swa if window_size > 0 else None,
        **window,
    }


def _one_of_two(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """The offsets of queries and keys, which have to be the same here."""
    for x in (cu_seqlens_q, cu_seqlens_k):
        checks.check_tensor("cu_seqlens", x, "[num_sequences + 1]", INTEGERS)
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError(
            "cu_seqlens: got different offsets for queries and keys, expected the same: packed "
            "queries have all keys"
        )
    return cu_seqlens_q


def _nsa_arguments(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor | None, g_slc: Tensor | None,
    block_indices: Tensor | None,
    block_size: int, scale: float | None, cu_seqlens: Tensor | None,
) -> dict[str, object]:  # fmt: skip
    """What fla and ejkernel share: selection without a gate counts whole, and summaries are the
    means of single blocks."""
    return {
        "q": q, "k": k, "v": v,
        "g_cmp": g_cmp,
        "g_slc": q.new_ones(q.shape[:3]) if g_slc is None else g_slc,
        "block_indices": block_indices,
        "block_size": block_size, "length": block_size, "stride": block_size,
        "scale": scale,
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip


def _counts(block_counts: Tensor | int, *, lists: bool, int_is_read: bool) -> Tensor | int | None:
    """The counts for given lists, or the number of blocks to choose."""
    if isinstance(block_counts, Tensor):
        return block_counts
    checks.check_positive_int("block_counts", block_counts, least=0 if lists else 1)
    return block_counts if int_is_read or not lists else None


def from_lucidrains(
    fq: Tensor,
    fk: Tensor,
    fv: Tensor,
    block_size: int,
    selected_block_indices: Tensor,
    fmask: Tensor,
    sel_scale: Tensor | None = None,
    include_block_causal: bool = True,
    return_lse: bool = False,
    block_dk_dv_use_dot: bool | None = None,
    return_sliding_window_out: bool = False,
) -> dict[str, object]:
    """The arguments of `native_sparse_attend`, the Triton kernels of
    lucidrains/native-sparse-attention-pytorch.

    The layout is heads first throughout; ids count blocks; the query heads of a group are
    consecutive. (The PyTorch path of that repository's module lets query head `i` read key/value
    head `i % H` instead: there `q.unflatten(1, (G, H)).transpose(1, 2).flatten(1, 2)` is what is
    meant here.) There is no scale, and no packing. The kernels compute in fp16, whatever comes;
    here the dtype stays.

    What differs, and what becomes of it:
        fmask: False is an empty slot: it becomes -1. What the mask shows must be a block.
        selected blocks: they carry no causal mask there. A block that reaches past the query would
            leak the future, and its keys past the end would count with a score of 0; the own block,
            listed and included, would count twice. No operator here computes these, so they raise:
            mask them out, and include the own block.
        include_block_causal: it is `include_own_block`.
        lists per query head, `[B, HQ, N, S]`: keys and values are expanded there, and so they are
            here (`expand_keys_values`).
        sel_scale: ones, which carry gradients to the selection scores. These gradients do not exist
            here yet (chapter 13), and a scale that is dropped without a word would train nothing:
            raises.
        block_dk_dv_use_dot: how their backward multiplies; dropped.
        return_sliding_window_out: a second output, of the latest `block_size + 1` keys (their
            backward scans fewer): the arguments are then those of
            `ops.selected_and_window_attention`, with that `window_size`, and with `return_lse` both
            branches return theirs.
        rows that see no key: NaN there, output 0 here. Without the own block, a row whose first
            slot is empty is NaN there, too.

    Args:
        fq, fk, fv: `[B, HQ, N, D]`, `[B, H, N, D]`, `[B, H, N, D]`; as many queries as keys: theirs
            count from the first key.
        selected_block_indices, fmask: `[B, H, N, S]` or `[B, HQ, N, S]`, integers and bool.
        block_size, …: under their names.

    Returns:
        The arguments of `ops.selected_attention`, or, with `return_sliding_window_out`, of
            `ops.selected_and_window_attention`;
        outputs are positions first, `heads_first` brings them back.

    Raises:
        ValueError: for a block that is not wholly before the query, naming the first row
            `[b, n, h]`, and for what has no counterpart here, named; TypeError; NotImplementedError
            for `sel_scale`.
    """
    _check_mask("[B, H, N, S]", selected_block_indices=selected_block_indices, fmask=fmask)
    q, k, v = (_swap(name, x, "[B, H, N, D]") for name, x in (("fq", fq), ("fk", fk), ("fv", fv)))
    ids, mask = positions_first(selected_block_indices), positions_first(fmask)
    checks.check_qkv(q, k, v)
    checks.check_positive_int("block_size", block_size)
    checks.check_bool("include_block_causal", include_block_causal)
    (B, N, HQ), M, H = q.shape[:3], k.shape[1], k.shape[2]
    if N != M:
        raise ValueError(f"fq: got {N} queries for {M} keys, expected as many queries as keys")
    if ids.shape[:2] != (B, N) or ids.shape[2] not in (H, HQ):
        raise ValueError(
            f"selected_block_indices: got {checks.describe(selected_block_indices)}, expected "
            "[B, H, N, S] with [B, H, N] = "
            f"{[B, H, N]}, or {HQ} heads"
        )
    checks.check_bool("return_sliding_window_out", return_sliding_window_out)
    if sel_scale is not None:
        raise NotImplementedError(
            f"sel_scale: got {checks.describe(sel_scale)}, expected None: the gradient of the "
            "selection comes with chapter 13, "
            "backward_kernels"
        )
    _check_before_the_query(ids, mask, block_size, include_block_causal)
    if ids.shape[2] != H:
        k, v = expand_keys_values(k, v, HQ)
    return {
        "q": q, "k": k, "v": v,
        "block_indices": mask_slots(ids, mask),
        "block_size": block_size,
        "include_own_block": include_block_causal,
        "return_lse": return_lse,
        **({"window_size": block_size + 1} if return_sliding_window_out else {}),
    }  # fmt: skip


def _check_before_the_query(
    ids: Tensor, mask: Tensor, block_size: int, own_is_included: bool
) -> None:
    """Blocks without a causal mask end by the query's position, and before its own block where that
    is added."""
    position = torch.arange(ids.shape[1], device=ids.device)
    # how many blocks, from the first one, may be listed: [N, 1, 1]
    before = ((position if own_is_included else position + 1) // block_size)[:, None, None]
    fault = mask & ((ids < 0) | (ids >= before))
    if fault.any():
        b, n, h, s = fault.nonzero()[0].tolist()
        raise ValueError(
            f"selected_block_indices: got block {int(ids[b, n, h, s])} in row {[b, n, h]}, "
            f"expected 0 … {int(before[n]) - 1}, or a "
            "False in fmask: selected blocks have no causal mask, so that only blocks wholly "
            "before the query mean the same here"
        )


def from_ejkernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    token_indices: Tensor | None = None,
) -> dict[str, object]:
    """The arguments of `native_sparse_attention` and `apply_native_sparse_attention` of ejKernel
    (erfanzar/ejkernel).

    The layout is that of the operators, ids count blocks, listed blocks are causal, a summary is
    the mean of one block, there is no window. Arrays of JAX have to be made tensors first
    (`torch.from_dlpack`).

    What differs, and what becomes of it:
        block_indices: with `g_cmp` they are ignored and blocks are chosen, the query's own always
            among them, but neither the first nor the one before. That list is chosen here, by
            `ops.select_blocks` with `num_initial=0, num_local=1` (which settles ties of masses its
            own way), and returned. Lists `[B, H, NB, S]`, one for each block of queries, become
            lists of each query, and counts `[B, H, NB]` likewise.
        block_counts: with lists given, an int is the number of slots read, as on the XLA backend;
            the Triton kernel reads all slots. Where blocks are chosen, the Triton backend rounds up
            to a power of two and attends to all of these; here it is as many as asked for.
        -1: an empty slot, as here. The first XLA version wrapped it round to the last block, and
            had no causal mask in listed blocks: what was computed with it leaked the future and has
            no counterpart here.
        g_slc: None leaves the selection in, ungated. It becomes a gate of ones.
        rows that see no key: output 0 here and on Triton (where their log-sum-exp is 0, here
            `-inf`); the XLA backend averages the values of what the slots name, the future's
            included, and -1 read as block 0.
        token_indices: follow from `cu_seqlens`; dropped.

    Args:
        query, key, value: `[B, N, HQ, D]`, `[B, N, H, D]`, `[B, N, H, DV]`, as many queries as
            keys.
        g_cmp, …, token_indices: under their names.

    Returns:
        The arguments of `ops.native_sparse_attention`; `selection_only` makes those of
            `ops.selected_attention` of them.

    Raises:
        ValueError, TypeError: an argument that has no counterpart here, named; everything else the
            operator checks.
    """
    checks.check_qkv(query, key, value)
    checks.check_positive_int("block_size", block_size)
    N, M, H = query.shape[1], key.shape[1], key.shape[2]
    if N != M:
        raise ValueError(f"query: got {N} queries for {M} keys, expected as many queries as keys")
    if token_indices is not None and cu_seqlens is None:
        raise ValueError(
            "token_indices: got a value without cu_seqlens, expected None: they locate the "
            "tokens of packed sequences"
        )
    block_indices = _per_query(block_indices, N, H, block_size)
    block_counts = _per_query(block_counts, N, H, block_size)
    if g_cmp is not None and isinstance(block_counts, Tensor):
        raise ValueError(
            f"block_counts: got {checks.describe(block_counts)}, expected an int where the "
            "blocks are chosen"
        )
    counts = _counts(block_counts, lists=g_cmp is None, int_is_read=True)
    if g_cmp is not None:
        summaries = {"length": block_size, "stride": block_size, "cu_seqlens": cu_seqlens}
        block_indices = ops.select_blocks(
            query, ops.compress(key, **summaries), top_n=counts, block_size=block_size,
            num_initial=0, num_local=1,
            scale=softmax_scale, **summaries,
        )  # fmt: skip
        counts = None
    return {
        **_nsa_arguments(
            query, key, value, g_cmp, g_slc, block_indices, block_size, softmax_scale, cu_seqlens
        ),
        "block_counts": counts,
    }


def _per_query(x: Tensor | int | None, N: int, H: int, block_size: int) -> Tensor | int | None:
    """Lists or counts `[B, H, NB, …]`, one for each block of queries, to those of each query,
    `[B, N, H, …]`; others stay."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4) or x.shape[1:3] == (N, H):
        return x
    if x.shape[1:3] != (H, -(-N // block_size)):
        return x
    return positions_first(x).repeat_interleave(block_size, dim=1)[:, :N]
