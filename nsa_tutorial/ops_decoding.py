"""The operator of decoding, with its arguments checked: `ops.decode_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial import library_decoding
from nsa_tutorial.runtime import checks
from nsa_tutorial.runtime.describing import describe
from nsa_tutorial.runtime.transforms import check_no_tangent
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL


def decode_attention(
    q: Tensor,
    compressed: Sequence[Tensor],
    selected: Sequence[Tensor],
    window: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 512,
    length: int = 32,
    stride: int = 16,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native Sparse Attention of the newest tokens to a cache, `n` queries for each row, whose
    lengths may differ. The host never waits for the device, and how many programs run does not
    depend on a length, so a CUDA graph of the call holds for every length.

    Args:
        q: queries `[B, n, HQ, D]`, fp32, fp16 or bf16 (fp64 on the reference backend): the last `n`
            of the `lengths[b]` tokens of each row `b`.
        compressed: summaries in pages, `[pages, page_size // stride, H, D]` and `[…, DV]`, or `()`
            without that branch. Summary `j` of a row lies in the page of its first token, in place
            `j * stride % page_size // stride`; one that is not complete is never read.
        selected: keys and values in pages, `[pages, page_size, H, D]` and `[…, DV]`; they tell the
            page size also where the branch is left out.
        window: rings `[B, ring, H, D]` and `[…, DV]`, or `()`: token `t` lies in place `t % ring`,
            and a ring has room for `window_size + n - 1` tokens, or for all.
        gates: of compression, selection and window, `[B, n, HQ]` each; None leaves a branch out.
        lengths: `[B]` int32, on the device of `q`: tokens of each row, the queries' own included. A
            query before the first token sees nothing.
        block_table: `[B, max_pages]` int32, the pages of each row (PyTorch's own convention, that
            of `varlen_attn`); several rows may share one. `page_size` is then a multiple of
            `block_size` and of `stride`. None: row `b` is page `b`.
        block_indices: `[B, n, H, S]`, as for `selected_attention`; None chooses the blocks by the
            summaries, `block_counts` of them, the first one and the two latest included.
        block_size, window_size, length, stride, scale, backend: as for `native_sparse_attention`.

    Returns:
        `o [B, n, HQ, DV]` in the dtype of the values: what `native_sparse_attention` returns for
        these queries, to the error budget, the same in every run. There is no gradient.
    """
    sizes = (block_counts, block_size, window_size, length, stride, scale, backend)
    tensors = (q, compressed, selected, window, gates, lengths, block_table, block_indices)
    kind = _kind(tensors, sizes)
    if kind is None or kind not in _CHECKED:
        _check(*tensors, *sizes)
        if kind is not None and len(_CHECKED) < MOST_KINDS:
            _CHECKED.add(kind)
    window_size = min(window_size, checks.LARGEST_INT)
    named = {"q": q, "compressed": list(compressed), "selected": list(selected)}
    check_no_tangent("decode_attention", **named, window=list(window), gates=list(gates))
    backend, scale = checks.choose_backend(backend, q), checks.check_scale(scale, q.shape[-1])
    # a branch that is left out is not read
    buffers = [*(compressed or selected), *selected, *(window or selected)]
    sizes = (block_counts, block_size, window_size, length, stride, scale, backend)
    return library_decoding.decode_attention(
        q, buffers, lengths, block_table, *gates, block_indices, *sizes
    )


# What was found right, by shapes, dtypes and places: a text is thousands of the same calls.
_CHECKED: set[tuple] = set()
MOST_KINDS = 256


def _kind(tensors: Sequence[object], sizes: Sequence[object]) -> tuple | None:
    """What the checks depend on, or None while a graph is traced, whose sizes are symbols, and for
    what is no tensor."""
    if torch.compiler.is_compiling():
        return None
    flat: list[object] = []
    for x in tensors:
        flat += [len(x), *x] if isinstance(x, (list, tuple)) else [x]
    found: list[object] = []
    for x in flat:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, torch.nn.Parameter):
                return None
            found += [x.shape, x.dtype, x.device, x.is_contiguous()]
        elif x is None or type(x) is int:
            found.append(x)
        else:
            return None
    found += [(type(x), x) for x in sizes]  # True is no 1
    try:
        hash(key := tuple(found))
    except TypeError:
        return None
    return key


def _check(
    q: Tensor, compressed: Sequence[Tensor], selected: Sequence[Tensor], window: Sequence[Tensor],
    gates: Sequence[Tensor | None], lengths: Tensor, block_table: Tensor | None,
    block_indices: Tensor | None, block_counts: int, block_size: int, window_size: int,
    length: int, stride: int, scale: float | None, backend: str,
) -> None:  # fmt: skip
    """All arguments of `decode_attention`."""
    _check_queries(q, selected, gates, lengths, block_table)
    for name, pair in {"compressed": compressed, "window": window}.items():
        if len(pair) not in (0, 2):
            raise ValueError(f"{name}: got {len(pair)} tensors, expected keys and values, or ()")
    for name in ("block_size", "length", "stride"):
        checks.check_positive_int(name, locals()[name])
    window_size = checks.check_window_size(window_size)
    checks.check_scale(scale, 1)
    checks.check_backend(backend)
    g_cmp, g_slc, g_swa = gates
    _check_pages(q, selected, block_table, block_size, stride)
    if g_cmp is not None:
        _check_summaries(compressed, selected, stride)
    if g_swa is not None:
        _check_window(q, window, selected, window_size, block_table)
    if g_slc is not None:
        _check_lists(q, selected[0], block_indices, block_counts, g_cmp)


def _check_queries(
    q: Tensor, selected: Sequence[Tensor], gates: Sequence[Tensor | None], lengths: Tensor,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """Queries, the pages, gates, lengths and the table fit together."""
    if len(selected) != 2:
        raise ValueError(f"selected: got {len(selected)} tensors, expected keys and values")
    if len(gates) != 3:
        raise ValueError(f"gates: got {len(gates)}, expected three, of each branch or None")
    checks.check_tensor("q", q, "[B, n, HQ, D]", checks.FLOATS)
    for i, (x, shape) in enumerate(zip(selected, ("D", "DV"), strict=True)):
        _check_like(f"selected[{i}]", x, f"[pages, page_size, H, {shape}]", q)
    k, v = selected
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"selected: got {describe(k)} and {describe(v)}, expected the same pages and heads, "
            f"and keys of width {q.shape[3]}"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q and selected[0]: got {q.shape[2]} query heads over {k.shape[2]} key/value heads, "
            "expected a multiple"
        )
    for name, width in (("q", q.shape[3]), ("selected[1]", v.shape[3])):
        if not 1 <= width <= checks.LARGEST_WIDTH:
            raise ValueError(f"{name}: got width {width}, expected 1 to {checks.LARGEST_WIDTH}")
    checks.check_gates(q, **dict(zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True)))
    checks.check_tensor("lengths", lengths, "[B]", (torch.int32,))
    checks.check_same_device(q=q, lengths=lengths, block_table=block_table)
    if len(lengths) != len(q):
        raise ValueError(
            f"lengths: got {describe(lengths)}, expected one for each row of q, {len(q)}"
        )


def _check_like(name: str, x: Tensor, shape: str, q: Tensor) -> None:
    """A buffer has the rank of `shape`, the dtype and the device of `q`, and is contiguous."""
    checks.check_tensor(name, x, shape, checks.FLOATS)
    if x.dtype != q.dtype:
        raise TypeError(f"{name}: got {describe(x)}, expected the dtype of q, {q.dtype}")
    checks.check_same_device(**{"q": q, name: x})
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()}, expected a contiguous buffer")


def _check_pages(
    q: Tensor, selected: Sequence[Tensor], block_table: Tensor | None, block_size: int, stride: int
) -> None:
    """The rows' pages: one each, or those of the table."""
    pages, page_size = selected[0].shape[:2]
    if page_size % stride:
        raise ValueError(f"page_size: got {page_size}, expected a multiple of stride, {stride}")
    if block_table is None:
        if pages < len(q):
            raise ValueError(
                f"selected[0]: got {pages} pages, expected one for each of {len(q)} rows"
            )
        return
    checks.check_tensor("block_table", block_table, "[B, max_pages]", (torch.int32,))
    if len(block_table) != len(q) or not block_table.shape[1]:
        raise ValueError(
            f"block_table: got {describe(block_table)}, expected a row of pages for each of "
            f"{len(q)} rows"
        )
    if not block_table.is_contiguous():
        raise ValueError("block_table: got other strides, expected a contiguous tensor")
    if page_size % block_size:
        raise ValueError(
            f"page_size: got {page_size}, expected a multiple of block_size, {block_size}"
        )


def _check_summaries(compressed: Sequence[Tensor], selected: Sequence[Tensor], stride: int) -> None:
    """Summaries have the pages of the keys, and a place for every `stride` tokens."""
    if not compressed:
        raise ValueError("compressed: got (), expected summaries, since g_cmp is given")
    for i, (x, tokens) in enumerate(zip(compressed, selected, strict=True)):
        name = f"compressed[{i}]"
        _check_like(name, x, "[pages, page_size // stride, H, D]", tokens)
        pages, page_size, *rest = tokens.shape
        expected = (pages, page_size // stride, *rest)
        if tuple(x.shape) != expected:
            raise ValueError(f"{name}: got {describe(x)}, expected shape {list(expected)}")


def _check_window(
    q: Tensor, window: Sequence[Tensor], selected: Sequence[Tensor], window_size: int,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """The rings hold what the earliest query of a row sees."""
    if not window:
        raise ValueError("window: got (), expected rings, since g_swa is given")
    room = selected[0].shape[1] * (1 if block_table is None else block_table.shape[1])
    least = min(window_size + q.shape[1] - 1, room)
    for i, (x, tokens) in enumerate(zip(window, selected, strict=True)):
        name = f"window[{i}]"
        _check_like(name, x, "[B, ring, H, D]", tokens)
        if len(x) != len(q) or x.shape[2:] != tokens.shape[2:] or x.shape[1] < least:
            raise ValueError(
                f"{name}: got {describe(x)}, expected [B, ring, H, D] = [{len(q)}, at least "
                f"{least}, {', '.join(map(str, tokens.shape[2:]))}]"
            )
    if window[0].shape[1] != window[1].shape[1]:
        raise ValueError(
            f"window[1]: got a ring of {window[1].shape[1]}, expected that of window[0], "
            f"{window[0].shape[1]}"
        )


def _check_lists(
    q: Tensor, k: Tensor, block_indices: Tensor | None, block_counts: int, g_cmp: Tensor | None
) -> None:
    """There are lists, or something to choose them by."""
    if block_indices is not None:
        checks.check_tensor("block_indices", block_indices, "[B, n, H, S]", checks.INTEGERS)
        expected = (*q.shape[:2], k.shape[2])
        if tuple(block_indices.shape[:3]) != expected:
            raise ValueError(
                f"block_indices: got {describe(block_indices)}, expected [B, n, H, S] with "
                f"[B, n, H] = {list(expected)}"
            )
        checks.check_slots(block_indices)
        checks.check_same_device(q=q, block_indices=block_indices)
        return
    if g_cmp is None:
        raise ValueError(
            "block_indices: got None, expected [B, n, H, S]: without g_cmp there is nothing to "
            "choose blocks by"
        )
    checks.check_positive_int("block_counts", block_counts, least=NUM_INITIAL + NUM_LOCAL)
