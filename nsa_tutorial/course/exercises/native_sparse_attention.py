"""Exercises of chapter 08: the gated sum, what is loaded, a test that finds broken implementations,
and the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.exact.grouped_query_attention import attention, expand_kv_heads


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- gated_sum --


def gated_sum(gates: list[Tensor | None], outputs: list[Tensor | None]) -> Tensor:
    """The outputs [B, N, HQ, DV], each times its gate [B, N, HQ], added up; a gate of None leaves
    its branch out."""
    total = 0
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            total = total + g[..., None] * o  # [B, N, HQ, 1] times [B, N, HQ, DV]
    return total


def _used(gates: list, outputs: list) -> tuple[Tensor, Tensor]:
    """Gates and outputs of the branches in use, stacked."""
    pairs = [(g, o) for g, o in zip(gates, outputs, strict=True) if g is not None]
    return torch.stack([g for g, _ in pairs]), torch.stack([o for _, o in pairs])


def _sum_divided(gates: list, outputs: list) -> Tensor:
    g, o = _used(gates, outputs)
    return (g[..., None] * o).sum(0) / g.sum(0)[..., None]


def _sum_softmax(gates: list, outputs: list) -> Tensor:
    g, o = _used(gates, outputs)
    return (torch.softmax(g, 0)[..., None] * o).sum(0)


def _sum_averaged(gates: list, outputs: list) -> Tensor:
    g, o = _used(gates, outputs)
    return (g[..., None] * o).sum(0) / len(g)


def _sum_three(gates: list, outputs: list) -> Tensor:
    return gated_sum(gates, outputs) / 3


def _sum_sigmoid(gates: list, outputs: list) -> Tensor:
    return gated_sum([None if g is None else torch.sigmoid(g) for g in gates], outputs)


def _sum_last_axis(gates: list, outputs: list) -> Tensor:
    return sum(g * o for g, o in zip(gates, outputs, strict=True) if g is not None)


def _sum_other_axis(gates: list, outputs: list) -> Tensor:
    turned = [None if g is None else g.transpose(1, 2).reshape(g.shape) for g in gates]
    return gated_sum(turned, outputs)


def _sum_one_per_token(gates: list, outputs: list) -> Tensor:
    return gated_sum([None if g is None else g.mean(2, keepdim=True) for g in gates], outputs)


def _sum_none_is_one(gates: list, outputs: list) -> Tensor:
    found = [o for o in outputs if o is not None]
    pairs = zip(gates, outputs, strict=True)
    return sum(
        torch.zeros_like(found[0]) if o is None else o if g is None else g[..., None] * o
        for g, o in pairs
    )


def _branches(
    B: int, N: int, HQ: int, DV: int, seed: int, off: tuple[int, ...] = (), missing: bool = False
) -> Callable:
    def arguments() -> tuple:
        g = [None if i in off else 0.5 + _random(B, N, HQ, seed=seed + i).abs() for i in range(3)]
        o = [
            None if i in off and missing else _random(B, N, HQ, DV, seed=seed + 3 + i)
            for i in range(3)
        ]
        return g, o

    return arguments


_GATED_SUM = Exercise(
    name="gated_sum",
    statement="""
Equation 5. `gates` are three tensors `[B, N, HQ]`, `outputs` three tensors `[B, N, HQ, DV]`, of
compression, selection and window. A gate of `None` leaves its branch out, and then its output may
be `None` too. At least one branch is there. Return the gated sum `[B, N, HQ, DV]`. The gates are
used as given.
""",
    minutes=4,
    difficulty=1,
    solution=gated_sum,
    misconceptions=(
        Misconception(
            "dividing by the sum of the gates",
            _sum_divided,
            "These are not weights of an average. Nothing asks gates to sum to 1, and the model "
            "uses that: how much does a head "
            "say when all of its gates are small?",
        ),
        Misconception(
            "a softmax over the branches",
            _sum_softmax,
            "The branches do not compete for one unit of weight. Each gate is its own number, "
            "and here it is final.",
        ),
        Misconception(
            "averaging over the branches in use",
            _sum_averaged,
            "Equation 5 is a sum. Where does it divide by the number of branches?",
        ),
        Misconception(
            "dividing by three",
            _sum_three,
            "Equation 5 is a sum. What should one branch with a gate of 1 give?",
        ),
        Misconception(
            "applying the sigmoid once more",
            _sum_sigmoid,
            "The gates come out of the layer's sigmoid already. What would a gate of 0 become?",
        ),
        Misconception(
            "lining the gate up with the width",
            _sum_last_axis,
            "PyTorch lines shapes up from the right: in `g * o` the last axis of `g`, the heads, "
            "meets the last axis of `o`, the "
            "width. Where does the gate need an axis of length 1?",
        ),
        Misconception(
            "mixing up tokens and heads of the gates",
            _sum_other_axis,
            "A gate is `[B, N, HQ]`, tokens before heads, exactly like the output. Reshaping is "
            "not needed; with N = HQ a mistake "
            "here would not even show in the shapes.",
        ),
        Misconception(
            "one gate per token for all heads",
            _sum_one_per_token,
            "Each head has a gate of its own: one head of a token may live on its window while "
            "another closes it.",
        ),
        Misconception(
            "taking None for a gate of 1",
            _sum_none_is_one,
            "None leaves the branch out; it contributes nothing, even where an output was "
            "computed.",
        ),
    ),
    cases=(
        Case(
            "one token, one head, width 1",
            lambda: (
                [torch.full((1, 1, 1), g) for g in (0.5, 1.0, 0.25)],
                [torch.full((1, 1, 1, 1), o) for o in (2.0, 3.0, 8.0)],
            ),
        ),
        Case("two tokens, three heads, width 2", _branches(1, 2, 3, 2, seed=0)),
        Case("as many tokens as heads", _branches(2, 3, 3, 4, seed=10)),
        Case("as many heads as the values are wide", _branches(1, 4, 3, 3, seed=20)),
        Case("no compression", _branches(1, 2, 1, 2, seed=30, off=(0,), missing=True)),
        Case("no selection, though its output is there", _branches(1, 3, 4, 2, seed=40, off=(1,))),
        Case("the window alone", _branches(1, 3, 2, 4, seed=50, off=(0, 1), missing=True)),
    ),
)


# -- keys_loaded --


def keys_loaded(
    t: int, ids: list[int], block_size: int, window_size: int, length: int, stride: int
) -> tuple[int, int, int, int]:
    """Keys that the query at position t loads: (summaries, selected, window, all together)."""
    summaries = max((t + 1 - length) // stride + 1, 0)  # those that end by t
    selected = 0
    for block in ids:
        if block >= 0:
            start = block * block_size
            selected += max(min(start + block_size, t + 1) - start, 0)  # the own block only up to t
    window = min(window_size, t + 1)
    return summaries, selected, window, summaries + selected + window


def _loaded(change: str) -> Callable:
    """A wrong `keys_loaded`, with one change."""

    def wrong(
        t: int, ids: list[int], block_size: int, window_size: int, length: int, stride: int
    ) -> tuple[int, ...]:
        if change == "from one":
            t = t - 1
        summaries = max((t + 1 - length) // stride + 1, 0)
        keys = [range(b * block_size, min((b + 1) * block_size, t + 1)) for b in ids if b >= 0]
        selected, window = sum(map(len, keys)), min(window_size, t + 1)
        if change == "no lag":
            summaries = t // stride + 1  # those that have begun
        if change == "no overlap":
            summaries = (t + 1) // length
        if change == "below zero":
            summaries = (t + 1 - length) // stride + 1
        if change == "one early":
            summaries = max((t + 2 - length) // stride + 1, 0)
        if change == "whole blocks":
            selected = block_size * sum(b >= 0 and b * block_size <= t for b in ids)
        if change == "slots":
            selected = block_size * len(ids)
        if change == "short window":
            window = min(window_size, t)
        if change == "full window":
            window = window_size
        total = summaries + selected + window
        if change == "distinct":
            seen = {i for part in keys for i in part} | set(range(t + 1 - window, t + 1))
            total = summaries + len(seen)
        return summaries, selected, window, total

    return wrong


_KEYS_LOADED = Exercise(
    name="keys_loaded",
    statement="""
One query at position `t` (counted from 0), causal. Its list `ids` names distinct blocks of
`block_size` tokens, none of them in its future, its own perhaps among them; `-1` is an empty slot.
The window has `window_size` keys, the query's own included. Summaries cover `length` tokens, one
begins every `stride`, and a query sees those that have ended. Return four whole numbers: how many
summary keys, selected keys and window keys the query loads, each branch for itself, and how many
keys that is all together.
""",
    minutes=7,
    difficulty=2,
    solution=keys_loaded,
    misconceptions=(
        Misconception(
            "counting a key once that two branches load",
            _loaded("distinct"),
            "Three branches are three attentions. A key that lies in the list and in the window "
            "is loaded by both: in the layer "
            "even from two different tensors.",
        ),
        Misconception(
            "counting summaries that have begun but not ended",
            _loaded("no lag"),
            "A summary is of tokens up to its end. What would a query learn from one that ends "
            "after it?",
        ),
        Misconception(
            "a negative number of summaries",
            _loaded("below zero"),
            "The formula goes on below zero where no window has ended yet. How few summaries can "
            "a query load?",
        ),
        Misconception(
            "counting summaries as if they did not overlap",
            _loaded("no overlap"),
            "A new one begins every `stride` tokens, not every `length`.",
        ),
        Misconception(
            "showing a summary one token early",
            _loaded("one early"),
            "Summary j covers tokens j·stride to j·stride + length − 1. At which t is the last "
            "of them there?",
        ),
        Misconception(
            "taking t for the number of keys so far",
            _loaded("from one"),
            "Positions are counted from 0. How many keys are there for the query at position 0?",
        ),
        Misconception(
            "counting the own block as a whole",
            _loaded("whole blocks"),
            "Part of the query's own block lies in its future. How many of the block's keys are "
            "at t or before?",
        ),
        Misconception(
            "counting the slots, empty ones included",
            _loaded("slots"),
            "A slot of −1 loads nothing, and one block may be only partly in the past.",
        ),
        Misconception(
            "a window of the keys before the query, without its own",
            _loaded("short window"),
            "The query at position t can see t + 1 keys: its own is one of them. Look at the "
            "first few positions.",
        ),
        Misconception(
            "a full window at the start of the text",
            _loaded("full window"),
            "The query at position 2 has only three keys to see, however wide the window is.",
        ),
    ),
    cases=(
        Case("position 2 of the text, nothing but its own block", lambda: (2, [0, -1], 4, 5, 4, 2)),
        Case("position 0: no summary for a long time", lambda: (0, [0, -1], 4, 5, 6, 2)),
        Case("position 11, the last of its block", lambda: (11, [0, 2], 4, 5, 4, 2)),
        Case("position 12, the first of its block", lambda: (12, [0, 2, 3], 4, 5, 4, 2)),
        Case("a summary ends just now", lambda: (13, [0, 1, 3], 4, 3, 6, 4)),
        Case("a summary ends at the next token", lambda: (12, [1, 3, -1], 4, 20, 6, 4)),
        Case(
            "the paper's settings, the last of 65,536 tokens",
            lambda: (65_535, [0, *range(1009, 1024)], 64, 512, 32, 16),
        ),
    ),
)


# -- selects_like_dense --
#
# The cases are implementations of native sparse attention, right ones and broken ones; the reader's
# function judges them.


def _nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    block_indices: Tensor,
    block_size: int,
) -> Tensor:
    """A right one: the operator itself, with short summaries and a short window."""
    return ops.native_sparse_attention(
        q,
        k,
        v,
        *gates,
        block_indices=block_indices,
        block_size=block_size,
        block_counts=None,
        length=4,
        stride=2,
        window_size=3,
    )


def _nsa_rounded(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    return _nsa(q.double(), k.double(), v.double(), gates, block_indices, block_size).to(
        v.dtype
    ) * (1 + 2e-6)


def _nsa_selection_alone(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """The other two branches are not written yet."""
    o = ops.selected_attention(
        q.double(), k.double(), v.double(), block_indices, block_size=block_size
    ).to(v.dtype)
    return gates[1][..., None] * o * (1 + 2e-6)


def _nsa_gates_divided(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    total = sum(gates).clamp(min=1e-6)
    return _nsa(q, k, v, tuple(g / total for g in gates), block_indices, block_size)


def _nsa_gates_twice(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    return _nsa(q, k, v, tuple(torch.sigmoid(g) for g in gates), block_indices, block_size)


def _nsa_no_mask(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """Whole blocks are seen, the future part of the own one too."""
    N, M = q.shape[1], k.shape[1]
    key = torch.arange(M)
    end = (torch.arange(M - N, M) // block_size + 1) * block_size
    scores = (
        torch.einsum("bnhd,bmhd->bhnm", q, expand_kv_heads(k, q.shape[2] // k.shape[2]))
        * q.shape[3] ** -0.5
    )
    weights = torch.softmax(scores.masked_fill(key >= end[:, None], -torch.inf), -1)
    o = torch.einsum("bhnm,bmhd->bnhd", weights, expand_kv_heads(v, q.shape[2] // k.shape[2]))
    return gates[1][..., None] * o


def _nsa_no_scale(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    return _nsa(q * q.shape[3] ** 0.5, k, v, gates, block_indices, block_size)


def _nsa_rough_log2(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """log2(e) as 1.4 in place of 1.4427."""
    return _nsa(q * (1.4 / 1.442695), k, v, gates, block_indices, block_size)


def _nsa_heads_repeated(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """Query head hq reads KV head hq % H."""
    G = q.shape[2] // k.shape[2]
    return _nsa(
        q,
        k.repeat(1, 1, G, 1),
        v.repeat(1, 1, G, 1),
        gates,
        block_indices.repeat(1, 1, G, 1),
        block_size,
    )


def _nsa_one_query_a_group(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """All heads of a group use the query of its first head."""
    G = q.shape[2] // k.shape[2]
    return _nsa(expand_kv_heads(q[:, :, ::G], G), k, v, gates, block_indices, block_size)


def _nsa_no_tail(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """A last block that is not full is not loaded."""
    short = block_indices >= k.shape[1] // block_size
    return _nsa(q, k, v, gates, block_indices.masked_fill(short, -1), block_size)


def _nsa_first_slot(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """Only the last block of the walk is kept: the accumulator is overwritten, not added to."""
    own = (torch.arange(q.shape[1]) // block_size)[None, :, None, None].expand(
        *block_indices.shape[:3], 1
    )
    return _nsa(q, k, v, gates, own, block_size)


def _nsa_window_always(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """The window's gate is ignored: that branch is always open."""
    return _nsa(q, k, v, (gates[0], gates[1], torch.ones_like(gates[2])), block_indices, block_size)


def selects_like_dense(nsa: Callable) -> bool:
    """Whether nsa, with every block listed and only the selection's gate open, is dense causal
    attention."""
    # a ragged last block; several KV heads, several query heads on each
    B, N, H, G, D, block_size = 1, 21, 2, 3, 8, 4
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, N, H * G, D, generator=generator)
    k = torch.randn(B, N, H, D, generator=generator)
    v = torch.randn(B, N, H, D, generator=generator)
    gates = tuple(torch.full((B, N, H * G), g) for g in (0.0, 1.0, 0.0))
    every_block = torch.arange(-(-N // block_size)).expand(B, N, H, -1)
    o = nsa(q, k, v, gates, every_block, block_size)
    return o.shape == q.shape and torch.allclose(o, attention(q, k, v), atol=1e-4)


def _property(
    N: int = 21,
    H: int = 2,
    G: int = 3,
    compare: str = "all",
    atol: float = 1e-4,
    values: str = "random",
    others: float = 0.0,
) -> Callable:
    """A test that is weaker than it should be, or too strict."""

    def weak(nsa: Callable) -> bool:
        q, k, v = (_random(1, N, heads, 8, seed=heads) for heads in (H * G, H, H))
        v = torch.ones_like(v) if values == "ones" else v.flip(1)
        gates = tuple(torch.full((1, N, H * G), g) for g in (others, 1.0, others))
        o = nsa(q, k, v, gates, torch.arange(-(-N // 4)).expand(1, N, H, -1), 4)
        expected = attention(q, k, v)
        if compare == "shape":
            return o.shape == expected.shape
        if compare == "exact":
            return torch.equal(o, expected)
        if compare == "last":
            return torch.allclose(o[:, -1], expected[:, -1], atol=atol)
        return torch.allclose(o, expected, atol=atol)

    return weak


_SELECTS_LIKE_DENSE = Exercise(
    name="selects_like_dense",
    statement="""
Write a test. `nsa` is somebody's implementation, called as
`nsa(q, k, v, gates, block_indices, block_size)`: `q` `[B, N, HQ, D]`, `k` and `v` `[B, N, H, D]`,
`gates` a tuple of three `[B, N, HQ]`, `block_indices` `[B, N, H, S]`; it returns `[B, N, HQ, D]`.
Return `True` if it keeps this property, and `False` if not: **with every block listed for every
query, and gates (0, 1, 0), it equals dense causal attention**, up to differences of 1e-4. Make
inputs (fp32, seeded, some 20 tokens) on which a broken one cannot hide: with several blocks of
several tokens, and several query heads on each of several KV heads. As the truth you may use
`gqa.attention(q, k, v)` of chapter 02, which is causal.

The cases hand your test right implementations and broken ones. (Two break other rules and keep this
one: `True`.)
""",
    minutes=12,
    difficulty=3,
    solution=selects_like_dense,
    misconceptions=(
        Misconception(
            "a test that compares only shapes",
            _property(compare="shape"),
            "A kernel that returns noise of the right shape passes this. What should the numbers "
            "be?",
        ),
        Misconception(
            "a test with a tolerance so wide that small mistakes pass",
            _property(atol=0.1),
            "Rounding in fp32 is a millionth or so. A tolerance of tenths lets a wrong constant "
            "through, for instance a rough log2(e).",
        ),
        Misconception(
            "a test that right implementations fail",
            _property(compare="exact"),
            "Even the operator fails your test. Is every block listed, a last one that is not "
            "full included, and are the gates "
            "(0, 1, 0)? And does it allow for rounding? Two right implementations add the same "
            "numbers in different orders.",
        ),
        Misconception(
            "a test with a single block",
            _property(N=4),
            "With N = block_size the walk has one step. What of mistakes from the second block on, "
            "and of a last block that is not full?",
        ),
        Misconception(
            "a test in which the blocks divide the text",
            _property(N=20),
            "Texts end where they like. What does an implementation do with a last block that is "
            "not full?",
        ),
        Misconception(
            "a test with as many KV heads as query heads",
            _property(H=3, G=1),
            "With groups of one head, nothing is shared, and no mistake in the sharing can show.",
        ),
        Misconception(
            "a test with a single KV head",
            _property(H=1, G=4),
            "If there is one KV head, every query head reads it, rightly or by accident.",
        ),
        Misconception(
            "a test that looks at the last query only",
            _property(compare="last"),
            "The last query sees everything and has no future to look into. Which queries have?",
        ),
        Misconception(
            "a test whose values are all the same",
            _property(values="ones"),
            "An average of equal values is that value, whatever the weights. Your test cannot "
            "see the weights.",
        ),
        Misconception(
            "a test with all gates open",
            _property(others=1.0),
            "With gates (1, 1, 1) the output is a sum of three attentions: no right "
            "implementation equals dense attention then.",
        ),
    ),
    cases=(
        Case("the operator: right", lambda: (_nsa,)),
        Case("the operator in fp64, rounded: right", lambda: (_nsa_rounded,)),
        Case("the future part of the own block is visible", lambda: (_nsa_no_mask,)),
        Case("no scale on the scores", lambda: (_nsa_no_scale,)),
        Case("log2(e) taken for 1.4", lambda: (_nsa_rough_log2,)),
        Case("every block overwrites the one before", lambda: (_nsa_first_slot,)),
        Case("a last block that is not full is left out", lambda: (_nsa_no_tail,)),
        Case("query head hq reads KV head hq % H", lambda: (_nsa_heads_repeated,)),
        Case("the heads of a group share one query", lambda: (_nsa_one_query_a_group,)),
        Case("the window's gate is ignored", lambda: (_nsa_window_always,)),
        Case("the gates pass a sigmoid a second time", lambda: (_nsa_gates_twice,)),
        Case(
            "gates divided by their sum: wrong, but not against this property",
            lambda: (_nsa_gates_divided,),
        ),
        Case(
            "the other two branches are missing: not against this property either",
            lambda: (_nsa_selection_alone,),
        ),
    ),
)


# -- three_branches --


def three_branches(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
    top_n: int, block_size: int, window_size: int, length: int, stride: int,
) -> Tensor:  # fmt: skip
    """Native sparse attention from the operators; summaries are means."""
    k_cmp = ops.compress(k, length=length, stride=stride)
    v_cmp = ops.compress(v, length=length, stride=stride)
    o_cmp, lse = ops.compressed_attention(
        q, k_cmp, v_cmp, length=length, stride=stride, return_lse=True
    )
    ids = ops.select_blocks(
        q, k_cmp, lse, top_n=top_n, block_size=block_size, length=length, stride=stride
    )
    o_slc = ops.selected_attention(q, k, v, ids, block_size=block_size)
    o_swa = ops.sliding_window_attention(q, k, v, window_size=window_size)
    return g_cmp[..., None] * o_cmp + g_slc[..., None] * o_slc + g_swa[..., None] * o_swa


def _put_together(change: str) -> Callable:
    """A wrong `three_branches`, with one change."""

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
        top_n: int, block_size: int, window_size: int, length: int, stride: int,
    ) -> Tensor:  # fmt: skip
        sizes = {} if change == "default sizes" else {"length": length, "stride": stride}
        k_cmp, v_cmp = (ops.compress(x, length=length, stride=stride) for x in (k, v))
        o_cmp, lse_cmp = ops.compressed_attention(q, k_cmp, v_cmp, **sizes, return_lse=True)
        own = change == "own block twice"
        scores = ops.compress(v, length=length, stride=stride) if change == "by values" else k_cmp
        ids = ops.select_blocks(q, scores, None, top_n=top_n, block_size=block_size, **sizes)
        if change == "one choice for all":
            ids = ids[:, :, :1].expand_as(ids)
        if change == "of the last query":
            ids = ids[:, -1:].expand_as(ids)
        o_slc, lse_slc = ops.selected_attention(
            q, k, v, ids, block_size=block_size, return_lse=True
        )
        if own:
            late = (
                (torch.arange(q.shape[1]) // block_size)[None, :, None, None]
                .expand(*ids.shape[:3], 1)
                .to(ids.dtype)
            )
            o_slc = ops.selected_attention(
                q, k, v, torch.cat([ids, late], -1), block_size=block_size
            )
        if change == "blocks of stride":
            o_slc = ops.selected_attention(q, k, v, ids, block_size=stride)
        window = window_size + 1 if change == "wide window" else window_size
        o_swa, lse_swa = ops.sliding_window_attention(q, k, v, window_size=window, return_lse=True)
        if change == "default block size":
            ids = ops.select_blocks(q, k_cmp, None, top_n=top_n, **sizes)
            o_slc = ops.selected_attention(q, k, v, ids)
        if change == "by lse":
            weights = torch.softmax(torch.stack([lse_cmp, lse_slc, lse_swa]), 0)
            return sum(
                w[..., None] * o for w, o in zip(weights, (o_cmp, o_slc, o_swa), strict=True)
            )
        gates = (g_cmp, g_swa, g_slc) if change == "swapped gates" else (g_cmp, g_slc, g_swa)
        total = sum(g[..., None] * o for g, o in zip(gates, (o_cmp, o_slc, o_swa), strict=True))
        return total / sum(gates)[..., None] if change == "normalised" else total

    return wrong


def _whole(B: int, N: int, HQ: int, H: int, D: int, DV: int, seed: int, **sizes: int) -> Callable:
    def arguments() -> tuple:
        q, k, v = (
            _random(B, N, *shape, seed=seed + i, factor=1.5)
            for i, shape in enumerate(((HQ, D), (H, D), (H, DV)))
        )
        gates = [torch.sigmoid(_random(B, N, HQ, seed=seed + 3 + i)) for i in range(3)]
        return (
            q,
            k,
            v,
            *gates,
            *(sizes[name] for name in ("top_n", "block_size", "window_size", "length", "stride")),
        )

    return arguments


_THREE_BRANCHES = Exercise(
    name="three_branches",
    statement="""
All of it, for given gates. `q` `[B, N, HQ, D]`, `k` `[B, N, H, D]`, `v` `[B, N, H, DV]`, gates
`[B, N, HQ]`, and the sizes. Put it together from `ops.compress` (means),
`ops.compressed_attention`, `ops.select_blocks`, `ops.selected_attention` and
`ops.sliding_window_attention`, and return the gated sum `[B, N, HQ, DV]`. Do not call
`ops.native_sparse_attention`. (The first and the two latest blocks are forced, as `select_blocks`
does unless told otherwise.)
""",
    minutes=8,
    difficulty=2,
    solution=three_branches,
    misconceptions=(
        Misconception(
            "leaving length and stride at their defaults",
            _put_together("default sizes"),
            "Summaries do not tell how they were made. Every operator that takes them has to be "
            "told `length` and `stride`.",
        ),
        Misconception(
            "leaving the block size at its default",
            _put_together("default block size"),
            "A block of 64 tokens holds all of these short texts. Which two operators have to be "
            "told `block_size`?",
        ),
        Misconception(
            "choosing blocks by the summaries of the values",
            _put_together("by values"),
            "A query is compared with keys. Of which tensor are the summaries that decide?",
        ),
        Misconception(
            "swapping the gates of selection and window",
            _put_together("swapped gates"),
            "The order is compression, selection, window. Which output does each gate stand "
            "beside?",
        ),
        Misconception(
            "merging the branches by their LSE",
            _put_together("by lse"),
            "That is exact for disjoint sets of keys. These branches overlap, one of them reads "
            "summaries, "
            "and the gates were given.",
        ),
        Misconception(
            "dividing by the sum of the gates",
            _put_together("normalised"),
            "Equation 5 is a sum. The gates are used as given.",
        ),
        Misconception(
            "listing the own block twice",
            _put_together("own block twice"),
            "`select_blocks` has forced the query's own block into the list already. A block "
            "that is listed twice counts twice.",
        ),
        Misconception(
            "one list for all KV heads",
            _put_together("one choice for all"),
            "The query heads of a group share a list. Different groups read different keys and "
            "choose for themselves.",
        ),
        Misconception(
            "one list for all queries",
            _put_together("of the last query"),
            "Every query chooses anew, by its own scores, among the blocks of its own past.",
        ),
        Misconception(
            "taking the stride for the block size",
            _put_together("blocks of stride"),
            "The list names blocks of `block_size` tokens: the attention that reads the list has "
            "to cut the text in the same way.",
        ),
        Misconception(
            "a window one key too wide",
            _put_together("wide window"),
            "`window_size` counts the query's own key too.",
        ),
    ),
    cases=(
        Case(
            "12 tokens, one head",
            _whole(
                1, 12, 1, 1, 4, 3, seed=0, top_n=3, block_size=2, window_size=3, length=4, stride=1
            ),
        ),
        Case(
            "29 tokens, four heads on two KV heads",
            _whole(
                1, 29, 4, 2, 4, 5, seed=10, top_n=4, block_size=4, window_size=5, length=4, stride=2
            ),
        ),
        Case(
            "two texts of 45 tokens, six heads on two",
            _whole(
                2, 45, 6, 2, 8, 8, seed=20, top_n=5, block_size=6, window_size=7, length=6, stride=3
            ),
        ),
        Case(
            "five tokens: no summary yet",
            _whole(
                1, 5, 2, 1, 4, 4, seed=30, top_n=3, block_size=2, window_size=2, length=8, stride=4
            ),
        ),
    ),
)


EXERCISES = (_GATED_SUM, _KEYS_LOADED, _SELECTS_LIKE_DENSE, _THREE_BRANCHES)
