"""Exercises of chapter 07: from summaries to blocks, the score of a group, the list, and what
learns from attending to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.widgets.block_selection import draw_overlap


def _random(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- overlap --


def overlap(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    """How often each summary counts for one block: {summary: pieces of `stride` tokens that it has
    in the block}."""
    start, end = block * block_size, (block + 1) * block_size
    weights = {}
    for summary in range(-(-end // stride)):  # those that begin before the block ends
        first = summary * stride
        tokens = min(first + length, end) - max(first, start)  # in the summary and in the block
        if tokens > 0:
            weights[summary] = tokens / stride
    return weights


def _overlap(change: str) -> Callable:
    """A wrong `overlap`, with one change."""

    def wrong(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
        start, end = block * block_size, (block + 1) * block_size
        step = length if change == "side by side" else stride
        weights = {}
        for summary in range(-length if change == "negative" else 0, end):
            first = summary * step
            tokens = min(first + length, end) - max(first, start)
            if change == "starts" and not start <= first < end:
                continue
            if change == "inside" and tokens < length:
                continue
            if tokens > 0:
                weight = {
                    "tokens": tokens,
                    "equal": 1,
                    "starts": 1,
                    "whole": tokens // stride,
                    "length": tokens / length,
                }
                weights[summary] = float(weight.get(change, tokens / stride))
        return weights

    return wrong


def _paper_from_zero(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    weights: dict[int, float] = {}
    for m in range(-(-block_size // stride)):
        for n in range(-(-length // stride)):
            summary = block_size * block // stride - m - n
            if summary >= 0:
                weights[summary] = weights.get(summary, 0.0) + 1.0
    return weights


def _double_sum(length: int, stride: int, block_size: int, last: int) -> dict[int, float]:
    weights: dict[int, float] = {}
    for m in range(block_size // stride):
        for n in range(length // stride):
            weights[last - m - n] = weights.get(last - m - n, 0.0) + 1.0
    return weights


def _paper_as_it_stands(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    return _double_sum(length, stride, block_size, block_size // stride * block)


def _paper_block_moved(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    return _double_sum(length, stride, block_size, block_size // stride * (block + 1))


def _paper_moved(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    weights = _double_sum(length, stride, block_size, block_size // stride * (block + 1) - 1)
    return {summary: weight for summary, weight in weights.items() if summary >= 0}


def _draw_overlap(arguments: tuple, _got: object, _expected: object) -> object:
    return draw_overlap(*arguments)


_OVERLAP = Exercise(
    name="overlap",
    statement="""
Summaries of `length` tokens begin every `stride` tokens: summary 0 at token 0, summary 1 at token
`stride`, … Which of them lie, wholly or in part, in block number `block` of `block_size` tokens,
and how much do they count? Return a dictionary from the number of the summary (only those that
exist: 0, 1, 2, …) to its weight: the tokens that it shares with the block, in pieces of `stride`
tokens. A summary that shares none is left out. `overlap(32, 16, 64, 1)` is
`{3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 1.0}`. Nothing has to divide anything; then weights are
fractions.
""",
    minutes=6,
    difficulty=2,
    solution=overlap,
    misconceptions=(
        Misconception(
            "counting only the summaries that begin in the block, once each",
            _overlap("starts"),
            "A summary reaches over the edges: one may begin before the block and end in it. And "
            "two pieces in the block "
            "count twice as much as one.",
        ),
        Misconception(
            "reading the paper's Eq. 9 with blocks counted from 0",
            _paper_from_zero,
            "In (l′/d)·j − m − n the first block is j = 1. Take j = 0 for the first block and "
            "its summaries are 0, −1, −2, …: "
            "every block gets mostly those of the block before it. Draw the tokens of block 1 "
            "and see which summaries touch them.",
        ),
        Misconception(
            "executing the paper's Eq. 9 as it stands",
            _paper_as_it_stands,
            "Its blocks and summaries are counted from 1, ours from 0: every block gets mostly "
            "the summaries of the one before. "
            "And it counts whole pieces, so that stride has to divide the other two sizes. Here "
            "it need not: count tokens instead.",
        ),
        Misconception(
            "counting the paper's blocks from 1, and its summaries from 0",
            _paper_block_moved,
            "You have moved the block. In Eq. 9 the summaries are counted from 1 as well: what "
            "is its summary 4 called here?",
        ),
        Misconception(
            "counting whole pieces where a piece may be cut",
            _paper_moved,
            "As long as stride divides the other two sizes, that is right. Where it does not, an "
            "edge of the block runs through "
            "a piece. How many tokens does a summary share with the block then?",
        ),
        Misconception(
            "counting tokens where pieces are asked for",
            _overlap("tokens"),
            "All weights are too large by the same factor. The choice would be the same, but the "
            "paper's 1, 2, 2, 2, 1 counts "
            "in another unit. Which?",
        ),
        Misconception(
            "giving all summaries that touch the block the same weight",
            _overlap("equal"),
            "A summary at the edge speaks mostly of the neighbouring block. How much of it is "
            "about this one?",
        ),
        Misconception(
            "listing summaries that do not exist",
            _overlap("negative"),
            "Before block 0 there is no token, so that no summary begins there. Where does the "
            "first one begin?",
        ),
        Misconception(
            "counting only summaries that lie wholly in the block",
            _overlap("inside"),
            "The summaries at the two edges share some of their tokens with the block. Where a "
            "summary is longer than a "
            "block, nothing at all would be left.",
        ),
        Misconception(
            "rounding fractions down",
            _overlap("whole"),
            "Where stride does not divide the other sizes, a summary may share half a piece with "
            "the block, and half a piece "
            "is not nothing.",
        ),
        Misconception(
            "dividing by the summary's length",
            _overlap("length"),
            "That is the share of the summary in the block. The order of the blocks would be the "
            "same; the unit asked for is "
            "another one.",
        ),
        Misconception(
            "laying the summaries side by side",
            _overlap("side by side"),
            "They begin every `stride` tokens, whatever their length, and overlap where stride "
            "is shorter.",
        ),
    ),
    cases=(
        Case("summaries of 4 every 2, blocks of 8, block 1", lambda: (4, 2, 8, 1)),
        Case("the same, block 0: nothing begins before it", lambda: (4, 2, 8, 0)),
        Case("the paper's sizes, block 2", lambda: (32, 16, 64, 2)),
        Case("all three sizes equal", lambda: (16, 16, 16, 3)),
        Case("summaries longer than a block", lambda: (6, 2, 2, 2)),
        Case("nothing divides anything", lambda: (5, 3, 4, 1)),
        Case("gaps between the summaries", lambda: (2, 5, 4, 1)),
    ),
    picture=_draw_overlap,
)


# -- block_importance --


def block_importance(scores: Tensor, weights: Tensor) -> Tensor:
    """What each block is worth to one query of one group: scores [G, M_c], weights [NB, M_c] ->
    [NB]."""
    lse = scores.logsumexp(1, keepdim=True)  # [G, 1]
    # [G, M_c], each head's attention to the summaries
    p = torch.exp(scores - lse).masked_fill(scores == -torch.inf, 0)
    return weights @ p.sum(0)


def _softmax(scores: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(scores, dim).masked_fill(scores == -torch.inf, 0)


_IMPORTANCE_WRONG = {
    "summed": lambda scores, weights: weights @ _softmax(scores.sum(0)),
    "mean": lambda scores, weights: weights @ _softmax(scores.mean(0)),
    "max": lambda scores, weights: weights @ _softmax(scores).amax(0),
    "average": lambda scores, weights: weights @ _softmax(scores).mean(0),
    "logits": lambda scores, weights: weights @ scores.masked_fill(scores == -torch.inf, 0).sum(0),
    "not normalised": lambda scores, weights: weights @ torch.exp(scores).sum(0),
    "one softmax": lambda scores, weights: (
        weights @ _softmax(scores.flatten()).view(scores.shape).sum(0)
    ),
    "one head": lambda scores, weights: weights @ _softmax(scores)[0],
    "per head": lambda scores, weights: _softmax(scores) @ weights.T,
    "over heads": lambda scores, weights: weights @ _softmax(scores, 0).sum(0),
    "unweighted": lambda scores, weights: (weights > 0).to(scores) @ _softmax(scores).sum(0),
    "nan": lambda scores, weights: weights @ torch.softmax(scores, -1).sum(0),
}


def _small_group() -> tuple[Tensor, Tensor]:
    return torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]), torch.tensor(
        [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]
    )


def _loud_head() -> tuple[Tensor, Tensor]:
    return torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [0.0, 20.0]]), torch.eye(2)


def _hidden() -> tuple[Tensor, Tensor]:
    scores, weights = (
        _random(3, 5, seed=0, factor=2.0),
        torch.tensor([[2.0, 2, 1, 0, 0], [0, 0, 1, 2, 1], [0, 0, 0, 0, 1]]),
    )
    return scores.masked_fill(torch.arange(5) > 2, -torch.inf), weights


_IMPORTANCE = Exercise(
    name="block_importance",
    statement="""
One query, one group of `G` heads. `scores` `[G, M_c]` are the scaled scores of each head with the
summaries, `-inf` where a summary is not visible yet; `weights` `[NB, M_c]` says how often a summary
counts for a block. Return the importance of each block, `[NB]`: each head's attention to the
visible summaries (Eq. 8), carried over to the blocks (Eq. 9), summed over the heads (Eq. 10),
because the group gets one list. A query that sees no summary at all gives 0 everywhere.
""",
    minutes=6,
    difficulty=2,
    solution=block_importance,
    misconceptions=(
        Misconception(
            "adding up the heads' scores before the softmax",
            _IMPORTANCE_WRONG["summed"],
            "A head with large scores then decides alone. Each head has one unit of attention to "
            "give away: when is it handed out?",
        ),
        Misconception(
            "averaging the heads' scores before the softmax",
            _IMPORTANCE_WRONG["mean"],
            "The softmax of a mean score is not the mean of softmaxes. Each head has one unit of "
            "attention to give away: when "
            "is it handed out?",
        ),
        Misconception(
            "taking the largest share among the heads",
            _IMPORTANCE_WRONG["max"],
            "One head that is sure then counts as much as four that agree. Eq. 10 lets every "
            "head add its share.",
        ),
        Misconception(
            "averaging over the heads",
            _IMPORTANCE_WRONG["average"],
            "The list that follows is the same, but Eq. 10 does something simpler than dividing.",
        ),
        Misconception(
            "leaving the softmax out",
            _IMPORTANCE_WRONG["logits"],
            "Scores of different heads have no common scale, and may be negative. What puts each "
            "head on the same footing?",
        ),
        Misconception(
            "exponentials without their sum",
            _IMPORTANCE_WRONG["not normalised"],
            "Without its log-sum-exp, a head with large scores outweighs the others by orders of "
            "magnitude.",
        ),
        Misconception(
            "one softmax over all heads together",
            _IMPORTANCE_WRONG["one softmax"],
            "Each head's shares sum to 1 over the summaries that it sees. Along which dimension "
            "do you normalise?",
        ),
        Misconception(
            "a softmax over the heads",
            _IMPORTANCE_WRONG["over heads"],
            "A head shares its attention among the summaries, not the other way round. Along "
            "which dimension do you normalise?",
        ),
        Misconception(
            "asking only the first head of the group",
            _IMPORTANCE_WRONG["one head"],
            "The list serves all G heads, so that all of them have a say.",
        ),
        Misconception(
            "one importance for each head",
            _IMPORTANCE_WRONG["per head"],
            "A loaded block serves all heads of the group, so that they share one list. What has "
            "to happen to the G rows?",
        ),
        Misconception(
            "forgetting how much of a summary lies in a block",
            _IMPORTANCE_WRONG["unweighted"],
            "A weight of 2 counts double, a weight of 1/3 a third.",
        ),
        Misconception(
            "NaN where no summary is visible",
            _IMPORTANCE_WRONG["nan"],
            "The first queries of a text see no summary: all their scores are −∞. Their shares "
            "are 0, not 0/0.",
        ),
    ),
    cases=(
        Case("two heads, three summaries, two blocks", _small_group),
        Case("three heads agree, a fourth one shouts", _loud_head),
        Case("three heads, three of five summaries visible", _hidden),
        Case("no summary visible", lambda: (torch.full((2, 3), -torch.inf), _small_group()[1])),
        Case(
            "fractions as weights",
            lambda: (_random(4, 3, seed=1), torch.tensor([[1 / 3, 4 / 3, 0.0], [0.0, 0.5, 1.0]])),
        ),
    ),
)


# -- choose_blocks --


def choose_blocks(
    scores: list[float], own: int, top_n: int, num_initial: int, num_local: int
) -> list[int]:
    """The list of one query that stands in block `own`."""
    first = range(min(num_initial, own + 1))
    latest = range(max(own - num_local + 1, 0), own + 1)
    forced = sorted({*first, *latest})
    rest = [block for block in range(own + 1) if block not in forced]
    rest.sort(key=lambda block: -scores[block])  # `sort` leaves equal ones in their order
    chosen = sorted([*forced, *rest][:top_n])
    return chosen + [-1] * (top_n - len(chosen))


def _choose(change: str) -> Callable:
    """A wrong `choose_blocks`, with one change."""

    def wrong(
        scores: list[float], own: int, top_n: int, num_initial: int, num_local: int
    ) -> list[int]:
        last = len(scores) - 1 if change == "future" else own
        first = [*range(num_initial if change == "first ahead" else min(num_initial, own + 1))]
        latest = [*range(max(own - num_local + 1, 0), own + 1)]
        if change == "past own":
            latest = [*range(own, min(own + num_local, len(scores)))]
        if change == "own is not local":
            latest = [*range(max(own - num_local, 0), own)]
        forced = [*first, *latest] if change == "twice" else sorted({*first, *latest})
        if change == "nothing forced":
            forced = []
        rest = [block for block in range(last + 1) if block not in forced]
        rest.sort(key=lambda block: (-scores[block], -block if change == "higher id" else block))
        if change == "smallest":
            rest.reverse()
        room = top_n if change == "on top" else max(top_n - len(forced), 0)
        chosen = [*forced, *rest[:room]]
        if change != "by score":
            chosen.sort()
        padding = [] if change == "no padding" else [-1] * (top_n - len(chosen))
        return padding + chosen if change == "padding first" else chosen + padding

    return wrong


_CHOOSE = Exercise(
    name="choose_blocks",
    statement="""
One query that stands in block `own` (counted from 0). `scores[b]` is the importance of block `b`,
for all blocks of the text, later ones too. Return its list: a Python list of `top_n` integers. The
first `num_initial` blocks and the latest `num_local` ones, the query's own being the latest, are
always on it, as far as they exist up to `own`, and take up slots like any other. The best of the
other blocks fill the rest; of equal ones, those with the lower number. Blocks after `own` are never
listed. Numbers ascend, none comes twice, and where there are fewer than `top_n`, `-1` fills up the
end. (`num_initial + num_local` is never more than `top_n`.)
""",
    minutes=8,
    difficulty=2,
    solution=choose_blocks,
    misconceptions=(
        Misconception(
            "forced blocks on top of top_n",
            _choose("on top"),
            "The list has top_n slots in all: that is what the kernel's loop runs over. Forced "
            "blocks take some of them.",
        ),
        Misconception(
            "letting ties go to the higher number",
            _choose("higher id"),
            "Equal scores are common, among blocks without a visible summary for instance. The "
            "rule has to be the same in "
            "every implementation: which block comes first?",
        ),
        Misconception(
            "listing by score instead of by number",
            _choose("by score"),
            "The order of the scores is needed to choose, not afterwards. Ascending numbers walk "
            "through memory in order.",
        ),
        Misconception(
            "choosing blocks of the future",
            _choose("future"),
            "Blocks after own hold only keys that the query must not see. Selected attention "
            "would skip them, and the slot "
            "would be lost.",
        ),
        Misconception(
            "leaving out the -1s",
            _choose("no padding"),
            "Early queries have fewer than top_n blocks behind them, and yet all lists are rows "
            "of one tensor.",
        ),
        Misconception(
            "writing the -1s in front",
            _choose("padding first"),
            "-1 is the smallest number, so it comes first where you sort after filling up. When "
            "should you fill up?",
        ),
        Misconception(
            "forcing local blocks ahead of the query",
            _choose("past own"),
            "The latest num_local blocks end with the query's own. Count backwards from there.",
        ),
        Misconception(
            "forcing first blocks ahead of the query",
            _choose("first ahead"),
            "In the first block of a text, the second one is still the future, forced or not. "
            "Which rule comes last?",
        ),
        Misconception(
            "not counting the own block among the local ones",
            _choose("own is not local"),
            "The own block is the latest that there is, and the one that summaries know least "
            "about. Where does the count begin?",
        ),
        Misconception(
            "a block twice, once as first and once as local",
            _choose("twice"),
            "For an early query the first blocks are the latest ones, too. A block that is "
            "listed twice gets its attention twice.",
        ),
        Misconception(
            "forcing nothing",
            _choose("nothing forced"),
            "num_initial and num_local say which blocks are on the list whatever their score.",
        ),
        Misconception(
            "taking the smallest scores",
            _choose("smallest"),
            "Sorting ascends unless you say otherwise. Which end of the order do you want?",
        ),
    ),
    cases=(
        Case(
            "own block 3, two slots free for the best", lambda: ([0.1, 0.5, 0.3, 0.0], 3, 3, 0, 1)
        ),
        Case(
            "own block 4 of 6, first and own forced",
            lambda: ([0.0, 0.2, 0.9, 0.4, 0.1, 0.8], 4, 3, 1, 1),
        ),
        Case("equal scores", lambda: ([0.2, 0.2, 0.2, 0.2, 0.2], 4, 3, 0, 1)),
        Case("own block 1: fewer blocks than slots", lambda: ([0.3, 0.7, 0.9, 0.8], 1, 4, 1, 2)),
        Case("the first block of a text", lambda: ([1.0, 2.0], 0, 3, 1, 2)),
        Case("the first block again, two forced in front", lambda: ([0.5, 0.2, 0.1], 0, 3, 2, 1)),
        Case(
            "two forced at either end",
            lambda: ([0.0, 0.0, 0.6, 0.9, 0.7, 0.0, 0.0, 1.0], 6, 5, 2, 2),
        ),
        Case("nothing forced", lambda: ([0.4, 0.1, 0.3, 0.2], 3, 2, 0, 0)),
    ),
    tolerance=0.0,
)


# -- who_learns --


def who_learns(o: Tensor, tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors in which a small change changes `o`, as far as autograd knows."""
    # None: not connected at all
    gradients = torch.autograd.grad(o.sum(), list(tensors.values()), allow_unused=True)
    return [
        name for name, g in zip(tensors, gradients, strict=True) if g is not None and (g != 0).any()
    ]


def _learns(change: str) -> Callable:
    """A wrong `who_learns`, with one change."""

    def wrong(o: Tensor, tensors: dict[str, Tensor]) -> list[str]:
        gradients = torch.autograd.grad(
            o.sum(), list(tensors.values()), allow_unused=change != "strict"
        )
        says_yes = {
            "requires": lambda g: True,
            "not none": lambda g: g is not None,
            "all": lambda g: g is not None and bool((g != 0).all()),
            "inverse": lambda g: g is None or not (g != 0).any(),
        }.get(change, lambda g: g is not None and bool((g != 0).any()))
        return [name for name, g in zip(tensors, gradients, strict=True) if says_yes(g)]

    return wrong


def _branches(g_cmp: float | None, g_slc: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The gated sum of compressed and selected attention, and the leaves it was made from; `w`
    weighs the keys of a summary."""
    sizes = {"q": (1, 24, 2, 4), "k": (1, 24, 1, 4), "v": (1, 24, 1, 3)}
    leaves = {
        name: _random(*shape, seed=i).requires_grad_()
        for i, (name, shape) in enumerate(sizes.items())
    }
    leaves["w"] = torch.full((4,), 0.25).requires_grad_()
    k_cmp = ops.compress(leaves["k"], kind="weighted", weight=leaves["w"], length=4, stride=2)
    v_cmp = ops.compress(leaves["v"], length=4, stride=2)
    o_cmp, lse = ops.compressed_attention(
        leaves["q"], k_cmp, v_cmp, length=4, stride=2, return_lse=True
    )
    ids = ops.select_blocks(
        leaves["q"],
        k_cmp,
        lse,
        top_n=2,
        block_size=8,
        length=4,
        stride=2,
        num_initial=0,
        num_local=1,
    )
    o_slc = ops.selected_attention(leaves["q"], leaves["k"], leaves["v"], ids, block_size=8)
    parts = [gate * o for gate, o in ((g_cmp, o_cmp), (g_slc, o_slc)) if gate is not None]
    return sum(parts[1:], parts[0])[:, -1], leaves


_LEARNS = Exercise(
    name="who_learns",
    statement="""
`o` is the output of some attention, `tensors` a dictionary of what it was computed from, by name;
all of them have `requires_grad=True`. Return the names, in the dictionary's order, of those that a
training step on `o.sum()` would move: those whose gradient is not 0 everywhere. PyTorch's
`torch.autograd.grad` gives gradients without storing them.

Before you run the check: the cases are outputs of the compressed and of the selected branch. `q`,
`k` and `v` are what you think, `w` are the learnt weights with which the summary keys are made, and
the lists of the selected branch were chosen from those summaries. For which branch is `w` in your
answer?
""",
    minutes=5,
    difficulty=2,
    solution=who_learns,
    misconceptions=(
        Misconception(
            "taking everything that could learn for something that learns",
            _learns("requires"),
            "requires_grad says that a tensor asks for a gradient. Whether one arrives depends "
            "on the way from o back to it: "
            "a list of integers is the end of that way.",
        ),
        Misconception(
            "taking a gradient of zeros for learning",
            _learns("not none"),
            "Behind a gate of 0 a tensor is connected, and its gradient is 0 in every place: a "
            "training step leaves it as it is.",
        ),
        Misconception(
            "not allowing for a tensor that o does not depend on",
            _learns("strict"),
            "PyTorch raises an error for a tensor that has no part in o, and here that is an "
            "answer, not an accident. Look at "
            "allow_unused.",
        ),
        Misconception(
            "asking for a gradient in every place",
            _learns("all"),
            "Keys and values of blocks that are on no list get a gradient of 0, the others do "
            "not: such a tensor learns in part.",
        ),
        Misconception(
            "naming those that do not learn",
            _learns("inverse"),
            "Just the other ones.",
        ),
    ),
    cases=(
        Case("the selected branch alone", lambda: _branches(None, 1.0)),
        Case("the compressed branch alone", lambda: _branches(1.0, None)),
        Case("both, with gates 0.5 and 0.5", lambda: _branches(0.5, 0.5)),
        Case("both, the gate of the compressed branch closed", lambda: _branches(0.0, 1.0)),
    ),
)


EXERCISES = (_OVERLAP, _IMPORTANCE, _CHOOSE, _LEARNS)
