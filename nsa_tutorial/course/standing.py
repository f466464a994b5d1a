"""`progress()`: which exercises are solved, chapter by chapter."""

from __future__ import annotations

import html
from dataclasses import dataclass

from nsa_tutorial.course import exercises, reader
from nsa_tutorial.course.chapters import CHAPTERS, Chapter
from nsa_tutorial.course.speech import STYLE

_STYLE = (
    "<style>.nsa-said table{border-collapse:collapse;margin:4px 0;color:inherit}"
    ".nsa-said td{padding:2px 10px 2px 0;text-align:left;vertical-align:middle;color:inherit;"
    "background:transparent;border:0}"
    ".nsa-said tr{background:transparent}"
    ".nsa-said .nsa-here td{font-weight:600}"
    ".nsa-said .nsa-square{display:inline-block;width:1.1em;height:1.1em;line-height:1.1em;"
    "margin-right:3px;text-align:center;border-radius:2px;font-size:90%;"
    "border:1px solid var(--nsa-open);color:var(--nsa-open)}"
    ".nsa-said .nsa-done{background:var(--nsa-right);border-color:var(--nsa-right);"
    "color:var(--nsa-ground)}</style>"
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
    """

    rows: tuple[Row, ...]
    here: str = ""
    guesses: int = 0

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
        return "\n".join([*lines, self.totals])

    def _repr_html_(self) -> str:
        rows = "".join(map(self._row, self.rows))
        return (
            f'{STYLE}{_STYLE}<div class="nsa-said nsa-open" role="status"><table>{rows}</table>'
            f"<p>{self.totals}</p></div>"
        )

    def _row(self, row: Row) -> str:
        is_here = row.chapter.name == self.here
        told = " ".join(
            f"{_square(name, done)} <code>{html.escape(name)}</code>"
            if is_here
            else _square(name, done)
            for name, done in row.exercises
        )
        mark = ' class="nsa-here" aria-current="true"' if is_here else ""
        title = html.escape(_title(row.chapter))
        return (
            f'<tr{mark}><td><a href="{row.chapter.file}">{title}</a></td><td>{told}</td>'
            f"<td>{f'{row.solved} of {len(row.exercises)}' if row.exercises else ''}</td></tr>"
        )


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
        known = exercises.chapter_exercises(each.name) if each.name in exercises.chapters() else ()
        solved = notes["solved"].get(each.name, [])
        rows.append(Row(each, tuple((name, name in solved) for name in known)))
    return Progress(tuple(rows), chapter or notes["latest"], len(notes["guesses"]))
