"""What the course remembers of its reader: solved exercises, hints taken, guesses.

A reader's copy of the chapters holds a folder `.course`; the notes are its `progress.json`.
Kernels run in their notebook's folder, so the copy is the working directory. Anywhere else
nothing is written, and the notes last as long as the process.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows; two kernels at the same instant may then lose a note
    fcntl = None

FOLDER, FILE = ".course", "progress.json"
_VERSION = 1
Notes = dict[str, Any]
_memory: Notes = {}
# the guesses as given; the file holds only what JSON can represent
_guesses: dict[str, object] = {}
_told: set[str] = set()  # remarks that this process has made


def _empty() -> Notes:
    return {"version": _VERSION, "solved": {}, "hints": {}, "guesses": {}, "latest": ""}


def _path() -> Path | None:
    """The file of the notes; None outside a reader's copy."""
    folder = Path.cwd() / FOLDER
    return folder / FILE if folder.is_dir() else None


def _checked(notes: object) -> Notes:
    """`notes`, if they have the form that this version writes.

    Raises:
        ValueError: otherwise.
    """
    form = {"version": int, "solved": dict, "hints": dict, "guesses": dict, "latest": str}
    if not isinstance(notes, dict) or notes.get("version") != _VERSION:
        raise ValueError("notes of another version")
    if any(not isinstance(notes.get(key), kind) for key, kind in form.items()):
        raise ValueError("notes of another form")
    names = [name for of in notes["solved"].values() if isinstance(of, list) for name in of]
    if not all(isinstance(of, list) for of in notes["solved"].values()) or not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError("solved exercises are lists of names")
    if not all(isinstance(count, int) for count in notes["hints"].values()):
        raise ValueError("hints are counted")
    return notes


def _load(path: Path) -> Notes:
    """The notes of a file. One that cannot be read is kept under a name of its own."""
    if not path.exists():
        return _empty()
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # broken JSON and broken text are ValueErrors, too
        os.replace(path, _name_aside(path))
        return _empty()


def _name_aside(path: Path) -> Path:
    """A name for a file that cannot be read: `progress.json.bak`, then `progress.json.2.bak`."""
    names = (f"{path.name}.{n}.bak" if n > 1 else f"{path.name}.bak" for n in itertools.count(1))
    return next(new for new in map(path.with_name, names) if not new.exists())


def _merged(first: Notes, second: Notes) -> Notes:
    """Both notes in one: nothing solved is lost, and the larger count of hints stays."""
    notes = copy.deepcopy(first)
    for chapter, names in second["solved"].items():
        kept = notes["solved"].setdefault(chapter, [])
        kept += [name for name in names if name not in kept]
    for key, count in second["hints"].items():
        notes["hints"][key] = max(count, notes["hints"].get(key, 0))
    notes["guesses"] = {**second["guesses"], **notes["guesses"]}
    notes["latest"] = notes["latest"] or second["latest"]
    return notes


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One kernel at a time."""
    with path.with_suffix(".lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, notes: Notes) -> None:
    """Replace the file in one step, so that no reader of it sees half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(notes, file, indent=1)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def notes() -> Notes:
    """Everything noted so far, here and in other kernels of the same copy."""
    return _update(lambda notes: False)


def _update(change: Callable[[Notes], bool]) -> Notes:
    """Read, merge, `change` in place, and write where that changed anything."""
    global _memory
    memory, path = _memory or _empty(), _path()
    try:
        if path is None:
            change(memory)
            _memory = memory
        else:
            with _locked(path):
                found = _load(path)
                merged = _merged(found, memory)
                if change(merged) or merged != found:
                    _write(path, merged)
                _memory = merged
    except OSError:  # a full or read-only disk must not stop a lesson
        change(memory)
        _memory = memory
    return copy.deepcopy(_memory)


def forget() -> None:
    """Empty the memory of this process; a file stays."""
    global _memory
    _memory = {}
    _guesses.clear()
    _told.clear()


def is_saved() -> bool:
    """Whether this is a reader's copy, where notes outlive the kernel."""
    return _path() is not None


def remarks() -> list[str]:
    """What the reader has to know about these notes: that nothing is saved here, or which files
    could not be read."""
    path = _path()
    if path is None:
        return [
            "Nothing is saved in this folder, so this is forgotten when the notebook's kernel "
            "stops. To keep it, work in your own copy of the chapters. In a clone, `make lab` "
            "makes the copy and opens it; `python -m nsa_tutorial.course.copies` only makes it."
        ]
    return [
        f"Your notes in {FOLDER}/{FILE} could not be read, so they began anew. The old file is "
        f"kept as {FOLDER}/{kept.name}. If you do not need it, delete it."
        for kept in sorted(path.parent.glob(f"{FILE}*.bak"))
    ]


def remarks_once() -> list[str]:
    """Those that this process has not made yet."""
    new = [remark for remark in remarks() if remark not in _told]
    _told.update(new)
    return new


def note_solved(chapter: str, name: str) -> None:
    """Note that an exercise is solved; nothing takes that back."""

    def change(notes: Notes) -> bool:
        solved = notes["solved"].setdefault(chapter, [])
        if name not in solved:
            solved.append(name)
        return True

    _update(change)


def note_latest(chapter: str) -> None:
    """Note which chapter the reader is in."""

    def change(notes: Notes) -> bool:
        changed, notes["latest"] = notes["latest"] != chapter, chapter
        return changed

    _update(change)


def note_hint(chapter: str, name: str, most: int) -> int:
    """Note one more hint taken, up to `most` and one; returns which it is, from 1."""

    def change(notes: Notes) -> bool:
        key = f"{chapter}/{name}"
        notes["hints"][key] = min(notes["hints"].get(key, 0) + 1, most + 1)
        return True

    return _update(change)["hints"][f"{chapter}/{name}"]


def note_guess(name: str, guess: object) -> None:
    """Note a guess; what JSON cannot hold is remembered by this process alone."""
    _guesses[name] = guess
    try:
        text = json.dumps(guess)
    except Exception:  # a guess may be anything, and fail in any way
        return
    if len(text) > 2000:
        return

    def change(notes: Notes) -> bool:
        notes["guesses"][name] = json.loads(text)
        return True

    _update(change)


def guess_of(name: str) -> object:
    """The latest guess, or None."""
    if name in _guesses:
        return _guesses[name]
    return notes()["guesses"].get(name)
