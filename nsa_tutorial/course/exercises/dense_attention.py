"""Exercises of chapter 01: attention from an empty body, what it costs, the causal mask alone, a
test for leaks, and a softmax kernel with three bugs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact import dense_attention as da
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)
_FP32 = torch.finfo(torch.float32)


def _random(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- causal_weights --


def causal_weights(scores: Tensor) -> Tensor:
    """scores [N, M] of the last N of M positions -> weights [N, M], each row summing to 1 over what
    it may see."""
    N, M = scores.shape
    query_position = torch.arange(M - N, M)
    visible = torch.arange(M)[None, :] <= query_position[:, None]
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)


def _draw_weights(arguments: tuple, got: Tensor, expected: Tensor) -> Picture:
    (scores,) = arguments
    N, M = scores.shape
    height = 1.3 + 0.5 * N
    figure, axes = new_figure(max(5.0, 1.5 * M), height, columns=2)
    hidden = ~da.causal_mask(N, M).numpy()
    for axis, weights, name in ((axes[0, 0], got, "yours"), (axes[0, 1], expected, "expected")):
        values = weights.detach().double().numpy()
        dots = hidden & (np.nan_to_num(values, nan=1.0) == 0)
        grid(axis, values, largest=1.0, text=".2f", hidden=dots)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("key position", fontsize=9)
        sums = [f"sum {row:.2f}" for row in values.sum(1)]
        axis.set_yticks(range(N), sums, color=PALETTE["text"])
        axis.set_xticks(range(M))
    wrong = sum(not torch.allclose(g, e, atol=1e-5) for g, e in zip(got, expected, strict=True))
    return Picture(figure, f"{wrong} of {N} rows differ")


CAUSAL_WEIGHTS = TEXTS.exercise(
    "causal_weights",
    minutes=8,
    difficulty=2,
    solution=causal_weights,
    cases=(
        Case("three positions, every one of them a query",
             lambda: (torch.tensor([[1.0, 2, 0], [0.0, 1, 3], [2.0, 0, 1]]),)),
        Case("hidden scores far above the visible ones",
             lambda: (torch.tensor([[0.0, 1, _FP32.max], [1.0, 0, _FP32.max], [2.0, 0, 1]]),)),
        Case("three positions, every score the lowest that fp32 has",
             lambda: (torch.full((3, 3), _FP32.min),)),
        Case("one row with scores of -1000, one of 1000",
             lambda: (torch.tensor([[-1000.0, 0], [1000.0, 1000]]),)),
        Case("the last two of five positions are queries", lambda: (_random(5, 2, 5),)),
        Case("decoding: the last of four positions is the only query", lambda: (_random(6, 1, 4),)),
        Case("six positions, scores of about -20", lambda: (_random(7, 6, 6, spread=2.0) - 20.0,)),
    ),
    picture=_draw_weights,
    misconceptions=diffs(causal_weights, [
        ({'.masked_fill(~visible, float("-inf"))': "", "return torch": "return visible * torch"},
         "setting hidden weights to zero after the softmax",
         "The rows sum to less than 1. By then the softmax has divided by a sum that holds the "
         "hidden scores. Which step must not see them?"),
        ({'.masked_fill(~visible, float("-inf"))': "", "return torch": "w = visible * torch",
         ", dim=-1)": ", dim=-1)\n    return w / w.sum(-1, keepdim=True)"},
         "renormalising after the softmax",
         "That repairs ordinary rows. Where a hidden score is far above the visible ones, the "
         "softmax has rounded every visible weight to 0, and 0 / 0 is nan. Which step must not "
         "see the hidden scores at all?"),
        ({"return torch.softmax(scores.masked_fill(~visible, float(\"-inf\")), dim=-1)":
          "e = torch.exp(scores - scores.max()).masked_fill(~visible, 0)\n"
          "    return e / e.sum(-1, keepdim=True)"},
         "the largest of all scores subtracted, hidden ones too",
         "Where a hidden score, or one of another row, is far above a row's visible ones, all of "
         "the row's exponentials are rounded to 0, and 0 / 0 is nan. The largest of which scores "
         "belongs to a row?"),
        ({"return torch.softmax(": "s =",
          ".masked_fill(~visible, float(\"-inf\")), dim=-1)":
          ".masked_fill(~visible, float(\"-inf\"))\n"
          "    e = torch.exp(s - s.max())\n    return e / e.sum(-1, keepdim=True)"},
         "one maximum for all rows",
         "A row whose scores are all far below another row's loses all its exponentials. Along "
         "which dimension is the largest score taken?"),
        ("scores.masked_fill", "(scores / M**0.5).masked_fill",
         "scaling scores that are scaled already",
         "`scores` are scaled, the statement says. How often should a score be scaled?"),
        ("scores.masked_fill", "(0.5 * scores).masked_fill",
         "scaling scores that are scaled already"),
        ({"return torch.softmax(": "e = torch.exp(",
         ", dim=-1)": ")\n    return e / e.sum(-1, keepdim=True)"},
         "a softmax without its largest score subtracted",
         "The exponentials of scores far below zero are all 0, and 0 / 0 is nan. What did the "
         "chapter subtract from every score of a row?"),
        ({"return torch.softmax(": "e = visible * torch.exp(",
         '.masked_fill(~visible, float("-inf"))': "",
         ", dim=-1)": ")\n    return e / e.sum(-1, keepdim=True)"},
         "exponentials multiplied by the mask",
         "The exponential of a huge hidden score is inf, and inf times 0 is nan. Can you hide the "
         "keys before anything is exponentiated?"),
        ('float("-inf")', "-1e4", "a large negative number where -inf is meant",
         "It hides a key only while every visible score lies far above it. Here the visible ones "
         "are as low or lower, so hidden keys take weight: as with the dice. Which score is below "
         "every other?"),
        *(('float("-inf")', number, "a large negative number where -inf is meant")
          for number in ("-1.0", "-5.0", "-10.0", "torch.finfo(scores.dtype).min")),
        ('.masked_fill(~visible, float("-inf"))', " - 1e4 * ~visible",
         "adding a large negative number where -inf is meant",
         "A hidden score that stands far above the others stays above them when it is lowered by "
         "a finite amount. Which amount is enough for every score?"),
        ('.masked_fill(~visible, float("-inf"))', ' + ~visible * float("-inf")',
         "a mask multiplied with -inf",
         "0 times infinity is nan, so the keys that should stay as they are become nan. Which "
         "function writes where the mask is True, and touches nothing else?"),
        ("~visible", "scores * visible == 0", "taking a score of 0 for a hidden one",
         "A key may be visible and have the score 0; here such a key got no weight. How do you "
         "know who is hidden without looking at the scores?"),
        ('float("-inf")', "0.0", "giving hidden keys the score 0",
         "A score of 0 is a score like any other: exp(0) = 1, so hidden keys still take weight. "
         "Which score has the exponential exactly 0?"),
        ("torch.arange(M - N, M)", "torch.arange(N)", "lining up the queries with the first keys",
         "Query row 0 is not position 0 when N < M: the queries are the last N positions. At "
         "which position does row i stand?"),
        ("torch.arange(M - N, M)", "torch.arange(N) + N - M",
         "an offset of N − M where M − N is meant",
         "Your comparison is right, your offset is not. N − M is negative when N < M, so the "
         "first rows see nothing. At which position does row 0 stand?"),
        ({"[None, :]": "[:, None]", "[:, None]": "[None, :]"},
         "keys as rows and queries as columns",
         "Here the keys run down and the queries run across. Row = who asks, column = who is "
         "asked. Which of your two `arange`s becomes the column, by `[:, None]`?"),
        ("<=", "<", "hiding a query's own position",
         "A query may see itself. Without that, the very first row sees nothing. Either your "
         "comparison is too strict, or your offset is one too small. At which position does the "
         "last row stand?"),
        ("torch.arange(M - N, M)", "torch.arange(M - N, M) + 1",
         "showing each query the key after its own",
         "Each row gives weight to one position too many, the next word, which a language model "
         "is to predict. Your offset is one too large. At which position does the last row stand: "
         "M, or M - 1?"),
        ("~visible", "visible", "hiding the past and showing the future",
         "The mask is the wrong way round. `masked_fill(mask, value)` writes where the mask is "
         "True: is yours True for what may be seen, or for what may not?"),
        ("dim=-1", "dim=0", "normalising over the queries",
         "Here the columns sum to 1. Each query spreads its own weight over the keys. Along which "
         "dimension does its row run?"),
        ("[:, None]", "", "comparing a row of positions with a row",
         "Position 0 meets position 0 alone, 1 meets 1, and so on. Every query must meet every "
         "key: a column `[N, 1]` and a row `[1, M]`. Which of yours becomes the column, by `[:, "
         "None]`?"),
        ('.masked_fill(~visible, float("-inf"))', "", "showing every query every key",
         "Nothing is hidden: row 0 reads what comes after it. `masked_fill` returns a new tensor "
         "and leaves `scores` alone. Who keeps what it returns?"),
        ({"torch.softmax(": "(", ", dim=-1)": ")"},
         "the masked scores where the weights are asked for",
         "Hidden keys have the score -inf here. What turns scores into weights?"),
    ]),
)  # fmt: skip


# -- leaks --


def leaks(weigh: Callable) -> bool:
    """True if scores that a query must not see change its weights."""
    scores = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    hidden = ~da.causal_mask(3, 3)
    calm, loud = weigh(scores), weigh(scores.masked_fill(hidden, 1e6))
    return not torch.equal(calm, loud)


# Right in another way, without a leak: a query's own key and the one before.
_TWO_KEYS = Edited(causal_weights, {
    "torch.arange(M)[None, :] <= query_position[:, None]":
        "torch.ones(N, M).tril(M - N).triu(M - N - 1).bool()",
})  # fmt: skip
# Right in the first row; every later row sees more keys than it may.
_LATER_ROWS = Edited(causal_weights, {"torch.arange(M - N, M)": "2 * torch.arange(N) + M - N"})
_WRONG = {m.name: m.wrong for m in CAUSAL_WEIGHTS.misconceptions}

LEAKS = TEXTS.exercise(
    "leaks",
    minutes=10,
    difficulty=2,
    solution=leaks,
    cases=(
        Case("no mask at all", lambda: (_WRONG["showing every query every key"],)),
        Case("a right function", lambda: (causal_weights,)),
        Case("zeros written over the weights",
             lambda: (_WRONG["setting hidden weights to zero after the softmax"],)),
        Case("a mask that shows one key too many",
             lambda: (_WRONG["showing each query the key after its own"],)),
        Case("no leak: only a query's own key and the one before", lambda: (_TWO_KEYS,)),
        Case("zeros over the weights, the rest divided by its sum",
             lambda: (_WRONG["renormalising after the softmax"],)),
        Case("10,000 subtracted from hidden scores",
             lambda: (_WRONG["adding a large negative number where -inf is meant"],)),
        Case("a leak in the later rows alone: key <= 2 * row", lambda: (_LATER_ROWS,)),
    ),
    misconceptions=diffs(leaks, [
        ("not torch.equal(calm, loud)", "bool((calm[hidden] != 0).any())",
         "a look at the hidden weights alone",
         "Zeros can be written there at the end. By then the hidden scores have been in the sum "
         "that all other weights were divided by. Which weights must stay the same?"),
        ("not torch.equal(calm, loud)",
         "bool((calm[hidden] != 0).any() or (loud[hidden] != 0).any())",
         "a look at the hidden weights alone"),
        ("calm, loud =", "scores[hidden] = 1e6\n    calm, loud =", "two names for one table",
         "Both calls of `weigh` saw the same scores. `t = s` makes a second name, not a copy: "
         "what you write into `t` stands in `s`, too. Which method makes a copy?"),
        ({"calm, loud =": "scores[0, 1:] = 1e6\n    calm, loud =",
         "scores.masked_fill(hidden, 1e6)": "scores"}, "two names for one table"),
        ({"calm, loud =": "scores[hidden] = 200.0\n    calm, loud =", "1e6": "200.0"},
         "two names for one table"),
        ("not torch.equal(calm, loud)",
         "not all(torch.allclose(w.sum(-1), torch.ones(3)) for w in (calm, loud))",
         "a look at the sums of the rows",
         "Rows without a mask sum to 1, too. A leak is that one number depends on another. How do "
         "you find out whether it does?"),
        ("not torch.equal(calm, loud)", "not torch.allclose(calm.sum(-1), torch.ones(3))",
         "a look at the sums of the rows"),
        ("not torch.equal(calm, loud)",
         "not all(torch.allclose(w, causal_weights(scores)) for w in (calm, loud))",
         "a comparison with the right weights",
         "A function may hide more than yours does, and leak nothing. Compare `weigh` with "
         "itself. On which two tables of scores?"),
        ("not torch.equal(calm, loud)", "not torch.allclose(calm, causal_weights(scores))",
         "a comparison with the right weights"),
        ("1e6", "4.0", "a change too small to show",
         "You change hidden scores by a little. Some functions cope with that, and break where a "
         "hidden score stands far above the others. How large can a score be?"),
        ({"1e6": "4.0", "equal(calm, loud)": "equal(calm[0], loud[0])"},
         "a change too small to show"),
        ("1e6", "200.0", "a change that a large negative number still hides",
         "Your test finds the new sum, but not a large negative number: with 10,000 taken off, "
         "your hidden scores are hidden after all. How large can a score be?"),
        ({"1e6": "200.0", "equal(calm, loud)": "equal(calm[0], loud[0])"},
         "a change that a large negative number still hides"),
        ("equal(calm, loud)", "equal(calm[0], loud[0])", "a look at the first row alone",
         "A function may be right in its first row, and leak in the next. Which places does "
         "`da.causal_mask(3, 3)` hide?"),
        ("(hidden, ", "(torch.arange(9).view(3, 3) == 2, ", "a look at the first row alone"),
        ("not torch.equal(calm, loud)", "bool(((calm - loud).abs() > 1e-6).any())",
         "a comparison that nan slips through",
         "Where `weigh` gives nan, every `>` says False, so you see no difference. Which question "
         "about two tables does nan not pass?"),
        ("not torch.equal(calm, loud)", "bool(((calm - loud)[0].abs() > 1e-6).any())",
         "a comparison that nan slips through"),
        ("return not", "return", "yes and no exchanged",
         "Your test says True of right functions. True means that the future leaks."),
        ("not torch.equal(calm, loud)", "False", "a test that nothing fails",
         "It says False of every function, of one without a mask, too. Do your two tables of "
         "scores differ where the mask hides?"),
        ("not torch.equal(calm, loud)", "True", "a test that everything fails",
         "It says True of right functions, too. Do your two tables of scores differ where a query "
         "*may* look?"),
    ]),
)  # fmt: skip


# -- attention_cost --


def attention_cost(N: int, M: int, D: int, DV: int, itemsize: int) -> dict[str, int]:
    """{"flops": operations, "bytes": traffic} of one head of causal attention in three separate
    steps."""
    flops = 2 * N * M * D + 2 * N * M * DV  # a multiply and an add each: scores, then weighted sum
    scores_step = N * D + M * D + N * M  # read q and k, write the scores
    softmax_step = N * M + N * M  # read the scores, write the weights
    sum_step = N * M + M * DV + N * DV  # read the weights and v, write o
    moved = itemsize * (scores_step + softmax_step + sum_step)
    return {"flops": flops, "bytes": moved}


_STEP_BY_STEP = "Which reads and writes does each of the three steps have?"

ATTENTION_COST = TEXTS.exercise(
    "attention_cost",
    minutes=10,
    difficulty=2,
    solution=attention_cost,
    cases=(
        Case("N=2, M=3, D=4, DV=5, 4 bytes", lambda: (2, 3, 4, 5, 4)),
        Case("decoding: N=1, M=1000, D=64, DV=128, 2 bytes", lambda: (1, 1000, 64, 128, 2)),
        Case("N=M=4096, D=192, DV=128, 4 bytes", lambda: (4096, 4096, 192, 128, 4)),
    ),
    misconceptions=diffs(attention_cost, [
        ('{"flops": flops, "bytes": moved}', '{"flops": moved, "bytes": flops}',
         "the right two numbers, each under the other's name",
         "Operations come from multiplying and adding, bytes from carrying tensors. Which of your "
         "two sums holds which?"),
        ('{"flops": flops, "bytes": moved}', "(flops, moved)",
         "the right two numbers without their names",
         "The statement asks for a dictionary, so that nobody has to remember which number comes "
         "first. What are its two keys?"),
        ('{"flops": flops, "bytes": moved}', "moved", "the bytes without the operations",
         "The statement asks for a dictionary of two numbers. Which name do your bytes get? And "
         "which number goes beside them?"),
        ("2 * N * M * D + 2 * N * M * DV", "N * M * (D + DV)",
         "counting half of the operations",
         "Either a multiplication and its addition count as one, or the hidden half of the table "
         "counts as free. Each pair of numbers is multiplied *and* added, and a plain matrix "
         "product computes hidden pairs, too. Which of the two halves did you leave out?"),
        ("2 * N * M * D + 2 * N * M * DV", "N * M * D + 2 * N * M * DV",
         "counting half of the operations of one of the two products",
         "One matrix product has the factor of 2, and the scores' product has not. How many "
         "operations does each pair of numbers take in it?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * D + N * M * DV",
         "counting half of the operations of one of the two products",
         "One matrix product has the factor of 2, and the weighted sum has not. How many "
         "operations does each pair of numbers take in it?"),
        ("2 * N * M * D + 2 * N * M * DV", "4 * N * M * (D + DV)", "counting every operation twice",
         "Your number is twice too large. Per pair of numbers, there are one multiplication and "
         "one addition. Where does your other factor of 2 come from?"),
        ("2 * N * M * D + 2 * N * M * DV", "N * M * (2 * D - 1) + N * DV * (2 * M - 1)",
         "counting one addition fewer than multiplications",
         "Strictly true, and not how it is counted: a sum is taken to start at 0, so every "
         "multiplication has its addition. How many operations is that per pair of numbers?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * D",
         "counting one of the two matrix products",
         "The scores are one matrix product. What are the weights multiplied with?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * DV",
         "counting one of the two matrix products",
         "The weighted sum is one matrix product. Which product makes the scores?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * N * (D + DV)",
         "counting N keys where there are M",
         "Your operations depend on N alone. With how many keys does each of the N queries meet?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * D * DV", "multiplying the two widths",
         "The two matrix products come one after the other. Are their operations multiplied, or "
         "added?"),
        ("2 * N * M * D + 2 * N * M * DV", "4 * N * M * D",
         "computing with values as wide as the keys",
         "The second matrix product sums values. How wide is a value?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * (N * M - N * (N - 1) // 2) * (D + DV)",
         "counting the masked half of the products as free",
         "The mask is laid over scores that have already been computed. What does a plain matrix "
         "product know about it?"),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * (D + DV) + N * M",
         "counting the softmax's operations",
         "Softmax and scale are real work, but only a few operations per score beside 2·D, so "
         "they are left out here. Which two steps are matrix products?"),
        *(("2 * N * M * D + 2 * N * M * DV", f"2 * N * M * (D + DV) + {more} * N * M",
           "counting the softmax's operations") for more in (2, 3, 4, 5)),
        ("2 * N * M * D + 2 * N * M * DV", "2 * N * M * (D + DV) * itemsize",
         "multiplying operations by the bytes of a number",
         "A product of two numbers is one operation, however many bytes they take. Where does "
         "`itemsize` belong?"),
        ("M * DV + N * DV", "M * D + N * D", "moving v and o at the width of q and k",
         "q and k share the width D because they meet in a dot product. v is only summed: how "
         "wide is it, and how wide are its sums?"),
        ("M * DV +", "M * D +", "moving v at the width of k",
         "Keys and values come in pairs, M of each, but they need not be equally wide. Which "
         "shape has v?"),
        ("+ N * DV", "+ N * D", "moving o at the width of q",
         "There is one output per query, but it is a sum of values. How wide is a sum of values?"),
        ({"2 * N * M * D + 2 * N * M * DV": "4 * N * M * D", "M * DV + N * DV": "M * D + N * D"},
         "taking D for DV everywhere",
         "Values have a width of their own. Where do they enter the operations, and where the "
         "bytes?"),
        ("N * M + N * M", "N * M", "carrying N·M numbers three times",
         "Scores and weights are two tensors of N·M numbers, and what one step writes, the next "
         f"one reads. {_STEP_BY_STEP}"),
        ("N * M + N * M", "0", "carrying N·M numbers twice",
         "There are two tensors of N·M numbers, scores and weights, and each is written by one "
         f"step and read by the next. {_STEP_BY_STEP}"),
        ({"N * M + N * M": "0", "sum_step = N * M +": "sum_step ="},
         "writing the score matrix and never reading it again",
         "What one step writes, the next one reads, and the weights are a second matrix of the "
         f"same size. {_STEP_BY_STEP}"),
        ("N * M + N * M", "3 * N * M", "letting the mask move bytes",
         "In this count the mask costs nothing. Which four times does a table of N·M numbers "
         "cross main memory without it?"),
        ("N * M + N * M", "4 * N * M", "carrying N·M numbers six times",
         f"Your count has one step too many. Scale and mask cost nothing here. {_STEP_BY_STEP}"),
        ("N * M + N * M", "6 * N * M", "letting scale and mask be steps of their own",
         "PyTorch does move that much. Here there are three steps, and the mask costs nothing. "
         "Which four crossings of N·M numbers are left?"),
        ("(scores_step + softmax_step + sum_step)", "scores_step", "counting the first step alone",
         "That is the first of three. What do the softmax and the weighted "
         "sum read and write?"),
        ("(scores_step + softmax_step + sum_step)",
         "2 * (N * D + M * D + M * DV + N * DV + 2 * N * M)", "reading and writing every tensor",
         "Scores and weights are written by one step and read by the next. Does any step write "
         "`q`, or read the output?"),
        ({"+ N * M  # read q": " # read q", "N * M + N * M": "N * M", "+ N * DV": ""},
         "counting what is read and not what is written",
         f"Every step also writes its result to main memory, the last one too. {_STEP_BY_STEP}"),
        ({"N * D + M * D + N * M": "N * M", "N * M + N * M": "N * M", "N * M + M * DV + ": ""},
         "counting what is written and not what is read",
         f"Every step reads its inputs from main memory, too. {_STEP_BY_STEP}"),
        ("= N * D + M * D", "= M * D", "leaving out q",
         "Main memory holds `q`, too. Which step reads it, and which shape does it have?"),
        ("+ M * D +", "+", "leaving out k",
         "Main memory holds `k`, too. Which step reads it, and which shape does it have?"),
        ("M * DV + ", "", "leaving out v",
         "Main memory holds `v`, too. Which step reads it, and which shape does it have?"),
        ("+ N * DV", "", "leaving out the output",
         "Three steps, and each of them writes something. What does the last one write?"),
        ("M * DV +", "N * DV +", "as many values as queries",
         "Values come with the keys, one for each of the M positions. Which of v and o has N "
         "rows?"),
        ("+ N * DV", "+ M * DV", "as many outputs as keys",
         "Every query gets one output, however many keys it asks. Which of v and o has N rows?"),
        ({"+ N * M  # read q": " # read q", "N * M + N * M": "0",
         "sum_step = N * M +": "sum_step ="}, "leaving the score matrix out of the bytes",
         "Inputs and output are not all that moves. Through what do three separate steps hand on "
         "scores and weights?"),
        ({"N * D + M * D + ": "", "+ M * DV + N * DV": ""}, "counting the score matrix alone",
         "q, k and v are read and o is written, too. With a single query, how large are they "
         "beside a table of 1·M scores?"),
        ("itemsize * ", "", "counting elements, not bytes",
         "These are numbers of elements. How many bytes does each of them take?"),
        ("itemsize * ", "2 * ", "taking every number for two bytes",
         "That fits fp16 and bf16. In this case an element has four. Which argument says so?"),
    ]),
)  # fmt: skip


# -- attention --


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head: q [N, D], k [M, D], v [M, DV] -> o [N, DV]."""
    (N, D), M = q.shape, len(k)
    scores = q @ k.T / D**0.5  # [N, M]
    position = torch.arange(M - N, M, device=q.device)  # of each query
    hidden = torch.arange(M, device=q.device) > position[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    e = torch.exp(scores - scores.amax(1, keepdim=True))
    weights = e / e.sum(1, keepdim=True)
    return weights @ v


def _column(*numbers: float) -> Tensor:
    """Vectors of width 1, for which the scale is 1: with a query of 1, the scores themselves."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def _she() -> tuple[Tensor, Tensor, Tensor]:
    """The chapter's sentence up to "she", who asks."""
    k = torch.tensor([[2.0, 2, 0, 0], [0, 0, 0, 2], [2, 0, 2, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    v = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    return torch.tensor([[2.0, 2, 0, 0]]), k, v


def _attention_case(name: str, N: int, M: int, D: int, DV: int) -> Case:
    """Random numbers."""
    return Case(name, lambda: (_random(N, N, D), _random(M + 20, M, D), _random(DV + 40, M, DV)))


_LOW = "a large negative number where -inf is meant"
_HIDE = "    scores = scores.masked_fill(hidden, -torch.inf)\n"

ATTENTION = TEXTS.exercise(
    "attention",
    minutes=20,
    difficulty=3,
    solution=attention,
    tolerance=1e-4,  # exp(score - lse) errs by more than 1e-5 at scores of 1000
    forbidden=(
        ("nsa_tutorial", "the course's own function"),
        ("torch.softmax", "PyTorch's softmax"),
        ("torch.log_softmax", "PyTorch's softmax"),
        ("torch.scaled_dot_product_attention", "PyTorch's attention"),
    ),
    stages=(
        Stage("one key", (
            Case("one query, one key, a value of width 3", lambda: (
                torch.tensor([[1.0, 2]]), torch.tensor([[3.0, 1]]), torch.tensor([[5.0, 0, -2]]))),
        )),
        Stage("one query, many keys", (
            Case("the price of a lime: scores 1, 3 and 0", lambda: (
                _column(1), _column(1, 3, 0), _column(2, 1, 4))),
            _attention_case("one query, five keys of width 1, values of width 2", 1, 5, 1, 2),
        )),
        Stage("scale", (
            Case("“she” asks, D = 4", _she),
            _attention_case("one query, three keys, D = 9", 1, 3, 9, 2),
        )),
        Stage("large scores", (
            Case("scores 1000, 999 and 998", lambda: (
                _column(1), _column(1000, 999, 998), _column(2, 1, 4))),
            Case("scores -1000, -1001 and -1002", lambda: (
                _column(1), _column(-1000, -1001, -1002), _column(2, 1, 4))),
        )),
        Stage("hidden keys", (
            Case("three queries, three keys, width 1", lambda: (
                _column(1, 2, -1), _column(1, 0, 2), _column(3, 1, 8))),
            _attention_case("six queries, six keys, D = 4", 6, 6, 4, 3),
        )),
        Stage("fewer queries than keys", (
            Case("the last two of four positions ask", lambda: (
                _column(1, -1), _column(0, 2, 1, 1), _column(1, 2, 4, 8))),
            _attention_case("the last three of eight positions ask, D = 5", 3, 8, 5, 2),
        )),
        Stage("scores of any size", (
            Case("one row with scores of 1000, one of -1000", lambda: (
                _column(-1000, 1000), _column(1, 1), _column(3, 5))),
            Case("a hidden score far above the visible one", lambda: (
                _column(1, 1), _column(-100, _FP32.max), _column(3, 5))),
            Case("a visible score of -20 billion beside a hidden 0", lambda: (
                _column(1, 1), _column(-2e10, 0), _column(3, 5))),
            Case("a visible score as low as fp32 goes", lambda: (
                _column(1, 1), _column(_FP32.min, 0), _column(3, 5))),
        )),
    ),
    misconceptions=diffs(attention, [
        ("q @ k.T", "k @ q.T", "keys as rows and queries as columns",
         "`k @ q.T` is [M, N]: a row for each key. Row = who asks, column = who is asked. Which of "
         "the two stands before the `@`?"),
        ({"q @ k.T": "k @ q.T", _HIDE: ""}, "keys as rows and queries as columns"),
        ("D**0.5", "D", "dividing by D where √D is meant",
         "A mean over D divides by D, and so does √D taken twice. Divided by D, the spread of the "
         "scores fades towards 0. Which column of the table of spreads stays at 1?"),
        (" / D**0.5", "", "leaving the scores unscaled",
         "Scores of wide vectors are large only because the vectors are wide. By how much does "
         "the spread of a dot product grow with D?"),
        (" / D**0.5", " * D**0.5", "multiplying by √D instead of dividing",
         "Wider vectors already give larger scores. Which direction undoes the growth?"),
        ("D**0.5", "2", "one half where 1/√D is meant",
         "One half is right for D = 4, as in the sentence. Which D has `q` here? (`D ** 1/2` is "
         "(D ** 1) / 2: Python takes the power first.)"),
        (" / D**0.5", " / D ** 1 / 2", "one half where 1/√D is meant"),
        ("D**0.5", "M**0.5", "scaling by the number of keys",
         "The number of keys decides how many scores a query gets, not how large one score is. "
         "How many products are summed inside a single dot product?"),
        ("D**0.5", "v.shape[1] ** 0.5", "scaling by the width of the values",
         "A value is not in any dot product. Which width is?"),
        ("weights @ v", "weights", "the weights where the output is asked for",
         "The weights are right. What do they mix?"),
        ("e / e.sum(1, keepdim=True)", "scores", "scores in the place of weights",
         "A single key must get the weight 1, whatever its score. What makes weights of scores?"),
        ({" / D**0.5": "", "e / e.sum(1, keepdim=True)": "scores"},
         "scores in the place of weights"),
        ("weights @ v", "weights * v", "`*` where the weights meet the values",
         "`*` pairs numbers in equal places. Which operator weighs the rows of `v`, and adds them "
         "up for each query?"),
        ("e / e.sum(1, keepdim=True)", "scores / scores.sum(1, keepdim=True)",
         "scores divided by their sum",
         "They sum to 1, but a score may be 0 or negative, and a weight must grow with the score. "
         "What is done to each score before the sum?"),
        ("e / e.sum(1, keepdim=True)", "e", "exponentials that are not divided by their sum",
         "The weights of a query must sum to 1. What is missing after the exponentials?"),
        ("e / e.sum(1, keepdim=True)", "torch.ones_like(e) / M", "a plain average of the values",
         "Every key weighs the same here. Where do the scores come in?"),
        ("weights @ v", "v[scores.argmax(1)]", "picking the best key",
         "The value of the best key alone comes back: a hard lookup. A soft one mixes all visible "
         "values. With which weights?"),
        ("torch.exp(", "torch.exp2(", "powers of two where powers of e are meant",
         "`exp2(x)` is 2 to the power x. Which function takes powers of e?"),
        ({"amax(1": "amax(0", "e.sum(1": "e.sum(0"}, "normalising over the queries",
         "The columns sum to 1 here, and a lone query gives every key the weight 1. Each query "
         "spreads its own weight over the keys. Along which dimension does its row run?"),
        (" - scores.amax(1, keepdim=True)", "",
         "exponentials without the largest score subtracted",
         "exp(1000) is inf, and inf / inf is nan. exp(-1000) is 0, and 0 / 0 is nan, too. What did "
         "the chapter subtract from every score of a row?"),
        ({"scores.amax(1, keepdim=True)": "scores.amax(1)", "e.sum(1, keepdim=True)": "e.sum(1)"},
         "a sum or a maximum that has lost its axis",
         "One number a row came out as [N], and a table [N, M] takes that for a number of each "
         "*key*. What keeps it a column [N, 1]?"),
        ("e.sum(1, keepdim=True)", "e.sum(1)", "a sum or a maximum that has lost its axis"),
        ("scores.amax(1, keepdim=True)", "scores.amax(1)",
         "a sum or a maximum that has lost its axis"),
        ("e.sum(1, keepdim=True)", "e.sum()", "one sum for all rows",
         "All weights together sum to 1 here. Each query has a row of its own: what does *it* sum "
         "to?"),
        (_HIDE, "", "showing every query every key",
         "Row 0 reads what comes after it. Print your mask: is it a table [N, M]? (A column "
         "compared with a row makes one, a row with a row does not.) And who keeps what "
         "`masked_fill` returns?"),
        ("-torch.inf", "0.0", "giving hidden keys the score 0",
         "A score of 0 is a score like any other: exp(0) = 1, so hidden keys still take weight. "
         "Which score has the exponential exactly 0?"),
        ({_HIDE: "", "e / e.sum(1, keepdim=True)":
          "(e / e.sum(1, keepdim=True)).masked_fill(hidden, 0)"},
         "setting hidden weights to zero after the softmax",
         "The weights of a row sum to less than 1: they were divided by a sum that still holds the "
         "hidden keys. So did the model that foretold dice. Which step must not see them?"),
        ({_HIDE: "", "scores.amax(1, keepdim=True))":
          "scores.amax(1, keepdim=True)).masked_fill(hidden, 0)"},
         "the largest of all scores subtracted, hidden ones too",
         "Where a hidden score is far above the visible ones, all visible exponentials are rounded "
         "to 0, and 0 / 0 is nan. (Zeros over weights, divided by their new sum, do the same.) "
         "Which step must not see a hidden score?"),
        ("scores.amax(1, keepdim=True)", "scores.max()", "one maximum for all rows",
         "A row whose scores are all far below another row's loses all its exponentials: 0 / 0 is "
         "nan. Along which dimension is the largest score taken? And does it look at hidden ones?"),
        ({_HIDE: "", "scores.amax(1, keepdim=True))": "scores.max()).masked_fill(hidden, 0)"},
         "one maximum for all rows"),
        ({_HIDE: "", "torch.exp(scores - scores.amax(1, keepdim=True))":
          "torch.exp(scores - scores.amax(1, keepdim=True)) * ~hidden"},
         "the largest of all scores subtracted, hidden ones too"),
        ("-torch.inf", "-1e9", _LOW,
         "It hides a key only while every visible score lies far above it. Here a visible score is "
         "as low or lower, so a hidden key takes its weight: as with the dice and -5. Which score "
         "is below every other?"),
        *(("-torch.inf", number, _LOW) for number in
          ("-1e4", "-1e30", "-1.0", "-5.0", "-10.0", "torch.finfo(scores.dtype).min")),
        (_HIDE, "    scores = scores - 1e9 * hidden\n",
         "adding a large negative number where -inf is meant",
         "A hidden score that stands far above the others stays above them when it is lowered by "
         "a finite amount. Which amount is enough for every score?"),
        *((_HIDE, f"    scores = scores {number} * hidden\n",
           "adding a large negative number where -inf is meant")
          for number in ("- 5.0", "- 10.0", "- 1e4", "- 1e30", "+ torch.finfo(scores.dtype).min")),
        ("masked_fill(hidden", "masked_fill(scores.tril(M - N) == 0",
         "taking a score of 0 for a hidden one",
         "A key may be visible and have the score 0; here such a key got no weight. How do you "
         "know who is hidden without looking at the scores?"),
        (") > position", ") >= position", "a mask that leaves a query no key",
         "A query that sees nothing has only scores of -inf, and -inf - -inf is nan. A lone query "
         "sees itself. Is your comparison too strict, your offset one too small, or the mask the "
         "wrong way round? (`masked_fill` writes where it is True.) Or do you multiply by -inf? "
         "0 times infinity is nan."),
        ("masked_fill(hidden", "masked_fill(~hidden", "a mask that leaves a query no key"),
        (_HIDE, "    scores = scores + hidden * -torch.inf\n",
         "a mask that leaves a query no key"),
        ("M - N, M, d", "M - N + 1, M + 1, d", "showing each query the key after its own",
         "Each row gives weight to one position too many. Your offset is one too large, or your "
         "comparison is not strict enough. At which position does the last query stand: M, or "
         "M - 1?"),
        ({"M, device=q.device) > ": "M, device=q.device)[:, None] > ",
          "position[:, None]": "position"}, "keys as rows and queries as columns",
         "Here the keys run down and the queries run across. Row = who asks, column = who is "
         "asked. Which of your two `arange`s becomes the column, by `[:, None]`?"),
        ("M - N, M, d", "N, d", "lining up the queries with the first keys",
         "Query row 0 is not position 0 when N < M: the queries are the last N positions. At "
         "which position does row i stand?"),
        ("M - N, M, d", "N - M, N - M + N, d", "an offset of N − M where M − N is meant",
         "Your comparison is right, your offset is not. N − M is negative when N < M, so the "
         "first rows see nothing. At which position does row 0 stand?"),
    ]),
)  # fmt: skip


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


def _softmax_case(name: str, scores: Callable[[], Tensor]) -> Case:
    here = environment.detect()
    return Case(name, lambda: (scores(),), lambda: here.why_not("triton", here.device))


CAUSAL_SOFTMAX = TEXTS.exercise(
    "causal_softmax",
    minutes=8,
    difficulty=2,
    solution=causal_softmax,
    run=_run_causal_softmax,
    misconceptions=diffs(causal_softmax, [
        ("M - N + row", "row", "lining up the queries with the first keys",
         "Row 0 is not position 0 when N < M. At which position does the last row stand?"),
        ("mask=key < M", "mask=visible", "leaving the hidden places of W as they were",
         "`W` was -1 everywhere before the launch, and it still is where a key is hidden. A "
         "hidden key has the weight 0. Which places of the row does your store reach?"),
        ("s - tl.max(s, axis=0)", "s", "exponentials without the largest score subtracted",
         "exp(1000) is inf, and inf / inf is nan. What did the chapter subtract from a row "
         "first?"),
        ("M - N + row", "N - M + row", "an offset of N − M where M − N is meant",
         "N − M is negative when N < M, so the first rows see nothing. At which position does row "
         "0 stand?"),
        ("tl.exp(s - tl.max(s, axis=0))", "tl.exp(s) - tl.max(s, axis=0)",
         "the maximum taken off the exponential, not off the score",
         "After `tl.exp`, a subtraction no longer cancels in the quotient, and exp(1000) is inf "
         "by then. What has to stand inside the parentheses?"),
        ({"M - N + row": "row", "mask=key < M": "mask=visible", "s - tl.max(s, axis=0)": "s"},
         "the kernel as it was given",
         "All three bugs are still in it. Take two queries, five keys and a score of 1000, and "
         "walk through it by hand. Which line goes wrong first?"),
        ('float("-inf")', "0.0", "hidden keys that count as a score of 0",
         "A place that is not loaded becomes what `other` says, and exp(0) is 1. Which score has "
         "the exponential 0?"),
        ({"mask=visible": "mask=key < M",
         "e / tl.sum(e, axis=0)": "tl.where(visible, e / tl.sum(e, axis=0), 0.0)"},
         "zeros written over the weights at the end",
         "The hidden scores are still in the sum that you divide by. Which load must not see "
         "them?"),
        (", mask=key < M", "", "storing past the end of the row",
         "The tile has `BM` places and the row has `M`. Whose memory is behind it?"),
        ("S + row * M", "S + row * BM", "rows that are BM numbers apart",
         "Rows of `M` numbers lie one behind the other. How far is it from one row to the next?"),
        ("<=", "<", "hiding a query's own position",
         "A query may see itself. Is your comparison `<` or `<=`?"),
        ("M - N + row", "M - N + row + 1", "showing each query the key after its own",
         "The last of M positions is M - 1. What does your comparison give for the last row?"),
        ("key <= M - N + row", "(key <= M - N + row + 1) & (key < M)",
         "showing each query the key after its own"),
        ("key <= M - N + row", "key < M", "showing every query every key",
         "Nothing is hidden. Which keys may row 0 see?"),
        ("exp(", "exp2(", "powers of two where powers of e are meant",
         "`tl.exp2(x)` is 2 to the power x. Which function is `torch.exp`'s twin?"),
        ("e / tl.sum(e, axis=0)", "e", "exponentials that are not divided by their sum",
         "The rows do not sum to 1. What is missing after the exponentials?"),
    ]),
    cases=(
        _softmax_case("two queries, three keys", lambda: torch.tensor([[1.0, 2, 0], [0.5, 1, 3]])),
        _softmax_case("four queries, four keys", lambda: _random(11, 4, 4)),
        _softmax_case("two queries, three keys, scores of 1000", lambda: 1000 + _random(12, 2, 3)),
        _softmax_case("decoding: one query, eight keys", lambda: _random(13, 1, 8)),
    ),
)  # fmt: skip

EXERCISES = (ATTENTION, ATTENTION_COST, CAUSAL_WEIGHTS, LEAKS, CAUSAL_SOFTMAX)


# -- two mistakes at once --

DOUBLES = (
    Double("attention", names=(
        "setting hidden weights to zero after the softmax",
        "showing each query the key after its own")),
    Double("attention", names=(
        "a sum or a maximum that has lost its axis", "giving hidden keys the score 0")),
    Double("causal_weights", names=(
        "a large negative number where -inf is meant",
        "lining up the queries with the first keys")),
    Double("causal_weights", names=(
        "setting hidden weights to zero after the softmax", "hiding a query's own position")),
    Double("attention_cost", names=(
        "counting half of the operations", "carrying N·M numbers three times")),
    Double("attention_cost", names=(
        "computing with values as wide as the keys", "counting elements, not bytes")),
    Double("causal_softmax", names=(
        "leaving the hidden places of W as they were",
        "exponentials without the largest score subtracted")),
)  # fmt: skip


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
