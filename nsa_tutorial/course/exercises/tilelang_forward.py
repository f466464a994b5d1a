"""Exercises of chapter 10: the four mistakes of the first draft, each mended by the reader, and how
many programs fit."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from types import FunctionType

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.languages import T
from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.runtime import environment

# -- the draft with a piece of the reader's --

_MACROS = ("update_max", "normalise")
_COMPILED: dict[str, Callable] = {}


def _run_with(name: str, block_size: int = 2) -> Callable:
    """`run` of an exercise: the first draft on the CPU with its piece `name` from the reader, and
    the others mended."""

    def run(
        piece: Callable, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor,
        causal: bool, scale: float | None,
    ) -> Tensor:  # fmt: skip
        from nsa_tutorial.kernels import tilelang_first_draft as draft
        from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

        if name in _MACROS and isinstance(piece, FunctionType):
            piece = T.macro(piece)
        if name == "is_seen":
            piece = _with_an_answer(piece)
        (B, _, HQ, D), H, S = q.shape, k.shape[2], block_indices.shape[3]
        pieces = {**draft.MENDED, name: piece}
        sizes, options = (B, HQ, HQ // H, D, block_size, S), {"causal": causal, "scale": scale}
        with _quiet():
            kernel = draft.build_kernel(*sizes, **options, dtype="float32", **pieces)
        text = kernel.script()  # two pieces that come to the same kernel are compiled once
        if text not in _COMPILED:
            _COMPILED[text] = compile_for_cpu(kernel)
        o = torch.empty_like(q)
        _COMPILED[text](q, k, v, block_indices, o)
        return o

    return run


def _with_an_answer(is_seen: Callable) -> Callable:
    """TileLang takes None for a condition and ends the whole process; an error is kinder."""

    @functools.wraps(is_seen)
    def condition(*arguments: object) -> object:
        seen = is_seen(*arguments)
        if seen is None:
            raise TypeError("is_seen returned None: does every branch have its `return`?")
        return seen

    return condition


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TileLang logs a page of generated code for a piece that it cannot read; the error alone says
    enough."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _why_not() -> str | None:
    return environment.detect().why_not("tilelang", "cpu")


def _case(
    name: str, N: int, M: int, ids: list[int] | list[list[int]], *,
    key_scores: list[float] | None = None, query_factors: tuple[float, float] = (1.0, 1.0),
    causal: bool = True, scale: float | None = 1.0,
) -> Case:  # fmt: skip
    """One sequence, two query heads on one KV head, width 2.

    `ids` is one list for all queries or one for each. With `key_scores`, a query of head `i` scores
    key `j` with `query_factors[i] * key_scores[j]`; otherwise queries and keys are random.
    """

    def arguments() -> tuple:
        g = torch.Generator().manual_seed(N + 10 * M)
        q, k, v = (torch.randn(1, n, h, 2, generator=g) for n, h in ((N, 2), (M, 1), (M, 1)))
        if key_scores is not None:
            heads = torch.tensor([[factor, 0.0] for factor in query_factors])
            q = heads.expand(1, N, 2, 2).contiguous()
            k = torch.tensor([[score, 0.0] for score in key_scores])[None, :, None]
        lists = torch.tensor(ids, dtype=torch.int32)
        lists = lists.expand(N, -1) if lists.ndim == 1 else lists
        return q, k, v, lists.reshape(1, N, 1, -1).contiguous(), causal, scale

    return Case(name, arguments, _why_not)


_HOW = """
The check puts your function into the draft (the other three pieces are mended there), compiles it
for the CPU, a second or two for each new piece, and runs it on small inputs in fp32: two query
heads on one KV head, width 2, blocks of {} tokens.
"""

# -- update_max --


def update_max(acc_s: object, scores_max: object) -> None:
    """Bring scores_max [G] up to date with the scores acc_s [G, BS] of this block; -inf before the
    first block."""
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)


def _max_of_block(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=True)


def _max_with_zero(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    for g in T.Parallel(2):
        scores_max[g] = T.max(scores_max[g], 0.0)


def _max_untouched(acc_s: object, scores_max: object) -> None:
    for g in T.Parallel(2):
        scores_max[g] = scores_max[g] + 0.0


def _max_of_first(acc_s: object, scores_max: object) -> None:
    for g in T.Parallel(2):
        if scores_max[g] == -T.infinity("float32"):
            scores_max[g] = T.max(acc_s[g, 0], acc_s[g, 1])


def _max_of_tile(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    scores_max[0] = T.max(scores_max[0], scores_max[1])
    scores_max[1] = scores_max[0]


def _largest_magnitude(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    for g, j in T.Parallel(2, 2):
        if acc_s[g, j] > -T.infinity("float32"):
            scores_max[g] = T.max(scores_max[g], -acc_s[g, j])


_MAX = Exercise(
    name="update_max",
    statement=f"""
**The maximum that does not run.** `acc_s` `[G, BS]` are a block's scores, `scores_max` `[G]` is the
fragment with the statistic of the softmax; before the first block it holds $-\\infty$. The draft
fills it with $-\\infty$ before each block and takes that block's maximum. Write the piece as it
should be: the body of a TileLang macro, without `return`.
`T.reduce_max(tile, fragment, dim=1, clear=...)` is all you need; what does `clear` clear?
{_HOW.format(2)}""",
    minutes=6,
    difficulty=2,
    solution=update_max,
    run=_run_with("update_max"),
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "the maximum of this block alone",
            _max_of_block,
            "Whether you fill it or let clear=True do so: what the earlier blocks had found is "
            "gone. If this block lies far below them, scores_scale becomes 2 to a large positive "
            "number.",
        ),
        Misconception(
            "a maximum that is never below 0",
            _max_with_zero,
            "It runs, and it does not overflow. But what is exp2 of a score of −200, measured "
            "from 0? And of its row's sum?",
        ),
        Misconception(
            "leaving the maximum where it starts",
            _max_untouched,
            "The scores are measured from scores_max. What is a number minus −∞?",
        ),
        Misconception(
            "keeping the first block's maximum",
            _max_of_first,
            "It never falls, which is half of it. What if a later block scores 100 nats more?",
        ),
        Misconception(
            "one maximum for all heads of the group",
            _max_of_tile,
            "Each row of the tile is a head with a softmax of its own. What is left of a head "
            "whose scores all lie far below another's?",
        ),
        Misconception(
            "the largest magnitude",
            _largest_magnitude,
            "exp2 overflows on one side only. Measured from +60, what is left of a row whose "
            "scores are all −60?",
        ),
    ),
    cases=(
        _case("scores of order one", 6, 6, [0, 1, 2]),
        _case("each block 100 below the one before", 6, 6, [0, 1, 2],
              key_scores=[0, 1, -100, -99, -200, -199]),
        _case("each block 100 above the one before", 6, 6, [0, 1, 2],
              key_scores=[-200, -199, -100, -99, 0, 1]),
        _case("all scores about -60", 6, 6, [2, 0, 1],
              key_scores=[-60, -61, -62, -60, -61, -59]),
        _case("all scores about -200", 6, 6, [0, 1, 2],
              key_scores=[-200, -201, -202, -200, -201, -199]),
        _case("one head 200 above the other", 6, 6, [0, 1, 2],
              key_scores=[200, 201, 202, 200, 201, 199], query_factors=(1, 0.01)),
    ),
)  # fmt: skip

# -- is_seen --


def is_seen(query: object, key: object, num_keys: object, causal: bool) -> object:
    """Whether the query at position query sees the key at position key, of num_keys that there
    are."""
    return T.And(key < num_keys, query >= key) if causal else key < num_keys


def _seen(change: str) -> Callable:
    def wrong(query: object, key: object, num_keys: object, causal: bool) -> object:
        if change == "nothing":
            return query >= key if causal else True
        if change == "always causal":
            return query >= key
        if change == "end alone":
            return key < num_keys
        end = key // 4 * 4 + 4 <= num_keys if change == "full blocks" else key < num_keys
        if change == "one more":
            end = key <= num_keys
        past = query > key if change == "strict" else query >= key
        return T.And(end, past) if causal else end

    return wrong


_SEEN = Exercise(
    name="is_seen",
    statement=f"""
**The missing end.** `is_seen` is asked for every score of a block. `query` and `key` are positions,
`num_keys` is how many keys there are: expressions of the kernel, not Python numbers (so join two
comparisons with `T.And(a, b)`). `causal` is a Python bool, fixed when the kernel is compiled. The
last block may reach past the end; what is not there was loaded as zeros. Return the condition.
{_HOW.format(4)}""",
    minutes=5,
    difficulty=2,
    solution=is_seen,
    run=_run_with("is_seen", block_size=4),
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "saying nothing of the end where nothing is causal",
            _seen("nothing"),
            "T.copy puts zeros past the end. A key of zeros scores 0, and exp2 of 0 minus the "
            "maximum is a weight like any other.",
        ),
        Misconception(
            "hiding the future where nothing is causal",
            _seen("always causal"),
            "With causal=False a query sees keys behind it as well. Which condition is left then?",
        ),
        Misconception(
            "letting one key too many in",
            _seen("one more"),
            "There are num_keys keys, and the first has number 0. Which number has the last?",
        ),
        Misconception(
            "dropping the ragged block",
            _seen("full blocks"),
            "That is the guard `i_s + BS <= seq_len`: nothing is read past the end any more. And "
            "which keys are never read at all?",
        ),
        Misconception(
            "checking the end and forgetting the future",
            _seen("end alone"),
            "With causal=True the last block of a list is often the query's own. What lies in "
            "its second half?",
        ),
        Misconception(
            "hiding the query's own key",
            _seen("strict"),
            "A query sees itself. What does the very first one see otherwise?",
        ),
    ),
    cases=(
        _case("two keys in a block of 4, not causal", 1, 2, [0, -1], causal=False),
        _case("five keys, not causal", 2, 5, [0, 1], causal=False),
        _case("all scores below 0, not causal", 3, 6, [1, 0],
              key_scores=[-9, -9, -8, -7, -5, -6], causal=False),
        _case("six keys, causal", 6, 6, [0, 1]),
    ),
)  # fmt: skip

# -- normalise --


def normalise(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    """Divide each row of acc_o [G, BV] by its sum of weights running_sum [G]; a row without weights
    becomes 0."""
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])


def _divide_always(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / running_sum[i]


def _divide_by_one_more(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / (running_sum[i] + 1.0)


def _divide_with_epsilon(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / (running_sum[i] + 1e-3)


def _above_zero(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] > 0, acc_o[i, j] / running_sum[i], 0)


def _more_than_one(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] > 1, acc_o[i, j] / running_sum[i], 0)


def _first_head(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[0] == 0, 0, acc_o[i, j] / running_sum[0])


def _not_divided(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] * 1.0


def _guard_the_product(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] * T.if_then_else(running_sum[i] > 0, running_sum[i], 0)


_NORMALISE = Exercise(
    name="normalise",
    statement=f"""
**The empty row.** After the loop, `acc_o` `[G, BV]` is the weighted sum of values and `running_sum`
`[G]` the sum of the weights, both fragments. A query whose slots are all empty has 0 in both, and
its output is to be exactly 0. A query that sees a NaN has NaN in both, and its output is to stay
NaN. Write the body of the macro: divide in place, over `for i, j in T.Parallel(G, BV)`. A choice
between two numbers is `T.if_then_else(condition, a, b)`.
{_HOW.format(2)}""",
    minutes=5,
    difficulty=1,
    solution=normalise,
    run=_run_with("normalise"),
    misconceptions=(
        Misconception(
            "dividing by a sum that may be 0",
            _divide_always,
            "0 / 0 is NaN, and one NaN in a layer's output is NaN everywhere a layer later.",
        ),
        Misconception(
            "asking whether the sum is above 0",
            _above_zero,
            "The empty row is 0 now. But a row that sees a NaN has NaN for its sum. Is NaN > 0?",
        ),
        Misconception(
            "adding 1 to every sum",
            _divide_by_one_more,
            "The empty row is 0 now. What has become of a row with one key, whose weight should "
            "be 1?",
        ),
        Misconception(
            "adding a small number to every sum",
            _divide_with_epsilon,
            "The empty row is 0 now, and every other row is a little too small: an error that no "
            "row needed. How small is the smallest sum of a row that is not empty?",
        ),
        Misconception(
            "taking a sum of 1 for an empty row",
            _more_than_one,
            "One visible key has the weight 1, and 1 is the sum.",
        ),
        Misconception(
            "dividing all heads by the first one's sum",
            _first_head,
            "Each row of the tile is a head, and has a sum of its own.",
        ),
        Misconception(
            "not dividing",
            _not_divided,
            "The weights of a row are to add up to 1. So far they add up to running_sum.",
        ),
        Misconception(
            "multiplying by the sum",
            _guard_the_product,
            "The empty row is right. A row with two equal keys should give the mean of their "
            "values.",
        ),
    ),
    cases=(
        _case("one query without a block", 1, 1, [-1, -1]),
        _case("one query with one key", 1, 1, [0, -1]),
        _case("one query with one key, which is NaN", 1, 1, [0, -1], key_scores=[math.nan]),
        _case("two keys of equal score", 2, 2, [-1, 0], key_scores=[3, 3]),
        _case("a query without a block among others", 5, 5,
              [[0, -1], [-1, 0], [-1, -1], [1, 0], [2, 0]]),
        _case("only blocks of the future", 3, 3, [[1, -1], [1, 1], [0, 1]]),
    ),
)  # fmt: skip

# -- fold_scale --


def fold_scale(scale: float | None, D: int) -> float:
    """The factor c for which exp2(c * score) is exp(scale * score); scale=None is D ** -0.5."""
    return (D**-0.5 if scale is None else scale) * LOG2_E


def _folded(change: str) -> Callable:
    def wrong(scale: float | None, D: int) -> float:
        default = {"1/D": 1 / D, "root": D**0.5}.get(change, D**-0.5)
        if change == "ignore":
            return default * LOG2_E
        if change == "draft":
            return default * LOG2_E if scale is None else scale
        if change == "both":
            return default * LOG2_E if scale is None else scale * default * LOG2_E
        base = {"twice": LOG2_E**2, "ln 2": 1 / LOG2_E, "none": 1.0}.get(change, LOG2_E)
        return (default if scale is None else scale) * base

    return wrong


_SCALE = Exercise(
    name="fold_scale",
    statement=f"""
**The caller's scale.** The kernel's powers are `exp2(c * score)`. Return the `c` for which that is
`exp(scale * score)`, for a caller's `scale` (any positive number) and for `scale=None`, which
stands for $1/\\sqrt{{D}}$. A Python function: it runs before the kernel is compiled. `LOG2_E` has
been imported.
{_HOW.format(2)}""",
    minutes=4,
    difficulty=1,
    solution=fold_scale,
    run=_run_with("fold_scale"),
    misconceptions=(
        Misconception(
            "a caller's scale in base e",
            _folded("draft"),
            "The default has its log2(e). Who gives it to a caller's number?",
        ),
        Misconception(
            "folding log2(e) in twice",
            _folded("twice"),
            "One change of base: exp(x) is exp2(x · log2 e).",
        ),
        Misconception(
            "ln 2 where log2(e) is meant",
            _folded("ln 2"),
            "They are each other's inverse. Is exp(1) = 2 to the power 1.44, or to the power 0.69?",
        ),
        Misconception(
            "powers of two where powers of e are meant",
            _folded("none"),
            "exp2(x) is 2 to the power x. The softmax is defined with e.",
        ),
        Misconception(
            "ignoring the caller's scale",
            _folded("ignore"),
            "A caller who says 0.3 means 0.3.",
        ),
        Misconception(
            "dividing by √D although the caller gave a scale",
            _folded("both"),
            "The caller's scale stands in place of the default, not beside it.",
        ),
        Misconception(
            "dividing by D",
            _folded("1/D"),
            "Chapter 01: a score's standard deviation grows with the square root of the width.",
        ),
    ),
    cases=(
        _case("no scale", 3, 3, [0, 1], scale=None),
        _case("a scale of 0.3", 3, 3, [0, 1], scale=0.3),
        _case("a scale of 1.5", 4, 4, [1, 0], scale=1.5),
    ),
)

# -- programs_per_sm --

_SHARED, _RESERVED, _MOST = 228 * 1024, 1024, 32


def programs_per_sm(
    G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int
) -> tuple[int, int]:
    """Bytes of shared memory of a program, and how many programs an SM of an H200 holds by that."""
    GT, BT, DT, DVT = (-(-n // 16) * 16 for n in (G, BS, D, DV))
    copies = max(num_stages, 1)  # of the tiles that the pipeline fills
    size = (GT * DT + copies * BT * (DT + DVT)) * itemsize
    return size, min(_MOST, _SHARED // (size + _RESERVED))


def _fits(change: str) -> Callable:
    def wrong(G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int) -> tuple[int, int]:
        to = 1 if change == "not padded" else 16
        GT, BT, DT, DVT = (-(-n // to) * to for n in (G, BS, D, DV))
        copies = {"one copy": 1, "zero copies": num_stages}.get(change, max(num_stages, 1))
        tiles = copies * BT * (DT if change == "no values" else DT + DVT)
        queries = GT * DT * (copies if change == "queries too" else 1)
        size = (queries + tiles) * (1 if change == "elements" else itemsize)
        if change == "accumulators":
            size += 4 * GT * (BT + DVT)
        reserved = 0 if change == "reserved" else _RESERVED
        programs = _SHARED / (size + reserved)
        programs = math.ceil(programs) if change == "rounded up" else math.floor(programs)
        return size, programs if change == "no limit" else min(_MOST, programs)

    return wrong


_PROGRAMS = Exercise(
    name="programs_per_sm",
    statement="""
How many programs of our kernel does one multiprocessor (SM) of an H200 hold at a time, by its
shared memory? A program keeps there `Q_shared` `[GT, DT]`, and for each stage of the pipeline (for
`num_stages` 0 as for 1) `K_shared` `[BT, DT]` and `V_shared` `[BT, DVT]`, in elements of `itemsize`
bytes; everything else is in registers. The sides are `G`, `D`, `BS`, `DV` rounded up to a multiple
of 16. An SM has 228 KiB, keeps 1 KiB for itself for each program, and holds at most 32 programs.
Return `(bytes of a program, programs)`.
""",
    minutes=6,
    difficulty=2,
    solution=programs_per_sm,
    misconceptions=(
        Misconception(
            "copying the queries for each stage, too",
            _fits("queries too"),
            "Stages exist so that the next block's tiles can arrive while this one's are read. "
            "Does the query group change from one block to the next?",
        ),
        Misconception(
            "one copy of the tiles for any number of stages",
            _fits("one copy"),
            "With two stages, two blocks are in shared memory at once.",
        ),
        Misconception(
            "no tiles at all without a stage",
            _fits("zero copies"),
            "num_stages=0 waits for each copy. It still has to land somewhere.",
        ),
        Misconception(
            "tiles that are not rounded up",
            _fits("not padded"),
            "One `mma` instruction takes 16 rows: a group of 4 heads has a tile of 16.",
        ),
        Misconception(
            "forgetting the values' tile",
            _fits("no values"),
            "Keys are not the only thing that a block brings.",
        ),
        Misconception(
            "counting elements instead of bytes",
            _fits("elements"),
            "A number in fp16 has two bytes, in fp32 four.",
        ),
        Misconception(
            "forgetting what the SM keeps for itself",
            _fits("reserved"),
            "Each program costs 1 KiB more than it asks for.",
        ),
        Misconception(
            "forgetting the limit of 32",
            _fits("no limit"),
            "Small programs do not fit in any number: an SM keeps books on 32 at most.",
        ),
    ),
    cases=(
        Case("the shape of the measurements", lambda: (16, 128, 128, 64, 1, 2)),
        Case("two stages", lambda: (16, 128, 128, 64, 2, 2)),
        Case("no stage, a group of 4", lambda: (4, 64, 64, 32, 0, 2)),
        Case("small tiles", lambda: (16, 16, 16, 16, 1, 2)),
        Case("unequal widths in fp32, three stages", lambda: (20, 72, 40, 24, 3, 4)),
        Case("tiles that just do not fit four times", lambda: (16, 112, 112, 112, 1, 2)),
    ),
)

EXERCISES = (_MAX, _SEEN, _NORMALISE, _SCALE, _PROGRAMS)
