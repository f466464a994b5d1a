"""Exercises of chapter 11: the rows of K behind a list, a kernel with two bugs in its group, packed
offsets; optional, a list's end and a window's first key."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course import recorder
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

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


_KEYS = TEXTS.exercise(
    "key_rows",
    minutes=8,
    difficulty=2,
    solution=key_rows,
    run=_run_rows,
    misconceptions=diffs(key_rows, [
        ("(block_id >= 0) & ", "", "loading the keys of an empty slot",
         "-1 times BS is an address, too: BS rows before the sequence, in somebody else's keys "
         "or before the tensor. What does your code make of `block_id = -1`?"),
        ({"for block_id in ids:": "for slot, block_id in enumerate(ids):",
          "(block_id >= 0)": "(min(ids[: slot + 1]) >= 0)"}, "stopping at the first empty slot",
         "-1 says that this slot is empty. What does it say about the slots behind it?"),
        ("for block_id in ids:", "for block_id in [max(i, 0) for i in ids]:",
         "taking an empty slot for block 0",
         "Clamping makes the address legal, and the block count. What does a block that is "
         "listed twice do to the softmax?"),
        ("block_id >= 0", "block_id > 0", "taking block 0 for an empty slot",
         "Block 0 holds the first keys of the sequence. Which number says that a slot is empty?"),
        ("for block_id in ids:",
         "for block_id in [i if i >= 0 else (num_visible - 1) // BS for i in ids]:",
         "reading -1 as Python does",
         "In Python, index -1 is the last element. Which block does it name here?"),
        ("for block_id in ids:", "for block_id in [i for i in ids if i >= 0]:",
         "leaving out the rows of empty slots",
         "A kernel's loop walks the slots, and each step has a tile of its own. What does the "
         "tile of an empty slot load?"),
        ("key < num_visible", "tokens >= 0", "loading whatever the list names",
         "The list decides which blocks a query wants. Which number says how far it may see?"),
        ("key < num_visible", "tokens < num_visible", "counting a token in its block",
         "`num_visible` counts in the sequence. Where does the block begin?"),
        ("key < num_visible", "key // BS * BS < num_visible",
         "loading the whole block that the query stands in",
         "The last visible block is often visible in part. What do its other keys know that the "
         "query must not?"),
        ("key < num_visible", "key < num_visible // BS * BS",
         "leaving out the block that is visible in part",
         "`num_visible // BS` counts whole blocks. In which block is the query's own key?"),
        ("key < num_visible", "key <= num_visible", "seeing one key too many",
         "`num_visible` keys are numbered from 0. Which number has the last of them?"),
        ("key < num_visible", "key < num_visible - 1", "losing the last visible key",
         "With causal attention, the last visible key is the query's own. Does a query see "
         "itself?"),
        ("key < num_visible", "first_key + key < num_visible",
         "comparing a row of K with a count of the sequence",
         "`num_visible` counts from the sequence's first key. From where do the numbers count "
         "that you compare with it?"),
        ("first_key + key", "key", "forgetting where the sequence begins",
         "Block 0 of the second sequence is not block 0 of the tensor. At which row of K does it "
         "begin?"),
        ("first_key + key", "first_key + tokens", "forgetting where the block begins",
         "`tokens` counts from 0 in every block. How many keys of the sequence lie before block "
         "2?"),
        ("first_key + key", "first_key + block_id + tokens", "counting ids in tokens",
         "How many keys lie between the beginning of block 0 and that of block 2?"),
        ("key < num_visible", "block_id + tokens < num_visible", "counting ids in tokens"),
        ("block_id * BS + tokens", "block_id + tokens", "counting ids in tokens"),
        ({"block_id * BS + tokens": "block_id + tokens",
          "(block_id >= 0)": "(0 <= block_id * BS < num_visible)"}, "counting ids in tokens"),
        (", -1)", ", 0)", "row 0 in place of −1",
         "Row 0 of K is a key like any other. How does your tensor say that an element loads "
         "nothing?"),
    ]),
    cases=(
        Case("an empty slot in the middle", lambda: ([0, -1, 1], 0, 4, 2)),
        Case("a block that is visible in part", lambda: ([2, 0], 0, 5, 2)),
        Case("the second sequence", lambda: ([1, -1, 0], 6, 6, 4)),
        Case("a block of the future", lambda: ([3, 1], 5, 6, 3)),
        Case("nothing but empty slots", lambda: ([-1, -1], 3, 6, 2)),
        Case("a long list, first slot empty", lambda: ([-1, 4, -1, 0, 2], 8, 14, 3)),
        Case("fewer visible keys than a block has", lambda: ([0, 2], 3, 2, 4)),
    ),
)  # fmt: skip


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


_MEMORY = 512  # pieces of Q and numbers of Score: more than any mistake reaches
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
    try:
        last = (grid[0] - 1, grid[1] - 1)
        return recorder.run(kernel, last, given, grid).outside()
    except Exception:  # a kernel with words that the recorder does not know
        return 0


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
    misconceptions=diffs(first_scores, [
        ("group < G", "group < GT", "storing the padding",
         "Behind the group's numbers in `Score` lie those of the next KV head. The interpreter "
         "runs programs in order, so their owner stores last and hides it. What does a GPU "
         "promise?"),
        ("(query * H + head) * G", "query * H + head * G", "too short a step from query to query",
         "Only `head` is multiplied by `G` here. How many pieces of Q belong to one query, over "
         "all its KV heads?"),
        ("(query * H + head) * G", "query * H * G + head",
         "too short a step from KV head to KV head",
         "Program (0, 1) begins behind program (0, 0). How many pieces has that one?"),
        ("(query * H + head) * G", "query * H + head", "forgetting that each program has G pieces",
         "Program (0, 1) begins behind program (0, 0). How many pieces has that one?"),
        ("(query * H + head) * G", "(query + head) * G", "counting one group for each query",
         "Program (1, 0) begins behind all groups of query 0. There are `H` of them. How many "
         "pieces is that?"),
        ("(query * H + head) * G", "(query * H + head) * GT",
         "padding the tensor as well as the tile",
         "The tile has gaps, the tensor has none. How many pieces of Q lie between two "
         "neighbouring programs?"),
        ("(query * H + head) * G", "(query * H + head) * G * D",
         "counting elements in place of pieces",
         "`group_row` counts pieces, and the load multiplies by `D` itself. How many pieces lie "
         "before the program's first one?"),
        ("(query * H + head) * G", "(head * H + query) * G", "exchanging query and head",
         "The last axis of `[R, H, G]` runs fastest, then the one before it. Which of the two is "
         "further out, query or head?"),
        ("(query * H + head) * G", "query * G", "leaving out the KV head",
         "All programs of one query store to the same place. Which number tells them apart?"),
        ("(query * H + head) * G", "head * G", "leaving out the query",
         "All queries load and store the pieces of query 0. How many pieces does each query "
         "before yours have?"),
        ("Score + group_row", "Score + group", "storing at the beginning of `Score`",
         "`group` counts within one group, so every program stores to the same place. Which "
         "numbers of `Score` belong to this program?"),
        ("K + head", "K + query", "a key that is not the KV head's",
         "`K` is `[H, D]` here: one key for each KV head, shared by all queries. The line that "
         "loads it was right. Which number of the program names its KV head?"),
        ("K + head", "K + (query * H + head)", "a key that is not the KV head's"),
        ("K + head", "K + head * G", "a key that is not the KV head's"),
        ("K + head", "K + 0", "a key that is not the KV head's"),
        ("group < G", "group <= G", "storing one row of the padding",
         "The heads of a group are numbered from 0. Which number has the last of `G`?"),
        ("group < G", "group < G - 1", "leaving out the group's last head",
         "The heads of a group are numbered from 0. Which number has the last of `G`?"),
        ("group < G", "(query * H + head) * G + group < G",
         "comparing a piece of Q with the size of a group",
         "`group_row` counts pieces of the whole tensor. Which numbers count within the group?"),
        ("group < G", "group < H", "comparing with the number of KV heads",
         "`H` is how many KV heads there are. How many query heads share one of them?"),
        ("group < G", "group < D", "comparing with the width of a head",
         "`D` is how many channels a head has. How many query heads has the group?"),
        ("group < G", "group < H * G", "comparing with the number of all query heads",
         "`H * G` counts the query heads of all groups. How many has the group of one program?"),
        ("group < G", "(query * H + head) * G + group < tl.num_programs(0) * H * G",
         "masking nothing but the tensor's end",
         "The padding reaches into the next KV head's pieces long before the tensor ends. Who "
         "owns them?"),
        (", mask=in_group)", ")", "masking the load alone",
         "Masked rows are loaded as zeros, and then your store writes what became of them. Where?"),
        ("mask=in_group[:, None]", "mask=group[:, None] < GT", "masking the store alone",
         "The numbers are right, but the last program also loads pieces that lie behind the end "
         "of Q. Which mask does the load have?"),
    ]),
    cases=(
        _scores_case("one program of two, a group of 3", (1, 1), 1, 2, 3),
        _scores_case("two queries, one KV head each", (2, 1), 2, 1, 3),
        _scores_case("two queries, two KV heads", (2, 2), 2, 2, 3),
        _scores_case("a group of 16", (2, 2), 2, 2, 16),
        _scores_case("a group of 20", (2, 3), 2, 3, 20),
        _scores_case("three KV heads, groups of 4", (2, 3), 2, 3, 4),
    ),
)  # fmt: skip


# -- walked_slots --


def walked_slots(ids: list[int], num_blocks: int) -> int:
    """How many slots of the list a program walks: up to the last that names one of the first
    num_blocks blocks."""
    num_slots = 0
    for slot, block_id in enumerate(ids):
        if 0 <= block_id < num_blocks:
            num_slots = slot + 1
    return num_slots


_WALKED = TEXTS.exercise(
    "walked_slots",
    minutes=3,
    difficulty=1,
    solution=walked_slots,
    misconceptions=diffs(walked_slots, [
        ("num_slots = slot + 1", "num_slots += 1", "counting the blocks",
         "An empty slot may lie in the middle. If the program walks as many slots as there are "
         "blocks, where does it stop?"),
        ("return num_slots", "return min(len(ids), num_blocks)",
         "walking as many slots as there are visible blocks",
         "A list names some of the visible blocks, in any of its slots. Which slot is the last "
         "that matters?"),
        ("num_slots = slot + 1", "num_slots = slot + 1\n        else:\n            break",
         "stopping at the first slot without a visible block",
         "-1 says that this slot is empty. What does it say about the slots behind it?"),
        ({"if ": "num_slots = slot + 1\n        if not ", "    num_slots = slot + 1": "    break"},
         "counting the slot that ended the loop",
         "A `break` leaves the loop's number at the empty slot, and adding 1 counts that slot, "
         "too. Besides, what if a visible block stands behind it?"),
        ("num_slots = slot + 1", "num_slots = slot",
         "the number of the last slot in place of how many there are",
         "Slots are numbered from 0. If the last block lies in slot 2, how many slots are walked?"),
        (" < num_blocks", "", "walking up to blocks of the future",
         "A block behind the last visible one is named, and nothing of it is loaded. Does the "
         "walk have to reach its slot?"),
        (" < num_blocks", " <= num_blocks", "taking one block too many for visible",
         "Blocks are numbered from 0. Which number has the last of `num_blocks` blocks?"),
        ("0 <= block_id", "0 < block_id", "taking block 0 for an empty slot",
         "Block 0 holds the first keys of the text. Which number says that a slot is empty?"),
        ("0 <= block_id", "block_id", "taking an empty slot for a visible block",
         "-1 is below `num_blocks`, too. Which second condition does a block's number meet?"),
        ("return num_slots", "return len(ids)", "walking everything",
         "Right, and slower. How many steps does a list take that is empty at its end?"),
        ("num_slots = slot + 1", "num_slots = max(num_slots, block_id + 1)",
         "mixing up blocks and slots",
         "Block 7 may lie in slot 0. Does the loop count blocks, or the slots that name them?"),
        ("return num_slots", "return max(ids, default=-1) + 1", "mixing up blocks and slots"),
        ({"num_slots = 0": "num_slots = []", "num_slots = slot + 1": "num_slots.append(slot)"},
         "a list in place of a number",
         "These are the slots that matter. How many slots does the walk take to reach the last?"),
        ({"num_slots = 0": "num_slots = []", "num_slots = slot + 1": "num_slots.append(block_id)"},
         "a list in place of a number"),
        ({"num_slots = 0": "num_slots, seen = 0, []",
          "num_slots = slot + 1": "seen.append(slot)\n            num_slots = slot + 1 - seen[0]"},
         "leaving out empty slots at the beginning",
         "The walk begins at slot 0. Does it jump over empty slots there?"),
        ("return num_slots", "return max(num_slots, 1)", "walking a list that names nothing",
         "Every list takes a step of yours. How many slots does `[-1, -1]` make the program walk?"),
    ]),
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
)  # fmt: skip


# -- window_row --


def window_row(position: int, first_key: int, window_size: int, BS: int) -> tuple[int, int, int]:
    """A window's first row of K, how many keys from there are visible, and how many blocks of BS
    its program walks."""
    end = position + 1
    start = max(end - window_size, 0)
    num_visible = end - start
    return first_key + start, num_visible, -(-num_visible // BS)


_WINDOW = TEXTS.exercise(
    "window_row",
    minutes=6,
    difficulty=2,
    solution=window_row,
    misconceptions=diffs(window_row, [
        ("end - window_size", "end - window_size - 1", "a window of one key too many",
         "Take `window_size = 1`. Which keys should the query see, and how many are these?"),
        ("position + 1", "position", "a window without the query's own key",
         "Take `window_size = 1`. Which key is left for the query to see?"),
        (", 0)", ", 0) // BS * BS", "beginning at a block's edge",
         "Whole blocks give some queries up to BS - 1 keys more than others. How many keys has "
         "each query's window?"),
        ("first_key + start", "first_key + end - window_size",
         "a row before the sequence, beside the right count",
         "Your count stops at the sequence's beginning. Where does the window's row begin for "
         "the query at position 0?"),
        (", 0)", ", -first_key)", "reaching back before the sequence",
         "Rows of K before `first_key` exist, but in another sequence. Where does the window of "
         "an early query end on the left?"),
        ("max(end - window_size, 0)", "end - window_size", "reaching back before the tensor",
         "Where is the window of the very first query?"),
        ("end - start", "end", "counting the keys from the beginning of the sequence",
         "The row has moved forward. If the count stays, where does the last visible key lie?"),
        ("end - start", "window_size", "as many keys for early queries as for late ones",
         "How many keys does the query at position 0 see, whatever the window?"),
        ("end - start", "min(position, window_size)", "leaving out early queries' own key",
         "The query at position 0 sees itself. How many keys is that?"),
        ("end - start", "position - start", "counting steps in place of keys",
         "The row is right. From key 2 to key 3 is one step. How many keys are these?"),
        ("-(-num_visible // BS)", "num_visible / BS", "a fraction of a block",
         "A loop takes whole steps. How many blocks of 2 hold one key?"),
        ("-(-num_visible // BS)", "num_visible // BS", "forgetting the last, ragged block",
         "How many blocks of 4 hold 6 keys?"),
        ("-(-num_visible // BS)", "-(-window_size // BS)",
         "as many blocks for early queries as for late ones",
         "The query at position 0 sees one key. How many blocks hold it?"),
        ("-(-num_visible // BS)", "num_visible // BS + 1", "one block more than the window needs",
         "How many blocks of 2 hold 2 keys?"),
        ("-(-num_visible // BS)", "(end - 1) // BS - start // BS + 1",
         "counting the sequence's blocks that the window touches",
         "A window of 2 may touch two blocks of 2 that are aligned to the sequence. From where "
         "are the window's own blocks counted?"),
        ("first_key + start", "start", "forgetting where the sequence begins",
         "The window's first key is counted in the sequence, and a row in K. At which row does "
         "the sequence begin?"),
        ("end = position", "position -= first_key\n    end = position",
         "taking the position for a row of K",
         "`position` is counted in the query's own sequence. What is taken off it already?"),
        ("first_key + start, num_visible", "num_visible, first_key + start",
         "the right numbers in another order",
         "All three are there. In which order does the statement return them?"),
    ]),
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
)  # fmt: skip


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


def _by_search(cu_seqlens: list[int], bounds: list[int], offset: int) -> tuple[list, list]:
    """The sequence of each token from a search that puts a boundary's token before the boundary."""
    sequences = [bisect_left(bounds, token) + offset for token in range(cu_seqlens[-1])]
    first_key = [cu_seqlens[sequence] for sequence in sequences]
    return first_key, [token - first + 1 for token, first in enumerate(first_key)]


_LOCATE = TEXTS.exercise(
    "locate",
    minutes=5,
    difficulty=2,
    solution=locate,
    run=_run_locate,
    misconceptions=diffs(locate, [
        (" - start", "", "counting the keys from the beginning of the tensor",
         "The second sequence's first token sees one key. What would it see with this number, "
         "counted from its own first key?"),
        (lambda cu: _by_search(cu, cu, -1), "giving a boundary's token to the sequence before it",
         "`cu_seqlens[i]` is both the end of one sequence and the beginning of the next. To "
         "which of them does the token of that number belong?"),
        (lambda cu: _by_search(cu, cu[1:], 0),
         "giving a boundary's token to the sequence before it"),
        ("token - start + 1", "end - start", "no causal mask within a sequence",
         "That is what a query sees without causality. How many keys does a sequence's first "
         "token see?"),
        (" + 1", "", "leaving out the query's own key",
         "How many keys does a sequence's first token see?"),
        ({"start, end in pairwise": "i, (start, end) in enumerate(pairwise", "lens):": "lens)):",
          "append(start)": "append(i)"}, "the number of the sequence in place of its first key",
         "You know which sequence it is. At which row of K does that one begin?"),
        ("append(start)", "append(end)", "the next sequence's first key in place of its own",
         "Which neighbour in `cu_seqlens` is the beginning of a token's sequence, and which is "
         "its end?"),
        ({"append(start)": "append(end)", " - start": " - end"},
         "the next sequence's first key in place of its own"),
        ("append(start)", "append(0)", "letting every sequence begin at row 0",
         "Then all sequences attend to the keys of the first, and a test with one sequence does "
         "not see it. At which row does the second begin?"),
        ("append(start)", "append(token)", "the token's own row in place of its sequence's first",
         "From there on lie keys of the token's future. Where does its sequence begin?"),
        ("token - start + 1", "end - token", "counting down to the end of the sequence",
         "These are the keys from the query on, its future. How many lie between the sequence's "
         "beginning and the query?"),
        ("return first_key, num_visible", "return list(zip(first_key, num_visible, strict=True))",
         "a list of pairs in place of two lists",
         "The numbers are there. How do you get all first keys into one list, and all counts "
         "into another?"),
        ("return first_key, num_visible", "return num_visible, first_key",
         "the right numbers in another order",
         "Both lists are there. Which of the two does the statement return first?"),
        ("    num_visible.append(token - start + 1)", "num_visible.append(end - start)",
         "one count for each sequence",
         "Each token needs a count of its own. How many numbers should the second list have?"),
        ("    num_visible.append(token - start + 1)", "num_visible += range(1, end - start)",
         "stopping before a sequence's last token",
         "`range(1, n)` stops before `n`. How many keys does the last token of a sequence of 2 "
         "tokens see?"),
        ("range(start, end)", "range(start, end - 1)", "stopping before a sequence's last token"),
        ("return first_key, num_visible",
         "return tuple([x[i:j] for i, j in pairwise(cu_seqlens)] "
         "for x in (first_key, num_visible))",
         "a list of lists",
         "`append` adds a whole list as one element. How do you add each of its numbers instead?"),
        ("return first_key, num_visible",
         "return [first_key[i:j] for i, j in pairwise(cu_seqlens)], num_visible",
         "a list of lists"),
        ("return first_key, num_visible",
         "return cu_seqlens[:-1], [end - start for start, end in pairwise(cu_seqlens)]",
         "two numbers for each sequence in place of each token",
         "A row of the kernel is one token. Do two tokens of one sequence see as many keys?"),
    ]),
    cases=(
        Case("two sequences, 2 and 3 tokens", lambda: ([0, 2, 5],)),
        Case("one sequence", lambda: ([0, 4],)),
        Case("an empty sequence in the middle", lambda: ([0, 3, 3, 5],)),
        Case("sequences of one token", lambda: ([0, 1, 2, 3],)),
        Case("an empty one at the beginning, a long one at the end", lambda: ([0, 0, 2, 9],)),
    ),
)  # fmt: skip


EXERCISES = (_KEYS, _SCORES, _LOCATE, _WALKED, _WINDOW)


DOUBLES = (
    Double("first_scores",
           names=("padding the tensor as well as the tile", "storing one row of the padding")),
    Double("first_scores", names=("exchanging query and head", "masking the load alone")),
    Double("key_rows",
           names=("loading the keys of an empty slot", "loading whatever the list names")),
    Double("key_rows",
           names=("taking an empty slot for block 0", "forgetting where the sequence begins")),
    Double("walked_slots", names=("counting the blocks", "walking up to blocks of the future")),
    Double("walked_slots",
           names=("the number of the last slot in place of how many there are",
                  "walking up to blocks of the future")),
    Double("locate",
           names=("counting the keys from the beginning of the tensor",
                  "leaving out the query's own key")),
    Double("locate",
           names=("no causal mask within a sequence", "letting every sequence begin at row 0")),
    Double("window_row",
           names=("a window of one key too many", "forgetting the last, ragged block")),
    Double("window_row",
           names=("counting the keys from the beginning of the sequence",
                  "forgetting where the sequence begins")),
)  # fmt: skip


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
