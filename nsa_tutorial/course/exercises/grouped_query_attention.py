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

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.figures import Picture, grid, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


_EXPAND = TEXTS.exercise(
    "expand_heads",
    minutes=3,
    difficulty=1,
    solution=expand_heads,
    misconceptions=diffs(expand_heads, [
        ("x.repeat_interleave(", "torch.cat([x] * ",
         "whole rounds of heads, where neighbours should share",
         "Query head hq gets KV head hq % H here. With one KV head you cannot see it. Which KV "
         "head does query head 1 read, by the rule hq // G?"),
        ("=2", "=1", "repeating positions, not heads",
         "The layout is [batch, position, head, width]. Which of the four dimensions grew?"),
        ("=2", "=3", "repeating numbers inside a key, not heads",
         "The keys have become wider. The layout is [batch, position, head, width]: which "
         "dimension holds the heads?"),
        (", dim=2", "", "`repeat_interleave` without a dimension",
         "Without `dim` PyTorch flattens the tensor first and repeats single numbers. Which "
         "dimension holds the heads?"),
        ("repeat_interleave(G, dim=2)", "repeat(G)", "`repeat` with one number for four dimensions",
         "`repeat` wants a count for each dimension. But before you write four: does it keep "
         "neighbours together?"),
        ("repeat_interleave", "repeat", "`repeat` with a `dim`",
         "`repeat` takes one number per axis, and no `dim`. Which of the two functions takes "
         "one?"),
        ("G, dim", "4, dim", "four copies of each head, whatever `G` is",
         "In the picture, `G` was 4. How many copies does this call ask for?"),
        ("G, dim", "x.shape[2], dim", "H copies of each head where G are needed",
         "Each KV head is needed once for every query head that reads it. How many are those?"),
        ("G, dim", "x.shape[2] // G, dim", "dividing the KV heads by G once more",
         "`x.shape[2]` is H, and `G` is the number of copies already. What does your division "
         "count?"),
        (".repeat_interleave(G, dim=2)", "", "the KV heads as they came",
         "There are still H heads. How many query heads read each of them?"),
        ("=2)", "=2).unflatten(2, (-1, G))", "leaving the copies on an axis of their own",
         "There are five axes, and chapter 01's attention takes four. Which two belong together?"),
    ]),
    cases=(
        Case("one position, two KV heads holding 10 and 20, G = 3",
             lambda: (torch.tensor([10.0, 20.0]).view(1, 1, 2, 1), 3)),
        Case("three KV heads, G = 2, two sequences", lambda: (_random(2, 5, 3, 4, seed=0), 2)),
        Case("G = 1: nothing to share", lambda: (_random(1, 3, 4, 2, seed=1), 1)),
        Case("one KV head: here `repeat` would be right too",
             lambda: (_random(1, 4, 1, 3, seed=2), 4)),
    ),
    picture=_draw_heads,
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


_EXPANDS = {
    "right: it calls repeat_interleave": expand_heads,
    "right: it picks heads by number": lambda x, G: x[:, :, torch.arange(x.shape[2] * G) // G],
    "wrong: it calls repeat": lambda x, G: x.repeat(1, 1, G, 1),
    "wrong: it makes H copies, not G": lambda x, G: expand_heads(x, x.shape[2]),
    "wrong: it gives everyone KV head 0": lambda x, G: expand_heads(x[:, :, :1], x.shape[2] * G),
    "wrong: it gives hq the next KV head, hq // G + 1":
        lambda x, G: expand_heads(x.roll(-1, 2), G),
    "wrong: it reverses the positions": lambda x, G: expand_heads(x.flip(1), G),
    "wrong: query head 1 alone gets another KV head":
        lambda x, G: x[:, :, [hq // G - (hq == 1) for hq in range(x.shape[2] * G)]],
    "wrong: it returns zeros": lambda x, G: torch.zeros_like(expand_heads(x, G)),
    "wrong: it leaves an axis of length G": lambda x, G: expand_heads(x, G).unflatten(2, (-1, G)),
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


# -- grouped_scores --


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled scores [B, N, HQ, M] of queries [B, N, HQ, D] with shared keys [B, M, H, D]."""
    H = k.shape[2]
    G = q.shape[2] // H
    qg = q.unflatten(2, (H, G))  # [B, N, H, G, D]
    scores = torch.einsum("bihgd,bjhd->bihgj", qg, k)  # [B, N, H, G, M]
    return scores.flatten(2, 3)  # [B, N, HQ, M]


_SCORES = TEXTS.exercise(
    "grouped_scores",
    minutes=6,
    difficulty=2,
    solution=grouped_scores,
    misconceptions=diffs(grouped_scores, [
        ("H = k", "k = k.repeat(1, 1, q.shape[2] // k.shape[2], 1)\n    H = k",
         "sharing a key among every H-th query head, not among neighbours",
         "Query head hq reads KV head hq % H here. Splitting an axis into (a, b) keeps neighbours "
         "together in the last part; `repeat` keeps none together. Which of h and g must run "
         "fastest?"),
        ("bihgj", "bighj", "merging the two head axes in the wrong order",
         "The results came back under other heads' numbers. In which order did you split the axis "
         "that you now merge?"),
        ({"bihgj": "bhgij", ".flatten(2, 3)": ".reshape(*q.shape[:3], -1)"},
         "merging axes with a reshape that does not move them",
         "`reshape` reads the numbers in the order in which they lie and never moves an axis, so "
         "heads and positions are mixed up. In which order must the axes stand before you merge "
         "two of them?"),
        ({"bihgj": "bhgij", "(2, 3)": "(1, 2)"},
         "heads before positions, as in the chapter's scores",
         "Here the result is asked for as [B, N, HQ, M], the layout of q. Which letter comes "
         "second to the right of your arrow?"),
        (".flatten(2, 3)", "", "leaving the group as an axis of its own",
         "There are five axes, and asked for is one of all HQ query heads. Which two of yours "
         "stand next to each other and make it?"),
        ({"bihgj": "bihj", ".flatten(2, 3)": ""}, "summing the scores of a group's heads",
         "einsum sums over every letter that is missing after the arrow. Sharing keys does not "
         "mean sharing scores: which letter tells the heads of a group apart?"),
        ("(H, G)", "(G, H)", "splitting the head axis as [G, H] instead of [H, G]",
         "The letter of the KV heads then runs over the members of a group. Neighbours share a KV "
         "head: which of the two sizes comes first?"),
        ({'torch.einsum("bihgd,bjhd->bihgj", qg, k)': "qg @ k.transpose(-2, -1)",
         ".flatten(2, 3)": ""}, "a matrix product of heads with heads",
         "`@` multiplies the last two axes, and of the keys these are heads and width. Here the "
         "positions have to meet. Which einsum says so?"),
        ({'torch.einsum("bihgd,bjhd->bihgj", qg, k)': 'torch.einsum("bihd,bjhd->bihj", q, k)',
         ".flatten(2, 3)": ""}, "pairing query heads with KV heads one to one",
         "There are HQ query heads and only H KV heads, so one letter cannot run over both. Into "
         "which two axes can you split the query heads?"),
        ("H = k", "k = k[:, :, :1].expand_as(k)\n    H = k", "one KV head for all query heads",
         "This is multi-query attention: only KV head 0 is read. Which KV head does the last "
         "query head read?"),
        ("scores = ", "scores = q.shape[-1] ** -0.5 * ",
         "scaled scores where unscaled ones are asked for",
         "In attention the scale comes next. This exercise wants the dot products as they are: "
         "which factor can go?"),
        (", k)", ", k).masked_fill(torch.arange(k.shape[1]) - k.shape[1] > "
         "torch.arange(q.shape[1])[:, None, None, None] - q.shape[1], -torch.inf)",
         "masked scores where all of them are asked for",
         "Some scores are -inf. The mask comes later, as in chapter 01: which line can go?"),
        ("return scores", "return scores.softmax(-1)", "the weights where the scores are asked for",
         "Every row sums to 1, so the softmax is done already. Which step comes before it?"),
        ("q.shape[2] // H", "4", "a group size that does not come from these shapes",
         "The notebook has a `G` of its own, 4, and a function that sets none takes that one. How "
         "do you get H and G from the shapes of `q` and `k`?"),
        ("bihgj", "bihgjd", "keeping the width instead of summing over it",
         "A dot product multiplies number by number, and adds up. Which letter has to be missing "
         "after the arrow?"),
        ({"bjhd": "bihd", "bihgj": "bihg"}, "one letter for two kinds of positions",
         "A letter that stands on both sides of the comma pairs the two axes. But every query "
         "position meets every key position. Which letter do the key positions get?"),
        ("bjhd", "bjhe", "two letters for one width",
         "A letter on one side of the comma alone is summed alone, before anything is multiplied. "
         "Which letter do the widths of query and key share?"),
        ("bihgj", "bjhgi", "key positions where the query positions belong",
         "Your first position axis counts keys. The result is [B, N, HQ, M]: which position comes "
         "first, and which one last?"),
        ("(2, 3)", "(3, 4)", "merging the group with the key positions",
         "You merged G with M. The two axes of heads are to become one. At which places do they "
         "stand?"),
        ("bjhd", "bjkd", "a head letter of its own for the keys",
         "einsum then sums over all KV heads. Which letter makes the query's KV head and the "
         "key's the same?"),
        ("(2, 3)", "(2)", "merging the key positions, too",
         "`flatten(2)` merges axis 2 with all axes after it. At which one should it stop?"),
        (".flatten(2, 3)", ".unflatten(2, (H, G))",
         "splitting an axis again where two should become one",
         "`unflatten` makes two axes of one. Which function makes one of two?"),
        ("bihgj", "bi(hg)j", "merging two axes inside einsum",
         "`torch.einsum` knows letters only, and cannot merge axes. Let h and g stand as two axes "
         "on the right. Which call merges them afterwards?"),
    ]),
    cases=(
        Case("queries 1 … 6, keys 1 and 10, one position", lambda: (
            torch.arange(1.0, 7.0).view(1, 1, 6, 1), torch.tensor([1.0, 10.0]).view(1, 1, 2, 1))),
        Case(
            "two positions, two heads: queries 1 and 2, then 3 and 4; keys 1 and 10, then 5 and 50",
            lambda: (torch.arange(1.0, 5.0).view(1, 2, 2, 1),
                     torch.tensor([1.0, 10.0, 5.0, 50.0]).view(1, 2, 2, 1))),
        Case("three KV heads, G = 2, N < M",
             lambda: (_random(2, 3, 6, 4, seed=3), _random(2, 5, 3, 4, seed=4))),
        Case("one query head per KV head",
             lambda: (_random(1, 2, 3, 4, seed=5), _random(1, 3, 3, 4, seed=6))),
    ),
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

EXERCISES = (_EXPAND, _WIRING, _SCORES, _GRADIENT, _SCORE, _MOST)


# -- two mistakes at once --

DOUBLES = (
    Double("expand_heads", names=(
        "whole rounds of heads, where neighbours should share",
        "H copies of each head where G are needed")),
    Double("expand_heads", names=(
        "whole rounds of heads, where neighbours should share",
        "repeating positions, not heads")),
    Double("grouped_scores", names=(
        "sharing a key among every H-th query head, not among neighbours",
        "heads before positions, as in the chapter's scores")),
    Double("grouped_scores", names=(
        "leaving the group as an axis of its own",
        "scaled scores where unscaled ones are asked for")),
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
