"""Pages of the exercises: their text, their stages and their solution, and every named mistake."""

from __future__ import annotations

import difflib
import inspect
import textwrap

from book.chapter import fold, statement
from nsa_tutorial.course.chapters import Chapter
from nsa_tutorial.course.diffs import Edited, Switched
from nsa_tutorial.course.exercises import Exercise, Misconception, chapter_module
from nsa_tutorial.course.unwrapped import unwrapped

MISTAKES = """\
# What goes wrong, and why

Each exercise of the course is checked by the mistakes that people make in it. The checker runs your
function, and a wrong function for each mistake. If your answer is what a wrong function computes,
the checker knows which thought led there. These are all of them: what each mistake looks like, as a
change of the right code, and the question that leads out of it.
"""


def source(function: object) -> str:
    """The source of a function or a kernel."""
    return textwrap.dedent(inspect.getsource(unwrapped(function))).strip()


def solution(exercise: Exercise) -> str:
    """The solution's source, below that of the kernels it launches."""
    return "\n\n".join(map(source, (*exercise.parts, exercise.solution)))


def difference(misconception: Misconception) -> str:
    """What a mistake looks like in code: the lines that differ, or another function."""
    wrong = misconception.wrong
    if isinstance(wrong, Edited):
        right = "\n\n".join(map(source, (*wrong.parts, wrong.solution)))
        rows = difflib.unified_diff(
            right.splitlines(), wrong.source.strip().splitlines(), lineterm="", n=0
        )
        lines = [row for row in rows if not row.startswith(("---", "+++", "@@"))]
        margin = min(len(row[1:]) - len(row[1:].lstrip()) for row in lines if row[1:].strip())
        code = "\n".join(f"{row[0]} {row[1 + margin :]}" for row in lines)
        return f"```diff\n{code}\n```"
    if isinstance(wrong, Switched):
        return f"In the kernel: {', '.join(sorted(wrong.slips)).replace('_', ' ')}."
    try:
        return f"```python\n{source(wrong)}\n```"
    except (OSError, TypeError):
        return ""


def page(chapter: Chapter) -> str:
    """The exercises of a chapter."""
    module = chapter_module(chapter.name)
    parts = [f"# {chapter.number:02d} · {chapter.title}: exercises\n"]
    for exercise in module.EXERCISES:
        parts.append(f"## `{exercise.name}`\n")
        parts.append(statement(exercise, chapter.name, is_here=True))
        if exercise.stages:
            parts.append("**Stages.** Your function is checked in this order:\n")
            for i, stage in enumerate(exercise.stages, 1):
                cases = "; ".join(case.name for case in stage.cases)
                parts.append(f"{i}. **{stage.name}**: {cases}.")
        else:
            cases = "; ".join(case.name for case in exercise.cases)
            parts.append(f"**Checked on:** {cases}.")
        if exercise.forbidden:
            names = ", ".join(said for _, said in exercise.forbidden)
            parts.append(f"\n**Not to be called:** {names}.")
        shown = f"```python\n{solution(exercise)}\n```"
        parts.append("\n" + fold("The solution", f"{shown}\n\n{exercise.why}"))
        link = f"misconceptions_{chapter.name}.md#{exercise.name}"
        number = len(names_of(exercise))
        parts.append(f"\n[{number} mistakes that are recognised]({link})\n")
    return "\n".join(parts)


def names_of(exercise: Exercise) -> list[str]:
    """The names of its mistakes, each once."""
    return list(dict.fromkeys(m.name for m in exercise.misconceptions))


def mistakes(chapter: Chapter) -> str:
    """The mistakes that are made in a chapter's exercises."""
    module = chapter_module(chapter.name)
    warned: dict[tuple[str, str], list[str]] = {}
    for trap in getattr(module, "TRAPS", ()):
        warned.setdefault((trap.exercise, trap.misconception), []).append(trap.quote)
    parts = [f"# {chapter.number:02d} · {chapter.title}: mistakes\n"]
    for exercise in module.EXERCISES:
        parts.append(f"## `{exercise.name}`\n")
        parts.append(f"[The exercise](exercises_{chapter.name}.md#{exercise.name})\n")
        for name in names_of(exercise):
            ways = [m for m in exercise.misconceptions if m.name == name]
            parts.append(f"### {name[0].upper()}{name[1:]}\n")
            for hint in dict.fromkeys(way.hint for way in ways):
                parts += [difference(way) + "\n" for way in ways if way.hint == hint]
                parts.append(f"{hint}\n")
            for quote in warned.get((exercise.name, name), ()):
                parts.append(f"> {' '.join(quote.split())}\n>\n> [chapter {chapter.number:02d}]"
                             f"({chapter.file})\n")  # fmt: skip
    return "\n".join(parts)


def index(chapters: list[Chapter], kind: str, head: str, depth: int = 2) -> str:
    """The page that leads to those of each chapter, and to so many levels of their headings."""
    rows = "\n".join(f"{kind}_{c.name}" for c in chapters)
    return f"{head}\n```{{toctree}}\n:maxdepth: {depth}\n\n{rows}\n```\n"
