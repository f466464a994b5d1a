"""The book's pages, before Sphinx: every bold term has its entry, every named mistake its place,
answers are folds, and the notebooks stay as they are."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from book import chapter, exercises, listings, places
from book.terms import entries
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS
from nsa_tutorial.course.exercises import chapter_module

READY = [c for c in CHAPTERS if c.is_ready]
# Bold and no term: what a text stresses, names of designs and of pieces of code, steps of a list.
STRESSED = """
optional · largest number of each row · fair dice · one · no multiplication goes away · what ·
the chunk alone · ended · well placed · 1, 2, 2, 2, 1 · ties · ascends · where ·
most attention is nearby · jumps · of its own · the group's sum · gates from x · constant gates ·
the best equal gates · gates per token · merged by lse · a summary counts 8 · without a gpu ·
a loop inside a program · you · speed · `update_max` · waiting · groups of 4 · row of `k` ·
4 gib before the tensor · chapter 11's kernel · locate the program · one mask serves four cases ·
online softmax · normalise and store · share · no chunks · the sum over the group · random ·
trained · smooth · volume · none · gentle · peaked · avoid · attention to summaries ·
fixed places · tokens · tile of queries · block of keys
"""


def bold(notebook: Path) -> set[str]:
    """What may be a term: bold, up to five words, and no sentence."""
    cells = [c.source for c in nbformat.read(notebook, 4).cells if c.cell_type == "markdown"]
    cells = (re.sub(r"```.*?```", "", cell, flags=re.S) for cell in cells)
    # powers in code are no bold
    texts = (re.sub(r"`[^`]+`", lambda m: m[0] * ("**" not in m[0]), cell) for cell in cells)
    bolds = (words for text in texts for words in re.findall(r"\*\*(.+?)\*\*", text, re.S))
    found = (" ".join(words.split()) for words in bolds)
    return {b.casefold() for b in found if b[-1] not in "?.:" and len(b.split()) <= 5}


def test_every_bold_term_is_in_the_glossary_and_none_is_stale() -> None:
    stressed = set(" ".join(STRESSED.split()).split(" · "))
    first: dict[str, int] = {}
    for ready in READY:
        for term in bold(NOTEBOOKS / ready.file):
            first.setdefault(term, ready.number)
    known = {form: entry for entry in entries() for form in entry.forms}
    missing = {f"{n:02d}: {t}" for t, n in first.items() if t not in known and t not in stressed}
    assert not missing, f"bold, and neither in book/glossary.md nor in STRESSED: {sorted(missing)}"
    for entry in entries():
        chapters = [first[form] for form in entry.forms if form in first]
        assert chapters, f"{entry.term}: no chapter has it in bold"
        assert entry.chapter == min(chapters), f"{entry.term} is first bold in {min(chapters):02d}"


def test_the_glossary_is_in_order() -> None:
    terms = [entry.term.casefold().lstrip("−") for entry in entries()]
    assert terms == sorted(terms) and len(terms) == len(set(terms))


@pytest.mark.parametrize("ready", READY, ids=lambda c: c.name)
def test_every_mistake_has_its_place(ready) -> None:
    """Under its exercise: its name, what it looks like, and the question."""
    text = exercises.mistakes(ready)
    for exercise in chapter_module(ready.name).EXERCISES:
        part = text[text.index(f"## `{exercise.name}`\n") :].split("\n## ")[0]
        for mistake in exercise.misconceptions:
            own = part[part.index(f"### {mistake.name[0].upper()}{mistake.name[1:]}\n") :]
            own = own[4:].split("\n### ")[0]
            assert mistake.hint in own
            assert "```" in own or "In the kernel: " in own, f"{mistake.name}: no code"


@pytest.mark.parametrize("ready", READY, ids=lambda c: c.name)
def test_an_answer_is_folded_and_the_notebook_is_left_alone(ready, tmp_path: Path) -> None:
    path = NOTEBOOKS / ready.file
    before = path.read_bytes()
    made = chapter.page(nbformat.read(path, 4), path.name, tmp_path)
    assert path.read_bytes() == before
    kept = [cell for cell in made.cells if "remove-cell" not in cell.metadata.get("tags", [])]
    for cell in kept:
        said = str(cell.get("outputs", ""))
        assert "no guess yet" not in said and "not attempted yet" not in said
        assert "Run this cell" not in said
        if "it is" in said and "nsa-said" in said:
            assert "hide-cell" in cell.metadata.tags
    assert made.cells[0].source.count("Download the notebook") == 1


def test_the_address_of_the_repository_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(places.openers("a.ipynb")) == ["Download the notebook"]
    assert places.source("b.py") == ""
    monkeypatch.setattr(places, "REPOSITORY", "owner/name")
    found = places.openers("a.ipynb")
    colab = "https://colab.research.google.com/github/owner/name/blob/main/notebooks/a.ipynb"
    assert found["Open in Colab"] == colab
    assert found["Open in Kaggle"].endswith(
        "https://github.com/owner/name/blob/main/notebooks/a.ipynb"
    )
    assert places.source("b.py", 3) == "https://github.com/owner/name/blob/main/b.py#L3"
    assert chapter.links("[c](../b.py)") == "[c](https://github.com/owner/name/blob/main/b.py)"


@pytest.mark.parametrize("kernel", listings.KERNELS, ids=lambda k: k.title)
def test_phases_stand_in_three_languages(kernel) -> None:
    """In each language one function has the phase; the backward's walks differ in a few."""
    names = kernel.phases()
    languages = [
        {x.path.split("/kernels/")[-1].split("/")[0] for x in kernel.listings(name)}
        for name in names
    ]
    whole = [found for found in languages if len(found) == 3 and {"tilelang", "triton"} <= found]
    assert len(whole) >= 8 and len(whole) >= len(names) - 2
    text = listings.page()
    assert all(f"### {name[0].upper()}{name[1:]}\n" in text for name in names)


def test_each_tool_has_a_source() -> None:
    text = (places.BOOK / "tools.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    tools = ["Helion", "cuTile", "Triton", "TileLang", "Gluon", "CuTe DSL", "CUDA C++"]
    assert [row.split("**")[1] for row in rows] == tools
    assert all(re.search(r"\]\(https://[^)]+\)", row.split(" | ")[-1]) for row in rows)
