"""Exercises of chapter 12: the gradient of a score, delta without the row, weights from the
log-sum-exp, the sum over a group, and where ln 2 enters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)


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


_SCORE = TEXTS.exercise(
    "score_gradient",
    minutes=7,
    difficulty=2,
    solution=score_gradient,
    misconceptions=diffs(score_gradient, [
        ("(p * d_p).sum(-1, keepdim=True)",
         "torch.softmax(torch.tensor([2.0, 1, 0]), 0) @ torch.tensor([3.0, 0, 9])",
         "taking `o` for the average",
         "`o` is the average only where the loss is `o` itself, as with the three keys. For any "
         "`d_p`, what is the average of `d_p`, with the weights `p`?"),
        ("(d_p - mean)", "d_p", "forgetting that the other weights shrink",
         "Weights sum to 1, so raising one score takes weight from all the other keys. What do "
         "they lose together?"),
        ("(d_p - mean)", "(1 - p) * d_p", "keeping only the Jacobian's diagonal",
         "`p * (1 - p)` is what a score does to its *own* weight. Which entries of the Jacobian "
         "say what it does to the others?"),
        ("(p * d_p)", "d_p", "the plain sum of a row of d_p, without the weights",
         "A key with no weight changes nothing, whatever stands in its `d_p`. What should "
         "multiply `d_p` in the sum?"),
        ("(p * d_p)", "(d_p / p.shape[-1])",
         "the plain mean of a row of d_p, each key counted alike",
         "The average that a key has to beat is the one that attention takes. How much does "
         "each key count in it?"),
        ("(p * d_p)", "(p * d_p / p.shape[-1])", "dividing the weighted sum by the number of keys",
         "The weights sum to 1 already, so the weighted sum *is* an average. What does `mean` "
         "divide by once more?"),
        ("sum(-1", "sum(0", "summing over the queries, not over the keys",
         "Each query has a softmax of its own. Along which axis do the weights sum to 1?"),
        ("sum(-1", "sum((0, 1)", "one sum for the whole matrix",
         "Each query has a softmax of its own, and so an average of its own. Along which axis "
         "do the weights sum to 1?"),
        ("(d_p - mean)", "(mean - d_p)", "the difference the other way round",
         "A key that is worth more than the average should *raise* the loss when its score "
         "rises. Which sign does your difference give it?"),
        ("(d_p - mean)", "(d_p + mean)", "adding the average in place of taking it off",
         "If all keys are worth the same, no score matters, as the weights sum to 1. What does "
         "your bracket give then?"),
        ("return p *", "return", "leaving out the weight in front",
         "A hidden key has weight 0, and its score must not matter. What does your formula give "
         "it?"),
        ("p * (d_p - mean)", "p * d_p - mean", "taking the average off outside of the bracket",
         "A key of weight 0 gets minus the average from you, and its score moves nothing. What "
         "has to multiply the average, too?"),
        (", keepdim=True", "", "a sum that has lost its axis",
         "`sum(-1)` is `[N]`, and PyTorch lines it up with the *last* axis of `[N, M]`, the "
         "keys. Which shape lines up with the queries?"),
        ("return p *", "return p * p *", "the weight in front twice",
         "In the column of the Jacobian, each entry holds `p_j` once outside of the bracket. "
         "Where does your second one come from?"),
        ("p * (d_p - mean)", "d_p * (p - mean)", "`p` and `d_p` in each other's places",
         "The bracket compares a key's worth with the average worth. Is a weight a worth?"),
        ("(p * d_p).sum(-1, keepdim=True)", "p @ d_p",
         "a matrix product where each row wants a sum of its own",
         "`@` sums over the columns of `p` and the *rows* of `d_p`, which are different "
         "queries. How do you multiply number by number, and then sum a row?"),
        ("p * (d_p - mean)", "(torch.diag(p) - torch.outer(p, p)) @ d_p",
         "the Jacobian of one row, given a whole matrix",
         "`diag(p) - p pᵀ` is written for one row, and `p` has many. What does the Jacobian's "
         "product with a row of `d_p` come to, without building it?"),
        ("p * (d_p - mean)", "(torch.diag(p) - p.T @ p) @ d_p",
         "the Jacobian of one row, given a whole matrix"),
    ]),
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
        Case("four queries, five keys", lambda: (_weights(4, 5, seed=0), _random(4, 5, seed=1))),
    ),
)  # fmt: skip


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


_DELTA = TEXTS.exercise(
    "row_delta",
    minutes=6,
    difficulty=2,
    solution=row_delta,
    misconceptions=diffs(row_delta, [
        ("- d_lse", "+ d_lse", "adding the gradient of lse",
         "The gradient that comes through lse adds `p * d_lse` to `d_s`. Delta stands there "
         "behind a minus. Which sign makes that right?"),
        ("- d_lse", "", "dropping the gradient that comes through lse",
         "A loss may use lse, too: a merge of two branches does. What does `d_lse` add to each "
         "score of the row?"),
        ("- d_lse", "* d_lse", "multiplying by the gradient of lse",
         "Two ways lead from a score to the loss, through `o` and through lse. What happens to "
         "the gradients of two ways?"),
        ("- d_lse", "* (1 - d_lse)", "taking d_lse for a factor of the average",
         "`p * (d_p - average) + p * d_lse`: take `p` out. Is `d_lse` added to the average's place "
         "in the bracket, or does it multiply it?"),
        ({"(d_o *": "((d_o - d_lse[..., None]) *", "- d_lse": ""},
         "taking d_lse off every channel of d_o",
         "In your sum, `d_lse` is multiplied by each channel of `o`. Does the way through lse "
         "pass through the output?"),
        ({"(d_o * o)": "(d_o * o - d_lse[..., None])", "- d_lse": ""},
         "taking d_lse off once for each channel",
         "Your `d_lse` stands inside of the sum over the channels. How often is it taken off?"),
        (".sum", ".mean", "averaging over the channels",
         "Delta stands in for a sum over keys. Write `d_p` as a product of `d_o` and a value: "
         "which sum over the channels is in it?"),
        ("(-1)", "(-1).sum(1, keepdim=True).expand_as(d_lse)", "adding up the heads, too",
         "Each head has a softmax of its own, and so a delta of its own. Over which axes may "
         "the sum go?"),
        ("(-1)", "(1)", "summing over the queries or the heads, not over the channels",
         "The result is one number for each query and head. Which of the three axes has to go?"),
        ("(-1)", "()", "one sum for the whole tensor",
         "With one query and one head that is right. How many deltas do two queries need?"),
        (".sum(-1)", "", "multiplying number by number, and not summing",
         "The result is one number for each query and head, and your product still has its "
         "channels. What happens to them?"),
        ({".sum(-1)": "", "- d_lse": "- d_lse[..., None]"},
         "multiplying number by number, and not summing"),
        ("(d_o * o).sum(-1)", "d_o @ o.mT", "the products of each head with all the others",
         "`@` multiplies each head's `d_o` with *every* head's `o`. Which pairs of heads does "
         "delta need?"),
        ("(d_o * o)", "(d_o @ o.mT)", "the products of each head with all the others"),
        ("(d_o * o).sum(-1)", "d_o @ o.permute(2, 1, 0)",
         "the products of each head with all the others"),
        ("(d_o * o).sum(-1)", "_of_the_chapter()", "weights of the notebook, not of the case",
         "`p` and `d_p` are not arguments: they belong to the notebook's eight tokens. Which "
         "two arguments give the same sum?"),
        ("(d_o *", "(o *", "taking o times o",
         "How long `o` is does not matter; what matters is how the loss follows it. Which "
         "tensor says that?"),
        (" o)", " d_o)", "taking d_o times d_o",
         "The sum over the keys makes one tensor out of weights and values. Which one?"),
        ("(d_o * o)", "d_o", "the sum of d_o alone",
         "That would be right if every output were 1. What multiplies each channel of `d_o`?"),
        ('weights."""', 'weights."""\n    d_o, d_lse = -d_o, -d_lse', "the sign turned round",
         "`d_s` is `p` times `d_p` *minus* delta. Does delta bring a minus of its own?"),
        ("return", "d_o, o, d_lse = d_o[:, :, None], o[:, :, None], d_lse[..., None]\n    return",
         "keeping an axis of length 1",
         "Delta has the shape of lse, `[N, HQ]`. Does your sum keep what it sums over?"),
        ("(-1)", "(-1, keepdim=True)", "a sum that keeps its axis, beside a d_lse without one",
         "The sum is `[N, HQ, 1]` and `d_lse` is `[N, HQ]`. PyTorch lines axes up from the "
         "right. Which axis of your sum is one too many?"),
    ]),
    cases=(
        Case(
            "one query, one head, no gradient through lse",
            lambda: (torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[2.0, 5.0]]]), torch.zeros(1, 1)),
        ),
        Case(
            "one query, one head, d_lse = 2",
            lambda: (
                torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[2.0, 5.0]]]), torch.tensor([[2.0]])
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
)  # fmt: skip


# -- group_gradients --


def group_gradients(
    p: Tensor, d_s: Tensor, q: Tensor, d_o: Tensor, H: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the keys [H, M, D] and of the values [H, M, DV], from all query heads."""
    d_k = scale * d_s.transpose(1, 2) @ q  # [HQ, M, D], each query head's share
    d_v = p.transpose(1, 2) @ d_o  # [HQ, M, DV]
    return d_k.unflatten(0, (H, -1)).sum(1), d_v.unflatten(0, (H, -1)).sum(1)


def _by_number(shares: Tensor, H: int) -> Tensor:
    """The sums of query heads whose numbers, divided by H, are the same."""
    sums = torch.zeros_like(shares[:H])
    for head, share in enumerate(shares):
        sums[head // H] += share
    return sums


_GROUP = TEXTS.exercise(
    "group_gradients",
    minutes=7,
    difficulty=2,
    solution=group_gradients,
    returns=("d_k", "d_v"),
    misconceptions=diffs(group_gradients, [
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.sum(0, keepdim=True).expand(H, -1, -1)",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.sum(0, keepdim=True).expand(H, -1, -1)"},
         "one sum over all heads, handed to every KV head",
         "With one KV head that is right, and hides the mistake. Which query heads read KV head "
         "0 when there are two?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.sum(0, keepdim=True)",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.sum(0, keepdim=True)"},
         "one sum over all heads, as if there were one KV head",
         "With one KV head that is right, and hides the mistake. How many KV heads does the "
         "result have, and which query heads read each of them?"),
        ("return",
         "d_k, d_v = (torch.cat([x[h::H] for h in range(H)]) for x in (d_k, d_v))\n    return",
         "adding up every H-th head, not neighbours",
         "With one KV head both are the same. Query head hq reads KV head hq // G. Where do the "
         "heads of one group stand?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k", "d_v.unflatten(0, (H, -1)).sum(1)": "d_v"},
         "a gradient for each query head, not for each KV head",
         "There are HQ shares here, and H keys. What becomes of the shares of one group?"),
        ({"d_k =": "d_k = H / len(q) *", "d_v =": "d_v = H / len(q) *"}, "averaging over the group",
         "Move a shared key a little, and every head of its group sees it move. Do their "
         "effects on the loss add up, or do they average?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.unflatten(0, (H, -1))[:, 0]",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.unflatten(0, (H, -1))[:, 0]"},
         "keeping one head's share for the whole group",
         "The other heads of the group used the same key. Where do their shares go?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.unflatten(0, (H, -1))[:, -1]",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.unflatten(0, (H, -1))[:, -1]"},
         "keeping the last head's share for the whole group",
         "Each `=` overwrites the share that was there. What keeps the others, too?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "_by_number(d_k, H)",
          "d_v.unflatten(0, (H, -1)).sum(1)": "_by_number(d_v, H)"},
         "dividing a head's number by H, not by G",
         "With six query heads and two KV heads, the heads 0, 1 and 2 read KV head 0. By which "
         "number do you divide?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.unflatten(0, (H, -1)).sum(0)",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.unflatten(0, (H, -1)).sum(0)"},
         "summing over the KV heads, not over the group",
         "After the split into (H, G) there are two axes of heads, and the result keeps the one "
         "of the KV heads. Which one has to go?"),
        ({"d_k.unflatten(0, (H, -1)).sum(1)": "d_k.unflatten(0, (H, -1)).sum(2)",
          "d_v.unflatten(0, (H, -1)).sum(1)": "d_v.unflatten(0, (H, -1)).sum(2)"},
         "summing over the keys, not over the group",
         "Each key has a gradient of its own. Your axes are (H, G, M, width): which one tells "
         "the members of a group apart?"),
        ("scale * ", "", "leaving the scale out of d_k",
         "A head's scores are `scale * q @ k.T`. By how much does such a score change when a "
         "key does?"),
        ("scale * ", "scale**0.5 * ", "√scale where the scale is meant",
         "The scale stands once in each score, whole: `scale * q @ k.T`. Where would a root come "
         "from?"),
        ("_o  #", "_o * scale  #", "putting the scale into d_v, too",
         "Values never meet the scale: the output is weights times values. Where does the scale "
         "stand in the forward?"),
        ("p.transpose", "d_s.transpose", "the gradient of the scores where d_v wants the weights",
         "The output is weights times values. By how much does it change when a value does?"),
        ("d_s.transpose", "p.transpose", "the weights where d_k wants the gradient of the scores",
         "A key acts through its scores. Which matrix says how the loss follows the scores?"),
        ({"(1, 2) @ q": "(0, 2) @ q", "(1, 2) @ d": "(0, 2) @ d"},
         "`.T` where there are three axes",
         "`.T` reverses *all* axes, and the heads end up last. Which two of `[HQ, N, M]` have "
         "to change places, for each head by itself?"),
        ({"(1, 2) @ q": "(1, 1) @ q", "(1, 2) @ d": "(1, 1) @ d"}, "leaving the matrices unturned",
         "A gradient of the keys has a row for each key. Over which axis of `[HQ, N, M]` must "
         "the product sum, the queries or the keys?"),
        ('query heads."""',
         'query heads."""\n    q, d_o = (x.repeat_interleave(H, 0) for x in (q, d_o))',
         "copying the queries, which have all their heads already",
         "`q` and `d_o` have HQ heads, as `p` and `d_s` do. Only keys and values are shared, "
         "and their gradients are the results. What is left to copy?"),
        ("return", "d_k, d_v = d_v, d_k\n    return", "d_v before d_k",
         "The order of the results is keys, then values. Which one do you return first?"),
    ]),
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
        Case("one KV head for three heads", lambda: (*_heads(3, 2, 4, 2, 3, seed=8), 1, 0.7)),
        Case("three KV heads, two heads each", lambda: (*_heads(6, 3, 5, 4, 2, seed=12), 3, 0.5)),
        Case("two KV heads, three heads each", lambda: (*_heads(6, 4, 3, 2, 5, seed=16), 2, 2.0)),
    ),
)  # fmt: skip


def _heads(HQ: int, N: int, M: int, D: int, DV: int, *, seed: int) -> tuple[Tensor, ...]:
    """Weights, gradients of the scores, queries and gradients of the output."""
    return (
        _weights(HQ, N, M, seed=seed), _random(HQ, N, M, seed=seed + 1),
        _random(HQ, N, D, seed=seed + 2), _random(HQ, N, DV, seed=seed + 3),
    )  # fmt: skip


# -- weights_again --


def weights_again(q: Tensor, k: Tensor, lse: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """The weights [BQ, BK] of a tile, from the log-sum-exp of the whole rows."""
    acc_s = scale * q @ k.T
    p = torch.exp(acc_s - lse[:, None])
    return p.masked_fill(~is_seen, 0)  # last: it takes what an empty row's exp gives, too


_AGAIN = TEXTS.exercise(
    "weights_again",
    minutes=5,
    difficulty=2,
    solution=weights_again,
    misconceptions=diffs(weights_again, [
        ({"p =": "acc_s = acc_s.masked_fill(~is_seen, -torch.inf)\n    p =",
          "p.masked_fill(~is_seen, 0)": "p"}, "NaN for the row that saw nothing",
         "Its lse is -inf, and a NaN is one of `-inf - -inf`, `inf * 0` or `0 / 0`. Which of "
         "them do you compute? And which step, put last, would overwrite it?"),
        ({"p =": "acc_s = acc_s.masked_fill(~is_seen, -1e9)\n    p =",
          "p.masked_fill(~is_seen, 0)": "p"}, "infinity for the row that saw nothing",
         "Its lse is -inf. What does subtracting -inf make of -1e9 or any other finite number? "
         "And which step, put last, would overwrite it?"),
        ("0)  #", "1)  #", "writing 0 before the power is taken",
         "Hidden keys should have *weight* 0. What does the power make of an exponent of 0?"),
        ({"p =": "acc_s = acc_s.masked_fill(~is_seen, 0)\n    p =",
          "p.masked_fill(~is_seen, 0)": "p"}, "hiding a key by the score 0",
         "A score of 0 is a score like any other: its power is 1. Which *weight* should a "
         "hidden key have, and so which step should write it?"),
        ("torch.exp", "", "stopping at the exponent",
         "The difference of score and lse is the logarithm of a weight. What undoes a logarithm?"),
        ("torch.exp(acc_s - lse[:, None])", "torch.softmax(acc_s.masked_fill(~is_seen, -1e9), -1)",
         "a softmax over the tile alone",
         "The tile holds some of the row's keys, and its weights need not sum to 1. Which "
         "number knows of the other keys?"),
        ("lse[:, None]", "acc_s.masked_fill(~is_seen, -torch.inf).amax(-1, keepdim=True)",
         "subtracting the tile's own maximum",
         "A maximum keeps the powers finite, but then they still have to be divided by a sum. "
         "Which one number does both?"),
        ("acc_s -", "acc_s) / (", "dividing by lse",
         "lse is the *logarithm* of the sum. What has a division become in the exponent?"),
        ("acc_s -", "acc_s) - (", "subtracting lse after the power",
         "lse is a logarithm, and a division of powers is a subtraction of exponents. On which "
         "side of `exp` are the exponents?"),
        ("acc_s - lse[:, None]", "acc_s", "powers that nothing divides",
         "You have e to each score, and these do not sum to 1 over a row. What has to divide "
         "them?"),
        ("scale * ", "", "leaving the scale out",
         "lse was made from the *scaled* scores. Are yours scaled?"),
        ("scale * ", "scale**0.5 * ", "√scale where the scale is meant",
         "lse was made from `scale * q @ k.T`. Does a root of the scale give the same scores?"),
        ("lse[", "scale * lse[", "scaling lse as well",
         "lse is the log-sum-exp of scores that were scaled already. What does another factor "
         "do to it?"),
        ("p.masked_fill(~is_seen, 0)", "p", "leaving the hidden keys in",
         "A hidden key had no part in lse, and its weight is 0. What does your formula give it?"),
        ("~is_seen", "is_seen", "hiding what is seen",
         "`masked_fill` fills where its mask is True. Which pairs does yours name?"),
        ("[:, None]", "[None, :]", "taking lse for a number of each key",
         "lse belongs to a query, a row of the tile. Which axis has to be added to `[BQ]`?"),
        ("torch.exp", "torch.exp2", "exp2 with a natural logarithm",
         "`exp2` wants exponents in base two. In which base are lse and the scores here?"),
    ]),
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
)  # fmt: skip


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


def _in_base_two(N: int, M: int, D: int, DV: int, scale: float, *, seed: int) -> tuple:
    """The arguments of `base_two` for random queries, keys and values."""
    q, k = _random(N, D, seed=seed), _random(M, D, seed=seed + 100)
    v, d_o = _random(M, DV, seed=seed + 200), _random(N, DV, seed=seed + 300)
    s = scale * q @ k.T
    delta = (d_o * (torch.softmax(s, -1) @ v)).sum(-1)
    return d_o, scale / math.log(2) * q, k, v, torch.logsumexp(s, -1), delta, scale


_TWO = TEXTS.exercise(
    "base_two",
    minutes=7,
    difficulty=3,
    solution=base_two,
    returns=("d_q", "d_k"),
    misconceptions=diffs(base_two, [
        # first what spoils the weights, and so both gradients: of two mistakes it leads
        ("/ math.log(2)", "", "a natural lse under exp2",
         "In the exponent of 2 both numbers have to be in base two. In which one is `lse`?"),
        ("lse[:, None]", "lse[None]", "taking lse for a number of each key",
         "lse belongs to a query, a row of the scores. Which axis has to be added to `[N]`?"),
        ({"/ math.log(2)": "", "torch.exp2": "torch.exp"},
         "natural exp and lse, with scores in base two",
         "`q_log2 @ k.T` carries a log2(e) that `exp` does not expect. With `exp2` it is in "
         "place. Which base does lse then need?"),
        ("q_log2 @", "scale * q_log2 @", "scaling the scores twice",
         "`q_log2` is `q` times scale and log2(e). Is a factor missing in `q_log2 @ k.T`?"),
        ("/ math.log(2)", "* math.log(2)", "lse times ln 2, where it should be divided",
         "A logarithm to base two is larger than the natural one. Does your factor make it "
         "larger?"),
        ("torch.exp2", "torch.exp", "exp of exponents in base two",
         "`q_log2 @ k.T` is in base two. Which power undoes a logarithm to base two?"),
        ("delta[:, None]", "delta[:, None] / math.log(2)", "delta turned into base two",
         "Delta is a sum of products of gradients and outputs, not an exponent. Does a change "
         "of base touch it?"),
        ("delta[:, None]", "0", "leaving delta out",
         "Without delta, raising a score takes nothing from the other keys. What does the row "
         "of `d_s` sum to?"),
        ("math.log(2) * ", "", "leaving log2(e) in d_k",
         "`q_log2` is `q` times scale *and* log2(e). `d_k` wants `scale * d_s.T @ q`. What has "
         "to be taken out?"),
        ("d_s.T", "scale * d_s.T", "scaling d_k twice",
         "The scale came with `q_log2` already. What is left to multiply by?"),
        ("math.log(2) * d_s.T", "scale * d_s.T", "`q_log2` in line 5, where `q` stood",
         "Line 5 wants `scale * q`. `q_log2` is that already, with log2(e) on top. What remains "
         "to multiply by, and what is multiplied twice?"),
        ("math.log(2) * ", "1 / math.log(2) * ", "multiplying d_k by log2(e), not by ln 2",
         "log2(e) is in `q_log2` once already. Which factor undoes it?"),
        ("d_s @ k", "math.log(2) * d_s @ k", "ln 2 in d_q, too",
         "`d_q` is made of `d_s` and `k`, and neither carries log2(e). (A ln 2 in `d_s` reaches "
         "`d_q`, too.) What would ln 2 undo there?"),
        ("d_s @ k", "1 / math.log(2) * d_s @ k", "log2(e) in d_q",
         "Base two was a way to compute the same weights. Does the score that `d_s` belongs to "
         "have a log2(e) in it?"),
        ("= scale *", "=", "the gradient of the scaled query for that of the query",
         "The scores are `scale * q @ k.T`. By how much does a score change when `q` does?"),
        ("p * (", "math.log(2) * p * (", "ln 2 in d_s",
         "The derivative of `exp2` brings ln 2, and the score that goes into it brings log2(e). "
         "What is their product?"),
        ("return d_q, d_k", "return d_k, d_q", "d_k before d_q",
         "The order of the results is queries, then keys. Which one do you return first?"),
    ]),
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
)  # fmt: skip


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
            _backward_case("one query, three keys, `lse` in the loss", 1, 3, asks_lse=True),
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
        ("s = scale * q", "s = scale**0.5 * q", "√scale where the scale is meant",
         "The scores are `scale * q @ k.T`, and so is their gradient. Where would a root of the "
         "scale come from? (Of `q` *and* `k` scaled, each would have one.)"),
        ("d_q = scale * ", "d_q = scale**0.5 * ", "√scale where the scale is meant"),
        ("d_k = scale * ", "d_k = scale**0.5 * ", "√scale where the scale is meant"),
        ({"d_q = scale * ": "d_q = scale**0.5 * ", "d_k = scale * ": "d_k = scale**0.5 * "},
         "√scale where the scale is meant"),
        ({"s = scale * q": "s = scale**0.5 * q", "d_q = scale * ": "d_q = scale**0.5 * ",
          "d_k = scale * ": "d_k = scale**0.5 * "}, "√scale where the scale is meant"),
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
        (" - d_lse", " * (1 - d_lse)", "taking d_lse for a factor of the average",
         "The bracket of line 4 wants the average taken off, and `d_lse` added. Does `d_lse` "
         "multiply the average anywhere?"),
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


# -- two mistakes at once --

DOUBLES = (
    Double("score_gradient", names=(
        "summing over the queries, not over the keys", "the weight in front twice")),
    Double("row_delta", names=("adding the gradient of lse", "averaging over the channels")),
    Double("group_gradients", names=(
        "adding up every H-th head, not neighbours", "leaving the scale out of d_k")),
    Double("weights_again", names=(
        "NaN for the row that saw nothing", "leaving the scale out")),
    Double("base_two", names=("ln 2 in d_q, too", "leaving log2(e) in d_k")),
)  # fmt: skip


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
