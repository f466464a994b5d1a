"""`progress()`: which exercises are solved, chapter by chapter."""

from __future__ import annotations

import html
from dataclasses import dataclass

from nsa_tutorial.course import reader, texts
from nsa_tutorial.course.chapters import CHAPTERS, Chapter
from nsa_tutorial.course.speech import STYLE, sentence

# `!important`: JupyterLab's own rules for tables in outputs
_STYLE = (
    "<style>.nsa-progress{border-collapse:collapse;margin:4px 0!important;color:inherit;"
    "table-layout:auto!important;font-size:inherit!important}"
    ".nsa-progress td{padding:2px 16px 2px 0!important;text-align:left!important;"
    "vertical-align:middle;color:inherit;background:transparent;border:0;white-space:nowrap}"
    ".nsa-progress tr,.nsa-progress tr:hover{background:transparent!important}"
    ".nsa-progress .nsa-here td{font-weight:600}"
    ".nsa-square{display:inline-block;width:16px;height:16px;line-height:14px;"
    "margin-right:4px;text-align:center;vertical-align:middle;border-radius:3px;font-size:0;"
    "border:1px solid var(--nsa-open);color:var(--nsa-open);box-sizing:border-box}"
    ".nsa-said .nsa-done{background:var(--nsa-right);border-color:var(--nsa-right);"
    "color:var(--nsa-ground);font-size:12px}"
    ".nsa-names{margin:4px 0;display:flex;flex-wrap:wrap;gap:2px 16px;font-weight:400}"
    ".nsa-track{height:6px;max-width:420px;border-radius:3px;background:var(--nsa-line);"
    "overflow:hidden}"
    ".nsa-track>div{height:100%;background:var(--nsa-right)}</style>"
)


@dataclass(frozen=True)
class Row:
    """A chapter and its exercises, each with whether it is solved."""

    chapter: Chapter
    exercises: tuple[tuple[str, bool], ...]

    @property
    def solved(self) -> int:
        """How many of the exercises are solved."""
        return sum(is_solved for _, is_solved in self.exercises)


@dataclass(frozen=True)
class Progress:
    """What is solved, as Jupyter and `print` show it.

    Attributes:
        rows: a row for each chapter.
        here: the chapter whose exercises are listed by name; empty for none.
        guesses: how many predictions were guessed at.
        remarks: what else the reader has to know.
    """

    rows: tuple[Row, ...]
    here: str = ""
    guesses: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of all exercises, the share that is solved."""
        total = sum(len(row.exercises) for row in self.rows)
        return sum(row.solved for row in self.rows) / total if total else 0.0

    @property
    def totals(self) -> str:
        """The sum of all rows."""
        solved = sum(row.solved for row in self.rows)
        return (
            f"{solved} of {sum(len(row.exercises) for row in self.rows)} exercises solved, "
            f"{self.guesses} {'guess' if self.guesses == 1 else 'guesses'} made."
        )

    def __repr__(self) -> str:
        lines = []
        for row in self.rows:
            signs = "".join("✓" if is_solved else "○" for _, is_solved in row.exercises)
            lines.append(f"{_title(row.chapter)}  {signs}".rstrip())
            if row.chapter.name == self.here:
                lines += [f"     {'✓' if done else '○'} {name}" for name, done in row.exercises]
        return "\n".join([*lines, self.totals, *self.remarks])

    def _repr_html_(self) -> str:
        rows = "".join(map(self._row, self.rows))
        return (
            f'{STYLE}{_STYLE}<div class="nsa-said nsa-open" role="status">'
            f'<table class="nsa-progress">{rows}</table>{self._names()}'
            f'<div class="nsa-track"><div style="width:{100 * self.share:.0f}%"></div></div>'
            f"<p>{self.totals}</p>{''.join(f'<p>{sentence(r)}</p>' for r in self.remarks)}</div>"
        )

    def _row(self, row: Row) -> str:
        squares = "".join(_square(name, done) for name, done in row.exercises)
        mark = ' class="nsa-here" aria-current="true"' if row.chapter.name == self.here else ""
        title = html.escape(_title(row.chapter))
        return (
            f'<tr{mark}><td><a href="{row.chapter.file}">{title}</a></td><td>{squares}</td>'
            f"<td>{f'{row.solved} of {len(row.exercises)}' if row.exercises else ''}</td></tr>"
        )

    def _names(self) -> str:
        """The exercises of this chapter by name."""
        here = next((row for row in self.rows if row.chapter.name == self.here), None)
        if here is None or not here.exercises:
            return ""
        names = "".join(
            f"<span>{'✓' if done else '○'} <code>{html.escape(name)}</code></span>"
            for name, done in here.exercises
        )
        return f'<div class="nsa-names">In this chapter: {names}</div>'


def _square(name: str, done: bool) -> str:
    told = f"{html.escape(name)}: {'solved' if done else 'open'}"
    sign, kind = ("✓", "nsa-square nsa-done") if done else ("○", "nsa-square")
    return f'<span class="{kind}" role="img" title="{told}" aria-label="{told}">{sign}</span>'


def _title(chapter: Chapter) -> str:
    return f"{chapter.number:02d} · {chapter.title}"


def progress(chapter: str = "") -> Progress:
    """What is solved, chapter by chapter.

    Args:
        chapter: the one whose exercises are listed by name; by default the one that was checked
            last.

    Raises:
        ValueError: for a chapter that does not exist, naming those that do.
    """
    ready = [c for c in CHAPTERS if c.is_ready]
    if chapter and chapter not in {c.name for c in ready}:
        raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(c.name for c in ready)}")
    notes = reader.notes()
    rows = []
    for each in ready:
        solved = notes["solved"].get(each.name, [])
        known = texts.exercise_names(each.name)
        rows.append(Row(each, tuple((name, name in solved) for name in known)))
    is_anything_noted = notes["solved"] or notes["guesses"]
    remarks = tuple(reader.remarks()) if is_anything_noted or reader.is_saved() else ()
    return Progress(tuple(rows), chapter or notes["latest"], len(notes["guesses"]), remarks)
