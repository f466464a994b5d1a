"""A library of the reader's own, `my_nsa.py` in their copy of the chapters.

    python -m nsa_tutorial.course.mine              what of it holds, function by stage, and by
                                                    the operators' contract
    python -m nsa_tutorial.course.mine --solutions  the same of the course's own solutions

`keep` puts a function into the file once all its stages hold. Nothing is overwritten: a version
that another one replaces stays beside the file, dated, and a function that does not run from the
file alone never reaches it. Chapters take a function by `built`: the reader's, or the course's
where a chapter was skipped.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import linecache
import re
import sys
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
        module = _module(text)
    except Exception as error:
        raise Unkept(f"from the file alone it raises {type(error).__name__}: {error}") from error
    function = getattr(module, exercise.name, None)
    if function is None:
        raise Unkept(f"its name is another one; call it `{exercise.name}`")
    if judge(exercise, function).outcome != "right":
        raise Unkept("from the file alone it is wrong, so it uses a variable of another cell")


def _module(text: str) -> ModuleType:
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
            return getattr(_module(text), name)
    return known[name].solution


# -- the report --


def report(functions: Callable[[Exercise], Callable | None]) -> tuple[str, bool]:
    """A table of what the course builds: a line for each function, a sign for each stage.

    Args:
        functions: what to judge for an exercise; None where there is nothing yet.

    Returns:
        The table, and whether all that was judged holds.
    """
    lines, all_hold = [], True
    for chapter, exercise in all_builds():
        function = functions(exercise)
        head = f"{chapter} · {exercise.name}"
        if function is None:
            lines.append(f"○ {head}: not built yet")
            continue
        verdict = judge(exercise, function)
        held = verdict.held
        signs = ["✓"] * held + ["✗"] + ["○"] * len(exercise.stages)
        stages = "  ".join(
            f"{sign} {stage.name}" for sign, stage in zip(signs, exercise.stages, strict=False)
        )
        is_right = verdict.outcome == "right"
        all_hold = all_hold and is_right
        lines.append(f"{'✓' if is_right else '✗'} {head}: {stages}")
    return "\n".join(lines), all_hold


def contract_report(functions: Callable[[Exercise], Callable | None]) -> tuple[str, bool]:
    """The operators' contract, asked of what is an operator: a line for each property, a column for
    each function; on a GPU the times of each beside ours.

    Args:
        functions: as for `report`.

    Returns:
        The table, empty where no function is an operator, and whether all that was asked holds.
    """
    from nsa_tutorial.course import contract

    found = {e.name: functions(e) for _, e in all_builds() if e.name in contract.TWINS}
    built = {name: function for name, function in found.items() if function is not None}
    if not built:
        return "", True
    width = max(map(len, contract.PROPERTIES))
    lines = ["The operators' contract, against fp64 and its error budget"]
    lines.append(" " * (width + 2) + "".join(f"{i:3}" for i in range(1, len(built) + 1)))
    wrong = []
    for what in contract.PROPERTIES:
        verdicts = [contract.judge(name, function, what) for name, function in built.items()]
        signs = ["·" if why is None else "✗" if why else "✓" for why in verdicts]
        lines.append(f"  {what:{width}}" + "".join(f"{sign:>3}" for sign in signs))
        wrong += [f"✗ {i}, {what}: {why}" for i, why in enumerate(verdicts, 1) if why]
    for i, name in enumerate(built, 1):
        lines.append(f"{i}  {name}, as ops.{contract.TWINS[name].operator}")
    lines += ["·  not asked for", *wrong]
    return "\n".join(lines + _times(built)), not wrong


def _times(built: dict[str, Callable]) -> list[str]:
    """On a GPU, each function's time beside ours, and what is stored of public kernels."""
    import torch

    from nsa_tutorial.course import contract

    if not torch.cuda.is_available():
        return []
    machine = torch.cuda.get_device_name()
    lines = [f"Times on this {machine}, fp32, 8,192 tokens, 4 KV heads of 16, 16 blocks of 64"]
    for name, function in built.items():
        try:
            mine, ours = contract.times(name, function)
        except Exception as error:
            lines.append(f"  {name}: not timed, {type(error).__name__}: {error}")
        else:
            lines.append(f"  {name}: {mine:.2f} ms, ours {ours:.2f} ms ({mine / ours:.1f} times)")
    return [*lines, "Stored times of forward attention", *contract.stored()]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where something that was judged does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.mine",
        description="Judge your own library by the stages of the course's exercises, and by the "
        "contract of its operators.",
    )
    parser.add_argument(
        "--solutions", action="store_true", help="judge the course's own solutions instead"
    )
    parser.add_argument(
        "--file", type=Path, default=Path("my_chapters") / FILE, help="your library"
    )
    options = parser.parse_args(arguments)
    if options.solutions:
        return _tell(lambda exercise: exercise.solution)
    if not options.file.exists():
        print(f"There is no {options.file} yet: it begins with the first exercise that you build.")
        return 0
    source = options.file.read_text(encoding="utf-8")
    try:
        names, module = File.parse(source).names, _module(source)
    except Exception as error:
        print(f"{options.file} does not run: {type(error).__name__}: {error}")
        return 1
    return _tell(lambda e: getattr(module, e.name, None) if e.name in names else None)


def _tell(functions: Callable[[Exercise], Callable | None]) -> int:
    """Print both reports; the exit status."""
    told = [report(functions), contract_report(functions)]
    print("\n\n".join(text for text, _ in told if text))
    return int(not all(holds for _, holds in told))


if __name__ == "__main__":
    sys.exit(main())
