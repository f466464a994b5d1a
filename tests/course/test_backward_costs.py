"""Costs of the backward, by hand on small shapes, and by what PyTorch counts and keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nsa_tutorial.course import costs
from nsa_tutorial.training import gradients

N, M, D, DV = 12, 12, 4, 6


def test_what_is_kept_by_hand() -> None:
    # 3 heads of 5 queries: 7 weights each, or 4 numbers of o and one log-sum-exp
    assert costs.kept_for_backward(5, 7, 4, HQ=3, weights=True) == 3 * 5 * 7 * 2
    assert costs.kept_for_backward(5, 7, 4, HQ=3, weights=False) == 3 * 5 * (4 * 2 + 4)


def test_plain_attention_keeps_the_weights() -> None:
    """What autograd saves, less the inputs, is one matrix of weights, and the scale."""
    q, k, v = (torch.randn(n, d, requires_grad=True) for n, d in ((N, D), (M, D), (M, DV)))
    inputs = {x.data_ptr() for x in (q, k, v)}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in inputs:
            kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.softmax(q @ k.T, -1) @ v
    assert sum(kept.values()) == costs.kept_for_backward(N, M, DV, weights=True, itemsize=4)


def test_flops_of_the_dense_backward_are_those_of_autograd() -> None:
    """Four products with stored weights: what PyTorch counts in its own backward."""
    q, k, v = (torch.randn(n, d, requires_grad=True) for n, d in ((N, D), (M, D), (M, DV)))
    o = torch.softmax(q @ k.T, -1) @ v
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == costs.dense_attention_backward(N, M, D, DV).flops


def test_bytes_of_the_dense_backward_by_hand() -> None:
    cost = costs.dense_attention_backward(2, 3, 4, 5)
    assert cost.bytes_read == 2 * (5 * 6 + 2 * 10 + 15 + 12 + 8)
    assert cost.bytes_written == 2 * (2 * 6 + 8 + 12 + 15)


@pytest.mark.parametrize(("tile_q", "tile_k"), [(4, 4), (5, 3), (12, 1), (1, 12), (99, 99)])
def test_flops_of_the_walks_are_those_of_the_walks(tile_q: int, tile_k: int) -> None:
    """Seven products a tile, counted while `by_query_tiles` and `by_key_tiles` run; where tiles
    are ragged or not square, the two walks skip different tiles."""
    g = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(n, d, generator=g) for n, d in ((N, D), (M, D), (M, DV), (N, DV)))
    rows = (torch.zeros(N), torch.zeros(N), torch.arange(N))
    tiles = {"scale": 1.0, "tile_q": tile_q, "tile_k": tile_k}
    with FlopCounterMode(display=False) as counter:
        gradients.by_query_tiles(d_o, q, k, v, *rows, **tiles)
        gradients.by_key_tiles(d_o, q, k, v, *rows, **tiles)
    sizes = {"tile_q": tile_q, "tile_k": tile_k}
    cost = costs.tiled_attention_backward(N, M, D, DV, **sizes)
    assert counter.get_total_flops() <= cost.flops
    if tile_q == tile_k:
        assert counter.get_total_flops() == cost.flops


def test_bytes_of_the_walks_by_hand() -> None:
    # 4 tokens in tiles of 2: three tiles of four; a group of two heads on one KV head
    cost = costs.tiled_attention_backward(4, 4, 3, 5, tile_q=2, tile_k=2, HQ=2, H=1)
    row = 2 * (3 + 5) + 8
    delta = 2 * 8 * 5 * 2
    by_queries = 8 * row + 6 * (3 + 5) * 2  # the keys: 2 for the first tile, 4 for the second
    by_keys = 4 * (3 + 5) * 2 + 2 * (4 + 2) * row
    assert cost.bytes_read == delta + by_queries + by_keys
    assert cost.bytes_written == 8 * 4 + 8 * 3 * 2 + 4 * (3 + 5) * 2
    assert cost.flops == 2 * 2 * (4 + 8) * (4 * 3 + 3 * 5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_recomputing_takes_seven_products_for_two(causal: bool) -> None:
    """With D = DV: 3.5 times the forward's operations, and fewer bytes than any matrix."""
    sizes = {"tile_q": 128, "tile_k": 128, "causal": causal}
    forward = costs.tiled_attention(4096, 4096, 128, **sizes)
    backward = costs.tiled_attention_backward(4096, 4096, 128, **sizes)
    assert 2 * backward.flops == 7 * forward.flops
    assert backward.bytes < costs.dense_attention_backward(4096, 4096, 128).bytes
