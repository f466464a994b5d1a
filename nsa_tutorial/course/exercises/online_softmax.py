"""Exercises of chapter 03: one step of the streaming softmax, the end of a row, the loop around
both, the walk as a kernel, merging two results and many.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
INF, NAN = math.inf, math.nan


def _randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _tensors(*arguments: list | float) -> tuple:
    """The arguments of a case: lists become tensors in fp32."""
    return tuple(torch.tensor(a) if isinstance(a, list) else a for a in arguments)


# -- the builds: a step, the end of a row --

_LEAKS_INTO_LSE = (
    "Exponents and divisors need a stand-in, but here lse shows it: a row without keys claims a "
    "denominator. What does lse say of a denominator of 0?"
)
# What readers put in place of a sum that may be 0. A logarithm that takes it tells which.
_FLOORS = (1.0, 1e-6, 1e-8, 1e-9, 1e-10, 1e-12, 1e-30, 1e-20)

_FORBIDDEN = (
    ("torch.softmax", "PyTorch's softmax"),
    ("torch.log_softmax", "PyTorch's softmax"),
    ("torch.logsumexp", "PyTorch's log-sum-exp"),
    ("torch.logaddexp", "PyTorch's log-sum-exp"),
    ("torch.scaled_dot_product_attention", "PyTorch's attention"),
    ("nsa_tutorial", "the course's own function"),
)


def online_step(
    scores_max_prev: Tensor,
    running_sum: Tensor,
    acc_o: Tensor,
    acc_s: Tensor,
    v: Tensor,
    scale_log2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state `(scores_max, running_sum, acc_o)` after one more chunk `acc_s`, `v`."""
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))  # [R]
    shift = scores_max.masked_fill(scores_max == -torch.inf, 0.0)  # [R]
    scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)  # [R]
    p = torch.exp2((acc_s - shift[:, None]) * scale_log2)  # [R, BS]
    running_sum = running_sum * scores_scale + p.sum(1)  # [R]
    acc_o = acc_o * scores_scale[:, None] + p @ v  # [R, DV]
    return scores_max, running_sum, acc_o


def _after(seed: int, R: int, DV: int, top: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """A state as earlier chunks might have left it."""
    scores_max = torch.tensor(top, dtype=torch.float64)
    return scores_max, _randn(seed, R).abs() + 1, _randn(seed + 1, R, DV)


def _empty(R: int, DV: int) -> tuple[list, list, list]:
    """The state before the first key."""
    return [-INF] * R, [0.0] * R, [[0.0] * DV] * R


# Edits that several mistakes share.
_ALL_SHIFTED = "scores_max.masked_fill(scores_max == -torch.inf, 0.0)"
_NO_SHIFT = {_ALL_SHIFTED: "scores_max"}
_BOTH_SUMS = ("`running_sum` and `acc_o` are the same sum, without the values and with them. What "
              "happens to the one when the maximum rises, and what to the other?")  # fmt: skip
_CLEARED_NAN = "a NaN cleared by what it is, not by where it comes from"
_NO_LAST_AXIS = "a `[R]` tensor used where `[R, 1]` is needed"
_UPSIDE_DOWN = "a rescale factor upside down, or measured from the old maximum"
_NAN = "-inf minus -inf, which is NaN"
_EXP = "folding log2(e) in a second time, or taking exp where exp2 is meant"
_FROM_NOWHERE = "powers that are not measured from the new maximum"

ONLINE_STEP = TEXTS.exercise(
    "online_step",
    returns=("scores_max", "running_sum", "acc_o"),
    minutes=15, difficulty=3, solution=online_step,
    forbidden=_FORBIDDEN,
    stages=(
        Stage("one chunk", (
            Case("one row, its first chunk: scores 1 and 3",
                 lambda: _tensors(*_empty(1, 1), [[1.0, 3.0]], [[0.0], [16.0]], 1.0)),
            Case("one row, its first chunk, all scores negative", lambda: _tensors(
                *_empty(1, 2), [[-5.0, -3.0, -4.0]], [[1.0, 2.0], [3.0, 5.0], [6.0, 1.0]], 1.0)),
        )),
        Stage("two chunks", (
            Case("scores 1 and 3, then 2 and 5", lambda: _tensors(
                [3.0], [1.25], [[16.0]], [[2.0, 5.0]], [[0.0], [16.0]], 1.0)),
            Case("scores 1 and 3, then 2 and 4, values of width 2", lambda: _tensors(
                [3.0], [1.25], [[6.0, 2.0]], [[2.0, 4.0]], [[4.0, 0.0], [1.0, 8.0]], 1.0)),
        )),
        Stage("falling scores", (
            Case("scores 2 and 5, then 1 and 3",
                 lambda: _tensors([5.0], [1.125], [[16.0]], [[1.0, 3.0]], [[8.0], [4.0]], 1.0)),
            Case("a chunk 200 log2 units below the maximum, in fp32", lambda: _tensors(
                [200.0], [1.0], [[2.0, -1.0]], [[0.0, -1.0]], [[1.0, 1.0], [3.0, 1.0]], 1.0)),
        )),
        Stage("rows", (
            Case("two rows, the maximum of the second rises", lambda: _tensors(
                [5.0, 1.0], [2.0, 1.0], [[6.0, 2.0], [4.0, 8.0]],
                [[3.0, 4.0], [2.0, 3.0]], [[4.0, 0.0], [8.0, 16.0]], 1.0)),
            Case("three rows of five keys, the maximum of the first rises", lambda: (
                *_after(4, 3, 4, [0.1, 9.0, 20.0]), _randn(6, 3, 5), _randn(7, 5, 4), 1.0)),
        )),
        Stage("scale", (
            Case("scores 1 and 3, then 1 and 5, with scale_log2 = 0.5", lambda: _tensors(
                [3.0], [1.5], [[8.0]], [[1.0, 5.0]], [[0.0], [16.0]], 0.5)),
            Case("three rows, with the scale 0.5 in base two", lambda: (
                *_after(4, 3, 4, [0.1, 9.0, 20.0]), _randn(6, 3, 5), _randn(7, 5, 4),
                0.5 * LOG2_E)),
        )),
        Stage("masked keys", (
            Case("a row with a past, and a chunk without a visible key", lambda: _tensors(
                [3.0], [1.25], [[6.0]], [[-INF, -INF]], [[4.0], [8.0]], 1.0)),
            Case("three rows with a past, each with other keys masked", lambda: (
                *_after(8, 3, 2, [0.1, -7.0, 1.0]),
                _tensors([[-INF, 2.0, -INF], [-INF, -INF, -INF], [0.5, -INF, -1.0]])[0].double(),
                _randn(9, 3, 2), 0.7)),
        )),
        Stage("no key yet", (
            Case("one row that has seen no key, and sees none now",
                 lambda: _tensors(*_empty(1, 1), [[-INF, -INF]], [[4.0], [8.0]], 1.0)),
            Case("the first visible key, with the score -300", lambda: _tensors(
                *_empty(1, 1), [[-INF, -300.0]], [[4.0], [8.0]], 1.0)),
            Case("four rows of every kind, all scores far below zero", lambda: _tensors(
                [-INF, -300.0, -INF, -30_002.0], [0.0, 1.5, 0.0, 1.0],
                [[0.0], [3.0], [0.0], [2.0]],
                [[-INF] * 3, [-INF] * 3, [-305.0, -INF, -300.0], [-30_000.0, -INF, -30_001.0]],
                [[4.0], [8.0], [2.0]], 1.5)),
        )),
        Stage("NaN stays", (
            Case("a row that is NaN by somebody else's mistake, and stays it", lambda: _tensors(
                [NAN], [NAN], [[NAN]], [[1.0, 2.0]], [[4.0], [8.0]], 1.0)),
            Case("a NaN among the scores of the second of two rows", lambda: _tensors(
                [3.0, 3.0], [1.25, 1.25], [[6.0], [6.0]], [[2.0, 5.0], [NAN, 5.0]],
                [[4.0], [8.0]], 1.0)),
        )),
    ),
    misconceptions=diffs(online_step, [
        ({"running_sum * scores_scale": "running_sum", "acc_o * scores_scale[:, None]": "acc_o"},
         "a missing rescale",
         "The old sums are measured from the old maximum, the new terms from the new one. "
         "(Descending scores hide that: there the maximum never moves.) At which rate do you "
         "change old units into new ones?"),
        ("acc_o * scores_scale[:, None]", "acc_o",
         "rescaling the denominator but not the accumulator", _BOTH_SUMS),
        ("running_sum * scores_scale", "running_sum",
         "rescaling the accumulator but not the denominator", _BOTH_SUMS),
        ("(scores_max_prev - shift)", "(shift - scores_max_prev)",
         _UPSIDE_DOWN,
         "Before the first chunk the old maximum is -inf. Your factor becomes inf or NaN there, "
         "and times an empty sum that is NaN. The maximum can only rise, so old terms shrink. "
         "From which maximum is the factor's exponent measured, and with which sign?"),
        (_ALL_SHIFTED, "scores_max_prev", _UPSIDE_DOWN),
        ("torch.maximum(scores_max_prev, ", "(",
         "the chunk's own maximum in place of the running one",
         "On paper it comes out even, but the factor can now exceed 1. It overflows when a chunk "
         "lies far enough below what came before. Which maximum can never fall?"),
        ({"torch.exp2((scores_max_prev - shift) * scale_log2)": "torch.ones_like(scores_max)",
          "(acc_s - shift[:, None])": "acc_s"}, _FROM_NOWHERE,
         "You return a maximum, but your powers are measured from 0. They grow with the scores, "
         "and in fp32 a score of 128 log2 units is inf. What should every exponent be measured "
         "from?"),
        (_ALL_SHIFTED, "torch.zeros_like(scores_max)", _FROM_NOWHERE),
        ("scores_max == -torch.inf", "scores_max_prev == -torch.inf", _FROM_NOWHERE),
        (_ALL_SHIFTED, "torch.where(scores_max_prev == -torch.inf, 0.0, scores_max_prev)",
         _FROM_NOWHERE),
        ({"scores_max == -torch.inf": "scores_max_prev == -torch.inf",
          "return scores_max": "return shift"}, _FROM_NOWHERE),
        ("p.sum(1)", "acc_s.sum(1)", "summing the scores in place of their powers",
         "A denominator sums what the weights are made of. Is that the scores, or 2 to their "
         "distance from the maximum? Which of your tensors holds powers?"),
        ("p @ v", "acc_s @ v", "scores as weights of the values",
         "A value is weighed by the power of its score, not by the score. Which of your tensors "
         "holds powers?"),
        ({"p.sum(1)": "acc_s.sum(1)", "p @ v": "acc_s @ v"}, "sums of scores, without any power",
         "Both your sums hold scores. A term is 2 to the score's distance from the maximum. Before "
         "which lines must the powers be taken?"),
        ("return scores_max", "return scores_max_prev", "handing on the old maximum",
         "Both sums are measured from the new maximum, but you return the old one. Which one "
         "will the next chunk need?"),
        ({"scores_scale = torch.exp2": "scores_scale = torch.exp", "p = torch.exp2":
          "p = torch.exp"}, _EXP,
         "Your powers are those of e. Exponents here are in log2 units, where one unit more "
         "doubles a term, and `scale_log2` holds log2(e) already. Which base is left for the "
         "power?"),
        ("scores_scale = torch.exp2", "scores_scale = torch.exp", _EXP),
        ("p = torch.exp2", "p = torch.exp", _EXP),
        ("scores_max = torch",
         "acc_s, scale_log2 = acc_s * scale_log2, 1.0\n    scores_max = torch",
         "a maximum that is stored scaled",
         "The state keeps its maximum as a plain dot product, in and out, and yours is scaled. "
         "Where alone does the scale belong?"),
        ("scores_max = torch",
         "acc_s, scores_max_prev, scale_log2 = "
         "acc_s * scale_log2, scores_max_prev * scale_log2, 1.0\n    scores_max = torch",
         "a maximum that is stored scaled"),
        ({"shift) * scale_log2": "shift)", "shift[:, None]) * scale_log2": "shift[:, None])"},
         "exponents without scale_log2",
         "Scores and maximum are plain dot products. With `scale_log2 = 1` nobody notices. By "
         "what do you multiply a difference of two scores before it becomes an exponent?"),
        ("shift) * scale_log2", "shift)", "a rescale factor without scale_log2",
         "The old sums hold powers of scaled scores, and your factor is one of unscaled ones. "
         "When the maximum rises by 2, how many log2 units is that?"),
        ("shift[:, None]) * scale_log2", "shift[:, None])", "new powers without scale_log2",
         "The chunk's scores are plain dot products. What is missing before their distance from "
         "the maximum becomes an exponent?"),
        ("(acc_s - shift[:, None]) * scale_log2", "acc_s * scale_log2 - shift[:, None]",
         "a maximum subtracted without its scale",
         "The scores are scaled, the maximum that you subtract is not. Both are plain dot "
         "products. What must be done to both?"),
        ({"(acc_s - shift[:, None]) * scale_log2": "acc_s * scale_log2 - shift[:, None]",
          "shift) * scale_log2": "shift)"}, "a maximum subtracted without its scale"),
        ("(acc_s - shift[:, None])", "(acc_s - scores_max_prev[:, None])",
         "new powers measured from the old maximum",
         "Some of your new powers exceed 1, and in a row's first chunk they are inf. The old sums "
         "now stand at the new maximum. Where must the new terms stand?"),
        ("(acc_s - shift[:, None])", "(acc_s - acc_s.amax(1)[:, None])",
         "new powers measured from the chunk's own maximum",
         "The old sums stand at the running maximum, and your new powers at the chunk's own. "
         "From which maximum must both be measured before they are added?"),
        ("acc_s.amax(1)", "acc_s.amax(1).clamp(min=0)", "a maximum that is never below 0",
         "In a row of negative scores, the largest is negative, too. Measured from 0, scores "
         "near -300 would underflow. What is the maximum of a row before its first chunk?"),
        ("scores_max = torch",
         "scores_max_prev = scores_max_prev.masked_fill(scores_max_prev == -torch.inf, 0.0)\n    "
         "scores_max = torch", "a maximum that is never below 0"),
        ("scores_scale[:, None]", "scores_scale", _NO_LAST_AXIS,
         "PyTorch lines up last axes, so a `[R]` meets the columns of a `[R, DV]` or a `[R, "
         "BS]`, and not its rows. With one row it works by luck. How do you give a `[R]` a last "
         "axis of 1?"),
        ("shift[:, None]", "shift", _NO_LAST_AXIS),
        ({"scores_scale[:, None]": "scores_scale", "shift[:, None]": "shift"}, _NO_LAST_AXIS),
        ("p @ v", "(p * v).sum(0)", "`*` where the powers meet the values",
         "`*` pairs numbers in equal places. Each row of powers must weigh the rows of `v`, and "
         "sum them over the keys. Which operator does both?"),
        ("p @ v", "(p.T * v).sum(0)", "`*` where the powers meet the values"),
        ("p @ v", "p * v", "`*` where the powers meet the values"),
        ("torch.maximum", "max", "Python's `max` or `if` where each row needs its own answer",
         "`max` and `if` ask one question of a tensor as a whole, and rows may differ. Which "
         "functions of torch compare, or choose, row by row?"),
        ("p.sum(1)", "p.sum()", "one sum for all rows",
         "Each row has a denominator of its own. Along which axis do the powers of one row lie?"),
        ("acc_s.amax(1)", "acc_s.max()", "one maximum for all rows",
         "Each row has a maximum of its own. What is left of a row that lies far below another "
         "row's largest score?"),
        ("acc_s.amax(1)", "acc_s.amax(0)", "a reduction over the rows, not over the keys",
         "A tile is `[R, BS]`, and each row needs one number. Which axis, the first or the second, "
         "has to go?"),
        ("p.sum(1)", "p.sum(0)", "a reduction over the rows, not over the keys"),
        ({"acc_s.amax(1)": "acc_s.amax(0)", "p.sum(1)": "p.sum(0)"},
         "a reduction over the rows, not over the keys"),
        ("p.sum(1)", "p.mean(1)", "a mean of the powers where their sum is meant",
         "A denominator counts every key that was read. What does a mean forget?"),
        ({"p.sum(1)": "p.sum(1) * scores_scale", "p @ v": "p @ v * scores_scale[:, None]"},
         "rescaling the new terms, or clearing them",
         "The first chunk leaves your sums at 0. Are its powers multiplied by the rate, which is 0 "
         "there, or set to 0? The new terms are measured from the new maximum already. Which sums "
         "are still in the old unit?"),
        ("p.sum(1)", "p.sum(1) * scores_scale", "rescaling the new terms, or clearing them"),
        ("p @ v", "p @ v * scores_scale[:, None]", "rescaling the new terms, or clearing them"),
        ({"running_sum * scores_scale + p.sum(1)": "running_sum + p.sum(1) * scores_scale",
          "acc_o * scores_scale[:, None] + p @ v": "acc_o + p @ v * scores_scale[:, None]"},
         "rescaling the new terms, or clearing them"),
        (" * scale_log2)  # [R, BS]",
         " * scale_log2) * (scores_max_prev > -torch.inf)[:, None]  # [R, BS]",
         "rescaling the new terms, or clearing them"),
        ({"running_sum * scores_scale + ": "", "acc_o * scores_scale[:, None] + ": ""},
         "a step that loses the old sums",
         "What comes back is this chunk's sum alone. What have the chunks before it given?"),
        ("# [R, DV]", "\n    acc_o = acc_o / running_sum[:, None]", "a division inside the step",
         "`acc_o` is a numerator. It stays undivided until the row ends, and what comes in was "
         "not divided either. How often does a row divide?"),
        ({"running_sum = running_sum":
          "acc_o = acc_o * running_sum[:, None]\n    running_sum = running_sum",
          "# [R, DV]": "\n    acc_o = acc_o / running_sum[:, None]"},
         "a division inside the step"),
        *(("return scores_max, running_sum, acc_o", f"return {order}", "a state in another order",
         "The state goes in as maximum, sum, accumulator, and the next step expects it so. In "
         "which order do you return the three?")
         for order in ("acc_o, running_sum, scores_max", "acc_o, scores_max, running_sum",
         "running_sum, acc_o, scores_max", "scores_max, acc_o, running_sum",
         "running_sum, scores_max, acc_o")),
        # what a masked key does
        ("scores_max == -torch.inf", "acc_s.amax(1) == -torch.inf",
         "a stand-in chosen by the chunk's own maximum",
         "You ask whether the row sees a key in this chunk. A row with a past has a maximum, "
         "even where this chunk is masked, and its sums must stay: a factor of 1. Which maximum "
         "tells that there is nothing to measure from?"),
        ({"scores_max == -torch.inf": "acc_s.amax(1) == -torch.inf",
          "return scores_max": "return shift"}, "a stand-in chosen by the chunk's own maximum"),
        ("scores_scale = ", "scores_scale = (acc_s.amax(1) > -torch.inf) * ",
         "a factor that forgets the past when a chunk is fully masked",
         "A factor of 0 wipes out what the row has summed so far. A chunk that adds nothing "
         "should change nothing. Which factor does that?"),
        (_NO_SHIFT, _NAN,
         "While the maximum is -inf there is nothing to measure from. The factor and the powers "
         "both have an exponent that becomes NaN. Which finite number could stand in for the "
         "maximum there, in both exponents?"),
        ("scores_max_prev - shift", "scores_max_prev - scores_max", _NAN),
        ("acc_s - shift[:, None]", "acc_s - scores_max[:, None]", _NAN),
        ("0.0)", "-torch.inf)", _NAN),
        ("scores_max == -torch.inf", "scores_max == torch.inf", _NAN),
        (_NO_SHIFT | {f"{exponent} * scale_log2": f"({exponent} * scale_log2).nan_to_num()"
                      for exponent in ("(scores_max_prev - shift)", "(acc_s - shift[:, None])")},
         "an exponent of 0 in place of a NaN",
         "2 to the 0 is 1, so masked keys count in full. From which finite number can such a row "
         "be measured, so that its exponents are -inf and no NaN arises?"),
        ("scores_max == -torch.inf", "(scores_max == -torch.inf).any()",
         "a stand-in for all rows as soon as one of them is empty",
         "One row without a key makes you measure every row from 0, and the other rows have "
         "maxima of their own. How do you choose row by row?"),
        ("return scores_max", "return shift", "a stand-in that leaks into the state",
         "Your exponents need a finite number, but you also return it: the state must say -inf "
         "until a key is seen. Which of the two tensors is handed on, the maximum or its "
         "stand-in?"),
        ("return scores_max", "return scores_max.clamp(min=-1e30)",
         "a stand-in that leaks into the state"),
        ("scores_max = torch",
         "scores_max_prev, acc_s = scores_max_prev.clamp(min=-1e30), acc_s.clamp(min=-1e30)\n    "
         "scores_max = torch", "a large negative number in place of -inf",
         "In a row of nothing but -1e30, the masked keys are the largest scores. What is "
         "exp2(0)? Which score can no maximum lift?"),
        ("(scores_max_prev - shift)",
         "(scores_max_prev.masked_fill(scores_max_prev == -torch.inf, 0.0) - shift)",
         "a stand-in for the old maximum in the factor, too",
         "The old maximum may stay -inf: -inf minus a finite number is no NaN. But 2 to (0 + 300) "
         "is inf in fp32. What is inf times an empty sum?"),
        (_ALL_SHIFTED, "scores_max.clamp(min=0.0)",
         "a floor under the maximum, below which true scores may lie",
         "No NaN, and any finite number may stand in for -inf. But a floor also replaces true "
         "maxima that lie lower. When, and only when, is a stand-in needed?"),
        (_ALL_SHIFTED, "scores_max.clamp(min=-100.0)",
         "a floor under the maximum, below which true scores may lie"),
        (_ALL_SHIFTED, "scores_max.clamp(min=-1e4)",
         "a floor under the maximum, below which true scores may lie"),
        ("return scores_max, running_sum, acc_o",
         "return scores_max, running_sum.nan_to_num(), acc_o.nan_to_num()", _CLEARED_NAN,
         "This row was NaN before your step: somebody's mistake, and your 0 hides it. Only a row "
         "that has seen no key needs help. Which maximum tells?"),
        (_NO_SHIFT | {"return scores_max, running_sum, acc_o":
         "return scores_max, running_sum.nan_to_num(), acc_o.nan_to_num()"}, _CLEARED_NAN),
        ({" * scale_log2)  # [R, BS]": " * scale_log2).nan_to_num()",
          " * scale_log2)  # [R]": " * scale_log2).nan_to_num()"}, _CLEARED_NAN),
        (_NO_SHIFT | {" * scale_log2)  # [R, BS]": " * scale_log2).nan_to_num()",
          " * scale_log2)  # [R]": " * scale_log2).nan_to_num()"}, _CLEARED_NAN),
    ]),
)  # fmt: skip


def finish(
    scores_max: Tensor, running_sum: Tensor, acc_o: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output `[R, DV]` and the natural log-sum-exp `[R]`, from the state after all keys."""
    divisor = running_sum.masked_fill(running_sum == 0, 1.0)  # [R]
    o = acc_o / divisor[:, None]  # [R, DV], an empty row is 0 / 1
    lse = scores_max * scale + torch.log(running_sum)  # [R]
    return o, lse


FINISH = TEXTS.exercise(
    "finish",
    returns=("o", "lse"),
    minutes=5, difficulty=2, solution=finish,
    forbidden=_FORBIDDEN,
    stages=(
        Stage("one key", (
            Case("one row that saw one key, with the score 3",
                 lambda: _tensors([3.0], [1.0], [[2.0, 4.0]], 1.0)),
        )),
        Stage("many keys", (
            Case("one row, its largest score 5, its running sum 2",
                 lambda: _tensors([5.0], [2.0], [[6.0, 4.0]], 1.0)),
            Case("one row, its largest score -7, its running sum 4",
                 lambda: _tensors([-7.0], [4.0], [[6.0, 4.0, 1.0]], 1.0)),
            Case("one row, its largest score 200, its running sum 2",
                 lambda: _tensors([200.0], [2.0], [[6.0, 4.0]], 1.0)),
        )),
        Stage("scale", (
            Case("one row, its largest score 6, scale 0.5",
                 lambda: _tensors([6.0], [2.0], [[6.0, 4.0]], 0.5)),
        )),
        Stage("rows", (
            Case("two rows, values of width 2",
                 lambda: _tensors([5.0, -1.0], [2.0, 4.0], [[6.0, 4.0], [8.0, 4.0]], 0.5)),
            Case("three rows, values of width 4",
                 lambda: (*_after(4, 3, 4, [0.1, 9.0, -20.0]), 0.3)),
        )),
        Stage("a row without a key", (
            Case("one row that saw no key", lambda: _tensors([-INF], [0.0], [[0.0, 0.0]], 0.5)),
            Case("three rows, the second saw no key", lambda: _tensors(
                [2.0, -INF, -300.0], [2.0, 0.0, 1.0], [[6.0], [0.0], [5.0]], 0.5)),
        )),
        Stage("NaN stays", (
            Case("two rows, the second is NaN by somebody else's mistake", lambda: _tensors(
                [2.0, NAN], [2.0, NAN], [[6.0], [NAN]], 0.5)),
        )),
    ),
    misconceptions=diffs(finish, [
        ("scores_max * scale + ", "", "an lse that forgets the maximum",
         "Your sum is measured from the maximum, and an lse from nothing. By which factor are all "
         "of its terms too small, and what does a logarithm make of a factor?"),
        ("scores_max * scale + torch.log(running_sum)",
         "torch.log(torch.exp(scores_max * scale) * running_sum)", "a factor that overflows",
         "e to the 200 is inf in fp32, and so is its product. You need the logarithm of this "
         "factor alone. What is the logarithm of e to the x, and that of a product?"),
        (" + torch.log(running_sum)", "", "an lse that is the largest score alone",
         "With one key that is right. With several, the denominator is larger than its largest "
         "term. Where does the state keep by how much?"),
        ("acc_o / divisor[:, None]", "acc_o", "an output that is never divided",
         "`acc_o` is a numerator, and one key of power 1 hides that. By what is it divided at the "
         "end of the row?"),
        ("acc_o / divisor[:, None]", "acc_o * divisor[:, None]",
         "a multiplication by the denominator", "What undoes a sum of weights that is above 1?"),
        ("torch.log(", "torch.log2(", "an lse that adds natural units and log2 units",
         "One of your two terms is a natural logarithm, and the other is in log2 units. "
         "`running_sum` is a plain number, whatever base its powers had. Which logarithm is asked "
         "for?"),
        ("scores_max * scale + torch.log(running_sum)",
         "scores_max * scale * LOG2_E + torch.log2(running_sum)", "an lse left in log2 units",
         "Your lse is too large by log2(e), in all of it or in the maximum's part. A natural "
         "logarithm is asked for, and `scale` makes exponents of e. Which factor is one too many?"),
        ("scores_max * scale + torch.log(running_sum)",
         "scores_max * scale * LOG2_E + torch.log(running_sum)", "an lse left in log2 units"),
        ("scores_max * scale + torch.log(running_sum)",
         "torch.log(running_sum) - scores_max * scale", "an lse with the maximum subtracted",
         "Every term of `running_sum` was divided by e to the maximum. Which operation gives that "
         "back, and what is it in a logarithm?"),
        ("scores_max * scale + torch.log", "scores_max * scale - torch.log",
         "an lse with the sum's logarithm subtracted",
         "More keys make the denominator larger. Does your lse grow with `running_sum`?"),
        ("scores_max * scale", "scores_max", "an lse that forgets the scale on the maximum",
         "The lse is that of scaled scores, but the maximum is a plain dot product. What has to "
         "happen to it first?"),
        ("scores_max * scale + torch.log(running_sum)",
         "(scores_max + torch.log(running_sum)) * scale", "an lse scaled as a whole",
         "The terms in `running_sum` are powers of scaled scores already. Which of the two parts "
         "still lacks the scale?"),
        ("divisor[:, None]", "divisor", _NO_LAST_AXIS,
         "PyTorch lines up last axes, so a `[R]` meets the columns of a `[R, DV]`, and not its "
         "rows. With one row it works by luck. How do you give a `[R]` a last axis of 1?"),
        ("running_sum.masked_fill(running_sum == 0, 1.0)", "running_sum",
         "0 / 0, which is NaN",
         "A row that saw no key has a numerator of 0 and a denominator of 0, and its output should "
         "be 0. By which number could you divide such a row instead?"),
        ({"running_sum.masked_fill(running_sum == 0, 1.0)": "running_sum",
          "return o, lse": "return o.nan_to_num(), lse"}, _CLEARED_NAN,
         "A row may be NaN by a mistake elsewhere, and your 0 hides it. Only a row without a key "
         "needs help. Which number of its state tells that it saw none?"),
        ({"running_sum.masked_fill(running_sum == 0, 1.0)": "running_sum",
          "return o, lse": "return o.nan_to_num(), lse.nan_to_num(neginf=-torch.inf)"},
         _CLEARED_NAN),
        ("return o, lse", "return o.nan_to_num(), lse", _CLEARED_NAN),
        ("return o, lse", "return o, lse.nan_to_num(neginf=-torch.inf)", _CLEARED_NAN),
        ("return o, lse", "return o, lse.nan_to_num()", "a stand-in that leaks into lse",
         _LEAKS_INTO_LSE),
        ("scores_max * scale + torch.log(running_sum)",
         "scores_max.masked_fill(scores_max == -torch.inf, 0.0) * scale + torch.log(divisor)",
         "a stand-in that leaks into lse"),
        *(("scores_max * scale + torch.log(running_sum)",
          "scores_max.masked_fill(scores_max == -torch.inf, 0.0) * scale"
          f" + torch.log(running_sum.clamp(min={least}))",
          "a stand-in that leaks into lse") for least in _FLOORS if least < 1),
        ("return o, lse", "return lse, o", "results in another order",
         "The output first, then its lse: merging and the later chapters expect it so. In which "
         "order do you return the two?"),
    ]),
)  # fmt: skip


# -- the reader's own loop --


def one_pass(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`o` `[N, DV]` and `lse` `[N]` of queries that see all keys, `chunk` keys at a time."""
    N, D = q.shape
    scale, DV = D**-0.5, v.shape[1]
    scale_log2 = scale * math.log2(math.e)
    state = q.new_full((N,), -torch.inf), q.new_zeros(N), q.new_zeros(N, DV)
    for keys, values in zip(k.split(chunk), v.split(chunk), strict=True):
        acc_s = q @ keys.T  # [N, chunk], or fewer at the end
        state = online_step(*state, acc_s, values, scale_log2)
    return finish(*state, scale)


def _walk(seed: int, N: int, M: int, D: int, DV: int, chunk: int) -> tuple:
    return _randn(seed, N, D), _randn(seed + 1, M, D), _randn(seed + 2, M, DV), chunk


ONE_PASS = TEXTS.exercise(
    "one_pass",
    returns=("o", "lse"),
    minutes=6, difficulty=2, solution=one_pass,
    forbidden=_FORBIDDEN,
    misconceptions=diffs(one_pass, [
        ("-torch.inf", "0.0", "a walk whose maximum starts at a finite number",
         "A row may lie lower still, and underflows when it is measured from there. What is the "
         "largest of no scores?"),
        ("-torch.inf", "-100.0", "a walk whose maximum starts at a finite number"),
        ("scale * math.log2(math.e)", "scale", "the scale where scale_log2 belongs",
         "The step takes powers of 2, and the weights are powers of e. By what is the scale "
         "multiplied, once, before the walk?"),
        ("finish(*state, scale)", "finish(*state, scale * LOG2_E)",
         "scale_log2 where the scale belongs",
         "The output is right, and lse is not: `finish` takes the scale that makes exponents of e. "
         "Which of the two is that?"),
        ({"scale * math.log2(math.e)": "scale", "D**-0.5": "D**-0.5 * LOG2_E"},
         "scale_log2 where the scale belongs"),
        ("scale, DV = D**-0.5", "scale, DV = 1.0", "scores without a scale",
         "`scale` is `D ** -0.5` here, as in chapter 01. Where does your walk use it?"),
        ("acc_s = q @ keys.T  # [N, chunk], or fewer at the end",
         "acc_s = scale * q @ keys.T", "scores that are scaled twice",
         "The step scales differences of scores itself, and expects plain dot products. How many "
         "times does your walk use the scale? (Or is yours 1 / D, where chapter 01 has its root?)"),
        ("D**-0.5", "D**-1", "scores that are scaled twice"),
        ("online_step(*state, acc_s", "online_step(q.new_full((N,), -math.inf), q.new_zeros(N), "
         "q.new_zeros(N, DV), acc_s", "a state that starts anew in each chunk",
         "What comes out is the last chunk alone. What does each step begin from?"),
        ("zip(k.split(chunk), v.split(chunk), strict=True)",
         "list(zip(k.split(chunk), v.split(chunk), strict=True))[:max(1, len(k) // chunk)]",
         "a walk that leaves out the last, shorter chunk",
         "`M` need not be a multiple of `chunk`. What does your walk do with the keys left over?"),
        ("finish(*state, scale)", "state[2], finish(*state, scale)[1]",
         "an output that is never divided",
         "What you return is the numerator. Which of your functions divides it?"),
        ("finish(*state, scale)", "state", "a state in place of the result",
         "A walk ends with one division, and with lse. Which of your functions makes them?"),
        ("q.new_zeros(N, DV)", "q.new_zeros(N, D)", "an accumulator as wide as a key",
         "`acc_o` sums values. How wide is a value?"),
    ]),
    cases=(
        Case("one query, two keys, a chunk for each", lambda: _tensors(
            [[2.0]], [[0.5], [1.5]], [[8.0], [4.0]], 1)),
        Case("one query, two keys, both in one chunk", lambda: _tensors(
            [[2.0]], [[0.5], [1.5]], [[8.0], [4.0]], 2)),
        Case("three queries, seven keys, chunks of three", lambda: _walk(90, 3, 7, 4, 4, 3)),
        Case("values of another width than the keys", lambda: _walk(93, 2, 6, 4, 3, 2)),
        Case("one query, all scores near -400, in fp32", lambda: _tensors(
            [[-20.0]], [[20.0], [20.2]], [[8.0], [4.0]], 1)),
    ),
)  # fmt: skip


# -- the walk as a kernel --

_BS = 4


def row_lse() -> object:
    """The kernel that walks along a row of scores and stores its log-sum-exp."""

    @triton.jit
    def kernel(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr):
        row = tl.program_id(0)
        scores_max, running_sum = float("-inf"), 0.0
        for first in range(0, M, BS):
            key = first + tl.arange(0, BS)
            acc_s = tl.load(S + row * M + key, mask=key < M, other=float("-inf"))
            scores_max_prev = scores_max
            scores_max = tl.maximum(scores_max_prev, tl.max(acc_s, axis=0))
            scores_scale = tl.exp2((scores_max_prev - scores_max) * scale_log2)
            p = tl.exp2((acc_s - scores_max) * scale_log2)
            running_sum = running_sum * scores_scale + tl.sum(p, axis=0)
        tl.store(LSE + row, (scores_max * scale_log2 + tl.log2(running_sum)) * ln_2)

    return kernel


def _run_row_lse(solution: Callable, scores: Tensor, scale: float) -> Tensor:
    """Launch the kernel; behind the last row lie large scores."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("row_lse defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if "torch" in getattr(getattr(kernel, "fn", None), "__code__", row_lse.__code__).co_names:
        raise TypeError("the kernel calls torch, and inside a kernel only `tl` functions work")
    N, M = scores.shape
    memory, lse = roomy(scores, 300.0), roomy(torch.full((N,), -77.0), -77.0)
    with warnings.catch_warnings():  # the interpreter's, where a power is more than fp32 holds
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[(N,)](memory, lse, scale * LOG2_E, LN_2, M, BS=_BS)
    return lse.cpu()


def _rows(name: str, *rows: list[float], scale: float = 1.0) -> Case:
    here = environment.detect()
    shown = [[int(score) for score in row] for row in rows]
    factor = "ln 2" if scale == LN_2 else f"{scale:g}"
    return Case(
        f"{name}. S = {shown}, scale = {factor}, BS = {_BS}",
        lambda: (torch.tensor(rows, dtype=torch.float32), scale),
        lambda: here.why_not("triton", here.device),
    )


ROW_LSE = TEXTS.exercise(
    "row_lse",
    minutes=9, difficulty=2, solution=row_lse,
    run=_run_row_lse,
    tolerance=1e-4,
    misconceptions=diffs(row_lse, [
        ('other=float("-inf")', "other=0.0", "a masked place that counts as a score of 0",
         "In a row of negative scores, a score of 0 is the largest. Which score has the power 0, "
         "and never becomes the maximum?"),
        ('other=float("-inf")', "other=-1e4", "a masked place with a finite score",
         "In a row whose scores are lower still, that place holds the maximum. Which score has "
         "the power 0, however low the row lies?"),
        ('other=float("-inf")', "other=-1e3", "a masked place with a finite score"),
        ("mask=key < M", "mask=key <= M", "a mask that lets one key too many through",
         "A row has `M` keys, and the first has the number 0. Whose score has the number `M`?"),
        ("mask=key < M", "mask=key < M - 1", "a mask that leaves out the last key",
         "A row has `M` keys, and the first has the number 0. Which number has the last one?"),
        ("mask=key < M", "mask=key < BS", "a mask that ends with the first chunk",
         "`key` counts through the whole row, and your mask stops after `BS` keys. Where does "
         "the row end?"),
        ("mask=key < M", "mask=row * M + key < M", "a mask that adds where the row begins",
         "Only the first row finds its scores. The mask compares with `M`, the length of one "
         "row. From where does `key` count already?"),
        (', mask=key < M, other=float("-inf")', "", "a load past the end of the row",
         "The last chunk of a row may be shorter than `BS`. Whose scores lie behind it?"),
        ("running_sum * scores_scale", "running_sum", "a missing rescale",
         "The old sum is measured from the old maximum, the new powers from the new one. At "
         "which rate do you change the old unit into the new one?"),
        ("running_sum * scores_scale + ", "", "a sum that keeps the last chunk alone",
         "What is stored is the last chunk's sum. What have the chunks before it given?"),
        ("tl.maximum(scores_max_prev, tl.max(acc_s, axis=0))", "tl.max(acc_s, axis=0)",
         "the chunk's own maximum in place of the running one",
         "Right on most rows. But 128 log2 units below the first chunk, the factor is inf. Which "
         "maximum can never fall?"),
        ("(scores_max_prev - scores_max)", "(scores_max - scores_max_prev)",
         "a rescale factor upside down",
         "Your factor is above 1, and in the first chunk it is inf. The maximum can only rise. "
         "What must old terms do then?"),
        ("(scores_max_prev - scores_max) * scale_log2)", "(scores_max_prev - scores_max))",
         "a rescale factor without scale_log2",
         "The old sum holds powers of scaled scores, and your factor is one of unscaled ones. "
         "When the maximum rises by 2, how many log2 units is that?"),
        ({"(scores_max_prev - scores_max) * scale_log2)": "(scores_max_prev - scores_max))",
         "(acc_s - scores_max) * scale_log2)": "(acc_s - scores_max))"},
         "exponents without scale_log2",
         "The scores in `S` are plain dot products. What is missing before a difference of two "
         "of them becomes an exponent?"),
        ({"scores_scale = tl.exp2": "scores_scale = tl.exp", "p = tl.exp2": "p = tl.exp"},
         "taking exp where exp2 is meant",
         "Your powers are too small. `scale_log2` holds log2(e) already. Which base is left?"),
        (") * ln_2)", "))", "an lse left in log2 units",
         "Your lse is too large by one factor everywhere, and a natural logarithm is asked for. "
         "How many natural units is one log2 unit?"),
        ("(scores_max * scale_log2 + tl.log2(running_sum)) * ln_2",
         "scores_max * scale_log2 + tl.log2(running_sum) * ln_2",
         "an lse that adds natural units and log2 units",
         "One of the two terms of your lse is a natural logarithm, and the other is in log2 "
         "units. Which is which?"),
        ("tl.log2(running_sum)", "tl.log(running_sum)",
         "an lse that adds natural units and log2 units"),
        ("(scores_max * scale_log2 + tl.log2(running_sum)) * ln_2",
         "scores_max * scale_log2 * ln_2 + tl.log2(running_sum)",
         "an lse that adds natural units and log2 units"),
        ("scores_max * scale_log2 + ", "", "an lse that forgets the maximum",
         "Your sum is measured from the maximum. The lse is that of a sum with nothing "
         "subtracted. What has to come back?"),
        ("scores_max * scale_log2", "scores_max", "an lse that forgets the scale on the maximum",
         "The lse is that of scaled scores, but the maximum is a plain dot product. What has to "
         "happen to it first?"),
        ("(scores_max * scale_log2 + tl.log2(running_sum)) * ln_2",
         "scores_max + tl.log2(running_sum) * ln_2",
         "an lse that forgets the scale on the maximum"),
        ("S + row * M", "S", "reading the same row in every program",
         "All programs run the same lines. What tells one row from the next?"),
        ("S + row * M", "S + row * BS", "rows that begin BS places apart",
         "A chunk has `BS` scores. How many has a row?"),
    ], pairs=False),
    cases=(
        _rows("one row, one chunk", [1.0, 3.0, 2.0, 5.0], scale=0.5),
        _rows("one row, the second chunk higher", [1, 3, 2, 4, 2, 8, 1, 5], scale=0.5),
        _rows("three rows, each with its second chunk lower", [5, 2, 1, 3, 1, 2, 3, 2],
              [9, 2, 1, 3, 7, 4, 1, 2], [0, -1, -2, -3, -4, -1, -2, -5], scale=0.5),
        _rows("rows of six negative scores, so that the last chunk is short",
              [-9, -8, -7, -6, -5, -4], [-3, -4, -2, -3, -4, -6],
              [-20_003, -20_004, -20_002, -20_003, -20_001, -20_002], scale=0.5),
        _rows("one row, its second chunk 200 log2 units lower",
              [200, 199, 198, 197, 0, -1, -2, -3], scale=LN_2),
    ),
)  # fmt: skip


# -- merging two --


def merge_partials(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both sets of keys from the results over each."""
    lse_max = torch.maximum(lse1, lse2)  # [N]
    shift = lse_max.masked_fill(lse_max == -torch.inf, 0.0)  # [N], 0 for an empty row
    w1, w2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)  # [N], denominators, up to a factor
    total = w1 + w2
    divisor = total.masked_fill(total == 0, 1.0)
    o = (o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]  # [N, DV]
    return o, shift + torch.log(total)


def _between(arguments: tuple, got: object, expected: object) -> Picture:
    """The first rows and columns of a merge as points between the two outputs they come from."""
    (o1, lse1, o2, lse2), o = arguments, got[0]
    G, DV = o1.shape
    apart = int((~torch.isclose(o, expected[0], equal_nan=True)).sum())
    if not apart:
        raise ValueError("the outputs are right, only lse is not: there is nothing to draw")
    places = [(i, j) for i in range(G) for j in range(DV)][:6]
    figure, axes = new_figure(8.0, 1.3 + 0.4 * len(places))
    axis = axes[0, 0]
    for y, (i, j) in enumerate(places):
        share = torch.sigmoid(lse2[i] - lse1[i]).item()  # part 2's share of the denominator
        ends = o1[i, j].item(), o2[i, j].item()
        axis.plot(ends, [y, y], color=PALETTE["masked"], linewidth=2, zorder=1)
        axis.scatter(ends[:1], [y], s=60, color=PALETTE["key"], label="o1" if y == 0 else None)
        axis.scatter(ends[1:], [y], s=60, color=PALETTE["value"], label="o2" if y == 0 else None)
        axis.scatter(
            [expected[0][i, j].item()], [y], s=110, marker="|", linewidth=3,
            color=PALETTE["text"], label="expected" if y == 0 else None,
        )  # fmt: skip
        if math.isfinite(o[i, j].item()):
            label = None if axis.get_legend_handles_labels()[1].count("yours") else "yours"
            axis.scatter(
                [o[i, j].item()], [y], s=60, marker="x", color=PALETTE["query"], label=label
            )
        told = "both parts empty" if math.isnan(share) else f"part 2 holds {share:.0%}"
        axis.text(
            1.01, y, told, transform=axis.get_yaxis_transform(), fontsize=8, va="center",
            color=PALETTE["text"],
        )  # fmt: skip
    axis.set_yticks(range(len(places)), [f"o[{i}, {j}]" for i, j in places])
    axis.set_ylim(len(places) - 0.5, -0.5)
    axis.set_xlabel("value of the output", fontsize=9)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    bad = int((~torch.isfinite(o)).sum())
    lost = f", {bad} of them not finite" if bad else ""
    wrong = ~torch.isclose(o, expected[0], equal_nan=True).all(1)
    where = _belongs(*(part[wrong] for part in (o1, lse1, o2, lse2)))
    return Picture(figure, f"Wrong numbers in your o: {apart} of {o.numel()}{lost}. {where}")


def _belongs(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> str:
    """Where the outputs lie that join these two halves of some rows."""
    if (o1 + o2).isnan().any():
        return "A half that saw keys wrote NaN, so NaN belongs there."
    if ((lse1 == -INF) & (lse2 == -INF)).all():
        return "Both halves are empty: 0 belongs there."
    if torch.equal(lse1, lse2):
        return "Each belongs midway between o1 and o2: both halves have the same lse."
    return "Each belongs between o1 and o2, nearer to the half with the larger lse."


def _partial(seed: int, N: int, M: int, DV: int) -> tuple[Tensor, Tensor]:
    """Output and lse of `N` rows over `M` random keys."""
    scores = 2 * _randn(seed, N, M)
    return torch.softmax(scores, 1) @ _randn(seed + 1, M, DV), torch.logsumexp(scores, 1)


def _with_empty(parts: tuple[Tensor, Tensor], rows: list[int]) -> tuple[Tensor, Tensor]:
    o, lse = parts
    o[rows], lse[rows] = 0.0, -INF
    return o, lse


# Edits that several mistakes share.
_NO_STAND_IN = {".masked_fill(lse_max == -torch.inf, 0.0)": ""}
_BARE_TOTAL = {".masked_fill(total == 0, 1.0)": ""}
_UNSHIFTED = {"lse_max.masked_fill(lse_max == -torch.inf, 0.0)": "torch.zeros_like(lse_max)"}
_CLEARED = {"return o,": "return o.nan_to_num(),"}

MERGE_PARTIALS = TEXTS.exercise(
    "merge_partials",
    returns=("o", "lse"),
    minutes=6, difficulty=2, solution=merge_partials,
    picture=_between,
    misconceptions=diffs(merge_partials, [
        ("(o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]", "(o1 + o2) / 2",
         "a plain average of the two outputs",
         "Each half was divided by its own denominator, and the halves count by those. Where can "
         "you find a half's denominator?"),
        ("(o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]", "o1 + o2",
         "adding two outputs that were already divided",
         "`o1` and `o2` are both averages of values, so their sum is up to twice too large. What "
         "undoes each division?"),
        ("(o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]",
         "(o1 * lse1[:, None] + o2 * lse2[:, None]) / (lse1 + lse2)[:, None]",
         "using lse itself as the weight",
         "lse may be negative, or zero, and a weight may not. lse is the logarithm of a "
         "denominator. How do you get the denominator itself?"),
        (_BARE_TOTAL | _UNSHIFTED,
         "`exp` taken of each lse as it comes, with no guard for empty rows",
         "On paper it is right. In numbers, exp(800) is inf. And a row that is empty on both "
         "sides becomes NaN, by -inf minus -inf or by 0 / 0. Which number can you subtract from "
         "both lse before you take powers?"),
        (_BARE_TOTAL | _CLEARED | _UNSHIFTED,
         "`exp` taken of each lse as it comes, with no guard for empty rows"),
        ({"(o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]":
          "o1 * torch.exp(lse1 - divisor.log())[:, None]"
          " + o2 * torch.exp(lse2 - divisor.log())[:, None]"} | _BARE_TOTAL | _UNSHIFTED,
         "`exp` taken of each lse as it comes, with no guard for empty rows"),
        (".masked_fill(lse_max == -torch.inf, 0.0)", "",
         "a NaN for rows that are empty on both sides",
         "Such a row gives -inf minus -inf, and 0 / 0 if you divide by its sum. Both are NaN. "
         "Which number could stand in for the -inf, and for a sum of 0?"),
        (".masked_fill(total == 0, 1.0)", "", "a NaN for rows that are empty on both sides"),
        ("return o,", "return o.nan_to_num(),",
         "a NaN cleared by what it is, not by where it comes from",
         "A half that saw keys wrote a NaN: somebody's mistake, and your 0 hides it. In an empty "
         "row, let no NaN arise. Which number could its exponents be measured from?"),
        ("o1 * w1[:, None] + o2 * w2[:, None]",
         "o1.nan_to_num() * w1[:, None] + o2.nan_to_num() * w2[:, None]",
         "a NaN cleared by what it is, not by where it comes from"),
        *(("torch.log(total)", f"torch.log(total.clamp(min={least}))",
         "a stand-in that leaks into lse", _LEAKS_INTO_LSE) for least in _FLOORS),
        ("lse_max.masked_fill(lse_max == -torch.inf, 0.0)", "torch.zeros_like(lse_max)",
         "taking exp of an lse as it comes",
         "exp(800) is inf, even in fp64. Only the ratio of the two denominators matters. What "
         "can you subtract from both logarithms first?"),
        ({"(o1 * w1[:, None] + o2 * w2[:, None]) / divisor[:, None]":
          "o1 * torch.exp(lse1 - divisor.log())[:, None]"
          " + o2 * torch.exp(lse2 - divisor.log())[:, None]"} | _UNSHIFTED,
         "taking exp of an lse as it comes"),
        ({"w1[:, None]": "w1", "w2[:, None]": "w2", "divisor[:, None]": "divisor"},
         "a `[N]` tensor used where `[N, 1]` is needed",
         "PyTorch lines up last axes, so a weight `[N]` meets the columns of an output `[N, "
         "DV]`, and not its rows. With one row it works by luck. How do you give a `[N]` a last "
         "axis of 1?"),
        ({"w1[:, None]": "w1", "w2[:, None]": "w2", "divisor[:, None]": "total"},
         "a `[N]` tensor used where `[N, 1]` is needed"),
        ("o1 * w1[:, None] + o2 * w2[:, None]", "o1 * w2[:, None] + o2 * w1[:, None]",
         "an exchange of the two weights",
         "The half with the smaller denominator counts more here. Which lse belongs to `o1`?"),
        ({"torch.exp(lse1": "torch.exp2(lse1", "torch.exp(lse2": "torch.exp2(lse2"},
         "taking powers of two of a natural logarithm",
         "lse is a natural logarithm. Which function undoes that one?"),
        ({"torch.exp(lse1": "torch.exp2(lse1", "torch.exp(lse2": "torch.exp2(lse2",
         "torch.log": "torch.log2"}, "taking powers of two of a natural logarithm"),
        (" / divisor[:, None]", "", "a weighted sum that was not divided",
         "Your two weights are denominators, measured from the larger one. What do they sum to, "
         "and what should weights sum to?"),
        ("shift + ", "", "an lse that forgets what was subtracted",
         "The lse is that of a sum with nothing subtracted. What did you take out before the "
         "powers?"),
        ("shift + torch.log(total)", "lse_max", "the larger lse in place of the joint one",
         "Two denominators add up, so the joint lse is larger than either, by up to ln 2. What "
         "is the logarithm of their sum?"),
        ("shift + torch.log(total)", "lse1 + lse2", "adding the two log-sum-exps",
         "Adding logarithms multiplies the denominators. What should happen to the denominators "
         "instead?"),
        ("shift + torch.log(total)", "(lse1 + lse2) / 2", "averaging the two log-sum-exps",
         "The joint row has more keys than either half, so its denominator is larger than both. "
         "How do you add what two logarithms stand for?"),
    ]),
    cases=(
        Case("one row, denominators 2 and 6",
             lambda: _tensors([[0.0, 8.0]], [math.log(2)], [[4.0, 0.0]], [math.log(6)])),
        Case("two rows, each with its own denominators", lambda: _tensors(
            [[8.0, 8.0], [4.0, 4.0]], [math.log(3), 0.0],
            [[0.0, 4.0], [0.0, 8.0]], [0.0, math.log(3)])),
        # in fp64: in fp32 a joint lse near 800 is rounded so far that right shares look wrong
        Case("one row, log-sum-exps of 800",
             lambda: tuple(x.double() for x in _tensors([[2.0]], [800.0], [[6.0]], [800.0]))),
        Case("one row, empty on both sides", lambda: _tensors([[0.0]], [-INF], [[0.0]], [-INF])),
        Case("three rows, 5 and 9 keys", lambda: (*_partial(10, 3, 5, 2), *_partial(20, 3, 9, 2))),
        Case("rows empty on the left, on the right and on both sides", lambda: (
            *_with_empty(_partial(30, 4, 5, 2), [0, 2]),
            *_with_empty(_partial(40, 4, 3, 2), [1, 2]))),
        Case("one row, the second half saw keys and wrote a NaN",
             lambda: _tensors([[5.0]], [1.0], [[NAN]], [1.0])),
    ),
)  # fmt: skip


# -- merging many --


def merge_many(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over all P sets of keys from the results over each."""
    lse_max = lse.amax(0)  # [N]
    shift = lse_max.masked_fill(lse_max == -torch.inf, 0.0)  # [N]
    w = torch.exp(lse - shift)  # [P, N], denominators, up to a factor per row
    total = w.sum(0)  # [N]
    divisor = total.masked_fill(total == 0, 1.0)
    o = o.masked_fill((lse == -torch.inf)[..., None], 0.0)  # [P, N, DV], as 0 · NaN would be NaN
    o = (w[..., None] * o).sum(0) / divisor[:, None]  # [N, DV]
    return o, shift + torch.log(total)


def _parts(
    seed: int, P: int, N: int, DV: int, lift: tuple[float, ...] = (0.0,)
) -> tuple[Tensor, Tensor]:
    """`P` partial results of `N` rows, part `i` over `3 + i` random keys; `lift` is added to the
    rows' scores in turn."""
    parts = [_partial(seed + 2 * i, N, 3 + i, DV) for i in range(P)]
    heights = torch.tensor([lift[n % len(lift)] for n in range(N)], dtype=torch.float64)
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]) + heights


def _unwritten(
    parts: tuple[Tensor, Tensor], places: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """`parts` with nothing seen at `places` (part, row): lse `-inf`, and as output what the memory
    held, NaN and inf in turn."""
    o, lse = parts
    for i, (part, row) in enumerate(places):
        o[part, row], lse[part, row] = (NAN, INF)[i % 2], -INF
    return o, lse


_UNWRITTEN = {".masked_fill((lse == -torch.inf)[..., None], 0.0)": ""}
_JOINED = {"shift + torch.log(total)": "torch.logsumexp(lse, 0)"}

MERGE_MANY = TEXTS.exercise(
    "merge_many",
    returns=("o", "lse"),
    minutes=10, difficulty=3, solution=merge_many,
    misconceptions=diffs(merge_many, [
        (".masked_fill((lse == -torch.inf)[..., None], 0.0)", "", "a weight of 0 that meets a NaN",
         "A part that saw no key has weight 0, but 0 times NaN is NaN. No weight can hide a "
         "number that was never written. What could stand in its place?"),
        (_UNWRITTEN | _CLEARED, "a NaN set to 0 after the sum",
         "One part that was never written makes the whole sum NaN. Setting that to 0 throws away "
         "what the other parts have seen. When must it be cleared?"),
        ("return o,", "return o.nan_to_num(),",
         "a NaN cleared by what it is, not by where it comes from",
         "A part that saw keys wrote a NaN: somebody's mistake, and your 0 hides it. Only an "
         "output that was never written may be replaced. Which of the inputs tells?"),
        (".masked_fill((lse == -torch.inf)[..., None], 0.0)", ".nan_to_num()",
         "a NaN cleared by what it is, not by where it comes from"),
        ("lse == -torch.inf)[", "w == 0)[", "a part left out where its weight is 0",
         "A part far below the largest saw keys, and its weight still rounds to 0. It wrote a "
         "NaN, and you leave it out. Which of the inputs tells that a part saw no key?"),
        ("(lse == -torch.inf)[..., None]", "o.isnan()", "a guard against NaN that lets inf through",
         "What the memory held may be any number, and 0 times inf is NaN again. The outputs do "
         "not show which of them were written. What does?"),
        (".masked_fill(lse_max == -torch.inf, 0.0)", "",
         "a NaN for a row that no part saw a key for",
         "Such a row has two chances of a NaN: -inf minus -inf (softmax does that inside), and 0 "
         "/ 0, as all its weights are 0. Which finite number could it be measured from, and what "
         "could its sum be divided by?"),
        (".masked_fill(total == 0, 1.0)", "", "a NaN for a row that no part saw a key for"),
        (_NO_STAND_IN | _CLEARED, "a NaN for a row that no part saw a key for"),
        (_NO_STAND_IN | _UNWRITTEN, "parts without keys, and no guard at all",
         "The shares are right. But an output that was never written may be NaN. And a row "
         "without keys has two chances of one: -inf minus -inf (softmax does that inside), and 0 "
         "/ 0. What do you put in place of each?"),
        (_BARE_TOTAL | _UNWRITTEN, "parts without keys, and no guard at all"),
        ({"w[..., None]": "w", "divisor[:, None]": "total"},
         "a `[P, N]` tensor used where `[P, N, 1]` is needed",
         "PyTorch lines up last axes, so a weight `[P, N]` meets the last two axes of `[P, N, "
         "DV]`. How do you give the weights a last axis of 1?"),
        ({"w[..., None]": "w", "divisor[:, None]": "total"} | _UNWRITTEN,
         "a `[P, N]` tensor used where `[P, N, 1]` is needed"),
        *(({"torch.exp(lse - shift)": "torch.softmax(lse, 1)",
         "(w[..., None] * o).sum(0) / divisor[:, None]": f"(w[..., None] * o).sum({o_axis})",
         "shift + torch.log(total)": f"torch.logsumexp(lse, {lse_axis})", **guard},
         "shares taken along the rows",
         "Your shares sum to 1 over the rows, and rows have nothing to do with each other. Along "
         "which axis of `lse` do the parts of one row lie?")
         for o_axis in (1, 0) for lse_axis in (1, 0) for guard in ({}, _UNWRITTEN)),
        ("shift + torch.log(total)", "torch.logsumexp(lse, 1)", "an lse summed along the rows",
         "Your output is right, but in your lse you joined the rows, not the parts. Along which "
         "axis of `lse` do the parts of one row lie?"),
        *(("torch.log(total)", f"torch.log(total.clamp(min={least}))",
         "a stand-in that leaks into lse", _LEAKS_INTO_LSE) for least in _FLOORS),
        ("(w[..., None] * o).sum(0) / divisor[:, None]", "o.mean(0)",
         "a plain average of the parts",
         "Each part was divided by its own denominator, and the parts count by those. Where can "
         "you find a part's denominator?"),
        ("(w[..., None] * o).sum(0) / divisor[:, None]",
         "o.sum(0) / (lse > -torch.inf).sum(0).clamp(min=1)[:, None]",
         "a plain average of the parts"),
        ({"(w[..., None] * o).sum(0) / divisor[:, None]": "o.mean(0)",
         "shift + torch.log(total)": "lse.mean(0)"}, "a plain average of the parts"),
        ({"(w[..., None] * o).sum(0) / divisor[:, None]": "o.mean(0)"} | _UNWRITTEN,
         "a plain average of the parts"),
        ({"(w[..., None] * o).sum(0) / divisor[:, None]": "o.mean(0)",
         "shift + torch.log(total)": "lse.mean(0)"} | _UNWRITTEN, "a plain average of the parts"),
        ("o).sum(0)", "o).mean(0)", "a mean of outputs that have their shares",
         "The shares of a row sum to 1 already. By what does a mean divide once more?"),
        ({"o).sum(0)": "o).mean(0)"} | _BARE_TOTAL, "a mean of outputs that have their shares"),
        ({"o).sum(0)": "o).mean(0)"} | _BARE_TOTAL | _UNWRITTEN,
         "a mean of outputs that have their shares"),
        ("(w[..., None] * o).sum(0) / divisor[:, None]", "o.sum(0)",
         "adding outputs that were already divided",
         "Each part is an average of values, so the sum is too large. What undoes each division?"),
        ({"(w[..., None] * o).sum(0) / divisor[:, None]": "o.sum(0)"} | _UNWRITTEN,
         "adding outputs that were already divided"),
        ("lse_max.masked_fill(lse_max == -torch.inf, 0.0)", "torch.zeros_like(lse_max)",
         "taking exp of an lse as it comes",
         "exp(800) is inf even in fp64, and exp(-800) is 0. Only the ratios within a row matter. "
         "What can you subtract first?"),
        ("lse.amax(0)", "lse.max()", "one maximum for all rows",
         "Measured from the largest lse of all rows, a row that lies 800 lower has nothing but "
         "zeros. Do two rows have anything to do with each other?"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN,
         "one maximum for all rows, and no stand-in where it is -inf",
         "Where no part saw a key, -inf minus -inf is NaN. And measured from the largest lse of "
         "all rows, a row far below it has nothing but zeros. What does each row need for itself?"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _BARE_TOTAL,
         "one maximum for all rows, and no stand-in where it is -inf"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _JOINED,
         "one maximum for all rows, and no stand-in where it is -inf"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _BARE_TOTAL | _JOINED,
         "one maximum for all rows, and no stand-in where it is -inf"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _UNWRITTEN,
         "one maximum for all rows, and nothing against a NaN",
         "A row far below the largest lse of all rows has nothing but zeros. Then -inf minus "
         "-inf is NaN where no part saw a key, and 0 times an unwritten NaN is NaN, too. What "
         "does each row need for itself, and each part?"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _UNWRITTEN | _JOINED,
         "one maximum for all rows, and nothing against a NaN"),
        ({"lse.amax(0)": "lse.max()"} | _NO_STAND_IN | _BARE_TOTAL | _UNWRITTEN | _JOINED,
         "one maximum for all rows, and nothing against a NaN"),
        ("torch.exp(lse", "torch.exp2(lse", "taking powers of two of a natural logarithm",
         "lse is a natural logarithm. Which function undoes that one?"),
        ("shift + ", "", "an lse that forgets what was subtracted",
         "The lse is that of a sum with nothing subtracted. What did you take out before the "
         "powers?"),
        ("shift + torch.log(total)", "lse.amax(0)", "the largest lse in place of the joint one",
         "Denominators add up, so the joint lse is larger than each. What is the logarithm of "
         "their sum?"),
        ("shift + torch.log(total)", "lse.sum(0)", "adding the log-sum-exps",
         "Adding logarithms multiplies the denominators. What should happen to the denominators "
         "instead?"),
        (" / divisor[:, None]", "", "a weighted sum that was not divided",
         "Your weights are denominators, up to one factor per row. What should weights sum to?"),
    ]),
    cases=(
        Case("one row, three parts with denominators 1, 2 and 1",
             lambda: _tensors([[[8.0]], [[4.0]], [[2.0]]], [[0.0], [LN_2], [0.0]])),
        Case("one row, two parts, the second of which saw no key",
             lambda: _tensors([[[5.0]], [[NAN]]], [[1.0], [-INF]])),
        Case("one row that no part saw a key for",
             lambda: _tensors([[[7.0]], [[7.0]]], [[-INF], [-INF]])),
        Case("four rows, three parts, some empty",
             lambda: _unwritten(_parts(70, 3, 4, 2), [(0, 1), (1, 2), (2, 2), (0, 3), (1, 3)])),
        Case("rows at heights 800, 0 and -800",
             lambda: _parts(80, 3, 3, 2, lift=(800.0, 0.0, -800.0))),
        Case("one row, two parts that saw keys, the second of which wrote a NaN",
             lambda: _tensors([[[5.0]], [[NAN]]], [[1.0], [1.0]])),
        Case("one row, two parts that saw keys, the second 1,600 lower and with a NaN",
             lambda: _tensors([[[5.0]], [[NAN]]], [[800.0], [-800.0]])),
    ),
)  # fmt: skip


EXERCISES = (ONLINE_STEP, FINISH, ONE_PASS, ROW_LSE, MERGE_PARTIALS, MERGE_MANY)

DOUBLES = (
    Double("online_step", names=(
        "folding log2(e) in a second time, or taking exp where exp2 is meant",
        "a division inside the step")),
    Double("online_step", names=("scores as weights of the values", "handing on the old maximum")),
    Double("online_step", names=(_NO_LAST_AXIS, "one sum for all rows")),
    Double("finish", names=("an lse that adds natural units and log2 units",
                            "an output that is never divided")),
    Double("one_pass", names=("the scale where scale_log2 belongs",
                              "an output that is never divided")),
    Double("merge_partials", names=("a plain average of the two outputs",
                                    "the larger lse in place of the joint one")),
    Double("merge_partials", names=("adding two outputs that were already divided",
                                    "adding the two log-sum-exps")),
    Double("merge_many", names=("parts without keys, and no guard at all",
                                "the largest lse in place of the joint one")),
    Double("merge_many", names=("taking exp of an lse as it comes",
                                "a weight of 0 that meets a NaN")),
)  # fmt: skip

TRAPS = TEXTS.traps

PREDICTIONS = TEXTS.predictions(
    globals(),
    numbers_carried={"choices": (2, 66, 130, 1024, 65_536)},
    failing_drop={"choices": (100, 127, 128, 200)},
)
