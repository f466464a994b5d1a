"""The page of the kernels' phases, side by side in PyTorch, TileLang and Triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from book.chapter import STYLE, file_links
from nsa_tutorial.course import source
from nsa_tutorial.course.listing import Listing, SideBySide, needed
from nsa_tutorial.course.listing_style import style

HEAD = """\
# Three languages, phase by phase

Each kernel of the course is written in PyTorch, in TileLang and in Triton, and its steps, the
phases, have the same names in all three. Here each phase stands beside itself. A name that two
languages share has one colour. These are the lines that run, read from the files above them.
"""
_KERNELS = "nsa_tutorial.kernels"

phases = functools.cache(source.phases)


@dataclass(frozen=True)
class Kernel:
    """A kernel in three languages.

    Attributes:
        title: what it computes.
        chapter: the file of the notebook that builds it.
        functions: for each language, the functions that have its phases, as `show` takes them.
    """

    title: str
    chapter: str
    functions: tuple[tuple[str, ...], ...]

    def phases(self) -> list[str]:
        """Those that two languages or more have, in PyTorch's order."""
        own = [[name for f in group for name in phases(f)] for group in self.functions]
        return [name for name in own[0] if any(name in other for other in own[1:])]

    def listings(self, phase: str) -> list[Listing]:
        """A phase in each language that has it."""
        return [
            source.show(f, phase) for group in self.functions for f in group if phase in phases(f)
        ]


KERNELS = (
    Kernel(
        "Attention to a list of blocks",
        "11_triton_forward.ipynb",
        (
            ("nsa_tutorial.sparse.selected_attention:forward",),
            (f"{_KERNELS}.tilelang.selected.forward:build_kernel.selected_attention",),
            (f"{_KERNELS}.triton.selected.forward:kernel",),
        ),
    ),
    Kernel(
        "Its backward, for the queries",
        "13_backward_kernels.ipynb",
        (
            ("nsa_tutorial.training.gradients:backward_dq",),
            (f"{_KERNELS}.tilelang.selected.backward:build_dq.dq_kernel",),
            (f"{_KERNELS}.triton.selected.backward:dq_kernel",),
        ),
    ),
    Kernel(
        "Its backward, for the keys and the values",
        "13_backward_kernels.ipynb",
        (
            ("nsa_tutorial.training.gradients:backward_dkv",),
            (f"{_KERNELS}.tilelang.selected.backward:build_dkv.dkv_kernel",),
            (
                f"{_KERNELS}.triton.selected.backward:dkv_kernel",
                f"{_KERNELS}.triton.selected.backward:walk_queries",
            ),
        ),
    ),
)


def columns(listings: list[Listing]) -> str:
    """Listings in columns as HTML. Where they do not fit, their lines scroll."""
    widths = " ".join(f"minmax(0, {needed(listing)}fr)" for listing in listings)
    made = file_links(STYLE.sub("", SideBySide(listings)._repr_html_()))
    return made.replace('class="nsa-columns"', f'class="nsa-columns" style="--columns: {widths}"')


def page() -> str:
    """The page. Its name and its colours are in one style above all columns."""
    parts = [HEAD, f"```{{raw}} html\n{style([1])}\n```\n"]
    for kernel in KERNELS:
        chapter = f"[chapter {kernel.chapter[:2]}]({kernel.chapter})"
        parts.append(f"## {kernel.title}\n\nFrom {chapter}.\n")
        for phase in kernel.phases():
            parts.append(f"### {phase[0].upper()}{phase[1:]}\n")
            parts.append(f"````{{raw}} html\n{columns(kernel.listings(phase))}\n````\n")
    return "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n" + "\n".join(parts)
