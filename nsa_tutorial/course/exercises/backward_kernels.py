"""Exercises of chapter 13: the inverse list, the rows of a step, shares of a long list, the
queries of a window's keys, two programs that store to one place, and the gradient of a choice."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)

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


_INVERSE = TEXTS.exercise(
    "inverse_list",
    returns=("queries", "bounds"),
    minutes=12,
    difficulty=2,
    solution=inverse_list,
    misconceptions=diffs(inverse_list, [
        ("// S", "% S", "the slot in place of the query",
         "A place in the flattened lists is `query * S + slot`. Which of the two is the "
         "remainder?"),
        ({"return entry": "return block", " // S": ""},
         "the sorted blocks in place of their queries",
         "A sort returns two things: the sorted values, and where each came from. Which one says "
         "whose entry it was?"),
        ("block, entry = block.sort(stable=True)",
         "entry = block.numel() - 1 - block.flip(0).argsort(stable=True)\n    block = block[entry]",
         "a block's queries in descending order",
         "Equal keys should stay in the order of their queries. What is a sort called that "
         "promises that?"),
        ("stable=True", "stable=True, descending=True", "sorting the blocks in descending order",
         "`torch.searchsorted` expects numbers that ascend, and block 0 comes first. Which "
         "number sends the empty slots to the end all the same?"),
        ({"torch.where(lists < 0, num_blocks, lists)": "lists",
          "stable=True": "stable=True, descending=True"}, "sorting the blocks in descending order"),
        ("block, entry = block.sort(stable=True)", "entry = block.argsort(stable=True)",
         "searching the blocks before they are sorted",
         "`torch.searchsorted` halves a sorted list again and again. Which of your tensors is "
         "sorted?"),
        ({"return ": "return (", ", bounds": ", bounds)[::-1]"}, "the two results exchanged",
         "The queries come first, then the bounds."),
        ("block, entry = block.sort(stable=True)",
         "entry = (block < num_blocks).nonzero().flatten()\n    block = block.sort().values",
         "leaving the entries in the order of the lists",
         "The queries of block 0 have to stand next to each other. What brings them together?"),
        ({"return ": "return list((", ", bounds": ").tensor_split(bounds[1:-1])), bounds"},
         "a list for each block in place of one flat list",
         "A GPU has no lists of lists. With all queries in one flat list, what do the bounds say?"),
        ({"return ": "return list((", ", bounds": ").tensor_split(bounds[1:-1]))"},
         "a list for each block in place of one flat list"),
        (", bounds", ", bounds.diff()", "counts in place of bounds",
         "A count says how many queries a block has. Where does its stretch begin?"),
        ("num_blocks + 1)", "num_blocks + 1), right=True",
         "where each block ends in place of where it begins",
         "`bounds[b]` is where block b's stretch begins. What has to be `bounds[0]`?"),
        ("num_blocks + 1", "num_blocks", "leaving out the end of the last block",
         "Block b's stretch is `queries[bounds[b] : bounds[b + 1]]`. What is that for the last "
         "one?"),
        (", bounds", ", bounds[:-1]", "leaving out the end of the last block"),
        (", bounds", ", bounds[1:]", "leaving out where block 0 begins",
         "Block 0's stretch is `queries[bounds[0] : bounds[1]]`. What has to be `bounds[0]`?"),
        ({"torch.where(lists < 0, num_blocks, lists)": "lists", "[: bounds[-1]]": ""},
         "letting empty slots sort in front",
         "-1 is smaller than every block, so a sort puts it before block 0. Which number would "
         "send it behind all blocks?"),
        ("torch.where(lists < 0, num_blocks, lists)", "lists.clamp(min=0)",
         "taking an empty slot for block 0",
         "An empty slot names no block. Whose gradient do its queries add to now?"),
        ("[: bounds[-1]]", "", "keeping the empty slots at the end",
         "Behind the last block stand the entries that name none. Where does the last block's "
         "stretch end?"),
        ("torch.where(lists < 0, num_blocks, lists).flatten()", "lists[lists >= 0]",
         "dropping the empty slots before the sort",
         "Without the empty slots, the places behind them have moved up. Which query does place "
         "1 belong to now?"),
        (" // S", "", "the place of an entry in place of its query",
         "The sort tells places in the flattened lists. Each query has `S` of them. Which query "
         "does place 5 belong to, with two slots?"),
        ("// S", "// len(lists)", "dividing by the number of queries",
         "Each query has `S` places in the flattened lists. With two slots, which query does "
         "place 5 belong to?"),
        ({".flatten()": ".T.flatten()", "// S": "% len(lists)"},
         "flattening the lists slot by slot",
         "First come all queries that list a block in slot 0, then those with slot 1. In which "
         "order do the queries of a block have to stand?"),
        (".flatten()", ".T.flatten()", "flattening the lists slot by slot",
         "After `.T`, the slots 0 of all queries come first. Which query does place 1 belong to "
         "now? And in which order would a block's queries come?"),
        ("lists < 0", "lists <= 0", "taking block 0 for an empty slot",
         "An empty slot is -1, and blocks are numbered from 0. Which queries list block 0?"),
        ("return entry[: bounds[-1]] // S, bounds", "return [], []", "returning two empty lists",
         "Take block 0 of the case below, by hand. Which queries have a 0 in their list?"),
        (", bounds", ", bounds.unique()", "leaving out blocks that nobody lists",
         "A program looks up its block by number. At which place does it find block 2 if block 1 "
         "has no bound?"),
    ]),
    cases=(
        Case("two blocks, one slot", lambda: (torch.tensor([[0], [1], [0]]), 2)),
        Case("an empty slot", lambda: (torch.tensor([[0, -1], [0, 1], [1, 0]]), 2)),
        Case("two slots", lambda: (torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)),
        Case("a block that nobody lists", lambda: (torch.tensor([[0, -1], [2, 0], [2, 0]]), 3)),
        Case("a query that lists nothing",
             lambda: (torch.tensor([[-1, 0], [-1, -1], [3, 1], [1, -1]]), 5)),
        Case("three slots",
             lambda: (torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, 1], [3, 0, 2]]), 4)),
        Case("everybody lists block 0",
             lambda: (torch.tensor([[0, b // 2] for b in range(2, 10)]), 5)),
    ),
)  # fmt: skip


# -- rows_of_step --


def rows_of_step(queries: list[int], step: int, head: int, H: int, G: int, BR: int) -> list[int]:
    """The rows of Q, seen as [R * H * G, D], that a program loads in one step; -1 past its end."""
    index = step * BR + torch.arange(BR)  # [BR], query after query, head after head
    is_row = index < len(queries) * G
    query = torch.tensor(queries)[(index // G).clamp(max=len(queries) - 1)]
    row = (query * H + head) * G + index % G
    return torch.where(is_row, row, -1).tolist()


_STEP = TEXTS.exercise(
    "rows_of_step",
    minutes=10,
    difficulty=2,
    solution=rows_of_step,
    misconceptions=diffs(rows_of_step, [
        ({"len(queries) * G": "len(queries)", "index // G": "index", "index % G": "0"},
         "taking one head of each group",
         "Every head of the group has used this block's keys. What happens to the shares of the "
         "others?"),
        ("torch.tensor(queries)", "torch.arange(len(queries))",
         "the place in the chunk in place of the query",
         "A row's place in the chunk is not its place in Q. What does `queries` hold?"),
        ("len(queries) * G", "len(queries)", "as many rows as the chunk has queries",
         "`len(queries)` counts queries. How many rows are they, with `G` heads each?"),
        ("(query * H + head) * G", "query * H + head * G", "too short a step from query to query",
         "How many rows of Q belong to one query, over all its KV heads?"),
        ("(query * H + head) * G", "query * H + head",
         "counting in KV heads where rows are query heads",
         "`query * H + head` is a row of K. How many rows of Q stand for one row of K?"),
        (" + index % G", "", "the group's first head again and again",
         "Each query has `G` rows for this KV head, and they lie side by side. How do they "
         "differ?"),
        ("(query * H + head) * G", "query * H * G", "leaving `head` out",
         "These are the rows of KV head 0, whichever `head` the program has. How many rows of a "
         "query stand before those of `head`?"),
        ({"len(queries) * G": "len(queries) * H * G", "index // G": "index // (H * G)",
          "(query * H + head) * G + index % G": "query * H * G + index % (H * G)"},
         "taking the heads of all groups",
         "The heads of another group read other keys, and have a list of their own. How many "
         "heads share this KV head?"),
        ({"index // G": "index % len(queries)", "index % G": "index // len(queries)"},
         "all queries of one head first",
         "The sum is the same, but the group's heads lie side by side in memory. Which order "
         "loads them together?"),
        ({"index = step * BR + torch.arange(BR)": "n, index = max(BR // G, 1), torch.arange(BR)",
          "index < len(queries) * G": "(step * n + index % n < len(queries)) & (index // n < G)",
          "index // G": "step * n + index % n", "index % G": "index // n"},
         "all queries of one head first"),
        ("(query * H + head) * G", "query * G", "forgetting the other KV heads",
         "Between two queries lie the heads of *all* KV heads. How many are they?"),
        ("(query * H + head) * G", "(query + head) * G", "forgetting the other KV heads"),
        ("(query * H + head) * G + index % G", "(query * G + index % G) * H + head",
         "taking Q for `[R, G, H, D]`",
         "In Q `[R, H, G, D]` the heads of one group lie side by side. How far is it from one of "
         "them to the next?"),
        ("(query * H + head) * G", "(head * len(queries) + query) * G",
         "taking Q for `[H, R, G, D]`",
         "In Q `[R, H, G, D]` all KV heads of a query come before the next query. By what do you "
         "multiply the query, then?"),
        ("torch.where(is_row, row, -1)", "row[is_row]", "a short list without −1",
         "A tile has `BR` rows in every step. What stands in the rows that the chunk cannot fill?"),
        ("torch.where(is_row, row, -1)", "row", "loading rows past the end of the chunk",
         "The last step may have fewer rows than the tile. Whose gradient do the others add to?"),
        ({".clamp(max=len(queries) - 1)": "", "torch.where(is_row, row, -1)": "row"},
         "asking for queries past the end of the chunk",
         "Which rows does a step have past the chunk's end?"),
        ("row, -1", "row, 0", "row 0 in place of −1",
         "Row 0 of Q is a query like any other. How does your list say that nothing is loaded?"),
        ({"step * BR + torch.arange(BR)": "step * (BR // G) * G + torch.arange(BR // G * G)",
          ".tolist()": ".tolist() + [-1] * (BR % G)"}, "taking whole queries only",
         "Where `G` does not divide `BR`, whole queries leave rows of the step idle. Whose heads "
         "could fill them?"),
        ("step * BR + torch.arange(BR)", "step * (BR // G) * G + torch.arange(BR // G * G)",
         "taking whole queries only"),
        ("step * BR", "step * (BR // G) * G", "starting each step with a whole query",
         "Where `G` does not divide `BR`, step 0 ends inside a query. With which of its heads "
         "does step 1 begin?"),
        ({"(index // G).clamp(max=len(queries) - 1)": "torch.where(is_row, index // H, 0)",
          "index % G": "index % H"}, "dividing by the number of KV heads",
         "In the chunk, each query has the `G` rows of one group. By which number do you divide "
         "to find the query?"),
        ({"(index // G).clamp(max=len(queries) - 1)": "torch.where(is_row, index // H, 0)",
          "index % G": "index % H", "len(queries) * G": "len(queries) * H"},
         "dividing by the number of KV heads"),
        ("index % G", "index % H", "the remainder by the number of KV heads",
         "The quotient by `G` is the query. The remainder of which division is the head of its "
         "group?"),
        ("(query * H + head) * G", "(query * G + head) * H", "`H` and `G` mixed up",
         "A query has `H` groups of `G` heads. How many rows of `Q` does one group take?"),
        ("(query * H + head) * G + index % G", "(head * G + index % G) * H + query",
         "letting the query move by one row",
         "In Q `[R, H, G, D]` the heads of one query lie side by side. How many rows is it from "
         "one query to the next?"),
        ("step * BR", "step * BR * G", "counting a step in queries",
         "A step has `BR` *rows*. How many queries is that, with `G` heads each?"),
        ("step * BR", "step", "moving on by one row a step",
         "A step loads `BR` rows, so step 0 has the rows 0 to `BR - 1`. Where does step 1 begin?"),
        ("step * BR + ", "", "loading the first step's rows in every step",
         "Which row of the chunk does step 1 begin with?"),
    ]),
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
)  # fmt: skip


# -- chunk_lengths --


def chunk_lengths(count: int, length: int) -> list[int]:
    """How many queries each chunk of a block has, the shorter ones first."""
    num_chunks = max(count // length, 1) if count else 0
    # chunk i begins at count * i / n, rounded down, and ends where the next one begins
    bounds = [count * i // num_chunks for i in range(num_chunks)] + [count]
    return sorted(end - start for start, end in pairwise(bounds))


_LENGTHS = TEXTS.exercise(
    "chunk_lengths",
    minutes=4,
    difficulty=1,
    solution=chunk_lengths,
    misconceptions=diffs(chunk_lengths, [
        ("count // length", "count // (2 * length)", "as few chunks as possible",
         "More chunks are more programs at work. What is the largest number of them that leaves "
         "each at least `length`?"),
        ("[count * i // num_chunks for i in range(num_chunks)] + [count]",
         "[*range(0, count, length), count]", "chunks of one length, and a short rest",
         "A rest of one query costs a program and a place in the workspace, too. What if all "
         "chunks took a part of the rest?"),
        ({"[count * i // num_chunks for i in range(num_chunks)] + [count]":
          "[*range(0, count, length), count]",
          "sorted(": "list("}, "chunks of one length, and a short rest"),
        ("count // length", "-(-count // length)", "one chunk more, and all of them shorter",
         "With 11 queries and a length of 4, three chunks have fewer than 4 each. How many "
         "chunks of *at least* 4 are there?"),
        ("end - start", "count // num_chunks", "losing the rest",
         "Add up your lengths. Whose gradient is missing?"),
        ("pairwise(bounds))", "pairwise(bounds))[::-1]", "the longest first",
         "Which lengths does the statement ask for first?"),
        ({"max(": "(", ", 1)": ")"}, "dropping a block with few queries",
         "A block that three queries list has a gradient, too. How many chunks does it need?"),
        (" if count else 0", "", "a chunk for a block that nobody lists",
         "Without queries there is nothing to sum. How many programs does that take?"),
        ("count * i // num_chunks", "count // num_chunks * i", "giving the whole rest to one chunk",
         "The kernel is done when its longest program is. By how much do the most equal lengths "
         "differ?"),
        ("sorted(", "list(", "leaving the lengths as the chunks come",
         "With `count * i // n`, longer and shorter chunks take turns. Which ones does the "
         "statement ask for first?"),
    ]),
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
)  # fmt: skip


# -- window_queries --


def window_queries(start: int, BT: int, window_size: int, N: int) -> tuple[int, int]:
    """The queries that see some of BT keys: the first of them, and the end of their range."""
    last_key = start + BT - 1
    return start, min(last_key + window_size, N)


_WINDOW = TEXTS.exercise(
    "window_queries",
    minutes=5,
    difficulty=1,
    solution=window_queries,
    misconceptions=diffs(window_queries, [
        ("last_key + window_size", "start + window_size",
         "stopping behind the queries that see the first key",
         "The last key of the tile stands `BT - 1` later. How long do queries see *that* one?"),
        ("last_key + window_size", "start + BT", "stopping at the end of the tile",
         "Queries behind the tile look back into it. How far back does a window reach?"),
        ("start, min(last_key + window_size, N)",
         "max(start - window_size + 1, 0), min(start + BT, N)",
         "the keys that a tile of queries sees",
         "That is the forward's question. Here the tile is of keys. On which side of a key do "
         "its queries stand?"),
        ("return start", "return last_key", "waiting until the whole tile is seen",
         "A query in the middle of the tile sees its first half. Does that half learn from it?"),
        ("min(last_key + window_size, N)", "N", "walking on to the end of the text",
         "So it is without a window. Query `t` sees the keys from `t - window_size + 1` on. "
         "Which is the last query that sees the tile's last key?"),
        ({"return start,": "return tuple(range(start,", ", N)": ", N)))"},
         "the queries themselves in place of two numbers",
         "The queries stand side by side. Which two numbers does a `range` of them need?"),
        ({"return start,": "return range(start,", ", N)": ", N))"},
         "the queries themselves in place of two numbers"),
        ("return start, ", "return ", "returning the end alone",
         "The end is right. With which query does the walk begin?"),
        ("+ window_size", "+ window_size - 1", "one query too few",
         "Key `i` is seen by the queries `i` to `i + window_size - 1`. How many are they?"),
        ("+ window_size", "+ window_size + 1", "one query too many",
         "With a window of 1, a query sees itself alone. Which is the last query that sees key "
         "`i`?"),
        ("last_key + window_size", "start + BT * window_size",
         "a window for each key, one behind the other",
         "The windows of neighbouring keys overlap. By how much does one more key move the end?"),
        ({"return start, ": "return ", ", N)": ", N), start"}, "the two results exchanged",
         "Where the walk begins comes first."),
        (", N)", ", N) - 1", "the last query itself in place of the end",
         "A `range` stops before its end. Which number has to be its end?"),
        ({"min(": "(", ", N)": ")"}, "running past the last query",
         "The text ends. What is loaded for a query that is not there?"),
        (", N)", ", N - 1)", "leaving out the text's last query",
         "The queries are 0 to `N - 1`, and a `range` stops before its end. What is the largest "
         "end?"),
    ]),
    cases=(
        Case("two keys, a window of 3", lambda: (4, 2, 3, 20)),
        Case("a window of 1", lambda: (2, 2, 1, 20)),
        Case("the first tile", lambda: (0, 4, 4, 20)),
        Case("near the end of the text", lambda: (8, 4, 5, 13)),
        Case("a window longer than the tile", lambda: (3, 3, 8, 40)),
        Case("a tile longer than the window", lambda: (8, 8, 2, 40)),
        Case("the last tile, not full", lambda: (16, 4, 6, 18)),
    ),
)  # fmt: skip


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


_AUDIT = TEXTS.exercise(
    "audit",
    minutes=5,
    difficulty=2,
    solution=audit,
    misconceptions=diffs(audit, [
        ({"never =": "stored = {(name, i): [] for _, name, i in stores}\n    never =",
          "if not who": "if stored[element]"}, "looking up elements that nobody stored",
         "An element that nobody stored has no key. Who could give every element one?"),
        ("if not who", "if element[0] not in [name for _, name, _ in stores]",
         "reporting only tensors that are empty as a whole",
         "A tensor of which half is stored has another half. What stands there?"),
        ("[element for element, who in programs.items() if len(who) > 1]", "[]",
         "never reporting a race",
         "Two programs that store to one element are a race. Where do you collect who stores?"),
        ("[element for element, who in programs.items() if not who]", "[]",
         "never reporting a missing element",
         "Some elements occur in `tensors` and not in `stores`. Where do you look for them?"),
        ("return never, raced", "return [], []", "reporting nothing",
         "Begin with the elements that nobody stores. Which elements are there, and which of "
         "them occur in `stores`?"),
        ("if not who", "if element not in stores", "looking for pairs among triples",
         "`stores` holds `(program, name, offset)`, so a pair `(name, offset)` is never in it. "
         "Which part of a store do you compare?"),
        ({"if not who": "if element not in stores", "len(who) > 1": "stores.count(element) > 1"},
         "looking for pairs among triples"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[(name, i) for _, name, i in stores if len(programs[name, i]) > 1]",
         "an element once for each of its stores",
         "A place that two programs store to is one element. How do you name it once?"),
        ("> 1", "> 2", "looking for three programs", "How many does it take to race?"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[store for store in stores if len(programs[store[1:]]) > 1]",
         "the stores in place of the elements",
         "A place that two programs store to is one element, however many stores it has. How do "
         "you name it once?"),
        ({"set() for name, size in tensors for i in range(size)": "[] for _, name, i in stores",
          ".add(": ".append("}, "looking at `stores` alone",
         "What nobody stored is not in `stores`. Go through the elements of `tensors`: how many "
         "different programs stored to each?"),
        ("return never, raced",
         "return tuple(list(dict.fromkeys(name for name, _ in x)) for x in (never, raced))",
         "the tensors' names in place of their elements",
         "Half of a tensor may be fine. Which elements are not?"),
        ("return never, raced", "return raced, never", "the two results exchanged",
         "The elements that nobody stores come first."),
        ({"set()": "[]", ".add(": ".append("}, "counting stores in place of programs",
         "One program may store twice, one after the other: the second is what stays. Who has to "
         "store for the winner to be unknown?"),
        ("len(who) > 1", "who", "reporting every element that is stored",
         "One program for each element is as it should be. How many are too many?"),
        ("range(size)", "range(size) if name in [n for _, n, _ in stores]",
         "forgetting tensors that nobody stores to",
         "A tensor that is never stored does not occur in `stores`. From where do you know that "
         "it exists?"),
        ("in stores:", "in [(p, name, i) for p, _, i in stores for name, n in tensors if i < n]:",
         "mixing up the tensors",
         "Offset 0 of `o` and offset 0 of `lse` are two places. What tells them apart?"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[b[1:] for a, b in pairwise(stores) if a[1:] == b[1:] and a[0] != b[0]]",
         "comparing neighbouring stores alone",
         "Programs run in any order, so two stores to one place may stand far apart. What could "
         "you collect for each place?"),
        ("return never, raced", "return sorted(never), sorted(raced)",
         "another order than that of `tensors`",
         "Go through the elements of `tensors`, and pick. In which order do they come then?"),
        ("return never, raced",
         "return never, sorted(raced, key=[(name, i) for _, name, i in stores].index)",
         "another order than that of `tensors`"),
    ]),
    cases=(
        Case("two elements, two programs", lambda: ([("o", 2)], [(0, "o", 0), (1, "o", 0)])),
        Case("one program stores twice",
             lambda: ([("o", 2)], [(0, "o", 0), (0, "o", 0), (1, "o", 1)])),
        Case("a tensor that nobody stores to", lambda: ([("o", 1), ("lse", 2)], [(4, "o", 0)])),
        Case(
            "two tensors, one of them shared",
            lambda: (
                [("o", 2), ("lse", 2)],
                [(0, "o", 0), (0, "lse", 0), (1, "o", 1), (1, "lse", 0)],
            ),
        ),
        Case("one place, far apart",
             lambda: ([("a", 3)], [(0, "a", 1), (1, "a", 0), (2, "a", 2), (3, "a", 1)])),
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
)  # fmt: skip


# -- slot_gradient --


def slot_gradient(d_s: Tensor, s: Tensor, is_seen: Tensor) -> Tensor:
    """The gradient [S] of one query's factors, at ones, from all heads of its group."""
    return (d_s * s).masked_fill(~is_seen, 0).sum((0, 2))


_SLOT = TEXTS.exercise(
    "slot_gradient",
    minutes=5,
    difficulty=2,
    solution=slot_gradient,
    misconceptions=diffs(slot_gradient, [
        (" * s", "", "leaving the scores out",
         "That is the gradient of a number *added* to the slot's scores. The factor multiplies "
         "them. By how much does a score change when the factor does?"),
        (" * s", " * s.exp()", "the exponential in place of the score",
         "`d_s` already is the gradient with respect to the score, behind the softmax. How does "
         "`factor * s` change with the factor?"),
        ({"(d_s * s)": "(d_s.masked_fill(~is_seen, 0).sum(2) * s",
          ".sum((0, 2))": ".sum(2)).sum(0)"}, "summing before multiplying",
         "Each key has its own score and its own gradient. In which order do the sums and the "
         "product belong?"),
        ("(d_s * s)", "d_s.masked_fill(~is_seen, 0).sum((0, 2)) * s", "summing before multiplying"),
        (".sum(", ".mean(", "averaging over heads and keys",
         "The factor stands in the score of every key, for every head. Are effects averaged?"),
        (", 0)", ", 0).div(is_seen.sum(1, keepdim=True).clamp(min=1))", "averaging over the keys",
         "The factor stands in each key's score. Are effects averaged?"),
        (".sum((0, 2))", ".sum(2)", "a gradient for each head",
         "The group has one list, and one factor for each slot. Which axis has to go?"),
        (".sum((0, 2))", ".sum(0)", "a gradient for each key",
         "All keys of a slot share one factor. Which axis has to go, too?"),
        (".sum((0, 2))", ".sum()", "one number for all slots",
         "Each slot has a factor of its own. Which axis stays?"),
        (".sum((0, 2))", ".sum((0, 1))", "summing over the slots, not over their keys",
         "The axes are heads, slots, keys. Which one should be left?"),
        ("return ", "return -", "the sign turned round",
         "A gradient points to where the loss grows. Who turns it round?"),
        (".masked_fill(~is_seen, 0)", "", "NaN from a hidden key",
         "A hidden score is `-inf` and its gradient is 0. `0 * -inf` is NaN, and NaN times a "
         "mask is NaN still. What writes 0 whatever stood there?"),
        (".sum((0, 2))", "[:1].sum((0, 2))", "taking one head of the group",
         "One factor serves all heads of the group. Through how many of them does it act?"),
        (".sum((0, 2))", ".sum(2).mean(0)", "averaging over the heads",
         "The heads do not share one effect, each has its own. What do effects do?"),
    ]),
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
)  # fmt: skip


def _of_slots(G: int, S: int, BS: int, *, hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `slot_gradient`, with the last `hidden` keys of the last slot hidden."""
    is_seen = torch.ones(S, BS, dtype=torch.bool)
    is_seen[-1, BS - hidden :] = False
    s = _random(G, S, BS, seed=seed).masked_fill(~is_seen, -torch.inf)
    d_s = _random(G, S, BS, seed=seed + 100).masked_fill(~is_seen, 0)
    return d_s, s, is_seen


EXERCISES = (_INVERSE, _STEP, _WINDOW, _LENGTHS, _AUDIT, _SLOT)


DOUBLES = (
    Double(
        "inverse_list",
        names=("taking an empty slot for block 0", "the place of an entry in place of its query"),
    ),
    Double(
        "rows_of_step",
        names=("taking one head of each group", "loading rows past the end of the chunk"),
    ),
    Double(
        "chunk_lengths", names=("as few chunks as possible", "giving the whole rest to one chunk")
    ),
    Double("slot_gradient", names=("leaving the scores out", "averaging over the heads")),
    Double(
        "window_queries",
        names=("stopping behind the queries that see the first key", "running past the last query"),
    ),
    Double(
        "audit",
        names=("counting stores in place of programs", "forgetting tensors that nobody stores to"),
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
