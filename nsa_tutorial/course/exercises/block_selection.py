"""Exercises of chapter 07: from summaries to blocks, the score of a group, the list, what learns
from attending to it, and a kernel that adds up one block's summaries."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import replace
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.widgets.block_selection import draw_overlap
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


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


def _overlap(
    slips: Slips, length: int, stride: int, block_size: int, block: int
) -> dict[int, float]:
    """`overlap` with slips."""
    if slips & _PAPERS_SUM.keys():
        pieces = _PAPERS_SUM[next(iter(slips & _PAPERS_SUM.keys()))](
            length, stride, block_size, block
        )
    elif "five" in slips:
        first = block * block_size // stride - 1
        pieces = {first + i: w for i, w in enumerate((1.0, 2.0, 2.0, 2.0, 1.0))}
    else:
        pieces = _shared(slips, length, stride, block_size, block)
    exists = bool(slips & {"negative", "as it stands", "block moved"})
    return {
        summary: _in_another_unit(slips, weight, length, stride)
        for summary, weight in pieces.items()
        if exists or summary >= 0
    }


def _shared(
    slips: Slips, length: int, stride: int, block_size: int, block: int
) -> dict[int, float]:
    """Pieces that summaries and the block share, summaries before the first one included."""
    start, end = block * block_size, (block + 1) * block_size
    step = length if "side by side" in slips else stride
    stop = end // stride if "stops early" in slips else end
    zeros = slips & _RANGES.keys()  # every summary of the loop is listed
    if zeros and "stops early" not in slips:
        stop = _RANGES[next(iter(zeros))](end, stride)
    pieces = {}
    for summary in range(-length, stop):
        first = summary * step
        tokens = min(first + length, end) - max(first, start)
        if slips & {"starts", "in full", "before"} and not start <= first < end:
            continue
        if "inside" in slips and tokens < length:
            continue
        if "behind" in slips and first + length > end:
            continue
        if tokens > 0 or (tokens == 0 and "touching" in slips) or (zeros and summary >= 0):
            pieces[summary] = (length if "in full" in slips else max(tokens, 0)) / stride
    return pieces


# where a loop over the summaries may end that lists all it comes across
_RANGES = {
    "zeros": lambda end, stride: -(-end // stride),
    "zeros, one more": lambda end, stride: end // stride + 1,
    "zeros, many": lambda end, stride: end,
}


def _in_another_unit(slips: Slips, pieces: float, length: int, stride: int) -> float:
    if "tokens" in slips:
        return pieces * stride
    if slips & {"equal", "starts"}:
        return 1.0
    if "whole" in slips:
        return float(math.floor(pieces))
    return pieces * stride / length if "length" in slips else pieces


def _paper_from_zero(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    weights: dict[int, float] = {}
    for m in range(-(-block_size // stride)):
        for n in range(-(-length // stride)):
            summary = block_size * block // stride - m - n
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
    return _double_sum(length, stride, block_size, block_size // stride * (block + 1) - 1)


_PAPERS_SUM = {
    "from zero": _paper_from_zero,
    "as it stands": _paper_as_it_stands,
    "block moved": _paper_block_moved,
    "moved": _paper_moved,
}


def _draw_overlap(arguments: tuple, _got: object, _expected: object) -> object:
    return draw_overlap(*arguments)


_NOTHING_SHARED = (
    "A weight of 0 means that the summary has no token in the block, and such a summary is left "
    "out. Where does your loop ask whether there is any?"
)

_OVERLAP_MISTAKES = (
    Misconception(
        "counting only the summaries that begin in the block, once each",
        slip(_overlap, "starts"),
        "A summary may begin before the block and end in it, and two pieces in the block count "
        "twice as much as one. Which tokens of block 1 are in summary 3?",
    ),
    Misconception(
        "counting a summary in full for the block where it begins",
        slip(_overlap, "in full"),
        "A summary may begin before the block and end in it, and another may begin in it and end "
        "behind it. Which pieces of summary 7 are in block 1?",
    ),
    Misconception(
        "leaving out the summaries that begin before the block",
        slip(_overlap, "before"),
        "Your weights are right, but a summary is missing. Which one begins before the block and "
        "ends in it?",
    ),
    Misconception(
        "reading the paper's Eq. 9 with blocks counted from 0",
        slip(_overlap, "from zero"),
        "In (l′/d)·j − m − n the first block is j = 1. With j = 0 every block gets mostly the "
        "summaries of the block before it. Which summaries touch the tokens of block 1?",
    ),
    Misconception(
        "executing the paper's Eq. 9 as it stands",
        slip(_overlap, "as it stands"),
        "Eq. 9 counts blocks and summaries from 1, we count from 0, so every block gets mostly "
        "the summaries of the one before. It also counts whole pieces, and here `stride` need "
        "not divide anything. How many tokens does a summary share with the block?",
    ),
    Misconception(
        "counting the paper's blocks from 1, and its summaries from 0",
        slip(_overlap, "block moved"),
        "You have moved the block. In Eq. 9 the summaries are counted from 1 as well: what is "
        "its summary 4 called here?",
    ),
    Misconception(
        "taking 1, 2, 2, 2, 1 for all sizes",
        slip(_overlap, "five"),
        "Those five numbers belong to blocks of four pieces and summaries of two. What are they "
        "where a block is as long as a summary?",
    ),
    Misconception(
        "counting tokens where pieces are asked for",
        slip(_overlap, "tokens"),
        "All weights are too large by the same factor. How many tokens make one piece?",
    ),
    Misconception(
        "giving all summaries that touch the block the same weight",
        slip(_overlap, "equal"),
        "A summary at the edge speaks mostly of the neighbouring block. How much of it is about "
        "this one?",
    ),
    Misconception(
        "listing summaries that do not exist",
        slip(_overlap, "negative"),
        "Before block 0 there is no token, so no summary begins there. Where does the first one "
        "begin?",
    ),
    Misconception(
        "listing summaries that share nothing with the block",
        slip(_overlap, "zeros"),
        _NOTHING_SHARED,
    ),
    Misconception(
        "counting only summaries that lie wholly in the block",
        slip(_overlap, "inside"),
        "The summaries at the two edges share some of their tokens with the block. What is left "
        "where a summary is longer than a block?",
    ),
    Misconception(
        "rounding fractions down",
        slip(_overlap, "whole"),
        "Where `stride` does not divide the other sizes, a summary may share half a piece with "
        "the block. Is half a piece nothing?",
    ),
    Misconception(
        "dividing by the summary's length",
        slip(_overlap, "length"),
        "That is the share of the summary that lies in the block. The order of the blocks would "
        "be the same. Which unit is asked for?",
    ),
    Misconception(
        "laying the summaries side by side",
        slip(_overlap, "side by side"),
        "They begin every `stride` tokens, whatever their length. At which token does summary 1 "
        "begin?",
    ),
    # the last three, as a mistake that the shown case shows is told before them
    Misconception(
        "counting whole pieces where a piece may be cut",
        slip(_overlap, "moved"),
        "That is right where `stride` divides the other two sizes. Where it does not, an edge of "
        "the block runs through a piece. How many tokens does a summary share with the block then?",
    ),
    Misconception(
        "ending the loop over the summaries too early",
        slip(_overlap, "stops early"),
        "Your loop ends too early: the last summary that reaches into the block is missing. "
        "`//` rounds down. Which summary begins at the last multiple of `stride` before the end "
        "of the block?",
    ),
    Misconception(
        "leaving out the summaries that end behind the block",
        slip(_overlap, "behind"),
        "Your weights are right, but a summary is missing at the end. Which one begins in the "
        "block and ends behind it?",
    ),
)

# the same mistake, in loops that end elsewhere, or with `>=` for `>`
_ZEROS = tuple(
    Misconception(
        "listing summaries that share nothing with the block",
        slip(_overlap, name),
        _NOTHING_SHARED,
    )
    for name in ("zeros, one more", "zeros, many", "touching")
)

_OVERLAP = TEXTS.exercise(
    "overlap",
    minutes=6,
    difficulty=2,
    solution=overlap,
    misconceptions=(*_OVERLAP_MISTAKES, *_ZEROS),
    combine=together(
        _OVERLAP_MISTAKES,
        {*_PAPERS_SUM, "five", "starts", "in full", "before", "inside", "side by side", "behind"},
        {*_PAPERS_SUM, "five", "inside", "behind", "stops early"},
        {"tokens", "equal", "whole", "length", "starts"},
    ),
    cases=(
        Case("summaries of 4 every 2, blocks of 8, block 1", lambda: (4, 2, 8, 1)),
        Case("the same, block 0: nothing begins before it", lambda: (4, 2, 8, 0)),
        Case("the paper's sizes, block 2", lambda: (32, 16, 64, 2)),
        Case("all three sizes equal", lambda: (16, 16, 16, 3)),
        Case("summaries longer than a block", lambda: (6, 2, 2, 2)),
        Case("nothing divides anything", lambda: (5, 3, 4, 1)),
        Case("gaps between the summaries", lambda: (2, 5, 4, 1)),
        Case("a block that begins and ends within a piece", lambda: (7, 3, 10, 1)),
        Case("the same, block 2", lambda: (7, 3, 10, 2)),
        Case("summaries of 6 every 4, blocks of 10, block 0", lambda: (6, 4, 10, 0)),
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


def _importance(slips: Slips, scores: Tensor, weights: Tensor) -> Tensor:
    """`block_importance` with slips."""
    # -- before the softmax --
    if "seen" in slips:
        scores = scores.masked_fill(scores == -torch.inf, 0)
    if slips & {"summed", "mean", "largest score"}:
        reduce = torch.sum if "summed" in slips else torch.mean if "mean" in slips else torch.amax
        scores = reduce(scores, 0, keepdim=True)
    if "blocks first" in slips:
        scores, weights = scores @ weights.T, torch.eye(len(weights))
    hidden = scores == -torch.inf
    # -- shares --
    if "logits" in slips:
        p = scores
    elif "not normalised" in slips:
        p = torch.exp(scores)
    elif "one softmax" in slips:
        p = torch.softmax(scores.flatten(), 0).view(scores.shape)
    else:
        p = torch.softmax(scores, 0 if "over heads" in slips else 1)
    if "nan" not in slips:
        p = p.masked_fill(hidden, 0)
    # -- over the heads, and to the blocks --
    if "unweighted" in slips:
        weights = (weights > 0).to(scores)
    if "mean of a block" in slips:
        weights = weights / weights.sum(1, keepdim=True)
    if "per head" in slips:
        return p @ weights.T
    if "one head" in slips:
        return weights @ p[0]
    if "max" in slips:
        return weights @ p.amax(0)
    if "max of blocks" in slips:
        return (p @ weights.T).amax(0)
    return weights @ (p.mean(0) if "average" in slips else p.sum(0))


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


_IMPORTANCE_MISTAKES = (
    Misconception(
        "adding up the heads' scores before the softmax",
        slip(_importance, "summed"),
        "A head with large scores then decides alone. Each head has one unit of attention to "
        "give away: when is it handed out?",
    ),
    Misconception(
        "averaging the heads' scores before the softmax",
        slip(_importance, "mean"),
        "The softmax of a mean score is not the mean of softmaxes. Each head has one unit of "
        "attention to give away: when is it handed out?",
    ),
    Misconception(
        "carrying scores over to the blocks before the softmax",
        slip(_importance, "blocks first"),
        "What a block gets is attention, not a score: −∞ times a weight of 0 is NaN. At which "
        "step do scores become attention?",
    ),
    Misconception(
        "taking the largest share among the heads",
        slip(_importance, "max"),
        "One head that is sure then counts as much as four that agree. What does Eq. 10 do with "
        "the heads' shares?",
    ),
    Misconception(
        "taking the largest of the heads' scores before the softmax",
        slip(_importance, "largest score"),
        "The head with the largest scores then decides alone. Each head has one unit of "
        "attention to give away: when is it handed out?",
    ),
    Misconception(
        "averaging over the heads",
        slip(_importance, "average"),
        "The list that follows is the same, but Eq. 10 does something simpler than dividing. What?",
    ),
    Misconception(
        "leaving the softmax out",
        slip(_importance, "logits"),
        "Scores of different heads have no common scale, and may be negative. What puts each "
        "head on the same footing?",
    ),
    Misconception(
        "exponentials without their sum",
        slip(_importance, "not normalised"),
        "A head with large scores then outweighs the others by orders of magnitude. What do a "
        "head's shares have to add up to?",
    ),
    Misconception(
        "one softmax over all heads together",
        slip(_importance, "one softmax"),
        "Each head's shares sum to 1 over the summaries that it sees. Along which dimension do "
        "you normalise?",
    ),
    Misconception(
        "a softmax over the heads",
        slip(_importance, "over heads"),
        "A head shares its attention among the summaries, not the other way round. Along which "
        "dimension do you normalise?",
    ),
    Misconception(
        "asking only the first head of the group",
        slip(_importance, "one head"),
        "The list serves all `G` heads. What do the other rows of `scores` say?",
    ),
    Misconception(
        "one importance for each head",
        slip(_importance, "per head"),
        "A loaded block serves all heads of the group, so they share one list. What has to "
        "happen to the `G` rows?",
    ),
    Misconception(
        "forgetting how much of a summary lies in a block",
        slip(_importance, "unweighted"),
        "A weight of 2 counts double, a weight of 1/3 a third. Where do the numbers in `weights` "
        "come in?",
    ),
    Misconception(
        "taking the mean over a block's summaries",
        slip(_importance, "mean of a block"),
        "You divide by the weights of each block. Eq. 9 is a plain sum: a block that shares more "
        "pieces with summaries gets more. Where does the sum of a row come in?",
    ),
    Misconception(
        "giving attention to summaries that are not visible yet",
        slip(_importance, "seen"),
        "A score of −∞ means that the summary is hidden, and its share must be 0. What share does "
        "a score of 0 get?",
    ),
    Misconception(
        "NaN where no summary is visible",
        slip(_importance, "nan"),
        "The first queries of a text see no summary: all their scores are −∞. What is −∞ − (−∞)?",
    ),
)


def _also(mistake: Misconception, *slips: str) -> Misconception:
    """The same mistake, made in a solution that has other slips, too."""
    return replace(mistake, wrong=Wrong(_importance, mistake.wrong.slips.union(slips)))


# The largest share may be taken after the blocks, as well. And most who make another mistake have
# not met NaN yet: that is for later.
_MAX_OF_BLOCKS = next(
    replace(m, wrong=slip(_importance, "max of blocks"))
    for m in _IMPORTANCE_MISTAKES
    if m.wrong.slips == {"max"}
)
_BEFORE_NAN = tuple(
    _also(m, "nan")
    for m in (*_IMPORTANCE_MISTAKES, _MAX_OF_BLOCKS)
    if not m.wrong.slips & {"nan", "seen"}
)

_IMPORTANCE = TEXTS.exercise(
    "block_importance",
    minutes=6,
    difficulty=2,
    solution=block_importance,
    misconceptions=(*_IMPORTANCE_MISTAKES, _MAX_OF_BLOCKS, *_BEFORE_NAN),
    combine=together(
        _IMPORTANCE_MISTAKES,
        {"logits", "not normalised", "one softmax", "over heads"},
        {
            "summed",
            "mean",
            "largest score",
            "average",
            "max",
            "one head",
            "per head",
            "one softmax",
        },
        {"summed", "mean", "largest score", "over heads"},
        {"unweighted", "mean of a block", "blocks first"},
        {"seen", "nan"},
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


def _choose(
    slips: Slips, scores: list[float], own: int, top_n: int, num_initial: int, num_local: int
) -> list[int]:
    """`choose_blocks` with slips."""
    # -- forced blocks --
    first = [*range(num_initial if "first ahead" in slips else min(num_initial, own + 1))]
    start = own - num_local + 1
    latest = [*range(start if "before zero" in slips else max(start, 0), own + 1)]
    if "past own" in slips:
        latest = [*range(own, min(own + num_local, len(scores)))]
    if "own alone" in slips:
        latest = [own]
    if "own is not local" in slips:
        latest = [*range(max(own - num_local, 0), own)]
    if "one local more" in slips:
        latest = [*range(start - 1 if "before zero" in slips else max(start - 1, 0), own + 1)]
    if "all of them" in slips and num_local == 0:
        latest = [*range(own + 1)]
    if "first alone" in slips:
        latest = []
    if "latest alone" in slips:
        first = []
    forced = [*first, *latest] if "twice" in slips else sorted({*first, *latest})
    if "nothing forced" in slips:
        forced = []
    # -- the best of the rest --
    last = len(scores) - 1 if "future" in slips else own - ("not its own" in slips)
    rest = [block for block in range(last + 1) if block not in forced]
    best_first, lower_first = (1 if slips & _SMALLEST else -1), (-1 if "higher id" in slips else 1)
    if "smallest, reversed" in slips:
        lower_first = -1
    rest.sort(key=lambda block: (best_first * scores[block], lower_first * block))
    if "forced compete" in slips:
        rest = [*range(own + 1)]
        rest.sort(key=lambda block: (best_first * scores[block], lower_first * block))
    room = top_n if "on top" in slips else max(top_n - len(forced), 0)
    # -- the list --
    free = [block for block in rest[:room] if block not in forced]
    if "hidden future" in slips:
        free += range(own + 1, len(scores))
    chosen = [*forced, *(rest if "cut last" in slips else free)]
    if slips & {"all of them", "one local more", "hidden future"}:
        chosen = chosen[:top_n]
    if "by score" not in slips:
        chosen.sort()
    if "cut last" in slips:
        chosen = chosen[:top_n]
    padding = [] if "no padding" in slips else [-1] * (top_n - len(chosen))
    return padding + chosen if "padding first" in slips else chosen + padding


_SMALLEST = frozenset({"smallest", "smallest, reversed"})

_CHOOSE_MISTAKES = (
    Misconception(
        "forced blocks on top of top_n",
        slip(_choose, "on top"),
        "The list has `top_n` slots in all: that is what the kernel's loop runs over. How many "
        "are left after the forced blocks?",
    ),
    Misconception(
        "letting forced blocks compete for the free slots, too",
        slip(_choose, "forced compete"),
        "A forced block with one of the best scores then takes a free slot as well as its own, and "
        "the list is a block short. Which blocks compete for the free slots?",
    ),
    Misconception(
        "letting ties go to the higher number",
        slip(_choose, "higher id"),
        "Equal scores are common, for instance among blocks without a visible summary. Every "
        "implementation needs the same rule: which block comes first?",
    ),
    Misconception(
        "listing by score instead of by number",
        slip(_choose, "by score"),
        "The order of the scores is needed to choose, not afterwards. In which order does a "
        "kernel walk through memory?",
    ),
    Misconception(
        "choosing blocks of the future",
        slip(_choose, "future"),
        "Blocks after `own` hold only keys that the query must not see, so their slots would be "
        "lost. Which blocks may compete?",
    ),
    Misconception(
        "filling empty slots with hidden blocks of the future",
        slip(_choose, "hidden future"),
        "A score of −∞ only puts a block last. `topk` takes −∞ blocks, too, when too few others "
        "are left. What belongs in such a slot?",
    ),
    Misconception(
        "leaving out the -1s",
        slip(_choose, "no padding"),
        "Early queries have fewer than `top_n` blocks behind them, and yet all lists are rows of "
        "one tensor. How long is a row?",
    ),
    Misconception(
        "writing the -1s in front",
        slip(_choose, "padding first"),
        "−1 is the smallest number, so it comes first where you sort after filling up. When "
        "should you fill up?",
    ),
    Misconception(
        "forcing local blocks ahead of the query",
        slip(_choose, "past own"),
        "The latest `num_local` blocks end with the query's own. In which direction do you count?",
    ),
    Misconception(
        "forcing first blocks ahead of the query",
        slip(_choose, "first ahead"),
        "For a query in the first block, the second block is still the future, forced or not. "
        "Which rule has the last word?",
    ),
    Misconception(
        "not counting the own block among the local ones",
        slip(_choose, "own is not local"),
        "The own block is the latest there is, and the one that summaries know least about. "
        "Where does the count begin?",
    ),
    Misconception(
        "forcing one local block too many",
        slip(_choose, "one local more"),
        "The blocks from `own - num_local` to `own` are `num_local + 1` blocks. Where do the "
        "latest `num_local` begin?",
    ),
    Misconception(
        "counting local blocks back past block 0",
        slip(_choose, "before zero"),
        "There is a −1 in front that is no empty slot: it is `own - num_local + 1`. Where does "
        "the text begin?",
    ),
    Misconception(
        "taking the last num_local blocks with a slice that means all of them for 0",
        slip(_choose, "all of them"),
        "In Python `[-num_local:]` is the whole list where `num_local` is 0. What else says that "
        "no block is forced?",
    ),
    Misconception(
        "listing the own block only where it is forced",
        slip(_choose, "not its own"),
        "Where nothing is forced, the own block competes by its score like any other block of "
        "the past. Does your range end before it?",
    ),
    Misconception(
        "forcing the own block, whatever num_local says",
        slip(_choose, "own alone"),
        "`num_local` counts the latest blocks that are forced. That may be none, or several. "
        "Which blocks are they for `num_local` = 2, and which for 0?",
    ),
    Misconception(
        "a block twice, once as first and once as local",
        slip(_choose, "twice"),
        "For an early query the first blocks are the latest ones, too. What happens to the "
        "attention of a block that is listed twice?",
    ),
    Misconception(
        "cutting the list after it was sorted by number",
        slip(_choose, "cut last"),
        "Once the list ascends, its first `top_n` are the lowest numbers, whatever their score. "
        "In which order do you have to cut?",
    ),
    Misconception(
        "forcing nothing",
        slip(_choose, "nothing forced"),
        "`num_initial` and `num_local` say which blocks are on the list whatever their score. "
        "Which ones are they here?",
    ),
    Misconception(
        "forcing the first blocks alone",
        slip(_choose, "first alone"),
        "The query's own block and those before it may score low, and are listed all the same. "
        "Which blocks does `num_local` put on the list?",
    ),
    Misconception(
        "forcing the latest blocks alone",
        slip(_choose, "latest alone"),
        "The latest blocks are on your list whatever their score. Which ones does `num_initial` "
        "put there?",
    ),
    Misconception(
        "taking the smallest scores",
        slip(_choose, "smallest"),
        "Sorting ascends unless you say otherwise. Which end of the order do you want?",
    ),
)

# a sort that was turned round brings equal scores in the other order, which is no second mistake
_SMALLEST_REVERSED = replace(_CHOOSE_MISTAKES[-1], wrong=slip(_choose, "smallest, reversed"))

_CHOOSE = TEXTS.exercise(
    "choose_blocks",
    minutes=8,
    difficulty=2,
    solution=choose_blocks,
    misconceptions=(*_CHOOSE_MISTAKES, _SMALLEST_REVERSED),
    combine=together(
        _CHOOSE_MISTAKES,
        {"no padding", "padding first"},
        {"past own", "own is not local", "own alone", "before zero", "all of them", "first alone"},
        *(
            {"one local more", other}
            for other in ("past own", "own is not local", "own alone", "all of them", "first alone")
        ),
        *({"forced compete", other} for other in ("future", "not its own", "twice")),
        *({"cut last", other} for other in ("on top", "by score", "forced compete")),
        *({"hidden future", other} for other in ("cut last", "future", "on top")),
        *({"nothing forced", other} for other in ("one local more", "forced compete", "cut last")),
        {"nothing forced", "own alone"},
        {"nothing forced", "first alone", "latest alone", "twice"},
        {"latest alone", "first ahead"},
        {"smallest", "higher id"},
        {"nothing forced", "on top"},
        {"future", "not its own"},
    ),
    cases=(
        Case(
            "own block 3, two slots free for the best", lambda: ([0.1, 0.5, 0.3, 0.0], 3, 3, 0, 1)
        ),
        Case(
            "own block 4 of 6, first and own forced",
            lambda: ([0.0, 0.2, 0.9, 0.4, 0.1, 0.8], 4, 3, 1, 1),
        ),
        Case("a forced block has the best score", lambda: ([0.9, 0.2, 0.3, 0.4, 0.1], 4, 3, 1, 1)),
        Case("equal scores", lambda: ([0.2, 0.2, 0.2, 0.2, 0.2], 4, 3, 0, 1)),
        Case("own block 1: fewer blocks than slots", lambda: ([0.3, 0.7, 0.9, 0.8], 1, 4, 1, 2)),
        Case("the first block of a text", lambda: ([1.0, 2.0], 0, 3, 1, 2)),
        Case("the first block again, two forced in front", lambda: ([0.5, 0.2, 0.1], 0, 3, 2, 1)),
        Case(
            "two forced at either end",
            lambda: ([0.0, 0.0, 0.6, 0.9, 0.7, 0.0, 0.0, 1.0], 6, 5, 2, 2),
        ),
        Case("nothing forced", lambda: ([0.2, 0.1, 0.3, 0.4], 3, 2, 0, 0)),
        Case(
            "nothing forced, the own block worth least", lambda: ([0.2, 0.4, 0.3, 0.1], 3, 2, 0, 0)
        ),
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


def _learns(slips: Slips, o: Tensor, tensors: dict[str, Tensor]) -> list[str]:
    """`who_learns` with slips."""
    if "requires" in slips:
        return list(tensors)
    gradients = torch.autograd.grad(
        o.sum(), list(tensors.values()), allow_unused="strict" not in slips
    )

    def moves(g: Tensor | None) -> bool:
        if "not none" in slips or (g is None and "none" not in slips):
            return g is not None
        if "sum" in slips:
            return bool(g.sum() > 0)
        if "sum is 0" in slips:
            return bool(g.sum() != 0)
        if "positive" in slips:
            return bool((g > 0).any())
        changed = g.ne(0)  # raises for None, which is the slip "none"
        return bool(changed.all() if "all" in slips else changed.any())

    return [
        name for name, g in zip(tensors, gradients, strict=True) if moves(g) != ("inverse" in slips)
    ]


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


def _difference() -> tuple[Tensor, dict[str, Tensor]]:
    """An output whose gradient has places that cancel in a sum, exactly."""
    x = torch.tensor([2.0, 1.0], requires_grad=True)
    return x[0] - x[1], {"x": x}


_LEARNS_MISTAKES = (
    Misconception(
        "taking everything that could learn for something that learns",
        slip(_learns, "requires"),
        "`requires_grad` says that a tensor asks for a gradient. A gradient arrives only where a "
        "way leads from `o` back to the tensor. Does one lead through a list of integers?",
    ),
    Misconception(
        "taking a gradient of zeros for learning",
        slip(_learns, "not none"),
        "Times 0, an output stays connected to its tensors, but their gradients are 0 in every "
        "place. What does a training step do with such a tensor?",
    ),
    Misconception(
        "not allowing for a tensor that o does not depend on",
        slip(_learns, "strict"),
        "PyTorch raises an error for a tensor that has no part in `o`, and here that is an "
        "answer, not an accident. Which argument of `torch.autograd.grad` lets it be unused?",
    ),
    Misconception(
        "forgetting that a gradient may be None",
        slip(_learns, "none"),
        "For a tensor that `o` does not depend on, PyTorch gives None in place of a gradient of "
        "zeros. What does your condition ask of None?",
    ),
    Misconception(
        "asking for a gradient in every place",
        slip(_learns, "all"),
        "Keys and values of blocks that are on no list get a gradient of 0, the others do not: "
        "such a tensor learns in part. How many places are enough?",
    ),
    Misconception(
        "asking whether the gradient's sum is above 0",
        slip(_learns, "sum"),
        "A gradient has negative places, too, and a sum lets them cancel. What does a training "
        "step do with a place of −1?",
    ),
    Misconception(
        "asking whether the gradient's sum is 0",
        slip(_learns, "sum is 0"),
        "A gradient of [1, −1] sums to 0, and yet a training step moves both places. What do you "
        "ask of each place, before any sum?",
    ),
    Misconception(
        "asking for a place above 0",
        slip(_learns, "positive"),
        "A gradient may be negative in every place. What does a training step do with a place of "
        "−1?",
    ),
    Misconception(
        "naming those that do not learn",
        slip(_learns, "inverse"),
        "These are just the other ones. Which way round is your condition?",
    ),
)

_LEARNS = TEXTS.exercise(
    "who_learns",
    minutes=5,
    difficulty=2,
    solution=who_learns,
    misconceptions=_LEARNS_MISTAKES,
    combine=together(
        _LEARNS_MISTAKES,
        {"not none", "all", "sum", "sum is 0", "positive"},
        {"not none", "none"},
        {"strict", "none"},
    ),
    cases=(
        Case("the selected branch alone", lambda: _branches(None, 1.0)),
        Case("the compressed branch alone", lambda: _branches(1.0, None)),
        Case("0.5 times each of both", lambda: _branches(0.5, 0.5)),
        Case("both, the compressed branch times 0", lambda: _branches(0.0, 1.0)),
        Case("-0.5 times each of both", lambda: _branches(-0.5, -0.5)),
        Case("x[0] - x[1], with the gradient [1, -1]", _difference),
    ),
)


# -- block_sums --


def block_sums() -> object:
    """The kernel whose program adds up what the summaries give to one block."""

    @triton.jit
    def kernel(P, W, Importance, M, R, L, K, KT: tl.constexpr):
        block = tl.program_id(0)  # this program's block
        place = tl.arange(0, KT)  # KT is a power of two: K, or the next above it
        weight = tl.load(W + place, mask=place < K, other=0.0)  # [KT]
        summary = block * R - (L - 1) + place  # [KT]
        exists = (summary >= 0) & (summary < M)
        p = tl.load(P + summary, mask=exists, other=0.0)
        total = tl.sum(p * weight, axis=0)
        tl.store(Importance + block, total)

    return kernel


def _run_block_sums(solution: Callable, R: int, L: int, pieces: int) -> Tensor:
    """Launch the kernel on a text of so many pieces; before and behind `P` lie large numbers."""
    if hasattr(solution, "run"):
        raise TypeError("this is the kernel itself: hand over the function that returns it")
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("block_sums defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    _refuse_tensors_of_the_notebook(kernel.fn)
    M, NB, K = pieces - L + 1, -(-pieces // R), R + L - 1
    KT = triton.next_power_of_2(K)
    p = roomy(1 + torch.arange(M) % 7 + torch.arange(M) / 16, 1000.0)
    counts = [sum(1 for piece in range(L) if 0 <= i + piece - L + 1 < R) for i in range(K)]
    weight = torch.full((KT,), 1000.0)
    weight[:K] = torch.tensor(counts, dtype=torch.float32)
    importance = roomy(torch.full((NB,), torch.nan), torch.nan)
    kernel[NB,](p, roomy(weight, 1000.0), importance, M, R, L, K, KT=KT)
    return importance.cpu()


def _refuse_tensors_of_the_notebook(kernel: Callable) -> None:
    """A misspelt name may be one of the notebook's, where it would fail far from its cause."""
    code = kernel.__code__
    for name in code.co_names:
        if isinstance(kernel.__globals__.get(name), Tensor):
            near = difflib.get_close_matches(name, code.co_varnames, 1)
            meant = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(f"`{name}` is a tensor of the notebook, not of the kernel.{meant}")


@triton.jit
def _wrong_sums(P, W, Importance, M, R, L, K, KT: tl.constexpr, SLIP: tl.constexpr):
    block = tl.program_id(0)
    place = tl.arange(0, KT)
    weight = tl.load(W + place, mask=place < K, other=0.0)
    summary = block * R - (L - 1) + place
    if SLIP == "begins inside":
        summary = block * R + place
    if SLIP == "one before":
        summary = block * R - 1 + place
    if SLIP == "too early":
        summary = block * R - L + place
    if SLIP == "our sizes":
        summary = block * 4 - 1 + place
    if SLIP == "from one":
        summary = block * R - (R - 1) - (L - 1) + place
    if SLIP == "first block":
        summary = place - (L - 1)
    if SLIP == "steps of K":
        summary = block * K - (L - 1) + place
    if SLIP == "side by side":
        summary = block + place
    if SLIP == "steps of K, inside":
        summary = block * K + place
    if SLIP == "first block, inside":
        summary = place
    exists = (summary >= 0) & (summary < M)
    if SLIP == "no mask":
        exists = place < KT
    if SLIP == "end alone":
        exists = summary < M
    if SLIP == "start alone":
        exists = summary >= 0
    if SLIP == "no first":
        exists = (summary > 0) & (summary < M)
    if SLIP == "one too many":
        exists = (summary >= 0) & (summary <= M)
    p = tl.load(P + summary, mask=exists, other=0.0)
    if SLIP == "unweighted":
        total = tl.sum(p, axis=0)
    elif SLIP == "no sum":
        total = p * weight
    elif SLIP == "largest":
        total = tl.max(p * weight, axis=0)
    elif SLIP == "mean":
        total = tl.sum(p * weight, axis=0) / tl.sum(weight, axis=0)
    else:
        total = tl.sum(p * weight, axis=0)
    tl.store(Importance + block, total)


class _Mistaken:
    """`_wrong_sums` with its slip chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run, self.fn = mistake, None, _wrong_sums.fn

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_sums[grid](*args, SLIP=self.mistake, **sizes)


def _sums(mistake: str) -> Callable:
    return lambda: _Mistaken(mistake)


def _sums_case(name: str, R: int, L: int, pieces: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (R, L, pieces), lambda: here.why_not("triton", here.device))


_WITH_AND = (
    "Did you write `and`, or a chain such as `0 <= a < b`? Of two tiles, they keep only the second "
    "condition: join both with `&`. "
)

_SUMS = TEXTS.exercise(
    "block_sums",
    minutes=6,
    difficulty=2,
    solution=block_sums,
    run=_run_block_sums,
    misconceptions=(
        Misconception(
            "starting with the summaries that begin in the block",
            _sums("begins inside"),
            "A summary may begin before the block and end in it. How many pieces before the block "
            "does the first of them begin?",
        ),
        Misconception(
            "starting one summary before the block, whatever the length",
            _sums("one before"),
            "That is right for summaries of two pieces. How far back does a summary of `L` pieces "
            "begin, if only its last piece is in the block?",
        ),
        Misconception(
            "starting one summary too early",
            _sums("too early"),
            "A summary of `L` pieces that begins `L` pieces before the block ends where the block "
            "begins. Which is the first whose last piece is in the block?",
        ),
        Misconception(
            "taking blocks of 4 pieces and summaries of 2 for all sizes",
            _sums("our sizes"),
            "That is right for the chapter's example. What do `R` and `L` say about the others?",
        ),
        Misconception(
            "executing the paper's Eq. 9 as it stands",
            _sums("from one"),
            "Eq. 9 counts blocks and summaries from 1, so your program adds up the block before. "
            "At which piece does block 1 begin here?",
        ),
        Misconception(
            "every program takes the first block",
            _sums("first block"),
            "All programs run the same code. Which number tells one from the next?",
        ),
        Misconception(
            "every program takes the first block",
            _sums("first block, inside"),
            "All programs run the same code. Which number tells one from the next?",
        ),
        Misconception(
            "stepping from block to block by K summaries",
            _sums("steps of K"),
            "K summaries touch a block, but neighbours share some of them. After how many pieces "
            "does the next block begin?",
        ),
        Misconception(
            "stepping from block to block by K summaries",
            _sums("steps of K, inside"),
            "K summaries touch a block, but neighbours share some of them. After how many pieces "
            "does the next block begin?",
        ),
        Misconception(
            "stepping from block to block by one summary",
            _sums("side by side"),
            "A block is `R` pieces long, and one summary begins at each piece. Where does block 1 "
            "begin?",
        ),
        Misconception(
            "reading summaries that do not exist",
            _sums("no mask"),
            "`P` has summaries 0 to M - 1. Block 0 asks for one before them, the last block for "
            "some behind them. What lies there in memory? (`place < K` does not say. Nor "
            "do two conditions without parentheses, as `&` comes before `<`.)",
        ),
        Misconception(
            "masking only past the last summary",
            _sums("end alone"),
            _WITH_AND + "The first block has a summary before it, with a negative number. What "
            "lies in memory before `P`?",
        ),
        Misconception(
            "masking only before the first summary",
            _sums("start alone"),
            _WITH_AND + "The last block asks for summaries that never begin, because the text "
            "ends. What lies in memory behind `P`?",
        ),
        Misconception(
            "leaving out summary 0",
            _sums("no first"),
            "Summaries count from 0, and number 0 exists. Is your comparison `>` or `>=`?",
        ),
        Misconception(
            "one summary too many",
            _sums("one too many"),
            "The last summary is M - 1. Is your comparison `<` or `<=`?",
        ),
        Misconception(
            "forgetting how much of a summary lies in a block",
            _sums("unweighted"),
            "A summary that lies wholly in the block counts twice as much as one at its edge. "
            "Where do the numbers of `W` come in?",
        ),
        Misconception(
            "storing a tile where one number belongs",
            _sums("no sum"),
            "`p * weight` is a tile of `KT` numbers, and the block has one place in `Importance`. "
            "Which function of `tl` makes one number of a tile?",
        ),
        Misconception(
            "taking the largest share in place of the sum",
            _sums("largest"),
            "Every summary that touches the block adds to its importance. Which reduction adds?",
        ),
        Misconception(
            "taking the mean over a block's summaries",
            _sums("mean"),
            "Eq. 9 is a plain sum. What do you divide by?",
        ),
    ),
    cases=(
        _sums_case("blocks of 4 pieces, summaries of 2, a text of 4 blocks", 4, 2, 16),
        _sums_case("summaries of 3 pieces, blocks of 3", 3, 3, 9),
        _sums_case("summaries of one piece: none reaches over an edge", 3, 1, 6),
        _sums_case("a text that ends within its last block", 2, 2, 7),
    ),
)


EXERCISES = (_OVERLAP, _IMPORTANCE, _CHOOSE, _LEARNS, _SUMS)


# -- two mistakes at once --


def _two(make: Callable, *slips: str) -> Callable:
    return lambda *arguments: make(frozenset(slips), *arguments)


def _eq_9_in_tokens(length: int, stride: int, block_size: int, block: int) -> dict[int, float]:
    weights: dict[int, float] = {}
    for m in range(block_size // stride):
        for n in range(length // stride):
            summary = block_size // stride * block - m - n
            weights[summary] = weights.get(summary, 0.0) + stride
    return weights


def _tokens_of_all(length: int, stride: int, block_size: int, block: int) -> dict[int, int]:
    mine = set(range(block * block_size, (block + 1) * block_size))
    shared = {
        j: len(mine & set(range(j * stride, j * stride + length))) for j in range(-length, 9 * 64)
    }
    return {j: tokens for j, tokens in shared.items() if tokens}


def _short_loop_in_tokens(
    length: int, stride: int, block_size: int, block: int
) -> dict[int, float]:
    start, end = block * block_size, (block + 1) * block_size
    weights = {}
    for j in range(end // stride):
        tokens = min(j * stride + length, end) - max(j * stride, start)
        if tokens > 0:
            weights[j] = tokens
    return weights


def _mean_of_touched(scores: Tensor, weights: Tensor) -> Tensor:
    p = torch.softmax(scores, dim=1).masked_fill(scores == -torch.inf, 0)
    return (p @ (weights > 0).float().T).mean(0)


def _grad_of_some(o: Tensor, tensors: dict[str, Tensor]) -> list[str]:
    gradients = torch.autograd.grad(o.sum(), list(tensors.values()))
    return [name for name, g in zip(tensors, gradients, strict=True) if g is not None]


DOUBLES = (
    Double(
        "overlap",
        _eq_9_in_tokens,
        (
            "executing the paper's Eq. 9 as it stands",
            "counting tokens where pieces are asked for",
        ),
    ),
    Double(
        "overlap",
        _tokens_of_all,
        ("counting tokens where pieces are asked for", "listing summaries that do not exist"),
    ),
    Double(
        "overlap",
        _short_loop_in_tokens,
        (
            "ending the loop over the summaries too early",
            "counting tokens where pieces are asked for",
        ),
    ),
    Double(
        "block_importance",
        _mean_of_touched,
        (
            "averaging over the heads",
            "forgetting how much of a summary lies in a block",
        ),
    ),
    Double(
        "choose_blocks",
        _two(_choose, "by score", "no padding"),
        ("listing by score instead of by number", "leaving out the -1s"),
    ),
    Double(
        "choose_blocks",
        _two(_choose, "on top", "future"),
        ("forced blocks on top of top_n", "choosing blocks of the future"),
    ),
    Double(
        "who_learns",
        _grad_of_some,
        (
            "taking a gradient of zeros for learning",
            "not allowing for a tensor that o does not depend on",
        ),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    best_4_blocks={"unit": "%", "tolerance": 0.03},
    cheap_4_blocks={"unit": "%", "tolerance": 0.02},
    one_loud_head={"choices": (0, 1)},
    without_own_block={"unit": "%", "tolerance": 0.05},
    branch_that_teaches={"choices": ("compressed", "selected", "both")},
)
