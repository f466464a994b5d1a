"""Chapter 00: the list of chapters is one, and its pictures show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS, PARTS
from nsa_tutorial.course.exercises import start_here
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


def test_the_readme_lists_the_chapters() -> None:
    """All of them, under the headings of their parts; those that are here with a link, the others
    with their idea."""
    assert [c.part for c in CHAPTERS] == sorted(c.part for c in CHAPTERS)
    heading, found = PARTS[0], {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if part := re.match(r"\| \*\*(.+)\*\* \| \| \|", line):
            heading = part.group(1)
        if row := re.match(r"\| (\[?\d\d \w+.*?) \| (.*?) \|", line):
            found[row.group(1)] = (heading, row.group(2))
    assert len(found) == len(CHAPTERS)
    for c in CHAPTERS:
        title = f"{c.number:02d} {c.name}"
        if c.is_ready:
            assert found[f"[{title}](notebooks/{c.file})"][0] == PARTS[c.part]
        else:
            assert found[title] == (PARTS[c.part], c.idea)


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


def test_thoughts_about_guesses_hold() -> None:
    """What the tutor says that other lists and lengths leave, they leave."""
    guesses = {
        p.name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for p in start_here.PREDICTIONS
    }

    def pairs(length: int, blocks: int) -> int:
        return sum(min(t + 1, 8 * (blocks - 1) + t % 8 + 1) for t in range(length))

    assert 3 * (8 * 8 + 36) == 300 == pairs(32, 2) - 36
    assert {pairs(32, 1), 300, 528 / 2} <= set(guesses["pairs_of_32_tokens"])
    for length, digits in ((32, 0), (256, 1), (2048, 1)):
        percent = round(100 * pairs(length, 2) / (length * (length + 1) // 2), digits)
        assert percent in guesses["percent_of_16384_tokens"]
