"""A library of the reader's own, `my_nsa.py` in their copy of the chapters.

    python -m nsa_tutorial.course.mine              what of it holds, function by stage, and by
                                                    the operators' contract
    python -m nsa_tutorial.course.mine --solutions  the same of the course's own solutions

`keeping` puts functions into the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from nsa_tutorial.course import keeping
from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.library_file import FILE, File


def report(functions: Callable[[Exercise], Callable | None]) -> tuple[str, bool]:
    """A table of what the course builds: a line for each function, a sign for each stage.

    Args:
        functions: what to judge for an exercise; None where there is nothing yet.

    Returns:
        The table, and whether all that was judged holds.
    """
    lines, all_hold = [], True
    for chapter, exercise in keeping.all_builds():
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

    found = {e.name: functions(e) for _, e in keeping.all_builds() if e.name in contract.TWINS}
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
    launching = [e.name for _, e in keeping.all_builds() if e.launches and e.name in built]
    return "\n".join(lines + _times({name: built[name] for name in launching})), not wrong


def _times(built: dict[str, Callable]) -> list[str]:
    """On a GPU, the time of each function that launches a kernel beside ours, and what is stored of
    public kernels."""
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
        names, module = File.parse(source).names, keeping.module_of(source)
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
