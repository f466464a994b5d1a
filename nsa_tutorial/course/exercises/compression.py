"""Exercises of chapter 06: who sees a summary, attending to summaries, what a mean key misses, and
a small kernel with two bugs.

The wrong solutions of an exercise are one function, or one kernel, told which slips to make.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import CodeType

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.widgets.compression import draw_windows
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- visible_summaries --


def visible_summaries(position: int, length: int, stride: int) -> int:
    """How many summaries the query at `position` sees."""
    tokens = position + 1  # those up to the query, itself included
    return max((tokens - length) // stride + 1, 0)


def _visible(slips: Slips, position: int, length: int, stride: int) -> int:
    """`visible_summaries` with slips."""
    tokens = position + ("one late" not in slips)
    first = 1 if "starts" in slips else stride if "strides" in slips else length
    first = 2 * stride if "two strides" in slips else first
    step = length if "no overlap" in slips else stride
    moves = (tokens - first) // step
    if "up" in slips:
        moves = -(-(tokens - first) // step)
    if "towards zero" in slips:
        moves = int((tokens - first) / step)
    if "fraction" in slips:
        moves = (tokens - first) / step
    count = moves + ("no first" not in slips)
    if "negative, by int" in slips:
        return int((tokens - first) / step + ("no first" not in slips))
    return count if "negative" in slips else max(count, 0)


def _draw_visible(arguments: tuple, got: object, expected: int) -> Picture:
    """The windows about the failing position."""
    position, length, stride = arguments
    drawn = draw_windows(max(position + 2 * length, 16), length, stride, position)
    return Picture(drawn.figure, f"Windows that end by position {position}: {expected}, not {got}")


_VISIBLE_MISTAKES = (
    Misconception(
        "letting a summary be seen once it starts",
        slip(_visible, "starts"),
        "A summary that has started may still hold tokens of the query's future. Which of "
        "its tokens has to be there first?",
    ),
    Misconception(
        "letting a summary be seen only after its last token",
        slip(_visible, "one late"),
        "A query sees its own token. If a window ends with that token, what in it is from "
        "the future?",
    ),
    Misconception(
        "rounding up",
        slip(_visible, "up"),
        "A window that is only partly there does not count. In which direction does that round?",
    ),
    Misconception(
        "rounding towards zero",
        slip(_visible, "towards zero"),
        "For an early query the number in front of the division is negative, and `int` "
        "rounds it up. What does `//` do with it?",
    ),
    Misconception(
        "counting parts of windows",
        slip(_visible, "fraction"),
        "The count is no whole number here. Which division of Python rounds down?",
    ),
    Misconception(
        "going below zero at the start",
        slip(_visible, "negative"),
        "Where no window fits, the formula says how many are missing. Where does a count end?",
    ),
    Misconception(
        "forgetting the first window",
        slip(_visible, "no first"),
        "The division counts how often the window can move on. Where was it before it moved?",
    ),
    Misconception(
        "counting windows that do not overlap",
        slip(_visible, "no overlap"),
        "A window is `length` tokens long. How many tokens later does the next one start?",
    ),
    Misconception(
        "counting whole strides",
        slip(_visible, "strides"),
        "A stride is the distance from one window's start to the next. At which position "
        "does the first window end?",
    ),
    Misconception(
        "taking every window to be two strides long",
        slip(_visible, "two strides"),
        "That is right for length 4 and stride 2. How many tokens does the first window need "
        "for length 6 and stride 2?",
    ),
)

# `int` of the whole rounds as `//` does, but for counts below zero: one mistake, and not two
_NEGATIVE_BY_INT = replace(
    next(m for m in _VISIBLE_MISTAKES if m.name == "going below zero at the start"),
    wrong=slip(_visible, "negative, by int"),
)

_VISIBLE = TEXTS.exercise(
    "visible_summaries",
    minutes=5,
    difficulty=2,
    solution=visible_summaries,
    misconceptions=(*_VISIBLE_MISTAKES, _NEGATIVE_BY_INT),
    combine=together(
        _VISIBLE_MISTAKES,
        {"starts", "strides", "two strides"},
        {"up", "towards zero", "fraction"},
    ),
    cases=(
        Case("a window that ends at the query", lambda: (3, 4, 2)),
        Case("one token before the first window's end", lambda: (2, 4, 2)),
        Case("the first query", lambda: (0, 4, 2)),
        Case("the first query, a window at every token", lambda: (0, 4, 1)),
        Case("between two ends", lambda: (8, 4, 2)),
        Case("length is no multiple of stride", lambda: (11, 5, 3)),
        Case("windows that do not overlap", lambda: (11, 4, 4)),
        Case("windows of three strides", lambda: (8, 6, 2)),
        Case("the last of 500 tokens, length 32, stride 16", lambda: (499, 32, 16)),
    ),
    tolerance=0.0,
    picture=_draw_visible,
)


# -- attend_to_summaries --


def attend_to_summaries(
    q: Tensor, k: Tensor, v: Tensor, position: int, length: int, stride: int
) -> tuple[Tensor, Tensor]:
    """Attention of one query to the summaries it sees: o [DV] and lse."""
    tokens = position + 1  # those up to the query, itself included
    count = max((tokens - length) // stride + 1, 0)
    if count == 0:
        return torch.zeros(v.shape[1]), torch.tensor(-torch.inf)
    # windows [M_c, D or DV, length]; a mean of each, and the first `count`
    k_cmp, v_cmp = (x.unfold(0, length, stride).mean(-1)[:count] for x in (k, v))
    scores = len(q) ** -0.5 * k_cmp @ q  # [count]
    return torch.softmax(scores, 0) @ v_cmp, scores.logsumexp(0)


def _attend(
    slips: Slips, q: Tensor, k: Tensor, v: Tensor, position: int, length: int, stride: int
) -> tuple[Tensor, Tensor]:
    """`attend_to_summaries` with slips."""
    step = length if "no overlap" in slips else stride
    axis = 1 if "numbers" in slips else -1
    k_cmp, v_cmp = (x.unfold(0, length, step).mean(axis) for x in (k, v))
    if "sum" in slips:
        k_cmp, v_cmp = length * k_cmp, length * v_cmp
    if "unsummarised values" in slips:
        v_cmp = v[: len(v_cmp) * step : step]
    if "values of tokens" in slips:
        v_cmp = v[: len(v_cmp)]
    power = 0 if "no scale" in slips else -1 if "by D" in slips else -0.5
    scale = (2 if "another D" in slips else q.shape[0]) ** power
    count = visible_summaries(position, length, stride)
    if "starts" in slips:
        count = min(position // stride + 1, len(k_cmp))
    if "one late" in slips:
        count = visible_summaries(position - 1, length, stride)
    if "all" in slips:
        count = len(k_cmp)
    if "position" in slips:
        count = min(position, len(k_cmp))
    if count == 0 and "tokens" in slips:
        k_cmp, v_cmp, count = k[: position + 1], v[: position + 1], position + 1
    if count == 0 and "nan" not in slips:
        lse = v.new_tensor(0.0 if "lse 0" in slips else -math.inf)
        shape = () if "a number" in slips else q.shape if "width of q" in slips else v.shape[1:]
        o = v.new_zeros(shape)
        return o if "alone" in slips else (lse, o) if "swapped" in slips else (o, lse)
    scores = scale * (q @ k_cmp.T if "q first" in slips else k_cmp @ q)
    hidden = torch.arange(len(scores)) >= count
    seen = scores.masked_fill(hidden, 0.0 if "zeros" in slips else -math.inf)
    weights, lse = torch.softmax(seen, 0), seen.logsumexp(0)
    if {"after the softmax", "denominator"} & slips:
        weights = torch.softmax(scores, 0).masked_fill(hidden, 0)
    if "after the softmax" in slips:
        lse = scores.logsumexp(0)
    if "sum of exponentials" in slips:
        lse = seen.exp().sum()
    if "base two" in slips:
        lse = lse / math.log(2)
    o = weights @ v_cmp
    if "alone" in slips:
        return o
    return (lse, o) if "swapped" in slips else (o, lse)


_ATTEND_MISTAKES = (
    *(
        Misconception(
            "averaging the numbers of a token, not the tokens of a window",
            Wrong(_attend, frozenset(way)),
            "`unfold` gives `[M_c, D, length]`: print its shape. On which axis do the tokens lie?",
        )
        for way in (("numbers", "q first"), ("numbers",))
    ),
    Misconception(
        "a softmax over nothing",
        slip(_attend, "nan"),
        "Where a query sees no summary, a softmax divides 0 by 0. What should such a query get?",
    ),
    Misconception(
        "taking the `D` of an earlier cell",
        slip(_attend, "another D"),
        "There, a query is 2 numbers wide. How wide is *this* query? Ask `q`.",
    ),
    Misconception(
        "taking the position for the number of summaries",
        slip(_attend, "position"),
        "A position counts tokens. How many summaries have ended by then?",
    ),
    Misconception(
        "returning `o` alone",
        slip(_attend, "alone"),
        "Two results are asked for. Which number says how much all the visible summaries weigh "
        "together?",
    ),
    Misconception(
        "an lse of 0 for a query that sees nothing",
        slip(_attend, "lse 0"),
        "lse is the logarithm of a sum of exponentials. What is the sum over nothing, and "
        "its logarithm?",
    ),
    Misconception(
        "attending to tokens where there is no summary yet",
        slip(_attend, "tokens"),
        "This branch knows only summaries, and the sliding window brings the newest "
        "tokens. What does a query get that sees no summary?",
    ),
    Misconception(
        "windows that do not overlap",
        slip(_attend, "no overlap"),
        "A window may start before the last one has ended. How many tokens later does it start?",
    ),
    Misconception(
        "the sum in place of the mean",
        slip(_attend, "sum"),
        "A longer window would have larger keys. To what should the weights of its tokens sum?",
    ),
    Misconception(
        "summarising the keys and not the values",
        slip(_attend, "unsummarised values"),
        "A summary's key stands for all tokens of its window. What should its value stand for?",
    ),
    Misconception(
        "taking token j's value for summary j",
        slip(_attend, "values of tokens"),
        "The keys are those of windows, the values those of the first tokens. Which values "
        "belong to window j?",
    ),
    Misconception(
        "letting a summary be seen once it starts",
        slip(_attend, "starts"),
        "Change the text's last token: does the result of an earlier query change?",
    ),
    Misconception(
        "letting a summary be seen only after its last token",
        slip(_attend, "one late"),
        "A window that ends with the query's own token holds nothing from the future. Does "
        "the query see it?",
    ),
    Misconception(
        "seeing all summaries",
        slip(_attend, "all"),
        "Some of them end after the query. What do those hold?",
    ),
    Misconception(
        "scores of 0 for hidden summaries",
        slip(_attend, "zeros"),
        "A score of 0 still weighs e⁰. Which score weighs nothing?",
    ),
    Misconception(
        "masking after the softmax",
        slip(_attend, "after the softmax"),
        "The hidden summaries are gone from the sum of the values, but not from the "
        "denominator. Do the weights sum to 1?",
    ),
    Misconception(
        "hidden summaries in the denominator",
        slip(_attend, "denominator"),
        "`lse` is right, and the weights are those of a softmax over all summaries. Do the "
        "visible ones sum to 1?",
    ),
    Misconception(
        "an lse without its logarithm",
        slip(_attend, "sum of exponentials"),
        "That is the sum of the exponentials. What do the letters l, s and e stand for?",
    ),
    Misconception(
        "leaving out the scale",
        slip(_attend, "no scale"),
        "Dot products grow with the width. By which power of D are they multiplied?",
    ),
    Misconception(
        "dividing by D where √D is meant",
        slip(_attend, "by D"),
        "The scores are too flat. Which power of D is the scale?",
    ),
    Misconception(
        "returning `lse` before `o`",
        slip(_attend, "swapped"),
        "The statement asks for two results. Which of them comes first?",
    ),
    Misconception(
        "an output as wide as the query",
        slip(_attend, "width of q"),
        "An output is a sum of values, and `v` is `[M, DV]`. How many zeros are there?",
    ),
    Misconception(
        "one number for an output of zeros",
        slip(_attend, "a number"),
        "Other queries get an output `[DV]`. What shape do the zeros of this one have?",
    ),
    Misconception(
        "an lse to the base two",
        slip(_attend, "base two"),
        "Chapter 03's kernels count in powers of two, and an `lse` is told in powers of e. Which "
        "logarithm is it?",
    ),
)

_ATTEND = TEXTS.exercise(
    "attend_to_summaries",
    minutes=7,
    difficulty=2,
    solution=attend_to_summaries,
    returns=("o", "lse"),
    misconceptions=_ATTEND_MISTAKES,
    combine=together(
        _ATTEND_MISTAKES,
        {"nan", "lse 0", "tokens"},
        {"nan", "tokens", "width of q", "a number"},
        {"sum of exponentials", "base two"},
        {"starts", "one late", "all", "position"},
        {"zeros", "after the softmax", "denominator"},
        {"after the softmax", "sum of exponentials"},
        {"unsummarised values", "values of tokens"},
        {"no overlap", "starts"},
        {"no overlap", "one late"},
        {"no scale", "by D"},
        {"no scale", "another D"},
        {"alone", "swapped"},
        {"all", "zeros"},
        {"all", "after the softmax"},
        {"all", "denominator"},
    ),
    cases=(
        Case(
            "four tokens, length 2, stride 1; the query at position 2",
            lambda: (
                torch.ones(1),
                torch.tensor([[0.0], [2], [4], [9]]),
                torch.tensor([[1.0], [3], [8], [9]]),
                2,
                2,
                1,
            ),
        ),
        Case(
            "the first query of four",
            lambda: (torch.ones(1), torch.ones(4, 1), torch.ones(4, 1), 0, 2, 1),
        ),
        Case(
            "12 tokens, position 9",
            lambda: (_random(4, seed=0), _random(12, 4, seed=1), _random(12, 3, seed=2), 9, 4, 2),
        ),
        Case(
            "23 tokens, position 17",
            lambda: (_random(6, seed=3), _random(23, 6, seed=4), _random(23, 5, seed=5), 17, 5, 3),
        ),
        Case(
            "position 3 of 23",
            lambda: (_random(6, seed=3), _random(23, 6, seed=4), _random(23, 5, seed=5), 3, 5, 3),
        ),
        Case(
            "the last query",
            lambda: (_random(4, seed=6), _random(16, 4, seed=7), _random(16, 2, seed=8), 15, 4, 4),
        ),
    ),
)


# -- window_logit --


def window_logit(scores: Tensor) -> tuple[Tensor, Tensor]:
    """For windows of token scores [W, length]: the mean key's score, and the score that would give
    the window its weight."""
    by_mean_key = scores.mean(1)
    by_weight = scores.logsumexp(1) - math.log(scores.shape[1])
    return by_mean_key, by_weight


def _logit(slips: Slips, scores: Tensor) -> tuple[Tensor, Tensor]:
    """`window_logit` with slips."""
    if "across" in slips:
        scores = scores.T
    length = len(scores) if "windows" in slips else scores.shape[1]
    first = scores.sum(1) if "sum" in slips else scores.mean(1)
    second = scores.logsumexp(1) - math.log(length)
    if "mean" in slips:
        second = scores.mean(1)
    if "no length" in slips:
        second = scores.logsumexp(1)
    if "minus the length" in slips:
        second = scores.logsumexp(1) - length
    if "times the length" in slips:
        second = scores.logsumexp(1) + math.log(length)
    if "divided by the length" in slips:
        second = scores.logsumexp(1) / length
    if "largest" in slips:
        second = scores.amax(1)
    if "scores by the length" in slips:
        second = (scores / length).logsumexp(1)
    if "softmax" in slips:
        second = (scores.softmax(1) * scores).sum(1)
    if "weight" in slips:
        second = scores.exp().mean(1)
    if "base two" in slips:
        second = scores.logsumexp(1) - math.log2(length)
    if "32" in slips:
        second = scores.logsumexp(1) - math.log(32)
    if "overflow" in slips:
        weight = scores.exp().sum(1)
        second = (weight if "no length" in slips else weight / length).log()
    return (second, first) if "swapped" in slips else (first, second)


_OTHER_WEIGHTS = {
    "mean",
    "minus the length",
    "times the length",
    "divided by the length",
    "scores by the length",
    "largest",
    "softmax",
    "weight",
    "base two",
    "32",
}

_LOGIT_MISTAKES = (
    Misconception(
        "the two the other way round",
        slip(_logit, "swapped"),
        "First the mean key's score, then the one that the window's weight asks for. Which "
        "of the two is never the smaller?",
    ),
    Misconception(
        "taking the mean for both",
        slip(_logit, "mean"),
        "A softmax weighs by exponentials. Is the exponential of a mean the mean of the "
        "exponentials?",
    ),
    Misconception(
        "the log-sum-exp without the length",
        slip(_logit, "no length"),
        "That is the score of one token as heavy as the whole window. What is the score if "
        "`length` equal tokens share the weight?",
    ),
    Misconception(
        "taking away the length, not its logarithm",
        slip(_logit, "minus the length"),
        "The weight is divided by the length. Which term does that become in a logarithm?",
    ),
    Misconception(
        "taking the number of windows for their length",
        slip(_logit, "windows"),
        "`scores` is `[W, length]`. Which axis says how many tokens a window has?",
    ),
    Misconception(
        "going across the windows",
        slip(_logit, "across"),
        "Each row is a window. Which axis holds its tokens?",
    ),
    Misconception(
        "adding the logarithm of the length",
        slip(_logit, "times the length"),
        "The score grows with the length, though more tokens share the weight. For a "
        "window of zeros, what has to come out?",
    ),
    Misconception(
        "dividing a score by the length",
        slip(_logit, "divided by the length"),
        "The length divides the weight. What does that do to its logarithm?",
    ),
    Misconception(
        "dividing the scores by the length before the exponentials",
        slip(_logit, "scores by the length"),
        "The length divides the weight, a sum of exponentials. Is `exp(s / 2)` half of `exp(s)`?",
    ),
    Misconception(
        "the largest score for the window's weight",
        slip(_logit, "largest"),
        "If all tokens had the largest score, the window would weigh more than it does. "
        "What do the others weigh?",
    ),
    Misconception(
        "the sum for the mean key's score",
        slip(_logit, "sum"),
        "The mean key is a `length`-th of the sum of the keys. And its score?",
    ),
    Misconception(
        "a mean weighted by the softmax",
        slip(_logit, "softmax"),
        "That is the score that the query finds on average where it looks, and it is too "
        "high. What does the window weigh, as a sum?",
    ),
    Misconception(
        "giving the weight in place of its score",
        slip(_logit, "weight"),
        "That is what a token weighs on average. Which score has this exponential?",
    ),
    Misconception(
        "the length's logarithm to the base two",
        slip(_logit, "base two"),
        "The weights are powers of e. Which logarithm undoes those?",
    ),
    Misconception(
        "taking 32 for every window's length",
        slip(_logit, "32"),
        "These windows are smaller. Which axis of `scores` says how many tokens a window has?",
    ),
    Misconception(
        "exponentials that overflow",
        slip(_logit, "overflow"),
        "Right for small scores. In fp32, e to the 89 is already ∞. What did chapter 03 "
        "subtract first?",
    ),
)

_LOGIT = TEXTS.exercise(
    "window_logit",
    minutes=5,
    difficulty=2,
    solution=window_logit,
    returns=("by_mean_key", "by_weight"),
    misconceptions=_LOGIT_MISTAKES,
    combine=together(
        _LOGIT_MISTAKES,
        {*_OTHER_WEIGHTS, "no length"},
        {*_OTHER_WEIGHTS, "overflow"},
        {"windows", "no length"},
        {"windows", "32"},
    ),
    cases=(
        Case(
            "a flat window and one that is not", lambda: (torch.tensor([[1.0, 1.0], [0.0, 2.0]]),)
        ),
        Case("a needle among zeros", lambda: (torch.tensor([[0.0, 0.0, 0.0, 10.0]]),)),
        Case("three windows of five", lambda: (_random(3, 5, seed=0, factor=2.0),)),
        Case("scores in the hundreds", lambda: (_random(2, 4, seed=1, factor=300.0),)),
    ),
)


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


_GIVEN = """
@triton.jit
def kernel(X, Means, length, stride, D: tl.constexpr, BL: tl.constexpr):
    window = tl.program_id(0)
    tokens = tl.arange(0, BL)  # [BL], and BL may be larger than length
    width = tl.arange(0, D)
    places = (window * length + tokens[:, None]) * D + width  # [BL, D]
    x_tile = tl.load(X + places)
    mean = tl.sum(x_tile, axis=0) / length  # [D]
    tl.store(Means + window * D + width, mean)
"""


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(_GIVEN))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


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
    arguments |= {"D": _D, "BL": _BL} | getattr(kernel, "slips", {})
    try:
        for program in recorder.programs((count,)):
            recorder.run(kernel.fn, program, arguments)
    except Exception:
        return torch.zeros(count, _D)
    return torch.from_numpy(means)


@triton.jit
def _wrong_means(
    X, Means, length, stride,
    D: tl.constexpr, BL: tl.constexpr, START: tl.constexpr, TAIL: tl.constexpr,
    SUM: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    tokens = tl.arange(0, BL)
    width = tl.arange(0, D)
    first = window * stride
    if START == "side by side":
        first = window * length
    elif START == "tiles":
        first = window * BL
    elif START == "every token":
        first = window
    places = (first + tokens[:, None]) * D + width
    if TAIL == "as it came":
        x_tile = tl.load(X + places)
    elif TAIL == "no other":
        x_tile = tl.load(X + places, mask=tokens[:, None] < length)
    elif TAIL == "stride":
        x_tile = tl.load(X + places, mask=tokens[:, None] < stride, other=0.0)
    elif TAIL == "columns":
        x_tile = tl.load(X + places, mask=tokens[None, :] < length, other=0.0)
    elif TAIL == "positions":
        x_tile = tl.load(X + places, mask=first + tokens[:, None] < length, other=0.0)
    else:
        x_tile = tl.load(X + places, mask=tokens[:, None] < length, other=0.0)
    total = tl.sum(x_tile, axis=1) if AXIS == "numbers" else tl.sum(x_tile, axis=0)
    if SUM == "by the tile":
        total = total / BL
    elif SUM == "by the stride":
        total = total / stride
    elif SUM != "sum":
        total = total / length
    tl.store(Means + window * D + width, total)


class _Mistaken:
    """`_wrong_means` with its slips chosen; launched like a kernel."""

    def __init__(self, slips: Slips) -> None:
        self.run, self.fn = None, getattr(_wrong_means, "fn", _wrong_means)
        groups = {"START": _STARTS, "TAIL": _TAILS, "SUM": _SUMS, "AXIS": {"numbers"}}
        self.slips = {
            switch: next((name for name in slips if name in group), "right")
            for switch, group in groups.items()
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_means[grid](*args, **self.slips, **sizes)


_STARTS = {"side by side", "tiles", "every token"}
_TAILS = {"as it came", "no other", "stride", "columns", "positions"}
_SUMS = {"by the tile", "by the stride", "sum"}

_MEANS_MISTAKES = (
    Misconception(
        "laying the windows side by side",
        slip(_Mistaken, "side by side"),
        "The windows may overlap. How many tokens behind one window does the next one start?",
    ),
    Misconception(
        "adding tokens that lie behind the window",
        slip(_Mistaken, "as it came"),
        "With `length` 3 the tile still has 4 rows. Which token is in the fourth, and what keeps "
        "it out of the sum?",
    ),
    Misconception(
        "a masked load without `other`",
        slip(_Mistaken, "no other"),
        "Triton promises nothing about such a masked place. Here it held NaN. Which number adds "
        "nothing to a sum?",
    ),
    Misconception(
        "starting a window every BL tokens",
        slip(_Mistaken, "tiles"),
        "`BL` is the height of the tile, a power of two. Which number says where the next window "
        "starts?",
    ),
    Misconception(
        "starting a window at every token",
        slip(_Mistaken, "every token"),
        "Window 1 starts `stride` tokens behind window 0. Where does window 2 start?",
    ),
    Misconception(
        "loading `stride` tokens of a window",
        slip(_Mistaken, "stride"),
        "The stride says where the next window starts. How many tokens are in a window?",
    ),
    Misconception(
        "masking numbers of a key, not tokens",
        slip(_Mistaken, "columns"),
        "In the tile, a row is a token, and a column is one of its numbers. Without `[:, None]`, "
        "along which axis does `tokens` lie?",
    ),
    Misconception(
        "comparing positions in the text with the length",
        slip(_Mistaken, "positions"),
        "Only window 0 starts at token 0. Which of your numbers counts from the start of the "
        "window?",
    ),
    Misconception(
        "dividing by the height of the tile",
        slip(_Mistaken, "by the tile"),
        "The mask puts zeros into the sum, and zeros are no tokens. How many tokens are in it?",
    ),
    Misconception(
        "dividing by the stride",
        slip(_Mistaken, "by the stride"),
        "The weights of a window's tokens should sum to 1. How many tokens are in a window?",
    ),
    Misconception(
        "the sum in place of the mean",
        slip(_Mistaken, "sum"),
        "A longer window would have larger keys. To what should the weights of its tokens sum?",
    ),
    Misconception(
        "summing the numbers of a token, not the tokens of a window",
        slip(_Mistaken, "numbers"),
        "`x_tile` is `[BL, D]`, and a summary is `[D]`. Which axis has to go?",
    ),
)


def _means_case(M: int, length: int, stride: int) -> Case:
    here = environment.detect()
    name = f"{M} tokens, windows of {length}, one every {stride}; `BL` is {_BL}"
    return Case(name, lambda: (M, length, stride), lambda: here.why_not("triton", here.device))


_MEANS = TEXTS.exercise(
    "window_means",
    minutes=6,
    difficulty=2,
    solution=window_means,
    run=_run_means,
    misconceptions=_MEANS_MISTAKES,
    combine=together(_MEANS_MISTAKES, _STARTS, _TAILS, _SUMS),
    cases=(
        _means_case(8, 4, 4),
        _means_case(8, 4, 2),
        _means_case(9, 3, 3),
        _means_case(8, 3, 2),
    ),
)

EXERCISES = (_VISIBLE, _ATTEND, _LOGIT, _MEANS)


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    times_lighter={"choices": (1, 3, 30, 500)},
    first_query_that_sees={"choices": (0, 15, 31, 32)},
    twice_the_text={"tolerance": 0.02},
    needles_windows={"choices": (90, 50, 20, 2), "unit": "%"},
    best_elsewhere={"choices": ("mean", "weighted", "linear", "mlp")},
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- two mistakes at once --

DOUBLES = (
    Double(
        "visible_summaries",
        lambda position, length, stride: (position - length) // stride + 1,
        ("letting a summary be seen only after its last token", "going below zero at the start"),
    ),
    Double(
        "visible_summaries",
        lambda position, length, stride: (position + 1 - length) // stride,
        ("forgetting the first window", "going below zero at the start"),
    ),
    Double(
        "attend_to_summaries",
        Wrong(_attend, frozenset({"starts", "no scale"})),
        ("letting a summary be seen once it starts", "leaving out the scale"),
    ),
    Double(
        "attend_to_summaries",
        Wrong(_attend, frozenset({"one late", "nan"})),
        ("letting a summary be seen only after its last token", "a softmax over nothing"),
    ),
    Double(
        "window_logit",
        lambda scores: (scores.sum(1), scores.logsumexp(1)),
        ("the sum for the mean key's score", "the log-sum-exp without the length"),
    ),
    Double(
        "window_logit",
        lambda scores: (scores.exp().mean(1).log(), scores.mean(1)),
        ("the two the other way round", "exponentials that overflow"),
    ),
    Double(
        "window_means",
        lambda: _Mistaken(frozenset({"side by side", "as it came"})),
        ("laying the windows side by side", "adding tokens that lie behind the window"),
    ),
    Double(
        "window_means",
        lambda: _Mistaken(frozenset({"tiles", "by the tile"})),
        ("starting a window every BL tokens", "dividing by the height of the tile"),
    ),
)
