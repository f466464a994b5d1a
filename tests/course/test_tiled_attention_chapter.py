"""Chapter 04's exercises: their solutions against the module and the costs, and answers as readers
write them."""

from __future__ import annotations

import inspect
import json
import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import costs
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import tiled_attention as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import tiled_attention as pictures
from nsa_tutorial.exact import online_softmax, tiled_attention
from nsa_tutorial.exact.online_softmax import LOG2_E

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = chapter_exercises("tiled_attention")
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04_tiled_attention.ipynb"
SHAPES = [(8, 8, 4, 4), (5, 13, 2, 4), (7, 7, 3, 2), (1, 9, 4, 4), (16, 64, 16, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kinds_of_the_exercise_are_the_modules(shape: tuple[int, ...]) -> None:
    rows: dict[int, str] = {}
    for tile in tiled_attention.tiles(*shape):
        rows[tile.query_start] = rows.get(tile.query_start, "") + tile.kind[0].upper()
    assert solutions.tile_kinds(*shape) == list(rows.values())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
@pytest.mark.parametrize(("N", "D", "tile"), [(64, 16, 16), (96, 8, 32), (8, 4, 8)])
def test_cost_of_the_exercise_is_that_of_costs(N: int, D: int, tile: int, causal: bool) -> None:
    cost = costs.tiled_attention(N, N, D, tile_q=tile, tile_k=tile, causal=causal)
    assert solutions.tiled_cost(N, D, tile, causal) == (cost.flops, cost.bytes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_walk_of_the_exercise_is_the_modules(shape: tuple[int, ...]) -> None:
    N, M, tile_q, tile_k = shape
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 4, generator=g) for length in (N, M, M))
    o, lse = tiled_attention.attention(
        *(x[None, :, None] for x in (q, k, v)), tile_q=tile_q, tile_k=tile_k, return_lse=True
    )
    mine = solutions.attend_in_tiles(q, k, v, tile_q, tile_k)
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


def no_values(N, D, tile, causal):
    tiles = sum(i + 1 if causal else N // tile for i in range(N // tile))
    return tiles * 4 * tile * tile * D, 2 * (2 * N * D) + 4 * N + 2 * tiles * tile * D


def everything_per_tile(N, D, tile, causal):
    tiles = sum(i + 1 if causal else N // tile for i in range(N // tile))
    return tiles * 4 * tile * tile * D, tiles * (4 * tile * D * 2 + 4 * tile)


def half_rounded_down(N, D, tile, causal):
    n = N // tile
    count = n * n // 2 if causal else n * n
    return count * 4 * tile * tile * D, 2 * 2 * N * D + 4 * N + 2 * 2 * count * tile * D


def bytes_first(N, D, tile, causal):
    return solutions.tiled_cost(N, D, tile, causal)[::-1]


def letters(N, M, tile_q, tile_k):
    return [[*row] for row in solutions.tile_kinds(N, M, tile_q, tile_k)]


def chapters_formula(N, D, tile, causal):
    """Without a mask that is right."""
    return 4 * N * N * D, 2 * N * D * 2 + 4 * N + 2 * N * D * 2 * (N // tile)


def all_operations(N, D, tile, causal):
    return 4 * N * N * D, solutions.tiled_cost(N, D, tile, causal)[1]


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


def in_the_frame(mask_from_0=False, keep=True, scaled=True, clipped=True, column=True):
    """A loop over slices, with the positions as a reader may count them."""

    def attend(q, k, v, tile_q, tile_k):
        N, M, scale = len(q), len(k), q.shape[1] ** -0.5
        outputs = []
        for position in torch.arange(M - N, M).split(tile_q):
            state = online_softmax.start(len(position), v.shape[1])
            for key_start in range(0, M, tile_k):
                keys = slice(key_start, key_start + tile_k)
                if key_start > position[-1]:
                    break
                acc_s = q[position - (M - N)] @ k[keys].T
                size = acc_s.shape[1] if clipped else tile_k
                key_position = torch.arange(size) + (0 if mask_from_0 else key_start)
                query_position = position[:, None] if column else position
                acc_s = acc_s.masked_fill(key_position > query_position, -torch.inf)
                scale_log2 = LOG2_E * (scale if scaled else 1)
                after = online_softmax.update(state, acc_s, v[keys], scale_log2)
                state = after if keep else state
            outputs.append(online_softmax.finish(state, scale))
        return tuple(torch.cat(part) for part in zip(*outputs, strict=True))

    return attend


def is_future(start, end, last):
    """Whether a tile of keys comes after the last query of a tile."""
    return start > last


def walk(
    *, mask=torch.gt, skip=is_future, scale_log2=LOG2_E, scale=1.0, one_state=False, all_rows=False
):
    """`skip` compares the first key of a tile, where `tile_k` ends it, and the last query."""

    def attend(q, k, v, tile_q, tile_k):
        D, results = q.shape[1], []
        position = torch.arange(len(k) - len(q), len(k))
        state = online_softmax.start(tile_q, v.shape[1])
        for rows in position.split(tile_q):
            if not one_state:
                state = online_softmax.start(tile_q if all_rows else len(rows), v.shape[1])
            for keys in torch.arange(len(k)).split(tile_k):
                if skip and skip(keys[0], keys[0] + tile_k, rows[-1]):
                    continue
                scores = q[rows - position[0]] @ k[keys].T
                if mask:
                    scores = scores.masked_fill(mask(keys, rows[:, None]), -torch.inf)
                state = online_softmax.update(state, scores, v[keys], scale_log2 * D**-0.5)
            results.append(online_softmax.finish(state, scale * D**-0.5))
        return tuple(torch.cat(part) for part in zip(*results, strict=True))

    return attend


def test_the_walk_itself_is_right() -> None:
    assert judge(KNOWN["attend_in_tiles"], walk()).outcome == "right"
    assert judge(KNOWN["attend_in_tiles"], in_the_frame()).outcome == "right"


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
    "v": ("tiled_cost", no_values, {"forgetting v's bytes"}),
    "all per tile": (
        "tiled_cost",
        everything_per_tile,
        {"loading q again with every tile of keys", "storing o and lse with every tile of keys"},
    ),
    "formula": ("tiled_cost", chapters_formula, {"skipping no tile"}),
    "no skip": (
        "attend_in_tiles",
        walk(skip=None),
        {"computing tiles of which nothing is visible"},
    ),
    "no mask": ("attend_in_tiles", walk(mask=None), {"tiles on the diagonal left unmasked"}),
    "neither": (
        "attend_in_tiles",
        walk(mask=None, skip=None),
        {"tiles on the diagonal left unmasked", "computing tiles of which nothing is visible"},
    ),
    "skipped by the end of the tile": (
        "attend_in_tiles",
        walk(skip=lambda start, end, last: end - 1 > last),
        {"skipping a tile by its last key"},
    ),
    "skipped one past the end": (
        "attend_in_tiles",
        walk(skip=lambda start, end, last: end > last),
        {"skipping a tile by its last key"},
    ),
    "skipped by the end, with states of tile_q rows": (
        "attend_in_tiles",
        walk(skip=lambda start, end, last: end - 1 > last, all_rows=True),
        {
            "skipping a tile by its last key",
            "a state of `tile_q` rows for a tile that holds fewer",
        },
    ),
    "skipped at the last query": (
        "attend_in_tiles",
        walk(skip=lambda start, end, last: start >= last),
        {"skipping a tile whose first key is the last query's own position"},
    ),
    "past hidden": (
        "attend_in_tiles",
        walk(mask=torch.lt),
        {"hiding the past and leaving the future"},
    ),
    "past and own position hidden": (
        "attend_in_tiles",
        walk(mask=torch.le),
        {"hiding the past and leaving the future"},
    ),
    "own position hidden": (
        "attend_in_tiles",
        walk(mask=torch.ge),
        {"hiding a query's own position from it"},
    ),
    "one state": (
        "attend_in_tiles",
        walk(one_state=True),
        {"one state for all tiles of queries"},
    ),
    "states of tile_q rows": (
        "attend_in_tiles",
        walk(all_rows=True),
        {"a state of `tile_q` rows for a tile that holds fewer"},
    ),
    "half": ("tiled_cost", half_rounded_down, {"taking exactly half for the causal case"}),
    "bytes first": ("tiled_cost", bytes_first, {"returning the bytes before the operations"}),
    "letters": ("tile_kinds", letters, {"a list of letters where a string is asked for"}),
    "operations of all tiles": (
        "tiled_cost",
        all_operations,
        {"skipping a tile's loads but not its operations"},
    ),
    "N - M": (
        "tile_kinds",
        wrong_way_round,
        {"adding `N - M` where the queries stand `M - N` further on"},
    ),
    "keys from 0": (
        "attend_in_tiles",
        in_the_frame(mask_from_0=True),
        {"counting a tile's keys from 0"},
    ),
    "key positions past the end": (
        "attend_in_tiles",
        in_the_frame(clipped=False),
        {"`tile_k` key positions for a tile that holds fewer"},
    ),
    "a vector for a mask": (
        "attend_in_tiles",
        in_the_frame(column=False),
        {"comparing each key with only one query"},
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
        "attend_in_tiles",
        walk(mask=lambda keys, rows: keys[:, None] > rows[:, 0]),
        {"a mask with a row for each key"},
    ),
    "update not kept": (
        "attend_in_tiles",
        in_the_frame(keep=False),
        {"throwing away what `update` returns"},
    ),
    "scale_log2 without scale": (
        "attend_in_tiles",
        in_the_frame(scaled=False),
        {"leaving the scale out of `scale_log2`"},
    ),
    "scales": (
        "attend_in_tiles",
        walk(scale_log2=1.0, scale=LOG2_E),
        {"an exchange of `scale` and `scale_log2`"},
    ),
}


@pytest.mark.parametrize(("name", "attempt", "named"), ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    """None of these is written like the misconception that names it."""
    verdict = judge(KNOWN[name], attempt)
    assert set(verdict.misconceptions) == named
    assert "does not explain everything" not in verdict.text


def test_the_frame_in_the_cell_wants_a_stop_and_a_mask() -> None:
    """The stub with both gaps filled is right; with one filled, the other is named."""
    e, given = KNOWN["attend_in_tiles"], cell("def attend_in_tiles")
    gap, comment = (line for line in given.splitlines() if "your code" in line)
    room = " " * 12
    stop = f"{room}if key_position[0] > position[-1]:\n{room}    break"
    mask = f"{room}hidden = key_position > position[:, None]\n"
    mask += f"{room}acc_s = acc_s.masked_fill(hidden, -torch.inf)"

    def judged(stop: str, mask: str) -> tuple:
        namespace = {"torch": torch, "online_softmax": online_softmax, "LOG2_E": LOG2_E}
        exec(given.replace(gap, stop).replace(comment, mask), namespace)
        verdict = judge(e, namespace["attend_in_tiles"])
        return verdict.outcome, *verdict.misconceptions

    assert judged(gap, comment) == ("not attempted",)
    assert judged(stop, mask) == ("right",)
    assert judged(stop, "")[1:] == ("tiles on the diagonal left unmasked",)
    assert judged("", mask)[1:] == ("computing tiles of which nothing is visible",)
    named = {
        "key_position[-1] > position[0]": "stopping at the first tile that is not full",
        "key_position > position": "stopping by a comparison of all positions",
    }
    for condition, name in named.items():
        assert judged(stop.replace("key_position[0] > position[-1]", condition), mask)[1:] == (
            name,
        )
    given = given.replace("return torch.cat(o), torch.cat(lse)", "return state")
    assert judged(stop, mask)[1:] == ("a state in place of `o` and `lse`",)


def test_infinity_without_its_module_is_told() -> None:
    def bare(*arguments):
        return inf  # noqa: F821

    assert "`torch.inf`" in judge(KNOWN["attend_in_tiles"], bare).text


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
    minutes = [e.minutes for e in KNOWN.values()]
    required, optional = sum(minutes[:2]), sum(minutes[2:])
    assert f"{required} of them exercises. Three more exercises are optional" in prose
    assert optional < 35, "there is something to read, too"
    assert prose.count("35 minutes") == 2


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
    assert round(64e3 * tiled.bytes / 4.8e12) == 115, "what the verdict says of the bill"


def test_one_choice_of_tiles_fits_and_keeps_the_arithmetic_busy() -> None:
    """The answer to the chapter's question to play with."""
    sizes = [(tile_q, tile_k) for tile_q in pictures.TILE_Q for tile_k in pictures.TILE_K]
    facts = {size: pictures.facts(*size) for size in sizes}
    good = [s for s, f in facts.items() if f.fits and f.memory_ms <= f.arithmetic_ms]
    assert good == [(256, 16)]
    assert (round(facts[256, 16].gib, 1), facts[256, 16].kib) == (4.0, 218)
