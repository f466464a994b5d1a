"""Chapter 03: streaming softmax against an independent fp64 computation, merging, edge cases, and
the interactive."""

import itertools
import math

import pytest
import torch

from nsa_tutorial.course.widgets import online_softmax as pictures
from nsa_tutorial.exact import online_softmax

LN_2 = math.log(2)


def randn(seed, *shape, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def oracle(q, k, v, scale, visible):
    """Row by row, in fp64, over the visible keys only: shares nothing with the code under test."""
    q, k, v = q.double(), k.double(), v.double()
    o, lse = (
        torch.zeros(len(q), v.shape[1], dtype=torch.float64),
        torch.full((len(q),), -math.inf, dtype=torch.float64),
    )
    for i in range(len(q)):
        keys = visible[i].nonzero()[:, 0]
        if len(keys):
            scores = (k[keys] * q[i]).sum(1) * scale
            lse[i] = scores.logsumexp(0)
            o[i] = (scores - lse[i]).exp() @ v[keys]
    return o, lse


def causal(N, M):
    return torch.ones(N, M).tril(M - N).bool()


@pytest.mark.parametrize("chunk", [1, 3, 16, 64], ids=lambda c: f"chunk-{c}")
@pytest.mark.parametrize(
    ("N", "M"),
    [(1, 1), (1, 37), (5, 37), (37, 37)],
    ids=["one-key", "decode", "last-5-of-37", "square"],
)
def test_streaming_equals_whole_rows(N, M, chunk):
    q, k, v = randn(0, N, 8), randn(1, M, 8), randn(2, M, 5)
    o, lse = online_softmax.streaming_attention(q, k, v, chunk=chunk)
    expected_o, expected_lse = oracle(q, k, v, 8**-0.5, causal(N, M))
    torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_streaming_equals_torch_without_mask_and_with_a_scale():
    q, k, v = randn(3, 7, 16), randn(4, 30, 16), randn(5, 30, 3)
    o, _ = online_softmax.streaming_attention(q, k, v, chunk=7, scale=0.3, causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], scale=0.3
    )[0]
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
def test_error_stays_within_twice_that_of_plain_pytorch(dtype):
    q, k, v = (randn(i, 50, width, dtype=dtype) for i, width in ((6, 16), (7, 16), (8, 9)))
    o, lse = online_softmax.streaming_attention(q, k, v, chunk=13)
    assert o.dtype == dtype and lse.dtype == torch.float32
    expected, _ = oracle(q, k, v, 0.25, causal(50, 50))
    plain = torch.softmax((q @ k.T * 0.25).masked_fill(~causal(50, 50), -math.inf), 1) @ v
    assert (o.double() - expected).abs().max() <= 2 * (plain.double() - expected).abs().max() + 1e-6


@pytest.mark.parametrize(
    "order", ["ascending", "descending", "cliff-down", "cliff-up", "all-equal", "far-below-zero"]
)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_adversarial_scores_stay_exact_in_fp32(order, chunk):
    scores = {
        "ascending": torch.arange(12.0) * 60,
        "descending": torch.arange(12.0).flip(0) * 60,
        "cliff-down": torch.tensor([300.0] * 4 + [0.0] * 8),
        "cliff-up": torch.tensor([0.0] * 4 + [300.0] * 8),
        "all-equal": torch.full((12,), 1000.0),
        "far-below-zero": -5000 - torch.arange(12.0),
    }[order]
    v = randn(9, 12, 2, dtype=torch.float32)
    o, lse = online_softmax.finish(
        online_softmax.trace(scores[None], v, 1.0, chunk=chunk)[-1], LN_2
    )
    torch.testing.assert_close(
        o[0].double(), torch.softmax(scores.double() * LN_2, 0) @ v.double(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        lse[0].double(), torch.logsumexp(scores.double() * LN_2, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [1, 2])
def test_scores_near_minus_1000_lose_no_digits(chunk):
    """Two products with scale_log2 round at a size of 1443, by up to 6e-5 each; the difference of
    the scores does not."""
    scores, v = (
        torch.tensor([[-1001.0, -1000.3, -1000.0, -1000.9]]),
        torch.tensor([[1.0], [0.0], [0.0], [1.0]]),
    )
    o, _ = online_softmax.finish(
        online_softmax.trace(scores, v, online_softmax.LOG2_E, chunk=chunk)[-1], 1.0
    )
    torch.testing.assert_close(
        o.double(), torch.softmax(scores.double(), 1) @ v.double(), rtol=0, atol=5e-7
    )


def test_the_running_max_never_falls_and_the_rescale_never_grows():
    states = online_softmax.trace(50 * randn(10, 4, 40), randn(11, 40, 3), 0.7, chunk=6)
    assert len(states) == 1 + 7
    for before, after in itertools.pairwise(states):
        assert (after.scores_max >= before.scores_max).all()
        assert (after.running_sum >= 1).all()  # the largest score itself contributes exp2(0)


def test_smallest_input_that_breaks_the_chunks_own_max():
    pair, v = torch.tensor([[128.0, 0.0]]), torch.tensor([[1.0], [0.0]])
    state = online_softmax.trace(pair, v, 1.0, chunk=1)[-1]
    assert (state.acc_o / state.running_sum).item() == 1.0
    # what a step measuring from the second chunk multiplies by
    assert torch.exp2(pair[0, 0] - pair[0, 1]).isinf()


@pytest.mark.parametrize("past", ["none", "some"])
def test_a_fully_masked_chunk_changes_nothing(past):
    state = online_softmax.start(3, 2, dtype=torch.float64)
    if past == "some":
        state = online_softmax.update(state, randn(12, 3, 4) - 900, randn(13, 4, 2), 1.3)
    after = online_softmax.update(
        state, torch.full((3, 5), -math.inf, dtype=torch.float64), randn(14, 5, 2), 1.3
    )
    for old, new in zip(state, after, strict=True):
        assert torch.equal(old, new)


def test_rows_masked_in_different_places_share_a_walk():
    scores, v = randn(15, 4, 12), randn(16, 12, 3)
    visible = torch.ones(4, 12, dtype=torch.bool)
    visible[0] = False  # sees nothing at all
    visible[1, :8] = False  # starts with two masked chunks
    visible[2, 4:] = False  # ends with two
    state = online_softmax.trace(
        scores.masked_fill(~visible, -math.inf), v, online_softmax.LOG2_E, chunk=4
    )[-1]
    o, lse = online_softmax.finish(state, 1.0)
    expected_o, expected_lse = oracle(scores, torch.eye(12, dtype=torch.float64), v, 1.0, visible)
    torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    assert o[0].tolist() == [0.0, 0.0, 0.0] and lse[0] == -math.inf


def test_merging_parts_in_any_order_equals_the_whole():
    q, k, v = randn(17, 6, 4), randn(18, 41, 4), randn(19, 41, 3)
    whole = online_softmax.streaming_attention(q, k, v, chunk=41, causal=False)
    merged = (
        torch.zeros(6, 3, dtype=torch.float64),
        torch.full((6,), -math.inf, dtype=torch.float64),
    )
    for part in (slice(30, 41), slice(0, 1), slice(1, 30)):
        merged = online_softmax.merge(
            *merged, *online_softmax.streaming_attention(q, k[part], v[part], chunk=8, causal=False)
        )
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lift", [0.0, 800.0, -800.0], ids=["near-0", "near-800", "near-minus-800"])
def test_merge_keeps_the_shares_at_any_height(lift):
    lse1, lse2 = torch.tensor([[lift]]), torch.tensor([[lift + math.log(3)]])
    o, lse = online_softmax.merge(
        torch.tensor([[[0.0, 8.0]]]), lse1, torch.tensor([[[4.0, 0.0]]]), lse2
    )
    torch.testing.assert_close(o, torch.tensor([[[3.0, 2.0]]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, torch.tensor([[lift + math.log(4)]]))


@pytest.mark.parametrize("empty", ["left", "right", "both"])
def test_merge_with_empty_parts(empty):
    nothing, something = (
        (torch.zeros(2, 3), torch.full((2,), -math.inf)),
        (torch.ones(2, 3), torch.tensor([-700.0, 700.0])),
    )
    left = something if empty == "right" else nothing
    right = something if empty == "left" else nothing
    expected = nothing if empty == "both" else something
    for got, wanted in zip(online_softmax.merge(*left, *right), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_chunk_must_hold_a_key():
    with pytest.raises(ValueError, match="chunk: expected at least 1 key per step, got 0"):
        online_softmax.streaming_attention(randn(0, 2, 4), randn(1, 2, 4), randn(2, 2, 4), chunk=0)


def test_the_picture_walks_as_the_module_does():
    scores, v = pictures.row(7), pictures.positions()
    states = online_softmax.trace(scores[None], v[:, None], 1.0, chunk=pictures.CHUNK)[1:]
    moments = pictures.walk(scores, v)
    assert len(moments) == len(states) == pictures.CHUNKS
    for moment, state in zip(moments, states, strict=True):
        assert (moment.scores_max, moment.running_sum) == (
            state.scores_max.item(),
            pytest.approx(state.running_sum.item()),
        )
        assert moment.acc_o == pytest.approx(state.acc_o.item())
        assert sum(moment.parts) == pytest.approx(moment.running_sum)
        assert moment.o == pytest.approx(moment.exact)


@pytest.mark.parametrize("reference", pictures.REFERENCES)
def test_only_the_running_max_survives_a_lifted_first_chunk(reference):
    for lift, survives in (
        (0, True),
        (100, True),
        (130, reference == "running max"),
        (160, reference == "running max"),
    ):
        last = pictures.walk(pictures.row(lift), pictures.positions(), reference)[-1]
        assert (last.o == pytest.approx(last.exact)) is survives
        assert math.isinf(last.running_sum) is not survives


def test_the_limits_are_where_2_to_the_128_is():
    assert pictures.limit("running max") == pictures.HIGHEST_LIFT
    # acc_o is 2.75, and chunk 3 lies `lift` lower
    assert pictures.limit("chunk's own max") == math.floor(128 - math.log2(2.75))
    # 0 · 2² + 1 · 2⁴ + 2 · 2¹ + 3 · 2³
    assert pictures.limit("no max") == math.floor(128 - math.log2(44))
    beyond = pictures.walk(pictures.row(127), pictures.positions(), "chunk's own max")
    assert [math.isfinite(m.acc_o) for m in beyond[:3]] == [True, True, False]


def test_the_sentence_says_what_is_right():
    assert "which is right" in pictures.sentence(4)
    assert "o = NaN" in pictures.sentence(4, "chunk's own max", 140)
    nothing = pictures.sentence(4, "no max", 122)
    assert "nothing subtracted" in nothing
    assert "which is right" in nothing
    assert "which is right" not in pictures.sentence(4, "no max", 123)


@pytest.mark.parametrize(
    ("lift", "reference"),
    [
        pytest.param(lift, by, marks=[] if i == j else pytest.mark.exhaustive)
        for i, lift in enumerate((0, 140, 127))
        for j, by in enumerate(pictures.REFERENCES)
    ],
)
def test_the_picture_fits_and_its_title_is_computed(lift, reference):
    for step in (1, 3, 6):
        picture = pictures.draw_stream(step, reference, lift)
        last = pictures.walk(pictures.row(lift), pictures.positions(), reference)[step - 1]
        assert len(picture.png()) < 60_000
        assert len(picture.finding) < 95, "a longer title leaves the figure"
        assert ("in fp32, and o is" in picture.finding) is not (last.o == pytest.approx(last.exact))


@pytest.mark.parametrize("lift", [0, 10, 11, 60, 160])
def test_a_lifted_chunk_stands_highest_and_flattens_no_other(lift):
    place, marked, end = pictures._heights(lift)
    scores = sorted(set(pictures.row(lift).tolist()))
    heights = [place(score) for score in scores]
    assert heights == sorted(set(heights)), "in the order of the scores"
    assert 0.9 * end > heights[-1] - 1e-6
    assert place(5) - place(4) > 0.04 * end, "a maximum of 4 is told from one of 5"
    assert all(0 <= place(score) < end for score in marked)


def test_a_break_is_drawn_only_where_there_is_one():
    assert ">≈<" not in pictures.draw_stream(3, lift=10).svg()
    assert ">≈<" in pictures.draw_stream(3, lift=11).svg()


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (0.0, "0"),
        (1.875, "1.88"),
        (999.4, "999"),
        (999.7, "1000"),
        (1288.0, "1288"),
        (2.0**20, "2^20"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_written_short(x, told):
    assert pictures.number(x) == told


def test_the_title_says_when_the_old_sum_shrinks():
    moments = pictures.walk(pictures.row(), pictures.positions())
    assert (
        pictures.finding(moments, "running max")
        == "Each time the maximum rises, the old sum shrinks: after chunk 6, sum 3.52"
    )
    lifted = pictures.walk(pictures.row(50), pictures.positions())
    assert pictures.finding(lifted, "running max").startswith(
        "While the maximum stays, the old sum stays"
    )
