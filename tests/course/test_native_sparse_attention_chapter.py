"""Chapter 08's pictures: what they compute agrees with the operators, the costs and the exercises,
and what they say with that. Its build, and what the tutor says of wrong ones."""

from __future__ import annotations

import inspect
import itertools
import json
import linecache
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import costs, heads, keeping, reader, train_choice
from nsa_tutorial.course.exercises import Misconception, chapter_exercises
from nsa_tutorial.course.exercises import native_sparse_attention as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import native_sparse_attention as pictures
from nsa_tutorial.exact import grouped_query_attention, online_softmax
from nsa_tutorial.exact.grouped_query_attention import attention

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).resolve().parents[2] / "notebooks" / "08_native_sparse_attention.ipynb"


def chapter_cells() -> list[nbformat.NotebookNode]:
    return nbformat.read(CHAPTER, as_version=4).cells


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
        "by LSE, a summary counts 8", "merged by LSE", "window alone",
        "best equal gates", "selection alone", "gates ⅓, ⅓, ⅓", "compression alone",
        "gates 1, 1, 1",
    ]  # fmt: skip
    assert [found[name] for name in order] == sorted(found[name] for name in order)
    assert found["compression alone"] < 1 < found["gates 1, 1, 1"]
    assert set(order) < set(found)


# -- what is loaded, and what it costs --


@settings
def test_entries_are_counted_query_by_query(top_n: int, window: int) -> None:
    """Every query's own block is on its list, so that every list loads the same."""
    ids, t = pictures.views(top_n, window).ids[0], torch.arange(512)
    summaries = ((t + 1 - 16) // 8 + 1).clamp(min=0)
    for kv_head in range(4):
        start = 16 * ids[:, kv_head]
        listed = (t[:, None] + 1 - start).clamp(min=0, max=16).masked_fill(start < 0, 0).sum(1)
        found = [x.double().mean().item() for x in (summaries, listed, (t + 1).clamp(max=window))]
        assert found == pytest.approx(list(pictures.entries(top_n, window).values()))
    assert pictures.dense_entries() == 256.5


def test_the_last_query_of_a_long_text() -> None:
    """The chapter's first guess."""
    loaded = [costs.summary_keys(1, 65_536), costs.selected_keys(1, 65_536)]
    assert [*loaded, costs.window_keys(1, 65_536)] == [4095, 1024, 512]


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
    "choice": pictures.draw_choice,
    "recall": pictures.draw_recall,
    "recall, and a model": lambda: pictures.draw_recall(train_choice.answers(Reads(50))),
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
    (constant, free), (_, noise) = (pictures.fits()[name] for name in ("its own output", "noise"))
    told = (constant, schemes["window alone"], free, noise)
    numbers = [f"{100 * error:.0f}%" for error in told]
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


# -- the build --

BUILD = EXERCISES["native_sparse_attention"]
# what an answer is like is looked for among all pairs of mistakes: here there are none
NAMELESS = replace(BUILD, misconceptions=())


def test_the_solution_holds_all_stages() -> None:
    assert judge(BUILD, BUILD.solution).held == len(BUILD.stages)


def test_the_build_is_the_operator() -> None:
    """Three pairs of keys and values, overlap, two KV heads, a length that nothing divides."""
    g = torch.Generator().manual_seed(6)
    q = torch.randn(61, 6, 8, generator=g)
    keys, values = torch.randn(3, 61, 2, 8, generator=g), torch.randn(3, 61, 2, 5, generator=g)
    gates = torch.rand(3, 61, 6, generator=g)
    found = BUILD.solution(q, keys, values, gates, 4, 5, 9, 6, 3)
    pairs = [(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
    expected = ops.three_branches(
        q[None], [ops.compress(x, length=6, stride=3) for x in pairs[0]], *pairs[1:],
        [x[None] for x in gates], num_keys=61, block_counts=4, block_size=5, window_size=9,
        length=6, stride=3,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("m", BUILD.misconceptions, ids=lambda m: m.name)
def test_each_mistake_of_the_build_is_named(m: Misconception) -> None:
    assert judge(BUILD, m.wrong).misconceptions == (m.name,)


def window_alone(q, keys, values, gates, top_n, block_size, window_size, length, stride):
    o = exercises.window_attention(q, keys[2], values[2], window_size)
    return gates[2].unsqueeze(-1) * o


def without_selection(q, keys, values, gates, top_n, block_size, window_size, length, stride):
    k_cmp, v_cmp = (exercises.compress(x[0], length, stride) for x in (keys, values))
    o, _ = exercises.compressed_attention(q, k_cmp, v_cmp, length, stride)
    near = window_alone(q, keys, values, gates, top_n, block_size, window_size, length, stride)
    return near + gates[0][..., None] * o


def every_block(q, keys, values, gates, top_n, block_size, window_size, length, stride):
    N, H = len(q), keys[1].shape[1]
    ids = torch.arange(-(-N // block_size)).expand(N, H, -1)
    o = exercises.selected_attention(q, keys[1], values[1], ids, block_size)
    rest = without_selection(q, keys, values, gates, top_n, block_size, window_size, length, stride)
    return rest + gates[1][..., None] * o


@pytest.mark.parametrize(
    ("half", "held"), [(window_alone, 1), (without_selection, 2), (every_block, 3)]
)
def test_a_half_done_function_holds_the_stages_it_should(half: Callable, held: int) -> None:
    assert judge(NAMELESS, half).held == held


def by_operators(q, keys, values, gates, top_n, block_size, window_size, length, stride):
    return ops.sliding_window_attention(
        q[None], keys[2][None], values[2][None], window_size=window_size
    )[0]


def test_operators_are_no_answer() -> None:
    verdict = judge(NAMELESS, by_operators)
    assert verdict.held == 0
    assert "the course's own operator" in verdict.text


def without_autograd(*given: object) -> Tensor:
    with torch.no_grad():
        return BUILD.solution(*given)


def test_a_build_that_cannot_be_trained_holds_all_but_the_last_stage() -> None:
    verdict = judge(NAMELESS, without_autograd)
    assert verdict.held == len(BUILD.stages) - 1
    assert "computed without autograd" in verdict.text


PARTS = {
    "selected_attention": ("selected_attention", "window_attention"),
    "compression": ("compress", "compressed_attention"),
    "block_selection": ("select_blocks",),
}


def test_it_is_kept_with_the_parts_that_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader goes: the parts from their chapters, then the whole on top of them. It is
    trained as the chapter's is."""
    (tmp_path / reader.FOLDER).mkdir()
    monkeypatch.chdir(tmp_path)
    for chapter, names in PARTS.items():
        for name in names:
            part = chapter_exercises(chapter)[name]
            assert keeping.keep(chapter, part, part.solution).startswith("Kept")
    parts = {name: keeping.built(name) for names in PARTS.values() for name in names}
    source = inspect.getsource(exercises.native_sparse_attention)
    source = "from __future__ import annotations\n" + source
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    cell = {"__name__": "__main__", "Sequence": Sequence, "Tensor": Tensor, **parts}
    exec(compile(source, "<cell>", "exec"), cell)
    whole = cell["native_sparse_attention"]
    assert "select_blocks" in keeping.keep("native_sparse_attention", BUILD, whole)

    mine = keeping.built("native_sparse_attention")
    assert mine.__module__ == "my_nsa"
    book = train_choice.phone_book(2, torch.Generator().manual_seed(4))
    mixes = (train_choice.three_branches(), lambda *x: in_place_of_heads(*x, whole=mine))
    layers = [train_choice.Layer(mix) for mix in mixes]
    for layer in layers:
        layer(book.x)[0].square().sum().backward()
    for ours, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-4)


# -- where the choice learns --


class Reads(torch.nn.Module):
    """Knows the task: finds the name that is asked for among the latest `reach` entries."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, x: Tensor, is_open: object = None) -> tuple[Tensor, None]:
        names, numbers, wanted = x.split((64, 16, 64), -1)
        back = torch.arange(256)[:, None] - torch.arange(256)
        similar = (wanted @ names.mT).masked_fill((back < 0) | (back >= self.reach), -1)
        return numbers.gather(1, similar.argmax(-1, keepdim=True).expand(-1, -1, 16)), None


def test_a_phone_book_asks_for_what_stands_in_it() -> None:
    """The name that is asked for is that of the entry `back` before, and its number the answer."""
    book = train_choice.phone_book(3, torch.Generator().manual_seed(0))
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
    everything, window = (train_choice.answers(Reads(reach)) for reach in (256, 96))
    shares = [train_choice.percent(everything, span=span) for span in train_choice.RANGES]
    assert shares == [100] * 3
    assert train_choice.percent(window, span="middle") == 100
    assert train_choice.percent(window) == pytest.approx(100 / 16, abs=3)


def in_place_of_heads(
    q: Tensor, keys: list, values: list, gates: list, whole: Callable = BUILD.solution
) -> tuple[Tensor, None]:
    """The chapter's `mix`: the books of a batch stand where heads stand."""
    q, *pairs = (x.transpose(0, 1) for x in (q, *keys, *values))
    o = whole(q, pairs[:3], pairs[3:], [x.T for x in gates], 6, 8, 16, 8, 8)
    return o.transpose(0, 1), None


def test_the_trained_layer_computes_what_the_reader_builds() -> None:
    book = train_choice.phone_book(2, torch.Generator().manual_seed(4))
    layers = [train_choice.Layer(m, 3) for m in (train_choice.three_branches(), in_place_of_heads)]
    plain, built = (layer(book.x)[0] for layer in layers)
    torch.testing.assert_close(plain, built, rtol=0, atol=1e-5)


def test_a_muted_compression_teaches_its_keys_nothing() -> None:
    """Of the keys' 192 rows, the first 64 belong to the compressed branch."""
    book = train_choice.phone_book(1, torch.Generator().manual_seed(4))
    for is_muted in (False, True):
        layer = train_choice.Layer(train_choice.three_branches(is_muted=is_muted))
        layer(book.x)[0].square().sum().backward()
        assert bool((layer.k.weight.grad[:64] == 0).all()) is is_muted
        assert (layer.k.weight.grad[64:] != 0).any()


def test_no_query_loads_more_than_the_window() -> None:
    book = train_choice.phone_book(1, torch.Generator().manual_seed(4))
    _, lists = train_choice.Layer(train_choice.three_branches())(book.x)
    assert lists.sum(-1).max() == train_choice.TOP_N
    assert train_choice.BUDGET == 96


def test_a_short_training_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_choice, "answers", partial(train_choice.answers, books=2))
    out = tmp_path / "choice.json"
    assert train_choice.main(["--seeds", "1", "--steps", "1", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["variant"] for run in runs] == list(train_choice.VARIANTS)
    assert capsys.readouterr().out.count("seed 0, 1 steps") == len(runs)


def test_the_stored_runs_carry_what_the_chapter_tells() -> None:
    """In every seed: the choice learns through the compressed branch alone."""
    for steps in train_choice.CHECKPOINTS:
        nsa = pictures.stored("NSA", steps)
        assert min(nsa) > 1.8 * max(pictures.stored("compression muted", steps))
    listed = [pictures.stored(v, 450, what="listed") for v in ("compression muted", "random lists")]
    assert abs(sum(listed[0]) - sum(listed[1])) < 3 * 2, "as good as a draw"
    assert max(pictures.stored("window", 150)) < 10
    assert min(pictures.stored("window", 150, "middle")) > 99
    assert max(pictures.stored("NSA", 450, "middle")) < 90
    assert min(pictures.stored("shared keys, muted", 150)) > 80


def test_the_numbers_of_the_prose_are_the_recordings() -> None:
    told = " ".join(" ".join(c.source.split()) for c in chapter_cells())
    far, near = pictures.stored_mean("NSA", 450), pictures.stored_mean("NSA", 450, "middle")
    window = pictures.stored_mean("window", 150)
    shared, muted = (
        pictures.stored_mean(name, 150) for name in ("shared keys", "shared keys, muted")
    )
    for words in (
        f"NSA finds {far:.0f}% of the far numbers where a window finds {window:.0f}%",
        f"misses {100 - near:.0f}% of those 16 to 95 entries back",
        f"the window gets all and NSA {near:.0f}% after 450 steps",
        f"and {pictures.closed_mean('selection', 450):.0f}% are left",
        f"the muted model gets {muted:.0f}% of the far answers after 150 steps",
        f"the model with an open gate ({shared:.0f}%)",
        f"in {pictures.choice_learns()['seconds'] / 60:.0f} minutes of one CPU core",
    ):
        assert words in told, words


# -- tests that bite --


@pytest.fixture(scope="module")
def tests_of_the_chapter() -> dict[str, Callable]:
    cells = {c.id: c.source for c in chapter_cells()}
    names: dict[str, object] = {"torch": torch, "ops": ops, "gqa": grouped_query_attention}
    for cell in ("040-5e7216", "tests-more"):
        exec(cells[cell], names)
    return {
        "prefix 48": lambda nsa: names["prefix"](nsa, 48),
        "prefix 45": lambda nsa: names["prefix"](nsa, 45),
        "all listed": names["all_listed"],
        "like the operator": names["like_operator"],
    }


def test_which_test_finds_which(tests_of_the_chapter: dict) -> None:
    """The right one passes all; the leaking summary is found by the cut at 45 and not at 48."""
    found = {
        name: [test for test, holds in tests_of_the_chapter.items() if not holds(nsa)]
        for name, nsa in pictures.mutants().items()
    }
    assert list(found.values()) == [
        [],
        ["prefix 45", "like the operator"],
        ["prefix 48", "prefix 45", "like the operator"],
        ["like the operator"],
    ]


def test_noise_is_as_large_as_what_it_stands_for() -> None:
    v = pictures.views()
    noise, other = pictures.with_noise(v.outputs), pictures.with_shuffled(v.outputs)
    size = (0, 1, 3)
    for changed in (noise, other):
        torch.testing.assert_close(
            changed[0].square().sum(size), v.outputs[0].square().sum(size), rtol=1e-3, atol=0
        )
        assert torch.equal(changed[1:], v.outputs[1:])


def test_free_gates_fit_noise() -> None:
    """Why the chapter draws no conclusion from gates that are fitted per token."""
    found = pictures.fits()
    own, noise = found["its own output"], found["noise"]
    assert own[1] < noise[1] < own[0]
    assert noise[0] < pictures.schemes()["window alone"]


def test_the_window_is_the_best_single_branch_of_every_head() -> None:
    v = pictures.views()
    errors = torch.stack([pictures.relative_error(o, v.dense) for o in v.outputs])
    assert (errors.argmin(0) == 2).all()
    fitted = pictures.gated(pictures.fit_gates(v.outputs, v.dense), v.outputs)
    share = pictures.relative_error(fitted, v.dense) / errors.min(0).values
    assert share.argmin() == pictures.MIXED
    assert 0.7 < share.min() < 0.8, "the chapter says: by a quarter"


# -- tests as readers write them --


def a_list_too_short(nsa: Callable) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 21, heads, 8, generator=generator) for heads in (4, 2, 2))
    gates = tuple(torch.full((1, 21, 4), g) for g in (0.0, 1.0, 0.0))
    o = nsa(q, k, v, gates, torch.arange(21 // 4).expand(1, 21, 2, -1), 4)
    return torch.allclose(o, attention(q, k, v), atol=1e-4)


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


def test_a_list_that_is_too_short_is_recognised() -> None:
    verdict = judge(EXERCISES["selects_like_dense"], a_list_too_short)
    assert verdict.misconception == "a test that right implementations fail"


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
    fits = pictures.fits()
    assert counted < fits["its own output"][0] < plain
    for name, column in (("its own output", 0), ("its own output", 1), ("noise", 1)):
        assert f"{100 * fits[name][column]:.0f}%" in told
    other = 100 * fits["other tokens' outputs"][1]
    assert f"its outputs for other tokens, they leave {other:.0f}%" in " ".join(told.split())


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
