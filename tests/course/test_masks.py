"""What the mask explorer shows: masks by loops, numbers against `costs`, the choice of blocks
against the chapters' modules."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from nsa_tutorial.course import costs, mask_report
from nsa_tutorial.course import masks as maker
from nsa_tutorial.course.masks import BRANCHES, SYNTHETIC, Settings
from nsa_tutorial.sparse import selected_attention

SETTINGS = {
    "as shipped": Settings(N=200),
    "ragged, large blocks": Settings(
        N=77, block_size=32, top_n=2, num_initial=0, num_local=1, window=5, length=8, stride=4
    ),
    "no forced block": Settings(
        N=90, block_size=8, top_n=3, num_initial=0, num_local=0, window=1, length=32, stride=8
    ),
    "summaries longer than the text": Settings(
        N=20, block_size=4, top_n=2, num_local=1, window=20, length=16, stride=4
    ),
    "everything listed": Settings(N=64, block_size=16, top_n=9, window=64, length=4, stride=4),
}
shapes = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def scores_of(settings: Settings, seed: int = 0) -> np.ndarray:
    """Random importances with many ties."""
    return np.random.default_rng(seed).integers(0, 4, size=(settings.N, settings.NB)).astype(float)


# -- settings --


def test_settings_in_range_stay_as_they_are():
    assert Settings().adjusted == ()
    assert Settings(N=512, query=511, top_n=3, num_initial=1, num_local=2).adjusted == ()


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"N": 4000}, {"N": 512}),
        ({"N": 0}, {"N": 16, "query": 15, "window": 16}),
        ({"query": -3}, {"query": 0}),
        ({"N": 100, "query": 100}, {"query": 99}),
        ({"block_size": 24}, {"block_size": 16}),
        ({"block_size": 1}, {"block_size": 4, "stride": 4}),
        ({"top_n": 0}, {"top_n": 1, "num_local": 1, "num_initial": 0}),
        ({"top_n": 4, "num_initial": 3, "num_local": 2}, {"num_initial": 2, "num_local": 2}),
        ({"num_local": 99}, {"num_local": 7, "num_initial": 0}),
        ({"N": 64, "window": 65}, {"window": 64}),
        ({"length": 8, "stride": 16}, {"stride": 8}),
        ({"length": 64, "stride": 64, "block_size": 32}, {"stride": 32}),
        ({"N": 100, "length": 128}, {"length": 64}),
        ({"group": 7}, {"group": 1}),
    ],
    ids=str,
)
def test_settings_out_of_range_move_to_the_nearest_and_say_so(given, becomes):
    settings, asked = (
        Settings(**given),
        {f.name: given.get(f.name, f.default) for f in fields(Settings) if f.init},
    )
    got = {name: getattr(settings, name) for name in asked}
    assert {name: got[name] for name in becomes} == becomes
    assert {name: got[name] for name in set(given) - set(becomes)} == {
        name: given[name] for name in set(given) - set(becomes)
    }
    moved = sorted(
        f"{name} {asked[name]} becomes {value}"
        for name, value in got.items()
        if value != asked[name]
    )
    assert sorted(settings.adjusted) == moved and moved
    assert Settings(**got).adjusted == (), "moved once, nothing is left to move"


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"N": 12.0}, TypeError, "N: expected an int"),
        ({"query": True}, TypeError, "query"),
        ({"data": "noise"}, ValueError, "data"),
    ],
    ids=str,
)
def test_settings_refuse_what_no_range_can_mend(given, error, says):
    with pytest.raises(error, match=says):
        Settings(**given)


@pytest.mark.parametrize("N", [16, 20, 512])
@pytest.mark.parametrize("top_n", [1, 2, 9])
def test_whatever_the_ranges_offer_stays_as_it_is(N, top_n):
    base = Settings(N=N, top_n=top_n)
    for name, allowed in maker.ranges(base).items():
        for value in {allowed[0], allowed[-1]}:
            # those after `name` may move with it, those before it may not
            moved = {move.split()[0] for move in replace(base, **{name: value}).adjusted}
            order = list(maker.ranges(base))
            assert all(order.index(other) > order.index(name) for other in moved), name


# -- masks, by loops --


@shapes
def test_chosen_blocks_by_a_loop(settings):
    scores, BS = scores_of(settings), settings.block_size
    listed = maker.choose_blocks(settings, scores)
    for t in range(settings.N):
        own = t // BS
        forced = {
            j for j in range(own + 1) if j < settings.num_initial or j > own - settings.num_local
        }
        others = sorted(set(range(own + 1)) - forced, key=lambda j: (-scores[t, j], j))
        expected = forced | set(others[: settings.top_n - len(forced)])
        assert set(np.flatnonzero(listed[t])) == expected
        assert len(expected) == min(settings.top_n, own + 1)


@shapes
def test_every_mask_by_a_loop(settings):
    scores = scores_of(settings, seed=1)
    masks, listed = (
        maker.branch_masks(settings, scores),
        maker.choose_blocks(settings, scores),
    )
    assert set(masks) == set(BRANCHES)
    ends = [
        first + settings.length - 1
        for first in range(0, settings.N - settings.length + 1, settings.stride)
    ]
    for t in range(settings.N):
        for key in range(settings.N):
            block, own = key // settings.block_size, t // settings.block_size
            assert masks["window"][t, key] == (t - settings.window < key <= t)
            assert masks["own block"][t, key] == (listed[t, own] and block == own and key <= t)
            assert masks["selected"][t, key] == (listed[t, block] and block != own)
            covering = [end for end in ends if end - settings.length < key <= end]
            assert masks["compressed"][t, key] == any(end <= t for end in covering)


@shapes
def test_no_mask_shows_the_future(settings):
    for mask in maker.branch_masks(settings, scores_of(settings)).values():
        assert not np.triu(mask, 1).any()


def test_importance_shares_a_summary_out_as_the_contract_says():
    # length 32, stride 16, blocks of 64: summaries 4j-1 … 4j+3 count 1, 2, 2, 2, 1 times for block
    # j.
    settings = Settings(N=256, block_size=64, length=32, stride=16)
    logits = np.random.default_rng(0).normal(size=(3, 256, 256))
    got, t = maker.importance(settings, logits), 255
    expected = np.zeros(settings.NB)
    for head in logits:
        means = np.array([head[t, j * 16 : j * 16 + 32].mean() for j in range(15)])
        weights = np.exp(means) / np.exp(means).sum()
        for block in range(settings.NB):
            near = zip(range(4 * block - 1, 4 * block + 4), (1, 2, 2, 2, 1), strict=True)
            expected[block] += sum(weights[j] * times for j, times in near if 0 <= j < 15)
    np.testing.assert_allclose(got[t], expected)
    assert not got[:31].any(), "before the first summary ends, nothing is important"
    np.testing.assert_allclose(got[31:].sum(-1), 3 * 2)  # a weight of 1 per head, in two pieces


def test_equal_scores_leave_the_lower_ids():
    settings = Settings(
        N=256, block_size=16, top_n=4, num_initial=1, num_local=1, length=16, stride=16
    )
    listed = maker.choose_blocks(settings, maker.importance(settings, np.full((2, 256, 256), 0.1)))
    assert np.flatnonzero(listed[255]).tolist() == [0, 1, 2, 15]


def test_synthetic_scores_are_the_seeds():
    source = maker.source(SYNTHETIC, 300, 1)
    assert source.logits.shape == (4, 300, 300)
    assert np.array_equal(source.logits, maker.synthetic_logits(1)[:, :300, :300])
    assert not np.array_equal(source.logits, maker.source(SYNTHETIC, 300, 0).logits)
    with pytest.raises(ValueError, match="read-only"):
        source.logits[0, 0, 0] = 1


# -- lists and costs --


@shapes
def test_a_list_adds_up_to_what_the_masks_show(settings):
    scores = scores_of(settings)
    masks = maker.branch_masks(settings, scores)
    for t in (0, settings.N // 2, settings.N - 1):
        found = mask_report.report(settings, masks, t, G=3, D=10, DV=6)
        by_branch = dict.fromkeys(BRANCHES, 0)
        for item in found.items:
            by_branch[item.branch] += item.keys
            assert item.bytes == item.keys * 16 * 2
            assert item.last <= t
            if item.block is not None:
                assert (
                    item.keys
                    == item.last - item.first + 1
                    == masks[item.branch][t, item.first : item.last + 1].sum()
                )
        assert by_branch["selected"] + by_branch["own block"] == found.keys["selected"][t]
        assert by_branch["window"] == found.keys["window"][t] == min(settings.window, t + 1)
        assert (
            by_branch["compressed"]
            == found.keys["compressed"][t]
            == max((t + 1 - settings.length) // settings.stride + 1, 0)
        )
        assert [item.block for item in found.items if item.block is not None] == np.flatnonzero(
            maker.choose_blocks(settings, scores)[t]
        ).tolist()


def test_reasons_of_a_list():
    settings = Settings(N=128, block_size=16, top_n=5, num_initial=1, num_local=2, query=120)
    scores = np.zeros((128, 8))
    scores[120, [3, 5]] = 1
    found = mask_report.report(settings, maker.branch_masks(settings, scores), 120)
    whys = [(item.block, item.why) for item in found.items]
    assert whys == [
        (0, "first"),
        (3, "score"),
        (5, "score"),
        (6, "local"),
        (7, "own"),
        (None, "window"),
        (None, "summaries"),
    ]


@shapes
def test_density_counts_tokens_once(settings):
    masks = maker.branch_masks(settings, scores_of(settings))
    pairs = sum(
        any(masks[b][t, key] for b in BRANCHES if b != "compressed")
        for t in range(settings.N)
        for key in range(t + 1)
    )
    assert mask_report.report(settings, masks, 0).density == pytest.approx(
        pairs / costs.visible_pairs(settings.N, settings.N)
    )


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "no forced block"])
def test_costs_are_those_of_the_shapes(name):
    # wherever the own block is always listed, no mask is needed to know the cost
    settings = SETTINGS[name]
    found = mask_report.report(
        settings, maker.branch_masks(settings, scores_of(settings)), 0, G=4, D=24, DV=40
    )
    shape = {"N": settings.N, "M": settings.N, "D": 24, "DV": 40, "HQ": 4, "H": 1}
    assert found.branches == {
        "selected": costs.selected_attention(
            **shape, block_size=settings.block_size, top_n=settings.top_n
        ),
        "window": costs.sliding_window_attention(**shape, window_size=settings.window),
        "compressed": costs.compressed_attention(
            **shape, length=settings.length, stride=settings.stride
        ),
    }
    assert found.cost == costs.total(*found.branches.values())
    sizes = {name: getattr(settings, name) for name in ("block_size", "top_n", "length", "stride")}
    whole = costs.native_sparse_attention(**shape, **sizes, window_size=settings.window)
    assert found.choice.flops == whole.flops - found.cost.flops
    assert found.choice.bytes_written == 4 * settings.N * settings.top_n
    assert found.dense.flops == 2 * 4 * costs.visible_pairs(settings.N, settings.N) * 64


@pytest.mark.parametrize(
    ("x", "unit", "written"),
    [(0, "B", "0 B"), (999, "B", "999 B"), (1000, "B", "0.98 KiB"), (16384, "B", "16.0 KiB"),
    (2.5e9, "", "2.50 G"), (7, "", "7"),
     (99_960, "", "100 k")],
    ids=str,
)  # fmt: skip
def test_amounts(x, unit, written):
    assert mask_report.amount(x, unit) == written


def test_attention_and_the_best_blocks_by_a_loop():
    settings = Settings(N=100, block_size=8, top_n=5, query=85)
    logits = maker.source(SYNTHETIC, 100, 0).logits[:, 85, :86]
    held = np.zeros(11)
    for head in logits:
        weights = np.exp(head) / np.exp(head).sum()
        for key in range(86):
            held[key // 8] += weights[key] / len(logits)
    got = mask_report.attention_of(settings)
    np.testing.assert_allclose(np.add.reduceat(got, np.arange(0, 86, 8)), held)
    others = sorted(range(10), key=lambda block: -held[block])[:3]
    assert mask_report.best_blocks(settings) == sorted([*others, 10])
    for top_n, query, blocks in ((1, 85, 1), (2, 85, 2), (7, 85, 4), (7, 10, 2), (7, 0, 1)):
        found = mask_report.best_blocks(replace(settings, top_n=top_n, query=query))
        assert len(found) == blocks
        assert found[-1] == query // 8


@pytest.mark.parametrize(
    ("n", "noun", "written"),
    [(1, "key", "1 key"), (0, "key", "0 keys"), (2, "summary", "2 summaries")],
    ids=str,
)
def test_counts(n, noun, written):
    assert mask_report.count(n, noun) == written


def test_a_quote_ends_with_its_byte():
    assert mask_report.quote(b"a b\nc\xff", 4) == "the last byte of “a␣b↵c”"
    assert mask_report.quote(b"a b\nc\xff", 5).endswith("c·”")
    assert mask_report.quote(bytes(range(65, 91)), 20) == "the last byte of “JKLMNOPQRSTU”"


# -- against the modules of the chapters --


@shapes
def test_selected_masks_agree_with_the_oracle_of_the_kernels(settings):
    scores = scores_of(settings)
    masks, listed = (
        maker.branch_masks(settings, scores),
        maker.choose_blocks(settings, scores),
    )
    ids = np.full((settings.N, settings.NB), -1)
    for t in range(settings.N):
        mine = np.flatnonzero(listed[t])
        ids[t, : len(mine)] = mine
    oracle = selected_attention.dense_mask(
        torch.from_numpy(ids)[None, :, None], settings.N, block_size=settings.block_size
    )
    assert np.array_equal(masks["selected"] | masks["own block"], oracle[0, :, 0].numpy())


def problem(N: int, G: int = 3, D: int = 8):
    """Queries, keys and values of one group in fp64, the scores as the explorer takes them, and the
    query rows."""
    g = torch.Generator().manual_seed(N)
    q, k, v = (torch.randn(1, N, heads, D, generator=g, dtype=torch.float64) for heads in (G, 1, 1))
    logits = torch.einsum("igd,jd->gij", q[0], k[0, :, 0]) * D**-0.5
    rows = selected_attention.query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    return q, k, v, logits, rows


@shapes
def test_the_window_agrees_with_its_module(settings):
    sliding_window = pytest.importorskip("nsa_tutorial.sparse.sliding_window")
    q, k, v, _, rows = problem(settings.N)
    mask = torch.from_numpy(maker.branch_masks(settings, scores_of(settings))["window"])[
        None, :, None
    ]
    expected, _ = selected_attention.masked_attention(q, k, v, mask)
    o, _ = sliding_window.forward(q, k, v, rows, window_size=settings.window, scale=8**-0.5)
    torch.testing.assert_close(o, expected)


@shapes
def test_visible_summaries_agree_with_their_module(settings):
    compression = pytest.importorskip("nsa_tutorial.sparse.compression")
    *_, rows = problem(settings.N)
    sizes = {"length": settings.length, "stride": settings.stride}
    counted = compression.summary_rows(rows, settings.N, **sizes, cu_seqlens=None).num_visible
    assert counted.tolist() == maker.summary_visible(settings).sum(1).tolist()
    visible = torch.from_numpy(maker.summary_visible(settings))
    assert visible.shape[1] == compression.num_summaries(settings.N, **sizes)


@shapes
def test_the_choice_agrees_with_its_module(settings):
    block_selection, compression = (
        pytest.importorskip(f"nsa_tutorial.sparse.{m}") for m in ("block_selection", "compression")
    )
    q, k, _, logits, rows = problem(settings.N)
    sizes = {"length": settings.length, "stride": settings.stride}
    summaries = compression.summary_rows(rows, settings.N, **sizes, cu_seqlens=None)
    ids = block_selection.select_blocks(
        q, compression.compress(k, kind="mean", **sizes), None, rows, summaries, M=settings.N,
        top_n=settings.top_n,
        block_size=settings.block_size, **sizes, num_initial=settings.num_initial,
        num_local=settings.num_local, scale=8**-0.5,
    )  # fmt: skip
    listed = maker.choose_blocks(settings, maker.importance(settings, logits.numpy()))
    for t in range(settings.N):
        assert [i for i in ids[0, t, 0].tolist() if i >= 0] == np.flatnonzero(listed[t]).tolist()
