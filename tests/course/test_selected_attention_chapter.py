"""Chapter 05's pictures and exercises: lists by the true attention, bytes beside dense tiles,
solutions against `ops`."""

import ast
import inspect
import itertools
import json
import linecache
import re
from pathlib import Path

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import costs, heads, predict, reveal
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import selected_attention as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import mask_explorer
from nsa_tutorial.course.widgets import selected_attention as pictures
from nsa_tutorial.sparse.selected_attention import dense_mask

KNOWN = chapter_exercises("selected_attention")
NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_selected_attention.ipynb"
needs_triton = pytest.mark.skipif(bool(KNOWN["sum_of_list"].missing), reason="no Triton here")


@pytest.fixture(scope="module")
def h():
    return heads.load()


def random_mass(H: int, N: int, block_size: int, seed: int = 0) -> torch.Tensor:
    """Like `group_mass`: causal, rows sum to 1; with many ties."""
    block = torch.arange(-(-N // block_size))
    mass = torch.randint(
        1, 4, (H, N, len(block)), generator=torch.Generator().manual_seed(seed)
    ).double()
    mass = mass.masked_fill(block > torch.arange(N)[:, None] // block_size, 0)
    return mass / mass.sum(-1, keepdim=True)


# -- lists by the true attention --


def test_group_mass_is_causal_and_sums_to_one(h):
    mass = pictures.group_mass(h, 24)  # 512 is no multiple of it
    assert mass.shape == (4, 512, 22)
    torch.testing.assert_close(mass.sum(-1), torch.ones(4, 512, dtype=mass.dtype))
    future = torch.arange(22) > torch.arange(512)[:, None] // 24
    assert (mass.masked_select(future) == 0).all()


def test_group_mass_is_the_mean_over_the_heads_that_share_the_list(h):
    weights = heads.attention_weights(h.q, h.k)[0]  # [HQ, N, N]
    first_of_group_2 = 2 * h.G
    by_hand = sum(weights[first_of_group_2 + i, 300, 32:48].sum() for i in range(h.G)) / h.G
    torch.testing.assert_close(pictures.group_mass(h, 16)[2, 300, 2], by_hand)


@pytest.mark.parametrize(
    ("N", "block_size", "top_n"), [(37, 8, 3), (20, 4, 1), (9, 16, 2), (40, 8, 7)], ids=str
)
def test_true_lists_hold_the_own_block_and_the_best_of_the_past(N, block_size, top_n):
    mass = random_mass(2, N, block_size)
    lists = pictures.true_lists(mass, block_size, top_n)
    assert lists.shape == (1, N, 2, top_n)
    ops.check_block_indices(lists, N, block_size=block_size)
    for t, head in itertools.product(range(N), range(2)):
        row, own = lists[0, t, head].tolist(), t // block_size
        ids = [i for i in row if i >= 0]
        assert row == sorted(ids) + [-1] * (top_n - len(ids))
        assert own in ids and max(ids) == own
        assert len(ids) == min(top_n, own + 1)
        left_out = [mass[head, t, i] for i in range(own) if i not in ids]
        assert all(mass[head, t, i] >= x for i in ids if i != own for x in left_out)


def test_true_lists_hold_no_more_than_the_best_blocks_and_little_less(h):
    mass = pictures.group_mass(h, 16)
    lists = pictures.true_lists(mass, 16, 4)[0].permute(1, 0, 2)  # [H, N, S]
    held = mass.gather(-1, lists.clamp(min=0)).masked_fill(lists < 0, 0).sum(-1)
    best = mass.topk(4, dim=-1).values.sum(-1)
    assert (held <= best + 1e-12).all()
    # the own block costs one place at the most
    assert (held >= mass.topk(3, dim=-1).values.sum(-1) - 1e-12).all()


@pytest.mark.parametrize("query", [0, 15, 16, 100, 127])
def test_token_kinds_are_the_mask(query):
    ids = [i for i in (0, 3, query // 16) if i <= query // 16]
    kinds = pictures.token_kinds(ids, query, 128, 16)
    block_indices = torch.tensor(ids).expand(1, 128, 1, len(ids))
    seen = dense_mask(block_indices, 128, block_size=16)[0, query, 0].tolist()
    assert [kind in ("selected", "own block") for kind in kinds] == seen
    assert kinds.count("future") == 127 - query
    assert kinds.count("own block") == query % 16 + 1


@pytest.mark.parametrize(("query", "M"), [(9, 12), (3, 12), (0, 5), (9, 10)], ids=str)
def test_tiles_hold_what_the_query_sees_and_zeros(query, M):
    ids = [2, -1, 0, 7]
    tiles = pictures.tiles_of(ids, query, M, 4)
    assert [len(tile) for tile in tiles] == [4, 4, 4, 4]
    tokens = [token for tile in tiles for token in tile if token is not None]
    assert tokens == solutions.tokens_of_list(ids, query, M, 4, causal=True)
    assert tiles[1] == tiles[3] == [None] * 4


def test_the_gather_picture_counts_rows():
    finding = pictures.draw_gather([0, -1, 2], 9, 12, 4).finding
    assert (
        finding
        == "Query 9 with the list [0, −1, 2]: 6 of the 10 keys of its past are loaded, 6 rows "
        "stay zero"
    )


# -- bytes --


def test_loads_are_the_costs():
    assert pictures.loads(4096) * 4096 == costs.selected_attention(4096, 4096, 128).bytes
    assert (
        pictures.loads(4096, 32, G=4) * 4096
        == costs.tiled_attention(4096, 4096, 128, tile_q=32, HQ=4, H=1).bytes
    )


@pytest.mark.parametrize(
    ("tile_q", "block_size", "top_n"),
    [(8, 64, 16), (64, 64, 16), (16, 32, 4), (128, 16, 8)],
    ids=str,
)
def test_the_crossover_is_where_lists_begin_to_move_less(tile_q, block_size, top_n):
    N = pictures.crossover(tile_q, block_size=block_size, top_n=top_n)

    def ratio(N: int) -> float:
        tiled = pictures.loads(N, tile_q, block_size=block_size)
        return pictures.loads(N, block_size=block_size, top_n=top_n) / tiled

    assert ratio(N) <= 1 < ratio(N - block_size)
    late_query = (top_n - 1) * block_size + (1 + block_size) / 2
    assert pytest.approx(2 * tile_q * late_query, rel=0.1) == N


def test_the_crossover_hardly_depends_on_the_group():
    """Both load a KV head's keys for all of its group; what differs is the list itself, one for the
    group."""
    assert pictures.crossover(64, G=16) == pytest.approx(pictures.crossover(64, G=1), rel=0.01)


# -- the pictures --


def test_the_masks_are_the_lists(h):
    kinds = pictures.kinds_of_pairs(3, 4, 16)
    for query in (0, 70, 385, 511):
        told = [pictures.KINDS[i] for i in kinds[query]]
        ids = pictures.list_of(query, 4, 3)
        assert told == pictures.token_kinds(ids, query, 512, 16)
    kept = 131_328 / (kinds < 2).sum()
    assert pictures.draw_masks().finding.startswith(
        f"Lists of 4 blocks keep one visible pair in {kept:.1f}"
    )


def test_the_window_picture_counts_its_keys():
    assert pictures.draw_window().finding == (
        "Query 9 sees 4 keys in its window, 2 in its own block"
    )


def test_the_pairs_picture_tells_what_is_left():
    left = costs.visible_pairs(65_536, 65_536) / costs.selected_keys(65_536, 65_536)
    assert pictures.draw_pairs().finding == (
        f"At 65,536 tokens, lists leave one visible score in {left:.0f}"
    )


def test_the_traffic_picture_names_the_crossing():
    assert f"{pictures.crossover(64, G=2):,} tokens" in pictures.draw_traffic().finding


def test_the_text_picture_says_what_its_list_holds(h):
    mass = pictures.group_mass(h, 16)[3, 385]
    finding = pictures.draw_text(385, 4, 3).finding
    assert (
        finding == "Query 385: blocks [18, 20, 21, 24], 4 of 25, hold 95% of its group's attention"
    )
    assert f"{mass[[18, 20, 21, 24]].sum().item():.0%}" == "95%"
    assert mass[[21, 22, 23, 24]].sum() < 0.3  # the latest blocks hold little of it


@pytest.mark.parametrize(
    ("query", "ids", "block_size"), [(385, [18, 20, 21, 24], 16), (0, [0], 16), (511, [3, 7], 64)]
)
def test_runs_are_the_text_each_character_of_its_kind(h, query, ids, block_size):
    kinds = pictures.token_kinds(ids, query, 512, block_size)
    runs = pictures.text_runs(h.text, ids, query, block_size)
    position, lines = 0, h.text.split(b"\n")
    for run in runs:
        assert run.start == position
        for column, sign in enumerate(run.signs, run.column):
            byte = (lines[run.line] + b"\n")[column]
            assert sign == {0: "·", 10: "↵"}.get(byte, chr(byte))
            assert run.kind == ("query" if position == query else kinds[position])
            position += 1
    assert position == 512


def test_a_selected_run_stays_in_its_block(h):
    """Two listed neighbours are two runs, or the margin could not name the second."""
    runs = pictures.text_runs(h.text, [18, 20, 21, 24], 385, 16)
    selected = [run for run in runs if run.kind == "selected"]
    assert all(run.start // 16 == (run.start + len(run.signs) - 1) // 16 for run in selected)
    assert {run.start // 16 for run in selected} == {18, 20, 21}


def test_the_text_picture_names_its_blocks_beside_the_lines(h):
    drawn = pictures.draw_text(385, 4, 3).svg()
    assert all(f">← {told}<" in drawn for told in ("18", "18, 20", "20–21, 24"))


@pytest.mark.parametrize(
    ("ids", "told"), [([], ""), ([4], "4"), ([0, 1], "0–1"), ([0, 2, 3, 4, 9], "0, 2–4, 9")]
)
def test_ranges(ids, told):
    assert pictures.ranges(ids) == told


@pytest.mark.parametrize(
    "draw",
    [
        pictures.draw_text,
        pictures.draw_masks,
        pictures.draw_window,
        pictures.draw_traffic,
        pictures.draw_pairs,
        lambda: pictures.draw_text(0, 1, 0),
        lambda: pictures.draw_text(511, 12, 1, block_size=64),
        lambda: pictures.draw_gather([2, 0, 5], 4, 11, 3),
    ],
    ids=["text", "masks", "window", "traffic", "pairs", "first query", "last query", "gather"],
)
def test_pictures_are_small(draw):
    assert len(draw().png()) < 60_000


def test_the_panel_says_what_the_pure_function_says():
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(385, 4, 3)
    before = panel.picture
    assert panel.set(query=40, top_n=2, group=1) == pictures.sentence(40, 2, 1)
    assert panel.picture != before
    assert "lists the blocks 0, 1: " in panel.set(query=31)
    assert "32 of the 32 keys" in panel.sentence


def test_a_longer_list_is_greyed_out_while_there_is_one_block():
    panel = pictures.explore()
    for query, disabled in ((15, True), (16, False)):
        panel.set(query=query)
        assert panel.controls["top_n"].disabled is disabled
        same = pictures.sentence(query, 1, 3) == pictures.sentence(query, 12, 3)
        assert same is disabled


def test_the_list_of_a_query_is_its_row_of_all_lists(h):
    mass = pictures.group_mass(h, 16)
    for query, top_n, group in ((0, 3, 0), (100, 12, 2), (511, 1, 3)):
        row = pictures.true_lists(mass, 16, top_n)[0, query, group]
        assert pictures.list_of(query, top_n, group) == row[row >= 0].tolist()


# -- the solutions compute what the operators do --


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", [0, 3, 6, 9])
def test_tokens_of_list_is_a_row_of_the_mask(position, causal):
    ids = [2, -1, 0, 7]
    mask = dense_mask(torch.tensor(ids).expand(1, 10, 1, 4), 10, block_size=4, causal=causal)[
        0, position, 0
    ]
    tokens = solutions.tokens_of_list(ids, position, 10, 4, causal)
    assert sorted(tokens) == mask.nonzero().flatten().tolist()
    assert len(tokens) == len(set(tokens))


@pytest.mark.parametrize("shape", [(7, 7, 3), (2, 9, 4), (1, 5, 1), (4, 6, 20)], ids=str)
def test_window_mask_is_what_the_operator_shows(shape):
    N, M, w = shape
    q, k = torch.ones(1, N, 1, 4), torch.ones(1, M, 1, 4)
    # [N, M]
    weights = ops.sliding_window_attention(q, k, torch.eye(M)[None, :, None], window_size=w)[
        0, :, 0
    ]
    assert torch.equal(solutions.window_mask(N, M, w), weights > 0)


@pytest.mark.parametrize("shape", [(3, 11, 6, 2), (11, 11, 3, 1), (1, 9, 4, 4)], ids=str)
def test_the_built_operators_are_ours(shape):
    N, M, HQ, H = shape
    generator = torch.Generator().manual_seed(M)
    q, k, v = (torch.randn(s, generator=generator) for s in ((N, HQ, 8), (M, H, 8), (M, H, 5)))
    # distinct, from -1 to 3
    block_indices = torch.rand(N, H, 5, generator=generator).argsort(-1)[..., :3] - 1
    block_indices[0] = -1
    o = solutions.selected_attention(q, k, v, block_indices, 4)
    given = (x[None] for x in (q, k, v, block_indices))
    expected = ops.selected_attention(*given, block_size=4, backend="reference")
    torch.testing.assert_close(o, expected[0])
    assert (o[0] == 0).all()
    o = solutions.window_attention(q, k, v, 3)
    given = (x[None] for x in (q, k, v))
    torch.testing.assert_close(o, ops.sliding_window_attention(*given, window_size=3)[0])


def test_a_wrong_window_is_drawn():
    exercise = chapter_exercises("selected_attention")["window_mask"]
    one_too_wide = next(m for m in exercise.misconceptions if m.name == "a window of w + 1")
    picture = judge(exercise, one_too_wide.wrong).picture
    assert picture.finding == (
        "A window of 3: the query at position 3 sees keys 0, 1, 2, 3 instead of keys 1, 2, 3"
    )


@pytest.mark.parametrize(
    ("keys", "told"), [([], "no key"), ([0], "key 0"), ([1, 2], "keys 1, 2")], ids=str
)
def test_keys_in_words(keys, told):
    assert solutions._keys(keys) == told


def test_a_sorted_list_is_told_from_other_tokens():
    exercise = chapter_exercises("selected_attention")["tokens_of_list"]
    found = judge(exercise, lambda ids, *rest: sorted(exercise.solution(ids, *rest)))
    assert found.misconception == "sorting the positions"
    assert found.picture.finding.endswith("the list [2, 0]: the right tokens, in another order")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tokens_of_list", "window_mask"])
def test_every_known_mistake_can_be_drawn(name):
    exercise = chapter_exercises("selected_attention")[name]
    for known in exercise.misconceptions:
        picture = judge(exercise, known.wrong).picture
        assert picture is not None, known.name
        assert len(picture.png()) < 60_000
    assert judge(exercise, exercise.solution).picture is None


# -- answers as a reader writes them --


def whole_blocks(ids, position, M, block_size, causal):
    tokens = []
    for i in ids:
        if i >= 0 and i * block_size < (position + 1 if causal else M):
            tokens += range(i * block_size, (i + 1) * block_size)
    return tokens


def product_with_the_mask(x, block_id, num_visible, block_size):
    offset = block_id * block_size + torch.arange(block_size)
    is_seen = (offset >= 0) & (offset < num_visible)
    return x[offset.clamp(0, len(x) - 1)] * is_seen[:, None], is_seen


def half_a_guard(x, block_id, num_visible, block_size):
    offset = block_id * block_size + torch.arange(block_size)
    is_seen = offset < num_visible
    tile = x[offset.clamp(max=len(x) - 1)]
    tile[~is_seen] = 0
    return tile, is_seen


def sliced(N, M, window_size):
    mask = torch.zeros(N, M, dtype=torch.bool)
    for n in range(N):
        position = M - N + n
        mask[n, position - window_size + 1 : position + 1] = True
    return mask


def along_the_lists(
    *, first=1, before=lambda ids: ids, heads=None, kv=lambda h: h, is_seen=None, scale=None,
):  # fmt: skip
    """`selected_attention` as a reader loops, with slips in it."""

    def selected_attention(q, k, v, block_indices, block_size):
        (N, HQ, D), (M, H, DV) = q.shape, v.shape
        G, o = HQ // H, torch.zeros(N, HQ, DV)
        for n, h in itertools.product(range(N), range(H)):
            tokens, position = [], M - N + n
            for i in before(block_indices[n, h].tolist()):
                block = range(i * block_size, (i + 1) * block_size)
                see = is_seen or (lambda i, t, position, block: i >= 0 and t <= position)
                tokens += [t for t in block if see(i, t, position + first - 1, block) and t < M]
            if not tokens:
                continue
            group = heads(h, H) if heads else slice(h * G, (h + 1) * G)
            s = q[n, group] @ k[tokens, kv(h)].T * (D**-0.5 if scale is None else scale(D, DV))
            o[n, group] = torch.softmax(s, -1) @ v[tokens, kv(h)]
        return o

    return selected_attention


def hidden_by_their_scores(q, k, v, block_indices, block_size):
    """Loads every slot, hides scores; one softmax per query and KV head."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    o = torch.zeros(N, HQ, DV)
    for n, h in itertools.product(range(N), range(H)):
        group = slice(h * HQ // H, (h + 1) * HQ // H)
        tokens = (block_indices[n, h, :, None] * block_size + torch.arange(block_size)).flatten()
        hidden = (tokens < 0) | (tokens > M - N + n)
        tokens = tokens.clamp(0, M - 1)
        scores = (q[n, group] @ k[tokens, h].T * D**-0.5).masked_fill(hidden, -torch.inf)
        o[n, group] = torch.softmax(scores, -1).nan_to_num() @ v[tokens, h]
    return o


def a_mask_of_the_text(q, k, v, block_indices, block_size):
    """Dense attention under a mask that is written slot by slot."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    o = torch.zeros(N, HQ, DV)
    for n, h, g in itertools.product(range(N), range(H), range(HQ // H)):
        seen = torch.zeros(M, dtype=torch.bool)
        for i in block_indices[n, h].tolist():
            if i >= 0:
                seen[i * block_size : (i + 1) * block_size] = True
        seen[M - N + n + 1 :] = False
        s = (k[:, h] @ q[n, h * (HQ // H) + g] * D**-0.5).masked_fill(~seen, -torch.inf)
        o[n, h * (HQ // H) + g] = torch.softmax(s, 0).nan_to_num() @ v[:, h]
    return o


def windowed(slip="", wired=lambda x, G: x.repeat_interleave(G, 1)):
    """`window_attention` query by query."""

    def window_attention(q, k, v, window_size):
        (N, HQ, D), (M, H, _) = q.shape, k.shape
        keys, values = (wired(x, HQ // H) for x in (k, v))
        rows = []
        for n in range(N):
            t = n if slip == "first" else M - N + n
            first = max(0, t - window_size + (slip != "w + 1"))
            first = t // window_size * window_size if slip == "block" else first
            seen = slice(first, t + 1)
            s = torch.einsum("hd,mhd->hm", q[n], keys[seen])
            s = s * {"scale": 1.0, "1/D": 1 / D, "DV": v.shape[-1] ** -0.5}.get(slip, D**-0.5)
            rows.append(torch.einsum("hm,mhd->hd", torch.softmax(s, -1), values[seen]))
        return torch.stack(rows)

    return window_attention


def tokens_by(guard, end):
    """`tokens_of_list` with the reader's own guard and end of a block."""

    def tokens_of_list(ids, position, M, block_size, causal):
        tokens, seen = [], position + 1 if causal else M
        for i in ids:
            if guard(i, i * block_size, seen):
                tokens += range(i * block_size, end(i * block_size, block_size, seen))
        return tokens

    return tokens_of_list


def listed(i, start, seen):
    return i >= 0


def begun(i, start, seen):
    return i >= 0 and start < seen


def cut(start, block_size, seen):
    return min(start + block_size, seen)


def uncut(start, block_size, seen):
    return start + block_size


def load_by(is_seen, hide):
    """`load_block` with the reader's own mask, and what becomes of the rows."""

    def load_block(x, block_id, num_visible, block_size):
        offset = block_id * block_size + torch.arange(block_size)
        seen = is_seen(offset, num_visible)
        return hide(x, offset, seen)

    return load_block


def real(offset, num_visible):
    return (offset >= 0) & (offset < num_visible)


def filled(x, offset, seen):
    tile = torch.zeros(len(offset), x.shape[1])
    tile[seen] = x[offset[seen]].detach()
    return tile, seen


def nearest(x, offset):
    """Rows that exist, for positions that may not."""
    return x[offset.clamp(0, len(x) - 1)]


def a_short_tile(x, block_id, num_visible, block_size):
    start = max(block_id * block_size, 0)
    end = min(start + block_size, num_visible) if block_id >= 0 else start
    return x[start:end], real(block_id * block_size + torch.arange(block_size), num_visible)


def no_block_zero(x, block_id, num_visible, block_size):
    if block_id <= 0:
        return torch.zeros(block_size, x.shape[1]), torch.zeros(block_size, dtype=torch.bool)
    return load_by(real, filled)(x, block_id, num_visible, block_size)


def none_for_minus_one(x, block_id, num_visible, block_size):
    if block_id >= 0:
        return load_by(real, filled)(x, block_id, num_visible, block_size)


def zeros_in_the_input(x, block_id, num_visible, block_size):
    x[num_visible:] = 0
    return load_by(real, filled)(x, block_id, num_visible, block_size)


def window_by(compare):
    def window_mask(N, M, window_size):
        return compare(torch.arange(M - N, M)[:, None], torch.arange(M), window_size)

    return window_mask


def short_both(x, block_id, num_visible, block_size):
    """The likeliest: a slice, and as many `True`."""
    if block_id < 0:
        tile = x[:0]
    else:
        tile = x[block_id * block_size : min((block_id + 1) * block_size, num_visible)]
    return tile, torch.ones(len(tile), dtype=torch.bool)


COLUMNS = "laying the mask along the columns"
MISTAKES = {
    "whole blocks": (
        "tokens_of_list",
        whole_blocks,
        ("showing all of a block that the query stands in", "running past the last key"),
    ),
    "no cut at all": (
        "tokens_of_list",
        tokens_by(listed, uncut),
        "taking every block whole, wherever it lies",
    ),
    "never causal": (
        "tokens_of_list",
        lambda ids, position, M, BS, causal: solutions.tokens_of_list(ids, position, M, BS, False),
        "never looking at `causal`",
    ),
    "range to num_visible + 1": (
        "tokens_of_list",
        tokens_by(begun, lambda start, BS, seen: min(start + BS, seen + 1)),
        "showing one key too many",
    ),
    "ids.clamp": (
        "tokens_of_list",
        lambda ids, *rest: solutions.tokens_of_list([max(i, 0) for i in ids], *rest),
        "taking an empty slot for block 0",
    ),
    "whole blocks only": (
        "tokens_of_list",
        lambda ids, position, M, BS, causal: [
            t
            for i in ids
            if 0 <= i < (position + 1 if causal else M) // BS
            for t in range(i * BS, i * BS + BS)
        ],
        "keeping only blocks that are visible as a whole",
    ),
    "ids": (
        "tokens_of_list",
        lambda ids, *rest: [i for i in ids if i >= 0],
        "returning ids in place of tokens",
    ),
    "ids of the past": (
        "tokens_of_list",
        lambda ids, position, M, BS, causal: [
            i for i in ids if i >= 0 and i * BS < (position + 1 if causal else M)
        ],
        "returning ids in place of tokens",
    ),
    "product": ("load_block", product_with_the_mask, "multiplying by the mask"),
    "half a guard": ("load_block", half_a_guard, "comparing with num_visible only"),
    "half a guard, clamped": (
        "load_block",
        load_by(
            lambda offset, seen: offset < seen,
            lambda x, offset, seen: (
                x[offset.clamp(0, len(x) - 1)].masked_fill(~seen[:, None], 0),
                seen,
            ),
        ),
        "comparing with num_visible only",
    ),
    "<=": (
        "load_block",
        load_by(lambda offset, seen: (offset >= 0) & (offset <= seen), filled),
        "loading one row too many",
    ),
    "block <= 0": ("load_block", no_block_zero, "taking id 0 for an empty slot"),
    "None for -1": ("load_block", none_for_minus_one, "returning no tile for an empty slot"),
    "short tile": ("load_block", a_short_tile, "making a tile with fewer rows"),
    "row 0": (
        "load_block",
        load_by(real, lambda x, offset, seen: (x[torch.where(seen, offset, 0)], seen)),
        "leaving row 0 in the tile where nothing is seen",
    ),
    "all seen": (
        "load_block",
        load_by(real, lambda x, offset, seen: (filled(x, offset, seen)[0], seen | True)),
        "calling every row of the tile real",
    ),
    "float mask": (
        "load_block",
        load_by(real, lambda x, offset, seen: (filled(x, offset, seen)[0], seen.float())),
        "returning numbers where a boolean mask is asked for",
    ),
    "columns": (
        "load_block",
        load_by(real, lambda x, offset, seen: (nearest(x, offset).masked_fill(~seen, 0), seen)),
        COLUMNS,
    ),
    "columns, torch.where": (
        "load_block",
        load_by(real, lambda x, offset, seen: (torch.where(seen, nearest(x, offset), 0), seen)),
        COLUMNS,
    ),
    "columns, row 0": (
        "load_block",
        load_by(
            real, lambda x, offset, seen: (x[torch.where(seen, offset, 0)].where(seen, 0), seen)
        ),
        COLUMNS,
    ),
    "a slice": (
        "load_block",
        lambda x, block_id, num_visible, block_size: x[
            block_id * block_size : (block_id + 1) * block_size
        ],
        "returning the tile alone",
    ),
    "a slice up to num_visible": (
        "load_block",
        lambda x, block_id, num_visible, block_size: x[
            block_id * block_size : min((block_id + 1) * block_size, num_visible)
        ],
        "returning the tile alone",
    ),
    "tile alone": (
        "load_block",
        load_by(real, lambda x, offset, seen: filled(x, offset, seen)[0]),
        "returning the tile alone",
    ),
    "input overwritten": (
        "load_block",
        zeros_in_the_input,
        "writing into the tensor that you were given",
    ),
    "slice": ("window_mask", sliced, "a slice that begins below 0"),
    "transposed": (
        "window_mask",
        window_by(lambda p, m, w: ((m <= p) & (m > p - w)).T),
        "giving the queries columns, and the keys rows",
    ),
    "or": (
        "window_mask",
        window_by(lambda p, m, w: (m <= p) | (m > p - w)),
        "joining the two ends of the window with `or`",
    ),
    "N - M": (
        "window_mask",
        lambda N, M, w: torch.ones(N, M).tril(N - M).triu(N - M - w + 1).bool(),
        "taking N − M for M − N",
    ),
    "float window": (
        "window_mask",
        window_by(lambda p, m, w: torch.where((m <= p) & (m > p - w), 1.0, 0.0)),
        "returning numbers where a boolean mask is asked for",
    ),
    "short tile and mask": ("load_block", short_both, "making a tile with fewer rows"),
    "safe index, product": (
        "load_block",
        load_by(real, lambda x, o, seen: (x[torch.where(seen, o, 0)] * seen[:, None], seen)),
        "multiplying by the mask",
    ),
    "-1 is 0": (
        "load_block",
        lambda x, i, *rest: solutions.load_block(x, max(i, 0), *rest),
        "taking an empty slot for block 0",
    ),
    "tokens > 0": (
        "load_block",
        load_by(lambda offset, seen: (offset > 0) & (offset < seen), filled),
        "hiding row 0",
    ),
    "inverted": (
        "load_block",
        load_by(real, lambda x, offset, seen: (filled(x, offset, seen)[0], ~seen)),
        "a mask that is True where nothing is seen",
    ),
    "no scale": (
        "selected_attention",
        along_the_lists(scale=lambda D, DV: 1.0),
        "leaving out the scale",
    ),
    "1/D": (
        "selected_attention",
        along_the_lists(scale=lambda D, DV: 1 / D),
        "dividing by D where √D is meant",
    ),
    "DV": (
        "selected_attention",
        along_the_lists(scale=lambda D, DV: DV**-0.5),
        "a scale of the values' width",
    ),
    "h::H": (
        "selected_attention",
        along_the_lists(heads=lambda h, H: slice(h, None, H)),
        "dealing out the query heads in turn",
    ),
    "head 0": (
        "selected_attention",
        along_the_lists(kv=lambda h: 0),
        "reading the keys and values of KV head 0 for every group",
    ),
    "max(i, 0)": (
        "selected_attention",
        along_the_lists(before=lambda ids: [max(i, 0) for i in ids]),
        "taking an empty slot for block 0",
    ),
    "set(ids)": (
        "selected_attention",
        along_the_lists(before=set),
        "counting a block once that is listed twice",
    ),
    "a mask": (
        "selected_attention",
        a_mask_of_the_text,
        "counting a block once that is listed twice",
    ),
    "until -1": (
        "selected_attention",
        along_the_lists(before=lambda ids: itertools.takewhile(lambda i: i >= 0, ids)),
        "stopping at the first empty slot",
    ),
    "-1 in a slice": (
        "selected_attention",
        along_the_lists(is_seen=lambda i, t, position, block: t <= position),
        "letting -1 wrap round to the end of the text",
    ),
    "i > 0": (
        "selected_attention",
        along_the_lists(is_seen=lambda i, t, position, block: i > 0 and t <= position),
        "taking id 0 for an empty slot",
    ),
    "t > 0": (
        "selected_attention",
        along_the_lists(is_seen=lambda i, t, position, block: 0 < t <= position),
        "hiding token 0",
    ),
    "whole blocks, built": (
        "selected_attention",
        along_the_lists(is_seen=lambda i, t, position, block: i >= 0 and block[0] <= position),
        "leaving out the cut inside the last block",
    ),
    "n + 2": (
        "selected_attention",
        along_the_lists(first=2),
        "letting a query see one key too many",
    ),
    "0 · NaN": ("selected_attention", hidden_by_their_scores, "a hidden NaN times 0"),
    "window w + 1": ("window_attention", windowed("w + 1"), "a window of w + 1"),
    "window, no scale": ("window_attention", windowed("scale"), "leaving out the scale"),
    "window, 1/D": ("window_attention", windowed("1/D"), "dividing by D where √D is meant"),
    "window, DV": ("window_attention", windowed("DV"), "a scale of the values' width"),
    "window, a block": ("window_attention", windowed("block"), "a block in place of a window"),
    "window, no graph": (
        "window_attention",
        lambda *given: windowed()(*given).detach(),
        "an output that autograd cannot follow",
    ),
    "window, repeat": (
        "window_attention",
        windowed(wired=lambda x, G: x.repeat(1, G, 1)),
        "dealing out the query heads in turn",
    ),
    "window, first N": (
        "window_attention",
        windowed("first"),
        "taking the queries for the first N positions",
    ),
}


@pytest.mark.parametrize(("name", "attempt", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_readers_mistake_is_named(name, attempt, named):
    """None of these is written like the misconception that names it."""
    verdict = judge(chapter_exercises("selected_attention")[name], attempt)
    assert verdict.misconceptions == (named if isinstance(named, tuple) else (named,))


def test_no_tile_is_not_taken_for_a_missing_return():
    verdict = judge(chapter_exercises("selected_attention")["load_block"], none_for_minus_one)
    assert "It returned None." in verdict.text
    assert "return statement" not in verdict.text


def test_a_block_listed_twice_counts_twice():
    q, k, v = (torch.randn(4, 1, 2, generator=torch.Generator().manual_seed(i)) for i in range(3))
    lists = torch.tensor([0, 1, 1]).expand(4, 1, 3)
    o = solutions.selected_attention(q, k, v, lists, 2)
    twice = torch.tensor([0, 1, 2, 3, 2, 3])  # the keys of both, as they are listed
    scores = (k[twice, 0] @ q[3, 0]) * 2**-0.5
    torch.testing.assert_close(o[3, 0], torch.softmax(scores, 0) @ v[twice, 0])


# -- the kernel --


def cell(start: str) -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (s for c in cells if (s := "".join(c["source"])).startswith(start))
    return found


def in_a_cell(source: str):
    """`sum_of_list` as a cell defines it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"tl": tl, "triton": triton}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace["sum_of_list"]


def mended(line: str, old: str = "is_seen = tokens < M"):
    """The chapter's kernel with one line changed."""
    given = cell("def sum_of_list")
    assert old in given
    return in_a_cell(given.replace(old, line))


FUTURE_TOKENS, EMPTY_SLOT = (
    "loading tokens of the query's future",
    "loading an empty slot's block",
)
SUMS = {
    "half mended: the future": ("is_seen = tokens <= position", EMPTY_SLOT),
    "half mended: the empty slot": ("is_seen = (tokens < M) & (tokens >= 0)", FUTURE_TOKENS),
    "<": ("is_seen = (tokens < position) & (block_id >= 0)", "hiding the query's own position"),
    "> 0": ("is_seen = (tokens <= position) & (block_id > 0)", "taking id 0 for an empty slot"),
    "where the block begins": (
        "is_seen = (tokens < M) & (block_id >= 0) & (block_id * BS <= position)",
        "loading all of a block that the query stands in",
    ),
    "the whole block": (
        "is_seen = (tokens >= 0) & (tokens < M) & (block_id * BS + BS - 1 <= position)",
        "keeping only blocks that are visible as a whole",
    ),
    "or": ("is_seen = (tokens <= position) | (block_id >= 0)", "joining the two comparisons"),
    "one too many": (
        "is_seen = (tokens <= position + 1) & (block_id >= 0)",
        "showing one key too many",
    ),
    "no upper end": ("is_seen = block_id + 0 * tokens >= 0", FUTURE_TOKENS),
}


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(("line", "named"), SUMS.values(), ids=SUMS)
def test_a_half_mended_kernel_is_named(line, named):
    (found,) = judge(KNOWN["sum_of_list"], mended(line)).misconceptions
    assert found.startswith(named)


@needs_triton
@pytest.mark.parametrize(
    "line",
    [
        "is_seen = (tokens >= 0) & (tokens <= position)",
        "is_seen = (block_id > -1) & (tokens < position + 1) & (tokens < M)",
        "is_seen = (0 <= tokens) & (position >= tokens)",
    ],
)
def test_other_ways_to_mend_the_kernel(line):
    assert judge(KNOWN["sum_of_list"], mended(line)).outcome == "right"


@needs_triton
@pytest.mark.parametrize(
    "line",
    [
        "is_seen = 0 <= tokens <= position",
        "is_seen = (tokens <= position) and (block_id >= 0)",
        "is_seen = tokens <= position & block_id >= 0",
    ],
)
def test_tiles_that_python_joins_are_told_by_their_cause(line):
    verdict = judge(KNOWN["sum_of_list"], mended(line))
    assert (verdict.outcome, verdict.misconceptions) == ("wrong", ())
    assert "`(...) & (...)`" in verdict.text


@needs_triton
def test_leaving_the_loop_at_an_empty_slot_is_named():
    attempt = mended(
        "if block_id < 0:\n                break\n            is_seen = tokens <= position"
    )
    verdict = judge(KNOWN["sum_of_list"], attempt)
    assert verdict.misconceptions == ("stopping at the first empty slot",)


@needs_triton
def test_the_kernel_in_the_cell_is_not_attempted_until_it_is_edited():
    e, given = KNOWN["sum_of_list"], cell("def sum_of_list")
    assert judge(e, in_a_cell(given)).outcome == "not attempted"
    assert judge(e, in_a_cell(given.replace("# [BS]", "# positions"))).outcome == "not attempted"


def test_the_kernel_that_is_given_differs_from_the_solution_in_one_line():
    given = {line.strip() for line in cell("def sum_of_list").splitlines()[1:] if line.strip()}
    ours = inspect.getsource(solutions.sum_of_list).splitlines()[2:]
    ours = {line.strip() for line in ours if line.strip()}
    assert given - ours == {"is_seen = tokens < M"}
    (added,) = ours - given
    assert added.startswith("is_seen = ")


@needs_triton
@pytest.mark.parametrize("attempt", [lambda: lambda V: None, lambda: 3], ids=["bare", "a number"])
def test_what_is_no_kernel_is_told(attempt):
    assert "@triton.jit" in judge(KNOWN["sum_of_list"], attempt).text


@needs_triton
def test_a_kernel_that_is_not_returned_is_told():
    def forgotten():
        def kernel(V):
            return V

    verdict = judge(KNOWN["sum_of_list"], forgotten)
    assert verdict.outcome == "wrong"
    assert "return kernel" in verdict.text


# -- what the chapter says --


def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"\s+", " ", text)


MAIN_WAY = ("selected_attention", "window_attention")


def test_the_minutes_are_told():
    required = sum(KNOWN[name].minutes for name in MAIN_WAY)
    assert f"{required} of them for the two builds" in prose()


@pytest.mark.parametrize("name", ["selected_attention", "window_attention"])
def test_a_build_begins_with_an_empty_body(name):
    namespace = {"torch": torch}
    exec(cell(f"def {name}"), namespace)
    assert judge(KNOWN[name], namespace[name]).outcome == "not attempted"


def test_a_loop_is_as_good_as_one_gather():
    assert judge(KNOWN["selected_attention"], along_the_lists()).outcome == "right"
    assert judge(KNOWN["window_attention"], windowed()).outcome == "right"


def one_query(q, k, v, block_indices, block_size):
    """The first two stages: one query and one head, which sees all that it lists."""
    rows = [
        t for i in block_indices[0, 0].tolist() for t in range(i * block_size, (i + 1) * block_size)
    ]
    weights = torch.softmax(q[0] @ k[rows, 0].T * q.shape[-1] ** -0.5, -1)
    return (weights @ v[rows, 0])[None]


def first_head(q, k, v, block_indices, block_size):
    """All but the groups."""
    full = along_the_lists()(q[:, :1], k[:, :1], v[:, :1], block_indices[:, :1], block_size)
    return full.expand(-1, q.shape[1], -1)


@pytest.mark.parametrize(("attempt", "held"), [(one_query, 2), (first_head, 7)])
def test_a_half_done_function_holds_its_stages(attempt, held):
    verdict = judge(KNOWN["selected_attention"], attempt)
    assert (verdict.outcome == "right", verdict.held) == (False, held)


def test_whoever_cuts_the_graph_holds_all_but_the_gradients():
    verdict = judge(
        KNOWN["selected_attention"], lambda *given: solutions.selected_attention(*given).detach()
    )
    assert verdict.held == 8
    assert verdict.misconceptions == ("an output that autograd cannot follow",)


@pytest.mark.parametrize("build", [along_the_lists(), windowed()], ids=["lists", "window"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_does_not_arrive_is_told_by_its_argument(build, name):
    def attempt(q, k, v, *rest):
        given = {"q": q, "k": k, "v": v}
        return build(*(given | {name: given[name].detach()}).values(), *rest)

    verdict = judge(KNOWN[build.__name__], attempt)
    assert verdict.held == len(KNOWN[build.__name__].stages) - 1
    assert f"No gradient reached `{name}`" in verdict.text
    assert "return statement" not in verdict.text


def test_our_operator_may_not_be_called():
    def attempt(q, k, v, ids, block_size):
        return ops.selected_attention(*(x[None] for x in (q, k, v, ids)), block_size=block_size)[0]

    assert "the course's own function: " in judge(KNOWN["selected_attention"], attempt).text


NEEDED = {"num_visible", "position", "M", "BS", "block_size", "block_id", "offset", "tokens"}


def test_the_cells_leave_no_names_that_a_reader_could_forget_to_set():
    """A name that an answer lacks must raise, and not be found among the chapter's own."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    functions = (ast.FunctionDef, ast.GeneratorExp, ast.ListComp)  # their names stay inside
    open_nodes, left = [*ast.parse(code).body], set()
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            left.add(node.id)
        if not isinstance(node, functions):
            open_nodes += ast.iter_child_nodes(node)
    assert "listed" in left
    assert not NEEDED & left


@needs_triton
def test_torch_in_the_kernel_is_answered_by_what_joins_tiles():
    line = "is_seen = torch.logical_and(tokens <= position, block_id >= 0)"
    verdict = judge(KNOWN["sum_of_list"], mended(line))
    assert "functions of torch" in verdict.text
    assert "`(...) & (...)`" in verdict.text


@pytest.mark.parametrize(
    ("name", "guess", "told"),
    [
        ("keys_of_query_9", 4, "Block 2 begins at token 8"),
        ("keys_of_query_9", 7, "token 10"),
        ("tokens_of_minus_one", "error", "PyTorch raises no error"),
        ("tokens_of_minus_one", "IndexError", "PyTorch raises no error"),
        ("tokens_of_minus_one", "8 to 11", "These are the right tokens"),
        ("listed_share", 25, "Do you mean 25 %?"),
        ("tokens_of_minus_one", [8, 9, 10, 11], "it is [8, 9, 10, 11]: exactly right"),
        ("lists_that_agree", 1, "You said 1, it is 3"),
    ],
)
def test_a_guess_is_answered(name, guess, told):
    answers = {
        "keys_of_query_9": 6,
        "tokens_of_minus_one": [8, 9, 10, 11],
        "lists_that_agree": 3,
        "listed_share": 0.21,
    }
    predict(name, guess)
    assert told in reveal(name, answers[name]).text


def test_the_list_saves_what_the_text_says():
    listed, visible = costs.selected_keys(4096, 4096), costs.visible_pairs(4096, 4096)
    assert f"{listed / 1e6:.2f} of 16.78 million scores, {4096**2 / listed:.1f} times" in prose()
    assert f"saves a factor of {visible / listed:.1f}" in prose()
    later = costs.visible_pairs(65_536, 65_536) / costs.selected_keys(65_536, 65_536)
    assert f"65,536 tokens, the factor is {later:.0f}" in prose()


def test_the_answer_about_the_explorer_holds():
    sizes = {"top_n": 4, "num_initial": 0, "num_local": 1}
    start = mask_explorer.Settings(data=mask_explorer.REAL, group=3, query=385, **sizes)
    _, found = mask_explorer.explore(start)
    assert found.listed == [18, 19, 20, 24], "not 21, which is among the best"
    assert {i.why for i in found.items if i.block is not None} == {"own", "score"}
    loads = found.keys["selected"]
    assert next(t for t in range(512) if loads[t] < t + 1) == 64 == 4 * 16


def test_the_bytes_that_the_text_tells():
    """At 65,536 tokens, lists of four blocks of 16 beside dense tiles of 64, four heads a group."""
    N, sizes = 65_536, {"D": 32, "HQ": 4, "H": 1}
    lists = costs.selected_attention(N, N, block_size=16, top_n=4, **sizes).bytes
    assert f"{costs.tiled_attention(N, N, **sizes).bytes / lists:.1f}" == "8.5"
    assert "dense tiles move 8.5 times as much" in prose()
    settings = {"top_n": 4, "num_initial": 0, "num_local": 1, "group": 3, "query": 385}
    start = mask_explorer.Settings(data=mask_explorer.REAL, **settings)
    said = mask_explorer.sentence(start, "selected")
    assert "move 3.61 MiB (dense tiles: 552 KiB" in said
    assert "3.61 MiB through the lists, and 552 KiB in dense tiles" in prose()
    assert "finds 3 of the best 4 blocks" in mask_explorer.finding(start, "selected")
