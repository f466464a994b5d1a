"""Chapter 06: what a query sees of its past, what a mean key knows of its window, what learning a
summary gains; the pictures, the kernel, and answers as readers write them."""

import json
import linecache
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import costs
from nsa_tutorial.course import heads as stored
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import compression as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import compression as pictures
from nsa_tutorial.sparse.compression import MLPWeights, compress, num_summaries

KNOWN = chapter_exercises("compression")
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "06_compression.ipynb"
WINDOWS = [(4, 2), (5, 3), (8, 8), (32, 16), (3, 7), (1, 1)]
sizes = pytest.mark.parametrize(("length", "stride"), WINDOWS, ids=str)


@pytest.fixture(scope="module")
def heads():
    return stored.load()


def seen_tokens(position, length, stride):
    """By brute force: the tokens of the windows that end by a position, window by window."""
    windows = [range(start, start + length) for start in range(0, position + 1, stride)]
    return [window for window in windows if window[-1] <= position]


# -- what a query sees --


@sizes
def test_view_is_what_the_windows_hold(length, stride):
    for position in range(60):
        windows = seen_tokens(position, length, stride)
        covered = {token for window in windows for token in window}
        newest = position - max(covered) if covered else position + 1
        assert pictures.view(position, length, stride) == (len(windows), len(covered), newest)


@sizes
def test_first_seen_is_the_first_query_whose_windows_hold_the_token(length, stride):
    for token in range(40):
        queries = (
            t
            for t in range(120)
            if any(token in window for window in seen_tokens(t, length, stride))
        )
        assert pictures.first_seen(token, length, stride) == next(queries, None)


def test_how_long_a_token_waits():
    """What the chapter says: `length - 1` at most at the start, `stride - 1` at most after the
    first window."""
    waits = [pictures.first_seen(token, 32, 16) - token for token in range(300)]
    assert waits[0] == max(waits) == 31
    assert max(waits[31:]) == 15 and min(waits) == 0


@sizes
def test_a_later_token_changes_no_earlier_output(length, stride):
    """The rule behind all of it: summaries end by the query. Change the last token, and only
    queries that see its window notice."""
    q, k, v = torch.randn(
        3, 1, 40, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    outputs = []
    for value in (0.0, 9.0):
        changed = [x.clone().index_fill_(1, torch.tensor([29]), value) for x in (k, v)]
        summaries = [ops.compress(x, length=length, stride=stride) for x in changed]
        outputs.append(
            ops.compressed_attention(q, *summaries, length=length, stride=stride)[0, :, 0]
        )
    noticed = (outputs[0] != outputs[1]).any(-1).nonzero().flatten().tolist()
    first = pictures.first_seen(29, length, stride)
    assert noticed == ([] if first is None or first >= 40 else list(range(first, 40)))


def test_share_of_work_depends_on_the_stride_alone():
    assert pictures.share_of_work(32, 16) == pytest.approx(1 / 16, rel=1e-3)
    assert pictures.share_of_work(4, 16) == pytest.approx(pictures.share_of_work(32, 16), rel=1e-3)
    twice = (
        costs.compressed_attention(131_072, 131_072, 128).flops
        / costs.compressed_attention(65_536, 65_536, 128).flops
    )
    assert twice == pytest.approx(4, rel=1e-3)


# -- what a mean key knows --


def test_logits_and_mass_of_every_window(heads):
    mean, mass, visible = pictures.logits_and_mass(heads)
    N, M_c = visible.shape
    assert visible.sum(1).tolist() == [num_summaries(t + 1, 32, 16) for t in range(N)]
    k_cmp = compress(heads.k).repeat_interleave(heads.G, 2)
    torch.testing.assert_close(
        mean, torch.einsum("bihd,bjhd->bhij", heads.q, k_cmp)[0] * 32**-0.5, rtol=1e-4, atol=1e-4
    )
    # dense and causal: a window's share is its mass, for visible ones
    weights = stored.attention_weights(heads.q, heads.k)[0]
    head, t = 5, 300
    share = weights[head, t].unfold(0, 32, 16).sum(-1)[visible[t]]
    torch.testing.assert_close(
        (share / share.sum()).float(), mass[head, t][visible[t]].softmax(0), rtol=1e-4, atol=1e-6
    )
    assert (mean.shape, mass.shape) == ((16, N, M_c), (16, N, M_c))


def test_jensen(heads):
    mean, mass, _ = pictures.logits_and_mass(heads, 8, 8)
    assert (mass - mean).min() > -1e-4
    assert (mass - mean).max() > 1  # and it is no equality


def test_correlation_is_numpys_query_by_query(heads):
    mean, mass, visible = pictures.logits_and_mass(heads)
    for head in (4, 12):
        expected = []
        for t in range(pictures.FIRST, len(visible)):
            x, y = (z[head, t][visible[t]].double() for z in (mean, mass))
            expected.append(np.corrcoef(x, y)[0, 1])
        found = pictures.correlation(mean, mass, visible)[head].item()
        assert found == pytest.approx(np.mean(expected), abs=1e-6)
    assert visible[pictures.FIRST].sum() == 7


def test_correlation_is_blind_to_a_constant_per_query(heads):
    mean, mass, visible = pictures.logits_and_mass(heads)
    constant = 10 * torch.randn(*mean.shape[:2], 1, generator=torch.Generator().manual_seed(0))
    found = pictures.correlation(mean, mass, visible)
    torch.testing.assert_close(
        pictures.correlation(mean + constant, mass, visible), found, rtol=0, atol=1e-4
    )
    ones = torch.ones(16, dtype=torch.float64)
    torch.testing.assert_close(
        pictures.correlation(mean, 2 * mean + constant, visible), ones, rtol=0, atol=1e-4
    )


def test_mean_keys_follow_the_weight_within_a_query_least_for_the_needles_head(heads):
    found = pictures.correlation(*pictures.logits_and_mass(heads))
    assert found.argmin() == pictures.NEEDLE[0]
    assert 0.76 < found.min() < 0.78 and 0.98 < found.max() < 0.99
    assert (found > 0.9).sum() == 14


def test_the_chapters_needle(heads):
    """The query in the middle of PurePath finds its window by weight, and not by its mean key."""
    head, t, window = pictures.NEEDLE
    assert heads.text[: t + 1].endswith(b"isinstance(other, Pu")
    mean, mass, visible = pictures.logits_and_mass(heads)
    pair = [window, window + 1]  # the needle is in both
    assert mass[head, t][visible[t]].softmax(0)[pair].sum() > 0.9
    assert mean[head, t][visible[t]].softmax(0)[pair].sum() < 0.25


# -- rotation --


def test_the_turn_is_that_of_the_trained_model(heads):
    train_heads = pytest.importorskip("nsa_tutorial.course.train_heads")
    token = torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(0))
    a, b = train_heads.rotate(token.expand(1, 7, 1, 32))[0, :, 0].chunk(2, -1)
    angle = torch.atan2(b, a).diff(dim=0)
    turned = (angle - pictures.turn_per_token(32) + math.pi) % (2 * math.pi) - math.pi
    assert turned.abs().max() < 1e-4


def test_turning_back_undoes_the_rotation():
    """A token that is the same everywhere but for its rotation survives whole when turned back, and
    not in the mean."""
    train_heads = pytest.importorskip("nsa_tutorial.course.train_heads")
    token = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    k = train_heads.rotate(token.expand(1, 48, 3, 8))
    length, stride = 12, 5
    turned = compress(
        k, kind="linear", length=length, stride=stride, weight=pictures.turn_back(length, 8)
    )
    torch.testing.assert_close(pictures.survival(k, turned, length, stride), torch.ones(3, 4))
    plain = pictures.survival(k, compress(k, length=length, stride=stride), length, stride)
    angle = pictures.turn_per_token(8)
    alone = ((length * angle / 2).sin() / (length * (angle / 2).sin())).abs()
    torch.testing.assert_close(plain, alone.expand(3, 4), rtol=1e-4, atol=1e-4)


def test_turned_back_keys_are_longer_and_no_better(heads):
    turned = compress(heads.k, kind="linear", weight=pictures.turn_back(32, 32))
    mean = compress(heads.k)
    assert (
        pictures.survival(heads.k, turned)[:, :4] > pictures.survival(heads.k, mean)[:, :4]
    ).all()
    task = pictures.task(heads, 0, 512, 16)
    assert (pictures.error(task, turned) > pictures.error(task, mean)).all()


# -- learning --


@pytest.mark.parametrize("kind", ["weighted", "linear", "mlp"])
def test_every_kind_can_be_the_mean(kind):
    x = torch.randn(2, 29, 3, 6, generator=torch.Generator().manual_seed(0))
    weight = pictures.as_weight(kind, pictures.mean_as(kind, 5, 3, 6))
    assert isinstance(weight, MLPWeights) == (kind == "mlp")
    torch.testing.assert_close(
        ops.compress(x, kind=kind, length=5, stride=3, weight=weight),
        ops.compress(x, length=5, stride=3),
    )


def test_error_is_zero_for_what_was_asked_and_blind_to_a_constant_per_query(heads):
    task = pictures.task(heads, 0, 96, 8)
    k_cmp = compress(task.k, stride=8)
    scores = torch.einsum("nhgd,jhd->hgnj", task.q, k_cmp[0]) * 32**-0.5
    constant = torch.randn(4, 4, 96, 1, generator=torch.Generator().manual_seed(0))
    assert pictures.error(task._replace(target=scores + constant), k_cmp).max() < 1e-8
    off_by_one = scores.clone()
    off_by_one[..., 0] += 1  # one window of each query: no constant
    assert pictures.error(task._replace(target=off_by_one), k_cmp).min() > 0.01


def test_a_task_looks_at_no_other_tokens(heads):
    part = pictures.task(heads, 100, 200, 4)
    changed = stored.Heads(
        *(x.clone() for x in (heads.q, heads.k, heads.v)), heads.text, heads.labels, heads.info
    )
    changed.k[:, :100], changed.k[:, 200:] = 7.0, 7.0
    again = pictures.task(changed, 100, 200, 4)
    assert all(torch.equal(x, y) for x, y in zip(part[:4], again[:4], strict=True))


@pytest.mark.parametrize("cut", [(0, 320, 320, 512), (192, 512, 0, 192)], ids=["early", "late"])
def test_what_the_chapter_says_about_learning(heads, cut):
    """Few numbers find something that holds elsewhere; many halve the error where they learnt, and
    gain nothing elsewhere."""
    learn, elsewhere = pictures.task(heads, *cut[:2], 4), pictures.task(heads, *cut[2:], 4)
    rows = pictures.errors_of_kinds(learn, elsewhere)
    of_the_mean = [
        pictures.error(of, compress(of.k, stride=4)).mean().item() for of in (learn, elsewhere)
    ]
    assert rows["mean"] == pytest.approx(of_the_mean)
    share = {
        kind: [x / mean for x, mean in zip(errors, of_the_mean, strict=True)]
        for kind, errors in rows.items()
    }
    assert 0.85 < share["weighted"][0] < 0.95 and 0.85 < share["weighted"][1] < 0.95
    for kind in ("linear", "mlp"):
        assert 0.45 < share[kind][0] < 0.55 and 0.95 < share[kind][1] < 1.05


def test_no_summary_beats_free_keys(heads):
    learn = pictures.task(heads, 0, 320, 4)
    free = pictures.error(learn, pictures.best_keys(learn)).mean()
    linear = pictures.error(
        learn, compress(learn.k, kind="linear", stride=4, weight=pictures.fit(learn, "linear"))
    ).mean()
    assert free < linear < 1.1 * free


# -- the pictures --


def test_findings_carry_their_numbers():
    assert (
        pictures.draw_windows().finding
        == "At position 21 a query sees 4 of 7 summaries; the newest 2 tokens are in none"
    )
    assert (
        "sees 5 of 7 summaries; the last one ends right there"
        in pictures.draw_windows(position=23).finding
    )
    assert pictures.draw_windows(12, 4, 2, 8).finding.endswith("the newest token is in none")
    assert "sees 0 of 1 summary; the newest 3 tokens" in pictures.draw_windows(6, 4, 4, 2).finding
    assert pictures.draw_mean_and_mass().finding.endswith("correlation 0.98, 0.93, 0.77")
    rows = {"mean": (0.2, 0.4), "weighted": (0.2, 0.3), "linear": (0.1, 0.5)}
    assert (
        pictures.draw_errors(rows).finding
        == "On new windows, 'weighted' is best: 25% less error than the mean; "
        "no other kind gains more than 0%"
    )


@pytest.mark.parametrize("position", [0, 15, 50, 95])
@sizes
def test_every_setting_can_be_drawn(position, length, stride):
    assert f"At position {position} " in pictures.draw_windows(96, length, stride, position).finding


def test_the_panel_says_what_the_pure_function_says():
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(62, 32, 16)
    assert "sees 0 summaries: the first one ends at position 31" in panel.set(position=3)
    assert panel.set(length=8, stride=32, position=70) == pictures.sentence(70, 8, 32)
    assert "24 older ones fell between the windows" in panel.sentence
    assert "32.0 times as many scores" in panel.sentence


def test_the_panel_redraws_quickly():
    panel, times = pictures.explore(), []
    for position in range(20, 30):
        started = time.perf_counter()
        panel.set(position=position)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.15


# -- learning is quick --


@pytest.mark.parametrize("learn", ["fit", "best_keys"])
def test_learning_runs_in_one_thread_and_gives_the_others_back(heads, monkeypatch, learn):
    """In several, its many small steps wait for each other: half a minute without a word."""
    before, during = torch.get_num_threads(), []
    of = pictures.task(heads, 0, 64, 8)
    error = pictures.error
    monkeypatch.setattr(
        pictures, "error", lambda *a: during.append(torch.get_num_threads()) or error(*a)
    )
    torch.set_num_threads(2)
    try:
        pictures.fit(of, "weighted", 2) if learn == "fit" else pictures.best_keys(of, 2)
        assert (set(during), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


# -- answers as a reader writes them --


def test_attention_of_the_exercise_is_the_operators():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(23, 4, generator=generator) for _ in range(3))
    summaries = [ops.compress(x[None, :, None], length=5, stride=3) for x in (k, v)]
    o, lse = ops.compressed_attention(
        q[None, :, None], *summaries, length=5, stride=3, return_lse=True
    )
    for t in range(23):
        mine = solutions.attend_to_summaries(q[t], k, v, t, 5, 3)
        torch.testing.assert_close(mine, (o[0, t, 0], lse[0, t, 0]))


def masked_late(q, k, v, position, length, stride):
    k_cmp, v_cmp = (x.unfold(0, length, stride).mean(-1) for x in (k, v))
    scores = k_cmp @ q * len(q) ** -0.5
    weights = torch.softmax(scores, 0)
    weights[solutions.visible_summaries(position, length, stride) :] = 0
    return weights @ v_cmp, scores.logsumexp(0)


def side_by_side(q, k, v, position, length, stride):
    count = solutions.visible_summaries(position, length, stride)
    if count == 0:
        return torch.zeros(v.shape[1]), torch.tensor(-torch.inf)
    k_cmp, v_cmp = (
        torch.stack([x[i : i + length].mean(0) for i in range(0, len(x) - length + 1, length)])
        for x in (k, v)
    )
    scores = (k_cmp[:count] @ q) * len(q) ** -0.5
    return torch.softmax(scores, 0) @ v_cmp[:count], scores.logsumexp(0)


def attention(summarise, at_once=lambda k_cmp, q: k_cmp @ q, width=None, log=torch.log):
    """`attend_to_summaries` with parts of a reader's own."""

    def attempt(q, k, v, position, length, stride):
        count = solutions.visible_summaries(position, length, stride)
        if count == 0:
            o = torch.zeros(v.shape[1]) if width is None else width(q)
            return o, torch.tensor(-math.inf)
        k_cmp, v_cmp = (summarise(x.unfold(0, length, stride))[:count] for x in (k, v))
        scores = at_once(k_cmp, q) * len(q) ** -0.5
        return scores.softmax(0) @ v_cmp, log(scores.exp().sum())

    return attempt


def mean(windows):
    return windows.mean(-1)


def across(windows):
    return windows.mean(1)


def lse_first(*arguments):
    o, lse = attention(mean)(*arguments)
    return lse, o


def of_another_width(q, k, v, *sizes):
    return attention(mean, lambda k_cmp, q: k_cmp @ q * (len(q) / 2) ** 0.5)(q, k, v, *sizes)


def by_position(q, k, v, position, length, stride):
    k_cmp, v_cmp = (mean(x.unfold(0, length, stride))[:position] for x in (k, v))
    scores = q @ k_cmp.T * len(q) ** -0.5
    return torch.softmax(scores, -1) @ v_cmp, scores.logsumexp(-1)


def across_and_no_zeros(q, k, v, position, length, stride):
    count = solutions.visible_summaries(position, length, stride)
    k_cmp, v_cmp = (across(x.unfold(0, length, stride)) for x in (k, v))
    scores = k_cmp @ q * len(q) ** -0.5
    scores = scores.masked_fill(torch.arange(len(k_cmp)) >= count, -torch.inf)
    return torch.softmax(scores, -1) @ v_cmp, scores.logsumexp(-1)


ACROSS = "averaging the numbers of a token, not the tokens of a window"
LATE = "letting a summary be seen only after its last token"


@pytest.mark.parametrize(
    ("name", "attempt", "named"),
    [
        (
            "visible_summaries",
            lambda t, length, stride: len(range(0, t - length + 1, stride)),
            LATE,
        ),
        ("visible_summaries", lambda t, length, stride: (t - length) // stride + 1, LATE),
        (
            "visible_summaries",
            lambda t, length, stride: int((t + 1 - length) / stride + 1),
            "going below zero at the start",
        ),
        ("attend_to_summaries", masked_late, "masking after the softmax"),
        ("attend_to_summaries", side_by_side, "windows that do not overlap"),
        (
            "window_logit",
            lambda s: (s.mean(1), s.exp().sum(1).log()),
            "the log-sum-exp without the length",
        ),
        (
            "visible_summaries",
            lambda t, length, stride: max(0, (t + 1) // stride - 1),
            "taking every window to be two strides long",
        ),
        ("attend_to_summaries", attention(across), ACROSS),
        ("attend_to_summaries", attention(across, lambda k, q: q @ k.T), ACROSS),
        ("attend_to_summaries", of_another_width, "taking the `D` of an earlier cell"),
        (
            "attend_to_summaries",
            by_position,
            "taking the position for the number of summaries",
        ),
        (
            "attend_to_summaries",
            lambda *arguments: attention(mean)(*arguments)[0],
            "returning `o` alone",
        ),
        (
            "window_logit",
            lambda s: (s.mean(1), torch.logsumexp(s / s.shape[1], 1)),
            "dividing the scores by the length before the exponentials",
        ),
        ("attend_to_summaries", lse_first, "returning `lse` before `o`"),
        (
            "attend_to_summaries",
            attention(mean, width=torch.zeros_like),
            "an output as wide as the query",
        ),
        (
            "attend_to_summaries",
            attention(mean, width=lambda q: 0.0),
            "one number for an output of zeros",
        ),
        ("attend_to_summaries", attention(mean, log=torch.log2), "an lse to the base two"),
        (
            "window_logit",
            lambda s: (s.mean(1), s.logsumexp(1) - math.log2(s.shape[1])),
            "the length's logarithm to the base two",
        ),
        (
            "window_logit",
            lambda s: (s.mean(1), s.logsumexp(1) - math.log(32)),
            "taking 32 for every window's length",
        ),
    ],
    ids=[
        "a range",
        "late",
        "below zero, by int",
        "masked late",
        "side by side",
        "overflow",
        "two strides",
        "the numbers of a token",
        "the numbers, transposed",
        "another D",
        "by position",
        "o alone",
        "scores by the length",
        "lse first",
        "q's width",
        "zero",
        "base two",
        "log2 of the length",
        "32 for the length",
    ],
)
def test_a_readers_mistake_is_named(name, attempt, named):
    """None of these is written like the misconception that names it."""
    assert named in judge(KNOWN[name], attempt).misconceptions


def test_the_axis_is_named_before_the_query_that_sees_nothing():
    """The case that is shown sees two summaries."""
    verdict = judge(KNOWN["attend_to_summaries"], across_and_no_zeros)
    assert verdict.misconceptions[0] == ACROSS
    assert verdict.text.index("print its shape") < verdict.text.index("Where a query sees no")


# -- the kernel --


def cell(start: str) -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (text for c in cells if (text := "".join(c["source"])).startswith(start))
    return found


def in_a_cell(source: str) -> Callable:
    """`window_means` as a cell defines it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"tl": tl, "triton": triton}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace["window_means"]


@pytest.fixture
def kernel_exercise():
    e = KNOWN["window_means"]
    if e.missing:
        pytest.skip(e.missing[0])
    return e


START = ("window * length +", "window * stride +")
LOAD = ("tl.load(X + places)", "tl.load(X + places, mask=tokens[:, None] < length, other=0.0)")


def test_the_kernel_in_the_cell_is_not_attempted_until_it_is_edited(kernel_exercise):
    given = cell("def window_means")
    assert judge(kernel_exercise, in_a_cell(given)).outcome == "not attempted"
    comment = given.replace("# [BL, D]", "# places")
    assert judge(kernel_exercise, in_a_cell(comment)).outcome == "not attempted"
    assert judge(kernel_exercise, in_a_cell(given.replace(*START).replace(*LOAD))).text.startswith(
        "Right"
    )


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([START], ("adding tokens that lie behind the window",)),
        ([LOAD], ("laying the windows side by side",)),
        ([START, LOAD, (", other=0.0", "")], ("a masked load without `other`",)),
        (
            [START, LOAD, ("tokens[:, None] < length", "tokens[:, None] < stride")],
            ("loading `stride` tokens of a window",),
        ),
        (
            [START, LOAD, ("axis=0) / length", "axis=0) / BL")],
            ("dividing by the height of the tile",),
        ),
        (
            [START, LOAD, ("mask=tokens[:, None]", "mask=tokens")],
            ("masking numbers of a key, not tokens",),
        ),
        (
            [("window * length +", "window * BL +"), LOAD],
            ("starting a window every BL tokens",),
        ),
        (
            [START, LOAD, ("axis=0", "axis=1")],
            ("summing the numbers of a token, not the tokens of a window",),
        ),
    ],
    ids=["no mask", "side by side", "no other", "stride", "divided by BL", "columns", "tiles",
         "axis 1"],
)  # fmt: skip
def test_half_mended_kernels_are_named(kernel_exercise, edits, named):
    source = cell("def window_means")
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    assert judge(kernel_exercise, in_a_cell(source)).misconceptions == named


def test_what_an_unset_place_does_is_said_once(kernel_exercise):
    """The mistake's own sentence suffices: no error beside it, and no number that looks right."""
    source = cell("def window_means").replace(*START).replace(*LOAD).replace(", other=0.0", "")
    verdict = judge(kernel_exercise, in_a_cell(source))
    assert "`BL` is 4" in verdict.text and "raised" not in verdict.text
    assert "nan" in verdict.text


def test_triton_has_no_mean(kernel_exercise):
    source = cell("def window_means").replace(*START).replace("tl.sum(x_tile", "tl.mean(x_tile")
    assert "It has `tl.sum`" in judge(kernel_exercise, in_a_cell(source)).text


@pytest.mark.parametrize(
    "attempt", [lambda: lambda X: None, lambda: 3], ids=["no decorator", "a number"]
)
def test_what_is_no_kernel_is_told(kernel_exercise, attempt):
    assert "@triton.jit" in judge(kernel_exercise, attempt).text


def test_a_kernel_that_is_not_returned_is_told(kernel_exercise):
    def forgotten():
        def kernel(X):
            return X

    verdict = judge(kernel_exercise, forgotten)
    assert (verdict.outcome, "return kernel" in verdict.text) == ("wrong", True)


# -- promises --


def test_the_minutes_are_told():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    kernel = KNOWN["window_means"].minutes
    assert f"{sum(e.minutes for e in KNOWN.values()) - kernel} of them exercises" in prose
    assert f"The kernel ({kernel} minutes)" in prose
