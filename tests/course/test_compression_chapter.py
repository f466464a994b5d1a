"""Chapter 06: what a query sees of its past, what a mean key knows of its window, what learning a
summary gains; the pictures, the kernel, and answers as readers write them."""

import functools
import json
import linecache
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
    assert visible.sum(1).tolist() == [num_summaries(t + 1, 16, 8) for t in range(N)]
    k_cmp = compress(heads.k, length=16, stride=8).repeat_interleave(heads.G, 2)
    torch.testing.assert_close(
        mean, torch.einsum("bihd,bjhd->bhij", heads.q, k_cmp)[0] * 32**-0.5, rtol=1e-4, atol=1e-4
    )
    # dense and causal: a window's share is its mass, for visible ones
    weights = stored.attention_weights(heads.q, heads.k)[0]
    head, t = 5, 300
    share = weights[head, t].unfold(0, 16, 8).sum(-1)[visible[t]]
    torch.testing.assert_close(
        (share / share.sum()).float(), mass[head, t][visible[t]].softmax(0), rtol=1e-4, atol=1e-6
    )
    assert (mean.shape, mass.shape) == ((16, N, M_c), (16, N, M_c))


def test_jensen(heads):
    mean, mass, _ = pictures.logits_and_mass(heads, 8, 8)
    assert (mass - mean).min() > -1e-4
    assert (mass - mean).max() > 1  # and it is no equality


def test_well_placed_by_hand():
    """Two windows, shares 1/4 and 3/4 by mean keys, halves by weight: 1/4 + 1/2 are well placed."""
    mean = torch.tensor([0.0, math.log(3)]).expand(1, 2, 2)
    visible = torch.tensor([[False, False], [True, True]])
    right = torch.tensor([[[0, 0], [0.25, 0.75]]])
    torch.testing.assert_close(pictures.shares(mean, visible), right)
    found = pictures.well_placed(mean, torch.zeros(1, 2, 2), visible, first=1)
    assert found.tolist() == pytest.approx([0.75])


def test_well_placed_is_blind_to_a_constant_per_query(heads):
    mean, mass, visible = pictures.logits_and_mass(heads)
    constant = 10 * torch.randn(*mean.shape[:2], 1, generator=torch.Generator().manual_seed(0))
    found = pictures.well_placed(mean, mass, visible)
    torch.testing.assert_close(
        pictures.well_placed(mean + constant, mass, visible), found, rtol=0, atol=1e-4
    )
    assert (found < 1).all() and pictures.well_placed(mass, mass, visible).min() > 0.999


def test_mean_keys_place_attention_worst_for_the_needles_head(heads):
    """What the chapter says of layers 0, 2 and 3."""
    found = pictures.well_placed(*pictures.logits_and_mass(heads))
    assert found.argmin() == pictures.NEEDLE[0]
    assert found[:8].min() > 0.87 and found[:8].max() < 0.96
    assert found[8:].max() < 0.88


def test_the_chapters_needle(heads):
    """The query in the middle of PurePath finds its window by weight, and not by its mean key."""
    head, t, window = pictures.NEEDLE
    assert heads.text[: t + 1].endswith(b"isinstance(other, Pu")
    mean, mass, visible = pictures.logits_and_mass(heads)
    pair = [window, window + 1]  # the needle is in both
    assert visible[t].sum() == 55
    assert round(100 * mass[head, t][visible[t]].softmax(0)[pair].sum().item()) == 93
    assert mean[head, t][visible[t]].softmax(0)[pair].sum() == pytest.approx(0.25, abs=0.01)
    assert mean[head, t][pair].tolist() == pytest.approx([2.9, 3.3], abs=0.05)
    scores = heads.q[0, t, head] @ heads.k[0, :t, head // heads.G].T * 32**-0.5
    needle = scores.argmax().item()
    assert heads.text[needle - 2 : needle + 1] == b"Pur"
    assert scores[needle].item() == pytest.approx(13.3, abs=0.05)
    for j in pair:  # four more letters of PurePath, and eleven tokens near 0
        others = sorted(scores[8 * j : 8 * j + 16].tolist())[:-1]
        assert others[-4] > 6.5 and others[-1] < 11 and max(map(abs, others[:-4])) < 4
    assert heads.labels[head] == "layer 3 head 4"


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
    k_cmp = compress(task.k, length=16, stride=8)
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


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param((0, 320, 320, 512), id="early"),
        pytest.param((192, 512, 0, 192), id="late", marks=pytest.mark.exhaustive),
    ],
)
def test_what_the_chapter_says_about_learning(heads, cut):
    """Few numbers find something that holds elsewhere; many halve the error where they learnt, and
    gain nothing elsewhere."""
    learn, elsewhere = pictures.task(heads, *cut[:2], 4), pictures.task(heads, *cut[2:], 4)
    rows = pictures.errors_of_kinds(learn, elsewhere)
    of_the_mean = [
        pictures.error(of, compress(of.k, length=16, stride=4)).mean().item()
        for of in (learn, elsewhere)
    ]
    assert rows["mean"] == pytest.approx(of_the_mean)
    share = {
        kind: [x / mean for x, mean in zip(errors, of_the_mean, strict=True)]
        for kind, errors in rows.items()
    }
    assert 0.9 < share["weighted"][0] < 0.95 and 0.94 < share["weighted"][1] < 0.98
    for kind in ("linear", "mlp"):
        assert 0.5 < share[kind][0] < 0.6 and 0.98 < share[kind][1] < 1.05


def test_no_summary_beats_free_keys(heads):
    learn = pictures.task(heads, 0, 320, 4)
    free = pictures.error(learn, pictures.best_keys(learn)).mean()
    linear = pictures.error(
        learn,
        compress(learn.k, kind="linear", length=16, stride=4, weight=pictures.fit(learn, "linear")),
    ).mean()
    assert 0.9 * linear < 1.1 * free < 1.1 * linear


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
    assert pictures.draw_needle().finding == (
        "By weight, windows 29 and 30 get 93 % of the attention, by their mean keys 25 %"
    )
    assert pictures.draw_heads().finding == (
        "Mean keys put 67 to 95 % of the attention where the weight puts it"
    )
    assert pictures.draw_costs().finding == (
        "From 32,768 tokens on, a query reads more summaries than listed keys"
    )
    rows = {"mean": (0.2, 0.4), "weighted": (0.2, 0.3), "linear": (0.1, 0.5)}
    assert (
        pictures.draw_errors(rows).finding
        == "On new windows, 'weighted' is best: 25% less error than the mean; "
        "no other kind gains"
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


SHAPES = [(23, 5, 3, 1, 1), (23, 5, 3, 6, 2), (40, 4, 2, 4, 4), (3, 4, 2, 2, 1), (12, 2, 5, 2, 2)]


@pytest.mark.parametrize(("N", "length", "stride", "HQ", "H"), SHAPES, ids=str)
def test_the_builds_are_the_operators(N, length, stride, HQ, H):
    """Results, and gradients of a loss that uses both."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((N, HQ, 4), (N, H, 4), (N, H, 3))
    inputs = [torch.randn(x, generator=generator).double().requires_grad_() for x in sizes]

    def outputs(compress, attend):
        q, k, v = inputs
        o, lse = attend(q, *(compress(x, length, stride) for x in (k, v)))
        loss = (o**2).sum() + lse[lse.isfinite()].sum()
        return (o, lse, *torch.autograd.grad(loss, inputs))

    def operator(q, k_cmp, v_cmp):
        o, lse = ops.compressed_attention(
            *(x[None] for x in (q, k_cmp, v_cmp)), length=length, stride=stride, return_lse=True
        )
        return o[0], lse[0]

    mine = outputs(
        solutions.compress, lambda *x: solutions.compressed_attention(*x, length, stride)
    )
    right = outputs(lambda x, *sizes: ops.compress(x[None], length=length, stride=stride)[0],
                    operator)  # fmt: skip
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other)


def in_a_loop(q, k_cmp, v_cmp, length, stride, *, ended=None, told=lambda lse, length: lse):
    """Query by query and head by head, as a reader may write it; right without the last two."""
    ended = ended or (lambda j: j * stride + length - 1)
    (N, HQ, D), (_, H, DV) = q.shape, v_cmp.shape
    o, lse = [], []
    for t in range(N):
        count = sum(ended(j) <= t for j in range(len(k_cmp)))
        for hq in range(HQ):
            keys, values = (x[:count, hq // (HQ // H)] for x in (k_cmp, v_cmp))
            s = keys @ q[t, hq] / math.sqrt(D)
            lse.append(told(s.logsumexp(0), length))
            o.append(torch.softmax(s, 0) @ values)
    return torch.stack(o).view(N, HQ, DV), torch.stack(lse).view(N, HQ)


def seen_from(end):
    """A summary is seen from the token `end(j, length, stride)` on."""

    def compressed_attention(q, k_cmp, v_cmp, length, stride):
        ended = functools.partial(end, length=length, stride=stride)
        return in_a_loop(q, k_cmp, v_cmp, length, stride, ended=ended)

    return compressed_attention


def one_head(q, k_cmp, v_cmp, length, stride, *, hide=-torch.inf, nan=None):
    """Right for one head, and for queries that see something; steps on the way to the whole."""
    end = torch.arange(len(k_cmp)) * stride + length - 1
    s = q[:, 0] @ k_cmp[:, 0].T * q.shape[2] ** -0.5
    s = torch.where(end <= torch.arange(len(q))[:, None], s, hide)
    p = torch.softmax(s, -1)
    p = p if nan is None else torch.nan_to_num(p, nan)
    return (p @ v_cmp[:, 0])[:, None], s.logsumexp(-1)[:, None]


def without_hiding(q, k_cmp, v_cmp, length, stride):
    s = torch.einsum("nhd,mhd->nhm", q, k_cmp) * q.shape[2] ** -0.5
    return torch.einsum("nhm,mhd->nhd", s.softmax(-1), v_cmp), s.logsumexp(-1)


def one_value(q, k_cmp, v_cmp, length, stride):
    """All that the first stage asks for."""
    s = (q * k_cmp).sum(-1) * q.shape[2] ** -0.5
    return v_cmp.expand(len(q), -1, -1), s


def of_numbers(q, k_cmp, v_cmp, length, stride):
    """A lower triangle, as dense attention has."""
    s = torch.einsum("nhd,mhd->nhm", q, k_cmp) * q.shape[2] ** -0.5
    hidden = torch.ones(len(q), len(k_cmp)).triu(1).bool()[:, None]
    s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("nhm,mhd->nhd", s.softmax(-1), v_cmp), s.logsumexp(-1)


def late_zeros(q, k_cmp, v_cmp, length, stride):
    """NaN is overwritten in `o`, and stays in the graph."""
    o, lse = in_a_table(q, k_cmp, v_cmp, length, stride)
    return torch.where(o.isnan(), 0.0, o), lse


def in_a_table(q, k_cmp, v_cmp, length, stride):
    G = q.shape[1] // k_cmp.shape[1]
    keys, values = (x.repeat_interleave(G, 1) for x in (k_cmp, v_cmp))
    s = torch.einsum("nhd,mhd->hnm", q, keys) / q.shape[2] ** 0.5
    start = torch.arange(len(keys)) * stride
    s[:, start + length > torch.arange(1, len(q) + 1)[:, None]] = -torch.inf
    return torch.einsum("hnm,mhd->nhd", s.softmax(-1), values), s.logsumexp(-1).T


def in_groups(
    q, k_cmp, v_cmp, length, stride, *, cut="nhgd", weigh=None, told=lambda s: s.logsumexp(-1)
):
    """Groups as an axis of their own: `cut` is how the heads of `q` are taken apart."""
    (N, HQ, D), (M_c, H, DV) = q.shape, v_cmp.shape
    q = q.reshape(N, H, HQ // H, D) if cut == "nhgd" else q.reshape(N, HQ // H, H, D)
    s = torch.einsum(f"{cut},mhd->nhgm", q, k_cmp) * D**-0.5
    hidden = torch.arange(M_c) * stride + length > torch.arange(1, N + 1)[:, None]
    s = s.masked_fill(hidden[:, None, None], -torch.inf)
    p = (weigh or (lambda s: s.softmax(-1).nan_to_num(0)))(s)
    o = torch.einsum("nhgm,mhd->nhgd", p, v_cmp)
    return o.reshape(N, HQ, DV), told(s).reshape(N, HQ)


def means_in_a_loop(x, length, stride, *, last=1, over=lambda window: window.mean(0)):
    starts = range(0, len(x) - length + last, stride)
    found = [over(x[start : start + length]) for start in starts]
    return torch.stack(found) if found else x[:0]


def means_of_a_view(x, length, stride):
    """Right side by side, and only there."""
    whole = len(x) // length
    return x[: whole * length].view(whole, length, *x.shape[1:]).mean(1)


def test_a_reader_may_write_loops():
    for attempt in (in_a_loop, in_groups):
        assert judge(KNOWN["compressed_attention"], attempt).outcome == "right"
    assert judge(KNOWN["compress"], means_in_a_loop).outcome == "right"


@pytest.mark.parametrize(
    ("name", "attempt", "held"),
    [
        ("compress", lambda x, length, stride: x[:length].mean(0, keepdim=True), 1),
        ("compress", means_of_a_view, 2),
        ("compress", lambda x, length, stride: x.unfold(0, length, stride).mean(-1), 5),
        ("compressed_attention", one_value, 1),
        ("compressed_attention", without_hiding, 2),
        ("compressed_attention", one_head, 3),
        ("compressed_attention", lambda *x: one_head(*x, nan=0.0), 4),
        ("compressed_attention", late_zeros, 5),
    ],
    ids=["one mean", "a view", "unfold", "one value", "all seen", "one head", "no NaN", "o.where"],
)
def test_a_half_done_function_holds_its_stages(name, attempt, held):
    verdict = judge(replace(KNOWN[name], misconceptions=()), attempt)
    assert (verdict.outcome, verdict.held) == ("wrong", held)


@pytest.mark.parametrize("name", ["compress", "compressed_attention"])
def test_the_courses_own_function_is_refused(name):
    def attempt(*arguments):
        if name == "compress":
            x, length, stride = arguments
            return ops.compress(x[None], length=length, stride=stride)[0]
        q, k_cmp, v_cmp, length, stride = arguments
        sizes = {"length": length, "stride": stride, "return_lse": True}
        return tuple(
            x[0] for x in ops.compressed_attention(q[None], k_cmp[None], v_cmp[None], **sizes)
        )

    assert "the course's own function" in judge(KNOWN[name], attempt).text


def test_an_input_that_is_scaled_in_place_is_refused():
    def attempt(q, k_cmp, v_cmp, length, stride):
        q *= q.shape[2] ** -0.5
        s = torch.einsum("nhd,mhd->nhm", q, k_cmp)
        return torch.einsum("nhm,mhd->nhd", s.softmax(-1), v_cmp), s.logsumexp(-1)

    assert "another one after the call" in judge(KNOWN["compressed_attention"], attempt).text


def test_a_gradient_that_is_nan_is_told_as_a_gradient():
    verdict = judge(KNOWN["compressed_attention"], late_zeros)
    assert verdict.misconceptions == ("taking NaN out of `o` too late",)
    assert "`d_v_cmp`" in verdict.text


@pytest.mark.parametrize(
    ("name", "attempt", "named"),
    [
        (
            "window_logit",
            lambda s: (s.mean(1), s.exp().sum(1).log()),
            "the log-sum-exp without the length",
        ),
        (
            "window_logit",
            lambda s: (s.mean(1), torch.logsumexp(s / s.shape[1], 1)),
            "dividing the scores by the length before the exponentials",
        ),
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
        (
            "compress",
            lambda x, length, stride: means_in_a_loop(x, length, stride, last=0),
            "leaving out the last window",
        ),
        (
            "compress",
            lambda x, length, stride: means_in_a_loop(x, length, stride, last=length),
            "summarising windows that are only partly there",
        ),
        (
            "compress",
            lambda x, length, stride: means_in_a_loop(x, length, stride, over=lambda w: w.sum(0)),
            "the sum in place of the mean",
        ),
        (
            "compress",
            lambda x, length, stride: x.unfold(0, length, length).mean(-1),
            "windows that do not overlap",
        ),
        ("compress", lambda x, length, stride: x.unfold(0, length, stride).mean(-1),
         "a text too short for a window"),
        (
            "compress",
            lambda x, length, stride: torch.stack(
                [x[j * stride : j * stride + length].mean(0) for j in range(len(x) // length)]
            ),
            "counting as many windows as lie side by side",
        ),
        *(
            ("compressed_attention", seen_from(end), "letting a summary be seen at half its window")
            for end in (
                lambda j, length, stride: j * stride + length // 2,
                lambda j, length, stride: j * stride + length // 2 - 1,
            )
        ),
        (
            "compressed_attention",
            seen_from(lambda j, length, stride: j * length),
            "letting a summary be seen from token `j * length` on",
        ),
        (
            "compressed_attention",
            lambda *x: in_a_loop(*x, told=lambda lse, length: lse.detach()),
            "an lse that autograd cannot follow",
        ),
        (
            "compressed_attention",
            lambda *x: in_a_loop(*x, told=lambda lse, length: lse + math.log(length)),
            "counting a summary `length` times in lse",
        ),
        (
            "compressed_attention",
            of_numbers,
            "comparing a summary's number with a query's position",
        ),
        ("compressed_attention", without_hiding, "seeing all summaries"),
        (
            "compressed_attention",
            lambda *x: one_head(*x, hide=-1e9),
            "a large negative number in place of −∞",
        ),
        ("compressed_attention", one_head, "a softmax over nothing"),
        (
            "compressed_attention",
            lambda *x: in_a_loop(*x)[::-1],
            "returning `lse` before `o`",
        ),
        ("compressed_attention", lambda *x: in_a_loop(*x)[0], "returning `o` alone"),
        (
            "compressed_attention",
            lambda q, *x: in_a_loop(2 * q, *x),
            "leaving out the scale",
        ),
        (
            "compressed_attention",
            lambda *x: in_groups(*x, told=lambda s: s.exp().sum(-1).log()),
            "exponentials that overflow",
        ),
        (
            "compressed_attention",
            lambda *x: in_groups(
                *x,
                weigh=lambda s: s.softmax(-1),
                told=lambda s: s.logsumexp(-1).nan_to_num(0),
            ),
            "mending `lse` where the weights are NaN",
        ),
        (
            "compressed_attention",
            lambda *x: in_groups(*x, cut="nghd"),
            "cutting the heads as `[G, H]` and joining them as `[H, G]`",
        ),
    ],
)  # fmt: skip
def test_a_readers_mistake_is_named(name, attempt, named):
    """None of these is written like the misconception that names it."""
    assert named in judge(KNOWN[name], attempt).misconceptions


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
    assert f"About {kernel} minutes. Here is a Triton kernel" in prose
