"""What the reference writes to a cache, and where; `tests/serving` holds what it computes against
the whole text."""

from __future__ import annotations

import pytest
import torch

from nsa_tutorial.sparse import decoding


def test_places_follow_the_table() -> None:
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    page, place = decoding.places(torch.tensor([[0, 5], [7, 8]]), table, 8)
    assert page.tolist() == [[2, 2], [3, 1]]
    assert place.tolist() == [[0, 5], [7, 0]]


def test_without_a_table_a_row_is_a_page() -> None:
    page, place = decoding.places(torch.tensor([[3], [9]]), None, 16)
    assert (page.tolist(), place.tolist()) == ([[0], [1]], [[3], [9]])


def test_queries_are_the_last_positions_of_their_rows() -> None:
    lengths = torch.tensor([5, 1], dtype=torch.int32)
    assert decoding.query_positions(lengths, 2).tolist() == [[3, 4], [-1, 0]]


@pytest.mark.parametrize(("before", "arrives"), [(30, False), (31, True), (32, False), (47, True)])
def test_a_summary_arrives_with_its_last_token(before: int, arrives: bool) -> None:
    lengths = torch.tensor([before + 1], dtype=torch.int32)  # the new token is counted
    target = torch.zeros(1, 4, 1, 1)
    new = torch.ones(1, decoding.most_new_summaries(1, 16), 1, 1)
    decoding.write_summaries([target], [new], lengths, None, 1, 32, 16, 64)
    where = [int(before >= 47)] if arrives else []
    assert target.flatten().nonzero().flatten().tolist() == where


def test_a_window_is_read_across_the_end_of_the_ring() -> None:
    ring = torch.zeros(1, 6, 1, 1)
    for t in range(8):
        ring[0, t % 6] = t
    window = decoding.pending_windows(ring, torch.tensor([8], dtype=torch.int32), 1, 4, 2)
    assert window.flatten().tolist() == [4, 5, 6, 7]
