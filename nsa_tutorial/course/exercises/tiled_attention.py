"""Exercises of chapter 04: the whole walk, from an empty body; then, for readers with more time,
which tiles to skip, the ragged tail, and a small kernel with two bugs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import CodeType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Double, Misconception, Stage
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- tiled_attention --


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of one head: o [N, DV] and lse [N], one tile of scores at a time."""
    (N, D), M = q.shape, len(k)
    outputs, lses = [], []  # a part for each tile of queries
    for position in torch.arange(M - N, M).split(tile_q):  # [BQ], of this tile's queries
        q_tile = D**-0.5 * q[position - (M - N)]  # [BQ, D]
        scores_max = torch.full((len(position),), -torch.inf)  # [BQ], before the first key
        running_sum = torch.zeros(len(position))  # [BQ]
        acc_o = torch.zeros(len(position), v.shape[1])  # [BQ, DV]
        for key_position in torch.arange(M).split(tile_k):  # [BK], of this tile's keys
            if key_position[0] > position[-1]:
                break  # no query of this tile sees a key from here on
            acc_s = q_tile @ k[key_position].T  # [BQ, BK]
            acc_s = acc_s.masked_fill(key_position > position[:, None], -torch.inf)
            before, scores_max = scores_max, torch.maximum(scores_max, acc_s.amax(1))
            scores_scale = torch.exp(before - scores_max)  # [BQ], old units into new ones
            p = torch.exp(acc_s - scores_max[:, None])  # [BQ, BK]
            running_sum = running_sum * scores_scale + p.sum(1)
            acc_o = acc_o * scores_scale[:, None] + p @ v[key_position]
        outputs.append(acc_o / running_sum[:, None])
        lses.append(scores_max + torch.log(running_sum))
    return torch.cat(outputs), torch.cat(lses)


class _Held(TorchDispatchMode):
    """Measures the tensors that an attempt makes and that hold at least a tile of numbers: the
    shape of the largest, and how many numbers they hold together at any moment."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile, self.shape, self.largest, self.most = tile, [0], 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a first check need not wait seconds until torch._dynamo is imported

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x)
        return result

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        numbers = storage.nbytes() // x.element_size()
        if numbers < self.tile:
            return
        if numbers > self.largest:
            self.largest, self.shape = numbers, list(x.shape)
        self._alive = {n: pair for n, pair in self._alive.items() if not pair[0].expired()}
        self._alive[storage.data_ptr()] = (StorageWeakRef(storage), numbers)
        self.most = max(self.most, sum(numbers for _, numbers in self._alive.values()))


_A_TILE = "a tile, never more"
_TILES = 12  # scores, scaled, masked, their mask, powers: a few tiles for one


def _run_tiled(
    solution: Callable, q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int,
    asks_lse: bool = False,
) -> object:  # fmt: skip
    """The output, how many scores existed at once, and `lse` where it is asked for.

    Where an input is as large as a tile, what is a table of scores cannot be told.
    """
    given, tile = [x.clone() for x in (q, k, v)], tile_q * tile_k
    is_watched = max(x.numel() for x in given) < tile < len(q) * len(k)
    held = _Held(tile)
    with held if is_watched else nullcontext():
        result = solution(q, k, v, tile_q, tile_k)
    expect_unchanged((q, k, v), given)
    if result is None:
        return None
    o, *others = result if isinstance(result, tuple | list) else (result,)
    said = _A_TILE
    if is_watched:
        if held.largest >= 2 * tile:
            said = f"{' × '.join(map(str, held.shape))} in one tensor"
        elif held.most > _TILES * tile:
            said = "many tiles, each in a tensor of its own"
    if not asks_lse:
        return o, said
    if len(others) != 1:
        raise TypeError("two tensors are asked for: return o, lse")
    return o, said, others[0]


def _whole_table(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple:
    s = q.shape[1] ** -0.5 * q @ k.T
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    s = s.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(s, 1)
    return torch.exp(s - lse[:, None]) @ v, lse


def _row_of_tiles(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple:
    return tiled_attention(q, k, v, tile_q, len(k))


def _column_of_tiles(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple:
    return tiled_attention(q, k, v, len(q), tile_k)


def _first_tile(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple:
    s = q.shape[1] ** -0.5 * q[:tile_q] @ k[:tile_k].T
    lse = torch.logsumexp(s, 1)
    return torch.exp(s - lse[:, None]) @ v[:tile_k], lse


def _all_kept(q: Tensor, k: Tensor, v: Tensor, tile_q: int, tile_k: int) -> tuple:
    """The tiles of scores of a row are kept until its maximum is known."""
    results, M, scale = [], len(k), q.shape[1] ** -0.5
    for position in torch.arange(M - len(q), M).split(tile_q):
        q_tile = scale * q[position - (M - len(q))]
        keys = [x for x in torch.arange(M).split(tile_k) if x[0] <= position[-1]]
        tiles = [(q_tile @ k[x].T).masked_fill(x > position[:, None], -torch.inf) for x in keys]
        largest = functools.reduce(torch.maximum, [s.amax(1) for s in tiles])
        powers = [torch.exp(s - largest[:, None]) for s in tiles]
        total = sum(p.sum(1) for p in powers)
        o = sum(p @ v[x] for p, x in zip(powers, keys, strict=True)) / total[:, None]
        results.append((o, largest + torch.log(total)))
    o, lse = zip(*results, strict=True)
    return torch.cat(o), torch.cat(lse)


def _unmasked(
    N: int, rise: float, tile_q: int, tile_k: int, *, DV: int = 2, seed: int = 0, steep: float = 8.0
) -> tuple:
    """Tokens whose later keys score so low that a mask changes nothing: from key to key, scores
    rise by `rise`, and fall steeply after a query's own position. The largest are above 20, so a
    finite mask changes nothing either."""
    i = torch.arange(float(N))
    steepness = 48 / steep + abs(rise) / 4
    k = torch.stack((-(steep**i), 32 + steepness + rise * i), 1)
    q = torch.stack((steepness * steep**-i, torch.ones(N)), 1)
    return q, k, _random(N, DV, seed=seed), tile_q, tile_k


def _long() -> tuple:
    """48 tokens two numbers wide, so that no input is as large as a tile."""
    return _unmasked(48, 0.1, 24, 6, seed=20, steep=4.0)


def _alike() -> tuple:
    q, k, *_ = _unmasked(2, 2, 2, 2)
    return q, k, torch.ones(2, 3), 2, 2


def _drawn(N: int, M: int, tile_q: int, tile_k: int, seed: int, D: int = 4, DV: int = 3) -> tuple:
    sizes = ((N, D), (M, D), (M, DV))
    return (*(_random(*x, seed=seed + i) for i, x in enumerate(sizes)), tile_q, tile_k)


def _steep(direction: int) -> tuple:
    k = direction * 100 * torch.arange(7.0)[:, None]
    return torch.ones(7, 1), k, _random(7, 2, seed=9), 3, 2


def _far_below_zero(N: int, tile_q: int, tile_k: int) -> tuple:
    """Scores from -4e36 on that rise by 1e36 from key to key, so each query takes its own value."""
    k = 1e36 * torch.arange(-4.0, 0)[:N, None]
    return torch.ones(N, 1), k, torch.tensor([1.0, 2.0, 6.0, 7.0])[:N, None], tile_q, tile_k


_MASKED = ".masked_fill(key_position > position[:, None], -torch.inf)"
_POWERS = "torch.exp(acc_s - scores_max[:, None])"
_STOP = "key_position[0] > position[-1]"
_HIDDEN = "key_position > position[:, None]"
_FINITE = "a finite mask, where -inf is meant"
_BY_NUMBER = "comparing the numbers of tiles, not positions"
_NO_LAST_AXIS = "a `[BQ]` tensor used where `[BQ, 1]` is needed"
_NO_OFFSET = "a stop that forgets `M - N`"
_RETURN = "`return` where only the walk along the keys should stop"
_ONE_STATE = "one state for all tiles of queries"
_LAST_KEY = "skipping a tile by its last key"
_NO_NUMBER = "no numbers left after the first tile"
_UNSHIFTED = "powers of scores without their maximum taken off"
_NO_RESCALE = "sums that are not rescaled when the maximum grows"
_LOSES = "a walk that loses the earlier tiles of keys"
_DIVIDES = "a division inside the step"
_EXP2 = "`exp2` without log2(e) in the scale"


def _with_and_without_a_stop(known: tuple[Misconception, ...]) -> tuple[Misconception, ...]:
    """Mistakes in the mask are told, too, where the walk does not stop early yet."""
    masks = (m for m in known if any(piece in _MASKED for piece in getattr(m.wrong, "edits", ())))
    unstopped = (
        replace(m, wrong=Edited(tiled_attention, m.wrong.edits | {_STOP: "False"}, pairs=False))
        for m in masks
    )
    return (*known, *unstopped)


_BUILD = TEXTS.exercise(
    "tiled_attention",
    minutes=28, difficulty=3, solution=tiled_attention,
    run=_run_tiled,
    returns=("o", "scores at once", "lse"),
    forbidden=(
        ("torch.softmax", "PyTorch's softmax"),
        ("torch.log_softmax", "PyTorch's softmax"),
        ("torch.scaled_dot_product_attention", "PyTorch's attention"),
        ("nsa_tutorial", "the course's own function"),
    ),
    stages=(
        Stage("shapes", (
            Case("one token, a key of width 2, a value of width 3", lambda: (
                torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]),
                torch.tensor([[1.0, 2.0, 4.0]]), 1, 1)),
            Case("two tokens with the same value of width 3, tiles of 2 × 2", _alike),
        )),
        Stage("one tile", (
            Case("three tokens in a tile of 3 × 3; no mask is needed, as later keys score far "
                 "below", lambda: _unmasked(3, 2, 3, 3)),
            Case("three tokens, scores that rise by the hundred",
                 lambda: _unmasked(3, 150, 3, 3, seed=1)),
        )),
        Stage("many tiles", (
            Case("four tokens, tiles of 2 × 2, no mask needed", lambda: _unmasked(4, 2, 2, 2)),
            Case("nine tokens, tiles of 3 × 3, scores that rise",
                 lambda: _unmasked(9, 3, 3, 3, seed=3)),
            Case("nine tokens, tiles of 3 × 3, scores that fall",
                 lambda: _unmasked(9, -40, 3, 3, seed=4)),
            Case("48 tokens, tiles of 24 × 6, while somebody watches how many scores exist",
                 _long),
        )),
        Stage("ragged tails", (
            Case("seven tokens, tiles of 3 × 2", lambda: _unmasked(7, 2, 3, 2, seed=5)),
            Case("five tokens, tiles of 2 × 3", lambda: _unmasked(5, 2, 2, 3, seed=6)),
            Case("three tokens, tiles of 64 × 64", lambda: _unmasked(3, 2, 64, 64, seed=7)),
        )),
        Stage("causal mask", (
            Case("three tokens with scores -4e36, -3e36, -2e36, one tile",
                 lambda: _far_below_zero(3, 3, 3)),
            Case("four tokens with scores from -4e36 to -1e36, tiles of 2 × 4",
                 lambda: _far_below_zero(4, 2, 4)),
            Case("nine tokens, tiles of 4 × 3", lambda: _drawn(9, 9, 4, 3, seed=30)),
            Case("scores that rise by the hundred", lambda: _steep(1)),
        )),
        # the first tile of queries is finite only if the second tile of values is left alone
        Stage("skipped tiles", (
            Case("4 tokens, tiles of 2 × 2, the values of tokens 2 and 3 are NaN", lambda: (
                torch.ones(4, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
                torch.tensor([[1.0], [2.0], [torch.nan], [torch.nan]]), 2, 2)),
        )),
        Stage("fewer queries than keys", (
            Case("the last 2 of 4 positions, tiles of 2 × 2", lambda: _drawn(2, 4, 2, 2, seed=40)),
            Case("the last 5 of 12 positions, tiles of 2 × 5",
                 lambda: _drawn(5, 12, 2, 5, seed=43)),
            Case("one query, 9 keys: decoding", lambda: _drawn(1, 9, 4, 4, seed=46)),
        )),
        Stage("lse", (
            Case("three tokens, one number wide, tiles of 2 × 2", lambda: (
                torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[0.0], [1.0], [-1.0]]),
                torch.tensor([[1.0], [2.0], [4.0]]), 2, 2, True)),
            Case("the last 5 of 12 positions, `lse` too",
                 lambda: (*_drawn(5, 12, 2, 5, seed=50), True)),
            Case("scores that fall by the hundred, `lse` too", lambda: (*_steep(-1), True)),
        )),
    ),
    # stages part two mistakes, and pairs would take a reader ten seconds
    misconceptions=_with_and_without_a_stop(diffs(tiled_attention, [
        (_MASKED, "", "tiles on the diagonal left unmasked",
         "In a tile on the diagonal, which queries have to be kept from which keys? (If you do "
         "call `masked_fill`: it changes nothing in place. Where does its result go?)"),
        (_first_tile, "a single tile, and no loop yet",
         "The first tile is right. One loop takes the next tiles of keys into the state, and one "
         "goes over the tiles of queries. Which of them is the outer one?"),
        (_whole_table, "the table of all scores at once",
         "48 queries and 48 keys met in one product, or in one mask. With 65,536 tokens that is "
         "16 GiB. Over what do the two loops go?"),
        (_row_of_tiles, "all keys at once, for a tile of queries",
         "You cut the queries into tiles, but each tile meets all its keys in one product. What "
         "does the state let you forget?"),
        (_column_of_tiles, "all queries at once, for a tile of keys",
         "You cut the keys into tiles, but all queries meet each tile of them in one product. "
         "Which of the two loops is missing?"),
        (_all_kept, "all tiles of a row kept, until the maximum is known",
         "Each tile is small, but you keep them all, and together they are rows of the table. "
         "What lets chapter 03 use a maximum that may still grow?"),
        *((_MASKED, _MASKED.replace("-torch.inf", fill), _FINITE,
         "Somewhere every visible score is far below your number, and the hidden keys get all "
         "the weight: chapter 01's model reads the future this way. Which score can no other be "
         "below?") for fill in ("-1e9", "-1e4", "-1e30", "-100", "-50", "-20", "-10", "-1e10",
                                "-1e8", "-1e6", "-1e5", "-1000", "-30", "-5")),
        *((_MASKED, f" - {much} * ({_HIDDEN})", _FINITE,
           "A hidden score that stands far above the visible ones stays above them when a finite "
           "number is taken off. Which score can no other be below?")
          for much in ("1e9", "1e4", "1e30")),
        (_MASKED, _MASKED.replace("-torch.inf", "0.0"), "writing zeros where -inf is meant",
         "A hidden score of 0 still gets a weight. Which score gets none?"),
        ({_MASKED: "", _POWERS: f"{_POWERS}.masked_fill(key_position > position[:, None], 0)"},
         "hidden scores that count for the maximum",
         "You hide keys after the powers are taken. If a hidden score is the largest, every "
         "visible power can come out as 0. When must a key be hidden, so that the maximum does "
         "not see it?"),
        *(({f"{name}[:, None]": name for name in names}, _NO_LAST_AXIS,
           "PyTorch lines up last axes, so a `[BQ]` meets the columns of a tile, and not its rows. "
           "How do you give a `[BQ]` a last axis of 1?") for names in (
            ("scores_max",), ("scores_scale",), ("running_sum",), ("scores_max", "scores_scale"),
            ("scores_max", "running_sum"), ("scores_scale", "running_sum"),
            ("scores_max", "scores_scale", "running_sum"))),
        ({_MASKED: "",
         "k[key_position].T": "k[key_position].masked_fill(key_position > position[:, None], "
                              "-torch.inf).T"}, "masking the keys, not the scores",
         "A key is hidden from some queries and seen by others, so it cannot be hidden by itself. "
         "Which tensor has a place for each pair of a query and a key?"),
        ({_MASKED: "",
         "k[key_position].T": "k[key_position].masked_fill((key_position > position[:, None])"
                              ".any(0)[:, None], -torch.inf).T"},
         "masking the keys, not the scores"),
        (_STOP, "key_position[0] > position[0]",
         "skipping tiles that only the first query of the tile does not see",
         "Some visible keys are missing. Which query of a tile sees the most, and so decides "
         "when the walk along the keys may stop?"),
        (_STOP, "key_position[-1] > position[-1]", _LAST_KEY,
         "A tile on the diagonal may end after the last query, yet its first keys are visible. "
         "Which key of a tile tells you that nobody sees any of it?"),
        (_STOP, "key_position[0] + tile_k - 1 > position[-1]", _LAST_KEY),
        (_STOP, "key_position[0] + tile_k > position[-1]", _NO_NUMBER,
         "Your first tile leaves NaN. Is it skipped, because only its first key was to decide? Or "
         "is the factor upside down, exp(new maximum - old one)? The old one is -inf at first, "
         "which makes that factor infinite, and infinity times 0 is NaN."),
        ("(before - scores_max)", "(scores_max - before)", _NO_NUMBER),
        (_STOP, "key_position[-1] > position[0]", "stopping at the first tile that is not full",
         "A tile on the diagonal is not full, but some of its pairs are visible. Which query of "
         "the tile sees the most? And which key of a tile do queries see first?"),
        (_STOP, "key_position > position", "stopping by a comparison of all positions",
         "`if` needs one yes or no, and you compare two vectors. One query decides, and one key. "
         "Which ones?"),
        (_STOP, "key_position[0] // tile_k > position[0] // tile_q", _BY_NUMBER,
         "Tile 2 of the queries and tile 2 of the keys begin at the same position only where "
         "`tile_q` equals `tile_k`. At which positions do they begin here?"),
        (_MASKED, _MASKED.replace(_HIDDEN, f"({_HIDDEN}) & "
         "(key_position[0] // tile_k == (position[0] - M + N) // tile_q)"), _BY_NUMBER),
        (_MASKED, _MASKED.replace(_HIDDEN, f"({_HIDDEN}) & (key_position[0] == position[0])"),
         "masking only where a tile of keys begins at the tile's first query",
         "The diagonal also runs through tiles that begin elsewhere. Which pairs of a tile must be "
         "hidden, wherever it begins? (A mask may be laid over every tile.)"),
        (_MASKED, _MASKED.replace(_HIDDEN, f"({_HIDDEN}) & "
         "(key_position[0] + tile_k > position[-1])"), "masking only the last tile of a walk",
         "The diagonal may run through two tiles of keys, or through more. Is the last one alone "
         "cut by it here? (A mask may be laid over every tile.)"),
        (_STOP, "key_position[0] > position[-1] - (M - N)", _NO_OFFSET,
         "Your mask knows where the queries stand, but your walk along the keys ends as if query 0 "
         "stood at position 0. At which position does the last query of a tile stand?"),
        (_STOP, "key_position[0] >= position[0] - (M - N) + tile_q", _NO_OFFSET),
        (_STOP, "key_position[0] >= position[-1]",
         "skipping a tile whose first key is the last query's own position",
         "One visible pair is enough to keep a tile. Does a query see its own position?"),
        (_STOP, "False", "computing tiles of which nothing is visible",
         "Here the later values are NaN, and 0 · NaN is NaN: a mask only hides what was "
         "computed. After which position need no tile of keys be loaded?"),
        ("break", "return torch.cat(outputs), torch.cat(lses)", _RETURN,
         "`return` leaves the whole function, so all later tiles of queries are missing. Which "
         "word leaves one loop?"),
        ("break", "return acc_o / running_sum[:, None], scores_max + torch.log(running_sum)",
         _RETURN),
        ("break", "return torch.zeros(N, v.shape[1]), torch.zeros(N)", _RETURN),
        ({"torch.arange(M - N, M)": "torch.arange(N)", "q[position - (M - N)]": "q[position]"},
         "taking the queries for the first N positions",
         "They are the last `N` of the `M`. At which position does query 0 stand?"),
        ("key_position > position[:, None]",
         "torch.arange(len(key_position)) > torch.arange(len(position))[:, None]",
         "a triangle within the tile, wherever the tile lies",
         "`tril` and `triu` compare row and column inside the tile. At which positions in the "
         "whole text do the first query and the first key of the tile stand?"),
        ("key_position > position[:, None]", "key_position > position",
         "comparing each key with only one query",
         "You compare two vectors place by place. The mask is a table `[BQ, BK]`: which of the "
         "two must be a column? To stop, one position of each is enough."),
        ("key_position > position[:, None]", "key_position[:, None] > position",
         "hiding the past and leaving the future",
         "`masked_fill` fills where its mask is True. Which pairs does your mask name, and has it "
         "a row for each query, as `acc_s` has?"),
        ("fill(key_position", "fill(torch.arange(len(key_position))",
         "counting a tile's keys from 0",
         "Your mask compares a column with a position. Which key is column 0 of the tile?"),
        ("> position[:, None]", ">= position[:, None]", "hiding a query's own position from it",
         "A query sees the keys at its own position and before. Does your comparison allow "
         "equality?"),
        ("> position[:, None]", "<= position[:, None]", "hiding the past and leaving the future"),
        ("> position[:, None]", "< position[:, None]", "hiding the past and leaving the future"),
        ({"torch.full((len(position),), -torch.inf)": "state[0][: len(position)]",
         "torch.zeros(len(position))": "state[1][: len(position)]",
         "torch.zeros(len(position), v.shape[1])": "state[2][: len(position)]",
         "outputs, lses = [], []": "outputs, lses = [], []\n    state = torch.full((tile_q,), "
         "-torch.inf), torch.zeros(tile_q), torch.zeros(tile_q, v.shape[1])",
         "outputs.append(": "state = scores_max, running_sum, acc_o\n        outputs.append("},
         _ONE_STATE,
         "Your later rows remember what other queries saw. When does a tile of queries need an "
         "empty state?"),
        ({"torch.full((len(position),)": "torch.full((tile_q,)",
         "torch.zeros(len(position))": "torch.zeros(tile_q)",
         "torch.zeros(len(position), v": "torch.zeros(tile_q, v"},
         "a state of `tile_q` rows for a tile that holds fewer",
         "The last tile of queries may hold fewer rows. How many rows has its state, and how "
         "many have its scores?"),
        ("fill(key_position", "fill(key_position[0] + torch.arange(tile_k)",
         "`tile_k` key positions for a tile that holds fewer",
         "The last tile of keys may hold fewer than `tile_k`. How many columns has `acc_s` "
         "there, and how many has your mask?"),
        ({"before, scores_max = scores_max,": "before = torch.full_like(scores_max, -torch.inf)\n"
         "            scores_max =", "torch.maximum(scores_max, acc_s.amax(1))": "acc_s.amax(1)"},
         _LOSES,
         "Only the last tile of keys counts. Does your state start in the inner loop? Or is the "
         "new maximum never stored, so the old one stays -inf and each factor is 0? (That is a "
         "forgotten `m = m2`.)"),
        ({"before, scores_max = scores_max, torch.maximum(scores_max,":
          "largest = torch.maximum(scores_max,", "(before - scores_max)": "(scores_max - largest)",
          "(acc_s - scores_max[": "(acc_s - largest["}, _LOSES),
        ("torch.maximum(scores_max, acc_s.amax(1))", "acc_s.amax(1)",
         "a tile's own maximum in place of the running one",
         "On paper it comes out even, but the factor can now exceed 1. It overflows when a tile "
         "lies far enough below what came before. Which maximum can never fall?"),
        ("p.sum(1)", "p.sum()", "one sum for all rows",
         "Each row has a sum of its own. Along which axis do the powers of one row lie?"),
        ("acc_s.amax(1)", "acc_s.max()", "one maximum for all rows",
         "Each row has a maximum of its own. What is left of a row that lies far below another "
         "row's largest score?"),
        (".split(tile_q)", ".split(tile_q)[: max(N // tile_q, 1)]",
         "dropping the last queries where tile_q does not divide N",
         "The last tile may hold fewer rows. How many tiles of 4 do 9 queries need?"),
        (".split(tile_k)", ".split(tile_k)[: max(M // tile_k, 1)]",
         "dropping the last keys where tile_k does not divide M",
         "The last tile may hold fewer keys, and the last queries see them. How far does your "
         "inner loop go?"),
        ("D**-0.5 * ", "", "leaving out the scale",
         "Your dot products count in full. By what does chapter 01 multiply them?"),
        ("D**-0.5 * ", "D**-1 * ", "dividing by D where √D is meant",
         "A sum of D random products is about √D large, not D. Which power belongs there?"),
        ({"torch.maximum(scores_max, acc_s.amax(1))": "scores_max.clamp(min=0)",
         "torch.full((len(position),), -torch.inf)": "torch.zeros(len(position))"},
         _UNSHIFTED,
         "e²⁰⁰ is more than a float holds, so a large score gives infinity, and infinity through "
         "infinity gives NaN. What does chapter 03 take off each score first?"),
        ({"torch.full((len(position),), -torch.inf)": "torch.zeros(len(position))"},
         "a maximum that starts at 0",
         "Where all scores are far below 0, your maximum stays at 0 and every power becomes 0. "
         "What is the largest of no scores?"),
        ({"running_sum * scores_scale": "running_sum", "acc_o * scores_scale[:, None]": "acc_o"},
         _NO_RESCALE,
         "The sums so far were measured from the old maximum. What are they worth when it has "
         "grown?"),
        ("acc_o * scores_scale[:, None]", "acc_o", "an output that is not rescaled",
         "You rescale the sum when the maximum grows, but not the output's numerator. Are they "
         "in the same units?"),
        ("running_sum * scores_scale", "running_sum", "a sum that is not rescaled",
         "You rescale the output's numerator when the maximum grows, but not the sum. Are they in "
         "the same units?"),
        ("+ p @ v[key_position]",
         "+ p @ v[key_position]\n            acc_o = acc_o / running_sum[:, None]", _DIVIDES,
         "`acc_o` is a numerator, and the next tile adds numerators. How often does a row divide, "
         "and after which loop?"),
        ({"+ p @ v[key_position]":
          "+ p @ v[key_position]\n            acc_o = acc_o / running_sum[:, None]",
          "acc_o / running_sum[:, None])": "acc_o)"}, _DIVIDES),
        ({"torch.exp(before": "torch.exp2(before", "torch.exp(acc_s": "torch.exp2(acc_s"}, _EXP2,
         "Your powers are those of 2, and the scale is that of e. By what does chapter 03 "
         "multiply `scale` before it takes `exp2`? (`exp` needs nothing.)"),
        ("torch.exp(before", "torch.exp2(before", _EXP2),
        ("torch.exp(acc_s", "torch.exp2(acc_s", _EXP2),
        ("D**-0.5 * ", "D**-0.5 * 1.4426950408889634 * ", "`exp` of scores in log2 units",
         "Your scores are multiplied by log2(e), which `exp2` needs and `exp` does not. Which of "
         "the two do you take?"),
        ("acc_o / running_sum[:, None]", "acc_o", "numerators that were not divided",
         "`acc_o` is a sum of weighted values. What divides it at the end of a row?"),
        ("return torch.cat(outputs), torch.cat(lses)", "return torch.cat(lses), torch.cat(outputs)",
         "`lse` before `o`", "Both are asked for. In which order?"),
        ("return torch.cat(outputs), torch.cat(lses)", "return torch.cat(outputs)",
         "`o` without its `lse`",
         "The second result is one number a row. What of the last state do you need for it?"),
        ("scores_max + torch.log(running_sum)", "torch.log(running_sum)",
         "the logarithm of the sum without its maximum",
         "Your sum is measured from the row's maximum. What has to come back to it?"),
        ("torch.log(", "torch.log2(", "an lse that adds natural units and log2 units",
         "One of your two terms is a natural logarithm, and the other is in log2 units. "
         "`running_sum` is a plain number, whatever base its powers had. Which logarithm is asked "
         "for?"),
        ("scores_max + torch.log(", "scores_max * D**0.5 + torch.log(",
         "an lse that forgets the scale on the maximum",
         "The lse is that of scaled scores, but the maximum is a plain dot product. What has to "
         "happen to it first?"),
        ("scores_max + torch.log(", "scores_max * D**-0.5 + torch.log(",
         "an lse that scales the maximum twice",
         "Your scores were scaled before their maximum was taken. How often is the scale in it "
         "now?"),
        ("scores_max + torch.log(running_sum)", "scores_max + running_sum",
         "a sum where its logarithm is meant",
         "`lse` is a logarithm of a sum of powers. What stands between `exp` and the sum?"),
        ("scores_max + torch.log(running_sum)",
         "(scores_max + torch.log(running_sum)) * 1.4426950408889634",
         "an lse left in log2 units",
         "Your lse is too large by log2(e), in all of it or in the maximum's part. A natural "
         "logarithm is asked for. Which factor is one too many?"),
        ("scores_max + torch.log(", "scores_max * 1.4426950408889634 + torch.log(",
         "an lse left in log2 units"),
    ], pairs=False)),
)  # fmt: skip


# -- tile_kinds --


def tile_kinds(N: int, M: int, tile_q: int, tile_k: int) -> list[str]:
    """One string per tile of queries, one letter per tile of keys: "F" full, "D" diagonal, "S"
    skipped."""
    rows = []
    for query_start in range(0, N, tile_q):
        first_query = M - N + query_start  # positions, from here on
        last_query = M - N + min(query_start + tile_q, N) - 1
        row = ""
        for first_key in range(0, M, tile_k):
            last_key = min(first_key + tile_k, M) - 1
            if first_key > last_query:
                row += "S"
            elif last_key <= first_query:
                row += "F"
            else:
                row += "D"
        rows.append(row)
    return rows


def _draw_kinds(arguments: tuple, got: list[str], expected: list[str]) -> Picture:
    """The tiles over the visible pairs, wrong letters in red."""
    N, M, tile_q, tile_k = arguments
    figure, axes = new_figure(5.0, 3.0)
    axis, wrong = axes[0, 0], 0
    visible = (torch.arange(M)[None, :] <= torch.arange(M - N, M)[:, None]).float().numpy()
    axis.pcolormesh(range(M + 1), range(N + 1), visible, cmap="Blues", vmin=0, vmax=2.5)
    for i, row in enumerate(got):
        for j, letter in enumerate(row):
            x = (j * tile_k + min((j + 1) * tile_k, M)) / 2
            y = (i * tile_q + min((i + 1) * tile_q, N)) / 2
            right = letter == expected[i][j]
            wrong += not right
            axis.text(
                x, y, letter if right else f"{letter}, not {expected[i][j]}", fontsize=9,
                ha="center", va="center", color=PALETTE["text" if right else "query"],
                weight="normal" if right else "bold",
            )  # fmt: skip
    axis.set_xticks(range(0, M + 1, tile_k))
    axis.set_yticks(range(0, N + 1, tile_q))
    axis.grid(color=PALETTE["faint"], linewidth=1)
    axis.invert_yaxis()
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    are = "is" if wrong == 1 else "are"
    return Picture(
        figure, f"{wrong} of {sum(map(len, got))} tiles {are} of another kind (blue: visible pairs)"
    )


_KINDS = TEXTS.exercise(
    "tile_kinds",
    minutes=9, difficulty=2, solution=tile_kinds,
    picture=_draw_kinds,
    misconceptions=diffs(tile_kinds, [
        ({"first_key > last_query": "first_key // tile_k > query_start // tile_q",
         "last_key <= first_query": "first_key // tile_k < query_start // tile_q"},
         "comparing the numbers of tiles, not positions",
         "Tile 2 of the queries and tile 2 of the keys begin at the same position only where "
         "`tile_q` equals `tile_k` and `N` equals `M`. At which positions do they begin here?"),
        *(({"first_key > last_query": f"first_key // tile_k > {query} // tile_q",
           "last_key <= first_query": f"first_key // tile_k < {query} // tile_q"},
          "comparing the numbers of tiles, not positions")
          for query in ("first_query", "last_query")),
        ({"first_key > last_query": "first_key > first_query",
         "last_key <= first_query": "first_key < first_query"},
         "calling a tile diagonal only where its queries and its keys start together",
         "The diagonal may cross a tile that starts earlier or later. Which of a tile's queries "
         "sees the most, and which the least?"),
        ({'row += "S"': 'row += "F"', 'row += "F"': 'row += "S"'},
         "`S` and `F` in each other's places",
         "You call a tile full of which nothing is visible. Which comparison says that the tile "
         "comes after all of its queries?"),
        ({"first_query = M - N +": "first_query =", "last_query = M - N +": "last_query ="},
         "taking the queries for the first N positions",
         "The queries are the last `N` of the `M` positions, so earlier keys come before query "
         "0. At which position does query 0 stand?"),
        ({"first_query = M - N": "first_query = N - M", "last_query = M - N": "last_query = N - M"},
         "adding `N - M` where the queries stand `M - N` further on",
         "There are more positions than queries, so your shift is below 0. How many positions "
         "come before query 0?"),
        (" last_query:", " first_query:", "skipping what the first query of a tile does not see",
         "The other queries of the tile stand further on and may see more. Which of them decides "
         "that nothing is seen?"),
        (" first_query:", " last_query:",
         "calling a tile full because its last query sees all of it",
         "A full tile gets no mask, so here the earlier queries look into the future. The last "
         "query sees the most. Which one sees the least?"),
        ("first_key >", "last_key >", "skipping a tile by its last key",
         "A tile on the diagonal may end after the last query, yet its first keys are visible. "
         "Which key of a tile tells you that nobody sees any of it?"),
        ("last_key <=", "first_key <=", "calling a tile full by its first key",
         "The first key of a tile is the easiest to see. Which key must a query reach to see all "
         "of them?"),
        ("last_key <=", "first_key <", "calling a tile full by its first key"),
        ("elif", "if", "giving a skipped tile two letters",
         "Your rows have more letters than there are tiles. Do your three branches exclude one "
         "another?"),
        ('row += "F"', 'row += "D"', "masking every tile that is not skipped",
         "The result would be right, but a mask costs time, and most tiles need none. In which "
         "tiles does even the first query see the last key?"),
        ("first_key >", "first_key >=",
         "skipping a tile whose first key is the last query's own position",
         "One visible pair is enough to keep a tile. Does a query see its own position?"),
        (", N) - 1", ", N)", "taking the end of a tile of queries for its last query",
         "You keep tiles that only the next query would see. Which is the last query of a tile "
         "of 2 that begins at 0?"),
        ("<=", "<", "masking a tile whose last key is the first query's own position",
         "You call too many tiles diagonal. Does a query see the key at its own position? Look "
         "at `<` and `<=`."),
        ("min(first_key + tile_k, M) - 1", "first_key + tile_k - 1",
         "measuring the last tile of keys past the end",
         "Where `tile_k` does not divide `M`, the last tile holds fewer keys. Which is the last "
         "key that exists?"),
        ({"range(0, N, tile_q)": "range(0, N // tile_q * tile_q, tile_q)",
         "range(0, M, tile_k)": "range(0, M // tile_k * tile_k, tile_k)"},
         "dropping the tiles at the ends, which hold fewer",
         "Where a size does not divide its length, a shorter tile is left at the end. How many "
         "tiles of 3 do 7 tokens need?"),
        ("return rows", "return [list(row) for row in rows]",
         "a list of letters where a string is asked for",
         'Each row of tiles is one string, such as `"DS"`. How do you join letters into one?'),
        ("return rows", 'return ["".join(column) for column in zip(*rows, strict=True)]',
         "a string for each tile of keys",
         "Your rows and columns have changed places. Over which tiles does the outer loop go, "
         "and over which the inner one?"),
    ]),
    cases=(
        Case("four queries, six keys, tiles of 2 × 2", lambda: (4, 6, 2, 2)),
        Case("N = M = 8, tiles of 2 × 4", lambda: (8, 8, 2, 4)),
        Case("N = M = 8, tiles of 4 × 2", lambda: (8, 8, 4, 2)),
        Case("N = M = 7, tiles of 3 × 3: the last tile holds one query and one key",
             lambda: (7, 7, 3, 3)),
        Case("the last 5 of 13 positions, tiles of 2 × 4", lambda: (5, 13, 2, 4)),
        Case("one query, 9 keys: decoding", lambda: (1, 9, 4, 4)),
        Case("tiles of one query and one key", lambda: (3, 4, 1, 1)),
    ),
)  # fmt: skip


# -- mask_tile --


def mask_tile(
    acc_s: Tensor, query_start: int, key_start: int, N: int, M: int, causal: bool
) -> Tensor:
    """The scores of a tile [BQ, BK], with -inf for every key that is in its query's future or does
    not exist."""
    BQ, BK = acc_s.shape
    position = M - N + query_start + torch.arange(BQ)  # [BQ] of the queries
    key_position = key_start + torch.arange(BK)  # [BK]
    visible = (key_position < M).expand(BQ, BK)
    if causal:
        visible = visible & (key_position <= position[:, None])
    return acc_s.masked_fill(~visible, -torch.inf)


def _padded(BQ: int, BK: int, seed: int, missing: int) -> Tensor:
    """Random scores of a tile whose last keys do not exist: there the score is 0."""
    scores = _random(BQ, BK, seed=seed)
    scores[:, -missing:] = 0
    return scores


_MASK = TEXTS.exercise(
    "mask_tile",
    minutes=5, difficulty=2, solution=mask_tile,
    misconceptions=diffs(mask_tile, [
        ("(key_position < M).expand(BQ, BK)", "torch.ones(BQ, BK, dtype=torch.bool)",
         "leaving the ragged tail in",
         "With `causal` the mask happens to hide the keys past the end, which lie in everyone's "
         "future. Without it they stay. How much does a score of 0 weigh?"),
        ("key_position < M", "key_position <= M", "keeping the key just past the end",
         "The keys are numbered from 0. Which is the last number below `M`?"),
        ("key_position < M", "key_position < N", "comparing keys with the number of queries",
         "`N` counts queries. Which number says how many keys there are?"),
        (" & (key_position <= position[:, None])", "", "leaving the future in",
         "With `causal`, a query sees no key after its own position. Which two positions do you "
         "have to compare?"),
        ({"& (key_position": "& (torch.arange(BK)",
         "position[:, None]": "torch.arange(BQ)[:, None]"},
         "a triangle within the tile, wherever the tile lies",
         "`tril` and `triu` compare row and column inside the tile. That is right only where the "
         "first query stands at the position of the first key. At which positions do they stand "
         "here?"),
        ({"& (key_position": "& (torch.arange(BK)",
         "position[:, None]": "(M - N + torch.arange(BQ))[:, None]"},
         "forgetting where the tile begins",
         "You count from 0 in every tile. Which query is row 0 of this one, and which key is "
         "column 0?"),
        ("M - N + query_start", "query_start", "taking the queries for the first N positions",
         "They are the last `N` of the `M`. At which position does query 0 stand?"),
        ("<=", "<", "hiding a query's own position from it",
         "A query sees the keys at its own position and before. Is your comparison `<` or `<=`?"),
        ("-torch.inf", "0.0", "writing zeros where -inf is meant",
         "These are scores, and the softmax is still to come. What does it make of a score of 0, "
         "and what of -inf?"),
        *(("-torch.inf", fill, "a large negative number in place of -inf",
         "It works until a row has nothing else: then the hidden keys are the largest scores. "
         "Which score can no other be below?")
         for fill in ("-1e9", "-1e4", "-1e30", "torch.finfo(torch.float32).min")),
        ("(key_position < M).expand(BQ, BK)", "acc_s != 0",
         "taking a score of 0 for a key that does not exist",
         "A key that exists may have the score 0, too. What tells a key past the end from the "
         "others?"),
        ("~visible", "visible", "hiding what is visible",
         "`masked_fill` fills where its mask is True. Which pairs does your mask name?"),
        ("if causal", "if True", "applying the causal mask always",
         "You hide the future although `causal` is False. What does a query see then?"),
        ({"return acc_s": "return acc_s[:, : M - key_start]",
         "~visible": "~visible[:, : M - key_start]"}, "cutting the tail off",
         "In PyTorch that would do, but a kernel's tile has a fixed shape. What can stand in the "
         "columns past the end?"),
    ]),
    cases=(
        Case("queries 2 and 3 of 4, at positions 3 and 4; keys 2 to 5, and there are only 5",
             lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, True)),
        Case("queries 2 and 3 of 4, keys 2 to 5 of 5, no causal mask",
             lambda: (torch.tensor([[1.0, 2, 3, 0], [0, 5, 6, 0]]), 2, 2, 4, 5, False)),
        Case("a tile on the diagonal, 4 × 6", lambda: (_random(4, 6, seed=0), 8, 6, 16, 16, True)),
        Case("the last 3 of 11 positions, keys from 8",
             lambda: (_padded(3, 4, seed=1, missing=1), 0, 8, 3, 11, True)),
        Case("the last 3 of 11 positions, no causal mask, two keys past the end",
             lambda: (_padded(3, 5, seed=2, missing=2), 0, 8, 3, 11, False)),
        Case("a full tile", lambda: (_random(4, 4, seed=3), 8, 0, 16, 16, True)),
    ),
)  # fmt: skip


# -- tile_maximum --

_BQ, _BK, _D = 4, 8, 4


def tile_maximum() -> object:
    """The kernel that finds each query's largest score; a program has BQ queries."""

    @triton.jit
    def kernel(Q, K, Max, N, M, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
        rows = tl.program_id(0) * BQ + tl.arange(0, BQ)  # [BQ]
        width = tl.arange(0, D)
        q_tile = tl.load(Q + rows[:, None] * D + width, mask=rows[:, None] < N, other=0.0)
        scores_max = tl.full([BQ], float("-inf"), tl.float32)
        for key_start in range(0, M, BK):
            keys = key_start + tl.arange(0, BK)  # [BK]
            k_tile = tl.load(K + keys[:, None] * D + width, mask=keys[:, None] < M, other=0.0)
            acc_s = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], axis=2)  # [BQ, BK]
            acc_s = tl.where(keys[None, :] < M, acc_s, float("-inf"))
            scores_max = tl.maximum(scores_max, tl.max(acc_s, axis=1))
        tl.store(Max + rows, scores_max, mask=rows < N)

    return kernel


# The chapter's kernel, with both bugs.
_GIVEN = Edited(tile_maximum, {
    '            acc_s = tl.where(keys[None, :] < M, acc_s, float("-inf"))\n': "",
    ", mask=rows < N": "",
})  # fmt: skip


def _is_given(kernel: object) -> bool:
    """Whether a kernel is the chapter's, with both bugs, but for comments and spaces."""
    given = ast.parse(_GIVEN.source).body[0].body[1]  # behind the docstring
    try:
        (other,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False  # written in another way
    return ast.dump(other) == ast.dump(given)


def _run_maximum(solution: Callable, N: int, M: int, zero_key: bool) -> tuple[Tensor, str]:
    """Launch the kernel on scores below zero; past the end of `Max`, numbers must stay."""
    kernel = solution()
    if kernel is None:
        if any(isinstance(c, CodeType) for c in solution.__code__.co_consts):
            raise TypeError("tile_maximum defines a kernel and returns None: `return kernel`")
        raise NotImplementedError("there is no kernel yet")
    if not hasattr(kernel, "run"):
        raise TypeError("the kernel is not decorated with @triton.jit")
    if _is_given(kernel):
        raise NotImplementedError("the kernel is as it was given")
    q = -0.5 - _random(N + _BQ, _D, seed=N).abs()
    k = 0.5 + _random(M + _BK, _D, seed=M).abs()
    if zero_key:
        k[1] = 0
    q, k = roomy(q, 1000.0), roomy(k, -1000.0)  # a row around them would score far above 0
    largest = roomy(torch.full((N + 2 * _BQ,), -77.0), -77.0)
    with warnings.catch_warnings():  # the interpreter's, of an infinity that was loaded
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[-(-N // _BQ),](q, k, largest, N, M, D=_D, BQ=_BQ, BK=_BK)
    intact = bool((largest[N:] == -77.0).all())
    return largest[:N].cpu(), "in bounds" if intact else "stored past the end of Max"


def _maximum_case(name: str, N: int, M: int, zero_key: bool = False) -> Case:
    here = environment.detect()
    return Case(name, lambda: (N, M, zero_key), lambda: here.why_not("triton", here.device))


_MAXIMUM = TEXTS.exercise(
    "tile_maximum",
    minutes=6, difficulty=2, solution=tile_maximum,
    run=_run_maximum,
    returns=("Max", "the end of Max"),
    misconceptions=diffs(tile_maximum, [
        ('tl.where(keys[None, :] < M, acc_s, float("-inf"))', "acc_s",
         "letting keys past the end take part",
         "Where there is no key, the score is 0. Here every true score is below 0. Which score "
         "never wins a maximum?"),
        (", mask=rows < N", "", "storing rows past the last query",
         "The last tile has rows that are no queries. Whose memory lies past the end of `Max`?"),
        ({"mask=keys[:, None] < M, other=0.0": 'mask=keys[:, None] < M, other=float("-inf")',
         'tl.where(keys[None, :] < M, acc_s, float("-inf"))': "acc_s"},
         "loading -inf for keys that do not exist",
         "A query may hold negative numbers. What is -1 times -inf, and does it lose the maximum?"),
        ("keys[None, :] < M", "keys[None, :] < N", "comparing keys with the number of queries",
         "`N` counts queries. Which number says how many keys there are?"),
        ("keys[None, :] < M", "acc_s != 0", "taking a score of 0 for a key that does not exist",
         "A key that exists may have the score 0, too. What tells a key past the end from the "
         "others?"),
        ('acc_s, float("-inf")', 'float("-inf"), acc_s', "swapping the two arms of `tl.where`",
         "You hide the keys that exist. Which arm does `tl.where` take where its condition is "
         "True?"),
        ("keys[None, :] < M", "keys[:, None] < M", "spreading the keys over the rows of the tile",
         "`acc_s` is `[BQ, BK]`: a key is a column. `keys[:, None]` is `[BK, 1]`. Which shape "
         "gives each column its key?"),
        ("range(0, M, BK)", "range(0, M // BK * BK, BK)",
         "dropping the last keys where BK does not divide M",
         "The last tile holds fewer keys, and they count. How can the walk keep that tile and "
         "ignore its empty places?"),
        ("mask=rows < N", "mask=rows < M", "comparing rows with the number of keys",
         "`M` counts keys. Which number says how many queries there are?"),
    ]),
    cases=(
        _maximum_case("8 queries, 16 keys: full tiles", 8, 16),
        _maximum_case("8 queries, 13 keys, every score below 0", 8, 13),
        _maximum_case("7 queries, 16 keys", 7, 16),
        _maximum_case("7 queries, 3 keys", 7, 3),
        _maximum_case("7 queries, 13 keys, and key 1 is all zeros", 7, 13, True),
    ),
)  # fmt: skip


EXERCISES = (_BUILD, _KINDS, _MASK, _MAXIMUM)

DOUBLES = (
    Double("tile_kinds", names=(
        "taking the queries for the first N positions",
        "skipping a tile whose first key is the last query's own position")),
    Double("tile_kinds", names=("skipping what the first query of a tile does not see",
                                "calling a tile full because its last query sees all of it")),
    Double("mask_tile", names=("a triangle within the tile, wherever the tile lies",
                               "leaving the ragged tail in")),
    Double("mask_tile", names=("writing zeros where -inf is meant",
                               "hiding a query's own position from it")),
    Double("tile_maximum", names=("letting keys past the end take part",
                                  "storing rows past the last query")),
)  # fmt: skip

TRAPS = TEXTS.traps

PREDICTIONS = TEXTS.predictions(
    globals(),
    gib_without_table={"unit": "GiB", "tolerance": 0.02},
    operations_left={"unit": "%"},
    gib_each_alone={"unit": "GiB", "tolerance": 0.01},
)
