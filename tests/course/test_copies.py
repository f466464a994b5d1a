"""The reader's copy: new versions arrive, and nothing that the reader wrote is ever lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from nsa_tutorial.course import copies, copying
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS

ROOT = Path(__file__).resolve().parents[2]
NAME, OFFER = "05_selected_attention.ipynb", "05_selected_attention.new.ipynb"
FIRST = {"title": "# 05 · Selected", "code": "x = 1", "stub": "def f():\n    ...", "end": "## Next"}
SECOND = FIRST | {"code": "x = 2"}


def notebook(cells: dict[str, str], printed: str = "1") -> dict:
    """A small chapter: a cell for each id; titles are Markdown, the rest is code that was run."""
    made = []
    for name, source in cells.items():
        cell = {"id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
        output = {"name": "stdout", "output_type": "stream", "text": [printed]}
        code = {"cell_type": "code", "execution_count": 1, "outputs": [output]}
        made.append(cell | ({"cell_type": "markdown"} if source.startswith("#") else code))
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


class Course:
    """A repository of chapters, and a reader's folder."""

    def __init__(self, folder: Path) -> None:
        self.chapters, self.folder = folder / "notebooks", folder / "mine"
        self.chapters.mkdir()
        self.publish(FIRST)

    def publish(self, cells: dict[str, str], name: str = NAME, **outputs: str) -> None:
        text = copying.text_of(notebook(cells, **outputs))
        (self.chapters / name).write_text(text, encoding="utf-8")

    def update(self) -> list[str]:
        """Bring the copy up to date, twice: the second time changes nothing."""
        said = copies.update(self.folder, self.chapters)
        before = self.state()
        copies.update(self.folder, self.chapters)
        assert self.state() == before
        return said

    def state(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[!.]*"))

    def cells(self, name: str = NAME) -> dict[str, str]:
        found = json.loads((self.folder / name).read_text(encoding="utf-8"))["cells"]
        return {cell["id"]: "".join(cell["source"]) for cell in found}

    def write(self, name: str = NAME, **cells: str) -> None:
        """What a reader does: change the text of cells, or add them at the end."""
        found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        for cell in found["cells"]:
            cell["source"] = cells.pop(cell["id"], "".join(cell["source"]))
        found["cells"] += notebook(cells)["cells"]
        (self.folder / name).write_text(json.dumps(found), encoding="utf-8")

    def rename(self, old: str, new: str) -> None:
        os.replace(self.folder / old, self.folder / new)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    return Course(tmp_path)


@pytest.fixture
def offered(course: Course) -> Course:
    """The reader solved the stub, and then the course changed another cell."""
    course.update()
    course.write(stub="def f(): return 7")
    course.publish(SECOND)
    (said,) = course.update()
    assert f"as {OFFER}" in said
    assert "One cell of yours is carried over" in said
    return course


def test_the_first_copy(course: Course) -> None:
    assert course.update() == ["Your own copy of 1 chapters is in mine/."]
    assert course.cells() == FIRST
    assert course.files() == [NAME]
    assert course.update() == []


def test_an_unchanged_chapter_is_replaced(course: Course) -> None:
    course.update()
    course.publish(SECOND)
    assert course.update() == [f"{NAME}: updated. You had changed nothing in it."]
    assert course.cells() == SECOND
    assert course.files() == [NAME]


def test_new_outputs_alone_arrive_silently(course: Course) -> None:
    course.update()
    course.publish(FIRST, printed="2")
    assert course.update() == []
    assert "2" in (course.folder / NAME).read_text()


def test_running_and_saving_is_no_change(course: Course) -> None:
    """JupyterLab saves in its own form, and adds an empty cell behind the last one that runs."""
    course.update()
    path = course.folder / NAME
    found = json.loads(path.read_text())
    found["metadata"] = {"language_info": {"version": "3.14"}}
    for cell in found["cells"]:
        cell["source"] = "".join(cell["source"])
        cell["metadata"] = {"scrolled": True}
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = 9, []
    found["cells"] += notebook({"empty": ""})["cells"]
    path.write_text(json.dumps(found, indent=3))
    assert course.update() == []
    course.publish(SECOND)
    assert len(course.update()) == 1
    assert course.cells() == SECOND


@pytest.mark.parametrize(
    "change",
    [
        lambda cells: cells | {"stub": "def f(): return 7"},
        lambda cells: cells | {"mine": "print('more')"},
        lambda cells: {name: cells[name] for name in cells if name != "code"},
        lambda cells: {name: cells[name] for name in reversed(cells)},
    ],
    ids=["answered", "added", "deleted", "moved"],
)
def test_a_changed_chapter_stays(course: Course, change: Callable) -> None:
    course.update()
    text = copying.text_of(notebook(change(FIRST)))
    (course.folder / NAME).write_text(text)
    assert course.update() == []
    course.publish(FIRST, printed="2")  # the course says the same, in other outputs
    assert course.update() == []
    course.publish(SECOND)
    assert len(course.update()) == 1
    assert (course.folder / NAME).read_text() == text
    assert course.files() == sorted([OFFER, NAME])


def test_the_offer_carries_answers_over(course: Course) -> None:
    """An answer where the course changed nothing, and a cell of the reader's own, behind the same
    cell; what both changed stays in the reader's chapter alone."""
    course.update()
    mine = {
        "title": FIRST["title"],
        "more": "y = 1",
        "code": "x = 100",
        "stub": "def f(): return 7",
    }
    (course.folder / NAME).write_text(copying.text_of(notebook(mine)))
    course.publish(
        {"title": "# 05 · Better", "new": "w = 0", "code": "x = 2", "stub": FIRST["stub"]}
    )
    (said,) = course.update()
    assert "2 cells of yours are carried over" in said
    assert "One cell of yours is only in yours" in said
    want = ["# 05 · Better", "y = 1", "w = 0", "x = 2", "def f(): return 7"]
    assert list(course.cells(OFFER).values()) == want
    carried = [c for c in read(course, OFFER)["cells"] if c["id"] in ("more", "stub")]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in carried)
    assert course.cells() == mine


def read(course: Course, name: str) -> dict:
    return json.loads((course.folder / name).read_text(encoding="utf-8"))


def test_the_offer_follows_the_course_and_the_reader(offered: Course) -> None:
    assert offered.update() == [f"{NAME}: {OFFER} is still beside it."]
    offered.write(stub="def f(): return 8")
    offered.update()
    assert offered.cells(OFFER) == SECOND | {"stub": "def f(): return 8"}
    third = SECOND | {"code": "x = 3"}
    offered.publish(third)
    assert "as " + OFFER in offered.update()[0]
    assert offered.cells(OFFER) == third | {"stub": "def f(): return 8"}


def test_an_offer_that_the_reader_changed_stays(offered: Course) -> None:
    offered.write(OFFER, end="## My next")
    kept = offered.cells(OFFER)
    offered.publish(SECOND | {"code": "x = 3"})
    (said,) = offered.update()
    assert "stays as it is. The course has a newer one" in said
    assert offered.cells(OFFER) == kept


@pytest.mark.parametrize("edit", [{}, {"stub": "def f(): return 9"}], ids=["as it was", "edited"])
def test_a_renamed_offer_is_the_chapter(offered: Course, edit: dict[str, str]) -> None:
    offered.write(OFFER, **edit)
    offered.rename(OFFER, NAME)
    assert offered.update() == []
    answer = SECOND | {"stub": "def f(): return 7"} | edit
    assert offered.cells() == answer
    third = SECOND | {"title": "# 05 · Third"}
    offered.publish(third)
    offered.update()
    assert offered.cells() == answer
    assert offered.cells(OFFER) == third | {"stub": answer["stub"]}


def test_a_deleted_offer_does_not_come_back(offered: Course) -> None:
    (offered.folder / OFFER).unlink()
    assert offered.update() == []
    assert offered.files() == [NAME]
    third = SECOND | {"title": "# 05 · Third"}
    offered.publish(third)
    assert len(offered.update()) == 1
    # the old x = 1, which the reader never touched, is no answer to carry over
    assert offered.cells(OFFER) == third | {"stub": "def f(): return 7"}


def test_an_offer_takes_the_place_of_a_chapter_put_away(offered: Course) -> None:
    offered.rename(NAME, "old.ipynb")
    (said,) = offered.update()
    assert "took its place" in said
    assert offered.cells() == SECOND | {"stub": "def f(): return 7"}
    assert offered.files() == sorted([NAME, "old.ipynb"])


def test_a_deleted_copy_is_made_again(course: Course) -> None:
    course.update()
    course.write(stub="def f(): return 7")
    (course.folder / NAME).unlink()
    assert course.update() == [f"{NAME}: your copy is made."]
    assert course.cells() == FIRST


def test_deleting_chapter_and_offer_starts_anew(offered: Course) -> None:
    (offered.folder / NAME).unlink()
    (offered.folder / OFFER).unlink()
    offered.update()
    assert offered.cells() == SECOND
    assert offered.files() == [NAME]


def test_a_chapter_that_left_the_course(course: Course) -> None:
    names = ["06_compression.ipynb", "07_block_selection.ipynb"]
    for name in names:
        course.publish(FIRST, name)
    course.update()
    course.write(names[1], stub="def f(): return 7")
    for name in names:
        (course.chapters / name).unlink()
    said = course.update()
    assert said == [
        f"{names[0]} left the course, and your unchanged copy with it.",
        f"{names[1]} left the course. Yours stays, as you changed it.",
    ]
    assert course.files() == [NAME, names[1]]
    assert course.update() == []


@pytest.mark.parametrize("text", ["{ not JSON", "[]", '{"cells": 3}', "\udcff"], ids=str)
def test_a_file_that_cannot_be_read_stays(course: Course, text: str) -> None:
    course.update()
    (course.folder / NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    course.publish(SECOND)
    (said,) = course.update()
    assert "not a notebook that can be read" in said
    assert course.files() == [NAME]
    assert (course.folder / NAME).read_bytes() == text.encode("utf-8", "surrogateescape")


def test_records_that_are_lost(course: Course) -> None:
    """Without them nothing is known of the reader's changes: theirs stays, the new one is
    offered."""
    course.update()
    for path in (course.folder / ".course" / "base").iterdir():
        path.unlink()
    course.write(stub="def f(): return 7")
    (said,) = course.update()
    assert "One cell of yours is only in yours" in said
    assert course.cells()["stub"] == "def f(): return 7"
    assert course.cells(OFFER) == FIRST


def test_a_file_of_the_readers_in_the_place_of_the_offer(course: Course) -> None:
    course.update()
    course.write(stub="def f(): return 7")
    (course.folder / OFFER).write_text("notes")
    course.publish(SECOND)
    assert f"{OFFER} is beside it, and stays" in course.update()[0]
    assert (course.folder / OFFER).read_text() == "notes"


def test_progress_and_other_files_are_left_alone(offered: Course) -> None:
    progress = offered.folder / ".course" / "progress.json"
    progress.write_text("{}")
    (offered.folder / "scratch.ipynb").write_text("mine")
    offered.publish(FIRST | {"code": "x = 3"})
    offered.update()
    assert (progress.read_text(), (offered.folder / "scratch.ipynb").read_text()) == ("{}", "mine")


def test_a_write_that_fails_leaves_the_old_file(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    course.update()
    course.publish(SECOND)
    before = course.state()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(PermissionError):
            copies.update(course.folder, course.chapters)
    assert course.state() == before
    assert len(course.update()) == 1


def test_a_folder_that_cannot_be_made_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert copies.main(["--folder", str(tmp_path / "file")]) == 1
    assert "could not be made" in capsys.readouterr().out


@pytest.mark.parametrize("inside", ["", "mine"])
def test_the_course_s_own_folder_is_no_place_for_a_copy(course: Course, inside: str) -> None:
    before = (course.chapters / NAME).read_bytes()
    with pytest.raises(ValueError, match="this is where the course keeps its own chapters"):
        copies.update(course.chapters / inside, course.chapters)
    assert (course.chapters / NAME).read_bytes() == before
    assert [path.name for path in course.chapters.iterdir()] == [NAME]


def test_the_course_s_own_folder_is_refused_in_a_sentence(capsys: pytest.CaptureFixture) -> None:
    assert copies.main(["--folder", str(NOTEBOOKS)]) == 1
    assert "notebooks, could not be made: this is where" in capsys.readouterr().out


@pytest.mark.parametrize("place", [NAME, OFFER, f".course/base/{NAME}"])
def test_a_directory_in_the_place_of_a_chapter_stops_no_other(course: Course, place: str) -> None:
    (course.folder / place).mkdir(parents=True)
    course.publish(FIRST, "06_compression.ipynb")
    (skipped,) = (line for line in course.update() if "skipped" in line)
    assert skipped.startswith(f"{NAME}: skipped, because {place} is a directory. Rename it")
    assert course.cells("06_compression.ipynb") == FIRST
    (course.folder / place).rmdir()
    course.update()
    assert course.cells() == FIRST


def test_the_copy_is_made_and_nothing_is_opened(
    course: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(copies, "update", lambda folder: ["made"])
    monkeypatch.setattr(os, "execv", pytest.fail)
    assert copies.main(["--folder", str(course.folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("made\n") and f"Begin with {course.folder / CHAPTERS[0].file}" in said


def test_no_notary_is_no_reason_to_stop(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no home")

    monkeypatch.setattr(NotebookNotary, "sign", refuse)
    assert course.update()


def test_copies_are_trusted(offered: Course) -> None:
    for name in (NAME, OFFER):
        if name == NAME:
            (offered.folder / NAME).unlink()
            (offered.folder / OFFER).rename(offered.folder / "kept.ipynb")
            offered.update()
            (offered.folder / "kept.ipynb").rename(offered.folder / OFFER)
        made = nbformat.read(offered.folder / name, as_version=4)
        assert NotebookNotary().check_signature(made)


def test_answers_are_hidden() -> None:
    cells = {
        "exercise": 'exercise("online_softmax", "merge")',
        "stub": "def merge(a):\n    ...",
        "other": "def merge_all(a):\n    ...",
        "check": 'check("online_softmax", merge=merge)',
        "guess": 'guess = predict("gib", 4)',
        "answer": 'reveal("gib", 8)',
        "own": "object.check(3); prediction(4)",
        "question": "# A\n**Predict:** how many?",
        "shown": "4 + 4",
        "more": "5 + 5",
        "text": "# B",
        "after": "6 + 6",
        "listing": "show(merge_all)",
    }
    made = copying.reader_copy(notebook(cells))
    code = [c for c in made["cells"] if c["cell_type"] == "code"]
    hidden = {c["id"] for c in code if not c["outputs"]}
    assert hidden == {"stub", "check", "guess", "answer", "shown", "more", "listing"}
    assert all((c["execution_count"] is None) == (c["id"] in hidden) for c in code)


def test_pictures_are_described() -> None:
    about = {"image/png": {"width": 400, "height": 200, "alt": 'a < b, "said"'}}
    data = {"image/png": ["AAAA\n", "BBBB\n"], "text/plain": "Picture: a < b"}
    given = notebook({"draw": "draw()", "plain": "draw()"})
    for cell, facts in zip(given["cells"], (about, {}), strict=True):
        cell["outputs"] = [
            {"output_type": "display_data", "metadata": facts, "data": dict(data)},
        ]
    described, plain = (c["outputs"][0]["data"] for c in copying.reader_copy(given)["cells"])
    page = described["text/html"]
    assert 'alt="a &lt; b, &quot;said&quot;" width="400" height="200"' in page
    assert 'src="data:image/png;base64,AAAABBBB"' in page
    assert described["image/png"] == data["image/png"]
    assert plain == data


def test_every_chapter_has_a_copy(course: Course) -> None:
    """The real chapters: valid notebooks with the same cells, links that stay inside of the
    repository, and no verdict."""
    copies.update(course.folder, NOTEBOOKS)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        mine, stored = (json.loads((f / path.name).read_text(encoding="utf-8"))
                        for f in (course.folder, NOTEBOOKS))  # fmt: skip
        nbformat.validate(mine)
        assert copying.same(mine, stored)
        assert not any(
            c["outputs"] for c in mine["cells"] if copying.source(c).startswith("check(")
        )
        shown = [sum(bool(c.get("outputs")) for c in n["cells"]) for n in (mine, stored)]
        assert shown[1] / 3 < shown[0] <= shown[1]  # what would answer an exercise is hidden


def test_the_address_of_lab() -> None:
    command = copies.lab_command(ROOT / "my_chapters", ["--no-browser"])
    assert f"--LabApp.default_url=/lab/tree/my_chapters/{CHAPTERS[0].file}" in command
    assert f"--ServerApp.root_dir={ROOT}" in command
    assert command[-1] == "--no-browser"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """What the command behind `make check` says, without colours, and its exit status."""
    command = [sys.executable, "-m", "nsa_tutorial.course.copies", "--folder", str(folder)]
    command += ["--check", "-p", "no:cacheprovider", "--color=no"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


CHECKED = {
    "start": "limit = 1\nprint(limit)",
    "question": "# A\n**Predict:** which?",
    "hidden": "print(limit + 1)",
    "text": "# B",
    "exercise": 'def exercise(*a): ...\nexercise("chapter", "merge")',
    "stub": "def merge(a):\n    ...",
    "check": "print(merge(2))",
    "last": "print(limit)",
}


def checked_chapter() -> dict:
    """A chapter of the cells above, with the outputs that they have when they run."""
    printed = {"start": "1", "hidden": "2", "check": "None", "last": "1"}
    made = notebook(CHECKED)
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            text = printed.get(cell["id"], "")
            cell["outputs"][0]["text"] = f"{text}\n"
            cell["outputs"] = cell["outputs"] if text else []
        if cell["id"] == "check":
            cell["metadata"] = {"tags": ["nbval-ignore-output"]}
    return made


@pytest.mark.exhaustive
def test_a_copy_is_checked(course: Course) -> None:
    """Solved or not, run or not, a copy passes; a cell of the course that prints something else
    fails."""
    names = [f"0{i}_{state}.ipynb" for i, state in enumerate(("new", "solved", "wrong", "cleared"))]
    (course.chapters / NAME).unlink()
    for name in names:
        (course.chapters / name).write_text(copying.text_of(checked_chapter()))
    copies.update(course.folder, course.chapters)
    course.write(names[1], stub="def merge(a):\n    return a", mine="print('my own')")
    for name, outputs in ((names[2], [{"name": "stdout", "output_type": "stream", "text": "7"}]),
                          (names[3], [])):  # fmt: skip
        found = read(course, name)
        found["cells"][-1]["outputs"] = outputs
        found["cells"][-1]["execution_count"] = 9 if outputs else None
        (course.folder / name).write_text(copying.text_of(found))
    command = copies.check_command(course.folder, ["-p", "no:cacheprovider", "--color=no"])
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert f"1 failed, {4 * 6 + 1 - 1} passed" in said, said
    assert f"{names[2]}::Cell 5" in said


def break_two(course: Course) -> None:
    course.update()
    (course.folder / "broken.ipynb").write_text("{")
    (course.folder / "empty.ipynb").write_text("{}")


def test_a_broken_notebook_is_named_and_left_out(
    course: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The status says that something is wrong, though what is run passes."""
    break_two(course)
    commands = []
    monkeypatch.setattr(subprocess, "call", lambda command, **_: commands.append(command) or 0)
    assert copies.main(["--folder", str(course.folder), "--check", "-q"]) == 1
    said = capsys.readouterr().out
    assert "broken.ipynb is no notebook that can be read (line 1: " in said
    assert "empty.ipynb is no notebook that can be read (there are no cells" in said
    ignored = [f"--ignore={course.folder / name}" for name in ("broken.ipynb", "empty.ipynb")]
    assert commands[0][-3:] == [*ignored, "-q"]


@pytest.mark.exhaustive
def test_beside_a_broken_notebook_the_others_are_checked(course: Course) -> None:
    break_two(course)
    done = check(course.folder)
    assert f"{NAME}::Cell 0" in done.stdout  # its outputs are not those of a run
    assert "Traceback (most recent" not in done.stdout + done.stderr
    assert done.returncode != 0


def test_nothing_to_check_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert copies.main(["--folder", str(tmp_path), "--check"]) == 1
    assert "There is no copy of the chapters yet. Run `make lab` first" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_copy_is_run_only_by_name(course: Course) -> None:
    """`pytest --nbval` on the folder around it does not enter it."""
    course.update()
    (course.folder.parent / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    command = [sys.executable, "-m", "pytest", "--nbval", "--collect-only"]
    command += ["-p", "no:cacheprovider", "-p", "nsa_tutorial.course.nbval_rules"]
    run = {"cwd": course.folder.parent, "capture_output": True, "text": True, "check": False}
    said = subprocess.run(command, **run).stdout
    assert f"notebooks/{NAME}" in said
    assert f"mine/{NAME}" not in said
