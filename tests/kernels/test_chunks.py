"""How long the chunks of a backward are: enough programs for a GPU, and work enough for each."""

from __future__ import annotations

import pytest

from nsa_tutorial.kernels.tables import chunks, runs


@pytest.mark.parametrize("G", [1, 4, 16, 64])
@pytest.mark.parametrize("tokens", [1024, 2048, 8192, 65536])
def test_short_texts_have_programs_enough(tokens: int, G: int) -> None:
    """In half precision, for lists of 16 blocks and for summaries of 32 every 16."""
    H, tile = 4, 128
    length = chunks.chunk_length(tokens * H * 16, G, 4 * 64 * 256, 2)
    shortest = max(64, chunks.SHORTEST // G)  # entries; else so many that a step less is enough
    assert length == shortest or tokens * H * 16 / (length - 64) >= chunks.PROGRAMS
    assert tokens * H * 16 / length * 4 * 64 * 256 <= chunks.WORKSPACE
    tiles = -(-tokens // 16 // tile) * H
    num_chunks, rows = runs.chunks_of_rows(tokens, tiles, G, 4 * tile * 256, 2)
    assert (num_chunks - 1) * rows < tokens <= num_chunks * rows
    assert rows == shortest or tokens * tiles / (rows - 64) >= chunks.PROGRAMS
    assert num_chunks * tiles * 4 * tile * 256 <= 2 * chunks.WORKSPACE
