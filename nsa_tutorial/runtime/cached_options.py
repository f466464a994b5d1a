"""`functools.cache` for functions that choose a kernel's options: a dictionary for a shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable


def cached_options(choose: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
    """`choose`, asked once for the same arguments; each caller gets a dictionary of its own, from
    which it may take things out.

    >>> sides = cached_options(lambda n: {"BT": n})
    >>> sides(16).pop("BT"), sides(16)
    (16, {'BT': 16})
    """
    kept = functools.cache(choose)

    @functools.wraps(choose)
    def options(*args: Hashable, **named: Hashable) -> dict[str, int]:
        return kept(*args, **named).copy()

    return options
