"""Chapter 00: the list of chapters is one, and its pictures show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS, PARTS
from nsa_tutorial.course.widgets import start_here as pictures

ROOT = Path(__file__).resolve().parents[2]


def test_every_notebook_is_a_chapter() -> None:
    assert {c.file for c in CHAPTERS if c.is_ready} == {p.name for p in NOTEBOOKS.glob("*.ipynb")}
    assert [c.number for c in CHAPTERS] == list(range(19))


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS if c.is_ready], ids=lambda c: c.name)
def test_minutes_agree(chapter) -> None:
    """README.md promises what the chapter's first cell says."""
    row = re.search(rf"\(notebooks/{chapter.file}\).*\| (\d+) \|", (ROOT / "README.md").read_text())
    assert f"About {row.group(1)} minutes" in (NOTEBOOKS / chapter.file).read_text()


@pytest.mark.parametrize(
    ("column", "language"), [(-2, "tilelang"), (-1, "triton")], ids=["tilelang", "triton"]
)
def test_the_names_are_those_of_the_kernels(column: int, language: str) -> None:
    """Every name that the table of chapter 00 gives for a kernel is in that kernel's source."""
    cells = json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text())["cells"]
    recap = "".join("".join(cell["source"]) + "\n" for cell in cells).split("\n## Recap", 1)[1]
    rows = [line.strip("|").split("|") for line in recap.splitlines() if line.startswith("| ")][1:]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row[column])}
    source = (ROOT / "nsa_tutorial" / "kernels" / f"{language}_forward.py").read_text()
    assert len(names) > 20
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", source)] == []


def test_the_parts_are_those_of_the_readme() -> None:
    """Chapters that are here stand under the same headings there."""
    assert [c.part for c in CHAPTERS] == sorted(c.part for c in CHAPTERS)
    heading, found = PARTS[0], {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if part := re.match(r"\| \*\*(.+)\*\* \| \| \|", line):
            heading = part.group(1)
        if row := re.search(r"\(notebooks/(\d\d_\w+\.ipynb)\)", line):
            found.setdefault(row.group(1), heading)
    assert {c.file: PARTS[c.part] for c in CHAPTERS if c.is_ready}.items() <= found.items()
    assert PARTS[CHAPTERS[-1].part] == "Training and serving"


def test_course_map() -> None:
    ready = sum(c.is_ready for c in CHAPTERS)
    assert (
        pictures.draw_course().finding
        == f"19 chapters from one formula to a trained model ({ready} of them, filled, are here)"
    )


def test_selection_picture_counts() -> None:
    visible = torch.eye(6, dtype=torch.bool)
    visible[4, 0] = True
    assert (
        pictures.draw_selection(visible, 2).finding
        == "Of the 21 pairs without a list, 7 are left (33%)"
    )


def test_overview_is_the_stored_asset() -> None:
    """The command in README.md makes the picture in README.md; pixels may differ with fonts, sizes
    not by much."""
    stored = (ROOT / "assets" / "selected_attention.png").read_bytes()
    assert abs(len(pictures.draw_overview().png()) - len(stored)) < 0.2 * len(stored)
