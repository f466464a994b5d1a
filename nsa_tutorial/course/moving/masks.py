"""The mask explorer's numbers and its picture at rest; masks.js moves it.

    python -m nsa_tutorial.course.moving.masks     # makes masks.json from assets/heads.npz

masks.json holds a text of 512 bytes, and the queries and keys of two groups of trained heads, in
8 bits. Attention from 8 bits differs from that of the stored heads by 1 % of the weight.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nsa_tutorial.course.figures import Picture

PATH = Path(__file__).with_suffix(".json")
TITLE = "the mask explorer"
# KV heads of the stored ones
GROUPS = {3: "layer 3, looks at copies", 0: "layer 0, looks near"}
# Every control, in the order of `masks.Settings`; `lens` is the length of the priced text.
START = {
    "query": 389,
    "top_n": 5,
    "window": 32,
    "block_size": 16,
    "num_initial": 1,
    "num_local": 2,
    "length": 16,
    "stride": 8,
    "group": 0,
    "random": False,
    "compressed": True,
    "selected": True,
    "sliding": True,
    "lens": 512,
}


def data() -> dict:
    """What masks.js reads."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def eighths(values: np.ndarray) -> tuple[str, float]:
    """Numbers as signed bytes in base64, and what a byte of 1 stands for."""
    scale = float(np.abs(values).max()) / 127
    return base64.b64encode(np.round(values / scale).astype(np.int8)).decode("ascii"), scale


def stored() -> dict:
    """`data()`, made from the stored heads."""
    from nsa_tutorial.course import heads

    h, groups = heads.load(), []
    for kv_head, label in GROUPS.items():
        mine = slice(kv_head * h.G, (kv_head + 1) * h.G)
        q, q_scale = eighths(h.q[0, :, mine].numpy())  # [N, G, D]
        k, k_scale = eighths(h.k[0, :, kv_head].numpy())  # [N, D]
        groups.append({"label": label, "q": q, "q_scale": q_scale, "k": k, "k_scale": k_scale})
    return {
        "text": h.text.decode("ascii"),
        "source": h.info["text"],
        "G": h.G,
        "D": h.k.shape[3],
        "groups": groups,
    }


def still(state: Mapping[str, object]) -> Picture:
    """The picture where there is no kernel: the same lists, from the stored heads."""
    from nsa_tutorial.course.masks import REAL, Settings
    from nsa_tutorial.course.widgets.mask_explorer import draw

    names = START.keys() - {"group", "random", "compressed", "selected", "sliding", "lens"}
    sizes = {name: state[name] for name in names}
    return draw(Settings(**sizes, group=list(GROUPS)[state["group"]], data=REAL))


if __name__ == "__main__":
    PATH.write_text(json.dumps(stored()) + "\n", encoding="utf-8")
    print(f"{PATH.name}: {PATH.stat().st_size:,} bytes")
