"""Exercises of chapter 16: a benchmark of two kernels side by side, the bytes of three orders, and
the order for six shapes. Then what is wrong with five benchmarks, TFLOP/s and what dense FLOPs make
of them, the union of neighbours' lists, and one step of its walk as a kernel."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


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


def _answers(ours: Callable, words: tuple[str, ...], hints: Mapping[object, str]) -> list[tuple]:
    """Rows of `diffs`: each wrong word for each letter, a word that is none, and no word at all.

    Args:
        ours: the solution.
        words: to choose from.
        hints: by letter, or by letter and wrong word.
    """
    right, rows = ours(), []
    letters = [x for x in hints if isinstance(x, str)]
    for x in letters:
        wrong = (word for word in words if word != right[x])
        rows += [(x, word, f"“{word}” for {x}", hints.get((x, word), hints[x])) for word in wrong]
    strange = f"The words are: {', '.join(words)}."
    bet = "Which word would you take, if you had to bet?"
    for x in letters:
        rows.append((x, STRANGE, f"a word for {x} that is none of ours", strange))
        rows.append((x, OPEN, f"nothing yet for {x}", bet))
    return [(f'"{x}": "{right[x]}"', f'"{x}": "{word}"', *said) for x, word, *said in rows]


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

_WRONG = TEXTS.exercise(
    "what_is_wrong",
    minutes=5,
    difficulty=1,
    solution=what_is_wrong,
    run=_said(WORDS, what_is_wrong),
    misconceptions=diffs(what_is_wrong, _answers(what_is_wrong, WORDS, _HINTS_WRONG)),
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


# where two more things are wrong beside a number in place of two: what they do to the source
_DOC = 'attention."""'
_UNITS = [{_DOC: f"{_DOC}\n    ms = ms * {factor}"} for factor in (1e3, 1e-3, 1e6, 1e-12, 1e-9)]
_COUNTS = [
    {"2 * 2 * D": "2 * D"},
    {"2 * 2 * D": "2 * 2 * 2 * D"},
    {"N * listed": "listed"},
    {"N * listed": "listed", "N * (": "("},
    {"done = HQ": "done = 1", "dense = HQ": "dense = 1"},
]
_ALONE = "Two are asked for. What would dense attention's operations make of the same time?"

_SPEED = TEXTS.exercise(
    "speed",
    minutes=4,
    difficulty=1,
    solution=speed,
    misconceptions=diffs(speed, [
        # one number comes first, and by itself where more than one thing else is wrong
        *(({", dense / ms / 1e9": ""} | second | first, "returning one number", _ALONE)
          for first in (*_UNITS, _COUNTS[0]) for second in _COUNTS
          if first.keys() != second.keys()),
        ("done / ms / 1e9, ", "", "returning one number",
         "Two are asked for, and this is the second. What does the kernel itself do in this "
         "time?"),
        (", dense / ms / 1e9", "", "returning one number", _ALONE),
        ("2 * 2 * D", "2 * D", "counting one product, or no additions",
         "A query and a key take two products: `q · k`, and a weight times a value. Each has a "
         "multiply and an add for every number of the width."),
        ("N + 1) / 2", "N)", "counting the pairs of the future",
         "Dense attention is causal here: query `t` sees `t + 1` keys. How many pairs are that?"),
        ("2 * 2 * D", "2 * 2 * 2 * D", "counting everything twice",
         "Twice too many. There are two products, and each has a multiply and an add. Which "
         "factor of 2 stands in your count twice?"),
        ("N + 1) / 2", "N) / 2", "half of the square",
         "A query sees itself, too. Count the pairs of one query, and of two."),
        ('attention."""', 'attention."""\n    ms = ms * 1e6',
         "milliseconds multiplied where they are to be divided",
         "A millisecond is 10 to the power -3 seconds. Which way does that move the result?"),
        ('attention."""', 'attention."""\n    ms = ms * 1e3', "milliseconds taken for seconds",
         "TFLOP/s are 10 to the power 12 operations in a *second*. How many ms are that?"),
        ('attention."""', 'attention."""\n    ms = ms / 1e3', "GFLOP/s",
         "Your unit is a thousand times too small. T is 10 to the power 12."),
        ('attention."""', 'attention."""\n    ms = ms / 1e12', "operations a second, without the T",
         "T is 10 to the power 12. How many TFLOP/s are your operations a second?"),
        ('attention."""', 'attention."""\n    ms = ms / 1e9', "operations a millisecond",
         "Two steps are left: from a millisecond to a second, and from one operation to 10 to "
         "the power 12 of them. Which factors are that?"),
        ("N * listed", "listed", "the keys of one query",
         "`listed` is what one query reads. How many queries does the kernel have?"),
        ({"N * listed": "listed", "N * (": "("}, "the keys of one query"),
        ({"done = HQ": "done = 1", "dense = HQ": "dense = 1"}, "counting one head",
         "Every query head multiplies. Who is `HQ`?"),
        ("return", "done, dense = dense, done\n    return", "the two numbers the wrong way round",
         "First what the kernel computes itself, then what dense attention would compute."),
    ]),
    tolerance=1e-9,
    cases=(
        Case("one head", lambda: (300, 1, 100, 100.0, 1.0)),
        Case("ten heads", lambda: (300, 10, 100, 100.0, 1.0)),
        Case("ten heads, twice the time", lambda: (300, 10, 100, 100.0, 2.0)),
        Case("long", lambda: (65_536, 64, 128, 1000.0, 13.0)),
    ),
)  # fmt: skip


# -- union_of_lists --


def union_of_lists(lists: list[list[int]]) -> tuple[list[int], list[int]]:
    """The blocks of several lists, ascending, and for each one a number whose bits say who lists
    it."""
    ids = sorted({block for own in lists for block in own if block >= 0})
    return ids, [sum(1 << t for t, own in enumerate(lists) if block in own) for block in ids]


_UNION = TEXTS.exercise(
    "union_of_lists",
    minutes=6,
    difficulty=2,
    solution=union_of_lists,
    misconceptions=diffs(union_of_lists, [
        (">= 0", ">= -1", "an empty slot taken for a block",
         "-1 says that a slot is empty. Which block would the tile load for it?"),
        (">= 0", "> 0", "block 0 taken for an empty slot",
         "Block 0 is a block like any other. Only -1 says that a slot is empty."),
        ("1 << t", "1", "counting who lists a block",
         "Two of four list it, but which two? The walk has to mask the others."),
        ("1 << t", "t", "adding up the numbers of the queries",
         "Queries 0 and 3 give 3, and so do queries 1 and 2. Which numbers have sums that tell?"),
        ("sum(1 << t", "list(t", "a list of queries in place of a number",
         "These are the right queries. Each has a bit: which number do their bits add up to?"),
        ({"[sum(": "[bin(sum(", "own) for": "own)) for"}, "text in place of a number",
         "`bin` writes a number down as text, to be read. The kernel shifts the number itself."),
        ({"({": "([", "})": "])"}, "a block as often as it is listed",
         "The tile would load such a block twice. What keeps each block once?"),
        ("sum(", "max(", "the last query alone",
         "A later query overwrites the bit of an earlier one. What keeps both?"),
        ("1 << t", "1 << len(lists) - 1 - t", "bits from the other end",
         "Query 0 has bit 0, which is worth 1. What is the bit of query `t` worth?"),
        ("1 << t", "1 << t + 1", "bits that begin at 1",
         "Query 0 has bit 0. What is 2 to the power 0?"),
        ("})", " and all(block in x for x in lists)})", "the blocks that all of them list",
         "That is the intersection. A block that one query lists has to be loaded, too."),
        ({"sorted({": "list(dict.fromkeys([", "})": "]))"},
         "blocks in the order in which they are met",
         "The right blocks, but they should ascend, whoever lists them first."),
        (", [sum(1 << t for t, own in enumerate(lists) if block in own) for block in ids]", "",
         "leaving the bits out",
         "That is the first half. Return a pair: the blocks, and for each one who lists it."),
    ]),
    cases=(
        Case("one query", lambda: ([[3]],)),
        Case("two queries that share a block", lambda: ([[0, 2], [2, 3]],)),
        Case("an empty slot", lambda: ([[0, -1], [0, 1]],)),
        Case("three queries", lambda: ([[4, 5], [0, 4], [4, 7]],)),
        Case("four queries", lambda: ([[0, 6, 7], [0, 6, 7], [0, 2, 7], [0, 6, 7]],)),
        Case("no block at all", lambda: ([[-1, -1], [-1, -1]],)),
    ),
)  # fmt: skip


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


def _walk_case(name: str, T: int, counts: list[int]) -> Case:
    here = environment.detect()
    return Case(name, lambda: (T, counts), lambda: here.why_not("triton", here.device))


_WALK = TEXTS.exercise(
    "walk_step",
    minutes=6,
    difficulty=2,
    solution=walk_step,
    run=_run_walk,
    misconceptions=diffs(walk_step, [
        ('s = tl.where(is_listed > 0, s, float("-inf"))', "pass",
         "showing every block to all queries",
         "The tile loads the union. Whose list has this block?"),
        ({'s = tl.where(is_listed > 0, s, float("-inf"))': "if is_listed:",
          "scores_max = tl.maximum(scores_max, s)": "    scores_max = tl.maximum(scores_max, s)"},
         "an `if` that asks a whole tile",
         "`if` needs one truth, and the tile `t` has `T` of them. What chooses one by one?"),
        ('s, float("-inf"))', "s, 0.0)", "0 for a hidden score",
         "Scores may be negative, and then 0 is the largest of them. What loses against all?"),
        ("(listed_by >> t) & 1", "listed_by >> t", "the bits of later queries, too",
         "`listed_by >> t` still holds the bits of later queries. Which bit do you want?"),
        ("(listed_by >> t) & 1", "listed_by & t", "`listed_by & t` for the bit of query t",
         "`&` compares the bits of two numbers. `t` is a place among bits. What moves a bit?"),
        ("(listed_by >> t) & 1", "(t >> listed_by) & 1", "shifting the query's number",
         "Which of the two holds the bits, and which says how far to shift?"),
        ("(listed_by >> t) & 1", "(listed_by == t).to(tl.int32)",
         "comparing the bits with the query's number",
         "`listed_by` is a sum of powers of two, one for each query. Where is that of `t`?"),
        ("(listed_by >> t) & 1", "(listed_by >> (t + 1)) & 1", "the bit of the next query",
         "Query 0 has bit 0. By how many places does it have to be shifted?"),
        ('s, float("-inf"))', 'float("-inf"), s)', "hiding the blocks that are listed",
         "`tl.where(a, x, y)` takes `x` where `a` is true. Which of the two is hidden?"),
        ({'s, float("-inf"))': "s, scores_max)", "tl.maximum(scores_max, s)": "s"},
         "keeping the score of the last listed block",
         "A later block replaces an earlier one, even where its score is smaller. What keeps "
         "the larger one?"),
        ("tl.maximum(scores_max, s)", "tl.maximum(scores_max, tl.max(s, axis=0))",
         "the largest score of all queries",
         "`tl.max` mixes the queries of the tile, and each needs a largest score of its own. "
         "What compares two tiles place by place?"),
        ("tl.maximum(scores_max, s)", "tl.max(s, axis=0) + tl.zeros_like(s)",
         "the largest score of all queries"),
        # a compiler refuses it by the one error that it has for everything
        *([
            ("tl.maximum(scores_max, s)", "tl.max(scores_max, s)", "`tl.max` of two tiles",
             "`tl.max` finds the largest number within one tile, and reads its second argument as "
             "an axis. What compares two tiles place by place?"),
            ("tl.maximum(scores_max, s)", "tl.max(s, scores_max)", "`tl.max` of two tiles"),
        ] if environment.detect().device == "cpu" else []),
        ("tl.maximum(scores_max, s)", "max(scores_max, s)", "Python's `max` of two tiles",
         "`max` asks once which tile is larger, and keeps that one whole. Each query needs an "
         "answer of its own. Which function of `tl` compares place by place?"),
        ("tl.maximum(scores_max, s)", "max(s, scores_max)", "Python's `max` of two tiles"),
        ("tl.maximum(scores_max, s)", "s", "keeping the last step alone",
         "Each step overwrites what the steps before have found. What keeps the larger one?"),
    ]),
    cases=(
        _walk_case("one query", 1, [7]),
        _walk_case("one tile of two queries", 2, [3]),
        _walk_case("four queries", 4, [5]),
        _walk_case("three tiles", 4, [6, 2, 8]),
        _walk_case("a tile without a block", 2, [0, 4]),
    ),
)  # fmt: skip


# -- bytes_moved --

ORDERS = ("queries", "tiles", "blocks")


def bytes_moved(order: str, G: int, S: int, T: int, union: int, BS: int, D: int) -> float:
    """Bytes that one query with G heads costs in each of the three orders, in bf16."""
    row = D * 2
    block = BS * 2 * row  # keys and values
    if order == "queries":
        return S * block
    if order == "tiles":
        return union * block / T
    return S * G * (row + 2 * (row + 4))  # a query in; its partial and LSE out, and in again


_BYTES = TEXTS.exercise(
    "bytes_moved",
    minutes=6,
    difficulty=2,
    solution=bytes_moved,
    misconceptions=diffs(bytes_moved, [
        ('if order == "queries":', 'if order == "queries":\n        block = block // 2',
         "keys without values", "A block has `BS` keys, and as many values."),
        ("/ T", "// 2 / T", "keys without values"),
        ("BS * 2 *", "BS *", "keys without values"),
        ({"row = D * 2": "row = D", " + 4": " + 2"},
         "counting numbers in place of bytes",
         "A bf16 number is 2 bytes, and an fp32 number is 4."),
        ({"row = D * 2": "row = D", " + 4": " + 1"},
         "counting numbers in place of bytes"),
        ({"row = D * 2": 'row = D if order == "blocks" else D * 2', " + 4": " + 2"},
         "counting numbers in place of bytes"),
        ({"row = D * 2": 'row = D if order == "blocks" else D * 2', " + 4": " + 1"},
         "counting numbers in place of bytes"),
        ("row = D * 2", 'row = D if order == "blocks" else D * 2',
         "counting numbers in place of bytes"),
        ("row = D * 2", "row = D", "counting numbers in place of bytes"),
        ('if order == "queries":', 'if order == "queries":\n        block = G * block',
         "a block for every head",
         "The heads of a group share their list and their tile. How often is a block loaded?"),
        ("/ T", "", "a tile's bytes for one query",
         "The union is loaded once for the tile. How many queries share that?"),
        ('if order == "tiles":', 'if order == "tiles":\n        union = union * S',
         "`union` taken for a ratio",
         "Here `union` is a number of blocks, all that the tile loads. What is `S` for?"),
        ('if order == "tiles":', 'if order == "tiles":\n        union = S * T',
         "loading every entry of a tile",
         "A block that two queries list is loaded once. How many blocks are different?"),
        ("+ 2 *", "+", "partials that are written and never read",
         "A second kernel merges the partials. What does it have to do first?"),
        ("2 * (row + 4)", "2 * (2 * row + 4)", "partials in fp32",
         "A program adds up in fp32. In which dtype does the statement store a partial output?"),
        (" + 4", "", "partials without their log-sum-exp",
         "Two outputs cannot be merged by themselves (chapter 03). What comes with each?"),
        (" + 4", " + 2", "a log-sum-exp of 2 bytes, or one that is moved once",
         "A log-sum-exp is fp32, 4 bytes. It is written with its partial, and read with it. How "
         "many bytes are that?"),
        ('if order == "tiles":', 'if order == "tiles":\n        union = S', "a share of one list",
         "A tile loads more blocks than one list has. Which argument says how many?"),
        ("return S * block", "return 2 * G * row + S * block",
         "the query's rows where only blocks count",
         "The first two orders count blocks alone. Which term of yours is no block?"),
        ("return union", "return 2 * G * row + union", "the query's rows where only blocks count"),
        ({"return S * block": "return 2 * G * row + S * block",
          "return union": "return 2 * G * row + union"},
         "the query's rows where only blocks count"),
        ("return S * block", "return G * row + S * block",
         "the query's rows where only blocks count"),
        ("return union", "return G * row + union", "the query's rows where only blocks count"),
        ({"return S * block": "return G * row + S * block",
          "return union": "return G * row + union"}, "the query's rows where only blocks count"),
        ("S * G *", "G * row + S * G *", "counting the final output",
         "Every order writes it once, so it tells no order apart. Which moves are asked for?"),
        ({"return S * block": "return G * row + S * block",
          "return union": "return G * row + union", "S * G *": "G * row + S * G *"},
         "counting the final output"),
        ('bf16."""', 'bf16."""\n    G = 1 if order == "blocks" else G', "one head of the group",
         "Every head of the group has a query and a partial of its own."),
        ("S * G *", "G *", "one partial for all slots",
         "Each listed block makes a partial of its own. How many blocks are listed?"),
        ("G * (row", "G * (row / S", "queries that are read once for all slots",
         "Each slot is another block, in another program. How often does a head's query travel?"),
        ("G * (row", "G * (0", "partials without their queries",
         "The block stays where it is. What has to come to it?"),
    ]),
    cases=(
        Case("one query a program", lambda: ("queries", 2, 3, 4, 5, 8, 4)),
        Case("tiles", lambda: ("tiles", 2, 3, 4, 5, 8, 4)),
        Case("blocks", lambda: ("blocks", 2, 3, 4, 5, 8, 4)),
        Case("tiles that share everything", lambda: ("tiles", 4, 6, 3, 6, 16, 8)),
        Case("blocks, a group of 16", lambda: ("blocks", 16, 16, 4, 51, 64, 128)),
        Case("queries, a group of 16", lambda: ("queries", 16, 16, 4, 51, 64, 128)),
    ),
)  # fmt: skip


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
    ("A", "blocks"): "L2 would be glad: 194 KiB instead of 512. But 16 GiB of partials also go to "
    "memory and back. Which bar of the panel is longest?",
    "B": "The neighbours nearly agree. Who could load a block for all of them?",
    "C": "Neighbours share little, so a query pays almost 32 KiB for a block. The rows of its 4 "
    "heads take 3 KiB. Which is cheaper to move?",
    "D": "Four queries share a block of 32 KiB, so each pays 8 KiB. The rows of its 4 heads take "
    "3 KiB. Which is cheaper to move?",
    "E": "Four queries share most blocks of 32 KiB. The rows of 16 heads take 12 KiB for a block. "
    "Which order is cheapest, and is it half the time of one query a program, or less?",
    "F": "Which neighbours does a query have when each sequence has one?",
}

_ORDER = TEXTS.exercise(
    "choose_order",
    minutes=6,
    difficulty=2,
    solution=choose_order,
    run=_said(ORDERS, choose_order),
    misconceptions=diffs(choose_order, _answers(choose_order, ORDERS, _HINTS_ORDER)),
    cases=_letters("shape", "ABCDEF"),
    in_words=True,
)


# -- time_in_pairs --


def time_in_pairs(
    ours: Callable, theirs: Callable, flush: Callable, wait: Callable, clock: Callable, runs: int
) -> tuple[float, float]:
    """The median times of two calls in milliseconds: ours, theirs."""

    def ms(call):
        """The time of one call, from an empty cache."""
        flush()
        wait()
        start = clock()
        call()
        wait()
        return 1e3 * (clock() - start)

    pairs = [(ms(ours), ms(theirs)) for _ in range(runs + 1)]
    mine, other = zip(*pairs[1:], strict=True)  # without the first calls
    return sorted(mine)[runs // 2], sorted(other)[runs // 2]


@dataclass
class _Machine:
    """A GPU and its clock, neither of them real: calls take as long as they are told to.

    Attributes:
        is_queued: a launch returns at once, and the work is done later.
        first: what a first call takes longer, in ms.
        odd: by how many times a call is slower, by its number among those of the same function.
        has_cache: a call takes half its time where no `flush` came since the call before.
        drift: the part by which each call is slower than the one before it.
        ours, theirs: what a call of each takes, in ms.
    """

    is_queued: bool = True
    first: float = 0.0
    odd: Mapping[int, float] = field(default_factory=dict)
    has_cache: bool = False
    drift: float = 0.0
    ours: float = 2.0
    theirs: float = 3.0
    now: float = 0.0  # ms
    busy_until: float = 0.0
    calls: int = 0
    is_cold: bool = True

    def _work(self, ms: float) -> None:
        self.busy_until = max(self.now, self.busy_until) + ms
        self.now = self.now if self.is_queued else self.busy_until

    def kernel(self, ms: float) -> Callable:
        """A function whose calls take `ms`."""
        number = 0

        def call() -> None:
            nonlocal number
            number, self.calls = number + 1, self.calls + 1
            taken = ms * self.odd.get(number, 1.0) * (1 + self.drift * self.calls)
            taken *= 1.0 if self.is_cold or not self.has_cache else 0.5
            self._work(taken + (self.first if number == 1 else 0.0))
            self.is_cold = False

        return call

    def flush(self) -> None:
        """Empty the cache: work like any other."""
        self._work(7.0)
        self.is_cold = True

    def wait(self) -> None:
        """Return once all work is done."""
        self.now = max(self.now, self.busy_until)

    def clock(self) -> float:
        """Seconds."""
        return self.now / 1e3


def _run_pairs(solution: Callable, machine: _Machine, runs: int) -> object:
    """Time two kernels on a machine; of one that drifts, only the ratio is told."""
    own = replace(machine)
    kernels = own.kernel(own.ours), own.kernel(own.theirs)
    found = solution(*kernels, own.flush, own.wait, own.clock, runs)
    if not machine.drift or not isinstance(found, Sequence) or len(found) != 2:
        return found
    return "theirs / ours", found[1] / found[0]


_PAIRS = TEXTS.exercise(
    "time_in_pairs", minutes=15, difficulty=2, solution=time_in_pairs, run=_run_pairs,
    returns=("ours", "theirs"), tolerance=0.03,
    stages=(
        Stage("a time", (Case("calls of 2 and 3 ms that return when they are done",
                              lambda: (_Machine(is_queued=False), 1)),)),
        Stage("a queue", (Case("a launch returns at once; calls of 4 and 1 ms",
                               lambda: (_Machine(ours=4.0, theirs=1.0), 1)),)),
        Stage("the first call", (Case("the first call of each takes 500 ms more",
                                      lambda: (_Machine(first=500.0, ours=6.0), 1)),)),
        Stage("one slow run", (Case("five runs, of which the first is 10 times as slow",
                                    lambda: (_Machine(first=500.0, odd={2: 10.0}), 5)),
                               Case("five runs, one slow and one fast; calls of 5 and 4 ms",
                                    lambda: (_Machine(first=500.0, odd={4: 10.0, 5: 0.5},
                                                      ours=5.0, theirs=4.0), 5)))),
        Stage("a cold cache", (Case("what is in the cache takes half the time",
                                    lambda: (_Machine(first=500.0, has_cache=True), 3)),)),
        Stage("side by side", (Case("each call is 1 % slower than the one before it",
                                    lambda: (_Machine(first=500.0, drift=0.01, theirs=7.0), 31)),)),
    ),
    misconceptions=diffs(time_in_pairs, [
        ("return 1e3 * (clock() - start)", "return clock() - start", "seconds in place of ms",
         "`clock()` is in seconds. How many milliseconds is that?"),
        ("runs // 2], sorted(other)[runs // 2]", "runs // 2]", "one time in place of two",
         "Two are asked for. What did the other function take, in the same runs?"),
        ("return sorted(mine)[runs // 2], sorted(other)[runs // 2]",
         "return sorted(other)[runs // 2], sorted(mine)[runs // 2]", "theirs before ours",
         "The order of the result is ours, then theirs. Which one do you return first?"),
        ("        call()\n        wait()\n", "        call()\n",
         "stopping the clock before the work is done",
         "A launch only puts work into a queue. What has to return before you read the clock?"),
        ("        flush()\n        wait()\n", "        call()\n",
         "a first call that is still in the queue",
         "The clock starts while the first call is still in the queue. What empties the queue?"),
        ("        flush()\n        wait()\n", "        flush()\n",
         "timing the flush, too",
         "The flush is work in the queue, like any other. Is the queue empty when the clock "
         "starts?"),
        ({"        flush()\n        wait()\n        start = clock()\n":
          "        start = clock()\n        flush()\n        wait()\n"}, "timing the flush, too"),
        ("pairs[1:]", "pairs[:-1]", "counting the first call",
         "A first call also compiles. How often is each function called before the first time "
         "that counts?"),
        ("return sorted(mine)[runs // 2], sorted(other)[runs // 2]",
         "return sum(mine) / runs, sum(other) / runs", "a mean in place of a median",
         "One slow run moves the mean. Which number of five times does not move?"),
        ("return sorted(mine)[runs // 2], sorted(other)[runs // 2]",
         "return min(mine), min(other)", "the fastest run in place of the median",
         "The fastest run is one run alone. The median is asked for."),
        ("return sorted(mine)[runs // 2], sorted(other)[runs // 2]",
         "return mine[runs // 2], other[runs // 2]", "the run in the middle, unsorted",
         "The median is the middle of the *sorted* times."),
        ("        flush()\n", "", "a warm cache",
         "The second call finds its input where the first one left it. What empties the cache?"),
        ({"        flush()\n        wait()\n": "        wait()\n",
          "pairs = [(ms(ours), ms(theirs)) for _ in range(runs + 1)]":
          "pairs = [(flush() or ms(ours), ms(theirs)) for _ in range(runs + 1)]"},
         "one flush for a pair",
         "The first of a pair starts with an empty cache. What does the second one find there?"),
        ({"pairs = [(ms(ours), ms(theirs)) for _ in range(runs + 1)]":
          "pairs = [*zip([ms(ours) for _ in range(runs + 1)], "
          "[ms(theirs) for _ in range(runs + 1)])]"}, "all runs of one, then all of the other",
         "The machine slows down while you measure. Which of the two has the late runs?"),
    ]),
)  # fmt: skip


EXERCISES = (_PAIRS, _BYTES, _ORDER, _WRONG, _SPEED, _UNION, _WALK)  # as they come

TRAPS = TEXTS.traps

DOUBLES = (
    Double("bytes_moved", names=(
        "keys without values", "partials without their log-sum-exp")),
    Double("union_of_lists", names=(
        "an empty slot taken for a block", "counting who lists a block")),
    Double("speed", names=(
        "counting one product, or no additions", "counting the pairs of the future")),
)  # fmt: skip

PREDICTIONS = TEXTS.predictions(
    globals(),
    memory_alone={"unit": "ms", "tolerance": 0.05},
    busiest={"choices": ("memory", "L2", "issue slots")},
    tiles_ms={"unit": "ms", "tolerance": 0.05},
    union_of_four={"tolerance": 0.03},
    short_call={"unit": "ms", "tolerance": 0.1},
)
