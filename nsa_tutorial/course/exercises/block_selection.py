"""Exercises of chapter 07: the whole choice of a group's list, from summaries to one block, what
learns from it, and a kernel that adds up one block's summaries."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.widgets.block_selection import draw_lists, draw_overlap
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
    "overlap", minutes=7, difficulty=2, solution=overlap,
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


# -- select_blocks --


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, top_n: int, block_size: int, length: int, stride: int,
    num_initial: int, num_local: int,
) -> Tensor:  # fmt: skip
    """The blocks on the list of each query and KV head, [N, H, top_n], from q [N, HQ, D], summary
    keys k_cmp [M_c, H, D] and lse [N, HQ]."""
    (N, _, D), (M_c, H, _) = q.shape, k_cmp.shape
    t, start = torch.arange(N)[:, None], torch.arange(M_c) * stride

    # each head's attention to the summaries that have ended (Eq. 8), and the group's sum (Eq. 10)
    has_ended = (start + length <= t + 1)[:, None, None]  # [N, 1, 1, M_c]
    s = torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (H, -1)), k_cmp) * D**-0.5
    p = torch.exp(s - lse.unflatten(1, (H, -1))[..., None])
    p = p.masked_fill(~has_ended, 0).sum(2)  # [N, H, M_c]

    # from summaries to blocks, by the pieces that they share (Eq. 9)
    block = torch.arange(-(-N // block_size))
    first, own = block[:, None] * block_size, t // block_size
    tokens = torch.minimum(start + length, first + block_size) - torch.maximum(start, first)
    importance = p @ (tokens.clamp(min=0) / stride).T.to(p.dtype)  # [N, H, NB]

    # forced blocks before the best, and none of the future (Eq. 11)
    is_forced = (block < num_initial) | (block > own - num_local)
    importance = importance.masked_fill(is_forced[:, None], torch.inf)
    importance = importance.masked_fill((block > own)[:, None], -torch.inf)
    best, ids = importance.sort(dim=-1, descending=True, stable=True)
    ids = ids.masked_fill(best == -torch.inf, len(block))[..., :top_n].sort(-1).values
    ids = torch.nn.functional.pad(ids, (0, top_n - ids.shape[-1]), value=len(block))
    return ids.masked_fill(ids == len(block), -1)


def _run_select(
    solution: Callable, q: Tensor, k_cmp: Tensor, lse: Tensor, top_n: int, block_size: int,
    length: int, stride: int, num_initial: int, num_local: int, since: int,
) -> object:  # fmt: skip
    """The lists of the queries from `since` on: what stands before them is for later stages."""
    tensors = q, k_cmp, lse
    as_given = [x.clone() for x in tensors]
    ids = solution(*tensors, top_n, block_size, length, stride, num_initial, num_local)
    expect_unchanged(tensors, as_given)
    if isinstance(ids, Tensor) and ids.is_floating_point():
        dtype = str(ids.dtype).removeprefix("torch.")
        raise ValueError(f"got ids of {dtype}, expected integers, which can stand in an index")
    is_whole = isinstance(ids, Tensor) and ids.ndim > 0 and len(ids) == len(q)
    return ids[since:] if is_whole else ids


def _choice(
    name: str, N: int, cut: tuple[int, int, int], top_n: int, *, HQ: int = 1, H: int = 1,
    D: int = 4, forced: tuple[int, int] = (0, 0), since: int = -1, seed: int = 0,
    scores: list[list[float]] | None = None, more: float = 0.0,
) -> Case:  # fmt: skip
    """Lists to be chosen for all `N` queries, and judged from query `since` on.

    Args:
        name, N, HQ, H, D, top_n, seed: the case, and its sizes.
        cut: length and stride of the summaries, and the block size.
        forced: `num_initial` and `num_local`.
        since: the first query whose list counts; -1 is the last query alone.
        scores: those of each head with each summary, the same for all queries and exact, with one
            KV head and `D = 4`; None draws queries and summaries.
        more: a key that is no summary adds `more * i` to the `lse` of head `i`.
    """
    length, stride, block_size = cut
    M_c = max((N - length) // stride + 1, 0)

    def arguments() -> tuple:
        q = _random(N, HQ, D, seed=seed, factor=2.0)
        k_cmp = _random(M_c, H, D, seed=seed + 1)
        if scores is not None:
            q = 2 * torch.eye(4)[:HQ].expand(N, HQ, 4)
            k_cmp = torch.zeros(M_c, 1, 4)
            k_cmp[:, 0, :HQ] = torch.tensor(scores).T
        s = torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (H, -1)), k_cmp) * D**-0.5
        ends = torch.arange(M_c) * stride + length
        is_hidden = ends > torch.arange(N)[:, None, None, None] + 1
        lse = s.masked_fill(is_hidden, -torch.inf).logsumexp(-1).flatten(1)
        lse = lse + more * torch.arange(HQ)
        return q, k_cmp, lse, top_n, block_size, length, stride, *forced, since % N

    return Case(name, arguments)


_P = "torch.exp(s - lse.unflatten(1, (H, -1))[..., None])"
_FORCE = "importance = importance.masked_fill(is_forced[:, None], torch.inf)"
_HIDE = "importance = importance.masked_fill((block > own)[:, None], -torch.inf)"
_FIRST = "first, own = block[:, None] * block_size"
_IS_FORCED = "(block < num_initial) | (block > own - num_local)"
_SHARED = "tokens.clamp(min=0) / stride"


def _own_softmax(s: Tensor, has_ended: Tensor) -> Tensor:
    """A softmax over the summaries that have ended; 0 in a row without any."""
    e = torch.exp(s - s.amax(-1, keepdim=True)).masked_fill(~has_ended, 0)
    return e / e.sum(-1, keepdim=True).clamp(min=1e-30)


def _together(s: Tensor, has_ended: Tensor, of_group: Callable) -> Tensor:
    """One softmax of what a group's scores come to."""
    return _own_softmax(of_group(s), has_ended)


def _forced_twice(
    importance: Tensor, is_forced: Tensor, number: int, slots: int = 0
) -> tuple[Tensor, Tensor]:
    """The `number` forced blocks, and the best of all blocks behind them. With `slots`, forced
    blocks among the best `slots` of them are dropped."""
    forced = torch.where(is_forced, 0.0, -torch.inf).expand_as(importance)
    both = (x.sort(dim=-1, descending=True, stable=True) for x in (forced, importance))
    (a, i), (b, j) = both
    if slots:
        b = b.masked_fill(is_forced.expand_as(b).gather(-1, j), -torch.inf)
        b = b.masked_fill(torch.arange(b.shape[-1]) >= slots - number, -torch.inf)
    return torch.cat([a[..., :number], b], -1), torch.cat([i[..., :number], j], -1)


_SELECT = TEXTS.exercise(
    "select_blocks", minutes=50, difficulty=3, solution=select_blocks, run=_run_select,
    tolerance=0.0, picture=draw_lists, forbidden=(("nsa_tutorial", "the course's own function"),),
    stages=(
        Stage("one summary a block", (
            _choice("the last of 32 queries, 4 blocks of 8, scores 2, 3, 0, 4", 32, (8, 8, 8), 2,
                    scores=[[2.0, 3.0, 0.0, 4.0]]),
            _choice("the last of 64 queries, 8 blocks, 4 slots", 64, (8, 8, 8), 4, D=8, seed=2001),
            _choice("the last of 32 queries, 4 blocks, 4 slots", 32, (8, 8, 8), 4,
                    scores=[[2.0, 3.0, 0.0, 4.0]]),
        )),
        Stage("overlap", (
            _choice("summaries of 4 every 2, 16 blocks of 8", 128, (4, 2, 8), 6, D=8, seed=2802),
            _choice("summaries of 8 every 4, 16 blocks of 8", 128, (8, 4, 8), 6, seed=5803),
            _choice("summaries longer than a block: of 6 every 2, blocks of 4", 64, (6, 2, 4), 6,
                    seed=2104),
            _choice("nothing divides: summaries of 5 every 3, blocks of 4, 50 tokens", 50,
                    (5, 3, 4), 5, seed=305),
        )),
        Stage("a group's sum", (
            _choice("three heads agree, a fourth one shouts for block 1", 24, (8, 8, 8), 2, HQ=4,
                    scores=[*[[3.0, 0.0, 3.0]] * 3, [0.0, 20.0, 3.0]]),
            _choice("three heads on one KV head", 192, (4, 2, 8), 8, HQ=3, seed=3206),
            _choice("four heads on one KV head", 192, (4, 2, 8), 8, HQ=4, seed=307),
        )),
        Stage("KV heads", (
            _choice("four heads on two KV heads", 96, (4, 2, 8), 4, HQ=4, H=2, seed=1908),
            _choice("six heads on two KV heads", 96, (8, 4, 8), 4, HQ=6, H=2, D=8, seed=2809),
        )),
        Stage("forced blocks", (
            _choice("the first and the two latest forced, two slots left", 96, (4, 2, 8), 5, HQ=2,
                    forced=(1, 2), seed=1910),
            _choice("the own block forced", 96, (4, 2, 8), 4, HQ=2, forced=(0, 1), seed=5011),
            _choice("two forced in front, none behind", 96, (8, 4, 8), 4, HQ=2, forced=(2, 0),
                    seed=5912),
            _choice("a forced block is also the best", 48, (8, 8, 8), 4, forced=(1, 1),
                    scores=[[4.0, 1.0, 3.0, 2.0, 0.0, 2.5]]),
            _choice("every slot forced", 96, (8, 4, 8), 4, HQ=2, forced=(1, 3), seed=413),
        )),
        Stage("hidden summaries", (
            _choice("queries 40 to 63", 64, (4, 2, 8), 3, HQ=2, since=40, seed=1),
            _choice("queries 48 to 63, summaries of 12 on blocks of 8", 64, (12, 4, 8), 4, HQ=2,
                    forced=(1, 2), since=48, seed=1015),
        )),
        Stage("ties", (
            _choice("scores 1, 2, 1, 2, 2, 1: three of 2 for two slots", 48, (8, 8, 8), 2,
                    scores=[[1.0, 2.0, 1.0, 2.0, 2.0, 1.0]]),
            _choice("40 blocks of 8 with equal scores, the own one forced", 320, (8, 8, 8), 4,
                    forced=(0, 1), scores=[[1.0] * 40]),
        )),
        Stage("fewer blocks than slots", (
            _choice("all queries of 32, 4 slots", 32, (4, 2, 8), 4, HQ=2, since=0, seed=16),
            _choice("all queries of 22, more slots than blocks", 22, (4, 2, 8), 5, HQ=2,
                    forced=(2, 1), since=0, seed=17),
            _choice("summaries of 24: the first queries see none", 40, (24, 4, 8), 2, HQ=2,
                    forced=(0, 1), since=0, seed=18),
            _choice("25 tokens, of which the last is in no summary", 25, (4, 4, 8), 2, HQ=2,
                    forced=(0, 1), since=0, seed=19),
            _choice("3 tokens: no summary at all", 3, (4, 2, 2), 3, HQ=2, forced=(0, 1), since=0,
                    seed=20),
        )),
        Stage("the given lse", (
            _choice("head 1's `lse` counts a key that is no summary", 96, (4, 2, 8), 4, HQ=2,
                    forced=(0, 1), since=0, seed=2419, more=2.0),
        )),
    ),
    misconceptions=diffs(select_blocks, [
        # -- Eq. 8 --
        (" * D**-0.5", "", "scores without the scale",
         "`lse` is that of the scaled scores. Which factor makes `q @ k` a score?"),
        (_P, "s", "leaving the softmax out",
         "Scores may be negative, and heads have no common scale. What is handed out is "
         "attention: what makes it of a score and its `lse`?"),
        (_P, "torch.exp(s)", "exponentials without their sum",
         "A head with large scores then outweighs the others by orders of magnitude. Which "
         "argument holds what a head's exponentials add up to? (It holds the sum's *logarithm*.)"),
        (_P, "torch.exp(s) / lse.unflatten(1, (H, -1))[..., None]",
         "exponentials without their sum"),
        (_P, "_own_softmax(s, has_ended)", "a softmax of your own in place of the given lse",
         "The compressed branch has done that sum, and here it counted one key more. One "
         "exponential a summary is enough. Which?"),
        (_P, "torch.exp2(s - lse.unflatten(1, (H, -1))[..., None])", "`exp2` without log2(e)",
         "`lse` is a natural logarithm, and $2^x$ is not $e^x$. Which function turns it back, or "
         "which factor does `exp2` need?"),
        (_P, "torch.softmax(s, -1)", "hidden summaries that stay in the denominator",
         "Hidden summaries have the share 0, but the others no longer add up to 1: your softmax "
         "divides by the hidden ones, too. Which sum leaves them out, and is given?"),
        # -- Eq. 10 --
        (_P, "_together(s, has_ended, lambda s: s.sum(2, keepdim=True))",
         "adding up the heads' scores before the softmax",
         "A head with large scores then decides alone, and a factor `G` behind the softmax "
         "changes no order. Each head has one unit of attention to give away: when is it handed "
         "out?"),
        (_P, "torch.exp((s - lse.unflatten(1, (H, -1))[..., None]).sum(2, keepdim=True))",
         "adding up the heads' scores before the softmax"),
        (_P, "torch.exp(s.sum(2, keepdim=True) - "
             "s.sum(2, keepdim=True).masked_fill(~has_ended, -torch.inf).logsumexp(-1, True))",
         "adding up the heads' scores before the softmax"),
        (_P, "_together(s, has_ended, lambda s: s.mean(2, keepdim=True))",
         "averaging the heads' scores before the softmax",
         "The softmax of a mean score is not the mean of softmaxes. Each head has one unit of "
         "attention to give away: when is it handed out?"),
        (_P, "_together(s, has_ended, lambda s: s.amax(2, keepdim=True))",
         "taking the largest of the heads' scores before the softmax",
         "The head with the largest scores then decides alone. Each head has one unit of "
         "attention to give away: when is it handed out?"),
        (".sum(2)", ".amax(2)", "taking the largest share among the heads",
         "One head that is sure then counts as much as four that agree. What does Eq. 10 do with "
         "the heads' shares?"),
        (".sum(2)", "[:, :, 0]", "asking only the first head of the group",
         "The list serves all `G` heads. What do the other heads' shares say?"),
        (".sum(2)", ".flatten(1, 2)", "a list for each head of a group",
         "A loaded block serves all heads of the group, so they share one list. What has to "
         "happen to the heads' shares?"),
        # -- KV heads --
        ({"q.unflatten(1, (H, -1))": "q.unflatten(1, (-1, H)).transpose(1, 2)",
          _P: "torch.exp(s - lse.unflatten(1, (-1, H)).transpose(1, 2)[..., None])"},
         "query heads that read the wrong KV head",
         "Query head `hq` reads KV head `hq // G`: heads 0 and 1 of four read head 0 of two. "
         "Which axis comes first when you cut `HQ`?"),
        ("q.unflatten(1, (H, -1))", "q.unflatten(1, (-1, H)).transpose(1, 2)",
         "query heads that read the wrong KV head"),
        ("p.masked_fill(~has_ended, 0).sum(2)",
         "p.masked_fill(~has_ended, 0).sum((1, 2)).unsqueeze(1)",
         "one list for all KV heads",
         "Each KV head loads blocks of its own, and has a list of its own. Over which heads does "
         "Eq. 10 sum?"),
        ("p.masked_fill(~has_ended, 0).sum(2)",
         "p.masked_fill(~has_ended, 0).sum((1, 2)).unsqueeze(1).expand(-1, H, -1)",
         "one list for all KV heads"),
        (", k_cmp) *", ", k_cmp[:, :1].expand_as(k_cmp)) *", "all heads on KV head 0",
         "With one KV head that is right, and hides the mistake. Which summaries does the second "
         "group read?"),
        # -- visible summaries --
        ("start + length <= t + 1", "start + t >= 0",
         "giving attention to summaries that are not visible yet",
         "A summary counts once its window has ended. What is the last token of summary `j`, and "
         "which queries stand there or later?"),
        ("start + length <= t + 1", "start <= t",
         "letting a summary be seen when its window begins",
         "The window's length is left out. A summary also holds tokens behind its first one: "
         "which is the last, and who may see it?"),
        ("<= t + 1", "<= t", "letting a summary be seen only after its last token",
         "A query sees its own token. If a window ends with that token, what in it is from the "
         "future?"),
        # -- Eq. 9 --
        (_SHARED, "((start >= first) & (start < first + block_size)).float()",
         "counting only the summaries that begin in the block, once each",
         "A summary may begin before the block and end in it, and two pieces in the block count "
         "twice as much as one. How many tokens do a summary and a block share?"),
        (_SHARED, "(tokens > 0).float()",
         "giving all summaries that touch the block the same weight",
         "A summary at the edge speaks mostly of the neighbouring block. How much of it is about "
         "this one?"),
        (_SHARED, "(tokens >= length).float()",
         "counting only summaries that lie wholly in the block",
         "The summaries at the two edges share some of their tokens with the block. What is left "
         "where a summary is longer than a block?"),
        (_SHARED, "tokens.clamp(min=0) / stride * (start >= first)",
         "leaving out the summaries that begin before the block",
         "Which summary begins before the block and ends in it?"),
        (_SHARED, "tokens.clamp(min=0) / stride * (start + length <= first + block_size)",
         "leaving out the summaries that end behind the block",
         "Which summary begins in the block and ends behind it?"),
        (_SHARED, "tokens / stride", "negative weights for summaries that share nothing",
         "The earlier end less the later start is negative where two stretches do not meet. How "
         "many tokens do they share then?"),
        (_FIRST, "first, own = block[:, None] * block_size - block_size + stride",
         "executing the paper's Eq. 9 as it stands",
         "Eq. 9 counts blocks and summaries from 1, we count from 0, so every block gets mostly "
         "the summaries of the one before. Which summaries touch the tokens of block 1?"),
        (_FIRST, "first, own = block[:, None] * block_size + length - stride",
         "Eq. 9 with +m +n",
         "Your sum begins with the first summary that begins in the block, and runs past its end. "
         "Counted from 0, one of the two signs is a minus: a summary that reaches into the block "
         "begins *before* it."),
        (_FIRST, "first, own = block[:, None] * block_size + stride",
         "counting the paper's blocks from 1, and its summaries from 0",
         "You have moved the block. In Eq. 9 the summaries are counted from 1 as well: what is "
         "its summary 4 called here?"),
        (_SHARED, "((start // stride - block[:, None] * (block_size // stride) + 2).clamp(0, 6)"
                  "[..., None] == torch.arange(1, 6)).float() @ torch.tensor([1.0, 2, 2, 2, 1])",
         "taking 1, 2, 2, 2, 1 for all sizes",
         "Those five numbers belong to blocks of four pieces and summaries of two. What are they "
         "where a block is as long as a summary?"),
        (_SHARED, "torch.nn.functional.normalize(tokens.clamp(min=0).float(), p=1, dim=1)",
         "taking the mean over a block's summaries",
         "You divide by the weights of each block. Eq. 9 is a plain sum: a block that shares more "
         "pieces with summaries gets more. Where does the sum of a row come in?"),
        (_SHARED, "torch.floor(tokens.clamp(min=0) / stride)",
         "counting whole pieces where a piece may be cut",
         "Where `stride` does not divide the other sizes, a summary may share half a piece with "
         "the block. Is half a piece nothing?"),
        ("torch.arange(M_c) * stride", "torch.arange(M_c) * length",
         "laying the summaries side by side",
         "They begin every `stride` tokens, whatever their length. At which token does summary 1 "
         "begin?"),
        ("-(-N // block_size)", "N // block_size", "forgetting a last block that is not full",
         "50 tokens in blocks of 4: which block holds tokens 48 and 49?"),
        ("-(-N // block_size)", "max(-(-((M_c - 1) * stride + length) // block_size), 1)",
         "counting the blocks that summaries reach",
         "The last tokens of a text may be in no summary, and still they are in a block. Which "
         "argument says how many tokens there are?"),
        # -- Eq. 11 --
        (_IS_FORCED, "(block < 0) & (own >= 0)", "forcing nothing",
         "`num_initial` and `num_local` say which blocks are on the list whatever their score. "
         "Which ones are they here?"),
        (_IS_FORCED, "(block < num_initial) & (own >= 0)", "forcing the first blocks alone",
         "The query's own block and those before it may score low, and are listed all the same. "
         "Which blocks does `num_local` put on the list?"),
        (_IS_FORCED, "block > own - num_local", "forcing the latest blocks alone",
         "The latest blocks are on your list whatever their score. Which ones does `num_initial` "
         "put there?"),
        (_IS_FORCED, "block > own - 1", "forcing the own block alone, whatever is asked",
         "That is `num_initial` = 0 and `num_local` = 1. Both are arguments, and may be 0 or "
         "several. Which blocks are forced for 1 and 2?"),
        (_IS_FORCED, "(block < num_initial) | (block > own - 1)",
         "forcing the own block, whatever num_local says",
         "`num_local` counts the latest blocks that are forced. That may be none, or several. "
         "Which blocks are they for `num_local` = 2, and which for 0?"),
        ("own - num_local", "own - num_local - 1", "forcing one local block too many",
         "The blocks from `own - num_local` to `own` are `num_local + 1` blocks. Where do the "
         "latest `num_local` begin?"),
        (_IS_FORCED, "(block < num_initial) | ((block >= own - num_local) & (block < own))",
         "not counting the own block among the local ones",
         "The own block is the latest there is, and the one that summaries know least about. "
         "Where does the count begin?"),
        (_FORCE, "importance = importance + is_forced[:, None]",
         "a bonus that real importance can beat",
         "A group of `G` heads has `G` units of attention to give, and pieces count double. Which "
         "score beats every importance there can be?"),
        (_FORCE, "importance = importance.masked_fill(is_forced[:, None], 1.0)",
         "a bonus that real importance can beat"),
        ({"[..., :top_n].sort": "[..., : top_n + num_initial + num_local].sort",
          "(0, top_n - ids.shape[-1])": "(0, max(top_n - ids.shape[-1], 0))"},
         "giving forced blocks slots beyond `top_n`",
         "A list has `top_n` slots in all, and forced blocks take up slots like any other. How "
         "many are left for the best?"),
        ({_FORCE: "is_forced = is_forced & (block <= own)",
          "importance.sort(dim=-1, descending=True, stable=True)":
              "_forced_twice(importance, is_forced[:, None], num_initial + num_local)"},
         "choosing among the forced blocks, too",
         "A forced block is on the list already. Where it is also one of the best, it takes a "
         "second slot. Among which blocks are the free slots given out?"),
        ({_FORCE: "is_forced = is_forced & (block <= own)",
          "importance.sort(dim=-1, descending=True, stable=True)":
              "_forced_twice(importance, is_forced[:, None], num_initial + num_local, top_n)"},
         "choosing among the forced blocks, too"),
        ({"[..., :top_n].sort(-1).values": ".sort(-1).values[..., :top_n]"},
         "cutting the list after it was sorted by number",
         "Once the list ascends, its first `top_n` are the lowest numbers, whatever their score. "
         "In which order do you have to cut?"),
        ("[..., :top_n].sort(-1).values", "[..., :top_n]", "listing by score instead of by number",
         "The order of the scores is needed to choose, not afterwards. In which order does a "
         "kernel walk through memory?"),
        ("descending=True", "descending=False", "taking the smallest scores",
         "Sorting ascends unless you say otherwise. Which end of the order do you want?"),
        # -- ties, and slots that stay empty --
        ({"best, ids = importance.sort(dim=-1, descending=True, stable=True)":
              "best, ids = importance.flip(-1).sort(dim=-1, descending=True, stable=True); "
              "ids = len(block) - 1 - ids"},
         "letting ties go to the higher number",
         "Equal scores are common, for instance among blocks without a visible summary. Every "
         "implementation needs the same rule: which block comes first?"),
        ("importance.sort(dim=-1, descending=True, stable=True)",
         "importance.topk(min(top_n, len(block)), -1)", "leaving ties to `topk`",
         "PyTorch's `topk` promises no order among equals. Which sort does, and by which "
         "argument?"),
        ("importance.sort(dim=-1, descending=True, stable=True)",
         "importance.sort(dim=-1, descending=True)", "leaving ties to a sort that is not stable",
         "PyTorch's `sort` keeps equals in their order only if you ask it to. By which argument?"),
        ("(block > own)[:, None]", "(block >= own)[:, None]", "leaving the query's own block out",
         "The own block is no future: the query sees its first part, and itself. Where does the "
         "future begin?"),
        ("best == -torch.inf", "best <= 0", "listing only blocks of positive importance",
         "A block without a visible summary has importance 0, and still fills a slot that is "
         "free. Which blocks may never be listed?"),
        ("ids.masked_fill(best == -torch.inf, len(block))", "ids",
         "filling empty slots with blocks of the future",
         "A score of −∞ only puts a block last, and where too few others are left, it is taken "
         "all the same. What belongs in such a slot?"),
        ({_FORCE: _HIDE, _HIDE: _FORCE,
          _IS_FORCED: "(block < num_initial) | ((block > own - num_local) & (block <= own))"},
         "forcing first blocks ahead of the query",
         "For a query in the first block, the second block is still the future, forced or not. "
         "Which rule has the last word?"),
        ({"ids.masked_fill(best == -torch.inf, len(block))":
              "ids.masked_fill(best == -torch.inf, -1)",
          "value=len(block))": "value=-1).sort(-1).values"},
         "writing the -1s in front",
         "−1 is the smallest number, so it comes first where you sort after filling up. When "
         "should you fill up?"),
        ("    ids = torch.nn.functional.pad(ids, (0, top_n - ids.shape[-1]), value=len(block))\n",
         "", "a list shorter than `top_n`",
         "Where a text has fewer blocks than a list has slots, the tensor still has `top_n` of "
         "them. What stands in the rest?"),
        ({"p = p.masked_fill(~has_ended, 0).sum(2)": "p = p.sum(2)",
          _P: "torch.exp(s.masked_fill(~has_ended, -torch.inf) - "
              "lse.unflatten(1, (H, -1))[..., None])"},
         "NaN where no summary is visible",
         "The first queries of a text see no summary: their scores and their `lse` are −∞. What "
         "is −∞ − (−∞), and where does a sort put it?"),
    ]),
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
    def kernel(Shares, Weights, Importance, M_c, block_pieces, summary_pieces, touch,
               PLACES: tl.constexpr):  # fmt: skip
        block = tl.program_id(0)  # this program's block
        place = tl.arange(0, PLACES)  # a power of two: `touch`, or the next above it
        weight = tl.load(Weights + place, mask=place < touch, other=0.0)  # [PLACES]
        summary = block * block_pieces - (summary_pieces - 1) + place  # [PLACES]
        exists = (summary >= 0) & (summary < M_c)
        share = tl.load(Shares + summary, mask=exists, other=0.0)
        total = tl.sum(share * weight, axis=0)
        tl.store(Importance + block, total)

    return kernel


def _run_block_sums(
    solution: Callable, block_pieces: int, summary_pieces: int, pieces: int
) -> Tensor:
    """Launch the kernel on a text of so many pieces; before and behind the shares lies infinity."""
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
    M_c, NB = pieces - summary_pieces + 1, -(-pieces // block_pieces)
    touch = block_pieces + summary_pieces - 1
    places = triton.next_power_of_2(touch)
    shares = roomy(1 + torch.arange(M_c) % 7 + torch.arange(M_c) / 16, torch.inf)
    weight = torch.full((places,), 1000.0)
    for i in range(touch):
        shared = range(i - summary_pieces + 1, i + 1)  # its pieces, counted from the block's first
        weight[i] = sum(0 <= piece < block_pieces for piece in shared)
    importance = roomy(torch.full((NB,), torch.nan), torch.nan)
    sizes = (M_c, block_pieces, summary_pieces, touch)
    kernel[NB,](shares, roomy(weight, 1000.0), importance, *sizes, PLACES=places)
    return importance.cpu()


def _refuse_tensors_of_the_notebook(kernel: Callable) -> None:
    """A misspelt name may be one of the notebook's, where it would fail far from its cause."""
    code = kernel.__code__
    for name in code.co_names:
        if isinstance(kernel.__globals__.get(name), Tensor):
            near = difflib.get_close_matches(name, code.co_varnames, 1)
            meant = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(f"`{name}` is a tensor of the notebook, not of the kernel.{meant}")


def _sums_case(name: str, block_pieces: int, summary_pieces: int, pieces: int) -> Case:
    here = environment.detect()
    sizes = (block_pieces, summary_pieces, pieces)
    return Case(name, lambda: sizes, lambda: here.why_not("triton", here.device))


_BEGIN = "block * block_pieces - (summary_pieces - 1)"
_SUMS = TEXTS.exercise(
    "block_sums", minutes=8, difficulty=2, solution=block_sums, run=_run_block_sums,
    misconceptions=diffs(block_sums, [
        (" - (summary_pieces - 1)", "", "starting with the summaries that begin in the block",
         "A summary may begin before the block and end in it. How many pieces before the block "
         "does the first of them begin?"),
        ("(summary_pieces - 1)", "1", "starting one summary before the block, whatever the length",
         "That is right for summaries of two pieces. How far back does a summary of "
         "`summary_pieces` pieces begin, if only its last piece is in the block?"),
        ("(summary_pieces - 1)", "summary_pieces", "starting one summary too early",
         "A summary of `summary_pieces` pieces that begins that many pieces before the block "
         "ends where the block begins. Which is the first whose last piece is in the block?"),
        (_BEGIN, "block * 4 - 1",
         "taking blocks of 4 pieces and summaries of 2 for all sizes",
         "That is right for the chapter's example. What do `block_pieces` and `summary_pieces` "
         "say about the others?"),
        (_BEGIN, "block * block_pieces - (block_pieces - 1) - (summary_pieces - 1)",
         "executing the paper's Eq. 9 as it stands",
         "Eq. 9 counts blocks and summaries from 1, so your program adds up the block before. At "
         "which piece does block 1 begin here?"),
        ("block * block_pieces", "0", "every program takes the first block",
         "All programs run the same code. Which number tells one from the next?"),
        (_BEGIN, "0", "every program takes the first block"),
        ("block * block_pieces", "block * touch",
         "stepping from block to block by `touch` summaries",
         "Neighbouring blocks share some of the summaries that touch them. After how many pieces "
         "does the next block begin?"),
        (_BEGIN, "block * touch", "stepping from block to block by `touch` summaries"),
        (_BEGIN, "block", "stepping from block to block by one summary",
         "A block is `block_pieces` pieces long, and one summary begins at each piece. Where "
         "does block 1 begin?"),
        ("(summary >= 0) & (summary < M_c)", "place < PLACES",
         "reading summaries that do not exist",
         "`Shares` has summaries 0 to M_c - 1. Block 0 asks for one before them, the last "
         "block for some behind them. What lies there in memory? (Two conditions without "
         "parentheses do not say, as `&` comes before `<`.)"),
        ("(summary >= 0) & (summary < M_c)", "place < touch",
         "asking for the place where the summary's number decides",
         "`place` counts from 0 in every program, so it cannot tell the first block from the last. "
         "Which of the two names says that a summary lies before the text, or behind it?"),
        ("(summary >= 0) & ", "", "masking only past the last summary",
         "Did you write `and`, or a chain such as `0 <= a < b`? Of two tiles, they keep only the "
         "second condition: join both with `&`. The first block has a summary before it, with a "
         "negative number. What lies in memory before `Shares`?"),
        (" & (summary < M_c)", "", "masking only before the first summary",
         "Did you write `and`, or a chain such as `0 <= a < b`? Of two tiles, they keep only the "
         "second condition: join both with `&`. The last block asks for summaries that never "
         "begin, because the text ends. What lies in memory behind `Shares`?"),
        ("summary >= 0", "summary > 0", "leaving out summary 0",
         "Summaries count from 0, and number 0 exists. Is your comparison `>` or `>=`?"),
        ("summary < M_c", "summary <= M_c", "one summary too many",
         "The last summary is M_c - 1. Is your comparison `<` or `<=`?"),
        ("share * weight", "share", "forgetting how much of a summary lies in a block",
         "A summary that lies wholly in the block counts twice as much as one at its edge. Where "
         "do the numbers of `Weights` come in?"),
        ("tl.sum(share * weight, axis=0)", "share * weight",
         "storing a tile where one number belongs",
         "`share * weight` is a tile of `PLACES` numbers, and the block has one place in "
         "`Importance`. Which function of `tl` makes one number of a tile?"),
        ("tl.sum(", "tl.max(", "taking the largest share in place of the sum",
         "Every summary that touches the block adds to its importance. Which reduction adds?"),
        ("share * weight, axis=0)", "share * weight, axis=0) / tl.sum(weight, axis=0)",
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


EXERCISES = (_SELECT, _OVERLAP, _LEARNS, _SUMS)

DOUBLES = (
    Double("overlap", names=(
        "executing the paper's Eq. 9 as it stands", "counting tokens where pieces are asked for")),
    Double("overlap", names=(
        "counting tokens where pieces are asked for", "listing summaries that do not exist")),
    Double("overlap", names=(
        "ending the loop over the summaries too early",
        "counting tokens where pieces are asked for")),
    Double("who_learns", names=(
        "taking a gradient of zeros for learning",
        "not allowing for a tensor that o does not depend on")),
)  # fmt: skip

TRAPS = TEXTS.traps

PREDICTIONS = TEXTS.predictions(
    globals(),
    cheap_4_blocks={"unit": "%", "tolerance": 0.02},
    one_loud_head={"choices": (0, 1)},
    without_own_block={"unit": "%", "tolerance": 0.05},
    branch_that_teaches={"choices": ("compressed", "selected", "both")},
)
