"""Exercises of chapter 11: the rows of K behind a list, and an attention kernel from an empty cell;
optional, a kernel with two bugs in its group, packed offsets, a list's end and a window's first
key."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nsa_tutorial.course import recorder
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import ROOM, roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.course.values import same
from nsa_tutorial.course.watching import watching
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse import selected_attention

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
        ("first_key + key", "(first_key + block_id) * BS + tokens",
         "counting the sequence's first row in blocks",
         "`first_key` is a row already, and `BS` rows make a block. Which of the two is multiplied "
         "by `BS`?"),
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
        ("(query * H + head) * G + group", "query * H * G + group * H + head",
         "the head layout [R, G, H]",
         "Your program takes the query heads with `hq % H == head`. A KV head serves those with "
         "`hq // G == head`. Which axis of `[R, H, G]` runs faster, `H` or `G`?"),
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


# -- triton_selected_attention --


@triton.jit
def attend_to_list(
    Q, K, V, BlockIndices, FirstKey, NumVisible, Output, LSE, scale, H, S,
    D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, G: tl.constexpr, GT: tl.constexpr,
):  # fmt: skip
    """The output and lse of one query and KV head; the grid is `(R, H)`."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, visible = tl.load(FirstKey + query).to(tl.int64), tl.load(NumVisible + query)
    group, tokens = tl.arange(0, GT), tl.arange(0, BS)
    width, value_width = tl.arange(0, D), tl.arange(0, DV)
    rows = ((query * H + head) * G + group)[:, None]  # [GT, 1], pieces of Q
    in_group = (group < G)[:, None]  # [GT, 1]
    k_offset = tokens[:, None] * (H * D) + width  # [BS, D]
    v_offset = tokens[:, None] * (H * DV) + value_width  # [BS, DV]
    q_tile = tl.load(Q + rows * D + width, mask=in_group, other=0.0)  # [GT, D]
    acc_o = tl.zeros([GT, DV], tl.float32)
    running_sum = tl.zeros([GT], tl.float32)
    scores_max = tl.full([GT], float("-inf"), tl.float32)
    for slot in range(S):
        block_id = tl.load(BlockIndices + (query * H + head) * S + slot)
        start = block_id * BS
        is_seen = (block_id >= 0) & (start + tokens < visible)  # [BS]
        piece = (first + start) * H + head
        k_tile = tl.load(K + piece * D + k_offset, mask=is_seen[:, None], other=0.0)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale  # [GT, BS]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(scores_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(scores_max - shift)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        v_tile = tl.load(V + piece * DV + v_offset, mask=is_seen[:, None], other=0.0)
        acc_o = acc_o * rescale[:, None] + tl.dot(weights, v_tile, input_precision="ieee")
        scores_max = new_max
    total = tl.where(running_sum == 0, 1.0, running_sum)
    tl.store(Output + rows * DV + value_width, acc_o / total[:, None], mask=in_group)
    lse_rows = LSE + (query * H + head) * G + group
    tl.store(lse_rows, scores_max + tl.log(total), mask=group < G)


def triton_selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, first_key: Tensor,
    num_visible: Tensor, block_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [R, HQ, D], k [M, H, D], v [M, H, DV], block_indices [R, H, S], first_key and num_visible
    [R]. Returns o [R, HQ, DV] and lse [R, HQ]."""
    (R, HQ, D), (H, DV), S = q.shape, v.shape[1:], block_indices.shape[2]
    G = HQ // H
    o, lse = q.new_empty(R, HQ, DV), q.new_empty(R, HQ)
    tensors = q, k, v, block_indices, first_key, num_visible, o, lse
    sizes = {"D": D, "DV": DV, "BS": block_size, "G": G, "GT": max(16, triton.next_power_of_2(G))}
    attend_to_list[R, H](*tensors, D**-0.5, H, S, **sizes, num_warps=1)
    return o, lse


_TOLERANCE = 1e-4


class StoresElsewhere(Exception):
    """The numbers are right, and a program stored outside of its tensors."""


class LoadsElsewhere(Exception):
    """The numbers are right, and a load touched memory outside of its tensor."""


class SharedPlace(Exception):
    """The numbers are right, and programs get in each other's way, which a GPU does not forgive."""


class RoundedInputs(Exception):
    """The numbers are right on a CPU, and a GPU would round the inputs of a product to TF32."""


class _Attended(NamedTuple):
    """What a launch left behind.

    Attributes:
        o: the output, NaN where nothing was stored.
        lse: empty where only the output is judged.
    """

    o: object
    lse: object


class _Allocations(TorchFunctionMode):
    """Gives each tensor of floats that is made inside room around it, whose bits are all set: a
    store that misses the tensor is seen there, and hits nothing else. Such a number is NaN, and no
    arithmetic makes it."""

    MAKERS = ("empty", "zeros", "ones", "full", "empty_strided")

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        maker = getattr(func, "__name__", "").removeprefix("new_").removesuffix("_like")
        if maker not in self.MAKERS or not made.is_floating_point() or not made.numel():
            return made
        self.made.append(roomy(made, math.nan))
        for room in _room_of(self.made[-1]):
            room.fill_(255)
        return self.made[-1]

    def stored_outside(self) -> int:
        """How many numbers around these tensors were stored, whatever was stored."""
        return sum(
            int((room != 255).view(-1, x.element_size()).any(1).sum())
            for x in self.made
            for room in _room_of(x)
        )


def _room_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes before and behind a roomy tensor."""
    whole = x.as_strided((2 * ROOM + x.numel(),), (1,), 0).view(torch.uint8)
    return whole[: ROOM * x.element_size()], whole[-ROOM * x.element_size() :]


@contextmanager
def _precisions() -> Iterator[list[str]]:
    """How each product of the interpreter treats fp32, by the names of its constants."""
    seen: list[str] = []
    if not environment.detect().triton_interpreted:
        yield seen  # a GPU's numbers tell
        return
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def watched_dot(self: object, a: object, b: object, d: object, precision: object, *rest):
        seen.append(getattr(precision, "name", str(precision)))
        return dot(self, a, b, d, precision, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", watched_dot):
        yield seen


def _run_attention(
    solution: Callable, tensors: tuple[Tensor, ...], block_size: int, judged: str,
    right: tuple[Tensor, Tensor],
) -> _Attended:  # fmt: skip
    """Call it; around the keys and values lies NaN, other tensors have room, too, and a masked
    place of a load without `other` is NaN.

    Raises:
        StoresElsewhere, LoadsElsewhere, SharedPlace, RoundedInputs: if the result is `right`.
    """
    if hasattr(solution, "run"):
        raise TypeError("this is the kernel itself: hand over the function that launches it")
    given = [roomy(x, math.nan if x.is_floating_point() else 0) for x in tensors]
    with (
        warnings.catch_warnings(), np.errstate(all="ignore"), watching(unset=math.nan) as seen,
        _precisions() as precisions, _Allocations() as allocations,
    ):  # fmt: skip
        warnings.simplefilter("ignore", RuntimeWarning)  # the verdict says where NaN comes from
        found = solution(*given, block_size)
    if found is None:
        raise TypeError("it returns None: is `return o, lse` missing?")
    pair = found if isinstance(found, tuple | list) else (found,)
    if judged == "o and lse" and len(pair) < 2:
        raise TypeError("it returns one value: `return o, lse`")
    attended = _Attended(pair[0], pair[1] if judged == "o and lse" else ())
    expected = _Attended(right[0], right[1] if judged == "o and lse" else ())
    if same(attended, expected, _TOLERANCE):
        _refuse_by_luck(allocations.stored_outside(), seen.faults, precisions)
    return attended


def _refuse_by_luck(stored_outside: int, faults: list[str], precisions: list[str]) -> None:
    """Refuse a launch whose numbers are right here and need not be on a GPU."""
    if stored_outside:
        raise StoresElsewhere(
            f"The numbers are right, but the programs stored {stored_outside} more, before or "
            "behind the tensors that you made. Which rows of the tile are nobody's?"
        )
    if faults:
        kind = LoadsElsewhere if "outside" in faults[0] else SharedPlace
        raise kind(f"The numbers are right, but see {faults[0]}")
    if any(name != "IEEE" for name in precisions):
        raise RoundedInputs("The numbers are right on a CPU. On a GPU, a dot takes TF32's ten bits")


def _attention_case(
    name: str, ids: list, visible: list[int], *, first: list[int] | None = None, G: int = 16,
    M: int | None = None, D: int = 32, DV: int = 64, hidden_from: int | None = None,
    growing: bool = False, judged: str = "o",
) -> Case:  # fmt: skip
    """A case of lists `[R, H, S]`, in blocks of 16 keys.

    Args:
        visible, first: how many keys each query sees, and from which row on; 0 where not given.
        M: rows of `k`; by default, no more than are seen.
        hidden_from: the keys and values from this row on are NaN.
        growing: scores lie far apart, and later blocks have larger ones.
    """
    R, H, first = len(ids), len(ids[0]), first or [0] * len(ids)
    M = M or max(start + n for start, n in zip(first, visible, strict=True))
    seed = R + 10 * H + 100 * G + M

    @functools.cache
    def arguments() -> tuple:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(shape, generator=generator)
            for shape in ((R, H * G, D), (M, H, D), (M, H, DV))
        )
        if growing:
            q, k = q.abs(), k + torch.arange(M)[:, None, None]
        if hidden_from is not None:
            k[hidden_from:], v[hidden_from:] = math.nan, math.nan
        numbers = (torch.tensor(x, dtype=torch.int32) for x in (ids, first, visible))
        given = q, k, v, *numbers
        return given, 16, judged, _by_pytorch(*given, 16)

    here = environment.detect()
    return Case(name, arguments, lambda: here.why_not("triton", here.device))


def _by_pytorch(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, first_key: Tensor,
    num_visible: Tensor, block_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and lse by PyTorch, of what `triton_selected_attention` is given."""
    rows = selected_attention.QueryRows(first_key, num_visible, num_visible - 1)
    o, lse = selected_attention.forward(
        q[None], k[None], v[None], block_indices, rows, block_size=block_size,
        scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    return o[0], lse[0]


_ATTENTION = TEXTS.exercise(
    "triton_selected_attention",
    minutes=25,
    difficulty=3,
    solution=triton_selected_attention,
    parts=(attend_to_list,),
    run=_run_attention,
    launches="triton",
    tolerance=_TOLERANCE,
    forbidden=(
        ("nsa_tutorial", "the course's own function"),
        ("torch.softmax", "PyTorch's softmax"),
        ("torch.scaled_dot_product_attention", "PyTorch's attention"),
        ("torch.matmul", "PyTorch's matrix product"),
        ("torch.__matmul__", "PyTorch's matrix product"),
        ("torch.bmm", "PyTorch's matrix product"),
        ("torch.einsum", "PyTorch's `einsum`"),
    ),
    stages=(
        Stage("one block", (
            _attention_case("one query that sees block 0", [[[0]]], [16], DV=32),
            _attention_case("one query that sees block 2", [[[2]]], [48]),
        )),
        Stage("many blocks", (
            _attention_case("blocks 1 and 0", [[[1, 0]]], [32]),
            _attention_case("four blocks, each with larger scores than the one before",
                            [[[0, 1, 2, 3]]], [64], growing=True),
            _attention_case("four blocks, each with smaller scores than the one before",
                            [[[3, 2, 1, 0]]], [64], growing=True),
        )),
        Stage("queries and heads", (
            _attention_case("three queries", [[[0, 2]], [[1, 0]], [[2, 1]]], [48, 48, 48]),
            _attention_case("two queries, two KV heads", [[[0, 1], [2, 0]], [[1, 2], [0, 1]]],
                            [48, 48]),
        )),
        Stage("the future", (
            _attention_case("7 of block 0's 16 keys are visible", [[[0]]], [7], M=16),
            _attention_case("5 of block 1's 16 keys are visible", [[[0, 1]]], [21], M=48),
            _attention_case("a block of the future", [[[2, 0]]], [20], M=48),
            _attention_case("three queries in one block", [[[0, 1]], [[1, 0]], [[0, 1]]],
                            [18, 19, 20], M=32),
            _attention_case("all that the query does not see is NaN", [[[0, 1]]], [21],
                            M=48, hidden_from=21),
        )),
        Stage("-1 in the list", (
            _attention_case("an empty slot in the middle", [[[1, -1, 0]]], [32]),
            _attention_case("an empty slot at the end", [[[0, -1], [1, -1]]], [29]),
        )),
        Stage("empty rows", (
            _attention_case("an empty slot first", [[[-1, 0]]], [16]),
            _attention_case("nothing but empty slots", [[[-1, -1]], [[1, 0]]], [16, 32]),
        )),
        Stage("a group of 3", (
            _attention_case("one KV head, 3 query heads", [[[0, 1]]], [27], G=3),
            _attention_case("two KV heads, 6 query heads", [[[0, 1], [1, 0]], [[1, 0], [0, -1]]],
                            [27, 30], G=3),
            _attention_case("a group of 20", [[[0, 1]], [[1, 0]]], [24, 25], G=20),
        )),
        Stage("packed", (
            _attention_case("two sequences, of 21 and 30 keys",
                            [[[1, 0], [0, 1]], [[0, -1], [1, 0]]], [21, 30], first=[0, 21]),
        )),
        Stage("lse", (
            _attention_case("one block, and its `lse`", [[[0]]], [16], judged="o and lse"),
            _attention_case("two sequences, and a row that sees nothing",
                            [[[1, 0], [-1, 0]], [[0, -1], [-1, -1]]], [19, 26], first=[0, 19],
                            G=3, growing=True, judged="o and lse"),
        )),
    ),
    misconceptions=diffs(triton_selected_attention, [
        (" * scale", "", "scores without the scale",
         "A score is a product of `D` numbers. By what is it multiplied before the softmax?"),
        ("D**-0.5", "1 / D", "dividing by D in place of √D",
         "The scale keeps a score's spread at 1 as `D` grows. How does the spread of a sum of `D` "
         "products grow?"),
        ("start = block_id * BS", "start = block_id", "taking an id for a token",
         "Block 2 begins `2 * BS` keys behind block 0. How far behind does yours begin?"),
        ({"start + tokens < visible": "block_id * BS + tokens < visible",
          "start = block_id * BS": "start = block_id"}, "taking an id for a token"),
        ("* rescale + tl", "+ tl", "a sum that is not rescaled",
         "When the maximum rises, what was summed before is too large. Where is the sum brought "
         "to the new maximum?"),
        ("acc_o * rescale[:, None]", "acc_o", "an output that is not rescaled",
         "The sum is brought to the new maximum. What else was added up under the old one?"),
        ({"* rescale + tl": "+ tl", "acc_o * rescale[:, None]": "acc_o"},
         "nothing is rescaled when the maximum rises",
         "Two numbers were added up under the old maximum. Which?"),
        ("tl.maximum(scores_max, tl.max(scores, axis=1))", "tl.max(scores, axis=1)",
         "the block's own maximum in place of the running one",
         "A later block may have smaller scores. Then `scores_max - new_max` is large, and its "
         "power may overflow. Of which scores is the running maximum?"),
        ("rescale[:, None] + tl.dot(weights,",
         "rescale[:, None] + tl.dot(weights / tl.sum(weights, axis=1)[:, None],",
         "dividing by the sum of each block",
         "A block's weights sum to 1 in yours, however small its scores are. When is the whole "
         "sum known?"),
        ("acc_o / total[:, None]", "acc_o", "leaving out the division by the sum",
         "Weights sum to 1. What do yours sum to?"),
        ("scores_max = new_max", "scores_max = scores_max",
         "a running maximum that never moves on",
         "The next block compares with `scores_max`. Where does it take the new value?"),
        ("attend_to_list[R, H]", "attend_to_list[1, H]", "a program for the first query alone",
         "Rows that no program stores are NaN here. How many programs does the grid have?"),
        ("attend_to_list[R, H]", "attend_to_list[R, 1]", "a program for the first KV head alone",
         "Heads that no program stores are NaN here. How many programs does the grid have?"),
        ({"rows = ((query * H + head) * G + group)": "rows = (query * H * G + group * H + head)",
          "LSE + (query * H + head) * G + group": "LSE + query * H * G + group * H + head"},
         "the head layout [R, G, H]",
         "Your program takes the query heads with `hq % H == head`. A KV head serves those with "
         "`hq // G == head`. Which axis of `[R, H, G, D]` runs faster, `H` or `G`?"),
        ({"rows = ((query * H + head) * G": "rows = ((query * H + head)",
          "LSE + (query * H + head) * G": "LSE + (query * H + head)"},
         "forgetting that each program has G rows",
         "Program (0, 1) begins behind program (0, 0). How many rows of `Q` has that one?"),
        ({"rows = ((query * H + head) * G": "rows = (query * H + head * G",
          "LSE + (query * H + head) * G": "LSE + query * H + head * G"},
         "too short a step from query to query",
         "Only `head` is multiplied by `G` here. How many rows of `Q` has one query, over all its "
         "KV heads?"),
        ({"rows = ((query * H + head) * G": "rows = ((query * H + head) * GT",
          "LSE + (query * H + head) * G": "LSE + (query * H + head) * GT"},
         "padding the tensor as well as the tile",
         "The tile has idle rows, the tensor has none. How many rows lie between two neighbouring "
         "programs?"),
        ("BlockIndices + (query * H + head) * S", "BlockIndices + query * S",
         "one list for all KV heads",
         "`block_indices` is `[R, H, S]`. How many lists lie before that of program (1, 1)?"),
        ("tokens[:, None] * (H * D)", "tokens[:, None] * D",
         "stepping to the next head in place of the next key",
         "In `[M, H, D]`, a key's heads lie side by side. How many elements lie between one key "
         "and the next?"),
        ({"tokens[:, None] * (H * D)": "tokens[:, None] * D",
          "tokens[:, None] * (H * DV)": "tokens[:, None] * DV"},
         "stepping to the next head in place of the next key"),
        ("(first + start) * H + head", "(first + start) * H",
         "the keys of KV head 0 for everyone",
         "A key has a piece for each KV head. Which number of the program says which one?"),
        (" & (start + tokens < visible)", " & (tokens >= 0)", "seeing the future",
         "The list may name a block that is visible in part, or not at all. Which number says how "
         "far the query sees?"),
        ("start + tokens < visible", "start + tokens <= visible", "seeing one key too many",
         "`num_visible` keys are numbered from 0. Which number has the last of them?"),
        ("start + tokens < visible", "start < visible",
         "seeing the whole of a block that is visible in part",
         "You compare where the block begins. Which of its keys lie behind the query?"),
        ("start + tokens < visible", "tokens < visible", "counting a token in its block",
         "`num_visible` counts in the sequence. Where does the block begin?"),
        ({"mask=is_seen[:, None], other=0.0)\n        acc_o": "mask=tokens[:, None] >= 0)\n"
          "        acc_o"},
         "hiding a key's score and not its value",
         "The weight of a hidden key is 0, and its value may be NaN. What is 0 · NaN?"),
        ("scores = tl.where(is_seen, scores, float(\"-inf\"))", "scores = scores + 0.0",
         "weights for keys that are not loaded",
         "A key that was not loaded is zeros, and its score is 0. Which weight does a score of 0 "
         "get?"),
        ("scores = tl.where(is_seen, scores, float(\"-inf\"))",
         "scores = tl.where(is_seen, scores, 0.0)", "weights for keys that are not loaded"),
        ("(block_id >= 0) & ", "", "loading the keys of an empty slot",
         "-1 times `BS` is an address, too: `BS` rows before the sequence. What does your code "
         "make of `block_id = -1`?"),
        ("+ (query * H + head) * S + slot)\n        start = block_id * BS",
         "+ (query * H + head) * S + slot)\n        start = tl.maximum(block_id, 0) * BS\n"
         "        block_id = tl.maximum(block_id, 0)", "taking an empty slot for block 0",
         "Clamping makes the address legal, and the block count. What does a block that is listed "
         "twice do to the softmax?"),
        ("block_id >= 0", "block_id > 0", "taking block 0 for an empty slot",
         "Block 0 holds the first keys of the sequence. Which number says that a slot is empty?"),
        ({"scores_max = tl.full([GT], float(\"-inf\"), tl.float32)":
          "scores_max = tl.full([GT], float(\"-inf\"), tl.float32)\n    is_open = query >= 0",
          "        start = block_id * BS":
          "        is_open = is_open & (block_id >= 0)\n        start = block_id * BS",
          "(block_id >= 0) &": "is_open &"}, "stopping at the first empty slot",
         "-1 says that this slot is empty. What does it say about the slots behind it?"),
        ("tl.where(new_max == float(\"-inf\"), 0.0, new_max)", "new_max",
         "−∞ minus −∞ before anything is seen",
         "If the first slot is empty, the maximum is still −∞, and −∞ − (−∞) is NaN. Which shift "
         "is safe there?"),
        ("tl.where(running_sum == 0, 1.0, running_sum)", "running_sum", "0 / 0 in an empty row",
         "A row that sees nothing has a sum of 0. What is 0 / 0, and what should come out?"),
        ("k_tile.T", "k_tile", "a dot without the transposition",
         "`k_tile` is `[BS, D]`, a key a row. A score needs `q_tile` `[GT, D]` times `[D, BS]`. "
         "What makes a column of each key?"),
        ({"mask=is_seen[:, None], other=0.0)\n        acc_o": "mask=is_seen[:, None])\n"
          "        acc_o"},
         "values loaded without `other`",
         "Triton promises nothing of a masked place if the load has no `other`. Here it holds NaN. "
         "What is 0 · NaN?"),
        ('k_tile.T, input_precision="ieee"', "k_tile.T", "a dot that rounds its inputs to TF32",
         "Unless told otherwise, `tl.dot` rounds fp32 on a GPU. What does the exercise ask both "
         "dots to say?"),
        ("K + piece * D + k_offset, mask=is_seen[:, None], other=0.0)", "K + piece * D + k_offset)",
         "loading the keys without a mask",
         "A hidden score is replaced by −∞, so no number shows it. But a slot of -1 and the last "
         "block name addresses outside of `K`. Which condition keeps the load inside?"),
        ("tl.load(Q + rows * D + width, mask=in_group, other=0.0)",
         "tl.load(Q + rows * D + width)", "loading the idle rows of Q",
         "No idle row is stored, so no number shows it. But the last program's idle rows lie "
         "behind the end of `Q`. Which mask do the stores have?"),
        ({"acc_o / total[:, None], mask=in_group)": "acc_o / total[:, None])",
          ", mask=group < G)": ")"}, "storing the padding",
         "The tile has `GT` rows, and the group `G`. Behind the group's rows lie those of the next "
         "KV head, and behind the last one lies somebody else's memory. What keeps a store out?"),
        ("acc_o / total[:, None], mask=in_group)", "acc_o / total[:, None])",
         "storing the padding"),
        ("(first + start) * H", "start * H", "forgetting where the sequence begins",
         "Block 0 of the second sequence is not block 0 of the tensor. At which row of `k` does "
         "it begin?"),
        ({"(first + start) * H": "(first + block_id) * BS * H"},
         "counting the sequence's first row in blocks",
         "`first_key` is a row already, and `BS` rows make a block. Which of the two is multiplied "
         "by `BS`?"),
        ("start + tokens < visible", "first + start + tokens < visible",
         "comparing a row of K with a count of the sequence",
         "`num_visible` counts from the sequence's first key. From where do the numbers count that "
         "you compare with it?"),
        ("scores_max + tl.log(total)", "tl.log(total)", "an lse without the maximum",
         "All powers were taken of a score minus the maximum. What has to be added to the log?"),
        ("scores_max + tl.log(total)", "scores_max + total", "an lse without the log",
         "`lse` is the *log* of the sum of powers. Is your sum a log?"),
        ("scores_max + tl.log(total)", "scores_max + tl.log2(total)", "a log in base two",
         "`lse` is in nats. By what does `log2` differ from the natural log?"),
        ("scores_max + tl.log(total)", "(scores_max + tl.log(total)) * 1.4426950408889634",
         "an lse in base two",
         "`lse` is in nats. If your powers are of two, by what is their log multiplied?"),
        ("scores_max + tl.log(total)",
         "tl.where(scores_max == float(\"-inf\"), 0.0, scores_max) + tl.log(total)",
         "an empty row with an lse of 0",
         "0 says that the row saw something: its powers sum to 1. Which log has a sum of 0?"),
    ], parts=(attend_to_list,), pairs=False),
)  # fmt: skip


EXERCISES = (_KEYS, _ATTENTION, _SCORES, _LOCATE, _WALKED, _WINDOW)


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
