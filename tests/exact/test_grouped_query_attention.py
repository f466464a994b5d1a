"""Chapter 02: grouped-query attention equals attention on expanded heads, without making the
copies; costs and pictures agree."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_tutorial.course import costs
from nsa_tutorial.course.widgets import grouped_query_attention as pictures
from nsa_tutorial.exact import dense_attention
from nsa_tutorial.exact import grouped_query_attention as gqa

# B, N, M, HQ, H, D, DV
SHAPES = [
    pytest.param((2, 7, 7, 6, 3, 8, 5), id="B2-N7-H3-G2-DV5"),
    pytest.param((1, 3, 11, 8, 2, 4, 6), id="last-3-of-11-H2-G4"),
    pytest.param((2, 1, 9, 12, 4, 5, 3), id="decode-H4-G3"),
    pytest.param((1, 5, 5, 4, 4, 3, 3), id="multi-head-G1"),
    pytest.param((1, 5, 6, 4, 1, 3, 2), id="multi-query-H1"),
    pytest.param((1, 1, 1, 2, 2, 1, 1), id="one-token"),
]


def inputs(shape, dtype=torch.float64, factor=1.0, seed=0):
    B, N, M, HQ, H, D, DV = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, N, HQ, D), (B, M, H, D), (B, M, H, DV))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return (factor * q).to(dtype), k.to(dtype), v.to(dtype)


def one_head_at_a_time(q, k, v, scale=None, causal=True):
    """An independent computation in fp64, query head by query head, query by query."""
    q, k, v = q.double(), k.double(), v.double()
    (B, N, HQ, D), (M, H) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    o, lse = q.new_zeros(B, N, HQ, v.shape[-1]), q.new_zeros(B, N, HQ)
    for b in range(B):
        for hq in range(HQ):
            h = hq * H // HQ
            for i in range(N):
                seen = M - N + i + 1 if causal else M
                scores = scale * (k[b, :seen, h] @ q[b, i, hq])
                lse[b, i, hq] = torch.logsumexp(scores, 0)
                o[b, i, hq] = torch.exp(scores - lse[b, i, hq]) @ v[b, :seen, h]
    return o, lse


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_one_head_at_a_time(shape, causal):
    q, k, v = inputs(shape)
    o, lse = gqa.attention(q, k, v, causal=causal, return_lse=True)
    expected, expected_lse = one_head_at_a_time(q, k, v, causal=causal)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_chapter_01_on_expanded_heads(shape, causal):
    q, k, v = inputs(shape)
    G = gqa.group_size(q.shape[2], k.shape[2])
    expanded = dense_attention.attention(
        q, gqa.expand_kv_heads(k, G), gqa.expand_kv_heads(v, G), causal=causal, return_lse=True
    )
    for got, expected in zip(
        gqa.attention(q, k, v, causal=causal, return_lse=True), expanded, strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape):
    q, k, v = inputs(shape)
    mask = dense_attention.causal_mask(q.shape[1], k.shape[1])
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(gqa.attention(q, k, v), expected.transpose(1, 2))


@pytest.mark.parametrize(
    "factor", [1e-8, 1e3, -1e3], ids=["all-equal", "one-takes-all", "one-takes-all-reversed"]
)
def test_extreme_scores(factor):
    q, k, v = inputs((1, 6, 9, 6, 3, 4, 5), factor=factor)
    o, lse = gqa.attention(q, k, v, return_lse=True)
    expected, expected_lse = one_head_at_a_time(q, k, v)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_computed_in_fp32(dtype):
    q, k, v = inputs((2, 5, 8, 6, 2, 8, 3), dtype)
    o, lse = gqa.attention(q, k, v, return_lse=True)
    expected, expected_lse = one_head_at_a_time(q, k, v)
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
    rounding = torch.finfo(dtype).eps  # only the last step may round
    assert (o.double() - expected).abs().max() <= rounding * expected.abs().max() + 1e-6


def test_scale_and_non_contiguous_inputs():
    q, k, v = inputs((2, 4, 6, 6, 2, 4, 3))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    expected, _ = one_head_at_a_time(q, k, v, scale=0.3)
    torch.testing.assert_close(gqa.attention(*strided, scale=0.3), expected)


def test_decoding_one_token_is_the_last_row():
    q, k, v = inputs((2, 8, 8, 6, 2, 4, 3))
    full = gqa.attention(q, k, v)
    for t in range(8):
        step = gqa.attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        torch.testing.assert_close(step, full[:, t : t + 1])


def test_changing_one_kv_head_changes_its_group_only():
    q, k, v = inputs((1, 4, 4, 6, 3, 4, 4))
    moved = v.clone()
    moved[:, :, 1] += 1
    changed = (gqa.attention(q, k, moved) - gqa.attention(q, k, v)).abs().amax((0, 1, 3)) > 1e-9
    assert changed.tolist() == [False, False, True, True, False, False]


class LargestResult(TorchDispatchMode):
    """Remembers the most bytes that any one operation's result takes up in memory."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def test_no_copy_of_k_or_v_per_query_head():
    q, k, v = inputs((2, 1, 64, 16, 2, 32, 32), torch.float32)
    with LargestResult() as grouped:
        gqa.attention(q, k, v)
    with LargestResult() as expanded:
        dense_attention.attention(q, gqa.expand_kv_heads(k, 8), gqa.expand_kv_heads(v, 8))
    assert grouped.bytes <= k.nbytes  # a rearranged copy at most, never one per query head
    assert expanded.bytes >= 8 * k.nbytes


def test_gradients_equal_those_of_expanded_heads_summed_over_the_group():
    q, k, v = inputs((2, 5, 7, 6, 3, 4, 2))
    shared = [x.clone().requires_grad_() for x in (q, k, v)]
    gqa.attention(*shared).square().sum().backward()
    copies = [
        x.clone().requires_grad_()
        for x in (q, gqa.expand_kv_heads(k, 2), gqa.expand_kv_heads(v, 2))
    ]
    dense_attention.attention(*copies).square().sum().backward()
    torch.testing.assert_close(shared[0].grad, copies[0].grad)
    for own, copied in zip(shared[1:], copies[1:], strict=True):
        torch.testing.assert_close(own.grad, copied.grad.unflatten(2, (3, 2)).sum(3))


def test_gradcheck():
    arguments = [x.requires_grad_() for x in inputs((1, 3, 4, 4, 2, 3, 2))]
    assert torch.autograd.gradcheck(gqa.attention, arguments)


def test_expand_kv_heads_gives_each_query_head_its_groups_head():
    _, k, _ = inputs((2, 1, 5, 12, 4, 3, 2))
    expanded = gqa.expand_kv_heads(k, 3)
    assert expanded.shape == (2, 5, 12, 3)
    for hq in range(12):
        assert torch.equal(expanded[:, :, hq], k[:, :, gqa.kv_head(hq, 3)])


@pytest.mark.parametrize(
    ("HQ", "H"),
    [(8, 3), (4, 8), (8, 0), (0, 1)],
    ids=["8-by-3", "more-kv-heads", "no-kv-head", "no-head"],
)
def test_heads_that_do_not_divide_are_an_error_naming_both(HQ, H):
    with pytest.raises(ValueError, match=f"HQ = {HQ} .* H = {H} "):
        gqa.group_size(HQ, H)


@pytest.mark.parametrize(
    ("q", "k", "v", "named"),
    [
        ((1, 2, 4), (1, 2, 2, 3), (1, 2, 2, 3), "q: "),
        ((1, 2, 4, 3), (1, 2, 2, 5), (1, 2, 2, 3), "k: "),
        ((2, 2, 4, 3), (1, 2, 2, 3), (1, 2, 2, 3), "k: "),
        ((1, 2, 4, 3), (1, 2, 2, 3), (1, 3, 2, 3), "v: "),
        ((1, 2, 4, 3), (1, 2, 2, 3), (1, 2, 4, 3), "v: "),
        ((1, 3, 4, 3), (1, 2, 2, 3), (1, 2, 2, 3), "q: "),
        ((1, 2, 4, 3), (1, 2, 3, 3), (1, 2, 3, 3), "HQ, H: "),
    ],
    ids=["rank", "width", "batch", "length", "v-heads", "more-queries-than-positions", "heads"],
)
def test_misfits_name_the_argument(q, k, v, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        gqa.attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


# -- costs --


def test_kv_cache_bytes_counts_what_a_cache_holds():
    B, tokens, layers, H, D, DV = 2, 5, 3, 4, 6, 7
    cache = [
        (torch.zeros(B, tokens, H, D).half(), torch.zeros(B, tokens, H, DV).half())
        for _ in range(layers)
    ]
    held = sum(k.nbytes + v.nbytes for k, v in cache)
    assert costs.kv_cache_bytes(tokens, layers=layers, H=H, D=D, DV=DV, B=B) == held
    assert costs.kv_cache_bytes(tokens, layers=layers, H=H, D=D, DV=DV, B=B, itemsize=4) == 2 * held


def test_the_number_in_the_hook():
    assert costs.kv_cache_bytes(65_536, layers=60, H=64, D=128) == 120 * 2**30


def test_decode_attention_counts_its_tensors():
    B, M, HQ, H, D, DV = 2, 50, 6, 3, 4, 5
    q, k, v, o = (
        torch.zeros(B, 1, HQ, D),
        torch.zeros(B, M, H, D),
        torch.zeros(B, M, H, DV),
        torch.zeros(B, 1, HQ, DV),
    )
    cost = costs.decode_attention(M, D, DV, B=B, HQ=HQ, H=H, itemsize=4)
    assert cost.bytes_read == q.nbytes + k.nbytes + v.nbytes
    assert cost.bytes_written == o.nbytes
    assert cost.flops == sum(2 * M * (D + DV) for _ in range(B * HQ))


@pytest.mark.parametrize("H", [64, 8, 4, 1])
def test_a_group_of_G_heads_does_G_operations_per_byte(H):
    alone, batched = (
        costs.decode_attention(65_536, 128, B=B, HQ=64, H=H).intensity for B in (1, 32)
    )
    assert alone == pytest.approx(64 / H, rel=2e-3)
    assert batched == alone


# -- pictures --


def test_wires_and_head_order():
    assert pictures.wires(6, 2) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert pictures.head_order(2, 3) == {
        "repeat_interleave": [0, 0, 0, 1, 1, 1],
        "repeat": [0, 1, 0, 1, 0, 1],
    }
    one = pictures.head_order(1, 4)
    assert one["repeat"] == one["repeat_interleave"]


def test_cache_facts():
    facts = pictures.cache_facts(8, 65_536)
    assert (facts.G, facts.gib, facts.gib_all_heads) == (8, 15.0, 120.0)
    assert facts.read_ms == pytest.approx(15 * 2**30 / 4.8e12 * 1e3)


def test_pictures_state_their_finding():
    assert "`repeat` hands 4 of 8 query heads" in repr(pictures.draw_head_order(2, 4))
    assert "8, 2, 1 KV heads" in repr(pictures.draw_wiring())
    assert "4 KV heads for 64 query heads: 65,536 tokens take 7.5 GiB, not 120 GiB" in repr(
        pictures.draw_cache(4, 65_536)
    )


def test_explorer_says_what_the_pure_function_gives():
    explorer = pictures.cache_explorer()
    before = explorer._image.value
    said = explorer.set(H=1, tokens=1_048_576)
    assert said == explorer.sentence == pictures.cache_sentence(1, 1_048_576)
    assert f"takes {pictures.cache_facts(1, 1_048_576).gib:.1f} GiB" in said
    assert explorer._image.value != before
    assert "does not fit" in explorer.set(H=64)


def test_a_reading_time_is_given_only_for_a_cache_that_fits():
    for H in pictures.KV_HEADS:
        for tokens in pictures.CONTEXTS:
            fits = pictures.cache_facts(H, tokens).gib * 2**30 <= pictures.H200_BYTES
            said = pictures.cache_sentence(H, tokens)
            assert ("does not fit" in said) is not fits
            assert (" ms at least" in said) is fits
