"""Exercises of chapter 02: the bytes of a KV cache, grouped attention from an empty body, a test
that catches wrong copies, the gradient of shared keys, a kernel that loads a key once for its
group, and the KV heads that a given memory can hold.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- cache_bytes --


def cache_bytes(tokens: int, layers: int, HQ: int, G: int, D: int, DV: int) -> int:
    """Bytes of the KV cache of one text, two bytes per number."""
    H = HQ // G  # KV heads
    return 2 * tokens * layers * H * (D + DV)


_CACHE = TEXTS.exercise(
    "cache_bytes",
    minutes=4,
    difficulty=1,
    solution=cache_bytes,
    misconceptions=diffs(cache_bytes, [
        ("HQ // G", "HQ", "counting query heads where KV heads are stored",
         "A group reads one KV head, and only that one is stored. How many groups are there?"),
        ("HQ // G", "G", "the group size where the number of KV heads is asked for",
         "`G` says how many query heads share a KV head. How many KV heads does that leave?"),
        ("HQ // G", "HQ * G", "multiplying the query heads by the group size",
         "Sharing makes the cache smaller. Which way round do `HQ` and `G` give a number below "
         "`HQ`?"),
        ("HQ // G", "1", "a single KV head",
         "One KV head is what *multi-query* attention has. How many groups of `G` do `HQ` query "
         "heads make?"),
        ("(D + DV)", "D", "counting the keys alone",
         "Scores need the earlier keys. What does the weighted sum need?"),
        ("(D + DV)", "(2 * D)", "taking values to be as wide as keys",
         "Often DV = D, not always. How wide are the values in this case?"),
        ("(D + DV)", "D * DV", "multiplying the two widths",
         "A token stores a key of `D` numbers *and* a value of `DV` numbers. How many are both?"),
        ("layers * ", "", "counting a single layer",
         "Every layer keeps a cache of its own, and all of them lie ready at once. How many are "
         "there?"),
        ("tokens * ", "", "counting a single token",
         "This is what each token adds. How many of them are stored?"),
        ("tokens * ", "tokens * tokens * ", "counting pairs of tokens",
         "That is the size of a table of scores. The cache is a list: what does one token add?"),
        ("2 * tokens", "tokens", "one byte per number",
         "fp16 and bf16 numbers take 16 bits. How many bytes is that?"),
        ("2 * tokens", "4 * tokens", "a factor of two too many",
         "One 2 stands for the bytes of a number. `D + DV` counts key and value already. What is "
         "the other 2 for?"),
        ("H * (D + DV)", "(H * (D + DV) + HQ * D)", "storing the queries, too",
         "No later token ever reads an old query. What do later tokens read?"),
        ("H * (D + DV)", "H * (D + DV) / 2**30", "GiB where bytes are asked for",
         "Your number is very small. In which unit is it?"),
    ]),
    cases=(
        Case("one token, one layer, six query heads in groups of 2, keys and values of one number",
             lambda: (1, 1, 6, 2, 1, 1)),
        Case("three tokens, values narrower than keys", lambda: (3, 1, 6, 2, 8, 5)),
        Case("three tokens, four layers", lambda: (3, 4, 6, 2, 8, 5)),
        Case("no sharing: G = 1", lambda: (7, 2, 12, 1, 16, 16)),
        Case("65,536 tokens, 60 layers, 64 query heads in groups of 16",
             lambda: (65_536, 60, 64, 16, 128, 128)),
    ),
)  # fmt: skip


# -- wiring_is_right --


def wiring_is_right(expand: Callable[[Tensor, int], Tensor]) -> bool:
    """Whether `expand(x, G)` gives every query head hq a copy of KV head hq // G."""
    H, G = 2, 3  # several KV heads, and another number of query heads for each
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))


def _copies(x: Tensor, G: int) -> Tensor:
    """Keys or values [B, M, H, D] → [B, M, H·G, D], a copy for every query head."""
    return x.repeat_interleave(G, dim=2)


_EXPANDS = {
    "right: it calls repeat_interleave": _copies,
    "right: it picks heads by number": lambda x, G: x[:, :, torch.arange(x.shape[2] * G) // G],
    "wrong: it calls repeat": lambda x, G: x.repeat(1, 1, G, 1),
    "wrong: it makes H copies, not G": lambda x, G: _copies(x, x.shape[2]),
    "wrong: it gives everyone KV head 0": lambda x, G: _copies(x[:, :, :1], x.shape[2] * G),
    "wrong: it gives hq the next KV head, hq // G + 1":
        lambda x, G: _copies(x.roll(-1, 2), G),
    "wrong: it reverses the positions": lambda x, G: _copies(x.flip(1), G),
    "wrong: query head 1 alone gets another KV head":
        lambda x, G: x[:, :, [hq // G - (hq == 1) for hq in range(x.shape[2] * G)]],
    "wrong: it returns zeros": lambda x, G: torch.zeros_like(_copies(x, G)),
    "wrong: it leaves an axis of length G": lambda x, G: _copies(x, G).unflatten(2, (-1, G)),
}  # fmt: skip
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
    misconceptions=diffs(wiring_is_right, [
        ("H, G = 2, 3", "H, G = 1, 3", "a test with one KV head",
         "With a single head to copy, every order of the copies is the same. How many KV heads "
         "does a wrong order need to show?"),
        ("H, G = 2, 3", "H, G = 3, 1", "a test with one query head per KV head",
         "With G = 1 nothing is repeated, and so nothing can be repeated in the wrong order. "
         "Which G shows the order?"),
        ("H, G = 2, 3", "H, G = 2, 2", "a test with as many KV heads as heads in a group",
         "With H = G, nobody notices when the two are mixed up. Can you make them differ?"),
        ({"randn(1, 5": "randn(1, 1", "(1, 5, H * G": "(1, 1, H * G"},
         "a test that cannot see the order of positions",
         "A function that reverses the positions passes. Does `x` have one position only, or do "
         "you compare sums or means? Which comparison looks at each number in its place?"),
        ("all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))", "True",
         "a test that sees the shapes alone",
         "Every function passes whose shape is right. Do you compare the numbers, too? If you do, "
         "look at your `x`: with zeros in it, can the heads be told apart?"),
        ("randn", "ones", "testing with keys that are all alike",
         "If all heads hold the same numbers, no copy can be the wrong one. Which input tells the "
         "heads apart?"),
        ("range(H * G)", "range(1)", "a test that is content with one right head",
         "Query head 0 reads KV head 0 in most wrong wirings, too. Do you look at one head alone, "
         "or write `any` where `all` is meant?"),
        ("range(H * G)", "range(0, H * G, G)", "a test of one head per group",
         "The other members may be wrong. Which heads do you never compare?"),
        ({"H, G = 2, 3": "H, G = 2, 4", "range(H * G)": "range(0, H * G, G)"},
         "a test of one head per group"),
        ("range(H * G)", "range(G)", "a test of the first group alone",
         "A function that gives KV head 0 to everyone passes. Do you go through all H·G heads?"),
        ("all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))",
         "torch.equal(copies.flatten().msort(), x.repeat(1, 1, G, 1).flatten().msort())",
         "comparing the numbers whatever their order",
         "A wrong order holds the same numbers, so sums and sorted values agree. Can you compare "
         "head by head?"),
        (", hq // G", ", hq % H", "taking `repeat` for right",
         "Your test expects rounds of heads, hq % H. The rule is hq // G: which KV head does "
         "query head 1 read?"),
        ({"return False": "return True", "return all": "return not all"}, "the answer upside down",
         "A right function should give True. What does your last line return for it?"),
        ("all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))", "False",
         "a test that lets nothing through",
         "It says False to right functions, too. Take `gqa.expand_kv_heads`, and print every "
         "comparison. Which one fails first? (The rule is hq // G, not hq // H.)"),
        ({"return False": "return True",
         "all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))": "True"},
         "a test that lets everything through",
         "It says True to wrong functions, too. Where does it compare the copies with the rule?"),
    ]),
    cases=tuple(
        Case(f"`expand` is {name}", lambda expand=expand: (expand,))
        for name, expand in _EXPANDS.items()
    ),
)  # fmt: skip


# -- grouped_attention --


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [N, HQ, D], k [M, H, D], v [M, H, DV]; the queries are the last N of the M positions.
    Returns o [N, HQ, DV]."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    qg = q.unflatten(1, (H, HQ // H))  # [N, H, G, D], and query head hq = h·G + g
    s = torch.einsum("ihgd,jhd->hgij", qg, k) * D**-0.5  # [H, G, N, M]
    position = torch.arange(M - N, M)[:, None]  # of each query
    s = s.masked_fill(torch.arange(M) > position, -torch.inf)
    p = torch.softmax(s, -1)
    og = torch.einsum("hgij,jhe->ihge", p, v)  # [N, H, G, DV]
    return og.flatten(1, 2)  # [N, HQ, DV]


class _Reads(TorchDispatchMode):
    """Counts the numbers that PyTorch's operations read; views read none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if not func.is_view:
            self.numbers += sum(x.numel() for x in tree_leaves(args) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


_LARGE = 4_096  # numbers of a tensor of keys, beside which scores are few


def _run_grouped(solution: Callable, q: Tensor, k: Tensor, v: Tensor) -> object:
    """The output; and whether each key was loaded once, or for each of the G heads of a group."""
    given = [x.clone() for x in (q, k, v)]
    with _Reads() as reads:
        o = solution(q, k, v)
    expect_unchanged((q, k, v), given)
    if o is None:
        return None
    G = q.shape[1] // k.shape[1]
    # an attempt that groups reads keys, values and a few tables of scores
    is_once = k.numel() < _LARGE or reads.numbers < 0.5 * G * (k.numel() + v.numel())
    return o, 1 if is_once else G


def _grouped_case(
    name: str, N: int, M: int, HQ: int, H: int, D: int = 4, DV: int | None = None, seed: int = 0
) -> Case:
    sizes = ((N, HQ, D), (M, H, D), (M, H, DV or D))
    return Case(name, lambda: tuple(_random(*x, seed=seed + i) for i, x in enumerate(sizes)))


def _far_below_zero() -> tuple[Tensor, Tensor, Tensor]:
    """Three tokens whose scores are all -1e32."""
    q, k = torch.full((3, 1, 1), 1e16), torch.full((3, 1, 1), -1e16)
    return q, k, torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1)


_SPLIT = "qg = q.unflatten(1, (H, HQ // H))"
_FINITE = "a finite score where -inf is meant"
_NOT_G = "another number of copies than G"
_ONCE = "loading each key once for every query head that reads it"


def _changed(keys_and_values: str, H: str = "HQ") -> dict[str, str]:
    """The solution on other keys and values, with `H` heads."""
    return {_SPLIT: f"k, v = ({keys_and_values} for x in (k, v))\n    H = {H}\n    {_SPLIT}"}


_BUILD = TEXTS.exercise(
    "grouped_attention",
    minutes=20,
    difficulty=3,
    solution=grouped_attention,
    run=_run_grouped,
    returns=("o", "loads of each key"),
    forbidden=(
        ("torch.scaled_dot_product_attention", "PyTorch's attention"),
        ("nsa_tutorial", "the course's own function"),
    ),
    stages=(
        Stage("one head", (_grouped_case("one query, three keys, one head", 1, 3, 1, 1),)),
        Stage("a group", (
            _grouped_case("four query heads on one KV head", 1, 4, 4, 1, seed=20),)),
        Stage("several KV heads", (
            _grouped_case("three query heads on three KV heads", 1, 4, 3, 3, seed=10),)),
        Stage("several groups", (
            _grouped_case("six query heads on two KV heads", 1, 4, 6, 2, seed=30),
            _grouped_case("six query heads on three KV heads", 1, 5, 6, 3, seed=40),
        )),
        Stage("widths", (
            _grouped_case("keys of width 4, values of width 3", 1, 5, 6, 2, 4, 3, seed=50),)),
        Stage("causal", (
            _grouped_case("two tokens, one head", 2, 2, 1, 1, seed=60),
            _grouped_case("five tokens, six query heads on two KV heads", 5, 5, 6, 2, 4, 3, 70),
            Case("three tokens whose scores are all -1e32", _far_below_zero),
        )),
        Stage("the last positions", (
            _grouped_case("the last two of five positions", 2, 5, 6, 3, 4, 3, seed=80),)),
        Stage("each key once", (
            _grouped_case("32 query heads on two KV heads, 64 keys", 1, 64, 32, 2, 64, 64, 90),)),
    ),
    misconceptions=diffs(grouped_attention, [
        (" * D**-0.5", "", "scores without the scale",
         "The scores grow with the width. By what does chapter 01 multiply them?"),
        (" * D**-0.5", " / D", "dividing by D where √D is meant",
         "A sum of D random products is about √D large, not D. Which power belongs there?"),
        (" * D**-0.5", " * D**0.5", "multiplying by √D",
         "The scale makes scores smaller. Is the sign of your power right?"),
        (" * D**-0.5", " * v.shape[-1] ** -0.5", "the width of the values in the scale",
         "The scores are sums over the width of queries and keys. Which of the two widths is "
         "that?"),
        (_changed("x.repeat(1, HQ // H, 1)"),
         "whole rounds of heads, where neighbours should share",
         "Query head hq reads KV head hq % H here. With one KV head you cannot see it. Which KV "
         "head does query head 1 read, by the rule hq // G?"),
        ({_SPLIT: "qg = q.unflatten(1, (HQ // H, H))"},
         "splitting the head axis as [G, H] instead of [H, G]",
         "Neighbours share a KV head, so the members of a group have to run fastest: the last "
         "part of a split does. Which of the two sizes comes first?"),
        ({_SPLIT: "qg = q.unflatten(1, (HQ // H, H)).transpose(1, 2)"},
         "splitting the head axis as [G, H] instead of [H, G]"),
        ("HQ // H", "H", "taking the number of KV heads for the group size",
         "`H` says how many groups there are. How many query heads share one KV head, by `HQ` and "
         "`H`?"),
        ({_SPLIT: "qg = q.reshape(N, H, H, D)"},
         "taking the number of KV heads for the group size"),
        (_changed("x[:, :1].expand_as(x)", "H"), "one KV head for all query heads",
         "This is multi-query attention: only KV head 0 is read. Which KV head does the last "
         "query head read?"),
        (_changed("x[:, [hq // H for hq in range(HQ)]]"),
         "dividing a head's number by H, not by G",
         "H is how many groups there are, G how large they are. Query head 5 of 6 on 2 KV heads "
         "reads KV head 1: which of the two divides?"),
        (_changed("x.expand(-1, HQ, -1)"), "`expand` along an axis that is longer than 1",
         "`expand` repeats an axis of length 1, and the KV heads' axis has H. Which new axis of "
         "length 1 could it repeat?"),
        ({_SPLIT: "k, v = (x.repeat_interleave(HQ, 1) for x in (k, v))",
          'torch.einsum("ihgd,jhd->hgij", qg, k)': 'torch.einsum("ihd,jhd->hij", q, k)',
          '"hgij,jhe->ihge"': '"hij,jhe->ihe"', "og.flatten(1, 2)": "og"}, _NOT_G,
         "Each KV head is needed once for every query head that reads it. How many are that: H, "
         "HQ = H·G, or G?"),
        ({_SPLIT: "k, v = (x.repeat_interleave(H, 1) for x in (k, v))",
          'torch.einsum("ihgd,jhd->hgij", qg, k)': 'torch.einsum("ihd,jhd->hij", q, k)',
          '"hgij,jhe->ihge"': '"hij,jhe->ihe"', "og.flatten(1, 2)": "og"}, _NOT_G),
        ({_SPLIT: "k, v = (x.repeat_interleave(HQ, 1).transpose(0, 1) for x in (k, v))",
          'torch.einsum("ihgd,jhd->hgij", qg, k)': "q.transpose(0, 1) @ k.mT",
          'torch.einsum("hgij,jhe->ihge", p, v)': "p @ v", "og.flatten(1, 2)": "og.transpose(0, 1)",
          }, _NOT_G),
        ({_SPLIT: "qg = q", '"ihgd,jhd->hgij"': '"ihd,jhd->hij"',
          '"hgij,jhe->ihge"': '"hij,jhe->ihe"', "og.flatten(1, 2)": "og"},
         "pairing query heads with KV heads one to one",
         "There are HQ query heads and only H KV heads, so one letter cannot run over both. Into "
         "which two axes can you split the query heads?"),
        ({_SPLIT: "k, v = (x.transpose(0, 1) for x in (k, v))",
          'torch.einsum("ihgd,jhd->hgij", qg, k)': "q.transpose(0, 1) @ k.mT",
          'torch.einsum("hgij,jhe->ihge", p, v)': "p @ v", "og.flatten(1, 2)": "og.transpose(0, 1)",
          }, "pairing query heads with KV heads one to one"),
        ("->ihge", "->ighe", "merging the two head axes in the wrong order",
         "The results came back under other heads' numbers. In which order did you split the axis "
         "that you now merge?"),
        ({"->ihge": "->hgie", "og.flatten(1, 2)": "og.reshape(N, HQ, -1)"},
         "merging axes with a reshape that does not move them",
         "`reshape` reads the numbers in the order in which they lie and never moves an axis, so "
         "heads and positions are mixed up. In which order must the axes stand before you merge "
         "two of them?"),
        ({"->ihge": "->hgie", "og.flatten(1, 2)": "og.flatten(0, 1)"}, "heads before positions",
         "The result is asked for as [N, HQ, DV], the layout of q. Which axis comes first?"),
        ("og.flatten(1, 2)", "og", "leaving the group as an axis of its own",
         "There are four axes, and asked for is one of all HQ query heads. Which two of yours "
         "stand next to each other and make it?"),
        ("og.flatten(1, 2)", "og.flatten(1)", "merging the width with the heads",
         "`flatten(1)` merges axis 1 with all axes after it. At which one should it stop?"),
        ({"->hgij": "->hij", "hgij,jhe->ihge": "hij,jhe->ihe", "og.flatten(1, 2)": "og"},
         "summing the scores of a group's heads",
         "einsum sums over every letter that is missing after the arrow. Sharing keys does not "
         "mean sharing scores: which letter tells the heads of a group apart?"),
        ({"->ihge": "->ihe", "og.flatten(1, 2)": "og"}, "summing the outputs of a group's heads",
         "Each query head has an output of its own. Which letter is missing after your arrow?"),
        ({"qg, k) * D": "qg.mean(2, keepdim=True).expand_as(qg), k) * D"},
         "one query for a whole group",
         "A group shares its keys. Does it share its queries, too?"),
        ("softmax(s, -1)", "softmax(s, -2)", "a softmax over another axis than the keys'",
         "The weights of one query sum to 1, over its keys. Which axis holds the keys?"),
        ("softmax(s, -1)", "softmax(s, 1)", "a softmax over another axis than the keys'"),
        ("softmax(s, -1)", "softmax(s, 0)", "a softmax over another axis than the keys'"),
        ("softmax(s, -1)", "softmax(s.flatten(2), -1).view_as(s)",
         "one softmax for all queries together",
         "The weights of *each* query sum to 1. Over which axis alone does the sum run?"),
        ("    s = s.masked_fill(torch.arange(M) > position, -torch.inf)\n", "",
         "queries that see later keys",
         "Query 0 gives weight to key 1, which comes after it. What hides a key, and before which "
         "step?"),
        *(("torch.arange(M) > position", f"(torch.arange(M) > position).{repeated}",
           "a mask repeated in another order than its rows",
           "`repeat` lays whole masks one after the other, and `repeat_interleave` keeps a row's "
           "copies together. In your rows, which runs faster: positions, or members of a group?")
          for repeated in ("repeat(HQ // H, 1).view(N, HQ // H, M).transpose(0, 1)",
                           "repeat_interleave(HQ // H, 0).view(HQ // H, N, M)")),
        ("s.masked_fill(torch.arange(M) > position, -torch.inf)",
         "s.permute(2, 0, 1, 3).masked_fill(torch.arange(M) > position, -torch.inf)"
         ".permute(1, 2, 0, 3)", "a mask [N, M] on scores whose last two axes are others",
         "PyTorch lines up last axes. Those of [N, H, G, M] are G and M, and your mask's are N and "
         "M. Where does the mask need axes of length 1 (`None`)?"),
        ("torch.arange(M - N, M)", "torch.arange(N)",
         "taking the queries for the first N positions",
         "With N = 1 and three keys, the query is the last token and sees all three. At which "
         "position does query i stand?"),
        ("torch.arange(M - N, M)", "torch.arange(M - N + 1, M + 1)",
         "letting a query see the next key",
         "A query sees its own position and earlier ones. Is yours off by one?"),
        ("> position", ">= position", "hiding a query's own key",
         "A token sees itself, too. The first query would see nothing at all, and what is the "
         "softmax of nothing?"),
        ("> position", "< position", "hiding the past, not the future",
         "Query 0 sees key 1, and query 1 does not see key 0. Which way does your comparison "
         "point?"),
        ({"    s = s.masked_fill(torch.arange(M) > position, -torch.inf)\n": "",
          "softmax(s, -1)": "softmax(s, -1).masked_fill(torch.arange(M) > position, 0)"},
         "hiding keys after the softmax",
         "The weights that are left do not sum to 1 any more: the hidden keys were in the "
         "softmax's sum. What do you hide before it?"),
        ("-torch.inf", "0", "hiding with a score of 0",
         "$e^0$ is 1, so a hidden key still gets weight. Which score gives the weight 0?"),
        *(("-torch.inf", low, _FINITE, *hint) for low, *hint in (
            ("-1e9", "Here every score is far below yours, so the hidden keys take all the weight. "
             "Which score is below all others?"),
            ("-1e4",), ("-1e3",), ("-100",), ("-50",), ("-1e5",), ("-1e6",), ("-1e10",), ("-1e20",),
            ("-1e30",))),
        ("HQ // H", "4", "a group size that does not come from these shapes",
         "The notebook has a `G` of its own, 4, and a function that sets none takes that one. How "
         "do you get G from the shapes of `q` and `k`?"),
        (_changed("x.repeat_interleave(HQ // H, 1)"), _ONCE,
         "The numbers are right. Copies load each key G times, and so does a loop over the query "
         "heads. Which matrix product has the G queries of a group as its rows?"),
    ]),
)  # fmt: skip


# -- key_gradient --


def key_gradient(dk_expanded: Tensor, H: int) -> Tensor:
    """Gradient with respect to the keys [B, M, H, D], from the gradient of their expanded copies
    [B, M, HQ, D]."""
    G = dk_expanded.shape[2] // H
    return dk_expanded.unflatten(2, (H, G)).sum(dim=3)  # every copy's share, added up


_GRADIENT = TEXTS.exercise(
    "key_gradient",
    minutes=4,
    difficulty=2,
    solution=key_gradient,
    misconceptions=diffs(key_gradient, [
        ("sum(", "mean(", "averaging over the group",
         "If you move a shared key a little, every head of the group sees it move, and the loss "
         "changes by all their shares together. What would two equal heads make of it?"),
        ({"(H, G)": "(G, H)", "dim=3": "dim=2"}, "adding up every H-th head, not neighbours",
         "These are heads hq, hq + H, …, the wiring of `repeat`. Query head hq read KV head hq // "
         "G. Where do the heads of one group stand?"),
        ("dim=3", "dim=2", "summing over the KV heads, not over the group",
         "After the split into (H, G) there are two axes of heads, and the result keeps the one "
         "of the KV heads. Which axis of the shape after the split has to go?"),
        (".sum(dim=3)", ".select(3, 0)", "keeping one head's gradient for the whole group",
         "The other heads of the group used the same key. Where do their gradients go?"),
        (".unflatten(2, (H, G)).sum(dim=3)", "[:, :, :H]", "taking the first H of the HQ gradients",
         "Every query head has a share in some key's gradient, also the last one. Which heads "
         "read KV head 0?"),
        ("(H, G)", "(G, H)", "groups of H heads where groups of G are meant",
         "H is the number of groups, not their size. How many query heads share one KV head?"),
        (".unflatten(2, (H, G)).sum(dim=3)", ".sum(2, keepdim=True)",
         "adding up all heads, whatever they read",
         "Heads of different groups read different keys, and each key wants its own gradient. "
         "Which heads read KV head 0?"),
        (".unflatten(2, (H, G)).sum(dim=3)", ".sum(2)", "adding up all heads, whatever they read"),
        ("dim=3)", ")", "adding up everything",
         "`.sum()` without an axis leaves one number. Every key keeps a gradient of its own: "
         "which axis tells the members of a group apart?"),
        (")  #", ", keepdim=True)  #", "keeping an axis of length 1 for the group",
         "The result has one axis more than the keys have. Does your sum keep what it sums over?"),
        (".unflatten(2, (H, G)).sum(dim=3)", "", "the gradient of the copies as it came",
         "There are HQ copies here, and H keys. What does a key get from its copies?"),
        ("dim=3", "dim=-1", "summing over the width, not over the group",
         "After the split the axes are [B, M, H, G, D], so -1 is the width. At which place does "
         "the group stand?"),
        ("dk_expanded.shape[2] // H", "4", "a group size that does not come from these shapes",
         "The notebook has a `G` of its own, 4, and a function that sets none takes that one. How "
         "do you get G from `H` and the shape of `dk_expanded`?"),
    ]),
    cases=(
        Case("one position, six query heads with gradients 1, 2, 4, 8, 16, 32, two KV heads",
             lambda: (2.0 ** torch.arange(6).view(1, 1, 6, 1), 2)),
        Case("three KV heads, G = 2", lambda: (_random(2, 4, 6, 3, seed=7), 3)),
        Case("one KV head shared by all", lambda: (_random(1, 3, 4, 2, seed=8), 1)),
    ),
)  # fmt: skip


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
    misconceptions=diffs(score_group, [
        ("h * G + member", "h + member * tl.num_programs(0)",
         "giving a program every H-th query head",
         "Query heads h, h + H, … are the wiring of `repeat`. Neighbours share here: which G "
         "heads stand beside each other in group h?"),
        ("h * G + member", "h * GT + member", "stepping from group to group by the tile's size",
         "The tile has GT rows, but a group has only G heads. Where does group 1 begin?"),
        ("h * G + member", "h * D + member", "stepping from group to group by the width",
         "`heads` counts query heads. `heads[:, None] * D` turns them into places of `Q`, one "
         "line further down. How many heads does a group have?"),
        ("h * G + member", "h + member", "going on by one head from program to program",
         "Your program 1 begins at query head 1. But program 0 has G heads already. Where does "
         "group 1 begin?"),
        ("h * G + member", "member", "every program takes the first group",
         "All programs run the same code. Which number tells one from the next?"),
        ("h * G + member", "h + member * G", "stepping by G inside a group",
         "Your heads go in steps of G: h, h + G, … . But a group is G neighbours. Which of the "
         "two numbers jumps by G, the group's or the member's?"),
        ("member < G", "member < GT", "no mask for the rows past the group",
         "With G = 3, the tile has a fourth row. Which query head would that be, and whose score "
         "does it write over?"),
        # launched alone, a program does not know where S ends
        ("member < G", "(heads < G * tl.num_programs(0)) | (tl.num_programs(0) == 1)",
         "a mask for the end of `S` alone",
         "Behind the group stand the heads of the next one. On a GPU the programs run at once, so "
         "who writes last there is chance. Where does a group end?"),
        ("member < G", "heads < G", "comparing the query head's number with G",
         "Only group 0 has head numbers below G. Which number counts from 0 in every group?"),
        ("member < G", "member <= G", "`<=` where `<` is meant",
         "Members are counted from 0. What is the number of the last of G members?"),
        ("axis=1", "axis=0", "storing a tile that is not [GT]",
         "`q_tile * key` is `[GT, D]`, and `S` takes one number per head, `[GT]`. `tl.sum` "
         "removes the axis that you name. Is yours the axis of D?"),
        ("tl.sum(q_tile * key, axis=1)", "tl.zeros([GT], tl.float32) + tl.sum(q_tile * key)",
         "summing the scores of a group's heads",
         "Sharing a key does not mean sharing a score. Which axis of `q_tile * key` do you sum "
         "over, and which stays?"),
        ("s = tl", "s = D**-0.5 * tl", "scaled scores where unscaled ones are asked for",
         "In attention the scale comes next. This kernel stores the dot products as they are: "
         "which factor can go?"),
    ], pairs=False),
    cases=(
        _score_case("one KV head, two query heads", 1, 2, 4),
        _score_case("two KV heads, G = 2", 2, 2, 4),
        _score_case("three KV heads, G = 2: more groups than members", 3, 2, 4),
        _score_case("two KV heads, G = 3: a tile of four rows", 2, 3, 8),
        _score_case("two KV heads, G = 5: a tile of eight rows", 2, 5, 4),
    ),
)  # fmt: skip


# -- most_kv_heads --


def most_kv_heads(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    """The most KV heads whose cache of one sequence fits into `gib` GiB, two bytes per number; 0 if
    none fits."""
    per_head = 2 * tokens * layers * (D + DV)  # bytes that one KV head costs
    room = gib * 2**30
    shareable = [H for H in range(1, HQ + 1) if HQ % H == 0]  # groups must be of equal size
    return max((H for H in shareable if H * per_head <= room), default=0)


_MOST = TEXTS.exercise(
    "most_kv_heads",
    minutes=7,
    difficulty=2,
    solution=most_kv_heads,
    misconceptions=diffs(most_kv_heads, [
        (" if HQ % H == 0", "", "a number of KV heads that does not divide HQ",
         "So many would fit, but the query heads cannot be shared out evenly among them. What "
         "does `gqa.group_size(HQ, H)` say to these two numbers?"),
        ("max((H for H in shareable if H * per_head <= room), default=0)", "int(room // per_head)",
         "as many KV heads as the memory can hold",
         "So many fit, but they also have to share out HQ query heads evenly. Which numbers of KV "
         "heads do that?"),
        ("max((H for H in shareable if H * per_head <= room), default=0)",
         "HQ // -(-HQ // min(int(room // per_head), HQ)) if room >= per_head else 0",
         "rounding the group size up, and dividing by it",
         "A group of that size fits, but it need not share out HQ heads evenly. Is HQ % G zero "
         "here?"),
        ("max((H for H in shareable if H * per_head <= room), default=0)",
         "next((HQ >> n for n in range(HQ.bit_length()) if (HQ >> n) * per_head <= room), 0)",
         "halving HQ until it fits",
         "Not all divisors of HQ are halves of halves, and half of an odd number is rounded. "
         "Which numbers divide HQ here?"),
        ("max((H for H in shareable if H * per_head <= room), default=0)", "room / per_head",
         "a fraction of a KV head",
         "This is how many KV heads the memory can hold, to the digit. A model has whole ones: "
         "which numbers of them share out HQ query heads evenly?"),
        ("HQ + 1", "HQ", "leaving H = HQ out of the numbers to try",
         "With enough memory every query head can have its own KV head. Does your `range` end "
         "before HQ?"),
        ("HQ % H == 0", "H & (H - 1) == 0", "trying powers of two only",
         "Most models take a power of two. But 7 divides 42. Which other numbers divide HQ?"),
        ("HQ % H == 0", "HQ % H == 0 and H & (H - 1) == 0", "trying powers of two only"),
        ({"return max": "return HQ // max", "default=0": "default=HQ + 1"},
         "the group size G where the number of KV heads is asked for",
         "G = HQ // H is the number of query heads that share one KV head. Which of the two had "
         "you in your hands before you divided?"),
        ("max(", "min(", "the fewest KV heads, not the most",
         "One KV head makes the smallest cache. How little sharing will do?"),
        ("<=", "<", "taking an exact fit for too large",
         "A cache may fill the memory to the last byte. Is your comparison `<` or `<=`?"),
        (", default=0", "", "an error where not even one KV head fits",
         "Nothing that fits is left here, and your function does not reckon with that. What is "
         "asked for in that case?"),
        # as a loop that counts H down to 0, and divides by it
        ("default=0)", "default=0) or 1 % 0", "an error where not even one KV head fits"),
        ("default=0", "default=None", "no answer where not even one KV head fits",
         "Your loop finds nothing here, and the function ends without a `return`. What is asked "
         "for in that case?"),
        ("default=0", "default=1", "one KV head where not even one fits",
         "One head needs more than there is. What is asked for in that case?"),
        ("2**30", "10**9", "GB (10⁹ bytes) where GiB (2³⁰ bytes) are given",
         "The memory is given in GiB, which are a little larger than GB. How many bytes is one?"),
        ("2**30", "2**20", "MiB (2²⁰ bytes) where GiB (2³⁰ bytes) are given",
         "The memory is given in GiB. How many MiB make one?"),
        ("(D + DV)", "D", "counting the keys alone",
         "Scores need the earlier keys. What does the weighted sum need?"),
        ("(D + DV)", "(D + D)", "taking values to be as wide as keys",
         "Often DV = D, not always. How wide are the values in this case?"),
        ("layers * ", "", "counting a single layer",
         "Every layer keeps a cache of its own, and all of them have to fit at once. How many are "
         "there?"),
        ("2 * tokens", "tokens", "one byte per number",
         "fp16 and bf16 numbers take 16 bits. How many bytes is that?"),
        ("2 * tokens", "4 * tokens", "a factor of two too many",
         "One 2 stands for the bytes of a number. `D + DV` counts key and value already. What is "
         "the other 2 for?"),
    ]),
    cases=(
        Case("room for 9 KV heads, HQ = 42", lambda: (70, 262_144, 48, 42, 192, 128)),
        Case("room for 8 KV heads and a little more, HQ = 32, DV < D",
             lambda: (10, 65_536, 30, 32, 192, 128)),
        Case("an exact fit: a million tokens in 120 GiB, HQ = 64",
             lambda: (120, 1_048_576, 60, 64, 128, 128)),
        Case("not even one KV head fits", lambda: (1, 1_048_576, 60, 64, 128, 128)),
        Case("room for more KV heads than there are query heads",
             lambda: (100, 4_096, 10, 6, 64, 64)),
    ),
)  # fmt: skip

EXERCISES = (_CACHE, _BUILD, _WIRING, _GRADIENT, _SCORE, _MOST)


# -- two mistakes at once --

DOUBLES = (
    Double("cache_bytes", names=(
        "counting query heads where KV heads are stored", "counting the keys alone")),
    Double("cache_bytes", names=("counting a single layer", "one byte per number")),
    Double("key_gradient", names=(
        "averaging over the group", "adding up every H-th head, not neighbours")),
    Double("most_kv_heads", names=(
        "a number of KV heads that does not divide HQ", "counting the keys alone")),
    Double("most_kv_heads", names=(
        "trying powers of two only", "taking an exact fit for too large")),
)  # fmt: skip


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
