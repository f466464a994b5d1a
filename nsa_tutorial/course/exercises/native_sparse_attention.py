"""Exercises of chapter 08: the gated sum, the whole, a test that finds broken implementations, the
gated sum as a kernel, and what is loaded."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from types import CodeType

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import recorder
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


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


def _branches(
    B: int, N: int, HQ: int, DV: int, seed: int, off: tuple[int, ...] = (), missing: bool = False,
    trained: bool = False,
) -> Callable:  # fmt: skip
    def arguments() -> tuple:
        g = [None if i in off else 0.5 + _random(B, N, HQ, seed=seed + i).abs() for i in range(3)]
        o = [_random(B, N, HQ, DV, seed=seed + 3 + i) for i in range(3)]
        if missing:
            o = [None if i in off else x for i, x in enumerate(o)]
        if trained:  # PyTorch refuses to overwrite these
            for x in (*g, *o):
                x.requires_grad_()
        return g, o

    return arguments


_GATED_SUM = TEXTS.exercise(
    "gated_sum",
    minutes=5,
    difficulty=1,
    solution=gated_sum,
    misconceptions=diffs(gated_sum, [
        ("+ g", "+ (g / sum(x for x in gates if x is not None))",
         "dividing by the sum of the gates",
         "Gates are no weights of an average, and nothing asks them to sum to 1. How much does "
         "a head say when all of its gates are small?"),
        ("+ g", "+ (torch.exp(g) / sum(torch.exp(x) for x in gates if x is not None))",
         "a softmax over the branches",
         "The branches do not compete for one unit of weight. Each gate is a number of its own. "
         "What should gates of 1, 1 and 1 give?"),
        ("+ g", "+ torch.softmax(g, -1)", "a softmax over the heads",
         "Along that axis the heads of a token compete with each other. Equation 5 has no "
         "softmax at all: what does it do with a gate?"),
        ("+ g", "+ (g / sum(x is not None for x in gates))", "averaging over the branches in use",
         "Equation 5 is a sum. Where does it divide by the number of branches?"),
        ("+ g", "+ (g / 3)", "dividing by three",
         "Equation 5 is a sum. What should one branch with a gate of 1 give?"),
        ("+ g", "+ torch.ones_like(g)", "adding up the outputs without their gates",
         "What all three branches see is then counted three times. Which number belongs to each "
         "output?"),
        ("[..., None]", ".sigmoid()[..., None]", "applying the sigmoid once more",
         "The gates come out of the layer's sigmoid already. What would a gate of 0 become?"),
        ("[..., None]", "", "lining the gate up with the width",
         "PyTorch lines shapes up from the right: in `g * o` the last axis of `g`, the heads, "
         "meets the last axis of `o`, the width. Where does the gate need an axis of length 1?"),
        ("[..., None]", ".transpose(1, 2).reshape(g.shape)[..., None]",
         "mixing up tokens and heads of the gates",
         "A gate is `[B, N, HQ]`, tokens before heads, exactly like the output. Why reshape it?"),
        ("[..., None]", ".mean(2, keepdim=True)[..., None]", "one gate per token for all heads",
         "One head of a token may live on its window while another closes it. How many gates "
         "has a token?"),
        ("if g is not None",
         "if g is None and o is not None:\n            total = total + o\n        if g is not None",
         "taking None for a gate of 1",
         "None leaves the branch out, even where an output was computed. What does it "
         "contribute?"),
        ("if g is not None", "if True", "not allowing for a gate of None",
         "A branch that is left out has None in place of its gate, and perhaps in place of its "
         "output. What should your loop do with it?"),
        ("if g is not None", "if g", "asking a tensor whether it is true",
         "`if g:` wants one yes or no, and a gate holds many numbers; a single 0 would count as "
         "no. You mean to ask whether there is a gate: write `if g is not None`."),
        ("return total", "        return total", "a `return` inside the loop",
         "`return` ends the function at once, so the later branches never get their turn. How "
         "far should the line with `return` be indented?"),
        ("return total", "    return total", "a `return` inside the loop"),
        ("total = 0", "total = outputs[0]\n    total *= 0",
         "wiping the first output out to start the total",
         "`total = outputs[0]` gives the first output a second name. `total *= 0` then zeroes "
         "the output itself, before your loop reads it. Which plain number could the total "
         "start from?"),
        ("total = 0", "total = outputs[0]", "starting the total with the first output",
         "Your loop adds the first output once more, times its gate. Which number does a sum "
         "start from?"),
        ("* o  #", "* o.mul_(1)  #", "overwriting the tensors that were handed in",
         "`o *= g` writes into the caller's own tensor, and training still needs what stood "
         "there. Which product makes a new tensor?"),
    ]),
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
        Case("tensors with gradients, as in training",
             _branches(1, 4, 2, 3, seed=60, trained=True)),
    ),
)  # fmt: skip


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


_KEYS_LOADED = TEXTS.exercise(
    "keys_loaded",
    minutes=7,
    difficulty=2,
    solution=keys_loaded,
    misconceptions=diffs(keys_loaded, [
        ("selected + window",
         "selected + window - sum(i // block_size in ids for i in range(t + 1 - window, t + 1))",
         "counting a key once that two branches load",
         "Three branches are three attentions. In the layer they even read different tensors. "
         "How often is a key loaded that lies in the list and in the window?"),
        ("(t + 1 - length) // stride + 1", "t // stride + 1",
         "counting summaries that have begun but not ended",
         "A summary is of tokens up to its end. What would a query learn from one that ends "
         "after it?"),
        ({"summaries = max(": "summaries = (", ", 0)  # those": ")  # those"},
         "a negative number of summaries",
         "The formula goes on below zero where no summary has ended yet. How few summaries can "
         "a query load?"),
        ("(t + 1 - length) // stride + 1", "(t + 1) // length",
         "counting summaries as if they did not overlap",
         "A new one begins every `stride` tokens, not every `length`. Where does the second one "
         "begin?"),
        ("(t + 1 - length) // stride + 1", "(t + 2 - length) // stride + 1",
         "showing a summary one token early",
         "Summary j covers tokens j·stride to j·stride + length − 1. At which t is the last of "
         "them there?"),
        ("(t + 1 - length) // stride + 1", "(t - length) // stride + 1",
         "showing a summary one token late",
         "Summary 0 ends with token length − 1, and the query at that position sees it. Which "
         "of your numbers is one too small?"),
        ("(t + 1 - length) // stride + 1", "(t + 1 - length) / stride + 1",
         "counting fractions of a summary",
         "A summary has ended, or it has not: the query never loads half of one. Which division "
         "rounds down?"),
        ("(t + 1 - length) // stride + 1", "max(t + 1 - length, 0) // stride + 1",
         "counting the first summary before it has ended",
         "The first summary ends at position length − 1. What does your formula give at the "
         "positions before?"),
        ('all together)."""', 'all together)."""\n    t = t - 1',
         "taking t for the number of keys so far",
         "Positions are counted from 0. How many keys are there for the query at position 0?"),
        ("max(min(start + block_size, t + 1) - start, 0)", "block_size",
         "counting the own block as a whole",
         "Part of the query's own block lies in its future. How many of the block's keys are at "
         "t or before?"),
        ("max(min(start + block_size, t + 1) - start, 0)",
         "max(min(start + block_size, t) - start, 0)",
         "counting the own block up to the key before the query",
         "The query sees its own key, too. Does the range of your last block end at t, or "
         "behind it?"),
        ({"if block >= 0": "if True",
          "max(min(start + block_size, t + 1) - start, 0)": "block_size"},
         "counting the slots, empty ones included",
         "A slot of −1 loads nothing, and one block may be only partly in the past. How many "
         "keys does each slot bring?"),
        ("max(min(start + block_size, t + 1) - start, 0)", "1",
         "counting blocks where keys are meant",
         "The list names blocks, and the query loads the keys in them. How many keys has a "
         "block that lies wholly in the past?"),
        ("if block >= 0", "if True", "taking -1 for a block",
         "−1 marks an empty slot, and your number of selected keys counts it as a block. How "
         "many keys does an empty slot hold?"),
        ("min(window_size, t + 1)", "min(window_size, t)",
         "a window of the keys before the query, without its own",
         "The query at position t can see t + 1 keys: its own is one of them. What does the "
         "first query of a text load?"),
        ("min(window_size, t + 1)", "window_size", "a full window at the start of the text",
         "The query at position 2 has only three keys to see, however wide the window is. What "
         "limits the count?"),
    ]),
    cases=(
        Case("position 2 of the text, nothing but its own block", lambda: (2, [0, -1], 4, 5, 4, 2)),
        Case("position 0: no summary for a long time", lambda: (0, [0, -1], 4, 5, 6, 2)),
        Case("position 11, the last of its block", lambda: (11, [0, 2], 4, 5, 4, 2)),
        Case("position 12, the first of its block", lambda: (12, [0, 2, 3], 4, 5, 4, 2)),
        Case("a summary ends just now", lambda: (13, [0, 1, 3], 4, 3, 6, 4)),
        Case("a summary ends at the next token", lambda: (12, [1, 3, -1], 4, 20, 6, 4)),
        Case("the paper's settings, the last of 65,536 tokens",
             lambda: (65_535, [0, *range(1009, 1024)], 64, 512, 32, 16)),
    ),
)  # fmt: skip


# -- selects_like_dense --
#
# The cases are implementations of native sparse attention, right ones and broken ones; the reader's
# function judges them.


_TAKES = ("q", "k", "v", "gates", "block_indices", "block_size")


def _implementation(name: str, compute: Callable) -> Case:
    """A case of one implementation. It says what it takes: the chapter's `nsa` takes other
    arguments, and a reader may try those."""

    def someone(*arguments: object, **named: object) -> Tensor:
        wrong = [f"not `{key}`" for key in named if key not in _TAKES]
        if {*named} != {*_TAKES[len(arguments) :]} or len(arguments) > len(_TAKES):
            found = wrong[0] if wrong else f"and got {len(arguments) + len(named)}"
            raise TypeError(f"`someone` takes 6 arguments, {', '.join(_TAKES)}, {found}")
        return compute(*arguments, *(named[key] for key in _TAKES[len(arguments) :]))

    return Case(name, lambda: (someone,))


def _nsa(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """A right one: the operator itself, with short summaries and a short window."""
    return ops.native_sparse_attention(
        q, k, v, *gates, block_indices=block_indices, block_size=block_size, block_counts=None,
        length=4, stride=2, window_size=3,
    )  # fmt: skip


def _nsa_rounded(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return _nsa(q.double(), k.double(), v.double(), *rest).to(v.dtype) * (1 + 2e-6)


def _nsa_selection_alone(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """The other two branches are not written yet."""
    o = ops.selected_attention(q.double(), k.double(), v.double(), ids, block_size=block_size)
    return gates[1][..., None] * o.to(v.dtype) * (1 + 2e-6)


def _zeros_for_none(gates: tuple) -> list[Tensor]:
    """A reader may close a branch with None, as the operator allows."""
    like = next(g for g in gates if g is not None)
    return [torch.zeros_like(like) if g is None else g for g in gates]


def _nsa_gates_divided(q: Tensor, k: Tensor, v: Tensor, gates: tuple, *rest: object) -> Tensor:
    gates = _zeros_for_none(gates)
    total = sum(gates).clamp(min=1e-6)
    return _nsa(q, k, v, tuple(g / total for g in gates), *rest)


def _nsa_gates_twice(q: Tensor, k: Tensor, v: Tensor, gates: tuple, *rest: object) -> Tensor:
    return _nsa(q, k, v, tuple(map(torch.sigmoid, _zeros_for_none(gates))), *rest)


def _nsa_no_mask(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """Whole blocks are seen, the future part of the own one too."""
    N, M = q.shape[1], k.shape[1]
    k, v = (gqa.expand_kv_heads(x, q.shape[2] // x.shape[2]) for x in (k, v))
    end = (torch.arange(M - N, M) // block_size + 1) * block_size
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(torch.arange(M) >= end[:, None], -torch.inf)
    return gates[1][..., None] * torch.einsum("bhnm,bmhd->bnhd", torch.softmax(scores, -1), v)


def _nsa_heads_repeated(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """Query head hq reads KV head hq % H."""
    k, v, ids = (x.repeat(1, 1, q.shape[2] // k.shape[2], 1) for x in (k, v, ids))
    return _nsa(q, k, v, gates, ids, block_size)


def _nsa_first_kv_head(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """The offset of the KV head is forgotten: every query head reads KV head 0."""
    k, v, ids = (x[:, :, :1] for x in (k, v, ids))
    return _nsa(q, k, v, gates, ids, block_size)


def _nsa_one_query_a_group(q: Tensor, k: Tensor, *rest: object) -> Tensor:
    """All heads of a group use the query of its first head."""
    G = q.shape[2] // k.shape[2]
    return _nsa(gqa.expand_kv_heads(q[:, :, ::G], G), k, *rest)


def _nsa_no_tail(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """A last block that is not full is not loaded."""
    ids = ids.masked_fill(ids >= k.shape[1] // block_size, -1)
    return _nsa(q, k, v, gates, ids, block_size)


def _nsa_first_slot(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, ids: Tensor, block_size: int
) -> Tensor:
    """Only the last block of the walk is kept: the accumulator is overwritten, not added to."""
    own = torch.arange(q.shape[1])[None, :, None, None] // block_size
    return _nsa(q, k, v, gates, own.expand(*ids.shape[:3], 1), block_size)


def _nsa_window_always(q: Tensor, k: Tensor, v: Tensor, gates: tuple, *rest: object) -> Tensor:
    """The window's gate is ignored: that branch is always open."""
    return _nsa(q, k, v, (gates[0], gates[1], torch.ones_like(gates[1])), *rest)


def selects_like_dense(someone: Callable) -> bool:
    """Whether someone, with every block listed and only the selection's gate open, is dense causal
    attention."""
    # a ragged last block; several KV heads, several query heads on each
    B, N, H, G, D, block_size = 1, 21, 2, 3, 8, 4
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, N, H * G, D, generator=generator)
    k = torch.randn(B, N, H, D, generator=generator)
    v = torch.randn(B, N, H, D, generator=generator)
    gates = tuple(torch.full((B, N, H * G), g) for g in (0.0, 1.0, 0.0))
    every_block = torch.arange(-(-N // block_size)).expand(B, N, H, -1)
    o = someone(q, k, v, gates, every_block, block_size)
    dense = gqa.attention(q, k, v)
    return o.shape == q.shape and torch.allclose(o, dense, atol=1e-4)


_SELECTS_LIKE_DENSE = TEXTS.exercise(
    "selects_like_dense",
    minutes=20,
    difficulty=3,
    solution=selects_like_dense,
    misconceptions=diffs(selects_like_dense, [
        ("return o.shape == q.shape and torch.allclose(o, dense, atol=1e-4)", "return True",
         "a test that passes whatever comes out",
         "Noise of the right shape might pass, too. Does your test compare every number? How "
         "far off may each one be, and can errors of opposite sign cancel?"),
        ("1e-4", "2.0", "a test with a tolerance so wide that small mistakes pass",
         "A tolerance of tenths lets a wrong constant through, such as a rough log2(e), and so "
         "does a mean over all differences. How large is the rounding of fp32?"),
        ("1e-4", "1.0", "a test with a tolerance so wide that small mistakes pass"),
        ("1e-4", "0.1", "a test with a tolerance so wide that small mistakes pass"),
        ("torch.allclose(o, dense, atol=", "bool((dense - o).max() < ",
         "a comparison without the absolute value",
         "Your test has a limit for errors of one sign only. What does it say of a number that "
         "lies far off on the other side?"),
        ("torch.allclose(o, dense, atol=", "bool((o - dense).max() < ",
         "a comparison without the absolute value"),
        ("torch.allclose(o, dense, atol=", "not torch.allclose(o, dense, atol=",
         "a test that returns the opposite",
         "A right implementation gets `False` from you, and a broken one `True`. Which of the "
         "two should a right one get?"),
        ("torch.allclose(o, dense, atol=", "torch.testing.assert_close(o, dense, rtol=0, atol=",
         "a test that asserts where it should answer",
         "`assert` and `torch.testing.assert_close` raise where something is wrong, and "
         "`assert_close` returns None where all is well. Which comparison gives True or False?"),
        ("torch.allclose(o, dense, atol=1e-4)", "torch.equal(o, dense)",
         "a test that right implementations fail",
         "Even the operator fails your test. Is every block listed, a last one that is not full "
         "included? Are the gates (0, 1, 0)? Do you allow for rounding?"),
        ("21", "4", "a test with a single block",
         "With N = block_size the walk has one step. Which mistakes begin with the second block?"),
        ("21", "20", "a test in which the blocks divide the text",
         "Texts end where they like. What does an implementation do with a last block that is "
         "not full?"),
        ("8, 4", "8, 1", "a test with blocks of one token",
         "A block of one token is never cut, neither by the query nor by the end of the text. "
         "Which mistakes need a block of several tokens?"),
        ("2, 3", "3, 1", "a test with as many KV heads as query heads",
         "With groups of one head, nothing is shared. Which mistakes need a group?"),
        ("2, 3", "1, 4", "a test with a single KV head",
         "If there is one KV head, every query head reads it, rightly or by accident. How many "
         "KV heads does it take to mix them up?"),
        ("dense = gqa.attention(q, k, v)",
         "dense = gqa.attention(q, k, v)\n    o[:, :, 1:] = dense[:, :, 1:]",
         "a test that compares one head only",
         "The first query head reads the first KV head, even where the others go wrong. Which "
         "mistakes show only in the later heads?"),
        ("return", "o[:, :-1] = dense[:, :-1]\n    return",
         "a test that looks at the last query only",
         "The last query sees everything and has no future to look into. Which queries have?"),
        ("v = torch.randn(B, N, H, D, generator=generator)", "v = torch.zeros(B, N, H, D)",
         "a test whose values are all the same",
         "An average of equal values is that value, whatever the weights. Which values let you "
         "see the weights?"),
        ("v = torch.randn(B, N, H, D, generator=generator)", "v = torch.ones(B, N, H, D)",
         "a test whose values are all the same"),
        ("q = torch.randn(B, N, H * G, D, generator=generator)", "q = torch.zeros(B, N, H * G, D)",
         "a test whose scores are all 0",
         "With queries or keys of 0, every visible key has the same weight. Which mistakes in "
         "the scores does your test miss?"),
        ("(0.0, 1.0, 0.0)", "(1.0, 1.0, 1.0)", "a test with all gates open",
         "With gates (1, 1, 1) the output is a sum of three attentions, and no right "
         "implementation equals dense attention. Which branch alone can?"),
    ]),
    cases=(
        _implementation("the operator: right", _nsa),
        _implementation("the operator in fp64, rounded: right", _nsa_rounded),
        _implementation("the future part of the own block is visible", _nsa_no_mask),
        _implementation("no scale on the scores",
                        lambda q, *rest: _nsa(q * q.shape[3] ** 0.5, *rest)),
        _implementation("log2(e) taken for 1.4",
                        lambda q, *rest: _nsa(q * (1.4 / 1.442695), *rest)),
        _implementation("every block overwrites the one before", _nsa_first_slot),
        _implementation("a last block that is not full is left out", _nsa_no_tail),
        _implementation("query head hq reads KV head hq % H", _nsa_heads_repeated),
        _implementation("every query head reads KV head 0", _nsa_first_kv_head),
        _implementation("the heads of a group share one query", _nsa_one_query_a_group),
        _implementation("the window's gate is ignored", _nsa_window_always),
        _implementation("the gates pass a sigmoid a second time", _nsa_gates_twice),
        _implementation("every number is 0.02 too small", lambda *given: _nsa(*given) - 0.02),
        _implementation("every number is 0.02 too large", lambda *given: _nsa(*given) + 0.02),
        _implementation("gates divided by their sum: wrong, but not against this property",
                        _nsa_gates_divided),
        _implementation("the other two branches are missing: not against this property either",
                        _nsa_selection_alone),
    ),
)  # fmt: skip


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


def _by_lse(
    lse: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block_size: int, window_size: int,
    tokens: int = 1,
) -> Tensor:  # fmt: skip
    """The branches' weights in a merge, `[3, B, N, HQ]`; `lse` is that of compression, where each
    summary counts as so many `tokens`."""
    _, of_blocks = ops.selected_attention(q, k, v, ids, block_size=block_size, return_lse=True)
    _, near = ops.sliding_window_attention(q, k, v, window_size=window_size, return_lse=True)
    return torch.softmax(torch.stack([lse + math.log(tokens), of_blocks, near]), 0)


def _with_own_block(ids: Tensor, block_size: int) -> Tensor:
    own = torch.arange(ids.shape[1], dtype=ids.dtype)[None, :, None, None] // block_size
    return torch.cat([ids, own.expand(*ids.shape[:3], 1)], -1)


def _whole(B: int, N: int, HQ: int, H: int, D: int, DV: int, seed: int, **sizes: int) -> Callable:
    def arguments() -> tuple:
        q, k, v = (
            _random(B, N, *shape, seed=seed + i, factor=1.5)
            for i, shape in enumerate(((HQ, D), (H, D), (H, DV)))
        )
        gates = [torch.sigmoid(_random(B, N, HQ, seed=seed + 3 + i)) for i in range(3)]
        return q, k, v, *gates, *sizes.values()

    return arguments


_THREE_BRANCHES = TEXTS.exercise(
    "three_branches",
    minutes=10,
    difficulty=2,
    solution=three_branches,
    misconceptions=diffs(three_branches, [
        ("return g_cmp", "g_cmp", "returning nothing",
         "Does the last line begin with `return`? If it calls your `gated_sum`: is that "
         "exercise solved, and was its cell run?"),
        ("return_lse=True", "return_lse=False", "not asking for the `lse`",
         "An operator returns its output alone, so there is nothing to unpack. Which argument "
         "of `ops.compressed_attention` asks for the `lse`, too?"),
        ({"length=length, stride=stride, ": "", "length=length, stride=stride\n": "\n"},
         "leaving length and stride at their defaults",
         "Summaries do not tell how they were made. Which operators that take them have to be "
         "told `length` and `stride`?"),
        ({"(k, length=length, stride=stride)": "(k)", "(v, length=length, stride=stride)": "(v)",
          "length=length, stride=stride, ": "", "length=length, stride=stride\n": "\n"},
         "making summaries of the paper's sizes",
         "Without `length` and `stride`, `compress` makes summaries of 32 tokens, and most of "
         "these texts are shorter. Which sizes were you given?"),
        ({", block_size=block_size,": ",", ", block_size=block_size)": ")"},
         "a block size that is left out, or is not the given one",
         "With blocks of 64, or of 16, these short texts have few blocks, and all are listed. "
         "Which two operators have to be told `block_size`?"),
        (", block_size=block_size,", ", block_size=length,",
         "telling the block size to the attention alone",
         "`select_blocks` then numbers blocks of another size, 64 tokens if you name none. "
         "Which `block_size` do the two operators get from you?"),
        (", block_size=block_size,", ",", "telling the block size to the attention alone"),
        ("q, k_cmp, lse", "q, k, lse", "choosing blocks by keys in place of summaries",
         "`select_blocks` scores blocks by their summaries, and counts how many it gets. Which "
         "tensor holds the summary keys?"),
        ("q, k_cmp, lse", "q, v_cmp, lse", "choosing blocks by the summaries of the values",
         "A query is compared with keys. Of which tensor are the summaries that decide?"),
        ({"+ g_slc": "+ g_swa", "+ g_swa": "+ g_slc"}, "swapping the gates of selection and window",
         "The order is compression, selection, window. Which output does each gate stand beside?"),
        ({"return g_cmp": "return g_slc", "+ g_slc": "+ g_cmp"},
         "swapping the gates of compression and selection",
         "The order is compression, selection, window. Which output does each gate stand beside?"),
        ({"return g_cmp[..., None] *": "return", "g_slc[..., None] * ": "",
          "g_swa[..., None] * ": ""}, "leaving the gates out",
         "The plain sum counts three times what all three branches see. What is each output "
         "multiplied by?"),
        ({"[..., None] * o_cmp": " * o_cmp", "[..., None] * o_slc": " * o_slc",
          "[..., None] * o_swa": " * o_swa"}, "lining the gates up with the width",
         "A gate is `[B, N, HQ]`, an output `[B, N, HQ, DV]`, and PyTorch lines shapes up from "
         "the right. Where does the gate need an axis of length 1?"),
        ("o_swa = ops",
         "g_cmp, g_slc, g_swa = _by_lse(lse, q, k, v, ids, block_size, window_size)\n"
         "    o_swa = ops", "merging the branches by their LSE",
         "That is exact for disjoint sets of keys. These branches overlap, and one of them "
         "reads summaries. Which weights were you given?"),
        ("o_swa = ops",
         "g_cmp, g_slc, g_swa = _by_lse(lse, q, k, v, ids, block_size, window_size, stride)\n"
         "    o_swa = ops",
         "merging the branches by an LSE that counts each summary `stride` times",
         "That comes nearer to dense attention, but here the weights are not yours to choose. "
         "Which ones were you given?"),
        ('means."""',
         'means."""\n    g_cmp, g_slc, g_swa = torch.softmax(torch.stack([g_cmp, g_slc, '
         "g_swa]), 0)", "a softmax over the gates",
         "The branches do not compete for one unit of weight, and the gates are used as given. "
         "What should gates of 1, 1 and 1 give?"),
        ('means."""',
         'means."""\n    g = torch.stack([g_cmp, g_slc, g_swa])\n    g_cmp, g_slc, g_swa = g / '
         "g.sum(0)", "dividing by the sum of the gates",
         "Equation 5 is a sum, and the gates are used as given. What should gates of (0, ½, 0) "
         "give?"),
        ("k, v, ids", "k, v, _with_own_block(ids, block_size)", "listing the own block twice",
         "`select_blocks` has forced the query's own block into the list already. What happens "
         "to a block that is listed twice?"),
        ("o_slc = ops", "ids = ids[:, :, :1].expand_as(ids)\n    o_slc = ops",
         "one list for all KV heads",
         "The query heads of a group share a list. Which keys do different groups read?"),
        ("o_slc = ops", "ids = ids[:, -1:].expand_as(ids)\n    o_slc = ops",
         "one list for all queries",
         "The last query's list knows what is the future to an earlier one. Which blocks may "
         "each query choose among?"),
        (", block_size=block_size)", ", block_size=stride)", "taking the stride for the block size",
         "The list names blocks of `block_size` tokens. How should the attention that reads the "
         "list cut the text?"),
        ("window_size=window_size", "window_size=window_size + 1", "a window one key too wide",
         "`window_size` counts the query's own key too. How many keys are left for the past?"),
        ("window_size=window_size", "window_size=block_size",
         "taking the block size for the window's",
         "The window has a size of its own, and blocks have nothing to do with it. Which "
         "argument holds it?"),
        (", block_size=block_size)", ", block_size=length)",
         "taking the length of a summary for the block size",
         "The list names blocks of `block_size` tokens. What does block 1 begin with, if the "
         "attention that reads the list cuts the text elsewhere?"),
        ("k, v, ids", "k_cmp, v_cmp, ids", "attending to summaries in the selected blocks",
         "Summaries choose the blocks, and a block is a run of the text's own tokens. Which "
         "keys and values does the selection read?"),
        ("q, k_cmp, v_cmp", "q, k_cmp, k_cmp", "using the summary keys as values, too",
         "The scores come from keys, the output from values. How many summaries does the "
         "compressed branch need?"),
        ("k_cmp = ops",
         "top_n, block_size, window_size, length, stride = 4, 16, 64, 16, 8\n    k_cmp = ops",
         "keeping the sizes of the stored heads",
         "The cells above use fixed numbers, and `sizes` holds two of them. Each case brings "
         "its own. Which arguments hold them?"),
        ("k_cmp = ops", "length, stride = 16, 8\n    k_cmp = ops",
         "keeping the length and stride of the stored heads",
         "The cells above use fixed numbers, and `sizes` holds two of them. Each case brings "
         "its own. Which arguments hold them?"),
        ("top_n=top_n", "top_n=4", "keeping `top_n` of the stored heads",
         "The cells above use fixed numbers, and `sizes` holds two of them. Each case brings "
         "its own. Which arguments hold them?"),
        ("window_size=window_size", "window_size=64", "keeping the window of the stored heads",
         "The cells above use fixed numbers, and `sizes` holds two of them. Each case brings "
         "its own. Which arguments hold them?"),
    ]),
    cases=(
        # with one head, a gate without its axis would broadcast and not raise
        Case("12 tokens, two heads on one KV head", _whole(
            1, 12, 2, 1, 4, 3, seed=0, top_n=3, block_size=2, window_size=3, length=4, stride=1)),
        Case("29 tokens, four heads on two KV heads", _whole(
            1, 29, 4, 2, 4, 5, seed=10, top_n=4, block_size=4, window_size=5, length=4, stride=2)),
        Case("two texts of 45 tokens, six heads on two", _whole(
            2, 45, 6, 2, 8, 8, seed=20, top_n=5, block_size=6, window_size=7, length=6, stride=3)),
        Case("five tokens: no summary yet", _whole(
            1, 5, 2, 1, 4, 4, seed=30, top_n=3, block_size=2, window_size=2, length=8, stride=4)),
    ),
)  # fmt: skip


# -- gated_kernel --

_GUARD = -77.0  # in the memory behind the output: it must stay


class LoadsElsewhere(Exception):
    """The result is right, and a load touched memory outside of its tensor."""


def gated_kernel() -> object:
    """The kernel of the gated sum; a program has one row, which is one head of one token."""

    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)  # BLOCK is a power of two, DV need not be
        total = tl.zeros([BLOCK], tl.float32)
        for branch in range(3):
            here = branch * R + row
            gate = tl.load(Gates + here)
            o = tl.load(Outputs + here * DV + column, mask=column < DV, other=0.0)
            total += gate * o
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


_GIVEN = """
@triton.jit
def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    ...
"""


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, not completed, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(_GIVEN))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


def _run_gated(solution: Callable, R: int, DV: int) -> tuple[Tensor, str]:
    """Launch the kernel; behind `Sum` lie numbers that must stay.

    Raises:
        LoadsElsewhere: if all is stored as it should be, and a load touched somebody else's memory.
    """
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("gated_kernel defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    device, BLOCK = environment.detect().device, triton.next_power_of_2(DV)
    gates = _random(3, R, seed=R).abs().to(device)
    # behind each, numbers of the same kind: a load past the end gives no error
    outputs = _random(3 * R * DV + 64 * BLOCK, seed=DV).to(device)
    o = torch.full((R * DV + 64 * BLOCK,), _GUARD, device=device)
    kernel[R,](gates, outputs, o, R, DV, BLOCK=BLOCK)
    intact = bool((o[R * DV :] == _GUARD).all())
    found, gates, outputs = (x.cpu() for x in (o[: R * DV].view(R, DV), gates, outputs))
    outputs = outputs[: 3 * R * DV].view(3, R, DV)
    expected = (gates[..., None] * outputs).sum(0)
    is_right = intact and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    if is_right and (outside := _outside(kernel, gates, outputs, BLOCK)):
        raise LoadsElsewhere(f"Sum is right, but loads lie outside of the tensors: {outside}")
    return found, "in bounds" if intact else "stored past the end of Sum"


def _outside(kernel: object, gates: Tensor, outputs: Tensor, BLOCK: int) -> int:
    """How many loads of all programs lie outside of their tensors; none for a kernel with words of
    Triton that the recorder does not know."""
    _, R, DV = outputs.shape
    arguments = {"Gates": gates.numpy(), "Outputs": outputs.numpy(), "Sum": np.zeros((R, DV))}
    arguments |= {"R": R, "DV": DV, "BLOCK": BLOCK}
    try:
        programs = recorder.programs((R,))
        return sum(recorder.run(kernel.fn, p, arguments).outside() for p in programs)
    except Exception:
        return 0


def _gated_case(name: str, R: int, DV: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (R, DV), lambda: here.why_not("triton", here.device))


_GATED_KERNEL = TEXTS.exercise(
    "gated_kernel",
    minutes=6,
    difficulty=2,
    solution=gated_kernel,
    run=_run_gated,
    misconceptions=diffs(gated_kernel, [
        ("Gates + here", "Gates + row", "loading the first branch's gate for all three",
         "`Gates` is `[3, R]`, and `Gates + row` stays in its first row. How many numbers lie "
         "between a row's gate of one branch and of the next?"),
        ("Gates + here", "Gates + row * 3 + branch",
         "reading the three gates of a row as neighbours",
         "`Gates` is `[3, R]`, so all gates of compression come first. Where does the gate of "
         "branch 1 and row 0 stand?"),
        ("tl.load(Gates + here)", "1.0", "adding up the outputs without their gates",
         "What all three branches see is then counted three times. Which number belongs to each "
         "output?"),
        ("tl.load(Gates + here)", "1 / (1 + tl.exp(-tl.load(Gates + here)))",
         "applying the sigmoid once more",
         "The gates come out of the layer's sigmoid already. What would a gate of 0 become?"),
        ("here * DV", "row * DV", "loading the first branch's output three times",
         "`Outputs` is `[3, R, DV]`. How many numbers lie between the output of one branch and "
         "of the next?"),
        ("here * DV", "here", "moving by one number for each row of an output",
         "A row of `Outputs` holds `DV` numbers. Where does row 1 begin?"),
        ("here * DV", "branch * R + row * DV", "multiplying `row` alone by `DV`",
         "A branch has `R` rows of `DV` numbers each, and `branch * R` counts its rows. How "
         "many numbers lie before row `row` of branch `branch`?"),
        ({"here * DV": "here * BLOCK", "Sum + row * DV": "Sum + row * BLOCK"},
         "taking `BLOCK` for the width of a row in memory",
         "`BLOCK` is how many lanes the program has. How many numbers does a row have in memory?"),
        ("here * DV", "here * BLOCK", "taking `BLOCK` for the width of a row in memory"),
        ("total +=", "total =", "keeping the last branch only",
         "Each turn of your loop writes `total` anew. What becomes of the branch before?"),
        ("gate * o", "gate * o / 3", "dividing by three",
         "Equation 5 is a sum. What should one branch with a gate of 1 give?"),
        (", mask=column < DV, other=0.0", "", "loading what lies behind the row",
         "With DV = 3, BLOCK is 4. The fourth lane reads the next row, and in the last row of "
         "`Outputs` it reads memory that belongs to someone else. Which lanes may load?"),
        ("total, mask=column < DV", "total", "storing the lanes behind the row",
         "With DV = 3, BLOCK is 4. Whose number does the fourth lane overwrite?"),
        ("Sum + row * DV", "Sum", "storing every row in the same place",
         "Every program writes to the first row of `Sum`, and the other rows keep the −77 that "
         "stood there before. Where does row `row` begin?"),
        ("tl.store(Sum + row * DV + column, total, mask=column < DV)", "pass", "storing nothing",
         "−77 is what stood in `Sum` before the launch, and it still stands there. Which "
         "function writes `total` to memory?"),
        ({"mask=column < DV, other": "mask=column < R, other",
          "total, mask=column < DV": "total, mask=column < R"},
         "a mask that compares columns with the number of rows",
         "`column` counts along one row, and `R` is how many rows there are. How many numbers "
         "has a row?"),
        ("mask=column < DV, other", "mask=column < R, other",
         "a mask that compares columns with the number of rows"),
        ("total, mask=column < DV", "total, mask=column < R",
         "a mask that compares columns with the number of rows"),
        ("Gates + here", "Gates[branch, row]", "indexing a pointer",
         "`Gates` is the address of the first gate and knows no axes, so `Gates[branch, row]` "
         "cannot work. `Gates + n` is the address of gate `n`. Which `n` does branch `branch`, "
         "row `row` have?"),
    ]),
    cases=(
        _gated_case("one row of four numbers", 1, 4),
        _gated_case("three rows of four numbers", 3, 4),
        _gated_case("two rows of three numbers: BLOCK is 4", 2, 3),
        _gated_case("five rows of five numbers: BLOCK is 8", 5, 5),
    ),
)  # fmt: skip


EXERCISES = (_GATED_SUM, _THREE_BRANCHES, _GATED_KERNEL, _KEYS_LOADED, _SELECTS_LIKE_DENSE)


# -- two mistakes at once --


def _softmax_of_gates(gates: list, outputs: list) -> Tensor:
    weights = torch.softmax(torch.stack(gates), 0)
    return sum(w[..., None] * o for w, o in zip(weights, outputs, strict=True))


def _loads_without_edges(
    t: int, ids: list[int], block_size: int, window_size: int, length: int, stride: int
) -> tuple[int, int, int, int]:
    summaries = max(0, (t + 1 - length) // stride + 1)
    selected = sum(block_size for block in ids if block >= 0)
    return summaries, selected, window_size, summaries + selected + window_size


def _last_query_of_one_kv_head(nsa: Callable) -> bool:
    q, k, v = (_random(1, 19, heads, 16, seed=heads) for heads in (4, 1, 1))
    gates = tuple(torch.full((1, 19, 4), g) for g in (0.0, 1.0, 0.0))
    o = nsa(q, k, v, gates, torch.arange(3).expand(1, 19, 1, 3), 8)
    return torch.allclose(o[:, -1], gqa.attention(q, k, v)[:, -1], atol=1e-4)


DOUBLES = (
    Double("gated_kernel", names=(
        "loading the first branch's gate for all three", "storing the lanes behind the row")),
    Double("gated_kernel", names=(
        "taking `BLOCK` for the width of a row in memory", "keeping the last branch only")),
    Double("gated_sum", _softmax_of_gates, (
        "a softmax over the branches", "not allowing for a gate of None")),
    Double("gated_sum", names=("dividing by the sum of the gates", "taking None for a gate of 1")),
    Double("keys_loaded", _loads_without_edges, (
        "counting the own block as a whole", "a full window at the start of the text")),
    Double("keys_loaded", names=(
        "counting a key once that two branches load",
        "counting summaries that have begun but not ended")),
    Double("selects_like_dense", names=(
        "a test in which the blocks divide the text",
        "a test with as many KV heads as query heads")),
    Double("selects_like_dense", _last_query_of_one_kv_head, (
        "a test with a single KV head", "a test that looks at the last query only")),
    Double("three_branches", names=(
        "swapping the gates of selection and window", "a window one key too wide")),
    Double("three_branches", names=(
        "merging the branches by their LSE", "leaving length and stride at their defaults")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    keys_at_65536={"unit": "keys", "tolerance": 0.01},
    error_of_the_sum={"unit": "%", "tolerance": 0.02},
    far_with_window={"unit": "%", "tolerance": 0.3},
    needed_gate={
        "choices": ("compression", "selection", "window"),
        "short": (
            *(("cmp", "compression"), ("slc", "selection"), ("swa", "window")),
            *(("g_cmp", "compression"), ("g_slc", "selection"), ("g_swa", "window")),
        ),
    },
)
