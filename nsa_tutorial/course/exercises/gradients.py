"""Exercises of chapter 12: the gradient of a score, delta without the row, weights from the
log-sum-exp, the sum over a group, and where ln 2 enters.

The wrong solutions of an exercise are one function, told which slips to make.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Misconception, Stage
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _whole(*shape: int, seed: int) -> Tensor:
    """Whole numbers from -4 to 4, which a reader can multiply by hand."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def _weights(*shape: int, seed: int) -> Tensor:
    return torch.softmax(_random(*shape, seed=seed), -1)


# -- score_gradient --


def score_gradient(p: Tensor, d_p: Tensor) -> Tensor:
    """Gradient of the scores [N, M], from the weights and the gradient of the weights."""
    mean = (p * d_p).sum(-1, keepdim=True)  # [N, 1], what a row's average key is worth
    return p * (d_p - mean)


def _score(slips: Slips, p: Tensor, d_p: Tensor) -> Tensor:
    """`score_gradient` with slips."""
    if "diagonal" in slips:
        return p * (1 - p) * d_p
    if "one row's" in slips:
        return (torch.diag(p) - torch.outer(p, p)) @ d_p
    if "one row's, by @" in slips:
        return (torch.diag(p) - p.T @ p) @ d_p
    weighted = d_p if slips & {"plain sum", "plain mean"} else p * d_p
    dim = (0, 1) if "whole" in slips else 0 if "column" in slips else -1
    average = p @ d_p if "matrix" in slips else weighted.sum(dim, keepdim="flat" not in slips)
    if "output" in slips:  # `o`, as the notebook has it
        average = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), 0) @ torch.tensor([3.0, 0.0, 9.0])
    if slips & {"plain mean", "mean"}:
        average = average / p.shape[-1]
    if "alone" in slips:
        average = 0 * average
    if "swapped" in slips:
        return d_p * (p - average)
    worth = p * d_p if "outside" in slips else d_p
    difference = average - worth if "sign" in slips else worth - average
    if "plus" in slips:
        difference = worth + average
    if slips & {"no weight", "outside"}:
        return difference
    return p * p * difference if "twice" in slips else p * difference


_SCORE_MISTAKES = (
    Misconception(
        "taking `o` for the average",
        slip(_score, "output"),
        "`o` is the average only where the loss is `o` itself, as with the three keys. For any "
        "`d_p`, what is the average of `d_p`, with the weights `p`?",
    ),
    Misconception(
        "forgetting that the other weights shrink",
        slip(_score, "alone"),
        "Weights sum to 1, so raising one score takes weight from all the other keys. What do "
        "they lose together?",
    ),
    Misconception(
        "keeping only the Jacobian's diagonal",
        slip(_score, "diagonal"),
        "`p * (1 - p)` is what a score does to its *own* weight. Which entries of the Jacobian "
        "say what it does to the others?",
    ),
    Misconception(
        "the plain sum of a row of d_p, without the weights",
        slip(_score, "plain sum"),
        "A key with no weight changes nothing, whatever stands in its `d_p`. What should "
        "multiply `d_p` in the sum?",
    ),
    Misconception(
        "the plain mean of a row of d_p, each key counted alike",
        slip(_score, "plain mean"),
        "The average that a key has to beat is the one that attention takes. How much does each "
        "key count in it?",
    ),
    Misconception(
        "dividing the weighted sum by the number of keys",
        slip(_score, "mean"),
        "The weights sum to 1 already, so the weighted sum *is* an average. What does `mean` "
        "divide by once more?",
    ),
    Misconception(
        "summing over the queries, not over the keys",
        slip(_score, "column"),
        "Each query has a softmax of its own. Along which axis do the weights sum to 1?",
    ),
    Misconception(
        "one sum for the whole matrix",
        slip(_score, "whole"),
        "Each query has a softmax of its own, and so an average of its own. Along which axis do "
        "the weights sum to 1?",
    ),
    Misconception(
        "the difference the other way round",
        slip(_score, "sign"),
        "A key that is worth more than the average should *raise* the loss when its score rises. "
        "Which sign does your difference give it?",
    ),
    Misconception(
        "adding the average in place of taking it off",
        slip(_score, "plus"),
        "If all keys are worth the same, no score matters, as the weights sum to 1. What does "
        "your bracket give then?",
    ),
    Misconception(
        "leaving out the weight in front",
        slip(_score, "no weight"),
        "A hidden key has weight 0, and its score must not matter. What does your formula give it?",
    ),
    Misconception(
        "taking the average off outside of the bracket",
        slip(_score, "outside"),
        "A key of weight 0 gets minus the average from you, and its score moves nothing. What "
        "has to multiply the average, too?",
    ),
    Misconception(
        "a sum that has lost its axis",
        slip(_score, "flat"),
        "`sum(-1)` is `[N]`, and PyTorch lines it up with the *last* axis of `[N, M]`, the keys. "
        "Which shape lines up with the queries?",
    ),
    Misconception(
        "the weight in front twice",
        slip(_score, "twice"),
        "In the column of the Jacobian, each entry holds `p_j` once outside of the bracket. "
        "Where does your second one come from?",
    ),
    Misconception(
        "`p` and `d_p` in each other's places",
        slip(_score, "swapped"),
        "The bracket compares a key's worth with the average worth. Is a weight a worth?",
    ),
    Misconception(
        "a matrix product where each row wants a sum of its own",
        slip(_score, "matrix"),
        "`@` sums over the columns of `p` and the *rows* of `d_p`, which are different queries. "
        "How do you multiply number by number, and then sum a row?",
    ),
    *(
        Misconception(
            "the Jacobian of one row, given a whole matrix",
            slip(_score, name),
            "`diag(p) - p pᵀ` is written for one row, and `p` has many. What does the Jacobian's "
            "product with a row of `d_p` come to, without building it?",
        )
        for name in ("one row's", "one row's, by @")
    ),
)

_SCORE = TEXTS.exercise(
    "score_gradient",
    minutes=7,
    difficulty=2,
    solution=score_gradient,
    misconceptions=_SCORE_MISTAKES,
    combine=together(
        _SCORE_MISTAKES,
        {"alone", "diagonal", "plain sum", "plain mean", "mean"},
        {"alone", "diagonal", "column", "whole", "flat"},
        {"diagonal", "sign"},
        {"diagonal", "no weight", "twice", "outside", "swapped"},
        {"alone", "outside"},
        {"alone", "swapped"},
        {"sign", "swapped"},
        *(
            {other, slip}
            for other in ("one row's", "one row's, by @", "output", "matrix", "plus")
            for slip in (
                "alone",
                "diagonal",
                "plain sum",
                "plain mean",
                "mean",
                "column",
                "whole",
                "flat",
                "sign",
                "no weight",
                "twice",
                "outside",
                "swapped",
            )
        ),
        {"one row's", "one row's, by @", "output", "matrix", "plus"},
    ),
    cases=(
        Case(
            "one query, weights ½, ¼, ¼",
            lambda: (torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[4.0, 0.0, 8.0]])),
        ),
        Case(
            "two queries, the first sees one key only",
            lambda: (
                torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]),
                torch.tensor([[2.0, 9.0, 9.0], [4.0, 0.0, 8.0]]),
            ),
        ),
        Case(
            "four queries, five keys",
            lambda: (_weights(4, 5, seed=0), _random(4, 5, seed=1)),
        ),
    ),
)


# -- row_delta --


def row_delta(d_o: Tensor, o: Tensor, d_lse: Tensor) -> Tensor:
    """The delta of each row, [N, HQ], made without the row's weights."""
    return (d_o * o).sum(-1) - d_lse


def _of_the_chapter() -> Tensor:
    """The sums of `p * d_p` of the chapter's eight tokens, `[8]`: a reader has `p` and `d_p` in the
    notebook, and they fit no case."""
    g = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(8, width, generator=g).double() for width in (4, 4, 3, 3))
    s = (0.5 * q @ k.T).masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf)
    return (torch.softmax(s, -1) * (d_o @ v.T)).sum(-1)


def _delta(slips: Slips, d_o: Tensor, o: Tensor, d_lse: Tensor) -> Tensor:
    """`row_delta` with slips."""
    if "notebook's" in slips:
        return _of_the_chapter() - d_lse
    first, second = (o if "output" in slips else d_o), (d_o if "gradient" in slips else o)
    if "inside" in slips:
        first = first - d_lse[..., None]
    if "turned" in slips:
        product = first @ second.permute(2, 1, 0)  # `o.T`
    elif slips & {"every head", "every head, summed"}:
        product = first @ second.mT
    else:
        product = first if "no product" in slips else first * second
    if "heads" in slips:
        product = product.sum(1, keepdim=True).expand_as(product)
    if slips & {"no sum", "no sum, aligned", "every head", "turned"}:
        delta = product
    elif "whole" in slips:
        delta = product.sum()
    else:
        delta = product.sum(1 if "other axis" in slips else -1, keepdim="kept" in slips)
    delta = delta / product.shape[-1] if "mean" in slips else delta
    d_lse = d_lse[..., None] if "no sum, aligned" in slips else d_lse
    if "added" in slips:
        delta = delta + d_lse
    elif "each channel" in slips:
        delta = delta - d_o.shape[-1] * d_lse
    elif "factor" in slips:
        delta = delta * d_lse
    elif not slips & {"no lse", "inside"}:
        delta = delta - d_lse
    if "sign" in slips:
        delta = -delta
    return delta[..., None] if "own axis" in slips else delta


_DELTA_MISTAKES = (
    Misconception(
        "adding the gradient of lse",
        slip(_delta, "added"),
        "The gradient that comes through lse adds `p * d_lse` to `d_s`. Delta stands there "
        "behind a minus. Which sign makes that right?",
    ),
    Misconception(
        "dropping the gradient that comes through lse",
        slip(_delta, "no lse"),
        "A loss may use lse, too: a merge of two branches does. What does `d_lse` add to each "
        "score of the row?",
    ),
    Misconception(
        "multiplying by the gradient of lse",
        slip(_delta, "factor"),
        "Two ways lead from a score to the loss, through `o` and through lse. What happens to "
        "the gradients of two ways?",
    ),
    Misconception(
        "taking d_lse off every channel of d_o",
        slip(_delta, "inside"),
        "In your sum, `d_lse` is multiplied by each channel of `o`. Does the way through lse "
        "pass through the output?",
    ),
    Misconception(
        "taking d_lse off once for each channel",
        slip(_delta, "each channel"),
        "Your `d_lse` stands inside of the sum over the channels. How often is it taken off?",
    ),
    Misconception(
        "averaging over the channels",
        slip(_delta, "mean"),
        "Delta stands in for a sum over keys. Write `d_p` as a product of `d_o` and a value: "
        "which sum over the channels is in it?",
    ),
    Misconception(
        "adding up the heads, too",
        slip(_delta, "heads"),
        "Each head has a softmax of its own, and so a delta of its own. Over which axes may the "
        "sum go?",
    ),
    Misconception(
        "summing over the queries or the heads, not over the channels",
        slip(_delta, "other axis"),
        "The result is one number for each query and head. Which of the three axes has to go?",
    ),
    Misconception(
        "one sum for the whole tensor",
        slip(_delta, "whole"),
        "With one query and one head that is right. How many deltas do two queries need?",
    ),
    *(
        Misconception(
            "multiplying number by number, and not summing",
            slip(_delta, name),
            "The result is one number for each query and head, and your product still has its "
            "channels. What happens to them?",
        )
        for name in ("no sum", "no sum, aligned")
    ),
    *(
        Misconception(
            "the products of each head with all the others",
            slip(_delta, name),
            "`@` multiplies each head's `d_o` with *every* head's `o`. Which pairs of heads does "
            "delta need?",
        )
        for name in ("every head", "every head, summed", "turned")
    ),
    Misconception(
        "weights of the notebook, not of the case",
        slip(_delta, "notebook's"),
        "`p` and `d_p` are not arguments: they belong to the notebook's eight tokens. Which two "
        "arguments give the same sum?",
    ),
    Misconception(
        "taking o times o",
        slip(_delta, "output"),
        "How long `o` is does not matter; what matters is how the loss follows it. Which tensor "
        "says that?",
    ),
    Misconception(
        "taking d_o times d_o",
        slip(_delta, "gradient"),
        "The sum over the keys makes one tensor out of weights and values. Which one?",
    ),
    Misconception(
        "the sum of d_o alone",
        slip(_delta, "no product"),
        "That would be right if every output were 1. What multiplies each channel of `d_o`?",
    ),
    Misconception(
        "the sign turned round",
        slip(_delta, "sign"),
        "`d_s` is `p` times `d_p` *minus* delta. Does delta bring a minus of its own?",
    ),
    Misconception(
        "keeping an axis of length 1",
        slip(_delta, "own axis"),
        "Delta has the shape of lse, `[N, HQ]`. Does your sum keep what it sums over?",
    ),
    Misconception(
        "a sum that keeps its axis, beside a d_lse without one",
        slip(_delta, "kept"),
        "The sum is `[N, HQ, 1]` and `d_lse` is `[N, HQ]`. PyTorch lines axes up from the right. "
        "Which axis of your sum is one too many?",
    ),
)

_CROSSED = {"every head", "every head, summed", "turned"}
_SHAPES = {"other axis", "no sum", "no sum, aligned", *_CROSSED}

_DELTA = TEXTS.exercise(
    "row_delta",
    minutes=6,
    difficulty=2,
    solution=row_delta,
    misconceptions=_DELTA_MISTAKES,
    combine=together(
        _DELTA_MISTAKES,
        *(
            {"each channel", *m.wrong.slips}
            for m in _DELTA_MISTAKES
            if m.wrong.slips != {"each channel"}
        ),
        {"added", "no lse", "factor", "inside"},
        *(
            {"notebook's", slip}
            for slip in (
                "added",
                "no lse",
                "factor",
                "inside",
                "mean",
                "whole",
                "heads",
                "output",
                "gradient",
                "no product",
                "sign",
                "own axis",
                "kept",
                *_SHAPES,
            )
        ),
        {"mean", "whole", *_SHAPES},
        {"heads", "whole", "other axis", *_CROSSED},
        {"output", "gradient", "no product", *_CROSSED},
        {"inside", "turned"},
        {"no product", "inside"},
        {"sign", *_SHAPES},
        {"own axis", "kept", "whole", *_SHAPES},
    ),
    cases=(
        Case(
            "one query, one head, no gradient through lse",
            lambda: (
                torch.tensor([[[1.0, 3.0]]]),
                torch.tensor([[[2.0, 5.0]]]),
                torch.tensor([[0.0]]),
            ),
        ),
        Case(
            "one query, one head, d_lse = 2",
            lambda: (
                torch.tensor([[[1.0, 3.0]]]),
                torch.tensor([[[2.0, 5.0]]]),
                torch.tensor([[2.0]]),
            ),
        ),
        Case(
            "two queries, three heads, two channels",
            lambda: (_whole(2, 3, 2, seed=2), _whole(2, 3, 2, seed=3), _whole(2, 3, seed=4)),
        ),
        Case(
            "three queries, three heads, two channels",
            lambda: (_whole(3, 3, 2, seed=5), _whole(3, 3, 2, seed=6), _whole(3, 3, seed=7)),
        ),
    ),
)


# -- group_gradients --


def group_gradients(
    p: Tensor, d_s: Tensor, q: Tensor, d_o: Tensor, H: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the keys [H, M, D] and of the values [H, M, DV], from all query heads."""
    d_k = scale * d_s.transpose(1, 2) @ q  # [HQ, M, D], each query head's share
    d_v = p.transpose(1, 2) @ d_o  # [HQ, M, DV]
    return d_k.unflatten(0, (H, -1)).sum(1), d_v.unflatten(0, (H, -1)).sum(1)


def _group(
    slips: Slips, p: Tensor, d_s: Tensor, q: Tensor, d_o: Tensor, H: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`group_gradients` with slips."""
    for_k, for_v = (p if "p for k" in slips else d_s), (d_s if "d_s for v" in slips else p)
    if "repeated" in slips:
        q, d_o = (x.repeat_interleave(H, 0) for x in (q, d_o))
    turned = (0, 0) if "not turned" in slips else (0, 2) if "all axes" in slips else (1, 2)
    d_k, d_v = for_k.transpose(*turned) @ q, for_v.transpose(*turned) @ d_o
    d_k = d_k if "no scale" in slips else scale * d_k
    d_v = scale * d_v if "scaled v" in slips else d_v

    def joined(x: Tensor) -> Tensor:
        if "copies" in slips:
            return x
        if "one sum" in slips:
            return x.sum(0, keepdim=True)
        if "all heads" in slips:
            return x.sum(0, keepdim=True).expand(H, -1, -1)
        if "every H-th" in slips:
            x = x.unflatten(0, (-1, H)).transpose(0, 1).flatten(0, 1)
        groups = x.unflatten(0, (H, -1))
        if slips & {"one head", "last head"}:
            return groups[:, 0 if "one head" in slips else -1]
        if "by H" in slips:
            sums = torch.zeros_like(groups[:, 0])
            for head, share in enumerate(x):
                sums[head // H] += share
            return sums
        if "KV heads" in slips:
            return groups.sum(0)
        if "keys" in slips:
            return groups.sum(2)
        return groups.mean(1) if "mean" in slips else groups.sum(1)

    d_k, d_v = joined(d_k), joined(d_v)
    return (d_v, d_k) if "exchanged" in slips else (d_k, d_v)


_GROUP_MISTAKES = (
    Misconception(
        "one sum over all heads, handed to every KV head",
        slip(_group, "all heads"),
        "With one KV head that is right, and hides the mistake. Which query heads read KV head "
        "0 when there are two?",
    ),
    Misconception(
        "one sum over all heads, as if there were one KV head",
        slip(_group, "one sum"),
        "With one KV head that is right, and hides the mistake. How many KV heads does the result "
        "have, and which query heads read each of them?",
    ),
    Misconception(
        "adding up every H-th head, not neighbours",
        slip(_group, "every H-th"),
        "With one KV head both are the same. Query head hq reads KV head hq // G. Where do the "
        "heads of one group stand?",
    ),
    Misconception(
        "a gradient for each query head, not for each KV head",
        slip(_group, "copies"),
        "There are HQ shares here, and H keys. What becomes of the shares of one group?",
    ),
    Misconception(
        "averaging over the group",
        slip(_group, "mean"),
        "Move a shared key a little, and every head of its group sees it move. Do their effects "
        "on the loss add up, or do they average?",
    ),
    Misconception(
        "keeping one head's share for the whole group",
        slip(_group, "one head"),
        "The other heads of the group used the same key. Where do their shares go?",
    ),
    Misconception(
        "keeping the last head's share for the whole group",
        slip(_group, "last head"),
        "Each `=` overwrites the share that was there. What keeps the others, too?",
    ),
    Misconception(
        "dividing a head's number by H, not by G",
        slip(_group, "by H"),
        "With six query heads and two KV heads, the heads 0, 1 and 2 read KV head 0. By which "
        "number do you divide?",
    ),
    Misconception(
        "summing over the KV heads, not over the group",
        slip(_group, "KV heads"),
        "After the split into (H, G) there are two axes of heads, and the result keeps the one "
        "of the KV heads. Which one has to go?",
    ),
    Misconception(
        "summing over the keys, not over the group",
        slip(_group, "keys"),
        "Each key has a gradient of its own. Your axes are (H, G, M, width): which one tells the "
        "members of a group apart?",
    ),
    Misconception(
        "leaving the scale out of d_k",
        slip(_group, "no scale"),
        "A head's scores are `scale * q @ k.T`. By how much does such a score change when a key "
        "does?",
    ),
    Misconception(
        "putting the scale into d_v, too",
        slip(_group, "scaled v"),
        "Values never meet the scale: the output is weights times values. Where does the scale "
        "stand in the forward?",
    ),
    Misconception(
        "the gradient of the scores where d_v wants the weights",
        slip(_group, "d_s for v"),
        "The output is weights times values. By how much does it change when a value does?",
    ),
    Misconception(
        "the weights where d_k wants the gradient of the scores",
        slip(_group, "p for k"),
        "A key acts through its scores. Which matrix says how the loss follows the scores?",
    ),
    Misconception(
        "`.T` where there are three axes",
        slip(_group, "all axes"),
        "`.T` reverses *all* axes, and the heads end up last. Which two of `[HQ, N, M]` have to "
        "change places, for each head by itself?",
    ),
    Misconception(
        "leaving the matrices unturned",
        slip(_group, "not turned"),
        "A gradient of the keys has a row for each key. Over which axis of `[HQ, N, M]` must the "
        "product sum, the queries or the keys?",
    ),
    Misconception(
        "copying the queries, which have all their heads already",
        slip(_group, "repeated"),
        "`q` and `d_o` have HQ heads, as `p` and `d_s` do. Only keys and values are shared, and "
        "their gradients are the results. What is left to copy?",
    ),
    Misconception(
        "d_v before d_k",
        slip(_group, "exchanged"),
        "The order of the results is keys, then values. Which one do you return first?",
    ),
)

_GROUP = TEXTS.exercise(
    "group_gradients",
    minutes=7,
    difficulty=2,
    solution=group_gradients,
    returns=("d_k", "d_v"),
    misconceptions=_GROUP_MISTAKES,
    combine=together(
        _GROUP_MISTAKES,
        {"all heads", "one sum", "every H-th", "copies", "KV heads", "by H"},
        {
            "all heads",
            "one sum",
            "copies",
            "mean",
            "one head",
            "last head",
            "by H",
            "KV heads",
            "keys",
        },
        {"all axes", "not turned", "repeated", "keys"},
    ),
    tolerance=1e-4,
    cases=(
        Case(
            "one query, one key, two heads on each of two KV heads",
            lambda: (
                torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1),
                torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1),
                torch.ones(4, 1, 1),
                torch.tensor([1.0, 1.0, 2.0, 2.0]).view(4, 1, 1),
                2,
                0.5,
            ),
        ),
        Case(
            "one KV head for three heads",
            lambda: (
                _weights(3, 2, 4, seed=8),
                _random(3, 2, 4, seed=9),
                _random(3, 2, 2, seed=10),
                _random(3, 2, 3, seed=11),
                1,
                0.7,
            ),
        ),
        Case(
            "three KV heads, two heads each",
            lambda: (
                _weights(6, 3, 5, seed=12),
                _random(6, 3, 5, seed=13),
                _random(6, 3, 4, seed=14),
                _random(6, 3, 2, seed=15),
                3,
                0.5,
            ),
        ),
        Case(
            "two KV heads, three heads each",
            lambda: (
                _weights(6, 4, 3, seed=16),
                _random(6, 4, 3, seed=17),
                _random(6, 4, 2, seed=18),
                _random(6, 4, 5, seed=19),
                2,
                2.0,
            ),
        ),
    ),
)


# -- weights_again --


def weights_again(q: Tensor, k: Tensor, lse: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """The weights [BQ, BK] of a tile, from the log-sum-exp of the whole rows."""
    acc_s = scale * q @ k.T
    p = torch.exp(acc_s - lse[:, None])
    return p.masked_fill(~is_seen, 0)  # last: it takes what an empty row's exp gives, too


def _again(
    slips: Slips, q: Tensor, k: Tensor, lse: Tensor, is_seen: Tensor, scale: float
) -> Tensor:
    """`weights_again` with slips."""
    acc_s = q @ k.T if "no scale" in slips else scale * q @ k.T
    is_hidden = is_seen if "upside down" in slips else ~is_seen
    if "softmax" in slips:
        return torch.softmax(acc_s.masked_fill(is_hidden, -1e9), -1).masked_fill(is_hidden, 0)
    if "score 0" in slips:
        acc_s = acc_s.masked_fill(is_hidden, 0)
    row = lse[None, :] if "across" in slips else lse[:, None]
    if "scaled lse" in slips:
        row = scale * row
    if "maximum" in slips:
        row = acc_s.masked_fill(is_hidden, -torch.inf).amax(-1, keepdim=True)
    if "no exp" in slips:
        p = acc_s - row
    elif "divided" in slips:
        p = torch.exp(acc_s) / row
    elif "outside" in slips:
        p = torch.exp(acc_s) - row
    elif "no lse" in slips:
        p = torch.exp(acc_s)
    else:
        p = (torch.exp2 if "base two" in slips else torch.exp)(acc_s - row)
    if not slips & {"no mask", "score 0"}:
        p = p.masked_fill(is_hidden, 1 if "early" in slips else 0)  # exp(0) is 1
    if slips & {"empty", "large"}:
        p = p.masked_fill(
            (lse == -torch.inf)[:, None], torch.nan if "empty" in slips else torch.inf
        )
    return p


_AGAIN_MISTAKES = (
    Misconception(
        "NaN for the row that saw nothing",
        slip(_again, "empty"),
        "Its lse is -inf, and a NaN is one of `-inf - -inf`, `inf * 0` or `0 / 0`. Which of them "
        "do you compute? And which step, put last, would overwrite it?",
    ),
    Misconception(
        "infinity for the row that saw nothing",
        slip(_again, "large"),
        "Its lse is -inf. What does subtracting -inf make of -1e9 or any other finite number? And "
        "which step, put last, would overwrite it?",
    ),
    Misconception(
        "writing 0 before the power is taken",
        slip(_again, "early"),
        "Hidden keys should have *weight* 0. What does the power make of an exponent of 0?",
    ),
    Misconception(
        "hiding a key by the score 0",
        slip(_again, "score 0"),
        "A score of 0 is a score like any other: its power is 1. Which *weight* should a hidden "
        "key have, and so which step should write it?",
    ),
    Misconception(
        "stopping at the exponent",
        slip(_again, "no exp"),
        "The difference of score and lse is the logarithm of a weight. What undoes a logarithm?",
    ),
    Misconception(
        "a softmax over the tile alone",
        slip(_again, "softmax"),
        "The tile holds some of the row's keys, and its weights need not sum to 1. Which number "
        "knows of the other keys?",
    ),
    Misconception(
        "subtracting the tile's own maximum",
        slip(_again, "maximum"),
        "A maximum keeps the powers finite, but then they still have to be divided by a sum. "
        "Which one number does both?",
    ),
    Misconception(
        "dividing by lse",
        slip(_again, "divided"),
        "lse is the *logarithm* of the sum. What has a division become in the exponent?",
    ),
    Misconception(
        "subtracting lse after the power",
        slip(_again, "outside"),
        "lse is a logarithm, and a division of powers is a subtraction of exponents. On which "
        "side of `exp` are the exponents?",
    ),
    Misconception(
        "powers that nothing divides",
        slip(_again, "no lse"),
        "You have e to each score, and these do not sum to 1 over a row. What has to divide them?",
    ),
    Misconception(
        "leaving the scale out",
        slip(_again, "no scale"),
        "lse was made from the *scaled* scores. Are yours scaled?",
    ),
    Misconception(
        "scaling lse as well",
        slip(_again, "scaled lse"),
        "lse is the log-sum-exp of scores that were scaled already. What does another factor do "
        "to it?",
    ),
    Misconception(
        "leaving the hidden keys in",
        slip(_again, "no mask"),
        "A hidden key had no part in lse, and its weight is 0. What does your formula give it?",
    ),
    Misconception(
        "hiding what is seen",
        slip(_again, "upside down"),
        "`masked_fill` fills where its mask is True. Which pairs does yours name?",
    ),
    Misconception(
        "taking lse for a number of each key",
        slip(_again, "across"),
        "lse belongs to a query, a row of the tile. Which axis has to be added to `[BQ]`?",
    ),
    Misconception(
        "exp2 with a natural logarithm",
        slip(_again, "base two"),
        "`exp2` wants exponents in base two. In which base are lse and the scores here?",
    ),
)

_AGAIN = TEXTS.exercise(
    "weights_again",
    minutes=5,
    difficulty=2,
    solution=weights_again,
    misconceptions=_AGAIN_MISTAKES,
    combine=together(
        _AGAIN_MISTAKES,
        {"softmax", "maximum", "divided", "outside", "no lse", "base two", "no exp"},
        {"softmax", "maximum", "no lse", "scaled lse", "across"},
        {"softmax", "no mask", "upside down", "early", "score 0"},
        {"maximum", "upside down"},
        {"maximum", "score 0"},
        {"empty", "large", "early", "score 0"},
    ),
    cases=(
        Case(
            "two queries, two of their three keys; weights ½ and ¼",
            lambda: (
                torch.tensor([[1.0], [0.0]]),
                torch.tensor([[0.0], [2 * math.log(2)]]),
                torch.tensor([math.log(4), math.log(4)]),
                torch.tensor([[True, True], [True, False]]),
                0.5,
            ),
        ),
        Case(
            "the second query saw nothing",
            lambda: (
                torch.tensor([[1.0], [1.0]]),
                torch.tensor([[0.0], [1.0], [2.0]]),
                torch.tensor([2.5, -torch.inf]),
                torch.tensor([[True, True, False], [False, False, False]]),
                2.0,
            ),
        ),
        Case(
            "four queries, three keys, the first two queries saw nothing",
            lambda: (
                _random(4, 5, seed=20),
                _random(3, 5, seed=21),
                torch.tensor([-torch.inf, -torch.inf, 1.5, 2.0]),
                torch.tensor([[False] * 3, [False] * 3, [True] * 3, [True, False, True]]),
                0.3,
            ),
        ),
        Case(
            "five queries, five keys, causal",
            lambda: (
                _random(5, 4, seed=22),
                _random(5, 4, seed=23),
                _random(5, seed=24).abs() + 2,
                torch.ones(5, 5).tril().bool(),
                0.5,
            ),
        ),
    ),
)


# -- base_two --


def base_two(
    d_o: Tensor, q_log2: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q [N, D] and k [M, D], where the queries came as `scale * log2(e) * q`."""
    p = torch.exp2(q_log2 @ k.T - lse[:, None] / math.log(2))
    d_s = p * (d_o @ v.T - delta[:, None])  # of the scaled scores, in base e
    d_q = scale * d_s @ k
    d_k = math.log(2) * d_s.T @ q_log2  # log2(e) came with q_log2, and leaves
    return d_q, d_k


_LN_2, _LOG2_E = math.log(2), 1 / math.log(2)


def _two(
    slips: Slips,
    d_o: Tensor, q_log2: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`base_two` with slips."""
    natural = slips & {"lse", "all natural"}
    row = (lse[None] if "across" in slips else lse[:, None]) * (
        1 if natural else _LN_2 if "lse times" in slips else _LOG2_E
    )
    acc_s = q_log2 @ k.T * (scale if "scaled" in slips else 1)
    p = (torch.exp if slips & {"exp", "all natural"} else torch.exp2)(acc_s - row)
    shift = 0 if "no delta" in slips else delta[:, None]
    if "delta" in slips:
        shift = shift * _LOG2_E
    d_s = p * (d_o @ v.T - shift)
    if "d_s" in slips:
        d_s = d_s * _LN_2
    of_q, of_k = scale, _LN_2
    for name, factor in (("q ln 2", _LN_2), ("q log2 e", _LOG2_E), ("q unscaled", 1 / scale)):
        of_q = of_q * factor if name in slips else of_q
    for_k = (
        ("k", _LOG2_E), ("k log2 e", _LOG2_E**2), ("k scaled", scale),
        ("k copied", _LOG2_E * scale),
    )  # fmt: skip
    for name, factor in for_k:
        of_k = of_k * factor if name in slips else of_k
    d_q, d_k = of_q * d_s @ k, of_k * d_s.T @ q_log2
    return (d_k, d_q) if "exchanged" in slips else (d_q, d_k)


_TWO_MISTAKES = (
    # first what spoils the weights, and so both gradients: of two mistakes it leads
    Misconception(
        "a natural lse under exp2",
        slip(_two, "lse"),
        "In the exponent of 2 both numbers have to be in base two. In which one is `lse`?",
    ),
    Misconception(
        "taking lse for a number of each key",
        slip(_two, "across"),
        "lse belongs to a query, a row of the scores. Which axis has to be added to `[N]`?",
    ),
    Misconception(
        "natural exp and lse, with scores in base two",
        slip(_two, "all natural"),
        "`q_log2 @ k.T` carries a log2(e) that `exp` does not expect. With `exp2` it is in place. "
        "Which base does lse then need?",
    ),
    Misconception(
        "scaling the scores twice",
        slip(_two, "scaled"),
        "`q_log2` is `q` times scale and log2(e). Is a factor missing in `q_log2 @ k.T`?",
    ),
    Misconception(
        "lse times ln 2, where it should be divided",
        slip(_two, "lse times"),
        "A logarithm to base two is larger than the natural one. Does your factor make it larger?",
    ),
    Misconception(
        "exp of exponents in base two",
        slip(_two, "exp"),
        "`q_log2 @ k.T` is in base two. Which power undoes a logarithm to base two?",
    ),
    Misconception(
        "delta turned into base two",
        slip(_two, "delta"),
        "Delta is a sum of products of gradients and outputs, not an exponent. Does a change of "
        "base touch it?",
    ),
    Misconception(
        "leaving delta out",
        slip(_two, "no delta"),
        "Without delta, raising a score takes nothing from the other keys. What does the row of "
        "`d_s` sum to?",
    ),
    Misconception(
        "leaving log2(e) in d_k",
        slip(_two, "k"),
        "`q_log2` is `q` times scale *and* log2(e). `d_k` wants `scale * d_s.T @ q`. What has to "
        "be taken out?",
    ),
    Misconception(
        "scaling d_k twice",
        slip(_two, "k scaled"),
        "The scale came with `q_log2` already. What is left to multiply by?",
    ),
    Misconception(
        "`q_log2` in line 5, where `q` stood",
        slip(_two, "k copied"),
        "Line 5 wants `scale * q`. `q_log2` is that already, with log2(e) on top. What remains to "
        "multiply by, and what is multiplied twice?",
    ),
    Misconception(
        "multiplying d_k by log2(e), not by ln 2",
        slip(_two, "k log2 e"),
        "log2(e) is in `q_log2` once already. Which factor undoes it?",
    ),
    Misconception(
        "ln 2 in d_q, too",
        slip(_two, "q ln 2"),
        "`d_q` is made of `d_s` and `k`, and neither carries log2(e). (A ln 2 in `d_s` reaches "
        "`d_q`, too.) What would ln 2 undo there?",
    ),
    Misconception(
        "log2(e) in d_q",
        slip(_two, "q log2 e"),
        "Base two was a way to compute the same weights. Does the score that `d_s` belongs to "
        "have a log2(e) in it?",
    ),
    Misconception(
        "the gradient of the scaled query for that of the query",
        slip(_two, "q unscaled"),
        "The scores are `scale * q @ k.T`. By how much does a score change when `q` does?",
    ),
    Misconception(
        "ln 2 in d_s",
        slip(_two, "d_s"),
        "The derivative of `exp2` brings ln 2, and the score that goes into it brings log2(e). "
        "What is their product?",
    ),
    Misconception(
        "d_k before d_q",
        slip(_two, "exchanged"),
        "The order of the results is queries, then keys. Which one do you return first?",
    ),
)

_TWO = TEXTS.exercise(
    "base_two",
    minutes=7,
    difficulty=3,
    solution=base_two,
    returns=("d_q", "d_k"),
    misconceptions=_TWO_MISTAKES,
    combine=together(
        _TWO_MISTAKES,
        {"k", "k log2 e", "k copied"},
        {"k scaled", "k copied"},
        {"q ln 2", "q log2 e"},
        {"lse", "lse times", "all natural"},
        {"exp", "all natural"},
        {"exp", "lse"},
        {"delta", "no delta"},
        {"d_s", "q log2 e"},
    ),
    tolerance=1e-4,
    cases=(
        Case(
            "one query, two keys with weights ⅓ and ⅔",
            lambda: (
                torch.tensor([[1.0]]),
                torch.tensor([[1.0]]),
                torch.tensor([[1.0], [2.0]]),
                torch.tensor([[6.0], [0.0]]),
                torch.tensor([math.log(6)]),
                torch.tensor([2.0]),
                0.5,
            ),
        ),
        Case("three queries, four keys", lambda: _in_base_two(3, 4, 5, 2, 0.4, seed=25)),
        Case("five queries, two keys", lambda: _in_base_two(5, 2, 3, 3, 1.7, seed=26)),
    ),
)


def _in_base_two(N: int, M: int, D: int, DV: int, scale: float, *, seed: int) -> tuple:
    """The arguments of `base_two` for random queries, keys and values."""
    q, k = _random(N, D, seed=seed), _random(M, D, seed=seed + 100)
    v, d_o = _random(M, DV, seed=seed + 200), _random(N, DV, seed=seed + 300)
    s = scale * q @ k.T
    delta = (d_o * (torch.softmax(s, -1) @ v)).sum(-1)
    return d_o, scale / math.log(2) * q, k, v, torch.logsumexp(s, -1), delta, scale


# -- attention_backward --


def attention_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    is_seen: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [HQ, N, D], k [H, M, D] and v [H, M, DV], from those of o [HQ, N, DV] and lse
    [HQ, N]."""
    G = len(q) // len(k)
    keys, values = (x.repeat_interleave(G, dim=0) for x in (k, v))  # [HQ, M, …]
    s = scale * q @ keys.mT
    p = torch.exp(s - lse[:, :, None]).masked_fill(~is_seen, 0)  # [HQ, N, M]
    delta = (d_o * o).sum(-1) - d_lse  # [HQ, N]
    d_p = d_o @ values.mT
    d_s = p * (d_p - delta[:, :, None])
    d_q = scale * d_s @ keys
    d_k = scale * d_s.mT @ q
    d_v = p.mT @ d_o
    d_k, d_v = (x.unflatten(0, (-1, G)).sum(1) for x in (d_k, d_v))
    return d_q, d_k, d_v


def _backward_case(
    name: str, N: int, M: int, *, HQ: int = 1, H: int = 1, D: int = 2, DV: int = 2,
    scale: float = 1.0, is_causal: bool = False, asks_lse: bool = False,
    tile: slice | None = None, whole: bool = False,
) -> Case:  # fmt: skip
    """What a forward was given and gave, in fp64, and gradients of its outputs.

    Args:
        name, N, M, HQ, H, D, DV, scale: the case, and its sizes.
        is_causal: the queries are the last `N` of `M` positions; otherwise they see all keys.
        asks_lse: the loss uses `lse`; otherwise `d_lse` is 0.
        tile: the keys, values and columns of the mask that the backward gets; None is all.
        whole: draw whole numbers.
    """

    def arguments() -> tuple:
        draw = _whole if whole else _random
        sizes = ((HQ, N, D), (H, M, D), (H, M, DV), (HQ, N, DV), (HQ, N))
        q, k, v, d_o, d_lse = (draw(*x, seed=i).double() for i, x in enumerate(sizes))
        q = q / 4 if whole else q
        d_lse = d_lse if asks_lse else torch.zeros_like(d_lse)
        position = torch.arange(M - N, M)[:, None] if is_causal else M
        is_seen = (torch.arange(M) <= position).expand(N, M)
        keys, values = (x.repeat_interleave(HQ // H, 0) for x in (k, v))
        s = (scale * q @ keys.mT).masked_fill(~is_seen, -torch.inf)
        o, lse, some = s.softmax(-1) @ values, s.logsumexp(-1), tile or slice(None)
        return d_o, d_lse, q, k[:, some], v[:, some], o, lse, is_seen[:, some], scale

    return Case(name, arguments)


_BACKWARD = TEXTS.exercise(
    "attention_backward", minutes=25, difficulty=3, solution=attention_backward,
    returns=("d_q", "d_k", "d_v"), tolerance=1e-6,
    forbidden=(
        ("torch.autograd", "autograd"),
        ("nsa_tutorial", "the course's own function"),
    ),
    stages=(
        Stage("one key", (_backward_case("one query and one key", 1, 1, DV=3, whole=True),)),
        Stage("many keys", (
            _backward_case("one query, three keys", 1, 3, whole=True),
            _backward_case("four queries, three keys, values of width 3", 4, 3, DV=3, whole=True),
        )),
        Stage("scale", (_backward_case("scale 0.5", 2, 3, D=4, scale=0.5),)),
        Stage("hidden keys", (
            _backward_case("three queries, three keys, causal", 3, 3, is_causal=True),
            _backward_case("two queries, the last of five positions", 2, 5, scale=0.6,
                           is_causal=True),
        )),
        Stage("a tile of the keys", (
            _backward_case("the first two of four keys", 3, 4, tile=slice(0, 2)),
            _backward_case("keys 2 to 4 of six, causal", 4, 6, D=3, scale=0.4, is_causal=True,
                           tile=slice(2, 5)),
        )),
        Stage("groups", (
            _backward_case("two heads on one KV head", 3, 3, HQ=2, is_causal=True),
            _backward_case("four heads on two KV heads", 4, 5, HQ=4, H=2, D=3, scale=0.5,
                           is_causal=True),
        )),
        Stage("a loss that uses lse", (
            _backward_case("one query, three keys", 1, 3, asks_lse=True),
            _backward_case("six heads on two KV heads", 4, 6, HQ=6, H=2, D=3, scale=0.7,
                           is_causal=True, asks_lse=True),
        )),
    ),
    misconceptions=diffs(attention_backward, [
        ("d_q = scale * ", "d_q = ", "a gradient of the queries without the scale",
         "Look at line 5 again. By what is `d_s @ k` multiplied?"),
        ("d_k = scale * ", "d_k = ", "a gradient of the keys without the scale",
         "Look at line 5 again. By what is `d_s.T @ q` multiplied?"),
        ({"d_q = scale * ": "d_q = ", "d_k = scale * ": "d_k = "}, "gradients without the scale",
         "Line 5: by what is `d_s` multiplied besides the keys and the queries?"),
        ("s = scale * q", "s = q", "weights from scores without the scale",
         "`lse` is that of the *scaled* scores. Which scores belong into line 1?"),
        ("d_v = p.mT", "d_v = scale * p.mT", "scaling the gradient of the values",
         "Values never meet the scale. Which lines of the five have it?"),
        (".masked_fill(~is_seen, 0)", "", "weights for hidden keys",
         "`lse` says nothing of hidden keys, so `exp(s - lse)` gives them a weight. Where is it "
         "set to 0?"),
        ("torch.exp(s - lse[:, :, None]).masked_fill(~is_seen, 0)",
         "torch.softmax(s.masked_fill(~is_seen, -torch.inf), -1)",
         "a softmax over the keys at hand",
         "Other keys of the row are not here. Which number of the forward knows their scores?"),
        ({"d_s = p * (d_p - delta[:, :, None])":
          "d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True) + d_lse[:, :, None])"},
         "delta from the keys at hand",
         "Other keys of the row are not here. From what, besides `p * d_p`, can `delta` be made?"),
        ("(d_p - delta[:, :, None])", "d_p", "leaving delta out",
         "A score that rises takes weight from the others. What do they lose together?"),
        ("d_p - delta", "d_p + delta", "adding delta",
         "A key gains where it beats its row's average. What is done to the average then?"),
        ("s - lse[:, :, None]", "s", "weights that do not sum to 1",
         "Line 1 is more than `exp(s)`. Which number of the forward holds the row's sum?"),
        (" - d_lse", "", "a gradient of lse that gets lost",
         "The loss may use `lse`, too. In which of the five lines does `d_lse` come in?"),
        (" - d_lse", " + d_lse", "adding d_lse to delta",
         "The bracket of line 4 wants `+ d_lse`, and takes `delta` away. With which sign does it "
         "stand in `delta`?"),
        ("d_s = p * (", "d_s = (", "gradients of scores without their weight",
         "A key that weighs nothing changes nothing. By what is the bracket multiplied?"),
        (".sum(1)", ".mean(1)", "the mean over a group where its sum is meant",
         "All heads of a group use the same key. Do their effects average, or add up?"),
        (".sum(1)", "[:, -1]", "keeping the last head's share alone",
         "Each head of a group adds to the same key. Does a later one write over an earlier one?"),
        ("x.repeat_interleave(G, dim=0)", "x.repeat(G, 1, 1)",
         "query heads that read the wrong KV head",
         "Query head `hq` reads KV head `hq // G`: heads 0 and 1 of four read head 0 of two."),
        ("x.unflatten(0, (-1, G)).sum(1)", "x.unflatten(0, (G, -1)).sum(0)",
         "summing the heads of different groups",
         "The heads of a group are neighbours. Which axis comes first when you cut `HQ`?"),
    ]),
)  # fmt: skip


EXERCISES = (_SCORE, _DELTA, _GROUP, _AGAIN, _TWO, _BACKWARD)


# -- two slips at once, written as readers write them --


def _sigmoid_of_columns(p: Tensor, d_p: Tensor) -> Tensor:
    return (d_p - torch.einsum("nm,nm->m", p, d_p)) * p.square()


def _plus_and_mean(d_o: Tensor, o: Tensor, d_lse: Tensor) -> Tensor:
    return torch.stack([(a * b).mean(-1) for a, b in zip(d_o, o, strict=True)]) + d_lse


def _interleaved_unscaled(
    p: Tensor, d_s: Tensor, q: Tensor, d_o: Tensor, H: int, scale: float
) -> tuple[Tensor, Tensor]:
    d_k = torch.einsum("hnm,hnd->hmd", d_s, q)
    d_v = torch.einsum("hnm,hnd->hmd", p, d_o)
    return tuple(torch.stack([x[h::H].sum(0) for h in range(H)]) for x in (d_k, d_v))


def _hidden_first_unscaled(
    q: Tensor, k: Tensor, lse: Tensor, is_seen: Tensor, scale: float
) -> Tensor:
    return torch.exp((q @ k.T).masked_fill(~is_seen, -torch.inf) - lse[:, None])


def _ln_2_everywhere(
    d_o: Tensor, q_log2: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    p = 2 ** (q_log2 @ k.T - lse.unsqueeze(1) * math.log2(math.e))
    d_s = p * (d_o @ v.T - delta.unsqueeze(1))
    return math.log(2) * scale * d_s @ k, d_s.T @ q_log2


DOUBLES = (
    Double(
        "score_gradient",
        _sigmoid_of_columns,
        ("summing over the queries, not over the keys", "the weight in front twice"),
    ),
    Double(
        "row_delta",
        _plus_and_mean,
        ("adding the gradient of lse", "averaging over the channels"),
    ),
    Double(
        "group_gradients",
        _interleaved_unscaled,
        ("adding up every H-th head, not neighbours", "leaving the scale out of d_k"),
    ),
    Double(
        "weights_again",
        _hidden_first_unscaled,
        ("NaN for the row that saw nothing", "leaving the scale out"),
    ),
    Double(
        "base_two",
        _ln_2_everywhere,
        ("ln 2 in d_q, too", "leaving log2(e) in d_k"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    kept_without_weights={"unit": "MiB", "choices": (0.25, 260, 4096, 131_072)},
    time_of_walks={"unit": "ms", "choices": (20, 62, 200, 350)},
    strongest_score={"choices": (0, 1, 2)},
    finished_by_queries={"choices": ("d_q", "d_k and d_v", "all three", "none")},
)
