"""Two stored runs of the benchmark side by side, as a table in Markdown:
`python -m nsa_tutorial.bench compare before.json after.json`.

Rows belong together if they measured the same thing: shape, operator, kernel, order, change, pass
and lists are equal. Nothing is measured here, and whether a difference is noise is left to the
reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nsa_tutorial.bench.measuring import Row
from nsa_tutorial.bench.stored import NAMES, Run, in_words, shared_columns

ORDER = ("operator", "tokens", "direction", "lists", "kernel", "order", "change")  # of columns
TIMES = ("before, ms", "after, ms", "after / before")


def compare(before: Run, after: Run) -> str:
    """The table. Above it, a warning where machine or versions differ, and what all rows have in
    common; below it, the rows that only one of the two runs has. Of a row that was measured twice
    in a run, the later one counts."""
    first, second = _by_name(before.rows), _by_name(after.rows)
    rows = [*first.values(), *second.values()]
    shared = shared_columns(rows)
    names = [x for x in (*ORDER, *(y for y in NAMES if y not in ORDER)) if x not in shared]
    in_both = [key for key in first if key in second]
    lines = [*_warnings(before, after)]
    if in_words(shared):
        lines += [f"In all rows: {in_words(shared)}.", ""]
    if in_both:
        body = (_cells(first[key], second[key], names) for key in in_both)
        lines += _table([*(x.replace("_", " ") for x in names), *TIMES], body)
    else:
        lines.append("No row is in both runs.")
    for place, found, other in (("first", first, second), ("second", second, first)):
        alone = [row for key, row in found.items() if key not in other]
        if alone:
            lines += ["", f"Only in the {place} run:", ""]
            lines += [f"- {_description(row, names)}: {_time(row)} ms" for row in alone]
    return "\n".join(lines) + "\n"


def _by_name(rows: Iterable[Row]) -> dict[tuple[object, ...], Row]:
    return {tuple(getattr(row, name) for name in NAMES): row for row in rows}


def _warnings(before: Run, after: Run) -> Iterator[str]:
    """One line and an empty one, or nothing."""
    facts = [x for x in {**before.facts, **after.facts} if x != "command"]
    pairs = {x: (before.facts.get(x), after.facts.get(x)) for x in facts}
    different = [f"{x} {old}, then {new}" for x, (old, new) in pairs.items() if old != new]
    if different:
        yield f"Warning: the runs differ in more than the code: {'; '.join(different)}."
        yield ""


def _cells(old: Row, new: Row, names: Sequence[str]) -> list[str]:
    ratio = f"{new.ms / old.ms:.2f}" if old.ms and new.ms else "–"
    return [*(str(getattr(old, name)) for name in names), _time(old), _time(new), ratio]


def _time(row: Row) -> str:
    if row.ms is None:
        return "–"
    return f"{row.ms:.4g}{' (wrong)' if row.is_right is False else ''}"


def _description(row: Row, names: Sequence[str]) -> str:
    return in_words({name: getattr(row, name) for name in ("kernel", *names)})


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown that also read as text: columns are aligned, times to the right."""
    rows = [header, *body]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = len(header) - len(TIMES)
    rule = ["-" * (w - (i >= numbers)) + ":" * (i >= numbers) for i, w in enumerate(widths)]
    rows.insert(1, rule)
    return [
        "| "
        + " | ".join(
            x.rjust(w) if i >= numbers else x.ljust(w)
            for i, (x, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
