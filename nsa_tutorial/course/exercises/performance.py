"""Exercises of chapter 16: what is wrong with five benchmarks, the bytes of three orders, and the
order for six shapes. Then TFLOP/s and what dense FLOPs make of them, the union of neighbours'
lists, and one step of its walk as a kernel.

The wrong solutions of an exercise are one function, or one kernel, told which slips to make.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]


# -- questions whose answers are words --


STRANGE, OPEN = "none of the words", "no answer yet"  # for a letter, in place of a word


def _heard(written: object, words: tuple[str, ...]) -> str:
    """The word that is meant, whatever its capitals; `STRANGE` or `OPEN` where there is none."""
    if written is ... or written is None or written in ("", OPEN):
        return OPEN
    plain = " ".join(re.split(r"[\s_-]+", str(written).strip().lower()))
    return next((word for word in words if word.lower() == plain), STRANGE)


def _said(words: tuple[str, ...], ours: Callable) -> Callable:
    """What `Exercise.run` asks for: the word that a solution has for one letter.

    A verdict tells two mistakes. So from the third wrong letter on, the answers count as right
    until the first two are mended.
    """

    def run(solution: Callable, letter: str) -> str:
        answers = solution()
        if not isinstance(answers, Mapping):
            kind = type(answers).__name__
            raise TypeError(f"expected a dictionary from letters to words, got {kind}")
        right = ours()
        heard = {x: _heard(answers.get(x, ...), words) for x in right}
        if set(heard.values()) == {OPEN}:
            raise NotImplementedError("there is no answer yet")
        told = [x for x in right if heard[x] != right[x]][:2]
        return heard[letter] if letter in told else right[letter]

    return run


def _no_words(answers: Callable, ours: Callable, words: tuple[str, ...]) -> tuple:
    """Two more mistakes for each letter: a word that is not among the words, and none at all."""
    strange = f"The words are: {', '.join(words)}."
    return tuple(
        Misconception(name, slip(answers, f"{x}: {word}"), hint)
        for x in ours()
        for name, word, hint in (
            (f"a word for {x} that is none of ours", STRANGE, strange),
            (f"nothing yet for {x}", OPEN, "Which word would you take, if you had to bet?"),
        )
    )


def _words(ours: Callable) -> Callable:
    """A dictionary of answers with slips, each of the form `letter: word`."""

    def answers(slips: Slips) -> dict[str, str]:
        return ours() | dict(s.split(": ") for s in slips)

    return answers


def _letters(what: str, letters: str) -> tuple[Case, ...]:
    return tuple(Case(f"{what} {x}", lambda x=x: (x,)) for x in letters)


# -- what_is_wrong --

WORDS = ("first call", "no wait", "warm cache", "two sessions", "dense FLOPs")


def what_is_wrong() -> dict[str, str]:
    """What is wrong with each benchmark, in one of the five words."""
    return {
        "A": "warm cache",
        "B": "dense FLOPs",
        "C": "first call",
        "D": "two sessions",
        "E": "no wait",
    }


_HINTS_WRONG = {
    "A": "It waits, its first call is not counted, and it takes a median. `x` is 20 MiB, and L2 "
    "holds 50. Where is `x` in the second call?",
    "B": "`do_bench` times it well. What is counted in the last line, and does the kernel do it?",
    "C": "It waits. How many calls has it made before? What happens in a call that is the first?",
    "D": "Each time was taken well. Were they taken on the same afternoon?",
    "E": "One call and a `wait()` come before the clock, and every input is new. Has the GPU done "
    "the work when `stop` is read?",
}
_wrong_words = _words(what_is_wrong)
_WRONG_MISTAKES = tuple(
    Misconception(f"“{word}” for {x}", slip(_wrong_words, f"{x}: {word}"), hint)
    for x, hint in _HINTS_WRONG.items()
    for word in WORDS
    if what_is_wrong()[x] != word
) + _no_words(_wrong_words, what_is_wrong, WORDS)

_WRONG = TEXTS.exercise(
    "what_is_wrong",
    minutes=5,
    difficulty=1,
    solution=what_is_wrong,
    run=_said(WORDS, what_is_wrong),
    misconceptions=_WRONG_MISTAKES,
    combine=together(
        _WRONG_MISTAKES,
        *({f"{x}: {word}" for word in (*WORDS, STRANGE, OPEN)} for x in _HINTS_WRONG),
    ),
    cases=_letters("benchmark", "ABCDE"),
    in_words=True,
)


# -- speed --


def speed(N: int, HQ: int, D: int, listed: float, ms: float) -> tuple[float, float]:
    """TFLOP/s of sparse attention, by its own products and by those of dense attention."""
    per_pair = 2 * 2 * D  # scores and values, a multiply and an add each
    done = HQ * N * listed * per_pair
    dense = HQ * N * (N + 1) / 2 * per_pair
    return done / ms / 1e9, dense / ms / 1e9


def _speed(slips: Slips, N: int, HQ: int, D: int, listed: float, ms: float) -> object:
    """`speed` with slips."""
    per_pair = 4 * D
    if "one product" in slips:
        per_pair = 2 * D
    if "twice" in slips:
        per_pair *= 2
    heads_ = 1 if "one head" in slips else HQ
    done = heads_ * (1 if slips & {"one query", "no N"} else N) * listed * per_pair
    seen = N if "square" in slips else N / 2 if "half" in slips else (N + 1) / 2
    dense = heads_ * (1 if "no N" in slips else N) * seen * per_pair
    if "swapped" in slips:
        done, dense = dense, done
    units = {"ms": 1e12, "giga": 1e6, "up": 1e15, "plain": 1e-3, "raw": 1}
    unit = next((units[name] for name in units if name in slips), 1e9)
    numbers = done / ms / unit, dense / ms / unit
    return numbers[0] if "alone" in slips else numbers


_UNITS = ("ms", "giga", "up", "plain", "raw")
_COUNTS = ("one product", "twice", "one query", "no N", "one head")
_ALONE = (
    "returning one number",
    "Two are asked for. What would dense attention's operations make of the same time?",
)

_SPEED_MISTAKES = (
    # a number in place of two comes first, and by itself where more than one thing else is wrong
    *(
        Misconception(_ALONE[0], Wrong(_speed, frozenset({"alone", first, second})), _ALONE[1])
        for first in (*_UNITS, "one product")
        for second in _COUNTS
        if first != second
    ),
    Misconception(
        _ALONE[0],
        Wrong(_speed, frozenset({"alone", "swapped"})),
        "Two are asked for, and this is the second. What does the kernel itself do in this time?",
    ),
    Misconception(_ALONE[0], slip(_speed, "alone"), _ALONE[1]),
    Misconception(
        "counting one product, or no additions",
        slip(_speed, "one product"),
        "A query and a key take two products: `q · k`, and a weight times a value. Each has a "
        "multiply and an add for every number of the width.",
    ),
    Misconception(
        "counting the pairs of the future",
        slip(_speed, "square"),
        "Dense attention is causal here: query `t` sees `t + 1` keys. How many pairs are that?",
    ),
    Misconception(
        "counting everything twice",
        slip(_speed, "twice"),
        "Twice too many. There are two products, and each has a multiply and an add. Which factor "
        "of 2 stands in your count twice?",
    ),
    Misconception(
        "half of the square",
        slip(_speed, "half"),
        "A query sees itself, too. Count the pairs of one query, and of two.",
    ),
    Misconception(
        "milliseconds multiplied where they are to be divided",
        slip(_speed, "up"),
        "A millisecond is 10 to the power -3 seconds. Which way does that move the result?",
    ),
    Misconception(
        "milliseconds taken for seconds",
        slip(_speed, "ms"),
        "TFLOP/s are 10 to the power 12 operations in a *second*. How many ms are that?",
    ),
    Misconception(
        "GFLOP/s",
        slip(_speed, "giga"),
        "Your unit is a thousand times too small. T is 10 to the power 12.",
    ),
    Misconception(
        "operations a second, without the T",
        slip(_speed, "plain"),
        "T is 10 to the power 12. How many TFLOP/s are your operations a second?",
    ),
    Misconception(
        "operations a millisecond",
        slip(_speed, "raw"),
        "Two steps are left: from a millisecond to a second, and from one operation to 10 to the "
        "power 12 of them. Which factors are that?",
    ),
    *(
        Misconception(
            "the keys of one query",
            slip(_speed, slip_),
            "`listed` is what one query reads. How many queries does the kernel have?",
        )
        for slip_ in ("one query", "no N")
    ),
    Misconception(
        "counting one head", slip(_speed, "one head"), "Every query head multiplies. Who is `HQ`?"
    ),
    Misconception(
        "the two numbers the wrong way round",
        slip(_speed, "swapped"),
        "First what the kernel computes itself, then what dense attention would compute.",
    ),
)

_SPEED = TEXTS.exercise(
    "speed",
    minutes=4,
    difficulty=1,
    solution=speed,
    misconceptions=_SPEED_MISTAKES,
    combine=together(
        _SPEED_MISTAKES,
        _UNITS,
        {"square", "half"},
        {"twice", "one product"},
        {"alone", "swapped"},
    ),
    tolerance=1e-9,
    cases=(
        Case("one head", lambda: (300, 1, 100, 100.0, 1.0)),
        Case("ten heads", lambda: (300, 10, 100, 100.0, 1.0)),
        Case("ten heads, twice the time", lambda: (300, 10, 100, 100.0, 2.0)),
        Case("long", lambda: (65_536, 64, 128, 1000.0, 13.0)),
    ),
)


# -- union_of_lists --


def union_of_lists(lists: list[list[int]]) -> tuple[list[int], list[int]]:
    """The blocks of several lists, ascending, and for each one a number whose bits say who lists
    it."""
    ids = sorted({block for own in lists for block in own if block >= 0})
    return ids, [sum(1 << t for t, own in enumerate(lists) if block in own) for block in ids]


def _union(slips: Slips, lists: list[list[int]]) -> object:
    """`union_of_lists` with slips."""
    least = -1 if "empty" in slips else 1 if "block 0" in slips else 0
    ids = list(dict.fromkeys(b for own in lists for b in own if b >= least))
    if "shared" in slips:
        ids = [b for b in ids if all(b in own for own in lists)]
    if "repeated" in slips:
        ids = [b for own in lists for b in own if b in ids]
    if "unsorted" not in slips:
        ids = sorted(ids)
    if "ids" in slips:
        return ids

    def number(block: int) -> object:
        who = [t for t, own in enumerate(lists) if block in own]
        if "count" in slips:
            return len(who)
        if "numbers" in slips:
            return sum(who)
        if "queries" in slips:
            return who
        if "last" in slips:
            return 1 << who[-1]
        if "text" in slips:
            return bin(sum(1 << t for t in who))
        if "reversed" in slips:
            return sum(1 << (len(lists) - 1 - t) for t in who)
        return sum(1 << (t + ("one up" in slips)) for t in who)

    return ids, [number(block) for block in ids]


_UNION_MISTAKES = (
    Misconception(
        "an empty slot taken for a block",
        slip(_union, "empty"),
        "-1 says that a slot is empty. Which block would the tile load for it?",
    ),
    Misconception(
        "block 0 taken for an empty slot",
        slip(_union, "block 0"),
        "Block 0 is a block like any other. Only -1 says that a slot is empty.",
    ),
    Misconception(
        "counting who lists a block",
        slip(_union, "count"),
        "Two of four list it, but which two? The walk has to mask the others.",
    ),
    Misconception(
        "adding up the numbers of the queries",
        slip(_union, "numbers"),
        "Queries 0 and 3 give 3, and so do queries 1 and 2. Which numbers have sums that tell?",
    ),
    Misconception(
        "a list of queries in place of a number",
        slip(_union, "queries"),
        "These are the right queries. Each has a bit: which number do their bits add up to?",
    ),
    Misconception(
        "text in place of a number",
        slip(_union, "text"),
        "`bin` writes a number down as text, to be read. The kernel shifts the number itself.",
    ),
    Misconception(
        "a block as often as it is listed",
        slip(_union, "repeated"),
        "The tile would load such a block twice. What keeps each block once?",
    ),
    Misconception(
        "the last query alone",
        slip(_union, "last"),
        "A later query overwrites the bit of an earlier one. What keeps both?",
    ),
    Misconception(
        "bits from the other end",
        slip(_union, "reversed"),
        "Query 0 has bit 0, which is worth 1. What is the bit of query `t` worth?",
    ),
    Misconception(
        "bits that begin at 1",
        slip(_union, "one up"),
        "Query 0 has bit 0. What is 2 to the power 0?",
    ),
    Misconception(
        "the blocks that all of them list",
        slip(_union, "shared"),
        "That is the intersection. A block that one query lists has to be loaded, too.",
    ),
    Misconception(
        "blocks in the order in which they are met",
        slip(_union, "unsorted"),
        "The right blocks, but they should ascend, whoever lists them first.",
    ),
    Misconception(
        "leaving the bits out",
        slip(_union, "ids"),
        "That is the first half. Return a pair: the blocks, and for each one who lists it.",
    ),
)

_NUMBERS = {"count", "numbers", "queries", "text", "last", "reversed", "one up", "ids"}

_UNION = TEXTS.exercise(
    "union_of_lists",
    minutes=6,
    difficulty=2,
    solution=union_of_lists,
    misconceptions=_UNION_MISTAKES,
    combine=together(
        _UNION_MISTAKES,
        _NUMBERS,
        {"empty", "shared", "block 0", "repeated"},
        *({"shared", x} for x in _NUMBERS),
    ),
    cases=(
        Case("one query", lambda: ([[3]],)),
        Case("two queries that share a block", lambda: ([[0, 2], [2, 3]],)),
        Case("an empty slot", lambda: ([[0, -1], [0, 1]],)),
        Case("three queries", lambda: ([[4, 5], [0, 4], [4, 7]],)),
        Case("four queries", lambda: ([[0, 6, 7], [0, 6, 7], [0, 2, 7], [0, 6, 7]],)),
        Case("no block at all", lambda: ([[-1, -1], [-1, -1]],)),
    ),
)


# -- walk_step --

_WIDE = 8  # entries that a union may have


def walk_step() -> object:
    """The kernel that finds each query's largest score along the union of its tile."""

    @triton.jit
    def kernel(Scores, ListedBy, Count, Max, U, T: tl.constexpr):
        tile = tl.program_id(0)
        t = tl.arange(0, T)  # the queries of the tile, [T]
        scores_max = tl.full([T], float("-inf"), tl.float32)
        for step in range(0, tl.load(Count + tile)):
            listed_by = tl.load(ListedBy + tile * U + step)
            s = tl.load(Scores + (tile * U + step) * T + t)  # [T]
            is_listed = (listed_by >> t) & 1
            s = tl.where(is_listed > 0, s, float("-inf"))
            scores_max = tl.maximum(scores_max, s)
        tl.store(Max + tile * T + t, scores_max)

    return kernel


def _run_walk(solution: Callable, T: int, counts: list[int]) -> Tensor:
    """Launch the kernel; behind the entries that count lie large scores that everybody lists."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("walk_step defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    tiles, g = len(counts), torch.Generator().manual_seed(T + sum(counts))
    scores = torch.randn(tiles, _WIDE, T, generator=g) - 3  # below 0, mostly
    bits = torch.randint(0, 2**T, (tiles, _WIDE), generator=g, dtype=torch.int32)
    bits[:, 0] = 2 ** (T - 1)  # the last query alone
    for tile, count in enumerate(counts):
        scores[tile, count:], bits[tile, count:] = 99.0, 2**T - 1
    found = roomy(torch.full((tiles, T), -77.0), -77.0)
    tensors = (
        roomy(scores, 99.0),
        roomy(bits, 2**T - 1),
        roomy(torch.tensor(counts, dtype=torch.int32), 0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("ignore", "tl.where with a non-boolean condition")
        kernel[tiles,](*tensors, found, _WIDE, T=T)
    return found.cpu()


@triton.jit
def _wrong_walk(Scores, ListedBy, Count, Max, U, T: tl.constexpr, SLIP: tl.constexpr):
    tile = tl.program_id(0)
    t = tl.arange(0, T)
    scores_max = tl.full([T], float("-inf"), tl.float32)
    for step in range(0, tl.load(Count + tile)):
        listed_by = tl.load(ListedBy + tile * U + step)
        s = tl.load(Scores + (tile * U + step) * T + t)
        if SLIP == "and":
            is_listed = listed_by & t
        elif SLIP == "no one":
            is_listed = listed_by >> t
        elif SLIP == "other way":
            is_listed = (t >> listed_by) & 1
        elif SLIP == "equal":
            is_listed = (listed_by == t).to(tl.int32)
        elif SLIP == "one bit up":
            is_listed = (listed_by >> (t + 1)) & 1
        else:
            is_listed = (listed_by >> t) & 1
        if SLIP == "zero":
            s = tl.where(is_listed > 0, s, 0.0)
        elif SLIP == "not":
            s = tl.where(is_listed > 0, float("-inf"), s)
        elif SLIP == "last listed":
            s = tl.where(is_listed > 0, s, scores_max)
        elif SLIP == "of all" or SLIP == "of all, last":
            s = tl.max(tl.where(is_listed > 0, s, float("-inf")), axis=0) + tl.zeros_like(s)
        elif SLIP != "all" and (SLIP != "if" or T == 1):  # a tile of one number is one truth
            s = tl.where(is_listed > 0, s, float("-inf"))
        only_this = SLIP == "last" or SLIP == "last listed" or SLIP == "of all, last"
        only_this = only_this or (SLIP == "python's" and T > 1)
        if SLIP == "reduced":
            scores_max = tl.max(scores_max, s)
        elif SLIP == "reduced, other way":
            scores_max = tl.max(s, scores_max)
        elif SLIP != "python's, other way" or T == 1:  # a tile is true: `max` keeps its first
            scores_max = s if only_this else tl.maximum(scores_max, s)
    tl.store(Max + tile * T + t, scores_max)


class _Mistaken:
    """`_wrong_walk` with its slip chosen; launched like a kernel."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.run = mistake, None

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_walk[grid](*args, SLIP=self.mistake, **sizes)


def _walk(mistake: str) -> Callable:
    return lambda: _Mistaken(mistake)


def _walk_case(name: str, T: int, counts: list[int]) -> Case:
    here = environment.detect()
    return Case(name, lambda: (T, counts), lambda: here.why_not("triton", here.device))


_WALK = TEXTS.exercise(
    "walk_step",
    minutes=6,
    difficulty=2,
    solution=walk_step,
    run=_run_walk,
    misconceptions=(
        Misconception(
            "showing every block to all queries",
            _walk("all"),
            "The tile loads the union. Whose list has this block?",
        ),
        Misconception(
            "an `if` that asks a whole tile",
            _walk("if"),
            "`if` needs one truth, and the tile `t` has `T` of them. What chooses one by one?",
        ),
        Misconception(
            "0 for a hidden score",
            _walk("zero"),
            "Scores may be negative, and then 0 is the largest of them. What loses against all?",
        ),
        Misconception(
            "the bits of later queries, too",
            _walk("no one"),
            "`listed_by >> t` still holds the bits of later queries. Which bit do you want?",
        ),
        Misconception(
            "`listed_by & t` for the bit of query t",
            _walk("and"),
            "`&` compares the bits of two numbers. `t` is a place among bits. What moves a bit?",
        ),
        Misconception(
            "shifting the query's number",
            _walk("other way"),
            "Which of the two holds the bits, and which says how far to shift?",
        ),
        Misconception(
            "comparing the bits with the query's number",
            _walk("equal"),
            "`listed_by` is a sum of powers of two, one for each query. Where is that of `t`?",
        ),
        Misconception(
            "the bit of the next query",
            _walk("one bit up"),
            "Query 0 has bit 0. By how many places does it have to be shifted?",
        ),
        Misconception(
            "hiding the blocks that are listed",
            _walk("not"),
            "`tl.where(a, x, y)` takes `x` where `a` is true. Which of the two is hidden?",
        ),
        Misconception(
            "keeping the score of the last listed block",
            _walk("last listed"),
            "A later block replaces an earlier one, even where its score is smaller. What keeps "
            "the larger one?",
        ),
        *(
            Misconception(
                "the largest score of all queries",
                _walk(slip_),
                "`tl.max` mixes the queries of the tile, and each needs a largest score of its "
                "own. What compares two tiles place by place?",
            )
            for slip_ in ("of all", "of all, last")
        ),
        *(
            Misconception(
                "`tl.max` of two tiles",
                _walk(slip_),
                "`tl.max` finds the largest number within one tile, and reads its second argument "
                "as an axis. What compares two tiles place by place?",
            )
            for slip_ in ("reduced", "reduced, other way")
            # a compiler refuses it by the one error that it has for everything
            if environment.detect().device == "cpu"
        ),
        *(
            Misconception(
                "Python's `max` of two tiles",
                _walk(slip_),
                "`max` asks once which tile is larger, and keeps that one whole. Each query needs "
                "an answer of its own. Which function of `tl` compares place by place?",
            )
            for slip_ in ("python's", "python's, other way")
        ),
        Misconception(
            "keeping the last step alone",
            _walk("last"),
            "Each step overwrites what the steps before have found. What keeps the larger one?",
        ),
    ),
    cases=(
        _walk_case("one query", 1, [7]),
        _walk_case("one tile of two queries", 2, [3]),
        _walk_case("four queries", 4, [5]),
        _walk_case("three tiles", 4, [6, 2, 8]),
        _walk_case("a tile without a block", 2, [0, 4]),
    ),
)


# -- bytes_moved --

ORDERS = ("queries", "tiles", "blocks")


def bytes_moved(order: str, G: int, S: int, T: int, union: int, BS: int, D: int) -> float:
    """Bytes that one query with G heads costs in each of the three orders, in bf16."""
    block = BS * 2 * D * 2  # keys and values
    if order == "queries":
        return S * block
    if order == "tiles":
        return union * block / T
    row = D * 2
    return S * G * (row + 2 * (row + 4))  # a query in; its partial and LSE out, and in again


def _bytes(slips: Slips, order: str, G: int, S: int, T: int, union: int, BS: int, D: int) -> float:
    """`bytes_moved` with slips; "… in tiles" is made in that order alone."""
    slips = {name.removesuffix(f" in {order}") for name in slips}
    size = 1 if "numbers" in slips else 2
    block = BS * (1 if "keys" in slips else 2) * D * size
    ends = G * D * size * (("ends" in slips) + 2 * ("both ends" in slips))  # the query's rows
    output = G * D * size if "output" in slips else 0
    if order == "queries":
        return S * block * (G if "each head" in slips else 1) + ends + output
    if order == "tiles":
        if "own list" in slips:
            union = S
        if "entries" in slips:
            union = S * T
        if "ratio" in slips:
            union = union * S
        return union * block / (1 if "tile" in slips else T) + ends + output
    row = D * size
    lse = 0 if "no lse" in slips else 2 if slips & {"lse in bf16", "lse halved"} else 4
    lse = 1 if "lse as a number" in slips else lse
    partial = (1 if "once" in slips else 2) * (row + lse)
    heads_ = 1 if "one head" in slips else G
    slots = 1 if "one slot" in slips else S
    reads = 0 if "no query" in slips else 1 if "query once" in slips else slots
    return heads_ * (reads * row + slots * partial) + output


def _in_one(slip_: str, orders: tuple[str, ...]) -> tuple[Wrong, ...]:
    """A slip in each of these orders alone, and last in all of them."""
    names = (*(f"{slip_} in {order}" for order in orders), slip_)
    return tuple(slip(_bytes, name) for name in names)


_BYTES_MISTAKES = (
    *(
        Misconception("keys without values", wrong, "A block has `BS` keys, and as many values.")
        for wrong in _in_one("keys", ORDERS[:2])
    ),
    *(
        Misconception(
            "counting numbers in place of bytes",
            wrong,
            "A bf16 number is 2 bytes, and an fp32 number is 4.",
        )
        for wrong in (
            *(
                Wrong(_bytes, frozenset({numbers, lse}))
                for numbers in ("numbers", "numbers in blocks")
                for lse in ("lse halved", "lse as a number")
            ),
            *_in_one("numbers", ORDERS[2:]),
        )
    ),
    Misconception(
        "a block for every head",
        slip(_bytes, "each head"),
        "The heads of a group share their list and their tile. How often is a block loaded?",
    ),
    Misconception(
        "a tile's bytes for one query",
        slip(_bytes, "tile"),
        "The union is loaded once for the tile. How many queries share that?",
    ),
    Misconception(
        "`union` taken for a ratio",
        slip(_bytes, "ratio"),
        "Here `union` is a number of blocks, all that the tile loads. What is `S` for?",
    ),
    Misconception(
        "loading every entry of a tile",
        slip(_bytes, "entries"),
        "A block that two queries list is loaded once. How many blocks are different?",
    ),
    Misconception(
        "partials that are written and never read",
        slip(_bytes, "once"),
        "A second kernel merges the partials. What does it have to do first?",
    ),
    Misconception(
        "partials without their log-sum-exp",
        slip(_bytes, "no lse"),
        "Two outputs cannot be merged by themselves (chapter 03). What comes with each?",
    ),
    Misconception(
        "a log-sum-exp of 2 bytes, or one that is moved once",
        slip(_bytes, "lse in bf16"),
        "A log-sum-exp is fp32, 4 bytes. It is written with its partial, and read with it. How "
        "many bytes are that?",
    ),
    Misconception(
        "a share of one list",
        slip(_bytes, "own list"),
        "A tile loads more blocks than one list has. Which argument says how many?",
    ),
    *(
        Misconception(
            "the query's rows where only blocks count",
            wrong,
            "The first two orders count blocks alone. Which term of yours is no block?",
        )
        for wrong in (*_in_one("both ends", ORDERS[:2]), *_in_one("ends", ORDERS[:2]))
    ),
    *(
        Misconception(
            "counting the final output",
            wrong,
            "Every order writes it once, so it tells no order apart. Which moves are asked for?",
        )
        for wrong in _in_one("output", ORDERS[2:])
    ),
    Misconception(
        "one head of the group",
        slip(_bytes, "one head"),
        "Every head of the group has a query and a partial of its own.",
    ),
    Misconception(
        "one partial for all slots",
        slip(_bytes, "one slot"),
        "Each listed block makes a partial of its own. How many blocks are listed?",
    ),
    Misconception(
        "queries that are read once for all slots",
        slip(_bytes, "query once"),
        "Each slot is another block, in another program. How often does a head's query travel?",
    ),
    Misconception(
        "partials without their queries",
        slip(_bytes, "no query"),
        "The block stays where it is. What has to come to it?",
    ),
)

_BYTES = TEXTS.exercise(
    "bytes_moved",
    minutes=6,
    difficulty=2,
    solution=bytes_moved,
    misconceptions=_BYTES_MISTAKES,
    combine=together(
        _BYTES_MISTAKES,
        {"no lse", "lse in bf16"},
        {"tile", "entries", "ratio"},
        {"own list", "entries", "ratio"},
        {"no query", "query once", "one slot"},
    ),
    cases=(
        Case("one query a program", lambda: ("queries", 2, 3, 4, 5, 8, 4)),
        Case("tiles", lambda: ("tiles", 2, 3, 4, 5, 8, 4)),
        Case("blocks", lambda: ("blocks", 2, 3, 4, 5, 8, 4)),
        Case("tiles that share everything", lambda: ("tiles", 4, 6, 3, 6, 16, 8)),
        Case("blocks, a group of 16", lambda: ("blocks", 16, 16, 4, 51, 64, 128)),
        Case("queries, a group of 16", lambda: ("queries", 16, 16, 4, 51, 64, 128)),
    ),
)


# -- choose_order --


def choose_order() -> dict[str, str]:
    """The order that suits each of six shapes."""
    return {
        "A": "queries",
        "B": "tiles",
        "C": "blocks",
        "D": "blocks",
        "E": "tiles",
        "F": "queries",
    }


_HINTS_ORDER = {
    "A": "Random lists share little but the forced blocks. Which order takes half the time of "
    "one query a program, or less?",
    "B": "The neighbours nearly agree. Who could load a block for all of them?",
    "C": "Neighbours share little, so a query pays almost 32 KiB for a block. The rows of its 4 "
    "heads take 3 KiB. Which is cheaper to move?",
    "D": "Four queries share a block of 32 KiB, so each pays 8 KiB. The rows of its 4 heads take "
    "3 KiB. Which is cheaper to move?",
    "E": "Four queries share most blocks of 32 KiB. The rows of 16 heads take 12 KiB for a block. "
    "Which order is cheapest, and is it half the time of one query a program, or less?",
    "F": "Which neighbours does a query have when each sequence has one?",
}
_HINT_A_BLOCKS = (
    "L2 would be glad: 194 KiB instead of 512. But 16 GiB of partials also go to memory and back. "
    "Which bar of the panel is longest?"
)
_order_words = _words(choose_order)
_ORDER_MISTAKES = tuple(
    Misconception(
        f"“{order}” for {x}",
        slip(_order_words, f"{x}: {order}"),
        _HINT_A_BLOCKS if (x, order) == ("A", "blocks") else hint,
    )
    for x, hint in _HINTS_ORDER.items()
    for order in ORDERS
    if choose_order()[x] != order
) + _no_words(_order_words, choose_order, ORDERS)

_ORDER = TEXTS.exercise(
    "choose_order",
    minutes=4,
    difficulty=2,
    solution=choose_order,
    run=_said(ORDERS, choose_order),
    misconceptions=_ORDER_MISTAKES,
    combine=together(
        _ORDER_MISTAKES,
        *({f"{x}: {order}" for order in (*ORDERS, STRANGE, OPEN)} for x in _HINTS_ORDER),
    ),
    cases=_letters("shape", "ABCDEF"),
    in_words=True,
)


EXERCISES = (_WRONG, _BYTES, _ORDER, _SPEED, _UNION, _WALK)  # as they come in the chapter

TRAPS = TEXTS.traps

DOUBLES = (
    Double(
        "bytes_moved",
        lambda order, G, S, T, union, BS, D: {
            "queries": S * BS * D * 2,
            "tiles": union * BS * D * 2 / T,
            "blocks": S * G * (3 * D * 2),
        }[order],
        ("keys without values", "partials without their log-sum-exp"),
    ),
    Double(
        "union_of_lists",
        lambda lists: (
            sorted({b for own in lists for b in own}),
            [sum(b in own for own in lists) for b in sorted({b for own in lists for b in own})],
        ),
        ("an empty slot taken for a block", "counting who lists a block"),
    ),
    Double(
        "speed",
        lambda N, HQ, D, listed, ms: (
            2 * HQ * N * listed * D / ms / 1e9,
            2 * HQ * N * N * D / ms / 1e9,
        ),
        ("counting one product, or no additions", "counting the pairs of the future"),
    ),
)

PREDICTIONS = TEXTS.predictions(
    globals(),
    memory_alone={"unit": "ms", "tolerance": 0.05},
    without_softmax={"unit": "ms", "tolerance": 0.03},
    busiest={"choices": ("memory", "L2", "arithmetic")},
    tiles_ms={"unit": "ms", "tolerance": 0.05},
    union_of_four={"tolerance": 0.03},
)
