"""README's opening picture: the mask explorer, moving, as an SVG that needs no script.

    python -m nsa_tutorial.course.opening assets

A query is dragged along the stored text, and the blocks of its list jump. Each moment is a group of
shapes, which a style shows for its share of the time. A browser asks for `opening_*_still.svg`
where motion is unwelcome. What is drawn is computed by `masks` and `mask_report`, from the stored
heads.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from nsa_tutorial.course import themes
from nsa_tutorial.course.figures import PALETTE, SURFACE, readable_on
from nsa_tutorial.course.mask_report import attention_of, count, explore
from nsa_tutorial.course.masks import REAL, Settings, masks_of, source
from nsa_tutorial.course.moving.masks import GROUPS, START
from nsa_tutorial.course.widgets.mask_explorer import KINDS, colours, kinds

THEMES = ("light", "dark")
STILL = START["query"]
QUERIES = range(STILL % 4 + 24, 512, 4)  # downwards, one after the other
MOMENT, REST, BACK = 0.12, 1.5, 0.03  # seconds: of a query, at the end, and on the way back

# pixels
WIDE, HIGH, MARGIN = 912, 446, 16
TOP, SIDE = 66, 336  # of the mask
TEXT, LETTER, LINE = 376, 6.4, 17  # where the text begins, and the room of a letter
STRIP, TALL, BAND = 314, 88, 12  # the query's row: its top, its height, and that of its kinds
SEEN = [name for name in KINDS if name not in ("future", "not seen")]

Span = tuple[int, int]


def settings_at(query: int) -> Settings:
    """The settings with which the mask explorer begins, at another query."""
    names = START.keys() - {"group", "random", "compressed", "selected", "sliding", "lens"}
    sizes = {name: START[name] for name in names}
    group = list(GROUPS)[START["group"]]
    return replace(Settings(**sizes, group=group, data=REAL), query=query)


# -- shapes --


def _path(shape: str, colour: str, more: str = "") -> str:
    return f'<path d="{shape}" fill="{colour}"{more}/>' if shape else ""


def _box(x: float, y: float, wide: float, high: float) -> str:
    return f"M{x:g} {y:g}h{wide:g}v{high:g}h{-wide:g}z"


def _write(x: float, y: float, told: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{more}>{html.escape(told)}</text>'


def outline(top: int, spans: Sequence[Span]) -> str:
    """The path around rows of squares, one below the other: row `top + i` reaches from
    `spans[i][0]` to `spans[i][1]`."""
    down = [f"M{spans[0][0]} {top}H{spans[0][1]}"]
    up: list[str] = []
    for y, (before, now) in enumerate(pairwise(spans), top + 1):
        if before[1] != now[1]:
            down.append(f"V{y}H{now[1]}")
        if before[0] != now[0]:
            up.append(f"V{y}H{before[0]}")
    down.append(f"V{top + len(spans)}H{spans[-1][0]}")
    return "".join([*down, *reversed(up), "z"])


def _runs(rows: Iterable[int]) -> Iterator[list[int]]:
    """Ascending numbers in pieces that have no gap."""
    for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        yield [row for _, row in run]


def _reach(seen: np.ndarray, colour: str) -> str:
    """What a branch shows, bool `[N, N]`, where no row of it has a gap."""
    rows = np.flatnonzero(seen.any(-1)).tolist()
    spans = [(int(row.argmax()), len(row) - int(row[::-1].argmax())) for row in seen[rows]]
    return _path(outline(rows[0], spans), colour)


def mask(settings: Settings, inks: dict[str, str]) -> str:
    """The mask of all queries, one unit for each token."""
    N, BS, found = settings.N, settings.block_size, masks_of(settings)
    shapes = [_path(_box(0, 0, N, N), inks["future"]), _reach(np.tri(N, dtype=bool), inks["page"])]
    shapes += [_reach(found[name], inks[name]) for name in ("compressed", "window")]
    for name in ("selected", "own block"):
        for start in range(0, N, BS):
            for rows in _runs(np.flatnonzero(found[name][:, start]).tolist()):
                spans = [(start, min(start + BS, N, row + 1)) for row in rows]
                shapes.append(_path(outline(rows[0], spans), inks[name]))
    return "".join(shapes)


# -- the text --


def _places(text: str) -> list[tuple[int, int]]:
    """The line and the column of each letter, less the indentation that all lines have."""
    lines = text.split("\n")
    least = min(len(line) - len(line.lstrip(" \0")) for line in lines[1:] if line)
    return [(i, j - least if line else 0) for i, line in enumerate(lines)
            for j in range(len(line) + 1)]  # fmt: skip


def _grounds(places: Sequence[tuple[int, int]], keys: Iterable[int]) -> str:
    """Boxes under the letters of these keys."""
    shape = ""
    for run in _runs(keys):
        for line, piece in groupby(run, lambda key: places[key][0]):
            columns = [places[key][1] for key in piece]
            first, end = max(columns[0], 0), columns[-1] + 1
            if end > first:
                x, y = TEXT + first * LETTER, TOP + line * LINE
                shape += _box(round(x, 1), round(y, 1), round((end - first) * LETTER, 1), LINE)
    return shape


def _letters(text: str, places: Sequence[tuple[int, int]]) -> str:
    """The text, each line as wide as its letters' places, whatever the font."""
    lines = []
    for line, keys in groupby(range(len(text)), lambda key: places[key][0]):
        shown = [key for key in keys if places[key][1] >= 0 and text[key] not in "\n"]
        told = "".join(text[key] for key in shown).replace("\0", "·")
        if not told.strip():
            continue
        begin = len(told) - len(told.lstrip())
        x, y = TEXT + begin * LETTER, TOP + line * LINE + 0.75 * LINE
        wide = f' textLength="{len(told.strip()) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
        lines.append(f'<text x="{x:.1f}" y="{y:.1f}"{wide}>{html.escape(told.strip())}</text>')
    return "".join(lines)


# -- a moment --


def sentence(settings: Settings) -> tuple[str, str]:
    """What the query loads, and how much of its attention that holds, in two lines."""
    seen, found = explore(settings)
    t = settings.query
    keys, window, summaries = (int(found.keys[k][t]) for k in ("selected", "window", "compressed"))
    one_by_one = (seen["selected"] | seen["own block"] | seen["window"])[t, : t + 1]
    held = float(attention_of(settings)[one_by_one].sum())
    return (
        f"Query {t} loads {count(keys, 'key')} of {count(len(found.listed), 'block')}, "
        f"{window} of its window and {count(summaries, 'summary')}, not {count(t + 1, 'key')}.",
        f"The keys hold {held:.0%} of its attention.",
    )


def _row(settings: Settings, row: np.ndarray, inks: dict[str, str]) -> str:
    """The query's row: what it sees, and a bar for the attention it gives to each key; gray bars
    are attention that it misses. A bar is as high as the root of its share."""
    shares = attention_of(settings)
    room, top = TALL - BAND - 4, max(float(shares.max()), 0.02)
    tall = np.zeros(len(row), dtype=int)
    tall[: len(shares)] = np.round(np.sqrt(shares / top) * room)
    shapes = []
    for name in dict.fromkeys(KINDS):
        here = row == KINDS.index(name)
        band = "".join(_box(TEXT + run[0], STRIP + TALL - BAND, len(run), BAND)
                       for run in _runs(np.flatnonzero(here).tolist()))  # fmt: skip
        bars = "".join(f"M{TEXT + key}.5 {STRIP + room}v-{tall[key]}"
                       for key in np.flatnonzero(here & (tall > 0)))  # fmt: skip
        colour = inks[name] if name in SEEN[1:] else inks["missed"]
        shapes.append(_path(band, inks["page" if name == "not seen" else name]))
        shapes.append(f'<path d="{bars}" stroke="{colour}"/>' if bars else "")
    return "".join(shapes)


def moment(query: int, places: Sequence[tuple[int, int]], inks: dict[str, str]) -> str:
    """What is drawn of one query, over what stands still."""
    settings = settings_at(query)
    row = kinds(masks_of(settings))[query]
    said = sentence(settings)
    shapes = [_write(MARGIN, 28 + 22 * i, line, inks["text"]) for i, line in enumerate(said)]
    each, white = SIDE / settings.N, ""
    y, x = TOP + (query + 0.5) * each, MARGIN + (query + 1) * each
    shapes.append(f'<path d="M{MARGIN} {y:.1f}H{x:.1f}" stroke="{inks["query"]}" '
                  f'stroke-width="2"/><circle cx="{x:.1f}" cy="{y:.1f}" r="7" '
                  f'fill="{inks["query"]}" stroke="{inks["page"]}" stroke-width="2"/>')  # fmt: skip
    for name in SEEN:
        keys = np.flatnonzero(row == KINDS.index(name)).tolist()
        ground = _grounds(places, [key for key in keys if key != query])
        shapes.append(_path(ground, inks[name]))
        if name != "compressed" and readable_on(name) == SURFACE:
            white += ground
    ground = _grounds(places, [query])
    shapes.append(_path(ground, inks["query"]))
    shapes.append(f'<use href="#letters" fill="{inks["text"]}" clip-path="url(#p{query})"/>')
    shapes.append(f'<use href="#letters" fill="{inks["page"]}" clip-path="url(#w{query})"/>')
    past = _grounds(places, range(query + 1))
    clips = "".join(f'<clipPath id="{name}{query}"><path d="{shape}"/></clipPath>'
                    for name, shape in (("p", past), ("w", white + ground)))  # fmt: skip
    return clips + "".join(shapes) + _row(settings, row, inks)


# -- the whole --


def timeline(queries: Sequence[int]) -> list[tuple[int, float]]:
    """Which query is shown for how many seconds: downwards, a rest, and quickly back."""
    back = [(query, BACK) for query in reversed(queries[1:-1])]
    return [*((query, MOMENT) for query in queries[:-1]), (queries[-1], REST), *back]


def style(queries: Sequence[int], still: int) -> str:
    """The rules that show each query's moment in its time, and `still` where styles do not move."""
    shown = timeline(queries)
    whole = sum(seconds for _, seconds in shown)
    ends = np.cumsum([seconds for _, seconds in shown])
    rules = [f".m{{visibility:hidden;animation:{whole:.2f}s step-end infinite}}",
             f"#q{still}{{visibility:visible}}"]  # fmt: skip
    for query in queries:
        marks = {0.0: "hidden", 100.0: "hidden"}
        for (of, seconds), end in zip(shown, ends, strict=True):
            if of == query:
                marks[round(100 * (end - seconds) / whole, 3)] = "visible"
                marks.setdefault(round(100 * end / whole, 3), "hidden")
        steps = "".join(f"{at:g}%{{visibility:{how}}}" for at, how in sorted(marks.items()))
        rules.append(f"@keyframes k{query}{{{steps}}}#q{query}{{animation-name:k{query}}}")
    return "<style>" + "".join(rules) + "</style>"


def inks_of(theme: str) -> dict[str, str]:
    """The colour of each thing that is drawn, by name."""
    paints = dict(zip(KINDS, colours()[:, :3].tolist(), strict=True))
    named = {name: "#{:02X}{:02X}{:02X}".format(*parts) for name, parts in paints.items()}
    named |= {"page": SURFACE, "missed": PALETTE["line"]}
    named |= {name: PALETTE[name] for name in ("query", "text", "faint", "line")}
    return {name: themes.turned(colour) for name, colour in named.items()} if (
        theme == "dark") else named  # fmt: skip


def drawn(theme: str, queries: Sequence[int] = QUERIES, still: int = STILL) -> str:
    """The picture as SVG.

    Args:
        theme: one of `THEMES`.
        queries: those that are shown, ascending.
        still: the one of them that stands where nothing moves.
    """
    if theme not in THEMES:
        raise ValueError(f"theme: expected one of {list(THEMES)}, got {theme!r}")
    if still not in queries:
        raise ValueError(f"still: expected one of the queries, got {still}")
    settings, inks = settings_at(still), inks_of(theme)
    text = source(settings.data, settings.N, settings.group).text.decode("ascii")
    places = _places(text)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" '
    parts = [
        f'{head}height="{HIGH}" font-family="system-ui, sans-serif" font-size="15">',
        style(queries, still) if len(queries) > 1 else "",
        '<defs><g id="letters" font-family="ui-monospace, monospace" font-size="10.6" '
        f'xml:space="preserve">{_letters(text, places)}</g></defs>',
        f'<rect width="{WIDE}" height="{HIGH}" rx="8" fill="{inks["page"]}"/>',
        f'<g transform="translate({MARGIN} {TOP}) scale({SIDE / settings.N})">',
        f"{mask(settings, inks)}</g>",
        f'<use href="#letters" fill="{inks["line"]}"/>',
    ]
    told = [("own block", "own block"), ("selected", "selected"), ("window", "window"),
            ("compressed", "only in summaries"), ("missed", "attention that it misses"),
            ("future", "later")]  # fmt: skip
    x = float(MARGIN)
    for name, words in told:
        parts.append(f'<rect x="{x:g}" y="420" width="12" height="12" fill="{inks[name]}" '
                     f'stroke="{inks["line"]}"/>')  # fmt: skip
        parts.append(_write(x + 18, 431, words, inks["text"], ' font-size="14"'))
        x += 46 + 7 * len(words)
    for query in queries:
        parts.append(f'<g class="m" id="q{query}">{moment(query, places, inks)}</g>')
    return "".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    for name in THEMES:
        for ending, shown in (("", QUERIES), ("_still", (STILL,))):
            file = Path(sys.argv[1], f"opening_{name}{ending}.svg")
            file.write_text(drawn(name, shown), encoding="utf-8")
            print(f"{file}: {file.stat().st_size:,} bytes")
