"""Exercises of chapter 06: who sees a summary, making one, attending to them, what a mean key
misses, and the learnt summary."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.widgets.compression import draw_windows


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- visible_summaries --


def visible_summaries(position: int, length: int, stride: int) -> int:
    """How many summaries the query at `position` sees."""
    tokens = position + 1  # those up to the query, itself included
    return max((tokens - length) // stride + 1, 0)


def _draw_visible(arguments: tuple, got: object, expected: int) -> Picture:
    """The windows about the failing position."""
    position, length, stride = arguments
    drawn = draw_windows(max(position + 2 * length, 16), length, stride, position)
    return Picture(drawn.figure, f"Windows that end by position {position}: {expected}, not {got}")


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
    misconceptions=(
        Misconception(
            "letting a summary be seen once it starts",
            lambda position, length, stride: position // stride + 1,
            "A summary that has started may still hold tokens of the query's future. Which of "
            "its tokens has to be there first?",
        ),
        Misconception(
            "letting a summary be seen only after its last token",
            lambda position, length, stride: max((position - length) // stride + 1, 0),
            "A query sees its own token. If a window ends with it, there is nothing in it from "
            "the future.",
        ),
        Misconception(
            "rounding up",
            lambda position, length, stride: max(-(-(position + 1 - length) // stride) + 1, 0),
            "A window that is only partly there does not count. In which direction does that "
            "round?",
        ),
        Misconception(
            "rounding towards zero",
            lambda position, length, stride: max(int((position + 1 - length) / stride) + 1, 0),
            "For an early query the number in front of the division is negative, and int() "
            "rounds it up. What does // do with it?",
        ),
        Misconception(
            "going below zero at the start",
            lambda position, length, stride: (position + 1 - length) // stride + 1,
            "Where no window fits, the formula says how many are missing. A count ends at 0.",
        ),
        Misconception(
            "forgetting the first window",
            lambda position, length, stride: max((position + 1 - length) // stride, 0),
            "The division counts how often the window can move on. Where was it before it moved?",
        ),
        Misconception(
            "counting windows that do not overlap",
            lambda position, length, stride: (position + 1) // length,
            "A new window starts every `stride` tokens, not every `length`.",
        ),
        Misconception(
            "counting whole strides",
            lambda position, length, stride: (position + 1) // stride,
            "A stride is the distance from one window's start to the next; the window itself is "
            "longer. "
            "Look at the first position at which anything is seen.",
        ),
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


def _means(starts: Callable[[int, int, int], range], pad: bool = False) -> Callable:
    """A wrong `summarise` with other starts; windows at the end may be cut short, or padded with
    zeros."""

    def wrong(x: Tensor, length: int, stride: int) -> Tensor:
        means = []
        for start in starts(len(x), length, stride):
            window = x[start : start + length]
            means.append(window.sum(0) / (length if pad else len(window)))
        return torch.stack(means) if means else x[:0]

    return wrong


def _summarise_over(axis: str) -> Callable:
    def wrong(x: Tensor, length: int, stride: int) -> Tensor:
        count = max((len(x) - length) // stride + 1, 0)
        # [M_c, length, D]
        windows = x[torch.arange(count)[:, None] * stride + torch.arange(length)]
        if axis == "width":
            return windows.mean(2)
        if axis == "sum":
            return windows.sum(1)
        return windows.sum(1) / stride

    return wrong


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
    misconceptions=(
        Misconception(
            "windows that do not overlap",
            _means(lambda M, length, stride: range(0, M - length + 1, length)),
            "The next window starts `stride` tokens after the last one, though that one has not "
            "ended yet.",
        ),
        Misconception(
            "a window at every token",
            _means(lambda M, length, stride: range(0, M - length + 1)),
            "One window every `stride` tokens, or there would be as many summaries as tokens.",
        ),
        Misconception(
            "keeping the ragged tail",
            _means(lambda M, length, stride: range(0, M, stride)),
            "The last windows run past the end. A mean of fewer tokens would be another kind of "
            "summary, and would change "
            "with every token that comes.",
        ),
        Misconception(
            "filling the ragged tail with zeros",
            _means(lambda M, length, stride: range(0, M, stride), pad=True),
            "Tokens that do not exist would count as tokens of zeros. Windows that do not fit "
            "are left out.",
        ),
        Misconception(
            "losing the last window where it just fits",
            _means(lambda M, length, stride: range(0, M - length, stride)),
            "A window may start at token M − length: it then ends with the last token.",
        ),
        Misconception(
            "making windows of a text that is shorter than one",
            lambda x, length, stride: x.unfold(0, length, stride).mean(-1),
            "`unfold` raises an error if not even one window fits, and `torch.stack` if there is "
            "nothing to stack. How many "
            "windows fit into such a text, and what shape have their means?",
        ),
        Misconception(
            "the mean over the width",
            _summarise_over("width"),
            "The tokens of a window are to be averaged, number by number. Which axis holds the "
            "tokens?",
        ),
        Misconception(
            "the sum in place of the mean",
            _summarise_over("sum"),
            "The weights of a window's tokens are to sum to 1; else a longer window would have "
            "larger keys.",
        ),
        Misconception(
            "dividing by the stride",
            _summarise_over("stride"),
            "How many tokens are in a window? Their weights are to sum to 1.",
        ),
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


def _attend(change: str) -> Callable:
    """A wrong `attend_to_summaries`, with one change."""

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, position: int, length: int, stride: int
    ) -> tuple[Tensor, Tensor]:
        first_tokens = v[: max(len(v) - length + 1, 0) : stride]
        v_cmp = first_tokens if change == "unsummarised values" else summarise(v, length, stride)
        k_cmp, scale = (
            summarise(k, length, stride),
            1.0 if change == "no scale" else q.shape[0] ** -0.5,
        )
        count = visible_summaries(position, length, stride)
        if change == "starts":
            count = min(position // stride + 1, len(k_cmp))
        if change == "one less":
            count = max((position - length) // stride + 1, 0)
        scores = scale * k_cmp @ q
        hidden = torch.arange(len(scores)) >= count
        if change == "zeros":
            return _weighted(scores.masked_fill(hidden, 0), v_cmp)
        if change == "all":
            return _weighted(scores, v_cmp)
        if change == "normalised over all":
            o = torch.softmax(scores, 0).masked_fill(hidden, 0) @ v_cmp
            return o, scores.logsumexp(0) if count else torch.tensor(-math.inf)
        if count == 0 and change == "lse 0":
            return v.new_zeros(v.shape[1]), torch.tensor(0.0)
        if count == 0 and change == "tokens":
            return _weighted(scale * k[: position + 1] @ q, v[: position + 1])
        if count == 0 and change != "nan":
            return v.new_zeros(v.shape[1]), torch.tensor(-math.inf)
        return _weighted(scores.masked_fill(hidden, -math.inf), v_cmp)

    return wrong


def _weighted(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(scores, 0) @ v, scores.logsumexp(0)


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
    misconceptions=(
        Misconception(
            "softmax over nothing",
            _attend("nan"),
            "Where every score is −∞, the softmax divides 0 by 0. The contract says what an "
            "early query gets: catch it before.",
        ),
        Misconception(
            "an lse of 0 for a query that sees nothing",
            _attend("lse 0"),
            "lse is the logarithm of the sum of the exponentials. What is the sum over nothing, "
            "and its logarithm?",
        ),
        Misconception(
            "attending to tokens where there is no summary yet",
            _attend("tokens"),
            "It sounds helpful, but this branch only knows summaries; the newest tokens are the "
            "sliding window's business.",
        ),
        Misconception(
            "summarising the keys and not the values",
            _attend("unsummarised values"),
            "A summary stands for all tokens of its window, in both: its key says what there is, "
            "and its value should hold it.",
        ),
        Misconception(
            "letting a summary be seen once it starts",
            _attend("starts"),
            "Change the text's last token: does the result of an earlier query change?",
        ),
        Misconception(
            "letting a summary be seen only after its last token",
            _attend("one less"),
            "A window that ends with the query's own token holds nothing from the future.",
        ),
        Misconception(
            "seeing all summaries",
            _attend("all"),
            "Those that end after the query hold tokens of its future.",
        ),
        Misconception(
            "scores of 0 for hidden summaries",
            _attend("zeros"),
            "A score of 0 still weighs e⁰. Which score weighs nothing?",
        ),
        Misconception(
            "masking after the softmax",
            _attend("normalised over all"),
            "The hidden summaries are gone from the sum of the values, but not from the "
            "denominator: do the weights sum to 1?",
        ),
        Misconception(
            "leaving out the scale",
            _attend("no scale"),
            "Scores are multiplied by D ** -0.5, as in every chapter.",
        ),
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
    misconceptions=(
        Misconception(
            "the two the other way round",
            lambda scores: window_logit(scores)[::-1],
            "First the mean key's score, then the one that the window's weight asks for. Which "
            "of the two is never the smaller?",
        ),
        Misconception(
            "the mean for both",
            lambda scores: (scores.mean(1), scores.mean(1)),
            "A softmax weighs by exponentials. Is the exponential of a mean the mean of the "
            "exponentials?",
        ),
        Misconception(
            "the log-sum-exp without the length",
            lambda scores: (scores.mean(1), scores.logsumexp(1)),
            "That is the score of *one* token as heavy as the whole window. Here `length` equal "
            "tokens share the weight: "
            "for a window of zeros the answer is 0.",
        ),
        Misconception(
            "the largest score for the window's weight",
            lambda scores: (scores.mean(1), scores.amax(1)),
            "If all of the window's tokens had the largest score, it would weigh more than it "
            "does.",
        ),
        Misconception(
            "the sum for the mean key's score",
            lambda scores: (scores.sum(1), window_logit(scores)[1]),
            "The mean key is a `length`-th of the sum of the keys, and so is its score.",
        ),
        Misconception(
            "a mean weighted by the softmax",
            lambda scores: (scores.mean(1), (scores.softmax(1) * scores).sum(1)),
            "That is the score that the query finds on average where it looks, and always too "
            "high. "
            "Write down the window's weight first, as a sum.",
        ),
        Misconception(
            "the weight itself, not its score",
            lambda scores: (scores.mean(1), scores.exp().mean(1)),
            "That is what a token weighs on average. Which score has this exponential?",
        ),
        Misconception(
            "exponentials that overflow",
            lambda scores: (scores.mean(1), scores.exp().mean(1).log()),
            "Right for small scores. In fp32 the powers of e end at e to the 88.7: subtract the "
            "largest score first (chapter 03).",
        ),
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
    hidden = F.gelu(x @ w1 + b1)  # [F]
    return hidden @ w2 + b2


def _phi(change: str) -> Callable:
    """A wrong `phi`, with one change."""

    def wrong(
        window: Tensor, position: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
    ) -> Tensor:
        x = {
            "no position": window,
            "product": window * position,
            "reversed": window + position.flip(0),
        }.get(change)
        x = window + position if x is None else x
        x = x.T.flatten() if change == "columns" else x.flatten()
        if change == "position on one token":
            x = torch.cat([(window[:1] + position[:1]).flatten(), window[1:].flatten()])
        hidden = x @ w1 if change == "no b1" else x @ w1 + b1
        if change != "no gelu":
            hidden = torch.relu(hidden) if change == "relu" else F.gelu(hidden)
        o = hidden @ w2 if change == "no b2" else hidden @ w2 + b2
        return F.gelu(o) if change == "gelu twice" else o

    return wrong


def _weights(length: int, D: int, hidden: int, seed: int) -> tuple:
    shapes = ((length, D), (length, D), (length * D, hidden), (hidden,), (hidden, D), (D,))
    return tuple(_random(*shape, seed=seed + i) for i, shape in enumerate(shapes))


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
    misconceptions=(
        Misconception(
            "leaving out the position embedding",
            _phi("no position"),
            "φ is to know where in the window a token stands. What is added for that, and when?",
        ),
        Misconception(
            "multiplying by the position embedding",
            _phi("product"),
            "An embedding is added. With an embedding of zeros, φ should still see the window.",
        ),
        Misconception(
            "the position embedding from last to first",
            _phi("reversed"),
            "Row 0 belongs to the first token of the window.",
        ),
        Misconception(
            "a position for the first token only",
            _phi("position on one token"),
            "Each of the window's tokens has its own row of `position`.",
        ),
        Misconception(
            "flattening number by number, not token by token",
            _phi("columns"),
            "Rows 0 to D − 1 of w1 belong to the first token. In which order does `flatten` read "
            "[length, D]?",
        ),
        Misconception(
            "leaving out the gelu",
            _phi("no gelu"),
            "Two linear layers in a row are one: there would be nothing gained.",
        ),
        Misconception(
            "a relu in place of the gelu",
            _phi("relu"),
            "They are alike far from 0, and differ near it.",
        ),
        Misconception(
            "a gelu after the second layer too",
            _phi("gelu twice"),
            "A key may have large negative numbers as well.",
        ),
        Misconception(
            "leaving out b1",
            _phi("no b1"),
            "Each layer adds its own bias before anything else happens.",
        ),
        Misconception("leaving out b2", _phi("no b2"), "The second layer has a bias, too."),
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
