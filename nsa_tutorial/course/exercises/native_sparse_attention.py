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
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


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


def _gated(slips: Slips, gates: list, outputs: list) -> Tensor:
    """`gated_sum` with slips."""
    if "wiped" in slips:
        zeroed = outputs[0]
        zeroed *= 0
    if "first turn" in slips and gates[0] is None:
        return 0
    if "truth" in slips:
        pairs = [(g, o) for g, o in zip(gates, outputs, strict=True) if g]
    elif "none raises" in slips:
        pairs = list(zip(gates, outputs, strict=True))
    else:
        pairs = [(g, o) for g, o in zip(gates, outputs, strict=True) if g is not None]
    if slips & {"first turn", "first branch"}:
        pairs = pairs[:1]
    extra = [o for g, o in zip(gates, outputs, strict=True) if g is None and o is not None]
    used = [g for g, _ in pairs]
    if None in used:
        raise TypeError("a gate of None has no axes")
    if "sigmoid" in slips:
        used = [torch.sigmoid(g) for g in used]
    if "softmax" in slips:
        used = list(torch.softmax(torch.stack(used), 0))
    if "over heads" in slips:
        used = [torch.softmax(g, -1) for g in used]
    divisor = {"divided": sum(used), "averaged": len(used), "three": 3}
    for change, by in divisor.items():
        if change in slips:
            used = [g / by for g in used]
    if "no gates" in slips:
        used = [torch.ones_like(g) for g in used]
    if "other axis" in slips:
        used = [g.transpose(1, 2).reshape(g.shape) for g in used]
    if "one per token" in slips:
        used = [g.mean(2, keepdim=True) for g in used]
    if "last axis" not in slips:
        used = [g[..., None] for g in used]
    multiply = torch.Tensor.mul_ if "in place" in slips else torch.mul
    total = sum(multiply(o, g) for g, (_, o) in zip(used, pairs, strict=True))
    if "first output" in slips:
        total = total + outputs[0]
    return total + sum(extra) if "none is one" in slips else total


def _branches(
    B: int, N: int, HQ: int, DV: int, seed: int, off: tuple[int, ...] = (), missing: bool = False,
    trained: bool = False,
) -> Callable:  # fmt: skip
    def arguments() -> tuple:
        g = [None if i in off else 0.5 + _random(B, N, HQ, seed=seed + i).abs() for i in range(3)]
        o = [
            None if i in off and missing else _random(B, N, HQ, DV, seed=seed + 3 + i)
            for i in range(3)
        ]
        if trained:  # PyTorch refuses to overwrite these
            for x in (*g, *o):
                x.requires_grad_()
        return g, o

    return arguments


_GATED_MISTAKES = (
    Misconception(
        "dividing by the sum of the gates",
        slip(_gated, "divided"),
        "Gates are no weights of an average, and nothing asks them to sum to 1. How much does a "
        "head say when all of its gates are small?",
    ),
    Misconception(
        "a softmax over the branches",
        slip(_gated, "softmax"),
        "The branches do not compete for one unit of weight. Each gate is a number of its own. "
        "What should gates of 1, 1 and 1 give?",
    ),
    Misconception(
        "a softmax over the heads",
        slip(_gated, "over heads"),
        "Along that axis the heads of a token compete with each other. Equation 5 has no softmax "
        "at all: what does it do with a gate?",
    ),
    Misconception(
        "averaging over the branches in use",
        slip(_gated, "averaged"),
        "Equation 5 is a sum. Where does it divide by the number of branches?",
    ),
    Misconception(
        "dividing by three",
        slip(_gated, "three"),
        "Equation 5 is a sum. What should one branch with a gate of 1 give?",
    ),
    Misconception(
        "adding up the outputs without their gates",
        slip(_gated, "no gates"),
        "What all three branches see is then counted three times. Which number belongs to each "
        "output?",
    ),
    Misconception(
        "applying the sigmoid once more",
        slip(_gated, "sigmoid"),
        "The gates come out of the layer's sigmoid already. What would a gate of 0 become?",
    ),
    Misconception(
        "lining the gate up with the width",
        slip(_gated, "last axis"),
        "PyTorch lines shapes up from the right: in `g * o` the last axis of `g`, the heads, "
        "meets the last axis of `o`, the width. Where does the gate need an axis of length 1?",
    ),
    Misconception(
        "mixing up tokens and heads of the gates",
        slip(_gated, "other axis"),
        "A gate is `[B, N, HQ]`, tokens before heads, exactly like the output. Why reshape it?",
    ),
    Misconception(
        "one gate per token for all heads",
        slip(_gated, "one per token"),
        "One head of a token may live on its window while another closes it. How many gates has a "
        "token?",
    ),
    Misconception(
        "taking None for a gate of 1",
        slip(_gated, "none is one"),
        "None leaves the branch out, even where an output was computed. What does it contribute?",
    ),
    Misconception(
        "not allowing for a gate of None",
        slip(_gated, "none raises"),
        "A branch that is left out has None in place of its gate, and perhaps in place of its "
        "output. What should your loop do with it?",
    ),
    Misconception(
        "asking a tensor whether it is true",
        slip(_gated, "truth"),
        "`if g:` wants one yes or no, and a gate holds many numbers; a single 0 would count as no. "
        "You mean to ask whether there is a gate: write `if g is not None`.",
    ),
    *(
        Misconception(
            "a `return` inside the loop",
            slip(_gated, change),
            "`return` ends the function at once, so the later branches never get their turn. How "
            "far should the line with `return` be indented?",
        )
        for change in ("first branch", "first turn")
    ),
    Misconception(
        "wiping the first output out to start the total",
        slip(_gated, "wiped"),
        "`total = outputs[0]` gives the first output a second name. `total *= 0` then zeroes the "
        "output itself, before your loop reads it. Which plain number could the total start from?",
    ),
    Misconception(
        "starting the total with the first output",
        slip(_gated, "first output"),
        "Your loop adds the first output once more, times its gate. Which number does a sum start "
        "from?",
    ),
    Misconception(
        "overwriting the tensors that were handed in",
        slip(_gated, "in place"),
        "`o *= g` writes into the caller's own tensor, and training still needs what stood there. "
        "Which product makes a new tensor?",
    ),
)

_GATED_SUM = TEXTS.exercise(
    "gated_sum",
    minutes=5,
    difficulty=1,
    solution=gated_sum,
    misconceptions=_GATED_MISTAKES,
    combine=together(
        _GATED_MISTAKES,
        {"softmax", "over heads", "divided", "averaged", "three", "no gates"},
        {"other axis", "one per token", "last axis"},
        {"no gates", "other axis", "one per token", "sigmoid"},
        {"none raises", "none is one", "truth"},
        {"first turn", "first branch"},
        {"wiped", "first output"},
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
        Case(
            "tensors with gradients, as in training", _branches(1, 4, 2, 3, seed=60, trained=True)
        ),
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


def _loaded(
    slips: Slips,
    t: int,
    ids: list[int],
    block_size: int,
    window_size: int,
    length: int,
    stride: int,
) -> tuple[int, ...]:
    """`keys_loaded` with slips."""
    if "from one" in slips:
        t = t - 1
    # -- summaries --
    summaries = (t + 1 - length) // stride + 1
    for change, count in {
        "no lag": t // stride + 1,  # those that have begun
        "no overlap": (t + 1) // length,
        "one early": (t + 2 - length) // stride + 1,
        "one late": (t - length) // stride + 1,
        "fractions": (t + 1 - length) / stride + 1,
        "one from the start": max(t + 1 - length, 0) // stride + 1,
    }.items():
        if change in slips:
            summaries = count
    if "below zero" not in slips:
        summaries = max(summaries, 0)
    # -- selected --
    end = t if "own key" in slips else t + 1
    listed = ids if "minus one" in slips else [b for b in ids if b >= 0]
    keys = [range(b * block_size, min((b + 1) * block_size, end)) for b in listed]
    selected = sum(map(len, keys))
    if "whole blocks" in slips:
        selected = block_size * sum(b * block_size <= t for b in listed)
    if "slots" in slips:
        selected = block_size * len(ids)
    if "blocks" in slips:
        selected = len(listed)
    # -- window --
    window = min(window_size, t if "short window" in slips else t + 1)
    if "full window" in slips:
        window = window_size
    total = summaries + selected + window
    if "distinct" in slips:
        seen = {i for part in keys for i in part} | set(range(t + 1 - window, t + 1))
        total = summaries + len(seen)
    return summaries, selected, window, total


_LOADED_MISTAKES = (
    Misconception(
        "counting a key once that two branches load",
        slip(_loaded, "distinct"),
        "Three branches are three attentions. In the layer they even read different tensors. How "
        "often is a key loaded that lies in the list and in the window?",
    ),
    Misconception(
        "counting summaries that have begun but not ended",
        slip(_loaded, "no lag"),
        "A summary is of tokens up to its end. What would a query learn from one that ends after "
        "it?",
    ),
    Misconception(
        "a negative number of summaries",
        slip(_loaded, "below zero"),
        "The formula goes on below zero where no summary has ended yet. How few summaries can a "
        "query load?",
    ),
    Misconception(
        "counting summaries as if they did not overlap",
        slip(_loaded, "no overlap"),
        "A new one begins every `stride` tokens, not every `length`. Where does the second one "
        "begin?",
    ),
    Misconception(
        "showing a summary one token early",
        slip(_loaded, "one early"),
        "Summary j covers tokens j·stride to j·stride + length − 1. At which t is the last of "
        "them there?",
    ),
    Misconception(
        "showing a summary one token late",
        slip(_loaded, "one late"),
        "Summary 0 ends with token length − 1, and the query at that position sees it. Which of "
        "your numbers is one too small?",
    ),
    Misconception(
        "counting fractions of a summary",
        slip(_loaded, "fractions"),
        "A summary has ended, or it has not: the query never loads half of one. Which division "
        "rounds down?",
    ),
    Misconception(
        "counting the first summary before it has ended",
        slip(_loaded, "one from the start"),
        "The first summary ends at position length − 1. What does your formula give at the "
        "positions before?",
    ),
    Misconception(
        "taking t for the number of keys so far",
        slip(_loaded, "from one"),
        "Positions are counted from 0. How many keys are there for the query at position 0?",
    ),
    Misconception(
        "counting the own block as a whole",
        slip(_loaded, "whole blocks"),
        "Part of the query's own block lies in its future. How many of the block's keys are at t "
        "or before?",
    ),
    Misconception(
        "counting the own block up to the key before the query",
        slip(_loaded, "own key"),
        "The query sees its own key, too. Does the range of your last block end at t, or behind "
        "it?",
    ),
    Misconception(
        "counting the slots, empty ones included",
        slip(_loaded, "slots"),
        "A slot of −1 loads nothing, and one block may be only partly in the past. How many keys "
        "does each slot bring?",
    ),
    Misconception(
        "counting blocks where keys are meant",
        slip(_loaded, "blocks"),
        "The list names blocks, and the query loads the keys in them. How many keys has a block "
        "that lies wholly in the past?",
    ),
    Misconception(
        "taking -1 for a block",
        slip(_loaded, "minus one"),
        "−1 marks an empty slot, and your number of selected keys counts it as a block. How many "
        "keys does an empty slot hold?",
    ),
    Misconception(
        "a window of the keys before the query, without its own",
        slip(_loaded, "short window"),
        "The query at position t can see t + 1 keys: its own is one of them. What does the first "
        "query of a text load?",
    ),
    Misconception(
        "a full window at the start of the text",
        slip(_loaded, "full window"),
        "The query at position 2 has only three keys to see, however wide the window is. What "
        "limits the count?",
    ),
)

_KEYS_LOADED = TEXTS.exercise(
    "keys_loaded",
    minutes=7,
    difficulty=2,
    solution=keys_loaded,
    misconceptions=_LOADED_MISTAKES,
    combine=together(
        _LOADED_MISTAKES,
        {"no lag", "no overlap", "one early", "one late", "fractions", "one from the start"},
        {"whole blocks", "slots", "own key", "from one", "blocks"},
        {"slots", "minus one"},
        {"short window", "full window"},
        {"below zero", "one from the start"},
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


_TAKES = ("q", "k", "v", "gates", "block_indices", "block_size")


def _implementation(name: str, compute: Callable) -> Case:
    """A case of one implementation. It says what it takes: the chapter's `nsa` takes other
    arguments, and a reader may try those."""

    def someone(*arguments: object, **named: object) -> Tensor:
        given = len(arguments) + len(named)
        wrong = [f"not `{key}`" for key in named if key not in _TAKES]
        if wrong or given != len(_TAKES):
            found = wrong[0] if wrong else f"and got {given}"
            raise TypeError(f"`someone` takes 6 arguments, {', '.join(_TAKES)}, {found}")
        return compute(*arguments, **named)

    return Case(name, lambda: (someone,))


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


def _zeros_for_none(gates: tuple) -> list[Tensor]:
    """A reader may close a branch with None, as the operator allows."""
    like = next(g for g in gates if g is not None)
    return [torch.zeros_like(like) if g is None else g for g in gates]


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
    gates = _zeros_for_none(gates)
    total = sum(gates).clamp(min=1e-6)
    return _nsa(q, k, v, tuple(g / total for g in gates), block_indices, block_size)


def _nsa_gates_twice(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    gates = tuple(map(torch.sigmoid, _zeros_for_none(gates)))
    return _nsa(q, k, v, gates, block_indices, block_size)


def _nsa_no_mask(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """Whole blocks are seen, the future part of the own one too."""
    N, M = q.shape[1], k.shape[1]
    key = torch.arange(M)
    end = (torch.arange(M - N, M) // block_size + 1) * block_size
    scores = (
        torch.einsum("bnhd,bmhd->bhnm", q, gqa.expand_kv_heads(k, q.shape[2] // k.shape[2]))
        * q.shape[3] ** -0.5
    )
    weights = torch.softmax(scores.masked_fill(key >= end[:, None], -torch.inf), -1)
    o = torch.einsum("bhnm,bmhd->bnhd", weights, gqa.expand_kv_heads(v, q.shape[2] // k.shape[2]))
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


def _nsa_first_kv_head(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """The offset of the KV head is forgotten: every query head reads KV head 0."""
    k, v, block_indices = (x[:, :, :1] for x in (k, v, block_indices))
    return _nsa(q, k, v, gates, block_indices, block_size)


def _nsa_one_query_a_group(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, block_indices: Tensor, block_size: int
) -> Tensor:
    """All heads of a group use the query of its first head."""
    G = q.shape[2] // k.shape[2]
    return _nsa(gqa.expand_kv_heads(q[:, :, ::G], G), k, v, gates, block_indices, block_size)


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
    return _nsa(q, k, v, (gates[0], gates[1], torch.ones_like(gates[1])), block_indices, block_size)


def _nsa_too_small(*arguments: object) -> Tensor:
    return _nsa(*arguments) - 0.02


def _nsa_too_large(*arguments: object) -> Tensor:
    return _nsa(*arguments) + 0.02


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
    return o.shape == q.shape and torch.allclose(o, gqa.attention(q, k, v), atol=1e-4)


_PROPERTY_SIZES = {  # how a slip changes N, H, G, block_size
    "single block": {"N": 4},
    "blocks divide": {"N": 20},
    "tokens as blocks": {"block_size": 1},
    "no groups": {"H": 3, "G": 1},
    "single KV head": {"H": 1, "G": 4},
}


# `combine` takes the last of one name: the narrowest, which hides a second mistake the least
_TOLERANCES = {"widest": 2.0, "wider": 1.0, "wide": 0.1}

_WIDE = (
    "a test with a tolerance so wide that small mistakes pass",
    "A tolerance of tenths lets a wrong constant through, such as a rough log2(e), and so does a "
    "mean over all differences. How large is the rounding of fp32?",
)


def _property(slips: Slips, nsa: Callable) -> bool | None:
    """A test with slips: weaker than it should be, or too strict."""
    size = {"N": 21, "H": 2, "G": 3, "block_size": 4}
    for change in sorted(slips & _PROPERTY_SIZES.keys()):
        size |= _PROPERTY_SIZES[change]
    N, H, HQ, block_size = size["N"], size["H"], size["H"] * size["G"], size["block_size"]
    q, k, v = (_random(1, N, heads, 8, seed=heads) for heads in (HQ, H, H))
    v = v.flip(1)
    if slips & {"ones", "zeros"}:
        v = torch.full_like(v, float("ones" in slips))
    q = torch.zeros_like(q) if "no scores" in slips else q
    others = float("all gates" in slips)
    gates = tuple(torch.full((1, N, HQ), g) for g in (others, 1.0, others))
    o = nsa(q, k, v, gates, torch.arange(-(-N // block_size)).expand(1, N, H, -1), block_size)
    expected = gqa.attention(q, k, v)
    if "anything" in slips:
        return True
    if "last" in slips:
        o, expected = o[:, -1], expected[:, -1]
    if "one head" in slips:
        o, expected = o[..., 0, :], expected[..., 0, :]
    if "exact" in slips:
        return torch.equal(o, expected)
    atol = max((_TOLERANCES[s] for s in slips & _TOLERANCES.keys()), default=1e-4)
    if "asserts" in slips:
        return torch.testing.assert_close(o, expected, atol=atol, rtol=0)
    if "no abs" in slips:
        return bool((o - expected).max() < atol)
    if "no abs, turned" in slips:
        return bool((expected - o).max() < atol)
    return torch.allclose(o, expected, atol=atol) != ("opposite" in slips)


_PROPERTY_MISTAKES = (
    Misconception(
        "a test that passes whatever comes out",
        slip(_property, "anything"),
        "Noise of the right shape might pass, too. Does your test compare every number? How far "
        "off may each one be, and can errors of opposite sign cancel?",
    ),
    *(Misconception(_WIDE[0], slip(_property, by), _WIDE[1]) for by in _TOLERANCES),
    *(
        Misconception(
            "a comparison without the absolute value",
            slip(_property, change),
            "Your test has a limit for errors of one sign only. What does it say of a number that "
            "lies far off on the other side?",
        )
        for change in ("no abs, turned", "no abs")
    ),
    Misconception(
        "a test that returns the opposite",
        slip(_property, "opposite"),
        "A right implementation gets `False` from you, and a broken one `True`. Which of the two "
        "should a right one get?",
    ),
    Misconception(
        "a test that asserts where it should answer",
        slip(_property, "asserts"),
        "`assert` and `torch.testing.assert_close` raise where something is wrong, and "
        "`assert_close` returns None where all is well. Which comparison gives True or False?",
    ),
    Misconception(
        "a test that right implementations fail",
        slip(_property, "exact"),
        "Even the operator fails your test. Is every block listed, a last one that is not full "
        "included? Are the gates (0, 1, 0)? Do you allow for rounding?",
    ),
    Misconception(
        "a test with a single block",
        slip(_property, "single block"),
        "With N = block_size the walk has one step. Which mistakes begin with the second block?",
    ),
    Misconception(
        "a test in which the blocks divide the text",
        slip(_property, "blocks divide"),
        "Texts end where they like. What does an implementation do with a last block that is not "
        "full?",
    ),
    Misconception(
        "a test with blocks of one token",
        slip(_property, "tokens as blocks"),
        "A block of one token is never cut, neither by the query nor by the end of the text. "
        "Which mistakes need a block of several tokens?",
    ),
    Misconception(
        "a test with as many KV heads as query heads",
        slip(_property, "no groups"),
        "With groups of one head, nothing is shared. Which mistakes need a group?",
    ),
    Misconception(
        "a test with a single KV head",
        slip(_property, "single KV head"),
        "If there is one KV head, every query head reads it, rightly or by accident. How many KV "
        "heads does it take to mix them up?",
    ),
    Misconception(
        "a test that compares one head only",
        slip(_property, "one head"),
        "The first query head reads the first KV head, even where the others go wrong. Which "
        "mistakes show only in the later heads?",
    ),
    Misconception(
        "a test that looks at the last query only",
        slip(_property, "last"),
        "The last query sees everything and has no future to look into. Which queries have?",
    ),
    *(
        Misconception(
            "a test whose values are all the same",
            slip(_property, change),
            "An average of equal values is that value, whatever the weights. Which values let you "
            "see the weights?",
        )
        for change in ("zeros", "ones")
    ),
    Misconception(
        "a test whose scores are all 0",
        slip(_property, "no scores"),
        "With queries or keys of 0, every visible key has the same weight. Which mistakes in the "
        "scores does your test miss?",
    ),
    Misconception(
        "a test with all gates open",
        slip(_property, "all gates"),
        "With gates (1, 1, 1) the output is a sum of three attentions, and no right "
        "implementation equals dense attention. Which branch alone can?",
    ),
)

_SELECTS_LIKE_DENSE = TEXTS.exercise(
    "selects_like_dense",
    minutes=20,
    difficulty=3,
    solution=selects_like_dense,
    misconceptions=_PROPERTY_MISTAKES,
    combine=together(
        _PROPERTY_MISTAKES,
        {"single block", "blocks divide", "tokens as blocks"},
        {"no groups", "single KV head"},
        {"anything", "wide", "wider", "widest", "exact"},
        {"anything", "last", "asserts", "one head"},
        {"anything", "exact", "asserts", "opposite", "no abs", "no abs, turned"},
        {"ones", "zeros"},
    ),
    cases=(
        _implementation("the operator: right", _nsa),
        _implementation("the operator in fp64, rounded: right", _nsa_rounded),
        _implementation("the future part of the own block is visible", _nsa_no_mask),
        _implementation("no scale on the scores", _nsa_no_scale),
        _implementation("log2(e) taken for 1.4", _nsa_rough_log2),
        _implementation("every block overwrites the one before", _nsa_first_slot),
        _implementation("a last block that is not full is left out", _nsa_no_tail),
        _implementation("query head hq reads KV head hq % H", _nsa_heads_repeated),
        _implementation("every query head reads KV head 0", _nsa_first_kv_head),
        _implementation("the heads of a group share one query", _nsa_one_query_a_group),
        _implementation("the window's gate is ignored", _nsa_window_always),
        _implementation("the gates pass a sigmoid a second time", _nsa_gates_twice),
        _implementation("every number is 0.02 too small", _nsa_too_small),
        _implementation("every number is 0.02 too large", _nsa_too_large),
        _implementation(
            "gates divided by their sum: wrong, but not against this property",
            _nsa_gates_divided,
        ),
        _implementation(
            "the other two branches are missing: not against this property either",
            _nsa_selection_alone,
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


def _put_together(
    slips: Slips,
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
    top_n: int, block_size: int, window_size: int, length: int, stride: int,
) -> Tensor | None:  # fmt: skip
    """`three_branches` with slips."""
    if "nothing" in slips:
        return None
    if "the cell above" in slips:
        top_n, block_size, window_size, length, stride = 4, 16, 64, 16, 8
    if "summaries of the cell above" in slips:
        length, stride = 16, 8
    if "list of the cell above" in slips:
        top_n = 4
    if "window of the cell above" in slips:
        window_size = 64
    sizes = {} if "paper's sizes" in slips else {"length": length, "stride": stride}
    told = {} if "default sizes" in slips else sizes
    # -- compression --
    k_cmp, v_cmp = (ops.compress(x, **sizes) for x in (k, v))
    values = k_cmp if "keys as values" in slips else v_cmp
    o_cmp, lse_cmp = ops.compressed_attention(
        q, k_cmp, values, **told, return_lse="no lse" not in slips
    )
    # -- selection --
    by = v_cmp if "by values" in slips else k if "by keys" in slips else k_cmp
    cut = {"block_size": block_size}
    chosen_by = {} if slips & {"default block size", "block size of the choice"} else cut
    if "choice of length" in slips:
        chosen_by = {"block_size": length}
    unasked = lse_cmp if "no lse" in slips else None
    ids = ops.select_blocks(q, by, unasked, top_n=top_n, **chosen_by, **told)
    if "one choice for all" in slips:
        ids = ids[:, :, :1].expand_as(ids)
    if "of the last query" in slips:
        ids = ids[:, -1:].expand_as(ids)
    if "own block twice" in slips:
        own = (torch.arange(q.shape[1]) // block_size)[None, :, None, None]
        ids = torch.cat([ids, own.expand(*ids.shape[:3], 1).to(ids.dtype)], -1)
    if "default block size" in slips:
        cut = {}
    if "blocks of stride" in slips:
        cut = {"block_size": stride}
    if "blocks of length" in slips:
        cut = {"block_size": length}
    listed = (k_cmp, v_cmp) if "selected summaries" in slips else (k, v)
    o_slc, lse_slc = ops.selected_attention(q, *listed, ids, **cut, return_lse=True)
    # -- window --
    window = window_size + ("wide window" in slips)
    if "window of a block" in slips:
        window = block_size
    o_swa, lse_swa = ops.sliding_window_attention(q, k, v, window_size=window, return_lse=True)
    # -- all together --
    outputs, gates = (o_cmp, o_slc, o_swa), (g_cmp, g_slc, g_swa)
    if slips & {"by lse", "by corrected lse"}:
        counted = stride if "by corrected lse" in slips else 1
        lse = torch.stack([lse_cmp + math.log(counted), lse_slc, lse_swa])
        gates = torch.softmax(lse, 0).unbind(0)
    if "softmax" in slips:
        gates = torch.softmax(torch.stack(gates), 0).unbind(0)
    if "swapped gates" in slips:
        gates = (gates[0], gates[2], gates[1])
    if "swapped first gates" in slips:
        gates = (gates[1], gates[0], gates[2])
    if "no gates" in slips:
        return sum(outputs)
    if "last axis" not in slips:
        gates = [g[..., None] for g in gates]
    total = sum(g * o for g, o in zip(gates, outputs, strict=True))
    return total / sum(gates) if "normalised" in slips else total


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


_FIXED = {
    "the cell above": "the sizes",
    "summaries of the cell above": "the length and stride",
    "list of the cell above": "`top_n`",
    "window of the cell above": "the window",
}

_SWAPS = {
    "swapped gates": "selection and window",
    "swapped first gates": "compression and selection",
}

# `combine` takes the last of one name
_CHOICES = ("choice of length", "block size of the choice")

_SIZES = {  # slips that set what "the cell above" sets
    "default sizes", "paper's sizes", "default block size", *_CHOICES,
    "blocks of stride", "blocks of length", "wide window", "window of a block",
}  # fmt: skip

_TOGETHER_MISTAKES = (
    Misconception(
        "returning nothing",
        slip(_put_together, "nothing"),
        "Does the last line begin with `return`? If it calls your `gated_sum`: is that exercise "
        "solved, and was its cell run?",
    ),
    Misconception(
        "not asking for the `lse`",
        slip(_put_together, "no lse"),
        "An operator returns its output alone, so there is nothing to unpack. Which argument of "
        "`ops.compressed_attention` asks for the `lse`, too?",
    ),
    Misconception(
        "leaving length and stride at their defaults",
        slip(_put_together, "default sizes"),
        "Summaries do not tell how they were made. Which operators that take them have to be told "
        "`length` and `stride`?",
    ),
    Misconception(
        "making summaries of the paper's sizes",
        slip(_put_together, "paper's sizes"),
        "Without `length` and `stride`, `compress` makes summaries of 32 tokens, and most of these "
        "texts are shorter. Which sizes were you given?",
    ),
    Misconception(
        "a block size that is left out, or is not the given one",
        slip(_put_together, "default block size"),
        "With blocks of 64, or of 16, these short texts have few blocks, and all are listed. Which "
        "two operators have to be told `block_size`?",
    ),
    *(
        Misconception(
            "telling the block size to the attention alone",
            slip(_put_together, change),
            "`select_blocks` then numbers blocks of another size, 64 tokens if you name none. "
            "Which `block_size` do the two operators get from you?",
        )
        for change in _CHOICES
    ),
    Misconception(
        "choosing blocks by keys in place of summaries",
        slip(_put_together, "by keys"),
        "`select_blocks` scores blocks by their summaries, and counts how many it gets. Which "
        "tensor holds the summary keys?",
    ),
    Misconception(
        "choosing blocks by the summaries of the values",
        slip(_put_together, "by values"),
        "A query is compared with keys. Of which tensor are the summaries that decide?",
    ),
    *(
        Misconception(
            f"swapping the gates of {which}",
            slip(_put_together, change),
            "The order is compression, selection, window. Which output does each gate stand "
            "beside?",
        )
        for change, which in _SWAPS.items()
    ),
    Misconception(
        "leaving the gates out",
        slip(_put_together, "no gates"),
        "The plain sum counts three times what all three branches see. What is each output "
        "multiplied by?",
    ),
    Misconception(
        "lining the gates up with the width",
        slip(_put_together, "last axis"),
        "A gate is `[B, N, HQ]`, an output `[B, N, HQ, DV]`, and PyTorch lines shapes up from the "
        "right. Where does the gate need an axis of length 1?",
    ),
    Misconception(
        "merging the branches by their LSE",
        slip(_put_together, "by lse"),
        "That is exact for disjoint sets of keys. These branches overlap, and one of them reads "
        "summaries. Which weights were you given?",
    ),
    Misconception(
        "merging the branches by an LSE that counts each summary `stride` times",
        slip(_put_together, "by corrected lse"),
        "That comes nearer to dense attention, but here the weights are not yours to choose. "
        "Which ones were you given?",
    ),
    Misconception(
        "a softmax over the gates",
        slip(_put_together, "softmax"),
        "The branches do not compete for one unit of weight, and the gates are used as given. "
        "What should gates of 1, 1 and 1 give?",
    ),
    Misconception(
        "dividing by the sum of the gates",
        slip(_put_together, "normalised"),
        "Equation 5 is a sum, and the gates are used as given. What should gates of (0, ½, 0) "
        "give?",
    ),
    Misconception(
        "listing the own block twice",
        slip(_put_together, "own block twice"),
        "`select_blocks` has forced the query's own block into the list already. What happens to "
        "a block that is listed twice?",
    ),
    Misconception(
        "one list for all KV heads",
        slip(_put_together, "one choice for all"),
        "The query heads of a group share a list. Which keys do different groups read?",
    ),
    Misconception(
        "one list for all queries",
        slip(_put_together, "of the last query"),
        "The last query's list knows what is the future to an earlier one. Which blocks may each "
        "query choose among?",
    ),
    Misconception(
        "taking the stride for the block size",
        slip(_put_together, "blocks of stride"),
        "The list names blocks of `block_size` tokens. How should the attention that reads the "
        "list cut the text?",
    ),
    Misconception(
        "a window one key too wide",
        slip(_put_together, "wide window"),
        "`window_size` counts the query's own key too. How many keys are left for the past?",
    ),
    Misconception(
        "taking the block size for the window's",
        slip(_put_together, "window of a block"),
        "The window has a size of its own, and blocks have nothing to do with it. Which argument "
        "holds it?",
    ),
    Misconception(
        "taking the length of a summary for the block size",
        slip(_put_together, "blocks of length"),
        "The list names blocks of `block_size` tokens. What does block 1 begin with, if the "
        "attention that reads the list cuts the text elsewhere?",
    ),
    Misconception(
        "attending to summaries in the selected blocks",
        slip(_put_together, "selected summaries"),
        "Summaries choose the blocks, and a block is a run of the text's own tokens. Which keys "
        "and values does the selection read?",
    ),
    Misconception(
        "using the summary keys as values, too",
        slip(_put_together, "keys as values"),
        "The scores come from keys, the output from values. How many summaries does the "
        "compressed branch need?",
    ),
    *(
        Misconception(
            f"keeping {what} of the stored heads",
            slip(_put_together, change),
            "The cells above use fixed numbers, and `sizes` holds two of them. Each case brings "
            "its own. Which arguments hold them?",
        )
        for change, what in _FIXED.items()
    ),
)

_THREE_BRANCHES = TEXTS.exercise(
    "three_branches",
    minutes=10,
    difficulty=2,
    solution=three_branches,
    misconceptions=_TOGETHER_MISTAKES,
    combine=together(
        _TOGETHER_MISTAKES,
        {"default sizes", "paper's sizes"},
        *({"the cell above", other} for other in [*_FIXED, *_SIZES] if other != "the cell above"),
        {"summaries of the cell above", "default sizes", "paper's sizes"},
        {"window of the cell above", "wide window", "window of a block"},
        {"by keys", "by values"},
        {"default block size", "blocks of stride", *_CHOICES},
        {"default block size", "blocks of stride", "blocks of length"},
        {"wide window", "window of a block"},
        {"by lse", "by corrected lse", "no gates", *_SWAPS},
        {"by lse", "by corrected lse", "no gates", "normalised", "softmax"},
        {"one choice for all", "of the last query"},
        {"no gates", "last axis"},
    ),
    cases=(
        Case(
            # with one head, a gate without its axis would broadcast and not raise
            "12 tokens, two heads on one KV head",
            _whole(
                1, 12, 2, 1, 4, 3, seed=0, top_n=3, block_size=2, window_size=3, length=4, stride=1
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
    arguments |= {"R": R, "DV": DV, "BLOCK": BLOCK} | getattr(kernel, "slips", {})
    try:
        records = [
            recorder.run(kernel.fn, program, arguments) for program in recorder.programs((R,))
        ]
    except Exception:
        return 0
    return sum(record.outside() for record in records)


@triton.jit
def _wrong_gated(
    Gates, Outputs, Sum, R, DV,
    BLOCK: tl.constexpr, GATE: tl.constexpr, ROW: tl.constexpr, SUM: tl.constexpr,
    STORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    LOADED = R if MASK == "both" or MASK == "load" else DV
    STORED = R if MASK == "both" or MASK == "store" else DV
    for branch in range(3):
        here = branch * R + row
        gate = tl.load(Gates + here)
        if GATE == "two indices":
            gate = tl.load(Gates[branch, row])
        elif GATE == "first gate":
            gate = tl.load(Gates + row)
        elif GATE == "gates side by side":
            gate = tl.load(Gates + row * 3 + branch)
        elif GATE == "no gate":
            gate = 1.0
        elif GATE == "sigmoid":
            gate = 1 / (1 + tl.exp(-gate))
        start = here * DV
        if ROW == "first output":
            start = row * DV
        elif ROW == "rows of one number":
            start = here
        elif ROW == "rows of BLOCK numbers" or ROW == "BLOCK everywhere":
            start = here * BLOCK
        elif ROW == "no parentheses":
            start = branch * R + row * DV
        if MASK == "unmasked":
            o = tl.load(Outputs + start + column)
        else:
            o = tl.load(Outputs + start + column, mask=column < LOADED, other=0.0)
        if SUM == "overwritten":
            total = gate * o
        else:
            total += gate * o
    if SUM == "averaged":
        total = total / 3
    if STORE == "everything":
        tl.store(Sum + row * DV + column, total)
    elif STORE == "BLOCK everywhere":
        tl.store(Sum + row * BLOCK + column, total, mask=column < STORED)
    elif STORE == "in one place":
        tl.store(Sum + column, total, mask=column < STORED)
    elif STORE == "right":
        tl.store(Sum + row * DV + column, total, mask=column < STORED)


_GATE_SLIPS = {"two indices", "first gate", "gates side by side", "no gate", "sigmoid"}
_BLOCK_SLIPS = ("BLOCK everywhere", "rows of BLOCK numbers")  # the first one in `Sum`, too
_ROW_SLIPS = {"first output", "rows of one number", "no parentheses", *_BLOCK_SLIPS}
_SUM_SLIPS = {"overwritten", "averaged"}
_STORE_SLIPS = {"everything", "in one place", "nothing", "BLOCK everywhere"}
_MASK_SLIPS = {"both", "load", "store", "unmasked"}


class _Mistaken:
    """`_wrong_gated` with its slips chosen; launched like a kernel."""

    def __init__(self, slips: Slips) -> None:
        self.run, self.fn = None, getattr(_wrong_gated, "fn", _wrong_gated)
        parts = {
            "GATE": _GATE_SLIPS, "ROW": _ROW_SLIPS, "SUM": _SUM_SLIPS, "STORE": _STORE_SLIPS,
            "MASK": _MASK_SLIPS,
        }  # fmt: skip
        self.slips = {
            part: next((name for name in slips if name in names), "right")
            for part, names in parts.items()
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_gated[grid](*args, **self.slips, **sizes)


_KERNEL_MISTAKES = (
    Misconception(
        "loading the first branch's gate for all three",
        slip(_Mistaken, "first gate"),
        "`Gates` is `[3, R]`, and `Gates + row` stays in its first row. How many numbers lie "
        "between a row's gate of one branch and of the next?",
    ),
    Misconception(
        "reading the three gates of a row as neighbours",
        slip(_Mistaken, "gates side by side"),
        "`Gates` is `[3, R]`, so all gates of compression come first. Where does the gate of "
        "branch 1 and row 0 stand?",
    ),
    Misconception(
        "adding up the outputs without their gates",
        slip(_Mistaken, "no gate"),
        "What all three branches see is then counted three times. Which number belongs to each "
        "output?",
    ),
    Misconception(
        "applying the sigmoid once more",
        slip(_Mistaken, "sigmoid"),
        "The gates come out of the layer's sigmoid already. What would a gate of 0 become?",
    ),
    Misconception(
        "loading the first branch's output three times",
        slip(_Mistaken, "first output"),
        "`Outputs` is `[3, R, DV]`. How many numbers lie between the output of one branch and of "
        "the next?",
    ),
    Misconception(
        "moving by one number for each row of an output",
        slip(_Mistaken, "rows of one number"),
        "A row of `Outputs` holds `DV` numbers. Where does row 1 begin?",
    ),
    Misconception(
        "multiplying `row` alone by `DV`",
        slip(_Mistaken, "no parentheses"),
        "A branch has `R` rows of `DV` numbers each, and `branch * R` counts its rows. How many "
        "numbers lie before row `row` of branch `branch`?",
    ),
    *(
        Misconception(
            "taking `BLOCK` for the width of a row in memory",
            slip(_Mistaken, change),
            "`BLOCK` is how many lanes the program has. How many numbers does a row have in "
            "memory?",
        )
        for change in _BLOCK_SLIPS
    ),
    Misconception(
        "keeping the last branch only",
        slip(_Mistaken, "overwritten"),
        "Each turn of your loop writes `total` anew. What becomes of the branch before?",
    ),
    Misconception(
        "dividing by three",
        slip(_Mistaken, "averaged"),
        "Equation 5 is a sum. What should one branch with a gate of 1 give?",
    ),
    Misconception(
        "loading what lies behind the row",
        slip(_Mistaken, "unmasked"),
        "With DV = 3, BLOCK is 4. The fourth lane reads the next row, and in the last row of "
        "`Outputs` it reads memory that belongs to someone else. Which lanes may load?",
    ),
    Misconception(
        "storing the lanes behind the row",
        slip(_Mistaken, "everything"),
        "With DV = 3, BLOCK is 4. Whose number does the fourth lane overwrite?",
    ),
    Misconception(
        "storing every row in the same place",
        slip(_Mistaken, "in one place"),
        "Every program writes to the first row of `Sum`, and the other rows keep the −77 that "
        "stood there before. Where does row `row` begin?",
    ),
    Misconception(
        "storing nothing",
        slip(_Mistaken, "nothing"),
        "−77 is what stood in `Sum` before the launch, and it still stands there. Which function "
        "writes `total` to memory?",
    ),
    *(
        Misconception(
            "a mask that compares columns with the number of rows",
            slip(_Mistaken, change),
            "`column` counts along one row, and `R` is how many rows there are. How many numbers "
            "has a row?",
        )
        for change in ("both", "load", "store")
    ),
    Misconception(
        "indexing a pointer",
        slip(_Mistaken, "two indices"),
        "`Gates` is the address of the first gate and knows no axes, so `Gates[branch, row]` "
        "cannot work. `Gates + n` is the address of gate `n`. Which `n` does branch `branch`, "
        "row `row` have?",
    ),
)


def _gated_case(name: str, R: int, DV: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (R, DV), lambda: here.why_not("triton", here.device))


_GATED_KERNEL = TEXTS.exercise(
    "gated_kernel",
    minutes=6,
    difficulty=2,
    solution=gated_kernel,
    run=_run_gated,
    misconceptions=_KERNEL_MISTAKES,
    combine=together(
        _KERNEL_MISTAKES,
        _GATE_SLIPS,
        _ROW_SLIPS,
        _SUM_SLIPS,
        _STORE_SLIPS,
        _MASK_SLIPS,
        {"everything", "nothing", *_MASK_SLIPS},
    ),
    cases=(
        _gated_case("one row of four numbers", 1, 4),
        _gated_case("three rows of four numbers", 3, 4),
        _gated_case("two rows of three numbers: BLOCK is 4", 2, 3),
        _gated_case("five rows of five numbers: BLOCK is 8", 5, 5),
    ),
)


EXERCISES = (_GATED_SUM, _THREE_BRANCHES, _GATED_KERNEL, _KEYS_LOADED, _SELECTS_LIKE_DENSE)


# -- two mistakes at once --


def _softmax_of_gates(gates: list, outputs: list) -> Tensor:
    weights = torch.softmax(torch.stack(gates), 0)
    return sum(w[..., None] * o for w, o in zip(weights, outputs, strict=True))


def _gates_divided_and_none_as_one(gates: list, outputs: list) -> Tensor:
    return _gated(frozenset({"divided", "none is one"}), gates, outputs)


def _loads_without_edges(
    t: int, ids: list[int], block_size: int, window_size: int, length: int, stride: int
) -> tuple[int, int, int, int]:
    summaries = max(0, (t + 1 - length) // stride + 1)
    selected = sum(block_size for block in ids if block >= 0)
    return summaries, selected, window_size, summaries + selected + window_size


def _distinct_keys_before(
    t: int, ids: list[int], block_size: int, window_size: int, length: int, stride: int
) -> tuple[int, int, int, int]:
    listed = {i for b in ids if b >= 0 for i in range(b * block_size, (b + 1) * block_size)}
    listed = {i for i in listed if i <= t}
    window = set(range(max(0, t - window_size + 1), t + 1))
    begun = t // stride + 1
    return begun, len(listed), len(window), begun + len(listed | window)


def _heads_alone_in_full_blocks(nsa: Callable) -> bool:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 24, 4, 16, generator=generator) for _ in range(3))
    gates = tuple(torch.full((1, 24, 4), g) for g in (0.0, 1.0, 0.0))
    ids = torch.arange(3).expand(1, 24, 4, 3)
    return torch.allclose(nsa(q, k, v, gates, ids, 8), gqa.attention(q, k, v), atol=1e-4)


def _last_query_of_one_kv_head(nsa: Callable) -> bool:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(1, 19, 4, 16, generator=generator)
    k, v = (torch.randn(1, 19, 1, 16, generator=generator) for _ in range(2))
    gates = tuple(torch.full((1, 19, 4), g) for g in (0.0, 1.0, 0.0))
    o = nsa(q, k, v, gates, torch.arange(3).expand(1, 19, 1, 3), 8)
    return torch.allclose(o[:, -1], gqa.attention(q, k, v)[:, -1], atol=1e-4)


def _from_memory(*arguments: object) -> Tensor:
    return _put_together(frozenset({"swapped gates", "wide window"}), *arguments)


def _merged_with_defaults(*arguments: object) -> Tensor:
    return _put_together(frozenset({"by lse", "default sizes"}), *arguments)


def _first_gate_and_no_mask() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for branch in range(3):
            gate = tl.load(Gates + row)
            total += gate * tl.load(Outputs + (branch * R + row) * DV + column)
        tl.store(Sum + row * DV + column, total)

    return kernel


def _last_of_rows_of_block() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for branch in range(3):
            gate = tl.load(Gates + branch * R + row)
            total = gate * tl.load(Outputs + (branch * R + row) * BLOCK + column)
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


DOUBLES = (
    Double(
        "gated_kernel",
        _first_gate_and_no_mask,
        ("loading the first branch's gate for all three", "storing the lanes behind the row"),
    ),
    Double(
        "gated_kernel",
        _last_of_rows_of_block,
        ("taking `BLOCK` for the width of a row in memory", "keeping the last branch only"),
    ),
    Double(
        "gated_sum",
        _softmax_of_gates,
        ("a softmax over the branches", "not allowing for a gate of None"),
    ),
    Double(
        "gated_sum",
        _gates_divided_and_none_as_one,
        ("dividing by the sum of the gates", "taking None for a gate of 1"),
    ),
    Double(
        "keys_loaded",
        _loads_without_edges,
        ("counting the own block as a whole", "a full window at the start of the text"),
    ),
    Double(
        "keys_loaded",
        _distinct_keys_before,
        (
            "counting a key once that two branches load",
            "counting summaries that have begun but not ended",
        ),
    ),
    Double(
        "selects_like_dense",
        _heads_alone_in_full_blocks,
        (
            "a test in which the blocks divide the text",
            "a test with as many KV heads as query heads",
        ),
    ),
    Double(
        "selects_like_dense",
        _last_query_of_one_kv_head,
        ("a test with a single KV head", "a test that looks at the last query only"),
    ),
    Double(
        "three_branches",
        _from_memory,
        ("swapping the gates of selection and window", "a window one key too wide"),
    ),
    Double(
        "three_branches",
        _merged_with_defaults,
        ("merging the branches by their LSE", "leaving length and stride at their defaults"),
    ),
)


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
