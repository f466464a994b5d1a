"""Exercises of chapter 01: the causal mask, the scale, the price of it all, a test for leaks, and a
softmax kernel with three bugs.

The wrong kernels are one kernel that is told which slips to make.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import dense_attention as da
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- scaled_scores --


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [B, N, HQ, D], k [B, M, HQ, D] -> scaled scores [B, HQ, N, M]."""
    D = q.shape[-1]
    return torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5


_SCALES = {
    "by the width": lambda D, HQ, N, M: 1 / D,
    "unscaled": lambda D, HQ, N, M: 1.0,
    "all heads": lambda D, HQ, N, M: (D * HQ) ** -0.5,
    "count of heads": lambda D, HQ, N, M: HQ**-0.5,
    "count of keys": lambda D, HQ, N, M: M**-0.5,
    "count of queries": lambda D, HQ, N, M: N**-0.5,
    "multiplied": lambda D, HQ, N, M: D**0.5,
    "fourth root": lambda D, HQ, N, M: D**-0.25,
    "precedence": lambda D, HQ, N, M: 1 / D / 2,
    "twice": lambda D, HQ, N, M: D**-1.5,
    "one half": lambda D, HQ, N, M: 0.5,
    "negative": lambda D, HQ, N, M: -(D**-0.5),
}
_LAYOUTS = {
    "positions first": "bihd,bjhd->bihj",
    "keys first": "bihd,bjhd->bhji",
    "summed heads": "bihd,bjhd->bij",
    "heads first in q": "bhid,bjhd->bhij",
    "two widths": "bihd,bjhe->bhij",
}


def _scores(slips: Slips, q: Tensor, k: Tensor) -> Tensor:
    """`scaled_scores` with slips."""
    N, HQ, D = q.shape[1:]
    factor = D**-0.5
    for name in slips & _SCALES.keys():
        factor = _SCALES[name](D, HQ, N, k.shape[1])
    if "heads with heads" in slips:
        return factor * (q @ k.transpose(-2, -1))
    if "reshaped" in slips:
        rows, columns = (x.reshape(len(x), HQ, -1, D) for x in (q, k))
        return factor * (rows @ columns.transpose(-2, -1))
    if "products" in slips:
        return factor * q * k
    layout = "bihd,bjhd->bhij"
    for name in slips & _LAYOUTS.keys():
        layout = _LAYOUTS[name]
    scores = factor * torch.einsum(layout, q, k)
    if slips & {"masked", "masked with 0"}:
        hidden = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]) == 0
        scores = scores.masked_fill(hidden, -torch.inf if "masked" in slips else 0.0)
    return torch.softmax(scores, -1) if "softmax" in slips else scores


_SCORES_MISTAKES = (
    Misconception(
        "dividing by D where √D is meant",
        slip(_scores, "by the width"),
        "A mean over D divides by D, and so does a scale on q and on k both. Divided by D, the "
        "spread fades towards 0. What did the cell that measures the spread print?",
    ),
    Misconception(
        "dividing by D and by √D",
        slip(_scores, "twice"),
        "A mean over D has already divided by D. Is a dot product a mean, or a sum?",
    ),
    Misconception(
        "a scale of one half for every width",
        slip(_scores, "one half"),
        "One half is right for D = 4, where the chapter made its variable `scale`. Which D do `q` "
        "and `k` have here?",
    ),
    Misconception(
        "scores with the wrong sign",
        slip(_scores, "negative"),
        "The sizes are right, and all signs are turned. Where does your minus come from?",
    ),
    Misconception(
        "leaving the scores unscaled",
        slip(_scores, "unscaled"),
        "Scores of wide vectors are large only because the vectors are wide. By how much does the "
        "spread of a dot product grow with D?",
    ),
    Misconception(
        "scaling by the width of all heads together",
        slip(_scores, "all heads"),
        "Each head takes its dot product over its own D numbers. How many products are added up "
        "in one score?",
    ),
    Misconception(
        "scaling by the number of heads",
        slip(_scores, "count of heads"),
        "Heads do not see each other, so their number cannot matter to a score. Which entry of "
        "`q.shape` is the width?",
    ),
    Misconception(
        "scaling by the number of keys",
        slip(_scores, "count of keys"),
        "The number of keys decides how many scores a query gets, not how large one score is. "
        "What is summed inside a single dot product?",
    ),
    Misconception(
        "scaling by the number of queries",
        slip(_scores, "count of queries"),
        "How many others ask does not change a query's scores. Which entry of `q.shape` is the "
        "width?",
    ),
    Misconception(
        "multiplying by √D instead of dividing",
        slip(_scores, "multiplied"),
        "Wider vectors already give larger scores, and this makes them larger still. Which "
        "direction undoes the growth?",
    ),
    Misconception(
        "taking the root of √D once more",
        slip(_scores, "fourth root"),
        "The spread is √D, and the scores here are divided by the root of that. Is the scale in "
        "there once, or half of it?",
    ),
    Misconception(
        "writing `D ** 1/2`, which is (D ** 1) / 2",
        slip(_scores, "precedence"),
        "Python takes the power before the quotient, so these scores are divided by 2·D. How do "
        "you write a power of one half?",
    ),
    Misconception(
        "positions before heads",
        slip(_scores, "positions first"),
        "These are the axes [B, N, HQ, M]. Asked for is [B, HQ, N, M], one table of queries and "
        "keys per head. Which letters stand to the right of your arrow?",
    ),
    Misconception(
        "keys as rows and queries as columns",
        slip(_scores, "keys first"),
        "These are the axes [B, HQ, M, N]. Row = who asks, column = who is asked. Which of your "
        "two letters for positions comes last?",
    ),
    Misconception(
        "adding up the scores of all heads",
        slip(_scores, "summed heads"),
        "einsum sums over every letter that is missing to the right of the arrow. Which letter "
        "are you missing?",
    ),
    Misconception(
        "letters for `q` that put the heads before the positions",
        slip(_scores, "heads first in q"),
        "`q` is [B, N, HQ, D]: its second axis is the positions. Which letter stands second in "
        "yours, and which in `k`'s?",
    ),
    Misconception(
        "a letter of its own for each width",
        slip(_scores, "two widths"),
        "Two letters are summed apart, so no number of `q` meets its partner in `k`. Which axis "
        "do `q` and `k` share in a dot product?",
    ),
    Misconception(
        "a matrix product of heads with heads",
        slip(_scores, "heads with heads"),
        "Heads met heads here. In `q` the axes are batch, position, head and width, and the "
        "positions have to meet. Where do your letters, or the two axes of `@`, put the heads?",
    ),
    Misconception(
        "products that are not added up",
        slip(_scores, "products"),
        "`q * k` pairs query i with key i alone, and keeps D products. Every query meets every "
        "key, and the products become one number. What adds them up?",
    ),
    Misconception(
        "the weights where the scores are asked for",
        slip(_scores, "softmax"),
        "Every row sums to 1, so the softmax is done already. Which step comes before it?",
    ),
    Misconception(
        "masked scores where all of them are asked for",
        slip(_scores, "masked"),
        "Some scores are -inf. This exercise has no mask. Which line can go?",
    ),
    Misconception(
        "masked scores where all of them are asked for",
        slip(_scores, "masked with 0"),
        "Later keys have the score 0. This exercise has no mask. Which line can go?",
    ),
    Misconception(
        "a reshape where axes have to be swapped",
        slip(_scores, "reshaped"),
        "`reshape` and `view` keep the numbers in their order in memory, so positions and heads "
        "are mixed. Which function swaps two axes?",
    ),
)

SCALED_SCORES = TEXTS.exercise(
    "scaled_scores",
    minutes=5,
    difficulty=1,
    solution=scaled_scores,
    cases=(
        Case(
            "one head of width 4, two queries, two keys",
            lambda: (
                torch.tensor([[[[1.0, 2, 0, 1]], [[0.0, 1, 3, -1]]]]),
                torch.tensor([[[[2.0, 1, 0, 2]], [[0.0, -2, 1, 0]]]]),
            ),
        ),
        Case("three heads of width 8", lambda: (_random(1, 2, 3, 3, 8), _random(2, 2, 5, 3, 8))),
        Case(
            "two heads of width 6, one query, seven keys",
            lambda: (_random(3, 1, 1, 2, 6), _random(4, 1, 7, 2, 6)),
        ),
    ),
    misconceptions=_SCORES_MISTAKES,
    combine=together(
        _SCORES_MISTAKES,
        _SCALES,
        {*_LAYOUTS, "heads with heads", "products", "reshaped"},
        {"heads with heads", "products", "reshaped", "masked", "masked with 0"},
        {"heads with heads", "products", "reshaped", "softmax"},
    ),
)


# -- causal_weights --


def causal_weights(scores: Tensor) -> Tensor:
    """scores [N, M] of the last N of M positions -> weights [N, M], each row summing to 1 over what
    it may see."""
    N, M = scores.shape
    query_position = torch.arange(M - N, M)
    visible = torch.arange(M)[None, :] <= query_position[:, None]
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)


_MASKS = {
    "first keys": lambda N, M: 0,
    "own hidden": lambda N, M: M - N - 1,
    "one ahead": lambda N, M: M - N + 1,
    "no mask": lambda N, M: M,
    "sign turned": lambda N, M: N - M,
}


def _visible(scores: Tensor, slips: Slips = frozenset()) -> Tensor:
    N, M = scores.shape
    if "row with row" in slips:
        return torch.arange(M) <= torch.arange(M - N, M)
    if "column with column" in slips:
        return torch.arange(M)[:, None] <= torch.arange(M - N, M)[None]
    last = M - N
    for name in slips & _MASKS.keys():
        last = _MASKS[name](N, M)
    visible = torch.ones(N, M, dtype=torch.bool).tril(last)
    return ~visible if "inverted" in slips else visible


def _weights(slips: Slips, scores: Tensor) -> Tensor:
    """`causal_weights` with slips."""
    hidden = ~_visible(scores, slips)
    dim = 0 if "over queries" in slips else -1
    if "after" in slips:
        return torch.softmax(scores, dim).masked_fill(hidden, 0.0)
    if "renormalised" in slips:
        w = torch.softmax(scores, dim) * ~hidden
        return w / w.sum(dim, keepdim=True)
    if "masked exponentials" in slips:
        e = torch.exp(scores) * ~hidden
        return e / e.sum(dim, keepdim=True)
    if "added" in slips:
        scores = scores - 1e4 * hidden
    elif "times infinity" in slips:
        scores = scores + hidden * -torch.inf
    elif "zeros are hidden" in slips:
        scores = scores.masked_fill(hidden, 0.0)
        scores = scores.masked_fill(scores == 0, -torch.inf)
    else:
        value = -1e4 if "large" in slips else 0.0 if "zero" in slips else -torch.inf
        scores = scores.masked_fill(hidden, value)
    if "scores" in slips:
        return scores
    if "overflow" in slips:
        e = torch.exp(scores)
        return e / e.sum(dim, keepdim=True)
    return torch.softmax(scores, dim)


def _draw_weights(arguments: tuple, got: Tensor, expected: Tensor) -> Picture:
    (scores,) = arguments
    N, M = scores.shape
    height = 1.3 + 0.5 * N
    figure, axes = new_figure(max(5.0, 1.5 * M), height, columns=2)
    hidden = ~_visible(scores).numpy()
    for axis, weights, name in ((axes[0, 0], got, "yours"), (axes[0, 1], expected, "expected")):
        values = weights.detach().double().numpy()
        grid(
            axis,
            values,
            largest=1.0,
            text=".2f",
            hidden=hidden & (np.nan_to_num(values, nan=1.0) == 0),
        )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("key position", fontsize=9)
        axis.set_yticks(
            range(N), [f"sum {row:.2f}" for row in values.sum(1)], color=PALETTE["text"]
        )
        axis.set_xticks(range(M))
    wrong = sum(not torch.allclose(g, e, atol=1e-5) for g, e in zip(got, expected, strict=True))
    return Picture(figure, f"{wrong} of {N} rows differ")


_WEIGHTS_MISTAKES = (
    Misconception(
        "setting hidden weights to zero after the softmax",
        slip(_weights, "after"),
        "The rows sum to less than 1. By then the softmax has divided by a sum that holds the "
        "hidden scores. Which step must not see them?",
    ),
    Misconception(
        "renormalising after the softmax",
        slip(_weights, "renormalised"),
        "That repairs ordinary rows. Where a hidden score is far above the visible ones, the "
        "softmax has rounded every visible weight to 0, and 0 / 0 is nan. Which step must not see "
        "the hidden scores at all?",
    ),
    Misconception(
        "a softmax without its largest score subtracted",
        slip(_weights, "overflow"),
        "The exponentials of scores far below zero are all 0, and 0 / 0 is nan. What did the "
        "chapter subtract from every score of a row?",
    ),
    Misconception(
        "exponentials multiplied by the mask",
        slip(_weights, "masked exponentials"),
        "The exponential of a huge hidden score is inf, and inf times 0 is nan. Can you hide the "
        "keys before anything is exponentiated?",
    ),
    Misconception(
        "a large negative number where -inf is meant",
        slip(_weights, "large"),
        "It hides a key only while every visible score lies far above it. Here the visible ones "
        "are lower still, and hidden keys take all the weight. Which score is below every other?",
    ),
    Misconception(
        "adding a large negative number where -inf is meant",
        slip(_weights, "added"),
        "A hidden score that stands far above the others stays above them when it is lowered by a "
        "finite amount. Which amount is enough for every score?",
    ),
    Misconception(
        "a mask multiplied with -inf",
        slip(_weights, "times infinity"),
        "0 times infinity is nan, so the keys that should stay as they are become nan. Which "
        "function writes where the mask is True, and touches nothing else?",
    ),
    Misconception(
        "taking a score of 0 for a hidden one",
        slip(_weights, "zeros are hidden"),
        "A key may be visible and have the score 0; here such a key got no weight. How do you "
        "know who is hidden without looking at the scores?",
    ),
    Misconception(
        "giving hidden keys the score 0",
        slip(_weights, "zero"),
        "A score of 0 is a score like any other: exp(0) = 1, so hidden keys still take weight. "
        "Which score has the exponential exactly 0?",
    ),
    Misconception(
        "lining up the queries with the first keys",
        slip(_weights, "first keys"),
        "Query row 0 is not position 0 when N < M: the queries are the last N positions. At which "
        "position does row i stand?",
    ),
    Misconception(
        "an offset of N − M where M − N is meant",
        slip(_weights, "sign turned"),
        "Your comparison is right, your offset is not. N − M is negative when N < M, so the first "
        "rows see nothing. At which position does row 0 stand?",
    ),
    Misconception(
        "keys as rows and queries as columns",
        slip(_weights, "column with column"),
        "Here the keys run down and the queries run across. Row = who asks, column = who is asked. "
        "Which of your two `arange`s becomes the column, by `[:, None]`?",
    ),
    Misconception(
        "hiding a query's own position",
        slip(_weights, "own hidden"),
        "A query may see itself. Without that, the very first row sees nothing. Is your "
        "comparison `<` or `<=`?",
    ),
    Misconception(
        "showing each query the key after its own",
        slip(_weights, "one ahead"),
        "Each row gives weight to one position too many, the next word, which a language model "
        "is to predict. At which position does the last row stand: M, or M - 1?",
    ),
    Misconception(
        "hiding the past and showing the future",
        slip(_weights, "inverted"),
        "The mask is the wrong way round. `masked_fill(mask, value)` writes where the mask is "
        "True: is yours True for what may be seen, or for what may not?",
    ),
    Misconception(
        "normalising over the queries",
        slip(_weights, "over queries"),
        "Here the columns sum to 1. Each query spreads its own weight over the keys. Along which "
        "dimension does its row run?",
    ),
    Misconception(
        "comparing a row of positions with a row",
        slip(_weights, "row with row"),
        "Position 0 meets position 0 alone, 1 meets 1, and so on. Every query must meet every key: "
        "a column `[N, 1]` and a row `[1, M]`. Which of yours becomes the column, by `[:, None]`?",
    ),
    Misconception(
        "showing every query every key",
        slip(_weights, "no mask"),
        "Nothing is hidden: row 0 reads what comes after it. `masked_fill` returns a new tensor "
        "and leaves `scores` alone. Who keeps what it returns?",
    ),
    Misconception(
        "the masked scores where the weights are asked for",
        slip(_weights, "scores"),
        "Hidden keys have the score -inf here. What turns scores into weights?",
    ),
)

CAUSAL_WEIGHTS = TEXTS.exercise(
    "causal_weights",
    minutes=8,
    difficulty=2,
    solution=causal_weights,
    cases=(
        Case(
            "three positions, every one of them a query",
            lambda: (torch.tensor([[1.0, 2, 0], [0.0, 1, 3], [2.0, 0, 1]]),),
        ),
        Case(
            "hidden scores far above the visible ones",
            lambda: (torch.tensor([[0.0, 1, 3e38], [1.0, 0, 3e38], [2.0, 0, 1]]),),
        ),
        Case("three positions, all scores far below zero", lambda: (torch.full((3, 3), -3e38),)),
        Case("the last two of five positions are queries", lambda: (_random(5, 2, 5),)),
        Case("decoding: the last of four positions is the only query", lambda: (_random(6, 1, 4),)),
        Case("six positions, scores of about -20", lambda: (_random(7, 6, 6, spread=2.0) - 20.0,)),
    ),
    misconceptions=_WEIGHTS_MISTAKES,
    combine=together(
        _WEIGHTS_MISTAKES,
        {*_MASKS, "inverted", "row with row", "column with column"},
        {
            "after",
            "renormalised",
            "masked exponentials",
            "large",
            "added",
            "times infinity",
            "zeros are hidden",
            "zero",
        },
        {"after", "renormalised", "masked exponentials", "overflow", "scores"},
        {"over queries", "scores"},
    ),
    picture=_draw_weights,
)


# -- leaks --


def leaks(weigh: Callable) -> bool:
    """True if scores that a query must not see change its weights."""
    scores = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    hidden = ~da.causal_mask(3, 3)
    calm, loud = weigh(scores), weigh(scores.masked_fill(hidden, 1e6))
    return not torch.equal(calm, loud)


def _two_keys(scores: Tensor) -> Tensor:
    """Weights of a query's own key and the one before: right in another way, without a leak."""
    N, M = scores.shape
    seen = torch.ones(N, M).tril(M - N).bool() & ~torch.ones(N, M).tril(M - N - 2).bool()
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)


def _later_rows(scores: Tensor) -> Tensor:
    """Weights that are right in the first row, and show every later one more keys than it may."""
    N, M = scores.shape
    row, key = torch.arange(N)[:, None], torch.arange(M)[None, :]
    return torch.softmax(scores.masked_fill(key > M - N + 2 * row, -torch.inf), -1)


def _finds_a_leak(slips: Slips, weigh: Callable) -> bool:
    """`leaks` with slips."""
    if slips & {"never", "always"}:
        return "always" in slips
    scores = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    hidden = ~da.causal_mask(3, 3)
    changed = hidden.clone()
    if "first row" in slips:
        changed[1:] = False
    elif "last of the first row" in slips:
        changed[:, :-1], changed[1:] = False, False
    loudness = 4.0 if "small" in slips else 200.0 if "two hundred" in slips else 1e6
    calm, loud = weigh(scores), weigh(scores.masked_fill(changed, loudness))
    calm = loud if "one table" in slips else calm
    tables = (calm,) if "once" in slips else (calm, loud)
    if "hidden weights" in slips:
        return any(bool((w[hidden] != 0).any()) for w in tables)
    if "row sums" in slips:
        return not all(torch.allclose(w.sum(-1), torch.ones(3)) for w in tables)
    if "right weights" in slips:
        return not all(torch.allclose(w, causal_weights(scores)) for w in tables)
    if "by much" in slips:
        return bool(((calm - loud).abs() > 1e-6).any())
    return torch.equal(calm, loud) == ("inverted" in slips)


def _finds(name: str, hint: str, *ways: tuple[str, ...]) -> tuple[Misconception, ...]:
    """One weakness of a test, in several ways."""
    return tuple(Misconception(name, Wrong(_finds_a_leak, frozenset(way)), hint) for way in ways)


LEAKS = TEXTS.exercise(
    "leaks",
    minutes=10,
    difficulty=2,
    solution=leaks,
    cases=(
        Case("no mask at all", lambda: (slip(_weights, "no mask"),)),
        Case("a right function", lambda: (causal_weights,)),
        Case("zeros written over the weights", lambda: (slip(_weights, "after"),)),
        Case("a mask that shows one key too many", lambda: (slip(_weights, "one ahead"),)),
        Case("no leak: only a query's own key and the one before", lambda: (_two_keys,)),
        Case(
            "zeros over the weights, the rest divided by its sum",
            lambda: (slip(_weights, "renormalised"),),
        ),
        Case("10,000 subtracted from hidden scores", lambda: (slip(_weights, "added"),)),
        Case("a leak in the later rows alone: key <= 2 * row", lambda: (_later_rows,)),
    ),
    misconceptions=(
        *_finds(
            "a look at the hidden weights alone",
            "Zeros can be written there at the end. By then the hidden scores have been in the "
            "sum that all other weights were divided by. Which weights must stay the same?",
            ("hidden weights", "once"),
            ("hidden weights",),
        ),
        *_finds(
            "two names for one table",
            "Both calls of `weigh` saw the same scores. `t = s` makes a second name, not a copy: "
            "what you write into `t` stands in `s`, too. Which method makes a copy?",
            ("one table",),
            ("one table", "first row"),
            ("one table", "two hundred"),
        ),
        *_finds(
            "a look at the sums of the rows",
            "Rows without a mask sum to 1, too. A leak is that one number depends on another. How "
            "do you find out whether it does?",
            ("row sums",),
            ("row sums", "once"),
        ),
        *_finds(
            "a comparison with the right weights",
            "A function may hide more than yours does, and leak nothing. Compare `weigh` with "
            "itself. On which two tables of scores?",
            ("right weights",),
            ("right weights", "once"),
        ),
        *_finds(
            "a change too small to show",
            "You change hidden scores by a little. Some functions cope with that, and break where "
            "a hidden score stands far above the others. How large can a score be?",
            ("small",),
            ("small", "first row"),
        ),
        *_finds(
            "a change that a large negative number still hides",
            "Your test finds the new sum, but not a large negative number: with 10,000 taken off, "
            "your hidden scores are hidden after all. How large can a score be?",
            ("two hundred",),
            ("two hundred", "first row"),
        ),
        *_finds(
            "a look at the first row alone",
            "A function may be right in its first row, and leak in the next. Which places does "
            "`da.causal_mask(3, 3)` hide?",
            ("first row",),
            ("last of the first row",),
        ),
        *_finds(
            "a comparison that nan slips through",
            "Where `weigh` gives nan, every `>` says False, so you see no difference. Which "
            "question about two tables does nan not pass?",
            ("by much",),
            ("by much", "first row"),
        ),
        *_finds(
            "yes and no exchanged",
            "Your test says True of right functions. True means that the future leaks.",
            ("inverted",),
        ),
        *_finds(
            "a test that nothing fails",
            "It says False of every function, of one without a mask, too. Do your two tables of "
            "scores differ where the mask hides?",
            ("never",),
        ),
        *_finds(
            "a test that everything fails",
            "It says True of right functions, too. Do your two tables of scores differ where a "
            "query *may* look?",
            ("always",),
        ),
    ),
)


# -- attention_cost --


def attention_cost(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    """{"flops": operations, "bytes": traffic} of one head of causal attention in three separate
    steps."""
    flops = 2 * N * M * D + 2 * N * M * DV  # a multiply and an add each: scores, then weighted sum
    scores_step = N * D + M * D + N * M  # read q and k, write the scores
    softmax_step = N * M + N * M  # read the scores, write the weights
    sum_step = N * M + M * DV + N * DV  # read the weights and v, write o
    return {"flops": flops, "bytes": itemsize * (scores_step + softmax_step + sum_step)}


_FLOPS = {
    "one each": lambda N, M, D, DV: N * M * (D + DV),
    "one each in the scores": lambda N, M, D, DV: N * M * (D + 2 * DV),
    "one each in the sum": lambda N, M, D, DV: N * M * (2 * D + DV),
    "four each": lambda N, M, D, DV: 4 * N * M * (D + DV),
    "one addition fewer": lambda N, M, D, DV: N * M * (2 * D - 1) + N * DV * (2 * M - 1),
    "scores alone": lambda N, M, D, DV: 2 * N * M * D,
    "sum alone": lambda N, M, D, DV: 2 * N * M * DV,
    "as many keys as queries": lambda N, M, D, DV: 2 * N * N * (D + DV),
    "widths multiplied": lambda N, M, D, DV: 2 * N * M * D * DV,
    "all as wide as keys": lambda N, M, D, DV: 4 * N * M * D,
    "masked": lambda N, M, D, DV: 2 * (N * M - N * (N - 1) // 2) * (D + DV),
    "softmax, 1": lambda N, M, D, DV: 2 * N * M * (D + DV) + N * M,
    "softmax, 2": lambda N, M, D, DV: 2 * N * M * (D + DV) + 2 * N * M,
    "softmax, 3": lambda N, M, D, DV: 2 * N * M * (D + DV) + 3 * N * M,
    "softmax, 4": lambda N, M, D, DV: 2 * N * M * (D + DV) + 4 * N * M,
    "softmax, 5": lambda N, M, D, DV: 2 * N * M * (D + DV) + 5 * N * M,
}
_TABLES = {
    "no tables": 0, "one crossing": 1, "two crossings": 2, "three crossings": 3,
    "mask moved": 5, "one step more": 6, "scale and mask moved": 8,
}  # fmt: skip


def _cost(slips: Slips, N: int, M: int, D: int, DV: int, itemsize: int) -> object:
    """`attention_cost` with slips."""
    if "D for DV" in slips:
        DV = D
    flops = 2 * N * M * (D + DV)
    for name in slips & _FLOPS.keys():
        flops = _FLOPS[name](N, M, D, DV)
    crossings = 4
    for name in slips & _TABLES.keys():
        crossings = _TABLES[name]
    v = M * (D if slips & {"v and o like q", "v like k"} else DV)
    if "v per query" in slips:
        v = N * DV
    rows = M if "o per key" in slips else N
    o = rows * (D if slips & {"v and o like q", "o like q"} else DV) * ("no output" not in slips)
    q, k = N * D * ("no q" not in slips), M * D * ("no k" not in slips)
    v *= "no v" not in slips
    vectors = 0 if "tables alone" in slips else q + k + v + o
    elements = vectors + crossings * N * M
    if "everything twice" in slips:
        elements += vectors
    if "first step" in slips:
        elements = q + k + N * M
    if "reads alone" in slips:
        elements -= o + 2 * N * M
    if "writes alone" in slips:
        elements -= q + k + v + 2 * N * M
    size = 1 if "elements" in slips else 2 if "two bytes" in slips else itemsize
    if "operations of bytes" in slips:
        flops *= itemsize
    cost = {"flops": flops, "bytes": size * elements}
    if "swapped" in slips:
        cost = dict(zip(cost, reversed(cost.values()), strict=True))
    if "bytes alone" in slips:
        return cost["bytes"]
    return tuple(cost.values()) if "tuple" in slips else cost


_STEP_BY_STEP = "Which reads and writes does each of the three steps have?"

_COST_MISTAKES = (
    Misconception(
        "the right two numbers, each under the other's name",
        slip(_cost, "swapped"),
        "Operations come from multiplying and adding, bytes from carrying tensors. Which of your "
        "two sums holds which?",
    ),
    Misconception(
        "the right two numbers without their names",
        slip(_cost, "tuple"),
        "The statement asks for a dictionary, so that nobody has to remember which number comes "
        "first. What are its two keys?",
    ),
    Misconception(
        "the bytes without the operations",
        slip(_cost, "bytes alone"),
        "The statement asks for a dictionary of two numbers. Which name do your bytes get? And "
        "which number goes beside them?",
    ),
    Misconception(
        "counting a multiply-add as one operation",
        slip(_cost, "one each"),
        "A dot product of width D takes D multiplications and, to sum them, as many additions. "
        "Masked pairs are computed, too. How many operations is that per pair of numbers?",
    ),
    *(
        Misconception(
            "counting a multiply-add as one operation in one of the two products",
            slip(_cost, f"one each in the {product}"),
            f"One matrix product has the factor of 2, and {other} has not. How many operations "
            "does each pair of numbers take in it?",
        )
        for product, other in (("scores", "the scores' product"), ("sum", "the weighted sum"))
    ),
    Misconception(
        "counting every operation twice",
        slip(_cost, "four each"),
        "Your number is twice too large. Per pair of numbers, there are one multiplication and one "
        "addition. Where does your other factor of 2 come from?",
    ),
    Misconception(
        "counting one addition fewer than multiplications",
        slip(_cost, "one addition fewer"),
        "Strictly true, and not how it is counted: a sum is taken to start at 0, so every "
        "multiplication has its addition. How many operations is that per pair of numbers?",
    ),
    Misconception(
        "counting one of the two matrix products",
        slip(_cost, "scores alone"),
        "The scores are one matrix product. What are the weights multiplied with?",
    ),
    Misconception(
        "counting one of the two matrix products",
        slip(_cost, "sum alone"),
        "The weighted sum is one matrix product. Which product makes the scores?",
    ),
    Misconception(
        "counting N keys where there are M",
        slip(_cost, "as many keys as queries"),
        "Your operations depend on N alone. With how many keys does each of the N queries meet?",
    ),
    Misconception(
        "multiplying the two widths",
        slip(_cost, "widths multiplied"),
        "The two matrix products come one after the other. Are their operations multiplied, or "
        "added?",
    ),
    Misconception(
        "computing with values as wide as the keys",
        slip(_cost, "all as wide as keys"),
        "The second matrix product sums values. How wide is a value?",
    ),
    Misconception(
        "counting the masked half of the products as free",
        slip(_cost, "masked"),
        "The mask is laid over scores that have already been computed. What does a plain matrix "
        "product know about it?",
    ),
    *(
        Misconception(
            "counting the softmax's operations",
            slip(_cost, f"softmax, {count}"),
            "Softmax and scale are real work, but only a few operations per score beside 2·D, so "
            "they are left out here. Which two steps are matrix products?",
        )
        for count in (1, 2, 3, 4, 5)
    ),
    Misconception(
        "multiplying operations by the bytes of a number",
        slip(_cost, "operations of bytes"),
        "A product of two numbers is one operation, however many bytes they take. Where does "
        "`itemsize` belong?",
    ),
    Misconception(
        "moving v and o at the width of q and k",
        slip(_cost, "v and o like q"),
        "q and k share the width D because they meet in a dot product. v is only summed: how wide "
        "is it, and how wide are its sums?",
    ),
    Misconception(
        "moving v at the width of k",
        slip(_cost, "v like k"),
        "Keys and values come in pairs, M of each, but they need not be equally wide. Which shape "
        "has v?",
    ),
    Misconception(
        "moving o at the width of q",
        slip(_cost, "o like q"),
        "There is one output per query, but it is a sum of values. How wide is a sum of values?",
    ),
    Misconception(
        "taking D for DV everywhere",
        slip(_cost, "D for DV"),
        "Values have a width of their own. Where do they enter the operations, and where the "
        "bytes?",
    ),
    Misconception(
        "carrying N·M numbers three times",
        slip(_cost, "three crossings"),
        "Scores and weights are two tensors of N·M numbers, and what one step writes, the next "
        f"one reads. {_STEP_BY_STEP}",
    ),
    Misconception(
        "carrying N·M numbers twice",
        slip(_cost, "two crossings"),
        "There are two tensors of N·M numbers, scores and weights, and each is written by one "
        f"step and read by the next. {_STEP_BY_STEP}",
    ),
    Misconception(
        "writing the score matrix and never reading it again",
        slip(_cost, "one crossing"),
        "What one step writes, the next one reads, and the weights are a second matrix of the "
        f"same size. {_STEP_BY_STEP}",
    ),
    Misconception(
        "letting the mask move bytes",
        slip(_cost, "mask moved"),
        "In this count the mask costs nothing. Which four times does a table of N·M numbers cross "
        "main memory without it?",
    ),
    Misconception(
        "carrying N·M numbers six times",
        slip(_cost, "one step more"),
        f"Your count has one step too many. Scale and mask cost nothing here. {_STEP_BY_STEP}",
    ),
    Misconception(
        "letting scale and mask be steps of their own",
        slip(_cost, "scale and mask moved"),
        "PyTorch does move that much. Here there are three steps, and the mask costs nothing. "
        "Which four crossings of N·M numbers are left?",
    ),
    Misconception(
        "counting the first step alone",
        slip(_cost, "first step"),
        "That is the step that the chapter counts for you. What do the softmax and the weighted "
        "sum read and write?",
    ),
    Misconception(
        "reading and writing every tensor",
        slip(_cost, "everything twice"),
        "Scores and weights are written by one step and read by the next. Does any step write `q`, "
        "or read the output?",
    ),
    Misconception(
        "counting what is read and not what is written",
        slip(_cost, "reads alone"),
        f"Every step also writes its result to main memory, the last one too. {_STEP_BY_STEP}",
    ),
    Misconception(
        "counting what is written and not what is read",
        slip(_cost, "writes alone"),
        f"Every step reads its inputs from main memory, too. {_STEP_BY_STEP}",
    ),
    *(
        Misconception(
            f"leaving out {name}",
            slip(_cost, f"no {name}"),
            f"Main memory holds `{name}`, too. Which step reads it, and which shape does it have?",
        )
        for name in "qkv"
    ),
    Misconception(
        "leaving out the output",
        slip(_cost, "no output"),
        "Three steps, and each of them writes something. What does the last one write?",
    ),
    Misconception(
        "as many values as queries",
        slip(_cost, "v per query"),
        "Values come with the keys, one for each of the M positions. Which of v and o has N rows?",
    ),
    Misconception(
        "as many outputs as keys",
        slip(_cost, "o per key"),
        "Every query gets one output, however many keys it asks. Which of v and o has N rows?",
    ),
    Misconception(
        "leaving the score matrix out of the bytes",
        slip(_cost, "no tables"),
        "Inputs and output are not all that moves. Through what do three separate steps hand on "
        "scores and weights?",
    ),
    Misconception(
        "counting the score matrix alone",
        slip(_cost, "tables alone"),
        "q, k and v are read and o is written, too. With a single query, how large are they beside "
        "a table of 1·M scores?",
    ),
    Misconception(
        "counting elements, not bytes",
        slip(_cost, "elements"),
        "These are numbers of elements. How many bytes does each of them take?",
    ),
    Misconception(
        "taking every number for two bytes",
        slip(_cost, "two bytes"),
        "That fits fp16 and bf16. In this case an element has four. Which argument says so?",
    ),
)

ATTENTION_COST = TEXTS.exercise(
    "attention_cost",
    minutes=8,
    difficulty=2,
    solution=attention_cost,
    cases=(
        Case("N=2, M=3, D=4, DV=5, 4 bytes", lambda: (2, 3, 4, 5, 4)),
        Case("decoding: N=1, M=1000, D=64, DV=128, 2 bytes", lambda: (1, 1000, 64, 128, 2)),
        Case("N=M=4096, D=192, DV=128, 4 bytes", lambda: (4096, 4096, 192, 128, 4)),
    ),
    misconceptions=_COST_MISTAKES,
    combine=together(
        _COST_MISTAKES,
        {*_FLOPS, "D for DV"},
        {*_TABLES, "reads alone", "writes alone", "first step", "everything twice"},
        {"first step", "v and o like q", "v like k", "o like q", "v per query", "no v"},
        {"first step", "no output", "tables alone", "o per key"},
        {"everything twice", "tables alone", "no q", "no k", "no v", "no output"},
        {"bytes alone", *_FLOPS, "D for DV", "operations of bytes"},
        {"v and o like q", "v like k", "v per query", "D for DV", "tables alone", "no v"},
        {"v and o like q", "o like q", "D for DV", "tables alone", "reads alone", "no output"},
        {"o per key", "reads alone"},
        *({name, "tables alone"} for name in ("no q", "no k")),
        *({"writes alone", f"no {name}"} for name in "qkv"),
        {"writes alone", "v and o like q", "v like k", "v per query", "D for DV", "tables alone"},
        {"no tables", "tables alone"},
        {"elements", "two bytes"},
        {"swapped", "tuple", "bytes alone"},
    ),
)

# -- causal_softmax --

_BM = 8


def causal_softmax() -> object:
    """The kernel that turns scores [N, M] into causal weights [N, M], a row in each program."""

    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        visible = key <= M - N + row
        s = tl.load(S + row * M + key, mask=visible, other=float("-inf"))
        e = tl.exp(s - tl.max(s, axis=0))
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=key < M)

    return kernel


class _Stored(NamedTuple):
    """What a kernel stored: the weights, and how many numbers past their end."""

    W: Tensor
    stored_past_the_end: int


def _run_causal_softmax(solution: Callable, scores: Tensor) -> _Stored:
    """Launch the kernel; `W` is -1 everywhere before, and past its end it must stay so."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("causal_softmax defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    N, M = scores.shape
    source = roomy(scores, 5.0)
    w = roomy(torch.full((N * M + N * _BM,), -1.0), -1.0)
    with warnings.catch_warnings():  # the interpreter's, of inf / inf in a wrong kernel
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[N,](source, w, N, M, BM=_BM)
    past = int((w[N * M :] != -1.0).sum())
    return _Stored(w[: N * M].view(N, M).cpu(), past)


@triton.jit
def _wrong_softmax(
    S, W, N, M, BM: tl.constexpr,
    LINED_UP: tl.constexpr, SHIFT: tl.constexpr, STORED: tl.constexpr, LOADED: tl.constexpr,
    START: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    key = tl.arange(0, BM)
    last = row if LINED_UP == "first keys" else M - N + row
    if LINED_UP == "sign turned":
        last = N - M + row
    if LINED_UP == "own hidden":
        last = last - 1
    if LINED_UP == "one ahead":
        last = last + 1
    if LINED_UP == "no mask":
        last = M - 1
    visible = (key <= last) & (key < M)
    start = row * BM if START == "by tile" else row * M
    if LOADED == "zeros":
        s = tl.load(S + start + key, mask=visible, other=0.0)
    elif LOADED == "zeros after":
        s = tl.load(S + start + key, mask=key < M, other=float("-inf"))
    else:
        s = tl.load(S + start + key, mask=visible, other=float("-inf"))
    if SHIFT == "no maximum":
        e = tl.exp(s)
    elif SHIFT == "outside":
        e = tl.exp(s) - tl.max(s, axis=0)
    elif SHIFT == "base two":
        e = tl.exp2(s - tl.max(s, axis=0))
    else:
        e = tl.exp(s - tl.max(s, axis=0))
    w = e if FINISH == "not divided" else e / tl.sum(e, axis=0)
    if LOADED == "zeros after":
        w = tl.where(visible, w, 0.0)
    if STORED == "visible alone":
        tl.store(W + row * M + key, w, mask=visible)
    elif STORED == "past the end":
        tl.store(W + row * M + key, w)
    else:
        tl.store(W + row * M + key, w, mask=key < M)


_SLOTS = {
    "LINED_UP": ("first keys", "own hidden", "one ahead", "no mask", "sign turned"),
    "SHIFT": ("no maximum", "base two", "outside"),
    "STORED": ("visible alone", "past the end"),
    "LOADED": ("zeros", "zeros after"),
    "START": ("by tile",),
    "FINISH": ("not divided",),
}


class _Mistaken:
    """`_wrong_softmax` with its slips chosen; launched like a kernel."""

    def __init__(self, slips: Slips) -> None:
        self.run = None
        self.chosen = {
            slot: next((name for name in names if name in slips), "none")
            for slot, names in _SLOTS.items()
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return partial(_wrong_softmax[grid], **self.chosen)


def _softmax_kernel(slips: Slips) -> object:
    """`causal_softmax` with slips."""
    return _Mistaken(slips)


_GIVEN = frozenset({"first keys", "no maximum", "visible alone"})

_SOFTMAX_MISTAKES = (
    Misconception(
        "lining up the queries with the first keys",
        slip(_softmax_kernel, "first keys"),
        "Row 0 is not position 0 when N < M. At which position does the last row stand?",
    ),
    Misconception(
        "leaving the hidden places of W as they were",
        slip(_softmax_kernel, "visible alone"),
        "`W` was -1 everywhere before the launch, and it still is where a key is hidden. A hidden "
        "key has the weight 0. Which places of the row does your store reach?",
    ),
    Misconception(
        "exponentials without the largest score subtracted",
        slip(_softmax_kernel, "no maximum"),
        "exp(1000) is inf, and inf / inf is nan. What did the chapter subtract from a row first?",
    ),
    Misconception(
        "an offset of N − M where M − N is meant",
        slip(_softmax_kernel, "sign turned"),
        "N − M is negative when N < M, so the first rows see nothing. At which position does row 0 "
        "stand?",
    ),
    Misconception(
        "the maximum taken off the exponential, not off the score",
        slip(_softmax_kernel, "outside"),
        "After `tl.exp`, a subtraction no longer cancels in the quotient, and exp(1000) is inf by "
        "then. What has to stand inside the parentheses?",
    ),
    Misconception(
        "the kernel as it was given",
        Wrong(_softmax_kernel, _GIVEN),
        "All three bugs are still in it. Take two queries, five keys and a score of 1000, and walk "
        "through it by hand. Which line goes wrong first?",
    ),
    Misconception(
        "hidden keys that count as a score of 0",
        slip(_softmax_kernel, "zeros"),
        "A place that is not loaded becomes what `other` says, and exp(0) is 1. Which score has "
        "the exponential 0?",
    ),
    Misconception(
        "zeros written over the weights at the end",
        slip(_softmax_kernel, "zeros after"),
        "The hidden scores are still in the sum that you divide by. Which load must not see them?",
    ),
    Misconception(
        "storing past the end of the row",
        slip(_softmax_kernel, "past the end"),
        "The tile has `BM` places and the row has `M`. Whose memory is behind it?",
    ),
    Misconception(
        "rows that are BM numbers apart",
        slip(_softmax_kernel, "by tile"),
        "Rows of `M` numbers lie one behind the other. How far is it from one row to the next?",
    ),
    Misconception(
        "hiding a query's own position",
        slip(_softmax_kernel, "own hidden"),
        "A query may see itself. Is your comparison `<` or `<=`?",
    ),
    Misconception(
        "showing each query the key after its own",
        slip(_softmax_kernel, "one ahead"),
        "The last of M positions is M - 1. What does your comparison give for the last row?",
    ),
    Misconception(
        "showing every query every key",
        slip(_softmax_kernel, "no mask"),
        "Nothing is hidden. Which keys may row 0 see?",
    ),
    Misconception(
        "powers of two where powers of e are meant",
        slip(_softmax_kernel, "base two"),
        "`tl.exp2(x)` is 2 to the power x. Which function is `torch.exp`'s twin?",
    ),
    Misconception(
        "exponentials that are not divided by their sum",
        slip(_softmax_kernel, "not divided"),
        "The rows do not sum to 1. What is missing after the exponentials?",
    ),
)


def _softmax_case(name: str, scores: Callable[[], Tensor]) -> Case:
    here = environment.detect()
    return Case(name, lambda: (scores(),), lambda: here.why_not("triton", here.device))


CAUSAL_SOFTMAX = TEXTS.exercise(
    "causal_softmax",
    minutes=8,
    difficulty=2,
    solution=causal_softmax,
    run=_run_causal_softmax,
    misconceptions=_SOFTMAX_MISTAKES,
    combine=together(
        _SOFTMAX_MISTAKES,
        *_SLOTS.values(),
        {"zeros after", "visible alone"},
    ),
    cases=(
        _softmax_case("two queries, three keys", lambda: torch.tensor([[1.0, 2, 0], [0.5, 1, 3]])),
        _softmax_case("four queries, four keys", lambda: _random(11, 4, 4)),
        _softmax_case("two queries, three keys, scores of 1000", lambda: 1000 + _random(12, 2, 3)),
        _softmax_case("decoding: one query, eight keys", lambda: _random(13, 1, 8)),
    ),
)

EXERCISES = (CAUSAL_WEIGHTS, SCALED_SCORES, ATTENTION_COST, LEAKS, CAUSAL_SOFTMAX)


# -- two slips at once --


def _unscaled_by_positions(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bihj", q, k)


def _by_width_keys_first(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhji", q, k) / q.shape[-1]


def _first_keys_large_number(scores: Tensor) -> Tensor:
    visible = torch.tril(torch.ones(scores.shape)).bool()
    return torch.softmax(scores.masked_fill(~visible, -1e9), dim=-1)


def _own_hidden_zeros_after(scores: Tensor) -> Tensor:
    N, M = scores.shape
    query, key = torch.arange(M - N, M)[:, None], torch.arange(M)[None, :]
    return torch.softmax(scores, dim=-1) * (key < query)


def _one_operation_three_tables(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    elements = N * D + M * D + M * DV + N * DV + 3 * N * M
    return {"flops": N * M * (D + DV), "bytes": itemsize * elements}


def _keys_width_and_elements(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    return {"flops": 4 * N * M * D, "bytes": N * D + M * D + M * DV + N * DV + 4 * N * M}


def _mended_once() -> object:
    @triton.jit
    def kernel(S, W, N, M, BM: tl.constexpr):
        row = tl.program_id(0)
        key = tl.arange(0, BM)
        visible = key <= M - N + row
        s = tl.load(S + row * M + key, mask=visible, other=float("-inf"))
        e = tl.exp(s)
        tl.store(W + row * M + key, e / tl.sum(e, axis=0), mask=visible)

    return kernel


DOUBLES = (
    Double(
        "scaled_scores",
        _unscaled_by_positions,
        ("leaving the scores unscaled", "positions before heads"),
    ),
    Double(
        "scaled_scores",
        _by_width_keys_first,
        ("dividing by D where √D is meant", "keys as rows and queries as columns"),
    ),
    Double(
        "causal_weights",
        _first_keys_large_number,
        (
            "a large negative number where -inf is meant",
            "lining up the queries with the first keys",
        ),
    ),
    Double(
        "causal_weights",
        _own_hidden_zeros_after,
        ("setting hidden weights to zero after the softmax", "hiding a query's own position"),
    ),
    Double(
        "attention_cost",
        _one_operation_three_tables,
        ("counting a multiply-add as one operation", "carrying N·M numbers three times"),
    ),
    Double(
        "attention_cost",
        _keys_width_and_elements,
        ("computing with values as wide as the keys", "counting elements, not bytes"),
    ),
    Double(
        "causal_softmax",
        _mended_once,
        (
            "leaving the hidden places of W as they were",
            "exponentials without the largest score subtracted",
        ),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    score_table_gib={"unit": "GiB"},
    spread_of_64={"tolerance": 0.02},
    dice_right={"tolerance": 0.02, "unit": "%"},
    slower_side={"choices": ("arithmetic", "memory")},
)
