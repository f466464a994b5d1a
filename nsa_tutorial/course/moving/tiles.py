"""The tile walk: how the figure begins, and its picture at rest; tiles.js moves it."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture

TITLE = "the tile walk"
# `step`: how many tiles are computed, at most 256; N queries, the last of M positions
START = {"step": 256, "tile_q": 16, "tile_k": 12, "N": 40, "M": 56, "causal": True}


def data() -> dict:
    """Nothing: the module counts."""
    return {}


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel."""
    from nsa_tutorial.course.widgets.tiled_attention import draw_walk, meter

    N, M, causal = state["N"], state["M"], state["causal"]
    tiles = state["tile_q"], state["tile_k"]
    last = len(meter(N, M, 16, *tiles, causal))
    return draw_walk(N, M, *tiles, causal=causal, step=min(state["step"], last))
