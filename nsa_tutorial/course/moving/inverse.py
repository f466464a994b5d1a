"""Lists and inverse lists: the lists that inverse.js turns, how the figure begins, and its picture
at rest."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture

TITLE = "a list and its inverse"
TOKENS, BLOCK, SLOTS = 48, 4, 4
KINDS = ("trained", "random", "smooth")  # of the benchmark's lists
# a query and a block that are lit, the queries of a chunk at least, who adds, and which run it is
START = {
    "query": 37,
    "block": 5,
    "lists": "trained",
    "length": TOKENS,
    "adds": "chunks of a block",
    "run": 0,
}


def lists(kind: str) -> list[list[int]]:
    """The list of each query, -1 for an empty slot."""
    from nsa_tutorial.bench import drawing

    return drawing.draw(kind, TOKENS, 1, BLOCK, SLOTS, "cpu")[0, :, 0].tolist()


def data() -> dict:
    """What inverse.js reads."""
    return {"block_size": BLOCK, "lists": {kind: lists(kind) for kind in KINDS}}


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel: the same lists, the same query and block."""
    import torch

    from nsa_tutorial.course.widgets.backward_kernels import draw_transpose

    ids = torch.tensor(lists(state["lists"]), dtype=torch.int32)[:, None]
    return draw_transpose(ids, BLOCK, query=state["query"], block=state["block"])
