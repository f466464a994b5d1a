"""Exercises of chapter 19: scores of which a mean hides what a maximum finds, an indexer that
learns which blocks matter, built from an empty body, and summaries and tokens in one list."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.course.attempts import NoGradient
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


class _Said(NoGradient):
    """In place of an answer that is of another kind than asked for: what the reader is told."""

    @property
    def told(self) -> str:
        """What the reader is told and asked."""
        return self.argument


_FLOATS = _Said(
    "The ids came back as floats. They are indices, and those are whole numbers. In which line "
    "does your tensor of ids get its dtype?"
)
_NO_LOSS = _Said(
    "Your lists hold. No loss comes with them yet: the function is to return "
    "`ids, loss`. How far is the indexer's softmax from the attention?"
)


# -- needle_scores --


def needle_scores(block_size: int) -> Tensor:
    """Scores [2 * block_size] of two blocks, from -4 to 4: the mean prefers block 0, and block 1
    holds more than nine tenths of the attention."""
    dull, needle = torch.full((block_size,), -3.0), torch.full((block_size,), -4.0)
    needle[block_size // 2] = 4.0
    return torch.cat([dull, needle])


def _run_needle(solution: Callable, block_size: int) -> object:
    """What holds of the scores, by what is asked of them."""
    scores = solution(block_size)
    if scores is None:
        return None
    if not isinstance(scores, Tensor) or scores.shape != (2 * block_size,):
        is_tensor = isinstance(scores, Tensor)
        came = f"shape {list(scores.shape)}" if is_tensor else f"type {type(scores).__name__}"
        return _Said(f"Got {came}, expected a tensor of shape [{2 * block_size}].")
    scores = scores.detach().double()
    mean = scores.view(2, -1).mean(1)
    share = scores.softmax(0).view(2, -1).sum(1)[1]
    bounded = scores.abs().max() <= 4 + 1e-6
    return {
        "within -4 and 4": bool(bounded),
        "mean prefers block 0": bool(mean[0] > mean[1]),
        "block 1 holds 9/10": bool(share > 0.9),
        "block 0 holds more": bool(share < 0.5),
    }


_NEEDLE = TEXTS.exercise(
    "needle_scores", minutes=6, difficulty=1, solution=needle_scores, run=_run_needle,
    misconceptions=diffs(needle_scores, [
        ("needle[block_size // 2] = 4.0", "needle[block_size // 2] = 5.0",
         "scores beyond the bounds",
         "No score may be above 4 or below -4. How low can the rest of the needle's block go?"),
        ("-3.0", "-4.0", "a mean that finds the needle",
         "Block 1 has one large score, which lifts its mean a little. What has to hold of all of "
         "block 0, so that its mean is higher still?"),
        ("-3.0", "0.0", "a dull block that holds attention, too",
         "Each of its tokens gets little, but there are many. How low may they all be, with a "
         "mean above that of block 1?"),
        ({"(block_size,), -3.0)": "(block_size,), 0.0)",
          "(block_size,), -4.0)": "(block_size,), 0.0)"}, "one needle among zeros",
         "The needle lifts the mean of its block. How low must the other tokens of that block be, "
         "so that it comes down again?"),
        ("torch.cat([dull, needle])", "torch.cat([needle, dull])", "the two blocks exchanged",
         "Block 0 comes first, and it is the dull one."),
    ], pairs=False),
    cases=(
        Case("two blocks of 16 tokens", lambda: (16,)),
        Case("two blocks of 32 tokens", lambda: (32,)),
    ),
)  # fmt: skip


# -- entry_lists --


def entry_lists(N: int, length: int, stride: int, window_size: int) -> Tensor:
    """The keys [N, S] that each query reads in HCA: summaries that have ended, and its window."""
    t, M_c = torch.arange(N)[:, None], max((N - length) // stride + 1, 0)
    summary, window = torch.arange(M_c).expand(N, -1), t - torch.arange(window_size)
    summary = torch.where(summary * stride + length <= t + 1, summary, -1)
    window = torch.where(window >= 0, M_c + window, -1)
    return torch.cat([summary, window], 1)


def _run_entries(solution: Callable, *sizes: int) -> object:
    """The keys of each query in order, without empty slots."""
    ids = solution(*sizes)
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return ids
    if ids.is_floating_point():
        return _FLOATS
    return [sorted(i for i in row if i != -1) for row in ids.tolist()]


_COUNT = "max((N - length) // stride + 1, 0)"

_ENTRIES = TEXTS.exercise(
    "entry_lists", minutes=13, difficulty=2, solution=entry_lists, run=_run_entries,
    misconceptions=diffs(entry_lists, [
        ("M_c + window", "window", "tokens that are called by their position",
         "Summaries stand in front, so token 0 is not key 0. Which key is it?"),
        ("summary * stride + length <= t + 1", "summary * stride <= t",
         "a summary that is read once it begins",
         "A summary holds tokens up to its last one. When is this past (chapter 06)?"),
        ("length <= t + 1", "length <= t", "a summary that is read too late",
         "A query sees its own token. If a summary ends with it, what in it is from the future?"),
        ("torch.where(window >= 0, M_c + window, -1)", "M_c + window",
         "a window that runs into the summaries",
         "The first queries have no full window behind them. What lies in front of token 0?"),
        ("t - torch.arange(window_size)", "t - 1 - torch.arange(window_size)",
         "a window without the query itself",
         "A window of 1 is the query's own token (chapter 05). Which tokens has yours?"),
        ("t - torch.arange(window_size)", "t - torch.arange(window_size + 1)",
         "a window that is one too long",
         "How many tokens has a window of 1?"),
        ("summary = torch.where(summary * stride + length <= t + 1, summary, -1)", "pass",
         "summaries of the future",
         "All queries read all summaries. Which of them have ended by query `t`?"),
    ]) + diffs(entry_lists, [
        (_COUNT, "N // stride", "summaries counted by their strides",
         "The last one has to be whole, too. How many summaries of 4 every 2 lie in 9 tokens, and "
         "which of them would end with token 9, which is not there (chapter 06)?"),
        (_COUNT, _COUNT.removeprefix("max(").removesuffix(", 0)"),
         "fewer than no summaries",
         "A text may be much shorter than a summary. What does your count of summaries say then?"),
        ({_COUNT: _COUNT.removeprefix("max(").removesuffix(", 0)"),
          "torch.arange(M_c)": "torch.arange(max(M_c, 0))"}, "fewer than no summaries"),
    ], pairs=False),
    cases=(
        Case("6 tokens, summaries of 2 every 2, a window of 2", lambda: (6, 2, 2, 2)),
        Case("9 tokens, summaries of 4 every 2, a window of 3", lambda: (9, 4, 2, 3)),
        Case("20 tokens, summaries of 5 every 3, a window of 4", lambda: (20, 5, 3, 4)),
        Case("fewer tokens than a summary has", lambda: (3, 4, 4, 2)),
        Case("far fewer tokens than a summary has", lambda: (3, 8, 2, 2)),
    ),
)  # fmt: skip


# -- learned_index --


def learned_index(
    q: Tensor, k: Tensor, q_idx: Tensor, k_idx: Tensor, w: Tensor, top_n: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """The blocks [N, top_n] that the indexer lists for each query, and the loss it learns by."""
    (N, HQ, D), DI, t = q.shape, k_idx.shape[1], torch.arange(len(q))
    is_hidden = t > t[:, None]

    # what the indexer thinks of each token
    products = torch.einsum("njd,md->njm", q_idx, k_idx) * DI**-0.5
    score = (w[..., None] * products.relu()).sum(1)  # [N, N]

    # the best visible token of each block, and the best blocks
    visible = score.detach().masked_fill(is_hidden, -torch.inf)
    visible = F.pad(visible, (0, -N % block_size), value=-torch.inf)
    of_block = visible.unflatten(1, (-1, block_size)).amax(-1)  # [N, NB]
    NB = of_block.shape[1]
    best, ids = of_block.sort(dim=-1, descending=True, stable=True)
    ids = ids.masked_fill(best == -torch.inf, NB)[:, :top_n].sort(-1).values
    ids = F.pad(ids, (0, top_n - ids.shape[1]), value=NB)
    ids = ids.masked_fill(ids == NB, -1)

    # the attention that it is to foresee, and how far it is from that
    with torch.no_grad():
        s = torch.einsum("nhd,md->nhm", q, k) * D**-0.5
        p = s.masked_fill(is_hidden[:, None], -torch.inf).softmax(-1)
        target = p.sum(1) / HQ
    log_p = score.masked_fill(is_hidden, -torch.inf).log_softmax(-1)
    log_p = log_p.masked_fill(is_hidden, 0)
    loss = (torch.xlogy(target, target) - target * log_p).sum(-1).mean()
    return ids, loss


def _run_index(solution: Callable, what: str, since: int, *arguments: object) -> object:
    """Of an answer, what a stage asks for: the lists of the queries from `since` on, the loss, or
    the loss and its gradients."""
    *tensors, top_n, block_size = arguments
    names = "q_idx", "k_idx", "w"
    if what == "gradients":
        tensors = [x.clone().requires_grad_() for x in tensors]
    got = solution(*tensors, top_n, block_size)
    ids, loss = got if isinstance(got, tuple) and len(got) == 2 else (got, None)
    if what == "ids":
        if isinstance(ids, Tensor) and ids.is_floating_point():
            return _FLOATS
        is_whole = isinstance(ids, Tensor) and ids.ndim > 0 and len(ids) == len(tensors[0])
        return ids[since:] if is_whole else ids
    if loss is None and ids is not None:
        return _NO_LOSS
    if what == "loss" or not isinstance(loss, Tensor):
        return loss.detach() if isinstance(loss, Tensor) else loss
    if not loss.requires_grad:
        return loss, False, *map(NoGradient, names)
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    is_main = any(d is not None and bool(d.any()) for d in found[:2])
    of_indexer = zip(found[2:], names, strict=True)
    return loss.detach(), is_main, *(NoGradient(name) if d is None else d for d, name in of_indexer)


def _index(
    name: str, N: int, top_n: int, block_size: int, *, HI: int = 1, HQ: int = 1, D: int = 4,
    DI: int = 4, what: str = "ids", since: int = -1, seed: int = 0, sign: float = 0.0,
) -> Case:  # fmt: skip
    """A case for `N` tokens. `sign` is that of all weights, 0 for weights of both signs; `since` is
    the first query whose list counts, -1 the last one alone."""

    def arguments() -> tuple:
        shapes = ((N, HQ, D), (N, D), (N, HI, DI), (N, DI), (N, HI))
        tensors = [_random(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes)]
        if sign:
            tensors[4] = sign * (tensors[4].abs() + 0.2)
        return what, since % N, *(2 * x for x in tensors[:2]), *tensors[2:], top_n, block_size

    return Case(name, arguments)


def _no_opinion() -> tuple:
    """Weights of 0: every visible token has a score of 0."""
    q, k, q_idx, k_idx, w = (_random(*s, seed=i) for i, s in enumerate(
        ((24, 1, 4), (24, 4), (24, 2, 4), (24, 4), (24, 2))))  # fmt: skip
    return "ids", 12, q, k, q_idx, k_idx, 0 * w, 2, 4


_SCORE = "(w[..., None] * products.relu()).sum(1)"
_MAXIMUM = "visible.unflatten(1, (-1, block_size)).amax(-1)  # [N, NB]"
_MASKED = "score.detach().masked_fill(is_hidden, -torch.inf)"
_SORT = "of_block.sort(dim=-1, descending=True, stable=True)"
_TARGET = "p.sum(1) / HQ"
_P = "s.masked_fill(is_hidden[:, None], -torch.inf).softmax(-1)"
_LOG_P = "score.masked_fill(is_hidden, -torch.inf).log_softmax(-1)"
_LOSS = "(torch.xlogy(target, target) - target * log_p).sum(-1).mean()"
_OWN = (  # future blocks hidden, and the rest of the own block not
    "visible.unflatten(1, (-1, block_size)).amax(-1); of_block = of_block.masked_fill("
    "torch.arange(of_block.shape[1]) > t[:, None] // block_size, -torch.inf)"
)


def _forced(of_block: Tensor, block_size: int, *, initial: int = 0, local: int = 1) -> Tensor:
    """The scores of blocks, with the first ones and the latest ones above all others."""
    block, own = torch.arange(of_block.shape[1]), torch.arange(len(of_block))[:, None] // block_size
    is_forced = (block < initial) | (block > own - local)
    return of_block.masked_fill(is_forced & (block <= own), torch.inf)


def _mean_of_visible(visible: Tensor, block_size: int) -> Tensor:
    """A block's mean over its visible tokens; -inf without any."""
    x = visible.unflatten(1, (-1, block_size))
    is_seen = x != -torch.inf
    mean = x.masked_fill(~is_seen, 0).sum(-1) / is_seen.sum(-1).clamp(min=1)
    return mean.masked_fill(~is_seen.any(-1), -torch.inf)


def _sum_of_visible(visible: Tensor, block_size: int) -> Tensor:
    """A block's sum over its visible tokens; -inf without any."""
    count = (visible.unflatten(1, (-1, block_size)) != -torch.inf).sum(-1)
    return _mean_of_visible(visible, block_size) * count.clamp(min=1)


def _blocks_of_best_tokens(visible: Tensor, top_n: int, block_size: int) -> Tensor:
    """A block counts if one of the `top_n` best tokens is in it, and the best one first."""
    order = visible.sort(dim=-1, descending=True, stable=True).indices
    is_best = torch.zeros_like(visible, dtype=torch.bool).scatter_(1, order[:, :top_n], True)
    chosen = visible.masked_fill(~is_best, -torch.inf)
    return chosen.unflatten(1, (-1, block_size)).amax(-1)


_INDEX = TEXTS.exercise(
    "learned_index", minutes=50, difficulty=3, solution=learned_index, run=_run_index,
    returns=("loss", "a gradient in q or k", "d_q_idx", "d_k_idx", "d_w"),
    tolerance=1e-6, forbidden=(("nsa_tutorial", "the course's own indexer"),),
    stages=(
        Stage("one head", (
            _index("the last of 12 queries, blocks of one token, 3 slots", 12, 3, 1, seed=1,
                   sign=1.0),
            _index("the last of 20 queries, 4 slots", 20, 4, 1, seed=2, sign=1.0),
        )),
        Stage("heads and weights", (
            _index("four heads, 12 tokens, 9 slots", 12, 9, 1, HI=4, seed=5),
            _index("three heads with weights of both signs", 24, 4, 1, HI=3, seed=3),
            _index("five heads", 40, 6, 1, HI=5, seed=4),
        )),
        Stage("the best of a block", (
            _index("8 blocks of 4, 3 slots", 32, 3, 4, HI=3, seed=6),
            _index("10 blocks of 8, 3 slots", 80, 3, 8, HI=3, seed=7),
            _index("12 blocks of 8, 5 slots", 96, 5, 8, HI=4, seed=8),
            _index("30 tokens: the last block has 2, and all scores are negative", 30, 3, 4, HI=3,
                   seed=9, sign=-1.0),
        )),
        Stage("causal", (
            _index("queries 16 to 39, blocks of 4", 40, 3, 4, HI=6, since=16, seed=10),
            _index("queries 40 to 61, blocks of 8", 62, 4, 8, HI=6, since=40, seed=11),
            _index("all weights negative, queries 16 to 39", 40, 3, 4, HI=6, since=16, seed=12,
                   sign=-1.0),
        )),
        Stage("short lists and ties", (
            _index("all queries of 20, 3 slots", 20, 3, 4, HI=2, since=0, seed=13),
            _index("more slots than blocks", 22, 8, 4, HI=2, since=0, seed=14),
            Case("an indexer without an opinion: all scores are 0", _no_opinion),
        )),
        Stage("the loss", (
            _index("six tokens, one head", 6, 2, 2, HI=2, what="loss", seed=15),
            _index("twenty tokens, one head", 20, 2, 4, HI=3, DI=9, what="loss", seed=16),
        )),
        Stage("a group's attention", (
            _index("three heads in the group", 10, 2, 2, HI=2, HQ=3, what="loss", seed=17),
            _index("four heads in the group", 24, 2, 4, HI=3, HQ=4, what="loss", seed=18),
        )),
        Stage("who learns", (
            _index("its gradients, two heads in the group", 10, 2, 2, HI=2, HQ=2,
                   what="gradients", seed=19),
            _index("its gradients, four heads in the group", 21, 2, 4, HI=3, HQ=4,
                   what="gradients", seed=20),
        )),
    ),
    misconceptions=diffs(learned_index, [
        # -- scores --
        ("products.relu()", "products", "scores without the relu",
         "A head with a negative product then speaks against a token. What does each head's "
         "product become before it is weighted?"),
        (_SCORE, "(w[..., None] * products).sum(1).relu()", "a relu after the sum over heads",
         "Each head decides alone whether it sees anything in a token. Where does the relu stand, "
         "before the sum or after it?"),
        (_SCORE, "products.relu().sum(1)", "heads without their weights",
         "Which argument says how much each query trusts each of the heads?"),
        (_SCORE, "(w[..., None] * products).relu().sum(1)", "a relu around the weighted products",
         "A weight may be negative. What should a head with a negative weight do to a token's "
         "score?"),
        # -- from tokens to blocks --
        (_MAXIMUM, "_mean_of_visible(visible, block_size)",
         "a mean or a sum in place of the maximum",
         "One token that matters is lost among many that do not. What does a block's best token "
         "say?"),
        (_MAXIMUM, "_sum_of_visible(visible, block_size)",
         "a mean or a sum in place of the maximum"),
        (_MAXIMUM, "_blocks_of_best_tokens(visible, top_n, block_size)",
         "choosing tokens first, and then their blocks",
         "Two of the best tokens may share a block, and then a slot stays empty. Of what are the "
         "best `top_n` asked for?"),
        ("(0, -N % block_size), value=-torch.inf", "(0, -N % block_size)",
         "a filled-up token that wins",
         "All scores may be negative, and then a 0 beats them. With what do you fill up the last "
         "block?"),
        # -- forced --
        (_SORT, f"_forced(of_block, block_size).{_SORT.removeprefix('of_block.')}",
         "an own block that is forced",
         "In chapter 07, the query's own block was always listed. Does anything force a block "
         "here, or does its best token have to earn the place?"),
        (_SORT, "_forced(of_block, block_size, initial=1, local=2)"
         ".sort(dim=-1, descending=True, stable=True)", "forced blocks: the first and the latest",
         "In NSA, three blocks were always listed (chapter 07). Does anything force a block here?"),
        # -- causal --
        ({_MASKED: "score.detach()", _MAXIMUM: _OWN}, "the future of the own block in its maximum",
         "The own block is past only up to the query itself. Over which of its tokens do you take "
         "the maximum?"),
        (_MASKED, "score.detach()", "blocks of the future",
         "Query 16 must not know token 17. What do you do to scores of later tokens before you "
         "take a maximum?"),
        (_MASKED, "score.detach().masked_fill(is_hidden, 0)", "hidden scores set to 0",
         "A maximum and a softmax take a 0 for a score like any other, and it beats all negative "
         "ones. Which score loses against everything?"),
        ("t > t[:, None]", "t >= t[:, None]", "a query that does not see itself",
         "A query attends to its own token, too. Is a token at the query's position hidden?"),
        # -- lists --
        ("[:, :top_n].sort(-1).values", "[:, :top_n]", "a list in the order of its scores",
         "Lists ascend, as in chapter 07. What is still to be done with the ids?"),
        ("ids = ids.masked_fill(ids == NB, -1)", "ids = ids", "a block that does not exist",
         "What stands in a slot that holds no block?"),
        ("ids.masked_fill(best == -torch.inf, NB)[:, :top_n]", "ids[:, :top_n]",
         "blocks of the future in slots that should be empty",
         "Sorting puts hidden blocks last, but they still have ids. What are these to become?"),
        ("ids.masked_fill(best == -torch.inf, NB)", "ids.masked_fill(best == -torch.inf, -1)",
         "empty slots in front",
         "Empty slots come last in a list. Where does sorting put a -1, and what could stand there "
         "while you sort?"),
        ("ids = F.pad(ids, (0, top_n - ids.shape[1]), value=NB)", "pass",
         "fewer slots than asked for",
         "Every list has `top_n` slots, also where there are fewer blocks. What stands in the "
         "others?"),
        ("value=NB)\n", "value=0)\n", "block 0 in the empty slots",
         "What stands in a slot that holds no block?"),
        ({"of_block.sort(dim": "of_block.flip(1).sort(dim",
          "ids = ids.masked_fill(best": "ids = (NB - 1 - ids).masked_fill(best"},
         "ties that go to the later block",
         "After a relu, many scores are exactly 0. Which of two equal blocks comes first?"),
        (_SORT, "of_block.topk(min(top_n, of_block.shape[1]))", "`topk`, which keeps no order "
         "among ties",
         "After a relu, many scores are exactly 0, and `topk` takes any of them. Which argument "
         "of `sort` keeps equal blocks in the order of their ids?"),
    ], pairs=False) + diffs(learned_index, [
        (" * D**-0.5", "", "attention without its scale",
         "The target is the attention of the main heads. Which factor have their scores?"),
        (" * DI**-0.5", "", "products without the scale",
         "It changes no list, but the loss. Which factor makes a product a score?"),
        ({_LOG_P: "score.log_softmax(-1)"}, "a softmax over hidden tokens",
         "The indexer's probability that goes to the future is lost. Over which tokens is its "
         "softmax?"),
        (_LOSS, "(torch.xlogy(target, target) - target * log_p).sum()", "a sum over the queries",
         "A longer text must not count more. By what is the sum over the queries to be divided?"),
    ]) + diffs(learned_index, [
        ("log_p = log_p.masked_fill(is_hidden, 0)", "pass", "0 · -inf at hidden places",
         "There the target is 0 and a logarithm is -inf, and their product is NaN, in "
         "`F.kl_div`, too. What do you write over the -inf *before* you multiply?"),
        ({_LOG_P: f"{_MASKED.replace('.detach()', '')}.softmax(-1).log()"},
         "a gradient of NaN from the logarithm of 0",
         "At hidden places the softmax is 0, and the slope of the logarithm at 0 is infinite. "
         "Masking afterwards mends the loss, but not its gradient. Which function of PyTorch is "
         "both in one?"),
        (_P, "s.softmax(-1).masked_fill(is_hidden[:, None], 0)",
         "a target that gave some attention to the future",
         "Then its visible part sums to less than 1. When do you hide the future, before the "
         "softmax or after it?"),
        (_P, "s.softmax(-1)", "a target that sees the future",
         "Attention is causal, and the target is what attention does. Which scores does query `t` "
         "not have?"),
        ({_P: "s.softmax(-1)", "log_p = log_p.masked_fill(is_hidden, 0)": "pass"},
         "a target that sees the future"),
        (_P, "s.masked_fill(is_hidden[:, None], 0).softmax(-1)", "hidden scores at 0 in a softmax",
         "The exponential of 0 is 1, so hidden tokens keep a part of the sum. Which score has an "
         "exponential of 0?"),
        (_LOG_P, "score.masked_fill(is_hidden, 0).log_softmax(-1)",
         "hidden scores at 0 in a softmax"),
        (_TARGET, "p.sum(1)", "a target that is not normalised",
         "Each head's attention sums to 1. To what does the sum over the group come?"),
        (_TARGET, "p[:, 0]", "the attention of one head",
         "All heads of the group read the list. Whose attention should it foresee?"),
        (_TARGET, "s.mean(1).masked_fill(is_hidden, -torch.inf).softmax(-1)",
         "adding up scores where attention is meant",
         "A head with large scores then decides alone (chapter 07). In which order do softmax and "
         "sum come?"),
        (_TARGET, "s.sum(1).masked_fill(is_hidden, -torch.inf).softmax(-1)",
         "adding up scores where attention is meant"),
        (_LOSS, "(torch.xlogy(p, p).sum(-1).mean(1) - (target * log_p).sum(-1)).mean()",
         "a mean of the heads' divergences",
         "It has the same gradient, but is 0 only if all heads agree. The group reads *one* list. "
         "What stands first, the sum over its heads or the divergence?"),
        (_TARGET, "p.amax(1) / p.amax(1).sum(-1, keepdim=True)",
         "a maximum over the heads", "How do the heads of a group come to one target?"),
        (_LOSS, "(log_p.exp().masked_fill(is_hidden, 0) * (log_p - target.clamp(min=1e-30).log()))"
         ".sum(-1).mean()", "the divergence the other way round",
         "Of KL(target ‖ indexer), the target's probabilities are the weights. By whose do you "
         "weigh?"),
        (_LOSS, "-(target * log_p).sum(-1).mean()", "a cross-entropy",
         "It has the same gradient, but a perfect indexer's loss would not be 0. What of the "
         "target has to be added?"),
        (_LOSS, "(torch.xlogy(target, target) - target * log_p).mean()",
         "a mean over the tokens, too",
         "A divergence is a *sum* over tokens. Over what is the mean?"),
        # -- gradients --
        ("with torch.no_grad():", "if True:", "a gradient into the main heads",
         "Attention would learn to be easy to foresee. How do you stop the target's gradient?"),
        ({_LOG_P: f"{_MASKED}.log_softmax(-1)"}, "a loss that teaches nothing",
         "The list needs no gradient, but the loss does. From which scores do you compute it?"),
    ], pairs=False),
)  # fmt: skip


EXERCISES = (_NEEDLE, _INDEX, _ENTRIES)


# -- two mistakes at once --

DOUBLES = (
    Double("learned_index", names=(
        "a softmax over hidden tokens", "a sum over the queries")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    share_of_choosing={"unit": "%", "choices": (3, 24, 50, 94)},
    who_finds={"choices": ("mean keys", "an indexer", "both alike")},
)
