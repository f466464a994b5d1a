"""The operators that the benchmark knows: what each takes, gives and stands for.

An operator is run on `inputs.Inputs`, whose tensors have the names that stand here. `selection`
and `indexing` are choices of blocks and have no backward. `native` is all of Native Sparse
Attention in one call; the others are its parts, each on inputs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from nsa_tutorial import library, ops
from nsa_tutorial.bench.inputs import Inputs
from nsa_tutorial.runtime import checks
from nsa_tutorial.sparse.native_sparse_attention import gated_sum

GATES, BRANCHES = ("g_cmp", "g_slc", "g_swa"), ("o_cmp", "o_slc", "o_swa")


def _as_drawn(problem: Inputs) -> Inputs:
    return problem


class Operator(NamedTuple):
    """Attributes:
    summary: for the command line; empty for what is measured as a part of `native` alone.
    inputs: names of the tensors that have gradients.
    outputs: names of what it gives, in order.
    drawn: names of the tensors that are drawn.
    run: from a problem and a backend to the outputs, and what else comes with them.
    sizes: which sizes it has besides tokens, KV heads and widths.
    complete: adds the tensors that follow from the drawn ones.
    has_dense: whether dense attention stands beside it.
    """

    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    drawn: tuple[str, ...]
    run: Callable[[Inputs, str], tuple[Tensor, ...]]
    sizes: tuple[str, ...] = ()
    complete: Callable[[Inputs], Inputs] = _as_drawn
    has_dense: bool = True


# -- how each is run --


def selected(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Attention to the lists."""
    options = {"block_size": p.shape.block_size, "return_lse": True, "order": p.order}
    options["backend"] = backend
    return ops.selected_attention(p.q, p.k, p.v, p.block_indices, **options)


def window(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Attention to the latest keys."""
    options = {"window_size": p.window_size, "return_lse": True, "backend": backend}
    return ops.sliding_window_attention(p.q, p.k, p.v, **options)


def compressed(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Attention to the summaries."""
    summaries, s = (p.tensors["k_cmp"], p.tensors["v_cmp"]), p.shape
    options = {"length": s.length, "stride": s.stride, "return_lse": True, "backend": backend}
    return ops.compressed_attention(p.q, *summaries, num_keys=s.tokens, **options)


def selection(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """The choice of blocks, given the summaries and what attention to them left."""
    s = p.shape
    options = {"length": s.length, "stride": s.stride, "backend": backend}
    ids = ops.select_blocks(
        p.q, p.tensors["k_cmp"], p.tensors["lse"], top_n=s.slots, block_size=s.block_size, **options
    )
    return (ids,)


def indexing(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """The choice by an indexer: `group` heads a list, keys of the first head for all."""
    s = p.shape
    ids = ops.index_blocks(
        p.q, p.k[:, :, 0], p.tensors["g_idx"], top_n=s.slots, block_size=s.block_size,
        kv_heads=s.kv_heads, backend=backend,
    )  # fmt: skip
    return (ids,)


def lists_and_window(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Attention to the lists and to the latest keys, in one launch where there is one."""
    options = {"block_size": p.shape.block_size, "window_size": p.window_size, "backend": backend}
    return ops.selected_and_window_attention(p.q, p.k, p.v, p.block_indices, **options)


def pooling(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Means of keys and of values."""
    options = {"length": p.shape.length, "stride": p.shape.stride, "backend": backend}
    return tuple(ops.compress(x, **options) for x in (p.k, p.v))


def gates(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Three outputs, each times its gate, added up."""
    factors, outputs = ([p.tensors[x] for x in names] for names in (GATES, BRANCHES))
    if checks.choose_backend(backend, outputs[0], "o_cmp") == "reference":
        return (gated_sum(factors, outputs),)
    return (library.gated_sum(factors, outputs, backend),)


def native(p: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Native Sparse Attention, from queries, keys, values and gates."""
    s = p.shape
    o = ops.native_sparse_attention(
        p.q, p.k, p.v, *(p.tensors[x] for x in GATES), block_counts=s.slots,
        block_size=s.block_size, window_size=p.window_size, length=s.length, stride=s.stride,
        nonnegative_gates=True, backend=backend,
    )  # fmt: skip
    return (o,)


# -- what follows from what is drawn --


def _with_summaries(p: Inputs) -> Inputs:
    k_cmp, v_cmp = pooling(p, "reference")
    return p.with_tensors(k_cmp=k_cmp, v_cmp=v_cmp)


def _with_lse(p: Inputs) -> Inputs:
    """Summaries of keys, and the log-sum-exp of their scores, for which no values are needed."""
    options = {"length": p.shape.length, "stride": p.shape.stride, "backend": "reference"}
    k_cmp = ops.compress(p.k, **options)
    p = p.with_tensors(k_cmp=k_cmp, v_cmp=k_cmp[..., :1].contiguous())
    return p.with_tensors(lse=compressed(p, "reference")[1])


# -- the parts of `native` --


def with_choice(p: Inputs, backend: str) -> Inputs:
    """A problem of `native` with the summaries and the lists that the same backend makes of it, by
    which its output is judged: bit by bit, they are those of the whole call."""
    k_cmp, v_cmp = pooling(p, backend)
    p = p.with_tensors(k_cmp=k_cmp, v_cmp=v_cmp)
    p = p.with_tensors(lse=compressed(p, backend)[1])
    (ids,) = selection(p, backend)
    return replace(p, block_indices=ids)


def parts_of(p: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The parts of a problem from `with_choice`, each a problem of its own. What comes from above
    is of the right size and stands for the real numbers: they take as long."""
    above = {"d_k_cmp": p.tensors["k_cmp"], "d_v_cmp": p.tensors["v_cmp"]}
    yield "summaries", replace(p, operator="pooling").with_tensors(**above)
    yield "attention to summaries", replace(p, operator="compressed")
    yield "choice of blocks", replace(p, operator="selection")
    yield "attention to lists", replace(p, operator="selected")
    yield "window", replace(p, operator="window")
    above = {"d_o_slc": p.d_o, "d_o_swa": p.d_o}
    yield "lists and window at once", replace(p, operator="lists_and_window").with_tensors(**above)
    branches = {x: p.d_o.clone() for x in BRANCHES}
    yield "gates", replace(p, operator="gates").with_tensors(**branches)


_QKV = ("q", "k", "v")
OPERATORS = {
    "selected": Operator(
        "selected_attention: each query attends to a list of blocks",
        _QKV, ("o",), (*_QKV, "d_o"), selected,
        ("group", "block_size", "slots"),
    ),
    "window": Operator(
        "sliding_window_attention over slots * block-size keys",
        _QKV, ("o",), (*_QKV, "d_o"), window,
        ("group", "block_size", "slots"),
    ),
    "compressed": Operator(
        "compressed_attention: each query attends to the summaries of its past",
        ("q", "k_cmp", "v_cmp"), ("o",), (*_QKV, "d_o"), compressed,
        ("group", "length", "stride"), _with_summaries,
    ),
    "selection": Operator(
        "select_blocks: each query's choice of blocks, given k_cmp and lse",
        (), ("ids",), ("q", "k"), selection,
        ("group", "block_size", "slots", "length", "stride"), _with_lse, has_dense=False,
    ),
    "indexing": Operator(
        "index_blocks: each query's choice by an indexer of kv-heads * group heads",
        (), ("ids",), ("q", "k", "g_idx"), indexing,
        ("group", "block_size", "slots"), has_dense=False,
    ),
    "pooling": Operator(
        "compress: means of keys and of values",
        ("k", "v"), ("k_cmp", "v_cmp"), ("k", "v", "d_k_cmp", "d_v_cmp"), pooling,
        ("length", "stride"), has_dense=False,
    ),
    "gates": Operator(
        "the gated sum of three branches",
        (*GATES, *BRANCHES), ("o",), (*GATES, *BRANCHES, "d_o"), gates, ("group",),
        has_dense=False,
    ),
    "lists_and_window": Operator(
        "", _QKV, ("o_slc", "o_swa"), (*_QKV, "d_o_slc", "d_o_swa"), lists_and_window,
        ("group", "block_size", "slots", "window"),
    ),
    "native": Operator(
        "native_sparse_attention from q, k, v and gates: summaries, choice, three branches",
        (*_QKV, *GATES), ("o",), (*_QKV, "d_o", *GATES), native,
        ("group", "block_size", "slots", "length", "stride", "window"),
    ),
}  # fmt: skip
CHOOSING = ("selection", "native")  # those whose lists follow from the queries
