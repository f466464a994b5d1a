"""Exercises of chapter 03: base two, one step of the streaming softmax, the fully masked chunk,
merging two results and many.

A mistake that can be made in several ways stands here once per way, under one name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
INF = math.inf


def _randn(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * spread
    )


def _ways(name: str, hint: str, *wrongs: Callable) -> tuple[Misconception, ...]:
    """One mistake, made in several ways."""
    return tuple(Misconception(name, wrong, hint) for wrong in wrongs)


# -- 1: base two --


def softmax_base_two(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weights and natural log-sum-exp of `acc_s * scale`, row by row, with exp2 and log2."""
    scale_log2 = scale * math.log2(math.e)
    scores_max = acc_s.amax(1)  # [G]
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)  # [G, BS]
    total = p.sum(1)  # [G]
    # [G], log2 units to natural ones
    lse = (scores_max * scale_log2 + torch.log2(total)) * math.log(2)
    return p / total[:, None], lse


def _pieces(acc_s: Tensor, scale_log2: float) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, weights, and log2 of the denominator."""
    scores_max = acc_s.amax(1)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return scores_max, p / p.sum(1, keepdim=True), torch.log2(p.sum(1))


def _wrong_lse(lse: Callable[[Tensor, Tensor, float], Tensor]) -> Callable:
    """The right weights with `lse(scores_max, log2 of the denominator, scale)`."""

    def wrong(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores_max, p, log2_total = _pieces(acc_s, scale * LOG2_E)
        return p, lse(scores_max, log2_total, scale)

    return wrong


def _no_log2_e(lse: Callable[[Tensor, Tensor, float], Tensor]) -> Callable:
    """The weights of exp2 without log2(e), with `lse(...)`."""

    def wrong(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores_max, p, log2_total = _pieces(acc_s, scale)
        return p, lse(scores_max, log2_total, scale)

    return wrong


def _divided_by_log2_e(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return softmax_base_two(acc_s, scale / LOG2_E**2)


def _scaled_twice(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return softmax_base_two(acc_s * scale, scale)


def _measured_from(reference: Callable[[Tensor, float], Tensor]) -> Callable:
    """Exponents from `acc_s * scale_log2 - reference(acc_s, scale_log2)`, and an lse that adds the
    same back."""

    def wrong(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        shift = reference(acc_s, scale * LOG2_E)
        p = torch.exp2(acc_s * (scale * LOG2_E) - shift)
        return p / p.sum(1, keepdim=True), (shift.flatten() + torch.log2(p.sum(1))) * LN_2

    return wrong


def _unscaled_max(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores_max, scale_log2 = acc_s.amax(1), scale * LOG2_E
    p = torch.exp2(acc_s * scale_log2 - scores_max[:, None])
    return p / p.sum(1, keepdim=True), (scores_max * scale_log2 + torch.log2(p.sum(1))) * LN_2


def _not_normalised(acc_s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    p, lse = softmax_base_two(acc_s, scale)
    return p / p.amax(1, keepdim=True), lse  # the largest power is 2^0


SOFTMAX_BASE_TWO = Exercise(
    name="softmax_base_two",
    statement=r"""
Write softmax the way a kernel does: use `torch.exp2` and `torch.log2`.

- `acc_s` `[G, BS]`: plain dot products, not yet scaled; every score is finite.
- `scale`: the factor on every score, to be folded with $\log_2 e$ once.

Return `(p, lse)`: the weights `[G, BS]`, each row summing to 1, equal to `softmax(acc_s * scale)`;
and the **natural** log-sum-exp `[G]` of `acc_s * scale`. Scores may be in the thousands.
""",
    minutes=5,
    difficulty=1,
    solution=softmax_base_two,
    cases=(
        Case("one row of two scores, scale 0.5", lambda: (torch.tensor([[1.0, 3.0]]), 0.5)),
        Case("three rows of seven scores, scale 1/8", lambda: (_randn(0, 3, 7, spread=8.0), 0.125)),
        Case(
            "two rows of scores in the thousands, in fp32",
            lambda: (torch.tensor([[3000.0, 1000.0, -2000.0], [-4000.0, -3000.0, -3500.0]]), 0.5),
        ),
    ),
    misconceptions=(
        *_ways(
            "exp2 without log2(e)",
            "The rows sum to 1, so nothing looks wrong, but these are powers of two of the "
            "scores, not of e: a softmax at a higher "
            "temperature. exp(x) is exp2 of something a little larger than x; fold that factor "
            "into the scale.",
            _no_log2_e(
                lambda scores_max, log2_total, scale: (scores_max * scale + log2_total) * LN_2
            ),
            _no_log2_e(lambda scores_max, log2_total, scale: scores_max * scale + log2_total),
            _no_log2_e(
                lambda scores_max, log2_total, scale: scores_max * scale + log2_total * LN_2
            ),
        ),
        Misconception(
            "dividing by log2(e) where multiplying is meant",
            _divided_by_log2_e,
            "e is more than 2, so 2 needs the larger exponent to reach the same number. Write e "
            "as a power of two first.",
        ),
        Misconception(
            "a softmax with no maximum subtracted",
            _measured_from(lambda acc_s, scale_log2: torch.zeros(len(acc_s), 1, dtype=acc_s.dtype)),
            "It holds while the scores are small. In fp32 2^128 is inf and inf / inf is NaN; far "
            "below zero every power is 0, and "
            "0 / 0 is NaN as well. Measure each row's exponents from something that makes the "
            "largest of them 0.",
        ),
        Misconception(
            "one maximum for all rows",
            _measured_from(
                lambda acc_s, scale_log2: acc_s.max().expand(len(acc_s), 1) * scale_log2
            ),
            "Each row is a softmax of its own. A row that lies far below the largest score of "
            "another has nothing left but zeros.",
        ),
        *_ways(
            "a maximum subtracted without its scale",
            "acc_s holds plain dot products, so its maximum is one too: both have to be scaled "
            "before they are subtracted, or "
            "subtracted first and scaled together. The weights cannot tell, as long as nothing "
            "overflows or vanishes.",
            _unscaled_max,
            _measured_from(lambda acc_s, scale_log2: acc_s.amax(1, keepdim=True)),
        ),
        Misconception(
            "a softmax whose powers were not divided by their sum",
            _not_normalised,
            "These are the powers, measured from the row's maximum: the largest is 1. Weights "
            "sum to 1.",
        ),
        Misconception(
            "an lse left in log2 units",
            _wrong_lse(
                lambda scores_max, log2_total, scale: scores_max * scale * LOG2_E + log2_total
            ),
            "The weights are right. But whoever reads lse (the backward pass, a merge) expects a "
            "natural logarithm: convert once, "
            "at the end. How many natural units is one log2 unit?",
        ),
        *_ways(
            "an lse that adds natural units and log2 units",
            "The weights are right. In lse, one of the two terms is a natural logarithm and the "
            "other is in log2 units: bring both "
            "to one unit before you add them.",
            _wrong_lse(lambda scores_max, log2_total, scale: scores_max * scale + log2_total),
            _wrong_lse(
                lambda scores_max, log2_total, scale: (
                    scores_max * scale * LOG2_E + log2_total * LN_2
                )
            ),
            _wrong_lse(
                lambda scores_max, log2_total, scale: (scores_max * scale + log2_total) * LN_2
            ),
        ),
        Misconception(
            "an lse converted the wrong way",
            _wrong_lse(
                lambda scores_max, log2_total, scale: (
                    (scores_max * scale * LOG2_E + log2_total) * LOG2_E
                )
            ),
            "The weights are right. One log2 unit is a factor of 2, one natural unit a factor of "
            "e, which is more: the same "
            "number counts fewer natural units.",
        ),
        *_ways(
            "an lse that forgets the scale on the maximum",
            "acc_s holds plain dot products, so its maximum is one too. The lse is about scaled "
            "scores.",
            _wrong_lse(lambda scores_max, log2_total, scale: scores_max + log2_total * LN_2),
            _wrong_lse(lambda scores_max, log2_total, scale: (scores_max + log2_total) * LN_2),
        ),
        *_ways(
            "an lse that forgets the maximum",
            "The weights are right. Your denominator is measured from the maximum, the lse is "
            "that of the sum with nothing "
            "subtracted: what was taken out has to come back.",
            _wrong_lse(lambda scores_max, log2_total, scale: log2_total * LN_2),
            _wrong_lse(lambda scores_max, log2_total, scale: log2_total),
        ),
        Misconception(
            "scaling twice",
            _scaled_twice,
            "The scores were multiplied by scale, and then once more by scale_log2, which "
            "contains it already.",
        ),
    ),
)


# -- 2: one step --


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
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)  # [G, BS]
    running_sum = running_sum * scores_scale + p.sum(1)  # [G]
    acc_o = acc_o * scores_scale[:, None] + p @ v  # [G, DV]
    return scores_max, running_sum, acc_o


State = tuple[Tensor, Tensor, Tensor]


def _step(
    state: State,
    acc_s: Tensor,
    v: Tensor,
    scale_log2: float,
    *,
    own: bool = False,
    logsum_by: int = 1,
    acc_o_by: int = 1,
) -> State:
    """`online_step` with its mistakes: the chunk's own maximum, and which power of `scores_scale`
    goes on each sum (1 is right)."""
    scores_max_prev, running_sum, acc_o = state
    own_max = acc_s.amax(1)
    scores_max = own_max if own else torch.maximum(scores_max_prev, own_max)
    scores_scale = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    running_sum = (running_sum * scores_scale**logsum_by if logsum_by else running_sum) + p.sum(1)
    acc_o = (acc_o * scores_scale[:, None] ** acc_o_by if acc_o_by else acc_o) + p @ v
    return scores_max, running_sum, acc_o


def _no_rescale(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step(
        (scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2, logsum_by=0, acc_o_by=0
    )


def _only_running_sum(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step((scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2, acc_o_by=0)


def _only_acc_o(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step((scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2, logsum_by=0)


def _upside_down(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step(
        (scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2, logsum_by=-1, acc_o_by=-1
    )


def _own_max(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step((scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2, own=True)


def _natural_exp(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step((scores_max_prev, running_sum, acc_o), acc_s, v, scale_log2 * LOG2_E)


def _lost(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _step((scores_max_prev, running_sum * 0, acc_o * 0), acc_s, v, scale_log2)


def _everything_rescaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    scores_scale = torch.exp2((scores_max_prev - scores_max) * scale_log2)
    p = torch.exp2((acc_s - scores_max[:, None]) * scale_log2)
    return (
        scores_max,
        (running_sum + p.sum(1)) * scores_scale,
        (acc_o + p @ v) * scores_scale[:, None],
    )


def _divided(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max, running_sum, acc_o = online_step(
        scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2
    )
    return scores_max, running_sum, acc_o / running_sum[:, None]


def _multiplied_and_divided(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    return _divided(
        scores_max_prev, running_sum, acc_o * running_sum[:, None], acc_s, v, scale_log2
    )


def _factor_unscaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor = torch.exp2(scores_max_prev - scores_max)
    _, scores_sum, summed = _step((scores_max, running_sum * 0, acc_o * 0), acc_s, v, scale_log2)
    return scores_max, running_sum * factor + scores_sum, acc_o * factor[:, None] + summed


def _max_unscaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    factor, p = (
        torch.exp2(scores_max_prev - scores_max),
        torch.exp2(acc_s * scale_log2 - scores_max[:, None]),
    )
    return scores_max, running_sum * factor + p.sum(1), acc_o * factor[:, None] + p @ v


def _powers_unscaled(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max, scores_scale, _ = guarded_step(scores_max_prev, acc_s, scale_log2)
    p = torch.exp2(acc_s - scores_max[:, None])
    return scores_max, running_sum * scores_scale + p.sum(1), acc_o * scores_scale[:, None] + p @ v


def _powers_from_old_max(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    scores_max, scores_scale, _ = guarded_step(scores_max_prev, acc_s, scale_log2)
    p = torch.exp2((acc_s - scores_max_prev[:, None]) * scale_log2)
    return scores_max, running_sum * scores_scale + p.sum(1), acc_o * scores_scale[:, None] + p @ v


def _chunk_max_for_all_rows(scores_max_prev, running_sum, acc_o, acc_s, v, scale_log2):
    level = torch.maximum(scores_max_prev, acc_s.max())
    scores_scale, p = (
        torch.exp2((scores_max_prev - level) * scale_log2),
        torch.exp2((acc_s - level[:, None]) * scale_log2),
    )
    return level, running_sum * scores_scale + p.sum(1), acc_o * scores_scale[:, None] + p @ v


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


ONLINE_STEP = Exercise(
    name="online_step",
    statement=r"""
Take one chunk of keys into the state: the heart of every kernel in this course.

- `scores_max_prev` `[G]`, `running_sum` `[G]`, `acc_o` `[G, DV]`: the state so far (`-inf`, `0`,
  `0` before the first chunk); the maximum is unscaled, like the scores.
- `acc_s` `[G, BS]`: this chunk's unscaled scores, all finite. `v` `[BS, DV]`: its values.
- `scale_log2`: the scale, times $\log_2 e$.

Return the new `(scores_max, running_sum, acc_o)`. Nothing is divided yet.
""",
    minutes=8,
    difficulty=2,
    solution=online_step,
    cases=(
        Case(
            "one row, the new chunk holds a larger score than the old maximum",
            lambda: _tensors([3.0], [1.25], [[6.0]], [[2.0, 5.0]], [[0.0], [16.0]]),
        ),
        Case(
            "the same row with scale_log2 = 0.5",
            lambda: _tensors([3.0], [1.5], [[6.0]], [[1.0, 5.0]], [[0.0], [16.0]], scale_log2=0.5),
        ),
        Case(
            "one row, the new chunk lies lower than the old maximum",
            lambda: _tensors([5.0], [1.125], [[16.0]], [[1.0, 3.0]], [[8.0], [4.0]]),
        ),
        Case(
            "the first chunk",
            lambda: _tensors(
                [-INF] * 2,
                [0.0] * 2,
                [[0.0] * 3] * 2,
                [[0.5, -2.0], [1.0, 3.0]],
                [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
            ),
        ),
        Case(
            "three rows, one whose maximum rises, two whose maximum stays",
            lambda: (
                *_after(4, 3, 2, [0.1, 9.0, 20.0]),
                _randn(6, 3, 5),
                _randn(7, 5, 2),
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
    misconceptions=(
        Misconception(
            "a missing rescale",
            _no_rescale,
            "What was summed so far is measured from the old maximum, the new terms from the new "
            "one: bring the old sums to the "
            "new reference before adding. When the largest score comes first the maximum never "
            "moves and the factor is 1, which is "
            "why descending scores hide this mistake.",
        ),
        Misconception(
            "rescaling the denominator but not the accumulator",
            _only_running_sum,
            "running_sum and acc_o are the same sum, without the values and with them. What "
            "rescales "
            "one must rescale the other.",
        ),
        Misconception(
            "rescaling the accumulator but not the denominator",
            _only_acc_o,
            "running_sum and acc_o are the same sum, without the values and with them. What "
            "rescales "
            "one must rescale the other.",
        ),
        Misconception(
            "a rescale factor upside down",
            _upside_down,
            "The maximum can only rise, so old terms can only shrink: the factor is at most 1. "
            "Check the order of the subtraction.",
        ),
        Misconception(
            "the chunk's own maximum in place of the running one",
            _own_max,
            "In exact arithmetic this gives the same output in the end, but the factor can now "
            "exceed 1, and in fp32 it is inf as "
            "soon as a chunk lies 128 log2 units below what came before. Which maximum can never "
            "fall?",
        ),
        Misconception(
            "folding log2(e) in a second time (or exp where exp2 is meant)",
            _natural_exp,
            "scale_log2 contains log2(e) already: the base of the power is two.",
        ),
        Misconception(
            "a rescale factor without scale_log2",
            _factor_unscaled,
            "The new powers are right. The old sums hold powers of scaled scores, so the step "
            "from the old maximum to the new one "
            "has to be scaled as well.",
        ),
        Misconception(
            "new powers without scale_log2",
            _powers_unscaled,
            "The factor on the old sums is right. The scores of this chunk are plain dot "
            "products too: their distance from the "
            "maximum has to be scaled before it becomes an exponent.",
        ),
        Misconception(
            "new powers measured from the old maximum",
            _powers_from_old_max,
            "The old sums are brought to the new maximum, so the new terms have to be measured "
            "from it as well. No power may "
            "exceed 1.",
        ),
        Misconception(
            "one maximum for all rows",
            _chunk_max_for_all_rows,
            "Each row has a maximum of its own. A row that lies far below the largest score of "
            "another has nothing left but zeros.",
        ),
        Misconception(
            "a maximum subtracted without its scale",
            _max_unscaled,
            "acc_s and both maxima are plain dot products: whatever is done to one must be done "
            "to the others before it becomes an "
            "exponent.",
        ),
        Misconception(
            "rescaling the new terms as well",
            _everything_rescaled,
            "The new terms are measured from the new maximum already. Only what was summed "
            "before has to change its unit.",
        ),
        Misconception(
            "a step that loses the old sums",
            _lost,
            "What comes back is this chunk's sum alone. The state is what all chunks so far have "
            "given: rescale it and add.",
        ),
        *_ways(
            "a division inside the step",
            "acc_o is the numerator so far and stays undivided until the row ends: one division "
            "per row, not one per chunk. What "
            "comes in was not divided either.",
            _divided,
            _multiplied_and_divided,
        ),
    ),
)


# -- 3: the fully masked chunk --


def guarded_step(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(scores_max, scores_scale, p)` of one chunk in which any key may be masked with `-inf`."""
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))  # [G]
    shift = torch.where(scores_max == -torch.inf, 0.0, scores_max)  # [G], any finite number does
    scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)  # [G]
    p = torch.exp2((acc_s - shift[:, None]) * scale_log2)  # [G, BS]
    return scores_max, scores_scale, p


def _measured(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float, scores_max: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A step that hands on `scores_max` and measures exponents from `shift`."""
    scores_scale = torch.exp2((scores_max_prev - shift) * scale_log2)
    return scores_max, scores_scale, torch.exp2((acc_s - shift[:, None]) * scale_log2)


def _unguarded(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
    return _measured(scores_max_prev, acc_s, scale_log2, scores_max, scores_max)


def _only_p(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, _, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return scores_max, _unguarded(scores_max_prev, acc_s, scale_log2)[1], p


def _only_scores_scale(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, scores_scale, _ = guarded_step(scores_max_prev, acc_s, scale_log2)
    return scores_max, scores_scale, _unguarded(scores_max_prev, acc_s, scale_log2)[2]


def _large_negative(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _unguarded(scores_max_prev.clamp(min=-1e30), acc_s.clamp(min=-1e30), scale_log2)


def _max_at_least_zero(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max = torch.maximum(scores_max_prev, acc_s.amax(1)).clamp(min=0)
    return _measured(scores_max_prev, acc_s, scale_log2, scores_max, scores_max)


def _zero_for_empty(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, scores_scale, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return torch.where(scores_max == -INF, 0.0, scores_max), scores_scale, p


def _floor(floor: float) -> Callable:
    def wrong(
        scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
        return _measured(
            scores_max_prev, acc_s, scale_log2, scores_max, scores_max.clamp(min=floor)
        )

    return wrong


def _large_negative_for_empty(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, scores_scale, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return torch.where(scores_max == -INF, -1e30, scores_max), scores_scale, p


def _own_chunk_guarded(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max = acc_s.amax(1)
    return _measured(
        scores_max_prev,
        acc_s,
        scale_log2,
        scores_max,
        torch.where(scores_max == -INF, 0.0, scores_max),
    )


def _factor_one_while_empty(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, scores_scale, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return scores_max, torch.where(scores_max == -INF, 1.0, scores_scale), p


def _factor_one_if_was_empty(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, scores_scale, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return scores_max, torch.where(scores_max_prev == -INF, 1.0, scores_scale), p


def _factor_without_scale(
    scores_max_prev: Tensor, acc_s: Tensor, scale_log2: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores_max, _, p = guarded_step(scores_max_prev, acc_s, scale_log2)
    return scores_max, guarded_step(scores_max_prev, acc_s, 1.0)[1], p


GUARDED_STEP = Exercise(
    name="guarded_step",
    statement=r"""
Make the exponents of a step safe when a row sees no key, in this chunk or in any chunk so far.

- `scores_max_prev` `[G]`: the running maximum so far, `-inf` for a row that has seen no key.
- `acc_s` `[G, BS]`: unscaled scores, `-inf` where a key is masked; possibly a whole row of them.
- `scale_log2`: as before.

Return `(scores_max, scores_scale, p)`: the new running maximum `[G]` (still `-inf` where no key was
seen), the factor `[G]` on the old sums, and the powers `[G, BS]`, exactly 0 for masked keys. No
`NaN` anywhere. Where the sums are still 0 the factor is 0.
""",
    minutes=6,
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
            lambda: (torch.tensor([1.0]), torch.tensor([[3.0, -INF]]), 0.5),
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
    misconceptions=(
        Misconception(
            "-inf minus -inf, which is NaN",
            _unguarded,
            "As long as the maximum is -inf there is nothing to measure from. The powers should "
            "come out 0: which number could "
            "stand in for the maximum in the exponent, and only there?",
        ),
        Misconception(
            "a large negative number in place of -inf",
            _large_negative,
            "In a row of nothing but -1e30 the masked keys are the largest ones, and exp2(0) = 1 "
            "gives each of them weight. "
            "-inf is the only score that no maximum can lift.",
        ),
        Misconception(
            "a maximum that is never below 0",
            _max_at_least_zero,
            "No NaN, but when all true scores are far below zero every power now underflows to "
            "0, and a row with visible keys "
            "looks empty. Replace the maximum only where it is -inf.",
        ),
        *_ways(
            "a floor under the maximum, below which true scores may lie",
            "No NaN, and any finite number may stand in for -inf. But a clamp also replaces true "
            "maxima that lie lower, and then "
            "every power of such a row underflows to 0. Replace the maximum only where it is -inf.",
            _floor(0.0),
            _floor(-1e4),
        ),
        *_ways(
            "a replacement that leaks into the state",
            "The powers are right, but a row that has seen nothing now claims a finite maximum. "
            "Keep the stand-in to the "
            "exponents, and hand on -inf.",
            _zero_for_empty,
            _large_negative_for_empty,
        ),
        Misconception(
            "the chunk's own maximum in place of the running one",
            _own_chunk_guarded,
            "A fully masked chunk must leave a row with a past as it was: factor 1, maximum "
            "unchanged.",
        ),
        Misconception(
            "a guard on p that the factor lacks",
            _only_p,
            "The powers are right, but where a row has seen nothing the factor is still "
            "exp2(-inf - (-inf)). Both exponents are "
            "measured from the same number.",
        ),
        Misconception(
            "a guard on the factor that p lacks",
            _only_scores_scale,
            "The factor is right, but where a row has seen nothing the powers are still "
            "exp2(-inf - (-inf)). Both exponents are "
            "measured from the same number.",
        ),
        *_ways(
            "a factor of 1 for a row that had seen no key",
            "It does no harm, since both sums are 0 there, but it is a special case that nobody "
            "needs: once the exponent is "
            "measured from a finite number, 2^-inf = 0 comes out by itself. The statement asks "
            "for that 0.",
            _factor_one_while_empty,
            _factor_one_if_was_empty,
        ),
        Misconception(
            "a factor without scale_log2",
            _factor_without_scale,
            "The powers are right. The factor is a power of scaled scores too: when the maximum "
            "rises by 2, how many log2 units "
            "is that?",
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


def _merged(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs mixed by given weights, with the right lse."""
    return (o1 * w1[:, None] + o2 * w2[:, None]) / (w1 + w2)[:, None], torch.logaddexp(lse1, lse2)


def _average(o1, lse1, o2, lse2):
    return _merged(o1, lse1, o2, lse2, torch.ones_like(lse1), torch.ones_like(lse2))


def _weights_are_lse(o1, lse1, o2, lse2):
    return _merged(o1, lse1, o2, lse2, lse1, lse2)


def _sum_of_outputs(o1, lse1, o2, lse2):
    return o1 + o2, torch.logaddexp(lse1, lse2)


def _weights(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What both are measured from, and the two weights."""
    lse_max = torch.maximum(lse1, lse2)
    shift = torch.where(lse_max == -INF, 0.0, lse_max)
    return shift, torch.exp(lse1 - shift), torch.exp(lse2 - shift)


def _not_divided(o1, lse1, o2, lse2):
    _, w1, w2 = _weights(lse1, lse2)
    return o1 * w1[:, None] + o2 * w2[:, None], merge_partials(o1, lse1, o2, lse2)[1]


def _lse_without_max(o1, lse1, o2, lse2):
    _, w1, w2 = _weights(lse1, lse2)
    return merge_partials(o1, lse1, o2, lse2)[0], torch.log(w1 + w2)


def _larger_lse(o1, lse1, o2, lse2):
    return merge_partials(o1, lse1, o2, lse2)[0], torch.maximum(lse1, lse2)


def _sum_of_lse(o1, lse1, o2, lse2):
    return merge_partials(o1, lse1, o2, lse2)[0], lse1 + lse2


def _no_guard(o1, lse1, o2, lse2):
    lse_max = torch.maximum(lse1, lse2)
    return _merged(o1, lse1, o2, lse2, torch.exp(lse1 - lse_max), torch.exp(lse2 - lse_max))


def _no_guard_at_all(o1, lse1, o2, lse2):
    o, _ = _no_guard(o1, lse1, o2, lse2)
    lse_max = torch.maximum(lse1, lse2)
    return o, lse_max + torch.log(torch.exp(lse1 - lse_max) + torch.exp(lse2 - lse_max))


def _no_max(o1, lse1, o2, lse2):
    w1, w2 = torch.exp(lse1), torch.exp(lse2)
    total = w1 + w2
    return (o1 * w1[:, None] + o2 * w2[:, None]) / torch.where(total == 0, 1.0, total)[
        :, None
    ], torch.log(total)


def _swapped(o1, lse1, o2, lse2):
    o, _ = merge_partials(o1, lse2, o2, lse1)
    return o, torch.logaddexp(lse1, lse2)


def _powers_of_two(logarithm: Callable[[Tensor], Tensor]) -> Callable:
    """`exp2` of a natural log-sum-exp; the new one from `logarithm` of the sum."""

    def wrong(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = merge_partials(o1, lse1 * LN_2, o2, lse2 * LN_2)  # 2^lse is e^(lse · ln 2)
        shift = _weights(lse1, lse2)[0]
        return o, shift + logarithm(torch.exp(lse - shift * LN_2))

    return wrong


def _between(arguments: tuple, got: object, expected: object) -> Picture:
    """The first rows and columns of a merge as points between the two outputs they come from."""
    (o1, lse1, o2, lse2), o = arguments, got[0]
    G, DV = o1.shape
    apart = int((~torch.isclose(o, expected[0])).sum())
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
    return Picture(
        figure,
        f"{apart} of {o.numel()} merged outputs are not where the parts' shares put them{lost}",
    )


def _partial(seed: int, N: int, M: int, DV: int, lift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Output and lse of `N` rows over `M` random keys."""
    scores = _randn(seed, N, M, spread=2.0) + lift
    return torch.softmax(scores, 1) @ _randn(seed + 1, M, DV), torch.logsumexp(scores, 1)


def _with_empty(parts: tuple[Tensor, Tensor], rows: list[int]) -> tuple[Tensor, Tensor]:
    o, lse = parts
    o[rows], lse[rows] = 0.0, -INF
    return o, lse


MERGE_PARTIALS = Exercise(
    name="merge_partials",
    statement=r"""
Two programs attended to two disjoint halves of the keys. Join their results as if one program had
read all keys.

- `o1`, `o2` `[N, DV]`: the outputs, each already divided by its own denominator.
- `lse1`, `lse2` `[N]`: their natural log-sum-exp, from $-\infty$ (the row saw no key there; its
  output is 0) to several hundred.

Return `(o, lse)`: `[N, DV]` and `[N]`. Rows empty on both sides give `o = 0`, `lse = -inf`, not
`NaN`.
""",
    minutes=5,
    difficulty=2,
    solution=merge_partials,
    cases=(
        Case(
            "one row, the second half holds three quarters of the denominator",
            lambda: (
                torch.tensor([[0.0, 8.0]]),
                torch.tensor([0.0]),
                torch.tensor([[4.0, 0.0]]),
                torch.tensor([math.log(3)]),
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
            "log-sum-exps near 800",
            lambda: (*_partial(50, 2, 5, 3, lift=800.0), *_partial(60, 2, 5, 3, lift=799.0)),
        ),
    ),
    misconceptions=(
        Misconception(
            "a plain average of the two outputs",
            _average,
            "Each half was divided by its own denominator. A half with a larger denominator held "
            "more of the attention, and lse is "
            "that denominator's logarithm.",
        ),
        Misconception(
            "adding two outputs that were already divided",
            _sum_of_outputs,
            "o1 and o2 are both averages of values; their sum is up to twice too large. Undo "
            "each division first: multiply by its "
            "own denominator, add, divide by the sum of both.",
        ),
        Misconception(
            "using lse itself as the weight",
            _weights_are_lse,
            "lse is the logarithm of a denominator. It may be negative, or zero; a weight may "
            "not. Take the denominator itself.",
        ),
        *_ways(
            "a NaN for rows that are empty on both sides",
            "There the larger lse is -inf, and -inf minus -inf is NaN: measure from a finite "
            "number, and do not divide by 0.",
            _no_guard,
            _no_guard_at_all,
        ),
        Misconception(
            "taking exp of an lse as it comes",
            _no_max,
            "exp(800) is inf even in fp64. Only the ratio of the two denominators matters: "
            "subtract something from both first.",
        ),
        Misconception(
            "an exchange of the two weights",
            _swapped,
            "The half with the larger lse is the one that counts more.",
        ),
        *_ways(
            "taking powers of two of a natural logarithm",
            "lse is stored as a natural logarithm. Either use exp and log, or convert it to log2 "
            "units first.",
            _powers_of_two(torch.log2),
            _powers_of_two(torch.log),
        ),
        Misconception(
            "a weighted sum that was not divided",
            _not_divided,
            "Your two weights are right, but they do not sum to 1 yet: they are denominators, "
            "measured from the larger one.",
        ),
        Misconception(
            "an lse that forgets what was subtracted",
            _lse_without_max,
            "The output is right. The lse is that of the sum with nothing subtracted: what was "
            "taken out has to come back.",
        ),
        Misconception(
            "the larger lse in place of the joint one",
            _larger_lse,
            "The output is right. But two denominators add up: the joint lse is larger than "
            "either, by up to ln 2.",
        ),
        Misconception(
            "adding the two log-sum-exps",
            _sum_of_lse,
            "The output is right. But adding logarithms multiplies the denominators, and it is "
            "the denominators that add up.",
        ),
    ),
    picture=_between,
)


# -- 5: merging many --


def merge_many(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over all S sets of keys from the results over each."""
    lse_max = lse.amax(0)  # [N]
    shift = torch.where(lse_max == -torch.inf, 0.0, lse_max)  # [N]
    w = torch.exp(lse - shift)  # [S, N], the parts' denominators, up to a factor per row
    total = w.sum(0)  # [N]
    o = torch.where((lse == -torch.inf)[..., None], 0.0, o)  # [S, N, DV], 0 · NaN would be NaN
    o = (w[..., None] * o).sum(0) / torch.where(total == 0, 1.0, total)[:, None]  # [N, DV]
    return o, shift + torch.log(total)


def _mixed(o: Tensor, w: Tensor) -> Tensor:
    return (w[..., None] * o).sum(0)


def _written(o: Tensor, lse: Tensor) -> Tensor:
    """The outputs with 0 where a part saw no key."""
    return torch.where((lse == -INF)[..., None], 0.0, o)


def _zero_times_nan(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    lse_max = lse.amax(0)
    w = torch.exp(lse - torch.where(lse_max == -INF, 0.0, lse_max))
    total = w.sum(0)
    return _mixed(o, w) / torch.where(total == 0, 1.0, total)[:, None], merge_many(o, lse)[1]


def _nan_cleared_after(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged, whole = _zero_times_nan(o, lse)
    return merged.nan_to_num(), whole


def _inf_let_through(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return _zero_times_nan(torch.where(o.isnan(), 0.0, o), lse)


def _softmax_of_nothing(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return _mixed(_written(o, lse), torch.softmax(lse, 0)), torch.logsumexp(lse, 0)


def _nothing_guarded(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return _mixed(o, torch.softmax(lse, 0)), torch.logsumexp(lse, 0)


def _no_shift_anywhere(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.exp(lse - lse.amax(0))
    return _mixed(_written(o, lse), w / w.sum(0)), lse.amax(0) + torch.log(w.sum(0))


def _mean(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return _written(o, lse).mean(0), merge_many(o, lse)[1]


def _mean_as_is(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return o.mean(0), merge_many(o, lse)[1]


def _sum(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return _written(o, lse).sum(0), merge_many(o, lse)[1]


def _as_it_comes(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.exp(lse)
    total = w.sum(0)
    return _mixed(_written(o, lse), w) / torch.where(total == 0, 1.0, total)[:, None], torch.log(
        total
    )


def _one_maximum(guard: bool) -> Callable:
    def wrong(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        shift = torch.where(lse.max() == -INF, 0.0, lse.max()) if guard else lse.max()
        w = torch.exp(lse - shift)
        total = w.sum(0)
        return _mixed(_written(o, lse), w) / torch.where(total == 0, 1.0, total)[
            :, None
        ], shift + torch.log(total)

    return wrong


def _many_without_max(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged, whole = merge_many(o, lse)
    lse_max = lse.amax(0)
    return merged, whole - torch.where(lse_max == -INF, 0.0, lse_max)


def _many_not_divided(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged, whole = merge_many(o, lse)
    lse_max = lse.amax(0)
    return merged * torch.exp(whole - torch.where(lse_max == -INF, 0.0, lse_max))[:, None], whole


def _parts(
    seed: int, S: int, N: int, DV: int, lift: tuple[float, ...] = (0.0,)
) -> tuple[Tensor, Tensor]:
    """`S` partial results of `N` rows, part `i` over `3 + i` random keys; `lift` is added to the
    rows' scores in turn."""
    parts = [_partial(seed + 2 * i, N, 3 + i, DV) for i in range(S)]
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


MERGE_MANY = Exercise(
    name="merge_many",
    statement=r"""
`S` programs shared one long row of keys. Join all their results at once, without a loop over the
parts.

- `o` `[S, N, DV]`: the outputs, each divided by its own denominator. A program that saw no key for
  a row wrote no output there: the memory holds whatever it held before, and that may be `NaN` or
  `inf`.
- `lse` `[S, N]`: natural log-sum-exps, always written; $-\infty$ where a program saw no key for the
  row. Rows may lie at very different heights, from −800 to 800.

Return `(o, lse)`: `[N, DV]` and `[N]`. A row that no program saw a key for gives `o = 0`,
`lse = -inf`.
""",
    minutes=8,
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
    ),
    misconceptions=(
        Misconception(
            "a weight of 0 that meets a NaN",
            _zero_times_nan,
            "A part that saw no key has weight 0, but 0 times NaN is NaN. A weight cannot hide a "
            "number that was never written: "
            "replace the number. (Chapter 10's kernel guards its values for the same reason.)",
        ),
        Misconception(
            "a NaN set to 0 after the sum",
            _nan_cleared_after,
            "One part that was never written makes the whole sum NaN, and setting that to 0 "
            "throws away what the other parts have "
            "seen. Clear what was not written before you add.",
        ),
        Misconception(
            "a guard against NaN that lets inf through",
            _inf_let_through,
            "What the memory held may be any number, and 0 times inf is NaN again. Which outputs "
            "were written is not to be seen in "
            "the outputs: ask lse.",
        ),
        *_ways(
            "a NaN for a row that no part saw a key for",
            "There every lse is -inf, and -inf minus -inf is NaN, inside softmax too. Measure "
            "such a row from a finite number, and "
            "do not divide by 0.",
            _softmax_of_nothing,
            _no_shift_anywhere,
        ),
        Misconception(
            "a softmax over the parts with nothing guarded",
            _nothing_guarded,
            "The idea is right: the shares are the softmax of lse over the parts. Two things go "
            "wrong where a part is empty: its "
            "output was never written and may be NaN, and if all parts of a row are empty, so is "
            "its softmax.",
        ),
        *_ways(
            "a plain average of the parts",
            "Each part was divided by its own denominator. A part with a larger denominator held "
            "more of the attention, and lse is "
            "that denominator's logarithm.",
            _mean,
            _mean_as_is,
        ),
        Misconception(
            "adding outputs that were already divided",
            _sum,
            "Each part is an average of values. Undo each division first: multiply by the part's "
            "own denominator, add, divide by "
            "the sum of them.",
        ),
        Misconception(
            "taking exp of an lse as it comes",
            _as_it_comes,
            "exp(800) is inf even in fp64, and exp(-800) is 0. Only the ratios within a row "
            "matter: subtract something first.",
        ),
        *_ways(
            "one maximum for all rows",
            "Rows have nothing to do with each other. Measured from the largest lse of all rows, "
            "a row that lies 800 lower has "
            "nothing but zeros.",
            _one_maximum(guard=False),
            _one_maximum(guard=True),
        ),
        Misconception(
            "an lse that forgets what was subtracted",
            _many_without_max,
            "The output is right. The lse is that of the sum with nothing subtracted: what was "
            "taken out has to come back.",
        ),
        Misconception(
            "a weighted sum that was not divided",
            _many_not_divided,
            "The weights are right up to a factor per row, but they do not sum to 1 yet.",
        ),
    ),
)


EXERCISES = (SOFTMAX_BASE_TWO, ONLINE_STEP, GUARDED_STEP, MERGE_PARTIALS, MERGE_MANY)
