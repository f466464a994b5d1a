"""Exercises of chapter 10: a first kernel that walks a list, three mistakes of the published draft,
each mended by the reader, and how many programs fit."""

import ast
import contextlib
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import T
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]

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

        if name in _MACROS and isinstance(piece, FunctionType):
            _expect_numbers_compared(piece)
            piece = T.macro(piece)
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
    from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

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


_HOW = """
The check puts your function into the draft, whose other pieces are right, and compiles it for the
CPU (a second or two). It runs small inputs: two query heads on one KV head, blocks of {} tokens.
"""

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


_LISTED_SLIPS = (
    "position", "width", "slots", "slot", "query", "from 1", "open", "zero", "short", "inverted",
    "turned", "turned guard", "keys", "nothing", "anew",
)  # fmt: skip


@dataclass(frozen=True)
class _Slipped:
    """A kernel with all slips, and which of them are on: compiled once for all of them."""

    kernel: object
    flags: Tensor


def _listed(slips: Slips, G: int, D: int, BS: int) -> _Slipped:
    """`listed_attention` with slips."""
    flags = torch.tensor([name in slips for name in _LISTED_SLIPS], dtype=torch.int32)
    return _Slipped(_kernel_with_slips(G, D, BS), flags)


@functools.cache
def _kernel_with_slips(G: int, D: int, BS: int) -> object:
    """`listed_attention`, whose last argument says for each of `_LISTED_SLIPS` whether it is on."""
    N, M, S = T.dynamic("N"), T.dynamic("M"), T.dynamic("S")
    number = {name: i for i, name in enumerate(_LISTED_SLIPS)}

    @T.prim_func
    def kernel(
        Q: T.Tensor([N, G, D], "float32"),
        K: T.Tensor([M, D], "float32"),
        V: T.Tensor([M, D], "float32"),
        Lists: T.Tensor([N, S], "int32"),
        Output: T.Tensor([N, G, D], "float32"),
        Flags: T.Tensor([len(_LISTED_SLIPS)], "int32"),
    ):
        with T.Kernel(N, threads=32) as t:
            q_tile = T.alloc_shared([G, D], "float32")
            k_tile = T.alloc_shared([BS, D], "float32")
            v_tile = T.alloc_shared([BS, D], "float32")
            acc_s = T.alloc_fragment([G, BS], "float32")
            acc_o = T.alloc_fragment([G, D], "float32")
            scores_sum = T.alloc_fragment([G], "float32")
            running_sum = T.alloc_fragment([G], "float32")
            # a variable: every address would hold its value, and the compiler would take seconds
            start = T.alloc_var("int32", init=0)
            T.copy(Q[t, 0:G, 0:D], q_tile)
            T.clear(running_sum)
            T.clear(acc_o)
            for slot in T.serial(S):
                guarded = T.if_then_else(
                    Flags[number["turned guard"]] == 1, Lists[slot, t], Lists[t, slot]
                )
                in_slot = T.if_then_else(
                    Flags[number["turned"]] == 1, Lists[slot, t], Lists[t, slot]
                )
                first = Flags[number["zero"]] - Flags[number["open"]]
                is_there = T.if_then_else(
                    Flags[number["inverted"]] == 1, guarded < 0, guarded >= first
                )
                if T.And(is_there, T.Or(Flags[number["short"]] == 0, in_slot < S)):
                    block = T.if_then_else(
                        Flags[number["query"]] == 1,
                        t,
                        T.if_then_else(Flags[number["slot"]] == 1, slot, in_slot),
                    )
                    step = T.if_then_else(
                        Flags[number["position"]] == 1,
                        1,
                        T.if_then_else(
                            Flags[number["width"]] == 1,
                            D,
                            T.if_then_else(Flags[number["slots"]] == 1, S, BS),
                        ),
                    )
                    start = (block - Flags[number["from 1"]]) * step
                    T.copy(K[start : start + BS, 0:D], k_tile)
                    T.copy(V[start : start + BS, 0:D], v_tile)
                    T.clear(acc_s)
                    T.gemm(q_tile, k_tile, acc_s, transpose_B=True)
                    for g, j in T.Parallel(G, BS):
                        acc_s[g, j] = T.exp(acc_s[g, j])
                    T.reduce_sum(acc_s, scores_sum, dim=1)
                    for g in T.Parallel(G):
                        running_sum[g] += scores_sum[g]
                    if Flags[number["anew"]] == 1:
                        T.clear(acc_o)
                    if Flags[number["keys"]] == 1:
                        T.gemm(acc_s, k_tile, acc_o)
                    elif Flags[number["nothing"]] == 0:
                        T.gemm(acc_s, v_tile, acc_o)
            for g, d in T.Parallel(G, D):
                acc_o[g, d] /= running_sum[g]
            T.copy(acc_o, Output[t, 0:G, 0:D])

    return kernel


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
    "listed_attention",
    minutes=6,
    difficulty=2,
    solution=listed_attention,
    run=_run_listed,
    tolerance=1e-4,
    misconceptions=(
        Misconception(
            "taking a block's number for a position",
            slip(_listed, "position"),
            "Block 2 begins at token 8 when blocks have 4 tokens. Where does your slice begin?",
        ),
        Misconception(
            "taking the slot for the block",
            slip(_listed, "slot"),
            "The slot says where in the list to look. What stands there?",
        ),
        Misconception(
            "taking the slot for the block",
            Wrong(_listed, frozenset({"slot", "position"})),
            "The slot says where in the list to look. What stands there?",
        ),
        Misconception(
            "taking the query for the block",
            slip(_listed, "query"),
            "The program's number `t` says whose list to read. Which block does that list name?",
        ),
        Misconception(
            "counting blocks from 1",
            slip(_listed, "from 1"),
            "Block 0 is the first one. At which token does your block 0 begin?",
        ),
        Misconception(
            "multiplying a block's number by the width",
            slip(_listed, "width"),
            "The slice counts tokens. How many tokens has a block?",
        ),
        Misconception(
            "multiplying a block's number by the number of slots",
            slip(_listed, "slots"),
            "`S` is the number of slots in a list. How many tokens has a block?",
        ),
        *(
            Misconception(
                "the list's two indices in the other order",
                Wrong(_listed, slips),
                "`Lists` is `[N, S]`: a row for each query, a column for each slot. Which index "
                "says whose list it is?",
            )
            for slips in map(frozenset, ({"turned", "turned guard"}, {"turned"}, {"turned guard"}))
        ),
        Misconception(
            "an inverted condition",
            slip(_listed, "inverted"),
            "Your kernel loads where the slot is empty, and skips the blocks. For which numbers "
            "should the `if` be true?",
        ),
        Misconception(
            "loading a block for an empty slot",
            slip(_listed, "open"),
            "Your `if` lets an empty slot through. (`slot` is never negative. The −1 stands in the "
            "list.) Block −1 lies before the first token, so zeros are loaded. What is exp of a "
            "score of 0, and where does it go?",
        ),
        Misconception(
            "taking block 0 for an empty slot",
            slip(_listed, "zero"),
            "The first block has number 0. Which numbers does your condition let through?",
        ),
        Misconception(
            "comparing a block's number with the number of slots",
            slip(_listed, "short"),
            "A list of 2 slots may name block 7. What does `S` count?",
        ),
        Misconception(
            "weighting the keys in place of the values",
            slip(_listed, "keys"),
            "The keys have done their work once the scores are there. What do the weights mix?",
        ),
        Misconception(
            "leaving the weighted values out",
            slip(_listed, "nothing"),
            "`acc_o` is still 0 at the end. Which product fills it, block by block?",
        ),
        Misconception(
            "starting `acc_o` anew for each block",
            slip(_listed, "anew"),
            "`acc_o` is cleared once, before the loop, and each block adds to it. After two "
            "blocks, what is left of the first one's values?",
        ),
    ),
    cases=(
        _listed_case("one query, one block", 1, 4, [0]),
        _listed_case("the last of three blocks", 1, 12, [2]),
        _listed_case("two blocks and an empty slot", 2, 12, [1, -1, 0]),
        _listed_case("five queries", 5, 20, [4, 0]),
    ),
)

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


def _sum_of_block(acc_s: object, scores_max: object) -> None:
    T.reduce_sum(acc_s, scores_max, dim=1)


def _max_of_first(acc_s: object, scores_max: object) -> None:
    for g in T.Parallel(2):
        if scores_max[g] == -T.infinity("float32"):
            scores_max[g] = T.max(acc_s[g, 0], acc_s[g, 1])


def _max_of_first_keys(acc_s: object, scores_max: object) -> None:
    for g in T.Parallel(2):
        scores_max[g] = T.max(scores_max[g], acc_s[g, 0])


def _max_over_heads(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=0, clear=False)


def _max_of_tile(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    scores_max[0] = T.max(scores_max[0], scores_max[1])
    scores_max[1] = scores_max[0]


def _largest_magnitude(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    for g, j in T.Parallel(2, 2):
        if acc_s[g, j] > -T.infinity("float32"):
            scores_max[g] = T.max(scores_max[g], -acc_s[g, j])


def _max_by_python(acc_s: object, scores_max: object) -> None:
    for g, j in T.Parallel(2, 2):
        scores_max[g] = max(scores_max[g], acc_s[g, j])


def _max_of_whole_tiles(acc_s: object, scores_max: object) -> None:
    scores_max = T.max(scores_max, acc_s)


def _max_from_zero(acc_s: object, scores_max: object) -> None:
    T.fill(scores_max, 0)
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)


_MAX = TEXTS.exercise("update_max", minutes=3, difficulty=1, solution=update_max, run=_run_with("update_max"), tolerance=1e-4, misconceptions=(
        Misconception(
            "taking the maximum of this block alone",
            _max_of_block,
            "What the earlier blocks had found is gone, whether a `fill` or `clear=True` wipes it "
            "out. If this block lies 100 below the one before, what is `scores_scale`?",
        ),
        Misconception(
            "a maximum that is never below 0",
            _max_with_zero,
            "It runs, and it does not overflow. But measured from 0, the weight of a score of "
            "−200 is e^−200. What does fp32 make of it? And of its row's sum?",
        ),
        Misconception(
            "leaving the maximum where it starts",
            _max_untouched,
            "`scores_max` is still −∞ here. (A sum that starts at −∞ stays there, too.) The "
            "scores are measured from it. What is a number minus −∞?",
        ),
        Misconception(
            "adding the scores up in place of their maximum",
            _sum_of_block,
            "Two scores of −200 add up to −400. Measured from there, each has the weight "
            "e^200. Which other `reduce` of `T` keeps the larger one?",
        ),
        Misconception(
            "keeping the first block's maximum",
            _max_of_first,
            "It never falls, which is half of it. What if a later block scores 100 nats more?",
        ),
        Misconception(
            "taking each block's first key for its maximum",
            _max_of_first_keys,
            "It runs from block to block, which is half of it. But in each block, you look at one "
            "key. What if the second key scores 200 more?",
        ),
        Misconception(
            "taking the maximum over the heads in place of the keys",
            _max_over_heads,
            "`acc_s` is `[G, BS]`: a row for each head, a column for each key. Along which axis "
            "lie the scores that one softmax compares?",
        ),
        Misconception(
            "one maximum for all heads of the group",
            _max_of_tile,
            "Each row of the tile is a head with a softmax of its own. What is left of a head "
            "whose scores all lie far below another's?",
        ),
        Misconception(
            "taking the largest magnitude for the maximum",
            _largest_magnitude,
            "Powers of e overflow on one side only. Measured from +60, what is left of a row whose "
            "scores are all −60?",
        ),
        Misconception(
            "comparing whole tiles as if they were numbers",
            _max_of_whole_tiles,
            "`T.max` takes two numbers, and `acc_s` is a tile. Which function of `T` goes along "
            "a tile's axis?",
        ),
        Misconception(_PYTHON_DECIDES, _max_by_python, _PYTHONS_MAX),
    ), cases=(
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
    ),)  # fmt: skip

# -- is_seen --


def is_seen(query: object, key: object, num_keys: object, causal: bool) -> object:
    """Whether the query at position query sees the key at position key, of num_keys that there
    are."""
    return T.And(key < num_keys, query >= key) if causal else key < num_keys


def _seen(slips: Slips, query: object, key: object, num_keys: object, causal: bool) -> object:
    """`is_seen` with slips."""
    if "python" in slips:
        return key < num_keys and query >= key if causal else key < num_keys
    if "python, strict" in slips:
        return key < num_keys and query > key if causal else key < num_keys
    if "python, always" in slips:
        return key < num_keys and (not causal or query >= key)
    causal = causal != ("swapped" in slips)
    if "nothing" in slips and not causal:
        return True
    if "blind" in slips and not causal:
        return key < 0
    if "one more" in slips:
        end = key <= num_keys
    elif "one less" in slips:
        end = key < num_keys - 1
    elif slips & {"full blocks", "each a block"}:
        end = (key // 4 * 4 if "full blocks" in slips else key) + 4 <= num_keys
    else:
        end = key < num_keys
    if (not causal and "always causal" not in slips) or "end alone" in slips:
        return end
    if "reversed" in slips:
        return T.And(end, key >= query)
    past = query > key if "strict" in slips else query >= key
    return past if "nothing" in slips else T.And(end, past)


_PYTHONS_AND = (
    "Plain Python runs `is_seen`. Positions have no value yet, but `and`, `or`, `not`, `if` and "
    "`a < b < c` want a yes or no at once. (So does `&` where a comparison lacks its "
    "parentheses.) Which function of `T` joins two comparisons?"
)

_SEEN = TEXTS.exercise("is_seen", minutes=5, difficulty=2, solution=is_seen, run=_run_with("is_seen", block_size=4), tolerance=1e-4, misconceptions=(
        Misconception(
            "forgetting the end where nothing is causal",
            slip(_seen, "nothing"),
            "`T.copy` puts zeros past the end, and a key of zeros scores 0: a weight like any "
            "other. Is each key's own position compared with `num_keys`?",
        ),
        Misconception(
            "hiding the future where nothing is causal",
            slip(_seen, "always causal"),
            "With causal=False a query sees keys behind it as well. Which condition is left then?",
        ),
        Misconception(
            "seeing nothing where nothing is causal",
            slip(_seen, "blind"),
            "With causal=False your condition is never true, and a row of −∞ becomes NaN. Is "
            "`causal` itself part of your condition? (`causal and …` is False then.) And which "
            "comparison says that a key exists?",
        ),
        Misconception(
            "letting one key too many in",
            slip(_seen, "one more"),
            "There are `num_keys` keys, and the first has number 0. Which number has the last?",
        ),
        Misconception(
            "leaving the last key out",
            slip(_seen, "one less"),
            "The last key has number `num_keys - 1`, and it is one that exists. Is it smaller "
            "than your limit?",
        ),
        Misconception(
            "dropping the ragged block",
            slip(_seen, "full blocks"),
            "That is the guard `i_s + BS <= seq_len`: nothing is read past the end any more. And "
            "which keys are never read at all?",
        ),
        Misconception(
            "taking each key for the start of a block",
            slip(_seen, "each a block"),
            "`key` is one key's own position. There are 6 keys: what does `key + 4 <= num_keys` "
            "say of key 3, which exists?",
        ),
        Misconception(
            "checking the end and forgetting the future",
            slip(_seen, "end alone"),
            "With causal=True the last block of a list is often the query's own. What lies in "
            "its second half?",
        ),
        Misconception(
            "hiding the query's own key",
            slip(_seen, "strict"),
            "A query sees itself. What does the very first one see otherwise?",
        ),
        Misconception(
            "seeing the future in place of the past",
            slip(_seen, "reversed"),
            "Query 0 sees all keys here, and the last one only itself. Which of `query` and `key` "
            "should be the larger position?",
        ),
        Misconception(
            "taking causal the other way round",
            slip(_seen, "swapped"),
            "The future is hidden where `causal` is False, and seen where it is True. Which of "
            "your two branches is which?",
        ),
        Misconception(
            _PYTHON_DECIDES, slip(_seen, "python"), f"Your logic is right. {_PYTHONS_AND}"
        ),
        Misconception(
            _PYTHON_DECIDES, slip(_seen, "python, always"), f"Your logic is right. {_PYTHONS_AND}"
        ),
        Misconception(_PYTHON_DECIDES, slip(_seen, "python, strict"), _PYTHONS_AND),
    ), cases=(
        _case("one key in a block of 4, not causal", 1, 1, [0, -1], causal=False),
        _case("four keys, which fill their block, not causal", 1, 4, [0, -1], causal=False),
        _case("six keys, all scores below 0, not causal", 1, 6, [1, 0],
              key_scores=[-9, -9, -8, -7, -5, -6], causal=False),
        _case("four keys, causal", 4, 4, [0, -1]),
        _case("six keys, causal", 6, 6, [0, 1]),
    ),)  # fmt: skip

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


def _divide_with(epsilon: float) -> Callable:
    def divide(acc_o: object, running_sum: object, G: int, BV: int) -> None:
        for i, j in T.Parallel(G, BV):
            acc_o[i, j] = acc_o[i, j] / (running_sum[i] + epsilon)

    return divide


def _above_zero(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] > 0, acc_o[i, j] / running_sum[i], 0)


def _more_than_one(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] > 1, acc_o[i, j] / running_sum[i], 0)


def _first_head(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[0] == 0, 0, acc_o[i, j] / running_sum[0])


def _by_channel(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[j] == 0, 0, acc_o[i, j] / running_sum[j])


def _other_branch(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, acc_o[i, j] / running_sum[i], 0)


def _one_for_empty(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 1, acc_o[i, j] / running_sum[i])


def _not_divided(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] * 1.0


def _guard_the_product(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] * T.if_then_else(running_sum[i] > 0, running_sum[i], 0)


def _whole_tiles(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    acc_o = acc_o / running_sum


def _python_decides(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / max(running_sum[i], 1.0)


def _first_head_unguarded(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / running_sum[0]


_NORMALISE = TEXTS.exercise("normalise", minutes=5, difficulty=1, solution=normalise, run=_run_with("normalise"), tolerance=3e-7, misconceptions=(
        Misconception(
            "dividing by a sum that may be 0",
            _divide_always,
            "One NaN in a layer's output is NaN everywhere a layer later. What is 0 / 0?",
        ),
        Misconception(
            "taking a row with a NaN for an empty one",
            _above_zero,
            "The empty row is 0 now, and so is a row that sees a NaN: an error has vanished. What "
            "does your condition say of NaN? (`NaN > 0` is False.)",
        ),
        Misconception(
            "adding 1 to every sum",
            _divide_by_one_more,
            "The empty row is 0 now. What has become of a row with one key, whose weight should "
            "be 1?",
        ),
        *(
            Misconception(
                "adding a small number to every sum",
                _divide_with(epsilon),
                "The empty row is 0 now. Every other row is a little too small, and none of them "
                "needed it. How small is the smallest sum of a row that is not empty?",
            )
            for epsilon in (1e-3, 1e-5, 1e-6)
        ),
        Misconception(
            "taking a sum of 1 for an empty row",
            _more_than_one,
            "One visible key has the weight 1. What is the sum of its row?",
        ),
        Misconception(
            "dividing all heads by the first one's sum",
            _first_head,
            "Each row of the tile is a head, and has a sum of its own. Which index counts heads?",
        ),
        Misconception(
            "taking the sum by channel in place of head",
            _by_channel,
            "`running_sum` is `[G]`: one number for each head. Which of `i` and `j` counts heads?",
        ),
        Misconception(
            "the two choices in the wrong order",
            _other_branch,
            "The empty row is divided, and all others are 0. Which of the two comes first in "
            "`T.if_then_else(condition, a, b)`?",
        ),
        Misconception(
            "giving an empty row 1 in place of 0",
            _one_for_empty,
            "A divisor of 1 would leave the empty row 0. What does your choice give there: the "
            "divisor, or the output itself?",
        ),
        Misconception(
            "not dividing",
            _not_divided,
            "The weights of a row are to add up to 1. What do they add up to so far?",
        ),
        Misconception(
            "multiplying by the sum",
            _guard_the_product,
            "The empty row is right. A row with two equal keys should give the mean of their "
            "values: what does it give?",
        ),
        Misconception(
            "dividing whole tiles as if they were numbers",
            _whole_tiles,
            "A tile is divided element by element, and written the same way: `acc_o[i, j] = …`. "
            "Which loop names all of its elements?",
        ),
        Misconception(_PYTHON_DECIDES, _python_decides, _PYTHONS_MAX),
    ), cases=(
        _case("one query without a block", 1, 1, [-1, -1]),
        _case("one query with one key", 1, 1, [0, -1]),
        _case("one query with one key, which is NaN", 1, 1, [0, -1], key_scores=[math.nan]),
        _case("two keys of equal score", 2, 2, [-1, 0], key_scores=[3, 3]),
        _case("two heads with different sums", 2, 2, [0, -1],
              key_scores=[3, 0], query_factors=(1, 0.1)),
        _case("only blocks of the future", 3, 3, [[1, -1], [1, 1], [0, 1]]),
        _case("a query without a block among others", 4, 4,
              [[0, -1], [-1, 0], [-1, -1], [1, 0]]),
    ),)  # fmt: skip

# -- programs_per_sm --

_SHARED, _RESERVED = 228 * 1024, 1024


def programs_per_sm(
    G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int
) -> tuple[int, int]:
    """Bytes of shared memory of a program, and how many programs an SM of an H200 holds by that."""
    GT, BT, DT, DVT = (-(-n // 16) * 16 for n in (G, BS, D, DV))
    copies = max(num_stages, 1)  # of the tiles that the pipeline fills
    size = (GT * DT + copies * BT * (DT + DVT)) * itemsize
    return size, 228 * 1024 // (size + 1024)  # an SM keeps 1 KiB for each program


def _fits(
    slips: Slips, G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int
) -> tuple[float, float]:
    """`programs_per_sm` with slips."""
    GT, BT, DT, DVT = (_side(slips, n) for n in (G, BS, D, DV))
    if "group alone" in slips:
        BT, DT, DVT = BS, D, DV
    values = 0 if "no values" in slips else DT if "one width" in slips else DVT
    copies = max(num_stages, 1)
    if slips & {"one copy", "zero copies", "one more"}:
        copies = 1 if "one copy" in slips else num_stages + ("one more" in slips)
    queries = 0 if "no queries" in slips else GT * DT * (copies if "queries too" in slips else 1)
    elements = queries + copies * BT * (DT + values)
    elements += GT * BT * ("weights" in slips) + GT * DVT * ("output" in slips)
    size = elements * (1 if "elements" in slips else itemsize)
    size += 4 * GT * (BT + DVT) * ("fragments" in slips)
    KiB = 1000 if "1000" in slips else 1024
    needed = size + KiB * ("reserved" not in slips)
    programs = 228 * KiB / needed
    if "rounded" in slips:
        programs = round(programs)
    elif "fraction" not in slips:
        programs = math.ceil(programs) if "rounded up" in slips else math.floor(programs)
    size = needed if "told reserved" in slips else size
    return (programs, size) if "swapped" in slips else (size, programs)


def _side(slips: Slips, n: int) -> int:
    """A side of a tile."""
    if "not padded" in slips:
        return n
    if "power" in slips:
        return max(16, 1 << (n - 1).bit_length())
    if "down" in slips:
        return n // 16 * 16
    return n // 16 * 16 + 16 if "always up" in slips else -(-n // 16) * 16


_PROGRAMS_MISTAKES = (
    Misconception(
        "copying the queries for each stage, too",
        slip(_fits, "queries too"),
        "Stages exist so that the next block's tiles can arrive while this one's are read. "
        "Does the query group change from one block to the next?",
    ),
    Misconception(
        "one copy of the tiles for any number of stages",
        slip(_fits, "one copy"),
        "With two stages, two blocks are in shared memory at once. How many tiles of keys is that?",
    ),
    Misconception(
        "no tiles at all without a stage",
        slip(_fits, "zero copies"),
        "`num_stages=0` waits for each copy. Where does the copy land?",
    ),
    Misconception(
        "one more copy of the tiles than there are stages",
        slip(_fits, "one more"),
        "With one stage, one block's tiles are in shared memory at a time. And with two?",
    ),
    Misconception(
        "tiles that are not rounded up",
        slip(_fits, "not padded"),
        "One `mma` instruction takes 16 rows. How many rows has the tile of a group of 4 heads?",
    ),
    Misconception(
        "rounding up nothing but the group",
        slip(_fits, "group alone"),
        "The group's tile has its 16 rows now. How wide is a key of 72 numbers, and how long a "
        "block of 24 tokens?",
    ),
    Misconception(
        "rounding up to a power of two",
        slip(_fits, "power"),
        "So does the draft. Ours rounds up to a multiple of 16: what becomes of 192?",
    ),
    Misconception(
        "rounding down to a multiple of 16",
        slip(_fits, "down"),
        "A tile has to hold all of the group. What is 4 // 16?",
    ),
    Misconception(
        "rounding up what is a multiple of 16 already",
        slip(_fits, "always up"),
        "A side of 64 is a multiple of 16 as it is. What does your formula make of it?",
    ),
    Misconception(
        "forgetting the values' tile",
        slip(_fits, "no values"),
        "Keys are not the only thing that a block brings. What do the weights multiply?",
    ),
    Misconception(
        "taking values to be as wide as keys",
        slip(_fits, "one width"),
        "They are in most models, but here keys may be 192 wide and values 128. Which of `D` and "
        "`DV` belongs to which tile?",
    ),
    Misconception(
        "forgetting the queries' tile",
        slip(_fits, "no queries"),
        "The program reads its queries again for every block. Where do they lie meanwhile?",
    ),
    Misconception(
        "counting a tile of weights",
        slip(_fits, "weights"),
        "The draft sends its weights through shared memory. Where do ours stay between the two "
        "products?",
    ),
    Misconception(
        "counting a tile for the output",
        slip(_fits, "output"),
        "The draft stages its output in shared memory. From where does our kernel store?",
    ),
    Misconception(
        "counting the fragments",
        slip(_fits, "fragments"),
        "Scores and accumulator are tiles, too, made by `T.alloc_fragment`. In which memory?",
    ),
    Misconception(
        "counting elements instead of bytes",
        slip(_fits, "elements"),
        "A number in fp16 has two bytes, in fp32 four. Where does `itemsize` come in?",
    ),
    Misconception(
        "forgetting what the SM keeps for itself",
        slip(_fits, "reserved"),
        "Each program costs 1 KiB more than it asks for. How often does the SM pay that?",
    ),
    Misconception(
        "adding the SM's own KiB to the program's bytes",
        slip(_fits, "told reserved"),
        "The KiB counts when programs are packed into an SM, and it does here. Is it one of the "
        "program's tiles?",
    ),
    Misconception(
        "taking a KiB for 1,000 bytes",
        slip(_fits, "1000"),
        "Memory is counted in powers of two. How many bytes has a KiB?",
    ),
    Misconception(
        "rounding up a program that fits in part",
        slip(_fits, "rounded up"),
        "A program runs with all of its memory or not at all. How many whole ones fit?",
    ),
    Misconception(
        "rounding to the nearest number of programs",
        slip(_fits, "rounded"),
        "Nine tenths of a program do not run. How many whole ones fit?",
    ),
    Misconception(
        "a fraction of a program",
        slip(_fits, "fraction"),
        "A program runs with all of its memory or not at all. Is your division `/` or `//`?",
    ),
    Misconception(
        "the two results in the other order",
        slip(_fits, "swapped"),
        "Both numbers may well be right. Which is to be returned first?",
    ),
)

_PROGRAMS = TEXTS.exercise(
    "programs_per_sm",
    minutes=6,
    difficulty=2,
    solution=programs_per_sm,
    misconceptions=_PROGRAMS_MISTAKES,
    combine=together(
        _PROGRAMS_MISTAKES,
        {"one copy", "zero copies", "one more"},
        {"not padded", "group alone", "power", "down", "always up"},
        {"no values", "one width"},
        {"no queries", "queries too"},
        {"rounded up", "rounded", "fraction"},
        {"reserved", "told reserved"},
    ),
    cases=(
        Case("the shape of the measurements", lambda: (16, 128, 128, 64, 1, 2)),
        Case("a group of 4", lambda: (4, 64, 64, 48, 1, 2)),
        Case("small tiles", lambda: (16, 16, 16, 16, 1, 2)),
        Case("keys wider than values", lambda: (16, 192, 128, 64, 1, 2)),
        Case("two stages", lambda: (16, 128, 128, 64, 2, 2)),
        Case("no stage", lambda: (16, 128, 128, 64, 0, 2)),
        Case("unequal widths in fp32, three stages", lambda: (20, 72, 40, 24, 3, 4)),
    ),
)

EXERCISES = (_LISTED, _MAX, _SEEN, _NORMALISE, _PROGRAMS)

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


# -- two slips at once --

DOUBLES = (
    Double(
        "update_max",
        _max_from_zero,
        ("taking the maximum of this block alone", "a maximum that is never below 0"),
    ),
    Double(
        "is_seen",
        lambda query, key, num_keys, causal: (
            T.And(key <= num_keys, query > key) if causal else key <= num_keys
        ),
        ("letting one key too many in", "hiding the query's own key"),
    ),
    Double(
        "normalise",
        _first_head_unguarded,
        ("dividing by a sum that may be 0", "dividing all heads by the first one's sum"),
    ),
    Double(
        "programs_per_sm",
        lambda G, D, DV, BS, num_stages, itemsize: (
            G * D + max(num_stages, 1) * BS * (D + DV),
            _SHARED // (G * D + max(num_stages, 1) * BS * (D + DV) + _RESERVED),
        ),
        ("tiles that are not rounded up", "counting elements instead of bytes"),
    ),
    Double(
        "programs_per_sm",
        Wrong(_fits, frozenset({"elements", "no values"})),
        ("forgetting the values' tile", "counting elements instead of bytes"),
    ),
    Double(
        "programs_per_sm",
        Wrong(_fits, frozenset({"zero copies", "reserved"})),
        ("no tiles at all without a stage", "forgetting what the SM keeps for itself"),
    ),
)

# -- what the chapter warns of --

TRAPS = TEXTS.traps

# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    gigabytes_loaded={"unit": "GB", "tolerance": 0.02},
    probe_milliseconds={"unit": "ms", "tolerance": 0.05},
    fastest_stages={"choices": (0, 1, 2, 3)},
)
