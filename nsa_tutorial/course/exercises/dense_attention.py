"""Exercises of chapter 01: the scale, the causal mask, the log-sum-exp of a row, and the price of
it all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure


def _random(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- scaled_scores --


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [B, N, HQ, D], k [B, M, HQ, D] -> scaled scores [B, HQ, N, M]."""
    D = q.shape[-1]
    return torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5


def _dots(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k)


SCALED_SCORES = Exercise(
    name="scaled_scores",
    statement="""
Complete `scaled_scores(q, k)`: the score of every query with every key, per batch entry and head,
**scaled so that its spread does not grow with the width of the vectors**.

- `q` is `[B, N, HQ, D]`, `k` is `[B, M, HQ, D]`; return `[B, HQ, N, M]`.
- No mask, no softmax: only the scores.
""",
    minutes=2,
    difficulty=1,
    solution=scaled_scores,
    cases=(
        Case(
            "one head of width 4, two queries, three keys",
            lambda: (
                torch.tensor([[[[1.0, 2, 0, 1]], [[0.0, 1, 3, -1]]]]),
                torch.tensor([[[[2.0, 1, 0, 2]], [[1.0, 1, 1, 1]], [[0.0, -2, 1, 0]]]]),
            ),
        ),
        Case("three heads of width 8", lambda: (_random(1, 2, 3, 3, 8), _random(2, 2, 5, 3, 8))),
        Case(
            "two heads of width 6, one query, seven keys",
            lambda: (_random(3, 1, 1, 2, 6), _random(4, 1, 7, 2, 6)),
        ),
    ),
    misconceptions=(
        Misconception(
            "dividing by D where √D is meant",
            lambda q, k: _dots(q, k) / q.shape[-1],
            "The variance of a dot product grows like D, so its standard deviation, the typical "
            "size of a score, grows like √D. "
            "Dividing by D shrinks the scores towards 0, and every softmax towards a plain "
            "average. "
            "Look again at the cell that measures the spread of dot products.",
        ),
        Misconception(
            "leaving the scores unscaled",
            _dots,
            "The scores of wide vectors are large only because the vectors are wide, and softmax "
            "then picks one key and ignores "
            "the rest. Look at the curve of the largest weight against D.",
        ),
        Misconception(
            "scaling by the width of all heads together",
            lambda q, k: _dots(q, k) / (q.shape[-1] * q.shape[-2]) ** 0.5,
            "Each head takes its dot product over its own D numbers and never sees the other "
            "heads' numbers: "
            "count how many products go into one score.",
        ),
        Misconception(
            "scaling by the number of keys",
            lambda q, k: _dots(q, k) / k.shape[1] ** 0.5,
            "The number of keys decides how many scores a query gets, not how large one score is. "
            "What is summed inside a single dot product?",
        ),
        Misconception(
            "multiplying by √D instead of dividing",
            lambda q, k: _dots(q, k) * q.shape[-1] ** 0.5,
            "A wider vector already gives larger scores; multiplying makes them larger still. "
            "Which direction undoes the growth?",
        ),
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


def _visible(scores: Tensor) -> Tensor:
    N, M = scores.shape
    return torch.ones(N, M, dtype=torch.bool).tril(M - N)


def _hide(scores: Tensor, hidden: Tensor, value: float = float("-inf")) -> Tensor:
    return scores.masked_fill(hidden, value)


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


CAUSAL_WEIGHTS = Exercise(
    name="causal_weights",
    statement="""
Complete `causal_weights(scores)`: from scaled scores to weights, so that no query gives weight to a
position after its own.

- `scores` is `[N, M]` for one head; **the queries are the last `N` of the `M` positions**, so `N`
  may be smaller than `M`.
- Return weights `[N, M]`: every row sums to 1, and every hidden key has weight exactly 0. That must
  hold for scores of any size: hidden ones may be far larger than visible ones, or all of them far
  below zero.
- Build the mask yourself, without `da.causal_mask`. You may use `torch.softmax`. (`torch.arange`
  counts positions, and a column `[N, 1]` compared with a row `[1, M]` gives a table `[N, M]`.)
""",
    minutes=6,
    difficulty=2,
    solution=causal_weights,
    cases=(
        Case(
            "three positions, every one of them a query",
            lambda: (torch.tensor([[1.0, 2, 0], [0.0, 1, 3], [2.0, 0, 1]]),),
        ),
        Case(
            "a hidden score far above the visible ones",
            lambda: (torch.tensor([[0.0, 3e38], [0.0, 0.0]]),),
        ),
        Case("three positions, all scores far below zero", lambda: (torch.full((3, 3), -3e38),)),
        Case("the last two of five positions are queries", lambda: (_random(5, 2, 5),)),
        Case("decoding: the last of four positions is the only query", lambda: (_random(6, 1, 4),)),
        Case("six positions, scores of about -20", lambda: (_random(7, 6, 6, spread=2.0) - 20.0,)),
    ),
    misconceptions=(
        Misconception(
            "setting hidden weights to zero after the softmax",
            lambda s: torch.softmax(s, -1).masked_fill(~_visible(s), 0.0),
            "The softmax has by then divided by a sum that contains the hidden scores, so the "
            "rows sum to less than 1 and what is "
            "left still depends on the future. Hide the keys before anything is summed.",
        ),
        Misconception(
            "renormalising after the softmax",
            lambda s: (w := torch.softmax(s, -1) * _visible(s)) / w.sum(-1, keepdim=True),
            "Dividing what is left by its own sum repairs rows with ordinary scores. But where a "
            "hidden score is far above the "
            "visible ones, the softmax has already rounded every visible weight to 0, and 0 / 0 "
            "is nan. "
            "Which step must not see the hidden scores at all?",
        ),
        Misconception(
            "a large negative number where -inf is meant",
            lambda s: torch.softmax(_hide(s, ~_visible(s), -1e4), -1),
            "A finite number hides a key only as long as every visible score is far above it; "
            "here the visible ones are far below, "
            "and the hidden keys take all the weight. Which score is below every other?",
        ),
        Misconception(
            "adding a large negative number where -inf is meant",
            lambda s: torch.softmax(s - 1e4 * ~_visible(s), -1),
            "Lowering a hidden score by a finite amount hides it only as long as it did not "
            "stand that far above the visible ones; "
            "here it does, and takes all the weight. Which amount is enough for every score?",
        ),
        Misconception(
            "a mask multiplied with -inf",
            lambda s: torch.softmax(s + ~_visible(s) * float("-inf"), -1),
            "0 times an infinity is nan, so the keys that should stay as they are become nan. "
            "Write -inf where the mask is True, and touch nothing else: which function does that?",
        ),
        Misconception(
            "a softmax without its largest score subtracted",
            lambda s: (e := torch.exp(_hide(s, ~_visible(s)))) / e.sum(-1, keepdim=True),
            "Keys are hidden as they should be. But the exponentials of scores far below zero "
            "are all 0, and 0 / 0 is nan. "
            "What did the chapter subtract from every score of a row, and why does it change "
            "nothing else?",
        ),
        Misconception(
            "giving hidden keys the score 0",
            lambda s: torch.softmax(_hide(s, ~_visible(s), 0.0), -1),
            "A score of 0 is a score like any other: exp(0) = 1, so hidden keys still take weight. "
            "Which score has the exponential exactly 0?",
        ),
        Misconception(
            "lining up the queries with the first keys",
            lambda s: torch.softmax(_hide(s, ~torch.ones_like(s, dtype=torch.bool).tril()), -1),
            "Query row 0 is not position 0 when N < M: the queries are the last N positions. "
            "At which position does row i stand, and which keys is that allowed to see?",
        ),
        Misconception(
            "hiding a query's own position",
            lambda s: torch.softmax(_hide(s, ~_visible(s).tril(s.shape[1] - s.shape[0] - 1)), -1),
            "A query may see itself: the keys up to and including its own position. Without it "
            "the very first row sees nothing, "
            "and its softmax is 0/0 = nan.",
        ),
        Misconception(
            "hiding the past and showing the future",
            lambda s: torch.softmax(_hide(s, _visible(s)), -1),
            "The mask is inverted. `masked_fill(mask, value)` writes where the mask is True; "
            "is your mask True for what may be seen, or for what may not?",
        ),
        Misconception(
            "normalising over the queries",
            lambda s: torch.softmax(_hide(s, ~_visible(s)), 0),
            "Here the columns sum to 1. Each query spreads its own weight over the keys: the sum "
            "runs along a row.",
        ),
        Misconception(
            "showing every query every key",
            lambda s: torch.softmax(s, -1),
            "Nothing is hidden: early positions read what comes after them. "
            "Look at row 0, which may see only the keys up to itself.",
        ),
    ),
    picture=_draw_weights,
)


# -- log_sum_exp --


def log_sum_exp(scores: Tensor) -> Tensor:
    """scores [N, M] -> the natural logarithm of the sum of exp(score) of each row [N], safe for
    scores of any size."""
    highest = scores.max(dim=-1, keepdim=True).values
    return highest[:, 0] + torch.log(torch.exp(scores - highest).sum(-1))


def _shifted_sum(scores: Tensor, shift: Tensor) -> Tensor:
    return torch.exp(scores - shift).sum(-1)


def _row_max(scores: Tensor) -> Tensor:
    return scores.max(dim=-1, keepdim=True).values


LOG_SUM_EXP = Exercise(
    name="log_sum_exp",
    statement="""
Complete `log_sum_exp(scores)`: the natural logarithm of the sum of `exp(score)` over each row. (Try
it without `torch.logsumexp`.)

- `scores` is `[N, M]` in fp32. Some are `-inf` (hidden), but every row has at least one that is
  not.
- Return `[N]`, one number per row.
- Scores of 1000 and of −1000 must come out right.
""",
    minutes=6,
    difficulty=2,
    solution=log_sum_exp,
    cases=(
        Case("two rows of three small scores", lambda: (torch.tensor([[1.0, 3, 0], [2.0, 2, 2]]),)),
        Case(
            "a row with hidden keys",
            lambda: (torch.tensor([[0.5, -torch.inf, -torch.inf], [0.5, 1.5, -torch.inf]]),),
        ),
        Case("scores of about 1000", lambda: (1000 + _random(8, 2, 5),)),
        Case(
            "scores of about -1000, the last key hidden",
            lambda: ((-1000 + _random(9, 2, 5)).masked_fill(torch.arange(5) == 4, -torch.inf),),
        ),
        Case(
            "one row 400 above the other",
            lambda: (_random(10, 2, 4) + torch.tensor([[200.0], [-200.0]]),),
        ),
    ),
    misconceptions=(
        Misconception(
            "forgetting to add the maximum back",
            lambda s: torch.log(_shifted_sum(s, _row_max(s))),
            "In a softmax the shift cancels, because numerator and denominator carry it both. "
            "Here nothing cancels it: "
            "what does subtracting m from every score do to log Σ exp(score)?",
        ),
        Misconception(
            "a column where one number per row is asked for",
            lambda s: torch.logsumexp(s, dim=-1, keepdim=True),
            "The numbers are right, their shape is [N, 1]. Keeping the summed dimension helps "
            "while you subtract the maximum from "
            "its row; where does it have to go before you return?",
        ),
        Misconception(
            "a column added to a row, which makes a table",
            lambda s: _row_max(s) + torch.log(_shifted_sum(s, _row_max(s))),
            "The maximum still has the shape [N, 1], the logarithm has [N], and PyTorch adds "
            "every pair of the two. "
            "Which of the two shapes should both have when they are added?",
        ),
        Misconception(
            "the sum of exponentials taken as it stands, which overflows",
            lambda s: torch.log(torch.exp(s).sum(-1)),
            "fp32 ends near 3.4e38, and exp(89) is already larger, so exp(1000) is inf; "
            "exp(-1000) is 0, and its logarithm -inf. "
            "Make the largest exponent of every row 0 first.",
        ),
        Misconception(
            "one maximum for the whole matrix",
            lambda s: s.max() + torch.log(_shifted_sum(s, s.max())),
            "A row whose scores all lie far below the matrix's maximum gets nothing but zeros "
            "from exp. "
            "Each row needs its own maximum.",
        ),
        Misconception(
            "a logarithm to the base 2",
            lambda s: _row_max(s)[:, 0] + torch.log2(_shifted_sum(s, _row_max(s))),
            "The scores are exponents of e, so only the natural logarithm brings the sum back to "
            "their unit.",
        ),
        Misconception(
            "the mean of the exponentials where the sum is meant",
            lambda s: _row_max(s)[:, 0] + torch.log(torch.exp(s - _row_max(s)).mean(-1)),
            "Weights are exp(score − lse) and must sum to 1: that needs the logarithm of the "
            "sum. With the mean they sum to M.",
        ),
        Misconception(
            "the maximum itself",
            lambda s: _row_max(s)[:, 0],
            "The log-sum-exp is close to the maximum only when one score stands far above the "
            "rest; "
            "two equal scores put it log(2) higher.",
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


def _misjudged_flops(flops: Callable[[int, int, int, int], int]) -> Callable:
    """The solution with other operations, `flops(N, M, D, DV)`."""
    return lambda N, M, D, DV, itemsize: (
        attention_cost(N, M, D, DV, itemsize) | {"flops": flops(N, M, D, DV)}
    )


def _misjudged_bytes(
    *, matrix: int = 4, vectors: int = 1, v_like_k: bool = False, o_like_q: bool = False
) -> Callable:
    """The solution with other bytes: `matrix` crossings of N·M numbers, `vectors` of q, k, v and
    o."""

    def wrong(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
        tensors = N * D + M * D + M * (D if v_like_k else DV) + N * (D if o_like_q else DV)
        return attention_cost(N, M, D, DV, itemsize) | {
            "bytes": itemsize * (vectors * tensors + matrix * N * M)
        }

    return wrong


def _swapped(*shape: int) -> dict[str, int]:
    right = attention_cost(*shape)
    return {"flops": right["bytes"], "bytes": right["flops"]}


_STEP_BY_STEP = "Go through the three steps and write one line of reads and writes for each."

ATTENTION_COST = Exercise(
    name="attention_cost",
    statement="""
Complete `attention_cost(N, M, D, DV, itemsize)`: what one head of causal attention costs, done as
in this chapter in three separate steps (scores, softmax, weighted sum), each reading its inputs
from main memory and writing its result back.

- Return a dictionary of two whole numbers, `{"flops": ..., "bytes": ...}`.
- `"flops"`: those of the two matrix products. A dot product of width `D` counts as `D`
  multiplications and `D` additions. The products are plain ones: they compute all `N·M` pairs, the
  masked ones too.
- `"bytes"`: every tensor each time a step reads or writes it. `q, k, v`, scores, weights and output
  all have elements of `itemsize` bytes. The mask costs nothing.
""",
    minutes=8,
    difficulty=2,
    solution=attention_cost,
    cases=(
        Case("N=2, M=3, D=4, DV=5, 2 bytes", lambda: (2, 3, 4, 5, 2)),
        Case("decoding: N=1, M=1000, D=64, DV=128, 2 bytes", lambda: (1, 1000, 64, 128, 2)),
        Case("N=M=4096, D=192, DV=128, 4 bytes", lambda: (4096, 4096, 192, 128, 4)),
    ),
    misconceptions=(
        Misconception(
            "the right two numbers, each under the other's name",
            _swapped,
            "Operations come from multiplying and adding, bytes from carrying tensors. Which of "
            "your two sums holds which?",
        ),
        Misconception(
            "the right two numbers without their names",
            lambda *shape: tuple(attention_cost(*shape).values()),
            "Only the form differs: the statement asks for a dictionary, so that nobody has to "
            "remember which number comes first.",
        ),
        Misconception(
            "counting a multiply-add as one operation",
            _misjudged_flops(lambda N, M, D, DV: N * M * (D + DV)),
            "A dot product of width D takes D multiplications and, to sum them, as many "
            "additions. Both are operations.",
        ),
        Misconception(
            "counting one addition fewer than multiplications",
            _misjudged_flops(lambda N, M, D, DV: N * M * (2 * D - 1) + N * DV * (2 * M - 1)),
            "Strictly true, and not how it is counted: a sum is taken to start at 0, so that "
            "every multiplication has its "
            "addition. How many operations is that per pair of numbers?",
        ),
        Misconception(
            "counting one of the two matrix products",
            _misjudged_flops(lambda N, M, D, DV: 2 * N * M * D),
            "The scores are one matrix product; the weights are then multiplied with the values, "
            "which is another.",
        ),
        Misconception(
            "computing with values as wide as the keys",
            _misjudged_flops(lambda N, M, D, DV: 4 * N * M * D),
            "The second matrix product sums value vectors, DV numbers wide, and DV need not be D.",
        ),
        Misconception(
            "counting the masked half of the products as free",
            _misjudged_flops(lambda N, M, D, DV: 2 * (N * M - N * (N - 1) // 2) * (D + DV)),
            "The mask is laid over scores that have already been computed: a plain matrix "
            "product does not know about it. "
            "Skipping the hidden part is real work for a later chapter.",
        ),
        Misconception(
            "moving v and o at the width of q and k",
            _misjudged_bytes(v_like_k=True, o_like_q=True),
            "q and k share the width D because they meet in a dot product. v is only summed: "
            "which width has it, and what does "
            "that make the width of its sums?",
        ),
        Misconception(
            "moving v at the width of k",
            _misjudged_bytes(v_like_k=True),
            "Keys and values come in pairs, M of each, but they need not be equally wide. Look "
            "at the shape of v once more.",
        ),
        Misconception(
            "moving o at the width of q",
            _misjudged_bytes(o_like_q=True),
            "There is one output per query, but it is a sum of values, not of queries. How wide "
            "is a sum of values?",
        ),
        Misconception(
            "taking D for DV everywhere",
            lambda N, M, D, DV, itemsize: attention_cost(N, M, D, D, itemsize),
            "Values have a width of their own, DV, in the second matrix product and in the bytes "
            "of v and o.",
        ),
        Misconception(
            "carrying N·M numbers three times",
            _misjudged_bytes(matrix=3),
            "Scores and weights are two tensors of N·M numbers, and what one step writes, the "
            f"next one reads. {_STEP_BY_STEP}",
        ),
        Misconception(
            "carrying N·M numbers twice",
            _misjudged_bytes(matrix=2),
            "Is each table both written and read? And is there one table of N·M numbers, or "
            f"two? {_STEP_BY_STEP}",
        ),
        Misconception(
            "writing the score matrix and never reading it again",
            _misjudged_bytes(matrix=1),
            "What one step writes, the next one reads, and the weights are a second matrix of "
            f"the same size. {_STEP_BY_STEP}",
        ),
        Misconception(
            "counting what is read and not what is written",
            lambda N, M, D, DV, itemsize: (
                attention_cost(N, M, D, DV, itemsize)
                | {"bytes": itemsize * (N * D + M * D + 2 * N * M + M * DV)}
            ),
            f"Every step also writes its result to main memory, the last one too. {_STEP_BY_STEP}",
        ),
        Misconception(
            "leaving the score matrix out of the bytes",
            _misjudged_bytes(matrix=0),
            "Inputs and output are not all that moves: three separate steps hand the scores and "
            "the weights on "
            "through main memory.",
        ),
        Misconception(
            "counting the score matrix alone",
            _misjudged_bytes(vectors=0),
            "For long sequences the score matrix outweighs everything, but q, k and v are read "
            "and o is written too: "
            "with a single query that is most of the traffic.",
        ),
        Misconception(
            "counting elements, not bytes",
            lambda N, M, D, DV, itemsize: attention_cost(N, M, D, DV, 1),
            "Each element takes `itemsize` bytes.",
        ),
    ),
)

EXERCISES = (SCALED_SCORES, CAUSAL_WEIGHTS, LOG_SUM_EXP, ATTENTION_COST)
