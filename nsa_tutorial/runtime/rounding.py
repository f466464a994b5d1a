"""Rounding of whole numbers on the host, in plain Python: Triton's own `cdiv` and
`next_power_of_2` take microseconds, and a call rounds fifty times."""

from __future__ import annotations


def cdiv(n: int, by: int) -> int:
    """`n / by`, rounded up.

    >>> cdiv(9, 4)
    3
    """
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`.

    >>> [next_power_of_2(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << max(n - 1, 0).bit_length()
