"""Exercises of chapter 06: summaries of windows, what a mean key misses, attention to summaries,
and a small kernel with two bugs.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- compress --


def compress(x: Tensor, length: int, stride: int) -> Tensor:
    """The means [M_c, H, D] of the windows of x [M, H, D]."""
    M_c = max((len(x) - length) // stride + 1, 0)  # windows that are whole
    token = torch.arange(M_c)[:, None] * stride + torch.arange(length)  # [M_c, length]
    return x[token].mean(1)


def _whole_windows_or_not(x: Tensor, length: int, stride: int) -> Tensor:
    """A window at every stride, the last ones cut short."""
    return torch.stack([x[start : start + length].mean(0) for start in range(0, len(x), stride)])


def _unfolded(x: Tensor, length: int, stride: int) -> Tensor:
    """Raises where no window fits."""
    return x.unfold(0, length, stride).mean(-1)


def _stacked(x: Tensor, length: int, stride: int) -> Tensor:
    """Raises where there is nothing to stack."""
    starts = range(0, len(x) - length + 1, stride)
    return torch.stack([x[start : start + length].mean(0) for start in starts])


def _tokens_case(name: str, M: int, length: int, stride: int, H: int = 1, D: int = 1) -> Case:
    """Whole numbers, where there is one in a token."""

    def arguments() -> tuple:
        if D > 1:
            return _random(M, H, D, seed=M), length, stride
        return (
            torch.tensor([3.0, 1, 4, 8, 5, 9, 2, 6, 7, 0, 5, 3, 8])[:M].view(M, 1, 1),
            length,
            stride,
        )

    return Case(name, arguments)


_SHORT = "a text too short for a window"
_COMPRESS = TEXTS.exercise(
    "compress",
    minutes=8, difficulty=2, solution=compress,
    forbidden=(("nsa_tutorial", "the course's own function"),),
    stages=(
        Stage("one window", (
            _tokens_case("four tokens of one number, one window", 4, 4, 4),
        )),
        Stage("side by side", (
            _tokens_case("eight tokens, windows of 4 side by side", 8, 4, 4),
            _tokens_case("six tokens, windows of 2 side by side", 6, 2, 2),
        )),
        Stage("overlap", (
            _tokens_case("eight tokens, windows of 4, one every 2", 8, 4, 2),
            _tokens_case("nine tokens, windows of 6, one every 3", 9, 6, 3),
            _tokens_case("eleven tokens, windows of 5, one every 3", 11, 5, 3),
        )),
        Stage("tokens left over", (
            _tokens_case("nine tokens, windows of 4, one every 2", 9, 4, 2),
            _tokens_case("twelve tokens, windows of 2, one every 5", 12, 2, 5),
        )),
        Stage("heads", (
            _tokens_case("two heads of width 3", 10, 4, 2, H=2, D=3),
            _tokens_case("three heads of width 5", 23, 5, 3, H=3, D=5),
        )),
        Stage("a short text", (
            _tokens_case("three tokens, windows of 4", 3, 4, 2),
            _tokens_case("two tokens of two heads, windows of 8", 2, 8, 4, H=2, D=3),
        )),
    ),
    misconceptions=diffs(compress, [
        (".mean(1)", ".sum(1)", "the sum in place of the mean",
         "A longer window would have larger keys. To what should the weights of its tokens sum?"),
        (".mean(1)", ".sum(1) / stride", "dividing by the stride",
         "The weights of a window's tokens should sum to 1. How many tokens are in a window?"),
        (".mean(1)", ".amax(1)", "the largest number in place of the mean",
         "A summary is the mean of its tokens, number by number. What does `mean` do here?"),
        (".mean(1)", "[:, 0]", "taking a window's first token for all of it",
         "A summary stands for `length` tokens. Do the others enter?"),
        ("[:, None] * stride", "[:, None] * length", "windows that do not overlap",
         "A window may start before the last one has ended. How many tokens later does it start?"),
        ({"// stride": "// length", "[:, None] * stride": "[:, None] * length"},
         "windows that do not overlap"),
        ("[:, None] * stride", "[:, None]", "starting a window at every token",
         "Window 1 starts `stride` tokens behind window 0. Where does window 2 start?"),
        ({"// stride": "", "[:, None] * stride": "[:, None]"}, "starting a window at every token"),
        ("stride + 1, 0)", "stride, 0)", "leaving out the last window",
         "Four tokens hold one window of 4. Is the start `M - length` among your starts?"),
        ("- length)", "- length - 1)", "leaving out the last window"),
        ("(len(x) - length) // stride + 1", "len(x) // length",
         "counting as many windows as lie side by side",
         "Windows that overlap are more than `M // length`. At which token does the last whole one "
         "start, and how many strides lead there?"),
        (_whole_windows_or_not, "summarising windows that are only partly there",
         "A window that is cut short has no summary yet: it waits for its last token. Which starts "
         "leave room for `length` tokens?"),
        (".mean(1)", ".mean(-1)", "averaging the numbers of a token, not the tokens of a window",
         "Print the shape just before the mean. Which axis holds a window's tokens?"),
        (".mean(1)", ".mean((1, 2), keepdim=True)[:, 0].expand(-1, x.shape[1], -1)",
         "averaging over the heads, too",
         "Each head has keys of its own. Over which one axis is the mean?"),
        (".mean(1)", ".mean((1, 3), keepdim=True)[:, 0].expand(-1, -1, x.shape[2])",
         "averaging over the numbers of a token, too",
         "A summary is as wide as a token. Over which one axis is the mean?"),
        (_unfolded, _SHORT,
         "Three tokens hold no window of 4. Then there are 0 summaries: a tensor `[0, H, D]`, and "
         "no error. Can you make all starts first, as a tensor that may be empty?"),
        (_stacked, _SHORT),
        ("max((len(x) - length) // stride + 1, 0)", "(len(x) - length) // stride + 1", _SHORT),
    ]),
)  # fmt: skip


# -- window_logit --


def window_logit(scores: Tensor) -> tuple[Tensor, Tensor]:
    """For windows of token scores [M_c, length]: the mean key's score, and the score that would
    give the window its weight."""
    by_mean_key = scores.mean(1)
    by_weight = scores.logsumexp(1) - math.log(scores.shape[1])
    return by_mean_key, by_weight


_LOGIT = TEXTS.exercise(
    "window_logit",
    minutes=5, difficulty=2, solution=window_logit,
    returns=("by_mean_key", "by_weight"),
    misconceptions=diffs(window_logit, [
        ("return by_mean_key, by_weight", "return by_weight, by_mean_key",
         "the two the other way round",
         "First the mean key's score, then the one that the window's weight asks for. Which of "
         "the two is never the smaller?"),
        ("scores.logsumexp(1) - math.log(scores.shape[1])", "scores.mean(1)",
         "taking the mean for both",
         "A softmax weighs by exponentials. Is the exponential of a mean the mean of the "
         "exponentials?"),
        (" - math.log(scores.shape[1])", "", "the log-sum-exp without the length",
         "That is the score of one token as heavy as the whole window. What is the score if "
         "`length` equal tokens share the weight?"),
        ("math.log(", "(", "taking away the length, not its logarithm",
         "The weight is divided by the length. Which term does that become in a logarithm?"),
        ("shape[1]", "shape[0]", "taking the number of windows for their length",
         "`scores` is `[M_c, length]`. Which axis says how many tokens a window has?"),
        ("by_mean_key = ", "scores = scores.T\n    by_mean_key = ", "going across the windows",
         "Each row is a window. Which axis holds its tokens?"),
        ("- math", "+ math", "adding the logarithm of the length",
         "The score grows with the length, though more tokens share the weight. For a window of "
         "zeros, what has to come out?"),
        ("- math.log(", "/ (", "dividing a score by the length",
         "The length divides the weight. What does that do to its logarithm?"),
        ("scores.logsumexp(1) - math.log(scores.shape[1])",
         "(scores / scores.shape[1]).logsumexp(1)",
         "dividing the scores by the length before the exponentials",
         "The length divides the weight, a sum of exponentials. Is `exp(s / 2)` half of `exp(s)`?"),
        ("scores.logsumexp(1) - math.log(scores.shape[1])", "scores.amax(1)",
         "the largest score for the window's weight",
         "If all tokens had the largest score, the window would weigh more than it does. What do "
         "the others weigh?"),
        ("scores.mean(1)", "scores.sum(1)", "the sum for the mean key's score",
         "The mean key is a `length`-th of the sum of the keys. And its score?"),
        ("scores.logsumexp(1) - math.log(scores.shape[1])", "(scores.softmax(1) * scores).sum(1)",
         "a mean weighted by the softmax",
         "That is the score that the query finds on average where it looks, and it is too high. "
         "What does the window weigh, as a sum?"),
        ("scores.logsumexp(1) - math.log(scores.shape[1])", "scores.exp().mean(1)",
         "giving the weight in place of its score",
         "That is what a token weighs on average. Which score has this exponential?"),
        ("math.log(", "math.log2(", "the length's logarithm to the base two",
         "The weights are powers of e. Which logarithm undoes those?"),
        ("scores.shape[1]", "32", "taking 32 for every window's length",
         "These windows are smaller. Which axis of `scores` says how many tokens a window has?"),
        ("scores.logsumexp(1)", "scores.exp().sum(1).log()", "exponentials that overflow",
         "Right for small scores. In fp32, e to the 89 is already ∞. What did chapter 03 "
         "subtract first?"),
    ]),
    cases=(
        Case("a flat window and one that is not",
             lambda: (torch.tensor([[1.0, 1.0], [0.0, 2.0]]),)),
        Case("a needle among zeros", lambda: (torch.tensor([[0.0, 0.0, 0.0, 10.0]]),)),
        Case("three windows of five", lambda: (2 * _random(3, 5, seed=0),)),
        Case("scores in the hundreds", lambda: (300 * _random(2, 4, seed=1),)),
    ),
)  # fmt: skip


# -- compressed_attention --


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, length: int, stride: int
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, HQ, D], at the positions 0 to N - 1, to the summaries that have ended: o
    [N, HQ, DV] and lse [N, HQ]."""
    (N, HQ, D), (M_c, H, _) = q.shape, k_cmp.shape
    keys, values = (x.repeat_interleave(HQ // H, dim=1) for x in (k_cmp, v_cmp))
    s = torch.einsum("nhd,mhd->nhm", q, keys) * D**-0.5  # [N, HQ, M_c]
    end = torch.arange(M_c) * stride + length - 1  # the last token of each window
    is_seen = (end <= torch.arange(N)[:, None])[:, None]  # [N, 1, M_c]
    s = s.masked_fill(~is_seen, -torch.inf)
    p = torch.softmax(s, -1).masked_fill(~is_seen, 0)  # NaN where nothing is seen
    return torch.einsum("nhm,mhd->nhd", p, values), s.logsumexp(-1)


class _Attended(NamedTuple):
    o: Tensor
    lse: Tensor


class _Gradients(NamedTuple):
    d_q: Tensor
    d_k_cmp: Tensor
    d_v_cmp: Tensor


class _Attention(NamedTuple):
    """A case: what a function gets, and what of it is judged.

    Attributes:
        q, k_cmp, v_cmp: as the function gets them.
        length, stride: of the windows.
        first: the first query whose results count.
        gradients: judge the gradients of a loss that uses `o` and `lse`.
    """

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    length: int
    stride: int
    first: int
    gradients: bool


def _run_attention(solution: Callable, *case: object) -> object:
    """The rows of `o` and `lse` from the first one that counts, or gradients."""
    c = _Attention(*case)
    inputs = [x.clone().requires_grad_(c.gradients) for x in case[:3]]
    found = solution(*inputs, c.length, c.stride)
    if not (isinstance(found, tuple) and len(found) == 2
            and all(isinstance(x, Tensor) for x in found)):  # fmt: skip
        return found
    expect_unchanged(inputs, case[:3])
    if not c.gradients:
        return _Attended(*(x[c.first :] if x.ndim else x for x in found))
    o, lse = found
    loss = (o * _random(*o.shape, seed=9)).sum() + lse[lse.isfinite()].sum()
    return _Gradients(*torch.autograd.grad(loss, inputs))


def _attention_case(
    name: str, N: int, length: int, stride: int, *, HQ: int = 1, H: int = 1, D: int = 4,
    DV: int = 2, first: int = 0, times: float = 1.0, gradients: bool = False,
) -> Case:  # fmt: skip
    """Summaries of `N` tokens, as many as there are.

    Args:
        name, N, length, stride, HQ, H, D, DV, first, gradients: as for `_Attention`.
        times: a factor on the queries.
    """
    M_c = max((N - length) // stride + 1, 0)

    def arguments() -> tuple:
        sizes = ((N, HQ, D), (M_c, H, D), (M_c, H, DV))
        q, k_cmp, v_cmp = (_random(*x, seed=seed) for seed, x in enumerate(sizes, start=N))
        return _Attention(times * q, k_cmp, v_cmp, length, stride, first, gradients)

    return Case(name, arguments)


def _nan_taken_out_late(q, k_cmp, v_cmp, length, stride):
    """Right results, and NaN in the gradient of the values."""
    G = q.shape[1] // k_cmp.shape[1]
    keys, values = (x.repeat_interleave(G, dim=1) for x in (k_cmp, v_cmp))
    s = torch.einsum("nhd,mhd->nhm", q, keys) * q.shape[2] ** -0.5
    end = torch.arange(len(k_cmp)) * stride + length - 1
    s = s.masked_fill((end > torch.arange(len(q))[:, None])[:, None], -torch.inf)
    o = torch.einsum("nhm,mhd->nhd", torch.softmax(s, -1), values)
    return o.nan_to_num(), s.logsumexp(-1)


_SEEN = "(end <= torch.arange(N)[:, None])[:, None]"
_RETURN = 'return torch.einsum("nhm,mhd->nhd", p, values), s.logsumexp(-1)'
_OF_P = "torch.softmax(s, -1).masked_fill(~is_seen, 0)"
_ATTENTION = TEXTS.exercise(
    "compressed_attention",
    minutes=20, difficulty=3, solution=compressed_attention,
    run=_run_attention,
    forbidden=(
        ("nsa_tutorial", "the course's own function"),
        ("torch.scaled_dot_product_attention", "PyTorch's own attention"),
    ),
    stages=(
        Stage("one summary", (
            _attention_case("three queries, one summary of token 0", 3, 1, 4),
        )),
        Stage("many summaries", (
            _attention_case("the last of six queries, three summaries", 6, 2, 2, first=5),
            _attention_case("the last of eight, scores in the hundreds", 8, 2, 2, first=7,
                            times=900.0),
        )),
        Stage("windows that have ended", (
            _attention_case("eight queries, windows of 4, one every 2; from query 3 on", 8, 4, 2,
                            first=3),
            _attention_case("thirteen queries, windows of 5, one every 3; from query 4 on", 13, 5,
                            3, first=4),
            _attention_case("twelve queries, windows of 2, one every 5; from query 1 on", 12, 2, 5,
                            first=1),
        )),
        Stage("nothing to see", (
            _attention_case("five queries, windows of 4; the first three see none", 5, 4, 2),
            _attention_case("three queries, windows of 4: no summary at all", 3, 4, 2),
        )),
        Stage("groups", (
            _attention_case("two heads on one KV head", 7, 4, 2, HQ=2, DV=3),
            _attention_case("four heads on two KV heads", 9, 4, 2, HQ=4, H=2, D=3, DV=5),
            _attention_case("six heads on two KV heads", 11, 5, 3, HQ=6, H=2, D=5, DV=3),
        )),
        Stage("gradients", (
            _attention_case("gradients; the first three queries see none", 7, 4, 2, gradients=True),
            _attention_case("gradients, four heads on two KV heads", 9, 5, 3, HQ=4, H=2,
                            gradients=True),
        )),
    ),
    misconceptions=diffs(compressed_attention, [
        (_RETURN, 'return torch.einsum("nhm,mhd->nhd", p, values)', "returning `o` alone",
         "Two results are asked for. Which number says how much all the visible summaries weigh "
         "together?"),
        (_RETURN, 'return s.logsumexp(-1), torch.einsum("nhm,mhd->nhd", p, values)',
         "returning `lse` before `o`",
         "The statement asks for two results. Which of them comes first?"),
        (" * D**-0.5", "", "leaving out the scale",
         "Dot products grow with the width. By which power of D are they multiplied, for `o` and "
         "for `lse`?"),
        ("s.logsumexp(-1)", "(s * D**0.5).logsumexp(-1)", "leaving out the scale"),
        ("D**-0.5", "D**-1", "dividing by D where √D is meant",
         "The scores are too flat. Which power of D is the scale?"),
        ("s.logsumexp(-1)", "s.logsumexp(-1) / math.log(2)", "an lse to the base two",
         "Chapter 03's kernels count in powers of two, and an `lse` is told in powers of e. "
         "Which logarithm is it?"),
        ("s.logsumexp(-1)", "s.exp().sum(-1)", "an lse without its logarithm",
         "That is the sum of the exponentials. What do the letters l, s and e stand for?"),
        ("s.logsumexp(-1)", "s.logsumexp(-1) + math.log(length)",
         "counting a summary `length` times in lse",
         "`lse` adds up one exponential for each summary. Do the tokens in it count here?"),
        ("s.logsumexp(-1)", "s.logsumexp(-1).detach()", "an lse that autograd cannot follow",
         "`o` has its gradient, but a loss that uses `lse` should reach `q` and `k_cmp` as well. "
         "Where was `lse` detached, or made of plain numbers?"),
        ("s.logsumexp(-1)", "s.amax(-1)", "the largest score for lse",
         "One summary has that score. What do the others add?"),
        ({_OF_P: "s.exp() / s.exp().sum(-1, keepdim=True)", "s.logsumexp(-1)":
          "s.exp().sum(-1).log()"}, "exponentials that overflow",
         "In fp32, e to the 89 is already ∞. What did chapter 03 subtract first?"),
        ("s.logsumexp(-1)", "s.exp().sum(-1).log()", "exponentials that overflow"),
        ("torch.softmax(s, -1)", "torch.softmax(s, 0)", "a softmax over the queries",
         "Each query's weights sum to 1. Which axis of the scores holds its summaries?"),
        ({_SEEN: "torch.ones(N, 1, M_c).bool()"}, "seeing all summaries",
         "Some of them end after the query. What do those hold?"),
        (" + length - 1", "", "letting a summary be seen once it starts",
         "Its window still holds tokens of the query's future. Which of its tokens has to be there "
         "first?"),
        ("end <= torch", "end < torch", "letting a summary be seen only after its last token",
         "A query sees its own token. If a window ends with that token, what in it is from the "
         "future?"),
        (" * stride + length - 1", "", "comparing a summary's number with a query's position",
         "Summary 3 is not at position 3. With which token does its window end?"),
        ("* stride + length - 1", "* length + length - 1", "windows that do not overlap",
         "A window may start before the last one has ended. How many tokens later does it start?"),
        ("* stride + length - 1", "* stride + stride - 1", "windows that end after one stride",
         "A stride leads from one window's start to the next. How many tokens long is a window?"),
        ("+ length - 1", "+ length // 2 - 1", "letting a summary be seen at half its window",
         "The second half of the window is still to come, and the summary holds it. With which "
         "token does window `j` end?"),
        ("+ length - 1", "+ length // 2", "letting a summary be seen at half its window"),
        ("* stride + length - 1", "* length",
         "letting a summary be seen from token `j * length` on",
         "Two things: window `j` starts at `j * stride`, and its summary waits for the last of its "
         "`length` tokens. Which token is that?"),
        ({"s = s.masked_fill(~is_seen, -torch.inf)": "s = s * is_seen"},
         "scores of 0 for hidden summaries",
         "A score of 0 still weighs e⁰. Which score weighs nothing?"),
        ({"s = s.masked_fill(~is_seen, -torch.inf)": "s = s.masked_fill(~is_seen, 0)"},
         "scores of 0 for hidden summaries"),
        ({"s = s.masked_fill(~is_seen, -torch.inf)": "s = s * is_seen", _OF_P:
          "torch.softmax(s, -1)"}, "scores of 0 for hidden summaries"),
        ({"    s = s.masked_fill(~is_seen, -torch.inf)\n": ""}, "masking after the softmax",
         "The hidden summaries are gone from the sum of the values, but not from the denominator. "
         "Do the weights sum to 1?"),
        ({"    s = s.masked_fill(~is_seen, -torch.inf)\n": "",
          "s.logsumexp(-1)": "s.masked_fill(~is_seen, -torch.inf).logsumexp(-1)"},
         "masking after the softmax"),
        ({"-torch.inf": "-1e9", _OF_P: "torch.softmax(s, -1)"},
         "a large negative number in place of −∞",
         "A query that sees no summary has equal scores then, and takes the mean of all of them: "
         "the future. What should its output be, and its `lse`?"),
        ({"-torch.inf": "torch.finfo(s.dtype).min", _OF_P: "torch.softmax(s, -1)"},
         "a large negative number in place of −∞"),
        ({"-torch.inf": "-1e4", _OF_P: "torch.softmax(s, -1)"},
         "a large negative number in place of −∞"),
        ("-torch.inf", "-1e9", "an lse that is finite where nothing is seen",
         "lse is the logarithm of a sum of exponentials. What is the sum over nothing, and its "
         "logarithm?"),
        ("-torch.inf", "torch.finfo(s.dtype).min", "an lse that is finite where nothing is seen"),
        ("s.logsumexp(-1)", "s.logsumexp(-1).masked_fill(~is_seen.any(-1), 0)",
         "an lse that is finite where nothing is seen"),
        ({_OF_P: "torch.softmax(s, -1)", "s.logsumexp(-1)": "s.logsumexp(-1).nan_to_num(0)"},
         "mending `lse` where the weights are NaN",
         "An `lse` of −∞ is right where nothing is seen, and `nan_to_num` makes a finite number of "
         "it. The weights of such a row are NaN. What should they be?"),
        (_OF_P, "torch.softmax(s, -1)", "a softmax over nothing",
         "Where a query sees no summary, a softmax divides 0 by 0. What should such a query get?"),
        (_OF_P, "torch.softmax(s, -1).nan_to_num(1 / max(M_c, 1))",
         "the mean of all values where nothing is seen",
         "Those summaries end after the query. What does a query get that sees none?"),
        ("x.repeat_interleave(HQ // H, dim=1)", "x.repeat(1, HQ // H, 1)",
         "query heads that read the wrong KV head",
         "Query head `hq` reads KV head `hq // G`: heads 0 and 1 of four read head 0 of two."),
        (", q, keys)", ", q.unflatten(1, (-1, H)).transpose(1, 2).flatten(1, 2), keys)",
         "cutting the heads as `[G, H]` and joining them as `[H, G]`",
         "Head 1 of your output may come from another query head. `HQ` is `H` groups of `G` "
         "neighbours: in which order do you cut `q`, and in which do you join `o`?"),
        ("x.repeat_interleave(HQ // H, dim=1)", "x[:, :1].expand(-1, HQ, -1)",
         "one KV head for all query heads",
         "There may be several KV heads. Which one does query head `hq` read?"),
        (_nan_taken_out_late, "taking NaN out of `o` too late",
         "The results are right, but NaN weights stay in the graph: the gradient of the values is "
         "0 · NaN. Which tensor has to be free of NaN before it meets the values?"),
        ("(x.repeat", "(x.detach().repeat", "cutting the summaries off the graph",
         "φ learns through `k_cmp` and `v_cmp`. Does a `detach` or `no_grad` stand in the way?"),
    ]),
)  # fmt: skip


# -- window_means --

_D, _BL = 4, 4  # all cases have windows of 3 or 4 tokens


def window_means() -> object:
    """The kernel whose programs make one summary each: the mean of a window's tokens."""

    @triton.jit
    def kernel(X, Means, length, stride, D: tl.constexpr, BL: tl.constexpr):
        window = tl.program_id(0)
        tokens = tl.arange(0, BL)  # [BL], and BL may be larger than length
        width = tl.arange(0, D)
        places = (window * stride + tokens[:, None]) * D + width  # [BL, D]
        x_tile = tl.load(X + places, mask=tokens[:, None] < length, other=0.0)
        mean = tl.sum(x_tile, axis=0) / length  # [D]
        tl.store(Means + window * D + width, mean)

    return kernel


# The chapter's kernel, with both bugs.
_GIVEN = Edited(window_means, {
    "window * stride": "window * length", ", mask=tokens[:, None] < length, other=0.0": "",
})  # fmt: skip


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    given = ast.parse(_GIVEN.source).body[0].body[1]  # behind the docstring
    try:
        (other,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way
    return ast.dump(other) == ast.dump(given)


def _run_means(solution: Callable, M: int, length: int, stride: int) -> Tensor:
    """Launch the kernel, one program for each window; behind `X` lie large numbers. Means that
    depend on masked places of a load without `other` are NaN."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("window_means defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    count = (M - length) // stride + 1
    x = torch.full((M + count * _BL, _D), 100.0)
    x[:M] = _random(M, _D, seed=M)
    means = roomy(torch.full((count, _D), -77.0), -77.0)
    with warnings.catch_warnings():  # the interpreter's, of a division of what lies past the end
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[count,](roomy(x, 100.0), means, length, stride, D=_D, BL=_BL)
        recorded = _recorded_means(kernel, x, count, length, stride)
    return torch.where(recorded.isnan(), torch.nan, means.cpu())


def _recorded_means(kernel: object, x: Tensor, count: int, length: int, stride: int) -> Tensor:
    """The means with NaN in each masked place of a load without `other`, where a launch may happen
    to find a 0; zeros for a kernel with words of Triton that the recorder does not know."""
    means = np.zeros((count, _D))
    arguments = {"X": x.numpy(), "Means": means, "length": length, "stride": stride}
    arguments |= {"D": _D, "BL": _BL}
    try:
        for program in recorder.programs((count,)):
            recorder.run(kernel.fn, program, arguments)
    except Exception:
        return torch.zeros(count, _D)
    return torch.from_numpy(means)


def _means_case(M: int, length: int, stride: int) -> Case:
    here = environment.detect()
    name = f"{M} tokens, windows of {length}, one every {stride}; `BL` is {_BL}"
    return Case(name, lambda: (M, length, stride), lambda: here.why_not("triton", here.device))


_MEANS = TEXTS.exercise(
    "window_means",
    minutes=6, difficulty=2, solution=window_means,
    run=_run_means,
    misconceptions=diffs(window_means, [
        ("window * stride", "window * length", "laying the windows side by side",
         "The windows may overlap. How many tokens behind one window does the next one start?"),
        ("< length", "< BL", "adding tokens that lie behind the window",
         "With `length` 3 the tile still has 4 rows. Which token is in the fourth, and what "
         "keeps it out of the sum?"),
        (", other=0.0", "", "a masked load without `other`",
         "Triton promises nothing about such a masked place. Here it held NaN. Which number adds "
         "nothing to a sum?"),
        ("window * stride", "window * BL", "starting a window every BL tokens",
         "`BL` is the height of the tile, a power of two. Which number says where the next "
         "window starts?"),
        ("window * stride", "window", "starting a window at every token",
         "Window 1 starts `stride` tokens behind window 0. Where does window 2 start?"),
        ("< length", "< stride", "loading `stride` tokens of a window",
         "The stride says where the next window starts. How many tokens are in a window?"),
        ("mask=tokens[:, None]", "mask=tokens[None, :]", "masking numbers of a key, not tokens",
         "In the tile, a row is a token, and a column is one of its numbers. Without `[:, "
         "None]`, along which axis does `tokens` lie?"),
        ("mask=tokens[:, None]", "mask=window * stride + tokens[:, None]",
         "comparing positions in the text with the length",
         "Only window 0 starts at token 0. Which of your numbers counts from the start of the "
         "window?"),
        ("/ length", "/ BL", "dividing by the height of the tile",
         "The mask puts zeros into the sum, and zeros are no tokens. How many tokens are in it?"),
        ("/ length", "/ stride", "dividing by the stride",
         "The weights of a window's tokens should sum to 1. How many tokens are in a window?"),
        (" / length", "", "the sum in place of the mean",
         "A longer window would have larger keys. To what should the weights of its tokens sum?"),
        ("axis=0", "axis=1", "summing the numbers of a token, not the tokens of a window",
         "`x_tile` is `[BL, D]`, and a summary is `[D]`. Which axis has to go?"),
    ]),
    cases=(_means_case(8, 4, 4), _means_case(8, 4, 2), _means_case(9, 3, 3), _means_case(8, 3, 2)),
)  # fmt: skip


EXERCISES = (_COMPRESS, _LOGIT, _ATTENTION, _MEANS)

PREDICTIONS = TEXTS.predictions(
    globals(),
    times_lighter={"choices": (1, 3, 30, 500)},
    twice_the_text={"tolerance": 0.02},
    needles_windows={"choices": (90, 50, 25, 2), "unit": "%"},
    best_elsewhere={"choices": ("mean", "weighted", "linear", "mlp")},
)

TRAPS = TEXTS.traps

DOUBLES = (
    Double("compressed_attention", names=("leaving out the scale", "returning `lse` before `o`")),
    Double("window_logit", names=("the sum for the mean key's score",
                                  "the log-sum-exp without the length")),
    Double("window_logit", names=("the two the other way round", "exponentials that overflow")),
    Double("window_means", names=("laying the windows side by side",
                                  "adding tokens that lie behind the window")),
    Double("window_means", names=("starting a window every BL tokens",
                                  "dividing by the height of the tile")),
)  # fmt: skip
