"""Costs, counted by hand on small shapes and by an independent counter on larger ones."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nsa_tutorial.course import costs
from nsa_tutorial.exact import dense_attention

# -- Cost --


def test_cost_adds_up_its_traffic():
    cost = costs.Cost(flops=100, bytes_read=30, bytes_written=10)
    assert cost.bytes == 40
    assert cost.intensity == 2.5


# -- visible_pairs --


@pytest.mark.parametrize(
    ("N", "M", "causal", "pairs"),
    [
        (4, 4, True, 10),
        (4, 4, False, 16),
        (1, 4, True, 4),
        (2, 5, True, 9),
        (2, 5, False, 10),
        (1, 1, True, 1),
    ],
    ids=["triangle", "square", "decoding", "last two of five", "two by five", "one"],
)
def test_visible_pairs_by_hand(N, M, causal, pairs):
    assert costs.visible_pairs(N, M, causal) == pairs


@pytest.mark.parametrize(("N", "M"), [(1, 1), (5, 5), (3, 11), (1, 9), (17, 64)], ids=str)
def test_visible_pairs_are_those_of_the_mask(N, M):
    assert costs.visible_pairs(N, M) == int(dense_attention.causal_mask(N, M).sum())


# -- dense_attention --


def test_dense_attention_by_hand():
    # N=2, M=3, D=4, DV=5: 6 scores of 4 multiply-adds, 6 weights times 5 numbers each.
    cost = costs.dense_attention(2, 3, 4, 5)
    assert cost.flops == 2 * 6 * 4 + 2 * 6 * 5 == 108
    assert cost.bytes_read == 2 * (8 + 12 + 6 + 6 + 15) == 94  # q, k; scores; weights, v
    assert cost.bytes_written == 2 * (6 + 6 + 10) == 44  # scores; weights; o


def test_dense_attention_by_hand_with_shared_keys():
    # B=2 texts, HQ=4 query heads over H=2 key/value heads, N=1 query, M=3 keys, D=DV=2, 4 bytes
    # each.
    cost = costs.dense_attention(1, 3, 2, B=2, HQ=4, H=2, itemsize=4)
    scores, q, k, v, o = 2 * 4 * 3, 2 * 4 * 2, 2 * 3 * 2 * 2, 2 * 3 * 2 * 2, 2 * 4 * 2
    assert cost.flops == 24 * (4 + 4)
    assert cost.bytes_read == 4 * (q + k + scores + scores + v)
    assert cost.bytes_written == 4 * (scores + scores + o)


@pytest.mark.parametrize(
    "shape",
    [(1, 5, 5, 1, 8, 8), (2, 3, 11, 4, 6, 10), (1, 1, 64, 2, 16, 4)],
    ids=["square", "D≠DV", "decoding"],
)
def test_dense_attention_flops_are_those_that_torch_counts(shape):
    B, N, M, HQ, D, DV = shape
    q, k, v = torch.zeros(B, N, HQ, D), torch.zeros(B, M, HQ, D), torch.zeros(B, M, HQ, DV)
    with FlopCounterMode(display=False) as counter:
        dense_attention.attention(q, k, v)
    assert costs.dense_attention(N, M, D, DV, B=B, HQ=HQ).flops == counter.get_total_flops()


def test_dense_attention_of_twice_the_tokens_costs_four_times():
    once, twice = (
        costs.dense_attention(65536, 65536, 128),
        costs.dense_attention(131072, 131072, 128),
    )
    assert twice.flops == 4 * once.flops
    assert twice.bytes == pytest.approx(4 * once.bytes, rel=0.01)


def test_dense_attention_of_a_long_text_is_mostly_its_scores():
    assert 4 * 2 * 65536**2 / costs.dense_attention(65536, 65536, 128).bytes == pytest.approx(
        1, abs=0.002
    )
