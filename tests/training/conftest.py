"""The ranks of a mesh, started once for the tests that a process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes over gloo."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes over gloo."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
