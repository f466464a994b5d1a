"""The mask explorer: what each branch of native sparse attention lets a query see, as a mask of
tokens, and as the list of one query.

    from nsa_tutorial.course.widgets import mask_explorer
    mask_explorer.mask_explorer()

The controls are the fields of `masks.Settings`. `masks` says what is seen and `mask_report` what it
costs; here `draw` makes a picture of both, `sentence` and `finding` say them in words, and
`mask_explorer` is the interactive.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import ipywidgets
import numpy as np
from matplotlib.colors import to_rgb

from nsa_tutorial.course import costs
from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture
from nsa_tutorial.course.mask_report import (
    ITEMSIZE,
    TILE,
    Item,
    Report,
    amount,
    attention_of,
    best_blocks,
    count,
    explore,
    quote,
)  # fmt: skip
from nsa_tutorial.course.masks import (
    BRANCHES,
    MAX_N,
    POWERS,
    REAL,
    SYNTHETIC,
    Masks,
    Settings,
    ranges,
    source,
    sources,
)  # fmt: skip
from nsa_tutorial.course.sheet import Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel

SHOWN = {
    "all branches": BRANCHES,
    "compressed": ("compressed",),
    "selected": ("selected", "own block"),
    "sliding window": ("window",),
}
# what `Report.branches` prices of them
PRICED = {
    "all branches": ("selected", "window", "compressed"),
    "compressed": ("compressed",),
    "selected": ("selected",),
    "sliding window": ("window",),
}
MOST = {"top_n": 32, "num_initial": 8, "num_local": 8, "window": 256}  # on a slider
ROOM = 11  # lines of the list
# What a square of the mask can be, by its number in `kinds`; each covers those before it.
KINDS = "future", "not seen", *BRANCHES

Square = tuple[float, float, str]  # its upper left corner in inches, and one of `KINDS`

# inches: the figure, the square mask in it, and the chosen query's own row below
WIDTH, HEIGHT = 6.4, 4.86
LEFT, TOP, SIDE = 0.55, 0.36, 3.84
GAP, ROW = 0.07, 0.17
LIST, LINE = 3.86, 0.168  # left end of the list, and from one line to the next
BASELINE = 0.125  # from the top of a line to where its letters stand

# -- in words --


def sentence(settings: Settings, show: str = "all branches") -> str:
    """What there is to say: what the query reads, then the whole sequence beside dense
    attention."""
    masks, found = explore(settings)
    data, t = source(settings.data, settings.N, settings.group), settings.query
    query = f"Query {t} ({quote(data.text, t)})" if data.text else f"Query {t}"
    keys, window, summaries = (int(found.keys[name][t]) for name in PRICED["all branches"])
    blocks, past = count(len(found.listed), "block"), count(t + 1, "key")
    held = "" if show == "compressed" else f"{_held(settings, masks, show):.0%} of its attention"
    covered = int(masks["compressed"][t].sum())
    told = {
        "all branches": f"loads {count(keys, 'key')} of {blocks}, {window} of its window and "
        f"{count(summaries, 'summary')}. The keys hold {held}.",
        "selected": f"reads {blocks}: {keys} of its {past}, with {held}.",
        "sliding window": f"reads the last {window} of its {past}, with {held}.",
        "compressed": f"reads {count(summaries, 'summary')}, which cover {covered} of its {past}.",
    }[show]
    cost = costs.total(*(found.branches[name] for name in PRICED[show]))
    work = f"{cost.flops / found.dense.flops:.0%} of dense attention's work"
    if "selected" in SHOWN[show]:
        work += f", plus {found.choice.flops / found.dense.flops:.0%} to choose"
    whole = (
        f"All {settings.N} queries take {work}, and move {amount(cost.bytes, 'B')} (dense tiles: "
        f"{amount(found.tiled.bytes, 'B')}, as {TILE} queries share a load). "
        f"{_in_a_long_text(settings, show)}"
    )
    said = f"{query} {told} {whole}"
    return f"{said} Out of range: {', '.join(settings.adjusted)}." if settings.adjusted else said


LONG = 65_536  # tokens of the long text that prices are told for


def _in_a_long_text(settings: Settings, show: str) -> str:
    """The same bytes at `LONG` tokens. A list and a window stay as long as they are, while a tile
    loads more with every token. What is read of summaries grows with the text, too."""
    data = source(settings.data, settings.N, settings.group)
    sizes = {"D": data.D, "DV": data.DV, "HQ": len(data.logits), "H": 1, "itemsize": ITEMSIZE}
    s, N = settings, LONG
    keys = {
        "selected": costs.selected_keys(N, N, block_size=s.block_size, top_n=s.top_n),
        "window": costs.window_keys(N, N, window_size=s.window),
        "compressed": costs.summary_keys(N, N, length=s.length, stride=s.stride),
    }
    names = [x for x in PRICED[show] if x != "compressed" or show == "compressed"]
    moved = sum(costs.one_program_per_query(keys[name], N, **sizes).bytes for name in names)
    moved += 4 * N * s.top_n * ("selected" in names)  # the lists
    tiles = _tiles(data.D, data.DV, len(data.logits))
    what = "list and window move" if show == "all branches" else "it is"
    unless = ", unless tiles of queries share it, too" if show == "compressed" else ""
    return f"At {N:,} tokens {what} {amount(moved, 'B')} (dense: {amount(tiles, 'B')}){unless}."


@functools.cache
def _tiles(D: int, DV: int, G: int) -> int:
    sizes = {"tile_q": TILE, "tile_k": TILE, "HQ": G, "H": 1, "itemsize": ITEMSIZE}
    return costs.tiled_attention(LONG, LONG, D, DV, **sizes).bytes


def finding(settings: Settings, show: str = "all branches") -> str:
    """The title: what the query reads through the branches that are shown, and how many of the
    blocks that matter most are among them."""
    (masks, found), t = explore(settings), settings.query
    keys, window, summaries = (int(found.keys[name][t]) for name in PRICED["all branches"])
    past = count(t + 1, "key")
    if show == "compressed":
        return f"Query {t} reads {count(summaries, 'summary')} in place of {past}"
    if show == "sliding window":
        held = f"{_held(settings, masks, show):.0%} of its attention"
        return f"Query {t} finds {held} in {window} of {past}"
    best = best_blocks(settings)
    hits = len(set(best) & set(found.listed))
    if len(best) == 1:
        told = f"Query {t} {'finds' if hits else 'misses'} its best block"
    else:
        which = "all" if hits == len(best) else hits
        told = f"Query {t} finds {which} of the best {len(best)} blocks"
    if show == "selected":
        return f"{told}, reads {keys} of {past}"
    return f"{told}: {keys + window + summaries} loads, not {t + 1}"


def _held(settings: Settings, masks: Masks, show: str) -> float:
    """The share of the query's attention that falls on keys it sees one by one."""
    t, seen = settings.query, np.zeros(settings.N, dtype=bool)
    for name in set(SHOWN[show]) - {"compressed"}:
        seen |= masks[name][t]
    return float(attention_of(settings)[seen[: t + 1]].sum())


# -- the picture --


def kinds(masks: Masks, branches: Collection[str] = BRANCHES) -> np.ndarray:
    """What each square of the mask is, an index into `KINDS`: uint8 `[N, N]`."""
    N = len(masks["window"])
    found = np.tri(N, dtype=np.uint8)  # 0 in the future, else not seen
    for name in BRANCHES:
        if name in branches:
            np.copyto(found, KINDS.index(name), where=masks[name])
    return found


def colours() -> np.ndarray:
    """The colour of each of `KINDS`, uint8 `[6, 4]`. What is seen only through summaries is paler:
    it is most of the past."""
    named = [PALETTE["masked"], SURFACE, *(PALETTE[name] for name in BRANCHES)]
    found = np.array([(*to_rgb(colour), 1.0) for colour in named])
    found[KINDS.index("compressed"), :3] = 0.55 * found[KINDS.index("compressed"), :3] + 0.45
    return np.round(255 * found).astype(np.uint8)


def painted(found: np.ndarray) -> np.ndarray:
    """The colours of `kinds`, uint8 `[N, N, 4]`."""
    whole = colours().view(np.uint32)[:, 0]  # a colour as one number: four times as fast
    return whole[found].view(np.uint8).reshape(*found.shape, 4)


def draw(settings: Settings | None = None, show: str = "all branches") -> Picture:
    """The mask, queries downwards and keys to the right, and below it the row of the chosen query;
    beside them the query's list.

    Args:
        settings: None takes the defaults.
        show: a key of `SHOWN`; the branches that are coloured and listed.
    """
    settings = settings or Settings()
    masks, found = explore(settings)
    sheet = Sheet(WIDTH, HEIGHT)
    _draw_mask(sheet, painted(kinds(masks, SHOWN[show])), settings.query)
    lines = table(settings, found, SHOWN[show])
    squares = [*_write_list(sheet, lines, settings.query), *_write_legend(sheet, show)]
    faces = colours()[[KINDS.index(name) for *_, name in squares]] / 255
    look = {"edgecolors": PALETTE["faint"], "linewidths": 0.5}
    sheet.boxes([(x, y, 0.12, 0.12) for x, y, _ in squares], faces, **look)
    return Picture(sheet.figure, finding(settings, show))


def _draw_mask(sheet: Sheet, image: np.ndarray, query: int) -> None:
    N, per_token = len(image), SIDE / len(image)
    mask, row = Place(LEFT, TOP, SIDE, SIDE), Place(LEFT, TOP + SIDE + GAP, SIDE, ROW)
    sheet.image(mask, image)
    sheet.image(row, image[query : query + 1])
    y, right, bottom = TOP + (query + 0.5) * per_token, row.x(1), row.y(1)
    past = [(LEFT, y), (LEFT + (query + 1) * per_token, y)]
    frame = [(LEFT, row.top), (right, row.top), (right, bottom), (LEFT, bottom), (LEFT, row.top)]
    sheet.lines([past, frame], "query", 1.2)
    shares = {position / N: position for position in _ticks(N)}
    marks = [[(LEFT, mask.y(share)), (LEFT - 0.05, mask.y(share))] for share in shares]
    marks += [[(row.x(share), bottom), (row.x(share), bottom + 0.05)] for share in shares]
    sheet.lines(marks, "text")
    sheet.beside(mask, shares, "query", gap=0.09, size=9, away=0.44)
    sheet.below(row, shares, "key", gap=0.09, size=9)


def _ticks(n: int) -> list[int]:
    """Round positions from 0 to `n`, at most five of them."""
    step = next(s for s in (4, 8, 16, 32, 64, 128) if n // s <= 4)
    return list(range(0, n + 1, step))


def table(
    settings: Settings, found: Report, branches: Sequence[str] = BRANCHES
) -> list[tuple[str, tuple[str, ...]]]:
    """The chosen query's list as lines of text, each with its branch ("" without one); more blocks
    than fit share a line.

    Only `branches` are listed and added up.
    """
    items = [item for item in found.items if item.branch in branches]
    blocks = [item for item in items if item.block is not None]
    others = [item for item in items if item.block is None]
    # the last block keeps its line, too
    kept = len(blocks) if len(items) <= ROOM else ROOM - 2 - len(others)
    lines = [("", ("id", "why", "tokens", "keys", "KiB"))]
    for item in blocks[:kept]:
        lines.append((item.branch, (str(item.block), item.why, *_cells([item]))))
    if rest := blocks[kept:-1]:
        lines.append(("selected", ("…", f"{len(rest)} more", *_cells(rest))))
    for item in blocks[kept:][-1:]:
        lines.append((item.branch, (str(item.block), item.why, *_cells([item]))))
    lines += [(item.branch, ("", item.why, *_cells([item]))) for item in others]
    lines.append(("", ("", "together", *_cells(items))))
    dense, one = settings.query + 1, found.items[0]
    price = str(dense), f"{dense * one.bytes / one.keys / 1024:.2f}"
    return [*lines, ("", ("", "dense", f"0–{settings.query}", *price))]


def _cells(items: Sequence[Item]) -> tuple[str, ...]:
    keys, loaded = (sum(getattr(item, name) for item in items) for name in ("keys", "bytes"))
    span = f"{items[0].first}–{items[0].last}" if len(items) == 1 else ""
    return span, str(keys), f"{loaded / 1024:.2f}"


def _write_list(sheet: Sheet, lines: Sequence, query: int) -> list[Square]:
    """The list as text, right of the mask and reaching into its empty half; returns the squares
    that belong to its lines."""
    squares, rules, told, y = [], [], [], TOP
    # what lies under it is the future, whatever the settings
    high = LINE * (len(lines) + 1.3) + 0.2
    sheet.boxes([(LIST - 0.26, TOP - 0.02, WIDTH - LIST, high)], SURFACE)
    sheet.text(LIST, y + BASELINE, f"query {query} reads", colour="query", va="baseline")
    y += 1.3 * LINE
    for number, (branch, cells) in enumerate(lines):
        if number in (1, len(lines) - 2):
            y += 0.08
            rules.append([(LIST, y - 0.04), (WIDTH - 0.05, y - 0.04)])
        if branch:
            squares.append((LIST - 0.18, y + 0.02, branch))
        written = "{:>3} {:<9} {:>7} {:>4} {:>6}".format(*cells)
        told.append((LIST, y + BASELINE, written))
        y += LINE
    sheet.words(told, ha="left", va="baseline", family="monospace")
    sheet.lines(rules)
    return squares


def _write_legend(sheet: Sheet, show: str) -> list[Square]:
    """What the colours mean, right of the mask's end; returns their squares."""
    alone = show != "all branches"
    names = {
        "own block": "own block",
        "selected": "selected",
        "window": "window" if alone else "window, not selected",
        "compressed": "through summaries" if alone else "through summaries only",
    }
    entries = {name: text for name, text in names.items() if name in SHOWN[show]}
    entries |= {"not seen": "earlier, not seen", "future": "later: never seen"}
    x, y = LEFT + SIDE + 0.12, TOP + SIDE - 1.06 * LINE * len(entries)
    squares, told = [], []
    for name, text in entries.items():
        squares.append((x, y + 0.02, name))
        told.append((x + 0.19, y + BASELINE, text))
        y += 1.06 * LINE
    sheet.words(told, ha="left", va="baseline")
    sheet.text(x, TOP + SIDE + GAP + BASELINE, "the query's row", colour="query", va="baseline")
    return squares


# -- saving it --


def file_name(settings: Settings, show: str = "all branches") -> str:
    """A name for the picture of these settings, different for different ones."""
    data = {SYNTHETIC: "made_up", REAL: "heads"}[settings.data] + str(settings.group)
    s = settings
    parts = (
        f"mask_{data}_N{s.N}_block{s.block_size}_top{s.top_n}_first{s.num_initial}",
        f"local{s.num_local}_window{s.window}_summary{s.length}by{s.stride}_query{s.query}",
    )
    which = "" if show == "all branches" else f"_{show.replace(' ', '-')}"
    return "_".join(parts) + which + ".png"


def export(settings: Settings, show: str = "all branches", folder: Path | str = ".") -> Path:
    """Write the picture of these settings into `folder`, over an older one of the same name, and
    return where it is."""
    path = Path(folder) / file_name(settings, show)
    path.write_bytes(draw(settings, show).png())
    return path


# -- the interactive --


def mask_explorer(start: Settings | None = None, show: str = "all branches") -> Panel:
    """The interactive: the sizes beside the picture, and a button that saves it in the working
    directory.

    Args:
        start: where it begins; None takes the defaults.
        show: a key of `SHOWN`.
    """
    start = start or Settings()

    def render(show: str, **values: object) -> tuple[Picture, str]:
        settings = Settings(**values)
        return draw(settings, show), sentence(settings, show)

    def slider(name: str, text: str, low: int, high: int, step: int = 1) -> ipywidgets.IntSlider:
        return ipywidgets.IntSlider(getattr(start, name), low, high, step, description=text)

    def choice(name: str, text: str, options: Sequence) -> ipywidgets.Dropdown:
        return ipywidgets.Dropdown(options=options, value=getattr(start, name), description=text)

    for data, (heads, positions) in sources().items():
        for group in range(heads):
            source(data, positions, group)  # made once, and not in the middle of a move
    groups = max(groups for groups, _ in sources().values())
    explorer = panel(
        "which keys a query reads, and at what price",
        render,
        limits=limits,
        idle=idle,
        beside=True,
        data=choice("data", "scores", list(sources())),
        group=choice("group", "head group", range(groups)),
        show=ipywidgets.Dropdown(options=list(SHOWN), value=show, description="show"),
        N=slider("N", "tokens", 16, MAX_N, step=8),
        query=slider("query", "query", 0, MAX_N - 1),
        block_size=choice("block_size", "block size", POWERS),
        top_n=slider("top_n", "blocks listed", 1, MOST["top_n"]),
        num_initial=slider("num_initial", "first, forced", 0, MOST["num_initial"]),
        num_local=slider("num_local", "latest, forced", 0, MOST["num_local"]),
        window=slider("window", "window", 1, MOST["window"]),
        length=choice("length", "summary length", POWERS),
        stride=choice("stride", "summary stride", POWERS),
    )
    save, saved = ipywidgets.Button(description="Save as PNG"), ipywidgets.HTML()

    def on_click(_button: ipywidgets.Button) -> None:
        values = explorer.values
        show = values.pop("show")
        path = export(Settings(**values), show)
        saved.value = (
            '<span role="status" style="display:block;line-height:1.3;overflow-wrap:anywhere">'
            f"Saved as {path.name}</span>"
        )

    save.on_click(on_click)
    explorer.actions.children = (*explorer.actions.children, save, saved)
    return explorer


def limits(show: str, **values: object) -> Mapping[str, Sequence[int]]:
    """What each control may be, by its name: `masks.ranges`, and no more than a slider can tell
    apart."""
    allowed = ranges(Settings(**values))
    return {name: [x for x in each if x <= MOST.get(name, x)] for name, each in allowed.items()}


def idle(show: str, **values: object) -> Collection[str]:
    """The controls that change nothing, as what they set is not shown. The block size always
    counts: a summary's stride may not be longer."""
    return {
        "all branches": (),
        "selected": ("window",),
        "compressed": ("group", "top_n", "num_initial", "num_local", "window"),
        "sliding window": ("block_size", "top_n", "num_initial", "num_local", "length", "stride"),
    }[show]
