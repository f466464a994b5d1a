"""Exercises of chapter 07: from summaries to blocks, the score of a group, the list, what learns
from attending to it, and a kernel that adds up one block's summaries."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.widgets.block_selection import draw_overlap
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


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


# Eq. 9 counts whole pieces, and summaries that begin before the text
_WHOLE = "length, block_size = length // stride * stride, block_size // stride * stride"
_NEGATIVE = "range(-length - block_size, "
# every summary that the loop comes across
_ALL = {"tokens > 0": "True", "tokens / stride": "max(tokens, 0) / stride"}

_OVERLAP = TEXTS.exercise(
    "overlap", minutes=6, difficulty=2, solution=overlap,
    picture=lambda arguments, got, expected: draw_overlap(*arguments),
    misconceptions=diffs(overlap, [
        ({"tokens > 0": "first >= start", "tokens / stride": "1.0"},
         "counting only the summaries that begin in the block, once each",
         "A summary may begin before the block and end in it, and two pieces in the block count "
         "twice as much as one. Which tokens of block 1 are in summary 3?"),
        ({"tokens > 0": "first >= start", "tokens / stride": "length / stride"},
         "counting a summary in full for the block where it begins",
         "A summary may begin before the block and end in it, and another may begin in it and "
         "end behind it. Which pieces of summary 7 are in block 1?"),
        ("tokens > 0", "first >= start", "leaving out the summaries that begin before the block",
         "Your weights are right, but a summary is missing. Which one begins before the block "
         "and ends in it?"),
        ({"start, end = block * block_size, (block + 1) * block_size":
              "end = block * block_size // stride * stride + stride; length += -length % stride; "
              "block_size += -block_size % stride; start = end - block_size"},
         "reading the paper's Eq. 9 with blocks counted from 0",
         "In (l′/d)·j − m − n the first block is j = 1. With j = 0 every block gets mostly the "
         "summaries of the block before it. Which summaries touch the tokens of block 1?"),
        ({"start, end = ": f"{_WHOLE}; start, end = stride - block_size + ",
          "(block + 1) * block_size": "block * block_size + stride", "range(": _NEGATIVE},
         "executing the paper's Eq. 9 as it stands",
         "Eq. 9 counts blocks and summaries from 1, we count from 0, so every block gets mostly "
         "the summaries of the one before. It also counts whole pieces, and here `stride` need "
         "not divide anything. How many tokens does a summary share with the block?"),
        ({"start, end = ": f"{_WHOLE}; start, end = stride + ",
          "(block + 1) * block_size": "(block + 1) * block_size + stride", "range(": _NEGATIVE},
         "counting the paper's blocks from 1, and its summaries from 0",
         "You have moved the block. In Eq. 9 the summaries are counted from 1 as well: what is "
         "its summary 4 called here?"),
        ("return weights",
         "return {i: w for i, w in enumerate((1, 2, 2, 2, 1), start // stride - 1) if i >= 0}",
         "taking 1, 2, 2, 2, 1 for all sizes",
         "Those five numbers belong to blocks of four pieces and summaries of two. What are they "
         "where a block is as long as a summary?"),
        ("tokens / stride", "tokens", "counting tokens where pieces are asked for",
         "All weights are too large by the same factor. How many tokens make one piece?"),
        ("tokens / stride", "1.0", "giving all summaries that touch the block the same weight",
         "A summary at the edge speaks mostly of the neighbouring block. How much of it is about "
         "this one?"),
        ("range(", _NEGATIVE, "listing summaries that do not exist",
         "Before block 0 there is no token, so no summary begins there. Where does the first one "
         "begin?"),
        (_ALL, "listing summaries that share nothing with the block",
         "A weight of 0 means that the summary has no token in the block, and such a summary is "
         "left out. Where does your loop ask whether there is any?"),
        ("tokens > 0", "tokens == length", "counting only summaries that lie wholly in the block",
         "The summaries at the two edges share some of their tokens with the block. What is left "
         "where a summary is longer than a block?"),
        ("tokens / stride", "tokens // stride", "rounding fractions down",
         "Where `stride` does not divide the other sizes, a summary may share half a piece with "
         "the block. Is half a piece nothing?"),
        ("tokens / stride", "tokens / length", "dividing by the summary's length",
         "That is the share of the summary that lies in the block. The order of the blocks would "
         "be the same. Which unit is asked for?"),
        ({"summary * stride": "summary * length", "-(-end // stride)": "-(-end // length)"},
         "laying the summaries side by side",
         "They begin every `stride` tokens, whatever their length. At which token does summary 1 "
         "begin?"),
        ("start, end = ", f"{_WHOLE}; start, end = ",
         "counting whole pieces where a piece may be cut",
         "That is right where `stride` divides the other two sizes. Where it does not, an edge "
         "of the block runs through a piece. How many tokens does a summary share with the block "
         "then?"),
        ("-(-end // stride)", "end // stride", "ending the loop over the summaries too early",
         "Your loop ends too early: the last summary that reaches into the block is missing. "
         "`//` rounds down. Which summary begins at the last multiple of `stride` before the end "
         "of the block?"),
        ("tokens > 0", "tokens > 0 and first + length <= end",
         "leaving out the summaries that end behind the block",
         "Your weights are right, but a summary is missing at the end. Which one begins in the "
         "block and ends behind it?"),
        ({**_ALL, "-(-end // stride)": "end // stride + 1"},
         "listing summaries that share nothing with the block"),
        ({**_ALL, "-(-end // stride)": "end"},
         "listing summaries that share nothing with the block"),
        ({"tokens > 0": "tokens >= 0", "-(-end // stride)": "end"},
         "listing summaries that share nothing with the block"),
    ]),
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
)  # fmt: skip


# -- block_importance --


def block_importance(scores: Tensor, weights: Tensor) -> Tensor:
    """What each block is worth to one query of one group: scores [G, M_c], weights [NB, M_c] ->
    [NB]."""
    lse = scores.logsumexp(1, keepdim=True)  # [G, 1]
    # [G, M_c], each head's attention to the summaries
    p = torch.exp(scores - lse).masked_fill(scores == -torch.inf, 0)
    return weights @ p.sum(0)


_NAN = {".masked_fill(scores == -torch.inf, 0)": ""}

_IMPORTANCE_MISTAKES = diffs(block_importance, [
    ("lse = ", "scores = scores.sum(0, keepdim=True); lse = ",
     "adding up the heads' scores before the softmax",
     "A head with large scores then decides alone. Each head has one unit of attention to give "
     "away: when is it handed out?"),
    ("lse = ", "scores = scores.mean(0, keepdim=True); lse = ",
     "averaging the heads' scores before the softmax",
     "The softmax of a mean score is not the mean of softmaxes. Each head has one unit of "
     "attention to give away: when is it handed out?"),
    ("lse = ", "scores, weights = scores @ weights.T, torch.eye(len(weights)); lse = ",
     "carrying scores over to the blocks before the softmax",
     "What a block gets is attention, not a score: −∞ times a weight of 0 is NaN. At which step "
     "do scores become attention?"),
    ("p.sum(0)", "p.amax(0)", "taking the largest share among the heads",
     "One head that is sure then counts as much as four that agree. What does Eq. 10 do with the "
     "heads' shares?"),
    ("lse = ", "scores = scores.amax(0, keepdim=True); lse = ",
     "taking the largest of the heads' scores before the softmax",
     "The head with the largest scores then decides alone. Each head has one unit of attention "
     "to give away: when is it handed out?"),
    ("p.sum(0)", "p.mean(0)", "averaging over the heads",
     "The list that follows is the same, but Eq. 10 does something simpler than dividing. What?"),
    ("torch.exp(scores - lse)", "scores", "leaving the softmax out",
     "Scores of different heads have no common scale, and may be negative. What puts each head "
     "on the same footing?"),
    (" - lse", "", "exponentials without their sum",
     "A head with large scores then outweighs the others by orders of magnitude. What do a "
     "head's shares have to add up to?"),
    ("logsumexp(1", "logsumexp((0, 1)", "one softmax over all heads together",
     "Each head's shares sum to 1 over the summaries that it sees. Along which dimension do you "
     "normalise?"),
    ("logsumexp(1", "logsumexp(0", "a softmax over the heads",
     "A head shares its attention among the summaries, not the other way round. Along which "
     "dimension do you normalise?"),
    ("p.sum(0)", "p[0]", "asking only the first head of the group",
     "The list serves all `G` heads. What do the other rows of `scores` say?"),
    ("weights @ p.sum(0)", "p @ weights.T", "one importance for each head",
     "A loaded block serves all heads of the group, so they share one list. What has to happen "
     "to the `G` rows?"),
    ("return ", "weights = (weights > 0).to(scores); return ",
     "forgetting how much of a summary lies in a block",
     "A weight of 2 counts double, a weight of 1/3 a third. Where do the numbers in `weights` "
     "come in?"),
    ("return ", "weights = weights / weights.sum(1, keepdim=True); return ",
     "taking the mean over a block's summaries",
     "You divide by the weights of each block. Eq. 9 is a plain sum: a block that shares more "
     "pieces with summaries gets more. Where does the sum of a row come in?"),
    ("lse = ", "scores = scores.masked_fill(scores == -torch.inf, 0); lse = ",
     "giving attention to summaries that are not visible yet",
     "A score of −∞ means that the summary is hidden, and its share must be 0. What share does a "
     "score of 0 get?"),
    (_NAN, "NaN where no summary is visible",
     "The first queries of a text see no summary: all their scores are −∞. What is −∞ − (−∞)?"),
    ("weights @ p.sum(0)", "(p @ weights.T).amax(0)", "taking the largest share among the heads"),
])  # fmt: skip

# who makes another mistake has mostly not met NaN yet: one thing at a time
_BEFORE_NAN = tuple(
    replace(m, wrong=Edited(block_importance, m.wrong.edits | _NAN))
    for m in _IMPORTANCE_MISTAKES
    if m.wrong.edits != _NAN
)


def _small_group() -> tuple[Tensor, Tensor]:
    weights = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    return torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]), weights


def _loud_head() -> tuple[Tensor, Tensor]:
    return torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [0.0, 20.0]]), torch.eye(2)


def _hidden() -> tuple[Tensor, Tensor]:
    scores = _random(3, 5, seed=0, factor=2.0).masked_fill(torch.arange(5) > 2, -torch.inf)
    return scores, torch.tensor([[2.0, 2, 1, 0, 0], [0, 0, 1, 2, 1], [0, 0, 0, 0, 1]])


_IMPORTANCE = TEXTS.exercise(
    "block_importance", minutes=6, difficulty=2, solution=block_importance,
    misconceptions=(*_IMPORTANCE_MISTAKES, *_BEFORE_NAN),
    cases=(
        Case("two heads, three summaries, two blocks", _small_group),
        Case("three heads agree, a fourth one shouts", _loud_head),
        Case("three heads, three of five summaries visible", _hidden),
        Case("no summary visible", lambda: (torch.full((2, 3), -torch.inf), _small_group()[1])),
        Case("fractions as weights",
             lambda: (_random(4, 3, seed=1), torch.tensor([[1 / 3, 4 / 3, 0.0], [0.0, 0.5, 1.0]]))),
    ),
)  # fmt: skip


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


_CHOOSE = TEXTS.exercise(
    "choose_blocks", minutes=8, difficulty=2, solution=choose_blocks, tolerance=0.0,
    misconceptions=diffs(choose_blocks, [
        ("*rest][:top_n]", "*rest[:top_n]]", "forced blocks on top of top_n",
         "The list has `top_n` slots in all: that is what the kernel's loop runs over. How many "
         "are left after the forced blocks?"),
        ({" if block not in forced": "",
          "[*forced, *rest][:top_n]": "{*forced, *rest[: max(top_n - len(forced), 0)]}"},
         "letting forced blocks compete for the free slots, too",
         "A forced block with one of the best scores then takes a free slot as well as its own, "
         "and the list is a block short. Which blocks compete for the free slots?"),
        ("-scores[block]", "(-scores[block], -block)", "letting ties go to the higher number",
         "Equal scores are common, for instance among blocks without a visible summary. Every "
         "implementation needs the same rule: which block comes first?"),
        ("chosen = sorted(", "chosen = (", "listing by score instead of by number",
         "The order of the scores is needed to choose, not afterwards. In which order does a "
         "kernel walk through memory?"),
        ("in range(own + 1)", "in range(len(scores))", "choosing blocks of the future",
         "Blocks after `own` hold only keys that the query must not see, so their slots would be "
         "lost. Which blocks may compete?"),
        ("*rest]", "*rest, *range(own + 1, len(scores))]",
         "filling empty slots with hidden blocks of the future",
         "A score of −∞ only puts a block last. `topk` takes −∞ blocks, too, when too few others "
         "are left. What belongs in such a slot?"),
        (" + [-1] * (top_n - len(chosen))", "", "leaving out the -1s",
         "Early queries have fewer than `top_n` blocks behind them, and yet all lists are rows "
         "of one tensor. How long is a row?"),
        ("chosen + [-1] * (top_n - len(chosen))", "[-1] * (top_n - len(chosen)) + chosen",
         "writing the -1s in front",
         "−1 is the smallest number, so it comes first where you sort after filling up. When "
         "should you fill up?"),
        ("range(max(own - num_local + 1, 0), own + 1)",
         "range(own, min(own + num_local, len(scores)))",
         "forcing local blocks ahead of the query",
         "The latest `num_local` blocks end with the query's own. In which direction do you "
         "count?"),
        ("min(num_initial, own + 1)", "num_initial", "forcing first blocks ahead of the query",
         "For a query in the first block, the second block is still the future, forced or not. "
         "Which rule has the last word?"),
        ("max(own - num_local + 1, 0), own + 1", "max(own - num_local, 0), own",
         "not counting the own block among the local ones",
         "The own block is the latest there is, and the one that summaries know least about. "
         "Where does the count begin?"),
        ("num_local + 1", "num_local", "forcing one local block too many",
         "The blocks from `own - num_local` to `own` are `num_local + 1` blocks. Where do the "
         "latest `num_local` begin?"),
        ({"max(own": "(own", ", 0)": ")"}, "counting local blocks back past block 0",
         "There is a −1 in front that is no empty slot: it is `own - num_local + 1`. Where does "
         "the text begin?"),
        ("range(max(own - num_local + 1, 0), own + 1)", "[*range(own + 1)][-num_local:]",
         "taking the last num_local blocks with a slice that means all of them for 0",
         "In Python `[-num_local:]` is the whole list where `num_local` is 0. What else says "
         "that no block is forced?"),
        ("in range(own + 1)", "in range(own)", "listing the own block only where it is forced",
         "Where nothing is forced, the own block competes by its score like any other block of "
         "the past. Does your range end before it?"),
        ("range(max(own - num_local + 1, 0), own + 1)", "[own]",
         "forcing the own block, whatever num_local says",
         "`num_local` counts the latest blocks that are forced. That may be none, or several. "
         "Which blocks are they for `num_local` = 2, and which for 0?"),
        ("sorted({*first, *latest})", "[*first, *latest]",
         "a block twice, once as first and once as local",
         "For an early query the first blocks are the latest ones, too. What happens to the "
         "attention of a block that is listed twice?"),
        ("[:top_n])", ")[:top_n]", "cutting the list after it was sorted by number",
         "Once the list ascends, its first `top_n` are the lowest numbers, whatever their score. "
         "In which order do you have to cut?"),
        ("sorted({*first, *latest})", "[]", "forcing nothing",
         "`num_initial` and `num_local` say which blocks are on the list whatever their score. "
         "Which ones are they here?"),
        ("{*first, *latest}", "first", "forcing the first blocks alone",
         "The query's own block and those before it may score low, and are listed all the same. "
         "Which blocks does `num_local` put on the list?"),
        ("{*first, *latest}", "latest", "forcing the latest blocks alone",
         "The latest blocks are on your list whatever their score. Which ones does `num_initial` "
         "put there?"),
        ("-scores[block]", "scores[block]", "taking the smallest scores",
         "Sorting ascends unless you say otherwise. Which end of the order do you want?"),
        ("-scores[block]", "(scores[block], -block)", "taking the smallest scores"),
    ]),
    cases=(
        Case("own block 3, two slots free for the best",
             lambda: ([0.1, 0.5, 0.3, 0.0], 3, 3, 0, 1)),
        Case("own block 4 of 6, first and own forced",
             lambda: ([0.0, 0.2, 0.9, 0.4, 0.1, 0.8], 4, 3, 1, 1)),
        Case("a forced block has the best score", lambda: ([0.9, 0.2, 0.3, 0.4, 0.1], 4, 3, 1, 1)),
        Case("equal scores", lambda: ([0.2, 0.2, 0.2, 0.2, 0.2], 4, 3, 0, 1)),
        Case("own block 1: fewer blocks than slots", lambda: ([0.3, 0.7, 0.9, 0.8], 1, 4, 1, 2)),
        Case("the first block of a text", lambda: ([1.0, 2.0], 0, 3, 1, 2)),
        Case("the first block again, two forced in front", lambda: ([0.5, 0.2, 0.1], 0, 3, 2, 1)),
        Case("two forced at either end",
             lambda: ([0.0, 0.0, 0.6, 0.9, 0.7, 0.0, 0.0, 1.0], 6, 5, 2, 2)),
        Case("nothing forced", lambda: ([0.2, 0.1, 0.3, 0.4], 3, 2, 0, 0)),
        Case("nothing forced, the own block worth least",
             lambda: ([0.2, 0.4, 0.3, 0.1], 3, 2, 0, 0)),
    ),
)  # fmt: skip


# -- who_learns --


def who_learns(o: Tensor, tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors in which a small change changes `o`, as far as autograd knows."""
    # None: not connected at all
    gradients = torch.autograd.grad(o.sum(), list(tensors.values()), allow_unused=True)
    return [
        name for name, g in zip(tensors, gradients, strict=True) if g is not None and (g != 0).any()
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
    q, k, v, w = leaves.values()
    cut = {"length": 4, "stride": 2}
    k_cmp = ops.compress(k, kind="weighted", weight=w, **cut)
    v_cmp = ops.compress(v, **cut)
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, return_lse=True, **cut)
    forced = {"num_initial": 0, "num_local": 1}
    ids = ops.select_blocks(q, k_cmp, lse, top_n=2, block_size=8, **cut, **forced)
    o_slc = ops.selected_attention(q, k, v, ids, block_size=8)
    parts = [gate * o for gate, o in ((g_cmp, o_cmp), (g_slc, o_slc)) if gate is not None]
    return sum(parts[1:], parts[0])[:, -1], leaves


def _difference() -> tuple[Tensor, dict[str, Tensor]]:
    """An output whose gradient has places that cancel in a sum, exactly."""
    x = torch.tensor([2.0, 1.0], requires_grad=True)
    return x[0] - x[1], {"x": x}


_LEARNS = TEXTS.exercise(
    "who_learns", minutes=5, difficulty=2, solution=who_learns,
    misconceptions=diffs(who_learns, [
        ("# None: not connected at all", "return list(tensors)",
         "taking everything that could learn for something that learns",
         "`requires_grad` says that a tensor asks for a gradient. A gradient arrives only where "
         "a way leads from `o` back to the tensor. Does one lead through a list of integers?"),
        (" and (g != 0).any()", "", "taking a gradient of zeros for learning",
         "Times 0, an output stays connected to its tensors, but their gradients are 0 in every "
         "place. What does a training step do with such a tensor?"),
        (", allow_unused=True", "", "not allowing for a tensor that o does not depend on",
         "PyTorch raises an error for a tensor that has no part in `o`, and here that is an "
         "answer, not an accident. Which argument of `torch.autograd.grad` lets it be unused?"),
        ("g is not None and ", "", "forgetting that a gradient may be None",
         "For a tensor that `o` does not depend on, PyTorch gives None in place of a gradient of "
         "zeros. What does your condition ask of None?"),
        ("(g != 0).any()", "(g != 0).all()", "asking for a gradient in every place",
         "Keys and values of blocks that are on no list get a gradient of 0, the others do not: "
         "such a tensor learns in part. How many places are enough?"),
        ("(g != 0).any()", "g.sum() > 0", "asking whether the gradient's sum is above 0",
         "A gradient has negative places, too, and a sum lets them cancel. What does a training "
         "step do with a place of −1?"),
        ("(g != 0).any()", "g.sum() != 0", "asking whether the gradient's sum is 0",
         "A gradient of [1, −1] sums to 0, and yet a training step moves both places. What do "
         "you ask of each place, before any sum?"),
        ("(g != 0).any()", "(g > 0).any()", "asking for a place above 0",
         "A gradient may be negative in every place. What does a training step do with a place "
         "of −1?"),
        ("g is not None and (g != 0).any()", "g is None or (g == 0).all()",
         "naming those that do not learn",
         "These are just the other ones. Which way round is your condition?"),
    ]),
    cases=(
        Case("the selected branch alone", lambda: _branches(None, 1.0)),
        Case("the compressed branch alone", lambda: _branches(1.0, None)),
        Case("0.5 times each of both", lambda: _branches(0.5, 0.5)),
        Case("both, the compressed branch times 0", lambda: _branches(0.0, 1.0)),
        Case("-0.5 times each of both", lambda: _branches(-0.5, -0.5)),
        Case("x[0] - x[1], with the gradient [1, -1]", _difference),
    ),
)  # fmt: skip


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


def _sums_case(name: str, R: int, L: int, pieces: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (R, L, pieces), lambda: here.why_not("triton", here.device))


_SUMS = TEXTS.exercise(
    "block_sums", minutes=6, difficulty=2, solution=block_sums, run=_run_block_sums,
    misconceptions=diffs(block_sums, [
        (" - (L - 1)", "", "starting with the summaries that begin in the block",
         "A summary may begin before the block and end in it. How many pieces before the block "
         "does the first of them begin?"),
        ("(L - 1)", "1", "starting one summary before the block, whatever the length",
         "That is right for summaries of two pieces. How far back does a summary of `L` pieces "
         "begin, if only its last piece is in the block?"),
        ("(L - 1)", "L", "starting one summary too early",
         "A summary of `L` pieces that begins `L` pieces before the block ends where the block "
         "begins. Which is the first whose last piece is in the block?"),
        ("block * R - (L - 1)", "block * 4 - 1",
         "taking blocks of 4 pieces and summaries of 2 for all sizes",
         "That is right for the chapter's example. What do `R` and `L` say about the others?"),
        ("block * R - (L - 1)", "block * R - (R - 1) - (L - 1)",
         "executing the paper's Eq. 9 as it stands",
         "Eq. 9 counts blocks and summaries from 1, so your program adds up the block before. At "
         "which piece does block 1 begin here?"),
        ("block * R", "0", "every program takes the first block",
         "All programs run the same code. Which number tells one from the next?"),
        ("block * R - (L - 1)", "0", "every program takes the first block"),
        ("block * R", "block * K", "stepping from block to block by K summaries",
         "K summaries touch a block, but neighbours share some of them. After how many pieces "
         "does the next block begin?"),
        ("block * R - (L - 1)", "block * K", "stepping from block to block by K summaries"),
        ("block * R - (L - 1)", "block", "stepping from block to block by one summary",
         "A block is `R` pieces long, and one summary begins at each piece. Where does block 1 "
         "begin?"),
        ("(summary >= 0) & (summary < M)", "place < KT", "reading summaries that do not exist",
         "`P` has summaries 0 to M - 1. Block 0 asks for one before them, the last block for "
         "some behind them. What lies there in memory? (`place < K` does not say. Nor do two "
         "conditions without parentheses, as `&` comes before `<`.)"),
        ("(summary >= 0) & ", "", "masking only past the last summary",
         "Did you write `and`, or a chain such as `0 <= a < b`? Of two tiles, they keep only the "
         "second condition: join both with `&`. The first block has a summary before it, with a "
         "negative number. What lies in memory before `P`?"),
        (" & (summary < M)", "", "masking only before the first summary",
         "Did you write `and`, or a chain such as `0 <= a < b`? Of two tiles, they keep only the "
         "second condition: join both with `&`. The last block asks for summaries that never "
         "begin, because the text ends. What lies in memory behind `P`?"),
        ("summary >= 0", "summary > 0", "leaving out summary 0",
         "Summaries count from 0, and number 0 exists. Is your comparison `>` or `>=`?"),
        ("summary < M", "summary <= M", "one summary too many",
         "The last summary is M - 1. Is your comparison `<` or `<=`?"),
        ("p * weight", "p", "forgetting how much of a summary lies in a block",
         "A summary that lies wholly in the block counts twice as much as one at its edge. Where "
         "do the numbers of `W` come in?"),
        ("tl.sum(p * weight, axis=0)", "p * weight", "storing a tile where one number belongs",
         "`p * weight` is a tile of `KT` numbers, and the block has one place in `Importance`. "
         "Which function of `tl` makes one number of a tile?"),
        ("tl.sum(", "tl.max(", "taking the largest share in place of the sum",
         "Every summary that touches the block adds to its importance. Which reduction adds?"),
        ("p * weight, axis=0)", "p * weight, axis=0) / tl.sum(weight, axis=0)",
         "taking the mean over a block's summaries",
         "Eq. 9 is a plain sum. What do you divide by?"),
    ]),
    cases=(
        _sums_case("blocks of 4 pieces, summaries of 2, a text of 4 blocks", 4, 2, 16),
        _sums_case("summaries of 3 pieces, blocks of 3", 3, 3, 9),
        _sums_case("summaries of one piece: none reaches over an edge", 3, 1, 6),
        _sums_case("a text that ends within its last block", 2, 2, 7),
    ),
)  # fmt: skip


EXERCISES = (_OVERLAP, _IMPORTANCE, _CHOOSE, _LEARNS, _SUMS)

DOUBLES = (
    Double("overlap", names=(
        "executing the paper's Eq. 9 as it stands", "counting tokens where pieces are asked for")),
    Double("overlap", names=(
        "counting tokens where pieces are asked for", "listing summaries that do not exist")),
    Double("overlap", names=(
        "ending the loop over the summaries too early",
        "counting tokens where pieces are asked for")),
    Double("block_importance", names=(
        "averaging over the heads", "forgetting how much of a summary lies in a block")),
    Double("choose_blocks", names=(
        "listing by score instead of by number", "leaving out the -1s")),
    Double("choose_blocks", names=(
        "forced blocks on top of top_n", "choosing blocks of the future")),
    Double("who_learns", names=(
        "taking a gradient of zeros for learning",
        "not allowing for a tensor that o does not depend on")),
)  # fmt: skip

TRAPS = TEXTS.traps

PREDICTIONS = TEXTS.predictions(
    globals(),
    best_4_blocks={"unit": "%", "tolerance": 0.03},
    cheap_4_blocks={"unit": "%", "tolerance": 0.02},
    one_loud_head={"choices": (0, 1)},
    without_own_block={"unit": "%", "tolerance": 0.05},
    branch_that_teaches={"choices": ("compressed", "selected", "both")},
)
