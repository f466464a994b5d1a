"""What is remembered of a reader: in memory, in the reader's copy, never anywhere else."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_tutorial.course import check, exercises, progress, reader
from nsa_tutorial.course.chapters import CHAPTERS

DENSE = "dense_attention"


@pytest.fixture(autouse=True)
def nothing_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    reader.forget()
    yield
    reader.forget()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A reader's copy; the path of its notes."""
    (tmp_path / reader.FOLDER).mkdir()
    return tmp_path / reader.FOLDER / reader.FILE


def solved(path: Path) -> dict:
    return json.loads(path.read_text())["solved"]


def test_elsewhere_nothing_is_written(tmp_path: Path) -> None:
    reader.note_solved(DENSE, "causal_weights")
    reader.note_guess("gib", 4)
    assert reader.note_hint(DENSE, "causal_weights", 3) == 1
    assert "1 of" in progress().totals
    assert list(tmp_path.iterdir()) == []


def test_the_file_outlives_the_kernel(copy: Path) -> None:
    reader.note_solved(DENSE, "causal_weights")
    reader.note_hint(DENSE, "causal_weights", 3)
    reader.note_guess("gib", [1, 2])
    reader.forget()
    assert reader.notes()["solved"] == {DENSE: ["causal_weights"]}
    assert reader.note_hint(DENSE, "causal_weights", 3) == 2
    assert reader.guess_of("gib") == [1, 2]


def test_what_was_kept_in_memory_joins_the_file(tmp_path: Path) -> None:
    reader.note_solved(DENSE, "causal_weights")
    (tmp_path / reader.FOLDER).mkdir()
    reader.note_solved(DENSE, "log_sum_exp")
    path = tmp_path / reader.FOLDER / reader.FILE
    assert sorted(solved(path)[DENSE]) == ["causal_weights", "log_sum_exp"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"version": 0}', '{"version": 1}', "\x00\x01",
        '{"version": 1, "solved": {"a": 3}, "hints": {}, "guesses": {}, "latest": ""}',
        '{"version": 1, "solved": {"a": [3]}, "hints": {}, "guesses": {}, "latest": ""}',
        '{"version": 1, "solved": {}, "hints": {"a": "b"}, "guesses": {}, "latest": ""}',
        '{"version": 1, "solved": {}, "hints": [], "guesses": {}, "latest": ""}',
    ],
)  # fmt: skip
def test_a_broken_file_is_kept_aside(copy: Path, text: str) -> None:
    copy.write_text(text)
    reader.note_solved(DENSE, "causal_weights")
    assert solved(copy) == {DENSE: ["causal_weights"]}
    assert copy.with_suffix(".json.bak").read_text() == text


def test_each_broken_file_is_kept_and_told(copy: Path) -> None:
    """Under names of their own, the second beside the first; the reader hears of both."""
    for text in ("first", "second"):
        copy.write_text(text)
        reader.notes()
    kept = [copy.with_name(name) for name in ("progress.json.bak", "progress.json.2.bak")]
    assert [path.read_text() for path in kept] == ["first", "second"]
    told = reader.remarks_once()
    assert len(told) == 2 and reader.remarks_once() == []
    for path in kept:
        assert f"kept as .course/{path.name}." in repr(progress())
        assert f"kept as .course/{path.name}." in progress()._repr_html_()


def test_elsewhere_the_page_says_that_nothing_is_saved(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is something to lose."""
    reader.note_guess("gib", 4)
    assert "saved" not in repr(progress())
    monkeypatch.chdir(copy.parent)  # which holds no notes' folder of its own
    assert "Nothing is saved in this folder" in repr(progress())
    assert "<code>make lab</code>" in progress()._repr_html_()
    reader.forget()
    assert "saved" not in repr(progress())


def test_bytes_that_are_no_text_are_kept_aside(copy: Path) -> None:
    copy.write_bytes(b"\xff\xfe{")
    assert reader.notes()["solved"] == {}
    assert copy.with_suffix(".json.bak").exists()


def test_a_disk_that_cannot_be_written_stops_nothing(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(reader, "_write", full)
    reader.note_solved(DENSE, "causal_weights")
    assert reader.notes()["solved"] == {DENSE: ["causal_weights"]}
    assert not copy.exists()


def test_a_write_that_fails_leaves_the_file_whole(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.note_solved(DENSE, "causal_weights")
    before = copy.read_text()

    def half(notes: dict, file: object, **options: object) -> None:
        file.write('{"version"')
        raise OSError("no space left")

    monkeypatch.setattr(reader.json, "dump", half)
    reader.note_solved(DENSE, "log_sum_exp")
    assert copy.read_text() == before
    assert {p.name for p in copy.parent.iterdir()} <= {reader.FILE, "progress.lock"}


def solve_many(kernel: int) -> None:
    for i in range(20):
        reader.note_solved(DENSE, f"{kernel}-{i}")


def test_two_kernels_at_once_lose_nothing(copy: Path) -> None:
    context = multiprocessing.get_context("fork")
    kernels = [context.Process(target=solve_many, args=(n,)) for n in range(3)]
    for kernel in kernels:
        kernel.start()
    for kernel in kernels:
        kernel.join()
    assert sorted(solved(copy)[DENSE]) == sorted(f"{n}-{i}" for n in range(3) for i in range(20))


# -- the page --


def test_the_page_has_a_square_for_every_exercise() -> None:
    known = exercises.chapter_exercises(DENSE)
    check(DENSE, causal_weights=known["causal_weights"].solution)
    page = progress()
    ready = [c for c in CHAPTERS if c.is_ready]
    every = sum(len(exercises.chapter_exercises(c)) for c in exercises.chapters())
    html = page._repr_html_()
    assert html.count('class="nsa-square') == every
    assert html.count("nsa-square nsa-done") == 1
    assert html.count('aria-label="causal_weights: solved"') == 1
    assert [f'href="{c.file}"' in html for c in ready] == [True] * len(ready)
    assert page.totals == f"1 of {every} exercises solved, 0 guesses made."
    assert len(repr(page).splitlines()) == len(ready) + len(known) + 2  # nothing is saved here


def test_a_chapter_is_highlighted() -> None:
    """The named one; otherwise the one that was checked last."""
    assert progress().here == ""
    assert "aria-current" not in progress()._repr_html_()
    check(DENSE, causal_weights=lambda scores: scores)
    assert progress().here == DENSE
    page = progress("online_softmax")
    (row,) = re.findall(r'<tr class="nsa-here" aria-current="true">.*?</tr>', page._repr_html_())
    for name in exercises.chapter_exercises("online_softmax"):
        assert name in row
        assert f"<code>{name}</code>" in page._repr_html_()
    assert "○ merge_many" in repr(page)


def test_an_unknown_chapter_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no chapter 'nothing'; there are: start_here, dense"):
        progress("nothing")
