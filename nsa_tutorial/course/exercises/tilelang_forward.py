"""Exercises of chapter 10: a first kernel that walks a list, three mistakes of the published draft,
each mended by the reader, the kernel from an empty cell, and how many programs fit."""

import ast
import contextlib
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from unittest import mock

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.diffs import Edited, Switches, diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import T
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.watching import watching
from nsa_tutorial.runtime import environment

if environment.detect().tilelang is not None:
    from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

TEXTS = Texts(__name__)

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
        from nsa_tutorial.bench.variants import tilelang_first_draft as draft

        if name in _MACROS and isinstance(function := inspect.unwrap(piece), FunctionType):
            _expect_numbers_compared(function)
            piece = T.macro(function)
        if name == "is_seen":
            piece = _with_an_answer(piece)
        (B, _, HQ, D), H, S = q.shape, k.shape[2], block_indices.shape[3]
        pieces = {**draft.MENDED, name: piece}
        sizes, options = (B, HQ, HQ // H, D, block_size, S), {"causal": causal, "scale": scale}
        with _explained():
            kernel = draft.build_kernel(*sizes, **options, dtype="float32", **pieces)
            launch = _compiled(kernel)
        o = torch.empty_like(q)
        launch(q, k, v, block_indices, o)
        return o

    return run


def _compiled(kernel: object) -> Callable:
    """A kernel for the CPU; two that come to the same text are compiled once."""
    text = kernel.script()
    if text not in _COMPILED:
        _COMPILED[text] = compile_for_cpu(kernel)
    return _COMPILED[text]


def _expect_numbers_compared(piece: FunctionType) -> None:
    """Python compares a whole tile with a number without a word, and always says False."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(piece)))
    except (OSError, SyntaxError):
        return
    tiles = inspect.getfullargspec(piece).args[:2]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                if isinstance(side, ast.Name) and side.id in tiles:
                    raise ValueError(
                        f"`{ast.unparse(node)}` compares the whole tile `{side.id}`, and Python "
                        "answers False for all rows. Which element belongs to head `i`?"
                    )


def _with_an_answer(is_seen: Callable) -> Callable:
    """TileLang takes None for a condition and ends the whole process; an error is kinder. So is to
    tell a reader whose logic is right that Python's `and` is all that is wrong."""

    @functools.wraps(is_seen)
    def condition(*arguments: object) -> object:
        try:
            seen = is_seen(*arguments)
        except ValueError as error:
            if "Cannot use and / or / not" in str(error) and _is_right_on_numbers(is_seen):
                raise ValueError("positions have no value yet, so no yes or no either") from error
            raise
        if seen is None:
            raise TypeError("is_seen returned None: does every branch have its `return`?")
        return seen

    return condition


def _is_right_on_numbers(is_seen: Callable) -> bool:
    """Whether Python itself, asked about plain numbers, gives the right answers."""
    numbers = [(query, key, end) for query in range(4) for key in range(6) for end in (3, 4)]
    try:
        return all(
            bool(is_seen(query, key, end, causal)) == (key < end and (query >= key or not causal))
            for query, key, end in numbers
            for causal in (False, True)
        )
    except Exception:
        return False  # it mixes Python's words with those of `T`


# What an error says, and what it means in a TileLang kernel.
_EXPLAINED = (
    (
        "name 'accum_dtype'",
        '`accum_dtype` is a name of the package. It stands for the text "float32", in quotes.',
    ),
    (
        "for @",
        "`@` multiplies no tiles. The product is `T.gemm(a, b, out)`, which adds to `out`.",
    ),
    (
        "tirx.And(",
        "`T.And` joins two conditions. `causal` is a Python bool: let an ordinary `if` choose.",
    ),
    (
        "Invalid reduce output shape",
        "`T.reduce_max(tile, fragment, dim=1)` reads the tile and writes the fragment. Which of "
        "`acc_s` and `scores_max` is which?",
    ),
    (
        "shape check failed",
        "`T.gemm(a, b, out)` multiplies rows of `a` by columns of `b`. The weights are in `acc_s` "
        "`[G, BS]` by now, the values are `[BS, D]`, and `acc_o` is `[G, D]`. Are these your three "
        "tiles? In which order do they fit, without a transpose?",
    ),
    (
        "2D or higher-order tensor",
        "`T.gemm` multiplies tiles with two axes, and one of yours has a single axis. Which tile "
        "holds a weight for each head and each key?",
    ),
    (
        "gemm() missing 1 required positional argument",
        "`T.gemm(a, b, out)` adds the product to its third argument. Which tile collects the "
        "weighted values?",
    ),
    (
        "Buffer Lists is 2-dimensional",
        "`Lists` is `[N, S]`. It takes two indices in one pair of brackets: `Lists[…, …]`.",
    ),
    ("attribute 'and_'", "TileLang joins two conditions with `T.And(a, b)`, with a capital A."),
    (
        "types.GenericAlias",
        "`list` is a type of Python's own. The kernel's argument is `Lists`, with a capital L.",
    ),
    ("name 'false'", "Python writes `False`, with a capital F."),
    ("name 'true'", "Python writes `True`, with a capital T."),
    ("where()", "A choice between two numbers is `T.if_then_else(condition, a, b)`."),
)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """In place of some errors, one that says what to write."""
    try:
        yield
    except (
        AssertionError, AttributeError, IndexError, NameError, TypeError, ValueError,
    ) as error:  # fmt: skip
        said = str(error)
        told = next((meaning for pattern, meaning in _EXPLAINED if pattern in said), None)
        if told is None:
            raise
        raise ValueError(told) from error


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


_PYTHON_DECIDES = "asking Python for what only the kernel knows"
_PYTHONS_MAX = (
    "The kernel's numbers have no value yet, but Python's `max` and `min`, like `and`, `or` and "
    "`not`, want to know them at once. What has `T` in their place?"
)

# -- listed_attention --


def listed_attention(G: int, D: int, BS: int) -> object:
    """The kernel whose programs attend to the blocks of one query's list, for one KV head."""
    N, M, S = T.dynamic("N"), T.dynamic("M"), T.dynamic("S")

    @T.prim_func
    def kernel(
        Q: T.Tensor([N, G, D], "float32"),
        K: T.Tensor([M, D], "float32"),
        V: T.Tensor([M, D], "float32"),
        Lists: T.Tensor([N, S], "int32"),
        Output: T.Tensor([N, G, D], "float32"),
    ):
        # -- locate the program --
        with T.Kernel(N, threads=32) as t:
            q_tile = T.alloc_shared([G, D], "float32")
            k_tile = T.alloc_shared([BS, D], "float32")
            v_tile = T.alloc_shared([BS, D], "float32")
            acc_s = T.alloc_fragment([G, BS], "float32")
            acc_o = T.alloc_fragment([G, D], "float32")
            scores_sum = T.alloc_fragment([G], "float32")
            running_sum = T.alloc_fragment([G], "float32")
            # -- load the query group --
            T.copy(Q[t, 0:G, 0:D], q_tile)
            T.clear(running_sum)
            T.clear(acc_o)
            # -- walk the list --
            for slot in T.serial(S):
                if Lists[t, slot] >= 0:
                    start = Lists[t, slot] * BS
                    T.copy(K[start : start + BS, 0:D], k_tile)
                    T.copy(V[start : start + BS, 0:D], v_tile)
                    T.clear(acc_s)
                    T.gemm(q_tile, k_tile, acc_s, transpose_B=True)  # [G, BS], scores
                    for g, j in T.Parallel(G, BS):
                        acc_s[g, j] = T.exp(acc_s[g, j])
                    T.reduce_sum(acc_s, scores_sum, dim=1)
                    for g in T.Parallel(G):
                        running_sum[g] += scores_sum[g]
                    T.gemm(acc_s, v_tile, acc_o)
            # -- normalise and store --
            for g, d in T.Parallel(G, D):
                acc_o[g, d] /= running_sum[g]
            T.copy(acc_o, Output[t, 0:G, 0:D])

    return kernel


# Its mistakes, in one kernel that is compiled once. Its last argument says which of them are made.
_SLIPS = (
    "position", "width", "slots", "slot", "query", "from 1", "open", "zero", "short", "inverted",
    "turned", "turned guard", "keys", "nothing", "anew",
)  # fmt: skip


def _has(flags: object, name: str) -> object:
    return flags[_SLIPS.index(name)] == 1


def _chosen(flags: object, right: object, **wrong: object) -> object:
    """What the kernel computes: the wrong one of a slip that is made, and otherwise the right
    one."""
    for name, value in wrong.items():
        right = T.if_then_else(_has(flags, name.replace("_", " ")), value, right)
    return right


def _is_walked(flags: object, lists: object, t: object, slot: object, S: object) -> object:
    """Whether the kernel loads what slot `slot` names."""
    block = _chosen(flags, lists[t, slot], turned_guard=lists[slot, t])
    is_there = _chosen(flags, block >= 0, open=block >= -1, zero=block > 0, inverted=block < 0)
    return T.And(is_there, T.Or(T.Not(_has(flags, "short")), lists[t, slot] < S))


def _start(
    flags: object, lists: object, t: object, slot: object, S: object, D: int, BS: int
) -> object:
    """The position at which the kernel takes a block to start."""
    block = lists[t, slot]
    block = _chosen(flags, block, turned=lists[slot, t], slot=slot, query=t, from_1=block - 1)
    return block * _chosen(flags, BS, position=1, width=D, slots=S)


_WITH_SLIPS = Edited(
    listed_attention,
    {
        'Output: T.Tensor([N, G, D], "float32"),': 'Output: T.Tensor([N, G, D], "float32"),'
        ' Flags: T.Tensor([len(_SLIPS)], "int32"),',
        # a variable: every address would hold the whole choice, and compile for seconds
        "T.clear(running_sum)": 'T.clear(running_sum); start = T.alloc_var("int32", init=0)',
        "Lists[t, slot] >= 0": "_is_walked(Flags, Lists, t, slot, S)",
        "Lists[t, slot] * BS": "_start(Flags, Lists, t, slot, S, D, BS)",
        "                    T.gemm(acc_s, v_tile, acc_o)\n": """
                    if _has(Flags, "anew"):
                        T.clear(acc_o)
                    if _has(Flags, "keys"):
                        T.gemm(acc_s, k_tile, acc_o)
                    elif T.Not(_has(Flags, "nothing")):
                        T.gemm(acc_s, v_tile, acc_o)
""",
    },
)


@dataclass(frozen=True)
class _Slipped:
    """The kernel with slips, and which of them are made."""

    kernel: object
    flags: Tensor


@functools.cache
def _with_slips(G: int, D: int, BS: int) -> object:
    return _WITH_SLIPS(G, D, BS)


def _listed(slips: frozenset[str], *sizes: int) -> _Slipped:
    flags = torch.tensor([name in slips for name in _SLIPS], dtype=torch.int32)
    return _Slipped(_with_slips(*sizes), flags)


_SLIP = Switches(
    _listed,
    exclusive=(
        {"position", "width", "slots"}, {"slot", "query", "from 1", "turned"},
        {"open", "zero", "short", "inverted"}, {"keys", "nothing"}, {"nothing", "anew"},
    ),
)  # fmt: skip

_G, _D, _BS = 2, 3, 4
_GAPS = 3


def _open_gaps(build: Callable) -> int:
    """How many `...` stand in a function's source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(build)))
    except (OSError, SyntaxError, TypeError):
        return 0
    return sum(isinstance(n, ast.Constant) and n.value is ... for n in ast.walk(tree))


def _run_listed(build: Callable, N: int, M: int, ids: list[int]) -> Tensor:
    """Compile what the reader's function makes, and run it with random queries, keys and values."""
    if _open_gaps(build) == _GAPS:
        raise NotImplementedError("the frame is as it was given")
    with _explained():
        kernel = build(_G, _D, _BS)
    if kernel is None:
        code = getattr(build, "__code__", None)
        if code is not None and any(isinstance(c, CodeType) for c in code.co_consts):
            raise TypeError("listed_attention defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    flags = ()
    if isinstance(kernel, _Slipped):
        kernel, flags = kernel.kernel, (kernel.flags,)
    if not hasattr(kernel, "script"):
        raise TypeError("the kernel is not decorated with @T.prim_func")
    g = torch.Generator().manual_seed(N + M)
    q, k, v = (torch.randn(n, generator=g) for n in ((N, _G, _D), (M, _D), (M, _D)))
    S = len(ids)
    memory = torch.full((S * (S + N),), -1, dtype=torch.int32)  # behind the lists: empty slots
    lists = memory[: N * S].view(N, S)
    lists[:] = torch.tensor(ids, dtype=torch.int32)
    o = torch.empty_like(q)
    try:
        launch = _compiled(kernel)
    except Exception as error:
        if "Expected boolean argument" not in str(error):
            raise
        told = "the guard is a number, and a kernel needs a condition, such as `a < b`"
        raise TypeError(told) from None
    launch(q, k, v, lists, o, *flags)
    return o


def _listed_case(name: str, N: int, M: int, ids: list[int]) -> Case:
    return Case(name, lambda: (N, M, ids), _why_not)


_LISTED = TEXTS.exercise(
    "listed_attention", minutes=6, difficulty=2, solution=listed_attention, run=_run_listed,
    tolerance=1e-4,
    misconceptions=diffs(listed_attention, [
        (_SLIP("position"), "taking a block's number for a position",
         "Block 2 begins at token 8 when blocks have 4 tokens. Where does your slice begin?"),
        (_SLIP("slot"), "taking the slot for the block",
         "The slot says where in the list to look. What stands there?"),
        (_SLIP("slot", "position"), "taking the slot for the block"),
        (_SLIP("query"), "taking the query for the block",
         "The program's number `t` says whose list to read. Which block does that list name?"),
        (_SLIP("from 1"), "counting blocks from 1",
         "Block 0 is the first one. At which token does your block 0 begin?"),
        (_SLIP("width"), "multiplying a block's number by the width",
         "The slice counts tokens. How many tokens has a block?"),
        (_SLIP("slots"), "multiplying a block's number by the number of slots",
         "`S` is the number of slots in a list. How many tokens has a block?"),
        (_SLIP("turned", "turned guard"), "the list's two indices in the other order",
         "`Lists` is `[N, S]`: a row for each query, a column for each slot. Which index says "
         "whose list it is?"),
        (_SLIP("turned"), "the list's two indices in the other order"),
        (_SLIP("turned guard"), "the list's two indices in the other order"),
        (_SLIP("inverted"), "an inverted condition",
         "Your kernel loads where the slot is empty, and skips the blocks. For which numbers "
         "should the `if` be true?"),
        (_SLIP("open"), "loading a block for an empty slot",
         "Your `if` lets an empty slot through. (`slot` is never negative. The −1 stands in the "
         "list.) Block −1 lies before the first token, so zeros are loaded. What is exp of a "
         "score of 0, and where does it go?"),
        (_SLIP("zero"), "taking block 0 for an empty slot",
         "The first block has number 0. Which numbers does your condition let through?"),
        (_SLIP("short"), "comparing a block's number with the number of slots",
         "A list of 2 slots may name block 7. What does `S` count?"),
        (_SLIP("keys"), "weighting the keys in place of the values",
         "The keys have done their work once the scores are there. What do the weights mix?"),
        (_SLIP("nothing"), "leaving the weighted values out",
         "`acc_o` is still 0 at the end. Which product fills it, block by block?"),
        (_SLIP("anew"), "starting `acc_o` anew for each block",
         "`acc_o` is cleared once, before the loop, and each block adds to it. After two "
         "blocks, what is left of the first one's values?"),
    ]),
    cases=(
        _listed_case("one query, one block", 1, 4, [0]),
        _listed_case("the last of three blocks", 1, 12, [2]),
        _listed_case("two blocks and an empty slot", 2, 12, [1, -1, 0]),
        _listed_case("five queries", 5, 20, [4, 0]),
    ),
)  # fmt: skip

# -- update_max --


def update_max(acc_s: object, scores_max: object) -> None:
    """Bring scores_max [G] up to date with the scores acc_s [G, BS] of this block; -inf before the
    first block."""
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)


_MAX_LINE = "T.reduce_max(acc_s, scores_max, dim=1, clear=False)"


def _set_each(maximum: str) -> str:
    return f"for g in T.Parallel(2):\n        scores_max[g] = {maximum}"


def _and_set_each(maximum: str) -> str:
    return f"{_MAX_LINE}\n    {_set_each(maximum)}"


_MAX = TEXTS.exercise(
    "update_max", minutes=3, difficulty=1, solution=update_max, run=_run_with("update_max"),
    tolerance=1e-4,
    misconceptions=diffs(update_max, [
        ("clear=False", "clear=True", "taking the maximum of this block alone",
         "What the earlier blocks had found is gone, whether a `fill` or `clear=True` wipes it "
         "out. If this block lies 100 below the one before, what is `scores_scale`?"),
        (_MAX_LINE, _and_set_each("T.max(scores_max[g], 0.0)"), "a maximum that is never below 0",
         "It runs, and it does not overflow. But measured from 0, the weight of a score of "
         "−200 is e^−200. What does fp32 make of it? And of its row's sum?"),
        (_MAX_LINE, _set_each("scores_max[g]"), "leaving the maximum where it starts",
         "`scores_max` is still −∞ here. (A sum that starts at −∞ stays there, too.) The "
         "scores are measured from it. What is a number minus −∞?"),
        (_MAX_LINE, "T.reduce_sum(acc_s, scores_max, dim=1)",
         "adding the scores up in place of their maximum",
         "Two scores of −200 add up to −400. Measured from there, each has the weight "
         "e^200. Which other `reduce` of `T` keeps the larger one?"),
        (_MAX_LINE, _set_each('T.if_then_else(scores_max[g] == -T.infinity("float32"), '
                              "T.max(acc_s[g, 0], acc_s[g, 1]), scores_max[g])"),
         "keeping the first block's maximum",
         "It never falls, which is half of it. What if a later block scores 100 nats more?"),
        (_MAX_LINE, _set_each("T.max(scores_max[g], acc_s[g, 0])"),
         "taking each block's first key for its maximum",
         "It runs from block to block, which is half of it. But in each block, you look at one "
         "key. What if the second key scores 200 more?"),
        ("dim=1", "dim=0", "taking the maximum over the heads in place of the keys",
         "`acc_s` is `[G, BS]`: a row for each head, a column for each key. Along which axis "
         "lie the scores that one softmax compares?"),
        (_MAX_LINE, _and_set_each("T.max(scores_max[0], scores_max[1])"),
         "one maximum for all heads of the group",
         "Each row of the tile is a head with a softmax of its own. What is left of a head "
         "whose scores all lie far below another's?"),
        ("reduce_max", "reduce_absmax", "taking the largest magnitude for the maximum",
         "Powers of e overflow on one side only. Measured from +60, what is left of a row whose "
         "scores are all −60?"),
        (_MAX_LINE, "scores_max = T.max(scores_max, acc_s)",
         "comparing whole tiles as if they were numbers",
         "`T.max` takes two numbers, and `acc_s` is a tile. Which function of `T` goes along "
         "a tile's axis?"),
        (_MAX_LINE, _set_each("max(scores_max[g], acc_s[g, 0])"), _PYTHON_DECIDES, _PYTHONS_MAX),
    ], pairs=False),
    cases=(
        _case("two keys, 200 apart", 1, 2, [0, -1, -1], key_scores=[200, 0], causal=False),
        _case("two keys, the second 200 above the first", 1, 2, [0, -1, -1],
              key_scores=[0, 200], causal=False),
        _case("two scores of about -60", 1, 2, [-1, 0, -1], key_scores=[-60, -61], causal=False),
        _case("two scores of about -200", 1, 2, [0, -1, -1],
              key_scores=[-201, -200], causal=False),
        _case("one head 200 above the other", 1, 2, [-1, -1, 0],
              key_scores=[200, 201], query_factors=(1, 0.01), causal=False),
        _case("five keys, scores of order one", 1, 5, [0, 1, 2], causal=False),
        _case("each block 100 below the one before", 1, 6, [0, 1, 2],
              key_scores=[200, 201, 100, 101, 0, 1], causal=False),
        _case("each block 100 above the one before", 1, 6, [0, 1, 2],
              key_scores=[0, 1, 100, 101, 200, 201], causal=False),
    ),
)  # fmt: skip

# -- is_seen --


def is_seen(query: object, key: object, num_keys: object, causal: bool) -> object:
    """Whether the query at position query sees the key at position key, of num_keys that there
    are."""
    return T.And(key < num_keys, query >= key) if causal else key < num_keys


_BOTH = "T.And(key < num_keys, query >= key)"


def _end(condition: str) -> dict[str, str]:
    """Another condition for the keys that exist."""
    return {"And(key < num_keys": f"And({condition}", "else key < num_keys": f"else {condition}"}


_PYTHONS_AND = (
    "Plain Python runs `is_seen`. Positions have no value yet, but `and`, `or`, `not`, `if` and "
    "`a < b < c` want a yes or no at once. (So does `&` where a comparison lacks its "
    "parentheses.) Which function of `T` joins two comparisons?"
)

_SEEN = TEXTS.exercise(
    "is_seen", minutes=5, difficulty=2, solution=is_seen, run=_run_with("is_seen", block_size=4),
    tolerance=1e-4,
    misconceptions=diffs(is_seen, [
        ({_BOTH: "query >= key", "else key < num_keys": "else True"},
         "forgetting the end where nothing is causal",
         "`T.copy` puts zeros past the end, and a key of zeros scores 0: a weight like any "
         "other. Is each key's own position compared with `num_keys`?"),
        (" if causal else key < num_keys", "", "hiding the future where nothing is causal",
         "With causal=False a query sees keys behind it as well. Which condition is left then?"),
        ("else key < num_keys", "else key < 0", "seeing nothing where nothing is causal",
         "With causal=False your condition is never true, and a row of −∞ becomes NaN. Is "
         "`causal` itself part of your condition? (`causal and …` is False then.) And which "
         "comparison says that a key exists?"),
        (_end("key <= num_keys"), "letting one key too many in",
         "There are `num_keys` keys, and the first has number 0. Which number has the last?"),
        (_end("key < num_keys - 1"), "leaving the last key out",
         "The last key has number `num_keys - 1`, and it is one that exists. Is it smaller "
         "than your limit?"),
        (_end("key // 4 * 4 + 4 <= num_keys"), "dropping the ragged block",
         "That is the guard `i_s + BS <= seq_len`: nothing is read past the end any more. And "
         "which keys are never read at all?"),
        (_end("key + 4 <= num_keys"), "taking each key for the start of a block",
         "`key` is one key's own position. There are 6 keys: what does `key + 4 <= num_keys` "
         "say of key 3, which exists?"),
        (_BOTH, "key < num_keys", "checking the end and forgetting the future",
         "With causal=True the last block of a list is often the query's own. What lies in "
         "its second half?"),
        ("query >= key", "query > key", "hiding the query's own key",
         "A query sees itself. What does the very first one see otherwise?"),
        ("query >= key", "key >= query", "seeing the future in place of the past",
         "Query 0 sees all keys here, and the last one only itself. Which of `query` and `key` "
         "should be the larger position?"),
        ("if causal", "if not causal", "taking causal the other way round",
         "The future is hidden where `causal` is False, and seen where it is True. Which of "
         "your two branches is which?"),
        (_BOTH, "key < num_keys and query >= key", _PYTHON_DECIDES,
         f"Your logic is right. {_PYTHONS_AND}"),
        (f"{_BOTH} if causal else key < num_keys",
         "key < num_keys and (not causal or query >= key)", _PYTHON_DECIDES),
        (_BOTH, "key < num_keys and query > key", _PYTHON_DECIDES, _PYTHONS_AND),
    ], pairs=False),
    cases=(
        _case("one key in a block of 4, not causal", 1, 1, [0, -1], causal=False),
        _case("four keys, which fill their block, not causal", 1, 4, [0, -1], causal=False),
        _case("six keys, all scores below 0, not causal", 1, 6, [1, 0],
              key_scores=[-9, -9, -8, -7, -5, -6], causal=False),
        _case("four keys, causal", 4, 4, [0, -1]),
        _case("six keys, causal", 6, 6, [0, 1]),
    ),
)  # fmt: skip

# -- normalise --


def normalise(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    """Divide each row of acc_o [G, BV] by its sum of weights running_sum [G]; a row without weights
    becomes 0."""
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])


_CHOICE = "T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])"


def _sum_of(head: str) -> dict[str, str]:
    """The sum of another head, in both places."""
    wrong = f"running_sum[{head}]"
    return {"running_sum[i] ==": f"{wrong} ==", "/ running_sum[i]": f"/ {wrong}"}


_NORMALISE = TEXTS.exercise(
    "normalise", minutes=5, difficulty=1, solution=normalise, run=_run_with("normalise"),
    tolerance=3e-7,
    misconceptions=diffs(normalise, [
        (_CHOICE, "acc_o[i, j] / running_sum[i]", "dividing by a sum that may be 0",
         "One NaN in a layer's output is NaN everywhere a layer later. What is 0 / 0?"),
        (_CHOICE, "T.if_then_else(running_sum[i] > 0, acc_o[i, j] / running_sum[i], 0)",
         "taking a row with a NaN for an empty one",
         "The empty row is 0 now, and so is a row that sees a NaN: an error has vanished. What "
         "does your condition say of NaN? (`NaN > 0` is False.)"),
        (_CHOICE, "acc_o[i, j] / (running_sum[i] + 1.0)", "adding 1 to every sum",
         "The empty row is 0 now. What has become of a row with one key, whose weight should "
         "be 1?"),
        (_CHOICE, "acc_o[i, j] / (running_sum[i] + 1e-3)", "adding a small number to every sum",
         "The empty row is 0 now. Every other row is a little too small, and none of them "
         "needed it. How small is the smallest sum of a row that is not empty?"),
        (_CHOICE, "acc_o[i, j] / (running_sum[i] + 1e-5)", "adding a small number to every sum"),
        (_CHOICE, "acc_o[i, j] / (running_sum[i] + 1e-6)", "adding a small number to every sum"),
        (_CHOICE, "T.if_then_else(running_sum[i] > 1, acc_o[i, j] / running_sum[i], 0)",
         "taking a sum of 1 for an empty row",
         "One visible key has the weight 1. What is the sum of its row?"),
        (_sum_of("0"), "dividing all heads by the first one's sum",
         "Each row of the tile is a head, and has a sum of its own. Which index counts heads?"),
        (_sum_of("j"), "taking the sum by channel in place of head",
         "`running_sum` is `[G]`: one number for each head. Which of `i` and `j` counts heads?"),
        (_CHOICE, "T.if_then_else(running_sum[i] == 0, acc_o[i, j] / running_sum[i], 0)",
         "the two choices in the wrong order",
         "The empty row is divided, and all others are 0. Which of the two comes first in "
         "`T.if_then_else(condition, a, b)`?"),
        ("== 0, 0", "== 0, 1", "giving an empty row 1 in place of 0",
         "A divisor of 1 would leave the empty row 0. What does your choice give there: the "
         "divisor, or the output itself?"),
        (_CHOICE, "acc_o[i, j]", "not dividing",
         "The weights of a row are to add up to 1. What do they add up to so far?"),
        (_CHOICE, "acc_o[i, j] * running_sum[i]", "multiplying by the sum",
         "The empty row is right. A row with two equal keys should give the mean of their "
         "values: what does it give?"),
        (f"acc_o[i, j] = {_CHOICE}", "acc_o = acc_o / running_sum",
         "dividing whole tiles as if they were numbers",
         "A tile is divided element by element, and written the same way: `acc_o[i, j] = …`. "
         "Which loop names all of its elements?"),
        (_CHOICE, "acc_o[i, j] / max(running_sum[i], 1.0)", _PYTHON_DECIDES, _PYTHONS_MAX),
    ], pairs=False),
    cases=(
        _case("one query without a block", 1, 1, [-1, -1]),
        _case("one query with one key", 1, 1, [0, -1]),
        _case("one query with one key, which is NaN", 1, 1, [0, -1], key_scores=[math.nan]),
        _case("two keys of equal score", 2, 2, [-1, 0], key_scores=[3, 3]),
        _case("two heads with different sums", 2, 2, [0, -1],
              key_scores=[3, 0], query_factors=(1, 0.1)),
        _case("only blocks of the future", 3, 3, [[1, -1], [1, 1], [0, 1]]),
        _case("a query without a block among others", 4, 4,
              [[0, -1], [-1, 0], [-1, -1], [1, 0]]),
    ),
)  # fmt: skip

# -- tilelang_selected_attention --


@functools.cache
def selected_kernel(G, D, DV, BS):
    """The kernel for groups of G heads, keys of width D, values of width DV and blocks of BS
    tokens, compiled once."""
    N, M, H, S = T.dynamic("N"), T.dynamic("M"), T.dynamic("H"), T.dynamic("S")

    @T.prim_func
    def kernel(
        Q: T.Tensor([N, H * G, D], "float32"),
        K: T.Tensor([M, H, D], "float32"),
        V: T.Tensor([M, H, DV], "float32"),
        Lists: T.Tensor([N, H, S], "int32"),
        Output: T.Tensor([N, H * G, DV], "float32"),
        LSE: T.Tensor([N, H * G], "float32"),
        scale: T.float32,
    ):
        # -- locate the program --
        with T.Kernel(N, H, threads=32) as (t, head):
            q_tile = T.alloc_shared([G, D], "float32")
            k_tile = T.alloc_shared([BS, D], "float32")
            v_tile = T.alloc_shared([BS, DV], "float32")
            acc_s = T.alloc_fragment([G, BS], "float32")
            acc_s_cast = T.alloc_shared([G, BS], "float32")
            acc_o = T.alloc_fragment([G, DV], "float32")
            scores_max = T.alloc_fragment([G], "float32")
            scores_max_prev = T.alloc_fragment([G], "float32")
            scores_scale = T.alloc_fragment([G], "float32")
            scores_sum = T.alloc_fragment([G], "float32")
            running_sum = T.alloc_fragment([G], "float32")
            position = M - N + t  # the queries are the last of the text
            first = head * G  # query head of the group

            # -- load the query group --
            T.copy(Q[t, first : first + G, 0:D], q_tile)

            # -- initialise --
            T.clear(acc_o)
            T.clear(running_sum)
            T.fill(scores_max, -T.infinity("float32"))

            for slot in T.serial(S):
                # -- guard --
                start = Lists[t, head, slot] * BS
                if T.And(start >= 0, start <= position):
                    # -- load the keys --
                    T.copy(K[start : start + BS, head, 0:D], k_tile)

                    # -- scores --
                    T.clear(acc_s)
                    T.gemm(q_tile, k_tile, acc_s, transpose_B=True)  # [G, BS]

                    # -- mask --
                    for g, j in T.Parallel(G, BS):
                        is_seen = start + j <= position
                        score = acc_s[g, j] * scale
                        acc_s[g, j] = T.if_then_else(is_seen, score, -T.infinity("float32"))

                    # -- online softmax --
                    T.copy(scores_max, scores_max_prev)
                    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                    for g in T.Parallel(G):
                        scores_scale[g] = T.exp(scores_max_prev[g] - scores_max[g])
                    for g, j in T.Parallel(G, BS):
                        acc_s[g, j] = T.exp(acc_s[g, j] - scores_max[g])
                    T.reduce_sum(acc_s, scores_sum, dim=1)
                    for g in T.Parallel(G):
                        running_sum[g] = running_sum[g] * scores_scale[g] + scores_sum[g]
                    for g, d in T.Parallel(G, DV):
                        acc_o[g, d] *= scores_scale[g]

                    # -- load the values --
                    T.copy(V[start : start + BS, head, 0:DV], v_tile)

                    # -- accumulate --
                    T.copy(acc_s, acc_s_cast)
                    T.gemm(acc_s_cast, v_tile, acc_o)

            # -- normalise and store --
            for g, d in T.Parallel(G, DV):
                acc_o[g, d] = T.if_then_else(running_sum[g] == 0, 0, acc_o[g, d] / running_sum[g])
            for g in T.Parallel(G):
                running_sum[g] = scores_max[g] + T.log(running_sum[g])  # -inf where nothing is seen
            T.copy(acc_o, Output[t, first : first + G, 0:DV])
            T.copy(running_sum, LSE[t, first : first + G])

    return compile_for_cpu(kernel)


def tilelang_selected_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, HQ, D] to the blocks of ids [N, H, S], over k [M, H, D] and v [M, H, DV].
    Returns o [N, HQ, DV] and lse [N, HQ]."""
    (N, HQ, D), (_, H, DV) = q.shape, v.shape
    kernel = selected_kernel(HQ // H, D, DV, block_size)
    o, lse = q.new_empty(N, HQ, DV), q.new_empty(N, HQ)
    kernel(q, k, v, ids, o, lse, scale)
    return o, lse


def _walked(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in PyTorch and phase by phase: a mistake made here costs no
    compilation."""
    (N, HQ, _), (M, H, DV), S, BS = q.shape, v.shape, ids.shape[2], block_size
    G = HQ // H
    o, lse = q.new_empty(N, HQ, DV), q.new_empty(N, HQ)
    for t, head in itertools.product(range(N), range(H)):
        position = M - N + t
        group = slice(head * G, head * G + G)
        acc_s = q.new_full([G, BS], math.nan)  # nothing was written there yet
        acc_o = q.new_zeros(G, DV)
        running_sum = q.new_zeros(G)
        scores_max = q.new_full([G], -math.inf)
        for slot in range(S):
            start = int(ids[t, head, slot]) * BS
            if start >= 0 and start <= position:
                k_tile = _rows(k[:, head], start, BS)
                acc_s = q[t, group] @ k_tile.T
                is_seen = start + torch.arange(BS) <= position
                acc_s = torch.where(is_seen, acc_s * scale, -math.inf)
                scores_max_prev = scores_max
                scores_max = torch.maximum(scores_max_prev, acc_s.amax(1))
                scores_scale = torch.exp(scores_max_prev - scores_max)
                acc_s = torch.exp(acc_s - scores_max[:, None])
                running_sum = running_sum * scores_scale + acc_s.sum(1)
                acc_o = acc_o * scores_scale[:, None]
                v_tile = _rows(v[:, head], start, BS)
                acc_o = acc_o + acc_s @ v_tile
        o[t, group] = torch.where(running_sum[:, None] == 0, 0, acc_o / running_sum[:, None])
        lse[t, group] = scores_max + running_sum.log()
    return o, lse


def _rows(x: Tensor, start: int, count: int) -> Tensor:
    """`count` rows of `x` from `start` on, as `T.copy` brings them: zeros where there are none."""
    index = torch.arange(start, start + count)
    is_there = (index >= 0) & (index < len(x))
    return torch.where(is_there[:, None], x[index.clamp(0, len(x) - 1)], 0)


class SharedPlace(Exception):
    """Threads or programs of a kernel write to one place, and on a GPU they do so at once."""


def _run_built(
    attempt: Callable, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block_size: int, scale: float,
    asks_lse: bool,
) -> object:  # fmt: skip
    """What an attempt makes of a case: both results, or the first one while `lse` is not asked
    for.

    Raises:
        SharedPlace: if the kernel races.
    """
    with _explained(), _unset_is_nan(), watching() as seen:
        result = attempt(q, k, v, ids, block_size, scale)
    if seen.faults:
        raise SharedPlace(
            f"{seen.faults[0]}. A CPU runs them one after the other, a GPU at the same time. "
            "`T.reduce_sum` and `T.reduce_max` add up without a race."
        )
    return result[0] if isinstance(result, tuple) and result and not asks_lse else result


@contextlib.contextmanager
def _unset_is_nan() -> Iterator[None]:
    """What is compiled here holds NaN in each tile until something is written there."""
    from nsa_tutorial.runtime import tilelang_cpu

    def serialise(kernel: object) -> object:
        return plain(tilelang_cpu.unset_is_infinite(kernel))

    plain = tilelang_cpu.serialise
    with mock.patch.object(tilelang_cpu, "serialise", serialise):
        yield


def _built_case(
    name: str, M: int, lists: list, *, G: int = 2, scores: list[float] | None = None,
    asks_lse: bool = False,
) -> Case:  # fmt: skip
    """Keys of width 3 and values of width 2 in blocks of 4 tokens, scale 0.5.

    Args:
        name, M, G: the case, its keys, and the query heads of a KV head.
        lists: `[N, H, S]`, for the last `N` positions.
        scores: of each key, the same for all queries; None draws queries and keys.
        asks_lse: whether `lse` is judged, too.
    """

    def arguments() -> tuple:
        ids = torch.tensor(lists, dtype=torch.int32)
        N, H, _ = ids.shape
        g = torch.Generator().manual_seed(M)
        q, k, v = (torch.randn(n, h, d, generator=g)
                   for n, h, d in ((N, H * G, 3), (M, H, 3), (M, H, 2)))  # fmt: skip
        if scores is not None:
            q, k = torch.zeros_like(q), torch.zeros_like(k)
            q[..., 0], k[..., 0] = 2.0, torch.tensor(scores)[:, None]
        return q, k, v, ids, 4, 0.5, asks_lse

    return Case(name, arguments, _why_not)


def _each(*rows: list[int]) -> list[list[list[int]]]:
    """Lists of queries with one KV head."""
    return [[row] for row in rows]


# blocks of 4 keys, for the last three of six positions: block 2 lies behind them all
_TWO_HEADS = [[[0, -1, -1], [0, 1, -1]], [[1, 0, -1], [1, -1, 0]], [[2, 0, 1], [0, 2, -1]]]
_NOTHING_SEEN = [[[-1, -1, -1], [0, 1, -1]], [[0, -1, 2], [-1, -1, -1]], [[2, 0, -1], [0, -1, -1]]]

_BUILT = TEXTS.exercise(
    "tilelang_selected_attention", minutes=25, difficulty=3, solution=tilelang_selected_attention,
    parts=(selected_kernel,), launches="tilelang", run=_run_built, returns=("o", "lse"),
    tolerance=1e-4,
    forbidden=(
        *((f"torch.{name}", f"PyTorch's {name}") for name in ("softmax", "logsumexp", "einsum")),
        *((f"torch.{name}", "a product of PyTorch") for name in ("matmul", "__matmul__", "bmm")),
        ("nsa_tutorial.ops", "the course's own operator"),
        ("nsa_tutorial.kernels", "the course's own kernel"),
        ("nsa_tutorial.sparse", "the course's own function"),
    ),
    stages=(
        Stage("one block", (
            _built_case("one query, the first of three blocks", 12, _each([0])),
            _built_case("one query, the second of three blocks", 12, _each([1])),
        )),
        Stage("many blocks", (
            _built_case("one query, three blocks", 12, _each([1, 0, 2])),
            _built_case("each block 100 above the one before", 12, _each([0, 1, 2]),
                        scores=[0, 1, 1, 0, 100, 101, 101, 100, 200, 201, 201, 200]),
            _built_case("each block 100 below the one before", 12, _each([2, 1, 0]),
                        scores=[0, 1, 1, 0, 100, 101, 101, 100, 200, 201, 201, 200]),
            _built_case("all scores 200 below 0", 12, _each([0, 2, 1]),
                        scores=[-200, -201, -202, -200, -201, -199, -200, -203, *[-200] * 4]),
        )),
        Stage("KV heads", (
            _built_case("two KV heads with lists of their own", 12, [[[0, 1, 2], [2, 2, 1]]]),
        )),
        Stage("-1 in the list", (
            _built_case("an empty slot between two blocks", 12, [[[0, -1, 2], [1, 0, -1]]]),
            _built_case("an empty slot in front, all scores below 0", 12,
                        [[[-1, 0, 1], [-1, 1, -1]]], scores=[-9, -8, -7, -9, *[-8] * 8]),
        )),
        Stage("the future", (
            _built_case("three queries and three keys", 3, [[[0], [0]]] * 3),
            _built_case("the last three of six positions", 6, _TWO_HEADS),
            _built_case("a key of the future, 200 above the others", 6, _each([1, 0], [0, 1]),
                        scores=[0, 1, 0, 1, 0, 200]),
        )),
        Stage("nothing seen", (
            _built_case("queries whose slots are all empty", 6, _NOTHING_SEEN),
            _built_case("a query that lists only the future", 6,
                        [[[-1, 2, -1], [0, -1, -1]], [[2, 1, 0], [2, -1, 2]],
                         [[0, 1, -1], [1, -1, 0]]]),
        )),
        Stage("lse", (
            _built_case("one query, three blocks, and its lse", 12, _each([1, 0, 2]),
                        asks_lse=True),
            _built_case("lse of queries that see nothing, too", 6, _NOTHING_SEEN, asks_lse=True),
        )),
    ),
    misconceptions=diffs(_walked, [
        ("* scale, -math.inf)", ", -math.inf)", "scores without the scale",
         "A score is `scale * q · k`. Where does `scale` come into your kernel?"),
        ("int(ids[t, head, slot]) * BS", "int(ids[t, head, slot])",
         "taking a block's number for a position",
         "Block 2 begins at token 8 when blocks have 4 tokens. Where does your slice begin?"),
        ("int(ids[t, head, slot])", "slot", "taking the slot for the block",
         "The slot says where in the list to look. What stands there?"),
        ("acc_s = q[t, group]", "acc_s = acc_s + q[t, group]",
         "a tile that is not set before it is read",
         "A new tile holds anything. `T.gemm` adds to its third argument, and `clear=False` keeps "
         "what was there. Where do you set `acc_s`, `acc_o`, `running_sum` and `scores_max`?"),
        ("torch.maximum(scores_max_prev, acc_s.amax(1))", "acc_s.amax(1)",
         "taking the maximum of this block alone",
         "`T.reduce_max` clears the fragment unless you say `clear=False`. If this block lies 100 "
         "below the one before, what is `scores_scale`?"),
        ("torch.maximum(scores_max_prev, acc_s.amax(1))", "torch.zeros(G)",
         "powers of e that no maximum holds down",
         "e^200 is more than fp32 can hold. From what are the scores of a row measured?"),
        ("scores_max = q.new_full([G], -math.inf)", "scores_max = q.new_zeros(G)",
         "a maximum that begins at 0",
         "If all scores are -200, the largest is -200. What does your maximum begin with?"),
        ({"acc_s = torch.where(is_seen, acc_s * scale, -math.inf)": "acc_s = acc_s * scale",
          "acc_s = torch.exp(acc_s - scores_max[:, None])":
          "acc_s = torch.where(is_seen, torch.exp(acc_s - scores_max[:, None]), 0)"},
         "masking the weights in place of the scores",
         "A hidden key has no weight, but its score still counts for the maximum. If it lies 200 "
         "above the others, what is left of their weights?"),
        ("running_sum * scores_scale", "running_sum", "a sum of weights that is not rescaled",
         "What was added before was measured from the old maximum. What brings it to the new one?"),
        ("acc_o * scores_scale[:, None]", "acc_o", "an output that is not rescaled",
         "`running_sum` shrinks when the maximum rises. What else was measured from the old one?"),
        ({"running_sum * scores_scale": "running_sum", "acc_o * scores_scale[:, None]": "acc_o"},
         "rescaling nothing",
         "Weights of two blocks are measured from two maxima. What takes one to the other?"),
        ("acc_o + acc_s @ v_tile", "acc_s @ v_tile", "starting `acc_o` anew for each block",
         "After two blocks, what is left of the first one's values?"),
        ("int(ids[t, head, slot])", "int(ids[t, 0, slot])", "one list for all KV heads",
         "`Lists` is `[N, H, S]`. Which index says for which KV head the list is?"),
        ({"_rows(k[:, head]": "_rows(k[:, 0]", "_rows(v[:, head]": "_rows(v[:, 0]"},
         "the keys and values of the first KV head for all",
         "The grid has two axes, queries and KV heads. Where does `head` come into your slices?"),
        ("slice(head * G, head * G + G)", "slice(head, None, H)",
         "query heads that go to the wrong KV head",
         "The heads of a group are neighbours: query heads `head * G` to `head * G + G - 1`."),
        ("acc_s = q[t, group]", "acc_s = q[t, :G]", "the first group's queries for every KV head",
         "KV head 1 serves query heads `G` to `2 G - 1`. Which heads does its program load?"),
        ("start >= 0 and start <= position", "start <= position",
         "loading a block for an empty slot",
         "Block −1 lies before the first token, so zeros are loaded, and zeros score 0: a weight "
         "like any other. Which slots may your `if` let through?"),
        ("start >= 0", "start > 0", "taking block 0 for an empty slot",
         "The first block has number 0. Which numbers does your condition let through?"),
        ("is_seen = start + torch.arange(BS) <= position",
         "is_seen = start + torch.arange(BS) < M", "giving weight to keys of the future",
         "The query's own block holds keys behind it. Up to which position does query `t` see?"),
        ("is_seen = start + torch.arange(BS) <= position", "is_seen = torch.ones(BS).bool()",
         "giving weight to keys of the future"),
        ("<= position\n", "< position\n", "hiding the query's own key",
         "A query sees itself. Is the key at its own position let through?"),
        ("position = M - N + t", "position = t", "taking the queries for the first positions",
         "There are `M` keys and `N` queries, and the last query stands at the last key. At which "
         "position stands query `t`?"),
        ("start + torch.arange(BS) <=", "torch.arange(BS) <=",
         "comparing a place in the block with a position",
         "`j` counts from the block's first token. At which position lies key `j` of this block?"),
        ("start >= 0 and start <= position", "start >= 0",
         "NaN from a block of the future",
         "A block with no visible key has a maximum of −∞. If no block came before, what is "
         "−∞ − −∞? Which blocks should your `if` skip?"),
        ("torch.where(running_sum[:, None] == 0, 0, acc_o / running_sum[:, None])",
         "acc_o / running_sum[:, None]", "0 / 0 where nothing is seen",
         "A query that saw no block has a sum of 0. What should its output be?"),
        ("torch.where(running_sum[:, None] == 0, 0, acc_o / running_sum[:, None])", "acc_o",
         "not dividing",
         "The weights of a row are to add up to 1. What do they add up to so far?"),
        ("scores_max + running_sum.log()", "running_sum.log()", "an lse without the maximum",
         "`running_sum` was measured from `scores_max`. What does the logarithm of the whole sum "
         "have on top?"),
        ("scores_max + running_sum.log()", "scores_max", "the maximum in place of lse",
         "The lse of three equal scores is the score plus ln 3. Which of your numbers knows of the "
         "three?"),
        ("scores_max + running_sum.log()", "scores_max / scale + running_sum.log()",
         "an lse with a maximum that is not scaled",
         "Both parts of `lse` belong to the scaled scores. Was `scores_max` taken before or after "
         "the scale?"),
        ("scores_max + running_sum.log()", "scores_max + running_sum",
         "an lse without its logarithm",
         "`lse` is the logarithm of a sum. Of which of the two parts do you have to take it?"),
        ("scores_max + running_sum.log()",
         "torch.where(running_sum == 0, 0, scores_max + running_sum.log())",
         "an lse of 0 where nothing is seen",
         "The sum over no keys is 0. What is its logarithm?"),
        ("scores_max + running_sum.log()", "(scores_max + running_sum.log()) / math.log(2)",
         "an lse in base two",
         "`lse` is a natural logarithm. With `exp2` inside, what turns base two into base e?"),
    ]),
)  # fmt: skip

# -- programs_per_sm --


def programs_per_sm(
    G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int
) -> tuple[int, int]:
    """Bytes of shared memory of a program, and how many programs an SM of an H200 holds by that."""
    GT, BT, DT, DVT = (-(-n // 16) * 16 for n in (G, BS, D, DV))
    copies = max(num_stages, 1)  # of the tiles that the pipeline fills
    elements = GT * DT + copies * BT * (DT + DVT)
    size = elements * itemsize
    programs = 228 * 1024 // (size + 1024)  # an SM keeps 1 KiB for each program
    return size, programs


_ROUNDED_UP = "-(-n // 16) * 16"

_PROGRAMS = TEXTS.exercise(
    "programs_per_sm", minutes=6, difficulty=2, solution=programs_per_sm,
    misconceptions=diffs(programs_per_sm, [
        ("GT * DT + ", "copies * GT * DT + ", "copying the queries for each stage, too",
         "Stages exist so that the next block's tiles can arrive while this one's are read. "
         "Does the query group change from one block to the next?"),
        ("max(num_stages, 1)", "1", "one copy of the tiles for any number of stages",
         "With two stages, two blocks are in shared memory at once. How many tiles of keys is "
         "that?"),
        ("max(num_stages, 1)", "num_stages", "no tiles at all without a stage",
         "`num_stages=0` waits for each copy. Where does the copy land?"),
        ("max(num_stages, 1)", "num_stages + 1",
         "one more copy of the tiles than there are stages",
         "With one stage, one block's tiles are in shared memory at a time. And with two?"),
        (_ROUNDED_UP, "n", "tiles that are not rounded up",
         "One `mma` instruction takes 16 rows. How many rows has the tile of a group of 4 heads?"),
        (f"{_ROUNDED_UP} for n in (G, BS", "n for n in (-(-G // 16) * 16, BS",
         "rounding up nothing but the group",
         "The group's tile has its 16 rows now. How wide is a key of 72 numbers, and how long a "
         "block of 24 tokens?"),
        (_ROUNDED_UP, "max(16, 1 << (n - 1).bit_length())", "rounding up to a power of two",
         "So does the draft. Ours rounds up to a multiple of 16: what becomes of 192?"),
        (_ROUNDED_UP, "n // 16 * 16", "rounding down to a multiple of 16",
         "A tile has to hold all of the group. What is 4 // 16?"),
        (_ROUNDED_UP, "n // 16 * 16 + 16", "rounding up what is a multiple of 16 already",
         "A side of 64 is a multiple of 16 as it is. What does your formula make of it?"),
        ("(DT + DVT)", "DT", "forgetting the values' tile",
         "Keys are not the only thing that a block brings. What do the weights multiply?"),
        ("(DT + DVT)", "(DT + DT)", "taking values to be as wide as keys",
         "They are in most models, but here keys may be 192 wide and values 128. Which of `D` and "
         "`DV` belongs to which tile?"),
        ("GT * DT + ", "", "forgetting the queries' tile",
         "The program reads its queries again for every block. Where do they lie meanwhile?"),
        ("elements = ", "elements = GT * BT + ", "counting a tile of weights",
         "The draft sends its weights through shared memory. Where do ours stay between the two "
         "products?"),
        ("copies * BT", "GT * DVT + copies * BT", "counting a tile for the output",
         "The draft stages its output in shared memory. From where does our kernel store?"),
        ("size = ", "size = 4 * GT * (BT + DVT) + ", "counting the fragments",
         "Scores and accumulator are tiles, too, made by `T.alloc_fragment`. In which memory?"),
        (" * itemsize", "", "counting elements instead of bytes",
         "A number in fp16 has two bytes, in fp32 four. Where does `itemsize` come in?"),
        ("(size + 1024)", "size", "forgetting what the SM keeps for itself",
         "Each program costs 1 KiB more than it asks for. How often does the SM pay that?"),
        ("return size", "return size + 1024", "adding the SM's own KiB to the program's bytes",
         "The KiB counts when programs are packed into an SM, and it does here. Is it one of the "
         "program's tiles?"),
        ({"228 * 1024": "228 * 1000", "(size + 1024)": "(size + 1000)"},
         "taking a KiB for 1,000 bytes",
         "Memory is counted in powers of two. How many bytes has a KiB?"),
        ({" // (": " / (", ", programs": ", math.ceil(programs)"},
         "rounding up a program that fits in part",
         "A program runs with all of its memory or not at all. How many whole ones fit?"),
        ({" // (": " / (", ", programs": ", round(programs)"},
         "rounding to the nearest number of programs",
         "Nine tenths of a program do not run. How many whole ones fit?"),
        (" // (", " / (", "a fraction of a program",
         "A program runs with all of its memory or not at all. Is your division `/` or `//`?"),
        ("size, programs", "programs, size", "the two results in the other order",
         "Both numbers may well be right. Which is to be returned first?"),
    ]),
    cases=(
        Case("the shape of the measurements", lambda: (16, 128, 128, 64, 1, 2)),
        Case("a group of 4", lambda: (4, 64, 64, 48, 1, 2)),
        Case("small tiles", lambda: (16, 16, 16, 16, 1, 2)),
        Case("keys wider than values", lambda: (16, 192, 128, 64, 1, 2)),
        Case("two stages", lambda: (16, 128, 128, 64, 2, 2)),
        Case("no stage", lambda: (16, 128, 128, 64, 0, 2)),
        Case("unequal widths in fp32, three stages", lambda: (20, 72, 40, 24, 3, 4)),
    ),
)  # fmt: skip

EXERCISES = (_LISTED, _MAX, _BUILT, _SEEN, _NORMALISE, _PROGRAMS)

# -- the chapter's experiments --


def first_kernel_is_right(tokens: int, causal: bool) -> bool:
    """Whether `listed_attention(2, 8, 4)` gives what the reference gives, for `tokens` queries and
    keys and the list `[1, -1, 0]`."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, n, 8, generator=g) for n in (2, 1, 1))
    ids = torch.tensor([1, -1, 0], dtype=torch.int32).expand(1, tokens, 1, 3).contiguous()
    found = torch.empty_like(q[0])
    _compiled(listed_attention(2, 8, 4))(q[0], k[0, :, 0], v[0, :, 0], ids[0, :, 0], found)
    expected = ops.selected_attention(q, k, v, ids, block_size=4, scale=1.0, causal=causal)
    return (found - expected[0]).abs().max().item() < 1e-5


def with_mistake(name: str, key_scores: list[float], ids: list[int]) -> str:
    """What the draft gives with its mistake `name` alone, and what is right: one query scores key
    `j` with `key_scores[j]`, and value `j` is `[2 j + 1, 2 j + 2]`, in blocks of 2 tokens."""
    from nsa_tutorial.bench.variants import tilelang_first_draft as draft

    case = _case(name, 1, len(key_scores), ids, key_scores=key_scores, causal=False)
    q, k, _, lists, *_ = case.arguments()
    v = torch.arange(2.0 * len(key_scores)).reshape(k.shape) + 1
    options = {"block_size": 2, "scale": 1.0, "causal": False}
    pieces = {**draft.MENDED, name: draft.MISTAKES[name]}
    found = draft.run(q, k, v, lists, **options, **pieces)
    right = ops.selected_attention(q, k, v, lists, **options)
    found, right = ([round(x, 3) for x in o[0, 0, 0].tolist()] for o in (found, right))
    return f"draft {found}, should be {right}"


# -- two mistakes at once --

DOUBLES = (
    Double(
        "update_max",
        Edited(update_max, {_MAX_LINE: f"T.fill(scores_max, 0)\n    {_MAX_LINE}"}),
        ("taking the maximum of this block alone", "a maximum that is never below 0"),
    ),
    Double(
        "is_seen",
        Edited(is_seen, _end("key <= num_keys") | {"query >= key": "query > key"}),
        ("letting one key too many in", "hiding the query's own key"),
    ),
    Double(
        "normalise",
        Edited(normalise, {_CHOICE: "acc_o[i, j] / running_sum[0]"}),
        ("dividing by a sum that may be 0", "dividing all heads by the first one's sum"),
    ),
    *(
        Double("programs_per_sm", names=names)
        for names in (
            ("tiles that are not rounded up", "counting elements instead of bytes"),
            ("forgetting the values' tile", "counting elements instead of bytes"),
            ("no tiles at all without a stage", "forgetting what the SM keeps for itself"),
        )
    ),
)

# -- what the chapter warns of --

TRAPS = TEXTS.traps

# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    gigabytes_loaded={"unit": "GB", "tolerance": 0.02},
    fastest_stages={"choices": (0, 1, 2, 3)},
)
