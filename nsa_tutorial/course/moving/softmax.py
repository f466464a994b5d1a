"""Online softmax chunk by chunk: how the figure begins, and its picture at rest; softmax.js moves
it. What is drawn, and how it is computed, is in `widgets.online_softmax`."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture

TITLE = "softmax, chunk by chunk"
# chunks read, what exponents are measured from, and how far the first chunk is lifted
START = {"step": 1, "reference": "running max", "lift": 0}


def data() -> dict:
    """Nothing: the module has its 24 scores."""
    return {}


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel."""
    from nsa_tutorial.course.widgets.online_softmax import draw_stream

    return draw_stream(**state)
