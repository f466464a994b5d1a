"""Exercises of chapter 14: the weights of a group as a kernel, the walk of a tile, a merge of two
lists, forced blocks in a running list, score and id in one number, and the best n by halving.

The wrong solutions of an exercise are one function, or one kernel, told which slips to make.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


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
        k_tile = tl.load(K + summaries[:, None] * D + width, mask=in_bounds[:, None], other=0.0)
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


@triton.jit
def _wrong_mass(
    Q, K, LSE, Mass, scale, log2_e, M, G, D: tl.constexpr, BT: tl.constexpr, SLIP: tl.constexpr
):
    summaries = tl.program_id(0) * BT + tl.arange(0, BT)
    if SLIP == "first tile":
        summaries = tl.arange(0, BT)
    elif SLIP == "one apart":
        summaries = tl.program_id(0) + tl.arange(0, BT)
    width = tl.arange(0, D)
    in_bounds = summaries < M
    k_tile = tl.load(K + summaries[:, None] * D + width, mask=in_bounds[:, None], other=0.0)
    mass = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    total_lse = 0.0
    for g in range(G):
        head = 0 if SLIP == "one head" else g
        q_row = tl.load(Q + (0 if SLIP == "one query" else head) * D + width)
        product = tl.sum(k_tile * q_row, axis=1)
        if SLIP == "no axis":
            product = tl.zeros([BT], tl.float32) + tl.sum(k_tile * q_row)
        s = product
        if SLIP != "no scale":
            s = s * scale
        lse = tl.load(LSE + (0 if SLIP == "one lse" else head))
        total += s
        total_lse += lse
        if SLIP == "base":
            weight = tl.exp2(s - lse)
        elif SLIP == "half base":
            weight = tl.exp2(s * log2_e - lse)
        elif SLIP == "other half base":
            weight = tl.exp2(s - lse * log2_e)
        elif SLIP == "divided":
            weight = tl.exp2((s - lse) / log2_e)
        elif SLIP == "factor outside":
            weight = tl.exp2(s - lse) * log2_e
        elif SLIP == "all scaled":
            weight = tl.exp2((product - lse) * scale * log2_e)
        elif SLIP == "no lse":
            weight = tl.exp2(s * log2_e)
        elif SLIP == "both":
            weight = tl.exp((s - lse) * log2_e)
        elif SLIP == "scores alone":
            weight = s
        else:
            weight = tl.exp2((s - lse) * log2_e)
        mass = weight if SLIP == "last head" else mass + weight
    if SLIP == "scores summed":
        mass = tl.exp2((total - total_lse) * log2_e)
    if SLIP == "mean":
        mass = mass / G
    if SLIP == "no mask":
        tl.store(Mass + summaries, mass)
    else:
        tl.store(Mass + summaries, mass, mask=in_bounds)


class _Mistaken:
    """`_wrong_mass` with its slip chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run = mistake, None

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_mass[grid](*args, SLIP=self.mistake, **sizes)


def _mass(mistake: str) -> Callable:
    return lambda: _Mistaken(mistake)


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
    misconceptions=(
        Misconception(
            "powers of two where powers of e are meant",
            _mass("base"),
            "`tl.exp2(x)` is 2 to the power x. Which factor turns it into e to the power x?",
        ),
        Misconception(
            "scores in nats beside an LSE in bits",
            _mass("other half base"),
            "`log2_e` has met the LSE, and not the scores. Can the two be subtracted then?",
        ),
        Misconception(
            "the factor of `tl.exp2` inside `tl.exp`",
            _mass("both"),
            "`tl.exp` is a power of e already. Which of your two functions needs `log2_e`?",
        ),
        Misconception(
            "the base's factor behind the power",
            _mass("factor outside"),
            "You multiply the power by `log2_e`. Does the factor belong to the power, or to its "
            "exponent?",
        ),
        Misconception(
            "scaling the LSE, too",
            _mass("all scaled"),
            "`LSE` is of scaled scores already. Which of the two still needs the scale?",
        ),
        Misconception(
            "one sum over the whole tile",
            _mass("no axis"),
            "`tl.sum` without an axis gives one number for all summaries. Along which axis does "
            "the width lie?",
        ),
        Misconception(
            "adding scores where weights are asked for",
            _mass("scores alone"),
            "A score can be negative, and a weight cannot. What makes a weight of a score and its "
            "row's LSE?",
        ),
        Misconception(
            "dividing by the base's factor",
            _mass("divided"),
            "e is 2 to the power 1.4427. Is the exponent of 2 larger than that of e, or smaller?",
        ),
        Misconception(
            "programs that begin one summary apart",
            _mass("one apart"),
            "Program 0 has the summaries 0 to `BT - 1`. Which one does program 1 begin with?",
        ),
        Misconception(
            "an LSE in nats beside scores in bits",
            _mass("half base"),
            "Your scores are multiplied by `log2_e`, and `LSE` is a natural logarithm. Can the two "
            "be subtracted as they are?",
        ),
        Misconception(
            "leaving the LSE out",
            _mass("no lse"),
            "Each head gives away one unit of attention. What makes its powers sum to 1?",
        ),
        Misconception(
            "one LSE for all heads",
            _mass("one lse"),
            "Every head has a softmax of its own, and so an LSE of its own. Where in `LSE` is it?",
        ),
        Misconception(
            "one query for all heads",
            _mass("one query"),
            "Each head of the group has a query of its own. How far behind `Q` does head g's row "
            "begin?",
        ),
        Misconception(
            "taking one head of the group",
            _mass("one head"),
            "The list is for all heads of the group. Who adds the others?",
        ),
        Misconception(
            "keeping the last head alone",
            _mass("last head"),
            "Each turn of the loop overwrites what the heads before have given. Which operator "
            "adds?",
        ),
        Misconception(
            "summing the scores, then one power",
            _mass("scores summed"),
            "A sum in the exponent is a product of weights. A head with one loud score would "
            "decide alone (chapter 07). What is summed?",
        ),
        Misconception(
            "averaging over the heads",
            _mass("mean"),
            "The contract is a sum. The order of blocks is the same, but the numbers are not.",
        ),
        Misconception(
            "leaving the scale out",
            _mass("no scale"),
            "The LSE is of scaled scores. Which scores have to be compared with it?",
        ),
        Misconception(
            "storing past the last summary",
            _mass("no mask"),
            "The last tile has places past `M`. Whose memory is there?",
        ),
        Misconception(
            "every program takes the first tile",
            _mass("first tile"),
            "All programs run the same code. What tells one from the next?",
        ),
    ),
    cases=(
        _mass_case("one head, one tile", 1, 8, 4),
        _mass_case("three heads", 3, 8, 4),
        _mass_case("a ragged last tile", 2, 11, 4),
        _mass_case("five heads, three tiles", 5, 24, 8),
    ),
)


# -- walk --


def walk(first_query: int, BQ: int, BT: int, length: int, stride: int) -> tuple[int, int]:
    """How many steps of BT summaries a tile of BQ queries walks without a mask, and in all."""

    def visible(t):
        """How many summaries query t sees."""
        return max((t + 1 - length) // stride + 1, 0)

    fewest, most = visible(first_query), visible(first_query + BQ - 1)
    return fewest // BT, -(-most // BT)  # down, and up


def _walk(
    slips: Slips, first: int, BQ: int, BT: int, length: int, stride: int
) -> tuple[int, int] | int:
    """`walk` with slips."""

    def visible(t: int) -> int:
        if "begun" in slips:
            return t // stride + 1
        if "apart" in slips:
            return (t + 1) // length
        if "pieces" in slips:
            return (t + 1) // stride
        number = (t + ("late" not in slips) - length) // stride + ("one too few" not in slips)
        return number if "negative" in slips else max(number, 0)

    few, many = visible(first), visible(first + BQ - ("past the tile" not in slips))
    if "whole by last" in slips:
        few = many
    if "steps by first" in slips:
        many = few
    if "summaries" in slips:
        return few, many
    if "fractions" in slips:
        return few / BT, many / BT
    whole = -(-few // BT) if "whole up" in slips else few // BT
    if "whole fraction" in slips:
        whole = few / BT
    steps = many // BT if "steps down" in slips else -(-many // BT)
    if "always one more" in slips:
        steps = many // BT + 1
    if "steps alone" in slips:
        return steps
    if "whole alone" in slips:
        return whole
    if "swapped" in slips:
        return steps, whole
    return whole, steps - whole if "masked alone" in slips else steps


_WALK_MISTAKES = (
    Misconception(
        "a summary that is seen one token late",
        slip(_walk, "late"),
        "Query `t` sees the tokens 0 to `t`: `t + 1` of them. With summaries of 4, which is the "
        "first query that has seen one whole?",
    ),
    Misconception(
        "one summary too few",
        slip(_walk, "one too few"),
        "The query that reads the last token of summary 0 sees one summary. Your quotient is 0 "
        "there. What does it count: summaries, or strides behind the first one?",
    ),
    Misconception(
        "seeing a summary as soon as it begins",
        slip(_walk, "begun"),
        "Its last tokens are the query's future. When may it be seen (chapter 06)?",
    ),
    Misconception(
        "summaries that do not overlap",
        slip(_walk, "apart"),
        "A new summary begins every `stride` tokens, though each is `length` long. How many have "
        "ended?",
    ),
    Misconception(
        "counting a summary after `stride` tokens",
        slip(_walk, "pieces"),
        "`(t + 1) // stride` counts pieces of `stride` tokens. The first summary has `length` "
        "tokens. How many pieces is that?",
    ),
    Misconception(
        "a negative number of summaries",
        slip(_walk, "negative"),
        "Early queries see none. What does your quotient say for `t = 0`?",
    ),
    Misconception(
        "unmasked up to what the last query sees",
        slip(_walk, "whole by last"),
        "A step without a mask shows all its summaries to all queries of the tile. Which query "
        "sees the fewest?",
    ),
    Misconception(
        "rounding the unmasked steps up",
        slip(_walk, "whole up"),
        "A step that the first query sees in part needs a mask. How many steps does it see as a "
        "whole?",
    ),
    Misconception(
        "stopping where the first query does",
        slip(_walk, "steps by first"),
        "Later queries of the tile see more. For which of them does the walk end?",
    ),
    Misconception(
        "rounding the steps down",
        slip(_walk, "steps down"),
        "The last step may have fewer summaries than `BT`. They count, too.",
    ),
    Misconception(
        "one step more than the quotient",
        slip(_walk, "always one more"),
        "Where the last query sees a multiple of `BT`, the last step of yours is empty. Which "
        "quotient rounds up, and adds nothing to what needs no rounding?",
    ),
    Misconception(
        "a fraction of a step",
        slip(_walk, "fractions"),
        "`/` gives fractions. Which of the two numbers should be rounded down, and which up?",
    ),
    Misconception(
        "a fraction of a step",
        slip(_walk, "whole fraction"),
        "`/` gives fractions. Which division counts whole steps?",
    ),
    Misconception(
        "the first query behind the tile",
        slip(_walk, "past the tile"),
        "The tile has the queries `first` to …? It has `BQ` of them.",
    ),
    Misconception(
        "counting summaries where steps are asked for",
        slip(_walk, "summaries"),
        "A step takes `BT` summaries. How many steps are these?",
    ),
    Misconception(
        "the masked steps in place of all",
        slip(_walk, "masked alone"),
        "The second number counts all steps of the walk, masked or not.",
    ),
    Misconception(
        "the two numbers in the other order",
        slip(_walk, "swapped"),
        "The steps without a mask come first, then all steps. Can the first number be the larger?",
    ),
    Misconception(
        "one number in place of two",
        slip(_walk, "steps alone"),
        "That is where the walk ends. Return a pair: how many of these steps need no mask?",
    ),
    Misconception(
        "one number in place of two",
        slip(_walk, "whole alone"),
        "These are the steps without a mask. Return a pair: how many steps are there in all?",
    ),
)

_WALK_SLIPS = frozenset().union(*(m.wrong.slips for m in _WALK_MISTAKES))

_WALK = TEXTS.exercise(
    "walk",
    minutes=5,
    difficulty=2,
    solution=walk,
    misconceptions=_WALK_MISTAKES,
    combine=together(
        _WALK_MISTAKES,
        {"begun", "apart", "pieces", "late"},
        {"begun", "apart", "pieces", "one too few"},
        *({"negative", other} for other in ("begun", "apart", "pieces", "one too few")),
        *({"steps alone", other} for other in ("whole alone", "masked alone", "summaries")),
        *({"steps alone", other} for other in ("whole by last", "whole up", "whole fraction")),
        *({"whole alone", other} for other in ("masked alone", "summaries", "steps by first")),
        *({"whole alone", other} for other in ("steps down", "always one more")),
        {"steps alone", "fractions"},
        {"whole alone", "fractions"},
        {"whole by last", "steps by first"},
        *({"summaries", other} for other in ("whole up", "steps down", "masked alone")),
        {"fractions", "whole fraction", "summaries", "whole up"},
        {"always one more", "steps down", "fractions", "summaries"},
        {"masked alone", "fractions"},
        *({"swapped", other} for other in _WALK_SLIPS - {"swapped"}),
    ),
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
)


# -- merge_lists --


def merge_lists(a: list[int], b: list[int]) -> list[int]:
    """The best n of two lists of n numbers, all three with the largest first."""
    best = [max(x, y) for x, y in zip(a, reversed(b), strict=True)]
    return sorted(best, reverse=True)


def _merge(slips: Slips, a: list[int], b: list[int]) -> list[int]:
    """`merge_lists` with slips."""
    n = len(a)
    if "one list" in slips:
        best = list(a)
    elif "halves" in slips:
        best = sorted(a[: (n + 1) // 2] + b[: n // 2], reverse=True)
    elif "in turn" in slips:
        best = [x for pair in zip(a, b, strict=True) for x in pair][:n]
    elif "same place" in slips:
        best = [max(x, y) for x, y in zip(a, b, strict=True)]
    elif "smaller" in slips:
        best = sorted(map(min, a, reversed(b)), reverse=True)
    elif "unsettled" in slips:
        best = [max(x, y) for x, y in zip(a, reversed(b), strict=True)]
    else:
        both = set(a) | set(b) if "set" in slips else a + b
        both = sorted(both, reverse="smallest" not in slips)
        best = both if "all" in slips else both[:n]
    if "no empties" in slips:
        best = [x for x in best if x >= 0]
    return best[::-1] if "ascending" in slips else best


_MERGE_MISTAKES = (
    Misconception(
        "comparing what stands at the same place",
        slip(_merge, "same place"),
        "The second of `a` may be better than the first of `b`, and still lose against its own "
        "neighbour. Which number of `b` should the best of `a` meet?",
    ),
    Misconception(
        "keeping the smaller of each pair",
        slip(_merge, "smaller"),
        "The pairs are right. One of each pair has to leave. Which one?",
    ),
    Misconception(
        "leaving the best in the order in which they met",
        slip(_merge, "unsettled"),
        "These are the right numbers. The next merge expects them with the largest first.",
    ),
    Misconception(
        "half of each list",
        slip(_merge, "halves"),
        "All of the best may stand in one list. What do you have if the step brought nothing new?",
    ),
    Misconception(
        "taking the lists in turn",
        slip(_merge, "in turn"),
        "That is the order of a zip. Which number may come next in a merge?",
    ),
    Misconception(
        "keeping the old list",
        slip(_merge, "one list"),
        "What has the new list brought?",
    ),
    Misconception(
        "keeping all of both",
        slip(_merge, "all"),
        "The list has `n` places in every step. Who leaves?",
    ),
    Misconception(
        "dropping numbers that occur twice",
        slip(_merge, "set"),
        "A set keeps one of each. How many empty places, -1, does a young list have?",
    ),
    Misconception(
        "dropping the empty places",
        slip(_merge, "no empties"),
        "A list has `n` places, and -1 stands in those that are empty. A tile cannot be shorter.",
    ),
    Misconception(
        "the smallest numbers",
        slip(_merge, "smallest"),
        "Which end of the sorted numbers is the best one?",
    ),
    Misconception(
        "the largest last",
        slip(_merge, "ascending"),
        "Both lists come with the largest first. So should yours, for the next merge.",
    ),
)

_WAYS_TO_MERGE = ("same place", "smaller", "unsettled", "halves", "in turn", "one list")

_MERGE = TEXTS.exercise(
    "merge_lists",
    minutes=5,
    difficulty=2,
    solution=merge_lists,
    misconceptions=_MERGE_MISTAKES,
    combine=together(
        _MERGE_MISTAKES,
        {*_WAYS_TO_MERGE, "all", "set", "smallest"},
        {"smallest", "ascending"},
        {"unsettled", "ascending"},
        {"set", "no empties"},
        {"one list", "no empties"},
    ),
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
)


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


def _running(
    slips: Slips, steps: list[list[float]], own: int, n: int, num_initial: int, num_local: int
) -> list[int]:
    """`running_list` with slips."""
    best, kept, block = [], [], 0
    sign = 1 if "higher ids" in slips else -1
    initial = num_initial + ("one more initial" in slips)
    local = num_local + ("one more" in slips)
    forced: set[int] = set()
    if "before" in slips:
        negative = range(own - num_local + 1, 0)
        if slips & {"on top", "beside"}:
            forced |= set(negative)
        else:
            best = [(math.inf, sign * b) for b in negative]
    for number, step in enumerate(steps):
        fresh = []
        if "this length" in slips:
            block = number * len(step)
        for place, score in enumerate(step):
            is_initial = (place if slips & {"by place", "all by place"} else block) < initial
            is_local = block > own - local and not ("own left out" in slips and block == own)
            if slips & {"local by place", "all by place"}:
                is_local = place > own - local
            if "own alone" in slips:
                is_local = block == own
            if "end of step" in slips:
                is_local = place >= len(step) - local
            is_forced = (is_initial and "no initial" not in slips) or (
                is_local and "no local" not in slips
            )
            if is_forced and block <= own and "on top" in slips:
                forced.add(block)
            if is_forced and not slips & {"own score", "on top"}:
                score = math.inf
            if "beside" in slips and is_forced:
                forced |= {block} if block <= own else set()
            elif block <= own - ("own out" in slips) or "future" in slips:
                fresh.append((score, sign * block))
            elif "minus one" in slips:
                fresh.append((-1, -sign))
            block += 1
        if ("last step" in slips and fresh) or "this step" in slips:
            best = []
        best = sorted(best + fresh, reverse="worst" not in slips)
        best = best if "uncut" in slips else best[:n]
        kept += sorted(fresh, reverse=True)[:n]
    if "each step" in slips:
        best = kept
    if "scores" in slips:
        return [score for score, _ in best]
    if "scores ascending" in slips:
        return sorted(score for score, _ in best)
    if "negated" in slips:
        return sorted(entry for _, entry in best)
    if "minus one" in slips:
        return sorted(sign * entry for _, entry in best)
    if "pairs" in slips:
        return best
    if "pairs of ids" in slips:
        return [(score, -entry) for score, entry in best]
    if "pairs of losses" in slips:
        return [(-score, -entry) for score, entry in best]
    ids = list(dict.fromkeys([sign * entry for _, entry in best] + sorted(forced)))
    return ids if "by score" in slips else sorted(ids)


_RUNNING_MISTAKES = (
    *(
        Misconception(
            "forcing by the place within the step",
            slip(_running, name),
            "The local blocks end at `own`, which is a number in the text. A place counts from the "
            "start of a step. How do you know which block a score belongs to?",
        )
        for name in ("local by place", "all by place", "end of step")
    ),
    Misconception(
        "forcing by the place within the step",
        slip(_running, "by place"),
        "Every step has a place 0, but only one block of the text is the first. How do you know "
        "which block a score belongs to?",
    ),
    Misconception(
        "numbering blocks by the length of their own step",
        slip(_running, "this length"),
        "The last step may be shorter than those before. How many blocks came before it?",
    ),
    Misconception(
        "forced blocks that keep their own score",
        slip(_running, "own score"),
        "A forced block is on the list whatever it scores. Which score never loses?",
    ),
    Misconception(
        "forced blocks on top of n others",
        slip(_running, "beside"),
        "The list has `n` places, the forced blocks included. Who has to leave?",
    ),
    Misconception(
        "forced blocks on top of n others",
        slip(_running, "on top"),
        "The list has `n` places, the forced blocks included. Who has to leave?",
    ),
    Misconception(
        "a forced block before the text",
        slip(_running, "before"),
        "Query 0 has one block, not two. Where does `own - num_local` lead near the beginning?",
    ),
    Misconception(
        "-1 in the place of the future",
        slip(_running, "minus one"),
        "A -1 takes a place in your list, and the list asks for none. What should happen to a "
        "block after `own`?",
    ),
    Misconception(
        "a list that is never cut",
        slip(_running, "uncut"),
        "Every block of the past is still there. How many may stay after each step?",
    ),
    *(
        Misconception(
            "pairs in place of ids",
            slip(_running, name),
            "Your list holds pairs. Which half of a pair names the block?",
        )
        for name in ("pairs", "pairs of ids", "pairs of losses")
    ),
    Misconception(
        "taking blocks of the future",
        slip(_running, "future"),
        "The step that holds the own block may go on behind it. What may the query see of that?",
    ),
    Misconception(
        "forgetting the list at every step",
        slip(_running, "this step"),
        "What the steps before found is gone. What has to outlive a step?",
    ),
    Misconception(
        "forgetting the list at every step",
        slip(_running, "last step"),
        "What the steps before found is gone. What has to outlive a step?",
    ),
    Misconception(
        "the best n of every step",
        slip(_running, "each step"),
        "That is a list that grows. Merge it with the old one, and keep `n`.",
    ),
    Misconception(
        "the higher id of equal scores",
        slip(_running, "higher ids"),
        "Ties go to the lower id. Which of two equal pairs does your sort put first?",
    ),
    Misconception(
        "the best first in place of ascending ids",
        slip(_running, "by score"),
        "The list is ascending (chapter 05). By what did you sort last?",
    ),
    *(
        Misconception(
            "scores in place of their blocks",
            slip(_running, name),
            "The list names blocks. What has to travel with each score, so that you can say where "
            "it came from?",
        )
        for name in ("scores", "scores ascending")
    ),
    Misconception(
        "one local block too many",
        slip(_running, "one more"),
        "`num_local` counts the own block. With 1, which blocks are forced?",
    ),
    Misconception(
        "keeping the worst of each step",
        slip(_running, "worst"),
        "`sorted` puts the smallest pair first. Which end of the sorted pairs is cut off?",
    ),
    Misconception(
        "negated ids",
        slip(_running, "negated"),
        "A sign helps where pairs are sorted, so that the lower id wins. Which ids does the list "
        "name?",
    ),
    Misconception(
        "leaving the own block out",
        slip(_running, "own out"),
        "A query takes its own block in any case. Which comparison of `block` with `own` lets that "
        "block in?",
    ),
    Misconception(
        "forcing the own block alone",
        slip(_running, "own alone"),
        "`num_local` counts the own block and those before it. With 2, which other block is "
        "forced?",
    ),
    Misconception(
        "one initial block too many",
        slip(_running, "one more initial"),
        "`num_initial` is a number of blocks, and the first block is 0. With 1, which blocks are "
        "forced?",
    ),
    Misconception(
        "leaving the own block to chance",
        slip(_running, "own left out"),
        "The own block is the last of the local ones. Its summaries have hardly ended, so its "
        "score says little.",
    ),
    Misconception(
        "forcing no initial block",
        slip(_running, "no initial"),
        "Which blocks does `num_initial` name?",
    ),
    Misconception(
        "forcing no local block",
        slip(_running, "no local"),
        "Which blocks does `num_local` name?",
    ),
)

_PLACES = ("local by place", "all by place", "end of step")
_NOT_WITH_PLACES = {
    *_PLACES, "by place", "own score", "no local", "one more", "own left out", "no initial",
}  # fmt: skip
_SCORES = ("scores", "scores ascending")
_ALONE = ("minus one", "uncut", "pairs", "pairs of ids", "pairs of losses")
_RUNNING_SLIPS = frozenset().union(*(m.wrong.slips for m in _RUNNING_MISTAKES))

_RUNNING = TEXTS.exercise(
    "running_list",
    minutes=8,
    difficulty=2,
    solution=running_list,
    misconceptions=_RUNNING_MISTAKES,
    combine=together(
        _RUNNING_MISTAKES,
        {"own score", "on top"},
        *({"own score", other} for other in ("by place", "one more", "own left out")),
        {"own score", "no initial", "no local"},
        {"by place", "no initial"},
        {"no local", "one more", "own left out"},
        {"last step", "each step"},
        *({name, other} for name in _PLACES for other in _NOT_WITH_PLACES - {name}),
        *({"before", other} for other in _RUNNING_SLIPS - {"before", "on top", "beside"}),
        *({"beside", other} for other in _RUNNING_SLIPS - {"beside", "before"}),
        *({"this step", other} for other in _RUNNING_SLIPS - {"this step"}),
        *(
            {name, other}
            for name in ("own out", "own alone", "one more initial", "worst", "negated", *_ALONE)
            for other in _RUNNING_SLIPS - {name}
        ),
        *({name, other} for name in _SCORES for other in _RUNNING_SLIPS - {name}),
    ),
    cases=(
        Case("the best two of one step", lambda: ([[1.0, 3.0, 2.0]], 2, 2, 0, 1)),
        Case("the own block is the worst", lambda: ([[3.0, 4.0, 1.0]], 2, 2, 0, 1)),
        Case("the first query, two local blocks", lambda: ([[4.0, 1.0]], 0, 2, 0, 2)),
        Case("two steps, none forced at the start", lambda: ([[5.0, 1.0], [4.0, 0.5]], 3, 2, 0, 1)),
        Case("the first block is forced", lambda: ([[0.1, 7.0], [8.0, 9.0]], 3, 3, 1, 1)),
        Case(
            "the step goes on behind the own block", lambda: ([[3.0, 2.0], [1.0, 9.0]], 2, 2, 0, 1)
        ),
        Case("three steps", lambda: ([[6.0, 2.0], [1.0, 7.0], [3.0, 0.5]], 5, 3, 1, 1)),
        Case("two local blocks", lambda: ([[6.0, 8.0], [7.0, 0.2], [0.5, 9.0]], 4, 4, 1, 2)),
        Case("equal scores", lambda: ([[2.0, 5.0, 2.0], [5.0, 5.0, 5.0]], 5, 3, 1, 1)),
        Case("an early query", lambda: ([[4.0, 1.0, 6.0, 2.0]], 1, 4, 1, 2)),
        Case(
            "two initial blocks that are one with the local ones",
            lambda: ([[0.3, 0.2, 0.4], [0.9, 0.8, 0.7]], 2, 3, 2, 2),
        ),
        Case(
            "a short last step",
            lambda: ([[5.0, 1.0, 1.0], [4.0, 9.0, 2.0], [3.0, 8.0]], 7, 3, 1, 1),
        ),
        Case(
            "four steps, two initial blocks",
            lambda: ([[0.1, 0.2], [0.9, 0.7], [0.4, 0.8], [0.6, 0.3]], 7, 5, 2, 1),
        ),
    ),
)


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


def _pack(slips: Slips, scores: Tensor, ids: Tensor, id_bits: int) -> Tensor:
    """`pack` with slips; in int32, where 32 bits are enough."""
    packed = _packed(slips, scores, ids, id_bits)
    return (
        packed.int() if packed.dtype == torch.int64 and (packed == packed.int()).all() else packed
    )


def _packed(slips: Slips, scores: Tensor, ids: Tensor, id_bits: int) -> Tensor:
    width = id_bits - ("one bit less" in slips)
    mask = 2 ^ (width - 1) if "xor" in slips else 2**width - 1
    bits = scores.view(torch.int32).long()
    if "cut numbers" in slips:
        bits = scores.long()
    low = ids.long() if "lower ids" in slips else mask - ids.long()
    if "one too many" in slips:
        low = low + 1
    if "negative" in slips:
        low = -ids.long()
    if "complement" in slips:
        low = ~ids.long()
    if "flipped" in slips:
        low = ids.long().flip(0)
    if "on top" in slips:
        return (low << (31 - width)) | (bits >> width)
    if "shifted" in slips:
        return (bits << width) | low
    if "wrapped" in slips:
        return (bits.int() << width) | low.int()
    if "down" in slips:
        return (bits >> width) | low
    if "down, added" in slips:
        return (bits >> width) + low
    if "borrowed" in slips:
        return (bits & ~mask) - ids.long()
    if "early" in slips:
        return (bits & (~(1 << width) - 1)) | low
    if "dropped" in slips:
        return (bits & mask) | low
    if "added" in slips:
        return bits + low
    if "or" in slips:
        return bits | low
    if "number of bits" in slips:
        return (bits & ~id_bits) | low
    packed = (bits & ~mask) | low
    return packed.int().view(torch.float32) if "float" in slips else packed


_PACK_MISTAKES = (
    Misconception(
        "the id as it is",
        slip(_pack, "lower ids"),
        "Of two equal scores the larger integer wins. Which id should win, and so which number "
        "should stand for it?",
    ),
    Misconception(
        "adding the id to a score that still has its low bits",
        slip(_pack, "added"),
        "The sum may carry into the bits above, and nobody can read the id again. Which bits have "
        "to be 0 first?",
    ),
    Misconception(
        "writing the id over low bits that were not cleared",
        slip(_pack, "or"),
        "`|` keeps every 1 that was there. What do you read back as the id?",
    ),
    Misconception(
        "shifting the score out of 32 bits",
        slip(_pack, "shifted"),
        "A score has 32 bits already, and its exponent stands highest. Shifted up, it leaves an "
        "int32. Which of its bits can you spare?",
    ),
    Misconception(
        "shifting the score out of 32 bits",
        slip(_pack, "wrapped"),
        "A score has 32 bits already. Shifted up in an int32, it loses its highest bits, "
        "which matter most. Which of its bits can you spare?",
    ),
    *(
        Misconception(
            "shifting the score down and not up again",
            slip(_pack, name),
            "After `>> id_bits`, the bits that matter stand at the low end, where the id should "
            "go. How do you bring them back up?",
        )
        for name in ("down", "down, added")
    ),
    Misconception(
        "subtracting the id from the cleared score",
        slip(_pack, "borrowed"),
        "The low bits are 0, so the subtraction borrows from the bits above, and they change. Fill "
        "the low bits with ones first. What is left of them when the id is taken away?",
    ),
    Misconception(
        "`^` where a power is meant",
        slip(_pack, "xor"),
        "In Python, `2 ^ 3` is 1: `^` compares bits, and `-` binds tighter than it. How is a power "
        "written?",
    ),
    Misconception(
        "a complement without parentheses",
        slip(_pack, "early"),
        "`~` binds tighter than `-`: `~(1 << b) - 1` turns the bits over before 1 is subtracted. "
        "What should be turned over?",
    ),
    Misconception(
        "a float in place of an integer",
        slip(_pack, "float"),
        "The bits are right. Return them as the int32 that they were: without a second `view`.",
    ),
    Misconception(
        "the id above the score",
        slip(_pack, "on top"),
        "Integers are compared from their highest bits on. What should decide first?",
    ),
    Misconception(
        "the number without its fraction",
        slip(_pack, "cut numbers"),
        "Scores below 1 all become 0. You want the same bits, read as an integer: `view`.",
    ),
    Misconception(
        "keeping the low bits and clearing the rest",
        slip(_pack, "dropped"),
        "`& mask` keeps what the id needs. Which bits tell how large the score is?",
    ),
    Misconception(
        "the number of bits in place of a mask",
        slip(_pack, "number of bits"),
        "`~id_bits` clears the bits of the number `id_bits`. Which number has `id_bits` ones?",
    ),
    Misconception(
        "one bit too few",
        slip(_pack, "one bit less"),
        "With 2 bits there are the ids 0 to 3. What is the largest number of `id_bits` bits?",
    ),
    Misconception(
        "a low part that starts at 1",
        slip(_pack, "one too many"),
        "Id 0 then needs one bit more than there is. What is the largest that fits?",
    ),
    Misconception(
        "a complement of all 32 bits",
        slip(_pack, "complement"),
        "`~ids` sets the high bits too, and `|` takes them over. How do you keep its low `id_bits` "
        "bits alone?",
    ),
    Misconception(
        "the ids in the reverse order",
        slip(_pack, "flipped"),
        "`flip` gives each score the id of another block. Which number should stand for a block's "
        "own id, so that the lower id is the larger number?",
    ),
    Misconception(
        "a negative id",
        slip(_pack, "negative"),
        "A negative integer has its high bits set, and `|` takes them over. What can you subtract "
        "the id from?",
    ),
)

_LOW = ("lower ids", "one too many", "negative", "one bit less", "xor", "cut numbers")

_HOW = (
    "on top", "shifted", "wrapped", "down", "down, added", "borrowed", "early", "dropped",
    "added", "or", "number of bits", "float",
)  # fmt: skip

_PACK = TEXTS.exercise(
    "pack",
    minutes=5,
    difficulty=2,
    solution=pack,
    run=_run_pack,
    tolerance=1e-12,
    misconceptions=_PACK_MISTAKES,
    combine=together(
        _PACK_MISTAKES,
        set(_HOW),
        {"lower ids", "negative"},
        {"lower ids", "one bit less"},
        {"negative", "one too many"},
        {"negative", "one bit less"},
        {"negative", "on top"},
        {"borrowed", "lower ids", "negative", "one too many"},
        *({"xor", other} for other in (*_HOW, "negative", "one too many", "one bit less")),
        *({"float", other} for other in ("negative", "one too many", "lower ids")),
        {"wrapped", "cut numbers"},
        {"float", "cut numbers"},
        *({"complement", other} for other in (*_HOW, *_LOW, "flipped")),
        *({"flipped", other} for other in (*_HOW, *_LOW)),
    ),
    cases=(
        Case("two equal scores", lambda: (torch.tensor([1.0, 1.0]), _ids(0, 1), 1)),
        Case("four ids", lambda: (torch.tensor([0.5, 0.5, 2.0, 0.0]), _ids(0, 1, 2, 3), 2)),
        Case("scores with low bits", lambda: (torch.tensor([0.1, 0.7, 0.3]), _ids(2, 0, 1), 2)),
        Case("ids of 10 bits", lambda: (torch.tensor([0.1, 3.3, 1e-3]), _ids(1023, 500, 0), 10)),
        Case("nearly equal", lambda: (torch.tensor([0.3, 0.30001, 0.29999]), _ids(5, 9, 2), 10)),
    ),
)


def _ids(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


# -- pick --


def pick(bits: Tensor, n: int) -> list[int]:
    """The n blocks of the largest bits, ascending, then -1; found by counting alone."""
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


_TOO_FEW = (30, 29, 28, 24, 23, 20, 16, 10)  # questions


def _end_below(values: list[int], n: int) -> int:
    """Where a search ends that moves `high` one below the middle."""
    low, high = 0, 2**31
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = sum(x >= middle for x in values) >= n
        low, high = (middle, high) if is_enough else (low, middle - 1)
    return low


_EARLY = {"early, middle", "early, low", "early, low, frame"}


def _early_end(values: list[int], n: int) -> tuple[int, int]:
    """`low` and `middle` of a search that stops where a count equals `n`, and moves no end then."""
    low, high = 0, 2**31
    while high - low > 1:
        middle = (low + high) // 2
        count = sum(x >= middle for x in values)
        if count == n:
            break
        low, high = (middle, high) if count > n else (low, middle)
    return low, middle


def _pick(slips: Slips, bits: Tensor, n: int) -> list[int]:
    """`pick` with slips."""
    values = bits.tolist()
    if "endless" in slips and sum(x >= 0 for x in values) >= n:
        raise StillAsking
    if "no count" in slips:
        bool((bits >= 1) >= n)
    is_wrong_end = bool(slips & {"wrong end", "wrong end, short"})
    if is_wrong_end and sum(x >= 2**30 for x in values) < n:
        return [-1] * n if "wrong end" in slips else []
    if "distinct" in slips:
        ranked = sorted(set(values), reverse=True)
    else:
        ranked = sorted(values, reverse=True)
    position = n - 1 + ("one more" in slips)
    least = ranked[position] if position < len(ranked) else -1
    low = least if "hidden" in slips else max(least, 0)
    if "end below" in slips:
        low = _end_below(values, n)
    if slips & _EARLY:
        low = _early_end(values, n)["early, middle" in slips]
    if is_wrong_end:
        low = 0
    if slips & {"narrow", "narrow, n of them"}:
        low = min(low, 2**16 - 1)
    if slips & {"up to 2.0", "up to 2.0, n of them"}:
        low = min(low, 2**30 - 1)
    if "to the largest" in slips:
        low = min(low, max(max(values) - 1, 0))
    for asked in _TOO_FEW:
        if f"{asked} questions" in slips:
            low -= low % 2 ** (31 - asked)
    above = [i for i, x in enumerate(values) if x > low]
    equal = [i for i, x in enumerate(values) if x == low]
    if "zeros" in slips and low == 0:
        equal = []
    if "higher ids" in slips:
        equal = equal[::-1]
    if "twice" in slips:
        equal = [i for i, x in enumerate(values) if x >= low]
    if "early, low, frame" in slips:
        equal = equal[: n - len(above)]  # from the end, where too many lie above
    elif not slips & ({"all equal", "distinct", "one more"} | _EARLY):
        equal = equal[: max(n - len(above), 0)]
    ids = above if "above" in slips else above + equal
    if "cut together" in slips:
        ids = [i for i, x in enumerate(values) if x >= low][:n]
    if "cut in front" in slips:
        ids = [i for i, x in enumerate(values) if x >= low][-n:]
    if "unsorted" not in slips:
        ids = sorted(ids)
    if slips & {"narrow, n of them", "up to 2.0, n of them"}:
        ids = ids[:n]
    if "numbers" in slips:
        return [values[i] for i in ids] + [-1] * (n - len(ids))
    if "padding first" in slips:
        return [-1] * (n - len(ids)) + ids
    padding = 0 if "padding of 0" in slips else -1
    return ids if slips & {"short", "wrong end, short"} else ids + [padding] * (n - len(ids))


_PICK_MISTAKES = (
    Misconception(
        "cutting off the last of all that reach the threshold",
        slip(_pick, "cut together"),
        "Here a larger block stands behind equal ones, and yours cuts it off. Who is sure of a "
        "place, and who shares the rest?",
    ),
    Misconception(
        "cutting off the first of all that reach the threshold",
        slip(_pick, "cut in front"),
        "Your cut drops the lowest ids, and a larger block may be among them. Who is sure of a "
        "place, and who shares the rest?",
    ),
    Misconception(
        "an upper end below the middle",
        slip(_pick, "end below"),
        "Fewer than `n` blocks reach `high`: the loop keeps this promise. Do you know it of "
        "`middle - 1`, which you never asked about?",
    ),
    Misconception(
        "stopping early, with `middle` as the threshold",
        slip(_pick, "early, middle"),
        "You stop when a count equals `n`. With equal bits, no count may ever equal it. What is "
        "`middle` then? Use `low`.",
    ),
    *(
        Misconception(
            "stopping early, with `low` left behind",
            slip(_pick, name),
            "You stop when `n` blocks reach the middle. More blocks reach `low`, which is older. "
            "What has to move before you stop?",
        )
        for name in ("early, low", "early, low, frame")
    ),
    Misconception(
        "taking a block twice",
        slip(_pick, "twice"),
        "`bits >= low` holds for the blocks above `low` as well, and they have their places. Which "
        "comparison finds the ties alone?",
    ),
    Misconception(
        "zeros in the empty places",
        slip(_pick, "padding of 0"),
        "0 is the id of the first block. Which number marks an empty place?",
    ),
    Misconception(
        "ends that stop moving when they are neighbours",
        slip(_pick, "endless"),
        "Between neighbours, the middle is `low` itself, and `low = middle` moves nothing. Your "
        "search would never end. When is it over?",
    ),
    *(
        Misconception(
            "one question too few" if asked == 30 else "too few questions",
            slip(_pick, f"{asked} questions"),
            f"Your range still holds {'two' if asked == 30 else 'many'} numbers. How often must "
            "`2**31` be halved until one is left?",
        )
        for asked in _TOO_FEW
    ),
    *(
        Misconception(
            "a range that ends too low",
            slip(_pick, name),
            "2.0 has the bits `2**30`, and scores can be larger. Where must `high` begin, so that "
            "none reaches it?",
        )
        for name in ("narrow, n of them", "up to 2.0, n of them", "up to 2.0")
    ),
    Misconception(
        "a range that ends too low",
        slip(_pick, "narrow"),
        "The bits of 0.3 are about a billion. Where must `high` begin, so that none reaches it?",
    ),
    Misconception(
        "a range that ends at the largest bits",
        slip(_pick, "to the largest"),
        "Fewer than `n` blocks may reach `high`. Some block reaches the largest bits, perhaps "
        "several do. Where must `high` begin?",
    ),
    *(
        Misconception(
            "moving the wrong end",
            slip(_pick, name),
            "Your range runs to one of its ends. If at least `n` blocks reach the middle, is the "
            "n-th best below it, or not?",
        )
        for name in ("wrong end", "wrong end, short")
    ),
    Misconception(
        "one answer a block in place of a count",
        slip(_pick, "no count"),
        "`bits >= middle` says yes or no for each block. How do you make one number of it?",
    ),
    Misconception(
        "taking all that equal the last",
        slip(_pick, "all equal"),
        "Several blocks may share the last place's bits, and only some of them fit. How many "
        "places are left behind those above?",
    ),
    Misconception(
        "taking only what lies above",
        slip(_pick, "above"),
        "`low` is the bits of the n-th block itself. Is that one taken?",
    ),
    Misconception(
        "the higher ids of what is equal",
        slip(_pick, "higher ids"),
        "Of equal bits the lower ids win. Which of them do you cut off?",
    ),
    Misconception(
        "taking hidden blocks where too few are visible",
        slip(_pick, "hidden"),
        "A hidden block has -1. How low may your range begin?",
    ),
    Misconception(
        "leaving out blocks with score 0",
        slip(_pick, "zeros"),
        "The bits of 0.0 are 0, and such a block is visible. Only -1 is hidden.",
    ),
    Misconception(
        "counting equal bits once",
        slip(_pick, "distinct"),
        "Two blocks with the same bits take two places. What does your count count?",
    ),
    Misconception(
        "stopping one block too low",
        slip(_pick, "one more"),
        "Your threshold lets n + 1 blocks in. When is a count large enough: at `n`, or above it?",
    ),
    Misconception(
        "those above first, then the equal ones",
        slip(_pick, "unsorted"),
        "The list is ascending. Put the ids in order when you have them all.",
    ),
    Misconception(
        "the bits in place of their blocks",
        slip(_pick, "numbers"),
        "The list names blocks. Where do these bits stand?",
    ),
    Misconception(
        "sorting -1 with the ids",
        slip(_pick, "padding first"),
        "-1 is smaller than every id, and marks the places that are left at the end. What is put "
        "in order, and what comes behind it?",
    ),
    Misconception(
        "a short list without -1",
        slip(_pick, "short"),
        "Every list has `n` places. What stands in those that no block takes?",
    ),
)

_SLIPS_OF_A_LIST = tuple(
    name
    for m in _PICK_MISTAKES
    for name in m.wrong.slips
    if name not in ("endless", "no count", "wrong end")
)

_ENDS = ("narrow", "up to 2.0", "to the largest", "narrow, n of them", "up to 2.0, n of them")
_FEW = tuple(f"{asked} questions" for asked in _TOO_FEW)
_LISTS_ALONE = set(_SLIPS_OF_A_LIST) - {"cut together"}
_PICKS_ALONE = (
    "end below", "twice", "padding of 0", "wrong end, short", *_EARLY,
)  # fmt: skip
_PICK_SLIPS = frozenset().union(*(m.wrong.slips for m in _PICK_MISTAKES))

_PICK = TEXTS.exercise(
    "pick",
    minutes=10,
    difficulty=2,
    solution=pick,
    misconceptions=_PICK_MISTAKES,
    combine=together(
        _PICK_MISTAKES,
        {"all equal", "above", "zeros"},
        {"all equal", "higher ids"},
        {"above", "higher ids"},
        {"above", "unsorted"},
        {"above", "hidden"},
        {"distinct", "all equal", "one more"},
        {"higher ids", "distinct"},
        {"higher ids", "one more"},
        {"numbers", "unsorted"},
        {"hidden", "zeros"},
        *({"padding first", other} for other in ("short", "numbers", "hidden", "unsorted")),
        *({"endless", other} for other in _SLIPS_OF_A_LIST),
        *({"no count", other} for other in (*_SLIPS_OF_A_LIST, "endless")),
        *({"wrong end", other} for other in (*_SLIPS_OF_A_LIST, "endless", "no count")),
        *({"cut together", other} for other in ("all equal", "above", "higher ids", "distinct")),
        *({"cut together", other} for other in ("one more", "unsorted", "zeros", "hidden")),
        *({end, other} for end in _ENDS for other in (*_ENDS, *_FEW) if end != other),
        *({end, other} for end in _ENDS[1:] for other in _LISTS_ALONE - {end}),
        *({few, other} for few in _FEW[1:] for other in _LISTS_ALONE - {few}),
        *({name, other} for name in _PICKS_ALONE for other in _PICK_SLIPS - {name}),
        *({"cut in front", other} for other in _PICK_SLIPS - {"cut in front", "short"}),
    ),
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
)


def _bits(*scores: float) -> Tensor:
    return _watched(*torch.tensor(scores).view(torch.int32).tolist())


EXERCISES = (_MASS, _PICK, _RUNNING, _WALK, _MERGE, _PACK)


# -- two slips at once, written as readers write them --


def _late_and_leaking(first: int, BQ: int, BT: int, length: int, stride: int) -> tuple[int, int]:
    last = first + BQ - 1
    visible = max(0, (last - length) // stride + 1)
    return visible // BT, math.ceil(visible / BT)


def _all_and_rising(a: list[int], b: list[int]) -> list[int]:
    return sorted(a + b)


def _cut_by_place(
    steps: list[list[float]], own: int, n: int, num_initial: int, num_local: int
) -> list[int]:
    best, block = [], 0
    for step in steps:
        for place in range(len(step)):
            is_forced = place < num_initial or block > own - num_local
            if block <= own:
                best.append((-math.inf if is_forced else -step[place], block))
            block += 1
        best = sorted(best)[:n]
    return [block for _, block in best]


def _added_and_rising(scores: Tensor, ids: Tensor, id_bits: int) -> Tensor:
    return scores.view(torch.int32) + ids


def _every_equal_and_short(bits: Tensor, n: int) -> list[int]:
    visible = bits[bits >= 0]
    least = visible.sort(descending=True).values[:n][-1]
    return (bits >= least).nonzero().flatten().tolist()


DOUBLES = (
    Double(
        "walk",
        _late_and_leaking,
        ("a summary that is seen one token late", "unmasked up to what the last query sees"),
    ),
    Double(
        "merge_lists",
        _all_and_rising,
        ("keeping all of both", "the largest last"),
    ),
    Double(
        "running_list",
        _cut_by_place,
        ("forcing by the place within the step", "the best first in place of ascending ids"),
    ),
    Double(
        "pack",
        _added_and_rising,
        ("the id as it is", "adding the id to a score that still has its low bits"),
    ),
    Double(
        "pick",
        _every_equal_and_short,
        ("taking all that equal the last", "a short list without -1"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    scores_again={"unit": "ms", "tolerance": 0.15},
    choice_ms={"unit": "ms", "tolerance": 0.05},
    tiles_that_merge={"unit": "%", "tolerance": 0.05},
)
