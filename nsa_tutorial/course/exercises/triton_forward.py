"""Exercises of chapter 11: the rows of K behind a list, a kernel with two bugs in its group, packed
offsets; optional, a list's end and a window's first key."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.mistakes import slip, together
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Slips = frozenset[str]

_AS_A_TENSOR = r"'list' object has no attribute|list indices must|(of|:|and) 'list'( |$)"


@contextmanager
def _a_list(name: str) -> Iterator[None]:
    """Add to an error of somebody who takes a list for a tensor that argument `name` is a list."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not re.search(_AS_A_TENSOR, str(error)):
            raise
        told = f"{error}. `{name}` is a Python list; `torch.tensor({name})` makes a tensor"
        raise TypeError(told) from error


# -- key_rows --


def key_rows(ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
    """The rows of K that a program loads, `[S, BS]`: a line for each slot, -1 where it loads
    nothing."""
    tokens = torch.arange(BS)  # of one block
    lines = []
    for block_id in ids:
        key = block_id * BS + tokens  # [BS], counted in the sequence
        is_loaded = (block_id >= 0) & (key < num_visible)
        lines.append(torch.where(is_loaded, first_key + key, -1))
    return torch.stack(lines)  # [S, BS]


def _run_rows(
    solution: Callable, ids: list[int], first_key: int, num_visible: int, BS: int
) -> Tensor:
    """Call it; the frame as it is given is no attempt, and with one gap left torch need not list
    what it takes."""
    try:
        with _a_list("ids"):
            return solution(ids, first_key, num_visible, BS)
    except RuntimeError as error:
        if "of ellipsis" not in str(error):
            raise
        raise NotImplementedError("the first gap is still there") from error
    except TypeError as error:
        if "ellipsis" not in str(error):
            raise
        raise TypeError("an ellipsis, `...`, is no tensor") from error


def _rows(slips: Slips, ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
    """`key_rows` with slips."""
    if "stop" in slips and min(ids) < 0:
        first = next(slot for slot, block_id in enumerate(ids) if block_id < 0)
        ids = ids[:first] + [-1] * (len(ids) - first)
    if "dropped" in slips:
        ids = [block_id for block_id in ids if block_id >= 0]
    tokens, blocks = torch.arange(BS), -(-num_visible // BS)
    if "zero" in slips:
        ids = [max(block_id, 0) for block_id in ids]
    if "nonzero" in slips:
        ids = [block_id or -1 for block_id in ids]
    if "last" in slips:
        ids = [block_id % blocks if block_id < 0 else block_id for block_id in ids]
    if "sequence" in slips:
        first_key = 0
    end = num_visible
    if "one more" in slips or "one less" in slips:
        end += 1 if "one more" in slips else -1
    if "tensor" in slips:
        end -= first_key
    if "whole blocks" in slips:
        end = num_visible // BS * BS
    rows = []
    for block_id in ids:
        is_visible = ("score only" in slips or block_id >= 0) and (
            bool(slips & {"everything", "token", "id end"}) or block_id < blocks
        )
        start = block_id * (1 if "in tokens" in slips else BS) if is_visible else 0
        is_seen = start + tokens < end
        if slips & {"everything", "own block"}:
            is_seen = tokens >= 0
        if "token" in slips:
            is_seen = tokens < end
        if "id end" in slips:
            is_seen = block_id + tokens < end
        begin = 0 if "every block first" in slips else block_id if "id" in slips else start
        row = first_key + begin + tokens
        rows.append(torch.where(is_seen & is_visible, row, 0 if "row 0" in slips else -1))
    return torch.stack(rows) if rows else torch.empty(0, BS)


_KEYS_MISTAKES = (
    Misconception(
        "loading the keys of an empty slot",
        slip(_rows, "score only"),
        "-1 times BS is an address, too: BS rows before the sequence, in somebody else's keys or "
        "before the tensor. What does your code make of `block_id = -1`?",
    ),
    Misconception(
        "stopping at the first empty slot",
        slip(_rows, "stop"),
        "-1 says that this slot is empty. What does it say about the slots behind it?",
    ),
    Misconception(
        "taking an empty slot for block 0",
        slip(_rows, "zero"),
        "Clamping makes the address legal, and the block count. What does a block that is listed "
        "twice do to the softmax?",
    ),
    Misconception(
        "taking block 0 for an empty slot",
        slip(_rows, "nonzero"),
        "Block 0 holds the first keys of the sequence. Which number says that a slot is empty?",
    ),
    Misconception(
        "reading -1 as Python does",
        slip(_rows, "last"),
        "In Python, index -1 is the last element. Which block does it name here?",
    ),
    Misconception(
        "leaving out the rows of empty slots",
        slip(_rows, "dropped"),
        "A kernel's loop walks the slots, and each step has a tile of its own. What does the tile "
        "of an empty slot load?",
    ),
    Misconception(
        "loading whatever the list names",
        slip(_rows, "everything"),
        "The list decides which blocks a query wants. Which number says how far it may see?",
    ),
    Misconception(
        "counting a token in its block",
        slip(_rows, "token"),
        "`num_visible` counts in the sequence. Where does the block begin?",
    ),
    Misconception(
        "loading the whole block that the query stands in",
        slip(_rows, "own block"),
        "The last visible block is often visible in part. What do its other keys know that the "
        "query must not?",
    ),
    Misconception(
        "leaving out the block that is visible in part",
        slip(_rows, "whole blocks"),
        "`num_visible // BS` counts whole blocks. In which block is the query's own key?",
    ),
    Misconception(
        "seeing one key too many",
        slip(_rows, "one more"),
        "`num_visible` keys are numbered from 0. Which number has the last of them?",
    ),
    Misconception(
        "losing the last visible key",
        slip(_rows, "one less"),
        "With causal attention, the last visible key is the query's own. Does a query see itself?",
    ),
    Misconception(
        "comparing a row of K with a count of the sequence",
        slip(_rows, "tensor"),
        "`num_visible` counts from the sequence's first key. From where do the numbers count that "
        "you compare with it?",
    ),
    Misconception(
        "forgetting where the sequence begins",
        slip(_rows, "sequence"),
        "Block 0 of the second sequence is not block 0 of the tensor. At which row of K does it "
        "begin?",
    ),
    Misconception(
        "forgetting where the block begins",
        slip(_rows, "every block first"),
        "`tokens` counts from 0 in every block. How many keys of the sequence lie before block 2?",
    ),
    Misconception(
        "counting ids in tokens",
        slip(_rows, "id"),
        "How many keys lie between the beginning of block 0 and that of block 2?",
    ),
    Misconception(
        "counting ids in tokens",
        slip(_rows, "id end"),
        "How many keys lie between the beginning of block 0 and that of block 2?",
    ),
    Misconception(
        "counting ids in tokens",
        slip(_rows, "in tokens"),
        "How many keys lie between the beginning of block 0 and that of block 2?",
    ),
    Misconception(
        "row 0 in place of −1",
        slip(_rows, "row 0"),
        "Row 0 of K is a key like any other. How does your tensor say that an element loads "
        "nothing?",
    ),
)

_KEYS = TEXTS.exercise(
    "key_rows",
    minutes=8,
    difficulty=2,
    solution=key_rows,
    run=_run_rows,
    misconceptions=_KEYS_MISTAKES,
    combine=together(
        _KEYS_MISTAKES,
        {"score only", "stop", "zero", "last", "dropped"},
        {"nonzero", "zero"},
        {"everything", "own block", "one more", "one less", "whole blocks", "token", "id end"},
        {"token", "tensor"},
        {"everything", "tensor"},
        {"own block", "tensor"},
        {"sequence", "tensor"},
        {"whole blocks", "tensor"},
    ),
    cases=(
        Case("an empty slot in the middle", lambda: ([0, -1, 1], 0, 4, 2)),
        Case("a block that is visible in part", lambda: ([2, 0], 0, 5, 2)),
        Case("the second sequence", lambda: ([1, -1, 0], 6, 6, 4)),
        Case("a block of the future", lambda: ([3, 1], 5, 6, 3)),
        Case("nothing but empty slots", lambda: ([-1, -1], 3, 6, 2)),
        Case("a long list, first slot empty", lambda: ([-1, 4, -1, 0, 2], 8, 14, 3)),
        Case("fewer visible keys than a block has", lambda: ([0, 2], 3, 2, 4)),
    ),
)


# -- first_scores --


def first_scores() -> object:
    """The kernel in which program (query, head) scores its group's heads against key 0 of its KV
    head."""

    @triton.jit
    def kernel(Q, K, Score, H, G: tl.constexpr, D: tl.constexpr, GT: tl.constexpr):
        query, head = tl.program_id(0), tl.program_id(1)
        group, width = tl.arange(0, GT), tl.arange(0, D)
        in_group = group < G  # [GT]
        group_row = (query * H + head) * G + group  # [GT], pieces of Q
        q_tile = tl.load(Q + group_row[:, None] * D + width, mask=in_group[:, None], other=0.0)
        k = tl.load(K + head * D + width)  # [D]
        tl.store(Score + group_row, tl.sum(q_tile * k, axis=1), mask=in_group)

    return kernel


_GIVEN = """
@triton.jit
def kernel(Q, K, Score, H, G: tl.constexpr, D: tl.constexpr, GT: tl.constexpr):
    query, head = tl.program_id(0), tl.program_id(1)
    group, width = tl.arange(0, GT), tl.arange(0, D)
    in_group = group < GT  # [GT]
    group_row = query * H + head * G + group  # [GT], pieces of Q
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=in_group[:, None], other=0.0)
    k = tl.load(K + head * D + width)  # [D]
    tl.store(Score + group_row, tl.sum(q_tile * k, axis=1), mask=in_group)
"""


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(_GIVEN))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way


_MEMORY = 512  # pieces of Q and numbers of Score: more than any slip reaches
_SHOWN = 4  # numbers behind the tensor that the reader sees


class _Launched(NamedTuple):
    """What a launch left behind.

    Attributes:
        Score: what was stored, and -77 where nothing was, also behind the tensor.
        loads_outside: how many elements the last program loads from outside of its tensors.
    """

    Score: Tensor
    loads_outside: int


def _run_scores(solution: Callable, grid: tuple[int, int], R: int, H: int, G: int) -> _Launched:
    """Launch the kernel on a part of the grid."""
    if hasattr(solution, "run"):
        raise TypeError("this is the kernel itself: hand over the function that returns it")
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("first_scores defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    # row r of Q scores r + 100 with key 0 of KV head 0, and r + 200 with that of KV head 1; behind
    # the H keys it goes on like this, so that a load from there is the same on every machine
    q = torch.stack([torch.arange(float(_MEMORY)), torch.ones(_MEMORY)], dim=1)
    k = torch.stack([torch.ones(_MEMORY), 100.0 * torch.arange(1, _MEMORY + 1)], dim=1)
    score = roomy(torch.full((_MEMORY,), -77.0), -77.0)
    GT = max(16, triton.next_power_of_2(G))
    try:
        kernel[grid](roomy(q, 1000.0), roomy(k, 1000.0), score, H, G=G, D=2, GT=GT)
    except Exception as error:
        if "cannot be block type" not in f"{error} {error.__cause__}":
            raise
        raise TypeError(
            "the store has one place for all rows of the tile. Is `group_row` one number here? "
            "Each of its `GT` rows needs its own. What is missing?"
        ) from error
    outside = _loads_outside(kernel, grid, q[: R * H * G], k[:H], H=H, G=G, D=2, GT=GT)
    return _Launched(score[: R * H * G + _SHOWN].cpu(), outside)


def _loads_outside(
    kernel: object, grid: tuple[int, int], q: Tensor, k: Tensor, **sizes: object
) -> int:
    """How many elements the last program of the grid loads from outside of `q` and `k`."""
    given = {"Q": q.numpy(), "K": k.numpy(), "Score": np.zeros(_MEMORY)} | sizes
    given |= getattr(kernel, "slips", {})
    try:
        last = (grid[0] - 1, grid[1] - 1)
        return recorder.run(getattr(kernel, "source", kernel), last, given, grid).outside()
    except Exception:  # a kernel with words that the recorder does not know
        return 0


@triton.jit
def _wrong_scores(
    Q, K, Score, H,
    G: tl.constexpr, D: tl.constexpr, GT: tl.constexpr,
    ROW: tl.constexpr, MASK: tl.constexpr, PLACE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    query, head = tl.program_id(0), tl.program_id(1)
    group, width = tl.arange(0, GT), tl.arange(0, D)
    group_row = (query * H + head) * G + group
    if ROW == "brackets":
        group_row = query * H + head * G + group
    if ROW == "heads of 1":
        group_row = query * H * G + head + group
    if ROW == "groups of 1":
        group_row = query * H + head + group
    if ROW == "one group":
        group_row = (query + head) * G + group
    if ROW == "padded tensor":
        group_row = (query * H + head) * GT + group
    if ROW == "elements":
        group_row = (query * H + head) * G * D + group
    if ROW == "exchanged":
        group_row = (head * H + query) * G + group
    if ROW == "no head":
        group_row = query * G + group
    if ROW == "no query":
        group_row = head * G + group
    in_group = group < G
    if MASK == "unmasked":
        in_group = group < GT
    if MASK == "one more":
        in_group = group <= G
    if MASK == "one less":
        in_group = group < G - 1
    if MASK == "rows":
        in_group = group_row < G
    if MASK == "KV heads":
        in_group = group < H
    if MASK == "width":
        in_group = group < D
    if MASK == "all heads":
        in_group = group < H * G
    if MASK == "end of the tensor":
        in_group = group_row < tl.num_programs(0) * H * G
    is_loaded = group < GT if MASK == "store alone" else in_group
    q_tile = tl.load(Q + group_row[:, None] * D + width, mask=is_loaded[:, None], other=0.0)
    key = head
    if KEY == "the query's":
        key = query
    if KEY == "both's":
        key = query * H + head
    if KEY == "a group's":
        key = head * G
    if KEY == "always 0":
        key = 0
    k = tl.load(K + key * D + width)
    if MASK == "load alone":
        in_group = group < GT
    place = group if PLACE == "start" else group_row
    tl.store(Score + place, tl.sum(q_tile * k, axis=1), mask=in_group)


_ROWS_OF_Q = {
    "brackets", "heads of 1", "groups of 1", "one group", "padded tensor", "elements", "exchanged",
    "no head", "no query",
}  # fmt: skip
_KEYS_OF_K = {"the query's", "both's", "a group's", "always 0"}
_MASKS = {
    "unmasked", "one more", "one less", "rows", "KV heads", "width", "all heads",
    "end of the tensor", "load alone", "store alone",
}  # fmt: skip


class _Mistaken:
    """`_wrong_scores` with its slips chosen; launched like a kernel."""

    source = _wrong_scores

    def __init__(self, slips: Slips) -> None:
        self.run = None
        self.slips = {
            "ROW": next((name for name in slips if name in _ROWS_OF_Q), "right"),
            "MASK": next((name for name in slips if name in _MASKS), "right"),
            "PLACE": "start" if "start" in slips else "right",
            "KEY": next((name for name in slips if name in _KEYS_OF_K), "right"),
        }

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: _wrong_scores[grid](*args, **self.slips, **sizes)


_WHOSE_KEY = (
    "`K` is `[H, D]` here: one key for each KV head, shared by all queries. The line that loads it "
    "was right. Which number of the program names its KV head?"
)
_SCORES_MISTAKES = (
    Misconception(
        "storing the padding",
        slip(_Mistaken, "unmasked"),
        "Behind the group's numbers in `Score` lie those of the next KV head. The interpreter runs "
        "programs in order, so their owner stores last and hides it. What does a GPU promise?",
    ),
    Misconception(
        "too short a step from query to query",
        slip(_Mistaken, "brackets"),
        "Only `head` is multiplied by `G` here. How many pieces of Q belong to one query, over all "
        "its KV heads?",
    ),
    Misconception(
        "too short a step from KV head to KV head",
        slip(_Mistaken, "heads of 1"),
        "Program (0, 1) begins behind program (0, 0). How many pieces has that one?",
    ),
    Misconception(
        "forgetting that each program has G pieces",
        slip(_Mistaken, "groups of 1"),
        "Program (0, 1) begins behind program (0, 0). How many pieces has that one?",
    ),
    Misconception(
        "counting one group for each query",
        slip(_Mistaken, "one group"),
        "Program (1, 0) begins behind all groups of query 0. There are `H` of them. How many "
        "pieces is that?",
    ),
    Misconception(
        "padding the tensor as well as the tile",
        slip(_Mistaken, "padded tensor"),
        "The tile has gaps, the tensor has none. How many pieces of Q lie between two neighbouring "
        "programs?",
    ),
    Misconception(
        "counting elements in place of pieces",
        slip(_Mistaken, "elements"),
        "`group_row` counts pieces, and the load multiplies by `D` itself. How many pieces lie "
        "before the program's first one?",
    ),
    Misconception(
        "exchanging query and head",
        slip(_Mistaken, "exchanged"),
        "The last axis of `[R, H, G]` runs fastest, then the one before it. Which of the two is "
        "further out, query or head?",
    ),
    Misconception(
        "leaving out the KV head",
        slip(_Mistaken, "no head"),
        "All programs of one query store to the same place. Which number tells them apart?",
    ),
    Misconception(
        "leaving out the query",
        slip(_Mistaken, "no query"),
        "All queries load and store the pieces of query 0. How many pieces does each query before "
        "yours have?",
    ),
    Misconception(
        "storing at the beginning of `Score`",
        slip(_Mistaken, "start"),
        "`group` counts within one group, so every program stores to the same place. Which numbers "
        "of `Score` belong to this program?",
    ),
    Misconception(
        "a key that is not the KV head's",
        slip(_Mistaken, "the query's"),
        _WHOSE_KEY,
    ),
    Misconception(
        "a key that is not the KV head's",
        slip(_Mistaken, "both's"),
        _WHOSE_KEY,
    ),
    Misconception(
        "a key that is not the KV head's",
        slip(_Mistaken, "a group's"),
        _WHOSE_KEY,
    ),
    Misconception(
        "a key that is not the KV head's",
        slip(_Mistaken, "always 0"),
        _WHOSE_KEY,
    ),
    Misconception(
        "storing one row of the padding",
        slip(_Mistaken, "one more"),
        "The heads of a group are numbered from 0. Which number has the last of `G`?",
    ),
    Misconception(
        "leaving out the group's last head",
        slip(_Mistaken, "one less"),
        "The heads of a group are numbered from 0. Which number has the last of `G`?",
    ),
    Misconception(
        "comparing a piece of Q with the size of a group",
        slip(_Mistaken, "rows"),
        "`group_row` counts pieces of the whole tensor. Which numbers count within the group?",
    ),
    Misconception(
        "comparing with the number of KV heads",
        slip(_Mistaken, "KV heads"),
        "`H` is how many KV heads there are. How many query heads share one of them?",
    ),
    Misconception(
        "comparing with the width of a head",
        slip(_Mistaken, "width"),
        "`D` is how many channels a head has. How many query heads has the group?",
    ),
    Misconception(
        "comparing with the number of all query heads",
        slip(_Mistaken, "all heads"),
        "`H * G` counts the query heads of all groups. How many has the group of one program?",
    ),
    Misconception(
        "masking nothing but the tensor's end",
        slip(_Mistaken, "end of the tensor"),
        "The padding reaches into the next KV head's pieces long before the tensor ends. Who owns "
        "them?",
    ),
    Misconception(
        "masking the load alone",
        slip(_Mistaken, "load alone"),
        "Masked rows are loaded as zeros, and then your store writes what became of them. Where?",
    ),
    Misconception(
        "masking the store alone",
        slip(_Mistaken, "store alone"),
        "The numbers are right, but the last program also loads pieces that lie behind the end of "
        "Q. Which mask does the load have?",
    ),
)


def _scores_case(name: str, grid: tuple[int, int], R: int, H: int, G: int) -> Case:
    here = environment.detect()
    told = f"{name} (H = {H}, G = {G}, GT = {max(16, 1 << (G - 1).bit_length())})"
    return Case(told, lambda: (grid, R, H, G), lambda: here.why_not("triton", here.device))


_SCORES = TEXTS.exercise(
    "first_scores",
    minutes=7,
    difficulty=2,
    solution=first_scores,
    run=_run_scores,
    misconceptions=_SCORES_MISTAKES,
    combine=together(_SCORES_MISTAKES, _ROWS_OF_Q, _MASKS, _KEYS_OF_K),
    cases=(
        _scores_case("one program of two, a group of 3", (1, 1), 1, 2, 3),
        _scores_case("two queries, one KV head each", (2, 1), 2, 1, 3),
        _scores_case("two queries, two KV heads", (2, 2), 2, 2, 3),
        _scores_case("a group of 16", (2, 2), 2, 2, 16),
        _scores_case("a group of 20", (2, 3), 2, 3, 20),
        _scores_case("three KV heads, groups of 4", (2, 3), 2, 3, 4),
    ),
)


# -- walked_slots --


def walked_slots(ids: list[int], num_blocks: int) -> int:
    """How many slots of the list a program walks: up to the last that names one of the first
    num_blocks blocks."""
    num_slots = 0
    for slot, block_id in enumerate(ids):
        if 0 <= block_id < num_blocks:
            num_slots = slot + 1
    return num_slots


def _walked(slips: Slips, ids: list[int], num_blocks: int) -> int | list[int]:
    """`walked_slots` with slips."""
    end = math.inf if "future" in slips else num_blocks + ("one more" in slips)
    least = 1 if "nonzero" in slips else -math.inf if "negative" in slips else 0
    named = [slot for slot, block_id in enumerate(ids) if least <= block_id < end]
    empty = [slot for slot in range(len(ids)) if slot not in named]
    walked = max(named, default=-1) + 1
    if "named" in slips:
        walked = len(named)
    if "visible" in slips:
        walked = min(len(ids), num_blocks)
    if "first empty" in slips:
        walked = min(empty, default=len(ids))
    if "past empty" in slips:
        walked = min([slot + 1 for slot in empty], default=len(ids))
    if "last" in slips:
        walked = max(named, default=0)
    if "all" in slips:
        walked = len(ids)
    if "largest id" in slips:
        walked = max((ids[slot] for slot in named), default=-1) + 1
    if "largest of all" in slips:
        walked = max(ids, default=-1) + 1
    if "distance" in slips:
        walked = named[-1] - named[0] + 1 if named else 0
    if "slots" in slips:
        return named
    if "blocks" in slips:
        return [ids[slot] for slot in named]
    return max(walked, 1) if "at least 1" in slips else walked


_BLOCK_OR_SLOT = (
    "Block 7 may lie in slot 0. Does the loop count blocks, or the slots that name them?"
)
_ONE_NUMBER = (
    "These are the slots that matter. How many slots does the walk take to reach the last?"
)
_WALKED_MISTAKES = (
    Misconception(
        "counting the blocks",
        slip(_walked, "named"),
        "An empty slot may lie in the middle. If the program walks as many slots as there are "
        "blocks, where does it stop?",
    ),
    Misconception(
        "walking as many slots as there are visible blocks",
        slip(_walked, "visible"),
        "A list names some of the visible blocks, in any of its slots. Which slot is the last that "
        "matters?",
    ),
    Misconception(
        "stopping at the first slot without a visible block",
        slip(_walked, "first empty"),
        "-1 says that this slot is empty. What does it say about the slots behind it?",
    ),
    Misconception(
        "counting the slot that ended the loop",
        slip(_walked, "past empty"),
        "A `break` leaves the loop's number at the empty slot, and adding 1 counts that slot, too. "
        "Besides, what if a visible block stands behind it?",
    ),
    Misconception(
        "the number of the last slot in place of how many there are",
        slip(_walked, "last"),
        "Slots are numbered from 0. If the last block lies in slot 2, how many slots are walked?",
    ),
    Misconception(
        "walking up to blocks of the future",
        slip(_walked, "future"),
        "A block behind the last visible one is named, and nothing of it is loaded. Does the walk "
        "have to reach its slot?",
    ),
    Misconception(
        "taking one block too many for visible",
        slip(_walked, "one more"),
        "Blocks are numbered from 0. Which number has the last of `num_blocks` blocks?",
    ),
    Misconception(
        "taking block 0 for an empty slot",
        slip(_walked, "nonzero"),
        "Block 0 holds the first keys of the text. Which number says that a slot is empty?",
    ),
    Misconception(
        "taking an empty slot for a visible block",
        slip(_walked, "negative"),
        "-1 is below `num_blocks`, too. Which second condition does a block's number meet?",
    ),
    Misconception(
        "walking everything",
        slip(_walked, "all"),
        "Right, and slower. How many steps does a list take that is empty at its end?",
    ),
    Misconception(
        "mixing up blocks and slots",
        slip(_walked, "largest id"),
        _BLOCK_OR_SLOT,
    ),
    Misconception(
        "mixing up blocks and slots",
        slip(_walked, "largest of all"),
        _BLOCK_OR_SLOT,
    ),
    Misconception(
        "a list in place of a number",
        slip(_walked, "slots"),
        _ONE_NUMBER,
    ),
    Misconception(
        "a list in place of a number",
        slip(_walked, "blocks"),
        _ONE_NUMBER,
    ),
    Misconception(
        "leaving out empty slots at the beginning",
        slip(_walked, "distance"),
        "The walk begins at slot 0. Does it jump over empty slots there?",
    ),
    Misconception(
        "walking a list that names nothing",
        slip(_walked, "at least 1"),
        "Every list takes a step of yours. How many slots does `[-1, -1]` make the program walk?",
    ),
)

_WALKED = TEXTS.exercise(
    "walked_slots",
    minutes=3,
    difficulty=1,
    solution=walked_slots,
    misconceptions=_WALKED_MISTAKES,
    combine=together(
        _WALKED_MISTAKES,
        {"future", "one more"},
        {
            "named",
            "visible",
            "first empty",
            "past empty",
            "last",
            "all",
            "largest id",
            "largest of all",
            "distance",
            "slots",
            "blocks",
        },
        {"all", "future", "largest of all"},
        {"all", "one more", "largest of all"},
        {"all", "nonzero", "negative", "largest of all"},
        {"future", "negative"},
        {"one more", "negative"},
        {"at least 1", "slots", "blocks"},
    ),
    cases=(
        Case("empty at the end", lambda: ([3, 0, -1, -1], 5)),
        Case("an empty slot in the middle", lambda: ([2, -1, 1], 3)),
        Case("a full list", lambda: ([4, 1, 2], 9)),
        Case("nothing but empty slots", lambda: ([-1, -1], 2)),
        Case("a block of the future last", lambda: ([1, 0, 4], 2)),
        Case("the first block that is not visible", lambda: ([0, 2, -1], 2)),
        Case("a block of the future in the middle", lambda: ([7, 1, -1], 3)),
        Case("empty at the beginning", lambda: ([-1, -1, 5, -1], 8)),
        Case("block 0 last", lambda: ([6, 0], 7)),
        Case("more slots than one load takes", lambda: ([9] + [-1] * 17 + [3, -1], 10)),
        Case("no slot", lambda: ([], 1)),
    ),
    tolerance=0.0,
)


# -- window_row --


def window_row(position: int, first_key: int, window_size: int, BS: int) -> tuple[int, int, int]:
    """A window's first row of K, how many keys from there are visible, and how many blocks of BS
    its program walks."""
    start = max(position + 1 - window_size, 0)
    num_visible = position + 1 - start
    return first_key + start, num_visible, -(-num_visible // BS)


def _window(
    slips: Slips, position: int, first_key: int, window_size: int, BS: int
) -> tuple[int, int, int | float]:
    """`window_row` with slips."""
    if "absolute" in slips:
        position -= first_key
    end = position + ("without itself" not in slips)
    start = end - window_size - ("one more" in slips)
    if "before the sequence" in slips:
        start = max(start, -first_key)
    elif "before the tensor" not in slips:
        start = max(start, 0)
    if "aligned" in slips:
        start = start // BS * BS
    num_visible = end - start
    if "count of the sequence" in slips:
        num_visible = end
    if "always a window" in slips:
        num_visible = window_size
    if "early" in slips:
        num_visible = min(position, window_size)
    if "distance" in slips:
        num_visible = position - start
    num_slots = -(-num_visible // BS)
    if "rounded down" in slips:
        num_slots = num_visible // BS
    if "one block more" in slips:
        num_slots = num_visible // BS + 1
    if "touched" in slips:
        num_slots = (end - 1) // BS - start // BS + 1
    if "fraction" in slips:
        num_slots = num_visible / BS
    if "always all" in slips:
        num_slots = -(-window_size // BS)
    if "row alone" in slips:
        start = end - window_size
    row = start + (0 if "sequence" in slips else first_key)
    if "other order" in slips:
        return num_visible, row, num_slots
    return row, num_visible, num_slots


_WINDOW_MISTAKES = (
    Misconception(
        "a window of one key too many",
        slip(_window, "one more"),
        "Take `window_size = 1`. Which keys should the query see, and how many are these?",
    ),
    Misconception(
        "a window without the query's own key",
        slip(_window, "without itself"),
        "Take `window_size = 1`. Which key is left for the query to see?",
    ),
    Misconception(
        "beginning at a block's edge",
        slip(_window, "aligned"),
        "Whole blocks give some queries up to BS - 1 keys more than others. How many keys has "
        "each query's window?",
    ),
    Misconception(
        "a row before the sequence, beside the right count",
        slip(_window, "row alone"),
        "Your count stops at the sequence's beginning. Where does the window's row begin for the "
        "query at position 0?",
    ),
    Misconception(
        "reaching back before the sequence",
        slip(_window, "before the sequence"),
        "Rows of K before `first_key` exist, but in another sequence. Where does the window of an "
        "early query end on the left?",
    ),
    Misconception(
        "reaching back before the tensor",
        slip(_window, "before the tensor"),
        "Where is the window of the very first query?",
    ),
    Misconception(
        "counting the keys from the beginning of the sequence",
        slip(_window, "count of the sequence"),
        "The row has moved forward. If the count stays, where does the last visible key lie?",
    ),
    Misconception(
        "as many keys for early queries as for late ones",
        slip(_window, "always a window"),
        "How many keys does the query at position 0 see, whatever the window?",
    ),
    Misconception(
        "leaving out early queries' own key",
        slip(_window, "early"),
        "The query at position 0 sees itself. How many keys is that?",
    ),
    Misconception(
        "counting steps in place of keys",
        slip(_window, "distance"),
        "The row is right. From key 2 to key 3 is one step. How many keys are these?",
    ),
    Misconception(
        "a fraction of a block",
        slip(_window, "fraction"),
        "A loop takes whole steps. How many blocks of 2 hold one key?",
    ),
    Misconception(
        "forgetting the last, ragged block",
        slip(_window, "rounded down"),
        "How many blocks of 4 hold 6 keys?",
    ),
    Misconception(
        "as many blocks for early queries as for late ones",
        slip(_window, "always all"),
        "The query at position 0 sees one key. How many blocks hold it?",
    ),
    Misconception(
        "one block more than the window needs",
        slip(_window, "one block more"),
        "How many blocks of 2 hold 2 keys?",
    ),
    Misconception(
        "counting the sequence's blocks that the window touches",
        slip(_window, "touched"),
        "A window of 2 may touch two blocks of 2 that are aligned to the sequence. From where are "
        "the window's own blocks counted?",
    ),
    Misconception(
        "forgetting where the sequence begins",
        slip(_window, "sequence"),
        "The window's first key is counted in the sequence, and a row in K. At which row does the "
        "sequence begin?",
    ),
    Misconception(
        "taking the position for a row of K",
        slip(_window, "absolute"),
        "`position` is counted in the query's own sequence. What is taken off it already?",
    ),
    Misconception(
        "the right numbers in another order",
        slip(_window, "other order"),
        "All three are there. In which order does the statement return them?",
    ),
)

_WINDOW = TEXTS.exercise(
    "window_row",
    minutes=6,
    difficulty=2,
    solution=window_row,
    misconceptions=_WINDOW_MISTAKES,
    combine=together(
        _WINDOW_MISTAKES,
        {"one more", "absolute"},
        {"before the sequence", "before the tensor", "row alone"},
        {"row alone", "aligned"},
        {"row alone", "one more"},
        {"count of the sequence", "always a window", "early", "distance"},
        {"without itself", "distance"},
        {"rounded down", "always all", "one block more", "touched", "fraction"},
    ),
    cases=(
        Case("a window of 2 in blocks of 2", lambda: (3, 0, 2, 2)),
        Case("a window of 2 across the edge of a block of 2", lambda: (4, 0, 2, 2)),
        Case("the first query", lambda: (0, 0, 3, 2)),
        Case("half a window, two blocks", lambda: (4, 0, 9, 4)),
        Case("early in the second sequence", lambda: (1, 7, 5, 4)),
        Case("late in the second sequence", lambda: (9, 7, 6, 4)),
        Case("a window of one key", lambda: (5, 3, 1, 4)),
        Case("a window shorter than a block", lambda: (10, 2, 3, 4)),
    ),
)


# -- locate --


def locate(cu_seqlens: list[int]) -> tuple[list[int], list[int]]:
    """For each packed token, the first key of its sequence, and how many keys it sees, itself
    included."""
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        for token in range(start, end):
            first_key.append(start)
            num_visible.append(token - start + 1)
    return first_key, num_visible


def _run_locate(solution: Callable, cu_seqlens: list[int]) -> object:
    """Call it; the frame as it is given, with two empty lists, is no attempt."""
    try:
        with _a_list("cu_seqlens"):
            found = solution(cu_seqlens)
    except TypeError as error:
        if str(error) != "'int' object is not iterable":
            raise
        told = f"{error}. With `+=`, a list takes another list; `append` takes one number"
        raise TypeError(told) from error
    if isinstance(found, tuple) and found == ([], []):
        raise NotImplementedError("both lists are empty")
    return found


def _located(
    slips: Slips, cu_seqlens: list[int]
) -> tuple[list[int], list[int]] | list[tuple[int, int]]:
    """`locate` with slips."""
    if "per sequence" in slips:
        return cu_seqlens[:-1], [end - start for start, end in pairwise(cu_seqlens)]
    token, cu = torch.arange(cu_seqlens[-1]), torch.tensor(cu_seqlens)
    sequence = torch.searchsorted(cu[1:].contiguous(), token, right="boundary" not in slips)
    if "boundary of all" in slips:
        sequence = torch.searchsorted(cu, token) - 1
    start, end = cu[sequence], cu[sequence + 1]
    first_key = end if "end" in slips else start
    if "next" in slips:
        first_key = start = end
    counted_from = torch.zeros_like(start) if "global" in slips else start
    num_visible = token + 1 - counted_from
    if "all" in slips:
        num_visible = end - counted_from
    if "remaining" in slips:
        num_visible = end - token
    if "past" in slips:
        num_visible = num_visible - 1
    if "number" in slips:
        first_key = sequence
    if "zero" in slips:
        first_key = torch.zeros_like(token)
    if "token" in slips:
        first_key = token
    if "pairs" in slips:
        return list(zip(first_key.tolist(), num_visible.tolist(), strict=True))
    is_kept = token < end - 1
    if "both short" in slips:
        first_key = first_key[is_kept]
    if slips & {"short", "both short"}:
        num_visible = num_visible[is_kept]
    found = [first_key.tolist(), num_visible.tolist()]
    if "one count" in slips:
        found[1] = [end - start for start, end in pairwise(cu_seqlens)]
    if "other order" in slips:
        found = found[::-1]
    nested = (True, True) if "nested" in slips else ("first nested" in slips, False)
    return tuple(
        [numbers[start:end] for start, end in pairwise(cu_seqlens)] if is_nested else numbers
        for numbers, is_nested in zip(found, nested, strict=True)
    )


_BOUNDARY = (
    "`cu_seqlens[i]` is both the end of one sequence and the beginning of the next. To which of "
    "them does the token of that number belong?"
)
_LAST = (
    "`range(1, n)` stops before `n`. How many keys does the last token of a sequence of 2 "
    "tokens see?"
)
_APPENDED = "`append` adds a whole list as one element. How do you add each of its numbers instead?"
_LOCATE_MISTAKES = (
    Misconception(
        "counting the keys from the beginning of the tensor",
        slip(_located, "global"),
        "The second sequence's first token sees one key. What would it see with this number, "
        "counted from its own first key?",
    ),
    Misconception(
        "giving a boundary's token to the sequence before it",
        slip(_located, "boundary of all"),
        _BOUNDARY,
    ),
    Misconception(
        "giving a boundary's token to the sequence before it",
        slip(_located, "boundary"),
        _BOUNDARY,
    ),
    Misconception(
        "no causal mask within a sequence",
        slip(_located, "all"),
        "That is what a query sees without causality. How many keys does a sequence's first token "
        "see?",
    ),
    Misconception(
        "leaving out the query's own key",
        slip(_located, "past"),
        "How many keys does a sequence's first token see?",
    ),
    Misconception(
        "the number of the sequence in place of its first key",
        slip(_located, "number"),
        "You know which sequence it is. At which row of K does that one begin?",
    ),
    Misconception(
        "the next sequence's first key in place of its own",
        slip(_located, "end"),
        "Which neighbour in `cu_seqlens` is the beginning of a token's sequence, and which is its "
        "end?",
    ),
    Misconception(
        "the next sequence's first key in place of its own",
        slip(_located, "next"),
        "Which neighbour in `cu_seqlens` is the beginning of a token's sequence, and which is its "
        "end?",
    ),
    Misconception(
        "letting every sequence begin at row 0",
        slip(_located, "zero"),
        "Then all sequences attend to the keys of the first, and a test with one sequence does "
        "not see it. At which row does the second begin?",
    ),
    Misconception(
        "the token's own row in place of its sequence's first",
        slip(_located, "token"),
        "From there on lie keys of the token's future. Where does its sequence begin?",
    ),
    Misconception(
        "counting down to the end of the sequence",
        slip(_located, "remaining"),
        "These are the keys from the query on, its future. How many lie between the sequence's "
        "beginning and the query?",
    ),
    Misconception(
        "a list of pairs in place of two lists",
        slip(_located, "pairs"),
        "The numbers are there. How do you get all first keys into one list, and all counts into "
        "another?",
    ),
    Misconception(
        "the right numbers in another order",
        slip(_located, "other order"),
        "Both lists are there. Which of the two does the statement return first?",
    ),
    Misconception(
        "one count for each sequence",
        slip(_located, "one count"),
        "Each token needs a count of its own. How many numbers should the second list have?",
    ),
    Misconception("stopping before a sequence's last token", slip(_located, "short"), _LAST),
    Misconception("stopping before a sequence's last token", slip(_located, "both short"), _LAST),
    Misconception("a list of lists", slip(_located, "nested"), _APPENDED),
    Misconception("a list of lists", slip(_located, "first nested"), _APPENDED),
    Misconception(
        "two numbers for each sequence in place of each token",
        slip(_located, "per sequence"),
        "A row of the kernel is one token. Do two tokens of one sequence see as many keys?",
    ),
)

_LOCATE = TEXTS.exercise(
    "locate",
    minutes=5,
    difficulty=2,
    solution=locate,
    run=_run_locate,
    misconceptions=_LOCATE_MISTAKES,
    combine=together(
        _LOCATE_MISTAKES,
        {"global", "remaining"},
        {"all", "remaining"},
        {"number", "zero", "token"},
        {"other order", "pairs", "nested", "first nested", "one count", "per sequence"},
        {"one count", "pairs", "nested", "first nested", "per sequence"},
        {"one count", "all", "remaining"},
        {"one count", "global"},
        {"one count", "past"},
        {"boundary", "boundary of all"},
        {"next", "end", "number", "zero", "token"},
        {"short", "both short", "pairs", "nested", "first nested", "one count", "per sequence"},
        {"end", "per sequence"},
        {"next", "all", "remaining"},
        {"per sequence", "pairs", "nested", "first nested"},
        {"per sequence", "next"},
        {"per sequence", "global"},
        {"per sequence", "boundary"},
        {"per sequence", "all"},
        {"per sequence", "past"},
        {"per sequence", "number"},
        {"per sequence", "zero"},
        {"per sequence", "token"},
        {"per sequence", "remaining"},
    ),
    cases=(
        Case("two sequences, 2 and 3 tokens", lambda: ([0, 2, 5],)),
        Case("one sequence", lambda: ([0, 4],)),
        Case("an empty sequence in the middle", lambda: ([0, 3, 3, 5],)),
        Case("sequences of one token", lambda: ([0, 1, 2, 3],)),
        Case("an empty one at the beginning, a long one at the end", lambda: ([0, 0, 2, 9],)),
    ),
)


EXERCISES = (_KEYS, _SCORES, _LOCATE, _WALKED, _WINDOW)


# -- two mistakes at once --


def _no_mask_at_all(ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
    return first_key + torch.tensor(ids)[:, None] * BS + torch.arange(BS)


def _clamped_in_the_tensor(ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
    keys = torch.tensor(ids).clamp(min=0)[:, None] * BS + torch.arange(BS)
    return torch.where(keys < num_visible, keys, -1)


def _count_of_ids(ids: list[int], num_blocks: int) -> int:
    return sum(block_id >= 0 for block_id in ids)


def _last_slot_with_an_id(ids: list[int], num_blocks: int) -> int:
    return max((slot for slot, block_id in enumerate(ids) if block_id >= 0), default=0)


def _token_in_the_tensor(cu_seqlens: list[int]) -> tuple[list[int], list[int]]:
    first_key = [start for start, end in pairwise(cu_seqlens) for _ in range(start, end)]
    return first_key, list(range(cu_seqlens[-1]))


def _whole_sequences_from_zero(cu_seqlens: list[int]) -> tuple[list[int], list[int]]:
    lengths = [end - start for start, end in pairwise(cu_seqlens) for _ in range(start, end)]
    return [0] * cu_seqlens[-1], lengths


def _floors(position: int, first_key: int, window_size: int, BS: int) -> tuple[int, int, int]:
    start = max(position - window_size, 0)
    num_visible = position + 1 - start
    return first_key + start, num_visible, num_visible // BS


def _in_the_sequence(
    position: int, first_key: int, window_size: int, BS: int
) -> tuple[int, int, int]:
    start = max(position + 1 - window_size, 0)
    return start, position + 1, -(-(position + 1) // BS)


DOUBLES = (
    Double(
        "first_scores",
        lambda: _Mistaken(frozenset({"padded tensor", "one more"})),
        ("padding the tensor as well as the tile", "storing one row of the padding"),
    ),
    Double(
        "first_scores",
        lambda: _Mistaken(frozenset({"exchanged", "load alone"})),
        ("exchanging query and head", "masking the load alone"),
    ),
    Double(
        "key_rows",
        _no_mask_at_all,
        (
            "loading the keys of an empty slot",
            "loading whatever the list names",
        ),
    ),
    Double(
        "key_rows",
        _clamped_in_the_tensor,
        ("taking an empty slot for block 0", "forgetting where the sequence begins"),
    ),
    Double(
        "walked_slots",
        _count_of_ids,
        ("counting the blocks", "walking up to blocks of the future"),
    ),
    Double(
        "walked_slots",
        _last_slot_with_an_id,
        (
            "the number of the last slot in place of how many there are",
            "walking up to blocks of the future",
        ),
    ),
    Double(
        "locate",
        _token_in_the_tensor,
        (
            "counting the keys from the beginning of the tensor",
            "leaving out the query's own key",
        ),
    ),
    Double(
        "locate",
        _whole_sequences_from_zero,
        ("no causal mask within a sequence", "letting every sequence begin at row 0"),
    ),
    Double(
        "window_row",
        _floors,
        ("a window of one key too many", "forgetting the last, ragged block"),
    ),
    Double(
        "window_row",
        _in_the_sequence,
        (
            "counting the keys from the beginning of the sequence",
            "forgetting where the sequence begins",
        ),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --


def _is_a_share(guess: object) -> bool:
    return isinstance(guess, float) and 0 < guess < 1


PREDICTIONS = TEXTS.predictions(
    globals(),
    mask_becomes={"choices": ("branch", "product", "length")},
    worst_change={"choices": ("64 tokens", "4 warps", "1 stage")},
)
