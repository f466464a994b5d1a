"""Exercises of chapter 06: who sees a summary, attending to summaries, what a mean key misses, and
a small kernel with two bugs.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from types import CodeType

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.widgets.compression import draw_windows
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- visible_summaries --


def visible_summaries(position: int, length: int, stride: int) -> int:
    """How many summaries the query at `position` sees."""
    tokens = position + 1  # those up to the query, itself included
    moves = (tokens - length) // stride  # how often the first window can move on
    return max(moves + 1, 0)


def _draw_visible(arguments: tuple, got: object, expected: int) -> Picture:
    """The windows about the failing position."""
    position, length, stride = arguments
    drawn = draw_windows(max(position + 2 * length, 16), length, stride, position)
    return Picture(drawn.figure, f"Windows that end by position {position}: {expected}, not {got}")


_VISIBLE = TEXTS.exercise(
    "visible_summaries",
    minutes=5, difficulty=2, solution=visible_summaries,
    tolerance=0.0,
    picture=_draw_visible,
    misconceptions=diffs(visible_summaries, [
        ("- length", "- 1", "letting a summary be seen once it starts",
         "A summary that has started may still hold tokens of the query's future. Which of its "
         "tokens has to be there first?"),
        ("position + 1", "position", "letting a summary be seen only after its last token",
         "A query sees its own token. If a window ends with that token, what in it is from the "
         "future?"),
        ({"(tokens": "-(-(tokens", "// stride": "// stride)"}, "rounding up",
         "A window that is only partly there does not count. In which direction does that round?"),
        ({"(tokens": "int((tokens", "// stride": "/ stride)"}, "rounding towards zero",
         "For an early query the number in front of the division is negative, and `int` rounds "
         "it up. What does `//` do with it?"),
        ("//", "/", "counting parts of windows",
         "The count is no whole number here. Which division of Python rounds down?"),
        ({"max(": "(", ", 0)": ")"}, "going below zero at the start",
         "Where no window fits, the formula says how many are missing. Where does a count end?"),
        ({"//": "/", "max(": "int(", ", 0)": ")"}, "going below zero at the start"),
        ("moves + 1", "moves", "forgetting the first window",
         "The division counts how often the window can move on. Where was it before it moved?"),
        ("// stride", "// length", "counting windows that do not overlap",
         "A window is `length` tokens long. How many tokens later does the next one start?"),
        ("- length", "- stride", "counting whole strides",
         "A stride is the distance from one window's start to the next. At which position does "
         "the first window end?"),
        ("- length", "- 2 * stride", "taking every window to be two strides long",
         "That is right for length 4 and stride 2. How many tokens does the first window need "
         "for length 6 and stride 2?"),
    ]),
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
)  # fmt: skip


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


_ATTEND = TEXTS.exercise(
    "attend_to_summaries",
    minutes=7, difficulty=2, solution=attend_to_summaries,
    returns=("o", "lse"),
    misconceptions=diffs(attend_to_summaries, [
        (".mean(-1)", ".mean(1)", "averaging the numbers of a token, not the tokens of a window",
         "`unfold` gives `[M_c, D, length]`: print its shape. On which axis do the tokens lie?"),
        ({".mean(-1)": ".mean(1)", "k_cmp @ q": "q @ k_cmp.T"},
         "averaging the numbers of a token, not the tokens of a window"),
        ({"count == 0": "False", "[:count]": "",
         "# [count]": "+ torch.where(torch.arange(len(k_cmp)) < count, 0, -torch.inf)"},
         "a softmax over nothing",
         "Where a query sees no summary, a softmax divides 0 by 0. What should such a query get?"),
        ("len(q)", "2", "taking the `D` of an earlier cell",
         "There, a query is 2 numbers wide. How wide is *this* query? Ask `q`."),
        ("max((tokens - length) // stride + 1, 0)", "position",
         "taking the position for the number of summaries",
         "A position counts tokens. How many summaries have ended by then?"),
        ({", torch.tensor(-torch.inf)": "", ", scores.logsumexp(0)": ""}, "returning `o` alone",
         "Two results are asked for. Which number says how much all the visible summaries weigh "
         "together?"),
        ("-torch.inf", "0.0", "an lse of 0 for a query that sees nothing",
         "lse is the logarithm of a sum of exponentials. What is the sum over nothing, and its "
         "logarithm?"),
        ("return torch.zeros(v.shape[1]), torch.tensor(-torch.inf)",
         "k, v, count, length, stride = k[:tokens], v[:tokens], tokens, 1, 1",
         "attending to tokens where there is no summary yet",
         "This branch knows only summaries, and the sliding window brings the newest tokens. "
         "What does a query get that sees no summary?"),
        ("length, stride)", "length, length)", "windows that do not overlap",
         "A window may start before the last one has ended. How many tokens later does it start?"),
        (".mean(-1)", ".sum(-1)", "the sum in place of the mean",
         "A longer window would have larger keys. To what should the weights of its tokens sum?"),
        ("scores = ", "v_cmp = v[::stride][:count]\n    scores = ",
         "summarising the keys and not the values",
         "A summary's key stands for all tokens of its window. What should its value stand for?"),
        ("scores = ", "v_cmp = v[:count]\n    scores = ", "taking token j's value for summary j",
         "The keys are those of windows, the values those of the first tokens. Which values "
         "belong to window j?"),
        ("max((tokens - length) // stride + 1, 0)", "position // stride + 1",
         "letting a summary be seen once it starts",
         "Change the text's last token: does the result of an earlier query change?"),
        ("position + 1", "position", "letting a summary be seen only after its last token",
         "A window that ends with the query's own token holds nothing from the future. Does the "
         "query see it?"),
        ("max((tokens - length) // stride + 1, 0)", "len(k)", "seeing all summaries",
         "Some of them end after the query. What do those hold?"),
        ("[:count]", "", "seeing all summaries"),
        ({"[:count]": "", "# [count]": "* (torch.arange(len(k_cmp)) < count)"},
         "scores of 0 for hidden summaries",
         "A score of 0 still weighs e⁰. Which score weighs nothing?"),
        ({"[:count]": "", "softmax(scores, 0)": "softmax(scores, 0)[:count]",
         "v_cmp,": "v_cmp[:count],"}, "masking after the softmax",
         "The hidden summaries are gone from the sum of the values, but not from the "
         "denominator. Do the weights sum to 1?"),
        ({"[:count]": "", "softmax(scores, 0)": "softmax(scores, 0)[:count]",
         "v_cmp,": "v_cmp[:count],", "scores.log": "scores[:count].log"},
         "hidden summaries in the denominator",
         "`lse` is right, and the weights are those of a softmax over all summaries. Do the "
         "visible ones sum to 1?"),
        ("scores.logsumexp(0)", "scores.exp().sum()", "an lse without its logarithm",
         "That is the sum of the exponentials. What do the letters l, s and e stand for?"),
        ("len(q) ** -0.5 * ", "", "leaving out the scale",
         "Dot products grow with the width. By which power of D are they multiplied?"),
        ("** -0.5", "** -1", "dividing by D where √D is meant",
         "The scores are too flat. Which power of D is the scale?"),
        ({"torch.zeros(v.shape[1]), torch.tensor(-torch.inf)":
          "torch.tensor(-torch.inf), torch.zeros(v.shape[1])",
         "torch.softmax(scores, 0) @ v_cmp, scores.logsumexp(0)":
          "scores.logsumexp(0), torch.softmax(scores, 0) @ v_cmp"}, "returning `lse` before `o`",
         "The statement asks for two results. Which of them comes first?"),
        ("v.shape[1]", "len(q)", "an output as wide as the query",
         "An output is a sum of values, and `v` is `[M, DV]`. How many zeros are there?"),
        ("v.shape[1]", "()", "one number for an output of zeros",
         "Other queries get an output `[DV]`. What shape do the zeros of this one have?"),
        ("scores.logsumexp(0)", "scores.logsumexp(0) / math.log(2)", "an lse to the base two",
         "Chapter 03's kernels count in powers of two, and an `lse` is told in powers of e. "
         "Which logarithm is it?"),
    ]),
    cases=(
        Case("four tokens, length 2, stride 1; the query at position 2", lambda: (
            torch.ones(1), torch.tensor([[0.0], [2], [4], [9]]),
            torch.tensor([[1.0], [3], [8], [9]]), 2, 2, 1)),
        Case("the first query of four",
             lambda: (torch.ones(1), torch.ones(4, 1), torch.ones(4, 1), 0, 2, 1)),
        Case("12 tokens, position 9", lambda: (
            _random(4, seed=0), _random(12, 4, seed=1), _random(12, 3, seed=2), 9, 4, 2)),
        Case("23 tokens, position 17", lambda: (
            _random(6, seed=3), _random(23, 6, seed=4), _random(23, 5, seed=5), 17, 5, 3)),
        Case("position 3 of 23", lambda: (
            _random(6, seed=3), _random(23, 6, seed=4), _random(23, 5, seed=5), 3, 5, 3)),
        Case("the last query", lambda: (
            _random(4, seed=6), _random(16, 4, seed=7), _random(16, 2, seed=8), 15, 4, 4)),
    ),
)  # fmt: skip


# -- window_logit --


def window_logit(scores: Tensor) -> tuple[Tensor, Tensor]:
    """For windows of token scores [W, length]: the mean key's score, and the score that would give
    the window its weight."""
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
         "`scores` is `[W, length]`. Which axis says how many tokens a window has?"),
        ("by_mean_key = ", "scores = scores.T\n    by_mean_key = ", "going across the windows",
         "Each row is a window. Which axis holds its tokens?"),
        ("- math", "+ math", "adding the logarithm of the length",
         "The score grows with the length, though more tokens share the weight. For a window of "
         "zeros, what has to come out?"),
        ("- math.log(scores.shape[1])", "/ scores.shape[1]", "dividing a score by the length",
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


EXERCISES = (_VISIBLE, _ATTEND, _LOGIT, _MEANS)

PREDICTIONS = TEXTS.predictions(
    globals(),
    times_lighter={"choices": (1, 3, 30, 500)},
    first_query_that_sees={"choices": (0, 15, 31, 32)},
    twice_the_text={"tolerance": 0.02},
    needles_windows={"choices": (90, 50, 20, 2), "unit": "%"},
    best_elsewhere={"choices": ("mean", "weighted", "linear", "mlp")},
)

TRAPS = TEXTS.traps

DOUBLES = (
    Double("visible_summaries", names=("letting a summary be seen only after its last token",
                                       "going below zero at the start")),
    Double("visible_summaries", names=("forgetting the first window",
                                       "going below zero at the start")),
    Double("attend_to_summaries", names=("letting a summary be seen once it starts",
                                         "leaving out the scale")),
    Double("attend_to_summaries", names=("letting a summary be seen only after its last token",
                                         "a softmax over nothing")),
    Double("window_logit", names=("the sum for the mean key's score",
                                  "the log-sum-exp without the length")),
    Double("window_logit", names=("the two the other way round", "exponentials that overflow")),
    Double("window_means", names=("laying the windows side by side",
                                  "adding tokens that lie behind the window")),
    Double("window_means", names=("starting a window every BL tokens",
                                  "dividing by the height of the tile")),
)  # fmt: skip
