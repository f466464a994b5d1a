"""The tables that Triton's kernels make of rows and lists are those that PyTorch makes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks
from nsa_tutorial.kernels.triton import tables
from nsa_tutorial.kernels.triton.rows import locate
from nsa_tutorial.sparse.compression import (
    first_rows,
    first_tokens,
    summaries_of_tokens,
    summary_rows,
)
from nsa_tutorial.sparse.selected_attention import query_rows

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.usefixtures("one_thread")


@devices
@pytest.mark.parametrize(
    ("B", "N", "M", "length", "stride"),
    [(1, 37, 37, 8, 4), (2, 5, 41, 7, 3), (3, 1500, 1500, 32, 16), (2, 6, 6, 8, 8)],
)
def test_rows(B: int, N: int, M: int, length: int, stride: int, device: str) -> None:
    """Of queries among keys and among summaries, and of tokens among the summaries that hold
    them."""
    found = locate(B, N, M, length=length, stride=stride, device=torch.device(device))
    rows = query_rows(B, N, M, causal=True, cu_seqlens=None, device=found.first.device)
    among = summary_rows(rows, M, length=length, stride=stride, cu_seqlens=None)
    assert all(torch.equal(a, b) for a, b in zip(found.rows[:3], rows[:3], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.summary_rows[:3], among[:3], strict=True))
    first = first_rows(first_tokens(M, length, stride, None, found.first.device), B, M)
    assert torch.equal(found.first.long(), first)
    begin, end = summaries_of_tokens(first, B * M, length)
    holds = (begin < end).tolist()  # a token that no summary holds has any empty run
    for (a, b), (c, d), some in zip(
        found.of_tokens.T.tolist(), zip(begin.tolist(), end.tolist(), strict=True), holds,
        strict=True,
    ):  # fmt: skip
        assert (a, b) == (c, d) if some else a == b


def lists(
    R: int, H: int, S: int, num_blocks: int, cu: tuple[int, ...], device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists with empty slots, blocks of the future, and some blocks twice; which groups no loss
    asks for, and which are not finite; factors."""
    g = torch.Generator().manual_seed(R)
    ids = torch.randint(-1, num_blocks + 1, (R, H, S), generator=g, dtype=torch.int32)
    lse2 = torch.randn(R, H, 3, generator=g)
    lse2[torch.rand(R, H, generator=g) < 0.1] = math.inf
    lse2[torch.rand(R, H, generator=g) < 0.1] = math.nan
    return ids.to(device), lse2.to(device), torch.rand(R, H, S, generator=g).to(device)


@devices
@pytest.mark.parametrize("chunk_rows", [6, 2**14])
@pytest.mark.parametrize(
    ("B", "N", "M", "cu"), [(1, 41, 41, None), (2, 20, 37, None), (1, 40, 40, (0, 7, 7, 19, 40))]
)
@pytest.mark.parametrize("has_factors", [False, True])
def test_the_inverse_of_lists(
    B: int, N: int, M: int, cu: tuple[int, ...] | None, chunk_rows: int, has_factors: bool,
    device: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Chunk by chunk, and where tiles are cut, their places in the workspace."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", {2: chunk_rows, 4: chunk_rows})
    ids, lse2, factors = lists(B * N, 2, 4, -(-M // 8), cu or (0, N), device)
    factors = factors if has_factors else None
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=device)
    rows = query_rows(B, N, M, causal=True, cu_seqlens=offsets, device=ids.device)
    sizes = {"block_size": 8, "num_keys": B * M, "share_bytes": 64, "itemsize": 4}
    right = chunks.tables_of_lists(ids, rows, lse2[:, :, 0], G=3, slot_scale=factors, **sizes)
    found = tables.tables_of_lists(ids, rows, lse2, slot_scale=factors, **sizes)
    visible = int(right.chunks.last.max())  # behind them are entries that nobody walks
    assert torch.equal(found.rows[:visible], right.rows[:visible])
    assert torch.equal(found.row_end, right.row_end)
    if has_factors:
        assert torch.equal(found.factors[:visible], right.factors[:visible])
    assert found.chunks.num_places == right.chunks.num_places
    assert torch.equal(found.chunks.ends, right.chunks.ends)
    walked = right.chunks.first < right.chunks.last
    for name in ("first", "last"):
        assert torch.equal(
            getattr(found.chunks, name) * walked, getattr(right.chunks, name) * walked
        )
    assert torch.equal(found.chunks.first < found.chunks.last, walked)
    for name in ("first_key", "head", "part", "num_parts"):
        a, b = getattr(found.chunks, name), getattr(right.chunks, name)
        assert torch.equal(a[walked], b[walked]), name
    is_share = walked & (right.chunks.num_parts > 1)
    assert torch.equal(found.chunks.place[is_share], right.chunks.place[is_share])
    assert is_share.any() == (chunk_rows == 6)


@devices
def test_a_block_that_every_query_lists_twice(device: str) -> None:
    """It has more entries than there are queries. A chunk more would have no place."""
    ids = torch.zeros(150, 1, 2, dtype=torch.int32, device=device)
    rows = query_rows(1, 150, 150, causal=True, cu_seqlens=None, device=ids.device)
    lse2 = torch.zeros(150, 1, 1, device=device)
    sizes = {"block_size": 256, "num_keys": 150, "share_bytes": 64, "itemsize": 4}
    for found in (
        tables.tables_of_lists(ids, rows, lse2, **sizes),
        chunks.tables_of_lists(ids, rows, lse2[:, :, 0], G=1, **sizes),
    ):
        walked = [*zip(found.chunks.first.tolist(), found.chunks.last.tolist(), strict=True)]
        assert sum(b - a for a, b in walked) == 300
        assert found.chunks.num_parts.max() == 1 or found.chunks.num_places >= 2
        assert all(b <= c for (_, b), (c, _) in pairwise(x for x in walked if x[0] < x[1]))
