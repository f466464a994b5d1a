"""Chapter 04's exercises: their solutions against the module, and answers as readers write them."""

from __future__ import annotations

import inspect
import json
import linecache
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import costs
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import tiled_attention as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.stored_numbers import imported, shows_measurements
from nsa_tutorial.course.widgets import tiled_attention as pictures
from nsa_tutorial.exact import online_softmax, tiled_attention

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("tiled_attention")
BUILD = KNOWN["tiled_attention"]
# what an answer is like is looked for among all pairs of mistakes: here there are none
NAMELESS = replace(BUILD, misconceptions=())
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04_tiled_attention.ipynb"
SHAPES = [(8, 8, 4, 4), (5, 13, 2, 4), (7, 7, 3, 2), (1, 9, 4, 4), (16, 64, 16, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kinds_of_the_exercise_are_the_modules(shape: tuple[int, ...]) -> None:
    rows: dict[int, str] = {}
    for tile in tiled_attention.tiles(*shape):
        rows[tile.query_start] = rows.get(tile.query_start, "") + tile.kind[0].upper()
    assert solutions.tile_kinds(*shape) == list(rows.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_walk_of_the_exercise_is_the_modules(shape: tuple[int, ...]) -> None:
    N, M, tile_q, tile_k = shape
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 4, generator=g) for length in (N, M, M))
    o, lse = tiled_attention.attention(
        *(x[None, :, None] for x in (q, k, v)), tile_q=tile_q, tile_k=tile_k, return_lse=True
    )
    mine = solutions.tiled_attention(q, k, v, tile_q, tile_k)
    torch.testing.assert_close(mine, (o[0, :, 0], lse[0, :, 0]))


# -- answers as readers write them --


def square(N, M, tile_q, tile_k):
    def letter(i, j):
        return "F" if j < i else "D" if j == i else "S"

    return ["".join(letter(i, j) for j in range(M // tile_k)) for i in range(N // tile_q)]


def ends(N, M, tile_q, tile_k):
    """Positions one past the last, of keys and of queries alike."""
    rows = []
    for first in range(M - N, M, tile_q):
        letters = ""
        for key in range(0, M, tile_k):
            end = min(key + tile_k, M)
            letters += "S" if key > min(first + tile_q, M) else "F" if end <= first else "D"
        rows.append(letters)
    return rows


def triangle(acc_s, query_start, key_start, N, M, causal):
    return acc_s.masked_fill(torch.ones_like(acc_s).triu(1).bool(), -torch.inf)


def zero_is_missing(acc_s, query_start, key_start, N, M, causal):
    acc_s = acc_s.masked_fill(acc_s == 0, -torch.inf)
    if not causal:
        return acc_s
    rows, columns = (torch.arange(size) for size in acc_s.shape)
    hidden = key_start + columns > M - N + query_start + rows[:, None]
    return torch.where(hidden, -torch.inf, acc_s)


def keys_against_n(own_position=True):
    """The mask in one line, with `N` where `M` belongs; a query may be kept from its own key."""

    def mask(acc_s, query_start, key_start, N, M, causal):
        BQ, BK = acc_s.shape
        position = M - N + query_start + torch.arange(BQ)[:, None]
        key = key_start + torch.arange(BK)
        future = key > position if own_position else key >= position
        return acc_s.masked_fill((key >= N) | (future & causal), -torch.inf)

    return mask


def letters(N, M, tile_q, tile_k):
    return [[*row] for row in solutions.tile_kinds(N, M, tile_q, tile_k)]


def wrong_way_round(N, M, tile_q, tile_k):
    rows = []
    for query_start in range(0, N, tile_q):
        seen_by_first = N - M + query_start + 1
        seen_by_last = N - M + min(query_start + tile_q, N)
        row = ""
        for key_start in range(0, M, tile_k):
            is_full = min(key_start + tile_k, M) <= seen_by_first
            row += "S" if key_start >= seen_by_last else "F" if is_full else "D"
        rows.append(row)
    return rows


def full_only_before(N, M, tile_q, tile_k):
    """The chapter's frame, with `<` where `<=` belongs."""
    rows = []
    for query_start in range(0, N, tile_q):
        first, last = M - N + query_start, M - N + min(query_start + tile_q, N) - 1
        row = ""
        for key_start in range(0, M, tile_k):
            last_key = min(key_start + tile_k, M) - 1
            row += "S" if key_start > last else "F" if last_key < first else "D"
        rows.append(row)
    return rows


def kinds(is_skipped, is_full, is_next=True):
    """The chapter's frame of `tile_kinds`, its two comparisons of (first, last) query and key."""

    def tile_kinds(N, M, tile_q, tile_k):
        rows = []
        for start in range(0, N, tile_q):
            query = (M - N + start, M - N + min(start + tile_q, N) - 1)
            row = ""
            for first_key in range(0, M, tile_k):
                key = (first_key, min(first_key + tile_k, M) - 1)
                row += "S" if is_skipped(query, key) else ""
                if not (is_next and is_skipped(query, key)):
                    row += "F" if is_full(query, key) else "D"
            rows.append(row)
        return rows

    return tile_kinds


def is_future(start, end, last):
    """Whether a tile of keys comes after the last query of a tile."""
    return start > last


def walk(
    *, mask=torch.gt, fill=-torch.inf, skip=is_future, one_state=False, all_rows=False,
    is_kept=True, of_keys=False, lse_too=True,
):  # fmt: skip
    """In base two, with `continue`, the output written into place; `skip` compares the first key of
    a tile, where `tile_k` ends it, and the last query."""

    def attend(q, k, v, tile_q, tile_k):
        (N, D), M = q.shape, len(k)
        scale = D**-0.5 * 1.4426950408889634
        o, lse = torch.zeros(N, v.shape[1]), torch.zeros(N)
        state = None
        for first in range(0, N, tile_q):
            size = tile_q if all_rows else min(tile_q, N - first)
            rows = M - N + torch.arange(first, min(first + tile_q, N))
            if state is None or not one_state:
                state = [torch.full((size, 1), -torch.inf), torch.zeros(size, v.shape[1] + 1)]
            for start in range(0, M, tile_k):
                keys = torch.arange(start, min(start + tile_k, M))
                if skip and skip(start, start + tile_k, rows[-1]):
                    continue
                k_tile = k[keys]
                hidden = mask(keys, rows[:, None]) if mask else None
                if of_keys:
                    k_tile = k_tile.masked_fill(hidden, -torch.inf)
                s = scale * q[first : first + tile_q] @ k_tile.T
                if mask and not of_keys:
                    masked = s.masked_fill(hidden, fill)
                    s = masked if is_kept else s
                state = state if all_rows else [x[: len(s)] for x in state]
                largest = torch.maximum(state[0], s.amax(1, keepdim=True))
                with_ones = torch.cat((v[keys], torch.ones(len(keys), 1)), 1)
                sums = state[1] * torch.exp2(state[0] - largest)
                state = [largest, sums + torch.exp2(s - largest) @ with_ones]
            o[first : first + tile_q] = state[1][:, :-1] / state[1][:, -1:]
            natural = (state[0][:, 0] + torch.log2(state[1][:, -1])) / 1.4426950408889634
            lse[first : first + tile_q] = natural
        return (o, lse) if lse_too else o

    return attend


def by_letters(
    *, own=False, stores=True, every_row=False, divides=0, power=torch.exp, log=torch.log,
):  # fmt: skip
    """With letters, and `m = m2` at the end of a step."""

    def attend(q, k, v, tile_q, tile_k):
        N, M = len(q), len(k)
        o, lse = torch.empty(N, v.shape[1]), torch.empty(N)
        for i in range(0, N, tile_q):
            row = torch.arange(M)[M - N :][i : i + tile_q]
            m, total, a = -torch.inf * torch.ones(len(row)), 0, 0
            for j in range(0, int(row[-1]) + 1, tile_k):
                s = q[i : i + tile_q] @ k[j : j + tile_k].T / q.shape[1] ** 0.5
                s = torch.where(j + torch.arange(s.shape[1]) <= row[:, None], s, -torch.inf)
                top = s.max().expand(len(s)) if every_row else s.max(1).values
                m2 = top if own else torch.where(m > top, m, top)
                p, rate = power(s - m2[:, None]), power(m - m2)
                total, a = total * rate + p.sum(1), a * rate[:, None] + p @ v[j : j + tile_k]
                a = a / total[:, None] if divides else a
                m = m2 if stores else m
            o[i : i + tile_q] = a if divides == 1 else a / total[:, None]
            lse[i : i + tile_q] = m + log(total)
        return o, lse

    return attend


def test_other_walks_are_right() -> None:
    """In base two; by letters; by `torch.where`; by joining results of tiles; with gradients."""
    assert judge(BUILD, walk()).outcome == "right"
    assert judge(BUILD, by_letters()).outcome == "right"
    assert judge(BUILD, joined).outcome == "right"


def joined(q, k, v, tile_q, tile_k):
    """Each tile alone, then a merge by `lse`, as chapter 03 merges results; in slices."""
    N, M = len(q), len(k)
    parts = []
    for i in range(0, N, tile_q):
        rows = M - N + torch.arange(i, min(i + tile_q, N))[:, None]
        o, lse = torch.zeros(len(rows), v.shape[1]), torch.full((len(rows),), -torch.inf)
        for j in range(0, min(M, rows[-1].item() + 1), tile_k):
            s = q[i : i + tile_q] @ k[j : j + tile_k].T / q.shape[1] ** 0.5
            s = torch.where(j + torch.arange(s.shape[1]) <= rows, s, -torch.inf)
            tile_lse = s.logsumexp(1)
            tile_o = (s - tile_lse.clamp(min=-3e38)[:, None]).exp() @ v[j : j + tile_k]
            both = torch.logaddexp(lse, tile_lse)
            o = o * (lse - both).exp()[:, None] + tile_o * (tile_lse - both).exp()[:, None]
            lse = both
        parts.append((o, lse))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def dense(q, k, v, tile_q, tile_k):
    s = q @ k.T * q.shape[1] ** -0.5
    future = torch.ones_like(s).triu(len(k) - len(q) + 1).bool()
    p = (
        s.masked_fill(future, -torch.inf) - s.masked_fill(future, -torch.inf).amax(1)[:, None]
    ).exp()
    return p @ v / p.sum(1, keepdim=True)


def in_one_tile(q, k, v, tile_q, tile_k):
    """No loop yet, and no mask: one tile, whatever is asked for."""
    s = q.shape[1] ** -0.5 * q[:tile_q] @ k[:tile_k].T
    p = torch.exp(s - s.amax(1, keepdim=True))
    return p @ v[:tile_k] / p.sum(1, keepdim=True)


def by_keys_alone(q, k, v, tile_q, tile_k):
    """Chapter 03's walk: all queries, chunk by chunk."""
    return solutions.tiled_attention(q, k, v, len(q), tile_k)


def returning(q, k, v, tile_q, tile_k):
    """`return` in the place of `break`, in the reader's own frame."""
    N, M = len(q), len(k)
    o, lse = torch.zeros(N, v.shape[1]), torch.zeros(N)
    for i in range(0, N, tile_q):
        rows = torch.arange(M - N + i, M - N + min(i + tile_q, N))
        tile = solutions.tiled_attention(q[i : i + tile_q], k[: rows[-1] + 1], v[: rows[-1] + 1],
                                         tile_q, tile_k)  # fmt: skip
        for j in range(0, M, tile_k):
            if j > rows[-1]:
                return o, lse
        o[i : i + tile_q], lse[i : i + tile_q] = tile
    return o, lse


def test_a_half_done_function_holds_the_stages_that_it_should() -> None:
    names = [stage.name for stage in BUILD.stages]
    held = {
        "many tiles": in_one_tile,
        "causal mask": walk(mask=None, lse_too=False),
        "skipped tiles": walk(skip=None, lse_too=False),
        "lse": walk(lse_too=False),
    }
    for name, attempt in held.items():
        assert judge(NAMELESS, attempt).held == names.index(name), name


@pytest.mark.parametrize(
    "fill",
    [
        *(-5.0, -20, -1e4, -1e30),
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in (-10, -15, -50, -100, -1e5, -1e9, -1e12)
        ),
    ],
)
def test_a_finite_mask_is_refused_and_named(fill: float) -> None:
    verdict = judge(BUILD, walk(fill=fill))
    assert verdict.outcome == "misconception"
    assert verdict.misconceptions == ("a finite mask, where -inf is meant",)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k, v, a, b: torch.softmax(q @ k.T, -1) @ v, "PyTorch's softmax"),
        (lambda q, k, v, a, b: (q @ k.T).softmax(-1) @ v, "PyTorch's softmax"),
        (
            lambda q, k, v, a, b: torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None]
            )[0],
            "PyTorch's attention",
        ),
        (
            lambda q, k, v, a, b: tiled_attention.attention(*(x[None, :, None] for x in (q, k, v)))[
                0, :, 0
            ],
            "the course's own function",
        ),
        (
            lambda q, k, v, a, b: online_softmax.finish(online_softmax.start(len(q), 1), 1.0)[0],
            "the course's own function",
        ),
    ],
    ids=["softmax", "method", "attention", "module", "online softmax"],
)
def test_what_the_page_is_to_build_is_refused(call: Callable, said: str) -> None:
    verdict = judge(NAMELESS, call)
    assert (verdict.held, said in verdict.text) == (0, True)


def test_a_cell_as_it_comes_is_not_attempted() -> None:
    namespace: dict = {}
    exec(cell("def tiled_attention"), namespace)
    assert judge(BUILD, namespace["tiled_attention"]).outcome == "not attempted"


def test_an_answer_that_changes_its_input_is_refused() -> None:
    def scaled_in_place(q, k, v, tile_q, tile_k):
        q *= q.shape[1] ** -0.5
        return solutions.tiled_attention(q * q.shape[1] ** 0.5, k, v, tile_q, tile_k)

    verdict = judge(BUILD, scaled_in_place)
    assert "argument 1 is another one after the call" in verdict.text


def test_the_build_has_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 3, generator=g).double().requires_grad_() for n in (3, 5, 5))
    assert torch.autograd.gradcheck(lambda *x: solutions.tiled_attention(*x, 2, 2), (q, k, v))


def by_position(of):
    """Tiles compared by their numbers, made from positions."""

    def tile_kinds(N, M, tile_q, tile_k):
        rows = []
        for first in range(M - N, M, tile_q):
            number = of(first, min(first + tile_q, M) - 1) // tile_q
            pairs = [(j // tile_k, number) for j in range(0, M, tile_k)]
            rows.append("".join("S" if j > i else "F" if j < i else "D" for j, i in pairs))
        return rows

    return tile_kinds


def start_together(N, M, tile_q, tile_k):
    starts = [(range(0, M, tile_k), i) for i in range(M - N, M, tile_q)]
    return ["".join("D" if j == i else "S" if j > i else "F" for j in keys) for keys, i in starts]


def letters_swapped(N, M, tile_q, tile_k):
    table = str.maketrans("SF", "FS")
    return [row.translate(table) for row in solutions.tile_kinds(N, M, tile_q, tile_k)]


ATTEMPTS = {
    "numbers of tiles": (
        "tile_kinds",
        square,
        {
            "comparing the numbers of tiles, not positions",
            "dropping the tiles at the ends, which hold fewer",
        },
    ),
    "ends": (
        "tile_kinds",
        ends,
        {
            "taking the end of a tile of queries for its last query",
            "masking a tile whose last key is the first query's own position",
        },
    ),
    "triangle": (
        "mask_tile",
        triangle,
        {
            "a triangle within the tile, wherever the tile lies",
            "applying the causal mask always",
        },
    ),
    "zeros": (
        "mask_tile",
        zero_is_missing,
        {"taking a score of 0 for a key that does not exist"},
    ),
    "keys against N": (
        "mask_tile",
        keys_against_n(),
        {"comparing keys with the number of queries"},
    ),
    "keys against N, and own position hidden": (
        "mask_tile",
        keys_against_n(own_position=False),
        {"comparing keys with the number of queries", "hiding a query's own position from it"},
    ),
    "no skip": (
        "tiled_attention",
        walk(skip=None),
        {"computing tiles of which nothing is visible"},
    ),
    "no mask": ("tiled_attention", walk(mask=None), {"tiles on the diagonal left unmasked"}),
    "neither": (
        "tiled_attention",
        walk(mask=None, skip=None),
        {"tiles on the diagonal left unmasked"},
    ),
    "own position hidden, no skip yet": (
        "tiled_attention",
        walk(mask=torch.ge, skip=None),
        {"hiding a query's own position from it"},
    ),
    "zeros in the mask, no skip yet": (
        "tiled_attention",
        walk(fill=0.0, skip=None),
        {"writing zeros where -inf is meant"},
    ),
    "skipped by the end of the tile": (
        "tiled_attention",
        walk(skip=lambda start, end, last: end - 1 > last),
        {"skipping a tile by its last key"},
    ),
    "skipped one past the end": (
        "tiled_attention",
        walk(skip=lambda start, end, last: end > last),
        {"no numbers left after the first tile"},
    ),
    "skipped at the last query": (
        "tiled_attention",
        walk(skip=lambda start, end, last: start >= last),
        {"skipping a tile whose first key is the last query's own position"},
    ),
    "past hidden": (
        "tiled_attention",
        walk(mask=torch.lt),
        {"hiding the past and leaving the future"},
    ),
    "past and own position hidden": (
        "tiled_attention",
        walk(mask=torch.le),
        {"hiding the past and leaving the future"},
    ),
    "own position hidden": (
        "tiled_attention",
        walk(mask=torch.ge),
        {"hiding a query's own position from it"},
    ),
    "one state": (
        "tiled_attention",
        walk(one_state=True),
        {"one state for all tiles of queries"},
    ),
    "letters": ("tile_kinds", letters, {"a list of letters where a string is asked for"}),
    "N - M": (
        "tile_kinds",
        wrong_way_round,
        {"adding `N - M` where the queries stand `M - N` further on"},
    ),
    "not full by the first query's own position": (
        "tile_kinds",
        full_only_before,
        {"masking a tile whose last key is the first query's own position"},
    ),
    "skipped by the last key": (
        "tile_kinds",
        kinds(lambda query, key: key[1] > query[1], lambda query, key: key[1] <= query[0]),
        {"skipping a tile by its last key"},
    ),
    "full by the first key": (
        "tile_kinds",
        kinds(lambda query, key: key[0] > query[1], lambda query, key: key[0] <= query[0]),
        {"calling a tile full by its first key"},
    ),
    "full after the first key": (
        "tile_kinds",
        kinds(lambda query, key: key[0] > query[1], lambda query, key: query[0] > key[0]),
        {"calling a tile full by its first key"},
    ),
    "if, if, else": (
        "tile_kinds",
        kinds(lambda query, key: key[0] > query[1], lambda query, key: key[1] <= query[0], False),
        {"giving a skipped tile two letters"},
    ),
    "keys as rows": (
        "tiled_attention",
        walk(mask=lambda keys, rows: keys[:, None] > rows[:, 0]),
        {"hiding the past and leaving the future"},
    ),
    "masked_fill thrown away": (
        "tiled_attention",
        walk(is_kept=False),
        {"tiles on the diagonal left unmasked"},
    ),
    "keys masked": ("tiled_attention", walk(of_keys=True), {"masking the keys, not the scores"}),
    "zeros in the mask": (
        "tiled_attention",
        walk(fill=0.0),
        {"writing zeros where -inf is meant"},
    ),
    "one tile": ("tiled_attention", in_one_tile, {"a single tile, and no loop yet"}),
    "own maximum": (
        "tiled_attention",
        by_letters(own=True),
        {"a tile's own maximum in place of the running one"},
    ),
    "m never stored": (
        "tiled_attention",
        by_letters(stores=False),
        {"a walk that loses the earlier tiles of keys"},
    ),
    "divided in the loop": (
        "tiled_attention",
        by_letters(divides=1),
        {"a division inside the step"},
    ),
    "divided in the loop and after it": (
        "tiled_attention",
        by_letters(divides=2),
        {"a division inside the step"},
    ),
    "exp2 of natural exponents": (
        "tiled_attention",
        by_letters(power=torch.exp2, log=torch.log2),
        {"`exp2` without log2(e) in the scale"},
    ),
    "log2 in lse": (
        "tiled_attention",
        by_letters(log=torch.log2),
        {"an lse that adds natural units and log2 units"},
    ),
    "one maximum": (
        "tiled_attention",
        by_letters(every_row=True),
        {"one maximum for all rows"},
    ),
    "dense": ("tiled_attention", dense, {"the table of all scores at once"}),
    "chapter 03": (
        "tiled_attention",
        by_keys_alone,
        {"all queries at once, for a tile of keys"},
    ),
    "return for break": (
        "tiled_attention",
        returning,
        {"`return` where only the walk along the keys should stop"},
    ),
    "numbers of positions, first": (
        "tile_kinds",
        by_position(lambda first, last: first),
        {"comparing the numbers of tiles, not positions"},
    ),
    "numbers of positions, last": (
        "tile_kinds",
        by_position(lambda first, last: last),
        {"comparing the numbers of tiles, not positions"},
    ),
    "starts": (
        "tile_kinds",
        start_together,
        {"calling a tile diagonal only where its queries and its keys start together"},
    ),
    "S and F": ("tile_kinds", letters_swapped, {"`S` and `F` in each other's places"}),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    verdict = judge(KNOWN[name], attempt)
    assert set(verdict.misconceptions) == named
    assert "does not explain everything" not in verdict.text


TYPED = """
def tiled_attention(q, k, v, tile_q, tile_k):
    (N, D), M = q.shape, len(k)
    os, ls = [], []
    for q0 in range(0, N, tile_q):
        qt = q[q0 : q0 + tile_q] * D ** -0.5
        last = M - N + q0 + len(qt) - 1
        pos = M - N + q0 + torch.arange(len(qt))
        m, l, a = torch.full_like(pos, 1) * -torch.inf, 0 * pos, torch.zeros(len(qt), v.shape[1])
        for k0 in range(0, M, tile_k):
            if k0 > last:
                break
            kt, vt = k[k0 : k0 + tile_k], v[k0 : k0 + tile_k]
            s = qt @ kt.T
            hidden = k0 + torch.arange(len(kt)) > pos[:, None]
            s = s.masked_fill(hidden, -torch.inf)
            m_new = torch.maximum(m, s.amax(1))
            f, p = torch.exp(m - m_new), torch.exp(s - m_new[:, None])
            l, a, m = l * f + p.sum(1), a * f[:, None] + p @ vt, m_new
        os.append(a / l[:, None])
        ls.append(m + torch.log(l))
    return torch.cat(os), torch.cat(ls)
"""
NO_AXIS = "a `[BQ]` tensor used where `[BQ, 1]` is needed"
NUMBERS = "comparing the numbers of tiles, not positions"
STARTS = "masking only where a tile of keys begins at the tile's first query"
MASK = "s.masked_fill(hidden, -torch.inf)"
SLIPS = [
    ({"f[:, None]": "f"}, NO_AXIS, 0),
    ({"m_new[:, None]": "m_new"}, NO_AXIS, 1),
    ({"l[:, None]": "l"}, NO_AXIS, 0),
    ({"f[:, None]": "f", "m_new[:, None]": "m_new"}, NO_AXIS, 0),
    ({"f[:, None]": "f", "m_new[:, None]": "m_new", "l[:, None]": "l"}, NO_AXIS, 0),
    ({MASK: f"{MASK} if k0 // tile_k == q0 // tile_q else s"}, NUMBERS, 4),
    ({MASK: f"{MASK} if k0 // tile_k == (M - N + q0) // tile_q else s"}, NUMBERS, 4),
    ({MASK: f"{MASK} if k0 == q0 else s"}, STARTS, 4),
    ({MASK: f"{MASK} if k0 == M - N + q0 else s"}, STARTS, 4),
    ({MASK: f"{MASK} if k0 + tile_k > last else s"}, "masking only the last tile of a walk", 4),
    ({"k0 > last": "k0 > last - M + N"}, "a stop that forgets `M - N`", 6),
    ({"(0, M, tile_k)": "(0, min(q0 + tile_q, M), tile_k)"}, "a stop that forgets `M - N`", 6),
    ({MASK: "s - 1e9 * hidden"}, "a finite mask, where -inf is meant", 4),
    ({MASK: "s + hidden * -1e4"}, "a finite mask, where -inf is meant", 4),
    ({"p.sum(1)": "p.sum()"}, "one sum for all rows", 0),
    ({"m + torch.log": "m * D**-0.5 + torch.log"}, "an lse that scales the maximum twice", 7),
    ({"D ** -0.5": "D ** -0.5 * 1.442695"}, "`exp` of scores in log2 units", 1),
]


@pytest.mark.parametrize(("edits", "named", "held"), SLIPS, ids=str)
def test_a_slip_in_a_typed_walk_is_named(edits: dict[str, str], named: str, held: int) -> None:
    source = TYPED
    for piece, by in edits.items():
        assert source.count(piece) == 1
        source = source.replace(piece, by)
    namespace = {"torch": torch}
    exec(source, namespace)
    verdict = judge(BUILD, namespace["tiled_attention"])
    assert (verdict.misconceptions, verdict.held) == ((named,), held)


def test_infinity_without_its_module_is_told() -> None:
    def bare(*arguments):
        return inf  # noqa: F821

    assert "`torch.inf`" in judge(BUILD, bare).text


def test_a_mask_of_another_shape_is_told_in_words() -> None:
    e, store = KNOWN["tile_maximum"], "tl.store(Max + rows, scores_max"
    if e.missing:
        pytest.skip(e.missing[0])
    wrong = cell("def tile_maximum").replace(store, f"{store}, mask=rows[:, None] < N")
    assert "The shapes do not fit." in judge(e, in_a_cell(wrong)).text


# -- the kernel --


def cell(start: str) -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (s for c in cells if (s := "".join(c["source"])).startswith(start))
    return found


def in_a_cell(source: str) -> Callable:
    """`tile_maximum` as a cell defines it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"tl": tl, "triton": triton}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace["tile_maximum"]


def test_the_kernel_in_the_cell_is_not_attempted_until_it_is_edited() -> None:
    e, given = KNOWN["tile_maximum"], cell("def tile_maximum")
    if e.missing:
        pytest.skip(e.missing[0])
    assert judge(e, in_a_cell(given)).outcome == "not attempted"
    assert judge(e, in_a_cell(given.replace("# [BQ, BK]", "# scores"))).outcome == "not attempted"
    half = given.replace("scores_max)\n\n", "scores_max, mask=rows < N)\n\n")
    verdict = judge(e, in_a_cell(half))
    assert verdict.misconceptions == ("letting keys past the end take part",)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ('keys[None, :] < M, float("-inf"), acc_s', "swapping the two arms of `tl.where`"),
        ("keys[None, :] < M, acc_s, 0.0", "letting keys past the end take part"),
        (
            'keys[:, None] < M, acc_s, float("-inf")',
            "spreading the keys over the rows of the tile",
        ),
    ],
    ids=["arms", "zeros", "rows"],
)
def test_a_wrong_where_is_named(arguments: str, named: str) -> None:
    e = KNOWN["tile_maximum"]
    if e.missing:
        pytest.skip(e.missing[0])
    right = inspect.getsource(solutions.tile_maximum)
    wrong = right.replace('keys[None, :] < M, acc_s, float("-inf")', arguments)
    assert wrong != right
    verdict = judge(e, in_a_cell(wrong.replace(" -> object", "")))
    assert verdict.misconceptions == (named,)


@pytest.mark.parametrize(
    ("attempt", "told"),
    [(lambda: lambda Q: None, "@triton.jit"), (lambda: 3, "@triton.jit")],
    ids=["no decorator", "a number"],
)
def test_what_is_no_kernel_is_told(attempt: Callable, told: str) -> None:
    e = KNOWN["tile_maximum"]
    if e.missing:
        pytest.skip(e.missing[0])
    assert told in judge(e, attempt).text


def test_a_kernel_that_is_not_returned_is_told() -> None:
    def forgotten():
        def kernel(Q):
            return Q

    e = KNOWN["tile_maximum"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(e, forgotten)
    assert (verdict.outcome, "return kernel" in verdict.text) == ("wrong", True)


# -- pictures and promises --


def test_the_minutes_are_told() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert f"70 minutes, {BUILD.minutes} of them the exercise at the end" in prose
    parts = [int(x) for x in re.findall(r"^About (\d+) minutes\.", prose, re.M)]
    assert "take about 45 minutes more" in prose and sum(parts) == 45
    assert sum(e.minutes for e in KNOWN.values()) - BUILD.minutes < 45, "there is text, too"


def outputs(id_: str) -> str:
    """What a cell of the chapter printed."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (c for c in cells if c["id"] == id_)
    return "".join("".join(o.get("text", "")) for o in found["outputs"])


def test_stored_times_are_those_of_the_file() -> None:
    """The rules of nbval compare both cells on every run; this says with what."""
    told = outputs("told-measured")
    for kernel in ("dense, cuDNN", "dense, flash"):
        assert f"{pictures.measured(kernel)[0]:.1f} ms" in told
    other = json.loads((NOTEBOOK.parents[1] / "assets" / "triton_forward_h200.json").read_text())
    (ms,) = (
        row["ms"]
        for row in other["rows"]
        if (row["kernel"], row["tokens"], row["width"], row["kv_heads"] * row["group"])
        == ("dense, cuDNN", 65_536, 128, 64)
    )
    hero = cell("64 such heads")
    assert f"{pictures.measured()[0]:.1f} ms" in hero, "this chapter's recording"
    assert f"{ms:.1f} ms" in hero, "chapter 00's"
    assert pictures.draw_measured().finding.startswith(
        f"Tiles take {pictures.measured()[0]:.0f} ms"
    )
    imports = imported([cell("import torch")])
    for id_ in ("draw-measured", "told-measured"):
        assert shows_measurements(source(id_), imports)


def source(id_: str) -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return next("".join(c["source"]) for c in cells if c["id"] == id_)


def test_the_rows_of_two_tiles_stand_where_the_chapter_says() -> None:
    told = outputs("two-tiles-of-rows")
    assert "queries [2, 3] at positions [4, 5]" in told, "query 2 stands at position 4"
    assert "[[0 0 0 0 0 1]" in told, "it sees five keys"


def test_the_bill_by_hand_is_that_of_costs() -> None:
    """What the chapter counts in its own cells, tile by tile."""
    assert "costs counts the same: True" in outputs("print-f-gib-you-said")
    no_mask = costs.tiled_attention(65_536, 65_536, 128, tile_q=128, tile_k=128, causal=False)
    assert f"{no_mask.bytes / 2**30:.1f} GiB, {no_mask.flops / 1e9:.0f}" in outputs(
        "told-operations"
    )


def test_a_tile_fits_on_the_chip_and_the_table_into_main_memory_alone() -> None:
    """What `draw_memories` says in its title, by its own sizes."""
    assert "only in main memory" in pictures.draw_memories().finding
    sizes = {name: size for name, (size, _) in pictures._MEMORIES.items()}
    tile, keys_and_values, table = 128 * 128 * 2, 2 * 65_536 * 128 * 2, 2 * 65_536**2
    assert tile < min(sizes["registers"], sizes["shared memory"])
    assert sizes["shared memory"] < keys_and_values < sizes["L2 cache"]
    assert sizes["L2 cache"] < table < sizes["main memory"]


def test_the_measured_walk_beats_every_table() -> None:
    """What the chapter says of 64 heads: less than the table's bytes at full speed, more than the
    arithmetic, and no memory but the output's."""
    ms, gib = pictures.measured()
    tiled = costs.tiled_attention(65_536, 65_536, 128, tile_q=128, tile_k=128)
    table = costs.dense_attention(65_536, 65_536, 128)
    assert 64e3 * tiled.flops / 989e12 < ms < 64e3 * table.bytes / 4.8e12
    assert gib == pytest.approx(64 * 65_536 * 128 * 2 / 2**30, rel=1e-3)
    assert 3.5 < 64e3 * table.bytes / 4.8e12 / ms < 4, "almost four times as long"
    assert pictures.draw_measured().finding.endswith("at least 459 ms and 512 GiB")
    assert pictures.measured("dense, flash")[0] < 459 / 2, "less than half the time of the tables"


def test_one_choice_of_tiles_fits_and_keeps_the_arithmetic_busy() -> None:
    """The answer to the chapter's question to play with."""
    sizes = [(tile_q, tile_k) for tile_q in pictures.TILE_Q for tile_k in pictures.TILE_K]
    facts = {size: pictures.facts(*size) for size in sizes}
    good = [s for s, f in facts.items() if f.fits and f.memory_ms <= f.arithmetic_ms]
    assert good == [(256, 16)]
    assert (round(facts[256, 16].gib, 1), facts[256, 16].kib) == (4.0, 218)
