"""Chapter 01: attention against independent computations in fp64, its edge cases, its exercises,
and what its pictures compute."""

import math
import time

import pytest
import torch

from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.widgets import dense_attention as pictures
from nsa_tutorial.exact import dense_attention as da

# -- softmax --


@pytest.mark.parametrize("dim", [-1, 0, 1], ids=lambda d: f"dim={d}")
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0], ids=lambda x: f"around {x:g}")
def test_softmax_is_torchs_for_scores_of_any_size(dim, offset):
    scores = offset + torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(da.softmax(scores, dim), torch.softmax(scores, dim))


def test_softmax_of_a_partly_hidden_row_gives_hidden_keys_exactly_zero():
    weights = da.softmax(torch.tensor([1.0, -torch.inf, 2.0]))
    assert weights[1] == 0
    torch.testing.assert_close(weights[2] / weights[0], torch.tensor(math.e))


def test_softmax_of_a_hidden_row_is_zero_and_leaves_its_neighbour_alone():
    weights = da.softmax(torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]]))
    assert weights.tolist() == [[0.0, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_softmax_keeps_dtype(dtype):
    assert da.softmax(torch.tensor([1.0, 2.0], dtype=dtype)).dtype == dtype


# -- causal mask --


def test_causal_mask_by_hand():
    assert da.causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert da.causal_mask(1, 3).tolist() == [[True, True, True]]


@pytest.mark.parametrize(("N", "M"), [(1, 1), (7, 7), (3, 10), (1, 9)], ids=lambda n: str(n))
def test_causal_mask_shows_every_query_the_keys_up_to_itself(N, M):
    mask = da.causal_mask(N, M)
    assert mask.shape == (N, M)
    assert mask.dtype == torch.bool
    assert mask.sum(1).tolist() == [M - N + i + 1 for i in range(N)]


def test_causal_mask_refuses_more_queries_than_positions():
    with pytest.raises(ValueError, match=r"^N: .*M = 3, got 4"):
        da.causal_mask(4, 3)


# -- attention --


def tensors(B, N, M, HQ, D, DV, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, n, HQ, w, generator=generator, dtype=torch.float64) * s
        for n, w, s in ((N, D, spread), (M, D, 1), (M, DV, 1))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def one_by_one(q, k, v, scale, causal):
    """The definition, one query and one key at a time, in Python floats."""
    B, N, HQ, _ = q.shape
    M, DV = k.shape[1], v.shape[3]
    o, lse = (
        torch.zeros(B, N, HQ, DV, dtype=torch.float64),
        torch.zeros(B, N, HQ, dtype=torch.float64),
    )
    for b in range(B):
        for i in range(N):
            for h in range(HQ):
                seen = range(M - N + i + 1 if causal else M)
                scores = [
                    scale
                    * math.fsum(
                        x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, h].tolist(), strict=True)
                    )
                    for j in seen
                ]
                top = max(scores)
                total = math.fsum(math.exp(s - top) for s in scores)
                lse[b, i, h] = top + math.log(total)
                for j, s in zip(seen, scores, strict=True):
                    o[b, i, h] += math.exp(s - top) / total * v[b, j, h]
    return o, lse


SHAPES = {
    "square, one head": (1, 5, 5, 1, 4, 4),
    "three heads, D≠DV": (2, 7, 7, 3, 5, 3),
    "last queries of more positions": (2, 3, 11, 2, 8, 6),
    "decoding": (3, 1, 13, 2, 4, 7),
    "one position": (1, 1, 1, 1, 1, 1),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all visible"])
@pytest.mark.parametrize(
    "scale", [None, 0.3, 40.0], ids=["default scale", "given scale", "large scale"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_and_lse_are_the_definition(shape, scale, causal):
    q, k, v = tensors(*shape)
    o, lse = da.attention(q, k, v, scale=scale, causal=causal, return_lse=True)
    expected_o, expected_lse = one_by_one(
        q, k, v, shape[4] ** -0.5 if scale is None else scale, causal
    )
    torch.testing.assert_close(o, expected_o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_and_its_gradients_are_torchs(shape):
    leaves = [x.requires_grad_() for x in tensors(*shape)]
    mask = da.causal_mask(shape[1], shape[2])
    q, k, v = (x.transpose(1, 2) for x in leaves)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(
        1, 2
    )
    o = da.attention(*leaves)
    torch.testing.assert_close(o, expected)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    for got, want in zip(
        torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 100.0], ids=["ordinary scores", "scores in the hundreds"])
def test_narrow_dtypes_are_computed_in_fp32(dtype, spread):
    q, k, v = tensors(2, 9, 9, 2, 16, 8, dtype, spread)
    o, lse = da.attention(q, k, v, return_lse=True)
    exact_o, exact_lse = da.attention(q.double(), k.double(), v.double(), return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    # The only error beyond fp32's is the output's own rounding: half a unit in the last place.
    torch.testing.assert_close(
        o.double(), exact_o, rtol=max(torch.finfo(dtype).eps / 2, 1e-5) * 1.01, atol=3e-5
    )
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_fp64_stays_fp64():
    o, lse = da.attention(*tensors(1, 4, 4, 1, 4, 4), return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_output_has_the_dtype_of_v():
    q, k, v = tensors(1, 4, 4, 1, 4, 4, torch.float32)
    assert da.attention(q, k, v.half()).dtype == torch.float16


def test_the_future_does_not_matter():
    q, k, v = tensors(1, 6, 6, 2, 4, 4)
    before = da.attention(q, k, v)[:, :3]
    k[:, 3:], v[:, 3:] = 1e4, -1e4
    assert torch.equal(da.attention(q, k, v)[:, :3], before)


def test_non_contiguous_inputs_are_read_right():
    q, k, v = tensors(2, 5, 5, 3, 4, 4)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(da.attention(*strided), da.attention(q, k, v))


WRONG_SHAPES = {
    "q of rank 3": ("q", [(2, 5, 4), (2, 5, 3, 4), (2, 5, 3, 4)]),
    "k of rank 3": ("k", [(2, 5, 3, 4), (2, 5, 4), (2, 5, 3, 4)]),
    "v of rank 5": ("v", [(2, 5, 3, 4), (2, 5, 3, 4), (2, 5, 3, 4, 1)]),
    "k of another batch": ("k", [(2, 5, 3, 4), (1, 5, 3, 4), (2, 5, 3, 4)]),
    "k of another width": ("k", [(2, 5, 3, 4), (2, 5, 3, 8), (2, 5, 3, 4)]),
    "k with fewer heads": ("k", [(2, 5, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)]),
    "v of another length": ("v", [(2, 5, 3, 4), (2, 5, 3, 4), (2, 6, 3, 4)]),
    "v with fewer heads": ("v", [(2, 5, 3, 4), (2, 5, 3, 4), (2, 5, 1, 4)]),
    "no keys": ("k", [(2, 1, 3, 4), (2, 0, 3, 4), (2, 0, 3, 4)]),
    "more queries than positions": ("q", [(2, 6, 3, 4), (2, 5, 3, 4), (2, 5, 3, 4)]),
}


@pytest.mark.parametrize(("name", "shapes"), WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_shapes_that_do_not_fit_are_named(name, shapes):
    with pytest.raises(ValueError, match=f"^{name}: "):
        da.attention(*map(torch.zeros, shapes))


def test_more_queries_than_keys_are_fine_without_a_mask():
    q, k, v = tensors(1, 6, 2, 1, 4, 4)
    assert da.attention(q, k, v, causal=False).shape == (1, 6, 1, 4)


# -- pictures --


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all visible"])
@pytest.mark.parametrize("scale", pictures.SCALES.values(), ids=pictures.SCALES.keys())
@pytest.mark.parametrize("query", range(6), ids=pictures.sentence()[0])
def test_look_up_is_a_row_of_attention(query, scale, causal):
    _, q, k, v = pictures.sentence()
    found = pictures.look_up(query, scale, causal)
    expected = da.attention(
        q[None, :, None], k[None, :, None], v[None, :, None], scale=scale, causal=causal
    )
    torch.testing.assert_close(found.output, expected[0, query, 0])
    torch.testing.assert_close(found.weights.sum(), torch.tensor(1.0))
    assert bool((found.weights[query + 1 :] == 0).all()) == (causal or query == 5)


def test_scales_of_the_panel_are_what_their_names_say():
    D = pictures.sentence()[2].shape[1]
    assert list(pictures.SCALES.values()) == [D**-0.5, 1.0, 1 / D]


@pytest.mark.parametrize(
    ("query", "finding"),
    [
        (0, "“Ada” gives 100% of its weight to “Ada”"),
        (3, "“and” looks for nothing and weighs the 4 words it sees alike"),
        (4, "“she” gives 76% of its weight to “Ada”"),
        (5, "“waved” gives 36% of its weight each to “Ada” and “Bob”"),
    ],
    ids=["one word", "no preference", "one winner", "a tie"],
)
def test_title_of_the_lookup_says_where_the_weight_goes(query, finding):
    assert pictures.draw_lookup(query).finding == finding


@pytest.mark.parametrize(
    ("query", "title", "note"),
    [(1, "mixed values, sum 1.00", ""), (3, "mixed values, sum 0.75", "“and” hands over zeros"),
     (4, "mixed values, sum 0.88", "“and” and “she” hand over zeros")],
    ids=["sees no empty word", "sees one", "sees two"],
)  # fmt: skip
def test_mixture_that_sums_to_less_says_why(query, title, note):
    drawn = pictures.draw_lookup(query).svg()
    assert f">{title}<" in drawn
    assert pictures.missing(pictures.look_up(query)) == note
    assert ("over zeros<" in drawn) is bool(note)


def test_the_hero_is_the_lookup_of_she_with_the_mask() -> None:
    drawn = pictures.draw_hero()
    assert drawn.finding == "One lookup: “she” gives 76% of its weight to “Ada”"
    weights = pictures.look_up(4).weights
    assert weights[0] == weights.max() and f"{weights[0]:.0%}" == "76%"
    assert ">hidden<" in drawn.svg()


def test_the_table_of_the_sentence_is_q_k_and_v() -> None:
    drawn = pictures.draw_sentence().svg()
    _, *tables = pictures.sentence()
    for number in (1, 2):
        count = sum(int((table == number).sum()) for table in tables)
        assert drawn.count(f">{number}<") == count


def test_panel_says_what_the_pure_function_says():
    panel = pictures.lookup_panel()
    assert panel.sentence == pictures.describe(4)
    assert panel.set(query="met") == pictures.describe(1)
    assert panel.set(causal=False) == pictures.describe(1, causal=False) != pictures.describe(1)
    assert panel.set(scale=1.0) == pictures.describe(1, 1.0, False)
    assert "Ada 0.88, met 0.12" in panel.set(scale=0.5, causal=True)


def test_the_picture_writes_the_scores_of_its_row_and_what_is_hidden():
    drawn = pictures.draw_lookup(4, 0.5).svg()
    assert drawn.count(">hidden<") == 1  # “waved”
    assert [drawn.count(f">{score}<") for score in ("4.0", "2.0", "0.0")] == [1, 2, 2]
    assert ">hidden<" not in pictures.draw_lookup(4, causal=False).svg()


def test_largest_weight_grows_with_width_only_without_the_scale():
    assert pictures.largest_weight(128, 1.0) > 0.8
    assert (
        abs(pictures.largest_weight(128, 128**-0.5) - pictures.largest_weight(16, 16**-0.5)) < 0.02
    )
    # 1/D: nearly a plain average
    assert pictures.largest_weight(128, 1 / 128) == pytest.approx(1 / 16, rel=0.25)
    assert pictures.largest_weight(16, 0.0) == 1 / 16


def test_sizes_by_hand():
    assert pictures.sizes(65536) == (8 * 2**30, 64 * 2**20)


@pytest.mark.parametrize(
    "draw",
    [
        pictures.draw_hero,
        pictures.draw_sentence,
        pictures.draw_lookup,
        pictures.draw_letters,
        pictures.draw_scale,
        pictures.draw_cost,
    ],
    ids=lambda f: f.__name__,
)
def test_pictures_are_small(draw):
    assert len(draw().png()) <= 60_000


def test_panel_draws_fast_enough_to_follow_the_hand():
    pictures.draw_lookup().svg()
    times = []
    for query in range(4):
        start = time.process_time()
        pictures.draw_lookup(query).svg()
        times.append(time.process_time() - start)
    assert min(times) < 0.06  # twice what it takes


# -- exercises --


def causal(scores, *, hide):
    return torch.softmax(hide(scores, da.causal_mask(*scores.shape)), dim=-1)


@pytest.mark.parametrize(
    "hide",
    [lambda s, visible: s.masked_fill(~visible, -1e30), lambda s, visible: s - 1e30 * ~visible],
    ids=["written", "added"],
)
def test_no_finite_number_passes_for_minus_infinity_by_being_very_large(hide):
    verdict = judge(
        chapter_exercises("dense_attention")["causal_weights"],
        lambda scores: causal(scores, hide=hide),
    )
    assert "a large negative number where -inf is meant" in verdict.misconception
