"""Exercises of chapter 18: which tokens a rank holds, the forward over several ranks from an empty
body, and the way home of its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.forbidden import forbidding
from nsa_tutorial.course.ranks import Rank, on_ranks
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)
_FORBIDDEN = (("nsa_tutorial.training", "the course's own operators over ranks"),)


# -- positions_of --


def positions_of(rank: int, ranks: int, tokens: int, zigzag: bool) -> list[int]:
    """The positions, in the whole text, of the tokens that a rank holds."""
    pieces = [rank, 2 * ranks - 1 - rank] if zigzag else [rank]
    size = -(-tokens // (len(pieces) * ranks))  # rounded up
    return [t for p in pieces for t in range(tokens)[p * size : (p + 1) * size]]


_POSITIONS = TEXTS.exercise(
    "positions_of", minutes=8, difficulty=1, solution=positions_of,
    misconceptions=diffs(positions_of, [
        ("range(tokens)[p * size : (p + 1) * size]",
         "range(len(range(tokens)[p * size : (p + 1) * size]))",
         "positions that begin at 0 on each rank",
         "A rotary embedding turns a token by its place in the *text*. Where in the text does the "
         "piece begin?"),
        ("2 * ranks - 1 - rank", "ranks + rank", "two pieces at the same distance on each rank",
         "Rank 0 has the first piece, where queries see little. Which piece balances that?"),
        ("[rank, 2 * ranks - 1 - rank]", "[2 * rank, 2 * rank + 1]",
         "two pieces that are neighbours",
         "Pieces beside each other are one longer piece. Which two give every rank an equal sum?"),
        ("[rank, 2 * ranks - 1 - rank]", "[2 * ranks - 1 - rank, rank]",
         "the late piece before the early one",
         "Both pieces are there. In which order do the tokens stand in the text?"),
        ("-(-tokens // (len(pieces) * ranks))", "tokens // (len(pieces) * ranks)",
         "pieces that are rounded down",
         "Ten tokens on four ranks: who holds the last two, if each piece has two?"),
        ("range(tokens)[p * size : (p + 1) * size]", "range(p * size, (p + 1) * size)",
         "positions past the end of the text",
         "The last piece may be shorter than the others. Where does the text end?"),
        ("len(pieces) * ranks", "ranks", "pieces of a zigzag as long as those of a contiguous cut",
         "A zigzag has two pieces on each rank. Into how many pieces is the text cut?"),
        ("[t for p in pieces for t in range(tokens)[p * size : (p + 1) * size]]",
         "list(range(rank, tokens, ranks))", "tokens that are dealt out like cards",
         "A window needs neighbours. Who holds the token before yours, if tokens are dealt out?"),
    ]),
    cases=(
        Case("rank 1 of 2, eight tokens, contiguous", lambda: (1, 2, 8, False)),
        Case("rank 0 of 2, eight tokens, zigzag", lambda: (0, 2, 8, True)),
        Case("rank 1 of 2, eight tokens, zigzag", lambda: (1, 2, 8, True)),
        Case("rank 1 of 3, ten tokens, contiguous", lambda: (1, 3, 10, False)),
        Case("rank 2 of 3, ten tokens, contiguous", lambda: (2, 3, 10, False)),
        Case("rank 0 of 2, eleven tokens, zigzag", lambda: (0, 2, 11, True)),
        Case("rank 1 of 4, 32 tokens, zigzag", lambda: (1, 4, 32, True)),
        Case("rank 3 of 4, 26 tokens, zigzag", lambda: (3, 4, 26, True)),
    ),
)  # fmt: skip


# -- context_parallel --


def selected_attention(*arguments: object) -> Tensor:
    """Chapter 05's, whose exercises import Triton: so it is looked up when it is called."""
    return import_module("nsa_tutorial.course.exercises.selected_attention").selected_attention(
        *arguments
    )


def window_attention(*arguments: object) -> Tensor:
    """Chapter 05's, too."""
    return import_module("nsa_tutorial.course.exercises.selected_attention").window_attention(
        *arguments
    )


def context_parallel(
    rank: Rank, q: Tensor, far: tuple, near: tuple, block_indices: Tensor, block_size: int,
    window_size: int,
) -> Tensor:  # fmt: skip
    """o [n, HQ, DV] of this rank's tokens: attention to their lists, plus that to their windows."""
    seen = rank.number + 1  # this rank and those before it
    k, v = (torch.cat(rank.gather(x)[:seen]) for x in far)
    o = selected_attention(q, k, v, block_indices, block_size)
    begin = len(q) - (window_size - 1)
    k, v = (torch.cat([rank.to_next(x[begin:]), x]) for x in near)
    return o + window_attention(q, k, v, window_size)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _lists(M: int, H: int, slots: int, block_size: int, seed: int) -> Tensor:
    """Random ascending lists of the past, `[M, H, slots]`, -1 in empty slots."""
    g, found = torch.Generator().manual_seed(seed), torch.full((M, H, slots), -1)
    for t in range(M):
        for h in range(H):
            some = torch.randperm(t // block_size + 1, generator=g)[:slots].sort().values
            found[t, h, : len(some)] = some
    return found


@functools.cache
def text_of(lengths: tuple[int, ...], H: int, slots: int, block_size: int) -> tuple:
    """A whole text: queries, far keys and values, near ones, and lists; two queries a group."""
    M = sum(lengths)
    q = _random(M, 2 * H, 3, seed=M)
    k, v, k_near, v_near = (_random(M, H, 3, seed=M + i) for i in range(1, 5))
    lists = _lists(M, H, slots, block_size, M) if slots else torch.full((M, H, 1), -1)
    return q, k, v, k_near, v_near, lists


def _forward(
    function: Callable, lengths: tuple[int, ...], window_size: int, slots: int, H: int,
    block_size: int, counts: bool,
) -> object:  # fmt: skip
    """The output of all ranks, `[M, HQ, DV]`; where it is asked for, with the bytes that each
    sent."""
    split = [x.split(lengths) for x in text_of(lengths, H, slots, block_size)]
    sent = [0] * len(lengths)

    def one(rank: Rank) -> object:
        q, k, v, k_near, v_near, lists = (x[rank.number].clone() for x in split)
        o = function(rank, q, (k, v), (k_near, v_near), lists, block_size, window_size)
        sent[rank.number] = rank.sent
        return o

    return _joined(on_ranks(len(lengths), one, around=lambda: forbidding(_FORBIDDEN)), sent, counts)


def _joined(shares: list, sent: list[int], counts: bool) -> object:
    if any(x is None for x in shares):
        return None
    try:
        o = torch.cat(shares)
    except (RuntimeError, TypeError):
        o = shares  # as it is: shapes that do not fit are told
    return (o, sent) if counts else o


def _case(
    name: str, *lengths: int, window: int = 1, slots: int = 2, H: int = 1, block_size: int = 2,
    counts: bool = False,
) -> Case:  # fmt: skip
    return Case(name, lambda: (lengths, window, slots, H, block_size, counts))


_FORWARD = TEXTS.exercise(
    "context_parallel", minutes=20, difficulty=3, solution=context_parallel, run=_forward,
    tolerance=1e-9, returns=("o", "bytes sent"), forbidden=_FORBIDDEN,
    stages=(
        Stage("one rank", (
            _case("one rank, six tokens, a window of 3", 6, window=3),
            _case("one rank, nine tokens, two KV heads", 9, window=4, H=2),
        )),
        Stage("the halo", (
            _case("two ranks, a window of 3, empty lists", 4, 4, window=3, slots=0),
            _case("three ranks, a window of 4, empty lists", 4, 4, 4, window=4, slots=0, H=2),
        )),
        Stage("the far keys", (
            _case("two ranks, lists, a window of the own token", 4, 4),
            _case("three ranks, lists, a window of the own token", 4, 4, 4, H=2),
        )),
        Stage("every rank", (
            _case("four ranks, both branches", 4, 4, 4, 4, window=3),
            _case("four ranks, lists of three, two KV heads", 6, 6, 6, 6, window=5, slots=3, H=2,
                  block_size=3),
        )),
        Stage("unequal shares", (
            _case("the last rank has fewer tokens", 5, 5, 3, window=3),
            _case("the last rank has less than a halo", 6, 6, 1, window=4),
            _case("the first rank has more", 7, 4, window=3, H=2),
        )),
        Stage("no byte too many", (
            _case("three ranks, a window of 3, bytes counted", 6, 6, 6, window=3, counts=True),
            _case("three ranks, a window of the own token, bytes counted", 6, 6, 6, counts=True),
        )),
    ),
    misconceptions=diffs(context_parallel, [
        ("rank.to_next(x[begin:])", "rank.to_previous(x[begin:])", "a halo from the wrong side",
         "A window looks back. Which rank holds the tokens before yours, and which way do they "
         "travel?"),
        ("[rank.to_next(x[begin:]), x]", "[x, rank.to_next(x[begin:])]",
         "a halo behind the own keys",
         "The halo stands before your tokens in the text. In which order do you join the two?"),
        ("begin = len(q) - (window_size - 1)", "begin = len(q) - (window_size - 2)",
         "a halo that is one token short",
         "The first query of a share sees itself and `window_size - 1` tokens before it. How many "
         "of them lie on the rank before?"),
        ("torch.cat([rank.to_next(x[begin:]), x])", "x", "a window that ends at the rank's border",
         "The first query of rank 1 sees the last tokens of rank 0. How do they get there?"),
        ("begin = len(q) - (window_size - 1)", "begin = len(q) - window_size",
         "a halo that is one token too long",
         "The output is right, but a token travels that nobody sees. The first query's window has "
         "its own token and how many before it?"),
        ("rank.to_next(x[begin:])", "rank.to_next(x[: window_size - 1])",
         "the first tokens sent as the halo",
         "The next rank needs the tokens that lie just before its own. Are these your first or "
         "your last ones?"),
        ("for x in near", "for x in far", "a window over the keys of the lists",
         "The window has keys and values of its own. Which pair holds them?"),
        ("torch.cat(rank.gather(x)[:seen])", "x", "lists that look at this rank's keys alone",
         "A list counts blocks from the beginning of the text. Who holds block 0?"),
        ("torch.cat(rank.gather(x)[:seen])", "torch.cat(rank.gather(x))",
         "keys that go on after this rank's tokens",
         "`selected_attention` takes its queries for the *last* of the keys' tokens. With the keys "
         "of later ranks behind them, at which positions do your queries stand?"),
        ("seen = rank.number + 1", "seen = rank.number", "keys that end before this rank's tokens",
         "A query sees its own token, too. Which shares belong to its keys?"),
        ("torch.cat(rank.gather(x)[:seen])", "torch.cat(rank.gather(x)[:seen][::-1])",
         "shares in the wrong order",
         "A block's number is its place in the text. Is the first share the first of your keys?"),
        ("begin = len(q) - (window_size - 1)", "begin = 0", "a whole share sent as the halo",
         "The output is right, but more bytes travel than needed. How many tokens before its own "
         "can a query of the next rank see?"),
        ("rank.to_next(x[begin:])", "rank.to_next(x[-(window_size - 1) :])",
         "a whole share sent for a window of one token",
         "With a window of 1 no halo is needed. What is `x[-0:]`?"),
        ("torch.cat([rank.to_next(x[begin:]), x])", "torch.cat(rank.gather(x)[:seen])",
         "a window whose keys are gathered from everywhere",
         "The output is right, but a window needs few tokens. From which rank do they come?"),
        ("return o + window_attention", "return window_attention", "an output without the lists",
         "The output is the sum of both branches. Which one is missing?"),
        ("return o + window_attention", "return 0 * o + window_attention",
         "an output without the lists"),
    ]),
)  # fmt: skip


# -- gradients_home --


def gradients_home(
    rank: Rank, d_far: Tensor, d_near: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of the keys that this rank holds, far and near, each [n, H, D]."""
    later = sum(lengths) - len(d_far)
    whole = F.pad(d_far, (0, 0, 0, 0, 0, later))  # what comes later got no gradient here
    far = rank.reduce_scatter(whole.split(lengths))
    halo = len(d_near) - lengths[rank.number]
    near = d_near[halo:].clone()
    back = rank.to_previous(d_near[:halo])
    near[len(near) - len(back) :] += back
    return far, near


def _backward(
    function: Callable, lengths: tuple[int, ...], window_size: int, H: int, counts: bool
) -> object:
    """The gradients of all ranks' keys, far and near; where asked for, with the bytes sent."""
    sent = [0] * len(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()

    def one(rank: Rank) -> object:
        r, n = rank.number, lengths[rank.number]
        halo = window_size - 1 if r else 0
        d_far = _random(ends[r], H, 3, seed=10 * sum(lengths) + r)
        d_near = _random(halo + n, H, 3, seed=20 * sum(lengths) + r)
        found = function(rank, d_far, d_near, list(lengths))
        sent[r] = rank.sent
        return found

    found = on_ranks(len(lengths), one, around=lambda: forbidding(_FORBIDDEN))
    if any(x is None for x in found):
        return None
    try:
        rows = [[len(x) for x in pair] for pair in found]
        far, near = (torch.cat(shares) for shares in zip(*found, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return found
    if rows != [[n, n] for n in lengths]:  # tokens on the wrong rank
        return (*map(_rows_of, zip(*found, strict=True)),)
    return (far, near, sent) if counts else (far, near)


def _rows_of(shares: Sequence[Tensor]) -> Tensor:
    """How many rows each rank has: no gradient, and told as a shape that does not fit."""
    return torch.tensor([[[float(len(x))]] for x in shares]).double()


def _back(name: str, *lengths: int, window: int = 1, H: int = 1, counts: bool = False) -> Case:
    return Case(name, lambda: (lengths, window, H, counts))


_GRADIENTS = TEXTS.exercise(
    "gradients_home", minutes=14, difficulty=3, solution=gradients_home, run=_backward,
    tolerance=1e-9, returns=("far", "near", "bytes sent"), forbidden=_FORBIDDEN,
    stages=(
        Stage("one rank", (
            _back("one rank, three tokens", 3),
        )),
        Stage("far keys", (
            _back("two ranks, no halo", 2, 2),
            _back("three ranks, no halo, two KV heads", 3, 3, 3, H=2),
        )),
        Stage("the halo goes home", (
            _back("two ranks, a window of 2", 2, 2, window=2),
            _back("three ranks, a window of 3", 4, 4, 4, window=3, H=2),
        )),
        Stage("unequal shares", (
            _back("the last rank has fewer tokens", 5, 5, 3, window=3),
            _back("the last rank has less than a halo", 6, 6, 1, window=4),
            _back("the second rank has most", 2, 5, 3, window=2),
        )),
        Stage("no byte too many", (
            _back("three ranks, bytes counted", 4, 4, 4, window=3, counts=True),
        )),
    ),
    misconceptions=diffs(gradients_home, [
        ("    return far, near", "    return far / rank.ranks, near",
         "a mean in place of a sum",
         "A key was read on several ranks, and its gradient is the sum of what each found. Why "
         "divide?"),
        ("    return far, near", "    return far + d_far[-lengths[rank.number] :], near",
         "the own gradient counted twice",
         "`reduce_scatter` adds up what all ranks bring, and you are one of them. What do you add "
         "once more?"),
        ("rank.reduce_scatter(whole.split(lengths))", "d_far[-lengths[rank.number] :]",
         "gradients of other ranks thrown away",
         "Later ranks read your keys, too. Where do the gradients go that they found for them?"),
        ("(0, 0, 0, 0, 0, later)", "(0, 0, 0, 0, later, 0)",
         "gradients that stand at the end of the text",
         "`d_far` begins with token 0. On which side of it are the tokens that this rank did not "
         "see?"),
        ("whole.split(lengths)", "whole.chunk(rank.ranks)", "shares taken for equal ones",
         "Ranks may hold different numbers of tokens. Which argument tells them?"),
        ("whole.split(lengths)", "whole.split(lengths)[::-1]", "parts in the wrong order",
         "The first part goes to rank 0. Which tokens does rank 0 hold?"),
        ("    near[len(near) - len(back) :] += back\n", "", "a halo's gradient thrown away",
         "The next rank found a gradient for your last tokens. What becomes of it?"),
        ("near[len(near) - len(back) :] += back", "near[len(near) - len(back) :] = back",
         "a halo's gradient in place of the own one",
         "The last tokens were read on two ranks. How do two gradients of one key come together?"),
        ("near[len(near) - len(back) :] += back", "near[: len(back)] += back",
         "a halo's gradient added to the first tokens",
         "You sent your last tokens as the halo. Whose gradient comes back?"),
        ("rank.to_previous(d_near[:halo])", "rank.to_next(d_near[:halo])",
         "a halo's gradient sent on instead of back",
         "The halo came from the rank before. Where does its gradient belong?"),
        ("near = d_near[halo:].clone()", "near = d_near[: lengths[rank.number]].clone()",
         "the halo's rows taken for the own ones",
         "In `d_near` the halo stands first. Where do your own tokens begin?"),
        ("rank.to_previous(d_near[:halo])", "rank.to_previous(d_near[:halo]) / 2",
         "a mean in place of a sum"),
        ("rank.reduce_scatter(whole.split(lengths))",
         "sum(rank.gather(whole)).split(lengths)[rank.number]",
         "everything gathered to be added up",
         "The sum is right, but each rank gets the gradients of all keys, and needs those of its "
         "own. Which journey adds on the way?"),
    ]),
)  # fmt: skip


EXERCISES = (_POSITIONS, _FORWARD, _GRADIENTS)


# -- two mistakes at once --

DOUBLES = (
    Double("positions_of", names=(
        "pieces that are rounded down", "two pieces at the same distance on each rank")),
    Double("context_parallel", names=(
        "a halo from the wrong side", "a halo that is one token short")),
    Double("gradients_home", names=(
        "a mean in place of a sum", "gradients that stand at the end of the text")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    queries_travel={"unit": "times"},
    idle_triangle={"unit": "%", "tolerance": 0.08},
)
