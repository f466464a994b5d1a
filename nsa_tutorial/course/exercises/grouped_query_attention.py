"""Exercises of chapter 02: copies for every head, a test that catches wrong copies, scores without
copies, the gradient of shared keys, a kernel that loads a key once for its group, and the KV heads
that a given memory can hold.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.figures import Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The chapter's own G: a function can pick it up from the notebook, or from the picture.
_CHAPTERS_G = 4


# -- expand_heads --


def expand_heads(x: Tensor, G: int) -> Tensor:
    """Keys or values [B, M, H, D] → [B, M, H·G, D], one copy per query head."""
    return x.repeat_interleave(G, dim=2)


def _draw_heads(arguments: tuple, got: Tensor, expected: Tensor) -> Picture:
    """The first number of every head, yours above the right ones."""
    rows = torch.stack([got[0, 0, :, 0], expected[0, 0, :, 0]]).detach().numpy()
    wrong = int((abs(rows[0] - rows[1]) > 1e-5).sum())
    figure, axes = new_figure(6.0, 1.9)
    grid(axes[0, 0], rows, colour="key", text=".0f" if abs(rows).max() >= 10 else ".2f")
    axes[0, 0].set_yticks([0, 1], ["yours", "expected"])
    axes[0, 0].set_xticks(range(rows.shape[1]))
    axes[0, 0].set_xlabel("query head hq")
    return Picture(figure, f"{wrong} of {rows.shape[1]} query heads got another head's keys")


def _expand(slips: Slips, x: Tensor, G: int) -> Tensor:
    """`expand_heads` with slips."""
    H = x.shape[2]
    copies = H if "H copies" in slips else H // G if "H // G copies" in slips else G
    if "fixed G" in slips:
        copies = _CHAPTERS_G
    if "unchanged" in slips:
        return x
    if "dim" in slips:
        return x.repeat(copies, dim=2)
    if "one number" in slips:
        return x.repeat(copies)
    if "flat" in slips:
        return x.repeat_interleave(copies)
    dim = 1 if "positions" in slips else 3 if "widths" in slips else 2
    if "repeat" in slips:
        expanded = x.repeat([copies if axis == dim else 1 for axis in range(4)])
    else:
        expanded = x.repeat_interleave(copies, dim=dim)
    return expanded.unflatten(dim, (-1, copies)) if "own axis" in slips else expanded


_EXPAND_MISTAKES = (
    Misconception(
        "whole rounds of heads, where neighbours should share",
        slip(_expand, "repeat"),
        "Query head hq gets KV head hq % H here. With one KV head you cannot see it. Which KV head "
        "does query head 1 read, by the rule hq // G?",
    ),
    Misconception(
        "repeating positions, not heads",
        slip(_expand, "positions"),
        "The layout is [batch, position, head, width]. Which of the four dimensions grew?",
    ),
    Misconception(
        "repeating numbers inside a key, not heads",
        slip(_expand, "widths"),
        "The keys have become wider. The layout is [batch, position, head, width]: which dimension "
        "holds the heads?",
    ),
    Misconception(
        "`repeat_interleave` without a dimension",
        slip(_expand, "flat"),
        "Without `dim` PyTorch flattens the tensor first and repeats single numbers. Which "
        "dimension holds the heads?",
    ),
    Misconception(
        "`repeat` with one number for four dimensions",
        slip(_expand, "one number"),
        "`repeat` wants a count for each dimension. But before you write four: does it keep "
        "neighbours together?",
    ),
    Misconception(
        "`repeat` with a `dim`",
        slip(_expand, "dim"),
        "`repeat` takes one number per axis, and no `dim`. Which of the two functions takes one?",
    ),
    Misconception(
        "four copies of each head, whatever `G` is",
        slip(_expand, "fixed G"),
        "In the picture, `G` was 4. How many copies does this call ask for?",
    ),
    Misconception(
        "H copies of each head where G are needed",
        slip(_expand, "H copies"),
        "Each KV head is needed once for every query head that reads it. How many are those?",
    ),
    Misconception(
        "dividing the KV heads by G once more",
        slip(_expand, "H // G copies"),
        "`x.shape[2]` is H, and `G` is the number of copies already. What does your division "
        "count?",
    ),
    Misconception(
        "the KV heads as they came",
        slip(_expand, "unchanged"),
        "There are still H heads. How many query heads read each of them?",
    ),
    Misconception(
        "leaving the copies on an axis of their own",
        slip(_expand, "own axis"),
        "There are five axes, and chapter 01's attention takes four. Which two belong together?",
    ),
)

_EXPAND = TEXTS.exercise(
    "expand_heads",
    minutes=3,
    difficulty=1,
    solution=expand_heads,
    misconceptions=_EXPAND_MISTAKES,
    combine=together(
        _EXPAND_MISTAKES,
        {"repeat", "flat", "one number", "dim", "unchanged"},
        {"positions", "widths", "flat", "one number", "dim", "unchanged"},
        {"own axis", "flat", "one number", "dim", "unchanged"},
        {"own axis", "repeat"},
        {"H copies", "H // G copies", "fixed G", "one number", "dim", "unchanged"},
    ),
    cases=(
        Case(
            "one position, two KV heads holding 10 and 20, G = 3",
            lambda: (torch.tensor([10.0, 20.0]).view(1, 1, 2, 1), 3),
        ),
        Case("three KV heads, G = 2, two sequences", lambda: (_random(2, 5, 3, 4, seed=0), 2)),
        Case("G = 1: nothing to share", lambda: (_random(1, 3, 4, 2, seed=1), 1)),
        Case(
            "one KV head: here `repeat` would be right too",
            lambda: (_random(1, 4, 1, 3, seed=2), 4),
        ),
    ),
    picture=_draw_heads,
)


# -- wiring_is_right --


def wiring_is_right(expand: Callable[[Tensor, int], Tensor]) -> bool:
    """Whether `expand(x, G)` gives every query head hq a copy of KV head hq // G."""
    H, G = 2, 3  # several KV heads, and another number of query heads for each
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))


def _by_number(x: Tensor, G: int) -> Tensor:
    return x[:, :, torch.arange(x.shape[2] * G) // G]


def _rounds(x: Tensor, G: int) -> Tensor:
    return x.repeat(1, 1, G, 1)


def _as_many_as_heads(x: Tensor, G: int) -> Tensor:
    return expand_heads(x, x.shape[2])


def _first_for_all(x: Tensor, G: int) -> Tensor:
    return expand_heads(x[:, :, :1], x.shape[2] * G)


def _next_head(x: Tensor, G: int) -> Tensor:
    return expand_heads(x.roll(-1, 2), G)


def _late_first(x: Tensor, G: int) -> Tensor:
    return expand_heads(x.flip(1), G)


def _one_astray(x: Tensor, G: int) -> Tensor:
    hq = torch.arange(x.shape[2] * G)
    return x[:, :, hq // G - (hq == 1).long()]


def _zeros(x: Tensor, G: int) -> Tensor:
    return torch.zeros_like(expand_heads(x, G))


def _with_an_axis(x: Tensor, G: int) -> Tensor:
    return expand_heads(x, G).unflatten(2, (-1, G))


# What a test with this mistake looks at: so many KV heads, of so many query heads each.
_SIZES_OF_TESTS = {"one KV head": (1, 3), "one query head": (3, 1), "equal sizes": (2, 2)}
_SIZES_OF_TESTS["even groups"] = (2, 4)


def _wiring(slips: Slips, expand: Callable[[Tensor, int], Tensor]) -> bool:
    """`wiring_is_right` with slips."""
    H, G = 2, 3
    for name in slips & _SIZES_OF_TESTS.keys():
        H, G = _SIZES_OF_TESTS[name]
    M = 1 if "one position" in slips else 5
    x = torch.ones(1, M, H, 4) if "equal keys" in slips else _random(1, M, H, 4, seed=9)
    copies, right = expand(x, G), _rounds(x, G) if "rounds" in slips else expand_heads(x, G)
    if slips & {"anything", "nothing"}:
        return "anything" in slips
    is_right = copies.shape == right.shape
    if is_right and "shapes" not in slips:
        if "first head" in slips:
            copies, right = copies[:, :, :1], right[:, :, :1]
        if "first group" in slips:
            copies, right = copies[:, :, :G], right[:, :, :G]
        if slips & {"first members", "even groups"}:
            copies, right = copies[:, :, ::G], right[:, :, ::G]
        if "any order" in slips:
            copies, right = copies.flatten().sort().values, right.flatten().sort().values
        is_right = torch.equal(copies, right)
    return is_right != ("upside down" in slips)


_WIRING_MISTAKES = (
    Misconception(
        "a test with one KV head",
        slip(_wiring, "one KV head"),
        "With a single head to copy, every order of the copies is the same. How many KV heads does "
        "a wrong order need to show?",
    ),
    Misconception(
        "a test with one query head per KV head",
        slip(_wiring, "one query head"),
        "With G = 1 nothing is repeated, and so nothing can be repeated in the wrong order. Which "
        "G shows the order?",
    ),
    Misconception(
        "a test with as many KV heads as heads in a group",
        slip(_wiring, "equal sizes"),
        "With H = G, nobody notices when the two are mixed up. Can you make them differ?",
    ),
    Misconception(
        "a test that cannot see the order of positions",
        slip(_wiring, "one position"),
        "A function that reverses the positions passes. Does `x` have one position only, or do "
        "you compare sums or means? Which comparison looks at each number in its place?",
    ),
    Misconception(
        "a test that sees the shapes alone",
        slip(_wiring, "shapes"),
        "Every function passes whose shape is right. Do you compare the numbers, too? If you do, "
        "look at your `x`: with zeros in it, can the heads be told apart?",
    ),
    Misconception(
        "testing with keys that are all alike",
        slip(_wiring, "equal keys"),
        "If all heads hold the same numbers, no copy can be the wrong one. Which input tells the "
        "heads apart?",
    ),
    Misconception(
        "a test that is content with one right head",
        slip(_wiring, "first head"),
        "Query head 0 reads KV head 0 in most wrong wirings, too. Do you look at one head alone, "
        "or write `any` where `all` is meant?",
    ),
    *(
        Misconception(
            "a test of one head per group",
            slip(_wiring, sizes),
            "The other members may be wrong. Which heads do you never compare?",
        )
        for sizes in ("first members", "even groups")
    ),
    Misconception(
        "a test of the first group alone",
        slip(_wiring, "first group"),
        "A function that gives KV head 0 to everyone passes. Do you go through all H·G heads?",
    ),
    Misconception(
        "comparing the numbers whatever their order",
        slip(_wiring, "any order"),
        "A wrong order holds the same numbers, so sums and sorted values agree. Can you compare "
        "head by head?",
    ),
    Misconception(
        "taking `repeat` for right",
        slip(_wiring, "rounds"),
        "Your test expects rounds of heads, hq % H. The rule is hq // G: which KV head does query "
        "head 1 read?",
    ),
    Misconception(
        "the answer upside down",
        slip(_wiring, "upside down"),
        "A right function should give True. What does your last line return for it?",
    ),
    Misconception(
        "a test that lets nothing through",
        slip(_wiring, "nothing"),
        "It says False to right functions, too. Take `gqa.expand_kv_heads`, and print every "
        "comparison. Which one fails first? (The rule is hq // G, not hq // H.)",
    ),
    Misconception(
        "a test that lets everything through",
        slip(_wiring, "anything"),
        "It says True to wrong functions, too. Where does it compare the copies with the rule?",
    ),
)


_EQUAL = "`==` compares number by number, `torch.equal` compares the whole"


def _run_wiring(test: Callable, expand: Callable[[Tensor, int], Tensor]) -> object:
    """What the reader's test says of `expand`: a failed `assert` says False, and a tensor of many
    answers is told for what it is."""
    gaps = _open_gaps(test)
    if len(gaps) == 2:  # the frame as it came
        raise NotImplementedError("both gaps are open")
    if gaps:
        raise TypeError(f"still open in the test: {gaps[0]}")
    try:
        said = test(expand)
    except AssertionError:
        return False
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise TypeError(f"a yes or no is asked for here: {_EQUAL}") from None
    if isinstance(said, Tensor) and said.numel() > 1:
        raise TypeError(
            "this returns a tensor with an answer for each number, and one True or False is asked "
            f"for: {_EQUAL}"
        )
    return said


_WIRING = TEXTS.exercise(
    "wiring_is_right",
    minutes=5,
    difficulty=2,
    solution=wiring_is_right,
    run=_run_wiring,
    misconceptions=_WIRING_MISTAKES,
    cases=(
        Case("`expand` is right: it calls repeat_interleave", lambda: (expand_heads,)),
        Case("`expand` is right: it picks heads by number", lambda: (_by_number,)),
        Case("`expand` is wrong: it calls repeat", lambda: (_rounds,)),
        Case("`expand` is wrong: it makes H copies, not G", lambda: (_as_many_as_heads,)),
        Case("`expand` is wrong: it gives everyone KV head 0", lambda: (_first_for_all,)),
        Case("`expand` is wrong: it gives hq the next KV head, hq // G + 1", lambda: (_next_head,)),
        Case("`expand` is wrong: it reverses the positions", lambda: (_late_first,)),
        Case("`expand` is wrong: query head 1 alone gets another KV head", lambda: (_one_astray,)),
        Case("`expand` is wrong: it returns zeros", lambda: (_zeros,)),
        Case("`expand` is wrong: it leaves an axis of length G", lambda: (_with_an_axis,)),
    ),
)


# -- grouped_scores --


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled scores [B, N, HQ, M] of queries [B, N, HQ, D] with shared keys [B, M, H, D]."""
    H = k.shape[2]
    G = q.shape[2] // H
    qg = q.unflatten(2, (H, G))  # [B, N, H, G, D]
    scores = torch.einsum("bihgd,bjhd->bihgj", qg, k)  # [B, N, H, G, M]
    return scores.flatten(2, 3)  # [B, N, HQ, M]


def _grouped(slips: Slips, q: Tensor, k: Tensor) -> Tensor:
    """`grouped_scores` with slips."""
    (B, N, HQ, D), (M, H) = q.shape, k.shape[1:3]
    if "fixed G" in slips:
        return q.unflatten(2, (H, _CHAPTERS_G))
    if "no product's sum" in slips:
        return q[..., None, :] * k.repeat_interleave(HQ // H, 2).transpose(1, 2)[:, None]
    if "one position letter" in slips:
        return torch.einsum("bnhgd,bnhd->bnhg", q.unflatten(2, (H, -1)), k).flatten(2, 3)
    if "two widths" in slips:
        return torch.einsum("bihgd,bjhe->bihgj", q.unflatten(2, (H, -1)), k).flatten(2, 3)
    if "keys first" in slips:
        return torch.einsum("bihgd,bjhd->bjhgi", q.unflatten(2, (H, -1)), k).flatten(2, 3)
    if "wrong pair" in slips:
        return torch.einsum("bihgd,bjhd->bihgj", q.unflatten(2, (H, -1)), k).flatten(3, 4)
    if "own letter" in slips:
        return torch.einsum("bihgd,bjkd->bihgj", q.unflatten(2, (H, -1)), k).flatten(2, 3)
    if slips & {"to the end", "unflatten"}:
        scores = torch.einsum("bihgd,bjhd->bihgj", q.unflatten(2, (H, -1)), k)
        return scores.flatten(2) if "to the end" in slips else scores.unflatten(2, (H, HQ // H))
    if "brackets" in slips:
        return torch.einsum("bihgd,bjhd->bi(hg)j", q.unflatten(2, (H, -1)), k)
    if "heads with heads" in slips:
        return q.unflatten(2, (H, -1)) @ k.transpose(-2, -1)
    if "split" in slips:
        return torch.einsum("bihgd,bjhd->bihgj", q.unflatten(2, (-1, H)), k).flatten(2, 3)
    # -- which KV head a query head reads --
    hq = torch.arange(HQ)
    kv_head = hq % H if "every H-th" in slips else hq // (HQ // H)
    if "one for all" in slips:
        kv_head = torch.zeros_like(hq)
    keys = k if "one to one" in slips else k[:, :, kv_head]
    scores = torch.einsum("bihd,bjhd->bihj", q, keys)  # [B, N, HQ, M]
    # -- what comes after the dot product --
    if "scaled" in slips:
        scores = scores * D**-0.5
    if "masked" in slips:
        hidden = torch.ones(N, M).tril(M - N)[:, None] == 0  # [N, 1, M]
        scores = scores.masked_fill(hidden, -torch.inf)
    if "softmax" in slips:
        scores = torch.softmax(scores, -1)
    # -- the axes --
    if "swapped" in slips:
        scores = scores.unflatten(2, (H, -1)).transpose(2, 3).flatten(2, 3)
    if "own axis" in slips:
        scores = scores.unflatten(2, (H, -1))
        return scores.permute(0, 2, 3, 1, 4) if "heads first" in slips else scores
    if "summed" in slips:
        return scores.unflatten(2, (H, -1)).sum(3)
    if "heads first" in slips:
        return scores.transpose(1, 2)
    return scores.transpose(1, 2).reshape(B, N, HQ, M) if "reshape" in slips else scores


_SCORES_MISTAKES = (
    Misconception(
        "sharing a key among every H-th query head, not among neighbours",
        slip(_grouped, "every H-th"),
        "Query head hq reads KV head hq % H here. Splitting an axis into (a, b) keeps neighbours "
        "together in the last part; `repeat` keeps none together. Which of h and g must run "
        "fastest?",
    ),
    Misconception(
        "merging the two head axes in the wrong order",
        slip(_grouped, "swapped"),
        "The results came back under other heads' numbers. In which order did you split the axis "
        "that you now merge?",
    ),
    Misconception(
        "merging axes with a reshape that does not move them",
        slip(_grouped, "reshape"),
        "`reshape` reads the numbers in the order in which they lie and never moves an axis, so "
        "heads and positions are mixed up. In which order must the axes stand before you merge "
        "two of them?",
    ),
    Misconception(
        "heads before positions, as in the chapter's scores",
        slip(_grouped, "heads first"),
        "Here the result is asked for as [B, N, HQ, M], the layout of q. Which letter comes second "
        "to the right of your arrow?",
    ),
    Misconception(
        "leaving the group as an axis of its own",
        slip(_grouped, "own axis"),
        "There are five axes, and asked for is one of all HQ query heads. Which two of yours "
        "stand next to each other and make it?",
    ),
    Misconception(
        "summing the scores of a group's heads",
        slip(_grouped, "summed"),
        "einsum sums over every letter that is missing after the arrow. Sharing keys does not mean "
        "sharing scores: which letter tells the heads of a group apart?",
    ),
    Misconception(
        "splitting the head axis as [G, H] instead of [H, G]",
        slip(_grouped, "split"),
        "The letter of the KV heads then runs over the members of a group. Neighbours share a KV "
        "head: which of the two sizes comes first?",
    ),
    Misconception(
        "a matrix product of heads with heads",
        slip(_grouped, "heads with heads"),
        "`@` multiplies the last two axes, and of the keys these are heads and width. Here the "
        "positions have to meet. Which einsum says so?",
    ),
    Misconception(
        "pairing query heads with KV heads one to one",
        slip(_grouped, "one to one"),
        "There are HQ query heads and only H KV heads, so one letter cannot run over both. Into "
        "which two axes can you split the query heads?",
    ),
    Misconception(
        "one KV head for all query heads",
        slip(_grouped, "one for all"),
        "This is multi-query attention: only KV head 0 is read. Which KV head does the last query "
        "head read?",
    ),
    Misconception(
        "scaled scores where unscaled ones are asked for",
        slip(_grouped, "scaled"),
        "In attention the scale comes next. This exercise wants the dot products as they are: "
        "which factor can go?",
    ),
    Misconception(
        "masked scores where all of them are asked for",
        slip(_grouped, "masked"),
        "Some scores are -inf. The mask comes later, as in chapter 01: which line can go?",
    ),
    Misconception(
        "the weights where the scores are asked for",
        slip(_grouped, "softmax"),
        "Every row sums to 1, so the softmax is done already. Which step comes before it?",
    ),
    Misconception(
        "a group size that does not come from these shapes",
        slip(_grouped, "fixed G"),
        "The notebook has a `G` of its own, 4, and a function that sets none takes that one. How "
        "do you get H and G from the shapes of `q` and `k`?",
    ),
    Misconception(
        "keeping the width instead of summing over it",
        slip(_grouped, "no product's sum"),
        "A dot product multiplies number by number, and adds up. Which letter has to be missing "
        "after the arrow?",
    ),
    Misconception(
        "one letter for two kinds of positions",
        slip(_grouped, "one position letter"),
        "A letter that stands on both sides of the comma pairs the two axes. But every query "
        "position meets every key position. Which letter do the key positions get?",
    ),
    Misconception(
        "two letters for one width",
        slip(_grouped, "two widths"),
        "A letter on one side of the comma alone is summed alone, before anything is multiplied. "
        "Which letter do the widths of query and key share?",
    ),
    Misconception(
        "key positions where the query positions belong",
        slip(_grouped, "keys first"),
        "Your first position axis counts keys. The result is [B, N, HQ, M]: which position comes "
        "first, and which one last?",
    ),
    Misconception(
        "merging the group with the key positions",
        slip(_grouped, "wrong pair"),
        "You merged G with M. The two axes of heads are to become one. At which places do they "
        "stand?",
    ),
    Misconception(
        "a head letter of its own for the keys",
        slip(_grouped, "own letter"),
        "einsum then sums over all KV heads. Which letter makes the query's KV head and the key's "
        "the same?",
    ),
    Misconception(
        "merging the key positions, too",
        slip(_grouped, "to the end"),
        "`flatten(2)` merges axis 2 with all axes after it. At which one should it stop?",
    ),
    Misconception(
        "splitting an axis again where two should become one",
        slip(_grouped, "unflatten"),
        "`unflatten` makes two axes of one. Which function makes one of two?",
    ),
    Misconception(
        "merging two axes inside einsum",
        slip(_grouped, "brackets"),
        "`torch.einsum` knows letters only, and cannot merge axes. Let h and g stand as two axes "
        "on the right. Which call merges them afterwards?",
    ),
)

# with no other slip
_ALONE = {"split", "heads with heads", "fixed G", "brackets"}
_ALONE |= {"no product's sum", "keys first", "wrong pair", "one position letter", "two widths"}
_ALONE |= {"own letter", "to the end", "unflatten"}

_SCORES = TEXTS.exercise(
    "grouped_scores",
    minutes=6,
    difficulty=2,
    solution=grouped_scores,
    misconceptions=_SCORES_MISTAKES,
    combine=together(
        _SCORES_MISTAKES,
        {"every H-th", "one for all", "one to one", *_ALONE},
        {"swapped", "own axis", "summed", *_ALONE},
        {"own axis", "summed", "reshape", *_ALONE},
        {"summed", "heads first", "reshape", *_ALONE},
        {"scaled", "softmax", *_ALONE},
        {"masked", *_ALONE},
    ),
    cases=(
        Case(
            "queries 1 … 6, keys 1 and 10, one position",
            lambda: (
                torch.arange(1.0, 7.0).view(1, 1, 6, 1),
                torch.tensor([1.0, 10.0]).view(1, 1, 2, 1),
            ),
        ),
        Case(
            "two positions, two heads: queries 1 and 2, then 3 and 4; keys 1 and 10, then 5 and 50",
            lambda: (
                torch.arange(1.0, 5.0).view(1, 2, 2, 1),
                torch.tensor([1.0, 10.0, 5.0, 50.0]).view(1, 2, 2, 1),
            ),
        ),
        Case(
            "three KV heads, G = 2, N < M",
            lambda: (_random(2, 3, 6, 4, seed=3), _random(2, 5, 3, 4, seed=4)),
        ),
        Case(
            "one query head per KV head",
            lambda: (_random(1, 2, 3, 4, seed=5), _random(1, 3, 3, 4, seed=6)),
        ),
    ),
)


# -- key_gradient --


def key_gradient(dk_expanded: Tensor, H: int) -> Tensor:
    """Gradient with respect to the keys [B, M, H, D], from the gradient of their expanded copies
    [B, M, HQ, D]."""
    G = dk_expanded.shape[2] // H
    return dk_expanded.unflatten(2, (H, G)).sum(dim=3)  # every copy's share, added up


def _gradient(slips: Slips, dk_expanded: Tensor, H: int) -> Tensor:
    """`key_gradient` with slips."""
    if "fixed G" in slips:
        return dk_expanded.unflatten(2, (H, _CHAPTERS_G))
    if slips & {"copies", "first heads"}:
        return dk_expanded if "copies" in slips else dk_expanded[:, :, :H]
    if "everything" in slips:
        return dk_expanded.sum()
    if slips & {"all heads", "no heads"}:
        return dk_expanded.sum(dim=2, keepdim="all heads" in slips)
    if "groups of H" in slips:
        return dk_expanded.unflatten(2, (-1, H)).sum(dim=3)
    shares = dk_expanded.unflatten(2, (H, -1))  # [B, M, H, G, D]
    if "every H-th" in slips:
        shares = dk_expanded.unflatten(2, (-1, H)).transpose(2, 3)
    if "width" in slips:
        return shares.sum(-1)
    dim = 2 if "KV heads" in slips else 3
    if "one head" in slips:
        return shares.select(dim, 0)
    is_kept = "own axis" in slips
    if "mean" in slips:
        return shares.mean(dim, keepdim=is_kept)
    return shares.sum(dim, keepdim=is_kept)


_GRADIENT_MISTAKES = (
    Misconception(
        "averaging over the group",
        slip(_gradient, "mean"),
        "If you move a shared key a little, every head of the group sees it move, and the loss "
        "changes by all their shares together. What would two equal heads make of it?",
    ),
    Misconception(
        "adding up every H-th head, not neighbours",
        slip(_gradient, "every H-th"),
        "These are heads hq, hq + H, …, the wiring of `repeat`. Query head hq read KV head "
        "hq // G. Where do the heads of one group stand?",
    ),
    Misconception(
        "summing over the KV heads, not over the group",
        slip(_gradient, "KV heads"),
        "After the split into (H, G) there are two axes of heads, and the result keeps the one of "
        "the KV heads. Which axis of the shape after the split has to go?",
    ),
    Misconception(
        "keeping one head's gradient for the whole group",
        slip(_gradient, "one head"),
        "The other heads of the group used the same key. Where do their gradients go?",
    ),
    Misconception(
        "taking the first H of the HQ gradients",
        slip(_gradient, "first heads"),
        "Every query head has a share in some key's gradient, also the last one. Which heads read "
        "KV head 0?",
    ),
    Misconception(
        "groups of H heads where groups of G are meant",
        slip(_gradient, "groups of H"),
        "H is the number of groups, not their size. How many query heads share one KV head?",
    ),
    *(
        Misconception(
            "adding up all heads, whatever they read",
            slip(_gradient, way),
            "Heads of different groups read different keys, and each key wants its own gradient. "
            "Which heads read KV head 0?",
        )
        for way in ("all heads", "no heads")
    ),
    Misconception(
        "adding up everything",
        slip(_gradient, "everything"),
        "`.sum()` without an axis leaves one number. Every key keeps a gradient of its own: which "
        "axis tells the members of a group apart?",
    ),
    Misconception(
        "keeping an axis of length 1 for the group",
        slip(_gradient, "own axis"),
        "The result has one axis more than the keys have. Does your sum keep what it sums over?",
    ),
    Misconception(
        "the gradient of the copies as it came",
        slip(_gradient, "copies"),
        "There are HQ copies here, and H keys. What does a key get from its copies?",
    ),
    Misconception(
        "summing over the width, not over the group",
        slip(_gradient, "width"),
        "After the split the axes are [B, M, H, G, D], so -1 is the width. At which place does the "
        "group stand?",
    ),
    Misconception(
        "a group size that does not come from these shapes",
        slip(_gradient, "fixed G"),
        "The notebook has a `G` of its own, 4, and a function that sets none takes that one. How "
        "do you get G from `H` and the shape of `dk_expanded`?",
    ),
)

# with no other slip
_WHOLE = {"all heads", "no heads", "groups of H", "copies", "width", "fixed G", "everything"}
_WHOLE |= {"first heads"}

_GRADIENT = TEXTS.exercise(
    "key_gradient",
    minutes=4,
    difficulty=2,
    solution=key_gradient,
    misconceptions=_GRADIENT_MISTAKES,
    combine=together(
        _GRADIENT_MISTAKES,
        {"mean", "one head", *_WHOLE},
        {"every H-th", *_WHOLE},
        {"KV heads", *_WHOLE},
        {"own axis", "one head", *_WHOLE},
    ),
    cases=(
        Case(
            "one position, six query heads with gradients 1, 2, 4, 8, 16, 32, two KV heads",
            lambda: (2.0 ** torch.arange(6).view(1, 1, 6, 1), 2),
        ),
        Case("three KV heads, G = 2", lambda: (_random(2, 4, 6, 3, seed=7), 3)),
        Case("one KV head shared by all", lambda: (_random(1, 3, 4, 2, seed=8), 1)),
    ),
)


# -- score_group --


def score_group() -> object:
    """The kernel whose programs load one key, and score all G query heads that read it."""

    @triton.jit
    def kernel(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr):
        h = tl.program_id(0)  # this program's KV head
        width = tl.arange(0, D)
        member = tl.arange(0, GT)  # GT is a power of two: G, or the next above it
        key = tl.load(K + h * D + width)  # [D], loaded once
        heads = h * G + member  # [GT]
        in_group = member < G
        q_tile = tl.load(Q + heads[:, None] * D + width, mask=in_group[:, None], other=0.0)
        s = tl.sum(q_tile * key, axis=1)  # [GT]
        tl.store(S + heads, s, mask=in_group)

    return kernel


_UNTOUCHED = -77.0  # stands in S before the launch


def _run_score_group(solution: Callable, H: int, G: int, D: int) -> tuple[int, int, int, Tensor]:
    """Launch all programs, then program 0 alone. Behind the scores lie numbers that must stay; the
    second launch shows what the programs after it would have covered up."""
    if hasattr(solution, "run"):
        raise TypeError("this is the kernel itself: hand over the function that returns it")
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("score_group defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    gaps = _open_gaps(kernel.fn) if hasattr(kernel, "fn") else []
    if len(gaps) == 3:  # the frame as it came
        raise NotImplementedError("all three gaps are open")
    if gaps:
        raise TypeError(f"still open in the kernel: {' and '.join(gaps)}")
    GT = triton.next_power_of_2(G)
    rows = H * max(GT, D) + GT  # also rows that nobody should read
    q = roomy(_random(rows, D, seed=H + G), 1000.0)
    k = roomy(_random(H, D, seed=D), 1000.0)
    s, alone = (roomy(torch.full((rows,), _UNTOUCHED), _UNTOUCHED) for _ in range(2))
    try:
        kernel[H,](q, k, s, G, D=D, GT=GT)
    except Exception as error:  # the interpreter's own, or the compiler's
        told = f"{error} {error.__cause__}"
        if "for @" in told or "equal ranks" in told:
            raise TypeError(
                "a matrix product takes two matrices, and `key` is one row. Multiply number by "
                "number, then add up"
            ) from None
        if "got (tensor," in told:
            raise TypeError("a tile is no tensor: take the function of `tl` here") from error
        if "pointer argument is not a block" not in told:
            raise
        raise TypeError(
            "`heads` is one number here, and the program scores GT heads. Which tile counts them?"
        ) from None
    kernel[1,](q, k, alone, G, D=D, GT=GT)
    past_end = int((s[H * G :] != _UNTOUCHED).sum())
    into_next = int((alone[G:] != _UNTOUCHED).sum())
    scores = s[: H * G].cpu()
    empty = int((scores == _UNTOUCHED).sum())
    scores[scores == _UNTOUCHED] = torch.nan
    return empty, past_end, into_next, scores


def _open_gaps(function: Callable) -> list[str]:
    """The lines of a function that still give a name the value `...`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return []  # no source to read, so the run has to show it
    return [
        f"`{ast.unparse(node)}`"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.value, "value", None) is Ellipsis
    ]


@triton.jit
def _wrong_score(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr, SLIP: tl.constexpr):
    h = tl.program_id(0)
    width = tl.arange(0, D)
    member = tl.arange(0, GT)
    key = tl.load(K + h * D + width)
    heads = h * G + member
    if SLIP == "every H-th":
        heads = h + member * tl.num_programs(0)
    if SLIP == "overlap":
        heads = h + member
    if SLIP == "padded":
        heads = h * GT + member
    if SLIP == "steps of D":
        heads = h * D + member
    if SLIP == "first group":
        heads = member
    if SLIP == "steps of G":
        heads = h + member * G
    in_group = member < G
    if SLIP == "no mask":
        in_group = member < GT
    if SLIP == "end of S":
        in_group = heads < G * tl.num_programs(0)
        if tl.num_programs(0) == 1:  # launched alone, it does not know where S ends
            in_group = member < GT
    if SLIP == "head against G":
        in_group = heads < G
    if SLIP == "one too many":
        in_group = member <= G
    q_tile = tl.load(Q + heads[:, None] * D + width, mask=in_group[:, None], other=0.0)
    s = tl.sum(q_tile * key, axis=1)
    if SLIP == "axis 0":
        s = tl.sum(q_tile * key, axis=0)
    if SLIP == "summed":
        s = tl.sum(s, axis=0) + tl.zeros([GT], tl.float32)
    if SLIP == "scaled":
        s = s / tl.sqrt(D * 1.0)
    tl.store(S + heads, s, mask=in_group)


class _Mistaken:
    """`_wrong_score` with its slip chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run = mistake, None

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_score[grid](*args, SLIP=self.mistake, **sizes)


def _score(mistake: str) -> Callable:
    return lambda: _Mistaken(mistake)


def _score_case(name: str, H: int, G: int, D: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (H, G, D), lambda: here.why_not("triton", here.device))


_SCORE = TEXTS.exercise(
    "score_group",
    minutes=7,
    difficulty=2,
    solution=score_group,
    run=_run_score_group,
    returns=(
        "places of S that got no score",
        "numbers stored past the end of S",
        "numbers stored into the next group",
        "S",
    ),
    misconceptions=(
        Misconception(
            "giving a program every H-th query head",
            _score("every H-th"),
            "Query heads h, h + H, … are the wiring of `repeat`. Neighbours share here: which G "
            "heads stand beside each other in group h?",
        ),
        Misconception(
            "stepping from group to group by the tile's size",
            _score("padded"),
            "The tile has GT rows, but a group has only G heads. Where does group 1 begin?",
        ),
        Misconception(
            "stepping from group to group by the width",
            _score("steps of D"),
            "`heads` counts query heads. `heads[:, None] * D` turns them into places of `Q`, one "
            "line further down. How many heads does a group have?",
        ),
        Misconception(
            "going on by one head from program to program",
            _score("overlap"),
            "Your program 1 begins at query head 1. But program 0 has G heads already. Where does "
            "group 1 begin?",
        ),
        Misconception(
            "every program takes the first group",
            _score("first group"),
            "All programs run the same code. Which number tells one from the next?",
        ),
        Misconception(
            "stepping by G inside a group",
            _score("steps of G"),
            "Your heads go in steps of G: h, h + G, … . But a group is G neighbours. Which of the "
            "two numbers jumps by G, the group's or the member's?",
        ),
        Misconception(
            "no mask for the rows past the group",
            _score("no mask"),
            "With G = 3, the tile has a fourth row. Which query head would that be, and whose "
            "score does it write over?",
        ),
        Misconception(
            "a mask for the end of `S` alone",
            _score("end of S"),
            "Behind the group stand the heads of the next one. On a GPU the programs run at once, "
            "so who writes last there is chance. Where does a group end?",
        ),
        Misconception(
            "comparing the query head's number with G",
            _score("head against G"),
            "Only group 0 has head numbers below G. Which number counts from 0 in every group?",
        ),
        Misconception(
            "`<=` where `<` is meant",
            _score("one too many"),
            "Members are counted from 0. What is the number of the last of G members?",
        ),
        Misconception(
            "storing a tile that is not [GT]",
            _score("axis 0"),
            "`q_tile * key` is `[GT, D]`, and `S` takes one number per head, `[GT]`. `tl.sum` "
            "removes the axis that you name. Is yours the axis of D?",
        ),
        Misconception(
            "summing the scores of a group's heads",
            _score("summed"),
            "Sharing a key does not mean sharing a score. Which axis of `q_tile * key` do you sum "
            "over, and which stays?",
        ),
        Misconception(
            "scaled scores where unscaled ones are asked for",
            _score("scaled"),
            "In attention the scale comes next. This kernel stores the dot products as they are: "
            "which factor can go?",
        ),
    ),
    cases=(
        _score_case("one KV head, two query heads", 1, 2, 4),
        _score_case("two KV heads, G = 2", 2, 2, 4),
        _score_case("three KV heads, G = 2: more groups than members", 3, 2, 4),
        _score_case("two KV heads, G = 3: a tile of four rows", 2, 3, 8),
        _score_case("two KV heads, G = 5: a tile of eight rows", 2, 5, 4),
    ),
)


# -- most_kv_heads --


def most_kv_heads(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    """The most KV heads whose cache of one sequence fits into `gib` GiB, two bytes per number; 0 if
    none fits."""
    per_head = 2 * tokens * layers * (D + DV)  # bytes that one KV head costs
    shareable = [H for H in range(1, HQ + 1) if HQ % H == 0]  # groups must be of equal size
    return max((H for H in shareable if H * per_head <= gib * 2**30), default=0)


_CHOICES = {"not divided", "more than HQ", "fraction", "powers", "group rounded up", "halved"}
_CHOICES |= {"undivided powers"}


def _most(slips: Slips, gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> object:
    """`most_kv_heads` with slips."""
    width = D if "keys alone" in slips else 2 * D if "values like keys" in slips else D + DV
    size = 1 if "one byte" in slips else 4 if "doubled" in slips else 2
    per_head = size * tokens * width * (1 if "one layer" in slips else layers)
    room = gib * (10**9 if "GB" in slips else 2**20 if "MiB" in slips else 2**30)
    if "no exact fit" in slips:
        room -= 1
    fits = int(room // per_head)
    if slips & {"more than HQ", "fraction"}:
        return fits if "more than HQ" in slips else room / per_head
    takes_any = bool(slips & {"not divided", "undivided powers"})
    heads = [H for H in range(1, min(fits, HQ) + 1) if HQ % H == 0 or takes_any]
    if slips & {"powers", "undivided powers"}:
        heads = [H for H in heads if H & (H - 1) == 0]
    if "group rounded up" in slips and heads:
        heads = [HQ // -(-HQ // min(fits, HQ))]
    if "halved" in slips and heads:
        halves = (HQ >> n for n in range(HQ.bit_length()))
        heads = [next(half for half in halves if half <= fits)]
    if "own heads" in slips:
        heads = [H for H in heads if H < HQ]
    if not heads:
        if "error" in slips:
            raise ValueError("max() arg is an empty sequence")
        if "division" in slips:
            raise ZeroDivisionError("integer modulo by zero")
        if "no return" in slips:
            return None
        return 1 if "at least one" in slips else 0
    H = min(heads) if "fewest" in slips else max(heads)
    return HQ // H if "group" in slips else H


_MOST_MISTAKES = (
    Misconception(
        "a number of KV heads that does not divide HQ",
        slip(_most, "not divided"),
        "So many would fit, but the query heads cannot be shared out evenly among them. What does "
        "`gqa.group_size(HQ, H)` say to these two numbers?",
    ),
    Misconception(
        "as many KV heads as the memory can hold",
        slip(_most, "more than HQ"),
        "So many fit, but they also have to share out HQ query heads evenly. Which numbers of KV "
        "heads do that?",
    ),
    Misconception(
        "rounding the group size up, and dividing by it",
        slip(_most, "group rounded up"),
        "A group of that size fits, but it need not share out HQ heads evenly. Is HQ % G zero "
        "here?",
    ),
    Misconception(
        "halving HQ until it fits",
        slip(_most, "halved"),
        "Not all divisors of HQ are halves of halves, and half of an odd number is rounded. Which "
        "numbers divide HQ here?",
    ),
    Misconception(
        "a fraction of a KV head",
        slip(_most, "fraction"),
        "This is how many KV heads the memory can hold, to the digit. A model has whole ones: "
        "which numbers of them share out HQ query heads evenly?",
    ),
    Misconception(
        "leaving H = HQ out of the numbers to try",
        slip(_most, "own heads"),
        "With enough memory every query head can have its own KV head. Does your `range` end "
        "before HQ?",
    ),
    *(
        Misconception(
            "trying powers of two only",
            slip(_most, powers),
            "Most models take a power of two. But 7 divides 42. Which other numbers divide HQ?",
        )
        for powers in ("undivided powers", "powers")  # the last one joins other slips
    ),
    Misconception(
        "the group size G where the number of KV heads is asked for",
        slip(_most, "group"),
        "G = HQ // H is the number of query heads that share one KV head. Which of the two had "
        "you in your hands before you divided?",
    ),
    Misconception(
        "the fewest KV heads, not the most",
        slip(_most, "fewest"),
        "One KV head makes the smallest cache. How little sharing will do?",
    ),
    Misconception(
        "taking an exact fit for too large",
        slip(_most, "no exact fit"),
        "A cache may fill the memory to the last byte. Is your comparison `<` or `<=`?",
    ),
    *(
        Misconception(
            "an error where not even one KV head fits",
            slip(_most, error),
            "Nothing that fits is left here, and your function does not reckon with that. What is "
            "asked for in that case?",
        )
        for error in ("error", "division")
    ),
    Misconception(
        "no answer where not even one KV head fits",
        slip(_most, "no return"),
        "Your loop finds nothing here, and the function ends without a `return`. What is asked "
        "for in that case?",
    ),
    Misconception(
        "one KV head where not even one fits",
        slip(_most, "at least one"),
        "One head needs more than there is. What is asked for in that case?",
    ),
    Misconception(
        "GB (10⁹ bytes) where GiB (2³⁰ bytes) are given",
        slip(_most, "GB"),
        "The memory is given in GiB, which are a little larger than GB. How many bytes is one?",
    ),
    Misconception(
        "MiB (2²⁰ bytes) where GiB (2³⁰ bytes) are given",
        slip(_most, "MiB"),
        "The memory is given in GiB. How many MiB make one?",
    ),
    Misconception(
        "counting the keys alone",
        slip(_most, "keys alone"),
        "Scores need the earlier keys. What does the weighted sum need?",
    ),
    Misconception(
        "taking values to be as wide as keys",
        slip(_most, "values like keys"),
        "Often DV = D, not always. How wide are the values in this case?",
    ),
    Misconception(
        "counting a single layer",
        slip(_most, "one layer"),
        "Every layer keeps a cache of its own, and all of them have to fit at once. How many are "
        "there?",
    ),
    Misconception(
        "one byte per number",
        slip(_most, "one byte"),
        "fp16 and bf16 numbers take 16 bits. How many bytes is that?",
    ),
    Misconception(
        "a factor of two too many",
        slip(_most, "doubled"),
        "One 2 stands for the bytes of a number. `D + DV` counts key and value already. What is "
        "the other 2 for?",
    ),
)

_MOST = TEXTS.exercise(
    "most_kv_heads",
    minutes=7,
    difficulty=2,
    solution=most_kv_heads,
    misconceptions=_MOST_MISTAKES,
    combine=together(
        _MOST_MISTAKES,
        _CHOICES,
        {"more than HQ", "fraction", "group"},
        {"more than HQ", "fraction", "error", "division", "at least one", "no return"},
        {"more than HQ", "fraction", "own heads"},
        _CHOICES - {"not divided", "powers", "undivided powers"} | {"fewest"},
        {"keys alone", "values like keys"},
        {"one byte", "doubled"},
        {"GB", "MiB", "no exact fit"},
    ),
    cases=(
        Case("room for 9 KV heads, HQ = 42", lambda: (70, 262_144, 48, 42, 192, 128)),
        Case(
            "room for 8 KV heads and a little more, HQ = 32, DV < D",
            lambda: (10, 65_536, 30, 32, 192, 128),
        ),
        Case(
            "an exact fit: a million tokens in 120 GiB, HQ = 64",
            lambda: (120, 1_048_576, 60, 64, 128, 128),
        ),
        Case("not even one KV head fits", lambda: (1, 1_048_576, 60, 64, 128, 128)),
        Case(
            "room for more KV heads than there are query heads", lambda: (100, 4_096, 10, 6, 64, 64)
        ),
    ),
)

EXERCISES = (_EXPAND, _WIRING, _SCORES, _GRADIENT, _SCORE, _MOST)


# -- two slips at once --


def _rounds_of_h_copies(x: Tensor, G: int) -> Tensor:
    return x.repeat(1, 1, x.shape[2], 1)


def _positions_in_rounds(x: Tensor, G: int) -> Tensor:
    return x.repeat(1, G, 1, 1)


def _rounds_heads_first(q: Tensor, k: Tensor) -> Tensor:
    copies = k.repeat(1, 1, q.shape[2] // k.shape[2], 1)
    return torch.einsum("bihd,bjhd->bhij", q, copies)


def _scaled_with_five_axes(q: Tensor, k: Tensor) -> Tensor:
    H = k.shape[2]
    qg = q.unflatten(2, (H, q.shape[2] // H))
    return torch.einsum("bihgd,bjhd->bihgj", qg, k) * q.shape[-1] ** -0.5


def _mean_of_rounds(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.unflatten(2, (-1, H)).mean(dim=2)


def _undivided_keys(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    return min(HQ, int(gib * 2**30 // (2 * tokens * layers * D)))


def _powers_below(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    per_head = 2 * tokens * layers * (D + DV)
    fit = [H for H in (1, 2, 4, 8, 16, 32, 64) if HQ % H == 0 and H * per_head < gib * 2**30]
    return max(fit, default=0)


DOUBLES = (
    Double(
        "expand_heads",
        _rounds_of_h_copies,
        (
            "whole rounds of heads, where neighbours should share",
            "H copies of each head where G are needed",
        ),
    ),
    Double(
        "expand_heads",
        _positions_in_rounds,
        ("whole rounds of heads, where neighbours should share", "repeating positions, not heads"),
    ),
    Double(
        "grouped_scores",
        _rounds_heads_first,
        (
            "sharing a key among every H-th query head, not among neighbours",
            "heads before positions, as in the chapter's scores",
        ),
    ),
    Double(
        "grouped_scores",
        _scaled_with_five_axes,
        (
            "leaving the group as an axis of its own",
            "scaled scores where unscaled ones are asked for",
        ),
    ),
    Double(
        "key_gradient",
        _mean_of_rounds,
        ("averaging over the group", "adding up every H-th head, not neighbours"),
    ),
    Double(
        "most_kv_heads",
        _undivided_keys,
        ("a number of KV heads that does not divide HQ", "counting the keys alone"),
    ),
    Double(
        "most_kv_heads",
        _powers_below,
        ("trying powers of two only", "taking an exact fit for too large"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    cache_of_64_heads={"unit": "GiB"},
    fewer_operations={"unit": "%"},
    step_with_8_kv_heads={"unit": "×"},
    gradient_of_a_shared_key={"tolerance": 0.02},
)
