"""The list walk: the program that list_walk.js walks, how the figure begins, and its picture at
rest."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from nsa_tutorial.course.figures import Picture

TITLE = "one program, block by block"
START = {"token": 77, "head": 0, "slot": 0}


def data() -> dict:
    """What list_walk.js reads: the example of chapter 10, in fp16, as the heads are stored."""
    from nsa_tutorial.course.widgets import tilelang_forward

    e = tilelang_forward.example()
    H, D = e.k.shape[2:]
    tensors = {
        name: base64.b64encode(x[0].half().numpy().tobytes()).decode("ascii")
        for name, x in (("q", e.q), ("k", e.k), ("v", e.v))
    }
    sizes = {"H": H, "G": e.q.shape[2] // H, "D": D, "BS": tilelang_forward.BS}
    return {"text": e.text.decode("ascii"), "ids": e.ids.tolist(), **sizes, **tensors}


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel."""
    from nsa_tutorial.course.widgets.tilelang_forward import draw_step

    return draw_step(**state)
