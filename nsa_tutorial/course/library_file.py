"""The reader's library as a file, `my_nsa.py`: what they built, in reading order.

A piece stands below lines of its own, which say what it is and what it satisfies:

    # -- 12 gradients · attention_backward --
    # holds: one key, many keys, scale

Above the first piece are a docstring and the imports. Everything else in the file is the reader's,
and stays as it is.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass, replace

from nsa_tutorial.course.chapters import CHAPTERS

FILE = "my_nsa.py"
MARKER = re.compile(r"^# -- \d\d (?P<chapter>\w+) · (?P<name>\w+) --\n(?:# .*\n)*", re.MULTILINE)
HEADER = '"""My own library: what I built in the course. Each piece holds all its stages."""\n'
NUMBERS = {chapter.name: chapter.number for chapter in CHAPTERS}


@dataclass(frozen=True)
class Piece:
    """A function that the reader built.

    Attributes:
        chapter: by name.
        name: of the exercise and of the function.
        stages: what it satisfies.
        imports: lines, as the file needs them.
        source: the function, below whatever of the reader's own it calls.
    """

    chapter: str
    name: str
    stages: tuple[str, ...]
    imports: tuple[str, ...]
    source: str

    @property
    def marker(self) -> str:
        """The lines above it."""
        holds = textwrap.fill(
            f"holds: {', '.join(self.stages)}", 98, initial_indent="# ", subsequent_indent="# "
        )
        return f"# -- {NUMBERS[self.chapter]:02} {self.chapter} · {self.name} --\n{holds}\n"

    @property
    def text(self) -> str:
        """The piece with its lines."""
        return f"{self.marker}{self.source.strip()}\n"


@dataclass(frozen=True)
class File:
    """The text of the file, cut at its pieces.

    Attributes:
        header: what stands above the first piece.
        pieces: their names, chapters and texts, in the file's order.
    """

    header: str
    pieces: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> File:
        """Cut a file at the lines above its pieces."""
        found = list(MARKER.finditer(text))
        ends = [*(match.start() for match in found[1:]), len(text)][: len(found)]
        pieces = tuple(
            (match["name"], match["chapter"], text[match.start() : end])
            for match, end in zip(found, ends, strict=True)
        )
        return cls(text[: found[0].start()] if found else text, pieces)

    @property
    def text(self) -> str:
        """The whole file: two blank lines above each piece."""
        return "\n\n".join(part.strip("\n") + "\n" for part in self._parts)

    @property
    def _parts(self) -> list[str]:
        return [part for part in (self.header, *(text for *_, text in self.pieces)) if part.strip()]

    @property
    def names(self) -> list[str]:
        """The pieces, in the file's order."""
        return [name for name, *_ in self.pieces]

    def source(self, name: str) -> str | None:
        """A piece without the lines above it; None where there is none of that name."""
        for found, _, text in self.pieces:
            if found == name:
                return MARKER.sub("", text, count=1).strip()
        return None

    def clash(self, piece: Piece) -> tuple[str, str] | None:
        """A name that this piece and another one define differently, and the other one."""
        mine = definitions(piece.source)
        for other, _, text in self.pieces:
            theirs = definitions(text) if other != piece.name else {}
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    return name, other
        return None

    def with_piece(self, piece: Piece) -> File:
        """The file with a piece in its place: that of the older version, or in reading order."""
        entry = (piece.name, piece.chapter, piece.text)
        number = NUMBERS[piece.chapter]
        if piece.name in self.names:
            pieces = [entry if found[0] == piece.name else found for found in self.pieces]
        else:
            before = [p for p in self.pieces if NUMBERS.get(p[1], 99) <= number]
            pieces = [*before, entry, *(p for p in self.pieces if p not in before)]
        return replace(
            self, header=_with_imports(self.header or HEADER, piece.imports), pieces=tuple(pieces)
        )


def definitions(source: str) -> dict[str, str]:
    """What a source text defines at its top level, without comments and imports: by name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found[ast.unparse(target)] = ast.unparse(node)
    return found


def _with_imports(header: str, imports: tuple[str, ...]) -> str:
    """The header with the imports that it lacks, below those that it has."""
    there = {ast.unparse(node) for node in ast.parse(header).body}
    lacking = [line for line in imports if ast.unparse(ast.parse(line)) not in there]
    if not lacking:
        return header
    has_some = any("import " in line for line in there)
    return header.rstrip("\n") + ("\n" if has_some else "\n\n") + "\n".join(lacking) + "\n"
