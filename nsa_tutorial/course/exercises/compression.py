"""Exercises of chapter 06: who sees a summary, making one, attending to them, what a mean key
misses, and the learnt summary."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Exercise, Misconception, Prediction, Trap
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.widgets.compression import draw_windows

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
    step = length if "no overlap" in slips else stride
    moves = (tokens - first) // step
    if "up" in slips:
        moves = -(-(tokens - first) // step)
    if "towards zero" in slips:
        moves = int((tokens - first) / step)
    if "fraction" in slips:
        moves = (tokens - first) / step
    count = moves + ("no first" not in slips)
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
)

_VISIBLE = Exercise(
    name="visible_summaries",
    statement="""
Summary `j` is made of the tokens `j * stride … j * stride + length - 1`. Return how many summaries
the query at `position` (counted from 0) sees, as an int. For `length = 4` and `stride = 2` the
queries at positions 0 to 7 see 0, 0, 0, 1, 1, 2, 2, 3.
""",
    minutes=4,
    difficulty=2,
    solution=visible_summaries,
    hints=(
        "Length 4, stride 2: write down the first and the last token of the first three windows. "
        "From which position on is each of them complete?",
        "How many tokens are there up to the query, itself included? The answer is how many whole "
        "windows fit into so many tokens.",
        "Take the first window away from these tokens. How many whole strides fit into the rest? "
        "Each is one more window. If not even the first one fits, the answer is 0.",
    ),
    why="A summary may be seen once its last token is there, so a query sees as many summaries as "
    "a text that ends with the query itself would have.",
    misconceptions=_VISIBLE_MISTAKES,
    combine=together(
        _VISIBLE_MISTAKES,
        {"starts", "strides"},
        {"up", "towards zero", "fraction"},
    ),
    cases=(
        Case("a window that ends at the query", lambda: (3, 4, 2)),
        Case("one token earlier", lambda: (2, 4, 2)),
        Case("the first query", lambda: (0, 4, 2)),
        Case("between two ends", lambda: (8, 4, 2)),
        Case("length is no multiple of stride", lambda: (11, 5, 3)),
        Case("windows that do not overlap", lambda: (11, 4, 4)),
        Case("the last of 500 tokens, length 32, stride 16", lambda: (499, 32, 16)),
    ),
    tolerance=0.0,
    picture=_draw_visible,
)


# -- summarise --


def summarise(x: Tensor, length: int, stride: int) -> Tensor:
    """The means of the windows of x [M, D]: [M_c, D]."""
    count = max((len(x) - length) // stride + 1, 0)
    # [M_c, length], whose tokens
    token = torch.arange(count)[:, None] * stride + torch.arange(length)
    return x[token].mean(1)  # [M_c, length, D] to [M_c, D]


def _summarise(slips: Slips, x: Tensor, length: int, stride: int) -> Tensor:
    """`summarise` with slips."""
    M, D = x.shape
    step = length if "no overlap" in slips else 1 if "every token" in slips else stride
    end = M - length + ("one short" not in slips)
    if {"tail", "tail of zeros"} & slips:
        end = M
    if "every stride" in slips:
        end = M // stride * step
    if "no first" in slips:
        end = (M - length) // stride * step
    span = stride if "span" in slips else length
    windows = [x[start : start + span] for start in range(0, end, step)]
    if "tail of zeros" in slips:
        windows = [F.pad(window, (0, 0, 0, length - len(window))) for window in windows]
    if "unfold" in slips:
        x.unfold(0, length, stride)  # an error for a text that is shorter than a window
    if "stack" in slips and not windows:
        return torch.stack(windows)
    if "width" in slips:
        return torch.stack([window.mean(1) for window in windows]) if windows else x[:0, :0]
    if "one number" in slips:
        return torch.stack([window.mean() for window in windows]) if windows else x[:0, 0]
    if "last token" in slips:
        return torch.stack([window[-1] for window in windows]) if windows else x[:0]
    means = [window.sum(0) / len(window) for window in windows]
    if "sum" in slips:
        means = [window.sum(0) for window in windows]
    if "by the stride" in slips:
        means = [window.sum(0) / stride for window in windows]
    return torch.stack(means) if means else x.new_zeros(0, D)


_SUMMARISE_MISTAKES = (
    Misconception(
        "windows that do not overlap",
        slip(_summarise, "no overlap"),
        "A window may start before the last one has ended. How many tokens later does it start?",
    ),
    Misconception(
        "a window at every token",
        slip(_summarise, "every token"),
        "There would be as many summaries as tokens. How far does a window move on?",
    ),
    Misconception(
        "keeping the ragged tail",
        slip(_summarise, "tail"),
        "The last windows run past the end, and their means would change with every token "
        "that comes. Where may the last window start?",
    ),
    Misconception(
        "filling the ragged tail with zeros",
        slip(_summarise, "tail of zeros"),
        "Tokens that do not exist would count as tokens of zeros. Where may the last window start?",
    ),
    Misconception(
        "losing the last window where it just fits",
        slip(_summarise, "one short"),
        "A window may end with the last token of all. At which token does that one start?",
    ),
    Misconception(
        "counting a window for every stride",
        slip(_summarise, "every stride"),
        "The last of them run past the end. Where does the last window start that fits?",
    ),
    Misconception(
        "forgetting the first window",
        slip(_summarise, "no first"),
        "The division counts how often the window can move on. Where was it before it moved?",
    ),
    Misconception(
        "windows as long as the stride",
        slip(_summarise, "span"),
        "The stride says where the next window starts. How many tokens are in a window?",
    ),
    Misconception(
        "one number for a whole window",
        slip(_summarise, "one number"),
        "A summary has `D` numbers, like a token. Over which axis is the mean?",
    ),
    Misconception(
        "unfolding a text that is shorter than a window",
        slip(_summarise, "unfold"),
        "`unfold` raises an error if not even one window fits. What shape has a mean over "
        "no windows?",
    ),
    Misconception(
        "stacking no windows at all",
        slip(_summarise, "stack"),
        "`torch.stack` needs at least one tensor, and here no window fits. What shape has "
        "the result then?",
    ),
    Misconception(
        "the mean over the width",
        slip(_summarise, "width"),
        "The tokens of a window are averaged, number by number. Which axis holds the tokens?",
    ),
    Misconception(
        "taking a window's last token for its summary",
        slip(_summarise, "last token"),
        "One token is there, the others are lost. What is the mean of all of them?",
    ),
    Misconception(
        "the sum in place of the mean",
        slip(_summarise, "sum"),
        "A longer window would have larger keys. To what should the weights of its tokens sum?",
    ),
    Misconception(
        "dividing by the stride",
        slip(_summarise, "by the stride"),
        "The weights of a window's tokens should sum to 1. How many tokens are in a window?",
    ),
)

_SUMMARISE = Exercise(
    name="summarise",
    statement="""
`x` `[M, D]` are keys or values of one head. Return the mean of every window of `length` tokens, one
window every `stride`, as `[M_c, D]`. A window that does not fit is left out; if none fits, the
result has shape `[0, D]`.
""",
    minutes=4,
    difficulty=1,
    solution=summarise,
    hints=(
        "Six tokens, length 4, stride 2: write down the tokens of every window that fits. How many "
        "are there, and where does the next one start that does not fit?",
        "Count the windows before you make any. This count is never negative, and it may be 0.",
        "Make a table of token numbers with a row for each window: a column of starts plus a row "
        "`0 … length - 1`. Index `x` with it. Which axis of the result holds a window's tokens?",
    ),
    why="A table of token numbers `[M_c, length]` works for every count, 0 as well, and a window "
    "that does not fit never gets into it.",
    misconceptions=_SUMMARISE_MISTAKES,
    combine=together(
        _SUMMARISE_MISTAKES,
        {"no overlap", "every token"},
        {"tail", "tail of zeros", "one short", "every stride", "no first"},
        {"unfold", "stack"},
        {"tail", "tail of zeros", "unfold", "stack"},
        {"tail", "every stride", "width"},
        {"tail of zeros", "every stride", "span"},
        {"one number", "width", "last token", "sum", "by the stride"},
    ),
    cases=(
        Case(
            "six tokens, one number wide, length 4, stride 2",
            lambda: (torch.arange(6.0)[:, None] ** 2, 4, 2),
        ),
        Case(
            "seven tokens, two numbers wide, length 3, stride 2",
            lambda: (torch.arange(14.0).view(7, 2) ** 2, 3, 2),
        ),
        Case("19 tokens, length 8, stride 3", lambda: (_random(19, 5, seed=0), 8, 3)),
        Case("16 tokens, no overlap", lambda: (_random(16, 3, seed=1), 4, 4)),
        Case("five tokens, length 8", lambda: (_random(5, 3, seed=2), 8, 4)),
    ),
)


# -- attend_to_summaries --


def attend_to_summaries(
    q: Tensor, k: Tensor, v: Tensor, position: int, length: int, stride: int
) -> tuple[Tensor, Tensor]:
    """Attention of one query to the summaries it sees: o [DV] and lse."""
    k_cmp, v_cmp = summarise(k, length, stride), summarise(v, length, stride)
    count = visible_summaries(position, length, stride)
    if count == 0:
        return v.new_zeros(v.shape[1]), v.new_tensor(-math.inf)
    scores = q.shape[0] ** -0.5 * k_cmp[:count] @ q  # [count]
    return torch.softmax(scores, 0) @ v_cmp[:count], scores.logsumexp(0)


def _attend(
    slips: Slips, q: Tensor, k: Tensor, v: Tensor, position: int, length: int, stride: int
) -> tuple[Tensor, Tensor]:
    """`attend_to_summaries` with slips."""
    k_cmp, v_cmp = summarise(k, length, stride), summarise(v, length, stride)
    if "unsummarised values" in slips:
        v_cmp = v[: len(v_cmp) * stride : stride]
    if "values of tokens" in slips:
        v_cmp = v[: len(v_cmp)]
    power = 0 if "no scale" in slips else -1 if "by D" in slips else -0.5
    scale = q.shape[0] ** power
    count = visible_summaries(position, length, stride)
    if "starts" in slips:
        count = min(position // stride + 1, len(k_cmp))
    if "one late" in slips:
        count = visible_summaries(position - 1, length, stride)
    if "all" in slips:
        count = len(k_cmp)
    if count == 0 and "tokens" in slips:
        scores, v_cmp = scale * k[: position + 1] @ q, v[: position + 1]
        return torch.softmax(scores, 0) @ v_cmp, scores.logsumexp(0)
    if count == 0 and "nan" not in slips:
        nothing = 0.0 if "lse 0" in slips else -math.inf
        return v.new_zeros(v.shape[1]), v.new_tensor(nothing)
    scores = scale * k_cmp @ q
    hidden = torch.arange(len(scores)) >= count
    seen = scores.masked_fill(hidden, 0.0 if "zeros" in slips else -math.inf)
    weights, lse = torch.softmax(seen, 0), seen.logsumexp(0)
    if {"after the softmax", "denominator"} & slips:
        weights = torch.softmax(scores, 0).masked_fill(hidden, 0)
    if "after the softmax" in slips:
        lse = scores.logsumexp(0)
    if "sum of exponentials" in slips:
        lse = seen.exp().sum()
    return weights @ v_cmp, lse


_ATTEND_MISTAKES = (
    Misconception(
        "a softmax over nothing",
        slip(_attend, "nan"),
        "This query sees no summary, so the softmax divides 0 by 0. What should such a query get?",
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
)

_ATTEND = Exercise(
    name="attend_to_summaries",
    statement="""
One query `q` `[D]` at `position` in a text of `M` tokens, with keys `k` `[M, D]` and values `v`
`[M, DV]` of one head. Summarise both by means of windows (`length`, `stride`), and return
`(o, lse)` of the query's attention to the summaries that it sees, with the scale `D ** -0.5`. A
query that sees none gets `o` of zeros and `lse` of −∞ (a tensor). You may use your
`visible_summaries` and `summarise`.
""",
    minutes=8,
    difficulty=3,
    solution=attend_to_summaries,
    hints=(
        "Four tokens, length 2, stride 1, the query at position 2: write down the windows. Which "
        "of them have ended by then?",
        "Two of your functions do most of it. One makes summaries, of the keys and of the values. "
        "The other says how many of them, from the first on, the query sees.",
        "If that number is 0, return zeros and −∞ at once. Otherwise cut both summaries to that "
        "number. The rest is chapter 01: scores with the scale, then a softmax for `o` and "
        "`logsumexp` for `lse`.",
    ),
    why="Windows end one after the other, so the visible summaries are always the first few, and a "
    "slice does what a mask would.",
    misconceptions=_ATTEND_MISTAKES,
    combine=together(
        _ATTEND_MISTAKES,
        {"nan", "lse 0", "tokens"},
        {"starts", "one late", "all"},
        {"zeros", "after the softmax", "denominator"},
        {"after the softmax", "sum of exponentials"},
        {"unsummarised values", "values of tokens"},
        {"no scale", "by D"},
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
    if "softmax" in slips:
        second = (scores.softmax(1) * scores).sum(1)
    if "weight" in slips:
        second = scores.exp().mean(1)
    if "overflow" in slips:
        weight = scores.exp().sum(1)
        second = (weight if "no length" in slips else weight / length).log()
    return (second, first) if "swapped" in slips else (first, second)


_OTHER_WEIGHTS = {
    "mean",
    "minus the length",
    "times the length",
    "divided by the length",
    "largest",
    "softmax",
    "weight",
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
        "exponentials that overflow",
        slip(_logit, "overflow"),
        "Right for small scores. In fp32, e to the 89 is already ∞. What did chapter 03 "
        "subtract first?",
    ),
)

_LOGIT = Exercise(
    name="window_logit",
    statement="""
`scores` `[W, length]` holds one query's scaled scores with the tokens of `W` windows, a row each.
Return two tensors of shape `[W]`, as a tuple: the score that the window's *mean key* gets; and the
score that one summary would need, so that `length` tokens with that score weigh as much as the
window's real tokens. Some scores are in the hundreds: the result has to stay finite.
""",
    minutes=4,
    difficulty=2,
    solution=window_logit,
    hints=(
        "Take the window `[0, 2]` and find both by hand. What is the mean? And what do its two "
        "tokens weigh together, e⁰ + e²?",
        "Say it as an equation: `length` tokens with the score s weigh as much as the real ones "
        "together. Solve it for s.",
        "The logarithm turns the factor `length` into a term to take away. PyTorch has the "
        "logarithm of a sum of exponentials in one function that does not overflow.",
    ),
    why="A softmax weighs by exponentials, so the score that a window deserves is the logarithm of "
    "their mean; the mean of the scores is never more.",
    misconceptions=_LOGIT_MISTAKES,
    combine=together(
        _LOGIT_MISTAKES,
        {*_OTHER_WEIGHTS, "no length"},
        {*_OTHER_WEIGHTS, "overflow"},
        {"windows", "no length"},
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


# -- phi --


def phi(window: Tensor, position: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The learnt summary [D] of one window [length, D]."""
    x = (window + position).flatten()  # [length * D], token after token
    hidden = torch.nn.functional.gelu(x @ w1 + b1)  # [F]
    return hidden @ w2 + b2


def _phi(
    slips: Slips, window: Tensor, position: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """`phi` with slips."""
    if "reversed" in slips:
        position = position.flip(0)
    x = window + position
    if "no position" in slips:
        x = window
    if "product" in slips:
        x = window * position
    if "position on one token" in slips:
        x = torch.cat([x[:1], window[1:]])
    x = (x.T if "columns" in slips else x).flatten()
    hidden = x @ w1 if {"no b1", "late b1"} & slips else x @ w1 + b1
    if "no gelu" not in slips:
        hidden = torch.relu(hidden) if "relu" in slips else F.gelu(hidden)
    if "late b1" in slips:
        hidden = hidden + b1
    o = hidden @ w2 if "no b2" in slips else hidden @ w2 + b2
    return F.gelu(o) if "gelu twice" in slips else o


def _weights(length: int, D: int, hidden: int, seed: int) -> tuple:
    shapes = ((length, D), (length, D), (length * D, hidden), (hidden,), (hidden, D), (D,))
    return tuple(_random(*shape, seed=seed + i) for i, shape in enumerate(shapes))


_PHI_MISTAKES = (
    Misconception(
        "leaving out the position embedding",
        slip(_phi, "no position"),
        "φ has to know where in the window a token stands. What is added for that, and when?",
    ),
    Misconception(
        "multiplying by the position embedding",
        slip(_phi, "product"),
        "With an embedding of zeros, φ should still see the window. What does a product "
        "with zeros leave of it?",
    ),
    Misconception(
        "the position embedding from last to first",
        slip(_phi, "reversed"),
        "Row 0 of `position` belongs to one token of the window. Is it the first or the last?",
    ),
    Misconception(
        "a position for the first token only",
        slip(_phi, "position on one token"),
        "Each of the window's tokens has its own row of `position`. Which rows did you add?",
    ),
    Misconception(
        "flattening number by number, not token by token",
        slip(_phi, "columns"),
        "Rows 0 to D − 1 of `w1` belong to the first token. In which order does `flatten` "
        "read `[length, D]`?",
    ),
    Misconception(
        "leaving out the gelu",
        slip(_phi, "no gelu"),
        "Two linear layers in a row are no more than one. What stands between them?",
    ),
    Misconception(
        "a relu in place of the gelu",
        slip(_phi, "relu"),
        "They are alike far from 0, and differ near it. Which of them is asked for?",
    ),
    Misconception(
        "a gelu after the second layer too",
        slip(_phi, "gelu twice"),
        "A gelu lets hardly anything negative through. May a key have large negative numbers?",
    ),
    Misconception(
        "leaving out b1",
        slip(_phi, "no b1"),
        "A layer is a product plus a bias. Where does the first bias enter, before the "
        "gelu or after it?",
    ),
    Misconception(
        "adding b1 after the gelu",
        slip(_phi, "late b1"),
        "A layer is a product plus a bias, and the gelu acts on both. What does it act on here?",
    ),
    Misconception(
        "leaving out b2",
        slip(_phi, "no b2"),
        "With all weights 0, the summary should be a bias. Which one?",
    ),
)

_PHI = Exercise(
    name="phi",
    statement="""
The paper's φ for one window: `window` `[length, D]`, `position` `[length, D]`, `w1`
`[length * D, F]`, `b1` `[F]`, `w2` `[F, D]`, `b2` `[D]`. Return the summary `[D]`. The window's
tokens enter `w1` one behind the other, the first token's `D` numbers first; between the two layers
is a `gelu` (`torch.nn.functional.gelu`), and after the second there is nothing.
""",
    minutes=4,
    difficulty=1,
    solution=phi,
    hints=(
        "`w1` has `length * D` rows, and the window is `[length, D]`. What has to happen to the "
        "window first? And before that: how does φ learn where a token stands?",
        "Follow the shapes: `[length, D]`, then `[length * D]`, then `[F]`, then `[D]`. Each "
        "learnt tensor enters once.",
        "Add `position`, and flatten token after token. The first layer is a product with `w1` "
        "plus its bias, and the gelu follows it. The second layer is the same with `w2`, and "
        "without a gelu.",
    ),
    why="Each place of the window has rows of `w1` for itself and an embedding of its own, so φ "
    "can treat the first token unlike the last, which a mean cannot.",
    misconceptions=_PHI_MISTAKES,
    combine=together(
        _PHI_MISTAKES,
        {"no position", "product", "position on one token"},
        {"no position", "reversed"},
        {"no gelu", "relu"},
        {"no gelu", "late b1"},
        {"no b1", "late b1"},
    ),
    cases=(
        Case(
            "two tokens, two numbers wide, one hidden unit",
            lambda: (
                torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
                torch.tensor([[0.5, 0.0], [0.0, -0.5]]),
                torch.tensor([[1.0], [0.0], [0.5], [-0.5]]),
                torch.tensor([-1.0]),
                torch.tensor([[1.0, -2.0]]),
                torch.tensor([0.5, 0.0]),
            ),
        ),
        Case(
            "three tokens, two numbers wide, four hidden units", lambda: _weights(3, 2, 4, seed=0)
        ),
        Case(
            "five tokens, three numbers wide, seven hidden units",
            lambda: _weights(5, 3, 7, seed=10),
        ),
    ),
)

EXERCISES = (_VISIBLE, _SUMMARISE, _ATTEND, _LOGIT, _PHI)


# -- predictions --

PREDICTIONS = (
    Prediction(
        "needle_left",
        "One token has the score 10, the other 31 have 0. How much of the needle's weight is left "
        "in their mean: 1, 1/3, 1/30 or 1/500?",
        "The mean key scores 10/32, so the window weighs 32 · e^0.31, about 44. The real tokens "
        "weigh e^10 + 31, about 22,000.",
        (
            (1, "The needle is still in the mean, but its score is divided by 32."),
            (1 / 3, "The score shrinks 32 times, and the weight is its exponential."),
            (1 / 30, "The score shrinks 32 times; the weight, its exponential, far more."),
        ),
        tolerance=0.1,
    ),
    Prediction(
        "first_query_that_sees",
        "Windows of 32, a new one every 16. Which position is the first that may see any summary: "
        "0, 15, 31 or 32?",
        "The first window ends with token 31, and the query at position 31 sees its own token.",
        (
            (0, "At position 0 the first window has started, but 31 of its tokens are to come."),
            (15, "A stride is where the next window starts, and none has ended there."),
            (32, "A query sees its own token, so it need not wait for the next one."),
        ),
    ),
    Prediction(
        "twice_the_text",
        "The text is twice as long: how many times the work, 1, 2 or 4?",
        "There are twice as many queries, and each sees twice as many summaries.",
        (
            (1, "The number of summaries grows with the text."),
            (2, "That is the work of one query."),
        ),
        tolerance=0.02,
    ),
    Prediction(
        "how_many_windows",
        "How many windows of 4, one every 2, fit into 13, 14 and 1 tokens?",
        "The window moves on by 2 only where it still fits, so a 13th token adds none. Where not "
        "even one window fits, there are 0.",
        (
            ((5, 6, -1), "The formula gives −1 for one token, and a count ends at 0."),
            ((5, 6, 1), "One token does not fill a window of 4."),
            ((6, 6, 0), "The last window of 13 tokens would run past the end."),
            ((6, 7, 0), "That counts windows that are only partly there."),
            ((6, 7, 1), "That counts windows that are only partly there."),
            ((4, 5, 0), "The first window counts as well as its moves."),
            ((3, 3, 0), "Windows overlap: the next one starts after 2 tokens, not after 4."),
        ),
    ),
)


# -- what the chapter warns of --

TRAPS = (
    Trap("and none where that is negative", "visible_summaries", "going below zero at the start"),
    Trap("rounds down, as `//` does", "visible_summaries", "rounding towards zero"),
    Trap("rounds down, as `//` does", "visible_summaries", "rounding up"),
    Trap(
        "it can move on by `stride` as long as it does not run past the end",
        "summarise",
        "losing the last window where it just fits",
    ),
    Trap("That tail is not padded", "summarise", "filling the ragged tail with zeros"),
    Trap("and not summarised early", "summarise", "keeping the ragged tail"),
    Trap(
        "and none where that is negative",
        "summarise",
        "unfolding a text that is shorter than a window",
    ),
    Trap("and none where that is negative", "summarise", "stacking no windows at all"),
    Trap("The windows overlap.", "summarise", "windows that do not overlap"),
    Trap(
        "Each is made of the same window, by itself.",
        "attend_to_summaries",
        "summarising the keys and not the values",
    ),
    Trap(
        "Queries 8, 9 and 10 have seen the future.",
        "visible_summaries",
        "letting a summary be seen once it starts",
    ),
    Trap(
        "we show a query each summary that has *started*",
        "attend_to_summaries",
        "letting a summary be seen once it starts",
    ),
    Trap(
        "has $t + 1$ tokens up to and with its own",
        "visible_summaries",
        "letting a summary be seen only after its last token",
    ),
    Trap("NaN again, 0 divided by 0.", "attend_to_summaries", "a softmax over nothing"),
    Trap("output 0, `lse` −∞", "attend_to_summaries", "an lse of 0 for a query that sees nothing"),
    Trap(
        "Those who see nothing",
        "attend_to_summaries",
        "attending to tokens where there is no summary yet",
    ),
    Trap("But attention does not weigh by scores.", "window_logit", "taking the mean for both"),
    Trap(
        "If a summary with the score $s$ were to weigh as much as `length` tokens",
        "window_logit",
        "the log-sum-exp without the length",
    ),
    Trap(
        "the exponential of a mean is never more than the mean of the exponentials",
        "window_logit",
        "the two the other way round",
    ),
    Trap("03 (exponentials that overflow)", "window_logit", "exponentials that overflow"),
    Trap(
        "the tokens one behind the other", "phi", "flattening number by number, not token by token"
    ),
    Trap(
        "treat a window's first token unlike its last", "phi", "leaving out the position embedding"
    ),
    Trap("The paper names no activation; gelu", "phi", "a relu in place of the gelu"),
)


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
        "summarise",
        lambda x, length, stride: x.unfold(0, length, stride).sum(-1),
        ("the sum in place of the mean", "unfolding a text that is shorter than a window"),
    ),
    Double(
        "summarise",
        Wrong(_summarise, frozenset({"no overlap", "one short"})),
        ("windows that do not overlap", "losing the last window where it just fits"),
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
        "phi",
        lambda window, position, w1, b1, w2, b2: torch.relu(window.flatten() @ w1 + b1) @ w2 + b2,
        ("leaving out the position embedding", "a relu in place of the gelu"),
    ),
    Double(
        "phi",
        lambda window, position, w1, b1, w2, b2: F.gelu((window + position).flatten() @ w1) @ w2,
        ("leaving out b1", "leaving out b2"),
    ),
)
