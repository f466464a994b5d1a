"""The choice of one query's blocks: how the figure begins, and its picture at rest; choice.js moves
it, on the stored heads of masks.json."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.moving import masks

TITLE = "the choice of blocks"
# `question`: how many are asked, at most 31; `threshold`: the bits of the reader's own, 0 for none
START = {
    "query": 332,
    "top_n": 4,
    "question": 31,
    "num_initial": 0,
    "num_local": 1,
    "group": 0,
    "threshold": 0,
}
data = masks.data


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel: the guess, the truth, and the list."""
    from nsa_tutorial.course.widgets.block_selection import draw_query

    sizes = {name: state[name] for name in ("num_initial", "num_local")}
    kv_head = list(masks.GROUPS)[state["group"]]
    return draw_query(state["query"], kv_head, state["top_n"], **sizes)
