"""The entries of the glossary, from `glossary.md`.

It has one for each bold term of the course:

    term (another form) · 03
    : What it is, in a sentence or two.

The number is the chapter in which it is first bold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from book import places

_ENTRY = re.compile(
    r"^(?P<term>[^\n(·]+?)(?: \((?P<forms>[^)]+)\))? · (?P<chapter>\d\d)\n"
    r": (?P<said>[^\n]+(?:\n  [^\n]+)*)",
    re.M,
)
# Everyday words, whose definition is shown where they are introduced and not wherever they stand.
_EVERYDAY = """
base, batch, block, body, cache, chunk, compression, contiguous, control, draft, error, far, gate,
group,
head, hit, hold, host, id, kernel, key, launch, list, mask, median, needle, neighbours, network,
offset, on paper, one pass, oracle, overlap, page, part, partial, peak, phase, piece, probe,
program, query, scale, score, selection, shift, slot, sparse, stable, stage, state, step,
stream, summary, term, token, two passes, union, value, view, weight, window, D, DV, M, N, −1
"""
EVERYDAY = frozenset(re.split(r",\s+", _EVERYDAY.strip()))


@dataclass(frozen=True)
class Entry:
    """A term.

    Attributes:
        term: as the glossary has it.
        forms: this and what else it is called, in small letters.
        chapter: the number of the one that introduces it.
        said: what it is, in Markdown.
    """

    term: str
    forms: tuple[str, ...]
    chapter: int
    said: str

    @property
    def is_everyday(self) -> bool:
        """Whether its definition is shown only where it is introduced."""
        return self.term in EVERYDAY


def head() -> str:
    """What stands above the entries."""
    text = (places.BOOK / "glossary.md").read_text(encoding="utf-8")
    return text[: _ENTRY.search(text).start()]


def entries() -> tuple[Entry, ...]:
    """All of them, in the file's order."""
    text = (places.BOOK / "glossary.md").read_text(encoding="utf-8")
    found = []
    for match in _ENTRY.finditer(text):
        forms = [match["term"], *(match["forms"] or "").split(", ")]
        small = tuple(form.casefold() for form in forms if form)
        said = " ".join(match["said"].split())
        found.append(Entry(match["term"], small, int(match["chapter"]), said))
    return tuple(found)
