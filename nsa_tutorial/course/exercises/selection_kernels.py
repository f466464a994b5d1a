"""Exercises of chapter 14: the best n by halving, and the choice of blocks as one kernel. Then the
weights of a group as a kernel, forced blocks in a running list, the walk of a tile, a merge of two
lists, and score and id in one number."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.endless import (
    at_most,
    kernels_named_in,
    refuse_leaving_a_loop,
    tree_of,
)
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.watching import watching
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- group_mass --

_BT = 8


def group_mass() -> object:
    """The kernel that sums the weights of BT summaries over the heads of one query's group."""

    @triton.jit
    def kernel(Q, K, LSE, Mass, scale, log2_e, M, G, D: tl.constexpr, BT: tl.constexpr):
        summaries = tl.program_id(0) * BT + tl.arange(0, BT)  # [BT]
        width = tl.arange(0, D)
        in_bounds = summaries < M
        k_offset = summaries[:, None] * D + width
        k_tile = tl.load(K + k_offset, mask=in_bounds[:, None], other=0.0)
        mass = tl.zeros([BT], tl.float32)
        for g in range(G):
            q_row = tl.load(Q + g * D + width)  # [D], the query of head g
            s = tl.sum(k_tile * q_row, axis=1) * scale  # [BT]
            mass += tl.exp2((s - tl.load(LSE + g)) * log2_e)
        tl.store(Mass + summaries, mass, mask=in_bounds)

    return kernel


_SAYS = (
    (
        r"\b(Q|K|LSE|Mass)\[",
        "`LSE` is an address, and an address has no elements. What does `tl.load(LSE + g)` give?",
    ),
    (
        r"\btl\.dot\(",
        "`tl.dot` multiplies two tiles, and `q_row` is a single row. Which sum over an elementwise "
        "product gives one number for each summary?",
    ),
    (
        r"(?s)\A(?!.*arange\(0, ?BT\))",
        "No `tl.arange` of yours counts to `BT`, so `summaries` is a single number. A program has "
        "`BT` of them. Which ones?",
    ),
    (
        r"tl\.sum\(.*(axis ?= ?|, )0\)",
        "Your `tl.sum` runs down axis 0, over the summaries. `k_tile` is `[BT, D]`. Along which "
        "axis does the width lie?",
    ),
)


def _launch(kernel: object, grid: tuple[int], *args: object, **sizes: int) -> None:
    """Launch; two errors that the language words for its authors are told in plain words."""
    try:
        kernel[grid](*args, **sizes)
    except Exception as error:
        source = inspect.getsource(kernel.fn) if hasattr(kernel, "fn") else ""
        told = next((says for pattern, says in _SAYS if re.search(pattern, source)), None)
        if told is None:
            raise
        raise TypeError(told) from error


def _run_group_mass(solution: Callable, G: int, M: int, D: int) -> tuple[Tensor, str]:
    """Launch the kernel; behind `Mass` lie numbers that must stay, behind `K` large ones."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("group_mass defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    q, scale = _random(G, D, seed=G + M), D**-0.5
    keys = torch.full((M + _BT, D), 1000.0)
    keys[:M] = _random(M, D, seed=D)
    lse = (scale * q @ keys[:M].T).logsumexp(1)
    q, keys, lse = (roomy(x, 1000.0) for x in (q, keys, lse))
    mass = roomy(torch.full((M + 2 * _BT,), -77.0), -77.0)
    mass[:M] = 0
    with warnings.catch_warnings():  # the interpreter's, of powers of what lies past the end
        warnings.simplefilter("ignore", RuntimeWarning)
        _launch(kernel, (-(-M // _BT),), q, keys, lse, mass, scale, LOG2_E, M, G, D=D, BT=_BT)
    intact = bool((mass[M:] == -77.0).all())
    return mass[:M].cpu(), "in bounds" if intact else "stored past the end of Mass"


def _mass_case(name: str, G: int, M: int, D: int) -> Case:
    here = environment.detect()
    return Case(name, lambda: (G, M, D), lambda: here.why_not("triton", here.device))


_MASS = TEXTS.exercise(
    "group_mass",
    minutes=8,
    difficulty=2,
    solution=group_mass,
    run=_run_group_mass,
    returns=("Mass", "the end of Mass"),
    tolerance=1e-4,
    misconceptions=diffs(group_mass, [
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s - tl.load(LSE + g))",
         "powers of two where powers of e are meant",
         "`tl.exp2(x)` is 2 to the power x. Which factor turns it into e to the power x?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s - tl.load(LSE + g) * log2_e)",
         "scores in nats beside an LSE in bits",
         "`log2_e` has met the LSE, and not the scores. Can the two be subtracted then?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp((s - tl.load(LSE + g)) * log2_e)",
         "the factor of `tl.exp2` inside `tl.exp`",
         "`tl.exp` is a power of e already. Which of your two functions needs `log2_e`?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s - tl.load(LSE + g)) * log2_e",
         "the base's factor behind the power",
         "You multiply the power by `log2_e`. Does the factor belong to the power, or to its "
         "exponent?"),
        ({" * scale": "", " * log2_e": " * scale * log2_e"}, "scaling the LSE, too",
         "`LSE` is of scaled scores already. Which of the two still needs the scale?"),
        (", axis=1", "", "one sum over the whole tile",
         "`tl.sum` without an axis gives one number for all summaries. Along which axis does the "
         "width lie?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "s",
         "adding scores where weights are asked for",
         "A score can be negative, and a weight cannot. What makes a weight of a score and its "
         "row's LSE?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2((s - tl.load(LSE + g)) / log2_e)",
         "dividing by the base's factor",
         "e is 2 to the power 1.4427. Is the exponent of 2 larger than that of e, or smaller?"),
        ("tl.program_id(0) * BT", "tl.program_id(0)", "programs that begin one summary apart",
         "Program 0 has the summaries 0 to `BT - 1`. Which one does program 1 begin with?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s * log2_e - tl.load(LSE + g))",
         "an LSE in nats beside scores in bits",
         "Your scores are multiplied by `log2_e`, and `LSE` is a natural logarithm. Can the two "
         "be subtracted as they are?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s * log2_e) / tl.load(LSE + g)",
         "dividing by the LSE",
         "`LSE` is the *logarithm* of the row's sum. What does a division become in the exponent?"),
        ("tl.exp2((s - tl.load(LSE + g)) * log2_e)", "tl.exp2(s * log2_e)", "leaving the LSE out",
         "Each head gives away one unit of attention. What makes its powers sum to 1?"),
        ("LSE + g", "LSE", "one LSE for all heads",
         "Every head has a softmax of its own, and so an LSE of its own. Where in `LSE` is it?"),
        ("Q + g * D", "Q", "one query for all heads",
         "Each head of the group has a query of its own. How far behind `Q` does head g's row "
         "begin?"),
        ({"Q + g * D": "Q", "LSE + g": "LSE"}, "taking one head of the group",
         "The list is for all heads of the group. Who adds the others?"),
        ("mass +=", "mass =", "keeping the last head alone",
         "Each turn of the loop overwrites what the heads before have given. Which operator adds?"),
        ({"tl.exp2((s - tl.load(LSE + g)) * log2_e)": "(s - tl.load(LSE + g)) * log2_e",
          "summaries, mass": "summaries, tl.exp2(mass)"}, "summing the scores, then one power",
         "A sum in the exponent is a product of weights. A head with one loud score would decide "
         "alone (chapter 07). What is summed?"),
        ("summaries, mass", "summaries, mass / G", "averaging over the heads",
         "The contract is a sum. The order of blocks is the same, but the numbers are not."),
        (" * scale", "", "leaving the scale out",
         "The LSE is of scaled scores. Which scores have to be compared with it?"),
        (", mask=in_bounds)", ")", "storing past the last summary",
         "The last tile has places past `M`. Whose memory is there?"),
        ("tl.program_id(0) * BT + ", "", "every program takes the first tile",
         "All programs run the same code. What tells one from the next?"),
    ]),
    cases=(
        _mass_case("one head, one tile", 1, 8, 4),
        _mass_case("three heads", 3, 8, 4),
        _mass_case("a ragged last tile", 2, 11, 4),
        _mass_case("five heads, three tiles", 5, 24, 8),
    ),
)  # fmt: skip


# -- walk --


def walk(first_query: int, BQ: int, BT: int, length: int, stride: int) -> tuple[int, int]:
    """How many steps of BT summaries a tile of BQ queries walks without a mask, and in all."""

    def visible(t):
        """How many summaries query t sees."""
        return max((t + 1 - length) // stride + 1, 0)

    fewest, most = visible(first_query), visible(first_query + BQ - 1)
    return fewest // BT, -(-most // BT)  # down, and up


_WALK = TEXTS.exercise(
    "walk",
    minutes=5,
    difficulty=2,
    solution=walk,
    misconceptions=diffs(walk, [
        ("t + 1 - length", "t - length", "a summary that is seen one token late",
         "Query `t` sees the tokens 0 to `t`: `t + 1` of them. With summaries of 4, which is the "
         "first query that has seen one whole?"),
        ("stride + 1", "stride", "one summary too few",
         "The query that reads the last token of summary 0 sees one summary. Your quotient is 0 "
         "there. What does it count: summaries, or strides behind the first one?"),
        ("(t + 1 - length) // stride + 1", "t // stride + 1",
         "seeing a summary as soon as it begins",
         "Its last tokens are the query's future. When may it be seen (chapter 06)?"),
        ("(t + 1 - length) // stride + 1", "(t + 1) // length", "summaries that do not overlap",
         "A new summary begins every `stride` tokens, though each is `length` long. How many "
         "have ended?"),
        ("(t + 1 - length) // stride + 1", "(t + 1) // stride",
         "counting a summary after `stride` tokens",
         "`(t + 1) // stride` counts pieces of `stride` tokens. The first summary has `length` "
         "tokens. How many pieces is that?"),
        ({"max(": "(", ", 0)": ")"}, "a negative number of summaries",
         "Early queries see none. What does your quotient say for `t = 0`?"),
        ("visible(first_query),", "visible(first_query + BQ - 1),",
         "unmasked up to what the last query sees",
         "A step without a mask shows all its summaries to all queries of the tile. Which query "
         "sees the fewest?"),
        ("fewest // BT", "-(-fewest // BT)", "rounding the unmasked steps up",
         "A step that the first query sees in part needs a mask. How many steps does it see as a "
         "whole?"),
        ("visible(first_query + BQ - 1)", "visible(first_query)",
         "stopping where the first query does",
         "Later queries of the tile see more. For which of them does the walk end?"),
        ("-(-most // BT)", "most // BT", "rounding the steps down",
         "The last step may have fewer summaries than `BT`. They count, too."),
        ("-(-most // BT)", "most // BT + 1", "one step more than the quotient",
         "Where the last query sees a multiple of `BT`, the last step of yours is empty. Which "
         "quotient rounds up, and adds nothing to what needs no rounding?"),
        ("fewest // BT, -(-most // BT)", "fewest / BT, most / BT", "a fraction of a step",
         "`/` gives fractions. Which of the two numbers should be rounded down, and which up?"),
        ("fewest // BT", "fewest / BT", "a fraction of a step",
         "`/` gives fractions. Which division counts whole steps?"),
        ("BQ - 1", "BQ", "the first query behind the tile",
         "The tile has the queries `first` to …? It has `BQ` of them."),
        ("fewest // BT, -(-most // BT)", "fewest, most",
         "counting summaries where steps are asked for",
         "A step takes `BT` summaries. How many steps are these?"),
        ("-(-most // BT)", "-(-most // BT) - fewest // BT", "the masked steps in place of all",
         "The second number counts all steps of the walk, masked or not."),
        ("fewest // BT, -(-most // BT)", "-(-most // BT), fewest // BT",
         "the two numbers in the other order",
         "The steps without a mask come first, then all steps. Can the first number be the "
         "larger?"),
        ("fewest // BT, ", "", "one number in place of two",
         "That is where the walk ends. Return a pair: how many of these steps need no mask?"),
        (", -(-most // BT)", "", "one number in place of two",
         "These are the steps without a mask. Return a pair: how many steps are there in all?"),
    ]),
    cases=(
        Case("one query that sees one summary", lambda: (3, 1, 1, 4, 2)),
        Case("one query that sees none", lambda: (0, 1, 2, 4, 2)),
        Case("four queries, single summaries", lambda: (6, 4, 1, 4, 2)),
        Case("steps of two", lambda: (8, 4, 2, 4, 2)),
        Case("the first tile", lambda: (0, 8, 2, 4, 1)),
        Case("a tile behind which a summary ends", lambda: (4, 3, 1, 4, 4)),
        Case("summaries of 5, every 3", lambda: (17, 6, 3, 5, 3)),
        Case("the sizes of the paper", lambda: (1024, 128, 16, 32, 16)),
        Case("the last query of a tile ends one", lambda: (40, 8, 4, 8, 4)),
    ),
)  # fmt: skip


# -- merge_lists --


def merge_lists(a: list[int], b: list[int]) -> list[int]:
    """The best n of two lists of n numbers, all three with the largest first."""
    best = [max(x, y) for x, y in zip(a, reversed(b), strict=True)]
    return sorted(best, reverse=True)


_MERGE = TEXTS.exercise(
    "merge_lists",
    minutes=5,
    difficulty=2,
    solution=merge_lists,
    misconceptions=diffs(merge_lists, [
        ("reversed(b)", "b", "comparing what stands at the same place",
         "The second of `a` may be better than the first of `b`, and still lose against its own "
         "neighbour. Which number of `b` should the best of `a` meet?"),
        ("max(x, y)", "min(x, y)", "keeping the smaller of each pair",
         "The pairs are right. One of each pair has to leave. Which one?"),
        ("sorted(best, reverse=True)", "best", "leaving the best in the order in which they met",
         "These are the right numbers. The next merge expects them with the largest first."),
        ("[max(x, y) for x, y in zip(a, reversed(b), strict=True)]",
         "a[: (len(a) + 1) // 2] + b[: len(b) // 2]", "half of each list",
         "All of the best may stand in one list. What do you have if the step brought nothing "
         "new?"),
        ({"max(x, y) for x, y": "x for pair", "reversed(b)": "b",
          "True)]": "True) for x in pair]", "sorted(best, reverse=True)": "best[: len(a)]"},
         "taking the lists in turn",
         "That is the order of a zip. Which number may come next in a merge?"),
        ("[max(x, y) for x, y in zip(a, reversed(b), strict=True)]", "a", "keeping the old list",
         "What has the new list brought?"),
        ("[max(x, y) for x, y in zip(a, reversed(b), strict=True)]", "a + b", "keeping all of both",
         "The list has `n` places in every step. Who leaves?"),
        ("[max(x, y) for x, y in zip(a, reversed(b), strict=True)]",
         "sorted({*a, *b}, reverse=True)[: len(a)]", "dropping numbers that occur twice",
         "A set keeps one of each. How many empty places, -1, does a young list have?"),
        ("(best", "([x for x in best if x >= 0]", "dropping the empty places",
         "A list has `n` places, and -1 stands in those that are empty. A tile cannot be shorter."),
        ({"[max(x, y) for x, y in zip(a, reversed(b), strict=True)]": "a + b",
          "sorted(best, reverse=True)": "sorted(best)[: len(a)]"}, "the smallest numbers",
         "Which end of the sorted numbers is the best one?"),
        (", reverse=True", "", "the largest last",
         "Both lists come with the largest first. So should yours, for the next merge."),
    ]),
    cases=(
        Case("lists of one", lambda: ([3], [5])),
        Case("lists of two", lambda: ([9, 4], [7, 6])),
        Case("nothing new is better", lambda: ([9, 8, 7, 6], [5, 3, 2, 1])),
        Case("all that is new is better", lambda: ([4, 3, 1, 0], [9, 8, 6, 5])),
        Case("two of each", lambda: ([9, 7, 4, 2], [8, 6, 1, 0])),
        Case("a young list", lambda: ([5, 2, -1, -1], [7, -1, -1, -1])),
        Case("three of one, one of the other", lambda: ([9, 4, 3, 1], [8, 7, 6, 2])),
        Case("equal numbers", lambda: ([6, 6, 2, 2], [6, 5, 5, 2])),
    ),
)  # fmt: skip


# -- running_list --


def running_list(
    steps: list[list[float]], own: int, n: int, num_initial: int, num_local: int
) -> list[int]:
    """The list of a query whose block scores come a step at a time."""
    best, block = [], 0  # pairs of score and negated id: of equal scores, the lower id wins
    for step in steps:
        for score in step:
            if block < num_initial or block > own - num_local:
                score = torch.inf
            if block <= own:
                best.append((score, -block))
            block += 1
        best = sorted(best, reverse=True)[:n]  # a merge: of what came before, n are enough
    return sorted(-negated for _, negated in best)


_RUNNING = TEXTS.exercise(
    "running_list",
    minutes=8,
    difficulty=2,
    solution=running_list,
    misconceptions=diffs(running_list, [
        ({"for score in step": "for place, score in enumerate(step)", "block > own": "place > own"},
         "forcing by the place within the step",
         "The local blocks end at `own`, which is a number in the text. A place counts from the "
         "start of a step. How do you know which block a score belongs to?"),
        ({"for score in step": "for place, score in enumerate(step)",
          "block < num_initial": "place < num_initial", "block > own": "place > own"},
         "forcing by the place within the step"),
        ({"for score in step": "for place, score in enumerate(step)",
          "block > own - num_local": "place >= len(step) - num_local"},
         "forcing by the place within the step"),
        ({"for score in step": "for place, score in enumerate(step)",
          "block < num_initial": "place < num_initial"}, "forcing by the place within the step",
         "Every step has a place 0, but only one block of the text is the first. How do you know "
         "which block a score belongs to?"),
        ("for step in steps:",
         "for number, step in enumerate(steps):\n        block = number * len(step)",
         "numbering blocks by the length of their own step",
         "The last step may be shorter than those before. How many blocks came before it?"),
        ("score = torch.inf", "pass", "forced blocks that keep their own score",
         "A forced block is on the list whatever it scores. Which score never loses?"),
        ({"best, block = [], 0": "best, block, forced = [], 0, []",
          "score = torch.inf": "forced += [block] * (block <= own)",
          "if block <= own": "elif block <= own",
          "-negated for _, negated in best": "forced + [-negated for _, negated in best]"},
         "forced blocks on top of n others",
         "The list has `n` places, the forced blocks included. Who has to leave?"),
        ({"best, block = [], 0": "best, block, forced = [], 0, set()",
          "score = torch.inf": "forced |= {block} if block <= own else set()",
          "-negated for _, negated in best": "forced | {-negated for _, negated in best}"},
         "forced blocks on top of n others"),
        ("for step in steps:",
         "best = [(torch.inf, -i) for i in range(own - num_local + 1, 0)]\n    for step in steps:",
         "a forced block before the text",
         "Query 0 has one block, not two. Where does `own - num_local` lead near the beginning?"),
        ("best.append((score, -block))",
         "best.append((score, -block))\n            else:\n                best.append((-1, 1))",
         "-1 in the place of the future",
         "A -1 takes a place in your list, and the list asks for none. What should happen to a "
         "block after `own`?"),
        ("[:n]", "", "a list that is never cut",
         "Every block of the past is still there. How many may stay after each step?"),
        ("sorted(-negated for _, negated in best)", "best", "pairs in place of ids",
         "Your list holds pairs. Which half of a pair names the block?"),
        ("sorted(-negated for _, negated in best)",
         "[(score, -negated) for score, negated in best]", "pairs in place of ids"),
        ("sorted(-negated for _, negated in best)",
         "[(-score, -negated) for score, negated in best]", "pairs in place of ids"),
        ("block <= own", "True", "taking blocks of the future",
         "The step that holds the own block may go on behind it. What may the query see of that?"),
        ("for step in steps:", "for step in steps:\n        best = []",
         "forgetting the list at every step",
         "What the steps before found is gone. What has to outlive a step?"),
        ("for step in steps:", "for step in steps:\n        best = best if block > own else []",
         "forgetting the list at every step"),
        ({"best, block = [], 0": "kept, block = [], 0",
          "for step in steps:": "for step in steps:\n        best = []",
          "best = sorted(": "kept += sorted(", "negated in best": "negated in kept"},
         "the best n of every step",
         "That is a list that grows. Merge it with the old one, and keep `n`."),
        ({"-block": "block", "-negated": "negated"}, "the higher id of equal scores",
         "Ties go to the lower id. Which of two equal pairs does your sort put first?"),
        ("return sorted(", "return list(", "the best first in place of ascending ids",
         "The list is ascending (chapter 05). By what did you sort last?"),
        ("sorted(-negated for _, negated in best)", "[score for score, _ in best]",
         "scores in place of their blocks",
         "The list names blocks. What has to travel with each score, so that you can say where "
         "it came from?"),
        ("sorted(-negated for _, negated in best)", "sorted(score for score, _ in best)",
         "scores in place of their blocks"),
        ("block > own", "block >= own", "one local block too many",
         "`num_local` counts the own block. With 1, which blocks are forced?"),
        ("reverse=True", "reverse=False", "keeping the worst of each step",
         "`sorted` puts the smallest pair first. Which end of the sorted pairs is cut off?"),
        ("-negated", "negated", "negated ids",
         "A sign helps where pairs are sorted, so that the lower id wins. Which ids does the "
         "list name?"),
        ("block <= own", "block < own", "leaving the own block out",
         "A query takes its own block in any case. Which comparison of `block` with `own` lets "
         "that block in?"),
        ("block > own - num_local", "block == own", "forcing the own block alone",
         "`num_local` counts the own block and those before it. With 2, which other block is "
         "forced?"),
        ("block < num_initial", "block <= num_initial", "one initial block too many",
         "`num_initial` is a number of blocks, and the first block is 0. With 1, which blocks "
         "are forced?"),
        ("block > own - num_local", "own - num_local < block < own",
         "leaving the own block to chance",
         "The own block is the last of the local ones. Its summaries have hardly ended, so its "
         "score says little."),
        ("block < num_initial or ", "", "forcing no initial block",
         "Which blocks does `num_initial` name?"),
        (" or block > own - num_local", "", "forcing no local block",
         "Which blocks does `num_local` name?"),
    ]),
    cases=(
        Case("the best two of one step", lambda: ([[1.0, 3.0, 2.0]], 2, 2, 0, 1)),
        Case("the own block is the worst", lambda: ([[3.0, 4.0, 1.0]], 2, 2, 0, 1)),
        Case("the first query, two local blocks", lambda: ([[4.0, 1.0]], 0, 2, 0, 2)),
        Case("two steps, none forced at the start", lambda: ([[5.0, 1.0], [4.0, 0.5]], 3, 2, 0, 1)),
        Case("the first block is forced", lambda: ([[0.1, 7.0], [8.0, 9.0]], 3, 3, 1, 1)),
        Case("the step goes on behind the own block",
             lambda: ([[3.0, 2.0], [1.0, 9.0]], 2, 2, 0, 1)),
        Case("three steps", lambda: ([[6.0, 2.0], [1.0, 7.0], [3.0, 0.5]], 5, 3, 1, 1)),
        Case("two local blocks", lambda: ([[6.0, 8.0], [7.0, 0.2], [0.5, 9.0]], 4, 4, 1, 2)),
        Case("equal scores", lambda: ([[2.0, 5.0, 2.0], [5.0, 5.0, 5.0]], 5, 3, 1, 1)),
        Case("an early query", lambda: ([[4.0, 1.0, 6.0, 2.0]], 1, 4, 1, 2)),
        Case("two initial blocks that are one with the local ones",
             lambda: ([[0.3, 0.2, 0.4], [0.9, 0.8, 0.7]], 2, 3, 2, 2)),
        Case("a short last step",
             lambda: ([[5.0, 1.0, 1.0], [4.0, 9.0, 2.0], [3.0, 8.0]], 7, 3, 1, 1)),
        Case("four steps, two initial blocks",
             lambda: ([[0.1, 0.2], [0.9, 0.7], [0.4, 0.8], [0.6, 0.3]], 7, 5, 2, 1)),
    ),
)  # fmt: skip


# -- pack --


def pack(scores: Tensor, ids: Tensor, id_bits: int) -> Tensor:
    """Scores [NB] fp32, with the ids [NB] in their low id_bits: one int32 each."""
    mask = 2**id_bits - 1
    bits = scores.view(torch.int32)  # the same 32 bits, read as an integer
    return (bits & ~mask) | (mask - ids)


def _run_pack(solution: Callable, scores: Tensor, ids: Tensor, id_bits: int) -> object:
    """Call it; right numbers of 64 bits are told, since `torch` compares them as equal."""
    packed = solution(scores, ids, id_bits)
    is_wide = isinstance(packed, Tensor) and packed.dtype == torch.int64
    if is_wide and torch.equal(packed, pack(scores, ids, id_bits).long()):
        raise TypeError(
            "the numbers are right, but each takes 64 bits: int64. One int32 each is asked for. "
            "Which of your steps makes them wider?"
        )
    return packed


_PACK = TEXTS.exercise(
    "pack",
    minutes=5,
    difficulty=2,
    solution=pack,
    run=_run_pack,
    tolerance=1e-12,
    misconceptions=diffs(pack, [
        ("mask - ", "", "the id as it is",
         "Of two equal scores the larger integer wins. Which id should win, and so which number "
         "should stand for it?"),
        ("(bits & ~mask) |", "bits +", "adding the id to a score that still has its low bits",
         "The sum may carry into the bits above, and nobody can read the id again. Which bits "
         "have to be 0 first?"),
        ("(bits & ~mask)", "bits", "writing the id over low bits that were not cleared",
         "`|` keeps every 1 that was there. What do you read back as the id?"),
        ({"view(torch.int32)": "view(torch.int32).long()", "(bits & ~mask)": "(bits << id_bits)"},
         "shifting the score out of 32 bits",
         "A score has 32 bits already, and its exponent stands highest. Shifted up, it leaves an "
         "int32. Which of its bits can you spare?"),
        ("(bits & ~mask)", "(bits << id_bits)", "shifting the score out of 32 bits",
         "A score has 32 bits already. Shifted up in an int32, it loses its highest bits, which "
         "matter most. Which of its bits can you spare?"),
        ("(bits & ~mask)", "(bits >> id_bits)", "shifting the score down and not up again",
         "After `>> id_bits`, the bits that matter stand at the low end, where the id should go. "
         "How do you bring them back up?"),
        ("(bits & ~mask) |", "(bits >> id_bits) +", "shifting the score down and not up again"),
        ("| (mask - ids)", "- ids", "subtracting the id from the cleared score",
         "The low bits are 0, so the subtraction borrows from the bits above, and they change. "
         "Fill the low bits with ones first. What is left of them when the id is taken away?"),
        ("2**id_bits - 1", "2 ^ id_bits - 1", "`^` where a power is meant",
         "In Python, `2 ^ 3` is 1: `^` compares bits, and `-` binds tighter than it. How is a "
         "power written?"),
        ("~mask", "(~(1 << id_bits) - 1)", "a complement without parentheses",
         "`~` binds tighter than `-`: `~(1 << b) - 1` turns the bits over before 1 is "
         "subtracted. What should be turned over?"),
        ("(bits & ~mask) | (mask - ids)", "((bits & ~mask) | (mask - ids)).view(torch.float32)",
         "a float in place of an integer",
         "The bits are right. Return them as the int32 that they were: without a second `view`."),
        ({"(bits & ~mask)": "(bits >> id_bits)", "ids)": "ids) << (31 - id_bits)"},
         "the id above the score",
         "Integers are compared from their highest bits on. What should decide first?"),
        ("scores.view(torch.int32)", "scores.int()", "the number without its fraction",
         "Scores below 1 all become 0. You want the same bits, read as an integer: `view`."),
        ("~mask", "mask", "keeping the low bits and clearing the rest",
         "`& mask` keeps what the id needs. Which bits tell how large the score is?"),
        ("~mask", "~id_bits", "the number of bits in place of a mask",
         "`~id_bits` clears the bits of the number `id_bits`. Which number has `id_bits` ones?"),
        ("2**id_bits", "2 ** (id_bits - 1)", "one bit too few",
         "With 2 bits there are the ids 0 to 3. What is the largest number of `id_bits` bits?"),
        ("ids)", "ids + 1)", "a low part that starts at 1",
         "Id 0 then needs one bit more than there is. What is the largest that fits?"),
        ("mask - ", "~", "a complement of all 32 bits",
         "`~ids` sets the high bits too, and `|` takes them over. How do you keep its low "
         "`id_bits` bits alone?"),
        ("mask - ids", "ids.flip(0)", "the ids in the reverse order",
         "`flip` gives each score the id of another block. Which number should stand for a "
         "block's own id, so that the lower id is the larger number?"),
        ("mask - ", "-", "a negative id",
         "A negative integer has its high bits set, and `|` takes them over. What can you "
         "subtract the id from?"),
    ]),
    cases=(
        Case("two equal scores", lambda: (torch.tensor([1.0, 1.0]), _ids(0, 1), 1)),
        Case("four ids", lambda: (torch.tensor([0.5, 0.5, 2.0, 0.0]), _ids(0, 1, 2, 3), 2)),
        Case("scores with low bits", lambda: (torch.tensor([0.1, 0.7, 0.3]), _ids(2, 0, 1), 2)),
        Case("ids of 10 bits", lambda: (torch.tensor([0.1, 3.3, 1e-3]), _ids(1023, 500, 0), 10)),
        Case("nearly equal", lambda: (torch.tensor([0.3, 0.30001, 0.29999]), _ids(5, 9, 2), 10)),
    ),
)  # fmt: skip


def _ids(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


# -- pick --


def pick(bits: Tensor, n: int) -> list[int]:
    """The n blocks of the largest bits, ascending, then -1."""
    low, high = 0, 2**31  # at least n blocks have low or more, unless low is 0; fewer have high
    while high - low > 1:
        middle = (low + high) // 2
        count = int((bits >= middle).sum())  # how many have at least this much?
        if count >= n:
            low = middle
        else:
            high = middle
    above = (bits > low).nonzero().flatten().tolist()
    equal = (bits == low).nonzero().flatten().tolist()
    ids = sorted(above + equal[: n - len(above)])
    return ids + [-1] * (n - len(ids))


class StillAsking(Exception):
    """A search asked for much longer than any needs that comes to an end."""


class _Watched(Tensor):
    """A tensor that ends a search which would never end: it may be used so often, and no more."""

    MOST = 5000  # 31 questions to each of 24 blocks, asked one by one, several times over
    uses = 0

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args=(), kwargs=None) -> object:
        for x in args:
            if isinstance(x, cls):
                x.uses += 1
                if x.uses > cls.MOST:
                    raise StillAsking(
                        f"after {cls.MOST:,} questions there is no list. Thirty-one are enough. "
                        "Print `low` and `high`: which of them still moves?"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _watched(*bits: int) -> Tensor:
    return torch.tensor(bits).as_subclass(_Watched)


def _endless(bits: Tensor, n: int) -> list[int]:
    if int((bits >= 0).sum()) >= n:
        raise StillAsking  # at once, because a diff would ask 5,000 questions in every pair
    return pick(bits, n)


_PICK = TEXTS.exercise(
    "pick",
    minutes=10,
    difficulty=2,
    solution=pick,
    misconceptions=diffs(pick, [
        ("sorted(above + equal[: n - len(above)])",
         "(bits >= low).nonzero().flatten().tolist()[:n]",
         "cutting off the last of all that reach the threshold",
         "Here a larger block stands behind equal ones, and yours cuts it off. Who is sure of a "
         "place, and who shares the rest?"),
        ("sorted(above + equal[: n - len(above)])",
         "(bits >= low).nonzero().flatten().tolist()[-n:]",
         "cutting off the first of all that reach the threshold",
         "Your cut drops the lowest ids, and a larger block may be among them. Who is sure of a "
         "place, and who shares the rest?"),
        ("bits >= middle", "bits > middle", "counting what lies above the middle alone",
         "A block whose bits are the middle has at least this much. Which comparison counts it?"),
        ("low = middle", "low = middle + 1", "a lower end above the middle",
         "At least `n` blocks reach `low`: the loop keeps this promise. Do you know it of "
         "`middle + 1`, which you never asked about?"),
        ("equal[: n - len(above)]", "equal[:n]", "as many equal ones as the list has places",
         "The blocks above `low` have their places already. How many places are left?"),
        ("high = middle", "high = middle - 1", "an upper end below the middle",
         "Fewer than `n` blocks reach `high`: the loop keeps this promise. Do you know it of "
         "`middle - 1`, which you never asked about?"),
        ({"if count >= n:": "if count == n:\n            break\n        if count > n:",
          "above =": "low = middle\n    above =", "equal[: n - len(above)]": "equal"},
         "stopping early, with `middle` as the threshold",
         "You stop when a count equals `n`. With equal bits, no count may ever equal it. What is "
         "`middle` then? Use `low`."),
        ({"if count >= n:": "if count == n:\n            break\n        if count > n:",
          "equal[: n - len(above)]": "equal"}, "stopping early, with `low` left behind",
         "You stop when `n` blocks reach the middle. More blocks reach `low`, which is older. "
         "What has to move before you stop?"),
        ("if count >= n:", "if count == n:\n            break\n        if count > n:",
         "stopping early, with `low` left behind"),
        ("bits == low", "bits >= low", "taking a block twice",
         "`bits >= low` holds for the blocks above `low` as well, and they have their places. "
         "Which comparison finds the ties alone?"),
        ("bits > low", "bits >= low", "taking a block twice"),
        ("[-1]", "[0]", "zeros in the empty places",
         "0 is the id of the first block. Which number marks an empty place?"),
        (_endless, "ends that stop moving when they are neighbours",
         "Between neighbours, the middle is `low` itself, and `low = middle` moves nothing. Your "
         "search would never end. When is it over?"),
        ("while high - low > 1:", "for _ in range(30):", "one question too few",
         "Your range still holds two numbers. How often must `2**31` be halved until one is left?"),
        *(("while high - low > 1:", f"for _ in range({questions}):", "too few questions",
           "Your range still holds many numbers. How often must `2**31` be halved until one is "
           "left?") for questions in (29, 28, 24, 23, 20, 16, 10)),
        ({"2**31": "2**16", "return ids": "return ids[:n]"}, "a range that ends too low",
         "2.0 has the bits `2**30`, and scores can be larger. Where must `high` begin, so that "
         "none reaches it?"),
        ({"2**31": "2**30", "return ids": "return ids[:n]"}, "a range that ends too low"),
        ("2**31", "2**30", "a range that ends too low"),
        ("2**31", "2**16", "a range that ends too low",
         "The bits of 0.3 are about a billion. Where must `high` begin, so that none reaches it?"),
        ("2**31", "int(bits.max())", "a range that ends at the largest bits",
         "Fewer than `n` blocks may reach `high`. Some block reaches the largest bits, perhaps "
         "several do. Where must `high` begin?"),
        ("count >= n", "count < n", "moving the wrong end",
         "Your range runs to one of its ends. If at least `n` blocks reach the middle, is the "
         "n-th best below it, or not?"),
        ({"count >= n": "count < n", " + [-1] * (n - len(ids))": ""}, "moving the wrong end"),
        ("int((bits >= middle).sum())", "(bits >= middle)",
         "one answer a block in place of a count",
         "`bits >= middle` says yes or no for each block. How do you make one number of it?"),
        ("equal[: n - len(above)]", "equal", "taking all that equal the last",
         "Several blocks may share the last place's bits, and only some of them fit. How many "
         "places are left behind those above?"),
        ("above + equal[: n - len(above)]", "above", "taking only what lies above",
         "`low` is the bits of the n-th block itself. Is that one taken?"),
        ("equal[:", "equal[::-1][:", "the higher ids of what is equal",
         "Of equal bits the lower ids win. Which of them do you cut off?"),
        ("low, high = 0", "low, high = -1", "taking hidden blocks where too few are visible",
         "A hidden block has -1. How low may your range begin?"),
        ("(bits == low)", "((bits == low) & (low > 0))", "leaving out blocks with score 0",
         "The bits of 0.0 are 0, and such a block is visible. Only -1 is hidden."),
        ({"(bits >= middle).sum()": "len(bits[bits >= middle].unique())",
          "equal[: n - len(above)]": "equal"}, "counting equal bits once",
         "Two blocks with the same bits take two places. What does your count count?"),
        ({"count >= n": "count > n", "equal[: n - len(above)]": "equal"},
         "stopping one block too low",
         "Your threshold lets n + 1 blocks in. When is a count large enough: at `n`, or above it?"),
        ("ids = sorted(", "ids = (", "those above first, then the equal ones",
         "The list is ascending. Put the ids in order when you have them all."),
        ("return ids", "return bits[ids].tolist()", "the bits in place of their blocks",
         "The list names blocks. Where do these bits stand?"),
        ("ids + [-1] * (n - len(ids))", "[-1] * (n - len(ids)) + ids", "sorting -1 with the ids",
         "-1 is smaller than every id, and marks the places that are left at the end. What is "
         "put in order, and what comes behind it?"),
        (" + [-1] * (n - len(ids))", "", "a short list without -1",
         "Every list has `n` places. What stands in those that no block takes?"),
    ]),
    cases=(
        Case("the best of two", lambda: (_watched(3, 8), 1)),
        Case("two equal ones, one place", lambda: (_watched(2, 2), 1)),
        Case("two more equal ones, one place", lambda: (_watched(6, 6), 1)),
        Case("two equal odd ones, one place", lambda: (_watched(5, 5), 1)),
        Case("two of four", lambda: (_watched(5, 9, 2, 7), 2)),
        Case("three equal, two places", lambda: (_watched(4, 1, 4, 4), 2)),
        Case("equal ones before a larger one", lambda: (_watched(4, 4, 4, 9), 2)),
        Case("a larger one before equal ones", lambda: (_watched(9, 4, 4, 4), 2)),
        Case("one above, two of three equal", lambda: (_watched(4, 4, 9, 4, 1), 3)),
        Case("fewer visible than places", lambda: (_watched(6, 2, -1, -1), 3)),
        Case("a visible zero", lambda: (_watched(0, 5, 0, -1), 2)),
        Case("twice the same, above", lambda: (_watched(7, 2, 7, 5, 3), 3)),
        Case("scores of 2 and more", lambda: (_bits(2.25, 0.5, 2.5, 3.0), 2)),
        Case("bits of scores", lambda: (_bits(0.3, 0.1, 2.5, 0.3, 1e-9, math.inf), 4)),
        Case("all visible, few places", lambda: (_bits(*(_random(24, seed=3).abs().tolist())), 5)),
    ),
)  # fmt: skip


def _bits(*scores: float) -> Tensor:
    return _watched(*torch.tensor(scores).view(torch.int32).tolist())


# -- triton_select_blocks --


@triton.jit
def select_kernel(
    Q, K, LSE, Ids, first, BS, n, num_initial, num_local, scale,
    G: tl.constexpr, D: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """The list of one query and one KV head; the grid is `(N, H)`, and `NB` holds all blocks."""
    # -- locate the program --
    row, head, H = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    block, width = tl.arange(0, NB), tl.arange(0, D)
    t = first + row  # the query's position
    own, num_seen = t // BS, (t + 1) // BS  # its block; the summaries that have ended

    # -- weights, summed over the group --
    k_offset = (block[:, None] * H + head) * D + width  # [NB, D]
    k_tile = tl.load(K + k_offset, mask=block[:, None] < num_seen, other=0.0)
    score = tl.zeros([NB], tl.float32)
    for g in range(G):
        q_head = (row * H + head) * G + g
        s = tl.sum(k_tile * tl.load(Q + q_head * D + width), axis=1) * scale  # [NB]
        score += tl.exp(s - tl.load(LSE + q_head))
    score = tl.where(block < num_seen, score, 0.0)

    # -- force and hide --
    is_visible = block <= own
    is_forced = (block < num_initial) | (block > own - num_local)
    score = tl.where(is_forced, float("inf"), score)
    score = tl.where(is_visible, score, -1.0)

    # -- take the blocks that fewer than n others beat --
    mine, other = score[:, None], score[None, :]
    is_better = (other > mine) | ((other == mine) & (block[None, :] < block[:, None]))  # [NB, NB]
    num_better = tl.sum(is_better.to(tl.int32), axis=1)  # [NB]
    is_taken = is_visible & (num_better < n)
    place = tl.cumsum(is_taken.to(tl.int32)) - 1  # so many taken blocks stand before it
    tl.store(Ids + (row * H + head) * n + place, block, mask=is_taken)


def triton_select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, M: int, block_size: int, n: int, num_initial: int,
    num_local: int, scale: float,
) -> Tensor:  # fmt: skip
    """The ids of each query's n best blocks, [N, H, n] int32: ascending, then -1."""
    (N, HQ, D), H = q.shape, k_cmp.shape[1]
    ids = torch.full((N, H, n), -1, dtype=torch.int32, device=q.device)
    NB = triton.next_power_of_2(triton.cdiv(M, block_size))
    select_kernel[N, H](
        q, k_cmp, lse, ids, M - N, block_size, n, num_initial, num_local, scale,
        G=HQ // H, D=D, NB=NB,
    )  # fmt: skip
    return ids


PATIENCE = 30  # seconds for a case, which takes less than one


class OutOfBounds(Exception):
    """A kernel made the right list, and loaded or stored past the end of a tensor on the way."""


def _run_select(
    solution: Callable, q: Tensor, k_cmp: Tensor, lse: Tensor, M: int, block_size: int, n: int,
    num_initial: int, num_local: int, scale: float,
) -> object:  # fmt: skip
    """Call it with tensors on this machine's device; large numbers lie around each of them.

    Raises:
        OutOfBounds: if the list is right, and the kernel left its tensors.
        StillAsking: if it comes to no end.
        NotLaunched: if a kernel leaves a loop, which a GPU's compiler refuses.
        TypeError: if the ids are not int32.
    """
    for kernel in kernels_named_in(solution):
        if (tree := tree_of(kernel)) is not None:
            refuse_leaving_a_loop(kernel, tree)
    q, k_cmp, lse = (roomy(x, 1000.0) for x in (q, k_cmp, lse))
    given = q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale
    why = "there is no list. Thirty-one questions are enough: which of `low` and `high` moves?"
    with (
        warnings.catch_warnings(), watching() as seen,
        at_most(PATIENCE, StillAsking(f"after {PATIENCE} seconds {why}")),
    ):  # fmt: skip
        # the interpreter's, of powers of what a query does not see, and of integers that overflow
        warnings.simplefilter("ignore", RuntimeWarning)
        ids = solution(*given)
    if not isinstance(ids, Tensor):
        return ids
    if not ids.is_floating_point() and ids.dtype != torch.int32:
        dtype = str(ids.dtype).removeprefix("torch.")
        raise TypeError(f"the ids are {dtype}, and int32 is asked for: in which line is that said?")
    outside = [fault for fault in seen.faults if "outside" in fault]
    if outside and torch.equal(ids, triton_select_blocks(*given)):
        raise OutOfBounds(
            f"The list is right, but see {outside[0]}. Which mask keeps these places out?"
        )
    return ids.cpu()


def _select_case(
    name: str, N: int, M: int, *, BS: int = 2, HQ: int = 1, H: int = 1, D: int = 4, n: int = 2,
    num_initial: int = 0, num_local: int = 0, scale: float = 1.0, seed: int = 0,
    equal: bool = False, loud: int | None = None,
) -> Case:  # fmt: skip
    """The last `N` queries of `M` positions, blocks of `BS`, and the LSE of what they see.

    Args:
        name, N, M, BS, HQ, H, D, n, num_initial, num_local, scale, seed: the case, and its sizes.
        equal: all summaries are the same.
        loud: the block that takes nearly all the weight of every head.
    """

    def arguments() -> tuple:
        q = _random(N, HQ, D, seed=seed)
        k_cmp = _random(M // BS, H, D, seed=seed + 100)
        k_cmp = k_cmp[:1].repeat(M // BS, 1, 1) if equal else k_cmp
        if loud is not None:
            k_cmp[loud] = 9 * k_cmp[loud]
            q = k_cmp[loud].repeat_interleave(HQ // H, 0).expand(N, HQ, D).clone()
        keys = k_cmp.repeat_interleave(HQ // H, 1)
        s = scale * (q[:, :, None] * keys.transpose(0, 1)).sum(-1)  # [N, HQ, blocks]
        num_seen = (torch.arange(M - N, M) + 1) // BS
        is_hidden = torch.arange(M // BS) >= num_seen[:, None, None]
        lse = s.masked_fill(is_hidden, -torch.inf).logsumexp(-1)
        return q, k_cmp, lse, M, BS, n, num_initial, num_local, scale

    here = environment.detect()
    return Case(name, arguments, lambda: here.why_not("triton", here.device))


_COMPARED = """mine, other = score[:, None], score[None, :]
    is_better = (other > mine) | ((other == mine) & (block[None, :] < block[:, None]))  # [NB, NB]
    num_better = tl.sum(is_better.to(tl.int32), axis=1)  # [NB]
    is_taken = is_visible & (num_better < n)"""


def _game(
    ends: str = "0, 2**31 - 1", middle: str = "low + (high - low) // 2", visible: str = ""
) -> dict[str, str]:
    """An edit of the solution that plays the game; wrong where one of its lines is.

    Args:
        ends: where the range begins and ends.
        middle: what is asked about.
        visible: what else a taken block has to be.
    """
    return {
        _COMPARED: f"""bits = tl.where(is_visible, score.to(tl.int32, bitcast=True), -1)
    low, high = {ends}
    while high - low > 1:
        middle = {middle}
        if tl.sum((bits >= middle).to(tl.int32)) >= n:
            low = middle
        else:
            high = middle
    is_above, is_equal = bits > low, bits == low
    num_left = n - tl.sum(is_above.to(tl.int32))
    is_taken = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32)) <= num_left))
    is_taken = is_taken{visible} & (tl.cumsum(is_taken.to(tl.int32)) <= n)"""
    }


_SELECT = TEXTS.exercise(
    "triton_select_blocks", minutes=50, difficulty=3, solution=triton_select_blocks,
    run=_run_select, launches="triton", parts=(select_kernel,),
    forbidden=(
        ("torch.topk", "PyTorch's choice"),
        ("torch.sort", "PyTorch's sort"),
        ("torch.argsort", "PyTorch's sort"),
        ("torch.matmul", "a product by PyTorch"),
        ("torch.einsum", "a product by PyTorch"),
        ("torch.exp", "a power by PyTorch"),
        ("nsa_tutorial", "the course's own function"),
    ),
    stages=(
        Stage("all blocks fit", (
            _select_case("one query, two blocks, three places", 1, 4, n=3),
            _select_case("one query, five blocks, six places", 1, 10, n=6),
        )),
        Stage("more blocks than places", (
            _select_case("the best two of four", 1, 8),
            _select_case("the best three of six", 1, 12, n=3, seed=1),
        )),
        Stage("a group", (
            _select_case("three heads, the best three of six", 1, 12, HQ=3, n=3, scale=2.0,
                         seed=9),
            _select_case("three heads, the best four of eight", 1, 16, HQ=3, n=4, scale=0.5,
                         seed=5),
            _select_case("three heads, the other four of eight", 1, 16, HQ=3, n=4, scale=2.0,
                         seed=36),
            _select_case("twelve heads, whose best three of four score more than 2", 1, 8, HQ=12,
                         scale=0.6, seed=69),
        )),
        Stage("KV heads", (
            _select_case("two heads on two KV heads", 1, 8, HQ=2, H=2, seed=4),
            _select_case("four heads on two KV heads", 1, 12, HQ=4, H=2, D=8, n=3, seed=5),
        )),
        Stage("many queries", (
            _select_case("all of six positions", 6, 6),
            _select_case("the last three of nine", 3, 9, BS=3, HQ=2, seed=6),
            _select_case("five of eleven, two KV heads", 5, 11, HQ=4, H=2, seed=7),
        )),
        Stage("forced blocks", (
            _select_case("the own block", 2, 8, num_local=1, seed=8),
            _select_case("the first block, and two local ones", 5, 13, HQ=2, n=4, num_initial=1,
                         num_local=2, seed=9),
            _select_case("an own block that has no summary", 1, 9, num_local=2, seed=11),
            _select_case("as many forced blocks as places", 3, 12, num_initial=1, num_local=1,
                         seed=12),
            _select_case("a loud block between two forced ones", 1, 16, HQ=4, num_initial=1,
                         num_local=1, loud=3, seed=13),
        )),
        Stage("ties", (
            _select_case("four equal blocks, two places", 1, 8, equal=True),
            _select_case("equal blocks, one of them forced", 4, 12, HQ=2, n=3, num_local=1,
                         equal=True, seed=10),
        )),
    ),
    misconceptions=diffs(triton_select_blocks, [
        ("num_better < n)", "block < n)", "no scores yet",
         "Your list is 0, 1, 2 and so on, whatever the keys say. Which tile of `K` and which row "
         "of `Q` make the scores? (If yours has scores: `to(tl.int32)` alone rounds them, and a "
         "weight below 1 becomes 0. `bitcast=True` reads the same bits.)"),
        ("place = tl.cumsum(is_taken.to(tl.int32)) - 1",
         "place = tl.cumsum(is_taken.to(tl.int32))", "a slot that counts its own block",
         "`tl.cumsum` counts a block itself, too. How many taken blocks stand *before* the first "
         "one?"),
        ("torch.full((N, H, n), -1, dtype", "torch.empty((N, H, n), dtype",
         "a result that nobody has filled",
         "`torch.empty` holds whatever was in memory. What should stand in a place that no block "
         "takes?"),
        (_game("0, 2**31"), "-1 read as the largest number",
         "In Triton, `2**31` does not fit int32, so `high` and `middle` become uint32. What is -1 "
         "as a number without a sign? `2**31 - 1` fits."),
        (_game("0, 2**31", visible=" & is_visible"), "-1 read as the largest number"),
        ({key: edit.replace("score.to(tl.int32, bitcast=True)", "score.to(tl.int32)")
          for key, edit in _game().items()}, "no scores yet"),
        (_game(middle="(low + high) // 2"), "a middle that overflows int32",
         "`low + high` can be larger than `2**31 - 1`, and is then negative. How else do you find "
         "the middle of two ends?"),
        (_game("0, 2**30"), "a range that ends too low",
         "`2**30` are the bits of 2.0, and a group's score can be larger. Where must `high` begin, "
         "so that none reaches it?"),
        ("(N, H, n), -1,", "(N, H, n), 0,", "zeros in the empty places",
         "0 is the id of a block. What marks a place that no block takes?"),
        ("place = tl.cumsum(is_taken.to(tl.int32)) - 1", "place = num_better",
         "the best block first, where ids ascend",
         "The right blocks, in the order of their scores. How many taken blocks have a lower id?"),
        ("num_better < n)", "num_better < n - 1)", "leaving the n-th best block out",
         "The range ends at the score of the `n`-th best block. Is that block on your list?"),
        ("num_better < n)", "num_better <= n)", "one block more than there are places",
         "A list has `n` places, and the next list begins behind them. How many blocks do you "
         "store?"),
        (" | ((other == mine) & (block[None, :] < block[:, None]))", "",
         "taking all that equal the last",
         "More than `n` blocks reach the `n`-th best score, and the list has `n` places. Of equal "
         "ones, which win?"),
        ("block[None, :] < block[:, None]", "block[None, :] > block[:, None]",
         "the higher id of equal scores",
         "Ties go to the lower id. From which end do you count the equal ones?"),
        ("is_visible & (num", "(num", "hidden blocks where too few are visible",
         "A query with fewer visible blocks than places has empty places. What stands there? And "
         "which block is its own: that of position `t`, or of `t + 1`?"),
        ("own, num_seen = t // BS", "own, num_seen = (t + 1) // BS",
         "hidden blocks where too few are visible"),
        ("(row * H + head) * G + g", "(row * H + head) * G", "taking one head of the group",
         "The list is for all heads of the group. Which line tells head `g` from head 0?"),
        ("tl.load(LSE + q_head)", "tl.load(LSE + head * G + g)", "the LSE of query 0 for all",
         "Each query has a row of `lse`, `[N, HQ]`. How far behind `LSE` does the one of query "
         "`row` begin?"),
        ("score += tl.exp(s - tl.load(LSE + q_head))",
         "score = tl.maximum(score, tl.exp(s - tl.load(LSE + q_head)))",
         "the largest weight in place of the sum",
         "A block's score is the sum over the heads. What do the heads add that are not the "
         "largest?"),
        ("tl.exp(s - tl.load(LSE + q_head))", "tl.exp(s) / tl.load(LSE + q_head)",
         "dividing by the LSE",
         "`lse` is the *logarithm* of the row's sum. What does a division become in the exponent?"),
        ("s - tl.load(LSE + q_head)", "s", "weights without each head's own LSE",
         "Each head has a softmax of its own, and gives away one unit of attention. What makes "
         "its powers sum to 1?"),
        ("tl.exp(", "tl.exp2(", "powers of two where powers of e are meant",
         "`lse` is a natural logarithm. Which base do your powers have?"),
        ("tl.exp(s - tl.load(LSE + q_head))", "s", "adding scores where weights are asked for",
         "A score can be negative, and a weight cannot. What makes a weight of a score and its "
         "row's LSE?"),
        (_game() | {"tl.exp(s - tl.load(LSE + q_head))": "s"},
         "adding scores where weights are asked for"),
        (_game() | {"tl.exp(s - tl.load(LSE + q_head))": "s - tl.load(LSE + q_head)"},
         "adding scores where weights are asked for"),
        ({"score += tl.exp(s - tl.load(LSE + q_head))": "score += s - tl.load(LSE + q_head)",
          "num_seen, score, 0.0)": "num_seen, tl.exp(score), 0.0)"},
         "summing the scores, then one power",
         "A sum in the exponent is a product of weights. What is summed over the heads?"),
        ("score +=", "score =", "keeping the last head alone",
         "Each turn of the loop overwrites what the heads before have given. Which operator adds?"),
        (" * scale  #", " * scale * scale  #", "applying the scale twice",
         "A scaled score has the factor once. In which two lines does it stand?"),
        (" * scale  #", "  #", "leaving the scale out",
         "`lse` is of scaled scores. Which scores have to be compared with it?"),
        ("(block[:, None] * H + head) * D", "block[:, None] * H * D",
         "the summaries of KV head 0 for all",
         "`k_cmp` is `[blocks, H, D]`. Where do the summaries of KV head 1 begin?"),
        ("(block[:, None] * H + head) * D", "block[:, None] * D",
         "summaries as if there were one KV head",
         "`k_cmp` is `[blocks, H, D]`. How far is it from one block's summary to the next?"),
        ("(row * H + head) * G + g", "(row * G + g) * H + head",
         "query heads that read the wrong KV head",
         "The `G` heads of a group stand side by side: heads 0 and 1 of four read KV head 0."),
        ("(row * H + head) * n", "(head * tl.num_programs(0) + row) * n",
         "lists in the order `[H, N, n]`",
         "The result is `[N, H, n]`. Which list comes after that of query 0 and KV head 0?"),
        ("t = first + row", "t = row", "counting positions from the first query",
         "The queries are the last `N` of `M` positions. Which one is at position 0?"),
        ("// BS, (t + 1) // BS", "// BS, t // BS", "a summary that is seen one token late",
         "The query that reads a block's last token sees its summary. With blocks of 2, how many "
         "summaries does the query at position 3 see?"),
        ("// BS, (t + 1) // BS", "// BS, t // BS + 1", "seeing a summary as soon as it begins",
         "A block's last tokens may be the query's future. When has its summary ended?"),
        ("tl.where(block < num_seen, score, 0.0)", "score + 0.0",
         "weights for summaries that the query does not see",
         "`lse` says nothing of hidden summaries, so `exp(s - lse)` gives them a weight. Where "
         "is it set to 0?"),
        ("block <= own", "block < NB", "taking blocks of the future",
         "A list holds blocks up to the query's own. Which comparison hides the later ones?"),
        ("block <= own", "block < own", "leaving the own block out",
         "A query may take its own block, too. Which comparison lets that block in?"),
        ("block <= own", "block < num_seen", "leaving the own block out"),
        ("triton.next_power_of_2(triton.cdiv(M, block_size))",
         "triton.next_power_of_2(k_cmp.shape[0])", "a tile without a place for the own block",
         "The own block may lie behind all of `k_cmp`: its summary has not ended. How many blocks "
         "do `M` positions have?"),
        ('float("inf")', "2.0", "a forced block that can lose",
         "A block's score is a sum over the group, and four heads can give it 4. Which score does "
         "no sum reach?"),
        ("(block < num_initial) | ", "", "forcing no initial block",
         "Which blocks does `num_initial` name?"),
        (" | (block > own - num_local)", "", "forcing no local block",
         "Which blocks does `num_local` name?"),
        ("block < num_initial", "block <= num_initial", "one initial block too many",
         "`num_initial` is a number of blocks, and the first block is 0. With 1, which blocks "
         "are forced?"),
        ("block > own - num_local", "block >= own - num_local", "one local block too many",
         "`num_local` counts the own block. With 1, which blocks are forced?"),
        ("block > own - num_local", "(block == own) & (num_local > 0)",
         "forcing the own block alone",
         "`num_local` counts the own block and those before it. With 2, which other block is "
         "forced?"),
    ], parts=(select_kernel,), pairs=False),
)  # fmt: skip


EXERCISES = (_PICK, _SELECT, _MASS, _RUNNING, _WALK, _MERGE, _PACK)


_CUT_BY_PLACE = Edited(running_list, {
    "for score in step": "for place, score in enumerate(step)",
    "block < num_initial": "place < num_initial",
    "return sorted(": "return list(",
})  # fmt: skip

DOUBLES = (
    Double("walk",
           names=("a summary that is seen one token late",
                  "unmasked up to what the last query sees")),
    Double("merge_lists", names=("keeping all of both", "the largest last")),
    Double("running_list", _CUT_BY_PLACE,
           ("forcing by the place within the step", "the best first in place of ascending ids")),
    Double("pack",
           names=("the id as it is", "adding the id to a score that still has its low bits")),
    Double("pick", names=("taking all that equal the last", "a short list without -1")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    scores_again={"unit": "ms", "tolerance": 0.15},
    choice_ms={"unit": "ms", "tolerance": 0.05},
    tiles_that_merge={"unit": "%", "tolerance": 0.05},
)
