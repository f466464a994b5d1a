"""The reader's own copy of the chapters: made once, brought up to date without losing an answer.

    python -m nsa_tutorial.course.copies            make the copy, or bring it up to date; no more
    python -m nsa_tutorial.course.copies --lab      the same, then open it in JupyterLab
    python -m nsa_tutorial.course.copies --check    run the copy and compare what its cells print

What follows `--lab` goes to JupyterLab, what follows `--check` goes to pytest.

The copy is in `my_chapters/`, which git ignores. Beside it, in `my_chapters/.course/`, are for each
chapter: in `base/` the version that the copy was made from, in `seen/` a newer one that the reader
was offered, in `laid/` that offer (`05_selected_attention.new.ipynb`) as it was laid down, for as
long as it lies there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from nsa_tutorial.course import copying
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS
from nsa_tutorial.course.copying import (
    MARKER,
    Files,
    follows,
    is_trusted,
    merged,
    parse,
    reader_copy,
    same,
    text_of,
    trust,
    without_controls,
)

ROOT = NOTEBOOKS.parent
FOLDER = ROOT / "my_chapters"


def update(folder: Path = FOLDER, chapters: Path = NOTEBOOKS) -> list[str]:
    """Make the copy of every chapter, or bring it up to date; returns what to tell the reader.

    Raises:
        FileNotFoundError: if there are no chapters.
        OSError: if the folder cannot be written.
        ValueError: for the folder of the chapters themselves, or one inside it.
    """
    if chapters.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ValueError("this is where the course keeps its own chapters; name another folder")
    names = sorted(path.name for path in chapters.glob("*.ipynb"))
    if not names:
        raise FileNotFoundError(f"there are no chapters in {chapters}")
    is_first = not (folder / MARKER).is_dir()
    (folder / MARKER).mkdir(parents=True, exist_ok=True)
    said = []
    for name in names:
        files = Files(folder, name)
        try:
            text = (chapters / name).read_text(encoding="utf-8")
            parse(text)
        except (ValueError, IsADirectoryError) as error:
            said.append(f"{name}: the course's own file cannot be read ({error}). Yours stays.")
        else:
            said += _in_the_way(files) or _bring_up_to_date(files, text)
            for path in (files.mine, files.offer):
                _take_out_controls(path)
    for path in sorted((folder / MARKER / "base").glob("*.ipynb")):
        if path.name not in names:
            files = Files(folder, path.name)
            said += _in_the_way(files) or _part_with(files)
    made = [line for line in said if line.endswith(_MADE)]
    if is_first and made:
        said = [line for line in said if line not in made]
        said.append(f"Your own copy of {len(made)} chapters is in {folder.name}/.")
    return said


_MADE = ": your copy is made."


def _in_the_way(files: Files) -> list[str]:
    """What is said of directories that stand where files of this chapter belong."""
    places = (files.mine, files.offer, files.base, files.seen, files.laid)
    found = [path.relative_to(files.folder) for path in places if path.is_dir()]
    return [f"{files.name}: skipped, because {path.as_posix()} is a directory. Rename it, and run "
            "this again." for path in found[:1]]  # fmt: skip


def _bring_up_to_date(files: Files, text: str) -> list[str]:
    name, course = files.name, parse(text)
    if not files.mine.exists():
        if not (files.laid.exists() and _read(files.offer)):
            _lay(files, text)
            return [f"{name}{_MADE}"]
        os.replace(files.offer, files.mine)
        said = [f"{name}: you put yours away, so {files.offer.name} took its place."]
        return said + _bring_up_to_date(files, text)
    mine = _read(files.mine)
    if mine is None:
        return [f"{name}: your file is not a notebook that can be read. It stays as it is. "
                "To start this chapter anew, rename the file."]  # fmt: skip
    if files.laid.exists() and not files.offer.exists():
        _notice_what_became_of_the_offer(files, mine)
    base, is_offered = _read(files.base), files.laid.exists()
    if not is_offered and same(mine, base or course):
        if files.base.exists() and files.base.read_bytes() == text.encode():
            return []
        is_news = not same(mine, course)
        _lay(files, text)
        return [f"{name}: updated. You had changed nothing in it."] if is_news else []
    if not is_offered and same(mine, course):
        _write(files.base, text)
        files.forget_offer()
        return []
    known = _read(files.seen) or base
    is_news = known is None or not same(known, course)
    if not is_news and not is_offered:
        return []
    return _offer(files, text, mine, base, is_news)


def _offer(files: Files, text: str, mine: dict, base: dict | None, is_news: bool) -> list[str]:
    """Lay a new version beside the reader's, which has changed, too."""
    name, offer = files.name, files.offer.name
    laid, lies = _read(files.laid), files.offer.exists()
    if lies and not (laid and same(_read(files.offer) or {"cells": []}, laid)):
        newer = f" The course has a newer one: rename or delete {offer} to get it."
        return [f"{name}: {offer} is beside it, and stays as it is.{newer if is_news else ''}"]
    made, carried, left = merged(parse(text), mine, base)
    if not (lies and same(made, laid)):
        # in this order, an interrupted run leaves nothing that the next one could misread
        _write(files.laid, text_of(made))
        _write(files.offer, text_of(made))
        trust(text_of(made))
    if is_news:
        _write(files.seen, text)
    lines = [
        f"{name}: the course has a new version, and you have changed yours. Yours stays.",
        f"    The new version is beside it, as {offer}.",
    ]
    if carried:
        lines.append(f"    {_cells(carried)} carried over into it.")
    if left:
        lines.append(f"    {_cells(left)} only in yours: the course changed that place, too.")
    lines.append(f"    Rename it to {name} to go on with it, or delete it to keep yours.")
    return ["\n".join(lines)] if is_news else [f"{name}: {offer} is still beside it."]


def _cells(number: int) -> str:
    return "One cell of yours is" if number == 1 else f"{number} cells of yours are"


def _notice_what_became_of_the_offer(files: Files, mine: dict) -> None:
    """The reader renamed it over the old chapter, or deleted it."""
    base, seen = _read(files.base), _read(files.seen)
    if seen and base and follows(mine, seen, base):
        _write(files.base, files.seen.read_text(encoding="utf-8"))
        files.forget_offer()
    # a deleted one stays among the seen: the reader has decided
    files.laid.unlink(missing_ok=True)


def _part_with(files: Files) -> list[str]:
    """A chapter that left the course: so does a copy without a change of the reader's."""
    mine, base, said = _read(files.mine), _read(files.base), []
    if mine and base and same(mine, base):
        files.mine.unlink()
        said = [f"{files.name} left the course, and your unchanged copy with it."]
    elif files.mine.exists():
        said = [f"{files.name} left the course. Yours stays, as you changed it."]
    files.forget_offer()
    files.base.unlink()
    return said


def _lay(files: Files, text: str) -> None:
    """Write the reader's copy of a chapter as the course has it now."""
    made = text_of(reader_copy(parse(text)))
    _write(files.mine, made)
    _write(files.base, text)
    files.forget_offer()
    trust(made)


def _take_out_controls(path: Path) -> None:
    """Make pictures of the interactives that a notebook was saved with: their kernel is gone."""
    notebook = _read(path) if path.is_file() else None
    if notebook is None:
        return
    was_trusted = is_trusted(notebook)
    if without_controls(notebook):
        _write(path, text_of(notebook))
        if was_trusted:
            trust(text_of(notebook))


def _read(path: Path) -> dict | None:
    """The notebook in a file; None without a file, or if it cannot be understood."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lab_command(folder: Path, flags: list[str]) -> list[str]:
    """The command that opens chapter 00 of a copy; links out of it reach the repository."""
    root = ROOT if folder.is_relative_to(ROOT) else folder
    page = quote((folder / CHAPTERS[0].file).relative_to(root).as_posix())
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    options = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{page}"]
    return [sys.executable, "-m", "jupyterlab", *options, *as_root, *flags]


def check_command(folder: Path, flags: list[str]) -> list[str]:
    """The command that runs a copy; the rules and the settings are those of the chapters."""
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "nsa_tutorial.course.nbval_rules"]
    return [sys.executable, "-m", "pytest", "--nbval", *settings, str(folder), *flags]


def check(folder: Path, flags: list[str]) -> int:
    """Run a copy; returns the exit status, which tells of unreadable notebooks, too."""
    paths = [p for p in sorted(folder.rglob("*.ipynb")) if p.is_file() and MARKER not in p.parts]
    broken = {path: why for path in paths if (why := copying.why_unreadable(path))}
    for path, why in broken.items():
        print(f"{path.relative_to(folder).as_posix()} is no notebook that can be read ({why}). "
              "The others are checked. To start this chapter anew, rename the file and make your "
              "copy again.", flush=True)  # fmt: skip
    # pytest would stop at the first of them
    command = check_command(folder, [*(f"--ignore={path}" for path in broken), *flags])
    return subprocess.call(command, cwd=ROOT) or bool(broken)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.copies",
        description="Make your own copy of the chapters, or bring it up to date.",
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where (my_chapters)")
    rest = argparse.REMAINDER
    parser.add_argument("--lab", nargs=rest, help="then open it, with these flags of JupyterLab")
    parser.add_argument("--check", nargs=rest, help="only run it, with these flags of pytest")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.resolve()
    if chosen.check is not None:
        if not (folder / MARKER).is_dir():
            print("There is no copy of the chapters yet. Run `make lab` first, "
                  "or `python -m nsa_tutorial.course.copies`.")  # fmt: skip
            return 1
        return check(folder, chosen.check)
    try:
        for line in update(folder):
            print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"Your copy of the chapters, {folder}, could not be made: {error}")
        return 1
    if chosen.lab is None:
        print(f"Your copy is up to date. Begin with {folder / CHAPTERS[0].file}, in JupyterLab or "
              "any other editor of notebooks.")  # fmt: skip
        return 0
    # in place of this process: Ctrl-C is JupyterLab's own
    command = lab_command(folder, chosen.lab)
    return os.execv(command[0], command) if os.name == "posix" else subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
