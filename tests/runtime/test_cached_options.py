"""Options of kernels that are chosen once a shape."""

from __future__ import annotations

import pytest

from nsa_tutorial.runtime.cached_options import cached_options


def test_chosen_once_and_each_caller_has_its_own() -> None:
    """A kernel's listing takes the tile out of what it gets, and the next call must find it."""
    asked = []

    @cached_options
    def choose(n: int, *, stages: int = 1) -> dict[str, int]:
        """What it says."""
        asked.append((n, stages))
        return {"BT": n, "num_stages": stages}

    assert choose(16, stages=2).pop("BT") == 16
    mine = choose(16, stages=2)
    assert mine == {"BT": 16, "num_stages": 2}
    mine |= {"BT": 8}
    assert choose(16, stages=2)["BT"] == 16 and choose(32)["BT"] == 32
    assert asked == [(16, 2), (32, 1)]
    assert choose.__doc__ == "What it says." and choose.__name__ == "choose"
    with pytest.raises(TypeError, match="unhashable"):
        choose([16])
