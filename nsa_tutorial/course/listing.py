"""Listings: a piece of code with its title, its line numbers and its colours, alone or in columns.

A listing is one `<pre>` with the code unchanged, so a viewer that strips all styles still shows
every line with its indentation. Colours come from one `<style>` for each output (`listing_style`).
Line numbers and the rows that level two columns are drawn by that style: they are no part of the
text, and are not copied. What a listing shows is found by `source`.
"""

from __future__ import annotations

import builtins
import html
import keyword
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String, _TokenType

from nsa_tutorial.course.listing_style import NUMBERS, SHARED_COLOURS, row_name, style, width

MARKER = re.compile(r"^(?P<indent>\s*)# -- (?P<name>.+?) --\s*$")
# The first that holds a token names its class.
CLASSES = (
    (Keyword.Constant, "number"), (Keyword, "keyword"), (Operator.Word, "keyword"),
    (Comment.Preproc, "keyword"), (Comment, "comment"), (String, "string"), (Number, "number"),
    (Name.Builtin.Pseudo, ""), (Name.Builtin, "function"), (Name.Function, "function"),
    (Name.Class, "function"), (Name.Decorator, "function"),
)  # fmt: skip
# Names that say nothing about what two columns share.
COMMON = {*keyword.kwlist, *dir(builtins), "self", "torch", "tl", "triton", "tilelang", "math"}
Token = tuple[_TokenType, str]


@dataclass(frozen=True, repr=False)
class Listing:
    """A piece of code with its title; Jupyter shows it in colour, everything else as plain text.

    Attributes:
        title: what it is; the path in it, if there is one, becomes the link.
        code: the text.
        language: a name of a lexer of pygments.
        note: a sentence shown below the code; `` `names` `` in it look like code.
        path: the file, from the root of the repository; None for code that has no file there.
        first: the number of the code's first line in its file; None shows no numbers.
    """

    title: str
    code: str
    language: str = "python"
    note: str = ""
    path: str | None = None
    first: int | None = None

    def __repr__(self) -> str:
        comment = "#" if self.language == "python" else "//"
        note = f"\n{comment} {self.note}" if self.note else ""
        return f"{comment} {self.title}\n{self.code.rstrip()}{note}".rstrip() + "\n"

    def _repr_html_(self) -> str:
        return f"{style()}\n{_framed(self)}"

    def markers(self) -> dict[str, int]:
        """The phases that begin here, with the row of each, from 0."""
        rows = enumerate(self.code.splitlines())
        return {m["name"]: row for row, line in rows if (m := MARKER.match(line))}

    def names(self) -> set[str]:
        """The variables and functions that the code names, less those of every program."""
        tokens = _tokens(self)
        return {text for i, (_, text) in enumerate(tokens) if _is_own_name(tokens, i)}


class SideBySide:
    """Several listings in columns.

    Rows of one phase are level, and a name that two columns share has one colour in all of them.
    Where a line would be cut, the listings stand below one another.
    """

    def __init__(self, listings: Sequence[Listing]) -> None:
        self.listings = tuple(listings)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.listings))

    def _repr_html_(self) -> str:
        colours, widths = shared_names(self.listings), [needed(x) for x in self.listings]
        is_muted = " nsa-muted" if colours else ""
        columns = "\n".join(
            _framed(listing, colours, blank)
            for listing, blank in zip(self.listings, level(self.listings), strict=True)
        )
        return (
            f'{style(widths)}\n<div class="nsa-columns"><div class="nsa-row {row_name(widths)}'
            f'{is_muted}">\n{columns}\n</div></div>'
        )


def needed(listing: Listing) -> int:
    """Pixels that a column with this listing needs so that no line of it is cut."""
    longest = max(map(len, listing.code.splitlines()), default=0)
    return width(longest + (NUMBERS if listing.first is not None else 0))


def shared_names(listings: Sequence[Listing]) -> dict[str, int]:
    """The names that two or more listings share, with the number of the colour of each.

    Colours go round in the order in which the names first appear.
    """
    names = [listing.names() for listing in listings]
    order = dict.fromkeys(text for listing in listings for _, text in _tokens(listing))
    shared = [name for name in order if sum(name in known for known in names) > 1]
    return {name: i % SHARED_COLOURS for i, name in enumerate(shared)}


def level(listings: Sequence[Listing]) -> list[dict[int, int]]:
    """The blank rows to insert before rows of each listing, so that each phase that all of them
    share begins in the same row. If the listings order their phases differently, the longest common
    sequence of phases is levelled.
    """
    rows = [listing.markers() for listing in listings]
    chains: dict[str, list[str]] = {}
    for name in (name for name in rows[0] if all(name in known for known in rows)):
        before = [c for c in chains.values() if all(known[c[-1]] < known[name] for known in rows)]
        chains[name] = [*max(before, key=len, default=[]), name]
    blank: list[dict[int, int]] = [{} for _ in listings]
    added = [0] * len(listings)
    for name in max(chains.values(), key=len, default=[]):
        target = max(known[name] + more for known, more in zip(rows, added, strict=True))
        for i, known in enumerate(rows):
            if missing := target - known[name] - added[i]:
                blank[i][known[name]] = missing
                added[i] += missing
    return blank


def _tokens(listing: Listing) -> list[Token]:
    lexer = get_lexer_by_name(listing.language, stripnl=False, ensurenl=False)
    return list(lexer.get_tokens(listing.code.rstrip()))


def _is_own_name(tokens: Sequence[Token], i: int) -> bool:
    """Whether a token is a name of more than one letter that is neither an attribute nor common."""
    kind, text = tokens[i]
    is_attribute = i > 0 and tokens[i - 1][1] == "."
    return kind in Name and len(text) > 1 and text not in COMMON and not is_attribute


def _framed(
    listing: Listing,
    colours: Mapping[str, int] = {},
    blank: Mapping[int, int] = {},
) -> str:
    """The listing's HTML, without the style.

    `colours` are those of shared names, `blank` the rows to leave before a row.
    """
    parts = [f'<div class="nsa-title">{_title(listing)}</div>']
    if listing.code.strip():
        counter = ""
        if listing.first is not None:
            counter = f' style="counter-reset:nsa-line {listing.first - 1}"'
        lines = "\n".join(_lines(listing, colours, blank))
        parts.append(f'<pre class="nsa-code"{counter}>{lines}\n</pre>')
    if listing.note:
        note = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(listing.note))
        parts.append(f'<p class="nsa-note">{note}</p>')
    return '<div class="nsa-listing">' + "\n".join(parts) + "</div>"


def _title(listing: Listing) -> str:
    title = html.escape(listing.title)
    if listing.path is None:
        return title
    # JupyterLab counts lines from 0, and opens the file there
    line = f"#line={listing.first - 1}" if listing.first else ""
    link = f'<a class="nsa-file" href="../{listing.path}{line}">{listing.path}</a>'
    if listing.path in title:
        return title.replace(listing.path, link, 1)
    return f"{title} · {link}"


def _lines(listing: Listing, colours: Mapping[str, int], blank: Mapping[int, int]) -> Iterator[str]:
    """Each line of the code as a span of spans, with the blank rows before it."""
    for row, line in enumerate(_split(_tokens(listing), colours)):
        # a span without text: no viewer that strips styles shows it, and nobody copies it
        gap = f'<span class="nsa-gap" style="--rows:{blank[row]}"></span>' if row in blank else ""
        spans = "".join(
            f'<span class="{name}">{html.escape(text, quote=False)}</span>'
            if name
            else html.escape(text, quote=False)
            for name, text in line
        )
        yield f'{gap}<span class="line">{spans}</span>'


def _split(tokens: Sequence[Token], colours: Collection[str]) -> list[list[tuple[str, str]]]:
    """The lines, each as pairs of a class and a text."""
    lines: list[list[tuple[str, str]]] = [[]]
    for i, (kind, text) in enumerate(tokens):
        name = next((name for known, name in CLASSES if kind in known), "")
        if MARKER.match(text):
            name = "marker"
        elif text in colours and _is_own_name(tokens, i):
            name = f"shared-{colours[text]}"
        first, *others = text.split("\n")
        for new_line, piece in [(False, first), *((True, other) for other in others)]:
            if new_line:
                lines.append([])
            if piece:
                lines[-1].append((name if piece.strip() else "", piece))
    return lines
