"""Exercises of chapter 11: rows of a padded group, empty slots, the list's end, packed offsets, a
window's first key, 64 bits."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception

# -- store_offsets --


def store_offsets(query: int, head: int, H: int, G: int) -> list[int]:
    """Where in LSE [R, H, G] the rows of program (query, head)'s tile are stored; -1 for a row that
    stores nothing."""
    GT = 16
    while GT < G:
        GT *= 2
    group = torch.arange(GT)  # [GT]
    in_group = group < G
    group_row = (query * H + head) * G + group  # [GT]
    return torch.where(in_group, group_row, -1).tolist()


def _stored(
    least: int = 16,
    grow: str = "double",
    masked: bool = True,
    stride: str = "G",
    order: str = "query",
) -> Callable:
    """A wrong `store_offsets`, with one change."""

    def wrong(query: int, head: int, H: int, G: int) -> list[int]:
        GT = least
        while grow == "double" and GT < G:
            GT *= 2
        if grow == "multiple":
            GT = -(-G // 16) * 16
        if grow == "never":
            GT = least or G
        group = torch.arange(GT)
        step = G if stride == "G" else GT
        program = query * H + head if order == "query" else head * H + query
        group_row = program * step + group
        return torch.where(group < G, group_row, -1).tolist() if masked else group_row.tolist()

    return wrong


_STORE = Exercise(
    name="store_offsets",
    statement="""
`LSE` `[R, H, G]` lies in memory without gaps. Program `(query, head)` computes a tile of `GT` rows,
one for each of the `G` query heads of its group and the rest padding; `GT` is `G` rounded up to a
power of two, and at least 16. Return a list of `GT` numbers: the offset in `LSE` at which each row
is stored, and -1 for a row that the mask keeps from being stored.
""",
    minutes=5,
    difficulty=1,
    solution=store_offsets,
    misconceptions=(
        Misconception(
            "storing the padding",
            _stored(masked=False),
            "Behind the group's own numbers lie those of the next KV head. Which program do they "
            "belong to, and who stores last?",
        ),
        Misconception(
            "no padding",
            _stored(0, "never"),
            "A tensor core multiplies tiles, not rows. How many rows does `m16n8k16` take?",
        ),
        Misconception(
            "a power of two, but fewer than 16 rows",
            _stored(1),
            "`tl.arange` is satisfied with a power of two. What else has to fit: how many rows "
            "does `m16n8k16` take?",
        ),
        Misconception(
            "always 16 rows",
            _stored(16, "never"),
            "What becomes of head 17 of a group of 20?",
        ),
        Misconception(
            "rounding up to a multiple of 16",
            _stored(16, "multiple"),
            "TileLang takes any multiple of 16, and chapter 10 pads so. What lengths does "
            "`tl.arange` take?",
        ),
        Misconception(
            "padding the tensor as well as the tile",
            _stored(stride="GT"),
            "The tile has gaps, the tensor has none. How many numbers of LSE lie between two "
            "neighbouring programs?",
        ),
        Misconception(
            "exchanging query and head",
            _stored(order="head"),
            "The last axis of `[R, H, G]` runs fastest, then the one before it. Which of the two "
            "is further out, query or head?",
        ),
    ),
    cases=(
        Case("a group of 1", lambda: (0, 1, 2, 1)),
        Case("a group of 4", lambda: (2, 1, 3, 4)),
        Case("a group of 16", lambda: (1, 0, 2, 16)),
        Case("a group of 20", lambda: (3, 1, 2, 20)),
        Case("a group of 33", lambda: (1, 2, 4, 33)),
    ),
)


# -- key_rows --


def key_rows(ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
    """The rows of K that a program loads, `[S, BS]`: a row for each slot, -1 where it loads
    nothing."""
    tokens = torch.arange(BS)  # [BS]
    rows = []
    for block_id in ids:
        is_visible = 0 <= block_id < -(-num_visible // BS)
        start = block_id * BS if is_visible else 0
        is_seen = is_visible & (tokens < num_visible - start)
        rows.append(torch.where(is_seen, first_key + start + tokens, -1))
    return torch.stack(rows)  # [S, BS]


def _rows(
    empty: str = "masked", end: str = "visible", base: bool = True, unit: str = "block"
) -> Callable:
    """A wrong `key_rows`, with one change."""

    def wrong(ids: list[int], first_key: int, num_visible: int, BS: int) -> Tensor:
        tokens, rows, stopped = torch.arange(BS), [], False
        blocks = -(-num_visible // BS)
        for block_id in ids:
            stopped = stopped or (empty == "stop" and block_id < 0)
            here = block_id
            if empty == "zero":
                here = max(block_id, 0)
            elif empty == "last" and block_id < 0:
                here = blocks + block_id
            is_block = here >= 0 or empty == "score only"
            is_visible = is_block and (here < blocks or end == "none") and not stopped
            start = here * (BS if unit == "block" else 1) if is_visible else 0
            last = {
                "visible": num_visible,
                "block": start + BS,
                "none": start + BS,
                "one more": num_visible + 1,
                "one less": num_visible - 1,
                "tensor": num_visible - first_key,
            }[end]
            is_seen = is_visible & (start + tokens < last)
            rows.append(torch.where(is_seen, (first_key if base else 0) + start + tokens, -1))
        return torch.stack(rows)

    return wrong


_KEYS = Exercise(
    name="key_rows",
    statement="""
Chapter 05's `tokens_of_list`, as a kernel has it: with tiles, and sequences that begin anywhere. A
program's list `ids`, a Python list here, names blocks of `BS` keys, counted from the beginning of
its own sequence, which is row `first_key` of `K`; its query sees the first `num_visible` keys of
that sequence. A slot may hold -1, also in the middle of the list. Return the tensor `[S, BS]` of
the rows of `K` that the program loads, one row of it for each slot, with -1 for each element that
must not load.
""",
    minutes=7,
    difficulty=2,
    solution=key_rows,
    misconceptions=(
        Misconception(
            "hiding the score of an empty slot, but loading its keys",
            _rows(empty="score only"),
            "-1 times BS is an address, too: BS rows before the sequence, in somebody else's "
            "keys or before the tensor. The mask on the score comes too late for the load.",
        ),
        Misconception(
            "stopping at the first empty slot",
            _rows(empty="stop"),
            "-1 says that this slot is empty. What does it say about the slots behind it?",
        ),
        Misconception(
            "taking an empty slot for block 0",
            _rows(empty="zero"),
            "Clamping makes the address legal, and the block count. What does a block that is "
            "listed twice do to the softmax?",
        ),
        Misconception(
            "reading -1 as Python does",
            _rows(empty="last"),
            "In Python, index -1 is the last element. Here it is no block at all.",
        ),
        Misconception(
            "loading whatever the list names",
            _rows(end="none"),
            "The list decides which blocks a query wants. Which number says how far it may see?",
        ),
        Misconception(
            "loading the whole block that the query stands in",
            _rows(end="block"),
            "The last visible block is often visible in part. What do its other keys know that "
            "the query must not?",
        ),
        Misconception(
            "seeing one key too many",
            _rows(end="one more"),
            "`num_visible` keys are numbered from 0. Which number has the last of them?",
        ),
        Misconception(
            "losing the last visible key",
            _rows(end="one less"),
            "With causal attention, the last visible key is the query's own. Does a query see "
            "itself?",
        ),
        Misconception(
            "comparing a row of K with a count of the sequence",
            _rows(end="tensor"),
            "`num_visible` counts from the sequence's first key. From where do the numbers count "
            "that you compare with it?",
        ),
        Misconception(
            "forgetting where the sequence begins",
            _rows(base=False),
            "Block 0 of the second sequence is not block 0 of the tensor.",
        ),
        Misconception(
            "counting ids in tokens",
            _rows(unit="token"),
            "Block 2 begins two blocks behind block 0, not two tokens.",
        ),
    ),
    cases=(
        Case("an empty slot in the middle", lambda: ([0, -1, 1], 0, 4, 2)),
        Case("a block that is visible in part", lambda: ([2, 0], 0, 5, 2)),
        Case("the second sequence", lambda: ([1, -1, 0], 6, 6, 4)),
        Case("a block of the future", lambda: ([3, 1], 5, 6, 3)),
        Case("nothing but empty slots", lambda: ([-1, -1], 3, 6, 2)),
        Case("a long list, first slot empty", lambda: ([-1, 4, -1, 0, 2], 8, 14, 3)),
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


def _walked(how: str) -> Callable:
    """A wrong `walked_slots`."""

    def wrong(ids: list[int], num_blocks: int) -> int:
        end = {"future": math.inf, "one more": num_blocks + 1}.get(how, num_blocks)
        least = 1 if how == "nonzero" else 0
        named = [slot for slot, block_id in enumerate(ids) if least <= block_id < end]
        empty = [slot for slot in range(len(ids)) if slot not in named]
        return {
            "named": len(named),
            "first empty": min(empty, default=len(ids)),
            "last": max(named, default=0),
            "all": len(ids),
            "largest id": max((ids[slot] for slot in named), default=-1) + 1,
            "distance": named[-1] - named[0] + 1 if named else 0,
        }.get(how, max(named, default=-1) + 1)

    return wrong


_WALKED = Exercise(
    name="walked_slots",
    statement="""
A Python list `ids` has a fixed number of slots. A query sees the first `num_blocks` blocks of its
sequence, the last of them perhaps in part. A slot that names none of these loads nothing: it is
empty (-1), or names a block of the future. Such slots mostly stand at the end. A program walks
slots 0, 1, 2, … in order, and may stop as soon as no slot is left that loads anything. Return how
many slots it walks, at the least, without missing a block.
""",
    minutes=3,
    difficulty=1,
    solution=walked_slots,
    misconceptions=(
        Misconception(
            "counting the blocks",
            _walked("named"),
            "An empty slot may lie in the middle. If the program walks as many slots as there "
            "are blocks, where does it stop?",
        ),
        Misconception(
            "stopping at the first slot without a visible block",
            _walked("first empty"),
            "-1 says that this slot is empty. What does it say about the slots behind it?",
        ),
        Misconception(
            "the number of the last slot in place of how many there are",
            _walked("last"),
            "Slots are numbered from 0. If the last block lies in slot 2, how many slots are "
            "walked?",
        ),
        Misconception(
            "walking up to blocks of the future",
            _walked("future"),
            "A block behind the last visible one is named, and nothing of it is loaded. Does the "
            "walk have to reach its slot?",
        ),
        Misconception(
            "taking one block too many for visible",
            _walked("one more"),
            "Blocks are numbered from 0. Which number has the last of `num_blocks` blocks?",
        ),
        Misconception(
            "taking block 0 for an empty slot",
            _walked("nonzero"),
            "Which number says that a slot is empty? Block 0 holds the first keys of the text.",
        ),
        Misconception(
            "walking everything",
            _walked("all"),
            "Right, and slower: how many steps does a list take that is empty at its end?",
        ),
        Misconception(
            "mixing up blocks and slots",
            _walked("largest id"),
            "Block 7 may lie in slot 0. Is it the block's number or its slot's that the loop "
            "counts?",
        ),
        Misconception(
            "leaving out empty slots at the beginning",
            _walked("distance"),
            "The walk begins at slot 0. Does it jump over empty slots there?",
        ),
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


def _located(visible: str = "causal", right: bool = True, first: str = "start") -> Callable:
    """A wrong `locate`, with one change."""

    def wrong(cu_seqlens: list[int]) -> tuple[list[int], list[int]]:
        token = torch.arange(cu_seqlens[-1])
        cu = torch.tensor(cu_seqlens)
        sequence = torch.searchsorted(cu[1:].contiguous(), token, right=right)
        start = cu[sequence]
        counts = {
            "causal": token - start + 1,
            "past": token - start,
            "all": cu[sequence + 1] - start,
            "global": token + 1,
            "remaining": cu[sequence + 1] - token,
        }
        places = {
            "start": start,
            "sequence": sequence,
            "zero": torch.zeros_like(token),
            "token": token,
        }
        return places[first].tolist(), counts[visible].tolist()

    return wrong


_LOCATE = Exercise(
    name="locate",
    statement="""
Sequences lie one behind the other in one tensor; sequence `i` has the tokens `cu_seqlens[i]` up to,
but without, `cu_seqlens[i + 1]`, and may be empty. A kernel's row needs two numbers: at which row
of `K` its sequence begins, and how many keys from there it sees under causal attention, its own
included. Return the two lists `(first_key, num_visible)`, a number for each token.
""",
    minutes=5,
    difficulty=2,
    solution=locate,
    misconceptions=(
        Misconception(
            "counting the keys from the beginning of the tensor",
            _located(visible="global"),
            "The second sequence's first token sees one key. What would it see with this number, "
            "counted from its own first key?",
        ),
        Misconception(
            "giving a boundary's token to the sequence before it",
            _located(right=False),
            "`cu_seqlens[i]` is both the end of one sequence and the beginning of the next. To "
            "which of them does the token of that number belong?",
        ),
        Misconception(
            "no causal mask within a sequence",
            _located(visible="all"),
            "Whole sequences is what a query sees without causality. Here a token sees nothing "
            "of what comes after it.",
        ),
        Misconception(
            "leaving out the query's own key",
            _located(visible="past"),
            "How many keys does a sequence's first token see?",
        ),
        Misconception(
            "the number of the sequence in place of its first key",
            _located(first="sequence"),
            "Knowing which sequence it is is half of the way. The kernel needs a row of K.",
        ),
        Misconception(
            "letting every sequence begin at row 0",
            _located(first="zero"),
            "Then all sequences attend to the keys of the first. A test with one sequence does "
            "not see it.",
        ),
        Misconception(
            "counting down to the end of the sequence",
            _located(visible="remaining"),
            "These are the keys from the query on, its future. How many lie between the "
            "sequence's beginning and the query?",
        ),
    ),
    cases=(
        Case("two sequences, 2 and 3 tokens", lambda: ([0, 2, 5],)),
        Case("one sequence", lambda: ([0, 4],)),
        Case("an empty sequence in the middle", lambda: ([0, 3, 3, 5],)),
        Case("sequences of one token", lambda: ([0, 1, 2, 3],)),
        Case("an empty one at the beginning, a long one at the end", lambda: ([0, 0, 2, 9],)),
    ),
)


# -- window_row --


def window_row(position: int, first_key: int, window_size: int, BS: int) -> tuple[int, int, int]:
    """A window's first row of K, how many keys from there are visible, and how many blocks of BS
    its program walks."""
    start = max(position + 1 - window_size, 0)
    num_visible = position + 1 - start
    return first_key + start, num_visible, -(-num_visible // BS)


def _window(
    extra: int = 0,
    aligned: bool = False,
    clamp: str = "sequence",
    itself: bool = True,
    count: str = "own",
    blocks: str = "up",
) -> Callable:
    """A wrong `window_row`, with one change."""

    def wrong(position: int, first_key: int, window_size: int, BS: int) -> tuple[int, int, int]:
        start = position + 1 - window_size - extra - (0 if itself else 1)
        if clamp == "sequence":
            start = max(start, 0)
        elif clamp == "tensor":
            start = max(start, -first_key)
        if aligned:
            start = start // BS * BS
        visible = {
            "own": position + int(itself) - start,
            "sequence": position + 1,
            "window": window_size,
        }[count]
        slots = {
            "up": -(-visible // BS),
            "down": visible // BS,
            "one more": visible // BS + 1,
            "all": -(-window_size // BS),
        }[blocks]
        return first_key + start, visible, slots

    return wrong


_WINDOW = Exercise(
    name="window_row",
    statement="""
The query at `position` of its sequence, which begins at row `first_key` of `K`, has a window of
`window_size` keys: its own and those before it, fewer at the beginning of the sequence. The kernel
counts a window's blocks from the window's *first key*: the list is 0, 1, 2, … Return
`(row, num_visible, num_slots)`: the row of `K` that the window begins at, how many keys from there
the query sees, and how many blocks of `BS` keys its program walks: no more than hold something
visible.
""",
    minutes=6,
    difficulty=2,
    solution=window_row,
    misconceptions=(
        Misconception(
            "a window of one key too many",
            _window(extra=1),
            "Take window_size = 1. Which keys should the query see, and how many are these?",
        ),
        Misconception(
            "a window without the query's own key",
            _window(itself=False),
            "The window ends with the query, not before it.",
        ),
        Misconception(
            "beginning at a block's edge",
            _window(aligned=True),
            "Whole blocks are convenient and give some queries up to BS - 1 keys more than "
            "others. The window has exactly window_size.",
        ),
        Misconception(
            "reaching back before the sequence",
            _window(clamp="tensor"),
            "Rows of K before first_key exist, but in another sequence. Where does the window of "
            "an early query end on the left?",
        ),
        Misconception(
            "reaching back before the tensor",
            _window(clamp="none"),
            "Where is the window of the very first query?",
        ),
        Misconception(
            "counting the keys from the beginning of the sequence",
            _window(count="sequence"),
            "The row has moved forward. If the count stays, where does the last visible key lie?",
        ),
        Misconception(
            "as many keys for early queries as for late ones",
            _window(count="window"),
            "The query at position 0 sees one key, whatever the window.",
        ),
        Misconception(
            "forgetting the last, ragged block",
            _window(blocks="down"),
            "How many blocks of 4 hold 6 keys?",
        ),
        Misconception(
            "as many blocks for early queries as for late ones",
            _window(blocks="all"),
            "The query at position 0 sees one key. How many blocks hold it?",
        ),
        Misconception(
            "one block more than the window needs",
            _window(blocks="one more"),
            "Blocks aligned to the tensor may straddle one more. These are counted from the "
            "window's own first key.",
        ),
    ),
    cases=(
        Case("a window of 2 in blocks of 2", lambda: (3, 0, 2, 2)),
        Case("the first query", lambda: (0, 0, 3, 2)),
        Case("half a window, two blocks", lambda: (4, 0, 9, 4)),
        Case("early in the second sequence", lambda: (1, 7, 5, 4)),
        Case("late in the second sequence", lambda: (9, 7, 6, 4)),
        Case("a window of one key", lambda: (5, 3, 1, 4)),
        Case("a window shorter than a block", lambda: (10, 2, 3, 4)),
    ),
)


# -- overflowing_rows --


def overflowing_rows(H: int, G: int, D: int) -> int:
    """The least R for which some offset into Q [R, H, G, D] is more than an int32 holds."""
    largest = 2**31 - 1
    row = H * G * D  # elements of a row; the last offset is R * row - 1
    return (largest + 1) // row + 1


def _overflow(
    limit: int = 2**31, up: bool = False, itemsize: int = 1, group: bool = True, bound: bool = True
) -> Callable:
    """A wrong `overflowing_rows`, with one change."""

    def wrong(H: int, G: int, D: int) -> int:
        row = H * (G if group else 1) * D * itemsize
        if up:
            return -(-limit // row)
        return limit // row + bound

    return wrong


_OVERFLOW = Exercise(
    name="overflowing_rows",
    statement="""
Offsets count elements. An int32 holds numbers up to `2**31 - 1`. Return the least number of rows
`R` for which the largest offset into a tensor `Q` `[R, H, G, D]` is more than that. (No memory is
needed to answer: a test that wants such a tensor takes `device="meta"`.)
""",
    minutes=5,
    difficulty=2,
    solution=overflowing_rows,
    misconceptions=(
        Misconception(
            "stopping at exactly 2³¹ elements",
            _overflow(up=True),
            "A tensor of 2³¹ elements has the offsets 0 to 2³¹ - 1. Does the last of them fit?",
        ),
        Misconception(
            "the last number of rows that still fits",
            _overflow(bound=False),
            "This many rows are fine. Which is the first number that is not?",
        ),
        Misconception(
            "taking int32 for unsigned",
            _overflow(2**32),
            "One of the 32 bits is the sign. What comes after 2**31 - 1?",
        ),
        Misconception(
            "counting bytes",
            _overflow(itemsize=2),
            "`Q + offset` moves by elements: Triton knows how many bytes one takes, and "
            "addresses have 64 bits.",
        ),
        Misconception(
            "counting KV heads in place of query heads",
            _overflow(group=False),
            "A row of Q has H groups of G heads.",
        ),
    ),
    cases=(
        Case("64 query heads over 4, width 128", lambda: (4, 16, 128)),
        Case("no power of two", lambda: (3, 5, 7)),
        Case("40 query heads over 8, width 96", lambda: (8, 5, 96)),
        Case("one huge head", lambda: (1, 1, 2**30)),
    ),
    tolerance=0.0,
)

EXERCISES = (_STORE, _KEYS, _WALKED, _LOCATE, _WINDOW, _OVERFLOW)
