"""What a reader's copy of a chapter is made of: the chapter without the answers, and with what the
reader wrote in an earlier version.

Notebooks are plain JSON here, so that a copy is in the form in which JupyterLab saves it. Two
notebooks are the same if their cells hold the same text in the same order: outputs and metadata,
which every run changes, do not count. Which files are made from this is decided in `copies`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from nsa_tutorial.course import stills

MARKER = ".course"  # the directory that tells a reader's copy from the chapters themselves
_ANSWERS = re.compile(r"(?<![\w.])(?:predict|reveal|check)\(")
_EXERCISE = re.compile(r"(?<![\w.])exercise\(\s*[\"']\w+[\"'],\s*[\"'](\w+)[\"']")
_LISTING = re.compile(r"(?<![\w.])(?:show|side_by_side|solution)\(")


@dataclass(frozen=True)
class Files:
    """Where the parts of one chapter's copy are."""

    folder: Path
    name: str

    @property
    def mine(self) -> Path:
        """The reader's chapter."""
        return self.folder / self.name

    @property
    def offer(self) -> Path:
        """The new version beside it."""
        return self.folder / f"{Path(self.name).stem}.new.ipynb"

    @property
    def base(self) -> Path:
        """The version that the reader's chapter was made from."""
        return self.folder / MARKER / "base" / self.name

    @property
    def seen(self) -> Path:
        """A newer version that the reader was offered."""
        return self.folder / MARKER / "seen" / self.name

    @property
    def laid(self) -> Path:
        """The offer as it was laid down."""
        return self.folder / MARKER / "laid" / self.name

    def forget_offer(self) -> None:
        """The reader took it or put it away, or there is a newer copy."""
        self.laid.unlink(missing_ok=True)
        self.seen.unlink(missing_ok=True)


def parse(text: str) -> dict:
    """A notebook from its text.

    Raises:
        ValueError: for a text that is no notebook, saying why.
    """
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(_is_cell(cell) for cell in cells):
        raise ValueError("there are no cells of a notebook in it")
    return notebook


def why_unreadable(path: Path) -> str:
    """Why a file is no notebook that can be run; empty for one that is."""
    try:
        text = path.read_text(encoding="utf-8")
        parse(text)
        nbformat.reads(text, as_version=4)
    except Exception as error:  # `nbformat` raises many kinds
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _is_cell(cell: object) -> bool:
    if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
        return False
    lines = cell.get("source")
    return isinstance(lines, str) or (
        isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    )


def text_of(notebook: dict) -> str:
    """The text of a notebook's file, in the form in which JupyterLab saves it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def source(cell: dict) -> str:
    """The text of a cell, stored as one string or as lines."""
    return "".join(cell["source"])


def same(one: dict, other: dict) -> bool:
    """Whether two notebooks hold the same cells in the same order; empty cells do not count."""
    return _cells(one) == _cells(other)


def _cells(notebook: dict) -> list[tuple[str, str]]:
    return [(c["cell_type"], source(c)) for c in notebook["cells"] if source(c).strip()]


def answers(notebook: dict) -> list[dict]:
    """The code cells whose outputs tell a prediction or judge an exercise, the exercises' stubs,
    and listings behind an exercise, because what a chapter then shows of the source is its
    answer."""
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    names = {name for c in code for name in _EXERCISE.findall(source(c))}
    stub = re.compile(rf"^def (?:{'|'.join(sorted(names))})\(", re.M) if names else None
    found, follows_question, follows_exercise = [], False, False
    for cell in notebook["cells"]:
        text = source(cell)
        if cell["cell_type"] != "code":
            follows_question = "**Predict" in text
        elif (
            follows_question
            or _ANSWERS.search(text)
            or (stub and stub.search(text))
            or (follows_exercise and _LISTING.search(text))
        ):
            found.append(cell)
        follows_exercise = follows_exercise or bool(_EXERCISE.search(text))
    return found


def reader_copy(notebook: dict) -> dict:
    """A copy of a chapter as a reader first opens it: no answer is given away, pictures are
    described to those who do not see them, and an interactive is a picture until it is run."""
    new = copy.deepcopy(notebook)
    for cell in answers(new):
        _clear(cell)
    without_controls(new)
    for cell in new["cells"]:
        for output in cell.get("outputs", []):
            stills.describe(output)
    return new


def without_controls(notebook: dict) -> bool:
    """Put a picture in the place of every stored interactive: without the kernel that made them,
    its controls are an error message. Returns whether there was one."""
    found = False
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        if any(stills.WIDGET in output.get("data", {}) for output in outputs):
            cell["outputs"] = [output for output in outputs if not stills.is_live(output)]
            for output in cell["outputs"]:
                if output.get("data", {}).pop(stills.WIDGET, None) is not None:
                    stills.describe(output)
            found = True
    return found


def _clear(cell: dict) -> None:
    if cell["cell_type"] == "code":
        cell["outputs"], cell["execution_count"] = [], None


def merged(new: dict, mine: dict, base: dict | None) -> tuple[dict, int, int]:
    """The reader's copy of a new version, with the reader's own text where there is a place for it.

    A cell that the reader changed is carried over if the course left it as it was. A cell that the
    reader added stays behind the one it followed.

    Args:
        new: the chapter as it is now.
        mine: what the reader has.
        base: the chapter that `mine` was made from; without it nothing can be carried over.

    Returns:
        the copy, how many of the reader's cells are in it, and how many have no place in it.
    """
    made = reader_copy(new)
    here = {c.get("id"): c for c in made["cells"]}
    was = {c.get("id"): c for c in (base or {"cells": []})["cells"]}
    known = {text for _, text in _cells(new)} | {source(c) for c in was.values()}
    carried, left, before = 0, 0, None
    for cell in mine["cells"]:
        name, text = cell.get("id"), source(cell)
        place, old = here.get(name), was.get(name)
        if text.strip() and text not in known:
            fits = place and old and place["cell_type"] == cell["cell_type"]
            if fits and source(place) == source(old):
                place["source"] = cell["source"]
                _clear(place)
                carried += 1
            elif base and name and not place and not old:
                added = copy.deepcopy(cell)
                _clear(added)
                made["cells"].insert(_position(made, before) + 1, added)
                here[name] = added
                carried += 1
            else:
                left += 1
        before = name if name in here else before
    return made, carried, left


def _position(notebook: dict, name: str | None) -> int:
    """Where the cell of this id stands; -1 is before the first."""
    return next((i for i, c in enumerate(notebook["cells"]) if c.get("id") == name), -1)


def follows(mine: dict, new: dict, old: dict) -> bool:
    """Whether `mine` was made from `new` rather than from `old`: it has more of what only `new`
    holds."""
    held, new_cells, old_cells = (set(_cells(n)) for n in (mine, new, old))

    def share(only: set) -> float:
        return len(only & held) / len(only) if only else 0.5

    return share(new_cells - old_cells) > share(old_cells - new_cells)


def trust(text: str) -> None:
    """Sign a notebook, so that JupyterLab shows the styles of its stored outputs at once."""
    # an unsigned copy only looks plainer until its cells are run: no reason to stop
    with contextlib.suppress(Exception):
        NotebookNotary().sign(nbformat.reads(text, as_version=4))


def is_trusted(notebook: dict) -> bool:
    """Whether the notebook is signed as it is."""
    with contextlib.suppress(Exception):
        return NotebookNotary().check_signature(nbformat.reads(text_of(notebook), as_version=4))
    return False
