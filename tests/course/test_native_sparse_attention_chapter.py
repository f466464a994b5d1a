"""Chapter 08's pictures: what they compute agrees with the operators, the costs and the exercises,
and what they say with that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path

import nbformat
import pytest
import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import costs, heads
from nsa_tutorial.course.exercises import native_sparse_attention as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import native_sparse_attention as pictures
from nsa_tutorial.exact import online_softmax
from nsa_tutorial.exact.grouped_query_attention import attention

pytestmark = pytest.mark.usefixtures("one_thread")

settings = pytest.mark.parametrize(
    ("top_n", "window"), [(4, 64), (8, 16)], ids=["4 blocks, 64", "8 blocks, 16"]
)


# -- the branches --


@settings
def test_views_are_what_the_operator_gives(top_n: int, window: int) -> None:
    """Each branch alone, by gates of 1 and 0, with the blocks that the operator chooses itself."""
    real, v = heads.load(), pictures.views(top_n, window)
    sizes = {
        "block_counts": top_n,
        "block_size": 16,
        "window_size": window,
        "length": 16,
        "stride": 8,
    }
    for branch, o in enumerate(v.outputs):
        gates = [torch.full((1, 512, 16), float(branch == i)) for i in range(3)]
        assert torch.allclose(
            ops.native_sparse_attention(real.q, real.k, real.v, *gates, **sizes), o, atol=1e-5
        )
    assert torch.allclose(v.dense, attention(real.q, real.k, real.v))


@settings
@pytest.mark.parametrize("head", [0, 6, 9, 15])
def test_drawn_weights_make_the_outputs(head: int, top_n: int, window: int) -> None:
    """Weights on tokens times the tokens' values are the branch's output, spread summaries
    included."""
    v = pictures.views(top_n, window)
    values = heads.load().v[0, :, head // 4].double()
    weights = torch.from_numpy(pictures.weights_by_branch(head, top_n, window))
    for w, o in zip(weights, (*v.outputs, v.dense), strict=True):
        assert torch.allclose(w @ values, o[0, :, head].double(), atol=1e-4)
    sums = weights.sum(-1)
    assert torch.allclose(sums[1:], torch.ones(3, 512, dtype=torch.float64))
    assert torch.allclose(sums[0, 15:], torch.ones(497, dtype=torch.float64))
    assert (sums[0, :15] == 0).all()  # no summary has ended yet


# -- errors and gates --


def test_relative_error() -> None:
    dense = torch.randn(1, 20, 3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pictures.relative_error(dense, dense), torch.zeros(3))
    assert torch.allclose(pictures.relative_error(torch.zeros_like(dense), dense), torch.ones(3))
    factor = torch.tensor([1.1, 3.0, -1.0])[:, None]
    assert torch.allclose(
        pictures.relative_error(factor * dense, dense), torch.tensor([0.1, 2.0, 2.0]), atol=1e-5
    )


def test_error_by_position_averages_to_the_error() -> None:
    """For one head, squares of the curve average to the square of the head's error."""
    v = pictures.views()
    for head in (3, 13):
        one = (x[:, :, head : head + 1] for x in (v.outputs[2], v.dense))
        o, dense = one
        curve = pictures.error_by_position(o, dense)
        assert curve.square().mean().sqrt().item() == pytest.approx(
            pictures.relative_error(o, dense).item(), rel=1e-4
        )


def made(gates: Tensor) -> tuple[Tensor, Tensor]:
    """Three outputs, and what `gates [3, HQ]` make of them."""
    outputs = torch.randn(
        3, 1, 30, gates.shape[1], 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return outputs, pictures.gated(gates, outputs)


def test_fit_finds_the_gates_that_were_used() -> None:
    gates = torch.tensor(
        [[0.2, 0.0, 1.0, 0.5], [0.7, 1.0, 0.0, 0.5], [0.1, 0.4, 1.0, 0.5]], dtype=torch.float64
    )
    outputs, dense = made(gates)
    for bounded in (True, False):
        assert torch.allclose(pictures.fit_gates(outputs, dense, bounded=bounded), gates, atol=1e-9)


def test_fit_stays_in_bounds_and_is_the_best_there() -> None:
    gates = torch.tensor([[1.6, -0.4, 0.3], [-0.3, 1.2, 0.4], [0.4, 0.5, 2.0]], dtype=torch.float64)
    outputs, dense = made(gates)
    assert torch.allclose(pictures.fit_gates(outputs, dense, bounded=False), gates, atol=1e-9)
    fitted = pictures.fit_gates(outputs, dense)
    assert (fitted >= 0).all() and (fitted <= 1).all()
    best = pictures.relative_error(pictures.gated(fitted, outputs), dense)
    for tried in itertools.product(torch.linspace(0, 1, 6).tolist(), repeat=3):
        other = pictures.relative_error(
            pictures.gated(torch.tensor(tried, dtype=torch.float64), outputs), dense
        )
        assert (best <= other + 1e-12).all()


@settings
def test_best_per_token_is_nearer_than_best_per_head(top_n: int, window: int) -> None:
    v = pictures.views(top_n, window)
    per_token = pictures.relative_error(pictures.nearest_per_token(v.outputs, v.dense), v.dense)
    per_head = pictures.relative_error(
        pictures.gated(pictures.fit_gates(v.outputs, v.dense, bounded=False), v.outputs), v.dense
    )
    assert (per_token < per_head).all()


def test_best_per_token_is_exact_where_it_can_be() -> None:
    outputs, _ = made(torch.ones(3, 2, dtype=torch.float64))
    gates = torch.randn(
        3, 1, 30, 2, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    dense = (gates * outputs).sum(0)
    assert torch.allclose(pictures.nearest_per_token(outputs, dense), dense, atol=1e-5)


def test_lse_weights_merge_disjoint_keys() -> None:
    """Three sets of keys without overlap: the weights of the chapter are those of chapter 03's
    merge."""
    g = torch.Generator().manual_seed(3)
    o, lse = torch.randn(3, 1, 5, 2, 4, generator=g), torch.randn(3, 1, 5, 2, generator=g)
    two = online_softmax.merge(o[0], lse[0], o[1], lse[1])
    expected, _ = online_softmax.merge(*two, o[2], lse[2])
    assert torch.allclose((pictures.lse_weights(lse)[..., None] * o).sum(0), expected, atol=1e-6)
    counted = pictures.lse_weights(lse, tokens=8)
    assert torch.allclose(counted[0] / counted[1], 8 * torch.exp(lse[0] - lse[1]), rtol=1e-5)


def test_best_equal_gate_is_the_best() -> None:
    outputs, dense = made(torch.full((3, 4), 0.37, dtype=torch.float64))
    assert pictures.best_equal_gate(outputs, dense) == 0.37
    v = pictures.views()
    best = pictures.best_equal_gate(v.outputs, v.dense)
    assert best == 0.42
    error = pictures.schemes()["best equal gates"]
    for gate in (0.0, 1 / 3, best - 0.02, best + 0.02, 1 / 2, 1.0):
        assert error < pictures.relative_error(gate * v.outputs.sum(0), v.dense).mean().item()


def test_schemes_keep_the_order_that_the_chapter_tells() -> None:
    found = pictures.schemes()
    order = [
        "best gates per token", "by LSE, a summary counts 8", "best constant gates",
        "merged by LSE", "window alone",
        "best equal gates", "selection alone", "gates ⅓, ⅓, ⅓", "compression alone",
        "gates 1, 1, 1",
    ]  # fmt: skip
    assert [found[name] for name in order] == sorted(found[name] for name in order)
    assert found["compression alone"] < 1 < found["gates 1, 1, 1"]
    assert set(order) < set(found)


# -- what is loaded, and what it costs --


@settings
def test_entries_are_what_the_exercise_counts(top_n: int, window: int) -> None:
    """Query by query over the lists that were chosen: every query's own block is among them, so
    that every list loads the same."""
    ids = pictures.views(top_n, window).ids[0]  # [N, H, top_n]
    for kv_head in range(4):
        counts = torch.tensor(
            [
                exercises.keys_loaded(t, ids[t, kv_head].tolist(), 16, window, 16, 8)
                for t in range(512)
            ],
            dtype=torch.float64,
        )
        assert counts.mean(0)[:3].tolist() == pytest.approx(
            list(pictures.entries(top_n, window).values())
        )
    assert pictures.dense_entries() == 256.5


def test_the_last_query_of_a_long_text() -> None:
    """The chapter's opening question, by the costs and by the exercise."""
    loaded = (
        costs.summary_keys(1, 65_536),
        costs.selected_keys(1, 65_536),
        costs.window_keys(1, 65_536),
    )
    ids = [0, *range(1009, 1024)]
    assert (
        exercises.keys_loaded(65_535, ids, 64, 512, 32, 16)
        == (*loaded, sum(loaded))
        == (4095, 1024, 512, 5631)
    )
    tokens = {t for block in ids for t in range(block * 64, block * 64 + 64)} | set(
        range(65_536 - 512, 65_536)
    )
    assert len(tokens) <= 1408


@pytest.mark.parametrize("N", [4096, 65_536])
def test_operations_are_all_that_is_counted(N: int) -> None:
    parts = pictures.operations(N)
    assert sum(parts.values()) == costs.native_sparse_attention(N, N, **pictures.MODEL).flops
    # the choice computes the summaries' scores once more, without the weighted sum of the values
    assert parts["choice"] * (192 + 128) == parts["compression"] * 192


def test_operations_never_get_ten_times_fewer() -> None:
    ratios = [
        costs.tiled_attention(N, N, **pictures.MODEL).flops / sum(pictures.operations(N).values())
        for N in (4096, 65_536, 2**22)
    ]
    assert ratios == sorted(ratios)
    assert 9 < ratios[-1] < 16 * (192 + 128) / (2 * 192 + 128)


def test_bytes_of_a_new_token() -> None:
    moved = pictures.new_token_bytes(65_536)
    per_key = 4 * (192 + 128) * 2  # KV heads, key and value, bf16
    for name, keys in (("compression", 4095), ("selection", 1024), ("window", 512)):
        # and the query, the output and the list
        assert keys * per_key < moved[name] < keys * per_key + 100_000


# -- the pictures --

PICTURES = {
    "views": pictures.draw_views,
    "views, gates given": lambda: pictures.draw_views(3, (0.5, 0.0, 1.0), 8, 16),
    "schemes": pictures.draw_schemes,
    "costs": pictures.draw_costs,
    "gates": lambda: pictures.draw_gates(0.5, 0.5, 0.5),
    "gates, everything loaded": lambda: pictures.draw_gates(1.0, 1.0, 1.0, 512, 32),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES.keys())
def test_pictures_are_small(draw: object) -> None:
    assert len(draw().png()) <= 60_000


def test_findings_carry_computed_numbers() -> None:
    v = pictures.views()
    alone = min(pictures.relative_error(o, v.dense)[9].item() for o in v.outputs)
    found = pictures.draw_views(9, (0.0, 0.0, 1.0))
    window = pictures.relative_error(v.outputs[2], v.dense)[9].item()
    assert found.finding == (
        f"Layer 2 head 5: the nearest single view is off by {100 * alone:.0f}%, the gated sum by "
        f"{100 * window:.0f}%"
    )
    schemes = pictures.schemes()
    told = ("window alone", "best constant gates", "best gates per token")
    numbers = [f"{100 * schemes[name]:.0f}%" for name in told]
    positions = [pictures.draw_schemes().finding.index(number) for number in numbers]
    assert positions == sorted(positions)
    parts = pictures.operations(65_536)
    summaries = (parts["choice"] + parts["compression"]) / sum(parts.values())
    assert f"{100 * summaries:.0f}%" in pictures.draw_costs().finding


def test_gates_alone_give_the_branch_alone() -> None:
    """(0, 0, 1) in the panel is the window; a window of the whole text is exact."""
    error = pictures.schemes()["window alone"]
    assert f"error {100 * error:.0f}%" in pictures.sentence(0.0, 0.0, 1.0, 64, 4)
    assert "error 0% " in pictures.sentence(0.0, 0.0, 1.0, 512, 4)
    assert "error 0% " in pictures.sentence(0.0, 1.0, 0.0, 64, 32)
    assert "error 0% " not in pictures.sentence(1.0, 1.0, 0.0, 64, 32)


def test_the_panel_says_what_the_pure_function_says() -> None:
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(0.5, 0.5, 0.5, 64, 4)
    before = panel.picture
    assert panel.set(g_cmp=0.1, g_slc=0.9, g_swa=0.0, window=16, top_n=6) == pictures.sentence(
        0.1, 0.9, 0.0, 16, 6
    )
    assert panel.picture != before


def test_the_panels_lists_are_attended_as_the_operator_does() -> None:
    """The panel runs the lists under a mask, which is faster; the operator gathers their blocks."""
    stored, v = pictures._heads(), pictures.views(6, 16)
    o, lse = ops.selected_attention(
        stored.q, stored.k, stored.v, v.ids, block_size=pictures.BLOCK_SIZE, return_lse=True
    )
    torch.testing.assert_close(v.outputs[1], o, rtol=0, atol=1e-5)
    torch.testing.assert_close(v.lse[1], lse, rtol=0, atol=1e-5)


def test_gates_of_branches_that_see_everything() -> None:
    """Two outputs that are the same leave many best gates; each of them gives dense attention."""
    v = pictures.views(32, 512)
    assert torch.equal(v.outputs[1], v.outputs[2])
    for bounded in (True, False):
        gates = pictures.fit_gates(v.outputs, v.dense, bounded=bounded)
        assert gates.isfinite().all()
        assert pictures.relative_error(pictures.gated(gates, v.outputs), v.dense).max() < 1e-4


@pytest.mark.parametrize(("window", "top_n"), [(8, 3), (512, 32)])
def test_the_errors_stay_inside_the_picture(window: int, top_n: int) -> None:
    """Open gates add up to more than the truth, and the lines still end below the upper edge."""
    sheet = pictures.draw_gates(1.0, 1.0, 1.0, window, top_n).figure.axes[0]
    highest = min(path.vertices[:, 1].min() for path in sheet.collections[1].get_paths()[:4])
    assert highest >= 0.62, "inches from the upper edge of the sheet"


# -- the finale --


class Reads(torch.nn.Module):
    """Knows the task: finds the name that is asked for among the latest `reach` entries."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        names, numbers, wanted = x.split((64, 16, 64), -1)
        back = torch.arange(256)[:, None] - torch.arange(256)
        similar = (wanted @ names.mT).masked_fill((back < 0) | (back >= self.reach), -1)
        return numbers.gather(1, similar.argmax(-1, keepdim=True).expand(-1, -1, 16))


def test_a_phone_book_asks_for_what_stands_in_it() -> None:
    """The name that is asked for is that of the entry `back` before, and its number the answer."""
    book = pictures.phone_book(3, torch.Generator().manual_seed(0))
    assert book.x.shape == (3, 256, 144)
    assert ((book.back >= 0) & (book.back <= torch.arange(256))).all()
    assert (book.back >= 96).float().mean() > 0.2, "many answers stand far back"
    names, numbers, wanted = book.x.split((64, 16, 64), -1)
    asked = torch.arange(256) - book.back
    assert torch.equal(wanted, names.gather(1, asked[..., None].expand_as(names)))
    assert torch.equal(numbers.argmax(-1).gather(1, asked), book.answer)


def test_shares_of_right_answers() -> None:
    """Who reads everything is always right; who reads a window, up to its end, and then as often
    as a blind guess."""
    everything, window = Reads(256), Reads(96)
    assert pictures.share_right(everything, 0) == 100
    assert pictures.share_right(window, 0, 96) == 100
    assert pictures.share_right(window, 96) == pytest.approx(100 / 16, abs=3)
    finding = pictures.draw_recall({"dense": everything, "window": window}).finding
    assert "dense 100%" in finding
    assert f"window {pictures.share_right(window, 96):.0f}%" in finding


@pytest.fixture(scope="module")
def chapter() -> dict[str, object]:
    """What the chapter's cells define: NSA in 40 lines, the layer, and the window."""
    path = Path(__file__).resolve().parents[2] / "notebooks" / "08_native_sparse_attention.ipynb"
    cells = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    names: dict[str, object] = {"math": math, "torch": torch, "nn": torch.nn, "pictures": pictures}
    for name in ("nsa-compression", "nsa-choice", "nsa-whole", "tiny-layer"):
        exec(cells[name], names)
    return names


@pytest.mark.parametrize(("N", "block_size", "top_n"), [(64, 8, 6), (48, 4, 5), (60, 12, 3)])
def test_forty_lines_are_the_operator(chapter: dict, N: int, block_size: int, top_n: int) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 2, N, 8, generator=g)
    gates = torch.rand(3, 2, N, generator=g)
    sizes = {"block_size": block_size, "window_size": 7}
    found = chapter["nsa"](q, k, v, gates, top_n=top_n, **sizes)
    expected = ops.native_sparse_attention(
        *(x[:, :, None] for x in (q, k, v)), *gates[..., None], block_counts=top_n,
        length=block_size, stride=block_size, **sizes,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[:, :, 0], rtol=0, atol=1e-5)


def test_no_query_of_the_finale_loads_more_than_the_window(chapter: dict) -> None:
    """Summaries, listed keys and the window, with the sizes that `nsa` has by default."""
    sizes = {name: p.default for name, p in signature(chapter["nsa"]).parameters.items()}
    block_size, top_n = sizes["block_size"], sizes["top_n"]
    loaded = pictures.ENTRIES // block_size + top_n * block_size + sizes["window_size"]
    assert loaded == pictures.BUDGET


def test_nsa_answers_from_afar(chapter: dict) -> None:
    """The finale's claim, with another start of the weights than the chapter's."""
    layer = chapter["Layer"](chapter["nsa"])
    torch.manual_seed(7)
    for part in layer.children():
        part.reset_parameters()
    pictures.train(layer)
    assert pictures.share_right(layer, 96) > 75
    assert pictures.share_right(layer, 96, is_open=(1, 0, 1)) < 15
    assert pictures.share_right(layer, 96, is_open=(0, 1, 1)) > 75


# -- the implementations that the property exercise judges --


def test_broken_implementations_are_broken_and_right_ones_right() -> None:
    """Against the oracle in fp64, on other inputs than the solution's."""
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 30, h, 16, generator=g) for h in (4, 2, 2))
    gates = tuple(torch.full((2, 30, 4), x) for x in (0.0, 1.0, 0.0))
    expected = attention(q.double(), k.double(), v.double())
    (property_test,) = (e for e in exercises.EXERCISES if e.name == "selects_like_dense")
    for case in property_test.cases:
        (nsa,) = case.arguments()
        o = nsa(q, k, v, gates, torch.arange(8).expand(2, 30, 2, 8), 4).double()
        holds = (o - expected).abs().max() < 1e-4
        assert o.shape == expected.shape, case.name
        assert holds == property_test.solution(nsa), case.name
        assert holds == ("right" in case.name or "not against" in case.name), case.name


# -- what the tutor says --

EXERCISES = {e.name: e for e in exercises.EXERCISES}


def softmax_of_all_gates(gates: list, outputs: list) -> Tensor:
    weights = torch.softmax(torch.stack([g for g in gates if g is not None]), 0)
    used = [o for g, o in zip(gates, outputs, strict=True) if g is not None]
    return sum(w[..., None] * o for w, o in zip(weights, used, strict=True))


def zeros_for_none(gates: list, outputs: list) -> Tensor:
    gates = [torch.zeros(outputs[-1].shape[:3]) if g is None else g for g in gates]
    return sum(g[..., None] * o for g, o in zip(gates, outputs, strict=True))


def minus_one_as_a_block(
    t: int, ids: list, block_size: int, window_size: int, length: int, stride: int
) -> list:
    summaries = max((t + 1 - length) // stride + 1, 0)
    selected = sum(max(min(block_size, t + 1 - b * block_size), 0) for b in ids)
    window = min(window_size, t + 1)
    return [summaries, selected, window, summaries + selected + window]


def a_list_too_short(nsa: Callable) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 21, heads, 8, generator=generator) for heads in (4, 2, 2))
    gates = tuple(torch.full((1, 21, 4), g) for g in (0.0, 1.0, 0.0))
    o = nsa(q, k, v, gates, torch.arange(21 // 4).expand(1, 21, 2, -1), 4)
    return torch.allclose(o, attention(q, k, v), atol=1e-4)


def with_all_defaults(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
    top_n: int, block_size: int, window_size: int, length: int, stride: int,
) -> Tensor:  # fmt: skip
    k_cmp, v_cmp = ops.compress(k), ops.compress(v)
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, return_lse=True)
    ids = ops.select_blocks(q, k_cmp, lse, top_n=top_n, block_size=block_size)
    o_slc = ops.selected_attention(q, k, v, ids, block_size=block_size)
    o_swa = ops.sliding_window_attention(q, k, v, window_size=window_size)
    return g_cmp[..., None] * o_cmp + g_slc[..., None] * o_slc + g_swa[..., None] * o_swa


def compared(
    by: Callable,
    N: int = 22,
    gates: tuple = (0.0, 1.0, 0.0),
    H: int = 2,
    still: tuple[int, ...] = (),
) -> Callable[[Callable], object]:
    """A test as a reader writes it; `by` compares the output with dense attention's. Of q, k and v,
    those at the places `still` are 0."""

    def test(nsa: Callable) -> object:
        generator = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(1, N, heads, 8, generator=generator) for heads in (4, H, H))
        for place in still:
            (q, k, v)[place].zero_()
        given = tuple(None if g is None else torch.full((1, N, 4), g) for g in gates)
        o = nsa(q, k, v, given, torch.arange(-(-N // 4)).expand(1, N, H, -1), 4)
        return by(o, attention(q, k, v))

    return test


def close(o: Tensor, dense: Tensor, atol: float = 1e-4) -> bool:
    return torch.allclose(o, dense, atol=atol)


def asserted(o: Tensor, dense: Tensor) -> bool:
    assert close(o, dense)
    return True


TESTS = {
    "atol 0.1": (compared(partial(close, atol=0.1)), "a test with a tolerance so wide"),
    "atol 1": (compared(partial(close, atol=1.0)), "a test with a tolerance so wide"),
    "atol 5": (compared(partial(close, atol=5.0)), "a test that passes whatever comes out"),
    "mean of differences": (
        compared(lambda o, dense: (o - dense).abs().mean() < 0.1),
        "a test with a tolerance so wide",
    ),
    "head 0": (
        compared(lambda o, dense: close(o[:, :, 0], dense[:, :, 0])),
        "a test that compares one head only",
    ),
    "no groups": (compared(close, H=4), "a test with as many KV heads as query heads"),
    "blocks divide": (compared(close, N=20), "a test in which the blocks divide the text"),
    "signs cancel": (
        compared(lambda o, dense: (o - dense).mean() < 0.1, N=20),
        "a test that passes whatever comes out",
    ),
    "no abs": (
        compared(lambda o, dense: (o - dense).max() < 1e-4),
        "a comparison without the absolute value",
    ),
    "no abs, turned": (
        compared(lambda o, dense: ((dense - o) < 1e-4).all()),
        "a comparison without the absolute value",
    ),
    "not": (compared(lambda *both: not close(*both)), "a test that returns the opposite"),
    "q of zeros": (compared(close, still=(0,)), "a test whose scores are all 0"),
    "k of zeros": (compared(close, still=(1,)), "a test whose scores are all 0"),
    "v of zeros": (compared(close, still=(2,)), "a test whose values are all the same"),
    "True": (lambda nsa: True, "a test that passes whatever comes out"),
    "shapes": (
        compared(lambda o, dense: o.shape == dense.shape),
        "a test that passes whatever comes out",
    ),
    "assert_close": (
        compared(partial(torch.testing.assert_close, atol=1e-4, rtol=0)),
        "a test that asserts where it should answer",
    ),
    "assert": (compared(asserted), "a test that asserts where it should answer"),
    "window's gate": (
        compared(close, gates=(0.0, 0.0, 1.0)),
        "a test that right implementations fail",
    ),
}


@pytest.mark.parametrize("typed", TESTS)
def test_of_a_weak_test_only_its_weakness_is_named(typed: str) -> None:
    test, mistake = TESTS[typed]
    (named,) = judge(EXERCISES["selects_like_dense"], test).misconceptions
    assert named.startswith(mistake)


def test_one_sign_and_full_blocks_are_both_named() -> None:
    test = compared(lambda o, dense: (o - dense).max() < 1e-4, N=20)
    assert set(judge(EXERCISES["selects_like_dense"], test).misconceptions) == {
        "a comparison without the absolute value",
        "a test in which the blocks divide the text",
    }


def test_branches_may_be_left_out_of_a_test() -> None:
    test = compared(close, gates=(None, 1.0, None))
    assert judge(EXERCISES["selects_like_dense"], test).outcome == "right"


def whole_with(
    broadcast: bool = False, pair: bool = False, **changed: Callable
) -> Callable[..., Tensor]:
    """`three_branches` with changes: each takes what is there and gives what is used."""

    def typed(
        q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
        top_n: int, block_size: int, window_size: int, length: int, stride: int,
    ) -> Tensor:  # fmt: skip
        sizes = {"length": length, "stride": stride}
        k_cmp, v_cmp = (ops.compress(x, **sizes) for x in (k, v))
        use = {
            "values": v_cmp,
            "read": (k, v),
            "cut": block_size,
            "window": window_size,
        }
        given = {"k_cmp": k_cmp, "v_cmp": v_cmp, "block_size": block_size, "length": length}
        use |= {name: change(given) for name, change in changed.items()}
        o_cmp = ops.compressed_attention(q, k_cmp, use["values"], **sizes, return_lse=pair)
        ids = ops.select_blocks(q, k_cmp, None, top_n=top_n, block_size=block_size, **sizes)
        o_slc = ops.selected_attention(q, *use["read"], ids, block_size=use["cut"])
        o_swa = ops.sliding_window_attention(q, k, v, window_size=use["window"])
        first = g_cmp if broadcast else g_cmp[..., None]
        return first * o_cmp + g_slc[..., None] * o_slc + g_swa[..., None] * o_swa

    return typed


WHOLE = {
    "window_size=block_size": (
        whole_with(window=lambda given: given["block_size"]),
        "taking the block size for the window's",
    ),
    "block_size=length": (
        whole_with(cut=lambda given: given["length"]),
        "taking the length of a summary for the block size",
    ),
    "selected_attention(q, k_cmp, v_cmp)": (
        whole_with(read=lambda given: (given["k_cmp"], given["v_cmp"])),
        "attending to summaries in the selected blocks",
    ),
    "compressed_attention(q, k_cmp, k_cmp)": (
        whole_with(values=lambda given: given["k_cmp"]),
        "using the summary keys as values, too",
    ),
    "g_cmp * o_cmp": (whole_with(broadcast=True), "lining the gates up with the width"),
    "g_slc first": (
        lambda q, k, v, g_cmp, g_slc, g_swa, *sizes: exercises.three_branches(
            q, k, v, g_slc, g_cmp, g_swa, *sizes
        ),
        "swapping the gates of compression and selection",
    ),
}


@pytest.mark.parametrize("typed", WHOLE)
def test_a_whole_with_one_slip_is_all_explained(typed: str) -> None:
    function, mistake = WHOLE[typed]
    verdict = judge(EXERCISES["three_branches"], function)
    assert verdict.misconceptions == (mistake,)
    assert "something else" not in verdict.text


def choosing(**blocks: str) -> Callable[..., Tensor]:
    """`three_branches`, where `select_blocks` gets another block size, or none."""

    def typed(
        q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
        top_n: int, block_size: int, window_size: int, length: int, stride: int,
    ) -> Tensor:  # fmt: skip
        sizes = {"length": length, "stride": stride}
        chosen = {name: {**sizes, "window_size": window_size}[of] for name, of in blocks.items()}
        k_cmp, v_cmp = (ops.compress(x, **sizes) for x in (k, v))
        o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **sizes, return_lse=True)
        ids = ops.select_blocks(q, k_cmp, lse, top_n=top_n, **chosen, **sizes)
        o_slc = ops.selected_attention(q, k, v, ids, block_size=block_size)
        o_swa = ops.sliding_window_attention(q, k, v, window_size=window_size)
        return exercises.gated_sum((g_cmp, g_slc, g_swa), (o_cmp, o_slc, o_swa))

    return typed


@pytest.mark.parametrize("blocks", [{}, {"block_size": "length"}], ids=["none", "length"])
def test_blocks_of_another_size_are_chosen(blocks: dict[str, str]) -> None:
    """What is said holds of a block size that is left out and of one that is another number."""
    verdict = judge(EXERCISES["three_branches"], choosing(**blocks))
    assert verdict.misconceptions == ("telling the block size to the attention alone",)
    assert "blocks of another size" in verdict.text
    assert "lack" not in verdict.text
    assert "This does not explain everything" not in verdict.text


def test_a_pair_that_is_not_unpacked_is_explained() -> None:
    assert "o, lse = " in judge(EXERCISES["three_branches"], whole_with(pair=True)).text


def three_with(solved: bool = True, asks: bool = True, pair: bool = False, **kept: int) -> Callable:
    """`three_branches` as the stored heads' cell goes, with some sizes kept from there."""

    def typed(
        q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor,
        top_n: int, block_size: int, window_size: int, length: int, stride: int,
    ) -> Tensor | None:  # fmt: skip
        given = {"top_n": top_n, "window_size": window_size, "length": length, "stride": stride}
        given |= {"block_size": block_size} | kept
        sizes = {"length": given["length"], "stride": given["stride"]}
        k_cmp, v_cmp = (ops.compress(x, **sizes) for x in (k, v))
        found = ops.compressed_attention(q, k_cmp, v_cmp, **sizes, return_lse=asks)
        o_cmp, lse = (found[0], found) if pair else found
        blocks = {"block_size": given["block_size"]}
        ids = ops.select_blocks(q, k_cmp, lse, top_n=given["top_n"], **blocks, **sizes)
        o_slc = ops.selected_attention(q, k, v, ids, **blocks)
        o_swa = ops.sliding_window_attention(q, k, v, window_size=given["window_size"])
        outputs = o_cmp, o_slc, o_swa
        return exercises.gated_sum((g_cmp, g_slc, g_swa), outputs) if solved else None

    return typed


CELL = {"top_n": 4, "block_size": 16, "window_size": 64, "length": 16, "stride": 8}
KEPT = {
    "all": (three_with(**CELL), ("keeping the sizes of the stored heads",)),
    "window": (three_with(window_size=64), ("keeping the window of the stored heads",)),
    "top_n": (three_with(top_n=4), ("keeping `top_n` of the stored heads",)),
    "summaries": (
        three_with(length=16, stride=8),
        ("keeping the length and stride of the stored heads",),
    ),
    "two": (
        three_with(top_n=4, window_size=64),
        ("keeping `top_n` of the stored heads", "keeping the window of the stored heads"),
    ),
    "block size": (
        three_with(block_size=16),
        ("a block size that is left out, or is not the given one",),
    ),
    "gated_sum not written": (three_with(solved=False), ("returning nothing",)),
    "no return_lse": (three_with(asks=False), ("not asking for the `lse`",)),
}


@pytest.mark.parametrize("typed", KEPT)
def test_what_is_left_of_the_cell_above_is_named(typed: str) -> None:
    function, mistakes = KEPT[typed]
    verdict = judge(EXERCISES["three_branches"], function)
    assert verdict.misconceptions == mistakes
    assert "This does not explain everything" not in verdict.text


@pytest.mark.parametrize(
    "typed",
    [
        lambda q, k, *others: ops.compress(k, *others[-2:]),
        lambda q, k, v, *others: ops.compressed_attention(q, k, v, *others[-2:]),
        lambda q, k, v, *others: ops.select_blocks(q, k, None, *others[-5:-3]),
        lambda q, k, v, *others: ops.selected_attention(q, k, v, None, others[-4]),
        lambda q, k, v, *others: ops.sliding_window_attention(q, k, v, others[-3]),
    ],
)
def test_sizes_without_their_names_are_explained(typed: Callable) -> None:
    text = judge(EXERCISES["three_branches"], typed).text
    assert "Pass sizes by name" in text
    assert "Count the arguments" not in text


def test_a_pair_is_called_a_pair() -> None:
    """Its numbers would fill the screen, passed on as `lse` or returned."""
    text = judge(EXERCISES["three_branches"], three_with(pair=True)).text
    assert "lse: got a tuple of 2 tensors, expected a tensor" in text
    assert "Then take both: `o, lse = ...`" in text
    assert "Python list" not in text
    pair = judge(EXERCISES["three_branches"], lambda *arguments: arguments[:2]).text
    assert "Got a tuple of 2 tensors, expected Tensor." in pair
    assert max(text.count("\n"), pair.count("\n")) < 8


def with_top_n(nsa: Callable) -> bool:
    q, k, v = torch.randn(3, 1, 21, 4, 8, generator=torch.Generator().manual_seed(0))
    gates = tuple(torch.full((1, 21, 4), g) for g in (0.0, 1.0, 0.0))
    return close(nsa(q, k, v, gates, top_n=6, block_size=4), attention(q, k, v))


def with_loose_gates(nsa: Callable) -> bool:
    q, k, v = torch.randn(3, 1, 21, 4, 8, generator=torch.Generator().manual_seed(0))
    gates = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 21, 4)
    ids = torch.arange(6).expand(1, 21, 4, 6)
    return close(nsa(q, k, v, *gates, ids, 4), attention(q, k, v))


@pytest.mark.parametrize(
    ("test", "told"), [(with_top_n, "not `top_n`"), (with_loose_gates, "and got 8")]
)
def test_the_others_nsa_says_what_it_takes(test: Callable, told: str) -> None:
    text = judge(EXERCISES["selects_like_dense"], test).text
    assert f"takes 6 arguments, q, k, v, gates, block_indices, block_size, {told}" in text


def counted(summaries: Callable | None = None, keys: Callable | None = None) -> Callable:
    """`keys_loaded` with another count of summaries, or of the selected keys."""

    def typed(
        t: int, ids: list, block_size: int, window_size: int, length: int, stride: int
    ) -> tuple:
        found = [
            max((t + 1 - length) // stride + 1, 0),
            sum(max(min(block_size, t + 1 - b * block_size), 0) for b in ids if b >= 0),
            min(window_size, t + 1),
        ]
        if summaries is not None:
            found[0] = max(summaries(t + 1 - length, stride), 0)
        if keys is not None:
            found[1] = keys(ids)
        return *found, sum(found)

    return typed


COUNTS = {
    "/": (counted(lambda rest, stride: rest / stride + 1), ("counting fractions of a summary",)),
    "int": (
        counted(lambda rest, stride: int(rest / stride) + 1),
        ("counting the first summary before it has ended",),
    ),
    "max first": (
        counted(lambda rest, stride: max(rest, 0) // stride + 1),
        ("counting the first summary before it has ended",),
    ),
    "blocks": (
        counted(keys=lambda ids: sum(1 for b in ids if b >= 0)),
        ("counting blocks where keys are meant",),
    ),
    "len(ids)": (
        counted(keys=len),
        ("counting blocks where keys are meant", "taking -1 for a block"),
    ),
}


@pytest.mark.parametrize("typed", COUNTS)
def test_counts_of_something_else_are_recognised(typed: str) -> None:
    function, mistakes = COUNTS[typed]
    assert judge(EXERCISES["keys_loaded"], function).misconceptions == mistakes


def by_truth(gates: list, outputs: list) -> Tensor:
    return sum(g[..., None] * o for g, o in zip(gates, outputs, strict=True) if g)


def returning_early(gates: list, outputs: list) -> Tensor:
    total = 0
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            total = total + g[..., None] * o
        return total


def returning_the_first(gates: list, outputs: list) -> Tensor:
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            return g[..., None] * o


def wiping(gates: list, outputs: list) -> Tensor:
    total = outputs[0]
    total *= 0
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            total = total + g[..., None] * o
    return total


def starting_with_an_output(gates: list, outputs: list) -> Tensor:
    total = outputs[0]
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            total = total + g[..., None] * o
    return total


def overwriting(gates: list, outputs: list) -> Tensor:
    for g, o in zip(gates, outputs, strict=True):
        if g is not None:
            o *= g[..., None]
    return sum(o for g, o in zip(gates, outputs, strict=True) if g is not None)


TYPED = [
    ("gated_sum", by_truth, "asking a tensor whether it is true"),
    ("gated_sum", returning_early, "a `return` inside the loop"),
    ("gated_sum", returning_the_first, "a `return` inside the loop"),
    ("gated_sum", wiping, "wiping the first output out to start the total"),
    ("gated_sum", starting_with_an_output, "starting the total with the first output"),
    ("gated_sum", overwriting, "overwriting the tensors that were handed in"),
    ("gated_sum", softmax_of_all_gates, "a softmax over the branches"),
    ("gated_sum", zeros_for_none, "not allowing for a gate of None"),
    ("keys_loaded", minus_one_as_a_block, "taking -1 for a block"),
    ("selects_like_dense", a_list_too_short, "a test that right implementations fail"),
    ("three_branches", with_all_defaults, "making summaries of the paper's sizes"),
]


@pytest.mark.parametrize(
    ("name", "typed", "mistake"), TYPED, ids=[typed.__name__ for _, typed, _ in TYPED]
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES[name], typed).misconception == mistake


def gates_first() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for branch in tl.static_range(3):
            at = (branch * R + row) * DV + column
            o = tl.load(Outputs + at, mask=column < DV)
            total = total + o * tl.load(Gates + R * branch + row)
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def three_to_a_row() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for branch in range(3):
            gate = tl.load(Gates + 3 * row + branch)
            o = tl.load(Outputs + (branch * R + row) * DV + column, mask=column < DV, other=0.0)
            total += gate * o
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def masked_by_rows() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            at = b * R + row
            total += tl.load(Gates + at) * tl.load(Outputs + at * DV + column, mask=column < R)
        tl.store(Sum + row * DV + column, total, mask=column < R)

    return kernel


def loads_unmasked() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            at = b * R + row
            total += tl.load(Gates + at) * tl.load(Outputs + at * DV + column)
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def masked_at_the_end() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            place = (b * R + row) * DV + column
            total += tl.load(Gates + b * R + row) * tl.load(
                Outputs + place, mask=place < 3 * R * DV
            )
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def not_stored() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            at = b * R + row
            total += tl.load(Gates + at) * tl.load(Outputs + at * DV + column, mask=column < DV)

    return kernel


def indexed() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            o = tl.load(Outputs + (b * R + row) * DV + column, mask=column < DV)
            total += Gates[b, row] * o
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def without_parentheses() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            o = tl.load(Outputs + b * R + row * DV + column, mask=column < DV)
            total += tl.load(Gates + b * R + row) * o
        tl.store(Sum + row * DV + column, total, mask=column < DV)

    return kernel


def rows_of_block() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            o = tl.load(Outputs + (b * R + row) * BLOCK + column, mask=column < DV)
            total += tl.load(Gates + b * R + row) * o
        tl.store(Sum + row * BLOCK + column, total, mask=column < DV)

    return kernel


def divided_by_three() -> object:
    @triton.jit
    def kernel(Gates, Outputs, Sum, R, DV, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for b in range(3):
            o = tl.load(Outputs + (b * R + row) * DV + column, mask=column < DV)
            total += tl.load(Gates + b * R + row) * o
        tl.store(Sum + row * DV + column, total / 3, mask=column < DV)

    return kernel


@pytest.mark.parametrize(
    ("typed", "outcome", "mistake"),
    [
        (gates_first, "right", None),
        (without_parentheses, "misconception", "multiplying `row` alone by `DV`"),
        (
            rows_of_block,
            "misconception",
            "taking `BLOCK` for the width of a row in memory",
        ),
        (divided_by_three, "misconception", "dividing by three"),
        (three_to_a_row, "misconception", "reading the three gates of a row as neighbours"),
        (
            masked_by_rows,
            "misconception",
            "a mask that compares columns with the number of rows",
        ),
        (loads_unmasked, "misconception", "loading what lies behind the row"),
        (masked_at_the_end, "right", None),
        (not_stored, "misconception", "storing nothing"),
        (indexed, "misconception", "indexing a pointer"),
    ],
    ids=[
        "another order",
        "b * R + row * DV",
        "row * BLOCK",
        "total / 3",
        "gates side by side",
        "column < R",
        "load without a mask",
        "mask at the end of Outputs",
        "no store",
        "Gates[b, row]",
    ],
)
def test_kernels_that_a_reader_would_type(
    typed: Callable, outcome: str, mistake: str | None
) -> None:
    e = EXERCISES["gated_kernel"]
    if e.missing:
        pytest.skip(e.missing[0])
    verdict = judge(e, typed)
    assert verdict.outcome == outcome
    if mistake is not None:
        assert verdict.misconception == mistake


def test_the_errors_that_the_prose_tells_are_computed() -> None:
    """What the weight of a summary does to the merge, and what constant gates leave."""
    path = Path(__file__).resolve().parents[2] / "notebooks" / "08_native_sparse_attention.ipynb"
    (told,) = (c.source for c in nbformat.read(path, as_version=4).cells if c.id == "031-7a32e8")
    found = pictures.schemes()
    plain, counted = found["merged by LSE"], found["by LSE, a summary counts 8"]
    words = f"falls from {100 * plain:.0f}% to {100 * counted:.0f}%, less than constant gates leave"
    assert words in " ".join(told.split())
    assert counted < found["best constant gates"] < plain


def test_a_branch_may_be_guessed_by_its_short_name() -> None:
    (asked,) = (p for p in exercises.PREDICTIONS if p.name == "needed_gate")
    assert [asked.in_full(guess) for guess in ("slc", " g_cmp", "SWA", "window", None, 3)] == [
        "selection", "compression", "window", "window", None, 3,
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "guess"), [("keys_at_65536", 16_000), ("error_of_the_sum", 60)])
def test_every_number_to_choose_from_has_a_thought(name: str, guess: int) -> None:
    (asked,) = (p for p in exercises.PREDICTIONS if p.name == name)
    assert any(wrong(guess) if callable(wrong) else wrong == guess for wrong, _ in asked.thoughts)


def test_thoughts_about_guesses_hold() -> None:
    """The wrong counts of keys are those of some of the branches."""
    summaries, selected, window = (
        costs.summary_keys(1, 65_536),
        costs.selected_keys(1, 65_536),
        costs.window_keys(1, 65_536),
    )
    (asked,) = (p for p in exercises.PREDICTIONS if p.name == "keys_at_65536")
    told = {guess: text for guess, text in asked.thoughts if not callable(guess)}
    assert {summaries, summaries + selected} < told.keys()
    (both,) = (text for guess, text in asked.thoughts if callable(guess) and guess(1500))
    assert f"{selected:,} + {window}" in both
