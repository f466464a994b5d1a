"""Exercises of chapter 08: the whole from the functions of chapters 05 to 07, the gated sum as a
kernel, and a test that finds broken implementations."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import recorder
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.exercises.block_selection import select_blocks
from nsa_tutorial.course.exercises.compression import compress, compressed_attention
from nsa_tutorial.course.exercises.selected_attention import selected_attention, window_attention
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


# -- native_sparse_attention --


def native_sparse_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], gates: Sequence[Tensor],
    top_n: int, block_size: int, window_size: int, length: int, stride: int,
) -> Tensor:  # fmt: skip
    """The gated sum of compression, selection and window [N, HQ, DV]: q [N, HQ, D], and of each
    branch keys [N, H, D], values [N, H, DV] and gates [N, HQ]."""
    k_cmp, v_cmp = compress(keys[0], length, stride), compress(values[0], length, stride)
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, length, stride)
    ids = select_blocks(q, k_cmp, lse, top_n, block_size, length, stride, 1, 2)
    o_slc = selected_attention(q, keys[1], values[1], ids, block_size)
    o_swa = window_attention(q, keys[2], values[2], window_size)
    g_cmp, g_slc, g_swa = (g[..., None] for g in gates)
    return g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa


def _run_build(
    attempt: Callable, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor],
    gates: Sequence[Tensor], top_n: int, block_size: int, window_size: int, length: int,
    stride: int,
) -> object:  # fmt: skip
    """What an attempt returns; where `q` asks for gradients, theirs beside it."""
    given = (q, keys, values, gates)
    o = attempt(*given, top_n, block_size, window_size, length, stride)
    if not q.requires_grad or not isinstance(o, Tensor):
        return o
    if not o.requires_grad:
        raise TypeError("the output has no gradient: it was computed without autograd")
    leaves = (q, *keys, *values, *gates)
    found = torch.autograd.grad(o.square().sum(), leaves, allow_unused=True)
    found = [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]
    return o.detach(), found[0], *(torch.stack(found[i : i + 3]) for i in (1, 4, 7))


def _merged(q: Tensor, k_cmp: Tensor, keys: Sequence[Tensor], lse: Tensor, ids: Tensor,
            block_size: int, window_size: int, counts: int = 1) -> Tensor:  # fmt: skip
    """Weights of the branches by their log-sum-exp, each summary for `counts` tokens."""
    N, H, D = keys[1].shape
    t = torch.arange(N)
    listed = torch.zeros(N, H, -(-N // block_size) + 1, dtype=torch.bool)
    listed.scatter_(2, ids.long() % listed.shape[2], True)
    listed = listed[..., :-1].repeat_interleave(block_size, -1)[..., :N]
    near = (t > t[:, None] - window_size)[:, None].expand(N, H, N)
    sums = [lse + math.log(counts)]
    for k, seen in ((keys[1], listed), (keys[2], near)):
        s = torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (H, -1)), k) * D**-0.5
        seen = (seen & (t <= t[:, None])[:, None])[:, :, None]
        sums.append(s.masked_fill(~seen, -torch.inf).logsumexp(-1).flatten(1))
    return torch.softmax(torch.stack(sums), 0)


def _of_all_heads(lse: Tensor) -> Tensor:
    return lse.logsumexp(1, keepdim=True).expand_as(lse)


def _whole(
    name: str, N: int, *, HQ: int = 1, H: int = 1, D: int = 4, DV: int = 4, seed: int = 0,
    top_n: int = 3, block_size: int = 4, window_size: int = 3, length: int = 4, stride: int = 4,
    opened: tuple[int, ...] = (1, 1, 1), is_shared: bool = True, is_trained: bool = False,
) -> Case:  # fmt: skip
    """A case of the whole.

    Args:
        name, N, HQ, H, D, DV, seed: the case, and its sizes.
        top_n, block_size, window_size, length, stride: of the branches.
        opened: 0 closes the gate of a branch.
        is_shared: all branches have one set of keys and values.
        is_trained: gradients are asked for.
    """

    def arguments() -> tuple:
        draw = iter(range(100 * seed, 100 * seed + 100))
        q = _random(N, HQ, D, seed=next(draw), factor=1.5)
        keys = [_random(N, H, D, seed=next(draw), factor=1.5) for _ in range(3)]
        values = [_random(N, H, DV, seed=next(draw)) for _ in range(3)]
        if is_shared:
            keys, values = [keys[0]] * 3, [values[0]] * 3
        gates = [a * torch.sigmoid(_random(N, HQ, seed=next(draw))) for a in opened]
        if is_trained:
            for x in (q, *keys, *values, *gates):
                x.requires_grad_()
        return q, keys, values, gates, top_n, block_size, window_size, length, stride

    return Case(name, arguments)


_SLC = "selected_attention(q, keys[1], values[1], ids, block_size)"
_CMP = "compressed_attention(q, k_cmp, v_cmp, length, stride)"
_SWA = "window_attention(q, keys[2], values[2], window_size)"
_CHOICE = "select_blocks(q, k_cmp, lse, top_n, block_size, length, stride, 1, 2)"
_SUM = "g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa"
_GATES = "(g[..., None] for g in gates)"
_MEANS = "k_cmp, v_cmp = compress(keys[0], length, stride), compress(values[0], length, stride)"
_K_CMP, _V_CMP = "compress(keys[0], length, stride)", "compress(values[0], length, stride)"
_THEIRS = [f"compress({x}[1], length, stride)" for x in ("keys", "values")]
_APART = {
    _MEANS: _MEANS.replace("stride", "length"),
    _CMP: "compressed_attention(q, k_cmp, v_cmp, length, length)",
}
_NO_AXIS = "lining the gate up with the width"
_ANOTHERS = "summaries of another branch's keys or values"

_BUILD = TEXTS.exercise(
    "native_sparse_attention", minutes=20, difficulty=3, solution=native_sparse_attention,
    run=_run_build, returns=("o", "d_q", "d_keys", "d_values", "d_gates"), tolerance=1e-4,
    forbidden=(("nsa_tutorial", "the course's own operator"),),
    stages=(
        Stage("the window", (
            _whole("six tokens, one head, the gates of the other branches 0", 6,
                   opened=(0, 0, 1)),
            _whole("seven tokens, three heads, width 3", 7, HQ=3, D=3, DV=3, seed=1,
                   window_size=2, opened=(0, 0, 1)),
        )),
        Stage("summaries", (
            _whole("12 tokens, two heads, the gate of selection 0", 12, HQ=2, seed=2, DV=2,
                   opened=(1, 0, 1)),
        )),
        Stage("every block listed", (
            _whole("12 tokens, three blocks, three places", 12, HQ=2, seed=3),
        )),
        Stage("a choice of blocks", (
            _whole("40 tokens, ten blocks, four places", 40, HQ=2, seed=4, top_n=4),
            _whole("64 tokens, 16 blocks, five places", 64, HQ=3, seed=5, top_n=5),
        )),
        Stage("several KV heads", (
            _whole("48 tokens, four heads on two KV heads", 48, HQ=4, H=2, seed=6, top_n=4, DV=5),
        )),
        Stage("any sizes", (
            _whole("45 tokens, summaries of 6 every 3, blocks of 5", 45, HQ=4, H=2, seed=7,
                   top_n=4, block_size=5, window_size=7, length=6, stride=3),
            _whole("61 tokens, summaries of 8 every 2, blocks of 6", 61, HQ=2, seed=8, top_n=4,
                   block_size=6, window_size=9, length=8, stride=2),
            _whole("five tokens: no summary yet", 5, HQ=2, seed=9, block_size=2, window_size=2,
                   length=5, stride=3),
        )),
        Stage("keys of their own", (
            _whole("45 tokens, three sets of keys and values", 45, HQ=4, H=2, seed=10, top_n=4,
                   block_size=5, window_size=7, length=6, stride=3, is_shared=False),
        )),
        Stage("gradients", (
            _whole("29 tokens, and the gradients of everything", 29, HQ=2, H=1, seed=11, top_n=4,
                   block_size=3, window_size=4, length=4, stride=2, is_shared=False,
                   is_trained=True),
        )),
    ),
    misconceptions=diffs(native_sparse_attention, [
        # -- the sum --
        (f"return {_SUM}", _SUM, "returning nothing",
         "Does the last line begin with `return`?"),
        (_GATES, "gates", _NO_AXIS,
         "A gate is `[N, HQ]`, an output `[N, HQ, DV]`, and PyTorch lines shapes up from the "
         "right. Where does the gate need an axis of length 1?"),
        (_SUM, "o_cmp + o_slc + o_swa", "leaving the gates out",
         "The plain sum counts three times what all three branches see. What is each output "
         "multiplied by?"),
        (_GATES, "(g[..., None] / sum(gates)[..., None].clamp(min=1e-9) for g in gates)",
         "dividing by the sum of the gates",
         "Equation 5 is a sum, and the gates are used as given. What should gates of (0, 0, ½) "
         "give?"),
        (_GATES, "torch.softmax(torch.stack(list(gates)), 0)[..., None]",
         "a softmax over the gates",
         "The branches do not compete for one unit of weight, and the gates are used as given. "
         "What should gates of 0, 0 and 1 give?"),
        (_GATES, "(torch.sigmoid(g)[..., None] for g in gates)", "applying the sigmoid once more",
         "The gates come out of the layer's sigmoid already. What would a gate of 0 become?"),
        (_GATES, "(g.mean(1, keepdim=True)[..., None] for g in gates)",
         "one gate per token for all heads",
         "One head of a token may live on its window while another closes it. How many gates has "
         "a token?"),
        (_GATES, "(g[:, :1, None] for g in gates)", "one gate per token for all heads"),
        (_SUM, f"({_SUM}) / 3", "dividing by three",
         "Equation 5 is a sum. What should one branch with a gate of 1 give?"),
        (_SUM, "g_cmp * o_cmp + g_swa * o_slc + g_slc * o_swa",
         "swapping the gates of selection and window",
         "The order is compression, selection, window. Which output does each gate stand beside?"),
        (_SUM, "g_slc * o_cmp + g_cmp * o_slc + g_swa * o_swa",
         "swapping the gates of compression and selection",
         "The order is compression, selection, window. Which output does each gate stand beside?"),
        (_GATES, "_merged(q, k_cmp, keys, lse, ids, block_size, window_size)[..., None]",
         "merging the branches by their LSE",
         "That is exact for disjoint sets of keys. These branches overlap, and each has keys of "
         "its own. Which weights were you given?"),
        (_GATES, "_merged(q, k_cmp, keys, lse, ids, block_size, window_size, stride)[..., None]",
         "merging the branches by an LSE that counts each summary `stride` times",
         "With one set of keys, that comes nearer to dense attention. But here the weights are "
         "not yours to choose. Which ones were you given?"),
        # -- the window --
        ("values[2], window_size", "values[2], window_size + 1", "a window one key too wide",
         "`window_size` counts the query's own key, too. How many keys are left for the past?"),
        ("values[2], window_size", "values[2], max(window_size - 1, 1)",
         "a window one key too narrow",
         "`window_size` counts the query's own key, too, and `window_attention` knows that. "
         "Which number does it want from you?"),
        ("values[2], window_size", "values[2], block_size",
         "taking the block size for the window's",
         "The window has a size of its own, and blocks have nothing to do with it. Which "
         "argument holds it?"),
        # -- summaries --
        (_CMP, _CMP.replace("v_cmp", "k_cmp"), "using the summary keys as values, too",
         "The scores come from keys, the output from values. How many summaries does the "
         "compressed branch need?"),
        (_APART, "summaries that do not overlap",
         "A summary begins every `stride` tokens, not every `length`. Which two numbers does "
         "`compress` want?"),
        (_APART | {_CHOICE: _CHOICE.replace("stride", "length")}, "summaries that do not overlap"),
        (_MEANS, _MEANS.replace("stride", "length"), "summaries that do not overlap"),
        (_CMP, "compressed_attention(q, k_cmp, v_cmp, length, length)",
         "telling the compressed branch another stride",
         "Your summaries begin every `stride` tokens, but the attention to them takes `length` for "
         "the distance. Which two numbers does it want?"),
        (_CMP, "compressed_attention(q, k_cmp, v_cmp, 1, stride)",
         "letting a summary be seen once it starts",
         "A summary knows its last token. At which position is that token there? `length` says "
         "so."),
        (_K_CMP, "compress(keys[1], length, stride)", _ANOTHERS,
         "The summaries' keys and values come from one pair. Which of the three belongs to the "
         "compressed branch?"),
        (_K_CMP, "compress(keys[2], length, stride)", _ANOTHERS),
        (_V_CMP, "compress(values[1], length, stride)", _ANOTHERS),
        (_V_CMP, "compress(values[2], length, stride)", _ANOTHERS),
        (_MEANS, _MEANS.replace("[0]", "[1]"), _ANOTHERS),
        # -- the choice --
        (_CHOICE, "torch.arange(-(-len(q) // block_size)).expand(len(q), keys[0].shape[1], -1)",
         "listing every block",
         "That is dense attention again. Which function picks `top_n` blocks for each query?"),
        (", 1, 2)", ", 0, 0)", "forcing no block",
         "The layer forces the first block and the two latest (section 4.1). Which two "
         "arguments of `select_blocks` say so?"),
        (", 1, 2)", ", 2, 1)", "forcing two first blocks and one latest",
         "The layer forces *one* first block and the *two* latest. Which of the two arguments "
         "counts which?"),
        (", 1, 2)", ", 0, 1)", "forcing the own block alone",
         "Chapter 07 judged its lists like that. The layer forces the first block and the two "
         "latest (section 4.1). Which two numbers say so?"),
        (", 1, 2)", ", 1, 1)", "forcing one latest block in place of two",
         "Chapter 07's example did that. How many of the latest blocks does the layer force "
         "(section 4.1)? The own block counts as one."),
        (", 1, 2)", ", 0, 2)", "forcing the latest blocks alone",
         "The layer forces one more block, whatever its weight. At which end of the text?"),
        (", 1, 2)", ", 1, 0)", "forcing the first block alone",
         "The layer forces the two latest blocks as well. Which argument of `select_blocks` counts "
         "them?"),
        ("lse, top_n,", "lse, top_n + 3,", "giving forced blocks places of their own",
         "`top_n` is the length of the whole list, forced blocks among it. How many places are "
         "left to choose?"),
        (_CHOICE, "select_blocks(q, compress(keys[1], length, stride), "
         "_of_all_heads(lse) * 0 + lse, top_n, block_size, length, stride, 1, 2)",
         "choosing by summaries of the selection's keys",
         "`lse` belongs to the scores of the compressed branch, and so do the weights that "
         "choose. Which summaries made them?"),
        (_CHOICE, f"select_blocks(q, {_THEIRS[0]}, compressed_attention(q, {', '.join(_THEIRS)}, "
         "length, stride)[1], top_n, block_size, length, stride, 1, 2)",
         "summaries of the selection's keys that choose with an `lse` of their own",
         "Your choice compresses the selection's keys and attends to them once more. In NSA the "
         "compressed branch has attended already. Whose summaries and whose `lse` does the choice "
         "take?"),
        (_CHOICE, "select_blocks(q, v_cmp, lse, top_n, block_size, length, stride, 1, 2)",
         "choosing blocks by the summaries of the values",
         "A query is compared with keys. Of which tensor are the summaries that decide?"),
        (_CHOICE, "select_blocks(q, keys[0], lse, top_n, block_size, length, stride, 1, 2)",
         "choosing blocks by keys in place of summaries",
         "`select_blocks` scores blocks by their summaries. Which tensor holds the summary keys?"),
        (_SLC, "selected_attention(q, keys[1], values[1], ids[:, :1].expand_as(ids), block_size)",
         "one list for all KV heads",
         "The query heads of a group share a list. Which keys do different groups read?"),
        (_SLC, "selected_attention(q, keys[1], values[1], ids[-1:].expand_as(ids), block_size)",
         "one list for all queries",
         "The last query's list knows what is the future to an earlier one. Which blocks may "
         "each query choose among?"),
        # -- sizes --
        (_CHOICE, "select_blocks(q, k_cmp, lse, top_n, block_size, stride, stride, 1, 2)",
         "telling the choice another length of the summaries",
         "Eq. 9 asks how many tokens a summary and a block share. Which `length` made the "
         "summaries?"),
        (_CHOICE, "select_blocks(q, k_cmp, lse, top_n, block_size, length, length, 1, 2)",
         "telling the choice another stride of the summaries",
         "Eq. 9 asks where a summary begins. Which `stride` made the summaries?"),
        (_SLC, "selected_attention(q, keys[1], values[1], ids, length)",
         "taking the length of a summary for the block size",
         "The list names blocks of `block_size` tokens. What does block 1 begin with, if the "
         "attention that reads the list cuts the text elsewhere?"),
        (_SLC, "selected_attention(q, keys[1], values[1], ids, stride)",
         "taking the stride for the block size",
         "The list names blocks of `block_size` tokens. How should the attention that reads the "
         "list cut the text?"),
        (_CHOICE, "select_blocks(q, k_cmp, lse, top_n, length, length, stride, 1, 2)",
         "telling the block size to the attention alone",
         "`select_blocks` then numbers blocks of another size. Which `block_size` do the two "
         "functions get from you?"),
        # -- keys of their own --
        ({_SLC: "selected_attention(q, keys[0], values[0], ids, block_size)",
          _SWA: "window_attention(q, keys[0], values[0], window_size)"},
         "one set of keys and values for all branches",
         "Each branch has keys and values of its own (section 3.3.3). Which of the three does "
         "the window read?"),
        (_SLC, "selected_attention(q, keys[0], values[0], ids, block_size)",
         "reading the compressed branch's keys through the list",
         "The summaries choose, and the list reads tokens. Whose keys and values are those?"),
        (_SWA, "window_attention(q, keys[1], values[1], window_size)",
         "one set of keys for list and window",
         "The window has keys and values of its own, so that what it learns overrules nothing. "
         "Which of the three?"),
        # -- gradients --
        (_CMP, "compressed_attention(q.detach(), k_cmp.detach(), v_cmp, length, stride)",
         "cutting the scores of the summaries off from training",
         "The choice has no gradient, but the compressed branch's output has: there the scores "
         "learn. What do you cut off before its attention?"),
        (_K_CMP, f"{_K_CMP}.detach()", "cutting the summaries off from training",
         "The list passes no gradient on, so the compressed branch's output is the only way to "
         "the keys and values of the summaries. What cuts it: a `detach`, or a `no_grad`?"),
        (_V_CMP, f"{_V_CMP}.detach()", "cutting the summaries off from training"),
        (_MEANS, _MEANS.replace("stride)", "stride).detach()"),
         "cutting the summaries off from training"),
        ("g_cmp * o_cmp", "g_cmp * o_cmp.detach()",
         "cutting the compressed branch off from training",
         "Then neither the queries nor the summaries learn from this branch. Which of the three "
         "outputs stays connected to its inputs?"),
        ('gates [N, HQ]."""\n', 'gates [N, HQ]."""\n    q = q.detach()\n',
         "cutting the queries off from training",
         "The ids are whole numbers and pass nothing on anyway. Through what else do the queries "
         "learn?"),
    ]),
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


EXERCISES = (_BUILD, _GATED_KERNEL, _SELECTS_LIKE_DENSE)


# -- two mistakes at once --


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
    Double("selects_like_dense", names=(
        "a test in which the blocks divide the text",
        "a test with as many KV heads as query heads")),
    Double("selects_like_dense", _last_query_of_one_kv_head, (
        "a test with a single KV head", "a test that looks at the last query only")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    keys_at_65536={"unit": "keys", "tolerance": 0.01},
    error_of_the_sum={"unit": "%", "tolerance": 0.02},
    far_without_compression={"unit": "%", "tolerance": 0.2},
    test_for_the_summary={"choices": ("prefix 48", "prefix 45", "all listed")},
)
