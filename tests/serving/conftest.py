"""What the tests of decoding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsa_tutorial.kernels.tables import parts
from nsa_tutorial.runtime import environment


@pytest.fixture
def few_parts(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, where programs run one after the other, a row is cut into four parts at most, and
    not into 64. Some still have no keys."""
    if environment.detect().triton is None or request.getfixturevalue("device") != "cpu":
        yield
        return
    from nsa_tutorial.kernels.triton.decoding.options import decoding_options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST_PARTS", 4)
        decoding_options.cache_clear()
        yield
    decoding_options.cache_clear()
