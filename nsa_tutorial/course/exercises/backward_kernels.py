"""Exercises of chapter 13: the inverse list, the rows of a step, shares of a long list, the
queries of a window's keys, two programs that store to one place, and the gradient of a choice.

The wrong solutions of an exercise are one function, told which slips to make.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Double, Misconception
from nsa_tutorial.course.mistakes import Wrong, slip, together
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)

Slips = frozenset[str]
Element = tuple[str, int]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- inverse_list --


def inverse_list(lists: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The queries that list each block, one block after the other, and where each block's begin."""
    S = lists.shape[1]
    block = torch.where(lists < 0, num_blocks, lists).flatten()  # empty slots: behind all blocks
    block, entry = block.sort(stable=True)
    bounds = torch.searchsorted(block, torch.arange(num_blocks + 1))
    return entry[: bounds[-1]] // S, bounds


def _inverse(slips: Slips, lists: Tensor, num_blocks: int) -> tuple[list, list] | list:
    """`inverse_list` with slips."""
    if "nothing" in slips:
        return [], []
    S = lists.shape[1]
    block = (lists.T if "by slot" in slips else lists).flatten()
    if "no block 0" in slips:
        block = torch.where(block == 0, -1, block)
    if "dropped" in slips:
        block = block[block >= 0]
    elif "as block 0" in slips:
        block = block.clamp(min=0)
    elif not slips & {"in front", "descending, empty last"}:
        block = torch.where(block < 0, num_blocks, block)
    is_descending = bool(slips & {"descending", "descending, empty last"})
    by_block, entry = block.sort(stable=True, descending=is_descending)
    if "backwards" in slips:
        entry = len(block) - 1 - block.flip(0).sort(stable=True).indices
    searched = block if "searched unsorted" in slips else by_block
    bounds = torch.searchsorted(searched, torch.arange(num_blocks + 1), right="ends" in slips)
    if "unsorted" in slips:
        entry = torch.arange(len(block))[block < num_blocks]
    end = len(block) if slips & {"empty kept", "in front"} else bounds[-1]
    if "no end, cut" in slips:
        bounds = bounds[:-1]
        end = bounds[-1]
    entry = entry[:end]
    queries = entry if "entries" in slips else entry % S if "slots" in slips else entry // S
    if "by queries" in slips:
        queries = entry // len(lists)
    if "by slot" in slips and "places by query" not in slips:
        queries = entry % len(lists)
    if "blocks" in slips:
        queries = by_block[:end]
    flat, limits = queries.tolist(), bounds.tolist()
    if slips & {"nested", "nested alone"}:
        flat = [flat[a:b] for a, b in pairwise(limits)]
    if "nested alone" in slips:
        return flat
    if "counts" in slips:
        limits = bounds.diff().tolist()
    elif "listed only" in slips:
        limits = sorted(set(limits))
    elif "no end" in slips:
        limits = limits[:-1]
    elif "no beginning" in slips:
        limits = limits[1:]
    return (limits, flat) if "exchanged" in slips else (flat, limits)


_INVERSE_MISTAKES = (
    Misconception(
        "the slot in place of the query",
        slip(_inverse, "slots"),
        "A place in the flattened lists is `query * S + slot`. Which of the two is the remainder?",
    ),
    Misconception(
        "the sorted blocks in place of their queries",
        slip(_inverse, "blocks"),
        "A sort returns two things: the sorted values, and where each came from. Which one says "
        "whose entry it was?",
    ),
    Misconception(
        "a block's queries in descending order",
        slip(_inverse, "backwards"),
        "Equal keys should stay in the order of their queries. What is a sort called that "
        "promises that?",
    ),
    *(
        Misconception(
            "sorting the blocks in descending order",
            slip(_inverse, name),
            "`torch.searchsorted` expects numbers that ascend, and block 0 comes first. Which "
            "number sends the empty slots to the end all the same?",
        )
        for name in ("descending", "descending, empty last")
    ),
    Misconception(
        "searching the blocks before they are sorted",
        slip(_inverse, "searched unsorted"),
        "`torch.searchsorted` halves a sorted list again and again. Which of your tensors is "
        "sorted?",
    ),
    Misconception(
        "the two results exchanged",
        slip(_inverse, "exchanged"),
        "The queries come first, then the bounds.",
    ),
    Misconception(
        "leaving the entries in the order of the lists",
        slip(_inverse, "unsorted"),
        "The queries of block 0 have to stand next to each other. What brings them together?",
    ),
    *(
        Misconception(
            "a list for each block in place of one flat list",
            slip(_inverse, name),
            "A GPU has no lists of lists. With all queries in one flat list, what do the bounds "
            "say?",
        )
        for name in ("nested", "nested alone")
    ),
    Misconception(
        "counts in place of bounds",
        slip(_inverse, "counts"),
        "A count says how many queries a block has. Where does its stretch begin?",
    ),
    Misconception(
        "where each block ends in place of where it begins",
        slip(_inverse, "ends"),
        "`bounds[b]` is where block b's stretch begins. What has to be `bounds[0]`?",
    ),
    *(
        Misconception(
            "leaving out the end of the last block",
            slip(_inverse, name),
            "Block b's stretch is `queries[bounds[b] : bounds[b + 1]]`. What is that for the last "
            "one?",
        )
        for name in ("no end, cut", "no end")
    ),
    Misconception(
        "leaving out where block 0 begins",
        slip(_inverse, "no beginning"),
        "Block 0's stretch is `queries[bounds[0] : bounds[1]]`. What has to be `bounds[0]`?",
    ),
    Misconception(
        "letting empty slots sort in front",
        slip(_inverse, "in front"),
        "-1 is smaller than every block, so a sort puts it before block 0. Which number would "
        "send it behind all blocks?",
    ),
    Misconception(
        "taking an empty slot for block 0",
        slip(_inverse, "as block 0"),
        "An empty slot names no block. Whose gradient do its queries add to now?",
    ),
    Misconception(
        "keeping the empty slots at the end",
        slip(_inverse, "empty kept"),
        "Behind the last block stand the entries that name none. Where does the last block's "
        "stretch end?",
    ),
    Misconception(
        "dropping the empty slots before the sort",
        slip(_inverse, "dropped"),
        "Without the empty slots, the places behind them have moved up. Which query does place 1 "
        "belong to now?",
    ),
    Misconception(
        "the place of an entry in place of its query",
        slip(_inverse, "entries"),
        "The sort tells places in the flattened lists. Each query has `S` of them. Which query "
        "does place 5 belong to, with two slots?",
    ),
    Misconception(
        "dividing by the number of queries",
        slip(_inverse, "by queries"),
        "Each query has `S` places in the flattened lists. With two slots, which query does place "
        "5 belong to?",
    ),
    Misconception(
        "flattening the lists slot by slot",
        slip(_inverse, "by slot"),
        "First come all queries that list a block in slot 0, then those with slot 1. In which "
        "order do the queries of a block have to stand?",
    ),
    Misconception(
        "flattening the lists slot by slot",
        Wrong(_inverse, frozenset({"by slot", "places by query"})),
        "After `.T`, the slots 0 of all queries come first. Which query does place 1 belong to "
        "now? And in which order would a block's queries come?",
    ),
    Misconception(
        "taking block 0 for an empty slot",
        slip(_inverse, "no block 0"),
        "An empty slot is -1, and blocks are numbered from 0. Which queries list block 0?",
    ),
    Misconception(
        "returning two empty lists",
        slip(_inverse, "nothing"),
        "Take block 0 of the case below, by hand. Which queries have a 0 in their list?",
    ),
    Misconception(
        "leaving out blocks that nobody lists",
        slip(_inverse, "listed only"),
        "A program looks up its block by number. At which place does it find block 2 if block 1 "
        "has no bound?",
    ),
)

_PLACES = {"entries", "slots", "blocks", "by queries"}
_NOT_NESTED = ("ends", "in front", "empty kept", "no end, cut")

_INVERSE = TEXTS.exercise(
    "inverse_list",
    returns=("queries", "bounds"),
    minutes=12,
    difficulty=2,
    solution=inverse_list,
    misconceptions=_INVERSE_MISTAKES,
    combine=together(
        _INVERSE_MISTAKES,
        {"in front", "as block 0", "empty kept", "unsorted", "dropped", "descending, empty last"},
        {"descending", "descending, empty last", "backwards", "searched unsorted", "unsorted"},
        {"exchanged", "nested alone"},
        _PLACES,
        *({"by slot", other} for other in (*_PLACES, "backwards", "unsorted", "dropped")),
        *(
            {"places by query", *m.wrong.slips}
            for m in _INVERSE_MISTAKES
            if "by slot" not in m.wrong.slips
        ),
        {"counts", "ends", "no beginning", "no end", "no end, cut", "listed only", "nested alone"},
        *({nested, other} for nested in ("nested", "nested alone") for other in _NOT_NESTED),
        {"nested", "nested alone"},
        *({"nothing", *m.wrong.slips} for m in _INVERSE_MISTAKES if m.wrong.slips != {"nothing"}),
        {"no block 0", "as block 0"},
        {"no end, cut", "empty kept"},
        {"no end, cut", "in front"},
        {"dropped", "backwards"},
        {"unsorted", "blocks"},
        {"unsorted", "backwards"},
    ),
    cases=(
        Case("two blocks, one slot", lambda: (torch.tensor([[0], [1], [0]]), 2)),
        Case("an empty slot", lambda: (torch.tensor([[0, -1], [0, 1], [1, 0]]), 2)),
        Case("two slots", lambda: (torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)),
        Case("a block that nobody lists", lambda: (torch.tensor([[0, -1], [2, 0], [2, 0]]), 3)),
        Case(
            "a query that lists nothing",
            lambda: (torch.tensor([[-1, 0], [-1, -1], [3, 1], [1, -1]]), 5),
        ),
        Case(
            "three slots",
            lambda: (torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, 1], [3, 0, 2]]), 4),
        ),
        Case(
            "everybody lists block 0",
            lambda: (torch.tensor([[0, b // 2] for b in range(2, 10)]), 5),
        ),
    ),
)


# -- rows_of_step --


def rows_of_step(queries: list[int], step: int, head: int, H: int, G: int, BR: int) -> list[int]:
    """The rows of Q, seen as [R * H * G, D], that a program loads in one step; -1 past its end."""
    index = step * BR + torch.arange(BR)  # [BR], query after query, head after head
    is_row = index < len(queries) * G
    entry = torch.where(is_row, index // G, 0)
    query = torch.tensor(queries)[entry]
    row = (query * H + head) * G + index % G
    return torch.where(is_row, row, -1).tolist()


def _step(
    slips: Slips, queries: list[int], step: int, head: int, H: int, G: int, BR: int
) -> list[int]:
    """`rows_of_step` with slips."""
    if "no end" in slips:
        rows = range(step * BR, (step + 1) * BR)
        return [(queries[i // G] * H + head) * G + i % G for i in rows]
    if slips & {"by KV heads", "by KV heads, cut"}:
        rows = range(step * BR, (step + 1) * BR)
        end = len(queries) * (H if "by KV heads, cut" in slips else G)
        return [(queries[i // H] * H + head) * G + i % H if i < end else -1 for i in rows]
    num_heads = 1 if "one head" in slips else H * G if "all groups" in slips else G
    index = step * BR + torch.arange(BR)
    if "first step" in slips:
        index = torch.arange(BR)
    if "by one row" in slips:
        index = step + torch.arange(BR)
    if slips & {"whole queries", "whole queries, short"}:
        index = step * (BR // num_heads) * num_heads + torch.arange(BR // num_heads * num_heads)
    if "from a whole query" in slips:
        index = step * (BR // G) * G + torch.arange(BR)
    entry, member = index // num_heads, index % num_heads
    if "heads outside, in step" in slips:
        index, n = torch.arange(BR), max(BR // num_heads, 1)
        entry, member = step * n + index % n, index // n
    if "step of queries" in slips:
        entry, member = step * BR + torch.arange(BR) // num_heads, torch.arange(BR) % num_heads
    if "heads outside" in slips:
        entry, member = index % len(queries), index // len(queries)
    is_row = (entry < len(queries)) & (member < num_heads)
    if "rows as queries" in slips:
        is_row &= index < len(queries)
    query = entry if "places" in slips else torch.tensor(queries)[entry.clamp(max=len(queries) - 1)]
    row = (query * H + head) * G + member
    if slips & {"all groups", "no head"}:
        row = query * H * G + member
    if "one KV head" in slips:
        row = query * G + member
    if "one KV head, moved" in slips:
        row = (query + head) * G + member
    if "interleaved" in slips:
        row = (query * G + member) * H + head
    if "remainder by H" in slips:
        row = (query * H + head) * G + index % H
    if "H for G" in slips:
        row = (query * G + head) * H + member
    if "query last" in slips:
        row = (head * G + member) * H + query
    if "brackets" in slips:
        row = query * H + head * G + member
    if "heads before queries" in slips:
        row = (head * len(queries) + query) * G + member
    if "short stride" in slips:
        row = query * H + head + member
    if "no member" in slips:
        row = (query * H + head) * G
    if "past the end" in slips:
        return row.tolist()
    if "short" in slips:
        return row[is_row].tolist()
    rows = torch.where(is_row, row, 0 if "row 0" in slips else -1).tolist()
    return rows + [-1] * (BR - len(rows)) if "whole queries" in slips else rows


_STEP_MISTAKES = (
    Misconception(
        "taking one head of each group",
        slip(_step, "one head"),
        "Every head of the group has used this block's keys. What happens to the shares of the "
        "others?",
    ),
    Misconception(
        "the place in the chunk in place of the query",
        slip(_step, "places"),
        "A row's place in the chunk is not its place in Q. What does `queries` hold?",
    ),
    Misconception(
        "as many rows as the chunk has queries",
        slip(_step, "rows as queries"),
        "`len(queries)` counts queries. How many rows are they, with `G` heads each?",
    ),
    Misconception(
        "too short a step from query to query",
        slip(_step, "brackets"),
        "How many rows of Q belong to one query, over all its KV heads?",
    ),
    Misconception(
        "counting in KV heads where rows are query heads",
        slip(_step, "short stride"),
        "`query * H + head` is a row of K. How many rows of Q stand for one row of K?",
    ),
    Misconception(
        "the group's first head again and again",
        slip(_step, "no member"),
        "Each query has `G` rows for this KV head, and they lie side by side. How do they differ?",
    ),
    Misconception(
        "leaving `head` out",
        slip(_step, "no head"),
        "These are the rows of KV head 0, whichever `head` the program has. How many rows of a "
        "query stand before those of `head`?",
    ),
    Misconception(
        "taking the heads of all groups",
        slip(_step, "all groups"),
        "The heads of another group read other keys, and have a list of their own. How many heads "
        "share this KV head?",
    ),
    *(
        Misconception(
            "all queries of one head first",
            slip(_step, name),
            "The sum is the same, but the group's heads lie side by side in memory. Which order "
            "loads them together?",
        )
        for name in ("heads outside", "heads outside, in step")
    ),
    *(
        Misconception(
            "forgetting the other KV heads",
            slip(_step, name),
            "Between two queries lie the heads of *all* KV heads. How many are they?",
        )
        for name in ("one KV head", "one KV head, moved")
    ),
    Misconception(
        "taking Q for `[R, G, H, D]`",
        slip(_step, "interleaved"),
        "In Q `[R, H, G, D]` the heads of one group lie side by side. How far is it from one of "
        "them to the next?",
    ),
    Misconception(
        "taking Q for `[H, R, G, D]`",
        slip(_step, "heads before queries"),
        "In Q `[R, H, G, D]` all KV heads of a query come before the next query. By what do you "
        "multiply the query, then?",
    ),
    Misconception(
        "a short list without −1",
        slip(_step, "short"),
        "A tile has `BR` rows in every step. What stands in the rows that the chunk cannot fill?",
    ),
    Misconception(
        "loading rows past the end of the chunk",
        slip(_step, "past the end"),
        "The last step may have fewer rows than the tile. Whose gradient do the others add to?",
    ),
    Misconception(
        "asking for queries past the end of the chunk",
        slip(_step, "no end"),
        "Which rows does a step have past the chunk's end?",
    ),
    Misconception(
        "row 0 in place of −1",
        slip(_step, "row 0"),
        "Row 0 of Q is a query like any other. How does your list say that nothing is loaded?",
    ),
    *(
        Misconception(
            "taking whole queries only",
            slip(_step, name),
            "Where `G` does not divide `BR`, whole queries leave rows of the step idle. Whose "
            "heads could fill them?",
        )
        for name in ("whole queries", "whole queries, short")
    ),
    Misconception(
        "starting each step with a whole query",
        slip(_step, "from a whole query"),
        "Where `G` does not divide `BR`, step 0 ends inside a query. With which of its heads does "
        "step 1 begin?",
    ),
    *(
        Misconception(
            "dividing by the number of KV heads",
            slip(_step, name),
            "In the chunk, each query has the `G` rows of one group. By which number do you "
            "divide to find the query?",
        )
        for name in ("by KV heads", "by KV heads, cut")
    ),
    Misconception(
        "the remainder by the number of KV heads",
        slip(_step, "remainder by H"),
        "The quotient by `G` is the query. The remainder of which division is the head of its "
        "group?",
    ),
    Misconception(
        "`H` and `G` mixed up",
        slip(_step, "H for G"),
        "A query has `H` groups of `G` heads. How many rows of `Q` does one group take?",
    ),
    Misconception(
        "letting the query move by one row",
        slip(_step, "query last"),
        "In Q `[R, H, G, D]` the heads of one query lie side by side. How many rows is it from "
        "one query to the next?",
    ),
    Misconception(
        "counting a step in queries",
        slip(_step, "step of queries"),
        "A step has `BR` *rows*. How many queries is that, with `G` heads each?",
    ),
    Misconception(
        "moving on by one row a step",
        slip(_step, "by one row"),
        "A step loads `BR` rows, so step 0 has the rows 0 to `BR - 1`. Where does step 1 begin?",
    ),
    Misconception(
        "loading the first step's rows in every step",
        slip(_step, "first step"),
        "Which row of the chunk does step 1 begin with?",
    ),
)

_WHOLE = ("whole queries", "whole queries, short")
_OUTSIDE = ("heads outside", "heads outside, in step")
_BY_ITSELF = (
    "no end", "from a whole query", "by KV heads", "by KV heads, cut", "query last",
    "remainder by H", "H for G",
)  # fmt: skip

_STEP = TEXTS.exercise(
    "rows_of_step",
    minutes=10,
    difficulty=2,
    solution=rows_of_step,
    misconceptions=_STEP_MISTAKES,
    combine=together(
        _STEP_MISTAKES,
        *(
            {alone, *m.wrong.slips}
            for alone in _BY_ITSELF
            for m in _STEP_MISTAKES
            if m.wrong.slips != {alone}
        ),
        {"one head", "all groups", *_OUTSIDE},
        {"first step", "step of queries", "by one row", "heads outside, in step", *_WHOLE},
        *({whole, "all groups"} for whole in _WHOLE),
        *({whole, "past the end"} for whole in _WHOLE),
        {"step of queries", "heads outside"},
        {"step of queries", "rows as queries"},
        {"past the end", "rows as queries"},
        {"past the end", "row 0", "short"},
        *({whole, "short"} for whole in _WHOLE),
        {
            "all groups",
            "one KV head",
            "one KV head, moved",
            "interleaved",
            "brackets",
            "short stride",
            "no head",
            "heads before queries",
            "no member",
        },
        {"no member", "one head"},
        *({"no member", outside} for outside in _OUTSIDE),
        {"all groups", "places"},
    ),
    cases=(
        Case("one query, a group of 2", lambda: ([3], 0, 0, 1, 2, 2)),
        Case("two KV heads", lambda: ([1, 4], 0, 1, 2, 2, 4)),
        Case("three KV heads, groups of 2", lambda: ([1, 4], 0, 1, 3, 2, 4)),
        Case("the last rows do not exist", lambda: ([0, 2], 0, 1, 2, 3, 8)),
        Case("the second step", lambda: ([1, 2, 5], 1, 0, 2, 4, 8)),
        Case("a query on both sides of a step", lambda: ([1, 2, 6], 1, 1, 2, 3, 4)),
        Case("three KV heads, groups of 1", lambda: ([2, 3, 7, 8, 9], 1, 2, 3, 1, 4)),
        Case("groups of 5, the third step", lambda: ([0, 3, 4, 8, 9], 2, 1, 3, 5, 8)),
    ),
)


# -- chunk_lengths --


def chunk_lengths(count: int, length: int) -> list[int]:
    """How many queries each chunk of a block has, the shorter ones first."""
    num_chunks = max(count // length, 1) if count else 0
    # chunk i begins at count * i / n, rounded down, and ends where the next one begins
    bounds = [count * i // num_chunks for i in range(num_chunks)] + [count]
    return sorted(end - start for start, end in pairwise(bounds))


def _lengths(slips: Slips, count: int, length: int) -> list[int]:
    """`chunk_lengths` with slips."""
    unit = 2 * length if "twice" in slips else length
    parts = -(-count // unit) if "rounded up" in slips else count // unit
    if "dropped" not in slips:
        parts = max(parts, 1)
    if count == 0 and "empty chunk" not in slips:
        parts = 0
    if parts == 0:
        return []
    if slips & {"rest", "rest, in order"}:
        found = [unit] * (count // unit) + [count % unit] * (count % unit > 0) or [0]
    elif "uneven" in slips:
        found = [count // parts] * (parts - 1) + [count - count // parts * (parts - 1)]
    elif "lost" in slips:
        found = [count // parts] * parts
    else:
        found = [count * (i + 1) // parts - count * i // parts for i in range(parts)]
    if slips & {"in order", "rest, in order"}:
        return found
    return sorted(found, reverse="long first" in slips)


_LENGTHS_MISTAKES = (
    Misconception(
        "as few chunks as possible",
        slip(_lengths, "twice"),
        "More chunks are more programs at work. What is the largest number of them that leaves "
        "each at least `length`?",
    ),
    *(
        Misconception(
            "chunks of one length, and a short rest",
            slip(_lengths, name),
            "A rest of one query costs a program and a place in the workspace, too. "
            "What if all chunks took a part of the rest?",
        )
        for name in ("rest", "rest, in order")
    ),
    Misconception(
        "one chunk more, and all of them shorter",
        slip(_lengths, "rounded up"),
        "With 11 queries and a length of 4, three chunks have fewer than 4 each. How many chunks "
        "of *at least* 4 are there?",
    ),
    Misconception(
        "losing the rest",
        slip(_lengths, "lost"),
        "Add up your lengths. Whose gradient is missing?",
    ),
    Misconception(
        "the longest first",
        slip(_lengths, "long first"),
        "Which lengths does the statement ask for first?",
    ),
    Misconception(
        "dropping a block with few queries",
        slip(_lengths, "dropped"),
        "A block that three queries list has a gradient, too. How many chunks does it need?",
    ),
    Misconception(
        "a chunk for a block that nobody lists",
        slip(_lengths, "empty chunk"),
        "Without queries there is nothing to sum. How many programs does that take?",
    ),
    Misconception(
        "giving the whole rest to one chunk",
        slip(_lengths, "uneven"),
        "The kernel is done when its longest program is. By how much do the most equal lengths "
        "differ?",
    ),
    Misconception(
        "leaving the lengths as the chunks come",
        slip(_lengths, "in order"),
        "With `count * i // n`, longer and shorter chunks take turns. Which ones does the "
        "statement ask for first?",
    ),
)

_RESTS = ("rest", "rest, in order")

_LENGTHS = TEXTS.exercise(
    "chunk_lengths",
    minutes=4,
    difficulty=1,
    solution=chunk_lengths,
    misconceptions=_LENGTHS_MISTAKES,
    combine=together(
        _LENGTHS_MISTAKES,
        *(
            {rest, other}
            for rest in _RESTS
            for other in ("uneven", "lost", "rounded up", "dropped")
        ),
        {*_RESTS, "in order", "long first"},
        {"uneven", "lost"},
        {"lost", "long first", "in order"},
        {"rounded up", "dropped"},
        {"dropped", "empty chunk"},
    ),
    cases=(
        Case("two full chunks", lambda: (8, 4)),
        Case("three queries over", lambda: (11, 4)),
        Case("fewer than `length`", lambda: (3, 4)),
        Case("nobody lists it", lambda: (0, 4)),
        Case("nearly twice the length", lambda: (7, 4)),
        Case("three chunks", lambda: (14, 4)),
        Case("four chunks, two over", lambda: (30, 7)),
        Case("a long list", lambda: (51, 6)),
    ),
)


# -- window_queries --


def window_queries(start: int, BT: int, window_size: int, N: int) -> tuple[int, int]:
    """The queries that see some of BT keys: the first of them, and the end of their range."""
    last_key = start + BT - 1
    return start, min(last_key + window_size, N)


def _window(
    slips: Slips, start: int, BT: int, window_size: int, N: int
) -> tuple[int, ...] | range | int:
    """`window_queries` with slips."""
    first, last_key = start, start + BT - 1
    if "keys" in slips:
        return max(start - window_size + 1, 0), min(start + BT, N)
    if "whole tile" in slips:
        first = last_key
    end = last_key + window_size
    if "first key" in slips:
        end = start + window_size
    if "own tile" in slips:
        end = start + BT
    if "in turn" in slips:
        end = start + BT * window_size
    if "no window" in slips:
        end = N
    end += ("one more" in slips) - ("one less" in slips)
    if "past the end" not in slips:
        end = min(end, N - ("last left out" in slips))
    end -= "inclusive" in slips
    if "all queries" in slips:
        return tuple(range(first, end))
    if "as a range" in slips:
        return range(first, end)
    if "end alone" in slips:
        return end
    return (end, first) if "exchanged" in slips else (first, end)


_WINDOW_MISTAKES = (
    Misconception(
        "stopping behind the queries that see the first key",
        slip(_window, "first key"),
        "The last key of the tile stands `BT - 1` later. How long do queries see *that* one?",
    ),
    Misconception(
        "stopping at the end of the tile",
        slip(_window, "own tile"),
        "Queries behind the tile look back into it. How far back does a window reach?",
    ),
    Misconception(
        "the keys that a tile of queries sees",
        slip(_window, "keys"),
        "That is the forward's question. Here the tile is of keys. On which side of a key do its "
        "queries stand?",
    ),
    Misconception(
        "waiting until the whole tile is seen",
        slip(_window, "whole tile"),
        "A query in the middle of the tile sees its first half. Does that half learn from it?",
    ),
    Misconception(
        "walking on to the end of the text",
        slip(_window, "no window"),
        "So it is without a window. Query `t` sees the keys from `t - window_size + 1` on. Which "
        "is the last query that sees the tile's last key?",
    ),
    *(
        Misconception(
            "the queries themselves in place of two numbers",
            slip(_window, name),
            "The queries stand side by side. Which two numbers does a `range` of them need?",
        )
        for name in ("all queries", "as a range")
    ),
    Misconception(
        "returning the end alone",
        slip(_window, "end alone"),
        "The end is right. With which query does the walk begin?",
    ),
    Misconception(
        "one query too few",
        slip(_window, "one less"),
        "Key `i` is seen by the queries `i` to `i + window_size - 1`. How many are they?",
    ),
    Misconception(
        "one query too many",
        slip(_window, "one more"),
        "With a window of 1, a query sees itself alone. Which is the last query that sees key `i`?",
    ),
    Misconception(
        "a window for each key, one behind the other",
        slip(_window, "in turn"),
        "The windows of neighbouring keys overlap. By how much does one more key move the end?",
    ),
    Misconception(
        "the two results exchanged",
        slip(_window, "exchanged"),
        "Where the walk begins comes first.",
    ),
    Misconception(
        "the last query itself in place of the end",
        slip(_window, "inclusive"),
        "A `range` stops before its end. Which number has to be its end?",
    ),
    Misconception(
        "running past the last query",
        slip(_window, "past the end"),
        "The text ends. What is loaded for a query that is not there?",
    ),
    Misconception(
        "leaving out the text's last query",
        slip(_window, "last left out"),
        "The queries are 0 to `N - 1`, and a `range` stops before its end. What is the largest "
        "end?",
    ),
)

_WINDOW = TEXTS.exercise(
    "window_queries",
    minutes=5,
    difficulty=1,
    solution=window_queries,
    misconceptions=_WINDOW_MISTAKES,
    combine=together(
        _WINDOW_MISTAKES,
        {"first key", "own tile", "keys", "in turn"},
        *(
            {alone, *m.wrong.slips}
            for alone in ("all queries", "as a range", "end alone")
            for m in _WINDOW_MISTAKES
            if m.wrong.slips != {alone}
        ),
        *(
            {"no window", *m.wrong.slips}
            for m in _WINDOW_MISTAKES
            if not m.wrong.slips & {"no window", "whole tile", "exchanged"}
        ),
        {"in turn", "one less"},
        {"in turn", "one more"},
        {"in turn", "inclusive"},
        {"keys", "whole tile"},
        {"keys", "last left out"},
        {"past the end", "last left out"},
        {"inclusive", "last left out"},
        {"keys", "one less"},
        {"keys", "one more"},
        {"keys", "past the end"},
        {"keys", "inclusive"},
        {"one less", "one more"},
        {"one less", "inclusive"},
        {"one more", "inclusive"},
    ),
    cases=(
        Case("two keys, a window of 3", lambda: (4, 2, 3, 20)),
        Case("a window of 1", lambda: (2, 2, 1, 20)),
        Case("the first tile", lambda: (0, 4, 4, 20)),
        Case("near the end of the text", lambda: (8, 4, 5, 13)),
        Case("a window longer than the tile", lambda: (3, 3, 8, 40)),
        Case("a tile longer than the window", lambda: (8, 8, 2, 40)),
        Case("the last tile, not full", lambda: (16, 4, 6, 18)),
    ),
)


# -- audit --


def audit(
    tensors: list[tuple[str, int]], stores: list[tuple[int, str, int]]
) -> tuple[list[Element], list[Element]]:
    """The elements that nobody stores, and those that more than one program stores."""
    programs = {(name, i): set() for name, size in tensors for i in range(size)}
    for program, name, offset in stores:
        programs[name, offset].add(program)
    never = [element for element, who in programs.items() if not who]
    raced = [element for element, who in programs.items() if len(who) > 1]
    return never, raced


def _audit(
    slips: Slips, tensors: list[tuple[str, int]], stores: list[tuple[int, str, int]]
) -> tuple[list, list]:
    """`audit` with slips."""
    if "stores alone" in slips:
        stored = [(name, i) for _, name, i in stores]
        return [], list(dict.fromkeys(e for e in stored if stored.count(e) > 1))
    if "offsets alone" in slips:
        stores = [(program, name, i) for program, _, i in stores for name, n in tensors if i < n]
    named = {name for _, name, _ in stores}
    if "stored tensors" in slips:
        tensors = [(name, size) for name, size in tensors if name in named]
    counted = {(name, i): [] for name, size in tensors for i in range(size)}
    for program, name, offset in stores:
        counted[name, offset].append(program)
    if "no key" in slips:
        counted = {element: who for element, who in counted.items() if who}
        counted |= {(name, i): counted[name, i] for name, size in tensors for i in range(size)}
    many = len if "stores" in slips else lambda who: len(set(who))
    never = [element for element, who in counted.items() if not who]
    if "untouched tensors" in slips:
        never = [(name, i) for name, i in never if name not in named]
    least = 2 if "three" in slips else 1
    raced = [element for element, who in counted.items() if many(who) > least]
    if "all stored" in slips:
        raced = [element for element, who in counted.items() if who]
    if "no race" in slips:
        raced = []
    if "none missing" in slips:
        never = []
    if "nothing" in slips:
        never, raced = [], []
    if "neighbours" in slips:
        raced = [
            (b[1], b[2]) for a, b in pairwise(stores)
            if a[1:] == b[1:] and a[0] != b[0]
        ]  # fmt: skip
    if "as stored" in slips:
        raced = sorted(raced, key=[(name, i) for _, name, i in stores].index)
    if slips & {"pairs in triples", "pairs in triples, twice"}:
        never = list(counted)
        raced = [] if "pairs in triples, twice" in slips else raced
    if "each store" in slips:
        raced = [(name, i) for _, name, i in stores if (name, i) in raced]
    if "sorted" in slips:
        never, raced = sorted(never), sorted(raced)
    if "triples" in slips:
        raced = [store for store in stores if store[1:] in raced]
    if "names" in slips:
        never, raced = (list(dict.fromkeys(name for name, _ in x)) for x in (never, raced))
    return (raced, never) if "exchanged" in slips else (never, raced)


_AUDIT_MISTAKES = (
    Misconception(
        "looking up elements that nobody stored",
        slip(_audit, "no key"),
        "An element that nobody stored has no key. Who could give every element one?",
    ),
    Misconception(
        "reporting only tensors that are empty as a whole",
        slip(_audit, "untouched tensors"),
        "A tensor of which half is stored has another half. What stands there?",
    ),
    Misconception(
        "never reporting a race",
        slip(_audit, "no race"),
        "Two programs that store to one element are a race. Where do you collect who stores?",
    ),
    Misconception(
        "never reporting a missing element",
        slip(_audit, "none missing"),
        "Some elements occur in `tensors` and not in `stores`. Where do you look for them?",
    ),
    Misconception(
        "reporting nothing",
        slip(_audit, "nothing"),
        "Begin with the elements that nobody stores. Which elements are there, and which of them "
        "occur in `stores`?",
    ),
    *(
        Misconception(
            "looking for pairs among triples",
            slip(_audit, name),
            "`stores` holds `(program, name, offset)`, so a pair `(name, offset)` is never in it. "
            "Which part of a store do you compare?",
        )
        for name in ("pairs in triples", "pairs in triples, twice")
    ),
    Misconception(
        "an element once for each of its stores",
        slip(_audit, "each store"),
        "A place that two programs store to is one element. How do you name it once?",
    ),
    Misconception(
        "looking for three programs",
        slip(_audit, "three"),
        "How many does it take to race?",
    ),
    Misconception(
        "the stores in place of the elements",
        slip(_audit, "triples"),
        "A place that two programs store to is one element, however many stores it has. How do "
        "you name it once?",
    ),
    Misconception(
        "looking at `stores` alone",
        slip(_audit, "stores alone"),
        "What nobody stored is not in `stores`. Go through the elements of `tensors`: how many "
        "different programs stored to each?",
    ),
    Misconception(
        "the tensors' names in place of their elements",
        slip(_audit, "names"),
        "Half of a tensor may be fine. Which elements are not?",
    ),
    Misconception(
        "the two results exchanged",
        slip(_audit, "exchanged"),
        "The elements that nobody stores come first.",
    ),
    Misconception(
        "counting stores in place of programs",
        slip(_audit, "stores"),
        "One program may store twice, one after the other: the second is what stays. Who has to "
        "store for the winner to be unknown?",
    ),
    Misconception(
        "reporting every element that is stored",
        slip(_audit, "all stored"),
        "One program for each element is as it should be. How many are too many?",
    ),
    Misconception(
        "forgetting tensors that nobody stores to",
        slip(_audit, "stored tensors"),
        "A tensor that is never stored does not occur in `stores`. From where do you know that it "
        "exists?",
    ),
    Misconception(
        "mixing up the tensors",
        slip(_audit, "offsets alone"),
        "Offset 0 of `o` and offset 0 of `lse` are two places. What tells them apart?",
    ),
    Misconception(
        "comparing neighbouring stores alone",
        slip(_audit, "neighbours"),
        "Programs run in any order, so two stores to one place may stand far apart. What could "
        "you collect for each place?",
    ),
    *(
        Misconception(
            "another order than that of `tensors`",
            slip(_audit, name),
            "Go through the elements of `tensors`, and pick. In which order do they come then?",
        )
        for name in ("sorted", "as stored")
    ),
)

_AUDIT_ALONE = (
    "nothing", "pairs in triples", "pairs in triples, twice", "each store", "stores alone",
)  # fmt: skip

_AUDIT = TEXTS.exercise(
    "audit",
    minutes=5,
    difficulty=2,
    solution=audit,
    misconceptions=_AUDIT_MISTAKES,
    combine=together(
        _AUDIT_MISTAKES,
        *(
            {alone, *m.wrong.slips}
            for alone in _AUDIT_ALONE
            for m in _AUDIT_MISTAKES
            if m.wrong.slips != {alone}
        ),
        {"no race", "stores", "three", "all stored", "neighbours"},
        {"none missing", "stored tensors", "untouched tensors"},
        {"sorted", "as stored", "triples", "names"},
        *({"no race", other} for other in ("as stored", "triples", "offsets alone")),
        {"offsets alone", "triples"},
        {"offsets alone", "as stored"},
    ),
    cases=(
        Case("two elements, two programs", lambda: ([("o", 2)], [(0, "o", 0), (1, "o", 0)])),
        Case(
            "one program stores twice",
            lambda: ([("o", 2)], [(0, "o", 0), (0, "o", 0), (1, "o", 1)]),
        ),
        Case(
            "a tensor that nobody stores to",
            lambda: ([("o", 1), ("lse", 2)], [(4, "o", 0)]),
        ),
        Case(
            "two tensors, one of them shared",
            lambda: (
                [("o", 2), ("lse", 2)],
                [(0, "o", 0), (0, "lse", 0), (1, "o", 1), (1, "lse", 0)],
            ),
        ),
        Case(
            "one place, far apart",
            lambda: ([("a", 3)], [(0, "a", 1), (1, "a", 0), (2, "a", 2), (3, "a", 1)]),
        ),
        Case(
            "stored from the back",
            lambda: (
                [("o", 2), ("lse", 3)],
                [(0, "lse", 1), (1, "lse", 1), (0, "lse", 0), (0, "o", 0), (1, "o", 0)],
            ),
        ),
        Case(
            "three tensors",
            lambda: (
                [("x", 2), ("y", 1), ("z", 2)],
                [(2, "x", 1), (0, "z", 1), (1, "z", 0), (0, "z", 0), (2, "z", 0)],
            ),
        ),
    ),
)


# -- slot_gradient --


def slot_gradient(d_s: Tensor, s: Tensor, is_seen: Tensor) -> Tensor:
    """The gradient [S] of one query's factors, at ones, from all heads of its group."""
    return (d_s * s).masked_fill(~is_seen, 0).sum((0, 2))


def _slot(slips: Slips, d_s: Tensor, s: Tensor, is_seen: Tensor) -> Tensor:
    """`slot_gradient` with slips."""
    s = torch.ones_like(s) if "no score" in slips else s.exp() if "exponential" in slips else s
    if "one head" in slips:
        d_s, s = d_s[:1], s[:1]
    seen = is_seen.expand(d_s.shape)
    product = d_s * s if "NaN" in slips else (d_s * s).masked_fill(~seen, 0)
    if "all apart" in slips:
        hidden = torch.zeros_like(seen) if "NaN" in slips else ~seen
        return d_s.masked_fill(hidden, 0).sum((0, 2)) * s.masked_fill(hidden, 0).sum((0, 2))
    if "apart" in slips:
        d_sum = d_s.masked_fill(~seen, 0).sum(2)
        product = (d_sum * s.masked_fill(~seen, 0).sum(2))[..., None]
    if "heads apart" in slips:
        return product.sum(2)
    if "one number" in slips:
        return product.sum()
    if "all mean" in slips:
        return product.mean((0, 2))
    if "keys mean" in slips:
        product = product / seen.sum(2, keepdim=True).clamp(min=1)
    if "keys kept" in slips:
        return product.sum(0)
    found = product.sum(2)
    if "over slots" in slips:
        return product.sum((0, 1))
    return (
        -found.sum(0)
        if "sign" in slips
        else (found.mean(0) if "heads mean" in slips else found.sum(0))
    )


_SLOT_MISTAKES = (
    Misconception(
        "leaving the scores out",
        slip(_slot, "no score"),
        "That is the gradient of a number *added* to the slot's scores. The factor multiplies "
        "them. By how much does a score change when the factor does?",
    ),
    Misconception(
        "the exponential in place of the score",
        slip(_slot, "exponential"),
        "`d_s` already is the gradient with respect to the score, behind the softmax. How does "
        "`factor * s` change with the factor?",
    ),
    *(
        Misconception(
            "summing before multiplying",
            slip(_slot, name),
            "Each key has its own score and its own gradient. In which order do the sums and the "
            "product belong?",
        )
        for name in ("apart", "all apart")
    ),
    Misconception(
        "averaging over heads and keys",
        slip(_slot, "all mean"),
        "The factor stands in the score of every key, for every head. Are effects averaged?",
    ),
    Misconception(
        "averaging over the keys",
        slip(_slot, "keys mean"),
        "The factor stands in each key's score. Are effects averaged?",
    ),
    Misconception(
        "a gradient for each head",
        slip(_slot, "heads apart"),
        "The group has one list, and one factor for each slot. Which axis has to go?",
    ),
    Misconception(
        "a gradient for each key",
        slip(_slot, "keys kept"),
        "All keys of a slot share one factor. Which axis has to go, too?",
    ),
    Misconception(
        "one number for all slots",
        slip(_slot, "one number"),
        "Each slot has a factor of its own. Which axis stays?",
    ),
    Misconception(
        "summing over the slots, not over their keys",
        slip(_slot, "over slots"),
        "The axes are heads, slots, keys. Which one should be left?",
    ),
    Misconception(
        "the sign turned round",
        slip(_slot, "sign"),
        "A gradient points to where the loss grows. Who turns it round?",
    ),
    Misconception(
        "NaN from a hidden key",
        slip(_slot, "NaN"),
        "A hidden score is `-inf` and its gradient is 0. `0 * -inf` is NaN, and NaN times a mask "
        "is NaN still. What writes 0 whatever stood there?",
    ),
    Misconception(
        "taking one head of the group",
        slip(_slot, "one head"),
        "One factor serves all heads of the group. Through how many of them does it act?",
    ),
    Misconception(
        "averaging over the heads",
        slip(_slot, "heads mean"),
        "The heads do not share one effect, each has its own. What do effects do?",
    ),
)

_AFTER = (
    "no score", "one head", "heads mean", "keys mean", "heads apart", "one number", "over slots",
    "sign",
)  # fmt: skip

_SLOT = TEXTS.exercise(
    "slot_gradient",
    minutes=5,
    difficulty=2,
    solution=slot_gradient,
    misconceptions=_SLOT_MISTAKES,
    combine=together(
        _SLOT_MISTAKES,
        {"NaN", "apart"},
        {"no score", "exponential", "NaN"},
        {"one head", "heads mean", "heads apart", "one number", "over slots"},
        *(
            {"keys kept", other}
            for other in (
                "apart",
                "all apart",
                "keys mean",
                "heads mean",
                "heads apart",
                "one number",
                "over slots",
                "sign",
            )
        ),
        {"keys mean", "apart"},
        {"keys mean", "over slots"},
        {"keys mean", "one number"},
        {"heads apart", "sign"},
        {"one number", "sign"},
        {"over slots", "sign"},
        {"heads mean", "sign"},
        {"apart", "over slots"},
        {"apart", "one number"},
        {"apart", "all apart"},
        *({"all apart", other} for other in _AFTER),
        *({"all mean", other} for other in ("apart", "all apart", "keys kept", *_AFTER[1:])),
    ),
    cases=(
        Case(
            "one head, two slots of two keys",
            lambda: (
                torch.tensor([[[1.0, 2.0], [-4.0, 1.0]]]),
                torch.tensor([[[3.0, 1.0], [0.5, 2.0]]]),
                torch.tensor([[True, True], [True, True]]),
            ),
        ),
        Case(
            "two heads, one hidden key",
            lambda: (
                torch.tensor([[[1.0, 2.0]], [[-3.0, 0.0]]]) * torch.tensor([1.0, 0.0]),
                torch.tensor([[[2.0, -torch.inf]], [[1.0, -torch.inf]]]),
                torch.tensor([[True, False]]),
            ),
        ),
        Case("three heads, two slots, all seen", lambda: _of_slots(3, 2, 3, hidden=0, seed=1)),
        Case("two heads, three slots, hidden keys", lambda: _of_slots(2, 3, 4, hidden=2, seed=2)),
        Case("four heads, a slot that is empty", lambda: _of_slots(4, 3, 2, hidden=2, seed=3)),
    ),
)


def _of_slots(G: int, S: int, BS: int, *, hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `slot_gradient`, with the last `hidden` keys of the last slot hidden."""
    is_seen = torch.ones(S, BS, dtype=torch.bool)
    is_seen[-1, BS - hidden :] = False
    s = _random(G, S, BS, seed=seed).masked_fill(~is_seen, -torch.inf)
    d_s = _random(G, S, BS, seed=seed + 100).masked_fill(~is_seen, 0)
    return d_s, s, is_seen


EXERCISES = (_INVERSE, _STEP, _WINDOW, _LENGTHS, _AUDIT, _SLOT)


# -- two slips at once, written as readers write them --


def _places_with_empty(lists: Tensor, num_blocks: int) -> tuple[list, list]:
    places = [(max(block, 0), place) for place, block in enumerate(lists.flatten().tolist())]
    ordered = sorted(places)
    bounds = [sum(block < b for block, _ in ordered) for b in range(num_blocks + 1)]
    return [place for _, place in ordered], bounds


def _one_head_unmasked(
    queries: list[int], step: int, head: int, H: int, G: int, BR: int
) -> list[int]:
    chunk = queries[step * BR :][:BR] or queries[-1:]
    chunk = chunk + [queries[-1]] * (BR - len(chunk))
    return [(query * H + head) * G for query in chunk]


def _few_and_uneven(count: int, length: int) -> list[int]:
    if count == 0:
        return []
    n = max(1, count // (2 * length))
    return sorted([count // n] * (n - 1) + [count - (n - 1) * (count // n)])


def _added_and_averaged(d_s: Tensor, s: Tensor, is_seen: Tensor) -> Tensor:
    return torch.einsum("gsk,sk->s", d_s, is_seen.float()) / len(d_s)


def _short_and_past(start: int, BT: int, window_size: int, N: int) -> tuple[int, int]:
    return start, start + window_size


def _counted_where_stored(tensors: list, stores: list) -> tuple[list, list]:
    places = [(name, offset) for _, name, offset in stores]
    elements = [(name, i) for name, n in tensors for i in range(n)]
    stored = {name for name, _ in places}
    never = [e for e in elements if e not in places and e[0] in stored]
    return never, [e for e in elements if places.count(e) > 1]


DOUBLES = (
    Double(
        "inverse_list",
        _places_with_empty,
        ("taking an empty slot for block 0", "the place of an entry in place of its query"),
    ),
    Double(
        "rows_of_step",
        _one_head_unmasked,
        ("taking one head of each group", "loading rows past the end of the chunk"),
    ),
    Double(
        "chunk_lengths",
        _few_and_uneven,
        ("as few chunks as possible", "giving the whole rest to one chunk"),
    ),
    Double(
        "slot_gradient",
        _added_and_averaged,
        ("leaving the scores out", "averaging over the heads"),
    ),
    Double(
        "window_queries",
        _short_and_past,
        ("stopping behind the queries that see the first key", "running past the last query"),
    ),
    Double(
        "audit",
        _counted_where_stored,
        (
            "counting stores in place of programs",
            "forgetting tensors that nobody stores to",
        ),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    queries_of_a_block={"tolerance": 0.03},
    busiest_block={"choices": (8, 60, 180, 528), "tolerance": 0.03},
    fastest_backward={"choices": ("slots", "one pass", "two passes")},
    peaked_choice={"unit": "%"},
)
