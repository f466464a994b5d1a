"""Into how many parts decoding cuts the keys of a row, in both languages.

The numbers follow from how many rows and heads there are, never from a length, so that a CUDA graph
holds for every length.
"""

from __future__ import annotations

from typing import NamedTuple

# Programs aimed at: several for each of a GPU's some 130 multiprocessors, since a program waits for
# memory most of the time. Measured in Triton, with `python -m nsa_tutorial.bench decode`.
SUMMARY_PROGRAMS, LIST_PROGRAMS, WINDOW_PROGRAMS = 512, 1024, 256
MOST_PARTS, MOST_WINDOW_PARTS = 64, 8


class Parts(NamedTuple):
    """Parts of a row's summaries, window and list."""

    summary: int
    window: int
    list: int


def parts_of_rows(groups: int, S: int) -> Parts:
    """The parts of each of `groups` query rows times key/value heads, with lists of `S` slots.

    >>> parts_of_rows(4, 16)
    Parts(summary=64, window=8, list=16)
    """
    return Parts(
        _parts(SUMMARY_PROGRAMS, groups, MOST_PARTS),
        _parts(WINDOW_PROGRAMS, groups, MOST_WINDOW_PARTS),
        _parts(LIST_PROGRAMS, groups, min(max(S, 1), MOST_PARTS)),
    )


def _parts(programs: int, groups: int, most: int) -> int:
    """A power of two, at most `most`, with which `groups` make about so many `programs`."""
    wanted = max(1, min(programs // max(groups, 1), most))
    return 1 << (wanted.bit_length() - 1)
