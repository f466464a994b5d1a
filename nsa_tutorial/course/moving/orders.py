"""Three orders of the same sums: the numbers that orders.js counts with, how the figure begins, and
its picture at rest. What is counted, and what was recorded, is in `widgets.performance`."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture

TITLE = "three orders: bytes, operations, time"
# the union of four neighbours' lists, in % of one list, the group, and the order that is looked at
START = {"union": 129, "group": 16, "order": "tiles"}


def data() -> dict:
    """What orders.js reads: sizes, speeds, and the recorded times."""
    from nsa_tutorial.course import costs
    from nsa_tutorial.course.widgets import performance as p

    keys = costs.selected_keys(p.TOKENS, p.TOKENS, block_size=p.BLOCK, top_n=p.SLOTS)
    rates = p.rates()
    return {
        "tokens": p.TOKENS,
        "width": p.WIDTH,
        "block": p.BLOCK,
        "slots": p.SLOTS,
        "tile": p.T,
        "least_rows": p.LEAST_ROWS,
        "keys": keys,  # of all lists of one KV head
        "heads": {str(group): list(heads) for group, heads in p.HEADS.items()},
        "told": p.TOLD,
        "rates": {"L2": rates.l2, "memory": rates.memory, "products": rates.products},
        "recorded": [
            {"group": group, "order": order, "lists": kind, "ms": ms, "union": overlap}
            for (group, order, kind), (ms, overlap) in sorted(p.recorded().items())
            if order != "tiles" or p.T * group == 64  # the kernel fills 64 rows
        ],
    }


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel: the three orders at these lists."""
    from nsa_tutorial.course.widgets.performance import draw_paper

    return draw_paper(state["order"], state["union"] / 100, state["group"])
