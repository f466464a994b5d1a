"""The chapters, once: what the map draws, what README.md lists and the tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PARTS = ("Start", "Attention, exactly", "Attention, sparsely", "Kernels", "Training and serving")


@dataclass(frozen=True)
class Chapter:
    """One chapter.

    Attributes:
        number: 0 to 18.
        name: of its notebook, its module and its exercises.
        part: index into `PARTS`.
        idea: the one idea, as a phrase.
    """

    number: int
    name: str
    part: int
    idea: str

    @property
    def file(self) -> str:
        """The notebook's file name."""
        return f"{self.number:02d}_{self.name}.ipynb"

    @property
    def is_ready(self) -> bool:
        """Whether the notebook is there."""
        return (NOTEBOOKS / self.file).exists()


CHAPTERS = tuple(
    Chapter(number, name, part, idea)
    for number, (name, part, idea) in enumerate(
        [
            ("start_here", 0, "what this machine can run"),
            ("dense_attention", 1, "a soft lookup, and its cost is N²"),
            ("grouped_query_attention", 1, "share the keys, shrink the cache"),
            ("online_softmax", 1, "softmax in one pass, base two"),
            ("tiled_attention", 1, "bytes, not FLOPs"),
            ("selected_attention", 2, "a short list of blocks"),
            ("compression", 2, "a block can be summarised"),
            ("block_selection", 2, "cheap scores choose the blocks"),
            ("native_sparse_attention", 2, "three views, gated"),
            ("two_tile_languages", 3, "one tile's program, run many times"),
            ("tilelang_forward", 3, "one program per query and KV head"),
            ("triton_forward", 3, "the same, with pointers and masks"),
            ("gradients", 4, "the backward without the matrix"),
            ("backward_kernels", 4, "a list, and its inverse"),
            ("selection_kernels", 4, "pick without storing the scores"),
            ("decoding", 4, "one query, a long cache"),
            ("performance", 4, "is it fast, and why"),
            ("capstone", 4, "train it"),
            ("many_gpus", 4, "split the queries, gather the keys"),
        ]
    )
)
