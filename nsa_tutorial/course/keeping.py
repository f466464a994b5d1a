"""Put what a reader built into their library, `my_nsa.py`, and take it from there.

`keep` puts a function into the file once all its stages hold. Nothing is overwritten: a version
that another one replaces stays beside the file, dated, and a function that does not run from the
file alone never reaches it. Chapters take a function by `built`: the reader's, or the course's
where a chapter was skipped.
"""

from __future__ import annotations

import datetime
import importlib
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from nsa_tutorial.course import exercises, reader
from nsa_tutorial.course.exercises import Exercise, chapter_exercises
from nsa_tutorial.course.gathering import Unkept, piece_of
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.library_file import FILE, File


def path() -> Path | None:
    """The reader's library; None outside their copy of the chapters."""
    return Path.cwd() / FILE if reader.is_saved() else None


def builds(chapter: str) -> dict[str, Exercise]:
    """The exercises of a chapter that build something, by name."""
    return {n: e for n, e in chapter_exercises(chapter).items() if e.stages}


def all_builds() -> list[tuple[str, Exercise]]:
    """Chapter and exercise of everything that the course builds, in reading order."""
    from nsa_tutorial.course.chapters import CHAPTERS

    with_exercises = set(exercises.chapters())
    names = [chapter.name for chapter in CHAPTERS if chapter.name in with_exercises]
    return [(name, exercise) for name in names for exercise in builds(name).values()]


# -- keeping --


def keep(chapter: str, exercise: Exercise, function: Callable) -> str:
    """Put a function that holds all stages into the reader's library.

    Returns:
        What became of it, in a sentence; empty outside of a reader's copy.
    """
    file = path()
    if file is None:
        return ""
    try:
        piece = piece_of(chapter, exercise, function)
        old = File.parse(file.read_text(encoding="utf-8")) if file.exists() else File("")
        if old.source(exercise.name) == piece.source.strip():
            return f"It is in {FILE} already."
        clash = old.clash(piece)
        if clash is not None:
            name, owner = clash
            raise Unkept(
                f"another `{name}` is in {FILE} already, a part of `{owner}`: rename yours"
            )
        new = old.with_piece(piece)
        _expect_right(new.text, exercise)
    except (Unkept, SyntaxError) as why:
        return f"Not kept in {FILE}: {why}."
    aside = _put_aside(file) if exercise.name in old.names else None
    _write(file, new.text)
    there = f"It has {', '.join(f'`{name}`' for name in new.names)}."
    before = f" The version before is in {aside.name}." if aside is not None else ""
    lines = len(piece.source.strip().splitlines())
    return f"Kept in {FILE} ({lines} {'line' if lines == 1 else 'lines'}). {there}{before}"


def _expect_right(text: str, exercise: Exercise) -> None:
    """The function runs from the file alone, and holds all stages there."""
    try:
        module = module_of(text)
    except Exception as error:
        raise Unkept(f"from the file alone it raises {type(error).__name__}: {error}") from error
    function = getattr(module, exercise.name, None)
    if function is None:
        raise Unkept(f"its name is another one; call it `{exercise.name}`")
    if judge(exercise, function).outcome != "right":
        raise Unkept("from the file alone it is wrong, so it uses a variable of another cell")


def module_of(text: str) -> ModuleType:
    """The file as a module, without its being written; its kernels run here as a chapter's do."""
    languages = importlib.import_module("nsa_tutorial.course.languages")
    for language in ("triton", "tilelang"):
        if re.search(rf"^import {language}\b", text, re.MULTILINE):
            getattr(languages, language)
    name = f"<{FILE} {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType(Path(FILE).stem)
    module.__file__ = name
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    return module


def _put_aside(file: Path) -> Path:
    """A copy of the file, named by the day; a second one of a day has a number."""
    day = datetime.date.today().isoformat()
    number = 1
    while (aside := file.with_name(f"{file.stem}.{day}{f'.{number}' if number > 1 else ''}.py")
           ).exists():  # fmt: skip
        number += 1
    aside.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return aside


def _write(file: Path, text: str) -> None:
    """Write the file in one step."""
    whole = file.with_name(f".{file.name}.new")
    whole.write_text(text, encoding="utf-8")
    whole.replace(file)


# -- taking --


def built(name: str) -> Callable:
    """The reader's function from their library; the course's solution where they have none.

    Raises:
        ValueError: for a name that nothing in the course builds, naming those it builds.
    """
    known = {exercise.name: exercise for _, exercise in all_builds()}
    if name not in known:
        raise ValueError(f"nothing builds {name!r}; the course builds {', '.join(known)}")
    file = path()
    if file is not None and file.exists():
        text = file.read_text(encoding="utf-8")
        if name in File.parse(text).names:
            return getattr(module_of(text), name)
    return known[name].solution
