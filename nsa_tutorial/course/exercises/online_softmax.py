"""Exercises of chapter 03: one step of the streaming softmax, the fully masked chunk, the walk as a
kernel, merging two results and many.

The wrong solutions of an exercise are one function, told which slips to make. A mistake that can be
made in several ways stands here once per way, under one name, the plainest last.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
INF = math.inf

Slips = frozenset[str]


def _no_axis(*axes: str) -> str:
    """The name of the mistake, with the axes that the tensor has."""
    return f"a `[{', '.join(axes)}]` tensor used where `[{', '.join(axes)}, 1]` is needed"


_CLEARED = "a NaN cleared by what it is, not by where it comes from"


def _randn(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * spread
    )


def _ways(
    function: Callable, name: str, hint: str, *ways: tuple[str, ...]
) -> tuple[Misconception, ...]:
    """One mistake, made in several ways: the slips of each."""
    return tuple(Misconception(name, Wrong(function, frozenset(way)), hint) for way in ways)


# -- 1: one step --


def online_step(
    scores_max_prev: Tensor,
    running_sum: Tensor,
    acc_o: Tensor,
    acc_s: Tensor,
    v: Tensor,
    scale_log2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state `(scores_max, running_sum, acc_o)` after one more chunk `acc_s`, `v`."""
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))  # [G]
    scores_scale = torch.exp2((scores_max_prev - scores_max) * scale_log2)  # [G]
    acc_s = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)  # [G, BS], powers from here on
    running_sum = running_sum * scores_scale + acc_s.sum(1)  # [G]
    acc_o = acc_o * scores_scale[:, None] + acc_s @ v  # [G, DV]
    return scores_max, running_sum, acc_o


_ORDERS = (
    "acc_o, sum, max",
    "acc_o, max, sum",
    "sum, acc_o, max",
    "max, acc_o, sum",
    "sum, max, acc_o",
)


def _step(
    slips: Slips,
    scores_max_prev: Tensor,
    running_sum: Tensor,
    acc_o: Tensor,
    acc_s: Tensor,
    v: Tensor,
    scale_log2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`online_step` with slips."""
    if "log2(e) again" in slips:
        scale_log2 = scale_log2 * LOG2_E
    if "unscaled" in slips:
        scale_log2 = 1.0
    if "scaled max" in slips:
        acc_s, scale_log2 = acc_s * scale_log2, 1.0
    # -- the maximum --
    own_max = acc_s.max().expand(len(acc_s)) if "one max" in slips else acc_s.amax(1)
    scores_max = own_max if "own" in slips else torch.maximum(scores_max_prev, own_max)
    if "Python's max" in slips:
        scores_max = max(scores_max_prev, own_max)
    if "at least 0" in slips:
        scores_max = scores_max.clamp(min=0)
    # -- exponents --
    rise = scores_max - scores_max_prev if "upside down" in slips else scores_max_prev - scores_max
    factor = torch.exp2(rise * (1.0 if slips & {"factor", "max"} else scale_log2))
    level = scores_max_prev if "old max" in slips else scores_max
    if "own powers" in slips:
        level = own_max
    p = torch.exp2((acc_s - level[:, None]) * (1.0 if "powers" in slips else scale_log2))
    if slips & {"max", "max in the powers"}:
        p = torch.exp2(acc_s * scale_log2 - level[:, None])
    if "no axis in the powers" in slips:
        p = torch.exp2((acc_s - level) * scale_log2)
    factor = factor**LOG2_E if "exp in the factor" in slips else factor
    p = p**LOG2_E if "exp in the powers" in slips else p
    if "no max" in slips:
        factor, p = torch.ones_like(scores_max), torch.exp2(acc_s * scale_log2)
    # -- the sums --
    old_sum = running_sum * factor
    old_o = acc_o * (factor if "no axis" in slips else factor[:, None])
    if slips & {"sum as it was", "new alone"}:
        old_sum = running_sum
    if slips & {"acc_o as it was", "new alone"}:
        old_o = acc_o
    if "times the sum" in slips:
        old_o = old_o * running_sum[:, None]
    if "lost" in slips:
        old_sum, old_o = running_sum * 0, acc_o * 0
    new = factor if slips & {"all", "new alone"} else torch.ones_like(factor)
    new_sum = p.sum() if "one sum" in slips else p.sum(1)
    new_o = (acc_s if "scores weigh" in slips else p) @ v
    if slips & {"p * v", "p.T * v"}:
        new_o = ((p if "p * v" in slips else p.T) * v).sum(0)
    if "p * v, not summed" in slips:
        new_o = p * v
    running_sum, acc_o = old_sum + new_sum * new, old_o + new_o * new[:, None]
    if slips & {"divided", "times the sum"}:
        acc_o = acc_o / running_sum[:, None]
    # -- what is handed on --
    scores_max = scores_max_prev if "stale" in slips else scores_max
    state = {"max": scores_max, "sum": running_sum, "acc_o": acc_o}
    order = next((way for way in _ORDERS if way in slips), "max, sum, acc_o")
    return tuple(state[name] for name in order.split(", "))


def _after(seed: int, G: int, DV: int, top: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """A state as earlier chunks might have left it."""
    return (
        torch.tensor(top, dtype=torch.float64),
        _randn(seed, G).abs() + 1,
        _randn(seed + 1, G, DV),
    )


def _tensors(*lists: list, scale_log2: float = 1.0) -> tuple:
    """Arguments of a step from lists, in fp32. With `scale_log2` 1 a score counts in log2 units."""
    return (*map(torch.tensor, lists), scale_log2)


_SAME_SUM = (
    "`running_sum` and `acc_o` are the same sum, without the values and with them. What happens "
    "to the one when the maximum rises, and what to the other?"
)
_STEP_MISTAKES = (
    *_ways(
        _step,
        "a missing rescale",
        "The old sums are measured from the old maximum, the new terms from the new one. "
        "(Descending scores hide that: there the maximum never moves.) At which rate do you "
        "change old units into new ones?",
        ("sum as it was", "acc_o as it was"),
    ),
    Misconception(
        "rescaling the denominator but not the accumulator",
        slip(_step, "acc_o as it was"),
        _SAME_SUM,
    ),
    Misconception(
        "rescaling the accumulator but not the denominator",
        slip(_step, "sum as it was"),
        _SAME_SUM,
    ),
    Misconception(
        "a rescale factor upside down",
        slip(_step, "upside down"),
        "Your factor is above 1, so the old sums grow. The maximum can only rise. What must old "
        "terms do then?",
    ),
    Misconception(
        "the chunk's own maximum in place of the running one",
        slip(_step, "own"),
        "On paper it comes out even, but the factor can now exceed 1. It overflows when a chunk "
        "lies far enough below what came before. Which maximum can never fall?",
    ),
    Misconception(
        "powers measured from no maximum at all",
        slip(_step, "no max"),
        "Your sums are right while scores are small. In fp32 a score of 128 log2 units is inf. "
        "What should every exponent be measured from?",
    ),
    Misconception(
        "handing on the old maximum",
        slip(_step, "stale"),
        "Both sums are measured from the new maximum, but you return the old one. Which one will "
        "the next chunk need?",
    ),
    *_ways(
        _step,
        "folding log2(e) in a second time, or taking exp where exp2 is meant",
        "Your powers are too steep. `scale_log2` holds log2(e) already. Which base is left for "
        "the power?",
        ("exp in the factor",),
        ("exp in the powers",),
        ("log2(e) again",),
    ),
    Misconception(
        "a maximum that is stored scaled",
        slip(_step, "scaled max"),
        "You compare the chunk's scaled scores with a maximum that came in unscaled. In which "
        "unit does the state keep its maximum?",
    ),
    Misconception(
        "exponents without scale_log2",
        slip(_step, "unscaled"),
        "Scores and maximum are plain dot products. With `scale_log2 = 1` nobody notices. By what "
        "do you multiply a difference of two scores before it becomes an exponent?",
    ),
    Misconception(
        "a rescale factor without scale_log2",
        slip(_step, "factor"),
        "The old sums hold powers of scaled scores, and your factor is one of unscaled ones. When "
        "the maximum rises by 2, how many log2 units is that?",
    ),
    Misconception(
        "new powers without scale_log2",
        slip(_step, "powers"),
        "The chunk's scores are plain dot products. What is missing before their distance from "
        "the maximum becomes an exponent?",
    ),
    Misconception(
        "new powers measured from the old maximum",
        slip(_step, "old max"),
        "Some of your new powers exceed 1. The old sums now stand at the new maximum. Where must "
        "the new terms stand?",
    ),
    Misconception(
        "new powers measured from the chunk's own maximum",
        slip(_step, "own powers"),
        "The old sums stand at the running maximum, and your new powers at the chunk's own. From "
        "which maximum must both be measured before they are added?",
    ),
    Misconception(
        "a maximum that is never below 0",
        slip(_step, "at least 0"),
        "In a row of negative scores, the largest is negative, too. Measured from 0, scores near "
        "-300 would underflow. What is the maximum of a row before its first chunk?",
    ),
    Misconception(
        "scores as weights of the values",
        slip(_step, "scores weigh"),
        "A value is weighed by the power of its score, not by the score. Which of your tensors "
        "holds powers?",
    ),
    *_ways(
        _step,
        _no_axis("G"),
        "PyTorch lines up last axes, so a `[G]` meets the columns of a `[G, DV]` or a `[G, BS]`, "
        "and not its rows. With one row it works by luck. How do you give a `[G]` a last axis of "
        "1?",
        ("no axis", "no axis in the powers"),
        ("no axis in the powers",),
        ("no axis",),
    ),
    *_ways(
        _step,
        "`*` where the powers meet the values",
        "`*` pairs numbers in equal places. Each row of powers must weigh the rows of `v`, and sum "
        "them over the keys. Which operator does both?",
        ("p * v, not summed",),
        ("p * v",),
        ("p.T * v",),
    ),
    Misconception(
        "Python's `max` where `torch.maximum` is meant",
        slip(_step, "Python's max"),
        "`max` asks which of two tensors is larger as a whole. Each row needs an answer of its "
        "own. Which function of torch compares row by row?",
    ),
    Misconception(
        "one sum for all rows",
        slip(_step, "one sum"),
        "Each row has a denominator of its own. Along which axis do the powers of one row lie?",
    ),
    Misconception(
        "one maximum for all rows",
        slip(_step, "one max"),
        "Each row has a maximum of its own. What is left of a row that lies far below another "
        "row's largest score?",
    ),
    *_ways(
        _step,
        "a maximum subtracted without its scale",
        "The scores are scaled, the maximum that you subtract is not. Both are plain dot "
        "products. What must be done to both?",
        ("max in the powers",),
        ("max",),
    ),
    Misconception(
        "rescaling the new terms as well",
        slip(_step, "all"),
        "The new terms are measured from the new maximum already. Which sums are still in the "
        "old unit?",
    ),
    Misconception(
        "rescaling the new terms in place of the old",
        slip(_step, "new alone"),
        "The factor is right, but it stands on the wrong term. Which terms are measured from the "
        "old maximum?",
    ),
    Misconception(
        "a step that loses the old sums",
        slip(_step, "lost"),
        "What comes back is this chunk's sum alone. What have the chunks before it given?",
    ),
    *_ways(
        _step,
        "a division inside the step",
        "`acc_o` is a numerator. It stays undivided until the row ends, and what comes in was "
        "not divided either. How often does a row divide?",
        ("times the sum",),
        ("divided",),
    ),
    *_ways(
        _step,
        "a state in another order",
        "The state goes in as maximum, sum, accumulator, and the next step expects it so. In "
        "which order do you return the three?",
        *((way,) for way in _ORDERS),
    ),
)

ONLINE_STEP = TEXTS.exercise(
    "online_step",
    returns=("scores_max", "running_sum", "acc_o"),
    minutes=9,
    difficulty=2,
    solution=online_step,
    cases=(
        Case(
            "scores 1 and 3, then 2 and 5",
            lambda: _tensors([3.0], [1.25], [[6.0]], [[2.0, 5.0]], [[0.0], [16.0]]),
        ),
        Case(
            "scores 1 and 3, then 1 and 5, with scale_log2 = 0.5",
            lambda: _tensors([3.0], [1.5], [[8.0]], [[1.0, 5.0]], [[0.0], [16.0]], scale_log2=0.5),
        ),
        Case(
            "one row, the new chunk lies lower than the old maximum",
            lambda: _tensors([5.0], [1.125], [[16.0]], [[1.0, 3.0]], [[8.0], [4.0]]),
        ),
        Case(
            "the first chunk, all negative in one of the rows",
            lambda: _tensors(
                [-INF] * 2,
                [0.0] * 2,
                [[0.0] * 3] * 2,
                [[-0.5, -2.0], [1.0, 3.0]],
                [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
            ),
        ),
        Case(
            "three rows, one whose maximum rises, two whose maximum stays",
            lambda: (
                *_after(4, 3, 3, [0.1, 9.0, 20.0]),
                _randn(6, 3, 5),
                _randn(7, 5, 3),
                0.5 * LOG2_E,
            ),
        ),
        Case(
            "a chunk 200 log2 units below the maximum, in fp32",
            lambda: _tensors(
                [200.0], [1.0], [[2.0, -1.0]], [[0.0, -1.0]], [[1.0, 1.0], [3.0, 1.0]]
            ),
        ),
    ),
    misconceptions=_STEP_MISTAKES,
    combine=together(
        _STEP_MISTAKES,
        {"sum as it was", "acc_o as it was", "lost", "all", "new alone"},
        {"own", "no max", "old max", "max", "own powers"},
        {"max", "no axis"},
        {"max", "powers"},
        {"no axis", "own powers"},
        {"no axis", "no max"},
        {"own powers", "one max"},
        {"no max", "at least 0"},
        {"no max", "factor", "powers", "upside down", "one max"},
        {"lost", "upside down", "factor"},
        {"scaled max", "log2(e) again", "unscaled", "factor", "powers", "max"},
        {"scores weigh", "p * v", "p.T * v"},
        {"own", "Python's max"},
        {"unscaled", "no max"},
    ),
)


# -- 2: the fully masked chunk --


def guarded_step(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(scores_max, scores_scale, acc_s)` after a chunk whose keys may be masked with `-inf`."""
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))  # [G]
    shift = torch.where(scores_max == -torch.inf, 0.0, scores_max)  # [G], 0 for an empty row
    scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)  # [G]
    acc_s = torch.exp2((acc_s - shift[:, None]) * scale_log2)  # [G, BS], powers from here on
    return scores_max, scores_scale, acc_s


def _guarded(
    slips: Slips, scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`guarded_step` with slips."""
    if "-1e30" in slips:
        scores_max_prev, acc_s = scores_max_prev.clamp(min=-1e30), acc_s.clamp(min=-1e30)
    if "exp" in slips:
        scale_log2 = scale_log2 * LOG2_E
    if "unscaled" in slips:
        scale_log2 = 1.0
    # -- the maximum, and what stands in for it --
    prev_or_0 = torch.where(scores_max_prev == -INF, 0.0, scores_max_prev)
    if "old maximum" in slips:
        scores_max_prev = prev_or_0
    scores_max = acc_s.amax(1)
    if "own" not in slips:
        scores_max = torch.maximum(scores_max_prev, scores_max)
    if "at least 0" in slips:
        scores_max = scores_max.clamp(min=0)
    shift = torch.where(scores_max == -INF, 0.0, scores_max)
    for floor in (0.0, -1e4):
        if f"floor {floor}" in slips:
            shift = scores_max.clamp(min=floor)
    if "by the old maximum" in slips:
        shift = torch.where(scores_max_prev == -INF, 0.0, scores_max)
    if "by the chunk's maximum" in slips:
        shift = torch.where(acc_s.amax(1) == -INF, 0.0, scores_max)
    if "from the old maximum" in slips:
        shift = prev_or_0
    if "from the old maximum, bare" in slips:
        shift = scores_max_prev
    if "other rows" in slips:
        shift = torch.where(scores_max == -INF, scores_max, 0.0)
    if "from 0" in slips or ("all rows" in slips and (scores_max == -INF).any()):
        shift = torch.zeros_like(scores_max)
    # -- exponents --
    old = prev_or_0 if "old maximum, in the factor" in slips else scores_max_prev
    rise = old - (scores_max if "factor unguarded" in slips else shift)
    factor = torch.exp2(rise * (1.0 if "factor unscaled" in slips else scale_log2))
    if "upside down" in slips:
        factor = torch.exp2(-rise * scale_log2)
    shift = scores_max if "p unguarded" in slips else shift
    fall = acc_s - (shift if "no axis" in slips else shift[:, None])
    p = torch.exp2(fall * (1.0 if "p unscaled" in slips else scale_log2))
    # -- what is handed on --
    for name, was in (("1 while empty", scores_max), ("1 if it was empty", scores_max_prev)):
        if name in slips:
            factor = torch.where(was == -INF, 1.0, factor)
    if "nothing at first" in slips:
        p = torch.where((scores_max_prev == -INF)[:, None], 0.0, p)
    if "handed on as well" in slips:
        scores_max = shift
    if "0 for a masked chunk" in slips:
        factor = torch.where(acc_s.amax(1) == -INF, 0.0, factor)
    for number in (0.0, -1e30):
        if f"hands on {number}" in slips:
            scores_max = torch.where(scores_max == -INF, number, scores_max)
    if "factor cleared" in slips:
        factor = factor.nan_to_num()
    if "p cleared" in slips:
        p = p.nan_to_num()
    return (scores_max, p, factor) if "p first" in slips else (scores_max, factor, p)


_GUARDED_MISTAKES = (
    *_ways(
        _guarded,
        "-inf minus -inf, which is NaN",
        "While the maximum is -inf there is nothing to measure from. Print your `shift` for this "
        "row: is it finite? Which number could stand in for the maximum in the exponent, and only "
        "there?",
        ("factor unguarded", "p unguarded"),
    ),
    *_ways(
        _guarded,
        _CLEARED,
        "This row was NaN before your step: somebody's mistake, and your 0 hides it. Only a row "
        "that has seen no key needs help. Which maximum tells?",
        ("factor cleared",),
        ("p cleared",),
        ("factor cleared", "p cleared"),
    ),
    Misconception(
        "a large negative number in place of -inf",
        slip(_guarded, "-1e30"),
        "In a row of nothing but -1e30, the masked keys are the largest scores. What is exp2(0)? "
        "Which score can no maximum lift?",
    ),
    Misconception(
        "a maximum that is never below 0",
        slip(_guarded, "at least 0"),
        "A row that has seen no key claims the maximum 0, which should still be -inf. So does a "
        "row whose scores are all near -300, and its powers underflow to 0. When does an exponent "
        "need a stand-in, and when does the state?",
    ),
    *_ways(
        _guarded,
        "a stand-in chosen by the old maximum",
        "You ask whether the row *had* seen a key. If its first one comes in this chunk, there is "
        "a maximum to measure from, and you measure from 0. Which maximum tells that there is "
        "none?",
        ("by the old maximum", "handed on as well"),
        ("by the old maximum",),
    ),
    *_ways(
        _guarded,
        "a stand-in chosen by the chunk's own maximum",
        "You ask whether the row sees a key in this chunk. A row with a past has a maximum, even "
        "where this chunk is masked, and its sums must stay: a factor of 1. Which maximum tells "
        "that there is nothing to measure from?",
        ("by the chunk's maximum", "handed on as well"),
        ("by the chunk's maximum",),
    ),
    *_ways(
        _guarded,
        "exponents measured from the old maximum",
        "Where the maximum rises, your new powers exceed 1, and the old sums keep their unit. From "
        "which maximum must both be measured after this chunk?",
        ("from the old maximum, bare",),
        ("from the old maximum",),
    ),
    Misconception(
        "a stand-in for the rows that have a maximum",
        slip(_guarded, "other rows"),
        "Those rows are measured from 0, and the rows without a key still give -inf minus -inf. "
        "Which rows need the stand-in?",
    ),
    Misconception(
        _no_axis("G"),
        slip(_guarded, "no axis"),
        "PyTorch lines up last axes, so a `[G]` meets the columns of a `[G, BS]`, and not its "
        "rows. With one row it works by luck. How do you give a `[G]` a last axis of 1?",
    ),
    Misconception(
        "powers set to 0 for a row that had seen no key",
        slip(_guarded, "nothing at first"),
        "The row's first visible key may come in this chunk, and then its power is lost. Which "
        "maximum tells that the row still has seen nothing?",
    ),
    Misconception(
        "measuring every exponent from 0",
        slip(_guarded, "from 0"),
        "No NaN, but now the maximum does nothing. Where it stays as it was, the old sums must "
        "stay, too: a factor of 1. Which rows have no maximum to measure from?",
    ),
    Misconception(
        "a stand-in for all rows as soon as one of them is empty",
        slip(_guarded, "all rows"),
        "One row without a key makes you measure every row from 0, and the other rows have "
        "maxima of their own. How do you choose row by row?",
    ),
    Misconception(
        "a stand-in for the old maximum before the new one is taken",
        slip(_guarded, "old maximum"),
        "A row that has seen no key now starts from 0, and no later score below 0 can change that. "
        "`torch.maximum` has no trouble with -inf. Where does the trouble begin?",
    ),
    Misconception(
        "a stand-in for the old maximum in the factor, too",
        slip(_guarded, "old maximum, in the factor"),
        "The old maximum may stay -inf: -inf minus a finite number is no NaN. What is 2 to that, "
        "and what should the factor on an empty sum be?",
    ),
    *_ways(
        _guarded,
        "a floor under the maximum, below which true scores may lie",
        "No NaN, and any finite number may stand in for -inf. But a floor also replaces true "
        "maxima that lie lower. When, and only when, is a stand-in needed?",
        ("floor -10000.0",),
        ("floor 0.0",),
    ),
    *_ways(
        _guarded,
        "a stand-in that leaks into the state",
        "Your exponents need a finite number, but you also return it: the state must say -inf "
        "until a key is seen. Which of the two tensors is handed on, the maximum or its stand-in?",
        ("hands on -1e+30",),
        ("hands on 0.0",),
    ),
    Misconception(
        "the chunk's own maximum in place of the running one",
        slip(_guarded, "own"),
        "A fully masked chunk must leave a row with a past as it was. Which maximum and which "
        "factor do that?",
    ),
    Misconception(
        "a factor that forgets the past when a chunk is fully masked",
        slip(_guarded, "0 for a masked chunk"),
        "A factor of 0 wipes out what the row has summed so far. A chunk that adds nothing "
        "should change nothing. Which factor does that?",
    ),
    Misconception(
        "a guard on the powers that the factor lacks",
        slip(_guarded, "factor unguarded"),
        "The powers are right, but where a row has seen nothing, the factor is still exp2 of "
        "-inf minus -inf. What do both exponents have in common?",
    ),
    Misconception(
        "a guard on the factor that the powers lack",
        slip(_guarded, "p unguarded"),
        "The factor is right, but where a row has seen nothing, the powers are still exp2 of "
        "-inf minus -inf. What do both exponents have in common?",
    ),
    *_ways(
        _guarded,
        "a factor of 1 for a row that had seen no key",
        "Such a step would give the right sums: both are 0 there, and 0 times 1 is 0. This check "
        "asks for the factor 0, which needs no special case. What is exp2 of -inf minus a finite "
        "number?",
        ("1 if it was empty",),
        ("1 while empty",),
    ),
    Misconception(
        "a factor upside down",
        slip(_guarded, "upside down"),
        "Your factor is above 1, or inf. The maximum can only rise. What must old terms do then?",
    ),
    Misconception(
        "exponents without scale_log2",
        slip(_guarded, "unscaled"),
        "The factor and the powers both lack it. By what do you multiply a difference of two "
        "scores before it becomes an exponent?",
    ),
    Misconception(
        "a factor without scale_log2",
        slip(_guarded, "factor unscaled"),
        "The factor is a power of scaled scores, too. When the maximum rises by 2, how many log2 "
        "units is that?",
    ),
    Misconception(
        "powers without scale_log2",
        slip(_guarded, "p unscaled"),
        "The scores are plain dot products. What is missing before their distance from the "
        "maximum becomes an exponent?",
    ),
    Misconception(
        "taking exp where exp2 is meant",
        slip(_guarded, "exp"),
        "Your factor and your powers are too small. `scale_log2` holds log2(e) already. Which "
        "base is left for the power?",
    ),
    Misconception(
        "results in another order",
        slip(_guarded, "p first"),
        "Maximum, factor, powers: that is the order the statement asks for. In which order do you "
        "return the three?",
    ),
)

GUARDED_STEP = TEXTS.exercise(
    "guarded_step",
    returns=("scores_max", "scores_scale", "acc_s"),
    minutes=4,
    difficulty=2,
    solution=guarded_step,
    cases=(
        Case(
            "one row that has seen no key, and sees none now",
            lambda: (torch.tensor([-INF]), torch.tensor([[-INF, -INF]]), 1.0),
        ),
        Case(
            "a row with a past and a fully masked chunk",
            lambda: (torch.tensor([3.0]), torch.tensor([[-INF, -INF]]), 1.0),
        ),
        Case(
            "the first visible key",
            lambda: (torch.tensor([-INF]), torch.tensor([[-INF, -2.0]]), 1.0),
        ),
        Case(
            "a maximum that rises by 2, scale_log2 = 0.5",
            lambda: (torch.tensor([1.0]), torch.tensor([[3.0, 2.0, -INF]]), 0.5),
        ),
        Case(
            "a row that is NaN by somebody else's mistake, and stays it",
            lambda: (torch.tensor([math.nan]), torch.tensor([[math.nan, math.nan]]), 1.0),
        ),
        Case(
            "rows of every kind, all scores far below zero",
            lambda: (
                torch.tensor([-INF, -300.0, -INF, -30_002.0]),
                torch.tensor(
                    [[-INF] * 3, [-INF] * 3, [-305.0, -INF, -300.0], [-30_000.0, -INF, -30_001.0]]
                ),
                1.5,
            ),
        ),
    ),
    misconceptions=_GUARDED_MISTAKES,
    combine=together(
        _GUARDED_MISTAKES,
        {"-1e30", "at least 0", "floor 0.0", "hands on 0.0"},
        {"-1e30", "at least 0", "floor 0.0", "from 0", "all rows"},
        {"-1e30", "at least 0", "old maximum"},
        {"other rows", "-1e30", "at least 0", "old maximum", "from 0", "all rows", "floor 0.0"},
        {"other rows", "from the old maximum", "by the old maximum", "by the chunk's maximum"},
        {"other rows", "factor unguarded"},
        {"other rows", "p unguarded"},
        {"-1e30", "old maximum, in the factor"},
        {"old maximum", "old maximum, in the factor", "1 while empty"},
        {"from 0", "factor unguarded"},
        {"from 0", "p unguarded"},
        {"-1e30", "factor unguarded"},
        {"-1e30", "p unguarded"},
        {"at least 0", "factor unguarded"},
        {"at least 0", "p unguarded"},
        {"floor 0.0", "factor unguarded"},
        {"floor 0.0", "p unguarded"},
        {"upside down", "factor unscaled"},
        {"1 while empty", "0 for a masked chunk"},
        {"1 while empty", "factor unguarded"},
        {"exp", "factor unscaled"},
        {"exp", "p unscaled"},
        {"unscaled", "exp", "factor unscaled", "p unscaled"},
    ),
)


# -- 3: the walk as a kernel --

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
            acc_s = tl.exp2((acc_s - scores_max) * scale_log2)  # powers from here on
            running_sum = running_sum * scores_scale + tl.sum(acc_s, axis=0)
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


@triton.jit
def _wrong_lse(S, LSE, scale_log2, ln_2, M, BS: tl.constexpr, SLIP: tl.constexpr):
    row = tl.program_id(0)
    start = row * M
    if SLIP == "first row":
        start = row * 0
    if SLIP == "rows of BS":
        start = row * BS
    step_scale = 1.0 if SLIP == "no scale" else scale_log2
    scores_max, running_sum = float("-inf"), 0.0
    for first in range(0, M, BS):
        key = first + tl.arange(0, BS)
        if SLIP == "other 0":
            acc_s = tl.load(S + start + key, mask=key < M, other=0.0)
        elif SLIP == "other -1e4":
            acc_s = tl.load(S + start + key, mask=key < M, other=-1e4)
        elif SLIP == "other -1e3":
            acc_s = tl.load(S + start + key, mask=key < M, other=-1e3)
        elif SLIP == "one too many":
            acc_s = tl.load(S + start + key, mask=key <= M, other=float("-inf"))
        elif SLIP == "one too few":
            acc_s = tl.load(S + start + key, mask=key < M - 1, other=float("-inf"))
        elif SLIP == "first chunk":
            acc_s = tl.load(S + start + key, mask=key < BS, other=float("-inf"))
        elif SLIP == "place in memory":
            acc_s = tl.load(S + start + key, mask=start + key < M, other=float("-inf"))
        elif SLIP == "no mask":
            acc_s = tl.load(S + start + key)
        else:
            acc_s = tl.load(S + start + key, mask=key < M, other=float("-inf"))
        scores_max_prev = scores_max
        scores_max = tl.max(acc_s, axis=0)
        if SLIP != "own":
            scores_max = tl.maximum(scores_max_prev, scores_max)
        if SLIP == "upside down":
            scores_scale = tl.exp2((scores_max - scores_max_prev) * step_scale)
        elif SLIP == "factor unscaled":
            scores_scale = tl.exp2(scores_max_prev - scores_max)
        elif SLIP == "exp":
            scores_scale = tl.exp((scores_max_prev - scores_max) * step_scale)
        else:
            scores_scale = tl.exp2((scores_max_prev - scores_max) * step_scale)
        if SLIP == "no rescale":
            scores_scale = scores_scale * 0.0 + 1.0
        if SLIP == "last chunk":
            scores_scale = scores_scale * 0.0
        if SLIP == "exp":
            p = tl.exp((acc_s - scores_max) * step_scale)
        else:
            p = tl.exp2((acc_s - scores_max) * step_scale)
        running_sum = running_sum * scores_scale + tl.sum(p, axis=0)
    log2_sum = tl.log2(running_sum)
    lse = (scores_max * scale_log2 + log2_sum) * ln_2
    if SLIP == "log2 units":
        lse = scores_max * scale_log2 + log2_sum
    if SLIP == "natural sum":
        lse = scores_max * scale_log2 + log2_sum * ln_2
    if SLIP == "natural sum, all by ln 2":
        lse = (scores_max * scale_log2 + log2_sum * ln_2) * ln_2
    if SLIP == "natural max":
        lse = scores_max * scale_log2 * ln_2 + log2_sum
    if SLIP == "no max":
        lse = log2_sum * ln_2
    if SLIP == "max unscaled":
        lse = scores_max + log2_sum * ln_2
    if SLIP == "max unscaled, all by ln 2":
        lse = (scores_max + log2_sum) * ln_2
    tl.store(LSE + row, lse)


class _Mistaken:
    """`_wrong_lse` with its slip chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run = mistake, None

    def __getitem__(self, grid: tuple) -> Callable:
        return partial(_wrong_lse[grid], SLIP=self.mistake)


def _lse_mistakes(name: str, hint: str, *slips: str) -> tuple[Misconception, ...]:
    """One mistake of a kernel, made in several ways."""
    return tuple(Misconception(name, partial(_Mistaken, slip), hint) for slip in slips)


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
    minutes=9,
    difficulty=2,
    solution=row_lse,
    run=_run_row_lse,
    tolerance=1e-4,
    misconceptions=(
        *_lse_mistakes(
            "a masked place that counts as a score of 0",
            "In a row of negative scores, a score of 0 is the largest. Which score has the power "
            "0, and never becomes the maximum?",
            "other 0",
        ),
        *_lse_mistakes(
            "a masked place with a finite score",
            "In a row whose scores are lower still, that place holds the maximum. Which score has "
            "the power 0, however low the row lies?",
            "other -1e4",
            "other -1e3",
        ),
        *_lse_mistakes(
            "a mask that lets one key too many through",
            "A row has `M` keys, and the first has the number 0. Whose score has the number `M`?",
            "one too many",
        ),
        *_lse_mistakes(
            "a mask that leaves out the last key",
            "A row has `M` keys, and the first has the number 0. Which number has the last one?",
            "one too few",
        ),
        *_lse_mistakes(
            "a mask that ends with the first chunk",
            "`key` counts through the whole row, and your mask stops after `BS` keys. Where does "
            "the row end?",
            "first chunk",
        ),
        *_lse_mistakes(
            "a mask that adds where the row begins",
            "Only the first row finds its scores. The mask compares with `M`, the length of one "
            "row. From where does `key` count already?",
            "place in memory",
        ),
        *_lse_mistakes(
            "a load past the end of the row",
            "The last chunk of a row may be shorter than `BS`. Whose scores lie behind it?",
            "no mask",
        ),
        *_lse_mistakes(
            "a missing rescale",
            "The old sum is measured from the old maximum, the new powers from the new one. At "
            "which rate do you change the old unit into the new one?",
            "no rescale",
        ),
        *_lse_mistakes(
            "a sum that keeps the last chunk alone",
            "What is stored is the last chunk's sum. What have the chunks before it given?",
            "last chunk",
        ),
        *_lse_mistakes(
            "the chunk's own maximum in place of the running one",
            "Right on most rows. But 128 log2 units below the first chunk, the factor is inf. "
            "Which maximum can never fall?",
            "own",
        ),
        *_lse_mistakes(
            "a rescale factor upside down",
            "Your factor is above 1, and in the first chunk it is inf. The maximum can only rise. "
            "What must old terms do then?",
            "upside down",
        ),
        *_lse_mistakes(
            "a rescale factor without scale_log2",
            "The old sum holds powers of scaled scores, and your factor is one of unscaled ones. "
            "When the maximum rises by 2, how many log2 units is that?",
            "factor unscaled",
        ),
        *_lse_mistakes(
            "exponents without scale_log2",
            "The scores in `S` are plain dot products. What is missing before a difference of two "
            "of them becomes an exponent?",
            "no scale",
        ),
        *_lse_mistakes(
            "taking exp where exp2 is meant",
            "Your powers are too small. `scale_log2` holds log2(e) already. Which base is left?",
            "exp",
        ),
        *_lse_mistakes(
            "an lse left in log2 units",
            "Your lse is too large by one factor everywhere, and a natural logarithm is asked for. "
            "How many natural units is one log2 unit?",
            "log2 units",
        ),
        *_lse_mistakes(
            "an lse that adds natural units and log2 units",
            "One of the two terms of your lse is a natural logarithm, and the other is in log2 "
            "units. Which is which?",
            "natural sum",
            "natural sum, all by ln 2",
            "natural max",
        ),
        *_lse_mistakes(
            "an lse that forgets the maximum",
            "Your sum is measured from the maximum. The lse is that of a sum with nothing "
            "subtracted. What has to come back?",
            "no max",
        ),
        *_lse_mistakes(
            "an lse that forgets the scale on the maximum",
            "The lse is that of scaled scores, but the maximum is a plain dot product. What has to "
            "happen to it first?",
            "max unscaled",
            "max unscaled, all by ln 2",
        ),
        *_lse_mistakes(
            "reading the same row in every program",
            "All programs run the same lines. What tells one row from the next?",
            "first row",
        ),
        *_lse_mistakes(
            "rows that begin BS places apart",
            "A chunk has `BS` scores. How many has a row?",
            "rows of BS",
        ),
    ),
    cases=(
        _rows("one row, one chunk", [1.0, 3.0, 2.0, 5.0], scale=0.5),
        _rows("one row, the second chunk higher", [1, 3, 2, 4, 2, 8, 1, 5], scale=0.5),
        _rows(
            "three rows, each with its second chunk lower",
            [5, 2, 1, 3, 1, 2, 3, 2],
            [9, 2, 1, 3, 7, 4, 1, 2],
            [0, -1, -2, -3, -4, -1, -2, -5],
            scale=0.5,
        ),
        _rows(
            "rows of six negative scores, so that the last chunk is short",
            [-9, -8, -7, -6, -5, -4],
            [-3, -4, -2, -3, -4, -6],
            [-20_003, -20_004, -20_002, -20_003, -20_001, -20_002],
            scale=0.5,
        ),
        _rows(
            "one row, its second chunk 200 log2 units lower",
            [200, 199, 198, 197, 0, -1, -2, -3],
            scale=LN_2,
        ),
    ),
)


# -- 4: merging two --


def merge_partials(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both sets of keys from the results over each."""
    lse_max = torch.maximum(lse1, lse2)  # [N]
    shift = torch.where(lse_max == -torch.inf, 0.0, lse_max)
    # [N], shares of the denominator, up to a common factor
    w1, w2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)
    total = w1 + w2
    # [N, DV]
    o = (o1 * w1[:, None] + o2 * w2[:, None]) / torch.where(total == 0, 1.0, total)[:, None]
    return o, shift + torch.log(total)


# What readers put in place of a sum that may be 0. A logarithm that takes it tells which.
_FLOORS = tuple(f"floor {least}" for least in (1.0, 1e-6, 1e-8, 1e-9, 1e-10, 1e-12, 1e-30, 1e-20))


def _floored(slips: Slips, total: Tensor) -> Tensor:
    """`total`, or the stand-in of a slip where it is smaller."""
    floor = next((float(floor.split()[1]) for floor in _FLOORS if floor in slips), 0.0)
    return total.clamp(min=floor)


def _merge(
    slips: Slips, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_partials` with slips."""
    is_bare = "bare" in slips
    lse_max = torch.maximum(lse1, lse2)
    shift = lse_max if is_bare else torch.where(lse_max == -INF, 0.0, lse_max)
    if "as it comes" in slips:
        shift = torch.zeros_like(lse_max)
    base = LN_2 if slips & {"base two", "base two, ln"} else 1.0
    w1, w2 = torch.exp((lse1 - shift) * base), torch.exp((lse2 - shift) * base)
    total = w1 + w2
    # -- the new lse --
    log = torch.log2 if "base two" in slips else torch.log
    lse = shift + log(_floored(slips, total))
    if is_bare and "bare lse" not in slips:
        lse = torch.where(lse_max == -INF, -INF, lse)
    # -- the new output --
    if "formula" in slips:
        joint = lse if is_bare else torch.where(lse == -INF, 0.0, lse)
        w1, w2, total = torch.exp(lse1 - joint), torch.exp(lse2 - joint), torch.ones_like(lse)
    if "swapped" in slips:
        w1, w2 = w2, w1
    if "lse weighs" in slips:
        w1, w2, total = lse1, lse2, lse1 + lse2
    if slips & {"average", "sum"}:
        w1, w2 = torch.ones_like(lse1), torch.ones_like(lse2)
        total = w1 if "sum" in slips else w1 + w2
    divisor = total if slips & {"bare", "lse weighs"} else torch.where(total == 0, 1.0, total)
    if "no axis" in slips:
        return (o1 * w1 + o2 * w2) / total, lse
    if "cleared before" in slips:
        o1, o2 = o1.nan_to_num(), o2.nan_to_num()
    o = o1 * w1[:, None] + o2 * w2[:, None]
    ways = {
        "no shift back": lse - shift,
        "larger": lse_max,
        "sum of lse": lse1 + lse2,
        "mean of lse": (lse1 + lse2) / 2,
    }
    lse = next((ways[way] for way in ways if way in slips), lse)
    o = o if "not divided" in slips else o / divisor[:, None]
    return o.nan_to_num() if "cleared after" in slips else o, lse


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
        axis.scatter([expected[0][i, j].item()], [y], s=110, marker="|", linewidth=3,
        color=PALETTE["text"],
                     label="expected" if y == 0 else None)  # fmt: skip
        if math.isfinite(o[i, j].item()):
            label = None if axis.get_legend_handles_labels()[1].count("yours") else "yours"
            axis.scatter(
                [o[i, j].item()], [y], s=60, marker="x", color=PALETTE["query"], label=label
            )
        told = "both parts empty" if math.isnan(share) else f"part 2 holds {share:.0%}"
        axis.text(
            1.01,
            y,
            told,
            transform=axis.get_yaxis_transform(),
            fontsize=8,
            va="center",
            color=PALETTE["text"],
        )
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
    scores = _randn(seed, N, M, spread=2.0)
    return torch.softmax(scores, 1) @ _randn(seed + 1, M, DV), torch.logsumexp(scores, 1)


def _with_empty(parts: tuple[Tensor, Tensor], rows: list[int]) -> tuple[Tensor, Tensor]:
    o, lse = parts
    o[rows], lse[rows] = 0.0, -INF
    return o, lse


_LEAKS_INTO_LSE = (
    "Exponents and divisors need a stand-in, but here lse shows it: a row without keys claims a "
    "denominator. What does lse say of a denominator of 0?"
)
_MERGE_MISTAKES = (
    Misconception(
        "a plain average of the two outputs",
        slip(_merge, "average"),
        "Each half was divided by its own denominator, and the halves count by those. Where can "
        "you find a half's denominator?",
    ),
    Misconception(
        "adding two outputs that were already divided",
        slip(_merge, "sum"),
        "`o1` and `o2` are both averages of values, so their sum is up to twice too large. What "
        "undoes each division?",
    ),
    Misconception(
        "using lse itself as the weight",
        slip(_merge, "lse weighs"),
        "lse may be negative, or zero, and a weight may not. lse is the logarithm of a "
        "denominator. How do you get the denominator itself?",
    ),
    *_ways(
        _merge,
        "`exp` taken of each lse as it comes, with no guard for empty rows",
        "On paper it is right. In numbers, exp(800) is inf. And a row that is empty on both sides "
        "becomes NaN, by -inf minus -inf or by 0 / 0. Which number can you subtract from both lse "
        "before you take powers?",
        ("as it comes", "formula", "bare", "bare lse", "cleared after"),
        ("as it comes", "bare", "bare lse", "cleared after"),
        ("as it comes", "formula", "bare", "bare lse"),
        ("as it comes", "bare", "bare lse"),
    ),
    *_ways(
        _merge,
        "a NaN for rows that are empty on both sides",
        "Such a row gives -inf minus -inf, and 0 / 0 if you divide by its sum. Both are NaN. "
        "Which number could stand in for the -inf, and for a sum of 0?",
        ("bare", "bare lse"),
        ("formula", "bare"),
        ("bare",),
    ),
    *_ways(
        _merge,
        _CLEARED,
        "A half that saw keys wrote a NaN: somebody's mistake, and your 0 hides it. In an empty "
        "row, let no NaN arise. Which number could its exponents be measured from?",
        ("bare", "cleared after"),
        ("cleared before",),
        ("cleared after",),
    ),
    *_ways(
        _merge,
        "a stand-in that leaks into lse",
        _LEAKS_INTO_LSE,
        *((floor,) for floor in _FLOORS),
    ),
    *_ways(
        _merge,
        "taking exp of an lse as it comes",
        "exp(800) is inf, even in fp64. Only the ratio of the two denominators matters. What can "
        "you subtract from both logarithms first?",
        ("as it comes", "formula"),
        ("as it comes",),
    ),
    Misconception(
        _no_axis("N"),
        slip(_merge, "no axis"),
        "PyTorch lines up last axes, so a weight `[N]` meets the columns of an output `[N, DV]`, "
        "and not its rows. With one row it works by luck. How do you give a `[N]` a last axis of "
        "1?",
    ),
    Misconception(
        "an exchange of the two weights",
        slip(_merge, "swapped"),
        "The half with the smaller denominator counts more here. Which lse belongs to `o1`?",
    ),
    *_ways(
        _merge,
        "taking powers of two of a natural logarithm",
        "lse is a natural logarithm. Which function undoes that one?",
        ("base two, ln",),
        ("base two",),
    ),
    Misconception(
        "a weighted sum that was not divided",
        slip(_merge, "not divided"),
        "Your two weights are denominators, measured from the larger one. What do they sum to, "
        "and what should weights sum to?",
    ),
    Misconception(
        "an lse that forgets what was subtracted",
        slip(_merge, "no shift back"),
        "The lse is that of a sum with nothing subtracted. What did you take out before the "
        "powers?",
    ),
    Misconception(
        "the larger lse in place of the joint one",
        slip(_merge, "larger"),
        "Two denominators add up, so the joint lse is larger than either, by up to ln 2. What "
        "is the logarithm of their sum?",
    ),
    Misconception(
        "adding the two log-sum-exps",
        slip(_merge, "sum of lse"),
        "Adding logarithms multiplies the denominators. What should happen to the denominators "
        "instead?",
    ),
    Misconception(
        "averaging the two log-sum-exps",
        slip(_merge, "mean of lse"),
        "The joint row has more keys than either half, so its denominator is larger than both. "
        "How do you add what two logarithms stand for?",
    ),
)

MERGE_PARTIALS = TEXTS.exercise(
    "merge_partials",
    returns=("o", "lse"),
    minutes=6,
    difficulty=2,
    solution=merge_partials,
    cases=(
        Case(
            "one row, denominators 2 and 6",
            lambda: (
                torch.tensor([[0.0, 8.0]]),
                torch.tensor([math.log(2)]),
                torch.tensor([[4.0, 0.0]]),
                torch.tensor([math.log(6)]),
            ),
        ),
        Case(
            "two rows, each with its own denominators",
            lambda: (
                torch.tensor([[8.0, 8.0], [4.0, 4.0]]),
                torch.tensor([math.log(3), 0.0]),
                torch.tensor([[0.0, 4.0], [0.0, 8.0]]),
                torch.tensor([0.0, math.log(3)]),
            ),
        ),
        Case(
            "one row, log-sum-exps of 800",
            # in fp64: in fp32 a joint lse near 800 is rounded so far that right shares look wrong
            lambda: (
                torch.tensor([[2.0]], dtype=torch.float64),
                torch.tensor([800.0], dtype=torch.float64),
                torch.tensor([[6.0]], dtype=torch.float64),
                torch.tensor([800.0], dtype=torch.float64),
            ),
        ),
        Case(
            "one row, empty on both sides",
            lambda: (
                torch.tensor([[0.0]]),
                torch.tensor([-INF]),
                torch.tensor([[0.0]]),
                torch.tensor([-INF]),
            ),
        ),
        Case("three rows, 5 and 9 keys", lambda: (*_partial(10, 3, 5, 2), *_partial(20, 3, 9, 2))),
        Case(
            "rows empty on the left, on the right and on both sides",
            lambda: (
                *_with_empty(_partial(30, 4, 5, 2), [0, 2]),
                *_with_empty(_partial(40, 4, 3, 2), [1, 2]),
            ),
        ),
        Case(
            "one row, the second half saw keys and wrote a NaN",
            lambda: (
                torch.tensor([[5.0]]),
                torch.tensor([1.0]),
                torch.tensor([[math.nan]]),
                torch.tensor([1.0]),
            ),
        ),
    ),
    misconceptions=_MERGE_MISTAKES,
    picture=_between,
    combine=together(
        _MERGE_MISTAKES,
        {"average", "sum", "lse weighs", "swapped", "not divided"},
        {"no shift back", "larger", "sum of lse", "mean of lse", "floor 1e-20"},
        {"no shift back", "as it comes"},
        {"bare", "floor 1e-20"},
    ),
)


# -- 5: merging many --


def merge_many(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over all P sets of keys from the results over each."""
    lse_max = lse.amax(0)  # [N]
    shift = torch.where(lse_max == -torch.inf, 0.0, lse_max)  # [N]
    w = torch.exp(lse - shift)  # [P, N], the parts' denominators, up to a factor per row
    total = w.sum(0)  # [N]
    o = torch.where((lse == -torch.inf)[..., None], 0.0, o)  # [P, N, DV], 0 · NaN would be NaN
    o = (w[..., None] * o).sum(0) / torch.where(total == 0, 1.0, total)[:, None]  # [N, DV]
    return o, shift + torch.log(total)


def _many(slips: Slips, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_many` with slips."""
    if "only NaN" in slips:
        o = torch.where(o.isnan(), 0.0, o)
    elif "unwritten" not in slips:
        o = torch.where((lse == -INF)[..., None], 0.0, o)
    # -- weights --
    if "cleared before" in slips:
        o = o.nan_to_num()
    is_bare = "bare" in slips
    lse_max = lse.max() if "one max" in slips else lse.amax(0)
    shift = lse_max if is_bare else torch.where(lse_max == -INF, 0.0, lse_max)
    if "as it comes" in slips:
        shift = torch.zeros_like(lse_max)
    w = torch.exp(lse - shift)
    if "base two" in slips:
        w = torch.exp2(lse - shift)
    total = w.sum(0)
    # -- lse --
    whole = shift + torch.log(_floored(slips, total))
    if is_bare and "bare lse" not in slips:
        whole = torch.where(lse.amax(0) == -INF, -INF, whole)
    ways = {"no shift back": whole - shift, "larger": lse.amax(0), "sum of lse": lse.sum(0)}
    ways["mean lse"] = lse.mean(0)
    whole = next((ways[way] for way in ways if way in slips), whole)
    if "along the rows" in slips:
        w, total = torch.softmax(lse, 1), torch.ones_like(total)
        whole = torch.logsumexp(lse, 0)
    if slips & {"logsumexp", "lse along the rows"}:
        whole = torch.logsumexp(lse, 1 if "lse along the rows" in slips else 0)
    # -- output --
    if slips & {"average", "average of the seen", "sum"}:
        w, total = torch.ones_like(lse), torch.full_like(lse[0], len(lse))
        if "sum" in slips:
            total = torch.ones_like(total)
        if "average of the seen" in slips:
            w = (lse > -INF).to(o)
            total = w.sum(0)
    is_divided_bare = is_bare and "safe divisor" not in slips
    divisor = total if is_divided_bare else torch.where(total == 0, 1.0, total)
    if "no axis" in slips:
        return (w * o).sum(0) / total, whole
    mixed = w[..., None] * o
    if "cleared by weight" in slips:
        mixed = torch.where((w == 0)[..., None], 0.0, mixed)
    if "summed along the rows" in slips:
        return (torch.softmax(lse, 1)[..., None] * o).sum(1), whole
    mixed = mixed.mean(0) if "averaged" in slips else mixed.sum(0)
    merged = mixed if "not divided" in slips else mixed / divisor[:, None]
    return merged.nan_to_num() if "cleared after" in slips else merged, whole


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
        o[part, row], lse[part, row] = (math.nan, INF)[i % 2], -INF
    return o, lse


_MANY_MISTAKES = (
    Misconception(
        "a weight of 0 that meets a NaN",
        slip(_many, "unwritten"),
        "A part that saw no key has weight 0, but 0 times NaN is NaN. No weight can hide a "
        "number that was never written. What could stand in its place?",
    ),
    *_ways(
        _many,
        "a NaN set to 0 after the sum",
        "One part that was never written makes the whole sum NaN. Setting that to 0 throws away "
        "what the other parts have seen. When must it be cleared?",
        ("unwritten", "cleared after"),
    ),
    *_ways(
        _many,
        _CLEARED,
        "A part that saw keys wrote a NaN: somebody's mistake, and your 0 hides it. Only an "
        "output that was never written may be replaced. Which of the inputs tells?",
        ("bare", "cleared after"),
        ("cleared after",),
        ("cleared before",),
    ),
    Misconception(
        "a part left out where its weight is 0",
        slip(_many, "cleared by weight"),
        "A part far below the largest saw keys, and its weight still rounds to 0. It wrote a NaN, "
        "and you leave it out. Which of the inputs tells that a part saw no key?",
    ),
    Misconception(
        "a guard against NaN that lets inf through",
        slip(_many, "only NaN"),
        "What the memory held may be any number, and 0 times inf is NaN again. The outputs do "
        "not show which of them were written. What does?",
    ),
    *_ways(
        _many,
        "a NaN for a row that no part saw a key for",
        "Such a row has two chances of a NaN: -inf minus -inf (softmax does that inside), and "
        "0 / 0, as all its weights are 0. Which finite number could it be measured from, and what "
        "could its sum be divided by?",
        ("bare", "bare lse", "cleared after"),
        ("bare", "bare lse"),
        ("bare",),
    ),
    *_ways(
        _many,
        "parts without keys, and no guard at all",
        "The shares are right. But an output that was never written may be NaN. And a row without "
        "keys has two chances of one: -inf minus -inf (softmax does that inside), and 0 / 0. What "
        "do you put in place of each?",
        ("unwritten", "bare"),
        ("unwritten", "bare", "bare lse"),
    ),
    *_ways(
        _many,
        _no_axis("P", "N"),
        "PyTorch lines up last axes, so a weight `[P, N]` meets the last two axes of `[P, N, DV]`. "
        "How do you give the weights a last axis of 1?",
        ("no axis", "unwritten"),
        ("no axis",),
    ),
    *_ways(
        _many,
        "shares taken along the rows",
        "Your shares sum to 1 over the rows, and rows have nothing to do with each other. Along "
        "which axis of `lse` do the parts of one row lie?",
        ("summed along the rows", "lse along the rows", "unwritten"),
        ("summed along the rows", "lse along the rows"),
        ("summed along the rows", "unwritten"),
        ("summed along the rows",),
        ("along the rows", "lse along the rows", "unwritten"),
        ("along the rows", "lse along the rows"),
        ("along the rows", "unwritten"),
        ("along the rows",),
    ),
    *_ways(
        _many,
        "an lse summed along the rows",
        "Your output is right, but in your lse you joined the rows, not the parts. Along which "
        "axis of `lse` do the parts of one row lie?",
        ("lse along the rows",),
    ),
    *_ways(
        _many,
        "a stand-in that leaks into lse",
        _LEAKS_INTO_LSE,
        *((floor,) for floor in _FLOORS),
    ),
    *_ways(
        _many,
        "a plain average of the parts",
        "Each part was divided by its own denominator, and the parts count by those. Where can "
        "you find a part's denominator?",
        ("average", "mean lse", "unwritten"),
        ("average", "mean lse"),
        ("average", "unwritten"),
        ("average of the seen",),
        ("average",),
    ),
    *_ways(
        _many,
        "a mean of outputs that have their shares",
        "The shares of a row sum to 1 already. By what does a mean divide once more?",
        ("averaged", "bare", "unwritten"),
        ("averaged", "bare"),
        ("averaged",),
    ),
    *_ways(
        _many,
        "adding outputs that were already divided",
        "Each part is an average of values, so the sum is too large. What undoes each division?",
        ("sum", "unwritten"),
        ("sum",),
    ),
    Misconception(
        "taking exp of an lse as it comes",
        slip(_many, "as it comes"),
        "exp(800) is inf even in fp64, and exp(-800) is 0. Only the ratios within a row matter. "
        "What can you subtract first?",
    ),
    Misconception(
        "one maximum for all rows",
        slip(_many, "one max"),
        "Measured from the largest lse of all rows, a row that lies 800 lower has nothing but "
        "zeros. Do two rows have anything to do with each other?",
    ),
    *_ways(
        _many,
        "one maximum for all rows, and no stand-in where it is -inf",
        "Where no part saw a key, -inf minus -inf is NaN. And measured from the largest lse of "
        "all rows, a row far below it has nothing but zeros. What does each row need for itself?",
        ("one max", "bare", "safe divisor", "logsumexp"),
        ("one max", "bare", "logsumexp"),
        ("one max", "bare", "bare lse", "safe divisor"),
        ("one max", "bare", "bare lse"),
    ),
    *_ways(
        _many,
        "one maximum for all rows, and nothing against a NaN",
        "A row far below the largest lse of all rows has nothing but zeros. Then -inf minus -inf "
        "is NaN where no part saw a key, and 0 times an unwritten NaN is NaN, too. What does each "
        "row need for itself, and each part?",
        ("one max", "bare", "safe divisor", "logsumexp", "unwritten"),
        ("one max", "bare", "logsumexp", "unwritten"),
        ("one max", "bare", "bare lse", "safe divisor", "unwritten"),
    ),
    Misconception(
        "taking powers of two of a natural logarithm",
        slip(_many, "base two"),
        "lse is a natural logarithm. Which function undoes that one?",
    ),
    Misconception(
        "an lse that forgets what was subtracted",
        slip(_many, "no shift back"),
        "The lse is that of a sum with nothing subtracted. What did you take out before the "
        "powers?",
    ),
    Misconception(
        "the largest lse in place of the joint one",
        slip(_many, "larger"),
        "Denominators add up, so the joint lse is larger than each. What is the logarithm of "
        "their sum?",
    ),
    Misconception(
        "adding the log-sum-exps",
        slip(_many, "sum of lse"),
        "Adding logarithms multiplies the denominators. What should happen to the denominators "
        "instead?",
    ),
    Misconception(
        "a weighted sum that was not divided",
        slip(_many, "not divided"),
        "Your weights are denominators, up to one factor per row. What should weights sum to?",
    ),
)

MERGE_MANY = TEXTS.exercise(
    "merge_many",
    returns=("o", "lse"),
    minutes=10,
    difficulty=3,
    solution=merge_many,
    cases=(
        Case(
            "one row, three parts with denominators 1, 2 and 1",
            lambda: (
                torch.tensor([[[8.0]], [[4.0]], [[2.0]]]),
                torch.tensor([[0.0], [LN_2], [0.0]]),
            ),
        ),
        Case(
            "one row, two parts, the second of which saw no key",
            lambda: (torch.tensor([[[5.0]], [[math.nan]]]), torch.tensor([[1.0], [-INF]])),
        ),
        Case(
            "one row that no part saw a key for",
            lambda: (torch.full((2, 1, 1), 7.0), torch.full((2, 1), -INF)),
        ),
        Case(
            "four rows, three parts, some empty",
            lambda: _unwritten(_parts(70, 3, 4, 2), [(0, 1), (1, 2), (2, 2), (0, 3), (1, 3)]),
        ),
        Case(
            "rows at heights 800, 0 and -800",
            lambda: _parts(80, 3, 3, 2, lift=(800.0, 0.0, -800.0)),
        ),
        Case(
            "one row, two parts that saw keys, the second of which wrote a NaN",
            lambda: (torch.tensor([[[5.0]], [[math.nan]]]), torch.tensor([[1.0], [1.0]])),
        ),
        Case(
            "one row, two parts that saw keys, the second 1,600 lower and with a NaN",
            lambda: (torch.tensor([[[5.0]], [[math.nan]]]), torch.tensor([[800.0], [-800.0]])),
        ),
    ),
    misconceptions=_MANY_MISTAKES,
    combine=together(
        _MANY_MISTAKES,
        {"unwritten", "only NaN"},
        {"average", "sum", "not divided", "base two", "along the rows", "averaged"},
        {"average", "one max"},
        {"along the rows", "one max"},
        {"along the rows", "bare"},
        {"along the rows", "as it comes"},
        {"along the rows", "no shift back"},
        {"bare", "floor 1e-20"},
        {"floor 1e-20", "no shift back", "larger", "sum of lse"},
        {"as it comes", "one max"},
        {"as it comes", "no shift back"},
        {"no shift back", "larger", "sum of lse"},
        {"only NaN", "cleared after"},
    ),
)


EXERCISES = (ONLINE_STEP, GUARDED_STEP, ROW_LSE, MERGE_PARTIALS, MERGE_MANY)


# -- two mistakes at once --


def _own_and_half_rescaled(
    scores_max_prev: Tensor, running_sum: Tensor, acc_o: Tensor, acc_s: Tensor, v: Tensor,
    scale_log2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores_max = acc_s.max(1).values
    scores_scale = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, running_sum * scores_scale + p.sum(1), acc_o + p @ v


def _exp_and_divided(
    scores_max_prev: Tensor, running_sum: Tensor, acc_o: Tensor, acc_s: Tensor, v: Tensor,
    scale_log2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores_max = torch.maximum(scores_max_prev, acc_s.max(1).values)
    scores_scale = torch.exp((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp((acc_s - scores_max[:, None]) * scale_log2)
    running_sum = running_sum * scores_scale + p.sum(1)
    return scores_max, running_sum, (acc_o * scores_scale[:, None] + p @ v) / running_sum[:, None]


def _nothing_guarded_or_scaled(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max = torch.maximum(scores_max_prev, acc_s.max(1).values)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, torch.exp2(scores_max_prev - scores_max), p


def _zero_everywhere(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max = torch.maximum(scores_max_prev, acc_s.max(1).values)
    scores_max = torch.where(scores_max.isinf(), torch.zeros(()), scores_max)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, torch.exp2(scores_max_prev - scores_max), p


def _mean_and_larger(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return (o1 + o2) / 2, torch.maximum(lse1, lse2)


def _both_added(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return o1 + o2, lse1 + lse2


def _softmax_and_larger(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.softmax(lse, 0).unsqueeze(-1) * o).sum(0), lse.max(0).values


def _raw_and_unwritten(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.exp(lse)
    total = w.sum(0)
    merged = (w.unsqueeze(-1) * o).sum(0) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return merged, torch.log(total)


DOUBLES = (
    Double(
        "online_step",
        _own_and_half_rescaled,
        (
            "the chunk's own maximum in place of the running one",
            "rescaling the denominator but not the accumulator",
        ),
    ),
    Double(
        "online_step",
        _exp_and_divided,
        (
            "folding log2(e) in a second time, or taking exp where exp2 is meant",
            "a division inside the step",
        ),
    ),
    Double(
        "guarded_step",
        _nothing_guarded_or_scaled,
        ("-inf minus -inf, which is NaN", "a factor without scale_log2"),
    ),
    Double(
        "guarded_step",
        _zero_everywhere,
        ("a stand-in that leaks into the state", "a factor without scale_log2"),
    ),
    Double(
        "merge_partials",
        _mean_and_larger,
        ("a plain average of the two outputs", "the larger lse in place of the joint one"),
    ),
    Double(
        "merge_partials",
        _both_added,
        ("adding two outputs that were already divided", "adding the two log-sum-exps"),
    ),
    Double(
        "merge_many",
        _softmax_and_larger,
        (
            "parts without keys, and no guard at all",
            "the largest lse in place of the joint one",
        ),
    ),
    Double(
        "merge_many",
        _raw_and_unwritten,
        ("taking exp of an lse as it comes", "a weight of 0 that meets a NaN"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    numbers_carried={"choices": (2, 66, 130, 1024, 65_536)},
    failing_drop={"choices": (100, 127, 128, 200)},
)
